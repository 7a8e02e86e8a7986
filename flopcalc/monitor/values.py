"""Values that a loop gives for a record: numbers as they are, tensors as copies that may still be on their way."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from flopcalc.monitor.device import Device
from flopcalc.monitor.messages import Say
from flopcalc.monitor.step import Entry

_WATCHED = 8  # records in which a loop is watched before values are held


class _Watched(NamedTuple):
    """A value on the device that was copied at once."""

    tensor: Any
    version: int
    place: int  # in memory


def is_tensor(value: Any) -> bool:
    return hasattr(value, "is_cuda") and hasattr(value, "detach")


def find_whole(tensor: Any) -> Any:
    """Of a distributed tensor what is here, if that is all of it; None if it is not.

    To read the others ranks would have to talk, and one that has no monitor would never answer.
    """
    return tensor.to_local() if all(each.is_replicate() for each in tensor.placements) else None


class Held:
    """A value on the device, until it is copied in the next forward pass."""

    __slots__ = ("copy", "entry", "tensor", "version")

    def __init__(self, tensor: Any, entry: Entry) -> None:
        self.tensor = tensor
        self.version = tensor._version  # autograd's count of the writes into it
        self.entry: Entry | None = entry  # None: copied
        self.copy: Any = math.nan
        entry.has_held = True

    def __float__(self) -> float:
        return float(self.copy)

    def __repr__(self) -> str:
        return repr(self.copy)


class Values:
    """Reads the values that a loop gives for its records, on the training thread.

    A CUDA call costs the host several times more at the end of a step than after a forward pass, where the driver's
    code is in the caches. So a value on the device is held, and copied after the next pass. That is right only if the
    loop does not write into it before. Values of the first records are copied at once, and watched: a loop that writes
    into them, or uses their memory again as replays of a CUDA graph do, has its values copied at once for ever.
    """

    def __init__(self, say: Say) -> None:
        self.device: Device | None = None
        self.held: list[Held] = []
        self.has_pass = False  # a forward pass was seen since the last record, and no graph was captured in it
        self._say = say
        self._to_watch: float = _WATCHED  # records until values are held; infinite: they never are
        self._given: list[_Watched] = []  # in this record
        self._before: list[_Watched] = []  # in the record before: kept alive, so nothing else gets their memory

    def read(self, given: Sequence[Any], entry: Entry) -> list[Any]:
        """Numbers, copies that will arrive, and None where nothing was given."""
        if self.held and self.device is not None and not self.device.is_capturing():
            self.collect()  # no forward pass came
        found = []
        for value in given:
            if value is not None and type(value) is not float:
                value = self._read_value(value, entry)
            found.append(value)
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
            tensor, entry = each.tensor, each.entry
            each.tensor = each.entry = None
            if entry is None or self.device is None:
                continue
            entry.has_held = False
            try:
                if tensor._version == each.version:
                    each.copy = self.device.fetch(tensor)
                    entry.copies.append(each.copy)
                    continue
            except RuntimeError:  # a compiled model's CUDA graph took its memory back
                pass
            self._to_watch = math.inf
            self._say(
                "a value given for a record was overwritten before the next forward pass, and is left out: give "
                "value.clone(). From now on values are copied at once",
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

    def finish(self, timeout_s: float) -> None:
        """The training is over: wait a while for what is under way, and give up the rest."""
        if self.device is None:
            return
        deadline = time.monotonic() + timeout_s
        try:
            while self.poll() and time.monotonic() < deadline:
                time.sleep(0.001)
        finally:
            self.device.give_up()

    def _read_value(self, value: Any, entry: Entry) -> Any:
        try:
            if not hasattr(value, "is_cuda"):
                return float(value)
            whole = find_whole(value) if hasattr(value, "placements") else value
            if whole is None:
                raise ValueError("ranks would have to talk to know it; give .full_tensor()")
            device = self.device
            if whole.is_cuda and device is not None:
                whole = whole.detach()
                # Writes into what was made in inference mode are not counted.
                is_safe = self.has_pass and self._to_watch != math.inf and not whole.is_inference()
                if is_safe and not self._to_watch:
                    held = Held(whole, entry)
                    self.held.append(held)
                    return held
                if not device.is_capturing():
                    if is_safe:
                        self._given.append(_Watched(whole, whole._version, whole.data_ptr()))
                    copy = device.fetch(whole)
                    entry.copies.append(copy)
                    return copy
            if whole.is_cpu:
                return float(whole.item())
            self._say(f"a value on {whole.device} is not read: that would stall the device", "value device")
        except (TypeError, ValueError, RuntimeError) as error:
            self._say(f"a value given for the record is no number, and left out: {value!r:.60}: {error}", "value type")
        return math.nan

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
