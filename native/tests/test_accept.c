// Which readbacks are accepted, where they land, and that a declined one still arrives (contract, points 1 to 4).

#include "world.h"

// One input of a CPU split from `src` to `dst`, which must arrive whatever path it took.
static void check_arrives(struct world * w, struct ggml_backend * backend, struct ggml_tensor * src, struct ggml_tensor * dst, uint8_t value) {
    const size_t size = w->fake->tensor_nbytes(src);
    uint8_t * seen = malloc(size);
    struct ggml_cgraph fill = { .n_writes = 1, .writes = { src }, .values = { value } };
    struct ggml_cgraph read = { .n_reads = 1, .reads = { dst }, .seen = { seen } };
    memset(w->fake->tensor_data(dst), WORLD_POISON, size);
    CHECK_INT(w->fake->compute(backend, &fill), 0);
    w->fake->input(backend, w->cpu, src, dst);
    CHECK_INT(w->fake->compute(w->cpu, &read), 0);
    CHECK(world_is(seen, value, size));
    free(seen);
}

// Twice, so that "logged once" means something.
static void check_declined(struct world * w, struct ggml_backend * backend, struct ggml_tensor * src, struct ggml_tensor * dst, const char * reason, const char * text) {
    char name[64];
    snprintf(name, sizeof(name), "declined_%s", reason);
    const int copies = w->fake->n_sync_copies;
    check_arrives(w, backend, src, dst, 0x31);
    check_arrives(w, backend, src, dst, 0x32);
    CHECK_INT(w->fake->n_sync_copies, copies + 2);
    CHECK_COUNTER(w->host, name, 2);
    CHECK_COUNTER(w->host, "stock", 2);
    CHECK_COUNTER(w->host, "readbacks", 2);
    CHECK_COUNTER(w->host, "direct", 0);
    CHECK_COUNTER(w->host, "bounce", 0);
    CHECK_INT(world_log_count(text), 1);
    CHECK_INT(world_log_count("left to ggml"), 1);
}

static void a_destination_that_is_not_host_memory_is_declined(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    struct ggml_backend_buffer * buffer = w.fake->buffer_new(w.fake->buft(FAKE_GPU1), WORLD_BYTES, FAKE_USAGE_COMPUTE);
    struct ggml_tensor * dst = w.fake->tensor_new(buffer, "elsewhere", 0, WORLD_BYTES/4, 1);
    check_declined(&w, w.gpu[0], w.src[0][0], dst, "not_host", "not host memory");
    w.fake->tensor_free(dst);
    w.fake->buffer_free(buffer);
    world_close(&w);
}

static void an_application_tensor_is_declined(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    struct ggml_backend_buffer * buffer = w.fake->buffer_new(w.fake->pinned_buft(FAKE_GPU0), WORLD_BYTES, FAKE_USAGE_ANY);
    struct ggml_tensor * dst = w.fake->tensor_new(buffer, "mine", 0, WORLD_BYTES/4, 1);
    check_declined(&w, w.gpu[0], w.src[0][0], dst, "not_compute", "not a scheduler input");
    w.fake->tensor_free(dst);
    w.fake->buffer_free(buffer);
    world_close(&w);
}

static void a_source_without_async_reads_is_declined(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    w.fake->backend_free(w.gpu[0]);
    w.fake->no_get_async = true;
    w.gpu[0] = w.fake->backend_new(FAKE_GPU0);
    check_declined(&w, w.gpu[0], w.src[0][0], w.dst[0], "no_async", "no get_tensor_async");
    world_close(&w);
}

static void a_tensor_without_a_buffer_is_declined(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    // ggml's own copy could not handle it either, so no more than the verdict is looked at
    struct ggml_tensor * src = w.fake->tensor_new(NULL, "nowhere", 0, WORLD_BYTES/4, 1);
    CHECK(!w.fake->ask(w.gpu[0], w.cpu, src, w.dst[0]));
    CHECK(!w.fake->ask(w.gpu[0], w.cpu, src, w.dst[0]));
    CHECK_COUNTER(w.host, "declined_no_buffer", 2);
    CHECK_INT(world_log_count("a tensor has no buffer"), 1);
    w.fake->tensor_free(src);
    world_close(&w);
}

