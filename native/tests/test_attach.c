// Which hosts are attached to, which are refused, and that a refused one stays as it was (contract, point 7).

#include "world.h"

#include <dlfcn.h>

static void check_refused(const char * variant, int status, const char * thing) {
    world_log_capture();
    struct fake * fake = world_fake(variant, 0);
    CHECK_INT(ggml_async_attach(world_path(variant)), status);
    const char * error = ggml_async_last_error();
    char first_line[1024];
    snprintf(first_line, sizeof(first_line), "%.*s", (int) strcspn(error, "\n"), error);
    if (!strstr(first_line, thing)) {
        fprintf(stderr, "\"%s\" does not name the %s\n", first_line, thing);
        exit(1);
    }
    for (int i = 0; i < FAKE_N_DEVICES; i++) {
        CHECK_INT(fake->device_diff(i), 0);
    }
    CHECK(!fake->load_plugin(PLUGIN_PATH));
    CHECK_INT(world_log_count("not attached"), 1);
    CHECK(strstr(world_log(), thing));
    for (int i = 0; i < FAKE_N_DEVICES; i++) {
        CHECK_INT(fake->device_diff(i), 0);
    }
    struct ggml_backend * cpu = fake->backend_new(FAKE_CPU);
    CHECK_INT(fake->backend_diff(cpu), 0);
    fake->backend_free(cpu);
    CHECK_INT(fake->n_backends, 0);
    CHECK_INT(fake->n_buffers, 0);
    CHECK_INT(ggml_async_host_count(), 0);
}

static void an_unknown_api_version_is_refused(void) {
    check_refused("api9", GGML_ASYNC_ERR_LAYOUT, "API version");
}

static void the_layout_without_2d_copies_is_refused(void) {
    check_refused("old-layout", GGML_ASYNC_ERR_LAYOUT, "backend structure");
}

static void a_backend_with_one_more_slot_is_refused(void) {
    check_refused("extra-slot", GGML_ASYNC_ERR_LAYOUT, "backend structure");
}

static void another_null_pattern_is_refused(void) {
    check_refused("null-pattern", GGML_ASYNC_ERR_LAYOUT, "backend structure");
}

static void a_shifted_device_structure_is_refused(void) {
    check_refused("shift-device", GGML_ASYNC_ERR_LAYOUT, "device structure");
}

static void a_shifted_tensor_structure_is_refused(void) {
    check_refused("shift-tensor", GGML_ASYNC_ERR_LAYOUT, "tensor structure");
}

static void a_host_that_lacks_a_function_is_refused_by_its_name(void) {
    check_refused("missing", GGML_ASYNC_ERR_NOT_GGML, "ggml_backend_guid");
}

static void a_host_without_a_cpu_device_is_refused(void) {
    check_refused("no-cpu", GGML_ASYNC_ERR_TOO_EARLY, "no CPU device");
}

static void check_accepted(const char * variant, int api_version, const char * version) {
    world_log_capture();
    struct fake * fake = world_fake(variant, 0);
    CHECK(fake->load_plugin(PLUGIN_PATH));
    struct ggml_async_host_info info;
    CHECK_INT(ggml_async_host_get(0, &info, sizeof(info)), GGML_ASYNC_OK);
    CHECK_INT(info.id, 0);
    CHECK_INT(info.api_version, api_version);
    CHECK_INT(info.attached, 1);
    CHECK_INT(info.mode, GGML_ASYNC_MODE_ASYNC);
    CHECK_INT(info.n_devices, 6);
    CHECK_INT(info.n_backends, 0);
    CHECK_TEXT(info.version, version);
    CHECK(info.library && strstr(info.library, variant));
    CHECK(info.layout && *info.layout);
    // init_backend of each device in the registry, and nothing else
    for (int i = 0; i < FAKE_N_DEVICES; i++) {
        CHECK_INT(fake->device_diff(i), i == FAKE_LATE ? 0 : 1u << 5);
    }
    struct ggml_backend * cpu = fake->backend_new(FAKE_CPU);
    CHECK(!fake->slot_is_null(cpu, "cpy_tensor_async"));
    fake->backend_free(cpu);
    CHECK_INT(fake->n_buffers, 0);
    CHECK_INT(fake->n_backends, 0);
}

