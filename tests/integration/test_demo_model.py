"""A dense model unfolded into experts is the same model: its logits against the dense model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ggml_async import fetch, models
from ggml_async.llama import LlamaLibrary
from ggml_async.profile_plan import cpu_moe_overrides

Rows = np.ndarray[Any, Any]


def logits(llama: LlamaLibrary, path: Path, tokens: list[int], n_cpu_moe: int | None) -> Rows:
    """One row a token; on the CPU alone with n_cpu_moe None."""
    rows = []
    overrides = cpu_moe_overrides(n_cpu_moe) if n_cpu_moe else ()
    with (
        llama.load_model(path, n_gpu_layers=0 if n_cpu_moe is None else -1, overrides=overrides) as model,
        model.context(n_ctx=64, n_threads=2) as context,
    ):
        for token in tokens:
            context.decode([token])
            rows.append(context.logits().copy())
    return np.stack(rows)


def off_by(a: Rows, b: Rows) -> float:
    """Root mean square of the difference, relative to the logits' standard deviation."""
    return float(np.sqrt(np.mean((a - b) ** 2)) / a.std())


def small_dense_llama(path: Path) -> None:
    """4 layers of f32: nothing is quantised, so nothing but the order of sums can differ."""
    n_layer, n_embd, n_ff, n_vocab = 4, 64, 128, 64
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(n_vocab)
    writer.add_tokenizer_model("none")
    rng = np.random.default_rng(5)
    shapes = {"token_embd": (n_vocab, n_embd), "output_norm": (n_embd,), "output": (n_vocab, n_embd)}
    for i in range(n_layer):
        shapes |= {f"blk.{i}.attn_{name}": (n_embd, n_embd) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.{name}": (n_embd,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.ffn_{name}": (n_ff, n_embd) for name in ("gate", "up")}
        shapes[f"blk.{i}.ffn_down"] = (n_embd, n_ff)
    for name, shape in shapes.items():
        data = np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) / np.sqrt(shape[1])
        writer.add_tensor(f"{name}.weight", data.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("n_expert", [4, 8])
def test_an_unfolded_f32_model_equals_the_dense_one_but_for_the_order_of_sums(
    llama: LlamaLibrary, tmp_path: Path, n_expert: int
) -> None:
    """Tolerance: 1e-5 of the logits' standard deviation (rms), what f32 sums in another order give."""
    dense, moe = tmp_path / "dense.gguf", tmp_path / "moe.gguf"
    small_dense_llama(dense)
    models.make_moe(dense, moe, n_expert)
    tokens = [3, 50, 7, 12]
    expected = logits(llama, dense, tokens, None)
    assert expected.std() > 0.1
    assert off_by(expected, logits(llama, moe, tokens, None)) < 1e-5


def test_the_demo_model_equals_the_dense_model_it_was_unfolded_from(llama: LlamaLibrary) -> None:
    """Tolerance: 0.1 of the logits' standard deviation (rms), and the same most likely token.

    The weights are the same; but activations are rounded to 8 bits before every product, and 30 layers multiply what a
    last bit in a sum changes. The dense model alone differs by as much (0.03) between CPU and Vulkan; a wrong scale,
    expert or router gives 0.3 and more.
    """
    dense, moe = fetch.ensure_smollm2(), fetch.ensure_demo_model()
    tokens = [504, 3575, 282, 4649, 314]
    on_cpu = logits(llama, dense, tokens, None)
    unfolded_on_cpu = logits(llama, moe, tokens, None)
    assert off_by(on_cpu, unfolded_on_cpu) < 0.1
    assert (on_cpu.argmax(axis=1) == unfolded_on_cpu.argmax(axis=1)).all()
    with_readbacks = logits(llama, moe, tokens[:2], 30)
    dense_on_gpu = logits(llama, dense, tokens[:2], 0)
    assert off_by(dense_on_gpu, with_readbacks) < 0.1
    assert (dense_on_gpu.argmax(axis=1) == with_readbacks.argmax(axis=1)).all()