static void a_source_whose_structure_is_unknown_is_declined(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    // a backend of a host that nobody attached to
    struct fake * other = world_fake("plain", 0);
    struct ggml_backend * stranger = other->backend_new(FAKE_GPU0);
    CHECK(!w.fake->ask(stranger, w.cpu, w.src[0][0], w.dst[0]));
    CHECK_COUNTER(w.host, "declined_unknown_source", 1);
    CHECK_INT(world_log_count("structure is not the one we know"), 1);
    CHECK_INT(other->backend_diff(stranger), 0);
    CHECK_INT(w.fake->compute(w.cpu, NULL), 0);
    other->backend_free(stranger);
    world_close(&w);
}

static void a_tensor_outside_its_devices_default_memory_is_declined(void) {
    struct world w;
    world_open(&w, 2, FAKE_GPU0);
    // supported perhaps, but not the default: memory of device 1 read through device 0
    check_declined(&w, w.gpu[0], w.src[1][0], w.dst[0], "buffer_type", "default buffer type");
    world_close(&w);
}

static void a_view_is_judged_by_the_memory_it_looks_at(void) {
    struct world w;
    world_open(&w, 2, FAKE_GPU0);
    struct ggml_tensor * view = w.fake->tensor_view(w.src[1][0], "view-0", WORLD_BYTES/4, 1, WORLD_BYTES, 0);
    check_declined(&w, w.gpu[0], view, w.dst[0], "buffer_type", "default buffer type");
    w.fake->tensor_free(view);
    world_close(&w);
}

static void a_meta_device_is_declined(void) {
    struct world w;
    world_open(&w, 0, FAKE_GPU0);
    struct ggml_backend * meta = w.fake->backend_new(FAKE_META);
    struct ggml_backend_buffer * buffer = w.fake->buffer_new(w.fake->buft(FAKE_META), WORLD_BYTES, FAKE_USAGE_COMPUTE);
    struct ggml_tensor * src = w.fake->tensor_new(buffer, "sharded-1", 0, WORLD_BYTES/4, 1);
    check_declined(&w, meta, src, w.dst[0], "meta_source", "tensor-parallel");
    w.fake->tensor_free(src);
    w.fake->buffer_free(buffer);
    w.fake->backend_free(meta);
    world_close(&w);
}

static void tensors_that_differ_in_shape_are_declined(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    struct ggml_tensor * src = w.fake->tensor_new(w.gpu_buffer[0], "wide-0", 0, WORLD_BYTES/8, 2);
    check_declined(&w, w.gpu[0], src, w.dst[0], "layout", "differ in type or shape");
    w.fake->tensor_free(src);
    world_close(&w);
}

static void check_pinned_declined(int pinned, const char * reason, const char * text) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    w.fake->pinned[FAKE_GPU1] = pinned;
    check_declined(&w, w.gpu[1], w.src[1][0], w.dst[0], reason, text);
    world_close(&w);
}

static void a_device_without_pinned_memory_is_declined(void) {
    check_pinned_declined(FAKE_PINNED_NONE, "no_pinned_memory", "no pinned host memory");
}

static void a_device_whose_pinned_memory_belongs_to_the_first_one_is_declined(void) {
    check_pinned_declined(FAKE_PINNED_FIRST, "no_pinned_memory", "no pinned host memory");
}

static void pinned_memory_that_silently_falls_back_to_plain_is_noticed(void) {
    check_pinned_declined(FAKE_PINNED_FALLS_BACK, "no_pinned_memory", "no pinned host memory");
}

static void pinned_memory_that_cannot_be_had_is_declined(void) {
    check_pinned_declined(FAKE_PINNED_FAILS, "no_memory", "allocation failed");
}

