// The mock devices: ggml's backend, device and registry interfaces, and the door that a host comes in by.

#include "mock_internal.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOCK_DEVICE_TYPE_GPU = 1 };

struct mock_host    mock_host;
struct mock_control mock_control = { .version = MOCK_CONTROL_VERSION, .n_devices = 1 };

static struct mock_device mock_devices[MOCK_MAX_DEVICES];
static struct mock_reg    mock_reg;
static const uint8_t      mock_guid[16] = { 'g', 'g', 'm', 'l', '-', 'a', 's', 'y', 'n', 'c', ' ', 'm', 'o', 'c', 'k', 1 };

void mock_die(const char * what) {
    fprintf(stderr, "mock device: %s\n", what);
    abort();
}

//
// Backends
//

static bool mock_is_ours(const struct mock_backend * backend) {
    return backend->guid == mock_guid;
}

static const char * mock_backend_get_name(struct mock_backend * backend) {
    return backend->device->name;
}

static void mock_backend_free(struct mock_backend * backend) {
    mock_queue_free(backend->queue);
    free(backend);
}

static char * mock_data(const struct ggml_tensor * tensor, size_t offset) {
    return (char *) ga_tensor(tensor)->data + offset;
}

static void mock_set_2d_async(struct mock_backend * backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size,
                              size_t n, size_t stride_tensor, size_t stride_data) {
    MOCK_COUNT(backend->device->index, sets, 1);
    mock_queue_push(backend->queue, (struct mock_op) {
        .kind = MOCK_SET, .copy = { mock_data(tensor, offset), data, size, n, stride_tensor, stride_data },
    });
}

static void mock_get_2d_async(struct mock_backend * backend, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size,
                              size_t n, size_t stride_tensor, size_t stride_data) {
    MOCK_COUNT(backend->device->index, gets, 1);
    mock_queue_get(backend->queue, (struct mock_copy) { data, mock_data(tensor, offset), size, n, stride_data, stride_tensor });
}

static void mock_set_async(struct mock_backend * backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    mock_set_2d_async(backend, tensor, data, offset, size, 1, 0, 0);
}

static void mock_get_async(struct mock_backend * backend, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    mock_get_2d_async(backend, tensor, data, offset, size, 1, 0, 0);
}

// From another mock device: after everything that is queued there, and nothing queued there later overtakes it. From
// memory that this device has pinned: in this queue's turn.
static bool mock_cpy_async(struct mock_backend * from, struct mock_backend * to, const struct ggml_tensor * src, struct ggml_tensor * dst) {
    const int             index = to->device->index;
    ggml_backend_buffer_t buffer = ga_tensor_buffer(src);
    const size_t          size   = mock_host.ggml_nbytes(src);
    const void *          type   = mock_host.ggml_backend_buffer_get_type(buffer);
    const bool            peer   = mock_is_ours(from) && type == &from->device->memory;
    const bool            pinned = type == &to->device->pinned;
    if ((const void *) mock_host.ggml_backend_buffer_get_type(ga_tensor_buffer(dst)) != &to->device->memory ||
        !(peer || pinned) || (peer && MOCK_OPTION(index, no_cpy_peer)) || (pinned && MOCK_OPTION(index, no_cpy_host))) {
        return false;
    }
    if (size == 0) {
        return true;
    }
    MOCK_COUNT(index, copies, 1);
    struct mock_op op = { .kind = MOCK_COPY, .copy = { mock_data(dst, 0), mock_data(src, 0), size, 1, 0, 0 } };
    const bool other = peer && from->queue != to->queue;
    if (other) {
        op.on       = from->queue;
        op.position = mock_queue_tail(from->queue);
    }
    const uint64_t position = mock_queue_push(to->queue, op);
    if (other) {
        mock_queue_push(from->queue, (struct mock_op) { .kind = MOCK_WAIT, .on = to->queue, .position = position });
    }
    return true;
}

static void mock_synchronize(struct mock_backend * backend) {
    const int index = backend->device->index;
    MOCK_COUNT(index, synchronizes, 1);
    mock_queue_wait(backend->queue, mock_queue_tail(backend->queue));
    if (mock_queue_lost(backend->queue)) {
        void (*on_error)(int, const char *) = atomic_load(&mock_control.on_error);
        if (on_error) {
            on_error(index, "device lost");
        } else if (MOCK_OPTION(index, error_aborts)) {
            mock_die("device lost");
        }
    }
}

