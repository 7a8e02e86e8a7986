"""What a monitor sees of a training: hooks and the loop's calls fill in a step, which goes to the digest as a whole."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from flopcalc.monitor.batch import Intake, Snapshot
from flopcalc.monitor.model import WatchedModel
from flopcalc.monitor.modes import Factor
from flopcalc.monitor.records import DueRecord

Call = Mapping[str, Any]  # the arguments of a forward pass, by name
Taken = tuple[WatchedModel, Snapshot | None]  # a micro-batch; None: a pipeline stage that saw no text


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

    passes: Sequence[SeenPass] = ()
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
