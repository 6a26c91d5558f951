// Which ggml libraries are loaded in this process.

#define _GNU_SOURCE
#include "ga.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// The main program has no name to open it by.
void * ga_open_loaded(const char * path) {
    void * handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (handle || !path) {
        return handle;
    }
    char self[PATH_MAX], given[PATH_MAX];
    const ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (n > 0 && realpath(path, given)) {
        self[n] = 0;
        if (!strcmp(self, given)) {
            return dlopen(NULL, RTLD_LAZY);
        }
    }
    return NULL;
}

struct ga_names {
    char ** names;
    int     n;
};

// What earlier calls saw. Programs look after every import, and a library that held no ggml will not get one, so only
// what was loaded since is looked at; after an unload everything again.
static struct {
    pthread_mutex_t    mutex;
    struct ga_names    ggmls;
    int                n_seen;      // loaded objects that were looked at; new ones come behind them
    unsigned long long n_unloads;
} ga_found = { .mutex = PTHREAD_MUTEX_INITIALIZER };

struct ga_unseen {
    struct ga_names list;
    int             n_objects;
};

static void ga_names_add(struct ga_names * list, const char * name) {
    char ** names = realloc(list->names, (size_t) (list->n + 1)*sizeof(*names));
    if (names) {
        list->names = names;
        names[list->n] = strdup(name);
        list->n += names[list->n] != NULL;
    }
}

static void ga_names_free(struct ga_names * list) {
    for (int i = 0; i < list->n; i++) {
        free(list->names[i]);
    }
    free(list->names);
    *list = (struct ga_names) { NULL, 0 };
}

static int ga_collect_unseen(struct dl_phdr_info * info, size_t size, void * user_data) {
    (void) size;
    struct ga_unseen * unseen = user_data;
    if (info->dlpi_subs != ga_found.n_unloads) {
        ga_found.n_unloads = info->dlpi_subs;
        ga_found.n_seen    = 0;
        ga_names_free(&ga_found.ggmls);
    }
    if (unseen->n_objects++ >= ga_found.n_seen) {
        char self[PATH_MAX];
        const char * name = info->dlpi_name;
        if (!name || !*name) {
            const ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
            self[n > 0 ? n : 0] = 0;
            name = self;
        }
        ga_names_add(&unseen->list, name);
    }
    return 0;
}

static bool ga_holds_ggml(const char * name) {
    void * handle = ga_open_loaded(name);
    if (!handle) {
        return false;
    }
    void *  symbol = dlsym(handle, "ggml_backend_dev_count");
    Dl_info info;
    // dlsym looks into dependencies too; only the library that holds the function itself counts
    char real_a[PATH_MAX], real_b[PATH_MAX];
    const bool holds = symbol && dladdr(symbol, &info) && realpath(info.dli_fname, real_a) && realpath(name, real_b) && !strcmp(real_a, real_b);
    dlclose(handle);
    return holds;
}

static void ga_find_lock(void) {
    pthread_mutex_lock(&ga_found.mutex);
}

static void ga_find_unlock(void) {
    pthread_mutex_unlock(&ga_found.mutex);
}

static void ga_find_fork_register(void) {
    pthread_atfork(ga_find_lock, ga_find_unlock, ga_find_unlock);
}

int ggml_async_find(char * buffer, size_t size) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, ga_find_fork_register);     // as ga_fork_guard
    struct ga_unseen unseen = { 0 };
    pthread_mutex_lock(&ga_found.mutex);
    dl_iterate_phdr(ga_collect_unseen, &unseen);
    for (int i = 0; i < unseen.list.n; i++) {
        if (ga_holds_ggml(unseen.list.names[i])) {
            ga_names_add(&ga_found.ggmls, unseen.list.names[i]);
        }
    }
    ga_names_free(&unseen.list);
    ga_found.n_seen = unseen.n_objects;
    const int found = ga_found.ggmls.n;
    size_t    used  = 0;
    if (buffer && size) {
        buffer[0] = 0;
    }
    for (int i = 0; i < found; i++) {
        const char * name   = ga_found.ggmls.names[i];
        const size_t length = strlen(name);
        if (buffer && used + length + 2 <= size) {
            memcpy(buffer + used, name, length);
            used += length;
            buffer[used++] = '\n';
            buffer[used]   = 0;
        }
    }
    pthread_mutex_unlock(&ga_found.mutex);
    return found;
}
