// Clock, errors, log, the one lock, allocation.

#define _GNU_SOURCE
#include "ga.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static _Thread_local char ga_error[1024];

static pthread_mutex_t ga_mutex = PTHREAD_MUTEX_INITIALIZER;

// The callback and its user data change together, so both hang on one pointer. Entries are a few bytes and are kept:
// another thread may still be calling through an old one. Setting a pair that was set before takes its entry again.
struct ga_log_sink {
    void (*callback)(int level, const char * text, void * user_data);
    void * user_data;
    struct ga_log_sink * next;
};
static _Atomic(struct ga_log_sink *) ga_sink;
static struct ga_log_sink *          ga_sinks;      // under ga_lock

int64_t ga_now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t) ts.tv_sec*1000000000 + ts.tv_nsec;
}

void * ga_calloc(size_t n, size_t size) {
    return calloc(n, size);
}

static void ga_fork_register(void) {
    pthread_atfork(ga_lock, ga_unlock, ga_unlock);
}

// A child of fork has only the thread that forked: a lock that another one held would never be given back. Handlers run
// last one first, and the capture's lock is taken inside ours: so this is called after the capture has begun.
void ga_fork_guard(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, ga_fork_register);
}

void ga_lock(void) {
    pthread_mutex_lock(&ga_mutex);
}

void ga_unlock(void) {
    pthread_mutex_unlock(&ga_mutex);
}

int ga_fail(int status, const char * format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(ga_error, sizeof(ga_error), format, args);
    va_end(args);
    return status;
}

const char * ggml_async_last_error(void) {
    return ga_error;
}

void ggml_async_log_set(void (*callback)(int level, const char * text, void * user_data), void * user_data) {
    struct ga_log_sink * sink = NULL;
    if (callback) {
        ga_lock();
        sink = ga_sinks;
        while (sink && (sink->callback != callback || sink->user_data != user_data)) {
            sink = sink->next;
        }
        if (!sink && (sink = ga_calloc(1, sizeof(*sink)))) {
            *sink    = (struct ga_log_sink) { callback, user_data, ga_sinks };
            ga_sinks = sink;
        }
        ga_unlock();
        if (!sink) {
            return;
        }
    }
    atomic_store(&ga_sink, sink);
}

void ga_log(struct ga_host * host, int level, const char * format, ...) {
    char text[1024] = "ggml-async: ";
    const size_t prefix = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + prefix, sizeof(text) - prefix - 1, format, args);
    va_end(args);
    strcat(text, "\n");

    struct ga_log_sink * sink = atomic_load(&ga_sink);
    if (sink) {
        sink->callback(level, text, sink->user_data);
    } else if (host && host->api.ggml_log_internal) {
        host->api.ggml_log_internal(level, "%s", text);
    } else {
        fputs(text, stderr);
    }
}
