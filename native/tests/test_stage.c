// The drain, whose pending reads it drains, and what happens when a backend goes first (contract, points 5 and 6).

#include "world.h"

#include <pthread.h>

static void a_plan_is_drained_before_it_computes(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    world_fill(&w, 0, 0, 0x51);
    world_input(&w, 0, 0);
    CHECK_INT(w.fake->plan_compute(w.cpu, &w.graph), 0);
    CHECK_SEEN(&w, 0, 0x51);
    CHECK_INT(w.fake->n_sync_copies, 0);
    CHECK_COUNTER(w.host, "stages", 1);
    world_close(&w);
}

static void each_source_is_synchronized_once_a_stage(void) {
    struct world w;
    world_open(&w, 3, FAKE_GPU0);
    for (int stage = 1; stage <= 4; stage++) {
        for (int i = 0; i < 9; i++) {
            world_fill(&w, i % 3, i, (uint8_t) (16*stage + i));
            world_input(&w, i % 3, i);
        }
        world_compute(&w);
        for (int i = 0; i < 9; i++) {
            CHECK_SEEN(&w, i, 16*stage + i);
        }
        for (int g = 0; g < 3; g++) {
            CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0 + g], stage);
        }
    }
    CHECK_COUNTER(w.host, "stages", 4);
    CHECK_COUNTER(w.host, "synchronizes", 12);
    CHECK_COUNTER(w.host, "readbacks", 36);
    CHECK_COUNTER(w.host, "readback_bytes", 36*WORLD_BYTES);
    CHECK_COUNTER(w.host, "cpu_computes", 4);
    CHECK_COUNTER(w.host, "device_computes", 36);
    world_close(&w);
}

static void a_compute_without_readbacks_synchronizes_nobody(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    world_fill(&w, 0, 0, 1);
    world_compute(&w);
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0], 0);
    CHECK_COUNTER(w.host, "stages", 0);
    CHECK_COUNTER(w.host, "cpu_computes", 1);
    world_close(&w);
}

// More inputs than a record array holds: none is lost.
static void forty_inputs_of_one_split_all_arrive(void) {
    struct world w;
    world_open(&w, 2, FAKE_GPU0);
    CHECK_INT(ggml_async_record_start(256), GGML_ASYNC_OK);
    for (int i = 0; i < WORLD_SLOTS; i++) {
        world_fill(&w, i % 2, i, (uint8_t) (i + 1));
        world_input(&w, i % 2, i);
    }
    world_compute(&w);
    for (int i = 0; i < WORLD_SLOTS; i++) {
        CHECK_SEEN(&w, i, i + 1);
    }
    CHECK_COUNTER(w.host, "readbacks", WORLD_SLOTS);
    world_close(&w);
}

static void pending_reads_belong_to_their_destination(void) {
    struct world w;
    world_open(&w, 2, FAKE_GPU0);
    struct ggml_backend * first = w.cpu;
    struct ggml_backend * other = w.fake->backend_new(FAKE_CPU);
    struct ggml_cgraph    graph = { .n_reads = 1, .reads = { w.dst[7] }, .seen = { w.seen[7] } };
    world_fill(&w, 0, 0, 0x10);
    world_fill(&w, 1, 7, 0x17);
    world_input(&w, 0, 0);
    w.cpu = other;
    memset(w.fake->tensor_data(w.dst[7]), WORLD_POISON, WORLD_BYTES);
    w.fake->input(w.gpu[1], other, w.src[1][7], w.dst[7]);
    w.cpu = first;
    world_fill(&w, 0, 1, 0x11);
    world_input(&w, 0, 1);
    // closing one leaves the other's reads alone
    CHECK_INT(w.fake->compute(other, &graph), 0);
    CHECK_SEEN(&w, 7, 0x17);
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0], 0);
    CHECK(world_is(w.fake->tensor_data(w.dst[0]), WORLD_POISON, WORLD_BYTES));
    world_compute(&w);
    CHECK_SEEN(&w, 0, 0x10);
    CHECK_SEEN(&w, 1, 0x11);
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0], 1);
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU1], 1);
    CHECK_COUNTER(w.host, "stages", 2);
    w.fake->backend_free(other);
    world_close(&w);
}

static void * one_of_two_threads(void * arg) {
    struct world * w = arg;
    for (int i = 0; i < 200; i++) {
        world_fill(w, 0, i % 8, (uint8_t) (i + 1));
        world_input(w, 0, i % 8);
        world_compute(w);
        CHECK_SEEN(w, i % 8, i + 1);
    }
    return NULL;
}

