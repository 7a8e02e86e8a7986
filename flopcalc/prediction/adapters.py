"""The operators that PEFT's LoRA adds to a linear module."""

from __future__ import annotations

from flopcalc.core.formats.formats import Formats

# PEFT's LoRA on a linear module, as traced: direction, kind, calls, reads, writes. Adapters in float32.
_ADAPTER: list[tuple[str, str, int, str, str]] = [
    ("f", "module", 4, "", ""),
    ("f", "view", 6, "", ""),
    ("f", "product", 2, "", ""),
    ("f", "cast", 1, "x*rows*in", "f*rows*in"),
    ("f", "pointwise", 1, "f*rows*out", "f*rows*out"),
    ("f", "pointwise_mixed", 1, "x*rows*out + f*rows*out", "f*rows*out"),
    ("f", "cast", 1, "f*rows*out", "x*rows*out"),
    ("b", "node", 14, "", ""),
    ("b", "view", 14, "", ""),
    ("b", "product", 4, "", ""),
    ("b", "cast", 1, "x*rows*out", "f*rows*out"),
    ("b", "cast", 1, "f*rows*out", "x*rows*out"),
    ("b", "pointwise", 1, "f*rows*out", "f*rows*out"),
    ("b", "cast", 1, "f*rows*in", "x*rows*in"),
    ("b", "pointwise", 1, "x*rows*in + x*rows*in", "x*rows*in"),
]
# The same under autocast, which brings the adapter's input back to the half-precision format.
ADAPTER_AUTOCAST: list[tuple[str, str, int, str, str]] = [
    ("f", "module", 4, "", ""),
    ("f", "view", 6, "", ""),
    ("f", "product", 2, "", ""),
    ("f", "cast", 1, "x*rows*in", "f*rows*in"),
    ("f", "cast", 1, "f*rows*in", "x*rows*in"),
    ("f", "cast", 1, "f*in*rank", "x*in*rank"),
    ("f", "cast", 1, "f*out*rank", "x*out*rank"),
    ("f", "pointwise", 1, "x*rows*out", "x*rows*out"),
    ("f", "pointwise", 1, "x*2*rows*out", "x*rows*out"),
    ("b", "node", 16, "", ""),
    ("b", "view", 14, "", ""),
    ("b", "product", 4, "", ""),
    ("b", "cast", 1, "x*in*rank", "f*in*rank"),
    ("b", "cast", 1, "x*out*rank", "f*out*rank"),
    ("b", "pointwise", 1, "x*rows*out", "x*rows*out"),
    ("b", "cast", 1, "x*rows*in", "f*rows*in"),
    ("b", "cast", 1, "f*rows*in", "x*rows*in"),
    ("b", "pointwise", 1, "x*2*rows*in", "x*rows*in"),
]


def is_adapter_cast(formats: Formats, dtype_bytes: int) -> bool:
    """Whether adapters are in float32 with a half-precision model: inputs are cast for them."""
    return dtype_bytes != 4 and formats.adapter in ("", "fp32")


def find_adapter_table(formats: Formats, dtype_bytes: int) -> list[tuple[str, str, int, str, str]]:
    """What an adapter adds, by its own format and the model's: what is alike is not cast."""
    if is_adapter_cast(formats, dtype_bytes):
        return ADAPTER_AUTOCAST if formats.autocast else _ADAPTER
    return [  # adapters in the model's own format
        (way, kind.removesuffix("_mixed"), many, reads.replace("f*", "x*"), writes.replace("f*", "x*"))
        for way, kind, many, reads, writes in _ADAPTER
        if kind != "cast"
    ]
