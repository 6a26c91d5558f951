"""The engine of ``ggml-async profile``: repetitions, warm-up, order, timing, what to keep when something goes wrong.

It drives an Executor, which does the work and owns the clock: the real one is in ``profile_exec.py``, tests bring
their own and so check all of this exactly and instantly.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ggml_async import __version__, stats
from ggml_async.devices import is_software
from ggml_async.errors import ExitCode, GgmlAsyncError
from ggml_async.layer import LayerSnapshot
from ggml_async.profile_plan import Config, LoadKey, Plan, cpu_expert_layers, grouped, order_of_runs
from ggml_async.profile_result import (
    SCHEMA,
    Fingerprint,
    Records,
    Run,
    Warn,
    difference_warning,
    run_warnings,
    test_result,
)

Tokens = npt.NDArray[np.int32]

#: Generated tokens of the warm-up: the first builds pipelines and pages weights in, the second shows that it is done.
WARMUP_GEN = 2
#: Decodes after which records and logits put aside are taken in, so that neither grows without bound.
TAKE_EVERY = 64


class Session(Protocol):
    """One context on the loaded model."""

    def set_mode(self, arm: str) -> None:
        """Switch the plug-in: stock, async or off. Takes effect with the next decode."""

    def clear(self) -> None:
        """Forget everything; the next decode starts at position 0."""

    def decode(self, tokens: Tokens) -> None:
        """Decode at most n_batch tokens behind the earlier ones, and wait until all of it is done."""

    def keep_logits(self) -> None:
        """Put the logits of the last decode aside; as cheap as can be, it is called between timed decodes."""

    def fingerprints(self) -> list[Fingerprint]:
        """Of the logits put aside since the last call, in order."""

    def take_records(self) -> Records:
        """The plug-in's records since the last call."""

    def counters(self) -> dict[str, int]:
        """The plug-in's counters as they are now."""

    def layer_counters(self) -> LayerSnapshot | None:
        """The Vulkan layer's counters as they are now; None where it is not loaded."""

    def close(self) -> None:
        """Free the context."""


class Executor(Protocol):
    """A loaded llama.cpp with the plug-in attached."""

    def now(self) -> int:
        """Nanoseconds of a monotonic clock."""

    def utc(self) -> datetime.datetime:
        """The time of day, in UTC."""

    def load(self, key: LoadKey) -> None:
        """Make this the loaded model; nothing to do when it is already."""

    def open(self, config: Config) -> Session:
        """A context for this test on the loaded model."""

    def n_vocab(self) -> int:
        """Token ids of the loaded model."""

    def device_names(self) -> list[str]:
        """By the device index that records carry."""

    def dropped(self) -> int:
        """Records lost so far because nobody read them in time."""

    def layer_absence(self, used: Collection[str]) -> Warn | None:
        """Why the Vulkan layer counts nothing on the devices `used` (at least one); None when it does."""

    def describe(self) -> dict[str, Any]:
        """``model``, ``host``, ``devices`` and ``build`` of the result document."""


class Observer(Protocol):
    """Who wants to know how far it is."""

    def test_started(self, index: int, total: int, config: Config) -> None:
        """Test `index` (from 1) of `total` begins: loading, then warm-up."""

    def run_started(self, done: int, total: int, arm: str) -> None:
        """Run `done` + 1 of all `total` timed runs of the plan begins."""

    def run_finished(self, done: int, total: int, run: Run) -> None:
        """`done` of `total` timed runs are over."""

    def test_finished(self, document: Mapping[str, Any], test: Mapping[str, Any]) -> None:
        """A test's figures are final; `document` has those of the tests before it too."""


@dataclass
class Outcome:
    """What is left at the end, however it came."""

    document: dict[str, Any]
    warnings: list[Warn] = field(default_factory=list)
    error: GgmlAsyncError | None = None
    exit_code: ExitCode = ExitCode.OK


class _Stop(Exception):
    """SIGINT was seen between two decodes."""


def tokens_for(config: Config, n_vocab: int) -> tuple[list[Tokens], list[Tokens], list[Tokens]]:
    """(prefill, prompt, generation) decodes of one repetition: the same ids for every arm and repetition.

    Prefill and prompt come in pieces of n_batch tokens, generation one at a time.
    """
    rng = np.random.default_rng(config.seed)
    ids = rng.integers(0, n_vocab, config.n_depth + config.n_tokens, dtype=np.int32)
    prefill, rest = ids[: config.n_depth], ids[config.n_depth :]

    def pieces(part: Tokens, size: int) -> list[Tokens]:
        return [part[i : i + size] for i in range(0, len(part), size)]

    return (
        pieces(prefill, config.n_batch),
        pieces(rest[: config.n_prompt], config.n_batch),
        pieces(rest[config.n_prompt :], 1),
    )


