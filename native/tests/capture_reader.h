// Reads a capture back, strictly: any byte that is not as docs/capture-format.md says ends the test. Shared with the
// layer's tests.
#pragma once

#include "capture.h"
#include "test.h"

enum { READER_MAX_WRITERS = 64, READER_MAX_EVENTS = 400000, READER_MAX_NAMES = 4096 };

struct reader_writer {
    uint64_t id;
    uint32_t sequence;      // of the next record
    uint32_t component;
    uint32_t pid;
    int      n_of_kind[16];
    uint64_t last_dropped, last_written, last_beyond;
    char   * names[READER_MAX_NAMES];
    uint32_t n_names;
    int      modes[32];
    int      n_modes;
    char     text[8192];    // strings of HELLO, HOST, DEVICE and REFUSED, each followed by '\n'
};

struct reader {
    struct reader_writer    writers[READER_MAX_WRITERS];
    int                     n_writers;
    struct ga_capture_event * events;
    int                   * event_writer;
    int                     n_events;
};

static inline uint32_t reader_crc(const uint8_t * data, size_t size) {
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < size; i++) {
        crc ^= data[i];
        for (int k = 0; k < 8; k++) {
            crc = crc & 1 ? 0xedb88320u ^ (crc >> 1) : crc >> 1;
        }
    }
    return ~crc;
}

