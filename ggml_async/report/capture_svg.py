# ruff: noqa: E501 -- SVG
"""Plots of a capture as SVG text. Drawn 360 units wide, so that their text is legible on a phone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Json = Mapping[str, Any]
WIDTH = 360
_LEFT = 98


def _svg(height: float, title: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f"{''.join(body)}</svg>"
    )


def _text(x: float, y: float, value: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(value)}</text>'


def _rect(  # noqa: PLR0917
    x: float, y: float, width: float, height: float, kind: str, title: str = ""
) -> str:
    tip = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.6):.2f}" height="{height:.2f}" class="{kind}">{tip}</rect>'
    )


def causes(units: Sequence[Json], key: str, title: str) -> str:
    """A stacked bar for each arm: counts a token by cause."""
    shown = [u for u in units if u.get(key)]
    if not shown:
        return ""
    names = list(dict.fromkeys(name for u in shown for name in u[key]))
    top = max(sum(u[key].values()) for u in shown) or 1.0
    body: list[str] = []
    y = 4.0
    for u in shown:
        x = float(_LEFT)
        body.append(_text(_LEFT - 8, y + 15, u["arm"], "", "end"))
        for name in names:
            value = u[key].get(name, 0.0)
            width = value / top * (WIDTH - _LEFT - 44)
            if value:
                body.append(_rect(x, y, width, 22, f"cause-{name}", f"{u['arm']}, {name}: {value:.1f} a token"))
            x += width
        body.append(_text(x + 6, y + 15, f"{sum(u[key].values()):.1f}"))
        y += 30
    x = float(_LEFT)
    for name in names:
        if x + 20 + 6.5 * len(name) > WIDTH:
            x, y = float(_LEFT), y + 16
        body += [_rect(x, y + 2, 10, 10, f"cause-{name}"), _text(x + 14, y + 11, name, "small")]
        x += 26 + 6.5 * len(name)
    return _svg(y + 18, title, body)


def _us(value: float) -> str:
    return f"{value / 1e6:.3g} s" if value >= 1e6 else f"{value / 1e3:.3g} ms" if value >= 1e3 else f"{value:.3g} µs"


def histogram(rows: Sequence[Json], title: str) -> str:
    """The shares of each bucket, one outline an arm, on a logarithmic axis."""
    if not rows:
        return ""
    low, high = min(r["from_us"] for r in rows), max(r["to_us"] for r in rows)
    span = math.log(high / low) or 1.0
    top = max(r["share"] for r in rows)
    base, height = 120.0, 104.0

    def at(value: float) -> float:
        return 24 + math.log(value / low) / span * (WIDTH - 48)

    body = [f'<line x1="24" x2="{WIDTH - 24}" y1="{base}" y2="{base}" class="axis"/>']
    for arm in dict.fromkeys(r["arm"] for r in rows):
        for r in (r for r in rows if r["arm"] == arm and r["count"]):
            tall = r["share"] / top * height
            tip = f"{arm}: {r['count']:,} ({r['share']:.1%}) from {_us(r['from_us'])} to {_us(r['to_us'])}"
            body.append(
                _rect(at(r["from_us"]), base - tall, at(r["to_us"]) - at(r["from_us"]) - 0.5, tall, f"arm-{arm}", tip)
            )
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        body.append(_text(24 + share * (WIDTH - 48), base + 15, _us(low * math.exp(span * share)), "small", anchor))
    x = 24.0
    for arm in dict.fromkeys(r["arm"] for r in rows):
        body += [_rect(x, base + 22, 10, 10, f"arm-{arm}"), _text(x + 14, base + 31, arm, "small")]
        x += 30 + 6.5 * len(arm)
    return _svg(base + 36, title, body)


def timeline(rows: Sequence[Json], lanes: Sequence[str], end_us: float, title: str) -> str:
    """One evaluation of one arm: a lane for each kind of thing, on a scale that all arms share."""
    body: list[str] = []
    width = WIDTH - _LEFT - 8
    y = 2.0
    for lane in lanes:
        mine = [r for r in rows if r["lane"] == lane]
        if not mine:
            continue
        body += [
            _text(_LEFT - 6, y + 12, lane.replace("_", " "), "small", "end"),
            f'<line x1="{_LEFT}" x2="{WIDTH - 8}" y1="{y + 16:.0f}" y2="{y + 16:.0f}" class="axis"/>',
        ]
        for r in mine:
            what = " ".join(
                str(p) for p in (r["detail"], f"layer {r['layer']}" if r["layer"] is not None else None) if p
            )
            tip = f"{lane.replace('_', ' ')} {what}: {_us(r['duration_us'])} at {_us(r['start_us'])}"
            x = _LEFT + r["start_us"] / end_us * width
            body.append(_rect(x, y + 2, r["duration_us"] / end_us * width, 13, f"lane-{lane}", tip))
        y += 19
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        body.append(_text(_LEFT + share * width, y + 12, _us(end_us * share) if share else "0", "small", anchor))
    return _svg(y + 18, title, body)
