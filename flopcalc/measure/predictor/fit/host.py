"""Constants of the host: seconds of a call of the model, of an operator, of a checkpoint, and per model type."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flopcalc.base.vocabulary import HOST_PHASES, HostPhase
from flopcalc.measure.predictor.fit.cases import Json, ModelledCase, change_constants, make_machine, run_clock
from flopcalc.measure.predictor.fit.choices import CHOICES
from flopcalc.measure.predictor.fit.solvers import Row, round_digits, solve_call_and_factor, solve_nonnegative
from flopcalc.prediction.build_work import count_calls
from flopcalc.prediction.host_time import count_kept, find_unit, name_factor, name_mode, name_phase
from flopcalc.prediction.kernels.constants import Constants
from flopcalc.prediction.kernels.machine import Machine
from flopcalc.prediction.work import Work


class HostStep(NamedTuple):
    """A small step, with its seconds at the host's usual pace."""

    modelled: ModelledCase
    seconds: float


# --- The host's pace --------------------------------------------------------------------------------------------------
def find_usual_probes(cases: Iterable[Json]) -> dict[str, float]:
    """Median seconds of the probe with a backward pass (train) and without (forward): the host's usual pace."""
    found: dict[str, list[float]] = {}
    for case in cases:
        found.setdefault(name_mode(case["phase"]), []).append(case["probe_s"])
    return {mode: float(f"{statistics.median(seconds):.4g}") for mode, seconds in found.items()}


def scale_to_usual_pace(case: Json, probes_s: Mapping[str, float]) -> float:
    """Seconds of a host-bound step at the host's usual pace, from its ratio to the probe around it."""
    return float(case["ratio"] * probes_s[name_mode(case["phase"])])


# --- Calls and operators ----------------------------------------------------------------------------------------------
def fit_host(steps: Sequence[HostStep], units: Mapping[str, float]) -> dict[str, list[float]]:
    """Phase -> seconds of a call of the model and of one unit, from steps in which the host never waits."""
    rows: dict[str, list[Row]] = {phase: [] for phase in HOST_PHASES}
    for each, seconds in steps:
        if each.case["recompute"] == "none" and not _is_waiting(each):
            features = list_host_features(each.work.dispatched, count_calls(each.load), units)
            rows[name_phase(each.load.phase)].append((features, seconds))
    return {phase: round_digits(solve_nonnegative(entries)) for phase, entries in rows.items() if entries}


def list_host_features(dispatched: Mapping[str, float], calls: int, units: Mapping[str, float]) -> tuple[float, float]:
    """Calls of the model, and everything that they dispatch, in additions."""
    total = 0.0
    for name, count in dispatched.items():
        direction, _, kind = name.partition(" ")
        total += count * find_unit(direction, kind, units)
    return float(calls), total


def _is_waiting(each: ModelledCase) -> bool:
    """Whether the host waits for the device even in a small step: where images enter, for large optimizers."""
    return bool(each.load.all_grids) or (
        each.load.phase == "train" and any(product.size.copies > 1 for product in each.work.products)
    )


def fit_paces(steps: Sequence[HostStep], constants: Constants) -> dict[HostPhase, float]:
    """Phase -> how many times longer this host takes than the one whose constants these are, in the middle."""
    machine = make_machine(constants)
    found: dict[HostPhase, list[float]] = {}
    for each, seconds in steps:
        clock, pace = run_clock(each, machine), 1.0
        if clock.device_s() > CHOICES.max_device_share * clock.host_s():
            continue
        for _ in range(CHOICES.pace_rounds):
            pace *= seconds / clock.step_s(pace, constants["probe_s"][name_mode(each.case["phase"])])
        found.setdefault(name_phase(each.load.phase), []).append(pace)
    return {phase: statistics.median(paces) for phase, paces in found.items()}


# --- Checkpoints ------------------------------------------------------------------------------------------------------
def fit_checkpoints(steps: Sequence[HostStep], larger: Iterable[ModelledCase], constants: Constants) -> list[float]:
    """Host seconds of a checkpoint, and of a tensor that an operator in it keeps, beyond those of the operators.

    From small steps with gradient checkpointing, and from larger ones that the host still bounds.
    """
    usual_s = constants["probe_s"]["train"]
    machine = change_constants(make_machine(constants), host={**constants["host"], "again": [0.0, 0.0]})
    timed = [(each, seconds, usual_s) for each, seconds in steps]
    timed += [
        (each, each.case["seconds"] / each.case["probe_s"] * usual_s, 0.0) for each in larger if "probe_s" in each.case
    ]
    rows: list[tuple[tuple[float, float], float]] = []
    for each, seconds, pause_s in timed:
        if each.case["recompute"] == "none" or each.case["grids"] or each.case["compiled"]:
            continue
        clock = run_clock(each, machine)
        rest_s = seconds - clock.step_s(1.0, pause_s)
        counts = count_checkpoints(each.work)
        if min(rest_s, *counts) > 0 and clock.device_s() < CHOICES.max_device_share * clock.host_s():
            rows.append((counts, rest_s))
    if not rows:
        return [0.0, 0.0]
    # Layers of most models keep about as many tensors. Where steps cannot separate the two, each takes half.
    checkpoint_s, kept_s = (statistics.median(rest_s / 2 / counts[i] for counts, rest_s in rows) for i in range(2))
    scaled = [((checkpoints, kept_s * kept), rest_s) for (checkpoints, kept), rest_s in rows]
    checkpoint_s, factor = solve_call_and_factor(scaled, checkpoint_s)
    return round_digits((checkpoint_s, max(0.0, factor) * kept_s))


