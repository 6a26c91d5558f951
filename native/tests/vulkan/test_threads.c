// Many threads at once: every count exact. Under ThreadSanitizer this is also the test for data races.

#include "vk_world.h"

#include <pthread.h>

enum { N_THREADS = 8, N_ROUNDS = 2000 };

static struct world w;

static void * submit_and_poll(void * argument) {
    const uint32_t number = (uint32_t) (uintptr_t) argument;
    VkQueue queue;
    w.vkGetDeviceQueue(w.device, 0, number, &queue);
    const VkFenceCreateInfo info = { .sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO };
    const VkSubmitInfo      work = { .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO };
    for (int i = 0; i < N_ROUNDS; i++) {
        VkFence fence;
        CHECK_INT(w.vkCreateFence(w.device, &info, NULL, &fence), VK_SUCCESS);
        CHECK_INT(w.vkQueueSubmit(queue, 1, &work, fence), VK_SUCCESS);
        while (w.vkGetFenceStatus(w.device, fence) == VK_NOT_READY) {}
        CHECK_INT(w.vkQueueSubmit(queue, 1, &work, fence), VK_SUCCESS);
        CHECK_INT(w.vkWaitForFences(w.device, 1, &fence, VK_TRUE, UINT64_MAX), VK_SUCCESS);
        w.vkDestroyFence(w.device, fence, NULL);
    }
    return NULL;
}

static void make_threads(void * (*body)(void *)) {
    pthread_t threads[N_THREADS];
    for (uintptr_t i = 0; i < N_THREADS; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, body, (void *) i), 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
}

static void eight_threads_lose_no_count(void) {
    world_env(WAITS);
    world_open(&w);
    world_mock()->polls_not_ready = 2;
    make_threads(submit_and_poll);
    char expected[512];
    const int n = N_THREADS*N_ROUNDS;
    // Each thread's two waits a round have its own submit between them.
    snprintf(expected, sizeof(expected), "queue_submits=%d submit_infos=%d fence_status_polls=%d fence_status_not_ready=%d"
             " fence_spans=%d wait_for_fences_calls=%d fence_waits=%d", 2*n, 2*n, 3*n, 2*n, n, n, 2*n);
    EXPECT(expected);
    CHECK_INT(world_layer()->queues(0), N_THREADS);
    for (int queue = 0; queue < N_THREADS; queue++) {
        CHECK_INT(world_counter("queue_submits", 0, queue), 2*N_ROUNDS);
        CHECK_INT(world_counter("fence_waits", 0, queue), 2*N_ROUNDS);
    }
    world_close(&w);
}

static void * wait_without_submit(void * argument) {
    (void) argument;
    CHECK_INT(w.vkDeviceWaitIdle(w.device), VK_SUCCESS);
    CHECK_INT(w.vkDeviceWaitIdle(w.device), VK_SUCCESS);
    return NULL;
}

static void threads_that_wait_each_count_one(void) {
    world_env(WAITS);
    world_open(&w);
    make_threads(wait_without_submit);
    char expected[128];
    snprintf(expected, sizeof(expected), "device_wait_idle_calls=%d fence_waits=%d", 2*N_THREADS, N_THREADS);
    EXPECT(expected);
}

static void * make_devices(void * argument) {
    (void) argument;
    for (int i = 0; i < 50; i++) {
        VkDevice device;
        VkQueue  queue;
        CHECK_INT(world_create_device(&w, w.physical[0], &device), VK_SUCCESS);
        w.vkGetDeviceQueue(device, 0, 0, &queue);
        CHECK_INT(w.vkQueueSubmit(queue, 0, NULL, VK_NULL_HANDLE), VK_SUCCESS);
        CHECK_INT(w.vkDeviceWaitIdle(device), VK_SUCCESS);
        w.vkDestroyDevice(device, NULL);
    }
    return NULL;
}

// The layer's own functions for all of them are the same, whatever device they were fetched for.
static void devices_come_and_go_beside_each_other(void) {
    world_env(WAITS);
    world_open(&w);
    make_threads(make_devices);
    char expected[128];
    const int n = N_THREADS*50;
    snprintf(expected, sizeof(expected), "queue_submits=%d device_wait_idle_calls=%d fence_waits=%d", n, n, n);
    EXPECT(expected);
    world_close(&w);
}

static const struct test tests[] = {
    TEST(eight_threads_lose_no_count),
    TEST(threads_that_wait_each_count_one),
    TEST(devices_come_and_go_beside_each_other),
};

WORLD_MAIN(tests)
