"""Makes models: a dense llama GGUF unfolded into a mixture of experts, and random models of any shape.

Both stream: a tensor at a time at most is in memory, the file appears under its name only when it is complete.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, LlamaFileType

from ggml_async import gguf_file
from ggml_async.errors import GgmlAsyncError, UsageError
from ggml_async.gguf_file import GgufFile, TensorInfo

Bytes = npt.NDArray[np.uint8]
Type = GGMLQuantizationType

MAX_EXPERTS = 512  #: LLAMA_MAX_EXPERTS of the oldest llama.cpp supported
CHUNK = 16 << 20  #: bytes, of one read or write
POOL_BYTES = 32 << 20  #: random data generated for each (type, fan-in) and repeated with shifting phase

#: Where a block keeps its half-precision scales, in bytes. Its weights are linear in them, so to scale these is to
#: scale the weights; a test holds every row against gguf.quants.dequantize.
HALF_SCALES: dict[GGMLQuantizationType, tuple[int, ...]] = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
}
_FLOATS = (Type.F32, Type.F16, Type.BF16)

#: Arguments of `make_synthetic` by name; tiny ones have quant-block sizes (256) that every type fits.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "n_layer": 4, "n_expert": 8, "n_expert_used": 2, "n_embd": 256, "n_ff": 256,
        "n_head": 4, "n_head_kv": 2, "head_dim": 64, "n_vocab": 512,
    },
    "tiny-dense": {
        "n_layer": 4, "n_expert": 0, "n_expert_used": 0, "n_embd": 256, "n_ff": 512,
        "n_head": 4, "n_head_kv": 2, "head_dim": 64, "n_vocab": 512, "dense": True,
    },
    "qwen3-30b-a3b": {
        "n_layer": 48, "n_expert": 128, "n_expert_used": 8, "n_embd": 2048, "n_ff": 768,
        "n_head": 32, "n_head_kv": 4, "head_dim": 128, "n_vocab": 151936,
    },
}  # fmt: skip

_EXPERT_RULE = f"Needed: 1 <= used <= experts <= {MAX_EXPERTS}."
_log = logging.getLogger("ggml_async.models")


# ---- writing


class _Tensor(NamedTuple):
    name: str
    type: GGMLQuantizationType | int
    shape: tuple[int, ...]  # ne order
    nbytes: int
    data: Callable[[], Iterable[Bytes]]


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _kv(key: str, value: str | int | float | list[int]) -> bytes:
    """Pack one metadata record: strings, uint32, float32, arrays of int32."""
    head = _string(key)
    if isinstance(value, str):
        return head + struct.pack("<I", GGUFValueType.STRING) + _string(value)
    if isinstance(value, int):
        return head + struct.pack("<II", GGUFValueType.UINT32, value)
    if isinstance(value, float):
        return head + struct.pack("<If", GGUFValueType.FLOAT32, value)
    array = struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType.INT32, len(value))
    return head + array + struct.pack(f"<{len(value)}i", *value)


def _pad(n: int, alignment: int) -> int:
    return -n % alignment


def _check_target(dst: Path, needed: int) -> Path:
    """Resolve `dst`, and refuse what the final rename could not do or should not replace."""
    dst = Path(os.path.realpath(dst))
    if dst.is_dir() or (dst.exists() and not dst.is_file()):
        raise UsageError(f"{dst}: exists and is not a regular file", "Name a file to write the model to.")
    if not dst.parent.is_dir():
        raise UsageError(f"{dst}: its folder does not exist", f"Create it: mkdir -p {dst.parent}")
    free = shutil.disk_usage(dst.parent).free
    if free < needed:
        raise GgmlAsyncError(
            f"{dst}: the model needs {needed / 1e9:.3f} GB, the disk has {free / 1e9:.3f} GB free",
            "Free some space, name another folder, or ask for a smaller model.",
        )
    return dst


def _write(
    dst: Path,
    kv: list[bytes],
    tensors: list[_Tensor],
    alignment: int = gguf_file.DEFAULT_ALIGNMENT,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a GGUF file; `dst` is replaced when all of it is there, and nothing is left when it fails."""
    header = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(kv)))
    header += b"".join(kv)
    offset = 0
    for tensor in tensors:
        header += _string(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        header += struct.pack("<IQ", tensor.type, offset)
        offset += tensor.nbytes + _pad(tensor.nbytes, alignment)
    header += bytes(_pad(len(header), alignment))
    total = len(header) + offset
    dst = _check_target(dst, total)
    temporary = dst.with_name(f".{dst.name[:200]}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb", buffering=0) as file:
            done = file.write(header)
            for tensor in tensors:
                written = 0
                for chunk in tensor.data():
                    written += _write_all(file.write, np.ascontiguousarray(chunk).reshape(-1).data)
                    if progress is not None:
                        progress(done + written, total)
                if written != tensor.nbytes:
                    raise GgmlAsyncError(f"{dst}: {tensor.name} came out as {written} bytes instead of {tensor.nbytes}")
                done += written + _write_all(file.write, memoryview(bytes(_pad(written, alignment))))
        temporary.replace(dst)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        hint = "Free some space or name another folder." if full else "Check the folder and the disk."
        raise GgmlAsyncError(f"{dst}: cannot be written: {error.strerror or error}", hint) from None
    finally:
        temporary.unlink(missing_ok=True)


def _write_all(write: Callable[[memoryview], int | None], data: memoryview) -> int:
    """Write all of `data` to an unbuffered file (the kernel takes 2 GiB a call at most)."""
    done = 0
    while done < len(data):
        done += write(data[done : done + CHUNK]) or 0
    return done


# ---- dense -> mixture of experts


def scale_blocks(data: Bytes, kind: GGMLQuantizationType | int, factor: int) -> Bytes:
    """Multiply weights by `factor` through their scales, without touching the quants.

    Exact when `factor` is a power of two; otherwise each scale is rounded once.

    Args:
        data: uint8, whole blocks, any shape.
        kind: their ggml type; float types and the keys of `HALF_SCALES`.
        factor: positive.

    Returns:
        A new array of the same shape.

    Raises:
        UsageError: unknown layout, or a scale leaves the range of its type.
    """
    flat = np.ascontiguousarray(data).reshape(-1)
    out: Bytes
    with np.errstate(over="ignore", invalid="ignore"):  # looked for below
        if kind == Type.F32:
            values = flat.view(np.float32) * np.float32(factor)
            out, finite = values.view(np.uint8), bool(np.isfinite(values).all())
        elif kind == Type.F16:
            halves = (flat.view(np.float16).astype(np.float32) * factor).astype(np.float16)
            out, finite = halves.view(np.uint8), bool(np.isfinite(halves).all())
        elif kind == Type.BF16:
            wide = (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            bits = (wide * np.float32(factor)).view(np.uint32)
            rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            out, finite = rounded.view(np.uint8), bool(((rounded & 0x7F80) != 0x7F80).all())
        elif isinstance(kind, Type) and kind in HALF_SCALES:
            blocks = flat.reshape(-1, GGML_QUANT_SIZES[kind][1]).copy()
            finite = True
            for at in HALF_SCALES[kind]:
                scales = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)
                scales = (scales * np.float32(factor)).astype(np.float16)
                blocks[:, at : at + 2] = scales.view(np.uint8)
                finite = finite and bool(np.isfinite(scales).all())
            out = blocks
        else:
            known = ", ".join(sorted(k.name for k in (*HALF_SCALES, *_FLOATS)))
            raise UsageError(f"cannot scale weights of type {_type_name(kind)}", f"Types that can be scaled: {known}.")
    if not finite:
        raise UsageError(
            f"weights of type {_type_name(kind)} times {factor} leave the range of their scales",
            "Use fewer experts at a time, or a model of another quantisation.",
        )
    result: Bytes = out.reshape(data.shape)
    return result


def _type_name(kind: GGMLQuantizationType | int) -> str:
    return kind.name if isinstance(kind, Type) else f"number {int(kind)}"


def make_moe(  # noqa: PLR0917
    src: Path, dst: Path, n_expert: int = 8, n_used: int | None = None, router_scale: float = 0.0, seed: int = 0
) -> None:
    """Unfold the dense FFN of a llama GGUF into experts that hold the same weights.

    Rows of gate and up, and the matching columns of down, go to one expert each. A zero router gives each used expert
    the weight 1/n_used, so down is multiplied by n_used (by n_expert with a random router, whose weights vary around
    that): with all experts used the result is the dense model's, exact but for the order of sums if n_used is a power
    of two.

    Args:
        src: a dense GGUF of architecture llama, split or not.
        dst: the file to write; replaced only when complete.
        n_expert: experts of each layer.
        n_used: experts used per token; all of them by default. Fewer is a real sparse decode of another model.
        router_scale: standard deviation of the router's weights; 0 is the uniform router.
        seed: of the router.

    Raises:
        UsageError: bad source, an expert count that the blocks do not allow, a type whose scales are not known.
        GgmlAsyncError: the disk is full or cannot be written.
    """
    n_used = n_expert if n_used is None else n_used
    if not 1 <= n_used <= n_expert <= MAX_EXPERTS:
        raise UsageError(f"{n_used} of {n_expert} experts cannot be used", _EXPERT_RULE)
    if not (math.isfinite(router_scale) and router_scale >= 0):
        raise UsageError(f"router scale {router_scale} is not a finite number >= 0", "0 is the uniform router.")
    model = gguf_file.read(src)
    layers = _dense_ffn(model)
    if Path(os.path.realpath(dst)) in {Path(os.path.realpath(part)) for part in model.parts}:
        raise UsageError(f"{dst}: is the source model itself", "Name another file to write to.")
    _check_split(model, layers, n_expert)
    factor = n_used if router_scale == 0 else n_expert
    if factor & (factor - 1):
        _log.warning("%d is no power of two: scaling by it rounds, so the model is equal only nearly", factor)
    rng = np.random.default_rng(seed)
    tensors: list[_Tensor] = []
    for info in model.tensors.values():
        tensors += _unfold(info, n_expert, factor, router_scale, rng)
    _write(dst, _moe_metadata(model, n_expert, n_used), tensors, model.alignment)


_FFN = re.compile(r"blk\.([0-9]{1,9})\.ffn_(.+)")
_PARTS = ("gate.weight", "up.weight", "down.weight")


def _dense_ffn(model: GgufFile) -> dict[int, dict[str, TensorInfo]]:
    """The three matrices of each layer; refuses anything that is not a plain dense llama."""
    path = model.path
    if model.n_expert or model.expert_layers():
        raise UsageError(f"{path}: is a mixture of experts already ({model.n_expert} experts)", "Use it as it is.")
    if model.arch != "llama":
        raise UsageError(f"{path}: is of architecture {model.arch!r}, not llama", "Only llama models can be unfolded.")
    layers: dict[int, dict[str, TensorInfo]] = {}
    for info in model.tensors.values():
        if (match := _FFN.fullmatch(info.name)) is None or match[2] == "norm.weight":
            continue
        if match[2] not in _PARTS:
            raise UsageError(f"{path}: {info.name} has no place in a mixture of experts", "Use a model without it.")
        layers.setdefault(int(match[1]), {})[match[2]] = info
    if sorted(layers) != list(range(model.n_layer or -1)):
        raise UsageError(f"{path}: {len(layers)} layers have an FFN, of {model.n_layer}", "Use a complete dense model.")
    for layer, found in layers.items():
        if missing := [part for part in _PARTS if part not in found]:
            raise UsageError(f"{path}: blk.{layer}.ffn_{missing[0]} is missing", "Use a complete dense model.")
        down = found["down.weight"].shape
        if len(down) != 2 or any(found[part].shape != down[::-1] for part in _PARTS[:2]):
            raise UsageError(f"{path}: the FFN shapes of layer {layer} do not fit together", "The file is damaged.")
    return layers


def _check_split(model: GgufFile, layers: dict[int, dict[str, TensorInfo]], n_expert: int) -> None:
    """Refuse a count that would cut a block of down's columns, and say which would not."""
    blocks = 0  # greatest common divisor of the layers' blocks a row
    bad: TensorInfo | None = None
    for found in layers.values():
        down = found["down.weight"]
        if not isinstance(down.type, Type) or down.type not in (*HALF_SCALES, *_FLOATS):
            raise UsageError(
                f"{model.path}: {down.name} is of type {_type_name(down.type)}, whose scales cannot be multiplied",
                f"Types that can: {', '.join(sorted(k.name for k in (*HALF_SCALES, *_FLOATS)))}.",
            )
        in_row = down.shape[0] // GGML_QUANT_SIZES[down.type][0]
        if in_row % n_expert:
            bad = bad or down
        blocks = math.gcd(blocks, in_row)
    if bad is not None and isinstance(bad.type, Type):
        block = GGML_QUANT_SIZES[bad.type][0]
        divisors = [str(n) for n in range(1, min(blocks, MAX_EXPERTS) + 1) if blocks % n == 0]
        raise UsageError(
            f"{model.path}: {bad.name} ({bad.type.name}, {bad.shape[0]} columns in blocks of {block})"
            f" does not divide into {n_expert} experts",
            f"Counts that divide: {', '.join(divisors)}.",
        )


def _unfold(
    info: TensorInfo, n_expert: int, factor: int, router_scale: float, rng: np.random.Generator
) -> Iterator[_Tensor]:
    """What becomes of one tensor of the dense model."""
    match = _FFN.fullmatch(info.name)
    part = match[2] if match else ""
    if match is None or part not in _PARTS:
        yield _Tensor(info.name, info.type, info.shape, info.nbytes, lambda: _read_chunks(info))
        return
    width, rows = info.shape
    name = info.name.replace(".weight", "_exps.weight")
    if part == "down.weight":
        shape = (width // n_expert, rows, n_expert)
        yield _Tensor(name, info.type, shape, info.nbytes, lambda: _split_down(info, n_expert, factor))
        return
    # Experts are runs of rows: the bytes stay as they are.
    yield _Tensor(name, info.type, (width, rows // n_expert, n_expert), info.nbytes, lambda: _read_chunks(info))
    if part == "gate.weight":
        router = (rng.standard_normal((n_expert, width)) * router_scale).astype("<f4")
        router_name = f"blk.{match[1]}.ffn_gate_inp.weight"
        yield _Tensor(router_name, Type.F32, (width, n_expert), router.nbytes, lambda: [router.view(np.uint8)])


def _read_chunks(info: TensorInfo) -> Iterator[Bytes]:
    for at in range(0, info.nbytes, CHUNK):
        size = min(CHUNK, info.nbytes - at)
        yield np.fromfile(info.path, np.uint8, size, offset=info.offset + at)


def _split_down(info: TensorInfo, n_expert: int, factor: int) -> Iterator[Bytes]:
    """Down's columns, one expert after the other, scaled."""
    rows = np.fromfile(info.path, np.uint8, info.nbytes, offset=info.offset).reshape(info.shape[1], n_expert, -1)
    for expert in range(n_expert):
        try:
            yield scale_blocks(rows[:, expert], info.type, factor)
        except UsageError as error:
            raise UsageError(f"{info.path}: {info.name}: {error.message}", error.hint) from None


def _moe_metadata(model: GgufFile, n_expert: int, n_used: int) -> list[bytes]:
    """The source's records as they are, but for what changes."""
    key = "llama.feed_forward_length"
    length = model.meta.get(key)
    changed: dict[str, bytes] = {"llama.expert_count": b"", "llama.expert_used_count": b""}
    if isinstance(length, list):
        changed[key] = _kv(key, [n // n_expert for n in length])
    elif isinstance(length, int):
        changed[key] = _kv(key, length // n_expert)
    name = model.meta.get("general.name", model.path.stem)
    changed["general.name"] = _kv("general.name", f"{name} (dense FFN unfolded into {n_expert} experts, {n_used} used)")
    records = [
        changed.get(name, b"") if name in changed else model.meta.raw(name)
        for name in model.meta
        if not name.startswith("split.")
    ]
    if "general.name" not in model.meta:
        records.append(changed["general.name"])
    records += [_kv("llama.expert_count", n_expert), _kv("llama.expert_used_count", n_used)]
    return [record for record in records if record]


# ---- random models

_QUANTS: dict[str, tuple[GGMLQuantizationType, LlamaFileType]] = {
    "f32": (Type.F32, LlamaFileType.ALL_F32),
    "f16": (Type.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (Type.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (Type.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (Type.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (Type.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "q4_k": (Type.Q4_K, LlamaFileType.MOSTLY_Q4_K_S),
    "q6_k": (Type.Q6_K, LlamaFileType.MOSTLY_Q6_K),
}
QUANTS = tuple(_QUANTS)  #: what `make_synthetic` takes as `quant`


def random_blocks(kind: GGMLQuantizationType, n: int, std: float, rng: np.random.Generator) -> Bytes:
    """Random blocks whose weights have mean about 0 and standard deviation about `std`.

    Args:
        kind: one of the types in `QUANTS`.
        n: number of blocks.
        std: positive; small enough for a half-precision scale.
        rng: source of randomness.

    Returns:
        uint8 [n, bytes of a block].
    """
    size = GGML_QUANT_SIZES[kind][1]
    blocks: Bytes
    if kind in _FLOATS:
        values = rng.standard_normal(n, np.float32) * np.float32(std)
        if kind == Type.BF16:
            blocks = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8).reshape(n, size)
        else:
            blocks = values.astype("<f2" if kind == Type.F16 else "<f4").view(np.uint8).reshape(n, size)
        return blocks
    blocks = np.frombuffer(rng.bytes(n * size), np.uint8).reshape(n, size).copy()

    def half(at: int, value: float) -> None:
        blocks[:, at : at + 2] = np.frombuffer(np.array(value, "<f2").tobytes(), np.uint8)

    # 4.61, 73.9 and 18.5: standard deviations of uniform 4-, 8- and 6-bit integers; 41.9: rms of uniform 16…63.
    if kind == Type.Q8_0:
        half(0, std / 73.9)
    elif kind == Type.Q4_0:
        half(0, std / 4.61)
    elif kind == Type.Q4_1:
        half(0, std / 4.61)
        half(2, -7.5 * std / 4.61)
    elif kind == Type.Q4_K:
        # min = 7.5 × scale of the sub-block centres the quants: the same 6-bit numbers serve as scales and as mins.
        half(0, std / 4.61 / 41.9)
        half(2, 7.5 * std / 4.61 / 41.9)
        scales = 16 + rng.integers(0, 48, (n, 8), np.uint8)
        low, high = scales[:, :4], scales[:, 4:]
        blocks[:, 4:8] = blocks[:, 8:12] = low | (high >> 4 << 6)
        blocks[:, 12:16] = (high & 15) | (high & 15) << 4
    else:
        blocks[:, 192:208] = 16 + rng.integers(0, 48, (n, 16), np.uint8)
        half(208, std / 18.5 / 41.9)
    return blocks


@dataclass
class _Weights:
    """Hands out random weights: one pool of blocks for each fan-in, entered at another place for every tensor."""

    kind: GGMLQuantizationType
    seed: int
    largest: dict[int, int]  # fan-in -> bytes of the largest tensor that has it
    pools: dict[int, Bytes]

    def tensor(self, name: str, *shape: int) -> _Tensor:
        block, size = GGML_QUANT_SIZES[self.kind]
        nbytes = math.prod(shape) // block * size
        self.largest[shape[0]] = max(nbytes, self.largest.get(shape[0], 0))
        return _Tensor(name, self.kind, shape, nbytes, lambda: self._chunks(name, shape[0], nbytes))

    def _chunks(self, name: str, fan_in: int, nbytes: int) -> Iterator[Bytes]:
        size = GGML_QUANT_SIZES[self.kind][1]
        if fan_in not in self.pools:
            # An odd number of blocks: so experts and rows meet another phase each time round.
            n = min(self.largest[fan_in], POOL_BYTES) // size | 1
            rng = np.random.default_rng([self.seed, fan_in])
            self.pools[fan_in] = random_blocks(self.kind, n, 1 / math.sqrt(fan_in), rng).reshape(-1)
        pool = self.pools[fan_in]
        at = int(np.random.default_rng([self.seed, *name.encode()]).integers(len(pool) // size)) * size
        while nbytes:
            chunk = pool[at : at + nbytes]
            yield chunk
            nbytes -= len(chunk)
            at = 0


def _plain(name: str, values: npt.NDArray[np.float32]) -> _Tensor:
    data = np.ascontiguousarray(values, "<f4")
    return _Tensor(name, Type.F32, data.shape[::-1], data.nbytes, lambda: [data.view(np.uint8)])


def make_synthetic(
    dst: Path,
    *,
    n_layer: int,
    n_expert: int,
    n_expert_used: int,
    n_embd: int,
    n_ff: int,
    n_head: int = 32,
    n_head_kv: int = 4,
    head_dim: int = 128,
    n_vocab: int,
    n_ctx: int = 4096,
    quant: str = "q4_0",
    dense: bool = False,
    seed: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a random qwen3moe model (qwen3 when `dense`), without a tokenizer; the same arguments give the same bytes.

    Args:
        dst: the file to write; replaced only when complete.
        n_layer: blocks.
        n_expert: experts of each layer (ignored when dense).
        n_expert_used: experts used per token (ignored when dense).
        n_embd: width of the model.
        n_ff: width of one expert's FFN (of the FFN when dense).
        n_head: attention heads.
        n_head_kv: key/value heads; divides n_head.
        head_dim: size of a head; even.
        n_vocab: tokens.
        n_ctx: context length that the model claims.
        quant: type of all matrices, one of `QUANTS`; norms and routers are f32.
        dense: no experts.
        seed: of all weights.
        progress: called with (bytes done, bytes in total).

    Raises:
        UsageError: sizes that do not fit together or into blocks.
        GgmlAsyncError: not enough space on the disk, or it cannot be written.
    """
    sizes = {
        "n_layer": n_layer, "n_embd": n_embd, "n_ff": n_ff, "n_head": n_head, "n_head_kv": n_head_kv,
        "head_dim": head_dim, "n_vocab": n_vocab, "n_ctx": n_ctx,
    }  # fmt: skip
    if not dense:
        sizes |= {"n_expert": n_expert, "n_expert_used": n_expert_used}
    kind, file_type = _check_shape(sizes, quant)
    if seed < 0:
        raise UsageError(f"seed {seed} is negative", "Use 0 or more.")
    arch = "qwen3" if dense else "qwen3moe"
    metadata: dict[str, str | int | float] = {
        "general.architecture": arch,
        "general.name": f"synthetic {arch} {n_layer}x{n_embd} {quant} seed {seed}",
        "general.file_type": int(file_type),
        "general.quantization_version": 2,
        f"{arch}.context_length": n_ctx,
        f"{arch}.embedding_length": n_embd,
        f"{arch}.block_count": n_layer,
        f"{arch}.feed_forward_length": n_ff,
        f"{arch}.attention.head_count": n_head,
        f"{arch}.attention.head_count_kv": n_head_kv,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.freq_base": 1e6,
        f"{arch}.vocab_size": n_vocab,
        "tokenizer.ggml.model": "none",
    }
    if not dense:
        metadata |= {
            f"{arch}.expert_feed_forward_length": n_ff,
            f"{arch}.expert_count": n_expert,
            f"{arch}.expert_used_count": n_expert_used,
        }
    weights = _Weights(kind, seed, {}, {})
    tensors = [
        weights.tensor("token_embd.weight", n_embd, n_vocab),
        _plain("output_norm.weight", np.ones(n_embd, np.float32)),
        weights.tensor("output.weight", n_embd, n_vocab),
    ]
    for layer in range(n_layer):
        tensors += _synthetic_layer(f"blk.{layer}.", weights, sizes)
    _write(dst, [_kv(key, value) for key, value in metadata.items()], tensors, progress=progress)


def _check_shape(sizes: dict[str, int], quant: str) -> tuple[GGMLQuantizationType, LlamaFileType]:
    if quant not in _QUANTS:
        raise UsageError(f"unknown quant {quant!r}", f"Known: {', '.join(QUANTS)}.")
    for name, value in sizes.items():
        if not 1 <= value < 1 << 31:
            raise UsageError(f"{name} is {value}", "It must be at least 1 and below 2**31.")
    if sizes["n_head"] % sizes["n_head_kv"]:
        kv, heads = sizes["n_head_kv"], sizes["n_head"]
        raise UsageError(f"{kv} key/value heads do not divide {heads} heads", "Choose others.")
    if sizes["head_dim"] % 2:
        raise UsageError(f"head_dim {sizes['head_dim']} is odd", "Rotary positions need an even one.")
    if sizes.get("n_expert", 1) > MAX_EXPERTS or sizes.get("n_expert_used", 0) > sizes.get("n_expert", 0):
        raise UsageError(f"{sizes['n_expert_used']} of {sizes['n_expert']} experts cannot be used", _EXPERT_RULE)
    kind, file_type = _QUANTS[quant]
    block = GGML_QUANT_SIZES[kind][0]
    widths = {"n_embd": sizes["n_embd"], "n_ff": sizes["n_ff"]}
    widths["n_head * head_dim"] = sizes["n_head"] * sizes["head_dim"]
    for name, value in widths.items():
        if value % block:
            raise UsageError(f"{name} is {value}, no multiple of {quant}'s blocks of {block}", "Change one of them.")
    return kind, file_type


def _synthetic_layer(prefix: str, weights: _Weights, sizes: dict[str, int]) -> Iterator[_Tensor]:
    embd, ff, head = sizes["n_embd"], sizes["n_ff"], sizes["head_dim"]
    q, kv = sizes["n_head"] * head, sizes["n_head_kv"] * head
    for name, width in (("attn_norm", embd), ("attn_q_norm", head), ("attn_k_norm", head), ("ffn_norm", embd)):
        yield _plain(f"{prefix}{name}.weight", np.ones(width, np.float32))
    for name, shape in (("q", (embd, q)), ("k", (embd, kv)), ("v", (embd, kv)), ("output", (q, embd))):
        yield weights.tensor(f"{prefix}attn_{name}.weight", *shape)
    experts: tuple[int, ...] = (sizes["n_expert"],) if "n_expert" in sizes else ()
    if experts:
        rng = np.random.default_rng([weights.seed, *prefix.encode()])
        router = rng.standard_normal((*experts, embd), np.float32) * np.float32(0.02)
        yield _plain(f"{prefix}ffn_gate_inp.weight", router)
    suffix = "_exps" if experts else ""
    for name, shape in (("gate", (embd, ff)), ("up", (embd, ff)), ("down", (ff, embd))):
        yield weights.tensor(f"{prefix}ffn_{name}{suffix}.weight", *shape, *experts)
