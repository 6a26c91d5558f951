"""ggml-async: asynchronous readbacks for an unmodified llama.cpp, and the proof of what they did.

``ggml_async.attach()`` before a context is created is all an application needs. Importing loads no native library;
the first use does, and says what is missing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import GgmlAsyncError

if TYPE_CHECKING:
    from .native import Host, Mode, ReadQueue, Recorder, attach, find

__all__ = ["GgmlAsyncError", "Host", "Mode", "ReadQueue", "Recorder", "__version__", "attach", "find"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # late: `ggml-async --help` needs neither numpy nor cffi
    if name in __all__:
        return getattr(import_module(".native", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
