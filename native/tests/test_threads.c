// Many threads at once. Every stage checks what its compute found; sanitizers watch the rest.

#include "world.h"

#include <pthread.h>

#ifndef STAGES
#    define STAGES 500
#endif

enum { THREADS = 8, LIFE = 50, SWITCHES = 60 };

static struct fake *   fake;
static int             host;
static _Atomic(bool)   stop;
static _Atomic(int)    n_switches;
static uint64_t        n_records;

static bool seen_every_path(void) {
    return world_counter(host, "direct") > 0 && world_counter(host, "bounce") > 0 && world_counter(host, "stock") > 0;
}

// Decoders go on until the modes have changed often, at the right moments: on a busy machine that takes longer.
static bool enough(int done) {
    return done >= 200*STAGES || (done >= STAGES && n_switches >= SWITCHES && seen_every_path());
}

// A context as a program has it: its own backends, decoding, freed and made again.
static void * decoder(void * arg) {
    const int number = (int) (intptr_t) arg;
    uint32_t  state  = (uint32_t) number*2654435761u + 1;
    for (int done = 0; !enough(done); done += LIFE) {
        struct world * w = calloc(1, sizeof(*w));
        w->fake = fake;
        w->host = host;
        world_backends(w, 2, number % 3 == 0 ? WORLD_UNPINNED : FAKE_GPU0);
        for (int stage = 0; stage < LIFE; stage++) {
            state = state*1664525 + 1013904223;
            const int n = 1 + (int) (state >> 24) % 6;
            for (int i = 0; i < n; i++) {
                world_fill(w, (number + i) % 2, i, (uint8_t) (state + (uint32_t) i));
            }
            for (int i = 0; i < n; i++) {
                world_input(w, (number + i) % 2, i);
            }
            world_compute(w);
            for (int i = 0; i < n; i++) {
                CHECK_SEEN(w, i, state + (uint32_t) i);
            }
            // a device split follows, with an upload
            fake->input(w->cpu, w->gpu[0], w->dst[0], w->src[0][20]);
            world_fill(w, 0, 21, 1);
        }
        if (number % 4 == 1) {
            world_input(w, 0, 0);   // freed with a stage open
        }
        world_free(w);
        free(w);
    }
    return NULL;
}

static void * mode_switcher(void * arg) {
    const bool detach = arg != NULL;
    struct ggml_async_record records[64];
    for (int i = 0; !stop; i++) {
        if (detach && i % 5 == 0) {
            const int status = ggml_async_detach(host);
            CHECK(status == GGML_ASYNC_OK || status == GGML_ASYNC_ERR_BUSY);
            CHECK_INT(ggml_async_attach(world_path("api2")), host);
        }
        CHECK_INT(ggml_async_set_mode(host, i % 3), GGML_ASYNC_OK);
        if (i % 50 == 0) {
            CHECK_INT(ggml_async_record_start(64u << (i/50 % 3)), GGML_ASYNC_OK);
        }
        int n;
        while ((n = ggml_async_record_read(records, 64)) > 0) {
            n_records += (uint64_t) n;
            for (int k = 0; k < n; k++) {
                CHECK(ggml_async_record_kind_name(records[k].kind) && memchr(records[k].name, 0, sizeof(records[k].name)));
            }
        }
        struct ggml_async_host_info info;
        CHECK_INT(ggml_async_host_get(host, &info, sizeof(info)), GGML_ASYNC_OK);
        n_switches++;
        usleep(200);
    }
    return NULL;
}

