"""What we must know of libllama's structs, as tables, and the proof that a loaded library has them.

No header is there at run time, so every struct that libllama passes by value is an opaque block larger than any known
one (a callee reads only its own bytes of it), and the tables say where each field lies. A table counts as right only
when *all* defaults the library itself reports are found at its offsets, and, where the calling convention lets us hand
in a poisoned block (x86-64), when nothing but the table's own fields was written.
"""

from __future__ import annotations

import platform
import struct
from dataclasses import dataclass
from typing import Any

from .errors import GgmlAsyncError

#: Bytes of the opaque parameter block; every known struct is smaller than 200 bytes.
BLOCK = 1024
_POISON = 0xA5

CDEF = f"""
struct block {{ char bytes[{BLOCK}]; }};
typedef struct batch {{
    int32_t n_tokens; int32_t * token; float * embd; int32_t * pos; int32_t * n_seq_id; int32_t ** seq_id;
    int8_t * logits;
}} batch;
typedef struct buft_override {{ const char * pattern; void * buft; }} buft_override;
typedef void (*log_fn)(int level, const char * text, void * user_data);
typedef bool (*progress_fn)(float progress, void * user_data);
typedef bool (*eval_fn)(void * tensor, bool ask, void * user_data);
typedef struct {{ const char * dli_fname; void * dli_fbase; const char * dli_sname; void * dli_saddr; }} dl_info;
int dladdr(const void * address, dl_info * info);

const char * llama_version(void);
const char * ggml_version(void);
struct block llama_model_default_params(void);
struct block llama_context_default_params(void);
void llama_backend_init(void);
void llama_log_set(log_fn callback, void * user_data);
void * llama_model_load_from_file(const char * path, struct block params);
void llama_model_free(void * model);
void * llama_init_from_model(void * model, struct block params);
void llama_free(void * ctx);
void * llama_get_memory(const void * ctx);
void llama_memory_clear(void * memory, bool data);
const void * llama_model_get_vocab(const void * model);
int32_t llama_vocab_n_tokens(const void * vocab);
int32_t llama_model_n_layer(const void * model);
int32_t llama_model_desc(const void * model, char * text, size_t size);
uint64_t llama_model_size(const void * model);
uint64_t llama_model_n_params(const void * model);
uint32_t llama_n_ctx(const void * ctx);
uint32_t llama_n_batch(const void * ctx);
uint32_t llama_n_ubatch(const void * ctx);
uint32_t llama_n_seq_max(const void * ctx);
batch llama_batch_init(int32_t n_tokens, int32_t embd, int32_t n_seq_max);
void llama_batch_free(batch b);
int32_t llama_decode(void * ctx, batch b);
void llama_synchronize(void * ctx);
void llama_attach_threadpool(void * ctx, void * threadpool, void * threadpool_batch);
float * llama_get_logits_ith(void * ctx, int32_t i);

void ggml_backend_load_all(void);
void ggml_backend_load_all_from_path(const char * dir);
size_t ggml_backend_reg_count(void);
void * ggml_backend_reg_get(size_t index);
const char * ggml_backend_reg_name(void * reg);
size_t ggml_backend_dev_count(void);
void * ggml_backend_dev_get(size_t index);
const char * ggml_backend_dev_name(void * dev);
const char * ggml_backend_dev_description(void * dev);
void ggml_backend_dev_memory(void * dev, size_t * free, size_t * total);
int ggml_backend_dev_type(void * dev);
void ggml_backend_dev_get_props(void * dev, void * props);
void * ggml_backend_dev_buffer_type(void * dev);
void * ggml_backend_dev_backend_reg(void * dev);
const char * ggml_backend_buft_name(void * buft);
void * ggml_backend_reg_get_proc_address(void * reg, const char * name);
void ggml_threadpool_params_init(void * params, int n_threads);
const char * ggml_get_name(const void * tensor);
"""

#: Functions a library may lack; every other one of CDEF is required.
OPTIONAL = {
    "llama_version",
    "ggml_version",
    "ggml_backend_load_all",
    "ggml_backend_reg_get_proc_address",
    "ggml_threadpool_params_init",
    "llama_attach_threadpool",
    "dladdr",
}

