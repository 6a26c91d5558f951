"""The queue for applications: tensors on a real device, read back in one batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cffi import FFI

from ggml_async.errors import GgmlAsyncError
from ggml_async.llama import LlamaLibrary
from ggml_async.llama_load import find_libraries
from ggml_async.native import Host, ReadQueue

GGML = """
struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };
void * ggml_init(struct ggml_init_params params);
void   ggml_free(void * ctx);
size_t ggml_tensor_overhead(void);
void * ggml_new_tensor_2d(void * ctx, int type, int64_t ne0, int64_t ne1);
void * ggml_backend_dev_init(void * dev, const char * params);
void   ggml_backend_free(void * backend);
void * ggml_backend_alloc_ctx_tensors(void * ctx, void * backend);
void   ggml_backend_buffer_free(void * buffer);
void   ggml_backend_tensor_set(void * tensor, const void * data, size_t offset, size_t size);
"""
SHAPES = [(7, 1), (64, 33), (1024, 300), (1, 1)]


@dataclass
class Tensors:
    """Tensors of one backend and what was written into them."""

    backend: int
    tensors: list[int]
    values: list[np.ndarray[Any, Any]]
    unallocated: int


def make(llama: LlamaLibrary, device: int) -> Iterator[Tensors]:
    ffi: Any = FFI()
    ffi.cdef(GGML)
    lib: Any = ffi.dlopen(str(find_libraries(llama.dir)["libggml-base"]))

    def address(pointer: Any) -> int:
        assert pointer != ffi.NULL
        return int(ffi.cast("uintptr_t", pointer))

    def context(n: int) -> Any:
        return lib.ggml_init({"mem_size": n * lib.ggml_tensor_overhead(), "mem_buffer": ffi.NULL, "no_alloc": True})

    backend = lib.ggml_backend_dev_init(ffi.cast("void *", device), ffi.NULL)
    ctx, other = context(len(SHAPES)), context(1)
    tensors = [lib.ggml_new_tensor_2d(ctx, 0, *shape) for shape in SHAPES]
    buffer = lib.ggml_backend_alloc_ctx_tensors(ctx, backend)
    rng = np.random.default_rng(1)
    values = [rng.standard_normal(n * m, np.float32) for n, m in SHAPES]
    for tensor, value in zip(tensors, values, strict=True):
        lib.ggml_backend_tensor_set(tensor, ffi.from_buffer(value), 0, value.nbytes)
    yield Tensors(
        address(backend), [address(t) for t in tensors], values, address(lib.ggml_new_tensor_2d(other, 0, 4, 4))
    )
    # The backend first: reads that are still queued on it need the memory until then.
    lib.ggml_backend_free(backend)
    lib.ggml_backend_buffer_free(buffer)
    lib.ggml_free(ctx)
    lib.ggml_free(other)


@pytest.fixture
def on_gpu(host: Host, llama: LlamaLibrary) -> Iterator[Tensors]:
    yield from make(llama, next(device.ptr for device in llama.devices() if device.is_gpu))


@pytest.fixture
def on_cpu(host: Host, llama: LlamaLibrary) -> Iterator[Tensors]:
    yield from make(llama, next(device.ptr for device in llama.devices() if device.type == "cpu"))


def test_a_batch_of_reads_needs_one_wait(host: Host, on_gpu: Tensors) -> None:
    outs = [np.zeros_like(value) for value in on_gpu.values]
    host.reset_counters()
    with ReadQueue(host) as queue:
        for tensor, out in zip(on_gpu.tensors, outs, strict=True):
            assert queue.read(on_gpu.backend, tensor, out) == "bounce"
        assert queue.wait() == len(outs)
        assert queue.wait() == 0
    for value, out in zip(on_gpu.values, outs, strict=True):
        assert np.array_equal(value, out)
    counters = host.counters()
    assert counters["app_reads"] == len(outs)
    assert counters["device_synchronizes"] == 1, "one synchronize for the whole batch"
    assert counters["readbacks"] == 0, "an application's reads are not the scheduler's"


def test_any_part_of_a_tensor_can_be_read(host: Host, on_gpu: Tensors) -> None:
    value, tensor = on_gpu.values[2], on_gpu.tensors[2]
    parts = [(0, 1), (4096, 4), (12, 100_000), (value.nbytes - 5, 5)]
    outs = [bytearray(size) for _, size in parts]
    nothing = bytearray(0)
    with ReadQueue(host) as queue:
        for (offset, _), out in zip(parts, outs, strict=True):
            queue.read(on_gpu.backend, tensor, out, offset)
        assert queue.read(on_gpu.backend, tensor, nothing, value.nbytes) == "empty"
        assert queue.wait() == len(parts) + 1
    for (offset, size), out in zip(parts, outs, strict=True):
        assert bytes(out) == value.tobytes()[offset : offset + size]


def test_a_queue_can_be_used_again_and_again(host: Host, on_gpu: Tensors) -> None:
    with ReadQueue(host) as queue:
        for _ in range(20):
            outs = [np.zeros_like(value) for value in on_gpu.values]
            for tensor, out in zip(on_gpu.tensors, outs, strict=True):
                queue.read(on_gpu.backend, tensor, out)
            queue.wait()
            assert all(np.array_equal(value, out) for value, out in zip(on_gpu.values, outs, strict=True))


def test_tensors_of_two_backends_fit_into_one_batch(host: Host, on_gpu: Tensors, on_cpu: Tensors) -> None:
    """What cannot be read asynchronously is read at once; the caller need not care."""
    outs = [np.zeros_like(value) for value in (*on_gpu.values, *on_cpu.values)]
    with ReadQueue(host) as queue:
        paths = [
            queue.read(source.backend, tensor, out)
            for (source, tensor), out in zip([(s, t) for s in (on_gpu, on_cpu) for t in s.tensors], outs, strict=True)
        ]
        assert queue.wait() == len(outs)
    assert paths == ["bounce"] * len(SHAPES) + ["stock"] * len(SHAPES)
    for value, out in zip((*on_gpu.values, *on_cpu.values), outs, strict=True):
        assert np.array_equal(value, out)


def test_reads_outside_a_tensor_are_refused(host: Host, on_gpu: Tensors) -> None:
    size = on_gpu.values[0].nbytes
    with ReadQueue(host) as queue:
        for offset, length in ((0, size + 1), (size, 1), (size + 1, 0), (2**63, 4)):
            with pytest.raises(GgmlAsyncError, match="outside tensor"):
                queue.read(on_gpu.backend, on_gpu.tensors[0], bytearray(length), offset)
        with pytest.raises(GgmlAsyncError, match="not allocated"):
            queue.read(on_gpu.backend, on_gpu.unallocated, bytearray(64))
        assert queue.wait() == 0


def test_a_backend_may_go_before_the_wait(host: Host, llama: LlamaLibrary) -> None:
    made = make(llama, next(device.ptr for device in llama.devices() if device.is_gpu))
    tensors = next(made)
    out = bytearray(tensors.values[2].nbytes)
    with ReadQueue(host) as queue:
        assert queue.read(tensors.backend, tensors.tensors[2], out) == "bounce"
        next(made, None)  # frees the backend, then the tensors
        queue.wait()
    assert host.counters()["dropped_reads"] == 1
    assert not any(out), "a dropped read writes nothing"
