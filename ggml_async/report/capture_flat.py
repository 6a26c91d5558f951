"""Captures as csv, jsonl and sql: rows of the tables of capture_fields, one cell a column."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ggml_async.capture_fields import TABLES
from ggml_async.report.sql import literal

Json = Mapping[str, Any]


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else value


def _columns(table: str) -> list[tuple[str, str]]:
    return [column for f in TABLES[table] for column in f.columns()]


def _row(table: str, row: Json) -> list[Any]:
    return [_cell(value) for f in TABLES[table] for value in f.values(row)]


def csv_text(document: Json, table: str) -> str:
    """One table; an empty cell where not measured, 1 and 0 for truth."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([name for name, _ in _columns(table)])
    for row in document[table]:
        writer.writerow([int(v) if isinstance(v, bool) else v for v in _row(table, row)])
    return out.getvalue()


def jsonl_text(document: Json, tables: Sequence[str]) -> str:
    """One object a row, with its table's name."""
    return "".join(
        json.dumps({"table": table, **row}, ensure_ascii=False, allow_nan=False) + "\n"
        for table in tables
        for row in document[table]
    )


def sql_text(document: Json, tables: Sequence[str]) -> str:
    """For SQLite: each table is made where it is missing, then filled."""
    parts: list[str] = []
    for table in tables:
        columns = _columns(table)
        made = ",\n".join(f"  {name} {kind}" for name, kind in columns)
        parts.append(f"CREATE TABLE IF NOT EXISTS ggml_async_{table} (\n{made}\n);\n\n")
        names = ", ".join(name for name, _ in columns)
        for row in document[table]:
            values = ", ".join(literal(v) for v in _row(table, row))
            parts.append(f"INSERT INTO ggml_async_{table} ({names})\nVALUES ({values});\n")
    return "".join(parts)
