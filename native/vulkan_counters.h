// VK_LAYER_GGML_ASYNC_waits: what it counts, and how a reader in the same process gets at it.
//
// The reader finds the loaded layer with dlopen("libVkLayer_ggml_async_waits.so", RTLD_NOW | RTLD_NOLOAD); NULL means
// that the layer is not in this process, so there are no figures (null, not 0). Nothing here waits for a device.
//
// Conventions
//   - Counters only grow, and are read one by one while others count on: read once, run, read again, subtract.
//   - Times are nanoseconds of CLOCK_MONOTONIC.
//   - Functions that fill `values` write at most `n` of them and return how many there are, or -1 for a scope that does
//     not exist.
//
// What one fence wait is: a call in which the host waited for a device until it was done: vkWaitForFences,
// vkWaitSemaphores, vkQueueWaitIdle or vkDeviceWaitIdle returning VK_SUCCESS, or the span from the first VK_NOT_READY
// of vkGetFenceStatus to VK_SUCCESS for the same fence. Such waits of one thread for one device with no submit to that
// device (by any thread) between the end of one and the begin of the next are one wait: ggml waits for an
// almost-ready fence, then polls another. Two threads that each wait are two waits.
//   - A timeout is a call and a timeout, not a wait; when the thread waits again with no submit between, its time
//     joins that wait. With a timeout of 0 the call cannot wait: it completes a wait only after an earlier timeout.
//   - vkGetFenceStatus returning VK_SUCCESS at once is a poll, not a wait.
//   - Errors are no waits.
#pragma once

#include <stdint.h>

#if defined(__GNUC__)
#    define GGML_ASYNC_LAYER_API __attribute__((visibility("default")))
#else
#    define GGML_ASYNC_LAYER_API
#endif

// Changes whenever a declaration below changes its meaning. New counters and causes at the end of their list do not.
#define GGML_ASYNC_LAYER_ABI_VERSION 1

// X(name, meaning). A submit, an idle wait and a sparse bind belong to their queue; a fence wait belongs to the queue
// that the fences were last submitted to, and to the device alone where they differ; copies belong to the device.
#define GGML_ASYNC_LAYER_COUNTERS(X) \
    X(queue_submits,            "calls of vkQueueSubmit, vkQueueSubmit2 and vkQueueSubmit2KHR") \
    X(queue_submit2s,           "those of them that were vkQueueSubmit2 or vkQueueSubmit2KHR") \
    X(submit_infos,             "VkSubmitInfo and VkSubmitInfo2 structures in them; a call may have none") \
    X(queue_submit_ns,          "time inside them") \
    X(queue_bind_sparses,       "calls of vkQueueBindSparse") \
    X(bind_sparse_infos,        "VkBindSparseInfo structures in them") \
    X(queue_bind_sparse_ns,     "time inside them") \
    X(fence_waits,              "waits for the device, consecutive ones with no submit between them counted once") \
    X(fence_wait_ns,            "time waited in them") \
    X(wait_for_fences_calls,    "calls of vkWaitForFences, whatever they returned") \
    X(wait_for_fences_timeouts, "those of them that returned VK_TIMEOUT") \
    X(wait_for_fences_ns,       "time inside them") \
    X(fence_status_polls,       "calls of vkGetFenceStatus") \
    X(fence_status_not_ready,   "those of them that returned VK_NOT_READY") \
    X(fence_spans,              "spans from a fence's first VK_NOT_READY to its VK_SUCCESS") \
    X(fence_span_ns,            "length of these spans") \
    X(wait_semaphores_calls,    "calls of vkWaitSemaphores and vkWaitSemaphoresKHR, whatever they returned") \
    X(wait_semaphores_timeouts, "those of them that returned VK_TIMEOUT") \
    X(wait_semaphores_ns,       "time inside them") \
    X(queue_wait_idle_calls,    "calls of vkQueueWaitIdle") \
    X(queue_wait_idle_ns,       "time inside them") \
    X(device_wait_idle_calls,   "calls of vkDeviceWaitIdle") \
    X(device_wait_idle_ns,      "time inside them") \
    X(copies_to_host,           "recorded buffer copies from device-local to host memory; a re-used command buffer counts once") \
    X(copies_to_host_bytes,     "bytes in them") \
    X(copies_unified,           "recorded buffer copies within memory that is both device-local and host-visible: unified memory, where the direction cannot be told") \
    X(copies_unified_bytes,     "bytes in them") \
    X(errors,                   "calls above that returned a negative VkResult") \
    X(untracked,                "fences, memory or buffers not followed because memory ran out here")

