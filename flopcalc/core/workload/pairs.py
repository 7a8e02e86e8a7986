"""Closed forms of query-key pairs: causal, windowed, in decoding, in windows of patches."""

from __future__ import annotations

from flopcalc.core.workload.workload import Grid


def causal_pairs(length: int, window: int = 0) -> int:
    """Query-key pairs of one causal document: sum of min(i, window) over i = 1…length."""
    if not window or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def nearby_pairs(length: int, reach: int = 0) -> int:
    """Pairs of one document whose positions are at most `reach` apart, both ways; reach 0: all of them."""
    if not reach or reach >= length:
        return length * length
    return length * (2 * reach + 1) - reach * (reach + 1)


def decode_pairs(new: int, context: int, window: int = 0) -> int:
    """Sum of min(context + j, window) over the new tokens j = 1…new."""
    if not window or window >= context + new:
        return new * context + new * (new + 1) // 2
    growing = max(0, window - context)  # tokens whose keys still all fit
    return growing * context + growing * (growing + 1) // 2 + (new - growing) * window


def window_pairs(grid: Grid, merge: int, window: int) -> int:
    """Pairs inside square windows of `window` merged patches, ragged at the edges, per temporal patch."""
    t, h, w = grid
    side = window * merge
    # Sum over windows of (a·b)² = (sum of a²)(sum of b²), a and b the window's height and width in patches.
    rows = h // side * side * side + (h % side) ** 2
    columns = w // side * side * side + (w % side) ** 2
    return t * rows * columns
