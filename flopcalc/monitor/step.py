"""What a monitor sees of a training: hooks and the loop's calls fill in a step, which goes to the digest as a whole."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from flopcalc.base.frozen import Value, frozen

if TYPE_CHECKING:
    from flopcalc.monitor.batch import Intake, Snapshot
    from flopcalc.monitor.model import WatchedModel
    from flopcalc.monitor.modes import Factor
    from flopcalc.monitor.training import TrainingMonitor

    Taken = tuple[WatchedModel, Snapshot | None]  # a micro-batch; None: a pipeline stage that saw no text

Call = Mapping[str, Any]  # the arguments of a forward pass, by name
VALUES = ("training/epoch", "training/loss", "training/grad_norm", "training/lr")  # that a loop gives


class DueRecord:
    """A record that is due. It is ready once the device is past it, and what was held of it has arrived."""

    # One is made in every step: what most of them do not set stays with the class.
    number: int = -1  # -1: not known yet
    values: Sequence[Any] | None = None  # in the order of VALUES; None: no record is due
    skip_wandb: bool = False
    ended_ns: int = 0  # on the monitor's clock
    start: Any = None  # marks on the device; None where there is none
    end: Any = None
    device_s: float = math.nan  # between the two
    is_past: bool = False  # it is over, and the device has passed its marks and what was copied at once
    held: int = 0  # values of it that are held; of the training thread alone
    arrived: int = 0  # how many of them have arrived, or never will; of the thread that takes them in
    is_lost: bool = False  # the device never got to `end`, or to a value

    passes: Sequence[SeenPass] = ()  # with marks of their own

    def __init__(self) -> None:
        self.copies: list[Any] = []  # host buffers that the device writes into

    @property
    def is_ready(self) -> bool:
        return self.is_lost or (self.is_past and self.arrived == self.held)


class SeenPass:
    """A forward pass that does not train, or all passes of one generation."""

    __slots__ = (
        "begin_ns", "context", "end", "ends", "fed", "given", "is_decoding", "is_in_step", "model", "module", "name",
        "new", "own_intake", "seconds", "snapshot", "start", "state",
    )  # fmt: skip

    def __init__(self, name: str, model: WatchedModel | None, state: Hashable, begin_ns: int) -> None:
        self.name = name
        self.model = model
        self.state = state  # of the model's adapters
        self.own_intake: Intake | None = None  # of a pass that was given, and of a model of its own
        self.begin_ns = begin_ns
        self.is_decoding = False  # the call under way adds tokens to a cache
        self.seconds = 0.0  # NaN: not known
        self.module: Any = None  # whose pass it is, until it is over
        self.snapshot: Snapshot | None = None
        self.given: tuple[Sequence[int], Sequence[int]] | None = None  # lengths of prompts and completions
        self.new = 0  # tokens that were generated one by one
        self.fed: list[Any] = []  # these tokens
        self.ends: frozenset[int] = frozenset()  # tokens that end a sequence
        self.context = 0  # cached positions when it began
        self.start: Any = None  # marks on the device
        self.end: Any = None
        self.is_in_step = True  # its time is a part of the step's

    @property
    def intake(self) -> Intake | None:
        """How it is counted; None: it cannot be."""
        return self.own_intake if self.model is None else self.model.find_intake(self.state)


class SeenStep(DueRecord):
    """One optimizer step, from its first forward pass to its record."""

    wall_ns: int = 0
    open_passes: int = 0  # forward passes that began and have not ended
    is_whole: bool = True  # every batch could be read
    is_given: bool = False  # the loop gave the batches: forward passes are not read
    dataset: str | Sequence[str] | None = None
    kind: Hashable | None = None  # the workload class; None: not asked for
    is_measured: bool = False
    factor: Factor | None = None  # measured ÷ analytic, as it was known when the step ended; None: nothing measures
    owes: str = ""  # a pass that ran elsewhere, and that nobody gave
    measured_from: int = 0  # the first of its other passes that is measured too
    live_batches: list[Call]  # only of a step that is measured

    def __init__(self, data_ns: int) -> None:
        self.data_ns = data_ns  # of its time, before the first forward pass
        self.copies: list[Any] = []
        self.batches: list[Taken] = []

    @property
    def sizes(self) -> Hashable:
        """Of all its batches; empty where one is not known. What was measured without a formula holds for these."""
        found = tuple(snapshot.key if snapshot is not None else () for _, snapshot in self.batches)
        return found if self.is_whole and all(found) else ()


@frozen()
class LostTime(Value):
    """Time that went into no step."""

    cause: str
    seconds: float
    is_ready: ClassVar[bool] = True


@frozen()
class DatasetMetrics(Value):
    """What the loop knows of its datasets."""

    values: Mapping[str, Mapping[str, float]]
    is_ready: ClassVar[bool] = True


class StepContext:
    """`with monitor.step(batch) as step:` — one optimizer step; `step.log(loss=…)` adds values to its record."""

    def __init__(self, monitor: TrainingMonitor, batch: object, dataset: object) -> None:
        self._monitor = monitor
        self._batch = batch
        self._dataset = dataset

    def log(
        self,
        *,
        loss: object = None,
        grad_norm: object = None,
        learning_rate: object = None,
        epoch: object = None,
        step: int | None = None,
        skip_wandb: bool = False,
        **unknown: object,
    ) -> None:
        """Values for this step's record; tensors may be on the device. An unknown name is said and left out."""
        if unknown:
            self._monitor._say_unknown("step.log", unknown, ("loss", "grad_norm", "learning_rate", "epoch", "step"))
        self._monitor._fill(step, (epoch, loss, grad_norm, learning_rate), skip_wandb)

    def __enter__(self) -> StepContext:
        batch, self._batch = self._batch, None
        self._monitor._enter(batch, self._dataset)
        return self

    def __exit__(self, kind: object, _error: object, _trace: object) -> None:
        self._monitor._leave(kind is not None)
