"""The formats of verify, from one document."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from typing import Any

import pytest
from mock_verifier import MockVerifier
from test_verify import verify

from ggml_async import verify_fields
from ggml_async.verify_report import FORMATS, Writer, meaning


def render(fmt: str, document: Any, shown: Any = ()) -> str:
    parts: list[str] = []
    writer = Writer(fmt, parts.append, shown)
    for test in document["tests"]:
        writer.row(document, test)
    writer.finish(document)
    return "".join(parts)


@pytest.fixture(scope="module")
def equal() -> Any:
    return verify(MockVerifier(), n_cpu_moe=["1,2"], dense="it's dense.gguf").document


@pytest.fixture(scope="module")
def different() -> Any:
    executor = MockVerifier()
    executor.wrong = lambda d: d.arm == "async" and len(d.history) == 2
    executor.broken = "ffn_moe_gate-1"
    return verify(executor).document


def test_every_field_of_the_table_is_in_the_document_and_every_figure_of_it_in_the_table(different: Any) -> None:
    def leaves(value: Any, path: str) -> set[str]:
        if not isinstance(value, dict) or path in ("tests.declined",):
            return {path}
        return set().union(*(leaves(v, f"{path}.{k}" if path else k) for k, v in value.items()))

    document = dict(different)
    (test,) = document.pop("tests")
    found = leaves(document, "") | leaves(test, "tests")
    found -= {"tests.reference"}  # null here
    derived = {"tests.config.devices", "tests.config.overrides"}
    listed = {f.path for f in verify_fields.FIELDS if f.path}
    assert found - derived == {p for p in listed if not p.startswith("tests.reference")}


def test_flat_names_are_unique_and_documented() -> None:
    names = [f.name for f in verify_fields.FIELDS if f.name]
    assert len(set(names)) == len(names)
    assert all(f.doc for f in verify_fields.FIELDS)
    assert verify_fields.reference().count("\n") == len(verify_fields.FIELDS) + 2


def test_csv_jsonl_and_sql_have_the_same_rows(equal: Any) -> None:
    rows = list(csv.DictReader(io.StringIO(render("csv", equal))))
    lines = [json.loads(line) for line in render("jsonl", equal).splitlines()]
    base = sqlite3.connect(":memory:")
    base.row_factory = sqlite3.Row
    base.executescript(render("sql", equal))
    stored = [dict(r) for r in base.execute("SELECT * FROM ggml_async_verify")]
    assert len(rows) == len(lines) == len(stored) == 2
    for a, b, c in zip(rows, lines, stored, strict=True):
        assert list(a) == list(c) == [f.name for f in verify_fields.COLUMNS]
        assert a["model_filename"] == b["model_filename"] == c["model_filename"] == "models/it's a model.gguf"
        assert float(a["ga_stock_perplexity"]) == b["ga_stock_perplexity"] == c["ga_stock_perplexity"]
        assert a["ga_difference_tensor"] == "" and b["ga_difference_tensor"] is c["ga_difference_tensor"] is None
        assert a["ga_identical"] == "1" and b["ga_identical"] is True and c["ga_identical"] == 1
        assert len(b["ga_by_chunk"]) == 2


def test_json_is_the_document(equal: Any) -> None:
    assert json.loads(render("json", equal)) == equal


def test_the_table_shows_what_was_set_and_the_dense_model_where_there_is_one(equal: Any, different: Any) -> None:
    lines = render("md", equal, {"n_ubatch", "n_threads"}).splitlines()
    head = next(line for line in lines if line.startswith("| device"))
    assert [c.strip() for c in head.strip("|").split("|")] == [
        "device", "ncmoe", "n_ubatch", "threads", "readbacks", "chunks", "prompts equal", "positions", "perplexity",
        "dense", "identical",
    ]  # fmt: skip
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4 and len({len(line) for line in table}) == 1, "aligned"
    assert "dense" not in render("md", different)


def test_the_last_sentence_says_what_was_proved_and_no_more(equal: Any, different: Any) -> None:
    said = meaning(equal)
    assert "bitwise equal" in said and "2 configurations" in said and "flat over them within 0.00 %" in said
    assert "1.0000 to 1.0000 times the dense model's" in said
    assert meaning(different) == "Async differs from stock in 1 of 1 configurations."
    assert "no: chunk 0, position 1, layer 1, ffn_moe_gate" in render("md", different)
    nothing = verify(MockVerifier(), n_cpu_moe=["0"]).document
    assert meaning(nothing).endswith("nothing is proved.")
    assert "yes, nothing read" in render("md", nothing)


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f != "json"])
def test_a_run_without_a_row_writes_nothing(equal: Any, fmt: str) -> None:
    assert render(fmt, {**equal, "tests": []}) == ""
