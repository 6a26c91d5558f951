"""The one field table: every figure of ``ggml-async/profile/1``, its name in each format, its type, unit and meaning.

All renderers, the SQL schema and the reference page are made from it, so they cannot disagree. A field has a `path`
in the JSON document (``tests.`` stands for the row's own test), a flat column name for csv, jsonl and sql, and for
the Markdown table a heading with a width. Columns that llama-bench has too carry its names and come first, in its
order; ours begin with ``ga_``, which its compare script passes over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ggml_async.profile_plan import ARMS

Json = Mapping[str, Any]
Type = Literal["str", "int", "float", "bool", "list", "object"]

_SQL = {"str": "TEXT", "int": "INTEGER", "float": "REAL", "bool": "INTEGER", "list": "TEXT", "object": "TEXT"}


@dataclass(frozen=True)
class Field:
    """One figure or setting.

    Attributes:
        path: where it is in the JSON document; empty for those derived from others by `make`.
        name: its flat column; empty where it is in the JSON only.
        type: of its value; any value may be null, which means not measured.
        unit: of its value; empty where it has none.
        doc: what it is, one sentence.
        heading: in the Markdown table; empty where it is not in it.
        width: of that column; negative aligns to the left.
        make: computes it from (document, test) where it is not simply at `path`.
    """

    path: str
    name: str
    type: Type
    unit: str
    doc: str
    heading: str = ""
    width: int = 0
    make: Callable[[Json, Json], Any] | None = None

    @property
    def sql(self) -> str:
        """Its column type in SQL."""
        return _SQL[self.type]

    def value(self, document: Json, test: Json) -> Any:
        """Its value in one row; None when it was not measured."""
        return self.make(document, test) if self.make else lookup(document, test, self.path)


def lookup(document: Json, test: Json, path: str) -> Any:
    """What is at `path`; None as soon as something on the way is missing or null."""
    at: Any = document
    parts = path.split(".")
    if parts[0] == "tests":
        at, parts = test, parts[1:]
    for part in parts:
        if isinstance(at, list):
            at = at[int(part)] if int(part) < len(at) else None
        elif isinstance(at, Mapping):
            at = at.get(part)
        else:
            return None
    return at


# --- derived columns ---------------------------------------------------------------------------------------------


def _used(document: Json, test: Json) -> list[Json]:
    names = test["config"]["devices"]
    return [d for d in document["devices"] if d["name"] in names]


def _cpu_info(document: Json, _test: Json) -> str | None:
    return ", ".join(d["description"] for d in document["devices"] if d["type"] == "cpu") or None


def _gpu_info(document: Json, test: Json) -> str | None:
    return ", ".join(d["description"] for d in _used(document, test)) or None


def _backends(document: Json, test: Json) -> str:
    return ",".join(dict.fromkeys(re.sub(r"\d+$", "", d["name"]) for d in _used(document, test))) or "CPU"


def _devices(_document: Json, test: Json) -> str:
    return "/".join(test["config"]["devices"]) or "none"


def _overrides(_document: Json, test: Json) -> str:
    return ";".join(test["config"]["overrides"]) or "none"


def last_arm(test: Json) -> str:
    """The arm that llama-bench's own columns describe: async, else stock, else whichever ran."""
    arms = [arm for arm in ("async", "stock", "off") if test["arms"].get(arm)]
    return arms[0] if arms else "async"


def tok_s_samples(test: Json, arm: str) -> list[float] | None:
    """Tokens per second of every repetition of `arm`; None when it did not run."""
    found = lookup({}, test, f"tests.arms.{arm}.tok_s.samples")
    return list(found) if found else None


def ns_samples(test: Json, arm: str) -> list[int] | None:
    """Timed nanoseconds of every repetition of `arm`, as llama-bench's samples_ns."""
    speeds = tok_s_samples(test, arm)
    tokens = test["config"]["n_prompt"] + test["config"]["n_gen"]
    return [round(tokens * 1e9 / s) if s else 0 for s in speeds] if speeds else None


def _avg_ns(_document: Json, test: Json) -> int | None:
    values = ns_samples(test, last_arm(test))
    return round(sum(values) / len(values)) if values else None


def _stddev_ns(_document: Json, test: Json) -> int | None:
    values = ns_samples(test, last_arm(test))
    if not values or len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return round(math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)))


def _avg_ts(_document: Json, test: Json) -> float | None:
    return _number(lookup({}, test, f"tests.arms.{last_arm(test)}.tok_s.mean"))