static int mock_graph_compute(struct mock_backend * backend, struct ggml_cgraph * cgraph) {
    if (mock_queue_lost(backend->queue)) {
        return MOCK_STATUS_FAILED;
    }
    MOCK_COUNT(backend->device->index, graphs, 1);
    mock_queue_push(backend->queue, (struct mock_op) { .kind = MOCK_GRAPH, .graph = mock_graph_capture(cgraph) });
    return MOCK_STATUS_SUCCESS;
}

static void mock_event_record(struct mock_backend * backend, struct mock_event * event) {
    MOCK_COUNT(backend->device->index, event_records, 1);
    event->position = mock_queue_push(backend->queue, (struct mock_op) { .kind = MOCK_RECORD });
    event->queue    = backend->queue;
}

static void mock_event_wait(struct mock_backend * backend, struct mock_event * event) {
    MOCK_COUNT(backend->device->index, event_waits, 1);
    if (event->queue && event->queue != backend->queue) {
        mock_queue_push(backend->queue, (struct mock_op) { .kind = MOCK_WAIT, .on = event->queue, .position = event->position });
    }
}

static struct mock_backend * mock_backend_init(struct mock_device * device, const char * params) {
    (void) params;
    const int index = device->index;
    struct mock_backend * backend = calloc(1, sizeof(*backend));
    if (!backend) {
        mock_die("out of memory");
    }
    const bool no_2d = MOCK_OPTION(index, no_2d_async), no_events = MOCK_OPTION(index, no_events);
    void * const slots[MOCK_BACKEND_SLOTS] = {
        /* get_name            */ (void *) mock_backend_get_name,
        /* free                */ (void *) mock_backend_free,
        /* set_tensor_async    */ MOCK_OPTION(index, no_set_async) ? NULL : (void *) mock_set_async,
        /* get_tensor_async    */ MOCK_OPTION(index, no_get_async) ? NULL : (void *) mock_get_async,
        /* set_tensor_2d_async */ no_2d ? NULL : (void *) mock_set_2d_async,
        /* get_tensor_2d_async */ no_2d ? NULL : (void *) mock_get_2d_async,
        /* cpy_tensor_async    */ (void *) mock_cpy_async,
        /* synchronize         */ (void *) mock_synchronize,
        /* graph_plan_create   */ NULL,
        /* graph_plan_free     */ NULL,
        /* graph_plan_update   */ NULL,
        /* graph_plan_compute  */ NULL,
        /* graph_compute       */ (void *) mock_graph_compute,
        /* event_record        */ no_events ? NULL : (void *) mock_event_record,
        /* event_wait          */ no_events ? NULL : (void *) mock_event_wait,
        /* graph_optimize      */ NULL,
    };
    memcpy(backend->slots, slots, sizeof(slots));
    backend->guid   = mock_guid;
    backend->device = device;
    backend->queue  = mock_queue_new(index);
    MOCK_COUNT(index, backends, 1);
    return backend;
}

//
// Devices
//

// ggml clears it before it asks, so members that only newer ones have stay false.
struct mock_props {
    const char * name;
    const char * description;
    size_t       memory_free;
    size_t       memory_total;
    int          type;
    const char * device_id;
    bool         async;
    bool         host_buffer;
    bool         buffer_from_host_ptr;
    bool         events;
};

static const size_t mock_memory_bytes = (size_t) 16 << 30;

static const char * mock_device_get_name(struct mock_device * device) {
    return device->name;
}

static const char * mock_device_get_description(struct mock_device * device) {
    (void) device;
    return "mock device of ggml-async's tests";
}

static void mock_device_get_memory(struct mock_device * device, size_t * available, size_t * total) {
    (void) device;
    *available = *total = mock_memory_bytes;
}

static int mock_device_get_type(struct mock_device * device) {
    (void) device;
    return MOCK_DEVICE_TYPE_GPU;
}

static void * mock_device_get_pinned(struct mock_device * device) {
    if (MOCK_OPTION(device->index, no_pinned)) {
        return NULL;
    }
    return MOCK_OPTION(device->index, pinned_of_first) ? &mock_devices[0].pinned : &device->pinned;
}

static void mock_device_get_props(struct mock_device * device, struct mock_props * props) {
    props->name         = device->name;
    props->description  = mock_device_get_description(device);
    props->memory_free  = mock_memory_bytes;
    props->memory_total = mock_memory_bytes;
    props->type         = MOCK_DEVICE_TYPE_GPU;
    props->async        = !MOCK_OPTION(device->index, no_get_async);
    props->host_buffer  = mock_device_get_pinned(device) != NULL;
    props->events       = !MOCK_OPTION(device->index, no_events);
}

