"""A program as our child that cannot tell: it has our stdin, stdout, stderr, terminal and process group, every signal
reaches it exactly once, and its end is ours.

A signal to our process group (Ctrl-C, kill to a group) reaches the program by itself; one to us alone must be passed
on. The two look alike to us, so a third member of the group tells them apart: the *witness*, a process with all signals
blocked, which has the signal pending only if the whole group was meant.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import ExitCode, GgmlAsyncError

#: Signals that are passed on. SIGKILL and SIGSTOP cannot be; the terminal tells the group of its size by itself.
_PASSED = {
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP,
    signal.SIGCONT,
}  # fmt: skip
#: Until a signal to a group has reached all of it, seconds; it is one loop in the kernel.
_GROUP_DELAY = 0.005


class _Cat:
    """`cat` on a pipe of ours, with every signal blocked; it ends when we do, however that is."""

    def __init__(self) -> None:
        read, self._pipe = os.pipe()
        quiet = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_WRONLY, 0) for n in (1, 2)]
        try:
            self._pid = os.posix_spawnp(
                "cat", ["cat"], {"PATH": os.defpath}, file_actions=[(os.POSIX_SPAWN_DUP2, read, 0), *quiet],
                setsigmask=signal.valid_signals(),
            )  # fmt: skip
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(read)

    def pending(self) -> set[int]:
        """Signals that it was sent and has not taken: all that it ever was sent."""
        try:
            status = Path(f"/proc/{self._pid}/status").read_text()
        except OSError:
            return set()
        masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
        return {number for number in _PASSED if any(mask >> (number - 1) & 1 for mask in masks)}

    def stop(self) -> None:
        os.close(self._pipe)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class _Witness:
    """Tells a signal to the whole group from one to us. A signal stays pending in a `cat`, so each serves once."""

    def __init__(self) -> None:
        self._cat: _Cat | None = None
        self._seen: set[int] = set()  # by an earlier one, and not asked for yet
        with contextlib.suppress(OSError):  # a system without cat: every signal is taken for ours alone
            self._cat = _Cat()

    def saw(self, number: int) -> bool:
        """Whether the whole group was sent this signal."""
        if self._cat is None:
            return False
        time.sleep(_GROUP_DELAY)
        group = number in self._seen
        self._seen.discard(number)
        if number in self._cat.pending():
            group = True
            # The next one is there before this one goes: what comes meanwhile is in one of them at least.
            after = _Cat()
            self._seen |= self._cat.pending() - {number}
            self._cat.stop()
            self._cat = after
        return group

    def stop(self) -> None:
        """Ends it."""
        if self._cat is not None:
            self._cat.stop()
            self._cat = None


def _spawn(path: str, argv: Sequence[str], environ: Mapping[str, str], mask: set[signal.Signals]) -> int:
    # Python ignores these two; programs expect them as the shell left them.
    defaults = [signal.SIGPIPE, signal.SIGXFSZ]
    return os.posix_spawn(path, list(argv), dict(environ), setsigmask=mask, setsigdef=defaults)


def _start(path: str, argv: Sequence[str], environ: Mapping[str, str], mask: set[signal.Signals]) -> int:
    try:
        return _spawn(path, argv, environ, mask)
    except OSError as error:
        if error.errno == errno.ENOEXEC:  # a script without #!, which execvp gives to the shell
            return _spawn("/bin/sh", ["/bin/sh", path, *argv[1:]], environ, mask)
        code = ExitCode.PROGRAM_NOT_FOUND if error.errno == errno.ENOENT else ExitCode.NOT_EXECUTABLE
        raise GgmlAsyncError(
            f"cannot run {path}: {error.strerror}", "look at its interpreter (#!) and its rights", code
        ) from None


def _pass_on(number: int, child: int, witness: _Witness) -> None:
    if not witness.saw(number):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)
    if number == signal.SIGTSTP:
        # The shell waits for us to stop as the program did. By the signal itself: an orphaned group stops for none.
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def execute(path: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a program to its end.

    Args:
        path: of the program, found already.
        argv: its arguments, its name first.
        environ: its whole environment.

    Returns:
        Its exit code, or 128 + n when signal n ended it.

    Raises:
        GgmlAsyncError: it could not be started (126, 127).
    """
    handled = {*_PASSED, signal.SIGCHLD}
    before: set[signal.Signals] = {signal.Signals(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, handled)}
    witness = _Witness()
    try:
        child = _start(path, argv, environ, before)
        while True:
            # SIGCHLD may have come before, or stand for several children: ask first, then sleep.
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended == child:
                break
            number = signal.sigwaitinfo(handled).si_signo
            if number != signal.SIGCHLD:
                _pass_on(number, child, witness)
    finally:
        witness.stop()
        # What came for a program that is gone is not for us.
        while signal.sigtimedwait(handled, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
