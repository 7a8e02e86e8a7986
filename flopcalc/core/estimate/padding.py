"""What products and attention calls of exactly measured sizes execute beyond need, as rows of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from flopcalc.core.count.count import Block, KernelShape, Row, fused_flops, product_flops
from flopcalc.core.workload.sums import attention_calls, evaluate_feature
from flopcalc.core.workload.workload import Workload
from flopcalc.hardware.kernels import KernelTable, TileTable

# A row with the value of its sum, and the layers that count alike.
CountedRow: TypeAlias = tuple[Block, Row, int]


def list_padding(
    blocks: Iterable[Block],
    load: Workload,
    counting: str,
    kernels: KernelTable | None,
    tiles: TileTable | None,
    clipping: str,
) -> list[CountedRow]:
    """Padding of a fused kernel's calls and of plain products, where a device's tables hold their exact sizes."""
    found: list[CountedRow] = []
    if kernels is not None and load.phase != "decode" and load.layout == "unpadded":
        found += _list_ragged(kernels, blocks, load)
    if tiles is not None:
        found += _list_tiles(tiles, blocks, load, counting)
    # The second pass back is padded as the first; what is computed per sample has no measured padding.
    if clipping in ("ghost", "fast"):
        found = [(block, row._replace(clipping=row.backward), value) for block, row, value in found]
    return found


def _list_tiles(tiles: TileTable, blocks: Iterable[Block], load: Workload, counting: str) -> Iterator[CountedRow]:
    for block in blocks:
        for row in block.rows:
            op = row.op
            flops = product_flops(op)
            # An adapted or fused product is several: only plain ones have one size.
            # A router may run in fp32 (DeepSeek's does), where bf16 tiles say nothing.
            if op.kind != "linear" or op.copies > 1 or row.forward != flops or op.part == "router":
                continue
            value = evaluate_feature(op.feature, load, counting)
            excess = tiles.find(value * op.times, op.n_out, op.n_in) if value else None
            if excess is None:
                continue
            owed = ("dgrad", "wgrad") if row.backward == 2 * flops else ("wgrad" if row.owes_weight else "dgrad",)
            back = sum(excess.get(direction, 0) for direction in owed) if row.backward else 0
            ahead = excess.get("forward", 0)
            if ahead or back:
                yield block, Row(op._replace(feature=("padding",)), ahead, back, ahead if row.recompute else 0), 1


def _list_ragged(table: KernelTable, blocks: Iterable[Block], load: Workload) -> Iterator[CountedRow]:
    """Attention over lengths that fill no whole block: what was measured of exactly that call, less the formula."""
    shapes = dict(table.shapes)
    for block in blocks:
        for row in block.rows:
            op = row.op
            if op.kind != "attend":
                continue
            shape = shapes.get((op.qk, op.v), KernelShape())
            for (mask, length), many in attention_calls(op.feature, load, op.times).items():
                measured = table.calls.get((op.qk, op.v, mask, length))
                if measured is None:
                    continue
                counted = fused_flops(op._replace(heads=1, times=1), shape, mask, length)
                ahead, behind = (
                    (measured[way] - flops) * op.heads
                    for way, flops in zip(("forward", "backward"), counted, strict=True)
                )
                padding = Row(
                    op._replace(feature=("padding",)),
                    ahead if row.forward else 0,
                    behind if row.backward else 0,
                    ahead if row.recompute else 0,
                )
                if padding.forward or padding.backward:
                    yield block, padding, many
