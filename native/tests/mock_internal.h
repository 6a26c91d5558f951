// Parts of libggml-mock.so. ggml's structures are declared here from reading, for backend API 2 and 3; mock_device.c proves
// them on the host that loads it.
#pragma once

#include "../host_abi.h"
#include "mock_device.h"

#include <pthread.h>

#define MOCK_EXPORT __attribute__((visibility("default")))

enum { MOCK_STATUS_FAILED = -1, MOCK_STATUS_SUCCESS = 0 };

// ggml's interfaces, a word per member. Only the buffer type's differs: API 3 has two members more in its middle.
struct mock_buffer_type {
    void * words[10];       // 6 or 8 members, then the device and the context
};

enum { MOCK_BUFFER_SLOTS = 11, MOCK_BACKEND_SLOTS = 16, MOCK_DEVICE_SLOTS = 15, MOCK_REG_SLOTS = 4 };

struct mock_buffer_iface {
    void * slots[MOCK_BUFFER_SLOTS];
};

struct mock_backend {
    const uint8_t      * guid;
    void               * slots[MOCK_BACKEND_SLOTS];
    struct mock_device * device;
    struct mock_queue  * queue;         // the context
};

struct mock_event {
    struct mock_device * device;
    struct mock_queue  * queue;         // the context; NULL before it was recorded
    uint64_t             position;
};

struct mock_reg {
    int32_t api_version;
    void *  slots[MOCK_REG_SLOTS];
    void *  context;
};

struct mock_device {
    void            * slots[MOCK_DEVICE_SLOTS];
    struct mock_reg * reg;
    void            * context;
    // ours
    int                     index;
    char                    name[16];
    char                    host_name[24];
    struct mock_buffer_type memory;
    struct mock_buffer_type pinned;
};

#define MOCK_HOST_FUNCTIONS(X)                                                                                                    \
    X(size_t,                     ggml_backend_dev_count,            (void))                                                     \
    X(ggml_backend_dev_t,         ggml_backend_dev_get,              (size_t index))                                             \
    X(int,                        ggml_backend_dev_type,             (ggml_backend_dev_t dev))                                   \
    X(ggml_backend_reg_t,         ggml_backend_dev_backend_reg,      (ggml_backend_dev_t dev))                                   \
    X(ggml_backend_buffer_type_t, ggml_backend_dev_buffer_type,      (ggml_backend_dev_t dev))                                   \
    X(void *,                     ggml_backend_reg_get_proc_address, (ggml_backend_reg_t reg, const char * name))                \
    X(ggml_backend_buffer_t,      ggml_backend_buft_alloc_buffer,    (ggml_backend_buffer_type_t buft, size_t size))             \
    X(ggml_backend_buffer_t,      ggml_backend_buffer_init,          (void * buft, struct mock_buffer_iface iface, void * context, size_t size)) \
    X(ggml_backend_buffer_type_t, ggml_backend_buffer_get_type,      (ggml_backend_buffer_t buffer))                             \
    X(bool,                       ggml_backend_buffer_is_host,       (ggml_backend_buffer_t buffer))                             \
    X(void,                       ggml_backend_buffer_free,          (ggml_backend_buffer_t buffer))                             \
    X(int,                        ggml_backend_graph_compute,        (ggml_backend_t backend, struct ggml_cgraph * graph))       \
    X(void,                       ggml_backend_free,                 (ggml_backend_t backend))                                   \
    X(size_t,                     ggml_nbytes,                       (const struct ggml_tensor * tensor))                        \
    X(size_t,                     ggml_tensor_overhead,              (void))                                                     \
    X(struct ggml_context *,      ggml_init,                         (struct ga_init_params params))                             \
    X(void,                       ggml_free,                         (struct ggml_context * ctx))                                \
    X(void *,                     ggml_get_mem_buffer,               (const struct ggml_context * ctx))                          \
    X(struct ggml_tensor *,       ggml_new_tensor_1d,                (struct ggml_context * ctx, int type, int64_t ne0))         \
    X(size_t,                     ggml_graph_overhead_custom,        (size_t size, bool grads))                                  \
    X(struct ggml_cgraph *,       ggml_new_graph_custom,             (struct ggml_context * ctx, size_t size, bool grads))       \
    X(void,                       ggml_graph_add_node,               (struct ggml_cgraph * graph, struct ggml_tensor * tensor))  \
    X(int,                        ggml_graph_n_nodes,                (struct ggml_cgraph * graph))                               \
    X(struct ggml_tensor *,       ggml_graph_node,                   (struct ggml_cgraph * graph, int i))

struct mock_host {
#define X(ret, name, args) ret (*name) args;
    MOCK_HOST_FUNCTIONS(X)
#undef X
    int                api_version;
    size_t             tensor_size;     // sizeof(struct ggml_tensor); longer names make it longer
    ggml_backend_dev_t cpu;
    ga_init_backend_t  cpu_init;        // as it was when we came, so that no plug-in stands in front of it
    void            (* set_n_threads)(ggml_backend_t backend, int n_threads);
};

extern struct mock_host    mock_host;
extern struct mock_control mock_control;

#define MOCK_OPTION(index, name) atomic_load_explicit(&mock_control.options[index].name, memory_order_relaxed)
#define MOCK_COUNT(index, name, n) atomic_fetch_add_explicit(&mock_control.counters[index].name, (n), memory_order_relaxed)

void mock_die(const char * what) __attribute__((noreturn));

// mock_graph.c: a graph as it stood when compute was called; the caller may free its own at once
struct mock_graph;
struct mock_graph * mock_graph_capture(struct ggml_cgraph * graph);
int                 mock_graph_n_nodes(const struct mock_graph * graph);
int                 mock_graph_run(struct mock_graph * graph, ggml_backend_t cpu, int n_nodes);   // the first n_nodes
void                mock_graph_free(struct mock_graph * graph);

// mock_memory.c
void mock_memory_init(struct mock_device * device);
bool mock_memory_freed(const void * data, size_t size);     // whether any of it lies in a block that was freed
extern const struct mock_buffer_iface mock_device_buffer;

// mock_queue.c
enum mock_kind { MOCK_GRAPH, MOCK_GET, MOCK_SET, MOCK_COPY, MOCK_RECORD, MOCK_WAIT };

// `n` rows of `size` bytes
struct mock_copy {
    char       * dst;
    const char * src;
    size_t       size, n, dst_stride, src_stride;
};

struct mock_op {
    enum mock_kind      kind;
    struct mock_copy    copy;
    struct mock_graph * graph;
    struct mock_queue * on;             // MOCK_COPY, MOCK_WAIT: until that queue has done `position` operations
    uint64_t            position;
};

struct mock_queue * mock_queue_new(int device);
void                mock_queue_free(struct mock_queue * queue);
uint64_t            mock_queue_push(struct mock_queue * queue, struct mock_op op);     // returns its position
void                mock_queue_get(struct mock_queue * queue, struct mock_copy copy);  // poisons, then pushes
void                mock_queue_wait(struct mock_queue * queue, uint64_t position);
uint64_t            mock_queue_tail(struct mock_queue * queue);
bool                mock_queue_lost(struct mock_queue * queue);
