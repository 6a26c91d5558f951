# ruff: noqa: E501 -- rows
"""Captures as Markdown: figures down, arms across, each with its definition in the last column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ggml_async.capture_fields import TABLES, Field, field, text

Json = Mapping[str, Any]
_NAMES = {"decode": "Decoding, one token at a time", "prompt": "Prompts", "any": "Evaluations of unknown size"}
#: Arms' figures that have a ratio of their own in the comparison.
_WIDTH = 64


def escape(value: str) -> str:
    """For a cell: a bar would end it, a line break the row."""
    return value.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table; columns in `left` are aligned to the left, others to the right."""
    marks = ["---" if i in left else "--:" for i in range(len(headings))]
    lines = [headings, marks, *[[escape(cell) for cell in row] for row in rows]]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _ratio(rows: Sequence[Json], test: str, key: str) -> str:
    row = next((r for r in rows if r["test"] == test and r["figure"] == key), None)
    if not row or row["ratio"] is None:
        return ""
    interval = f" [{row['ratio_lo']:.3f}, {row['ratio_hi']:.3f}]" if row["ratio_lo"] is not None else ""
    return f"{row['ratio']:.3f}{interval}"


def _arms(document: Json) -> str:
    parts: list[str] = []
    compared = [] if "compared_with" in document else document["compare"]
    for test, name in _NAMES.items():
        units = [unit for unit in document["arms"] if unit["test"] == test]
        if not units:
            continue
        with_ratio = any(r["test"] == test for r in compared)
        headings = ["figure", *(u["arm"] for u in units), *(["async/stock [95 %]"] if with_ratio else []), "what it is"]
        rows = []
        for f in TABLES["arms"]:
            if f.key in ("arm", "test", "tok_s_ci95") or all(u.get(f.key) is None for u in units):
                continue
            ratio = [_ratio(compared, test, f.key)] if with_ratio else []
            rows.append([f.title, *(text(f, u.get(f.key)) for u in units), *ratio, f.doc])
        parts.append(f"## {name}\n\n{table(headings, rows, (0, len(headings) - 1))}\n")
    return "".join(parts)


def _compare(document: Json) -> str:
    if "compared_with" not in document:
        return ""
    rows = [
        [
            f"{r['heading']}, {r['unit']}", r["test"], r["before_arm"], f"{r['before'] or 0:,.2f}", r["after_arm"],
            f"{r['after'] or 0:,.2f}", _ratio([r], r["test"], r["figure"]),
        ]
        for r in document["compare"]
    ]  # fmt: skip
    headings = ["figure", "test", "before", "value", "after", "value", "ratio [95 %]"]
    return f"## Compared with {escape(document['compared_with'])}\n\n{table(headings, rows, (0, 1, 2, 4))}\n"


def _plain(document: Json, name: str, heading: str) -> str:
    fields: list[Field] = [f for f in TABLES[name] if any(r.get(f.key) not in (None, {}) for r in document[name])]
    rows = [[text(f, r.get(f.key)) for f in fields] for r in document[name]]
    words = [i for i, f in enumerate(fields) if f.kind in ("str", "map")]
    meanings = "".join(f"- *{f.title}*: {f.doc}\n" for f in fields)
    return f"## {heading}\n\n{table([f.title for f in fields], rows, words)}\n{meanings}\n"


def _bars(document: Json) -> str:
    parts: list[str] = []
    seen: dict[tuple[str, str, str], list[Json]] = {}
    for row in document["histograms"]:
        seen.setdefault((row["figure"], row["test"], row["arm"]), []).append(row)
    for (figure, test, arm), rows in sorted(seen.items()):
        top = max(r["share"] for r in rows)
        parts.append(f"{figure} ({test}, {arm})\n")
        for r in rows:
            bar = "#" * round(r["share"] / top * 40)
            parts.append(f"{r['from_us']:>12,.1f} .. {r['to_us']:>12,.1f} µs {r['count']:>9,} {bar}\n")
        parts.append("\n")
    return f"## Histograms\n\n```\n{''.join(parts)}```\n\n"


