"""A strict reader of GGUF headers: either a `GgufFile` or one `UsageError`, in milliseconds, for any input.

It refuses what ggml refuses and says why in one line, so that a bad file is named before anything is loaded. The
header is read, not mapped: nothing keeps the file mapped, and a file that shrinks meanwhile cannot kill the process.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from ggml_async.errors import UsageError

VERSIONS = (2, 3)  #: what llama.cpp loads
DEFAULT_ALIGNMENT = 32  #: bytes, when general.alignment is absent
MAX_DIMS = 4  #: GGML_MAX_DIMS
MAX_NAME = 127  #: bytes of a tensor name; builds of ggml differ (64 or 128 with the final NUL)
MAX_HEADER = 512 << 20  #: bytes; the largest real headers (big vocabularies) are some tens of MiB
MAX_STRINGS = 1 << 22  #: entries of one string array; ten times the largest vocabulary there is

_REFETCH = "The file is incomplete: fetch or copy it again."
_DAMAGED = "The file is damaged or was made to mislead: get it again from where it was published."
_MIXED_UP = "The parts are mixed up: fetch them again."
_BIG_ENDIAN = "Convert it with gguf-convert-endian, or get the little-endian file."
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<B",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
_MIN_KV, _MIN_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 4 + 8  # bytes of the smallest record of each kind
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_EXPERTS = re.compile(r"blk\.([0-9]{1,9})\.ffn_(?:gate_up|gate|up|down)_(?:ch)?exps\.")
_OTHER_MAGICS = (
    ((b"lmgg", b"fmgg", b"tjgg", b"algg"), "It is a model of an older ggml format: convert it to GGUF."),
    ((b"PK\x03\x04",), "It is a zip archive (a PyTorch checkpoint?): convert it to GGUF."),
    ((b"vers",), "It looks like a Git LFS pointer: run `git lfs pull` to get the file itself."),
    ((b"<!DO", b"<htm", b"<HTM", b"<?xm"), "It is a web page: the download link gave no model."),
)


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        name: as in the file.
        type: ggml's type; a plain int when gguf does not know it (then nbytes reaches to the next tensor).
        shape: in ggml's order, ne[0] (the contiguous dimension) first.
        offset: bytes from the start of `path`.
        nbytes: size of the data.
        path: the file that holds it (matters for split models).
    """

    name: str
    type: GGMLQuantizationType | int
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: Path


class _Entry(NamedTuple):
    start: int  # of the whole record, key included
    value: int  # of the value (of the first element for an array)
    end: int
    type: int  # of the value, or of the elements of an array
    items: int  # elements; -1 for a scalar


class Metadata(Mapping[str, Any]):
    """The key/value pairs of a file; a value is decoded when it is first asked for.

    Strings that are not UTF-8 are decoded with replacement characters (vocabularies hold such bytes).
    """

    def __init__(self, buffer: bytearray, entries: dict[str, _Entry]) -> None:
        self._buffer = buffer
        self._entries = entries
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            self._decoded[key] = self._decode(self._entries[key])
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def array_length(self, key: str) -> int | None:
        """Elements of an array without decoding it; None when `key` is absent or no array."""
        entry = self._entries.get(key)
        return None if entry is None or entry.items < 0 else entry.items

    def integer(self, key: str) -> int | None:
        """A non-negative integer; None when `key` is absent or something else."""
        value = None if self.array_length(key) is not None else self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    def raw(self, key: str) -> bytes:
        """The record as it stands in the file (key, type, value), for copies without loss."""
        entry = self._entries[key]
        return bytes(self._buffer[entry.start : entry.end])

    def _decode(self, entry: _Entry) -> Any:
        count = 1 if entry.items < 0 else entry.items
        if entry.type == GGUFValueType.STRING:
            values: list[Any] = list(self._strings(entry.value, count))
        else:
            values = list(struct.unpack_from(f"<{count}{_SCALARS[entry.type][1]}", self._buffer, entry.value))
        if entry.type == GGUFValueType.BOOL:
            values = [bool(value) for value in values]
        return values[0] if entry.items < 0 else values

    def _strings(self, pos: int, count: int) -> Iterator[str]:
        for _ in range(count):
            (size,) = _U64.unpack_from(self._buffer, pos)
            pos += 8 + size
            yield self._buffer[pos - size : pos].decode("utf-8", "replace")


