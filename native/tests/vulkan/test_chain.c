// The layer as a link in the chain: what it passes on, what it hides, what it keeps.

#include "vk_world.h"

#include <vulkan/vk_layer.h>

#include <dlfcn.h>

static struct world w;

static void open_world(void) {
    world_env(WAITS);
    world_open(&w);
}

static bool in_layer(PFN_vkVoidFunction function) {
    Dl_info info;
    return function && dladdr((void *) function, &info) && strstr(info.dli_fname, "libVkLayer_ggml_async_waits");
}

static VkFence new_fence(void) {
    const VkFenceCreateInfo info = { .sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO };
    VkFence fence;
    CHECK_INT(w.vkCreateFence(w.device, &info, NULL, &fence), VK_SUCCESS);
    return fence;
}

static void fail_next(const char * function, VkResult result, int count) {
    world_mock()->fail_function = function;
    world_mock()->fail_result   = result;
    world_mock()->fail_count    = count;
}

static void a_reader_finds_the_layer_by_its_name(void) {
    open_world();
    const struct world_layer * layer = world_layer();
    CHECK_INT(layer->abi_version(), GGML_ASYNC_LAYER_ABI_VERSION);
    const int n = layer->counters(NULL, 0);
    CHECK(n > 20);
    for (int i = 0; i < n; i++) {
        CHECK(layer->counter_name(i) && layer->counter_name(i)[0]);
        CHECK(layer->counter_text(i) && layer->counter_text(i)[0]);
    }
    CHECK(!layer->counter_name(n) && !layer->counter_name(-1) && !layer->counter_text(n));
    uint64_t few[2] = { 99, 99 };
    CHECK_INT(layer->counters(few, 1), n);
    CHECK_INT(few[0], 0);
    CHECK_INT(few[1], 99);
    CHECK_INT(layer->devices(), 1);
    CHECK_TEXT(layer->device_name(0), "mock 0");
    CHECK(!layer->device_name(1));
    CHECK_INT(layer->device_counters(1, few, 2), -1);
    CHECK_INT(layer->device_counters(-1, few, 2), -1);
    CHECK_INT(layer->queues(7), -1);
    CHECK_INT(layer->queue_counters(0, 1, few, 2), -1);
    CHECK_INT(layer->queue_counters(3, 0, few, 2), -1);
    world_close(&w);
}

static void every_error_comes_up_as_it_is_and_is_no_wait(void) {
    open_world();
    const VkResult results[] = { VK_ERROR_DEVICE_LOST, VK_ERROR_OUT_OF_HOST_MEMORY, VK_ERROR_OUT_OF_DEVICE_MEMORY };
    const VkFence             fence  = new_fence();
    const VkSemaphoreWaitInfo wait   = { .sType = VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO };
    const VkSubmitInfo        infos  = { .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO };
    const VkSubmitInfo2       infos2 = { .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO_2 };
    for (int i = 0; i < 3; i++) {
        const VkResult r = results[i];
        fail_next("vkQueueSubmit", r, 1);
        CHECK_INT(w.vkQueueSubmit(w.queue, 1, &infos, fence), r);
        fail_next("vkQueueSubmit2", r, 2);
        CHECK_INT(w.vkQueueSubmit2(w.queue, 1, &infos2, fence), r);
        CHECK_INT(w.vkQueueSubmit2KHR(w.queue, 1, &infos2, fence), r);
        fail_next("vkQueueBindSparse", r, 1);
        CHECK_INT(w.vkQueueBindSparse(w.queue, 0, NULL, fence), r);
        fail_next("vkWaitForFences", r, 1);
        CHECK_INT(w.vkWaitForFences(w.device, 1, &fence, VK_TRUE, UINT64_MAX), r);
        fail_next("vkGetFenceStatus", r, 1);
        CHECK_INT(w.vkGetFenceStatus(w.device, fence), r);
        fail_next("vkWaitSemaphores", r, 2);
        CHECK_INT(w.vkWaitSemaphores(w.device, &wait, 1), r);
        CHECK_INT(w.vkWaitSemaphoresKHR(w.device, &wait, 1), r);
        fail_next("vkQueueWaitIdle", r, 1);
        CHECK_INT(w.vkQueueWaitIdle(w.queue), r);
        fail_next("vkDeviceWaitIdle", r, 1);
        CHECK_INT(w.vkDeviceWaitIdle(w.device), r);
    }
    EXPECT("queue_submits=9 queue_submit2s=6 submit_infos=9 queue_bind_sparses=3 wait_for_fences_calls=3"
           " fence_status_polls=3 wait_semaphores_calls=6 queue_wait_idle_calls=3 device_wait_idle_calls=3 errors=30");
    CHECK_INT(world_counter("fence_wait_ns", WORLD_TOTAL, 0), 0);
}

