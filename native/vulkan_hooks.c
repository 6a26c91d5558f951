// The hooks that count. Each times the call down, holds no lock across it, and returns what it returned.

#include "capture.h"
#include "vulkan_layer.h"

#include <stdlib.h>
#include <string.h>

static struct vl_device * vl_device_of(const void * handle) {
    return vl_table_get(&vl_device_table, vl_key(handle));
}

// ---- submits

static void vl_submit_event(const struct vl_device * device, enum vl_submit_path path, uint32_t n_infos, uint64_t begin, uint64_t ns) {
    if (ga_capture_on()) {
        vl_capture_event((struct vl_event) {
            .kind = GA_CAPTURE_EVENT_SUBMIT, .path = (uint8_t) path, .device = (int16_t) device->index, .n_infos = n_infos,
            .t_ns = begin, .ns = ns,
        });
    }
}

static VkResult vl_submitted(const struct vl_device * device, struct vl_scope * scope, enum vl_submit_path path, uint32_t n_infos,
                             VkResult result, uint64_t begin) {
    const uint64_t ns = vl_now_ns() - begin;
    VL_ADD(scope, queue_submit_ns, ns);
    vl_submit_event(device, path, n_infos, begin, ns);
    if (result < 0) {
        VL_ADD(scope, errors, 1);
    }
    return result;
}

// Counts a submit that is about to be made, and begins the fence's life on that queue.
static struct vl_scope * vl_submit(struct vl_device * device, VkQueue queue, uint32_t n_infos, VkFence fence) {
    const uint32_t    index = vl_queue_scope(device, queue);
    struct vl_scope * scope = &device->scopes[index];
    vl_count_submit(device, scope);
    VL_ADD(scope, submit_infos, n_infos);
    struct vl_fence * followed = fence ? (struct vl_fence *) vl_map_get(&device->fences, (uint64_t) fence) : NULL;
    if (followed) {
        atomic_store_explicit(&followed->scope, index, memory_order_relaxed);
        atomic_store_explicit(&followed->span_start, 0, memory_order_relaxed);
    }
    return scope;
}

static VKAPI_ATTR VkResult VKAPI_CALL waits_QueueSubmit(VkQueue queue, uint32_t n, const VkSubmitInfo * infos,
                                                        VkFence fence) {
    struct vl_device * device = vl_device_of(queue);
    struct vl_scope *  scope  = vl_submit(device, queue, n, fence);
    const uint64_t     begin  = vl_now_ns();
    const VkResult     result = device->QueueSubmit(queue, n, infos, fence);
    return vl_submitted(device, scope, VL_SUBMIT, n, result, begin);
}

static VkResult vl_submit2(PFN_vkQueueSubmit2 down, struct vl_device * device, VkQueue queue, uint32_t n,
                           const VkSubmitInfo2 * infos, VkFence fence) {
    struct vl_scope * scope = vl_submit(device, queue, n, fence);
    VL_ADD(scope, queue_submit2s, 1);
    const uint64_t begin = vl_now_ns();
    const VkResult result = down(queue, n, infos, fence);
    return vl_submitted(device, scope, VL_SUBMIT2, n, result, begin);
}

static VKAPI_ATTR VkResult VKAPI_CALL waits_QueueSubmit2(VkQueue queue, uint32_t n, const VkSubmitInfo2 * infos,
                                                         VkFence fence) {
    struct vl_device * device = vl_device_of(queue);
    return vl_submit2(device->QueueSubmit2, device, queue, n, infos, fence);
}

static VKAPI_ATTR VkResult VKAPI_CALL waits_QueueSubmit2KHR(VkQueue queue, uint32_t n, const VkSubmitInfo2 * infos,
                                                            VkFence fence) {
    struct vl_device * device = vl_device_of(queue);
    return vl_submit2(device->QueueSubmit2KHR, device, queue, n, infos, fence);
}

