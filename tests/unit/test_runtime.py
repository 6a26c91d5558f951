"""Which llama.cpp is used: where it is looked for, what is refused and why, and what a refusal costs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Compile, Program
from test_cli_profile import write_model

from ggml_async import fetch, runtime
from ggml_async.cli.main import run
from ggml_async.errors import ExitCode, GgmlAsyncError, UsageError

CPU = {"name": "CPU", "description": "a CPU", "type": "cpu"}
GPU = {"name": "Vulkan0", "description": "a real GPU", "type": "gpu"}
LAVAPIPE = {"name": "Vulkan0", "description": "llvmpipe (LLVM 15.0.6, 256 bits)", "type": "gpu"}

Answers = dict[Path, Callable[[dict[str, str]], dict[str, Any]]]


def answer(*devices: dict[str, Any], llama: str = "b1") -> dict[str, Any]:
    return {"llama": llama, "ggml": "0.25.3", "api_version": 2, "devices": [CPU, *devices]}


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> tuple[Answers, list[tuple[Path, dict[str, str]]]]:
    """Recorded answers in place of child processes, by folder; and which questions were asked."""
    answers: Answers = {}
    asked: list[tuple[Path, dict[str, str]]] = []

    def check_once(directory: Path, env: dict[str, str]) -> dict[str, Any]:
        asked.append((directory, dict(env)))
        return answers[directory](env)

    monkeypatch.setattr(runtime, "_check_once", check_once)
    return answers, asked


def build(folder: Path, *names: str) -> Path:
    """A folder that looks like a llama.cpp build."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("libllama.so", *names):
        (folder / name).write_bytes(b"no ELF")
    return folder.resolve()


def python_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "site" / "llama_cpp"
    folder = build(package / "lib")
    (package / "__init__.py").write_text("raise SystemExit('a look must not import it')")
    monkeypatch.delitem(sys.modules, "llama_cpp")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


def node_module(tmp_path: Path, kind: str = "vulkan") -> Path:
    return build(tmp_path / f"node_modules/@node-llama-cpp/linux-x64-{kind}/bins/linux-x64-{kind}")


def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = build(tmp_path / "embedded", "libggml-vulkan.so")
    monkeypatch.setattr(fetch, "fetched_runtime_dir", lambda: folder)
    return folder


# ---- where to look


def test_installed_builds_come_in_order_of_preference_then_the_embedded_one(
    tmp_path: Path, empty_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch, checked: Any
) -> None:
    program("llama-server", "")
    folders = [
        build(empty_path),
        python_package(tmp_path, monkeypatch),
        node_module(tmp_path),
        node_module(tmp_path, "cuda"),
        embedded(tmp_path, monkeypatch),
    ]
    checked[0].update({folder: lambda _env: answer(GPU) for folder in folders})
    found = runtime.candidates()
    assert [c.origin for c in found] == ["PATH", "llama-cpp-python", "node_modules", "node_modules", "embedded"]
    assert [c.dir for c in found] == folders
    assert all(c.verdict == "ok" and not c.reason for c in found)
    assert runtime.select().dir == folders[0]


def test_a_program_that_is_a_link_leads_to_the_libraries_beside_its_target(
    tmp_path: Path, empty_path: Path, checked: Any
) -> None:
    folder = build(tmp_path / "opt" / "lib")
    program = tmp_path / "opt" / "bin" / "llama-bench"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o755)
    (empty_path / "llama-bench").symlink_to(program)
    checked[0][folder] = lambda _env: answer(GPU)
    assert [(c.origin, c.dir) for c in runtime.candidates()] == [("PATH", folder)]


def test_one_folder_found_twice_is_checked_once(empty_path: Path, program: Program, checked: Any) -> None:
    answers, asked = checked
    for name in ("llama-server", "llama-bench", "llama-cli"):
        program(name, "")
    folder = build(empty_path)
    answers[folder] = lambda _env: answer(GPU)
    assert len(runtime.candidates()) == 1
    runtime.select()
    assert asked == [(folder, {})]


@pytest.mark.parametrize("sub", ["", "lib", "bin", "build/bin", "llama"])
def test_the_root_of_a_release_or_build_tree_is_enough(sub: str, tmp_path: Path) -> None:
    folder = build(tmp_path / "tree" / sub)
    assert runtime.library_folder(tmp_path / "tree") == folder


