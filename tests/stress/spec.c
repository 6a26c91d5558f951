// Graphs from a seed.

#include "stress.h"

#include <string.h>

uint64_t random_next(struct random * random) {
    uint64_t z = random->state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30))*0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27))*0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

uint32_t random_below(struct random * random, uint32_t n) {
    return (uint32_t) ((random_next(random) >> 32)*n >> 32);
}

bool random_chance(struct random * random, uint32_t percent) {
    return random_below(random, 100) < percent;
}

uint64_t random_mix(uint64_t a, uint64_t b) {
    struct random random = { a ^ b*0xD6E8FEB86659FD93u };
    return random_next(&random);
}

bool op_is_view(enum op op) {
    return op == OP_transpose || op == OP_view_cols || op == OP_view_rows || op == OP_top_k;
}

bool op_is_leaf(enum op op) {
    return op == OP_input || op == OP_weight || op == OP_experts;
}

int64_t dim_value(dim d, int batch) {
    return d >= 0 ? d : batch >> (-1 - d);
}

//
// Making one
//

enum family { CHAIN, Y, DIAMOND, FAN, ANY, N_FAMILIES };

struct maker {
    struct spec * spec;
    struct random random;
    enum family   family;
    int           place, sticky, fan;
};

static bool same_shape(const struct node * a, const struct node * b) {
    return a->ne[0] == b->ne[0] && a->ne[1] == b->ne[1];
}

static int push(struct maker * maker, enum op op, int a, int b, dim ne0, dim ne1) {
    struct spec * spec = maker->spec;
    if (random_chance(&maker->random, (uint32_t) maker->sticky)) {
        maker->place = (int) random_below(&maker->random, (uint32_t) spec->n_devices + 1);
        // half of everything on the CPU: that is where readbacks go
        maker->place = random_chance(&maker->random, 40) ? spec->n_devices : maker->place;
    }
    spec->nodes[spec->n_nodes] = (struct node) {
        .op = op, .src = { a, b, -1 }, .ne = { ne0, ne1 }, .place = maker->place, .contiguous = !op_is_view(op),
        .is_int = op == OP_argsort || op == OP_top_k, .param = (int) random_below(&maker->random, 1000),
    };
    if (op == OP_input && settings.late_uploads) {
        spec->nodes[spec->n_nodes].place = spec->n_devices;
    }
    return spec->n_nodes++;
}

static const dim widths[] = { 16, 32, 8, 64, 48 };

static int pick_source(struct maker * maker) {
    const int n = maker->spec->n_nodes;
    switch (maker->family) {
        case CHAIN:   return n - 1;
        case Y:       return n - 1 - (int) random_below(&maker->random, n > 1 ? 2 : 1);
        case DIAMOND: return random_chance(&maker->random, 60) ? n - 1 : n - 1 - (int) random_below(&maker->random, (uint32_t) (n < 4 ? n : 4));
        case FAN:     return random_chance(&maker->random, 70) ? maker->fan : (int) random_below(&maker->random, (uint32_t) n);
        default:      return (int) random_below(&maker->random, (uint32_t) n);
    }
}

// Another float node of the same shape, the latest first or any; -1 if there is none.
static int pick_partner(struct maker * maker, int a) {
    const struct spec * spec = maker->spec;
    int found = -1, n = 0;
    for (int i = 0; i < spec->n_nodes; i++) {
        const struct node * node = &spec->nodes[i];
        if (!node->is_int && node->op != OP_experts && same_shape(node, &spec->nodes[a]) &&
            random_below(&maker->random, (uint32_t) ++n) == 0) {
            found = i;
        }
    }
    return found;
}

static void push_elementwise(struct maker * maker, int a) {
    const struct node * x = &maker->spec->nodes[a];
    static const enum op unary[] = { OP_neg, OP_abs, OP_relu, OP_tanh, OP_silu, OP_scale, OP_softmax };
    if (!x->contiguous) {
        push(maker, OP_cont, a, -1, x->ne[0], x->ne[1]);
        return;
    }
    push(maker, unary[random_below(&maker->random, sizeof(unary)/sizeof(unary[0]))], a, -1, x->ne[0], x->ne[1]);
}