static void the_seventeenth_source_of_a_split_is_declined(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    struct ggml_backend * many[17];
    for (int i = 0; i < 17; i++) {
        many[i] = w.fake->backend_new(FAKE_GPU0);
        struct ggml_cgraph fill = { .n_writes = 1, .writes = { w.src[0][i] }, .values = { (uint8_t) (i + 1) } };
        CHECK_INT(w.fake->compute(many[i], &fill), 0);
    }
    for (int i = 0; i < 17; i++) {
        struct ggml_backend * first = w.gpu[0];
        w.gpu[0] = many[i];
        world_input(&w, 0, i);
        w.gpu[0] = first;
    }
    world_compute(&w);
    for (int i = 0; i < 17; i++) {
        CHECK_SEEN(&w, i, i + 1);
        w.fake->backend_free(many[i]);
    }
    CHECK_COUNTER(w.host, "declined_too_many_sources", 1);
    CHECK_COUNTER(w.host, "direct", 1);
    CHECK_COUNTER(w.host, "bounce", 15);
    CHECK_COUNTER(w.host, "synchronizes", 17);
    world_close(&w);
}

static void a_copy_between_host_buffers_is_no_readback(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    struct ggml_backend * accel = w.fake->backend_new(FAKE_ACCEL);
    memset(w.fake->tensor_data(w.dst[0]), 0x55, WORLD_BYTES);
    w.fake->input(w.cpu, accel, w.dst[0], w.dst[1]);
    CHECK_INT(w.fake->compute(accel, NULL), 0);
    CHECK(world_is(w.fake->tensor_data(w.dst[1]), 0x55, WORLD_BYTES));
    CHECK_COUNTER(w.host, "readbacks", 0);
    CHECK_COUNTER(w.host, "stages", 0);
    CHECK_INT(world_log_count("left to ggml"), 0);
    w.fake->backend_free(accel);
    world_close(&w);
}

static void an_accel_backend_reads_back_too(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    struct ggml_backend * cpu = w.cpu;
    w.cpu = w.fake->backend_new(FAKE_ACCEL);
    CHECK(w.fake->slot_is_null(w.cpu, "synchronize"));
    world_fill(&w, 0, 0, 0x21);
    world_input(&w, 0, 0);
    world_compute(&w);
    CHECK_SEEN(&w, 0, 0x21);
    CHECK_COUNTER(w.host, "direct", 1);
    w.fake->backend_free(w.cpu);
    w.cpu = cpu;
    world_close(&w);
}

static void synchronize_of_cpu_and_accel_stays_null(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    struct ggml_backend * accel = w.fake->backend_new(FAKE_ACCEL);
    for (int mode = 0; mode < 3; mode++) {
        CHECK_INT(ggml_async_set_mode(w.host, mode), GGML_ASYNC_OK);
        CHECK(w.fake->slot_is_null(w.cpu, "synchronize"));
        CHECK(w.fake->slot_is_null(accel, "synchronize"));
    }
    w.fake->backend_free(accel);
    world_close(&w);
}

static void zero_bytes_are_accepted_and_their_source_is_still_synchronized(void) {
    struct world w;
    world_open(&w, 2, FAKE_GPU0);
    struct ggml_tensor * src = w.fake->tensor_new(w.gpu_buffer[0], "none-0", 0, WORLD_BYTES/4, 0);
    struct ggml_tensor * dst = w.fake->tensor_new(w.cpu_buffer, "copy", 0, WORLD_BYTES/4, 0);
    w.fake->input(w.gpu[0], w.cpu, src, dst);
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0], 0);
    CHECK_INT(w.fake->n_gets[FAKE_GPU0], 0);
    // it counts as the stage's first source: device 1 must bounce
    world_fill(&w, 1, 1, 0x44);
    world_input(&w, 1, 1);
    world_compute(&w);
    CHECK_SEEN(&w, 1, 0x44);
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0], 1);
    CHECK_INT(w.fake->n_sync_copies, 0);
    CHECK_COUNTER(w.host, "empty", 1);
    CHECK_COUNTER(w.host, "synchronizes", 2);
    CHECK_COUNTER(w.host, "bounce", 1);
    w.fake->tensor_free(src);
    w.fake->tensor_free(dst);
    world_close(&w);
}

