// Every counter against a script of known calls.

#include "vk_world.h"

static struct world w;

static void open_world(void) {
    world_env(WAITS);
    world_open(&w);
}

static VkFence new_fence(void) {
    const VkFenceCreateInfo info = { .sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO };
    VkFence fence;
    CHECK_INT(w.vkCreateFence(w.device, &info, NULL, &fence), VK_SUCCESS);
    return fence;
}

static void submit(VkQueue queue, VkFence fence) {
    const VkSubmitInfo info = { .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO };
    CHECK_INT(w.vkQueueSubmit(queue, 1, &info, fence), VK_SUCCESS);
}

static VkResult wait_for(VkFence fence, uint64_t timeout) {
    return w.vkWaitForFences(w.device, 1, &fence, VK_TRUE, timeout);
}

// ---- submits

static void submits_are_calls_and_infos_are_counted_beside_them(void) {
    open_world();
    const VkSubmitInfo infos[3] = { { .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO }, { .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO },
                                    { .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO } };
    CHECK_INT(w.vkQueueSubmit(w.queue, 3, infos, NULL), VK_SUCCESS);
    CHECK_INT(w.vkQueueSubmit(w.queue, 0, NULL, new_fence()), VK_SUCCESS);
    EXPECT("queue_submits=2 submit_infos=3");
    const VkSubmitInfo2 infos2[2] = { { .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO_2 },
                                      { .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO_2 } };
    CHECK_INT(w.vkQueueSubmit2(w.queue, 2, infos2, NULL), VK_SUCCESS);
    CHECK_INT(w.vkQueueSubmit2KHR(w.queue, 1, infos2, NULL), VK_SUCCESS);
    EXPECT("queue_submits=4 queue_submit2s=2 submit_infos=6");
    CHECK(world_counter("queue_submit_ns", WORLD_TOTAL, 0) > 0);
    CHECK_INT(world_mock_calls("vkQueueSubmit"), 2);
    CHECK_INT(world_mock_calls("vkQueueSubmit2"), 2);
}

static void sparse_binds_are_counted_apart_and_part_waits(void) {
    open_world();
    const VkBindSparseInfo infos[2] = { { .sType = VK_STRUCTURE_TYPE_BIND_SPARSE_INFO },
                                        { .sType = VK_STRUCTURE_TYPE_BIND_SPARSE_INFO } };
    VkFence fence = new_fence();
    submit(w.queue, fence);
    CHECK_INT(wait_for(fence, UINT64_MAX), VK_SUCCESS);
    CHECK_INT(w.vkQueueBindSparse(w.queue, 2, infos, new_fence()), VK_SUCCESS);
    CHECK_INT(wait_for(fence, UINT64_MAX), VK_SUCCESS);
    EXPECT("queue_submits=1 submit_infos=1 queue_bind_sparses=1 bind_sparse_infos=2 wait_for_fences_calls=2 fence_waits=2");
}

// ---- waits

static void two_waits_without_a_submit_between_are_one(void) {
    open_world();
    VkFence fence = new_fence(), other = new_fence();
    submit(w.queue, fence);
    submit(w.queue, other);
    CHECK_INT(wait_for(fence, UINT64_MAX), VK_SUCCESS);
    CHECK_INT(wait_for(other, UINT64_MAX), VK_SUCCESS);
    EXPECT("queue_submits=2 submit_infos=2 wait_for_fences_calls=2 fence_waits=1");
    submit(w.queue, fence);
    CHECK_INT(wait_for(fence, UINT64_MAX), VK_SUCCESS);
    EXPECT("queue_submits=3 submit_infos=3 wait_for_fences_calls=3 fence_waits=2");
    CHECK_INT(world_mock_calls("vkWaitForFences"), 3);
}

