"""Values that a loop gives for a record: numbers as they are, tensors as copies that may still be on their way."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from flopcalc.base.errors import WorkloadError
from flopcalc.monitor.device import DeviceQueue
from flopcalc.monitor.messages import Say
from flopcalc.monitor.records import VALUES, DueRecord

MOST_HELD = 64  # values that wait to be handed to the worker
_MOST_HANDED = 4  # batches of them that wait for the worker
_WATCHED = 32  # tensors of one name that are copied at once, and watched, before others are held
_MOST_BYTES = 1 << 18  # larger tensors are never held
_COPY_S = 0.002  # so long at most an idle device is given to copy what is held


class _WatchedTensor(NamedTuple):
    """A tensor on the device that was copied at once."""

    tensor: Any  # kept alive, so nothing else gets its memory
    version: int
    place: int  # in memory


def is_tensor(value: object) -> bool:
    return hasattr(value, "is_cuda") and hasattr(value, "detach")


def find_whole(tensor: Any) -> Any:
    """Of a distributed tensor what is here, if that is all of it; None if it is not.

    To read the others ranks would have to talk, and one that has no monitor would never answer.
    """
    return tensor.to_local() if all(each.is_replicate() for each in tensor.placements) else None


class HeldValue:
    """A value on the device, until it is copied. Its maker fills it in: a call of __init__ would be paid for too."""

    __slots__ = ("copy", "entry", "name", "place", "tensor", "version")

    name: str
    tensor: Any
    version: int  # autograd's count of the writes into it
    place: int  # in memory
    entry: DueRecord
    copy: Any  # None: it has not arrived, or was overwritten before

    def is_unchanged(self) -> bool:
        try:
            return bool(self.tensor._version == self.version)
        except RuntimeError:  # a compiled model's CUDA graph took its memory back
            return False

    def __float__(self) -> float:
        return math.nan if self.copy is None else float(self.copy)

    def __repr__(self) -> str:
        return repr(self.copy)


class Batch(NamedTuple):
    """Values that are copied together: their copies have arrived once the device has passed `done`."""

    held: Sequence[HeldValue]
    after: Any  # the mark on the training's stream that the copies wait for
    done: Any
    copies: Sequence[Any] = ()  # None where a tensor could not be read any more
    is_checked: bool = False  # what was overwritten is known: later writes come after the copies, in one stream


def read_held(name: str, value: object) -> Any:
    """What is on the host of a value of a batch, once its entry is ready."""
    if type(value) is not HeldValue:
        return value
    if value.copy is None:
        raise WorkloadError(f"{name} was overwritten before it was copied")
    return value.copy


class ValueReader:
    """Reads tensors and the values that a loop gives for its records, on the training thread.

    A CUDA call costs the host several times more when the driver's code is not in the caches, so small tensors on the
    device are held, and handed to the worker, which copies them on a stream of its own. That is right only if the loop
    does not write into them before, so each is looked at once more when its copy has arrived. The first tensors of each
    name are copied at once, and watched: a loop that writes into them, or uses their memory again as replays of a CUDA
    graph do, has tensors of that name copied at once for ever.
    """

    def __init__(self, say: Say) -> None:
        self.device: DeviceQueue | None = None
        self.held: list[HeldValue] = []
        self.handed: deque[Batch] = deque()  # for the worker to copy
        self.copied: deque[Batch] = deque()  # on their way
        self._arrived: deque[Batch] = deque()  # to be taken in
        self._lock = threading.Lock()  # held while queued values are copied, or arrived ones are read
        self.has_pass = False  # a forward pass was seen since the last record, and no graph was captured in it
        self._say = say
        self._plain: Any = None  # type of a tensor that is neither distributed nor another kind
        self._places: dict[int, HeldValue] = {}  # of what has not arrived
        self._trusted: set[str] = set()  # names of tensors that the loop leaves alone
        self._watched: dict[str, list[_WatchedTensor] | None] = {}  # None: never to be held

    def use(self, device: DeviceQueue | None) -> None:
        self.device = device
        self._plain = device.plain_tensor if device is not None else None

    def read(self, given: Sequence[Any], entry: DueRecord) -> list[Any]:
        """Numbers, copies that will arrive, and None where nothing was given."""
        if self.held and not self.has_pass and self.device is not None and not self.device.is_capturing():
            self.collect()  # no forward pass came
        found = list(given)
        for at, value in enumerate(given):
            if value is None or type(value) is float:
                continue
            name = VALUES[at]
            if name in self._trusted and self.has_pass and type(value) is self._plain and value.is_cuda:
                found[at] = self.take(name, value, entry)
            else:
                found[at] = self._read_value(name, value, entry)
        self.has_pass = False
        return found

    def read_number(self, value: Any) -> float:
        """A number that is on the host; NaN where it is none."""
        if value is None:
            return math.nan
        if is_tensor(value) and value.is_cuda:
            self._say(f"a dataset's value on {value.device} is not read: give a number", "dataset value")
            return math.nan
        return float(self._read_value("dataset value", value, DueRecord()))

    def take(self, name: str, tensor: Any, holder: DueRecord) -> Any:
        """A host copy of a CUDA tensor that will arrive, or what holds the tensor until it is copied."""
        if not (self.has_pass and name in self._trusted):
            return self._take_now(name, tensor, holder)
        try:
            version, place = tensor._version, tensor.data_ptr()
        except RuntimeError:  # made in inference mode: writes are not counted
            return self._take_now(name, tensor, holder)
        other = self._places.get(place)
        if other is not None:
            if self.device is None or self.device.is_capturing():
                return math.nan
            if other.entry is not holder or other.name == name:  # the loop uses its memory again
                other.version = -1
                self._refuse(other)
            return self._take_now(name, tensor, holder)
        held = HeldValue()
        held.name, held.version, held.place, held.entry, held.copy = name, version, place, holder, None
        held.tensor = tensor.detach() if tensor.requires_grad else tensor
        self._places[place] = held
        self.held.append(held)
        holder.held += 1
        return held

    def _take_now(self, name: str, tensor: object, holder: DueRecord) -> Any:
        assert self.device is not None
        if name not in self._trusted and self._watched.get(name, ()) is not None:
            self._watch(name, tensor)
        return self.device.take(name, tensor, holder)

    def _watch(self, name: str, tensor: Any) -> None:
        """Whether the loop left the tensors of this name alone so far."""
        watched = self._watched.setdefault(name, [])
        assert watched is not None
        if not self.has_pass:
            return
        try:
            new = _WatchedTensor(tensor.detach(), tensor._version, tensor.data_ptr())
        except RuntimeError:
            self._watched[name] = None
            return
        is_alone = all(each.tensor._version == each.version and each.place != new.place for each in watched)
        assert self.device is not None
        if not is_alone or tensor.nbytes > _MOST_BYTES or tensor.get_device() != self.device.find_current():
            self._watched[name] = None
            return
        watched.append(new)
        if len(watched) == _WATCHED:
            self._trusted.add(name)
            del self._watched[name]

    def hand_over(self, after: Any = None) -> None:
        """Let the worker copy held values, after this mark or one that is made now; not while a graph is captured."""
        device = self.device
        if device is None:
            return
        device.prepare_side()
        if len(self.handed) >= _MOST_HANDED:  # it does not come to it
            self.collect()
        elif self.held:
            held, self.held = self.held, []
            self.handed.append(Batch(held, after if after is not None else device.mark(), device.make_event()))

    def copy_handed(self) -> None:
        """On the worker's thread."""
        while self.handed and self.device is not None:
            with self._lock:
                if not self.handed:  # the training thread was quicker
                    return
                batch = self.handed[0]
                copies: Sequence[Any] | None = [None] * len(batch.held)
                try:
                    copies = self.device.copy_aside([each.tensor for each in batch.held], batch.after, batch.done)
                finally:
                    if copies is not None:
                        self.copied.append(self.handed.popleft()._replace(copies=copies))
                if copies is None:
                    return

    def collect(self) -> None:
        """Copy what is held, and what the worker did not come to, on this thread; not while a graph is captured."""
        device = self.device
        if device is None:
            return
        with self._lock:  # for microseconds at most
            batches = list(self.handed)
            self.handed.clear()
            if self.held:
                held, self.held = self.held, []
                batches.append(Batch(held, None, device.make_event()))
            for batch in batches:
                for each in batch.held:
                    if not each.is_unchanged():
                        each.version = -1
                copies = device.copy([each.tensor for each in batch.held], batch.done)
                self.copied.append(batch._replace(copies=copies, is_checked=True))

    def look(self) -> None:
        """Ask the device for what was copied and marked; not while a graph is captured."""
        if self.device is not None:
            self._find_arrived()
            self.device.poll(asks_stream=False)

    def _find_arrived(self) -> None:
        device, copied = self.device, self.copied
        while device is not None and copied and copied[0].done.query():
            device.keep_event(copied[0].done)
            self._arrived.append(copied.popleft())

    def take_in(self) -> None:
        """Read what has arrived; on the worker's thread, or where the training thread waits anyway."""
        with self._lock:
            while self._arrived:
                batch = self._arrived.popleft()
                for each, copy in zip(batch.held, batch.copies, strict=True):
                    is_good = each.version >= 0 if batch.is_checked else each.is_unchanged()
                    self._let_go(each)
                    if copy is not None:
                        each.entry.copies.append(copy)
                    if copy is None or not is_good:
                        self._refuse(each)
                    else:
                        each.copy = copy
                    each.entry.arrived += 1

    def _let_go(self, held: HeldValue) -> None:
        """Its place is forgotten first: its memory may be another tensor's at once."""
        if self._places.get(held.place) is held:
            del self._places[held.place]
        held.tensor = None

    def finish_copied(self) -> None:
        """Take in the copies that have arrived; not while a graph is captured."""
        self._find_arrived()
        self.take_in()

    def _refuse(self, held: HeldValue) -> None:
        """It was written into: tensors of its name are copied at once from now on."""
        self._trusted.discard(held.name)
        self._watched[held.name] = None
        what = "a value given for a record" if held.name in VALUES else f"{held.name} of a batch"
        self._say(
            f"{what} was overwritten before it was copied, and is left out: give value.clone(). From now on it is "
            "copied at once",
            f"{held.name} overwritten",
        )

    def poll(self) -> int:
        """Find the entries that the device is done with; returns how many are still under way.

        What is held is copied now. An idle device does that in microseconds, so the last steps are among those done.
        """
        device = self.device
        if device is None:
            return 0
        if device.is_capturing():
            return len(device.waiting) + len(self._list_held())
        self.finish_copied()
        left = device.poll()
        if self.held or self.handed:
            was_idle = device.is_idle()
            with device.on_stream():
                self.collect()
            deadline = time.monotonic() + _COPY_S
            while was_idle and self.copied and time.monotonic() < deadline:
                self.finish_copied()
            left = device.poll()
        return left + len(self._list_held())

    def _list_held(self) -> list[HeldValue]:
        """What has not been taken in."""
        with self._lock:
            return [
                *self.held,
                *(each for batch in (*self.handed, *self.copied, *self._arrived) for each in batch.held),
            ]

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
            for each in self._list_held():
                each.entry.is_lost = True

    def _read_value(self, name: str, value: Any, entry: DueRecord) -> Any:
        try:
            if not hasattr(value, "is_cuda"):
                return float(value)
            whole = find_whole(value) if hasattr(value, "placements") else value
            if whole is None:
                raise ValueError("ranks would have to talk to know it; give .full_tensor()")
            device = self.device
            if (
                whole.is_cuda
                and device is not None
                and ((self.has_pass and name in self._trusted) or not device.is_capturing())
            ):
                return self.take(name, whole, entry)
            if whole.is_cpu:
                return float(whole.item())
            self._say(f"a value on {whole.device} is not read: that would stall the device", "value device")
        except (TypeError, ValueError, RuntimeError) as error:
            self._say(f"a value given for the record is no number, and left out: {value!r:.60}: {error}", "value type")
        return math.nan
