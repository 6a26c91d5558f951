// Live backends: finding one from a hook, putting hooks in and taking them out.

#include "ga.h"

#include <stdlib.h>

enum { GA_N_BUCKETS = 256 };

// Entries are added and reused but never unlinked or freed, so a lookup needs no lock: at worst it walks past
// entries that are free. A bucket grows to the most backends that were alive in it at once.
static _Atomic(struct ga_backend *) ga_buckets[GA_N_BUCKETS];

static _Atomic(struct ga_backend *) * ga_bucket(ggml_backend_t backend) {
    uintptr_t h = (uintptr_t) backend >> 4;
    h ^= h >> 8;
    h ^= h >> 16;
    return &ga_buckets[h % GA_N_BUCKETS];
}

struct ga_backend * ga_backend_find(ggml_backend_t backend) {
    struct ga_backend * entry = atomic_load_explicit(ga_bucket(backend), memory_order_acquire);
    while (entry && atomic_load_explicit(&entry->backend, memory_order_acquire) != backend) {
        entry = entry->next;
    }
    return entry;
}

static bool ga_is_destination(int device_type) {
    return device_type == GA_DEVICE_TYPE_CPU || device_type == GA_DEVICE_TYPE_ACCEL;
}

// The device pointer must stand right behind the interface. Words are read one by one and no further than the device,
// so an object of a shorter layout is never read past its end.
static bool ga_backend_known(struct ga_host * host, ggml_backend_t backend, ggml_backend_dev_t dev, int device_type) {
    const struct ga_layout * layout = host->layout;
    void ** words = ga_words(backend);
    uint32_t set = 0;
    int k = 1;
    while (words[k] != dev) {
        if (k > layout->n_slots) {
            return false;
        }
        set |= words[k] ? GA_BIT(k - 1) : 0;
        k++;
    }
    if (k != 1 + layout->n_slots || words[0] != host->api.ggml_backend_guid(backend)) {
        return false;
    }
    if (device_type == GA_DEVICE_TYPE_CPU) {
        return set == layout->cpu_slots;
    }
    if (device_type == GA_DEVICE_TYPE_ACCEL && (set & layout->accel_null)) {
        return false;
    }
    const uint32_t required = GA_BIT(layout->get_name) | GA_BIT(layout->free) | GA_BIT(layout->graph_compute);
    return (set & required) == required;
}

static void ga_slot_put_back(struct ga_backend * state, ggml_backend_t backend, int slot, void * ours) {
    // Somebody who stands in front of us keeps calling us; we pass everything on then.
    if (ga_slot_load(backend, slot) == ours) {
        ga_slot_store(backend, slot, state->slots[slot]);
    }
}

static void ga_slot_hook(struct ga_backend * state, ggml_backend_t backend, int slot, void * ours) {
    if (state->slots[slot] && ga_slot_load(backend, slot) == state->slots[slot]) {
        ga_slot_store(backend, slot, ours);
    }
}

static void ga_hooks_install(struct ga_backend * state, ggml_backend_t backend) {
    const struct ga_layout * layout = state->host->layout;
    if (state->is_destination) {
        // The drain first: no read may be queued while computing would not wait for it.
        ga_slot_hook(state, backend, layout->graph_compute,      (void *) ga_hook_cpu_compute);
        ga_slot_hook(state, backend, layout->graph_plan_compute, (void *) ga_hook_cpu_plan_compute);
        if (!ga_slot_load(backend, layout->cpy_tensor_async)) {
            ga_slot_store(backend, layout->cpy_tensor_async, (void *) ga_hook_cpy_to_cpu);
        }
    } else {
        ga_slot_hook(state, backend, layout->synchronize,      (void *) ga_hook_synchronize);
        ga_slot_hook(state, backend, layout->set_tensor_async, (void *) ga_hook_set_tensor_async);
        ga_slot_hook(state, backend, layout->cpy_tensor_async, (void *) ga_hook_cpy_to_device);
        ga_slot_hook(state, backend, layout->graph_compute,    (void *) ga_hook_device_compute);
    }
}

static void ga_hooks_remove(struct ga_backend * state, ggml_backend_t backend) {
    const struct ga_layout * layout = state->host->layout;
    if (state->is_destination) {
        ga_slot_put_back(state, backend, layout->cpy_tensor_async,   (void *) ga_hook_cpy_to_cpu);
        ga_slot_put_back(state, backend, layout->graph_plan_compute, (void *) ga_hook_cpu_plan_compute);
        ga_slot_put_back(state, backend, layout->graph_compute,      (void *) ga_hook_cpu_compute);
    } else {
        ga_slot_put_back(state, backend, layout->synchronize,      (void *) ga_hook_synchronize);
        ga_slot_put_back(state, backend, layout->set_tensor_async, (void *) ga_hook_set_tensor_async);
        ga_slot_put_back(state, backend, layout->cpy_tensor_async, (void *) ga_hook_cpy_to_device);
        ga_slot_put_back(state, backend, layout->graph_compute,    (void *) ga_hook_device_compute);
    }
}

