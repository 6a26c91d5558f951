// See mock_icd.h. Of Vulkan it has what a loader, the validation layer and the tests need.

#define _GNU_SOURCE
#include "mock_icd.h"

#include <vulkan/vk_icd.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MOCK_API __attribute__((visibility("default")))

// Functions whose calls are counted and can be made to fail.
#define MOCK_COUNTED(X) \
    X(vkCreateInstance) X(vkCreateDevice) X(vkDestroyDevice) X(vkDestroyInstance) \
    X(vkQueueSubmit) X(vkQueueSubmit2) X(vkQueueBindSparse) X(vkWaitForFences) X(vkGetFenceStatus) X(vkResetFences) \
    X(vkCreateFence) X(vkDestroyFence) X(vkWaitSemaphores) X(vkQueueWaitIdle) X(vkDeviceWaitIdle) \
    X(vkAllocateMemory) X(vkFreeMemory) X(vkBindBufferMemory) X(vkBindBufferMemory2) X(vkDestroyBuffer) \
    X(vkCmdCopyBuffer) X(vkCmdCopyBuffer2)

enum mock_function {
#define X(name) MOCK_##name,
    MOCK_COUNTED(X)
#undef X
    MOCK_N_FUNCTIONS
};

static const char * const mock_names[] = {
#define X(name) #name,
    MOCK_COUNTED(X)
#undef X
};

struct mock_dispatchable {      // what a loader expects of instances, devices, queues and command buffers
    VK_LOADER_DATA loader;
};

struct mock_device {
    VK_LOADER_DATA           loader;
    struct mock_dispatchable queues[MOCK_N_FAMILIES][MOCK_N_QUEUES];
};

struct mock_fence {
    atomic_bool submitted;
    atomic_bool signaled;
    atomic_uint polls;          // still to be answered with "not ready"
};

struct mock_memory {
    void * bytes;
};

struct mock_semaphore {
    _Atomic(uint64_t) value;
};

static struct mock_config mock = { .n_devices = 1 };
static atomic_ullong      mock_count[MOCK_N_FUNCTIONS];

static struct mock_dispatchable mock_instance;
static struct mock_dispatchable mock_physical[MOCK_MAX_DEVICES];

MOCK_API struct mock_config * mock_config(void) {
    return &mock;
}

MOCK_API uint64_t mock_calls(const char * function) {
    for (int i = 0; i < MOCK_N_FUNCTIONS; i++) {
        if (!strcmp(mock_names[i], function)) {
            return atomic_load(&mock_count[i]);
        }
    }
    return UINT64_MAX;
}

static VkResult mock_enter(enum mock_function function) {
    atomic_fetch_add(&mock_count[function], 1);
    if (mock.fail_function && !strcmp(mock.fail_function, mock_names[function])) {
        if (atomic_fetch_sub(&mock.fail_count, 1) > 0) {
            return mock.fail_result;
        }
        atomic_fetch_add(&mock.fail_count, 1);
    }
    return VK_SUCCESS;
}

