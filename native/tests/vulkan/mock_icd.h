// A Vulkan driver for tests: no device, every command a no-op, but fences that are late on demand and calls that fail
// on demand. The test opens the same library as the loader and sets it up through mock_config().
#pragma once

#ifndef VK_NO_PROTOTYPES
#    define VK_NO_PROTOTYPES
#endif
#include <vulkan/vulkan.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    MOCK_MAX_DEVICES = 2,
    MOCK_N_FAMILIES  = 2,
    MOCK_N_QUEUES    = 8,   // of family 0; family 1 has two
};

struct mock_config {
    uint32_t n_devices;         // physical devices, 1 unless told
    bool     hide_submit2;      // a Vulkan 1.2 driver without VK_KHR_synchronization2
    bool     unified;           // one memory type, device-local and host-visible; else three: device, host, both
    uint32_t polls_not_ready;   // polls that find a fence not ready after each submit; waiting makes it ready at once
    uint32_t delay_us;          // how long a wait takes
    // The next `fail_count` calls of this function return `fail_result` and do nothing else.
    const char * fail_function;
    VkResult     fail_result;
    atomic_int   fail_count;
};

typedef struct mock_config * (*mock_config_t)(void);
typedef uint64_t (*mock_calls_t)(const char * function);   // calls of it that reached the driver; ~0: it counts none

struct mock_config * mock_config(void);
uint64_t             mock_calls(const char * function);
