// Internals of libggml-async. Who owns what:
//   host     one loaded ggml library; static, lives as long as the process        (host.c)
//   device   one device of a host, whose init_backend we stand in for             (host.c)
//   backend  one live backend object: the saved slots, and for a destination the open stage and its queue (backend.c)
//   queue    reads under way towards one destination or one application           (queue.c)
//   stage    the measurements of one CPU split                                    (readback.c)
//   token    one evaluation of a graph, per thread                                (token.c)
//   capture  the file that events and counters go to; shared with the layer       (capture.c)
// Locking: ga_lock() guards attach, registration, mode changes and frees. No hook that runs per token takes it.
#pragma once

#include "capture.h"
#include "host_abi.h"
#include "include/ggml_async.h"
#include "ring.h"

#include <stdatomic.h>

#ifndef GGML_ASYNC_VERSION
#    define GGML_ASYNC_VERSION "unknown"
#endif

#define GA_EXPORT __attribute__((visibility("default")))

enum {
    GA_MAX_HOSTS     = 16,
    GA_MAX_DEVICES   = 64,   // per host
    GA_MAX_SOURCES   = 16,   // per queue; ggml's scheduler has at most 16 backends
    GA_MAX_READBACKS = 32,   // records kept per stage; ggml's splits have at most 30 inputs
};

//
// Counters and reasons: one list each, from which names, indices and docs follow
//

#define GA_DECLINES(X)                                                                                             \
    X(no_buffer,        "a tensor has no buffer")                                                                  \
    X(not_host,         "the destination is not host memory")                                                      \
    X(not_compute,      "the destination is not a scheduler input (its buffer's usage is not COMPUTE)")            \
    X(unknown_source,   "the source backend's structure is not the one we know")                                   \
    X(no_async,         "the source backend has no get_tensor_async")                                              \
    X(meta_source,      "the source is a tensor-parallel (meta) device")                                           \
    X(buffer_type,      "the source is not in its device's default buffer type")                                   \
    X(layout,           "source and destination differ in type or shape")                                          \
    X(no_pinned_memory, "the source device has no pinned host memory of its own")                                  \
    X(no_memory,        "an allocation failed")                                                                    \
    X(too_many_sources, "more than 16 source devices in one split")

enum ga_decline {
    GA_ACCEPT = 0,
#define X(name, text) GA_DECLINE_##name,
    GA_DECLINES(X)
#undef X
    GA_N_DECLINES,
};

#define GA_COUNTERS(X)                                                                   \
    X(readbacks)           /* tensors copied from a device as inputs of CPU splits */    \
    X(readback_bytes)                                                                    \
    X(direct)              /* of them: queued into the destination */                    \
    X(bounce)              /* of them: queued into pinned memory of ours */              \
    X(empty)               /* of them: zero bytes */                                     \
    X(stock)               /* of them: ggml's own synchronous copy */                    \
    X(stages)              /* CPU splits with readbacks */                               \
    X(stage_ns)                                                                          \
    X(synchronizes)        /* of source devices, inside stages */                        \
    X(device_wait_ns)      /* first synchronize of each stock stage */                   \
    X(issue_ns)                                                                          \
    X(wait_ns)                                                                           \
    X(copy_ns)                                                                           \
    X(uploads)             /* tensors copied from the CPU as inputs of device splits */  \
    X(upload_bytes)                                                                      \
    X(upload_ns)                                                                         \
    X(device_synchronizes) /* of devices, everywhere */                                  \
    X(device_computes)                                                                   \
    X(cpu_computes)                                                                      \
    X(tokens)              /* ends of evaluations of a graph: their final waits */       \
    X(tokens_resumed)      /* those that were not the end after all */                   \
    X(app_reads)           /* ggml_async_read */                                         \
    X(app_waits)           /* ggml_async_wait */                                         \
    X(dropped_reads)       /* queued, but the source or destination was freed first */

enum ga_counter {
#define X(name) GA_COUNTER_##name,
    GA_COUNTERS(X)
#undef X
    GA_COUNTER_declined,                                             // + enum ga_decline - 1
    GA_N_COUNTERS = GA_COUNTER_declined + GA_N_DECLINES - 1,
};

//
// The host's functions
//

