"""SQL for SQLite: the table is created where it is missing, then one INSERT a test. Every value is escaped."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ggml_async import fields
from ggml_async.report import csv as flat

Json = Mapping[str, Any]

TABLE = "ggml_async_profile"


def header(_document: Json, _shown: Collection[str]) -> str:
    """CREATE TABLE."""
    columns = ",\n".join(f"  {f.name} {f.sql}" for f in fields.COLUMNS)
    return f"CREATE TABLE IF NOT EXISTS {TABLE} (\n{columns}\n);\n\n"


def literal(value: Any) -> str:
    """`value` as an SQLite literal. NUL would end the statement for some readers: it goes through a blob."""
    value = flat.cell(value)
    if value is None:
        return "NULL"
    if isinstance(value, (int, float)):
        return repr(value)
    text = str(value)
    if "\0" in text:
        return f"CAST(X'{text.encode().hex()}' AS TEXT)"
    return "'" + text.replace("'", "''") + "'"


def row(document: Json, test: Json, _shown: Collection[str]) -> str:
    """One INSERT that names its columns, so that a table with more of them still takes it."""
    values = fields.row(document, test)
    return (
        f"INSERT INTO {TABLE} ({', '.join(values)})\n"
        f"VALUES ({', '.join(literal(v) for v in values.values())});\n"
    )  # fmt: skip


def footer(_document: Json) -> str:
    """Nothing."""
    return ""
