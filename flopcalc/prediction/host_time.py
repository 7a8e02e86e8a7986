"""What the host does for a module: where in a step it stands, and by which names its time is looked up."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from flopcalc.base.vocabulary import GradientMode, HostPhase, Phase
from flopcalc.prediction.timeline import Place, Stack, find_place

_ENDS = {"cleared": Place(0, -1.0), "loss": Place(1, 1.0)}  # before a forward pass, and after a backward one
ONCE = ("cleared", "optimizer")  # what the host does once a step, for every tensor
# Tensors that autograd keeps of an operator, as torch's derivatives.yaml has them; other kinds keep none. Under
# checkpointing each goes through torch's hooks three times.
_KEPT = {"product": 2, "norm": 5, "attention": 7, "softmax": 1, "pointwise": 1, "reduce": 1, "gather": 1, "scatter": 1,
         "sort": 1, "random": 1, "loss": 2}  # fmt: skip


class HostTime(NamedTuple):
    """What the host does for one module."""

    place: Place
    seconds: float
    waits: float  # times that it reads a value from the device


@lru_cache(maxsize=4096)
def find_order(module: str, group: str, way: str, stacks: tuple[Stack, ...], *, is_host: bool = False) -> Place:
    """Where in a step: the forward pass, then the backward pass in the other order, then the optimizer."""
    if way == "optimizer":  # the host goes through all tensors before the first is stepped
        return Place(2, 0.0 if is_host else 1.0)
    if way in _ENDS:
        return _ENDS[way]
    stage, inner = find_place(module, group, stacks)
    return Place(0, stage, inner) if way == "forward" else Place(1, -stage, -inner)


def name_phase(phase: str) -> HostPhase:
    """The host has a time for each of three phases: training, forward passes, and decoding with a growing cache."""
    return "train" if phase == "train" else "decode" if phase == "decode" else "forward"


def name_mode(phase: Phase) -> GradientMode:
    """With gradients or without: kernels follow each other more closely in a forward pass, and one thread works."""
    return "train" if phase == "train" else "forward"


def name_factor(way: str, group: str, phase: Phase) -> str:
    """The factor of a model type that an operator's time on the host has; an optimizer's is everybody's."""
    if way in ONCE:
        return way
    if group in ("vision", "projector"):
        return f"vision {name_mode(phase)}"
    return name_phase(phase)


def count_kept(kind: str) -> int:
    """Tensors that autograd keeps of an operator; a narrower kind (cat_strided) keeps as many as its wider one."""
    return _KEPT.get(kind.partition("_")[0], 0)


def find_unit(way: str, kind: str, units: Mapping[str, float]) -> float:
    """What the host takes for an operator, in units of an addition; one where that is not known.

    Of a kind that was not measured by itself (cat_strided_wide), the next wider one (cat_strided, cat).
    """
    if way in ONCE:
        kind = "tensor" if way == "optimizer" else way
    elif way == "backward" and f"{kind}_backward" in units:
        kind += "_backward"
    while kind and kind not in units:
        kind = kind.rpartition("_")[0]
    return units.get(kind, 1.0)
