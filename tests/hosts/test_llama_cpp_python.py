"""llama-cpp-python 0.3.36 (ggml 0.25.3, API 2), its backends compiled in, CPU only, in an environment of its own."""

from __future__ import annotations

import json
from pathlib import Path

from integration import running

from .conftest import PYTHON, program


def test_llama_cpp_python_is_attached_to_by_the_import_hook(model: Path, tmp_path: Path) -> None:
    """It never reads the variable, and its environment has neither cffi nor click."""
    env = running.environment()
    user = [program(PYTHON.parent, "python"), Path(__file__).with_name("user_llama_cpp_python.py"), model, "5"]
    bare = running.execute(user, env)
    assert bare.code == 5, bare.stderr
    assert len(json.loads(bare.stdout)[0]["logprobs"]["token_logprobs"]) == 6
    for mode in ("async", "stock"):
        done, read = running.run(tmp_path / f"{mode}.gac", user, env, mode)
        assert (done.code, done.stdout) == (5, bare.stdout), done.stderr
        assert running.attached(read) == ["0.25.3"]
        assert running.readbacks_per_token(read) == {}
        counters = next(found for (_, scope, _), found in read.counters.items() if scope == 1)
        assert counters["cpu_computes"] >= 6 and counters["readbacks"] == 0


def test_without_the_hook_it_is_not_reached(model: Path, tmp_path: Path) -> None:
    """-I shuts the hook out: the program's output and success, but exit code 3 with the likely reason."""
    env = running.environment()
    user = [program(PYTHON.parent, "python"), "-I", Path(__file__).with_name("user_llama_cpp_python.py"), model]
    bare = running.execute([*user, "0"], env)
    assert bare.code == 0, bare.stderr
    done = running.execute(running.command_line(tmp_path / "c.gac", [*user, "0"]), env)
    assert (done.code, done.stdout) == (3, bare.stdout), done.stderr
    assert "did not get in" in done.stderr and "python -I" in done.stderr, done.stderr
    failed = running.execute(running.command_line(tmp_path / "d.gac", [*user, "6"]), env)
    assert failed.code == 6, "the program's own failure comes first"