def _stddev_ts(_document: Json, test: Json) -> float | None:
    return _number(lookup({}, test, f"tests.arms.{last_arm(test)}.tok_s.sd"))


def _number(value: Any) -> float | None:
    return float(value) if value is not None else None


# --- the table ---------------------------------------------------------------------------------------------------

#: As llama-bench has them, in its order.
_BENCH = (
    Field("host.llama", "build_commit", "str", "", "llama.cpp's version, as its library gives it"),
    Field("", "cpu_info", "str", "", "the CPU, as ggml names it", make=_cpu_info),
    Field("", "gpu_info", "str", "", "the devices in use, as ggml describes them", make=_gpu_info),
    Field("", "backends", "str", "", "backends of the devices in use", make=_backends),
    Field("model.path", "model_filename", "str", "", "the model file"),
    Field("model.desc", "model_type", "str", "", "llama.cpp's description of the model"),
    Field("model.size_bytes", "model_size", "int", "bytes", "size of the model file, all parts"),
    Field("model.n_params", "model_n_params", "int", "count", "elements of all its tensors"),
    Field("tests.config.n_batch", "n_batch", "int", "tokens", "most tokens of one decode (-b)", "n_batch", 7),
    Field("tests.config.n_ubatch", "n_ubatch", "int", "tokens", "most tokens computed at once (-ub)", "n_ubatch", 8),
    Field("tests.config.threads", "n_threads", "int", "count", "CPU threads (-t)", "threads", 7),
    Field("tests.config.n_gpu_layers", "n_gpu_layers", "int", "count", "layers on the GPU (-ngl); -1 is all", "ngl", 3),
    Field("tests.config.n_cpu_moe", "n_cpu_moe", "int", "count", "first layers with experts on the CPU (-ncmoe)",
          "ncmoe", 5),
    Field("tests.config.flash_attn", "flash_attn", "str", "", "flash attention (-fa): auto, on or off", "fa", 4),
    Field("", "devices", "str", "", "devices in use (-dev)", "device", -8, make=_devices),
    Field("", "tensor_buft_overrides", "str", "", "the user's tensor placements (-ot)", "ot", -10, make=_overrides),
    Field("tests.config.n_prompt", "n_prompt", "int", "tokens", "timed prompt tokens (-p)"),
    Field("tests.config.n_gen", "n_gen", "int", "tokens", "timed generated tokens (-n), one a decode"),
    Field("tests.config.n_depth", "n_depth", "int", "tokens", "tokens in the context before the timed ones (-d)"),
    Field("tests.time", "test_time", "str", "RFC 3339", "when the test began, UTC"),
    Field("", "avg_ns", "int", "ns", "mean time of a repetition of the async arm (of stock where only that ran)",
          make=_avg_ns),
    Field("", "stddev_ns", "int", "ns", "its standard deviation over repetitions", make=_stddev_ns),
    Field("", "avg_ts", "float", "tokens/s", "mean speed of the async arm (of stock where only that ran)",
          make=_avg_ts),
    Field("", "stddev_ts", "float", "tokens/s", "its standard deviation over repetitions", make=_stddev_ts),
)  # fmt: skip

#: Settings and identities that llama-bench does not have.
_OURS = (
    Field("schema", "ga_schema", "str", "", "name and version of the JSON document"),
    Field("time", "", "str", "RFC 3339", "when the run began, UTC"),
    Field("build.ggml_async", "ga_version", "str", "", "version of ggml-async"),
    Field("command", "", "list", "", "the command line"),
    Field("interrupted", "", "bool", "", "whether the run was cut short: what was finished is there"),
    Field("warnings", "", "list", "", "code, message, hint and test of every warning"),
    Field("model.arch", "ga_model_arch", "str", "", "the model's architecture, as its file names it"),
    Field("model.n_layer", "ga_n_layer", "int", "count", "layers of the model"),
    Field("model.n_expert", "ga_n_expert", "int", "count", "experts a layer"),
    Field("model.n_expert_used", "ga_n_expert_used", "int", "count", "experts used for a token"),
    Field("host.ggml", "ga_ggml", "str", "", "ggml's version"),
    Field("host.api_version", "ga_ggml_api", "int", "", "ggml's backend API version"),
    Field("host.dir", "", "str", "", "the folder llama.cpp was loaded from"),
    Field("host.layout", "", "str", "", "the structure layout that the plug-in proved"),
    Field("host.vulkan_layer", "", "str", "", "the loaded Vulkan layer, which fence waits and queue submits come from"),
    Field("devices", "", "list", "", "name, description, type and async (whether it can queue reads) of every device"),
    Field("tests.config.test", "ga_test", "str", "", "what was timed: pp prompt tokens, tg generated ones, @ d depth",
          "test", -12),
    Field("tests.config.n_ctx", "ga_n_ctx", "int", "tokens", "context size (-c)", "n_ctx", 6),
    Field("tests.config.repetitions", "ga_repetitions", "int", "count", "repetitions asked for (-r)"),
    Field("tests.config.seed", "ga_seed", "int", "", "seed of tokens and order (--seed)"),
    Field("tests.config.order", "", "list", "", "the arms in the order in which they ran"),
    Field("tests.interrupted", "ga_interrupted", "bool", "", "whether this test was cut short"),
)  # fmt: skip

