"""llama-bench and llama-completion of llama.cpp v0.5.0 (ggml 0.25.1, API 2) with Vulkan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from integration import running

from .conftest import LLAMA, program

#: llama-bench's own: one warm-up and -r runs of a prompt (one evaluation each), then the same of -n tokens.
N_PROMPT, N_GEN, REPETITIONS = 8, 6, 2
EVALUATIONS = (1 + REPETITIONS) + (1 + REPETITIONS * N_GEN)


def bench(model: Path) -> list[str | Path]:
    lengths = ["-p", str(N_PROMPT), "-n", str(N_GEN), "-r", str(REPETITIONS)]
    return [program(LLAMA, "llama-bench"), "-m", model, "-ncmoe", "99", "-t", "2", *lengths, "-o", "jsonl"]


def rows(stdout: str) -> list[dict[str, Any]]:
    """llama-bench's results without what differs from run to run."""
    found = [json.loads(line) for line in stdout.splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith(("_ns", "_ts", "_time"))} for row in found]


@pytest.fixture(scope="module")
def bare_bench(model: Path) -> list[dict[str, Any]]:
    done = running.execute(bench(model), running.environment())
    assert done.code == 0, done.stderr
    found = rows(done.stdout)
    assert [(row["n_prompt"], row["n_gen"]) for row in found] == [(N_PROMPT, 0), (0, N_GEN)]
    return found


@pytest.mark.parametrize("mode", ["stock", "async"])
def test_llama_bench_reads_back_what_profile_says(
    model: Path, bare_bench: list[dict[str, Any]], profiled: dict[str, float], tmp_path: Path, mode: str
) -> None:
    done, read = running.run(tmp_path / "c.gac", bench(model), running.environment(), mode)
    assert done.code == 0, done.stderr
    # its own table says which backends there are; all else is as without
    assert rows(done.stdout) == [{**row, "backends": row["backends"] + ",ASYNC"} for row in bare_bench]
    assert running.attached(read) == ["0.25.1"]
    found = running.arms(read)[mode]
    assert found["tokens"] == EVALUATIONS
    assert running.readbacks_per_token(read) == {mode: {profiled[mode]}}
    assert found["readbacks"] == found["in_stages"] == EVALUATIONS * profiled[mode]
    assert found["synchronizes"] == (found["stages"] if mode == "async" else found["readbacks"])
    assert found["declined"] == 0
    assert running.readback_names(read) == {"ffn_norm", "ffn_moe_topk"}
    assert found["waits_readback"] >= found["synchronizes"] // 2, "the layer saw no waits where the plug-in had some"


def completion(model: Path) -> list[str | Path]:
    # Drawn at random from the logits, so that the text tells them apart. The prompt is no longer than the warm-up: when
    # ggml-vulkan's work buffers grow, lavapipe of Mesa 22.3 may crash.
    text = ["-no-cnv", "-p", "H", "-n", "12", "--seed", "7", "--ignore-eos"]
    flat = ["--temp", "2", "--top-k", "0", "--top-p", "1", "--min-p", "0"]
    return [program(LLAMA, "llama-completion"), "-m", model, "-ncmoe", "99", "-t", "2", "-c", "128", *text, *flat]


def same_as_far_as_printed(one: str, other: str) -> bool:
    """llama-completion may lose the end of its output: its log's thread is not waited for at exit (common/log.cpp)."""
    shorter, longer = sorted((one, other), key=len)
    return len(shorter) > 6 and longer.startswith(shorter)


def test_llama_completion_writes_the_same_text(model: Path, profiled: dict[str, float], tmp_path: Path) -> None:
    env = running.environment()
    bare = running.execute(completion(model), env)
    assert bare.code == 0 and bare.stdout.startswith("H") and len(set(bare.stdout.strip())) > 6, bare
    for mode in ("async", "stock", "off"):
        done, read = running.run(tmp_path / f"{mode}.gac", completion(model), env, mode)
        assert done.code == 0, done.stderr
        assert same_as_far_as_printed(done.stdout, bare.stdout)
        assert running.readbacks_per_token(read) == ({} if mode == "off" else {mode: {profiled[mode]}})


@pytest.mark.parametrize("name", ["llama-bench", "llama-completion", "llama-server"])
@pytest.mark.parametrize("arguments", [["--nonsense"], ["-m", "absent.gguf"]])
def test_exit_codes_and_messages_are_the_programs_own(tmp_path: Path, name: str, arguments: list[str]) -> None:
    command = [program(LLAMA, name), *arguments]
    bare = running.execute(command, running.environment())
    assert bare.code != 0
    done = running.execute(running.command_line(tmp_path / "c.gac", command), running.environment())
    assert done.code == bare.code
    assert done.stdout == bare.stdout


def test_a_variable_that_is_taken_is_left_alone(model: Path, tmp_path: Path) -> None:
    """GGML_BACKEND_PATH holds one path, and the user's comes first: the program runs as without us, and exit is 3."""
    theirs = str(LLAMA / "libggml-cpu-x64.so")
    env = running.environment({"GGML_BACKEND_PATH": theirs})
    bare = running.execute(bench(model), env)
    assert bare.code == 0, bare.stderr
    done = running.execute(running.command_line(tmp_path / "c.gac", bench(model), options=["--no-layer"]), env)
    assert done.code == 3
    assert f"GGML_BACKEND_PATH is {theirs} already" in done.stderr and "unset it" in done.stderr
    assert rows(done.stdout) == rows(bare.stdout)