def _lanes(document: Json) -> str:
    rows = document["timeline"]
    if not rows:
        return ""
    end = max(r["start_us"] + r["duration_us"] for r in rows)
    parts: list[str] = []
    for arm in dict.fromkeys(r["arm"] for r in rows):
        mine = [r for r in rows if r["arm"] == arm]
        parts.append(f"{arm}, evaluation {mine[0]['token']}: 0 .. {end:,.0f} µs\n")
        for lane in dict.fromkeys(r["lane"] for r in mine):
            cells = [" "] * _WIDTH
            busy = 0.0
            for r in (r for r in mine if r["lane"] == lane):
                busy += r["duration_us"]
                first = int(r["start_us"] / end * _WIDTH)
                last = int((r["start_us"] + r["duration_us"]) / end * _WIDTH)
                for i in range(first, min(max(last, first + 1), _WIDTH)):
                    cells[i] = "#"
            parts.append(f"{lane:>15} |{''.join(cells)}| {busy:>10,.1f} µs\n")
        parts.append("\n")
    return f"## Time line of one evaluation\n\n```\n{''.join(parts)}```\n\n"


def provenance(document: Json) -> list[str]:
    """One line for each writer and host: who wrote this."""
    lines = [
        f"{'plug-in' if w['component'] == 'plugin' else 'Vulkan layer'} {w['version']} in {w['program']} (pid {w['pid']})"
        for w in document["provenance"]["writers"]
    ]
    lines += [
        f"ggml {h['ggml'] or '?'} (API {h['api_version']}): {h['library']}" for h in document["provenance"]["hosts"]
    ]
    devices = dict.fromkeys(
        d["name"] + (f" = {d['description']}" if d["description"] else "") for d in document["provenance"]["devices"]
    )
    lines += [f"device {name}" for name in devices]
    return lines


def render(document: Json, tables: Sequence[str]) -> str:
    """The tables asked for, then who wrote the capture, and warnings."""
    parts = [f"# {', '.join(escape(name) for name in document['captures'])}\n\n"]
    for name in tables:
        if name == "arms":
            parts += [_arms(document) or "No evaluation of a graph was seen.\n\n", _compare(document)]
        elif name == "histograms":
            parts.append(_bars(document))
        elif name == "timeline":
            parts.append(_lanes(document))
        else:
            parts.append(_plain(document, name, name.capitalize()))
    parts += [f"- {escape(line)}\n" for line in provenance(document)]
    parts += [f"- warning: {escape(line)}\n" for line in document["warnings"]]
    return "".join(parts)


def upstream(document: Json) -> str:
    """Before and after as an upstream thread shows it: one row a test, versions below."""
    where = document["provenance"]
    program = ", ".join(dict.fromkeys(w["program"].rsplit("/", 1)[-1] for w in where["writers"])) or "?"
    gpu = next((d for d in where["devices"] if d["host"] >= 0 and d["type"] in (1, 2)), None)
    gpu = gpu or next((d for d in where["devices"] if d["host"] < 0), None)
    device = (gpu["description"] or gpu["name"]) if gpu else "?"
    rows = []
    for test in ("decode", "prompt", "any"):
        stock, own = (
            next((u for u in document["arms"] if u["arm"] == a and u["test"] == test), None) for a in ("stock", "async")
        )
        if not stock or not own:
            continue
        size = own["tokens"] / own["evaluations"] if own.get("tokens") else 1
        label = {"decode": "tg", "prompt": f"pp{size:.0f}", "any": "?"}[test]

        def pair(key: str, stock: Json = stock, own: Json = own) -> str:
            f = field("arms", key)
            return f"{text(f, stock.get(key))} → {text(f, own.get(key))}"

        compared = document["compare"] if "compared_with" not in document else []
        rows.append([
            program, device, label, text(field("arms", "tok_s"), stock["tok_s"]), text(field("arms", "tok_s"), own["tok_s"]),
            _ratio(compared, test, "tok_s"), pair("readbacks_per_token"), pair("fence_waits_per_token"),
            pair("queue_submits_per_token"), pair("stage_us"),
        ])  # fmt: skip
    if not rows:
        return ""
    headings = [
        "program", "device", "test", "t/s stock", "t/s async", "speed-up [95 %]", "readbacks/token", "fence waits/token",
        "queue submits/token", "stage µs",
    ]  # fmt: skip
    counts = ", ".join(
        f"{u['evaluations']} {u['test']} evaluations {u['arm']}" for u in document["arms"] if u["evaluations"]
    )
    versions = dict.fromkeys(f"ggml {h['ggml'] or '?'} (API {h['api_version']})" for h in where["hosts"])
    foot = f"{', '.join(versions)}; ggml-async {document['version']}; {counts}; warm-up left out; means, 95 % intervals by bootstrap\n"
    return table(headings, rows, (0, 1, 2)) + "\n" + foot
