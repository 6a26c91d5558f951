"""`ggml-async report` on a capture whose numbers are known, in every format."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from capture_example import ODD, write
from capture_writer import ASYNC, STOCK
from click.testing import CliRunner

from ggml_async import capture_fields
from ggml_async.cli import main as cli
from ggml_async.cli.report import report as command
from ggml_async.errors import UsageError


@pytest.fixture
def both(tmp_path: Path) -> Path:
    return write(tmp_path / "both.capture")


def report(*arguments: Any) -> str:
    done = CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def document(*arguments: Any) -> Any:
    return json.loads(report(*arguments, "-o", "json"))


def arm(found: Any, name: str) -> Any:
    return next(a for a in found["arms"] if a["arm"] == name and a["test"] == "decode")


def test_the_figures_are_those_of_the_capture(both: Path) -> None:
    found = document(both)
    assert found["schema"] == "ggml-async/capture/1" and found["warnings"] == []
    stock, ours = arm(found, "stock"), arm(found, "async")
    for unit, stage, waits, submits in ((stock, 200, 7, 7), (ours, 80, 3, 3)):
        assert (
            unit["readbacks_per_token"] == 4 and unit["cpu_splits_per_token"] == 2 and unit["bytes_per_token"] == 4000
        )
        assert unit["stage_us"]["mean"] == unit["stage_us"]["max"] == stage
        assert unit["stage_per_readback_us"]["mean"] == stage / 2
        assert unit["fence_waits_per_token"] == waits and unit["queue_submits_per_token"] == submits
        assert unit["fence_waits_by_cause"] == {"readback": waits - 1, "token": 1}
        assert unit["fence_waits_beyond_splits"] == waits - 2
        assert unit["cpu_compute_us_per_token"] == 300
    assert stock["tok_s"] == pytest.approx(1000) and ours["tok_s"] == pytest.approx(1e6 / 760)
    assert stock["device_wait_us"]["mean"] == 50 and ours["device_wait_us"] is None
    assert stock["readback_cost_us"]["mean"] == 75 and ours["readback_cost_us"]["mean"] == 15
    assert stock["issue_us"] is None and ours["issue_us"]["mean"] == 2
    speed = next(r for r in found["compare"] if r["figure"] == "tok_s")
    assert speed["ratio"] == pytest.approx(1000 / 760)


def test_without_the_layer_waits_are_null(tmp_path: Path) -> None:
    found = document(write(tmp_path / "c", layer=False))
    assert (
        arm(found, "async")["fence_waits_per_token"] is None and arm(found, "async")["queue_submits_by_cause"] is None
    )


def test_markdown_has_a_row_for_each_figure_with_its_definition(both: Path) -> None:
    text = report(both)
    line = next(row for row in text.splitlines() if row.startswith("| fence waits a token"))
    assert "| 7.0 | 3.0 | 0.429 [" in line
    for f in capture_fields.TABLES["arms"]:
        if f"| {f.title} |" in text:
            assert f.doc in text
    tables = [row.count("|") for row in text.splitlines() if row.startswith("|")]
    assert set(tables) == {6}


@pytest.mark.parametrize("name", ["arm", "layer", "tensor", "process", "token"])
def test_csv_has_every_column_of_its_table(name: str, both: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(report(both, "-o", "csv", "--by", name))))
    table = {"arm": "arms", "process": "processes"}.get(name, f"{name}s")
    assert list(rows[0]) == [column for f in capture_fields.TABLES[table] for column, _ in f.columns()]
    if name == "layer":
        assert [(r["arm"], r["layer"], r["stage_us_mean"]) for r in rows if r["layer"]] == [
            ("stock", "0", "200.0"), ("stock", "1", "200.0"), ("async", "0", "80.0"), ("async", "1", "80.0"),
        ]  # fmt: skip
    if name == "tensor":
        assert {r["tensor"] for r in rows} == {"ffn_norm", "ffn_moe_topk"}
    if name == "token":
        assert len(rows) == 8 and [r["left_out"] for r in rows].count("warm-up") == 1
        assert {r["fence_waits"] for r in rows if r["arm"] == "async"} == {"3"}


def test_full_names_keep_the_layer(both: Path) -> None:
    rows = csv.DictReader(io.StringIO(report(both, "-o", "csv", "--by", "tensor", "--full-names")))
    assert {r["tensor"] for r in rows} == {"ffn_norm-0", "ffn_norm-1", "ffn_moe_topk-0", "ffn_moe_topk-1"}


def test_jsonl_names_the_table_of_each_row(both: Path) -> None:
    rows = [json.loads(line) for line in report(both, "-o", "jsonl", "--by", "arm", "--histogram").splitlines()]
    assert {r["table"] for r in rows} == {"arms", "histograms"}
    assert (
        sum(
            r["count"] for r in rows if r["table"] == "histograms" and r["arm"] == "stock" and r["figure"] == "stage_us"
        )
        == 6
    )


def test_sql_fills_sqlite_whatever_the_names(tmp_path: Path) -> None:
    path = write(tmp_path / "c", odd=True)
    base = sqlite3.connect(":memory:")
    base.executescript(report(path, "-o", "sql", "--by", "tensor", "--by", "arm", "--full-names"))
    assert {r[0] for r in base.execute("select tensor from ggml_async_tensors")} == {
        ODD,
        "ffn_moe_topk-0",
        "ffn_moe_topk-1",
    }
    assert base.execute(
        "select stage_us_mean, readbacks_per_token from ggml_async_arms where arm='async'"
    ).fetchall() == [(80.0, 4.0)]


def test_odd_names_break_no_markdown_table(tmp_path: Path) -> None:
    text = report(write(tmp_path / "c", odd=True), "--by", "tensor", "--full-names")
    rows = [row for row in text.splitlines() if row.startswith("|")]
    assert len({len(re.split(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_the_histogram_counts_every_stage(both: Path) -> None:
    rows = [r for r in document(both, "--histogram")["histograms"] if r["figure"] == "stage_us"]
    filled = [(r["arm"], r["count"]) for r in rows if r["count"]]
    assert filled == [("stock", 6), ("async", 8)]
    assert all(r["from_us"] <= {"stock": 200, "async": 80}[r["arm"]] < r["to_us"] for r in rows if r["count"])


def test_the_time_line_has_what_happened(both: Path) -> None:
    rows = [r for r in document(both, "--timeline")["timeline"] if r["arm"] == "stock"]
    lanes = {lane: [r for r in rows if r["lane"] == lane] for lane in {r["lane"] for r in rows}}
    assert {lane: len(found) for lane, found in lanes.items()} == {
        "cpu_compute": 2, "device_wait": 2, "readback": 4, "final_wait": 1, "fence_wait": 7, "queue_submit": 7,
    }  # fmt: skip
    assert [(r["start_us"], r["duration_us"]) for r in lanes["cpu_compute"]] == [(300, 150), (650, 150)]
    assert lanes["final_wait"][0]["start_us"] == 950
    assert "cpu_compute |" in report(both, "--timeline")


def test_upstream_is_one_row_a_test(both: Path) -> None:
    lines = report(both, "--table", "upstream").splitlines()
    assert len([row for row in lines if row.startswith("|")]) == 3
    assert "| llama-bench | Example GPU | tg | 1,000.00 | 1,315.79 | 1.316" in lines[2]
    assert "7.0 → 3.0" in lines[2] and "200.0 → 80.0" in lines[2]


def test_two_captures_are_compared(tmp_path: Path) -> None:
    stock, ours = write(tmp_path / "s", arms=(STOCK,)), write(tmp_path / "a", arms=(ASYNC,), process=1)
    found = document(ours, "--compare", stock)
    stage = next(r for r in found["compare"] if r["figure"] == "stage_us")
    assert (stage["before"], stage["after"], stage["ratio"]) == (200, 80, 0.4)
    assert stage["before_arm"] == "s: stock" and stage["after_arm"] == "a: async"
    assert "Compared with s" in report(ours, "--compare", stock)
    # several captures are one
    assert {a["arm"] for a in document(stock, ours)["arms"]} == {"stock", "async"}


def test_two_comparisons_at_once_are_refused(both: Path) -> None:
    with pytest.raises(UsageError, match="two comparisons"):
        report(both, "--table", "upstream", "--compare", both)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.urls += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "rect", "line", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line"):
            assert self.open.pop() == tag, tag


def test_the_page_is_whole_and_needs_nothing(tmp_path: Path) -> None:
    text = report(write(tmp_path / "c", odd=True), "-o", "html")
    page = _Page()
    page.feed(text)
    assert page.open == [] and page.urls == [] and "script" not in page.tags and "<b>'name'" not in text
    assert text.count("<svg") == page.tags.count("svg") >= 6
    assert "http" not in text and "@import" not in text


def test_files_are_not_overwritten(both: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    assert cli.run(["report", str(both), "--output-file", str(out)]) == 0
    first = out.read_text()
    assert first.startswith("<!doctype html>")
    assert cli.run(["report", str(both), "--output-file", str(out)]) == 2
    assert out.read_text() == first
    assert cli.run(["report", str(both), "--output-file", str(out), "--force", "-o", "md"]) == 0
    assert out.read_text().startswith("# both.capture")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["both.capture", "out.html"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nothing-there"], 2, "nothing-there"),
        (["{both}", "-o", "csv", "--by", "arm", "--by", "layer"], 2, "one table"),
        (["{both}", "--token", "99"], 2, "99"),
        (["{stock}", "--table", "upstream"], 1, "not both"),
        ([], 2, "CAPTURES"),
    ],
)
def test_bad_calls_say_what_to_do(
    arguments: list[str], code: int, text: str, both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = write(tmp_path / "stock.capture", arms=(STOCK,))
    assert cli.run(["report", *(a.format(both=both, stock=stock) for a in arguments)]) == code
    said = capsys.readouterr()
    assert text in said.err and said.out == "" and len(said.err.splitlines()) == 2


def test_a_damaged_capture_gives_the_rest_and_a_warning(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(both.read_bytes())
    both.write_bytes(data[: len(data) - 40])
    assert cli.run(["report", str(both)]) == 0
    said = capsys.readouterr()
    assert "warning" in said.err and "fence waits a token" in said.out


def _numbers(value: Any) -> Any:
    """Rounded: resampling and means may differ in the last digits between numpy's builds."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    return [_numbers(inner) for inner in value] if isinstance(value, list) else value


def test_the_golden_capture_of_format_1_is_read_as_ever() -> None:
    golden = Path(__file__).parents[1] / "golden"
    sys.path.insert(0, str(golden))
    from update_capture import reports

    found = reports()
    assert found["md"] == (golden / "capture-1.md").read_text()
    assert found["upstream.md"] == (golden / "capture-1.upstream.md").read_text()
    assert _numbers(json.loads(found["json"])) == _numbers(json.loads((golden / "capture-1.json").read_text()))
