"""Profiled steps go in; the constants of a predictor come out: what a product, a call, a moved byte cost on a device.

Pure Python, small problems: a search by coordinates over few constants, medians over bins of sizes.
"""

from __future__ import annotations

import ast
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flopcalc.core.estimate.binding import bind_config as bind
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.workload.workload import Workload, make_workload
from flopcalc.errors import CalibrationError
from flopcalc.prediction.clock import Clock, find_unit, name_factor, name_mode, name_phase
from flopcalc.prediction.machine import (
    SCHEMA,
    STREAMED,
    GroupShape,
    Machine,
    ProductShape,
    attention_features,
    find_step,
    name_mask,
    slow_down,
    time_grouped,
    time_shape,
)
from flopcalc.prediction.maker import count_calls, make_work
from flopcalc.prediction.operators import classify
from flopcalc.prediction.work import Work

Json = dict[str, Any]
_SIZES = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "long int": 8, "int": 4, "double": 8, "bool": 1,
          "unsigned char": 1}  # fmt: skip
_FLOATS = ("c10::BFloat16", "c10::Half", "float", "double")


class ProductPoint(NamedTuple):
    direction: str
    m: int
    n: int
    k: int
    seconds: float
    calls: int


class AttentionPoint(NamedTuple):
    kernel: str
    direction: str
    mask: str
    batch: int
    heads: int
    kv_heads: int
    qk: int
    length: int
    keys: int
    seconds: float
    calls: int


class MovedPoint(NamedTuple):
    kind: str
    bytes: int
    seconds: float
    calls: int


class Points(NamedTuple):
    """What the operators of profiled steps took, one entry per operator and shape of a case."""

    products: list[ProductPoint]
    attention: list[AttentionPoint]
    moved: list[MovedPoint]


class Modelled(NamedTuple):
    """A measured case and the work that the predictor sees in it."""

    case: Json
    estimator: Estimator
    load: Workload
    work: Work


def model_case(case: Json, config: Json, device: str = "h200-sxm") -> Modelled:
    kernel = "eager" if case["attention"] == "eager" else ""
    estimator = bind(
        config, recipe={"recompute": case["recompute"]}, convention="hardware", device=device,
        attention_kernel=kernel or "auto",
    )  # fmt: skip
    images = [grid for _ in range(case["batch"]) for grid in case["grids"]] or None
    context = case["context"] if case["phase"] == "decode" else None
    load = make_workload(case["batch"], case["seq"], image_grid_thw=images, phase=case["phase"], context=context)
    return Modelled(case, estimator, load, make_work(estimator, load, optimizer=case["optimizer"], kernel=kernel))


def read_points(cases: Iterable[Modelled]) -> Points:
    """Every operator of eager cases.

    Recomputed steps stand aside: a product that stops a recomputation is noted and never run.
    """
    points = Points([], [], [])
    for case, _, _, work in cases:
        if not _is_plain(case):
            continue
        masks: dict[tuple[int, int, int], set[str]] = {}
        for call in work.attention:
            mask = "dropout" if call.has_dropout and call.mask == "causal" else call.mask
            masks.setdefault((call.batch, call.heads, call.length), set()).add(mask)
        rows, weights = _list_layers(case["operators"])
        for name, is_backward, shapes, dtypes, calls, kernels, us, kernel in case["operators"]:
            if not us or not name:
                continue
            sizes, kinds = ast.literal_eval(shapes), dtypes.split(",")
            kind = classify(name)
            each = us / calls * 1e-6
            if kind == "product":
                product = _read_product(name, is_backward, sizes, kinds, rows, weights)
                if product:
                    points.products.append(ProductPoint(*product, each, calls))
            elif kind == "attention":
                attended = _read_attention(name, sizes, masks, each, calls)
                if attended:
                    points.attention.append(attended)
            else:
                moved = _read_moved(name, kind, sizes, kinds, kernel)
                if moved and moved[0] == "reduce" and is_backward:
                    moved = ("reduce_backward", moved[1])
                if moved and kernels:
                    points.moved.append(MovedPoint(*moved, each, calls))
    return points


def _is_plain(case: Json) -> bool:
    """Whether a case was profiled, and runs every operator once, as it is."""
    return "operators" in case and not case["compiled"] and case["recompute"] == "none"


def _list_layers(operators: Sequence[Sequence[Any]]) -> tuple[set[int], set[tuple[int, int]]]:
    """Row counts and (inputs, outputs) of the linear layers that a step's forward pass runs."""
    rows, weights = set(), set()
    for name, is_backward, shapes, *_ in operators:
        if name in ("aten::mm", "aten::addmm") and not is_backward:
            left, right = ast.literal_eval(shapes)[-2:] if name == "aten::mm" else ast.literal_eval(shapes)[1:3]
            rows.add(left[0])
            weights.add((right[0], right[1]))
    return rows, weights


def _read_product(
    name: str,
    is_backward: bool,
    sizes: list[list[int]],
    kinds: list[str],
    rows: set[int],
    weights: set[tuple[int, int]],
) -> tuple[str, int, int, int] | None:
    """Direction, m, n, k of a linear layer from the shapes of its product; None where it is none."""
    if name not in ("aten::mm", "aten::addmm") or kinds[0] != "c10::BFloat16":
        return None
    (a, b), (_, c) = sizes[-2:] if name == "aten::mm" else sizes[1:3]
    if not is_backward:
        return "forward", a, c, b
    if b in rows and (c, a) in weights:
        return "wgrad", b, a, c
    if a in rows and (c, b) in weights:
        return "dgrad", a, b, c
    return None


