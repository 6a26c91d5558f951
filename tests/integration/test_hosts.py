"""The plug-in in other ggml builds, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from ggml_async import fetch
from ggml_async.llama import LlamaLibrary

from . import workload
from .conftest import child
from .wheels import glibc, wheel
from .workload import LAYERS, Logits

LIBGGML = ("libggml-python", "0.20.2")
#: cyllama_host.py decodes 4 tokens.
TOKENS = 4


def test_libggml_python_is_attached_to_and_left_without_a_trace() -> None:
    found, _ = child("libggml_python.py", path=[wheel(*LIBGGML)])
    assert "no ggml is loaded" in found["refusal"]
    assert found["info"]["api_version"] == 2
    assert Path(found["info"]["library"]).name.startswith("libggml")
    assert len(found["found"]) == 1
    assert found["sums"] == [True] * 5
    assert found["live"] == 1, "only the backend that was created after attaching is followed"
    assert found["counters"]["cpu_computes"] == 1
    assert found["detached"] and not found["info"]["attached"]
    assert found["after"] == found["counters"], "something was counted after detaching"
    assert found["counters"]["readbacks"] == found["counters"]["stages"] == 0


def test_xllamacpp_of_api_3_computes_the_same_with_the_plugin() -> None:
    found, _ = child("xllamacpp_host.py", fetch.ensure_demo_model(), path=[wheel("xllamacpp", "2026.10.11549")])
    assert found["info"]["api_version"] == 3
    assert found["info"]["version"].startswith("0.26")
    assert found["sums"] == [True, True]
    choices = [answer["choices"] for answer in found["answers"]]
    assert len(choices) == 4 and choices[0][0]["text"]
    # stock, async, off, detached: the same text with the same log-probabilities
    assert all(choice == choices[0] for choice in choices)
    assert found["counters"]["cpu_computes"] > 4, "the server's own backend was not followed"
    assert found["counters"]["readbacks"] == 0
    assert found["detached"]


def test_cyllama_vulkan_reads_back_asynchronously(model_path: Path) -> None:
    """ggml 0.12: 2 readbacks a layer (K and V, as attention is on the CPU there), bitwise the same in every mode."""
    found, _ = child("cyllama_host.py", model_path, path=[wheel("cyllama-vulkan", "0.2.18")])
    assert (found["info"]["api_version"], found["info"]["version"]) == (2, "0.12.0")
    splits = LAYERS * TOKENS
    for mode, synchronizes in (("stock", 2), ("async", 1)):
        arm = found["arms"][mode]
        counters = arm["counters"]
        assert arm["declined"] == {}
        assert counters["readbacks"] == counters["direct" if mode == "async" else "stock"] == 2 * splits
        assert counters["stages"] == splits
        assert counters["synchronizes"] == synchronizes * splits
        row = 4 * workload.SHAPE["n_head_kv"] * workload.SHAPE["head_dim"]
        assert arm["stages"] == [[2, synchronizes, 2 * row]] * splits
        assert arm["names"] == sorted(f"{kind}cur-{i} (view)" for kind in "KV" for i in range(LAYERS))
    assert not any(found["arms"]["off"]["counters"].values())
    assert found["on_gpu"]["readbacks"] == 0
    assert {found["bare"], found["after"], *(arm["digest"] for arm in found["arms"].values())} == {found["bare"]}
    assert all(arm["distinct"] == TOKENS for arm in found["arms"].values())
    assert found["detached"]


@pytest.mark.skipif(glibc() < (2, 38), reason=f"llama-cpp-py-sync needs glibc 2.38, this is {glibc()}")
def test_llama_cpp_py_sync_of_ggml_0_27_is_attached_to() -> None:
    found, _ = child("py_sync.py", path=[wheel("llama-cpp-py-sync", "0.11739")])
    assert found["info"]["api_version"] == 3
    assert found["sums"] == [True, True]
    assert found["counters"]["cpu_computes"] == 1
    assert found["detached"]


def test_two_ggml_builds_in_one_process_are_two_hosts(
    llama: LlamaLibrary, model_path: Path, bare: dict[int, Logits]
) -> None:
    found, _ = child("two_hosts.py", llama.dir, model_path, path=[wheel(*LIBGGML)])
    runtime, python = found["runtime"], found["python"]
    assert "2 ggml libraries are loaded" in found["refusal"]
    assert str(llama.dir) in found["refusal"] and "libggml.so.0" in found["refusal"]
    assert runtime["id"] != python["id"]
    assert Path(runtime["library"]).samefile(llama.ggml_library)
    assert Path(python["library"]).name.startswith("libggml.so")
    assert runtime["version"] == llama.ggml_version != python["version"]
    assert [registries.count("ASYNC") for registries in found["registries"]] == [1, 1]
    assert (runtime["mode"], python["mode"]) == ("async", "off")
    assert found["digest"] == workload.digest(bare[LAYERS])
    assert found["right"]
    assert runtime["counters"]["direct"] == 2 * LAYERS * (len(workload.BATCHES) - 1)
    assert python["counters"]["cpu_computes"] == 1
    assert python["counters"]["readbacks"] == 0
