"""Reads capture files (docs/capture-format.md): the records in their order, the events as one numpy array.

Nothing here interprets figures; ``capture_stats`` does. Times are nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import mmap
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_async.errors import GgmlAsyncError, UsageError

MAGIC = b"GArc"
VERSION = 1
HEADER = struct.Struct("<4sHHIIQII")  #: magic, version, kind, length, checksum, writer, sequence, reserved
MAX_LENGTH = 16 << 20  #: of a payload, bytes

HELLO, HOST, DEVICE, NAMES, EVENTS, COUNTERS, MODE, REFUSED, LIMIT, END = range(1, 11)
SCOPE_HOST, SCOPE_LAYER, SCOPE_DEVICE, SCOPE_CAUSE, SCOPE_WRITER = range(1, 6)
READBACK, STAGE, UPLOAD, COMPUTE, TOKEN, WAIT, SUBMIT = 1, 2, 3, 4, 5, 16, 17  #: kinds of events
EVENT_KINDS = (READBACK, STAGE, UPLOAD, COMPUTE, TOKEN, WAIT, SUBMIT)
FLAG_JOINED, FLAG_TIMEOUT = 1, 2

COMPONENTS = {1: "plugin", 2: "layer"}
MODES = {0: "off", 1: "stock", 2: "async"}
NO_MODE = 255
CAUSES = ("elsewhere", "readback", "token", "upload", "load", "compute")

#: One event as it is in the file (docs/capture-format.md, "An event").
FILE_EVENT = np.dtype(
    [
        ("kind", "<u1"), ("mode", "<u1"), ("path", "<u1"), ("cause", "<u1"),
        ("device", "<i2"), ("layer", "<i2"), ("host", "<i2"), ("decline", "<u2"),
        ("name", "<u4"), ("stage", "<u4"), ("rows", "<u4"), ("n_readbacks", "<u4"), ("n_sync", "<u4"),
        ("thread", "<u4"), ("flags", "<u4"),
        ("bytes", "<u8"), ("t_ns", "<i8"), ("duration_ns", "<i8"), ("issue_ns", "<i8"), ("wait_ns", "<i8"),
        ("copy_ns", "<i8"), ("device_wait_ns", "<i8"),
    ]
)  # fmt: skip
EVENT_SIZE = FILE_EVENT.itemsize  #: 96
#: One event as the reader gives it: as in the file, and the index of its writer in ``Capture.writers``.
EVENT = np.dtype([*((n, FILE_EVENT[n]) for n in FILE_EVENT.names or ()), ("writer", "<u4"), ("reserved", "<u4")])

Events = npt.NDArray[np.void]


@dataclass(frozen=True)
class Hello:
    """Who writes. `writer` is an index into ``Capture.writers``, here and below."""

    writer: int
    component: str  #: "plugin" or "layer"
    pid: int
    abi_version: int
    parent_pid: int
    t_ns: int
    realtime_ns: int
    version: str
    library: str
    program: str


@dataclass(frozen=True)
class HostInfo:
    """The plug-in attached to a ggml."""

    writer: int
    host: int
    api_version: int
    t_ns: int
    library: str
    version: str
    layout: str


@dataclass(frozen=True)
class Device:
    """A device of a host, or of the layer (host -1)."""

    writer: int
    host: int
    index: int
    type: int
    name: str
    description: str


@dataclass(frozen=True)
class ModeChange:
    """The mode of a host from `t_ns` on."""

    writer: int
    t_ns: int
    host: int
    mode: int


@dataclass(frozen=True)
class Refused:
    """The plug-in was loaded and did not attach."""

    writer: int
    t_ns: int
    status: int
    reason: str


@dataclass(frozen=True)
class Limit:
    """No events of this writer after this."""

    writer: int
    t_ns: int
    limit: int


@dataclass(frozen=True)
class End:
    """The writer's program ended in order."""

    writer: int
    t_ns: int


