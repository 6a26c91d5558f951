"""ggml-async: asynchronous readbacks for an unmodified llama.cpp, and the proof of what they did."""

from __future__ import annotations

from .errors import GgmlAsyncError

__all__ = ["GgmlAsyncError", "__version__"]
__version__ = "0.1.0"
