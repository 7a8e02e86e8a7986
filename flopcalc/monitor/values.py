"""Values that a loop gives for a record: numbers as they are, tensors as copies that may still be on their way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from flopcalc.monitor.device import Device
from flopcalc.monitor.messages import Say
from flopcalc.monitor.step import Entry

_WATCHED = 8  # records in which a loop is watched before its values are held


class _Watched(NamedTuple):
    tensor: Any
    version: int
    place: int  # in memory


def is_tensor(value: Any) -> bool:
    return hasattr(value, "is_cuda") and hasattr(value, "detach")


def find_whole(tensor: Any) -> Any:
    """Of a distributed tensor what is here, if that is all of it; None if it is not.

    To read the others ranks would have to talk, and one that has no monitor would never answer.
    """
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return tensor
    return tensor.to_local() if all(each.is_replicate() for each in placements) else None


class Held:
    """A value on the device, until it is copied in the next forward pass."""

    __slots__ = ("copy", "entry", "tensor", "version")

    def __init__(self, tensor: Any, version: int, entry: Entry) -> None:
        self.tensor = tensor
        self.version = version  # as autograd counts the writes into a tensor
        self.entry = entry
        self.copy: Any = math.nan

    def __float__(self) -> float:
        return float(self.copy)

    def __repr__(self) -> str:
        return repr(self.copy)


class Values:
    """Reads the values that a loop gives for its records, on the training thread.

    A CUDA call costs the host several times more at the end of a step than after a forward pass, where the driver's
    code is in the caches. So a value on the device is held and copied after the next pass. That is right only if the
    loop does not write into it before. In the first records values are copied at once, and it is watched whether the
    loop writes into them or uses their memory again, as the replay of a CUDA graph does. If so, it stays like this.
    """

    def __init__(self, say: Say) -> None:
        self.device: Device | None = None
        self.held: list[Held] = []
        self.has_pass = False  # since the last record a forward pass was seen, and no graph was captured then
        self._say = say
        self._to_watch: float = _WATCHED  # records until values are held
        self._given: list[_Watched] = []  # in this record
        self._before: list[_Watched] = []  # in the record before: kept, so that nothing else gets their memory

    def read(self, given: Sequence[Any], entry: Entry) -> list[Any]:
        """Numbers, copies that will arrive, and None where nothing was given."""
        device = self.device
        if self.held and device is not None and not device.is_capturing():
            self.collect()  # no forward pass came
        found = [value if value is None or type(value) is float else self._read_value(value, entry) for value in given]
        if self._given:
            self._judge()
        self.has_pass = False
        return found

    def read_number(self, value: Any) -> float:
        """A number that is on the host; NaN where it is none."""
        if value is None:
            return math.nan
        if is_tensor(value) and value.is_cuda:
            self._say(f"a dataset's value on {value.device} is not read: give a number", "dataset value")
            return math.nan
        return float(self._read_value(value, Entry()))

    def collect(self) -> None:
        """Copy what is held; not while a graph is captured."""
        held, self.held = self.held, []
        for each in held:
            try:
                is_same = each.tensor._version == each.version
                if is_same and self.device is not None:
                    each.copy = self.device.fetch(each.tensor)
                    each.entry.copies.append(each.copy)
            except RuntimeError:  # a compiled model's CUDA graph has taken its memory back
                is_same = False
            each.tensor, each.entry.has_held = None, False
            if not is_same:
                self._to_watch = math.inf
                self._say(
                    f"a value given for the record of step {each.entry.number} was overwritten before the next forward "
                    "pass, and is left out: give value.clone(). From now on values are copied at once",
                    "value overwritten",
                )

    def poll(self) -> int:
        """Find the entries that the device is done with; returns how many are still under way."""
        device = self.device
        if device is None:
            return 0
        if device.is_capturing():
            return len(device.waiting)
        left = device.poll()
        if self.held:
            with device.on_stream():
                self.collect()
        return left

    def _read_value(self, value: Any, entry: Entry) -> Any:
        try:
            if not hasattr(value, "is_cuda"):
                return float(value)
            whole = find_whole(value)
            if whole is None:
                raise ValueError("ranks would have to talk to know it; give .full_tensor()")
            if whole.is_cuda and self.device is not None:
                found = self._take(whole.detach(), entry, self.device)
                if found is not None:
                    return found
            if whole.is_cpu:
                return float(whole.item())
            self._say(f"a value on {whole.device} is not read: that would stall the device", "value device")
        except (TypeError, ValueError, RuntimeError) as error:
            self._say(f"a value given for the record is no number, and left out: {value!r:.60}: {error}", "value type")
        return math.nan

    def _take(self, tensor: Any, entry: Entry, device: Device) -> Any:
        """The value held, or a copy of it that will arrive; None while a graph is captured."""
        version = None
        if self.has_pass and self._to_watch != math.inf:
            try:
                version = tensor._version
            except RuntimeError:  # made in inference mode: its writes are not counted
                self._to_watch = math.inf
        if version is not None and not self._to_watch:
            held = Held(tensor, version, entry)
            self.held.append(held)
            entry.has_held = True
            return held
        if device.is_capturing():
            return None
        if version is not None:
            self._given.append(_Watched(tensor, version, tensor.data_ptr()))
        copy = device.fetch(tensor)
        entry.copies.append(copy)
        return copy

    def _judge(self) -> None:
        """Whether the loop left the values of the record before alone."""
        before, self._before, self._given = self._before, self._given, []
        places = {each.place for each in self._before}
        if any(each.tensor._version != each.version or each.place in places for each in before):
            self._to_watch = math.inf
        else:
            self._to_watch -= 1
        if self._to_watch in (0, math.inf):
            self._before = []
