// Objects of the synthetic host, shared by fake_ggml.c (registry, buffers, tensors) and fake_device.c (backends).
// Each layout that ggml-async has to refuse is one definition away; CMakeLists.txt lists them.
#pragma once

#define _GNU_SOURCE
#include "fake_ggml.h"

#include <pthread.h>

#ifndef FAKE_API
#    define FAKE_API 2
#endif
#ifndef FAKE_MAX_NAME
#    define FAKE_MAX_NAME 64
#endif

#define FAKE_ADD(counter, n) __atomic_fetch_add(&(counter), (n), __ATOMIC_SEQ_CST)

struct fake_iface {
    const char * (*get_name)(struct ggml_backend * backend);
    void   (*free)(struct ggml_backend * backend);
    void   (*set_tensor_async)(struct ggml_backend * backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);
    void   (*get_tensor_async)(struct ggml_backend * backend, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);
#ifndef FAKE_OLD_LAYOUT
    void * set_tensor_2d_async;
    void * get_tensor_2d_async;
#endif
    bool   (*cpy_tensor_async)(struct ggml_backend * src_backend, struct ggml_backend * dst_backend, const struct ggml_tensor * src, struct ggml_tensor * dst);
    void   (*synchronize)(struct ggml_backend * backend);
    void * (*graph_plan_create)(struct ggml_backend * backend, const struct ggml_cgraph * graph);
    void   (*graph_plan_free)(struct ggml_backend * backend, void * plan);
    void * graph_plan_update;
    int    (*graph_plan_compute)(struct ggml_backend * backend, void * plan);
    int    (*graph_compute)(struct ggml_backend * backend, struct ggml_cgraph * graph);
    void * event_record;
    void * event_wait;
    void * graph_optimize;
#ifdef FAKE_EXTRA_SLOT
    void * extra;
#endif
};

enum { FAKE_N_SLOTS = sizeof(struct fake_iface) / sizeof(void *) };

struct fake_dev {
#ifdef FAKE_SHIFT_DEVICE
    const char * shift;
#endif
    const char *          (*get_name)(struct fake_dev * dev);
    const char *          (*get_description)(struct fake_dev * dev);
    void                  (*get_memory)(struct fake_dev * dev, size_t * free, size_t * total);
    int                   (*get_type)(struct fake_dev * dev);
    void                  * get_props;
    struct ggml_backend * (*init_backend)(struct fake_dev * dev, const char * params);
    void                  * others[9];
    struct fake_reg       * reg;
    void                  * context;
};

struct fake_reg {
    int    api_version;
    void * functions[4];
    void * context;
};

struct ggml_backend_buffer_type {
    int  device;
    bool host;
    bool pinned;
};

struct ggml_backend_buffer {
    struct ggml_backend_buffer_type * type;
    char                            * memory;
    char                            * base;     // what tensors' data is relative to
    size_t                            size;
    int                               usage;
    struct ggml_backend_buffer      * next;
};

struct ggml_tensor {
    int32_t                      type;
    struct ggml_backend_buffer * buffer;
    int64_t                      ne[4];
    size_t                       nb[4];
    int32_t                      op;
    int32_t                      op_params[16];
    int32_t                      flags;
    struct ggml_tensor         * src[10];
#ifdef FAKE_SHIFT_TENSOR
    struct ggml_tensor         * grad;
#endif
    struct ggml_tensor         * view_src;
    size_t                       view_offs;
    void                       * data;
    char                         name[FAKE_MAX_NAME];
    void                       * extra;
};

enum fake_op_kind { FAKE_OP_GET, FAKE_OP_SET, FAKE_OP_FILL };

struct fake_op {
    enum fake_op_kind kind;
    char            * device_memory;
    void            * host_memory;
    size_t            size;
    uint8_t           value;
};

struct fake_queue {
    struct fake_op * ops;
    int              n_ops;
    int              cap_ops;
    bool             threaded;
    bool             busy;
    bool             stop;
    pthread_t        worker;
    pthread_mutex_t  mutex;
    pthread_cond_t   changed;
};

struct ggml_backend {
    void             * guid;
    struct fake_iface  iface;
    struct fake_dev  * device;
    struct fake_queue * context;
    struct fake_iface  pristine;    // behind everything that a real one has
};

extern struct fake     fake_host;
extern struct fake_dev fake_devs[FAKE_N_DEVICES];

int    fake_index(const struct fake_dev * dev);
char * fake_storage(const struct ggml_tensor * tensor);
bool   fake_is_pinned(int device, const void * data, size_t size);
void   fake_copy(const struct ggml_tensor * src, struct ggml_tensor * dst);
struct ggml_backend * fake_backend_init(struct fake_dev * dev, const char * params);
void   fake_backend_functions(struct fake * host);
