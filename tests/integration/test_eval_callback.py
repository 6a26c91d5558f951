"""llama.cpp's eval callback stops the scheduler between nodes: inputs of CPU splits must be complete by then."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from ggml_async.llama import Model
from ggml_async.native import Host

from .conftest import new_context
from .workload import LAYERS

#: Offsets in struct ggml_tensor.
SRC, DATA = 152, 248


def pointer(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0


def inputs(tensor: int, library: object) -> tuple[bytes, ...]:
    """What the two inputs of an expert matrix product hold: hidden state and expert ids, both in CPU memory."""
    found = []
    for i in (1, 2):
        source = pointer(tensor + SRC + 8 * i)
        cast = library.ffi.cast("struct ggml_tensor *", source)  # type: ignore[attr-defined]
        found.append(ctypes.string_at(pointer(source + DATA), library.nbytes(cast)))  # type: ignore[attr-defined]
    return tuple(found)


@pytest.mark.parametrize("name", ["ffn_moe_gate", "ffn_moe_up"])
def test_inputs_of_a_cpu_split_are_complete_when_the_callback_runs(
    host: Host, load: Callable[[int], Model], name: str
) -> None:
    model = load(LAYERS)
    ffi = type(model.library.ffi)()
    ffi.cdef("struct ggml_tensor; size_t ggml_nbytes(const struct ggml_tensor *);")

    class Ggml:
        nbytes = ffi.dlopen(str(model.library.ggml_library)).ggml_nbytes

    Ggml.ffi = ffi  # type: ignore[attr-defined]
    seen: list[tuple[bytes, ...]] = []

    def callback(node: str, tensor: int, ask: bool) -> bool:
        if ask:
            return node.rsplit("-", 1)[0] == name
        seen.append(inputs(tensor, Ggml))
        return True

    rows: dict[str, list[bytes]] = {}
    data: dict[str, list[tuple[bytes, ...]]] = {}
    with new_context(model, eval_callback=callback) as context:
        for mode in ("stock", "async"):
            host.mode = mode
            host.reset_counters()
            context.clear_memory()
            seen.clear()
            rows[mode] = []
            for batch in ([1, 2, 3, 4], [5], [9]):
                context.decode(batch)
                rows[mode].append(context.logits().tobytes())
            data[mode] = list(seen)
            counters = host.counters()
            assert counters["readbacks"] == counters["stock" if mode == "stock" else "direct"] == 2 * LAYERS * 3
    assert len(data["stock"]) == LAYERS * 3
    assert len(set(data["stock"])) == LAYERS * 3, "every token and layer has its own data: a stale read would show"
    assert data["async"] == data["stock"]
    assert rows["async"] == rows["stock"]
