"""libllama through cffi: load one build, place a model, decode, read logits. No headers, no compiler.

The struct layouts are proved at load (``llama_abi``); a library we do not know is refused by name.
llama.cpp's log goes to ``logging.getLogger("ggml_async.llama")``.
"""

from __future__ import annotations

import collections
import os
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cffi
import numpy as np
import numpy.typing as npt

from . import llama_abi
from .devices import GPU_TYPES
from .errors import GgmlAsyncError, UsageError
from .llama_load import LlamaLog, find_libraries, load_file, refuse_second_ggml
from .threadpool import ThreadPool

EvalCallback = Callable[[str, int, bool], bool]
Floats = npt.NDArray[np.float32]

_DEVICE_TYPES = ("cpu", "gpu", "igpu", "accel", "meta")
_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True)
class Device:
    """One ggml device. Memory in bytes; a capability is None where the library's answer could not be checked."""

    name: str
    description: str
    type: Literal["cpu", "gpu", "igpu", "accel", "meta"]
    memory_free: int
    memory_total: int
    async_: bool | None
    host_buffer: bool | None
    events: bool | None
    buffer_from_host_ptr: bool | None
    backend: str
    ptr: int

    @property
    def is_gpu(self) -> bool:
        """Whether there is anything to read back from it."""
        return self.type in GPU_TYPES


