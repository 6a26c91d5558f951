"""A look into a graph while it runs, for eval callbacks: operation, sources, and data wherever it lies."""

from __future__ import annotations

import ctypes
from typing import Any

import cffi
import numpy as np

from ggml_async.llama import LlamaLibrary

#: Offsets in struct ggml_tensor.
BUFFER, SRC, DATA = 8, 152, 248

CDEF = """
const char * ggml_op_desc(const void * tensor);
const char * ggml_get_name(const void * tensor);
size_t ggml_nbytes(const void * tensor);
bool ggml_backend_buffer_is_host(const void * buffer);
void ggml_backend_tensor_get(const void * tensor, void * data, size_t offset, size_t size);
"""


def _word(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0


class Graphs:
    """ggml's own functions on tensors given by address."""

    def __init__(self, library: LlamaLibrary) -> None:
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(CDEF)
        self.lib: Any = self.ffi.dlopen(str(library.ggml_library))

    def _pointer(self, tensor: int) -> Any:
        return self.ffi.cast("void *", tensor)

    def op(self, tensor: int) -> str:
        return str(self.ffi.string(self.lib.ggml_op_desc(self._pointer(tensor))).decode())

    def name(self, tensor: int) -> str:
        return str(self.ffi.string(self.lib.ggml_get_name(self._pointer(tensor))).decode())

    def source(self, tensor: int, i: int) -> int:
        """Address of a source, 0 without one."""
        return _word(tensor + SRC + 8 * i)

    def on_host(self, tensor: int) -> bool:
        return bool(self.lib.ggml_backend_buffer_is_host(self._pointer(_word(tensor + BUFFER))))

    def direct(self, tensor: int) -> bytes:
        """Data in CPU memory, read as imatrix and its like do: through the pointer, with nothing waited for."""
        assert self.on_host(tensor)
        return ctypes.string_at(_word(tensor + DATA), self.lib.ggml_nbytes(self._pointer(tensor)))

    def data(self, tensor: int) -> bytes:
        """Data wherever it lies, through ggml."""
        out = np.empty(self.lib.ggml_nbytes(self._pointer(tensor)), np.uint8)
        self.lib.ggml_backend_tensor_get(self._pointer(tensor), self.ffi.cast("void *", out.ctypes.data), 0, len(out))
        return out.tobytes()
