// Reads under way: sources to synchronize, bounce buffers, copy-outs. Serves both the scheduler's readbacks and
// applications (ggml_async_read).

#include "ga.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { GA_CHUNK_MIN = 256*1024, GA_BOUNCE_ALIGNMENT = 256 };

struct ggml_async_queue * ga_queue_new(struct ga_host * host) {
    struct ggml_async_queue * queue = ga_calloc(1, sizeof(*queue));
    if (!queue) {
        return NULL;
    }
    queue->host  = host;
    queue->next  = host->queues;
    host->queues = queue;
    return queue;
}

static void ga_pool_free(struct ga_host * host, struct ga_pool * pool) {
    for (int i = 0; i < pool->n_chunks; i++) {
        host->api.ggml_backend_buffer_free(pool->chunks[i].buffer);
    }
    free(pool->chunks);
    pool->chunks   = NULL;
    pool->n_chunks = 0;
}

// Under ga_lock. The caller has drained or dropped what was queued.
void ga_queue_free(struct ggml_async_queue * queue) {
    struct ggml_async_queue ** link = &queue->host->queues;
    while (*link && *link != queue) {
        link = &(*link)->next;
    }
    if (*link) {
        *link = queue->next;
    }
    for (int i = 0; i < atomic_load_explicit(&queue->n_pools, memory_order_acquire); i++) {
        ga_pool_free(queue->host, &queue->pools[i]);
    }
    free(queue->copy_outs);
    free(queue);
}

// The device's last backend goes: its pinned memory must not outlive it.
void ga_queues_free_pools_locked(struct ga_device * device) {
    for (struct ggml_async_queue * queue = device->host->queues; queue; queue = queue->next) {
        for (int i = 0; i < atomic_load_explicit(&queue->n_pools, memory_order_acquire); i++) {
            if (queue->pools[i].device == device) {
                ga_pool_free(device->host, &queue->pools[i]);
            }
        }
    }
}

static struct ga_pool * ga_queue_pool(struct ggml_async_queue * queue, struct ga_device * device) {
    for (int i = 0; i < atomic_load_explicit(&queue->n_pools, memory_order_acquire); i++) {
        if (queue->pools[i].device == device) {
            return &queue->pools[i];
        }
    }
    const int n = atomic_load_explicit(&queue->n_pools, memory_order_relaxed);
    if (n == GA_MAX_SOURCES) {
        return NULL;
    }
    struct ga_pool * pool = &queue->pools[n];
    pool->device = device;
    atomic_store_explicit(&queue->n_pools, n + 1, memory_order_release);   // another thread may be looking for its device
    return pool;
}

// Room for `size` bytes that this device has pinned; NULL and a reason otherwise.
static void * ga_pool_alloc(struct ga_pool * pool, size_t size, enum ga_decline * why) {
    const size_t rounded = (size + GA_BOUNCE_ALIGNMENT - 1) / GA_BOUNCE_ALIGNMENT * GA_BOUNCE_ALIGNMENT;
    for (int i = 0; i < pool->n_chunks; i++) {
        struct ga_chunk * chunk = &pool->chunks[i];
        if (chunk->size - chunk->used >= rounded) {
            void * data = chunk->base + chunk->used;
            chunk->used += rounded;
            return data;
        }
    }

    struct ga_api *            api    = &pool->device->host->api;
    ggml_backend_buffer_type_t pinned = ga_device_pinned(pool->device);
    size_t                     wanted = GA_CHUNK_MIN;
    while (wanted < rounded) {
        wanted *= 2;
    }
    struct ga_chunk * chunks = realloc(pool->chunks, (size_t) (pool->n_chunks + 1)*sizeof(*chunks));
    if (!chunks) {
        *why = GA_DECLINE_no_memory;
        return NULL;
    }
    pool->chunks = chunks;

    ggml_backend_buffer_t buffer = api->ggml_backend_buft_alloc_buffer(pinned, wanted);
    if (!buffer) {
        *why = GA_DECLINE_no_memory;
        return NULL;
    }
    // When pinned memory runs out, hosts quietly hand out a plain CPU buffer instead.
    if (api->ggml_backend_buffer_get_type(buffer) != pinned) {
        api->ggml_backend_buffer_free(buffer);
        *why = GA_DECLINE_no_pinned_memory;
        return NULL;
    }
    struct ga_chunk * chunk = &pool->chunks[pool->n_chunks++];
    chunk->buffer = buffer;
    chunk->base   = api->ggml_backend_buffer_get_base(buffer);
    chunk->size   = wanted;
    chunk->used   = rounded;
    return chunk->base;
}

