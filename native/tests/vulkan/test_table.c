// The look-ups by themselves: what takes a program months to fill up is filled up here.

#include "vulkan_layer.h"

#include "../test.h"

static struct vl_table table;

static void removed_slots_are_used_again(void) {
    static char keys[20000];
    int value;
    for (int i = 0; i < 20000; i++) {
        CHECK(vl_table_add_locked(&table, &keys[i], &value));
        CHECK(vl_table_get(&table, &keys[i]) == &value);
        vl_table_remove_locked(&table, &keys[i]);
        CHECK(!vl_table_get(&table, &keys[i]));
    }
}

static void a_full_table_refuses_and_finds_all_it_has(void) {
    static char keys[2*VL_MAX_DEVICES + 1];
    const int n = 2*VL_MAX_DEVICES;
    for (int i = 0; i < n; i++) {
        CHECK(vl_table_add_locked(&table, &keys[i], &keys[i]));
    }
    CHECK(!vl_table_add_locked(&table, &keys[n], &keys[n]));
    CHECK(!vl_table_get(&table, &keys[n]));
    vl_table_remove_locked(&table, &keys[n]);
    for (int i = 0; i < n; i += 2) {
        vl_table_remove_locked(&table, &keys[i]);
    }
    for (int i = 0; i < n; i++) {
        CHECK(vl_table_get(&table, &keys[i]) == (i % 2 ? &keys[i] : NULL));
    }
}

static void a_map_keeps_what_is_put_and_forgets_what_is_taken(void) {
    static struct vl_map map;
    vl_map_init(&map);
    enum { N = 50000 };
    for (uint64_t i = 1; i <= N; i++) {
        CHECK(vl_map_put(&map, i*64, (uintptr_t) i));
    }
    CHECK(vl_map_put(&map, 64, 777));
    CHECK_INT(vl_map_get(&map, 64), 777);
    for (uint64_t i = 2; i <= N; i += 2) {
        CHECK_INT(vl_map_take(&map, i*64), i);
        CHECK_INT(vl_map_take(&map, i*64), 0);
    }
    for (uint64_t i = 2; i <= N; i++) {
        CHECK_INT(vl_map_get(&map, i*64), i % 2 ? i : 0);
    }
    CHECK(!vl_map_put(&map, 0, 1));
    CHECK_INT(vl_map_get(&map, 0), 0);
    CHECK_INT(vl_map_take(&map, UINT64_MAX), 0);
    vl_map_free(&map, NULL);
    CHECK_INT(vl_map_get(&map, 3*64), 0);
}

static const struct test tests[] = {
    TEST(removed_slots_are_used_again),
    TEST(a_full_table_refuses_and_finds_all_it_has),
    TEST(a_map_keeps_what_is_put_and_forgets_what_is_taken),
};

TEST_MAIN(tests)
