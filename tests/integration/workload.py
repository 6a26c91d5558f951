"""What every test decodes: the model's shape, the batches, and what they must cost."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from ggml_async.llama import Context
from ggml_async.models import PRESETS
from ggml_async.profile_plan import cpu_moe_overrides

#: The tiny preset, smaller still; f32 because lavapipe compiles its shaders fastest.
SHAPE: dict[str, Any] = {
    **PRESETS["tiny"], "n_embd": 64, "n_ff": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 64, "n_vocab": 64,
    "quant": "f32",
}  # fmt: skip
LAYERS: int = SHAPE["n_layer"]
BATCH_32 = [(7 * i + 3) % 64 for i in range(32)]
#: One decode each. The largest comes first: when ggml-vulkan's work buffers grow, lavapipe of Mesa 22.3 may crash
#: (with or without the plug-in: it lets go of the old buffer's memory while the buffer is still bound).
BATCHES: list[list[int]] = [BATCH_32, [1, 2, 3, 4], [12, 5], [5], [9], [33], [7]]

Logits = list[bytes]


def overrides(n_cpu_moe: int) -> list[tuple[str, str]]:
    """What llama.cpp's -ncmoe stands for."""
    return list(cpu_moe_overrides(n_cpu_moe))


def run(context: Context, batches: Sequence[Sequence[int]] = BATCHES) -> Logits:
    """Decodes from an empty context; every token's logits, bit by bit."""
    context.clear_memory()
    rows = []
    for batch in batches:
        context.decode(batch, logits="all")
        rows += [context.logits(i).tobytes() for i in range(len(batch))]
    return rows


def digest(rows: Logits) -> str:
    """The same in short, to compare across processes."""
    return hashlib.sha256(b"".join(rows)).hexdigest()


def readback_bytes(n_tokens: int) -> dict[str, int]:
    """Bytes of the two readbacks of one CPU split: the normed hidden state, and the ids of the used experts.

    The ids are the first n_used columns of the sorted [n_expert, n_tokens]: a strided view, whose bytes run from its
    first element to its last.
    """
    return {
        "ffn_norm": 4 * SHAPE["n_embd"] * n_tokens,
        "ffn_moe_topk": 4 * (SHAPE["n_expert"] * (n_tokens - 1) + SHAPE["n_expert_used"]),
    }
