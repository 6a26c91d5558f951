"""Doctor: each check's status, reason and remedy, on recorded runtimes and recorded answers of its child."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ggml_async import doctor, fetch, layer, native, runtime
from ggml_async.cli.main import run
from ggml_async.doctor import Check, Status
from ggml_async.errors import ExitCode, GgmlAsyncError

CAPABLE = {"async_": True, "host_buffer": True, "events": True}
CPU = {"name": "CPU", "description": "a CPU", "type": "cpu", "async_": False, "host_buffer": False, "events": False}
GPU = {"name": "Vulkan0", "description": "a real GPU", "type": "gpu", **CAPABLE}
LAVAPIPE = {"name": "Vulkan0", "description": "llvmpipe (LLVM 15)", "type": "gpu", **CAPABLE}
SEEN = {
    "readbacks": 8,
    "stages": 4,
    "stock_synchronizes": 12,
    "async_synchronizes": 4,
    "declined": {},
    "identical": True,
    "layer": {
        "path": "/somewhere/layer.so",
        "abi": 1,
        "devices": 1,
        "stock": {"fence_waits": 13, "queue_submits": 49},
        "async": {"fence_waits": 5, "queue_submits": 45},
    },
}
LAYER_VARIABLES = {"VK_INSTANCE_LAYERS": "ours"}


class Machine:
    """What the runtimes are and what the readback's child answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.dir = tmp_path / "llama"
        self.found = [self.candidate("PATH", CPU, GPU)]
        self.answer: subprocess.CompletedProcess[str] | Exception = self.said(json.dumps(SEEN))
        self.asked: list[tuple[Any, ...]] = []
        monkeypatch.setattr(runtime, "candidates", lambda _explicit=None: self.found)
        monkeypatch.setattr(runtime, "select", self.select)
        monkeypatch.setattr(doctor, "run_module", self.run_module)
        monkeypatch.setattr(layer, "absence", lambda: None)
        monkeypatch.setattr(layer, "layer_environment", lambda _environ: dict(LAYER_VARIABLES))

    def candidate(self, origin: str, *devices: dict[str, Any], reason: str = "") -> runtime.Candidate:
        return runtime.Candidate(
            origin,
            self.dir / origin,
            verdict="refused" if reason else "ok",
            reason=reason,
            llama="b1",
            ggml="0.25.3",
            api_version=2,
            devices=list(devices),
            env={"GGML_VK_VISIBLE_DEVICES": "0"},
        )

    def select(self, _explicit: Path | None = None, *, allow_fetch: bool) -> runtime.Candidate:
        for candidate in self.found:
            if candidate.verdict == "ok":
                return candidate
        raise GgmlAsyncError("no usable llama.cpp", "fetch one" if not allow_fetch else "")

    @staticmethod
    def said(out: str, code: int = 0, err: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], code, out, err)

    def run_module(
        self, module: str, *args: str, timeout: float, env: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        assert Path(args[1]).is_dir() and timeout > 0
        self.asked.append((module, args[0], dict(env)))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, real_library: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def check(name: str, **flags: Any) -> Check:
    (found,) = [c for c in doctor.run_checks(**flags) if c.name == name]
    if found.status in (Status.FAIL, Status.WARN):
        assert found.remedy or name.startswith("runtime: "), "a failure needs a remedy"
    return found


# ---- the whole


def test_a_good_machine_is_ok_in_every_line(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == ExitCode.OK
    seen = capsys.readouterr()
    assert seen.err == ""
    header, *rows = seen.out.splitlines()
    assert header.split() == ["check", "status", "reason", "remedy"]
    assert rows.pop() == "attach the output of `ggml-async doctor --json` to a report"
    for name in (
        "python",
        "plug-in",
        "runtime: PATH",
        "device: CPU",
        "device: Vulkan0",
        "readback",
        "Vulkan layer",
        "cache",
        "machine",
    ):
        (row,) = [r for r in rows if r.startswith(name + " ")]
        assert row.removeprefix(name).split()[0] == "ok", row
    assert machine.asked == [
        ("doctor_readback", str(machine.dir / "PATH"), {"GGML_VK_VISIBLE_DEVICES": "0", **LAYER_VARIABLES})
    ]


def test_json_has_the_same_checks_and_nothing_else_on_stdout(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "--json"]) == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["ok"]) == ("ggml-async/doctor/1", True)
    assert [c["name"] for c in document["checks"]] == [c.name for c in doctor.run_checks()]
    assert all(set(c) == {"name", "status", "reason", "remedy"} for c in document["checks"])


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_failed_check_is_exit_code_1_with_the_whole_report(
    machine: Machine, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    machine.answer = Machine.said(json.dumps({**SEEN, "identical": False}))
    assert run(["doctor", *flags]) == ExitCode.FAILED
    out = capsys.readouterr().out
    assert "DIFFER" in out and "cache" in out
    if flags:
        assert json.loads(out)["ok"] is False


def test_a_warning_alone_is_exit_code_0(machine: Machine) -> None:
    machine.found = [machine.candidate("embedded", CPU, LAVAPIPE)]
    assert run(["doctor"]) == ExitCode.OK


# ---- the parts


def test_a_missing_package_and_a_missing_plug_in_fail_with_the_command_to_run(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = metadata.version

    def without_gguf(name: str) -> str:
        if name == "gguf":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    def missing() -> None:
        raise GgmlAsyncError("the native library is not there", "make install", ExitCode.NOT_INSTRUMENTED)

    monkeypatch.setattr(metadata, "version", without_gguf)
    monkeypatch.setattr(native, "native", missing)
    assert check("python").status is Status.FAIL
    assert check("python").remedy == "pip install gguf"
    assert check("plug-in") == Check("plug-in", Status.FAIL, "the native library is not there", "make install")


def test_a_plug_in_of_another_version_is_a_warning(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "__version__", "99.0")
    assert check("plug-in").status is Status.WARN
    assert "99.0" in check("plug-in").reason


def test_each_runtime_says_whether_it_is_used_or_why_not(machine: Machine) -> None:
    machine.found = [
        machine.candidate("PATH", reason="killed by SIGSEGV while loading"),
        machine.candidate("node_modules", CPU, GPU),
        machine.candidate("embedded", CPU, LAVAPIPE),
    ]
    refused = check("runtime: PATH")
    assert (refused.status, refused.reason) == (
        Status.SKIP,
        f"killed by SIGSEGV while loading ({machine.dir / 'PATH'})",
    )
    assert check("runtime: node_modules").reason.startswith("used: llama.cpp b1, backend API 2")
    assert check("runtime: embedded").reason.startswith("usable, not used: ")


@pytest.mark.parametrize("may_fetch", [False, True])
def test_no_runtime_fails_and_skips_the_readback(machine: Machine, may_fetch: bool) -> None:
    machine.found = [machine.candidate("PATH", reason="CPU only")]
    assert check("runtime: PATH", fetch=may_fetch).status is Status.WARN
    failed = check("runtime", fetch=may_fetch)
    assert (failed.status, failed.reason) == (Status.FAIL, "no usable llama.cpp")
    assert check("readback", fetch=may_fetch).status is Status.SKIP
    assert machine.asked == []


@pytest.mark.parametrize(
    ("device", "status", "words"),
    [
        (GPU, Status.OK, "async yes, pinned host buffer yes, events yes"),
        ({**GPU, "type": "igpu", "events": False}, Status.OK, "(igpu); async yes, pinned host buffer yes, events no"),
        (LAVAPIPE, Status.WARN, "async yes"),
        ({**GPU, "description": "SwiftShader Device"}, Status.WARN, "async yes"),
        ({**GPU, "async_": False}, Status.WARN, "async no"),
        ({**GPU, "async_": None, "host_buffer": None, "events": None}, Status.WARN, "a real GPU (gpu); "),
    ],
)
def test_a_device_is_judged_by_what_it_is_and_can_do(
    machine: Machine, device: dict[str, Any], status: Status, words: str
) -> None:
    machine.found = [machine.candidate("PATH", CPU, device)]
    seen = check("device: Vulkan0")
    assert seen.status is status
    assert words in seen.reason
    assert "None" not in seen.reason


# ---- the readback


@pytest.mark.parametrize(
    ("changed", "status", "words"),
    [
        ({}, Status.OK, "8 readbacks in 4 CPU splits: 4 waits instead of 12, logits identical"),
        ({"identical": False}, Status.FAIL, "logits DIFFER"),
        ({"declined": {"view_source": 2, "meta": 1}}, Status.WARN, "left to ggml: view_source 2, meta 1"),
        ({"readbacks": 0, "stages": 0}, Status.FAIL, "saw no readback"),
        ({"identical": False, "declined": {"meta": 1}, "readbacks": 0}, Status.FAIL, "DIFFER"),
    ],
)
def test_the_verdict_on_a_readback(machine: Machine, changed: dict[str, Any], status: Status, words: str) -> None:
    machine.answer = Machine.said("driver chatter\n" + json.dumps({**SEEN, **changed}) + "\n")
    seen = check("readback")
    assert seen.status is status
    assert words in seen.reason


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Machine.said("", -11, "vulkan: device lost\n"), "killed by signal 11: vulkan: device lost"),
        (Machine.said("", 1, "warning\nno such device\n"), "exit 1: no such device"),
        (Machine.said("", 0), "exit 0: no output"),
        (Machine.said(json.dumps(SEEN), -6, "abort"), "killed by signal 6: abort"),
        (Machine.said("free(): invalid pointer\n"), "its answer was not understood: free(): invalid pointer"),
        (Machine.said("{}\n"), "its answer was not understood: {}"),
        (subprocess.TimeoutExpired("python", 180), f"no answer in {doctor.READBACK_TIMEOUT_S} s"),
    ],
)
def test_a_child_that_ends_badly_fails_the_check_only(
    machine: Machine, answer: subprocess.CompletedProcess[str] | Exception, words: str
) -> None:
    machine.answer = answer
    seen = check("readback")
    assert seen.status is Status.FAIL
    assert seen.reason == words
    assert check("machine").status is Status.OK


