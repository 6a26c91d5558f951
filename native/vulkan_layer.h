// The Vulkan layer's own structures. vulkan_layer.c holds the chain, vulkan_hooks.c the hooks, vulkan_counters.c the
// counting and its readers, vulkan_table.c the look-ups.
#pragma once

#ifndef VK_NO_PROTOTYPES
#    define VK_NO_PROTOTYPES
#endif
#include <vulkan/vulkan.h>
#include <vulkan/vk_layer.h>

#include "vulkan_counters.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    VL_MAX_DEVICES   = 512,     // at one time; one more is VK_ERROR_OUT_OF_HOST_MEMORY
    VL_MAX_QUEUES    = 32,      // per device; further ones are counted with the device
    VL_N_SHARDS      = 16,
};

// Every device function that the layer hooks.
#define VL_DEVICE_HOOKS(X) \
    X(DestroyDevice)      X(GetDeviceQueue)     X(GetDeviceQueue2) \
    X(QueueSubmit)        X(QueueSubmit2)       X(QueueSubmit2KHR)      X(QueueBindSparse) \
    X(CreateFence)        X(DestroyFence)       X(WaitForFences)        X(GetFenceStatus) \
    X(WaitSemaphores)     X(WaitSemaphoresKHR)  X(QueueWaitIdle)        X(DeviceWaitIdle) \
    X(AllocateMemory)     X(FreeMemory)         X(DestroyBuffer) \
    X(BindBufferMemory)   X(BindBufferMemory2)  X(BindBufferMemory2KHR) \
    X(CmdCopyBuffer)      X(CmdCopyBuffer2)     X(CmdCopyBuffer2KHR)

// ---- look-ups (vulkan_table.c)

// Dispatchable handles begin with the loader's dispatch pointer: one per instance (shared by its physical devices) and
// one per device (shared by its queues and command buffers). Looking up takes no lock; adding and removing do.
struct vl_table_slot {
    _Atomic(void *) key;
    _Atomic(void *) value;
};

struct vl_table {
    struct vl_table_slot slots[2*VL_MAX_DEVICES];
};

static inline void * vl_key(const void * handle) {
    return *(void * const *) handle;
}

void * vl_table_get(struct vl_table * table, const void * key);
bool   vl_table_add_locked(struct vl_table * table, void * key, void * value);
void   vl_table_remove_locked(struct vl_table * table, const void * key);

// Non-dispatchable handles of one device, in shards with a lock each that is held for the look-up alone.
struct vl_map_entry {
    uint64_t  handle;   // 0: free (VK_NULL_HANDLE is never stored), ~0: was removed
    uintptr_t value;
};

struct vl_shard {
    pthread_mutex_t       lock;
    struct vl_map_entry * entries;
    size_t                n_slots;   // power of two, or 0
    size_t                n_taken;   // removed ones included
};

struct vl_map {
    struct vl_shard shards[VL_N_SHARDS];
};

void      vl_map_init(struct vl_map * map);
void      vl_map_free(struct vl_map * map, void (*free_value)(uintptr_t value));
bool      vl_map_put(struct vl_map * map, uint64_t handle, uintptr_t value);   // false: out of memory, nothing changed
uintptr_t vl_map_get(struct vl_map * map, uint64_t handle);                    // 0: not there
uintptr_t vl_map_take(struct vl_map * map, uint64_t handle);                   // removes it; 0: was not there

// ---- counting (vulkan_counters.c)

// One place to count at: a queue, or the device for what belongs to no queue.
struct vl_scope {
#define X(name, text) _Atomic(uint64_t) name;
    GGML_ASYNC_LAYER_COUNTERS(X)
#undef X
};

#define VL_ADD(scope, name, amount) atomic_fetch_add_explicit(&(scope)->name, (uint64_t) (amount), memory_order_relaxed)

// What hangs on a VkFence: where it was last submitted, and since when polls have found it not ready.
struct vl_fence {
    _Atomic(uint32_t) scope;        // index into the device's scopes
    _Atomic(uint64_t) span_start;   // 0: no span open
    _Atomic(uint64_t) span_submits; // the device's submits when it opened
};

