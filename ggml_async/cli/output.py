"""Where results go: files that are checked before anything is measured and never overwrite another, and progress."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import click
import platformdirs
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ggml_async.errors import GgmlAsyncError, UsageError
from ggml_async.profile_plan import Config
from ggml_async.profile_result import Run

#: File name endings that choose a format where -o was not given.
ENDINGS = {".md": "md", ".csv": "csv", ".json": "json", ".jsonl": "jsonl", ".sql": "sql"}


class ResultFile:
    """A file that appears under its name only when it is complete; until then its rows are in ``NAME.part``.

    Raises UsageError when created, should the place be taken or not writable: before hours of measuring.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(path.name + ".part")
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} exists", "name another file, or remove it: nothing is overwritten")
        if not path.parent.is_dir():
            raise UsageError(f"there is no folder {path.parent}", "create it, or name another")
        try:
            self._file: IO[str] = self._part.open("x", encoding="utf-8", newline="")
        except FileExistsError:
            hint = "another run is writing it, or one was killed: remove it, or name another file"
            raise UsageError(f"{self._part} exists", hint) from None
        except OSError as error:
            message = f"cannot write {path}: {error.strerror}"
            raise UsageError(message, "name a file in a folder you may write") from None

    def write(self, text: str) -> None:
        """Append, and hand it to the system at once."""
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise GgmlAsyncError(f"cannot write {self.path}: {error.strerror}", "make room, and run again") from None

    def replace(self, text: str) -> None:
        """Put `text` in place of everything written so far."""
        self._file.seek(0)
        self._file.truncate()
        self.write(text)

    def finish(self) -> Path:
        """Give it its name; removed instead when nothing was written. Returns where it is."""
        empty = self._file.tell() == 0
        self._file.close()
        if empty:
            self._part.unlink()
            return self.path
        try:
            # A link fails where the name was taken meanwhile; a rename would overwrite.
            os.link(self._part, self.path)
        except FileExistsError:
            return self._part
        except OSError:
            self._part.rename(self.path)
            return self.path
        self._part.unlink()
        return self.path

    def discard(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        with contextlib.suppress(OSError):
            self._part.unlink()


def default_json_file(now: datetime.datetime) -> ResultFile:
    """A new file for the full JSON in the user's state folder, named by time and process.

    Raises UsageError when that folder cannot be written.
    """
    folder = platformdirs.user_state_path("ggml-async", appauthor=False) / "profiles"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create {folder}: {error.strerror}", "use --output-file") from None
    stem = f"profile-{now:%Y%m%d-%H%M%S}-{os.getpid()}"
    for attempt in range(100):
        try:
            return ResultFile(folder / (f"{stem}.json" if not attempt else f"{stem}-{attempt}.json"))
        except UsageError:
            if attempt == 99:
                raise
    raise AssertionError("unreachable")


class ProgressLine:
    """An Observer that says on stderr how far it is: a bar on a terminal, plain lines with --progress elsewhere."""

    def __init__(self, *, plain: bool, quiet: bool) -> None:
        console = Console(stderr=True)  # it honours NO_COLOR and TERM=dumb
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._plain = plain and not quiet
        self._speeds: dict[str, list[float]] = {}
        self._label = ""
        if console.is_terminal and not console.is_dumb_terminal and not quiet:
            self._plain = False
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )

    def test_started(self, index: int, total: int, config: Config) -> None:
        """See profile.Observer."""
        self._speeds.clear()
        self._label = f"test {index}/{total} {config.test}"
        if self._bar:
            if self._task is None:
                self._task = self._bar.add_task(self._label, total=None)
            self._bar.start()
        self._show(0, 0, "loading and warming up")

    def run_started(self, done: int, total: int, arm: str) -> None:
        """See profile.Observer."""
        if self._bar:
            self._show(done, total, arm)

    def run_finished(self, done: int, total: int, run: Run) -> None:
        """See profile.Observer."""
        self._speeds.setdefault(run.arm, []).append(run.tok_s)
        self._show(done, total, f"{run.arm} {run.repetition + 1}: {run.tok_s:.2f} t/s")

    def test_finished(self, document: Mapping[str, Any], test: Mapping[str, Any]) -> None:
        """See profile.Observer."""
        self.pause()

    def pause(self) -> None:
        """Take the bar away, so that stdout may be written to the same terminal."""
        if self._bar:
            self._bar.stop()

    def _show(self, done: int, total: int, what: str) -> None:
        if self._bar and self._task is not None:
            speeds = ", ".join(f"{arm} {sum(v) / len(v):.2f} t/s" for arm, v in self._speeds.items())
            self._bar.update(
                self._task, completed=done, total=total or None, description=f"{self._label}: {speeds or what}"
            )
        elif self._plain:
            where = f" run {done}/{total}:" if total else ":"
            click.echo(f"ggml-async: {self._label}{where} {what}", err=True)
