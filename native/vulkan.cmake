# VK_LAYER_GGML_ASYNC_waits, where the Vulkan headers are. Included by the root, or by tests/vulkan on its own.
# Sets GGML_ASYNC_VULKAN_LAYER to ON or OFF. Links no Vulkan library: the loader comes to the layer.

include_guard(GLOBAL)

find_path(GGML_ASYNC_VULKAN_INCLUDE vulkan/vk_layer.h)
find_package(Threads REQUIRED)

if (NOT GGML_ASYNC_VULKAN_INCLUDE)
    set(GGML_ASYNC_VULKAN_LAYER OFF)
    message(STATUS "ggml-async: no Vulkan headers (libvulkan-dev): built without VK_LAYER_GGML_ASYNC_waits")
    return()
endif()
set(GGML_ASYNC_VULKAN_LAYER ON)

add_library(VkLayer_ggml_async_waits SHARED
    ${CMAKE_CURRENT_LIST_DIR}/capture.c
    ${CMAKE_CURRENT_LIST_DIR}/ring.c
    ${CMAKE_CURRENT_LIST_DIR}/vulkan_capture.c
    ${CMAKE_CURRENT_LIST_DIR}/vulkan_counters.c
    ${CMAKE_CURRENT_LIST_DIR}/vulkan_hooks.c
    ${CMAKE_CURRENT_LIST_DIR}/vulkan_layer.c
    ${CMAKE_CURRENT_LIST_DIR}/vulkan_table.c)
target_include_directories(VkLayer_ggml_async_waits PRIVATE ${CMAKE_CURRENT_LIST_DIR})
target_include_directories(VkLayer_ggml_async_waits SYSTEM PRIVATE ${GGML_ASYNC_VULKAN_INCLUDE})
target_compile_definitions(VkLayer_ggml_async_waits PRIVATE GGML_ASYNC_VERSION="${PROJECT_VERSION}")
target_link_libraries(VkLayer_ggml_async_waits PRIVATE ${CMAKE_DL_LIBS} Threads::Threads)
# nodelete: the loader closes layers with the last instance; the counters must outlive it.
target_link_options(VkLayer_ggml_async_waits PRIVATE
    -Wl,-z,nodelete -Wl,--no-undefined -Wl,-Bsymbolic
    -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/vulkan_layer.map)
set_target_properties(VkLayer_ggml_async_waits PROPERTIES
    LINK_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/vulkan_layer.map)

# The manifest names the library beside it, wherever the two are.
set(GGML_ASYNC_LAYER_MANIFEST ${CMAKE_CURRENT_BINARY_DIR}/VkLayer_ggml_async_waits.json)
configure_file(${CMAKE_CURRENT_LIST_DIR}/VkLayer_ggml_async_waits.json.in ${GGML_ASYNC_LAYER_MANIFEST} @ONLY)

install(TARGETS VkLayer_ggml_async_waits LIBRARY DESTINATION ggml_async/_native)
install(FILES ${GGML_ASYNC_LAYER_MANIFEST} DESTINATION ggml_async/_native)

if (GGML_ASYNC_TESTS)
    enable_testing()
    add_subdirectory(${CMAKE_CURRENT_LIST_DIR}/tests/vulkan ${CMAKE_CURRENT_BINARY_DIR}/vulkan-tests)
endif()
