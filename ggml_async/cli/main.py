"""The command group: finds the subcommand, prints errors in two lines, knows the exit codes. No business logic."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from ggml_async import __version__
from ggml_async.errors import ExitCode, GgmlAsyncError

#: name: (module, attribute, one line for --help). A module is imported only when its command runs.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "run": ("ggml_async.cli.run", "run", "Run a program with the plug-in, the Vulkan layer and a capture."),
    "report": ("ggml_async.cli.report", "report", "Say what captures hold: tables, plots, comparisons."),
    "switch": ("ggml_async.cli.switch", "switch", "Set the mode of a program that is running."),
    "profile": ("ggml_async.cli.profile", "profile", "Measure what each readback costs, stock against async."),
    "verify": ("ggml_async.cli.verify", "verify", "Prove that async changes no bit of any logit, on real text."),
    "doctor": ("ggml_async.cli.doctor", "doctor", "Check this machine, the plug-in and the llama.cpp it finds."),
}

_log = logging.getLogger("ggml_async")


class LazyGroup(click.Group):
    """A group whose commands are imported only when they are asked for, so that --help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None when there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """As click's, but alone it prints errors and chooses exit codes our way; then it does not return."""
        if standalone_mode:
            sys.exit(run(args[0] if args else extra.get("args")))
        parent: Any = super()
        return parent.main(*args, standalone_mode=False, **extra)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, name="ggml-async", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ggml-async", message="%(prog)s %(version)s")
@click.option("-v", "--verbose", count=True, help="Log to stderr; twice: llama.cpp's debug lines too.")
@click.pass_context
def main(ctx: click.Context, verbose: int) -> None:
    """Asynchronous GPU readbacks for an unmodified llama.cpp, and the proof of what they did.

    \b
    Exit codes: 0 ok, 1 failed, 2 usage, 3 the plug-in did not load or saw
    nothing it should have seen, 130 interrupted.
    """
    ctx.obj = {"verbose": verbose}


def set_up_logging(verbose: int, quiet: bool = False) -> None:
    """Log to stderr: warnings of ours; with -v what we do and llama.cpp's log, with -vv its debug lines too."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    _log.handlers[:] = [handler]
    _log.propagate = False
    _log.setLevel(logging.ERROR if quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])
    # What llama.cpp says in an error is in our own error's hint already.
    logging.getLogger("ggml_async.llama").setLevel(logging.NOTSET if verbose else logging.CRITICAL)


def print_error(message: str, hint: str = "") -> None:
    """`ggml-async: error: message`, then the hint, on stderr."""
    click.echo(f"ggml-async: error: {message}", err=True)
    if hint:
        click.echo(hint, err=True)


def _os_error(error: OSError) -> int:
    """A write that failed. Where the reader went away (| head) there is nobody to tell."""
    _log.debug("traceback", exc_info=True)
    if isinstance(error, BrokenPipeError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 -- the exit must not flush into the pipe again
        return ExitCode.FAILED
    what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    print_error(what, "free some space or name another place (--output-file); what stdout goes to may be full")
    return ExitCode.FAILED


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return the exit code. Never raises."""
    try:
        arguments = None if argv is None else list(argv)
        result: Any = main.main(args=arguments, prog_name="ggml-async", standalone_mode=False)
        return result if isinstance(result, int) else ExitCode.OK
    except GgmlAsyncError as error:
        print_error(error.message, error.hint)
        return error.exit_code
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        text = " ".join(error.format_message().split())  # click puts a list of choices on lines of their own
        print_error(text, f"see {context.command_path if context else 'ggml-async'} --help")
        return ExitCode.USAGE
    except (KeyboardInterrupt, click.Abort):
        click.echo("ggml-async: interrupted", err=True)
        return ExitCode.INTERRUPTED
    except OSError as error:
        return _os_error(error)
    except Exception as error:
        _log.debug("traceback", exc_info=True)
        text = " ".join(str(error).split()) or "no message"
        print_error(f"unexpected {type(error).__name__}: {text}", "run it with -vv for the traceback, and report that")
        return ExitCode.FAILED


if __name__ == "__main__":
    main()