@dataclass(frozen=True)
class GgufFile:
    """A model file's header; `read` makes it.

    Attributes:
        path: the file that was asked for (the first one of a split model).
        version: of the GGUF format.
        alignment: bytes, of the tensors' offsets.
        size_bytes: of all parts.
        meta: key/value pairs of the first part, decoded lazily.
        tensors: by name, in the file's order, of all parts.
        parts: every file of the model, in order.
    """

    path: Path
    version: int
    alignment: int
    size_bytes: int
    meta: Metadata
    tensors: dict[str, TensorInfo]
    parts: tuple[Path, ...]

    @property
    def arch(self) -> str:
        """`general.architecture`; empty when the file has none (it is no model then)."""
        value = self.meta.get("general.architecture", "")
        return value if isinstance(value, str) else ""

    @property
    def n_layer(self) -> int | None:
        """Number of blocks, or None when the file does not say."""
        return self.meta.integer(f"{self.arch}.block_count")

    @property
    def n_expert(self) -> int | None:
        """Experts of each MoE layer; None for a dense model."""
        return self.meta.integer(f"{self.arch}.expert_count")

    @property
    def n_expert_used(self) -> int | None:
        """Experts used per token; None for a dense model."""
        return self.meta.integer(f"{self.arch}.expert_used_count")

    @property
    def n_vocab(self) -> int | None:
        """Vocabulary size: the metadata's, else the tokenizer's, else the token embedding's rows."""
        for value in (
            self.meta.integer(f"{self.arch}.vocab_size"),
            self.meta.array_length("tokenizer.ggml.tokens"),
        ):
            if value is not None:
                return value
        embedding = self.tensors.get("token_embd.weight")
        return embedding.shape[1] if embedding is not None and len(embedding.shape) > 1 else None

    @property
    def n_ctx_train(self) -> int | None:
        """Context length of the training, in tokens, or None."""
        return self.meta.integer(f"{self.arch}.context_length")

    def expert_layers(self) -> list[int]:
        """Layers that have expert tensors (`ffn_{gate,up,down,gate_up}_exps`, `…_chexps`), sorted."""
        matches = (_EXPERTS.match(name) for name in self.tensors)
        return sorted({int(match[1]) for match in matches if match})


def read(path: str | os.PathLike[str]) -> GgufFile:
    """Read the header of a GGUF file, and of all its parts when it is the first of a split model.

    Raises:
        UsageError: it is missing, no regular file, unreadable, empty, truncated, no GGUF, big-endian, of another
            version, inconsistent (counts, sizes, offsets, names, alignment), or a part of the model is missing.
    """
    path = Path(path)
    first = _read_part(path)
    count = first.meta.integer("split.count") or 1
    if count == 1:
        return GgufFile(path, first.version, first.alignment, first.size, first.meta, first.tensors, (path,))
    parts = {path: first}
    tensors = dict(first.tensors)
    for number, part_path in enumerate(_part_paths(path, first, count)[1:], 1):
        part = parts[part_path] = _read_part(part_path, of=path)
        if part.meta.integer("split.no") != number or part.meta.integer("split.count") != count:
            _fail(part_path, f"is not part {number + 1} of {count} of {path.name}", _MIXED_UP)
        twice = next((name for name in part.tensors if name in tensors), None)
        if twice is not None:
            _fail(part_path, f"tensor {twice!r} is in an earlier part too", _DAMAGED)
        tensors.update(part.tensors)
    wanted = first.meta.integer("split.tensors.count")
    if wanted is not None and wanted != len(tensors):
        _fail(path, f"its {count} parts hold {len(tensors)} tensors, it says {wanted}", _MIXED_UP)
    size = sum(part.size for part in parts.values())
    return GgufFile(path, first.version, first.alignment, size, first.meta, tensors, tuple(parts))


