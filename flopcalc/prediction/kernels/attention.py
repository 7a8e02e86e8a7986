"""Seconds of an attention call: what they depend on, and which of a device's constants they come from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from flopcalc.base.errors import SpecError
from flopcalc.base.vocabulary import CallMask, FusedKernel, PassDirection
from flopcalc.hardware.attention_blocks import find_blocks
from flopcalc.prediction.work import Attention

# Direction, mask and head dim -> seconds of a call, of a query, of a pair and of a position of the longest row.
Table = Mapping[str, Sequence[float]]

IN_WAVES = ("full", "dropped", "window", "apart")  # masks under which all blocks of attention take equally long
DROPPING: dict[CallMask, CallMask] = {"causal": "dropout", "full": "dropped"}  # with weights dropped in training
PLAIN = {dropping: plain for plain, dropping in DROPPING.items()}


def attention_features(
    units: int, call: Attention, kernel: FusedKernel, dim: float
) -> tuple[float, float, float, float]:
    """What the time of an attention call is made of: the call, its queries, its pairs in blocks, its longest row.

    Decoding reads all keys once and computes next to nothing. Without a causal mask all blocks take equally long, so
    that they come in waves over the processors; under one, short blocks fill the gaps that long ones leave. On the way
    back such a call has all queries as its last part, not its longest row: their gradients are added up in memory.
    """
    each = call.batch * call.heads
    if call.mask == "decode":
        return 1.0, 0.0, float(call.batch * call.kv_heads * call.keys), float(call.keys)
    blocks = find_blocks(kernel, call.direction, round(dim))
    if call.mask in ("causal", "dropout"):
        pairs = blocks.count_pairs(call.length, call.keys, is_causal=True)
        return 1.0, float(each * call.length), float(each * pairs), float(call.keys)
    waves = -(-each * blocks.count_held(call.length, call.keys) // units)
    rows = waves * units * blocks.held
    last = call.keys if call.direction == "forward" else each * call.length
    return 1.0, float(rows), float(rows * blocks.count_passed(call.length, call.keys)), float(last)


def name_mask(mask: CallMask, keys: int) -> str:
    """A mask that is handed over as a tensor has other kernels where its rows do not start on 16 bytes, or on 4."""
    if mask not in ("window", "apart") or not keys % 8:
        return mask
    return "window-odd" if keys % 2 else "window-even"


def find_nearest(dims: Iterable[int], dim: float) -> int:
    """The known head dim whose ratio to another is the least."""
    return min(dims, key=lambda known: abs(math.log(known / dim)))


def _list_dims(table: Table, direction: PassDirection, name: str) -> dict[int, Sequence[float]]:
    start = f"{direction}/{name}/"
    return {int(key.removeprefix(start)): values for key, values in table.items() if key.startswith(start)}


def find_attention(tables: Sequence[Table], call: Attention, dim: float) -> tuple[Sequence[float], int]:
    """The constants of a call and the head dim that they were measured at.

    The kernel's own table comes first. Without its mask there, the next wider mask is used; without any, another
    kernel's table. In decoding another kernel's table comes before another mask, because all read the same keys.
    """
    own = PLAIN.get(call.mask, call.mask)  # find_dropping says how much longer a call takes that drops weights
    wider = "window" if own == "apart" else own
    masks = dict.fromkeys((name_mask(own, call.keys), wider, "full", "causal"))
    ways = [(table, mask) for mask in masks for table in tables]
    if call.mask != "decode":
        ways = [(tables[0], mask) for mask in masks] + ways
    for table, mask in ways:
        if dims := _list_dims(table, call.direction, mask):
            nearest = find_nearest(dims, dim)
            return dims[nearest], nearest
    raise SpecError(f"no kernel's {call.direction} attention was measured; `flopcalc calibrate --predictor` does it")


def add_features(constants: Sequence[float], call: Attention, kernel: FusedKernel, dim: float, units: int) -> float:
    """Seconds of a call beyond its start, at the head dim of its constants."""
    features = attention_features(units, call, kernel, dim)
    return sum(constant * feature for constant, feature in zip(constants[1:], features[1:], strict=True))


def find_dropping(tables: Iterable[Table], call: Attention, kernel: FusedKernel, units: int, dim: float) -> float:
    """How many times longer a call takes that drops weights, at the nearest head dim with both."""
    for table in tables:
        dropping, plain = (_list_dims(table, call.direction, mask) for mask in (call.mask, PLAIN[call.mask]))
        if both := dropping.keys() & plain.keys():
            at = find_nearest(sorted(both), dim)
            times = [each[at][0] + add_features(each[at], call, kernel, at, units) for each in (dropping, plain)]
            return times[0] / times[1]
    return 1.0
