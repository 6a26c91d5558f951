// The mock device itself, in a real ggml: is it as slow, and as unforgiving, as the stress tests rely on?
// In the environment: STRESS_RUNTIME and STRESS_MOCK, paths.

#include "shared.h"
#include "test.h"

#include <stdarg.h>

struct settings settings = { .mode = "none" };
struct options  options;

enum { N = 32, ROWS = 4 };

void fail(const char * format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(1);
}

struct bench {
    ggml_backend_t        device[2];
    struct ggml_context * ctx;
    ggml_backend_buffer_t memory[2];
    ggml_backend_buffer_t host;         // pinned by device 0
    struct ggml_tensor  * x[2];         // N x ROWS floats on each device
    float                 in[N*ROWS];   // what they hold
    float                 out[N*ROWS];
};

static struct ggml_tensor * on_device(struct bench * b, int device, int slot) {
    const int64_t ne[2] = { N, ROWS };
    struct ggml_tensor * tensor = ggml.ggml_new_tensor(b->ctx, TYPE_F32, 2, ne);
    ggml.ggml_backend_tensor_alloc(b->memory[device], tensor, (char *) ggml.ggml_backend_buffer_get_base(b->memory[device]) + (size_t) slot*sizeof(b->in));
    return tensor;
}

static void bench_open(struct bench * b, const char * mock_options) {
    memset(b, 0, sizeof(*b));
    setenv("MOCK_DEVICES", "2", 1);
    setenv("MOCK_OPTIONS", mock_options, 1);
    options.runtime = getenv("STRESS_RUNTIME");
    options.mock    = getenv("STRESS_MOCK");
    load_everything();
    b->ctx = ggml.ggml_init((struct ga_init_params) { 32*ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead_custom(16, false), NULL, true });
    for (int i = 0; i < N*ROWS; i++) {
        b->in[i]  = (float) i + 1;
        b->out[i] = -1000;
    }
    for (int d = 0; d < 2; d++) {
        b->device[d] = ggml.ggml_backend_dev_init(mock_devices[d], NULL);
        b->memory[d] = ggml.ggml_backend_buft_alloc_buffer(ggml.ggml_backend_dev_buffer_type(mock_devices[d]), 4*sizeof(b->in));
        b->x[d]      = on_device(b, d, 0);
        ggml.ggml_backend_tensor_set(b->x[d], b->in, 0, sizeof(b->in));
    }
}

static bool poisoned(const void * data, size_t size) {
    for (size_t i = 0; i < size; i++) {
        if (((const uint8_t *) data)[i] != MOCK_POISON) {
            return false;
        }
    }
    return true;
}

static void get(struct bench * b) {
    ggml.ggml_backend_tensor_get_async(b->device[0], b->x[0], b->out, 0, sizeof(b->out));
}

// y = -x on a device, twice; the graph and its tensors are gone when this returns
static struct ggml_tensor * compute(struct bench * b, int device, int * status) {
    struct ggml_context * ctx = ggml.ggml_init((struct ga_init_params) { 8*ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead_custom(8, false), NULL, true });
    struct ggml_cgraph *  graph = ggml.ggml_new_graph_custom(ctx, 8, false);
    struct ggml_tensor *  first = ggml.ggml_neg(ctx, b->x[device]), * second = ggml.ggml_neg(ctx, first);
    struct ggml_tensor *  result = on_device(b, device, 1);
    char *                base  = ga_tensor(result)->data;
    ggml.ggml_backend_tensor_alloc(b->memory[device], first, base);
    ggml.ggml_backend_tensor_alloc(b->memory[device], second, base + sizeof(b->in));
    ggml.ggml_build_forward_expand(graph, second);
    *status = ggml.ggml_backend_graph_compute_async(b->device[device], graph);
    memset((void *) (uintptr_t) first, 0, 64);      // nobody may look at them any more
    memset((void *) (uintptr_t) second, 0, 64);
    ggml.ggml_free(ctx);
    return result;      // of the first
}

