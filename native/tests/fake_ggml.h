// A synthetic ggml for tests: the public functions that ggml-async resolves, over devices that only pretend.
//
// fake_ggml.c is built several times, once per layout (see CMakeLists.txt). A test opens one with dlopen and drives it
// through the control block: settings, observations, and functions that do what a program or ggml's scheduler would.
// Device memory is not addressable (tensor data starts at a made-up address), reads and uploads happen only when the
// device is synchronized (or on a worker thread, late), and freeing a backend loses whatever it had queued.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_backend;
struct ggml_backend_buffer;
struct ggml_backend_buffer_type;
struct ggml_tensor;

enum fake_device { FAKE_GPU0, FAKE_GPU1, FAKE_GPU2, FAKE_ACCEL, FAKE_META, FAKE_CPU, FAKE_LATE, FAKE_N_DEVICES };

// What a device's host buffer type is.
enum fake_pinned {
    FAKE_PINNED_OWN,
    FAKE_PINNED_FIRST,      // device 0's, as Vulkan has it
    FAKE_PINNED_NONE,
    FAKE_PINNED_FALLS_BACK, // its own, but allocations come back as plain memory
    FAKE_PINNED_FAILS,      // its own, but allocations fail
};

enum { FAKE_USAGE_ANY, FAKE_USAGE_WEIGHTS, FAKE_USAGE_COMPUTE };
enum { FAKE_MAX_GRAPH = 40 };

struct ggml_cgraph {
    int                        n_reads;                 // CPU: `seen` receives what each tensor holds at that time
    const struct ggml_tensor * reads[FAKE_MAX_GRAPH];
    void                     * seen[FAKE_MAX_GRAPH];
    int                        n_writes;                // devices: each tensor is filled with a byte, in queue order
    struct ggml_tensor       * writes[FAKE_MAX_GRAPH];
    uint8_t                    values[FAKE_MAX_GRAPH];
};

struct fake {
    // settings
    int  pinned[FAKE_N_DEVICES];
    bool late;              // FAKE_LATE is in the registry
    bool threaded;          // backends created from now on run their queue on a worker
    int  delay_us;          // before each operation (threaded), else once in a synchronize that has work
    bool no_get_async;      // backends created from now on have no get_tensor_async
    bool queue_uploads;     // cpy_tensor_async of devices queues (true) or declines (false)
    void (*before_get)(struct ggml_backend * backend);
    void (*before_synchronize)(struct ggml_backend * backend);

    // observations, changed with atomics
    int n_buffers;                          // alive
    int n_pinned_buffers[FAKE_N_DEVICES];   // alive
    int n_pinned_allocs;                    // ever
    int n_backends;                         // alive
    int n_synchronizes[FAKE_N_DEVICES];
    int n_gets[FAKE_N_DEVICES];
    int n_gets_unpinned;    // into memory that the device has not pinned
    int n_gets_lost;        // queued when their backend was freed
    int n_computes;         // CPU and ACCEL
    int n_sync_copies;      // ggml_backend_tensor_copy
    int n_logged;           // lines through the host's log
    char log[8192];

    // what a program does
    void *                            (*load_plugin)(const char * path);   // as ggml's loader: the registry, or NULL
    struct ggml_backend *             (*backend_new)(int device);
    void                              (*backend_free)(struct ggml_backend * backend);
    struct ggml_backend_buffer_type * (*buft)(int device);
    struct ggml_backend_buffer_type * (*pinned_buft)(int device);
    struct ggml_backend_buffer *      (*buffer_new)(struct ggml_backend_buffer_type * buft, size_t size, int usage);
    void                              (*buffer_free)(struct ggml_backend_buffer * buffer);
    struct ggml_tensor *              (*tensor_new)(struct ggml_backend_buffer * buffer, const char * name, size_t offset, int64_t ne0, int64_t ne1);
    struct ggml_tensor *              (*tensor_view)(struct ggml_tensor * tensor, const char * name, int64_t ne0, int64_t ne1, size_t nb1, size_t offset);
    void                              (*tensor_stride)(struct ggml_tensor * tensor, size_t nb1);
    void                              (*tensor_free)(struct ggml_tensor * tensor);
    void *                            (*tensor_data)(struct ggml_tensor * tensor);     // host memory; a device's storage
    size_t                            (*tensor_nbytes)(const struct ggml_tensor * tensor);
    void                              (*set_async)(struct ggml_backend * backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);
    void                              (*synchronize)(struct ggml_backend * backend);

    // what the scheduler does
    void (*input)(struct ggml_backend * src_backend, struct ggml_backend * dst_backend, const struct ggml_tensor * src, struct ggml_tensor * dst);
    bool (*ask)(struct ggml_backend * src_backend, struct ggml_backend * dst_backend, const struct ggml_tensor * src, struct ggml_tensor * dst);    // cpy_tensor_async alone
    int  (*compute)(struct ggml_backend * backend, struct ggml_cgraph * graph);
    int  (*plan_compute)(struct ggml_backend * backend, struct ggml_cgraph * graph);

    // what no program does
    uint32_t (*backend_diff)(struct ggml_backend * backend);    // bit i: slot i is not as the host made it
    uint32_t (*device_diff)(int device);                        // bit i: word i is not as the host made it
    bool     (*slot_is_null)(struct ggml_backend * backend, const char * slot);     // "synchronize", "cpy_tensor_async"
};

struct fake * fake_control(void);

#ifdef __cplusplus
}
#endif