class LlamaLibrary:
    """One build of llama.cpp, loaded into this process for good. Use `load_library`.

    Attributes:
        version: llama.cpp's version as it gives it, with ggml's.
        ggml_version: ggml's version, None when the library does not say.
        layout: name of the proved struct layout.
        ggml_library: the library that holds ggml's registry (what ``attach`` wants).
        dir: the folder it was loaded from.
        api_version: ggml's backend API version, None when no backend is registered.
    """

    def __init__(self, directory: Path) -> None:
        self.dir = directory.resolve()
        files = find_libraries(self.dir)
        if "libllama" not in files:
            raise GgmlAsyncError(
                f"no libllama in {directory}", "name the folder that holds libllama.so and libggml*.so"
            )
        refuse_second_ggml(self.dir)
        for stem in ("libggml-base", "libggml", "libllama"):
            if stem in files:
                load_file(files[stem])
        ffi: Any = cffi.FFI()
        ffi.cdef(llama_abi.CDEF)
        self.ffi = ffi
        self.lib: Any = ffi.dlopen(str(files["libllama"]), ffi.RTLD_NOW | ffi.RTLD_LOCAL)
        self._require_functions(files["libllama"])
        self.ggml_version = self._text("ggml_version")
        llama = self._text("llama_version")
        self.version = (llama or "unversioned") + (f" (ggml {self.ggml_version})" if self.ggml_version else "")
        proved = llama_abi.prove(self.ffi, self.lib, f"llama.cpp {self.version} in {self.dir}")
        self.layout = proved.name
        self._structs = proved
        self.ggml_library = self._home_of("ggml_backend_dev_count")
        if "libggml" in files and self.ggml_library.parent.resolve() != self.dir:
            raise GgmlAsyncError(
                f"two ggml builds in one process: libllama of {self.dir} is bound to {self.ggml_library}",
                "start a fresh process, and unset LD_LIBRARY_PATH and LD_PRELOAD",
            )
        self._log = LlamaLog(self.ffi, self.lib)
        self.lib.llama_backend_init()
        self._load_backends()
        self.api_version = self._api_version()

    def devices(self) -> list[Device]:
        """Every registered device, with its memory and capabilities as they are now."""
        return [self._device(self.lib.ggml_backend_dev_get(i)) for i in range(self.lib.ggml_backend_dev_count())]

    def load_model(
        self,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = -1,
        overrides: Sequence[tuple[str, str]] = (),
        devices: Sequence[Device] | None = None,
        use_mmap: bool | None = True,
        progress: Callable[[float], None] | None = None,
    ) -> Model:
        """Load a GGUF file.

        Args:
            path: the GGUF (its first part when split).
            n_gpu_layers: layers on the GPU, -1 for all.
            overrides: (regular expression over tensor names, device or buffer type name), first match wins; llama.cpp
                itself compiles the expression, so check it before.
            devices: the devices to offload to; None for all GPUs, empty for none.
            use_mmap: map the file (True), read it (False), or leave it to llama.cpp (None).
            progress: called with 0..1 while loading.

        Raises:
            GgmlAsyncError: llama.cpp refused the file; the hint has its own words.
            UsageError: an override names no buffer type.
        """
        return Model(
            self,
            Path(path),
            n_gpu_layers=n_gpu_layers,
            overrides=overrides,
            devices=devices,
            use_mmap=use_mmap,
            progress=progress,
        )

    def buffer_type(self, name: str) -> int:
        """Address of the default buffer type of the device `name` (or of that buffer type's own name)."""
        known = []
        for device in self.devices():
            buft = self.lib.ggml_backend_dev_buffer_type(self.ffi.cast("void *", device.ptr))
            own = self._string(self.lib.ggml_backend_buft_name(buft))
            if name in (device.name, own):
                return int(self.ffi.cast("uintptr_t", buft))
            known.append(device.name)
        raise UsageError(f"unknown buffer type {name}", f"available: {', '.join(known)}")

    def error(self, message: str, fallback: str) -> GgmlAsyncError:
        """An error whose hint is what llama.cpp itself said last, or `fallback`."""
        return GgmlAsyncError(message, self._log.hint(fallback))

    def forget_complaints(self) -> None:
        """Start a new operation: complaints of earlier ones belong to no later error."""
        self._log.complaints.clear()

    def _require_functions(self, path: Path) -> None:
        names = re.findall(r"\b((?:llama|ggml)_\w+)\(", llama_abi.CDEF)
        missing = [n for n in names if n not in llama_abi.OPTIONAL and not hasattr(self.lib, n)]
        if missing:
            raise GgmlAsyncError(
                f"{path} lacks {', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}",
                "use a shared llama.cpp build of ggml 0.12, 0.25 or 0.26",
            )

    def _load_backends(self) -> None:
        # A build with compiled-in backends has its devices already; loading again would register strangers.
        for folder in dict.fromkeys((self.dir, self.ggml_library.parent)):
            if self.lib.ggml_backend_dev_count() == 0:
                self.lib.ggml_backend_load_all_from_path(os.fsencode(folder))
        if self.lib.ggml_backend_dev_count() == 0 and hasattr(self.lib, "ggml_backend_load_all"):
            self.lib.ggml_backend_load_all()

    def _api_version(self) -> int | None:
        if self.lib.ggml_backend_reg_count() == 0:
            return None
        # The first member of a registry entry, in every version; a value out of range is not taken for one.
        value = int(self.ffi.cast("int *", self.lib.ggml_backend_reg_get(0))[0])
        return value if 1 <= value <= 99 else None

    def _device(self, dev: Any) -> Device:
        lib, ffi = self.lib, self.ffi
        free, total = ffi.new("size_t *"), ffi.new("size_t *")
        lib.ggml_backend_dev_memory(dev, free, total)
        kind = lib.ggml_backend_dev_type(dev)
        caps = self._capabilities(dev, kind, total[0])
        return Device(
            name=self._string(lib.ggml_backend_dev_name(dev)),
            description=self._string(lib.ggml_backend_dev_description(dev)),
            type=_DEVICE_TYPES[kind] if 0 <= kind < len(_DEVICE_TYPES) else "accel",  # type: ignore[arg-type]
            memory_free=free[0],
            memory_total=total[0],
            async_=caps.get("async_"),
            host_buffer=caps.get("host_buffer"),
            events=caps.get("events"),
            buffer_from_host_ptr=caps.get("buffer_from_host_ptr"),
            backend=self._registry_name(dev),
            ptr=int(ffi.cast("uintptr_t", dev)),
        )

    def _registry_name(self, dev: Any) -> str:
        return self._string(self.lib.ggml_backend_reg_name(self.lib.ggml_backend_dev_backend_reg(dev)))

    def _capabilities(self, dev: Any, kind: int, total: int) -> dict[str, bool]:
        block = self.ffi.new("struct block *")
        view = self.ffi.buffer(block)
        view[:] = b"\xa5" * llama_abi.BLOCK
        self.lib.ggml_backend_dev_get_props(dev, block)
        props = llama_abi.PROPS.read(bytes(view))
        name = int(self.ffi.cast("uintptr_t", self.lib.ggml_backend_dev_name(dev)))
        flags = {key: props[key] for key in ("async_", "host_buffer", "buffer_from_host_ptr", "events")}
        known = (props["name"], props["memory_total"], props["type"]) == (name, total, kind)
        if not known or any(value not in (0, 1) for value in flags.values()):
            return {}
        return {key: bool(value) for key, value in flags.items()}

    def _home_of(self, function: str) -> Path:
        info = self.ffi.new("dl_info *")
        process = self.ffi.dlopen(None)
        address = self.ffi.cast("void *", self.ffi.addressof(self.lib, function))
        if process.dladdr(address, info) == 0 or info.dli_fname == self.ffi.NULL:
            raise GgmlAsyncError(f"cannot tell which library holds {function}", "use a shared llama.cpp build")
        return Path(os.fsdecode(self.ffi.string(info.dli_fname)))

    def _text(self, function: str) -> str | None:
        return self._string(getattr(self.lib, function)()) if hasattr(self.lib, function) else None

    def _string(self, pointer: Any) -> str:
        return "" if pointer == self.ffi.NULL else str(self.ffi.string(pointer).decode("utf-8", "replace"))