// Counts the call; returns from the caller where it is to fail.
#define ENTER(name)                                            \
    do {                                                       \
        const VkResult fails_ = mock_enter(MOCK_##name);       \
        if (fails_ != VK_SUCCESS) {                            \
            return fails_;                                     \
        }                                                      \
    } while (0)

static void mock_delay(void) {
    if (mock.delay_us) {
        nanosleep(&(struct timespec) { mock.delay_us/1000000, (mock.delay_us%1000000)*1000 }, NULL);
    }
}

#define MOCK(type) static VKAPI_ATTR type VKAPI_CALL
#define UNUSED(x) (void) (x)
#define ALLOC const VkAllocationCallbacks * a

// ---- instance

MOCK(VkResult) vkEnumerateInstanceVersion_(uint32_t * version) {
    *version = VK_MAKE_API_VERSION(0, 1, 3, 239);
    return VK_SUCCESS;
}

static VkResult mock_list_extensions(const char * const * names, uint32_t n, uint32_t * count,
                                     VkExtensionProperties * out) {
    const uint32_t room = out ? *count : 0;
    *count = n;
    for (uint32_t i = 0; i < n && i < room; i++) {
        memset(&out[i], 0, sizeof(out[i]));
        snprintf(out[i].extensionName, sizeof(out[i].extensionName), "%s", names[i]);
        out[i].specVersion = 1;
    }
    return out && room < n ? VK_INCOMPLETE : VK_SUCCESS;
}

MOCK(VkResult) vkEnumerateInstanceExtensionProperties_(const char * layer, uint32_t * n, VkExtensionProperties * out) {
    UNUSED(layer);
    static const char * const names[] = { "VK_KHR_get_physical_device_properties2" };
    return mock_list_extensions(names, 1, n, out);
}

MOCK(VkResult) vkCreateInstance_(const VkInstanceCreateInfo * info, ALLOC, VkInstance * instance) {
    UNUSED(info); UNUSED(a);
    ENTER(vkCreateInstance);
    mock_instance.loader.loaderMagic = ICD_LOADER_MAGIC;
    *instance = (VkInstance) &mock_instance;
    return VK_SUCCESS;
}

MOCK(void) vkDestroyInstance_(VkInstance instance, ALLOC) {
    UNUSED(instance); UNUSED(a);
    mock_enter(MOCK_vkDestroyInstance);
}

MOCK(VkResult) vkEnumeratePhysicalDevices_(VkInstance instance, uint32_t * n, VkPhysicalDevice * out) {
    UNUSED(instance);
    const uint32_t room = out ? *n : 0;
    *n = mock.n_devices;
    for (uint32_t i = 0; i < mock.n_devices && i < room; i++) {
        mock_physical[i].loader.loaderMagic = ICD_LOADER_MAGIC;
        out[i] = (VkPhysicalDevice) &mock_physical[i];
    }
    return out && room < mock.n_devices ? VK_INCOMPLETE : VK_SUCCESS;
}

// ---- physical devices

MOCK(void) vkGetPhysicalDeviceFeatures_(VkPhysicalDevice physical, VkPhysicalDeviceFeatures * out) {
    UNUSED(physical);
    memset(out, 0, sizeof(*out));
    out->sparseBinding = VK_TRUE;
}

MOCK(void) vkGetPhysicalDeviceFeatures2_(VkPhysicalDevice physical, VkPhysicalDeviceFeatures2 * out) {
    vkGetPhysicalDeviceFeatures_(physical, &out->features);
    for (VkBaseOutStructure * next = out->pNext; next; next = next->pNext) {
        if (next->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES) {
            ((VkPhysicalDeviceVulkan12Features *) (void *) next)->timelineSemaphore = VK_TRUE;
        } else if (next->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES) {
            ((VkPhysicalDeviceVulkan13Features *) (void *) next)->synchronization2 = VK_TRUE;
        } else if (next->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_TIMELINE_SEMAPHORE_FEATURES) {
            ((VkPhysicalDeviceTimelineSemaphoreFeatures *) (void *) next)->timelineSemaphore = VK_TRUE;
        } else if (next->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SYNCHRONIZATION_2_FEATURES) {
            ((VkPhysicalDeviceSynchronization2Features *) (void *) next)->synchronization2 = VK_TRUE;
        }
    }
}

MOCK(void) vkGetPhysicalDeviceProperties_(VkPhysicalDevice physical, VkPhysicalDeviceProperties * out) {
    memset(out, 0, sizeof(*out));
    out->apiVersion = mock.hide_submit2 ? VK_MAKE_API_VERSION(0, 1, 2, 239) : VK_MAKE_API_VERSION(0, 1, 3, 239);
    out->deviceType = VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU;
    out->limits.maxMemoryAllocationCount = 4096;
    out->limits.nonCoherentAtomSize      = 1;
    out->limits.bufferImageGranularity   = 1;
    out->limits.minMemoryMapAlignment    = 64;
    out->limits.sparseAddressSpaceSize   = (VkDeviceSize) 1 << 40;
    snprintf(out->deviceName, sizeof(out->deviceName), "mock %d",
             (int) ((struct mock_dispatchable *) physical - mock_physical));
}

MOCK(void) vkGetPhysicalDeviceProperties2_(VkPhysicalDevice physical, VkPhysicalDeviceProperties2 * out) {
    vkGetPhysicalDeviceProperties_(physical, &out->properties);
}

static VkQueueFamilyProperties mock_family(uint32_t i) {
    const VkQueueFlags moves = VK_QUEUE_TRANSFER_BIT | VK_QUEUE_SPARSE_BINDING_BIT;
    return (VkQueueFamilyProperties) {
        .queueFlags                  = i == 0 ? moves | VK_QUEUE_COMPUTE_BIT : moves,
        .queueCount                  = i == 0 ? MOCK_N_QUEUES : 2,
        .minImageTransferGranularity = { 1, 1, 1 },
    };
}

MOCK(void) vkGetPhysicalDeviceQueueFamilyProperties_(VkPhysicalDevice physical, uint32_t * n,
                                                     VkQueueFamilyProperties * out) {
    UNUSED(physical);
    for (uint32_t i = 0; out && i < *n && i < MOCK_N_FAMILIES; i++) {
        out[i] = mock_family(i);
    }
    *n = out && *n < MOCK_N_FAMILIES ? *n : MOCK_N_FAMILIES;
}

MOCK(void) vkGetPhysicalDeviceQueueFamilyProperties2_(VkPhysicalDevice physical, uint32_t * n,
                                                      VkQueueFamilyProperties2 * out) {
    UNUSED(physical);
    for (uint32_t i = 0; out && i < *n && i < MOCK_N_FAMILIES; i++) {
        out[i].queueFamilyProperties = mock_family(i);
    }
    *n = out && *n < MOCK_N_FAMILIES ? *n : MOCK_N_FAMILIES;
}

MOCK(void) vkGetPhysicalDeviceMemoryProperties_(VkPhysicalDevice physical, VkPhysicalDeviceMemoryProperties * out) {
    UNUSED(physical);
    const VkMemoryPropertyFlags device = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT;
    const VkMemoryPropertyFlags host   = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    memset(out, 0, sizeof(*out));
    out->memoryHeapCount = mock.unified ? 1 : 2;
    out->memoryHeaps[0]  = (VkMemoryHeap) { (VkDeviceSize) 1 << 30, VK_MEMORY_HEAP_DEVICE_LOCAL_BIT };
    out->memoryHeaps[1]  = (VkMemoryHeap) { (VkDeviceSize) 1 << 30, 0 };
    if (mock.unified) {
        out->memoryTypeCount = 1;
        out->memoryTypes[0]  = (VkMemoryType) { device | host, 0 };
        return;
    }
    out->memoryTypeCount = 3;
    out->memoryTypes[0]  = (VkMemoryType) { device, 0 };
    out->memoryTypes[1]  = (VkMemoryType) { host, 1 };
    out->memoryTypes[2]  = (VkMemoryType) { device | host, 0 };
}

MOCK(void) vkGetPhysicalDeviceMemoryProperties2_(VkPhysicalDevice physical, VkPhysicalDeviceMemoryProperties2 * out) {
    vkGetPhysicalDeviceMemoryProperties_(physical, &out->memoryProperties);
}

MOCK(void) vkGetPhysicalDeviceFormatProperties_(VkPhysicalDevice physical, VkFormat format, VkFormatProperties * out) {
    UNUSED(physical); UNUSED(format);
    memset(out, 0, sizeof(*out));
}

MOCK(VkResult) vkGetPhysicalDeviceImageFormatProperties_(VkPhysicalDevice physical, VkFormat format, VkImageType type,
                                                         VkImageTiling tiling, VkImageUsageFlags usage,
                                                         VkImageCreateFlags flags, VkImageFormatProperties * out) {
    UNUSED(physical); UNUSED(format); UNUSED(type); UNUSED(tiling); UNUSED(usage); UNUSED(flags); UNUSED(out);
    return VK_ERROR_FORMAT_NOT_SUPPORTED;
}

MOCK(void) vkGetPhysicalDeviceSparseImageFormatProperties_(VkPhysicalDevice physical, VkFormat format, VkImageType type,
                                                           VkSampleCountFlagBits samples, VkImageUsageFlags usage,
                                                           VkImageTiling tiling, uint32_t * n,
                                                           VkSparseImageFormatProperties * out) {
    UNUSED(physical); UNUSED(format); UNUSED(type); UNUSED(samples); UNUSED(usage); UNUSED(tiling); UNUSED(out);
    *n = 0;
}

MOCK(VkResult) vkEnumerateDeviceExtensionProperties_(VkPhysicalDevice physical, const char * layer, uint32_t * n,
                                                     VkExtensionProperties * out) {
    UNUSED(physical); UNUSED(layer);
    static const char * const names[] = {
        "VK_KHR_timeline_semaphore", "VK_KHR_bind_memory2", "VK_KHR_copy_commands2", "VK_KHR_synchronization2",
    };
    return mock_list_extensions(names, mock.hide_submit2 ? 3 : 4, n, out);
}

// ---- devices and queues

MOCK(VkResult) vkCreateDevice_(VkPhysicalDevice physical, const VkDeviceCreateInfo * info, ALLOC, VkDevice * out) {
    UNUSED(physical); UNUSED(info); UNUSED(a);
    ENTER(vkCreateDevice);
    struct mock_device * device = calloc(1, sizeof(*device));
    if (!device) {
        return VK_ERROR_OUT_OF_HOST_MEMORY;
    }
    device->loader.loaderMagic = ICD_LOADER_MAGIC;
    for (int f = 0; f < MOCK_N_FAMILIES; f++) {
        for (int q = 0; q < MOCK_N_QUEUES; q++) {
            device->queues[f][q].loader.loaderMagic = ICD_LOADER_MAGIC;
        }
    }
    *out = (VkDevice) device;
    return VK_SUCCESS;
}

MOCK(void) vkDestroyDevice_(VkDevice device, ALLOC) {
    UNUSED(a);
    mock_enter(MOCK_vkDestroyDevice);
    free(device);
}

MOCK(void) vkGetDeviceQueue_(VkDevice device, uint32_t family, uint32_t index, VkQueue * out) {
    *out = (VkQueue) &((struct mock_device *) device)->queues[family][index];
}

MOCK(void) vkGetDeviceQueue2_(VkDevice device, const VkDeviceQueueInfo2 * info, VkQueue * out) {
    vkGetDeviceQueue_(device, info->queueFamilyIndex, info->queueIndex, out);
}

static void mock_submit_fence(VkFence handle) {
    struct mock_fence * fence = (struct mock_fence *) handle;
    if (fence) {
        atomic_store(&fence->polls, mock.polls_not_ready);
        atomic_store(&fence->submitted, true);
    }
}

MOCK(VkResult) vkQueueSubmit_(VkQueue queue, uint32_t n, const VkSubmitInfo * infos, VkFence fence) {
    UNUSED(queue); UNUSED(n); UNUSED(infos);
    ENTER(vkQueueSubmit);
    mock_submit_fence(fence);
    return VK_SUCCESS;
}

MOCK(VkResult) vkQueueSubmit2_(VkQueue queue, uint32_t n, const VkSubmitInfo2 * infos, VkFence fence) {
    UNUSED(queue); UNUSED(n); UNUSED(infos);
    ENTER(vkQueueSubmit2);
    mock_submit_fence(fence);
    return VK_SUCCESS;
}

MOCK(VkResult) vkQueueBindSparse_(VkQueue queue, uint32_t n, const VkBindSparseInfo * infos, VkFence fence) {
    UNUSED(queue); UNUSED(n); UNUSED(infos);
    ENTER(vkQueueBindSparse);
    mock_submit_fence(fence);
    return VK_SUCCESS;
}

MOCK(VkResult) vkQueueWaitIdle_(VkQueue queue) {
    UNUSED(queue);
    ENTER(vkQueueWaitIdle);
    mock_delay();
    return VK_SUCCESS;
}

MOCK(VkResult) vkDeviceWaitIdle_(VkDevice device) {
    UNUSED(device);
    ENTER(vkDeviceWaitIdle);
    mock_delay();
    return VK_SUCCESS;
}

// ---- fences and semaphores

MOCK(VkResult) vkCreateFence_(VkDevice device, const VkFenceCreateInfo * info, ALLOC, VkFence * out) {
    UNUSED(device); UNUSED(a);
    ENTER(vkCreateFence);
    struct mock_fence * fence = calloc(1, sizeof(*fence));
    if (!fence) {
        return VK_ERROR_OUT_OF_HOST_MEMORY;
    }
    fence->signaled = (info->flags & VK_FENCE_CREATE_SIGNALED_BIT) != 0;
    *out = (VkFence) fence;
    return VK_SUCCESS;
}

MOCK(void) vkDestroyFence_(VkDevice device, VkFence fence, ALLOC) {
    UNUSED(device); UNUSED(a);
    mock_enter(MOCK_vkDestroyFence);
    free((void *) fence);
}

MOCK(VkResult) vkResetFences_(VkDevice device, uint32_t n, const VkFence * fences) {
    UNUSED(device);
    ENTER(vkResetFences);
    for (uint32_t i = 0; i < n; i++) {
        struct mock_fence * fence = (struct mock_fence *) fences[i];
        atomic_store(&fence->signaled, false);
        atomic_store(&fence->submitted, false);
    }
    return VK_SUCCESS;
}

MOCK(VkResult) vkGetFenceStatus_(VkDevice device, VkFence handle) {
    UNUSED(device);
    ENTER(vkGetFenceStatus);
    struct mock_fence * fence = (struct mock_fence *) handle;
    if (atomic_load(&fence->signaled)) {
        return VK_SUCCESS;
    }
    if (!atomic_load(&fence->submitted)) {
        return VK_NOT_READY;
    }
    if (atomic_load(&fence->polls) > 0) {
        atomic_fetch_sub(&fence->polls, 1);
        return VK_NOT_READY;
    }
    atomic_store(&fence->signaled, true);
    return VK_SUCCESS;
}

MOCK(VkResult) vkWaitForFences_(VkDevice device, uint32_t n, const VkFence * fences, VkBool32 all, uint64_t timeout) {
    UNUSED(device); UNUSED(all);
    ENTER(vkWaitForFences);
    for (uint32_t i = 0; i < n; i++) {
        struct mock_fence * fence = (struct mock_fence *) fences[i];
        if (!atomic_load(&fence->signaled) && !atomic_load(&fence->submitted)) {
            return VK_TIMEOUT;
        }
        if (timeout == 0 && !atomic_load(&fence->signaled) && atomic_load(&fence->polls) > 0) {
            atomic_fetch_sub(&fence->polls, 1);
            return VK_TIMEOUT;
        }
    }
    if (timeout > 0) {
        mock_delay();
    }
    for (uint32_t i = 0; i < n; i++) {
        atomic_store(&((struct mock_fence *) fences[i])->signaled, true);
    }
    return VK_SUCCESS;
}

MOCK(VkResult) vkCreateSemaphore_(VkDevice device, const VkSemaphoreCreateInfo * info, ALLOC, VkSemaphore * out) {
    UNUSED(device); UNUSED(info); UNUSED(a);
    *out = (VkSemaphore) calloc(1, sizeof(struct mock_semaphore));
    return *out ? VK_SUCCESS : VK_ERROR_OUT_OF_HOST_MEMORY;
}

MOCK(void) vkDestroySemaphore_(VkDevice device, VkSemaphore semaphore, ALLOC) {
    UNUSED(device); UNUSED(a);
    free((void *) semaphore);
}

MOCK(VkResult) vkSignalSemaphore_(VkDevice device, const VkSemaphoreSignalInfo * info) {
    UNUSED(device);
    atomic_store(&((struct mock_semaphore *) info->semaphore)->value, info->value);
    return VK_SUCCESS;
}

MOCK(VkResult) vkGetSemaphoreCounterValue_(VkDevice device, VkSemaphore semaphore, uint64_t * value) {
    UNUSED(device);
    *value = atomic_load(&((struct mock_semaphore *) semaphore)->value);
    return VK_SUCCESS;
}

MOCK(VkResult) vkWaitSemaphores_(VkDevice device, const VkSemaphoreWaitInfo * info, uint64_t timeout) {
    UNUSED(device); UNUSED(timeout);
    ENTER(vkWaitSemaphores);
    for (uint32_t i = 0; i < info->semaphoreCount; i++) {
        if (atomic_load(&((struct mock_semaphore *) info->pSemaphores[i])->value) < info->pValues[i]) {
            return VK_TIMEOUT;
        }
    }
    mock_delay();
    return VK_SUCCESS;
}

// ---- memory, buffers, commands

MOCK(VkResult) vkAllocateMemory_(VkDevice device, const VkMemoryAllocateInfo * info, ALLOC, VkDeviceMemory * out) {
    UNUSED(device); UNUSED(info); UNUSED(a);
    ENTER(vkAllocateMemory);
    *out = (VkDeviceMemory) calloc(1, sizeof(struct mock_memory));
    return *out ? VK_SUCCESS : VK_ERROR_OUT_OF_HOST_MEMORY;
}

MOCK(void) vkFreeMemory_(VkDevice device, VkDeviceMemory memory, ALLOC) {
    UNUSED(device); UNUSED(a);
    mock_enter(MOCK_vkFreeMemory);
    free((void *) memory);
}

MOCK(VkResult) vkCreateBuffer_(VkDevice device, const VkBufferCreateInfo * info, ALLOC, VkBuffer * out) {
    UNUSED(device); UNUSED(a);
    VkDeviceSize * buffer = malloc(sizeof(*buffer));
    if (!buffer) {
        return VK_ERROR_OUT_OF_HOST_MEMORY;
    }
    *buffer = info->size;
    *out = (VkBuffer) buffer;
    return VK_SUCCESS;
}

MOCK(void) vkDestroyBuffer_(VkDevice device, VkBuffer buffer, ALLOC) {
    UNUSED(device); UNUSED(a);
    mock_enter(MOCK_vkDestroyBuffer);
    free((void *) buffer);
}

MOCK(void) vkGetBufferMemoryRequirements_(VkDevice device, VkBuffer buffer, VkMemoryRequirements * out) {
    UNUSED(device);
    *out = (VkMemoryRequirements) { *(VkDeviceSize *) buffer, 64, mock.unified ? 1 : 7 };
}

MOCK(void) vkGetBufferMemoryRequirements2_(VkDevice device, const VkBufferMemoryRequirementsInfo2 * info,
                                           VkMemoryRequirements2 * out) {
    vkGetBufferMemoryRequirements_(device, info->buffer, &out->memoryRequirements);
}

MOCK(VkResult) vkBindBufferMemory_(VkDevice device, VkBuffer buffer, VkDeviceMemory memory, VkDeviceSize offset) {
    UNUSED(device); UNUSED(buffer); UNUSED(memory); UNUSED(offset);
    ENTER(vkBindBufferMemory);
    return VK_SUCCESS;
}

MOCK(VkResult) vkBindBufferMemory2_(VkDevice device, uint32_t n, const VkBindBufferMemoryInfo * infos) {
    UNUSED(device); UNUSED(n); UNUSED(infos);
    ENTER(vkBindBufferMemory2);
    return VK_SUCCESS;
}

MOCK(VkResult) vkCreateCommandPool_(VkDevice device, const VkCommandPoolCreateInfo * info, ALLOC, VkCommandPool * out) {
    UNUSED(device); UNUSED(info); UNUSED(a);
    *out = (VkCommandPool) malloc(1);
    return *out ? VK_SUCCESS : VK_ERROR_OUT_OF_HOST_MEMORY;
}

MOCK(void) vkDestroyCommandPool_(VkDevice device, VkCommandPool pool, ALLOC) {
    UNUSED(device); UNUSED(a);
    free((void *) pool);
}

MOCK(VkResult) vkAllocateCommandBuffers_(VkDevice device, const VkCommandBufferAllocateInfo * info,
                                         VkCommandBuffer * out) {
    UNUSED(device);
    for (uint32_t i = 0; i < info->commandBufferCount; i++) {
        struct mock_dispatchable * commands = calloc(1, sizeof(*commands));
        if (!commands) {
            return VK_ERROR_OUT_OF_HOST_MEMORY;
        }
        commands->loader.loaderMagic = ICD_LOADER_MAGIC;
        out[i] = (VkCommandBuffer) commands;
    }
    return VK_SUCCESS;
}

MOCK(void) vkFreeCommandBuffers_(VkDevice device, VkCommandPool pool, uint32_t n, const VkCommandBuffer * commands) {
    UNUSED(device); UNUSED(pool);
    for (uint32_t i = 0; i < n; i++) {
        free((void *) commands[i]);
    }
}

MOCK(VkResult) vkBeginCommandBuffer_(VkCommandBuffer commands, const VkCommandBufferBeginInfo * info) {
    UNUSED(commands); UNUSED(info);
    return VK_SUCCESS;
}

MOCK(VkResult) vkEndCommandBuffer_(VkCommandBuffer commands) {
    UNUSED(commands);
    return VK_SUCCESS;
}

MOCK(void) vkCmdCopyBuffer_(VkCommandBuffer commands, VkBuffer source, VkBuffer destination, uint32_t n,
                            const VkBufferCopy * regions) {
    UNUSED(commands); UNUSED(source); UNUSED(destination); UNUSED(n); UNUSED(regions);
    mock_enter(MOCK_vkCmdCopyBuffer);
}

MOCK(void) vkCmdCopyBuffer2_(VkCommandBuffer commands, const VkCopyBufferInfo2 * info) {
    UNUSED(commands); UNUSED(info);
    mock_enter(MOCK_vkCmdCopyBuffer2);
}

// ---- by name

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetInstanceProcAddr_(VkInstance instance, const char * name);
static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetDeviceProcAddr_(VkDevice device, const char * name);

struct mock_entry {
    const char *       name;
    PFN_vkVoidFunction function;
};

#define ENTRY(name)       { #name, (PFN_vkVoidFunction) name##_ }
#define ALIAS(name, same) { #name, (PFN_vkVoidFunction) same##_ }

static const struct mock_entry mock_instance_functions[] = {
    ENTRY(vkGetInstanceProcAddr), ENTRY(vkEnumerateInstanceVersion), ENTRY(vkEnumerateInstanceExtensionProperties),
    ENTRY(vkCreateInstance), ENTRY(vkDestroyInstance), ENTRY(vkEnumeratePhysicalDevices),
    ENTRY(vkGetPhysicalDeviceFeatures), ENTRY(vkGetPhysicalDeviceFeatures2),
    ALIAS(vkGetPhysicalDeviceFeatures2KHR, vkGetPhysicalDeviceFeatures2),
    ENTRY(vkGetPhysicalDeviceProperties), ENTRY(vkGetPhysicalDeviceProperties2),
    ALIAS(vkGetPhysicalDeviceProperties2KHR, vkGetPhysicalDeviceProperties2),
    ENTRY(vkGetPhysicalDeviceQueueFamilyProperties), ENTRY(vkGetPhysicalDeviceQueueFamilyProperties2),
    ALIAS(vkGetPhysicalDeviceQueueFamilyProperties2KHR, vkGetPhysicalDeviceQueueFamilyProperties2),
    ENTRY(vkGetPhysicalDeviceMemoryProperties), ENTRY(vkGetPhysicalDeviceMemoryProperties2),
    ALIAS(vkGetPhysicalDeviceMemoryProperties2KHR, vkGetPhysicalDeviceMemoryProperties2),
    ENTRY(vkGetPhysicalDeviceFormatProperties), ENTRY(vkGetPhysicalDeviceImageFormatProperties),
    ENTRY(vkGetPhysicalDeviceSparseImageFormatProperties), ENTRY(vkEnumerateDeviceExtensionProperties),
    ENTRY(vkCreateDevice),
};

static const struct mock_entry mock_device_functions[] = {
    ENTRY(vkGetDeviceProcAddr), ENTRY(vkDestroyDevice), ENTRY(vkGetDeviceQueue), ENTRY(vkGetDeviceQueue2),
    ENTRY(vkQueueSubmit), ENTRY(vkQueueSubmit2), ALIAS(vkQueueSubmit2KHR, vkQueueSubmit2), ENTRY(vkQueueBindSparse),
    ENTRY(vkQueueWaitIdle), ENTRY(vkDeviceWaitIdle),
    ENTRY(vkCreateFence), ENTRY(vkDestroyFence), ENTRY(vkResetFences), ENTRY(vkGetFenceStatus), ENTRY(vkWaitForFences),
    ENTRY(vkCreateSemaphore), ENTRY(vkDestroySemaphore), ENTRY(vkSignalSemaphore), ENTRY(vkGetSemaphoreCounterValue),
    ALIAS(vkSignalSemaphoreKHR, vkSignalSemaphore), ALIAS(vkGetSemaphoreCounterValueKHR, vkGetSemaphoreCounterValue),
    ENTRY(vkWaitSemaphores), ALIAS(vkWaitSemaphoresKHR, vkWaitSemaphores),
    ENTRY(vkAllocateMemory), ENTRY(vkFreeMemory), ENTRY(vkCreateBuffer), ENTRY(vkDestroyBuffer),
    ENTRY(vkGetBufferMemoryRequirements), ENTRY(vkGetBufferMemoryRequirements2), ENTRY(vkBindBufferMemory),
    ENTRY(vkBindBufferMemory2), ALIAS(vkBindBufferMemory2KHR, vkBindBufferMemory2),
    ENTRY(vkCreateCommandPool), ENTRY(vkDestroyCommandPool), ENTRY(vkAllocateCommandBuffers),
    ENTRY(vkFreeCommandBuffers), ENTRY(vkBeginCommandBuffer), ENTRY(vkEndCommandBuffer),
    ENTRY(vkCmdCopyBuffer), ENTRY(vkCmdCopyBuffer2), ALIAS(vkCmdCopyBuffer2KHR, vkCmdCopyBuffer2),
};

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetDeviceProcAddr_(VkDevice device, const char * name) {
    UNUSED(device);
    if (mock.hide_submit2 && !strncmp(name, "vkQueueSubmit2", 14)) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof(mock_device_functions)/sizeof(mock_device_functions[0]); i++) {
        if (!strcmp(name, mock_device_functions[i].name)) {
            return mock_device_functions[i].function;
        }
    }
    return NULL;
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetInstanceProcAddr_(VkInstance instance, const char * name) {
    UNUSED(instance);
    for (size_t i = 0; i < sizeof(mock_instance_functions)/sizeof(mock_instance_functions[0]); i++) {
        if (!strcmp(name, mock_instance_functions[i].name)) {
            return mock_instance_functions[i].function;
        }
    }
    return vkGetDeviceProcAddr_(NULL, name);
}

// Newer vk_icd.h declare these, older do not.
VKAPI_ATTR VkResult VKAPI_CALL vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t * version);
VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vk_icdGetInstanceProcAddr(VkInstance instance, const char * name);

MOCK_API VKAPI_ATTR VkResult VKAPI_CALL vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t * version) {
    *version = *version < 5 ? *version : 5;
    return VK_SUCCESS;
}

MOCK_API VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vk_icdGetInstanceProcAddr(VkInstance instance, const char * name) {
    return vkGetInstanceProcAddr_(instance, name);
}
