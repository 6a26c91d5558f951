"""``ggml-async verify``: flags in, results out. The comparison is in ``verify.py``, formats in ``verify_report.py``."""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ggml_async.cli.main import print_error, set_up_logging
from ggml_async.cli.output import ENDINGS, ResultFile
from ggml_async.errors import UsageError
from ggml_async.gguf_file import GgufFile, read
from ggml_async.profile_plan import FORMATS, default_threads
from ggml_async.verify import Outcome, Verifier
from ggml_async.verify_plan import (
    DEFAULT_CHUNKS,
    DEFAULT_CTX,
    DEFAULT_NO_OP_OFFLOAD,
    DEFAULT_PROMPTS,
    Config,
    Options,
    check_options,
    make_plan,
)
from ggml_async.verify_report import Writer
from ggml_async.verify_text import read_text

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    # llama-bench takes _ for - in long names.
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 110,
}


def _list(*names: str, default: str, text: str) -> Callable[[Any], Any]:
    """A flag that may be repeated and takes lists and ranges."""
    return click.option(*names, multiple=True, metavar="LIST", help=f"{text}  [default: {default}]")


@click.command(context_settings=_SETTINGS)
@click.argument("model_argument", metavar="[MODEL]", required=False)
@click.option("-m", "--model", "model_flag", metavar="FILE", help="The GGUF, as MODEL.  [default: the demo model]")
@click.option("-f", "--file", metavar="FILE", type=click.Path(path_type=Path), help="Text.  [default: the shipped one]")
@_list("-c", "--ctx-size", default=DEFAULT_CTX, text="Tokens of a chunk.")
@click.option("--chunks", type=int, default=DEFAULT_CHUNKS, show_default=True, help="Chunks; -1 all there are, 0 none.")
@_list("--prompts", default=DEFAULT_PROMPTS, text="Prompt lengths, also as 1..128; none.")
@_list("-b", "--batch-size", "n_batch", default="2048", text="Most tokens of one decode.")
@_list("-ub", "--ubatch-size", "n_ubatch", default="512", text="Most tokens computed at once.")
@_list("-t", "--threads", default=f"physical cores: {default_threads()}", text="CPU threads.")
@_list("-ngl", "--n-gpu-layers", default="all", text="Layers on the GPU: a number, -1 or all.")
@_list("-ncmoe", "--n-cpu-moe", default="all; 0 with -ot", text="Experts of the first N layers on the CPU; half, all.")
@click.option(
    "-ot",
    "--override-tensor",
    "overrides",
    multiple=True,
    metavar="PATTERN=BUFFER[;...]",
    help="Tensors by name into a buffer (CPU or a device); a comma starts the next configuration's.",
)
@_list("-dev", "--device", "devices", default="auto: the first GPU", text="Devices A/B, or none.")
@_list("-fa", "--flash-attn", default="auto", text="Flash attention: auto, on or off.")
@_list(
    "-nopo", "--no-op-offload", default=DEFAULT_NO_OP_OFFLOAD, text="1: large batches compute CPU weights there too."
)
@click.option(
    "--dense", metavar="FILE", help="The dense model that MODEL was unfolded from: its perplexity is printed."
)
@click.option("--llama", metavar="DIR", type=click.Path(path_type=Path), help="Folder of llama.cpp libraries to use.")
@click.option("-o", "--output", type=click.Choice(FORMATS), help="Format of the results.  [default: md]")
@click.option(
    "--output-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Results in the -o format go there; without -o the table is printed and the JSON goes there "
    "(or what FILE's ending names).",
)
@click.option("--progress", is_flag=True, help="Say on stderr how far it is.")
@click.option("-v", "--verbose", count=True, help="Log to stderr; twice: llama.cpp's debug lines too.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no notes on stderr, only warnings and errors.")
@click.option("--debug-executor", hidden=True, help="MODULE:FACTORY of an executor in place of llama.cpp, for tests.")
@click.pass_context
def verify(ctx: click.Context, /, **flags: Any) -> int:
    """Decode real text in stock and async and compare the logits of every position bit by bit; print the perplexity
    of both, as llama-perplexity defines it.

    Flags are named as in llama-perplexity and llama-bench; lists (4,8), ranges (1-4, 0-32+8, 1-64*2) and repeated flags
    give all combinations. Exits with 1 on any difference, with 3 when nothing was read back in any configuration.

    \b
    Examples:
      ggml-async verify model.gguf
      ggml-async verify model.gguf -c 512 --chunks -1 -ncmoe 0-48+12 -ub 32,512 -t 4,8
      ggml-async verify -m model.gguf -f text.txt --prompts 1..128 -o json
    """
    set_up_logging(flags["verbose"] + (ctx.obj or {}).get("verbose", 0), flags["quiet"])
    names = (
        "ctx_size", "n_batch", "n_ubatch", "threads", "n_gpu_layers", "n_cpu_moe", "overrides", "devices", "flash_attn",
        "no_op_offload", "chunks", "prompts",
    )  # fmt: skip
    options = Options(**{name: flags[name] for name in names})
    check_options(options)
    text = read_text(flags["file"])
    path, dense_path = _models(flags)
    with contextlib.ExitStack() as stack:
        sink = _Sink(flags["output"], flags["output_file"])
        stack.callback(sink.discard)
        model = read(path)
        check_options(options, model)
        dense = read(dense_path) if dense_path else None
        stop = threading.Event()
        executor = _executor(flags, model, dense, stop)
        stack.callback(executor.close)
        # only now: fetching and checking a runtime has no results to keep, the first Ctrl-C ends it
        stack.enter_context(_interruptible(stop))
        plan = make_plan(options, model, executor.devices())
        sink.start(plan.varied)
        outcome = Verifier(
            plan, executor, _Observer(sink, progress=flags["progress"] and not flags["quiet"]), text,
            own_text=flags["file"] is not None, dense=str(dense_path) if dense_path else None,
            command=["ggml-async", "verify", *_arguments()], should_stop=stop.is_set,
        ).execute()  # fmt: skip
        return _conclude(outcome, sink, quiet=flags["quiet"])


