"""The GGUF reader: agrees with gguf-py on what both accept, and never fails otherwise than with one UsageError."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_async import gguf_file
from ggml_async.errors import UsageError


def kv_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def kv_u32(key: bytes, value: int, kind: int = 4) -> bytes:
    return kv_string(key) + struct.pack("<II", kind, value)


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return kv_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def crafted(kv: list[bytes], tensors: list[bytes], data: int, version: int = 3, n_kv: int | None = None) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(kv) if n_kv is None else n_kv)
    head += b"".join(kv) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def write_valid(path: Path, arch: str = "qwen3moe") -> None:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_rope_freq_base(1e6)
    writer.add_bool("x.yes", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ünï", "", "<end>"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    writer.add_array("x.flags", [True, False])
    writer.add_key_value("x.i64", -(1 << 40), gguf.GGUFValueType.INT64)
    writer.add_key_value("x.f64", 0.1, gguf.GGUFValueType.FLOAT64)
    writer.add_tensor("token_embd.weight", np.arange(64 * 4, dtype=np.float32).reshape(4, 64))
    q4_0 = np.arange(4 * 8 * 2 * 18, dtype=np.uint8).reshape(4, 8, 36)
    for layer in (1, 0):
        for part in ("gate", "up", "down"):
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", q4_0, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("odd.weight", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "valid.gguf"
    write_valid(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "model.gguf"


def same_as_gguf_py(path: Path, ours: gguf_file.GgufFile) -> None:
    theirs = gguf.GGUFReader(path)
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        info = ours.tensors[t.name]
        assert (info.type, list(info.shape)) == (t.tensor_type, t.shape.tolist())
        assert (info.offset, info.nbytes) == (t.data_offset, t.n_bytes)
    fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert {k for k in ours.meta if not k.startswith("GGUF.")} == set(fields)
    for key, field in fields.items():
        # repr: so that NaN equals NaN
        assert repr(ours.meta[key]) == repr(field.contents()), key


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        gguf_file.read(path)
    assert str(path) in caught.value.message and "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value.message


def test_agrees_with_gguf_py_on_a_valid_file(valid: bytes, scratch: Path) -> None:
    scratch.write_bytes(valid)
    same_as_gguf_py(scratch, gguf_file.read(scratch))


def test_gives_the_model_facts(valid: bytes, scratch: Path) -> None:
    scratch.write_bytes(valid)
    model = gguf_file.read(scratch)
    assert (model.arch, model.n_layer, model.n_expert, model.n_expert_used) == ("qwen3moe", 2, 4, 2)
    assert (model.n_vocab, model.n_ctx_train, model.size_bytes) == (4, 512, len(valid))
    assert model.expert_layers() == [0, 1]
    assert model.tensors["odd.weight"].path == scratch and model.parts == (scratch,)
    assert model.meta["tokenizer.ggml.tokens"] == ["a", "ünï", "", "<end>"]
    assert model.meta.raw("x.yes") == kv_string(b"x.yes") + struct.pack("<IB", 7, 1)


def test_expert_layers_knows_every_spelling_of_expert_tensors(tmp_path: Path) -> None:
    names = (b"blk.3.ffn_gate_up_exps.weight", b"blk.11.ffn_up_chexps.weight", b"blk.2.ffn_up_exps.bias",
             b"blk.5.ffn_gate_inp.weight", b"blk.6.ffn_up_shexp.weight", b"x.blk.7.ffn_up_exps.weight")  # fmt: skip
    path = tmp_path / "m.gguf"
    path.write_bytes(crafted([], [tensor(n, (8,), 0, 32 * i) for i, n in enumerate(names)], 32 * len(names)))
    assert gguf_file.read(path).expert_layers() == [2, 3, 11]


def test_every_truncation_is_one_clear_error(valid: bytes, scratch: Path) -> None:
    scratch.write_bytes(valid)
    last = list(gguf_file.read(scratch).tensors.values())[-1]
    # The padding after the last tensor may be missing: ggml does not need it either.
    for size in reversed(range(last.offset + last.nbytes)):
        os.truncate(scratch, size)
        message = refused(scratch)
        assert any(word in message for word in ("empty", "truncated", "more than fit")), (size, message)


@settings(max_examples=200, deadline=1000)
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(1, 255)), min_size=1, max_size=8))
def test_flipped_bytes_give_a_file_or_a_usage_error(valid: bytes, scratch: Path, flips: list[tuple[int, int]]) -> None:
    damaged = bytearray(valid)
    for at, mask in flips:
        damaged[at % len(damaged)] ^= mask
    scratch.write_bytes(damaged)
    try:
        ours = gguf_file.read(scratch)
    except UsageError as error:
        assert str(scratch) in error.message and error.hint
        return
    _ = [ours.meta[key] for key in ours.meta], ours.n_vocab, ours.n_layer, ours.n_ctx_train, ours.expert_layers()
    assert all(t.offset > 0 and t.offset + t.nbytes <= len(damaged) for t in ours.tensors.values())
    try:
        gguf.GGUFReader(scratch)
        [f.contents() for f in gguf.GGUFReader(scratch).fields.values()]
    except Exception:  # gguf-py refuses it, in whatever way
        return
    same_as_gguf_py(scratch, ours)


@settings(max_examples=100, deadline=1000)
@given(st.binary(max_size=200))
def test_random_bytes_after_the_magic_give_a_usage_error(scratch: Path, noise: bytes) -> None:
    scratch.write_bytes(b"GGUF\x03\0\0\0" + noise)
    with contextlib.suppress(UsageError):
        gguf_file.read(scratch)


F32 = 0
CRAFTED = {
    "is not a GGUF file": b"PK\x03\x04 a zip file, long enough to be one",
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "GGUF version 1": crafted([], [], 0, version=1),
    "says it holds 1099511627776 metadata entries": crafted([], [], 0, n_kv=1 << 40),
    "more than any vocabulary": crafted([kv_string(b"t") + struct.pack("<IIQ", 9, 8, 1 << 60)], [], 0),
    "truncated: metadata 'a'": crafted([kv_string(b"a") + struct.pack("<IIQ", 9, 10, (1 << 61) + 1)], [], 0),
    "unknown type 77": crafted([kv_u32(b"a", 1, kind=77)], [], 0),
    "metadata key 'a' occurs twice": crafted([kv_u32(b"a", 1), kv_u32(b"a", 2)], [], 0),
    "general.alignment is 48": crafted([kv_u32(b"general.alignment", 48)], [], 0),
    "general.alignment is 0": crafted([kv_u32(b"general.alignment", 0)], [], 0),
    "general.alignment is 64,": crafted([kv_u32(b"general.alignment", 64, kind=5)], [], 0),
    "general.architecture is not a string": crafted([kv_u32(b"general.architecture", 3)], [], 0),
    "is not UTF-8": crafted([kv_u32(b"\xff\xfe", 3)], [], 0),
    "tensor 'a' occurs twice": crafted([], [tensor(b"a", (8,), F32, 0), tensor(b"a", (8,), F32, 32)], 64),
    "has 5 dimensions": crafted([], [tensor(b"a", (1,) * 5, F32, 0)], 64),
    "more elements than 64 bits": crafted([], [tensor(b"a", (1 << 33, 1 << 33), F32, 0)], 64),
    "truncated: tensor 'a' ends at": crafted([], [tensor(b"a", (1 << 40,), F32, 0)], 64),
    "where 32 was expected": crafted([], [tensor(b"a", (8,), F32, 0), tensor(b"b", (8,), F32, 0)], 64),
    "not aligned to 32": crafted([], [tensor(b"a", (8,), F32, 4)], 64),
    "no multiple of Q4_0's blocks": crafted([], [tensor(b"a", (40,), 2, 0)], 64),
    "of the unknown type 4096": crafted([], [tensor(b"a", (8,), 4096, 0)], 64),
    "more than 127 bytes": crafted([], [tensor(b"a" * 200, (8,), F32, 0)], 64),
    "is empty or holds a NUL": crafted([], [tensor(b"a\0b", (8,), F32, 0)], 64),
}


@pytest.mark.parametrize("expected", CRAFTED)
def test_a_crafted_file_is_refused_at_once_with_its_reason(tmp_path: Path, expected: str) -> None:
    path = tmp_path / "crafted.gguf"
    path.write_bytes(CRAFTED[expected])
    start = time.monotonic()
    assert expected in refused(path)
    assert time.monotonic() - start < 1


def test_a_crafted_count_in_a_huge_sparse_file_costs_neither_time_nor_memory(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(crafted([kv_string(b"a") + struct.pack("<IIQ", 9, 10, 1 << 31)], [], 0))
    os.truncate(path, 1 << 40)
    start = time.monotonic()
    assert "larger than 512 MiB" in refused(path)
    assert time.monotonic() - start < 1


def test_a_type_newer_than_gguf_keeps_its_number_and_reaches_to_the_next_tensor(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(crafted([], [tensor(b"a", (8,), 200, 0), tensor(b"b", (8,), F32, 64)], 96))
    tensors = gguf_file.read(path).tensors
    assert (tensors["a"].type, tensors["a"].nbytes, tensors["b"].nbytes) == (200, 64, 32)


def test_things_that_are_no_files_are_refused_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "inside.gguf").touch()
    os.mkfifo(tmp_path / "fifo")
    start = time.monotonic()
    assert "no such file" in refused(tmp_path / "missing.gguf")
    assert "is a directory" in refused(tmp_path)
    assert "not a regular file" in refused(tmp_path / "fifo")
    assert "not a regular file" in refused(Path("/dev/zero"))
    assert "is empty" in refused(tmp_path / "inside.gguf")
    assert time.monotonic() - start < 1
    with pytest.raises(UsageError, match="cannot be opened"):
        gguf_file.read("nul\0inside.gguf")


def test_an_unreadable_file_is_named(valid: bytes, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch.write_bytes(valid)

    def denied(*_: object) -> int:  # root reads everything: chmod would not do
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    assert "permission denied" in refused(scratch)


def split(folder: Path, no: tuple[int, ...] = (0, 1, 2), names: tuple[bytes, ...] = (b"a", b"b", b"c")) -> Path:
    for index, (number, name) in enumerate(zip(no, names, strict=True)):
        kv = [
            kv_string(b"split.no") + struct.pack("<IH", 2, number),
            kv_string(b"split.count") + struct.pack("<IH", 2, 3),
        ]
        kv.append(kv_u32(b"split.tensors.count", 3, kind=5))
        path = folder / f"m-{index + 1:05}-of-00003.gguf"
        path.write_bytes(crafted(kv, [tensor(name, (8,), F32, 0)], 32))
    return folder / "m-00001-of-00003.gguf"


def test_a_split_model_is_read_as_one_and_each_tensor_knows_its_file(tmp_path: Path) -> None:
    first = split(tmp_path)
    model = gguf_file.read(first)
    assert [(t.name, t.path.name[:7]) for t in model.tensors.values()] == [
        ("a", "m-00001"),
        ("b", "m-00002"),
        ("c", "m-00003"),
    ]
    assert model.size_bytes == sum(p.stat().st_size for p in tmp_path.iterdir()) and len(model.parts) == 3


def test_broken_split_models_say_what_is_wrong(tmp_path: Path) -> None:
    first = split(tmp_path)
    second = tmp_path / "m-00002-of-00003.gguf"
    assert "is not the first part" in refused(second)
    second.unlink()
    with pytest.raises(UsageError, match=r"m-00002-of-00003.gguf: this part of .* is missing"):
        gguf_file.read(first)
    split(tmp_path, no=(0, 2, 1))
    with pytest.raises(UsageError, match="is not part 2 of 3"):
        gguf_file.read(first)
    split(tmp_path, names=(b"a", b"a", b"c"))
    with pytest.raises(UsageError, match="in an earlier part"):
        gguf_file.read(first)
    split(tmp_path)
    renamed = first.rename(tmp_path / "other.gguf")
    assert "its name does not end in -00001-of-00003.gguf" in refused(renamed)
