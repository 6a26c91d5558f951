"""Attaches ggml-async to any ggml that this Python program loads. Put on PYTHONPATH by `ggml-async run`, for that run.

Bindings with compiled-in backends never read GGML_BACKEND_PATH. So after every import of an extension module from
outside the standard library, and every ctypes.CDLL, the plug-in looks for a ggml it is not attached to yet. Any Python
from 3.8 on may run this, with nothing installed: standard library only. It must never break or slow the program.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing itself is not needed, and takes time to import
if TYPE_CHECKING:
    from typing import Any

_HOOK = "GGML_ASYNC_HOOK"  # path of libggml-async.so
_HERE = os.path.dirname(os.path.abspath(__file__))
#: enum ggml_async_status: the ggml has not loaded its CPU backend yet.
_TOO_EARLY = -8
#: Functions of ggml and llama.cpp, as bindings name them again, after which a ggml has its backends.
_LOADERS = ("ggml_backend_load", "ggml_backend_reg", "llama_backend_init", "llama_model_load", "llama_load_model")


def _debug(text: str) -> None:
    if os.environ.get("GGML_ASYNC_DEBUG"):
        sys.stderr.write("ggml-async hook: %s\n" % text)


class _Attacher:
    def __init__(self, path: str) -> None:
        self.path = path
        self.library: Any = None
        self.done: set[bytes] = set()
        self.early = False  # a ggml had no backends yet
        self.busy = False
        self.wanted = False

    def look(self) -> None:
        """Attaches to what is new. Errors are the capture's to tell (REFUSED), never the program's."""
        self.wanted = True
        # Not a lock: a thread that imports must not wait. Who is at it looks once more.
        while self.wanted and not self.busy:
            self.busy = True
            self.wanted = False
            try:
                self._look()
            except Exception as error:
                _debug("%s: %s" % (type(error).__name__, error))
            finally:
                self.busy = False

    def _look(self) -> None:
        import ctypes

        if self.library is None:
            self.library = ctypes.CDLL(self.path)
            self.library.ggml_async_last_error.restype = ctypes.c_char_p
            self.wanted = False  # that CDLL was ours
        buffer = ctypes.create_string_buffer(65536)
        if self.library.ggml_async_find(buffer, ctypes.c_size_t(len(buffer))) <= 0:
            return
        self.early = False
        for name in buffer.value.split(b"\n"):
            if name and name not in self.done:
                host = self.library.ggml_async_attach(name)
                if host == _TOO_EARLY:
                    self.early = True
                else:
                    self.done.add(name)
                _debug("%r: %s" % (name, host if host >= 0 else self.library.ggml_async_last_error().decode()))

    def wrap_loaders(self, module: Any) -> None:
        """Looks again after the binding's own functions that load backends."""
        try:
            for name in [name for name in vars(module) if name.startswith(_LOADERS)]:
                function = vars(module)[name]
                if callable(function) and not isinstance(function, type):
                    setattr(module, name, self._and_look(function))
        except Exception as error:  # a module of its own kind
            _debug("%s: %s" % (type(error).__name__, error))

    def _and_look(self, function: Any) -> Any:
        from functools import update_wrapper

        def call_and_look(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if self.early:
                self.look()
            return result

        return update_wrapper(call_and_look, function)


def _watch_extensions(attacher: _Attacher) -> None:
    from importlib.machinery import ExtensionFileLoader

    standard = os.path.dirname(os.__file__)
    exec_module = ExtensionFileLoader.exec_module

    def exec_and_look(self: Any, module: Any) -> None:
        exec_module(self, module)
        path = getattr(self, "path", "")
        if not path.startswith(standard) or "-packages" in path:
            attacher.look()
            if attacher.early:
                attacher.wrap_loaders(module)

    ExtensionFileLoader.exec_module = exec_and_look  # type: ignore[method-assign]


def _watch_ctypes(attacher: _Attacher, module: Any) -> None:
    init = module.CDLL.__init__

    def init_and_look(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if getattr(self, "_name", None):
            attacher.look()

    init_and_look.__wrapped__ = init  # type: ignore[attr-defined]
    module.CDLL.__init__ = init_and_look


class _CtypesFinder:
    """Waits for the program to import ctypes, so that programs without it are spared."""

    def __init__(self, attacher: _Attacher) -> None:
        self.attacher = attacher

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "ctypes":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        exec_module = spec.loader.exec_module

        def exec_and_watch(module: Any) -> None:
            exec_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _watch_ctypes(self.attacher, module)

        spec.loader.exec_module = exec_and_watch  # type: ignore[method-assign]
        return spec


def _install() -> None:
    path = os.environ.get(_HOOK)
    if not path:
        return
    attacher = _Attacher(path)
    _watch_extensions(attacher)
    if "ctypes" in sys.modules:
        _watch_ctypes(attacher, sys.modules["ctypes"])
    else:
        sys.meta_path.insert(0, _CtypesFinder(attacher))


def _next_sitecustomize() -> None:
    """The user's own, as if this one were not there."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    # PYTHONPATH keeps us: children of this program are of its run.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        # What site expects where there is none; and nobody else finds one either.
        raise ImportError("No module named 'sitecustomize'", name="sitecustomize")
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    _install()
except Exception as error:
    _debug("%s: %s" % (type(error).__name__, error))
_next_sitecustomize()
