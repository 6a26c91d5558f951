// What is measured, in both arms, and how it is handed out (contract, point 8).

#include "world.h"

static struct ggml_async_record records[4096];

static void record_on(struct world * w, int mode) {
    CHECK_INT(ggml_async_set_mode(w->host, mode), GGML_ASYNC_OK);
    CHECK_INT(ggml_async_record_start(1024), GGML_ASYNC_OK);
}

static void the_stock_arm_is_ggmls_own_path_timed_from_outside(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    record_on(&w, GGML_ASYNC_MODE_STOCK);
    w.fake->delay_us = 3000;
    for (int i = 0; i < 3; i++) {
        world_fill(&w, 0, i, (uint8_t) (i + 1));
    }
    for (int i = 0; i < 3; i++) {
        world_input(&w, 0, i);
        // ggml has copied: nothing of ours is under way
        CHECK(world_is(w.fake->tensor_data(w.dst[i]), (uint8_t) (i + 1), WORLD_BYTES));
    }
    world_compute(&w);
    CHECK_INT(w.fake->n_gets[FAKE_GPU0], 0);
    CHECK_INT(w.fake->n_sync_copies, 3);
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0], 3);
    CHECK_INT(w.fake->n_pinned_allocs, 1);

    CHECK_INT(ggml_async_record_read(records, 4096), 4);
    int64_t waits = 0, copies = 0;
    for (int i = 0; i < 3; i++) {
        const struct ggml_async_record * r = &records[i];
        CHECK_INT(r->kind, GGML_ASYNC_RECORD_READBACK);
        CHECK_INT(r->mode, GGML_ASYNC_MODE_STOCK);
        CHECK_INT(r->path, GGML_ASYNC_PATH_STOCK);
        CHECK_INT(r->decline, 0);
        CHECK_INT(r->layer, i);
        CHECK_INT(r->bytes, WORLD_BYTES);
        CHECK_INT(r->issue_ns, -1);
        CHECK(r->wait_ns >= 0 && r->copy_ns >= 0);
        CHECK(r->duration_ns >= r->wait_ns + r->copy_ns);
        CHECK(i == 0 || r->t_ns >= records[i - 1].t_ns + records[i - 1].duration_ns);
        waits  += r->wait_ns;
        copies += r->copy_ns;
    }
    const struct ggml_async_record * stage = &records[3];
    CHECK_INT(stage->kind, GGML_ASYNC_RECORD_STAGE);
    CHECK_INT(stage->mode, GGML_ASYNC_MODE_STOCK);
    CHECK_INT(stage->n_readbacks, 3);
    CHECK_INT(stage->n_sync, 3);
    CHECK_INT(stage->issue_ns, -1);
    CHECK_INT(stage->wait_ns, waits);
    CHECK_INT(stage->copy_ns, copies);
    CHECK_INT(stage->device_wait_ns, records[0].wait_ns);
    CHECK(stage->device_wait_ns >= 3000000);
    CHECK(records[1].wait_ns < 3000000);
    CHECK(stage->duration_ns >= waits + copies);
    CHECK_INT(stage->t_ns, records[0].t_ns);
    CHECK_COUNTER(w.host, "stock", 3);
    CHECK_COUNTER(w.host, "stages", 1);
    CHECK_COUNTER(w.host, "stage_ns", stage->duration_ns);
    CHECK_COUNTER(w.host, "wait_ns", waits);
    CHECK_COUNTER(w.host, "copy_ns", copies);
    CHECK_COUNTER(w.host, "device_wait_ns", stage->device_wait_ns);
    CHECK_COUNTER(w.host, "synchronizes", 3);
    CHECK_COUNTER(w.host, "issue_ns", 0);
    world_close(&w);
}

