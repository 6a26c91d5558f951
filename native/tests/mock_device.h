// libggml-mock.so: a ggml device that is slow on purpose. What a test may set, and what it can read.
//
// It loads into any ggml of API 2 or 3 (with the 2d copies), through GGML_BACKEND_PATH, ggml_backend_load or
// mock_register. Each backend has a thread that runs its queue strictly in order: graphs (through a private CPU backend of
// the host), copies, events. Its memory says that it is not host memory. What a read has not yet written holds poison.
//
// The control block comes from ggml_backend_reg_get_proc_address(reg, "mock_control"), which returns it.
// In the environment: MOCK_DEVICES=1..4, and MOCK_OPTIONS="lazy=1,delay_get_us=50,1:no_events=1" ("1:" is device 1 alone).
#pragma once

#include <stdatomic.h>
#include <stdint.h>

enum { MOCK_CONTROL_VERSION = 1, MOCK_MAX_DEVICES = 4 };

// Bytes that a read's destination holds until the read has run: a NaN as float, -1 as index. Freed memory holds another.
enum { MOCK_POISON = 0xFF, MOCK_FREED = 0xFE };

// Options, per device. The no_ and pinned_ ones count when a backend or a buffer is created.
#define MOCK_OPTIONS(X)                                                                                  \
    X(lazy)               /* run nothing until somebody waits for it: every race is lost, every time */  \
    X(delay_graph_us)     /* before each operation of its kind */                                        \
    X(delay_get_us)                                                                                      \
    X(delay_set_us)                                                                                      \
    X(delay_copy_us)                                                                                     \
    X(delay_event_us)                                                                                    \
    X(jitter_us)          /* and up to this much more, by a generator that starts from the seed */       \
    X(seed)                                                                                              \
    X(no_get_async)                                                                                      \
    X(no_set_async)                                                                                      \
    X(no_2d_async)                                                                                       \
    X(no_cpy_host)        /* cpy_tensor_async from memory that this device has pinned */                 \
    X(no_cpy_peer)        /* cpy_tensor_async from another mock device */                                \
    X(no_events)                                                                                         \
    X(no_pinned)          /* no host buffer type */                                                      \
    X(pinned_of_first)    /* its host buffer type is device 0's, as with Vulkan */                       \
    X(pinned_falls_back)  /* pinned memory has run out: plain CPU buffers come instead */                \
    X(fail_get)           /* n: the n-th read from now fails, and the device is lost */                  \
    X(lose_at_node)       /* n: the device is lost before the n-th graph node from now */                \
    X(stall)              /* the queue stands still until this is 0 again */                             \
    X(error_aborts)       /* waiting for a lost device aborts the process, as with CUDA */

#define MOCK_COUNTERS(X)                                                                     \
    X(graphs)                                                                                \
    X(nodes)                                                                                 \
    X(gets)                                                                                  \
    X(sets)                                                                                  \
    X(copies)             /* between mock devices, and from pinned memory */                 \
    X(event_records)                                                                         \
    X(event_waits)                                                                           \
    X(synchronizes)                                                                          \
    X(backends)           /* created */                                                      \
    X(poison_skipped)     /* reads into memory that an upload queued before still reads */   \
    X(errors)             /* operations that failed or were lost */                          \
    X(touched_freed)      /* wrong use: an operation met memory that was freed before */     \
    X(freed_with_reads)   /* wrong use: reads were still queued when the backend was freed */

struct mock_options {
#define X(name) _Atomic(uint32_t) name;
    MOCK_OPTIONS(X)
#undef X
};

struct mock_counters {
#define X(name) _Atomic(uint64_t) name;
    MOCK_COUNTERS(X)
#undef X
};

struct mock_control {
    uint32_t             version;
    uint32_t             n_devices;
    struct mock_options  options[MOCK_MAX_DEVICES];
    struct mock_counters counters[MOCK_MAX_DEVICES];
    // Called instead of aborting by whoever waits for a lost device, on its thread; it may throw a C++ exception.
    void (*_Atomic       on_error)(int device, const char * what);
};

// Resolves the host's functions from this dlopen handle and returns the registry entry for ggml_backend_register; NULL with
// a line on stderr if it is no ggml that we know. For hosts that never load backends.
void * mock_register(void * host_handle);

typedef struct mock_control * (*mock_control_t)(void);
