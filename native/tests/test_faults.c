// What befalls a process: forks, signals, unloading, many contexts, long lives. docs/faults.md lists all of them with the
// tests that hold each.

#include "world.h"

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { READBACKS = 100*1000, CONTEXT_SPLITS = 50, FORKS = 20 };
#else
enum { READBACKS = 1000*1000, CONTEXT_SPLITS = 200, FORKS = 100 };
#endif

enum { CONTEXTS = 16, INPUTS = 36 };

static struct fake * fake;
static _Atomic(bool) stop;

static void split(struct world * w, int n_gpus, int n, int value) {
    for (int i = 0; i < n; i++) {
        world_fill(w, i % n_gpus, i, (uint8_t) (value + i));
    }
    for (int i = 0; i < n; i++) {
        world_input(w, i % n_gpus, i);
    }
    world_compute(w);
    for (int i = 0; i < n; i++) {
        CHECK_SEEN(w, i, value + i);
    }
}

//
// Many at once
//

static void * context(void * arg) {
    struct world * w = calloc(1, sizeof(*w));
    w->fake = fake;
    world_backends(w, 2, FAKE_GPU0);
    for (int i = 0; i < CONTEXT_SPLITS; i++) {
        split(w, 2, 6, (int) (intptr_t) arg + i);
    }
    world_free(w);
    free(w);
    return NULL;
}

static void sixteen_contexts_decode_in_sixteen_threads(void) {
    world_log_capture();
    fake = world_fake("api2", 0);
    fake->threaded = true;
    CHECK(fake->load_plugin(PLUGIN_PATH));
    pthread_t threads[CONTEXTS];
    for (int i = 0; i < CONTEXTS; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, context, (void *) (intptr_t) (i*8)), 0);
    }
    for (int i = 0; i < CONTEXTS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_COUNTER(0, "readbacks", CONTEXTS*CONTEXT_SPLITS*6);
    CHECK_COUNTER(0, "stages", CONTEXTS*CONTEXT_SPLITS);
    CHECK_COUNTER(0, "stock", 0);
    CHECK_INT(world_counter(0, "direct") + world_counter(0, "bounce"), CONTEXTS*CONTEXT_SPLITS*6);
    CHECK_INT(fake->n_backends, 0);
    CHECK_INT(fake->n_buffers, 0);
    CHECK_INT(fake->n_gets_lost, 0);
}

// Two schedulers, as two llama contexts that a program gave the same CPU backend: one after the other, and one's inputs
// between the other's inputs and compute. Whoever computes first waits for both.
static void two_schedulers_share_one_cpu_backend(void) {
    struct world w;
    world_open(&w, 2, FAKE_GPU0);
    split(&w, 2, 8, 1);
    for (int round = 0; round < 20; round++) {
        struct ggml_cgraph graphs[2] = { 0 };
        for (int i = 0; i < 4; i++) {
            world_fill(&w, 0, i, (uint8_t) (round + i));
            world_fill(&w, 1, 4 + i, (uint8_t) (100 + round + i));
        }
        for (int k = 0; k < 2; k++) {
            for (int i = 4*k; i < 4*k + 4; i++) {
                world_input(&w, k, i);
            }
            graphs[k]        = w.graph;
            w.graph.n_reads  = 0;
        }
        memset(w.seen, 0, sizeof(w.seen));
        const int first = round % 2;
        CHECK_INT(w.fake->compute(w.cpu, &graphs[first]), 0);
        CHECK_INT(w.fake->compute(w.cpu, &graphs[!first]), 0);
        for (int i = 0; i < 4; i++) {
            CHECK_SEEN(&w, i, round + i);
            CHECK_SEEN(&w, 4 + i, 100 + round + i);
        }
    }
    world_close(&w);
}

static void * backend_maker(void * arg) {
    (void) arg;
    while (!stop) {
        struct ggml_backend * gpu = fake->backend_new(FAKE_GPU0);
        struct ggml_backend * cpu = fake->backend_new(FAKE_CPU);
        fake->backend_free(gpu);
        fake->backend_free(cpu);
    }
    return NULL;
}

