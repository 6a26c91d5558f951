"""Random graphs over the CPU and mock devices, each bitwise equal to the same graph on the CPU alone.

`make graphs` runs 10,000 of them with fixed seeds, `make stress` as many as STRESS_SECONDS allow, from a fresh seed.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from integration import workload
from integration.wheels import wheel

from ggml_async import fetch, native
from ggml_async import models as makers

from . import driver
from .driver import Outcome

XLLAMACPP = ("xllamacpp", "2026.10.11549")
SECONDS = int(os.environ.get("STRESS_SECONDS", "0"))
#: In the environment: the seed of a longer run that is to be repeated.
SEED = int(os.environ.get("STRESS_SEED") or random.SystemRandom().randrange(1 << 32))


@dataclass(frozen=True)
class Situation:
    """What the devices can do, and which of the plug-in's paths that must have led to.

    A device that uploads late (`no_cpy_host` unset) is alone: with more, ggml's scheduler itself is wrong.
    """

    name: str
    mock_options: str
    graphs: int
    expect: str = "direct,bounce"


SOME_UNPINNED = "direct,bounce,declined_no_pinned_memory"
SITUATIONS = [
    Situation("lazy", "lazy=1,no_cpy_host=1", 3500, "direct,bounce,empty,app_reads,dropped_reads"),
    Situation("late_uploads", "lazy=1", 1500, "direct,bounce,empty"),
    Situation("eager", "no_cpy_host=1,jitter_us=30", 1500),
    Situation("slow_reads", "no_cpy_host=1,delay_get_us=100,jitter_us=20", 500),
    Situation("slow_graphs", "no_cpy_host=1,delay_graph_us=100,jitter_us=20", 500),
    Situation(
        "unlike_devices",
        "lazy=1,no_cpy_host=1,1:no_pinned=1,2:no_get_async=1,3:no_events=1",
        1000,
        "direct,bounce,declined_no_async,declined_no_pinned_memory",
    ),
    # as with Vulkan: every device's pinned memory is the first one's
    Situation("pinned_of_first", "lazy=1,no_cpy_host=1,pinned_of_first=1", 500, SOME_UNPINNED),
    Situation("pinned_runs_out", "lazy=1,no_cpy_host=1,2:pinned_falls_back=1", 500, SOME_UNPINNED),
    Situation("few_abilities", "lazy=1,no_cpy_host=1,no_cpy_peer=1,no_2d_async=1,no_set_async=1,no_events=1", 500),
]  # fmt: skip


@pytest.fixture(scope="session")
def runtime() -> Path:
    return fetch.ensure_runtime()


@pytest.fixture(scope="session")
def built() -> Path:
    return driver.build(driver.ROOT / "build" / "native", targets=["stress", "mock-tests"])


def must_be_right(outcome: Outcome, graphs: int) -> None:
    assert outcome.code == 0, f"exit {outcome.code}\n{outcome.log[-6000:]}"
    assert outcome.summary["graphs"] >= graphs
    assert outcome.summary["mock"]["touched_freed"] == outcome.summary["mock"]["freed_with_reads"] == 0


def test_the_mock_device_is_as_unforgiving_as_this_relies_on(built: Path, runtime: Path) -> None:
    here = built / "tests" / "stress"
    done = subprocess.run(
        [here / "mock-tests"], capture_output=True, text=True, timeout=driver.TIMEOUT, check=False,
        env=driver.environment("", {"STRESS_RUNTIME": str(runtime), "STRESS_MOCK": str(here / "libggml-mock.so")}),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda s: s.name)
def test_every_graph_is_bitwise_the_cpus(built: Path, runtime: Path, situation: Situation) -> None:
    arguments = ["--seed", "1", "--graphs", str(situation.graphs)]
    if SECONDS:
        arguments = ["--seed", str(SEED), "--seconds", str(max(1, SECONDS // len(SITUATIONS)))]
    outcome = driver.run(
        built, runtime, *arguments, "--expect", situation.expect, mock_options=situation.mock_options,
        timeout=driver.TIMEOUT + SECONDS,
    )  # fmt: skip
    print(situation.name, outcome.summary)
    must_be_right(outcome, 1 if SECONDS else situation.graphs)


@pytest.mark.parametrize("mode", ["none", "off", "stock"])
def test_without_asynchronous_reads_the_graphs_are_right_too(built: Path, runtime: Path, mode: str) -> None:
    """The oracle judges the plug-in, not itself: stock ggml passes it."""
    outcome = driver.run(built, runtime, "--mode", mode, "--graphs", "300", mock_options="lazy=1,no_cpy_host=1")
    must_be_right(outcome, 300)
    assert outcome.counters.get("direct", 0) == outcome.counters.get("bounce", 0) == 0


def first_difference(built: Path, runtime: Path, seed: int, mode: str) -> tuple[int, str]:
    outcome = driver.run(
        built, runtime, "--seed", str(seed), "--graphs", "2000", "--threads", "1", "--no-shrink", "--host-faults",
        "--expect", "readbacks", "--mode", mode, mock_options="lazy=1",
    )  # fmt: skip
    found = re.search(r"^seed \d+, world (\d+), .*differs.*$", outcome.log, re.MULTILINE)
    assert outcome.code == 1 and found, outcome.log
    return int(found[1]), found[0]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_host_memory_used_again_while_an_upload_reads_it_is_ggmls_and_no_worse_with_the_plugin_23321_26040(
    built: Path, runtime: Path, seed: int
) -> None:
    """Several devices that read uploads late: ggml alone gets graphs wrong, to the bit as with the plug-in."""
    world, line = first_difference(built, runtime, seed, "none")
    assert first_difference(built, runtime, seed, "off") == (world, line)
    assert first_difference(built, runtime, seed, "stock") == (world, line)
    assert first_difference(built, runtime, seed, "async")[0] >= world


def test_ggml_of_api_3_in_one_library(built: Path) -> None:
    """xllamacpp: ggml 0.26 lives inside a Python module, so the driver and the mock device go in after it."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("in_xllamacpp.py")), str(built), "--graphs", "500"],
        capture_output=True, text=True, timeout=driver.TIMEOUT, check=False,
        env=driver.environment("lazy=1,no_cpy_host=1", {"PYTHONPATH": str(wheel(*XLLAMACPP))}),
    )  # fmt: skip
    must_be_right(driver.outcome(done), 500)