@dataclass
class Capture:
    """Everything that was readable. Events of the layer have their mode filled in; it is NO_MODE where none was set."""

    paths: list[str]
    writers: list[int] = field(default_factory=list)  #: their numbers in the file
    hellos: list[Hello] = field(default_factory=list)
    hosts: list[HostInfo] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    modes: list[ModeChange] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    names: list[dict[int, str]] = field(default_factory=list)  #: by writer
    #: The last snapshot by (writer, scope, index), and when each was taken.
    counters: dict[tuple[int, int, int], dict[str, int]] = field(default_factory=dict)
    counters_ns: dict[tuple[int, int, int], int] = field(default_factory=dict)
    events: Events = field(default_factory=lambda: np.zeros(0, EVENT))
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def hello_of(self) -> dict[int, Hello]:
        """The first hello of each writer."""
        found: dict[int, Hello] = {}
        for hello in self.hellos:
            found.setdefault(hello.writer, hello)
        return found

    def component(self, writer: int) -> str:
        """ "plugin", "layer", or "?" where the hello was lost."""
        hello = self.hello_of.get(writer)
        return hello.component if hello else "?"

    def has(self, component: str) -> bool:
        """Whether a writer of this component said hello."""
        return any(h.component == component for h in self.hellos)

    @cached_property
    def tensor_names(self) -> tuple[list[str], npt.NDArray[np.int64]]:
        """(distinct names, one index into them for every event); names that were lost are ""."""
        texts: dict[str, int] = {"": 0}
        column = np.zeros(len(self.events), np.int64)
        for writer, names in enumerate(self.names):
            if not names:
                continue
            ids = np.fromiter(names, np.int64, len(names))
            places = np.fromiter((texts.setdefault(t, len(texts)) for t in names.values()), np.int64, len(names))
            order = np.argsort(ids)
            mine = np.flatnonzero(self.events["writer"] == writer)
            wanted = self.events["name"][mine].astype(np.int64)
            at = np.minimum(np.searchsorted(ids[order], wanted), len(ids) - 1)
            column[mine] = np.where(ids[order][at] == wanted, places[order][at], 0)
        return list(texts), column