static void two_threads_with_their_own_backends_do_not_meet(void) {
    struct world a, b = { 0 };
    world_open(&a, 1, FAKE_GPU0);
    b.fake = a.fake;
    b.host = a.host;
    world_backends(&b, 1, WORLD_UNPINNED);
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, one_of_two_threads, &a);
    pthread_create(&threads[1], NULL, one_of_two_threads, &b);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    CHECK_COUNTER(a.host, "direct", 200);
    CHECK_COUNTER(a.host, "bounce", 200);
    CHECK_COUNTER(a.host, "stages", 400);
    for (int g = 0; g < 1; g++) {
        world_free_backend(&b.gpu[g], b.fake);
    }
    world_free_backend(&b.cpu, b.fake);
    struct fake * fake = a.fake;
    for (int i = 0; i < WORLD_SLOTS; i++) {
        fake->tensor_free(b.src[0][i]);
        fake->tensor_free(b.dst[i]);
    }
    fake->buffer_free(b.gpu_buffer[0]);
    fake->buffer_free(b.cpu_buffer);
    world_close(&a);
}

static void a_source_freed_with_reads_queued_is_synchronized_and_its_copies_dropped(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    world_fill(&w, 0, 0, 0x61);
    world_fill(&w, 1, 1, 0x62);
    world_input(&w, 0, 0);
    world_input(&w, 1, 1);
    world_free_backend(&w.gpu[0], w.fake);
    CHECK_INT(w.fake->n_gets_lost, 0);
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0], 1);
    CHECK_COUNTER(w.host, "dropped_reads", 1);
    CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU0], 0);
    world_compute(&w);
    CHECK_SEEN(&w, 0, WORLD_POISON);
    CHECK_SEEN(&w, 1, 0x62);
    // and the next stage is an ordinary one
    world_fill(&w, 1, 1, 0x63);
    world_input(&w, 1, 1);
    world_compute(&w);
    CHECK_SEEN(&w, 1, 0x63);
    world_close(&w);
}

static void a_source_freed_with_direct_reads_queued_leaves_nothing_behind(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    world_fill(&w, 0, 0, 0x61);
    world_input(&w, 0, 0);
    world_free_backend(&w.gpu[0], w.fake);
    CHECK_INT(w.fake->n_gets_lost, 0);
    world_compute(&w);
    world_close(&w);
}

static void a_freed_source_at_the_same_address_is_a_new_one(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    for (int i = 0; i < 50; i++) {
        world_fill(&w, 0, 0, (uint8_t) i);
        world_input(&w, 0, 0);
        world_free_backend(&w.gpu[0], w.fake);
        w.gpu[0] = w.fake->backend_new(FAKE_GPU0);
        world_fill(&w, 0, 1, (uint8_t) (i + 100));
        world_input(&w, 0, 1);
        world_compute(&w);
        CHECK_SEEN(&w, 0, WORLD_POISON);
        CHECK_SEEN(&w, 1, i + 100);
    }
    world_close(&w);
}

static void a_destination_freed_with_reads_queued_waits_for_them(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    world_fill(&w, 0, 0, 0x61);
    world_input(&w, 0, 0);
    world_input(&w, 1, 1);
    world_free_backend(&w.cpu, w.fake);
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0], 1);
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU1], 1);
    CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU0], 0);
    CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU1], 0);
    CHECK_COUNTER(w.host, "dropped_reads", 2);
    // the sources are free of it: nothing to drop, nothing to wait for
    world_free_backend(&w.gpu[0], w.fake);
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0], 1);
    w.graph.n_reads = 0;
    world_close(&w);
}

static void bounce_buffers_go_with_their_devices_last_backend(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    struct ggml_backend * second = w.fake->backend_new(FAKE_GPU0);
    world_input(&w, 0, 0);
    world_input(&w, 1, 1);
    world_compute(&w);
    CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU0], 1);
    world_free_backend(&w.gpu[0], w.fake);
    CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU0], 1);
    w.fake->backend_free(second);
    CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU0], 0);
    CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU1], 1);
    // the destination lives on and gets new ones for a new backend
    w.gpu[0] = w.fake->backend_new(FAKE_GPU0);
    world_fill(&w, 0, 0, 0x65);
    world_input(&w, 0, 0);
    world_compute(&w);
    CHECK_SEEN(&w, 0, 0x65);
    CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU0], 1);
    world_close(&w);
}

static void a_mode_set_in_the_middle_of_a_stage_waits_for_its_end(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    for (int mode = GGML_ASYNC_MODE_OFF; mode <= GGML_ASYNC_MODE_STOCK; mode++) {
        CHECK_INT(ggml_async_set_mode(w.host, GGML_ASYNC_MODE_ASYNC), GGML_ASYNC_OK);
        const int copies = w.fake->n_sync_copies;
        world_fill(&w, 0, 0, (uint8_t) (0x70 + mode));
        world_input(&w, 0, 0);
        CHECK_INT(ggml_async_set_mode(w.host, mode), GGML_ASYNC_OK);
        CHECK(!w.fake->slot_is_null(w.cpu, "cpy_tensor_async"));
        world_fill(&w, 0, 1, (uint8_t) (0x78 + mode));
        world_input(&w, 0, 1);
        CHECK_INT(w.fake->n_sync_copies, copies);
        world_compute(&w);
        CHECK_SEEN(&w, 0, 0x70 + mode);
        CHECK_SEEN(&w, 1, 0x78 + mode);
        CHECK_INT(w.fake->slot_is_null(w.cpu, "cpy_tensor_async"), mode == GGML_ASYNC_MODE_OFF);
        world_input(&w, 0, 0);
        CHECK_INT(w.fake->n_sync_copies, copies + 1);
        world_compute(&w);
        CHECK_SEEN(&w, 0, 0x70 + mode);
    }
    world_close(&w);
}

