// The synthetic host's registry, buffers and tensors, and the public functions that ggml-async resolves by name.

#include "fake_internal.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT(ret, name, args) __attribute__((visibility("default"))) ret name args; ret name args

enum { FAKE_TYPE_CPU, FAKE_TYPE_GPU, FAKE_TYPE_IGPU, FAKE_TYPE_ACCEL, FAKE_TYPE_META };

// Device memory "starts" here: nothing is mapped at it, so whoever takes it for host memory crashes.
#define FAKE_DEVICE_BASE ((char *) (uintptr_t) 0x10000)

struct fake fake_host;

static struct fake_reg  fake_reg = { .api_version = FAKE_API };
static struct fake_dev  fake_pristine_devs[FAKE_N_DEVICES];
static struct ggml_backend_buffer_type fake_bufts[FAKE_N_DEVICES], fake_pinned_bufts[FAKE_N_DEVICES];
static struct ggml_backend_buffer * fake_buffers;
static pthread_mutex_t  fake_mutex = PTHREAD_MUTEX_INITIALIZER;

static const char * fake_get_name(struct fake_dev * dev);
static const char * fake_get_description(struct fake_dev * dev);
static int          fake_get_type(struct fake_dev * dev);
static void         fake_get_memory(struct fake_dev * dev, size_t * free_bytes, size_t * total);

#ifdef FAKE_SHIFT_DEVICE
#    define FAKE_SHIFTED .shift = "shifted",
#else
#    define FAKE_SHIFTED
#endif
#define FAKE_DEV { FAKE_SHIFTED .get_name = fake_get_name, .get_description = fake_get_description, .get_memory = fake_get_memory, \
                   .get_type = fake_get_type, .init_backend = fake_backend_init, .reg = &fake_reg }

struct fake_dev fake_devs[FAKE_N_DEVICES] = { FAKE_DEV, FAKE_DEV, FAKE_DEV, FAKE_DEV, FAKE_DEV, FAKE_DEV, FAKE_DEV };

int fake_index(const struct fake_dev * dev) {
    return (int) (dev - fake_devs);
}

static const char * fake_get_name(struct fake_dev * dev) {
    static const char * const names[FAKE_N_DEVICES] = { "Fake0", "Fake1", "Fake2", "ACC", "Meta", "CPU", "Late" };
    return names[fake_index(dev)];
}

static const char * fake_get_description(struct fake_dev * dev) {
    return fake_get_name(dev);
}

static void fake_get_memory(struct fake_dev * dev, size_t * free_bytes, size_t * total) {
    (void) dev;
    *free_bytes = *total = 0;
}

static int fake_get_type(struct fake_dev * dev) {
    switch (fake_index(dev)) {
        case FAKE_ACCEL: return FAKE_TYPE_ACCEL;
        case FAKE_META:  return FAKE_TYPE_META;
#ifndef FAKE_NO_CPU
        case FAKE_CPU:   return FAKE_TYPE_CPU;
#endif
        default:         return FAKE_TYPE_GPU;
    }
}

//
// Registry
//

EXPORT(size_t, ggml_backend_dev_count, (void)) {
    return fake_host.late ? FAKE_N_DEVICES : FAKE_LATE;
}

EXPORT(struct fake_dev *, ggml_backend_dev_get, (size_t index)) {
    return &fake_devs[index];
}

EXPORT(const char *, ggml_backend_dev_name, (struct fake_dev * dev)) {
    return dev->get_name(dev);
}

EXPORT(int, ggml_backend_dev_type, (struct fake_dev * dev)) {
    return dev->get_type(dev);
}

EXPORT(struct fake_reg *, ggml_backend_dev_backend_reg, (struct fake_dev * dev)) {
    return dev->reg;
}

EXPORT(struct ggml_backend *, ggml_backend_dev_init, (struct fake_dev * dev, const char * params)) {
    return dev->init_backend(dev, params);
}

EXPORT(struct ggml_backend_buffer_type *, ggml_backend_dev_buffer_type, (struct fake_dev * dev)) {
    const int device = fake_index(dev);
    return &fake_bufts[device == FAKE_ACCEL ? FAKE_CPU : device];
}