static void async_records_carry_issue_wait_and_path(void) {
    struct world w;
    world_open(&w, 2, FAKE_GPU0);
    record_on(&w, GGML_ASYNC_MODE_ASYNC);
    w.fake->delay_us = 2000;
    world_fill(&w, 0, 4, 0x10);
    world_fill(&w, 1, 9, 0x20);
    world_input(&w, 0, 4);
    world_input(&w, 1, 9);
    world_compute(&w);
    CHECK_INT(ggml_async_record_read(records, 4096), 3);
    CHECK_INT(records[0].path, GGML_ASYNC_PATH_DIRECT);
    CHECK_INT(records[0].layer, 4);
    CHECK_INT(records[0].device, 0);
    CHECK_TEXT(records[0].name, "ffn_norm-4");
    CHECK_INT(records[0].copy_ns, -1);
    CHECK_INT(records[1].path, GGML_ASYNC_PATH_BOUNCE);
    CHECK_INT(records[1].device, 1);
    CHECK_INT(records[1].layer, 9);
    CHECK(records[1].copy_ns >= 0);
    for (int i = 0; i < 2; i++) {
        CHECK_INT(records[i].host, w.host);
        CHECK_INT(records[i].stage, records[2].stage);
        CHECK(records[i].issue_ns >= 0 && records[i].wait_ns >= 2000000);
        CHECK_INT(records[i].duration_ns, records[i].issue_ns + records[i].wait_ns);
        CHECK_INT(records[i].device_wait_ns, -1);
        CHECK(records[i].thread != 0);
    }
    const struct ggml_async_record * stage = &records[2];
    CHECK_INT(stage->kind, GGML_ASYNC_RECORD_STAGE);
    CHECK_INT(stage->n_readbacks, 2);
    CHECK_INT(stage->n_sync, 2);
    CHECK_INT(stage->bytes, 2*WORLD_BYTES);
    CHECK_INT(stage->issue_ns, records[0].issue_ns + records[1].issue_ns);
    CHECK_INT(stage->wait_ns, records[0].wait_ns + records[1].wait_ns);
    CHECK_INT(stage->copy_ns, records[1].copy_ns);
    CHECK_INT(stage->device_wait_ns, -1);
    CHECK(stage->duration_ns >= stage->wait_ns + stage->issue_ns);
    CHECK_COUNTER(w.host, "issue_ns", stage->issue_ns);
    CHECK_COUNTER(w.host, "wait_ns", stage->wait_ns);
    CHECK_COUNTER(w.host, "copy_ns", stage->copy_ns);
    world_close(&w);
}

static void the_copy_outs_are_counted_without_records_too(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    for (int i = 0; i < 200; i++) {
        world_input(&w, 0, 0);
        world_compute(&w);
    }
    CHECK(world_counter(w.host, "copy_ns") > 0);
    world_close(&w);
}

static void a_declined_readback_names_its_reason(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    w.fake->pinned[FAKE_GPU0] = FAKE_PINNED_NONE;
    record_on(&w, GGML_ASYNC_MODE_ASYNC);
    world_input(&w, 0, 0);
    world_compute(&w);
    CHECK_INT(ggml_async_record_read(records, 4096), 2);
    CHECK_INT(records[0].mode, GGML_ASYNC_MODE_ASYNC);
    CHECK_INT(records[0].path, GGML_ASYNC_PATH_STOCK);
    CHECK_TEXT(ggml_async_decline_name((int) records[0].decline), "no_pinned_memory");
    CHECK(records[0].wait_ns >= 0 && records[0].copy_ns >= 0);
    CHECK_INT(records[1].n_sync, 1);
    world_close(&w);
}

// The source was freed before the drain: nobody waited for the read, and a time that was not measured is -1.
static void a_dropped_read_has_no_wait(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    record_on(&w, GGML_ASYNC_MODE_ASYNC);
    w.fake->delay_us = 1000;
    world_input(&w, 0, 0);
    world_input(&w, 1, 1);
    world_free_backend(&w.gpu[0], w.fake);
    world_compute(&w);
    CHECK_INT(ggml_async_record_read(records, 4096), 3);
    CHECK_INT(records[0].wait_ns, -1);
    CHECK_INT(records[0].copy_ns, -1);
    CHECK(records[1].wait_ns >= 1000000);
    CHECK_INT(records[2].n_sync, 1);
    CHECK_INT(records[2].wait_ns, records[1].wait_ns);
    world_close(&w);
}

