"""The import hook of `ggml-async run`: when it looks, what it attaches to, and that the program cannot tell.

Plug-in and binding are small libraries made here: the plug-in writes down what it is asked.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

from ggml_async import run_env

HOOK = Path(run_env.__file__).parent / "hook"

PLUGIN = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int n_attached;

static void note(const char * what, const char * name) {
    FILE * file = fopen(getenv("FAKE_LOG"), "a");
    fprintf(file, "%s %s\n", what, name);
    fclose(file);
}

int ggml_async_find(char * buffer, size_t size) {
    const char * host = getenv("FAKE_HOST");
    void *       handle = host ? dlopen(host, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    note("find", handle ? "one" : "none");
    snprintf(buffer, size, "%s\n", handle ? host : "");
    return handle != NULL;
}

int ggml_async_attach(const char * name) {
    const int n_early = atoi(getenv("FAKE_EARLY") ? getenv("FAKE_EARLY") : "0");
    const char * status = getenv("FAKE_STATUS");
    note("attach", strrchr(name, '/') + 1);
    return n_attached++ < n_early ? -8 : status ? atoi(status) : 0;
}

const char * ggml_async_last_error(void) {
    return "a reason";
}
"""

BINDING = r"""
#include <Python.h>

static PyObject * nothing(PyObject * self, PyObject * args) {
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    { "llama_backend_init", nothing, METH_VARARGS, "loads" },
    { "other", nothing, METH_VARARGS, "does not" },
    { NULL },
};

static struct PyModuleDef module = { PyModuleDef_HEAD_INIT, "binding", NULL, -1, methods };

PyMODINIT_FUNC PyInit_binding(void) {
    return PyModule_Create(&module);
}
"""


