"""How many readbacks, CPU splits and synchronizes a decode has: exact, in both modes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ggml_async.llama import Context, Model
from ggml_async.native import Host

from .conftest import new_context
from .workload import BATCH_32, LAYERS, readback_bytes

MODES = ("stock", "async")


def decode_and_count(host: Host, context: Context, tokens: list[int], **how: object) -> dict[str, int]:
    context.synchronize()
    host.reset_counters()
    context.decode(tokens, **how)  # type: ignore[arg-type]
    context.synchronize()
    assert host.declined() == {}
    return host.counters()


def check(counters: dict[str, int], mode: str, splits: int, n_tokens: int = 1) -> None:
    """2 readbacks a CPU split; one synchronize a split in async, one a readback in stock; all on the expected path."""
    assert counters["stages"] == splits
    assert counters["readbacks"] == 2 * splits
    assert counters["readback_bytes"] == splits * sum(readback_bytes(n_tokens).values())
    assert counters["synchronizes"] == (splits if mode == "async" else 2 * splits)
    assert counters["direct"] == (2 * splits if mode == "async" else 0)
    assert counters["stock"] == (2 * splits if mode == "stock" else 0)
    assert counters["bounce"] == counters["empty"] == counters["dropped_reads"] == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_cpu_moe", [0, 1, LAYERS // 2, LAYERS])
def test_a_token_has_as_many_cpu_splits_as_layers_with_experts_on_the_cpu(
    host: Host, load: Callable[[int], Model], mode: str, n_cpu_moe: int
) -> None:
    with new_context(load(n_cpu_moe)) as context:
        host.mode = mode
        for token in (5, 9, 11):
            counters = decode_and_count(host, context, [token])
            check(counters, mode, n_cpu_moe)
            # the token embedding is looked up on the CPU: a split with no readback, whose result is uploaded
            assert counters["cpu_computes"] == n_cpu_moe + 1
            assert counters["uploads"] == n_cpu_moe + 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_tokens", [2, 4, 32])
def test_a_batch_costs_the_readbacks_of_one_token(
    host: Host, load: Callable[[int], Model], mode: str, n_tokens: int
) -> None:
    """Also where the expert ids are a strided view. op_offload off: experts stay on the CPU for any batch."""
    with new_context(load(LAYERS), op_offload=False) as context:
        host.mode = mode
        check(decode_and_count(host, context, BATCH_32[:n_tokens], logits="all"), mode, LAYERS, n_tokens)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_32_computes_its_experts_on_the_gpu_by_default(
    host: Host, load: Callable[[int], Model], mode: str
) -> None:
    """llama.cpp's own rule: from 32 tokens on it copies the weights over instead. Nothing is read back then, but in
    the last layer when only the last token's logits are wanted: that layer computes one token, on the CPU."""
    with new_context(load(LAYERS)) as context:
        host.mode = mode
        check(decode_and_count(host, context, BATCH_32, logits="all"), mode, 0)
        context.clear_memory()
        check(decode_and_count(host, context, BATCH_32, logits="last"), mode, 1)


@pytest.mark.parametrize("mode", MODES)
def test_parallel_sequences_cost_the_readbacks_of_one(host: Host, load: Callable[[int], Model], mode: str) -> None:
    with new_context(load(LAYERS), n_seq_max=4) as context:
        host.mode = mode
        check(decode_and_count(host, context, [3, 4, 5, 6], seq_ids=[0, 1, 2, 3]), mode, LAYERS, 4)
        check(decode_and_count(host, context, [7, 8], seq_ids=[1, 2]), mode, LAYERS, 2)
        # llama.cpp computes sequences at once only where their numbers are consecutive
        check(decode_and_count(host, context, [7, 8], seq_ids=[1, 3]), mode, 2 * LAYERS)


def test_off_counts_nothing(host: Host, load: Callable[[int], Model]) -> None:
    with new_context(load(LAYERS)) as context:
        host.mode = "off"
        assert not any(decode_and_count(host, context, [5]).values())