static void a_lazy_read_runs_when_it_is_waited_for_and_not_before(void) {
    struct bench b;
    bench_open(&b, "lazy=1");
    get(&b);
    usleep(20000);
    CHECK(poisoned(b.out, sizeof(b.out)));
    ggml.ggml_backend_synchronize(b.device[1]);
    CHECK(poisoned(b.out, sizeof(b.out)));
    ggml.ggml_backend_synchronize(b.device[0]);
    CHECK(!memcmp(b.out, b.in, sizeof(b.in)));
}

static void an_eager_read_holds_poison_until_it_runs(void) {
    struct bench b;
    bench_open(&b, "stall=1");
    get(&b);
    usleep(20000);
    CHECK(poisoned(b.out, sizeof(b.out)));
    atomic_store(&mock->options[0].stall, 0);
    ggml.ggml_backend_synchronize(b.device[0]);
    CHECK(!memcmp(b.out, b.in, sizeof(b.in)));
}

static void its_memory_is_not_host_memory_and_its_pinned_memory_is(void) {
    struct bench b;
    bench_open(&b, "lazy=1");
    CHECK(!ggml.ggml_backend_buffer_is_host(b.memory[0]));
    ggml_backend_buffer_type_t type = ggml.ggml_backend_dev_host_buffer_type(mock_devices[1]);
    ggml_backend_buffer_t pinned = ggml.ggml_backend_buft_alloc_buffer(type, 100);
    CHECK(ggml.ggml_backend_buffer_is_host(pinned) && ggml.ggml_backend_buffer_get_type(pinned) == type);
    CHECK(type != ggml.ggml_backend_dev_host_buffer_type(mock_devices[0]));
    atomic_store(&mock->options[1].pinned_falls_back, 1);
    CHECK(ggml.ggml_backend_buffer_get_type(ggml.ggml_backend_buft_alloc_buffer(type, 100)) == ggml.ggml_backend_dev_buffer_type(cpu_device));
    atomic_store(&mock->options[1].pinned_of_first, 1);
    CHECK(ggml.ggml_backend_dev_host_buffer_type(mock_devices[1]) == ggml.ggml_backend_dev_host_buffer_type(mock_devices[0]));
    atomic_store(&mock->options[1].no_pinned, 1);
    CHECK(!ggml.ggml_backend_dev_host_buffer_type(mock_devices[1]));
}

static void operations_run_in_order_and_a_graph_as_it_was_when_queued(void) {
    struct bench b;
    bench_open(&b, "lazy=1");
    float tens[N*ROWS], before[N*ROWS];
    for (int i = 0; i < N*ROWS; i++) {
        tens[i] = 10;
    }
    int status;
    ggml.ggml_backend_tensor_get_async(b.device[0], b.x[0], before, 0, sizeof(before));
    ggml.ggml_backend_tensor_set_async(b.device[0], b.x[0], tens, 0, sizeof(tens));
    struct ggml_tensor * y = compute(&b, 0, &status);
    CHECK_INT(status, STATUS_SUCCESS);
    ggml.ggml_backend_tensor_get_async(b.device[0], y, b.out, 0, sizeof(b.out));
    ggml.ggml_backend_synchronize(b.device[0]);
    CHECK(!memcmp(before, b.in, sizeof(before)));
    for (int i = 0; i < N*ROWS; i++) {
        CHECK(b.out[i] == -10);
    }
}

static void an_upload_reads_its_source_when_it_runs(void) {
    struct bench b;
    bench_open(&b, "lazy=1");
    float value[N*ROWS];
    memset(value, 0, sizeof(value));
    ggml.ggml_backend_tensor_set_async(b.device[0], b.x[0], value, 0, sizeof(value));
    value[5] = 55;
    ggml.ggml_backend_synchronize(b.device[0]);
    ggml.ggml_backend_tensor_get(b.x[0], b.out, 0, sizeof(b.out));
    CHECK(b.out[5] == 55);
}

