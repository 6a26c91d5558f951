"""The command line: flags, files, exit codes and messages, on a mock executor behind the hidden option."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import gguf
import numpy as np
import pytest

from ggml_async import __version__
from ggml_async.cli.main import COMMANDS, run
from ggml_async.cli.main import main as cli_main
from ggml_async.cli.profile import profile
from ggml_async.errors import ExitCode

MOCK = ["--debug-executor", "mock_executor:for_cli"]
N_LAYER = 4


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("GGML_ASYNC_MOCK", raising=False)
    yield


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "state" / "ggml-async" / "profiles").glob("*"))


def write_model(path: Path, *, experts: int = 8) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(N_LAYER)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    for i in range(N_LAYER):
        kind = "ffn_up_exps" if experts else "ffn_up"
        writer.add_tensor(f"blk.{i}.{kind}.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "moe.gguf")


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*args: object) -> tuple[int, str, str]:
        code = run(["profile", *(str(a) for a in args)])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


def test_the_table_goes_to_stdout_and_the_json_to_a_new_file_that_is_named(
    cli: Cli, model: Path, tmp_path: Path
) -> None:
    code, out, err = cli(model, "-n", 2, "-r", 2, *MOCK)
    assert code == ExitCode.OK
    assert "| Mock0" in out
    assert out.rstrip().endswith("bitwise identical logits.")
    (file,) = kept(tmp_path)
    assert str(file) in err
    assert json.loads(file.read_text())["schema"] == "ggml-async/profile/1"
    cli(model, "-n", 2, "-r", 2, *MOCK)
    assert len(kept(tmp_path)) == 2


def test_multi_letter_flags_with_one_dash_underscores_and_lists_are_as_in_llama_bench(cli: Cli, model: Path) -> None:
    code, out, _ = cli(
        "-m", model, "-ngl", "-1", "-ncmoe", "1,2", "--n_gen", "1-2", "-t", "1", "-t2", "-dev", "Mock0", "-fa", "1",
        "-ub", 4, "-b", 8, "--batch_size", 9, "-r2", "-ojson", *MOCK,
    )  # fmt: skip
    assert code == 0
    document = json.loads(out)
    assert len(document["tests"]) == 2 * 2 * 2 * 2
    config = document["tests"][-1]["config"]
    assert (config["n_cpu_moe"], config["n_gen"], config["threads"], config["n_batch"]) == (2, 2, 2, 9)
    assert (config["n_gpu_layers"], config["flash_attn"], config["n_ubatch"]) == (-1, "on", 4)


@pytest.mark.parametrize("fmt", ["csv", "json", "jsonl", "sql"])
def test_machine_formats_are_alone_on_stdout_and_keep_no_other_file(
    cli: Cli, model: Path, tmp_path: Path, fmt: str
) -> None:
    code, out, err = cli(model, "-n", 1, "-r", 2, "-o", fmt, *MOCK)
    assert code == 0
    assert err == ""
    assert kept(tmp_path) == []
    if fmt == "sql":
        sqlite3.connect(":memory:").executescript(out)
    if fmt == "json":
        json.loads(out)


def test_output_file_takes_the_json_next_to_the_table_or_the_format_that_o_names(
    cli: Cli, model: Path, tmp_path: Path
) -> None:
    _, out, _ = cli(model, "-n", 1, "-r", 2, "--output-file", tmp_path / "a.json", *MOCK)
    assert "| Mock0" in out
    assert json.loads((tmp_path / "a.json").read_text())["tests"]
    _, out, _ = cli(model, "-n", 1, "-r", 2, "-o", "csv", "--output-file", tmp_path / "b", *MOCK)
    assert out == ""
    assert (tmp_path / "b").read_text().startswith("build_commit,")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "state") == ["a.json", "b", "moe.gguf"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-r", "0"], ["-r: 0"]),
        (["-n", "0"], ["0 tokens"]),
        (["-n", "4-1"], ["-n", "ends before"]),
        (["-n", "x"], ["-n", "'x'"]),
        (["-c", "8"], ["-c", "too small", "32"]),
        (["-ncmoe", "5"], ["-ncmoe", "4 layers"]),
        (["-dev", "CUDA7"], ["CUDA7", "Mock0"]),
        (["-ot", "(=CPU"], ["-ot", "no regular expression"]),
        (["-ot", "exps=Moon"], ["Moon", "CPU", "Mock0"]),
        (["-ot", "exps"], ["-ot", "'='"]),
        (["--arms", "fast"], ["fast", "stock"]),
        (["-o", "xml"], ["xml", "csv"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["-r", "two"], ["two"]),
        (["-m", "other.gguf"], ["two models"]),
        (["--output-file", "/proc/none/x"], ["/proc/none"]),
        (["--output-file", "/proc/x.json"], ["cannot write"]),
    ],
)
def test_bad_flags_are_one_error_and_one_hint_with_exit_code_2(
    cli: Cli, model: Path, args: list[str], words: list[str], tmp_path: Path
) -> None:
    code, out, err = cli(model, *args, *MOCK)
    assert code == ExitCode.USAGE
    assert out == ""
    assert all(word in err for word in words), err
    lines = err.splitlines()
    assert lines[0].startswith("ggml-async: error: ")
    assert len(lines) == 2
    assert kept(tmp_path) == []


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "text"])
def test_a_model_that_is_none_is_a_usage_error(cli: Cli, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(b"" if kind == "empty" else b"not a model" * 10)
    code, out, err = cli(path, *MOCK)
    assert code == ExitCode.USAGE
    assert "m.gguf" in err
    assert out == ""


def test_an_output_file_that_exists_is_left_alone_and_nothing_is_measured(
    cli: Cli, model: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text("mine")
    code, out, err = cli(model, "--output-file", mine, *MOCK)
    assert code == ExitCode.USAGE
    assert "exists" in err
    assert mine.read_text() == "mine"
    assert out == ""


def test_a_failure_midway_keeps_rows_and_json_and_exits_1(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_ASYNC_MOCK", "fail@20")
    code, out, err = cli(model, "-n", 1, "-r", 2, "-t", "1-9", *MOCK)
    assert code == ExitCode.FAILED
    assert "| Mock0" in out
    assert "ggml-async: error: the device is lost\nrestart it" in err
    (file,) = kept(tmp_path)
    document = json.loads(file.read_text())
    assert 0 < len(document["tests"]) < 9
    assert document["warnings"][-1]["code"] == "failed"


def test_a_failure_before_the_first_row_leaves_no_header(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_ASYNC_MOCK", "fail@1")
    code, out, _ = cli(model, "-o", "csv", "--output-file", tmp_path / "x.csv", *MOCK)
    assert (code, out) == (ExitCode.FAILED, "")
    assert not (tmp_path / "x.csv").exists()
    assert not (tmp_path / "x.csv.part").exists()


def test_sigint_keeps_what_was_finished_marks_it_and_exits_130(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_ASYNC_MOCK", "sigint@20")
    code, out, err = cli(model, "-n", 3, "-r", 5, *MOCK)
    assert code == ExitCode.INTERRUPTED
    assert "| Mock0" in out
    assert "Interrupted" in out
    assert "interrupted" in err
    (file,) = kept(tmp_path)
    document = json.loads(file.read_text())
    assert document["interrupted"] is True
    assert 0 < len(document["tests"][0]["config"]["order"]) < 10


def test_a_plug_in_that_sees_nothing_is_exit_code_3(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_ASYNC_MOCK", "blind")
    code, _, err = cli(model, "-n", 1, "-r", 2, *MOCK)
    assert code == ExitCode.NOT_INSTRUMENTED
    assert "doctor" in err


def test_logits_that_differ_are_exit_code_1(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_ASYNC_MOCK", "wrong@1")
    args = [model, "-n", 1, "-r", 1, "--no-warmup", *MOCK]
    codes = {cli(*args, "--seed", seed)[0] for seed in range(8)}
    assert ExitCode.FAILED in codes  # where async came first


@pytest.mark.parametrize(
    ("fault", "experts", "args", "words"),
    [
        ("", 0, [], "dense"),
        ("", 8, ["-ncmoe", "0"], "no experts on the CPU"),
        ("no-gpu", 8, [], "no GPU"),
        ("software", 8, [], "counts are exact"),
    ],
)
def test_nothing_to_gain_is_said_plainly_and_is_no_failure(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, experts: int, args: list[str], words: str
) -> None:
    monkeypatch.setenv("GGML_ASYNC_MOCK", fault)
    path = write_model(tmp_path / "m.gguf", experts=experts)
    code, out, err = cli(path, "-n", 1, "-r", 2, *args, *MOCK)
    assert code == ExitCode.OK
    assert words in err
    if fault != "software":
        assert "nothing to gain" in out


def test_progress_says_where_it_is_on_stderr_and_quiet_says_nothing(cli: Cli, model: Path) -> None:
    _, out, err = cli(model, "-n", 1, "-r", 2, "--progress", *MOCK)
    assert "test 1/1 tg1 run 4/4: " in err
    assert "run 4/4" not in out
    _, _, err = cli(model, "-n", 1, "-r", 2, "--progress", "-q", *MOCK)
    assert err == ""


def test_a_state_folder_that_cannot_be_written_is_a_warning_only(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    code, out, err = cli(model, "-n", 1, "-r", 2, *MOCK)
    assert code == ExitCode.OK
    assert "| Mock0" in out
    assert "--output-file" in err


def test_an_unexpected_exception_is_no_traceback(
    cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_args: object, **_more: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("ggml_async.cli.profile.make_plan", broken)
    code, _, err = cli(model, *MOCK)
    assert code == ExitCode.FAILED
    assert "unexpected RuntimeError: two lines" in err


def test_ctrl_c_anywhere_else_is_130_too(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ggml_async.cli.profile.read", interrupt)
    assert cli(model, *MOCK)[0] == ExitCode.INTERRUPTED


def test_help_imports_no_command_and_version_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"ggml-async {__version__}\n"
    code = "import sys; from ggml_async.cli.main import run; run(['--help']); print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    assert all(name in done.stdout for name in COMMANDS)


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prophile"]) == ExitCode.USAGE
    assert "prophile" in capsys.readouterr().err


def test_every_option_has_help_with_its_default() -> None:
    for option in profile.params:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help, option.name
            takes_value = not (option.is_flag or option.count)
            known = "[default" in option.help or option.show_default
            free = option.name in {"n_pg", "overrides", "llama", "output_file"}
            assert known or free or not takes_value, option.name


def test_the_module_is_the_entry_point() -> None:
    with pytest.raises(SystemExit) as caught:
        cli_main(["profile", "-r", "0"])
    assert caught.value.code == ExitCode.USAGE
