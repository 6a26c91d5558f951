"""From the raw data of repetitions to the figures of ``ggml-async/profile/1``. Pure: no clock, no library, no device.

DESIGN's words are used as they are defined there. Times in Runs are nanoseconds, in results microseconds (``*_us``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_async import stats
from ggml_async.layer import LayerSnapshot
from ggml_async.profile_plan import Config

SCHEMA = "ggml-async/profile/1"

#: An interval of the speed-up wider than this, from end to end, calls for a warning.
NOISY = 1.10

#: enum ggml_async_record_kind
KIND_READBACK, KIND_STAGE, KIND_UPLOAD = 1, 2, 3

Records = npt.NDArray[np.void]  #: structured as struct ggml_async_record


@dataclass(frozen=True)
class Fingerprint:
    """Of the logits of one decode: BLAKE2b-128 of their float32 bytes, and whether they are all finite."""

    digest: bytes
    finite: bool = True


@dataclass
class Run:
    """One repetition of one arm. Only what was timed is in `records`, `counters` and `layer`; `prints` has every
    decode.
    """

    arm: str
    repetition: int
    tokens: int = 0  #: timed
    elapsed_ns: int = 0  #: of decode + synchronize, summed
    records: list[Records] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)  #: by how much each grew
    layer: LayerSnapshot | None = None  #: what the Vulkan layer counted; None where it is not loaded
    prints: list[Fingerprint] = field(default_factory=list)

    def timed(self, tokens: int, elapsed_ns: int) -> None:
        """One timed decode."""
        self.tokens += tokens
        self.elapsed_ns += elapsed_ns

    def add_records(self, records: Records) -> None:
        """Records of timed decodes."""
        if len(records):
            self.records.append(records)

    def of_kind(self, kind: int) -> Records | None:
        """Its records of one kind; None without any."""
        parts = [r[r["kind"] == kind] for r in self.records]
        parts = [p for p in parts if len(p)]
        return np.concatenate(parts) if parts else None

    @property
    def tok_s(self) -> float:
        """Tokens per second; 0 where the clock did not move."""
        return self.tokens * 1e9 / self.elapsed_ns if self.elapsed_ns > 0 else 0.0


@dataclass(frozen=True)
class Difference:
    """The first decode whose logits are not those of the first run."""

    arm: str
    repetition: int
    decode: int  #: index within the repetition, prefill included
    reference_arm: str


def first_difference(runs: Sequence[Run]) -> Difference | None:
    """Compares every decode of every run with the first run's; None when all are bitwise equal."""
    if not runs:
        return None
    reference = runs[0]
    for run in runs[1:]:
        for i, (a, b) in enumerate(zip(reference.prints, run.prints, strict=True)):
            if a.digest != b.digest:
                return Difference(run.arm, run.repetition, i, reference.arm)
    return None


def _us(records: Records | None, name: str) -> list[float]:
    """Column `name` in µs; entries that were not measured (-1) are left out."""
    if records is None:
        return []
    values = records[name].astype(np.float64)
    kept: list[float] = (values[values >= 0] / 1e3).tolist()
    return kept


@dataclass
class _StageMeans:
    """Of one run, per CPU split, in µs."""

    stage: float
    device_wait: float | None
    readbacks: float


def _stage_means(run: Run) -> _StageMeans | None:
    stages = run.of_kind(KIND_STAGE)
    if stages is None:
        return None
    waits = _us(stages, "device_wait_ns")
    return _StageMeans(
        stage=fmean(_us(stages, "duration_ns")),
        device_wait=fmean(waits) if waits else None,
        readbacks=float(stages["n_readbacks"].mean()),
    )


def readback_costs(runs: Sequence[Run], arm: str) -> list[float]:
    """(stage - stock's device wait) / readbacks in µs, one for each repetition that has both.

    The stock run of the same repetition gives the device wait: it ran next to it.
    """
    waits: dict[int, float] = {}
    means: dict[int, _StageMeans] = {}
    for run in runs:
        found = _stage_means(run)
        if found is None:
            continue
        if run.arm == "stock" and found.device_wait is not None:
            waits[run.repetition] = found.device_wait
        if run.arm == arm:
            means[run.repetition] = found
    both = [(m, waits[rep]) for rep, m in sorted(means.items()) if rep in waits and m.readbacks > 0]
    return [(m.stage - wait) / m.readbacks for m, wait in both]


