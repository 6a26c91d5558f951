"""Situations of public reports (ggml-org/llama.cpp unless said otherwise): what graphs do to readbacks.

Each is decoded in stock and in async on a real llama.cpp and must give the same bits; the situation itself must be
there, else nothing is shown. One CPU thread: two that wait for each other by spinning are slow on a busy machine. The
largest batch comes first everywhere, for the reason given at workload.BATCHES.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggml_async import models as makers
from ggml_async.llama import Context, LlamaLibrary, Model
from ggml_async.native import Host

from . import conftest, workload
from .graphs import Graphs
from .workload import LAYERS, SHAPE

N_EXPERT, N_VOCAB = SHAPE["n_expert"], SHAPE["n_vocab"]


def new_context(model: Model, **settings: Any) -> Context:
    return conftest.new_context(model, **{"n_threads": 1, **settings})


def text(n: int, seed: int = 1) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(N_VOCAB) for i in range(n)]


def expert_ids(graphs: Graphs, product: int, n_tokens: int) -> np.ndarray:
    """The ids that a product with experts reads, [n_tokens, n_used]: a strided view of the sorted experts."""
    raw = np.frombuffer(graphs.direct(graphs.source(product, 2)), np.int32)
    used = SHAPE["n_expert_used"]
    return np.stack([raw[N_EXPERT * i : N_EXPERT * i + used] for i in range(n_tokens)])


@pytest.mark.parametrize(("n_ubatch", "n_prompt"), [(32, 160), (512, 256)])
def test_expert_ids_are_in_range_at_every_read_of_a_long_prompt_25777_21908(
    host: Host, load: Callable[[int], Model], llama: LlamaLibrary, n_ubatch: int, n_prompt: int
) -> None:
    graphs = Graphs(llama)
    seen: list[np.ndarray] = []

    def callback(_name: str, tensor: int, ask: bool) -> bool:
        if ask:
            return graphs.op(tensor) == "MUL_MAT_ID" and graphs.name(tensor).startswith("ffn_moe_up")
        n_tokens = len(graphs.direct(graphs.source(tensor, 1))) // (4 * SHAPE["n_embd"])
        seen.append(expert_ids(graphs, tensor, n_tokens))
        return True

    found: dict[str, tuple[bytes, list[bytes]]] = {}
    for mode in ("async", "stock"):
        seen.clear()
        host.mode = mode
        host.reset_counters()
        settings = {"n_ctx": n_prompt, "n_ubatch": n_ubatch, "op_offload": False}
        with new_context(load(LAYERS), **settings, eval_callback=callback) as context:
            context.decode(text(n_prompt), logits="all")
            rows = b"".join(context.logits(i).tobytes() for i in range(n_prompt))
        ubatches = -(-n_prompt // n_ubatch)
        assert host.counters()["readbacks"] == 2 * LAYERS * ubatches
        assert sum(len(ids) for ids in seen) == LAYERS * n_prompt
        for ids in seen:
            assert (ids >= 0).all() and (ids < N_EXPERT).all()
            assert (ids[:, 0] != ids[:, 1]).all(), "a token uses two different experts"
        found[mode] = rows, [ids.tobytes() for ids in seen]
    assert len({ids for ids in found["stock"][1]}) == LAYERS * ubatches
    assert found["async"] == found["stock"]


@pytest.mark.parametrize("n_ubatch", [32, 512])
def test_a_long_prompt_whose_expert_products_llama_cpp_offloads_is_the_same_25777(
    host: Host, load: Callable[[int], Model], n_ubatch: int
) -> None:
    """ggml's scheduler then reads the ids itself, to upload the used experts only, and aborts on one out of range."""
    rows = {}
    for mode in ("async", "stock"):
        host.mode = mode
        host.reset_counters()
        with new_context(load(LAYERS), n_ctx=128, n_ubatch=n_ubatch) as context:
            context.decode(text(100), logits="all")
            rows[mode] = [context.logits(i).tobytes() for i in range(100)]
            assert host.counters()["uploads"] > LAYERS
            context.decode([5])  # and back to products on the CPU
            rows[mode].append(context.logits().tobytes())
            assert host.counters()["readbacks"] >= 2 * LAYERS
    assert rows["async"] == rows["stock"]


