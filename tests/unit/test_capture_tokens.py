"""Ends of an evaluation that were none: the last record with its start counts, and earlier waits were an upload's."""

from __future__ import annotations

from pathlib import Path

from capture_writer import ASYNC, Writer

from ggml_async import capture, capture_tokens


def test_a_later_end_replaces_the_earlier_ones(tmp_path: Path) -> None:
    out = bytearray()
    plug_in, layer = Writer(1, out=out), Writer(2, component=2, out=out)
    plug_in.hello()
    plug_in.host()
    plug_in.mode(1500, ASYNC)
    layer.hello()
    for start, rows in ((10_000, 32), (40_000, 1)):
        if rows > 1:
            plug_in.event("token", t_ns=start, duration_ns=5_000, mode=ASYNC, rows=rows, wait_ns=1_000, thread=5)
            layer.event("wait", t_ns=start + 4_000, duration_ns=1_000, cause="token", thread=5)
        plug_in.event(
            "token", t_ns=start, duration_ns=20_000, mode=ASYNC, rows=rows, n_readbacks=2, wait_ns=1_000, thread=5
        )
        layer.event("wait", t_ns=start + 19_000, duration_ns=1_000, cause="token", thread=5)
    plug_in.flush()
    layer.flush()
    path = tmp_path / "c"
    path.write_bytes(out)
    found = capture_tokens.Analysis(capture.read([path]), skip=0)
    assert found.tokens.start.tolist() == [10_000, 40_000]
    assert found.tokens.end.tolist() == [30_000, 60_000]
    assert found.tokens.rows.tolist() == [32, 1]
    assert found.waits.cause.tolist() == [2, 2, 2]
    assert [capture.CAUSES[cause] for cause in found.wait_cause] == ["upload", "token", "token"]
