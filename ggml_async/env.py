"""Every environment variable that ggml-async reads or sets; the docs are checked against this table."""

from __future__ import annotations

import os
from enum import Enum


class Env(Enum):
    """(name, what it does). ``Env.MODE.get()`` reads it."""

    MODE = ("GGML_ASYNC", "mode of the plug-in when it loads: off, stock or async (default async)")
    LLAMA = ("GGML_ASYNC_LLAMA", "folder of the llama.cpp libraries to use, as --llama")
    LIBRARY = ("GGML_ASYNC_LIBRARY", "path of another build of libggml-async.so for the Python package to load")
    CACHE = ("GGML_ASYNC_CACHE", "folder for the fetched runtime and models instead of the user's cache folder")
    CAPTURE = ("GGML_ASYNC_CAPTURE", "file that plug-in and layer append their capture to; run sets it")
    CAPTURE_LIMIT = (
        "GGML_ASYNC_CAPTURE_LIMIT",
        "size in MiB at which a capture goes on with counters only (default 256)",
    )
    CONTROL = ("GGML_ASYNC_CONTROL", "1: the plug-in can be reached by switch; run sets it")
    HOOK = ("GGML_ASYNC_HOOK", "path of the plug-in for run's Python import hook; run sets it")
    DEBUG = ("GGML_ASYNC_DEBUG", "1: the import hook says on stderr what it attached to, or why not")
    BACKEND_PATH = ("GGML_BACKEND_PATH", "ggml's own: the out-of-tree backend that programs load; ours goes here")
    VK_VISIBLE_DEVICES = (
        "GGML_VK_VISIBLE_DEVICES",
        "ggml-vulkan's own: device indices; set to 0 when no GPU is there, so that lavapipe is listed",
    )
    VK_DISABLE_FUSION = (
        "GGML_VK_DISABLE_FUSION",
        "ggml-vulkan's own: set to 1 on lavapipe, where the fused shaders are slow",
    )
    VK_LAYER_PATH = (
        "VK_LAYER_PATH",
        "the Vulkan loader's own: folders of layers instead of the system's; where it is set, ours is added to it",
    )
    VK_ADD_LAYER_PATH = (
        "VK_ADD_LAYER_PATH",
        "the Vulkan loader's own: folders of layers beside the system's; ours is added to it",
    )
    VK_INSTANCE_LAYERS = (
        "VK_INSTANCE_LAYERS",
        "the Vulkan loader's own: layers of every program; VK_LAYER_GGML_ASYNC_waits is added to it",
    )

    @property
    def key(self) -> str:
        """The variable's name."""
        return self.value[0]

    @property
    def meaning(self) -> str:
        """One sentence for the docs."""
        return self.value[1]

    def get(self) -> str | None:
        """Its value, or None when unset or empty."""
        return os.environ.get(self.key) or None