static void * mock_device_get_buffer_type(struct mock_device * device) {
    return &device->memory;
}

static bool mock_device_supports_op(struct mock_device * device, const struct ggml_tensor * op) {
    (void) device;
    (void) op;
    return true;    // what the CPU can
}

static bool mock_device_supports_buft(struct mock_device * device, const void * buft) {
    return buft == &device->memory;
}

static struct mock_event * mock_event_new(struct mock_device * device) {
    if (MOCK_OPTION(device->index, no_events)) {
        return NULL;
    }
    struct mock_event * event = calloc(1, sizeof(*event));
    if (!event) {
        mock_die("out of memory");
    }
    event->device = device;
    return event;
}

static void mock_event_free(struct mock_device * device, struct mock_event * event) {
    (void) device;
    free(event);
}

static void mock_event_synchronize(struct mock_device * device, struct mock_event * event) {
    (void) device;
    if (event->queue) {
        mock_queue_wait(event->queue, event->position);
    }
}

static void mock_device_init(struct mock_device * device, int index) {
    void * const slots[MOCK_DEVICE_SLOTS] = {
        /* get_name             */ (void *) mock_device_get_name,
        /* get_description      */ (void *) mock_device_get_description,
        /* get_memory           */ (void *) mock_device_get_memory,
        /* get_type             */ (void *) mock_device_get_type,
        /* get_props            */ (void *) mock_device_get_props,
        /* init_backend         */ (void *) mock_backend_init,
        /* get_buffer_type      */ (void *) mock_device_get_buffer_type,
        /* get_host_buffer_type */ (void *) mock_device_get_pinned,
        /* buffer_from_host_ptr */ NULL,
        /* supports_op          */ (void *) mock_device_supports_op,
        /* supports_buft        */ (void *) mock_device_supports_buft,
        /* offload_op           */ NULL,
        /* event_new            */ (void *) mock_event_new,
        /* event_free           */ (void *) mock_event_free,
        /* event_synchronize    */ (void *) mock_event_synchronize,
    };
    memcpy(device->slots, slots, sizeof(slots));
    device->reg   = &mock_reg;
    device->index = index;
    snprintf(device->name,      sizeof(device->name),      "MOCK%d", index);
    snprintf(device->host_name, sizeof(device->host_name), "MOCK%d_Host", index);
    mock_memory_init(device);
}

//
// Registry
//

static const char * mock_reg_get_name(struct mock_reg * reg) {
    (void) reg;
    return "MOCK";
}

static size_t mock_reg_get_device_count(struct mock_reg * reg) {
    (void) reg;
    return mock_control.n_devices;
}

static void * mock_reg_get_device(struct mock_reg * reg, size_t index) {
    (void) reg;
    return &mock_devices[index];
}

static struct mock_control * mock_get_control(void) {
    return &mock_control;
}

static void * mock_reg_get_proc_address(struct mock_reg * reg, const char * name) {
    (void) reg;
    return strcmp(name, "mock_control") ? NULL : (void *) mock_get_control;
}