static void api_2_is_attached(void) {
    check_accepted("api2", 2, "0.0.fake");
}

static void api_3_is_attached(void) {
    check_accepted("api3", 3, "0.0.fake");
}

static void a_build_with_names_of_128_bytes_is_attached(void) {
    check_accepted("long-names", 2, "0.0.fake");
}

static void a_host_without_the_optional_functions_is_attached(void) {
    check_accepted("plain", 3, "");
}

static void a_host_with_a_log_gets_our_lines(void) {
    struct fake * fake = world_fake("api2", 0);
    CHECK(fake->load_plugin(PLUGIN_PATH));
    CHECK(strstr(fake->log, "ggml-async: 0."));
    CHECK(strstr(fake->log, "attached to ggml 0.0.fake (API 2) with 6 devices, mode async\n"));
    CHECK_INT(fake->n_logged, 1);
}

static void attaching_again_gives_the_same_host(void) {
    world_log_capture();
    struct fake * fake = world_fake("api2", 0);
    void * reg = fake->load_plugin(PLUGIN_PATH);
    CHECK(reg);
    CHECK(fake->load_plugin(PLUGIN_PATH) == reg);
    CHECK_INT(ggml_async_attach(world_path("api2")), 0);
    CHECK_INT(ggml_async_attach(world_path("api2")), 0);
    CHECK_INT(ggml_async_host_count(), 1);
    CHECK_INT(world_log_count("attached to"), 1);
    struct ggml_backend * cpu = fake->backend_new(FAKE_CPU);
    fake->backend_free(cpu);
    CHECK_INT(fake->n_backends, 0);
}

static void a_second_copy_finds_the_host_occupied(void) {
    world_log_capture();
    struct fake * fake = world_fake("api2", 0);
    CHECK(fake->load_plugin(PLUGIN_PATH));
    void * second = dlopen(SECOND_COPY_PATH, RTLD_NOW | RTLD_LOCAL);
    CHECK(second);
    int (*attach)(const char *);
    const char * (*last_error)(void);
    *(void **) &attach     = dlsym(second, "ggml_async_attach");
    *(void **) &last_error = dlsym(second, "ggml_async_last_error");
    CHECK(attach != ggml_async_attach);
    CHECK_INT(attach(world_path("api2")), GGML_ASYNC_ERR_OCCUPIED);
    CHECK(strstr(last_error(), "another ggml-async is attached"));
    CHECK(strstr(last_error(), "libggml-async.so"));
    // the first one is none the worse
    struct ggml_backend * cpu = fake->backend_new(FAKE_CPU);
    CHECK(!fake->slot_is_null(cpu, "cpy_tensor_async"));
    fake->backend_free(cpu);
}

static void the_host_is_the_library_that_called_not_the_global_one(void) {
    world_log_capture();
    struct fake * global = world_fake("api3", RTLD_NOW | RTLD_GLOBAL);
    struct fake * local  = world_fake("api2", 0);
    CHECK(local->load_plugin(PLUGIN_PATH));
    CHECK_INT(ggml_async_host_count(), 1);
    struct ggml_async_host_info info;
    CHECK_INT(ggml_async_host_get(0, &info, sizeof(info)), GGML_ASYNC_OK);
    CHECK_INT(info.api_version, 2);
    CHECK_INT(global->device_diff(FAKE_CPU), 0);
    CHECK_INT(local->device_diff(FAKE_CPU), 1u << 5);
    CHECK(global->load_plugin(PLUGIN_PATH));
    CHECK_INT(ggml_async_host_get(1, &info, sizeof(info)), GGML_ASYNC_OK);
    CHECK_INT(info.api_version, 3);
}

