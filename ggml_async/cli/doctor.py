"""``ggml-async doctor``: parses and prints; the checks are in :mod:`ggml_async.doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ..doctor import Check, Status, run_checks
from ..env import Env
from ..errors import ExitCode

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIP: "dim"}


def _table(checks: list[Check]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("reason", overflow="fold")
    table.add_column("remedy", overflow="fold")
    for check in checks:
        table.add_row(check.name, f"[{_STYLES[check.status]}]{check.status.value}[/]", check.reason, check.remedy)
    return table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON on stdout.")
@click.option(
    "--llama",
    type=click.Path(path_type=Path),
    help=f"Folder of the llama.cpp libraries to check, as for profile ({Env.LLAMA.key}).",
)
@click.option("--fetch", is_flag=True, help="Fetch the embedded runtime if no other is usable (24 MB, once).")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, llama: Path | None, fetch: bool) -> None:
    """Check everything that profile needs, down to one real readback through the plug-in.

    Each line has a status, its reason and a remedy. Exit code 1 when a check fails.
    """
    checks = run_checks(llama, fetch=fetch)
    failed = any(check.status is Status.FAIL for check in checks)
    if as_json:
        click.echo(
            json.dumps(
                {"schema": "ggml-async/doctor/1", "ok": not failed, "checks": [c.as_dict() for c in checks]}, indent=1
            )
        )
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 200  # a pipe has no width; 80 columns would fold every path
        console.print(_table(checks))
        click.echo("attach the output of `ggml-async doctor --json` to a report")
    ctx.exit(ExitCode.FAILED if failed else ExitCode.OK)
