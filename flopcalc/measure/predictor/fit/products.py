"""Constants of matrix products (linear layers, experts, convolutions that make patches) and of attention kernels."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from flopcalc.base.errors import CalibrationError
from flopcalc.hardware.routing import RANDOM
from flopcalc.hardware.tiles import ALIGNED, DIRECTIONS, choose_tile
from flopcalc.measure.predictor.fit.cases import Json, ModelledCase
from flopcalc.measure.predictor.fit.choices import CHOICES
from flopcalc.measure.predictor.fit.points import AttentionPoint, GroupedPoint, ProductPoint, is_plain, list_operators
from flopcalc.measure.predictor.fit.solvers import Row, fit_positive, round_digits, solve_nonnegative
from flopcalc.prediction.kernels.attention import IN_WAVES, attention_features, name_mask
from flopcalc.prediction.kernels.constants import PlainProducts
from flopcalc.prediction.kernels.products import (
    MIN_PART_K,
    SPLITS,
    TILE_AREAS,
    TILES,
    GroupShape,
    ProductShape,
    time_grouped,
    time_shape,
)
from flopcalc.prediction.work import Attention


def fit_products(points: Sequence[ProductPoint], others: Sequence[ProductPoint] = (), tiles: str = "") -> PlainProducts:
    """Constants of `time_shape`, the ratio that each shape leaves over, and the slowdown of unaligned widths.

    `others` are products that were measured alone; they count for unaligned widths only. `tiles` names the table of
    the device's tiles, if it has one.
    """
    aligned = [point for point in points if point.size.find_step() == ALIGNED]
    if not aligned:
        raise CalibrationError("no profiled step has a layer whose widths are multiples of 8: no product can be fitted")
    shape = ProductShape(*round_digits(_fit_shape(aligned, tiles), 6))
    slowdowns: dict[str, dict[str, list[float]]] = {}
    for point in (*points, *others):
        step = point.size.find_step()
        if step < ALIGNED and point.m * point.n * point.k > CHOICES.min_unaligned_size:
            slowdowns.setdefault(str(step), {}).setdefault(point.direction, []).append(_find_ratio(shape, point, tiles))
    residuals: dict[tuple[str, int, int, int], list[float]] = {}
    for point in aligned:
        residuals.setdefault((point.direction, point.m, point.n, point.k), []).append(_find_ratio(shape, point, tiles))
    return {
        "shape": list(shape),
        "tiles": tiles,
        "unaligned": {
            step: {direction: _round_median(ratios) for direction, ratios in sorted(directions.items())}
            for step, directions in sorted(slowdowns.items())
        },
        "residuals": [(*key, _round_median(ratios)) for key, ratios in sorted(residuals.items())],
    }


def _fit_shape(points: Sequence[ProductPoint], tiles: str) -> ProductShape:
    """Constants with the least sum of errors; the count of processors, a whole number, is searched apart."""
    chosen = sorted(points, key=lambda point: -point.seconds * point.calls)[:: CHOICES.products_stride]
    table = ProductTable(chosen, tiles)
    seconds = np.array([point.seconds for point in chosen])
    weights = np.sqrt(seconds * [point.calls for point in chosen])
    weights /= weights.mean()

    def list_errors(shape: ProductShape) -> Any:
        return weights * np.log(table.predict(shape) / seconds)

    def fit_rates(start: ProductShape) -> ProductShape:
        """All constants but the count of processors."""
        *rates, units = start
        is_share = [name in ("half", "quarter", "eighth") for name in ProductShape._fields[:-1]]
        most = [CHOICES.max_tile_share if each else math.inf for each in is_share]
        rates = fit_positive(
            lambda rates: list_errors(ProductShape(*(*rates, units))),
            rates,
            CHOICES.rounded_error,
            CHOICES.products_pull,
            most,
        )
        return ProductShape(*(*rates, units))

    def fit_units(shape: ProductShape) -> ProductShape:
        counts = range(round(shape.units / CHOICES.processors_range), round(shape.units * CHOICES.processors_range) + 1)
        tried = [shape, *(shape._replace(units=float(count)) for count in counts)]
        errors = [np.abs(list_errors(each)).sum() for each in tried]
        best = int(np.argmin(errors))
        return tried[best] if errors[best] < (1 - CHOICES.processors_gain) * errors[0] else shape

    shape = fit_rates(_find_start(table, seconds))
    for _ in range(CHOICES.processors_rounds):
        other = fit_units(shape)
        if other == shape:
            break
        shape = fit_rates(other)
    return shape


def _find_start(table: ProductTable, seconds: object) -> ProductShape:
    """The usual constants with rate and bandwidth of the fastest products."""
    return ProductShape.usual()._replace(
        rate=CHOICES.start_rate_share * float((table.flops / seconds).max()),
        bandwidth=CHOICES.start_bandwidth_share * float((table.bytes / seconds).max()),
    )


class ProductTable:
    """Many products, whose seconds are predicted at once: `time_shape` in arrays, which a search calls often."""

    def __init__(self, points: Sequence[ProductPoint], tiles: str = "") -> None:
        sizes = [point.size.turn() for point in points]
        n, m, k = np.array(sizes).T
        self.flops = 2.0 * m * n * k
        self.bytes = 2.0 * (m * k + k * n + m * n)
        if tiles:
            chosen = [choose_tile(tiles, point.size) for point in points]
            counts = np.array([tile.count_tiles(*size[:2]) for tile, size in zip(chosen, sizes, strict=True)])[None]
            self.areas, parts = (np.array([[getattr(tile, name) for tile in chosen]]) for name in ("area", "parts"))
        else:
            options = [(*tile, parts) for tile in TILES for parts in SPLITS]
            rows, columns, parts = (np.array(column)[:, None] for column in zip(*options, strict=True))
            self.areas, counts = rows * columns, -(-m // rows) * -(-n // columns)
        self.ranks = np.searchsorted(TILE_AREAS, self.areas, side="right")
        self.tiles = counts * parts
        self.depths = k / parts
        self.is_split = parts > 1
        self.is_refused = self.is_split & (k < MIN_PART_K * parts) & (not tiles)

    def predict(self, shape: ProductShape) -> Any:
        shares = np.array([shape.eighth, shape.quarter, shape.half, 1.0])[self.ranks]
        waves = -(-self.tiles // round(shape.units))
        computed = waves * self.areas * 2 * (self.depths + shape.lead) * shape.units / (shape.rate * shares)
        computed = np.where(self.is_refused, np.inf, computed + self.is_split * shape.split).min(axis=0)
        return shape.start + np.maximum(computed, self.bytes / shape.bandwidth)


def _find_ratio(shape: ProductShape, point: ProductPoint, tiles: str) -> float:
    """Measured over predicted seconds."""
    return point.seconds / time_shape(shape, point.size, tiles)


def _round_median(ratios: Sequence[float]) -> float:
    return float(f"{statistics.median(ratios):.4g}")


# --- Experts ----------------------------------------------------------------------------------------------------------
def fit_grouped(points: Sequence[GroupedPoint], plain: ProductShape) -> dict[str, list[float]]:
    """Constants of `time_grouped` per direction; where a direction's calls are too few, those of all directions."""
    usual = GroupShape.usual()
    # Without measured experts: as fast in relation to plain products as on the device where both were measured.
    start = usual._replace(
        rate=plain.rate * usual.rate / ProductShape.usual().rate,
        bandwidth=CHOICES.grouped_bandwidth_share * plain.bandwidth,
    )
    shared = _fit_group(points, start, plain.units)
    return {
        direction: round_digits(
            _fit_group([point for point in points if point.direction == direction], shared, plain.units)
        )
        for direction in DIRECTIONS
    }


