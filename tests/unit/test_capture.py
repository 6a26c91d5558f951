"""The capture's reader: every kind of record, several writers and files, damage, and what is no capture."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggml_async import capture
from ggml_async.errors import ExitCode, GgmlAsyncError, UsageError

sys.path.insert(0, str(Path(__file__).parent.parent))
from capture_writer import ASYNC, STOCK, Writer, record, text


def simple(n: int = 3, number: int = 7, out: bytearray | None = None, pid: int = 1000) -> Writer:
    writer = Writer(number, pid=pid, out=bytearray() if out is None else out)
    writer.hello()
    writer.host()
    writer.device(0, 0, 0, "CPU")
    writer.device(0, 1, 1, "Vulkan0", "llvmpipe")
    writer.mode(1_500, STOCK)
    for i in range(n):
        writer.event("readback", 10_000 + i, 500 + i, name=f"ffn_norm-{i}", layer=i, bytes_=4096, copy_ns=7)
    writer.counters(20_000, capture.SCOPE_WRITER, 0, {"events_written": n, "events_dropped": 0})
    writer.end(30_000)
    return writer


def read_bytes(tmp_path: Path, raw: bytes, name: str = "a.cap") -> capture.Capture:
    path = tmp_path / name
    path.write_bytes(raw)
    return capture.read([path])


def test_every_kind_of_record_is_read(tmp_path: Path) -> None:
    writer = simple()
    writer.refused(31_000, -3, "layout unknown")
    writer.limit(32_000, 256 << 20)
    found = read_bytes(tmp_path, bytes(writer.out))
    assert found.writers == [7]
    assert found.hellos == [
        capture.Hello(0, "plugin", 1000, 1, 1, 1_000, 1_790_000_000_000_000_000, "0.1.0",
                      "/opt/ggml-async/libggml-async.so", "/usr/bin/llama-bench")
    ]  # fmt: skip
    assert found.hosts == [capture.HostInfo(0, 0, 2, 2_000, "libggml-base.so", "0.25.1", "api2-2d")]
    assert found.devices[1] == capture.Device(0, 0, 1, 1, "Vulkan0", "llvmpipe")
    assert found.modes == [capture.ModeChange(0, 1_500, 0, STOCK)]
    assert found.refused == [capture.Refused(0, 31_000, -3, "layout unknown")]
    assert found.limits == [capture.Limit(0, 32_000, 256 << 20)]
    assert found.ends == [capture.End(0, 30_000)]
    assert found.counters == {(0, 5, 0): {"events_written": 3, "events_dropped": 0}}
    assert found.events["t_ns"].tolist() == [10_000, 10_001, 10_002]
    assert found.events["duration_ns"].tolist() == [500, 501, 502]
    assert found.events["issue_ns"].tolist() == [-1, -1, -1]
    assert found.events["bytes"].tolist() == [4096] * 3
    names, column = found.tensor_names
    assert [names[i] for i in column] == ["ffn_norm-0", "ffn_norm-1", "ffn_norm-2"]


def test_events_may_be_longer_than_what_this_version_knows(tmp_path: Path) -> None:
    writer = Writer(1, event_size=112)
    writer.hello()
    for i in range(5):
        writer.event("token", i, 2 * i)
    writer.end(9)
    found = read_bytes(tmp_path, bytes(writer.out))
    assert found.events["duration_ns"].tolist() == [0, 2, 4, 6, 8]
    assert found.warnings == []


def test_payloads_may_be_longer_than_what_this_version_knows(tmp_path: Path) -> None:
    writer = Writer(1)
    writer.hello()
    writer.put(7, struct.pack("<qii", 5, 0, 2) + b"later fields")
    writer.put(10, struct.pack("<q", 6) + b"later fields")
    found = read_bytes(tmp_path, bytes(writer.out))
    assert found.modes == [capture.ModeChange(0, 5, 0, ASYNC)]
    assert found.warnings == []


def test_unknown_kinds_of_records_and_events_are_skipped(tmp_path: Path) -> None:
    writer = Writer(1)
    writer.hello()
    writer.put(99, b"from the future!")
    writer.event("token", 1, 2)
    writer.event("77", 1, 2)
    writer.end(3)
    found = read_bytes(tmp_path, bytes(writer.out))
    assert found.events["kind"].tolist() == [capture.TOKEN]
    assert found.warnings == ["1 events of kinds that this version does not know were passed over"]


def test_records_of_an_unknown_version_are_refused_and_the_rest_is_read(tmp_path: Path) -> None:
    writer = simple()
    newer = record(5, bytes(16), 9, 0, version=2)
    found = read_bytes(tmp_path, newer + bytes(writer.out))
    assert len(found.events) == 3
    assert found.warnings == ["1 records of format version 2 were passed over: a newer ggml-async wrote them"]
    with pytest.raises(UsageError, match="is a capture of version 2"):
        read_bytes(tmp_path, newer)


def test_a_record_too_short_for_its_kind_is_named_and_passed_over(tmp_path: Path) -> None:
    writer = Writer(1)
    writer.hello()
    at = len(writer.out)
    writer.put(7, b"")
    writer.put(5, struct.pack("<II", 96, 1000))
    writer.put(5, struct.pack("<II", 8, 0))
    writer.put(4, struct.pack("<II", 1, 4_000_000_000) + text("one"))
    writer.end(3)
    found = read_bytes(tmp_path, bytes(writer.out))
    assert len(found.warnings) == 4
    assert f"byte {at}: a record of kind 7 is too short" in found.warnings[0]
    assert found.ends


def test_writers_and_files_are_kept_apart_and_read_as_one(tmp_path: Path) -> None:
    both = bytearray()
    simple(2, 7, both, pid=1)
    simple(3, 8, both, pid=2)
    in_one = read_bytes(tmp_path, bytes(both))
    paths = [simple(2, 7, pid=1).save(tmp_path / "x.cap"), simple(3, 8, pid=2).save(tmp_path / "y.cap")]
    in_two = capture.read(paths)
    for found in (in_one, in_two):
        assert found.events["writer"].tolist() == [0, 0, 1, 1, 1]
        assert [h.pid for h in found.hellos] == [1, 2]
        assert found.warnings == []
    assert in_one.events.tobytes() == in_two.events.tobytes()


def test_the_same_capture_twice_is_read_once(tmp_path: Path) -> None:
    path = simple().save(tmp_path / "x.cap")
    found = capture.read([path, path])
    assert len(found.events) == 3
    assert len(found.hellos) == 1
    assert any("more than once" in w for w in found.warnings)


def test_names_belong_to_their_writer(tmp_path: Path) -> None:
    out = bytearray()
    for number, name in ((1, "a-1"), (2, "b-1")):
        writer = Writer(number, out=out)
        writer.hello()
        writer.event("readback", 1, 1, name=name)
        writer.event("readback", 2, 1)
        writer.end(3)
    found = read_bytes(tmp_path, bytes(out))
    names, column = found.tensor_names
    assert [names[i] for i in column] == ["a-1", "", "b-1", ""]


def test_a_name_that_is_no_utf8_is_readable(tmp_path: Path) -> None:
    writer = Writer(1)
    writer.hello()
    writer.put(4, struct.pack("<II", 1, 1) + text(b"bad\xffname"))
    writer.end(1)
    assert read_bytes(tmp_path, bytes(writer.out)).names == [{1: "bad�name"}]


def test_the_layers_events_have_the_mode_of_their_process(tmp_path: Path) -> None:
    out = bytearray()
    plugin, other = Writer(1, pid=10, out=out), Writer(2, pid=20, out=out)
    layers = [Writer(n, component=2, pid=pid, out=out) for n, pid in ((3, 10), (4, 30))]
    for writer in (plugin, other, *layers):
        writer.hello()
    plugin.mode(300, ASYNC)  # not in the order of their times
    plugin.mode(100, STOCK)
    other.mode(0, ASYNC)
    for layer in layers:
        for t in (50, 100, 299, 300, 1000):
            layer.event("wait", t, 1)
    for writer in (plugin, other, *layers):
        writer.end(2000)
    found = read_bytes(tmp_path, bytes(out))
    none = capture.NO_MODE
    assert found.events["mode"].tolist() == [none, STOCK, STOCK, ASYNC, ASYNC] + [none] * 5


def test_the_last_snapshot_of_counters_counts(tmp_path: Path) -> None:
    writer = Writer(1)
    writer.hello()
    writer.counters(1, capture.SCOPE_HOST, 0, {"readbacks": 1, "tokens": 1})
    writer.counters(2, capture.SCOPE_HOST, 0, {"readbacks": 60, "tokens": 2})
    writer.counters(2, capture.SCOPE_CAUSE, 1, {"fence_waits": 2**63})
    writer.end(3)
    found = read_bytes(tmp_path, bytes(writer.out))
    assert found.counters == {(0, 1, 0): {"readbacks": 60, "tokens": 2}, (0, 4, 1): {"fence_waits": 2**63}}
    assert found.counters_ns == {(0, 1, 0): 2, (0, 4, 1): 2}


# --- what is missing is said -------------------------------------------------------------------------------------


def test_dropped_events_the_limit_and_a_missing_end_are_said(tmp_path: Path) -> None:
    writer = Writer(1, pid=42)
    writer.hello()
    writer.limit(5, 3 << 20)
    own = {"events_written": 1, "events_dropped": 5, "events_beyond_limit": 9, "names_lost": 2}
    writer.counters(6, capture.SCOPE_WRITER, 0, own)
    who = "plug-in in llama-bench (pid 42)"
    assert read_bytes(tmp_path, bytes(writer.out)).warnings == [
        f"{who}: 5 events were dropped: they came faster than they could be written",
        f"{who}: the tensor names of 2 events are lost",
        f"{who}: the limit of 3 MiB was reached; what came after it is counted only (9 events)",
        f"{who} did not end in order (_exit, a signal, a crash) or runs still: its last events may be missing",
    ]


def test_a_gap_in_the_numbers_is_a_lost_record(tmp_path: Path) -> None:
    writer = Writer(1)
    writer.hello()
    writer.sequence += 3
    writer.end(1)
    (warning,) = read_bytes(tmp_path, bytes(writer.out)).warnings
    assert "3 records are lost" in warning


def test_a_truncated_file_gives_everything_before_it(tmp_path: Path) -> None:
    raw = bytes(simple().out)
    end = len(raw) - 40  # of END
    found = read_bytes(tmp_path, raw[: end + 11])
    assert len(found.events) == 3
    assert f"it ends within a record at byte {end} (11 bytes of one are there)" in found.warnings[0]
    assert "did not end in order" in found.warnings[1]


def test_damage_in_the_middle_costs_one_record(tmp_path: Path) -> None:
    out = bytearray()
    writer = Writer(1, out=out)
    writer.hello()
    places = []
    for i in range(4):
        places.append(len(out))
        writer.event("token", i, 1)
        writer.flush()
    writer.end(9)
    out[places[2] + 40] ^= 1
    found = read_bytes(tmp_path, bytes(out))
    assert found.events["t_ns"].tolist() == [0, 1, 3]
    size = places[3] - places[2]
    assert found.warnings[0].endswith(f"damaged at byte {places[2]}: {size} bytes passed over")
    assert "1 records are lost" in found.warnings[1]


def test_foreign_bytes_before_and_behind_the_records_are_passed_over(tmp_path: Path) -> None:
    raw = bytes(simple().out)
    found = read_bytes(tmp_path, b"GArcGArc log line\n" + raw + b"more")
    assert len(found.events) == 3
    assert found.warnings[0].endswith("damaged at byte 0: 18 bytes passed over")
    assert found.warnings[1].endswith(f"damaged at byte {len(raw) + 18}: the remaining 4 bytes are unreadable")


# --- what is no capture ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p.write_bytes(b""), "is empty"),
        (lambda p: p.mkdir(), "is a folder"),
        (lambda p: None, "No such file"),
        (lambda p: p.write_bytes(b"GGUF" + bytes(1000)), "is not a capture file"),
        (lambda p: p.write_bytes(b"GArc"), "is not a capture file"),
        (os.mkfifo, "is not a regular file"),
    ],
)
def test_what_is_no_capture_is_one_clear_error(tmp_path: Path, make: object, message: str) -> None:
    path = tmp_path / "it"
    make(path)  # type: ignore[operator]
    with pytest.raises(UsageError, match=message) as error:
        capture.read([path])
    assert error.value.hint
    assert error.value.exit_code == ExitCode.USAGE
    assert "\n" not in error.value.message


def test_a_file_without_permission_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = simple().save(tmp_path / "it")

    def refuse(self: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UsageError, match="Permission denied"):
        capture.read([path])


# --- fuzzing -----------------------------------------------------------------------------------------------------

_WHOLE = bytearray()
_first = simple(20, 7, _WHOLE)
_second = Writer(8, component=2, pid=1000, out=_WHOLE)
_second.hello()
for _i in range(20):
    _second.event("wait", 10_000 + _i, 5, cause="readback", flags=_i % 3)
    _second.flush()
_second.counters(1, 2, 0, {"queue_submits": 4})
_second.end(40_000)
_INTACT = bytes(_WHOLE)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_damage_raises_anything_undocumented_and_what_is_before_it_is_read(
    tmp_path: Path, data: st.DataObject
) -> None:
    raw = bytearray(_INTACT)
    first = len(raw)
    for _ in range(data.draw(st.integers(1, 4), label="damages")):
        at = data.draw(st.integers(0, max(len(raw) - 1, 0)), label="at")
        first = min(first, at)
        how = data.draw(st.sampled_from(["flip", "cut", "insert", "remove", "overwrite"]), label="how")
        if how == "flip" and raw:
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            del raw[at:]
        elif how == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=64))
        elif how == "remove":
            del raw[at : at + data.draw(st.integers(1, 200))]
        else:
            chunk = data.draw(st.binary(min_size=1, max_size=64))
            raw[at : at + len(chunk)] = chunk
    path = tmp_path / "fuzz.cap"
    path.write_bytes(raw)
    before = _events_before(first)
    try:
        found = capture.read([path])
    except GgmlAsyncError as error:
        assert error.exit_code == ExitCode.USAGE
        assert not before
        return
    times = found.events["t_ns"].tolist()
    assert times[: len(before)] == before
    assert set(times) <= set(_events_before(len(_INTACT)))


def _events_before(limit: int) -> list[int]:
    """Times of the events whose records end at or before byte `limit`: parsed apart from the reader."""
    times: list[int] = []
    at = 0
    while at + 32 <= limit:
        kind, length = struct.unpack_from("<HI", _INTACT, at + 6)
        end = at + 32 + length
        if end > limit:
            break
        if kind == 5:
            size, count = struct.unpack_from("<II", _INTACT, at + 32)
            times += [struct.unpack_from("<q", _INTACT, at + 40 + i * size + 48)[0] for i in range(count)]
        at = end
    return times


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 12), st.binary(max_size=200))
def test_any_payload_behind_a_right_checksum_is_survived(tmp_path: Path, kind: int, payload: bytes) -> None:
    path = tmp_path / "payload.cap"
    path.write_bytes(record(1, payload, 1, 0) + record(kind, payload, 1, 1) + _INTACT)
    found = capture.read([path])
    assert len(found.events) >= 40


def test_a_million_events_need_little_more_memory_than_themselves(tmp_path: Path) -> None:
    writer = Writer(1)
    writer.hello()
    chunk = Writer(1, sequence=1)
    for i in range(1000):
        chunk.event("token", i, 1)
    payload = struct.pack("<II", 96, 1000) + b"".join(chunk.pending)
    for _ in range(1000):
        writer.put(5, payload)
    writer.end(1)
    found = capture.read([writer.save(tmp_path / "big.cap")])
    assert len(found.events) == 1_000_000
    assert found.events.nbytes == 104 * 1_000_000
    assert int(found.events["t_ns"].sum()) == 1000 * sum(range(1000))
    assert np.unique(found.events["writer"]).tolist() == [0]
