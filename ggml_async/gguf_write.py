"""Writes GGUF files: a tensor at a time, and under its name only when it is complete."""

from __future__ import annotations

import errno
import os
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType, GGUFValueType

from ggml_async import gguf_file
from ggml_async.errors import GgmlAsyncError, UsageError

Bytes = npt.NDArray[np.uint8]
Type = GGMLQuantizationType

FLOATS = (Type.F32, Type.F16, Type.BF16)
CHUNK = 16 << 20  #: bytes, of one read or write


class Tensor(NamedTuple):
    """One tensor to write; `data` is called once and yields its bytes in order."""

    name: str
    type: GGMLQuantizationType | int
    shape: tuple[int, ...]  # ne order
    nbytes: int
    data: Callable[[], Iterable[Bytes]]


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def kv(key: str, value: str | int | float | list[int]) -> bytes:
    """Pack one metadata record: strings, uint32, float32, arrays of int32."""
    head = _string(key)
    if isinstance(value, str):
        return head + struct.pack("<I", GGUFValueType.STRING) + _string(value)
    if isinstance(value, int):
        return head + struct.pack("<II", GGUFValueType.UINT32, value)
    if isinstance(value, float):
        return head + struct.pack("<If", GGUFValueType.FLOAT32, value)
    array = struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType.INT32, len(value))
    return head + array + struct.pack(f"<{len(value)}i", *value)


def pad(n: int, alignment: int) -> int:
    """Bytes missing from `n` to a multiple of `alignment`."""
    return -n % alignment


def check_target(dst: Path, needed: int) -> Path:
    """Resolve `dst`, and refuse what the final rename could not do or should not replace."""
    dst = Path(os.path.realpath(dst))
    if dst.is_dir() or (dst.exists() and not dst.is_file()):
        raise UsageError(f"{dst}: exists and is not a regular file", "Name a file to write the model to.")
    if not dst.parent.is_dir():
        raise UsageError(f"{dst}: its folder does not exist", f"Create it: mkdir -p {dst.parent}")
    free = shutil.disk_usage(dst.parent).free
    if free < needed:
        raise GgmlAsyncError(
            f"{dst}: the model needs {needed / 1e9:.3f} GB, the disk has {free / 1e9:.3f} GB free",
            "Free some space, name another folder, or ask for a smaller model.",
        )
    return dst


def write(
    dst: Path,
    kv: list[bytes],
    tensors: list[Tensor],
    alignment: int = gguf_file.DEFAULT_ALIGNMENT,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a GGUF file; `dst` is replaced when all of it is there, and nothing is left when it fails."""
    header = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(kv)))
    header += b"".join(kv)
    offset = 0
    for tensor in tensors:
        header += _string(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        header += struct.pack("<IQ", tensor.type, offset)
        offset += tensor.nbytes + pad(tensor.nbytes, alignment)
    header += bytes(pad(len(header), alignment))
    total = len(header) + offset
    dst = check_target(dst, total)
    temporary = dst.with_name(f".{dst.name[:200]}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb", buffering=0) as file:
            done = file.write(header)
            for tensor in tensors:
                written = 0
                for chunk in tensor.data():
                    written += write_all(file.write, np.ascontiguousarray(chunk).reshape(-1).data)
                    if progress is not None:
                        progress(done + written, total)
                if written != tensor.nbytes:
                    raise GgmlAsyncError(f"{dst}: {tensor.name} came out as {written} bytes instead of {tensor.nbytes}")
                done += written + write_all(file.write, memoryview(bytes(pad(written, alignment))))
        temporary.replace(dst)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        hint = "Free some space or name another folder." if full else "Check the folder and the disk."
        raise GgmlAsyncError(f"{dst}: cannot be written: {error.strerror or error}", hint) from None
    finally:
        temporary.unlink(missing_ok=True)


def write_all(write: Callable[[memoryview], int | None], data: memoryview) -> int:
    """Write all of `data` to an unbuffered file (the kernel takes 2 GiB a call at most)."""
    done = 0
    while done < len(data):
        done += write(data[done : done + CHUNK]) or 0
    return done
