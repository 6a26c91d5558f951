// Options, threads, the count.

#include "shared.h"

#include <getopt.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { HANG_SECONDS = 60, EXIT_DIFFERS = 1, EXIT_USAGE = 2, EXIT_VOID = 3 };

struct shared * shared;
struct options  options = { .expect = "direct,bounce", .seed = 1, .n_graphs = 1000, .n_threads = 2, .only = -1 };

void fail(const char * format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    fflush(NULL);
    _exit(EXIT_USAGE);
}

void count_evaluation(void) {
    atomic_fetch_add(&shared->evaluations, 1);
}

//
// The runner
//

static _Atomic(int)  n_switching;
static _Atomic(bool) done;

// Modes change in mid-run while some world wants that; the host's scheduler is in the middle of anything.
static void * switcher(void * user_data) {
    (void) user_data;
    struct random random = { options.seed };
    while (!atomic_load(&done)) {
        if (atomic_load(&n_switching)) {
            plugin_set_mode(plugin_host, options.never_off ? 1 + (int) random_below(&random, 2) : (int) random_below(&random, 3));
            usleep(50 + random_below(&random, 400));
            if (!atomic_load(&n_switching) || random_chance(&random, 50)) {
                plugin_set_mode(plugin_host, GGML_ASYNC_MODE_ASYNC);
            }
        } else {
            plugin_set_mode(plugin_host, GGML_ASYNC_MODE_ASYNC);
        }
        usleep(200);
    }
    return NULL;
}

static uint64_t wrong_uses(void) {
    uint64_t n = 0;
    for (int d = 0; d < MAX_DEVICES; d++) {
        n += atomic_load(&mock->counters[d].touched_freed) + atomic_load(&mock->counters[d].freed_with_reads);
    }
    return n;
}

static void report_failure(uint64_t world, int graph, const char * text) {
    if (!atomic_exchange(&shared->failed, true)) {
        shared->failed_world = world;
        shared->failed_graph = graph;
        snprintf(shared->text, sizeof(shared->text), "%s", text);
    }
}

static void * run_worlds(void * user_data) {
    const int     thread   = (int) (intptr_t) user_data;
    const time_t  start    = time(NULL);
    struct spec * specs    = calloc(GRAPHS_PER_WORLD, sizeof(*specs));
    const uint64_t n_worlds = options.only >= 0 ? 1 : (options.n_graphs + GRAPHS_PER_WORLD - 1)/GRAPHS_PER_WORLD;
    while (!atomic_load(&shared->failed) && (!options.seconds || time(NULL) - start < options.seconds)) {
        const uint64_t next = atomic_fetch_add(&shared->next_world, 1);
        if (next >= n_worlds && !(options.seconds && options.only < 0)) {
            break;
        }
        const uint64_t world = options.only >= 0 ? (uint64_t) options.only : next;
        atomic_store(&shared->world[thread], (int64_t) world);
        struct world_plan plan;
        char              text[MAX_TEXT] = "";
        world_make(world, &plan, specs);
        const uint64_t wrong = wrong_uses();
        atomic_fetch_add(&n_switching, plan.switching);
        const int failed = world_run(&plan, specs, GRAPHS_PER_WORLD, text, sizeof(text));
        atomic_fetch_sub(&n_switching, plan.switching);
        if (failed >= 0) {
            report_failure(world, failed, text);
        } else if (wrong_uses() != wrong) {
            report_failure(world, 0, "an operation met freed memory, or a backend was freed with reads queued");
        }
        atomic_fetch_add(&shared->graphs, GRAPHS_PER_WORLD);
        atomic_store(&shared->world[thread], -1);
    }
    free(specs);
    return NULL;
}

