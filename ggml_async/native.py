"""The only bridge to libggml-async: attach, modes, counters, records and the read queue.

The declarations are read from the C header that is installed beside the library, so there is one source for them.
Importing this module loads nothing; the first use does, and explains what is missing.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from cffi import FFI

from .errors import ExitCode, GgmlAsyncError, UsageError
from .library import Mode as Mode  # noqa: PLC0414 -- theirs, under our name too
from .library import library_path as library_path  # noqa: PLC0414

#: Must equal GGML_ASYNC_ABI_VERSION of the library that is loaded.
ABI_VERSION = 1

_HEADER = "ggml_async.h"
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}

log = logging.getLogger("ggml_async.native")


@dataclass(frozen=True)
class HostInfo:
    """One ggml library that the plug-in is attached to."""

    id: int
    api_version: int
    version: str
    layout: str
    library: str
    mode: str
    attached: bool
    n_devices: int
    n_backends: int


def _declarations(library: Path) -> str:
    for header in (library.parent / _HEADER, Path(str(resources.files("ggml_async") / "_native" / _HEADER))):
        if header.is_file():
            text = header.read_text(encoding="utf-8")
            return text.split("// cffi: begin")[1].split("// cffi: end")[0].replace("GGML_ASYNC_API ", "")
    raise GgmlAsyncError(
        f"{_HEADER} is not beside {library}",
        "install the package (make install, or pip install .)",
        ExitCode.NOT_INSTRUMENTED,
    )


def _untyped(thing: Any) -> Any:
    """What the header declares is known at run time only."""
    return thing


class _Native:
    """The loaded library: cffi objects, names, and the log bridge."""

    def __init__(self) -> None:
        self.path = library_path()
        self.ffi = _untyped(FFI())
        self.ffi.cdef(_declarations(self.path))
        try:
            self.lib: Any = self.ffi.dlopen(str(self.path), self.ffi.RTLD_NOW | self.ffi.RTLD_LOCAL)
        except OSError as error:
            raise GgmlAsyncError(
                f"cannot load {self.path}: {error}", "rebuild the package", ExitCode.NOT_INSTRUMENTED
            ) from None
        try:
            found = self.lib.ggml_async_abi_version()
        except AttributeError:
            raise GgmlAsyncError(
                f"{self.path} is not libggml-async", "reinstall the package", ExitCode.NOT_INSTRUMENTED
            ) from None
        if found != ABI_VERSION:
            raise GgmlAsyncError(
                f"{self.path} has ABI {found}, this package needs {ABI_VERSION}",
                "reinstall the package, so that both come from one version",
                ExitCode.NOT_INSTRUMENTED,
            )
        self.counter_names = self._names(self.lib.ggml_async_counter_name, 0)
        self.decline_names = self._names(self.lib.ggml_async_decline_name, 1)
        self.record_dtype = self._record_dtype()

        def on_log(level: int, text: Any, _user_data: Any) -> None:
            message = self.string(text).removeprefix("ggml-async: ").rstrip("\n")
            log.log(_LEVELS.get(level, logging.INFO), "%s", message)

        # cffi callbacks live as long as this reference; the library must not call it once the interpreter is going
        self._on_log = self.ffi.callback("void(int, const char *, void *)", on_log)
        self.lib.ggml_async_log_set(self._on_log, self.ffi.NULL)
        atexit.register(self.lib.ggml_async_log_set, self.ffi.NULL, self.ffi.NULL)

    def string(self, text: Any) -> str:
        return "" if text == self.ffi.NULL else self.ffi.string(text).decode("utf-8", "replace")

    def error(self, exit_code: ExitCode = ExitCode.FAILED) -> GgmlAsyncError:
        message, _, hint = self.string(self.lib.ggml_async_last_error()).partition("\n")
        return GgmlAsyncError(message, hint, exit_code)

    def check(self, status: int, exit_code: ExitCode = ExitCode.FAILED) -> int:
        if status < 0:
            raise self.error(exit_code)
        return status

    def _names(self, function: Any, first: int) -> list[str]:
        names: list[str] = []
        while (name := function(first + len(names))) != self.ffi.NULL:
            names.append(self.string(name))
        return names

    def _record_dtype(self) -> np.dtype[Any]:
        ctype = self.ffi.typeof("struct ggml_async_record")
        kinds = {"int32_t": "<i4", "uint32_t": "<u4", "uint64_t": "<u8", "int64_t": "<i8"}
        fields = ctype.fields
        return np.dtype(
            {
                "names": [name for name, _ in fields],
                "formats": [kinds.get(field.type.cname, "S64") for _, field in fields],
                "offsets": [field.offset for _, field in fields],
                "itemsize": self.ffi.sizeof(ctype),
            }
        )


_native: _Native | None = None
_native_lock = threading.Lock()


def native() -> _Native:
    """The library, loaded at the first call.

    Raises:
        GgmlAsyncError: not built, not loadable, or of another ABI version.
    """
    global _native  # noqa: PLW0603 -- one library per process
    with _native_lock:
        if _native is None:
            _native = _Native()
        return _native


def record_kind(name: str) -> int:
    """Number of a record kind ("readback", "stage", "upload")."""
    n = native()
    return int(getattr(n.lib, f"GGML_ASYNC_RECORD_{name.upper()}"))


def path_name(path: int) -> str:
    """Name of an ``enum ggml_async_path``: stock, direct, bounce or empty."""
    n = native()
    return n.string(n.lib.ggml_async_path_name(path))


def decline_name(reason: int) -> str:
    """Name of a reason for declining a readback."""
    n = native()
    return n.string(n.lib.ggml_async_decline_name(reason))


def find() -> list[Path]:
    """Paths of the loaded libraries that hold a ggml backend registry, in load order."""
    n = native()
    buffer = n.ffi.new("char[]", 1 << 16)
    n.lib.ggml_async_find(buffer, len(buffer))
    return [Path(line) for line in n.string(buffer).splitlines()]


class Host:
    """One attached ggml library. Made by :func:`attach`."""

    def __init__(self, host_id: int) -> None:
        self.id = host_id

    def __repr__(self) -> str:
        info = self.info()
        return f"<ggml-async host {self.id}: ggml {info.version} API {info.api_version}, {info.mode}, {info.library}>"

    def info(self) -> HostInfo:
        """Versions, proved layout, and how many devices and live backends are followed."""
        n = native()
        out = n.ffi.new("struct ggml_async_host_info *")
        n.check(n.lib.ggml_async_host_get(self.id, out, n.ffi.sizeof("struct ggml_async_host_info")))
        return HostInfo(
            id=out.id,
            api_version=out.api_version,
            version=n.string(out.version),
            layout=n.string(out.layout),
            library=n.string(out.library),
            mode=n.string(n.lib.ggml_async_mode_name(out.mode)),
            attached=bool(out.attached),
            n_devices=out.n_devices,
            n_backends=out.n_backends,
        )

    @property
    def mode(self) -> Mode:
        """The mode; setting it takes effect per backend, when its open stage closes."""
        n = native()
        return Mode(n.string(n.lib.ggml_async_mode_name(n.check(n.lib.ggml_async_get_mode(self.id)))))

    @mode.setter
    def mode(self, mode: Mode | str) -> None:
        n = native()
        try:
            wanted = Mode(mode)
        except ValueError:
            raise UsageError(f"unknown mode {mode!r}", f"use {', '.join(m.value for m in Mode)}") from None
        number = n.check(n.lib.ggml_async_mode_parse(wanted.value.encode()))
        n.check(n.lib.ggml_async_set_mode(self.id, number))

    def counters(self) -> dict[str, int]:
        """All counters by name; counts, bytes, and nanoseconds where the name ends in ``_ns``."""
        n = native()
        values = n.ffi.new("uint64_t[]", len(n.counter_names))
        n.check(n.lib.ggml_async_counters(self.id, values, len(n.counter_names)))
        return dict(zip(n.counter_names, values, strict=True))

    def reset_counters(self) -> None:
        """Sets every counter to zero."""
        n = native()
        n.check(n.lib.ggml_async_counters_reset(self.id))

    def declined(self) -> dict[str, int]:
        """Readbacks left to ggml, by reason; only reasons that occurred."""
        return {k.removeprefix("declined_"): v for k, v in self.counters().items() if k.startswith("declined_") and v}

    def detach(self) -> bool:
        """Restores every pointer. False when a stage is open elsewhere; it restores its own when it closes."""
        n = native()
        status = n.lib.ggml_async_detach(self.id)
        if status == n.lib.GGML_ASYNC_ERR_BUSY:
            return False
        n.check(status)
        return True


def attach(library: str | os.PathLike[str] | None = None) -> Host:
    """Attaches to a ggml that is loaded in this process; calling it again returns the same host.

    CPU backends that are created afterwards (so: contexts created afterwards) read back asynchronously.

    Args:
        library: the ggml (or llama) library, or None for the only ggml that llama-cpp-python, cyllama, xllamacpp ...
            have loaded.

    Raises:
        GgmlAsyncError: none or several are loaded, or its structures are not known; nothing was changed then.
    """
    n = native()
    name = n.ffi.NULL if library is None else os.fsencode(library)
    return Host(n.check(n.lib.ggml_async_attach(name), ExitCode.NOT_INSTRUMENTED))


class Recorder:
    """Records events of all hosts while the ``with`` block runs.

    Args:
        capacity: how many unread records are kept; when full, new ones are dropped and counted.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self.capacity = capacity

    def __enter__(self) -> Recorder:
        n = native()
        n.check(n.lib.ggml_async_record_start(self.capacity))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        native().lib.ggml_async_record_stop()

    def read(self) -> np.ndarray[Any, Any]:
        """Takes what is there: a structured array, one element per ``struct ggml_async_record``."""
        n = native()
        parts: list[np.ndarray[Any, Any]] = []
        size = 4096
        while True:
            out = np.zeros(size, dtype=n.record_dtype)
            got = n.check(n.lib.ggml_async_record_read(n.ffi.from_buffer("struct ggml_async_record[]", out), size))
            parts.append(out[:got])
            if got < size:
                return np.concatenate(parts) if len(parts) > 1 else parts[0]

    @property
    def dropped(self) -> int:
        """Records lost since the start because the ring was full."""
        return int(native().lib.ggml_async_record_dropped())


