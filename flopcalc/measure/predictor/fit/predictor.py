"""The whole fit: everything that was measured on a device goes in, the file that `flopcalc predict` reads comes out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from flopcalc.base.errors import CalibrationError
from flopcalc.base.files import write_whole
from flopcalc.base.spelling import spell
from flopcalc.base.vocabulary import HOST_PHASES
from flopcalc.hardware.devices import find_device
from flopcalc.hardware.tiles import find_tiles
from flopcalc.measure.predictor.fit.cases import Json, ModelledCase, make_machine, model_cases
from flopcalc.measure.predictor.fit.choices import CHOICES
from flopcalc.measure.predictor.fit.clock import (
    fit_compiled,
    fit_gaps_and_power,
    fit_slowdown,
    fit_watts,
    scale_to_full_clock,
)
from flopcalc.measure.predictor.fit.host import (
    HostStep,
    find_usual_probes,
    fit_checkpoints,
    fit_host,
    fit_paces,
    fit_types,
    scale_to_usual_pace,
)
from flopcalc.measure.predictor.fit.memory import fit_curves, fit_lines
from flopcalc.measure.predictor.fit.points import join_points, read_gemm_table, read_points, read_single_calls
from flopcalc.measure.predictor.fit.products import fit_adapters, fit_attention, fit_grouped, fit_patches, fit_products
from flopcalc.measure.predictor.narrow import is_narrow
from flopcalc.prediction.kernels.constants import (
    SCHEMA,
    Constants,
    HostConstants,
    KernelConstants,
    Provenance,
    scale_host,
)
from flopcalc.prediction.kernels.products import ProductShape
from flopcalc.prediction.moe_versions import RECORDED


def fit_predictor(
    records: Iterable[Json],
    configs: Callable[[str], Json],
    provenance: Provenance,
    attention: Iterable[Json] = (),
    products: Iterable[Json] = (),
    known: Constants | None = None,
) -> Constants:
    """All constants of a device, from the records of `runs` and, where there are any, its tables attention and gemm.

    What these do not show is as `known` has it: kernels scaled by bandwidth, the host's by its pace.
    """
    records, gemm_table = list(records), list(products)
    calls = [*attention, *(call for record in records for call in record.get("calls", ()))]
    small = [record for record in records if record.get("is_host")]
    device, version = provenance["device_id"], provenance.get("transformers") or RECORDED
    modelled = model_cases((record for record in records if record.get("is_host") is False), configs, device, version)
    if not read_points(modelled).products:
        raise CalibrationError(
            "no profiled step shows a matrix product on a GPU: the profiler saw no kernels (is another one running?)"
        )
    tiles = find_tiles(device)
    kernels = _fit_kernels(modelled, calls, gemm_table, tiles)
    constants: Constants = {
        "schema": SCHEMA,
        "provenance": provenance,
        "products": kernels["products"],
        "attention": kernels["attention"],
        "moved": kernels["moved"],
        "linear": kernels["linear"],
        "optimizer": kernels["optimizer"],
        "gaps": dict(CHOICES.start_gaps_s),
        "power": list(CHOICES.start_power),
        "compiled": {"moved": 1.0, "launch_s": 0.0},
        "error": dict(CHOICES.interval),
        "host": _join_host({}, {phase: [0.0, 0.0] for phase in HOST_PHASES}),
        "probe_s": {},
    }
    # Profiled kernels ran at a lowered clock. The first fit shows how far; the second is of kernels at the full clock.
    rates, slowdowns = fit_slowdown(modelled, constants)
    full_clock = [scale_to_full_clock(each, rate, slowdowns) for each, rate in zip(modelled, rates, strict=True)]
    constants = {**constants, **_fit_kernels(full_clock, calls, gemm_table, tiles)}
    constants["probe_s"] = find_usual_probes(small)
    if known is not None:
        constants = take_over(constants, known)
    if known is not None and not any("units" in record for record in records):
        steps = _model_small_steps(constants, records, configs)
        constants = {**constants, "host": known["host"]}
        paces = fit_paces(steps, constants)
        check_complete(constants, paces)
        constants["host"] = scale_host(known["host"], paces)
    else:
        constants = fit_host_part(constants, records, configs, modelled)
    constants["gaps"], constants["power"] = fit_gaps_and_power(modelled, constants)
    constants["compiled"] = fit_compiled(modelled, constants)
    metered = model_cases((record for record in records if record.get("power") == "step"), configs, device, version)
    watts = fit_watts([*modelled, *metered], records, make_machine(constants), provenance)
    return constants if watts is None else {**constants, "watts": watts}


def fit_host_part(
    constants: Constants,
    records: Sequence[Json],
    configs: Callable[[str], Json],
    modelled: Sequence[ModelledCase],
    others: Sequence[ModelledCase] = (),
) -> Constants:
    """The same constants with the host's, from the records of small steps; `others` are such steps of more types."""
    steps = _model_small_steps(constants, records, configs)
    more = [HostStep(each, scale_to_usual_pace(each.case, constants["probe_s"])) for each in others]
    measured: dict[str, float] = next((record["units"] for record in records if "units" in record), {})
    # Older calibrations measured the call of an empty module too, which takes less than a module's own Python.
    units = {**CHOICES.host_units, **measured, "module": CHOICES.host_units["module"]}
    phases = fit_host(steps, units)
    check_complete(constants, phases)
    found: Constants = {**constants, "host": _join_host(units, phases)}
    found["host"]["types"] = fit_types([*steps, *more], found)
    found["host"]["again"] = fit_checkpoints(steps, modelled, found)
    # Whole models take a little longer than narrow ones of the same code, of which most steps are.
    paces = fit_paces([step for step in steps if not is_narrow(step.modelled.case["model"])], found)
    found["host"] = scale_host(found["host"], {phase: paces.get(phase, 1.0) for phase in HOST_PHASES})
    found["host"]["again"] = fit_checkpoints(steps, modelled, found)  # what they take beyond the scaled times
    return found