static void run(void) {
    pthread_t threads[MAX_THREADS], switching;
    const bool switches = plugin_set_mode && !strcmp(settings.mode, "async");
    if (switches) {
        pthread_create(&switching, NULL, switcher, NULL);
    }
    for (int i = 0; i < options.n_threads; i++) {
        pthread_create(&threads[i], NULL, run_worlds, (void *) (intptr_t) i);
    }
    for (int i = 0; i < options.n_threads; i++) {
        pthread_join(threads[i], NULL);
    }
    atomic_store(&done, true);
    if (switches) {
        pthread_join(switching, NULL);
    }
    if (plugin_counters) {
        plugin_counters(plugin_host, shared->counters, MAX_COUNTERS);
    }
    memcpy(shared->mock, mock->counters, sizeof(shared->mock));
}

//
// The watcher
//

// Waits for the runner; a crash or a hang is a failure of the worlds that were under way.
static void watch(pid_t child) {
    uint64_t last   = 0;
    int      stands = 0, status = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
        usleep(100000);
        const uint64_t now = atomic_load(&shared->evaluations);
        stands = now == last ? stands + 1 : 0;
        last   = now;
        if (stands > 10*HANG_SECONDS) {
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
            break;
        }
    }
    if (WIFSIGNALED(status)) {
        for (int i = 0; i < options.n_threads; i++) {
            const int64_t world = atomic_load(&shared->world[i]);
            if (world >= 0) {
                report_failure((uint64_t) world, 0, WTERMSIG(status) == SIGKILL ? "it hangs" : strsignal(WTERMSIG(status)));
            }
        }
    } else if (WEXITSTATUS(status)) {
        exit(WEXITSTATUS(status));
    }
}

static uint64_t counter(const char * name, size_t length) {
    for (int i = 0; plugin_counter_name && plugin_counter_name(i); i++) {
        const char * known = plugin_counter_name(i);
        if (strlen(known) == length && !strncmp(known, name, length) && i < MAX_COUNTERS) {
            return shared->counters[i];
        }
    }
    return 0;
}

