// The runtime under test, the mock device and the plug-in.

#include "shared.h"

#include <dirent.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

struct ggml_api       ggml;
ggml_backend_dev_t    cpu_device;
ggml_backend_dev_t    mock_devices[MAX_DEVICES];
struct mock_control * mock;
void (*cpu_set_n_threads)(ggml_backend_t backend, int n);
void (*cpu_set_abort)(ggml_backend_t backend, bool (*callback)(void *), void * user_data);

int plugin_host = -1;
struct ggml_async_queue * (*plugin_queue_new)(int host);
void (*plugin_queue_free)(struct ggml_async_queue * queue);
int  (*plugin_read)(struct ggml_async_queue * queue, void * backend, const void * tensor, void * data, size_t offset, size_t size);
int  (*plugin_wait)(struct ggml_async_queue * queue);
int  (*plugin_set_mode)(int host, int mode);
int  (*plugin_counters)(int host, uint64_t * values, int n);
const char * (*plugin_counter_name)(int index);

static void quiet(int level, const char * text, void * user_data) {
    (void) user_data;
    if (level >= GA_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static void * open_or_fail(const char * path, int flags) {
    void * handle = dlopen(path, flags);
    if (!handle) {
        fail("%s", dlerror());
    }
    return handle;
}

// The names in a folder that begin and end so; the caller frees. Returns how many.
static int list(const char * folder, const char * prefix, char ** names, int max) {
    struct dirent ** entries;
    const int n = scandir(folder, &entries, NULL, alphasort);
    int found = 0;
    for (int i = 0; i < n; i++) {
        const char * name = entries[i]->d_name;
        const char * end  = strstr(name, ".so");
        if (!strncmp(name, prefix, strlen(prefix)) && end && found < max && (!end[3] || !strcmp(prefix, "libggml."))) {
            if (asprintf(&names[found], "%s/%s", folder, name) > 0) {
                found++;
            }
        }
        free(entries[i]);
    }
    free(entries);
    return found;
}

// As ggml's own loader does it: the CPU library that claims the most.
static void load_cpu(const char * folder) {
    char * names[32];
    const int n = list(folder, "libggml-cpu", names, 32);
    int best = -1, best_score = -1;
    for (int i = 0; i < n; i++) {
        void * handle = open_or_fail(names[i], RTLD_NOW | RTLD_LOCAL);
        int (*score)(void) = (int (*)(void)) dlsym(handle, "ggml_backend_score");
        const int value = score ? score() : 1;
        if (value > best_score) {
            best_score = value;
            best       = i;
        }
    }
    if (best < 0 || !ggml.ggml_backend_load(names[best])) {
        fail("no CPU backend in %s", folder);
    }
    for (int i = 0; i < n; i++) {
        free(names[i]);
    }
}

static void * load_ggml(void) {
    char * names[8];
    void * handle;
    if (options.library) {
        handle = open_or_fail(options.library, RTLD_NOW | RTLD_NOLOAD);
    } else {
        const int n = options.runtime ? list(options.runtime, "libggml.", names, 8) : 0;
        if (!n) {
            fail("no libggml*.so in %s", options.runtime ? options.runtime : "(no --runtime)");
        }
        handle = open_or_fail(names[0], RTLD_NOW | RTLD_LOCAL);
        for (int i = 0; i < n; i++) {
            free(names[i]);
        }
    }
#define X(ret, name, args)                              \
    *(void **) &ggml.name = dlsym(handle, #name);       \
    if (!ggml.name) {                                   \
        fail("the runtime has no %s", #name);           \
    }
    GGML_API(X)
#undef X
    ggml.ggml_log_set(quiet, NULL);
    return handle;
}

static void load_mock(void * handle) {
    ggml_backend_reg_t reg;
    if (options.library) {
        void * lib = open_or_fail(options.mock, RTLD_NOW | RTLD_LOCAL);
        void * (*mock_enter)(void *) = (void * (*)(void *)) dlsym(lib, "mock_register");
        reg = mock_enter(handle);
        if (reg) {
            ggml.ggml_backend_register(reg);
        }
    } else {
        reg = ggml.ggml_backend_load(options.mock);
    }
    if (!reg) {
        fail("the mock device did not load");
    }
    mock = ((mock_control_t) ggml.ggml_backend_reg_get_proc_address(reg, "mock_control"))();
    for (uint32_t d = 0; d < mock->n_devices; d++) {
        char name[16];
        snprintf(name, sizeof(name), "MOCK%u", d);
        mock_devices[d] = ggml.ggml_backend_dev_by_name(name);
    }
    settings.max_devices = (int) mock->n_devices;
    for (uint32_t d = 0; d < mock->n_devices; d++) {
        settings.late_uploads |= !options.host_faults && !atomic_load(&mock->options[d].no_cpy_host) && !atomic_load(&mock->options[d].no_pinned);
    }
}

static void load_plugin(void) {
    if (!strcmp(settings.mode, "none")) {
        return;
    }
    void * lib = NULL;
    if (options.library) {
        lib = open_or_fail(options.plugin, RTLD_NOW | RTLD_LOCAL);
        int (*attach)(const char *) = (int (*)(const char *)) dlsym(lib, "ggml_async_attach");
        plugin_host = attach(options.library);
    } else {
        plugin_host = ggml.ggml_backend_load(options.plugin) ? 0 : -1;
        lib = open_or_fail(options.plugin, RTLD_NOW | RTLD_NOLOAD);
    }
    if (plugin_host < 0) {
        fail("the plug-in did not attach");
    }
    *(void **) &plugin_queue_new    = dlsym(lib, "ggml_async_queue_new");
    *(void **) &plugin_queue_free   = dlsym(lib, "ggml_async_queue_free");
    *(void **) &plugin_read         = dlsym(lib, "ggml_async_read");
    *(void **) &plugin_wait         = dlsym(lib, "ggml_async_wait");
    *(void **) &plugin_set_mode     = dlsym(lib, "ggml_async_set_mode");
    *(void **) &plugin_counters     = dlsym(lib, "ggml_async_counters");
    *(void **) &plugin_counter_name = dlsym(lib, "ggml_async_counter_name");
    int (*parse)(const char *) = (int (*)(const char *)) dlsym(lib, "ggml_async_mode_parse");
    if (plugin_set_mode(plugin_host, parse(settings.mode)) < 0) {
        fail("no mode %s", settings.mode);
    }
}

void load_everything(void) {
    void * handle = load_ggml();
    if (!options.library) {
        load_cpu(options.runtime);
    }
    for (size_t i = 0; i < ggml.ggml_backend_dev_count() && !cpu_device; i++) {
        ggml_backend_dev_t dev = ggml.ggml_backend_dev_get(i);
        cpu_device = ggml.ggml_backend_dev_type(dev) == DEVICE_CPU ? dev : NULL;
    }
    if (!cpu_device) {
        fail("the runtime has no CPU device");
    }
    ggml_backend_reg_t reg = ggml.ggml_backend_dev_backend_reg(cpu_device);
    *(void **) &cpu_set_n_threads = ggml.ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    *(void **) &cpu_set_abort     = ggml.ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_abort_callback");
    load_mock(handle);
    load_plugin();
}
