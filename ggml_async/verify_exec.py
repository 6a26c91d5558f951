"""The executor that really runs llama.cpp with the plug-in attached (see ``verify.py`` for the protocol)."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cffi
import numpy as np

from ggml_async import native
from ggml_async.errors import GgmlAsyncError, UsageError
from ggml_async.gguf_file import GgufFile
from ggml_async.llama import Context, LlamaLibrary, Model
from ggml_async.llama_load import find_libraries
from ggml_async.profile_exec import LlamaExecutor, open_executor
from ggml_async.profile_plan import LoadKey
from ggml_async.verify import Shape, Traced
from ggml_async.verify_text import Batch, Floats, Tokens, Vocab

_CDEF = """
int llama_vocab_type(const void * vocab);
int32_t llama_vocab_bos(const void * vocab);
bool llama_vocab_get_add_bos(const void * vocab);
int32_t llama_tokenize(const void * vocab, const char * text, int32_t text_len, int32_t * tokens, int32_t n_tokens_max,
    bool add_special, bool parse_special);
bool ggml_is_contiguous(const void * tensor);
size_t ggml_nbytes(const void * tensor);
void ggml_backend_tensor_get(const void * tensor, void * data, size_t offset, size_t size);
"""
_VOCAB_NONE = 0
_NO_ROOM = -(2**31)


class Functions:
    """What verify needs of libllama and ggml beyond ``llama.py``: tokens, and tensors' data."""

    def __init__(self, library: LlamaLibrary) -> None:
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(_CDEF)
        libllama = find_libraries(library.dir)["libllama"]
        # both are loaded already: these are handles to them
        self.llama: Any = self.ffi.dlopen(str(libllama))
        self.ggml: Any = self.ffi.dlopen(str(library.ggml_library))

    def vocab(self, model: Model) -> Vocab:
        """Of a loaded model."""
        vocab = self._vocab(model)
        tokenizer = self.llama.llama_vocab_type(vocab) != _VOCAB_NONE
        # a model without a tokenizer says nothing of BOS
        bos = self.llama.llama_vocab_bos(vocab) if tokenizer and self.llama.llama_vocab_get_add_bos(vocab) else -1
        return Vocab(model.n_vocab, tokenizer, int(bos) if bos >= 0 else None)

    def tokenize(self, model: Model, text: bytes) -> Tokens:
        """With special tokens added where the model wants them, none parsed from the text."""
        out = np.empty(len(text) + 2, np.int32)
        while True:
            got = self.llama.llama_tokenize(
                self._vocab(model), text, len(text), self.ffi.cast("int32_t *", out.ctypes.data), len(out), True, False
            )
            if got >= 0:
                return out[:got]
            if got == _NO_ROOM:
                raise UsageError("the text is too long for llama.cpp's tokenizer", "give a shorter one (-f)")
            out = np.empty(-got, np.int32)

    def digest(self, tensor: int) -> bytes:
        """Of a tensor's data, wherever it lies."""
        pointer = self.ffi.cast("void *", tensor)
        data = np.empty(self.ggml.ggml_nbytes(pointer), np.uint8)
        self.ggml.ggml_backend_tensor_get(pointer, self.ffi.cast("void *", data.ctypes.data), 0, len(data))
        return hashlib.blake2b(data.data, digest_size=16).digest()

    def readable(self, tensor: int) -> bool:
        """Whether its bytes are its own: between those of a strided view lies what nobody wrote."""
        pointer = self.ffi.cast("void *", tensor)
        return bool(self.ggml.ggml_is_contiguous(pointer)) and self.ggml.ggml_nbytes(pointer) > 0

    def _vocab(self, model: Model) -> Any:
        address = model.library.ffi.cast("uintptr_t", model.library.lib.llama_model_get_vocab(model.ptr))
        return self.ffi.cast("void *", int(address))


class LlamaSession:
    """See verify.Session."""

    def __init__(self, contexts: dict[str, Context], host: native.Host) -> None:
        self._contexts = contexts
        self._host = host

    def clear(self, arm: str) -> None:
        """See verify.Session."""
        context = self._contexts[arm]
        context.synchronize()
        context.clear_memory()

    def decode(self, arm: str, batch: Batch) -> Iterator[Floats]:
        """See verify.Session."""
        context = self._contexts[arm]
        self._host.mode = native.Mode(arm)
        context.decode(batch.tokens, seq_ids=batch.sequences.tolist(), logits="all")
        for i in range(len(batch.tokens)):
            yield context.logits(i)

    def counters(self) -> dict[str, int]:
        """See verify.Session."""
        return self._host.counters()

    def close(self) -> None:
        """See verify.Session."""
        for context in self._contexts.values():
            context.close()


