"""JSON lines: one object a test, the flat columns of the field table plus the samples, as llama-bench has them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from ggml_async import fields

Json = Mapping[str, Any]


def header(_document: Json, _shown: Collection[str]) -> str:
    """Nothing: every line stands alone."""
    return ""


def row(document: Json, test: Json, _shown: Collection[str]) -> str:
    """One test."""
    arm = fields.last_arm(test)
    flat = fields.row(document, test)
    flat["samples_ns"] = fields.ns_samples(test, arm)
    flat["samples_ts"] = fields.tok_s_samples(test, arm)
    for field in fields.FIELDS:
        if field.type == "list" and field.name:
            flat[field.name] = field.value(document, test)
    return json.dumps(flat, ensure_ascii=False, allow_nan=False) + "\n"


def footer(_document: Json) -> str:
    """Nothing."""
    return ""
