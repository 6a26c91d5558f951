// Counting, and the readers of the counts.
//
// Each event is counted once, at the queue it belongs to or at its device; totals are added up by the reader.

#define _POSIX_C_SOURCE 200809L
#include "capture.h"
#include "vulkan_layer.h"

#include <stdlib.h>
#include <time.h>

enum {
#define X(name, text) VL_COUNTER_##name,
    GGML_ASYNC_LAYER_COUNTERS(X)
#undef X
    VL_N_COUNTERS
};

struct vl_cause_scope {
#define X(name, text) _Atomic(uint64_t) name;
    GGML_ASYNC_LAYER_CAUSE_COUNTERS(X)
#undef X
};

enum {
#define X(name, text) VL_CAUSE_COUNTER_##name,
    GGML_ASYNC_LAYER_CAUSE_COUNTERS(X)
#undef X
    VL_N_CAUSE_COUNTERS
};

// What a thread remembers of its last wait for a device. A thread that alternates between devices whose ids differ by
// a multiple of the array's length forgets, and counts a wait too many.
struct vl_thread_device {
    uint64_t device;        // id; 0: none
    uint64_t submits;       // the device's submits when the last wait ended
    bool     waited;
    bool     timed_out;     // a wait has timed out and was not completed since
    uint64_t timeout_submits;
    uint64_t timeout_ns;
};

static _Thread_local struct vl_thread_device vl_thread[8];
static _Thread_local int                     vl_cause;
static _Thread_local uint32_t                vl_stage;

static struct vl_cause_scope vl_causes[GGML_ASYNC_LAYER_N_CAUSES];

static pthread_mutex_t    vl_lock = PTHREAD_MUTEX_INITIALIZER;   // all below
static struct vl_device * vl_devices[VL_MAX_DEVICES];
static int                vl_n_devices;
static int                vl_n_alive;      // listed and alive, or about to be
static uint64_t           vl_last_id;
static struct vl_scope    vl_retired;      // counts of devices that gave their number away

uint64_t vl_now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t) ts.tv_sec*1000000000u + (uint64_t) ts.tv_nsec;
}

// ---- devices

struct vl_device * vl_device_new(void) {
    struct vl_device * device = calloc(1, sizeof(*device));
    if (!device) {
        return NULL;
    }
    pthread_mutex_lock(&vl_lock);
    const bool room = vl_n_alive < VL_MAX_DEVICES;
    if (room) {
        vl_n_alive++;
        device->id    = ++vl_last_id;
        device->alive = true;
    }
    pthread_mutex_unlock(&vl_lock);
    if (!room) {
        free(device);
        return NULL;
    }
    vl_map_init(&device->fences);
    vl_map_init(&device->memories);
    vl_map_init(&device->buffers);
    pthread_mutex_init(&device->queue_lock, NULL);
    return device;
}

static void vl_scope_sum(const struct vl_scope * scope, uint64_t * sum) {
#define X(name, text) sum[VL_COUNTER_##name] += atomic_load_explicit(&scope->name, memory_order_relaxed);
    GGML_ASYNC_LAYER_COUNTERS(X)
#undef X
}

static void vl_device_sum(struct vl_device * device, uint64_t * sum) {
    const uint32_t n_queues = atomic_load_explicit(&device->n_queues, memory_order_acquire);
    for (uint32_t i = 0; i <= n_queues; i++) {
        vl_scope_sum(&device->scopes[i], sum);
    }
}

