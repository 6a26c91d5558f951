// The writer of the capture file. Compiled into the plug-in and into the Vulkan layer; each is a writer of its own.
//
//   any thread -> ring -> the writer's thread -> buffer -> one write(2) to the end of the file
//
// Records that are not events (HELLO, HOST, MODE, ...) are rare and go straight into the buffer and the file, under
// ga_capture_lock. The file's layout is in docs/capture-format.md.

#define _GNU_SOURCE
#include "capture.h"
#include "ring.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    GA_CAPTURE_HEADER   = 32,
    GA_CAPTURE_BATCH    = 1024,             // events in one record
    GA_CAPTURE_FLUSH    = 512*1024,         // bytes
    GA_CAPTURE_TICK_MS  = 20,               // between two looks at the ring
    GA_CAPTURE_IDLE_MS  = 100,              // after a second without events
    GA_CAPTURE_MAX_TEXT = 4096,
};

enum ga_capture_state {
    GA_CAPTURE_STATE_NONE,
    GA_CAPTURE_STATE_ON,
    GA_CAPTURE_STATE_LIMITED,   // events are counted, not written
    GA_CAPTURE_STATE_FORKED,    // a child that has not begun yet
    GA_CAPTURE_STATE_ENDED,
};

struct ga_capture_names {
    char    ** texts;           // id - 1
    uint32_t   n;
    uint32_t   cap;
    uint32_t   n_written;       // those before it are in the file
    uint32_t * table;           // ids by hash, twice GA_CAPTURE_MAX_NAMES slots
};

static _Atomic(int)              ga_state;
static _Atomic(struct ga_ring *) ga_events;
static _Atomic(uint64_t)         ga_n_written;
static _Atomic(uint64_t)         ga_n_dropped;
static _Atomic(uint64_t)         ga_n_beyond;
static _Atomic(uint64_t)         ga_n_unnamed;

// Everything below is under the lock, except what only the writer's thread touches.
static pthread_mutex_t ga_capture_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t  ga_capture_wake;
static struct {
    const struct ga_capture_component * component;
    int                      fd;
    uint64_t                 writer;
    uint32_t                 sequence;
    uint64_t                 limit;
    int64_t                  hello_ns;
    struct ga_capture_names  names;
    uint8_t                * buffer;
    size_t                   size;
    size_t                   cap;
    size_t                   open;          // where the record being built begins
    bool                     broken;        // no memory while building: nothing of it is written
    pthread_t                thread;
    bool                     has_thread;
    bool                     stop;
} ga_file = { .fd = -1 };

static int64_t ga_clock_ns(clockid_t clock) {
    struct timespec ts;
    clock_gettime(clock, &ts);
    return (int64_t) ts.tv_sec*1000000000 + ts.tv_nsec;
}

bool ga_capture_on(void) {
    const int state = atomic_load_explicit(&ga_state, memory_order_relaxed);
    return state != GA_CAPTURE_STATE_NONE && state != GA_CAPTURE_STATE_ENDED;
}

//
// Building records
//

static void ga_put(const void * data, size_t size) {
    if (ga_file.size + size > ga_file.cap) {
        size_t cap = ga_file.cap ? ga_file.cap : 65536;
        while (cap < ga_file.size + size) {
            cap *= 2;
        }
        uint8_t * buffer = realloc(ga_file.buffer, cap);
        if (!buffer) {
            ga_file.broken = true;
            return;
        }
        ga_file.buffer = buffer;
        ga_file.cap    = cap;
    }
    memcpy(ga_file.buffer + ga_file.size, data, size);
    ga_file.size += size;
}

// The targets are little-endian; anything else would not compile (below).
static void ga_put_u32(uint32_t value) { ga_put(&value, sizeof(value)); }
static void ga_put_i32(int32_t  value) { ga_put(&value, sizeof(value)); }
static void ga_put_u64(uint64_t value) { ga_put(&value, sizeof(value)); }
static void ga_put_i64(int64_t  value) { ga_put(&value, sizeof(value)); }

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the capture file is little-endian");

