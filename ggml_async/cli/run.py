"""``ggml-async run``: parses and prints; the work is in :mod:`ggml_async.run`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from .. import run as runner
from ..env import Env
from ..errors import ExitCode, GgmlAsyncError
from ..library import Mode
from ..run_env import CAPTURE_LIMIT, Options


class _Wrapper(click.Command):
    """A bad call of ours is 125, as `env` has it: 2 could be the program's."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """As click's, with our exit code for usage errors."""
        try:
            return super().make_context(*args, **extra)
        except click.UsageError as error:
            raise GgmlAsyncError(error.format_message(), "see ggml-async run --help", ExitCode.RUN_FAILED) from None


@click.command(cls=_Wrapper, context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.option(
    "--mode",
    type=click.Choice([mode.value for mode in Mode]),
    help=f"What the plug-in does [default: {Env.MODE.key}, else async].",
)
@click.option("--adopt", metavar="WHEN", help="Reserved: the file's pages as weights. Not in this version.")
@click.option("--no-layer", is_flag=True, help="Leave the Vulkan layer out: no fence waits and queue submits.")
@click.option(
    "--capture",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"Where the capture goes [default: {Env.CAPTURE.key}, else ./ggml-async-PROGRAM-PID.capture].",
)
@click.option(
    "--capture-limit",
    type=click.IntRange(min=0, max=1 << 20),
    default=CAPTURE_LIMIT,
    show_default=True,
    metavar="MIB",
    help="At this size the capture goes on with counters only.",
)
@click.option("--force", is_flag=True, help="Replace a capture that is there.")
@click.option("--print-env", is_flag=True, help="Print what would be set, and do not run it.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True)
@click.pass_context
def run(  # noqa: PLR0917 -- click hands them over by name
    ctx: click.Context,
    mode: str | None,
    adopt: str | None,
    no_layer: bool,
    capture: Path | None,
    capture_limit: int,
    force: bool,
    print_env: bool,
    quiet: bool,
    program: tuple[str, ...],
) -> None:
    """Run PROGRAM with the plug-in, the Vulkan layer and a capture; otherwise as without.

    \b
    ggml-async run -- llama-server -m model.gguf --n-cpu-moe 99
    ggml-async run --mode stock -- python chat.py

    Exit code: the program's own (128 + n after signal n), 3 where that was 0 but the plug-in did not get in; 125 a
    failure of ours before the start, 126 not executable, 127 not found.
    """
    if adopt is not None:
        raise GgmlAsyncError(
            "--adopt comes with a later version", "run without it: weights are loaded as ever", ExitCode.RUN_FAILED
        )
    options = Options(
        mode=Mode(mode) if mode else None,
        layer=not no_layer,
        capture=capture,
        capture_limit=capture_limit,
        force=force,
    )
    if print_env:
        for line in runner.print_environment(program, options, os.environ):
            click.echo(line)
        return

    def say(line: str) -> None:
        if not quiet or line.startswith("error: "):
            click.echo(f"ggml-async: {line}", err=True)

    ctx.exit(runner.run(program, options, say))
