"""The model makers: unfolding a dense model loses nothing, and random models have the shape that was asked for."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from ggml_async import gguf_file, models
from ggml_async.errors import GgmlAsyncError, UsageError

EMBD, LAYERS = 64, 2
SCALED = [*models.HALF_SCALES, T.F32, T.F16, T.BF16]


def sane_blocks(kind: T, n: int, rng: np.random.Generator) -> np.ndarray:
    """Random blocks of any type whose scales are ordinary numbers."""
    if kind in (T.F32, T.F16, T.BF16):
        return models.random_blocks(kind, n, 1.0, rng)
    blocks = rng.integers(0, 256, (n, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in models.HALF_SCALES[kind]:
        blocks[:, at : at + 2] = (rng.standard_normal(n) * 0.01).astype(np.float16).view(np.uint8).reshape(n, 2)
    return blocks


def dense_llama(
    path: Path, kind: T = T.Q4_1, n_ff: int = 256, extra: str = "", skip: str = "", arch: str = "llama"
) -> None:
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("small")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(EMBD)
    writer.add_feed_forward_length(n_ff)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ü", "", "d"])
    writer.add_tensor("token_embd.weight", rng.standard_normal((4, EMBD)).astype(np.float32))
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        writer.add_tensor(f"{prefix}ffn_norm.weight", np.ones(EMBD, np.float32))
        for part in ("gate", "up"):
            if part != skip:
                block, _ = gguf.GGML_QUANT_SIZES[T.Q8_0]
                data = sane_blocks(T.Q8_0, n_ff * EMBD // block, rng).reshape(n_ff, -1)
                writer.add_tensor(f"{prefix}ffn_{part}.weight", data, raw_dtype=T.Q8_0)
        data = sane_blocks(kind, EMBD * n_ff // gguf.GGML_QUANT_SIZES[kind][0], rng).reshape(EMBD, -1)
        writer.add_tensor(f"{prefix}ffn_down.weight", data, raw_dtype=kind)
    if extra:
        writer.add_tensor(extra, np.ones(n_ff, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def weights(path: Path) -> dict[str, np.ndarray]:
    tensors = gguf.GGUFReader(path).tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in tensors}


@pytest.mark.parametrize("kind", SCALED, ids=lambda kind: kind.name)
def test_scaling_blocks_by_a_power_of_two_scales_the_weights_bit_for_bit(kind: T) -> None:
    blocks = sane_blocks(kind, 40, np.random.default_rng(1))
    scaled = models.scale_blocks(blocks, kind, 8)
    before, after = (gguf.quants.dequantize(data.reshape(1, -1), kind) for data in (blocks, scaled))
    assert np.count_nonzero(before) > 0
    np.testing.assert_array_equal(after, before * 8)


@pytest.mark.parametrize("kind", SCALED, ids=lambda kind: kind.name)
def test_scaling_out_of_range_is_an_error(kind: T) -> None:
    blocks = sane_blocks(kind, 4, np.random.default_rng(1))
    with pytest.raises(UsageError, match=f"{kind.name} times .* leave the range"):
        for _ in range(2):  # one such step fits into single precision, two do not
            blocks = models.scale_blocks(blocks, kind, 1 << 100)


@pytest.mark.parametrize("kind", [T.Q4_1, T.Q8_0, T.F16, T.BF16, T.Q6_K, T.Q4_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("n_expert", [1, 2, 4, 8])
def test_the_experts_together_are_the_dense_ffn(tmp_path: Path, kind: T, n_expert: int) -> None:
    n_ff = 256 * 8
    dense_llama(tmp_path / "dense.gguf", kind, n_ff)
    models.make_moe(tmp_path / "dense.gguf", tmp_path / "moe.gguf", n_expert)
    dense, moe = weights(tmp_path / "dense.gguf"), weights(tmp_path / "moe.gguf")
    for layer in range(LAYERS):
        prefix = f"blk.{layer}.ffn_"
        for part in ("gate", "up"):
            experts = moe[f"{prefix}{part}_exps.weight"]
            assert experts.shape == (n_expert, n_ff // n_expert, EMBD)
            np.testing.assert_array_equal(np.concatenate(list(experts)), dense[f"{prefix}{part}.weight"])
        down = moe[f"{prefix}down_exps.weight"]
        assert down.shape == (n_expert, EMBD, n_ff // n_expert)
        np.testing.assert_array_equal(np.concatenate(list(down), axis=1) / n_expert, dense[f"{prefix}down.weight"])
        assert not moe[f"{prefix}gate_inp.weight"].any()
        # The whole layer on one input, with the uniform router's weights 1/n.
        x = np.random.default_rng(3).standard_normal(EMBD)

        def ffn(gate: np.ndarray, up: np.ndarray, out: np.ndarray, x: np.ndarray = x) -> np.ndarray:
            g = gate.astype(np.float64) @ x
            return out.astype(np.float64) @ (g / (1 + np.exp(-g)) * (up.astype(np.float64) @ x))

        want = ffn(*(dense[f"{prefix}{part}.weight"] for part in ("gate", "up", "down")))
        parts = zip(*(moe[f"{prefix}{part}_exps.weight"] for part in ("gate", "up", "down")), strict=True)
        np.testing.assert_allclose(sum(ffn(*e) for e in parts) / n_expert, want, rtol=1e-9, atol=1e-12)


def test_metadata_is_kept_and_says_what_was_done(tmp_path: Path) -> None:
    dense_llama(tmp_path / "dense.gguf")
    models.make_moe(tmp_path / "dense.gguf", tmp_path / "moe.gguf", 8, 2)
    dense, moe = gguf_file.read(tmp_path / "dense.gguf"), gguf_file.read(tmp_path / "moe.gguf")
    assert (moe.n_expert, moe.n_expert_used, moe.expert_layers()) == (8, 2, [0, 1])
    assert moe.meta["llama.feed_forward_length"] == 256 // 8
    assert "small" in moe.meta["general.name"] and "8 experts" in moe.meta["general.name"]
    changed = {"llama.feed_forward_length", "general.name"}
    assert all(moe.meta.raw(key) == dense.meta.raw(key) for key in dense.meta if key not in changed)


def test_down_is_scaled_by_the_experts_in_use_and_by_all_with_a_random_router(tmp_path: Path) -> None:
    dense_llama(tmp_path / "d.gguf")
    models.make_moe(tmp_path / "d.gguf", tmp_path / "two.gguf", 8, 2)
    models.make_moe(tmp_path / "d.gguf", tmp_path / "random.gguf", 8, 2, router_scale=0.5)
    dense, two, rand = (weights(tmp_path / f"{name}.gguf") for name in ("d", "two", "random"))
    name = "blk.1.ffn_down_exps.weight"
    np.testing.assert_array_equal(two[name][1], dense["blk.1.ffn_down.weight"][:, 32:64] * 2)
    np.testing.assert_array_equal(rand[name][1], dense["blk.1.ffn_down.weight"][:, 32:64] * 8)
    assert 0.3 < rand["blk.0.ffn_gate_inp.weight"].std() < 0.7


@pytest.mark.parametrize(
    ("source", "arguments", "message", "hint"),
    [
        ({}, {"n_expert": 3}, r"ffn_down.weight \(Q4_1, 256 columns in blocks of 32\).*3 experts", "1, 2, 4, 8."),
        ({"kind": T.Q6_K, "n_ff": 512}, {"n_expert": 8}, r"Q6_K, 512 columns in blocks of 256", "1, 2."),
        ({}, {"n_expert": 4, "n_used": 5}, "5 of 4 experts", "used <= experts"),
        ({}, {"n_expert": 0}, "0 of 0 experts", "used <= experts"),
        ({}, {"router_scale": float("nan")}, "router scale nan", "uniform"),
        ({"arch": "qwen3"}, {}, "architecture 'qwen3', not llama", "llama"),
        ({"extra": "blk.0.ffn_gate_inp.weight"}, {}, "ffn_gate_inp.weight has no place", "without"),
        ({"extra": "blk.0.ffn_up.bias"}, {}, "ffn_up.bias has no place", "without"),
        ({"skip": "gate"}, {}, "blk.0.ffn_gate.weight is missing", "complete"),
    ],
)
def test_what_cannot_be_unfolded_is_one_error_and_leaves_nothing(
    tmp_path: Path, source: dict[str, Any], arguments: dict[str, Any], message: str, hint: str
) -> None:
    dense_llama(tmp_path / "dense.gguf", **source)
    with pytest.raises(UsageError, match=message) as caught:
        models.make_moe(tmp_path / "dense.gguf", tmp_path / "moe.gguf", **arguments)
    assert hint in caught.value.hint
    assert [p.name for p in tmp_path.iterdir()] == ["dense.gguf"]


def test_a_mixture_of_experts_and_the_source_itself_are_refused(tmp_path: Path) -> None:
    dense_llama(tmp_path / "dense.gguf")
    models.make_moe(tmp_path / "dense.gguf", tmp_path / "moe.gguf", 4)
    with pytest.raises(UsageError, match="mixture of experts already"):
        models.make_moe(tmp_path / "moe.gguf", tmp_path / "again.gguf", 4)
    with pytest.raises(UsageError, match="is the source model itself"):
        models.make_moe(tmp_path / "dense.gguf", tmp_path / "." / "dense.gguf", 4)


def test_an_overflowing_scale_names_the_tensor_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MAX_EXPERTS", 1 << 24)
    dense_llama(tmp_path / "dense.gguf", T.F16, n_ff=1 << 10)
    data = bytearray((tmp_path / "dense.gguf").read_bytes())
    down = gguf_file.read(tmp_path / "dense.gguf").tensors["blk.1.ffn_down.weight"]
    data[down.offset : down.offset + 2] = np.float16(60000).tobytes()
    (tmp_path / "dense.gguf").write_bytes(data)
    with pytest.raises(UsageError, match=r"blk.1.ffn_down.weight: weights of type F16 times 8 leave the range"):
        models.make_moe(tmp_path / "dense.gguf", tmp_path / "moe.gguf", 8)
    assert [p.name for p in tmp_path.iterdir()] == ["dense.gguf"]


@pytest.mark.parametrize("quant", models.QUANTS)
@pytest.mark.parametrize("preset", ["tiny", "tiny-dense"])
def test_a_random_model_has_the_shape_asked_for_and_sane_weights(tmp_path: Path, preset: str, quant: str) -> None:
    path, shape = tmp_path / "m.gguf", models.PRESETS[preset] | {"n_layer": 1}
    models.make_synthetic(path, **shape, quant=quant)
    model = gguf_file.read(path)
    assert (model.arch, model.n_layer, model.n_vocab) == ("qwen3" if "dense" in shape else "qwen3moe", 1, 512)
    assert (model.n_expert, model.n_expert_used) == ((None, None) if "dense" in shape else (8, 2))
    assert model.meta["tokenizer.ggml.model"] == "none"
    down = model.tensors["blk.0.ffn_down.weight" if "dense" in shape else "blk.0.ffn_down_exps.weight"]
    assert down.shape == ((512, 256) if "dense" in shape else (256, 256, 8))
    for name, values in weights(path).items():
        if "norm" in name or "gate_inp" in name:
            continue
        std = 1 / np.sqrt(values.shape[-1])
        assert 0.9 * std < values.std() < 1.1 * std and abs(values.mean()) < 0.2 * std, name


def test_a_random_model_is_the_same_for_the_same_seed_and_no_two_tensors_are_alike(tmp_path: Path) -> None:
    one, again, other = (tmp_path / f"{name}.gguf" for name in ("one", "again", "other"))
    shape = models.PRESETS["tiny"]
    for path, seed in ((one, 1), (again, 1), (other, 2)):
        models.make_synthetic(path, **shape, seed=seed)
    assert one.read_bytes() == again.read_bytes() != other.read_bytes()
    data = [t.data.tobytes() for t in gguf.GGUFReader(one).tensors if "norm" not in t.name]
    assert len(set(data)) == len(data)
    experts = gguf.GGUFReader(one).tensors[-1].data
    assert len({expert.tobytes() for expert in experts}) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_embd": 100}, "n_embd is 100, no multiple of q4_0's blocks of 32"),
        ({"n_head_kv": 3}, "3 key/value heads do not divide 4"),
        ({"n_expert_used": 9}, "9 of 8 experts"),
        ({"n_expert": 100000}, "of 100000 experts"),
        ({"n_layer": 0}, "n_layer is 0"),
        ({"head_dim": 33, "n_head": 32, "n_head_kv": 4}, "odd"),
        ({"quant": "q3"}, "unknown quant 'q3'"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        models.make_synthetic(tmp_path / "m.gguf", **(models.PRESETS["tiny"] | change))
    assert not list(tmp_path.iterdir())


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(GgmlAsyncError, match=r"needs 17\.\d+ GB, the disk has 0.000 GB free"):
        models.make_synthetic(tmp_path / "m.gguf", **models.PRESETS["qwen3-30b-a3b"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stop", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "SIGINT"])
def test_a_write_that_stops_midway_keeps_the_old_file_and_leaves_no_other(tmp_path: Path, stop: BaseException) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")

    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise stop

    with pytest.raises(GgmlAsyncError if isinstance(stop, OSError) else KeyboardInterrupt):
        models.make_synthetic(path, **models.PRESETS["tiny"], progress=fail)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"] and path.read_bytes() == b"old"


def test_a_target_that_cannot_be_a_file_is_refused(tmp_path: Path) -> None:
    for target, message in ((tmp_path, "not a regular file"), (Path("/dev/null"), "not a regular file"),
                            (tmp_path / "no" / "m.gguf", "its folder does not exist")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            models.make_synthetic(target, **models.PRESETS["tiny"])
