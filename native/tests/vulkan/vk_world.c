#include "vk_world.h"

#include <dlfcn.h>

// A loader environment with the mock driver, the layer's folder, and nothing of the machine or the user.
void world_env(const char * layers) {
    static const char * const cleared[] = {
        "VK_ADD_DRIVER_FILES", "VK_ADD_LAYER_PATH", "VK_IMPLICIT_LAYER_PATH", "VK_LOADER_LAYERS_ENABLE",
        "VK_LOADER_DRIVERS_SELECT", "VK_LOADER_DRIVERS_DISABLE", "VK_LOADER_DEVICE_SELECT", "VK_LAYER_SETTINGS_PATH",
        "VK_LAYER_ENABLES", "VK_KHRONOS_VALIDATION_REPORT_FLAGS",
    };
    for (size_t i = 0; i < sizeof(cleared)/sizeof(cleared[0]); i++) {
        unsetenv(cleared[i]);
    }
    setenv("VK_DRIVER_FILES", MOCK_MANIFEST, 1);
    setenv("VK_ICD_FILENAMES", MOCK_MANIFEST, 1);
    setenv("VK_LAYER_PATH", LAYER_DIR ":" VALIDATION_DIR, 1);
    setenv("VK_LOADER_LAYERS_DISABLE", "~implicit~", 1);
    setenv("VK_INSTANCE_LAYERS", layers, 1);
    static const char * const homes[] = {
        "HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS", "XDG_DATA_HOME", "XDG_DATA_DIRS",
    };
    for (size_t i = 0; i < sizeof(homes)/sizeof(homes[0]); i++) {
        setenv(homes[i], "/nonexistent", 1);
    }
}

static void * world_library(const char * path, int flags) {
    void * library = dlopen(path, RTLD_NOW | RTLD_LOCAL | flags);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
    }
    CHECK(library);
    return library;
}

struct mock_config * world_mock(void) {
    const mock_config_t config = (mock_config_t) dlsym(world_library(MOCK_LIBRARY, 0), "mock_config");
    CHECK(config);
    return config();
}

uint64_t world_mock_calls(const char * function) {
    const mock_calls_t calls = (mock_calls_t) dlsym(world_library(MOCK_LIBRARY, 0), "mock_calls");
    CHECK(calls);
    const uint64_t n = calls(function);
    CHECK(n != UINT64_MAX);
    return n;
}

// ---- the program

VkResult world_create_instance(struct world * world) {
    void * loader = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(loader);
    world->gipa = (PFN_vkGetInstanceProcAddr) dlsym(loader, "vkGetInstanceProcAddr");
    CHECK(world->gipa);
    const PFN_vkCreateInstance create = (PFN_vkCreateInstance) world->gipa(NULL, "vkCreateInstance");
    const VkApplicationInfo application = {
        .sType = VK_STRUCTURE_TYPE_APPLICATION_INFO, .apiVersion = VK_MAKE_API_VERSION(0, 1, 3, 0),
    };
    const VkInstanceCreateInfo info = {
        .sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO, .pApplicationInfo = &application,
    };
    return create(&info, NULL, &world->instance);
}

VkResult world_create_device(struct world * world, VkPhysicalDevice physical, VkDevice * device) {
    const PFN_vkCreateDevice create = (PFN_vkCreateDevice) world->gipa(world->instance, "vkCreateDevice");
    static const float priorities[MOCK_N_QUEUES];
    const VkDeviceQueueCreateInfo queues[] = {
        { .sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO, .queueFamilyIndex = 0, .queueCount = MOCK_N_QUEUES,
          .pQueuePriorities = priorities },
        { .sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO, .queueFamilyIndex = 1, .queueCount = 2,
          .pQueuePriorities = priorities },
    };
    static const char * const extensions[] = {
        "VK_KHR_timeline_semaphore", "VK_KHR_bind_memory2", "VK_KHR_copy_commands2", "VK_KHR_synchronization2",
    };
    VkPhysicalDeviceSynchronization2Features sync2 = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SYNCHRONIZATION_2_FEATURES, .synchronization2 = VK_TRUE,
    };
    VkPhysicalDeviceTimelineSemaphoreFeatures timeline = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_TIMELINE_SEMAPHORE_FEATURES, .timelineSemaphore = VK_TRUE,
    };
    const VkPhysicalDeviceFeatures features = { .sparseBinding = VK_TRUE };
    const bool hidden = world_mock()->hide_submit2;
    timeline.pNext = hidden ? NULL : &sync2;
    const VkDeviceCreateInfo info = {
        .sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, .pNext = &timeline,
        .queueCreateInfoCount = 2, .pQueueCreateInfos = queues, .pEnabledFeatures = &features,
        .enabledExtensionCount = hidden ? 3 : 4, .ppEnabledExtensionNames = extensions,
    };
    return create(physical, &info, NULL, device);
}