#define GA_HOST_FUNCTIONS(X)                                                                                           \
    X(size_t,                     ggml_backend_dev_count,             (void))                                          \
    X(ggml_backend_dev_t,         ggml_backend_dev_get,               (size_t index))                                  \
    X(const char *,               ggml_backend_dev_name,              (ggml_backend_dev_t dev))                        \
    X(int,                        ggml_backend_dev_type,              (ggml_backend_dev_t dev))                        \
    X(ggml_backend_reg_t,         ggml_backend_dev_backend_reg,       (ggml_backend_dev_t dev))                        \
    X(ggml_backend_t,             ggml_backend_dev_init,              (ggml_backend_dev_t dev, const char * params))   \
    X(ggml_backend_buffer_type_t, ggml_backend_dev_buffer_type,       (ggml_backend_dev_t dev))                        \
    X(ggml_backend_buffer_type_t, ggml_backend_dev_host_buffer_type,  (ggml_backend_dev_t dev))                        \
    X(const char *,               ggml_backend_name,                  (ggml_backend_t backend))                        \
    X(void,                       ggml_backend_free,                  (ggml_backend_t backend))                        \
    X(void *,                     ggml_backend_guid,                  (ggml_backend_t backend))                        \
    X(ggml_backend_dev_t,         ggml_backend_get_device,            (ggml_backend_t backend))                        \
    X(ggml_backend_buffer_type_t, ggml_backend_get_default_buffer_type, (ggml_backend_t backend))                      \
    X(void,                       ggml_backend_synchronize,           (ggml_backend_t backend))                        \
    X(void,                       ggml_backend_tensor_get,            (const struct ggml_tensor * tensor, void * data, size_t offset, size_t size)) \
    X(int,                        ggml_backend_tensor_alloc,          (ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, void * addr)) \
    X(ggml_backend_buffer_t,      ggml_backend_buft_alloc_buffer,     (ggml_backend_buffer_type_t buft, size_t size))  \
    X(size_t,                     ggml_backend_buft_get_alignment,    (ggml_backend_buffer_type_t buft))               \
    X(ggml_backend_dev_t,         ggml_backend_buft_get_device,       (ggml_backend_buffer_type_t buft))               \
    X(ggml_backend_buffer_type_t, ggml_backend_buffer_get_type,       (ggml_backend_buffer_t buffer))                  \
    X(void *,                     ggml_backend_buffer_get_base,       (ggml_backend_buffer_t buffer))                  \
    X(int,                        ggml_backend_buffer_get_usage,      (ggml_backend_buffer_t buffer))                  \
    X(bool,                       ggml_backend_buffer_is_host,        (ggml_backend_buffer_t buffer))                  \
    X(void,                       ggml_backend_buffer_free,           (ggml_backend_buffer_t buffer))                  \
    X(size_t,                     ggml_nbytes,                        (const struct ggml_tensor * tensor))             \
    X(const char *,               ggml_get_name,                      (const struct ggml_tensor * tensor))             \
    X(struct ggml_context *,      ggml_init,                          (struct ga_init_params params))                  \
    X(void,                       ggml_free,                          (struct ggml_context * ctx))                     \
    X(size_t,                     ggml_tensor_overhead,               (void))                                          \
    X(struct ggml_tensor *,       ggml_new_tensor_2d,                 (struct ggml_context * ctx, int type, int64_t ne0, int64_t ne1)) \
    X(struct ggml_tensor *,       ggml_view_1d,                       (struct ggml_context * ctx, struct ggml_tensor * a, int64_t ne0, size_t offset))

// Absent in some builds; each use asks first.
#define GA_HOST_FUNCTIONS_OPTIONAL(X)                                                              \
    X(bool,         ggml_backend_is_meta, (ggml_backend_t backend))                                \
    X(const char *, ggml_version,         (void))                                                  \
    X(const char *, ggml_backend_dev_description, (ggml_backend_dev_t dev))                        \
    X(void,         ggml_log_internal,    (int level, const char * format, ...))

struct ga_api {
#define X(ret, name, args) ret (*name) args;
    GA_HOST_FUNCTIONS(X)
    GA_HOST_FUNCTIONS_OPTIONAL(X)
#undef X
};

//
// Objects
//

struct ga_host;
struct ga_backend;

struct ga_device {
    struct ga_host     * host;
    ggml_backend_dev_t   dev;
    int                  index;                     // in the host's registry
    int                  type;
    _Atomic(ga_init_backend_t) init_backend;        // the host's own
    int                  n_backends;                // under ga_lock
    _Atomic(bool)        pinned_known;
    _Atomic(ggml_backend_buffer_type_t) pinned;     // pinned memory of this very device, or NULL
};

struct ga_host {
    int                      id;
    char                   * library;
    const void             * base;                  // load address, by which a library is recognised
    const struct ga_layout * layout;
    int                      api_version;
    struct ga_api            api;
    _Atomic(int)             mode;
    _Atomic(uint32_t)        n_mode_changes;
    _Atomic(bool)            attached;
    struct ga_device         devices[GA_MAX_DEVICES];
    _Atomic(int)             n_devices;
    _Atomic(uint64_t)        counters[GA_N_COUNTERS];
    _Atomic(uint32_t)        declines_logged;       // bit per reason
    struct ggml_async_queue * queues;               // every queue of this host, under ga_lock
};