static void polls_from_not_ready_to_ready_are_a_span_and_a_wait(void) {
    open_world();
    world_mock()->polls_not_ready = 5;
    VkFence fence = new_fence();
    submit(w.queue, fence);
    int n = 0;
    while (w.vkGetFenceStatus(w.device, fence) == VK_NOT_READY) {
        n++;
    }
    CHECK_INT(n, 5);
    EXPECT("queue_submits=1 submit_infos=1 fence_status_polls=6 fence_status_not_ready=5 fence_spans=1 fence_waits=1");
    CHECK(world_counter("fence_span_ns", WORLD_TOTAL, 0) > 0);
    CHECK_INT(world_counter("fence_wait_ns", WORLD_TOTAL, 0), world_counter("fence_span_ns", WORLD_TOTAL, 0));
    CHECK_INT(world_mock_calls("vkGetFenceStatus"), 6);
}

static void a_poll_that_is_ready_at_once_is_no_wait(void) {
    open_world();
    VkFence fence = new_fence();
    submit(w.queue, fence);
    CHECK_INT(w.vkGetFenceStatus(w.device, fence), VK_SUCCESS);
    EXPECT("queue_submits=1 submit_infos=1 fence_status_polls=1");
}

// As ggml does: a wait on an almost-ready fence, then polls of the last one.
static void a_wait_and_the_polls_after_it_are_one(void) {
    open_world();
    world_mock()->polls_not_ready = 3;
    VkFence almost = new_fence(), last = new_fence();
    for (int token = 0; token < 4; token++) {
        submit(w.queue, almost);
        submit(w.queue, last);
        CHECK_INT(wait_for(almost, UINT64_MAX), VK_SUCCESS);
        while (w.vkGetFenceStatus(w.device, last) == VK_NOT_READY) {}
        CHECK_INT(w.vkResetFences(w.device, 2, (VkFence[]) { almost, last }), VK_SUCCESS);
    }
    EXPECT("queue_submits=8 submit_infos=8 wait_for_fences_calls=4 fence_status_polls=16 fence_status_not_ready=12"
           " fence_spans=4 fence_waits=4");
}

static void polls_and_the_wait_that_ends_them_are_one(void) {
    open_world();
    world_mock()->polls_not_ready = 9;
    VkFence fence = new_fence();
    submit(w.queue, fence);
    for (int i = 0; i < 3; i++) {
        CHECK_INT(w.vkGetFenceStatus(w.device, fence), VK_NOT_READY);
    }
    CHECK_INT(wait_for(fence, UINT64_MAX), VK_SUCCESS);
    CHECK_INT(w.vkGetFenceStatus(w.device, fence), VK_SUCCESS);
    EXPECT("queue_submits=1 submit_infos=1 fence_status_polls=4 fence_status_not_ready=3 wait_for_fences_calls=1"
           " fence_waits=1");
}

static void a_reset_fence_starts_no_span_with_its_old_polls(void) {
    open_world();
    world_mock()->polls_not_ready = 2;
    VkFence fence = new_fence();
    submit(w.queue, fence);
    CHECK_INT(w.vkGetFenceStatus(w.device, fence), VK_NOT_READY);
    CHECK_INT(w.vkResetFences(w.device, 1, &fence), VK_SUCCESS);
    world_mock()->polls_not_ready = 0;
    submit(w.queue, fence);
    CHECK_INT(w.vkGetFenceStatus(w.device, fence), VK_SUCCESS);
    EXPECT("queue_submits=2 submit_infos=2 fence_status_polls=2 fence_status_not_ready=1");
}

static void a_span_with_a_submit_inside_joins_the_wait_before_it(void) {
    open_world();
    world_mock()->polls_not_ready = 1;
    VkFence first = new_fence(), second = new_fence();
    submit(w.queue, first);
    submit(w.queue, second);
    CHECK_INT(wait_for(first, UINT64_MAX), VK_SUCCESS);
    CHECK_INT(w.vkGetFenceStatus(w.device, second), VK_NOT_READY);   // begins here, no submit since the wait
    submit(w.queue, NULL);
    CHECK_INT(w.vkGetFenceStatus(w.device, second), VK_SUCCESS);
    EXPECT("queue_submits=3 submit_infos=3 wait_for_fences_calls=1 fence_status_polls=2 fence_status_not_ready=1"
           " fence_spans=1 fence_waits=1");
}

