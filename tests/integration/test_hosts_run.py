"""Users' own programs under `ggml-async run`: bindings that install in seconds (tests/hosts: those that are compiled).

Each program knows nothing of ggml-async. Its output must be the same to the last digit, its exit code its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from . import running
from .conftest import HOSTS
from .node_packages import node, node_llama_cpp
from .wheels import wheel
from .worded import make_worded
from .workload import LAYERS

#: Tokens that each program generates.
N = 6


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_worded(tmp_path_factory.mktemp("models") / "worded.gguf")


@pytest.fixture(scope="module")
def odd_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head size (36) for which ggml-vulkan has no flash attention: it runs on the CPU in every layer."""
    return make_worded(tmp_path_factory.mktemp("models") / "odd-heads.gguf", head_dim=36)


def test_node_llama_cpp(odd_heads: Path, tmp_path: Path) -> None:
    """Its API places no tensors, but forces flash attention: its inputs Q, K and V are read back in every layer."""
    env = running.environment()
    program = [node(), HOSTS / "user_node.mjs", node_llama_cpp(), odd_heads, str(N), "7"]
    bare = running.execute(program, env)
    assert bare.code == 7, bare.stderr[-3000:]
    said = json.loads(bare.stdout)
    assert said["gpu"] == "vulkan" and said["layers"] == LAYERS + 1 and len(set(said["tokens"])) > 2
    for mode in ("async", "stock"):
        done, read = running.run(tmp_path / f"{mode}.gac", program, env, mode)
        assert (done.code, done.stdout) == (7, bare.stdout), done.stderr[-3000:]
        # once more in a child process, in which the binding tries its libraries out
        assert running.attached(read) == ["0.25.1"] * 2
        assert len({hello.pid for hello in read.hellos}) == 2
        assert running.readbacks_per_token(read) == {mode: {3 * LAYERS}}
        assert running.readback_names(read) == {
            "Qcur",
            *(f"cache_{kv}_l{i} (view) (permuted)" for kv in "kv" for i in range(LAYERS)),
        }
        found = running.arms(read)[mode]
        assert (found["tokens"], found["stages"], found["declined"]) == (N, N * LAYERS, 0)
        assert found["synchronizes"] == N * LAYERS * (3 if mode == "stock" else 1)
        assert found["waits_readback"] > 0


def test_cyllama_vulkan(worded: Path, tmp_path: Path) -> None:
    """It loads GGML_BACKEND_PATH before its renamed CPU backend; the plug-in gets in all the same."""
    env = running.environment(path=[wheel("cyllama-vulkan", "0.2.18")])
    program = [sys.executable, HOSTS / "user_cyllama.py", worded, str(N)]
    bare = running.execute(program, env)
    assert bare.code == 0 and len(json.loads(bare.stdout)["logits"]) > 64, bare.stderr[-3000:]
    for mode in ("async", "stock"):
        done, read = running.run(tmp_path / f"{mode}.gac", program, env, mode)
        assert (done.code, done.stdout) == (0, bare.stdout), done.stderr[-3000:]
        assert running.attached(read) == ["0.12.0"]
        assert running.readbacks_per_token(read) == {mode: {2 * LAYERS}}
        assert running.readback_names(read) == {"Kcur", "Vcur"}
        found = running.arms(read)[mode]
        assert (found["tokens"], found["stages"], found["declined"]) == (N, N * LAYERS, 0)
        assert found["synchronizes"] == N * LAYERS * (2 if mode == "stock" else 1)
        assert found["waits_readback"] > 0


def test_xllamacpp(worded: Path, tmp_path: Path) -> None:
    """ggml 0.26 of API 3 in one library, CPU only: it never reads the variable, and has nothing to read back."""
    env = running.environment(path=[wheel("xllamacpp", "2026.10.11549")])
    program = [sys.executable, HOSTS / "user_xllamacpp.py", worded, "5"]
    bare = running.execute(program, env)
    assert bare.code == 5 and json.loads(bare.stdout)[0]["text"], bare.stderr[-3000:]
    done, read = running.run(tmp_path / "c.gac", program, env)
    assert done.code == 5, done.stderr[-3000:]
    assert done.stdout == bare.stdout
    assert [host.api_version for host in read.hosts] == [3]
    assert running.readbacks_per_token(read) == {}
    plugin = next(counters for (_, scope, _), counters in read.counters.items() if scope == 1)
    assert plugin["cpu_computes"] > N and plugin["readbacks"] == 0
