"""The bridge to libggml-async: loading it, its names, and every way in which there is nothing to attach to."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import Compile

from ggml_async import __version__, native
from ggml_async.errors import ExitCode, GgmlAsyncError, UsageError

ROOT = Path(native.__file__).resolve().parent.parent
#: Prints an error as three lines: exit code, message, hint.
TRY = """
from ggml_async import native
from ggml_async.errors import GgmlAsyncError
try:
    {call}
except GgmlAsyncError as error:
    print(int(error.exit_code), error.message, error.hint, sep="\\n")
else:
    print("no error")
"""
STUB = "int ggml_async_abi_version(void) { return 99; }\n"


def in_child(call: str, **env: str) -> list[str]:
    """What a fresh process, where nothing of ggml is loaded, prints."""
    child = subprocess.run(
        [sys.executable, "-c", TRY.format(call=call)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, **env},
    )
    assert child.returncode == 0, child.stderr
    assert child.stderr == ""
    return child.stdout.splitlines()


def test_attaching_where_no_ggml_is_loaded_says_what_to_do_first(real_library: Path) -> None:
    code, message, hint = in_child("native.attach()")
    assert code == str(int(ExitCode.NOT_INSTRUMENTED))
    assert message == "no ggml is loaded in this process"
    assert hint == "load llama.cpp first, then attach"


def test_attaching_to_a_library_that_is_not_loaded_names_it(real_library: Path) -> None:
    code, message, hint = in_child("native.attach('/nowhere/libllama.so')")
    assert code == str(int(ExitCode.NOT_INSTRUMENTED))
    assert "/nowhere/libllama.so is not loaded" in message
    assert hint


def test_attaching_to_a_library_without_ggml_is_refused(real_library: Path) -> None:
    code, message, *_ = in_child("import math, _ctypes; native.attach(_ctypes.__file__)")
    assert code == str(int(ExitCode.NOT_INSTRUMENTED))
    assert "_ctypes" in message and "ggml" in message


def test_nothing_of_ggml_is_found_in_a_bare_process(real_library: Path) -> None:
    assert in_child("assert native.find() == []") == ["no error"]


def test_importing_loads_nothing(tmp_path: Path) -> None:
    call = "assert native._native is None"
    assert in_child(call, GGML_ASYNC_LIBRARY=str(tmp_path / "missing.so")) == ["no error"]


def test_a_missing_library_is_named_with_the_variable_that_named_it(tmp_path: Path) -> None:
    missing = tmp_path / "libggml-async.so"
    code, message, hint = in_child("native.attach()", GGML_ASYNC_LIBRARY=str(missing))
    assert code == str(int(ExitCode.NOT_INSTRUMENTED))
    assert str(missing) in message and "not there" in message
    assert "GGML_ASYNC_LIBRARY" in hint


def test_a_package_that_was_not_built_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GGML_ASYNC_LIBRARY", raising=False)
    monkeypatch.setattr(native.resources, "files", lambda _package: tmp_path)
    with pytest.raises(GgmlAsyncError) as caught:
        native.library_path()
    assert caught.value.exit_code is ExitCode.NOT_INSTRUMENTED
    assert "install" in caught.value.hint


def test_a_header_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.resources, "files", lambda _package: tmp_path)
    with pytest.raises(GgmlAsyncError, match=r"ggml_async\.h is not beside") as caught:
        native._declarations(tmp_path / "libggml-async.so")
    assert caught.value.exit_code is ExitCode.NOT_INSTRUMENTED


def test_a_library_that_does_not_load_is_one_error(tmp_path: Path, real_library: Path) -> None:
    garbage = tmp_path / "libggml-async.so"
    garbage.write_bytes(b"no ELF")
    code, message, hint = in_child("native.native()", GGML_ASYNC_LIBRARY=str(garbage))
    assert code == str(int(ExitCode.NOT_INSTRUMENTED))
    assert message.startswith(f"cannot load {garbage}: ")
    assert hint == "rebuild the package"


def test_a_library_of_another_abi_is_refused_with_both_numbers(
    tmp_path: Path, compile_library: Compile, real_library: Path
) -> None:
    other = compile_library(STUB, tmp_path / "libggml-async.so")
    code, message, hint = in_child("native.native()", GGML_ASYNC_LIBRARY=str(other))
    assert code == str(int(ExitCode.NOT_INSTRUMENTED))
    assert message == f"{other} has ABI 99, this package needs {native.ABI_VERSION}"
    assert "reinstall" in hint


def test_a_library_that_is_none_of_ours_is_one_error(
    tmp_path: Path, compile_library: Compile, real_library: Path
) -> None:
    other = compile_library("int nothing;", tmp_path / "libother.so")
    code, message, hint = in_child("native.native()", GGML_ASYNC_LIBRARY=str(other))
    assert code == str(int(ExitCode.NOT_INSTRUMENTED))
    assert message == f"{other} is not libggml-async" and hint


# ---- the loaded library


@pytest.fixture
def loaded(real_library: Path) -> native._Native:
    return native.native()


def test_the_library_and_the_package_are_of_one_version(loaded: native._Native) -> None:
    assert loaded.string(loaded.lib.ggml_async_version()) == __version__
    assert native.native() is loaded


def test_names_are_the_ones_of_the_header(loaded: native._Native) -> None:
    assert [native.path_name(path) for path in range(4)] == ["stock", "direct", "bounce", "empty"]
    assert native.path_name(99) == "" == native.decline_name(99)
    assert [native.record_kind(name) for name in ("readback", "stage", "upload", "compute", "token")] == [1, 2, 3, 4, 5]
    assert loaded.decline_names and len(set(loaded.decline_names)) == len(loaded.decline_names)
    assert native.decline_name(1) == loaded.decline_names[0]
    assert {f"declined_{name}" for name in loaded.decline_names} <= set(loaded.counter_names)
    assert {"readbacks", "stages", "synchronizes"} <= set(loaded.counter_names)
    for mode in native.Mode:
        number = loaded.lib.ggml_async_mode_parse(mode.value.encode())
        assert loaded.string(loaded.lib.ggml_async_mode_name(number)) == mode.value


def test_the_record_type_is_the_c_struct(loaded: native._Native) -> None:
    dtype = loaded.record_dtype
    assert dtype.itemsize == loaded.ffi.sizeof("struct ggml_async_record") == 176
    assert dtype["name"].itemsize == 64 and dtype["t_ns"] == np.dtype("<i8")
    assert dtype.names is not None and len(dtype.names) == 21


def test_a_recorder_starts_reads_and_stops_and_may_do_so_again(loaded: native._Native) -> None:
    for _ in range(2):
        with native.Recorder(capacity=100) as recorder:
            records = recorder.read()
            assert records.shape == (0,) and records.dtype == loaded.record_dtype
            assert recorder.dropped == 0
        assert recorder.read().shape == (0,)


def test_a_recorder_of_no_capacity_is_refused(loaded: native._Native) -> None:
    with pytest.raises(GgmlAsyncError, match="record capacity must be 1"), native.Recorder(0):
        pass


@pytest.mark.parametrize(
    "call",
    [
        lambda host: host.info(),
        lambda host: host.mode,
        lambda host: host.counters(),
        lambda host: host.reset_counters(),
        lambda host: host.detach(),
        lambda host: setattr(host, "mode", native.Mode.STOCK),
        native.ReadQueue,
    ],
)
def test_a_host_that_never_was_is_an_error_everywhere(loaded: native._Native, call: object) -> None:
    with pytest.raises(GgmlAsyncError, match="no host 77"):
        call(native.Host(77))  # type: ignore[operator]


def test_an_unknown_mode_is_a_usage_error_that_lists_the_modes(loaded: native._Native) -> None:
    with pytest.raises(UsageError) as caught:
        native.Host(0).mode = "fast"  # type: ignore[assignment]
    assert "fast" in caught.value.message
    assert "off, stock, async" in caught.value.hint


def test_log_lines_of_the_library_reach_logging_without_its_prefix(
    loaded: native._Native, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "ggml_async.native")
    loaded._on_log(3, loaded.ffi.new("char[]", b"ggml-async: careful\n"), loaded.ffi.NULL)
    assert caplog.record_tuples == [("ggml_async.native", logging.WARNING, "careful")]