static void objects_that_fail_are_not_followed(void) {
    open_world();
    const VkFenceCreateInfo info = { .sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO };
    VkFence fence = VK_NULL_HANDLE;
    fail_next("vkCreateFence", VK_ERROR_OUT_OF_HOST_MEMORY, 1);
    CHECK_INT(w.vkCreateFence(w.device, &info, NULL, &fence), VK_ERROR_OUT_OF_HOST_MEMORY);
    CHECK(!fence);
    const VkMemoryAllocateInfo allocate = { .sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, .allocationSize = 64 };
    VkDeviceMemory memory = VK_NULL_HANDLE;
    fail_next("vkAllocateMemory", VK_ERROR_OUT_OF_DEVICE_MEMORY, 1);
    CHECK_INT(w.vkAllocateMemory(w.device, &allocate, NULL, &memory), VK_ERROR_OUT_OF_DEVICE_MEMORY);
    fail_next("vkResetFences", VK_ERROR_OUT_OF_DEVICE_MEMORY, 1);
    fence = new_fence();
    CHECK_INT(w.vkResetFences(w.device, 1, &fence), VK_ERROR_OUT_OF_DEVICE_MEMORY);
    w.vkDestroyFence(w.device, VK_NULL_HANDLE, NULL);
    w.vkDestroyFence(w.device, fence, NULL);
    w.vkFreeMemory(w.device, VK_NULL_HANDLE, NULL);
    w.vkDestroyBuffer(w.device, VK_NULL_HANDLE, NULL);
    EXPECT("");
    world_close(&w);
}

static void a_device_that_cannot_be_made_is_an_error_and_the_next_one_works(void) {
    world_env(WAITS);
    const VkResult results[] = { VK_ERROR_TOO_MANY_OBJECTS, VK_ERROR_DEVICE_LOST, VK_ERROR_OUT_OF_HOST_MEMORY };
    open_world();
    for (int i = 0; i < 3; i++) {
        VkDevice device = VK_NULL_HANDLE;
        fail_next("vkCreateDevice", results[i], 1);
        CHECK_INT(world_create_device(&w, w.physical[0], &device), results[i]);
        CHECK_INT(world_layer()->devices(), 1);
    }
    VkDevice device;
    CHECK_INT(world_create_device(&w, w.physical[0], &device), VK_SUCCESS);
    CHECK_INT(world_layer()->devices(), 2);
    w.vkDestroyDevice(device, NULL);
    w.vkDestroyDevice(VK_NULL_HANDLE, NULL);
    CHECK_INT(world_mock_calls("vkDestroyDevice"), 1);
    world_close(&w);
    CHECK_INT(world_mock_calls("vkDestroyDevice"), 2);
    CHECK_INT(world_mock_calls("vkDestroyInstance"), 1);
}

static void an_instance_that_cannot_be_made_is_an_error(void) {
    world_env(WAITS);
    fail_next("vkCreateInstance", VK_ERROR_OUT_OF_HOST_MEMORY, 1);
    CHECK_INT(world_create_instance(&w), VK_ERROR_OUT_OF_HOST_MEMORY);
    world_open(&w);
    world_close(&w);
}

static void hooks_are_ours_where_the_driver_has_the_function(void) {
    open_world();
    CHECK(in_layer((PFN_vkVoidFunction) w.vkQueueSubmit));
    CHECK(in_layer((PFN_vkVoidFunction) w.vkQueueSubmit2));
    CHECK(in_layer((PFN_vkVoidFunction) w.vkQueueSubmit2KHR));
    CHECK(in_layer((PFN_vkVoidFunction) w.vkGetFenceStatus));
    CHECK(!in_layer((PFN_vkVoidFunction) w.vkCreateBuffer));    // nothing to count: straight to the driver
    CHECK(w.vkCreateBuffer);
}

static PFN_vkGetInstanceProcAddr layer_gipa(PFN_vkGetDeviceProcAddr * gdpa) {
    void * library = dlopen(LAYER_LIBRARY, RTLD_NOW | RTLD_NOLOAD);
    CHECK(library);
    const PFN_vkNegotiateLoaderLayerInterfaceVersion negotiate =
        (PFN_vkNegotiateLoaderLayerInterfaceVersion) dlsym(library, "vkNegotiateLoaderLayerInterfaceVersion");
    CHECK(negotiate);
    VkNegotiateLayerInterface interface = { .sType = LAYER_NEGOTIATE_INTERFACE_STRUCT, .loaderLayerInterfaceVersion = 1 };
    CHECK_INT(negotiate(&interface), VK_ERROR_INITIALIZATION_FAILED);
    CHECK_INT(negotiate(NULL), VK_ERROR_INITIALIZATION_FAILED);
    interface.loaderLayerInterfaceVersion = 9;
    CHECK_INT(negotiate(&interface), VK_SUCCESS);
    CHECK_INT(interface.loaderLayerInterfaceVersion, 2);
    *gdpa = interface.pfnGetDeviceProcAddr;
    return interface.pfnGetInstanceProcAddr;
}

