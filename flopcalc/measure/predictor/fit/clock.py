"""The device's clock (how far the power limit lowers it, gaps, what a compiler leaves over), and the power it draws."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from scipy.optimize import brentq

from flopcalc.hardware.tiles import ALIGNED
from flopcalc.measure.operator_kinds import classify
from flopcalc.measure.predictor.fit.cases import Json, ModelledCase, change_constants, make_machine, run_clock
from flopcalc.measure.predictor.fit.choices import CHOICES
from flopcalc.measure.predictor.fit.points import ProfiledOperator, list_operators, read_moved, read_points
from flopcalc.measure.predictor.fit.solvers import fit_positive, round_digits, solve_nonnegative
from flopcalc.prediction.clock import add_up
from flopcalc.prediction.host_time import name_mode
from flopcalc.prediction.kernels.constants import CompiledConstants, Constants, Provenance, WattsConstants, WattsShares
from flopcalc.prediction.kernels.machine import Machine, slow_down
from flopcalc.prediction.kernels.memory_bound import STREAMED
from flopcalc.prediction.kernels.products import ProductShape, time_shape
from flopcalc.prediction.watts import Shares, draw_power


# --- Kernels at the full clock ----------------------------------------------------------------------------------------
class Slowdown(NamedTuple):
    """How many times longer the kernels of a pass take if its step keeps up a given share of the peak."""

    start: float
    slope: float

    def at(self, rate: float) -> float:
        return 1 + self.slope * max(0.0, rate - self.start)


STEADY = Slowdown(1.0, 0.0)


def fit_slowdown(cases: Sequence[ModelledCase], constants: Constants) -> tuple[list[float], dict[str, Slowdown]]:
    """The share of the peak that both passes of each step keep up, and what it does to the clock in profiled steps.

    A profiled step comes after a pause, and its optimizer after both passes. Its forward pass begins at the full clock,
    its backward pass at a lower one if the power limit is reached. So products of a forward pass look faster than those
    of a backward pass.
    """
    machine = make_machine(constants)
    rates = [_find_pass_rate(each, machine) for each in cases]
    shape = ProductShape(*constants["products"]["shape"])
    ratios: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}
    for each, rate in zip(cases, rates, strict=True):
        if rate > CHOICES.min_rate:
            for name, ratio in _compare_passes(each, shape, machine.tiles).items():
                ratios[name].append((rate, ratio))
    return rates, {name: _fit_line(points) for name, points in ratios.items()}


def _find_pass_rate(each: ModelledCase, machine: Machine) -> float:
    """Share of the peak that products and attention keep up until the optimizer begins."""
    totals = add_up(run_clock(each, machine).pieces)
    seconds = totals.seconds - totals.optimizer
    return totals.flops / seconds / machine.peak if seconds else 0.0


def _compare_passes(each: ModelledCase, shape: ProductShape, tiles: str) -> dict[str, float]:
    """Pass -> measured over predicted seconds of its large products."""
    sums: dict[str, list[float]] = {}
    for point in read_points([each]).products:
        if point.seconds > CHOICES.min_large_product_s and point.size.find_step() == ALIGNED:
            both = sums.setdefault("forward" if point.direction == "forward" else "backward", [0.0, 0.0])
            both[0] += point.seconds * point.calls
            both[1] += time_shape(shape, point.size, tiles) * point.calls
    return {name: measured / predicted for name, (measured, predicted) in sums.items()}


def _fit_line(points: Sequence[tuple[float, float]]) -> Slowdown:
    """The start with the least sum of errors; for each start, the line is that of least squares."""
    if len(points) < CHOICES.min_slowdown_steps:
        return STEADY

    best, fitted = math.inf, STEADY
    for start in (percent / 100 for percent in range(*CHOICES.slowdown_starts)):
        usual, slope = solve_nonnegative([((1.0, max(0.0, rate - start)), ratio) for rate, ratio in points])
        if not usual:
            continue
        slowdown = Slowdown(start, slope / usual)
        error = sum(abs(math.log(ratio / (usual * slowdown.at(rate)))) for rate, ratio in points)
        if error < best:
            best, fitted = error, slowdown
    return fitted


def scale_to_full_clock(each: ModelledCase, rate: float, slowdowns: Mapping[str, Slowdown]) -> ModelledCase:
    """The same case with kernels as fast as at the full clock."""
    if "operators" not in each.case:
        return each
    operators = []
    for operator in list_operators(each.case):
        slowdown = slowdowns["backward" if operator.is_backward else "forward"].at(rate)
        if operator.us and not _is_streamed(operator):
            operator = operator._replace(us=operator.us / slowdown)
        operators.append(list(operator))
    return each._replace(case={**each.case, "operators": operators})


def _is_streamed(operator: ProfiledOperator) -> bool:
    """Whether memory alone bounds an operator."""
    if not operator.name or "_fused_adam" in operator.name or classify(operator.name) in ("product", "attention"):
        return False
    moved = read_moved(operator)
    return moved is not None and moved.kind in STREAMED


# --- Gaps and power ---------------------------------------------------------------------------------------------------
class BoundStep(NamedTuple):
    """A step that the device bounds."""

    mode: str  # train or forward
    kernels_s: float  # predicted, at the full clock
    clocked_s: float  # of these, what a lower clock slows down
    rate: float  # share of the peak that the step keeps up
    launches: float
    seconds: float  # measured, without waiting for the host

    def predict(self, power: Sequence[float], gap_s: float) -> float:
        return self.kernels_s + (slow_down(power, self.rate) - 1) * self.clocked_s + self.launches * gap_s


def fit_gaps_and_power(cases: Sequence[ModelledCase], constants: Constants) -> tuple[dict[str, float], list[float]]:
    """Seconds between kernels, with gradients and without, and how the power limit lowers the clock."""
    machine = make_machine(constants)
    steps = [step for each in cases if (step := read_bound_step(each, machine))]
    if not steps:
        return dict(CHOICES.start_gaps_s), list(CHOICES.no_power_limit)
    modes = list(CHOICES.start_gaps_s)

    def list_errors(values: Sequence[float]) -> list[float]:
        power, gaps = values[:2], values[2:]
        return [math.log(step.predict(power, gaps[modes.index(step.mode)]) / step.seconds) for step in steps]

    values = round_digits(
        fit_positive(list_errors, (*CHOICES.start_power, *CHOICES.start_gaps_s.values()), CHOICES.rounded_error)
    )
    return dict(zip(modes, values[2:], strict=True)), values[:2]


def read_bound_step(each: ModelledCase, machine: Machine) -> BoundStep | None:
    """A step that the device bounds beyond doubt, because it was busy nearly all of the time; None for others."""
    case, mode = each.case, name_mode(each.case["phase"])
    is_plain = not case["compiled"] and case["phase"] != "decode" and case["recompute"] == "none"
    if not is_plain or case["spread"] > CHOICES.max_spread or not each.work.is_recorded:
        return None
    clock = run_clock(each, machine)
    totals = add_up(clock.pieces)
    if totals.optimizer > CHOICES.max_optimizer_share * totals.seconds:
        return None
    pace = case["probe_s"] / machine.constants["probe_s"][mode] if "probe_s" in case else 1.0
    if "busy_us" in case:
        is_bound = case["busy_us"] * 1e-6 > CHOICES.min_busy_share * case["seconds"]
    else:
        is_bound = clock.host_s() * pace < CHOICES.max_host_share * clock.device_s()
    if not is_bound:
        return None
    idle_s = clock.step_s(pace) - clock.device_s()  # until the host has queued the first kernel
    kernels_s = sum(piece.seconds for piece in clock.pieces)
    return BoundStep(mode, kernels_s, clock.clocked_s(), clock.rate(), clock.launches, case["seconds"] - idle_s)


# --- Compiled steps ---------------------------------------------------------------------------------------------------
def fit_compiled(cases: Sequence[ModelledCase], constants: Constants) -> CompiledConstants:
    """The share of memory-bound time that is left once a compiler has fused operators; host seconds of a launch."""
    machine = make_machine(constants)
    shares, launches_s = [], []
    for each in cases:
        case = each.case
        if not case["compiled"]:
            continue
        shares.append(_find_share(each, machine))
        if "queued_s" in case and "probe_s" in case:
            launches = run_clock(each, _set_share(machine, shares[-1]), compiled=True).launches
            queued_s = case["queued_s"] / case["probe_s"] * constants["probe_s"]["train"]  # at the host's usual pace
            launches_s.append(queued_s / launches)
    return {
        "moved": float(f"{statistics.fmean(shares):.3g}") if shares else 1.0,
        "launch_s": float(f"{statistics.fmean(launches_s):.3g}") if launches_s else 0.0,
    }


def _find_share(each: ModelledCase, machine: Machine) -> float:
    """The share with which a compiled step takes as long as it was measured to; 0 or 1 if none between does."""

    def find_excess(share: float) -> float:
        return run_clock(each, _set_share(machine, share), compiled=True).device_s() - float(each.case["seconds"])

    if find_excess(0.0) >= 0:
        return 0.0
    return 1.0 if find_excess(1.0) <= 0 else float(brentq(find_excess, 0.0, 1.0, xtol=1e-6))


def _set_share(machine: Machine, share: float) -> Machine:
    return change_constants(machine, compiled={"moved": share, "launch_s": 0.0})


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

    running, compute, memory = round_digits(
        fit_positive(list_errors, CHOICES.start_watts, CHOICES.watts_rounded_error), 4
    )
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
    if not rests or len(points) < CHOICES.min_watts_rows:
        return None
    return {**fit_points(points, min(rests)), "limit_w": limit_w}
