// The host: which ggml called us, what it can do for us, and whether its structures are the ones we know.

#define _GNU_SOURCE
#include "ga.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct ga_host ga_hosts[GA_MAX_HOSTS];
static _Atomic(int)   ga_n_hosts;
static _Atomic(int)   ga_mode_default = -1;     // -1: as the environment says

struct ga_host * ga_host_get(int id) {
    return id >= 0 && id < atomic_load_explicit(&ga_n_hosts, memory_order_acquire) ? &ga_hosts[id] : NULL;
}

int ga_host_count(void) {
    return atomic_load_explicit(&ga_n_hosts, memory_order_acquire);
}

void ga_set_default_mode(int mode) {
    atomic_store(&ga_mode_default, mode);
}

int ga_default_mode(void) {
    int mode = atomic_load(&ga_mode_default);
    if (mode >= 0) {
        return mode;
    }
    const char * text = getenv("GGML_ASYNC");
    if (!text || !*text) {
        return GGML_ASYNC_MODE_ASYNC;
    }
    mode = ggml_async_mode_parse(text);
    if (mode < 0) {
        ga_log(NULL, GA_LOG_LEVEL_ERROR, "GGML_ASYNC=%s is not off, stock or async: off", text);
        return GGML_ASYNC_MODE_OFF;
    }
    return mode;
}

struct ga_device * ga_host_device(ggml_backend_dev_t dev) {
    const int n_hosts = ga_host_count();
    for (int h = 0; h < n_hosts; h++) {
        const int n = atomic_load_explicit(&ga_hosts[h].n_devices, memory_order_acquire);
        for (int i = 0; i < n; i++) {
            if (ga_hosts[h].devices[i].dev == dev) {
                return &ga_hosts[h].devices[i];
            }
        }
    }
    return NULL;
}

// Memory that this very device has pinned. A type that allocates on another device (all Vulkan devices share the
// first one's) does not count: a read into it would go through a staging buffer and wait inside the call.
ggml_backend_buffer_type_t ga_device_pinned(struct ga_device * device) {
    if (!atomic_load_explicit(&device->pinned_known, memory_order_acquire)) {
        struct ga_api * api = &device->host->api;
        ggml_backend_buffer_type_t pinned = api->ggml_backend_dev_host_buffer_type(device->dev);
        if (pinned && api->ggml_backend_buft_get_device(pinned) != device->dev) {
            pinned = NULL;
        }
        atomic_store(&device->pinned, pinned);
        atomic_store_explicit(&device->pinned_known, true, memory_order_release);
    }
    return atomic_load_explicit(&device->pinned, memory_order_relaxed);
}

//
// Loaded libraries
//

struct ga_code_query {
    uintptr_t address;
    bool      found;
};

static int ga_code_segment(struct dl_phdr_info * info, size_t size, void * user_data) {
    (void) size;
    struct ga_code_query * query = user_data;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) * segment = &info->dlpi_phdr[i];
        const uintptr_t    start   = info->dlpi_addr + segment->p_vaddr;
        if (segment->p_type == PT_LOAD && (segment->p_flags & PF_X) && query->address >= start && query->address - start < segment->p_memsz) {
            query->found = true;
        }
    }
    return query->found;
}

// Whether `address` lies in executable memory of a loaded object: what we are about to call, before we know that it is
// a function.
static bool ga_is_code(const void * address) {
    struct ga_code_query query = { (uintptr_t) address, false };
    dl_iterate_phdr(ga_code_segment, &query);
    return query.found;
}

static const void * ga_base_of(const void * address) {
    Dl_info info;
    return dladdr(address, &info) ? info.dli_fbase : NULL;
}

//
// Proof of the layout
//

