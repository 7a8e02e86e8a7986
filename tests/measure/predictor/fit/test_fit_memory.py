"""Memory-bound operators: curves over bytes, and lines of what only whole steps show."""

from __future__ import annotations

from typing import Any

import pytest
from fitted import LLAMA, model

from flopcalc.measure.predictor.fit.cases import ModelledCase
from flopcalc.measure.predictor.fit.memory import fit_curve, fit_curves, fit_lines
from flopcalc.measure.predictor.fit.points import MovedPoint
from flopcalc.measure.predictor.runs import make_case
from flopcalc.prediction.kernels.machine import weigh_zeros


def test_a_curve_takes_the_weighted_median_of_each_half_octave() -> None:
    points = [(1000, 1.0, 1), (1000, 2.0, 5), (1000, 9.0, 1), (4000, 3.0, 1)]
    curve = fit_curve([MovedPoint("copy", *point) for point in points])
    assert curve == [(pytest.approx(1000), pytest.approx(2.0)), (pytest.approx(4000), pytest.approx(3.0))]


@pytest.mark.parametrize(
    ("seconds", "risen"),
    [
        ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0)),
        ((2.0, 1.0), (1.5, 1.5)),
        ((1.0, 9.0, 2.0, 2.1, 8.0), (1.0, 2.1, 2.1, 2.1, 8.0)),  # one that lies out moves its neighbours little
        ((3.0, 2.0, 1.0), (2.0, 2.0, 2.0)),
    ],
)
def test_curves_never_fall(seconds: tuple[float, ...], risen: tuple[float, ...]) -> None:
    curve = fit_curve([MovedPoint("copy", 4**i, each, 1) for i, each in enumerate(seconds, 1)])
    assert [each for _, each in curve] == pytest.approx(risen)


def test_kinds_with_few_points_or_unknown_sizes_have_no_curve() -> None:
    points = [MovedPoint(kind, 4**i, 1e-6 * i, 1) for kind in ("copy", "cat", "other") for i in (1, 2, 3)]
    points += [MovedPoint("fill", 4**i, 1e-6 * i, 1) for i in (1, 2)]
    assert fit_curves(points) == {"copy": [[4, 1e-6], [16, 2e-6], [64, 3e-6]]}


# --- Lines ------------------------------------------------------------------------------------------------------------
LINES = {"gather": (2e-6, 3e-11), "loss": (3e-6, 2e-10), "optimizer": (4e-6, 1e-7, 5e-11)}


def _profile_lines(batch: int, seq: int, layers: int, **changed: Any) -> ModelledCase:
    """A step in which gathers, the loss and the optimizer took what LINES says."""
    case = {**make_case("llama", "train", batch, seq), **changed}
    each = model(case, {**LLAMA, "num_hidden_layers": layers, "intermediate_size": 128 * batch})
    seconds = dict.fromkeys(LINES, 0.0)
    for piece in each.work.moved:
        moved = piece.reads + piece.writes
        if piece.direction == "optimizer":
            start, per_tensor, per_byte = LINES["optimizer"]
            seconds["optimizer"] += start + per_tensor * piece.tensors + per_byte * moved * weigh_zeros(piece.unseen)
        elif piece.kind in LINES:
            start, per_byte = LINES[piece.kind]
            seconds[piece.kind] += piece.calls * (start + per_byte * moved)
    names = {"gather": "aten::embedding", "loss": "aten::nll_loss_forward", "optimizer": "aten::_fused_adamw_"}
    rows = [[names[kind], False, "[]", "", 1, 1, 1e6 * each_s, ""] for kind, each_s in seconds.items()]
    return each._replace(case={**case, "operators": rows})


STEPS = [(1, 64, 2), (2, 64, 3), (4, 512, 2), (8, 64, 5), (3, 2048, 4)]


def test_lines_find_their_constants() -> None:
    lines, optimizers = fit_lines([_profile_lines(*size) for size in STEPS])
    assert lines == {kind: pytest.approx(LINES[kind], rel=1e-4) for kind in ("gather", "loss")}
    assert optimizers == {"adamw": pytest.approx(LINES["optimizer"], rel=1e-4)}


@pytest.mark.parametrize("changed", [{"recompute": "full"}, {"compiled": True}])
def test_steps_that_say_nothing_about_lines(changed: dict[str, Any]) -> None:
    assert fit_lines([_profile_lines(1, 64, 2, **changed)]) == ({}, {})


def test_a_kind_has_two_constants_whatever_its_bytes_say() -> None:
    """Joins that take as long whatever their size: no seconds of a byte are left for them."""
    cases = []
    for batch in (1, 2, 4, 8):
        case = make_case("llama", "train", batch, 64)
        rows = [["aten::cat", False, "", "", 1, 1, 100.0, "cat"]]
        cases.append(model(case, LLAMA)._replace(case={**case, "operators": rows}))
    lines, _ = fit_lines(cases)
    assert "cat" in lines
    assert {len(values) for values in lines.values()} == {2}
