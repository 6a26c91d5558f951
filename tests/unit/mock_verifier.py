"""An executor whose logits are a function of the tokens before them, and whose faults are programmed."""

from __future__ import annotations

import datetime
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ggml_async.errors import GgmlAsyncError
from ggml_async.profile_plan import LoadKey
from ggml_async.verify import Shape, Traced
from ggml_async.verify_text import Batch, Floats, Tokens, Vocab

N_VOCAB = 40
N_LAYER = 4
BOS = 1
NAMES = ("inp_embd", *(f"{name}-{i}" for i in range(N_LAYER) for name in ("ffn_moe_gate", "l_out")), "result_output")


class Device(NamedTuple):
    name: str
    description: str
    type: str


class Decode(NamedTuple):
    """One row about to be given out: number of its decode (from 1), arm, the tokens so far."""

    number: int
    arm: str
    history: tuple[int, ...]


class MockVerifier:
    """Two readbacks a CPU layer and decode. Set attributes for faults."""

    def __init__(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        self.should_stop = should_stop
        self.wrong: Callable[[Decode], bool] = lambda decode: False  # these rows have one bit flipped
        self.broken: str | None = None  # tensor that is wrong in async's traces, and all behind it
        self.traceable = True  # whether callbacks at every tensor leave the fault in place
        self.fault: Callable[[int], None] = lambda number: None  # called before decode `number`
        self.decline = ""
        self.blind = False
        self.tokenizer = True
        self.shift = 0.0  # of the loaded model's logits against the dense one's
        self.gpu = True
        self.calls: list[tuple[Any, ...]] = []
        self.decodes = 0
        self.key: LoadKey | None = None
        self.closed = 0

    def utc(self) -> datetime.datetime:
        return datetime.datetime(2026, 9, 1, 12, 0, tzinfo=datetime.timezone.utc)

    def devices(self) -> list[Device]:
        gpus = [Device("Mock0", "Mock GPU", "gpu")] if self.gpu else []
        return [*gpus, Device("CPU", "Mock CPU", "cpu")]

    def describe(self) -> dict[str, Any]:
        model = {"path": "models/it's a model.gguf", "arch": "qwen3moe", "n_layer": N_LAYER, "n_expert": 8,
                 "n_expert_used": 2, "size_bytes": 3 << 20, "desc": "mock 1M Q4_0", "n_params": 1000}  # fmt: skip
        host = {"llama": "0.5.0", "ggml": "0.25.1", "api_version": 2, "dir": "lib", "layout": "mock",
                "vulkan_layer": None}  # fmt: skip
        devices = [
            {"name": d.name, "description": d.description, "type": d.type, "async": None} for d in self.devices()
        ]
        return {"model": model, "host": host, "devices": devices, "build": {}}

    def load(self, key: LoadKey) -> None:
        self.calls.append(("load", len(key.overrides)))
        self.key = key

    def load_dense(self) -> None:
        self.calls.append(("load_dense",))
        self.key = None

    def vocab(self) -> Vocab:
        return Vocab(N_VOCAB, self.tokenizer, BOS if self.tokenizer else None)

    def tokenize(self, text: bytes) -> Tokens:
        return np.frombuffer(bytes([BOS]) + text, np.uint8).astype(np.int32) % N_VOCAB

    def open(self, shape: Shape, arms: Sequence[str]) -> MockSession:
        self.calls.append(("open", shape.n_ctx, shape.n_seq, tuple(arms)))
        return MockSession(self, shape)

    def trace(self, shape: Shape, arm: str, batches: Sequence[Batch], only: str | None) -> list[Traced]:
        self.calls.append(("trace", arm, only))
        names = [n for n in NAMES if only is None or n.startswith(only)]
        bad = NAMES.index(self.broken) if self.broken else len(NAMES)
        shown = arm == "async" and (self.traceable or only is not None)
        return [(n, b"bad" if shown and NAMES.index(n) >= bad else b"good") for n in names for _ in batches]

    def close(self) -> None:
        self.closed += 1


class MockSession:
    def __init__(self, executor: MockVerifier, shape: Shape) -> None:
        self.executor = executor
        self.shape = shape
        self.histories: dict[str, dict[int, list[int]]] = {}
        self.counts = {"readbacks": 0, "direct": 0, "bounce": 0, "empty": 0, "stock": 0, "declined_layout": 0}
        self.closed = False

    def clear(self, arm: str) -> None:
        self.histories[arm] = {}

    def decode(self, arm: str, batch: Batch) -> Iterator[Floats]:
        executor = self.executor
        executor.decodes += 1
        number = executor.decodes
        executor.fault(number)
        executor.calls.append(("decode", arm, len(batch.tokens)))
        assert len(batch.tokens) <= self.shape.config.n_batch
        self._count(arm)
        for token, sequence in zip(batch.tokens.tolist(), batch.sequences.tolist(), strict=True):
            assert sequence < self.shape.n_seq
            history = self.histories[arm].setdefault(sequence, [])
            history.append(token)
            assert len(history) * self.shape.n_seq <= self.shape.n_ctx
            seed = zlib.crc32(repr(history).encode())
            row = np.random.default_rng(seed).standard_normal(N_VOCAB).astype(np.float32)
            row[0] += executor.shift if executor.key is not None else 0
            if executor.wrong(Decode(number, arm, tuple(history))):
                row[3] = np.nextafter(row[3], np.float32(9))
            yield row

    def _count(self, arm: str) -> None:
        key = self.executor.key
        if key is None or not key.devices or self.executor.blind:
            return
        reads = 2 * len([o for o in key.overrides if o[1] == "CPU"])
        self.counts["readbacks"] += reads
        if arm == "async" and self.executor.decline:
            self.counts[f"declined_{self.executor.decline}"] += reads
        self.counts["direct" if arm == "async" and not self.executor.decline else "stock"] += reads

    def counters(self) -> dict[str, int]:
        return dict(self.counts)

    def close(self) -> None:
        self.closed = True


def for_cli(_model: Any, should_stop: Callable[[], bool]) -> MockVerifier:
    """What the hidden option gets; GGML_ASYNC_MOCK says what goes wrong."""
    executor = MockVerifier(should_stop)
    fault = os.environ.get("GGML_ASYNC_MOCK", "")
    if fault == "wrong":
        executor.wrong = lambda decode: decode.arm == "async" and len(decode.history) == 5
        executor.broken = "ffn_moe_gate-2"
    if fault == "blind":
        executor.blind = True
    if fault == "fails":

        def fail(number: int) -> None:
            if number == 3:
                raise GgmlAsyncError("llama_decode failed with code -3", "see llama.cpp's log (-v)")

        executor.fault = fail
    return executor
