// Backends of the synthetic host: a queue per device backend, and the calls that ggml's scheduler makes.

#include "fake_internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char * fake_backend_get_name(struct ggml_backend * backend) {
    return backend->device->get_name(backend->device);
}

//
// The queue
//

static void fake_run(const struct fake_op * op) {
    switch (op->kind) {
        case FAKE_OP_GET:  memcpy(op->host_memory, op->device_memory, op->size); break;
        case FAKE_OP_SET:  memcpy(op->device_memory, op->host_memory, op->size); break;
        case FAKE_OP_FILL: memset(op->device_memory, op->value, op->size);       break;
    }
}

static void * fake_worker(void * arg) {
    struct fake_queue * queue = arg;
    pthread_mutex_lock(&queue->mutex);
    while (!queue->stop) {
        if (queue->n_ops == 0) {
            pthread_cond_wait(&queue->changed, &queue->mutex);
            continue;
        }
        const struct fake_op op = queue->ops[0];
        memmove(queue->ops, queue->ops + 1, (size_t) --queue->n_ops*sizeof(op));
        queue->busy = true;
        pthread_mutex_unlock(&queue->mutex);
        if (fake_host.delay_us) {
            usleep((useconds_t) fake_host.delay_us);
        }
        fake_run(&op);
        pthread_mutex_lock(&queue->mutex);
        queue->busy = false;
        pthread_cond_broadcast(&queue->changed);
    }
    pthread_mutex_unlock(&queue->mutex);
    return NULL;
}

static void fake_push(struct ggml_backend * backend, struct fake_op op) {
    struct fake_queue * queue = backend->context;
    pthread_mutex_lock(&queue->mutex);
    if (queue->n_ops == queue->cap_ops) {
        queue->cap_ops = queue->cap_ops ? 2*queue->cap_ops : 16;
        queue->ops     = realloc(queue->ops, (size_t) queue->cap_ops*sizeof(op));
    }
    queue->ops[queue->n_ops++] = op;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->mutex);
}

static void fake_synchronize(struct ggml_backend * backend) {
    struct fake_queue * queue = backend->context;
    FAKE_ADD(fake_host.n_synchronizes[fake_index(backend->device)], 1);
    if (fake_host.before_synchronize) {
        fake_host.before_synchronize(backend);
    }
    pthread_mutex_lock(&queue->mutex);
    if (queue->threaded) {
        while (queue->n_ops || queue->busy) {
            pthread_cond_wait(&queue->changed, &queue->mutex);
        }
    } else {
        if (queue->n_ops && fake_host.delay_us) {
            usleep((useconds_t) fake_host.delay_us);
        }
        for (int i = 0; i < queue->n_ops; i++) {
            fake_run(&queue->ops[i]);
        }
        queue->n_ops = 0;
    }
    pthread_mutex_unlock(&queue->mutex);
}

static void fake_set_async(struct ggml_backend * backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    fake_push(backend, (struct fake_op) { FAKE_OP_SET, fake_storage(tensor) + offset, (void *) (uintptr_t) data, size, 0 });
}

static void fake_get_async(struct ggml_backend * backend, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    const int device = fake_index(backend->device);
    FAKE_ADD(fake_host.n_gets[device], 1);
    if (fake_host.before_get) {
        fake_host.before_get(backend);
    }
    if (!fake_is_pinned(device, data, size)) {
        FAKE_ADD(fake_host.n_gets_unpinned, 1);
    }
    fake_push(backend, (struct fake_op) { FAKE_OP_GET, fake_storage(tensor) + offset, data, size, 0 });
}

static bool fake_cpy_async(struct ggml_backend * src_backend, struct ggml_backend * dst_backend, const struct ggml_tensor * src, struct ggml_tensor * dst) {
    (void) src_backend;
    if (!fake_host.queue_uploads || !src->buffer->type->host) {
        return false;
    }
    fake_push(dst_backend, (struct fake_op) { FAKE_OP_SET, fake_storage(dst), fake_storage(src), fake_host.tensor_nbytes(src), 0 });
    return true;
}

static int fake_device_compute(struct ggml_backend * backend, struct ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_writes; i++) {
        fake_push(backend, (struct fake_op) { FAKE_OP_FILL, fake_storage(graph->writes[i]), NULL,
                                              fake_host.tensor_nbytes(graph->writes[i]), graph->values[i] });
    }
    return 0;
}

//
// CPU and ACCEL
//

static int fake_cpu_compute(struct ggml_backend * backend, struct ggml_cgraph * graph) {
    (void) backend;
    FAKE_ADD(fake_host.n_computes, 1);
    for (int i = 0; graph && i < graph->n_reads; i++) {
        memcpy(graph->seen[i], fake_storage(graph->reads[i]), fake_host.tensor_nbytes(graph->reads[i]));
    }
    return 0;
}

static int fake_cpu_plan_compute(struct ggml_backend * backend, void * plan) {
    return fake_cpu_compute(backend, plan);
}

static void * fake_plan_create(struct ggml_backend * backend, const struct ggml_cgraph * graph) {
    (void) backend;
    return (void *) (uintptr_t) graph;
}

static void fake_plan_free(struct ggml_backend * backend, void * plan) {
    (void) backend;
    (void) plan;
}

//
// Life
//

