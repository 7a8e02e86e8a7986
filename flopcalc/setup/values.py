"""A field's value as a door gives it (text, or a Python object) becomes the typed value that the rest works with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from flopcalc.base.errors import DeviceError, FlopcalcError, RecipeError, WorkloadError, format_value
from flopcalc.base.files import read_path
from flopcalc.base.number_formats import parse_compute
from flopcalc.base.spelling import spell
from flopcalc.base.units import (
    check_items,
    parse_number,
    parse_tokens,
    read_number,
    read_size,
    read_sizes,
)
from flopcalc.base.vocabulary import check_flag, check_word
from flopcalc.core.estimate.inputs import read_images, read_seconds, read_videos
from flopcalc.core.workload.workload import check_logits, read_grids
from flopcalc.hardware.routing import parse_routing
from flopcalc.setup.fields import Field

AUTO = "auto"
_TOKENS = r"(?i)\s*(.*?)\s*(?:tok|tokens?)\s*"


def read_value(name: str, field: Field, value: Any) -> Any:
    """The typed value of a field, or an error that names the field as the reader wrote it."""
    if field.kind in _BY_ROW:
        return _BY_ROW[field.kind](value, name, field)
    reader = _READERS.get(field.kind)
    return value if reader is None else reader(value, name)


def _read_text(value: object, name: str, field: Field) -> str:
    if isinstance(value, str):
        return value
    if field.group == "formats":  # torch's objects too
        return parse_compute(value, spell(name), DeviceError)
    raise FlopcalcError(f"{spell(name)} must be a word, not {format_value(value)}")


def _read_word(value: object, name: str, field: Field) -> str:
    error = RecipeError if field.group in ("training", "hardware") else WorkloadError
    try:
        return check_word(value, field.words, spell(name), error, suggests=True)
    except error as refused:
        more = "; translate shows the conventions that people quote" if name == "convention" else ""
        raise error(f"{refused}{more}") from None


def _read_peak(value: Any, name: str) -> Any:
    """'989T', or one per format: 'bf16=989T,fp8=1979T'."""
    if not isinstance(value, str) or "=" not in value:
        return value if isinstance(value, Mapping) else read_number(value, name)
    found: dict[str, float] = {}
    for piece in value.split(","):
        word, equals, rate = piece.partition("=")
        kind = parse_compute(word.strip(), "dtype", DeviceError) if equals else ""
        if not equals or kind in found:
            problem = f"gives {kind} twice" if equals else f"has {format_value(piece)}, which is not FORMAT=FLOPS_PER_S"
            raise WorkloadError(f"{spell(name)} {problem}; write it as bf16=989T,fp8=1979T")
        found[kind] = parse_number(rate, name)
    return found


def _read_mtp(value: Any, name: str) -> int | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value == "config":
        return True
    return read_size(value, name, 0)


def _read_global_batch(value: Any, name: str) -> int | str | tuple[int, str]:
    """Sequences, "auto", or tokens as a number and the suffix that was written."""
    if not isinstance(value, str):
        return read_size(value, name)
    if value == AUTO:
        return AUTO
    if (tokens := re.fullmatch(_TOKENS, value)) is not None:
        try:
            return parse_tokens(tokens[1]), tokens[1][-1:].lower()
        except WorkloadError as error:
            raise WorkloadError(f"{spell(name)}: {error}") from None
    if value.isalpha():
        raise WorkloadError(f"{spell(name)} is sequences, tokens as in '4M tokens', or auto, not {format_value(value)}")
    return read_size(value, name)


def _read_degrees(value: Any, name: str) -> tuple[int, ...]:
    least = 0 if name == "zero" else 1
    if isinstance(value, str):
        value = [piece.strip() for piece in value.split(",")]
    items = (value,) if isinstance(value, (int, float)) else check_items(value, spell(name))
    return tuple(read_size(each, name, least) for each in items)


def _read_recomputes(value: Any, _: str) -> Any:
    """One word, or several with commas: which of them a command takes, it says itself."""
    if isinstance(value, str) and "," in value:
        return tuple(word.strip() for word in value.split(","))
    return value


def _read_objective(value: Any, _: str) -> Any:
    from flopcalc.core.estimate.objective import read_objective  # only where used

    return read_objective(value)


# Readers that need the field's row, and those that need its name; other kinds are read by the code that uses them.
_BY_ROW: dict[str, Callable[[Any, str, Field], Any]] = {
    "text": _read_text,
    "path": lambda value, name, field: value if field.repeats else read_path(value, spell(name), WorkloadError),
    "word": _read_word,
}
_READERS: dict[str, Callable[[Any, str], Any]] = {
    "flag": lambda value, name: (
        value if name == "autocast" and isinstance(value, str) else check_flag(value, spell(name))
    ),
    "size": read_size, "count": lambda value, name: read_size(value, name, 0), "sizes": read_sizes,
    "number": read_number, "tokens": lambda value, _: parse_tokens(value), "peak": _read_peak,
    "grids": lambda value, name: read_grids(value, spell(name)), "images": read_images, "videos": read_videos,
    "seconds": read_seconds, "mtp": _read_mtp, "logits": lambda value, _: check_logits(value),
    "global_batch": _read_global_batch, "degrees": _read_degrees, "objective": _read_objective,
    "recomputes": _read_recomputes, "routing": lambda value, _: parse_routing(value),
}  # fmt: skip
