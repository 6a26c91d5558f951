"""``ggml-async profile``: flags in, results out. What is measured is in ``profile.py``, how it looks in ``report/``."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ggml_async.cli.main import print_error, set_up_logging
from ggml_async.cli.output import ENDINGS, ProgressLine, ResultFile, default_json_file
from ggml_async.errors import UsageError
from ggml_async.gguf_file import GgufFile, read
from ggml_async.profile import Outcome, Profiler
from ggml_async.profile_plan import (
    DEFAULT_N_GEN,
    DEFAULT_N_PROMPT,
    DEFAULT_REPETITIONS,
    DEFAULT_SEED,
    FORMATS,
    Options,
    Plan,
    check_options,
    default_threads,
    make_plan,
)
from ggml_async.report import Writer, render

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
@_list("-p", "--n-prompt", default=DEFAULT_N_PROMPT, text="Prompt tokens: one test each.")
@_list("-n", "--n-gen", default=DEFAULT_N_GEN, text="Generated tokens: one test each.")
@click.option("-pg", "n_pg", multiple=True, metavar="PP,TG", help="A prompt, then generation, timed together.")
@_list("-d", "--n-depth", default="0", text="Tokens in the context before the timed ones.")
@click.option(
    "-r",
    "--repetitions",
    type=int,
    default=DEFAULT_REPETITIONS,
    show_default=True,
    help="Repetitions of each arm, interleaved in random order.",
)
@_list("-ngl", "--n-gpu-layers", default="all", text="Layers on the GPU: a number, -1 or all.")
@_list("-ncmoe", "--n-cpu-moe", default="all; 0 with -ot", text="Experts of the first N layers on the CPU; half, all.")
@click.option(
    "-ot",
    "--override-tensor",
    "overrides",
    multiple=True,
    metavar="PATTERN=BUFFER[;...]",
    help="Tensors by name into a buffer (CPU or a device); a comma starts the next test's.",
)
@_list("-dev", "--device", "devices", default="auto: the first GPU", text="Devices A/B, or none.")
@_list("-t", "--threads", default=f"physical cores: {default_threads()}", text="CPU threads.")
@_list("-c", "--ctx-size", default="what the test needs", text="Context size.")
@_list("-b", "--batch-size", "n_batch", default="2048", text="Most tokens of one decode.")
@_list("-ub", "--ubatch-size", "n_ubatch", default="512", text="Most tokens computed at once.")
@_list("-fa", "--flash-attn", default="auto", text="Flash attention: auto, on or off.")
@click.option("--arms", default="stock,async", show_default=True, help="What to measure: of stock, async, off.")
@click.option("--seed", type=int, default=DEFAULT_SEED, show_default=True, help="Of tokens and order.")
@click.option("--no-warmup", is_flag=True, help="Time the first run too.")
@click.option("--no-layer", is_flag=True, help="Leave Vulkan's fence waits and queue submits uncounted.")
@click.option("--llama", metavar="DIR", type=click.Path(path_type=Path), help="Folder of llama.cpp libraries to use.")
@click.option("-o", "--output", type=click.Choice(FORMATS), help="Format of the results.  [default: md]")
@click.option(
    "--output-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Results in the -o format go there; without -o the table is printed and the JSON goes there "
    "(or what FILE's ending names).",
)
@click.option("--progress", is_flag=True, help="Say how far it is, also where stderr is no terminal.")
@click.option("-v", "--verbose", count=True, help="Log to stderr; twice: llama.cpp's debug lines too.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no notes on stderr, only warnings and errors.")
@click.option("--debug-executor", hidden=True, help="MODULE:FACTORY of an executor in place of llama.cpp, for tests.")
@click.pass_context
def profile(ctx: click.Context, /, **flags: Any) -> int:
    """Measure what reading GPU tensors back to the CPU costs in MODEL: llama.cpp's own path (stock) against queued
    reads (async), on one loaded model, runs interleaved in random order, with the logits compared bit by bit.

    By default all MoE layers' experts are on the CPU and everything else is on the first GPU. Flags are named as in
    llama-bench; lists (4,8), ranges (1-4, 0-32+8, 1-64*2) and repeated flags give all combinations.

    \b
    Examples:
      ggml-async profile model.gguf
      ggml-async profile model.gguf -ncmoe half,all -t 8,14 -o csv
      ggml-async profile -m model.gguf -ot 'blk\\.[0-3]\\.ffn_.*_exps=CPU' -n 64
    """
    verbose = flags["verbose"] + (ctx.obj or {}).get("verbose", 0)
    set_up_logging(verbose, flags["quiet"])
    options = Options(
        repetitions=flags["repetitions"], seed=flags["seed"], arms=flags["arms"], warmup=not flags["no_warmup"],
        **{name: flags[name] for name in (
            "n_prompt", "n_gen", "n_pg", "n_depth", "n_batch", "n_ubatch", "threads", "ctx_size", "n_gpu_layers",
            "n_cpu_moe", "overrides", "devices", "flash_attn",
        )},
    )  # fmt: skip
    check_options(options)
    path = _model_path(flags["model_argument"], flags["model_flag"])
    with contextlib.ExitStack() as stack:
        sink = _Sink(flags["output"], flags["output_file"])
        stack.callback(sink.discard)
        model = read(path or _demo_model(flags["quiet"]))
        check_options(options, model)
        stop = threading.Event()
        executor = _executor(
            flags["debug_executor"], model, flags["llama"], stop, flags["quiet"], use_layer=not flags["no_layer"]
        )
        stack.callback(executor.close)
        # only now: fetching and checking a runtime has no results to keep, the first Ctrl-C ends it
        stack.enter_context(_interruptible(stop))
        plan = make_plan(options, model, executor.devices())
        progress = ProgressLine(plain=flags["progress"], quiet=flags["quiet"])
        stack.callback(progress.pause)
        sink.start(plan)
        outcome = Profiler(
            plan, executor, _Both(progress, sink),
            expert_layers=model.expert_layers(), n_layer=model.n_layer or 0,
            command=["ggml-async", "profile", *_arguments()], should_stop=stop.is_set,
        ).execute()  # fmt: skip
        progress.pause()
        return _conclude(outcome, sink, quiet=flags["quiet"])


def _arguments() -> list[str]:
    """This process's own arguments behind the command's name."""
    args = sys.argv[1:]
    return args[args.index("profile") + 1 :] if "profile" in args else []


def _model_path(argument: str | None, flag: str | None) -> str | None:
    if argument and flag:
        raise UsageError(f"two models: {argument} and {flag}", "give MODEL or -m, not both; one model a run")
    return argument or flag


def _demo_model(quiet: bool) -> Path:
    from ggml_async import fetch  # noqa: PLC0415  # only this branch needs it

    path: Path = fetch.ensure_demo_model()
    if not quiet:
        click.echo(f"ggml-async: no MODEL given: profiling the demo model {path}", err=True)
    return path


def _executor(
    debug: str | None, model: GgufFile, llama: Path | None, stop: threading.Event, quiet: bool, *, use_layer: bool
) -> Any:
    if debug:
        module, _, factory = debug.partition(":")
        return getattr(importlib.import_module(module), factory)(model, stop.is_set)
    from ggml_async.profile_exec import open_executor  # noqa: PLC0415  # --help must not load libraries

    def say(line: str) -> None:
        if not quiet:
            click.echo(f"ggml-async: {line}", err=True)

    return open_executor(model, llama, stop.is_set, say, use_layer=use_layer)


@contextlib.contextmanager
def _interruptible(stop: threading.Event) -> Iterator[None]:
    """SIGINT sets the event, so that the current token is finished and results are kept; the next one stops at once."""
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
    """Everything results are written to. Files are checked when it is made, before anything is measured."""

    def __init__(self, fmt: str | None, path: Path | None) -> None:
        self.now = datetime.datetime.now(datetime.timezone.utc)
        self._file_format = fmt or (ENDINGS.get(path.suffix.lower(), "json") if path else None)
        self._out_format = None if fmt and path else fmt or "md"
        self._file = ResultFile(path) if path else None
        self._json: ResultFile | None = None
        self.trouble: UsageError | None = None
        # People read the table and lose the samples: keep the whole document for them, unless a file has it already.
        if "md" in (self._out_format, self._file_format) and self._file_format != "json":
            try:
                self._json = default_json_file(self.now)
            except UsageError as error:
                self.trouble = error
        self._writers: list[Writer] = []

    def start(self, plan: Plan) -> None:
        """The plan is known: rows may come."""
        if self._out_format:
            self._writers.append(Writer(self._out_format, _to_stdout, plan.varied))
        if self._file and self._file_format:
            self._writers.append(Writer(self._file_format, self._file.write, plan.varied))

    def row(self, document: Mapping[str, Any], test: Mapping[str, Any]) -> None:
        """One test is final. The JSON is kept as it grows, should llama.cpp end the process in a later test."""
        for writer in self._writers:
            writer.row(document, test)
        if self._json:
            self._json.replace(render("json", document))

    def finish(self, document: Mapping[str, Any]) -> list[tuple[str, Path]]:
        """Write what comes at the end; returns (format, place) of the files."""
        for writer in self._writers:
            writer.finish(document)
        if self._json:
            self._json.replace(render("json", document))
        files: list[tuple[str, Path]] = []
        if self._file and self._file_format:
            files.append((self._file_format, self._file.finish()))
        if self._json:
            files.append(("json", self._json.finish()))
        self._file = self._json = None
        return files

    def discard(self) -> None:
        """Leave nothing behind of files that were not finished."""
        for file in (self._file, self._json):
            if file:
                file.discard()


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class _Both:
    """Observer: progress, and the sink once the bar is out of the way."""

    def __init__(self, progress: ProgressLine, sink: _Sink) -> None:
        self.test_started = progress.test_started
        self.run_started = progress.run_started
        self.run_finished = progress.run_finished
        self._progress = progress
        self._sink = sink

    def test_finished(self, document: Mapping[str, Any], test: Mapping[str, Any]) -> None:
        """See profile.Observer."""
        self._progress.test_finished(document, test)
        self._sink.row(document, test)


def _conclude(outcome: Outcome, sink: _Sink, *, quiet: bool) -> int:
    files = sink.finish(outcome.document)
    for warn in outcome.warnings:
        if warn.code == "failed":
            continue  # printed as the error that it is
        where = f" ({warn.test})" if warn.test and len(outcome.document["tests"]) > 1 else ""
        click.echo(f"ggml-async: warning: {warn.message}{where}\n  {warn.hint}", err=True)
    if sink.trouble:
        trouble = sink.trouble
        click.echo(f"ggml-async: warning: the JSON is not kept: {trouble.message}\n  {trouble.hint}", err=True)
    if outcome.error:
        print_error(outcome.error.message, outcome.error.hint)
    if not quiet:
        for fmt, path in files:
            click.echo(f"ggml-async: {fmt} written to {shlex.quote(str(path))}", err=True)
    return int(outcome.exit_code)
