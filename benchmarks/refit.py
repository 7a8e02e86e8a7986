"""Constants of a predictor that ships, and more measurements, go in; constants fitted anew by today's code come out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from flopcalc.hardware.tiles import find_tiles
from flopcalc.measure.predictor.fit.cases import Json, ModelledCase, make_machine, model_cases
from flopcalc.measure.predictor.fit.choices import CHOICES
from flopcalc.measure.predictor.fit.clock import (
    fit_compiled,
    fit_gaps_and_power,
    fit_slowdown,
    read_bound_step,
    scale_to_full_clock,
)
from flopcalc.measure.predictor.fit.memory import fit_curves, fit_lines
from flopcalc.measure.predictor.fit.points import join_points, read_gemm_table, read_points, read_single_calls
from flopcalc.measure.predictor.fit.predictor import fit_host_part
from flopcalc.measure.predictor.fit.products import fit_adapters, fit_attention, fit_products
from flopcalc.measure.predictor.fit.solvers import fit_positive, round_digits
from flopcalc.prediction.kernels.attention import IN_WAVES
from flopcalc.prediction.kernels.constants import Constants
from flopcalc.prediction.kernels.products import ProductShape
from flopcalc.prediction.moe_versions import RECORDED


def fit_again(
    constants: Constants,
    records: Iterable[Json],
    configs: Callable[[str], Json],
    others: Sequence[ModelledCase] = (),
    more_calls: Sequence[Json] = (),
    elsewhere: Sequence[ModelledCase] = (),
    gemm_table: Sequence[Json] = (),
    compiled: Sequence[ModelledCase] = (),
) -> Constants:
    """Constants of a predictor fitted anew: plain products', the optimizer's, the host's, the clock's, and attention's
    in waves.

    Its other kernels stay. `others` are small steps of more model types, perhaps of another machine, `more_calls`
    single calls of kernels that the records do not show, and `elsewhere` steps of other machines of the same device,
    which give the time between kernels better than one machine does; `compiled` are more compiled steps.
    """
    records = list(records)
    device, version = constants["provenance"]["device_id"], constants["provenance"].get("transformers") or RECORDED
    modelled = model_cases((record for record in records if record.get("is_host") is False), configs, device, version)
    rates, slowdowns = fit_slowdown(modelled, constants)
    full_clock = [scale_to_full_clock(each, rate, slowdowns) for each, rate in zip(modelled, rates, strict=True)]
    calls = [*more_calls, *(call for record in records for call in record.get("calls", ()))]
    points = join_points(read_points(full_clock), read_single_calls(calls)).products
    products = fit_products(points, read_gemm_table(gemm_table), find_tiles(device))
    changed: Constants = {
        **constants,
        "products": {**constants["products"], **products, "adapters": fit_adapters(calls)},
        "attention": _fit_waves(constants, full_clock, calls),
        "moved": constants["moved"] | fit_curves(read_single_calls(more_calls).moved),
        "optimizer": fit_lines(full_clock)[1],
    }
    changed = fit_host_part(changed, records, configs, modelled, others)
    gaps, power = fit_gaps_and_power(modelled, changed)
    changed = {**changed, "gaps": gaps, "power": power}
    if compiled:
        changed = {**changed, "compiled": fit_compiled([*modelled, *compiled], changed)}
    gap_s = fit_gap(elsewhere, changed)
    return changed if gap_s is None else {**changed, "gaps": {**gaps, "train": gap_s}}


def _fit_waves(
    constants: Constants, cases: Sequence[ModelledCase], calls: Sequence[Json]
) -> dict[str, dict[str, list[float]]]:
    """Constants of attention, those under the masks IN_WAVES fitted anew."""
    units = round(ProductShape(*constants["products"]["shape"]).units)
    points = join_points(read_points(cases), read_single_calls(calls)).attention
    fitted = fit_attention([point for point in points if point.mask in IN_WAVES], units)
    return {kernel: table | fitted.get(kernel, {}) for kernel, table in constants["attention"].items()}


def fit_gap(cases: Sequence[ModelledCase], constants: Constants) -> float | None:
    """Seconds between kernels of training steps, at a clock that is known; None if no step has one."""
    machine = make_machine(constants)
    found = [step for each in cases if (step := read_bound_step(each, machine))]
    steps = [step for step in found if step.mode == "train"]
    if not steps:
        return None

    def list_errors(values: Sequence[float]) -> list[float]:
        return [math.log(step.predict(constants["power"], values[0]) / step.seconds) for step in steps]

    (gap_s,) = round_digits(fit_positive(list_errors, (CHOICES.start_gaps_s["train"],), CHOICES.rounded_error))
    return gap_s
