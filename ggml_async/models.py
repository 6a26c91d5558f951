"""Unfolds a dense llama GGUF into a mixture of experts, without loss; a tensor at a time at most is in memory."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ggml_async import gguf_file
from ggml_async.errors import UsageError
from ggml_async.gguf_file import GgufFile, TensorInfo
from ggml_async.gguf_write import CHUNK, FLOATS, Tensor, kv, write
from ggml_async.synthetic import EXPERT_RULE, MAX_EXPERTS, PRESETS, QUANTS, make_synthetic, random_blocks

__all__ = ["PRESETS", "QUANTS", "make_moe", "make_synthetic", "random_blocks", "scale_blocks"]

Bytes = npt.NDArray[np.uint8]
Type = GGMLQuantizationType

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


_log = logging.getLogger("ggml_async.models")


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
            known = ", ".join(sorted(k.name for k in (*HALF_SCALES, *FLOATS)))
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
        raise UsageError(f"{n_used} of {n_expert} experts cannot be used", EXPERT_RULE)
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
    tensors: list[Tensor] = []
    for info in model.tensors.values():
        tensors += _unfold(info, n_expert, factor, router_scale, rng)
    write(dst, _moe_metadata(model, n_expert, n_used), tensors, model.alignment)


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
        if not isinstance(down.type, Type) or down.type not in (*HALF_SCALES, *FLOATS):
            raise UsageError(
                f"{model.path}: {down.name} is of type {_type_name(down.type)}, whose scales cannot be multiplied",
                f"Types that can: {', '.join(sorted(k.name for k in (*HALF_SCALES, *FLOATS)))}.",
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
) -> Iterator[Tensor]:
    """What becomes of one tensor of the dense model."""
    match = _FFN.fullmatch(info.name)
    part = match[2] if match else ""
    if match is None or part not in _PARTS:
        yield Tensor(info.name, info.type, info.shape, info.nbytes, lambda: _read_chunks(info))
        return
    width, rows = info.shape
    name = info.name.replace(".weight", "_exps.weight")
    if part == "down.weight":
        shape = (width // n_expert, rows, n_expert)
        yield Tensor(name, info.type, shape, info.nbytes, lambda: _split_down(info, n_expert, factor))
        return
    # Experts are runs of rows: the bytes stay as they are.
    yield Tensor(name, info.type, (width, rows // n_expert, n_expert), info.nbytes, lambda: _read_chunks(info))
    if part == "gate.weight":
        router = (rng.standard_normal((n_expert, width)) * router_scale).astype("<f4")
        router_name = f"blk.{match[1]}.ffn_gate_inp.weight"
        yield Tensor(router_name, Type.F32, (width, n_expert), router.nbytes, lambda: [router.view(np.uint8)])


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
        changed[key] = kv(key, [n // n_expert for n in length])
    elif isinstance(length, int):
        changed[key] = kv(key, length // n_expert)
    name = model.meta.get("general.name", model.path.stem)
    changed["general.name"] = kv("general.name", f"{name} (dense FFN unfolded into {n_expert} experts, {n_used} used)")
    records = [
        changed.get(name, b"") if name in changed else model.meta.raw(name)
        for name in model.meta
        if not name.startswith("split.")
    ]
    if "general.name" not in model.meta:
        records.append(changed["general.name"])
    records += [kv("llama.expert_count", n_expert), kv("llama.expert_used_count", n_used)]
    return [record for record in records if record]