class _Payload:
    """Takes values from the front of a record's payload; struct.error where it is too short."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def take(self, fmt: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + fmt, self.data, self.at)
        self.at += struct.calcsize("<" + fmt)
        return values

    def text(self) -> str:
        (size,) = self.take("H")
        if self.at + size > len(self.data):
            raise struct.error("a string beyond its record")
        raw = bytes(self.data[self.at : self.at + size])
        self.at += size
        return raw.decode("utf-8", "replace")


@dataclass
class _Writer:
    """What is known of one writer while reading."""

    index: int
    expected: int = 0
    lost: int = 0


class _Reader:
    """Fills a Capture from files, one after the other."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._writers: dict[int, _Writer] = {}
        self._chunks: list[Events] = []
        self._versions: dict[int, int] = {}
        self._again = 0
        self._unknown_events = 0
        self._take: dict[int, Callable[[int, _Payload], None]] = {
            HELLO: self._hello, HOST: self._host, DEVICE: self._device, NAMES: self._names, EVENTS: self._events,
            COUNTERS: self._counters, MODE: self._mode, REFUSED: self._refused, LIMIT: self._limit, END: self._end,
        }  # fmt: skip

    # --- a file --------------------------------------------------------------------------------------------------

    def file(self, path: str) -> None:
        """All records of one file. Raises UsageError when it cannot be read or is no capture."""
        with _open(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = memoryview(mapped)
            try:
                first = len(self._chunks)
                whole, others = self._records(path, mapped, view)
                # Views into the mapping must not outlive it: copied here, with their writer.
                self._chunks[first:] = [_joined(self._chunks[first:])]
            finally:
                view.release()
        if not whole and others:
            hint = "it was written by a newer ggml-async: read it with that one"
            raise UsageError(f"{path} is a capture of version {max(self._versions)}", hint)
        if not whole:
            hint = "name a file that `ggml-async run` or GGML_ASYNC_CAPTURE wrote"
            raise UsageError(f"{path} is not a capture file", hint)

    def _records(self, path: str, mapped: mmap.mmap, view: memoryview) -> tuple[int, int]:
        """Walk over a file. Returns how many records were read, and how many are of an unknown version."""
        at, whole, others = 0, 0, 0
        while at < len(view):
            end = _record_end(view, at)
            if end is None:
                following = _next_record(mapped, view, at)
                if whole or others or following < len(view):
                    self._damage(path, view, at, following)
                at = following
                continue
            _, version, kind, _, _, number, sequence, _ = HEADER.unpack_from(view, at)
            if version != VERSION:
                self._versions[version] = self._versions.get(version, 0) + 1
                others += 1
            else:
                whole += 1
                self._record(f"{path}, byte {at}", kind, number, sequence, view[at + HEADER.size : end])
            at = end
        return whole, others

    def _damage(self, path: str, view: memoryview, at: int, following: int) -> None:
        passed = following - at
        if following == len(view) and bytes(view[at : at + 4]) == MAGIC[: min(4, passed)]:
            text = f"it ends within a record at byte {at} ({passed} bytes of one are there)"
        elif following == len(view):
            text = f"damaged at byte {at}: the remaining {passed} bytes are unreadable"
        else:
            text = f"damaged at byte {at}: {passed} bytes passed over"
        self.capture.warnings.append(f"{path}: {text}")

    # --- a record ------------------------------------------------------------------------------------------------

    def _record(self, where: str, kind: int, number: int, sequence: int, payload: memoryview) -> None:
        writer = self._writers.get(number)
        if writer is None:
            writer = self._writers[number] = _Writer(len(self._writers))
            self.capture.writers.append(number)
            self.capture.names.append({})
        if sequence < writer.expected:
            self._again += 1
            return
        writer.lost += sequence - writer.expected
        writer.expected = sequence + 1
        take = self._take.get(kind)
        if take is None:
            return
        try:
            take(writer.index, _Payload(payload))
        except struct.error:
            self.capture.warnings.append(f"{where}: a record of kind {kind} is too short; it was passed over")

    def _hello(self, writer: int, payload: _Payload) -> None:
        component, pid, abi, parent, t_ns, realtime_ns = payload.take("IIiIqq")
        version, library, program = payload.text(), payload.text(), payload.text()
        name = COMPONENTS.get(component, f"component {component}")
        self.capture.hellos.append(
            Hello(writer, name, pid, abi, parent, t_ns, realtime_ns, version, library, program)
        )  # fmt: skip

    def _host(self, writer: int, payload: _Payload) -> None:
        host, api_version, t_ns = payload.take("iiq")
        library, version, layout = payload.text(), payload.text(), payload.text()
        self.capture.hosts.append(HostInfo(writer, host, api_version, t_ns, library, version, layout))

    def _device(self, writer: int, payload: _Payload) -> None:
        host, index, kind, _ = payload.take("iiiI")
        self.capture.devices.append(Device(writer, host, index, kind, payload.text(), payload.text()))

    def _names(self, writer: int, payload: _Payload) -> None:
        first, count = payload.take("II")
        known = self.capture.names[writer]
        for number in range(first, first + count):
            known[number] = payload.text()

    def _events(self, writer: int, payload: _Payload) -> None:
        size, count = payload.take("II")
        if size < EVENT_SIZE or payload.at + size * count > len(payload.data):
            raise struct.error("events beyond their record")
        if not count:
            return
        raw = np.frombuffer(payload.data, np.uint8, size * count, payload.at).reshape(count, size)
        self._chunks.append(_with_writer(raw, writer))

    def _counters(self, writer: int, payload: _Payload) -> None:
        t_ns, scope, index, count, _ = payload.take("qIiII")
        names = self.capture.names[writer]
        found: dict[str, int] = {}
        for _ in range(count):
            name, _, value = payload.take("IIQ")
            if name in names:
                found[names[name]] = value
        self.capture.counters[writer, scope, index] = found
        self.capture.counters_ns[writer, scope, index] = t_ns

    def _mode(self, writer: int, payload: _Payload) -> None:
        self.capture.modes.append(ModeChange(writer, *payload.take("qii")))

    def _refused(self, writer: int, payload: _Payload) -> None:
        t_ns, status, _ = payload.take("qiI")
        self.capture.refused.append(Refused(writer, t_ns, status, payload.text()))

    def _limit(self, writer: int, payload: _Payload) -> None:
        self.capture.limits.append(Limit(writer, *payload.take("qQ")))

    def _end(self, writer: int, payload: _Payload) -> None:
        self.capture.ends.append(End(writer, *payload.take("q")))

    # --- at the end ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Join the events, fill in the layer's modes, say what is missing."""
        events = _joined(self._chunks)
        self._chunks.clear()
        known = np.isin(events["kind"], EVENT_KINDS)
        if not known.all():
            self._unknown_events = int(len(events) - known.sum())
            events = events[known]
        self.capture.events = events
        _fill_modes(self.capture)
        self.capture.warnings += self._missing()

    def _missing(self) -> Iterator[str]:
        for version, count in sorted(self._versions.items()):
            yield f"{count} records of format version {version} were passed over: a newer ggml-async wrote them"
        if self._again:
            yield f"{self._again} records are there more than once and were read once: the same capture twice?"
        if self._unknown_events:
            yield f"{self._unknown_events} events of kinds that this version does not know were passed over"
        for writer in self._writers.values():
            who = _who(self.capture, writer.index)
            if writer.lost:
                yield f"{who}: {writer.lost} records are lost (gaps in their numbers)"
            for text in _shortfalls(self.capture, writer.index):
                yield f"{who}{text}"


def _shortfalls(capture: Capture, writer: int) -> Iterator[str]:
    """What a writer itself says that it could not write."""
    own = capture.counters.get((writer, SCOPE_WRITER, 0), {})
    if own.get("events_dropped"):
        yield f": {own['events_dropped']} events were dropped: they came faster than they could be written"
    if own.get("names_lost"):
        yield f": the tensor names of {own['names_lost']} events are lost"
    for limit in capture.limits:
        if limit.writer == writer:
            beyond = f" ({own['events_beyond_limit']} events)" if own.get("events_beyond_limit") else ""
            yield f": the limit of {limit.limit >> 20} MiB was reached; what came after it is counted only{beyond}"
    if not any(end.writer == writer for end in capture.ends):
        yield " did not end in order (_exit, a signal, a crash) or runs still: its last events may be missing"


def _open(path: str) -> Any:
    place = Path(path)
    try:
        info = place.stat()
        if stat.S_ISDIR(info.st_mode):
            raise UsageError(f"{path} is a folder", "name a capture file in it")
        if not stat.S_ISREG(info.st_mode):
            raise UsageError(f"{path} is not a regular file", "write the capture into a file first")
        if not info.st_size:
            raise UsageError(f"{path} is empty", "neither the plug-in nor the layer was loaded into the program")
        return place.open("rb")
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(f"cannot read {path}: {reason}", "name a capture file that you may read") from None


def _record_end(view: memoryview, at: int) -> int | None:
    """Where the record at `at` ends; None unless it is whole and its checksum is right."""
    if at + HEADER.size > len(view):
        return None
    magic, _, _, length, checksum, _, _, _ = HEADER.unpack_from(view, at)
    end = at + HEADER.size + length
    if magic != MAGIC or length % 8 or length > MAX_LENGTH or end > len(view):
        return None
    crc = zlib.crc32(bytes(4), zlib.crc32(view[at : at + 12]))
    return end if zlib.crc32(view[at + 16 : end], crc) == checksum else None


def _next_record(mapped: mmap.mmap, view: memoryview, at: int) -> int:
    """Where the next whole record behind `at` begins; the end of the file where there is none."""
    found = mapped.find(MAGIC, at + 1)
    while found >= 0:
        if _record_end(view, found) is not None:
            return found
        found = mapped.find(MAGIC, found + 1)
    return len(view)


def _with_writer(raw: npt.NDArray[np.uint8], writer: int) -> Events:
    """Events of `raw` (one a row, of any size from 96 bytes on), copied, with their writer's index."""
    out = np.zeros((len(raw), EVENT.itemsize), np.uint8)
    out[:, :EVENT_SIZE] = raw[:, :EVENT_SIZE]
    events = out.view(EVENT).reshape(len(raw))
    events["writer"] = writer
    return events


def _joined(chunks: Sequence[Events]) -> Events:
    if len(chunks) == 1:
        return chunks[0]
    return np.concatenate(chunks) if chunks else np.zeros(0, EVENT)


def _fill_modes(capture: Capture) -> None:
    """Events of the layer get the mode that was last set in their process."""
    by_pid: dict[int, list[tuple[int, int]]] = {}
    for change in capture.modes:
        hello = capture.hello_of.get(change.writer)
        if hello:
            by_pid.setdefault(hello.pid, []).append((change.t_ns, change.mode))
    for hello in capture.hello_of.values():
        if hello.component != "layer" or hello.pid not in by_pid:
            continue
        changes = sorted(by_pid[hello.pid], key=lambda c: c[0])
        times = np.array([t for t, _ in changes], np.int64)
        modes = np.array([NO_MODE, *(m if m in MODES else NO_MODE for _, m in changes)], np.uint8)
        mine = np.flatnonzero((capture.events["writer"] == hello.writer) & (capture.events["mode"] == NO_MODE))
        capture.events["mode"][mine] = modes[np.searchsorted(times, capture.events["t_ns"][mine], "right")]


def _who(capture: Capture, writer: int) -> str:
    hello = capture.hello_of.get(writer)
    if hello is None:
        return f"writer {capture.writers[writer]:016x} (its hello is lost)"
    name = {"plugin": "plug-in", "layer": "Vulkan layer"}.get(hello.component, hello.component)
    return f"{name} in {Path(hello.program).name or 'a program'} (pid {hello.pid})"


def read(paths: Sequence[str | Path]) -> Capture:
    """Read captures as one: several files are what their concatenation would be.

    Whatever is readable is returned, and `warnings` says what is not. Raises UsageError where a file cannot be read
    or has not one readable record.
    """
    if not paths:
        raise UsageError("no capture was named", "name at least one capture file")
    capture = Capture([str(p) for p in paths])
    reader = _Reader(capture)
    for path in capture.paths:
        try:
            reader.file(path)
        except OSError as error:
            hint = "try again; a copy on a local disk may help"
            raise GgmlAsyncError(f"cannot read {path}: {error.strerror}", hint) from None
    reader.finish()
    return capture
