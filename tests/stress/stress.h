// The stress driver: random graphs over the CPU and mock devices, each compared with the same graph on the CPU alone.
//   spec.c   what a graph is: made from a seed, made smaller, printed
//   build.c  a graph in ggml's terms; inputs; the CPU-only reference
//   world.c  backends and schedulers, how a graph is run on them, and the comparison; farewell.c: how they end
//   main.c   options, threads, the count, shrinking
#pragma once

#include "ggml_api.h"
#include "ggml_async.h"
#include "mock_device.h"

#include <stdio.h>

enum {
    MAX_NODES = 80, MAX_EVALS = 4, MAX_DEVICES = MOCK_MAX_DEVICES, MAX_BATCH = 9, N_EXPERTS = 16, GRAPHS_PER_WORLD = 8,
    EMPTY_SHIFT = 4,        // MAX_BATCH >> EMPTY_SHIFT is 0
};

// A generator of our own: the same numbers on every machine.
struct random {
    uint64_t state;
};
uint64_t random_next(struct random * random);
uint32_t random_below(struct random * random, uint32_t n);
bool     random_chance(struct random * random, uint32_t percent);
uint64_t random_mix(uint64_t a, uint64_t b);

//
// Specs
//

#define OPS(X)                                                                                          \
    X(input) X(weight) X(experts)                                                                       \
    X(add) X(sub) X(mul) X(add_row) X(neg) X(abs) X(relu) X(tanh) X(silu) X(scale) X(softmax)           \
    X(cont) X(transpose) X(view_cols) X(view_rows) X(concat) X(sum_rows) X(mul_mat) X(argsort) X(top_k) \
    X(mul_mat_id)

enum op {
#define X(name) OP_##name,
    OPS(X)
#undef X
    N_OPS,
};

// A dimension is a number, or for the batch -1 - s: B >> s rows of a batch of B.
typedef int dim;

struct node {
    enum op op;
    int     src[3];         // earlier nodes; -1: none
    dim     ne[2];
    int     param;
    int     place;          // device, or n_devices for the CPU; views follow their source
    bool    output;
    bool    is_int;
    bool    contiguous;
    bool    anchor;         // stays, whatever is made smaller
};

// How one evaluation is done.
struct eval {
    int  batch;
    bool reuse;             // the graph of the evaluation before, with new inputs
    bool callback;          // an eval callback that looks at every third node
    bool free_early;        // graph and tensors are freed while devices still compute
    int  fetch;             // 0: tensor_get after a wait, 1: tensor_get_async, 2: ggml_async_read
    int  abort;             // 0: no, 1: the CPU's abort callback, 2: the eval callback says stop, 3: it jumps out, as a thrown exception
};

struct spec {
    uint64_t    seed;
    int         n_devices;
    int         n_nodes;
    struct node nodes[MAX_NODES];
    int         n_evals;
    struct eval evals[MAX_EVALS];
};

bool op_is_view(enum op op);
bool op_is_leaf(enum op op);
void spec_make(struct spec * spec, uint64_t seed, int n_devices);
void spec_print(const struct spec * spec, FILE * file);
bool spec_drop(struct spec * spec, int node);      // makes it an input; false if it is one already
void spec_prune(struct spec * spec);               // removes what no output needs

//
// Worlds
//

struct world_plan {
    uint64_t seed;
    int      n_devices;
    int      pinned_by;     // device whose pinned memory the CPU's compute buffer is in; -1: plain
    int      n_threads;
    int      n_scheds;      // 2: two graphs in flight over the same backends
    bool     parallel;      // pipeline copies, evaluations without a wait in between
    bool     switching;     // modes change in mid-run
    int      farewell;      // how reads still queued meet the end of their backends
    int      order;         // in which the backends are freed
};

struct settings {
    const char * mode;      // async, stock, off, or none: no plug-in at all
    int          max_devices;
    bool         allow_parallel, allow_aborts;
    // Devices copy uploads from pinned CPU memory in their own time (Vulkan does). ggml's scheduler itself is then wrong in some
    // graphs, with no plug-in near: those are not made. See docs/verification.md.
    bool         late_uploads;
};
extern struct settings settings;

void world_plan_make(struct world_plan * plan, uint64_t seed);
// Runs the specs in one world. Returns the index of the first that differs, or -1; `text` then says where.
int  world_run(const struct world_plan * plan, const struct spec * specs, int n_specs, char * text, size_t size);

// world.c and farewell.c
struct world {
    const struct world_plan   * plan;
    ggml_backend_t              backends[MAX_DEVICES + 1];
    ggml_backend_buffer_type_t  bufts[MAX_DEVICES + 1];
    ggml_backend_sched_t        scheds[2];
    ggml_backend_t              reference_cpu;
    struct ggml_async_queue   * queue;
    char                      * text;
    size_t                      size;
};
bool world_end(struct world * world);

// build.c
struct built {
    struct ggml_context * ctx;
    struct ggml_cgraph  * graph;
    struct ggml_tensor  * tensors[MAX_NODES];
};
struct weights {
    struct ggml_context * ctx[MAX_DEVICES + 1];         // by place
    ggml_backend_buffer_t buffer[MAX_DEVICES + 1];
    struct ggml_tensor  * tensors[MAX_NODES];
};
void    weights_make(struct weights * weights, const struct spec * spec, const ggml_backend_buffer_type_t * bufts);
void    weights_free(struct weights * weights, const struct spec * spec);
void    built_make(struct built * built, const struct spec * spec, const struct weights * weights, int batch);
void    built_inputs(const struct built * built, const struct spec * spec, int eval);
int64_t dim_value(dim d, int batch);
// The values of every node, by the CPU alone; freed by reference_free.
struct reference {
    struct weights        weights;
    struct built          built;
    ggml_backend_buffer_t buffer;
};
void reference_make(struct reference * reference, const struct spec * spec, int eval, ggml_backend_t cpu);
void reference_free(struct reference * reference, const struct spec * spec);

// main.c
extern ggml_backend_dev_t    cpu_device;
extern ggml_backend_dev_t    mock_devices[MAX_DEVICES];
extern struct mock_control * mock;
extern void (*cpu_set_n_threads)(ggml_backend_t backend, int n);
extern void (*cpu_set_abort)(ggml_backend_t backend, bool (*callback)(void *), void * user_data);
// the plug-in's functions; NULL without it
extern int plugin_host;
extern struct ggml_async_queue * (*plugin_queue_new)(int host);
extern void (*plugin_queue_free)(struct ggml_async_queue * queue);
extern int  (*plugin_read)(struct ggml_async_queue * queue, void * backend, const void * tensor, void * data, size_t offset, size_t size);
extern int  (*plugin_wait)(struct ggml_async_queue * queue);
extern int  (*plugin_set_mode)(int host, int mode);
extern int  (*plugin_counters)(int host, uint64_t * values, int n);
extern const char * (*plugin_counter_name)(int index);
void count_evaluation(void);
void fail(const char * format, ...) __attribute__((format(printf, 1, 2), noreturn));
