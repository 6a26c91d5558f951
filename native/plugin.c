// The doors: ggml's own hook for out-of-tree backends, and the public C API.

#include "ga.h"

#include <stdlib.h>
#include <string.h>

//
// ggml_backend_init: a registry entry without devices
//

struct ga_reg {
    int32_t      api_version;
    const char * (*get_name)(struct ga_reg * reg);
    size_t       (*get_device_count)(struct ga_reg * reg);
    void *       (*get_device)(struct ga_reg * reg, size_t index);
    void *       (*get_proc_address)(struct ga_reg * reg, const char * name);
    void       * context;
};

// Programs print this name beside those of real backends; several look for "CPU", "BLAS" or "RPC" in it.
static const char * ga_reg_get_name(struct ga_reg * reg) {
    (void) reg;
    return "ASYNC";
}

static size_t ga_reg_get_device_count(struct ga_reg * reg) {
    (void) reg;
    return 0;
}

static void * ga_reg_get_device(struct ga_reg * reg, size_t index) {
    (void) reg;
    (void) index;
    return NULL;
}

static void * ga_reg_get_proc_address(struct ga_reg * reg, const char * name) {
    (void) reg;
    static const struct { const char * name; void * function; } functions[] = {
#define X(function) { #function, (void *) function }
        X(ggml_async_abi_version), X(ggml_async_version), X(ggml_async_last_error), X(ggml_async_log_set), X(ggml_async_host_count),
        X(ggml_async_host_get), X(ggml_async_set_mode), X(ggml_async_get_mode), X(ggml_async_counter_name), X(ggml_async_counters),
        X(ggml_async_counters_reset), X(ggml_async_record_start), X(ggml_async_record_stop), X(ggml_async_record_read),
        X(ggml_async_queue_new), X(ggml_async_queue_free), X(ggml_async_read), X(ggml_async_wait),
#undef X
    };
    for (size_t i = 0; name && i < sizeof(functions)/sizeof(functions[0]); i++) {
        if (!strcmp(functions[i].name, name)) {
            return functions[i].function;
        }
    }
    return NULL;
}

static struct ga_reg ga_regs[GA_MAX_HOSTS];

static struct ga_host * ga_attach_caller(const void * caller) {
    const int id = ga_host_attach_address(caller);
    if (id < 0) {
        const char * error = ggml_async_last_error();
        const size_t first = strcspn(error, "\n");
        ga_log(NULL, GA_LOG_LEVEL_ERROR, "not attached: %.*s%s%s", (int) first, error, error[first] ? "; " : "", error[first] ? error + first + 1 : "");
        return NULL;
    }
    return ga_host_get(id);
}

// Called by the host before ggml_backend_init: 0 keeps us out, with the reason logged.
GA_EXPORT int ggml_backend_score(void);
GA_EXPORT int ggml_backend_score(void) {
    return ga_attach_caller(__builtin_return_address(0)) ? 1 : 0;
}

GA_EXPORT void * ggml_backend_init(void);
GA_EXPORT void * ggml_backend_init(void) {
    struct ga_host * host = ga_attach_caller(__builtin_return_address(0));
    if (!host) {
        return NULL;
    }
    struct ga_reg * reg = &ga_regs[host->id];
    *reg = (struct ga_reg) {
        .api_version      = host->api_version,
        .get_name         = ga_reg_get_name,
        .get_device_count = ga_reg_get_device_count,
        .get_device       = ga_reg_get_device,
        .get_proc_address = ga_reg_get_proc_address,
    };
    return reg;
}

//
// Names
//

static const char * const ga_mode_names[]    = { "off", "stock", "async" };
static const char * const ga_path_names[]    = { "stock", "direct", "bounce", "empty" };
static const char * const ga_kind_names[]    = { NULL, "readback", "stage", "upload", "compute", "token" };
static const char * const ga_decline_names[] = {
    NULL,
#define X(name, text) #name,
    GA_DECLINES(X)
#undef X
};
static const char * const ga_counter_names[] = {
#define X(name) #name,
    GA_COUNTERS(X)
#undef X
#define X(name, text) "declined_" #name,
    GA_DECLINES(X)
#undef X
};

#define GA_NAME(table, index) ((index) >= 0 && (size_t) (index) < sizeof(table)/sizeof((table)[0]) ? (table)[index] : NULL)

int ggml_async_abi_version(void) {
    return GGML_ASYNC_ABI_VERSION;
}

const char * ggml_async_version(void) {
    return GGML_ASYNC_VERSION;
}

