"""The operators that PEFT's LoRA adds to a linear module: model_specs/adapter_operators.json."""

from __future__ import annotations

import os
from functools import cache

from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import SpecError
from flopcalc.base.files import MAX_JSON_BYTES, read_json
from flopcalc.core.formats.formats import Formats

# Direction, kind, calls, bytes read, bytes written.
Table = list[tuple[str, str, int, str, str]]


@cache
def _load(name: str) -> Table:
    """Adapters in float32, or the same under autocast, which brings their input back to the half-precision format."""
    tables = read_json(os.path.join(find_data_dir(), "adapter_operators.json"), MAX_JSON_BYTES, SpecError)
    return [(way, kind, calls, reads, writes) for way, kind, calls, reads, writes in tables[name]]


def is_adapter_cast(formats: Formats, dtype_bytes: int) -> bool:
    """Whether adapters are in float32 with a half-precision model: inputs are cast for them."""
    return dtype_bytes != 4 and formats.adapter in ("", "fp32")


def find_adapter_table(formats: Formats, dtype_bytes: int) -> Table:
    """What an adapter adds, by its own format and the model's: what is alike is not cast."""
    if is_adapter_cast(formats, dtype_bytes):
        return _load("autocast" if formats.autocast else "float32")
    return [  # adapters in the model's own format
        (way, kind.removesuffix("_mixed"), many, reads.replace("f*", "x*"), writes.replace("f*", "x*"))
        for way, kind, many, reads, writes in _load("float32")
        if kind != "cast"
    ]