EXPORT(struct ggml_backend_buffer_type *, ggml_backend_dev_host_buffer_type, (struct fake_dev * dev)) {
    const int device = fake_index(dev);
    if (device == FAKE_CPU || device == FAKE_ACCEL || fake_host.pinned[device] == FAKE_PINNED_NONE) {
        return NULL;
    }
    return &fake_pinned_bufts[fake_host.pinned[device] == FAKE_PINNED_FIRST ? FAKE_GPU0 : device];
}

EXPORT(const char *, ggml_backend_name, (struct ggml_backend * backend)) {
    return backend->iface.get_name(backend);
}

EXPORT(void, ggml_backend_free, (struct ggml_backend * backend)) {
    fake_host.backend_free(backend);
}

#ifndef FAKE_MISSING
EXPORT(void *, ggml_backend_guid, (struct ggml_backend * backend)) {
    return backend->guid;
}
#endif

EXPORT(struct fake_dev *, ggml_backend_get_device, (struct ggml_backend * backend)) {
    return backend->device;
}

EXPORT(struct ggml_backend_buffer_type *, ggml_backend_get_default_buffer_type, (struct ggml_backend * backend)) {
    return ggml_backend_dev_buffer_type(backend->device);
}

EXPORT(void, ggml_backend_synchronize, (struct ggml_backend * backend)) {
    fake_host.synchronize(backend);
}

//
// Buffers
//

EXPORT(struct ggml_backend_buffer *, ggml_backend_buft_alloc_buffer, (struct ggml_backend_buffer_type * buft, size_t size)) {
    if (buft->pinned) {
        FAKE_ADD(fake_host.n_pinned_allocs, 1);
        if (fake_host.pinned[buft->device] == FAKE_PINNED_FAILS) {
            return NULL;
        }
        if (fake_host.pinned[buft->device] == FAKE_PINNED_FALLS_BACK) {
            buft = &fake_bufts[FAKE_CPU];
        }
    }
    struct ggml_backend_buffer * buffer = calloc(1, sizeof(*buffer));
    buffer->type   = buft;
    buffer->memory = malloc(size ? size : 1);
    buffer->base   = buft->host ? buffer->memory : FAKE_DEVICE_BASE;
    buffer->size   = size;
    FAKE_ADD(fake_host.n_buffers, 1);
    if (buft->pinned) {
        FAKE_ADD(fake_host.n_pinned_buffers[buft->device], 1);
    }
    pthread_mutex_lock(&fake_mutex);
    buffer->next = fake_buffers;
    fake_buffers = buffer;
    pthread_mutex_unlock(&fake_mutex);
    return buffer;
}

EXPORT(void, ggml_backend_buffer_free, (struct ggml_backend_buffer * buffer)) {
    FAKE_ADD(fake_host.n_buffers, -1);
    if (buffer->type->pinned) {
        FAKE_ADD(fake_host.n_pinned_buffers[buffer->type->device], -1);
    }
    pthread_mutex_lock(&fake_mutex);
    struct ggml_backend_buffer ** link = &fake_buffers;
    while (*link != buffer) {
        link = &(*link)->next;
    }
    *link = buffer->next;
    pthread_mutex_unlock(&fake_mutex);
    free(buffer->memory);
    free(buffer);
}

bool fake_is_pinned(int device, const void * data, size_t size) {
    bool found = false;
    const char * p = data;
    pthread_mutex_lock(&fake_mutex);
    for (struct ggml_backend_buffer * b = fake_buffers; b && !found; b = b->next) {
        found = b->type == &fake_pinned_bufts[device] && p >= b->memory && p + size <= b->memory + b->size;
    }
    pthread_mutex_unlock(&fake_mutex);
    return found;
}

EXPORT(size_t, ggml_backend_buft_get_alignment, (struct ggml_backend_buffer_type * buft)) {
    (void) buft;
    return 32;
}

EXPORT(struct fake_dev *, ggml_backend_buft_get_device, (struct ggml_backend_buffer_type * buft)) {
    return &fake_devs[buft->device];
}

EXPORT(struct ggml_backend_buffer_type *, ggml_backend_buffer_get_type, (struct ggml_backend_buffer * buffer)) {
    return buffer->type;
}

EXPORT(void *, ggml_backend_buffer_get_base, (struct ggml_backend_buffer * buffer)) {
    return buffer->base;
}

