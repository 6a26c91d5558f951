// A program's view of Vulkan with the layer in and the mock driver at the bottom, in a loader environment that knows
// nothing else.
#pragma once

#include "mock_icd.h"
#include "vulkan_counters.h"

#include "../test.h"

#define WAITS "VK_LAYER_GGML_ASYNC_waits"

#define WORLD_FUNCTIONS(X) \
    X(vkDestroyDevice) X(vkGetDeviceQueue) X(vkGetDeviceQueue2) \
    X(vkQueueSubmit) X(vkQueueSubmit2) X(vkQueueSubmit2KHR) X(vkQueueBindSparse) X(vkQueueWaitIdle) X(vkDeviceWaitIdle) \
    X(vkCreateFence) X(vkDestroyFence) X(vkResetFences) X(vkGetFenceStatus) X(vkWaitForFences) \
    X(vkCreateSemaphore) X(vkDestroySemaphore) X(vkSignalSemaphore) X(vkWaitSemaphores) X(vkWaitSemaphoresKHR) \
    X(vkAllocateMemory) X(vkFreeMemory) X(vkCreateBuffer) X(vkDestroyBuffer) \
    X(vkGetBufferMemoryRequirements) \
    X(vkBindBufferMemory) X(vkBindBufferMemory2) X(vkBindBufferMemory2KHR) \
    X(vkCreateCommandPool) X(vkDestroyCommandPool) X(vkAllocateCommandBuffers) X(vkFreeCommandBuffers) \
    X(vkBeginCommandBuffer) X(vkEndCommandBuffer) X(vkCmdCopyBuffer) X(vkCmdCopyBuffer2) X(vkCmdCopyBuffer2KHR)

struct world {
    PFN_vkGetInstanceProcAddr gipa;     // the loader's
    PFN_vkGetDeviceProcAddr   gdpa;
    VkInstance                instance;
    VkPhysicalDevice          physical[MOCK_MAX_DEVICES];
    uint32_t                  n_physical;
    VkDevice                  device;
    VkQueue                   queue;    // family 0, number 0
#define X(name) PFN_##name name;
    WORLD_FUNCTIONS(X)
#undef X
};

// `layers`: names separated by ':', the first nearest to the program.
// The mock can be set up between the two.
void world_env(const char * layers);
void world_open(struct world * world);
void world_close(struct world * world);

VkResult world_create_instance(struct world * world);
VkResult world_create_device(struct world * world, VkPhysicalDevice physical, VkDevice * device);
void     world_fetch(struct world * world, VkDevice device);   // functions through vkGetDeviceProcAddr

struct mock_config * world_mock(void);
uint64_t             world_mock_calls(const char * function);

// The layer's reader functions, from the layer in this process.
#define WORLD_LAYER(X) \
    X(abi_version, int, (void)) X(counter_name, const char *, (int)) X(counter_text, const char *, (int)) \
    X(counters, int, (uint64_t *, int)) X(devices, int, (void)) X(device_name, const char *, (int)) \
    X(device_counters, int, (int, uint64_t *, int)) X(queues, int, (int)) X(queue_family, int, (int, int)) \
    X(queue_counters, int, (int, int, uint64_t *, int)) X(set_cause, int, (int, uint32_t)) X(cause_name, const char *, (int)) \
    X(cause_counter_name, const char *, (int)) X(cause_counters, int, (int, uint64_t *, int))

struct world_layer {
#define X(name, type, arguments) type (*name) arguments;
    WORLD_LAYER(X)
#undef X
};

const struct world_layer * world_layer(void);

enum { WORLD_TOTAL = -1, WORLD_DEVICE = -1 };

// One counter of the process (device WORLD_TOTAL), of a device (queue WORLD_DEVICE) or of a queue.
uint64_t world_counter(const char * name, int device, int queue);

// All counters but the times must be as in "name=value name=value", and 0 where not named.
void world_expect(const char * file, int line, int device, int queue, const char * expected);
#define EXPECT(expected)                       world_expect(__FILE__, __LINE__, WORLD_TOTAL, WORLD_DEVICE, expected)
#define EXPECT_DEVICE(device, expected)        world_expect(__FILE__, __LINE__, device, WORLD_DEVICE, expected)
#define EXPECT_QUEUE(device, queue, expected)  world_expect(__FILE__, __LINE__, device, queue, expected)

// What every program here does; ends as skipped, with the reason, where there is no Vulkan loader.
int world_main(const struct test * tests, size_t n, int argc, char ** argv);
#define WORLD_MAIN(tests)                                                              \
    int main(int argc, char ** argv) {                                                 \
        return world_main(tests, sizeof(tests)/sizeof((tests)[0]), argc, argv);        \
    }