def _part_paths(path: Path, first: _Part, count: int) -> list[Path]:
    """Paths of all parts of the split model whose first part is `path`."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        _fail(
            path,
            f"is a part of a model of {count} files, but its name does not end in -00001-of-{count:05}.gguf",
            "Give the parts the names they were published with.",
        )
    names = [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    if first.meta.integer("split.no") != 0 or path.name != names[0]:
        _fail(path, f"is not the first part of its model ({count} files)", f"Name {names[0]} instead.")
    return [path.with_name(name) for name in names]


def _fail(path: Path, what: str, hint: str) -> NoReturn:
    raise UsageError(f"{path}: {what}", hint)


def _open(path: Path, of: Path | None) -> tuple[BinaryIO, int]:
    """Open a regular file without ever waiting on a FIFO or a device; return it and its size."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            # O_NONBLOCK: a FIFO put there between stat and open would hang otherwise.
            flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
            file = os.fdopen(os.open(path, flags), "rb", buffering=0)
            return file, os.fstat(file.fileno()).st_size
    except (FileNotFoundError, NotADirectoryError):
        if of is not None:
            _fail(path, f"this part of {of.name} is missing", "Put all parts of the model into the same folder.")
        _fail(path, "no such file", "Check the path.")
    except PermissionError:
        _fail(path, "cannot be read: permission denied", "Check the permissions of the file and of its folders.")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        _fail(path, f"cannot be opened: {getattr(error, 'strerror', None) or error}", "Check the path.")
    if stat.S_ISDIR(mode):
        inside = "".join(f", such as {file.name}" for file in sorted(path.glob("*.gguf"))[:1])
        _fail(path, "is a directory, not a GGUF file", f"Name the file in it{inside}.")
    _fail(path, "is not a regular file (a FIFO, socket or device)", "Write it to a file first: models are mapped.")


class _Cursor:
    """Reads forward through a header; every length is checked against the file before anything is allocated."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.buffer = bytearray()
        self.pos = 0

    def need(self, n: int, what: str) -> None:
        """Have `n` more bytes in the buffer, or fail."""
        end = self.pos + n
        if end <= len(self.buffer):
            return
        if end > self.size:
            where = f"needs {n} bytes at byte {self.pos}, the file ends at {self.size}"
            _fail(self.path, f"truncated: {what} {where}", _REFETCH)
        if end > MAX_HEADER:
            _fail(self.path, f"{what} makes the header larger than {MAX_HEADER >> 20} MiB", _DAMAGED)
        want = min(max(end, 2 * len(self.buffer), 1 << 20), self.size, MAX_HEADER)
        try:
            while len(self.buffer) < want and (got := self.file.read(want - len(self.buffer))):
                self.buffer += got
        except OSError as error:
            _fail(self.path, f"cannot be read: {error.strerror or error}", "Check the disk, or copy the file again.")
        if len(self.buffer) < end:
            _fail(self.path, "truncated: it became shorter while it was read", _REFETCH)

    def skip(self, n: int, what: str) -> int:
        """Step over `n` bytes and return where they start."""
        self.need(n, what)
        self.pos += n
        return self.pos - n

    def u32(self, what: str) -> int:
        """Read a 32-bit count or code."""
        start = self.skip(4, what)
        return int(_U32.unpack_from(self.buffer, start)[0])

    def u64(self, what: str) -> int:
        """Read a 64-bit count."""
        start = self.skip(8, what)
        return int(_U64.unpack_from(self.buffer, start)[0])

    def name(self, what: str) -> str:
        """Read a non-empty UTF-8 string."""
        size = self.u64(f"{what} (its length)")
        start = self.skip(size, what)
        try:
            text = self.buffer[start : self.pos].decode("utf-8")
        except UnicodeDecodeError:
            _fail(self.path, f"{what} at byte {start} is not UTF-8", _DAMAGED)
        if not text or "\0" in text:
            _fail(self.path, f"{what} at byte {start} is empty or holds a NUL", _DAMAGED)
        return text

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings; a tight loop, as vocabularies have hundreds of thousands."""
        buffer, pos, limit, unpack = self.buffer, self.pos, len(self.buffer), _U64.unpack_from
        for _ in range(count):
            if pos + 8 > limit:
                self.pos = pos
                self.need(8, what)
                limit = len(buffer)
            after = pos + 8 + unpack(buffer, pos)[0]
            if after > limit:
                self.pos = pos
                self.need(after - pos, what)
                limit = len(buffer)
            pos = after
        self.pos = pos


