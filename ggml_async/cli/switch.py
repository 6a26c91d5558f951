"""``ggml-async switch``: parses and prints; the work is in :mod:`ggml_async.control`."""

from __future__ import annotations

import click

from .. import control
from ..library import Mode


@click.command()
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=control.TIMEOUT,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the program to take it.",
)
@click.argument("pid", type=click.IntRange(min=1))
@click.argument("mode", type=click.Choice([mode.value for mode in Mode]))
def switch(pid: int, mode: str, timeout: float) -> None:
    """Set the MODE of the running program PID, or of what `ggml-async run` with that PID runs.

    \b
    ggml-async run -- llama-server -m model.gguf &
    ggml-async switch $! stock
    """
    for done in control.switch(pid, Mode(mode), timeout):
        before = done.before.value if done.before else "mixed"
        click.echo(f"{done.pid}: {before} -> {done.after.value}")
