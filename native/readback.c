// Readbacks: what ggml's scheduler asks of a CPU backend between two splits.
//
// For one CPU split the scheduler calls cpy_tensor_async once per input that a device computed, then graph_compute.
// async: each call queues a read and returns true; graph_compute waits once and goes on.
// stock: each call returns false, so the scheduler runs its own path; we note when we were called, when the source
//        was synchronized, and when we are called next.

#include "ga.h"

#include <stdlib.h>
#include <string.h>

// The destination whose stage this thread has open; sources' synchronize looks here.
static _Thread_local struct ga_backend * ga_open_stage;

// An exception leaves the scheduler's loop: the graph is abandoned, and with it the memory that copy-outs would go to.
void ga_stage_abandon(void) {
    struct ga_backend * state = ga_open_stage;
    if (state && atomic_load(&state->phase) == GA_PHASE_OPEN && atomic_load(&state->stage->thread) == (const void *) &ga_open_stage) {
        state->queue->n_copy_outs = 0;
        state->stage->abandoned   = true;
    }
    ga_open_stage = NULL;
    ga_cause(GA_CAUSE_ELSEWHERE, 0);
    ga_keep_stores();
}

static void ga_input_unwound(const bool * returned) {
    if (!*returned) {
        ga_stage_abandon();
    }
}

bool ga_stage_is_open(void) {
    const struct ga_backend * state = ga_open_stage;
    return state && atomic_load_explicit(&state->phase, memory_order_relaxed) == GA_PHASE_OPEN &&
           atomic_load_explicit(&state->stage->thread, memory_order_relaxed) == (const void *) &ga_open_stage;
}

static bool ga_host_cpy(struct ga_backend * state, ggml_backend_t backend_src, ggml_backend_t backend_dst,
                        const struct ggml_tensor * src, struct ggml_tensor * dst) {
    ga_cpy_async_t cpy = (ga_cpy_async_t) state->slots[state->host->layout->cpy_tensor_async];
    return cpy ? cpy(backend_src, backend_dst, src, dst) : false;
}

// ggml's own copy of the last readback ended before now: it is what passed since the source's synchronize returned.
static void ga_step_close(struct ga_stage * stage, int64_t now) {
    const uint32_t k = stage->n_readbacks - 1;
    if (stage->step == GA_STOCK_NONE) {
        return;
    }
    const bool    synchronized = stage->step == GA_STOCK_SYNCHRONIZED;
    const int64_t copy_ns      = now - stage->step_ns;
    stage->copy_ns += synchronized ? copy_ns : 0;
    stage->step     = GA_STOCK_NONE;
    if (stage->recording && k < GA_MAX_READBACKS) {
        struct ggml_async_record * record = &stage->readbacks[k];
        record->copy_ns     = synchronized ? copy_ns : -1;
        record->duration_ns = now - record->t_ns;
    }
}

// Somebody waits for sources before the drain does, and not for a readback that we left to ggml: the scheduler's loop was left
// (an eval callback threw). What the reads are meant for may be gone by the next compute; it is still there when the last
// source has been waited for, as ggml does it for all of them before it gives a graph's memory away.
static void ga_stage_land(struct ggml_async_queue * queue, ggml_backend_t source, int64_t wait_ns) {
    const int n = atomic_load_explicit(&queue->n_sources, memory_order_relaxed);
    bool all = true;
    for (int i = 0; i < n; i++) {
        ggml_backend_t backend = atomic_load_explicit(&queue->sources[i].backend, memory_order_relaxed);
        if (backend == source) {
            queue->sources[i].wait_ns = wait_ns;
        }
        all = all && (!backend || queue->sources[i].wait_ns >= 0);
    }
    for (int i = 0; i < queue->n_copy_outs && all; i++) {
        const struct ga_copy_out * out = &queue->copy_outs[i];
        if (atomic_load_explicit(&queue->sources[out->source].backend, memory_order_relaxed)) {
            memcpy(out->data, out->bounce, out->size);
        }
    }
    queue->n_copy_outs = all ? 0 : queue->n_copy_outs;
}

