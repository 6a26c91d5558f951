"""llama-server of llama.cpp v0.5.0 (API 2, Vulkan) and b11434 (API 3, CPU): requests, streams, signals, switching."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from integration import running

from ggml_async import capture

from .conftest import BIN, LLAMA, program
from .serving import Server, serving

#: Tokens of an answer; the prompt's evaluation gives the first.
N = 8
#: Evaluations before the first request: one, to see whether its memory can forget (common_context_can_seq_rm).
AT_START = 1
#: Two tokens, as many as that one decodes: when ggml-vulkan's work buffers grow, lavapipe of Mesa 22.3 may crash.
PROMPT = "H"
#: Both arms of a completion: its text, its tokens, and every probability to the last digit.
PROBABILITIES = {"n_probs": 3, "return_tokens": True}


def server(folder: Path, model: Path) -> list[str | Path]:
    options = ["-ncmoe", "99", "-t", "2", "-c", "256", "-np", "1", "--no-warmup", "--no-ui"]
    return [program(folder, "llama-server"), "-m", model, *options]


def answer(served: Server) -> dict[str, Any]:
    """What a completion says, without the times it took."""
    found = served.complete(PROMPT, N, **PROBABILITIES)
    return {
        key: found[key] for key in ("content", "tokens", "completion_probabilities", "tokens_predicted", "stop_type")
    }


def bare(command: Sequence[str | Path], tmp_path: Path, number: int) -> tuple[dict[str, Any], int]:
    """The answer, and the exit code after a signal, of the server alone."""
    with serving(lambda where: [*command, *where], running.environment(), tmp_path / "bare.log") as served:
        found = answer(served)
        return found, served.stop(number)


def under_run(command: Sequence[str | Path], file: Path, *options: str) -> Any:
    return lambda where: running.command_line(file, [*command, *where], options=options)


def pid_of_server(file: Path) -> int:
    """The process that the plug-in attached in, from the capture as it is so far."""
    read = capture.read([file])
    return next(hello.pid for hello in read.hellos if hello.component == "plugin")


def switch(pid: int, mode: str) -> None:
    done = running.execute([*running.COMMAND_LINE, "switch", str(pid), mode], running.environment())
    assert done.code == 0, done.stderr


def test_llama_server_is_switched_while_it_serves(model: Path, profiled: dict[str, float], tmp_path: Path) -> None:
    command, file = server(LLAMA, model), tmp_path / "c.gac"
    expected, code = bare(command, tmp_path, signal.SIGTERM)
    assert len(expected["tokens"]) == N and len(expected["completion_probabilities"][0]["top_logprobs"]) == 3
    with serving(under_run(command, file), running.environment(), tmp_path / "run.log") as served:
        pid = pid_of_server(file)
        for mode in ("async", "stock", "off", "async"):
            switch(pid, mode)
            assert answer(served) == expected, mode
        assert served.stop(signal.SIGTERM) == code, served.text()[-3000:]
    read = capture.read([file])
    assert read.warnings == []
    assert running.attached(read) == ["0.25.1"]
    assert [capture.MODES[change.mode] for change in read.modes if change.mode != 2] == ["stock", "off"]
    found = running.arms(read)
    assert (found["async"]["tokens"], found["stock"]["tokens"]) == (AT_START + 2 * N, N)
    assert running.readbacks_per_token(read) == {mode: {profiled[mode]} for mode in ("async", "stock")}
    assert found["async"]["synchronizes"] == found["async"]["stages"] == found["async"]["readbacks"] // 2
    assert found["stock"]["synchronizes"] == found["stock"]["readbacks"]
    assert found["stock"]["waits"] / N > found["async"]["waits"] / (AT_START + 2 * N), "stock waits more often"


def test_a_stream_arrives_token_by_token(model: Path, tmp_path: Path) -> None:
    command, file = server(LLAMA, model), tmp_path / "c.gac"
    with serving(lambda where: [*command, *where], running.environment(), tmp_path / "bare.log") as served:
        expected = [event["content"] for _, event in served.stream(PROMPT, N)]
    with serving(under_run(command, file), running.environment(), tmp_path / "run.log") as served:
        answered = time.monotonic()
        events = served.stream(PROMPT, N)
        assert served.stop() == 0
    assert [event["content"] for _, event in events] == expected
    assert events[-1][1]["stop"] and len(events) >= N
    arrivals = [at for at, _ in events]
    assert arrivals == sorted(arrivals) and arrivals[0] > answered
    # each came when it was computed, not all of them at the end
    tokens = capture.read([file]).events
    tokens = tokens[(tokens["kind"] == capture.TOKEN) & (tokens["n_readbacks"] > 0)]
    assert len(tokens) == AT_START + N
    last = tokens[-1]["t_ns"] / 1e9
    assert arrivals[0] < last < arrivals[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("group", [False, True])
def test_signals_end_it_with_its_own_code(model: Path, tmp_path: Path, number: int, group: bool) -> None:
    """To the process alone (kill), and to its group, as a terminal's Ctrl-C."""
    command, file = server(LLAMA, model), tmp_path / "c.gac"
    expected, code = bare(command, tmp_path, number)
    with serving(under_run(command, file), running.environment(), tmp_path / "run.log") as served:
        assert answer(served) == expected
        assert served.stop(number, group) == code, served.text()[-3000:]
    read = capture.read([file])
    assert read.warnings == [] and len(read.ends) == len(read.writers), "it did not end in order"


def test_a_killed_server_leaves_its_capture(model: Path, tmp_path: Path) -> None:
    command, file = server(LLAMA, model), tmp_path / "c.gac"
    with serving(under_run(command, file), running.environment(), tmp_path / "run.log") as served:
        answer(served)
        time.sleep(1.5)  # the writer writes at least once a second
        os.kill(pid_of_server(file), signal.SIGKILL)
        assert served.process.wait(60) == -signal.SIGKILL or served.process.returncode == 128 + signal.SIGKILL
    read = capture.read([file])
    assert any("END" in warning or "end" in warning for warning in read.warnings)
    assert running.arms(read)["async"]["tokens"] == AT_START + N


def test_llama_server_of_api_3_answers_the_same(model: Path, tmp_path: Path) -> None:
    """b11434, ggml 0.26, has no GPU here: the plug-in is in, and there is nothing to read back."""
    command, file = server(BIN, model), tmp_path / "c.gac"
    expected, code = bare(command, tmp_path, signal.SIGTERM)
    with serving(under_run(command, file), running.environment(), tmp_path / "run.log") as served:
        switch(pid_of_server(file), "stock")
        assert answer(served) == expected
        ended = served.stop(signal.SIGTERM)
    read = capture.read([file])
    assert read.hosts[0].api_version == 3 and running.attached(read)[0].startswith("0.26")
    assert running.readbacks_per_token(read) == {}
    assert ended == code