static void modes_can_change_between_any_two_stages(void) {
    struct world w;
    world_open(&w, 2, FAKE_GPU0);
    for (int i = 0; i < 60; i++) {
        CHECK_INT(ggml_async_set_mode(w.host, i*7 % 3), GGML_ASYNC_OK);
        world_fill(&w, 0, 0, (uint8_t) i);
        world_fill(&w, 1, 1, (uint8_t) (i + 90));
        world_input(&w, 0, 0);
        world_input(&w, 1, 1);
        world_compute(&w);
        CHECK_SEEN(&w, 0, i);
        CHECK_SEEN(&w, 1, i + 90);
    }
    CHECK_COUNTER(w.host, "stages", 40);
    CHECK_COUNTER(w.host, "direct", 20);
    CHECK_COUNTER(w.host, "bounce", 20);
    CHECK_COUNTER(w.host, "stock", 40);
    world_close(&w);
}

static void off_leaves_only_free_and_init_backend_changed(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    CHECK_INT(w.fake->backend_diff(w.cpu),    1u << 1 | 1u << 6 | 1u << 11 | 1u << 12);
    CHECK_INT(w.fake->backend_diff(w.gpu[0]), 1u << 1 | 1u << 2 | 1u << 6 | 1u << 7 | 1u << 12);
    CHECK_INT(ggml_async_set_mode(w.host, GGML_ASYNC_MODE_OFF), GGML_ASYNC_OK);
    CHECK_INT(w.fake->backend_diff(w.cpu),    1u << 1);
    CHECK_INT(w.fake->backend_diff(w.gpu[0]), 1u << 1);
    struct ggml_backend * cpu = w.fake->backend_new(FAKE_CPU);
    CHECK_INT(w.fake->backend_diff(cpu), 1u << 1);
    w.fake->backend_free(cpu);
    for (int i = 0; i < FAKE_LATE; i++) {
        CHECK_INT(w.fake->device_diff(i), 1u << 5);
    }
    world_fill(&w, 0, 0, 0x12);
    world_input(&w, 0, 0);
    world_compute(&w);
    CHECK_SEEN(&w, 0, 0x12);
    CHECK_COUNTER(w.host, "cpu_computes", 0);
    CHECK_INT(w.fake->n_sync_copies, 1);
    CHECK_INT(ggml_async_set_mode(w.host, GGML_ASYNC_MODE_ASYNC), GGML_ASYNC_OK);
    world_input(&w, 0, 0);
    world_compute(&w);
    CHECK_SEEN(&w, 0, 0x12);
    CHECK_COUNTER(w.host, "direct", 1);
    world_close(&w);
}

static void a_worker_that_reads_late_is_waited_for(void) {
    struct world w;
    world_log_capture();
    memset(&w, 0, sizeof(w));
    w.fake = world_fake("api2", 0);
    w.fake->threaded = true;
    w.fake->delay_us = 2000;
    CHECK(w.fake->load_plugin(PLUGIN_PATH));
    world_backends(&w, 2, FAKE_GPU0);
    for (int i = 0; i < 6; i++) {
        world_fill(&w, i % 2, i, (uint8_t) (i + 1));
        world_input(&w, i % 2, i);
    }
    world_compute(&w);
    for (int i = 0; i < 6; i++) {
        CHECK_SEEN(&w, i, i + 1);
    }
    CHECK_INT(w.fake->n_sync_copies, 0);
    world_close(&w);
}

static const struct test tests[] = {
    TEST(a_plan_is_drained_before_it_computes),
    TEST(each_source_is_synchronized_once_a_stage),
    TEST(a_compute_without_readbacks_synchronizes_nobody),
    TEST(forty_inputs_of_one_split_all_arrive),
    TEST(pending_reads_belong_to_their_destination),
    TEST(two_threads_with_their_own_backends_do_not_meet),
    TEST(a_source_freed_with_reads_queued_is_synchronized_and_its_copies_dropped),
    TEST(a_source_freed_with_direct_reads_queued_leaves_nothing_behind),
    TEST(a_freed_source_at_the_same_address_is_a_new_one),
    TEST(a_destination_freed_with_reads_queued_waits_for_them),
    TEST(bounce_buffers_go_with_their_devices_last_backend),
    TEST(a_mode_set_in_the_middle_of_a_stage_waits_for_its_end),
    TEST(modes_can_change_between_any_two_stages),
    TEST(off_leaves_only_free_and_init_backend_changed),
    TEST(a_worker_that_reads_late_is_waited_for),
};

TEST_MAIN(tests)
