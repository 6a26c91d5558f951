// A failure, made small: every attempt in a child process of its own, so that one that crashes or hangs counts too.

#include "shared.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ATTEMPT_SECONDS = 20, MAX_ATTEMPTS = 400 };

static int n_attempts;

void world_make(uint64_t world, struct world_plan * plan, struct spec * specs) {
    world_plan_make(plan, random_mix(options.seed, world));
    for (int i = 0; i < GRAPHS_PER_WORLD; i++) {
        spec_make(&specs[i], random_mix(plan->seed, (uint64_t) i), plan->n_devices);
        bool indices = false;
        for (int k = 0; k < specs[i].n_nodes; k++) {
            struct node * node = &specs[i].nodes[k];
            indices |= node->is_int;
            // evaluations without a wait between them: an input must not lie where a device still computes
            node->place = node->op == OP_input && plan->parallel ? plan->n_devices : node->place;
        }
        for (int e = 0; e < specs[i].n_evals; e++) {
            struct eval * eval = &specs[i].evals[e];
            if (plan->parallel || !settings.allow_aborts) {
                eval->abort = 0;
            }
            // Stopped by its callback, a graph goes on with what was never computed: not good as indices. A jump is seen by the
            // hooks that the next waits meet, if no mode switch takes them out.
            if ((eval->abort == 2 && indices) || (eval->abort == 3 && plan->switching)) {
                eval->abort = 1;
            }
            eval->callback = eval->callback && !plan->parallel;
        }
    }
}

// As world_run; a crash or a hang is a failure of the last graph.
int world_run_in_child(const struct world_plan * plan, const struct spec * specs, int n, char * text, size_t size) {
    int ends[2];
    if (pipe(ends)) {
        fail("no pipe");
    }
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        struct { int failed; char text[MAX_TEXT]; } answer = { -1, "" };
        alarm(ATTEMPT_SECONDS);
        answer.failed = world_run(plan, specs, n, answer.text, sizeof(answer.text));
        for (int d = 0; d < MAX_DEVICES && answer.failed < 0; d++) {
            if (atomic_load(&mock->counters[d].touched_freed) || atomic_load(&mock->counters[d].freed_with_reads)) {
                answer.failed = n - 1;
                snprintf(answer.text, sizeof(answer.text), "an operation met freed memory, or a backend was freed with reads queued");
            }
        }
        const ssize_t written = write(ends[1], &answer, sizeof(answer));
        _exit(written == (ssize_t) sizeof(answer) ? 0 : 1);
    }
    close(ends[1]);
    struct { int failed; char text[MAX_TEXT]; } answer = { -1, "" };
    const ssize_t got = read(ends[0], &answer, sizeof(answer));
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) {
        snprintf(text, size, "%s", WTERMSIG(status) == SIGALRM ? "it hangs" : strsignal(WTERMSIG(status)));
        return n - 1;
    }
    if (got != (ssize_t) sizeof(answer)) {
        snprintf(text, size, "it ended with exit code %d", WEXITSTATUS(status));
        return n - 1;
    }
    memcpy(text, answer.text, size < sizeof(answer.text) ? size : sizeof(answer.text));
    return answer.failed;
}

struct failure {
    struct world_plan plan;
    struct spec       specs[GRAPHS_PER_WORLD];
    int               n;
    char              text[MAX_TEXT];
};

// Keeps the candidate if it still fails.
static bool attempt(struct failure * failure, const struct failure * candidate) {
    if (n_attempts++ >= MAX_ATTEMPTS) {
        return false;
    }
    char text[MAX_TEXT];
    const int failed = world_run_in_child(&candidate->plan, candidate->specs, candidate->n, text, sizeof(text));
    // the same kind of failure: a smaller graph may break something else
    if (failed < 0 || (failure->text[0] && strncmp(text, failure->text, 6))) {
        return false;
    }
    *failure   = *candidate;
    failure->n = failed + 1;
    memcpy(failure->text, text, sizeof(text));
    return true;
}

#define ATTEMPT(change)                         \
    do {                                        \
        struct failure next = *failure;         \
        change;                                 \
        if (memcmp(&next, failure, sizeof(next))) { \
            attempt(failure, &next);            \
        }                                       \
    } while (0)

