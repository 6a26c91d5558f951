"""The plug-in changes no bit of any result."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ggml_async.llama import Model
from ggml_async.native import Host

from . import workload
from .conftest import new_context
from .workload import LAYERS, Logits


@pytest.mark.parametrize("n_cpu_moe", [0, 1, LAYERS // 2, LAYERS])
def test_logits_are_those_of_a_process_without_the_plugin(
    host: Host, load: Callable[[int], Model], bare: dict[int, Logits], n_cpu_moe: int
) -> None:
    rows = np.frombuffer(b"".join(bare[n_cpu_moe]), np.float32).reshape(-1, workload.SHAPE["n_vocab"])
    assert np.isfinite(rows).all() and len(np.unique(rows, axis=0)) == len(rows)  # figures that a wrong read would move
    for mode in ("async", "stock", "off"):
        host.mode = mode
        host.reset_counters()
        with new_context(load(n_cpu_moe)) as context:
            assert workload.run(context) == bare[n_cpu_moe], mode
        assert (host.counters()["direct"] > 0) == (mode == "async" and n_cpu_moe > 0)


def test_parallel_sequences_are_bitwise_equal_in_both_modes(host: Host, load: Callable[[int], Model]) -> None:
    rows: dict[str, Logits] = {}
    with new_context(load(LAYERS), n_seq_max=4) as context:
        for mode in ("stock", "async"):
            host.mode = mode
            context.clear_memory()
            rows[mode] = []
            for step in range(3):
                context.decode([step, 10 + step, 20 + step, 30 + step], seq_ids=[0, 1, 2, 3])
                rows[mode] += [context.logits(i).tobytes() for i in range(4)]
    assert rows["stock"] == rows["async"]
    assert len(set(rows["async"])) == 12


def test_experts_on_the_cpu_for_a_batch_of_32_are_bitwise_equal(host: Host, load: Callable[[int], Model]) -> None:
    rows: dict[str, Logits] = {}
    with new_context(load(LAYERS), op_offload=False) as context:
        for mode in ("stock", "async"):
            host.mode = mode
            rows[mode] = workload.run(context)
    assert rows["stock"] == rows["async"]
