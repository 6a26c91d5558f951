// Every allocation of the plug-in's fails once, and everything from it on: the program computes what it computed without.
//
// The functions below stand in front of the C library's for the whole process and fail only where the plug-in called.
// Not built under sanitizers, which have allocators of their own; what would leak is counted here instead.

#include "world.h"

#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>

#define EXPORT __attribute__((visibility("default")))

extern void * __libc_malloc(size_t size);
extern void * __libc_calloc(size_t n, size_t size);
extern void * __libc_realloc(void * old, size_t size);
extern void   __libc_free(void * memory);

enum { SPLITS = 3, INPUTS = 36, MAX_ALLOCATIONS = 400 };

struct shared {
    int  n_allocations;     // of the last run
    int  n_left;            // not freed at its end
    bool attached;
    char log[8192];
};

static struct shared * shared;
static uintptr_t       code_start, code_end;    // the plug-in's
static _Atomic(int)    n_allocations, n_alive;
static int             fail_at;                 // 1-based; 0: never
static bool            fail_on;                 // and all that follow

static bool ours(const void * caller) {
    return (uintptr_t) caller >= code_start && (uintptr_t) caller < code_end;
}

static bool fails(void) {
    const int n = atomic_fetch_add(&n_allocations, 1) + 1;
    return fail_at && (n == fail_at || (fail_on && n > fail_at));
}

EXPORT void * malloc(size_t size) {
    if (ours(__builtin_return_address(0))) {
        if (fails()) {
            return NULL;
        }
        n_alive++;
    }
    return __libc_malloc(size);
}

EXPORT void * calloc(size_t n, size_t size) {
    if (ours(__builtin_return_address(0))) {
        if (fails()) {
            return NULL;
        }
        n_alive++;
    }
    return __libc_calloc(n, size);
}

EXPORT void * realloc(void * old, size_t size) {
    if (ours(__builtin_return_address(0))) {
        if (fails()) {
            return NULL;
        }
        n_alive += old == NULL;
    }
    return __libc_realloc(old, size);
}

EXPORT void free(void * memory) {
    if (memory && ours(__builtin_return_address(0))) {
        n_alive--;
    }
    __libc_free(memory);
}

EXPORT char * strdup(const char * text) {
    if (ours(__builtin_return_address(0))) {
        if (fails()) {
            return NULL;
        }
        n_alive++;
    }
    const size_t size = strlen(text) + 1;
    char * copy = __libc_malloc(size);
    return copy ? memcpy(copy, text, size) : NULL;
}

static int find_code(struct dl_phdr_info * info, size_t size, void * user_data) {
    (void) size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) * segment = &info->dlpi_phdr[i];
        const uintptr_t    start   = info->dlpi_addr + segment->p_vaddr;
        const uintptr_t    address = (uintptr_t) user_data;
        if (segment->p_type == PT_LOAD && address >= start && address < start + segment->p_memsz) {
            code_start = start;
            code_end   = start + segment->p_memsz;
        }
    }
    return 0;
}

// A split whose inputs come from two devices (one reads into bounce memory), then a batch of an application's.
static void decode(struct world * w, int split) {
    for (int i = 0; i < INPUTS; i++) {
        world_fill(w, i % 2, i, (uint8_t) (split*INPUTS + i + 1));
    }
    for (int i = 0; i < INPUTS; i++) {
        world_input(w, i % 2, i);
    }
    world_compute(w);
    for (int i = 0; i < INPUTS; i++) {
        CHECK_SEEN(w, i, split*INPUTS + i + 1);
    }
}

static void read_batch(struct world * w) {
    static uint8_t data[WORLD_SLOTS][WORLD_BYTES];
    struct ggml_async_queue * queue = ggml_async_queue_new(w->host);
    if (!queue) {
        CHECK(strstr(ggml_async_last_error(), "no memory"));
        return;
    }
    for (int i = 0; i < WORLD_SLOTS; i++) {
        world_fill(w, i % 2, i, (uint8_t) (i + 3));
        const int path = ggml_async_read(queue, w->gpu[i % 2], w->src[i % 2][i], data[i], 0, WORLD_BYTES);
        CHECK(path == GGML_ASYNC_PATH_BOUNCE || path == GGML_ASYNC_PATH_STOCK);
    }
    CHECK_INT(ggml_async_wait(queue), WORLD_SLOTS);
    for (int i = 0; i < WORLD_SLOTS; i++) {
        CHECK(world_is(data[i], (uint8_t) (i + 3), WORLD_BYTES));
    }
    ggml_async_queue_free(queue);
}