NULL = "P"
FieldTable = tuple[tuple[str, str, Any], ...]


@dataclass(frozen=True)
class Struct:
    """One C struct: field name -> (offset, struct code); size in bytes, tail padding included."""

    offsets: dict[str, tuple[int, str]]
    defaults: dict[str, Any]
    size: int

    def put(self, block: Any, ffi: Any, **values: Any) -> None:
        """Write fields into an opaque block (a pointer value or ffi.NULL for pointer fields)."""
        view = ffi.buffer(block, BLOCK)
        for name, value in values.items():
            offset, code = self.offsets[name]
            number = int(ffi.cast("uintptr_t", value)) if code == NULL else value
            view[offset : offset + struct.calcsize(code)] = struct.pack(code, number)

    def read(self, raw: bytes) -> dict[str, Any]:
        """Every field's value; a bool as its byte, so that a value that is none shows."""
        codes = {name: ("B" if code == "?" else code, offset) for name, (offset, code) in self.offsets.items()}
        return {name: struct.unpack_from(code, raw, offset)[0] for name, (code, offset) in codes.items()}

    def mismatch(self, raw: bytes) -> str | None:
        """The first field of `raw` whose value is not the known default, in words; None when all are."""
        values = self.read(raw)
        for name, (offset, code) in self.offsets.items():
            expected, got = self.defaults[name], values[name]
            if (name.startswith("n_threads") and 1 <= got <= 1024) or got == expected:
                continue
            return f"{name} at byte {offset} is {got}, expected {int(expected) if code == '?' else expected}"
        return None