EXPORT(int, ggml_backend_buffer_get_usage, (struct ggml_backend_buffer * buffer)) {
    return buffer->usage;
}

EXPORT(bool, ggml_backend_buffer_is_host, (struct ggml_backend_buffer * buffer)) {
    return buffer->type->host;
}

//
// Tensors of 4-byte elements
//

EXPORT(size_t, ggml_nbytes, (const struct ggml_tensor * tensor)) {
    size_t n = 4;
    for (int i = 0; i < 4; i++) {
        if (tensor->ne[i] == 0) {
            return 0;
        }
        n += (size_t) (tensor->ne[i] - 1)*tensor->nb[i];
    }
    return n;
}

EXPORT(const char *, ggml_get_name, (const struct ggml_tensor * tensor)) {
    return tensor->name;
}

static void fake_shape(struct ggml_tensor * tensor, int64_t ne0, int64_t ne1, size_t nb1) {
    tensor->ne[0] = ne0;
    tensor->ne[1] = ne1;
    tensor->ne[2] = tensor->ne[3] = 1;
    tensor->nb[0] = 4;
    tensor->nb[1] = nb1;
    tensor->nb[2] = tensor->nb[3] = nb1*(size_t) ne1;
}

struct ggml_context {
    struct ggml_tensor tensors[8];
    int                n;
};

struct fake_init_params {
    size_t mem_size;
    void * mem_buffer;
    bool   no_alloc;
};

EXPORT(struct ggml_context *, ggml_init, (struct fake_init_params params)) {
    return params.no_alloc && !params.mem_buffer ? calloc(1, sizeof(struct ggml_context)) : NULL;
}

EXPORT(void, ggml_free, (struct ggml_context * ctx)) {
    free(ctx);
}

EXPORT(size_t, ggml_tensor_overhead, (void)) {
    return sizeof(struct ggml_tensor);
}

EXPORT(struct ggml_tensor *, ggml_new_tensor_2d, (struct ggml_context * ctx, int type, int64_t ne0, int64_t ne1)) {
    struct ggml_tensor * tensor = &ctx->tensors[ctx->n++];
    tensor->type = type;
    fake_shape(tensor, ne0, ne1, 4*(size_t) ne0);
    return tensor;
}

EXPORT(struct ggml_tensor *, ggml_view_1d, (struct ggml_context * ctx, struct ggml_tensor * a, int64_t ne0, size_t offset)) {
    struct ggml_tensor * tensor = ggml_new_tensor_2d(ctx, a->type, ne0, 1);
    tensor->view_src  = a;
    tensor->view_offs = offset;
    return tensor;
}

EXPORT(int, ggml_backend_tensor_alloc, (struct ggml_backend_buffer * buffer, struct ggml_tensor * tensor, void * addr)) {
    tensor->buffer = buffer;
    tensor->data   = addr;
    return 0;
}

char * fake_storage(const struct ggml_tensor * tensor) {
    return tensor->buffer->memory + ((char *) tensor->data - tensor->buffer->base);
}

EXPORT(void, ggml_backend_tensor_get, (const struct ggml_tensor * tensor, void * data, size_t offset, size_t size)) {
    memcpy(data, fake_storage(tensor) + offset, size);
}

void fake_copy(const struct ggml_tensor * src, struct ggml_tensor * dst) {
    memcpy(fake_storage(dst), fake_storage(src), ggml_nbytes(src));
}

//
// Optional functions
//

#ifndef FAKE_PLAIN
EXPORT(bool, ggml_backend_is_meta, (struct ggml_backend * backend)) {
    return fake_index(backend->device) == FAKE_META;
}

EXPORT(const char *, ggml_version, (void)) {
    return "0.0.fake";
}

EXPORT(void, ggml_log_internal, (int level, const char * format, ...)) __attribute__((format(printf, 2, 3)));
void ggml_log_internal(int level, const char * format, ...) {
    (void) level;
    pthread_mutex_lock(&fake_mutex);
    const size_t used = strlen(fake_host.log);
    va_list args;
    va_start(args, format);
    vsnprintf(fake_host.log + used, sizeof(fake_host.log) - used, format, args);
    va_end(args);
    fake_host.n_logged++;
    pthread_mutex_unlock(&fake_mutex);
}
#endif

//
// Control block
//