static bool ga_queue_reserve(struct ggml_async_queue * queue) {
    if (queue->n_copy_outs < queue->cap_copy_outs) {
        return true;
    }
    const int cap = queue->cap_copy_outs ? 2*queue->cap_copy_outs : 32;
    struct ga_copy_out * copy_outs = realloc(queue->copy_outs, (size_t) cap*sizeof(*copy_outs));
    if (!copy_outs) {
        return false;
    }
    queue->copy_outs     = copy_outs;
    queue->cap_copy_outs = cap;
    return true;
}

// A place in a bounce buffer and one in the list of copy-outs; NULL and a reason otherwise.
static void * ga_queue_bounce(struct ggml_async_queue * queue, struct ga_device * device, size_t size, enum ga_decline * why) {
    if (!ga_device_pinned(device)) {
        *why = GA_DECLINE_no_pinned_memory;
        return NULL;
    }
    struct ga_pool * pool = ga_queue_pool(queue, device);
    if (!pool) {
        *why = GA_DECLINE_too_many_sources;
        return NULL;
    }
    if (!ga_queue_reserve(queue)) {
        *why = GA_DECLINE_no_memory;
        return NULL;
    }
    return ga_pool_alloc(pool, size, why);
}

static int ga_queue_source(struct ggml_async_queue * queue, ggml_backend_t backend) {
    const int n = atomic_load_explicit(&queue->n_sources, memory_order_relaxed);
    for (int i = 0; i < n; i++) {
        if (atomic_load_explicit(&queue->sources[i].backend, memory_order_relaxed) == backend) {
            return i;
        }
    }
    return -1;
}

static void ga_source_done(struct ga_backend * source) {
    atomic_fetch_sub(&source->n_queued, 1);
    if (!atomic_load_explicit(&source->host->attached, memory_order_relaxed)) {
        ga_backend_settle(source);      // a detach waited for us
    }
}

// Returns its index, or -1 if a detach has just let go of it. From here on, none will.
static int ga_queue_add_source(struct ggml_async_queue * queue, struct ga_backend * source, ggml_backend_t backend) {
    atomic_fetch_add(&source->n_queued, 1);
    int phase;
    while ((phase = atomic_load(&source->phase)) == GA_PHASE_CHANGING) {
        sched_yield();      // a few stores on another thread
    }
    if (phase == GA_PHASE_DETACHED) {
        ga_source_done(source);
        return -1;
    }
    // The device's bounce memory is free again. Here rather than in the drain: while the source counts as queued, nobody
    // can free the pool under our hands.
    const int n = atomic_load_explicit(&queue->n_sources, memory_order_relaxed);
    bool shared = false;
    for (int i = 0; i < n; i++) {
        const struct ga_source * other = &queue->sources[i];
        shared |= atomic_load_explicit(&other->backend, memory_order_relaxed) && other->state->device == source->device;
    }
    for (int i = 0; i < atomic_load_explicit(&queue->n_pools, memory_order_acquire) && !shared; i++) {
        for (int k = 0; queue->pools[i].device == source->device && k < queue->pools[i].n_chunks; k++) {
            queue->pools[i].chunks[k].used = 0;
        }
    }
    queue->sources[n].state   = source;
    queue->sources[n].n_reads = 0;
    queue->sources[n].wait_ns = -1;
    atomic_store_explicit(&queue->sources[n].backend, backend, memory_order_relaxed);
    atomic_store_explicit(&queue->n_sources, n + 1, memory_order_release);
    return n;
}