static void two_hosts_have_their_own_modes_and_counters(void) {
    world_log_capture();
    struct world a = { 0 }, b = { 0 };
    a.fake = world_fake("api2", 0);
    b.fake = world_fake("api3", 0);
    CHECK(a.fake->load_plugin(PLUGIN_PATH));
    CHECK(b.fake->load_plugin(PLUGIN_PATH));
    a.host = ggml_async_attach(world_path("api2"));
    b.host = ggml_async_attach(world_path("api3"));
    CHECK_INT(a.host, 0);
    CHECK_INT(b.host, 1);
    CHECK_INT(ggml_async_set_mode(b.host, GGML_ASYNC_MODE_OFF), GGML_ASYNC_OK);
    CHECK_INT(ggml_async_get_mode(a.host), GGML_ASYNC_MODE_ASYNC);
    CHECK_INT(ggml_async_get_mode(b.host), GGML_ASYNC_MODE_OFF);
    world_backends(&a, 1, FAKE_GPU0);
    world_backends(&b, 1, FAKE_GPU0);
    struct world * both[] = { &a, &b };
    for (int i = 0; i < 2; i++) {
        world_fill(both[i], 0, 3, (uint8_t) (10 + i));
        world_input(both[i], 0, 3);
        world_compute(both[i]);
        CHECK_SEEN(both[i], 3, 10 + i);
    }
    CHECK_COUNTER(a.host, "readbacks", 1);
    CHECK_COUNTER(b.host, "readbacks", 0);
    CHECK_INT(ggml_async_set_mode(-1, GGML_ASYNC_MODE_STOCK), GGML_ASYNC_OK);
    CHECK_INT(ggml_async_get_mode(a.host), GGML_ASYNC_MODE_STOCK);
    CHECK_INT(ggml_async_get_mode(b.host), GGML_ASYNC_MODE_STOCK);
    world_close(&a);
    world_close(&b);
}

static void attaching_to_nothing_says_what_to_do(void) {
    CHECK_INT(ggml_async_attach(NULL), GGML_ASYNC_ERR_NOT_GGML);
    CHECK(strstr(ggml_async_last_error(), "load llama.cpp first"));
    CHECK_INT(ggml_async_attach("/nowhere/libggml.so"), GGML_ASYNC_ERR_NOT_GGML);
    CHECK(strstr(ggml_async_last_error(), "is not loaded"));
    CHECK_INT(ggml_async_attach(PLUGIN_PATH), GGML_ASYNC_ERR_NOT_GGML);
    CHECK(strstr(ggml_async_last_error(), "no ggml backend registry"));
    CHECK_INT(ggml_async_find(NULL, 0), 0);
}

static void attaching_without_a_name_takes_the_only_host(void) {
    world_log_capture();
    world_fake("api3", 0);
    char names[4096];
    CHECK_INT(ggml_async_find(names, sizeof(names)), 1);
    CHECK(strstr(names, "libfake-ggml-api3.so\n"));
    CHECK_INT(ggml_async_attach(NULL), 0);
}

static void attaching_without_a_name_lists_several_hosts(void) {
    world_fake("api2", 0);
    world_fake("api3", 0);
    CHECK_INT(ggml_async_attach(NULL), GGML_ASYNC_ERR_ARGUMENT);
    CHECK(strstr(ggml_async_last_error(), "2 ggml libraries"));
    CHECK(strstr(ggml_async_last_error(), "libfake-ggml-api2.so"));
    CHECK(strstr(ggml_async_last_error(), "libfake-ggml-api3.so"));
    char tiny[8];
    memset(tiny, 'x', sizeof(tiny));
    CHECK_INT(ggml_async_find(tiny, sizeof(tiny)), 2);
    CHECK_TEXT(tiny, "");
}