class Model:
    """A loaded model; a context manager. Closing it closes its contexts first.

    Attributes:
        n_vocab: vocabulary size, the length of one row of logits.
        n_layer: layers.
        size_bytes: bytes of all tensors.
        n_params: parameters.
    """

    def __init__(
        self,
        library: LlamaLibrary,
        path: Path,
        *,
        n_gpu_layers: int,
        overrides: Sequence[tuple[str, str]],
        devices: Sequence[Device] | None,
        use_mmap: bool | None,
        progress: Callable[[float], None] | None,
    ) -> None:
        if not path.is_file():
            raise UsageError(f"no such file: {path}", "name a GGUF file")
        self.library = library
        ffi, lib = library.ffi, library.lib
        self._keep: list[Any] = []  # llama.cpp keeps bare pointers into these
        params = ffi.new("struct block *", lib.llama_model_default_params())
        table = library._structs.model
        table.put(params, ffi, n_gpu_layers=n_gpu_layers)
        if use_mmap is not None:
            mapping = {"use_mmap": use_mmap} if "use_mmap" in table.offsets else {"load_mode": int(use_mmap)}
            table.put(params, ffi, **mapping)
        if devices is not None:
            array = ffi.new("void *[]", [ffi.cast("void *", d.ptr) for d in devices] + [ffi.NULL])
            table.put(params, ffi, devices=self._kept(array))
        if overrides:
            table.put(params, ffi, tensor_buft_overrides=self._override_array(overrides))
        raised: list[BaseException] = []
        table.put(params, ffi, progress_callback=self._progress(progress, raised))
        library.forget_complaints()
        pointer = lib.llama_model_load_from_file(os.fsencode(path), params[0])
        if pointer == ffi.NULL:
            if raised:
                raise raised[0]
            raise library.error(
                f"llama.cpp {library.version} could not load {path}", "is it a whole GGUF of a known model?"
            )
        self._finalizer = weakref.finalize(self, lib.llama_model_free, pointer)
        self.ptr = pointer
        self.contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self.n_vocab = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(pointer)))
        self.n_layer = int(lib.llama_model_n_layer(pointer))
        self.size_bytes = int(lib.llama_model_size(pointer))
        self.n_params = int(lib.llama_model_n_params(pointer))

    def desc(self) -> str:
        """llama.cpp's own one-line description of the model."""
        text = self.library.ffi.new("char[256]")
        self.library.lib.llama_model_desc(self.ptr, text, 256)
        return self.library._string(text)

    def context(
        self,
        *,
        n_ctx: int,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int,
        n_threads_batch: int | None = None,
        n_seq_max: int = 1,
        flash_attn: Literal["auto", "on", "off"] = "auto",
        op_offload: bool | None = None,
        eval_callback: EvalCallback | None = None,
    ) -> Context:
        """A new context.

        Args:
            n_ctx: tokens of all sequences together.
            n_batch: most tokens of one `decode`.
            n_ubatch: most tokens computed at once.
            n_threads: CPU threads for one token; `n_threads_batch` for more (default: the same).
            n_seq_max: sequences, numbered from 0.
            flash_attn: auto, on or off.
            op_offload: whether large batches may compute CPU weights on the GPU (default: llama.cpp's own).
            eval_callback: called as (tensor name, tensor address, ask); see ggml's eval callback.

        Raises:
            GgmlAsyncError: llama.cpp refused; the hint has its own words.
        """
        sizes = {
            "n_ctx": n_ctx,
            "n_batch": n_batch,
            "n_ubatch": n_ubatch,
            "n_threads": n_threads,
            "n_seq_max": n_seq_max,
        }
        for name, value in sizes.items():
            if value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}", "give a positive number")
        values: dict[str, Any] = {**sizes, "n_threads_batch": n_threads_batch or n_threads}
        values["flash_attn_type"] = _FLASH_ATTN[flash_attn]
        if op_offload is not None:
            values["op_offload"] = op_offload
        return Context(self, values, eval_callback)

    def close(self) -> None:
        """Free the contexts, then the model; harmless when done before."""
        for context in list(self.contexts):
            context.close()
        self._finalizer()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kept(self, value: Any) -> Any:
        self._keep.append(value)
        return value

    def _override_array(self, overrides: Sequence[tuple[str, str]]) -> Any:
        ffi = self.library.ffi
        array = ffi.new("buft_override[]", len(overrides) + 1)
        for entry, (pattern, buft) in zip(array, overrides, strict=False):
            entry.pattern = self._kept(ffi.new("char[]", pattern.encode()))
            entry.buft = ffi.cast("void *", self.library.buffer_type(buft))
        return self._kept(array)

    def _progress(self, progress: Callable[[float], None] | None, raised: list[BaseException]) -> Any:
        # Python runs signal handlers here, so Ctrl-C ends a long load instead of waiting for it.
        def tick(fraction: float, _user: Any) -> bool:
            if progress is not None:
                progress(fraction)
            return True

        return self._kept(_callback(self.library.ffi, "progress_fn", tick, raised))


