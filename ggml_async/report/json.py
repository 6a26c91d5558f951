"""The whole document (``ggml-async/profile/1``), written at the end: only then is it valid JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

Json = Mapping[str, Any]


def header(_document: Json, _shown: Collection[str]) -> str:
    """Nothing."""
    return ""


def row(_document: Json, _test: Json, _shown: Collection[str]) -> str:
    """Nothing."""
    return ""


def footer(document: Json) -> str:
    """All of it. Raises ValueError should a NaN or an infinity be left in it."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