static void rows_are_copied_by_2d_copies(void) {
    struct bench b;
    bench_open(&b, "lazy=1");
    const size_t row = N*sizeof(float), half = row/2;
    ggml.ggml_backend_tensor_get_2d_async(b.device[0], b.x[0], b.out, half, half, ROWS, row, half);
    CHECK(poisoned(b.out, ROWS*half));
    ggml.ggml_backend_synchronize(b.device[0]);
    for (int r = 0; r < ROWS; r++) {
        CHECK(!memcmp(b.out + r*N/2, b.in + r*N + N/2, half));
    }
    CHECK(b.out[ROWS*N/2] == -1000);
    ggml.ggml_backend_tensor_set_2d_async(b.device[0], b.x[0], b.in, 0, half, ROWS, row, row);
    ggml.ggml_backend_synchronize(b.device[0]);
    ggml.ggml_backend_tensor_get(b.x[0], b.out, 0, sizeof(b.out));
    CHECK(!memcmp(b.out, b.in, sizeof(b.in)));
}

static void events_order_two_devices(void) {
    struct bench b;
    bench_open(&b, "lazy=1");
    struct ggml_backend_event * event = ggml.ggml_backend_event_new(mock_devices[0]);
    float other[N*ROWS];
    get(&b);
    ggml.ggml_backend_event_record(event, b.device[0]);
    ggml.ggml_backend_tensor_get_async(b.device[0], b.x[0], other, 0, sizeof(other));
    ggml.ggml_backend_event_wait(b.device[1], event);
    CHECK(poisoned(b.out, sizeof(b.out)));
    ggml.ggml_backend_synchronize(b.device[1]);
    CHECK(!memcmp(b.out, b.in, sizeof(b.in)));
    CHECK(poisoned(other, sizeof(other)));      // behind the event
    ggml.ggml_backend_event_record(event, b.device[0]);
    ggml.ggml_backend_event_synchronize(event);
    CHECK(!memcmp(other, b.in, sizeof(other)));
    ggml.ggml_backend_event_free(event);
    atomic_store(&mock->options[0].no_events, 1);
    CHECK(!ggml.ggml_backend_event_new(mock_devices[0]));
}

// Device to device: behind what the source computes, and before what it computes next.
static void a_copy_between_devices_waits_for_its_source(void) {
    struct bench b;
    bench_open(&b, "lazy=1");
    int status;
    struct ggml_tensor * y = compute(&b, 0, &status);
    ggml.ggml_backend_tensor_copy_async(b.device[0], b.device[1], y, b.x[1]);
    float zeros[N*ROWS] = { 0 };
    ggml.ggml_backend_tensor_set_async(b.device[0], y, zeros, 0, sizeof(zeros));
    ggml.ggml_backend_synchronize(b.device[0]);
    ggml.ggml_backend_synchronize(b.device[1]);
    CHECK_INT(mock->counters[1].copies, 1);
    ggml.ggml_backend_tensor_get(b.x[1], b.out, 0, sizeof(b.out));
    for (int i = 0; i < N*ROWS; i++) {
        CHECK(b.out[i] == -b.in[i]);
    }
}

static void a_read_that_fails_leaves_poison_and_a_lost_device(void) {
    struct bench b;
    bench_open(&b, "lazy=1,fail_get=2");
    float other[N*ROWS];
    get(&b);
    ggml.ggml_backend_tensor_get_async(b.device[0], b.x[0], other, 0, sizeof(other));
    ggml.ggml_backend_synchronize(b.device[0]);
    CHECK(!memcmp(b.out, b.in, sizeof(b.in)));
    CHECK(poisoned(other, sizeof(other)));
    CHECK_INT(mock->counters[0].errors, 1);
    int status;
    compute(&b, 0, &status);
    CHECK_INT(status, -1);
    compute(&b, 1, &status);
    CHECK_INT(status, STATUS_SUCCESS);
}

