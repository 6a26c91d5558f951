"""Comma-separated values: one row a test, every column of the field table, an empty cell where not measured."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ggml_async import fields

Json = Mapping[str, Any]


def _line(values: Sequence[Any]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(values)
    return out.getvalue()


def cell(value: Any) -> Any:
    """A value as text for a flat cell: objects as JSON, truth as llama-bench has it (1 and 0)."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return value


def header(_document: Json, _shown: Collection[str]) -> str:
    """The line of column names."""
    return _line([f.name for f in fields.COLUMNS])


def row(document: Json, test: Json, _shown: Collection[str]) -> str:
    """One test."""
    return _line([cell(v) for v in fields.row(document, test).values()])


def footer(_document: Json) -> str:
    """Nothing: a comment would be a row to most readers."""
    return ""
