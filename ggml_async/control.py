"""`ggml-async switch`: changes the mode of a running program through the plug-in's control word.

The word lies in a memfd named ``ggml-async-control`` of the program (native/control.c); we map it through
/proc/PID/fd, write what is wanted, wake the plug-in's thread, and wait until it says that every host has taken it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from .env import Env
from .errors import ExitCode, GgmlAsyncError
from .library import Mode

_MAGIC = b"GACTRL01"
_SIZE = 4096
#: pid, wanted, applied, n_changes, n_hosts; modes are stored + 1, 0 is none.
_FIELDS = struct.Struct("<IIIII")
_FIELDS_AT = 8
_WANTED_AT = 12
_MODES = (Mode.OFF, Mode.STOCK, Mode.ASYNC)
_FUTEX_WAKE = 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238, "i686": 240}
#: Seconds to wait for a program to take a mode.
TIMEOUT = 5.0


@dataclass(frozen=True)
class Switched:
    """One process: its mode before and after. `before` is None where its hosts had different ones."""

    pid: int
    before: Mode | None
    after: Mode


def _page(pid: int) -> mmap.mmap | None:
    """The control page of a process, or None when it has none of its own."""
    folder = Path(f"/proc/{pid}/fd")
    for entry in folder.iterdir():
        try:
            if "memfd:ggml-async-control" not in str(entry.readlink()):
                continue
            fd = os.open(entry, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            page = mmap.mmap(fd, _SIZE)
        except (OSError, ValueError):
            continue
        finally:
            os.close(fd)
        # A child of fork has inherited its parent's, whose word its own plug-in does not follow.
        if page[: len(_MAGIC)] == _MAGIC and _FIELDS.unpack_from(page, _FIELDS_AT)[0] == _own_pid(pid):
            return page
        page.close()
    return None


def _own_pid(pid: int) -> int:
    """The pid as the process itself sees it: in a container it is another."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid


def _pages(pid: int) -> list[tuple[int, mmap.mmap]]:
    """Control pages of a process, else those of its descendants: `run` itself has none, its program has."""
    try:
        own = _page(pid)
        if own is not None:
            return [(pid, own)]
        children = [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except (FileNotFoundError, psutil.NoSuchProcess):
        raise GgmlAsyncError(f"there is no process {pid}", "pgrep -a llama shows some", ExitCode.FAILED) from None
    except (PermissionError, psutil.AccessDenied):
        raise GgmlAsyncError(
            f"process {pid} belongs to somebody else", "be that user, or root", ExitCode.FAILED
        ) from None
    found = []
    for child in children:
        try:
            page = _page(child)
        except OSError:
            continue
        if page is not None:
            found.append((child, page))
    return found


def _wake(page: mmap.mmap) -> None:
    word = ctypes.c_uint32.from_buffer(page, _WANTED_AT)
    number = _SYS_FUTEX.get(os.uname().machine)
    if number is None:
        raise GgmlAsyncError(
            f"switch does not know the futex call of {os.uname().machine}", "report that", ExitCode.FAILED
        )
    ctypes.CDLL(None).syscall(
        ctypes.c_long(number),
        ctypes.byref(word),
        ctypes.c_int(_FUTEX_WAKE),
        ctypes.c_int(2**31 - 1),
        None,
        None,
        ctypes.c_int(0),
    )
    del word  # or the page could not be closed


def _state(page: mmap.mmap) -> tuple[int, int, int]:
    """(wanted, applied, number of hosts)"""
    _, wanted, applied, _, n_hosts = _FIELDS.unpack_from(page, _FIELDS_AT)
    return wanted, applied, n_hosts


def _switch_page(pid: int, page: mmap.mmap, mode: Mode, timeout: float) -> Switched:
    _, applied, _ = _state(page)
    wanted = _MODES.index(mode) + 1
    before = _MODES[applied - 1] if applied else None
    struct.pack_into("<I", page, _WANTED_AT, wanted)
    _wake(page)
    until = time.monotonic() + timeout
    # The plug-in takes the word out, then publishes what it has set.
    while _state(page)[:2] != (0, wanted):
        if time.monotonic() > until:
            raise GgmlAsyncError(
                f"process {pid} did not answer in {timeout:g} s", "is it stopped (SIGSTOP)? It switches when it goes on"
            )
        time.sleep(0.005)
    return Switched(pid, before, mode)


def switch(pid: int, mode: Mode, timeout: float = TIMEOUT) -> list[Switched]:
    """Sets the mode of a running program, or of every program that it started.

    Args:
        pid: of the program, or of the `ggml-async run` in front of it.
        mode: the new one. It takes effect per backend, when an open stage closes.
        timeout: seconds to wait for each.

    Raises:
        GgmlAsyncError: no such process, not ours to touch, no answer (1), or no plug-in in it (3).
    """
    pages = _pages(pid)
    if not pages:
        raise GgmlAsyncError(
            f"process {pid} cannot be switched: no plug-in with a control word in it, or it has closed its files",
            f"start it with: ggml-async run -- PROGRAM (it sets {Env.CONTROL.key}=1)",
            ExitCode.NOT_INSTRUMENTED,
        )
    try:
        attached = [(found, page) for found, page in pages if _state(page)[2]]
        if not attached:
            raise GgmlAsyncError(
                f"process {pages[0][0]} has the plug-in, but it is attached to no ggml",
                "its log or capture says why (ggml-async report)",
                ExitCode.NOT_INSTRUMENTED,
            )
        return [_switch_page(found, page, mode, timeout) for found, page in attached]
    finally:
        for _, page in pages:
            page.close()
