"""Traced rows against the analytic ones, path by path; torch-free, so that recorded traces are checked anywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from flopcalc.core.estimate.counted import CountedEstimator
from flopcalc.core.model.bound import BoundModel
from flopcalc.core.recipe.recipe import make_recipe
from flopcalc.core.workload.workload import Workload, make_workload


class Verdict(NamedTuple):
    """Rows that differ (path -> ours, traced), the totals, and the operators the counter did not know."""

    different: dict[str, tuple[tuple[int, int, int] | None, tuple[int, int, int] | None]]
    ours: tuple[int, int, int]
    traced: tuple[int, int, int]
    parameters: tuple[dict[str, int], dict[str, int]]
    not_counted: dict[str, int]

    @property
    def is_equal(self) -> bool:
        is_whole = self.ours == self.traced and self.parameters[0] == self.parameters[1]
        return is_whole and not self.different and not self.not_counted


def make_load(workload: Mapping[str, Any]) -> Workload:
    """An example's workload as the core's own: grids and clips there are per sample, and every sample has the same."""
    phase = workload.get("phase", "train")
    if "mask" in workload:
        lengths = tuple(workload["mask"])
        return Workload(len(lengths), workload["seq"], lengths, "padded", phase, 0, workload.get("logits"))
    batch = workload.get("batch", 1)
    has_decoder = "decoder_seq" in workload
    decoding = phase == "decode" and not has_decoder  # then images and audio are in the context already
    return make_workload(
        batch,
        None if "lengths" in workload else workload.get("seq"),
        lengths=workload.get("lengths"),
        image_grid_thw=workload["images"] * batch if workload.get("images") and not decoding else None,
        video_grid_thw=workload["videos"] * batch if workload.get("videos") and not decoding else None,
        clips=workload["clips"] * batch if workload.get("clips") and not decoding else None,
        decoder_seq_len=workload.get("decoder_seq"),
        phase=phase,
        context=workload.get("context"),
        logits=workload.get("logits"),
    )


def make_executed(model: BoundModel, recipe: Mapping[str, Any]) -> CountedEstimator:
    """The estimator of what HF's eager code executes, recomputation included."""
    # A reversible stack recomputes whatever the recipe says.
    recomputes = recipe.get("recompute", "none") != "none" or any(stage.reversible for stage in model.stages)
    return CountedEstimator(model, make_recipe(**recipe), "hardware" if recomputes else "full", "eager")


def compare_bound(estimator: CountedEstimator, workload: Mapping[str, Any], traced: Mapping[str, Any]) -> Verdict:
    """The analytic rows of what make_executed gives against traced ones: {rows: path -> (forward, backward, recompute),
    total, trainable}; with `sums`, the whole step's, the rows may be those of some layers."""
    estimate = estimator.estimate(make_load(workload))
    ours = {
        row.path: (row.forward, row.backward, row.recompute)
        for row in estimate.by_module(per_layer=True)
        if row.forward or row.backward or row.recompute
    }
    theirs = _fold(traced["rows"], [path for path in ours if "*" in path])
    sums = traced.get("sums")
    paths = theirs if sums is not None else dict.fromkeys((*theirs, *ours))
    different = {path: (ours.get(path), theirs.get(path)) for path in paths if ours.get(path) != theirs.get(path)}
    parameters = estimate.parameters
    if sums is None:
        sums = [sum(row[i] for row in theirs.values()) for i in range(3)]
    return Verdict(
        different,
        (estimate.forward, estimate.backward, estimate.recompute),
        (sums[0], sums[1], sums[2]),
        (
            {key: parameters[key] for key in ("total", "trainable")},
            {"total": traced["total"], "trainable": traced["trainable"]},
        ),
        dict(traced.get("not_counted", {})),
    )


def _fold(rows: Mapping[str, Any], names: list[str]) -> dict[str, tuple[int, int, int]]:
    """Traced rows; those of modules that a spec names once, with * for each (a list of experts), summed."""
    patterns = [(name, re.compile(re.escape(name).replace(r"\*", r"[^.]+"))) for name in names]
    folded: dict[str, tuple[int, int, int]] = {}
    for path, row in rows.items():
        name = next((name for name, pattern in patterns if pattern.fullmatch(path)), path)
        if any(row):
            ahead, behind, again = folded.get(name, (0, 0, 0))
            folded[name] = (ahead + row[0], behind + row[1], again + row[2])
    return folded
