// Giving the host back, with backends alive, stages open and reads queued (contract, point 6).

#include "world.h"

static void check_untouched(struct world * w) {
    for (int i = 0; i < FAKE_N_DEVICES; i++) {
        CHECK_INT(w->fake->device_diff(i), 0);
    }
    CHECK_INT(w->fake->backend_diff(w->cpu), 0);
    for (int g = 0; g < WORLD_GPUS; g++) {
        CHECK(!w->gpu[g] || w->fake->backend_diff(w->gpu[g]) == 0);
    }
}

static int attached(int host) {
    struct ggml_async_host_info info;
    CHECK_INT(ggml_async_host_get(host, &info, sizeof(info)), GGML_ASYNC_OK);
    return info.attached;
}

static int live_backends(int host) {
    struct ggml_async_host_info info;
    CHECK_INT(ggml_async_host_get(host, &info, sizeof(info)), GGML_ASYNC_OK);
    return info.n_backends;
}

static void detach_restores_every_pointer_with_backends_alive(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    world_fill(&w, 0, 0, 0x12);
    world_input(&w, 0, 0);
    world_input(&w, 1, 1);
    world_compute(&w);
    CHECK_INT(live_backends(w.host), 3);
    CHECK_INT(ggml_async_detach(w.host), GGML_ASYNC_OK);
    CHECK_INT(attached(w.host), 0);
    CHECK_INT(live_backends(w.host), 0);
    check_untouched(&w);
    // what we had allocated in the host is the host's again too
    CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU0], 0);
    CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU1], 0);
    world_input(&w, 0, 0);
    world_compute(&w);
    CHECK_SEEN(&w, 0, 0x12);
    CHECK_COUNTER(w.host, "stages", 1);
    struct ggml_backend * cpu = w.fake->backend_new(FAKE_CPU);
    CHECK_INT(w.fake->backend_diff(cpu), 0);
    w.fake->backend_free(cpu);
    CHECK_INT(ggml_async_detach(w.host), GGML_ASYNC_OK);
    world_close(&w);
}

static void detach_in_every_mode_restores_every_pointer(void) {
    for (int mode = 0; mode < 3; mode++) {
        struct world w;
        world_open(&w, 1, FAKE_GPU0);
        CHECK_INT(ggml_async_set_mode(w.host, mode), GGML_ASYNC_OK);
        CHECK_INT(ggml_async_detach(w.host), GGML_ASYNC_OK);
        check_untouched(&w);
        CHECK_INT(ggml_async_set_mode(w.host, GGML_ASYNC_MODE_ASYNC), GGML_ASYNC_OK);
        check_untouched(&w);
        world_close(&w);
    }
}

static void detach_with_a_stage_open_is_busy_and_follows_at_its_end(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    world_fill(&w, 0, 0, 0x12);
    world_fill(&w, 1, 1, 0x13);
    world_input(&w, 0, 0);
    CHECK_INT(ggml_async_detach(w.host), GGML_ASYNC_ERR_BUSY);
    CHECK(strstr(ggml_async_last_error(), "open"));
    world_input(&w, 1, 1);
    world_compute(&w);
    CHECK_SEEN(&w, 0, 0x12);
    CHECK_SEEN(&w, 1, 0x13);
    check_untouched(&w);
    CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU0], 0);
    CHECK_INT(ggml_async_detach(w.host), GGML_ASYNC_OK);
    world_close(&w);
}

// The source must not be let go while a queue holds reads of it: its end would go unseen.
static void a_source_freed_after_detach_with_reads_queued_is_still_seen(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    world_fill(&w, 0, 0, 0x12);
    world_input(&w, 0, 0);
    CHECK_INT(ggml_async_detach(w.host), GGML_ASYNC_ERR_BUSY);
    world_free_backend(&w.gpu[0], w.fake);
    CHECK_INT(w.fake->n_gets_lost, 0);
    world_compute(&w);
    CHECK_SEEN(&w, 0, WORLD_POISON);
    check_untouched(&w);
    world_close(&w);
}