def test_without_a_gpu_the_readback_is_skipped_with_the_reason(machine: Machine) -> None:
    machine.found = [machine.candidate("embedded", CPU)]
    skipped = check("readback")
    assert skipped.status is Status.SKIP and "no GPU" in skipped.reason
    assert machine.asked == []


def test_the_real_child_gives_its_error_in_the_last_line(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "ggml_async.doctor_readback", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(doctor.__file__).parents[1],
    )
    assert (child.returncode, child.stdout) == (1, "")
    assert child.stderr == f"no libllama in {tmp_path}\n"


# ---- the Vulkan layer


def test_the_layer_is_ok_with_its_path_and_what_it_saw(machine: Machine) -> None:
    seen = check("Vulkan layer")
    assert seen.status is Status.OK
    assert seen.reason == (
        "/somewhere/layer.so, ABI 1; in the readback check 5 fence waits instead of 13, 45 queue submits instead of 49"
    )


def test_a_package_built_without_vulkan_headers_says_so_and_what_to_install(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "absence", lambda: ("built without the headers", "install libvulkan-dev"))
    monkeypatch.setattr(layer, "layer_environment", lambda _environ: {})
    machine.answer = Machine.said(json.dumps({**SEEN, "layer": None}))
    seen = check("Vulkan layer")
    assert (seen.status, seen.remedy) == (Status.WARN, "install libvulkan-dev")
    assert seen.reason.startswith("built without the headers")
    assert check("readback").status is Status.OK


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        (None, Status.WARN, "the Vulkan loader did not load the layer"),
        ({**SEEN["layer"], "devices": 0}, Status.SKIP, "used no Vulkan device"),
        ({**SEEN["layer"], "async": {"fence_waits": 0, "queue_submits": 0}}, Status.FAIL, "saw no queue submit"),
    ],
)
def test_the_verdict_on_the_layer(machine: Machine, found: dict[str, Any] | None, status: Status, words: str) -> None:
    machine.answer = Machine.said(json.dumps({**SEEN, "layer": found}))
    seen = check("Vulkan layer")
    assert seen.status is status
    assert words in seen.reason


