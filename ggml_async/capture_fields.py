"""The one field table of captures: every figure of ``ggml-async/capture/1`` with its unit and definition.

All renderers, the SQL schema and docs/report.md's tables are made from it. A *summary* is {mean, p50, p95, p99, max}
in the JSON and five columns elsewhere; a *map* is an object in the JSON and JSON text in one cell elsewhere.
"""

# ruff: noqa: E501 -- one field, one line
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Json = Mapping[str, Any]
Kind = Literal["str", "int", "float", "bool", "summary", "interval", "map"]

SUMMARY = ("mean", "p50", "p95", "p99", "max")
_SQL = {"str": "TEXT", "int": "INTEGER", "float": "REAL", "bool": "INTEGER", "map": "TEXT"}


@dataclass(frozen=True)
class Field:
    """One column: its key in a row, kind, unit ('' for none), definition, heading for people, digits there."""

    key: str
    kind: Kind
    unit: str
    doc: str
    heading: str = ""
    digits: int = 1

    @property
    def title(self) -> str:
        """Heading with the unit."""
        name = self.heading or self.key.replace("_", " ")
        return f"{name}, {self.unit}" if self.unit else name

    def columns(self) -> list[tuple[str, str]]:
        """(name, SQL type) of its columns in flat formats."""
        if self.kind == "summary":
            return [(f"{self.key}_{leaf}", "REAL") for leaf in SUMMARY]
        if self.kind == "interval":
            return [(f"{self.key}_lo", "REAL"), (f"{self.key}_hi", "REAL")]
        return [(self.key, _SQL[self.kind])]

    def values(self, row: Json) -> list[Any]:
        """Its values in the order of `columns`; None where not measured."""
        value = row.get(self.key)
        if self.kind == "summary":
            return [value[leaf] if value else None for leaf in SUMMARY]
        if self.kind == "interval":
            return list(value) if value else [None, None]
        return [value]


_ARM = Field(
    "arm", "str", "", "stock: llama.cpp's own path; async: ours; off: the plug-in in, nothing hooked; none: no plug-in"
)
_TEST = Field("test", "str", "", "decode: evaluations of one token; prompt: of more; any: of a size that is not known")
_WAIT = (
    "a host wait for the device as Vulkan sees it; consecutive ones with no submit between them are one (docs/layer.md)"
)

_ARMS = (
    _ARM,
    _TEST,
    Field("evaluations", "int", "count", "evaluations of a graph that the figures are of; warm-up and those that a mode switch fell into are left out"),
    Field("tokens", "int", "count", "tokens in them"),
    Field("tok_s", "float", "tokens/s", "tokens over the time from one evaluation's end to the next one's, where they follow each other", "speed", 2),
    Field("tok_s_ci95", "interval", "tokens/s", "95 % interval of the speed (bootstrap over blocks of evaluations)"),
    Field("token_ms", "summary", "ms", "time of an evaluation, end to end with the one before", "evaluation", 3),
    Field("readbacks_per_token", "float", "count", "tensors copied from a device to the CPU as inputs of CPU splits, per evaluation", "readbacks a token"),
    Field("cpu_splits_per_token", "float", "count", "CPU splits with readbacks, per evaluation", "CPU splits a token"),
    Field("bytes_per_token", "float", "bytes", "bytes read back, per evaluation", "bytes a token", 0),
    Field("synchronizes_per_token", "float", "count", "synchronizes of source devices within stages, per evaluation", "synchronizes a token"),
    Field("stage_us", "summary", "µs", "for one CPU split: from its first input copy to the start of its compute, waiting for the device included", "stage"),
    Field("stage_per_readback_us", "summary", "µs", "stage over its readbacks", "stage per readback"),
    Field("device_wait_us", "summary", "µs", "the part of a stage in which the device still computes: the stock arm's first synchronize", "device wait"),
    Field("readback_cost_us", "map", "µs", "(stage - stock's device wait) / readbacks, with its 95 % interval; about 0 or below means nothing is left to gain", "readback cost"),
    Field("stage_share", "float", "", "share of the evaluations' time that is spent in stages", "stage share", 3),
    Field("readback_us", "summary", "µs", "one readback: synchronize and copy (stock), queueing and its part of the one wait (async)", "readback"),
    Field("issue_us", "summary", "µs", "host time to queue one asynchronous read", "issue"),
    Field("uploads_per_token", "float", "count", "tensors copied from the CPU to a device as inputs of device splits, per evaluation", "uploads a token"),
    Field("upload_us", "summary", "µs", "host time of one upload", "upload"),
    Field("cpu_compute_us_per_token", "float", "µs", "time in the CPU backend's graph_compute, per evaluation", "CPU compute a token"),
    Field("final_wait_us", "summary", "µs", "the wait for the device that ends an evaluation", "final wait"),
    Field("declined", "map", "count", "readbacks in the async arm that took llama.cpp's own path, by reason (docs/contract.md)"),
    Field("fence_waits_per_token", "float", "count", f"{_WAIT}, per evaluation", "fence waits a token"),
    Field("fence_waits_by_cause", "map", "count", "the same by what the thread was doing: readback, token (end of the evaluation), upload, compute, elsewhere", "fence waits by cause"),
    Field("fence_waits_beyond_splits", "float", "count", "fence waits less CPU splits with readbacks, per evaluation; the target is at most three", "waits beyond one a split"),
    Field("wait_calls_per_token", "float", "count", "calls that can wait, per evaluation, joined and timed-out ones included", "wait calls a token"),
    Field("fence_wait_us", "summary", "µs", "time of one fence wait", "fence wait"),
    Field("queue_submits_per_token", "float", "count", "vkQueueSubmit and vkQueueSubmit2 calls, per evaluation", "queue submits a token"),
    Field("queue_submits_by_cause", "map", "count", "the same by cause", "queue submits by cause"),
    Field("submit_infos_per_token", "float", "count", "VkSubmitInfo structures in them, per evaluation", "submit infos a token"),
)  # fmt: skip