static void a_timeout_is_a_call_and_not_a_wait(void) {
    open_world();
    VkFence fence = new_fence();
    CHECK_INT(wait_for(fence, 1000), VK_TIMEOUT);
    CHECK_INT(wait_for(fence, 0), VK_TIMEOUT);
    EXPECT("wait_for_fences_calls=2 wait_for_fences_timeouts=2");
    CHECK_INT(world_counter("fence_wait_ns", WORLD_TOTAL, 0), 0);
}

static void a_wait_in_slices_is_one_wait_with_the_time_of_all(void) {
    open_world();
    VkFence fence = new_fence();
    world_mock()->delay_us      = 2000;
    world_mock()->fail_function = "vkWaitForFences";
    world_mock()->fail_result   = VK_TIMEOUT;
    world_mock()->fail_count    = 3;
    submit(w.queue, fence);
    for (int i = 0; i < 3; i++) {
        CHECK_INT(wait_for(fence, 1), VK_TIMEOUT);
    }
    CHECK_INT(wait_for(fence, 1), VK_SUCCESS);
    EXPECT("queue_submits=1 submit_infos=1 wait_for_fences_calls=4 wait_for_fences_timeouts=3 fence_waits=1");
    CHECK_INT(world_counter("fence_wait_ns", WORLD_TOTAL, 0), world_counter("wait_for_fences_ns", WORLD_TOTAL, 0));
    CHECK(world_counter("fence_wait_ns", WORLD_TOTAL, 0) >= 2000000);
}

static void a_timeout_of_zero_waits_only_after_a_timeout(void) {
    open_world();
    VkFence fence = new_fence();
    submit(w.queue, fence);
    CHECK_INT(wait_for(fence, 0), VK_SUCCESS);
    EXPECT("queue_submits=1 submit_infos=1 wait_for_fences_calls=1");
    CHECK_INT(w.vkResetFences(w.device, 1, &fence), VK_SUCCESS);
    world_mock()->polls_not_ready = 1;
    submit(w.queue, fence);
    CHECK_INT(wait_for(fence, 0), VK_TIMEOUT);
    CHECK_INT(wait_for(fence, 0), VK_SUCCESS);
    EXPECT("queue_submits=2 submit_infos=2 wait_for_fences_calls=3 wait_for_fences_timeouts=1 fence_waits=1");
}

static void semaphore_waits_are_counted_under_both_names(void) {
    open_world();
    const VkSemaphoreTypeCreateInfo type = {
        .sType = VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO, .semaphoreType = VK_SEMAPHORE_TYPE_TIMELINE,
    };
    const VkSemaphoreCreateInfo info = { .sType = VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO, .pNext = &type };
    VkSemaphore semaphore;
    CHECK_INT(w.vkCreateSemaphore(w.device, &info, NULL, &semaphore), VK_SUCCESS);
    const uint64_t value = 7;
    const VkSemaphoreWaitInfo wait = {
        .sType = VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO, .semaphoreCount = 1, .pSemaphores = &semaphore, .pValues = &value,
    };
    CHECK_INT(w.vkWaitSemaphores(w.device, &wait, 1), VK_TIMEOUT);
    const VkSemaphoreSignalInfo signal = {
        .sType = VK_STRUCTURE_TYPE_SEMAPHORE_SIGNAL_INFO, .semaphore = semaphore, .value = 7,
    };
    CHECK_INT(w.vkSignalSemaphore(w.device, &signal), VK_SUCCESS);
    submit(w.queue, NULL);
    CHECK_INT(w.vkWaitSemaphores(w.device, &wait, UINT64_MAX), VK_SUCCESS);
    submit(w.queue, NULL);
    CHECK_INT(w.vkWaitSemaphoresKHR(w.device, &wait, UINT64_MAX), VK_SUCCESS);
    EXPECT("queue_submits=2 submit_infos=2 wait_semaphores_calls=3 wait_semaphores_timeouts=1 fence_waits=2");
    CHECK(world_counter("wait_semaphores_ns", WORLD_TOTAL, 0) > 0);
}

