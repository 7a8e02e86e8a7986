"""What becomes a line of the log: a record that is due, lost time, and what the loop knows of its datasets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from flopcalc.base.frozen import Value, frozen

VALUES = ("training/epoch", "training/loss", "training/grad_norm", "training/lr")  # that a loop gives


class MarkedPass(Protocol):
    """A pass with marks of its own on the device."""

    start: Any
    end: Any
    seconds: float


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

    passes: Sequence[MarkedPass] = ()

    def __init__(self) -> None:
        self.copies: list[Any] = []  # host buffers that the device writes into

    @property
    def is_ready(self) -> bool:
        return self.is_lost or (self.is_past and self.arrived == self.held)


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
