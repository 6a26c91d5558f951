# ruff: noqa: E501, PLC0206
"""The document ``ggml-async/capture/1``: everything that a capture says, for the renderers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from . import __version__, capture_tables
from .capture import Capture, read
from .capture_stats import analyse, compare, speedups
from .capture_tokens import Analysis
from .errors import GgmlAsyncError, UsageError

Json = dict[str, Any]
SCHEMA = "ggml-async/capture/1"
#: Tables by what --by calls them.
BY = {"arm": "arms", "layer": "layers", "tensor": "tensors", "process": "processes", "token": "tokens"}


def _provenance(capture: Capture) -> Json:
    names = {w: i for i, w in enumerate(capture.writers)}
    return {
        "writers": [
            {
                "component": h.component, "version": h.version, "abi_version": h.abi_version, "pid": h.pid,
                "program": h.program, "library": h.library, "realtime_ns": h.realtime_ns,
            }
            for h in capture.hellos
        ],
        "hosts": [
            {"writer": h.writer, "ggml": h.version, "api_version": h.api_version, "layout": h.layout, "library": h.library}
            for h in capture.hosts
        ],
        "devices": [
            {"host": d.host, "index": d.index, "type": d.type, "name": d.name, "description": d.description}
            for d in {(d.writer, d.host, d.index): d for d in capture.devices}.values()
        ],
        "refused": [r.reason for r in capture.refused],
        "n_writers": len(names),
    }  # fmt: skip


def _comparison(before: Analysis, after: Analysis, names: tuple[str, str]) -> list[Json]:
    """Rows for each arm and test that both captures have; else of the one arm that each has."""
    rows: list[Json] = []
    for unit in after.units:
        other = before.unit(unit.arm, unit.test)
        if other and len(unit.tokens) and len(other.tokens):
            rows += [
                {"test": unit.test, "before_arm": f"{names[0]}: {unit.arm}", "after_arm": f"{names[1]}: {unit.arm}", **row}
                for row in compare(other, unit)
            ]  # fmt: skip
    for unit in after.units if not rows else []:
        for other in before.units:
            if unit.test == other.test and len(unit.tokens) and len(other.tokens):
                pair = {"before_arm": f"{names[0]}: {other.arm}", "after_arm": f"{names[1]}: {unit.arm}"}
                rows += [{"test": unit.test, **pair, **row} for row in compare(other, unit)]
    return rows


def document(
    paths: Sequence[Path],
    *,
    skip: int = 1,
    tables: Collection[str] = (),
    full_names: bool = False,
    token: int | None = None,
    other: Path | None = None,
) -> Json:
    """Reads captures and works out their figures.

    Args:
        paths: captures; several are taken as one.
        skip: first evaluations of each process that are left out as warm-up.
        tables: keys of capture_fields.TABLES beside arms and compare; the rest is left out of the document.
        full_names: tensors with their layers.
        token: the evaluation whose time line is wanted, from 1 within its arm; None: the one of median duration.
        other: a capture to compare with; its figures are the *before*. None: stock is before, async after.

    Raises:
        GgmlAsyncError: a file is no capture or cannot be read.
        UsageError: there is no evaluation `token`.
    """
    capture = read(paths)
    analysis = analyse(capture, skip)
    found: Json = {
        "schema": SCHEMA,
        "version": __version__,
        "captures": [Path(path).name for path in paths],
        "provenance": _provenance(capture),
        "warnings": list(capture.warnings),
        "arms": [unit.figures for unit in analysis.units],
        "compare": speedups(analysis),
    }
    if other is not None:
        before = analyse(read([other]), skip)
        found["warnings"] += [f"{other.name}: {w}" for w in before.capture.warnings]
        found["compared_with"] = other.name
        found["compare"] = _comparison(before, analysis, (other.name, found["captures"][0]))
        if not found["compare"]:
            raise GgmlAsyncError(
                "the two captures have no kind of evaluation in common",
                "compare decodes with decodes: same program, same model",
            )
    makers = {
        "layers": lambda: capture_tables.layers(analysis),
        "tensors": lambda: capture_tables.tensors(analysis, full=full_names),
        "processes": lambda: capture_tables.processes(analysis),
        "tokens": lambda: capture_tables.tokens_table(analysis),
        "histograms": lambda: capture_tables.histograms(analysis),
        "timeline": lambda: capture_tables.timeline(analysis, token),
    }
    for name in makers:
        if name in tables:
            found[name] = makers[name]()
    if token is not None and "timeline" in tables and not found["timeline"]:
        raise UsageError(f"there is no evaluation {token}", "ggml-async report --by token lists them")
    return found
