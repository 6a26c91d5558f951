"""Makes random models of any shape, seeded; streams, so that 20 GB need no memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from ggml_async.errors import UsageError
from ggml_async.gguf_write import FLOATS, Tensor, kv, write

Bytes = npt.NDArray[np.uint8]
Type = GGMLQuantizationType

MAX_EXPERTS = 512  #: LLAMA_MAX_EXPERTS of the oldest llama.cpp supported
EXPERT_RULE = f"Needed: 1 <= used <= experts <= {MAX_EXPERTS}."  #: the hint of every error about counts
POOL_BYTES = 32 << 20  #: random data generated for each (type, fan-in) and repeated with shifting phase

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
    if kind in FLOATS:
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

    def tensor(self, name: str, *shape: int) -> Tensor:
        block, size = GGML_QUANT_SIZES[self.kind]
        nbytes = math.prod(shape) // block * size
        self.largest[shape[0]] = max(nbytes, self.largest.get(shape[0], 0))
        return Tensor(name, self.kind, shape, nbytes, lambda: self._chunks(name, shape[0], nbytes))

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


def _plain(name: str, values: npt.NDArray[np.float32]) -> Tensor:
    data = np.ascontiguousarray(values, "<f4")
    return Tensor(name, Type.F32, data.shape[::-1], data.nbytes, lambda: [data.view(np.uint8)])


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
    write(dst, [kv(key, value) for key, value in metadata.items()], tensors, progress=progress)


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
        raise UsageError(f"{sizes['n_expert_used']} of {sizes['n_expert']} experts cannot be used", EXPERT_RULE)
    kind, file_type = _QUANTS[quant]
    block = GGML_QUANT_SIZES[kind][0]
    widths = {"n_embd": sizes["n_embd"], "n_ff": sizes["n_ff"]}
    widths["n_head * head_dim"] = sizes["n_head"] * sizes["head_dim"]
    for name, value in widths.items():
        if value % block:
            raise UsageError(f"{name} is {value}, no multiple of {quant}'s blocks of {block}", "Change one of them.")
    return kind, file_type


def _synthetic_layer(prefix: str, weights: _Weights, sizes: dict[str, int]) -> Iterator[Tensor]:
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
