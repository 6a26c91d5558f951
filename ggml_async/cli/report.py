"""``ggml-async report``: parses and prints; the work is in :mod:`ggml_async.capture_report` and the renderers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..capture_fields import TABLES
from ..capture_report import BY, document
from ..errors import GgmlAsyncError, UsageError
from ..report import capture_flat, capture_html, capture_md
from .output import ResultFile

FORMATS = ("md", "csv", "json", "jsonl", "sql", "html")
_WHOLE = ("layers", "tensors", "processes", "histograms", "timeline")


def _tables(fmt: str, by: Sequence[str], histogram: bool, timeline: bool) -> list[str]:
    if fmt in ("json", "html") and not by and not histogram and not timeline:
        return list(_WHOLE)
    chosen = [BY[name] for name in by]
    chosen += ["histograms"] if histogram else []
    chosen += ["timeline"] if timeline else []
    return list(dict.fromkeys(chosen or ["arms"]))


def _render(fmt: str, found: dict[str, Any], tables: Sequence[str]) -> str:
    if fmt == "json":
        return json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if fmt == "html":
        return capture_html.render(found)
    if fmt == "md":
        return capture_md.render(found, tables)
    if fmt == "jsonl":
        return capture_flat.jsonl_text(found, tables)
    if fmt == "sql":
        return capture_flat.sql_text(found, tables)
    return capture_flat.csv_text(found, tables[0])


def _write(text: str, path: Path | None, force: bool) -> None:
    if path is None:
        click.echo(text, nl=False)
        return
    if force:
        path.unlink(missing_ok=True)
    file = ResultFile(path)
    try:
        file.write(text)
    except GgmlAsyncError:
        file.discard()
        raise
    click.echo(f"ggml-async: written to {file.finish()}", err=True)


@click.command()
@click.argument("captures", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", "fmt", type=click.Choice(FORMATS), help="Format [default: that of --output-file, else md]."
)
@click.option("--output-file", type=click.Path(dir_okay=False, path_type=Path), help="Where it goes instead of stdout.")
@click.option("--force", is_flag=True, help="Replace that file.")
@click.option("--by", multiple=True, type=click.Choice(list(BY)), help="Which table; may be repeated [default: arm].")
@click.option("--full-names", is_flag=True, help="Tensors with their layers.")
@click.option("--histogram", is_flag=True, help="Histograms of stages, readbacks and fence waits.")
@click.option("--timeline", is_flag=True, help="Time line of one evaluation of each arm.")
@click.option(
    "--token", type=click.IntRange(min=1), metavar="N",
    help="Its N-th evaluation [default: that of median duration].",
)  # fmt: skip
@click.option("--compare", type=click.Path(path_type=Path), metavar="OTHER", help="Compare with another capture.")
@click.option("--table", type=click.Choice(["upstream"]), help="upstream: before and after, for a llama.cpp thread.")
@click.option(
    "--skip", type=click.IntRange(min=0), default=1, show_default=True, metavar="N",
    help="First evaluations of each process to leave out as warm-up.",
)  # fmt: skip
def report(  # noqa: PLR0917 -- click hands them over by name
    captures: tuple[Path, ...],
    fmt: str | None,
    output_file: Path | None,
    force: bool,
    by: tuple[str, ...],
    full_names: bool,
    histogram: bool,
    timeline: bool,
    token: int | None,
    compare: Path | None,
    table: str | None,
    skip: int,
) -> None:
    """Say what CAPTUREs hold: figures of each arm, of layers, tensors, processes, single evaluations.

    \b
    ggml-async report run.capture
    ggml-async report run.capture --output-file run.html
    ggml-async report run.capture --table upstream
    """
    ending = output_file.suffix.lstrip(".") if output_file else ""
    fmt = fmt or (ending if ending in FORMATS else "md")
    tables = _tables(fmt, by, histogram, timeline or token is not None)
    if table and compare:
        raise UsageError("--table upstream and --compare are two comparisons", "name both captures as CAPTURES instead")
    if fmt == "csv" and len(tables) > 1:
        raise UsageError("csv holds one table", "choose one of --by, --histogram and --timeline, or another format")
    wanted = [name for name in tables if name in TABLES]
    found = document(captures, skip=skip, tables=wanted, full_names=full_names, token=token, other=compare)
    if table == "upstream":
        text = capture_md.upstream(found)
        if not text:
            raise GgmlAsyncError(
                "the captures have not both a stock and an async arm",
                "give one capture of each (run --mode stock, run --mode async), or switch while it runs",
            )
    else:
        text = _render(fmt, found, tables)
    for warning in found["warnings"]:
        click.echo(f"ggml-async: warning: {warning}", err=True)
    _write(text, output_file, force)
