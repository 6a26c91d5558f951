# ruff: noqa: E501
"""The page of `ggml-async report` in a real headless Chromium: nothing overflows a phone, everything is drawn."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from capture_example import write
from click.testing import CliRunner

from ggml_async.cli.report import report

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")

#: Says in the title, once the page in the frame is laid out, how wide it is against what it was given, and what it has.
PROBE = """<!doctype html><title>-</title><body style="margin:0"><iframe id=f src="page.html" width={width} height=900
style="border:0"></iframe><script>f.onload=()=>{{const d=f.contentDocument,e=d.documentElement,s=[...d.querySelectorAll('svg')];
const small=s.flatMap(v=>[...v.querySelectorAll('text')].map(t=>t.getBoundingClientRect().height));
const cut=s.filter(v=>[...v.querySelectorAll('text')].some(t=>{{const a=t.getBoundingClientRect(),b=v.getBoundingClientRect();
return a.left<b.left-1||a.right>b.right+1}})).length;
document.title=[e.scrollWidth,e.clientWidth,s.length,s.filter(v=>v.getBoundingClientRect().height<20).length,
Math.min(...small).toFixed(1),cut,d.querySelectorAll('section').length,d.querySelectorAll('details').length].join(' ')}}</script>"""


def chromium(*arguments: str) -> str:
    assert CHROMIUM
    done = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", *arguments],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("page")
    arguments = [str(write(found / "c.capture", odd=True)), "--output-file", str(found / "page.html")]
    assert CliRunner().invoke(report, arguments, catch_exceptions=False).exit_code == 0
    return found


@needs_chromium
@pytest.mark.parametrize("width", [375, 1280])
def test_its_structure_at_the_width_of(width: int, folder: Path) -> None:
    (folder / f"{width}.html").write_text(PROBE.format(width=width))
    dom = chromium(
        "--dump-dom", "--virtual-time-budget=5000", f"--window-size={width},900", f"file://{folder}/{width}.html"
    )
    title = dom.split("<title>")[1].split("</title>")[0]
    scroll, client, svgs, flat, smallest, cut, sections, details = map(float, title.split())
    assert scroll <= client <= width, "it is wider than its window"
    assert svgs == 7 and flat == 0, "two bars, two time lines, three histograms"
    assert smallest >= 9, "text too small to read"
    assert cut == 0, "text that runs out of its plot"
    assert sections == 8 and details > 30, "a definition for every figure"


def _rows(png: bytes) -> tuple[int, int, list[bytes]]:
    """Width, height and unfiltered rows of an 8-bit RGB or RGBA image."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    at, data, head = 8, b"", b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + length]
        head = body if kind == b"IHDR" else head
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    width, height, depth, color = struct.unpack(">IIBB", head[:10])
    assert depth == 8 and color in (2, 6)
    step = 3 if color == 2 else 4
    raw, rows, before = zlib.decompress(data), [], bytearray(width * step)
    for y in range(height):
        start = y * (width * step + 1)
        filtered, line = raw[start], bytearray(raw[start + 1 : start + 1 + width * step])
        for x in range(len(line)):
            left = line[x - step] if x >= step else 0
            up, corner = before[x], before[x - step] if x >= step else 0
            guess = left + up - corner
            nearest = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]
            line[x] = (line[x] + (0, left, up, (left + up) // 2, nearest)[filtered]) & 255
        rows.append(bytes(line))
        before = line
    return width, height, rows


@needs_chromium
def test_a_picture_of_it_is_not_blank(folder: Path) -> None:
    chromium(f"--screenshot={folder}/shot.png", "--window-size=500,700", f"file://{folder}/page.html")
    width, height, rows = _rows((folder / "shot.png").read_bytes())
    assert (width, height) == (500, 700)
    blank = sum(len(set(row[i : i + 3] for i in range(0, len(row) - 3, 3))) == 1 for row in rows)
    assert blank < height * 0.8, "mostly empty"
    assert len(set(b"".join(rows[::7])[i : i + 3] for i in range(0, 300_000, 3))) > 10, "no colours"


@needs_chromium
def test_it_prints(folder: Path) -> None:
    chromium(f"--print-to-pdf={folder}/page.pdf", f"file://{folder}/page.html")
    assert (folder / "page.pdf").read_bytes().startswith(b"%PDF")