static void stages_are_numbered_within_their_backend(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    record_on(&w, GGML_ASYNC_MODE_ASYNC);
    for (int i = 0; i < 5; i++) {
        world_input(&w, 0, i);
        world_compute(&w);
    }
    CHECK_INT(ggml_async_record_read(records, 4096), 10);
    for (int i = 0; i < 10; i += 2) {
        CHECK_INT(records[i].stage, records[0].stage + (uint32_t) i/2);
        CHECK_INT(records[i + 1].stage, records[i].stage);
        CHECK_INT(records[i + 1].kind, GGML_ASYNC_RECORD_STAGE);
    }
    world_close(&w);
}

static void a_long_name_is_cut_at_63_bytes(void) {
    world_log_capture();
    struct world w = { 0 };
    w.fake = world_fake("long-names", 0);
    CHECK(w.fake->load_plugin(PLUGIN_PATH));
    world_backends(&w, 1, FAKE_GPU0);
    CHECK_INT(ggml_async_record_start(64), GGML_ASYNC_OK);
    char name[101];
    memset(name, 'n', 100);
    memcpy(name + 97, "-12", 4);
    struct ggml_tensor * src = w.fake->tensor_new(w.gpu_buffer[0], name, 0, WORLD_BYTES/4, 1);
    w.fake->input(w.gpu[0], w.cpu, src, w.dst[0]);
    world_compute(&w);
    CHECK_INT(ggml_async_record_read(records, 4096), 2);
    CHECK_INT(strlen(records[0].name), 63);
    CHECK(!memcmp(records[0].name, name, 63));
    CHECK_INT(records[0].layer, -1);
    w.fake->tensor_free(src);
    world_close(&w);
}

static void the_layer_is_the_number_behind_the_last_dash(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    record_on(&w, GGML_ASYNC_MODE_ASYNC);
    static const struct { const char * name; int layer; } cases[] = {
        { "ffn_moe_topk-12 (view)", 12 }, { "a-b-7", 7 }, { "result_norm", -1 }, { "", -1 }, { "x-", -1 }, { "x-y", -1 },
        { "l-99999999999999999999", -1 },
    };
    const int n = sizeof(cases)/sizeof(cases[0]);
    for (int i = 0; i < n; i++) {
        struct ggml_tensor * src = w.fake->tensor_new(w.gpu_buffer[0], cases[i].name, 0, WORLD_BYTES/4, 1);
        w.fake->input(w.gpu[0], w.cpu, src, w.dst[0]);
        w.fake->tensor_free(src);
    }
    world_compute(&w);
    CHECK_INT(ggml_async_record_read(records, 4096), n + 1);
    for (int i = 0; i < n; i++) {
        CHECK_TEXT(records[i].name, cases[i].name);
        CHECK_INT(records[i].layer, cases[i].layer);
    }
    world_close(&w);
}

