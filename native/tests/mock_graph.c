// Graphs, captured when compute is called: nodes and sources are copied, tensor by tensor.

#include "mock_internal.h"

#include <stdlib.h>
#include <string.h>

enum { MOCK_MAX_SRC = 10 };

struct mock_graph {
    int     n_nodes;
    char ** nodes;          // copies, in order
    // every copied tensor by its original's address: open addressing
    size_t  capacity;
    const struct ggml_tensor ** keys;
    char ** values;
    size_t  n_values;
};

static size_t mock_slot(const struct mock_graph * graph, const struct ggml_tensor * tensor) {
    size_t slot = ((uintptr_t) tensor >> 4)*0x9E3779B97F4A7C15u & (graph->capacity - 1);
    while (graph->keys[slot] && graph->keys[slot] != tensor) {
        slot = (slot + 1) & (graph->capacity - 1);
    }
    return slot;
}

static void * mock_alloc(size_t n, size_t size) {
    void * data = calloc(n ? n : 1, size);
    if (!data) {
        mock_die("out of memory");
    }
    return data;
}

static void mock_graph_grow(struct mock_graph * graph) {
    struct mock_graph old = *graph;
    graph->capacity = old.capacity ? 2*old.capacity : 64;
    graph->keys     = mock_alloc(graph->capacity, sizeof(*graph->keys));
    graph->values   = mock_alloc(graph->capacity, sizeof(*graph->values));
    for (size_t i = 0; i < old.capacity; i++) {
        if (old.keys[i]) {
            const size_t slot = mock_slot(graph, old.keys[i]);
            graph->keys[slot]   = old.keys[i];
            graph->values[slot] = old.values[i];
        }
    }
    free(old.keys);
    free(old.values);
}

// Sources of sources are not followed, except through views: computing reads no further.
static struct ggml_tensor * mock_graph_copy(struct mock_graph * graph, const struct ggml_tensor * tensor, bool is_node) {
    if (!tensor) {
        return NULL;
    }
    if (2*(graph->n_values + 1) > graph->capacity) {
        mock_graph_grow(graph);
    }
    size_t slot = mock_slot(graph, tensor);
    if (!graph->keys[slot]) {
        graph->keys[slot]   = tensor;
        graph->values[slot] = mock_alloc(1, mock_host.tensor_size);
        graph->n_values++;
        memcpy(graph->values[slot], tensor, mock_host.tensor_size);
        struct ga_tensor * copy = (struct ga_tensor *) graph->values[slot];
        memset(copy->src, 0, sizeof(copy->src));
        copy->view_src = NULL;
        copy->view_src = mock_graph_copy(graph, ga_tensor(tensor)->view_src, false);
        slot = mock_slot(graph, tensor);    // the table may have grown
    }
    struct ga_tensor * copy = (struct ga_tensor *) graph->values[slot];
    if (is_node) {
        for (int i = 0; i < MOCK_MAX_SRC; i++) {
            copy->src[i] = mock_graph_copy(graph, ga_tensor(tensor)->src[i], false);
        }
    }
    return (struct ggml_tensor *) copy;
}

struct mock_graph * mock_graph_capture(struct ggml_cgraph * cgraph) {
    struct mock_graph * graph = mock_alloc(1, sizeof(*graph));
    graph->n_nodes = mock_host.ggml_graph_n_nodes(cgraph);
    graph->nodes   = mock_alloc((size_t) graph->n_nodes, sizeof(*graph->nodes));
    for (int i = 0; i < graph->n_nodes; i++) {
        graph->nodes[i] = (char *) mock_graph_copy(graph, mock_host.ggml_graph_node(cgraph, i), true);
    }
    return graph;
}

int mock_graph_n_nodes(const struct mock_graph * graph) {
    return graph->n_nodes;
}

int mock_graph_run(struct mock_graph * graph, ggml_backend_t cpu, int n_nodes) {
    if (n_nodes == 0) {
        return MOCK_STATUS_SUCCESS;
    }
    const struct ga_init_params params = { mock_host.ggml_graph_overhead_custom((size_t) n_nodes, false) + 4096, NULL, true };
    struct ggml_context * ctx = mock_host.ggml_init(params);
    if (!ctx) {
        mock_die("ggml_init failed");
    }
    struct ggml_cgraph * cgraph = mock_host.ggml_new_graph_custom(ctx, (size_t) n_nodes, false);
    for (int i = 0; i < n_nodes; i++) {
        mock_host.ggml_graph_add_node(cgraph, (struct ggml_tensor *) graph->nodes[i]);
    }
    const int status = mock_host.ggml_backend_graph_compute(cpu, cgraph);
    mock_host.ggml_free(ctx);
    return status;
}

void mock_graph_free(struct mock_graph * graph) {
    for (size_t i = 0; i < graph->capacity; i++) {
        free(graph->values[i]);
    }
    free(graph->keys);
    free(graph->values);
    free(graph->nodes);
    free(graph);
}