static void hosts_are_found_as_they_come_and_go(void) {
    char names[4096];
    CHECK_INT(ggml_async_find(names, sizeof(names)), 0);
    void * other = dlopen("libpthread.so.0", RTLD_NOW);     // something that holds none
    CHECK_INT(ggml_async_find(names, sizeof(names)), 0);
    void * second = dlopen(SECOND_COPY_PATH, RTLD_NOW | RTLD_LOCAL);
    CHECK_INT(ggml_async_find(names, sizeof(names)), 0);
    world_fake("api2", 0);
    CHECK_INT(ggml_async_find(names, sizeof(names)), 1);
    CHECK(strstr(names, "libfake-ggml-api2.so\n"));
    world_fake("api3", 0);
    for (int i = 0; i < 3; i++) {
        CHECK_INT(ggml_async_find(names, sizeof(names)), 2);
        CHECK(strstr(names, "libfake-ggml-api2.so\n") && strstr(names, "libfake-ggml-api3.so\n"));
    }
    void * gone = dlopen(world_path("api9"), RTLD_NOW | RTLD_LOCAL);
    CHECK_INT(ggml_async_find(names, sizeof(names)), 3);
    dlclose(gone);
    CHECK_INT(ggml_async_find(names, sizeof(names)), 2);
    CHECK(!strstr(names, "api9"));
    gone = dlopen(world_path("api9"), RTLD_NOW | RTLD_LOCAL);
    CHECK_INT(ggml_async_find(names, sizeof(names)), 3);
    CHECK(gone && second && other);
}

static void a_refused_host_does_not_use_up_a_place(void) {
    world_log_capture();
    world_fake("api9", 0);
    for (int i = 0; i < 40; i++) {
        CHECK_INT(ggml_async_attach(world_path("api9")), GGML_ASYNC_ERR_LAYOUT);
    }
    struct fake * fake = world_fake("api2", 0);
    CHECK(fake->load_plugin(PLUGIN_PATH));
    CHECK_INT(ggml_async_host_count(), 1);
}

static void the_environment_sets_the_first_mode(void) {
    world_log_capture();
    setenv("GGML_ASYNC", "stock", 1);
    world_fake("api2", 0);
    CHECK_INT(ggml_async_attach(NULL), 0);
    CHECK_INT(ggml_async_get_mode(0), GGML_ASYNC_MODE_STOCK);
}

static void a_bad_mode_in_the_environment_means_off_and_is_said(void) {
    world_log_capture();
    setenv("GGML_ASYNC", "fast", 1);
    world_fake("api2", 0);
    CHECK_INT(ggml_async_attach(NULL), 0);
    CHECK_INT(ggml_async_get_mode(0), GGML_ASYNC_MODE_OFF);
    CHECK_INT(world_log_count("GGML_ASYNC=fast is not off, stock or async: off"), 1);
}

static void a_device_that_registers_late_is_taken_in_with_the_next_cpu_backend(void) {
    world_log_capture();
    struct fake * fake = world_fake("api2", 0);
    CHECK(fake->load_plugin(PLUGIN_PATH));
    fake->late = true;
    CHECK_INT(fake->device_diff(FAKE_LATE), 0);
    fake->backend_free(fake->backend_new(FAKE_CPU));
    CHECK_INT(fake->device_diff(FAKE_LATE), 1u << 5);
    fake->backend_free(fake->backend_new(FAKE_LATE));
}