const char * ggml_async_mode_name(int mode) {
    return GA_NAME(ga_mode_names, mode);
}

int ggml_async_mode_parse(const char * name) {
    for (int i = 0; name && i < (int) (sizeof(ga_mode_names)/sizeof(ga_mode_names[0])); i++) {
        if (!strcmp(name, ga_mode_names[i])) {
            return i;
        }
    }
    return ga_fail(GGML_ASYNC_ERR_ARGUMENT, "mode %s is not off, stock or async", name ? name : "(null)");
}

const char * ggml_async_counter_name(int index) {
    return GA_NAME(ga_counter_names, index);
}

const char * ggml_async_decline_name(int reason) {
    return GA_NAME(ga_decline_names, reason);
}

const char * ggml_async_record_kind_name(int kind) {
    return GA_NAME(ga_kind_names, kind);
}

const char * ggml_async_path_name(int path) {
    return GA_NAME(ga_path_names, path);
}

//
// Hosts
//

static struct ga_host * ga_host_or_fail(int host) {
    struct ga_host * found = ga_host_get(host);
    if (!found) {
        ga_fail(GGML_ASYNC_ERR_ARGUMENT, "no host %d; ggml_async_attach returns host ids", host);
    }
    return found;
}

int ggml_async_attach(const char * library) {
    if (library) {
        return ga_host_attach_library(library);
    }
    const size_t size = 65536;
    char * names = ga_calloc(1, size);
    if (!names) {
        return ga_fail(GGML_ASYNC_ERR_NO_MEMORY, "no memory to list libraries");
    }
    const int n = ggml_async_find(names, size);
    int status;
    if (n == 1) {
        names[strcspn(names, "\n")] = 0;
        status = ga_host_attach_library(names);
    } else if (n == 0) {
        status = ga_fail(GGML_ASYNC_ERR_NOT_GGML, "no ggml is loaded in this process\nload llama.cpp first, then attach");
    } else {
        status = ga_fail(GGML_ASYNC_ERR_ARGUMENT, "%d ggml libraries are loaded; name one of:\n%.800s", n, names);
    }
    free(names);
    return status;
}

int ggml_async_detach(int id) {
    struct ga_host * host = ga_host_or_fail(id);
    if (!host) {
        return GGML_ASYNC_ERR_ARGUMENT;
    }
    ga_lock();
    const int n = atomic_load(&host->n_devices);
    for (int i = 0; i < n; i++) {
        void ** slot = &ga_words(host->devices[i].dev)[GA_DEVICE_SLOT_INIT_BACKEND];
        if (__atomic_load_n(slot, __ATOMIC_ACQUIRE) == (void *) ga_init_backend) {
            __atomic_store_n(slot, (void *) atomic_load(&host->devices[i].init_backend), __ATOMIC_SEQ_CST);
        }
    }
    atomic_store(&host->attached, false);
    const int n_open = ga_backends_settle_all_locked(host);
    ga_unlock();
    if (n_open) {
        return ga_fail(GGML_ASYNC_ERR_BUSY, "%d backends have a stage open or reads queued; they let go when that ends", n_open);
    }
    return GGML_ASYNC_OK;
}

int ggml_async_host_count(void) {
    return ga_host_count();
}

int ggml_async_host_get(int id, struct ggml_async_host_info * info, size_t size) {
    struct ga_host * host = ga_host_or_fail(id);
    if (!host || !info) {
        return GGML_ASYNC_ERR_ARGUMENT;
    }
    ga_lock();
    const struct ggml_async_host_info full = {
        .id          = host->id,
        .api_version = host->api_version,
        .mode        = atomic_load(&host->mode),
        .attached    = atomic_load(&host->attached),
        .n_devices   = atomic_load(&host->n_devices),
        .n_backends  = ga_backends_live_locked(host),
        .library     = host->library,
        .version     = host->api.ggml_version ? host->api.ggml_version() : "",
        .layout      = host->layout->name,
    };
    ga_unlock();
    memcpy(info, &full, size < sizeof(full) ? size : sizeof(full));
    return GGML_ASYNC_OK;
}

static void ga_host_set_mode_locked(struct ga_host * host, int mode) {
    atomic_store(&host->mode, mode);
    atomic_fetch_add(&host->n_mode_changes, 1);
    ga_backends_settle_all_locked(host);
    ga_capture_mode(host->id, mode);
}

