"""Modes and detaching while contexts are alive, in the middle of a generation."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from ggml_async import native
from ggml_async.llama import LlamaLibrary, Model
from ggml_async.native import Host

from . import workload
from .conftest import new_context
from .workload import BATCHES, LAYERS, Logits


def test_the_mode_can_change_between_tokens(host: Host, load: Callable[[int], Model], bare: dict[int, Logits]) -> None:
    modes = itertools.cycle(["stock", "async", "off"])
    rows = []
    with new_context(load(LAYERS)) as context:
        for batch in BATCHES:
            host.mode = mode = next(modes)
            assert host.mode == mode
            before = host.counters()
            context.decode(batch, logits="all")
            rows += [context.logits(i).tobytes() for i in range(len(batch))]
            grown = {name: value - before[name] for name, value in host.counters().items()}
            on_cpu = 0 if len(batch) >= 32 else 2 * LAYERS
            assert grown["readbacks"] == (0 if mode == "off" else on_cpu)
            assert grown["direct"] == (on_cpu if mode == "async" else 0)
    assert rows == bare[LAYERS]


def test_the_mode_can_change_in_the_middle_of_a_token(
    host: Host, load: Callable[[int], Model], bare: dict[int, Logits]
) -> None:
    done = threading.Event()
    changes = 0

    def switch() -> None:
        nonlocal changes
        for mode in itertools.cycle(["stock", "off", "async"]):
            host.mode = mode
            changes += 1
            if done.wait(0.0005):
                return

    switcher = threading.Thread(target=switch)
    switcher.start()
    try:
        with new_context(load(LAYERS)) as context:
            assert workload.run(context) == bare[LAYERS]
    finally:
        done.set()
        switcher.join()
    counters = host.counters()
    assert changes > 20 and counters["direct"] and counters["stock"]
    assert counters["dropped_reads"] == 0


def test_detaching_leaves_a_living_context_to_llama_cpp(
    host: Host, llama: LlamaLibrary, load: Callable[[int], Model], bare: dict[int, Logits]
) -> None:
    rows: Logits = []
    with new_context(load(LAYERS)) as old:

        def decode(batches: list[list[int]]) -> int:
            before = host.counters()["readbacks"]
            for batch in batches:
                old.decode(batch, logits="all")
                rows.extend(old.logits(i).tobytes() for i in range(len(batch)))
            return host.counters()["readbacks"] - before

        assert decode(BATCHES[:3]) == 2 * 2 * LAYERS  # the first, of 32, computes its experts on the GPU
        assert host.info().n_backends > 0
        assert host.detach()
        assert not host.info().attached and host.info().n_backends == 0
        assert decode(BATCHES[3:5]) == 0
        with new_context(load(LAYERS)) as made_while_detached:
            assert workload.run(made_while_detached) == bare[LAYERS]
        assert host.counters()["readbacks"] == 2 * 2 * LAYERS

        again = native.attach(llama.ggml_library)
        assert again.id == host.id and again.info().attached
        assert decode(BATCHES[5:]) == 0, "a context made before stays llama.cpp's own"
        assert rows == bare[LAYERS]
        with new_context(load(LAYERS)) as new:
            host.reset_counters()
            assert workload.run(new) == bare[LAYERS]
            assert host.counters()["direct"] == 2 * LAYERS * (len(BATCHES) - 1)


def test_contexts_come_and_go_without_a_trace(host: Host, load: Callable[[int], Model]) -> None:
    before = host.info().n_backends
    contexts = [new_context(load(LAYERS)) for _ in range(3)]
    assert host.info().n_backends > before
    for context in contexts:
        context.decode([5])  # returns with reads of nothing pending, device work perhaps
    for context in contexts:
        context.close()
    assert host.info().n_backends == before
    assert host.counters()["dropped_reads"] == 0


def test_two_contexts_on_two_threads_share_one_host(
    host: Host, load: Callable[[int], Model], bare: dict[int, Logits]
) -> None:
    rows: dict[int, Logits] = {}
    with new_context(load(LAYERS)) as a, new_context(load(LAYERS)) as b:
        # One after the other first: every shader is compiled and every buffer has its size.
        for context in (a, b):
            workload.run(context)
        host.reset_counters()

        def work(i: int) -> None:
            rows[i] = workload.run((a, b)[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert rows[0] == rows[1] == bare[LAYERS]
    assert host.counters()["direct"] == 2 * 2 * LAYERS * (len(BATCHES) - 1)
