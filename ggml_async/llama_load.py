"""Getting a llama.cpp build into this process: its files, the loader, its log."""

from __future__ import annotations

import atexit
import collections
import ctypes
import logging
import os
import re
from pathlib import Path
from typing import Any

from .errors import GgmlAsyncError

log = logging.getLogger("ggml_async.llama")

_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUED = 5
_SUFFIX = r"(-[0-9a-f]{8})?(\.[a-z]+\.v[\w.-]*?)?\.so(\.\d+)*"
_NAMES = {stem: re.compile(stem + _SUFFIX) for stem in ("libggml-base", "libggml", "libllama")}
_MISSING = re.compile(r"^(\S+\.so\S*): cannot open shared object file")
_MAX_MISSING = 8


def find_libraries(directory: Path) -> dict[str, Path]:
    """The library files of a llama.cpp build by stem (libllama, libggml, libggml-base); absent ones left out."""
    found: dict[str, Path] = {}
    try:
        files = sorted(directory.iterdir(), key=lambda file: (len(file.name), file.name))
    except OSError:
        return found
    for file in files:
        for stem, pattern in _NAMES.items():
            if stem not in found and pattern.fullmatch(file.name) and file.is_file():
                found[stem] = file
    return found


class LlamaLog:
    """ggml's log callback: whole lines to `logging`, the last complaints kept for the hint of an error."""

    def __init__(self, ffi: Any, lib: Any) -> None:
        self.complaints: collections.deque[str] = collections.deque(maxlen=20)
        self._partial = ""
        self._level = logging.INFO
        self._ffi = ffi
        self._lib = lib
        self.callback = ffi.callback("log_fn", self._write)  # kept: llama.cpp holds the bare pointer
        lib.llama_log_set(self.callback, ffi.NULL)
        atexit.register(self.close)

    def close(self) -> None:
        """Give the log back to llama.cpp's own default; called at exit, before the callback dies."""
        self._lib.llama_log_set(self._ffi.NULL, self._ffi.NULL)

    def _write(self, level: int, text: Any, _user: Any) -> None:
        if level != _CONTINUED:
            self._flush()
            self._level = _LEVELS.get(level, logging.INFO)
        *lines, rest = (self._partial + self._ffi.string(text).decode("utf-8", "replace")).split("\n")
        for line in lines:
            self._emit(line)
        self._partial = rest

    def _flush(self) -> None:
        line, self._partial = self._partial, ""
        self._emit(line)

    def _emit(self, line: str) -> None:
        if not line.strip():
            return
        if self._level >= logging.WARNING:
            self.complaints.append(line.strip())
        log.log(self._level, "%s", line.rstrip())

    def hint(self, fallback: str) -> str:
        """The last complaints in one line, or `fallback`."""
        self._flush()
        return "; ".join(list(self.complaints)[-3:]) or fallback


def load_file(path: Path) -> None:
    """Load one library by its full path, first the neighbours it asks for and the loader does not find."""
    for _ in range(_MAX_MISSING):
        try:
            ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
            return
        except OSError as error:
            missing = _MISSING.match(str(error))
            neighbour = path.parent / missing[1] if missing else path
            if neighbour == path or not neighbour.is_file():
                raise GgmlAsyncError(
                    f"cannot load {path}: {error}", "use a build for this machine, or install what it needs"
                ) from error
            load_file(neighbour)
    raise GgmlAsyncError(f"cannot load {path}: its libraries do not load", "use a build for this machine")


def refuse_second_ggml(directory: Path) -> None:
    """Raise when a ggml of another folder is in this process: two of them would share symbols by name."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libggml-base") and ".so" in path.name and path.parent != directory:
            raise GgmlAsyncError(
                f"two ggml builds in one process: {path} is loaded already, {directory} is asked for",
                "start a fresh process for the other build",
            )