def test_where_vulkan_is_not_used_the_layer_is_skipped(machine: Machine) -> None:
    machine.found = [machine.candidate("PATH", CPU, {**GPU, "name": "CUDA0"})]
    assert check("Vulkan layer") == Check("Vulkan layer", Status.SKIP, "no Vulkan device: Vulkan is not used")
    machine.found = [machine.candidate("PATH", CPU)]
    assert check("Vulkan layer").status is Status.SKIP
    machine.found = [machine.candidate("PATH", reason="CPU only")]
    assert check("Vulkan layer").status is Status.SKIP


def test_a_driver_that_fails_under_the_layer_only_is_blamed_on_the_layer(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_module(module: str, *args: str, timeout: float, env: Mapping[str, str]) -> Any:
        bad = "VK_INSTANCE_LAYERS" in env
        return Machine.said("", -11, "boom") if bad else Machine.said(json.dumps({**SEEN, "layer": None}))

    monkeypatch.setattr(doctor, "run_module", run_module)
    assert check("readback").status is Status.OK
    seen = check("Vulkan layer")
    assert (seen.status, seen.remedy) == (Status.FAIL, "use profile --no-layer; please report this")
    assert "killed by signal 11: boom" in seen.reason


# ---- the cache


def test_the_cache_is_measured_without_being_made(machine: Machine) -> None:
    assert check("cache").status is Status.OK
    assert not fetch.cache_dir().exists()
    (fetch.cache_dir() / "models").mkdir(parents=True)
    (fetch.cache_dir() / "models" / "m.gguf").write_bytes(bytes(3_000_000))
    assert f"{fetch.cache_dir()}: 3 MB used" in check("cache").reason


def test_too_little_room_in_the_cache_is_a_warning(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CACHE_BYTES", 1 << 60)
    assert check("cache").status is Status.WARN


def test_a_cache_that_is_not_writable_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda _path, _mode: False)
    failed = check("cache")
    assert failed.status is Status.FAIL and "GGML_ASYNC_CACHE" in failed.remedy


def test_what_the_cache_holds_is_listed_piece_by_piece(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check("cache: demo model").status is Status.SKIP
    rows = [
        {"name": "runtime", "path": Path("/c/r"), "status": "ok", "bytes": 73_000_000},
        {"name": "demo model", "path": Path("/c/d"), "status": "damaged", "bytes": 1},
    ]
    monkeypatch.setattr(fetch, "cache_report", lambda: rows)
    assert check("cache: runtime") == Check("cache: runtime", Status.OK, "/c/r: 73 MB")
    damaged = check("cache: demo model")
    assert damaged.status is Status.WARN and "/c/d" in damaged.reason