def _arguments() -> list[str]:
    """This process's own arguments behind the command's name."""
    args = sys.argv[1:]
    return args[args.index("verify") + 1 :] if "verify" in args else []


def _models(flags: Mapping[str, Any]) -> tuple[Path, Path | None]:
    """The model, and the dense one to hold it against: known for the demo model."""
    argument, flag = flags["model_argument"], flags["model_flag"]
    if argument and flag:
        raise UsageError(f"two models: {argument} and {flag}", "give MODEL or -m, not both; one model a run")
    dense = Path(flags["dense"]) if flags["dense"] else None
    if argument or flag:
        return Path(argument or flag), dense
    from ggml_async import fetch  # noqa: PLC0415  # only this branch needs it

    demo = fetch.ensure_demo_model()
    if not flags["quiet"]:
        click.echo(f"ggml-async: no MODEL given: verifying the demo model {demo}", err=True)
    return demo, dense or fetch.ensure_smollm2()


def _executor(flags: Mapping[str, Any], model: GgufFile, dense: GgufFile | None, stop: threading.Event) -> Any:
    if flags["debug_executor"]:
        module, _, factory = flags["debug_executor"].partition(":")
        return getattr(importlib.import_module(module), factory)(model, stop.is_set)
    from ggml_async.verify_exec import open_verify_executor  # noqa: PLC0415  # --help must not load libraries

    def say(line: str) -> None:
        if not flags["quiet"]:
            click.echo(f"ggml-async: {line}", err=True)

    return open_verify_executor(model, dense, flags["llama"], stop.is_set, say)


@contextlib.contextmanager
def _interruptible(stop: threading.Event) -> Iterator[None]:
    """SIGINT sets the event, so that the current decode is finished and results are kept; the next stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def handler(_number: int, _frame: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Sink:
    """Everything results are written to. The file is checked when it is made, before anything is decoded."""

    def __init__(self, fmt: str | None, path: Path | None) -> None:
        self._file_format = fmt or (ENDINGS.get(path.suffix.lower(), "json") if path else None)
        self._out_format = None if fmt and path else fmt or "md"
        self._file = ResultFile(path) if path else None
        self._writers: list[Writer] = []

    def start(self, varied: frozenset[str]) -> None:
        """The plan is known: rows may come."""
        if self._out_format:
            self._writers.append(Writer(self._out_format, _to_stdout, varied))
        if self._file and self._file_format:
            self._writers.append(Writer(self._file_format, self._file.write, varied))

    def row(self, document: Mapping[str, Any], test: Mapping[str, Any]) -> None:
        """One configuration is final."""
        for writer in self._writers:
            writer.row(document, test)

    def finish(self, document: Mapping[str, Any]) -> Path | None:
        """Write what comes at the end; returns where the file is."""
        for writer in self._writers:
            writer.finish(document)
        place = self._file.finish() if self._file else None
        self._file = None
        return place

    def discard(self) -> None:
        """Leave nothing behind of a file that was not finished."""
        if self._file:
            self._file.discard()


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class _Observer:
    """Rows to the sink; with --progress lines on stderr."""

    def __init__(self, sink: _Sink, *, progress: bool) -> None:
        self._sink = sink
        self._progress = progress
        self._label = ""

    def test_started(self, index: int, total: int, config: Config) -> None:
        """See verify.Observer."""
        self._label = f"configuration {index}/{total} ({config.label})"
        self._say("loading")

    def advanced(self, done: int, total: int, what: str) -> None:
        """See verify.Observer."""
        self._say(f"{what}: {done}/{total} tokens")

    def test_finished(self, document: Mapping[str, Any], test: Mapping[str, Any]) -> None:
        """See verify.Observer."""
        self._sink.row(document, test)

    def _say(self, what: str) -> None:
        if self._progress:
            click.echo(f"ggml-async: {self._label}: {what}", err=True)


def _conclude(outcome: Outcome, sink: _Sink, *, quiet: bool) -> int:
    place = sink.finish(outcome.document)
    for warn in outcome.warnings:
        if warn.code == "failed":
            continue  # printed as the error that it is
        where = f" ({warn.test})" if warn.test and len(outcome.document["tests"]) > 1 else ""
        click.echo(f"ggml-async: warning: {warn.message}{where}" + (f"\n  {warn.hint}" if warn.hint else ""), err=True)
    if outcome.error:
        print_error(outcome.error.message, outcome.error.hint)
    if place and not quiet:
        click.echo(f"ggml-async: results written to {shlex.quote(os.fspath(place))}", err=True)
    return int(outcome.exit_code)
