# How everything native is compiled: for the root, and for tests/vulkan on its own.

include_guard(GLOBAL)

set(GGML_ASYNC_SANITIZE "" CACHE STRING "Sanitizers, as for -fsanitize= (address,undefined or thread)")

if (NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE RelWithDebInfo)
endif()

set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

# -fexceptions: Vulkan throws C++ exceptions through our frames.
add_compile_options(-Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -fexceptions)
if (GGML_ASYNC_WERROR)
    add_compile_options(-Werror)
endif()
if (GGML_ASYNC_SANITIZE)
    add_compile_options(-fsanitize=${GGML_ASYNC_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
    add_link_options(-fsanitize=${GGML_ASYNC_SANITIZE})
endif()
