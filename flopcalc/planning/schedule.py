"""The pipeline's schedule of a planned step: compute, communication and bubbles of every stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from flopcalc.base.errors import FlopcalcError, WorkloadError
from flopcalc.base.spelling import spell
from flopcalc.planning.layout import Layout
from flopcalc.planning.seconds import PARTS

if TYPE_CHECKING:
    from flopcalc.planning.results import PlannedLayout

MOST_EVENTS = 200_000
_COMPUTE = ("products", "attention", "memory_bound", "recompute", "launches", "host")
_EXCHANGED = ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_sends", "offload")
_FORWARD = 1 / 3  # of a micro-batch's time without what is recomputed


class Task(NamedTuple):
    """One micro-batch's pass through one chunk of layers."""

    is_forward: bool
    batch: int
    chunk: int


class StageEvent(NamedTuple):
    rank: int
    kind: str  # compute, communication, bubble, gradients, optimizer
    name: str
    start_s: float
    seconds: float


def list_tasks(layout: Layout, rank: int, batches: int) -> list[Task]:
    """What a rank of the pipeline does, in order: warm-up, one forward and one backward in turn, cool-down (1F1B)."""
    pp, chunks = layout.pp, layout.virtual
    count = batches * chunks

    def find(number: int, is_forward: bool) -> Task:
        chunk = number // pp % chunks
        batch = number // (pp * chunks) * pp + number % pp if chunks > 1 else number
        return Task(is_forward, batch, chunk if is_forward else chunks - 1 - chunk)

    ahead = pp - rank - 1 if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * pp
    ahead = min(count, ahead)
    tasks = [find(number, True) for number in range(ahead)]
    for number in range(count - ahead):
        tasks += [find(ahead + number, True), find(number, False)]
    return tasks + [find(number, False) for number in range(count - ahead, count)]


def run_schedule(layout: Layout, batches: int, forward_s: float, backward_s: float) -> list[tuple[int, Task, float]]:
    """(rank, task, start) of every pass; a pass waits for the one that hands its input over."""
    pp, last = layout.pp, layout.pp * layout.virtual - 1
    queues = [list_tasks(layout, rank, batches) for rank in range(pp)]
    places, free = [0] * pp, [0.0] * pp
    ends: dict[tuple[bool, int, int], float] = {}
    found: list[tuple[int, Task, float]] = []
    while any(place < len(queue) for place, queue in zip(places, queues, strict=True)):
        has_moved = False
        for rank, queue in enumerate(queues):
            while places[rank] < len(queue):
                task = queue[places[rank]]
                stage = task.chunk * pp + rank
                if task.is_forward:
                    needed = (True, task.batch, stage - 1) if stage else None
                else:
                    needed = (False, task.batch, stage + 1) if stage < last else (True, task.batch, stage)
                if needed is not None and needed not in ends:
                    break
                start = max(free[rank], ends[needed] if needed is not None else 0.0)
                free[rank] = start + (forward_s if task.is_forward else backward_s)
                ends[task.is_forward, task.batch, stage] = free[rank]
                found.append((rank, task, start))
                places[rank] += 1
                has_moved = True
        if not has_moved:
            raise FlopcalcError("the schedule of this layout stands still: its micro-batches do not divide by pp")
    return found


def list_events(planned: PlannedLayout, batches: int) -> Iterator[StageEvent]:
    """The events of one replica's pipeline, rank by rank in time; the first rank of each stage represents its group."""
    layout, parts = planned.layout, dict(zip(PARTS, planned.step.parts, strict=True))
    if 4 * layout.pp * layout.virtual * batches > MOST_EVENTS:
        raise WorkloadError(
            f"{batches} micro-batches through {layout.pp * layout.virtual} stages are too many for a timeline: plan a "
            f"smaller {spell('global_batch')}"
        )
    passes = batches * layout.virtual
    compute = sum(parts[name] for name in _COMPUTE) / passes
    again = parts["recompute"] / passes
    exchanged = sum(parts[name] for name in _EXCHANGED) / passes
    shares = {True: (compute - again) * _FORWARD, False: (compute - again) * (1 - _FORWARD) + again}
    sent = {True: exchanged / 2, False: exchanged / 2}
    free = [0.0] * layout.pp
    spent = {way: shares[way] + sent[way] for way in (True, False)}
    for rank, task, start in run_schedule(layout, batches, spent[True], spent[False]):
        name = f"{'forward' if task.is_forward else 'backward'} {task.batch}"
        if layout.virtual > 1:
            name += f", chunk {task.chunk}"
        if start > free[rank]:
            yield StageEvent(rank, "bubble", "bubble", free[rank], start - free[rank])
        yield StageEvent(rank, "compute", name, start, shares[task.is_forward])
        if sent[task.is_forward]:
            yield StageEvent(rank, "communication", name, start + shares[task.is_forward], sent[task.is_forward])
        free[rank] = start + spent[task.is_forward]
    end = max(free)
    for rank in range(layout.pp):
        if end > free[rank]:
            yield StageEvent(rank, "bubble", "bubble", free[rank], end - free[rank])
        at = end
        for kind, part in (("gradients", "data_parallel"), ("optimizer", "optimizer"), ("overhead", "overhead")):
            if parts[part]:
                yield StageEvent(rank, kind, part.replace("_", " "), at, parts[part])
                at += parts[part]
