"""The Markdown table for people: what each readback costs before (stock) and after (async), and what that means."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ggml_async import fields

Json = Mapping[str, Any]

NOT_MEASURED = "–"
#: Settings that have a column only where the user set or varied them: by name in Config, with their flat column.
_OPTIONAL = {
    "n_gpu_layers": "n_gpu_layers", "n_threads": "n_threads", "n_batch": "n_batch", "n_ubatch": "n_ubatch",
    "n_ctx": "ga_n_ctx", "flash_attn": "flash_attn", "overrides": "tensor_buft_overrides",
}  # fmt: skip
_CONFIG_KEYS = {"n_threads": "threads"}


def differing(document: Json) -> frozenset[str]:
    """Names of the optional settings in which the document's tests differ."""
    found: set[str] = set()
    for name in _OPTIONAL:
        if name == "n_ctx":
            continue  # it follows the test's size where the user did not set it
        values = [test["config"].get(_CONFIG_KEYS.get(name, name)) for test in document["tests"]]
        if any(v != values[0] for v in values[1:]):
            found.add(name)
    return frozenset(found)


def _settings(shown: Collection[str]) -> list[fields.Field]:
    names = ["devices", "n_cpu_moe"]
    names += [column for name, column in _OPTIONAL.items() if name in shown]
    names.append("ga_test")
    return [fields.field_named(n) for n in names]


def _head(heading: str, width: int) -> tuple[str, str]:
    size = max(abs(width), len(heading))
    if width < 0:
        return heading.ljust(size), "-" * size
    return heading.rjust(size), "-" * (size - 1) + ":"


def header(document: Json, shown: Collection[str]) -> str:
    """Two lines that say what was measured, then the head of the table."""
    columns = [(f.heading, f.width) for f in _settings(shown)]
    columns.append(("readbacks/token", 15))
    columns += [(p.heading, p.width) for p in fields.pairs(document)]
    columns += [("speed-up [95 %]", 20), ("identical", 9)]
    heads = [_head(*c) for c in columns]
    lines = [
        *_about(document),
        "",
        "| " + " | ".join(h for h, _ in heads) + " |",
        "| " + " | ".join(rule for _, rule in heads) + " |",
    ]
    return "\n".join(lines) + "\n"


def _about(document: Json) -> list[str]:
    model, host = document["model"], document["host"]
    parts = [str(model["path"]).replace("\\", "/").rsplit("/", 1)[-1]]
    parts += [str(model["desc"])] if model.get("desc") else []
    if model.get("size_bytes"):
        parts.append(size(model["size_bytes"]))
    if model.get("n_layer"):
        parts.append(f"{model['n_layer']} layers")
    if model.get("n_expert"):
        parts.append(f"{model['n_expert']} experts, {model.get('n_expert_used') or '?'} used")
    gpus = "; ".join(f"{d['name']} = {d['description']}" for d in document["devices"] if d["type"] != "cpu")
    build = f"llama.cpp {host.get('llama') or '?'}"
    if "ggml" not in build:
        build += f", ggml {host.get('ggml') or '?'}"
    return [f"model: {', '.join(parts)}  ", f"host: {build}; {gpus or 'no GPU'}"]


