// Backends, schedulers, and graphs run on them.

#include "stress.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

struct settings settings = { .mode = "async", .max_devices = MAX_DEVICES, .allow_parallel = true, .allow_aborts = true };

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

// A scheduler that meets another graph keeps its plan of memory where the number of nodes is the same and all sizes fit,
// though other tensors are alive at other times: ggml's allocator does not see it, and gives memory away too early.
// Programs reserve for the graphs that they have; so do we. Splitting changes a graph: this one is for nothing else.
static void reserve(struct flight * flight) {
    ggml.ggml_backend_sched_reset(flight->sched);
    built_make(&flight->built, flight->spec, flight->weights, flight->spec->evals[flight->eval].batch);
    place(flight);
    if (!ggml.ggml_backend_sched_reserve(flight->sched, flight->built.graph)) {
        fail("the scheduler could not reserve memory for a graph");
    }
    ggml.ggml_free(flight->built.ctx);
}

static void take_off(struct flight * flight, struct flight * before) {
    const struct eval * eval = &flight->spec->evals[flight->eval];
    const bool parallel = flight->world->plan->parallel;
    reference_make(&flight->reference, flight->spec, flight->eval, flight->world->reference_cpu);
    if (before) {
        flight->built    = before->built;
        before->built.ctx = NULL;
    } else {
        if (flight->eval == 0) {
            reserve(flight);
        }
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