void ga_stage_synchronized(ggml_backend_t backend, int64_t t0, int64_t t1) {
    struct ga_backend * state = ga_open_stage;
    if (!ga_stage_is_open()) {
        return;
    }
    struct ga_stage * stage = state->stage;
    // A readback that was left to ggml waits for its source once, itself; any other wait is not for it.
    if (stage->step != GA_STOCK_ASKED) {
        ga_stage_land(state->queue, backend, t1 - t0);
    }
    stage->n_sync++;
    stage->wait_ns += t1 - t0;
    if (stage->mode == GGML_ASYNC_MODE_STOCK && stage->device_wait_ns < 0) {
        stage->device_wait_ns = t1 - t0;
    }
    if (stage->step == GA_STOCK_ASKED && stage->step_source == backend) {
        stage->step    = GA_STOCK_SYNCHRONIZED;
        stage->step_ns = t1;
        if (stage->recording && stage->n_readbacks <= GA_MAX_READBACKS) {
            stage->readbacks[stage->n_readbacks - 1].wait_ns = t1 - t0;
        }
    }
}

static int ga_backend_device_index(struct ga_host * host, ggml_backend_t backend) {
    struct ga_device * device = ga_host_device(host->api.ggml_backend_get_device(backend));
    return device ? device->index : -1;
}

static bool ga_stage_open(struct ga_backend * state, ggml_backend_t source, int64_t now) {
    int phase = GA_PHASE_IDLE;
    if (!atomic_compare_exchange_strong(&state->phase, &phase, GA_PHASE_OPEN)) {
        if (phase != GA_PHASE_OPEN) {
            return false;
        }
        if (!state->stage->abandoned) {
            return true;
        }
    }
    const int mode = atomic_load(&state->host->mode);
    if (mode == GGML_ASYNC_MODE_OFF) {
        if (phase == GA_PHASE_OPEN) {
            return false;   // abandoned, and its sources still to be waited for: the compute does that
        }
        // The hooks are about to be taken out.
        atomic_store(&state->phase, GA_PHASE_IDLE);
        ga_backend_settle(state);
        return false;
    }
    struct ga_stage * stage = state->stage;
    stage->mode           = mode;
    stage->number++;
    stage->t_ns           = now;
    stage->n_readbacks    = 0;
    stage->n_sync         = 0;
    stage->bytes          = 0;
    stage->issue_ns       = 0;
    stage->wait_ns        = 0;
    stage->copy_ns        = 0;
    stage->device_wait_ns = -1;
    stage->rows           = 0;
    stage->device         = ga_backend_device_index(state->host, source);
    stage->step           = GA_STOCK_NONE;
    stage->recording      = ga_record_on();
    stage->abandoned      = false;
    ga_token_touch(state->host, now);
    ga_cause(GA_CAUSE_READBACK, stage->number);
    return true;
}

static bool ga_same_layout(const struct ggml_tensor * src, const struct ggml_tensor * dst) {
    const struct ga_tensor * a = ga_tensor(src);
    const struct ga_tensor * b = ga_tensor(dst);
    return a->type == b->type && !memcmp(a->ne, b->ne, sizeof(a->ne)) && !memcmp(a->nb, b->nb, sizeof(a->nb));
}