static bool mock_set_option(const char * name, size_t length, int device, uint32_t value) {
    for (int i = 0; i < MOCK_MAX_DEVICES; i++) {
        if (device >= 0 && i != device) {
            continue;
        }
#define X(option)                                                               \
        if (strlen(#option) == length && !strncmp(#option, name, length)) {     \
            atomic_store(&mock_control.options[i].option, value);               \
            continue;                                                           \
        }
        MOCK_OPTIONS(X)
#undef X
        return false;
    }
    return true;
}

static void mock_read_environment(void) {
    const char * devices = getenv("MOCK_DEVICES");
    const int    n       = devices ? atoi(devices) : 1;
    if (n < 1 || n > MOCK_MAX_DEVICES) {
        mock_die("MOCK_DEVICES is not 1 to 4");
    }
    mock_control.n_devices = (uint32_t) n;
    const char * text = getenv("MOCK_OPTIONS");
    while (text && *text) {
        const size_t length = strcspn(text, ",");
        int          device = -1;
        const char * name   = text;
        if (name[0] >= '0' && name[0] <= '9' && name[1] == ':') {
            device = name[0] - '0';
            name += 2;
        }
        const size_t n_name = strcspn(name, "=");
        if (n_name >= length || !mock_set_option(name, n_name, device, (uint32_t) strtoul(name + n_name + 1, NULL, 10))) {
            mock_die("MOCK_OPTIONS: every option is [DEVICE:]NAME=NUMBER, see mock_device.h");
        }
        text += length + (text[length] == ',');
    }
}

//
// The host
//

// The words of a CPU backend and of a buffer of the host's, up to what must stand behind their interfaces.
static bool mock_prove(void) {
    ggml_backend_t backend = mock_host.cpu_init(mock_host.cpu, NULL);
    int k = 1;
    while (k <= MOCK_BACKEND_SLOTS && ga_words(backend)[k] != mock_host.cpu) {
        k++;
    }
    mock_host.ggml_backend_free(backend);
    ggml_backend_buffer_type_t type   = mock_host.ggml_backend_dev_buffer_type(mock_host.cpu);
    ggml_backend_buffer_t      buffer = mock_host.ggml_backend_buft_alloc_buffer(type, 64);
    int b = 0;
    while (b < MOCK_BUFFER_SLOTS && ga_words(buffer)[b] != type) {
        b++;
    }
    mock_host.ggml_backend_buffer_free(buffer);
    // sizeof(struct ggml_tensor): what ggml_init's overhead has beyond the object's header
    struct ggml_context * ctx    = mock_host.ggml_init((struct ga_init_params) { 2*mock_host.ggml_tensor_overhead(), NULL, true });
    struct ggml_tensor *  tensor = mock_host.ggml_new_tensor_1d(ctx, 0, 1);
    mock_host.tensor_size = mock_host.ggml_tensor_overhead() - (size_t) ((char *) tensor - (char *) mock_host.ggml_get_mem_buffer(ctx));
    mock_host.ggml_free(ctx);
    return k == MOCK_BACKEND_SLOTS + 1 && b == MOCK_BUFFER_SLOTS && (mock_host.api_version == 2 || mock_host.api_version == 3);
}

MOCK_EXPORT void * mock_register(void * handle) {
    if (mock_host.cpu) {
        return &mock_reg;
    }
#define X(ret, name, args)                                                     \
    *(void **) &mock_host.name = dlsym(handle, #name);                         \
    if (!mock_host.name) {                                                     \
        fprintf(stderr, "mock device: the host has no %s\n", #name);           \
        return NULL;                                                           \
    }
    MOCK_HOST_FUNCTIONS(X)
#undef X
    for (size_t i = 0; i < mock_host.ggml_backend_dev_count() && !mock_host.cpu; i++) {
        ggml_backend_dev_t dev = mock_host.ggml_backend_dev_get(i);
        mock_host.cpu = mock_host.ggml_backend_dev_type(dev) == GA_DEVICE_TYPE_CPU ? dev : NULL;
    }
    if (!mock_host.cpu) {
        fprintf(stderr, "mock device: the host has no CPU device yet\n");
        return NULL;
    }
    ggml_backend_reg_t cpu_reg = mock_host.ggml_backend_dev_backend_reg(mock_host.cpu);
    mock_host.api_version   = *(const int *) cpu_reg;
    mock_host.cpu_init      = (ga_init_backend_t) ga_words(mock_host.cpu)[GA_DEVICE_SLOT_INIT_BACKEND];
    *(void **) &mock_host.set_n_threads = mock_host.ggml_backend_reg_get_proc_address(cpu_reg, "ggml_backend_set_n_threads");
    if (!mock_prove()) {
        fprintf(stderr, "mock device: a ggml of an unknown layout (API %d)\n", mock_host.api_version);
        mock_host.cpu = NULL;
        return NULL;
    }
    mock_read_environment();
    for (int i = 0; i < MOCK_MAX_DEVICES; i++) {
        mock_device_init(&mock_devices[i], i);
    }
    mock_reg = (struct mock_reg) {
        .api_version = mock_host.api_version,
        .slots = { (void *) mock_reg_get_name, (void *) mock_reg_get_device_count, (void *) mock_reg_get_device, (void *) mock_reg_get_proc_address },
    };
    return &mock_reg;
}

// Called by the host: its library is the one that the return address lies in.
MOCK_EXPORT void * ggml_backend_init(void);
MOCK_EXPORT void * ggml_backend_init(void) {
    Dl_info           info;
    struct link_map * map = NULL;
    if (!dladdr1(__builtin_return_address(0), &info, (void **) &map, RTLD_DL_LINKMAP) || !map) {
        return NULL;
    }
    void * handle = dlopen(map->l_name && *map->l_name ? map->l_name : NULL, RTLD_LAZY | RTLD_NOLOAD);
    return handle ? mock_register(handle) : NULL;
}
