"""How often the interval of a plan held in published runs of the same kind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import SpecError
from flopcalc.base.files import MAX_JSON_BYTES, read_json
from flopcalc.base.units import format_seconds
from flopcalc.planning.layout import Layout
from flopcalc.planning.step import LayoutTimer
from flopcalc.prediction.clock import CHECKED


def describe_coverage(runner: LayoutTimer, layout: Layout, others: Sequence[tuple[Layout, float]] = ()) -> list[str]:
    """How often the interval held in published runs of this kind of layout, and how far off their steps were.

    `others` are layouts with the seconds of their step, the fastest first.
    """
    if layout.devices == 1 or runner.execution != "fused":
        return []
    device = runner.machine.device
    if device.id not in CHECKED:
        return [
            f"no published training run on {device.name} was compared with a plan: how often the interval holds is not "
            "known, and it is wider for that"
        ]
    name = name_kind(runner, layout)
    found = load_coverage().get(name)
    if found is None:
        return [f"no published run of this kind ({name}) was predicted: how often the interval holds is not known"]
    longer = found["longer"]
    word = f"{100 * abs(longer):.0f} % {'longer' if longer > 0 else 'shorter'} than"
    word = word if abs(longer) >= 0.005 else "as long as"
    notes = [
        f"{found['inside']} of {found['runs']} published runs of this kind ({name}) lie inside the interval, and the "
        f"median one took {word} predicted (benchmarks/published_training.py)"
    ]
    own = next((seconds for each, seconds in others if each == layout), None)
    rival = next(((each, at) for each, at in others if name_kind(runner, each) != name), None)
    if layout.zero == 3 and own is not None and rival is not None:
        bias = 1 + load_coverage().get(name_kind(runner, rival[0]), found)["longer"]
        if rival[1] * bias < own * (1 + longer):
            notes.append(
                f"zero 3 is first by less than published runs of it are off: by their median, {rival[0]} would be "
                f"faster ({format_seconds(rival[1])} a step as predicted)"
            )
    return notes


def name_kind(runner: LayoutTimer, layout: Layout) -> str:
    """The kind of published runs that a layout is compared with."""
    return f"{'dense' if runner.model.experts == 1 else 'experts'}, zero {'3' if layout.zero == 3 else '0 to 2'}"


@cache
def load_coverage() -> dict[str, dict[str, float]]:
    """Kind of layout -> published runs, how many of them are inside the interval, and how much longer the median one
    took than predicted."""
    path = os.path.join(find_data_dir(), "plan_coverage.json")
    kinds: dict[str, dict[str, float]] = read_json(path, MAX_JSON_BYTES, SpecError)["kinds"]
    return kinds
