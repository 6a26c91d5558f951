#include "world.h"

#include <dlfcn.h>
#include <pthread.h>

#ifndef WORLD_DIR
#    error "WORLD_DIR is where the fake hosts are built"
#endif

static pthread_mutex_t world_mutex = PTHREAD_MUTEX_INITIALIZER;
static char            world_text[65536];

const char * world_path(const char * variant) {
    static _Thread_local char paths[4][4096];
    static _Thread_local int  k;
    char * path = paths[k++ % 4];
    snprintf(path, sizeof(paths[0]), "%s/libfake-ggml-%s.so", WORLD_DIR, variant);
    return path;
}

struct fake * world_fake(const char * variant, int flags) {
    void * handle = dlopen(world_path(variant), flags ? flags : RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    struct fake * (*control)(void);
    *(void **) &control = dlsym(handle, "fake_control");
    return control();
}

void world_backends(struct world * w, int n_gpus, int pinned_by) {
    struct fake * fake = w->fake;
    w->cpu = fake->backend_new(FAKE_CPU);
    w->cpu_buffer = fake->buffer_new(pinned_by == WORLD_UNPINNED ? fake->buft(FAKE_CPU) : fake->pinned_buft(pinned_by),
                                     WORLD_SLOTS*WORLD_BYTES, FAKE_USAGE_COMPUTE);
    for (int i = 0; i < WORLD_SLOTS; i++) {
        char name[32];
        snprintf(name, sizeof(name), "copy-%d", i);
        w->dst[i] = fake->tensor_new(w->cpu_buffer, name, (size_t) i*WORLD_BYTES, WORLD_BYTES/4, 1);
    }
    for (int g = 0; g < n_gpus; g++) {
        w->gpu[g]        = fake->backend_new(FAKE_GPU0 + g);
        w->gpu_buffer[g] = fake->buffer_new(fake->buft(FAKE_GPU0 + g), WORLD_SLOTS*WORLD_BYTES, FAKE_USAGE_COMPUTE);
        for (int i = 0; i < WORLD_SLOTS; i++) {
            char name[32];
            snprintf(name, sizeof(name), "ffn_norm-%d", i);
            w->src[g][i] = fake->tensor_new(w->gpu_buffer[g], name, (size_t) i*WORLD_BYTES, WORLD_BYTES/4, 1);
        }
    }
}

void world_open(struct world * w, int n_gpus, int pinned_by) {
    memset(w, 0, sizeof(*w));
    world_log_capture();
    w->fake = world_fake("api2", 0);
    CHECK(w->fake->load_plugin(PLUGIN_PATH));
    w->host = ggml_async_attach(world_path("api2"));
    CHECK_INT(w->host, 0);
    world_backends(w, n_gpus, pinned_by);
}

void world_free_backend(struct ggml_backend ** backend, struct fake * fake) {
    if (*backend) {
        fake->backend_free(*backend);
        *backend = NULL;
    }
}

void world_free(struct world * w) {
    struct fake * fake = w->fake;
    for (int g = 0; g < WORLD_GPUS; g++) {
        world_free_backend(&w->gpu[g], fake);
    }
    world_free_backend(&w->cpu, fake);
    for (int g = 0; g < WORLD_GPUS; g++) {
        for (int i = 0; i < WORLD_SLOTS; i++) {
            fake->tensor_free(w->src[g][i]);
        }
        if (w->gpu_buffer[g]) {
            fake->buffer_free(w->gpu_buffer[g]);
        }
    }
    for (int i = 0; i < WORLD_SLOTS; i++) {
        fake->tensor_free(w->dst[i]);
    }
    if (w->cpu_buffer) {
        fake->buffer_free(w->cpu_buffer);
    }
    memset(w, 0, sizeof(*w));
}

void world_close(struct world * w) {
    struct fake * fake = w->fake;
    world_free(w);
    CHECK_INT(fake->n_backends, 0);
    CHECK_INT(fake->n_buffers, 0);
    CHECK_INT(fake->n_gets_lost, 0);
    CHECK_INT(fake->n_gets_unpinned, 0);
}

void world_fill(struct world * w, int gpu, int slot, uint8_t value) {
    struct ggml_cgraph graph = { .n_writes = 1, .writes = { w->src[gpu][slot] }, .values = { value } };
    CHECK_INT(w->fake->compute(w->gpu[gpu], &graph), 0);
}

void world_input(struct world * w, int gpu, int slot) {
    memset(w->fake->tensor_data(w->dst[slot]), WORLD_POISON, WORLD_BYTES);
    const int k = w->graph.n_reads++;
    w->graph.reads[k] = w->dst[slot];
    w->graph.seen[k]  = w->seen[slot];
    w->fake->input(w->gpu[gpu], w->cpu, w->src[gpu][slot], w->dst[slot]);
}

void world_compute(struct world * w) {
    memset(w->seen, 0, sizeof(w->seen));
    CHECK_INT(w->fake->compute(w->cpu, &w->graph), 0);
    w->graph.n_reads = 0;
}

bool world_is(const void * data, uint8_t value, size_t size) {
    const uint8_t * p = data;
    for (size_t i = 0; i < size; i++) {
        if (p[i] != value) {
            fprintf(stderr, "byte %zu is 0x%02x, not 0x%02x\n", i, p[i], value);
            return false;
        }
    }
    return true;
}

uint64_t world_counter(int host, const char * name) {
    uint64_t values[256];
    const int n = ggml_async_counters(host, values, 256);
    for (int i = 0; i < n; i++) {
        if (!strcmp(ggml_async_counter_name(i), name)) {
            return values[i];
        }
    }
    fprintf(stderr, "no counter %s\n", name);
    exit(1);
}

static void world_log_line(int level, const char * text, void * user_data) {
    (void) level;
    (void) user_data;
    pthread_mutex_lock(&world_mutex);
    strncat(world_text, text, sizeof(world_text) - strlen(world_text) - 1);
    pthread_mutex_unlock(&world_mutex);
}

void world_log_capture(void) {
    world_text[0] = 0;
    ggml_async_log_set(world_log_line, NULL);
}

const char * world_log(void) {
    return world_text;
}

int world_log_count(const char * part) {
    int n = 0;
    for (const char * p = world_text; (p = strstr(p, part)); p += strlen(part)) {
        n++;
    }
    return n;
}
