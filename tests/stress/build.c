// A spec in ggml's terms.

#include "stress.h"

#include <stdlib.h>
#include <string.h>

static struct ggml_context * context_new(size_t n_tensors, size_t n_nodes) {
    const size_t size = (n_tensors + 1)*ggml.ggml_tensor_overhead() + (n_nodes ? ggml.ggml_graph_overhead_custom(n_nodes, false) : 0);
    struct ggml_context * ctx = ggml.ggml_init((struct ga_init_params) { size, NULL, true });
    if (!ctx) {
        fail("ggml_init failed");
    }
    return ctx;
}

// Numbers in [-1, 1); the same for the same node, whatever else there is.
static float * numbers(uint64_t seed, size_t n) {
    struct random random = { seed };
    float * values = malloc((n ? n : 1)*sizeof(*values));
    for (size_t i = 0; i < n; i++) {
        values[i] = (float) ((int32_t) (random_next(&random) >> 40) - (1 << 23))/(float) (1 << 23);
    }
    return values;
}

static void fill(struct ggml_tensor * tensor, uint64_t seed, float scale) {
    const size_t size = ggml.ggml_nbytes(tensor);
    float * values = numbers(seed, size/sizeof(float));
    for (size_t i = 0; i < size/sizeof(float); i++) {
        values[i] *= scale;
    }
    ggml.ggml_backend_tensor_set(tensor, values, 0, size);
    free(values);
}

void weights_make(struct weights * weights, const struct spec * spec, const ggml_backend_buffer_type_t * bufts) {
    memset(weights, 0, sizeof(*weights));
    for (int i = 0; i < spec->n_nodes; i++) {
        const struct node * node = &spec->nodes[i];
        if (node->op == OP_weight || node->op == OP_experts) {
            if (!weights->ctx[node->place]) {
                weights->ctx[node->place] = context_new(MAX_NODES, 0);
            }
            const int64_t ne[3] = { node->ne[0], node->ne[1], N_EXPERTS };
            weights->tensors[i] = ggml.ggml_new_tensor(weights->ctx[node->place], TYPE_F32, node->op == OP_experts ? 3 : 2, ne);
        }
    }
    for (int place = 0; place <= spec->n_devices; place++) {
        if (weights->ctx[place]) {
            weights->buffer[place] = ggml.ggml_backend_alloc_ctx_tensors_from_buft(weights->ctx[place], bufts[place]);
            ggml.ggml_backend_buffer_set_usage(weights->buffer[place], USAGE_WEIGHTS);
        }
    }
    for (int i = 0; i < spec->n_nodes; i++) {
        if (weights->tensors[i]) {
            fill(weights->tensors[i], random_mix(spec->seed, (uint64_t) i + 1000), 0.25f);
        }
    }
}

void weights_free(struct weights * weights, const struct spec * spec) {
    for (int place = 0; place <= spec->n_devices; place++) {
        if (weights->ctx[place]) {
            ggml.ggml_backend_buffer_free(weights->buffer[place]);
            ggml.ggml_free(weights->ctx[place]);
        }
    }
}

static struct ggml_tensor * view_rows(struct ggml_context * ctx, struct ggml_tensor * a, int64_t ne0, int64_t ne1) {
    const struct ga_tensor * t = ga_tensor(a);
    return ggml.ggml_view_2d(ctx, a, ne0, ne1, t->nb[1], (size_t) (t->ne[1] - ne1)*t->nb[1]);
}

static struct ggml_tensor * experts_product(struct ggml_context * ctx, struct ggml_tensor * experts, struct ggml_tensor * x, struct ggml_tensor * ids) {
    const struct ga_tensor * t = ga_tensor(x);
    struct ggml_tensor * product = ggml.ggml_mul_mat_id(ctx, experts, ggml.ggml_reshape_3d(ctx, x, t->ne[0], 1, t->ne[1]), ids);
    const struct ga_tensor * p = ga_tensor(product);
    return ggml.ggml_reshape_2d(ctx, product, p->ne[0]*p->ne[1], p->ne[2]);
}