def decode_all(context: Context, batches: Sequence[Sequence[int]], *, wait: bool) -> bytes:
    context.clear_memory()
    for batch in batches:
        context.decode(batch)
        if wait:
            context.synchronize()
    context.decode([1, 2, 3], logits="all")
    return b"".join(context.logits(i).tobytes() for i in range(3))


def test_ubatches_of_changing_shapes_with_no_wait_between_them_give_what_waiting_gives_18310_18313(
    host: Host, load: Callable[[int], Model]
) -> None:
    """The last logits depend on all that the context holds, so on every decode before."""
    sizes = [30, 17, 3, 1, 1, 24, 5, 2, 1, 9]
    with (
        new_context(load(LAYERS), n_ubatch=8, op_offload=False) as asynchronous,
        new_context(load(LAYERS), n_ubatch=8, op_offload=False) as stock,
    ):
        for seed in range(3):
            order = [sizes[0], *random.Random(seed).sample(sizes[1:], len(sizes) - 1)]
            batches = [text(n, seed + 7 * i) for i, n in enumerate(order)]
            host.mode = "async"
            host.reset_counters()
            unwaited = decode_all(asynchronous, batches, wait=False)
            assert host.counters()["direct"] > 2 * LAYERS * len(sizes)
            host.mode = "stock"
            assert decode_all(stock, batches, wait=True) == unwaited, f"order {order}"


N_DECODES = 160  # 243 tokens: within the first 256, so that no work buffer grows


def rebuilding_batches() -> list[list[int]]:
    """One and two tokens in turn: no graph can be used again."""
    return [[4, 5, 6], *(text(1 + i % 2, i) for i in range(N_DECODES))]


