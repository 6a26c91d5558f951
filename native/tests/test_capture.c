// The capture file as the plug-in writes it (docs/capture-format.md), and the control word.

#include "capture_reader.h"
#include "world.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>

static const char *  path;
static struct reader r;

static void pause_ms(int ms) {
    nanosleep(&(struct timespec) { ms/1000, ms%1000*1000000L }, NULL);
}

// One token: an embedding on the CPU, two device splits with a CPU split of two readbacks behind the first, the wait.
static void token(struct world * w, int layer) {
    struct ggml_cgraph nothing = { 0 };
    CHECK_INT(w->fake->compute(w->cpu, &nothing), 0);
    world_fill(w, 0, layer, 1);
    world_input(w, 0, layer);
    world_input(w, 0, layer + 1);
    world_compute(w);
    world_fill(w, 0, layer, 2);
    w->fake->synchronize(w->gpu[0]);
}

static void two_tokens_in_each_arm(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    ggml_async_set_mode(w.host, GGML_ASYNC_MODE_STOCK);
    token(&w, 0);
    token(&w, 0);
    ggml_async_set_mode(w.host, GGML_ASYNC_MODE_ASYNC);
    token(&w, 6);
    token(&w, 6);
    w.fake->synchronize(w.gpu[0]);      // nothing computed since: no token
    world_close(&w);
}

static void a_program_that_ends_in_order_leaves_everything(void) {
    path = reader_path(WORLD_DIR);
    reader_child(two_tokens_in_each_arm, 0);
    reader_open(&r, path, true);
    CHECK_INT(r.n_writers, 1);
    const struct reader_writer * writer = &r.writers[0];
    CHECK_INT(writer->component, GA_CAPTURE_PLUGIN);
    CHECK(strstr(writer->text, "libggml-async.so\n") && strstr(writer->text, "test_capture\n"));
    CHECK(strstr(writer->text, "libfake-ggml-api2.so\n") && strstr(writer->text, "api2-2d\n"));
    CHECK_INT(writer->n_of_kind[GA_CAPTURE_HOST], 1);
    CHECK(writer->n_of_kind[GA_CAPTURE_DEVICE] >= 6);
    CHECK_INT(writer->n_modes, 3);
    CHECK_INT(writer->modes[0], GGML_ASYNC_MODE_ASYNC);
    CHECK_INT(writer->modes[1], GGML_ASYNC_MODE_STOCK);
    CHECK_INT(writer->modes[2], GGML_ASYNC_MODE_ASYNC);
    CHECK_INT(writer->n_of_kind[GA_CAPTURE_END], 1);
    CHECK(writer->n_of_kind[GA_CAPTURE_COUNTERS] >= 2);

    CHECK_INT(reader_count(&r, GGML_ASYNC_RECORD_READBACK), 8);
    CHECK_INT(reader_count(&r, GGML_ASYNC_RECORD_STAGE), 4);
    CHECK_INT(reader_count(&r, GGML_ASYNC_RECORD_COMPUTE), 16);
    CHECK_INT(reader_count(&r, GGML_ASYNC_RECORD_TOKEN), 4);
    CHECK_INT(r.n_events, 32);
    CHECK_INT(writer->last_written, 32);
    CHECK_INT(writer->last_dropped, 0);
    int n_tokens = 0, n_readbacks = 0;
    for (int i = 0; i < r.n_events; i++) {
        const struct ga_capture_event * e = &r.events[i];
        CHECK_INT(e->host, 0);
        CHECK(e->thread && e->t_ns > 0 && e->duration_ns >= 0);
        if (e->kind == GGML_ASYNC_RECORD_TOKEN) {
            CHECK_INT(e->mode, n_tokens < 2 ? GGML_ASYNC_MODE_STOCK : GGML_ASYNC_MODE_ASYNC);
            CHECK_INT(e->n_readbacks, 2);
            CHECK_INT(e->n_sync, n_tokens < 2 ? 2 : 1);
            CHECK_INT(e->bytes, 2*WORLD_BYTES);
            CHECK_INT(e->rows, 1);
            CHECK(e->wait_ns >= 0 && e->duration_ns >= e->wait_ns);
            n_tokens++;
        } else if (e->kind == GGML_ASYNC_RECORD_READBACK) {
            char name[32];
            snprintf(name, sizeof(name), "ffn_norm-%d", (n_readbacks < 4 ? 0 : 6) + n_readbacks % 2);
            CHECK_TEXT(reader_name(&r, i), name);
            CHECK_INT(e->path, n_readbacks < 4 ? GGML_ASYNC_PATH_STOCK : GGML_ASYNC_PATH_DIRECT);
            CHECK_INT(e->layer, (n_readbacks < 4 ? 0 : 6) + n_readbacks % 2);
            n_readbacks++;
        } else if (e->kind == GGML_ASYNC_RECORD_COMPUTE && e->layer >= 0) {
            CHECK_INT(e->n_sync, 1);    // behind a stage: on the CPU
        }
    }
    reader_close(&r);
}