// Takes back a source that was added last and has nothing queued.
static void ga_queue_remove_source(struct ggml_async_queue * queue, int index) {
    atomic_store_explicit(&queue->n_sources, index, memory_order_release);
    if (atomic_exchange(&queue->sources[index].backend, NULL)) {
        ga_source_done(queue->sources[index].state);
    }
}

// Whether this source can be read asynchronously from this tensor at all.
enum ga_decline ga_source_check(struct ga_backend * source, const struct ggml_tensor * tensor) {
    struct ga_host *         host    = source->host;
    struct ga_api *          api     = &host->api;
    ggml_backend_t           backend = atomic_load_explicit(&source->backend, memory_order_relaxed);
    ggml_backend_buffer_t    buffer  = ga_tensor_buffer(tensor);

    if (!buffer || !ga_tensor(tensor)->buffer) {
        return GA_DECLINE_no_buffer;
    }
    if (source->device->type == GA_DEVICE_TYPE_META || (api->ggml_backend_is_meta && api->ggml_backend_is_meta(backend))) {
        return GA_DECLINE_meta_source;
    }
    if (!ga_slot_load(backend, host->layout->get_tensor_async) || !source->slots[host->layout->synchronize]) {
        return GA_DECLINE_no_async;
    }
    if (api->ggml_backend_buffer_get_type(buffer) != api->ggml_backend_get_default_buffer_type(backend)) {
        return GA_DECLINE_buffer_type;
    }
    return GA_ACCEPT;
}

// Vulkan throws through us when a submit fails. What was queued before must then not be copied out: the memory it was
// meant for is the abandoned graph's.
struct ga_push_guard {
    struct ggml_async_queue * queue;
    bool                      returned;
};

static void ga_push_unwound(struct ga_push_guard * guard) {
    if (guard->returned) {
        return;
    }
    guard->queue->n_copy_outs = 0;
    guard->queue->n_reads     = 0;
    for (int i = 0; i < GA_MAX_SOURCES; i++) {
        guard->queue->sources[i].n_reads = 0;   // none of them counts as completed
    }
    ga_keep_stores();
}

// Queues one read. Returns an enum ggml_async_path, or -1 with *why set and nothing queued.
// `direct`: the device has pinned `data`, so the read may land there, if no other source is in the queue (a read that
// lands before that source is synchronized could overwrite what its queued upload still reads).
int ga_queue_push(struct ggml_async_queue * queue, struct ga_backend * source, const struct ggml_tensor * tensor,
                  void * data, size_t offset, size_t size, bool direct, int tag, enum ga_decline * why, int * source_index) {
    ggml_backend_t backend = atomic_load_explicit(&source->backend, memory_order_relaxed);
    int            index   = ga_queue_source(queue, backend);
    const int      n       = atomic_load_explicit(&queue->n_sources, memory_order_relaxed);
    const bool     alone   = n == 0 || (n == 1 && index == 0);
    if (index < 0 && n == GA_MAX_SOURCES) {
        *why = GA_DECLINE_too_many_sources;
        return -1;
    }

    // Known to the queue before the read is: whatever happens inside, the source will be synchronized.
    const bool added = index < 0;
    if (added) {
        index = ga_queue_add_source(queue, source, backend);
        if (index < 0) {
            *why = GA_DECLINE_unknown_source;
            return -1;
        }
    }
    void * target = data;
    if (size > 0 && !(direct && alone)) {
        target = ga_queue_bounce(queue, source->device, size, why);
        if (!target) {
            if (added) {
                ga_queue_remove_source(queue, index);
            }
            return -1;
        }
    }
    *source_index = index;
    queue->sources[index].n_reads++;
    queue->sources[index].wait_ns = -1;     // not waited for since
    if (size == 0) {
        return GGML_ASYNC_PATH_EMPTY;
    }

    struct ga_push_guard guard __attribute__((cleanup(ga_push_unwound))) = { queue, false };
    ga_get_async_t get_async = (ga_get_async_t) ga_slot_load(backend, source->host->layout->get_tensor_async);
    get_async(backend, tensor, target, offset, size);
    guard.returned = true;

    if (target == data) {
        return GGML_ASYNC_PATH_DIRECT;
    }
    queue->copy_outs[queue->n_copy_outs++] = (struct ga_copy_out) {
        .data = data, .bounce = target, .size = size, .source = index, .tag = tag,
    };
    return GGML_ASYNC_PATH_BOUNCE;
}