static void no_hook_where_the_driver_lacks_the_function(void) {
    world_env(WAITS);
    world_mock()->hide_submit2 = true;
    world_open(&w);
    CHECK(in_layer((PFN_vkVoidFunction) w.vkQueueSubmit));
    CHECK(!w.vkQueueSubmit2);
    CHECK(!w.vkQueueSubmit2KHR);
    PFN_vkGetDeviceProcAddr         gdpa;
    const PFN_vkGetInstanceProcAddr gipa = layer_gipa(&gdpa);
    CHECK(in_layer(gipa(w.instance, "vkQueueSubmit")));
    CHECK(!gipa(w.instance, "vkQueueSubmit2"));
    CHECK(!gipa(w.instance, "vkQueueSubmit2KHR"));
    CHECK(!gipa(w.instance, "vkNoSuchFunction"));
    CHECK(!gipa(NULL, "vkQueueSubmit"));
    CHECK(!gipa(NULL, "vkCreateDevice"));
    CHECK(in_layer(gipa(NULL, "vkCreateInstance")));
    CHECK(in_layer(gipa(NULL, "vkGetInstanceProcAddr")));
    CHECK(in_layer(gipa(w.instance, "vkGetDeviceProcAddr")));
    CHECK(!gdpa(w.device, "vkQueueSubmit2"));
    CHECK(in_layer(gdpa(w.device, "vkGetDeviceProcAddr")));
    CHECK(!gdpa(w.device, "vkNoSuchFunction"));
}

