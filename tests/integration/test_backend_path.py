"""An unmodified llama.cpp loads the plug-in by itself: GGML_BACKEND_PATH, and GGML_ASYNC for the mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from ggml_async import native
from ggml_async.llama import LlamaLibrary

from . import workload
from .conftest import child
from .workload import LAYERS, Logits

READBACKS = 2 * LAYERS * (len(workload.BATCHES) - 1)


@pytest.mark.parametrize("value", [None, "async", "stock", "off", "fast"])
def test_llama_cpp_loads_the_plugin_in_the_mode_of_the_environment(
    llama: LlamaLibrary, model_path: Path, bare: dict[int, Logits], value: str | None
) -> None:
    env = {"GGML_BACKEND_PATH": str(native.library_path())} | ({"GGML_ASYNC": value} if value else {})
    found, log = child("backend_path.py", llama.dir, model_path, env=env)
    mode = {None: "async", "fast": "off"}.get(value, value)
    assert found["registries"].count("ASYNC") == 1
    assert found["n_hosts"] == 1
    assert found["info"]["mode"] == mode
    assert found["info"]["api_version"] == llama.api_version
    assert found["digest"] == workload.digest(bare[LAYERS])
    counters = found["counters"]
    assert counters["readbacks"] == (0 if mode == "off" else READBACKS)
    assert counters["direct"] == (READBACKS if mode == "async" else 0)
    assert counters["stock"] == (READBACKS if mode == "stock" else 0)
    # both lines are in llama.cpp's own log
    assert sum("attached to ggml" in line for line in log.splitlines()) == 1
    assert sum("fast" in line and "ggml-async" in line for line in log.splitlines()) == (value == "fast")


def test_without_the_variable_nothing_is_loaded(llama: LlamaLibrary, model_path: Path, bare: dict[int, Logits]) -> None:
    found, log = child("backend_path.py", llama.dir, model_path)
    assert "ASYNC" not in found["registries"]
    assert found["n_hosts"] == 0
    assert found["digest"] == workload.digest(bare[LAYERS])
    assert "ggml-async:" not in log