def arm_result(runs: Sequence[Run], arm: str, device_names: Sequence[str]) -> dict[str, Any] | None:
    """ARM of DESIGN.md from all `runs` of a test; None when none of them is of `arm`.

    `device_names` are the host registry's, by the index that records carry. Of the arm `off` the plug-in knows nothing,
    only its speed and what the Vulkan layer counted are known.
    """
    own = [r for r in runs if r.arm == arm]
    if not own:
        return None
    tokens = sum(r.tokens for r in own)
    measured = arm != "off"
    by_kind: dict[int, Records | None] = {}
    for kind in (KIND_READBACK, KIND_STAGE, KIND_UPLOAD):
        parts = [p for p in (r.of_kind(kind) for r in own) if p is not None]
        by_kind[kind] = np.concatenate(parts) if parts else None
    readbacks, stages = by_kind[KIND_READBACK], by_kind[KIND_STAGE]
    counted: dict[str, int] = {}
    for run in own:
        for name, value in run.counters.items():
            counted[name] = counted.get(name, 0) + value

    def per_token(counter: str) -> float | None:
        return counted[counter] / tokens if measured and tokens and counter in counted else None

    per_readback: list[float] = []
    if stages is not None:
        some = stages[stages["n_readbacks"] > 0]
        per_readback = (some["duration_ns"] / some["n_readbacks"] / 1e3).tolist()
    elapsed = sum(r.elapsed_ns for r in own)
    return {
        "tokens": tokens,
        "tok_s": stats.samples([r.tok_s for r in own]),
        "readbacks_per_token": per_token("readbacks"),
        "cpu_splits_per_token": per_token("stages"),
        "bytes_per_token": per_token("readback_bytes"),
        "stage_us": stats.summary(_us(stages, "duration_ns")),
        "stage_per_readback_us": stats.summary(per_readback),
        "readback_cost_us": stats.mean_with_ci(readback_costs(runs, arm)),
        "issue_us": stats.summary(_us(readbacks, "issue_ns")),
        "device_wait_us": stats.summary(_us(stages, "device_wait_ns")),
        "stage_share": float(stages["duration_ns"].sum()) / elapsed if stages is not None and elapsed else None,
        "synchronizes_per_token": per_token("synchronizes"),
        "uploads_per_token": per_token("uploads"),
        "upload_us": stats.summary(_us(by_kind[KIND_UPLOAD], "duration_ns")),
        "declined": _declined(counted) if measured else None,
        **_vulkan(own, tokens),
        "by_device": _by_device(readbacks, stages, tokens, device_names) if measured else None,
    }


def _vulkan(runs: Sequence[Run], tokens: int) -> dict[str, Any]:
    """What the Vulkan layer counted in all `runs`; null where it was not loaded, or Vulkan had nothing to do."""
    seen = [run.layer for run in runs if run.layer is not None]

    def total(counter: str) -> int:
        return sum(counts.totals[counter] for counts in seen)

    def by_cause(counter: str) -> dict[str, int]:
        sums = {cause: sum(counts.causes[cause][counter] for counts in seen) for cause in seen[0].causes}
        return {cause: n for cause, n in sums.items() if n}

    known = bool(tokens) and len(seen) == len(runs) and total("queue_submits") > 0
    # The layer keeps sums, so of the single waits' distribution only the mean is known.
    mean = total("fence_wait_ns") / total("fence_waits") / 1e3 if known and total("fence_waits") else None
    wait = None if mean is None else {"mean": mean, "p50": None, "p95": None, "p99": None, "max": None}
    waits = by_cause("cause_fence_waits") if known else {}
    submits = by_cause("cause_queue_submits") if known else {}
    return {
        "fence_waits_per_token": total("fence_waits") / tokens if known else None,
        "fence_wait_us": wait,
        "fence_waits_by_cause": {cause: n / tokens for cause, n in waits.items()} if known else None,
        "wait_calls_per_token": sum(by_cause("cause_wait_calls").values()) / tokens if known else None,
        "queue_submits_per_token": total("queue_submits") / tokens if known else None,
        "queue_submits_by_cause": {cause: n / tokens for cause, n in submits.items()} if known else None,
    }


def _declined(counted: Mapping[str, int]) -> dict[str, int]:
    prefix = "declined_"
    return {k.removeprefix(prefix): v for k, v in sorted(counted.items()) if k.startswith(prefix) and v}


