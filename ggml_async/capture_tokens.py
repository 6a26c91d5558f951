"""Which events of a capture belong to which evaluation, and which evaluations to which arm; waits made of their calls.

DESIGN's words are used as they are defined there; docs/report.md defines every figure. A *token* is one evaluation of
a graph, as the plug-in saw it. Times in events are nanoseconds, in figures microseconds (``*_us``). A figure that
was not measured is None.

What belongs together is decided by thread and time: kernel thread ids are unique, and an evaluation is computed,
waited for and submitted by the thread that asked for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_async import capture as cap
from ggml_async.capture import Capture, Events

ARMS = ("stock", "async", "off", "none")  #: none: no plug-in in the process, so only what the layer saw
TESTS = ("decode", "prompt", "any")
_MODE_OF_ARM = {"off": 0, "stock": 1, "async": 2, "none": cap.NO_MODE}
#: A gap between two evaluations is idle time where it is this many times the arm's median gap, and longer than its
#: median evaluation.
IDLE = 10

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


# --- small helpers -----------------------------------------------------------------------------------------------


def summary(values: npt.NDArray[Any]) -> dict[str, float] | None:
    """{mean, p50, p95, p99, max}, as stats.summary, of an array; None without values."""
    if not len(values):
        return None
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return {
        "mean": float(values.mean()), "p50": float(p50), "p95": float(p95), "p99": float(p99),
        "max": float(values.max()),
    }  # fmt: skip


def measured_us(values: npt.NDArray[Any]) -> Floats:
    """Nanoseconds to microseconds, without what was not measured (-1)."""
    found: Floats = values[values >= 0] / 1e3
    return found


def containing(starts: Ints, ends: Ints, keys: Ints, times: Ints, of: Ints) -> Ints:
    """For every event (`times`, thread key `of`) the interval that it begins in, -1 where there is none.

    Intervals (`starts`, `ends` inclusive, thread key `keys`) are sorted by key, then start, and do not overlap
    within a key.
    """
    found = np.full(len(times), -1, np.int64)
    if not len(starts) or not len(times):
        return found
    order = np.lexsort((times, of))
    sorted_keys, sorted_times = of[order], times[order]
    for key in np.unique(keys):
        first, last = np.searchsorted(keys, key), np.searchsorted(keys, key, "right")
        a, b = np.searchsorted(sorted_keys, key), np.searchsorted(sorted_keys, key, "right")
        at = np.searchsorted(starts[first:last], sorted_times[a:b], "right") - 1
        inside = (at >= 0) & (sorted_times[a:b] <= ends[first:last][at])
        found[order[a:b]] = np.where(inside, at + first, -1)
    return found


# --- evaluations -------------------------------------------------------------------------------------------------


@dataclass
class Tokens:
    """Evaluations, sorted by thread and start: one element of each array is one of them."""

    events: Events
    key: Ints  #: of its process and thread
    process: Ints  #: pid
    start: Ints
    end: Ints
    mode: Ints
    rows: Ints  #: tokens in the batch; 0 unknown
    test: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  #: index into TESTS
    #: From the end of the evaluation before it in its thread to its own end; -1 where that is not one step of work.
    period: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    straddles: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))  #: a change of mode fell into it
    warm_up: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))

    def __len__(self) -> int:
        return len(self.start)

    @property
    def kept(self) -> Bools:
        """Those that figures are made from."""
        found: Bools = ~(self.straddles | self.warm_up)
        return found

    @property
    def window(self) -> Ints:
        """Start of the time whose waits and submits belong to it: inputs are set before the first thing seen."""
        found: Ints = np.where(self.period >= 0, self.end - self.period + 1, self.start)
        return found


@dataclass
class Waits:
    """Waits as DESIGN defines them: joined calls are one, a call that timed out belongs to the wait behind it."""

    start: Ints
    duration: Ints
    key: Ints
    process: Ints
    mode: Ints
    cause: Ints
    calls: Ints  #: of them joined or timed out included


@dataclass
class Unit:
    """The kept evaluations of one arm and one test, and the events in them."""

    arm: str
    test: str
    tokens: Ints  #: indices into Tokens; empty where the arm has none
    readbacks: Events
    stages: Events
    uploads: Events
    computes: Events
    figures: dict[str, Any] = field(default_factory=dict)
    #: Per evaluation (numerator, denominator) of a figure, for intervals.
    series: dict[str, tuple[Floats, Floats]] = field(default_factory=dict)


class Analysis:
    """Everything derived from one capture. `skip`: so many first evaluations of each process are warm-up."""

    def __init__(self, capture: Capture, skip: int = 1) -> None:
        self.capture = capture
        self.skip = skip
        self.notes: list[str] = []
        pids = [capture.hello_of[w].pid if w in capture.hello_of else -1 - w for w in range(len(capture.writers))]
        self.pid_of_writer: Ints = np.array(pids or [0], np.int64)
        self._kind: dict[int, Events] = {}
        self.layer_pids = {h.pid for h in capture.hellos if h.component == "layer"}
        self.tokens = self._tokens()
        self._belongs: dict[int, Ints] = {}
        self._finish_tokens()

    # --- events by kind ------------------------------------------------------------------------------------------

    def of_kind(self, kind: int) -> Events:
        """All events of one kind, in the file's order."""
        if kind not in self._kind:  # a copy of 104 bytes an event, asked for many times
            self._kind[kind] = self.capture.events[self.capture.events["kind"] == kind]
        return self._kind[kind]

    def keys(self, events: Events) -> Ints:
        """One number for process and thread of each event."""
        found: Ints = (self.pid_of_writer[events["writer"]] << 32) | events["thread"].astype(np.int64)
        return found

    def token_of(self, kind: int) -> Ints:
        """For every event of a kind the evaluation that it is in, -1 outside of all."""
        if kind not in self._belongs:
            tokens, events = self.tokens, self.of_kind(kind)
            times = events["t_ns"].astype(np.int64)
            self._belongs[kind] = containing(tokens.start, tokens.end, tokens.key, times, self.keys(events))
        return self._belongs[kind]

    # --- evaluations ---------------------------------------------------------------------------------------------

    def _tokens(self) -> Tokens:
        events = self.of_kind(cap.TOKEN)
        keys = self.keys(events)
        order = np.lexsort((events["duration_ns"], events["t_ns"], keys))
        events, keys = events[order], keys[order]
        # What looked like an end and was none has the start of the one that replaces it.
        final = np.ones(len(events), np.bool_)
        final[:-1] = (keys[1:] != keys[:-1]) | (events["t_ns"][1:] != events["t_ns"][:-1])
        events, keys = events[final], keys[final]
        start = events["t_ns"].astype(np.int64)
        end = start + np.maximum(events["duration_ns"], 0)
        pids = self.pid_of_writer[events["writer"]] if len(events) else np.zeros(0, np.int64)
        return Tokens(events, keys, pids, start, end, events["mode"].astype(np.int64), events["rows"].astype(np.int64))

    def _finish_tokens(self) -> None:
        tokens = self.tokens
        tokens.rows = self._rows()
        known = {m: bool((tokens.rows[tokens.mode == m] > 0).any()) for m in np.unique(tokens.mode)}
        knows = np.array([known[m] for m in tokens.mode], np.bool_) if len(tokens) else np.zeros(0, np.bool_)
        tokens.test = np.where(tokens.rows == 1, 0, np.where(tokens.rows > 1, 1, 2))
        # Where some batches have a size, one without is an evaluation that the plug-in did not see in full.
        tokens.test = np.where(knows & (tokens.test == 2), -1, tokens.test)
        tokens.straddles = self._straddling()
        tokens.warm_up = self._warm_up()
        tokens.period = self._periods()

    def _rows(self) -> Ints:
        """Tokens in each batch, from its stages: the rows of a tensor that is read back once a graph, summed should
        the batch be several graphs; then the upper median over such tensors, because a prompt's last layer computes
        only the rows that are asked for.
        """
        tokens = self.tokens
        stages, at = self.of_kind(cap.STAGE), self.token_of(cap.STAGE)
        use = (at >= 0) & (stages["rows"] > 0) & (stages["name"] > 0)
        rows = tokens.rows.copy()
        if not use.any():
            return rows
        pair = (at[use] << 32) | stages["name"][use].astype(np.int64)
        pairs, inverse = np.unique(pair, return_inverse=True)
        total = np.bincount(inverse, stages["rows"][use].astype(np.float64)).astype(np.int64)
        of = pairs >> 32
        order = np.lexsort((total, of))
        found, first, count = np.unique(of, return_index=True, return_counts=True)
        # What the plug-in took for the batch, where it says more: the stages of a long prompt may be its last layer's.
        rows[found] = np.maximum(rows[found], total[order][first + count // 2])
        return rows

    @cached_property
    def mode_changes(self) -> dict[int, Ints]:
        """By pid the times at which a host's mode became another one."""
        found: dict[int, list[int]] = {}
        last: dict[tuple[int, int], int] = {}
        for change in sorted(self.capture.modes, key=lambda c: c.t_ns):
            pid = int(self.pid_of_writer[change.writer])
            if last.get((pid, change.host), change.mode) != change.mode:
                found.setdefault(pid, []).append(change.t_ns)
            last[pid, change.host] = change.mode
        return {pid: np.array(times, np.int64) for pid, times in found.items()}

    def _changed(self, pids: Ints, after: Ints, until: Ints) -> Bools:
        """Whether a mode changed in (after, until] in the process."""
        found = np.zeros(len(pids), np.bool_)
        for pid, times in self.mode_changes.items():
            mine = pids == pid
            n = np.searchsorted(times, until[mine], "right") - np.searchsorted(times, after[mine], "right")
            found[mine] = n > 0
        return found

    def _straddling(self) -> Bools:
        tokens = self.tokens
        found = self._changed(tokens.process, tokens.start, tokens.end)
        for kind in (cap.STAGE, cap.READBACK):
            at, modes = self.token_of(kind), self.of_kind(kind)["mode"]
            mixed = (at >= 0) & (modes != tokens.mode[at]) if len(tokens) else np.zeros(0, np.bool_)
            found[at[mixed]] = True
        return found

    def _warm_up(self) -> Bools:
        tokens = self.tokens
        found = np.zeros(len(tokens), np.bool_)
        for pid in np.unique(tokens.process):
            mine = np.flatnonzero(tokens.process == pid)
            if len(mine) <= self.skip:
                if self.skip:
                    self.notes.append(f"pid {pid} has {len(mine)} evaluations: none was left out as warm-up")
                continue
            found[mine[np.argsort(tokens.start[mine], kind="stable")[: self.skip]]] = True
        return found

    def _periods(self) -> Ints:
        tokens = self.tokens
        n = len(tokens)
        period = np.full(n, -1, np.int64)
        if n < 2:
            return period
        gap = tokens.start[1:] - tokens.end[:-1]
        same = (tokens.key[1:] == tokens.key[:-1]) & (tokens.mode[1:] == tokens.mode[:-1]) & (gap >= 0)
        same &= ~tokens.straddles[1:] & ~tokens.straddles[:-1]
        same &= ~self._changed(tokens.process[1:], tokens.end[:-1], tokens.start[1:])
        same &= tokens.test[1:] != 1  # what comes before a prompt is the program's waiting for it
        duration = tokens.end - tokens.start
        for mode in np.unique(tokens.mode):
            mine = same & (tokens.mode[1:] == mode)
            if mine.any():
                idle = max(IDLE * float(np.median(gap[mine])), float(np.median(duration[1:][mine])))
                same &= ~(mine & (gap > idle))
        period[1:][same] = gap[same] + duration[1:][same]
        return period

    # --- waits ---------------------------------------------------------------------------------------------------

    @cached_property
    def waits(self) -> Waits:
        """The waits of all processes, by thread and start."""
        events = self.of_kind(cap.WAIT)
        keys = self.keys(events)
        order = np.lexsort((events["t_ns"], keys))
        events, keys = events[order], keys[order]
        timeout = (events["flags"] & cap.FLAG_TIMEOUT) != 0
        ended = np.flatnonzero(~timeout)
        starts = (events["flags"][ended] & cap.FLAG_JOINED) == 0
        if len(ended):  # a joined call whose first one was lost is a wait after all; none reaches into another thread
            starts[0] = True
            starts[1:] |= keys[ended][1:] != keys[ended][:-1]
        group = np.cumsum(starts) - 1
        n = int(starts.sum())
        # A call that timed out goes to the next call in its thread that did not; without one it is no wait.
        following = np.searchsorted(ended, np.flatnonzero(timeout))
        there = following < len(ended)
        there[there] &= keys[ended][following[there]] == keys[timeout][there]
        all_groups = np.concatenate([group, group[following[there]]])
        lengths = np.maximum(events["duration_ns"], 0).astype(np.float64)
        weights = np.concatenate([lengths[ended], lengths[timeout][there]])
        first = events[ended[starts]]
        return Waits(
            start=first["t_ns"].astype(np.int64),
            duration=np.bincount(all_groups, weights, n).astype(np.int64),
            key=keys[ended[starts]],
            process=keys[ended[starts]] >> 32,
            mode=first["mode"].astype(np.int64),
            cause=first["cause"].astype(np.int64),
            calls=np.bincount(all_groups, minlength=n).astype(np.int64),
        )

    @cached_property
    def wait_token(self) -> Ints:
        """For every wait the evaluation in whose window it is; -1 outside of all."""
        tokens, waits = self.tokens, self.waits
        return containing(tokens.window, tokens.end, tokens.key, waits.start, waits.key)

    @cached_property
    def submit_token(self) -> Ints:
        """For every submit the evaluation in whose window it is; -1 outside of all."""
        tokens, events = self.tokens, self.of_kind(cap.SUBMIT)
        times = events["t_ns"].astype(np.int64)
        return containing(tokens.window, tokens.end, tokens.key, times, self.keys(events))

    def _cause(self, cause: Ints, token: Ints, times: Ints) -> Ints:
        """Causes, where a wait of cause token before the final one of its evaluation was an upload's after all."""
        if not len(self.tokens):
            return cause
        final = self.tokens.end - np.maximum(self.tokens.events["wait_ns"].astype(np.int64), 0)
        early = (cause == cap.CAUSES.index("token")) & (token >= 0) & (times < final[token])
        found: Ints = np.where(early, cap.CAUSES.index("upload"), cause)
        return found

    @cached_property
    def wait_cause(self) -> Ints:
        """For every wait its cause."""
        return self._cause(self.waits.cause, self.wait_token, self.waits.start)

    @cached_property
    def submit_cause(self) -> Ints:
        """For every submit its cause."""
        events = self.of_kind(cap.SUBMIT)
        return self._cause(events["cause"].astype(np.int64), self.submit_token, events["t_ns"].astype(np.int64))

    @cached_property
    def layer_sees(self) -> Bools:
        """Evaluations whose waits and submits are known: the layer was in their process, and below its limit."""
        until: dict[int, int] = {}
        for limit in self.capture.limits:
            if self.capture.component(limit.writer) == "layer":
                pid = int(self.pid_of_writer[limit.writer])
                until[pid] = min(limit.t_ns, until.get(pid, limit.t_ns))
        found = np.isin(self.tokens.process, np.array(sorted(self.layer_pids), np.int64))
        for pid, t_ns in until.items():
            found &= (self.tokens.process != pid) | (self.tokens.end <= t_ns)
        return found

    # --- arms ----------------------------------------------------------------------------------------------------

    @cached_property
    def unit_of_token(self) -> Ints:
        """Index into `units` for every evaluation, -1 for those left out."""
        found = np.full(len(self.tokens), -1, np.int64)
        for i, unit in enumerate(self.units):
            found[unit.tokens] = i
        return found

    @cached_property
    def units(self) -> list[Unit]:
        """One for each arm and test that the capture has, in the order of ARMS and TESTS."""
        tokens = self.tokens
        found: list[Unit] = []
        for arm in ARMS:
            mine = tokens.kept & (tokens.mode == _MODE_OF_ARM[arm])
            before = len(found)
            for number, test in enumerate(TESTS):
                chosen = np.flatnonzero(mine & (tokens.test == number))
                if len(chosen):
                    found.append(self._unit(arm, test, chosen))
            if len(found) == before and self._only_layer(arm):
                found.append(self._unit(arm, "any", np.zeros(0, np.int64)))
        return found

    def _only_layer(self, arm: str) -> bool:
        mode = _MODE_OF_ARM[arm]
        return bool((self.waits.mode == mode).any() or (self.of_kind(cap.SUBMIT)["mode"] == mode).any())

    def _unit(self, arm: str, test: str, chosen: Ints) -> Unit:
        inside = np.zeros(len(self.tokens) + 1, np.bool_)  # the last element answers for -1
        inside[chosen] = True

        def of(kind: int) -> Events:
            found: Events = self.of_kind(kind)[inside[self.token_of(kind)]]
            return found

        return Unit(arm, test, chosen, of(cap.READBACK), of(cap.STAGE), of(cap.UPLOAD), of(cap.COMPUTE))

    def unit(self, arm: str, test: str) -> Unit | None:
        """The unit of this arm and test; None where the capture has none."""
        return next((u for u in self.units if u.arm == arm and u.test == test), None)

    @cached_property
    def decline_names(self) -> list[str]:
        """Reasons by their number; reason 0 is none."""
        for (_, scope, _), values in self.capture.counters.items():
            names = [n.removeprefix("declined_") for n in values if n.startswith("declined_")]
            if scope == cap.SCOPE_HOST and names:
                return ["", *names]
        return [""]


def declined(analysis: Analysis, readbacks: Events) -> dict[str, int]:
    """Readbacks left to ggml's own path, by reason."""
    names = analysis.decline_names
    counts = np.bincount(readbacks["decline"]) if len(readbacks) else np.zeros(0, np.int64)
    return {
        names[i] if i < len(names) else f"reason {i}": int(n) for i, n in enumerate(counts.tolist()) if i and n
    }  # fmt: skip


def by_cause(causes: Ints, per: float) -> dict[str, float]:
    """Counts by cause, divided by `per`; causes that do not occur are left out."""
    counts = np.bincount(causes, minlength=len(cap.CAUSES)) if len(causes) else np.zeros(0, np.int64)
    names = [cap.CAUSES[i] if i < len(cap.CAUSES) else f"cause {i}" for i in range(len(counts))]
    return {name: float(n) / per for name, n in zip(names, counts.tolist(), strict=True) if n}
