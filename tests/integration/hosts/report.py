"""What the scripts here share: run with a ggml of their own, they print one JSON object as their last line."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")


def emit(**what: Any) -> None:
    """Prints the result; nothing may be printed after it."""
    print(json.dumps(what, default=str), flush=True)


class Ggml:
    """A ggml library's public functions, enough for a graph of one addition on its CPU."""

    CDEF = """
    struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };
    void * ggml_init(struct ggml_init_params params);
    void   ggml_free(void * ctx);
    size_t ggml_tensor_overhead(void);
    size_t ggml_graph_overhead(void);
    void * ggml_new_tensor_1d(void * ctx, int type, int64_t ne0);
    void * ggml_add(void * ctx, void * a, void * b);
    void * ggml_new_graph(void * ctx);
    void   ggml_build_forward_expand(void * graph, void * tensor);
    size_t ggml_backend_dev_count(void);
    void * ggml_backend_dev_get(size_t index);
    int    ggml_backend_dev_type(void * dev);
    void * ggml_backend_dev_init(void * dev, const char * params);
    void   ggml_backend_free(void * backend);
    int    ggml_backend_graph_compute(void * backend, void * graph);
    void * ggml_backend_alloc_ctx_tensors(void * ctx, void * backend);
    void   ggml_backend_buffer_free(void * buffer);
    void   ggml_backend_tensor_set(void * tensor, const void * data, size_t offset, size_t size);
    void   ggml_backend_tensor_get(const void * tensor, void * data, size_t offset, size_t size);
    void * ggml_backend_load(const char * path);
    void   ggml_backend_load_all_from_path(const char * path);
    size_t ggml_backend_reg_count(void);
    void * ggml_backend_reg_get(size_t index);
    const char * ggml_backend_reg_name(void * reg);
    """

    def __init__(self, library: str) -> None:
        from cffi import FFI

        self.ffi: Any = FFI()
        self.ffi.cdef(self.CDEF)
        self.lib: Any = self.ffi.dlopen(library, self.ffi.RTLD_NOW | self.ffi.RTLD_LOCAL)

    def registries(self) -> list[str]:
        lib = self.lib
        names = (lib.ggml_backend_reg_name(lib.ggml_backend_reg_get(i)) for i in range(lib.ggml_backend_reg_count()))
        return [self.ffi.string(name).decode() for name in names]

    @contextlib.contextmanager
    def cpu(self) -> Iterator[Any]:
        """A backend of the CPU device, made the way the scheduler's is."""
        lib = self.lib
        devices = [lib.ggml_backend_dev_get(i) for i in range(lib.ggml_backend_dev_count())]
        backend = lib.ggml_backend_dev_init(
            next(d for d in devices if lib.ggml_backend_dev_type(d) == 0), self.ffi.NULL
        )
        assert backend != self.ffi.NULL
        yield backend
        lib.ggml_backend_free(backend)

    def add(self, backend: Any) -> bool:
        """Computes a sum of two random vectors on `backend`; whether it is right."""
        lib, ffi = self.lib, self.ffi
        size = 8 * lib.ggml_tensor_overhead() + lib.ggml_graph_overhead()
        ctx = lib.ggml_init({"mem_size": size, "mem_buffer": ffi.NULL, "no_alloc": True})
        n = 1000
        a, b = lib.ggml_new_tensor_1d(ctx, 0, n), lib.ggml_new_tensor_1d(ctx, 0, n)
        total = lib.ggml_add(ctx, a, b)
        graph = lib.ggml_new_graph(ctx)
        lib.ggml_build_forward_expand(graph, total)
        buffer = lib.ggml_backend_alloc_ctx_tensors(ctx, backend)
        x, y = np.random.default_rng(3).standard_normal((2, n), np.float32)
        lib.ggml_backend_tensor_set(a, ffi.from_buffer(x), 0, x.nbytes)
        lib.ggml_backend_tensor_set(b, ffi.from_buffer(y), 0, y.nbytes)
        status = lib.ggml_backend_graph_compute(backend, graph)
        out = np.zeros(n, np.float32)
        lib.ggml_backend_tensor_get(total, ffi.from_buffer(out, require_writable=True), 0, out.nbytes)
        lib.ggml_backend_buffer_free(buffer)
        lib.ggml_free(ctx)
        return status == 0 and bool(np.array_equal(out, x + y))
