"""Where the native library is, and its modes. Nothing heavy is imported: `run` must start fast and stay one thread."""

from __future__ import annotations

from enum import Enum
from importlib import resources
from pathlib import Path

from .env import Env
from .errors import ExitCode, GgmlAsyncError

_LIBRARY = "libggml-async.so"


class Mode(str, Enum):
    """What the plug-in does: nothing, measure llama.cpp's own path, or read back asynchronously."""

    OFF = "off"
    STOCK = "stock"
    ASYNC = "async"


def library_path() -> Path:
    """Path of ``libggml-async.so``: GGML_ASYNC_LIBRARY, else the one installed with this package.

    Raises:
        GgmlAsyncError: there is none; the package was not built.
    """
    override = Env.LIBRARY.get()
    path = Path(override) if override else Path(str(resources.files("ggml_async") / "_native" / _LIBRARY))
    if not path.is_file():
        raise GgmlAsyncError(
            f"the native library is not there: {path}",
            f"{Env.LIBRARY.key} must name a {_LIBRARY}"
            if override
            else "install the package (make install, or pip install .)",
            ExitCode.NOT_INSTRUMENTED,
        )
    return path.resolve()
