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
    """A ggml thread pool with ggml's own defaults.

    Args:
        library: the llama.cpp that it belongs to.
        n_threads: its threads.

    Raises:
        GgmlAsyncError: ggml could not make it.
    """

    def __init__(self, library: LlamaLibrary, n_threads: int) -> None:
        ffi, lib = library.ffi, library.lib
        new, self._free = self._functions(library)
        params = ffi.new("char[]", PARAMS_BYTES)
        lib.ggml_threadpool_params_init(params, n_threads)
        self.ptr: Any = new(params)
        if self.ptr == ffi.NULL:
            raise GgmlAsyncError(f"ggml could not start {n_threads} CPU threads", "use fewer threads")

    @staticmethod
    def available(library: LlamaLibrary) -> bool:
        """Whether this build has thread pools to attach."""
        names = ("ggml_threadpool_params_init", "llama_attach_threadpool", "ggml_backend_reg_get_proc_address")
        if not all(hasattr(library.lib, name) for name in names):
            return False
        return all(function != library.ffi.NULL for function in ThreadPool._functions(library))

    @staticmethod
    def _functions(library: LlamaLibrary) -> tuple[Any, Any]:
        ffi, lib = library.ffi, library.lib
        for device in library.devices():
            if device.type == "cpu":
                reg = lib.ggml_backend_dev_backend_reg(ffi.cast("void *", device.ptr))
                new = lib.ggml_backend_reg_get_proc_address(reg, b"ggml_threadpool_new")
                free = lib.ggml_backend_reg_get_proc_address(reg, b"ggml_threadpool_free")
                return ffi.cast("void * (*)(void *)", new), ffi.cast("void (*)(void *)", free)
        return ffi.NULL, ffi.NULL

    def close(self) -> None:
        """End the threads. The context it was attached to must be gone."""
        if self.ptr is not None:
            self._free(self.ptr)
            self.ptr = None
