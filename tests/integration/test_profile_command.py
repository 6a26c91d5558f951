"""``ggml-async profile`` from end to end, as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ggml_async import models, native
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


def check_fence_waits(arm: dict[str, Any], splits: int) -> None:
    """What must hold in every run. How many polls a wait takes, and whether there is one, is the driver's timing."""
    waits, submits = arm["fence_waits_by_cause"], arm["queue_submits_by_cause"]
    assert sum(waits.values()) == pytest.approx(arm["fence_waits_per_token"])
    assert sum(submits.values()) == pytest.approx(arm["queue_submits_per_token"])
    assert arm["wait_calls_per_token"] >= arm["fence_waits_per_token"]
    assert arm["queue_submits_per_token"] > splits
    assert arm["fence_wait_us"]["mean"] > 0
    assert arm["fence_wait_us"]["p99"] is None


def test_fence_waits_are_one_a_cpu_split_and_at_most_three_more(
    llama: LlamaLibrary, model_path: Path, tmp_path: Path
) -> None:
    arguments = ("-n", "3", "-ncmoe", "0,half,all", *SETTINGS, "--arms", "stock,async,off", "-o", "json")
    code, out, err = profile(model_path, *arguments, llama=llama, cwd=tmp_path)
    assert code == 0, err
    document = json.loads(out)
    assert Path(document["host"]["vulkan_layer"]).name == "libVkLayer_ggml_async_waits.so"
    assert not [w for w in document["warnings"] if "layer" in w["code"]]
    for test in document["tests"]:
        splits = test["config"]["n_cpu_moe"]
        stock, queued, off = (test["arms"][arm] for arm in ("stock", "async", "off"))
        for arm in (stock, queued, off):
            check_fence_waits(arm, splits)
        assert queued["fence_waits_per_token"] <= splits + 3
        assert queued["fence_waits_by_cause"].get("readback", 0) <= splits
        # the same graph: each pair of reads of a split is submitted alone in stock, together in async
        assert stock["queue_submits_per_token"] - queued["queue_submits_per_token"] == splits
        assert off["queue_submits_per_token"] == stock["queue_submits_per_token"]
        assert set(off["fence_waits_by_cause"]) == {"elsewhere"}
        if splits:
            assert stock["fence_waits_per_token"] > queued["fence_waits_per_token"]
            # a stock readback is a submit and a wait of its own
            assert stock["queue_submits_by_cause"]["readback"] >= 2 * splits
        else:
            assert "readback" not in stock["queue_submits_by_cause"]


@pytest.mark.parametrize("how", ["flag", "not built"])
def test_without_the_layer_its_figures_are_null_and_it_says_why(
    llama: LlamaLibrary, model_path: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "flag":
        flags, words = ("--no-layer",), "--no-layer"
    else:
        # a plug-in of its own, beside which there is no layer, as built without the Vulkan headers
        shutil.copy(native.library_path(), tmp_path / "libggml-async.so")
        shutil.copy(native.library_path().parent / "ggml_async.h", tmp_path)
        monkeypatch.setenv("GGML_ASYNC_LIBRARY", str(tmp_path / "libggml-async.so"))
        flags, words = (), "are not beside"
    code, out, err = profile(model_path, "-n", "2", *SETTINGS, *flags, "-o", "json", llama=llama, cwd=tmp_path)
    assert code == 0, err
    document = json.loads(out)
    (warning,) = [w for w in document["warnings"] if w["code"] == "no_layer"]
    assert words in warning["message"] and warning["message"] in err
    assert document["host"]["vulkan_layer"] is None
    for arm in document["tests"][0]["arms"].values():
        assert arm["fence_waits_per_token"] is arm["queue_submits_per_token"] is arm["fence_wait_us"] is None
        assert arm["readbacks_per_token"] > 0


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