class ReadQueue:
    """Reads of tensors of any backends of one host into host memory, then one wait for all of them.

    Args:
        host: an attached host.
    """

    def __init__(self, host: Host) -> None:
        n = native()
        self._queue = n.lib.ggml_async_queue_new(host.id)
        if self._queue == n.ffi.NULL:
            raise n.error()
        self._keep: list[Any] = []

    def __enter__(self) -> ReadQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, backend: int, tensor: int, out: Any, offset: int = 0) -> str:
        """Queues a read of ``len(out)`` bytes at ``offset`` of a tensor.

        Args:
            backend: address of the ggml_backend_t whose memory holds the tensor.
            tensor: address of the struct ggml_tensor.
            out: writable, C-contiguous buffer (numpy array, bytearray ...); complete only after :meth:`wait`.
            offset: bytes into the tensor.

        Returns:
            The path taken: "bounce" when queued, "empty", or "stock" when the backend cannot read asynchronously and it
            was done at once.

        Raises:
            GgmlAsyncError: the range is outside the tensor, or the tensor is not allocated.
        """
        n = native()
        view = n.ffi.from_buffer(out, require_writable=True)
        path = n.lib.ggml_async_read(
            self._queue, n.ffi.cast("void *", backend), n.ffi.cast("void *", tensor), view, offset, len(view)
        )
        n.check(path)
        self._keep.append(view)
        return path_name(path)

    def wait(self) -> int:
        """Completes every queued read; returns how many."""
        n = native()
        done = n.check(n.lib.ggml_async_wait(self._queue))
        self._keep.clear()
        return done

    def close(self) -> None:
        """Waits for what is queued and frees the queue. Calling it twice is fine."""
        n = native()
        if self._queue != n.ffi.NULL:
            n.lib.ggml_async_queue_free(self._queue)
            self._queue = n.ffi.NULL
            self._keep.clear()
