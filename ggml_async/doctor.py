"""The checks behind ``ggml-async doctor``: each has a status, the reason for it and a remedy."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from . import __version__, fetch, layer, native, runtime
from .child import run_module
from .devices import is_software
from .errors import GgmlAsyncError, UsageError

#: The readback check runs a tiny model; a driver that hangs must not hang the doctor.
READBACK_TIMEOUT_S = 180
#: Room that the runtime, the demo model and its source need in the cache.
CACHE_BYTES = 600 << 20

_LAYER = "Vulkan layer"
_PACKAGES = ("numpy", "cffi", "gguf", "psutil", "click", "rich", "platformdirs")


class Status(str, Enum):
    """Outcome of a check; a skip always says why."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    status: Status
    reason: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return {"name": self.name, "status": self.status.value, "reason": self.reason, "remedy": self.remedy}


def run_checks(explicit: Path | None = None, *, fetch: bool = False) -> list[Check]:
    """All checks, in the order in which a failure explains the later ones.

    Args:
        explicit: the llama.cpp folder to use instead of looking for one.
        fetch: whether the embedded runtime may be downloaded.

    Raises:
        UsageError: the explicit folder is not usable.
    """
    checks = [_python(), _plugin()]
    found = runtime.candidates(explicit)
    chosen: runtime.Candidate | None = None
    failure: GgmlAsyncError | None = None
    try:
        chosen = runtime.select(explicit, allow_fetch=fetch)
    except UsageError:
        raise  # of the folder that the user named there is nothing else to say
    except GgmlAsyncError as error:
        failure = error
    if chosen is not None and chosen.dir not in [candidate.dir for candidate in found]:
        found = [*found, chosen]
    checks += [_candidate(candidate, chosen) for candidate in found]
    if chosen is None:
        assert failure is not None
        checks.append(
            Check(
                "runtime",
                Status.FAIL,
                failure.message,
                failure.hint or "ggml-async doctor --fetch gets the embedded one",
            )
        )
        checks += [Check(name, Status.SKIP, "no runtime to run it with") for name in ("readback", _LAYER)]
    else:
        checks += [*_devices(chosen), *_readback_and_layer(chosen)]
    checks += [*_cache(), _memory()]
    return checks


def _python() -> Check:
    versions = []
    missing = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    text = f"Python {platform.python_version()}, {', '.join(versions)}"
    if missing:
        return Check(
            "python", Status.FAIL, f"{text}; missing: {', '.join(missing)}", f"pip install {' '.join(missing)}"
        )
    return Check("python", Status.OK, text)


def _plugin() -> Check:
    try:
        loaded = native.native()
    except GgmlAsyncError as error:
        return Check("plug-in", Status.FAIL, error.message, error.hint)
    version = loaded.string(loaded.lib.ggml_async_version())
    if version != __version__:
        return Check(
            "plug-in", Status.WARN, f"{loaded.path} is {version}, the package {__version__}", "reinstall the package"
        )
    return Check("plug-in", Status.OK, f"{version}, {loaded.path}")


def _candidate(candidate: runtime.Candidate, chosen: runtime.Candidate | None) -> Check:
    name = f"runtime: {candidate.origin}"
    if candidate.verdict == "ok":
        used = "used" if chosen is not None and candidate.dir == chosen.dir else "usable, not used"
        return Check(
            name,
            Status.OK,
            f"{used}: llama.cpp {candidate.llama}, backend API {candidate.api_version}, {candidate.dir}",
        )
    status = Status.SKIP if chosen is not None else Status.WARN
    return Check(name, status, f"{candidate.reason} ({candidate.dir})")


def _devices(chosen: runtime.Candidate) -> Iterator[Check]:
    for device in chosen.devices:
        name = f"device: {device['name']}"
        caps = ", ".join(
            f"{label} {'yes' if device.get(key) else 'no'}"
            for label, key in (("async", "async_"), ("pinned host buffer", "host_buffer"), ("events", "events"))
            if device.get(key) is not None
        )
        text = f"{device['description']} ({device['type']}); {caps}"
        if device["type"] in ("cpu", "accel"):
            yield Check(name, Status.OK, text)
        elif is_software(device["description"]):
            yield Check(name, Status.WARN, text, "a software device: counts are exact, timings say nothing about a GPU")
        elif not device.get("async_"):
            yield Check(name, Status.WARN, text, "it reads synchronously only: nothing to gain from the plug-in here")
        else:
            yield Check(name, Status.OK, text)


def _readback_and_layer(chosen: runtime.Candidate) -> list[Check]:
    """One real model through the plug-in, with the Vulkan layer watching, in a child process."""
    if not chosen.has_gpu:
        return [
            Check(
                "readback",
                Status.SKIP,
                "no GPU device: there is nothing to read back from",
                "install a driver; on Debian mesa-vulkan-drivers has lavapipe",
            ),
            Check(_LAYER, Status.SKIP, "no GPU device: Vulkan is not used"),
        ]
    variables = layer.layer_environment(os.environ)
    readback, seen = _readback(chosen, variables)
    if readback.status is Status.FAIL and seen is None and variables:
        # it ended badly: whose fault is it?
        alone, _ = _readback(chosen, {})
        if alone.status is not Status.FAIL:
            remedy = "use profile --no-layer; please report this"
            return [alone, Check(_LAYER, Status.FAIL, f"the readback check fails under it: {readback.reason}", remedy)]
    return [readback, _layer(chosen, seen)]