_SUMMARY = ("mean", "p50", "p95", "p99", "max")


def _arm_field(arm: str, key: str, kind: tuple[Type, str], doc: str, name: str | None = None) -> Field:
    """`kind` is (type, unit); `name` the column's end where it is not made from `key`."""
    column = f"ga_{arm}_{name or key.replace('.', '_')}"
    return Field(f"tests.arms.{arm}.{key}", column, *kind, f"{arm}: {doc}")


def _summary_fields(arm: str, key: str, doc: str) -> list[Field]:
    words = {"mean": "mean", "p50": "median", "p95": "95th percentile", "p99": "99th percentile", "max": "largest"}
    return [_arm_field(arm, f"{key}.{leaf}", ("float", "µs"), f"{doc}, {words[leaf]}") for leaf in _SUMMARY]


def _arm_fields(arm: str) -> list[Field]:
    def one(key: str, kind: Type, unit: str, doc: str, name: str | None = None) -> Field:
        return _arm_field(arm, key, (kind, unit), doc, name)

    def ci(end: int) -> Field:
        side = ("lower", "upper")[end]
        doc = f"readback cost, {side} end of its 95 % interval over repetitions"
        return one(f"readback_cost_us.ci95.{end}", "float", "µs", doc, f"readback_cost_us_{('lo', 'hi')[end]}")

    found = [
        one("tokens", "int", "count", "timed tokens, all repetitions"),
        one("tok_s.mean", "float", "tokens/s", "speed, mean over repetitions"),
        one("tok_s.sd", "float", "tokens/s", "speed, standard deviation over repetitions"),
        one("tok_s.median", "float", "tokens/s", "speed, median over repetitions"),
        one("tok_s.min", "float", "tokens/s", "speed, slowest repetition"),
        one("tok_s.max", "float", "tokens/s", "speed, fastest repetition"),
    ]
    vulkan = [
        one("fence_waits_per_token", "float", "count", "host waits for the device as Vulkan sees them"),
        *_summary_fields(arm, "fence_wait_us", "one such wait"),
        one("fence_waits_by_cause", "object", "count", "the same per token, by what the plug-in was doing"),
        one("wait_calls_per_token", "float", "count", "calls and polling spans that these waits consist of"),
        one("queue_submits_per_token", "float", "count", "vkQueueSubmit and vkQueueSubmit2 calls"),
        one("queue_submits_by_cause", "object", "count", "the same per token, by what the plug-in was doing"),
    ]
    if arm == "off":
        return [*found, *vulkan]
    found += [
        one("readbacks_per_token", "float", "count", "tensors copied from a device to a CPU split"),
        one("cpu_splits_per_token", "float", "count", "CPU splits with readbacks"),
        one("bytes_per_token", "float", "bytes", "bytes read back"),
        *_summary_fields(
            arm, "stage_us", "stage: from a CPU split's first input copy to its compute's start, device wait included"
        ),
        *_summary_fields(arm, "stage_per_readback_us", "stage divided by the split's readbacks"),
        one("readback_cost_us.mean", "float", "µs", "(stage - stock's device wait) / readbacks, mean over repetitions"),
        ci(0),
        ci(1),
        *_summary_fields(arm, "issue_us", "host time to queue one asynchronous read"),
        *_summary_fields(
            arm, "device_wait_us", "part of a stage in which the device still computes (stock's first synchronize)"
        ),
        one("stage_share", "float", "fraction", "all stages' part of the timed time"),
        one("synchronizes_per_token", "float", "count", "synchronizes of source devices within stages"),
        one("uploads_per_token", "float", "count", "tensors copied from the CPU to a device split"),
        *_summary_fields(arm, "upload_us", "host time of one upload"),
        one("declined", "object", "count", "readbacks left to ggml's own path, by reason"),
        *vulkan,
        one("by_device", "object", "", "readbacks, bytes, CPU splits, issue and wait by source device"),
    ]
    return found


