"""Child processes that run a module of this package: what may crash or hang does so there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_module(
    module: str, *args: str, timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m ggml_async.<module> ARGS`` and capture what it prints.

    Args:
        module: name within this package.
        args: its arguments; paths must be absolute.
        timeout: seconds.
        env: variables on top of ours.

    Raises:
        subprocess.TimeoutExpired: it was killed.
    """
    return subprocess.run(
        [sys.executable, "-m", f"{__package__}.{module}", *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **(env or {})},
        # -m looks into the current folder first, which may hold another ggml_async (a source tree)
        cwd=Path(__file__).resolve().parent.parent,
    )
