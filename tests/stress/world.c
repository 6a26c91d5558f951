// Backends, schedulers, and graphs run on them.

#include "stress.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

struct settings settings = { .mode = "async", .max_devices = MAX_DEVICES, .allow_parallel = true, .allow_aborts = true };

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

// One evaluation on its way.
struct flight {
    struct world           * world;
    const struct spec      * spec;
    const struct weights   * weights;
    int                      eval;
    ggml_backend_sched_t     sched;
    struct reference         reference;
    struct built             built;
    char                   * results[MAX_NODES];
    int                      status;
    // the eval callback's
    bool                     differs;
    int                      n_asked;
    jmp_buf                  out;
};

void world_plan_make(struct world_plan * plan, uint64_t seed) {
    struct random random = { random_mix(seed, 77) };
    plan->seed      = seed;
    plan->n_devices = 1 + (int) random_below(&random, (uint32_t) (settings.late_uploads ? 1 : settings.max_devices));
    plan->pinned_by = random_chance(&random, 60) ? (int) random_below(&random, (uint32_t) plan->n_devices) : -1;
    plan->n_threads = random_chance(&random, 10) ? 2 : 1;
    plan->n_scheds  = random_chance(&random, 30) ? 2 : 1;
    plan->parallel  = random_chance(&random, 30) && settings.allow_parallel;
    plan->switching = random_chance(&random, 15);
    plan->farewell  = (int) random_below(&random, 4);
    plan->order     = (int) random_below(&random, 4);
}

//
// Comparison
//

static bool compare(struct flight * flight, int i, const char * got, const char * when) {
    struct ggml_tensor * expected = flight->reference.built.tensors[i];
    const char *         data     = ga_tensor(expected)->data;
    const size_t         size     = ggml.ggml_nbytes(expected);
    if (!size || !memcmp(got, data, size)) {
        return true;
    }
    size_t at = 0;
    while (!memcmp(got + at, data + at, 4)) {
        at += 4;
    }
    uint32_t a, b;
    float    x, y;
    memcpy(&a, got + at, 4);
    memcpy(&b, data + at, 4);
    memcpy(&x, &a, 4);
    memcpy(&y, &b, 4);
    snprintf(flight->world->text, flight->world->size, "%s: n%d of evaluation %d differs at element %zu of %zu: 0x%08x (%g), the CPU alone has 0x%08x (%g)",
             when, i, flight->eval, at/4, size/4, a, (double) x, b, (double) y);
    return false;
}

// Looks at every third node: that makes the scheduler compute node by node, and every value can be compared.
static bool on_node(struct ggml_tensor * tensor, bool ask, void * user_data) {
    struct flight *     flight = user_data;
    const struct eval * eval   = &flight->spec->evals[flight->eval];
    int  i;
    char rest;
    const bool known = sscanf(ggml.ggml_get_name(tensor), "n%d%c", &i, &rest) == 1;
    if (ask) {
        flight->n_asked++;
        const bool on_cpu = ggml.ggml_backend_sched_get_tensor_backend(flight->sched, tensor) == flight->world->backends[flight->spec->n_devices];
        if (eval->abort == 3 && on_cpu && flight->n_asked > 2) {
            longjmp(flight->out, 1);
        }
        return known && i % 3 == 0;
    }
    if (known && flight->spec->nodes[i].contiguous && !flight->differs && !eval->abort) {
        const size_t size = ggml.ggml_nbytes(tensor);
        char * got = malloc(size + 1);
        if (size) {
            ggml.ggml_backend_tensor_get(tensor, got, 0, size);
        }
        flight->differs = !compare(flight, i, got, "in the eval callback");
        free(got);
    }
    return eval->abort != 2 || flight->n_asked < 5;
}

static bool abort_now(void * user_data) {
    int * n = user_data;
    return --*n <= 0;
}

//
// One evaluation
//

static void place(struct flight * flight) {
    for (int i = 0; i < flight->spec->n_nodes; i++) {
        const struct node *  node   = &flight->spec->nodes[i];
        struct ggml_tensor * tensor = flight->built.tensors[i];
        if (op_is_view(node->op) || flight->weights->tensors[i]) {
            continue;
        }
        if (node->op == OP_mul_mat_id) {
            tensor = ga_tensor(tensor)->src[0];     // behind the reshape
        }
        ggml.ggml_backend_sched_set_tensor_backend(flight->sched, tensor, flight->world->backends[node->place]);
    }
}