def test_an_explicit_folder_is_the_only_candidate_and_goes_before_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: Any
) -> None:
    flag, variable, other = build(tmp_path / "flag"), build(tmp_path / "variable"), embedded(tmp_path, monkeypatch)
    checked[0].update({folder: lambda _env: answer(GPU) for folder in (flag, variable, other)})
    monkeypatch.setenv("GGML_ASYNC_LLAMA", str(variable))
    assert [(c.origin, c.dir) for c in runtime.candidates(flag)] == [("--llama", flag)]
    assert [(c.origin, c.dir) for c in runtime.candidates()] == [("GGML_ASYNC_LLAMA", variable)]
    monkeypatch.delenv("GGML_ASYNC_LLAMA")
    assert [c.origin for c in runtime.candidates()] == ["embedded"]


# ---- which one is taken


def test_a_cpu_only_build_is_passed_over_but_good_when_named(
    empty_path: Path, tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch, checked: Any
) -> None:
    program("llama-cli", "")
    installed, default = build(empty_path), embedded(tmp_path, monkeypatch)
    checked[0].update({installed: lambda _env: answer(), default: lambda _env: answer(LAVAPIPE)})
    refused, _ = runtime.candidates()
    assert (refused.verdict, refused.reason) == ("refused", "CPU only: there is no device to read back from")
    assert runtime.select().origin == "embedded"
    assert runtime.select(installed).verdict == "ok"


def test_a_real_gpu_wins_over_a_software_device_found_earlier(
    empty_path: Path, tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch, checked: Any
) -> None:
    program("llama-cli", "")
    installed, default = build(empty_path), embedded(tmp_path, monkeypatch)
    answers = checked[0]
    answers.update({installed: lambda _env: answer(LAVAPIPE), default: lambda _env: answer(GPU)})
    chosen = runtime.select()
    assert (chosen.origin, chosen.software_only) == ("embedded", False)
    runtime._check.cache_clear()
    answers[default] = lambda _env: answer(LAVAPIPE)
    chosen = runtime.select()
    assert (chosen.origin, chosen.software_only) == ("PATH", True)


def test_a_gpu_beside_a_software_device_is_not_software_only() -> None:
    both = runtime.Candidate("x", Path(), devices=[CPU, LAVAPIPE, GPU])
    assert both.has_gpu and not both.software_only
    none = runtime.Candidate("x", Path(), devices=[CPU])
    assert not none.has_gpu and not none.software_only


def needs_variable(env: dict[str, str]) -> dict[str, Any]:
    """A build that lists its software device only when told to."""
    return answer(LAVAPIPE) if env.get("GGML_VK_VISIBLE_DEVICES") == "0" else answer()


def test_a_software_device_that_must_be_asked_for_carries_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: Any
) -> None:
    folder = build(tmp_path / "build", "libggml-vulkan.so")
    checked[0][folder] = needs_variable
    chosen = runtime.select(folder)
    assert chosen.env == {"GGML_VK_VISIBLE_DEVICES": "0", "GGML_VK_DISABLE_FUSION": "1"}
    loaded = []
    monkeypatch.setattr(runtime, "LlamaLibrary", lambda directory: loaded.append((directory, dict(os.environ))))
    for name in chosen.env:
        monkeypatch.setenv(name, "to be restored")
    runtime.load(chosen)
    ((directory, seen),) = loaded
    assert directory == folder
    assert {name: seen[name] for name in chosen.env} == chosen.env


def test_a_real_gpu_needs_no_variables(tmp_path: Path, checked: Any) -> None:
    answers, asked = checked
    folder = build(tmp_path / "build", "libggml-vulkan.so")
    answers[folder] = lambda _env: answer(GPU)
    assert runtime.select(folder).env == {}
    assert asked == [(folder, {})]


def test_variables_that_the_user_set_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: Any
) -> None:
    answers, asked = checked
    folder = build(tmp_path / "build", "libggml-vulkan.so")
    answers[folder] = lambda _env: answer(LAVAPIPE)
    monkeypatch.setenv("GGML_VK_DISABLE_FUSION", "0")
    assert runtime.select(folder).env == {}
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "3")
    answers[folder] = lambda _env: answer()
    assert runtime.select(folder).env == {}
    assert asked == [(folder, {}), (folder, {})], "a changed variable is a new question, and 3 is never made 0"


# ---- refusals


def test_when_nothing_is_usable_every_reason_is_told(
    empty_path: Path, tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch, checked: Any
) -> None:
    program("llama-cli", "")
    folders = build(empty_path), node_module(tmp_path)
    checked[0].update(
        {folders[0]: lambda _env: answer(), folders[1]: lambda _env: {"error": "killed by SIGSEGV while loading"}}
    )
    with pytest.raises(GgmlAsyncError) as caught:
        runtime.select(allow_fetch=False)
    for part in ("PATH", str(folders[0]), "CPU only", "node_modules", str(folders[1]), "killed by SIGSEGV"):
        assert part in caught.value.message
    assert "doctor --fetch" in caught.value.hint and "--llama" in caught.value.hint


