"""``ggml-async profile`` from end to end, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ggml_async import models
from ggml_async.llama import LlamaLibrary

from .conftest import CHILD_TIMEOUT
from .workload import LAYERS, SHAPE, readback_bytes

COMMAND = (sys.executable, "-m", "ggml_async.cli.main", "profile")
SETTINGS = ("-t", "2", "-r", "2")


def start(*arguments: str | Path, llama: LlamaLibrary, cwd: Path) -> subprocess.Popen[str]:
    root = Path(models.__file__).parents[1]
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments), "--llama", str(llama.dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(root), "XDG_STATE_HOME": str(cwd / "state")},
    )


def profile(*arguments: str | Path, llama: LlamaLibrary, cwd: Path) -> tuple[int, str, str]:
    process = start(*arguments, llama=llama, cwd=cwd)
    out, err = process.communicate(timeout=CHILD_TIMEOUT)
    assert "Traceback" not in err
    return process.returncode, out, err


def test_counts_and_logits_of_a_mixture_of_experts(llama: LlamaLibrary, model_path: Path, tmp_path: Path) -> None:
    code, out, err = profile(
        model_path, "-n", "3", "-ncmoe", "half,all", *SETTINGS, "-o", "json", llama=llama, cwd=tmp_path
    )
    assert code == 0, err
    document = json.loads(out)
    assert document["schema"] == "ggml-async/profile/1"
    assert document["model"]["n_layer"] == LAYERS
    assert document["host"]["api_version"] == llama.api_version
    assert [test["config"]["n_cpu_moe"] for test in document["tests"]] == [LAYERS // 2, LAYERS]
    for test in document["tests"]:
        splits = test["config"]["n_cpu_moe"]
        assert test["identical_logits"] is True
        for arm, synchronizes in (("stock", 2), ("async", 1)):
            found = test["arms"][arm]
            assert found["tokens"] == 2 * 3
            assert found["cpu_splits_per_token"] == splits
            assert found["readbacks_per_token"] == 2 * splits
            assert found["synchronizes_per_token"] == synchronizes * splits
            assert found["uploads_per_token"] == splits + 1
            assert found["bytes_per_token"] == splits * sum(readback_bytes(1).values())
            assert found["declined"] == {}
        assert test["arms"]["async"]["issue_us"]["mean"] > 0
        assert test["arms"]["stock"]["device_wait_us"]["mean"] > 0
        assert test["arms"]["async"]["device_wait_us"] is None


def test_without_a_format_it_prints_the_table_and_keeps_the_json(
    llama: LlamaLibrary, model_path: Path, tmp_path: Path
) -> None:
    code, out, err = profile(model_path, "-n", "2", *SETTINGS, llama=llama, cwd=tmp_path)
    assert code == 0, err
    assert any(line.startswith("|") for line in out.splitlines())
    kept = list((tmp_path / "state").rglob("*.json"))
    assert len(kept) == 1 and kept[0].name in out + err
    assert json.loads(kept[0].read_text())["tests"][0]["identical_logits"] is True


def test_a_dense_model_has_nothing_to_gain_and_is_told_so(llama: LlamaLibrary, tmp_path: Path) -> None:
    dense = tmp_path / "dense.gguf"
    models.make_synthetic(dense, **{**SHAPE, "dense": True})
    code, out, err = profile(dense, "-n", "2", *SETTINGS, "-o", "json", llama=llama, cwd=tmp_path)
    assert code == 0, err
    document = json.loads(out)
    assert any("dense" in warning["message"] for warning in document["warnings"]), document["warnings"]
    assert document["tests"][0]["arms"]["async"]["readbacks_per_token"] == 0


def truncated(folder: Path, model: Path) -> Path:
    path = folder / "truncated.gguf"
    path.write_bytes(model.read_bytes()[:100_000])
    return path


@pytest.mark.parametrize("case", ["missing", "truncated", "directory", "ncmoe", "device", "pattern"])
def test_bad_input_is_one_error_and_exit_code_2(
    llama: LlamaLibrary, model_path: Path, tmp_path: Path, case: str
) -> None:
    arguments: dict[str, list[str | Path]] = {
        "missing": [tmp_path / "none.gguf"],
        "truncated": [truncated(tmp_path, model_path)],
        "directory": [tmp_path],
        "ncmoe": [model_path, "-ncmoe", str(LAYERS + 1)],
        "device": [model_path, "-dev", "Vulkan77"],
        "pattern": [model_path, "-ot", "blk\\.([0-9]+=CPU"],
    }
    before = set(tmp_path.iterdir())
    code, out, err = profile(*arguments[case], *SETTINGS, "-o", "json", llama=llama, cwd=tmp_path)
    assert code == 2, err
    assert out == ""
    assert sum("error" in line.lower() for line in err.splitlines()) == 1, err
    assert set(tmp_path.iterdir()) == before, "something was written"


def test_an_interrupt_keeps_what_was_measured_and_marks_it(
    llama: LlamaLibrary, model_path: Path, tmp_path: Path
) -> None:
    process = start(
        model_path, "-n", "8", "-r", "500", "-t", "2", "-o", "json", "--progress", llama=llama, cwd=tmp_path
    )
    assert process.stderr is not None
    # Both arms have run once when the third run is announced.
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        line = process.stderr.readline()
        if " run 3/" in line or " run 4/" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    document = json.loads(out)
    assert document["interrupted"] is True
    assert document["tests"][0]["interrupted"] is True
    assert document["tests"][0]["identical_logits"] is True
    assert 0 < document["tests"][0]["arms"]["stock"]["tokens"] < 8 * 500
