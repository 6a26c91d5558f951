"""The executor that really runs llama.cpp with the plug-in attached (see ``profile.py`` for the protocol)."""

from __future__ import annotations

import datetime
import hashlib
import math
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from ggml_async import layer, native
from ggml_async.errors import ExitCode, GgmlAsyncError
from ggml_async.gguf_file import GgufFile
from ggml_async.llama import Context, Device, LlamaLibrary, Model
from ggml_async.profile import Tokens
from ggml_async.profile_plan import Config, LoadKey
from ggml_async.profile_result import Fingerprint, Records, Warn

#: Unread records kept: one decode of many ubatches writes a few thousand.
RECORD_CAPACITY = 1 << 17


class LlamaSession:
    """One llama.cpp context."""

    def __init__(
        self,
        context: Context,
        host: native.Host,
        recorder: native.Recorder,
        counters: layer.LayerCounters | None,
    ) -> None:
        self._context = context
        self._host = host
        self._recorder = recorder
        self._layer = counters
        self._kept: list[np.ndarray[Any, Any]] = []
        self._spare: list[np.ndarray[Any, Any]] = []

    def set_mode(self, arm: str) -> None:
        """See profile.Session."""
        self._host.mode = native.Mode(arm)

    def clear(self) -> None:
        """See profile.Session."""
        self._context.synchronize()
        self._context.clear_memory()

    def decode(self, tokens: Tokens) -> None:
        """See profile.Session."""
        self._context.decode(tokens)
        self._context.synchronize()

    def keep_logits(self) -> None:
        """See profile.Session."""
        logits = self._context.logits(-1)
        # memory that was touched before: fresh pages would cost more than the copy
        row = self._spare.pop() if self._spare else np.empty_like(logits)
        np.copyto(row, logits)
        self._kept.append(row)

    def fingerprints(self) -> list[Fingerprint]:
        """See profile.Session."""
        prints = [
            Fingerprint(hashlib.blake2b(row.data, digest_size=16).digest(), bool(np.isfinite(row).all()))
            for row in self._kept
        ]
        self._spare += self._kept
        self._kept = []
        return prints

    def take_records(self) -> Records:
        """See profile.Session."""
        records = self._recorder.read()
        own: Records = records[records["host"] == self._host.id]
        return own

    def counters(self) -> dict[str, int]:
        """See profile.Session."""
        return self._host.counters()

    def layer_counters(self) -> layer.LayerSnapshot | None:
        """See profile.Session."""
        return self._layer.snapshot() if self._layer else None

    def close(self) -> None:
        """See profile.Session."""
        self._context.close()


