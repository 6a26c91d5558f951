// The ring. Also compiled into the Vulkan layer.

#include "ring.h"

#include <stdlib.h>
#include <string.h>

struct ga_cell {
    _Atomic(size_t)   position;
    _Alignas(8) char  element[];
};

static struct ga_cell * ga_ring_cell(struct ga_ring * ring, size_t position) {
    return (struct ga_cell *) (void *) (ring->cells + (position & ring->mask)*ring->stride);
}

struct ga_ring * ga_ring_new(size_t capacity, size_t size) {
    const size_t     stride = (sizeof(struct ga_cell) + size + 15) / 16 * 16;
    struct ga_ring * ring   = calloc(1, sizeof(*ring) + capacity*stride);
    if (!ring) {
        return NULL;
    }
    ring->mask   = capacity - 1;
    ring->size   = size;
    ring->stride = stride;
    for (size_t i = 0; i < capacity; i++) {
        atomic_init(&ga_ring_cell(ring, i)->position, i);
    }
    return ring;
}

bool ga_ring_put(struct ga_ring * ring, const void * element) {
    size_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    for (;;) {
        struct ga_cell * cell     = ga_ring_cell(ring, head);
        const size_t     position = atomic_load_explicit(&cell->position, memory_order_acquire);
        if (position == head) {
            if (atomic_compare_exchange_weak_explicit(&ring->head, &head, head + 1, memory_order_relaxed, memory_order_relaxed)) {
                memcpy(cell->element, element, ring->size);
                atomic_store_explicit(&cell->position, head + 1, memory_order_release);
                return true;
            }
        } else if ((ptrdiff_t) (position - head) < 0) {
            return false;
        } else {
            head = atomic_load_explicit(&ring->head, memory_order_relaxed);
        }
    }
}

bool ga_ring_take(struct ga_ring * ring, void * element) {
    const size_t     tail     = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    struct ga_cell * cell     = ga_ring_cell(ring, tail);
    const size_t     position = atomic_load_explicit(&cell->position, memory_order_acquire);
    if (position != tail + 1) {
        return false;
    }
    if (element) {
        memcpy(element, cell->element, ring->size);
    }
    atomic_store_explicit(&cell->position, tail + ring->mask + 1, memory_order_release);
    atomic_store_explicit(&ring->tail, tail + 1, memory_order_relaxed);
    return true;
}