static void the_first_source_reads_straight_into_what_it_has_pinned(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    for (int i = 0; i < 3; i++) {
        world_fill(&w, 0, i, (uint8_t) (i + 1));
        world_input(&w, 0, i);
        // nothing has arrived, nobody has waited
        CHECK(world_is(w.fake->tensor_data(w.dst[i]), WORLD_POISON, WORLD_BYTES));
    }
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0], 0);
    const int allocs = w.fake->n_pinned_allocs;
    world_compute(&w);
    for (int i = 0; i < 3; i++) {
        CHECK_SEEN(&w, i, i + 1);
    }
    CHECK_COUNTER(w.host, "direct", 3);
    CHECK_COUNTER(w.host, "bounce", 0);
    CHECK_INT(w.fake->n_pinned_allocs, allocs);
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0], 1);
    world_close(&w);
}

static void an_unpinned_destination_is_read_through_a_bounce_buffer(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    for (int i = 0; i < 3; i++) {
        world_fill(&w, 0, i, (uint8_t) (i + 1));
        world_input(&w, 0, i);
    }
    world_compute(&w);
    for (int i = 0; i < 3; i++) {
        CHECK_SEEN(&w, i, i + 1);
    }
    CHECK_COUNTER(w.host, "bounce", 3);
    CHECK_COUNTER(w.host, "direct", 0);
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0], 1);
    world_close(&w);
}

static void a_b_a_reads_the_third_through_a_bounce_buffer(void) {
    struct world w;
    world_open(&w, 2, FAKE_GPU0);
    const int gpus[] = { 0, 1, 0 };
    for (int i = 0; i < 3; i++) {
        world_fill(&w, gpus[i], i, (uint8_t) (0x60 + i));
        world_input(&w, gpus[i], i);
    }
    CHECK_COUNTER(w.host, "direct", 1);
    CHECK_COUNTER(w.host, "bounce", 2);
    // device 0 finishes on its own: its third read must not have landed yet
    w.fake->synchronize(w.gpu[0]);
    CHECK(world_is(w.fake->tensor_data(w.dst[0]), 0x60, WORLD_BYTES));
    CHECK(world_is(w.fake->tensor_data(w.dst[2]), WORLD_POISON, WORLD_BYTES));
    world_compute(&w);
    for (int i = 0; i < 3; i++) {
        CHECK_SEEN(&w, i, 0x60 + i);
    }
    world_close(&w);
}

static void a_second_device_does_not_land_before_all_are_synchronized(void) {
    struct world w;
    world_open(&w, 2, FAKE_GPU1);
    // device 1 has pinned the destination, but device 0 came first
    world_fill(&w, 0, 0, 0x11);
    world_input(&w, 0, 0);
    world_fill(&w, 1, 1, 0x22);
    world_input(&w, 1, 1);
    w.fake->synchronize(w.gpu[1]);
    CHECK(world_is(w.fake->tensor_data(w.dst[1]), WORLD_POISON, WORLD_BYTES));
    world_compute(&w);
    CHECK_SEEN(&w, 0, 0x11);
    CHECK_SEEN(&w, 1, 0x22);
    CHECK_COUNTER(w.host, "bounce", 2);
    world_close(&w);
}

static void the_next_stage_starts_afresh(void) {
    struct world w;
    world_open(&w, 2, FAKE_GPU1);
    world_input(&w, 0, 0);
    world_input(&w, 1, 1);
    world_compute(&w);
    world_fill(&w, 1, 1, 0x42);
    world_input(&w, 1, 1);
    world_compute(&w);
    CHECK_SEEN(&w, 1, 0x42);
    CHECK_COUNTER(w.host, "direct", 1);
    CHECK_COUNTER(w.host, "bounce", 2);
    world_close(&w);
}

