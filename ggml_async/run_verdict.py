"""Whether the plug-in got into a program that has ended, by its capture, and if not, why not."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import capture as captures
from .capture import Capture
from .env import Env

_VARIABLE = Env.BACKEND_PATH.key
#: In every ggml since its backends are a registry.
_GGML = b"ggml_backend_dev_count"


@dataclass(frozen=True)
class Verdict:
    """`reason` and `hint` where it did not get in; `note` where it did and there is something to say."""

    attached: bool
    reason: str = ""
    hint: str = ""
    note: str = ""


def _contains(path: Path, text: bytes) -> bool:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(text) >= 0
    except (OSError, ValueError):
        return False


def _libraries(program: Path) -> Iterator[Path]:
    """The program, and libraries where builds of llama.cpp put theirs."""
    yield program
    real = program.resolve()
    for folder in (real.parent, real.parent.parent / "lib", real.parent.parent / "lib64"):
        for pattern in ("libggml*.so*", "libllama*.so*"):
            yield from sorted(folder.glob(pattern))


def _is_python(program: Path) -> bool:
    if program.resolve().name.startswith("python"):
        return True
    try:
        with program.open("rb") as file:
            first = file.readline(256)
    except OSError:
        return False
    return first.startswith(b"#!") and b"python" in first


def _never_loaded(program: Path) -> tuple[str, str]:
    """Why no plug-in said hello, as far as the files tell."""
    if _is_python(program):
        return (
            f"{program.name} loaded no ggml that the plug-in was told of",
            "python -I, -E and -S leave the import hook out; in code: import ggml_async; ggml_async.attach()",
        )
    files = list(_libraries(program))
    if any(_contains(path, _VARIABLE.encode()) for path in files):
        return (
            f"{program.name} has a ggml but never loaded its backends",
            "it may have ended before (--help, a bad argument), or have its backends compiled in and not call "
            "ggml_backend_load_all",
        )
    if any(_contains(path, _GGML) for path in files):
        return (
            f"{program.name} has a ggml that never reads {_VARIABLE}: compiled in without it, or too old",
            "use a build of llama.cpp from 2025 or later, or attach in code (ggml_async_attach)",
        )
    return (
        f"{program.name} has no ggml in it or beside it",
        "is it a llama.cpp program? A program that starts others must leave them their environment",
    )


def judge(read: Capture | None, program: str, taken: str | None) -> Verdict:
    """The verdict on a run.

    Args:
        read: its capture; None when there is nothing in the file.
        program: path of what was run.
        taken: GGML_BACKEND_PATH of the user's that was left alone.
    """
    if read is not None and read.hosts:
        if not (read.events["kind"] == captures.STAGE).any() and not _was_off(read):
            return Verdict(True, note="nothing was read back: no CPU split had inputs from a device (see docs/run.md)")
        return Verdict(True)
    if read is not None and read.refused:
        return Verdict(False, *_lines(read.refused[-1].reason))
    if taken:
        return Verdict(False, f"{_VARIABLE} is {taken} already", "unset it for this run: it holds one path")
    return Verdict(False, *_never_loaded(Path(program)))


def _was_off(read: Capture) -> bool:
    return all(change.mode == 0 for change in read.modes)


def _lines(reason: str) -> tuple[str, str]:
    first, _, rest = reason.partition("\n")
    return (
        f"the plug-in was loaded but did not attach: {first}",
        rest or "ggml-async doctor shows which builds it knows",
    )


def read_capture(path: Path) -> Capture | None:
    """The capture, or None where nothing was written."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    return captures.read([path])
