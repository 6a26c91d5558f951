// Devices seen from outside: their synchronizes, and uploads (CPU -> device split inputs) with the host time they take.
// Every hook here passes through; none changes what the host does.

#define _GNU_SOURCE
#include "ga.h"

#include <stdlib.h>
#include <string.h>

// An upload that ggml does synchronously: it began when the device declined to queue it and lasts until we hear from
// this thread again. The first synchronize belongs to it, a second one to the next input.
static _Thread_local struct {
    bool                     open;
    bool                     synchronized;
    uint32_t                 n_mode_changes;
    struct ga_host         * host;
    struct ggml_async_record record;
} ga_upload;

void ga_record_describe(struct ggml_async_record * record, struct ga_host * host, const struct ggml_tensor * tensor) {
    memset(record, 0, sizeof(*record));
    record->host           = host->id;
    record->device         = -1;
    record->layer          = -1;
    record->thread         = ga_thread_id();
    record->duration_ns    = -1;
    record->issue_ns       = -1;
    record->wait_ns        = -1;
    record->copy_ns        = -1;
    record->device_wait_ns = -1;

    const char * name = host->api.ggml_get_name(tensor);
    size_t n = 0;
    while (n < sizeof(record->name) - 1 && name[n]) {
        record->name[n] = name[n];
        n++;
    }
    // "ffn_norm-12", "ffn_moe_topk-12 (view)": the layer is the number behind the last dash
    const char * dash = strrchr(record->name, '-');
    if (dash && dash[1] >= '0' && dash[1] <= '9') {
        record->layer = atoi(dash + 1);
    }
}

static void ga_upload_done(int64_t now) {
    struct ggml_async_record * record = &ga_upload.record;
    ga_upload.open = false;
    ga_cause(GA_CAUSE_ELSEWHERE, 0);
    if (ga_upload.n_mode_changes != atomic_load_explicit(&ga_upload.host->n_mode_changes, memory_order_relaxed)) {
        return;     // our hooks may have been out meanwhile: its end was not seen
    }
    record->duration_ns = now - record->t_ns;
    ga_count(ga_upload.host, GA_COUNTER_uploads,      1);
    ga_count(ga_upload.host, GA_COUNTER_upload_bytes, record->bytes);
    ga_count(ga_upload.host, GA_COUNTER_upload_ns,    (uint64_t) record->duration_ns);
    ga_record_put(record);
}

void ga_upload_close(void) {
    if (ga_upload.open) {
        ga_upload_done(ga_now_ns());
    }
}

static void ga_upload_begin(struct ga_backend * state, const struct ggml_tensor * tensor, uint64_t bytes, int64_t t0) {
    ga_record_describe(&ga_upload.record, state->host, tensor);
    ga_upload.open          = true;
    ga_upload.synchronized  = false;
    ga_upload.host          = state->host;
    ga_upload.n_mode_changes = atomic_load_explicit(&state->host->n_mode_changes, memory_order_relaxed);
    ga_upload.record.kind   = GGML_ASYNC_RECORD_UPLOAD;
    ga_upload.record.mode   = atomic_load_explicit(&state->host->mode, memory_order_relaxed);
    ga_upload.record.path   = -1;
    ga_upload.record.device = state->device->index;
    ga_upload.record.bytes  = bytes;
    ga_upload.record.rows   = ga_rows(tensor);
    ga_upload.record.t_ns   = t0;
    ga_token_touch(state->host, t0);
    ga_token_rows(ga_upload.record.rows);
    ga_cause(GA_CAUSE_UPLOAD, 0);
}

static bool ga_measuring(struct ga_backend * state) {
    return atomic_load_explicit(&state->phase, memory_order_relaxed) == GA_PHASE_IDLE;
}

