"""Builds the stress driver and runs it over a ggml."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Seconds that one run may take, whatever it was asked for.
TIMEOUT = 900


def build(folder: Path, *options: str, source: Path = ROOT, targets: Sequence[str] = ("stress",)) -> Path:
    """Configures and builds the native tests of `source` in `folder`, which it returns."""
    configure = ["cmake", "-S", str(source), "-B", str(folder), "-G", "Ninja", "-DGGML_ASYNC_TESTS=ON", *options]
    if not (folder / "build.ninja").is_file():
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder), "--target", *targets], check=True, stdout=subprocess.DEVNULL)
    return folder


@dataclass
class Outcome:
    """What one run printed."""

    code: int
    summary: dict[str, Any]
    log: str

    @property
    def counters(self) -> dict[str, int]:
        """The plug-in's."""
        counters: dict[str, int] = self.summary["counters"]
        return counters


def environment(mock_options: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The process's, with nothing of the user's that changes a run."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GGML_", "MOCK_"))}
    return {**kept, "MOCK_OPTIONS": mock_options, **(extra or {})}


def outcome(done: subprocess.CompletedProcess[str]) -> Outcome:
    """Reads the summary line; a run that broke off has none."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return Outcome(done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr)


def run(
    built: Path,
    runtime: Path,
    *arguments: str,
    mock_options: str = "lazy=1",
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    prefix: Sequence[str] = (),
) -> Outcome:
    """One run of the driver built in `built` over the libraries in `runtime`.

    Raises:
        subprocess.TimeoutExpired: after `timeout` seconds.
    """
    here = built / "tests" / "stress"
    command = [
        *prefix, str(here / "stress"), "--runtime", str(runtime), "--mock", str(here / "libggml-mock.so"),
        "--plugin", str(built / "libggml-async.so"), *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        env=environment(mock_options, env),
        timeout=timeout,
        check=False,
    )
    return outcome(done)
