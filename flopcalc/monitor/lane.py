"""Steps that are all alike go in as bare tuples, and nothing more; now and then they come out as one entry.

Inside a training step every line of Python runs cold, several times slower than in a loop of its own, so a step that
repeats the one before is only compared with it and noted. Everything else waits for the long way, which is taken at
least every few seconds, before a step that is to be measured, and whenever anything differs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from flopcalc.monitor.digest import VALUES, ReportEntry, StepEntry
from flopcalc.monitor.intake import Copies, Intake, Snapshot, find_whole, is_tensor
from flopcalc.monitor.sources import Factor

STEPS = 64  # the long way is taken at least so often
PERIOD_NS = 4_000_000_000  # and when so much time has passed


class Kept(NamedTuple):
    """A tensor whose value is read later, if nobody has written into it by then."""

    tensor: Any
    version: int  # -1: torch does not count


def keep(value: Any) -> Any:
    """A value to be read later; of a tensor without the graph behind it."""
    if value.__class__.__name__ != "Tensor":
        whole = find_whole(value) if is_tensor(value) else None
        if whole is None:
            return value  # a number, or refused in words where values are read
        value = whole
    elif value.requires_grad:
        value = value.detach()
    try:
        version = value._version
    except RuntimeError:  # made in inference mode
        version = -1
    return tuple.__new__(Kept, (value, version))


class Row(NamedTuple):
    """One step."""

    number: int
    begun_ns: int
    boundary_ns: int
    now_ns: int
    calls: int  # micro-batches, all alike
    skip_wandb: bool
    values: tuple[Any, ...]  # as VALUES names them: what the loop gave, tensors as Kept


class Lane:
    """What the steps repeat, and the steps."""

    __slots__ = (
        "begun", "boundary", "calls", "clock", "factor", "intake", "key", "names", "nones", "rows", "snapshot", "until",
        "until_ns",
    )  # fmt: skip

    def __init__(
        self,
        kwargs: Mapping[str, Any],
        snapshot: Snapshot,
        intake: Intake,
        until: int,
        boundary: int,
        clock: Callable[[], int],
    ) -> None:
        self.names = tuple(kwargs)
        self.nones = tuple(name for name, value in kwargs.items() if value is None)
        self.key = snapshot.key
        self.snapshot = snapshot
        self.intake = intake
        self.until = until  # the last step that may be noted so
        self.until_ns = boundary + PERIOD_NS
        self.boundary = boundary  # where the time of the next step begins
        self.clock = clock
        self.factor: Factor | None = None  # that holds for these steps
        self.rows: list[tuple[Any, ...]] = []
        self.calls = 0
        self.begun = 0


class RunEntry:
    """Steps of a lane with their values, those of a device on their way; ready when it has passed `end`."""

    __slots__ = (
        "device_s", "end", "factor", "intake", "is_lost", "is_overwritten", "is_ready", "rows", "snapshot", "start",
        "time", "waiting",
    )  # fmt: skip

    def __init__(self, lane: Lane, copies: Copies | None, now_ns: int) -> None:
        self.snapshot = lane.snapshot
        self.intake = lane.intake
        self.factor = lane.factor
        self.rows = [Row(*row) for row in lane.rows]
        self.time = time.time() - now_ns / 1e9
        self.start = self.end = None
        self.device_s = math.nan
        self.is_ready = self.is_lost = self.is_overwritten = False
        self.waiting: list[tuple[Any, list[tuple[int, int]]]] = []  # copies, and whose values they hold
        self._gather(copies)

    def _gather(self, copies: Copies | None) -> None:
        """One copy for all values of a dtype that lie on the device; what was written into since is not known."""
        groups: dict[Any, list[tuple[int, int, Any]]] = {}
        for at, row in enumerate(self.rows):
            values = list(row.values)
            for place, value in enumerate(values):
                if not isinstance(value, Kept):
                    continue
                tensor = value.tensor
                values[place] = math.nan
                if value.version >= 0 and tensor._version != value.version:
                    self.is_overwritten = True
                elif tensor.is_cuda and copies is not None and tensor.numel() == 1:
                    groups.setdefault((tensor.dtype, tensor.device), []).append((at, place, tensor))
                elif tensor.device.type == "cpu" and tensor.numel() == 1 and not tensor.is_complex():
                    values[place] = float(tensor)  # at once: it may be written into again
                else:
                    values[place] = tensor  # read, or refused in words, with the others
            self.rows[at] = row._replace(values=tuple(values))
        for found in groups.values():
            import torch

            stacked = torch.stack([tensor.reshape(()) for _, _, tensor in found])
            assert copies is not None
            self.waiting.append((copies.take(stacked), [(at, place) for at, place, _ in found]))

    def expand(self, copies: Copies | None) -> Iterator[StepEntry | ReportEntry]:
        """The steps and their reports one by one, once the copies have arrived."""
        arrived: dict[tuple[int, int], float] = {}
        for held, places in self.waiting:
            if not self.is_lost:
                arrived |= dict(zip(places, held.tolist(), strict=True))
                if copies is not None:
                    copies.give_back(held)
        for at, row in enumerate(self.rows):
            step = StepEntry(row.number, row.now_ns - row.boundary_ns, row.begun_ns - row.boundary_ns, None, None)
            step.snapshots = (self.snapshot,) * row.calls
            step.intake = self.intake
            step.factor = self.factor
            yield step
            values = {
                name: arrived.get((at, place), value)
                for place, (name, value) in enumerate(zip(VALUES, row.values, strict=True))
            }
            report = ReportEntry(
                {"global_step": row.number, **values}, ("wandb",) if row.skip_wandb else (), None, row.now_ns
            )
            report.time = self.time + row.now_ns / 1e9
            yield report
