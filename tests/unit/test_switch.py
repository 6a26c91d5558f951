"""`ggml-async switch`: finds the control page of a program or of what it started, asks, waits, and says what happened.

The programs are small ones that keep the page as native/control.c does (native/tests holds the real one).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggml_async import control
from ggml_async.cli.main import run
from ggml_async.errors import ExitCode, GgmlAsyncError
from ggml_async.library import Mode

#: A program with a control page. Its arguments: hosts, mode; "deaf" never answers, "fork" leaves it to a child that
#: only inherited it, "parent" keeps it in a child.
PROGRAM = r"""
import ctypes, mmap, os, struct, sys, time
hosts, mode, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
libc = ctypes.CDLL(None, use_errno=True)
def say(text):
    os.write(1, f"{text}\n".encode())  # one piece, whoever writes beside us
if how == "parent":
    say("parent")
    if os.fork():
        os.wait()
        sys.exit()
fd = os.memfd_create("ggml-async-control", os.MFD_CLOEXEC)
os.ftruncate(fd, 4096)
page = mmap.mmap(fd, 4096)
page[:8] = b"GACTRL01"
struct.pack_into("<6I", page, 8, os.getpid(), 0, mode + 1, 0, hosts, 0)
if how == "fork" and os.fork():
    time.sleep(0.1)
    os._exit(0)
say(os.getpid())
word = ctypes.c_uint32.from_buffer(page, 12)
number = {"x86_64": 202, "aarch64": 98}[os.uname().machine]
changes = 0
while True:
    if how == "deaf":
        time.sleep(1)
    elif word.value:
        mode, word.value = word.value, 0
        changes += 1
        struct.pack_into("<2I", page, 16, mode, changes)
        say(f"changed {mode - 1}")
    else:
        # asleep until somebody wakes it: no timeout
        libc.syscall(number, ctypes.byref(word), 0, 0, None, None, 0)
"""

Started = tuple[subprocess.Popen[str], int]


class Programs:
    def __init__(self) -> None:
        self.running: list[subprocess.Popen[str]] = []

    def start(self, hosts: int = 1, mode: int = 2, how: str = "") -> Started:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(hosts), str(mode), how],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.running.append(process)
        assert process.stdout
        first = process.stdout.readline().strip()
        pid = int(process.stdout.readline()) if first == "parent" else int(first)
        return process, pid


@pytest.fixture
def programs() -> Iterator[Programs]:
    found = Programs()
    yield found
    for process in found.running:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_it_switches_and_says_from_what_to_what(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    process, pid = programs.start()
    assert run(["switch", str(pid), "stock"]) == 0
    assert capsys.readouterr().out == f"{pid}: async -> stock\n"
    assert run(["switch", str(pid), "off"]) == 0
    assert capsys.readouterr().out == f"{pid}: stock -> off\n"
    assert process.stdout
    assert [process.stdout.readline() for _ in range(2)] == ["changed 1\n", "changed 0\n"]


def test_asking_for_the_mode_that_it_has_reaches_it_too(programs: Programs) -> None:
    process, pid = programs.start(mode=1)
    assert control.switch(pid, Mode.STOCK) == [control.Switched(pid, Mode.STOCK, Mode.STOCK)]
    assert process.stdout and process.stdout.readline() == "changed 1\n"


def test_hosts_of_different_modes_had_none(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    _, pid = programs.start(mode=-1)
    assert run(["switch", str(pid), "async"]) == 0
    assert capsys.readouterr().out == f"{pid}: mixed -> async\n"


def test_what_a_program_started_is_switched_where_it_has_no_page_itself(programs: Programs) -> None:
    process, pid = programs.start(how="parent")
    assert pid != process.pid
    assert control.switch(process.pid, Mode.OFF) == [control.Switched(pid, Mode.ASYNC, Mode.OFF)]


def test_children_that_are_attached_to_nothing_are_passed_over(programs: Programs) -> None:
    """node-llama-cpp tries its libraries out in a child, which may still be there."""
    shell = subprocess.Popen(
        ["sh", "-c", f'{sys.executable} -c "$0" 0 2 "" & {sys.executable} -c "$0" 1 2 "" & wait', PROGRAM],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    programs.running.append(shell)
    assert shell.stdout
    both = {int(shell.stdout.readline()) for _ in range(2)}
    done = control.switch(shell.pid, Mode.STOCK)
    assert len(done) == 1 and done[0].pid in both


def error(pid: int, timeout: float = 5) -> GgmlAsyncError:
    with pytest.raises(GgmlAsyncError) as caught:
        control.switch(pid, Mode.STOCK, timeout)
    assert caught.value.hint
    return caught.value


def test_a_program_attached_to_nothing_is_3(programs: Programs) -> None:
    _, pid = programs.start(hosts=0)
    found = error(pid)
    assert found.exit_code == ExitCode.NOT_INSTRUMENTED and "attached to no ggml" in found.message


def test_a_program_without_the_plug_in_is_3() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        found = error(process.pid)
        process.kill()
    assert found.exit_code == ExitCode.NOT_INSTRUMENTED and "ggml-async run" in found.hint


def test_a_child_that_only_inherited_the_page_is_not_taken_for_its_owner(programs: Programs) -> None:
    process, child = programs.start(how="fork")
    process.wait()
    assert error(child).exit_code == ExitCode.NOT_INSTRUMENTED


@pytest.mark.parametrize("mode", [1, 2])  # what is asked for, and another
def test_a_program_that_does_not_answer_is_1(mode: int, programs: Programs) -> None:
    _, pid = programs.start(mode=mode, how="deaf")
    found = error(pid, timeout=0.2)
    assert found.exit_code == ExitCode.FAILED and "did not answer" in found.message


def test_a_stopped_program_switches_when_it_goes_on(programs: Programs) -> None:
    process, pid = programs.start()
    os.kill(pid, signal.SIGSTOP)
    assert "did not answer" in error(pid, timeout=0.2).message
    os.kill(pid, signal.SIGCONT)
    assert process.stdout and process.stdout.readline() == "changed 1\n"


def test_no_such_process_is_1() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    found = error(process.pid)
    assert found.exit_code == ExitCode.FAILED and "no process" in found.message


def test_a_process_of_somebody_else_s_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    found = error(os.getpid())
    assert found.exit_code == ExitCode.FAILED and "somebody else" in found.message


@pytest.mark.parametrize(
    "line", [["1", "fast"], ["x", "async"], ["0", "async"], ["1"], ["1", "async", "--timeout", "0"]]
)
def test_bad_arguments_are_2(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["switch", *line]) == ExitCode.USAGE
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_nothing_of_the_page_stays_open(programs: Programs) -> None:
    _, pid = programs.start()
    before = len(list(Path("/proc/self/fd").iterdir()))
    control.switch(pid, Mode.OFF)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert "ggml-async-control" not in Path("/proc/self/maps").read_text()
