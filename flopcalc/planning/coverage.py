"""How often the interval of a plan held in published runs of the same kind."""

from __future__ import annotations

import os
from functools import cache

from flopcalc.data import find_data_dir
from flopcalc.errors import SpecError
from flopcalc.files import MAX_JSON_BYTES, read_json
from flopcalc.planning.layout import Layout
from flopcalc.planning.step import Runner


def describe_coverage(runner: Runner, layout: Layout) -> list[str]:
    """How often the interval held in published runs of this kind of layout."""
    if layout.devices == 1 or runner.execution != "fused":
        return []
    name = f"{'dense' if runner.model.experts == 1 else 'experts'}, zero {'3' if layout.zero == 3 else '0 to 2'}"
    found = load_coverage().get(name)
    if found is None:
        return [f"no published run of this kind ({name}) was predicted: how often the interval holds is not known"]
    return [
        f"{found['inside']} of {found['runs']} published runs of this kind ({name}) lie inside the interval "
        "(benchmarks/published_training.py)"
    ]


@cache
def load_coverage() -> dict[str, dict[str, int]]:
    """Kind of layout -> published runs, and how many of them lie inside the interval."""
    path = os.path.join(find_data_dir(), "plan_coverage.json")
    kinds: dict[str, dict[str, int]] = read_json(path, MAX_JSON_BYTES, SpecError)["kinds"]
    return kinds