static void compute(struct flight * flight) {
    const struct eval * eval     = &flight->spec->evals[flight->eval];
    ggml_backend_t      cpu      = flight->world->backends[flight->spec->n_devices];
    const bool          callback = eval->callback || eval->abort > 1;
    int                 n        = 3;
    ggml.ggml_backend_sched_set_eval_callback(flight->sched, callback ? on_node : NULL, flight);
    if (eval->abort == 1 && cpu_set_abort) {
        cpu_set_abort(cpu, abort_now, &n);
    }
    flight->status = -1;
    if (!setjmp(flight->out)) {
        flight->status = ggml.ggml_backend_sched_graph_compute_async(flight->sched, flight->built.graph);
    }
    if (eval->abort == 1 && cpu_set_abort) {
        cpu_set_abort(cpu, NULL, NULL);
    }
    ggml.ggml_backend_sched_set_eval_callback(flight->sched, NULL, NULL);
}

// Queues what fetches the results without a wait; 0 is done after it.
static void fetch(struct flight * flight, int method) {
    for (int i = 0; i < flight->spec->n_nodes; i++) {
        struct ggml_tensor * tensor = flight->built.tensors[i];
        const size_t         size   = ggml.ggml_nbytes(tensor);
        if (!flight->spec->nodes[i].output || !size) {
            continue;
        }
        flight->results[i] = malloc(size);
        ggml_backend_t backend = ggml.ggml_backend_sched_get_tensor_backend(flight->sched, tensor);
        if (method == 2 && flight->world->queue) {
            if (plugin_read(flight->world->queue, backend, tensor, flight->results[i], 0, size) < 0) {
                fail("ggml_async_read failed");
            }
        } else if (method > 0) {
            ggml.ggml_backend_tensor_get_async(backend, tensor, flight->results[i], 0, size);
        } else {
            ggml.ggml_backend_tensor_get(tensor, flight->results[i], 0, size);
        }
    }
}

static void take_off(struct flight * flight, struct flight * before) {
    const struct eval * eval = &flight->spec->evals[flight->eval];
    const bool parallel = flight->world->plan->parallel;
    reference_make(&flight->reference, flight->spec, flight->eval, flight->world->reference_cpu);
    if (before) {
        flight->built    = before->built;
        before->built.ctx = NULL;
    } else {
        ggml.ggml_backend_sched_reset(flight->sched);
        built_make(&flight->built, flight->spec, flight->weights, eval->batch);
        place(flight);
        if (!ggml.ggml_backend_sched_alloc_graph(flight->sched, flight->built.graph)) {
            fail("the scheduler could not allocate a graph");
        }
    }
    built_inputs(&flight->built, flight->spec, flight->eval);
    compute(flight);
    const int method = parallel && !eval->fetch ? 1 : eval->fetch;
    if (flight->status == STATUS_SUCCESS && !eval->abort && method > 0) {
        fetch(flight, method);
        if (eval->free_early && !parallel) {
            ggml.ggml_free(flight->built.ctx);
            flight->built.ctx = NULL;
        }
    }
}

static bool land(struct flight * flight) {
    const struct eval * eval = &flight->spec->evals[flight->eval];
    ggml.ggml_backend_sched_synchronize(flight->sched);
    if (flight->world->queue) {
        plugin_wait(flight->world->queue);
    }
    bool ok = !flight->differs;
    if (!eval->abort) {
        count_evaluation();
        if (flight->status != STATUS_SUCCESS) {
            snprintf(flight->world->text, flight->world->size, "evaluation %d ended with status %d", flight->eval, flight->status);
            ok = false;
        } else if (!eval->fetch && !flight->world->plan->parallel) {
            fetch(flight, 0);
        }
    }
    for (int i = 0; i < flight->spec->n_nodes; i++) {
        ok = ok && (!flight->results[i] || compare(flight, i, flight->results[i], "result"));
        free(flight->results[i]);
        flight->results[i] = NULL;
    }
    reference_free(&flight->reference, flight->spec);
    return ok;
}

static void flight_end(struct flight * flight) {
    if (flight->built.ctx) {
        ggml.ggml_free(flight->built.ctx);
        flight->built.ctx = NULL;
    }
}

