"""Users' programs, bare and under `ggml-async run`, and what their captures say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ggml_async import capture, native
from ggml_async.capture import Capture

Command = Sequence[str | Path]
#: Seconds for one program: the first run on a machine compiles every shader for lavapipe, on two cores.
TIMEOUT = 400
#: This package's command from every folder, and with nothing on PYTHONPATH that the user's program would see.
COMMAND_LINE = [
    sys.executable, "-c",
    f"import sys; sys.path.insert(0, {str(Path(native.__file__).parents[1])!r}); sys.argv[0] = 'ggml-async'; "
    "from ggml_async.cli.main import main; main()",
]  # fmt: skip


@dataclass(frozen=True)
class Done:
    """How a program ended."""

    code: int
    stdout: str
    stderr: str


def environment(extra: Mapping[str, str] | None = None, path: Sequence[Path] = ()) -> dict[str, str]:
    """Lavapipe listed and quick, none of our variables; PYTHONPATH is `path`."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("GGML_ASYNC", "GGML_BACKEND_PATH"))}
    env.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
    env.setdefault("GGML_VK_DISABLE_FUSION", "1")
    if cache := os.environ.get("GGML_ASYNC_CACHE"):
        env["GGML_ASYNC_CACHE"] = cache
    env.pop("PYTHONPATH", None)
    if path:
        env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return {**env, **(extra or {})}


def execute(command: Command, env: Mapping[str, str], timeout: float = TIMEOUT) -> Done:
    """Runs a command to its end, with nothing on its standard input."""
    done = subprocess.run(
        [str(part) for part in command], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        timeout=timeout, env=dict(env), check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


def command_line(file: Path, program: Command, mode: str | None = None, options: Command = ()) -> list[str]:
    """`ggml-async run` in front of a program, capturing into `file`."""
    chosen = ["--mode", mode] if mode else []
    return [*COMMAND_LINE, "run", "--capture", str(file), *chosen, *map(str, options), "--", *map(str, program)]


def run(
    file: Path, program: Command, env: Mapping[str, str], mode: str | None = None, options: Command = ()
) -> tuple[Done, Capture]:
    """Runs a program under `ggml-async run`: how it ended, and its capture, which must be whole."""
    done = execute(command_line(file, program, mode, options), env)
    assert file.exists(), f"no capture was written ({done.code}):\n{done.stderr[-3000:]}"
    read = capture.read([file])
    assert read.warnings == [], f"{read.warnings}\n{done.stderr[-3000:]}"
    return done, read


def arms(read: Capture) -> dict[str, Counter[str]]:
    """What was seen by mode: tokens, tokens with readbacks, their readbacks and synchronizes, the layer's waits ..."""
    found: dict[str, Counter[str]] = {}
    for event in read.events:
        counter = found.setdefault(capture.MODES.get(int(event["mode"]), "?"), Counter())
        kind = int(event["kind"])
        if kind == capture.TOKEN and event["n_readbacks"]:
            counter["tokens"] += 1
        elif kind == capture.STAGE:
            counter["stages"] += 1
            counter["synchronizes"] += int(event["n_sync"])
            counter["in_stages"] += int(event["n_readbacks"])
        elif kind == capture.READBACK:
            counter["readbacks"] += 1
            counter["declined"] += bool(event["decline"])
        elif kind == capture.WAIT and not event["flags"]:
            counter["waits"] += 1
            counter[f"waits_{capture.CAUSES[event['cause']]}"] += 1
    return found


def readbacks_per_token(read: Capture) -> dict[str, set[int]]:
    """By mode: the different numbers of readbacks that tokens with readbacks had."""
    found: dict[str, set[int]] = {}
    for token in read.events[read.events["kind"] == capture.TOKEN]:
        if token["n_readbacks"]:
            found.setdefault(capture.MODES[int(token["mode"])], set()).add(int(token["n_readbacks"]))
    return found


def readback_names(read: Capture) -> set[str]:
    """Names of the tensors that were read back, without their layer."""
    names, column = read.tensor_names
    return {names[i].split("-")[0] for i in column[read.events["kind"] == capture.READBACK]}


def attached(read: Capture) -> list[str]:
    """ggml's version for each host that the plug-in attached to, in the order of time."""
    return [host.version for host in read.hosts]
