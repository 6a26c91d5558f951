// VK_LAYER_GGML_ASYNC_waits: counts queue submits and waits for the device, for any program.
//
// Here: the chain of instances and devices. What is counted and what one wait is stands in vulkan_counters.h, the hooks
// that count in vulkan_hooks.c. The layer asks a new device once for its name and memory types and calls nothing else
// down that the program did not call, holds no lock across a call, returns what the call returned, and prints nothing.

#include "vulkan_layer.h"

#include <stdlib.h>
#include <string.h>

// What hangs on a VkInstance and its physical devices.
struct vl_instance {
    VkInstance                                instance;
    PFN_vkGetInstanceProcAddr                 GetInstanceProcAddr;
    PFN_vkDestroyInstance                     DestroyInstance;
    PFN_vkGetPhysicalDeviceProperties         GetPhysicalDeviceProperties;
    PFN_vkGetPhysicalDeviceMemoryProperties   GetPhysicalDeviceMemoryProperties;
};

static pthread_mutex_t vl_table_lock = PTHREAD_MUTEX_INITIALIZER;   // adding to and removing from the tables
static struct vl_table vl_instance_table;
struct vl_table        vl_device_table;

static bool vl_register(struct vl_table * table, const void * handle, void * value) {
    pthread_mutex_lock(&vl_table_lock);
    const bool ok = vl_table_add_locked(table, vl_key(handle), value);
    pthread_mutex_unlock(&vl_table_lock);
    return ok;
}

static void vl_unregister(struct vl_table * table, const void * key) {
    pthread_mutex_lock(&vl_table_lock);
    vl_table_remove_locked(table, key);
    pthread_mutex_unlock(&vl_table_lock);
}

// ---- devices

VKAPI_ATTR void VKAPI_CALL waits_DestroyDevice(VkDevice handle, const VkAllocationCallbacks * allocator) {
    if (!handle) {
        return;
    }
    void * const       key    = vl_key(handle);
    struct vl_device * device = vl_table_get(&vl_device_table, key);
    // Before the call down: the loader may give the same dispatch pointer to another thread's device right after it.
    vl_unregister(&vl_device_table, key);
    device->DestroyDevice(handle, allocator);
    vl_device_retire(device);
}

static int vl_device_type(VkPhysicalDeviceType type) {
    switch (type) {
        case VK_PHYSICAL_DEVICE_TYPE_CPU:            return 0;
        case VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU:   return 1;
        case VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU:    return 1;
        case VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU: return 2;
        default:                                     return -1;
    }
}

// The link that the loader left for us.
static VkLayerDeviceCreateInfo * vl_device_link(const VkDeviceCreateInfo * info) {
    for (const VkBaseInStructure * next = info->pNext; next; next = next->pNext) {
        VkLayerDeviceCreateInfo * link = (VkLayerDeviceCreateInfo *) (uintptr_t) next;
        if (next->sType == VK_STRUCTURE_TYPE_LOADER_DEVICE_CREATE_INFO && link->function == VK_LAYER_LINK_INFO) {
            return link;
        }
    }
    return NULL;
}

static VKAPI_ATTR VkResult VKAPI_CALL waits_CreateDevice(VkPhysicalDevice physical, const VkDeviceCreateInfo * info,
                                                         const VkAllocationCallbacks * allocator, VkDevice * handle) {
    const struct vl_instance * instance = vl_table_get(&vl_instance_table, vl_key(physical));
    VkLayerDeviceCreateInfo *  link     = vl_device_link(info);
    if (!instance || !link || !link->u.pLayerInfo) {
        return VK_ERROR_INITIALIZATION_FAILED;
    }
    const PFN_vkGetInstanceProcAddr next_instance = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    const PFN_vkGetDeviceProcAddr   next_device   = link->u.pLayerInfo->pfnNextGetDeviceProcAddr;
    const PFN_vkCreateDevice        create = (PFN_vkCreateDevice) next_instance(instance->instance, "vkCreateDevice");
    if (!create) {
        return VK_ERROR_INITIALIZATION_FAILED;
    }
    struct vl_device * device = vl_device_new();
    if (!device) {
        return VK_ERROR_OUT_OF_HOST_MEMORY;
    }
    VkLayerDeviceLink * const ours = link->u.pLayerInfo;
    link->u.pLayerInfo = ours->pNext;
    const VkResult result = create(physical, info, allocator, handle);
    if (result != VK_SUCCESS) {
        link->u.pLayerInfo = ours;   // a layer above may try again
        vl_device_drop(device);
        return result;
    }
    device->GetDeviceProcAddr = next_device;
#define X(name) device->name = (PFN_vk##name) next_device(*handle, "vk" #name);
    VL_DEVICE_HOOKS(X)
#undef X
    VkPhysicalDeviceProperties properties;
    instance->GetPhysicalDeviceProperties(physical, &properties);
    instance->GetPhysicalDeviceMemoryProperties(physical, &device->memory_types);
    memcpy(device->name, properties.deviceName, sizeof(device->name));
    device->type = vl_device_type(properties.deviceType);
    if (!vl_register(&vl_device_table, *handle, device)) {   // more keys than devices are allowed: cannot happen
        device->DestroyDevice(*handle, allocator);
        vl_device_drop(device);
        return VK_ERROR_OUT_OF_HOST_MEMORY;
    }
    vl_device_list(device);
    return VK_SUCCESS;
}

// ---- instances