def test_with_nothing_installed_the_error_says_so() -> None:
    with pytest.raises(GgmlAsyncError, match=r"no usable llama\.cpp is installed, and the embedded one is not fetched"):
        runtime.select(allow_fetch=False)


def test_with_nothing_usable_the_embedded_one_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: Any
) -> None:
    folder = build(tmp_path / "fetched")
    monkeypatch.setattr(fetch, "ensure_runtime", lambda: folder)
    checked[0][folder] = lambda _env: answer()
    assert runtime.select().origin == "embedded"
    runtime._check.cache_clear()
    checked[0][folder] = lambda _env: {"error": "cannot load it"}
    with pytest.raises(GgmlAsyncError, match=r"embedded llama\.cpp is not usable: cannot load it") as caught:
        runtime.select()
    assert "--llama" in caught.value.hint


CRASH = "#include <stdlib.h>\n__attribute__((constructor)) static void init(void) {{ {} }}"
SEGFAULT = CRASH.format("*(volatile int *) 0 = 1;")
HANG = "#include <unistd.h>\n__attribute__((constructor)) static void init(void) { for (;;) pause(); }"
#: What --llama may name: (how it is made, what the refusal says).
BAD = [
    ("missing", "no such folder"),
    ("file", "no libllama*.so in it"),
    ("empty", "no libllama*.so in it"),
    ("garbage", "invalid ELF header|file too short"),
    ("crash", "killed by SIGSEGV while loading"),
    ("abort", "killed by SIGABRT while loading"),
    ("exit", "exit 7 while loading"),
    ("hang", "no answer in 1.5 s"),
    ("no functions", "lacks llama_"),
]


@pytest.fixture
def bad(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A folder that cannot be used, and what must be said about it."""
    what, reason = request.param
    sources = {
        "crash": SEGFAULT,
        "abort": CRASH.format("abort();"),
        "exit": CRASH.format("_Exit(7);"),
        "hang": HANG,
        "no functions": "int nothing;",
    }
    folder = tmp_path / "bad"
    if what == "file":
        folder.write_bytes(b"")
    elif what != "missing":
        folder.mkdir()
    if what == "garbage":
        build(folder)
    if what == "hang":
        monkeypatch.setattr(runtime, "CHECK_TIMEOUT_S", 1.5)
    if what in sources:
        compile_library = request.getfixturevalue("compile_library")
        shutil.copy(compile_library(sources[what], tmp_path / "built" / f"{what.replace(' ', '')}.so"), folder)
        next(folder.iterdir()).rename(folder / "libllama.so")
    return folder, reason


@pytest.mark.parametrize("bad", BAD, ids=[name for name, _ in BAD], indirect=True)
@pytest.mark.parametrize("command", ["profile", "doctor"])
def test_an_unusable_llama_folder_is_one_usage_error_that_names_the_cause(
    command: str, bad: tuple[Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, reason = bad
    extra = ["-m", str(write_model(tmp_path / "model.gguf"))] if command == "profile" else []
    assert run([command, *extra, "--llama", str(folder)]) == ExitCode.USAGE
    out, err = capfd.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith(f"ggml-async: error: --llama {folder}: ")
    assert any(part in first for part in reason.split("|")), first
    assert "libllama.so" in second


def test_a_bad_folder_in_the_variable_is_refused_by_the_variables_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_ASYNC_LLAMA", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"^GGML_ASYNC_LLAMA .*nowhere: no such folder"):
        runtime.select()


def test_a_crashing_installed_build_costs_only_a_refusal(
    empty_path: Path, tmp_path: Path, program: Program, compile_library: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = compile_library(SEGFAULT, tmp_path / "built.so")
    monkeypatch.setenv("PATH", str(empty_path))
    program("llama-cli", "")
    shutil.copy(library, empty_path / "libllama.so")
    (refused,) = runtime.candidates()
    assert (refused.origin, refused.verdict) == ("PATH", "refused")
    assert "SIGSEGV" in refused.reason


def test_a_plugin_that_cannot_attach_is_exit_3_with_the_plugins_own_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libllama.so").touch()
    answer = {"error": "another ggml-async is attached already", "hint": "load one copy only", "exit_code": 3}
    monkeypatch.setattr(runtime, "_check_once", lambda _directory, _env: answer)
    with pytest.raises(GgmlAsyncError) as caught:
        runtime.select(tmp_path)
    assert "another ggml-async" in caught.value.message
    assert (caught.value.hint, caught.value.exit_code) == ("load one copy only", ExitCode.NOT_INSTRUMENTED)