bool ga_hook_cpy_to_device(ggml_backend_t backend_src, ggml_backend_t backend_dst, const struct ggml_tensor * src, struct ggml_tensor * dst) {
    struct ga_backend * state = ga_backend_find(backend_dst);
    if (!state) {
        return false;
    }
    struct ga_host *      host   = state->host;
    ga_cpy_async_t        cpy    = (ga_cpy_async_t) state->slots[host->layout->cpy_tensor_async];
    ggml_backend_buffer_t buffer = ga_tensor_buffer(src);
    ga_upload_close();
    if (!ga_measuring(state) || !buffer || !host->api.ggml_backend_buffer_is_host(buffer)) {
        return cpy(backend_src, backend_dst, src, dst);
    }
    ga_upload_begin(state, src, host->api.ggml_nbytes(src), ga_now_ns());
    const bool queued = cpy(backend_src, backend_dst, src, dst);
    if (queued) {
        ga_upload_close();
    }
    return queued;
}

void ga_hook_set_tensor_async(ggml_backend_t backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    struct ga_backend * state = ga_backend_find(backend);
    if (!state) {
        return;
    }
    ga_upload_close();
    const bool measuring = ga_measuring(state);
    if (measuring) {
        ga_token_resume(state->host);
        ga_upload_begin(state, tensor, size, ga_now_ns());
    }
    ((ga_set_async_t) state->slots[state->host->layout->set_tensor_async])(backend, tensor, data, offset, size);
    if (measuring) {
        ga_upload_close();
    }
}

static void ga_synchronize_unwound(const bool * returned) {
    if (!*returned) {
        ga_upload.open = false;
        ga_stage_abandon();
        ga_cause(GA_CAUSE_ELSEWHERE, 0);
        ga_keep_stores();
    }
}

void ga_hook_synchronize(ggml_backend_t backend) {
    struct ga_backend * state = ga_backend_find(backend);
    if (!state) {
        return;
    }
    ga_synchronize_t synchronize = (ga_synchronize_t) state->slots[state->host->layout->synchronize];
    bool returned __attribute__((cleanup(ga_synchronize_unwound))) = false;
    if (!ga_measuring(state)) {
        synchronize(backend);
        returned = true;
        return;
    }
    const int64_t t0 = ga_now_ns();
    if (ga_upload.open) {
        if (ga_upload.synchronized) {
            ga_upload_done(t0);
        }
        ga_upload.synchronized = true;
    }
    const bool    computed = atomic_exchange_explicit(&state->computed, false, memory_order_relaxed);
    const bool    inside   = ga_upload.open || ga_stage_is_open();
    enum ga_cause cause    = GA_CAUSE_ELSEWHERE;
    if (!inside) {
        cause = ga_token_sync_cause(computed);
        ga_cause(cause, 0);
    }
    synchronize(backend);
    returned = true;
    const int64_t t1 = ga_now_ns();
    ga_count(state->host, GA_COUNTER_device_synchronizes, 1);
    ga_stage_synchronized(backend, t0, t1);
    if (cause == GA_CAUSE_TOKEN) {
        ga_cause(GA_CAUSE_ELSEWHERE, 0);
        ga_token_end(state, t0, t1);
    }
    // An upload stays one until the next hook: ggml copies the user's inputs right behind this synchronize.
}

static void ga_compute_unwound(const bool * returned) {
    if (!*returned) {
        ga_cause(GA_CAUSE_ELSEWHERE, 0);
        ga_keep_stores();
    }
}

int ga_hook_device_compute(ggml_backend_t backend, struct ggml_cgraph * cgraph) {
    struct ga_backend * state = ga_backend_find(backend);
    if (!state) {
        return -1;
    }
    ga_upload_close();
    ga_count(state->host, GA_COUNTER_device_computes, 1);
    const int64_t t0 = ga_now_ns();
    ga_token_touch(state->host, t0);
    ga_cause(GA_CAUSE_COMPUTE, 0);
    bool returned __attribute__((cleanup(ga_compute_unwound))) = false;
    const int status = ((ga_compute_t) state->slots[state->host->layout->graph_compute])(backend, cgraph);
    returned = true;
    ga_cause(GA_CAUSE_ELSEWHERE, 0);
    atomic_store_explicit(&state->computed, true, memory_order_relaxed);
    ga_compute_emit(state, t0, -1);
    return status;
}
