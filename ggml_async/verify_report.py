"""Renderers of ``ggml-async/verify/1``: md, csv, json, jsonl and sql, all from the field table in ``verify_fields``."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ggml_async import verify_fields as fields
from ggml_async.fields import Field
from ggml_async.report import Format
from ggml_async.report import csv as flat
from ggml_async.report import json as whole
from ggml_async.report.md import NOT_MEASURED, number, size
from ggml_async.report.sql import literal

Json = Mapping[str, Any]

TABLE = "ggml_async_verify"


def _nothing(_document: Json, *_: object) -> str:
    return ""


# --- csv, jsonl, sql ---------------------------------------------------------------------------------------------


def _csv_line(values: Sequence[Any]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(values)
    return out.getvalue()


def _csv_header(_document: Json, _shown: Collection[str]) -> str:
    return _csv_line([f.name for f in fields.COLUMNS])


def _csv_row(document: Json, test: Json, _shown: Collection[str]) -> str:
    return _csv_line([flat.cell(v) for v in fields.row(document, test).values()])


def _jsonl_row(document: Json, test: Json, _shown: Collection[str]) -> str:
    return json.dumps(fields.row(document, test, lists=True), ensure_ascii=False, allow_nan=False) + "\n"


def _sql_header(_document: Json, _shown: Collection[str]) -> str:
    columns = ",\n".join(f"  {f.name} {f.sql}" for f in fields.COLUMNS)
    return f"CREATE TABLE IF NOT EXISTS {TABLE} (\n{columns}\n);\n\n"


def _sql_row(document: Json, test: Json, _shown: Collection[str]) -> str:
    values = fields.row(document, test)
    names, literals = ", ".join(values), ", ".join(literal(v) for v in values.values())
    return f"INSERT INTO {TABLE} ({names})\nVALUES ({literals});\n"


# --- the Markdown table ------------------------------------------------------------------------------------------


def _settings(shown: Collection[str]) -> list[Field]:
    names = ["devices", "n_cpu_moe", *(column for name, column in fields.OPTIONAL.items() if name in shown)]
    return [fields.named(n) for n in names]


def _ratio(done: int, asked: int) -> str:
    return f"{done}/{asked}" if asked else NOT_MEASURED


def _perplexity(found: Json | None) -> str:
    if not found or found["value"] is None:
        return NOT_MEASURED
    error = "" if found["error"] is None else f" ± {number(found['error'], 4)}"
    return f"{number(found['value'], 4)}{error}"


def _both(test: Json) -> str:
    """One figure where both arms have the same."""
    arms = test["perplexity"]
    texts = [_perplexity(arms[arm]) for arm in ("stock", "async")]
    return texts[0] if arms["stock"] == arms["async"] else " → ".join(texts)


def _verdict(test: Json) -> str:
    if not test["identical"]:
        return f"no: {fields.where(test)}"
    return "yes" if test["readbacks"] else "yes, nothing read"


#: Heading, width (negative aligns to the left), and what is in it.
_FIGURES: tuple[tuple[str, int, Callable[[Json], str]], ...] = (
    ("readbacks", 9, lambda t: str(t["readbacks"])),
    ("chunks", 6, lambda t: _ratio(t["chunks"], t["chunks_asked"])),
    ("prompts equal", 13, lambda t: _ratio(t["prompts_identical"], t["prompts_asked"])),
    ("positions", 9, lambda t: str(t["positions"])),
    ("perplexity", 20, _both),
    ("dense", 20, lambda t: _perplexity(t["reference"])),
    ("identical", -9, _verdict),
)


def _figures(document: Json) -> list[tuple[str, int, Callable[[Json], str]]]:
    return [f for f in _FIGURES if f[0] != "dense" or document["dense"]]


def _line(cells: list[tuple[str, int]]) -> str:
    padded = [text.ljust(-width) if width < 0 else text.rjust(width) for text, width in cells]
    return "| " + " | ".join(padded) + " |\n"


def _width(heading: str, width: int) -> int:
    wide = max(abs(width), len(heading))
    return -wide if width < 0 else wide


def _md_header(document: Json, shown: Collection[str]) -> str:
    heads = [(f.heading, _width(f.heading, f.width)) for f in _settings(shown)]
    heads += [(heading, _width(heading, width)) for heading, width, _ in _figures(document)]
    rules = [("-" * -w if w < 0 else "-" * (w - 1) + ":", w) for _, w in heads]
    return "".join(f"{line}\n" for line in _about(document)) + "\n" + _line(heads) + _line(rules)


def _about(document: Json) -> list[str]:
    model, host, text = document["model"], document["host"], document["text"]
    parts = [str(model["path"]).replace("\\", "/").rsplit("/", 1)[-1]]
    parts += [str(model["desc"])] if model.get("desc") else []
    parts += [size(model["size_bytes"])] if model.get("size_bytes") else []
    gpus = "; ".join(f"{d['name']} = {d['description']}" for d in document["devices"] if d["type"] != "cpu")
    return [
        f"model: {', '.join(parts)}  ",
        f"host: llama.cpp {host.get('llama') or '?'}; {gpus or 'no GPU'}  ",
        f"text: {text['name']}, {text['tokens']} tokens",
    ]


def _md_row(document: Json, test: Json, shown: Collection[str]) -> str:
    cells = []
    for f in _settings(shown):
        value = f.value(document, test)
        text = str(int(value) if isinstance(value, bool) else value).replace("|", "\\|")
        cells.append((text, _width(f.heading, f.width)))
    cells += [(make(test), _width(heading, width)) for heading, width, make in _figures(document)]
    return _line(cells)


def _md_footer(document: Json) -> str:
    if not document["tests"]:
        return ""
    text = "\n" + meaning(document) + "\n"
    return text + ("\nInterrupted: these are partial results.\n" if document["interrupted"] else "")


def meaning(document: Json) -> str:
    """What the figures mean, in a sentence or two."""
    tests = document["tests"]
    different = [t for t in tests if not t["identical"]]
    read = sum(t["readbacks"] for t in tests)
    positions = sum(t["positions"] for t in tests)
    if different:
        return f"Async differs from stock in {len(different)} of {len(tests)} configurations."
    proved = f"{positions} rows of logits are bitwise equal in stock and async, in {len(tests)} configuration"
    proved += "s" if len(tests) > 1 else ""
    if not read:
        return f"{proved}, but nothing was read back asynchronously: nothing is proved."
    lines = f"{proved}; {read} readbacks were asynchronous."
    spread = document.get("perplexity_spread")
    if spread is not None:
        lines += f" Perplexity is flat over them within {(spread - 1) * 100:.2f} %."
    ratios = [t["reference"]["ratio"] for t in tests if t["reference"] and t["reference"]["ratio"]]
    if ratios:
        lines += f" It is {min(ratios):.4f} to {max(ratios):.4f} times the dense model's, which it should equal."
    return lines


FORMATS: dict[str, Format] = {
    "md": Format(_md_header, _md_row, _md_footer),
    "csv": Format(_csv_header, _csv_row, _nothing),
    "json": Format(whole.header, whole.row, whole.footer),
    "jsonl": Format(_nothing, _jsonl_row, _nothing),
    "sql": Format(_sql_header, _sql_row, _nothing),
}


class Writer:
    """Writes a document as its configurations come in: the header with the first row only.

    Args:
        fmt: a key of FORMATS.
        write: receives text; called once for every row, and meant to flush.
        shown: names of the settings that have a column in the Markdown table.
    """

    def __init__(self, fmt: str, write: Callable[[str], object], shown: Collection[str] = ()) -> None:
        self._format = FORMATS[fmt]
        self._write = write
        self._shown = shown
        self._rows = 0

    def row(self, document: Json, test: Json) -> None:
        """One more configuration is final."""
        head = "" if self._rows else self._format.header(document, self._shown)
        self._rows += 1
        self._put(head + self._format.row(document, test, self._shown))

    def finish(self, document: Json) -> None:
        """Nothing more will come."""
        self._put(self._format.footer(document))

    def _put(self, text: str) -> None:
        if text:
            self._write(text)
