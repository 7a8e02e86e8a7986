"""What a device's kernels execute beyond need: its measured tables in, constants of attention and tile padding out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from flopcalc.base.vocabulary import FusedKernel, Mask, PassDirection, ProductDirection
from flopcalc.hardware.attention_blocks import (
    BLOCK,
    NEAR_DIM,
    UNMEASURED_DIMS,
    KernelShape,
    count_call_flops,
    count_pair_flops,
    pad_head,
)
from flopcalc.hardware.routing import EVEN, Routing
from flopcalc.hardware.tables import MeasuredTable, find_table, load_table
from flopcalc.hardware.tiles import (
    MODELLED,
    count_experts_excess,
    count_product_excess,
)

_ATTENTION_SHAPE = re.compile(r"(causal|full) b(\d+) h(\d+) s(\d+) d(\d+)/(\d+)")

_RULED: tuple[FusedKernel, ...] = ("cudnn", "flash")  # kernels whose blocks the GPU's counter confirmed


class KernelTable(NamedTuple):
    """Constants of one kernel on one device, and the lengths that each head dim was measured over."""

    shapes: tuple[tuple[tuple[int, int], KernelShape], ...]
    device: str
    date: str
    ranges: tuple[tuple[tuple[int, int], tuple[int, int]], ...]  # (qk, v) -> shortest and longest
    # (qk, v, mask, length) -> direction -> FLOPs executed for one head of one sequence, where exactly that was measured
    calls: dict[tuple[int, int, Mask, int], dict[PassDirection, int]]
    modelled: FusedKernel | None = None  # the kernel, if lengths that were not measured have a rule

    def find_call(self, qk: int, v: int, mask: Mask, length: int) -> dict[PassDirection, int] | None:
        """FLOPs of one head of one sequence whose length fills no whole block: as measured, or by the rule."""
        if found := self.calls.get((qk, v, mask, length)):
            return found
        if self.modelled not in _RULED or mask == "window" or not length % BLOCK:
            return None
        shape = dict(self.shapes).get((qk, v), KernelShape())
        pads: dict[PassDirection, tuple[int, int]] = {"forward": shape.pad_forward, "backward": shape.pad_backward}
        call = (qk, v, length, length, mask == "causal")
        return {
            direction: count_call_flops(self.modelled, direction, *call) * top // bottom
            for direction, (top, bottom) in pads.items()
        }

    def describe(self, asked: Mapping[tuple[int, int], Iterable[tuple[Mask, int]]]) -> str:
        """Which table was used for (qk, v) -> {(mask, length)}, and what of it the table does not cover."""
        known, ranges = dict(self.shapes), dict(self.ranges)
        text = f"executed pairs as measured on {self.device} (attention table of {self.date})"
        missing = sorted(width for width in asked if width not in known)
        if missing:
            shown = ", ".join(str(qk) if qk == v else f"{qk}/{v}" for qk, v in missing)
            text += f"; it has no constants for head dim {shown}: blocks of 128 assumed"
        calls = [
            (width, mask, length)
            for width, found in asked.items()
            for mask, length in found
            if width in known and (*width, mask, length) not in self.calls
        ]
        outside = sorted({n for width, _, n in calls if not ranges[width][0] <= n <= ranges[width][1]})
        unruled = [(width, mask, n) for width, mask, n in calls if self.find_call(*width, mask, n) is None]
        ragged = sorted({n for _, _, n in unruled if n % BLOCK} - set(outside))
        if outside:
            text += f"; length {_list(outside)} lies outside what was measured there"
        if ragged:
            text += f"; length {_list(ragged)} fills no whole block, and what the kernel pads there is not counted"
        if any(mask == "window" for _, mask, _ in calls):
            text += "; windows were not measured: the causal block size is used for them"
        return text


def _list(lengths: list[int]) -> str:
    return ", ".join(map(str, lengths[:3])) + (", …" if len(lengths) > 3 else "")


def find_kernel_table(device_id: str, kernel: FusedKernel) -> KernelTable | None:
    """The constants of a kernel on a device, or None where no table has them."""
    path = find_table(device_id, "attention")
    beside = find_table(device_id, "padding")
    found = read_kernel_table(load_table(path), kernel, load_table(beside) if beside else None) if path else None
    if found is None or not device_id.startswith(MODELLED):
        return found
    return _add_dims(found._replace(modelled=kernel))


def _add_dims(table: KernelTable) -> KernelTable:
    """With the head dims that no table has, padded by the rule that those measured follow."""
    near = (NEAR_DIM, NEAR_DIM)
    shapes, ranges = dict(table.shapes), dict(table.ranges)
    if near not in shapes or table.modelled not in _RULED:
        return table
    for dim in UNMEASURED_DIMS:
        if (dim, dim) not in shapes:
            padded = Fraction(pad_head(table.modelled, dim), dim).as_integer_ratio()
            shapes[dim, dim] = replace(shapes[near], pad_forward=padded, pad_backward=padded)
            ranges[dim, dim] = ranges[near]
    return table._replace(shapes=tuple(sorted(shapes.items())), ranges=tuple(sorted(ranges.items())))


def read_kernel_table(
    table: MeasuredTable, kernel: FusedKernel, padding: MeasuredTable | None = None
) -> KernelTable | None:
    """Constants from the rows whose executed FLOPs were counted by the hardware, and those rows by themselves."""
    rows = [row for row in table.select(kernel=kernel) if row["executed_flops"]]
    shapes = {}
    for width in sorted({(row["qk_dim"], row["v_dim"]) for row in rows}):
        mine = [row for row in rows if (row["qk_dim"], row["v_dim"]) == width]
        shape = _read_shape(mine)
        if shape is not None:
            shapes[width] = shape
    if not shapes:
        return None
    ranges = {}
    for width in shapes:
        lengths = [row["length"] for row in rows if (row["qk_dim"], row["v_dim"]) == width]
        ranges[width] = (min(lengths), max(lengths))
    about = table.provenance
    return KernelTable(
        tuple(shapes.items()),
        str(about.get("device")),
        str(about.get("date"))[:10],
        tuple(ranges.items()),
        _read_calls(rows, padding.select(kernel=kernel) if padding is not None else []),
    )


def _read_calls(
    attention: list[dict[str, Any]], padding: list[dict[str, Any]]
) -> dict[tuple[int, int, Mask, int], dict[PassDirection, int]]:
    """What one head of one sequence executes, for the lengths that fill no whole block: no constant describes them."""
    found: dict[tuple[int, int, Mask, int], dict[PassDirection, int]] = {}
    rows = [
        (row["qk_dim"], row["v_dim"], row["mask"], row["length"], row["batch"] * row["heads"], row) for row in attention
    ]
    for row in padding:
        match = _ATTENTION_SHAPE.fullmatch(str(row["shape"]))
        if match:
            batch, heads, length, qk, v = (int(size) for size in match.groups()[1:])
            rows.append((qk, v, match.group(1), length, batch * heads, row))
    for qk, v, mask, length, heads, row in rows:
        executed = row["executed_flops"]
        if length % BLOCK and executed is not None and executed % heads == 0:
            found.setdefault((qk, v, mask, length), {})[row["direction"]] = executed // heads
    return {call: both for call, both in found.items() if len(both) == 2}


class TileTable(NamedTuple):
    """What products of exactly these sizes execute beyond need: (m, n, k) -> direction -> FLOPs."""

    excess: dict[tuple[int, int, int], dict[ProductDirection, int]]
    device: str
    is_modelled: bool = False  # sizes that were not measured have a model

    def expect(
        self, m: int, n: int, k: int, copies: int = 1, routing: Routing = EVEN
    ) -> dict[ProductDirection, int] | None:
        """As find; by the model where a size was not measured, and of experts always."""
        measured = self.find(m, n, k) if copies == 1 else None
        if measured is not None or not self.is_modelled:
            return measured
        return count_product_excess(m, n, k) if copies == 1 else count_experts_excess(copies, m, n, k, routing)

    def find(self, m: int, n: int, k: int) -> dict[ProductDirection, int] | None:
        """Excess of a product forward, for its input's gradient (dgrad) and its weight's (wgrad), where measured."""
        return self.excess.get((m, n, k))


def find_tile_table(device_id: str) -> TileTable | None:
    """The products whose executed FLOPs were counted on a device, each alone; None without tables."""
    excess: dict[tuple[int, int, int], dict[ProductDirection, int]] = {}
    device = ""
    for name in ("gemm", "padding"):
        path = find_table(device_id, name)
        if path is None:
            continue
        table = load_table(path)
        device = str(table.provenance.get("device"))
        for row in table.records():
            size = _read_size(name, row)
            if size is not None and row["executed_flops"] is not None:
                m, n, k = size
                excess.setdefault(size, {})[row["direction"]] = row["executed_flops"] - 2 * m * n * k
    return TileTable(excess, device, device_id.startswith(MODELLED)) if excess else None


def _read_size(table: str, row: dict[str, Any]) -> tuple[int, int, int] | None:
    """(m, n, k) of a plain bf16 product; None for attention, experts and convolutions."""
    if table == "gemm":
        return (row["m"], row["n"], row["k"]) if row["dtype"] == "bf16" and row["mode"] == "burst" else None
    sizes = str(row["shape"]).split("x")
    is_plain = len(sizes) == 3 and all(size.isdigit() for size in sizes) and "embed" not in row["module"]
    return (int(sizes[0]), int(sizes[1]), int(sizes[2])) if is_plain else None


def _read_shape(rows: list[dict[str, Any]]) -> KernelShape | None:
    """The constants that reproduce every row exactly; None if no constants do (then the rule of 128 stands)."""
    found = {}
    for direction in ("forward", "backward"):
        mine = [row for row in rows if row["direction"] == direction]
        # Executed over needed where no pair is masked and the length fills its blocks: padding of the head dim alone.
        pads = {
            _per_pair(row) / row["length"] ** 2 for row in mine if row["mask"] == "full" and row["length"] % 128 == 0
        }
        if len(pads) != 1:
            return None
        pad = pads.pop()
        # Executed pairs have the form S (S + block) / 2, with one block for every length.
        blocks = {
            2 * _per_pair(row) / pad / row["length"] - row["length"]
            for row in mine
            if row["mask"] == "causal" and row["length"] % 128 == 0
        }
        if len(blocks) != 1 or (block := blocks.pop()).denominator != 1 or block < 0:
            return None
        found[direction] = (int(block), (pad.numerator, pad.denominator))
    forward, backward = found["forward"], found["backward"]
    return KernelShape(forward[0], backward[0], forward[1], backward[1])


def _per_pair(row: dict[str, Any]) -> Fraction:
    """Executed FLOPs in units of what one pair needs: 2 (qk + v) forward, 2 (3 qk + 2 v) backward, per head."""
    needed = count_pair_flops(row["direction"], row["qk_dim"], row["v_dim"])
    return Fraction(row["executed_flops"], needed * row["batch"] * row["heads"])