def _by_device(
    readbacks: Records | None, stages: Records | None, tokens: int, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    if readbacks is None or not tokens:
        return found
    for index in sorted({int(i) for i in readbacks["device"]}):
        mine = readbacks[readbacks["device"] == index]
        splits = 0 if stages is None else int((stages["device"] == index).sum())
        name = names[index] if 0 <= index < len(names) else f"device {index}"
        found[name] = {
            "readbacks_per_token": len(mine) / tokens,
            "bytes_per_token": float(mine["bytes"].sum()) / tokens,
            "cpu_splits_per_token": splits / tokens,
            "issue_us": stats.summary(_us(mine, "issue_ns")),
            "wait_us": stats.summary(_us(mine, "wait_ns")),
        }
    return found


def speedup(runs: Sequence[Run]) -> dict[str, Any]:
    """{tok_s, stage_us}: async over stock, the geometric mean over repetitions, with its 95 % interval."""

    def by_repetition(arm: str) -> tuple[dict[int, float], dict[int, float]]:
        speed: dict[int, float] = {}
        stage: dict[int, float] = {}
        for run in runs:
            if run.arm == arm:
                speed[run.repetition] = run.tok_s
                means = _stage_means(run)
                if means:
                    stage[run.repetition] = means.stage
        return speed, stage

    (stock_speed, stock_stage), (async_speed, async_stage) = by_repetition("stock"), by_repetition("async")
    return {
        "tok_s": stats.paired_ratio(stock_speed, async_speed),
        "stage_us": stats.paired_ratio(stock_stage, async_stage),
    }


def config_result(config: Config, order: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """The test's settings as they go into the document. `order` is the arms in the order in which they ran."""
    return {
        "test": config.test,
        "n_prompt": config.n_prompt,
        "n_gen": config.n_gen,
        "n_depth": config.n_depth,
        "n_cpu_moe": config.n_cpu_moe,
        "repetitions": config.repetitions,
        "threads": config.n_threads,
        "n_ctx": config.n_ctx,
        "n_batch": config.n_batch,
        "n_ubatch": config.n_ubatch,
        "n_gpu_layers": config.n_gpu_layers,
        "flash_attn": config.flash_attn,
        "devices": list(config.devices),
        "overrides": [f"{pattern}={buft}" for pattern, buft in config.overrides],
        "seed": config.seed,
        "order": [arm for _, arm in order],
    }


def test_result(
    config: Config,
    runs: Sequence[Run],
    *,
    arms: Sequence[str],
    device_names: Sequence[str],
    time: str,
    interrupted: bool,
) -> dict[str, Any]:
    """One element of ``tests``. `time` is when it began, RFC 3339; `runs` is in the order in which they ran."""
    return {
        "time": time,
        "interrupted": interrupted,
        "config": config_result(config, [(r.repetition, r.arm) for r in runs]),
        "arms": {arm: arm_result(runs, arm, device_names) for arm in arms},
        "speedup": speedup(runs),
        # One decode compared with nothing proves nothing.
        "identical_logits": first_difference(runs) is None if len(runs) >= 2 else None,
        "adoption": None,
    }


@dataclass(frozen=True)
class Warn:
    """Something the reader must know about the figures, and what to try next."""

    code: str
    message: str
    hint: str
    test: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As in the document's ``warnings``."""
        return {"code": self.code, "message": self.message, "hint": self.hint, "test": self.test}


def difference_warning(config: Config, runs: Sequence[Run]) -> tuple[Warn, bool] | None:
    """The warning for logits that differ, and whether the plug-in is to blame (stock alone repeats itself)."""
    found = first_difference(runs)
    if found is None:
        return None
    where = f"arm {found.arm}, repetition {found.repetition + 1}, decode {found.decode + 1}"
    alone = first_difference([r for r in runs if r.arm in ("stock", "off")])
    if alone is not None:
        hint = "the backend is not deterministic here, so bitwise identity cannot be judged; try --arms stock"
        return Warn("stock_not_deterministic", f"stock's own logits differ between repetitions ({where})", hint,
                    config.label), False  # fmt: skip
    if found.arm == found.reference_arm:
        message = f"logits differ between repetitions of the arm {found.arm} ({where})"
    else:
        message = f"logits differ from those of the arm {found.reference_arm} ({where})"
    hint = "run --arms stock to see whether stock repeats itself, and report it with the JSON"
    return Warn("not_identical", message, hint, config.label), True


def run_warnings(config: Config, runs: Sequence[Run], result: Mapping[str, Any]) -> list[Warn]:
    """Warnings that the figures of one test call for."""
    found: list[Warn] = []

    def warn(code: str, message: str, hint: str) -> None:
        found.append(Warn(code, message, hint, config.label))

    for arm in dict.fromkeys(r.arm for r in runs):
        own = [r for r in runs if r.arm == arm]
        odd = stats.outliers([r.tok_s for r in own])
        if odd:
            which = ", ".join(str(own[i].repetition + 1) for i in odd)
            warn("outliers", f"{arm}: repetition {which} is far from the others", "close other programs, or raise -r")
    if config.repetitions < 2:
        warn("one_repetition", "one repetition gives no interval", "use -r 5")
    ratio = result["speedup"]["tok_s"]
    if ratio and ratio["ci95"] and ratio["ci95"][1] > NOISY * ratio["ci95"][0]:
        lo, hi = ratio["ci95"]
        hint = "raise -r or -n, close other programs, or use fewer threads than cores"
        warn("noisy", f"the speed-up is only known to be {lo:.2f} to {hi:.2f}", hint)
    declined = (result["arms"].get("async") or {}).get("declined")
    if declined:
        reasons = ", ".join(f"{n} {reason}" for reason, n in declined.items())
        hint = "docs/contract.md says what each reason means"
        warn("declined", f"readbacks left to llama.cpp's own path: {reasons}", hint)
    if any(not p.finite for r in runs for p in r.prints):
        warn("not_finite", "some logits are infinite or not a number", "equal bits say little then; try another model")
    return found
