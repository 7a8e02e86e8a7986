"""What the seconds of a call depend on that is bound by the bytes it moves."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence


def weigh_zeros(share: float, slower: float) -> float:
    """How many times longer fused AdamW takes if a share of the weights, which are slower, had only zero gradients."""
    return 1 + (slower - 1) * share


# Kinds of operators that the memory alone bounds: a lower clock of the processors does not slow them down.
STREAMED = frozenset(("pointwise", "copy", "cast_down", "fill", "softmax", "softmax_backward", "reduce"))


FLOAT = "_float"  # behind the kind of a call on float32, where that takes less than its bytes say
_LARGE_SUM = 1e6  # bytes; what a smaller sum takes hardly depends on its shape
_NARROW = 1024  # bytes that are left of a sum over all tokens: the gradient of a norm over heads
_SMALL_SORT = 2048  # bytes
MOST_ROWS = 65_536  # with more, torch's kernels for gradients of a norm's weights work in another way


def name_shape(kind: str, reads: float, writes: float) -> str:
    """The kind of a memory-bound call with what its bytes tell of its shape, where that changes its time."""
    if kind == "reduce" and reads > _LARGE_SUM and writes:
        few = reads / writes
        if writes <= _NARROW:
            return "reduce_narrow"
        return "reduce_few" if few <= 16 else "reduce_short" if few <= 512 else kind
    if kind == "sort" and reads > _SMALL_SORT:
        # A sort leaves values and places of them; the largest of each row are fewer than the row, a count has one
        # number for each expert, a running sum of flags is eight times as long.
        left = writes / reads
        return "sort_whole" if 1.9 < left < 2.1 else "sort_top" if 0.02 < left < 4 else kind
    if kind == "copy_strided" and writes >= 1.5 * reads:
        return "copy_strided_spread"
    return kind


def count_rows(kind: str, reads: float, writes: float) -> float:
    """Rows of 16 bits that a norm or a sum over rows goes through, so far as its bytes tell: a norm keeps two of each.

    0 of other kinds.
    """
    if kind == "reduce":
        return reads / writes if writes else 0.0
    return {"norm": writes - reads, "norm_backward": reads - 2 * writes}.get(kind, 0.0) / 4


def find_size(kind: str, reads: float, writes: float) -> float:
    """What a call's time grows with: its bytes; of sums over heads, the number of these."""
    if kind == "reduce_short":
        return writes / 4  # in fp32
    return reads / writes if kind == "reduce_narrow" else reads + writes


def read_curve(curve: Sequence[Sequence[float]], size: float) -> float:
    """Seconds at a size, between and beyond measured ones: in logarithms, constant below, in proportion above."""
    sizes = [point[0] for point in curve]
    at = bisect_left(sizes, size)
    if at == 0:
        return curve[0][1]
    if at == len(curve):
        return curve[-1][1] * size / curve[-1][0]
    (low, first), (high, second) = curve[at - 1], curve[at]
    share = math.log(size / low) / math.log(high / low)
    return math.exp(math.log(first) * (1 - share) + math.log(second) * share)
