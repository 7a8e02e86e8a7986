"""How weights are stored, with their scales: data, and bytes."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.base.errors import RecipeError, format_nearest, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.number_formats import PLAIN, find_computed, load_computed, name_format

if TYPE_CHECKING:
    from fractions import Fraction

_GROUP = r"(.+)-g(\d+)"


@frozen()
class StoredFormat(Value):
    """How a weight is stored: its numbers, and the scales and zero points that they share."""

    name: str
    bits: int | Fraction = 16
    compute: str = ""  # of its products; empty: the model's own format, after the weight is dequantized
    gradient: str = ""  # of the products of its gradients; empty: the same
    outputs: int = 0  # of a block that shares a scale; 0: all
    inputs: int = 0
    flat: int = 0  # numbers of the flattened weight that share a scale, in place of a block
    scale_bits: int = 0
    zero_bits: int = 0
    nested: int = 0  # scales that share one scale of 32 bits
    tensor_bits: int = 0  # once per weight
    index_bits: int = 0  # once per input
    rounds: bool = False  # the last block may be smaller
    fallback: str = ""  # in its place where its blocks do not divide the inputs
    key: str = ""  # what said the block, for an error

    @property
    def is_quantized(self) -> bool:
        """Whether it is more than plain numbers."""
        return bool(self.scale_bits or self.tensor_bits)

    def count_bytes(self, n_out: int, n_in: int, copies: int = 1) -> tuple[int, int]:
        """Bytes of the numbers of a weight, and of its scales, zero points and tables."""
        if not self.is_quantized:
            return _to_bytes(n_out * n_in * copies * self.bits), 0
        blocks = self._count_blocks(n_out, n_in)
        extra = blocks * (self.scale_bits + self.zero_bits)
        extra += 32 * -(-blocks // self.nested) if self.nested else 0
        extra += self.tensor_bits + self.index_bits * n_in
        return _to_bytes(n_out * n_in * self.bits) * copies, _to_bytes(extra) * copies

    def _count_blocks(self, n_out: int, n_in: int) -> int:
        if self.flat:
            return -(-n_out * n_in // self.flat)
        return -(-n_out // (self.outputs or n_out)) * -(-n_in // (self.inputs or n_in))

    def find_problem(self, n_out: int, n_in: int) -> str:
        """What of a block does not divide a weight; empty if all does."""
        if self.rounds or not self.is_quantized:
            return ""
        sizes = ((self.outputs, n_out, "outputs"), (self.inputs, n_in, "inputs"), (self.flat, n_out * n_in, "numbers"))
        found = [(size, whole, what) for size, whole, what in sizes if size and whole % size]
        return f"{found[0][0]} does not divide the {found[0][1]:,} {found[0][2]}" if found else ""


def _to_bytes(bits: int | Fraction) -> int:
    return int(-(-bits // 8))


BF16 = StoredFormat(PLAIN)


@cache
def load_stored() -> dict[str, StoredFormat]:
    """Formats of weights that have scales."""
    tables = load_toml(os.path.join(find_data_dir(), "stored_formats.toml"))["stored"]
    return {name: _read_stored(name, entry) for name, entry in tables.items()}


def _read_stored(name: str, entry: dict[str, Any]) -> StoredFormat:
    outputs, inputs = entry.get("block", (0, 0))
    kept = {key: value for key, value in entry.items() if key != "block"}
    return StoredFormat(name, outputs=outputs, inputs=inputs, key="the block", **kept)


def make_plain(name: str) -> StoredFormat:
    """Plain numbers of a format, without scales."""
    if name == PLAIN:  # without reading the file
        return BF16
    found = find_computed(find_computed(name).stored)
    return StoredFormat(found.name, found.bits)


def parse_stored(value: object, what: str) -> StoredFormat:
    """How a word stores weights: plain (bf16, fp32), with scales (fp8, nf4), or with groups of a size (int4-g64)."""
    text = name_format(value)
    (computed, aliases), stored = load_computed(), load_stored()
    grouped = re.fullmatch(_GROUP, text)
    name = grouped[1] if grouped is not None else text if text in stored else aliases.get(text, text)
    if name not in stored and not (name in computed and computed[name].is_everywhere and grouped is None):
        from flopcalc.core.model.gguf import load_tables  # only where used

        mixes = load_tables()["mixes"]["rows"]
        known = (*(each for each in computed if computed[each].is_everywhere and each != "tf32"), *stored, *mixes)
        near = format_nearest(text, known)
        raise RecipeError(
            f"{what} {format_value(value)} unknown.{near} Known: {', '.join(known)}; int4-g64 has groups of 64"
        )
    if name not in stored:
        return make_plain(name)
    found = stored[name]
    if grouped is None:
        return found
    size = int(grouped[2])
    if not size or not (found.flat or found.inputs > 1):
        raise RecipeError(f"{what} {format_value(value)}: {name} has no groups of that size")
    changed = replace(found, name=text, key=what)
    return replace(changed, flat=size) if found.flat else replace(changed, inputs=size)