def _model_small_steps(constants: Constants, records: Sequence[Json], configs: Callable[[str], Json]) -> list[HostStep]:
    device, version = constants["provenance"]["device_id"], constants["provenance"].get("transformers") or RECORDED
    small = [record for record in records if record.get("is_host") and "model" in record]
    return [
        HostStep(each, scale_to_usual_pace(each.case, constants["probe_s"]))
        for each in model_cases(small, configs, device, version)
    ]


def take_over(constants: Constants, known: Constants) -> Constants:
    """The same constants, with the kernels that only `known` has, as long as they take at this device's bandwidth."""
    own, other = (find_device(each["provenance"]["device_id"]).bandwidth_gb_per_s for each in (constants, known))
    slower = other / own if own and other else 1.0

    def scale(line: Sequence[float]) -> list[float]:
        start_s, per_byte = line
        return [start_s, per_byte * slower]

    products = constants["products"]
    adapters = known["products"].get("adapters", {}) | products.get("adapters", {})
    lines = {kind: scale(line) for kind, line in known["linear"].items() if kind not in constants["linear"]}
    curves = {
        kind: [[size, seconds * slower] for size, seconds in curve]
        for kind, curve in known["moved"].items()
        if kind not in constants["moved"]
    }
    return {
        **constants,
        "products": {**products, "adapters": adapters},
        "linear": constants["linear"] | lines,
        "moved": constants["moved"] | curves,
    }


def _fit_kernels(
    cases: Sequence[ModelledCase], calls: Sequence[Json], gemm_table: Sequence[Json], tiles: str
) -> KernelConstants:
    """Constants of single kernels, from profiled steps and from single calls."""
    points = join_points(read_points(cases), read_single_calls(calls))
    products = fit_products(points.products, read_gemm_table(gemm_table), tiles)
    shape = ProductShape(*products["shape"])
    lines, optimizers = fit_lines(cases)
    return {
        "products": {
            "shape": products["shape"],
            "tiles": products["tiles"],
            "unaligned": products["unaligned"],
            "residuals": products["residuals"],
            "grouped": fit_grouped(points.grouped, shape),
            "patches": fit_patches(cases),
            "adapters": fit_adapters(calls),
        },
        "attention": fit_attention(points.attention, round(shape.units)),
        "moved": fit_curves(points.moved),
        "linear": lines,
        "optimizer": optimizers,
    }


def _join_host(units: dict[str, float], phases: Mapping[str, list[float]]) -> HostConstants:
    return {
        "units": units,
        "types": {},
        "again": [0.0, 0.0],
        "train": phases["train"],
        "forward": phases["forward"],
        "decode": phases["decode"],
    }


def check_complete(constants: KernelConstants, phases: Collection[str]) -> None:
    """Refuse constants that no prediction can be made from, because too many cases failed."""
    missing = [f"small steps of phase {phase}" for phase in HOST_PHASES if phase not in phases]
    missing += [] if constants["attention"] else ["attention in one kernel"]
    missing += [] if "adamw" in constants["optimizer"] else ["a training step with its fused optimizer"]
    missing += [] if "pointwise_strided" in constants["moved"] else ["enough elementwise operators"]
    if missing:
        raise CalibrationError(
            f"too little was measured to fit a predictor: no {', no '.join(missing)}; {spell('retry_failed')} measures "
            "the rows that failed again"
        )


def save_predictor(path: str, constants: Constants) -> None:
    """Write a predictor's file whole or not at all, one line per entry of its outer two levels."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_whole(path, _format(constants))
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot be written: {error.strerror}; what was measured is kept: the same command with another "
            f"{spell('out')} and the same {spell('work')} goes on"
        ) from None


def _format(value: object, depth: int = 0) -> str:
    if depth < 2 and isinstance(value, dict):
        lines = [f"{' ' * (depth + 1)}{json.dumps(key)}: {_format(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}" + ("\n" if not depth else "")
    return json.dumps(value)
