"""`ggml-async run`: what it sets, what it passes on, and what it says when the plug-in did not get in.

The programs are small scripts; where a capture is wanted they write one by hand.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import capture_writer
import pytest

from ggml_async import layer, native, run_env, run_verdict
from ggml_async.env import Env
from ggml_async.errors import ExitCode, GgmlAsyncError
from ggml_async.native import Mode
from ggml_async.run_env import Options

ROOT = Path(__file__).parents[2]
LINE = [sys.executable, "-m", "ggml_async.cli.main", "run"]


def environ(**extra: str) -> dict[str, str]:
    package = str(Path(native.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": package, **extra}


def run(*arguments: Any, cwd: Path, **extra: Any) -> subprocess.CompletedProcess[str]:
    env = environ(**extra.pop("env", {}))
    return subprocess.run(
        [*LINE, *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True, timeout=60, **extra
    )


def python(text: str) -> list[str]:
    return ["--", sys.executable, "-c", text]


def captures(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.capture"))


# A program that writes a capture as the plug-in would: a hello, a host, one stage in mode async.
ATTACHED = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from pathlib import Path
import capture_writer as cw
w = cw.Writer(1)
w.hello()
w.host()
w.mode(2500, cw.ASYNC)
if "--stage" in sys.argv:
    w.event("stage", t_ns=3000, mode=cw.ASYNC, duration_ns=10, n_readbacks=2)
w.end(9000)
w.save(Path(os.environ["GGML_ASYNC_CAPTURE"]))
sys.exit(int(os.environ.get("CODE", "0")))
"""


# ---- what is set


def test_everything_is_set_and_nothing_of_the_user_s_replaced(tmp_path: Path) -> None:
    found = run_env.environment(
        Options(mode=Mode.STOCK, capture_limit=7),
        tmp_path / "c",
        {"PYTHONPATH": "/mine:/too", "VK_INSTANCE_LAYERS": "VK_LAYER_MINE", "VK_LAYER_PATH": "/layers"},
    )
    changes = found.changes
    assert changes[Env.MODE.key] == "stock"
    assert changes[Env.BACKEND_PATH.key] == changes[Env.HOOK.key] == str(native.library_path())
    assert changes[Env.CAPTURE.key] == str(tmp_path / "c") and changes[Env.CAPTURE_LIMIT.key] == "7"
    assert changes[Env.CONTROL.key] == "1"
    hook, *rest = changes["PYTHONPATH"].split(":")
    assert (Path(hook) / "sitecustomize.py").is_file() and rest == ["/mine", "/too"]
    if layer.layer_dir():
        assert changes["VK_INSTANCE_LAYERS"] == f"VK_LAYER_MINE:{layer.NAME}"
        assert changes["VK_LAYER_PATH"].startswith("/layers:") and "VK_ADD_LAYER_PATH" not in changes
    assert found.taken is None


def test_a_backend_path_of_the_user_s_is_left_alone_and_told(tmp_path: Path) -> None:
    found = run_env.environment(Options(), tmp_path / "c", {Env.BACKEND_PATH.key: "/other/backend.so"})
    assert Env.BACKEND_PATH.key not in found.changes
    assert found.taken == "/other/backend.so" and "/other/backend.so already" in found.notes[0]
    ours = run_env.environment(Options(), tmp_path / "c", {Env.BACKEND_PATH.key: str(native.library_path())})
    assert ours.taken is None


def test_no_layer_leaves_vulkan_alone(tmp_path: Path) -> None:
    found = run_env.environment(Options(layer=False), tmp_path / "c", {})
    assert not [name for name in found.changes if name.startswith("VK_")] and found.notes == []


def test_a_missing_layer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "layer_dir", lambda: None)
    found = run_env.environment(Options(), tmp_path / "c", {})
    assert "Vulkan headers" in found.notes[0] and not [n for n in found.changes if n.startswith("VK_")]


@pytest.mark.parametrize(
    ("option", "variable", "mode"), [(None, None, "async"), (None, "stock", "stock"), (Mode.OFF, "stock", "off")]
)
def test_the_mode_is_the_option_s_then_the_variable_s(
    option: Mode | None, variable: str | None, mode: str, tmp_path: Path
) -> None:
    environment: Mapping[str, str] = {Env.MODE.key: variable} if variable else {}
    assert run_env.environment(Options(mode=option), tmp_path, environment).changes[Env.MODE.key] == mode


