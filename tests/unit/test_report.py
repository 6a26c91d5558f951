"""Every format, against the golden renderings of a recorded run and for what each must survive."""

from __future__ import annotations

import copy
import csv
import io
import json
import sqlite3
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mock_executor import MockExecutor

from ggml_async import fields
from ggml_async.profile import Profiler
from ggml_async.profile_plan import Options, make_plan
from ggml_async.report import FORMATS, Writer, render

GOLDEN = Path(__file__).parent.parent / "golden"


class Nobody:
    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


@cache
def _mock_document() -> dict[str, Any]:
    executor = MockExecutor()
    model: Any = SimpleNamespace(n_layer=4, expert_layers=lambda: [0, 1, 2, 3])
    options = Options(n_gen=["2"], n_cpu_moe=["2,4"], threads=["2"], repetitions=3)
    plan = make_plan(options, model, executor.devices())
    return Profiler(plan, executor, Nobody(), expert_layers=[0, 1, 2, 3], n_layer=4).execute().document


def mock_document(**changes: Any) -> dict[str, Any]:
    document = copy.deepcopy(_mock_document())
    document.update(changes)
    return document


def golden() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((GOLDEN / "profile-1.json").read_text())
    return document


@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_the_recorded_run_renders_as_it_did(fmt: str) -> None:
    # On a wanted change: tests/golden/update_profile.py
    assert render(fmt, golden()) == (GOLDEN / f"profile-1.{fmt}").read_text()


def test_csv_has_one_cell_a_column_and_empty_ones_for_what_was_not_measured() -> None:
    rows = list(csv.DictReader(io.StringIO(render("csv", mock_document()))))
    assert [r["ga_test"] for r in rows] == ["tg2", "tg2"]
    assert list(rows[0]) == [f.name for f in fields.COLUMNS]
    assert rows[0]["ga_stock_fence_wait_us_p50"] == ""
    assert rows[0]["ga_stock_fence_waits_per_token"] == "5.0"
    assert json.loads(rows[0]["ga_async_fence_waits_by_cause"]) == {"readback": 2, "token": 1}
    assert rows[0]["ga_async_device_wait_us_mean"] == ""
    assert rows[1]["ga_stock_readbacks_per_token"] == "8.0"
    assert rows[0]["ga_identical_logits"] == "1"
    assert rows[0]["model_filename"] == "models/it's a model.gguf"


def test_jsonl_lines_stand_alone_and_carry_the_samples() -> None:
    lines = [json.loads(line) for line in render("jsonl", mock_document()).splitlines()]
    assert len(lines) == 2
    assert len(lines[0]["samples_ns"]) == len(lines[0]["samples_ts"]) == 3
    assert len(lines[0]["ga_stock_samples_ts"]) == 3
    assert lines[0]["ga_identical_logits"] is True
    assert lines[0]["avg_ns"] == pytest.approx(2 * 1e9 / lines[0]["avg_ts"], abs=1)
    assert lines[0]["ga_stock_fence_wait_us_max"] is None


def test_sql_runs_in_sqlite_twice_with_quotes_and_nul_in_it() -> None:
    document = mock_document()
    document["model"]["path"] = "it's; DROP TABLE x; --\0.gguf"
    database = sqlite3.connect(":memory:")
    for _ in range(2):
        database.executescript(render("sql", document))
    rows = database.execute(
        "SELECT model_filename, n_cpu_moe, ga_speedup, ga_stock_fence_wait_us_p50, ga_identical_logits"
        " FROM ggml_async_profile"
    ).fetchall()
    assert len(rows) == 4
    assert rows[1][0] == "it's; DROP TABLE x; --\0.gguf"
    assert rows[1][1] == 4
    assert rows[1][2] == pytest.approx(1400 / 1256)
    assert rows[1][3:] == (None, 1)


def test_json_is_the_document_itself_and_refuses_nan() -> None:
    document = mock_document()
    assert json.loads(render("json", document)) == document
    document["tests"][0]["speedup"]["tok_s"]["ratio"] = float("nan")
    with pytest.raises(ValueError):
        render("json", document)


