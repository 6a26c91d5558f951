"""Other ggml builds: wheels in the cache, each in a folder of its own, never installed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ggml_async import fetch


def wheel(name: str, version: str) -> Path:
    """Folder to put on PYTHONPATH; fetched by pip once for this Python, without dependencies."""
    root = fetch.cache_dir() / "hosts"
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"{name}-{version}-cp{sys.version_info[0]}{sys.version_info[1]}"
    with (root / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=root) as temporary:
                built = Path(temporary) / "built"
                done = subprocess.run(
                    [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                     "--only-binary", ":all:", "--target", str(built), f"{name}=={version}"],
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
                assert done.returncode == 0, f"pip could not fetch {name} {version}:\n{done.stderr[-2000:]}"
                built.replace(target)
    return target


def glibc() -> tuple[int, ...]:
    """The version of the C library that runs this."""
    return tuple(int(part) for part in os.confstr("CS_GNU_LIBC_VERSION").split()[-1].split(".")[:2])  # type: ignore[union-attr]
