// The control word: lets `ggml-async switch PID MODE` change the mode of a running program.
//
// A page of memory of its own (a memfd named ggml-async-control) that another process of the same user finds and maps
// through /proc/PID/fd. A thread sleeps on the word; nothing that runs per token looks at it. Only with GGML_ASYNC_CONTROL=1.

#define _GNU_SOURCE
#include "ga.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { GA_CONTROL_SIZE = 4096 };

// docs/switch.md has it, ggml_async/control.py reads it. Modes are stored + 1, so that 0 is "nothing asked".
struct ga_control {
    char              magic[8];
    uint32_t          pid;
    _Atomic(uint32_t) wanted;       // futex
    _Atomic(uint32_t) applied;
    _Atomic(uint32_t) n_changes;
    _Atomic(uint32_t) n_hosts;
    uint32_t          reserved;
};

_Static_assert(offsetof(struct ga_control, wanted) == 12 && sizeof(struct ga_control) == 32, "read from outside");

static _Atomic(struct ga_control *) ga_control;     // written under ga_lock

static void * ga_control_thread(void * argument) {
    struct ga_control * control = argument;
    for (;;) {
        // Taken out, so that asking for the same again is a change: the program may have set another mode meanwhile.
        const uint32_t wanted = atomic_exchange(&control->wanted, 0);
        if (!wanted) {
            syscall(SYS_futex, &control->wanted, FUTEX_WAIT, 0, NULL, NULL, 0);
            continue;
        }
        // Publishes what was applied by itself (ga_control_update).
        if (ggml_async_set_mode(-1, (int) wanted - 1) != GGML_ASYNC_OK) {
            ga_log(NULL, GA_LOG_LEVEL_WARN, "the control word asks for mode %d, which there is not: ignored", (int) wanted - 1);
        }
    }
    return NULL;
}

static struct ga_control * ga_control_map(void) {
    const int fd = (int) syscall(SYS_memfd_create, "ggml-async-control", 1u /* MFD_CLOEXEC */);
    if (fd < 0) {
        return NULL;
    }
    void * page = MAP_FAILED;
    if (ftruncate(fd, GA_CONTROL_SIZE) == 0) {
        page = mmap(NULL, GA_CONTROL_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (page == MAP_FAILED) {
        close(fd);
        return NULL;
    }
    struct ga_control * control = page;     // the descriptor stays open: it is how others find the page
    control->pid = (uint32_t) getpid();
    memcpy(control->magic, "GACTRL01", sizeof(control->magic));
    return control;
}

// Under ga_lock. A child of fork makes its own: the page is its parent's, and so was the thread.
void ga_control_start_locked(void) {
    const char * wanted = getenv("GGML_ASYNC_CONTROL");
    struct ga_control * control = atomic_load(&ga_control);
    if (!wanted || strcmp(wanted, "1") || (control && control->pid == (uint32_t) getpid())) {
        return;
    }
    control = ga_control_map();
    if (!control) {
        ga_log(NULL, GA_LOG_LEVEL_WARN, "no control page: ggml-async switch will not reach this process");
        return;
    }
    atomic_store(&ga_control, control);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    if (pthread_create(&thread, NULL, ga_control_thread, control) == 0) {
        pthread_setname_np(thread, "ggml-async-ctl");
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// Under ga_lock: hosts or modes have changed. Where hosts differ in mode there is no one mode to tell.
void ga_control_update_locked(void) {
    struct ga_control * control = atomic_load(&ga_control);
    if (!control || control->pid != (uint32_t) getpid()) {
        return;
    }
    const int n    = ga_host_count();
    int       mode = n ? atomic_load(&ga_host_get(0)->mode) : ga_default_mode();
    for (int i = 1; i < n; i++) {
        mode = atomic_load(&ga_host_get(i)->mode) == mode ? mode : -1;
    }
    atomic_store(&control->n_hosts, (uint32_t) n);
    atomic_store(&control->applied, (uint32_t) (mode + 1));
    atomic_fetch_add(&control->n_changes, 1);
}
