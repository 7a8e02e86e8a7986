"""The tables of a suite: what each measures, as jobs."""

from __future__ import annotations

from collections.abc import Callable

from flopcalc.measure.calibrate.tables import Json, attention, counts, gemm, memory, steps
from flopcalc.measure.jobs.runner import Job

# Table -> its jobs in a suite. In order of importance: a run that is cut short leaves the counts.
TABLES: dict[str, Callable[[str], list[Job]]] = {
    "counts": counts.plan,
    "padding": counts.plan_padding,
    "attention": attention.plan,
    "gemm": gemm.plan,
    "memory": memory.plan,
    "steps": steps.plan,
}


def plan_table(table: str, suite: str) -> list[Job]:
    return TABLES[table](suite)


def finish_table(table: str, records: list[Json]) -> list[Json]:
    """What can only be said with all rows at hand."""
    return memory.finish(records) if table == "memory" else records
