"""The tables of a capture besides its arms: per layer, tensor, process, token; histograms; the time line of one token.

Each function returns rows as plain dictionaries, whose keys capture_fields explains. Times are µs unless a key says
otherwise; what was not measured is None.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_async import capture as cap
from ggml_async.capture_stats import mean_of
from ggml_async.capture_tokens import ARMS, TESTS, Analysis, Ints, Unit, containing
from ggml_async.errors import UsageError

Json = dict[str, Any]
_ARM_OF_MODE = {0: "off", 1: "stock", 2: "async"}
_PATHS = ("stock", "direct", "bounce", "empty")

#: Histogram buckets are half an octave wide: each bound is the one before it times the square root of 2.
BUCKETS_PER_OCTAVE = 2
HISTOGRAMS = ("stage_us", "readback_us", "fence_wait_us")
#: Lanes of a time line, from top to bottom.
LANES = (
    "cpu_compute", "device_wait", "readback", "upload", "device_compute", "final_wait", "fence_wait", "queue_submit",
)  # fmt: skip


def grouped(groups: Ints, values: npt.NDArray[Any], n: int) -> list[dict[str, float] | None]:
    """stats.summary of `values` for each of `n` groups, None for those without; all groups at once."""
    order = np.lexsort((values, groups))
    ordered = values[order].astype(np.float64)
    count = np.bincount(groups, minlength=n)
    first = np.concatenate([[0], np.cumsum(count)[:-1]]).astype(np.int64)
    total = np.bincount(groups, values.astype(np.float64), n)
    columns: dict[str, Any] = {"mean": total / np.maximum(count, 1)}
    for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)):
        at = np.maximum(count - 1, 0) * q
        low = np.floor(at).astype(np.int64)
        high = np.minimum(low + 1, np.maximum(count - 1, 0))
        if len(ordered):
            limit = len(ordered) - 1
            a, b = ordered[np.minimum(first + low, limit)], ordered[np.minimum(first + high, limit)]
            columns[name] = a + (b - a) * (at - low)
        else:
            columns[name] = np.zeros(n)
    lists = {name: column.tolist() for name, column in columns.items()}
    return [{name: lists[name][i] for name in lists} if count[i] else None for i in range(n)]


def _measured(
    groups: Ints, values: npt.NDArray[Any], n: int
) -> list[dict[str, float] | None]:  # ns, -1 is not measured; to µs
    known = values >= 0
    return grouped(groups[known], values[known] / 1e3, n)


def _per(groups: Ints, n: int, tokens: int, weights: npt.NDArray[Any] | None = None) -> list[float]:
    sums = np.bincount(groups, None if weights is None else weights.astype(np.float64), n)
    found: list[float] = (sums / tokens).tolist()
    return found


# --- layers ------------------------------------------------------------------------------------------------------


def layers(analysis: Analysis) -> list[Json]:
    """One row for each arm, test and layer that has readbacks or CPU computes."""
    waits = _waits_by_stage(analysis)
    return [row for unit in analysis.units if len(unit.tokens) for row in _layers(analysis, unit, waits)]


def _waits_by_stage(analysis: Analysis) -> tuple[Ints, Ints]:
    """(evaluation, layer) of every wait that is within a stage."""
    stages = analysis.of_kind(cap.STAGE)
    keys = analysis.keys(stages)
    order = np.lexsort((stages["t_ns"], keys))
    start = stages["t_ns"][order].astype(np.int64)
    end = start + np.maximum(stages["duration_ns"][order], 0)
    at = containing(start, end, keys[order], analysis.waits.start, analysis.waits.key)
    inside = at >= 0
    return analysis.token_of(cap.STAGE)[order][at[inside]], stages["layer"][order][at[inside]].astype(np.int64)


def _layers(analysis: Analysis, unit: Unit, waits: tuple[Ints, Ints]) -> list[Json]:
    stages, n_tokens = unit.stages, len(unit.tokens)
    computes = unit.computes[(unit.computes["n_sync"] == 1) & (unit.computes["duration_ns"] >= 0)]
    numbers, place = np.unique(np.concatenate([stages["layer"], computes["layer"]]), return_inverse=True)
    n = len(numbers)
    of_stage, of_compute = place[: len(stages)], place[len(stages) :]
    seen = np.zeros(len(analysis.tokens) + 1, np.bool_)
    seen[unit.tokens[analysis.layer_sees[unit.tokens]]] = True
    n_seen = int(seen.sum())
    mine = seen[waits[0]]
    at = np.searchsorted(numbers, waits[1][mine])
    stage = _measured(of_stage, stages["duration_ns"], n)
    per_readback = stages["duration_ns"] // np.maximum(stages["n_readbacks"], 1)
    each = _measured(of_stage, per_readback, n)
    device = _measured(of_stage, stages["device_wait_ns"], n)
    reads = _per(of_stage, n, n_tokens, stages["n_readbacks"])
    volume = _per(of_stage, n, n_tokens, stages["bytes"])
    compute = _per(of_compute, n, n_tokens, computes["duration_ns"] / 1e3) if len(computes) else [None] * n
    fence = _per(at, n, n_seen) if n_seen else [None] * n
    return [
        {
            "arm": unit.arm, "test": unit.test, "layer": int(numbers[i]) if numbers[i] >= 0 else None,
            "readbacks_per_token": reads[i], "bytes_per_token": volume[i], "stage_us": stage[i],
            "stage_per_readback_us": each[i], "device_wait_us": device[i], "cpu_compute_us_per_token": compute[i],
            "fence_waits_per_token": fence[i],
        }
        for i in range(n)
    ]  # fmt: skip


# --- tensors -----------------------------------------------------------------------------------------------------


def base_name(name: str) -> str:
    """A tensor's name without the layer at its end."""
    return re.sub(r"-\d+$", "", name)