static void an_application_read_queued_over_a_detach_completes(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    uint8_t data[WORLD_BYTES];
    memset(data, WORLD_POISON, sizeof(data));
    struct ggml_async_queue * queue = ggml_async_queue_new(w.host);
    world_fill(&w, 0, 0, 0x12);
    CHECK_INT(ggml_async_read(queue, w.gpu[0], w.src[0][0], data, 0, sizeof(data)), GGML_ASYNC_PATH_BOUNCE);
    CHECK_INT(ggml_async_detach(w.host), GGML_ASYNC_ERR_BUSY);
    CHECK_INT(ggml_async_wait(queue), 1);
    CHECK(world_is(data, 0x12, sizeof(data)));
    check_untouched(&w);
    ggml_async_queue_free(queue);
    world_close(&w);
}

static void attaching_again_after_a_detach_works(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    for (int i = 0; i < 5; i++) {
        CHECK_INT(ggml_async_detach(w.host), GGML_ASYNC_OK);
        CHECK_INT(ggml_async_attach(world_path("api2")), w.host);
        CHECK_INT(attached(w.host), 1);
        // the source lived through it and is met again; destinations are hooked when they are created
        world_free_backend(&w.cpu, w.fake);
        w.cpu = w.fake->backend_new(FAKE_CPU);
        world_fill(&w, 0, 0, (uint8_t) (i + 1));
        world_input(&w, 0, 0);
        world_compute(&w);
        CHECK_SEEN(&w, 0, i + 1);
        CHECK_COUNTER(w.host, "bounce", i + 1);
    }
    CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU0], 1);
    world_close(&w);
}

static void a_backend_freed_while_detached_is_forgotten(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    for (int i = 0; i < 20; i++) {
        world_fill(&w, 0, 0, (uint8_t) (i + 1));
        world_input(&w, 0, 0);
        world_compute(&w);
        CHECK_SEEN(&w, 0, i + 1);
        CHECK_INT(ggml_async_detach(w.host), GGML_ASYNC_OK);
        world_free_backend(&w.gpu[0], w.fake);
        world_free_backend(&w.cpu, w.fake);
        CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU0], 0);
        CHECK_INT(ggml_async_attach(world_path("api2")), w.host);
        // most likely at the same addresses
        w.cpu    = w.fake->backend_new(FAKE_CPU);
        w.gpu[0] = w.fake->backend_new(FAKE_GPU0);
        CHECK_INT(live_backends(w.host), 2);
    }
    CHECK_COUNTER(w.host, "bounce", 20);
    world_close(&w);
}

static void a_host_is_detached_without_touching_the_other(void) {
    struct world a, b = { 0 };
    world_open(&a, 1, FAKE_GPU0);
    b.fake = world_fake("api3", 0);
    CHECK(b.fake->load_plugin(PLUGIN_PATH));
    b.host = ggml_async_attach(world_path("api3"));
    world_backends(&b, 1, FAKE_GPU0);
    CHECK_INT(ggml_async_detach(a.host), GGML_ASYNC_OK);
    world_fill(&b, 0, 0, 0x66);
    world_input(&b, 0, 0);
    world_compute(&b);
    CHECK_SEEN(&b, 0, 0x66);
    CHECK_COUNTER(b.host, "direct", 1);
    world_close(&a);
    world_close(&b);
}

static const struct test tests[] = {
    TEST(detach_restores_every_pointer_with_backends_alive),
    TEST(detach_in_every_mode_restores_every_pointer),
    TEST(detach_with_a_stage_open_is_busy_and_follows_at_its_end),
    TEST(a_source_freed_after_detach_with_reads_queued_is_still_seen),
    TEST(an_application_read_queued_over_a_detach_completes),
    TEST(attaching_again_after_a_detach_works),
    TEST(a_backend_freed_while_detached_is_forgotten),
    TEST(a_host_is_detached_without_touching_the_other),
};

TEST_MAIN(tests)
