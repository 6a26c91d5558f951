"""Renderers of result documents: one module a format, each with ``header``, ``row`` and ``footer``.

They see the document only: no clock, no device, no library.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ggml_async.report import csv, json, jsonl, md, sql

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """How one format is written. `row` and `header` get the document, the test, and the settings to show."""

    header: Callable[[Json, Collection[str]], str]
    row: Callable[[Json, Json, Collection[str]], str]
    footer: Callable[[Json], str]


FORMATS: dict[str, Format] = {
    name: Format(module.header, module.row, module.footer)
    for name, module in (("md", md), ("csv", csv), ("json", json), ("jsonl", jsonl), ("sql", sql))
}


class Writer:
    """Writes a document as its tests come in: the header with the first row only, so that a run that fails before it
    leaves nothing behind.

    Args:
        fmt: a key of FORMATS.
        write: receives text; called once for every row, and meant to flush.
        shown: names of the settings the user varied, for the Markdown table; others have no column there.
    """

    def __init__(self, fmt: str, write: Callable[[str], object], shown: Collection[str] = ()) -> None:
        self._format = FORMATS[fmt]
        self._write = write
        self._shown = shown
        self.rows = 0

    def row(self, document: Json, test: Json) -> None:
        """One more test is final."""
        text = self._format.row(document, test, self._shown)
        if not self.rows:
            text = self._format.header(document, self._shown) + text
        self.rows += 1
        self._put(text)

    def finish(self, document: Json) -> None:
        """Nothing more will come."""
        self._put(self._format.footer(document))

    def _put(self, text: str) -> None:
        if text:
            self._write(text)


def render(fmt: str, document: Json, shown: Collection[str] | None = None) -> str:
    """A whole document in one format. `shown` None: the settings in which its tests differ."""
    parts: list[str] = []
    writer = Writer(fmt, parts.append, md.differing(document) if shown is None else shown)
    for test in document["tests"]:
        writer.row(document, test)
    writer.finish(document)
    return "".join(parts)
