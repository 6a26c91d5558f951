// The part of ggml's public API that the stress driver uses, resolved from the runtime under test.
#pragma once

#include "host_abi.h"

typedef struct ggml_backend_sched * ggml_backend_sched_t;
typedef struct ggml_gallocr *       ggml_gallocr_t;
typedef bool (*sched_eval_callback)(struct ggml_tensor * tensor, bool ask, void * user_data);

enum { TYPE_F32 = 0, TYPE_I32 = 26, USAGE_WEIGHTS = 1, USAGE_COMPUTE = 2, DEVICE_CPU = 0, STATUS_SUCCESS = 0, STATUS_ABORTED = 1 };

#define T  struct ggml_tensor *
#define CT const struct ggml_tensor *
#define C  struct ggml_context *
#define GGML_API(X)                                                                                              \
    X(size_t, ggml_backend_dev_count, (void))                                                                    \
    X(ggml_backend_dev_t, ggml_backend_dev_get, (size_t index))                                                  \
    X(ggml_backend_dev_t, ggml_backend_dev_by_name, (const char * name))                                         \
    X(int, ggml_backend_dev_type, (ggml_backend_dev_t dev))                                                      \
    X(ggml_backend_reg_t, ggml_backend_dev_backend_reg, (ggml_backend_dev_t dev))                                \
    X(ggml_backend_t, ggml_backend_dev_init, (ggml_backend_dev_t dev, const char * params))                      \
    X(ggml_backend_buffer_type_t, ggml_backend_dev_buffer_type, (ggml_backend_dev_t dev))                        \
    X(ggml_backend_buffer_type_t, ggml_backend_dev_host_buffer_type, (ggml_backend_dev_t dev))                   \
    X(void *, ggml_backend_reg_get_proc_address, (ggml_backend_reg_t reg, const char * name))                    \
    X(void, ggml_backend_register, (ggml_backend_reg_t reg))                                                     \
    X(ggml_backend_reg_t, ggml_backend_load, (const char * path))                                                \
    X(void, ggml_backend_load_all, (void))                                                                       \
    X(void, ggml_backend_free, (ggml_backend_t backend))                                                         \
    X(void, ggml_backend_synchronize, (ggml_backend_t backend))                                                  \
    X(int, ggml_backend_graph_compute, (ggml_backend_t backend, struct ggml_cgraph * graph))                     \
    X(void *, ggml_backend_graph_plan_create, (ggml_backend_t backend, struct ggml_cgraph * graph))              \
    X(int, ggml_backend_graph_plan_compute, (ggml_backend_t backend, void * plan))                               \
    X(void, ggml_backend_graph_plan_free, (ggml_backend_t backend, void * plan))                                 \
    X(void, ggml_backend_tensor_set, (T tensor, const void * data, size_t offset, size_t size))                  \
    X(void, ggml_backend_tensor_set_async, (ggml_backend_t backend, T tensor, const void * data, size_t offset, size_t size)) \
    X(void, ggml_backend_tensor_get, (CT tensor, void * data, size_t offset, size_t size))                       \
    X(void, ggml_backend_tensor_get_async, (ggml_backend_t backend, CT tensor, void * data, size_t offset, size_t size)) \
    X(void, ggml_backend_tensor_copy_async, (ggml_backend_t from, ggml_backend_t to, CT src, T dst))             \
    X(void, ggml_backend_tensor_set_2d_async, (ggml_backend_t backend, T tensor, const void * data, size_t offset, size_t size, size_t n, size_t stride_tensor, size_t stride_data)) \
    X(void, ggml_backend_tensor_get_2d_async, (ggml_backend_t backend, CT tensor, void * data, size_t offset, size_t size, size_t n, size_t stride_tensor, size_t stride_data)) \
    X(struct ggml_backend_event *, ggml_backend_event_new, (ggml_backend_dev_t dev))                             \
    X(void, ggml_backend_event_free, (struct ggml_backend_event * event))                                        \
    X(void, ggml_backend_event_record, (struct ggml_backend_event * event, ggml_backend_t backend))              \
    X(void, ggml_backend_event_synchronize, (struct ggml_backend_event * event))                                 \
    X(void, ggml_backend_event_wait, (ggml_backend_t backend, struct ggml_backend_event * event))                \
    X(int, ggml_backend_graph_compute_async, (ggml_backend_t backend, struct ggml_cgraph * graph))               \
    X(ggml_backend_buffer_type_t, ggml_backend_buffer_get_type, (ggml_backend_buffer_t buffer))                  \
    X(bool, ggml_backend_buffer_is_host, (ggml_backend_buffer_t buffer))                                         \
    X(int, ggml_backend_tensor_alloc, (ggml_backend_buffer_t buffer, T tensor, void * address))                  \
    X(ggml_backend_buffer_t, ggml_backend_alloc_ctx_tensors_from_buft, (C ctx, ggml_backend_buffer_type_t buft)) \
    X(ggml_backend_buffer_t, ggml_backend_buft_alloc_buffer, (ggml_backend_buffer_type_t buft, size_t size))     \
    X(ggml_backend_buffer_t, ggml_backend_cpu_buffer_from_ptr, (void * data, size_t size))                       \
    X(void *, ggml_backend_buffer_get_base, (ggml_backend_buffer_t buffer))                                      \
    X(void, ggml_backend_buffer_set_usage, (ggml_backend_buffer_t buffer, int usage))                            \
    X(void, ggml_backend_buffer_free, (ggml_backend_buffer_t buffer))                                            \
    X(ggml_backend_sched_t, ggml_backend_sched_new, (ggml_backend_t * backends, ggml_backend_buffer_type_t * bufts, int n, size_t graph_size, bool parallel, bool op_offload)) \
    X(void, ggml_backend_sched_free, (ggml_backend_sched_t sched))                                               \
    X(void, ggml_backend_sched_reset, (ggml_backend_sched_t sched))                                              \
    X(bool, ggml_backend_sched_reserve, (ggml_backend_sched_t sched, struct ggml_cgraph * measure_graph))        \
    X(bool, ggml_backend_sched_alloc_graph, (ggml_backend_sched_t sched, struct ggml_cgraph * graph))            \
    X(int, ggml_backend_sched_graph_compute_async, (ggml_backend_sched_t sched, struct ggml_cgraph * graph))     \
    X(void, ggml_backend_sched_synchronize, (ggml_backend_sched_t sched))                                        \
    X(int, ggml_backend_sched_get_n_splits, (ggml_backend_sched_t sched))                                        \
    X(void, ggml_backend_sched_set_tensor_backend, (ggml_backend_sched_t sched, T node, ggml_backend_t backend)) \
    X(ggml_backend_t, ggml_backend_sched_get_tensor_backend, (ggml_backend_sched_t sched, T node))               \
    X(void, ggml_backend_sched_set_eval_callback, (ggml_backend_sched_t sched, sched_eval_callback callback, void * user_data)) \
    X(C, ggml_init, (struct ga_init_params params))                                                              \
    X(void, ggml_free, (C ctx))                                                                                  \
    X(size_t, ggml_tensor_overhead, (void))                                                                      \
    X(size_t, ggml_graph_overhead_custom, (size_t size, bool grads))                                             \
    X(struct ggml_cgraph *, ggml_new_graph_custom, (C ctx, size_t size, bool grads))                             \
    X(void, ggml_build_forward_expand, (struct ggml_cgraph * graph, T tensor))                                   \
    X(size_t, ggml_nbytes, (CT tensor))                                                                          \
    X(T, ggml_set_name, (T tensor, const char * name))                                                           \
    X(const char *, ggml_get_name, (CT tensor))                                                                  \
    X(void, ggml_set_input, (T tensor))                                                                          \
    X(void, ggml_set_output, (T tensor))                                                                         \
    X(void, ggml_log_set, (void (*callback)(int level, const char * text, void * user_data), void * user_data))  \
    X(T, ggml_new_tensor, (C ctx, int type, int n_dims, const int64_t * ne))                                     \
    X(T, ggml_add, (C ctx, T a, T b))                                                                            \
    X(T, ggml_sub, (C ctx, T a, T b))                                                                            \
    X(T, ggml_mul, (C ctx, T a, T b))                                                                            \
    X(T, ggml_neg, (C ctx, T a))                                                                                 \
    X(T, ggml_abs, (C ctx, T a))                                                                                 \
    X(T, ggml_relu, (C ctx, T a))                                                                                \
    X(T, ggml_tanh, (C ctx, T a))                                                                                \
    X(T, ggml_silu, (C ctx, T a))                                                                                \
    X(T, ggml_scale, (C ctx, T a, float scale))                                                                  \
    X(T, ggml_cont, (C ctx, T a))                                                                                \
    X(T, ggml_transpose, (C ctx, T a))                                                                           \
    X(T, ggml_concat, (C ctx, T a, T b, int dim))                                                                \
    X(T, ggml_sum_rows, (C ctx, T a))                                                                            \
    X(T, ggml_soft_max, (C ctx, T a))                                                                            \
    X(T, ggml_argsort, (C ctx, T a, int order))                                                                  \
    X(T, ggml_mul_mat, (C ctx, T a, T b))                                                                        \
    X(T, ggml_mul_mat_id, (C ctx, T experts, T b, T ids))                                                        \
    X(T, ggml_reshape_2d, (C ctx, T a, int64_t ne0, int64_t ne1))                                                \
    X(T, ggml_reshape_3d, (C ctx, T a, int64_t ne0, int64_t ne1, int64_t ne2))                                   \
    X(T, ggml_view_2d, (C ctx, T a, int64_t ne0, int64_t ne1, size_t nb1, size_t offset))

struct ggml_api {
#define X(ret, name, args) ret (*name) args;
    GGML_API(X)
#undef X
};
#undef T
#undef CT
#undef C

extern struct ggml_api ggml;
