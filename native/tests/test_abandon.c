// A stage that is left open: the eval callback threw between a CPU split's inputs and its compute.

#include "world.h"

static void the_last_wait_before_the_drain_completes_the_reads(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    world_fill(&w, 0, 0, 0x31);
    world_fill(&w, 1, 1, 0x32);
    world_input(&w, 0, 0);
    world_input(&w, 1, 1);
    w.fake->synchronize(w.gpu[0]);
    CHECK(world_is(w.fake->tensor_data(w.dst[0]), WORLD_POISON, WORLD_BYTES));
    w.fake->synchronize(w.gpu[1]);
    CHECK(world_is(w.fake->tensor_data(w.dst[0]), 0x31, WORLD_BYTES));
    CHECK(world_is(w.fake->tensor_data(w.dst[1]), 0x32, WORLD_BYTES));
    world_compute(&w);
    CHECK_SEEN(&w, 0, 0x31);
    CHECK_SEEN(&w, 1, 0x32);
    world_close(&w);
}

// A read queued after its source was waited for needs a wait of its own.
static void a_read_queued_after_the_wait_is_waited_for(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    world_fill(&w, 0, 0, 0x31);
    world_input(&w, 0, 0);
    w.fake->synchronize(w.gpu[0]);
    world_fill(&w, 0, 1, 0x33);
    world_input(&w, 0, 1);
    world_fill(&w, 1, 2, 0x34);
    world_input(&w, 1, 2);
    w.fake->synchronize(w.gpu[1]);
    CHECK(world_is(w.fake->tensor_data(w.dst[1]), WORLD_POISON, WORLD_BYTES));
    CHECK(world_is(w.fake->tensor_data(w.dst[2]), WORLD_POISON, WORLD_BYTES));
    world_compute(&w);
    CHECK_SEEN(&w, 0, 0x31);
    CHECK_SEEN(&w, 1, 0x33);
    CHECK_SEEN(&w, 2, 0x34);
    world_close(&w);
}

// ggml waits for every device before it gives a graph's memory to another.
static void after_that_wait_nothing_is_written_any_more(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    for (int i = 0; i < 2; i++) {
        world_fill(&w, i, i, 0x41);
        world_input(&w, i, i);
    }
    for (int i = 0; i < 2; i++) {
        w.fake->synchronize(w.gpu[i]);
    }
    for (int i = 0; i < 2; i++) {
        memset(w.fake->tensor_data(w.dst[i]), 0x77, WORLD_BYTES);
    }
    world_fill(&w, 0, 2, 0x42);
    world_input(&w, 0, 2);
    world_compute(&w);
    CHECK(world_is(w.fake->tensor_data(w.dst[0]), 0x77, WORLD_BYTES));
    CHECK(world_is(w.fake->tensor_data(w.dst[1]), 0x77, WORLD_BYTES));
    CHECK_SEEN(&w, 2, 0x42);
    world_close(&w);
}

// The last input of the split was left to ggml, which waited for its source itself: the waits behind that are others.
static void a_last_input_left_to_ggml_does_not_hide_the_waits_behind_it(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    w.fake->pinned[FAKE_GPU1] = FAKE_PINNED_NONE;
    world_fill(&w, 0, 0, 0x51);
    world_fill(&w, 1, 1, 0x52);
    world_input(&w, 0, 0);
    world_input(&w, 1, 1);
    CHECK_COUNTER(w.host, "declined_no_pinned_memory", 1);
    CHECK(world_is(w.fake->tensor_data(w.dst[0]), WORLD_POISON, WORLD_BYTES));
    w.fake->synchronize(w.gpu[0]);
    w.fake->synchronize(w.gpu[1]);
    CHECK(world_is(w.fake->tensor_data(w.dst[0]), 0x51, WORLD_BYTES));
    memset(w.fake->tensor_data(w.dst[0]), 0x77, WORLD_BYTES);
    world_fill(&w, 0, 2, 0x53);
    world_input(&w, 0, 2);
    world_compute(&w);
    CHECK(world_is(w.fake->tensor_data(w.dst[0]), 0x77, WORLD_BYTES));
    CHECK_SEEN(&w, 2, 0x53);
    world_close(&w);
}

static const struct test tests[] = {
    TEST(the_last_wait_before_the_drain_completes_the_reads),
    TEST(a_read_queued_after_the_wait_is_waited_for),
    TEST(after_that_wait_nothing_is_written_any_more),
    TEST(a_last_input_left_to_ggml_does_not_hide_the_waits_behind_it),
};

TEST_MAIN(tests)