def count_checkpoints(work: Work) -> tuple[float, float]:
    """Checkpoints, and the tensors that the operators in them keep."""
    again = [each for each in work.hosted if each.way == "again"]
    return sum(each.many for each in again if each.is_checkpoint), sum(
        each.many * count_kept(each.kind) for each in again
    )


# --- Model types ------------------------------------------------------------------------------------------------------
def fit_types(
    steps: Sequence[HostStep], constants: Constants, pulls: tuple[float, float] = CHOICES.pulls
) -> dict[str, dict[str, list[float]]]:
    """Model type -> phase -> seconds of a call, and the factor of its operators' usual host time.

    From small steps of several depths, each followed by the probe. A tower's factor is what steps with images take
    beyond the same phase without images, so those come first. A type whose every step has images has one factor.
    """
    machine = make_machine(constants)
    fitted: dict[str, dict[str, list[float]]] = {}
    for has_images in (False, True):
        rows: dict[tuple[str, str], list[tuple[tuple[float, float], float]]] = {}
        alone: set[tuple[str, str]] = set()  # whose steps all have images
        for each, seconds in steps:
            case, model_type = each.case, each.work.model_type
            known = fitted.get(model_type, {})
            if bool(case["grids"]) is not has_images or case["recompute"] != "none" or is_device_slow(each, machine):
                continue
            if has_images and name_phase(case["phase"]) not in known:
                continue
            name = name_factor("forward", "vision" if has_images else "", case["phase"])
            if each.load.all_grids and not has_images:
                alone.add((model_type, name))
            rows.setdefault((model_type, name), []).append(_split_seconds(each, seconds, machine, known, name))
        for (model_type, name), entries in rows.items():
            if has_images:  # what images take besides a tower's layers is recorded, so a tower only has a factor
                entries = [((0.0, operators), value) for (_, operators), value in entries]
            usual_s = 0.0 if has_images else constants["host"][name_phase(name)][0]
            found = round_digits(solve_call_and_factor(entries, usual_s, pulls))
            fitted.setdefault(model_type, {}).update(_name_factors(name, found, is_alone=(model_type, name) in alone))
    return fitted


def _name_factors(name: str, found: list[float], *, is_alone: bool) -> dict[str, list[float]]:
    """A call's seconds and a factor by their name; the factor also as a tower's, if steps show only both together."""
    return {name: found} | ({f"vision {name}": [0.0, found[1]]} if is_alone else {})


def is_device_slow(each: ModelledCase, machine: Machine) -> bool:
    """Whether the device has so much to do that the step says little about the host."""
    clock = run_clock(each, machine)
    return bool(clock.device_s() > CHOICES.max_device_share * clock.host_s())


def _split_seconds(
    each: ModelledCase, seconds: float, machine: Machine, known: Mapping[str, list[float]], name: str
) -> tuple[tuple[float, float], float]:
    """How a step's seconds grow with seconds of a call and with the factor, and the part of them that both explain."""
    host, pause_s = machine.constants["host"], machine.constants["probe_s"][name_mode(each.case["phase"])]

    def predict(call_s: float, factor: float) -> float:
        is_alone = bool(each.load.all_grids) and not each.case["grids"]
        types = {each.work.model_type: {**known, **_name_factors(name, [call_s, factor], is_alone=is_alone)}}
        return run_clock(each, change_constants(machine, host={**host, "types": types})).step_s(1.0, pause_s)

    usual_s = predict(CHOICES.call_step_s, 1.0)
    calls = (predict(2 * CHOICES.call_step_s, 1.0) - usual_s) / CHOICES.call_step_s
    operators = (predict(CHOICES.call_step_s, 1.0 + CHOICES.factor_step) - usual_s) / CHOICES.factor_step
    return (calls, operators), seconds - (usual_s - CHOICES.call_step_s * calls - operators)