def tensors(analysis: Analysis, *, full: bool = False) -> list[Json]:
    """One row for each arm, test and tensor read back; `full`: names with their layers."""
    names, column = analysis.capture.tensor_names
    shown = names if full else [base_name(n) for n in names]
    distinct = list(dict.fromkeys(shown))
    position = {name: i for i, name in enumerate(distinct)}
    lookup = np.array([position[name] for name in shown], np.int64)
    of_event = lookup[column[analysis.capture.events["kind"] == cap.READBACK]]
    token = analysis.token_of(cap.READBACK)
    rows: list[Json] = []
    for unit in analysis.units:
        inside = np.zeros(len(analysis.tokens) + 1, np.bool_)
        inside[unit.tokens] = True
        rows += _tensors(unit, of_event[inside[token]], distinct) if len(unit.tokens) else []
    return rows


def _tensors(unit: Unit, of: Ints, distinct: Sequence[str]) -> list[Json]:
    reads, tokens = unit.readbacks, len(unit.tokens)
    numbers, at = np.unique(of, return_inverse=True)
    n = len(numbers)
    columns = {key: _measured(at, reads[f"{key}_ns"], n) for key in ("duration", "issue", "wait", "copy")}
    count, volume = _per(at, n, tokens), _per(at, n, tokens, reads["bytes"])
    by_path = {name: np.bincount(at[reads["path"] == i], minlength=n).tolist() for i, name in enumerate(_PATHS)}
    refused = np.bincount(at[reads["decline"] > 0], minlength=n).tolist()
    rows = [
        {
            "arm": unit.arm, "test": unit.test, "tensor": distinct[number] or None, "readbacks_per_token": count[i],
            "bytes_per_token": volume[i], "readback_us": columns["duration"][i], "issue_us": columns["issue"][i],
            "wait_us": columns["wait"][i], "copy_us": columns["copy"][i],
            "paths": {name: found[i] for name, found in by_path.items() if found[i]}, "declined": refused[i],
        }
        for i, number in enumerate(numbers.tolist())
    ]  # fmt: skip
    return sorted(rows, key=lambda r: -r["readbacks_per_token"])