static void tokens_then_sleep(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    token(&w, 0);
    pause_ms(500);
    raise(SIGKILL);
}

static void what_was_written_before_a_sigkill_is_readable(void) {
    path = reader_path(WORLD_DIR);
    reader_child(tokens_then_sleep, 128 + SIGKILL);
    reader_open(&r, path, false);
    CHECK_INT(r.n_writers, 1);
    CHECK_INT(r.n_events, 8);
    CHECK_INT(r.writers[0].n_of_kind[GA_CAPTURE_END], 0);
    reader_close(&r);
}

static void leave_without_saying(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    _exit(7);
}

static void a_program_that_leaves_by_exit_has_said_hello(void) {
    path = reader_path(WORLD_DIR);
    reader_child(leave_without_saying, 7);
    reader_open(&r, path, true);
    CHECK_INT(r.writers[0].n_of_kind[GA_CAPTURE_HELLO], 1);
    CHECK_INT(r.writers[0].n_of_kind[GA_CAPTURE_HOST], 1);
    CHECK_INT(r.writers[0].n_of_kind[GA_CAPTURE_END], 0);
    reader_close(&r);
}

static void a_host_that_is_refused(void) {
    world_log_capture();
    world_fake("api9", 0);
    CHECK_INT(ggml_async_attach(world_path("api9")), GGML_ASYNC_ERR_LAYOUT);
}

static void a_refusal_is_in_the_capture_with_its_reason(void) {
    path = reader_path(WORLD_DIR);
    reader_child(a_host_that_is_refused, 0);
    reader_open(&r, path, true);
    CHECK_INT(r.writers[0].n_of_kind[GA_CAPTURE_REFUSED], 1);
    CHECK_INT(r.writers[0].n_of_kind[GA_CAPTURE_HOST], 0);
    CHECK(strstr(r.writers[0].text, "API version"));
    reader_close(&r);
}

