"""Constants of memory-bound operators: a curve over bytes where a profile shows sizes, a line where it does not."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from flopcalc.measure.operator_kinds import classify
from flopcalc.measure.predictor.fit.cases import ModelledCase
from flopcalc.measure.predictor.fit.choices import CHOICES
from flopcalc.measure.predictor.fit.points import MovedPoint, is_plain, list_operators
from flopcalc.measure.predictor.fit.solvers import Row, round_digits, solve_nonnegative
from flopcalc.prediction.kernels.defaults import load_defaults
from flopcalc.prediction.kernels.memory_bound import weigh_zeros
from flopcalc.prediction.moe_versions import MASKED

_CATS = ("cat", "cat_one", "cat_cache", "cat_strided", "cat_strided_wide")  # a profile shows their sum only
_LINES = ("gather", "scatter", "embedding_backward", "loss", "norm", "norm_backward", "sort", "random")
_NO_CURVE = (*_CATS, *_LINES, "copy_strided_wide", "cast_strided", "other")


def fit_curves(points: Sequence[MovedPoint]) -> dict[str, list[list[float]]]:
    """Kind -> [bytes, seconds] of rising sizes."""
    groups: dict[str, list[MovedPoint]] = {}
    for point in points:
        if point.kind not in _NO_CURVE:
            groups.setdefault(point.kind, []).append(point)
    found: dict[str, list[list[float]]] = {
        kind: [[round(size), float(f"{seconds:.4g}")] for size, seconds in fit_curve(group)]
        for kind, group in sorted(groups.items())
        if len(group) >= CHOICES.min_curve_points
    }
    if MASKED in found and "pointwise_strided" in found:
        found[MASKED] = extend_down(found[MASKED], found["pointwise_strided"])
    return found


def extend_down(curve: list[list[float]], wider: list[list[float]]) -> list[list[float]]:
    """A curve with the points of a wider kind below its own: no step masks few rows."""
    (size, seconds), *_ = curve
    return [*(point for point in wider if point[0] < size and point[1] < seconds), *curve]


def fit_curve(points: Sequence[MovedPoint]) -> list[tuple[float, float]]:
    """The median seconds of each half octave of bytes; more bytes never take fewer seconds."""
    bins: dict[int, list[MovedPoint]] = {}
    for point in points:
        bins.setdefault(round(CHOICES.bins_per_octave * math.log2(max(point.bytes, 1))), []).append(point)
    curve = []
    for group in bins.values():
        seconds_per_byte = _find_weighted_median(
            [(point.seconds / max(point.bytes, 1), point.calls) for point in group]
        )
        size = math.exp(statistics.fmean(math.log(max(point.bytes, 1)) for point in group))
        curve.append((size, seconds_per_byte * size))
    curve.sort()
    sizes, seconds = zip(*curve, strict=True)
    return list(zip(sizes, make_rising(seconds), strict=True))


def make_rising(values: Sequence[float]) -> list[float]:
    """The values with neighbours that fall joined to their median.

    Not scipy's isotonic_regression: it takes means, so that one slow call would move all its neighbours.
    """
    levels: list[list[float]] = []
    for value in values:
        levels.append([value])
        while len(levels) > 1 and statistics.median(levels[-2]) > statistics.median(levels[-1]):
            levels[-2:] = [levels[-2] + levels[-1]]
    return [statistics.median(level) for level in levels for _ in level]


def _find_weighted_median(values: list[tuple[float, float]]) -> float:
    values.sort()
    half = sum(weight for _, weight in values) / 2
    for value, weight in values:
        half -= weight
        if half <= 0:
            return value
    return values[-1][0]


def fit_lines(cases: Sequence[ModelledCase]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of a call and of a byte per kind whose sizes a profile does not show, from the sums of whole steps.

    And the optimizer's: seconds of a step, of a tensor and of a byte.
    """
    rows: dict[str, list[Row]] = {}
    optimizers: dict[str, list[Row]] = {}
    slower = load_defaults().device.zero_states_slower
    for each in cases:
        if not is_plain(each.case):
            continue
        seconds: defaultdict[str, float] = defaultdict(float)
        for operator in list_operators(each.case):
            kind = "optimizer" if "_fused_adam" in operator.name else classify(operator.name)
            seconds[kind] += operator.us * 1e-6
        calls: defaultdict[str, float] = defaultdict(float)
        moved: defaultdict[str, float] = defaultdict(float)
        for piece in each.work.moved:
            calls[piece.kind] += piece.calls
            moved[piece.kind] += piece.calls * (piece.reads + piece.writes)
            if piece.direction == "optimizer" and seconds["optimizer"]:
                size = (piece.reads + piece.writes) * (
                    weigh_zeros(piece.unseen, slower) if piece.kind == "adamw" else 1.0
                )
                features = (1.0, float(piece.tensors), size)
                optimizers.setdefault(piece.kind, []).append((features, seconds["optimizer"]))
        for kind in _LINES:
            if calls[kind] and seconds[kind]:
                rows.setdefault(kind, []).append(((calls[kind], moved[kind]), seconds[kind]))
        if seconds["cat"]:
            all_cats = [total[kind] for kind in _CATS for total in (calls, moved)]
            rows.setdefault("cat", []).append((all_cats, seconds["cat"]))
    lines = {kind: round_digits(solve_nonnegative(entries)) for kind, entries in sorted(rows.items())}
    if "cat" in lines:
        lines |= _split_cats(lines["cat"])
    return lines, {kind: round_digits(solve_nonnegative(entries)) for kind, entries in optimizers.items()}


def _split_cats(weights: list[float]) -> dict[str, list[float]]:
    """Each kind's two constants; kinds without seconds of a byte take those of plain cat."""
    pairs = {kind: weights[2 * i : 2 * i + 2] for i, kind in enumerate(_CATS)}
    return {kind: pair for kind, pair in pairs.items() if kind == "cat" or pair[1]}