// Queues the read, or says why not. Everything that is not certain goes ggml's way.
static enum ga_decline ga_readback_queue(struct ga_backend * state, ggml_backend_t backend_src,
                                         const struct ggml_tensor * src, struct ggml_tensor * dst, size_t size, int tag, int * path, int * source_index) {
    struct ga_host *      host   = state->host;
    struct ga_api *       api    = &host->api;
    ggml_backend_buffer_t buffer = ga_tensor(dst)->buffer;
    if (!buffer || !ga_tensor(src)->buffer) {
        return GA_DECLINE_no_buffer;
    }
    if (!api->ggml_backend_buffer_is_host(buffer)) {
        return GA_DECLINE_not_host;
    }
    // An application's own tensor: ggml's public copy promises that synchronizing the CPU finishes it. We could not keep that.
    if (api->ggml_backend_buffer_get_usage(buffer) != GA_BUFFER_USAGE_COMPUTE) {
        return GA_DECLINE_not_compute;
    }
    struct ga_backend * source = ga_backend_adopt(host, backend_src);
    if (!source) {
        return GA_DECLINE_unknown_source;
    }
    enum ga_decline why = ga_source_check(source, src);
    if (why != GA_ACCEPT) {
        return why;
    }
    if (!ga_same_layout(src, dst)) {
        return GA_DECLINE_layout;
    }
    const ggml_backend_buffer_type_t pinned = ga_device_pinned(source->device);
    const bool direct = pinned && api->ggml_backend_buffer_get_type(buffer) == pinned;
    *path = ga_queue_push(state->queue, source, src, ga_tensor(dst)->data, 0, size, direct, tag, &why, source_index);
    return *path < 0 ? why : GA_ACCEPT;
}

static void ga_decline_note(struct ga_host * host, enum ga_decline why, const struct ggml_tensor * src, ggml_backend_t backend_src) {
    static const char * const texts[] = {
        "",
#define X(name, text) text,
        GA_DECLINES(X)
#undef X
    };
    ga_count(host, GA_COUNTER_declined + (int) why - 1, 1);
    const uint32_t bit = 1u << why;
    if (!(atomic_fetch_or(&host->declines_logged, bit) & bit)) {
        ga_log(host, GA_LOG_LEVEL_INFO, "readback of %s from %s left to ggml: %s (told once; the counters have them all)",
               host->api.ggml_get_name(src), host->api.ggml_backend_name(backend_src), texts[why]);
    }
}

bool ga_hook_cpy_to_cpu(ggml_backend_t backend_src, ggml_backend_t backend_dst, const struct ggml_tensor * src, struct ggml_tensor * dst) {
    struct ga_backend * state = ga_backend_find(backend_dst);
    if (!state) {
        return false;
    }
    struct ga_host *      host   = state->host;
    ggml_backend_buffer_t buffer = ga_tensor_buffer(src);
    const int64_t         t0     = ga_now_ns();
    ga_upload_close();
    if (atomic_load_explicit(&state->phase, memory_order_relaxed) == GA_PHASE_OPEN) {
        ga_step_close(state->stage, t0);
    }
    // Host memory to host memory is no readback.
    if ((buffer && host->api.ggml_backend_buffer_is_host(buffer)) || !ga_stage_open(state, backend_src, t0)) {
        return ga_host_cpy(state, backend_src, backend_dst, src, dst);
    }

    struct ga_stage * stage = state->stage;
    ga_open_stage = state;
    atomic_store_explicit(&stage->thread, (const void *) &ga_open_stage, memory_order_relaxed);
    bool returned __attribute__((cleanup(ga_input_unwound))) = false;

    const size_t      size  = host->api.ggml_nbytes(src);
    const uint32_t    k     = stage->n_readbacks++;
    struct ggml_async_record * record = stage->recording && k < GA_MAX_READBACKS ? &stage->readbacks[k] : NULL;
    const uint32_t    rows  = ga_rows(src);
    stage->bytes += size;
    stage->rows   = rows && (!stage->rows || rows < stage->rows) ? rows : stage->rows;
    if (k < GA_MAX_READBACKS) {
        stage->sources[k] = -1;
    }
    if (record) {
        ga_record_describe(record, host, src);
        record->kind   = GGML_ASYNC_RECORD_READBACK;
        record->mode   = stage->mode;
        record->device = ga_backend_device_index(host, backend_src);
        record->stage  = stage->number;
        record->bytes  = size;
        record->rows   = rows;
        record->t_ns   = t0;
    }

    if (stage->mode == GGML_ASYNC_MODE_ASYNC) {
        int path = -1, source_index = -1;
        const enum ga_decline why = ga_readback_queue(state, backend_src, src, dst, size, (int) k, &path, &source_index);
        if (why == GA_ACCEPT) {
            const int64_t issue_ns = ga_now_ns() - t0;
            stage->issue_ns += issue_ns;
            ga_count(host, path == GGML_ASYNC_PATH_DIRECT ? GA_COUNTER_direct : path == GGML_ASYNC_PATH_BOUNCE ? GA_COUNTER_bounce : GA_COUNTER_empty, 1);
            if (k < GA_MAX_READBACKS) {
                stage->sources[k] = (int8_t) source_index;
            }
            if (record) {
                record->path     = path;
                record->issue_ns = issue_ns;
            }
            returned = true;
            return true;
        }
        ga_decline_note(host, why, src, backend_src);
        if (record) {
            record->decline = why;
        }
    }

    ga_count(host, GA_COUNTER_stock, 1);
    stage->step        = GA_STOCK_ASKED;
    stage->step_source = backend_src;
    stage->step_ns     = t0;
    returned           = true;
    return ga_host_cpy(state, backend_src, backend_dst, src, dst);
}

