"""Constants of attention kernels: seconds of a call, of a query, of a query-key pair and of the longest row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from flopcalc.measure.predictor.fit.choices import (
    ATTENTION_START_SHARE,
    MAX_SHORTEST_CALL,
    MIN_ATTENTION_SIZES,
    MIN_HEADS_RANGE,
    MIN_KEYS_RANGE,
    PAIRS_PER_LONGEST_KEY,
    PAIRS_PER_QUERY,
    PAIRS_PER_QUERY_IN_WAVES,
)
from flopcalc.measure.predictor.fit.points import AttentionPoint
from flopcalc.measure.predictor.fit.solvers import round_digits, solve_nonnegative
from flopcalc.prediction.kernels.attention import IN_WAVES, attention_features, name_mask
from flopcalc.prediction.work import Attention

_Features = tuple[float, float, float, float]  # call, queries, pairs, longest row


def fit_attention(points: Sequence[AttentionPoint], units: int) -> dict[str, dict[str, list[float]]]:
    """Kernel -> direction/mask/head dim -> its four constants, on a device with `units` processors.

    If the calls are few, or all long, or all of one length, they determine the seconds of a pair only. The other
    constants then follow from it, and the call takes nearly as long as the shortest call of all.
    """
    groups: dict[tuple[str, str], list[AttentionPoint]] = {}
    shortest: dict[str, float] = {}
    for point in points:
        name = f"{point.direction}/{name_mask(point.mask, point.keys)}/{point.qk}"
        groups.setdefault((point.kernel, name), []).append(point)
        shortest[point.direction] = min(point.seconds, shortest.get(point.direction, math.inf))
    fitted: dict[str, dict[str, list[float]]] = {}
    for (kernel, name), group in sorted(groups.items()):
        call_s = shortest[group[0].direction]
        rows = [(_list_features(point, units), point.seconds) for point in group]
        if _determines_all(group, call_s):
            # The shortest call of all is taken as one without queries: no kernel starts later.
            start = [] if group[0].mask in IN_WAVES else [((1.0, 0.0, 0.0, 0.0), call_s)]
            constants = solve_nonnegative([*rows, *start])
        else:
            constants = _scale_usual(group[0], rows, ATTENTION_START_SHARE * call_s)
        fitted.setdefault(kernel, {})[name] = round_digits(constants)
    return fitted


def _list_features(point: AttentionPoint, units: int) -> _Features:
    call = Attention(
        "", "", point.direction, point.mask, point.batch, point.heads, point.kv_heads, point.qk, point.qk,
        point.length, point.keys,
    )  # fmt: skip
    return attention_features(units, call, point.kernel, point.qk)


def _determines_all(group: Sequence[AttentionPoint], shortest_s: float) -> bool:
    """Whether calls differ in heads and in length independently, and some are short."""
    sizes = {(point.batch * point.heads, point.length, point.keys) for point in group}
    heads, keys = ({size[i] for size in sizes} for i in (0, 2))
    return (
        len(sizes) >= MIN_ATTENTION_SIZES
        and max(heads) >= MIN_HEADS_RANGE * min(heads)
        and max(keys) >= MIN_KEYS_RANGE * min(keys)
        and min(point.seconds for point in group) < MAX_SHORTEST_CALL * shortest_s
    )


def _scale_usual(point: AttentionPoint, rows: Sequence[tuple[_Features, float]], call_s: float) -> list[float]:
    """Constants in their usual relation to a pair's seconds; whole waves of blocks count the longest row already."""
    causal = (PAIRS_PER_QUERY[point.direction], PAIRS_PER_LONGEST_KEY)
    usual = {"decode": (0.0, 0.0), "causal": causal, "dropout": causal}
    per_query, per_key = usual.get(point.mask, (PAIRS_PER_QUERY_IN_WAVES, 0.0))
    pair_s = statistics.median(
        (seconds - call_s) / (pairs + queries * per_query + longest * per_key)
        for (_, queries, pairs, longest), seconds in rows
    )
    return [call_s, pair_s * per_query, pair_s, pair_s * per_key]
