// A C++ exception, thrown and caught around C code.

#include "unwind_catch.h"

void unwind_throw(struct ggml_backend *) {
    throw 42;
}

bool unwind_catches(void (*run)(void * user_data), void * user_data) {
    try {
        run(user_data);
    } catch (int) {
        return true;
    }
    return false;
}