static void idle_waits_belong_to_the_queue_or_the_device(void) {
    open_world();
    world_mock()->delay_us = 1000;
    CHECK_INT(w.vkQueueWaitIdle(w.queue), VK_SUCCESS);
    submit(w.queue, NULL);
    CHECK_INT(w.vkDeviceWaitIdle(w.device), VK_SUCCESS);
    EXPECT("queue_submits=1 submit_infos=1 queue_wait_idle_calls=1 device_wait_idle_calls=1 fence_waits=2");
    EXPECT_QUEUE(0, 0, "queue_submits=1 submit_infos=1 queue_wait_idle_calls=1 fence_waits=1");
    CHECK(world_counter("queue_wait_idle_ns", WORLD_TOTAL, 0) >= 1000000);
    CHECK(world_counter("device_wait_idle_ns", WORLD_TOTAL, 0) >= 1000000);
    CHECK_INT(world_mock_calls("vkDeviceWaitIdle"), 1);
}

static void waits_belong_to_the_queue_that_the_fence_was_submitted_to(void) {
    open_world();
    VkQueue transfer, again;
    w.vkGetDeviceQueue(w.device, 1, 0, &transfer);
    const VkDeviceQueueInfo2 info = { .sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_INFO_2, .queueFamilyIndex = 1 };
    w.vkGetDeviceQueue2(w.device, &info, &again);
    CHECK(again == transfer);
    CHECK_INT(world_layer()->queues(0), 2);
    CHECK_INT(world_layer()->queue_family(0, 0), 0);
    CHECK_INT(world_layer()->queue_family(0, 1), 1);
    CHECK_INT(world_layer()->queue_family(0, 2), -1);
    VkFence fences[2] = { new_fence(), new_fence() };
    submit(transfer, fences[0]);
    CHECK_INT(wait_for(fences[0], UINT64_MAX), VK_SUCCESS);
    EXPECT_QUEUE(0, 1, "queue_submits=1 submit_infos=1 wait_for_fences_calls=1 fence_waits=1");
    EXPECT_QUEUE(0, 0, "");
    submit(w.queue, fences[1]);   // one fence of each queue: the device's
    CHECK_INT(w.vkWaitForFences(w.device, 2, fences, VK_TRUE, UINT64_MAX), VK_SUCCESS);
    EXPECT_QUEUE(0, 0, "queue_submits=1 submit_infos=1");
    EXPECT_QUEUE(0, 1, "queue_submits=1 submit_infos=1 wait_for_fences_calls=1 fence_waits=1");
    EXPECT_DEVICE(0, "queue_submits=2 submit_infos=2 wait_for_fences_calls=2 fence_waits=2");
}

static void waits_belong_to_the_cause_that_the_thread_named(void) {
    open_world();
    const struct world_layer * layer = world_layer();
    uint64_t values[4];
    VkFence fence = new_fence();
    CHECK_INT(layer->set_cause(GGML_ASYNC_LAYER_CAUSE_READBACK, 0), GGML_ASYNC_LAYER_CAUSE_ELSEWHERE);
    submit(w.queue, fence);
    CHECK_INT(wait_for(fence, UINT64_MAX), VK_SUCCESS);
    CHECK_INT(wait_for(fence, UINT64_MAX), VK_SUCCESS);
    CHECK_INT(layer->set_cause(GGML_ASYNC_LAYER_CAUSE_TOKEN, 0), GGML_ASYNC_LAYER_CAUSE_READBACK);
    submit(w.queue, NULL);
    CHECK_INT(w.vkDeviceWaitIdle(w.device), VK_SUCCESS);
    CHECK_INT(layer->set_cause(999, 0), GGML_ASYNC_LAYER_CAUSE_TOKEN);
    submit(w.queue, NULL);
    CHECK_INT(layer->set_cause(0, 0), GGML_ASYNC_LAYER_CAUSE_ELSEWHERE);
    CHECK_INT(layer->cause_counters(GGML_ASYNC_LAYER_CAUSE_READBACK, values, 4), 4);
    CHECK_INT(values[0], 1);
    CHECK(values[1] > 0);
    CHECK_INT(values[2], 2);
    CHECK_INT(values[3], 1);
    layer->cause_counters(GGML_ASYNC_LAYER_CAUSE_TOKEN, values, 4);
    CHECK_INT(values[0], 1);
    CHECK_INT(values[2], 1);
    layer->cause_counters(GGML_ASYNC_LAYER_CAUSE_ELSEWHERE, values, 4);
    CHECK_INT(values[0], 0);
    CHECK_INT(values[3], 1);
    CHECK_TEXT(layer->cause_name(1), "readback");
    CHECK(!layer->cause_name(GGML_ASYNC_LAYER_N_CAUSES) && !layer->cause_name(-1));
    CHECK_TEXT(layer->cause_counter_name(0), "cause_fence_waits");
    CHECK(!layer->cause_counter_name(4));
    CHECK_INT(layer->cause_counters(GGML_ASYNC_LAYER_N_CAUSES, values, 4), -1);
}