static VKAPI_ATTR VkResult VKAPI_CALL waits_QueueBindSparse(VkQueue queue, uint32_t n, const VkBindSparseInfo * infos,
                                                            VkFence fence) {
    struct vl_device * device = vl_device_of(queue);
    const uint32_t     index  = vl_queue_scope(device, queue);
    struct vl_scope *  scope  = &device->scopes[index];
    // Work for the queue, so it parts waits; but not one of the submits that are counted.
    atomic_fetch_add_explicit(&device->submits, 1, memory_order_relaxed);
    VL_ADD(scope, queue_bind_sparses, 1);
    VL_ADD(scope, bind_sparse_infos, n);
    struct vl_fence * followed = fence ? (struct vl_fence *) vl_map_get(&device->fences, (uint64_t) fence) : NULL;
    if (followed) {
        atomic_store_explicit(&followed->scope, index, memory_order_relaxed);
        atomic_store_explicit(&followed->span_start, 0, memory_order_relaxed);
    }
    const uint64_t begin  = vl_now_ns();
    const VkResult result = device->QueueBindSparse(queue, n, infos, fence);
    const uint64_t     ns     = vl_now_ns() - begin;
    VL_ADD(scope, queue_bind_sparse_ns, ns);
    vl_submit_event(device, VL_BIND_SPARSE, n, begin, ns);
    if (result < 0) {
        VL_ADD(scope, errors, 1);
    }
    return result;
}

// ---- fences

static VKAPI_ATTR VkResult VKAPI_CALL waits_CreateFence(VkDevice handle, const VkFenceCreateInfo * info,
                                                        const VkAllocationCallbacks * allocator, VkFence * fence) {
    struct vl_device * device = vl_device_of(handle);
    const VkResult     result = device->CreateFence(handle, info, allocator, fence);
    if (result == VK_SUCCESS) {
        struct vl_fence * followed = calloc(1, sizeof(*followed));
        if (!followed || !vl_map_put(&device->fences, (uint64_t) *fence, (uintptr_t) followed)) {
            free(followed);
            VL_ADD(&device->scopes[0], untracked, 1);
        }
    }
    return result;
}

static VKAPI_ATTR void VKAPI_CALL waits_DestroyFence(VkDevice handle, VkFence fence,
                                                     const VkAllocationCallbacks * allocator) {
    struct vl_device * device = vl_device_of(handle);
    free((struct vl_fence *) vl_map_take(&device->fences, (uint64_t) fence));
    device->DestroyFence(handle, fence, allocator);
}

static void vl_close_spans(struct vl_device * device, uint32_t n, const VkFence * fences) {
    for (uint32_t i = 0; i < n; i++) {
        struct vl_fence * followed = (struct vl_fence *) vl_map_get(&device->fences, (uint64_t) fences[i]);
        if (followed) {
            atomic_store_explicit(&followed->span_start, 0, memory_order_relaxed);
        }
    }
}

// The queue that all of them were last submitted to, else the device.
static struct vl_scope * vl_fences_scope(struct vl_device * device, uint32_t n, const VkFence * fences) {
    uint32_t index = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct vl_fence * followed = (struct vl_fence *) vl_map_get(&device->fences, (uint64_t) fences[i]);
        const uint32_t    its      = followed ? atomic_load_explicit(&followed->scope, memory_order_relaxed) : 0;
        if (i > 0 && its != index) {
            return &device->scopes[0];
        }
        index = its;
    }
    return &device->scopes[index];
}

// What the result of a call that can wait means; a timeout of 0 cannot.
static void vl_waited(struct vl_device * device, struct vl_scope * scope, enum vl_wait_path path, VkResult result, uint64_t submits,
                      uint64_t ns, bool blocking) {
    if (result == VK_SUCCESS) {
        vl_count_wait(device, scope, path, submits, ns, blocking);
    } else if (result == VK_TIMEOUT) {
        vl_count_timeout(device, path, submits, ns);
    } else if (result < 0) {
        VL_ADD(scope, errors, 1);
    }
}

static uint64_t vl_submits(struct vl_device * device) {
    return atomic_load_explicit(&device->submits, memory_order_relaxed);
}