// One spec on each scheduler; with two of them, the evaluations are under way at the same time.
static int run_specs(struct world * world, const struct spec * specs, int n) {
    struct weights  weights[2];
    struct flight * flights = calloc(2*MAX_EVALS, sizeof(*flights));
    int failed = -1;
    for (int s = 0; s < n; s++) {
        weights_make(&weights[s], &specs[s], world->bufts);
    }
    for (int e = 0; e < MAX_EVALS && failed < 0; e++) {
        for (int s = 0; s < n; s++) {
            struct flight * flight = &flights[s*MAX_EVALS + e];
            if (e < specs[s].n_evals) {
                const bool reuse = specs[s].evals[e].reuse && !world->plan->parallel;
                *flight = (struct flight) { .world = world, .spec = &specs[s], .weights = &weights[s], .eval = e, .sched = world->scheds[s] };
                take_off(flight, reuse ? flight - 1 : NULL);
            }
        }
        for (int s = 0; s < n && !world->plan->parallel; s++) {
            if (e < specs[s].n_evals && !land(&flights[s*MAX_EVALS + e]) && failed < 0) {
                failed = s;
            }
        }
    }
    for (int s = 0; s < n; s++) {
        for (int e = 0; e < specs[s].n_evals; e++) {
            struct flight * flight = &flights[s*MAX_EVALS + e];
            if (world->plan->parallel && !land(flight) && failed < 0) {
                failed = s;
            }
            flight_end(flight);
        }
        ggml.ggml_backend_sched_reset(world->scheds[s]);
    }
    for (int s = 0; s < n; s++) {
        weights_free(&weights[s], &specs[s]);
    }
    free(flights);
    return failed;
}

//
// The end of a world: reads are queued towards the CPU backend, then backends go
//

enum { N_LAST = 3, LAST_FLOATS = 64, SENTINEL = 0x5A };

struct farewell {
    struct ggml_context * ctx;
    ggml_backend_buffer_t device_buffer[MAX_DEVICES];
    ggml_backend_buffer_t cpu_buffer;
    char                * memory;       // what cpu_buffer is
    size_t                size;
    struct ggml_tensor  * src[MAX_DEVICES*N_LAST];
    struct ggml_tensor  * dst[MAX_DEVICES*N_LAST];
    float                 values[MAX_DEVICES*N_LAST][LAST_FLOATS];
};

static void farewell_queue(struct world * world, struct farewell * last) {
    const int     n_devices = world->plan->n_devices;
    const int     n         = n_devices*N_LAST;
    const int64_t ne[1]     = { LAST_FLOATS };
    struct random random    = { world->plan->seed };
    last->ctx    = ggml.ggml_init((struct ga_init_params) { 64*ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead_custom(64, false), NULL, true });
    last->size   = (size_t) n*sizeof(last->values[0]);
    if (posix_memalign((void **) &last->memory, 64, last->size)) {
        fail("out of memory");
    }
    last->cpu_buffer = ggml.ggml_backend_cpu_buffer_from_ptr(last->memory, last->size);
    ggml.ggml_backend_buffer_set_usage(last->cpu_buffer, USAGE_COMPUTE);
    for (int d = 0; d < n_devices; d++) {
        last->device_buffer[d] = ggml.ggml_backend_buft_alloc_buffer(world->bufts[d], N_LAST*sizeof(last->values[0]));
    }
    for (int i = 0; i < n; i++) {
        char * base = ggml.ggml_backend_buffer_get_base(last->device_buffer[i/N_LAST]);
        last->src[i] = ggml.ggml_new_tensor(last->ctx, TYPE_F32, 1, ne);
        last->dst[i] = ggml.ggml_new_tensor(last->ctx, TYPE_F32, 1, ne);
        ggml.ggml_backend_tensor_alloc(last->device_buffer[i/N_LAST], last->src[i], base + (size_t) (i % N_LAST)*sizeof(last->values[0]));
        ggml.ggml_backend_tensor_alloc(last->cpu_buffer, last->dst[i], last->memory + (size_t) i*sizeof(last->values[0]));
        for (int k = 0; k < LAST_FLOATS; k++) {
            last->values[i][k] = (float) random_below(&random, 1000);
        }
        ggml.ggml_backend_tensor_set(last->src[i], last->values[i], 0, sizeof(last->values[i]));
    }
    for (int i = 0; i < n; i++) {
        ggml.ggml_backend_tensor_copy_async(world->backends[i/N_LAST], world->backends[n_devices], last->src[i], last->dst[i]);
    }
}

// The CPU backend computes: everything must have landed.
static bool farewell_compute(struct world * world, struct farewell * last) {
    struct ggml_cgraph * graph = ggml.ggml_new_graph_custom(last->ctx, 64, false);
    struct ggml_tensor * sum   = ggml.ggml_add(last->ctx, last->dst[0], last->dst[N_LAST - 1]);
    float  result[LAST_FLOATS];
    void * memory = NULL;
    if (posix_memalign(&memory, 64, sizeof(result))) {
        fail("out of memory");
    }
    ggml_backend_buffer_t buffer = ggml.ggml_backend_cpu_buffer_from_ptr(memory, sizeof(result));
    ggml.ggml_backend_tensor_alloc(buffer, sum, memory);
    ggml.ggml_build_forward_expand(graph, sum);
    bool ok = ggml.ggml_backend_graph_compute(world->backends[world->plan->n_devices], graph) == STATUS_SUCCESS;
    ggml.ggml_backend_tensor_get(sum, result, 0, sizeof(result));
    for (int k = 0; k < LAST_FLOATS; k++) {
        ok = ok && result[k] == last->values[0][k] + last->values[N_LAST - 1][k];
    }
    ok = ok && !memcmp(last->memory, last->values, last->size);
    ggml.ggml_backend_buffer_free(buffer);
    free(memory);
    return ok;
}