// The calls must come from this library, so that the plug-in recognises it: no call here may be a tail call.
static void * fake_load_plugin(const char * path) {
    void * handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        fprintf(stderr, "%s\n", dlerror());
        return NULL;
    }
    int    (*score)(void);
    void * (*init)(void);
    *(void **) &score = dlsym(handle, "ggml_backend_score");
    *(void **) &init  = dlsym(handle, "ggml_backend_init");
    const volatile int points = score ? score() : 1;
    if (points == 0 || !init) {
        return NULL;
    }
    struct fake_reg * volatile reg = init();
    return reg && reg->api_version == FAKE_API ? reg : NULL;
}

static struct ggml_backend_buffer_type * fake_buft(int device) {
    return ggml_backend_dev_buffer_type(&fake_devs[device]);
}

static struct ggml_backend_buffer_type * fake_pinned_buft(int device) {
    return &fake_pinned_bufts[device];
}

static struct ggml_backend_buffer * fake_buffer_new(struct ggml_backend_buffer_type * buft, size_t size, int usage) {
    struct ggml_backend_buffer * buffer = ggml_backend_buft_alloc_buffer(buft, size);
    buffer->usage = usage;
    return buffer;
}

static struct ggml_tensor * fake_tensor_new(struct ggml_backend_buffer * buffer, const char * name, size_t offset, int64_t ne0, int64_t ne1) {
    struct ggml_tensor * tensor = calloc(1, sizeof(*tensor));
    fake_shape(tensor, ne0, ne1, 4*(size_t) ne0);
    tensor->buffer = buffer;
    tensor->data   = buffer ? buffer->base + offset : NULL;
    snprintf(tensor->name, sizeof(tensor->name), "%s", name);
    return tensor;
}

static struct ggml_tensor * fake_tensor_view(struct ggml_tensor * source, const char * name, int64_t ne0, int64_t ne1, size_t nb1, size_t offset) {
    struct ggml_tensor * tensor = fake_tensor_new(source->buffer, name, 0, ne0, ne1);
    fake_shape(tensor, ne0, ne1, nb1);
    tensor->view_src  = source;
    tensor->view_offs = offset;
    tensor->data      = (char *) source->data + offset;
    return tensor;
}

static void fake_tensor_stride(struct ggml_tensor * tensor, size_t nb1) {
    fake_shape(tensor, tensor->ne[0], tensor->ne[1], nb1);
}

static void fake_tensor_free(struct ggml_tensor * tensor) {
    free(tensor);
}

static void * fake_tensor_data(struct ggml_tensor * tensor) {
    return fake_storage(tensor);
}

static uint32_t fake_device_diff(int device) {
    void ** now      = (void **) &fake_devs[device];
    void ** pristine = (void **) &fake_pristine_devs[device];
    uint32_t mask = 0;
    for (size_t i = 0; i < sizeof(struct fake_dev)/sizeof(void *); i++) {
        mask |= __atomic_load_n(&now[i], __ATOMIC_ACQUIRE) != pristine[i] ? 1u << i : 0;
    }
    return mask;
}

__attribute__((constructor)) static void fake_setup(void) {
    for (int i = 0; i < FAKE_N_DEVICES; i++) {
        fake_bufts[i]        = (struct ggml_backend_buffer_type) { i, i == FAKE_CPU, false };
        fake_pinned_bufts[i] = (struct ggml_backend_buffer_type) { i, true, true };
    }
    memcpy(fake_pristine_devs, fake_devs, sizeof(fake_devs));
    fake_backend_functions(&fake_host);
    fake_host.load_plugin   = fake_load_plugin;
    fake_host.buft          = fake_buft;
    fake_host.pinned_buft   = fake_pinned_buft;
    fake_host.buffer_new    = fake_buffer_new;
    fake_host.buffer_free   = ggml_backend_buffer_free;
    fake_host.tensor_new    = fake_tensor_new;
    fake_host.tensor_view   = fake_tensor_view;
    fake_host.tensor_stride = fake_tensor_stride;
    fake_host.tensor_free   = fake_tensor_free;
    fake_host.tensor_data   = fake_tensor_data;
    fake_host.tensor_nbytes = ggml_nbytes;
    fake_host.device_diff   = fake_device_diff;
}

EXPORT(struct fake *, fake_control, (void)) {
    return &fake_host;
}
