// A queue and the thread that runs it, strictly in order.

#include "mock_internal.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// Queues are never freed but used again: an event may refer to one whose backend is gone. Positions only grow.
struct mock_queue {
    struct mock_queue * next;
    bool                in_use;
    int                 device;
    pthread_t           thread;
    pthread_mutex_t     mutex;
    pthread_cond_t      changed;
    bool                stop;
    bool                lost;
    struct mock_op    * ops;            // not yet done; [0] may be running
    size_t              n_ops, cap_ops;
    uint64_t            n_done;
    uint64_t            n_wanted;       // somebody waits for this many; nothing else runs where the device is lazy
    uint64_t            random;
    ggml_backend_t      cpu;
};

static pthread_mutex_t     mock_queues_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct mock_queue * mock_queues;

static void mock_delay(struct mock_queue * queue, enum mock_kind kind) {
    const struct mock_options * options = &mock_control.options[queue->device];
    uint32_t us = 0;
    switch (kind) {
        case MOCK_GRAPH:  us = atomic_load(&options->delay_graph_us); break;
        case MOCK_GET:    us = atomic_load(&options->delay_get_us);   break;
        case MOCK_SET:    us = atomic_load(&options->delay_set_us);   break;
        case MOCK_COPY:   us = atomic_load(&options->delay_copy_us);  break;
        case MOCK_RECORD:
        case MOCK_WAIT:   us = atomic_load(&options->delay_event_us); break;
    }
    const uint32_t jitter = atomic_load(&options->jitter_us);
    if (jitter) {
        queue->random ^= queue->random << 13;
        queue->random ^= queue->random >> 7;
        queue->random ^= queue->random << 17;
        us += (uint32_t) (queue->random % (jitter + 1));
    }
    if (us) {
        usleep(us);
    }
}

// Counts an option that says "the n-th from now" down by `n`; returns how many of these pass before it strikes, or n.
static uint32_t mock_fault(_Atomic(uint32_t) * option, uint32_t n, bool * strikes) {
    const uint32_t left = atomic_load(option);
    *strikes = left && left <= n;
    if (left) {
        atomic_store(option, *strikes ? 0 : left - n);
    }
    return *strikes ? left - 1 : n;
}

static void mock_lose(struct mock_queue * queue) {
    pthread_mutex_lock(&queue->mutex);
    queue->lost = true;
    pthread_mutex_unlock(&queue->mutex);
    MOCK_COUNT(queue->device, errors, 1);
}

static void mock_run_copy(struct mock_queue * queue, const struct mock_copy * copy) {
    for (size_t i = 0; i < copy->n; i++) {
        char       * dst = copy->dst + i*copy->dst_stride;
        const char * src = copy->src + i*copy->src_stride;
        if (mock_memory_freed(dst, copy->size) || mock_memory_freed(src, copy->size)) {
            MOCK_COUNT(queue->device, touched_freed, 1);
        }
        memmove(dst, src, copy->size);
    }
}

static void mock_run(struct mock_queue * queue, const struct mock_op * op) {
    struct mock_options * options = &mock_control.options[queue->device];
    bool strikes = false;
    if (op->on) {
        mock_queue_wait(op->on, op->position);
    }
    if (mock_queue_lost(queue)) {
        MOCK_COUNT(queue->device, errors, 1);
        return;
    }
    mock_delay(queue, op->kind);
    switch (op->kind) {
        case MOCK_GET:
            mock_fault(&options->fail_get, 1, &strikes);
            if (strikes) {
                mock_lose(queue);
                return;
            }
            mock_run_copy(queue, &op->copy);
            break;
        case MOCK_SET:
        case MOCK_COPY:
            mock_run_copy(queue, &op->copy);
            break;
        case MOCK_GRAPH: {
            const uint32_t n = mock_fault(&options->lose_at_node, (uint32_t) mock_graph_n_nodes(op->graph), &strikes);
            if (mock_graph_run(op->graph, queue->cpu, (int) n) != MOCK_STATUS_SUCCESS || strikes) {
                mock_lose(queue);
            }
            MOCK_COUNT(queue->device, nodes, n);
            break;
        }
        case MOCK_RECORD:
        case MOCK_WAIT:
            break;
    }
}

static bool mock_may_run(const struct mock_queue * queue) {
    return queue->n_ops > 0 && !MOCK_OPTION(queue->device, stall) &&
           (queue->stop || queue->n_done < queue->n_wanted || !MOCK_OPTION(queue->device, lazy));
}

static void * mock_worker(void * user_data) {
    struct mock_queue * queue = user_data;
    pthread_mutex_lock(&queue->mutex);
    while (!queue->stop || queue->n_ops > 0) {
        if (!mock_may_run(queue)) {
            if (MOCK_OPTION(queue->device, stall)) {    // nobody tells us of its end
                pthread_mutex_unlock(&queue->mutex);
                usleep(200);
                pthread_mutex_lock(&queue->mutex);
            } else {
                pthread_cond_wait(&queue->changed, &queue->mutex);
            }
            continue;
        }
        const struct mock_op op = queue->ops[0];
        pthread_mutex_unlock(&queue->mutex);
        mock_run(queue, &op);
        if (op.graph) {
            mock_graph_free(op.graph);
        }
        pthread_mutex_lock(&queue->mutex);
        queue->n_ops--;
        memmove(queue->ops, queue->ops + 1, queue->n_ops*sizeof(*queue->ops));
        queue->n_done++;
        pthread_cond_broadcast(&queue->changed);
    }
    pthread_mutex_unlock(&queue->mutex);
    return NULL;
}