static void print_summary(double seconds) {
    printf("{\"seed\": %llu, \"mode\": \"%s\", \"graphs\": %llu, \"evaluations\": %llu, \"seconds\": %.1f, \"failed\": %s, \"counters\": {",
           (unsigned long long) options.seed, settings.mode, (unsigned long long) atomic_load(&shared->graphs),
           (unsigned long long) atomic_load(&shared->evaluations), seconds, atomic_load(&shared->failed) ? "true" : "false");
    const char * separator = "";
    for (int i = 0; plugin_counter_name && plugin_counter_name(i) && i < MAX_COUNTERS; i++) {
        printf("%s\"%s\": %llu", separator, plugin_counter_name(i), (unsigned long long) shared->counters[i]);
        separator = ", ";
    }
    printf("}, \"mock\": {");
    separator = "";
#define X(name)                                                                                                      \
    {                                                                                                                \
        uint64_t n = 0;                                                                                              \
        for (int d = 0; d < MAX_DEVICES; d++) {                                                                      \
            n += atomic_load(&shared->mock[d].name);                                                                 \
        }                                                                                                            \
        printf("%s\"" #name "\": %llu", separator, (unsigned long long) n);                                          \
        separator = ", ";                                                                                            \
    }
    MOCK_COUNTERS(X)
#undef X
    printf("}}\n");
}

// A run in which nothing was read asynchronously proves nothing.
static bool expected_counters_moved(void) {
    bool ok = true;
    for (const char * name = options.expect; !strcmp(settings.mode, "async") && *name;) {
        const size_t length = strcspn(name, ",");
        if (!counter(name, length)) {
            fprintf(stderr, "void: the counter %.*s is 0\n", (int) length, name);
            ok = false;
        }
        name += length + (name[length] == ',');
    }
    return ok;
}

static void usage(void) {
    fail("stress (--runtime DIR | --library LOADED.so) --mock LIB --plugin LIB [--mode async|stock|off|none] [--seed N] [--graphs N]\n"
         "       [--seconds N] [--threads N] [--devices N] [--world N] [--expect COUNTER,...] [--no-parallel] [--no-aborts] [--no-fork] [--no-shrink] [--never-off] [--host-faults]");
}

static void read_options(int argc, char ** argv) {
    static const struct option known[] = {
        { "runtime", 1, NULL, 'r' }, { "library", 1, NULL, 'l' }, { "mock", 1, NULL, 'm' }, { "plugin", 1, NULL, 'p' }, { "mode", 1, NULL, 'M' },
        { "seed", 1, NULL, 's' }, { "graphs", 1, NULL, 'g' }, { "seconds", 1, NULL, 'S' }, { "threads", 1, NULL, 't' }, { "devices", 1, NULL, 'd' },
        { "world", 1, NULL, 'w' }, { "expect", 1, NULL, 'e' }, { "no-parallel", 0, NULL, 'P' }, { "no-aborts", 0, NULL, 'A' },
        { "no-fork", 0, NULL, 'F' }, { "no-shrink", 0, NULL, 'N' }, { "never-off", 0, NULL, 'O' },
        { "host-faults", 0, NULL, 'H' }, { NULL, 0, NULL, 0 },
    };
    int option;
    optind = 1;
    while ((option = getopt_long(argc, argv, "", known, NULL)) != -1) {
        switch (option) {
            case 'r': options.runtime = optarg;                                break;
            case 'l': options.library = optarg;                                break;
            case 'm': options.mock    = optarg;                                break;
            case 'p': options.plugin  = optarg;                                break;
            case 'M': settings.mode   = optarg;                                break;
            case 's': options.seed      = strtoull(optarg, NULL, 10);          break;
            case 'g': options.n_graphs  = strtoull(optarg, NULL, 10);          break;
            case 'S': options.seconds   = atoi(optarg);                        break;
            case 't': options.n_threads = atoi(optarg);                        break;
            case 'd': setenv("MOCK_DEVICES", optarg, 1);                       break;
            case 'w': options.only      = strtoll(optarg, NULL, 10);           break;
            case 'e': options.expect    = optarg;                              break;
            case 'P': settings.allow_parallel = false;                         break;
            case 'A': settings.allow_aborts   = false;                         break;
            case 'N': options.no_shrink       = true;                          break;
            case 'O': options.never_off       = true;                          break;
            case 'H': options.host_faults     = true;                          break;
            case 'F': options.no_fork         = true;                          break;
            default:  usage();
        }
    }
    if ((!options.runtime && !options.library) || !options.mock || (!options.plugin && strcmp(settings.mode, "none")) ||
        options.n_threads < 1 || options.n_threads > MAX_THREADS || optind < argc) {
        usage();
    }
    setenv("MOCK_DEVICES", "4", 0);
    setenv("GGML_NO_BACKTRACE", "1", 0);
}

__attribute__((visibility("default"))) int stress_main(int argc, char ** argv);

int stress_main(int argc, char ** argv) {
    read_options(argc, argv);
    struct timespec t0, t1;
    clock_gettime(CLOCK_MONOTONIC, &t0);
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < MAX_THREADS; i++) {
        atomic_store(&shared->world[i], -1);
    }
    load_everything();
    fflush(NULL);
    if (options.no_fork) {
        run();
    } else {
        const pid_t child = fork();
        if (child == 0) {
            run();
            fflush(NULL);
            _exit(0);
        }
        watch(child);
    }
    clock_gettime(CLOCK_MONOTONIC, &t1);
    print_summary((double) (t1.tv_sec - t0.tv_sec) + 1e-9*(double) (t1.tv_nsec - t0.tv_nsec));
    fflush(stdout);
    if (atomic_load(&shared->failed)) {
        if (options.no_fork || options.no_shrink) {
            fprintf(stderr, "seed %llu, world %llu, graph %d: %s\n", (unsigned long long) options.seed,
                    (unsigned long long) shared->failed_world, shared->failed_graph, shared->text);
        } else {
            shrink_and_print(shared->failed_world, shared->failed_graph);
        }
        return EXIT_DIFFERS;
    }
    return expected_counters_moved() ? 0 : EXIT_VOID;
}
