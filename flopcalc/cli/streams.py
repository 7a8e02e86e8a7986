"""Output for any terminal: characters that its encoding lacks, streams that are closed, readers that went away."""

from __future__ import annotations

import codecs
import os
import sys
from typing import Any

import click

from flopcalc.base.files import format_json

_HANDLER = "flopcalc.plain"
_PLAIN = {
    "×": "x", "·": "*", "÷": "/", "…": "...", "µ": "u", "μ": "u", "²": "^2", "³": "^3", "ᵀ": "^T", "–": "-", "—": "-",
    "≤": "<=", "≥": ">=", "→": "->", "‘": "'", "’": "'", "“": '"', "”": '"',
    **dict(zip("▁▂▃▄▅▆▇█", "_.-:=+*#", strict=True)),
}  # fmt: skip


def prepare_streams() -> None:
    """Call once before anything is written."""
    codecs.register_error(_HANDLER, _replace)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # the parent process closed it: >&-
            setattr(sys, name, open(_take_number(number), "w", encoding="utf-8"))  # noqa: SIM115 - open to the end
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=_HANDLER)


def show_json(value: Any) -> None:
    """Print JSON; no command prints it in another way."""
    click.echo(format_json(value))


def drop_output() -> None:
    """Forget what could not be written: else it is tried once more, and fails, when the process ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _take_number(number: int) -> int:
    """A descriptor that swallows everything, under the closed stream's own number: no later file may get that."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(number)
    except OSError:
        os.dup2(descriptor, number)
        return number
    return descriptor


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)  # it is given to streams that are written to
    return "".join(map(_make_plain, error.object[error.start : error.end])), error.end


def _make_plain(character: str) -> str:
    if character in _PLAIN:
        return _PLAIN[character]
    if "\ud800" <= character <= "\udfff":  # a byte of a file's name that is no text
        return f"\\x{ord(character) & 0xFF:02x}"
    import unicodedata  # only where used

    letters = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return letters if letters.strip() else "?"