def _struct(table: FieldTable) -> Struct:
    offsets: dict[str, tuple[int, str]] = {}
    position, widest = 0, 1
    for name, code, _ in table:
        size = struct.calcsize(code)
        position = -(-position // size) * size
        offsets[name] = (position, code)
        position += size
        widest = max(widest, size)
    return Struct(offsets, {name: default for name, _, default in table}, -(-position // widest) * widest)


@dataclass(frozen=True)
class Layout:
    """The parameter structs of one era of libllama."""

    name: str
    model: Struct
    context: Struct


def _pointers(*names: str) -> FieldTable:
    return tuple((name, NULL, 0) for name in names)


def _bools(**defaults: bool) -> FieldTable:
    return tuple((name, "?", value) for name, value in defaults.items())


def _ints(**defaults: int) -> FieldTable:
    return tuple((name, "i", value) for name, value in defaults.items())


_HEAD = _pointers("devices", "tensor_buft_overrides") + _ints(n_gpu_layers=-1, split_mode=1)
_MIDDLE = _pointers("tensor_split", "progress_callback", "progress_callback_user_data", "kv_overrides")
_ROPE: FieldTable = (
    *_ints(rope_scaling_type=-1, pooling_type=-1, attention_type=-1, flash_attn_type=-1),
    ("rope_freq_base", "f", 0.0),
    ("rope_freq_scale", "f", 0.0),
    ("yarn_ext_factor", "f", -1.0),
    ("yarn_attn_factor", "f", -1.0),
    ("yarn_beta_fast", "f", -1.0),
    ("yarn_beta_slow", "f", -1.0),
    ("yarn_orig_ctx", "I", 0),
    ("defrag_thold", "f", -1.0),
    *_pointers("cb_eval", "cb_eval_user_data"),
    *_ints(type_k=1, type_v=1),
    *_pointers("abort_callback", "abort_callback_data"),
    *_bools(embeddings=False, offload_kqv=True, no_perf=True, op_offload=True, swa_full=True, kv_unified=False),
    *_pointers("samplers", "n_samplers"),
)
_SIZES = _ints(n_ctx=512, n_batch=2048, n_ubatch=512, n_seq_max=1, n_rs_seq=0)

LAYOUTS = (
    # ggml 0.25 and 0.26: read in llama.cpp's headers, measured on the pinned runtime.
    Layout(
        "load_mode",
        _struct(
            _HEAD
            + _ints(load_mode=-1, lazy_mode=1, main_gpu=0)
            + _MIDDLE
            + _bools(
                vocab_only=False,
                check_tensors=False,
                use_extra_bufts=True,
                no_host=False,
                no_alloc=False,
                load_mtp=False,
            )
        ),
        _struct(
            _SIZES
            + _ints(n_outputs_max=0, n_outputs_max_per_seq=1, n_threads=4, n_threads_batch=4, ctx_type=0)
            + _ROPE
            + _pointers("ctx_other")
        ),
    ),
    # ggml 0.12: measured on cyllama-vulkan's libllama.
    Layout(
        "use_mmap",
        _struct(
            _HEAD
            + _ints(main_gpu=0)
            + _MIDDLE
            + _bools(
                vocab_only=False,
                use_mmap=True,
                use_direct_io=False,
                use_mlock=False,
                check_tensors=False,
                use_extra_bufts=True,
                no_host=False,
                no_alloc=False,
            )
        ),
        _struct(_SIZES + _ints(n_threads=4, n_threads_batch=4, ctx_type=0) + _ROPE),
    ),
)

#: ggml_backend_dev_props: the four capabilities of every known version come right after the id.
PROPS = _struct(
    (
        *_pointers("name", "description", "memory_free", "memory_total"),
        *_ints(type=0),
        *_pointers("device_id"),
        *_bools(async_=False, host_buffer=False, buffer_from_host_ptr=False, events=False),
    )
)


def prove(ffi: Any, lib: Any, who: str) -> Layout:
    """The layout `lib` has, proved; raises GgmlAsyncError naming the library's version (`who`) when none fits."""
    if struct.calcsize("P") != 8:
        raise GgmlAsyncError(f"{who}: only 64-bit libraries are known", "use a 64-bit llama.cpp")
    model_raw = _defaults(ffi, lib, "llama_model_default_params")
    context_raw = _defaults(ffi, lib, "llama_context_default_params")
    reasons = []
    for layout in LAYOUTS:
        reason = _differs("model", layout.model, model_raw) or _differs("context", layout.context, context_raw)
        if reason is None:
            _prove_batch(ffi, lib, who)
            return layout
        reasons.append(f"layout {layout.name}: {reason}")
    raise GgmlAsyncError(
        f"the parameter structs of {who} are not known ({'; '.join(reasons)})",
        "use a llama.cpp of ggml 0.12, 0.25 or 0.26, or leave --llama away to use the pinned one",
    )


def _differs(kind: str, table: Struct, raw: bytes) -> str | None:
    reason = table.mismatch(raw)
    if reason is None and _poisonable():
        # Padding may or may not be written; nothing behind the struct may be.
        written = len(raw.rstrip(bytes([_POISON])))
        last = max(offset + struct.calcsize(code) for offset, code in table.offsets.values())
        if not last <= written <= table.size:
            reason = f"{written} bytes written, expected {table.size}"
    return f"{kind} parameters: {reason}" if reason else None


def _poisonable() -> bool:
    # On x86-64 the caller's result block is an ordinary first argument; on aarch64 it has a register of its own.
    return platform.machine() in ("x86_64", "AMD64")


def _defaults(ffi: Any, lib: Any, name: str) -> bytes:
    if not _poisonable():
        block = ffi.new("struct block *", getattr(lib, name)())
        return bytes(ffi.buffer(block))
    block = ffi.new("struct block *")
    ffi.buffer(block)[:] = bytes([_POISON]) * BLOCK
    ffi.cast("void * (*)(void *)", ffi.addressof(lib, name))(block)
    return bytes(ffi.buffer(block))


def _prove_batch(ffi: Any, lib: Any, who: str) -> None:
    b = lib.llama_batch_init(1, 0, 1)
    null = ffi.NULL
    filled = (b.token, b.pos, b.n_seq_id, b.seq_id, b.logits)
    if b.n_tokens != 0 or b.embd != null or null in filled:
        raise GgmlAsyncError(f"the batch struct of {who} is not known", "use a llama.cpp of ggml 0.12, 0.25 or 0.26")
    lib.llama_batch_free(b)
