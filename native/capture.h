// The capture file: what the plug-in and the Vulkan layer share to write it. docs/capture-format.md is its manual.
//
// Both libraries compile capture.c and ring.c into themselves; each is a writer of its own. One thread per writer takes
// events from a ring and appends them; nobody waits for it.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GA_CAPTURE_ENV       "GGML_ASYNC_CAPTURE"
#define GA_CAPTURE_LIMIT_ENV "GGML_ASYNC_CAPTURE_LIMIT"     // MiB

enum {
    GA_CAPTURE_VERSION       = 1,
    GA_CAPTURE_LIMIT_MIB     = 256,
    GA_CAPTURE_RING          = 16384,
    GA_CAPTURE_MAX_NAMES     = 65536,
    GA_CAPTURE_MAX_ELEMENT   = 512,
};

enum ga_capture_component_id { GA_CAPTURE_PLUGIN = 1, GA_CAPTURE_LAYER = 2 };

enum ga_capture_kind {
    GA_CAPTURE_HELLO    = 1,
    GA_CAPTURE_HOST     = 2,
    GA_CAPTURE_DEVICE   = 3,
    GA_CAPTURE_NAMES    = 4,
    GA_CAPTURE_EVENTS   = 5,
    GA_CAPTURE_COUNTERS = 6,
    GA_CAPTURE_MODE     = 7,
    GA_CAPTURE_REFUSED  = 8,
    GA_CAPTURE_LIMIT    = 9,
    GA_CAPTURE_END      = 10,
};

enum ga_capture_scope {
    GA_CAPTURE_SCOPE_HOST   = 1,
    GA_CAPTURE_SCOPE_LAYER  = 2,
    GA_CAPTURE_SCOPE_DEVICE = 3,
    GA_CAPTURE_SCOPE_CAUSE  = 4,
    GA_CAPTURE_SCOPE_WRITER = 5,
};

// Kinds 1 .. 5 are enum ggml_async_record_kind.
enum { GA_CAPTURE_EVENT_WAIT = 16, GA_CAPTURE_EVENT_SUBMIT = 17 };

enum { GA_CAPTURE_FLAG_JOINED = 1, GA_CAPTURE_FLAG_TIMEOUT = 2 };

struct ga_capture_event {
    uint8_t  kind;
    uint8_t  mode;
    uint8_t  path;
    uint8_t  cause;
    int16_t  device;
    int16_t  layer;
    int16_t  host;
    uint16_t decline;
    uint32_t name;
    uint32_t stage;
    uint32_t rows;
    uint32_t n_readbacks;
    uint32_t n_sync;
    uint32_t thread;
    uint32_t flags;
    uint64_t bytes;
    int64_t  t_ns;
    int64_t  duration_ns;
    int64_t  issue_ns;
    int64_t  wait_ns;
    int64_t  copy_ns;
    int64_t  device_wait_ns;
};

_Static_assert(sizeof(struct ga_capture_event) == 96, "the file's layout");

// Who writes. `element_size` bytes go through the ring for each event; `encode` turns them into an event on the writer's
// thread and returns the tensor's name, or NULL. `announce` writes HOST, DEVICE and MODE records (again after a fork),
// `counters` the snapshots; both may be called from any thread.
struct ga_capture_component {
    int          id;
    int          abi_version;
    const char * version;
    size_t       element_size;
    const char * (*encode)(const void * element, struct ga_capture_event * event);
    void         (*announce)(void);
    void         (*counters)(void);
    void         (*failed)(const char * text);      // one line for the log; NULL: say nothing
};

// Opens the file that the environment names and says hello; once, later calls return at once. False: no capture.
bool ga_capture_start(const struct ga_capture_component * component);

// Whether events are wanted. One relaxed load.
bool ga_capture_on(void);

// One event, of the component's element_size. Never waits; a full ring drops and counts.
void ga_capture_put(const void * element);

// Records out of the event stream, written at once.
void ga_capture_host(int host, int api_version, const char * library, const char * version, const char * layout);
void ga_capture_device(int host, int index, int type, const char * name, const char * description);
void ga_capture_mode(int host, int mode);
void ga_capture_refused(int status, const char * reason);
// `name(i)` is the name of values[i]. Cheap after the first time.
void ga_capture_counters(int scope, int index, const char * (*name)(int index), const uint64_t * values, int n);
