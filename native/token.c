// Tokens and causes: what a thread is doing, as far as the hooks can see it.
//
// A token is one evaluation of a graph. It begins with the first thing a hook sees and ends when the program waits for a
// device that has computed, outside a stage and an upload: that is how llama.cpp ends every evaluation. The Vulkan layer
// is told what each thread does (its causes), so that it can say why a wait happened.

#define _GNU_SOURCE
#include "ga.h"
#include "vulkan_counters.h"

#include <dlfcn.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef int (*ga_set_cause_t)(int cause, uint32_t stage);

static _Atomic(ga_set_cause_t) ga_layer_set_cause;

static _Thread_local struct {
    bool     open;
    bool     ended;         // and nothing was seen since
    int      mode;
    int64_t  t_ns;
    uint32_t n_readbacks;
    uint32_t n_sync;
    uint32_t rows;
    uint64_t bytes;
    int      device;
} ga_token;

// The layer comes into the process with the first Vulkan instance; a device that makes a backend has one.
void ga_cause_find_layer(void) {
    if (atomic_load_explicit(&ga_layer_set_cause, memory_order_relaxed)) {
        return;
    }
    void * layer = dlopen("libVkLayer_ggml_async_waits.so", RTLD_NOW | RTLD_NOLOAD);
    if (!layer) {
        return;
    }
    int (*abi_version)(void) = (int (*)(void)) dlsym(layer, "ggml_async_layer_abi_version");
    ga_set_cause_t set_cause = (ga_set_cause_t) dlsym(layer, "ggml_async_layer_set_cause");
    if (abi_version && set_cause && abi_version() == GGML_ASYNC_LAYER_ABI_VERSION) {
        atomic_store(&ga_layer_set_cause, set_cause);
    }
    dlclose(layer);     // it stays loaded by itself
}

void ga_cause(enum ga_cause cause, uint32_t stage) {
    const ga_set_cause_t set_cause = atomic_load_explicit(&ga_layer_set_cause, memory_order_relaxed);
    if (set_cause) {
        set_cause((int) cause, stage);
    }
}

uint64_t ga_thread_id(void) {
    static _Thread_local uint64_t id;
    if (!id) {
        id = (uint64_t) syscall(SYS_gettid);
    }
    return id;
}

// As far as a shape tells how many tokens are in a batch: rows of a matrix, or the last dimension that is used.
uint32_t ga_rows(const struct ggml_tensor * tensor) {
    const int64_t * ne = ga_tensor(tensor)->ne;
    const int64_t   n  = ne[3] > 1 ? ne[3] : ne[2] > 1 ? ne[2] : ne[1];
    return n > 0 && n < INT32_MAX ? (uint32_t) n : 0;
}

void ga_token_touch(struct ga_host * host, int64_t now) {
    if (ga_token.open) {
        return;
    }
    memset(&ga_token, 0, sizeof(ga_token));
    ga_token.open   = true;
    ga_token.mode   = atomic_load_explicit(&host->mode, memory_order_relaxed);
    ga_token.t_ns   = now;
    ga_token.device = -1;
}

// How many tokens are in the batch: what the first tensor to cross says. In the last layers only those are left whose
// results are wanted.
void ga_token_rows(uint32_t rows) {
    if (!ga_token.rows) {
        ga_token.rows = rows;
    }
}

// A device is being sent data at once after what looked like the end: ggml has read which experts a batch needs, and
// copies their weights. The token goes on; its next end replaces this one.
void ga_token_resume(struct ga_host * host) {
    if (ga_token.ended) {
        ga_token.ended = false;
        ga_token.open  = true;
        ga_count(host, GA_COUNTER_tokens_resumed, 1);
    }
}

void ga_token_stage(const struct ga_stage * stage) {
    ga_token.n_readbacks += stage->n_readbacks;
    ga_token.n_sync      += stage->n_sync;
    ga_token.bytes       += stage->bytes;
    ga_token_rows(stage->rows);
    if (ga_token.device < 0) {
        ga_token.device = stage->device;
    }
}

// A device is about to be synchronized outside a stage. `computed`: it has worked since it was last waited for.
enum ga_cause ga_token_sync_cause(bool computed) {
    return computed || !ga_token.open ? GA_CAUSE_TOKEN : GA_CAUSE_UPLOAD;
}

void ga_token_end(struct ga_backend * state, int64_t t0, int64_t t1) {
    if (!ga_token.open) {
        return;
    }
    ga_token.open  = false;
    ga_token.ended = true;
    ga_count(state->host, GA_COUNTER_tokens, 1);
    // One that a mode switch fell into belongs to neither mode.
    if (!ga_capture_on() || ga_token.mode != atomic_load_explicit(&state->host->mode, memory_order_relaxed)) {
        return;
    }
    const struct ggml_async_record record = {
        .kind = GGML_ASYNC_RECORD_TOKEN, .mode = ga_token.mode, .path = -1, .host = state->host->id,
        .device = ga_token.device >= 0 ? ga_token.device : state->device->index, .layer = -1,
        .n_readbacks = ga_token.n_readbacks, .n_sync = ga_token.n_sync, .rows = ga_token.rows, .thread = ga_thread_id(),
        .bytes = ga_token.bytes, .t_ns = ga_token.t_ns, .duration_ns = t1 - ga_token.t_ns, .issue_ns = -1,
        .wait_ns = t1 - t0, .copy_ns = -1, .device_wait_ns = -1,
    };
    ga_capture_put(&record);
}

// One graph_compute call, for the capture only: the reader in this process asked for readbacks.
void ga_compute_emit(struct ga_backend * state, int64_t t0, int layer) {
    if (!ga_capture_on()) {
        return;
    }
    const struct ggml_async_record record = {
        .kind = GGML_ASYNC_RECORD_COMPUTE, .mode = atomic_load_explicit(&state->host->mode, memory_order_relaxed), .path = -1,
        .host = state->host->id, .device = state->device->index, .layer = layer, .n_sync = state->is_destination, .thread = ga_thread_id(),
        .t_ns = t0, .duration_ns = ga_now_ns() - t0, .issue_ns = -1, .wait_ns = -1, .copy_ns = -1, .device_wait_ns = -1,
    };
    ga_capture_put(&record);
}
