"""Measured cases with the work that the predictor sees in them, and the time that a predictor gives that work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

from flopcalc.core.estimate.binding import bind_config
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.workload.workload import Workload, make_workload
from flopcalc.hardware.routing import RANDOM, Routing
from flopcalc.prediction.build_work import make_work
from flopcalc.prediction.clock import Clock
from flopcalc.prediction.kernels.constants import CompiledConstants, Constants, HostConstants
from flopcalc.prediction.kernels.machine import Machine
from flopcalc.prediction.moe_versions import RECORDED
from flopcalc.prediction.work import Work

Json = dict[str, Any]


class ModelledCase(NamedTuple):
    """A measured case and the work that the predictor sees in it."""

    case: Json
    estimator: Estimator
    load: Workload
    work: Work


def model_cases(
    cases: Iterable[Json], configs: Callable[[str], Json], device: str, transformers: str = RECORDED
) -> list[ModelledCase]:
    """All cases, as a version of transformers runs them; each model is bound once per recipe and attention."""
    bound: dict[tuple[str, ...], Estimator] = {}
    modelled = []
    for case in cases:
        key = (case["model"], case["recompute"], case["attention"], str(case.get("lora")))
        if key not in bound:
            bound[key] = bind_case(case, configs(case["model"]), device)
        modelled.append(model_case(case, bound[key], transformers))
    return modelled


def bind_case(case: Json, config: Json, device: str) -> Estimator:
    return bind_config(
        config,
        recipe={"recompute": case["recompute"], "lora": case.get("lora")},
        convention="hardware",
        device=device,
        attention_kernel=_find_kernel(case) or "auto",
        routing=find_random(config),
    )


def find_random(config: Json) -> Routing | None:
    """The routing of a model with HF's random weights; None for a model without experts."""
    return RANDOM if bind_config(config).routing is not None else None


def model_case(case: Json, estimator: Estimator, transformers: str = RECORDED) -> ModelledCase:
    images = [grid for _ in range(case["batch"]) for grid in case["grids"]] or None
    context = case["context"] if case["phase"] == "decode" else None
    load = make_workload(case["batch"], case["seq"], image_grid_thw=images, phase=case["phase"], context=context)
    work = make_work(estimator, load, optimizer=case["optimizer"], kernel=_find_kernel(case), transformers=transformers)
    return ModelledCase(case, estimator, load, work)


def _find_kernel(case: Json) -> Literal["eager", ""]:
    """The attention kernel that a case asks for; empty where SDPA picks one."""
    return "eager" if case["attention"] == "eager" else ""


def make_machine(constants: Constants) -> Machine:
    return Machine(constants["provenance"]["device_id"], "bf16", constants)


class Changes(TypedDict, total=False):
    """Constants that may be changed; not those of products, whose times a machine keeps."""

    gaps: dict[str, float]
    power: list[float]
    compiled: CompiledConstants
    host: HostConstants


def change_constants(machine: Machine, **changed: Unpack[Changes]) -> Machine:
    """The same machine with other constants."""
    if "products" in changed:
        raise ValueError("times of products are kept: make another machine")
    other = copy.copy(machine)
    other.constants = {**machine.constants, **changed}
    return other


def run_clock(each: ModelledCase, machine: Machine, *, compiled: bool = False) -> Clock:
    clock = Clock(machine, "compiled" if compiled else "eager")
    clock.add(each.work, 1, each.load)
    return clock
