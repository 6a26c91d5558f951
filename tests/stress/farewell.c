// What no scheduler does, by hand, and the end of a world: reads are queued towards the CPU backend, then backends go.

#include "stress.h"

#include <stdlib.h>
#include <string.h>

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

static void empty_compute(ggml_backend_t cpu) {
    struct ggml_context * ctx = ggml.ggml_init((struct ga_init_params) { ggml.ggml_graph_overhead_custom(8, false) + 1024, NULL, true });
    ggml.ggml_backend_graph_compute(cpu, ggml.ggml_new_graph_custom(ctx, 8, false));
    ggml.ggml_free(ctx);
}

// The CPU backend computes, with a plan or without: everything must have landed.
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
    ggml_backend_t cpu    = world->backends[world->plan->n_devices];
    int            status = -1;
    if (world->plan->order & 1) {
        void * plan = ggml.ggml_backend_graph_plan_create(cpu, graph);
        status = ggml.ggml_backend_graph_plan_compute(cpu, plan);
        ggml.ggml_backend_graph_plan_free(cpu, plan);
    } else {
        status = ggml.ggml_backend_graph_compute(cpu, graph);
    }
    bool ok = status == STATUS_SUCCESS;
    ggml.ggml_backend_tensor_get(sum, result, 0, sizeof(result));
    for (int k = 0; k < LAST_FLOATS; k++) {
        ok = ok && result[k] == last->values[0][k] + last->values[N_LAST - 1][k];
    }
    ok = ok && !memcmp(last->memory, last->values, last->size);
    ggml.ggml_backend_buffer_free(buffer);
    free(memory);
    return ok;
}

// A tensor of its own in a buffer of its own, full of the same number.
static struct ggml_tensor * tensor_in(struct ggml_context * ctx, ggml_backend_buffer_t buffer, int slot, float value) {
    const int64_t ne[1] = { LAST_FLOATS };
    float values[LAST_FLOATS];
    for (int k = 0; k < LAST_FLOATS; k++) {
        values[k] = value;
    }
    struct ggml_tensor * tensor = ggml.ggml_new_tensor(ctx, TYPE_F32, 1, ne);
    ggml.ggml_backend_tensor_alloc(buffer, tensor, (char *) ggml.ggml_backend_buffer_get_base(buffer) + (size_t) slot*sizeof(values));
    ggml.ggml_backend_tensor_set(tensor, values, 0, sizeof(values));
    return tensor;
}

static bool tensor_is(const struct ggml_tensor * tensor, float value) {
    float values[LAST_FLOATS];
    ggml.ggml_backend_tensor_get(tensor, values, 0, sizeof(values));
    bool ok = true;
    for (int k = 0; k < LAST_FLOATS; k++) {
        ok = ok && values[k] == value;
    }
    return ok;
}

// Device 1 has still to upload from memory that device 0 has pinned; then both are read, and what comes from device 0 lands there.
static bool crossed(struct world * world) {
    if (world->plan->n_devices < 2) {
        return true;
    }
    struct ggml_context * ctx = ggml.ggml_init((struct ga_init_params) { 16*ggml.ggml_tensor_overhead(), NULL, true });
    ggml_backend_buffer_type_t pinned = ggml.ggml_backend_dev_host_buffer_type(mock_devices[0]);
    ggml_backend_buffer_t      buffers[3];
    for (int i = 0; i < 2; i++) {
        buffers[i] = ggml.ggml_backend_buft_alloc_buffer(world->bufts[i], 2*LAST_FLOATS*sizeof(float));
    }
    buffers[2] = ggml.ggml_backend_buft_alloc_buffer(pinned ? pinned : world->bufts[world->plan->n_devices], 2*LAST_FLOATS*sizeof(float));
    ggml.ggml_backend_buffer_set_usage(buffers[2], USAGE_COMPUTE);
    struct ggml_tensor * from_0   = tensor_in(ctx, buffers[0], 0, 10.0f);
    struct ggml_tensor * from_1   = tensor_in(ctx, buffers[1], 0, 11.0f);
    struct ggml_tensor * uploaded = tensor_in(ctx, buffers[1], 1, 0.0f);
    struct ggml_tensor * to_0     = tensor_in(ctx, buffers[2], 0, 20.0f);
    struct ggml_tensor * to_1     = tensor_in(ctx, buffers[2], 1, 21.0f);
    ggml_backend_t       cpu      = world->backends[world->plan->n_devices];
    ggml.ggml_backend_tensor_set_async(world->backends[1], uploaded, ga_tensor(to_0)->data, 0, LAST_FLOATS*sizeof(float));
    ggml.ggml_backend_tensor_copy_async(world->backends[1], cpu, from_1, to_1);
    ggml.ggml_backend_tensor_copy_async(world->backends[0], cpu, from_0, to_0);
    empty_compute(cpu);
    const bool ok = tensor_is(to_0, 10.0f) && tensor_is(to_1, 11.0f) && tensor_is(uploaded, 20.0f);
    for (int i = 0; i < 3; i++) {
        ggml.ggml_backend_buffer_free(buffers[i]);
    }
    ggml.ggml_free(ctx);
    return ok;
}

// The application's own copy, into memory that is no scheduler's: synchronizing the CPU must have finished it.
static bool own_copy(struct world * world) {
    struct ggml_context * ctx = ggml.ggml_init((struct ga_init_params) { 4*ggml.ggml_tensor_overhead(), NULL, true });
    ggml_backend_t        cpu = world->backends[world->plan->n_devices];
    ggml_backend_buffer_t there = ggml.ggml_backend_buft_alloc_buffer(world->bufts[0], LAST_FLOATS*sizeof(float));
    ggml_backend_buffer_t here  = ggml.ggml_backend_buft_alloc_buffer(world->bufts[world->plan->n_devices], LAST_FLOATS*sizeof(float));
    struct ggml_tensor *  src   = tensor_in(ctx, there, 0, 5.0f);
    struct ggml_tensor *  dst   = tensor_in(ctx, here, 0, 6.0f);
    ggml.ggml_backend_tensor_copy_async(world->backends[0], cpu, src, dst);
    ggml.ggml_backend_synchronize(cpu);
    const bool ok = tensor_is(dst, 5.0f);
    empty_compute(cpu);
    ggml.ggml_backend_buffer_free(there);
    ggml.ggml_backend_buffer_free(here);
    ggml.ggml_free(ctx);
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
bool world_end(struct world * world) {
    const int       how  = world->plan->farewell;
    struct farewell last = { .ctx = NULL };
    bool            ok   = true;
    if (world->plan->order & 2) {
        for (int s = 0; s < world->plan->n_scheds; s++) {
            ggml.ggml_backend_sched_free(world->scheds[s]);
        }
    }
    ok = crossed(world) && own_copy(world);
    if (how > 0) {
        farewell_queue(world, &last);
    }
    if (how == 3) {
        ok = farewell_compute(world, &last) && ok;
    }
    if (how > 0) {
        memset(last.memory, SENTINEL, last.size);       // ours again: the reads, all bounced, must not come here any more
    }
    free_backends(world, how != 2, how == 2);
    free_backends(world, how == 2, how != 2);
    for (size_t i = 0; i < last.size; i++) {
        ok = ok && last.memory[i] == SENTINEL;
    }
    if (!ok) {
        snprintf(world->text, world->size, "reads queued by hand, or that were queued when the backends went (farewell %d)", how);
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