static void ga_put_text(const char * text) {
    size_t n = text ? strlen(text) : 0;
    n = n < GA_CAPTURE_MAX_TEXT ? n : GA_CAPTURE_MAX_TEXT;
    const uint16_t length = (uint16_t) n;
    ga_put(&length, sizeof(length));
    ga_put(text, n);
}

static uint32_t ga_crc32(const uint8_t * data, size_t size) {
    static uint32_t table[256];     // under the lock
    if (!table[1]) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int k = 0; k < 8; k++) {
                c = c & 1 ? 0xedb88320u ^ (c >> 1) : c >> 1;
            }
            table[i] = c;
        }
    }
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < size; i++) {
        crc = table[(crc ^ data[i]) & 0xff] ^ (crc >> 8);
    }
    return crc ^ 0xffffffffu;
}

static void ga_record_begin(void) {
    const uint8_t header[GA_CAPTURE_HEADER] = {0};
    ga_file.open   = ga_file.size;
    ga_file.broken = false;
    ga_put(header, sizeof(header));
}

static void ga_record_end(enum ga_capture_kind kind) {
    static const uint8_t zeros[8];
    ga_put(zeros, (8 - (ga_file.size - ga_file.open) % 8) % 8);
    if (ga_file.broken) {
        ga_file.size = ga_file.open;
        ga_file.sequence++;             // the reader sees that one is missing
        return;
    }
    uint8_t *      record   = ga_file.buffer + ga_file.open;
    const size_t   size     = ga_file.size - ga_file.open;
    const uint16_t version  = GA_CAPTURE_VERSION;
    const uint16_t kind16   = (uint16_t) kind;
    const uint32_t length   = (uint32_t) (size - GA_CAPTURE_HEADER);
    const uint32_t sequence = ga_file.sequence++;
    memcpy(record, "GArc", 4);
    memcpy(record +  4, &version,        2);
    memcpy(record +  6, &kind16,         2);
    memcpy(record +  8, &length,         4);
    memcpy(record + 16, &ga_file.writer, 8);
    memcpy(record + 24, &sequence,       4);
    const uint32_t crc = ga_crc32(record, size);
    memcpy(record + 12, &crc, 4);
}

// Ends the capture of this writer: the program goes on as if there were none.
static void ga_capture_give_up(int error) {
    atomic_store(&ga_state, GA_CAPTURE_STATE_ENDED);
    if (ga_file.component->failed) {
        char text[256];
        snprintf(text, sizeof(text), "the capture ends here: cannot write it: %s", strerror(error));
        ga_file.component->failed(text);
    }
}

static void ga_flush(void) {
    if (!ga_file.size || !ga_capture_on()) {
        ga_file.size = 0;
        return;
    }
    ssize_t n;
    do {
        n = write(ga_file.fd, ga_file.buffer, ga_file.size);
    } while (n < 0 && errno == EINTR);
    if (n != (ssize_t) ga_file.size) {
        ga_capture_give_up(n < 0 ? errno : ENOSPC);
    }
    ga_file.size = 0;
}

//
// Names
//

static uint32_t ga_name_hash(const char * text) {
    uint32_t h = 2166136261u;
    for (; *text; text++) {
        h = (h ^ (uint8_t) *text)*16777619u;
    }
    return h;
}

static bool ga_names_reserve(struct ga_capture_names * names) {
    if (!names->table && !(names->table = calloc(2*GA_CAPTURE_MAX_NAMES, sizeof(names->table[0])))) {
        return false;
    }
    if (names->n < names->cap) {
        return true;
    }
    const uint32_t cap   = names->cap ? 2*names->cap : 256;
    char **        texts = realloc(names->texts, cap*sizeof(texts[0]));
    if (!texts) {
        return false;
    }
    names->texts = texts;
    names->cap   = cap;
    return true;
}

