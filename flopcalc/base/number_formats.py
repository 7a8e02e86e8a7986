"""Number formats that products are computed in: their names, their bits and what a device without one uses instead."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.base.errors import FlopcalcError, RecipeError, format_nearest, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.vocabulary import DTYPES, Dtype

PLAIN = "bf16"  # what is taken where nothing says otherwise


@frozen()
class ComputeFormat(Value):
    """A format that products are computed in."""

    name: str
    bits: int
    is_everywhere: bool  # attention and the output head too, not linear layers alone
    stored: str  # the format of its tensors in memory
    fallback: str | None  # what a device computes in that lacks it


@cache
def load_computed() -> tuple[dict[str, ComputeFormat], dict[str, str]]:
    """Formats of products, and other names for them."""
    tables: dict[str, Any] = load_toml(os.path.join(find_data_dir(), "formats.toml"))["compute"]
    computed = {
        name: ComputeFormat(
            name, entry["bits"], entry.get("everywhere", False), entry.get("stored", name), entry.get("fallback")
        )
        for name, entry in tables.items()
    }
    return computed, {alias: name for name, entry in tables.items() for alias in entry.get("aliases", ())}


def find_computed(name: str) -> ComputeFormat:
    """The data of a format that products are computed in."""
    return load_computed()[0][name]


def name_format(value: object) -> str:
    """'bfloat16' or torch.bfloat16 -> 'bfloat16'."""
    try:
        return str(value).removeprefix("torch.").lower()
    except Exception:  # an int of too many digits, or an object that cannot be shown
        return ""


def parse_compute(value: object, what: str, error: type[FlopcalcError] = RecipeError) -> Dtype:
    """'bf16', 'bfloat16' or torch.bfloat16 -> 'bf16'; an unknown word is an error that names the option."""
    text = name_format(value)
    if text in DTYPES:  # without reading the file
        return text
    computed, aliases = load_computed()
    text = aliases.get(text, text)
    if text in DTYPES:
        return text
    near = format_nearest(text, computed)
    raise error(f"{what} {format_value(value)} unknown.{near} Known: {', '.join(computed)}")
