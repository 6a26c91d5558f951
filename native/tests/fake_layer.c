// A stand-in for the Vulkan layer under the layer's own name: keeps what the plug-in tells it, for test_cause.c.

#include "vulkan_counters.h"

#include <stdio.h>
#include <string.h>

GGML_ASYNC_LAYER_API const char * fake_layer_log(void);
GGML_ASYNC_LAYER_API void         fake_layer_clear(void);

static char fake_log[8192];

int ggml_async_layer_abi_version(void) {
    return GGML_ASYNC_LAYER_ABI_VERSION;
}

// Changes only: telling the same twice is no matter.
int ggml_async_layer_set_cause(int cause, uint32_t stage) {
    static const char * const names[] = {
#define X(NAME, name, text) #name,
        GGML_ASYNC_LAYER_CAUSES(X)
#undef X
    };
    static int      last_cause;
    static uint32_t last_stage;
    const int before = last_cause;
    if (cause != last_cause || stage != last_stage) {
        const size_t n = strlen(fake_log);
        snprintf(fake_log + n, sizeof(fake_log) - n, stage ? "%s:%u " : "%s ", names[cause], (unsigned) stage);
    }
    last_cause = cause;
    last_stage = stage;
    return before;
}

const char * fake_layer_log(void) {
    return fake_log;
}

void fake_layer_clear(void) {
    fake_log[0] = 0;
}