class _Part(NamedTuple):
    version: int
    alignment: int
    size: int
    meta: Metadata
    tensors: dict[str, TensorInfo]


def _read_part(path: Path, of: Path | None = None) -> _Part:
    """Read one file's header; `of` names the model that the file is a further part of."""
    file, size = _open(path, of)
    with file:
        if size == 0:
            _fail(path, "is empty (0 bytes)", "The download or copy did not happen: fetch it again.")
        cursor = _Cursor(path, file, size)
        version = _read_version(cursor)
        n_tensor, n_kv = cursor.u64("the number of tensors"), cursor.u64("the number of metadata entries")
        for count, least, noun in ((n_tensor, _MIN_TENSOR, "tensors"), (n_kv, _MIN_KV, "metadata entries")):
            if count * least > size:
                _fail(path, f"says it holds {count} {noun}, more than fit into its {size} bytes", _DAMAGED)
        meta = Metadata(cursor.buffer, dict(_entries(cursor, n_kv)))
        alignment = _alignment(path, meta)
        if not isinstance(meta.get("general.architecture", ""), str):
            _fail(path, "general.architecture is not a string", _DAMAGED)
        infos = _tensor_records(cursor, n_tensor)
        tensors = _place(cursor, infos, alignment)
        del cursor.buffer[cursor.pos :]
    return _Part(version, alignment, size, meta, tensors)


def _read_version(cursor: _Cursor) -> int:
    path = cursor.path
    cursor.need(min(4, cursor.size), "the magic")
    magic = bytes(cursor.buffer[:4])
    if magic != b"GGUF":
        if b"GGUF".startswith(magic):
            _fail(path, f"truncated: it has {cursor.size} bytes", _REFETCH)
        hint = next((text for known, text in _OTHER_MAGICS if magic in known), "Name a .gguf file.")
        if magic == b"FUGG":
            _fail(path, "is a big-endian GGUF file", _BIG_ENDIAN)
        _fail(path, f"is not a GGUF file (it starts with {magic!r})", hint)
    cursor.pos = 4
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        _fail(path, "is a big-endian GGUF file", _BIG_ENDIAN)
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        _fail(path, f"is of GGUF version {version}; {known} are supported", "Convert it with a current llama.cpp.")
    return version


def _entries(cursor: _Cursor, count: int) -> Iterator[tuple[str, _Entry]]:
    """Walk the metadata; values stay where they are."""
    seen: set[str] = set()
    for number in range(count):
        start = cursor.pos
        key = cursor.name(f"the key of metadata entry {number}")
        if key in seen:
            _fail(cursor.path, f"metadata key {key!r} occurs twice", _DAMAGED)
        seen.add(key)
        what = f"metadata {key!r}"
        kind, n = cursor.u32(f"{what} (its type)"), -1
        if kind == GGUFValueType.ARRAY:
            kind, n = cursor.u32(f"{what} (its element type)"), cursor.u64(f"{what} (its length)")
        value = cursor.pos
        if kind == GGUFValueType.STRING:
            if n > MAX_STRINGS:
                _fail(cursor.path, f"{what} says it holds {n} strings, more than any vocabulary", _DAMAGED)
            cursor.skip_strings(1 if n < 0 else n, what)
        elif kind in _SCALARS:
            cursor.skip(struct.calcsize(_SCALARS[kind]) * (1 if n < 0 else n), what)
        else:
            _fail(cursor.path, f"{what} is of the unknown type {kind}", _DAMAGED)
        yield key, _Entry(start, value, cursor.pos, kind, n)


