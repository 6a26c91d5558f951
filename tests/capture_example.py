# ruff: noqa: E501
"""A small capture with known numbers: two arms of three decodes each after a warm-up, plug-in and layer, two layers."""

from __future__ import annotations

from pathlib import Path

from capture_writer import ASYNC, STOCK, Writer

#: A name that would break a table, a page and a database.
ODD = "odd|<b>'name'\n-0"


def write(
    path: Path, *, arms: tuple[int, ...] = (STOCK, ASYNC), layer: bool = True, odd: bool = False, process: int = 0
) -> Path:
    """Every stock stage takes 200 µs (device wait 50), every async one 80; a token 1000 or 760 µs; 6 or 2 + 1 waits."""
    out = bytearray()
    plug_in = Writer(2 * process + 1, pid=1000 + process, out=out)
    waits = Writer(2 * process + 2, component=2, pid=1000 + process, out=out)
    plug_in.hello()
    plug_in.host()
    plug_in.device(0, 0, 1, "Vulkan0", "Example GPU")
    if layer:
        waits.hello()
        waits.device(-1, 0, 1, "Example GPU")
    now = 1_000_000 + 100_000_000 * process
    number = 0
    for arm in arms:
        plug_in.mode(now, arm)
        now += 10_000
        for _ in range(4):
            start, at = now, now + 100_000
            for split in range(2):
                number += 1
                stock = arm == STOCK
                length = 200_000 if stock else 80_000
                name = ODD if odd else f"ffn_norm-{split}"
                for k, tensor in enumerate((name, f"ffn_moe_topk-{split}")):
                    plug_in.event(
                        "readback", at + 1_000 * k, length // 2, mode=arm, path=0 if stock else 1, layer=split, name=tensor,
                        stage=number, rows=1, bytes_=1000, issue_ns=-1 if stock else 2_000, wait_ns=50_000, copy_ns=40_000 if stock else -1,
                    )  # fmt: skip
                plug_in.event(
                    "stage", at, length, mode=arm, layer=split, name=name, stage=number, rows=1, n_readbacks=2,
                    n_sync=2 if stock else 1, bytes_=2000, wait_ns=60_000, device_wait_ns=50_000 if stock else -1,
                )  # fmt: skip
                for k in range(3 if stock else 1):
                    waits.event("submit", at + k * 30_000, 1_000, cause="readback", stage=number, n_readbacks=1)
                    waits.event("wait", at + k * 30_000 + 2_000, 20_000, cause="readback", stage=number)
                at += length
                plug_in.event("compute", at, 150_000, mode=arm, layer=split, n_sync=1)
                at += 150_000
            end = start + (1_000_000 if arm == STOCK else 760_000)
            waits.event("submit", end - 60_000, 1_000, cause="token", n_readbacks=1)
            waits.event("wait", end - 50_000, 50_000, cause="token")
            plug_in.event(
                "token", start, end - start, mode=arm, rows=1, n_readbacks=4, n_sync=4 if arm == STOCK else 2,
                bytes_=4000, wait_ns=50_000,
            )  # fmt: skip
            now = end
        now += 50_000
    plug_in.end(now)
    if layer:
        waits.end(now)
    path.write_bytes(bytes(out))
    return path
