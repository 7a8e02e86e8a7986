"""What one GPU of a parallel run computes of a global batch: the mean of all GPUs, or of one pipeline stage."""

from __future__ import annotations

from fractions import Fraction

from flopcalc.base.errors import WorkloadError
from flopcalc.base.units import check_size, read_size
from flopcalc.core.count.flops import Flops
from flopcalc.core.estimate.estimate import Estimate, Estimator, Term, check_estimate


def local_flops(
    estimate: Estimate, tp: int = 1, cp: int = 1, pp: int = 1, dp: int = 1, *, stage: int | None = None
) -> Fraction:
    """FLOPs per GPU of an estimate of the global batch, exactly: its total ÷ (tp · cp · pp · dp).

        local_flops(estimate, tp=4, pp=2, dp=8, stage=0)

    Tensor, context, pipeline and data parallelism divide the work. Expert parallelism moves tokens between the same
    GPUs, so it does not divide. `stage` (0 … pp - 1) gives the mean of the GPUs of one pipeline stage: towers and
    embeddings are in the first stage, the head is in the last, and the language layers are split as evenly as possible.
    """
    check_estimate(estimate)
    degrees = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
    tp, cp, pp, dp = (read_size(value, name) for name, value in degrees.items())
    if stage is None:
        return Fraction(estimate.total, tp * cp * pp * dp)
    if check_size(stage, "stage", 0) >= pp:
        raise WorkloadError(f"stage {stage} is not one of pp = {pp}: stages are 0 to {pp - 1}")
    if pp == 1:
        return Fraction(estimate.total, tp * cp * dp)
    return Fraction(sum(_count_stage(term, stage, pp) for term in estimate.terms), tp * cp * dp)


def split_evenly(layers: int, pp: int) -> list[int]:
    """Layers of each stage of a pipeline; where they do not divide, stages at both ends have one less."""
    counts = [-(-layers // pp)] * pp
    for number in range(counts[0] * pp - layers):
        counts[number // 2 if number % 2 else -1 - number // 2] -= 1
    return counts


def _count_stage(term: Term, stage: int, pp: int) -> int:
    """FLOPs of one pipeline stage, of all its GPUs together."""
    estimator, load, times = term
    places = _place_layers(estimator, pp)
    first_language = min(path for path, _ in places.values())
    order = {each.path: number for number, each in enumerate(estimator.stages)}
    total = 0
    for counted in estimator.rows(load, estimator.convention):
        block, flops = counted.block, counted.flops
        each = (flops if load.phase == "train" else Flops(flops.forward)).total
        if block.layers is not None and (block.path, block.layers[0]) in places:
            total += each * sum(places[block.path, layer][1] == stage for layer in block.layers)
        else:
            is_last = block.group == "language" and order.get(block.path, -1) > first_language
            total += each * block.copies if stage == (pp - 1 if is_last else 0) else 0
    return total * times


def _place_layers(estimator: Estimator, pp: int) -> dict[tuple[str, int], tuple[int, int]]:
    """(path, layer) of every language layer -> the number of its stack, and its pipeline stage."""
    layers = [
        (path, number, stack.first + layer)
        for number, stack in enumerate(estimator.stages)
        if stack.repeated and stack.group == "language"
        for path in (stack.path,)
        for layer in range(len(stack.layers))
    ]
    if len(layers) < pp:
        raise WorkloadError(f"{estimator.source.name} has {len(layers)} language layers: too few for pp = {pp} stages")
    stages = [stage for stage, many in enumerate(split_evenly(len(layers), pp)) for _ in range(many)]
    return {(path, layer): (number, stage) for (path, number, layer), stage in zip(layers, stages, strict=True)}