static void free_backends(struct world * world, bool devices, bool cpu) {
    const int n = world->plan->n_devices;
    for (int k = 0; k < n && devices; k++) {
        ggml.ggml_backend_free(world->backends[world->plan->order & 1 ? k : n - 1 - k]);
    }
    if (cpu) {
        ggml.ggml_backend_free(world->backends[n]);
    }
}

// 0: nothing is queued; 1: devices go first; 2: the CPU goes first; 3: the CPU computes first.
static bool world_end(struct world * world) {
    const int       how  = world->plan->farewell;
    struct farewell last = { .ctx = NULL };
    bool            ok   = true;
    if (world->plan->order & 2) {
        for (int s = 0; s < world->plan->n_scheds; s++) {
            ggml.ggml_backend_sched_free(world->scheds[s]);
        }
    }
    if (how > 0) {
        farewell_queue(world, &last);
    }
    if (how == 3) {
        ok = farewell_compute(world, &last);
    }
    free_backends(world, how != 2, how == 2);
    if (how > 0) {
        memset(last.memory, SENTINEL, last.size);       // ours again: nobody may write there any more
    }
    free_backends(world, how == 2, how != 2);
    for (size_t i = 0; i < last.size; i++) {
        ok = ok && last.memory[i] == SENTINEL;
    }
    if (!ok) {
        snprintf(world->text, world->size, "reads that were queued when the backends went (farewell %d)", how);
    }
    for (int d = 0; d < world->plan->n_devices && how > 0; d++) {
        ggml.ggml_backend_buffer_free(last.device_buffer[d]);
    }
    if (how > 0) {
        ggml.ggml_backend_buffer_free(last.cpu_buffer);
        ggml.ggml_free(last.ctx);
        free(last.memory);
    }
    if (!(world->plan->order & 2)) {
        for (int s = 0; s < world->plan->n_scheds; s++) {
            ggml.ggml_backend_sched_free(world->scheds[s]);
        }
    }
    return ok;
}

static void world_begin(struct world * world) {
    const struct world_plan * plan = world->plan;
    const int n = plan->n_devices;
    for (int d = 0; d <= n; d++) {
        world->backends[d] = ggml.ggml_backend_dev_init(d < n ? mock_devices[d] : cpu_device, NULL);
        world->bufts[d]    = ggml.ggml_backend_dev_buffer_type(d < n ? mock_devices[d] : cpu_device);
    }
    ggml_backend_buffer_type_t pinned = plan->pinned_by >= 0 ? ggml.ggml_backend_dev_host_buffer_type(mock_devices[plan->pinned_by]) : NULL;
    world->bufts[n] = pinned ? pinned : world->bufts[n];
    if (cpu_set_n_threads) {
        cpu_set_n_threads(world->backends[n], plan->n_threads);
    }
    for (int s = 0; s < plan->n_scheds; s++) {
        world->scheds[s] = ggml.ggml_backend_sched_new(world->backends, world->bufts, n + 1, 4*MAX_NODES, plan->parallel, false);
    }
    world->queue = plugin_queue_new ? plugin_queue_new(plugin_host) : NULL;
}

int world_run(const struct world_plan * plan, const struct spec * specs, int n_specs, char * text, size_t size) {
    static _Thread_local ggml_backend_t reference_cpu;
    if (!reference_cpu) {
        reference_cpu = ggml.ggml_backend_dev_init(cpu_device, NULL);
        if (cpu_set_n_threads) {
            cpu_set_n_threads(reference_cpu, 1);
        }
    }
    struct world world = { .plan = plan, .reference_cpu = reference_cpu, .text = text, .size = size };
    int failed = -1;
    world_begin(&world);
    for (int i = 0; i < n_specs && failed < 0; i += plan->n_scheds) {
        const int n     = n_specs - i < plan->n_scheds ? n_specs - i : plan->n_scheds;
        const int which = run_specs(&world, &specs[i], n);
        failed = which < 0 ? -1 : i + which;
    }
    if (world.queue) {
        plugin_queue_free(world.queue);
    }
    if (!world_end(&world) && failed < 0) {
        failed = n_specs - 1;
    }
    return failed;
}