static VKAPI_ATTR VkResult VKAPI_CALL waits_WaitForFences(VkDevice handle, uint32_t n, const VkFence * fences,
                                                          VkBool32 all, uint64_t timeout) {
    struct vl_device * device  = vl_device_of(handle);
    struct vl_scope *  scope   = vl_fences_scope(device, n, fences);
    const uint64_t     submits = vl_submits(device);
    const uint64_t     begin   = vl_now_ns();
    const VkResult     result  = device->WaitForFences(handle, n, fences, all, timeout);
    const uint64_t     ns      = vl_now_ns() - begin;
    VL_ADD(scope, wait_for_fences_calls, 1);
    VL_ADD(scope, wait_for_fences_ns, ns);
    if (result == VK_TIMEOUT) {
        VL_ADD(scope, wait_for_fences_timeouts, 1);
    } else if (result == VK_SUCCESS && (all || n == 1)) {
        vl_close_spans(device, n, fences);   // polls before it are part of this wait
    }
    vl_waited(device, scope, VL_WAIT_FENCES, result, submits, ns, timeout > 0);
    return result;
}

static VKAPI_ATTR VkResult VKAPI_CALL waits_GetFenceStatus(VkDevice handle, VkFence fence) {
    struct vl_device * device   = vl_device_of(handle);
    const VkResult     result   = device->GetFenceStatus(handle, fence);
    struct vl_fence *  followed = (struct vl_fence *) vl_map_get(&device->fences, (uint64_t) fence);
    const uint32_t     index    = followed ? atomic_load_explicit(&followed->scope, memory_order_relaxed) : 0;
    struct vl_scope *  scope    = &device->scopes[index];
    VL_ADD(scope, fence_status_polls, 1);
    if (result == VK_NOT_READY) {
        VL_ADD(scope, fence_status_not_ready, 1);
        if (followed && !atomic_load_explicit(&followed->span_start, memory_order_relaxed)) {
            atomic_store_explicit(&followed->span_submits, vl_submits(device), memory_order_relaxed);
            atomic_store_explicit(&followed->span_start, vl_now_ns(), memory_order_release);
        }
    } else if (result == VK_SUCCESS) {
        // Of several threads that poll one fence, the one that takes the start ends the span.
        uint64_t start = followed ? atomic_load_explicit(&followed->span_start, memory_order_acquire) : 0;
        if (start && atomic_compare_exchange_strong(&followed->span_start, &start, 0)) {
            const uint64_t ns = vl_now_ns() - start;
            VL_ADD(scope, fence_spans, 1);
            VL_ADD(scope, fence_span_ns, ns);
            vl_count_wait(device, scope, VL_WAIT_FENCE_STATUS, atomic_load_explicit(&followed->span_submits, memory_order_relaxed), ns, true);
        }
    } else if (result < 0) {
        VL_ADD(scope, errors, 1);
    }
    return result;
}

// ---- other waits

static VkResult vl_wait_semaphores(PFN_vkWaitSemaphores down, struct vl_device * device, VkDevice handle,
                                   const VkSemaphoreWaitInfo * info, uint64_t timeout) {
    struct vl_scope * scope   = &device->scopes[0];
    const uint64_t    submits = vl_submits(device);
    const uint64_t    begin   = vl_now_ns();
    const VkResult    result  = down(handle, info, timeout);
    const uint64_t    ns      = vl_now_ns() - begin;
    VL_ADD(scope, wait_semaphores_calls, 1);
    VL_ADD(scope, wait_semaphores_ns, ns);
    if (result == VK_TIMEOUT) {
        VL_ADD(scope, wait_semaphores_timeouts, 1);
    }
    vl_waited(device, scope, VL_WAIT_SEMAPHORES, result, submits, ns, timeout > 0);
    return result;
}

static VKAPI_ATTR VkResult VKAPI_CALL waits_WaitSemaphores(VkDevice handle, const VkSemaphoreWaitInfo * info,
                                                           uint64_t timeout) {
    struct vl_device * device = vl_device_of(handle);
    return vl_wait_semaphores(device->WaitSemaphores, device, handle, info, timeout);
}

static VKAPI_ATTR VkResult VKAPI_CALL waits_WaitSemaphoresKHR(VkDevice handle, const VkSemaphoreWaitInfo * info,
                                                              uint64_t timeout) {
    struct vl_device * device = vl_device_of(handle);
    return vl_wait_semaphores(device->WaitSemaphoresKHR, device, handle, info, timeout);
}