static void bounce_memory_is_used_again(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    for (int stage = 0; stage < 50; stage++) {
        for (int i = 0; i < 30; i++) {
            world_fill(&w, i % 2, i, (uint8_t) (stage + i));
            world_input(&w, i % 2, i);
        }
        world_compute(&w);
        for (int i = 0; i < 30; i++) {
            CHECK_SEEN(&w, i, (uint8_t) (stage + i));
        }
    }
    CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU0], 1);
    CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU1], 1);
    CHECK_INT(w.fake->n_pinned_allocs, 2);
    world_close(&w);
}

static void large_reads_get_bounce_memory_of_their_size(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    const size_t sizes[] = { 300*1024, 4, 256*1024, 1024*1024 + 4 };
    struct ggml_cgraph read = { .n_reads = 4 };
    struct ggml_tensor * src[4], * dst[4];
    struct ggml_backend_buffer * from[4], * to[4];
    for (int i = 0; i < 4; i++) {
        from[i] = w.fake->buffer_new(w.fake->buft(FAKE_GPU0), sizes[i], FAKE_USAGE_COMPUTE);
        to[i]   = w.fake->buffer_new(w.fake->buft(FAKE_CPU),  sizes[i], FAKE_USAGE_COMPUTE);
        src[i]  = w.fake->tensor_new(from[i], "large-0", 0, (int64_t) sizes[i]/4, 1);
        dst[i]  = w.fake->tensor_new(to[i],   "copy",    0, (int64_t) sizes[i]/4, 1);
        struct ggml_cgraph fill = { .n_writes = 1, .writes = { src[i] }, .values = { (uint8_t) (i + 7) } };
        CHECK_INT(w.fake->compute(w.gpu[0], &fill), 0);
        w.fake->input(w.gpu[0], w.cpu, src[i], dst[i]);
        read.reads[i] = dst[i];
        read.seen[i]  = malloc(sizes[i]);
    }
    CHECK_INT(w.fake->compute(w.cpu, &read), 0);
    for (int i = 0; i < 4; i++) {
        CHECK(world_is(read.seen[i], (uint8_t) (i + 7), sizes[i]));
        free(read.seen[i]);
        w.fake->tensor_free(src[i]);
        w.fake->tensor_free(dst[i]);
        w.fake->buffer_free(from[i]);
        w.fake->buffer_free(to[i]);
    }
    CHECK_COUNTER(w.host, "bounce", 4);
    world_close(&w);
}

// The expert ids of a batch: 2 rows of 2, one row of 8 apart. ggml's own copy takes ggml_nbytes as they lie.
static void check_strided(int pinned_by) {
    struct world w;
    world_open(&w, 1, pinned_by);
    struct ggml_tensor * view = w.fake->tensor_view(w.src[0][0], "topk-4 (view)", 2, 2, 32, 8);
    struct ggml_tensor * dst  = w.fake->tensor_new(w.cpu_buffer, "copy", 0, 2, 2);
    w.fake->tensor_stride(dst, 32);
    CHECK_INT(w.fake->tensor_nbytes(view), 40);
    uint8_t pattern[WORLD_BYTES];
    for (int i = 0; i < WORLD_BYTES; i++) {
        pattern[i] = (uint8_t) i;
    }
    memcpy(w.fake->tensor_data(w.src[0][0]), pattern, WORLD_BYTES);
    memset(w.fake->tensor_data(w.dst[0]), WORLD_POISON, WORLD_BYTES);
    w.fake->input(w.gpu[0], w.cpu, view, dst);
    uint8_t seen[40];
    struct ggml_cgraph read = { .n_reads = 1, .reads = { dst }, .seen = { seen } };
    CHECK_INT(w.fake->compute(w.cpu, &read), 0);
    CHECK(!memcmp(seen, pattern + 8, 40));
    CHECK(world_is((uint8_t *) w.fake->tensor_data(w.dst[0]) + 40, WORLD_POISON, WORLD_BYTES - 40));
    CHECK_INT(w.fake->n_sync_copies, 0);
    CHECK_COUNTER(w.host, "readback_bytes", 40);
    w.fake->tensor_free(view);
    w.fake->tensor_free(dst);
    world_close(&w);
}