static void attaching_while_others_create_backends(void) {
    world_log_capture();
    fake = world_fake("api2", 0);
    CHECK(fake->load_plugin(PLUGIN_PATH));
    CHECK_INT(ggml_async_detach(0), GGML_ASYNC_OK);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, backend_maker, NULL), 0);
    }
    for (int i = 0; i < 300; i++) {
        CHECK_INT(ggml_async_attach(world_path("api2")), 0);
        const int status = ggml_async_detach(0);
        CHECK(status == GGML_ASYNC_OK || status == GGML_ASYNC_ERR_BUSY);
    }
    stop = true;
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_INT(ggml_async_detach(0), GGML_ASYNC_OK);
    for (int i = 0; i < FAKE_N_DEVICES; i++) {
        CHECK_INT(fake->device_diff(i), 0);
    }
    CHECK_INT(fake->n_backends, 0);
    // and it still works
    struct world w = { .fake = fake };
    CHECK_INT(ggml_async_attach(world_path("api2")), 0);
    world_backends(&w, 2, FAKE_GPU0);
    split(&w, 2, 8, 1);
    CHECK(world_counter(0, "bounce") >= 4);
    world_close(&w);
}

//
// Processes
//

static void * lock_holder(void * arg) {
    (void) arg;
    for (int i = 0; !stop; i++) {
        ggml_async_set_mode(0, i % 3);
    }
    return NULL;
}

// A fork takes the calling thread alone along: a lock that another one holds is never given back in the child.
static void a_child_of_fork_can_use_the_host_whatever_other_threads_did(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    fake = w.fake;
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, lock_holder, NULL), 0);
    for (int i = 0; i < FORKS; i++) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(20);
            struct world own = { .fake = fake };
            world_backends(&own, 1, FAKE_GPU0);
            split(&own, 1, 4, i);
            _exit(0);
        }
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK_INT(status, 0);
    }
    stop = true;
    pthread_join(thread, NULL);
    split(&w, 1, 4, 9);
    world_close(&w);
}