void vl_device_list(struct vl_device * device) {
    pthread_mutex_lock(&vl_lock);
    int at = vl_n_devices;
    if (at < VL_MAX_DEVICES) {
        vl_n_devices++;
    } else {
        // Full, but not all alive: the longest-dead one with the smallest id goes, its counts stay in the totals.
        at = -1;
        for (int i = 0; i < vl_n_devices; i++) {
            if (!vl_devices[i]->alive && (at < 0 || vl_devices[i]->id < vl_devices[at]->id)) {
                at = i;
            }
        }
        uint64_t sum[VL_N_COUNTERS] = {0};
        vl_device_sum(vl_devices[at], sum);
#define X(name, text) VL_ADD(&vl_retired, name, sum[VL_COUNTER_##name]);
        GGML_ASYNC_LAYER_COUNTERS(X)
#undef X
        pthread_mutex_destroy(&vl_devices[at]->queue_lock);
        free(vl_devices[at]);
    }
    vl_devices[at] = device;
    device->index  = at;
    pthread_mutex_unlock(&vl_lock);
    vl_capture_device(device);
}

void vl_device_drop(struct vl_device * device) {
    pthread_mutex_lock(&vl_lock);
    vl_n_alive--;
    pthread_mutex_unlock(&vl_lock);
    pthread_mutex_destroy(&device->queue_lock);
    free(device);
}

static void vl_free_fence(uintptr_t value) {
    free((struct vl_fence *) value);
}

void vl_device_retire(struct vl_device * device) {
    vl_map_free(&device->fences, vl_free_fence);
    vl_map_free(&device->memories, NULL);
    vl_map_free(&device->buffers, NULL);
    pthread_mutex_lock(&vl_lock);
    device->alive = false;
    vl_n_alive--;
    pthread_mutex_unlock(&vl_lock);
}

uint32_t vl_queue_scope(struct vl_device * device, VkQueue queue) {
    const uint32_t n_queues = atomic_load_explicit(&device->n_queues, memory_order_acquire);
    for (uint32_t i = 0; i < n_queues; i++) {
        if (atomic_load_explicit(&device->queues[i], memory_order_relaxed) == queue) {
            return i + 1;
        }
    }
    return 0;
}

uint32_t vl_queue_add(struct vl_device * device, VkQueue queue, uint32_t family) {
    pthread_mutex_lock(&device->queue_lock);
    uint32_t scope = vl_queue_scope(device, queue);
    const uint32_t n_queues = atomic_load_explicit(&device->n_queues, memory_order_relaxed);
    if (!scope && n_queues < VL_MAX_QUEUES) {
        device->families[n_queues] = family;
        atomic_store_explicit(&device->queues[n_queues], queue, memory_order_relaxed);
        atomic_store_explicit(&device->n_queues, n_queues + 1, memory_order_release);
        scope = n_queues + 1;
    }
    pthread_mutex_unlock(&device->queue_lock);
    return scope;
}

// ---- events

static struct vl_thread_device * vl_thread_of(const struct vl_device * device) {
    struct vl_thread_device * thread = &vl_thread[device->id % (sizeof(vl_thread)/sizeof(vl_thread[0]))];
    if (thread->device != device->id) {
        *thread = (struct vl_thread_device) { .device = device->id };
    }
    return thread;
}

void vl_count_submit(struct vl_device * device, struct vl_scope * scope) {
    atomic_fetch_add_explicit(&device->submits, 1, memory_order_relaxed);
    VL_ADD(scope, queue_submits, 1);
    VL_ADD(&vl_causes[vl_cause], cause_queue_submits, 1);
}

static void vl_wait_event(const struct vl_device * device, enum vl_wait_path path, uint64_t ns, uint32_t flags) {
    if (ga_capture_on()) {
        vl_capture_event((struct vl_event) {
            .kind = GA_CAPTURE_EVENT_WAIT, .path = (uint8_t) path, .device = (int16_t) device->index, .flags = flags,
            .t_ns = vl_now_ns() - ns, .ns = ns,
        });
    }
}

int vl_cause_of_thread(uint32_t * stage) {
    *stage = vl_stage;
    return vl_cause;
}