// One chunk of pinned memory; pools grow by chunks because a chunk in use cannot move.
struct ga_chunk {
    ggml_backend_buffer_t buffer;
    char                * base;
    size_t                size;
    size_t                used;
};

struct ga_pool {
    struct ga_device * device;
    struct ga_chunk  * chunks;
    int                n_chunks;
};

struct ga_source {
    _Atomic(ggml_backend_t) backend;    // NULL once it was freed: its copy-outs are dropped
    struct ga_backend     * state;
    int                     n_reads;
    int64_t                 wait_ns;    // filled by the drain
};

struct ga_copy_out {
    void       * data;
    const void * bounce;
    size_t       size;
    int          source;
    int          tag;                   // the caller's number of this read
    int64_t      copy_ns;
};

struct ggml_async_queue {
    struct ga_host          * host;
    struct ggml_async_queue * next;     // host's list
    struct ga_source          sources[GA_MAX_SOURCES];
    _Atomic(int)              n_sources;
    struct ga_copy_out      * copy_outs;
    int                       n_copy_outs;
    int                       cap_copy_outs;
    int                       n_reads;  // done at once, since the last drain
    struct ga_pool            pools[GA_MAX_SOURCES];
    _Atomic(int)              n_pools;
};

enum ga_phase {
    GA_PHASE_BARE,      // only `free` is ours
    GA_PHASE_IDLE,      // hooks are in, no stage open
    GA_PHASE_OPEN,      // a stage is open: only its own thread may change anything
    GA_PHASE_CHANGING,  // hooks are being put in or taken out: behave as bare
    GA_PHASE_DETACHED,  // the slots are the host's again, for good
};

// How far ggml's own copy of the current readback has come, as seen from outside.
enum ga_stock_step { GA_STOCK_NONE, GA_STOCK_ASKED, GA_STOCK_SYNCHRONIZED };

struct ga_stage {
    int                      mode;              // of this stage, whatever is set meanwhile
    uint32_t                 number;
    int64_t                  t_ns;
    uint32_t                 n_readbacks;
    uint32_t                 n_sync;
    uint64_t                 bytes;
    int64_t                  issue_ns;
    int64_t                  wait_ns;
    int64_t                  copy_ns;
    int64_t                  device_wait_ns;    // -1: not measured
    int                      device;            // of the first source
    uint32_t                 rows;              // least of the readbacks'; 0: unknown
    enum ga_stock_step       step;
    ggml_backend_t           step_source;
    int64_t                  step_ns;
    bool                     recording;
    bool                     abandoned;         // an exception left it: its reads are waited for, not counted
    _Atomic(const void *)    thread;            // the last one to queue: address of something thread-local
    struct ggml_async_record readbacks[GA_MAX_READBACKS];
    int8_t                   sources[GA_MAX_READBACKS];     // index into the queue's sources, -1: none
};

struct ga_backend {
    _Atomic(ggml_backend_t)  backend;           // key; NULL: this entry is free
    struct ga_backend      * next;              // bucket chain; entries are never unlinked
    struct ga_host         * host;
    struct ga_device       * device;
    bool                     is_destination;    // CPU or ACCEL
    bool                     followed;          // counted in its device, may own a queue; under ga_lock
    void                   * slots[GA_MAX_SLOTS];  // as the host made them
    _Atomic(int)             phase;
    _Atomic(int)             n_queued;          // queues that hold reads of this source
    _Atomic(bool)            computed;          // sources: has computed since it was last synchronized
    struct ga_stage        * stage;             // destinations only
    struct ggml_async_queue * queue;            // destinations only
};

// Ends a cleanup that an exception runs: gcc (12, -O2) takes plain stores for dead when nothing but the unwinder follows.
static inline void ga_keep_stores(void) {
    __asm__ volatile("" ::: "memory");
}

// util.c
int64_t ga_now_ns(void);
int     ga_fail(int status, const char * format, ...) __attribute__((format(printf, 2, 3)));
void    ga_log(struct ga_host * host, int level, const char * format, ...) __attribute__((format(printf, 3, 4)));
void    ga_lock(void);
void    ga_unlock(void);
void    ga_fork_guard(void);
void  * ga_calloc(size_t n, size_t size);

// find.c: a handle on an object that is loaded already, never a fresh load
void *           ga_open_loaded(const char * path);