// The id of a name; 0 for none, or when there is no room for another.
static uint32_t ga_name(const char * text) {
    struct ga_capture_names * names = &ga_file.names;
    if (!text || !*text) {
        return 0;
    }
    if (!ga_names_reserve(names)) {
        atomic_fetch_add_explicit(&ga_n_unnamed, 1, memory_order_relaxed);
        return 0;
    }
    uint32_t slot = ga_name_hash(text) % (2*GA_CAPTURE_MAX_NAMES);
    while (names->table[slot]) {
        if (!strcmp(names->texts[names->table[slot] - 1], text)) {
            return names->table[slot];
        }
        slot = (slot + 1) % (2*GA_CAPTURE_MAX_NAMES);
    }
    char * copy = names->n < GA_CAPTURE_MAX_NAMES ? strdup(text) : NULL;
    if (!copy) {
        atomic_fetch_add_explicit(&ga_n_unnamed, 1, memory_order_relaxed);
        return 0;
    }
    names->texts[names->n++] = copy;
    return names->table[slot] = names->n;
}

static void ga_names_write(void) {
    struct ga_capture_names * names = &ga_file.names;
    if (names->n_written == names->n) {
        return;
    }
    ga_record_begin();
    ga_put_u32(names->n_written + 1);
    ga_put_u32(names->n - names->n_written);
    for (uint32_t i = names->n_written; i < names->n; i++) {
        ga_put_text(names->texts[i]);
    }
    ga_record_end(GA_CAPTURE_NAMES);
    names->n_written = names->n;
}

static void ga_names_forget(void) {
    for (uint32_t i = 0; i < ga_file.names.n; i++) {
        free(ga_file.names.texts[i]);
    }
    free(ga_file.names.texts);
    free(ga_file.names.table);
    ga_file.names = (struct ga_capture_names) {0};
}

//
// Records at once
//

static bool ga_direct_begin(void) {
    pthread_mutex_lock(&ga_capture_lock);
    if (!ga_capture_on() || atomic_load(&ga_state) == GA_CAPTURE_STATE_FORKED) {
        pthread_mutex_unlock(&ga_capture_lock);
        return false;
    }
    ga_record_begin();
    return true;
}

static void ga_direct_end(enum ga_capture_kind kind) {
    ga_record_end(kind);
    ga_flush();
    pthread_mutex_unlock(&ga_capture_lock);
}

void ga_capture_host(int host, int api_version, const char * library, const char * version, const char * layout) {
    if (ga_direct_begin()) {
        ga_put_i32(host);
        ga_put_i32(api_version);
        ga_put_i64(ga_clock_ns(CLOCK_MONOTONIC));
        ga_put_text(library);
        ga_put_text(version);
        ga_put_text(layout);
        ga_direct_end(GA_CAPTURE_HOST);
    }
}

void ga_capture_device(int host, int index, int type, const char * name, const char * description) {
    if (ga_direct_begin()) {
        ga_put_i32(host);
        ga_put_i32(index);
        ga_put_i32(type);
        ga_put_u32(0);
        ga_put_text(name);
        ga_put_text(description);
        ga_direct_end(GA_CAPTURE_DEVICE);
    }
}

void ga_capture_mode(int host, int mode) {
    if (ga_direct_begin()) {
        ga_put_i64(ga_clock_ns(CLOCK_MONOTONIC));
        ga_put_i32(host);
        ga_put_i32(mode);
        ga_direct_end(GA_CAPTURE_MODE);
    }
}

void ga_capture_refused(int status, const char * reason) {
    if (ga_direct_begin()) {
        ga_put_i64(ga_clock_ns(CLOCK_MONOTONIC));
        ga_put_i32(status);
        ga_put_u32(0);
        ga_put_text(reason);
        ga_direct_end(GA_CAPTURE_REFUSED);
    }
}