void world_fetch(struct world * world, VkDevice device) {
    world->gdpa = (PFN_vkGetDeviceProcAddr) world->gipa(world->instance, "vkGetDeviceProcAddr");
#define X(name) world->name = (PFN_##name) world->gdpa(device, #name);
    WORLD_FUNCTIONS(X)
#undef X
}

void world_open(struct world * world) {
    memset(world, 0, sizeof(*world));
    CHECK_INT(world_create_instance(world), VK_SUCCESS);
    const PFN_vkEnumeratePhysicalDevices enumerate =
        (PFN_vkEnumeratePhysicalDevices) world->gipa(world->instance, "vkEnumeratePhysicalDevices");
    world->n_physical = MOCK_MAX_DEVICES;
    CHECK_INT(enumerate(world->instance, &world->n_physical, world->physical), VK_SUCCESS);
    CHECK_INT(world->n_physical, world_mock()->n_devices);
    // The validation layer wants the families asked for before they are used.
    const PFN_vkGetPhysicalDeviceQueueFamilyProperties families = (PFN_vkGetPhysicalDeviceQueueFamilyProperties)
        world->gipa(world->instance, "vkGetPhysicalDeviceQueueFamilyProperties");
    for (uint32_t i = 0; i < world->n_physical; i++) {
        VkQueueFamilyProperties properties[MOCK_N_FAMILIES];
        uint32_t n_families = 0;
        families(world->physical[i], &n_families, NULL);
        CHECK_INT(n_families, MOCK_N_FAMILIES);
        families(world->physical[i], &n_families, properties);
    }
    CHECK_INT(world_create_device(world, world->physical[0], &world->device), VK_SUCCESS);
    world_fetch(world, world->device);
    world->vkGetDeviceQueue(world->device, 0, 0, &world->queue);
    CHECK(world->queue);
}

void world_close(struct world * world) {
    world->vkDestroyDevice(world->device, NULL);
    ((PFN_vkDestroyInstance) world->gipa(world->instance, "vkDestroyInstance"))(world->instance, NULL);
}

// ---- the layer's readers

const struct world_layer * world_layer(void) {
    static struct world_layer layer;
    if (!layer.counters) {
        // by its name alone, as a reader would
        void * library = world_library("libVkLayer_ggml_async_waits.so", RTLD_NOLOAD);
#define X(name, type, arguments) \
        layer.name = (type (*) arguments) dlsym(library, "ggml_async_layer_" #name); \
        CHECK(layer.name);
        WORLD_LAYER(X)
#undef X
    }
    return &layer;
}

static int world_read(int device, int queue, uint64_t * values, int n) {
    const struct world_layer * layer = world_layer();
    return device == WORLD_TOTAL ? layer->counters(values, n)
         : queue == WORLD_DEVICE ? layer->device_counters(device, values, n)
         : layer->queue_counters(device, queue, values, n);
}

uint64_t world_counter(const char * name, int device, int queue) {
    uint64_t values[64];
    const int n = world_read(device, queue, values, 64);
    CHECK(n > 0 && n <= 64);
    for (int i = 0; i < n; i++) {
        if (!strcmp(world_layer()->counter_name(i), name)) {
            return values[i];
        }
    }
    fprintf(stderr, "no counter %s\n", name);
    exit(1);
}

void world_expect(const char * file, int line, int device, int queue, const char * expected) {
    uint64_t values[64];
    const int n = world_read(device, queue, values, 64);
    CHECK(n > 0 && n <= 64);
    size_t    named = 0, found = 0;
    bool      ok = true;
    for (const char * at = expected; (at = strchr(at, '=')); at++) {
        named++;
    }
    for (int i = 0; i < n; i++) {
        const char * name   = world_layer()->counter_name(i);
        const size_t length = strlen(name);
        if (length > 3 && !strcmp(name + length - 3, "_ns")) {
            continue;
        }
        unsigned long long wanted = 0;
        for (const char * at = expected; (at = strstr(at, name)); at += length) {
            if ((at == expected || at[-1] == ' ') && at[length] == '=') {
                wanted = strtoull(at + length + 1, NULL, 10);
                found++;
            }
        }
        if (values[i] != wanted) {
            fprintf(stderr, "%s:%d: %s is %llu, not %llu\n", file, line, name, (unsigned long long) values[i], wanted);
            ok = false;
        }
    }
    if (found != named) {
        fprintf(stderr, "%s:%d: a name in \"%s\" is no counter\n", file, line, expected);
        ok = false;
    }
    if (!ok) {
        exit(1);
    }
}

int world_main(const struct test * tests, size_t n, int argc, char ** argv) {
    void * loader = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!loader) {
        printf("skipped: no Vulkan loader (libvulkan1): %s\n", dlerror());
        return 77;
    }
    dlclose(loader);
    return test_main(tests, n, argc, argv);
}