def test_print_env_prints_and_runs_nothing(tmp_path: Path) -> None:
    done = run("--print-env", "--capture", "a b", "--", "touch", "ran", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    lines = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert lines[Env.CAPTURE.key] == f"'{tmp_path}/a b'" and lines[Env.MODE.key] == "async"
    assert list(tmp_path.iterdir()) == []


def test_the_program_gets_it(tmp_path: Path) -> None:
    done = run(
        *python("import os; print(os.environ['GGML_ASYNC'], os.environ['MINE'])"), cwd=tmp_path, env={"MINE": "x"}
    )
    assert done.stdout == "async x\n"


# ---- what passes through


@pytest.mark.parametrize("code", [0, 1, 42, 255])
def test_the_exit_code_is_the_program_s(code: int, tmp_path: Path) -> None:
    done = run("--", sys.executable, "-c", ATTACHED, "--stage", cwd=tmp_path, env={"CODE": str(code)})
    assert done.returncode == code


def test_a_program_ended_by_a_signal_is_128_and_it(tmp_path: Path) -> None:
    assert run("--", "sh", "-c", "kill -USR1 $$", cwd=tmp_path).returncode == 128 + signal.SIGUSR1


def test_stdin_and_both_outputs_are_the_program_s(tmp_path: Path) -> None:
    done = run("-q", "--", "sh", "-c", "cat; echo err >&2; exit 9", cwd=tmp_path, input="line\n")
    assert (done.returncode, done.stdout) == (9, "line\n")
    assert done.stderr.splitlines()[0] == "err"


def test_arguments_are_not_touched(tmp_path: Path) -> None:
    done = run(
        "--", sys.executable, "-c", "import sys; print(sys.argv[1:])", "--mode", "x", "--", "-h", "", cwd=tmp_path
    )
    assert done.stdout == "['--mode', 'x', '--', '-h', '']\n"
    # without the --, options end at the program's name
    done = run(sys.executable, "-c", "import sys; print(sys.argv[1:])", "--capture", cwd=tmp_path)
    assert done.stdout == "['--capture']\n"


def test_a_script_without_an_interpreter_line_goes_to_the_shell(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo $1; exit 5\n")
    script.chmod(0o755)
    done = run("--", "./script", "word", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (5, "word\n")


def test_output_streams(tmp_path: Path) -> None:
    """A line is there while the program still runs: it waits for our answer."""
    with subprocess.Popen(
        [*LINE, "--", "sh", "-c", "echo ready; read answer; echo got $answer; exit 4"],
        cwd=tmp_path, env=environ(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("yes\n")
        process.stdin.close()
        assert process.stdout.readline() == "got yes\n"
        assert process.wait(30) == 4


def _wait_for(path: Path, text: str) -> None:
    until = time.monotonic() + 30
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < until, path.read_text() if path.exists() else "no file"
        time.sleep(0.02)


#: Counts the signals it is sent; ends at the first that is not one of them.
COUNTING = """
import os, signal, sys, time
seen = []
def note(number, frame):
    seen.append(signal.Signals(number).name)
    open("seen", "w").write(" ".join(seen))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT):
    signal.signal(number, note)
open("ready", "w").write(f"{os.getpid()} {os.getpgid(0)}")
while len(seen) < int(sys.argv[1]):
    time.sleep(0.02)
time.sleep(0.3)
sys.exit(60 + len(seen))
"""


@pytest.mark.parametrize("whole_group", [False, True])
def test_each_signal_reaches_the_program_once(whole_group: bool, tmp_path: Path) -> None:
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT]
    with subprocess.Popen(
        [*LINE, "--", sys.executable, "-c", COUNTING, str(len(signals))],
        cwd=tmp_path, env=environ(), stderr=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip
        _wait_for(tmp_path / "ready", " ")
        child, group = map(int, (tmp_path / "ready").read_text().split())
        assert group == process.pid and child != process.pid  # one group, as a shell's job
        for n, number in enumerate(signals, 1):
            os.killpg(process.pid, number) if whole_group else process.send_signal(number)
            _wait_for(tmp_path / "seen", number.name)
            time.sleep(0.1)
            assert len((tmp_path / "seen").read_text().split()) == n
        assert process.wait(30) == 60 + len(signals)


def test_ctrl_c_at_a_terminal_reaches_the_program_once(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, [*LINE, "-q", "--", sys.executable, "-c", COUNTING, "1"], environ())
    _wait_for(tmp_path / "ready", " ")
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.WEXITSTATUS(status) == 61
    assert (tmp_path / "seen").read_text() == "SIGINT"


def test_the_program_has_the_terminal(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        text = "import os, sys; sys.exit(70 + all(os.isatty(n) for n in (0, 1, 2)))"
        os.execve(sys.executable, [*LINE, "-q", "--", sys.executable, "-c", text], environ())
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.WEXITSTATUS(status) == 71


def _start(folder: Path, program: Sequence[str], **extra: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*LINE, "-q", "--", *program], cwd=folder, env=environ(), stderr=subprocess.DEVNULL, **extra
    )


def test_it_stops_and_goes_on_with_the_program(tmp_path: Path) -> None:
    # a group of its own in our session: an orphaned one would not stop
    process = _start(tmp_path, [sys.executable, "-c", COUNTING, "1"], preexec_fn=os.setpgrp)
    try:
        _wait_for(tmp_path / "ready", " ")
        child = int((tmp_path / "ready").read_text().split()[0])
        process.send_signal(signal.SIGTSTP)
        until = time.monotonic() + 10
        while not os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG)[1]):
            assert time.monotonic() < until, "it did not stop"
            time.sleep(0.02)
        assert "State:\tT" in Path(f"/proc/{child}/status").read_text()
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 61
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None


def test_in_an_orphaned_group_nobody_stops(tmp_path: Path) -> None:
    process = _start(tmp_path, [sys.executable, "-c", COUNTING, "1"], start_new_session=True)
    try:
        _wait_for(tmp_path / "ready", " ")
        process.send_signal(signal.SIGTSTP)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 61
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None


def test_nothing_of_ours_outlives_a_killed_run(tmp_path: Path) -> None:
    """The witness ends with us, whatever ended us."""
    with subprocess.Popen(
        [*LINE, "-q", "--", "sleep", "60"], cwd=tmp_path, env=environ(), start_new_session=True
    ) as process:
        time.sleep(1)
        group = process.pid
        witness = subprocess.run(
            ["pgrep", "-g", str(group), "-x", "cat"], capture_output=True, text=True
        ).stdout.split()
        assert len(witness) == 1
        process.kill()
        process.wait()
    until = time.monotonic() + 10
    while Path(f"/proc/{witness[0]}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{witness[0]}").exists()
    os.killpg(group, signal.SIGKILL)  # the sleep


# ---- before the start


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--", "/no/such/program"], 127, "no such program"),
        (["--", "no-such-program-anywhere"], 127, "no such program"),
        (["--", "/"], 126, "is a folder"),
        (["--mode", "fast", "--", "true"], 125, "fast"),
        (["--adopt", "auto", "--", "true"], 125, "later version"),
        (["--capture", "/no/such/folder/c", "--", "true"], 125, "cannot write the capture"),
        (["--no-such-option", "--", "true"], 125, "no-such-option"),
        ([], 125, "PROGRAM"),
    ],
)
def test_what_cannot_start_says_why(arguments: Sequence[str], code: int, text: str, tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == code and text in done.stderr and done.stdout == ""
    assert len(done.stderr.splitlines()) == 2, done.stderr
    assert captures(tmp_path) == []


def test_a_bad_interpreter_is_found_out(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = run("--", "./script", cwd=tmp_path)
    assert done.returncode == 127 and "interpreter" in done.stderr and captures(tmp_path) == []


def test_a_capture_is_never_overwritten_unless_told(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("precious")
    done = run("--capture", "c", "--", "true", cwd=tmp_path)
    assert done.returncode == 125 and "--force" in done.stderr
    assert (tmp_path / "c").read_text() == "precious"
    done = run("--capture", "c", "--force", "--", sys.executable, "-c", ATTACHED, cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "c").read_bytes().startswith(b"GArc")


# ---- afterwards


def test_the_summary_is_four_lines_and_the_next_command(tmp_path: Path) -> None:
    done = run("--capture", "my c", "--", sys.executable, "-c", ATTACHED, "--stage", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == ""
    lines = [line.removeprefix("ggml-async: ") for line in done.stderr.splitlines()]
    assert lines[0] == f"capturing into {tmp_path}/my c"
    assert lines[-1] == "report: ggml-async report 'my c'"
    assert len(lines) == 6 and lines[1].startswith("in: plug-in")


def test_quiet_says_nothing(tmp_path: Path) -> None:
    done = run("-q", "--", sys.executable, "-c", ATTACHED, "--stage", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_plug_in_that_did_not_get_in_is_3_only_where_the_program_returned_0(tmp_path: Path) -> None:
    done = run("--", "true", cwd=tmp_path)
    assert done.returncode == 3 and "no ggml in it" in done.stderr
    assert captures(tmp_path) == []  # nothing was written: nothing is left
    assert run("--", "false", cwd=tmp_path).returncode == 1


def test_a_taken_variable_is_the_reason(tmp_path: Path) -> None:
    done = run("--", "true", cwd=tmp_path, env={Env.BACKEND_PATH.key: "/other.so"})
    assert done.returncode == 3 and "/other.so already" in done.stderr


def verdict(tmp_path: Path, write: str, program: Path = Path("/bin/true"), taken: str | None = None) -> Any:
    path = tmp_path / "c"
    names = {"cw": capture_writer}
    exec(write, names)
    names["w"].save(path)
    return run_verdict.judge(run_verdict.read_capture(path), str(program), taken)


def test_a_refusal_is_the_reason(tmp_path: Path) -> None:
    found = verdict(
        tmp_path, "w = cw.Writer(1); w.hello(); w.refused(5, -3, 'API version 9 is not known\\nuse another build')"
    )
    assert not found.attached
    assert "API version 9 is not known" in found.reason and found.hint == "use another build"


def test_attached_later_counts(tmp_path: Path) -> None:
    found = verdict(
        tmp_path, "w = cw.Writer(1); w.hello(); w.refused(5, -8, 'no CPU device yet'); w.host(); w.mode(6, cw.ASYNC)"
    )
    assert found.attached and "nothing was read back" in found.note


def test_off_has_nothing_to_see(tmp_path: Path) -> None:
    found = verdict(tmp_path, "w = cw.Writer(1); w.hello(); w.host(); w.mode(6, cw.OFF)")
    assert found.attached and not found.note


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\x7fELF ggml_backend_dev_count GGML_BACKEND_PATH", "never loaded its backends"),
        (b"\x7fELF ggml_backend_dev_count", "never reads GGML_BACKEND_PATH"),
        (b"\x7fELF nothing", "no ggml in it"),
        (b"#!/usr/bin/python3\n", "no ggml that the plug-in was told of"),
    ],
)
def test_the_likely_reason_is_read_from_the_files(content: bytes, text: str, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "prog"
    program.parent.mkdir()
    program.write_bytes(content)
    found = run_verdict.judge(None, str(program), None)
    assert not found.attached and text in found.reason and found.hint


def test_a_library_beside_the_program_tells_too(tmp_path: Path) -> None:
    program = tmp_path / "prog"
    program.write_bytes(b"\x7fELF")
    (tmp_path / "libggml.so").write_bytes(b"GGML_BACKEND_PATH")
    assert "never loaded its backends" in run_verdict.judge(None, str(program), None).reason


def test_a_capture_that_cannot_be_read_keeps_the_code(tmp_path: Path) -> None:
    text = "import os; open(os.environ['GGML_ASYNC_CAPTURE'], 'w').write('garbage that is no capture')"
    done = run(*python(text + "; raise SystemExit(8)"), cwd=tmp_path)
    assert done.returncode == 8 and "error" in done.stderr


def test_find_program_follows_path(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    with pytest.raises(GgmlAsyncError) as caught:
        run_env.find_program("tool", {"PATH": str(tmp_path)})
    assert caught.value.exit_code == ExitCode.NOT_EXECUTABLE
    (tmp_path / "tool").chmod(0o755)
    assert run_env.find_program("tool", {"PATH": str(tmp_path)}) == str(tmp_path / "tool")


def test_run_is_one_thread(tmp_path: Path) -> None:
    """A second one (numpy's) would take the signals that are meant to be passed on."""
    text = "import os, sys, ggml_async.cli.run; print(len(os.listdir('/proc/self/task')), 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], env=environ(), capture_output=True, text=True)
    assert done.stdout == "1 False\n", done.stderr
