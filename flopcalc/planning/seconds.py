"""What the seconds of a layout's step are made of: their parts, what a framework hides, one device's share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from flopcalc.planning.cut import Section
from flopcalc.planning.layout import Layout
from flopcalc.prediction.clock import Clock, Totals

PARTS = (
    "products", "attention", "memory_bound", "recompute", "launches", "host", "tensor_parallel", "context_parallel",
    "expert_parallel", "pipeline_sends", "data_parallel", "offload", "bubble", "optimizer", "overhead",
)  # fmt: skip
Kinds: TypeAlias = tuple[int, ...]  # numbers of kinds of layers; none: what is in no layer


class Overlaps(NamedTuple):
    """What a framework hides behind computation; the defaults are those of a current one."""

    gradients: bool = True  # reduced while backward runs
    experts: bool = True  # all-to-all hidden behind another micro-batch
    tensor: bool = True  # gathers of tensor parallelism hidden behind their products
    sends: bool = True  # hand-overs between interleaved stages hidden behind their computation
    ring: bool = True  # keys and values of other devices fetched while attention runs
    once: bool = True  # a token goes to a device once, whatever the number of its experts there (DeepEP, HybridEP)


OVERLAPS = {"all": Overlaps(), "none": Overlaps(False, False, False, False, False, False)}


class Step(NamedTuple):
    """Seconds of one step by part (see PARTS), and the relative errors to expect."""

    parts: tuple[float, ...]
    below: float  # how much faster than thought
    above: float  # how much slower

    @property
    def seconds(self) -> float:
        return sum(self.parts)

    @property
    def low(self) -> float:
        return self.seconds / (1 + self.below)

    @property
    def high(self) -> float:
        return self.seconds * (1 + self.above)


class DeviceTime(NamedTuple):
    """One micro-batch of the whole model on a device of a cut: sums by place and pass, and seconds of one layer."""

    clock: Clock
    # forward, backward and again of all layers by the kinds of layers that have them; first, last, optimizer
    sums: Mapping[tuple[str, Kinds], Totals]
    forward: float  # seconds of one layer
    backward: float
    again: float
    attention: float  # of the forward pass
    first: float  # seconds of what comes before and after all layers
    last: float
    layers: Mapping[Kinds, float]  # seconds of all layers by the kinds that have them
    error: float  # relative, of a device's time


class LayoutTime(NamedTuple):
    """A layout's step before ZeRO: seconds of one layer and micro-batch, but for `sends`."""

    cut: Layout
    layer: DeviceTime
    batches: int  # micro-batches
    exchanged: tuple[float, float, float]  # over tensor, context and expert parallelism, all passes
    copied: float  # to the host and back
    tensor: float  # over tensor parallelism, one pass
    sends: float  # of a whole step
    sections: tuple[tuple[Section, float, int], ...]  # each with its seconds of a micro-batch, and its routed layers
