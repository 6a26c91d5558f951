# libggml-mock.so, a ggml device that is slow on purpose (mock_device.h). Included by what needs it.
include_guard(GLOBAL)

add_library(ggml-mock SHARED
    ${CMAKE_CURRENT_LIST_DIR}/mock_device.c
    ${CMAKE_CURRENT_LIST_DIR}/mock_graph.c
    ${CMAKE_CURRENT_LIST_DIR}/mock_memory.c
    ${CMAKE_CURRENT_LIST_DIR}/mock_queue.c)
target_include_directories(ggml-mock PRIVATE ${CMAKE_CURRENT_LIST_DIR})
target_compile_definitions(ggml-mock PRIVATE _GNU_SOURCE)
target_link_libraries(ggml-mock PRIVATE ${CMAKE_DL_LIBS} Threads::Threads)
target_link_options(ggml-mock PRIVATE -Wl,--no-undefined -Wl,-Bsymbolic)