void ga_capture_counters(int scope, int index, const char * (*name)(int index), const uint64_t * values, int n) {
    pthread_mutex_lock(&ga_capture_lock);
    if (ga_capture_on() && atomic_load(&ga_state) != GA_CAPTURE_STATE_FORKED) {
        for (int i = 0; i < n; i++) {
            ga_name(name(i));
        }
        ga_names_write();
        ga_record_begin();
        ga_put_i64(ga_clock_ns(CLOCK_MONOTONIC));
        ga_put_u32((uint32_t) scope);
        ga_put_i32(index);
        ga_put_u32((uint32_t) n);
        ga_put_u32(0);
        for (int i = 0; i < n; i++) {
            ga_put_u32(ga_name(name(i)));
            ga_put_u32(0);
            ga_put_u64(values[i]);
        }
        ga_record_end(GA_CAPTURE_COUNTERS);
        ga_flush();
    }
    pthread_mutex_unlock(&ga_capture_lock);
}

//
// The writer's thread
//

static bool ga_full_locked(void) {
    struct stat status;
    return fstat(ga_file.fd, &status) == 0 && (uint64_t) status.st_size + ga_file.size + GA_CAPTURE_BATCH*sizeof(struct ga_capture_event) > ga_file.limit;
}

static void ga_limit_locked(void) {
    int on = GA_CAPTURE_STATE_ON;
    if (atomic_compare_exchange_strong(&ga_state, &on, GA_CAPTURE_STATE_LIMITED)) {
        ga_record_begin();
        ga_put_i64(ga_clock_ns(CLOCK_MONOTONIC));
        ga_put_u64(ga_file.limit);
        ga_record_end(GA_CAPTURE_LIMIT);
    }
}

// Takes what is in the ring, in batches. Returns how many.
static size_t ga_drain_locked(void) {
    static struct ga_capture_event events[GA_CAPTURE_BATCH];
    _Alignas(16) char element[GA_CAPTURE_MAX_ELEMENT];
    struct ga_ring *  ring  = atomic_load_explicit(&ga_events, memory_order_acquire);
    size_t            total = 0;
    for (;;) {
        uint32_t n = 0;
        while (n < GA_CAPTURE_BATCH && ga_ring_take(ring, element)) {
            const char * name = ga_file.component->encode(element, &events[n]);
            events[n].name = ga_name(name);
            n++;
        }
        if (!n) {
            return total;
        }
        total += n;
        if (atomic_load(&ga_state) == GA_CAPTURE_STATE_ON && ga_full_locked()) {
            ga_limit_locked();
        }
        if (atomic_load(&ga_state) != GA_CAPTURE_STATE_ON) {
            atomic_fetch_add_explicit(&ga_n_beyond, n, memory_order_relaxed);
            continue;
        }
        ga_names_write();
        ga_record_begin();
        ga_put_u32((uint32_t) sizeof(events[0]));
        ga_put_u32(n);
        ga_put(events, n*sizeof(events[0]));
        ga_record_end(GA_CAPTURE_EVENTS);
        atomic_fetch_add_explicit(&ga_n_written, n, memory_order_relaxed);
        if (ga_file.size > GA_CAPTURE_FLUSH) {
            ga_flush();
        }
    }
}

static const char * ga_own_counter_name(int index) {
    static const char * const names[] = { "events_written", "events_dropped", "events_beyond_limit", "names_lost" };
    return names[index];
}

static void ga_snapshot(void) {
    ga_file.component->counters();
    const uint64_t values[] = {
        atomic_load(&ga_n_written), atomic_load(&ga_n_dropped), atomic_load(&ga_n_beyond), atomic_load(&ga_n_unnamed),
    };
    ga_capture_counters(GA_CAPTURE_SCOPE_WRITER, 0, ga_own_counter_name, values, 4);
}

static uint64_t ga_activity(void) {
    return atomic_load(&ga_n_written) + atomic_load(&ga_n_dropped) + atomic_load(&ga_n_beyond);
}

// A snapshot is due a second after the last one, if anything happened since; later ones, once the limit is reached, at
// growing distances, so that the file stays bounded by more than its events.
static bool ga_snapshot_due(int64_t now, int64_t last) {
    int64_t distance = 1000000000;
    if (atomic_load(&ga_state) == GA_CAPTURE_STATE_LIMITED && (now - ga_file.hello_ns)/64 > distance) {
        distance = (now - ga_file.hello_ns)/64;
    }
    return now - last >= distance;
}

