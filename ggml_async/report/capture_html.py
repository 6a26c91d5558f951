# ruff: noqa: E501, PLC0206 -- CSS and HTML
"""Captures as one page: no network, no script, plots as SVG; for a phone, a desk and paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ggml_async.capture_fields import TABLES, Field, text
from ggml_async.capture_tables import LANES
from ggml_async.report import capture_md, capture_svg

Json = Mapping[str, Any]
_TESTS = {"decode": "Decoding, one token at a time", "prompt": "Prompts", "any": "Evaluations of unknown size"}
_PLOTS = {"stage_us": "Stage", "readback_us": "Readback", "fence_wait_us": "Fence wait"}
#: Rows of a long table that are shown; the rest is in the other formats.
_ROWS = 200

_STYLE = """
:root{--ink:#1b1f24;--dim:#57606a;--paper:#fff;--line:#d0d7de;--stock:#b35900;--async:#0969da;--off:#6e7781;--none:#8c959f;
--readback:#cf4a1e;--token:#0969da;--upload:#8250df;--compute:#1a7f37;--elsewhere:#6e7781;--load:#9a6700}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9da7b3;--paper:#0d1117;--line:#30363d;--stock:#e0863a;
--async:#58a6ff;--off:#9da7b3;--none:#7d8590;--readback:#f0774d;--token:#58a6ff;--upload:#bc8cff;--compute:#3fb950;
--elsewhere:#9da7b3;--load:#d29922}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.2rem;margin-top:2rem;border-top:1px solid var(--line);padding-top:1rem}
h3{font-size:1rem;margin-bottom:.3rem}
.lead{display:flex;flex-wrap:wrap;gap:.75rem;padding:0;list-style:none}
.lead li{flex:1 1 9rem;border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem}
.lead b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums}.lead span{color:var(--dim);font-size:.85rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem;min-width:100%}
th,td{border-bottom:1px solid var(--line);padding:.3rem .6rem;text-align:right;vertical-align:top;overflow-wrap:normal}
th:first-child,td:first-child,td.word{text-align:left}th{color:var(--dim);font-weight:600}
td:first-child{min-width:8.5rem}td.ratio{white-space:nowrap}
@media (max-width:30rem){th,td{padding:.25rem .3rem}table{font-size:.8rem}td:first-child{min-width:6.5rem}td.ratio{white-space:normal}}
details summary{cursor:pointer}details p{margin:.2rem 0 0;color:var(--dim);font-size:.85rem;white-space:normal;max-width:24rem}
svg{display:block;width:100%;max-width:34rem;height:auto;margin:.5rem 0}
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg text.small{font-size:11px;fill:var(--dim)}
.axis{stroke:var(--line)}.arm-stock{fill:var(--stock);fill-opacity:.55}.arm-async{fill:var(--async);fill-opacity:.55}
.arm-off{fill:var(--off);fill-opacity:.55}.arm-none{fill:var(--none);fill-opacity:.55}
.cause-readback{fill:var(--readback)}.cause-token{fill:var(--token)}.cause-upload{fill:var(--upload)}
.cause-compute{fill:var(--compute)}.cause-elsewhere{fill:var(--elsewhere)}.cause-load{fill:var(--load)}
.lane-cpu_compute{fill:var(--compute)}.lane-device_wait{fill:var(--stock)}.lane-readback{fill:var(--readback)}
.lane-upload{fill:var(--upload)}.lane-device_compute{fill:var(--token)}.lane-final_wait{fill:var(--stock)}
.lane-fence_wait{fill:var(--dim)}.lane-queue_submit{fill:var(--dim)}
.warn{border-left:.3rem solid var(--stock);padding-left:.6rem}.dim{color:var(--dim)}
@media print{:root{--ink:#000;--paper:#fff;--dim:#444;--line:#bbb}body{max-width:none;font-size:11px;padding:0}
h2{break-after:avoid}svg,tr,.lead li{break-inside:avoid}.scroll{overflow:visible}details p{display:block}}
"""


def _defined(f: Field) -> str:
    return f"<details><summary>{escape(f.title)}</summary><p>{escape(f.doc)}</p></details>"


def _td(value: str, word: bool) -> str:
    kind = " class=word" if word else " class=ratio" if value.endswith("]") and value[:1].isdigit() else ""
    return f"<td{kind}>{value}</td>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[tuple[str, bool]]]) -> str:
    """`headings` are HTML already; cells are (HTML, is a word)."""
    head = "".join(f'<th scope="col">{h}</th>' for h in headings)
    body = "".join("<tr>" + "".join(_td(value, word) for value, word in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _ratio(document: Json, test: str, key: str) -> Json | None:
    rows = [] if "compared_with" in document else document["compare"]
    return next((r for r in rows if r["test"] == test and r["figure"] == key and r["ratio"] is not None), None)


def _interval(row: Json | None) -> str:
    if not row:
        return ""
    return f"{row['ratio']:.3f}" + (
        f" [{row['ratio_lo']:.3f}, {row['ratio_hi']:.3f}]" if row["ratio_lo"] is not None else ""
    )


def _lead(document: Json) -> str:
    for test in _TESTS:
        units = {u["arm"]: u for u in document["arms"] if u["test"] == test and u["evaluations"]}
        if not units:
            continue
        order = [arm for arm in ("stock", "async", "off", "none") if arm in units]

        def across(key: str, digits: int = 1, order: list[str] = order, units: dict[str, Json] = units) -> str:
            values = [units[arm].get(key) for arm in order]
            values = [v["mean"] if isinstance(v, Mapping) else v for v in values]
            return " → ".join("–" if v is None else f"{v:,.{digits}f}" for v in values)

        speed = _ratio(document, test, "tok_s")
        items = [
            (
                f"× {_interval(speed)}" if speed else across("tok_s", 2),
                "speed, async over stock [95 %]" if speed else "tokens/s",
            ),
            (across("fence_waits_per_token"), "fence waits a token"),
            (across("readbacks_per_token"), "readbacks a token"),
            (across("stage_us"), "stage, µs"),
        ]
        cells = "".join(f"<li><b>{escape(a)}</b><span>{escape(b)}</span></li>" for a, b in items)
        return f'<p class="dim">{escape(_TESTS[test])}: {escape(" → ".join(order))}</p><ul class="lead">{cells}</ul>'
    return "<p>No evaluation of a graph was seen.</p>"


def _arms(document: Json) -> str:
    parts: list[str] = []
    for test, name in _TESTS.items():
        units = [u for u in document["arms"] if u["test"] == test]
        if not units:
            continue
        rows = []
        for f in TABLES["arms"]:
            if f.key in ("arm", "test", "tok_s_ci95") or all(u.get(f.key) is None for u in units):
                continue
            cells = [(escape(text(f, u.get(f.key))), False) for u in units]
            rows.append([(_defined(f), True), *cells, (escape(_interval(_ratio(document, test, f.key))), False)])
        headings = ["figure", *(escape(u["arm"]) for u in units), "async/stock [95 %]"]
        parts.append(f"<h3>{escape(name)}</h3>{_table(headings, rows)}")
    return "".join(parts)


def _causes(document: Json) -> str:
    parts: list[str] = []
    for test, name in _TESTS.items():
        units = [u for u in document["arms"] if u["test"] == test]
        for key, what in (("fence_waits_by_cause", "Fence waits"), ("queue_submits_by_cause", "Queue submits")):
            plot = capture_svg.causes(units, key, f"{what} a token by cause: {name}")
            parts.append(f"<h3>{what} a token: {escape(name.lower())}</h3>{plot}" if plot else "")
    return "".join(parts) or '<p class="dim">Not measured: the Vulkan layer was not in.</p>'


def _histograms(document: Json) -> str:
    parts: list[str] = []
    for test, name in _TESTS.items():
        for figure, what in _PLOTS.items():
            rows = [r for r in document.get("histograms", ()) if r["test"] == test and r["figure"] == figure]
            plot = capture_svg.histogram(rows, f"{what}: {name}")
            parts.append(f"<h3>{what}: {escape(name.lower())}</h3>{plot}" if plot else "")
    return "".join(parts)


def _timeline(document: Json) -> str:
    rows = document.get("timeline", ())
    if not rows:
        return ""
    end = max(r["start_us"] + r["duration_us"] for r in rows)
    parts: list[str] = []
    for arm in dict.fromkeys(r["arm"] for r in rows):
        mine = [r for r in rows if r["arm"] == arm]
        title = f"{arm}: evaluation {mine[0]['token']} of the capture"
        parts.append(f"<h3>{escape(title)}</h3>{capture_svg.timeline(mine, LANES, end, title)}")
    return "".join(parts)


def _plain(document: Json, name: str) -> str:
    all_rows = document.get(name, ())
    if not all_rows:
        return ""
    fields = [f for f in TABLES[name] if any(r.get(f.key) not in (None, {}) for r in all_rows)]
    rows = [[(escape(text(f, r.get(f.key))), f.kind in ("str", "map")) for f in fields] for r in all_rows[:_ROWS]]
    more = (
        f'<p class="dim">{len(all_rows) - _ROWS} more rows are in the other formats.</p>'
        if len(all_rows) > _ROWS
        else ""
    )
    return _table([_defined(f) for f in fields], rows) + more


def _comparison(document: Json) -> str:
    if "compared_with" not in document:
        return ""
    rows = [
        [
            (escape(f"{r['heading']}, {r['unit']} ({r['test']})"), True), (escape(r["before_arm"]), True),
            (f"{r['before'] or 0:,.2f}", False), (escape(r["after_arm"]), True), (f"{r['after'] or 0:,.2f}", False),
            (escape(_interval(r) if r["ratio"] is not None else "-"), False),
        ]
        for r in document["compare"]
    ]  # fmt: skip
    return _table(["figure", "before", "", "after", "", "ratio [95 %]"], rows)


def render(document: Json) -> str:
    """The page."""
    title = f"ggml-async: {', '.join(document['captures'])}"
    warnings = "".join(f'<p class="warn">{escape(w)}</p>' for w in document["warnings"])
    about = "".join(f"<li>{escape(line)}</li>" for line in capture_md.provenance(document))
    sections = [
        ("compared", f"Compared with {document.get('compared_with', '')}", _comparison(document)),
        ("causes", "Waits and submits by cause", _causes(document)),
        ("arms", "Figures", _arms(document)),
        ("timeline", "Time line of one evaluation", _timeline(document)),
        ("histograms", "Histograms", _histograms(document)),
        ("layers", "Layers", _plain(document, "layers")),
        ("tensors", "Tensors", _plain(document, "tensors")),
        ("processes", "Processes", _plain(document, "processes")),
        ("provenance", "Who wrote this", f"<ul>{about}</ul>"),
    ]
    body = "".join(
        f'<section id="{key}"><h2>{escape(heading)}</h2>{content}</section>'
        for key, heading, content in sections
        if content
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>{escape(title)}</h1>{warnings}{_lead(document)}{body}"
        f'<p class="dim">ggml-async {escape(document["version"])}. Tap a figure for its definition.</p></main></body></html>\n'
    )
