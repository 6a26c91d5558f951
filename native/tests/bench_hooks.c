// What measuring costs: one CPU split with two readbacks on the fake host, whose devices take no time, in mode stock with
// records on, against mode off. The difference is ours. Prints medians of interleaved rounds; asserts nothing.

#include "world.h"

#include <time.h>

enum { ROUNDS = 15, SPLITS = 20000 };

static double bench_now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return 1e9*(double) ts.tv_sec + (double) ts.tv_nsec;
}

static double bench_splits(struct world * w, int mode) {
    static struct ggml_async_record sink[4096];
    ggml_async_set_mode(w->host, mode);
    double spent = 0;
    for (int i = 0; i < SPLITS; i++) {
        const double t0 = bench_now_ns();
        world_input(w, 0, 0);
        world_input(w, 0, 1);
        world_compute(w);
        spent += bench_now_ns() - t0;
        if (i % 1000 == 999) {
            while (ggml_async_record_read(sink, 4096) > 0) {
            }
        }
    }
    return spent/SPLITS;
}

static int bench_order(const void * a, const void * b) {
    const double x = *(const double *) a, y = *(const double *) b;
    return (x > y) - (x < y);
}

int main(void) {
    static const int mode[] = { GGML_ASYNC_MODE_OFF, GGML_ASYNC_MODE_STOCK, GGML_ASYNC_MODE_ASYNC };
    double ns[3][ROUNDS];
    struct world w;
    world_open(&w, 1, FAKE_GPU0);
    ggml_async_record_start(1 << 16);
    bench_splits(&w, GGML_ASYNC_MODE_STOCK);
    for (int r = 0; r < ROUNDS; r++) {
        for (int k = 0; k < 3; k++) {
            const int m = (k + r) % 3;
            ns[m][r] = bench_splits(&w, mode[m]);
        }
    }
    for (int m = 0; m < 3; m++) {
        qsort(ns[m], ROUNDS, sizeof(double), bench_order);
        printf("%-5s %8.0f ns a split with two readbacks (min %.0f, max %.0f, %d rounds of %d)\n", ggml_async_mode_name(mode[m]),
               ns[m][ROUNDS/2], ns[m][0], ns[m][ROUNDS - 1], ROUNDS, SPLITS);
    }
    printf("hooks and records in stock: %+.0f ns a split\n", ns[1][ROUNDS/2] - ns[0][ROUNDS/2]);
    ggml_async_record_stop();
    world_close(&w);
    return 0;
}