def _read_attention(
    name: str, sizes: list[list[int]], masks: dict[tuple[int, int, int], set[str]], seconds: float, calls: int
) -> AttentionPoint | None:
    """A call as the model's op list knows it; None for one that it does not."""
    is_backward = "backward" in name
    query, key = sizes[1:3] if is_backward else sizes[0:2]
    batch, heads, length, qk = query
    found = masks.get((batch, heads, length), set())
    is_masked = any(len(size) == 4 and size[-2:] == [length, key[2]] and size[-1] != qk for size in sizes[3:])
    plain = sorted(found - {"window"})
    mask = "window" if "window" in found and (is_masked or not plain) else plain[0] if plain else None
    kernel = next((kernel for kernel in ("cudnn", "flash", "efficient") if kernel in name), "")
    if mask is None or not kernel:
        return None
    direction = "backward" if is_backward else "forward"
    return AttentionPoint(kernel, direction, mask, batch, heads, key[1], qk, length, key[2], seconds, calls)


def _read_moved(name: str, kind: str, sizes: list[list[int]], kinds: list[str], kernel: str) -> tuple[str, int] | None:
    """Kind and bytes of a call, from its shapes; None where they do not tell."""
    tensors = [
        (math.prod(size), _SIZES[dtype]) for size, dtype in zip(sizes, kinds, strict=False) if size and dtype in _SIZES
    ]
    if not tensors:
        return None
    most, width = max(tensors)
    floats = {dtype for size, dtype in zip(sizes, kinds, strict=False) if size and dtype in _FLOATS}
    if len(floats) > 1:  # the result is of the wider one
        width = max(_SIZES[dtype] for dtype in floats)
    if name == "aten::copy_":
        kind = "copy" if kinds[0] == kinds[1] else "cast"
        moved = most * (tensors[0][1] + (tensors[1][1] if len(tensors) > 1 else 0))
    elif kind == "reduce":
        moved = sum(count * size for count, size in tensors)
    elif kind == "fill":
        moved = most * width
    elif name.endswith("_"):
        moved = sum(count * size for count, size in tensors) + tensors[0][0] * tensors[0][1]
    else:
        moved = sum(count * size for count, size in tensors) + most * width
    if kind in ("pointwise", "copy", "cast"):
        is_alike = "vectorized" in kernel or "Memcpy" in kernel or "unrolled" in kernel
        if kind == "pointwise" and len(floats) > 1:
            kind = "pointwise_mixed" if is_alike else "pointwise_strided_mixed"
        elif not is_alike:
            kind += "_strided" + ("_wide" if kind != "cast" and tensors[0][1] >= 4 else "")
        elif kind == "cast":
            kind = "cast_up" if tensors[0][1] > tensors[-1][1] else "cast_down"
    return kind, moved