_COMPARE = (
    _TEST,
    Field("before_arm", "str", "", "what is compared with"),
    Field("after_arm", "str", "", "what is compared"),
    Field("figure", "str", "", "key of the figure in the table of arms"),
    Field("unit", "str", "", "its unit"),
    Field("before", "float", "", "its value before"),
    Field("after", "float", "", "its value after"),
    Field("ratio", "float", "", "after over before", digits=3),
    Field("ratio_lo", "float", "", "lower end of the ratio's 95 % interval (bootstrap over blocks of evaluations)", digits=3),
    Field("ratio_hi", "float", "", "upper end of it", digits=3),
)  # fmt: skip

_PER = ("readbacks_per_token", "bytes_per_token", "stage_us", "stage_per_readback_us", "device_wait_us")
_BY_KEY = {field.key: field for field in _ARMS}

_LAYERS = (
    _ARM,
    _TEST,
    Field("layer", "int", "", "number behind the tensor's name; none: tensors without one"),
    *(_BY_KEY[key] for key in _PER),
    _BY_KEY["cpu_compute_us_per_token"],
    Field("fence_waits_per_token", "float", "count", "fence waits within this layer's stages, per evaluation", "fence waits a token"),
)  # fmt: skip

_TENSORS = (
    _ARM,
    _TEST,
    Field("tensor", "str", "", "name of the source tensor, without its layer unless --full-names"),
    _BY_KEY["readbacks_per_token"],
    _BY_KEY["bytes_per_token"],
    _BY_KEY["readback_us"],
    _BY_KEY["issue_us"],
    Field("wait_us", "summary", "µs", "stock: the synchronize of this readback; async: the one wait of its source", "wait"),
    Field("copy_us", "summary", "µs", "stock: the synchronous copy; async: the copy out of a bounce buffer", "copy"),
    Field("paths", "map", "count", "readbacks by the way they took: stock, direct, bounce, empty"),
    Field("declined", "int", "count", "those in the async arm that took llama.cpp's own path"),
)  # fmt: skip

_PROCESSES = (
    Field("pid", "int", "", "process"),
    Field("program", "str", "", "its executable"),
    Field("plugin", "str", "", "version of the plug-in in it"),
    Field("layer", "str", "", "version of the Vulkan layer in it"),
    Field("ggml", "str", "", "version of the ggml that the plug-in attached to"),
    Field("thread", "int", "", "thread that evaluates graphs"),
    _ARM,
    _BY_KEY["evaluations"],
    Field("decodes", "int", "count", "evaluations of one token among them"),
    _BY_KEY["tok_s"],
    Field("fence_waits", "int", "count", "fence waits of the process in all"),
    Field("queue_submits", "int", "count", "queue submits of the process in all"),
    Field("events_dropped", "int", "count", "events that the writers could not keep up with"),
    Field("ended", "bool", "", "the process ended in order: nothing of its capture is missing"),
)  # fmt: skip

