"""Situations of public reports about what is there to work with: no device at all; files cut short or crafted."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ggml_async import gguf_file
from ggml_async.cli.main import run
from ggml_async.errors import ExitCode, GgmlAsyncError
from ggml_async.llama import LlamaLibrary

from .conftest import child


def test_with_no_device_at_all_the_plugin_is_inert_and_the_results_are_the_same_17067(
    llama: LlamaLibrary, model_path: Path
) -> None:
    """No Vulkan driver is to be found: ggml lists the CPU alone."""
    none = {"VK_DRIVER_FILES": "/nonexistent.json", "VK_ICD_FILENAMES": "/nonexistent.json"}
    found, _ = child("no_device.py", llama.dir, model_path, env=none)
    assert found["devices"] == ["cpu"]
    assert set(found["results"]) == {"bare", "async", "stock", "off", "detached"}
    assert len(set(found["results"].values())) == 1, found["results"]
    for counters in found["counted"].values():
        assert {n: v for n, v in counters.items() if v and not n.startswith("cpu_") and n != "tokens"} == {}
    assert found["counted"]["async"]["cpu_computes"] > 0, "it did look"


# --- files ------------------------------------------------------------------------------------------------------------


def _record(data: bytes, name: str) -> int:
    """Where the tensor's number of dimensions stands, behind its name."""
    encoded = struct.pack("<Q", len(name)) + name.encode()
    return data.index(encoded) + len(encoded)


def _patched(at: Callable[[bytes], int], form: str, *values: int) -> Callable[[bytes], bytes]:
    def craft(data: bytes) -> bytes:
        start = at(data)
        return data[:start] + struct.pack(form, *values) + data[start + struct.calcsize(form) :]

    return craft


EXPERTS = "blk.1.ffn_up_exps.weight"  # three dimensions: n, ne[0..2], type, offset


def _of(offset: int) -> Callable[[bytes], int]:
    return lambda data: _record(data, EXPERTS) + offset


CRAFTED: dict[str, Callable[[bytes], bytes]] = {
    "cut in its weights": lambda data: data[: len(data) // 2],
    "cut in its last weight": lambda data: data[:-1],
    "cut in its metadata": lambda data: data[:200],
    "cut behind its magic": lambda data: data[:4],
    "empty": lambda _data: b"",
    "a tensor past the end": _patched(_of(32), "<Q", 1 << 40),
    "an offset that wraps": _patched(_of(32), "<Q", (1 << 64) - 32),
    "an offset off the alignment": _patched(_of(32), "<Q", 33),
    "elements that wrap to few": _patched(_of(4), "<QQQ", 1 << 32, 1 << 32, 64),
    "bytes that wrap to few": _patched(_of(4), "<QQQ", 64, (1 << 62) // 64, 1),
    "a dimension below zero": _patched(_of(4), "<q", -64),
    "too many dimensions": _patched(_of(0), "<I", 1 << 30),
    "more tensors than bytes": _patched(lambda _d: 8, "<Q", 1 << 60),
    "more keys than bytes": _patched(lambda _d: 16, "<Q", 1 << 60),
    "a string of all memory": _patched(lambda _d: 24, "<Q", (1 << 64) - 8),
    "another version": _patched(lambda _d: 4, "<I", 77),
}


@pytest.fixture
def own_logging() -> Iterator[None]:
    """A command that runs in this process sets up logging to a stderr that is gone after the test."""
    loggers = [logging.getLogger(name) for name in ("ggml_async", "ggml_async.llama")]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize("command", ["verify", "profile"])
@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_or_truncated_file_is_one_clear_error_before_llama_cpp_sees_it_26978_27203(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, command: str
) -> None:
    data = model_path.read_bytes()
    path = tmp_path / "crafted.gguf"
    path.write_bytes(CRAFTED[case](data))
    assert path.read_bytes() != data
    # a runtime that is not there: had the file been taken, that would be the error
    code = run([command, str(path), "--llama", str(tmp_path / "no-llama"), "-o", "json"])
    out, err = capsys.readouterr()
    assert code == ExitCode.USAGE and out == ""
    assert err.count("error:") == 1 and str(path) in err and "no-llama" not in err, err
    assert len(err.strip().splitlines()) == 2, err


def test_a_type_that_only_a_newer_ggml_may_know_is_left_to_llama_cpp_which_refuses_it_26978(
    llama: LlamaLibrary, model_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "newer.gguf"
    path.write_bytes(_patched(_of(28), "<I", 99)(model_path.read_bytes()))
    assert gguf_file.read(path).tensors[EXPERTS].type == 99
    with pytest.raises(GgmlAsyncError, match="could not load") as error:
        llama.load_model(path)
    assert path.name in error.value.message and "failed to read tensor info" in error.value.hint


def test_the_file_that_the_crafted_ones_are_made_of_is_good(model_path: Path) -> None:
    info = gguf_file.read(model_path).tensors[EXPERTS]
    assert len(info.shape) == 3
    data = model_path.read_bytes()
    n, *rest = struct.unpack_from("<IQQQIQ", data, _record(data, EXPERTS))
    assert (n, tuple(rest[:3])) == (3, info.shape)