static void a_full_ring_drops_and_counts(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    CHECK_INT(ggml_async_record_start(1), GGML_ASYNC_OK);   // rounded up to 64
    for (int i = 0; i < 100; i++) {
        world_input(&w, 0, 0);
        world_compute(&w);
    }
    CHECK_INT(ggml_async_record_dropped(), 200 - 64);
    CHECK_INT(ggml_async_record_read(records, 10), 10);
    CHECK_INT(ggml_async_record_read(records + 10, 4096), 54);
    for (int i = 0; i < 64; i += 2) {
        CHECK_INT(records[i].kind, GGML_ASYNC_RECORD_READBACK);
        CHECK_INT(records[i].stage, records[0].stage + (uint32_t) i/2);
    }
    world_input(&w, 0, 0);
    world_compute(&w);
    CHECK_INT(ggml_async_record_stop(), GGML_ASYNC_OK);
    world_input(&w, 0, 0);
    world_compute(&w);
    CHECK_INT(ggml_async_record_read(records, 4096), 2);
    CHECK_INT(ggml_async_record_start(64), GGML_ASYNC_OK);
    CHECK_INT(ggml_async_record_dropped(), 0);
    CHECK_INT(ggml_async_record_read(records, 4096), 0);
    CHECK_INT(ggml_async_record_start(300), GGML_ASYNC_OK);
    for (int i = 0; i < 200; i++) {
        world_input(&w, 0, 0);
        world_compute(&w);
    }
    CHECK_INT(ggml_async_record_read(records, 4096), 400);
    CHECK_INT(ggml_async_record_dropped(), 0);
    world_close(&w);
}