static void a_fork_in_the_middle_of_a_stage_leaves_the_parents_reads_alone(void) {
    struct world w;
    world_open(&w, 2, FAKE_GPU0);
    for (int i = 0; i < 6; i++) {
        world_fill(&w, i % 2, i, (uint8_t) (i + 1));
        world_input(&w, i % 2, i);
    }
    const pid_t child = fork();
    if (child == 0) {
        execl("/bin/sh", "sh", "-c", "exit 7", (char *) NULL);
        _exit(1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_INT(WEXITSTATUS(status), 7);
    world_compute(&w);
    for (int i = 0; i < 6; i++) {
        CHECK_SEEN(&w, i, i + 1);
    }
    world_close(&w);
}

static void a_process_stopped_in_the_middle_goes_on(void) {
    int ready[2];
    CHECK_INT(pipe(ready), 0);
    const pid_t child = fork();
    if (child == 0) {
        struct world w;
        world_open(&w, 2, FAKE_GPU0);
        for (int i = 0; i < 6; i++) {
            world_fill(&w, i % 2, i, (uint8_t) (i + 1));
            world_input(&w, i % 2, i);
        }
        CHECK_INT(write(ready[1], "x", 1), 1);
        raise(SIGSTOP);     // reads are queued
        world_compute(&w);
        for (int i = 0; i < 6; i++) {
            CHECK_SEEN(&w, i, i + 1);
        }
        split(&w, 2, 8, 1);
        world_close(&w);
        exit(0);
    }
    char x;
    CHECK_INT(read(ready[0], &x, 1), 1);
    int status = -1;
    CHECK(waitpid(child, &status, WUNTRACED) == child);
    CHECK(WIFSTOPPED(status));
    kill(child, SIGCONT);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_INT(status, 0);
}

// Hosts may dlclose what they loaded from GGML_BACKEND_PATH; their backends point into it.
static void unloading_the_plug_in_leaves_it_in_place(void) {
    world_log_capture();
    fake = world_fake("api2", 0);
    void * handle = dlopen(SECOND_COPY_PATH, RTLD_NOW | RTLD_LOCAL);
    CHECK(handle);
    int (*attach)(const char * library);
    int (*counters)(int host, uint64_t * values, int n);
    *(void **) &attach   = dlsym(handle, "ggml_async_attach");
    *(void **) &counters = dlsym(handle, "ggml_async_counters");
    CHECK_INT(attach(world_path("api2")), 0);
    struct world w = { .fake = fake };
    world_backends(&w, 2, FAKE_GPU0);
    CHECK_INT(dlclose(handle), 0);
    CHECK(dlopen(SECOND_COPY_PATH, RTLD_NOW | RTLD_NOLOAD));
    split(&w, 2, 8, 1);
    uint64_t values[64];
    CHECK(counters(0, values, 64) > 0);
    CHECK_TEXT(ggml_async_counter_name(0), "readbacks");
    CHECK_INT(values[0], 8);
    world_close(&w);
}

//
// A long life
//

static long resident_kb(void) {
    FILE * file = fopen("/proc/self/statm", "r");
    long pages = 0;
    CHECK(file && fscanf(file, "%*s %ld", &pages) == 1);
    fclose(file);
    return pages*(sysconf(_SC_PAGESIZE)/1024);
}

static int open_files(void) {
    DIR * dir = opendir("/proc/self/fd");
    int n = 0;
    CHECK(dir);
    while (readdir(dir)) {
        n++;
    }
    closedir(dir);
    return n;
}

static double seconds(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double) ts.tv_sec + 1e-9*(double) ts.tv_nsec;
}

// A day of a busy server in short: records are taken and read now and then, nothing grows.
static void a_million_readbacks_leave_nothing_behind(void) {
    struct world w;
    world_open(&w, 2, FAKE_GPU0);
    CHECK_INT(ggml_async_record_start(4096), GGML_ASYNC_OK);
    static struct ggml_async_record records[256];
    const int n_splits = READBACKS/INPUTS + 1, warm = n_splits/10;
    long   kb = 0;
    int    n_files = 0, n_buffers = 0, n_allocs = 0;
    double t = seconds(), t_first = 0, t_last = 0;
    for (int i = 0; i < n_splits; i++) {
        split(&w, 2, INPUTS, i);
        if (i % 64 == 0) {
            ggml_async_record_read(records, 256);
        }
        if (i == warm) {
            kb        = resident_kb();
            n_files   = open_files();
            n_buffers = w.fake->n_buffers;
            n_allocs  = w.fake->n_pinned_allocs;
            t_first   = seconds() - t;
        }
        if (i == n_splits - warm - 2) {
            t = seconds();
        }
    }
    t_last = seconds() - t;
    CHECK_COUNTER(w.host, "readbacks", (long long) n_splits*INPUTS);
    CHECK_COUNTER(w.host, "stock", 0);
    CHECK_INT(open_files(), n_files);
    CHECK_INT(w.fake->n_buffers, n_buffers);
    CHECK_INT(w.fake->n_pinned_allocs, n_allocs);
    const long grown = resident_kb() - kb;
    printf("     %d readbacks: %ld kB more resident, first tenth %.2f s, last tenth %.2f s\n", n_splits*INPUTS, grown, t_first, t_last);
    CHECK(grown < 1024);
    world_close(&w);
}

static const struct test tests[] = {
    TEST(sixteen_contexts_decode_in_sixteen_threads),
    TEST(two_schedulers_share_one_cpu_backend),
    TEST(attaching_while_others_create_backends),
    TEST(a_child_of_fork_can_use_the_host_whatever_other_threads_did),
    TEST(a_fork_in_the_middle_of_a_stage_leaves_the_parents_reads_alone),
    TEST(a_process_stopped_in_the_middle_goes_on),
    TEST(unloading_the_plug_in_leaves_it_in_place),
    TEST(a_million_readbacks_leave_nothing_behind),
};

TEST_MAIN(tests)
