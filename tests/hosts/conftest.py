"""Hosts that have to be compiled (build.sh), under `ggml-async run`. `make hosts` builds them and runs these tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from integration import running
from integration.worded import make_worded

BUILT = Path(__file__).resolve().parents[2] / "build" / "hosts"
#: What each host's tests need, and the part of build.sh that makes it.
LLAMA = BUILT / "llama" / "bin"
BIN = BUILT / "bin" / "bin"
PYTHON = BUILT / "python" / "bin" / "python"


def program(folder: Path, name: str) -> Path:
    """A compiled program; without it the test is skipped, which `make hosts` never does."""
    if not (folder / name).exists():
        pytest.skip(f"{name} is not built: make hosts")
    return folder / name


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture of experts with a vocabulary; its experts go to the CPU with -ncmoe 99."""
    return make_worded(tmp_path_factory.mktemp("models") / "worded.gguf")


@pytest.fixture(scope="session")
def profiled(model: Path) -> dict[str, float]:
    """Readbacks and synchronizes a token by mode, as `ggml-async profile` measures them on the pinned runtime."""
    command = [*running.COMMAND_LINE, "profile", model, "-ncmoe", "all", "-n", "4", "-r", "1", "-o", "json"]
    done = running.execute(command, running.environment())
    assert done.code == 0, done.stderr
    test = json.loads(done.stdout)["tests"][0]
    return {mode: test["arms"][mode]["readbacks_per_token"] for mode in ("stock", "async")}