# --- Curves -----------------------------------------------------------------------------------------------------------
def fit_curve(points: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """(size, seconds, weight) -> median seconds per half octave of size, sorted; never fewer for more bytes."""
    bins: dict[int, list[tuple[float, float, float]]] = {}
    for size, seconds, weight in points:
        bins.setdefault(round(2 * math.log2(max(size, 1))), []).append((size, seconds, weight))
    curve = []
    for found in bins.values():
        per_byte = _weighted_median([(seconds / max(size, 1), weight) for size, seconds, weight in found])
        middle = math.exp(statistics.fmean(math.log(max(size, 1)) for size, _, _ in found))
        curve.append((middle, per_byte * middle))
    curve.sort()
    # Neighbours that fall are joined to their middle, until none does.
    levels: list[list[float]] = []
    for _, seconds in curve:
        levels.append([seconds])
        while len(levels) > 1 and statistics.median(levels[-2]) > statistics.median(levels[-1]):
            levels[-2:] = [levels[-2] + levels[-1]]
    risen = [statistics.median(level) for level in levels for _ in level]
    return [(size, seconds) for (size, _), seconds in zip(curve, risen, strict=True)]


def _weighted_median(values: list[tuple[float, float]]) -> float:
    values.sort()
    half = sum(weight for _, weight in values) / 2
    for value, weight in values:
        half -= weight
        if half <= 0:
            return value
    return values[-1][0]


def search(loss: Callable[[list[float]], float], start: list[float], rounds: int = 60) -> list[float]:
    """A minimum by steps along one coordinate after another, each scaled by its own size; positive numbers only."""
    best, at = loss(start), list(start)
    steps = [0.2] * len(at)
    for _ in range(rounds):
        moved = False
        for i in range(len(at)):
            for factor in (1 + steps[i], 1 / (1 + steps[i])):
                tried = [*at[:i], at[i] * factor, *at[i + 1 :]]
                found = loss(tried)
                if found < best:
                    best, at, moved = found, tried, True
                    break
            else:
                steps[i] *= 0.6
        if not moved and max(steps) < 2e-3:
            break
    return at


def solve(rows: Sequence[tuple[Sequence[float], float]], rounds: int = 400) -> list[float]:
    """Non-negative least squares of relative errors: rows of (features, value)."""
    width = len(rows[0][0])
    scaled = [[feature / value for feature in features] for features, value in rows]
    norms = [sum(row[i] ** 2 for row in scaled) for i in range(width)]
    at = [0.0] * width
    left = [1.0] * len(scaled)
    for _ in range(rounds):
        for i in range(width):
            if not norms[i]:
                continue
            change = sum(row[i] * rest for row, rest in zip(scaled, left, strict=True)) / norms[i]
            change = max(change, -at[i])
            if change:
                at[i] += change
                left = [rest - row[i] * change for row, rest in zip(scaled, left, strict=True)]
    return at


# --- A predictor's constants ------------------------------------------------------------------------------------------
def fit_products(points: Sequence[ProductPoint], others: Sequence[ProductPoint] = ()) -> Json:
    """Constants of `time_shape`, what is left over per shape, and what widths that are no multiple of 8 cost.

    `others` are products that were measured by themselves: they tell the last.
    """
    aligned = [point for point in points if find_step(point.n, point.k) == 8]
    chosen = sorted(aligned, key=lambda point: -point.seconds * point.calls)[::3]
    weights = [math.sqrt(point.seconds * point.calls) for point in chosen]

    def loss(constants: list[float]) -> float:
        shape = ProductShape(*constants)
        return sum(
            weight * abs(math.log(time_shape(shape, point.direction, point.m, point.n, point.k) / point.seconds))
            for point, weight in zip(chosen, weights, strict=True)
        ) / sum(weights)

    start = ProductShape()
    found = ProductShape(*search(loss, list(start)))
    slow: dict[str, dict[str, list[float]]] = {}
    for point in (*points, *others):
        step = find_step(point.n, point.k)
        if step < 8 and point.m * point.n * point.k > 2**31:
            told = time_shape(found, point.direction, point.m, point.n, point.k)
            slow.setdefault(str(step), {}).setdefault(point.direction, []).append(point.seconds / told)
    residuals: dict[tuple[str, int, int, int], list[float]] = {}
    for point in aligned:
        ratio = point.seconds / time_shape(found, point.direction, point.m, point.n, point.k)
        residuals.setdefault((point.direction, point.m, point.n, point.k), []).append(ratio)
    return {
        "shape": [float(f"{value:.6g}") for value in found],
        "unaligned": {
            step: {way: float(f"{statistics.median(ratios):.4g}") for way, ratios in sorted(ways.items())}
            for step, ways in sorted(slow.items())
        },
        "residuals": [[*key, float(f"{statistics.median(ratios):.4g}")] for key, ratios in sorted(residuals.items())],
    }


def read_grouped(is_backward: bool, sizes: Sequence[Sequence[int]]) -> tuple[str, int, int, int, int]:
    """Direction, experts, m, n, k of a grouped product, as autograd calls it."""
    left, right, ends = sizes[:3]
    if len(right) == 2:
        return "wgrad", ends[0], left[1], left[0], right[1]
    if is_backward:
        return "dgrad", right[0], left[0], left[1], right[2]
    return "forward", right[0], left[0], right[2], left[1]


def fit_grouped(cases: Sequence[Modelled], calls: Iterable[Json], plain: ProductShape) -> dict[str, list[float]]:
    """Constants of `time_grouped` in each direction, from profiled steps and from calls that were timed by themselves.

    Of all directions together first: what one direction's calls do not tell is taken from there. Of steps with few rows
    an expert, nothing: a router without training leaves many experts out.
    """
    points = [
        (call["direction"], call["copies"], call["m"], call["n"], call["k"], call["seconds"])
        for call in calls
        if "copies" in call
    ]
    for case, *_ in cases:
        if not _is_plain(case):
            continue
        for name, is_backward, shapes, _, many, _, us, _ in case["operators"]:
            if "grouped_mm" in name and us:
                found = read_grouped(is_backward, ast.literal_eval(shapes))
                if found[2] >= _LEAST_ROWS * found[1]:
                    points.append((*found, us / many * 1e-6))
    units = plain.units
    usual = GroupShape()
    # Where nothing tells of experts, as fast beside plain products as they are where both were measured.
    start = usual._replace(rate=plain.rate * usual.rate / ProductShape().rate, bandwidth=0.8 * plain.bandwidth)
    shared = _search_group(points, start, units)
    return {
        way: _round(_search_group([point for point in points if point[0] == way], shared, units))
        for way in ("forward", "dgrad", "wgrad")
    }


def fit_patches(cases: Sequence[Modelled]) -> dict[str, list[float]]:
    """Convolutions that make patches, far slower than a product of the same size: seconds of a call and of a FLOP."""
    rows: dict[str, list[tuple[Sequence[float], float]]] = {}
    for case, _, _, work in cases:
        if not _is_plain(case):
            continue
        for way, name in (("forward", "aten::cudnn_convolution"), ("wgrad", "aten::convolution_backward")):
            seen = sum(row[6] for row in case["operators"] if row[0] == name) * 1e-6
            flops = sum(each.flops for each in work.products if each.is_patches and each.direction == way)
            if seen and flops:
                rows.setdefault(way, []).append(((1.0, flops), seen))
    return {way: _round(solve(entries)) for way, entries in rows.items()}


_LEAST_ROWS = 8
_LEAST_CALLS = 8  # that tell the six constants of a direction
_PULL = 0.05


def _search_group(
    points: Sequence[tuple[str, int, int, int, int, float]], start: GroupShape, units: float
) -> GroupShape:
    if len(points) < _LEAST_CALLS:
        return start

    def loss(constants: list[float]) -> float:
        shape = GroupShape(*constants)
        missed = sum(  # round at the bottom: a search by coordinates stops at edges
            math.hypot(0.02, math.log(time_grouped(shape, units, way, copies, m, n, k) / seconds))
            for way, copies, m, n, k, seconds in points
        )
        # What no call tells stays where it was.
        return missed + _PULL * sum(math.log(value / usual) ** 2 for value, usual in zip(constants, start, strict=True))

    return GroupShape(*search(loss, list(start), 100))


_ALONE_CALLS = 4  # how much a product that was timed by itself counts: in steps, each call does
_TELLING = 5  # different calls that tell the four constants of an attention kernel
# What a query and a key of the longest row take, in pairs, for calls that do not tell: 128 queries are one processor's,
# of about 130, and half of those are busy meanwhile.
_QUERIES = {"forward": 130.0, "backward": 380.0}
_WAVED = 50.0  # a query's, where whole waves of blocks are counted
_ROW = 7500.0


def fit_attention(points: Sequence[AttentionPoint], units: int) -> Json:
    """Per kernel, direction, mask and head dim: seconds of a call, of a query, of a pair, and of the longest row.

    Where the calls are few, or all large, or all of one length, they tell the seconds of a pair alone: the others then
    follow from those, and a call takes as long as the shortest of all.
    """
    groups: dict[tuple[str, str], list[AttentionPoint]] = {}
    least: dict[str, float] = {}
    for point in points:
        name = f"{point.direction}/{name_mask(point.mask, point.keys)}/{point.qk}"
        groups.setdefault((point.kernel, name), []).append(point)
        least[point.direction] = min(point.seconds, least.get(point.direction, math.inf))
    found: dict[str, Json] = {}
    for (kernel, name), group in sorted(groups.items()):
        first = group[0]
        rows: list[tuple[Sequence[float], float]] = [
            (attention_features(units, *each[1:9]), each.seconds)  # from its direction to its keys
            for each in group
        ]
        if _tells(group, least[first.direction]):
            # And a call without queries, that none of the others may be longer for.
            values = solve([*rows, ((1.0, 0.0, 0.0, 0.0), least[first.direction])], 1000)
        else:
            causal = (_QUERIES[first.direction], _ROW)
            usual = {"decode": (0.0, 0.0), "causal": causal, "dropout": causal}
            query, row = usual.get(first.mask, (_WAVED, 0.0))  # waves of blocks already count the longest row
            start = 0.9 * least[first.direction]
            pair = statistics.median(
                (seconds - start) / (pairs + queries * query + longest * row)
                for (_, queries, pairs, longest), seconds in rows
            )
            values = [start, pair * query, pair, pair * row]
        found.setdefault(kernel, {})[name] = _round(values)
    return found


def _tells(group: Sequence[AttentionPoint], least: float) -> bool:
    """Whether calls differ in length and in how many heads they have, each for itself, and some are short."""
    sizes = {(point.batch * point.heads, point.length, point.keys) for point in group}
    heads, keys = ({size[i] for size in sizes} for i in (0, 2))
    return (
        len(sizes) >= _TELLING
        and max(heads) >= 2 * min(heads)
        and max(keys) >= 4 * min(keys)
        and min(point.seconds for point in group) < 4 * least
    )


def fit_moved(points: Sequence[MovedPoint]) -> Json:
    groups: dict[str, list[tuple[float, float, float]]] = {}
    for point in points:
        groups.setdefault(point.kind, []).append((point.bytes, point.seconds, point.calls))
    return {
        kind: [[round(size), float(f"{seconds:.4g}")] for size, seconds in fit_curve(found)]
        for kind, found in sorted(groups.items())
        if len(found) >= 3
    }


# --- Whole steps ------------------------------------------------------------------------------------------------------
_CATS = ("cat", "cat_one", "cat_cache", "cat_strided", "cat_strided_wide")
_ALONE = ("gather", "scatter", "embedding_backward", "loss", "norm", "norm_backward", "sort", "random")
_LINEAR = (*_CATS, *_ALONE, "copy_strided_wide", "cast_strided", "other")


def fit_linear(cases: Sequence[Modelled]) -> tuple[Json, Json]:
    """Kinds whose shapes a profile does not tell: seconds of a call and of a byte; and the optimizer's."""
    rows: dict[str, list[tuple[Sequence[float], float]]] = {}
    optimizers: dict[str, list[tuple[Sequence[float], float]]] = {}
    for each in cases:
        if not _is_plain(each.case):
            continue
        seen: dict[str, float] = {}
        for name, *_, us, _ in each.case["operators"]:
            kind = "optimizer" if "_fused_adam" in name else classify(name)
            seen[kind] = seen.get(kind, 0.0) + (us or 0.0) * 1e-6
        calls: dict[str, float] = {}
        moved: dict[str, float] = {}
        for piece in each.work.moved:
            calls[piece.kind] = calls.get(piece.kind, 0.0) + piece.calls
            moved[piece.kind] = moved.get(piece.kind, 0.0) + piece.calls * (piece.reads + piece.writes)
            if piece.direction == "optimizer" and seen.get("optimizer"):
                features = (1.0, float(piece.tensors), piece.reads + piece.writes)
                optimizers.setdefault(piece.kind, []).append((features, seen["optimizer"]))
        for kind in _ALONE:
            if calls.get(kind) and seen.get(kind):
                rows.setdefault(kind, []).append(((calls[kind], moved[kind]), seen[kind]))
        if seen.get("cat"):
            all_cats = [total.get(kind, 0.0) for kind in _CATS for total in (calls, moved)]
            rows.setdefault("cat", []).append((all_cats, seen["cat"]))
    found = {kind: _round(solve(entries)) for kind, entries in sorted(rows.items())}
    if "cat" in found:
        weights = found["cat"]
        found |= {kind: weights[2 * i : 2 * i + 2] for i, kind in enumerate(_CATS) if not i or weights[2 * i + 1]}
    return found, {kind: _round(solve(entries)) for kind, entries in optimizers.items()}


def _round(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def fit_device(cases: Sequence[Modelled], constants: Json) -> tuple[dict[str, float], list[float]]:
    """Seconds between kernels, with gradients and without, and the clock at the power limit.

    From steps that the device bounds beyond doubt: it was busy nearly all of the time. The clock falls with the share
    of the peak that a step's products keep up.
    """
    walls: list[tuple[str, float, float, float, float, float]] = []
    for each in cases:
        case = each.case
        if case["compiled"] or case["phase"] == "decode" or case["recompute"] != "none" or case["spread"] > 0.1:
            continue
        clock = _run_clock(each, constants)
        pace = case["probe_s"] / constants["probe_s"][name_mode(case["phase"])] if "probe_s" in case else 1.0
        if "busy_us" in case:
            is_bound = case["busy_us"] * 1e-6 > 0.93 * case["seconds"]
        else:
            is_bound = clock.host_s() * pace < 0.6 * clock.device_s()
        if is_bound and each.work.is_recorded:
            told = sum(piece.seconds for piece in clock.pieces)
            rate = clock.rate()
            idle_s = clock.step_s(pace) - clock.device_s()  # until the host has queued something
            seconds = case["seconds"] - idle_s
            walls.append((name_mode(case["phase"]), told, clock.clocked_s(), rate, clock.launches, seconds))

    def miss(values: list[float]) -> float:
        *power, train, forward = values
        gaps = {"train": train, "forward": forward}
        return sum(
            abs(math.log((told + (slow_down(power, rate) - 1) * clocked + many * gaps[phase]) / seconds))
            for phase, told, clocked, rate, many, seconds in walls
        )

    *power, train, forward = search(miss, [0.2, 0.7, 2e-6, 1e-6], 200) if walls else [1.0, 0.01, 2e-6, 1e-6]
    return dict(zip(("train", "forward"), _round((train, forward)), strict=True)), _round(power)


class Slowing(NamedTuple):
    """How many times longer kernels take in a pass whose step keeps up such a share of the peak."""

    start: float
    slope: float

    def at(self, rate: float) -> float:
        return 1 + self.slope * max(0.0, rate - self.start)


def fit_slowing(cases: Sequence[Modelled], constants: Json) -> tuple[list[float], dict[str, Slowing]]:
    """Share of the peak that each step keeps up, and what that does to the clock in profiled steps.

    A profiled step comes after a pause. Its forward pass begins at the full clock, its backward pass at a lower one
    where the power limit is reached; so products of a forward pass look faster than those of a backward pass.
    """
    shape = ProductShape(*constants["products"]["shape"])
    rates = []
    seen: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}
    for each in cases:
        clock = _run_clock(each, constants)
        rates.append(clock.rate())
        sums: dict[str, list[float]] = {}
        for point in read_points([each]).products:
            if point.seconds > _LARGE_S and find_step(point.n, point.k) == 8:
                way = "forward" if point.direction == "forward" else "backward"
                both = sums.setdefault(way, [0.0, 0.0])
                both[0] += point.seconds * point.calls
                both[1] += time_shape(shape, point.direction, point.m, point.n, point.k) * point.calls
        for way, (taken, usual) in sums.items():
            if rates[-1] > _LEAST_RATE:
                seen[way].append((rates[-1], taken / usual))
    return rates, {way: _search_slowing(points) for way, points in seen.items()}


_LARGE_S = 5e-5  # products that their FLOPs bound
_LEAST_RATE = 0.1


def _search_slowing(points: Sequence[tuple[float, float]]) -> Slowing:
    """The start whose line misses least; of each start, the line is that of the least squares."""
    if len(points) < _LEAST_CALLS:
        return Slowing(1.0, 0.0)
    best, found = math.inf, Slowing(1.0, 0.0)
    for start in (0.01 * i for i in range(10, 70)):
        usual, steepness = solve([((1.0, max(0.0, rate - start)), ratio) for rate, ratio in points])
        if not usual:
            continue
        tried = Slowing(start, steepness / usual)
        missed = sum(abs(math.log(ratio / (usual * tried.at(rate)))) for rate, ratio in points)
        if missed < best:
            best, found = missed, tried
    return found


def at_full_clock(each: Modelled, rate: float, slowing: Mapping[str, Slowing]) -> Modelled:
    """The same profiled case, its kernels as fast as a device is that need not save power."""
    if "operators" not in each.case:
        return each
    rows = []
    for name, is_backward, shapes, dtypes, calls, launches, us, kernel in each.case["operators"]:
        slower = slowing["backward" if is_backward else "forward"].at(rate)
        if not us or _is_streamed(name, shapes, dtypes, kernel):
            slower = 1.0
        rows.append([name, is_backward, shapes, dtypes, calls, launches, us and us / slower, kernel])
    return each._replace(case={**each.case, "operators": rows})


def _is_streamed(name: str, shapes: str, dtypes: str, kernel: str) -> bool:
    """Whether memory alone bounds an operator."""
    if not name or "_fused_adam" in name:
        return bool(name)
    kind = classify(name)
    if kind in ("product", "attention"):
        return False
    moved = _read_moved(name, kind, ast.literal_eval(shapes), dtypes.split(","), kernel)
    return moved is not None and moved[0] in STREAMED


def _run_clock(each: Modelled, constants: Json, compiled: bool = False) -> Clock:
    machine = Machine(constants["provenance"]["device_id"], "bf16", constants)
    clock = Clock(machine, "compiled" if compiled else "eager")
    clock.add(each.work, 1, each.load)
    return clock


HOST_PHASES = ("train", "forward", "decode")
# In units of an addition, what cannot be called by itself: a module's own Python, autograd's nodes, an optimizer's
# tensors, gradients of attention and those that are added up by index (many kernels); others where not measured.
_UNITS = {"view": 0.4, "make": 0.6, "product": 2.2, "product_grouped": 2.5, "attention": 3.5, "sort": 4.0,
          "attention_backward": 6.0, "scatter_backward": 8.0, "module": 1.0, "node": 0.3, "tensor": 1.0}  # fmt: skip


def fit_host(cases: Sequence[tuple[Modelled, float]], units: Mapping[str, float]) -> Json:
    """Seconds of each thing that the host does, from steps that it bounds; (case, its seconds)."""
    found: Json = {"units": dict(units), "types": {}, "again": [0.0, 0.0]}
    rows: dict[str, list[tuple[Sequence[float], float]]] = {phase: [] for phase in HOST_PHASES}
    for each, seconds in cases:
        if each.case["recompute"] == "none" and not _has_waited(each):
            features = host_features(each.work.dispatched, count_calls(each.load), units)
            rows[name_phase(each.load.phase)].append((features, seconds))
    found |= {phase: _round(solve(entries, 4000)) for phase, entries in rows.items() if entries}
    return found


def host_features(dispatched: Mapping[str, float], calls: int, units: Mapping[str, float]) -> tuple[float, float]:
    """What host time is made of: calls of the model, and all that they dispatch in units of one addition."""
    total = 0.0
    for name, many in dispatched.items():
        way, _, kind = name.partition(" ")
        total += many * find_unit(way, kind, units)
    return float(calls), total


def _has_waited(each: Modelled) -> bool:
    """Whether the host waits for the device in a step as small as this: where images enter, for large optimizers."""
    return bool(each.load.all_grids) or (
        each.load.phase == "train" and any(product.copies > 1 for product in each.work.products)
    )


def fit_again(cases: Sequence[tuple[Modelled, float]], larger: Iterable[Modelled], constants: Json) -> list[float]:
    """Host seconds of a checkpoint, and of an operator that it runs again, beyond those of the operators themselves.

    From small steps with recomputation (and their seconds), and from larger ones that the host still bounds.
    """
    host = {**constants["host"], "again": [0.0, 0.0]}
    usual_s = constants["probe_s"]["train"]
    steps = [(each, seconds, usual_s) for each, seconds in cases]
    paced = [each for each in larger if "probe_s" in each.case]
    steps += [(each, each.case["seconds"] / each.case["probe_s"] * usual_s, 0.0) for each in paced]
    rows: list[tuple[tuple[float, float], float]] = []
    for each, seconds, pause_s in steps:
        if each.case["recompute"] == "none" or each.case["grids"] or each.case["compiled"]:
            continue
        clock = _run_clock(each, {**constants, "host": host})
        left_s = seconds - clock.step_s(1.0, pause_s)
        many = count_again(each.work)
        if min(left_s, *many) > 0 and clock.device_s() < 0.5 * clock.host_s():
            rows.append((many, left_s))
    if not rows:
        return [0.0, 0.0]
    # Layers of most models dispatch about as many operators: where steps do not tell the two apart, half of each.
    checkpoint_s, operator_s = (statistics.median(left_s / 2 / many[i] for many, left_s in rows) for i in range(2))
    scaled = [((checkpoints, operator_s * operators), left_s) for (checkpoints, operators), left_s in rows]
    checkpoint_s, factor = solve_type(scaled, checkpoint_s)
    return _round((checkpoint_s, max(0.0, factor) * operator_s))


def count_again(work: Work) -> tuple[float, float]:
    """Checkpoints, and operators that they run again."""
    again = [each for each in work.hosted if each.way == "again"]
    return sum(each.many for each in again if each.is_checkpoint), sum(each.many for each in again)


def fit_types(cases: Sequence[tuple[Modelled, float]], constants: Json) -> dict[str, dict[str, list[float]]]:
    """Model type -> phase -> seconds of a call, and what its code takes over what its operators do by themselves.

    Small steps of several depths tell, on a timeline with the probe after each. What a tower does is left when the same
    phase without images is known.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for has_images in (False, True):
        rows: dict[tuple[str, str], list[tuple[tuple[float, float], float]]] = {}
        for each, seconds in cases:
            case, kind = each.case, each.work.model_type
            phase = name_phase(case["phase"])
            if bool(case["grids"]) is not has_images or case["recompute"] != "none" or _is_slow(each, constants):
                continue
            if has_images and phase not in found.get(kind, {}):
                continue
            name = name_factor("forward", "vision" if has_images else "", case["phase"])
            rows.setdefault((kind, name), []).append(_list_parts(each, seconds, constants, found.get(kind, {}), name))
        for (kind, name), entries in rows.items():
            usual_s = 0.0 if has_images else constants["host"][name][0]
            if has_images:  # what they take beside a tower's layers is recorded: a factor, and no seconds of a call
                entries = [((0.0, operators), value) for (_, operators), value in entries]
            found.setdefault(kind, {})[name] = _round(solve_type(entries, usual_s))
    return found


# Steps repeat within 5 %. Calls of model types differ by a third of the smallest step, operators by an eighth.
_PULLS = (0.15, 0.4)


def solve_type(rows: Sequence[tuple[tuple[float, float], float]], usual_s: float) -> tuple[float, float]:
    """Seconds of a call and factor of operators: least squares of relative errors, drawn towards what is usual."""
    scale = min(value for _, value in rows)
    table = [(calls / value, operators / value, 1.0) for (calls, operators), value in rows]
    table += [(_PULLS[0] / scale, 0.0, _PULLS[0] * usual_s / scale), (0.0, _PULLS[1], _PULLS[1])]
    aa, ab, bb, at, bt = (
        sum(row[i] * row[j] for row in table) for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    )  # fmt: skip
    call_s = max(0.0, (at * bb - bt * ab) / (aa * bb - ab * ab))
    return call_s, (bt - ab * call_s) / bb


def _is_slow(each: Modelled, constants: Json) -> bool:
    """Whether the device has more than half as much to do as the host: then a step says little of the host."""
    clock = _run_clock(each, constants)
    return clock.device_s() > 0.5 * clock.host_s()


def _list_parts(
    each: Modelled, seconds: float, constants: Json, known: Mapping[str, Any], name: str
) -> tuple[tuple[float, float], float]:
    """How a step's seconds grow with both constants, and what of its seconds they are for."""
    pause_s = constants["probe_s"][name_mode(each.case["phase"])]

    def tell(call_s: float, factor: float) -> float:
        types = {each.work.model_type: {**known, name: [call_s, factor]}}
        clock = _run_clock(each, {**constants, "host": {**constants["host"], "types": types}})
        return clock.step_s(1.0, pause_s)

    usual, longer, slower = tell(1e-3, 1.0), tell(2e-3, 1.0), tell(1e-3, 1.5)
    calls, operators = (longer - usual) / 1e-3, (slower - usual) / 0.5
    return (calls, operators), seconds - (usual - 1e-3 * calls - operators)


def fit_compiled(cases: Sequence[Modelled], constants: Json) -> Json:
    """Share of the memory-bound time that is left when a compiler has joined operators; host seconds of a launch."""
    shares, launches = [], []
    for each in cases:
        case = each.case
        if not case["compiled"]:
            continue
        shares.append(_find_share(each, constants))
        clock = _run_clock(each, {**constants, "compiled": {"moved": shares[-1], "launch_s": 0.0}}, True)
        if "queued_s" in case and "probe_s" in case:
            launches.append(case["queued_s"] / case["probe_s"] * constants["probe_s"]["train"] / clock.launches)
    return {
        "moved": float(f"{statistics.fmean(shares):.3g}") if shares else 1.0,
        "launch_s": float(f"{statistics.fmean(launches):.3g}") if launches else 0.0,
    }


def _find_share(each: Modelled, constants: Json) -> float:
    """The share with which a compiled step takes what it was measured to take."""
    low, high = 0.0, 1.0
    for _ in range(20):
        share = (low + high) / 2
        clock = _run_clock(each, {**constants, "compiled": {"moved": share, "launch_s": 0.0}}, True)
        low, high = (low, share) if clock.device_s() > each.case["seconds"] else (share, high)
    return (low + high) / 2


def fit_predictor(
    records: Iterable[Json],
    configs: Callable[[str], Json],
    provenance: Json,
    attention: Iterable[Json] = (),
    products: Iterable[Json] = (),
) -> Json:
    """All constants of a device, from what `runs` measured and its tables attention and gemm where there are."""
    kept = list(records)
    device = provenance["device_id"]
    calls = [call for record in kept for call in record.get("calls", ())]
    units: Json = next((record["units"] for record in kept if "units" in record), {})
    hosts = [record for record in kept if record.get("is_host")]
    modelled = [model_case(case, configs(case["model"]), device) for case in kept if case.get("is_host") is False]
    if not read_points(modelled).products:
        raise CalibrationError(
            "no profiled step shows a matrix product on a GPU: the profiler saw no kernels (is another one running?)"
        )
    constants: Json = {
        "schema": SCHEMA,
        "provenance": provenance,
        **_fit_kernels(modelled, [*attention, *calls], products),
        "gaps": {"train": 2e-6, "forward": 1e-6},
        "power": [0.2, 0.7],
        "compiled": {"moved": 1.0, "launch_s": 0.0},
        "error": {"device": 0.035, "host": 0.08, "late": 0.02, "compiled": 0.1},
        "host": {**{phase: [0.0, 0.0] for phase in HOST_PHASES}, "units": {}, "types": {}, "again": [0.0, 0.0]},
    }
    rates, slowing = fit_slowing(modelled, constants)
    fast = [at_full_clock(each, rate, slowing) for each, rate in zip(modelled, rates, strict=True)]
    constants |= _fit_kernels(fast, [*attention, *calls], products)
    constants["probe_s"] = find_probes(hosts)
    taken = [
        (model_case(case, configs(case["model"]), device), time_host(case, constants["probe_s"])) for case in hosts
    ]
    # A module's own Python is more than an empty one's call, which the first calibration measured too.
    constants["host"] = fit_host(taken, {**_UNITS, **units, "module": _UNITS["module"]})
    check_whole(constants)
    constants["host"]["types"] = fit_types(taken, constants)
    constants["host"]["again"] = fit_again(taken, modelled, constants)
    constants["gaps"], constants["power"] = fit_device(modelled, constants)
    constants["compiled"] = fit_compiled(modelled, constants)
    return constants


def _fit_kernels(cases: Sequence[Modelled], calls: Sequence[Json], products: Iterable[Json]) -> Json:
    """The constants of single kernels, from profiled steps and from calls by themselves."""
    points = read_points(cases)
    linear, optimizer = fit_linear(cases)
    found = fit_products([*points.products, *_read_layers(calls)], _read_gemm(products))
    shape = ProductShape(*found["shape"])
    moved = [point for point in points.moved if point.kind not in _LINEAR]
    moved += [MovedPoint(call["kind"], call["bytes"], call["seconds"], 1) for call in calls if "kind" in call]
    return {
        "products": {
            **found,
            "grouped": fit_grouped(cases, calls, shape),
            "patches": fit_patches(cases),
        },
        "attention": fit_attention([*points.attention, *_read_calls(calls)], round(shape.units)),
        "moved": fit_moved(moved),
        "linear": linear,
        "optimizer": optimizer,
    }


def _read_calls(rows: Iterable[Json]) -> list[AttentionPoint]:
    """Calls of the table attention, and those that were timed for the predictor; a head dim is the mean of its two."""
    found = []
    for row in rows:
        if row.get("kernel", "eager") == "eager":
            continue
        qk, v = (row["qk"], row["v"]) if "qk" in row else (row["qk_dim"], row["v_dim"])
        row = {"kv_heads": row["heads"], "keys": row["length"], **row}
        found.append(
            AttentionPoint(row["kernel"], row["direction"], row["mask"], row["batch"], row["heads"], row["kv_heads"],
                           (qk + v) // 2, row["length"], row["keys"], row["seconds"], 1)
        )  # fmt: skip
    return found


def _read_layers(rows: Iterable[Json]) -> list[ProductPoint]:
    """Products that were timed for the predictor, one by one and at the full clock."""
    return [
        ProductPoint(row["direction"], row["m"], row["n"], row["k"], row["seconds"], _ALONE_CALLS)
        for row in rows
        if "m" in row and "copies" not in row
    ]


def _read_gemm(rows: Iterable[Json]) -> list[ProductPoint]:
    """Products of the table gemm, each measured by itself in a short burst."""
    return [
        ProductPoint(row["direction"], row["m"], row["n"], row["k"], row["seconds"], 1)
        for row in rows
        if row["dtype"] == "bf16" and row["mode"] == "burst"
    ]


def find_probes(hosts: Iterable[Json]) -> dict[str, float]:
    """The usual seconds of the probe with a backward pass and of the one without: the pace of the fitted host."""
    found: dict[str, list[float]] = {}
    for case in hosts:
        found.setdefault(name_mode(case["phase"]), []).append(case["probe_s"])
    return {name: float(f"{statistics.median(seconds):.4g}") for name, seconds in found.items()}


def time_host(case: Json, probes: Mapping[str, float]) -> float:
    """Seconds of a step that the host bounds, at the host's usual pace: its ratio to the probe around it."""
    return float(case["ratio"] * probes[name_mode(case["phase"])])


def check_whole(constants: Json) -> None:
    """Refuse constants that a prediction could not be made of: too many cases failed."""
    missing = [f"small steps of phase {phase}" for phase in HOST_PHASES if phase not in constants["host"]]
    missing += [] if constants["attention"] else ["attention in one kernel"]
    missing += [] if "adamw" in constants["optimizer"] else ["a training step with its fused optimizer"]
    missing += [] if "pointwise_strided" in constants["moved"] else ["enough elementwise operators"]
    if missing:
        raise CalibrationError(
            f"too little was measured to fit a predictor: no {', no '.join(missing)}; --retry-failed measures the rows "
            "that failed again"
        )


def save_predictor(path: str, constants: Json) -> None:
    """Write a predictor's file whole or not at all, a line per entry of its outer two levels."""
    written = f"{path}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        try:
            with open(written, "w", encoding="utf-8") as file:
                file.write(_format(constants))
            os.replace(written, path)
        finally:
            if os.path.exists(written):
                os.unlink(written)
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot be written: {error.strerror}; what was measured is kept: the same command with another "
            "--out and the same --work goes on"
        ) from None


def _format(value: Any, depth: int = 0) -> str:
    if depth < 2 and isinstance(value, dict):
        lines = [f"{' ' * (depth + 1)}{json.dumps(key)}: {_format(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}" + ("\n" if not depth else "")
    return json.dumps(value)