class VerifyExecutor:
    """llama.cpp in this process, as ``profile`` has it. Close it: it frees the models and detaches."""

    def __init__(self, base: LlamaExecutor, dense: Path | None) -> None:
        self._base = base
        self._library = base._library
        self._host = base._host
        self._dense_path = dense
        self._dense: Model | None = None
        self._functions = Functions(self._library)
        self.devices = base.devices
        self.describe = base.describe

    def close(self) -> None:
        """Free the models, detach; harmless when done before."""
        self._close_dense()
        self._base.close()

    def utc(self) -> datetime.datetime:
        """See verify.Executor."""
        return self._base.utc()

    def load(self, key: LoadKey) -> None:
        """See verify.Executor."""
        self._close_dense()
        self._base.load(key)

    def load_dense(self) -> None:
        """See verify.Executor."""
        assert self._dense_path is not None
        self._dense = self._library.load_model(self._dense_path, n_gpu_layers=0, devices=[])

    def vocab(self) -> Vocab:
        """See verify.Executor."""
        return self._functions.vocab(self._model())

    def tokenize(self, text: bytes) -> Tokens:
        """See verify.Executor."""
        return self._functions.tokenize(self._model(), text)

    def open(self, shape: Shape, arms: Sequence[str]) -> LlamaSession:
        """See verify.Executor."""
        with contextlib.ExitStack() as stack:
            contexts = {arm: stack.enter_context(self._context(shape, arm)) for arm in arms}
            stack.pop_all()
        return LlamaSession(contexts, self._host)

    def trace(self, shape: Shape, arm: str, batches: Sequence[Batch], only: str | None) -> list[Traced]:
        """See verify.Executor."""
        found: list[Traced] = []

        def callback(name: str, tensor: int, ask: bool) -> bool:
            if ask:
                return self._functions.readable(tensor) and (only is None or name.startswith(only))
            found.append((name, self._functions.digest(tensor)))
            return True

        self._host.mode = native.Mode(arm)
        with self._context(shape, arm, eval_callback=callback) as context:
            for batch in batches:
                context.decode(batch.tokens, seq_ids=batch.sequences.tolist(), logits="all")
            context.synchronize()
        return found

    def _context(self, shape: Shape, arm: str, **more: Any) -> Context:
        config = shape.config
        return self._model(arm).context(
            n_ctx=shape.n_ctx,
            n_seq_max=shape.n_seq,
            n_batch=min(config.n_batch, shape.n_ctx),
            n_ubatch=min(config.n_ubatch, config.n_batch, shape.n_ctx),
            n_threads=config.n_threads,
            flash_attn=config.flash_attn,  # type: ignore[arg-type]  # checked by the plan
            op_offload=not config.no_op_offload,
            **more,
        )

    def _model(self, _arm: str = "") -> Model:
        """The same for both arms, outside of tests."""
        return self._dense or self._base._loaded()

    def _close_dense(self) -> None:
        if self._dense is not None:
            self._dense.close()
            self._dense = None


def open_verify_executor(
    model_file: GgufFile,
    dense: GgufFile | None,
    llama: Path | None,
    should_stop: Callable[[], bool],
    say: Callable[[str], None],
) -> VerifyExecutor:
    """Choose, load and attach to a llama.cpp build.

    Raises GgmlAsyncError: no usable build, the plug-in cannot attach to it (exit code 3), or the dense model has
    another vocabulary.
    """
    if dense is not None and dense.n_vocab != model_file.n_vocab:
        raise UsageError(
            f"--dense: {dense.path} has {dense.n_vocab} tokens, {model_file.path} has {model_file.n_vocab}",
            "name the dense model that MODEL was unfolded from",
        )
    base = open_executor(model_file, llama, should_stop, say, use_layer=False)
    try:
        return VerifyExecutor(base, dense.path if dense else None)
    except (GgmlAsyncError, OSError, AttributeError) as error:
        base.close()
        raise GgmlAsyncError(f"this llama.cpp lacks what verify needs: {error}", "use the pinned one") from None