static VKAPI_ATTR void VKAPI_CALL waits_DestroyInstance(VkInstance handle, const VkAllocationCallbacks * allocator) {
    if (!handle) {
        return;
    }
    void * const         key      = vl_key(handle);
    struct vl_instance * instance = vl_table_get(&vl_instance_table, key);
    vl_unregister(&vl_instance_table, key);
    instance->DestroyInstance(handle, allocator);
    free(instance);
}

static VkLayerInstanceCreateInfo * vl_instance_link(const VkInstanceCreateInfo * info) {
    for (const VkBaseInStructure * next = info->pNext; next; next = next->pNext) {
        VkLayerInstanceCreateInfo * link = (VkLayerInstanceCreateInfo *) (uintptr_t) next;
        if (next->sType == VK_STRUCTURE_TYPE_LOADER_INSTANCE_CREATE_INFO && link->function == VK_LAYER_LINK_INFO) {
            return link;
        }
    }
    return NULL;
}

static VKAPI_ATTR VkResult VKAPI_CALL waits_CreateInstance(const VkInstanceCreateInfo * info,
                                                           const VkAllocationCallbacks * allocator,
                                                           VkInstance * handle) {
    VkLayerInstanceCreateInfo * link = vl_instance_link(info);
    if (!link || !link->u.pLayerInfo) {
        return VK_ERROR_INITIALIZATION_FAILED;
    }
    const PFN_vkGetInstanceProcAddr next   = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    const PFN_vkCreateInstance      create = (PFN_vkCreateInstance) next(NULL, "vkCreateInstance");
    struct vl_instance *            instance = calloc(1, sizeof(*instance));
    if (!create || !instance) {
        free(instance);
        return create ? VK_ERROR_OUT_OF_HOST_MEMORY : VK_ERROR_INITIALIZATION_FAILED;
    }
    VkLayerInstanceLink * const ours = link->u.pLayerInfo;
    link->u.pLayerInfo = ours->pNext;
    const VkResult result = create(info, allocator, handle);
    if (result != VK_SUCCESS) {
        link->u.pLayerInfo = ours;   // a layer above may try again
        free(instance);
        return result;
    }
    instance->instance            = *handle;
    instance->GetInstanceProcAddr = next;
#define VL_FETCH(name) instance->name = (PFN_vk##name) next(*handle, "vk" #name)
    VL_FETCH(DestroyInstance);
    VL_FETCH(GetPhysicalDeviceProperties);
    VL_FETCH(GetPhysicalDeviceMemoryProperties);
#undef VL_FETCH
    if (!vl_register(&vl_instance_table, *handle, instance)) {
        instance->DestroyInstance(*handle, allocator);
        free(instance);
        return VK_ERROR_OUT_OF_HOST_MEMORY;
    }
    vl_capture_start();
    return VK_SUCCESS;
}

// ---- the door

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL waits_GetInstanceProcAddr(VkInstance handle, const char * name);

// A hook exists above us only where its function exists below us.
static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL waits_GetDeviceProcAddr(VkDevice handle, const char * name) {
    const struct vl_device * device = vl_table_get(&vl_device_table, vl_key(handle));
    if (!device) {
        return NULL;
    }
    if (!strcmp(name, "vkGetDeviceProcAddr")) {
        return (PFN_vkVoidFunction) waits_GetDeviceProcAddr;
    }
    bool                     exists = false;
    const PFN_vkVoidFunction hook   = vl_hook(device, name, &exists);
    if (hook) {
        return exists ? hook : NULL;
    }
    return device->GetDeviceProcAddr(handle, name);
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL waits_GetInstanceProcAddr(VkInstance handle, const char * name) {
    if (!strcmp(name, "vkGetInstanceProcAddr")) {
        return (PFN_vkVoidFunction) waits_GetInstanceProcAddr;
    }
    if (!strcmp(name, "vkCreateInstance")) {
        return (PFN_vkVoidFunction) waits_CreateInstance;
    }
    const struct vl_instance * instance = handle ? vl_table_get(&vl_instance_table, vl_key(handle)) : NULL;
    if (!instance) {
        return NULL;
    }
    if (!strcmp(name, "vkDestroyInstance")) {
        return (PFN_vkVoidFunction) waits_DestroyInstance;
    }
    if (!strcmp(name, "vkCreateDevice")) {
        return (PFN_vkVoidFunction) waits_CreateDevice;
    }
    const PFN_vkVoidFunction next = instance->GetInstanceProcAddr(handle, name);
    PFN_vkVoidFunction       hook = vl_hook(NULL, name, NULL);
    if (!strcmp(name, "vkGetDeviceProcAddr")) {
        hook = (PFN_vkVoidFunction) waits_GetDeviceProcAddr;
    }
    return next && hook ? hook : next;
}

// vk_layer.h declares it without a visibility.
GGML_ASYNC_LAYER_API VKAPI_ATTR VkResult VKAPI_CALL
vkNegotiateLoaderLayerInterfaceVersion(VkNegotiateLayerInterface * version);

VKAPI_ATTR VkResult VKAPI_CALL vkNegotiateLoaderLayerInterfaceVersion(VkNegotiateLayerInterface * version) {
    if (!version || version->sType != LAYER_NEGOTIATE_INTERFACE_STRUCT || version->loaderLayerInterfaceVersion < 2) {
        return VK_ERROR_INITIALIZATION_FAILED;
    }
    version->loaderLayerInterfaceVersion   = 2;
    version->pfnGetInstanceProcAddr        = waits_GetInstanceProcAddr;
    version->pfnGetDeviceProcAddr          = waits_GetDeviceProcAddr;
    version->pfnGetPhysicalDeviceProcAddr  = NULL;
    return VK_SUCCESS;
}