int ggml_async_set_mode(int id, int mode) {
    if (!ggml_async_mode_name(mode)) {
        return ga_fail(GGML_ASYNC_ERR_ARGUMENT, "mode %d is not 0 (off), 1 (stock) or 2 (async)", mode);
    }
    struct ga_host * host = id == -1 ? NULL : ga_host_or_fail(id);
    if (id != -1 && !host) {
        return GGML_ASYNC_ERR_ARGUMENT;
    }
    ga_lock();
    if (host) {
        ga_host_set_mode_locked(host, mode);
    } else {
        ga_set_default_mode(mode);
        for (int i = 0; i < ga_host_count(); i++) {
            ga_host_set_mode_locked(ga_host_get(i), mode);
        }
    }
    ga_control_update_locked();
    ga_unlock();
    return GGML_ASYNC_OK;
}

int ggml_async_get_mode(int id) {
    struct ga_host * host = ga_host_or_fail(id);
    return host ? atomic_load(&host->mode) : GGML_ASYNC_ERR_ARGUMENT;
}

int ggml_async_counters(int id, uint64_t * values, int n) {
    struct ga_host * host = ga_host_or_fail(id);
    if (!host) {
        return GGML_ASYNC_ERR_ARGUMENT;
    }
    for (int i = 0; values && i < n && i < GA_N_COUNTERS; i++) {
        values[i] = atomic_load_explicit(&host->counters[i], memory_order_relaxed);
    }
    return GA_N_COUNTERS;
}

int ggml_async_counters_reset(int id) {
    struct ga_host * host = ga_host_or_fail(id);
    if (!host) {
        return GGML_ASYNC_ERR_ARGUMENT;
    }
    for (int i = 0; i < GA_N_COUNTERS; i++) {
        atomic_store_explicit(&host->counters[i], 0, memory_order_relaxed);
    }
    return GGML_ASYNC_OK;
}

//
// The queue for applications
//

struct ggml_async_queue * ggml_async_queue_new(int id) {
    struct ga_host * host = ga_host_or_fail(id);
    if (!host) {
        return NULL;
    }
    ga_lock();
    struct ggml_async_queue * queue = ga_queue_new(host);
    ga_unlock();
    if (!queue) {
        ga_fail(GGML_ASYNC_ERR_NO_MEMORY, "no memory for a queue");
    }
    return queue;
}

void ggml_async_queue_free(struct ggml_async_queue * queue) {
    if (!queue) {
        return;
    }
    ggml_async_wait(queue);
    ga_lock();
    ga_queue_free(queue);
    ga_unlock();
}

int ggml_async_read(struct ggml_async_queue * queue, void * backend, const void * tensor, void * data, size_t offset, size_t size) {
    if (!queue || !backend || !tensor || (!data && size)) {
        return ga_fail(GGML_ASYNC_ERR_ARGUMENT, "ggml_async_read needs a queue, a backend, a tensor and memory");
    }
    struct ga_host * host = queue->host;
    const size_t     all  = host->api.ggml_nbytes(tensor);
    if (!ga_tensor(tensor)->data || !ga_tensor(tensor)->buffer) {
        return ga_fail(GGML_ASYNC_ERR_ARGUMENT, "tensor %s is not allocated", host->api.ggml_get_name(tensor));
    }
    if (offset > all || size > all - offset) {
        return ga_fail(GGML_ASYNC_ERR_ARGUMENT, "bytes %zu + %zu lie outside tensor %s, which has %zu", offset, size, host->api.ggml_get_name(tensor), all);
    }
    ga_count(host, GA_COUNTER_app_reads, 1);
    struct ga_backend * source = ga_backend_adopt(host, backend);
    enum ga_decline why = source ? ga_source_check(source, tensor) : GA_DECLINE_unknown_source;
    if (why == GA_ACCEPT) {
        int source_index;
        const int path = ga_queue_push(queue, source, tensor, data, offset, size, false, 0, &why, &source_index);
        if (path >= 0) {
            return path;
        }
    }
    host->api.ggml_backend_synchronize(backend);
    host->api.ggml_backend_tensor_get(tensor, data, offset, size);
    queue->n_reads++;
    return GGML_ASYNC_PATH_STOCK;
}

int ggml_async_wait(struct ggml_async_queue * queue) {
    if (!queue) {
        return ga_fail(GGML_ASYNC_ERR_ARGUMENT, "ggml_async_wait needs a queue");
    }
    struct ga_source sources[GA_MAX_SOURCES];
    uint32_t         n_sync = 0;
    ga_count(queue->host, GA_COUNTER_app_waits, 1);
    return ga_queue_drain(queue, &n_sync, sources, NULL, NULL);
}
