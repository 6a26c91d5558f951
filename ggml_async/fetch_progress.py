"""One progress line for a fetch: a bar on a terminal, plain lines anywhere else. On stderr, results stay on stdout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import rich.console
import rich.progress

_MB = 1_000_000


class Progress:
    """Where fetching shows how far it is; ``Progress(quiet=True)`` shows nothing."""

    def __init__(self, *, quiet: bool = False, console: rich.console.Console | None = None) -> None:
        self._quiet = quiet
        self._console = console or rich.console.Console(stderr=True)

    @contextlib.contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """Show one task while the block runs; it gets a function to call with the bytes done so far.

        Args:
            label: what is being done.
            total: bytes it will take, None when that is not known.
        """
        if self._quiet:
            yield lambda _done: None
        elif self._console.is_terminal and not self._console.is_dumb_terminal:
            with self._bar(total) as bar:
                task = bar.add_task(label, total=total)
                yield lambda done: bar.update(task, completed=done)
        else:
            yield from self._lines(label, total)

    def _bar(self, total: int | None) -> rich.progress.Progress:
        columns: list[rich.progress.ProgressColumn] = [
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
        ]
        if total is not None:
            columns += [rich.progress.DownloadColumn(), rich.progress.TimeRemainingColumn()]
        return rich.progress.Progress(*columns, console=self._console, transient=True)

    def _lines(self, label: str, total: int | None) -> Iterator[Callable[[int], None]]:
        self._say(f"{label} ({total / _MB:.1f} MB)" if total else label)
        told = 0

        def advance(done: int) -> None:
            nonlocal told
            quarter = done * 4 // total if total else 0
            if quarter > told:
                told = quarter
                self._say(f"{label}: {25 * quarter} %")

        yield advance
        self._say(f"{label}: done")

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