class _Test:
    """Runs one test's repetitions on one session."""

    def __init__(self, executor: Executor, session: Session, config: Config, should_stop: Callable[[], bool]) -> None:
        self.executor = executor
        self.session = session
        self.should_stop = should_stop
        self.prefill, self.prompt, self.generation = tokens_for(config, executor.n_vocab())

    def warm_up(self, arms: Sequence[str]) -> None:
        """A short run of every arm, thrown away."""
        for arm in arms:
            self._begin(arm)
            for tokens in [*self.prompt, *self.generation[:WARMUP_GEN]]:
                self._check()
                self.session.decode(tokens)
        self.session.take_records()

    def run(self, arm: str, repetition: int) -> Run:
        """One repetition. Only decode + synchronize is timed.

        Between two timed decodes nothing is done but to put the logits aside: a pause of a millisecond, for hashing or
        reading records, lets a GPU lower its clocks and a CPU its threads fall asleep, which no real program would see.
        """
        executor, session = self.executor, self.session
        run = Run(arm, repetition)
        self._begin(arm)
        for tokens in self.prefill:
            self._check()
            session.decode(tokens)
            session.keep_logits()
        run.prints += session.fingerprints()
        session.take_records()
        before, layer_before = session.counters(), session.layer_counters()
        for i, tokens in enumerate([*self.prompt, *self.generation], start=1):
            self._check()
            start = executor.now()
            session.decode(tokens)
            run.timed(len(tokens), executor.now() - start)
            session.keep_logits()
            if i % TAKE_EVERY == 0:
                run.add_records(session.take_records())
                run.prints += session.fingerprints()
        run.add_records(session.take_records())
        run.prints += session.fingerprints()
        run.counters = {name: value - before.get(name, 0) for name, value in session.counters().items()}
        layer_after = session.layer_counters()
        if layer_before is not None and layer_after is not None:
            run.layer = layer_after - layer_before
        return run

    def _begin(self, arm: str) -> None:
        self.session.clear()
        self.session.set_mode(arm)

    def _check(self) -> None:
        if self.should_stop():
            raise _Stop