# --- processes and evaluations -----------------------------------------------------------------------------------


def processes(analysis: Analysis) -> list[Json]:
    """One row for each process, thread and arm with evaluations; one for each process without any."""
    capture, tokens = analysis.capture, analysis.tokens
    rows: list[Json] = []
    for pid in dict.fromkeys(analysis.pid_of_writer[: len(capture.writers)].tolist()):
        writers = [w for w in range(len(capture.writers)) if analysis.pid_of_writer[w] == pid]
        about = _process(analysis, pid, writers)
        mine = np.flatnonzero(tokens.process == pid)
        for key in np.unique(tokens.key[mine]).tolist():
            for mode in np.unique(tokens.mode[tokens.key == key]).tolist():
                rows.append({**about, **_thread(analysis, key, mode)})
        if not len(mine):
            rows.append({**about, "thread": None, "arm": None, "evaluations": None, "decodes": None, "tok_s": None})
    return rows


def _process(analysis: Analysis, pid: int, writers: list[int]) -> Json:
    capture = analysis.capture
    hellos = [h for h in capture.hellos if h.writer in writers]
    hosts = [h for h in capture.hosts if h.writer in writers]
    own = [capture.counters.get((w, cap.SCOPE_WRITER, 0)) for w in writers]
    dropped = [o["events_dropped"] for o in own if o and "events_dropped" in o]
    submits = analysis.of_kind(cap.SUBMIT)
    seen = pid in analysis.layer_pids
    of_process = np.isin(submits["writer"], writers) & (submits["path"] != 2)
    return {
        "pid": pid if pid >= 0 else None,
        "program": Path(hellos[0].program).name or None if hellos else None,
        "plugin": next((h.version for h in hellos if h.component == "plugin"), None),
        "layer": next((h.version for h in hellos if h.component == "layer"), None),
        "ggml": hosts[0].version or None if hosts else None,
        "fence_waits": int((analysis.waits.process == pid).sum()) if seen else None,
        "queue_submits": int(of_process.sum()) if seen else None,
        "events_dropped": sum(dropped) if dropped else None,
        "ended": all(any(e.writer == w for e in capture.ends) for w in writers),
    }


def _thread(analysis: Analysis, key: int, mode: int) -> Json:
    tokens = analysis.tokens
    own = (tokens.key == key) & (tokens.mode == mode)
    decodes = own & tokens.kept & (tokens.test == 0)
    time = tokens.period[decodes & (tokens.period > 0)]
    pairs = (np.ones(len(time)), time / 1e9)
    return {
        "thread": key & 0xFFFFFFFF,
        "arm": _ARM_OF_MODE.get(mode, "none"),
        "evaluations": int(own.sum()),
        "decodes": int(decodes.sum()),
        "tok_s": mean_of(pairs),
    }