// host.c
int              ga_host_attach_library(const char * library);
int              ga_host_attach_address(const void * address);
struct ga_host * ga_host_get(int id);
int              ga_host_count(void);
void             ga_host_scan_devices_locked(struct ga_host * host);
struct ga_device * ga_host_device(ggml_backend_dev_t dev);
ggml_backend_buffer_type_t ga_device_pinned(struct ga_device * device);
int              ga_default_mode(void);
void             ga_set_default_mode(int mode);

static inline void ga_count(struct ga_host * host, int counter, uint64_t n) {
    atomic_fetch_add_explicit(&host->counters[counter], n, memory_order_relaxed);
}

// backend.c
ggml_backend_t      ga_init_backend(ggml_backend_dev_t dev, const char * params);
struct ga_backend * ga_backend_find(ggml_backend_t backend);
struct ga_backend * ga_backend_adopt(struct ga_host * host, ggml_backend_t backend);
void                ga_backend_settle(struct ga_backend * state);
int                 ga_backends_settle_all_locked(struct ga_host * host);
int                 ga_backends_live_locked(struct ga_host * host);
void                ga_hook_free(ggml_backend_t backend);

// readback.c
bool ga_hook_cpy_to_cpu(ggml_backend_t backend_src, ggml_backend_t backend_dst, const struct ggml_tensor * src, struct ggml_tensor * dst);
int  ga_hook_cpu_compute(ggml_backend_t backend, struct ggml_cgraph * cgraph);
int  ga_hook_cpu_plan_compute(ggml_backend_t backend, void * plan);
void ga_stage_forget(struct ga_backend * state);

// source.c
bool ga_hook_cpy_to_device(ggml_backend_t backend_src, ggml_backend_t backend_dst, const struct ggml_tensor * src, struct ggml_tensor * dst);
void ga_hook_set_tensor_async(ggml_backend_t backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);
void ga_hook_synchronize(ggml_backend_t backend);
int  ga_hook_device_compute(ggml_backend_t backend, struct ggml_cgraph * cgraph);
void ga_upload_close(void);
void ga_record_describe(struct ggml_async_record * record, struct ga_host * host, const struct ggml_tensor * tensor);

// readback.c, for source.c: a source was synchronized by ggml while this thread's stage is open
void ga_stage_synchronized(ggml_backend_t backend, int64_t t0, int64_t t1);
// or its synchronize threw
void ga_stage_abandon(void);
// whether this thread is between the first input of a CPU split and its compute
bool ga_stage_is_open(void);

// token.c: what the calling thread does from now on, for the Vulkan layer (the values are its own)
enum ga_cause { GA_CAUSE_ELSEWHERE, GA_CAUSE_READBACK, GA_CAUSE_TOKEN, GA_CAUSE_UPLOAD, GA_CAUSE_LOAD, GA_CAUSE_COMPUTE };

void          ga_cause_find_layer(void);
void          ga_cause(enum ga_cause cause, uint32_t stage);
uint64_t      ga_thread_id(void);
uint32_t      ga_rows(const struct ggml_tensor * tensor);
void          ga_token_touch(struct ga_host * host, int64_t now);
void          ga_token_rows(uint32_t rows);
void          ga_token_resume(struct ga_host * host);
void          ga_token_stage(const struct ga_stage * stage);
enum ga_cause ga_token_sync_cause(bool computed);
void          ga_token_end(struct ga_backend * state, int64_t t0, int64_t t1);
void          ga_compute_emit(struct ga_backend * state, int64_t t0, int layer);

// control.c
void ga_control_start_locked(void);
void ga_control_update_locked(void);

// queue.c
struct ggml_async_queue * ga_queue_new(struct ga_host * host);
void                      ga_queue_free(struct ggml_async_queue * queue);
int                       ga_queue_push(struct ggml_async_queue * queue, struct ga_backend * source, const struct ggml_tensor * tensor,
                                        void * data, size_t offset, size_t size, bool direct, int tag, enum ga_decline * why, int * source_index);
int                       ga_queue_drain(struct ggml_async_queue * queue, uint32_t * n_sync, struct ga_source * sources,
                                         void (*copied)(void * user_data, int tag, int64_t copy_ns), void * user_data);
void                      ga_queues_drop_source(struct ga_host * host, ggml_backend_t backend);
void                      ga_queues_free_pools_locked(struct ga_device * device);
enum ga_decline           ga_source_check(struct ga_backend * source, const struct ggml_tensor * tensor);

// record.c
bool ga_record_on(void);
void ga_record_put(const struct ggml_async_record * record);
void ga_record_capture(void);                       // begins the capture that the environment asks for, if any
void ga_record_announce(struct ga_host * host);     // tells it of a host, its devices and its mode