static void fake_backend_free(struct ggml_backend * backend) {
    struct fake_queue * queue = backend->context;
    FAKE_ADD(fake_host.n_backends, -1);
    pthread_mutex_lock(&queue->mutex);
    for (int i = 0; i < queue->n_ops; i++) {
        FAKE_ADD(fake_host.n_gets_lost, queue->ops[i].kind == FAKE_OP_GET);
    }
    queue->stop = true;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->mutex);
    if (queue->threaded) {
        pthread_join(queue->worker, NULL);
    }
    pthread_mutex_destroy(&queue->mutex);
    pthread_cond_destroy(&queue->changed);
    free(queue->ops);
    free(queue);
    memset((void *) backend, 0xDD, sizeof(*backend));
    free(backend);
}

struct ggml_backend * fake_backend_init(struct fake_dev * dev, const char * params) {
    static int guid;
    (void) params;
    struct ggml_backend * backend = calloc(1, sizeof(*backend));
    struct fake_queue *   queue   = calloc(1, sizeof(*queue));
    const int             device  = fake_index(dev);
    pthread_mutex_init(&queue->mutex, NULL);
    pthread_cond_init(&queue->changed, NULL);
    backend->guid           = &guid;
    backend->device         = dev;
    backend->context        = queue;
    backend->iface.get_name = fake_backend_get_name;
    backend->iface.free     = fake_backend_free;
    if (device == FAKE_CPU || device == FAKE_ACCEL) {
        backend->iface.graph_compute = fake_cpu_compute;
        if (device == FAKE_CPU) {
            backend->iface.graph_plan_create  = fake_plan_create;
            backend->iface.graph_plan_free    = fake_plan_free;
            backend->iface.graph_plan_compute = fake_cpu_plan_compute;
#ifdef FAKE_NULL_PATTERN
            backend->iface.synchronize = fake_synchronize;
#endif
        }
    } else {
        backend->iface.set_tensor_async = fake_set_async;
        backend->iface.get_tensor_async = fake_host.no_get_async ? NULL : fake_get_async;
        backend->iface.cpy_tensor_async = fake_cpy_async;
        backend->iface.synchronize      = fake_synchronize;
        backend->iface.graph_compute    = fake_device_compute;
        queue->threaded                 = fake_host.threaded;
        if (queue->threaded) {
            pthread_create(&queue->worker, NULL, fake_worker, queue);
        }
    }
    backend->pristine = backend->iface;
    FAKE_ADD(fake_host.n_backends, 1);
    return backend;
}

//
// What the scheduler does. Slots are loaded once and atomically: ggml-async may be changing them on another thread.
//

#define FAKE_SLOT(backend, slot) __atomic_load_n(&(backend)->iface.slot, __ATOMIC_ACQUIRE)

static void fake_do_synchronize(struct ggml_backend * backend) {
    void (*synchronize)(struct ggml_backend *) = FAKE_SLOT(backend, synchronize);
    if (synchronize) {
        synchronize(backend);
    }
}

static bool fake_ask(struct ggml_backend * src_backend, struct ggml_backend * dst_backend, const struct ggml_tensor * src, struct ggml_tensor * dst) {
    bool (*cpy)(struct ggml_backend *, struct ggml_backend *, const struct ggml_tensor *, struct ggml_tensor *) = FAKE_SLOT(dst_backend, cpy_tensor_async);
    return cpy && cpy(src_backend, dst_backend, src, dst);
}

static void fake_input(struct ggml_backend * src_backend, struct ggml_backend * dst_backend, const struct ggml_tensor * src, struct ggml_tensor * dst) {
    fake_do_synchronize(dst_backend);
    if (fake_ask(src_backend, dst_backend, src, dst)) {
        return;
    }
    fake_do_synchronize(src_backend);
    fake_do_synchronize(dst_backend);
    FAKE_ADD(fake_host.n_sync_copies, 1);
    fake_copy(src, dst);
}

static int fake_compute(struct ggml_backend * backend, struct ggml_cgraph * graph) {
    return FAKE_SLOT(backend, graph_compute)(backend, graph);
}

static int fake_plan_compute(struct ggml_backend * backend, struct ggml_cgraph * graph) {
    return FAKE_SLOT(backend, graph_plan_compute)(backend, graph);
}

static void fake_do_set_async(struct ggml_backend * backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    FAKE_SLOT(backend, set_tensor_async)(backend, tensor, data, offset, size);
}

static void fake_do_free(struct ggml_backend * backend) {
    FAKE_SLOT(backend, free)(backend);
}

static struct ggml_backend * fake_backend_new(int device) {
    struct fake_dev * dev = &fake_devs[device];
    struct ggml_backend * (*init)(struct fake_dev *, const char *) = __atomic_load_n(&dev->init_backend, __ATOMIC_ACQUIRE);
    return init(dev, NULL);
}

static uint32_t fake_backend_diff(struct ggml_backend * backend) {
    void ** now      = (void **) &backend->iface;
    void ** pristine = (void **) &backend->pristine;
    uint32_t mask = 0;
    for (int i = 0; i < FAKE_N_SLOTS; i++) {
        mask |= __atomic_load_n(&now[i], __ATOMIC_ACQUIRE) != pristine[i] ? 1u << i : 0;
    }
    return mask;
}

static bool fake_slot_is_null(struct ggml_backend * backend, const char * slot) {
    return !strcmp(slot, "synchronize") ? !FAKE_SLOT(backend, synchronize) : !FAKE_SLOT(backend, cpy_tensor_async);
}

void fake_backend_functions(struct fake * host) {
    host->backend_new  = fake_backend_new;
    host->backend_free = fake_do_free;
    host->set_async    = fake_do_set_async;
    host->synchronize  = fake_do_synchronize;
    host->input        = fake_input;
    host->ask          = fake_ask;
    host->compute      = fake_compute;
    host->plan_compute = fake_plan_compute;
    host->backend_diff = fake_backend_diff;
    host->slot_is_null = fake_slot_is_null;
}