def _readback(chosen: runtime.Candidate, variables: dict[str, str]) -> tuple[Check, dict[str, Any] | None]:
    """The verdict and, where the child came to its end, what it saw. A bad driver may crash or hang it."""

    def failed(reason: str, remedy: str) -> tuple[Check, None]:
        return Check("readback", Status.FAIL, reason, remedy), None

    env = {**chosen.env, **variables}
    with tempfile.TemporaryDirectory(prefix="ggml-async-") as folder:
        try:
            child = run_module("doctor_readback", str(chosen.dir), folder, timeout=READBACK_TIMEOUT_S, env=env)
        except subprocess.TimeoutExpired:
            return failed(f"no answer in {READBACK_TIMEOUT_S} s", "the driver hangs; try another device or driver")
    lines = child.stdout.strip().splitlines()
    if child.returncode != 0 or not lines:
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        how = f"killed by signal {-child.returncode}" if child.returncode < 0 else f"exit {child.returncode}"
        return failed(f"{how}: {last}", "run again with GGML_ASYNC=off to see whether llama.cpp alone works")
    try:
        seen: dict[str, Any] = json.loads(lines[-1])
        return _readback_verdict(seen), seen
    except (ValueError, KeyError, TypeError):
        return failed(f"its answer was not understood: {lines[-1][:80]}", "please report this")


def _readback_verdict(seen: dict[str, Any]) -> Check:
    text = (
        f"{seen['readbacks']} readbacks in {seen['stages']} CPU splits: {seen['async_synchronizes']} waits "
        f"instead of {seen['stock_synchronizes']}, logits {'identical' if seen['identical'] else 'DIFFER'}"
    )
    if not seen["identical"]:
        return Check("readback", Status.FAIL, text, "do not use the plug-in here; please report this")
    if seen["readbacks"] == 0:
        return Check("readback", Status.FAIL, "the plug-in saw no readback", "please report this")
    if seen["declined"]:
        reasons = ", ".join(f"{reason} {count}" for reason, count in seen["declined"].items())
        return Check(
            "readback", Status.WARN, f"{text}; left to ggml: {reasons}", "docs/contract.md explains each reason"
        )
    return Check("readback", Status.OK, text)


def _layer(chosen: runtime.Candidate, seen: dict[str, Any] | None) -> Check:
    """The layer that counts fence waits, by what it saw of the readback check; `seen` None: that has no answer."""
    if not any(device["name"].startswith("Vulkan") for device in chosen.devices):
        return Check(_LAYER, Status.SKIP, "no Vulkan device: Vulkan is not used")
    absence = layer.absence()
    if absence is not None:
        return Check(_LAYER, Status.WARN, f"{absence[0]}: fence waits and queue submits stay uncounted", absence[1])
    if seen is None:
        return Check(_LAYER, Status.SKIP, "the readback check, which it watches, failed")
    return _layer_verdict(seen["layer"]) if seen.get("layer") else Check(_LAYER, Status.WARN, *layer.NOT_LOADED)


def _layer_verdict(found: dict[str, Any]) -> Check:
    text = f"{found['path']}, ABI {found['abi']}"
    if not found["devices"]:
        return Check(_LAYER, Status.SKIP, f"{text}; the readback check used no Vulkan device")
    stock, queued = found["stock"], found["async"]
    if not stock["queue_submits"] or not queued["queue_submits"]:
        return Check(_LAYER, Status.FAIL, f"{text}; it saw no queue submit", "please report this")
    return Check(
        _LAYER,
        Status.OK,
        f"{text}; in the readback check {queued['fence_waits']} fence waits instead of {stock['fence_waits']}, "
        f"{queued['queue_submits']} queue submits instead of {stock['queue_submits']}",
    )


def _cache() -> Iterator[Check]:
    folder = fetch.cache_dir()
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        yield Check("cache", Status.FAIL, f"{folder} is not writable", "set GGML_ASYNC_CACHE to a folder that is")
        return
    used = fetch.tree_bytes(folder)
    free = shutil.disk_usage(existing).free
    text = f"{folder}: {used / 1e6:.0f} MB used, {free / 1e9:.1f} GB free"
    if free + used < CACHE_BYTES:
        yield Check("cache", Status.WARN, text, f"the demo needs about {CACHE_BYTES >> 20} MB")
    else:
        yield Check("cache", Status.OK, text)
    for piece in fetch.cache_report():
        name = f"cache: {piece['name']}"
        if piece["status"] == "ok":
            yield Check(name, Status.OK, f"{piece['path']}: {piece['bytes'] / 1e6:.0f} MB")
        elif piece["status"] == "absent":
            yield Check(name, Status.SKIP, "not there yet: it is fetched or made when it is first needed")
        else:
            yield Check(
                name,
                Status.WARN,
                f"{piece['path']} is damaged or of another version",
                "nothing: it is fetched or made again when it is needed",
            )


def _memory() -> Check:
    memory = psutil.virtual_memory()
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count()
    free = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB memory available"
    return Check("machine", Status.OK, f"{cores} cores, {free}")
