"""An executor whose clock, device and faults are programmed: `profile`'s logic is tested exactly and instantly."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from ggml_async.errors import GgmlAsyncError
from ggml_async.layer import LayerSnapshot
from ggml_async.profile_plan import Config, LoadKey, cpu_expert_layers
from ggml_async.profile_result import KIND_READBACK, KIND_STAGE, KIND_UPLOAD, Fingerprint, Warn

DTYPE = np.dtype(
    [(n, "<i4") for n in ("kind", "mode", "path", "host", "device", "layer")]
    + [(n, "<u4") for n in ("stage", "n_readbacks", "n_sync", "decline")]
    + [(n, "<u8") for n in ("thread", "bytes")]
    + [(n, "<i8") for n in ("t_ns", "duration_ns", "issue_ns", "wait_ns", "copy_ns", "device_wait_ns")]
    + [("name", "S64")]
)

US = 1000
DEVICE_WAIT = 60 * US
COST = {"stock": 20 * US, "async": 2 * US}  # of each of a split's two readbacks
COMPUTE = 1000 * US  # of a token, besides its stages
FENCE_WAIT = 10 * US  # of each wait that the Vulkan layer counts; async has one a split, stock one a readback
N_VOCAB = 100
GPU = "Mock0"


class Device(NamedTuple):
    name: str
    description: str
    type: str


class MockExecutor:
    """Two readbacks a CPU split. Subclass or set attributes for faults."""

    def __init__(
        self,
        expert_layers: list[int] | None = None,
        n_layer: int = 4,
        gpu: tuple[str, bool] | None = ("Mock GPU", True),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.expert_layers = list(range(4)) if expert_layers is None else expert_layers
        self.n_layer = n_layer
        self.gpu = gpu
        self.should_stop = should_stop
        self.clock = 0
        self.calls: list[tuple[Any, ...]] = []  # what was asked of it, in order
        self.loads: list[LoadKey] = []
        self.fault: Callable[[MockSession, int], None] | None = None  # called before decode number n (from 1)
        self.wrong_at: tuple[str, int] | None = None  # (arm, decode of the whole run): other logits there
        self.noise: Callable[[str, int], int] = lambda arm, n: 0  # ns added to decode n of an arm
        self.blind = False  # the plug-in sees nothing
        self.no_layer: Warn | None = None  # why the Vulkan layer is not loaded
        self.layer_blind = False  # it is, and sees nothing
        self.decline = ""
        self.decodes = 0
        self.closed = 0

    def now(self) -> int:
        return self.clock

    def utc(self) -> datetime.datetime:
        return datetime.datetime(2026, 9, 1, 12, 0, tzinfo=datetime.timezone.utc)

    def load(self, key: LoadKey) -> None:
        if not self.loads or self.loads[-1] != key:
            self.loads.append(key)

    def open(self, config: Config) -> MockSession:
        self.calls.append(("open", config.test))
        return MockSession(self, config)

    def n_vocab(self) -> int:
        return N_VOCAB

    def devices(self) -> list[Device]:
        gpus = [Device(GPU, self.gpu[0], "gpu")] if self.gpu else []
        return [*gpus, Device("CPU", "Mock CPU", "cpu")]

    def device_names(self) -> list[str]:
        return [d.name for d in self.devices()]

    def dropped(self) -> int:
        return 0

    def layer_absence(self, used: Collection[str]) -> Warn | None:
        assert used
        return self.no_layer

    def describe(self) -> dict[str, Any]:
        moe = bool(self.expert_layers)
        return {
            "model": {
                "path": "models/it's a model.gguf", "arch": "qwen3moe", "n_layer": self.n_layer,
                "n_expert": 8 if moe else None, "n_expert_used": 2 if moe else None, "size_bytes": 3 << 20,
                "desc": "mock 1M Q4_0", "n_params": 1000,
            },
            "host": {"llama": "0.5.0", "ggml": "0.25.1", "api_version": 2, "dir": "lib", "layout": "mock",
                     "vulkan_layer": None if self.no_layer else "layer.so"},
            "devices": [
                {"name": d.name, "description": d.description, "type": d.type,
                 "async": None if d.type == "cpu" or not self.gpu else self.gpu[1]}
                for d in self.devices()
            ],
            "build": {},
        }  # fmt: skip

    def close(self) -> None:
        self.closed += 1


class MockSession:
    def __init__(self, executor: MockExecutor, config: Config) -> None:
        self.executor = executor
        self.config = config
        self.arm = "off"
        self.position = 0
        self.history: list[int] = []
        self.records: list[np.ndarray[Any, Any]] = []
        self.kept: list[Fingerprint] = []
        self.counts: dict[str, int] = dict.fromkeys(
            ("readbacks", "readback_bytes", "stages", "synchronizes", "uploads", "declined_unpinned"), 0
        )
        self.waits = dict.fromkeys(("readback", "token", "upload"), 0)
        self.submits = dict.fromkeys(self.waits, 0)
        self.splits = len(cpu_expert_layers(config, executor.expert_layers, executor.n_layer))

    def set_mode(self, arm: str) -> None:
        self.executor.calls.append(("mode", arm))
        self.arm = arm

    def clear(self) -> None:
        self.history.clear()

    def decode(self, tokens: Any) -> None:
        executor = self.executor
        executor.decodes += 1
        if executor.fault:
            executor.fault(self, executor.decodes)
        self.history.extend(int(t) for t in tokens)
        executor.calls.append(("decode", self.arm, len(tokens)))
        executor.clock += COMPUTE + executor.noise(self.arm, executor.decodes)
        for _ in range(self.splits):
            self._split()
        if self.config.devices and self.config.n_gpu_layers:
            self.waits["token"] += 1
            self.submits["token"] += 5

    def _split(self) -> None:
        executor, declined = self.executor, bool(self.executor.decline) and self.arm == "async"
        arm = "stock" if declined or self.arm == "off" else self.arm
        stage = DEVICE_WAIT + 2 * COST[arm]
        executor.clock += stage
        self.waits["readback"] += 1 if arm == "async" else 2
        self.submits["readback"] += 2
        if self.arm == "off" or executor.blind:
            return
        batch = np.zeros(4, DTYPE)
        batch["device"] = 0
        batch["issue_ns"] = batch["wait_ns"] = batch["copy_ns"] = batch["device_wait_ns"] = -1
        batch["kind"] = [KIND_READBACK, KIND_READBACK, KIND_STAGE, KIND_UPLOAD]
        batch["bytes"] = [4096, 64, 4160, 4096]
        batch["duration_ns"] = [DEVICE_WAIT + COST[arm], COST[arm], stage, 5 * US]
        batch["n_readbacks"][2] = 2
        batch["n_sync"][2] = 1 if arm == "async" else 4
        batch["device_wait_ns"][2] = DEVICE_WAIT if arm == "stock" else -1
        if arm == "async":
            batch["issue_ns"][:2] = COST["async"]
        self.records.append(batch)
        self.counts["readbacks"] += 2
        self.counts["readback_bytes"] += 4160
        self.counts["stages"] += 1
        self.counts["synchronizes"] += 1 if arm == "async" else 4
        self.counts["uploads"] += 1
        self.counts["declined_unpinned"] += 2 if declined else 0

    def keep_logits(self) -> None:
        wrong = self.executor.wrong_at == (self.arm, self.executor.decodes)
        self.kept.append(Fingerprint(repr((self.history, wrong)).encode()))

    def fingerprints(self) -> list[Fingerprint]:
        kept, self.kept = self.kept, []
        return kept

    def take_records(self) -> np.ndarray[Any, Any]:
        taken = np.concatenate(self.records) if self.records else np.zeros(0, DTYPE)
        self.records.clear()
        return taken

    def counters(self) -> dict[str, int]:
        return dict(self.counts)

    def layer_counters(self) -> LayerSnapshot | None:
        if self.executor.no_layer:
            return None
        seen = 0 if self.executor.layer_blind else 1
        causes = {
            cause: {
                "cause_fence_waits": seen * waits,
                "cause_wait_calls": seen * 3 * waits,
                "cause_queue_submits": seen * self.submits[cause],
            }
            for cause, waits in self.waits.items()
        }
        totals = {name: sum(c[f"cause_{name}"] for c in causes.values()) for name in ("fence_waits", "queue_submits")}
        return LayerSnapshot({**totals, "fence_wait_ns": totals["fence_waits"] * FENCE_WAIT}, causes)

    def close(self) -> None:
        self.executor.calls.append(("close",))


def for_cli(model: Any, should_stop: Callable[[], bool]) -> MockExecutor:
    """What the hidden --debug-executor asks for; GGML_ASYNC_MOCK programs the fault."""
    executor = MockExecutor(model.expert_layers(), model.n_layer or 0, should_stop=should_stop)
    fault = os.environ.get("GGML_ASYNC_MOCK", "")
    if fault == "blind":
        executor.blind = True
    elif fault == "no-gpu":
        executor.gpu = None
    elif fault == "software":
        executor.gpu = ("llvmpipe (LLVM 15.0.6, 256 bits)", True)
    elif fault.startswith("wrong@"):
        executor.wrong_at = ("async", int(fault[6:]))
    elif fault.startswith(("fail@", "sigint@")):
        kind, at = fault.split("@")

        def raise_at(_session: MockSession, n: int) -> None:
            if n != int(at):
                return
            if kind == "sigint":
                os.kill(os.getpid(), signal.SIGINT)
                return
            raise GgmlAsyncError("the device is lost", "restart it")

        executor.fault = raise_at
    return executor