// What hangs on a VkDevice. Kept when the device is destroyed, for its counters; the maps are emptied.
struct vl_device {
    uint64_t                         id;          // never used twice, from 1
    bool                             alive;
    int                              index;       // among the listed ones
    int                              type;        // ggml's: 0 CPU, 1 GPU, 2 integrated GPU, -1 other
    char                             name[VK_MAX_PHYSICAL_DEVICE_NAME_SIZE];
    PFN_vkGetDeviceProcAddr          GetDeviceProcAddr;
#define X(name) PFN_vk##name name;
    VL_DEVICE_HOOKS(X)
#undef X
    VkPhysicalDeviceMemoryProperties memory_types;
    struct vl_map                    fences;      // -> struct vl_fence *
    struct vl_map                    memories;    // -> property flags of its type, + 1
    struct vl_map                    buffers;     // likewise, once bound
    _Atomic(uint64_t)                submits;     // tells whether two waits have a submit between them
    pthread_mutex_t                  queue_lock;  // adding a queue
    _Atomic(uint32_t)                n_queues;
    _Atomic(VkQueue)                 queues[VL_MAX_QUEUES];
    uint32_t                         families[VL_MAX_QUEUES];
    struct vl_scope                  scopes[1 + VL_MAX_QUEUES];   // [0] the device itself, then its queues
};

uint64_t vl_now_ns(void);

// A device's state: made before the device is (NULL: too many, or no memory), then either listed or dropped. A retired
// one stays listed for the readers.
struct vl_device * vl_device_new(void);
void               vl_device_list(struct vl_device * device);
void               vl_device_drop(struct vl_device * device);
void               vl_device_retire(struct vl_device * device);

uint32_t vl_queue_add(struct vl_device * device, VkQueue queue, uint32_t family);
uint32_t vl_queue_scope(struct vl_device * device, VkQueue queue);

// A submit begins: it parts the waits before it from those after it.
void vl_count_submit(struct vl_device * device, struct vl_scope * scope);

// Which call it was; the numbers are the capture file's.
enum vl_wait_path { VL_WAIT_FENCES, VL_WAIT_FENCE_STATUS, VL_WAIT_SEMAPHORES, VL_WAIT_QUEUE_IDLE, VL_WAIT_DEVICE_IDLE };
enum vl_submit_path { VL_SUBMIT, VL_SUBMIT2, VL_BIND_SPARSE };

// A call that can wait has returned. `submits` is the device's count when it (or its polling span) began.
void vl_count_wait(struct vl_device * device, struct vl_scope * scope, enum vl_wait_path path, uint64_t submits, uint64_t ns, bool blocking);
void vl_count_timeout(struct vl_device * device, enum vl_wait_path path, uint64_t submits, uint64_t ns);

// The capture file (vulkan_capture.c)

struct vl_event {
    uint8_t  kind;      // GA_CAPTURE_EVENT_WAIT or _SUBMIT
    uint8_t  path;
    uint8_t  cause;
    int16_t  device;
    uint32_t stage;
    uint32_t thread;
    uint32_t n_infos;
    uint32_t flags;
    uint64_t t_ns;
    uint64_t ns;
};

void vl_capture_start(void);
void vl_capture_device(const struct vl_device * device);
// Fills in thread, cause and stage. Cheap where nobody captures.
void vl_capture_event(struct vl_event event);
int  vl_cause_of_thread(uint32_t * stage);

// ---- hooks (vulkan_hooks.c; the last one with the chain)

extern struct vl_table vl_device_table;   // dispatch pointer -> struct vl_device

// The hook for a device function, or NULL. `exists`, asked for with a device: whether the layer below has the function.
PFN_vkVoidFunction vl_hook(const struct vl_device * device, const char * name, bool * exists);

VKAPI_ATTR void VKAPI_CALL waits_DestroyDevice(VkDevice handle, const VkAllocationCallbacks * allocator);