void vl_count_wait(struct vl_device * device, struct vl_scope * scope, enum vl_wait_path path, uint64_t submits, uint64_t ns,
                   bool blocking) {
    struct vl_thread_device * thread = vl_thread_of(device);
    struct vl_cause_scope *   cause  = &vl_causes[vl_cause];
    VL_ADD(cause, cause_wait_calls, 1);
    const bool after_timeout = thread->timed_out && thread->timeout_submits == submits;
    if (!blocking && !after_timeout) {
        return;
    }
    const bool joined = thread->waited && thread->submits == submits;
    vl_wait_event(device, path, ns, joined ? GA_CAPTURE_FLAG_JOINED : 0);
    if (after_timeout) {
        ns += thread->timeout_ns;
    }
    thread->timed_out  = false;
    thread->timeout_ns = 0;
    if (!joined) {
        VL_ADD(scope, fence_waits, 1);
        VL_ADD(cause, cause_fence_waits, 1);
    }
    VL_ADD(scope, fence_wait_ns, ns);
    VL_ADD(cause, cause_fence_wait_ns, ns);
    thread->waited  = true;
    thread->submits = atomic_load_explicit(&device->submits, memory_order_relaxed);
}

void vl_count_timeout(struct vl_device * device, enum vl_wait_path path, uint64_t submits, uint64_t ns) {
    struct vl_thread_device * thread = vl_thread_of(device);
    vl_wait_event(device, path, ns, GA_CAPTURE_FLAG_TIMEOUT);
    VL_ADD(&vl_causes[vl_cause], cause_wait_calls, 1);
    if (thread->timed_out && thread->timeout_submits == submits) {
        ns += thread->timeout_ns;
    }
    thread->timed_out       = true;
    thread->timeout_submits = atomic_load_explicit(&device->submits, memory_order_relaxed);
    thread->timeout_ns      = ns;
}

// ---- readers

static int vl_give(const uint64_t * sum, int n_sum, uint64_t * values, int n) {
    for (int i = 0; values && i < n && i < n_sum; i++) {
        values[i] = sum[i];
    }
    return n_sum;
}

int ggml_async_layer_abi_version(void) {
    return GGML_ASYNC_LAYER_ABI_VERSION;
}

const char * ggml_async_layer_counter_name(int index) {
    static const char * const names[] = {
#define X(name, text) #name,
        GGML_ASYNC_LAYER_COUNTERS(X)
#undef X
    };
    return index >= 0 && index < VL_N_COUNTERS ? names[index] : NULL;
}

const char * ggml_async_layer_counter_text(int index) {
    static const char * const texts[] = {
#define X(name, text) text,
        GGML_ASYNC_LAYER_COUNTERS(X)
#undef X
    };
    return index >= 0 && index < VL_N_COUNTERS ? texts[index] : NULL;
}

int ggml_async_layer_counters(uint64_t * values, int n) {
    uint64_t sum[VL_N_COUNTERS] = {0};
    pthread_mutex_lock(&vl_lock);
    vl_scope_sum(&vl_retired, sum);
    for (int i = 0; i < vl_n_devices; i++) {
        vl_device_sum(vl_devices[i], sum);
    }
    pthread_mutex_unlock(&vl_lock);
    return vl_give(sum, VL_N_COUNTERS, values, n);
}

int ggml_async_layer_devices(void) {
    pthread_mutex_lock(&vl_lock);
    const int n = vl_n_devices;
    pthread_mutex_unlock(&vl_lock);
    return n;
}

static struct vl_device * vl_device_locked(int device) {
    return device >= 0 && device < vl_n_devices ? vl_devices[device] : NULL;
}

const char * ggml_async_layer_device_name(int device) {
    // A copy of the thread's own: the device's number may be given away.
    static _Thread_local char name[VK_MAX_PHYSICAL_DEVICE_NAME_SIZE];
    pthread_mutex_lock(&vl_lock);
    const struct vl_device * found = vl_device_locked(device);
    for (size_t i = 0; found && i < sizeof(name); i++) {
        name[i] = i + 1 < sizeof(name) ? found->name[i] : '\0';
    }
    pthread_mutex_unlock(&vl_lock);
    return found ? name : NULL;
}

