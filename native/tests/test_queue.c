// The queue for applications: reads of any tensors, one wait.

#include "world.h"

static uint8_t data[WORLD_SLOTS][WORLD_BYTES];

static void a_batch_over_several_backends_is_waited_for_once(void) {
    struct world w;
    world_open(&w, 3, WORLD_UNPINNED);
    struct ggml_async_queue * queue = ggml_async_queue_new(w.host);
    for (int i = 0; i < 12; i++) {
        memset(data[i], WORLD_POISON, WORLD_BYTES);
        world_fill(&w, i % 3, i, (uint8_t) (i + 1));
        CHECK_INT(ggml_async_read(queue, w.gpu[i % 3], w.src[i % 3][i], data[i], 0, WORLD_BYTES), GGML_ASYNC_PATH_BOUNCE);
        CHECK(world_is(data[i], WORLD_POISON, WORLD_BYTES));
    }
    CHECK_INT(ggml_async_wait(queue), 12);
    for (int i = 0; i < 12; i++) {
        CHECK(world_is(data[i], (uint8_t) (i + 1), WORLD_BYTES));
    }
    for (int g = 0; g < 3; g++) {
        CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0 + g], 1);
    }
    CHECK_INT(ggml_async_wait(queue), 0);
    CHECK_COUNTER(w.host, "app_reads", 12);
    CHECK_COUNTER(w.host, "app_waits", 2);
    ggml_async_queue_free(queue);
    world_close(&w);
}

static void a_part_of_a_tensor_can_be_read(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    struct ggml_async_queue * queue = ggml_async_queue_new(w.host);
    uint8_t * memory = w.fake->tensor_data(w.src[0][0]);
    for (int i = 0; i < WORLD_BYTES; i++) {
        memory[i] = (uint8_t) i;
    }
    memset(data[0], WORLD_POISON, WORLD_BYTES);
    CHECK(ggml_async_read(queue, w.gpu[0], w.src[0][0], data[0], 100, 7) >= 0);
    CHECK(ggml_async_read(queue, w.gpu[0], w.src[0][0], data[0] + 7, WORLD_BYTES - 1, 1) >= 0);
    CHECK_INT(ggml_async_wait(queue), 2);
    CHECK(!memcmp(data[0], memory + 100, 7));
    CHECK_INT(data[0][7], WORLD_BYTES - 1);
    CHECK(world_is(data[0] + 8, WORLD_POISON, WORLD_BYTES - 8));
    ggml_async_queue_free(queue);
    world_close(&w);
}

