"""Products of layers, of experts and of patches find the constants that their seconds were made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fitted import BF16, MIXTRAL, model, profile

from flopcalc.base.errors import CalibrationError
from flopcalc.hardware.routing import RANDOM
from flopcalc.hardware.tiles import ProductSize
from flopcalc.measure.predictor.fit.cases import ModelledCase
from flopcalc.measure.predictor.fit.points import ProductPoint, read_points, read_single_calls
from flopcalc.measure.predictor.fit.products import ProductTable, fit_grouped, fit_patches, fit_products
from flopcalc.measure.predictor.runs import cut_config, make_case
from flopcalc.measure.predictor.single_calls import list_rows
from flopcalc.prediction.kernels.products import GroupShape, ProductShape, time_grouped, time_shape

DIRECTIONS = ("forward", "dgrad", "wgrad")
SHAPES = [
    ProductShape.usual(),
    ProductShape(500e12, 100.0, 5e-6, 0.9, 0.8, 0.7, 2e12, 2e-6, 132.0),
    ProductShape(250e12, 120.0, 4e-6, 0.95, 0.8, 0.7, 1.6e12, 5e-6, 108.0),  # as many processors as an A100 has
]


def _time_products(shape: ProductShape) -> list[ProductPoint]:
    return [
        ProductPoint(way, m, n, k, time_shape(shape, ProductSize(way, m, n, k)), 1)
        for way in DIRECTIONS
        for m in (48, 512, 1260, 2048, 5400, 8192)
        for n, k in ((1024, 1024), (4096, 1024), (1024, 4096), (8192, 2048), (2304, 1920), (1280, 4352), (896, 4864))
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_products_find_their_constants(shape: ProductShape) -> None:
    """The count of processors exactly, rate, lead, start and bandwidth within 1 %, all seconds within 3 %."""
    points = _time_products(shape)
    unaligned = [
        ProductPoint("forward", 4096, 1004, 4096, 4 * time_shape(shape, ProductSize("forward", 4096, 1004, 4096)), 1)
    ]
    found = fit_products(points, unaligned)
    fitted = ProductShape(*found["shape"])
    assert fitted.units == shape.units
    for name in ("rate", "lead", "start", "bandwidth"):
        assert getattr(fitted, name) == pytest.approx(getattr(shape, name), rel=0.01), name
    for point in points:
        assert time_shape(fitted, point.size) == pytest.approx(point.seconds, rel=0.03)
    assert len(found["residuals"]) == len(points)
    for *key, ratio in found["residuals"]:
        assert ratio == pytest.approx(1.0, abs=0.03), key
    assert found["unaligned"] == {"4": {"forward": pytest.approx(4, rel=0.03)}}


def test_what_shapes_take_beyond_the_formula_is_kept() -> None:
    """The median over calls of one shape; rows are sorted."""
    points = [point for point in _time_products(ProductShape.usual()) if point.direction == "forward"]
    slow = [points[0]._replace(seconds=scale * points[0].seconds, calls=0) for scale in (1.4, 1.5)]
    found = fit_products([*points[1:], slow[0], slow[1], points[0]])
    ratios = {tuple(key): ratio for *key, ratio in found["residuals"]}
    assert list(ratios) == sorted(ratios)
    assert ratios[points[0][:4]] == pytest.approx(1.4, rel=0.03)


def test_unaligned_products_alone_are_refused() -> None:
    with pytest.raises(CalibrationError, match="multiples of 8"):
        fit_products([ProductPoint("forward", 4096, 1004, 4096, 1e-3, 1)])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_table_is_the_formula_for_many_products(shape: ProductShape) -> None:
    sizes = (1, 8, 130, 1000, 1024, 8200, 128256)
    points = [ProductPoint(way, m, n, k, 1.0, 1) for way in DIRECTIONS for m in sizes for n in sizes for k in sizes]
    expected = [time_shape(shape, point.size) for point in points]
    np.testing.assert_allclose(ProductTable(points).predict(shape), expected, rtol=1e-12)


# --- Experts ----------------------------------------------------------------------------------------------------------
EXPERT_STEPS = [(1, 48), (1, 1024), (4, 2048), (1, 4096), (8, 4096)]


def _profile_experts(shape: GroupShape, batch: int, seq: int, **changed: Any) -> ModelledCase:
    """A step whose experts took what `shape` says, each product in a row of its own."""
    plain = model({**make_case("mixtral", changed.pop("phase", "train"), batch, seq), **changed}, MIXTRAL)
    rows: list[Any] = [["aten::mm", False, "[[8,8],[8,8]]", "", 1, 1, 1e6, "nvjet"]]  # no part of it
    for each in plain.work.products:
        _, m, n, k, copies, _ = each.size
        if copies > 1:
            shapes = {
                "forward": [[m, k], [copies, k, n], [copies]],
                "dgrad": [[m, n], [copies, n, k], [copies]],
                "wgrad": [[n, m], [m, k], [copies]],
            }
            us = 2e6 * time_grouped(shape, 132.0, each.size._replace(routing=RANDOM))
            is_backward = each.direction != "forward"
            rows.append(["aten::_grouped_mm", is_backward, str(shapes[each.direction]), "", 2, 4, us, "cutlass"])
    return plain._replace(case={**plain.case, "operators": rows})


@pytest.mark.parametrize(
    "shape",
    [
        GroupShape.usual(),
        GroupShape.usual()._replace(rate=600e12, turn=3e-6),
        GroupShape.usual()._replace(bandwidth=2e12, lead=300.0),
    ],
)
def test_grouped_products_find_their_constants(shape: GroupShape) -> None:
    """Or others that give the same seconds within 10 %: few sizes do not determine all six."""
    points = read_points(_profile_experts(shape, batch, seq) for batch, seq in EXPERT_STEPS).grouped
    found = fit_grouped(points, ProductShape.usual())
    assert list(found) == ["forward", "dgrad", "wgrad"]
    for point in points:
        seconds = time_grouped(GroupShape(*found[point.direction]), 132.0, point.size._replace(routing=RANDOM))
        assert seconds == pytest.approx(point.seconds, rel=0.1)


@pytest.mark.parametrize("changed", [{"recompute": "full"}, {"compiled": True}, {"phase": "decode", "context": 64}])
def test_steps_that_say_nothing_about_experts(changed: dict[str, Any]) -> None:
    """They leave the constants where they start."""
    slow = [_profile_experts(GroupShape.usual()._replace(rate=300e12), 2, 1024, **changed) for _ in range(9)]
    points = read_points(slow).grouped
    assert points == []
    shape = GroupShape.usual()._replace(bandwidth=0.8 * ProductShape.usual().bandwidth)
    assert fit_grouped(points, ProductShape.usual()) == {way: pytest.approx(list(shape)) for way in DIRECTIONS}


def test_a_slow_device_is_seen_in_its_experts() -> None:
    points = read_points(
        _profile_experts(GroupShape.usual()._replace(rate=300e12), *size) for size in EXPERT_STEPS
    ).grouped
    assert fit_grouped(points, ProductShape.usual())["wgrad"][0] == pytest.approx(300e12, rel=0.1)


@pytest.mark.parametrize(("faster", "wider"), [(1.0, 1.0), (0.4, 0.5), (2.0, 1.5)])
def test_experts_that_were_not_measured_follow_plain_products(faster: float, wider: float) -> None:
    usual, plain = GroupShape.usual(), ProductShape.usual()
    device = plain._replace(rate=faster * plain.rate, bandwidth=wider * plain.bandwidth)
    for rate, lead, bandwidth, *rest in fit_grouped([], device).values():
        assert (rate, bandwidth) == pytest.approx((faster * usual.rate, wider * 0.8 * plain.bandwidth), rel=1e-4)
        assert (lead, *rest) == (usual.lead, *usual[3:])


@pytest.mark.parametrize("shape", [GroupShape.usual(), GroupShape(250e12, 100.0, 1.4e12, 0.6, 2e-6, 5e-6)])
def test_experts_find_what_single_calls_were_made_of(shape: GroupShape) -> None:
    """The calibration's own sizes determine every constant: most within 5 %, a processor's turn within 20 %."""
    row = list_rows("quick")["calls/experts"]
    calls = [
        {"direction": way, "copies": copies, "m": mean * copies, "n": n, "k": k,
         "seconds": time_grouped(shape, 132.0, ProductSize(way, mean * copies, n, k, copies, RANDOM))}
        for copies, n, k in row["experts"]
        for mean in row["rows"]
        for way in ("forward", "dgrad", "wgrad")
    ]  # fmt: skip
    # Plain products of the same device are a little faster; the search starts from them.
    plain = ProductShape.usual()._replace(rate=1.08 * shape.rate, bandwidth=1.28 * shape.bandwidth)
    found = fit_grouped(read_single_calls(calls).grouped, plain)
    for way, constants in found.items():
        rate, lead, bandwidth, small, turn, _ = constants
        assert (rate, lead, bandwidth) == pytest.approx((shape.rate, shape.lead, shape.bandwidth), rel=0.05)
        assert turn == pytest.approx(shape.turn, rel=0.2)
        if way != "wgrad":  # which has no small tiles
            assert small == pytest.approx(shape.small, rel=0.05)


# --- Patches ----------------------------------------------------------------------------------------------------------
GRIDS = [[1, 16, 16], [1, 36, 52], [1, 60, 60], [1, 100, 120]]
TOWER = cut_config("qwen2-vl-2b", 2, 2)


def _profile_patches(lines: dict[str, tuple[float, float]], grid: list[int], **changed: Any) -> ModelledCase:
    """A step whose convolutions took what `lines` says, each in two rows."""
    case = {**make_case("qwen2-vl-2b", changed.pop("phase", "train"), 1, 4096, [grid]), **changed}
    plain = model(case, TOWER)
    rows: list[Any] = [["aten::mm", False, "[[8,8],[8,8]]", BF16, 1, 1, 1e6, "nvjet"]]  # no part of it
    for each in plain.work.products:
        if each.is_patches:
            start, per_flop = lines[each.direction]
            name = "cudnn_convolution" if each.direction == "forward" else "convolution_backward"
            us = 1e6 * (start + per_flop * each.flops)
            rows += [[f"aten::{name}", each.direction != "forward", "", "", 1, 1, part * us, ""] for part in (0.9, 0.1)]
    return plain._replace(case={**case, "operators": rows})


@pytest.mark.parametrize(
    "lines",
    [
        {"forward": (5e-5, 4e-14), "wgrad": (6e-5, 2e-14)},
        {"forward": (1e-5, 2e-13), "wgrad": (2e-4, 0.0)},
    ],
)
def test_patches_find_their_constants(lines: dict[str, tuple[float, float]]) -> None:
    found = fit_patches([_profile_patches(lines, grid) for grid in GRIDS])
    assert {way: tuple(line) for way, line in found.items()} == {
        way: pytest.approx(line, rel=1e-4, abs=1e-18) for way, line in lines.items()
    }
    prefills = [_profile_patches(lines, grid, phase="prefill") for grid in GRIDS]
    assert fit_patches(prefills) == {"forward": found["forward"]}


@pytest.mark.parametrize("changed", [{"recompute": "full"}, {"compiled": True}])
def test_steps_that_say_nothing_about_patches(changed: dict[str, Any]) -> None:
    lines = {"forward": (5e-5, 4e-14), "wgrad": (6e-5, 2e-14)}
    assert fit_patches([_profile_patches(lines, GRIDS[0], **changed)]) == {}
    assert fit_patches([profile([["aten::mm", False, "[[8,8],[8,8]]", BF16, 1, 1, 5.0, "nvjet"]])]) == {}
    assert fit_patches([model(make_case("qwen2-vl-2b", "train", 1, 4096, GRIDS[:1]), TOWER)]) == {}  # not profiled