static int ga_resolve(struct ga_host * host, void * handle, const char * library) {
    const char * missing = NULL;
#define X(ret, name, args)                                     \
    *(void **) &host->api.name = dlsym(handle, #name);         \
    if (!host->api.name && !missing) {                         \
        missing = #name;                                       \
    }
    GA_HOST_FUNCTIONS(X)
#undef X
#define X(ret, name, args) *(void **) &host->api.name = dlsym(handle, #name);
    GA_HOST_FUNCTIONS_OPTIONAL(X)
#undef X
    if (missing) {
        return ga_fail(GGML_ASYNC_ERR_NOT_GGML, "%s has no %s: not a ggml that can be attached to", library, missing);
    }
    return GGML_ASYNC_OK;
}

static int ga_refuse(const struct ga_host * host, const char * what) {
    return ga_fail(GGML_ASYNC_ERR_LAYOUT, "ggml %s (API %d) has an unknown %s: refused, nothing was changed\n"
                   "use a ggml of API 2 or 3 as listed in docs/contract.md, or a newer ggml-async",
                   host->api.ggml_version ? host->api.ggml_version() : "of unknown version", host->api_version, what);
}

// The device object against the host's accessors.
static bool ga_device_known(struct ga_host * host, ggml_backend_dev_t dev) {
    void ** words = ga_words(dev);
    if (!ga_is_code(words[GA_DEVICE_SLOT_GET_NAME]) || !ga_is_code(words[GA_DEVICE_SLOT_GET_TYPE]) ||
        !ga_is_code(words[GA_DEVICE_SLOT_INIT_BACKEND]) || words[GA_DEVICE_WORD_REG] != host->api.ggml_backend_dev_backend_reg(dev)) {
        return false;
    }
    const char * (*get_name)(ggml_backend_dev_t) = (const char * (*)(ggml_backend_dev_t)) words[GA_DEVICE_SLOT_GET_NAME];
    int          (*get_type)(ggml_backend_dev_t) = (int          (*)(ggml_backend_dev_t)) words[GA_DEVICE_SLOT_GET_TYPE];
    return !strcmp(get_name(dev), host->api.ggml_backend_dev_name(dev)) && get_type(dev) == host->api.ggml_backend_dev_type(dev);
}

// A CPU backend of our own, made and freed by the host: word by word up to its device pointer.
static const struct ga_layout * ga_probe_backend(struct ga_host * host, ggml_backend_dev_t cpu) {
    ggml_backend_t backend = host->api.ggml_backend_dev_init(cpu, NULL);
    if (!backend) {
        return NULL;
    }
    void ** words = ga_words(backend);
    uint32_t set = 0;
    int k = 1;
    while (k <= GA_MAX_SLOTS && words[k] != cpu) {
        set |= words[k] ? GA_BIT(k - 1) : 0;
        k++;
    }
    const struct ga_layout * found = NULL;
    for (int i = 0; i < GA_N_LAYOUTS && !found; i++) {
        const struct ga_layout * layout = &ga_layouts[i];
        if (layout->api_version == host->api_version && k == 1 + layout->n_slots && words[k] == cpu && set == layout->cpu_slots &&
            words[0] == host->api.ggml_backend_guid(backend) && host->api.ggml_backend_get_device(backend) == cpu) {
            const char * (*get_name)(ggml_backend_t) = (const char * (*)(ggml_backend_t)) words[1 + layout->get_name];
            if (ga_is_code((void *) get_name) && !strcmp(get_name(backend), host->api.ggml_backend_name(backend))) {
                found = layout;
            }
        }
    }
    host->api.ggml_backend_free(backend);
    return found;
}

// A tensor and a view of it, made by the host, with known numbers in every field that we read.
static bool ga_probe_tensor(struct ga_host * host, ggml_backend_dev_t cpu) {
    struct ga_api * api = &host->api;
    struct ga_init_params params = { 8*api->ggml_tensor_overhead(), NULL, true };
    struct ggml_context * ctx = api->ggml_init(params);
    if (!ctx) {
        return false;
    }
    bool ok = false;
    ggml_backend_buffer_type_t buft   = api->ggml_backend_dev_buffer_type(cpu);
    ggml_backend_buffer_t      buffer = api->ggml_backend_buft_alloc_buffer(buft, 256);
    struct ggml_tensor *       tensor = api->ggml_new_tensor_2d(ctx, 0 /* F32 */, 3, 5);
    struct ggml_tensor *       view   = tensor ? api->ggml_view_1d(ctx, tensor, 2, 4) : NULL;
    if (buffer && view) {
        void * base = api->ggml_backend_buffer_get_base(buffer);
        const struct ga_tensor * t = ga_tensor(tensor);
        const struct ga_tensor * v = ga_tensor(view);
        ok = t->buffer == NULL && t->view_src == NULL && t->data == NULL;
        ok = ok && api->ggml_backend_tensor_alloc(buffer, tensor, base) == 0;
        ok = ok && t->type == 0 && t->buffer == buffer && t->data == base && t->name == api->ggml_get_name(tensor);
        ok = ok && t->ne[0] == 3 && t->ne[1] == 5 && t->ne[2] == 1 && t->ne[3] == 1;
        ok = ok && t->nb[0] == 4 && t->nb[1] == 12 && t->nb[2] == 60 && t->nb[3] == 60;
        ok = ok && v->view_src == tensor && v->view_offs == 4 && v->name == api->ggml_get_name(view);
        ok = ok && api->ggml_nbytes(tensor) == 60 && api->ggml_backend_buffer_get_type(buffer) == buft && api->ggml_backend_buffer_is_host(buffer);
    }
    if (buffer) {
        api->ggml_backend_buffer_free(buffer);
    }
    api->ggml_free(ctx);
    return ok;
}

static int ga_check_occupied(struct ga_host * host) {
    const void * ours = ga_base_of((const void *) ga_init_backend);
    const size_t n = host->api.ggml_backend_dev_count();
    for (size_t i = 0; i < n; i++) {
        void * init_backend = ga_words(host->api.ggml_backend_dev_get(i))[GA_DEVICE_SLOT_INIT_BACKEND];
        Dl_info info;
        if (!dladdr(init_backend, &info) || info.dli_fbase == ours) {
            continue;
        }
        void * handle = ga_open_loaded(info.dli_fname);
        const bool other = handle && dlsym(handle, "ggml_async_abi_version");
        if (handle) {
            dlclose(handle);
        }
        if (other) {
            return ga_fail(GGML_ASYNC_ERR_OCCUPIED, "another ggml-async is attached already: %s\nload one copy only", info.dli_fname);
        }
    }
    return GGML_ASYNC_OK;
}

static int ga_prove(struct ga_host * host) {
    struct ga_api * api = &host->api;
    const size_t n = api->ggml_backend_dev_count();
    ggml_backend_dev_t cpu = NULL;
    for (size_t i = 0; i < n && !cpu; i++) {
        ggml_backend_dev_t dev = api->ggml_backend_dev_get(i);
        cpu = api->ggml_backend_dev_type(dev) == GA_DEVICE_TYPE_CPU ? dev : NULL;
    }
    if (!cpu) {
        return ga_fail(GGML_ASYNC_ERR_TOO_EARLY, "the ggml in %s has no CPU device yet\nload its backends first (ggml_backend_load_all)", host->library);
    }
    host->api_version = *(const int *) api->ggml_backend_dev_backend_reg(cpu);
    bool known_version = false;
    for (int i = 0; i < GA_N_LAYOUTS; i++) {
        known_version |= ga_layouts[i].api_version == host->api_version;
    }
    if (!known_version) {
        return ga_refuse(host, "backend API version");
    }
    for (size_t i = 0; i < n; i++) {
        if (!ga_device_known(host, api->ggml_backend_dev_get(i))) {
            return ga_refuse(host, "device structure");
        }
    }
    const int status = ga_check_occupied(host);
    if (status != GGML_ASYNC_OK) {
        return status;
    }
    if (!ga_probe_tensor(host, cpu)) {
        return ga_refuse(host, "tensor structure");
    }
    host->layout = ga_probe_backend(host, cpu);
    return host->layout ? GGML_ASYNC_OK : ga_refuse(host, "backend structure");
}

//
// Attach
//

// Under ga_lock. Takes in the devices that are new since the last look, and those that were given back by a detach.
void ga_host_scan_devices_locked(struct ga_host * host) {
    const size_t n = host->api.ggml_backend_dev_count();
    for (size_t i = 0; i < n; i++) {
        ggml_backend_dev_t dev = host->api.ggml_backend_dev_get(i);
        void ** slot = &ga_words(dev)[GA_DEVICE_SLOT_INIT_BACKEND];
        if (*slot == (void *) ga_init_backend) {
            continue;
        }
        const int n_devices = atomic_load(&host->n_devices);
        int k = 0;
        while (k < n_devices && host->devices[k].dev != dev) {
            k++;
        }
        if (k == GA_MAX_DEVICES || !ga_device_known(host, dev)) {
            ga_log(host, GA_LOG_LEVEL_WARN, "device %s left alone: %s", host->api.ggml_backend_dev_name(dev),
                   k == GA_MAX_DEVICES ? "too many devices" : "its structure is not the one we know");
            continue;
        }
        struct ga_device * device = &host->devices[k];
        if (k == n_devices) {
            device->host  = host;
            device->dev   = dev;
            device->index = (int) i;
            device->type  = host->api.ggml_backend_dev_type(dev);
        }
        atomic_store(&device->init_backend, (ga_init_backend_t) *slot);
        if (k == n_devices) {
            atomic_store_explicit(&host->n_devices, n_devices + 1, memory_order_release);
        }
        __atomic_store_n(slot, (void *) ga_init_backend, __ATOMIC_SEQ_CST);
    }
}

static int ga_host_attach_handle_locked(void * handle, const char * library) {
    void * symbol = dlsym(handle, "ggml_backend_dev_count");
    Dl_info info;
    if (!symbol || !dladdr(symbol, &info)) {
        return ga_fail(GGML_ASYNC_ERR_NOT_GGML, "%s has no ggml backend registry", library);
    }
    const int n_hosts = ga_host_count();
    struct ga_host * host = NULL;
    for (int i = 0; i < n_hosts && !host; i++) {
        host = ga_hosts[i].base == info.dli_fbase ? &ga_hosts[i] : NULL;
    }
    const bool known = host != NULL;
    if (!known) {
        if (n_hosts == GA_MAX_HOSTS) {
            return ga_fail(GGML_ASYNC_ERR_LIMIT, "more than %d ggml libraries in one process", GA_MAX_HOSTS);
        }
        host = &ga_hosts[n_hosts];
        memset(host, 0, sizeof(*host));
        host->id      = n_hosts;
        host->base    = info.dli_fbase;
        host->library = strdup(info.dli_fname);
        if (!host->library) {
            return ga_fail(GGML_ASYNC_ERR_NO_MEMORY, "no memory to attach");
        }
        int status = ga_resolve(host, handle, library);
        if (status == GGML_ASYNC_OK) {
            status = ga_prove(host);
        }
        if (status != GGML_ASYNC_OK) {
            free(host->library);
            return status;
        }
        atomic_store(&host->mode, ga_default_mode());
        // Published before the first device points at us: its init_backend must find the host.
        atomic_store_explicit(&ga_n_hosts, n_hosts + 1, memory_order_release);
    }
    const bool again = atomic_exchange(&host->attached, true);
    ga_host_scan_devices_locked(host);
    if (!again) {
        ga_log(host, GA_LOG_LEVEL_INFO, "%s attached to ggml %s (API %d) with %d devices, mode %s", ggml_async_version(),
               host->api.ggml_version ? host->api.ggml_version() : "?", host->api_version, atomic_load(&host->n_devices),
               ggml_async_mode_name(atomic_load(&host->mode)));
    }
    return host->id;
}

static int ga_host_attach_handle(void * handle, const char * library) {
    ga_record_capture();
    ga_fork_guard();
    ga_lock();
    ga_control_start_locked();
    const int  n_before = ga_host_count();
    const int  id       = ga_host_attach_handle_locked(handle, library);
    const bool is_new   = ga_host_count() > n_before;
    ga_control_update_locked();
    ga_unlock();
    if (is_new) {
        ga_record_announce(ga_host_get(id));
    }
    if (id < 0) {
        ga_capture_refused(id, ggml_async_last_error());
        dlclose(handle);
    }
    // On success the handle is kept: the host stays loaded as long as its devices point at us.
    return id;
}

int ga_host_attach_library(const char * library) {
    void * handle = ga_open_loaded(library);
    if (!handle) {
        return ga_fail(GGML_ASYNC_ERR_NOT_GGML, "%s is not loaded in this process\nload llama.cpp first, then attach", library);
    }
    return ga_host_attach_handle(handle, library);
}

// The library that an address (our caller's) lies in. Never the global scope: that may hold another ggml.
int ga_host_attach_address(const void * address) {
    Dl_info           info;
    struct link_map * map = NULL;
    if (!dladdr1(address, &info, (void **) &map, RTLD_DL_LINKMAP) || !map) {
        return ga_fail(GGML_ASYNC_ERR_NOT_GGML, "called from outside any loaded library");
    }
    const bool main_program = !map->l_name || !*map->l_name;
    void * handle = main_program ? dlopen(NULL, RTLD_LAZY) : dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) {
        return ga_fail(GGML_ASYNC_ERR_NOT_GGML, "cannot open the library that called us: %s", info.dli_fname);
    }
    return ga_host_attach_handle(handle, info.dli_fname);
}