def test_hundreds_of_decodes_that_each_rebuild_the_graph_with_no_wait_between_26610(
    model_path: Path, llama: LlamaLibrary
) -> None:
    """Vulkan must not look at tensors of a graph that is gone.

    An arm to a process: with two, one behind the other, lavapipe of Mesa 22.3 crashed in a thread of its own in three
    of ten runs.
    """
    folder, lines = Path(llama.ggml_library).parent, {}
    for mode in ("async", "stock"):
        done = subprocess.run(
            [sys.executable, "-m", "integration.many_decodes", str(folder), str(model_path), mode],
            cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        lines[mode] = done.stdout.splitlines()[-1]
    assert lines["async"] == lines["stock"]
    assert int(lines["async"].split()[1]) == 2 * LAYERS * (N_DECODES + 2)


@pytest.fixture(scope="module")
def one_layer(llama: LlamaLibrary, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("models") / "one-layer.gguf"
    makers.make_synthetic(path, **{**SHAPE, "n_layer": 1})
    return llama.load_model(path, overrides=workload.overrides(1))


def test_every_prompt_length_from_128_down_to_1_is_bitwise_equal_28241(host: Host, one_layer: Model) -> None:
    """Another text for each length; behind every eighth a token alone."""
    with (
        new_context(one_layer, n_ctx=130, op_offload=False) as asynchronous,
        new_context(one_layer, n_ctx=130, op_offload=False) as stock,
    ):
        for length in range(128, 0, -1):
            rows = {}
            for mode, context in (("async", asynchronous), ("stock", stock)):
                host.mode = mode
                host.reset_counters()
                context.clear_memory()
                context.decode(text(length, length), logits="all")
                rows[mode] = [context.logits(i).tobytes() for i in range(length)]
                if length % 8 == 0:
                    context.decode([length % N_VOCAB])
                    rows[mode].append(context.logits().tobytes())
                counters = host.counters()
                assert counters["readbacks"] == counters["direct" if mode == "async" else "stock"]
                assert counters["readbacks"] == (4 if length % 8 == 0 else 2)
            assert rows["async"] == rows["stock"], f"a prompt of {length} tokens"


def test_positions_are_right_in_every_layer_behind_every_cpu_split_24855(
    host: Host, load: Callable[[int], Model], llama: LlamaLibrary
) -> None:
    graphs = Graphs(llama)
    seen: list[np.ndarray] = []

    def callback(_name: str, tensor: int, ask: bool) -> bool:
        if ask:
            return graphs.op(tensor) == "ROPE"
        seen.append(np.frombuffer(graphs.data(graphs.source(tensor, 1)), np.int32))
        return True

    host.mode = "async"
    with new_context(load(LAYERS), n_ubatch=16, op_offload=False, eval_callback=callback) as context:
        start = 0
        for n in (40, 3, 1, 1):
            seen.clear()
            host.reset_counters()
            context.decode(text(n, n))
            context.synchronize()
            assert host.counters()["direct"] + host.counters()["empty"] == 2 * LAYERS * -(-n // 16)
            expected = [list(range(start + a, start + min(a + 16, n))) for a in range(0, n, 16)]
            # queries and keys of every layer, an ubatch after the other
            assert [p.tolist() for p in seen] == [e for e in expected for _ in range(2 * LAYERS)]
            start += n


def test_the_zero_rows_of_ubatches_whose_logits_nobody_wants_are_read_as_nothing_28739_qvac_fabric_260(
    host: Host, load: Callable[[int], Model]
) -> None:
    """Only the last ubatch has a token whose logits are wanted: in the others' last layer no row is left."""
    rows = {}
    for mode in ("async", "stock"):
        host.mode = mode
        host.reset_counters()
        with new_context(load(LAYERS), n_ubatch=8, op_offload=False) as context:
            context.decode(text(32))
            rows[mode] = [context.logits().tobytes()]
            found = host.counters()
            context.decode([7])
            rows[mode].append(context.logits().tobytes())
        if mode == "async":
            assert found["empty"] == 2 * 3
            assert found["direct"] == 2 * (LAYERS * 4 - 3)
            # an empty read waits for its source all the same, as stock does
            assert found["synchronizes"] == found["stages"] == LAYERS * 4
    assert rows["async"] == rows["stock"]


def test_a_callback_that_reads_data_directly_as_imatrix_does_sees_all_of_it_7816(
    host: Host, load: Callable[[int], Model], llama: LlamaLibrary
) -> None:
    """Sums of squares of every product's activations, an expert's apart, straight from memory where it is the CPU's."""
    graphs = Graphs(llama)
    sums: dict[str, np.ndarray] = {}
    direct = 0

    def callback(name: str, tensor: int, ask: bool) -> bool:
        nonlocal direct
        op = graphs.op(tensor)
        if ask:
            return op in ("MUL_MAT", "MUL_MAT_ID")
        source = graphs.source(tensor, 1)
        on_host = graphs.on_host(source)
        direct += on_host
        values = np.frombuffer(graphs.direct(source) if on_host else graphs.data(source), np.float32)
        assert np.isfinite(values).all()
        if op == "MUL_MAT_ID" and name.startswith("ffn_moe_up"):
            per_token = (values.reshape(-1, SHAPE["n_embd"]).astype(np.float64) ** 2).sum(axis=1)
            for squares, ids in zip(per_token, expert_ids(graphs, tensor, len(per_token)), strict=True):
                for expert in ids:
                    sums.setdefault(name, np.zeros(N_EXPERT))[expert] += squares
        else:
            sums[name] = sums.get(name, np.zeros(1)) + (values.astype(np.float64) ** 2).sum()
        return True

    found = {}
    for mode in ("async", "stock"):
        host.mode = mode
        sums.clear()
        direct = 0
        with new_context(load(LAYERS), eval_callback=callback, op_offload=False) as context:
            for batch in (text(40), text(3), [9]):
                context.decode(batch, logits="all")
            context.synchronize()
        assert direct >= 3 * 3 * LAYERS, "the experts' products read CPU memory"
        assert len([name for name in sums if name.startswith("ffn_moe_up")]) == LAYERS
        found[mode] = {name: value.tobytes() for name, value in sums.items()}
    assert found["async"] == found["stock"]