static void bytes_outside_the_tensor_are_an_error(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    struct ggml_async_queue * queue = ggml_async_queue_new(w.host);
    CHECK_INT(ggml_async_read(queue, w.gpu[0], w.src[0][0], data[0], 0, WORLD_BYTES + 1), GGML_ASYNC_ERR_ARGUMENT);
    CHECK(strstr(ggml_async_last_error(), "ffn_norm-0"));
    CHECK_INT(ggml_async_read(queue, w.gpu[0], w.src[0][0], data[0], WORLD_BYTES + 1, 0), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(ggml_async_read(queue, w.gpu[0], w.src[0][0], data[0], 8, SIZE_MAX), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(ggml_async_read(queue, w.gpu[0], w.src[0][0], data[0], SIZE_MAX, 8), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(ggml_async_read(queue, w.gpu[0], w.src[0][0], NULL, 0, 4), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(ggml_async_read(queue, NULL, w.src[0][0], data[0], 0, 4), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(ggml_async_read(queue, w.gpu[0], NULL, data[0], 0, 4), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(ggml_async_read(NULL, w.gpu[0], w.src[0][0], data[0], 0, 4), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(ggml_async_wait(NULL), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(w.fake->n_gets[FAKE_GPU0], 0);
    CHECK_INT(ggml_async_wait(queue), 0);
    ggml_async_queue_free(queue);
    ggml_async_queue_free(NULL);
    world_close(&w);
}

static void a_tensor_that_is_not_allocated_is_an_error(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    struct ggml_async_queue * queue = ggml_async_queue_new(w.host);
    struct ggml_tensor * tensor = w.fake->tensor_new(NULL, "later", 0, 4, 1);
    CHECK_INT(ggml_async_read(queue, w.gpu[0], tensor, data[0], 0, 4), GGML_ASYNC_ERR_ARGUMENT);
    CHECK(strstr(ggml_async_last_error(), "tensor later is not allocated"));
    w.fake->tensor_free(tensor);
    ggml_async_queue_free(queue);
    world_close(&w);
}

static void a_read_of_zero_bytes_still_waits(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    struct ggml_async_queue * queue = ggml_async_queue_new(w.host);
    CHECK_INT(ggml_async_read(queue, w.gpu[0], w.src[0][0], NULL, WORLD_BYTES, 0), GGML_ASYNC_PATH_EMPTY);
    CHECK_INT(ggml_async_wait(queue), 1);
    CHECK_INT(w.fake->n_synchronizes[FAKE_GPU0], 1);
    ggml_async_queue_free(queue);
    world_close(&w);
}

static void what_cannot_be_queued_is_read_at_once(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    struct ggml_async_queue * queue = ggml_async_queue_new(w.host);
    memset(w.fake->tensor_data(w.dst[0]), 0x21, WORLD_BYTES);
    CHECK_INT(ggml_async_read(queue, w.cpu, w.dst[0], data[0], 0, WORLD_BYTES), GGML_ASYNC_PATH_STOCK);
    CHECK(world_is(data[0], 0x21, WORLD_BYTES));
    w.fake->pinned[FAKE_GPU1] = FAKE_PINNED_NONE;
    world_fill(&w, 1, 1, 0x22);
    CHECK_INT(ggml_async_read(queue, w.gpu[1], w.src[1][1], data[1], 0, WORLD_BYTES), GGML_ASYNC_PATH_STOCK);
    CHECK(world_is(data[1], 0x22, WORLD_BYTES));
    CHECK_INT(ggml_async_wait(queue), 2);
    ggml_async_queue_free(queue);
    world_close(&w);
}

static void reads_of_a_backend_freed_before_the_wait_are_dropped_and_not_counted(void) {
    struct world w;
    world_open(&w, 2, WORLD_UNPINNED);
    struct ggml_async_queue * queue = ggml_async_queue_new(w.host);
    for (int i = 0; i < 4; i++) {
        memset(data[i], WORLD_POISON, WORLD_BYTES);
        world_fill(&w, i % 2, i, (uint8_t) (i + 1));
        CHECK_INT(ggml_async_read(queue, w.gpu[i % 2], w.src[i % 2][i], data[i], 0, WORLD_BYTES), GGML_ASYNC_PATH_BOUNCE);
    }
    world_free_backend(&w.gpu[0], w.fake);
    CHECK_INT(w.fake->n_gets_lost, 0);
    CHECK_INT(ggml_async_wait(queue), 2);
    CHECK(world_is(data[0], WORLD_POISON, WORLD_BYTES));
    CHECK(world_is(data[1], 2, WORLD_BYTES));
    CHECK(world_is(data[2], WORLD_POISON, WORLD_BYTES));
    CHECK(world_is(data[3], 4, WORLD_BYTES));
    CHECK_COUNTER(w.host, "dropped_reads", 2);
    ggml_async_queue_free(queue);
    world_close(&w);
}

static void freeing_a_queue_waits_for_it(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    struct ggml_async_queue * queue = ggml_async_queue_new(w.host);
    world_fill(&w, 0, 0, 0x33);
    CHECK(ggml_async_read(queue, w.gpu[0], w.src[0][0], data[0], 0, WORLD_BYTES) >= 0);
    ggml_async_queue_free(queue);
    CHECK(world_is(data[0], 0x33, WORLD_BYTES));
    CHECK_INT(w.fake->n_pinned_buffers[FAKE_GPU0], 0);
    world_close(&w);
}

static void a_queue_and_a_stage_do_not_mix(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    struct ggml_async_queue * queue = ggml_async_queue_new(w.host);
    world_fill(&w, 0, 0, 0x41);
    world_fill(&w, 0, 1, 0x42);
    memset(data[1], WORLD_POISON, WORLD_BYTES);
    CHECK(ggml_async_read(queue, w.gpu[0], w.src[0][1], data[1], 0, WORLD_BYTES) >= 0);
    world_input(&w, 0, 0);
    world_compute(&w);
    CHECK_SEEN(&w, 0, 0x41);
    CHECK(world_is(data[1], WORLD_POISON, WORLD_BYTES));
    CHECK_INT(ggml_async_wait(queue), 1);
    CHECK(world_is(data[1], 0x42, WORLD_BYTES));
    ggml_async_queue_free(queue);
    world_close(&w);
}

static void reads_work_in_every_mode(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    struct ggml_async_queue * queue = ggml_async_queue_new(w.host);
    for (int mode = 0; mode < 3; mode++) {
        CHECK_INT(ggml_async_set_mode(w.host, mode), GGML_ASYNC_OK);
        world_fill(&w, 0, 0, (uint8_t) (mode + 1));
        CHECK_INT(ggml_async_read(queue, w.gpu[0], w.src[0][0], data[0], 0, WORLD_BYTES), GGML_ASYNC_PATH_BOUNCE);
        CHECK_INT(ggml_async_wait(queue), 1);
        CHECK(world_is(data[0], (uint8_t) (mode + 1), WORLD_BYTES));
    }
    ggml_async_queue_free(queue);
    world_close(&w);
}

static void twenty_backends_in_one_batch_all_arrive(void) {
    struct world w;
    world_open(&w, 1, WORLD_UNPINNED);
    struct ggml_async_queue * queue = ggml_async_queue_new(w.host);
    struct ggml_backend * many[20];
    for (int i = 0; i < 20; i++) {
        many[i] = w.fake->backend_new(FAKE_GPU0);
        struct ggml_cgraph fill = { .n_writes = 1, .writes = { w.src[0][i] }, .values = { (uint8_t) (i + 1) } };
        CHECK_INT(w.fake->compute(many[i], &fill), 0);
        CHECK_INT(ggml_async_read(queue, many[i], w.src[0][i], data[i], 0, WORLD_BYTES), i < 16 ? GGML_ASYNC_PATH_BOUNCE : GGML_ASYNC_PATH_STOCK);
    }
    CHECK_INT(ggml_async_wait(queue), 20);
    for (int i = 0; i < 20; i++) {
        CHECK(world_is(data[i], (uint8_t) (i + 1), WORLD_BYTES));
        w.fake->backend_free(many[i]);
    }
    ggml_async_queue_free(queue);
    world_close(&w);
}

static const struct test tests[] = {
    TEST(a_batch_over_several_backends_is_waited_for_once),
    TEST(a_part_of_a_tensor_can_be_read),
    TEST(bytes_outside_the_tensor_are_an_error),
    TEST(a_tensor_that_is_not_allocated_is_an_error),
    TEST(a_read_of_zero_bytes_still_waits),
    TEST(what_cannot_be_queued_is_read_at_once),
    TEST(reads_of_a_backend_freed_before_the_wait_are_dropped_and_not_counted),
    TEST(freeing_a_queue_waits_for_it),
    TEST(a_queue_and_a_stage_do_not_mix),
    TEST(reads_work_in_every_mode),
    TEST(twenty_backends_in_one_batch_all_arrive),
};

TEST_MAIN(tests)
