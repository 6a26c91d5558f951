// What the runner, a child process, and the watcher, its parent, both see.
#pragma once

#include "stress.h"

enum { MAX_THREADS = 16, MAX_TEXT = 400, MAX_COUNTERS = 64 };

struct shared {
    _Atomic(uint64_t) evaluations;
    _Atomic(uint64_t) graphs;
    _Atomic(uint64_t) next_world;
    _Atomic(int64_t)  world[MAX_THREADS];       // that each thread is in; -1: none
    _Atomic(bool)     failed;
    uint64_t          failed_world;
    int               failed_graph;             // within its world
    char              text[MAX_TEXT];
    uint64_t          counters[MAX_COUNTERS];   // the plug-in's, at the end
    struct mock_counters mock[MAX_DEVICES];
};
extern struct shared * shared;

struct options {
    const char * runtime;       // folder of a ggml with dynamic backends
    const char * library;       // or a loaded library that holds all of ggml
    const char * mock;
    const char * plugin;
    const char * expect;        // counters that must not be 0
    uint64_t     seed;
    uint64_t     n_graphs;
    int          n_threads;
    int          seconds;       // 0: no limit
    int64_t      only;          // one world; -1: all
    bool         no_fork;
    bool         no_shrink;
    bool         never_off;     // mode switches stay between stock and async
    bool         host_faults;   // graphs that ggml gets wrong by itself are made too (settings.late_uploads)
};
extern struct options options;

// load.c
void load_everything(void);

// shrink.c
void world_make(uint64_t world, struct world_plan * plan, struct spec * specs);
int  world_run_in_child(const struct world_plan * plan, const struct spec * specs, int n, char * text, size_t size);
void shrink_and_print(uint64_t world, int graph);