// What the thread was doing when it waited, as told by ggml_async_layer_set_cause. X(NAME, name, meaning)
#define GGML_ASYNC_LAYER_CAUSES(X) \
    X(ELSEWHERE, elsewhere, "nothing that the plug-in knows of") \
    X(READBACK,  readback,  "the stage of a CPU split: readbacks and their wait") \
    X(TOKEN,     token,     "the end of a token: the program waits for its result") \
    X(UPLOAD,    upload,    "an input of a device split on its way there") \
    X(LOAD,      load,      "loading or adopting weights") \
    X(COMPUTE,   compute,   "queueing the work of a device split")

// Per cause, over all devices. A wait belongs to the cause under which its first call returned.
#define GGML_ASYNC_LAYER_CAUSE_COUNTERS(X) \
    X(cause_fence_waits,    "fence_waits of this cause") \
    X(cause_fence_wait_ns,  "fence_wait_ns of this cause") \
    X(cause_wait_calls,     "calls that can wait, and completed polling spans, of this cause") \
    X(cause_queue_submits,  "queue_submits of this cause")

#ifdef __cplusplus
extern "C" {
#endif

enum ggml_async_layer_cause {
#define X(NAME, name, text) GGML_ASYNC_LAYER_CAUSE_##NAME,
    GGML_ASYNC_LAYER_CAUSES(X)
#undef X
    GGML_ASYNC_LAYER_N_CAUSES
};

// GGML_ASYNC_LAYER_ABI_VERSION of the loaded layer.
GGML_ASYNC_LAYER_API int ggml_async_layer_abi_version(void);

// Name and meaning of a counter: 0 .. n-1, NULL beyond.
GGML_ASYNC_LAYER_API const char * ggml_async_layer_counter_name(int index);
GGML_ASYNC_LAYER_API const char * ggml_async_layer_counter_text(int index);

// Totals of the process, destroyed devices included.
GGML_ASYNC_LAYER_API int ggml_async_layer_counters(uint64_t * values, int n);

// Devices created so far, in the order of their creation. A destroyed device keeps its number and its counters; only
// after several hundred does the oldest destroyed one give its number to a new one.
GGML_ASYNC_LAYER_API int          ggml_async_layer_devices(void);
GGML_ASYNC_LAYER_API const char * ggml_async_layer_device_name(int device);
// ggml's device type (0 CPU, 1 GPU, 2 integrated GPU), -1 for another or none.
GGML_ASYNC_LAYER_API int          ggml_async_layer_device_type(int device);
GGML_ASYNC_LAYER_API int          ggml_async_layer_device_counters(int device, uint64_t * values, int n);

// Queues of a device, in the order in which the program got them: 0 .. n-1. What belongs to no queue is the device's
// counters less those of its queues. The family is -1 for a queue that does not exist.
GGML_ASYNC_LAYER_API int ggml_async_layer_queues(int device);
GGML_ASYNC_LAYER_API int ggml_async_layer_queue_family(int device, int queue);
GGML_ASYNC_LAYER_API int ggml_async_layer_queue_counters(int device, int queue, uint64_t * values, int n);

// Says what the calling thread does from now on (enum ggml_async_layer_cause; anything unknown is "elsewhere"), for
// which stage (its number, for the capture file; 0: none), and returns what it did before, so that a caller can put it
// back. Costs two stores to variables of the thread's own.
GGML_ASYNC_LAYER_API int          ggml_async_layer_set_cause(int cause, uint32_t stage);
GGML_ASYNC_LAYER_API const char * ggml_async_layer_cause_name(int cause);
GGML_ASYNC_LAYER_API const char * ggml_async_layer_cause_counter_name(int index);
GGML_ASYNC_LAYER_API int          ggml_async_layer_cause_counters(int cause, uint64_t * values, int n);

#ifdef __cplusplus
}
#endif
