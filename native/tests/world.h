// A host with the plug-in in it, backends, and tensors on both sides: what most tests start from.
#pragma once

#include "fake_ggml.h"
#include "ggml_async.h"
#include "test.h"

enum { WORLD_GPUS = 3, WORLD_SLOTS = 40, WORLD_BYTES = 256, WORLD_POISON = 0xEE };

struct world {
    struct fake                * fake;
    int                          host;      // id
    struct ggml_backend        * cpu;
    struct ggml_backend        * gpu[WORLD_GPUS];
    struct ggml_backend_buffer * gpu_buffer[WORLD_GPUS];
    struct ggml_backend_buffer * cpu_buffer;                    // usage COMPUTE; where `world_open` was told
    struct ggml_tensor         * src[WORLD_GPUS][WORLD_SLOTS];  // WORLD_BYTES each, in device memory
    struct ggml_tensor         * dst[WORLD_SLOTS];              // WORLD_BYTES each, in cpu_buffer
    struct ggml_cgraph           graph;                         // reads every dst that world_input was given
    uint8_t                      seen[WORLD_SLOTS][WORLD_BYTES];
};

#define WORLD_UNPINNED (-1)

// Opens a fake host by the name of its variant; flags as for dlopen (0: RTLD_NOW | RTLD_LOCAL).
struct fake * world_fake(const char * variant, int flags);
// Its path, as ggml_async_attach takes it. Kept for the thread's next three calls.
const char *  world_path(const char * variant);

// Host "api2" with the plug-in loaded through it, a CPU backend, `n_gpus` device backends. The CPU tensors lie in memory
// that device `pinned_by` has pinned, or in plain memory.
void world_open(struct world * w, int n_gpus, int pinned_by);
void world_backends(struct world * w, int n_gpus, int pinned_by);
// Frees whatever is still there in llama.cpp's order (devices first).
void world_free(struct world * w);
// And checks that nothing is left, of ours or of other worlds.
void world_close(struct world * w);
void world_free_backend(struct ggml_backend ** backend, struct fake * fake);

// A device computes `value` into its tensor `slot`; queued, not done.
void world_fill(struct world * w, int gpu, int slot, uint8_t value);
// Poisons dst `slot`, then does what the scheduler does for one input of a CPU split.
void world_input(struct world * w, int gpu, int slot);
// The CPU split's compute; afterwards `seen` holds what it found.
void world_compute(struct world * w);
bool world_is(const void * data, uint8_t value, size_t size);
#define CHECK_SEEN(w, slot, value) CHECK(world_is((w)->seen[slot], (uint8_t) (value), WORLD_BYTES))

uint64_t world_counter(int host, const char * name);
#define CHECK_COUNTER(host, name, value) CHECK_INT(world_counter(host, name), value)

// Captures our log lines.
void         world_log_capture(void);
const char * world_log(void);
int          world_log_count(const char * part);
