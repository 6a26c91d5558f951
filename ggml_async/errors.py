"""The one exception type, and the one table of exit codes."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command (README and docs are checked against this table)."""

    OK = 0  #: done
    FAILED = 1  #: it was tried and did not work
    USAGE = 2  #: bad flags or bad input
    NOT_INSTRUMENTED = 3  #: the plug-in did not load, or saw nothing it should have seen
    RUN_FAILED = 125  #: run: the program was not started, for a reason of ours
    NOT_EXECUTABLE = 126  #: run: the program was found but cannot be executed
    PROGRAM_NOT_FOUND = 127  #: run: there is no such program
    INTERRUPTED = 130  #: SIGINT; partial results were kept and are marked


class GgmlAsyncError(Exception):
    """One line that says what failed, one that says what to do next.

    Args:
        message: what failed, one line, no full stop needed.
        hint: what to do next; empty when nothing can be done.
        exit_code: what a command that cannot continue exits with.
    """

    def __init__(self, message: str, hint: str = "", exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class UsageError(GgmlAsyncError):
    """Bad flags or bad input: exit code 2."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint, ExitCode.USAGE)
