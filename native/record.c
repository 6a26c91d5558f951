// Event records: a bounded ring that many threads write without waiting and one reader empties.
//
// Each cell carries the position it is ready for, so that a writer that was descheduled in the middle holds up the
// reader at its own cell only, and a full ring is noticed at once: the record is dropped and counted.

#include "ga.h"

#include <stdlib.h>

struct ga_cell {
    _Atomic(size_t)          position;
    struct ggml_async_record record;
};

struct ga_ring {
    size_t           mask;
    _Atomic(size_t)  head;      // writers
    _Atomic(size_t)  tail;      // the reader
    struct ga_ring * retired;   // a writer may still be inside an older ring: it is kept
    struct ga_cell   cells[];
};

static _Atomic(struct ga_ring *) ga_ring;
static _Atomic(bool)             ga_recording;
static _Atomic(uint64_t)         ga_dropped;

bool ga_record_on(void) {
    return atomic_load_explicit(&ga_recording, memory_order_relaxed);
}

void ga_record_put(const struct ggml_async_record * record) {
    struct ga_ring * ring = atomic_load_explicit(&ga_ring, memory_order_acquire);
    if (!ring || !ga_record_on()) {
        return;
    }
    size_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    for (;;) {
        struct ga_cell * cell     = &ring->cells[head & ring->mask];
        const size_t     position = atomic_load_explicit(&cell->position, memory_order_acquire);
        if (position == head) {
            if (atomic_compare_exchange_weak_explicit(&ring->head, &head, head + 1, memory_order_relaxed, memory_order_relaxed)) {
                cell->record = *record;
                atomic_store_explicit(&cell->position, head + 1, memory_order_release);
                return;
            }
        } else if ((ptrdiff_t) (position - head) < 0) {
            atomic_fetch_add_explicit(&ga_dropped, 1, memory_order_relaxed);
            return;
        } else {
            head = atomic_load_explicit(&ring->head, memory_order_relaxed);
        }
    }
}

static bool ga_ring_take(struct ga_ring * ring, struct ggml_async_record * out) {
    const size_t     tail     = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    struct ga_cell * cell     = &ring->cells[tail & ring->mask];
    const size_t     position = atomic_load_explicit(&cell->position, memory_order_acquire);
    if (position != tail + 1) {
        return false;
    }
    if (out) {
        *out = cell->record;
    }
    atomic_store_explicit(&cell->position, tail + ring->mask + 1, memory_order_release);
    atomic_store_explicit(&ring->tail, tail + 1, memory_order_relaxed);
    return true;
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
        struct ga_ring * larger = ga_calloc(1, sizeof(*larger) + n*sizeof(larger->cells[0]));
        if (!larger) {
            ga_unlock();
            return ga_fail(GGML_ASYNC_ERR_NO_MEMORY, "no memory for %zu records", n);
        }
        for (size_t i = 0; i < n; i++) {
            atomic_init(&larger->cells[i].position, i);
        }
        larger->mask    = n - 1;
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