static void ga_stage_copied(void * user_data, int tag, int64_t copy_ns) {
    struct ga_stage * stage = user_data;
    stage->copy_ns += copy_ns;
    if (stage->recording && tag < GA_MAX_READBACKS) {
        stage->readbacks[tag].copy_ns = copy_ns;
    }
}

static void ga_stage_emit(struct ga_backend * state, const struct ga_source * sources, int64_t stage_ns) {
    struct ga_stage * stage = state->stage;
    const uint32_t n = stage->n_readbacks < GA_MAX_READBACKS ? stage->n_readbacks : GA_MAX_READBACKS;
    for (uint32_t k = 0; k < n; k++) {
        struct ggml_async_record * record = &stage->readbacks[k];
        if (stage->sources[k] >= 0) {
            const int64_t wait_ns = sources[stage->sources[k]].wait_ns;
            record->wait_ns     = wait_ns;
            record->duration_ns = record->issue_ns + (wait_ns > 0 ? wait_ns : 0);
        }
        ga_record_put(record);
    }
    struct ggml_async_record record = {
        .kind = GGML_ASYNC_RECORD_STAGE, .mode = stage->mode, .path = -1, .host = state->host->id, .device = stage->device,
        .layer = n ? stage->readbacks[0].layer : -1, .stage = stage->number, .n_readbacks = stage->n_readbacks,
        .n_sync = stage->n_sync, .thread = n ? stage->readbacks[0].thread : 0, .bytes = stage->bytes, .t_ns = stage->t_ns,
        .duration_ns = stage_ns, .issue_ns = stage->mode == GGML_ASYNC_MODE_ASYNC ? stage->issue_ns : -1, .wait_ns = stage->wait_ns,
        .copy_ns = stage->copy_ns, .device_wait_ns = stage->device_wait_ns, .rows = stage->rows,
    };
    if (n) {
        memcpy(record.name, stage->readbacks[0].name, sizeof(record.name));
    }
    ga_record_put(&record);
}

// Also when a device throws in the drain: the next stage must be able to open.
static void ga_stage_end(struct ga_backend ** state) {
    (*state)->stage->abandoned = false;
    atomic_store(&(*state)->phase, GA_PHASE_IDLE);
    ga_backend_settle(*state);
    ga_cause(GA_CAUSE_ELSEWHERE, 0);
}

