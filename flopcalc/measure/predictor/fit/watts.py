"""The coefficients of a device's power, from the joules of measured steps and of single calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flopcalc.measure.predictor.fit.cases import Json, ModelledCase, run_clock
from flopcalc.measure.predictor.fit.choices import MIN_WATTS_ROWS, START_WATTS, WATTS_ROUNDED_ERROR
from flopcalc.measure.predictor.fit.solvers import fit_positive, round_digits
from flopcalc.prediction.kernels.constants import Provenance, WattsConstants, WattsShares
from flopcalc.prediction.kernels.machine import Machine
from flopcalc.prediction.watts import Shares, draw_power


class PowerPoint(NamedTuple):
    """How busy a device was, and the share of its limit that it drew."""

    name: str  # of the model or call, to leave it out
    shares: Shares
    drawn: float


def read_steps(cases: Iterable[ModelledCase], machine: Machine, limit_w: float) -> list[PowerPoint]:
    """Measured steps with their joules, over the time that they took."""
    points = []
    for each in cases:
        case = each.case
        if case.get("energy_j"):
            seconds = case.get("mean_s") or case["seconds"]
            shares = run_clock(each, machine, compiled=case["compiled"]).find_shares(seconds)
            points.append(PowerPoint(case["model"], shares, case["energy_j"] / seconds / limit_w))
    return points


def read_calls(records: Iterable[Json], machine: Machine, limit_w: float) -> list[PowerPoint]:
    """Single calls and the device at rest, whose name is `rest`."""
    points = []
    for record in records:
        if "flops" in record and record.get("power_w"):
            flops, moved = record["flops"] / record["seconds"], record["bytes"] / record["seconds"]
            running = float(record["power"] != "rest")
            shares = Shares(flops / machine.peak, moved / machine.bandwidth, running)
            points.append(PowerPoint(record["power"], shares, record["power_w"] / limit_w))
    return points


def fit_points(points: Sequence[PowerPoint], idle: float) -> WattsShares:
    """The coefficients with the least sum of relative errors."""
    drawn = [point for point in points if point.name != "rest"]

    def list_errors(values: Sequence[float]) -> list[float]:
        running, compute, memory = values
        return [math.log(draw_power((idle, running, compute, memory), point.shares) / point.drawn) for point in drawn]

    running, compute, memory = round_digits(fit_positive(list_errors, START_WATTS, WATTS_ROUNDED_ERROR), 4)
    return {"idle": round_digits([idle], 4)[0], "running": running, "compute": compute, "memory": memory}


def fit_watts(
    cases: Iterable[ModelledCase], records: Iterable[Json], machine: Machine, provenance: Provenance
) -> WattsConstants | None:
    """The coefficients of this machine; None where NVML did not count energy, or too little was measured."""
    limit_w = provenance.get("power_limit_w") or machine.device.tdp_w
    if not limit_w:
        return None
    calls = read_calls(records, machine, limit_w)
    rests = [point.drawn for point in calls if point.name == "rest"]
    points = [*read_steps(cases, machine, limit_w), *calls]
    if not rests or len(points) < MIN_WATTS_ROWS:
        return None
    return {**fit_points(points, min(rests)), "limit_w": limit_w}
