// Look-ups: dispatch pointers without a lock, object handles in shards.

#include "vulkan_layer.h"

#include <stdlib.h>

static char vl_removed;   // its address marks a slot whose key was removed; a look-up goes past it

static size_t vl_hash(uint64_t key) {
    key ^= key >> 32;
    key *= 0x9e3779b97f4a7c15u;
    return (size_t) (key >> 32);
}

#define VL_TABLE_SLOTS (sizeof(((struct vl_table *) 0)->slots)/sizeof(struct vl_table_slot))

void * vl_table_get(struct vl_table * table, const void * key) {
    size_t i = vl_hash((uint64_t) (uintptr_t) key);
    for (size_t n = 0; n < VL_TABLE_SLOTS; n++, i++) {
        struct vl_table_slot * slot = &table->slots[i % VL_TABLE_SLOTS];
        void * const found = atomic_load_explicit(&slot->key, memory_order_acquire);
        if (found == key) {
            return atomic_load_explicit(&slot->value, memory_order_relaxed);
        }
        if (!found) {
            break;
        }
    }
    return NULL;
}

bool vl_table_add_locked(struct vl_table * table, void * key, void * value) {
    size_t i = vl_hash((uint64_t) (uintptr_t) key);
    for (size_t n = 0; n < VL_TABLE_SLOTS; n++, i++) {
        struct vl_table_slot * slot = &table->slots[i % VL_TABLE_SLOTS];
        void * const found = atomic_load_explicit(&slot->key, memory_order_relaxed);
        if (!found || found == &vl_removed) {
            // The key is the publication: whoever sees it sees the value.
            atomic_store_explicit(&slot->value, value, memory_order_relaxed);
            atomic_store_explicit(&slot->key, key, memory_order_release);
            return true;
        }
    }
    return false;
}

void vl_table_remove_locked(struct vl_table * table, const void * key) {
    size_t i = vl_hash((uint64_t) (uintptr_t) key);
    for (size_t n = 0; n < VL_TABLE_SLOTS; n++, i++) {
        struct vl_table_slot * slot = &table->slots[i % VL_TABLE_SLOTS];
        void * const found = atomic_load_explicit(&slot->key, memory_order_relaxed);
        if (found == key) {
            atomic_store_explicit(&slot->key, &vl_removed, memory_order_release);
            return;
        }
        if (!found) {
            return;
        }
    }
}

// ---- object handles

#define VL_GONE UINT64_MAX

void vl_map_init(struct vl_map * map) {
    for (int i = 0; i < VL_N_SHARDS; i++) {
        pthread_mutex_init(&map->shards[i].lock, NULL);
        map->shards[i].entries = NULL;
        map->shards[i].n_slots = 0;
        map->shards[i].n_taken = 0;
    }
}

void vl_map_free(struct vl_map * map, void (*free_value)(uintptr_t value)) {
    for (int s = 0; s < VL_N_SHARDS; s++) {
        struct vl_shard * shard = &map->shards[s];
        for (size_t i = 0; free_value && i < shard->n_slots; i++) {
            if (shard->entries[i].handle && shard->entries[i].handle != VL_GONE) {
                free_value(shard->entries[i].value);
            }
        }
        free(shard->entries);
        pthread_mutex_destroy(&shard->lock);
    }
    vl_map_init(map);
}

static struct vl_shard * vl_shard_of(struct vl_map * map, uint64_t handle) {
    return &map->shards[vl_hash(handle) % VL_N_SHARDS];
}

// The entry that holds the handle, or NULL.
static struct vl_map_entry * vl_find_locked(struct vl_shard * shard, uint64_t handle) {
    const size_t mask = shard->n_slots - 1;
    size_t       i    = vl_hash(handle)/VL_N_SHARDS;
    for (size_t n = 0; n < shard->n_slots; n++, i++) {
        struct vl_map_entry * entry = &shard->entries[i & mask];
        if (entry->handle == handle) {
            return entry;
        }
        if (!entry->handle) {
            break;
        }
    }
    return NULL;
}

static void vl_insert_locked(struct vl_shard * shard, uint64_t handle, uintptr_t value) {
    const size_t mask = shard->n_slots - 1;
    size_t       i    = vl_hash(handle)/VL_N_SHARDS;
    while (shard->entries[i & mask].handle) {
        i++;
    }
    shard->entries[i & mask] = (struct vl_map_entry) { handle, value };
    shard->n_taken++;
}

// Room for one more at a load of at most one half; removed entries are dropped on the way.
static bool vl_reserve_locked(struct vl_shard * shard) {
    if (2*(shard->n_taken + 1) <= shard->n_slots) {
        return true;
    }
    size_t n_live = 0;
    for (size_t i = 0; i < shard->n_slots; i++) {
        n_live += shard->entries[i].handle && shard->entries[i].handle != VL_GONE;
    }
    size_t n_slots = 16;
    while (n_slots < 4*(n_live + 1)) {
        n_slots *= 2;
    }
    struct vl_map_entry * entries = calloc(n_slots, sizeof(*entries));
    if (!entries) {
        return false;
    }
    const struct vl_shard old = *shard;
    shard->entries = entries;
    shard->n_slots = n_slots;
    shard->n_taken = 0;
    for (size_t i = 0; i < old.n_slots; i++) {
        if (old.entries[i].handle && old.entries[i].handle != VL_GONE) {
            vl_insert_locked(shard, old.entries[i].handle, old.entries[i].value);
        }
    }
    free(old.entries);
    return true;
}

bool vl_map_put(struct vl_map * map, uint64_t handle, uintptr_t value) {
    if (!handle || handle == VL_GONE) {
        return false;
    }
    struct vl_shard * shard = vl_shard_of(map, handle);
    pthread_mutex_lock(&shard->lock);
    struct vl_map_entry * entry = vl_find_locked(shard, handle);
    bool ok = true;
    if (entry) {
        entry->value = value;
    } else if ((ok = vl_reserve_locked(shard))) {
        vl_insert_locked(shard, handle, value);
    }
    pthread_mutex_unlock(&shard->lock);
    return ok;
}

uintptr_t vl_map_get(struct vl_map * map, uint64_t handle) {
    if (!handle || handle == VL_GONE) {
        return 0;
    }
    struct vl_shard * shard = vl_shard_of(map, handle);
    pthread_mutex_lock(&shard->lock);
    const struct vl_map_entry * entry = vl_find_locked(shard, handle);
    const uintptr_t value = entry ? entry->value : 0;
    pthread_mutex_unlock(&shard->lock);
    return value;
}

uintptr_t vl_map_take(struct vl_map * map, uint64_t handle) {
    if (!handle || handle == VL_GONE) {
        return 0;
    }
    struct vl_shard * shard = vl_shard_of(map, handle);
    pthread_mutex_lock(&shard->lock);
    struct vl_map_entry * entry = vl_find_locked(shard, handle);
    uintptr_t value = 0;
    if (entry) {
        value = entry->value;
        entry->handle = VL_GONE;
    }
    pthread_mutex_unlock(&shard->lock);
    return value;
}
