"""Constants of matrix products: linear layers, experts, and convolutions that make patches of images."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from flopcalc.base.errors import CalibrationError
from flopcalc.measure.predictor.fit.cases import Json, ModelledCase
from flopcalc.measure.predictor.fit.choices import (
    GROUPED_BANDWIDTH_SHARE,
    GROUPED_PULL,
    GROUPED_ROUNDED_ERROR,
    MAX_TILE_SHARE,
    MIN_GROUPED_CALLS,
    MIN_UNALIGNED_SIZE,
    PROCESSORS_GAIN,
    PROCESSORS_RANGE,
    PROCESSORS_ROUNDS,
    PRODUCTS_PULL,
    PRODUCTS_STRIDE,
    ROUNDED_ERROR,
    START_BANDWIDTH_SHARE,
    START_RATE_SHARE,
)
from flopcalc.measure.predictor.fit.points import GroupedPoint, ProductPoint, is_plain, list_operators
from flopcalc.measure.predictor.fit.solvers import Row, fit_positive, round_digits, solve_nonnegative
from flopcalc.prediction.kernels.constants import PlainProducts
from flopcalc.prediction.kernels.machine import (
    MIN_PART_K,
    SPLITS,
    TILES,
    GroupShape,
    ProductShape,
    find_step,
    time_grouped,
    time_shape,
)

ALIGNED = 8  # widths that are a multiple of 8 start each row on 16 bytes
DIRECTIONS = ("forward", "dgrad", "wgrad")


def fit_products(points: Sequence[ProductPoint], others: Sequence[ProductPoint] = ()) -> PlainProducts:
    """Constants of `time_shape`, the ratio that each shape leaves over, and the slowdown of unaligned widths.

    `others` are products that were measured alone; they count for unaligned widths only.
    """
    aligned = [point for point in points if find_step(point.n, point.k) == ALIGNED]
    if not aligned:
        raise CalibrationError("no profiled step has a layer whose widths are multiples of 8: no product can be fitted")
    shape = ProductShape(*round_digits(_fit_shape(aligned), 6))
    slowdowns: dict[str, dict[str, list[float]]] = {}
    for point in (*points, *others):
        step = find_step(point.n, point.k)
        if step < ALIGNED and point.m * point.n * point.k > MIN_UNALIGNED_SIZE:
            slowdowns.setdefault(str(step), {}).setdefault(point.direction, []).append(_find_ratio(shape, point))
    residuals: dict[tuple[str, int, int, int], list[float]] = {}
    for point in aligned:
        residuals.setdefault((point.direction, point.m, point.n, point.k), []).append(_find_ratio(shape, point))
    return {
        "shape": list(shape),
        "unaligned": {
            step: {direction: _round_median(ratios) for direction, ratios in sorted(directions.items())}
            for step, directions in sorted(slowdowns.items())
        },
        "residuals": [(*key, _round_median(ratios)) for key, ratios in sorted(residuals.items())],
    }


def _fit_shape(points: Sequence[ProductPoint]) -> ProductShape:
    """Constants with the least sum of errors; the count of processors, a whole number, is searched apart."""
    chosen = sorted(points, key=lambda point: -point.seconds * point.calls)[::PRODUCTS_STRIDE]
    table = ProductTable(chosen)
    seconds = np.array([point.seconds for point in chosen])
    weights = np.sqrt(seconds * [point.calls for point in chosen])
    weights /= weights.mean()

    def list_errors(shape: ProductShape) -> Any:
        return weights * np.log(table.predict(shape) / seconds)

    def fit_rates(start: ProductShape) -> ProductShape:
        """All constants but the count of processors."""
        *rates, units = start
        is_share = [name in ("half", "quarter", "eighth") for name in ProductShape._fields[:-1]]
        most = [MAX_TILE_SHARE if each else math.inf for each in is_share]
        rates = fit_positive(
            lambda rates: list_errors(ProductShape(*rates)._replace(units=units)),
            rates, ROUNDED_ERROR, PRODUCTS_PULL, most,
        )  # fmt: skip
        return ProductShape(*rates)._replace(units=units)

    def fit_units(shape: ProductShape) -> ProductShape:
        counts = range(round(shape.units / PROCESSORS_RANGE), round(shape.units * PROCESSORS_RANGE) + 1)
        tried = [shape, *(shape._replace(units=float(count)) for count in counts)]
        errors = [np.abs(list_errors(each)).sum() for each in tried]
        best = int(np.argmin(errors))
        return tried[best] if errors[best] < (1 - PROCESSORS_GAIN) * errors[0] else shape

    shape = fit_rates(_find_start(table, seconds))
    for _ in range(PROCESSORS_ROUNDS):
        other = fit_units(shape)
        if other == shape:
            break
        shape = fit_rates(other)
    return shape


def _find_start(table: ProductTable, seconds: object) -> ProductShape:
    """The usual constants with rate and bandwidth of the fastest products."""
    return ProductShape()._replace(
        rate=START_RATE_SHARE * float((table.flops / seconds).max()),
        bandwidth=START_BANDWIDTH_SHARE * float((table.bytes / seconds).max()),
    )


class ProductTable:
    """Many products, whose seconds are predicted at once: `time_shape` in arrays, which a search calls often."""

    def __init__(self, points: Sequence[ProductPoint]) -> None:
        m, n, k = np.array([_list_sizes(point) for point in points]).T
        self.flops = 2.0 * m * n * k
        self.bytes = 2.0 * (m * k + k * n + m * n)
        options = [(*tile, parts) for tile in TILES for parts in SPLITS]
        rows, columns, parts = (np.array(column)[:, None] for column in zip(*options, strict=True))
        self.areas = rows * columns
        self.tiles = -(-m // rows) * -(-n // columns) * parts
        self.depths = k / parts
        self.is_split = parts > 1
        self.is_refused = self.is_split & (k < MIN_PART_K * parts)

    def predict(self, shape: ProductShape) -> Any:
        shares = np.array([[shape.find_share(area)] for area in self.areas[:, 0]])
        waves = -(-self.tiles // round(shape.units))
        computed = waves * self.areas * 2 * (self.depths + shape.lead) * shape.units / (shape.rate * shares)
        computed = np.where(self.is_refused, np.inf, computed + self.is_split * shape.split).min(axis=0)
        return shape.start + np.maximum(computed, self.bytes / shape.bandwidth)


def _list_sizes(point: ProductPoint) -> tuple[int, int, int]:
    """Rows, columns and depth of the matrix product that a direction is."""
    m, n, k = point.m, point.n, point.k
    return {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[point.direction]


def _find_ratio(shape: ProductShape, point: ProductPoint) -> float:
    """Measured over predicted seconds."""
    return point.seconds / time_shape(shape, point.direction, point.m, point.n, point.k)


def _round_median(ratios: Sequence[float]) -> float:
    return float(f"{statistics.median(ratios):.4g}")


# --- Experts ----------------------------------------------------------------------------------------------------------
def fit_grouped(points: Sequence[GroupedPoint], plain: ProductShape) -> dict[str, list[float]]:
    """Constants of `time_grouped` per direction; where a direction's calls are too few, those of all directions."""
    usual = GroupShape()
    # Without measured experts: as fast in relation to plain products as on the device where both were measured.
    start = usual._replace(
        rate=plain.rate * usual.rate / ProductShape().rate, bandwidth=GROUPED_BANDWIDTH_SHARE * plain.bandwidth
    )
    shared = _fit_group(points, start, plain.units)
    return {
        direction: round_digits(
            _fit_group([point for point in points if point.direction == direction], shared, plain.units)
        )
        for direction in DIRECTIONS
    }


def _fit_group(points: Sequence[GroupedPoint], start: GroupShape, units: float) -> GroupShape:
    if len(points) < MIN_GROUPED_CALLS:
        return start

    def list_errors(constants: Sequence[float]) -> list[float]:
        shape = GroupShape(*constants)
        predicted = [
            time_grouped(shape, units, point.direction, point.experts, point.m, point.n, point.k) for point in points
        ]
        return [math.log(seconds / point.seconds) for seconds, point in zip(predicted, points, strict=True)]

    return GroupShape(*fit_positive(list_errors, start, GROUPED_ROUNDED_ERROR, GROUPED_PULL))


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
