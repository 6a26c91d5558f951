// What the layer adds to a call, against the mock driver, with and without the layer in turn. Not a test: it has no
// limit to hold. Prints the median over the rounds, nanoseconds a call.

#include "vk_world.h"

#include <time.h>

enum { N_ROUNDS = 21, N_CALLS = 100000 };

static double now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double) ts.tv_sec*1e9 + (double) ts.tv_nsec;
}

static int by_value(const void * a, const void * b) {
    const double x = *(const double *) a, y = *(const double *) b;
    return (x > y) - (x < y);
}

static double median(double * values, int n) {
    qsort(values, (size_t) n, sizeof(values[0]), by_value);
    return values[n/2];
}

#define TIME(ns, call)                                \
    do {                                              \
        const double begin_ = now_ns();               \
        for (int call_ = 0; call_ < N_CALLS; call_++) \
            call;                                     \
        ns = (now_ns() - begin_)/N_CALLS;             \
    } while (0)

int main(void) {
    static double       ns[4][2][N_ROUNDS];
    static const char * names[4] = { "vkQueueSubmit", "vkWaitForFences", "vkGetFenceStatus (not ready)",
                                     "vkCmdCopyBuffer" };
    for (int round = 0; round < N_ROUNDS; round++) {
        for (int with = 0; with < 2; with++) {
            struct world w;
            world_env(with ? WAITS : "");
            world_open(&w);
            const VkFenceCreateInfo     info = { .sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO };
            const VkCommandPoolCreateInfo pool_info = { .sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO };
            VkFence fence, never;
            VkCommandPool pool;
            VkCommandBuffer commands;
            CHECK_INT(w.vkCreateFence(w.device, &info, NULL, &fence), VK_SUCCESS);
            CHECK_INT(w.vkCreateFence(w.device, &info, NULL, &never), VK_SUCCESS);
            CHECK_INT(w.vkCreateCommandPool(w.device, &pool_info, NULL, &pool), VK_SUCCESS);
            const VkCommandBufferAllocateInfo commands_info = {
                .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO, .commandPool = pool, .commandBufferCount = 1,
            };
            CHECK_INT(w.vkAllocateCommandBuffers(w.device, &commands_info, &commands), VK_SUCCESS);
            const VkBufferCopy region = { .size = 1 };
            TIME(ns[0][with][round], w.vkQueueSubmit(w.queue, 0, NULL, fence));
            TIME(ns[1][with][round], w.vkWaitForFences(w.device, 1, &fence, VK_TRUE, UINT64_MAX));
            TIME(ns[2][with][round], w.vkGetFenceStatus(w.device, never));
            TIME(ns[3][with][round], w.vkCmdCopyBuffer(commands, VK_NULL_HANDLE, VK_NULL_HANDLE, 1, &region));
            world_close(&w);
        }
    }
    for (int i = 0; i < 4; i++) {
        const double without = median(ns[i][0], N_ROUNDS), with = median(ns[i][1], N_ROUNDS);
        printf("%-30s %6.1f ns without, %6.1f ns with the layer, +%.1f\n", names[i], without, with, with - without);
    }
    return 0;
}