static int ga_phase_wanted(struct ga_host * host) {
    if (!atomic_load(&host->attached)) {
        return GA_PHASE_DETACHED;
    }
    return atomic_load(&host->mode) == GGML_ASYNC_MODE_OFF ? GA_PHASE_BARE : GA_PHASE_IDLE;
}

// Brings the hooks in line with the host's mode. Does nothing while a stage is open, and does not let go of a source
// while a queue holds reads of it (its end must not go unseen): closing and draining call this again.
// Any thread may call it; whoever wins the exchange does the work and looks again afterwards.
static void ga_settle(struct ga_backend * state) {
    for (;;) {
        int       phase  = atomic_load(&state->phase);
        const int wanted = ga_phase_wanted(state->host);
        if (phase == wanted || (phase != GA_PHASE_BARE && phase != GA_PHASE_IDLE)) {
            return;
        }
        if (!atomic_compare_exchange_strong(&state->phase, &phase, GA_PHASE_CHANGING)) {
            continue;
        }
        if (wanted == GA_PHASE_DETACHED && atomic_load(&state->n_queued) > 0) {
            atomic_store(&state->phase, phase);
            return;
        }
        ggml_backend_t backend = atomic_load(&state->backend);
        if (wanted == GA_PHASE_IDLE) {
            ga_hooks_install(state, backend);
        } else {
            ga_hooks_remove(state, backend);
        }
        if (wanted == GA_PHASE_DETACHED) {
            ga_slot_put_back(state, backend, state->host->layout->free, (void *) ga_hook_free);
        }
        atomic_store(&state->phase, wanted);
    }
}

// What a backend has of ours goes: its queue, and bounce buffers that were read into through its device, with the last.
static void ga_release_locked(struct ga_backend * state) {
    if (!state->followed) {
        return;
    }
    state->followed = false;
    if (state->queue) {
        ga_queue_free(state->queue);
        state->queue = NULL;
    }
    if (--state->device->n_backends == 0) {
        ga_queues_free_pools_locked(state->device);
    }
}

void ga_backend_settle(struct ga_backend * state) {
    ga_settle(state);
    if (atomic_load(&state->phase) == GA_PHASE_DETACHED) {
        ga_lock();
        ga_release_locked(state);
        ga_unlock();
    }
}

static struct ga_backend * ga_entry_locked(ggml_backend_t backend) {
    _Atomic(struct ga_backend *) * bucket = ga_bucket(backend);
    struct ga_backend * spare = NULL;
    for (struct ga_backend * entry = atomic_load(bucket); entry; entry = entry->next) {
        ggml_backend_t key = atomic_load(&entry->backend);
        if (key == backend) {
            return entry;
        }
        if (!key) {
            spare = entry;
        }
    }
    if (!spare) {
        spare = ga_calloc(1, sizeof(*spare));
        if (!spare) {
            return NULL;
        }
        spare->next = atomic_load(bucket);
        atomic_store_explicit(bucket, spare, memory_order_release);
    }
    return spare;
}

static struct ga_backend * ga_register_locked(struct ga_device * device, ggml_backend_t backend) {
    struct ga_host * host = device->host;
    if (!ga_backend_known(host, backend, device->dev, device->type)) {
        ga_log(host, GA_LOG_LEVEL_WARN, "a backend of %s has a structure we do not know: left alone",
               host->api.ggml_backend_dev_name(device->dev));
        return NULL;
    }
    struct ga_backend * state = ga_entry_locked(backend);
    if (state) {
        ga_release_locked(state);
    }
    const bool is_destination = ga_is_destination(device->type);
    if (state && is_destination && !state->stage) {
        state->stage = ga_calloc(1, sizeof(*state->stage));
    }
    struct ggml_async_queue * queue = state && is_destination && state->stage ? ga_queue_new(host) : NULL;
    if (!state || (is_destination && !queue)) {
        ga_log(host, GA_LOG_LEVEL_WARN, "no memory to follow a backend of %s: left alone",
               host->api.ggml_backend_dev_name(device->dev));
        return NULL;
    }
    state->host           = host;
    state->device         = device;
    state->is_destination = is_destination;
    state->queue          = queue;
    for (int i = 0; i < host->layout->n_slots; i++) {
        state->slots[i] = ga_slot_load(backend, i);
    }
    state->followed       = true;
    atomic_store(&state->n_queued, 0);
    atomic_store(&state->computed, false);
    atomic_store(&state->phase, GA_PHASE_BARE);
    device->n_backends++;
    atomic_store_explicit(&state->backend, backend, memory_order_release);
    ga_slot_store(backend, host->layout->free, (void *) ga_hook_free);
    return state;
}