static struct ggml_tensor * make_node(struct ggml_context * ctx, const struct spec * spec, const struct weights * weights,
                                      struct ggml_tensor ** tensors, int i, int batch) {
    const struct node *  node = &spec->nodes[i];
    const int64_t        ne[2] = { dim_value(node->ne[0], batch), dim_value(node->ne[1], batch) };
    struct ggml_tensor * a    = node->src[0] >= 0 ? tensors[node->src[0]] : NULL;
    struct ggml_tensor * b    = node->src[1] >= 0 ? tensors[node->src[1]] : NULL;
    struct ggml_tensor * c    = node->src[2] >= 0 ? tensors[node->src[2]] : NULL;
    const struct ga_tensor * t = a ? ga_tensor(a) : NULL;
    switch (node->op) {
        case OP_input:      return ggml.ggml_new_tensor(ctx, TYPE_F32, 2, ne);
        case OP_weight:
        case OP_experts:    return weights->tensors[i];
        case OP_add:
        case OP_add_row:    return ggml.ggml_add(ctx, a, b);
        case OP_sub:        return ggml.ggml_sub(ctx, a, b);
        case OP_mul:        return ggml.ggml_mul(ctx, a, b);
        case OP_neg:        return ggml.ggml_neg(ctx, a);
        case OP_abs:        return ggml.ggml_abs(ctx, a);
        case OP_relu:       return ggml.ggml_relu(ctx, a);
        case OP_tanh:       return ggml.ggml_tanh(ctx, a);
        case OP_silu:       return ggml.ggml_silu(ctx, a);
        case OP_scale:      return ggml.ggml_scale(ctx, a, 0.001f*(float) node->param);
        case OP_softmax:    return ggml.ggml_soft_max(ctx, a);
        case OP_cont:       return ggml.ggml_cont(ctx, a);
        case OP_transpose:  return ggml.ggml_transpose(ctx, a);
        case OP_view_cols:  return ggml.ggml_view_2d(ctx, a, ne[0], ne[1], t->nb[1], node->param % 2 ? (size_t) ne[0]*t->nb[0] : 0);
        case OP_view_rows:  return view_rows(ctx, a, ne[0], ne[1]);
        case OP_concat:     return ggml.ggml_concat(ctx, a, b, 0);
        case OP_sum_rows:   return ggml.ggml_sum_rows(ctx, a);
        case OP_mul_mat:    return ggml.ggml_mul_mat(ctx, a, b);
        case OP_argsort:    return ggml.ggml_argsort(ctx, a, 1);
        case OP_top_k:      return ggml.ggml_view_2d(ctx, a, ne[0], ne[1], t->nb[1], 0);
        case OP_mul_mat_id: return experts_product(ctx, a, b, c);
        case N_OPS:         break;
    }
    fail("no such operation");
}

void built_make(struct built * built, const struct spec * spec, const struct weights * weights, int batch) {
    memset(built, 0, sizeof(*built));
    built->ctx   = context_new(4*MAX_NODES, 4*MAX_NODES);
    built->graph = ggml.ggml_new_graph_custom(built->ctx, 4*MAX_NODES, false);
    for (int i = 0; i < spec->n_nodes; i++) {
        struct ggml_tensor * tensor = make_node(built->ctx, spec, weights, built->tensors, i, batch);
        char name[16];
        snprintf(name, sizeof(name), "n%d", i);
        ggml.ggml_set_name(tensor, name);
        if (spec->nodes[i].op == OP_input) {
            ggml.ggml_set_input(tensor);
        }
        if (spec->nodes[i].output) {
            ggml.ggml_set_output(tensor);
        }
        built->tensors[i] = tensor;
    }
    for (int i = 0; i < spec->n_nodes; i++) {
        if (spec->nodes[i].output) {
            ggml.ggml_build_forward_expand(built->graph, built->tensors[i]);
        }
    }
}

void built_inputs(const struct built * built, const struct spec * spec, int eval) {
    for (int i = 0; i < spec->n_nodes; i++) {
        if (spec->nodes[i].op == OP_input && ga_tensor(built->tensors[i])->data && ggml.ggml_nbytes(built->tensors[i])) {
            fill(built->tensors[i], random_mix(random_mix(spec->seed, (uint64_t) i), (uint64_t) eval + 1), 1.0f);
        }
    }
}

void reference_make(struct reference * reference, const struct spec * spec, int eval, ggml_backend_t cpu) {
    ggml_backend_buffer_type_t bufts[MAX_DEVICES + 1];
    for (int i = 0; i <= MAX_DEVICES; i++) {
        bufts[i] = ggml.ggml_backend_dev_buffer_type(cpu_device);
    }
    weights_make(&reference->weights, spec, bufts);
    built_make(&reference->built, spec, &reference->weights, spec->evals[eval].batch);
    reference->buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(reference->built.ctx, bufts[0]);
    built_inputs(&reference->built, spec, eval);
    if (ggml.ggml_backend_graph_compute(cpu, reference->built.graph) != STATUS_SUCCESS) {
        fail("the reference did not compute");
    }
}

void reference_free(struct reference * reference, const struct spec * spec) {
    ggml.ggml_backend_buffer_free(reference->buffer);
    ggml.ggml_free(reference->built.ctx);
    weights_free(&reference->weights, spec);
}