static void shrink_plan(struct failure * failure) {
    for (int i = failure->n - 1; i >= 0; i--) {
        if (failure->n > 1 && i < failure->n) {
            ATTEMPT({ memmove(&next.specs[i], &next.specs[i + 1], (size_t) (next.n - 1 - i)*sizeof(next.specs[0])); next.n--; });
        }
    }
    ATTEMPT(next.plan.n_scheds = 1);
    ATTEMPT(next.plan.parallel = false);
    ATTEMPT(next.plan.switching = false);
    ATTEMPT(next.plan.farewell = 0);
    ATTEMPT(next.plan.n_threads = 1);
    ATTEMPT(next.plan.order = 0);
    ATTEMPT(next.plan.pinned_by = -1);
}

static void shrink_evals(struct failure * failure, int s) {
    for (int e = failure->specs[s].n_evals - 1; e >= 0; e--) {
        if (failure->specs[s].n_evals > 1 && e < failure->specs[s].n_evals) {
            ATTEMPT({
                struct spec * spec = &next.specs[s];
                memmove(&spec->evals[e], &spec->evals[e + 1], (size_t) (spec->n_evals - 1 - e)*sizeof(spec->evals[0]));
                spec->n_evals--;
                spec->evals[0].reuse = false;
                spec->evals[e < spec->n_evals ? e : 0].reuse = false;
            });
        }
    }
    for (int e = 0; e < failure->specs[s].n_evals; e++) {
        ATTEMPT(next.specs[s].evals[e].callback = false);
        ATTEMPT(next.specs[s].evals[e].abort = 0);
        ATTEMPT(next.specs[s].evals[e].fetch = 0);
        ATTEMPT(next.specs[s].evals[e].free_early = false);
    }
}

static void shrink_nodes(struct failure * failure, int s) {
    for (int i = failure->specs[s].n_nodes - 1; i >= 0; i--) {
        if (i < failure->specs[s].n_nodes) {
            ATTEMPT({ next.specs[s].nodes[i].output = next.specs[s].nodes[i].anchor; spec_prune(&next.specs[s]); if (!next.specs[s].n_nodes) { next = *failure; } });
        }
        if (i < failure->specs[s].n_nodes) {
            ATTEMPT({ if (!spec_drop(&next.specs[s], i)) { next = *failure; } spec_prune(&next.specs[s]); if (!next.specs[s].n_nodes) { next = *failure; } });
        }
    }
    for (int i = failure->specs[s].n_nodes - 1; i >= 0; i--) {
        if (!failure->specs[s].nodes[i].anchor) {
            ATTEMPT(next.specs[s].nodes[i].place = next.specs[s].n_devices);
            if (failure->specs[s].nodes[i].op != OP_input || !settings.late_uploads) {
                ATTEMPT(next.specs[s].nodes[i].place = 0);
            }
        }
    }
}

void shrink_and_print(uint64_t world, int graph) {
    struct failure * failure = calloc(1, sizeof(*failure));
    struct failure * whole   = calloc(1, sizeof(*whole));
    world_make(world, &whole->plan, whole->specs);
    whole->n = GRAPHS_PER_WORLD;
    fprintf(stderr, "seed %llu, world %llu, graph %d: %s\n", (unsigned long long) options.seed, (unsigned long long) world, graph, shared->text);
    if (!attempt(failure, whole)) {
        fprintf(stderr, "alone, this world comes out right: it takes what ran beside it (--seed %llu --threads %d)\n",
                (unsigned long long) options.seed, options.n_threads);
        free(failure);
        free(whole);
        return;
    }
    int before;
    do {
        before = n_attempts;
        const struct failure last = *failure;
        shrink_plan(failure);
        for (int s = 0; s < failure->n; s++) {
            shrink_nodes(failure, s);
            shrink_evals(failure, s);
        }
        if (!memcmp(&last, failure, sizeof(last))) {
            break;
        }
    } while (n_attempts > before && n_attempts < MAX_ATTEMPTS);
    const struct world_plan * plan = &failure->plan;
    fprintf(stderr, "smallest that still fails, after %d attempts: %s\n", n_attempts, failure->text);
    fprintf(stderr, " %d devices, CPU memory pinned by %d, %d threads, %d schedulers%s%s, farewell %d, order %d (again: --seed %llu --world %llu)\n",
            plan->n_devices, plan->pinned_by, plan->n_threads, plan->n_scheds, plan->parallel ? ", parallel" : "",
            plan->switching ? ", switching" : "", plan->farewell, plan->order, (unsigned long long) options.seed, (unsigned long long) world);
    for (int s = 0; s < failure->n; s++) {
        fprintf(stderr, " graph %d:\n", s);
        spec_print(&failure->specs[s], stderr);
    }
    free(failure);
    free(whole);
}
