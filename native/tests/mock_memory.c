// Memory of the mock devices: ordinary memory that says it is not host memory, and pinned host memory, which says it is.
// Blocks that were freed are kept for a while, full of a pattern, so that a late reader or writer is seen.

#include "mock_internal.h"

#include <stdlib.h>
#include <string.h>

enum { MOCK_ALIGNMENT = 64, MOCK_MAX_FREED = 256, MOCK_FREED_BYTES = 32*1024*1024 };

struct mock_block {
    struct mock_block * next;       // towards older ones
    char              * base;
    size_t              size;
};

static pthread_mutex_t     mock_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct mock_block * mock_freed;      // newest first

static struct mock_block * mock_block_new(size_t size) {
    struct mock_block * block = calloc(1, sizeof(*block));
    void * base = NULL;
    if (!block || posix_memalign(&base, MOCK_ALIGNMENT, size ? size : 1)) {
        mock_die("out of memory");
    }
    block->base = base;
    block->size = size ? size : 1;
    memset(block->base, MOCK_POISON, block->size);      // nothing was ever written here
    return block;
}

static void mock_block_free(struct mock_block * block) {
    memset(block->base, MOCK_FREED, block->size);
    pthread_mutex_lock(&mock_mutex);
    block->next = mock_freed;
    mock_freed  = block;
    int    n     = 0;
    size_t bytes = 0;
    for (struct mock_block ** link = &mock_freed; *link;) {
        struct mock_block * old = *link;
        bytes += old->size;
        if (++n <= MOCK_MAX_FREED && bytes <= MOCK_FREED_BYTES) {
            link = &old->next;
            continue;
        }
        *link = old->next;
        free(old->base);
        free(old);
    }
    pthread_mutex_unlock(&mock_mutex);
}

bool mock_memory_freed(const void * data, size_t size) {
    const char * begin = data;
    bool found = false;
    pthread_mutex_lock(&mock_mutex);
    for (const struct mock_block * block = mock_freed; block && !found; block = block->next) {
        found = begin < block->base + block->size && begin + size > block->base;
    }
    pthread_mutex_unlock(&mock_mutex);
    return found;
}

//
// Buffers. Their copies happen at once and wait for nothing: that is the caller's business, as on a real device.
//

// Behind the interface: the buffer type, then the context.
static struct mock_block * mock_buffer_block(ggml_backend_buffer_t buffer) {
    return ga_words(buffer)[MOCK_BUFFER_SLOTS + 1];
}

static void mock_buffer_free(ggml_backend_buffer_t buffer) {
    mock_block_free(mock_buffer_block(buffer));
}

static void * mock_buffer_get_base(ggml_backend_buffer_t buffer) {
    return mock_buffer_block(buffer)->base;
}

static char * mock_tensor_data(const struct ggml_tensor * tensor) {
    return ga_tensor(tensor)->data;
}

static void mock_buffer_memset(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    (void) buffer;
    memset(mock_tensor_data(tensor) + offset, value, size);
}

static void mock_buffer_set(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    (void) buffer;
    memcpy(mock_tensor_data(tensor) + offset, data, size);
}

static void mock_buffer_get(ggml_backend_buffer_t buffer, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    (void) buffer;
    memcpy(data, mock_tensor_data(tensor) + offset, size);
}

static bool mock_buffer_cpy(ggml_backend_buffer_t buffer, const struct ggml_tensor * src, struct ggml_tensor * dst) {
    (void) buffer;
    ggml_backend_buffer_t from = ga_tensor_buffer(src);
    const bool ours = ga_words(from)[0] == (void *) mock_buffer_free;
    if (ours || mock_host.ggml_backend_buffer_is_host(from)) {
        memmove(mock_tensor_data(dst), mock_tensor_data(src), mock_host.ggml_nbytes(src));
        return true;
    }
    return false;
}

static void mock_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    memset(mock_buffer_block(buffer)->base, value, mock_buffer_block(buffer)->size);
}

const struct mock_buffer_iface mock_device_buffer = { {
    /* free_buffer   */ (void *) mock_buffer_free,
    /* get_base      */ (void *) mock_buffer_get_base,
    /* init_tensor   */ NULL,
    /* memset_tensor */ (void *) mock_buffer_memset,
    /* set_tensor    */ (void *) mock_buffer_set,
    /* get_tensor    */ (void *) mock_buffer_get,
    /* set_tensor_2d */ NULL,
    /* get_tensor_2d */ NULL,
    /* cpy_tensor    */ (void *) mock_buffer_cpy,
    /* clear         */ (void *) mock_buffer_clear,
    /* reset         */ NULL,
} };

//
// Buffer types
//

// Behind the interface, whose length depends on the API.
static struct mock_device * mock_type_device(ggml_backend_buffer_type_t buft) {
    return ga_words(buft)[mock_host.api_version == 2 ? 6 : 8];
}

static const char * mock_memory_name(ggml_backend_buffer_type_t buft) {
    return mock_type_device(buft)->name;
}

static const char * mock_pinned_name(ggml_backend_buffer_type_t buft) {
    return mock_type_device(buft)->host_name;
}

static ggml_backend_buffer_t mock_buffer_new(ggml_backend_buffer_type_t buft, size_t size) {
    return mock_host.ggml_backend_buffer_init(buft, mock_device_buffer, mock_block_new(size), size);
}

static ggml_backend_buffer_t mock_pinned_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    if (MOCK_OPTION(mock_type_device(buft)->index, pinned_falls_back)) {
        return mock_host.ggml_backend_buft_alloc_buffer(mock_host.ggml_backend_dev_buffer_type(mock_host.cpu), size);
    }
    return mock_buffer_new(buft, size);
}

static size_t mock_alignment(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return MOCK_ALIGNMENT;
}

static bool mock_is_host(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return true;
}

static void mock_type_init(struct mock_buffer_type * type, struct mock_device * device, void * get_name, void * alloc, void * is_host) {
    const bool api2 = mock_host.api_version == 2;
    memset(type, 0, sizeof(*type));
    type->words[0]            = get_name;
    type->words[1]            = alloc;
    type->words[api2 ? 2 : 3] = (void *) mock_alignment;
    type->words[api2 ? 5 : 7] = is_host;
    type->words[api2 ? 6 : 8] = device;
}

void mock_memory_init(struct mock_device * device) {
    mock_type_init(&device->memory, device, (void *) mock_memory_name, (void *) mock_buffer_new, NULL);
    mock_type_init(&device->pinned, device, (void *) mock_pinned_name, (void *) mock_pinned_alloc, (void *) mock_is_host);
}