def tokens_table(analysis: Analysis) -> list[Json]:
    """One row for each evaluation, those left out included."""
    tokens, n = analysis.tokens, len(analysis.tokens)

    def sums(token: Ints, weights: npt.NDArray[Any] | None = None) -> list[float]:
        inside = token >= 0
        chosen = None if weights is None else weights[inside].astype(np.float64)
        found: list[float] = np.bincount(token[inside], chosen, n).tolist()
        return found

    stages, computes = analysis.of_kind(cap.STAGE), analysis.of_kind(cap.COMPUTE)
    on_cpu = np.where(computes["n_sync"] == 1, np.maximum(computes["duration_ns"], 0), 0) / 1e3
    stage = sums(analysis.token_of(cap.STAGE), np.maximum(stages["duration_ns"], 0) / 1e3)
    splits = sums(analysis.token_of(cap.STAGE))
    compute = sums(analysis.token_of(cap.COMPUTE), on_cpu) if len(computes) else [None] * n
    uploads = sums(analysis.token_of(cap.UPLOAD))
    waits, submits = sums(analysis.wait_token), sums(analysis.submit_token, analysis.of_kind(cap.SUBMIT)["path"] != 2)
    seen = analysis.layer_sees.tolist()
    origin = int(tokens.start.min()) if n else 0
    left_out = np.where(tokens.straddles, "mode", np.where(tokens.warm_up, "warm-up", "")).tolist()
    return [
        {
            "token": i + 1, "pid": pid if pid >= 0 else None, "thread": key & 0xFFFFFFFF,
            "arm": _ARM_OF_MODE.get(mode, "none"), "test": TESTS[test] if test >= 0 else None, "rows": rows or None,
            "start_ms": (start - origin) / 1e6, "duration_us": (end - start) / 1e3,
            "period_us": period / 1e3 if period >= 0 else None, "readbacks": reads, "bytes": volume,
            "cpu_splits": int(splits[i]), "stage_us": stage[i], "cpu_compute_us": compute[i],
            "uploads": int(uploads[i]), "final_wait_us": final / 1e3 if final >= 0 else None,
            "fence_waits": int(waits[i]) if seen[i] else None, "queue_submits": int(submits[i]) if seen[i] else None,
            "left_out": left_out[i] or None,
        }
        for i, (pid, key, mode, test, rows, start, end, period, reads, volume, final) in enumerate(zip(
            tokens.process.tolist(), tokens.key.tolist(), tokens.mode.tolist(), tokens.test.tolist(),
            tokens.rows.tolist(), tokens.start.tolist(), tokens.end.tolist(), tokens.period.tolist(),
            tokens.events["n_readbacks"].tolist(), tokens.events["bytes"].tolist(), tokens.events["wait_ns"].tolist(),
            strict=True,
        ))
    ]  # fmt: skip


# --- histograms --------------------------------------------------------------------------------------------------


def histograms(analysis: Analysis) -> list[Json]:
    """Rows of all histograms: one for each arm, test, figure and bucket between its first and last that is filled."""
    rows: list[Json] = []
    for unit in analysis.units:
        for figure in HISTOGRAMS:
            rows += _histogram(unit, figure, _samples(analysis, unit, figure))
    return rows


def _samples(analysis: Analysis, unit: Unit, figure: str) -> npt.NDArray[Any]:
    if figure == "stage_us":
        return np.asarray(unit.stages["duration_ns"])
    if figure == "readback_us":
        return np.asarray(unit.readbacks["duration_ns"])
    inside = np.zeros(len(analysis.tokens) + 1, np.bool_)
    inside[unit.tokens] = True
    return analysis.waits.duration[inside[analysis.wait_token]]


def _histogram(unit: Unit, figure: str, values: npt.NDArray[Any]) -> list[Json]:
    values = values[values >= 0] / 1e3
    if not len(values):
        return []
    # What is below a nanosecond (0) is in the lowest bucket.
    place = np.floor(np.log2(np.maximum(values, 1e-3)) * BUCKETS_PER_OCTAVE).astype(np.int64)
    first = int(place.min())
    counts = np.bincount(place - first).tolist()
    return [
        {
            "arm": unit.arm, "test": unit.test, "figure": figure, "from_us": 2.0 ** ((first + i) / BUCKETS_PER_OCTAVE),
            "to_us": 2.0 ** ((first + i + 1) / BUCKETS_PER_OCTAVE), "count": count, "share": count / len(values),
        }
        for i, count in enumerate(counts)
    ]  # fmt: skip


# --- the time line of one evaluation -----------------------------------------------------------------------------


