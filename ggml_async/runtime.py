"""Which llama.cpp to use: every candidate is looked at in a child process, and why one was refused is kept."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import fetch
from .child import run_module
from .devices import GPU_TYPES, is_software
from .env import Env
from .errors import ExitCode, GgmlAsyncError, UsageError
from .llama import LlamaLibrary
from .llama_load import find_libraries

#: A driver that hangs while it is being listed must not hang us.
CHECK_TIMEOUT_S = 60

_PROGRAMS = ("llama-server", "llama-bench", "llama-cli")
_SUBFOLDERS = (".", "lib", "lib64", "bin", "build/bin", "llama")


@dataclass
class Candidate:
    """One llama.cpp folder and what came of checking it.

    Attributes:
        origin: where it was found: --llama, a variable, PATH, llama-cpp-python, node_modules or embedded.
        dir: folder of its libraries.
        verdict: "ok" or "refused".
        reason: why it was refused; empty when it was not. hint: what to do about it.
        plugin_refused: it loads, but the plug-in cannot attach to it.
        llama: its version; ggml: ggml's; api_version: of ggml's backend interface.
        devices: what ggml lists (name, description, type, async_, host_buffer, events ...).
        env: variables that must be set before it is loaded.
    """

    origin: str
    dir: Path
    verdict: str = "refused"
    reason: str = ""
    hint: str = ""
    plugin_refused: bool = False
    llama: str | None = None
    ggml: str | None = None
    api_version: int | None = None
    devices: list[dict[str, Any]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def has_gpu(self) -> bool:
        """Whether there is a device to read back from."""
        return any(device["type"] in GPU_TYPES for device in self.devices)

    @property
    def software_only(self) -> bool:
        """Whether its only GPUs are software devices."""
        gpus = [d for d in self.devices if d["type"] in GPU_TYPES]
        return bool(gpus) and all(is_software(d["description"]) for d in gpus)


# ---- where to look


def library_folder(folder: Path) -> Path | None:
    """The folder with libllama in a release, build tree or library folder; None when there is none."""
    for sub in _SUBFOLDERS:
        if "libllama" in find_libraries(folder / sub):
            return (folder / sub).resolve()
    return None


def _on_path() -> Iterator[Path]:
    for program in _PROGRAMS:
        found = shutil.which(program)
        if found:
            bin_dir = Path(found).resolve().parent
            yield from (bin_dir, bin_dir.parent)


def _llama_cpp_python() -> Iterator[Path]:
    try:
        spec = importlib.util.find_spec("llama_cpp")
    except (ImportError, ValueError):
        return
    for location in (spec.submodule_search_locations or []) if spec else []:
        yield Path(location)


def _node_modules() -> Iterator[Path]:
    for folder in (Path.cwd(), *Path.cwd().parents):
        packages = folder / "node_modules" / "@node-llama-cpp"
        for kind in ("vulkan", "cuda", ""):
            for found in sorted(packages.glob(f"linux-*-{kind}" if kind else "linux-*")):
                yield from sorted(found.glob("bins/*"))


def _installed() -> Iterator[tuple[str, Path]]:
    seen = set()
    for origin, places in (
        ("PATH", _on_path()),
        ("llama-cpp-python", _llama_cpp_python()),
        ("node_modules", _node_modules()),
    ):
        for place in places:
            folder = library_folder(place)
            if folder is not None and folder not in seen:
                seen.add(folder)
                yield origin, folder


# ---- checking one


def _check_once(directory: Path, env: dict[str, str]) -> dict[str, Any]:
    try:
        child = run_module("runtime_check", str(directory), timeout=CHECK_TIMEOUT_S, env=env)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {CHECK_TIMEOUT_S} s", "hint": ""}
    lines = child.stdout.strip().splitlines()
    if child.returncode < 0:
        return {"error": f"killed by {signal.Signals(-child.returncode).name} while loading", "hint": ""}
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        return {"error": f"exit {child.returncode} while loading: {last}", "hint": ""}
    return found


@functools.lru_cache(maxsize=32)
def _check(origin: str, directory: Path, vk_visible: str | None, vk_fusion: str | None, require_gpu: bool) -> Candidate:
    # the variables are part of the key: they change the outcome
    found = _check_once(directory, {})
    env: dict[str, str] = {}
    lists_gpu = any(d["type"] in GPU_TYPES for d in found.get("devices", []))
    if "error" not in found and not lists_gpu and vk_visible is None and (directory / "libggml-vulkan.so").is_file():
        # ggml-vulkan passes over software devices unless it is told which to take; a real GPU always comes first
        software = _check_once(directory, {Env.VK_VISIBLE_DEVICES.key: "0"})
        if any(d["type"] in GPU_TYPES for d in software.get("devices", [])):
            found = software
            env[Env.VK_VISIBLE_DEVICES.key] = "0"
    candidate = Candidate(origin, directory, env=env)
    if "error" in found:
        candidate.reason, candidate.hint = found["error"], found.get("hint", "")
        candidate.plugin_refused = found.get("exit_code") == ExitCode.NOT_INSTRUMENTED
        return candidate
    candidate.llama, candidate.ggml, candidate.api_version = found["llama"], found["ggml"], found["api_version"]
    candidate.devices = found["devices"]
    if candidate.software_only and vk_fusion is None:
        env[Env.VK_DISABLE_FUSION.key] = "1"
    if require_gpu and not candidate.has_gpu:
        candidate.reason = "CPU only: there is no device to read back from"
    else:
        candidate.verdict = "ok"
    return candidate


def _checked(origin: str, directory: Path, *, require_gpu: bool) -> Candidate:
    return _check(origin, directory, Env.VK_VISIBLE_DEVICES.get(), Env.VK_DISABLE_FUSION.get(), require_gpu)


def _explicit(given: Path | None) -> tuple[str, Path] | None:
    if given is not None:
        return "--llama", given
    variable = Env.LLAMA.get()
    return (Env.LLAMA.key, Path(variable)) if variable else None


def candidates(explicit: Path | None = None) -> list[Candidate]:
    """Every llama.cpp there is to use, checked, in order of preference; fetches nothing.

    Args:
        explicit: the folder given with --llama; it, or the one in GGML_ASYNC_LLAMA, is then the only candidate.
    """
    named = _explicit(explicit)
    if named is not None:
        origin, given = named
        folder = library_folder(given)
        if folder is None:
            reason = "no such folder" if not given.exists() else "no libllama*.so in it, nor in lib, bin or build/bin"
            return [Candidate(origin, given, reason=reason)]
        return [_checked(origin, folder, require_gpu=False)]
    found = [_checked(origin, folder, require_gpu=True) for origin, folder in _installed()]
    embedded = fetch.fetched_runtime_dir()
    if embedded is not None:
        found.append(_checked("embedded", embedded, require_gpu=False))
    return found


def select(explicit: Path | None = None, *, allow_fetch: bool = True) -> Candidate:
    """The llama.cpp to use: the explicit one, else the first usable one, else the embedded default.

    An installed build with a real GPU comes first, then the embedded one; a software device is better than none.

    Args:
        explicit: the folder given with --llama.
        allow_fetch: whether the embedded default may be downloaded when nothing else is usable.

    Raises:
        UsageError: the explicit folder is not usable.
        GgmlAsyncError: nothing is usable, with the reason for each refusal.
    """
    found = candidates(explicit)
    usable = [candidate for candidate in found if candidate.verdict == "ok"]
    if usable:
        return next((c for c in usable if c.has_gpu and not c.software_only), usable[0])
    if _explicit(explicit) is not None:
        refused = found[0]
        message = f"{refused.origin} {refused.dir}: {refused.reason}"
        if refused.plugin_refused:
            raise GgmlAsyncError(message, refused.hint, ExitCode.NOT_INSTRUMENTED)
        raise UsageError(message, "name the folder that holds libllama.so and libggml*.so")
    reasons = "; ".join(f"{c.origin} ({c.dir}): {c.reason}" for c in found)
    if not allow_fetch:
        raise GgmlAsyncError(
            f"no usable llama.cpp{': ' + reasons if reasons else ' is installed, and the embedded one is not fetched'}",
            "fetch the embedded one (ggml-async doctor --fetch), or name one with --llama",
        )
    embedded = _checked("embedded", fetch.ensure_runtime(), require_gpu=False)
    if embedded.verdict != "ok":
        raise GgmlAsyncError(
            f"the embedded llama.cpp is not usable: {embedded.reason}",
            embedded.hint or "name one of your own with --llama",
            ExitCode.NOT_INSTRUMENTED if embedded.plugin_refused else ExitCode.FAILED,
        )
    return embedded


def load(candidate: Candidate) -> LlamaLibrary:
    """Loads it into this process, for good; sets the variables that it needs first.

    Raises:
        GgmlAsyncError: it does not load here, or its structs are not known.
    """
    os.environ.update(candidate.env)
    return LlamaLibrary(candidate.dir)
