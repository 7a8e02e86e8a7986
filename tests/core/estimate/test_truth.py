"""Every recorded trace of a HF model (tests/truth) equals the analytic count to the FLOP, row by row."""

from __future__ import annotations

import json
from typing import Any

import pytest
from places import TRUTH

from flopcalc import bind, make_workload
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.workload.workload import Workload


def load_cases() -> list[Any]:
    cases = []
    for path in sorted(TRUTH.glob("*.json")):
        for model in json.loads(path.read_text())["models"]:
            for number, case in enumerate(model["cases"]):
                name = f"{path.stem}-{model['name']}-{number}"
                cases.append(pytest.param(model["config"], case, id=name))
    return cases


def make_load(workload: dict[str, Any]) -> Workload:
    """The recorded workload as ours: grids there are per sample, and every sample has the same."""
    batch = workload.get("batch", len(workload.get("mask", [0])))
    phase = workload.get("phase", "train")
    if "mask" in workload:
        lengths = tuple(workload["mask"])
        return Workload(batch, workload["seq"], lengths, "padded", phase, 0, workload.get("logits"))
    return make_workload(
        batch,
        None if "lengths" in workload else workload.get("seq"),
        lengths=workload.get("lengths"),
        # In decode the images lie in the context already.
        image_grid_thw=workload["images"] * batch if workload.get("images") and phase != "decode" else None,
        video_grid_thw=workload["videos"] * batch if workload.get("videos") else None,
        phase=phase,
        context=workload.get("context"),
        logits=workload.get("logits"),
    )


def estimate_case(config: dict[str, Any], case: dict[str, Any]) -> Estimate:
    recipe = dict(case["recipe"])
    convention = "hardware" if recipe.get("recompute", "none") != "none" else "full"
    estimator = bind(config, recipe=recipe, convention=convention, attention_kernel="eager")
    return estimator.estimate(make_load(case["workload"]))


@pytest.mark.parametrize(("config", "case"), load_cases())
def test_equals_trace(config: dict[str, Any], case: dict[str, Any]) -> None:
    estimate = estimate_case(config, case)
    ours = {
        row.path: [row.forward, row.backward, row.recompute]
        for row in estimate.by_module(per_layer=True)
        if row.forward or row.backward or row.recompute
    }
    theirs = {path: row for path, row in case["rows"].items() if any(row)}
    different = {path: (ours.get(path), row) for path, row in theirs.items() if ours.get(path) != row}
    assert not different, f"path: (ours, traced) = {dict(list(different.items())[:5])}"
    assert (estimate.forward, estimate.backward, estimate.recompute) == (
        case["forward"],
        case["backward"],
        case["recompute"],
    )
    parameters = estimate.parameters
    assert parameters["total"] == case["parameters_total"]
    assert parameters["trainable"] == case["parameters_trainable"]