static void names_go_both_ways_and_end_with_null(void) {
    CHECK_INT(ggml_async_abi_version(), GGML_ASYNC_ABI_VERSION);
    CHECK(*ggml_async_version());
    for (int i = 0; i < 3; i++) {
        CHECK_INT(ggml_async_mode_parse(ggml_async_mode_name(i)), i);
    }
    CHECK_TEXT(ggml_async_mode_name(GGML_ASYNC_MODE_STOCK), "stock");
    CHECK(!ggml_async_mode_name(3) && !ggml_async_mode_name(-1));
    CHECK_INT(ggml_async_mode_parse("Async"), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(ggml_async_mode_parse(NULL), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_TEXT(ggml_async_path_name(GGML_ASYNC_PATH_STOCK), "stock");
    CHECK_TEXT(ggml_async_path_name(GGML_ASYNC_PATH_EMPTY), "empty");
    CHECK(!ggml_async_path_name(4) && !ggml_async_path_name(-1));
    CHECK_TEXT(ggml_async_record_kind_name(GGML_ASYNC_RECORD_UPLOAD), "upload");
    CHECK(!ggml_async_record_kind_name(0) && !ggml_async_record_kind_name(6));
    CHECK(!ggml_async_decline_name(0));
    CHECK_TEXT(ggml_async_decline_name(1), "no_buffer");
    int n_declines = 0, n_counters = 0, n_declined = 0;
    while (ggml_async_decline_name(n_declines + 1)) {
        n_declines++;
    }
    for (; ggml_async_counter_name(n_counters); n_counters++) {
        const char * name = ggml_async_counter_name(n_counters);
        if (!strncmp(name, "declined_", 9)) {
            CHECK_TEXT(ggml_async_decline_name(++n_declined), name + 9);
        }
    }
    CHECK_INT(n_declined, n_declines);
    CHECK_TEXT(ggml_async_counter_name(0), "readbacks");
    CHECK(!ggml_async_counter_name(-1));
    CHECK_INT(ggml_async_counters(0, NULL, 0), GGML_ASYNC_ERR_ARGUMENT);
    world_log_capture();
    world_fake("api2", 0);
    CHECK_INT(ggml_async_attach(NULL), 0);
    CHECK_INT(ggml_async_counters(0, NULL, 0), n_counters);
}

static void unknown_hosts_and_modes_are_errors(void) {
    CHECK_INT(ggml_async_detach(0), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(ggml_async_set_mode(0, GGML_ASYNC_MODE_OFF), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(ggml_async_set_mode(-1, 3), GGML_ASYNC_ERR_ARGUMENT);
    CHECK(strstr(ggml_async_last_error(), "mode 3"));
    CHECK_INT(ggml_async_get_mode(-1), GGML_ASYNC_ERR_ARGUMENT);
    CHECK_INT(ggml_async_counters_reset(5), GGML_ASYNC_ERR_ARGUMENT);
    CHECK(!ggml_async_queue_new(0));
    CHECK_INT(ggml_async_host_get(0, NULL, 0), GGML_ASYNC_ERR_ARGUMENT);
}

static const struct test tests[] = {
    TEST(api_2_is_attached),
    TEST(api_3_is_attached),
    TEST(a_build_with_names_of_128_bytes_is_attached),
    TEST(a_host_without_the_optional_functions_is_attached),
    TEST(an_unknown_api_version_is_refused),
    TEST(the_layout_without_2d_copies_is_refused),
    TEST(a_backend_with_one_more_slot_is_refused),
    TEST(another_null_pattern_is_refused),
    TEST(a_shifted_device_structure_is_refused),
    TEST(a_shifted_tensor_structure_is_refused),
    TEST(a_host_that_lacks_a_function_is_refused_by_its_name),
    TEST(a_host_without_a_cpu_device_is_refused),
    TEST(a_host_with_a_log_gets_our_lines),
    TEST(attaching_again_gives_the_same_host),
    TEST(a_second_copy_finds_the_host_occupied),
    TEST(the_host_is_the_library_that_called_not_the_global_one),
    TEST(two_hosts_have_their_own_modes_and_counters),
    TEST(attaching_to_nothing_says_what_to_do),
    TEST(attaching_without_a_name_takes_the_only_host),
    TEST(attaching_without_a_name_lists_several_hosts),
    TEST(hosts_are_found_as_they_come_and_go),
    TEST(a_refused_host_does_not_use_up_a_place),
    TEST(the_environment_sets_the_first_mode),
    TEST(a_bad_mode_in_the_environment_means_off_and_is_said),
    TEST(a_device_that_registers_late_is_taken_in_with_the_next_cpu_backend),
    TEST(names_go_both_ways_and_end_with_null),
    TEST(unknown_hosts_and_modes_are_errors),
};

TEST_MAIN(tests)