// Stands in for every device's init_backend.
ggml_backend_t ga_init_backend(ggml_backend_dev_t dev, const char * params) {
    struct ga_device * device = ga_host_device(dev);
    if (!device) {
        return NULL;
    }
    ggml_backend_t backend = atomic_load(&device->init_backend)(dev, params);
    if (!backend || !atomic_load(&device->host->attached)) {
        return backend;
    }
    ga_lock();
    // Hosts may load more backends after us; a CPU backend is created by every context, so this is when to look.
    const int n_devices = atomic_load(&device->host->n_devices);
    if (device->type == GA_DEVICE_TYPE_CPU) {
        ga_host_scan_devices_locked(device->host);
    }
    const bool more = atomic_load(&device->host->n_devices) > n_devices;
    struct ga_backend * state = ga_register_locked(device, backend);
    ga_control_start_locked();
    ga_unlock();
    ga_cause_find_layer();
    if (more) {
        ga_record_announce(device->host);
    }
    if (state) {
        ga_backend_settle(state);
    }
    return backend;
}

// A source that was created before we attached, or past us: look at it when it is first met.
struct ga_backend * ga_backend_adopt(struct ga_host * host, ggml_backend_t backend) {
    struct ga_backend * state = ga_backend_find(backend);
    if (state && atomic_load(&state->phase) != GA_PHASE_DETACHED) {
        return state->host == host ? state : NULL;
    }
    struct ga_device * device = ga_host_device(host->api.ggml_backend_get_device(backend));
    if (!device || device->host != host || ga_is_destination(device->type)) {
        return NULL;
    }
    ga_lock();
    state = ga_backend_find(backend);
    // One that lived through a detach starts again.
    if (!state || atomic_load(&state->phase) == GA_PHASE_DETACHED) {
        state = atomic_load(&host->attached) ? ga_register_locked(device, backend) : NULL;
    }
    ga_unlock();
    if (state) {
        ga_backend_settle(state);
    }
    return state;
}

void ga_hook_free(ggml_backend_t backend) {
    struct ga_backend * state = ga_backend_find(backend);
    if (!state) {
        return;
    }
    struct ga_host *         host   = state->host;
    const struct ga_layout * layout = host->layout;
    ga_free_t                free_backend = (ga_free_t) state->slots[layout->free];

    if (atomic_load(&state->n_queued) > 0) {
        ((ga_synchronize_t) state->slots[layout->synchronize])(backend);
        ga_queues_drop_source(host, backend);
    }
    if (state->is_destination) {
        ga_stage_forget(state);
    }

    ga_lock();
    // The host's own free may call through the interface: it must find it as it was.
    ga_hooks_remove(state, backend);
    ga_slot_put_back(state, backend, layout->free, (void *) ga_hook_free);
    ga_release_locked(state);
    atomic_store(&state->phase, GA_PHASE_DETACHED);
    atomic_store(&state->backend, NULL);
    ga_unlock();

    free_backend(backend);
}

// Walks the live backends of a host. `settle`: those at rest follow its mode, or belong to it again after a detach.
static int ga_for_each_locked(struct ga_host * host, bool settle, int * n_open) {
    const bool attached = atomic_load(&host->attached);
    int n = 0;
    for (int i = 0; i < GA_N_BUCKETS; i++) {
        for (struct ga_backend * entry = atomic_load(&ga_buckets[i]); entry; entry = entry->next) {
            if (!atomic_load(&entry->backend) || entry->host != host || atomic_load(&entry->phase) == GA_PHASE_DETACHED) {
                continue;
            }
            if (settle) {
                ga_settle(entry);
                const int phase = atomic_load(&entry->phase);
                *n_open += phase == GA_PHASE_OPEN || (!attached && phase != GA_PHASE_DETACHED);
                if (phase == GA_PHASE_DETACHED) {
                    ga_release_locked(entry);
                }
            }
            n++;
        }
    }
    return n;
}

// Returns how many backends have a stage open or reads queued and will follow afterwards.
int ga_backends_settle_all_locked(struct ga_host * host) {
    int n_open = 0;
    ga_for_each_locked(host, true, &n_open);
    return n_open;
}

int ga_backends_live_locked(struct ga_host * host) {
    return ga_for_each_locked(host, false, NULL);
}