// The split's compute is about to start: the drain, then the books.
static void ga_stage_close(struct ga_backend * state) {
    struct ga_backend * ended __attribute__((cleanup(ga_stage_end))) = state;
    struct ga_host *  host  = state->host;
    struct ga_stage * stage = state->stage;
    struct ga_source  sources[GA_MAX_SOURCES];
    uint32_t          n_sync = 0;

    ga_step_close(stage, ga_now_ns());
    ga_open_stage = NULL;
    ga_queue_drain(state->queue, &n_sync, sources, ga_stage_copied, stage);
    const int64_t stage_ns = ga_now_ns() - stage->t_ns;
    if (stage->abandoned) {
        return;
    }

    stage->n_sync += n_sync;
    for (int i = 0; i < GA_MAX_SOURCES; i++) {
        stage->wait_ns += sources[i].wait_ns > 0 ? sources[i].wait_ns : 0;
    }
    ga_count(host, GA_COUNTER_stages,         1);
    ga_count(host, GA_COUNTER_readbacks,      stage->n_readbacks);
    ga_count(host, GA_COUNTER_readback_bytes, stage->bytes);
    ga_count(host, GA_COUNTER_stage_ns,       (uint64_t) stage_ns);
    ga_count(host, GA_COUNTER_synchronizes,   stage->n_sync);
    ga_count(host, GA_COUNTER_wait_ns,        (uint64_t) stage->wait_ns);
    if (stage->mode == GGML_ASYNC_MODE_ASYNC) {
        ga_count(host, GA_COUNTER_issue_ns, (uint64_t) stage->issue_ns);
    }
    ga_count(host, GA_COUNTER_copy_ns, (uint64_t) stage->copy_ns);
    if (stage->device_wait_ns >= 0) {
        ga_count(host, GA_COUNTER_device_wait_ns, (uint64_t) stage->device_wait_ns);
    }
    ga_token_stage(stage);
    if (stage->recording) {
        ga_stage_emit(state, sources, stage_ns);
    }
}

// The destination is going: finish what is queued, but copy nothing out: the graph's memory may be gone before it.
void ga_stage_forget(struct ga_backend * state) {
    if (atomic_load(&state->phase) != GA_PHASE_OPEN) {
        return;
    }
    struct ga_source sources[GA_MAX_SOURCES];
    uint32_t         n_sync = 0;
    if (ga_open_stage == state) {
        ga_open_stage = NULL;
    }
    state->queue->n_copy_outs = 0;
    const int n = ga_queue_drain(state->queue, &n_sync, sources, NULL, NULL);
    ga_count(state->host, GA_COUNTER_dropped_reads, (uint64_t) n);
}

// Returns when the compute begins; `layer` is that of the split's first readback.
static int64_t ga_before_compute(struct ga_backend * state, int * layer) {
    *layer = -1;
    ga_upload_close();
    if (atomic_load(&state->phase) == GA_PHASE_OPEN) {
        *layer = state->stage->recording && state->stage->n_readbacks ? state->stage->readbacks[0].layer : -1;
        ga_cause(GA_CAUSE_READBACK, state->stage->number);
        ga_stage_close(state);
    } else {
        ga_cause(GA_CAUSE_ELSEWHERE, 0);
    }
    ga_count(state->host, GA_COUNTER_cpu_computes, 1);
    const int64_t now = ga_now_ns();
    ga_token_touch(state->host, now);
    return now;
}

int ga_hook_cpu_compute(ggml_backend_t backend, struct ggml_cgraph * cgraph) {
    struct ga_backend * state = ga_backend_find(backend);
    if (!state) {
        return -1;
    }
    int           layer;
    const int64_t t0     = ga_before_compute(state, &layer);
    const int     status = ((ga_compute_t) state->slots[state->host->layout->graph_compute])(backend, cgraph);
    ga_compute_emit(state, t0, layer);
    return status;
}

int ga_hook_cpu_plan_compute(ggml_backend_t backend, void * plan) {
    struct ga_backend * state = ga_backend_find(backend);
    if (!state) {
        return -1;
    }
    int           layer;
    const int64_t t0     = ga_before_compute(state, &layer);
    const int     status = ((ga_plan_compute_t) state->slots[state->host->layout->graph_plan_compute])(backend, plan);
    ga_compute_emit(state, t0, layer);
    return status;
}
