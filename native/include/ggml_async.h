// ggml-async: asynchronous readbacks for an unmodified llama.cpp.
//
// This is the whole public C API, and the only thing the Python package binds: it reads the part between the
// two cffi marks as it stands, so that part holds plain declarations and no preprocessor lines.
//
// Conventions
//   - Functions that can fail return a negative enum ggml_async_status; ggml_async_last_error() then has one line of
//     text for the calling thread, with what to do next where something can be done.
//   - Times are nanoseconds of CLOCK_MONOTONIC, sizes are bytes.
//   - A host is one loaded ggml library. Several may live in one process; each has its own mode and counters.
//   - ggml's own objects (backends, tensors) are passed as void *, so that no ggml header is needed.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#    define GGML_ASYNC_API __attribute__((visibility("default")))
#else
#    define GGML_ASYNC_API
#endif

// Changes whenever a declaration below changes its meaning; the Python package compares it at load.
#define GGML_ASYNC_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin

enum ggml_async_status {
    GGML_ASYNC_OK              =  0,
    GGML_ASYNC_ERR_ARGUMENT    = -1,  // a NULL, an unknown host, mode or counter
    GGML_ASYNC_ERR_NOT_GGML    = -2,  // the library is not loaded, or lacks functions that we need
    GGML_ASYNC_ERR_LAYOUT      = -3,  // a ggml whose structures we do not know: refused, nothing was touched
    GGML_ASYNC_ERR_OCCUPIED    = -4,  // another copy of ggml-async is attached to this host
    GGML_ASYNC_ERR_NO_MEMORY   = -5,  // an allocation of ours failed
    GGML_ASYNC_ERR_LIMIT       = -6,  // too many hosts or devices
    GGML_ASYNC_ERR_BUSY        = -7,  // a stage is open on another thread; it takes effect when that closes
    GGML_ASYNC_ERR_TOO_EARLY   = -8,  // the host has not loaded its CPU backend yet: try again when it has
};

enum ggml_async_mode {
    GGML_ASYNC_MODE_OFF   = 0,  // attached, nothing on any hot path
    GGML_ASYNC_MODE_STOCK = 1,  // llama.cpp's own path, timed from outside
    GGML_ASYNC_MODE_ASYNC = 2,  // readbacks queued, one wait per CPU split
};

enum ggml_async_record_kind {
    GGML_ASYNC_RECORD_READBACK = 1,  // one tensor, device -> CPU split
    GGML_ASYNC_RECORD_STAGE    = 2,  // one CPU split with readbacks: first input copy -> start of its compute
    GGML_ASYNC_RECORD_UPLOAD   = 3,  // one tensor, CPU -> device split
    GGML_ASYNC_RECORD_COMPUTE  = 4,  // one graph_compute call of a split; in the capture file only
    GGML_ASYNC_RECORD_TOKEN    = 5,  // one evaluation of a graph, up to its final wait; in the capture file only
};

enum ggml_async_path {
    GGML_ASYNC_PATH_STOCK  = 0,  // ggml's own synchronous copy
    GGML_ASYNC_PATH_DIRECT = 1,  // queued straight into the destination, which the device has pinned
    GGML_ASYNC_PATH_BOUNCE = 2,  // queued into pinned memory of ours, copied out after the wait
    GGML_ASYNC_PATH_EMPTY  = 3,  // zero bytes: nothing queued, the source is still synchronized
};

// One event. 176 bytes, no pointers. A time that was not measured is -1.
struct ggml_async_record {
    int32_t  kind;          // enum ggml_async_record_kind
    int32_t  mode;          // enum ggml_async_mode in which it happened
    int32_t  path;          // enum ggml_async_path (readbacks)
    int32_t  host;          // host id
    int32_t  device;        // index of the device in the host's registry; of the source for readbacks and stages
    int32_t  layer;         // number behind the last '-' of the tensor's name; -1 without one
    uint32_t stage;         // running number of the stage within its backend; readbacks carry their stage's
    uint32_t n_readbacks;   // stages: tensors copied
    uint32_t n_sync;        // stages: synchronizes of source devices
    uint32_t decline;       // readbacks in async mode that took ggml's path: index of the reason, else 0
    uint64_t thread;        // kernel thread id
    uint64_t bytes;         // ggml_nbytes; stages: the sum
    int64_t  t_ns;          // start
    int64_t  duration_ns;   // readback: issue + wait (async), synchronize + copy (stock); stage: whole; upload: host time
    int64_t  issue_ns;      // async readbacks: host time to queue it; stages: the sum
    int64_t  wait_ns;       // stock readbacks: its synchronize; async: the one wait of its source; stages: the sum
    int64_t  copy_ns;       // stock readbacks: the synchronous copy; bounced: the copy-out
    int64_t  device_wait_ns;// stock stages: the first synchronize
    uint32_t rows;          // tokens in the batch as far as the shape tells (readbacks; stages: the least of theirs); 0 unknown
    uint32_t reserved;
    char     name[64];      // source tensor's name, cut to 63 bytes
};

// Who a host is. Strings live as long as the library.
struct ggml_async_host_info {
    int32_t      id;
    int32_t      api_version;    // GGML_BACKEND_API_VERSION of the host
    int32_t      mode;           // enum ggml_async_mode
    int32_t      attached;       // 0 after ggml_async_detach
    int32_t      n_devices;      // devices whose init_backend is wrapped
    int32_t      n_backends;     // live backends created through them
    const char * library;        // path of the library that holds the registry
    const char * version;        // ggml_version(), or "" where the host has none
    const char * layout;         // name of the proved layout
};

