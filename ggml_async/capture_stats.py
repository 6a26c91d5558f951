"""The figures of each arm of a capture, ratios of two arms with intervals, and the four lines that sum it up.

docs/report.md defines every figure. Intervals are 95 %, by bootstrap over contiguous blocks of evaluations, because
neighbours resemble each other; the draws are seeded, so the same capture gives the same interval.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_async import capture as cap
from ggml_async.capture import Capture
from ggml_async.capture_tokens import Analysis, Floats, Ints, Unit, by_cause, declined, measured_us, summary

Json = dict[str, Any]
Pairs = tuple[Floats, Floats]  #: numerator and denominator of a figure, one element an evaluation

#: Blocks of evaluations that a bootstrap draws from, and how often.
BLOCKS, RESAMPLES, SEED = 40, 1000, 1

#: Figures that two arms or two captures are compared by: key of the series, heading, unit, more is better.
COMPARED: tuple[tuple[str, str, str, bool], ...] = (
    ("tok_s", "speed", "tokens/s", True),
    ("readbacks_per_token", "readbacks a token", "count", False),
    ("bytes_per_token", "bytes read back a token", "bytes", False),
    ("stage_us", "stage", "µs", False),
    ("stage_per_readback_us", "stage per readback", "µs", False),
    ("cpu_compute_us_per_token", "CPU compute a token", "µs", False),
    ("fence_waits_per_token", "fence waits a token", "count", False),
    ("fence_wait_us", "fence wait", "µs", False),
    ("queue_submits_per_token", "queue submits a token", "count", False),
)


# --- intervals ---------------------------------------------------------------------------------------------------


def _blocks(pairs: Pairs) -> Floats:
    """(2, blocks) sums over contiguous blocks of evaluations."""
    n = len(pairs[0])
    edges = np.linspace(0, n, min(BLOCKS, n) + 1).astype(np.int64)[:-1]
    found: Floats = np.stack([np.add.reduceat(p, edges) for p in pairs])
    return found


def _draws(pairs: Pairs, seed: int) -> Floats | None:
    """The figure of each resample; None below two evaluations."""
    if len(pairs[0]) < 2:
        return None
    sums = _blocks(pairs)
    random = np.random.default_rng(seed)
    chosen = random.integers(0, sums.shape[1], (RESAMPLES, sums.shape[1]))
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = sums[0][chosen].sum(axis=1) / sums[1][chosen].sum(axis=1)
    return found


def _interval(draws: npt.NDArray[np.float64]) -> list[float] | None:
    draws = draws[np.isfinite(draws)]
    if len(draws) < RESAMPLES // 2:
        return None
    low, high = np.percentile(draws, (2.5, 97.5))
    return [float(low), float(high)]


def mean_of(pairs: Pairs | None) -> float | None:
    """The figure itself: sum of numerators over sum of denominators."""
    if pairs is None:
        return None
    bottom = float(pairs[1].sum())
    return float(pairs[0].sum()) / bottom if bottom > 0 else None


def ratio(before: Pairs | None, after: Pairs | None) -> Json | None:
    """{ratio, ci95} of after over before; None where either is not known or before is 0."""
    a, b = mean_of(before), mean_of(after)
    if before is None or after is None or a is None or b is None or a <= 0:
        return None
    first, second = _draws(before, SEED), _draws(after, SEED + 1)
    if first is None or second is None:
        return {"ratio": b / a, "ci95": None}
    with np.errstate(divide="ignore", invalid="ignore"):
        return {"ratio": b / a, "ci95": _interval(second / first)}


def compare(before: Unit, after: Unit) -> list[Json]:
    """One row for each figure of COMPARED that both know: before, after, ratio with its interval."""
    rows: list[Json] = []
    for key, heading, unit, more in COMPARED:
        a, b = before.series.get(key), after.series.get(key)
        values = mean_of(a), mean_of(b)
        if values == (None, None):
            continue
        rows.append({
            "figure": key, "heading": heading, "unit": unit, "more_is_better": more,
            "before": values[0], "after": values[1], **_flat(ratio(a, b)),
        })  # fmt: skip
    return rows


def _flat(found: Json | None) -> Json:
    interval = (found["ci95"] or [None, None]) if found else [None, None]
    return {"ratio": found["ratio"] if found else None, "ratio_lo": interval[0], "ratio_hi": interval[1]}


# --- one arm -----------------------------------------------------------------------------------------------------


class _PerToken:
    """Sums of events over the evaluations of a unit."""

    def __init__(self, analysis: Analysis, unit: Unit) -> None:
        self.place = np.full(len(analysis.tokens) + 1, -1, np.int64)
        self.place[unit.tokens] = np.arange(len(unit.tokens))
        self.n = len(unit.tokens)

    def sums(self, token: Ints, weights: npt.NDArray[Any] | None = None) -> Floats:
        """Sum of `weights` (default: the count) of events that are in evaluation `token`."""
        at = self.place[token]
        inside = at >= 0
        chosen = None if weights is None else weights[inside].astype(np.float64)
        found: Floats = np.bincount(at[inside], chosen, self.n).astype(np.float64)
        return found


def fill(analysis: Analysis, unit: Unit) -> None:
    """Compute `figures` and `series` of a unit, but for what needs another arm (readback_cost_us)."""
    _evaluation_figures(analysis, unit)
    _plugin_figures(analysis, unit)
    _layer_figures(analysis, unit)


def _evaluation_figures(analysis: Analysis, unit: Unit) -> None:
    tokens, chosen = analysis.tokens, unit.tokens
    figures, series = unit.figures, unit.series
    rows = np.maximum(tokens.rows[chosen], 1)  # unknown: one
    period, duration = tokens.period[chosen], (tokens.end - tokens.start)[chosen]
    continued = period >= 0
    time = np.where(continued, period, 0) if continued.any() else duration
    counted = np.where(time > 0, rows, 0)
    figures.update(arm=unit.arm, test=unit.test, evaluations=len(chosen) or None)
    figures["tokens"] = int(rows.sum()) if len(chosen) else None
    series["tok_s"] = (counted.astype(np.float64), time / 1e9)
    figures["tok_s"] = mean_of(series["tok_s"])
    draws = _draws(series["tok_s"], SEED)
    figures["tok_s_ci95"] = _interval(draws) if draws is not None else None
    figures["token_ms"] = summary(time[time > 0] / 1e6)


def _plugin_figures(analysis: Analysis, unit: Unit) -> None:
    figures, series, events = unit.figures, unit.series, analysis.tokens.events[unit.tokens]
    n, per = len(unit.tokens), _PerToken(analysis, unit)
    ones = np.ones(n)
    stage_token = analysis.token_of(cap.STAGE)
    stages = analysis.of_kind(cap.STAGE)
    length = np.maximum(stages["duration_ns"], 0) / 1e3
    count = np.maximum(stages["n_readbacks"], 1)
    n_stages = per.sums(stage_token)
    computes, compute_token = analysis.of_kind(cap.COMPUTE), analysis.token_of(cap.COMPUTE)
    on_cpu = np.where(computes["n_sync"] == 1, np.maximum(computes["duration_ns"], 0), 0) / 1e3
    series["readbacks_per_token"] = (events["n_readbacks"].astype(np.float64), ones)
    series["bytes_per_token"] = (events["bytes"].astype(np.float64), ones)
    series["cpu_splits_per_token"] = (n_stages, ones)
    series["synchronizes_per_token"] = (events["n_sync"].astype(np.float64), ones)
    series["uploads_per_token"] = (per.sums(analysis.token_of(cap.UPLOAD)), ones)
    if len(computes):
        series["cpu_compute_us_per_token"] = (per.sums(compute_token, on_cpu), ones)
    for key in ("readbacks", "bytes", "cpu_splits", "synchronizes", "uploads", "cpu_compute_us"):
        figures[f"{key}_per_token"] = mean_of(series.get(f"{key}_per_token"))
    series["stage_us"] = (per.sums(stage_token, length), n_stages)
    series["stage_per_readback_us"] = (per.sums(stage_token, length / count), n_stages)
    own = unit.stages
    figures["stage_us"] = summary(measured_us(own["duration_ns"]))
    some = own[(own["n_readbacks"] > 0) & (own["duration_ns"] >= 0)]
    figures["stage_per_readback_us"] = summary(some["duration_ns"] / some["n_readbacks"] / 1e3)
    figures["device_wait_us"] = summary(measured_us(own["device_wait_ns"]))
    figures["readback_cost_us"] = None
    lived = float((analysis.tokens.end - analysis.tokens.start)[unit.tokens].sum())
    figures["stage_share"] = float(own["duration_ns"].clip(0).sum()) / lived if len(own) and lived else None
    figures["readback_us"] = summary(measured_us(unit.readbacks["duration_ns"]))
    figures["issue_us"] = summary(measured_us(unit.readbacks["issue_ns"]))
    figures["upload_us"] = summary(measured_us(unit.uploads["duration_ns"]))
    figures["final_wait_us"] = summary(measured_us(events["wait_ns"]))
    figures["declined"] = declined(analysis, unit.readbacks) if n else None


def _layer_figures(analysis: Analysis, unit: Unit) -> None:
    figures, series, tokens, waits = unit.figures, unit.series, analysis.tokens, analysis.waits
    submits = analysis.of_kind(cap.SUBMIT)
    queue = submits["path"] != 2  # vkQueueBindSparse is none
    sees = analysis.layer_sees[unit.tokens]
    # Those with an evaluation before them: only theirs are known from its end on.
    counted = sees & (tokens.period[unit.tokens] >= 0)
    counted = counted if counted.any() else sees
    chosen = np.zeros(len(tokens) + 1, np.bool_)
    chosen[unit.tokens[counted]] = True
    if len(unit.tokens):
        w, s = chosen[analysis.wait_token], chosen[analysis.submit_token] & queue
        n = float(counted.sum())
    else:  # no evaluations are known: totals only
        mode = {"off": 0, "stock": 1, "async": 2, "none": cap.NO_MODE}[unit.arm]
        w, s, n = waits.mode == mode, (submits["mode"] == mode) & queue, 0.0
    known = bool(n) or (not len(unit.tokens) and bool(analysis.layer_pids))
    figures["fence_waits"] = int(w.sum()) if known else None
    figures["wait_calls"] = int(waits.calls[w].sum()) if known else None
    figures["queue_submits"] = int(s.sum()) if known else None
    figures["submit_infos"] = int(submits["n_readbacks"][s].sum()) if known else None
    figures["fence_wait_us"] = summary(waits.duration[w] / 1e3) if known else None
    for key in ("fence_waits", "wait_calls", "queue_submits", "submit_infos"):
        figures[f"{key}_per_token"] = figures[key] / n if n else None
    figures["fence_waits_by_cause"] = by_cause(analysis.wait_cause[w], n) if n else None
    figures["queue_submits_by_cause"] = by_cause(analysis.submit_cause[s], n) if n else None
    splits = mean_of((series["cpu_splits_per_token"][0][counted], np.ones(int(n)))) if n else None
    figures["fence_waits_beyond_splits"] = figures["fence_waits_per_token"] - splits if splits is not None else None
    if n:
        per = _PerToken(analysis, unit)
        ones = counted.astype(np.float64)
        w_n, w_us = per.sums(analysis.wait_token), per.sums(analysis.wait_token, waits.duration / 1e3)
        s_n = per.sums(analysis.submit_token, queue)
        series["fence_waits_per_token"] = (w_n * ones, ones)
        series["fence_wait_us"] = (w_us * ones, w_n * ones)
        series["queue_submits_per_token"] = (s_n * ones, ones)


def _cost_parts(analysis: Analysis, unit: Unit) -> Floats:
    """(4, blocks): sums of stage µs, readbacks, stages and device wait µs over blocks of evaluations."""
    per, stages, token = _PerToken(analysis, unit), analysis.of_kind(cap.STAGE), analysis.token_of(cap.STAGE)
    columns = [
        np.maximum(stages["duration_ns"], 0) / 1e3,
        stages["n_readbacks"],
        np.ones(len(stages)),
        np.maximum(stages["device_wait_ns"], 0) / 1e3,
    ]
    edges = np.linspace(0, per.n, min(BLOCKS, per.n) + 1).astype(np.int64)[:-1]
    found: Floats = np.stack([np.add.reduceat(per.sums(token, c), edges) for c in columns])
    return found


def _cost(own: Floats, stock: Floats) -> Floats:
    """(stage - stock's device wait) / readbacks, from sums in the order of _cost_parts."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = (own[0] - stock[3] / stock[2] * own[2]) / own[1]
    return found


def readback_cost(analysis: Analysis, unit: Unit, stock: Unit | None) -> Json | None:
    """{mean, ci95} in µs; None where the capture has no stock arm whose device wait could be taken off."""
    if stock is None or not len(unit.stages) or not len(measured_us(stock.stages["device_wait_ns"])):
        return None
    own, other = _cost_parts(analysis, unit), _cost_parts(analysis, stock)
    mean = float(_cost(own.sum(axis=1), other.sum(axis=1)))
    if not np.isfinite(mean):
        return None
    if min(len(unit.tokens), len(stock.tokens)) < 2:
        return {"mean": mean, "ci95": None}
    random = np.random.default_rng(SEED)
    mine = random.integers(0, own.shape[1], (RESAMPLES, own.shape[1]))
    theirs = mine if unit is stock else random.integers(0, other.shape[1], (RESAMPLES, other.shape[1]))
    draws = _cost(own[:, mine].sum(axis=2), other[:, theirs].sum(axis=2))
    return {"mean": mean, "ci95": _interval(draws)}


def analyse(capture: Capture, skip: int = 1) -> Analysis:
    """An analysis whose units have their figures. `skip`: first evaluations of each process to leave out."""
    analysis = Analysis(capture, skip)
    for unit in analysis.units:
        fill(analysis, unit)
    for unit in analysis.units:
        unit.figures["readback_cost_us"] = readback_cost(analysis, unit, analysis.unit("stock", unit.test))
    return analysis


def speedups(analysis: Analysis) -> list[Json]:
    """Async over stock, for each test that both arms have: {test, rows of `compare`}."""
    found = []
    for test in ("decode", "prompt", "any"):
        stock, own = analysis.unit("stock", test), analysis.unit("async", test)
        if stock and own:
            found += [{"test": test, "before_arm": "stock", "after_arm": "async", **r} for r in compare(stock, own)]
    return found


# --- four lines --------------------------------------------------------------------------------------------------


def _number(value: float | None, digits: int = 1) -> str:
    return "not measured" if value is None else f"{value:,.{digits}f}"


def _arrow(units: list[Unit], key: str, digits: int = 1, leaf: str = "") -> str:
    """`stock 1.0, async 2.0` for a figure of each arm."""
    parts = []
    for unit in units:
        value = unit.figures.get(key)
        parts.append(f"{unit.arm} {_number(value.get(leaf) if leaf and value else value, digits)}")
    return ", ".join(parts)


def _main_units(analysis: Analysis) -> list[Unit]:
    """For each arm the units of one test: decode where any arm has it."""
    for test in ("decode", "any", "prompt"):
        found = [u for u in analysis.units if u.test == test and len(u.tokens)]
        if found:
            return found
    return []


def _who_line(capture: Capture) -> str:
    parts = []
    for component, name in (("plugin", "plug-in"), ("layer", "Vulkan layer")):
        hellos = [h for h in capture.hellos if h.component == component]
        if not hellos:
            parts.append(f"no {name}")
            continue
        programs = ", ".join(dict.fromkeys(f"{Path(h.program).name or '?'} (pid {h.pid})" for h in hellos[:3]))
        more = f" and {len(hellos) - 3} more" if len(hellos) > 3 else ""
        parts.append(f"{name} {hellos[0].version} in {programs}{more}")
    if capture.has("plugin") and not capture.hosts:
        reason = capture.refused[-1].reason.splitlines()[:1] if capture.refused else []
        parts[0] += ", not attached" + (f": {reason[0]}" if reason else "")
    return "; ".join(parts)


def _cause_text(units: list[Unit], key: str) -> str:
    causes: dict[str, list[str]] = {}
    for unit in units:
        for cause in unit.figures.get(key) or {}:
            causes.setdefault(cause, [])
    for cause, values in causes.items():
        values += [f"{(u.figures.get(key) or {}).get(cause, 0.0):.1f}" for u in units]
    return ", ".join(f"{cause} {' → '.join(values)}" for cause, values in causes.items())


def summary_lines(capture: Capture, skip: int = 1) -> list[str]:
    """Four short lines: what was in, evaluations and speed, readbacks and stages, waits and submits by cause."""
    analysis = analyse(capture, skip)
    units = _main_units(analysis)
    lines = [f"in: {_who_line(capture)}"]
    if not units:
        why = "no evaluation of a graph was seen" if capture.has("plugin") else "not measured: no plug-in"
        lines += [f"speed: {why}", f"readbacks: {why}"]
    else:
        gained = next((r for r in speedups(analysis) if r["figure"] == "tok_s" and r["test"] == units[0].test), None)
        times = f"; async/stock {gained['ratio']:.3f}" if gained and gained["ratio"] else ""
        if times and gained and gained["ratio_lo"]:
            times += f" [{gained['ratio_lo']:.3f}, {gained['ratio_hi']:.3f}]"
        what = {"decode": "decode", "prompt": "prompt", "any": "evaluation"}[units[0].test]
        counts = ", ".join(f"{u.arm} {u.figures['tok_s'] or 0:.2f} t/s ({len(u.tokens)})" for u in units)
        lines.append(f"speed ({what}): {counts}{times}")
        lines.append(
            f"readbacks a token: {_arrow(units, 'readbacks_per_token')}; "
            f"stage per readback, µs: {_arrow(units, 'stage_per_readback_us', 1, 'mean')}"
        )
    seen = [u for u in units if u.figures["fence_waits_per_token"] is not None]
    if seen:
        waits = " → ".join(f"{u.figures['fence_waits_per_token']:.1f}" for u in seen)
        submits = " → ".join(f"{u.figures['queue_submits_per_token']:.1f}" for u in seen)
        arms = " → ".join(u.arm for u in seen)
        lines.append(
            f"a token ({arms}): fence waits {waits} ({_cause_text(seen, 'fence_waits_by_cause')}); "
            f"queue submits {submits} ({_cause_text(seen, 'queue_submits_by_cause')})"
        )
    else:
        lines.append(f"waits: {_totals(analysis)}")
    return lines


def _totals(analysis: Analysis) -> str:
    if not analysis.layer_pids:
        return "not measured: no Vulkan layer"
    waits, submits = len(analysis.waits.start), int((analysis.of_kind(cap.SUBMIT)["path"] != 2).sum())
    return f"{waits} fence waits and {submits} queue submits in all; no evaluation to count them by"
