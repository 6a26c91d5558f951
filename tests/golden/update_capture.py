"""Writes capture-1.capture (format version 1) where it is missing, and its reports: run it after a wanted change of the
reports, and read the diff. The capture itself is never written again: every later reader must read it.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from capture_example import write  # noqa: E402

from ggml_async.capture_report import document  # noqa: E402
from ggml_async.report import capture_md  # noqa: E402

CAPTURE = HERE / "capture-1.capture"
TABLES = ("arms", "layers", "tensors", "processes", "tokens", "histograms", "timeline")


def reports() -> dict[str, str]:
    """By format what the reports of the golden capture are."""
    found = document([CAPTURE], tables=TABLES)
    return {
        "json": json.dumps(found, indent=1, ensure_ascii=False) + "\n",
        "md": capture_md.render(found, TABLES),
        "upstream.md": capture_md.upstream(found),
    }


if __name__ == "__main__":
    if not CAPTURE.exists():
        write(CAPTURE)
    for name, text in reports().items():
        (HERE / f"capture-1.{name}").write_text(text)
