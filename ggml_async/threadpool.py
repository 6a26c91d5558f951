"""CPU threads that stay between graphs, as llama-bench and llama-server have them.

Without one, a ggml built without OpenMP starts and ends its threads for every CPU split: a MoE with its experts on the
CPU would be timed with 48 thread creations per thread and token that no program of llama.cpp's own has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import GgmlAsyncError

if TYPE_CHECKING:
    from .llama import LlamaLibrary

#: Room for struct ggml_threadpool_params (a mask of 512 bytes and a few words), which only ggml itself fills and reads.
PARAMS_BYTES = 4096


class ThreadPool:
    """A ggml thread pool with ggml's own defaults. Made by :meth:`create`."""

    def __init__(self, ptr: Any, free: Any) -> None:
        self.ptr: Any = ptr
        self._free = free

    @classmethod
    def create(cls, library: LlamaLibrary, n_threads: int) -> ThreadPool | None:
        """A pool of `n_threads` threads of this llama.cpp; None where the build has no pools to attach.

        Raises:
            GgmlAsyncError: ggml could not make it.
        """
        ffi, lib = library.ffi, library.lib
        needed = ("ggml_threadpool_params_init", "llama_attach_threadpool", "ggml_backend_reg_get_proc_address")
        cpu = next((device for device in library.devices() if device.type == "cpu"), None)
        if cpu is None or not all(hasattr(lib, name) for name in needed):
            return None
        reg = lib.ggml_backend_dev_backend_reg(ffi.cast("void *", cpu.ptr))
        new = ffi.cast("void * (*)(void *)", lib.ggml_backend_reg_get_proc_address(reg, b"ggml_threadpool_new"))
        free = ffi.cast("void (*)(void *)", lib.ggml_backend_reg_get_proc_address(reg, b"ggml_threadpool_free"))
        if ffi.NULL in (new, free):
            return None
        params = ffi.new("char[]", PARAMS_BYTES)
        lib.ggml_threadpool_params_init(params, n_threads)
        ptr = new(params)
        if ptr == ffi.NULL:
            raise GgmlAsyncError(f"ggml could not start {n_threads} CPU threads", "use fewer threads")
        return cls(ptr, free)

    def close(self) -> None:
        """End the threads. The context it was attached to must be gone."""
        if self.ptr is not None:
            self._free(self.ptr)
            self.ptr = None
