// What the plug-in tells the Vulkan layer about each thread, so that waits get their cause.

#include "world.h"

#include <dlfcn.h>

static const char * (*layer_log)(void);
static void (*layer_clear)(void);

static void open_with_layer(struct world * w, int n_gpus, int mode) {
    void * layer = dlopen(FAKE_LAYER_PATH, RTLD_NOW | RTLD_LOCAL);
    CHECK(layer);
    *(void **) &layer_log   = dlsym(layer, "fake_layer_log");
    *(void **) &layer_clear = dlsym(layer, "fake_layer_clear");
    world_open(w, n_gpus, FAKE_GPU0);
    ggml_async_set_mode(w->host, mode);
    layer_clear();
}

static void compute(struct ggml_backend * backend, struct world * w) {
    struct ggml_cgraph nothing = { 0 };
    CHECK_INT(w->fake->compute(backend, &nothing), 0);
}

static void token(struct world * w) {
    compute(w->cpu, w);                         // the embedding
    w->fake->synchronize(w->gpu[0]);            // the scheduler, before it copies a user's input
    world_fill(w, 0, 0, 1);
    world_input(w, 0, 0);
    world_input(w, 0, 1);
    world_compute(w);
    w->fake->input(w->cpu, w->gpu[0], w->dst[3], w->src[0][3]);
    compute(w->gpu[0], w);
    w->fake->synchronize(w->gpu[0]);            // the end
}

static void check_a_token(int mode) {
    struct world w;
    open_with_layer(&w, 1, mode);
    for (int i = 1; i <= 2; i++) {
        char expected[256];
        token(&w);
        snprintf(expected, sizeof(expected), "upload compute elsewhere readback:%d elsewhere upload elsewhere compute elsewhere token elsewhere ", i);
        CHECK_TEXT(layer_log(), expected);
        layer_clear();
    }
    CHECK_COUNTER(w.host, "tokens", 2);
    world_close(&w);
}

static void a_token_in_the_async_arm(void) {
    check_a_token(GGML_ASYNC_MODE_ASYNC);
}

static void a_token_in_the_stock_arm(void) {
    check_a_token(GGML_ASYNC_MODE_STOCK);
}

static void nothing_is_told_in_mode_off(void) {
    struct world w;
    open_with_layer(&w, 1, GGML_ASYNC_MODE_OFF);
    token(&w);
    CHECK_TEXT(layer_log(), "");
    CHECK_COUNTER(w.host, "tokens", 0);
    world_close(&w);
}

static void a_second_device_s_wait_at_the_end_is_the_token_s_too(void) {
    struct world w;
    open_with_layer(&w, 2, GGML_ASYNC_MODE_ASYNC);
    compute(w.gpu[0], &w);
    compute(w.gpu[1], &w);
    w.fake->synchronize(w.gpu[0]);
    w.fake->synchronize(w.gpu[1]);
    CHECK_TEXT(layer_log(), "compute elsewhere compute elsewhere token elsewhere token elsewhere ");
    CHECK_COUNTER(w.host, "tokens", 1);
    world_close(&w);
}

// A batch of 32 tokens and more: the experts that it needs are read and their weights sent to the device.
static void a_wait_before_weights_are_sent_is_no_end(void) {
    struct world w;
    open_with_layer(&w, 1, GGML_ASYNC_MODE_ASYNC);
    for (int i = 0; i < 2; i++) {
        compute(w.gpu[0], &w);
        w.fake->synchronize(w.gpu[0]);      // the ids
        w.fake->set_async(w.gpu[0], w.src[0][2], w.fake->tensor_data(w.dst[0]), 0, 100);
        compute(w.gpu[0], &w);
        w.fake->synchronize(w.gpu[0]);
    }
    CHECK_COUNTER(w.host, "tokens", 4);
    CHECK_COUNTER(w.host, "tokens_resumed", 2);
    world_close(&w);
}

static const struct test tests[] = {
    TEST(a_token_in_the_async_arm),
    TEST(a_token_in_the_stock_arm),
    TEST(nothing_is_told_in_mode_off),
    TEST(a_wait_before_weights_are_sent_is_no_end),
    TEST(a_second_device_s_wait_at_the_end_is_the_token_s_too),
};

TEST_MAIN(tests)
