"""`ggml-async run`: a program with the plug-in, the layer and a capture, otherwise as it would run without."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import run_env, run_process
from .env import Env
from .errors import ExitCode, GgmlAsyncError
from .run_env import Environment, Options


def _capture_path(options: Options, program: str, environ: Mapping[str, str]) -> Path:
    named = options.capture or (Path(value) if (value := environ.get(Env.CAPTURE.key)) else None)
    return (named or run_env.default_capture(program)).absolute()


def _as_ours(error: GgmlAsyncError) -> GgmlAsyncError:
    """Before the program has started no exit code but 125 .. 127 can be ours (as `env` has it)."""
    ours = {ExitCode.NOT_EXECUTABLE, ExitCode.PROGRAM_NOT_FOUND}
    code = error.exit_code if error.exit_code in ours else ExitCode.RUN_FAILED
    return GgmlAsyncError(error.message, error.hint, code)


def print_environment(argv: Sequence[str], options: Options, environ: Mapping[str, str]) -> list[str]:
    """`NAME=value` lines, quoted for a shell, of what `run` would set for this program."""
    try:
        changes = run_env.environment(options, _capture_path(options, argv[0], environ), environ).changes
    except GgmlAsyncError as error:
        raise _as_ours(error) from None
    return [f"{name}={shlex.quote(value)}" for name, value in sorted(changes.items())]


def _prepare(argv: Sequence[str], options: Options, environ: Mapping[str, str]) -> tuple[str, Path, Environment]:
    try:
        program = run_env.find_program(argv[0], environ)
        path = _capture_path(options, program, environ)
        prepared = run_env.environment(options, path, environ)
        run_env.create_capture(path, options.force)
    except GgmlAsyncError as error:
        raise _as_ours(error) from None
    return program, path, prepared


def run(argv: Sequence[str], options: Options, say: Callable[[str], None]) -> int:
    """Runs a program and says, line by line, where its capture goes and what is in it.

    Args:
        argv: program and arguments.
        options: what was chosen.
        say: prints one line for the user, never on stdout.

    Returns:
        The program's own exit code (128 + n after signal n); 3 where that was 0 and the plug-in did not get in.

    Raises:
        GgmlAsyncError: the program was not started: 125, 126 or 127.
    """
    environ = dict(os.environ)
    program, path, prepared = _prepare(argv, options, environ)
    for note in prepared.notes:
        say(f"warning: {note}")
    say(f"capturing into {path}")
    try:
        code = run_process.execute(program, argv, {**environ, **prepared.changes})
    except GgmlAsyncError as error:
        path.unlink(missing_ok=True)  # still empty
        raise _as_ours(error) from None
    return _conclude(code, program, path, prepared, say)


def _conclude(code: int, program: str, path: Path, prepared: Environment, say: Callable[[str], None]) -> int:
    from . import run_verdict  # noqa: PLC0415 -- and with it numpy: after the program, which need not wait for it

    try:
        read = run_verdict.read_capture(path)
    except GgmlAsyncError as error:  # the program's own code is worth more than our trouble with the file
        say(f"error: {error.message}")
        return code
    verdict = run_verdict.judge(read, program, prepared.taken)
    if read is None:
        path.unlink(missing_ok=True)
    elif read.events.size or verdict.attached:
        from .capture_stats import summary_lines  # noqa: PLC0415

        for line in summary_lines(read):
            say(line)
        for warning in read.warnings:
            say(f"warning: {warning}")
    if verdict.note:
        say(f"note: {verdict.note}")
    if not verdict.attached:
        say(f"error: the plug-in did not get in: {verdict.reason}")
        say(verdict.hint)
    if read is not None:
        say(f"report: ggml-async report {shlex.quote(os.path.relpath(path))}")
    return code if verdict.attached or code else ExitCode.NOT_INSTRUMENTED