static VKAPI_ATTR VkResult VKAPI_CALL fails_to_create(const VkInstanceCreateInfo * info, const VkAllocationCallbacks * a,
                                                      VkInstance * instance) {
    (void) info; (void) a; (void) instance;
    return VK_ERROR_EXTENSION_NOT_PRESENT;
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL failing_gipa(VkInstance instance, const char * name) {
    (void) instance;
    return strcmp(name, "vkCreateInstance") ? NULL : (PFN_vkVoidFunction) fails_to_create;
}

static void a_failed_create_leaves_the_chain_as_it_was(void) {
    open_world();
    PFN_vkGetDeviceProcAddr    gdpa;
    const PFN_vkCreateInstance create = (PFN_vkCreateInstance) layer_gipa(&gdpa)(NULL, "vkCreateInstance");
    VkLayerInstanceLink below = { .pNext = NULL };
    VkLayerInstanceLink ours  = { .pNext = &below, .pfnNextGetInstanceProcAddr = failing_gipa };
    VkLayerInstanceCreateInfo link = {
        .sType = VK_STRUCTURE_TYPE_LOADER_INSTANCE_CREATE_INFO, .function = VK_LAYER_LINK_INFO, .u.pLayerInfo = &ours,
    };
    VkInstanceCreateInfo info = { .sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO, .pNext = &link };
    VkInstance instance;
    CHECK_INT(create(&info, NULL, &instance), VK_ERROR_EXTENSION_NOT_PRESENT);
    CHECK(link.u.pLayerInfo == &ours);
    info.pNext = NULL;
    CHECK_INT(create(&info, NULL, &instance), VK_ERROR_INITIALIZATION_FAILED);
}

static void two_devices_are_counted_apart(void) {
    world_env(WAITS);
    world_mock()->n_devices = 2;
    world_open(&w);
    VkDevice second;
    VkQueue  second_queue;
    CHECK_INT(world_create_device(&w, w.physical[1], &second), VK_SUCCESS);
    CHECK_TEXT(world_layer()->device_name(0), "mock 0");
    CHECK_TEXT(world_layer()->device_name(1), "mock 1");
    w.vkGetDeviceQueue(second, 0, 3, &second_queue);
    CHECK_INT(w.vkQueueSubmit(w.queue, 0, NULL, NULL), VK_SUCCESS);
    CHECK_INT(w.vkQueueSubmit(second_queue, 0, NULL, NULL), VK_SUCCESS);
    CHECK_INT(w.vkDeviceWaitIdle(w.device), VK_SUCCESS);
    CHECK_INT(w.vkDeviceWaitIdle(second), VK_SUCCESS);
    CHECK_INT(w.vkDeviceWaitIdle(w.device), VK_SUCCESS);     // nothing submitted to it since: still its first wait
    CHECK_INT(w.vkQueueSubmit(second_queue, 0, NULL, NULL), VK_SUCCESS);
    CHECK_INT(w.vkDeviceWaitIdle(w.device), VK_SUCCESS);     // the other device's submit does not part them
    CHECK_INT(w.vkQueueWaitIdle(second_queue), VK_SUCCESS);
    EXPECT_DEVICE(0, "queue_submits=1 device_wait_idle_calls=3 fence_waits=1");
    EXPECT_DEVICE(1, "queue_submits=2 device_wait_idle_calls=1 queue_wait_idle_calls=1 fence_waits=2");
    EXPECT("queue_submits=3 device_wait_idle_calls=4 queue_wait_idle_calls=1 fence_waits=3");
    w.vkDestroyDevice(second, NULL);
    EXPECT_DEVICE(1, "queue_submits=2 device_wait_idle_calls=1 queue_wait_idle_calls=1 fence_waits=2");
}

static void counts_outlive_their_device_and_instance(void) {
    open_world();
    CHECK_INT(w.vkQueueSubmit(w.queue, 0, NULL, NULL), VK_SUCCESS);
    CHECK_INT(w.vkQueueWaitIdle(w.queue), VK_SUCCESS);
    const struct world_layer * layer = world_layer();
    CHECK(layer);
    world_close(&w);
    EXPECT("queue_submits=1 queue_wait_idle_calls=1 fence_waits=1");
    world_open(&w);
    CHECK_INT(w.vkQueueSubmit(w.queue, 0, NULL, NULL), VK_SUCCESS);
    world_close(&w);
    EXPECT("queue_submits=2 queue_wait_idle_calls=1 fence_waits=1");
    EXPECT_DEVICE(0, "queue_submits=1 queue_wait_idle_calls=1 fence_waits=1");
    EXPECT_DEVICE(1, "queue_submits=1");
}

static void a_thousand_devices_one_after_the_other_keep_the_totals(void) {
    open_world();
    for (int i = 0; i < 1000; i++) {
        VkDevice device;
        VkQueue  queue;
        CHECK_INT(world_create_device(&w, w.physical[0], &device), VK_SUCCESS);
        w.vkGetDeviceQueue(device, 0, 0, &queue);
        CHECK_INT(w.vkQueueSubmit(queue, 0, NULL, NULL), VK_SUCCESS);
        w.vkDestroyDevice(device, NULL);
    }
    EXPECT("queue_submits=1000");
    CHECK(world_layer()->devices() < 1000);
    world_close(&w);
}

static void nothing_is_written_to_stdout(void) {
    FILE * const stream = tmpfile();
    CHECK(stream);
    const int file = fileno(stream);
    const int before = dup(1);
    CHECK(dup2(file, 1) == 1);
    open_world();
    const VkFence fence = new_fence();
    CHECK_INT(w.vkQueueSubmit(w.queue, 0, NULL, fence), VK_SUCCESS);
    CHECK_INT(w.vkWaitForFences(w.device, 1, &fence, VK_TRUE, 1), VK_SUCCESS);
    fail_next("vkDeviceWaitIdle", VK_ERROR_DEVICE_LOST, 1);
    CHECK_INT(w.vkDeviceWaitIdle(w.device), VK_ERROR_DEVICE_LOST);
    fail_next("vkCreateDevice", VK_ERROR_DEVICE_LOST, 1);
    VkDevice device;
    CHECK_INT(world_create_device(&w, w.physical[0], &device), VK_ERROR_DEVICE_LOST);
    world_close(&w);
    fflush(stdout);
    CHECK(dup2(before, 1) == 1);
    CHECK_INT(lseek(file, 0, SEEK_END), 0);
}

static const struct test tests[] = {
    TEST(a_reader_finds_the_layer_by_its_name),
    TEST(every_error_comes_up_as_it_is_and_is_no_wait),
    TEST(objects_that_fail_are_not_followed),
    TEST(a_device_that_cannot_be_made_is_an_error_and_the_next_one_works),
    TEST(an_instance_that_cannot_be_made_is_an_error),
    TEST(hooks_are_ours_where_the_driver_has_the_function),
    TEST(no_hook_where_the_driver_lacks_the_function),
    TEST(a_failed_create_leaves_the_chain_as_it_was),
    TEST(two_devices_are_counted_apart),
    TEST(counts_outlive_their_device_and_instance),
    TEST(a_thousand_devices_one_after_the_other_keep_the_totals),
    TEST(nothing_is_written_to_stdout),
};

WORLD_MAIN(tests)