// ---- copies

static VkDeviceMemory memory_of[16];
static int            n_memory;

static VkBuffer buffer_in(uint32_t type, int bind) {
    const VkBufferCreateInfo info = {
        .sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO, .size = 4096,
        .usage = VK_BUFFER_USAGE_TRANSFER_SRC_BIT | VK_BUFFER_USAGE_TRANSFER_DST_BIT,
    };
    const VkMemoryAllocateInfo allocate = {
        .sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, .allocationSize = 4096, .memoryTypeIndex = type,
    };
    VkBuffer       buffer;
    VkDeviceMemory memory;
    CHECK_INT(w.vkCreateBuffer(w.device, &info, NULL, &buffer), VK_SUCCESS);
    CHECK_INT(w.vkAllocateMemory(w.device, &allocate, NULL, &memory), VK_SUCCESS);
    memory_of[n_memory++] = memory;
    const VkBindBufferMemoryInfo bind2 = {
        .sType = VK_STRUCTURE_TYPE_BIND_BUFFER_MEMORY_INFO, .buffer = buffer, .memory = memory,
    };
    CHECK_INT(bind == 1 ? w.vkBindBufferMemory(w.device, buffer, memory, 0)
            : bind == 2 ? w.vkBindBufferMemory2(w.device, 1, &bind2)
            : bind == 3 ? w.vkBindBufferMemory2KHR(w.device, 1, &bind2) : VK_SUCCESS, VK_SUCCESS);
    return buffer;
}

static VkCommandBuffer commands(void) {
    const VkCommandPoolCreateInfo pool_info = { .sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO };
    VkCommandPool pool;
    CHECK_INT(w.vkCreateCommandPool(w.device, &pool_info, NULL, &pool), VK_SUCCESS);
    const VkCommandBufferAllocateInfo info = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO, .commandPool = pool, .commandBufferCount = 1,
    };
    VkCommandBuffer buffer;
    CHECK_INT(w.vkAllocateCommandBuffers(w.device, &info, &buffer), VK_SUCCESS);
    return buffer;
}

