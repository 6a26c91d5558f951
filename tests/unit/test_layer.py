"""The Vulkan layer from Python: where it is, which variables load it, and reading its counters."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ggml_async import layer
from ggml_async.env import Env
from ggml_async.layer import LayerSnapshot

NAMES = (layer.LIBRARY, layer.MANIFEST)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the layer's files beside the library that GGML_ASYNC_LIBRARY names."""
    path = tmp_path / "native"
    path.mkdir()
    for name in NAMES:
        (path / name).touch()
    monkeypatch.setenv(Env.LIBRARY.key, str(path / "libggml-async.so"))
    return path.resolve()


# ---- where it is


def test_it_is_found_beside_the_library(folder: Path) -> None:
    assert layer.layer_dir() == folder
    assert layer.absence() is None and layer.why_absent() is None


@pytest.mark.parametrize("missing", NAMES)
def test_half_a_layer_is_none_and_the_reason_is_one_sentence(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    assert layer.layer_dir() is None
    assert layer.layer_environment({}) == {}
    why = layer.why_absent()
    assert why is not None and "\n" not in why and str(folder) in why and Env.LIBRARY.key in why


def test_a_package_built_without_headers_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(Env.LIBRARY.key, raising=False)
    monkeypatch.setattr(layer.resources, "files", lambda _package: tmp_path)
    assert "libvulkan-dev" in (layer.why_absent() or "")


# ---- the variables

#: What the user's variable may be: unset, empty, one folder, two, empty elements, with ours in it.
PATHS = (None, "", "/a", "/a:/b", ":/a::/b:", "OURS:/a", "/a:OURS")
LAYERS = (None, "", "VK_LAYER_A", "VK_LAYER_A:VK_LAYER_B", ":VK_LAYER_A:", f"{layer.NAME}:VK_LAYER_A", layer.NAME)


@pytest.mark.parametrize(("path", "added", "layers"), list(itertools.product(PATHS, PATHS, LAYERS)))
def test_ours_is_added_to_what_the_user_has(
    folder: Path, path: str | None, added: str | None, layers: str | None
) -> None:
    given = {"VK_LAYER_PATH": path, "VK_ADD_LAYER_PATH": added, "VK_INSTANCE_LAYERS": layers}
    environ = {k: v.replace("OURS", str(folder)) for k, v in given.items() if v is not None}
    before = dict(environ)
    changed = layer.layer_environment(environ)
    assert environ == before, "the user's own mapping was changed"
    # the loader looks at one of the two paths only
    used, unused = ("VK_LAYER_PATH", "VK_ADD_LAYER_PATH") if path else ("VK_ADD_LAYER_PATH", "VK_LAYER_PATH")
    assert set(changed) == {used, "VK_INSTANCE_LAYERS"} and unused not in changed
    for variable, ours in ((used, str(folder)), ("VK_INSTANCE_LAYERS", layer.NAME)):
        elements = changed[variable].split(os.pathsep)
        users = [e for e in before.get(variable, "").split(os.pathsep) if e]
        assert "" not in elements
        assert elements == (users if ours in users else [*users, ours])
    assert layer.layer_environment({**environ, **changed}) == changed, "a second time changes nothing"


# ---- the counters


def test_without_the_layer_in_the_process_there_are_no_counters() -> None:
    code = "from ggml_async import layer; print(layer.LayerCounters.find())"
    assert in_a_child(code) == "None"


def test_a_loaded_layer_is_read_by_name(real_layer: Path) -> None:
    code = f"""
import ctypes
from ggml_async import layer
ctypes.CDLL({str(real_layer)!r})
found = layer.LayerCounters.find()
seen = found.snapshot()
assert {{"queue_submits", "fence_waits", "fence_wait_ns", "copies_to_host"}} <= set(seen.totals), seen
assert list(seen.causes)[:4] == ["elsewhere", "readback", "token", "upload"], seen
assert all("cause_fence_waits" in counters for counters in seen.causes.values()), seen
assert not any(seen.totals.values()), seen
print(found.path(), found.devices())
"""
    assert in_a_child(code) == f"{real_layer} 0"


def test_a_layer_of_another_abi_is_refused(real_layer: Path) -> None:
    code = f"""
import ctypes
from ggml_async import errors, layer
ctypes.CDLL({str(real_layer)!r})
layer.ABI_VERSION = 99
try:
    layer.LayerCounters.find()
except errors.GgmlAsyncError as error:
    print(error.message, int(error.exit_code))
"""
    assert in_a_child(code).endswith("this package needs 99 3")


def test_snapshots_are_subtracted_counter_by_counter() -> None:
    before = LayerSnapshot({"a": 1, "b": 5}, {"token": {"c": 2}, "load": {"c": 0}})
    after = LayerSnapshot({"a": 4, "b": 5}, {"token": {"c": 9}, "load": {"c": 1}})
    assert after - before == LayerSnapshot({"a": 3, "b": 0}, {"token": {"c": 7}, "load": {"c": 1}})


@pytest.fixture
def real_layer(real_library: Path) -> Path:
    """The built layer; skips where the package was built without the Vulkan headers."""
    found = layer.layer_dir()
    if found is None:
        pytest.skip(layer.why_absent() or "")
    return found / layer.LIBRARY


def in_a_child(code: str) -> str:
    """What a fresh process prints: a library, once loaded, stays."""
    root = Path(layer.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
