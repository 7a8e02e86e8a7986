"""Make the README's picture: a command's real output goes in, an SVG file of a terminal comes out.

python docs/make_picture.py            write docs/pictures/estimate.svg
python docs/make_picture.py --check    exit 1 if it is stale
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from html import escape
from pathlib import Path

from flopcalc.cli import main

PICTURE = Path(__file__).resolve().parent / "pictures" / "estimate.svg"
COMMAND = "flopcalc estimate --model qwen2-vl --seq 2048"
COLUMNS = 80
CHARACTER, LINE, MARGIN, BAR = 8.4, 19, 18, 34  # pixels at a font size of 14
FONT = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def run_command(command: str) -> list[str]:
    """The lines that a flopcalc command prints on a terminal of 80 columns."""
    out = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(COLUMNS)
    try:
        with contextlib.redirect_stdout(out):
            main(command.split()[1:])
    except SystemExit as done:
        if done.code:
            raise ValueError(f"`{command}` ended with exit code {done.code}") from None
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return out.getvalue().rstrip("\n").split("\n")


def draw(command: str, lines: list[str]) -> str:
    """A terminal's window with the command and its output; the text stays text."""
    width = round(COLUMNS * CHARACTER + 2 * MARGIN)
    height = BAR + LINE * (len(lines) + 1) + MARGIN
    rows = [f'<tspan fill="#7ee787">$</tspan> {escape(command)}', *(escape(line) for line in lines)]
    text = [
        f'<text x="{MARGIN}" y="{BAR + LINE * (number + 1) - 5}" xml:space="preserve">{row}</text>'
        for number, row in enumerate(rows)
        if row
    ]
    dots = [
        f'<circle cx="{MARGIN + 18 * place}" cy="{BAR // 2}" r="6" fill="{colour}"/>'
        for place, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="Output of {escape(command)}">',
            f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
            *dots,
            f'<g font-family="{FONT}" font-size="14" fill="#e6edf3">',
            *text,
            "</g>",
            "</svg>",
            "",
        ]
    )


def make_picture() -> str:
    return draw(COMMAND, run_command(COMMAND))


if __name__ == "__main__":
    picture = make_picture()
    if "--check" in sys.argv:
        if PICTURE.read_text(encoding="utf-8") != picture:
            print("docs/pictures/estimate.svg is stale: run python docs/make_picture.py", file=sys.stderr)
            sys.exit(1)
    else:
        PICTURE.write_text(picture, encoding="utf-8")
