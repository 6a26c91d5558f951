// The layer as a writer of the capture file.

#define _GNU_SOURCE
#include "capture.h"
#include "vulkan_layer.h"

#include <sys/syscall.h>
#include <unistd.h>

#ifndef GGML_ASYNC_VERSION
#    define GGML_ASYNC_VERSION "unknown"
#endif

enum { VL_MAX_VALUES = 64, VL_MAX_SNAPSHOT_DEVICES = 16 };

static const char * vl_capture_encode(const void * element, struct ga_capture_event * out) {
    const struct vl_event * event = element;
    *out = (struct ga_capture_event) {
        .kind           = event->kind,
        .mode           = 255,
        .path           = event->path,
        .cause          = event->cause,
        .device         = event->device,
        .layer          = -1,
        .host           = -1,
        .stage          = event->stage,
        .n_readbacks    = event->n_infos,
        .thread         = event->thread,
        .flags          = event->flags,
        .t_ns           = (int64_t) event->t_ns,
        .duration_ns    = (int64_t) event->ns,
        .issue_ns       = -1,
        .wait_ns        = -1,
        .copy_ns        = -1,
        .device_wait_ns = -1,
    };
    return NULL;
}

static void vl_capture_announce(void) {
    const int n = ggml_async_layer_devices();
    for (int i = 0; i < n; i++) {
        const char * name = ggml_async_layer_device_name(i);
        ga_capture_device(-1, i, ggml_async_layer_device_type(i), name ? name : "", "");
    }
}

static void vl_capture_counters(void) {
    uint64_t values[VL_MAX_VALUES];
    ga_capture_counters(GA_CAPTURE_SCOPE_LAYER, 0, ggml_async_layer_counter_name, values, ggml_async_layer_counters(values, VL_MAX_VALUES));
    const int n = ggml_async_layer_devices();
    for (int i = 0; i < n && i < VL_MAX_SNAPSHOT_DEVICES; i++) {
        const int m = ggml_async_layer_device_counters(i, values, VL_MAX_VALUES);
        ga_capture_counters(GA_CAPTURE_SCOPE_DEVICE, i, ggml_async_layer_counter_name, values, m);
    }
    for (int i = 0; i < GGML_ASYNC_LAYER_N_CAUSES; i++) {
        const int m = ggml_async_layer_cause_counters(i, values, VL_MAX_VALUES);
        ga_capture_counters(GA_CAPTURE_SCOPE_CAUSE, i, ggml_async_layer_cause_counter_name, values, m);
    }
}

void vl_capture_start(void) {
    static const struct ga_capture_component component = {
        .id           = GA_CAPTURE_LAYER,
        .abi_version  = GGML_ASYNC_LAYER_ABI_VERSION,
        .version      = GGML_ASYNC_VERSION,
        .element_size = sizeof(struct vl_event),
        .encode       = vl_capture_encode,
        .announce     = vl_capture_announce,
        .counters     = vl_capture_counters,
        .failed       = NULL,   // a layer prints nothing
    };
    ga_capture_start(&component);
}

void vl_capture_device(const struct vl_device * device) {
    if (ga_capture_on()) {
        ga_capture_device(-1, device->index, device->type, device->name, "");
    }
}

void vl_capture_event(struct vl_event event) {
    static _Thread_local uint32_t thread;
    if (!thread) {
        thread = (uint32_t) syscall(SYS_gettid);
    }
    event.thread = thread;
    event.cause  = (uint8_t) vl_cause_of_thread(&event.stage);
    ga_capture_put(&event);
}