_TOKENS = (
    Field("token", "int", "", "number of the evaluation in the capture, as --timeline takes none of them away"),
    Field("pid", "int", "", "process"),
    Field("thread", "int", "", "thread"),
    _ARM,
    _TEST,
    Field("rows", "int", "count", "tokens in the batch"),
    Field("start_ms", "float", "ms", "start, from the first evaluation of the capture", digits=3),
    Field("duration_us", "float", "µs", "from the first thing seen of it to the end of its final wait"),
    Field("period_us", "float", "µs", "from the end of the one before to its own end"),
    Field("readbacks", "int", "count", "readbacks in it"),
    Field("bytes", "int", "bytes", "bytes read back"),
    Field("cpu_splits", "int", "count", "CPU splits with readbacks"),
    Field("stage_us", "float", "µs", "its stages in all"),
    Field("cpu_compute_us", "float", "µs", "time in the CPU backend's graph_compute"),
    Field("uploads", "int", "count", "uploads in it"),
    Field("final_wait_us", "float", "µs", "its final wait"),
    Field("fence_waits", "int", "count", "fence waits in it"),
    Field("queue_submits", "int", "count", "queue submits in it"),
    Field("left_out", "str", "", "why it is not in the figures: warm-up, or a mode switch"),
)  # fmt: skip

_HISTOGRAMS = (
    _ARM,
    _TEST,
    Field("figure", "str", "", "stage_us, readback_us or fence_wait_us"),
    Field("from_us", "float", "µs", "lower bound of the bucket; buckets are half an octave wide"),
    Field("to_us", "float", "µs", "upper bound"),
    Field("count", "int", "count", "how many fell into it"),
    Field("share", "float", "", "their share of all", digits=4),
)  # fmt: skip

_TIMELINE = (
    _ARM,
    Field("token", "int", "", "number of the evaluation: without a number the decode of median duration"),
    Field("lane", "str", "", "cpu_compute, device_wait, readback, upload, device_compute (queueing), final_wait, fence_wait or queue_submit"),
    Field("start_us", "float", "µs", "from the start of the evaluation"),
    Field("duration_us", "float", "µs", "how long"),
    Field("layer", "int", "", "layer, where it has one"),
    Field("detail", "str", "", "tensor, or cause"),
)  # fmt: skip

#: Every table by its name, which is also its key in the JSON document and, behind ``ggml_async_``, its name in SQL.
TABLES: dict[str, tuple[Field, ...]] = {
    "arms": _ARMS,
    "compare": _COMPARE,
    "layers": _LAYERS,
    "tensors": _TENSORS,
    "processes": _PROCESSES,
    "tokens": _TOKENS,
    "histograms": _HISTOGRAMS,
    "timeline": _TIMELINE,
}


def field(table: str, key: str) -> Field:
    """A field by its table and key."""
    return next(f for f in TABLES[table] if f.key == key)


def text(f: Field, value: Any) -> str:  # noqa: PLR0911 -- one for each kind
    """A value as people read it; '-' where it was not measured."""
    if value is None or value == {}:
        return "-"
    if f.kind == "summary":
        return f"{value['mean']:,.{f.digits}f}"
    if f.kind == "interval":
        return f"[{value[0]:,.{f.digits}f}, {value[1]:,.{f.digits}f}]"
    if f.key == "readback_cost_us":
        interval = value.get("ci95")
        return f"{value['mean']:.1f}" + (f" [{interval[0]:.1f}, {interval[1]:.1f}]" if interval else "")
    if f.kind == "map":
        return ", ".join(f"{k} {v:,.1f}" if isinstance(v, float) else f"{k} {v:,}" for k, v in value.items())
    if f.kind == "float":
        return f"{value:,.{f.digits}f}"
    if f.kind == "bool":
        return "yes" if value else "no"
    return str(value)


def reference() -> str:
    """docs/capture-fields.md."""
    lines = [
        "# Figures of a capture",
        "",
        "Made from `ggml_async/capture_fields.py` by `python tools/check_docs.py --write`; the schema is `ggml-async/capture/1`. A *summary* is",
        "{mean, p50, p95, p99, max} in the JSON and five columns in csv and sql; a *map* is an object there, JSON text in one cell here. Null: not measured.",
        "",
    ]
    for table, fields in TABLES.items():
        lines += [f"### {table}", "", "| key | type | unit | definition |", "|---|---|---|---|"]
        lines += [f"| `{f.key}` | {f.kind} | {f.unit} | {f.doc} |" for f in fields]
        lines.append("")
    return "\n".join(lines)
