"""VK_LAYER_GGML_ASYNC_waits: where it is, how to have the Vulkan loader load it, and what it counted in this process.

The variables count when the Vulkan instance is created, so they must be set before ggml's Vulkan backend is loaded.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .env import Env
from .errors import ExitCode, GgmlAsyncError

#: Name of the layer in VK_INSTANCE_LAYERS.
NAME = "VK_LAYER_GGML_ASYNC_waits"
LIBRARY = "libVkLayer_ggml_async_waits.so"
MANIFEST = "VkLayer_ggml_async_waits.json"
#: Must equal GGML_ASYNC_LAYER_ABI_VERSION of the layer that is loaded.
ABI_VERSION = 1


def _native_dir() -> Path:
    """Where the native library is looked for, as in native.library_path()."""
    override = Env.LIBRARY.get()
    return Path(override).parent if override else Path(str(resources.files("ggml_async") / "_native"))


def layer_dir() -> Path | None:
    """Folder of the layer's library and manifest, beside libggml-async.so; None when it was not built."""
    folder = _native_dir()
    if all((folder / name).is_file() for name in (LIBRARY, MANIFEST)):
        return folder.resolve()
    return None


def absence() -> tuple[str, str] | None:
    """Why there is no layer to load, and what to do; None when it is there."""
    if layer_dir() is not None:
        return None
    override = Env.LIBRARY.get()
    if override:
        return (
            f"{LIBRARY} and {MANIFEST} are not beside {override}",
            f"build them there with the Vulkan headers, or unset {Env.LIBRARY.key}",
        )
    return (
        "this package was built without the Vulkan headers, so it has no Vulkan layer",
        "install libvulkan-dev (Fedora: vulkan-headers) and reinstall the package",
    )


def why_absent() -> str | None:
    """`absence` in one sentence."""
    found = absence()
    return f"{found[0]}: {found[1]}" if found else None


#: Why the layer is not in this process although it is there and was asked for, and what to do.
NOT_LOADED = (
    "the Vulkan loader did not load the layer",
    f"VK_LOADER_DEBUG=layer shows why; look at VK_LOADER_LAYERS_DISABLE, and where the loader is too old for "
    f"{Env.VK_ADD_LAYER_PATH.key} set {Env.VK_LAYER_PATH.key} to the layer's folder",
)


def _appended(value: str | None, element: str) -> str:
    """The list `value` with `element` at its end unless it is there; empty elements would mean the current folder."""
    elements = [part for part in (value or "").split(os.pathsep) if part]
    if element not in elements:
        elements.append(element)
    return os.pathsep.join(elements)


def layer_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to set on top of `environ` so that Vulkan programs load the layer beside what the user asked for.

    Where the user set VK_LAYER_PATH the folder is added to it, since the loader then ignores VK_ADD_LAYER_PATH;
    otherwise it goes to VK_ADD_LAYER_PATH, which leaves the system's explicit layers in reach. In VK_INSTANCE_LAYERS
    the layer comes last, next to the driver, unless the user placed it himself. Empty when there is no layer.
    """
    folder = layer_dir()
    if folder is None:
        return {}
    path = (Env.VK_LAYER_PATH if environ.get(Env.VK_LAYER_PATH.key) else Env.VK_ADD_LAYER_PATH).key
    layers = Env.VK_INSTANCE_LAYERS.key
    return {
        path: _appended(environ.get(path), str(folder)),
        layers: _appended(environ.get(layers), NAME),
    }


@dataclass(frozen=True)
class LayerSnapshot:
    """Counters at one moment, or, after subtraction, between two: by name, and by cause and name.

    Counts, bytes, and nanoseconds where the name ends in ``_ns``.
    """

    totals: dict[str, int]
    causes: dict[str, dict[str, int]]

    def __sub__(self, before: LayerSnapshot) -> LayerSnapshot:
        """What was counted since `before`."""
        return LayerSnapshot(
            {name: value - before.totals[name] for name, value in self.totals.items()},
            {
                cause: {name: value - before.causes[cause][name] for name, value in counters.items()}
                for cause, counters in self.causes.items()
            },
        )


class LayerCounters:
    """The counters of the layer that the Vulkan loader put into this process. Made by :meth:`find`."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._lib = lib
        for function in ("counter_name", "cause_name", "cause_counter_name"):
            self._function(function).restype = ctypes.c_char_p
        self.counter_names = self._names("counter_name")
        self.cause_names = self._names("cause_name")
        self.cause_counter_names = self._names("cause_counter_name")

    @classmethod
    def find(cls) -> LayerCounters | None:
        """The layer in this process; None when it is not loaded (figures are null then, not 0).

        Raises:
            GgmlAsyncError: a layer of another version is loaded.
        """
        try:
            lib = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        except OSError:
            return None
        found = lib.ggml_async_layer_abi_version()
        if found != ABI_VERSION:
            raise GgmlAsyncError(
                f"the loaded {NAME} has ABI {found}, this package needs {ABI_VERSION}",
                f"take the other one out of {Env.VK_LAYER_PATH.key} and {Env.VK_ADD_LAYER_PATH.key}",
                ExitCode.NOT_INSTRUMENTED,
            )
        return cls(lib)

    def _function(self, name: str) -> Any:
        return getattr(self._lib, f"ggml_async_layer_{name}")

    def _names(self, function: str) -> list[str]:
        names: list[str] = []
        while (name := self._function(function)(len(names))) is not None:
            names.append(name.decode())
        return names

    def _values(self, function: str, names: list[str], *scope: int) -> dict[str, int]:
        values = (ctypes.c_uint64 * len(names))()
        self._function(function)(*scope, values, len(names))
        return dict(zip(names, values, strict=True))

    def snapshot(self) -> LayerSnapshot:
        """All counters as they are now; they only grow."""
        return LayerSnapshot(
            self._values("counters", self.counter_names),
            {
                name: self._values("cause_counters", self.cause_counter_names, cause)
                for cause, name in enumerate(self.cause_names)
            },
        )

    def devices(self) -> int:
        """Vulkan devices that were created under the layer so far."""
        return int(self._function("devices")())

    def path(self) -> Path | None:
        """File of the loaded layer; None where /proc does not tell."""
        try:
            lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        except OSError:
            return None
        for line in lines:
            parts = line.split(maxsplit=5)
            if len(parts) == 6 and Path(parts[5]).name == LIBRARY:
                return Path(parts[5])
        return None
