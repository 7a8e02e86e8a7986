"""A result in, HTML for notebooks out: a table under what it is of, and its notes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flopcalc.base.rows import show_rows
from flopcalc.base.units import format_flops, format_seconds
from flopcalc.base.vocabulary import name_part
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.report.breakdown import describe_work, make_table

if TYPE_CHECKING:  # an estimate is shown without the rooms above it
    from flopcalc.core.estimate.translation import Translation
    from flopcalc.planning.results import Plan
    from flopcalc.prediction.step import Prediction
    from flopcalc.server.serve import ServingAnswer

__all__ = [
    "describe_work", "make_table", "show_answer", "show_estimate", "show_plan", "show_prediction", "show_translation",
]  # fmt: skip


def show_estimate(estimate: Estimate) -> str:
    work = f"{estimate.terms[0].estimator.source.name}: {describe_work(estimate)}; convention {estimate.convention}"
    total = f"{format_flops(estimate.total)} = {estimate.total:,} FLOPs"
    return show_rows(*make_table(estimate, "component", None), f"{work}: {total}", estimate.notes)


def show_prediction(prediction: Prediction) -> str:
    from flopcalc.report.prediction import format_energy_lines

    rows = [[name_part(row.name), format_seconds(row.seconds), f"{100 * row.share:.1f} %"] for row in prediction.rows()]
    energy = " ".join(" ".join(format_energy_lines(prediction.energy, "per step")).split())
    notes = [*([energy] if energy else []), f"helps most: {prediction.advice}", *prediction.notes]
    return show_rows(["where the time goes", "time", "share"], rows, prediction.describe(), notes)


def show_plan(plan: Plan) -> str:
    from flopcalc.report.plan import HEADERS, list_cells

    return show_rows(HEADERS, list_cells(plan), plan.describe(), plan.notes)


def show_translation(translation: Translation) -> str:
    from flopcalc.report.translation import HEADERS, list_cells, list_facts

    caption = "; ".join([f"{translation.model}: {translation.work}", *list_facts(translation)])
    return show_rows(HEADERS, [list_cells(row) for row in translation.rows], caption, translation.notes)


def show_answer(found: ServingAnswer) -> str:
    from flopcalc.report.serving import HEADERS, describe_answer, list_cells, list_rates

    return show_rows(HEADERS, list_cells(found), describe_answer(found), [*list_rates(found), *found.notes])