// Version of this ABI (GGML_ASYNC_ABI_VERSION) and of the library ("0.1.0").
GGML_ASYNC_API int          ggml_async_abi_version(void);
GGML_ASYNC_API const char * ggml_async_version(void);

// The calling thread's last error, one or two lines; "" if none. Valid until the thread's next call.
GGML_ASYNC_API const char * ggml_async_last_error(void);

// Receives our log lines (level as ggml's: 2 info, 3 warn, 4 error; the text ends in a newline). NULL restores the default:
// the host's own log where it has one, else stderr. May be called from any thread.
GGML_ASYNC_API void ggml_async_log_set(void (*callback)(int level, const char * text, void * user_data), void * user_data);

// Writes the paths of loaded libraries that hold a ggml registry into `buffer`, one a line, NUL-terminated.
// Returns the number found, whatever fits.
GGML_ASYNC_API int ggml_async_find(char * buffer, size_t size);

// Attaches to the ggml that the loaded library at `library` belongs to (NULL: the only one in the process).
// Every CPU or ACCEL backend created afterwards reads back asynchronously. Calling it again returns the same host.
// Returns the host's id (>= 0) or a negative status; on failure the host is as it was.
GGML_ASYNC_API int ggml_async_attach(const char * library);

// Restores every pointer in the host's devices and live backends, and returns GGML_ASYNC_OK; GGML_ASYNC_ERR_BUSY when
// a backend has a stage open on another thread, which restores its own pointers as that stage closes.
GGML_ASYNC_API int ggml_async_detach(int host);

// Number of hosts ever attached, and who they are. `size` is sizeof(struct ggml_async_host_info) at the caller.
GGML_ASYNC_API int ggml_async_host_count(void);
GGML_ASYNC_API int ggml_async_host_get(int host, struct ggml_async_host_info * info, size_t size);

// Mode of a host (host -1: all, and those attached later). Takes effect per backend, when its stage closes. Thread-safe.
GGML_ASYNC_API int ggml_async_set_mode(int host, int mode);
GGML_ASYNC_API int ggml_async_get_mode(int host);
GGML_ASYNC_API const char * ggml_async_mode_name(int mode);   // "off", "stock", "async"; NULL if unknown
GGML_ASYNC_API int          ggml_async_mode_parse(const char * name);

// Counters of a host, in the order of ggml_async_counter_name: 0 .. n-1, NULL beyond. Monotonic, relaxed.
// ggml_async_counters writes at most `n` values and returns how many there are.
GGML_ASYNC_API const char * ggml_async_counter_name(int index);
GGML_ASYNC_API int          ggml_async_counters(int host, uint64_t * values, int n);
GGML_ASYNC_API int          ggml_async_counters_reset(int host);

// Reasons for declining a readback: 1 .. n, NULL beyond. The counters hold one "declined_<name>" for each.
GGML_ASYNC_API const char * ggml_async_decline_name(int reason);

// Record kinds and paths by name ("readback", "direct", ...); NULL if unknown.
GGML_ASYNC_API const char * ggml_async_record_kind_name(int kind);
GGML_ASYNC_API const char * ggml_async_path_name(int path);

// Event records. start: keep up to `capacity` unread ones (rounded up to a power of two); a full ring drops and counts.
// read: moves up to `n` into `out` and returns how many; one reader at a time. stop: no more records, unread ones stay.
GGML_ASYNC_API int      ggml_async_record_start(size_t capacity);
GGML_ASYNC_API int      ggml_async_record_stop(void);
GGML_ASYNC_API int      ggml_async_record_read(struct ggml_async_record * out, int n);
GGML_ASYNC_API uint64_t ggml_async_record_dropped(void);

// The queue for applications: reads of any tensors of any backends of one host, then one wait for all of them.
// ggml has no public function for this. A queue is used by one thread at a time.
struct ggml_async_queue;

// NULL on failure (unknown host, no memory).
GGML_ASYNC_API struct ggml_async_queue * ggml_async_queue_new(int host);
// Waits for what is queued, then frees.
GGML_ASYNC_API void ggml_async_queue_free(struct ggml_async_queue * queue);

// Queues a read of `size` bytes at `offset` of `tensor` (struct ggml_tensor *), which lives in memory of `backend`
// (ggml_backend_t), into host memory `data`. The read happens after everything queued on the backend before it. `data` is complete,
// and may be used or freed, only after ggml_async_wait; the tensor's buffer must live until then, too. Where the backend cannot read asynchronously the read is
// done before this returns. Returns the enum ggml_async_path taken, or a negative status.
GGML_ASYNC_API int ggml_async_read(struct ggml_async_queue * queue, void * backend, const void * tensor,
                                   void * data, size_t offset, size_t size);

// Synchronizes each source once and completes every queued read. Returns the number of reads completed since the last
// wait, or GGML_ASYNC_ERR_ARGUMENT. Reads whose backend was freed meanwhile are dropped and not counted. A C++ exception
// that a backend throws through ggml_async_read drops the batch: queue it again.
GGML_ASYNC_API int ggml_async_wait(struct ggml_async_queue * queue);

// cffi: end

#ifdef __cplusplus
}
#endif
