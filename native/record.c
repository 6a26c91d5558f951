// Event records: to the reader in this process (ggml_async_record_read), and to the capture file.

#include "ga.h"

static _Atomic(struct ga_ring *) ga_ring;
static _Atomic(bool)             ga_recording;
static _Atomic(uint64_t)         ga_dropped;

bool ga_record_on(void) {
    return atomic_load_explicit(&ga_recording, memory_order_relaxed) || ga_capture_on();
}

void ga_record_put(const struct ggml_async_record * record) {
    if (ga_capture_on()) {
        ga_capture_put(record);
    }
    struct ga_ring * ring = atomic_load_explicit(&ga_ring, memory_order_acquire);
    if (ring && atomic_load_explicit(&ga_recording, memory_order_relaxed) && !ga_ring_put(ring, record)) {
        atomic_fetch_add_explicit(&ga_dropped, 1, memory_order_relaxed);
    }
}

int ggml_async_record_start(size_t capacity) {
    if (capacity == 0 || capacity > ((size_t) 1 << 26)) {
        return ga_fail(GGML_ASYNC_ERR_ARGUMENT, "record capacity must be 1 .. 67108864, not %zu", capacity);
    }
    size_t n = 64;
    while (n < capacity) {
        n *= 2;
    }
    ga_lock();
    struct ga_ring * ring = atomic_load(&ga_ring);
    if (!ring || ring->mask + 1 < n) {
        struct ga_ring * larger = ga_ring_new(n, sizeof(struct ggml_async_record));
        if (!larger) {
            ga_unlock();
            return ga_fail(GGML_ASYNC_ERR_NO_MEMORY, "no memory for %zu records", n);
        }
        larger->retired = ring;
        ring            = larger;
    } else {
        while (ga_ring_take(ring, NULL)) {
        }
    }
    atomic_store(&ga_dropped, 0);
    atomic_store_explicit(&ga_ring, ring, memory_order_release);
    atomic_store(&ga_recording, true);
    ga_unlock();
    return GGML_ASYNC_OK;
}

int ggml_async_record_stop(void) {
    atomic_store(&ga_recording, false);
    return GGML_ASYNC_OK;
}

int ggml_async_record_read(struct ggml_async_record * out, int n) {
    if (!out || n < 0) {
        return ga_fail(GGML_ASYNC_ERR_ARGUMENT, "ggml_async_record_read needs room for records");
    }
    struct ga_ring * ring = atomic_load_explicit(&ga_ring, memory_order_acquire);
    int count = 0;
    while (ring && count < n && ga_ring_take(ring, &out[count])) {
        count++;
    }
    return count;
}

uint64_t ggml_async_record_dropped(void) {
    return atomic_load(&ga_dropped);
}

//
// The plug-in as a writer of the capture
//

static const char * ga_record_encode(const void * element, struct ga_capture_event * event) {
    const struct ggml_async_record * record = element;
    *event = (struct ga_capture_event) {
        .kind           = (uint8_t) record->kind,
        .mode           = (uint8_t) record->mode,
        .path           = record->kind == GGML_ASYNC_RECORD_READBACK ? (uint8_t) record->path : 255,
        .device         = (int16_t) record->device,
        .layer          = (int16_t) record->layer,
        .host           = (int16_t) record->host,
        .decline        = (uint16_t) record->decline,
        .stage          = record->stage,
        .rows           = record->rows,
        .n_readbacks    = record->n_readbacks,
        .n_sync         = record->n_sync,
        .thread         = (uint32_t) record->thread,
        .bytes          = record->bytes,
        .t_ns           = record->t_ns,
        .duration_ns    = record->duration_ns,
        .issue_ns       = record->issue_ns,
        .wait_ns        = record->wait_ns,
        .copy_ns        = record->copy_ns,
        .device_wait_ns = record->device_wait_ns,
    };
    return record->name;
}

static void ga_record_announce_host(struct ga_host * host) {
    struct ga_api * api = &host->api;
    ga_capture_host(host->id, host->api_version, host->library, api->ggml_version ? api->ggml_version() : "", host->layout->name);
    const size_t n = api->ggml_backend_dev_count();
    for (size_t i = 0; i < n; i++) {
        ggml_backend_dev_t dev = api->ggml_backend_dev_get(i);
        ga_capture_device(host->id, (int) i, api->ggml_backend_dev_type(dev), api->ggml_backend_dev_name(dev), 
                          api->ggml_backend_dev_description ? api->ggml_backend_dev_description(dev) : "");
    }
    ga_capture_mode(host->id, atomic_load(&host->mode));
}

void ga_record_announce(struct ga_host * host) {
    if (ga_capture_on()) {
        ga_record_announce_host(host);
    }
}

static void ga_record_announce_all(void) {
    for (int i = 0; i < ga_host_count(); i++) {
        ga_record_announce_host(ga_host_get(i));
    }
}

static void ga_record_counters(void) {
    uint64_t values[GA_N_COUNTERS];
    for (int i = 0; i < ga_host_count(); i++) {
        ggml_async_counters(i, values, GA_N_COUNTERS);
        ga_capture_counters(GA_CAPTURE_SCOPE_HOST, i, ggml_async_counter_name, values, GA_N_COUNTERS);
    }
}

static void ga_record_failed(const char * text) {
    ga_log(NULL, GA_LOG_LEVEL_WARN, "%s", text);
}

void ga_record_capture(void) {
    static const struct ga_capture_component component = {
        .id           = GA_CAPTURE_PLUGIN,
        .abi_version  = GGML_ASYNC_ABI_VERSION,
        .version      = GGML_ASYNC_VERSION,
        .element_size = sizeof(struct ggml_async_record),
        .encode       = ga_record_encode,
        .announce     = ga_record_announce_all,
        .counters     = ga_record_counters,
        .failed       = ga_record_failed,
    };
    ga_capture_start(&component);
}
