// The layer as a writer of the capture file: every wait and submit of a script of known calls is an event.

#include "../capture_reader.h"
#include "vk_world.h"

static struct world  w;
static struct reader r;
static const char *  path;

static VkFence new_fence(void) {
    const VkFenceCreateInfo info = { .sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO };
    VkFence fence;
    CHECK_INT(w.vkCreateFence(w.device, &info, NULL, &fence), VK_SUCCESS);
    return fence;
}

static void submit(VkFence fence, uint32_t n_infos) {
    const VkSubmitInfo infos[2] = { { .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO }, { .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO } };
    CHECK_INT(w.vkQueueSubmit(w.queue, n_infos, infos, fence), VK_SUCCESS);
}

static VkResult wait_for(VkFence fence, uint64_t timeout) {
    return w.vkWaitForFences(w.device, 1, &fence, VK_TRUE, timeout);
}

static void a_script(void) {
    world_env(WAITS);
    world_open(&w);
    const struct world_layer * layer = world_layer();
    VkFence fence = new_fence();
    layer->set_cause(GGML_ASYNC_LAYER_CAUSE_READBACK, 12);
    submit(fence, 2);
    CHECK_INT(wait_for(fence, UINT64_MAX), VK_SUCCESS);
    CHECK_INT(wait_for(fence, UINT64_MAX), VK_SUCCESS);             // joined
    layer->set_cause(GGML_ASYNC_LAYER_CAUSE_TOKEN, 0);
    const VkSubmitInfo2 info2 = { .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO_2 };
    CHECK_INT(w.vkQueueSubmit2(w.queue, 1, &info2, NULL), VK_SUCCESS);
    CHECK_INT(w.vkQueueWaitIdle(w.queue), VK_SUCCESS);
    layer->set_cause(GGML_ASYNC_LAYER_CAUSE_UPLOAD, 0);
    world_mock()->polls_not_ready = 2;
    VkFence polled = new_fence();
    submit(polled, 1);
    CHECK_INT(w.vkGetFenceStatus(w.device, polled), VK_NOT_READY);
    CHECK_INT(w.vkGetFenceStatus(w.device, polled), VK_NOT_READY);
    CHECK_INT(w.vkGetFenceStatus(w.device, polled), VK_SUCCESS);
    world_mock()->polls_not_ready = 0;
    layer->set_cause(GGML_ASYNC_LAYER_CAUSE_ELSEWHERE, 0);
    submit(NULL, 1);
    CHECK_INT(w.vkDeviceWaitIdle(w.device), VK_SUCCESS);
    CHECK_INT(w.vkGetFenceStatus(w.device, fence), VK_SUCCESS);     // a poll, not a wait
    submit(NULL, 1);
    world_mock()->fail_function = "vkWaitForFences";
    world_mock()->fail_result   = VK_TIMEOUT;
    atomic_store(&world_mock()->fail_count, 1);
    CHECK_INT(wait_for(fence, 1000), VK_TIMEOUT);
    CHECK_INT(wait_for(fence, UINT64_MAX), VK_SUCCESS);
    CHECK_INT(wait_for(fence, 0), VK_SUCCESS);                      // cannot wait
}

static void every_wait_and_submit_is_an_event(void) {
    path = reader_path(".");
    reader_child(a_script, 0);
    reader_open(&r, path, true);
    CHECK_INT(r.n_writers, 1);
    CHECK_INT(r.writers[0].component, GA_CAPTURE_LAYER);
    CHECK(strstr(r.writers[0].text, "libVkLayer_ggml_async_waits.so\n"));
    CHECK_INT(r.writers[0].n_of_kind[GA_CAPTURE_DEVICE], 1);
    CHECK_INT(r.writers[0].n_of_kind[GA_CAPTURE_END], 1);
    CHECK(r.writers[0].n_of_kind[GA_CAPTURE_COUNTERS] >= 3);
    static const struct { int kind, path, cause, stage, n_infos, flags; } expected[] = {
        { GA_CAPTURE_EVENT_SUBMIT, 0, GGML_ASYNC_LAYER_CAUSE_READBACK, 12, 2, 0 },
        { GA_CAPTURE_EVENT_WAIT,   0, GGML_ASYNC_LAYER_CAUSE_READBACK, 12, 0, 0 },
        { GA_CAPTURE_EVENT_WAIT,   0, GGML_ASYNC_LAYER_CAUSE_READBACK, 12, 0, GA_CAPTURE_FLAG_JOINED },
        { GA_CAPTURE_EVENT_SUBMIT, 1, GGML_ASYNC_LAYER_CAUSE_TOKEN,     0, 1, 0 },
        { GA_CAPTURE_EVENT_WAIT,   3, GGML_ASYNC_LAYER_CAUSE_TOKEN,     0, 0, 0 },
        { GA_CAPTURE_EVENT_SUBMIT, 0, GGML_ASYNC_LAYER_CAUSE_UPLOAD,    0, 1, 0 },
        { GA_CAPTURE_EVENT_WAIT,   1, GGML_ASYNC_LAYER_CAUSE_UPLOAD,    0, 0, 0 },      // the polls' span
        { GA_CAPTURE_EVENT_SUBMIT, 0, GGML_ASYNC_LAYER_CAUSE_ELSEWHERE, 0, 1, 0 },
        { GA_CAPTURE_EVENT_WAIT,   4, GGML_ASYNC_LAYER_CAUSE_ELSEWHERE, 0, 0, 0 },
        { GA_CAPTURE_EVENT_SUBMIT, 0, GGML_ASYNC_LAYER_CAUSE_ELSEWHERE, 0, 1, 0 },
        { GA_CAPTURE_EVENT_WAIT,   0, GGML_ASYNC_LAYER_CAUSE_ELSEWHERE, 0, 0, GA_CAPTURE_FLAG_TIMEOUT },
        { GA_CAPTURE_EVENT_WAIT,   0, GGML_ASYNC_LAYER_CAUSE_ELSEWHERE, 0, 0, 0 },
    };
    CHECK_INT(r.n_events, sizeof(expected)/sizeof(expected[0]));
    for (int i = 0; i < r.n_events; i++) {
        const struct ga_capture_event * e = &r.events[i];
        CHECK_INT(e->kind, expected[i].kind);
        CHECK_INT(e->path, expected[i].path);
        CHECK_INT(e->cause, expected[i].cause);
        CHECK_INT(e->stage, expected[i].stage);
        CHECK_INT(e->n_readbacks, expected[i].n_infos);
        CHECK_INT(e->flags, expected[i].flags);
        CHECK_INT(e->mode, 255);
        CHECK_INT(e->device, 0);
        CHECK_INT(e->host, -1);
        CHECK(e->t_ns > 0 && e->duration_ns >= 0 && e->thread);
        CHECK(i == 0 || e->t_ns >= r.events[i - 1].t_ns + r.events[i - 1].duration_ns);
    }
    reader_close(&r);
    unlink(path);
}

static void an_instance_alone_says_hello(void) {
    path = reader_path(".");
    world_env(WAITS);
    CHECK_INT(world_create_instance(&w), VK_SUCCESS);
    reader_open(&r, path, true);
    CHECK_INT(r.n_writers, 1);
    CHECK_INT(r.n_events, 0);
    reader_close(&r);
    unlink(path);
}

static const struct test tests[] = {
    TEST(every_wait_and_submit_is_an_event),
    TEST(an_instance_alone_says_hello),
};

WORLD_MAIN(tests)
