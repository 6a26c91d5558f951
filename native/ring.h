// A bounded ring that many threads write without waiting and one reader empties. Elements are copied in and out.
//
// Each cell carries the position it is ready for, so that a writer that was descheduled in the middle holds up the
// reader at its own cell only, and a full ring is noticed at once.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

struct ga_ring {
    size_t           mask;
    size_t           size;      // of an element
    size_t           stride;    // of a cell
    _Atomic(size_t)  head;      // writers
    _Atomic(size_t)  tail;      // the reader
    struct ga_ring * retired;   // for the owner: a writer may still be inside an older ring, so it is kept
    _Alignas(16) char cells[];
};

// `capacity` is a power of two. NULL: no memory.
struct ga_ring * ga_ring_new(size_t capacity, size_t size);
// False: full.
bool             ga_ring_put(struct ga_ring * ring, const void * element);
// False: empty. `element` may be NULL.
bool             ga_ring_take(struct ga_ring * ring, void * element);