static void bad_record_arguments_are_errors(void) {
    CHECK_INT(ggml_async_record_read(records, 1), 0);
    CHECK_INT(ggml_async_record_start(0), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(ggml_async_record_start(SIZE_MAX), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(ggml_async_record_read(NULL, 1), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(ggml_async_record_read(records, -1), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(sizeof(struct ggml_async_record), 176);
}

// CPU -> device, as the scheduler does it for a device split's input.
static void check_upload(bool queued) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    w.fake->queue_uploads = queued;
    record_on(&w, GGML_ASYNC_MODE_STOCK);
    memset(w.fake->tensor_data(w.dst[3]), 0x29, WORLD_BYTES);
    memset(w.fake->tensor_data(w.src[0][3]), WORLD_POISON, WORLD_BYTES);
    w.fake->input(w.cpu, w.gpu[0], w.dst[3], w.src[0][3]);
    struct ggml_cgraph nothing = { 0 };
    CHECK_INT(w.fake->compute(w.gpu[0], &nothing), 0);
    w.fake->synchronize(w.gpu[0]);
    CHECK(world_is(w.fake->tensor_data(w.src[0][3]), 0x29, WORLD_BYTES));
    CHECK_INT(ggml_async_record_read(records, 4096), 1);
    CHECK_INT(records[0].kind, GGML_ASYNC_RECORD_UPLOAD);
    CHECK_INT(records[0].device, 0);
    CHECK_INT(records[0].bytes, WORLD_BYTES);
    CHECK_TEXT(records[0].name, "copy-3");
    CHECK(records[0].duration_ns >= 0);
    CHECK_COUNTER(w.host, "uploads", 1);
    CHECK_COUNTER(w.host, "upload_bytes", WORLD_BYTES);
    CHECK_COUNTER(w.host, "upload_ns", records[0].duration_ns);
    CHECK_COUNTER(w.host, "readbacks", 0);
    world_close(&w);
}

static void a_queued_upload_is_recorded(void) {
    check_upload(true);
}

static void a_synchronous_upload_is_recorded(void) {
    check_upload(false);
}

static void an_asynchronous_set_is_recorded_as_an_upload(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    record_on(&w, GGML_ASYNC_MODE_ASYNC);
    memset(w.fake->tensor_data(w.dst[0]), 0x18, WORLD_BYTES);
    w.fake->set_async(w.gpu[0], w.src[0][2], w.fake->tensor_data(w.dst[0]), 64, 100);
    w.fake->synchronize(w.gpu[0]);
    CHECK(world_is((uint8_t *) w.fake->tensor_data(w.src[0][2]) + 64, 0x18, 100));
    CHECK_INT(ggml_async_record_read(records, 4096), 1);
    CHECK_INT(records[0].kind, GGML_ASYNC_RECORD_UPLOAD);
    CHECK_INT(records[0].bytes, 100);
    CHECK_TEXT(records[0].name, "ffn_norm-2");
    world_close(&w);
}

static void an_upload_whose_end_was_not_seen_is_not_recorded(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    record_on(&w, GGML_ASYNC_MODE_STOCK);
    struct ggml_cgraph nothing = { 0 };
    w.fake->input(w.cpu, w.gpu[0], w.dst[3], w.src[0][3]);
    CHECK_INT(ggml_async_set_mode(w.host, GGML_ASYNC_MODE_OFF), GGML_ASYNC_OK);
    CHECK_INT(w.fake->compute(w.gpu[0], &nothing), 0);
    CHECK_INT(ggml_async_set_mode(w.host, GGML_ASYNC_MODE_STOCK), GGML_ASYNC_OK);
    CHECK_INT(w.fake->compute(w.gpu[0], &nothing), 0);
    CHECK_INT(ggml_async_record_read(records, 4096), 0);
    CHECK_COUNTER(w.host, "uploads", 0);
    world_close(&w);
}

static void two_backends_of_one_thread_keep_their_own_times(void) {
    struct world w;
    world_open(&w, 2, FAKE_GPU0);
    record_on(&w, GGML_ASYNC_MODE_STOCK);
    struct ggml_backend * first = w.cpu;
    struct ggml_backend * other = w.fake->backend_new(FAKE_CPU);
    world_input(&w, 0, 0);
    w.fake->input(w.gpu[1], other, w.src[1][7], w.dst[7]);
    world_input(&w, 0, 1);
    CHECK_INT(w.fake->compute(other, NULL), 0);
    world_input(&w, 0, 2);
    world_compute(&w);
    CHECK_INT(ggml_async_record_read(records, 4096), 6);
    CHECK_INT(records[1].kind, GGML_ASYNC_RECORD_STAGE);
    CHECK_INT(records[1].n_sync, 1);
    CHECK_INT(records[5].kind, GGML_ASYNC_RECORD_STAGE);
    CHECK_INT(records[5].n_readbacks, 3);
    CHECK_INT(records[5].n_sync, 3);
    for (int i = 2; i < 5; i++) {
        CHECK(records[i].wait_ns >= 0 && records[i].copy_ns >= 0);
    }
    w.cpu = first;
    w.fake->backend_free(other);
    world_close(&w);
}

static void counters_can_be_reset(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    world_input(&w, 0, 0);
    world_compute(&w);
    CHECK_COUNTER(w.host, "readbacks", 1);
    CHECK_INT(ggml_async_counters_reset(w.host), GGML_ASYNC_OK);
    uint64_t values[128] = { 0 };
    const int n = ggml_async_counters(w.host, values, 128);
    for (int i = 0; i < n; i++) {
        CHECK_INT(values[i], 0);
    }
    values[1] = 77;
    CHECK_INT(ggml_async_counters(w.host, values, 1), n);
    CHECK_INT(values[1], 77);
    world_close(&w);
}

static const struct test tests[] = {
    TEST(the_stock_arm_is_ggmls_own_path_timed_from_outside),
    TEST(async_records_carry_issue_wait_and_path),
    TEST(the_copy_outs_are_counted_without_records_too),
    TEST(a_declined_readback_names_its_reason),
    TEST(a_dropped_read_has_no_wait),
    TEST(stages_are_numbered_within_their_backend),
    TEST(a_long_name_is_cut_at_63_bytes),
    TEST(the_layer_is_the_number_behind_the_last_dash),
    TEST(a_full_ring_drops_and_counts),
    TEST(bad_record_arguments_are_errors),
    TEST(a_queued_upload_is_recorded),
    TEST(a_synchronous_upload_is_recorded),
    TEST(an_asynchronous_set_is_recorded_as_an_upload),
    TEST(an_upload_whose_end_was_not_seen_is_not_recorded),
    TEST(two_backends_of_one_thread_keep_their_own_times),
    TEST(counters_can_be_reset),
};

TEST_MAIN(tests)