int ggml_async_layer_device_type(int device) {
    pthread_mutex_lock(&vl_lock);
    const struct vl_device * found = vl_device_locked(device);
    const int type = found ? found->type : -1;
    pthread_mutex_unlock(&vl_lock);
    return type;
}

int ggml_async_layer_device_counters(int device, uint64_t * values, int n) {
    uint64_t sum[VL_N_COUNTERS] = {0};
    pthread_mutex_lock(&vl_lock);
    struct vl_device * found = vl_device_locked(device);
    if (found) {
        vl_device_sum(found, sum);
    }
    pthread_mutex_unlock(&vl_lock);
    return found ? vl_give(sum, VL_N_COUNTERS, values, n) : -1;
}

int ggml_async_layer_queues(int device) {
    pthread_mutex_lock(&vl_lock);
    struct vl_device * found = vl_device_locked(device);
    const int n = found ? (int) atomic_load_explicit(&found->n_queues, memory_order_acquire) : -1;
    pthread_mutex_unlock(&vl_lock);
    return n;
}

int ggml_async_layer_queue_family(int device, int queue) {
    pthread_mutex_lock(&vl_lock);
    struct vl_device * found = vl_device_locked(device);
    int family = -1;
    if (found && queue >= 0 && queue < (int) atomic_load_explicit(&found->n_queues, memory_order_acquire)) {
        family = (int) found->families[queue];
    }
    pthread_mutex_unlock(&vl_lock);
    return family;
}

int ggml_async_layer_queue_counters(int device, int queue, uint64_t * values, int n) {
    uint64_t sum[VL_N_COUNTERS] = {0};
    pthread_mutex_lock(&vl_lock);
    struct vl_device * found = vl_device_locked(device);
    const bool ok = found && queue >= 0 && queue < (int) atomic_load_explicit(&found->n_queues, memory_order_acquire);
    if (ok) {
        vl_scope_sum(&found->scopes[1 + queue], sum);
    }
    pthread_mutex_unlock(&vl_lock);
    return ok ? vl_give(sum, VL_N_COUNTERS, values, n) : -1;
}

int ggml_async_layer_set_cause(int cause, uint32_t stage) {
    const int before = vl_cause;
    vl_stage = stage;
    vl_cause = cause >= 0 && cause < GGML_ASYNC_LAYER_N_CAUSES ? cause : GGML_ASYNC_LAYER_CAUSE_ELSEWHERE;
    return before;
}

const char * ggml_async_layer_cause_name(int cause) {
    static const char * const names[] = {
#define X(NAME, name, text) #name,
        GGML_ASYNC_LAYER_CAUSES(X)
#undef X
    };
    return cause >= 0 && cause < GGML_ASYNC_LAYER_N_CAUSES ? names[cause] : NULL;
}

const char * ggml_async_layer_cause_counter_name(int index) {
    static const char * const names[] = {
#define X(name, text) #name,
        GGML_ASYNC_LAYER_CAUSE_COUNTERS(X)
#undef X
    };
    return index >= 0 && index < VL_N_CAUSE_COUNTERS ? names[index] : NULL;
}

int ggml_async_layer_cause_counters(int cause, uint64_t * values, int n) {
    if (cause < 0 || cause >= GGML_ASYNC_LAYER_N_CAUSES) {
        return -1;
    }
    uint64_t sum[VL_N_CAUSE_COUNTERS];
#define X(name, text) sum[VL_CAUSE_COUNTER_##name] = atomic_load_explicit(&vl_causes[cause].name, memory_order_relaxed);
    GGML_ASYNC_LAYER_CAUSE_COUNTERS(X)
#undef X
    return vl_give(sum, VL_N_CAUSE_COUNTERS, values, n);
}
