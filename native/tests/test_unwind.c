// ggml-vulkan throws C++ exceptions through the plug-in when the device fails. What was queued before must not be copied
// into memory of the abandoned graph (contract, point 6), and the next graph is an ordinary one.

#include "unwind_catch.h"
#include "world.h"

static void input_0(void * user_data) {
    world_input(user_data, 0, 0);
}

static void input_1(void * user_data) {
    world_input(user_data, 0, 1);
}

static void input_2_of_gpu_1(void * user_data) {
    world_input(user_data, 1, 2);
}

static void compute(void * user_data) {
    world_compute(user_data);
}

static struct ggml_backend * failing;

static void fail_second_device(struct ggml_backend * backend) {
    if (backend == failing) {
        unwind_throw(backend);
    }
}

// After an exception: nothing of the abandoned stage arrives, and a whole stage works.
static void check_recovers(struct world * w) {
    w->fake->before_get         = NULL;
    w->fake->before_synchronize = NULL;
    w->graph.n_reads            = 0;
    memset(w->fake->tensor_data(w->dst[0]), WORLD_POISON, WORLD_BYTES);
    for (int stage = 0; stage < 3; stage++) {
        world_fill(w, 0, 5, (uint8_t) (0x45 + stage));
        world_fill(w, 1, 6, (uint8_t) (0x85 + stage));
        world_input(w, 0, 5);
        world_input(w, 1, 6);
        world_compute(w);
        CHECK_SEEN(w, 5, 0x45 + stage);
        CHECK_SEEN(w, 6, 0x85 + stage);
        CHECK(world_is(w->fake->tensor_data(w->dst[0]), WORLD_POISON, WORLD_BYTES));
    }
    CHECK_INT(ggml_async_set_mode(w->host, GGML_ASYNC_MODE_OFF), GGML_ASYNC_OK);
    CHECK_INT(w->fake->backend_diff(w->cpu), 1u << 1);
    CHECK_INT(ggml_async_set_mode(w->host, GGML_ASYNC_MODE_ASYNC), GGML_ASYNC_OK);
}

static void a_device_that_throws_while_a_read_is_queued_leaves_no_copies(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    world_fill(&w, 0, 0, 0x31);
    world_input(&w, 0, 0);
    w.fake->before_get = unwind_throw;
    CHECK(unwind_catches(input_1, &w));
    check_recovers(&w);
    world_close(&w);
}

static void a_device_that_throws_at_the_first_read_leaves_no_copies(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    w.fake->before_get = unwind_throw;
    CHECK(unwind_catches(input_0, &w));
    check_recovers(&w);
    world_close(&w);
}

static void a_device_that_throws_in_the_drain_leaves_no_copies(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    world_fill(&w, 0, 0, 0x31);
    world_input(&w, 0, 0);
    w.fake->before_synchronize = unwind_throw;
    CHECK(unwind_catches(compute, &w));
    CHECK_INT(w.fake->n_computes, 0);
    check_recovers(&w);
    world_close(&w);
}

static void the_second_device_throwing_in_the_drain_leaves_no_copies_of_the_first(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    world_fill(&w, 0, 0, 0x31);
    world_input(&w, 0, 0);
    world_input(&w, 1, 1);
    failing = w.gpu[1];
    w.fake->before_synchronize = fail_second_device;
    CHECK(unwind_catches(compute, &w));
    CHECK_INT(w.fake->n_computes, 0);
    check_recovers(&w);
    world_close(&w);
}

// The second input is ggml's own to copy; its synchronize throws while the first one's read is queued.
static void a_device_that_throws_in_ggmls_own_copy_leaves_no_copies(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    w.fake->pinned[FAKE_GPU1] = FAKE_PINNED_NONE;
    world_fill(&w, 0, 0, 0x31);
    world_input(&w, 0, 0);
    failing = w.gpu[1];
    w.fake->before_synchronize = fail_second_device;
    CHECK(unwind_catches(input_2_of_gpu_1, &w));
    check_recovers(&w);
    world_close(&w);
}

static void a_failed_device_can_be_freed_and_its_stage_forgotten(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    world_fill(&w, 0, 0, 0x31);
    world_input(&w, 0, 0);
    w.fake->before_get = unwind_throw;
    CHECK(unwind_catches(input_1, &w));
    w.fake->before_get = NULL;
    world_free_backend(&w.gpu[0], w.fake);
    world_free_backend(&w.cpu, w.fake);
    w.graph.n_reads = 0;
    world_close(&w);
}

// A stage that was thrown away must not lend its start to the next one.
static void an_abandoned_stage_does_not_count(void) {
    struct world w;
    world_open(&w, 2, FAKE_GPU0);
    CHECK_INT(ggml_async_record_start(64), GGML_ASYNC_OK);
    world_input(&w, 0, 0);
    w.fake->before_get = unwind_throw;
    CHECK(unwind_catches(input_1, &w));
    w.fake->before_get = NULL;
    w.graph.n_reads    = 0;
    usleep(50000);
    world_fill(&w, 0, 3, 0x66);
    world_input(&w, 0, 3);
    world_compute(&w);
    CHECK_SEEN(&w, 3, 0x66);
    struct ggml_async_record records[16];
    CHECK_INT(ggml_async_record_read(records, 16), 2);
    CHECK_INT(records[1].kind, GGML_ASYNC_RECORD_STAGE);
    CHECK_INT(records[1].n_readbacks, 1);
    CHECK(records[1].duration_ns < 50000000);
    world_close(&w);
}

static uint8_t                   app_data[2][WORLD_BYTES];
static struct ggml_async_queue * app_queue;

static void app_read_1(void * user_data) {
    struct world * w = user_data;
    ggml_async_read(app_queue, w->gpu[0], w->src[0][1], app_data[1], 0, WORLD_BYTES);
}

// Whoever unwound may have freed the memory of the reads before it.
static void an_application_batch_that_throws_is_dropped_whole_and_not_counted(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    app_queue = ggml_async_queue_new(w.host);
    memset(app_data, WORLD_POISON, sizeof(app_data));
    world_fill(&w, 0, 0, 0x31);
    CHECK_INT(ggml_async_read(app_queue, w.gpu[0], w.src[0][0], app_data[0], 0, WORLD_BYTES), GGML_ASYNC_PATH_BOUNCE);
    w.fake->before_get = unwind_throw;
    CHECK(unwind_catches(app_read_1, &w));
    w.fake->before_get = NULL;
    CHECK_INT(ggml_async_wait(app_queue), 0);
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0], 1);
    CHECK(world_is(app_data, WORLD_POISON, sizeof(app_data)));
    app_read_1(&w);
    CHECK_INT(ggml_async_wait(app_queue), 1);
    ggml_async_queue_free(app_queue);
    world_close(&w);
}

static const struct test tests[] = {
    TEST(a_device_that_throws_while_a_read_is_queued_leaves_no_copies),
    TEST(a_device_that_throws_at_the_first_read_leaves_no_copies),
    TEST(a_device_that_throws_in_the_drain_leaves_no_copies),
    TEST(the_second_device_throwing_in_the_drain_leaves_no_copies_of_the_first),
    TEST(a_device_that_throws_in_ggmls_own_copy_leaves_no_copies),
    TEST(a_failed_device_can_be_freed_and_its_stage_forgotten),
    TEST(an_application_batch_that_throws_is_dropped_whole_and_not_counted),
    TEST(an_abandoned_stage_does_not_count),
};

TEST_MAIN(tests)