def _fit_group(points: Sequence[GroupedPoint], start: GroupShape, units: float) -> GroupShape:
    if len(points) < CHOICES.min_grouped_calls:
        return start

    def list_errors(constants: Sequence[float]) -> list[float]:
        shape = GroupShape(*constants)
        predicted = [time_grouped(shape, units, point.size._replace(routing=RANDOM)) for point in points]
        return [math.log(seconds / point.seconds) for seconds, point in zip(predicted, points, strict=True)]

    return GroupShape(*fit_positive(list_errors, start, CHOICES.grouped_rounded_error, CHOICES.grouped_pull))


# --- Patches ----------------------------------------------------------------------------------------------------------
def fit_patches(cases: Sequence[ModelledCase]) -> dict[str, list[float]]:
    """Seconds of a call and of a FLOP of convolutions that make patches; far slower than products of the same size."""
    rows: dict[str, list[Row]] = {}
    for each in cases:
        if not is_plain(each.case):
            continue
        operators = list_operators(each.case)
        for direction, name in (("forward", "aten::cudnn_convolution"), ("wgrad", "aten::convolution_backward")):
            seconds = sum(operator.us for operator in operators if operator.name == name) * 1e-6
            products = [product for product in each.work.products if product.is_patches]
            flops = sum(product.flops for product in products if product.direction == direction)
            if seconds and flops:
                rows.setdefault(direction, []).append(((1.0, flops), seconds))
    return {direction: round_digits(solve_nonnegative(entries)) for direction, entries in rows.items()}


def fit_adapters(calls: Sequence[Json]) -> dict[str, list[float]]:
    """Format and form of an adapter's products -> seconds of a call, of a byte and of a FLOP."""
    rows: dict[str, list[Row]] = {}
    for call in calls:
        if "narrow" in call:
            features = (1.0, float(call["bytes"]), float(call["flops"]))
            rows.setdefault(call["narrow"], []).append((features, call["seconds"]))
    return {name: round_digits(solve_nonnegative(entries)) for name, entries in rows.items()}


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
            constants = _scale_usual(group[0], rows, CHOICES.attention_start_share * call_s)
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
    return bool(
        len(sizes) >= CHOICES.min_attention_sizes
        and max(heads) >= CHOICES.min_heads_range * min(heads)
        and max(keys) >= CHOICES.min_keys_range * min(keys)
        and min(point.seconds for point in group) < CHOICES.max_shortest_call * shortest_s
    )


def _scale_usual(point: AttentionPoint, rows: Sequence[tuple[_Features, float]], call_s: float) -> list[float]:
    """Constants in their usual relation to a pair's seconds; whole waves of blocks count the longest row already."""
    causal = (CHOICES.pairs_per_query[point.direction], CHOICES.pairs_per_longest_key)
    usual = {"decode": (0.0, 0.0), "causal": causal, "dropout": causal}
    per_query, per_key = usual.get(point.mask, (CHOICES.pairs_per_query_in_waves, 0.0))
    pair_s = statistics.median(
        (seconds - call_s) / (pairs + queries * per_query + longest * per_key)
        for (_, queries, pairs, longest), seconds in rows
    )
    return [call_s, pair_s * per_query, pair_s, pair_s * per_key]
