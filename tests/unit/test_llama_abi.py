"""Struct layouts of libllama: which library is believed, and that every other one is refused by name."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import cffi
import pytest
from conftest import Compile

from ggml_async import llama_abi
from ggml_async.errors import GgmlAsyncError
from ggml_async.llama import LlamaLibrary
from ggml_async.llama_abi import LAYOUTS, Layout, Struct
from ggml_async.runtime import _check_once

FUNCTIONS = re.findall(r"\b((?:llama|ggml)_\w+)\(", llama_abi.CDEF)
WHO = "llama.cpp b9999"
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.name for layout in LAYOUTS])

pytestmark = pytest.mark.skipif(not llama_abi._poisonable(), reason="the stub library follows x86-64's convention")


def raw(table: Struct, **changed: Any) -> bytes:
    """The defaults of a struct as bytes, some of them changed."""
    out = bytearray(table.size)
    for name, (offset, code) in table.offsets.items():
        struct.pack_into(code, out, offset, changed.get(name, table.defaults[name]))
    return bytes(out)


def stub(model: bytes, context: bytes, *, without: tuple[str, ...] = (), batch: str = "memory") -> str:
    """C of a libllama with all functions that we ask for, whose parameter defaults are the given bytes."""
    known = {
        "llama_version": 'const char * llama_version(void) { return "b9999"; }',
        "ggml_version": 'const char * ggml_version(void) { return "0.99.0"; }',
        "llama_batch_init": "struct batch { int n; void * p[6]; };\nstatic char memory[8];\n"
        "struct batch llama_batch_init(int n, int embd, int seq) "
        f"{{ struct batch b = {{ 0, {{ {batch}, 0, memory, memory, memory, memory }} }}; return b; }}",
    }
    for kind, content in (("model", model), ("context", context)):
        name = f"llama_{kind}_default_params"
        known[name] = (
            f"static const unsigned char {kind}_bytes[] = {{ {', '.join(map(str, content))} }};\n"
            f"void * {name}(void * out) {{ return memcpy(out, {kind}_bytes, sizeof {kind}_bytes); }}"
        )
    bodies = [known.get(name, f"void * {name}() {{ return 0; }}") for name in FUNCTIONS if name not in without]
    return "#include <string.h>\n" + "\n".join(bodies)


def prove(library: Path) -> Layout:
    ffi: Any = cffi.FFI()
    ffi.cdef(llama_abi.CDEF)
    return llama_abi.prove(ffi, ffi.dlopen(str(library)), WHO)


def refusal(library: Path) -> str:
    with pytest.raises(GgmlAsyncError) as caught:
        prove(library)
    assert WHO in caught.value.message and caught.value.hint
    return caught.value.message


@LAYOUT
def test_a_library_with_the_known_defaults_is_believed(
    layout: Layout, compile_library: Compile, tmp_path: Path
) -> None:
    library = compile_library(stub(raw(layout.model), raw(layout.context)), tmp_path / "libllama.so")
    assert prove(library) is layout


@LAYOUT
@pytest.mark.parametrize("kind", ["model", "context"])
def test_any_single_default_that_differs_is_found(layout: Layout, kind: str) -> None:
    table: Struct = getattr(layout, kind)
    assert table.mismatch(raw(table)) is None
    for name, default in table.defaults.items():
        other = 5000 if name.startswith("n_threads") else not default if isinstance(default, bool) else default + 3
        found = table.mismatch(raw(table, **{name: other}))
        assert found is not None and found.startswith(f"{name} at byte "), name


@LAYOUT
@pytest.mark.parametrize("kind", ["model", "context"])
def test_a_field_more_at_any_place_is_found(layout: Layout, kind: str) -> None:
    table: Struct = getattr(layout, kind)
    whole = raw(table)
    last = max(offset for offset, _ in table.offsets.values())
    for at in range(0, last + 1, 8):
        shifted = whole[:at] + b"\0\0\0\0\0\0\0\0" + whole[at:]
        # Zeros shifted among zeros are found by the size of what was written
        assert llama_abi._differs(kind, table, shifted.ljust(llama_abi.BLOCK, b"\xa5")), at


@pytest.mark.parametrize("value", [0, -1, 1025])
def test_a_number_of_threads_must_be_one_a_machine_may_have(value: int) -> None:
    table = LAYOUTS[0].context
    assert table.mismatch(raw(table, n_threads=value))
    assert table.mismatch(raw(table, n_threads=96)) is None


@LAYOUT
@pytest.mark.parametrize("kind", ["model", "context"])
@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_a_struct_of_another_size_is_refused(
    layout: Layout, kind: str, change: str, compile_library: Compile, tmp_path: Path
) -> None:
    parts = {"model": raw(layout.model), "context": raw(layout.context)}
    # the last field of `shorter` is a zero pointer or flag, which the poison must show as never written
    parts[kind] = parts[kind] + b"\0" * 8 if change == "longer" else parts[kind][:-8]
    message = refusal(compile_library(stub(parts["model"], parts["context"]), tmp_path / "libllama.so"))
    assert f"layout {layout.name}: {kind} parameters: " in message


def test_shifted_fields_are_refused_and_every_layout_says_why(compile_library: Compile, tmp_path: Path) -> None:
    layout = LAYOUTS[0]
    library = compile_library(stub(raw(layout.model), b"\0\0\0\0" + raw(layout.context)), tmp_path / "libllama.so")
    message = refusal(library)
    assert "n_ctx at byte 0 is 0, expected 512" in message
    assert all(f"layout {known.name}: " in message for known in LAYOUTS)


def test_an_unknown_batch_struct_is_refused(compile_library: Compile, tmp_path: Path) -> None:
    source = stub(raw(LAYOUTS[0].model), raw(LAYOUTS[0].context), batch="0")
    assert "batch struct" in refusal(compile_library(source, tmp_path / "libllama.so"))


def test_a_field_lands_where_the_table_says_and_nowhere_else() -> None:
    ffi: Any = cffi.FFI()
    ffi.cdef(llama_abi.CDEF)
    block = ffi.new("struct block *")
    LAYOUTS[0].model.put(block, ffi, n_gpu_layers=7, devices=ffi.cast("void *", 0x1234))
    assert bytes(ffi.buffer(block)) == (struct.pack("PPi", 0x1234, 0, 7)).ljust(llama_abi.BLOCK, b"\0")


# ---- as the rest of the program meets it: in a child process


def test_a_library_of_other_defaults_is_refused_by_version_without_a_crash(
    compile_library: Compile, tmp_path: Path
) -> None:
    layout = LAYOUTS[0]
    compile_library(stub(raw(layout.model, n_gpu_layers=99), raw(layout.context)), tmp_path / "libllama.so")
    error = _check_once(tmp_path, {})["error"]
    assert "llama.cpp b9999 (ggml 0.99.0)" in error and "n_gpu_layers at byte 16 is 99, expected -1" in error


@pytest.mark.parametrize(
    ("without", "named"),
    [
        (("llama_decode",), "lacks llama_decode"),
        (("llama_decode", "llama_free", "ggml_get_name", "llama_n_ctx"), "…"),
    ],
)
def test_a_library_that_lacks_functions_is_refused_by_their_names(
    without: tuple[str, ...], named: str, compile_library: Compile, tmp_path: Path
) -> None:
    source = stub(raw(LAYOUTS[0].model), raw(LAYOUTS[0].context), without=without)
    compile_library(source, tmp_path / "libllama.so")
    with pytest.raises(GgmlAsyncError) as caught:
        LlamaLibrary(tmp_path)
    assert named in caught.value.message and "libllama.so" in caught.value.message
    assert caught.value.message.count("llama_") + caught.value.message.count("ggml_") <= 4


def test_a_library_may_lack_what_is_optional(compile_library: Compile, tmp_path: Path) -> None:
    without = ("llama_version", "ggml_version", "ggml_backend_load_all")
    source = stub(raw(LAYOUTS[0].model, n_gpu_layers=99), raw(LAYOUTS[0].context), without=without)
    compile_library(source, tmp_path / "libllama.so")
    with pytest.raises(GgmlAsyncError, match=r"of llama\.cpp unversioned in .* are not known"):
        LlamaLibrary(tmp_path)