static void * ga_capture_thread(void * unused) {
    (void) unused;
    int64_t  snapshot_ns = ga_clock_ns(CLOCK_MONOTONIC), event_ns = 0;
    uint64_t snapshot_activity = 0;
    pthread_mutex_lock(&ga_capture_lock);
    while (!ga_file.stop) {
        if (ga_drain_locked()) {
            event_ns = ga_clock_ns(CLOCK_MONOTONIC);
        }
        ga_flush();
        const int64_t now = ga_clock_ns(CLOCK_MONOTONIC);
        if (ga_snapshot_due(now, snapshot_ns) && ga_activity() != snapshot_activity) {
            snapshot_ns       = now;
            snapshot_activity = ga_activity();
            pthread_mutex_unlock(&ga_capture_lock);
            ga_snapshot();
            pthread_mutex_lock(&ga_capture_lock);
        }
        const int64_t until = now + 1000000*(int64_t) (now - event_ns < 1000000000 ? GA_CAPTURE_TICK_MS : GA_CAPTURE_IDLE_MS);
        const struct timespec ts = { until/1000000000, until%1000000000 };
        if (!ga_file.stop) {
            pthread_cond_timedwait(&ga_capture_wake, &ga_capture_lock, &ts);
        }
    }
    ga_drain_locked();
    pthread_mutex_unlock(&ga_capture_lock);
    ga_snapshot();
    return NULL;
}

static bool ga_thread_start_locked(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&ga_capture_wake, &attributes);
    pthread_condattr_destroy(&attributes);
    // The program's signals are the program's.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    ga_file.stop       = false;
    ga_file.has_thread = pthread_create(&ga_file.thread, NULL, ga_capture_thread, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (ga_file.has_thread) {
        pthread_setname_np(ga_file.thread, "ggml-async");
    }
    return ga_file.has_thread;
}

// The program ends: what is in the ring, the last counters, and that it was in order.
__attribute__((destructor)) static void ga_capture_finish(void) {
    pthread_mutex_lock(&ga_capture_lock);
    const bool mine = ga_file.has_thread;   // not a child's that never began
    ga_file.stop = true;
    if (mine) {
        ga_file.has_thread = false;
        pthread_cond_signal(&ga_capture_wake);
    }
    pthread_mutex_unlock(&ga_capture_lock);
    if (!mine) {
        return;
    }
    pthread_join(ga_file.thread, NULL);
    if (ga_direct_begin()) {
        ga_put_i64(ga_clock_ns(CLOCK_MONOTONIC));
        ga_direct_end(GA_CAPTURE_END);
    }
    atomic_store(&ga_state, GA_CAPTURE_STATE_ENDED);
}

//
// Beginning
//

static void ga_hello_locked(void) {
    char    program[PATH_MAX] = "";
    Dl_info info;
    if (getrandom(&ga_file.writer, sizeof(ga_file.writer), GRND_NONBLOCK) != sizeof(ga_file.writer)) {
        ga_file.writer = (uint64_t) ga_clock_ns(CLOCK_MONOTONIC)*2654435761u ^ ((uint64_t) getpid() << 32) ^ (uint64_t) ga_file.component->id;
    }
    ga_file.sequence = 0;
    ga_file.size     = 0;
    ga_file.hello_ns = ga_clock_ns(CLOCK_MONOTONIC);
    const ssize_t n = readlink("/proc/self/exe", program, sizeof(program) - 1);
    program[n > 0 ? n : 0] = 0;
    ga_record_begin();
    ga_put_u32((uint32_t) ga_file.component->id);
    ga_put_u32((uint32_t) getpid());
    ga_put_i32(ga_file.component->abi_version);
    ga_put_u32((uint32_t) getppid());
    ga_put_i64(ga_file.hello_ns);
    ga_put_i64(ga_clock_ns(CLOCK_REALTIME));
    ga_put_text(ga_file.component->version);
    ga_put_text(dladdr((const void *) ga_file.component, &info) ? info.dli_fname : "");
    ga_put_text(program);
    ga_record_end(GA_CAPTURE_HELLO);
    ga_flush();
}

