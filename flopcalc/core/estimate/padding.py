"""What products and attention calls execute beyond need, measured or modelled, as rows of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from flopcalc.base.vocabulary import Clipping, Counting
from flopcalc.core.count.formulas import KernelShape, fused_call_flops
from flopcalc.core.count.products import Block, CountedRow, Passes, Product, Row
from flopcalc.core.model.ops import Attend, Conv, Linear
from flopcalc.core.workload.sums import Once, Pairs
from flopcalc.core.workload.workload import Workload
from flopcalc.hardware.routing import EVEN, Routing

if TYPE_CHECKING:
    from flopcalc.hardware.kernels import KernelTable, TileTable


def list_padding(
    blocks: Iterable[Block],
    load: Workload,
    counting: Counting,
    kernels: KernelTable | None,
    tiles: TileTable | None,
    clipping: Clipping,
    find_routing: Callable[[Block], Routing],
) -> list[CountedRow]:
    """Padding of a fused kernel's calls, of plain products and of experts, from a device's tables or by their model."""
    found: list[CountedRow] = []
    # The second pass back is padded as the first; what is computed per sample has no measured padding.
    twice = clipping in ("ghost", "fast")
    if kernels is not None and load.phase != "decode" and load.layout == "unpadded":
        found += _list_ragged(kernels, blocks, load, counting, twice)
    if tiles is not None:
        found += _list_tiles(tiles, blocks, load, counting, twice, find_routing)
    return found


_MEASURED = ("bf16", "fp16")


def _list_tiles(
    tiles: TileTable,
    blocks: Iterable[Block],
    load: Workload,
    counting: Counting,
    twice: bool,
    find_routing: Callable[[Block], Routing],
) -> Iterator[CountedRow]:
    for block in blocks:
        for row in block.rows:
            op = row.op
            # An adapted or fused product is several: only plain ones have one size.
            # A router may run in fp32 (DeepSeek's does), where bf16 tiles say nothing.
            # With one expert a row (Llama 4), HF multiplies all experts at once: no grouped product.
            is_grouped = op.copies > 1
            if not isinstance(op, Linear) or isinstance(op, Conv) or op.part == "router":
                continue
            if is_grouped and op.active == 1:
                continue
            base = row.products[0] if len(row.products) == 1 and row.products[0].role == "base" else None
            value = base.rows.count(load, counting) if base is not None else 0
            is_measured = base is not None and base.format in _MEASURED
            rows = value * op.times
            routing = find_routing(block) if op.active < op.copies else EVEN
            excess = tiles.expect(rows, op.n_out, op.n_in, op.copies, routing) if value and is_measured else None
            if base is None or excess is None:
                continue
            passes = base.passes
            back = excess.get("dgrad", 0) * passes.input_gradient + excess.get("wgrad", 0) * passes.weight_gradient
            forward = excess.get("forward", 0)
            if forward or back:
                yield _make_row(block, op, base, forward, back, twice, 1)


def _list_ragged(
    table: KernelTable, blocks: Iterable[Block], load: Workload, counting: Counting, twice: bool
) -> Iterator[CountedRow]:
    """Attention over lengths that fill no whole block: what was measured of exactly that call, less the formula."""
    shapes = dict(table.shapes)
    for block in blocks:
        for row in block.rows:
            op, fused = row.op, row.find("fused")
            if not isinstance(op, Attend) or fused is None:
                continue
            shape = shapes.get((op.qk, op.v), KernelShape())
            behind = row.find("fused_backward")
            has_backward = behind is not None and behind.passes.backward > 0
            for (mask, length), calls in op.rows.attention_calls(load, op.times).items():
                if mask == "causal" and counting != "flash" and isinstance(op.rows, Pairs) and op.rows.has_mask(load):
                    mask = "full"  # kernels compute all pairs if they are given a mask
                measured = table.find_call(op.qk, op.v, mask, length)
                if measured is None:
                    continue
                counted = fused_call_flops(op.replace(heads=1, times=1), shape, mask, length)
                forward = (measured["forward"] - counted[0]) * op.heads
                backward = (measured["backward"] - counted[1]) * op.heads if has_backward else 0
                if forward or backward:
                    yield _make_row(block, op, fused, forward, backward, twice, calls)


def _make_row(
    block: Block, op: Linear | Attend, padded: Product, forward: int, backward: int, twice: bool, times: int
) -> CountedRow:
    same = replace(padded, role="padding", rows=Once(), n_in=0, n_out=0, copies=1)
    products = (
        replace(same, flops=forward, passes=Passes(1, recompute=int(padded.passes.recompute > 0))),
        replace(same, flops=backward, passes=Passes(0, 1, clipping=int(twice))),
    )
    return CountedRow(block, Row(op, products), (times, times))