static void copies_from_device_to_host_are_counted_and_no_others(void) {
    open_world();
    const VkBuffer device = buffer_in(0, 1), host = buffer_in(1, 2), bar = buffer_in(2, 3), device2 = buffer_in(0, 3),
                   unbound = buffer_in(1, 0);
    const VkCommandBuffer c = commands();
    const VkBufferCopy regions[2] = { { .size = 100 }, { .size = 28 } };
    w.vkCmdCopyBuffer(c, device, host, 2, regions);      // counts: 128
    w.vkCmdCopyBuffer(c, bar, host, 1, regions);         // counts: 100; a BAR is device memory
    w.vkCmdCopyBuffer(c, host, device, 1, regions);
    w.vkCmdCopyBuffer(c, host, host, 1, regions);
    w.vkCmdCopyBuffer(c, device, device2, 1, regions);
    w.vkCmdCopyBuffer(c, device, unbound, 1, regions);
    const VkBufferCopy2 region2 = { .sType = VK_STRUCTURE_TYPE_BUFFER_COPY_2, .size = 1000 };
    const VkCopyBufferInfo2 info2 = {
        .sType = VK_STRUCTURE_TYPE_COPY_BUFFER_INFO_2, .srcBuffer = device2, .dstBuffer = host, .regionCount = 1,
        .pRegions = &region2,
    };
    w.vkCmdCopyBuffer2(c, &info2);                       // counts: 1000
    w.vkCmdCopyBuffer2KHR(c, &info2);                    // counts: 1000
    EXPECT("copies_to_host=4 copies_to_host_bytes=2228");
    CHECK_INT(world_mock_calls("vkCmdCopyBuffer"), 6);
    CHECK_INT(world_mock_calls("vkCmdCopyBuffer2"), 2);
    w.vkDestroyBuffer(w.device, host, NULL);
    w.vkFreeMemory(w.device, memory_of[1], NULL);
    w.vkCmdCopyBuffer(c, device, host, 1, regions);      // the layer has forgotten it
    EXPECT("copies_to_host=4 copies_to_host_bytes=2228");
}

static void copies_in_unified_memory_are_counted_apart(void) {
    world_env(WAITS);
    world_mock()->unified = true;
    world_open(&w);
    const VkBuffer a = buffer_in(0, 1), b = buffer_in(0, 1);
    const VkBufferCopy region = { .size = 64 };
    w.vkCmdCopyBuffer(commands(), a, b, 1, &region);
    EXPECT("copies_unified=1 copies_unified_bytes=64");
}

static void ten_thousand_objects_are_followed_and_forgotten(void) {
    open_world();
    enum { N = 10000 };
    static VkFence fences[N];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < N; i++) {
            fences[i] = new_fence();
        }
        world_mock()->polls_not_ready = 1;
        submit(w.queue, fences[N - 1 - round]);
        CHECK_INT(w.vkGetFenceStatus(w.device, fences[N - 1 - round]), VK_NOT_READY);
        CHECK_INT(w.vkGetFenceStatus(w.device, fences[N - 1 - round]), VK_SUCCESS);
        CHECK_INT(world_counter("fence_spans", WORLD_TOTAL, 0), round + 1);
        for (int i = 0; i < N; i++) {
            w.vkDestroyFence(w.device, fences[(i*7919) % N], NULL);
        }
    }
    CHECK_INT(world_counter("untracked", WORLD_TOTAL, 0), 0);
}

static const struct test tests[] = {
    TEST(submits_are_calls_and_infos_are_counted_beside_them),
    TEST(sparse_binds_are_counted_apart_and_part_waits),
    TEST(two_waits_without_a_submit_between_are_one),
    TEST(polls_from_not_ready_to_ready_are_a_span_and_a_wait),
    TEST(a_poll_that_is_ready_at_once_is_no_wait),
    TEST(a_wait_and_the_polls_after_it_are_one),
    TEST(polls_and_the_wait_that_ends_them_are_one),
    TEST(a_reset_fence_starts_no_span_with_its_old_polls),
    TEST(a_span_with_a_submit_inside_joins_the_wait_before_it),
    TEST(a_timeout_is_a_call_and_not_a_wait),
    TEST(a_wait_in_slices_is_one_wait_with_the_time_of_all),
    TEST(a_timeout_of_zero_waits_only_after_a_timeout),
    TEST(semaphore_waits_are_counted_under_both_names),
    TEST(idle_waits_belong_to_the_queue_or_the_device),
    TEST(waits_belong_to_the_queue_that_the_fence_was_submitted_to),
    TEST(waits_belong_to_the_cause_that_the_thread_named),
    TEST(copies_from_device_to_host_are_counted_and_no_others),
    TEST(copies_in_unified_memory_are_counted_apart),
    TEST(ten_thousand_objects_are_followed_and_forgotten),
};

WORLD_MAIN(tests)