_RESULT = (
    Field("tests.speedup.tok_s.ratio", "ga_speedup", "float", "ratio",
          "async over stock tokens per second, geometric mean of the repetitions' own ratios"),
    Field("tests.speedup.tok_s.ci95.0", "ga_speedup_lo", "float", "ratio", "lower end of its 95 % interval"),
    Field("tests.speedup.tok_s.ci95.1", "ga_speedup_hi", "float", "ratio", "upper end of its 95 % interval"),
    Field("tests.speedup.stage_us.ratio", "ga_stage_ratio", "float", "ratio",
          "async over stock mean stage, geometric mean of the repetitions' own ratios"),
    Field("tests.speedup.stage_us.ci95.0", "ga_stage_ratio_lo", "float", "ratio", "lower end of its 95 % interval"),
    Field("tests.speedup.stage_us.ci95.1", "ga_stage_ratio_hi", "float", "ratio", "upper end of its 95 % interval"),
    Field("tests.identical_logits", "ga_identical_logits", "bool", "",
          "whether every decode of every repetition of every arm gave bitwise equal logits", "identical", 9),
    Field("tests.adoption", "", "object", "", "weights used in place, by kind; null until that is measured"),
)  # fmt: skip

_SAMPLES = tuple(
    _arm_field(arm, "tok_s.samples", ("list", "tokens/s"), "speed of each repetition", "samples_ts") for arm in ARMS
)

FIELDS: tuple[Field, ...] = (*_BENCH, *_OURS, *(f for arm in ARMS for f in _arm_fields(arm)), *_RESULT, *_SAMPLES)

#: Columns of csv and sql rows (jsonl has the lists of samples besides).
COLUMNS: tuple[Field, ...] = tuple(f for f in FIELDS if f.name and f.type != "list")


@dataclass(frozen=True)
class Pair:
    """A Markdown column that shows stock and async side by side: ``before → after``."""

    key: str  #: within an arm
    heading: str
    width: int
    digits: int  #: behind the point; -1 writes a fraction as per cent


_BEFORE_WAITS = (
    Pair("stage_per_readback_us.mean", "stage/readback µs", 17, 1),
    Pair("readback_cost_us.mean", "readback cost µs", 16, 1),
    Pair("stage_share", "stage share", 15, -1),
)
_FENCE_WAITS = Pair("fence_waits_per_token", "waits/token", 12, 1)
_SYNCS = Pair("synchronizes_per_token", "syncs/token", 12, 1)
_SPEED = Pair("tok_s.mean", "t/s", 17, 2)


def pairs(document: Json) -> tuple[Pair, ...]:
    """Of the Markdown table, between the settings and the speed-up.

    Fence waits, where they were measured, take the place of what ggml alone shows of them: the table stays as wide. The
    first test decides, as it is there when the head is written.
    """
    first = document["tests"][0]["arms"].values() if document["tests"] else ()
    waits = any(arm and arm.get("fence_waits_per_token") is not None for arm in first)
    return (*_BEFORE_WAITS, _FENCE_WAITS if waits else _SYNCS, _SPEED)


def row(document: Json, test: Json) -> dict[str, Any]:
    """The flat row of one test: every column, in order, None where not measured."""
    return {f.name: f.value(document, test) for f in COLUMNS}


def field_named(name: str) -> Field:
    """The field with this flat name."""
    return next(f for f in FIELDS if f.name == name)


def reference() -> str:
    """The table as Markdown, for the docs."""
    lines = ["| JSON | column | type | SQL | unit | meaning |", "|---|---|---|---|---|---|"]
    for f in FIELDS:
        path = re.sub(r"\.(\d)$", r"[\1]", f.path).replace("tests.", "tests[].") or "(derived)"
        name = f"`{f.name}`" if f.name else ""
        lines.append(f"| `{path}` | {name} | {f.type} | {f.sql if f.name else ''} | {f.unit} | {f.doc} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
