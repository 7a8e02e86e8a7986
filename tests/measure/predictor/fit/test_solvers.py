"""The solvers find the constants that their input was made of."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flopcalc.measure.predictor.fit.choices import CHOICES
from flopcalc.measure.predictor.fit.solvers import (
    fit_positive,
    round_digits,
    solve_call_and_factor,
    solve_nonnegative,
)


@pytest.mark.parametrize("weights", [(3.0, 0.5, 0.0), (0.0, 2.0, 1e-9), (1e-6, 1e-11, 4e-13)])
def test_weights_are_found(weights: tuple[float, ...]) -> None:
    features = [(1.0, x, x * x) for x in (1.0, 20.0, 500.0, 9000.0, 3.0)]
    rows = [(row, sum(w * f for w, f in zip(weights, row, strict=True))) for row in features]
    assert solve_nonnegative(rows) == pytest.approx(weights, rel=1e-6, abs=1e-9 * max(weights))


def test_no_weight_is_negative() -> None:
    rows = [((1.0, 1.0), 2.0), ((1.0, 2.0), 1.0)]
    constant, slope = solve_nonnegative(rows)
    assert slope == 0.0
    assert constant == pytest.approx((1 / 2 + 1) / (1 / 4 + 1))  # least squares of c / 2 - 1 and c / 1 - 1


def test_a_feature_that_no_row_has_weighs_nothing() -> None:
    assert solve_nonnegative([((1.0, 0.0), 2.0), ((2.0, 0.0), 4.0)]) == [pytest.approx(2.0), 0.0]


# --- Searches ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("truth", [(7.0, 0.02), (0.5, 5e-3), (1.0, 0.01)])
def test_positive_constants_are_found(truth: tuple[float, float]) -> None:
    sizes = [1.0, 10.0, 100.0, 1000.0]

    def list_errors(at: list[float]) -> list[float]:
        return [math.log((at[0] + at[1] * size) / (truth[0] + truth[1] * size)) for size in sizes]

    assert fit_positive(list_errors, (1.0, 0.01), 0.003) == pytest.approx(truth, rel=1e-3)


def test_one_error_that_lies_out_moves_little() -> None:
    """The sum of absolute errors is least at the median, not at the mean."""
    values = [1.0, 1.01, 1.02, 1.03, 9.0]
    (found,) = fit_positive(lambda at: [math.log(at[0] / value) for value in values], (2.0,), 1e-3)
    assert found == pytest.approx(1.02, rel=2e-3)


def test_a_constant_behind_a_larger_one_is_found() -> None:
    """At the start the second term is the smaller one everywhere: small steps alone would not see it."""
    truth = (1.0, 3.0)
    sizes = [1.0, 2.0, 4.0, 8.0]

    def predict(at: tuple[float, ...] | list[float], size: float) -> float:
        return max(at[0] * size, at[1])

    def list_errors(at: list[float]) -> list[float]:
        return [math.log(predict(at, size) / predict(truth, size)) for size in sizes]

    assert fit_positive(list_errors, (1.1, 1.0), 0.003) == pytest.approx(truth, rel=5e-3)


@pytest.mark.parametrize("pull", [0.0, 0.05])
def test_what_no_error_depends_on_stays_where_it_was(pull: float) -> None:
    found = fit_positive(lambda at: [math.log(at[0] / 3)] * 100, (1.0, 5e-6), 0.02, pull)
    assert found == [pytest.approx(3.0, rel=1e-2), pytest.approx(5e-6)]


@pytest.mark.parametrize("pull", [1.0, 100.0])
def test_a_pull_draws_towards_the_start(pull: float) -> None:
    """The minimum of hypot(r, x - log 3) + pull * x * x, which has a closed form where r is small."""
    (found,) = fit_positive(lambda at: [math.log(at[0] / 3)], (1.0,), 1e-4, pull)
    assert math.log(found) == pytest.approx(min(math.log(3), 1 / (2 * pull)), rel=1e-2)


def test_no_constant_leaves_its_range() -> None:
    (found,) = fit_positive(lambda at: np.array([1 / at[0]]), (2.0,), 0.01)
    assert found <= 2.0 * CHOICES.search_range


def test_digits() -> None:
    assert round_digits((1.23456789e-6, 0.0)) == [1.2346e-6, 0.0]
    assert round_digits((1.23456789e-6,), 3) == [1.23e-6]


# --- Calls and factors ------------------------------------------------------------------------------------------------
def _make_rows(call_s: float, factor: float, depths: tuple[int, ...]) -> list[tuple[tuple[float, float], float]]:
    """Steps with these numbers of layers, each layer a millisecond of operators."""
    return [((1.0, 0.001 * depth), call_s + factor * 0.001 * depth) for depth in depths]


@pytest.mark.parametrize(("call_s", "factor"), [(0.002, 1.0), (0.002, 1.15), (0.003, 1.0), (0.0015, 0.9), (0.004, 1.3)])
def test_two_depths_tell_a_call_from_a_layer(call_s: float, factor: float) -> None:
    rows = _make_rows(call_s, factor, (4, 12))
    found_s, found = solve_call_and_factor(rows, 0.002)
    for (calls, operators), value in rows:  # drawn to the usual, but far nearer to what was measured
        usual = 0.002 * calls + operators
        assert abs(found_s * calls + found * operators - value) <= 0.5 * abs(usual - value) + 1e-12
    # Without a pull, and against many steps, the usual has no weight.
    assert solve_call_and_factor(rows, 0.002, (0.0, 0.0)) == pytest.approx((call_s, factor))
    assert solve_call_and_factor(rows * 10000, 0.002) == (
        pytest.approx(call_s, abs=2e-6),
        pytest.approx(factor, rel=2e-4),
    )


@pytest.mark.parametrize("depths", [(4, 12), (8,)])
def test_the_usual_stays_the_usual(depths: tuple[int, ...]) -> None:
    assert solve_call_and_factor(_make_rows(0.002, 1.0, depths), 0.002) == pytest.approx((0.002, 1.0), rel=1e-12)


@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("depths", [(8,), (4, 12)])
def test_the_usual_draws_as_much_in_long_steps_as_in_short_ones(scale: float, depths: tuple[int, ...]) -> None:
    rows = _make_rows(0.003, 1.2, depths)
    longer = [((calls, scale * operators), scale * value) for (calls, operators), value in rows]
    call_s, factor = solve_call_and_factor(rows, 0.002)
    assert solve_call_and_factor(longer, scale * 0.002) == pytest.approx((scale * call_s, factor))


@pytest.mark.parametrize("more_s", [-0.001, 0.0005, 0.002])
def test_one_depth_alone_draws_to_the_usual(more_s: float) -> None:
    """Both constants share what the step takes more or less: neither is all of it."""
    call_s, factor = solve_call_and_factor(_make_rows(0.002 + more_s, 1.0, (8,)), 0.002)
    assert call_s + 0.008 * factor == pytest.approx(0.01 + more_s, rel=0.01)
    assert 0 < (call_s - 0.002) / more_s < 1
    assert 0 < 0.008 * (factor - 1) / more_s < 1


@pytest.mark.parametrize("usual_s", [0.0, 0.002])
def test_a_call_takes_no_less_than_nothing(usual_s: float) -> None:
    call_s, factor = solve_call_and_factor(_make_rows(-0.002, 1.25, (4, 12)), usual_s)
    assert call_s == 0.0
    assert 0.75 < factor < 13 / 12  # what the operators of either depth alone would have to be multiplied with