static void push_binary(struct maker * maker, int a) {
    static const enum op binary[] = { OP_add, OP_sub, OP_mul };
    const struct node x = maker->spec->nodes[a];
    int b = pick_partner(maker, a);
    if (!x.contiguous || b < 0) {
        push_elementwise(maker, a);
        return;
    }
    push(maker, binary[random_below(&maker->random, 3)], a, b, x.ne[0], x.ne[1]);
}

static void push_view(struct maker * maker, int a) {
    const struct node x = maker->spec->nodes[a];
    switch (random_below(&maker->random, 3)) {
        case 0:
            push(maker, OP_transpose, a, -1, x.ne[1], x.ne[0]);
            return;
        case 1:
            if (x.ne[0] >= 8 && x.contiguous) {
                push(maker, OP_view_cols, a, -1, x.ne[0]/2, x.ne[1]);
                return;
            }
            break;
        default:
            if (x.ne[1] < 0 && x.ne[1] > -4 && x.contiguous) {
                const int node = push(maker, OP_view_rows, a, -1, x.ne[0], x.ne[1] - 1);
                maker->spec->nodes[node].contiguous = true;
                return;
            }
            break;
    }
    push_elementwise(maker, a);
}

// Router, top k, experts: a mixture-of-experts layer whose ids are a strided view.
static void push_experts(struct maker * maker, int a) {
    const struct node x = maker->spec->nodes[a];
    if (x.ne[0] < 8 || x.ne[0] > 64 || x.ne[1] >= 0 || !x.contiguous || maker->spec->n_nodes + 32 > MAX_NODES) {
        push_elementwise(maker, a);
        return;
    }
    const dim  width = widths[random_below(&maker->random, 3)];
    const int  k     = 1 + (int) random_below(&maker->random, 3);
    const int  router  = push(maker, OP_weight, -1, -1, x.ne[0], N_EXPERTS);
    const int  logits  = push(maker, OP_mul_mat, router, a, N_EXPERTS, x.ne[1]);
    const int  sorted  = push(maker, OP_argsort, logits, -1, N_EXPERTS, x.ne[1]);
    const int  ids     = push(maker, OP_top_k, sorted, -1, k, x.ne[1]);
    const int  experts = push(maker, OP_experts, -1, -1, x.ne[0], width);
    const int  node    = push(maker, OP_mul_mat_id, experts, a, width*k, x.ne[1]);
    maker->spec->nodes[node].src[2] = ids;
    maker->spec->nodes[node].place  = random_chance(&maker->random, 70) ? maker->spec->n_devices : maker->place;
}

// A CPU split whose only input from the device is empty, and which may use memory again that an upload still reads.
static void push_barrier(struct maker * maker) {
    struct spec * spec = maker->spec;
    if (spec->n_nodes + 32 > MAX_NODES) {
        return;
    }
    const int device = (int) random_below(&maker->random, (uint32_t) spec->n_devices), cpu = spec->n_devices;
    const int input  = push(maker, OP_input, -1, -1, 64, -1);
    const int sent   = push(maker, OP_scale, input, -1, 64, -1);
    const int there  = push(maker, OP_neg, sent, -1, 64, -1);
    int view = there;
    for (int s = 1; s <= EMPTY_SHIFT; s++) {
        view = push(maker, OP_view_rows, view, -1, 64, -1 - s);
        spec->nodes[view].contiguous = true;
    }
    const int empty = push(maker, OP_relu, view, -1, 64, -1 - EMPTY_SHIFT);
    const int back  = push(maker, OP_neg, empty, -1, 64, -1 - EMPTY_SHIFT);
    const int other = push(maker, OP_scale, input, -1, 64, -1);
    const int last  = push(maker, OP_neg, other, -1, 64, -1);
    spec->nodes[sent].place  = spec->nodes[back].place = spec->nodes[other].place = spec->nodes[last].place = cpu;
    spec->nodes[there].place = spec->nodes[empty].place = device;
    spec->nodes[there].output = true;
}