def _alignment(path: Path, meta: Metadata) -> int:
    if "general.alignment" not in meta:
        return DEFAULT_ALIGNMENT
    value = meta.integer("general.alignment")
    if _U32.unpack_from(meta.raw("general.alignment"), 8 + len("general.alignment"))[0] != GGUFValueType.UINT32:
        value = None  # ggml takes this one type only
    if not value or value & (value - 1):
        _fail(path, f"general.alignment is {meta['general.alignment']!r}, not a 32-bit power of two", _DAMAGED)
    return value


class _Record(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type: int
    offset: int  # from the start of the data


def _tensor_records(cursor: _Cursor, count: int) -> list[_Record]:
    records: dict[str, _Record] = {}
    for number in range(count):
        name = cursor.name(f"the name of tensor {number}")
        if len(name.encode()) > MAX_NAME:
            _fail(cursor.path, f"the name of tensor {number} has more than {MAX_NAME} bytes", _DAMAGED)
        if name in records:
            _fail(cursor.path, f"tensor {name!r} occurs twice", _DAMAGED)
        what = f"tensor {name!r}"
        n_dims = cursor.u32(f"{what} (its dimensions)")
        if n_dims > MAX_DIMS:
            _fail(cursor.path, f"{what} has {n_dims} dimensions; ggml has at most {MAX_DIMS}", _DAMAGED)
        shape = tuple(cursor.u64(f"{what} (its shape)") for _ in range(n_dims))
        kind, offset = cursor.u32(f"{what} (its type)"), cursor.u64(f"{what} (its offset)")
        # Zero counts as one here, so that no product before it can wrap in a reader that multiplies in 64 bits.
        if math.prod(max(n, 1) for n in shape) >= 1 << 63:
            _fail(cursor.path, f"{what} has more elements than 64 bits can count: {shape}", _DAMAGED)
        records[name] = _Record(name, shape, kind, offset)
    return list(records.values())


def _place(cursor: _Cursor, records: list[_Record], alignment: int) -> dict[str, TensorInfo]:
    """Check every tensor's place: ggml wants them in order, padded to the alignment, with no gap, inside the file."""
    path, size = cursor.path, cursor.size
    data = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    expected = 0
    for number, record in enumerate(records):
        what = f"tensor {record.name!r}"
        if record.offset % alignment:
            _fail(path, f"{what} is at offset {record.offset}, not aligned to {alignment} bytes", _DAMAGED)
        if record.offset != expected:
            _fail(path, f"{what} is at offset {record.offset}, where {expected} was expected", _DAMAGED)
        following = records[number + 1].offset if number + 1 < len(records) else size - data
        kind, nbytes = _type_and_size(path, record, following - record.offset)
        end = data + record.offset + nbytes
        if end > size:
            _fail(path, f"truncated: {what} ends at byte {end}, the file at {size}", _REFETCH)
        tensors[record.name] = TensorInfo(record.name, kind, record.shape, data + record.offset, nbytes, path)
        expected = -(-(record.offset + nbytes) // alignment) * alignment
    return tensors


def _type_and_size(path: Path, record: _Record, room: int) -> tuple[GGMLQuantizationType | int, int]:
    """The type, and the bytes of the data; `room` stands in for the size of a type newer than the gguf package."""
    what = f"tensor {record.name!r}"
    try:
        kind = GGMLQuantizationType(record.type)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        if record.type > 255 or room < 0:
            _fail(path, f"{what} is of the unknown type {record.type}", _DAMAGED)
        return record.type, room
    row = record.shape[0] if record.shape else 1
    if row % block:
        _fail(path, f"{what} has rows of {row} elements, no multiple of {kind.name}'s blocks of {block}", _DAMAGED)
    return kind, math.prod(record.shape) // block * block_bytes