def size(n: float) -> str:
    """Bytes with a binary unit, as llama-bench has it."""
    for unit in ("bytes", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "bytes" else f"{n:.2f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def number(value: Any, digits: int) -> str:
    """A figure; digits -1 writes a fraction as per cent."""
    if value is None:
        return NOT_MEASURED
    if digits < 0:
        return f"{value * 100:.1f} %"
    if digits == 1 and 0 < abs(value) < 1:
        digits = 2
    return f"{value:.{digits}f}"


def row(document: Json, test: Json, shown: Collection[str]) -> str:
    """One line of the table."""
    cells: list[tuple[str, int]] = []
    for f in _settings(shown):
        value = f.value(document, test)
        cells.append((NOT_MEASURED if value is None else str(value).replace("|", "\\|"), _fit(f.heading, f.width)))
    cells.append((_readbacks(test), 15))
    for pair in fields.pairs(document):
        values = [
            number(fields.lookup(document, test, f"tests.arms.{arm}.{pair.key}"), pair.digits)
            for arm in ("stock", "async")
            if arm in test["arms"]
        ]
        known = any(v != NOT_MEASURED for v in values)
        cells.append((" → ".join(values) if known else NOT_MEASURED, _fit(pair.heading, pair.width)))
    cells.append((_speedup(test), 20))
    same = test["identical_logits"]
    cells.append((NOT_MEASURED if same is None else "yes" if same else "no", 9))
    aligned = [text.ljust(-w) if w < 0 else text.rjust(w) for text, w in cells]
    return "| " + " | ".join(aligned) + " |\n"


def _fit(heading: str, width: int) -> int:
    size_ = max(abs(width), len(heading))
    return -size_ if width < 0 else size_


def _readbacks(test: Json) -> str:
    """Both arms read the same tensors back: one figure, or two where that fails."""
    found = []
    for arm in ("stock", "async"):
        text = number(fields.lookup({}, test, f"tests.arms.{arm}.readbacks_per_token"), 1)
        if text != NOT_MEASURED and text not in found:
            found.append(text)
    return " / ".join(found) or NOT_MEASURED


def _speedup(test: Json) -> str:
    found = test["speedup"]["tok_s"]
    if not found:
        return NOT_MEASURED
    text = f"{found['ratio']:.3f}"
    if found["ci95"]:
        text += f" [{found['ci95'][0]:.3f}, {found['ci95'][1]:.3f}]"
    return text


def footer(document: Json) -> str:
    """What it means, in one sentence."""
    if not document["tests"]:
        return ""
    text = "\n" + meaning(document) + "\n"
    if document.get("interrupted"):
        text += "\nInterrupted: these are partial results.\n"
    return text


def meaning(document: Json) -> str:
    """One sentence that says what the figures mean."""
    tests = document["tests"]
    stages = _ratios(tests, "stage_us")
    speeds = _ratios(tests, "tok_s")
    same = [t["identical_logits"] for t in tests]
    if any(t is False for t in same):
        return "The logits are not bitwise equal everywhere: find out why before any figure above is used."
    if not any(_seen(t) for t in tests):
        return "Nothing is read back from a device to the CPU in this set-up, so there is nothing to gain."
    if any(w["code"] == "software_device" for w in document["warnings"]):
        return _counts_only(tests, all(same))
    if not speeds or not stages:
        arms = ", ".join(dict.fromkeys(arm for t in tests for arm in t["arms"]))
        return f"Only {arms} was measured: this says what a readback costs there, not what another arm would change."
    stage = f"A CPU split's stage takes {_span(stages)} times as long as stock's"
    if len(tests) == 1:
        speed = _one_speed(tests[0]["speedup"]["tok_s"])
    else:
        speed = f"tokens come {_span(speeds)} times as fast over {len(tests)} tests"
    proof = "with bitwise identical logits" if all(same) else "with logits not compared everywhere"
    return f"{stage}, and {speed}, {proof}."


def _counts_only(tests: Collection[Json], same: bool) -> str:
    def most(arm: str, key: str) -> str:
        values = [(t["arms"].get(arm) or {}).get(key) for t in tests]
        return number(max((v for v in values if v is not None), default=None), 1)

    arms = [arm for arm in ("stock", "async") if any(t["arms"].get(arm) for t in tests)]
    fenced = all(most(arm, "fence_waits_per_token") != NOT_MEASURED for arm in arms)
    key, what = ("fence_waits_per_token", "fence waits") if fenced else ("synchronizes_per_token", "synchronizes")
    waits = " instead of ".join(f"{most(arm, key)} ({arm})" for arm in reversed(arms))
    proof = "bitwise identical logits" if same else "logits not compared everywhere"
    return f"On a software device only counts mean something: {waits} {what} a token, with {proof}."


def _ratios(tests: Collection[Json], key: str) -> list[float]:
    return [t["speedup"][key]["ratio"] for t in tests if t["speedup"][key]]


def _seen(test: Json) -> bool:
    return any(arm and arm.get("readbacks_per_token") for arm in test["arms"].values())


def _span(values: Collection[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _one_speed(found: Json) -> str:
    text = f"tokens come {found['ratio']:.2f} times as fast"
    if not found["ci95"]:
        return text + " (one repetition: no interval)"
    low, high = found["ci95"]
    if low <= 1 <= high:
        return f"the speed is the same within noise ({found['ratio']:.2f}, 95 % interval {low:.2f} to {high:.2f})"
    return f"{text} (95 % interval {low:.2f} to {high:.2f})"