static void program(void) {
    struct world w;
    memset(&w, 0, sizeof(w));
    // not by our own reference to it, which may lead to a table of ours
    dl_iterate_phdr(find_code, dlsym(dlopen(PLUGIN_PATH, RTLD_NOW | RTLD_NOLOAD), "ggml_async_abi_version"));
    CHECK(code_end);
    world_log_capture();
    w.fake = world_fake("api2", 0);
    const bool in = w.fake->load_plugin(PLUGIN_PATH) != NULL;
    shared->attached = in;
    world_backends(&w, 2, FAKE_GPU0);
    ggml_async_record_start(64);
    for (int split = 0; split < SPLITS; split++) {
        decode(&w, split);
    }
    if (in) {
        read_batch(&w);
        CHECK_INT(ggml_async_set_mode(0, GGML_ASYNC_MODE_STOCK), GGML_ASYNC_OK);
        decode(&w, 0);
        CHECK_INT(ggml_async_detach(0), GGML_ASYNC_OK);
        decode(&w, 1);
    }
    struct fake * fake = w.fake;
    world_close(&w);
    for (int i = 0; i < FAKE_N_DEVICES; i++) {
        CHECK_INT(fake->device_diff(i), 0);
    }
    shared->n_allocations = n_allocations;
    shared->n_left        = n_alive;
    snprintf(shared->log, sizeof(shared->log), "%s", world_log());
}

static void run(int k, bool on) {
    memset(shared, 0, sizeof(*shared));
    fail_at = k;
    fail_on = on;
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        program();
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    if (status) {
        fprintf(stderr, "allocation %d%s failed: status 0x%x\n", k, on ? " and all after it" : "", status);
        exit(1);
    }
}

// Returns how many allocations a run makes.
static int run_without_failures(void) {
    run(0, false);
    CHECK(shared->attached);
    CHECK(shared->n_allocations > 8);
    CHECK(shared->n_allocations < MAX_ALLOCATIONS);
    CHECK(!strstr(shared->log, "memory"));
    return shared->n_allocations;
}

static void share(void) {
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
}

static void check_left(int k, int n_left) {
    if (shared->n_left > n_left) {
        fprintf(stderr, "after allocation %d failed %d are left, not %d\n%s", k, shared->n_left, n_left, shared->log);
        exit(1);
    }
}

static void each_allocation_may_fail(void) {
    share();
    const int n      = run_without_failures();
    const int n_left = shared->n_left;
    int n_refused = 0;
    for (int k = 1; k <= n; k++) {
        run(k, false);
        check_left(k, n_left);
        n_refused += !shared->attached;
    }
    // only the host's own entry is worth staying out for
    CHECK(n_refused > 0 && n_refused < n);
}

static void memory_may_run_out_for_good(void) {
    share();
    const int n      = run_without_failures();
    const int n_left = shared->n_left;
    for (int k = 1; k <= n; k++) {
        run(k, true);
        check_left(k, n_left);
    }
}

static void it_says_what_it_does_without(void) {
    share();
    const int n = run_without_failures();
    static const char * const lines[] = {
        "not attached: no memory to attach",
        "no memory to follow a backend of",
        "an allocation failed",
    };
    for (size_t i = 0; i < sizeof(lines)/sizeof(lines[0]); i++) {
        bool said = false;
        for (int k = 1; k <= n && !said; k++) {
            run(k, false);
            said = strstr(shared->log, lines[i]) != NULL;
        }
        if (!said) {
            fprintf(stderr, "never said: %s\n", lines[i]);
            exit(1);
        }
    }
}

// The capture's writer is a thread of its own, so which allocation is the k-th differs from run to run.
static void a_capture_without_memory_is_none_of_the_programs_business(void) {
    share();
    char path[] = "/tmp/test_no_memory-XXXXXX";
    const int fd = mkstemp(path);
    CHECK(fd >= 0);
    close(fd);
    setenv("GGML_ASYNC_CAPTURE", path, 1);
    run(0, false);
    CHECK(shared->attached);
    const int n = shared->n_allocations;
    for (int k = 1; k <= n + 4; k++) {
        run(k, false);
        run(k, true);
    }
    unlink(path);
}

static const struct test tests[] = {
    TEST(each_allocation_may_fail),
    TEST(memory_may_run_out_for_good),
    TEST(it_says_what_it_does_without),
    TEST(a_capture_without_memory_is_none_of_the_programs_business),
};

TEST_MAIN(tests)