class LlamaExecutor:
    """llama.cpp in this process. Close it: it frees the model and detaches.

    `use_layer`: whether to read the Vulkan layer's counters, for which its variables were set before loading.
    """

    def __init__(
        self, library: LlamaLibrary, model_file: GgufFile, should_stop: Callable[[], bool], use_layer: bool = True
    ) -> None:
        self._library = library
        self._file = model_file
        self._should_stop = should_stop
        self._key: LoadKey | None = None
        self._model: Model | None = None
        try:
            self._host = native.attach(library.ggml_library)
        except GgmlAsyncError as error:
            raise GgmlAsyncError(error.message, error.hint, ExitCode.NOT_INSTRUMENTED) from None
        self._recorder = native.Recorder(RECORD_CAPACITY)
        self._recorder.__enter__()
        self._use_layer = use_layer
        self._layer_trouble: GgmlAsyncError | None = None
        self._layer = self._find_layer()

    def _find_layer(self) -> layer.LayerCounters | None:
        self._library.devices()  # Vulkan's instance, and with it the layer, is there when its devices have been listed
        try:
            return layer.LayerCounters.find() if self._use_layer else None
        except GgmlAsyncError as error:
            self._layer_trouble = error
            return None

    def close(self) -> None:
        """Free the model, stop recording, detach; harmless when done before."""
        if self._model is not None:
            self._model.close()
            self._model = None
        self._recorder.__exit__(None, None, None)
        self._host.detach()

    def now(self) -> int:
        """See profile.Executor."""
        return time.perf_counter_ns()

    def utc(self) -> datetime.datetime:
        """See profile.Executor."""
        return datetime.datetime.now(datetime.timezone.utc)

    def devices(self) -> list[Device]:
        """Of llama.cpp, in the order of its registry."""
        return self._library.devices()

    def load(self, key: LoadKey) -> None:
        """See profile.Executor."""
        if key == self._key:
            return
        if self._model is not None:
            self._model.close()
            self._model = None
        by_name = {d.name: d for d in self.devices()}
        self._model = self._library.load_model(
            self._file.path,
            n_gpu_layers=key.n_gpu_layers,
            overrides=key.overrides,
            devices=[by_name[name] for name in key.devices],
            progress=self._loading,
        )
        self._key = key

    def _loading(self, _fraction: float) -> None:
        if self._should_stop():
            raise KeyboardInterrupt

    def open(self, config: Config) -> LlamaSession:
        """See profile.Executor."""
        context = self._loaded().context(
            n_ctx=config.n_ctx,
            n_batch=config.n_batch,
            n_ubatch=config.n_ubatch,
            n_threads=config.n_threads,
            flash_attn=config.flash_attn,  # type: ignore[arg-type]  # checked by the plan
        )
        return LlamaSession(context, self._host, self._recorder, self._layer)

    def n_vocab(self) -> int:
        """See profile.Executor."""
        return self._loaded().n_vocab

    def device_names(self) -> list[str]:
        """See profile.Executor."""
        return [d.name for d in self.devices()]

    def dropped(self) -> int:
        """See profile.Executor."""
        return self._recorder.dropped

    def layer_absence(self, used: Collection[str]) -> Warn | None:
        """See profile.Executor."""
        if not any(name.startswith("Vulkan") for name in used):
            return Warn("vulkan_not_used", "Vulkan is not used, so there are no fence waits or queue submits to count",
                        "their figures are null")  # fmt: skip
        if self._layer is not None:
            return None
        if not self._use_layer:
            why, hint = "--no-layer", "leave --no-layer out to have them"
        elif self._layer_trouble is not None:
            why, hint = self._layer_trouble.message, self._layer_trouble.hint
        else:
            why, hint = layer.absence() or layer.NOT_LOADED
        return Warn("no_layer", f"fence waits and queue submits are not measured: {why}", hint)

    def describe(self) -> dict[str, Any]:
        """See profile.Executor."""
        file, library, info = self._file, self._library, self._host.info()
        return {
            "model": {
                "path": str(file.path),
                "arch": file.arch,
                "n_layer": file.n_layer,
                "n_expert": file.n_expert,
                "n_expert_used": file.n_expert_used,
                "size_bytes": file.size_bytes,
                "desc": self._model.desc() if self._model else None,
                "n_params": sum(math.prod(t.shape) for t in file.tensors.values()),
            },
            "host": {
                "llama": library.version,
                "ggml": info.version or library.ggml_version,
                "api_version": info.api_version,
                "dir": str(library.dir),
                "layout": info.layout,
                "vulkan_layer": str(self._layer.path()) if self._layer else None,
            },
            "devices": [
                {"name": d.name, "description": d.description, "type": d.type, "async": d.async_}
                for d in self.devices()
            ],
            "build": {},
        }

    def _loaded(self) -> Model:
        if self._model is None:
            raise GgmlAsyncError("no model is loaded", "this is a bug in ggml-async; please report it")
        return self._model


def open_executor(
    model_file: GgufFile,
    llama: Path | None,
    should_stop: Callable[[], bool],
    say: Callable[[str], None],
    *,
    use_layer: bool = True,
) -> LlamaExecutor:
    """Choose, load and attach to a llama.cpp build, with the Vulkan layer unless not wanted.

    `say` takes one line for the user. Raises GgmlAsyncError: no usable build, or, with exit code 3, the plug-in cannot
    attach to it.
    """
    from ggml_async import runtime  # noqa: PLC0415  # an executor on a library loaded otherwise does not need it

    native.native()  # before any runtime is tried: a plug-in that is not there is not the runtime's fault
    candidate = runtime.select(llama)
    if candidate.software_only:
        say("no GPU seen; using Vulkan's software device")
    if use_layer:
        os.environ.update(layer.layer_environment(os.environ))
    return LlamaExecutor(runtime.load(candidate), model_file, should_stop, use_layer)
