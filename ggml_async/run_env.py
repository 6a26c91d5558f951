"""What `ggml-async run` sets for a program: plug-in, layer, capture, import hook. Adds, never replaces."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from . import layer
from .env import Env
from .errors import ExitCode, GgmlAsyncError, UsageError
from .library import Mode, library_path

#: Default size of a capture, MiB; native/capture.h has the same.
CAPTURE_LIMIT = 256


@dataclass(frozen=True)
class Options:
    """What the command line chose. `capture` None: a name made of program and pid, in the current folder."""

    mode: Mode | None = None  #: None: what GGML_ASYNC says, else async
    layer: bool = True
    capture: Path | None = None
    capture_limit: int = CAPTURE_LIMIT  #: MiB
    force: bool = False  #: an existing capture may be replaced


@dataclass(frozen=True)
class Environment:
    """The variables to set, and what to tell the user before the start."""

    changes: dict[str, str]
    notes: list[str]
    taken: str | None  #: GGML_BACKEND_PATH of the user's, which is left alone


def find_program(name: str, environ: Mapping[str, str]) -> str:
    """Path of a program as execvp finds it.

    Raises:
        GgmlAsyncError: not found (exit code 127), or found and not executable (126).
    """
    found = shutil.which(name, path=environ.get("PATH", os.defpath))
    if found:
        return found
    folders = [""] if "/" in name else environ.get("PATH", os.defpath).split(os.pathsep)
    there = next((path for folder in folders if (path := Path(folder) / name).exists()), None)
    if there:
        what = "is a folder" if there.is_dir() else "is not executable"
        raise GgmlAsyncError(f"{there} {what}", "name a program", ExitCode.NOT_EXECUTABLE)
    raise GgmlAsyncError(
        f"{name}: no such program", "give its path, or put its folder into PATH", ExitCode.PROGRAM_NOT_FOUND
    )


def default_capture(program: str) -> Path:
    """`ggml-async-<program>-<pid>.capture` in the current folder."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(program).name)[:80] or "program"
    return Path.cwd() / f"ggml-async-{name}-{os.getpid()}.capture"


def create_capture(path: Path, force: bool) -> None:
    """Creates the empty file, so that a place that cannot be written to is known before the program starts.

    Raises:
        GgmlAsyncError: it is there already (and not `force`), or cannot be created; exit code 125.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if force else os.O_EXCL)
    try:
        os.close(os.open(path, flags, 0o666))
    except FileExistsError:
        raise GgmlAsyncError(
            f"{path} is there already", "name another with --capture, or replace it with --force", ExitCode.RUN_FAILED
        ) from None
    except OSError as error:
        raise GgmlAsyncError(
            f"cannot write the capture {path}: {error.strerror}",
            "name another place: --capture PATH",
            ExitCode.RUN_FAILED,
        ) from None


def _mode(options: Options, environ: Mapping[str, str]) -> Mode:
    if options.mode:
        return options.mode
    text = environ.get(Env.MODE.key) or Mode.ASYNC.value
    try:
        return Mode(text)
    except ValueError:
        raise UsageError(
            f"{Env.MODE.key}={text} is not off, stock or async", "unset it, or choose with --mode"
        ) from None


def _python_path(environ: Mapping[str, str]) -> str:
    folder = str(resources.files("ggml_async") / "hook")
    rest = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != folder]
    return os.pathsep.join([folder, *rest])


def environment(options: Options, capture: Path, environ: Mapping[str, str]) -> Environment:
    """The variables that put everything in, on top of `environ`.

    Raises:
        GgmlAsyncError: the plug-in is not built, or GGML_ASYNC names no mode.
    """
    library = str(library_path())
    notes: list[str] = []
    changes = {
        Env.MODE.key: _mode(options, environ).value,
        Env.CAPTURE.key: str(capture.absolute()),
        Env.CAPTURE_LIMIT.key: str(options.capture_limit),
        Env.CONTROL.key: "1",
        Env.HOOK.key: library,
        "PYTHONPATH": _python_path(environ),
    }
    before = environ.get(Env.BACKEND_PATH.key)
    taken = before if before and os.path.realpath(before) != os.path.realpath(library) else None
    if taken:
        notes.append(
            f"{Env.BACKEND_PATH.key} is {taken} already and holds one path: left alone, "
            "so only Python programs get the plug-in"
        )
    else:
        changes[Env.BACKEND_PATH.key] = library
    if options.layer:
        absent = layer.why_absent()
        if absent:
            notes.append(f"no fence waits or queue submits: {absent}")
        changes.update(layer.layer_environment(environ))
    return Environment(changes, notes, taken)