// Synchronizes every source once, then copies out. Nothing is pending any more before the first call leaves us.
// `sources`: room for GA_MAX_SOURCES, receives each source's wait. Returns the number of reads completed.
int ga_queue_drain(struct ggml_async_queue * queue, uint32_t * n_sync, struct ga_source * sources,
                   void (*copied)(void * user_data, int tag, int64_t copy_ns), void * user_data) {
    const int n           = atomic_load_explicit(&queue->n_sources, memory_order_relaxed);
    const int n_copy_outs = queue->n_copy_outs;
    int       n_reads     = queue->n_reads;
    for (int i = 0; i < GA_MAX_SOURCES; i++) {
        sources[i].wait_ns = -1;
    }
    for (int i = 0; i < n; i++) {
        sources[i].state   = queue->sources[i].state;
        ggml_backend_t backend = atomic_exchange(&queue->sources[i].backend, NULL);
        atomic_store_explicit(&sources[i].backend, backend, memory_order_relaxed);
        n_reads += backend ? queue->sources[i].n_reads : 0;
    }
    atomic_store_explicit(&queue->n_sources, 0, memory_order_release);
    queue->n_copy_outs = 0;
    queue->n_reads     = 0;

    struct ga_host * host = queue->host;
    for (int i = 0; i < n; i++) {
        ggml_backend_t backend = atomic_load_explicit(&sources[i].backend, memory_order_relaxed);
        if (!backend) {
            continue;
        }
        const int64_t t0 = ga_now_ns();
        atomic_store_explicit(&sources[i].state->computed, false, memory_order_relaxed);
        ((ga_synchronize_t) sources[i].state->slots[host->layout->synchronize])(backend);
        sources[i].wait_ns = ga_now_ns() - t0;
        (*n_sync)++;
    }
    ga_count(host, GA_COUNTER_device_synchronizes, *n_sync);

    int64_t t = ga_now_ns();
    for (int i = 0; i < n_copy_outs; i++) {
        const struct ga_copy_out * out = &queue->copy_outs[i];
        if (sources[out->source].wait_ns < 0) {
            continue;
        }
        memcpy(out->data, out->bounce, out->size);
        const int64_t now = ga_now_ns();
        if (copied) {
            copied(user_data, out->tag, now - t);
        }
        t = now;
    }
    // Only now: until its bounce memory is copied out, nobody may free it. If a device failed above, its count stays, and
    // its end synchronizes it once more.
    for (int i = 0; i < n; i++) {
        if (sources[i].wait_ns >= 0) {
            ga_source_done(sources[i].state);
        }
    }
    return n_reads;
}

// Called before `backend` is freed, after it was synchronized: nobody may touch it, or copy out what it read, again.
void ga_queues_drop_source(struct ga_host * host, ggml_backend_t backend) {
    ga_lock();
    for (struct ggml_async_queue * queue = host->queues; queue; queue = queue->next) {
        const int n = atomic_load_explicit(&queue->n_sources, memory_order_acquire);
        for (int i = 0; i < n; i++) {
            ggml_backend_t expected = backend;
            if (atomic_compare_exchange_strong(&queue->sources[i].backend, &expected, NULL)) {
                atomic_fetch_sub(&queue->sources[i].state->n_queued, 1);
                ga_count(host, GA_COUNTER_dropped_reads, (uint64_t) queue->sources[i].n_reads);
            }
        }
    }
    ga_unlock();
}
