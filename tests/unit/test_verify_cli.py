"""``ggml-async verify``'s flags, files, exit codes and messages, on a mock executor behind the hidden option."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from mock_verifier import N_LAYER

from ggml_async.cli.main import run
from ggml_async.errors import ExitCode

MOCK = ["--debug-executor", "mock_verifier:for_cli", "-c", "16", "-t", "1", "--prompts", "5"]

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "moe.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(N_LAYER)
    writer.add_expert_count(8)
    for i in range(N_LAYER):
        writer.add_tensor(f"blk.{i}.ffn_up_exps.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.delenv("GGML_ASYNC_MOCK", raising=False)

    def call(*args: object, fault: str = "") -> tuple[int, str, str]:
        if fault:
            monkeypatch.setenv("GGML_ASYNC_MOCK", fault)
        code = run(["verify", *(str(a) for a in args)])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


def test_one_line_a_configuration_and_a_sentence(cli: Cli, model: Path) -> None:
    code, out, err = cli(model, "-ncmoe", "1,2", "-ub", "4,8", *MOCK)
    assert code == 0 and err == ""
    assert len([line for line in out.splitlines() if line.startswith("| Mock0")]) == 4
    assert "bitwise equal" in out.splitlines()[-1]


def test_flags_are_those_of_llama_perplexity_and_llama_bench(cli: Cli, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words " * 30)
    code, out, _ = cli(
        "-m", model, "-f", text, "--chunks", "-1", "-b", "8", "--ubatch_size", "4", "-ngl", "-1", "-dev", "Mock0",
        "-fa", "1", "-nopo", "0", "-ot", "up_exps=CPU", *MOCK, "-ojson",
    )  # fmt: skip
    document = json.loads(out)
    (test,) = document["tests"]
    assert code == 0 and document["schema"] == "ggml-async/verify/1"
    assert document["text"] == {"name": str(text), "bytes": 180, "tokens": 181}
    assert test["chunks"] == 11
    config = test["config"]
    assert (config["n_batch"], config["n_ubatch"], config["flash_attn"]) == (8, 4, "on")
    assert config["no_op_offload"] is False and config["overrides"] == ["up_exps=CPU"] and config["n_cpu_moe"] == 0


def test_a_difference_is_exit_1_and_says_where(cli: Cli, model: Path) -> None:
    code, out, err = cli(model, *MOCK, fault="wrong")
    assert code == ExitCode.FAILED
    assert "no: chunk 0, position 4, layer 2, ffn_moe_gate" in out
    assert "chunk 0, position 4, tensor ffn_moe_gate of layer 2" in err


def test_nothing_read_back_is_exit_3(cli: Cli, model: Path) -> None:
    code, out, err = cli(model, *MOCK, fault="blind")
    assert code == ExitCode.NOT_INSTRUMENTED
    assert "nothing is proved" in out and "nothing is proved" in err


def test_a_failure_is_exit_1_and_one_error(cli: Cli, model: Path) -> None:
    code, out, err = cli(model, *MOCK, fault="fails")
    assert code == ExitCode.FAILED
    assert err.splitlines()[-2:] == [
        "ggml-async: error: llama_decode failed with code -3", "see llama.cpp's log (-v)"
    ]  # fmt: skip
    assert "Interrupted" not in out


@pytest.mark.parametrize("fmt", ["csv", "json", "jsonl", "sql"])
def test_machine_formats_are_alone_on_stdout(cli: Cli, model: Path, fmt: str) -> None:
    code, out, err = cli(model, "-o", fmt, *MOCK)
    assert code == 0 and err == ""
    if fmt == "sql":
        sqlite3.connect(":memory:").executescript(out)
    if fmt in ("json", "jsonl"):
        json.loads(out)


def test_an_output_file_takes_the_json_beside_the_table_or_the_format_named(
    cli: Cli, model: Path, tmp_path: Path
) -> None:
    _, out, err = cli(model, "--output-file", tmp_path / "a.json", *MOCK)
    assert "| Mock0" in out and "a.json" in err
    assert json.loads((tmp_path / "a.json").read_text())["tests"]
    _, out, _ = cli(model, "-o", "csv", "--output-file", tmp_path / "b", *MOCK)
    assert out == "" and (tmp_path / "b").read_text().startswith("ga_schema,")
    code, _, err = cli(model, "--output-file", tmp_path / "b", *MOCK)
    assert code == ExitCode.USAGE and "exists" in err


def test_progress_is_on_stderr_and_only_when_asked_for(cli: Cli, model: Path) -> None:
    _, out, err = cli(model, "--progress", *MOCK)
    assert "configuration 1/1" in err and "prompt 5: 38/38 tokens" in err and "38/38" not in out
    assert cli(model, "--progress", "-q", *MOCK)[2] == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--chunks", "-5"], "--chunks: -5"),
        (["-ncmoe", "5"], "-ncmoe: 5 is beyond"),
        (["-f", "no-such-text"], "cannot read no-such-text"),
        (["-dev", "Vulkan7"], "no device 'Vulkan7'"),
        (["-c", "9000"], "at least 18000 tokens"),
        (["--bogus"], "--bogus"),
        (["second.gguf", "-m", "third.gguf"], ""),
    ],
)
def test_bad_input_is_exit_2_with_one_error_and_nothing_written(
    cli: Cli, model: Path, tmp_path: Path, args: list[str], words: str
) -> None:
    place = tmp_path / "out.json"
    code, out, err = cli(model, *MOCK, *args, "-o", "md", "--output-file", place)
    assert code == ExitCode.USAGE
    assert words in err and err.count("error:") == 1
    assert out == "" and not list(tmp_path.glob("out*"))