class Profiler:
    """One profile run: `plan` on `executor`, told to `observer`."""

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        observer: Observer,
        *,
        expert_layers: Sequence[int] = (),
        n_layer: int = 0,
        command: Sequence[str] = (),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.plan = plan
        self.executor = executor
        self.observer = observer
        self.expert_layers = expert_layers
        self.n_layer = n_layer
        self.command = list(command)
        self.should_stop = should_stop
        self.done = 0
        self._without_layer = False
        self.outcome = Outcome({})

    def execute(self) -> Outcome:
        """Run every test. Never raises for what a test does: what was finished before is kept, the error is with it."""
        plan, outcome = self.plan, self.outcome
        about = stats.finite(self.executor.describe())
        outcome.document = {
            "schema": SCHEMA,
            "time": _rfc3339(self.executor.utc()),
            "build": {"ggml_async": __version__, **about.get("build", {})},
            "command": self.command,
            "model": about["model"],
            "host": about["host"],
            "devices": about["devices"],
            "interrupted": False,
            "warnings": [],
            "tests": [],
        }
        for warn in self._static_warnings(about["devices"]):
            self._warn(warn)
        dropped = self.executor.dropped()
        for index, config in enumerate(grouped(plan.configs, Config.load_key), start=1):
            try:
                self._test(index, config)
            except (KeyboardInterrupt, _Stop):
                self._interrupted()
                break
            except GgmlAsyncError as error:
                outcome.error = error
                outcome.exit_code = error.exit_code
                self._warn(Warn("failed", f"test {index} ({config.label}): {error.message}", error.hint, config.label))
                break
        self._finish(dropped)
        return outcome

    def _test(self, index: int, config: Config) -> None:
        executor, plan = self.executor, self.plan
        self.observer.test_started(index, len(plan.configs), config)
        time = _rfc3339(executor.utc())
        executor.load(config.load_key())
        self.outcome.document["model"] = stats.finite(executor.describe()["model"])  # its description needs it loaded
        session = executor.open(config)
        runs: list[Run] = []
        stopped: BaseException | None = None
        try:
            test = _Test(executor, session, config, self.should_stop)
            total = len(plan.configs) * config.repetitions * len(plan.arms)
            if plan.warmup:
                test.warm_up(plan.arms)
            for repetition, arm in order_of_runs(config, plan.arms, index):
                self.observer.run_started(self.done, total, arm)
                runs.append(test.run(arm, repetition))
                self.done += 1
                self.observer.run_finished(self.done, total, runs[-1])
        except (KeyboardInterrupt, _Stop) as stop:
            stopped = stop
        finally:
            session.close()
        if runs:
            self._keep(config, runs, time, interrupted=stopped is not None)
        if stopped is not None:
            raise stopped

    def _keep(self, config: Config, runs: Sequence[Run], time: str, *, interrupted: bool) -> None:
        names = self.executor.device_names()
        result = stats.finite(
            test_result(config, runs, arms=self.plan.arms, device_names=names, time=time, interrupted=interrupted)
        )
        difference = difference_warning(config, runs)
        if difference:
            warn, ours = difference
            self._warn(warn)
            if ours:
                self._worsen(ExitCode.FAILED)
        software = any(w.code == "software_device" for w in self.outcome.warnings)
        for warn in run_warnings(config, runs, result):
            if not (software and warn.code in ("noisy", "outliers")):  # its timings were disowned already
                self._warn(warn)
        layers = cpu_expert_layers(config, self.expert_layers, self.n_layer)
        watching = [a for a in self.plan.arms if a != "off"]
        seen = any(run.counters.get("readbacks", 0) for run in runs if run.arm != "off")
        if layers and watching and any(r.arm != "off" for r in runs) and not seen:
            message = f"{len(layers)} layers have experts on the CPU, but the plug-in saw no readback"
            self._warn(Warn("nothing_seen", message, "run ggml-async doctor", config.label))
            self._worsen(ExitCode.NOT_INSTRUMENTED)
        elif not layers and not seen:
            self._warn(self._nothing_to_gain(config))
        if not (self._uses_no_gpu(config) or self._without_layer or any(_vulkan_seen(result))):
            self._warn(Warn("layer_saw_nothing", "the Vulkan layer saw no queue submit, so there are no fence waits",
                            "run ggml-async doctor, unless this test's device is not a Vulkan one",
                            config.label))  # fmt: skip
        self.outcome.document["tests"].append(result)
        self.observer.test_finished(self.outcome.document, result)

    @staticmethod
    def _uses_no_gpu(config: Config) -> bool:
        return not config.devices or config.n_gpu_layers == 0

    def _nothing_to_gain(self, config: Config) -> Warn:
        """Why there is no readback, where none is to be expected."""
        if self._uses_no_gpu(config):
            return Warn("no_gpu", "no GPU in use: nothing is read back, so there is nothing to gain",
                        "ggml-async doctor lists the devices it sees", config.label)  # fmt: skip
        if not self.expert_layers:
            return Warn("dense", "a dense model wholly on the GPU has no readbacks: there is nothing to gain",
                        "try a mixture-of-experts model with -ncmoe, or -ot to keep other weights on the CPU",
                        config.label)  # fmt: skip
        return Warn("no_cpu_experts", "no experts on the CPU: nothing is read back, so there is nothing to gain",
                    "nothing beats a model that fits the GPU; -ncmoe N puts N layers' experts on the CPU",
                    config.label)  # fmt: skip

    def _static_warnings(self, devices: Sequence[Mapping[str, Any]]) -> list[Warn]:
        """What can be said before anything ran."""
        found: list[Warn] = []
        used = {name for config in self.plan.configs for name in config.devices}
        for device in devices:
            name, description = device["name"], device["description"]
            if name not in used:
                continue
            if is_software(description):
                found.append(Warn("software_device", f"{name} is a software device ({description}): counts are exact, "
                                  "timings say nothing about a GPU", "run it where a GPU is"))  # fmt: skip
            if device.get("async") is False:
                found.append(Warn("no_async", f"{name} has no asynchronous reads: there is nothing to gain there",
                                  "unset GGML_VK_DISABLE_ASYNC if it is set, or use another device"))  # fmt: skip
        absence = self.executor.layer_absence(used) if used else None
        self._without_layer = absence is not None
        return [*found, absence] if absence else found

    def _warn(self, warn: Warn) -> None:
        if warn in self.outcome.warnings:
            return
        self.outcome.warnings.append(warn)
        self.outcome.document["warnings"].append(warn.as_dict())

    def _worsen(self, code: ExitCode) -> None:
        if self.outcome.exit_code is ExitCode.OK:
            self.outcome.exit_code = code

    def _interrupted(self) -> None:
        self.outcome.exit_code = ExitCode.INTERRUPTED
        self.outcome.document["interrupted"] = True
        self._warn(Warn("interrupted", "interrupted: only what was finished is reported", "run it again for the rest"))

    def _finish(self, dropped_before: int) -> None:
        lost = self.executor.dropped() - dropped_before
        if lost:
            self._warn(Warn("dropped", f"{lost} records were lost: times are of the others, counts are exact",
                            "lower -p or -b, so that one decode has fewer"))  # fmt: skip


def _vulkan_seen(result: Mapping[str, Any]) -> list[bool]:
    """For each arm that ran, whether the Vulkan layer has figures of it."""
    return [arm["queue_submits_per_token"] is not None for arm in result["arms"].values() if arm]


def _rfc3339(time: datetime.datetime) -> str:
    return time.astimezone(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
