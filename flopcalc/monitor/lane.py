"""Steps that are all alike go in as bare tuples, and nothing more; now and then they come out as one entry.

Inside a training step every line of Python runs cold, several times slower than in a loop of its own, so a step that
repeats the one before is only compared with it and noted. Everything else waits for the long way, which is taken at
least every few seconds, before a step that is to be measured, and whenever anything differs.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from flopcalc.monitor.batch import Copies, Intake, Snapshot, find_whole, is_tensor
from flopcalc.monitor.digest import VALUES, ReportEntry, StepEntry
from flopcalc.monitor.modes import Factor

if TYPE_CHECKING:
    from flopcalc.monitor.hooks import Running

STEPS = 64  # the long way is taken at least so often
PERIOD_NS = 4_000_000_000  # and when so much time has passed


class Kept(NamedTuple):
    """A tensor whose value is read later, if nobody has written into it by then."""

    tensor: Any
    version: int  # -1: torch does not count


def _find_kept_type(value: Any) -> tuple[type, int]:
    """The type of a value that goes into a row as it is, and how often a tensor was written into by then."""
    if type(value) in (float, int, type(None)):
        return type(value), -1
    if value.__class__.__name__ == "Tensor" and not value.requires_grad:
        kept = keep(value)
        if kept.version >= 0:
            return type(value), kept.version
    return Kept, -1  # which no loop gives: each value is looked at


def keep(value: Any) -> Any:
    """A value to be read later; of a tensor without the graph behind it."""
    if value.__class__.__name__ != "Tensor":
        whole = find_whole(value) if is_tensor(value) else None
        if whole is None:
            # A number, or refused in words where values are read; an array may be filled anew by then.
            return copy.copy(value) if hasattr(value, "__array__") else value
        value = whole
    elif value.requires_grad:
        value = value.detach()
    try:
        return Kept(value, value._version)
    except RuntimeError:  # made in inference mode
        return Kept(value, -1)


class Row(NamedTuple):
    """One step."""

    number: int
    begun_ns: int
    boundary_ns: int
    now_ns: int
    calls: int  # micro-batches, all alike
    skip_wandb: bool
    epoch: Any  # from here on as VALUES names them: what the loop gave, or Kept
    loss: Any
    grad_norm: Any
    learning_rate: Any

    @property
    def values(self) -> tuple[Any, ...]:
        return self[-len(VALUES) :]


_PLACES = Row._fields[-len(VALUES) :]
_NOW = Row._fields.index("now_ns") - 1  # in a row without its boundary


class Lane:
    """What the steps repeat, and the steps; what each is compared with lies in `Running`."""

    __slots__ = ("_names", "_nones", "_others", "boundary", "factor", "intake", "rows", "snapshot", "versions")

    def __init__(self, kwargs: Mapping[str, Any], snapshot: Snapshot, intake: Intake, boundary: int) -> None:
        self._names = tuple(kwargs)
        self._others = snapshot.key[1:]  # of what counts; most models are given text alone
        self._nones = tuple(name for name, value in kwargs.items() if value is None)
        self.snapshot = snapshot
        self.intake = intake
        self.boundary = boundary  # where the time of the first step begins
        self.factor: Factor | None = None  # that holds for these steps
        self.rows: list[tuple[Any, ...]] = []  # of each step what Row has, without the boundary
        self.versions: tuple[int, ...] = (-1,) * len(VALUES)

    @property
    def end(self) -> int:
        """Where the time of the next step begins."""
        return int(self.rows[-1][_NOW]) if self.rows else self.boundary

    def open(self, running: Running, until: int, clock: Callable[[], int], values: tuple[Any, ...]) -> None:
        """From now on steps up to `until` are compared with this one, which gave these values, and noted.

        A loop that gave a tensor without a graph, and as often written into, is taken to do so again; whether it did
        is seen when the steps are handed over.
        """
        running.name, shape = self.snapshot.key[0]
        running.shapes = frozenset([tuple(shape)] if shape else [])
        running.other = next((name for name in self._names if name != running.name), running.name)
        is_simple = len(self._names) <= 2 and not self._others and not self._nones
        running.fits = None if is_simple else self._fits
        types, self.versions = zip(*map(_find_kept_type, values), strict=True)
        running.epoch_type, running.loss_type, running.norm_type, running.rate_type = types
        running.rows = self.rows
        running.clock = clock
        running.until, running.until_ns = until, self.boundary + PERIOD_NS
        running.calls = 0
        running.lane = self
        running.count = len(self._names)

    def _fits(self, kwargs: dict[str, Any]) -> bool:
        """Whether all but the first of what counts is as it was."""
        return (
            tuple(kwargs) == self._names
            and all(kwargs[name].shape == shape for name, shape in self._others)
            and all(kwargs[name] is None for name in self._nones)
        )


class RunEntry:
    """Steps of a lane with their values, those of a device on their way; ready when it has passed `end`."""

    __slots__ = (
        "_boundary", "_found", "_made", "_noted", "device_s", "end", "factor", "intake", "is_lost", "is_overwritten",
        "is_ready", "snapshot", "start", "time", "waiting",
    )  # fmt: skip

    def __init__(self, lane: Lane, copies: Copies | None, now_ns: int) -> None:
        self.snapshot = lane.snapshot
        self.intake = lane.intake
        self.factor = lane.factor
        self._noted = lane.rows
        self._boundary = lane.boundary
        self._made: list[Row] | None = None
        self._found: dict[tuple[int, int], Any] = {}  # (step, place) -> what stands for a tensor there
        self.time = time.time() - now_ns / 1e9
        self.start = self.end = None
        self.device_s = math.nan
        self.is_ready = self.is_lost = self.is_overwritten = False
        self.waiting: list[tuple[Any, list[tuple[int, int]]]] = []  # copies, and whose values they hold
        self._gather(copies, lane.versions)

    @property
    def rows(self) -> list[Row]:
        """The steps; made when they are digested, for training waits where they are handed over."""
        if self._made is None:
            self._made, boundary = [], self._boundary
            for number, begun, now, *rest in self._noted:
                self._made.append(Row(number, begun, boundary, now, *rest))
                boundary = now
            for (at, place), value in self._found.items():
                self._made[at] = self._made[at]._replace(**{_PLACES[place]: value})
        return self._made

    def _gather(self, copies: Copies | None, versions: tuple[int, ...]) -> None:
        """One copy for all values of a dtype that lie on the device; what was written into since is not known."""
        groups: dict[Any, list[tuple[int, int, Any]]] = {}
        for at, row in enumerate(self._noted):
            for place, value in enumerate(row[-len(VALUES) :]):
                if value is None or type(value) is float or type(value) is int:
                    continue
                tensor, version = value if isinstance(value, Kept) else (value, versions[place])
                if not is_tensor(tensor):
                    continue
                found: Any = math.nan
                try:
                    if version >= 0 and not tensor.is_inference() and tensor._version != version:
                        self.is_overwritten = True
                    elif tensor.is_cuda and copies is not None and tensor.numel() == 1:
                        groups.setdefault((tensor.dtype, tensor.device), []).append((at, place, tensor))
                    elif tensor.device.type == "cpu" and tensor.numel() == 1 and not tensor.is_complex():
                        found = float(tensor.detach())  # at once: it may be written into again
                    else:
                        found = tensor.detach()  # read, or refused in words, with the others
                except Exception:  # its memory is another's by now, as of a graph's output: the other values stay
                    self.is_overwritten = True
                self._found[at, place] = found
        for taken in groups.values():
            import torch

            assert copies is not None
            try:
                with torch.no_grad():
                    stacked = torch.stack([tensor.reshape(()) if tensor.dim() else tensor for _, _, tensor in taken])
            except Exception:  # as above
                self.is_overwritten = True
                continue
            self.waiting.append((copies.take(stacked), [(at, place) for at, place, _ in taken]))

    def make_step(self, calls: int) -> StepEntry:
        """What all steps of so many micro-batches have in common."""
        step = StepEntry(0, 0, 0, None, None)
        step.snapshots = (self.snapshot,) * calls
        step.intake = self.intake
        step.factor = self.factor
        return step

    def list_reports(self, copies: Copies | None) -> Iterator[tuple[Row, ReportEntry]]:
        """The steps with their reports, once the copies have arrived."""
        arrived: dict[tuple[int, int], float] = {}
        for held, places in self.waiting:
            if not self.is_lost:
                arrived |= dict(zip(places, held.tolist(), strict=True))
                if copies is not None:
                    copies.give_back(held)
        for at, row in enumerate(self.rows):
            values = dict(zip(("global_step", *VALUES), (row.number, *row.values), strict=True))
            for place, name in enumerate(VALUES):
                if (at, place) in arrived:
                    values[name] = arrived[at, place]
            report = ReportEntry(values, ("wandb",) if row.skip_wandb else (), None, row.now_ns)
            report.time = self.time + row.now_ns / 1e9
            yield row, report