static inline uint32_t reader_u32(const uint8_t * p) {
    uint32_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static inline uint64_t reader_u64(const uint8_t * p) {
    uint64_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static inline const uint8_t * reader_texts(struct reader_writer * writer, const uint8_t * p, const uint8_t * end, int n) {
    for (int i = 0; i < n; i++) {
        uint16_t length;
        memcpy(&length, p, 2);
        CHECK(p + 2 + length <= end);
        strncat(writer->text, (const char *) p + 2, length);
        strcat(writer->text, "\n");
        p += 2 + length;
    }
    return p;
}

static inline void reader_names(struct reader_writer * writer, const uint8_t * p, const uint8_t * end) {
    const uint32_t first = reader_u32(p), count = reader_u32(p + 4);
    CHECK_INT(first, writer->n_names + 1);
    p += 8;
    for (uint32_t i = 0; i < count; i++) {
        uint16_t length;
        memcpy(&length, p, 2);
        CHECK(p + 2 + length <= end && writer->n_names + 1 < READER_MAX_NAMES);
        writer->names[++writer->n_names] = strndup((const char *) p + 2, length);
        p += 2 + length;
    }
}

static inline void reader_counters(struct reader_writer * writer, const uint8_t * p) {
    const uint32_t scope = reader_u32(p + 8), count = reader_u32(p + 16);
    p += 24;
    for (uint32_t i = 0; i < count; i++, p += 16) {
        const uint32_t name = reader_u32(p);
        CHECK(name > 0 && name <= writer->n_names);
        if (scope == GA_CAPTURE_SCOPE_WRITER) {
            uint64_t * values[] = { &writer->last_written, &writer->last_dropped, &writer->last_beyond };
            if (i < 3) {
                *values[i] = reader_u64(p + 8);
            }
        }
    }
}

static inline void reader_record(struct reader * r, struct reader_writer * writer, int kind, const uint8_t * p, uint32_t length) {
    const uint8_t * end = p + length;
    switch (kind) {
        case GA_CAPTURE_HELLO:
            writer->component = reader_u32(p);
            writer->pid       = reader_u32(p + 4);
            reader_texts(writer, p + 32, end, 3);
            break;
        case GA_CAPTURE_HOST:    reader_texts(writer, p + 16, end, 3); break;
        case GA_CAPTURE_DEVICE:  reader_texts(writer, p + 16, end, 2); break;
        case GA_CAPTURE_REFUSED: reader_texts(writer, p + 16, end, 1); break;
        case GA_CAPTURE_MODE:    writer->modes[writer->n_modes++] = (int) reader_u32(p + 12); break;
        case GA_CAPTURE_NAMES:   reader_names(writer, p, end); break;
        case GA_CAPTURE_COUNTERS: reader_counters(writer, p); break;
        case GA_CAPTURE_EVENTS: {
            const uint32_t count = reader_u32(p + 4);
            CHECK_INT(reader_u32(p), sizeof(struct ga_capture_event));
            CHECK(8 + count*sizeof(struct ga_capture_event) <= length && r->n_events + (int) count <= READER_MAX_EVENTS);
            for (uint32_t i = 0; i < count; i++) {
                memcpy(&r->events[r->n_events], p + 8 + i*sizeof(struct ga_capture_event), sizeof(struct ga_capture_event));
                CHECK(r->events[r->n_events].name <= writer->n_names);
                r->event_writer[r->n_events++] = (int) (writer - r->writers);
            }
            break;
        }
        default: break;
    }
}

// Returns the bytes of whole records; the rest of the file was cut off (allowed only where the test expects it).
static inline size_t reader_open(struct reader * r, const char * path, bool whole) {
    memset(r, 0, sizeof(*r));
    r->events       = calloc(READER_MAX_EVENTS, sizeof(r->events[0]));
    r->event_writer = calloc(READER_MAX_EVENTS, sizeof(int));
    FILE * file = fopen(path, "rb");
    CHECK(file);
    fseek(file, 0, SEEK_END);
    const size_t size = (size_t) ftell(file);
    rewind(file);
    uint8_t * data = malloc(size + 1);
    CHECK_INT(fread(data, 1, size, file), size);
    fclose(file);
    size_t at = 0;
    while (at + 32 <= size && at + 32 + reader_u32(data + at + 8) <= size) {
        uint8_t *      record = data + at;
        const uint32_t length = reader_u32(record + 8), crc = reader_u32(record + 12);
        const uint64_t id     = reader_u64(record + 16);
        CHECK(!memcmp(record, "GArc", 4) && length % 8 == 0);
        memset(record + 12, 0, 4);
        CHECK_INT(reader_crc(record, 32 + length), crc);
        int w = 0;
        while (w < r->n_writers && r->writers[w].id != id) {
            w++;
        }
        uint16_t version, kind;
        memcpy(&version, record + 4, 2);
        memcpy(&kind, record + 6, 2);
        CHECK_INT(version, GA_CAPTURE_VERSION);
        CHECK(kind >= 1 && kind <= 10 && w < READER_MAX_WRITERS);
        struct reader_writer * writer = &r->writers[w];
        if (w == r->n_writers) {
            r->n_writers++;
            writer->id = id;
            CHECK_INT(kind, GA_CAPTURE_HELLO);      // before anything else
        }
        CHECK_INT(reader_u32(record + 24), writer->sequence);
        writer->sequence++;
        writer->n_of_kind[kind]++;
        reader_record(r, writer, kind, record + 32, length);
        at += 32 + length;
    }
    CHECK(!whole || at == size);
    free(data);
    return at;
}

static inline void reader_close(struct reader * r) {
    for (int w = 0; w < r->n_writers; w++) {
        for (uint32_t i = 1; i <= r->writers[w].n_names; i++) {
            free(r->writers[w].names[i]);
        }
    }
    free(r->events);
    free(r->event_writer);
}

static inline int reader_count(const struct reader * r, int kind) {
    int n = 0;
    for (int i = 0; i < r->n_events; i++) {
        n += r->events[i].kind == kind;
    }
    return n;
}

static inline const char * reader_name(const struct reader * r, int event) {
    return r->events[event].name ? r->writers[r->event_writer[event]].names[r->events[event].name] : "";
}

// A fresh path in the tests' folder, and the environment that names it.
static inline const char * reader_path(const char * folder) {
    static char path[4096];
    snprintf(path, sizeof(path), "%s/capture-%d", folder, (int) getpid());
    unlink(path);
    setenv(GA_CAPTURE_ENV, path, 1);
    return path;
}

// Runs it in a process of its own, with what comes at its end.
static inline void reader_child(void (*run)(void), int expected_status) {
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        run();
        exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_INT(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status), expected_status);
}
