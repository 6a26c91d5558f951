// The Khronos validation layer above and below ours: the same counts, and it finds nothing to say about our calls.

#include "vk_world.h"

#include <dlfcn.h>

#define VALIDATION "VK_LAYER_KHRONOS_validation"

static struct world w;

static bool has_validation(void) {
    world_env("");
    void * loader = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(loader);
    const PFN_vkGetInstanceProcAddr gipa = (PFN_vkGetInstanceProcAddr) dlsym(loader, "vkGetInstanceProcAddr");
    const PFN_vkEnumerateInstanceLayerProperties list =
        (PFN_vkEnumerateInstanceLayerProperties) gipa(NULL, "vkEnumerateInstanceLayerProperties");
    VkLayerProperties layers[32];
    uint32_t n = 32;
    list(&n, layers);
    bool found = false;
    for (uint32_t i = 0; i < n && i < 32; i++) {
        found = found || !strcmp(layers[i].layerName, VALIDATION);
    }
    dlclose(loader);
    return found;
}

static VkBuffer buffer_in(uint32_t type, VkDeviceMemory * memory) {
    const VkBufferCreateInfo info = {
        .sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO, .size = 4096,
        .usage = VK_BUFFER_USAGE_TRANSFER_SRC_BIT | VK_BUFFER_USAGE_TRANSFER_DST_BIT,
    };
    VkBuffer buffer;
    CHECK_INT(w.vkCreateBuffer(w.device, &info, NULL, &buffer), VK_SUCCESS);
    VkMemoryRequirements needs;
    w.vkGetBufferMemoryRequirements(w.device, buffer, &needs);
    const VkMemoryAllocateInfo allocate = {
        .sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, .allocationSize = needs.size, .memoryTypeIndex = type,
    };
    CHECK_INT(w.vkAllocateMemory(w.device, &allocate, NULL, memory), VK_SUCCESS);
    CHECK_INT(w.vkBindBufferMemory(w.device, buffer, *memory, 0), VK_SUCCESS);
    return buffer;
}

static void a_program(void) {
    world_open(&w);
    VkDeviceMemory memories[2];
    const VkBuffer device = buffer_in(0, &memories[0]), host = buffer_in(1, &memories[1]);
    const VkCommandPoolCreateInfo pool_info = { .sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO };
    VkCommandPool pool;
    CHECK_INT(w.vkCreateCommandPool(w.device, &pool_info, NULL, &pool), VK_SUCCESS);
    const VkCommandBufferAllocateInfo commands_info = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO, .commandPool = pool, .commandBufferCount = 1,
    };
    VkCommandBuffer commands;
    CHECK_INT(w.vkAllocateCommandBuffers(w.device, &commands_info, &commands), VK_SUCCESS);
    const VkCommandBufferBeginInfo begin = { .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO };
    const VkBufferCopy region = { .size = 256 };
    CHECK_INT(w.vkBeginCommandBuffer(commands, &begin), VK_SUCCESS);
    w.vkCmdCopyBuffer(commands, device, host, 1, &region);
    CHECK_INT(w.vkEndCommandBuffer(commands), VK_SUCCESS);

    const VkFenceCreateInfo fence_info = { .sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO };
    VkFence fence;
    CHECK_INT(w.vkCreateFence(w.device, &fence_info, NULL, &fence), VK_SUCCESS);
    const VkSubmitInfo submit = {
        .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO, .commandBufferCount = 1, .pCommandBuffers = &commands,
    };
    world_mock()->polls_not_ready = 2;
    for (int i = 0; i < 3; i++) {
        CHECK_INT(w.vkQueueSubmit(w.queue, 1, &submit, fence), VK_SUCCESS);
        while (w.vkGetFenceStatus(w.device, fence) == VK_NOT_READY) {}
        CHECK_INT(w.vkWaitForFences(w.device, 1, &fence, VK_TRUE, UINT64_MAX), VK_SUCCESS);
        CHECK_INT(w.vkResetFences(w.device, 1, &fence), VK_SUCCESS);
    }
    const VkCommandBufferSubmitInfo commands2 = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_SUBMIT_INFO, .commandBuffer = commands,
    };
    const VkSubmitInfo2 submit2 = {
        .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO_2, .commandBufferInfoCount = 1, .pCommandBufferInfos = &commands2,
    };
    CHECK_INT(w.vkQueueSubmit2(w.queue, 1, &submit2, VK_NULL_HANDLE), VK_SUCCESS);
    CHECK_INT(w.vkQueueWaitIdle(w.queue), VK_SUCCESS);
    EXPECT("queue_submits=4 queue_submit2s=1 submit_infos=4 fence_status_polls=9 fence_status_not_ready=6 fence_spans=3"
           " wait_for_fences_calls=3 queue_wait_idle_calls=1 fence_waits=4 copies_to_host=1 copies_to_host_bytes=256");

    w.vkDestroyFence(w.device, fence, NULL);
    w.vkDestroyCommandPool(w.device, pool, NULL);
    w.vkDestroyBuffer(w.device, device, NULL);
    w.vkDestroyBuffer(w.device, host, NULL);
    w.vkFreeMemory(w.device, memories[0], NULL);
    w.vkFreeMemory(w.device, memories[1], NULL);
    world_close(&w);
}

// The validation layer reports on stdout: nothing may be there. It must also have been there itself.
static void with_layers(const char * layers) {
    FILE * const stream = tmpfile();
    CHECK(stream);
    const int file = fileno(stream);
    const int before = dup(1);
    CHECK(dup2(file, 1) == 1);
    world_env(layers);
    a_program();
    fflush(stdout);
    CHECK(dup2(before, 1) == 1);
    char      text[4096];
    const ssize_t n = pread(file, text, sizeof(text) - 1, 0);
    if (n > 0) {
        text[n] = '\0';
        fprintf(stderr, "with %s, stdout has:\n%s\n", layers, text);
        exit(1);
    }
}

static void validation_above_us(void) {
    with_layers(VALIDATION ":" WAITS);
}

static void validation_below_us(void) {
    with_layers(WAITS ":" VALIDATION);
}

// Proof that the layer above is a working one: it must report a structure of the wrong type.
static void validation_is_awake_in_these_tests(void) {
    FILE * const stream = tmpfile();
    CHECK(stream);
    const int file = fileno(stream);
    const int before = dup(1);
    CHECK(dup2(file, 1) == 1);
    world_env(VALIDATION ":" WAITS);
    world_open(&w);
    const VkFenceCreateInfo wrong = { .sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO };
    VkFence fence;
    w.vkCreateFence(w.device, &wrong, NULL, &fence);
    fflush(stdout);
    CHECK(dup2(before, 1) == 1);
    CHECK(lseek(file, 0, SEEK_END) > 0);
}

static const struct test tests[] = {
    TEST(validation_above_us),
    TEST(validation_below_us),
    TEST(validation_is_awake_in_these_tests),
};

int main(int argc, char ** argv) {
    void * loader = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!loader) {
        printf("skipped: no Vulkan loader (libvulkan1)\n");
        return 77;
    }
    dlclose(loader);
    if (!has_validation()) {
        printf("skipped: no " VALIDATION " (vulkan-validationlayers) in " VALIDATION_DIR "\n");
        return 77;
    }
    return test_main(tests, sizeof(tests)/sizeof(tests[0]), argc, argv);
}