static void a_device_is_lost_in_the_middle_of_a_graph(void) {
    struct bench b;
    bench_open(&b, "lazy=1,lose_at_node=2");
    int status;
    struct ggml_tensor * first  = compute(&b, 0, &status);
    struct ggml_tensor * second = on_device(&b, 0, 2);
    ggml.ggml_backend_synchronize(b.device[0]);
    ggml.ggml_backend_tensor_get(first, b.out, 0, sizeof(b.out));
    CHECK(b.out[3] == -b.in[3]);
    ggml.ggml_backend_tensor_get(second, b.out, 0, sizeof(b.out));
    CHECK(poisoned(b.out, sizeof(b.out)));
    CHECK_INT(mock->counters[0].nodes, 1);
    CHECK_INT(mock->counters[0].errors, 1);
}

static int n_told;

static void told(int device, const char * what) {
    n_told += device == 0 && !strcmp(what, "device lost");
}

static void who_waits_for_a_lost_device_is_told(void) {
    struct bench b;
    bench_open(&b, "lazy=1,fail_get=1,error_aborts=1");
    atomic_store(&mock->on_error, told);
    get(&b);
    ggml.ggml_backend_synchronize(b.device[0]);
    CHECK_INT(n_told, 1);
}

static void freeing_a_backend_takes_its_reads_with_it_and_is_counted(void) {
    struct bench b;
    bench_open(&b, "lazy=1");
    get(&b);
    ggml.ggml_backend_free(b.device[0]);
    CHECK(poisoned(b.out, sizeof(b.out)));
    CHECK_INT(mock->counters[0].freed_with_reads, 1);
}

static void a_read_into_freed_memory_is_counted(void) {
    struct bench b;
    bench_open(&b, "lazy=1");
    ggml_backend_buffer_t pinned = ggml.ggml_backend_buft_alloc_buffer(ggml.ggml_backend_dev_host_buffer_type(mock_devices[0]), sizeof(b.in));
    float * memory = ggml.ggml_backend_buffer_get_base(pinned);
    ggml.ggml_backend_tensor_get_async(b.device[0], b.x[0], memory, 0, sizeof(b.in));
    ggml.ggml_backend_buffer_free(pinned);
    CHECK(((uint8_t *) memory)[0] == MOCK_FREED);
    ggml.ggml_backend_synchronize(b.device[0]);
    CHECK_INT(mock->counters[0].touched_freed, 1);
}

static void a_device_without_asynchronous_reads_has_none(void) {
    struct bench b;
    bench_open(&b, "lazy=1,no_get_async=1,no_set_async=1,no_cpy_peer=1");
    get(&b);
    CHECK(!memcmp(b.out, b.in, sizeof(b.in)));
    ggml.ggml_backend_tensor_copy_async(b.device[0], b.device[1], b.x[0], b.x[1]);
    CHECK_INT(mock->counters[0].gets + mock->counters[1].copies, 0);
}

static const struct test tests[] = {
    TEST(a_lazy_read_runs_when_it_is_waited_for_and_not_before),
    TEST(an_eager_read_holds_poison_until_it_runs),
    TEST(its_memory_is_not_host_memory_and_its_pinned_memory_is),
    TEST(operations_run_in_order_and_a_graph_as_it_was_when_queued),
    TEST(an_upload_reads_its_source_when_it_runs),
    TEST(rows_are_copied_by_2d_copies),
    TEST(events_order_two_devices),
    TEST(a_copy_between_devices_waits_for_its_source),
    TEST(a_read_that_fails_leaves_poison_and_a_lost_device),
    TEST(a_device_is_lost_in_the_middle_of_a_graph),
    TEST(who_waits_for_a_lost_device_is_told),
    TEST(freeing_a_backend_takes_its_reads_with_it_and_is_counted),
    TEST(a_read_into_freed_memory_is_counted),
    TEST(a_device_without_asynchronous_reads_has_none),
};

TEST_MAIN(tests)