static void forks_with_a_host(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    token(&w, 0);
    for (int i = 0; i < 3; i++) {
        const pid_t child = fork();
        if (child == 0) {
            token(&w, 2*i);
            exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    token(&w, 0);
    world_close(&w);
}

static void children_of_fork_are_writers_of_their_own(void) {
#if defined(__SANITIZE_THREAD__)
    printf("skip: ThreadSanitizer does not follow threads that a child of fork starts\n");
    return;
#endif
    path = reader_path(WORLD_DIR);
    reader_child(forks_with_a_host, 0);
    reader_open(&r, path, true);
    CHECK_INT(r.n_writers, 4);
    CHECK_INT(r.n_events, 5*8);
    for (int w = 0; w < 4; w++) {
        CHECK_INT(r.writers[w].n_of_kind[GA_CAPTURE_HELLO], 1);
        CHECK_INT(r.writers[w].n_of_kind[GA_CAPTURE_HOST], 1);
        CHECK_INT(r.writers[w].n_of_kind[GA_CAPTURE_END], 1);
        for (int v = 0; v < w; v++) {
            CHECK(r.writers[w].pid != r.writers[v].pid);
        }
    }
    reader_close(&r);
}

static void a_child_that_does_nothing_writes_nothing(void) {
    path = reader_path(WORLD_DIR);
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    reader_open(&r, path, true);
    CHECK_INT(r.n_writers, 1);
    CHECK_INT(r.writers[0].n_of_kind[GA_CAPTURE_END], 0);
    reader_close(&r);
    world_close(&w);
}

static void write_more_than_a_mebibyte(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    for (int i = 0; i < 4000; i++) {
        token(&w, i % 8);
        if (i % 100 == 0) {
            pause_ms(25);       // so that the writer keeps up
        }
    }
    world_close(&w);
}

static void at_the_limit_only_counters_go_on_and_it_says_so(void) {
    path = reader_path(WORLD_DIR);
    setenv(GA_CAPTURE_LIMIT_ENV, "1", 1);
    reader_child(write_more_than_a_mebibyte, 0);
    struct stat status;
    CHECK(stat(path, &status) == 0);
    CHECK(status.st_size > 800*1024 && status.st_size < 1088*1024);
    reader_open(&r, path, true);
    const struct reader_writer * writer = &r.writers[0];
    CHECK_INT(writer->n_of_kind[GA_CAPTURE_LIMIT], 1);
    CHECK_INT(writer->n_of_kind[GA_CAPTURE_END], 1);
    CHECK_INT(writer->last_written, r.n_events);
    CHECK_INT(writer->last_written + writer->last_dropped + writer->last_beyond, 4000*8);
    CHECK(writer->last_beyond > 0);
    reader_close(&r);
}

static void write_as_fast_as_it_goes(void) {
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    for (int i = 0; i < 20000; i++) {
        token(&w, i % 8);
    }
    world_close(&w);
}

static void what_the_writer_cannot_keep_up_with_is_dropped_and_counted(void) {
    path = reader_path(WORLD_DIR);
    reader_child(write_as_fast_as_it_goes, 0);
    reader_open(&r, path, true);
    const struct reader_writer * writer = &r.writers[0];
    CHECK_INT(writer->last_written, r.n_events);
    CHECK_INT(writer->last_written + writer->last_dropped, 20000*8);
    reader_close(&r);
}

static void write_to_a_full_disk(void) {
    struct world w;
    // A limit on the file's size is a disk that is full after that many bytes.
    signal(SIGXFSZ, SIG_IGN);
    const struct rlimit limit = { 4096, 4096 };
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    world_open(&w, 1, FAKE_GPU0);
    for (int i = 0; i < 200; i++) {
        token(&w, 0);
    }
    for (int i = 0; i < 500 && !world_log_count("the capture ends here"); i++) {
        pause_ms(10);
    }
    token(&w, 0);
    CHECK_INT(world_log_count("the capture ends here"), 1);
    CHECK_COUNTER(w.host, "readbacks", 402);
    world_close(&w);
}

static void a_full_disk_ends_the_capture_not_the_program(void) {
    path = reader_path(WORLD_DIR);
    reader_child(write_to_a_full_disk, 0);
    reader_open(&r, path, false);
    CHECK_INT(r.n_writers, 1);
    reader_close(&r);
}

static void a_path_that_cannot_be_opened_is_told_once(void) {
    setenv(GA_CAPTURE_ENV, WORLD_DIR "/no/such/folder/x", 1);
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    token(&w, 0);
    CHECK_INT(world_log_count("the capture ends here: cannot write it: No such file"), 1);
    CHECK_COUNTER(w.host, "readbacks", 2);
    world_close(&w);
}

static void without_the_variable_there_is_no_capture_and_no_thread(void) {
    unsetenv(GA_CAPTURE_ENV);
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    token(&w, 0);
    CHECK_COUNTER(w.host, "tokens", 1);
    int n = 0;
    DIR * tasks = opendir("/proc/self/task");
    for (struct dirent * entry; (entry = readdir(tasks)); n += entry->d_name[0] != '.') {
    }
    closedir(tasks);
#if !defined(__SANITIZE_THREAD__)      // has one of its own
    CHECK_INT(n, 1);
#endif
    world_close(&w);
}

// ---- several threads

static struct world shared;

static void * many_tokens(void * gpu) {
    struct ggml_cgraph nothing = { 0 };
    const int g = (int) (intptr_t) gpu;
    for (int i = 0; i < 500; i++) {
        shared.fake->compute(shared.gpu[g], &nothing);
        shared.fake->synchronize(shared.gpu[g]);
    }
    return NULL;
}

static void three_threads_at_once(void) {
    world_open(&shared, 3, FAKE_GPU0);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        CHECK(pthread_create(&threads[i], NULL, many_tokens, (void *) (intptr_t) i) == 0);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
    }
    world_close(&shared);
}

static void several_threads_write_whole_records(void) {
    path = reader_path(WORLD_DIR);
    reader_child(three_threads_at_once, 0);
    reader_open(&r, path, true);
    CHECK_INT(reader_count(&r, GGML_ASYNC_RECORD_TOKEN), 1500);
    CHECK_INT(reader_count(&r, GGML_ASYNC_RECORD_COMPUTE), 1500);
    reader_close(&r);
}

// ---- the control word

static uint32_t * control_page(void) {
    DIR * folder = opendir("/proc/self/fd");
    for (struct dirent * entry; (entry = readdir(folder)); ) {
        char link[512], target[256];
        snprintf(link, sizeof(link), "/proc/self/fd/%s", entry->d_name);
        const ssize_t n = readlink(link, target, sizeof(target) - 1);
        target[n > 0 ? n : 0] = 0;
        if (strstr(target, "memfd:ggml-async-control")) {
            const int fd   = open(link, O_RDWR);
            void *    page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            close(fd);
            closedir(folder);
            return page == MAP_FAILED ? NULL : page;
        }
    }
    closedir(folder);
    return NULL;
}

static void ask(uint32_t * page, uint32_t wanted) {
    __atomic_store_n(&page[3], wanted, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &page[3], FUTEX_WAKE, 1, NULL, NULL, 0);
    for (int i = 0; i < 500 && __atomic_load_n(&page[4], __ATOMIC_SEQ_CST) != wanted; i++) {
        pause_ms(10);
    }
}

static void the_control_word_switches_every_host(void) {
    setenv("GGML_ASYNC_CONTROL", "1", 1);
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    uint32_t * page = control_page();
    CHECK(page && !memcmp(page, "GACTRL01", 8));
    CHECK_INT(page[2], getpid());
    CHECK_INT(page[3], 0);
    CHECK_INT(page[4], GGML_ASYNC_MODE_ASYNC + 1);
    CHECK_INT(page[6], 1);
    const int modes[] = { GGML_ASYNC_MODE_STOCK, GGML_ASYNC_MODE_OFF, GGML_ASYNC_MODE_ASYNC };
    for (int i = 0; i < 3; i++) {
        ask(page, (uint32_t) modes[i] + 1);
        CHECK_INT(page[4], modes[i] + 1);
        CHECK_INT(ggml_async_get_mode(w.host), modes[i]);
        token(&w, 0);
    }
    CHECK_COUNTER(w.host, "stock", 2);
    CHECK_COUNTER(w.host, "direct", 2);
    world_close(&w);
}

static void asking_again_for_the_same_counts(void) {
    setenv("GGML_ASYNC_CONTROL", "1", 1);
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    uint32_t * page = control_page();
    ask(page, GGML_ASYNC_MODE_STOCK + 1);
    CHECK_INT(ggml_async_set_mode(w.host, GGML_ASYNC_MODE_OFF), GGML_ASYNC_OK);
    CHECK_INT(page[4], GGML_ASYNC_MODE_OFF + 1);
    ask(page, GGML_ASYNC_MODE_STOCK + 1);
    CHECK_INT(page[4], GGML_ASYNC_MODE_STOCK + 1);
    CHECK_INT(ggml_async_get_mode(w.host), GGML_ASYNC_MODE_STOCK);
    world_close(&w);
}

static void a_mode_that_there_is_not_is_ignored(void) {
    setenv("GGML_ASYNC_CONTROL", "1", 1);
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    uint32_t * page = control_page();
    __atomic_store_n(&page[3], 77, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &page[3], FUTEX_WAKE, 1, NULL, NULL, 0);
    for (int i = 0; i < 500 && !world_log_count("asks for mode 76"); i++) {
        pause_ms(10);
    }
    CHECK_INT(page[4], GGML_ASYNC_MODE_ASYNC + 1);
    ask(page, GGML_ASYNC_MODE_STOCK + 1);
    CHECK_INT(ggml_async_get_mode(w.host), GGML_ASYNC_MODE_STOCK);
    world_close(&w);
}

static void without_the_variable_there_is_no_control_page(void) {
    unsetenv("GGML_ASYNC_CONTROL");
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    CHECK(!control_page());
    world_close(&w);
}

static const struct test tests[] = {
    TEST(a_program_that_ends_in_order_leaves_everything),
    TEST(what_was_written_before_a_sigkill_is_readable),
    TEST(a_program_that_leaves_by_exit_has_said_hello),
    TEST(a_refusal_is_in_the_capture_with_its_reason),
    TEST(children_of_fork_are_writers_of_their_own),
    TEST(a_child_that_does_nothing_writes_nothing),
    TEST(at_the_limit_only_counters_go_on_and_it_says_so),
    TEST(what_the_writer_cannot_keep_up_with_is_dropped_and_counted),
    TEST(a_full_disk_ends_the_capture_not_the_program),
    TEST(a_path_that_cannot_be_opened_is_told_once),
    TEST(without_the_variable_there_is_no_capture_and_no_thread),
    TEST(several_threads_write_whole_records),
    TEST(the_control_word_switches_every_host),
    TEST(asking_again_for_the_same_counts),
    TEST(a_mode_that_there_is_not_is_ignored),
    TEST(without_the_variable_there_is_no_control_page),
};

TEST_MAIN(tests)
