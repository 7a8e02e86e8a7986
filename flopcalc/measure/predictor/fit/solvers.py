"""The three optimization problems of the fit, solved by scipy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares, lsq_linear, nnls

from flopcalc.measure.predictor.fit.choices import CHOICES

Row = tuple[Sequence[float], float]  # features of a measurement, and its value


def solve_nonnegative(rows: Sequence[Row]) -> list[float]:
    """Non-negative weights of the features with the least sum of squared relative errors."""
    values = np.array([value for _, value in rows])
    table = np.array([features for features, _ in rows], dtype=float) / values[:, None]
    norms = np.linalg.norm(table, axis=0)
    norms[norms == 0] = 1.0  # a feature that no row has gets weight 0
    weights, _ = nnls(table / norms, np.ones(len(rows)))
    return [float(weight) for weight in weights / norms]


def solve_call_and_factor(
    rows: Sequence[tuple[tuple[float, float], float]], usual_s: float, pulls: tuple[float, float] = CHOICES.pulls
) -> tuple[float, float]:
    """Seconds of a call (0 or more) and factor of its operators, from rows of ((calls, operators' seconds), seconds).

    Least squares of relative errors. `pulls` draw the call to `usual_s` and the factor to 1.
    """
    call_pull, factor_pull = pulls
    shortest = min(value for _, value in rows)
    table = [(calls / value, operators / value) for (calls, operators), value in rows]
    table += [(call_pull / shortest, 0.0), (0.0, factor_pull)]
    targets = [*(1.0 for _ in rows), call_pull * usual_s / shortest, factor_pull]
    found = lsq_linear(table, targets, bounds=((0.0, -np.inf), np.inf), method="bvls")
    call_s, factor = found.x
    return float(call_s), float(factor)


def fit_positive(
    list_errors: Callable[[list[float]], Sequence[float]],
    start: Sequence[float],
    rounded_error: float,
    pull: float = 0.0,
    most: Sequence[float] | None = None,
) -> list[float]:
    """Positive constants, each up to `most`, with the least sum of absolute errors: sum(hypot(rounded_error, error)).

    `pull` adds pull * log(constant / start) ** 2 for each constant, which keeps at its start what no error depends on.
    """
    width = len(start)
    pull_weight = math.sqrt(2 * rounded_error * pull)
    limits = np.minimum(CHOICES.search_range, np.divide(most, start)) if most is not None else CHOICES.search_range

    def list_residuals(ratios: Any) -> Any:
        errors = list_errors([value * float(ratio) for value, ratio in zip(start, ratios, strict=True)])
        return np.concatenate([errors, pull_weight * np.log(ratios)])

    def weigh(squares: Any) -> Any:
        """Value and two derivatives of scipy's soft_l1 for errors, of plain squares for the pulls behind them."""
        roots = np.sqrt(1 + squares)
        weighed = np.stack([2 * (roots - 1), 1 / roots, -0.5 / roots**3])
        weighed[:, -width:] = [squares[-width:], np.ones(width), np.zeros(width)]
        return weighed

    ratios = np.ones(width)
    for step, scheme in CHOICES.search_steps:
        found = least_squares(
            list_residuals, ratios, jac=scheme, diff_step=step, loss=weigh, f_scale=rounded_error,
            bounds=(1 / CHOICES.search_range, limits), max_nfev=CHOICES.search_rounds,
        )  # fmt: skip
        ratios = found.x
    return [value * float(ratio) for value, ratio in zip(start, ratios, strict=True)]


def round_digits(values: Iterable[float], digits: int = 5) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values]