static bool ga_begin_locked(void) {
    struct ga_ring * ring = ga_ring_new(GA_CAPTURE_RING, ga_file.component->element_size);
    if (!ring) {
        return false;
    }
    ring->retired = atomic_load(&ga_events);    // a parent's: a thread of it may have been inside
    atomic_store_explicit(&ga_events, ring, memory_order_release);
    atomic_store(&ga_n_written, 0);
    atomic_store(&ga_n_dropped, 0);
    atomic_store(&ga_n_beyond,  0);
    atomic_store(&ga_n_unnamed, 0);
    atomic_store(&ga_state, GA_CAPTURE_STATE_ON);
    ga_hello_locked();
    if (ga_capture_on() && !ga_thread_start_locked()) {
        ga_capture_give_up(EAGAIN);
    }
    return ga_capture_on();
}

static void ga_fork_before(void) {
    pthread_mutex_lock(&ga_capture_lock);
}

static void ga_fork_parent(void) {
    pthread_mutex_unlock(&ga_capture_lock);
}

static void ga_fork_child(void) {
    const int state = atomic_load(&ga_state);
    if (state == GA_CAPTURE_STATE_ON || state == GA_CAPTURE_STATE_LIMITED) {
        atomic_store(&ga_state, GA_CAPTURE_STATE_FORKED);
    }
    ga_file.has_thread = false;
    ga_file.size       = 0;
    pthread_mutex_unlock(&ga_capture_lock);
}

// A child of fork that has something to say: from here on a writer of its own.
static void ga_capture_restart(void) {
    pthread_mutex_lock(&ga_capture_lock);
    const bool forked = atomic_load(&ga_state) == GA_CAPTURE_STATE_FORKED;
    bool       ok     = forked;
    if (forked) {
        ga_names_forget();
        ok = ga_begin_locked();
        if (!ok) {
            atomic_store(&ga_state, GA_CAPTURE_STATE_ENDED);
        }
    }
    pthread_mutex_unlock(&ga_capture_lock);
    if (ok) {
        ga_file.component->announce();
    }
}

static uint64_t ga_limit_from_environment(void) {
    const char * text = getenv(GA_CAPTURE_LIMIT_ENV);
    char *       end  = NULL;
    const unsigned long long mib = text ? strtoull(text, &end, 10) : 0;
    const bool   ok   = text && *text >= '0' && *text <= '9' && !*end && mib < ((unsigned long long) 1 << 40);
    return (ok ? mib : (unsigned long long) GA_CAPTURE_LIMIT_MIB) << 20;
}

bool ga_capture_start(const struct ga_capture_component * component) {
    static bool tried;
    const char * path = getenv(GA_CAPTURE_ENV);
    pthread_mutex_lock(&ga_capture_lock);
    if (!tried && path && *path) {
        tried = true;
        ga_file.component = component;
        ga_file.limit     = ga_limit_from_environment();
        ga_file.fd        = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        if (ga_file.fd < 0) {
            ga_capture_give_up(errno);
        } else if (!ga_begin_locked()) {
            ga_capture_give_up(ENOMEM);
        } else {
            pthread_atfork(ga_fork_before, ga_fork_parent, ga_fork_child);
        }
    }
    pthread_mutex_unlock(&ga_capture_lock);
    return ga_capture_on();
}

void ga_capture_put(const void * element) {
    const int state = atomic_load_explicit(&ga_state, memory_order_relaxed);
    if (state == GA_CAPTURE_STATE_LIMITED) {
        atomic_fetch_add_explicit(&ga_n_beyond, 1, memory_order_relaxed);
        return;
    }
    if (state == GA_CAPTURE_STATE_FORKED) {
        ga_capture_restart();
    }
    if (!ga_capture_on()) {
        return;
    }
    if (!ga_ring_put(atomic_load_explicit(&ga_events, memory_order_acquire), element)) {
        atomic_fetch_add_explicit(&ga_n_dropped, 1, memory_order_relaxed);
    }
}