static void push_any(struct maker * maker) {
    struct random * random = &maker->random;
    int a = pick_source(maker);
    while (maker->spec->nodes[a].is_int || maker->spec->nodes[a].op == OP_experts) {
        a--;
    }
    const struct node x = maker->spec->nodes[a];
    const uint32_t kind = random_below(random, 100);
    if (kind < 25) {
        push_elementwise(maker, a);
    } else if (kind < 50) {
        push_binary(maker, a);
    } else if (kind < 65) {
        push_view(maker, a);
    } else if (kind < 75 && x.ne[0] > 0 && x.contiguous) {
        const dim width = widths[random_below(random, 5)];
        const int w = push(maker, OP_weight, -1, -1, x.ne[0], width);
        push(maker, OP_mul_mat, w, a, width, x.ne[1]);
    } else if (kind < 80 && x.ne[0] > 0 && x.contiguous) {
        const int w = push(maker, OP_weight, -1, -1, x.ne[0], 1);
        push(maker, OP_add_row, a, w, x.ne[0], x.ne[1]);
    } else if (kind < 85 && x.ne[0] > 0 && x.ne[0] <= 64) {
        const int b = pick_partner(maker, a);
        push(maker, OP_concat, a, b, 2*x.ne[0], x.ne[1]);
    } else if (kind < 88 && x.contiguous) {
        push(maker, OP_sum_rows, a, -1, 1, x.ne[1]);
    } else if (kind < 93) {
        push_experts(maker, a);
    } else if (kind < 95) {
        push_barrier(maker);
    } else {
        push(maker, OP_input, -1, -1, widths[random_below(random, 3)], -1 - (int) random_below(random, 2));
    }
    if (random_chance(random, 15)) {
        maker->fan = maker->spec->n_nodes - 1;
        while (maker->spec->nodes[maker->fan].is_int || maker->spec->nodes[maker->fan].op == OP_experts) {
            maker->fan--;
        }
    }
}

// Every value that nobody uses is a result; some others are, too.
static void mark_outputs(struct maker * maker) {
    struct spec * spec = maker->spec;
    bool used[MAX_NODES] = { false };
    for (int i = 0; i < spec->n_nodes; i++) {
        for (int k = 0; k < 3; k++) {
            if (spec->nodes[i].src[k] >= 0) {
                used[spec->nodes[i].src[k]] = true;
            }
        }
    }
    const int n = spec->n_nodes;
    for (int i = 0; i < n; i++) {
        struct node * node = &spec->nodes[i];
        if (!used[i] && op_is_view(node->op) && spec->n_nodes < MAX_NODES - 12 && !node->is_int) {
            const int cont = push(maker, OP_cont, i, -1, node->ne[0], node->ne[1]);
            spec->nodes[cont].output = true;
        } else if (!op_is_leaf(node->op) && !op_is_view(node->op)) {
            node->output |= !used[i] || random_chance(&maker->random, 10);
        }
    }
}

// ggml's allocator gives up on a backend all of whose tensors are empty: something small lies on each.
static void push_anchors(struct maker * maker) {
    struct spec * spec = maker->spec;
    for (int place = 0; place <= spec->n_devices; place++) {
        const int input  = push(maker, OP_input, -1, -1, 8, 1);
        const int result = push(maker, OP_neg, input, -1, 8, 1);
        spec->nodes[input].place  = settings.late_uploads ? spec->n_devices : place;
        spec->nodes[result].place = place;
        spec->nodes[input].anchor = spec->nodes[result].anchor = true;
        spec->nodes[result].output = true;
    }
}

static void make_evals(struct spec * spec, struct random * random) {
    spec->n_evals = 1 + (int) random_below(random, MAX_EVALS);
    for (int i = 0; i < spec->n_evals; i++) {
        struct eval * eval = &spec->evals[i];
        eval->batch      = random_chance(random, 5) ? 0 : 1 + (int) random_below(random, MAX_BATCH);
        eval->reuse      = i > 0 && random_chance(random, 40);
        eval->batch      = eval->reuse ? spec->evals[i - 1].batch : eval->batch;
        eval->callback   = random_chance(random, 15);
        eval->free_early = random_chance(random, 30);
        eval->fetch      = (int) random_below(random, 3);
        eval->abort      = random_chance(random, 6) ? 1 + (int) random_below(random, 3) : 0;
        if (eval->reuse && spec->evals[i - 1].abort) {
            eval->reuse = false;
        }
        if (eval->reuse) {
            spec->evals[i - 1].free_early = false;
        }
    }
    // after an abort something must still come out right
    spec->evals[spec->n_evals - 1].abort = 0;
}