def _compile(folder: Path, name: str, text: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    include = sysconfig.get_path("include")
    if not compiler or not (Path(include) / "Python.h").is_file():
        pytest.skip("needs a C compiler and Python.h")
    source, library = folder / f"{name}.c", folder / f"{name}.so"
    source.write_text(text)
    subprocess.run(
        [compiler, "-shared", "-fPIC", f"-I{include}", "-o", library, source, "-ldl"], check=True, capture_output=True
    )
    return library


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libraries")
    _compile(folder, "plugin", PLUGIN)
    _compile(folder, "binding", BINDING)
    return folder


class World:
    """A Python with the hook, as `run` starts it."""

    def __init__(self, libraries: Path, folder: Path) -> None:
        self.libraries, self.folder = libraries, folder
        self.log = folder / "log"
        self.binding = libraries / "binding.so"

    def python(
        self, text: str, env: Mapping[str, str] | None = None, path: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        user = {"PYTHONPATH": str(self.libraries) if path is None else path}
        return subprocess.run(
            [sys.executable, "-c", text],
            cwd=self.folder, capture_output=True, text=True, timeout=60,
            env={**os.environ, "PYTHONPATH": run_env._python_path(user),
                 "GGML_ASYNC_HOOK": str(self.libraries / "plugin.so"), "FAKE_LOG": str(self.log),
                 "FAKE_HOST": str(self.binding), **(env or {})},
        )  # fmt: skip

    def attached(self) -> int:
        return self.calls().count("attach binding.so")

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def world(libraries: Path, tmp_path: Path) -> World:
    return World(libraries, tmp_path)


def good(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


# ---- when it looks


def test_an_extension_module_is_attached_to_once(world: World) -> None:
    good(world.python("import binding, binding; import sys; del sys.modules['binding']; import binding"))
    assert world.attached() == 1


def test_a_library_of_ctypes_is_attached_to(world: World) -> None:
    good(world.python(f"import ctypes; ctypes.CDLL({str(world.binding)!r}); ctypes.cdll.LoadLibrary('libc.so.6')"))
    assert world.attached() == 1


def test_ctypes_that_was_looked_for_before_it_was_imported(world: World) -> None:
    text = "import importlib.util; importlib.util.find_spec('ctypes'); import ctypes; ctypes.CDLL({!r})"
    good(world.python(text.format(str(world.binding))))
    assert world.attached() == 1


def test_ctypes_that_was_there_before_the_hook(world: World) -> None:
    text = (
        f"import sys; sys.path.insert(0, {str(HOOK)!r}); sys.modules.pop('sitecustomize', None)\n"
        "import os; os.environ['GGML_ASYNC_HOOK'] = os.environ['LATER']; import ctypes\n"
        "try:\n    import sitecustomize\nexcept ImportError: pass\n"
        f"ctypes.CDLL({str(world.binding)!r})"
    )
    plugin = str(world.libraries / "plugin.so")
    good(world.python(text, {"GGML_ASYNC_HOOK": "", "LATER": plugin}))
    assert world.attached() == 1


def test_a_program_without_extensions_is_spared(world: World) -> None:
    out = good(world.python("import sys, json, decimal, _json, array; print('ctypes' in sys.modules)"))
    assert out == "False\n" and world.calls() == []


def test_a_binding_without_its_backends_is_looked_at_again_after_its_loader(world: World) -> None:
    text = "import binding; binding.other(); print(open('log').read().count('attach')); binding.llama_backend_init()"
    assert good(world.python(text, {"FAKE_EARLY": "1"})) == "1\n"
    assert world.attached() == 2
    # and the function is what it was
    text = "import binding; print(binding.llama_backend_init.__name__, binding.llama_backend_init.__doc__)"
    assert good(world.python(text, {"FAKE_EARLY": "9"})) == "llama_backend_init loads\n"


def test_a_refusal_is_not_asked_for_again(world: World) -> None:
    good(world.python("import binding; import ctypes; ctypes.CDLL('libc.so.6')", {"FAKE_STATUS": "-3"}))
    assert world.attached() == 1


def test_two_threads_importing_at_once_miss_nothing(world: World) -> None:
    """One is still at it when the other has loaded the binding: it looks once more."""
    (world.folder / "threads.py").write_text(
        "import ctypes, threading\n"
        "inside, go = threading.Event(), threading.Event()\n"
        "ctypes.CDLL('libc.so.6')\n"
        "attacher = next(c.cell_contents for c in ctypes.CDLL.__init__.__closure__\n"
        "                if hasattr(c.cell_contents, '_look'))\n"
        "look = attacher._look\n"
        "def slow():\n"
        "    look(); inside.set(); go.wait(20)\n"
        "attacher._look = slow\n"
        "other = threading.Thread(target=lambda: ctypes.CDLL('libc.so.6'))\n"
        "other.start(); inside.wait(20)\n"
        f"ctypes.CDLL({str(world.binding)!r})\n"
        "go.set(); other.join()\n"
    )
    good(world.python("import threads", path=f"{world.libraries}:{world.folder}"))
    assert world.attached() == 1


# ---- the program cannot tell


def test_a_plug_in_that_cannot_be_loaded_breaks_nothing(world: World) -> None:
    assert good(world.python("import binding; print('fine')", {"GGML_ASYNC_HOOK": "/no/such/plugin.so"})) == "fine\n"
    done = world.python("import binding", {"GGML_ASYNC_HOOK": "/no/such/plugin.so", "GGML_ASYNC_DEBUG": "1"})
    assert done.returncode == 0 and "/no/such/plugin.so" in done.stderr


def test_debug_tells_what_was_done(world: World) -> None:
    assert "binding.so': 0" in world.python("import binding", {"GGML_ASYNC_DEBUG": "1"}).stderr
    refused = world.python("import binding", {"GGML_ASYNC_DEBUG": "1", "FAKE_STATUS": "-3"})
    assert "a reason" in refused.stderr


def test_the_user_s_own_sitecustomize_and_usercustomize_run(world: World) -> None:
    (world.folder / "sitecustomize.py").write_text("import sys; sys.mine = __file__")
    out = good(
        world.python("import sys, sitecustomize; print(sys.mine, sitecustomize.__file__)", path=str(world.folder))
    )
    assert out == f"{world.folder}/sitecustomize.py {world.folder}/sitecustomize.py\n"
    text = "import binding"
    good(world.python(text, path=f"{world.folder}:{world.libraries}"))
    assert world.attached() == 1


def test_an_error_in_the_user_s_sitecustomize_is_the_user_s(world: World) -> None:
    (world.folder / "sitecustomize.py").write_text("raise ValueError('theirs')")
    done = world.python("print('on')", path=str(world.folder))
    assert done.stdout == "on\n" and "ValueError: theirs" in done.stderr and "ImportError" not in done.stderr


def test_nothing_of_ours_can_be_found(world: World) -> None:
    bare = subprocess.run(
        [sys.executable, "-c", "import sys, json; print(json.dumps(sys.path))"],
        cwd=world.folder, env={**os.environ, "PYTHONPATH": str(world.libraries)}, capture_output=True, text=True,
    )  # fmt: skip
    text = "import sys, json; print(json.dumps(sys.path)); print('sitecustomize' in sys.modules, len(sys.meta_path))"
    path, rest = good(world.python(text)).splitlines()
    assert json.loads(path) == json.loads(bare.stdout)
    assert rest.startswith("False") or Path(json.loads(path)[-1], "sitecustomize.py").exists()


def test_children_are_of_the_run_too(world: World) -> None:
    good(world.python("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import binding'], check=True)"))
    assert world.attached() == 1


def test_without_the_variable_it_does_nothing(world: World) -> None:
    good(world.python("import binding", {"GGML_ASYNC_HOOK": ""}))
    assert world.calls() == []


def test_it_is_for_python_3_8_and_imports_only_the_standard_library() -> None:
    tree = ast.parse((HOOK / "sitecustomize.py").read_text(), feature_version=(3, 8))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)