static void a_strided_view_is_read_as_it_lies_into_pinned_memory(void) {
    check_strided(FAKE_GPU0);
}

static void a_strided_view_is_read_as_it_lies_through_a_bounce_buffer(void) {
    check_strided(WORLD_UNPINNED);
}

static void a_source_made_before_the_plugin_is_taken_in_when_it_is_met(void) {
    struct world w = { 0 };
    world_log_capture();
    w.fake = world_fake("api2", 0);
    struct ggml_backend * early     = w.fake->backend_new(FAKE_GPU0);
    struct ggml_backend * early_cpu = w.fake->backend_new(FAKE_CPU);
    CHECK(w.fake->load_plugin(PLUGIN_PATH));
    world_backends(&w, 1, FAKE_GPU0);
    w.fake->backend_free(w.gpu[0]);
    w.gpu[0] = early;
    CHECK_INT(w.fake->backend_diff(early), 0);
    world_fill(&w, 0, 0, 0x77);
    world_input(&w, 0, 0);
    CHECK(w.fake->backend_diff(early) != 0);
    world_compute(&w);
    CHECK_SEEN(&w, 0, 0x77);
    CHECK_COUNTER(0, "direct", 1);
    // a destination made before is left alone: its owner has never seen it behave otherwise
    CHECK_INT(w.fake->backend_diff(early_cpu), 0);
    w.fake->backend_free(early_cpu);
    world_close(&w);
}

static const struct test tests[] = {
    TEST(a_destination_that_is_not_host_memory_is_declined),
    TEST(an_application_tensor_is_declined),
    TEST(a_source_without_async_reads_is_declined),
    TEST(a_tensor_without_a_buffer_is_declined),
    TEST(a_source_whose_structure_is_unknown_is_declined),
    TEST(a_tensor_outside_its_devices_default_memory_is_declined),
    TEST(a_view_is_judged_by_the_memory_it_looks_at),
    TEST(a_meta_device_is_declined),
    TEST(tensors_that_differ_in_shape_are_declined),
    TEST(a_device_without_pinned_memory_is_declined),
    TEST(a_device_whose_pinned_memory_belongs_to_the_first_one_is_declined),
    TEST(pinned_memory_that_silently_falls_back_to_plain_is_noticed),
    TEST(pinned_memory_that_cannot_be_had_is_declined),
    TEST(the_seventeenth_source_of_a_split_is_declined),
    TEST(a_copy_between_host_buffers_is_no_readback),
    TEST(an_accel_backend_reads_back_too),
    TEST(synchronize_of_cpu_and_accel_stays_null),
    TEST(zero_bytes_are_accepted_and_their_source_is_still_synchronized),
    TEST(the_first_source_reads_straight_into_what_it_has_pinned),
    TEST(an_unpinned_destination_is_read_through_a_bounce_buffer),
    TEST(a_b_a_reads_the_third_through_a_bounce_buffer),
    TEST(a_second_device_does_not_land_before_all_are_synchronized),
    TEST(the_next_stage_starts_afresh),
    TEST(bounce_memory_is_used_again),
    TEST(large_reads_get_bounce_memory_of_their_size),
    TEST(a_strided_view_is_read_as_it_lies_into_pinned_memory),
    TEST(a_strided_view_is_read_as_it_lies_through_a_bounce_buffer),
    TEST(a_source_made_before_the_plugin_is_taken_in_when_it_is_met),
};

TEST_MAIN(tests)