def _free_context(lib: Any, pointer: Any, pool: ThreadPool | None) -> None:
    lib.llama_free(pointer)
    if pool is not None:
        pool.close()


class Context:
    """A context of a model; a context manager. Not for use by two threads at once."""

    def __init__(self, model: Model, values: dict[str, Any], eval_callback: EvalCallback | None) -> None:
        self.model = model
        library = model.library
        ffi, lib = library.ffi, library.lib
        self._raised: list[BaseException] = []
        params = ffi.new("struct block *", lib.llama_context_default_params())
        table = library._structs.context
        table.put(params, ffi, **values)
        self._eval = self._eval_callback(eval_callback) if eval_callback else ffi.NULL
        table.put(params, ffi, cb_eval=self._eval)
        library.forget_complaints()
        pointer = lib.llama_init_from_model(model.ptr, params[0])
        if pointer == ffi.NULL:
            raise library.error(
                f"llama.cpp {library.version} could not make a context of {values['n_ctx']} tokens",
                "try a smaller n_ctx or n_ubatch",
            )
        self.ptr = pointer
        pool = self._attach_threads(max(values["n_threads"], values["n_threads_batch"]))
        self._finalizer = weakref.finalize(self, _free_context, lib, pointer, pool)
        model.contexts.add(self)
        self.n_ctx = int(lib.llama_n_ctx(pointer))
        self.n_batch = int(lib.llama_n_batch(pointer))
        self.n_ubatch = int(lib.llama_n_ubatch(pointer))
        self.n_seq_max = int(lib.llama_n_seq_max(pointer))
        self._next: collections.Counter[int] = collections.Counter()

    def _attach_threads(self, n_threads: int) -> ThreadPool | None:
        library = self.model.library
        pool = ThreadPool.create(library, n_threads) if n_threads > 1 else None
        if pool is not None:
            library.lib.llama_attach_threadpool(self.ptr, pool.ptr, library.ffi.NULL)
        return pool

    def decode(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        *,
        pos: int | None = None,
        seq_ids: Sequence[int] | None = None,
        logits: Literal["last", "all"] = "last",
    ) -> None:
        """Decode one batch. May return before the device has finished: `logits` and `synchronize` wait.

        Args:
            tokens: token ids, at most `n_batch`.
            pos: position of the first token of every sequence; None appends.
            seq_ids: the sequence of each token (default: all 0), each sequence's tokens in order.
            logits: rows to compute: each sequence's last token, or all.

        Raises:
            UsageError: an id out of range, nothing to decode, or more than n_batch tokens.
            GgmlAsyncError: no room in the context, or the computation failed.
        """
        library = self.model.library
        ids = np.ascontiguousarray(tokens, dtype=np.int32)
        sequences = np.zeros(ids.size, np.int32) if seq_ids is None else np.ascontiguousarray(seq_ids, dtype=np.int32)
        self._check(ids, sequences)
        start = self._next if pos is None else collections.Counter({int(s): pos for s in sequences})
        position = collections.Counter(start)
        positions = np.empty(ids.size, np.int32)
        last: dict[int, int] = {}
        for i, sequence in enumerate(sequences.tolist()):
            positions[i] = position[sequence]
            position[sequence] += 1
            last[sequence] = i
        wanted = np.full(ids.size, logits == "all", np.int8)
        wanted[list(last.values())] = 1
        library.forget_complaints()
        code = self._decode(ids, positions, sequences, wanted)
        if self._raised:
            raise self._raised.pop()
        if code != 0:
            raise self._failure(code, ids.size)
        for sequence in last:
            self._next[sequence] = position[sequence]

    def synchronize(self) -> None:
        """Wait until every computation of this context is done."""
        self.model.library.lib.llama_synchronize(self.ptr)

    def logits(self, i: int = -1) -> Floats:
        """Logits of the batch's token `i` (negative: of the rows computed, from the end); waits for them.

        Returns:
            A view [n_vocab], good until the next `decode`: copy it to keep it.
        """
        library = self.model.library
        library.forget_complaints()
        pointer = library.lib.llama_get_logits_ith(self.ptr, i)
        if pointer == library.ffi.NULL:
            raise library.error(f"no logits were computed for token {i}", 'decode with logits="all"')
        row: Floats = np.frombuffer(library.ffi.buffer(pointer, 4 * self.model.n_vocab), dtype=np.float32)
        return row

    def clear_memory(self) -> None:
        """Forget every sequence, data included; the next `decode` starts at position 0."""
        lib = self.model.library.lib
        lib.llama_memory_clear(lib.llama_get_memory(self.ptr), True)
        self._next.clear()

    def close(self) -> None:
        """Free the context; harmless when done before."""
        self._finalizer()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, ids: npt.NDArray[np.int32], sequences: npt.NDArray[np.int32]) -> None:
        # llama.cpp aborts the process on some of these.
        if ids.ndim != 1 or ids.size == 0 or ids.size != sequences.size:
            raise UsageError("nothing to decode, or not one sequence id for each token", "give one row of tokens")
        if ids.size > self.n_batch:
            raise UsageError(f"{ids.size} tokens in one batch, n_batch is {self.n_batch}", "decode in pieces")
        if ids.min() < 0 or ids.max() >= self.model.n_vocab:
            raise UsageError(f"token ids outside 0..{self.model.n_vocab - 1}", "use tokens of this model's vocabulary")
        if sequences.min() < 0 or sequences.max() >= self.n_seq_max:
            raise UsageError(f"sequence ids outside 0..{self.n_seq_max - 1}", "raise n_seq_max")

    def _decode(self, ids: Any, positions: Any, sequences: Any, wanted: Any) -> int:
        library = self.model.library
        ffi = library.ffi
        ones = np.ones(ids.size, np.int32)
        addresses = sequences.ctypes.data + 4 * np.arange(ids.size, dtype=np.uintp)
        batch = ffi.new("batch *")
        batch.n_tokens = ids.size
        batch.token = ffi.cast("int32_t *", ids.ctypes.data)
        batch.pos = ffi.cast("int32_t *", positions.ctypes.data)
        batch.n_seq_id = ffi.cast("int32_t *", ones.ctypes.data)
        batch.seq_id = ffi.cast("int32_t **", addresses.ctypes.data)
        batch.logits = ffi.cast("int8_t *", wanted.ctypes.data)
        return int(library.lib.llama_decode(self.ptr, batch[0]))

    def _failure(self, code: int, n_tokens: int) -> GgmlAsyncError:
        if code == 1:
            return GgmlAsyncError(
                f"no room for {n_tokens} more tokens in a context of {self.n_ctx}", "use a larger context"
            )
        return self.model.library.error(f"llama_decode failed with code {code}", "see llama.cpp's log (-v)")

    def _eval_callback(self, callback: EvalCallback) -> Any:
        library = self.model.library
        ffi = library.ffi

        def call(tensor: Any, ask: bool, _user: Any) -> bool:
            name = library._string(library.lib.ggml_get_name(tensor))
            return bool(callback(name, int(ffi.cast("uintptr_t", tensor)), bool(ask)))

        return _callback(ffi, "eval_fn", call, self._raised)


def _callback(ffi: Any, kind: str, function: Callable[..., bool], raised: list[BaseException]) -> Any:
    """A C callback that answers false and keeps the exception when Python raised one."""

    def keep(_type: type[BaseException], value: BaseException, _traceback: Any) -> None:
        raised.append(value)

    return ffi.callback(kind, function, error=False, onerror=keep)


_loaded: list[LlamaLibrary] = []


def load_library(directory: str | os.PathLike[str]) -> LlamaLibrary:
    """The build in `directory`, loaded once a process; a second, different one is refused.

    Raises:
        GgmlAsyncError: nothing there, it does not load, its layout is unknown, or another one is loaded already.
    """
    wanted = Path(directory).resolve()
    if _loaded and _loaded[0].dir != wanted:
        raise GgmlAsyncError(
            f"llama.cpp of {_loaded[0].dir} is loaded already, {wanted} is asked for", "start a fresh process"
        )
    if not _loaded:
        _loaded.append(LlamaLibrary(wanted))
    return _loaded[0]