def timeline_tokens(analysis: Analysis, number: int | None = None) -> dict[str, int]:
    """By arm the evaluation whose time line is drawn: the kept decode (else any kept one) of median duration, or the
    `number`-th of them. Raises UsageError where an arm has fewer.
    """
    found: dict[str, int] = {}
    tokens = analysis.tokens
    for arm in ARMS:
        unit = next((u for test in TESTS if (u := analysis.unit(arm, test)) and len(u.tokens)), None)
        if unit is None:
            continue
        if number is not None and not 1 <= number <= len(unit.tokens):
            hint = f"name one from 1 to {len(unit.tokens)}"
            raise UsageError(f"the arm {arm} has no evaluation {number} ({unit.test})", hint)
        duration = (tokens.end - tokens.start)[unit.tokens]
        middle = np.argsort(duration, kind="stable")[(len(duration) - 1) // 2]
        in_time = unit.tokens[np.argsort(tokens.start[unit.tokens], kind="stable")]
        found[arm] = int(unit.tokens[middle] if number is None else in_time[number - 1])
    return found


def timeline(analysis: Analysis, number: int | None = None) -> list[Json]:
    """Rows of the time lines: one for each thing that happened in the evaluation of each arm, from its start on."""
    return [
        row
        for arm, token in timeline_tokens(analysis, number).items()
        for row in _timeline(analysis, arm, token)
    ]  # fmt: skip


def _timeline(analysis: Analysis, arm: str, token: int) -> list[Json]:
    tokens = analysis.tokens
    origin, end = int(tokens.start[token]), int(tokens.end[token])
    names, column = analysis.capture.tensor_names
    rows: list[Json] = []

    def add(lane: str, start: int, duration: int, layer: int | None = None, name: str | None = None) -> None:
        if duration >= 0:
            rows.append({
                "arm": arm, "token": token + 1, "lane": lane, "start_us": (start - origin) / 1e3,
                "duration_us": duration / 1e3, "layer": layer if layer is None or layer >= 0 else None,
                "detail": name or None,
            })  # fmt: skip

    def inside(kind: int) -> tuple[Any, Ints]:
        mine = analysis.token_of(kind) == token
        of_kind = np.flatnonzero(analysis.capture.events["kind"] == kind)[mine]
        return analysis.capture.events[of_kind], column[of_kind]

    events, _ = inside(cap.COMPUTE)
    for e in events:
        add(
            "cpu_compute" if e["n_sync"] == 1 else "device_compute",
            int(e["t_ns"]),
            int(e["duration_ns"]),
            int(e["layer"]),
        )
    events, _ = inside(cap.STAGE)
    for e in events:
        if e["device_wait_ns"] >= 0:
            add("device_wait", int(e["t_ns"]), int(e["device_wait_ns"]), int(e["layer"]))
        else:  # the one wait of an asynchronous stage is at its end
            add("device_wait", int(e["t_ns"] + e["duration_ns"] - e["wait_ns"]), int(e["wait_ns"]), int(e["layer"]))
    events, name_of = inside(cap.READBACK)
    for e, name in zip(events, name_of.tolist(), strict=True):
        if e["issue_ns"] >= 0:
            add("readback", int(e["t_ns"]), int(e["issue_ns"]), int(e["layer"]), names[name])
        else:
            start = int(e["t_ns"] + e["duration_ns"] - max(int(e["copy_ns"]), 0))
            add("readback", start, int(e["copy_ns"]), int(e["layer"]), names[name])
    events, name_of = inside(cap.UPLOAD)
    for e, name in zip(events, name_of.tolist(), strict=True):
        add("upload", int(e["t_ns"]), int(e["duration_ns"]), int(e["layer"]), names[name])
    final = int(tokens.events["wait_ns"][token])
    add("final_wait", end - final, final)
    waits = analysis.waits
    for i in np.flatnonzero(analysis.wait_token == token).tolist():
        add("fence_wait", int(waits.start[i]), int(waits.duration[i]), None, _cause(int(waits.cause[i])))
    for e in analysis.of_kind(cap.SUBMIT)[analysis.submit_token == token]:
        add("queue_submit", int(e["t_ns"]), int(e["duration_ns"]), None, _cause(int(e["cause"])))
    return sorted(rows, key=lambda r: (LANES.index(r["lane"]), r["start_us"]))


def _cause(number: int) -> str:
    return cap.CAUSES[number] if number < len(cap.CAUSES) else f"cause {number}"