struct mock_queue * mock_queue_new(int device) {
    pthread_mutex_lock(&mock_queues_mutex);
    struct mock_queue * queue = mock_queues;
    while (queue && queue->in_use) {
        queue = queue->next;
    }
    if (!queue) {
        queue = calloc(1, sizeof(*queue));
        if (!queue) {
            mock_die("out of memory");
        }
        pthread_mutex_init(&queue->mutex, NULL);
        pthread_cond_init(&queue->changed, NULL);
        queue->next = mock_queues;
        mock_queues = queue;
    }
    queue->in_use = true;
    pthread_mutex_unlock(&mock_queues_mutex);
    queue->device = device;
    queue->stop   = false;
    queue->lost   = false;
    queue->random = 0x9E3779B97F4A7C15u ^ ((uint64_t) MOCK_OPTION(device, seed) << 8) ^ (uint64_t) device;
    queue->cpu    = mock_host.cpu_init(mock_host.cpu, NULL);
    if (!queue->cpu || pthread_create(&queue->thread, NULL, mock_worker, queue)) {
        mock_die("no thread or no CPU backend for a queue");
    }
    if (mock_host.set_n_threads) {
        mock_host.set_n_threads(queue->cpu, 1);
    }
    return queue;
}

// What is queued runs, except reads: a driver that goes takes its callers' reads with it. They are counted as wrong use.
void mock_queue_free(struct mock_queue * queue) {
    pthread_mutex_lock(&queue->mutex);
    for (size_t i = 0; i < queue->n_ops; i++) {
        if (queue->ops[i].kind == MOCK_GET) {
            MOCK_COUNT(queue->device, freed_with_reads, 1);
            queue->ops[i].copy.n = 0;
        }
    }
    queue->stop = true;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->mutex);
    pthread_join(queue->thread, NULL);
    mock_host.ggml_backend_free(queue->cpu);
    free(queue->ops);
    queue->ops     = NULL;
    queue->cap_ops = 0;
    pthread_mutex_lock(&mock_queues_mutex);
    queue->in_use = false;
    pthread_mutex_unlock(&mock_queues_mutex);
}

static uint64_t mock_push_locked(struct mock_queue * queue, const struct mock_op * op) {
    if (queue->n_ops == queue->cap_ops) {
        queue->cap_ops = queue->cap_ops ? 2*queue->cap_ops : 32;
        queue->ops     = realloc(queue->ops, queue->cap_ops*sizeof(*queue->ops));
        if (!queue->ops) {
            mock_die("out of memory");
        }
    }
    queue->ops[queue->n_ops++] = *op;
    if (!MOCK_OPTION(queue->device, lazy)) {
        pthread_cond_broadcast(&queue->changed);
    }
    return queue->n_done + queue->n_ops;
}

uint64_t mock_queue_push(struct mock_queue * queue, struct mock_op op) {
    pthread_mutex_lock(&queue->mutex);
    const uint64_t position = mock_push_locked(queue, &op);
    pthread_mutex_unlock(&queue->mutex);
    return position;
}

static bool mock_overlaps(const struct mock_copy * read, const struct mock_copy * upload) {
    if (!read->n || !upload->n) {
        return false;
    }
    const char * read_end   = read->dst + (read->n - 1)*read->dst_stride + read->size;
    const char * upload_end = upload->src + (upload->n - 1)*upload->src_stride + upload->size;
    return read->dst < upload_end && upload->src < read_end;
}

// The read will overwrite its destination some time between now and the next wait: the worst moment is now. Not so for
// memory that an upload, queued here before, has still to read: in order, that one is served first.
void mock_queue_get(struct mock_queue * queue, struct mock_copy copy) {
    const struct mock_op op = { .kind = MOCK_GET, .copy = copy };
    pthread_mutex_lock(&queue->mutex);
    bool needed = false;
    for (size_t i = 0; i < queue->n_ops && !needed; i++) {
        const struct mock_op * other = &queue->ops[i];
        needed = (other->kind == MOCK_SET || other->kind == MOCK_COPY) && mock_overlaps(&copy, &other->copy);
    }
    for (size_t i = 0; i < copy.n && !needed; i++) {
        memset(copy.dst + i*copy.dst_stride, MOCK_POISON, copy.size);
    }
    mock_push_locked(queue, &op);
    pthread_mutex_unlock(&queue->mutex);
    if (needed) {
        MOCK_COUNT(queue->device, poison_skipped, 1);
    }
}

void mock_queue_wait(struct mock_queue * queue, uint64_t position) {
    pthread_mutex_lock(&queue->mutex);
    if (queue->n_wanted < position) {
        queue->n_wanted = position;
        pthread_cond_broadcast(&queue->changed);
    }
    while (queue->n_done < position) {
        pthread_cond_wait(&queue->changed, &queue->mutex);
    }
    pthread_mutex_unlock(&queue->mutex);
}

uint64_t mock_queue_tail(struct mock_queue * queue) {
    pthread_mutex_lock(&queue->mutex);
    const uint64_t position = queue->n_done + queue->n_ops;
    pthread_mutex_unlock(&queue->mutex);
    return position;
}

bool mock_queue_lost(struct mock_queue * queue) {
    pthread_mutex_lock(&queue->mutex);
    const bool lost = queue->lost;
    pthread_mutex_unlock(&queue->mutex);
    return lost;
}
