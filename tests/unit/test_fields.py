"""The field table: complete, without doubles, and true to the documents that profile makes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from test_report import mock_document

from ggml_async import fields

#: Objects whose keys are data (reasons, causes, devices) or that are described as a whole.
WHOLE = ("declined", "by_device", "adoption", "fence_waits_by_cause", "queue_submits_by_cause")


def leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value and path.rsplit(".", 1)[-1] not in WHOLE:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path


def test_every_figure_of_a_document_is_in_the_table() -> None:
    document = mock_document()
    known = {re.sub(r"\.\d$", "", f.path) for f in fields.FIELDS}
    (test, *_) = document["tests"]
    found = list(leaves({k: v for k, v in document.items() if k != "tests"})) + list(leaves(test, "tests"))
    # Two settings are in the table in another form, a null summary stands for its leaves.
    derived = {"tests.config.devices", "tests.config.overrides"}
    missing = [p for p in found if p not in known | derived and not any(k.startswith(p + ".") for k in known)]
    assert missing == []


def test_every_path_of_the_table_is_in_a_document() -> None:
    document = mock_document()
    found = set(leaves({k: v for k, v in document.items() if k != "tests"}))
    for test in document["tests"]:
        found |= set(leaves(test, "tests"))
    paths = {re.sub(r"\.\d$", "", f.path) for f in fields.FIELDS if f.path}
    lost = [p for p in paths if p not in found and not any(p.startswith(f + ".") for f in found)]
    assert [p for p in lost if ".off." not in p] == []


def test_names_are_unique_and_ours_are_prefixed() -> None:
    names = [f.name for f in fields.FIELDS if f.name]
    assert len(set(names)) == len(names)
    first_of_ours = next(i for i, f in enumerate(fields.COLUMNS) if f.name.startswith("ga_"))
    assert all(f.name.startswith("ga_") for f in fields.COLUMNS[first_of_ours:])
    assert [f.name for f in fields.COLUMNS[:4]] == ["build_commit", "cpu_info", "gpu_info", "backends"]
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", n) for n in names)


def test_every_field_says_what_it_is_in_one_sentence() -> None:
    for field in fields.FIELDS:
        assert field.doc
        assert not field.doc.endswith(".")
        assert "\n" not in field.doc
        assert field.sql in ("TEXT", "INTEGER", "REAL")


def test_a_value_has_the_type_that_the_table_says() -> None:
    document = mock_document()
    kinds: dict[str, Any] = {
        "str": str, "int": int, "float": (int, float), "bool": bool, "list": list, "object": (dict, type(None)),
    }  # fmt: skip
    for test in document["tests"]:
        for field in fields.FIELDS:
            value = field.value(document, test)
            assert value is None or isinstance(value, kinds[field.type]), field
            assert field.type == "bool" or not isinstance(value, bool), field


def test_lookup_gives_null_for_what_is_missing() -> None:
    assert fields.lookup({"a": {"b": None}}, {}, "a.b.c") is None
    assert fields.lookup({}, {"x": [1.5]}, "tests.x.0") == 1.5
    assert fields.lookup({}, {"x": [1.5]}, "tests.x.1") is None


def test_the_reference_lists_every_field() -> None:
    text = fields.reference()
    assert text.count("\n") == len(fields.FIELDS) + 2
    assert "`tests[].speedup.tok_s.ci95[1]`" in text