// THREADS workers beside a thread that switches modes; afterwards nothing is left and no read was lost.
static void run_workers(void * (*worker)(void * arg), bool threaded, bool detach) {
    world_log_capture();
    fake = world_fake("api2", 0);
    fake->threaded = threaded;
    CHECK(fake->load_plugin(PLUGIN_PATH));
    pthread_t threads[THREADS], switcher;
    pthread_create(&switcher, NULL, mode_switcher, detach ? fake : NULL);
    for (int i = 0; i < THREADS; i++) {
        pthread_create(&threads[i], NULL, worker, (void *) (intptr_t) i);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    stop = true;
    pthread_join(switcher, NULL);
    CHECK_INT(fake->n_backends, 0);
    CHECK_INT(fake->n_buffers, 0);
    CHECK_INT(fake->n_gets_lost, 0);
}

static void run_decoders(bool threaded, bool detach) {
    run_workers(decoder, threaded, detach);
    CHECK_INT(fake->n_gets_unpinned, 0);
    CHECK(n_records > 0);
    CHECK(seen_every_path());
    CHECK_INT(ggml_async_detach(host), GGML_ASYNC_OK);
    for (int i = 0; i < FAKE_N_DEVICES; i++) {
        CHECK_INT(fake->device_diff(i), 0);
    }
}

static void eight_threads_decode_while_the_mode_changes(void) {
    run_decoders(false, false);
}

static void eight_threads_decode_on_devices_that_work_on_their_own(void) {
    run_decoders(true, false);
}

static void eight_threads_decode_over_detach_and_attach(void) {
    run_decoders(false, true);
}

// Queues of their own over shared backends' tensors: one thread reads from a device while another's is freed.
static void * reader(void * arg) {
    const int number = (int) (intptr_t) arg;
    uint8_t   data[4][WORLD_BYTES];
    struct ggml_async_queue * queue = ggml_async_queue_new(host);
    for (int round = 0; round < STAGES/10; round++) {
        struct ggml_backend *        backends[2] = { fake->backend_new(FAKE_GPU0), fake->backend_new(FAKE_GPU1) };
        struct ggml_backend_buffer * buffers[2];
        struct ggml_tensor *         tensors[4];
        for (int g = 0; g < 2; g++) {
            buffers[g] = fake->buffer_new(fake->buft(FAKE_GPU0 + g), 2*WORLD_BYTES, FAKE_USAGE_ANY);
        }
        for (int i = 0; i < 4; i++) {
            tensors[i] = fake->tensor_new(buffers[i % 2], "t", (size_t) (i / 2)*WORLD_BYTES, WORLD_BYTES/4, 1);
            memset(fake->tensor_data(tensors[i]), number + round + i, WORLD_BYTES);
            CHECK_INT(ggml_async_read(queue, backends[i % 2], tensors[i], data[i], 0, WORLD_BYTES), GGML_ASYNC_PATH_BOUNCE);
        }
        const bool early = round % 3 == 0;
        if (early) {
            fake->backend_free(backends[0]);
        }
        CHECK_INT(ggml_async_wait(queue), early ? 2 : 4);
        for (int i = early ? 1 : 0; i < 4; i += early ? 2 : 1) {
            CHECK(world_is(data[i], (uint8_t) (number + round + i), WORLD_BYTES));
        }
        if (!early) {
            fake->backend_free(backends[0]);
        }
        fake->backend_free(backends[1]);
        for (int i = 0; i < 4; i++) {
            fake->tensor_free(tensors[i]);
        }
        fake->buffer_free(buffers[0]);
        fake->buffer_free(buffers[1]);
    }
    ggml_async_queue_free(queue);
    return NULL;
}

static void eight_threads_read_through_queues_of_their_own(void) {
    run_workers(reader, false, false);
}

static void * attacher(void * arg) {
    (void) arg;
    for (int i = 0; i < 50; i++) {
        CHECK_INT(ggml_async_attach(world_path("api2")), 0);
        fake->backend_free(fake->backend_new(FAKE_CPU));
    }
    return NULL;
}

static void many_threads_may_attach_at_once(void) {
    world_log_capture();
    fake = world_fake("api2", 0);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        pthread_create(&threads[i], NULL, attacher, NULL);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_INT(ggml_async_host_count(), 1);
    CHECK_INT(world_log_count("attached to"), 1);
    CHECK_INT(fake->n_backends, 0);
}

static const struct test tests[] = {
    TEST(eight_threads_decode_while_the_mode_changes),
    TEST(eight_threads_decode_on_devices_that_work_on_their_own),
    TEST(eight_threads_decode_over_detach_and_attach),
    TEST(eight_threads_read_through_queues_of_their_own),
    TEST(many_threads_may_attach_at_once),
};

TEST_MAIN(tests)
