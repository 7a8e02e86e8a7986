"""A Plan in, text out: the best layouts, where their time goes, why the others lose."""

from __future__ import annotations

from flopcalc.base.text_table import format_grid, wrap
from flopcalc.base.units import (
    format_amount,
    format_bytes,
    format_duration,
    format_energy,
    format_money,
    format_parameters,
    format_seconds,
    format_tokens,
)
from flopcalc.base.vocabulary import name_part
from flopcalc.planning.results import Plan
from flopcalc.report.prediction import format_energy_lines

# Columns of the limits that were given, and what each verdict says.
_LIMITS = {"days": "in time", "budget": "in budget"}
_VERDICTS = {
    "yes": "yes, even at the slow end of the interval",
    "likely": "likely: not at the slow end of the interval",
    "unlikely": "unlikely: only at the fast end of the interval",
    "no": "no",
}
HEADERS = ["layout", "step", "from … to", "MFU", "HFU", "memory", "time", "GPU-h", "energy", "cost"]


def format_plan(plan: Plan) -> str:
    """The readable report of a Plan."""
    step = f"{plan.global_batch:,} × {plan.seq:,} tokens a step"
    joined = f", {plan.interconnect.id}" if plan.gpus > 1 else ""
    lines = [
        *wrap(
            f"{plan.model} ({format_parameters(plan.parameters)} parameters) on {plan.gpus:,} × "
            f"{plan.device.name}{joined}",
            rest="  ",
        ),
        *wrap(f"{format_tokens(plan.tokens)}, {step}, {plan.dtype}, execution {plan.execution}", rest="  "),
        "",
    ]
    lines += [format_grid(HEADERS, list_cells(plan), keys=1), ""]
    for name, found in plan.within.items():
        most = f"; about {format_tokens(found['tokens'])} would" if found["tokens"] < plan.tokens else ""
        lines += _wrap(_LIMITS[name], f"{_VERDICTS[found['verdict']]}{most}")
    best = plan.best[0]
    parts = sorted(best.to_dict()["breakdown"].items(), key=lambda part: -part[1])
    shares = ", ".join(
        f"{name_part(name)} {part / best.step.seconds:.0%}" for name, part in parts if part > 0.005 * best.step.seconds
    )
    lines += _wrap("time goes", f"(first layout) {shares}")
    lines += format_energy_lines(best.energy, "for the run", 21)
    lines += _wrap("searched", f"{plan.layouts:,} layouts are valid, {plan.fitting:,} fit in memory")
    for loser in plan.losers:
        lines += _wrap(f"lost: {loser.reason}", f"{loser.layouts:,}; nearest {loser.nearest.layout}: {loser.text}")
    if plan.helps:
        lines += _wrap("helps most", plan.helps)
    for note in plan.notes:
        lines += _wrap("note", note)
    return "\n".join(lines)


def list_cells(plan: Plan) -> list[list[str]]:
    """A row for each of the best layouts."""
    return [
        [
            str(entry.layout),
            format_seconds(entry.step.seconds),
            f"{format_seconds(entry.step.low)} … {format_seconds(entry.step.high)}",
            f"{100 * entry.mfu:.1f} %",
            f"{100 * entry.hfu:.1f} %",
            format_bytes(entry.memory.peak),
            format_duration(entry.days),
            format_amount(entry.gpu_hours),
            "-" if entry.kwh is None else format_energy(1000 * entry.kwh),
            "-" if entry.usd is None else format_money(entry.usd),
        ]
        for entry in plan.best
    ]


def make_cells(plan: Plan) -> dict[str, str | None]:
    """A row of a table of plans."""
    best = plan.best[0]
    low, high = (format_duration(best.days * each / best.step.seconds) for each in (best.step.low, best.step.high))
    low = low.removesuffix(high.lstrip("0123456789.,"))  # a unit is said once
    return {
        "best layout": str(best.layout),
        "step": format_seconds(best.step.seconds),
        "MFU": f"{100 * best.mfu:.1f} %",
        "time": format_duration(best.days),
        "from … to": f"{low} … {high}",
        "cost": None if best.usd is None else format_money(best.usd),
        **{_LIMITS[name]: found["verdict"] for name, found in plan.within.items()},
    }


def _wrap(label: str, text: str) -> list[str]:
    return wrap(text, f"{label:21}", " " * 21)
