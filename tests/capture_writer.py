"""Writes capture files for tests, record by record: an independent reading of docs/capture-format.md."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OFF, STOCK, ASYNC, NO_MODE = 0, 1, 2, 255
KINDS = {"readback": 1, "stage": 2, "upload": 3, "compute": 4, "token": 5, "wait": 16, "submit": 17}
CAUSES = {"elsewhere": 0, "readback": 1, "token": 2, "upload": 3, "load": 4, "compute": 5}
_EVENT = struct.Struct("<BBBBhhhHIIIIIIIQqqqqqq")
assert _EVENT.size == 96


def record(kind: int, payload: bytes, writer: int, sequence: int, *, version: int = 1, magic: bytes = b"GArc") -> bytes:
    """One record, with its checksum; the payload is padded to a multiple of 8."""
    payload += bytes(-len(payload) % 8)
    head = magic + struct.pack("<HHI", version, kind, len(payload))
    tail = struct.pack("<QII", writer, sequence, 0) + payload
    checksum = zlib.crc32(head + bytes(4) + tail)
    return head + struct.pack("<I", checksum) + tail


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<H", len(raw)) + raw


@dataclass
class Writer:
    """One writer; appends to `out`, which several may share."""

    number: int
    component: int = 1
    pid: int = 1000
    parent_pid: int = 1
    program: str = "/usr/bin/llama-bench"
    out: bytearray = field(default_factory=bytearray)
    sequence: int = 0
    names: dict[str, int] = field(default_factory=dict)
    pending: list[bytes] = field(default_factory=list)
    event_size: int = 96

    def put(self, kind: int, payload: bytes, **changes: Any) -> None:
        self.out += record(kind, payload, self.number, self.sequence, **changes)
        self.sequence += 1

    def hello(self, t_ns: int = 1_000, realtime_ns: int = 1_790_000_000_000_000_000, version: str = "0.1.0") -> None:
        library = "libggml-async.so" if self.component == 1 else "libVkLayer_ggml_async_waits.so"
        fixed = struct.pack("<IIiIqq", self.component, self.pid, 1, self.parent_pid, t_ns, realtime_ns)
        self.put(1, fixed + text(version) + text(f"/opt/ggml-async/{library}") + text(self.program))

    def host(self, host: int = 0, t_ns: int = 2_000) -> None:
        self.put(2, struct.pack("<iiq", host, 2, t_ns) + text("libggml-base.so") + text("0.25.1") + text("api2-2d"))

    def device(self, host: int, index: int, kind: int, name: str, description: str = "") -> None:
        self.put(3, struct.pack("<iiiI", host, index, kind, 0) + text(name) + text(description))

    def name(self, value: str) -> int:
        if not value:
            return 0
        if value not in self.names:
            self.names[value] = len(self.names) + 1
            self.put(4, struct.pack("<II", self.names[value], 1) + text(value))
        return self.names[value]

    def event(
        self, kind: str, t_ns: int, duration_ns: int, *, mode: int = STOCK, path: int = 255, cause: str = "elsewhere",
        device: int = 0, layer: int = -1, host: int = 0, decline: int = 0, name: str = "", stage: int = 0,
        rows: int = 0, n_readbacks: int = 0, n_sync: int = 0, thread: int = 1, flags: int = 0, bytes_: int = 0,
        issue_ns: int = -1, wait_ns: int = -1, copy_ns: int = -1, device_wait_ns: int = -1,
    ) -> None:  # fmt: skip
        number = KINDS[kind] if kind in KINDS else int(kind)
        if kind in ("wait", "submit"):
            mode, host = NO_MODE, -1
        packed = _EVENT.pack(
            number, mode, path, CAUSES[cause], device, layer, host, decline, self.name(name), stage, rows, n_readbacks,
            n_sync, thread, flags, bytes_, t_ns, duration_ns, issue_ns, wait_ns, copy_ns, device_wait_ns,
        )  # fmt: skip
        self.pending.append(packed + b"\xee" * (self.event_size - 96))

    def flush(self) -> None:
        """Write the events that are pending as one record."""
        if self.pending:
            self.put(5, struct.pack("<II", self.event_size, len(self.pending)) + b"".join(self.pending))
            self.pending.clear()

    def counters(self, t_ns: int, scope: int, index: int, values: dict[str, int]) -> None:
        ids = [self.name(n) for n in values]
        pairs = b"".join(struct.pack("<IIQ", i, 0, v) for i, v in zip(ids, values.values(), strict=True))
        self.put(6, struct.pack("<qIiII", t_ns, scope, index, len(values), 0) + pairs)

    def mode(self, t_ns: int, mode: int, host: int = 0) -> None:
        self.put(7, struct.pack("<qii", t_ns, host, mode))

    def refused(self, t_ns: int, status: int, reason: str) -> None:
        self.put(8, struct.pack("<qiI", t_ns, status, 0) + text(reason))

    def limit(self, t_ns: int, limit: int) -> None:
        self.put(9, struct.pack("<qQ", t_ns, limit))

    def end(self, t_ns: int) -> None:
        self.flush()
        self.put(10, struct.pack("<q", t_ns))

    def save(self, path: Path) -> Path:
        self.flush()
        path.write_bytes(bytes(self.out))
        return path