@pytest.mark.parametrize("mock_options", ["lazy=1", "lazy=1,no_cpy_host=1", "jitter_us=200,no_cpy_host=1"])
def test_llama_cpp_on_two_devices_with_ubatches_pipeline_copies_and_graph_reuse_has_the_cpus_logits_20463(
    built: Path, runtime: Path, tmp_path: Path, mock_options: str
) -> None:
    """A mixture of experts, its experts on the CPU: llama.cpp loads the mock device from GGML_BACKEND_PATH."""
    model = tmp_path / "tiny.gguf"
    makers.make_synthetic(model, **workload.SHAPE)
    mock = {
        "GGML_BACKEND_PATH": str(built / "tests" / "stress" / "libggml-mock.so"), "MOCK_DEVICES": "2",
        "PYTHONPATH": f"{Path(native.__file__).parents[1]}:{driver.ROOT / 'tests'}",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("in_llama.py")), str(runtime), str(model)],
        capture_output=True, text=True, timeout=driver.TIMEOUT, check=False,
        env=driver.environment(mock_options, mock),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["devices"] == ["MOCK0", "MOCK1"]
    for name, digest in found["digests"].items():
        assert digest == found["digests"]["cpu, ubatches" if "ubatches" in name else "cpu"], name
    readbacks = 2 * workload.LAYERS * len(workload.BATCHES)
    for name, n in (
        ("stock", readbacks),
        ("async", readbacks),
        ("stock, half", readbacks // 2),
        ("async, half", readbacks // 2),
    ):
        counters = found["counters"][name]
        assert counters["readbacks"] == n
        assert counters["stock"] == (n if name.startswith("stock") else 0)
    # the CPU's compute buffer is pinned by the first device: what the second one sends is bounced
    assert found["counters"]["async"]["direct"] and found["counters"]["async"]["bounce"]


def test_address_sanitizer_finds_nothing(runtime: Path) -> None:
    """Plug-in, mock device and driver are instrumented, ggml is as it comes."""
    built = driver.build(driver.ROOT / "build" / "asan", "-DGGML_ASYNC_SANITIZE=address,undefined")
    for options in ("lazy=1,no_cpy_host=1", "lazy=1"):
        outcome = driver.run(built, runtime, "--graphs", "400", mock_options=options)
        must_be_right(outcome, 400)
        assert "Sanitizer" not in outcome.log


def test_a_run_without_asynchronous_reads_is_void(built: Path, runtime: Path) -> None:
    outcome = driver.run(built, runtime, "--graphs", "50", mock_options="lazy=1,no_cpy_host=1,no_get_async=1")
    assert outcome.code == 3
    assert "void: the counter direct is 0" in outcome.log


def test_a_failure_shrinks_to_a_small_graph(built: Path, runtime: Path) -> None:
    """A device that fails its reads: the shrunk graph is printed with what repeats it."""
    outcome = driver.run(built, runtime, "--graphs", "64", "--threads", "1", mock_options="no_cpy_host=1,fail_get=40")
    assert outcome.code == 1
    assert "seed 1, world" in outcome.log
    assert "smallest that still fails" in outcome.log