void spec_make(struct spec * spec, uint64_t seed, int n_devices) {
    memset(spec, 0, sizeof(*spec));
    spec->seed      = seed;
    spec->n_devices = n_devices;
    struct maker maker = { .spec = spec, .random = { seed } };
    maker.family = (enum family) random_below(&maker.random, N_FAMILIES);
    maker.sticky = 20 + (int) random_below(&maker.random, 70);
    maker.place  = (int) random_below(&maker.random, (uint32_t) n_devices + 1);
    const int n_inputs = 1 + (int) random_below(&maker.random, 3);
    const dim width    = widths[random_below(&maker.random, 5)];
    for (int i = 0; i < n_inputs; i++) {
        push(&maker, OP_input, -1, -1, width, -1);
    }
    const int n = 3 + (int) random_below(&maker.random, random_chance(&maker.random, 20) ? 40 : 16);
    while (spec->n_nodes < n_inputs + n && spec->n_nodes < MAX_NODES - 32) {
        push_any(&maker);
    }
    mark_outputs(&maker);
    push_anchors(&maker);
    make_evals(spec, &maker.random);
    spec_prune(spec);
}

//
// Making one smaller, and printing it
//

bool spec_drop(struct spec * spec, int i) {
    struct node * node = &spec->nodes[i];
    if (op_is_leaf(node->op) || node->is_int || node->anchor) {
        return false;
    }
    node->op = OP_input;
    node->src[0] = node->src[1] = node->src[2] = -1;
    node->output     = false;
    node->contiguous = true;
    node->place      = settings.late_uploads ? spec->n_devices : node->place;
    return true;
}

void spec_prune(struct spec * spec) {
    bool needed[MAX_NODES] = { false };
    int  index[MAX_NODES];
    for (int i = spec->n_nodes - 1; i >= 0; i--) {
        needed[i] |= spec->nodes[i].output;
        for (int k = 0; k < 3 && needed[i]; k++) {
            if (spec->nodes[i].src[k] >= 0) {
                needed[spec->nodes[i].src[k]] = true;
            }
        }
    }
    int n = 0;
    for (int i = 0; i < spec->n_nodes; i++) {
        if (!needed[i]) {
            continue;
        }
        index[i] = n;
        struct node node = spec->nodes[i];
        for (int k = 0; k < 3; k++) {
            node.src[k] = node.src[k] >= 0 ? index[node.src[k]] : -1;
        }
        spec->nodes[n++] = node;
    }
    spec->n_nodes = n;
}

static void dim_print(dim d, FILE * file) {
    if (d >= 0) {
        fprintf(file, "%d", d);
    } else if (d == -1) {
        fprintf(file, "B");
    } else {
        fprintf(file, "B>>%d", -1 - d);
    }
}

void spec_print(const struct spec * spec, FILE * file) {
    static const char * const names[] = {
#define X(name) #name,
        OPS(X)
#undef X
    };
    for (int i = 0; i < spec->n_nodes; i++) {
        const struct node * node = &spec->nodes[i];
        fprintf(file, "  n%-2d = %s(", i, names[node->op]);
        for (int k = 0; k < 3 && node->src[k] >= 0; k++) {
            fprintf(file, "%sn%d", k ? ", " : "", node->src[k]);
        }
        fprintf(file, ") [");
        dim_print(node->ne[0], file);
        fprintf(file, ", ");
        dim_print(node->ne[1], file);
        fprintf(file, "]");
        if (!op_is_view(node->op)) {
            if (node->place == spec->n_devices) {
                fprintf(file, " on CPU");
            } else {
                fprintf(file, " on MOCK%d", node->place);
            }
        }
        fprintf(file, "%s\n", node->output ? "  -> output" : "");
    }
    for (int i = 0; i < spec->n_evals; i++) {
        const struct eval * eval = &spec->evals[i];
        fprintf(file, "  evaluation %d: B=%d%s%s%s fetch=%d abort=%d\n", i, eval->batch, eval->reuse ? " reuse" : "",
                eval->callback ? " callback" : "", eval->free_early ? " free_early" : "", eval->fetch, eval->abort);
    }
}