static VKAPI_ATTR VkResult VKAPI_CALL waits_QueueWaitIdle(VkQueue queue) {
    struct vl_device * device  = vl_device_of(queue);
    struct vl_scope *  scope   = &device->scopes[vl_queue_scope(device, queue)];
    const uint64_t     submits = vl_submits(device);
    const uint64_t     begin   = vl_now_ns();
    const VkResult     result  = device->QueueWaitIdle(queue);
    const uint64_t     ns      = vl_now_ns() - begin;
    VL_ADD(scope, queue_wait_idle_calls, 1);
    VL_ADD(scope, queue_wait_idle_ns, ns);
    vl_waited(device, scope, VL_WAIT_QUEUE_IDLE, result, submits, ns, true);
    return result;
}

static VKAPI_ATTR VkResult VKAPI_CALL waits_DeviceWaitIdle(VkDevice handle) {
    struct vl_device * device  = vl_device_of(handle);
    struct vl_scope *  scope   = &device->scopes[0];
    const uint64_t     submits = vl_submits(device);
    const uint64_t     begin   = vl_now_ns();
    const VkResult     result  = device->DeviceWaitIdle(handle);
    const uint64_t     ns      = vl_now_ns() - begin;
    VL_ADD(scope, device_wait_idle_calls, 1);
    VL_ADD(scope, device_wait_idle_ns, ns);
    vl_waited(device, scope, VL_WAIT_DEVICE_IDLE, result, submits, ns, true);
    return result;
}

// ---- copies: which memory a buffer is bound to

static VKAPI_ATTR VkResult VKAPI_CALL waits_AllocateMemory(VkDevice handle, const VkMemoryAllocateInfo * info,
                                                           const VkAllocationCallbacks * allocator,
                                                           VkDeviceMemory * memory) {
    struct vl_device * device = vl_device_of(handle);
    const VkResult     result = device->AllocateMemory(handle, info, allocator, memory);
    if (result == VK_SUCCESS && info->memoryTypeIndex < device->memory_types.memoryTypeCount) {
        const VkMemoryPropertyFlags flags = device->memory_types.memoryTypes[info->memoryTypeIndex].propertyFlags;
        if (!vl_map_put(&device->memories, (uint64_t) *memory, (uintptr_t) flags + 1)) {
            VL_ADD(&device->scopes[0], untracked, 1);
        }
    }
    return result;
}

static VKAPI_ATTR void VKAPI_CALL waits_FreeMemory(VkDevice handle, VkDeviceMemory memory,
                                                   const VkAllocationCallbacks * allocator) {
    struct vl_device * device = vl_device_of(handle);
    vl_map_take(&device->memories, (uint64_t) memory);
    device->FreeMemory(handle, memory, allocator);
}

static void vl_bound(struct vl_device * device, VkBuffer buffer, VkDeviceMemory memory) {
    const uintptr_t flags = vl_map_get(&device->memories, (uint64_t) memory);
    if (flags && !vl_map_put(&device->buffers, (uint64_t) buffer, flags)) {
        VL_ADD(&device->scopes[0], untracked, 1);
    }
}

static VKAPI_ATTR VkResult VKAPI_CALL waits_BindBufferMemory(VkDevice handle, VkBuffer buffer, VkDeviceMemory memory,
                                                             VkDeviceSize offset) {
    struct vl_device * device = vl_device_of(handle);
    const VkResult     result = device->BindBufferMemory(handle, buffer, memory, offset);
    if (result == VK_SUCCESS) {
        vl_bound(device, buffer, memory);
    }
    return result;
}

static VkResult vl_bind2(PFN_vkBindBufferMemory2 down, struct vl_device * device, VkDevice handle, uint32_t n,
                         const VkBindBufferMemoryInfo * infos) {
    const VkResult result = down(handle, n, infos);
    for (uint32_t i = 0; result == VK_SUCCESS && i < n; i++) {
        vl_bound(device, infos[i].buffer, infos[i].memory);
    }
    return result;
}

static VKAPI_ATTR VkResult VKAPI_CALL waits_BindBufferMemory2(VkDevice handle, uint32_t n,
                                                              const VkBindBufferMemoryInfo * infos) {
    struct vl_device * device = vl_device_of(handle);
    return vl_bind2(device->BindBufferMemory2, device, handle, n, infos);
}