def test_the_table_shows_before_and_after() -> None:
    text = render("md", mock_document())
    row = next(line for line in text.splitlines() if line.startswith("| Mock0"))
    cells = [c.strip() for c in row.strip("|").split("|")]
    assert cells == [
        "Mock0", "2", "tg2", "4.0", "50.0 → 32.0", "20.0 → 2.0", "16.7 % → 11.3 %", "5.0 → 3.0", "833.33 → 886.52",
        "1.064 [1.064, 1.064]", "yes",
    ]  # fmt: skip
    widths = {len(line) for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1
    assert "0.64 times as long" in text
    assert "1.06 to 1.11 times as fast over 2 tests" in text
    assert "bitwise identical" in text


def test_without_the_layer_the_table_has_synchronizes_where_it_has_fence_waits_with_it() -> None:
    document = mock_document()
    assert "|  waits/token |" in render("md", document) and "syncs" not in render("md", document)
    for test in document["tests"]:
        for arm in test["arms"].values():
            arm["fence_waits_per_token"] = None
    text = render("md", document)
    assert "|  syncs/token |" in text and "waits" not in text
    assert "|    8.0 → 2.0 |" in text
    assert len({len(line) for line in text.splitlines() if line.startswith("|")}) == 1


def test_the_table_has_a_column_for_what_was_varied_only() -> None:
    assert "threads" not in render("md", mock_document())
    assert "| threads |" in render("md", mock_document(), shown={"n_threads"})
    document = mock_document()
    document["tests"][1]["config"]["n_ubatch"] = 64
    assert "| n_ubatch |" in render("md", document)


@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_a_run_without_a_row_writes_no_header(fmt: str) -> None:
    text = render(fmt, mock_document(tests=[]))
    assert text == "" if fmt != "json" else json.loads(text)["tests"] == []


@pytest.mark.parametrize("fmt", ["md", "csv", "jsonl", "sql"])
def test_every_row_is_written_as_it_comes_with_the_header_once(fmt: str) -> None:
    document = mock_document()
    parts: list[str] = []
    writer = Writer(fmt, parts.append)
    for test in document["tests"]:
        writer.row(document, test)
    assert len(parts) == 2
    writer.finish(document)
    assert "".join(parts) == render(fmt, document)


def test_the_sentence_tells_bad_news_first() -> None:
    document = mock_document()
    document["tests"][1]["identical_logits"] = False
    text = render("md", document)
    assert "not bitwise equal" in text
    assert [line.split()[-2] for line in text.splitlines() if line.startswith("| Mock0")] == ["yes", "no"]
    assert "Interrupted" in render("md", mock_document(interrupted=True))


def test_a_single_test_within_noise_is_called_that() -> None:
    document = mock_document()
    del document["tests"][1]
    document["tests"][0]["speedup"]["tok_s"] = {"ratio": 1.01, "ci95": [0.97, 1.05]}
    assert "the same within noise" in render("md", document)


def test_a_software_device_gets_no_speed_in_the_sentence() -> None:
    warning = {"code": "software_device", "message": "", "hint": "", "test": None}
    document = mock_document(warnings=[warning])
    text = render("md", document).splitlines()[-1]
    assert "5.0 (async) instead of 9.0 (stock) fence waits a token" in text
    assert "fast" not in text
    document["tests"][1]["arms"]["async"]["fence_waits_per_token"] = None
    document["tests"][0]["arms"]["async"]["fence_waits_per_token"] = None
    text = render("md", document).splitlines()[-1]
    assert "4.0 (async) instead of 16.0 (stock) synchronizes a token" in text
    assert "fast" not in text


def test_an_arm_that_did_not_run_is_a_dash_not_a_zero() -> None:
    document = mock_document()
    for test in document["tests"]:
        test["arms"]["async"] = None
        test["speedup"] = {"tok_s": None, "stage_us": None}
    text = render("md", document)
    assert "50.0 → –" in text
    (row, _) = csv.DictReader(io.StringIO(render("csv", document)))
    assert row["ga_async_tok_s_mean"] == ""
    assert float(row["avg_ts"]) == pytest.approx(833.33, abs=0.01)
