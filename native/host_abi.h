// ggml's structures as far as we read them: one layout per backend API version.
//
// Nothing here is trusted on sight: host.c proves each line on the running host (an accessor function's answer, or the
// NULL pattern of the CPU backend's interface) before the first pointer is changed, and refuses a host it cannot prove.
// Buffers, buffer types and buffer usage are only ever reached through the host's own functions: their structures did
// change between API versions 2 and 3.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ggml_backend             * ggml_backend_t;
typedef struct ggml_backend_device      * ggml_backend_dev_t;
typedef struct ggml_backend_reg         * ggml_backend_reg_t;
typedef struct ggml_backend_buffer      * ggml_backend_buffer_t;
typedef struct ggml_backend_buffer_type * ggml_backend_buffer_type_t;
struct ggml_tensor;
struct ggml_context;
struct ggml_cgraph;

// Enumerators that the host's functions hand out, by their ggml values.
enum {
    GA_DEVICE_TYPE_CPU   = 0,
    GA_DEVICE_TYPE_GPU   = 1,
    GA_DEVICE_TYPE_IGPU  = 2,
    GA_DEVICE_TYPE_ACCEL = 3,
    GA_DEVICE_TYPE_META  = 4,

    GA_BUFFER_USAGE_COMPUTE = 2,

    GA_LOG_LEVEL_INFO  = 2,
    GA_LOG_LEVEL_WARN  = 3,
    GA_LOG_LEVEL_ERROR = 4,
};

// Argument of ggml_init, by value.
struct ga_init_params {
    size_t mem_size;
    void * mem_buffer;
    bool   no_alloc;
};

// A backend object is: guid, the interface's slots, the device, the context; one word each.
struct ga_layout {
    const char * name;
    int          api_version;
    int          n_slots;       // words of the interface; the device pointer is the word behind them
    uint32_t     cpu_slots;     // bit i: slot i of the CPU backend's interface is not NULL
    uint32_t     accel_null;    // slots that an ACCEL backend must have empty for us to enter (cpy, synchronize)
    // slot numbers
    int8_t get_name;
    int8_t free;
    int8_t set_tensor_async;
    int8_t get_tensor_async;
    int8_t cpy_tensor_async;
    int8_t synchronize;
    int8_t graph_plan_compute;
    int8_t graph_compute;
};

#define GA_BIT(slot) (1u << (slot))

// The layout with the 2d copies in front of cpy_tensor_async. API 3 changed only the buffer-type interface. An older
// layout without the 2d copies exists under API 2 as well; no build that we could test has it, so it is not listed,
// and its shorter interface makes the probe refuse it.
#define GA_LAYOUT_2D(api) {                                                                              \
    /* .name               = */ "api" #api "-2d",                                                        \
    /* .api_version        = */ api,                                                                     \
    /* .n_slots            = */ 16,                                                                      \
    /* .cpu_slots          = */ GA_BIT(0) | GA_BIT(1) | GA_BIT(8) | GA_BIT(9) | GA_BIT(11) | GA_BIT(12), \
    /* .accel_null         = */ GA_BIT(6) | GA_BIT(7),                                                   \
    /* .get_name           = */ 0,                                                                       \
    /* .free               = */ 1,                                                                       \
    /* .set_tensor_async   = */ 2,                                                                       \
    /* .get_tensor_async   = */ 3,                                                                       \
    /* .cpy_tensor_async   = */ 6,                                                                       \
    /* .synchronize        = */ 7,                                                                       \
    /* .graph_plan_compute = */ 11,                                                                      \
    /* .graph_compute      = */ 12,                                                                      \
}

static const struct ga_layout ga_layouts[] = {
    GA_LAYOUT_2D(2),
    GA_LAYOUT_2D(3),
};

enum { GA_N_LAYOUTS = sizeof(ga_layouts) / sizeof(ga_layouts[0]), GA_MAX_SLOTS = 16 };

// A device object starts with its interface. Only init_backend is ever replaced.
enum {
    GA_DEVICE_SLOT_GET_NAME     = 0,
    GA_DEVICE_SLOT_GET_TYPE     = 3,
    GA_DEVICE_SLOT_INIT_BACKEND = 5,
    GA_DEVICE_WORD_REG          = 15,
};

// The part of struct ggml_tensor that has no accessor function. The name is last among what we read, so the builds
// with longer names (GGML_MAX_NAME) agree on all of it.
struct ga_tensor {
    int32_t               type;
    ggml_backend_buffer_t buffer;
    int64_t               ne[4];
    size_t                nb[4];
    int32_t               op;
    int32_t               op_params[16];
    int32_t               flags;
    struct ggml_tensor  * src[10];
    struct ggml_tensor  * view_src;
    size_t                view_offs;
    void                * data;
    char                  name[];
};

static inline const struct ga_tensor * ga_tensor(const struct ggml_tensor * tensor) {
    return (const struct ga_tensor *) tensor;
}

// The buffer that holds a tensor's data; of a view, its source's.
static inline ggml_backend_buffer_t ga_tensor_buffer(const struct ggml_tensor * tensor) {
    const struct ggml_tensor * owner = ga_tensor(tensor)->view_src ? ga_tensor(tensor)->view_src : tensor;
    return ga_tensor(owner)->buffer;
}

static inline void ** ga_words(void * object) {
    return (void **) object;
}

// Slots of a backend's own copy of its interface. Stores are ordered: a thread that meets a new cpy_tensor_async also
// meets the graph_compute that was stored before it.
static inline void * ga_slot_load(ggml_backend_t backend, int slot) {
    return __atomic_load_n(&ga_words(backend)[1 + slot], __ATOMIC_ACQUIRE);
}

static inline void ga_slot_store(ggml_backend_t backend, int slot, void * function) {
    __atomic_store_n(&ga_words(backend)[1 + slot], function, __ATOMIC_SEQ_CST);
}

// Signatures of the slots we call or stand in for.
typedef void (*ga_free_t)(ggml_backend_t backend);
typedef void (*ga_set_async_t)(ggml_backend_t backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);
typedef void (*ga_get_async_t)(ggml_backend_t backend, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);
typedef bool (*ga_cpy_async_t)(ggml_backend_t backend_src, ggml_backend_t backend_dst, const struct ggml_tensor * src, struct ggml_tensor * dst);
typedef void (*ga_synchronize_t)(ggml_backend_t backend);
typedef int  (*ga_plan_compute_t)(ggml_backend_t backend, void * plan);
typedef int  (*ga_compute_t)(ggml_backend_t backend, struct ggml_cgraph * cgraph);
typedef ggml_backend_t (*ga_init_backend_t)(ggml_backend_dev_t dev, const char * params);