static VKAPI_ATTR VkResult VKAPI_CALL waits_BindBufferMemory2KHR(VkDevice handle, uint32_t n,
                                                                 const VkBindBufferMemoryInfo * infos) {
    struct vl_device * device = vl_device_of(handle);
    return vl_bind2(device->BindBufferMemory2KHR, device, handle, n, infos);
}

static VKAPI_ATTR void VKAPI_CALL waits_DestroyBuffer(VkDevice handle, VkBuffer buffer,
                                                      const VkAllocationCallbacks * allocator) {
    struct vl_device * device = vl_device_of(handle);
    vl_map_take(&device->buffers, (uint64_t) buffer);
    device->DestroyBuffer(handle, buffer, allocator);
}

// A copy goes to the host when its source is device-local and its destination host-visible. Where both are both (all
// memory of a device that shares the host's, or two buffers in a BAR), the direction cannot be told: counted apart.
static void vl_copied(struct vl_device * device, VkBuffer source, VkBuffer destination, uint64_t bytes) {
    const uintptr_t from = vl_map_get(&device->buffers, (uint64_t) source);
    const uintptr_t to   = vl_map_get(&device->buffers, (uint64_t) destination);
    const uintptr_t both = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT | VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT;
    if (!from || !to || !((from - 1) & VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT)
                     || !((to - 1) & VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT)) {
        return;
    }
    struct vl_scope * scope = &device->scopes[0];
    if (((from - 1) & both) == both && ((to - 1) & both) == both) {
        VL_ADD(scope, copies_unified, 1);
        VL_ADD(scope, copies_unified_bytes, bytes);
    } else {
        VL_ADD(scope, copies_to_host, 1);
        VL_ADD(scope, copies_to_host_bytes, bytes);
    }
}

static VKAPI_ATTR void VKAPI_CALL waits_CmdCopyBuffer(VkCommandBuffer commands, VkBuffer source, VkBuffer destination,
                                                      uint32_t n, const VkBufferCopy * regions) {
    struct vl_device * device = vl_device_of(commands);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < n; i++) {
        bytes += regions[i].size;
    }
    vl_copied(device, source, destination, bytes);
    device->CmdCopyBuffer(commands, source, destination, n, regions);
}

static void vl_copied2(struct vl_device * device, const VkCopyBufferInfo2 * info) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < info->regionCount; i++) {
        bytes += info->pRegions[i].size;
    }
    vl_copied(device, info->srcBuffer, info->dstBuffer, bytes);
}

static VKAPI_ATTR void VKAPI_CALL waits_CmdCopyBuffer2(VkCommandBuffer commands, const VkCopyBufferInfo2 * info) {
    struct vl_device * device = vl_device_of(commands);
    vl_copied2(device, info);
    device->CmdCopyBuffer2(commands, info);
}

static VKAPI_ATTR void VKAPI_CALL waits_CmdCopyBuffer2KHR(VkCommandBuffer commands, const VkCopyBufferInfo2 * info) {
    struct vl_device * device = vl_device_of(commands);
    vl_copied2(device, info);
    device->CmdCopyBuffer2KHR(commands, info);
}

// ---- queues

static VKAPI_ATTR void VKAPI_CALL waits_GetDeviceQueue(VkDevice handle, uint32_t family, uint32_t index, VkQueue * queue) {
    struct vl_device * device = vl_device_of(handle);
    device->GetDeviceQueue(handle, family, index, queue);
    if (*queue) {
        vl_queue_add(device, *queue, family);
    }
}

static VKAPI_ATTR void VKAPI_CALL waits_GetDeviceQueue2(VkDevice handle, const VkDeviceQueueInfo2 * info,
                                                        VkQueue * queue) {
    struct vl_device * device = vl_device_of(handle);
    device->GetDeviceQueue2(handle, info, queue);
    if (*queue) {
        vl_queue_add(device, *queue, info->queueFamilyIndex);
    }
}

// ---- by name

PFN_vkVoidFunction vl_hook(const struct vl_device * device, const char * name, bool * exists) {
#define X(function)                                        \
    if (!strcmp(name, "vk" #function)) {                   \
        if (device) {                                      \
            *exists = device->function != NULL;            \
        }                                                  \
        return (PFN_vkVoidFunction) waits_##function;      \
    }
    VL_DEVICE_HOOKS(X)
#undef X
    return NULL;
}
