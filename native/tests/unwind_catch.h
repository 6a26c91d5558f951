#pragma once

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_backend;

// Stands in for a device that fails (struct fake's before_get, before_synchronize).
void unwind_throw(struct ggml_backend * backend);

// Whether an exception came out of run(user_data); it is caught.
bool unwind_catches(void (*run)(void * user_data), void * user_data);

#ifdef __cplusplus
}
#endif
