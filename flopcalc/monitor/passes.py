"""What forward passes that do not train count, and a measured step with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flopcalc.base.errors import FlopcalcError, WorkloadError, format_value
from flopcalc.base.units import check_items, check_size
from flopcalc.core.workload.workload import Workload
from flopcalc.monitor.batch import BatchWork, Intake
from flopcalc.monitor.messages import Say
from flopcalc.monitor.meter import Formats
from flopcalc.monitor.modes import Counts
from flopcalc.monitor.step import SeenPass, SeenStep


def count_pass(seen: SeenPass) -> tuple[Formats, Formats | None]:
    """FLOPs of a pass by number format: what the model needs, and what hardware executes."""
    intake = seen.intake
    if intake is None:
        raise WorkloadError("its model has no formula")
    if seen.given is not None:
        return intake.count_lengths(*seen.given, generates=seen.name == "rollout")
    work = _count_prompt(seen, intake)
    if seen.new:
        lengths = _find_lengths(seen, work.load.rows)
        work = intake.count_generated(work, seen.new, lengths)
    return work.model, work.hardware


def count_eager_pass(seen: SeenPass) -> int:
    """What an operator counter sees of a pass."""
    intake = seen.intake
    if intake is None:
        raise WorkloadError("its model has no formula")
    if seen.given is not None:
        return 0  # it ran elsewhere
    work = _count_prompt(seen, intake)
    head = seen.snapshot.head if seen.snapshot is not None else None
    found = intake.count_eager(work, head) if seen.snapshot is not None else 0
    if seen.new:
        load = work.load
        decoded = Workload(load.rows, seen.new, phase="decode", context=load.seq)
        found += intake.count_eager(work._replace(load=decoded))
    return found


def _count_prompt(seen: SeenPass, intake: Intake) -> BatchWork:
    if seen.snapshot is not None:
        return intake.count(seen.snapshot, "forward")
    rows = int(seen.fed[0].shape[0])
    return BatchWork(Workload(rows, max(1, seen.context), phase="forward"), {}, {}, 0, 0, 0, 0)


def _find_lengths(seen: SeenPass, rows: int) -> list[int]:
    """How many of the tokens each row needs: after its end it runs on with the others."""
    lengths = [seen.new] * rows
    if seen.ends and len(seen.fed) == seen.new:
        for at, tokens in enumerate(seen.fed):
            for row, token in enumerate(tokens.flatten().tolist()[:rows]):
                if lengths[row] == seen.new and token in seen.ends:
                    lengths[row] = at
    return lengths


def read_lengths(values: object, what: str) -> list[int]:
    """Lengths of sequences, given as numbers or as the sequences themselves."""
    found = []
    for value in check_items(values, what, form="a list of lengths, or of sequences"):
        if hasattr(value, "shape") or (isinstance(value, Sequence) and not isinstance(value, (str, bytes))):
            found.append(int(value.shape[0]) if hasattr(value, "shape") and len(value.shape) else _count(value, what))
        else:
            found.append(check_size(value, what, 0))
    return found


def _count(value: Any, what: str) -> int:
    if hasattr(value, "shape"):
        return check_size(value.item(), what, 0)
    if not hasattr(value, "__len__"):
        raise WorkloadError(f"{what} holds {format_value(value)}: give lengths, or sequences of tokens")
    return len(value)


def count_measured(step: SeenStep, say: Say) -> Counts | None:
    """What a measured step should have counted, in the ways that counters count."""
    taken = [(model, snapshot) for model, snapshot in step.batches if snapshot is not None]
    if not taken or any(model.intake is None for model, _ in taken):
        return None
    first = taken[0][0]
    model = full = own = 0
    hardware: float | None = 0
    try:
        for each, snapshot in taken:
            assert each.intake is not None
            work = each.intake.count(snapshot)
            eager = each.intake.count_eager(work, snapshot.head)
            full += eager
            own += eager if each is first else 0
            model += int(work.model_flops)
            executed = work.hardware_flops
            hardware = None if hardware is None or executed is None else hardware + executed
        for seen in step.passes[step.measured_from :]:
            full += count_eager_pass(seen)
            beside = count_pass(seen)[1]
            hardware = None if hardware is None or beside is None else hardware + sum(beside.values())
    except FlopcalcError as error:
        say(f"the measured batch cannot be counted: {error}", "no work")
        return None
    return Counts(model, full, None if hardware is None else int(hardware), own)
