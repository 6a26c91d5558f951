"""Fixtures for all unit tests: no network, nothing of the user's, and a compiler for stub libraries."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ggml_async import native, runtime
from ggml_async.env import Env
from ggml_async.errors import GgmlAsyncError

Compile = Callable[..., Path]
Program = Callable[[str, str], Path]

#: As they are before any test empties PATH.
PATH = os.environ.get("PATH", os.defpath)
COMPILER = shutil.which("cc")


@pytest.fixture(autouse=True)
def private_machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of the user's is read or written, and nothing is fetched, not even by a child process."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv(Env.CACHE.key, str(home / "cache"))
    for folder in ("STATE", "CACHE", "DATA", "CONFIG"):
        monkeypatch.setenv(f"XDG_{folder}_HOME", str(home / folder.lower()))
    for variable in (Env.LLAMA, Env.MODE, Env.BACKEND_PATH, Env.VK_VISIBLE_DEVICES, Env.VK_DISABLE_FUSION):
        monkeypatch.delenv(variable.key, raising=False)
    for variable, value in (("npm_config_offline", "true"), ("PIP_NO_INDEX", "1"), ("NO_COLOR", "1")):
        monkeypatch.setenv(variable, value)
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX, f"a unit test wants the network: {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)
    runtime._check.cache_clear()
    yield
    runtime._check.cache_clear()


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one empty folder, which is returned: no npm and no llama-server."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def program(empty_path: Path) -> Program:
    """Put a Python program on the otherwise empty PATH: program(name, source)."""

    def write(name: str, source: str) -> Path:
        path = empty_path / name
        path.write_text(f"#!{sys.executable}\n{source}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return write


@pytest.fixture(scope="session")
def compile_library(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compile C into a shared library: compile_library(source, path). Skips where there is no compiler."""
    scratch = tmp_path_factory.mktemp("c")

    def build(source: str, path: Path) -> Path:
        if COMPILER is None:
            pytest.skip("no C compiler (cc) to make a stub library with")
        path.parent.mkdir(parents=True, exist_ok=True)
        code = scratch / "stub.c"
        code.write_text(source)
        command = [COMPILER, "-w", "-shared", "-fPIC", "-o", str(path), str(code)]
        subprocess.run(command, check=True, env={**os.environ, "PATH": PATH})
        return path

    return build


@pytest.fixture(scope="session")
def real_library() -> Path:
    """The built plug-in; skips where it is not built."""
    try:
        return native.library_path()
    except GgmlAsyncError as error:
        pytest.skip(f"{error.message}; {error.hint}")
