"""The CUDA device as a monitor touches it: marks on its stream and small copies from it. Nothing here waits for it."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from flopcalc.monitor.records import DueRecord

# Pinned memory is slow to allocate: buffers of one size are made together.
_BLOCK_BUFFERS, _BLOCK_BYTES = 64, 1 << 22


class Holder(Protocol):
    """Has host buffers that the device writes into."""

    copies: list[Any]


def find_device() -> DeviceQueue | None:
    """None where this process has no work on a CUDA device."""
    torch = sys.modules.get("torch")
    return (
        DeviceQueue(torch) if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None
    )


class DeviceQueue:
    """Events and pinned buffers, used again and again, and the entries that wait for them.

    It is asked on the training thread alone: another thread's question would break a CUDA graph that is being captured.
    Another thread may only copy, on a stream of its own: that does not break a capture.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.plain_tensor: type = torch.Tensor
        self.is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self.find_current: Callable[[], int] = torch.cuda.current_device
        self._stream: Any = None  # that training runs on
        self._side: Any = None  # the worker's own
        self._is_worker_set = False
        self.wanted: deque[tuple[int, Any]] = deque()  # buffers that the worker has none of, by size and dtype
        self._events: list[Any] = []
        self._buffers: dict[Hashable, list[Any]] = {}
        self.waiting: deque[DueRecord] = (
            deque()
        )  # for the device to pass their end, or that of a later one; oldest first
        self.marked: deque[DueRecord] = deque()  # those of them that have an end

    def find_uuid(self) -> str | None:
        """Of the device that training runs on: NVML finds it by this; None where torch does not know it."""
        try:
            return str(self._torch.cuda.get_device_properties(self.find_current()).uuid).removeprefix("GPU-")
        except Exception:  # an older torch, or a GPU that is no NVIDIA one
            return None

    def mark(self, event: Any = None) -> Any:
        """An event, or this one once more, recorded now on the current stream; None while a graph is captured."""
        if self.is_capturing():
            return None
        if event is None:
            event = self.make_event()
        self._stream = self._torch.cuda.current_stream()
        event.record(self._stream)
        return event

    def take(self, _name: str, tensor: object, holder: Holder) -> Any:
        """As `fetch`; the holder gives the buffer back."""
        found = self.fetch(tensor)
        holder.copies.append(found)
        return found

    def fetch(self, tensor: Any) -> Any:
        """A host tensor that will hold these values once the device has come so far; not while a graph is captured."""
        held = self._lend(tensor)
        return held.copy_(tensor.detach() if tensor.requires_grad else tensor, non_blocking=True)

    def prepare_side(self) -> None:
        """On the training thread: what a capture might not forgive another one."""
        if self._side is None:
            self._side = self._torch.cuda.Stream()
        while self.wanted:
            self._make_buffers(*self.wanted.popleft())

    def make_event(self) -> Any:
        return self._events.pop() if self._events else self._torch.cuda.Event(enable_timing=True)

    def keep_event(self, event: Any) -> None:
        """It has passed."""
        self._events.append(event)

    def copy(self, tensors: Sequence[Any], done: Any) -> list[Any]:
        """Copy tensors that need no gradient, then record `done`; None where one cannot be read any more.

        On the current stream; not while a graph is captured.
        """
        found = self._copy([self._lend(tensor) for tensor in tensors], tensors)
        done.record(self._torch.cuda.current_stream())
        return found

    def copy_aside(self, tensors: Sequence[Any], after: Any, done: Any) -> list[Any] | None:
        """As `copy`, on the worker's thread and stream, once the training's stream has passed `after`.

        None: there are not enough buffers, and the training thread must make some.
        """
        buffers = self._lend_free(tensors)
        if buffers is None:
            return None
        side = self._side
        if not self._is_worker_set:  # for good: to go back to another device would take memory there
            self._torch.cuda.set_device(side.device)
            self._torch.cuda.set_stream(side)
            self._is_worker_set = True
        side.wait_event(after)
        found = self._copy(buffers, tensors)
        done.record(side)
        return found

    def _copy(self, buffers: list[Any], tensors: Sequence[Any]) -> list[Any]:
        try:
            self._torch._foreach_copy_(buffers, tensors, non_blocking=True)
            return buffers
        except RuntimeError:  # one of them
            return [self._try_copy(held, tensor) for held, tensor in zip(buffers, tensors, strict=True)]

    def _try_copy(self, held: Any, tensor: Any) -> Any:
        try:
            return held.copy_(tensor, non_blocking=True)
        except RuntimeError:
            self.give_back([held])
            return None

    def _lend(self, tensor: Any) -> Any:
        """A buffer of a tensor's shape, of new memory if none is free."""
        key = _size(tensor), tensor.dtype
        if not self._buffers.get(key):
            self._make_buffers(*key)
        return self._take_free(key, tensor)

    def _lend_free(self, tensors: Sequence[Any]) -> list[Any] | None:
        """A buffer for each, without new memory."""
        found: list[Any] = []
        for tensor in tensors:
            key = _size(tensor), tensor.dtype
            if not self._buffers.get(key):
                self.give_back(found)
                self.wanted.append(key)
                return None
            found.append(self._take_free(key, tensor))
        return found

    def _take_free(self, key: Hashable, tensor: Any) -> Any:
        held = self._buffers[key].pop()
        return held if held.shape == tensor.shape else held.resize_(tensor.shape)

    def _make_buffers(self, size: int, dtype: Any) -> None:
        """Parts of one block. All parts that were ever on their way at the same time are kept."""
        count = max(1, min(_BLOCK_BUFFERS, _BLOCK_BYTES // (dtype.itemsize << size)))
        with self._torch.inference_mode(False):  # they are written into again, maybe outside of that
            parts = self._torch.empty((count, 1 << size), dtype=dtype, pin_memory=True).unbind()
        self._buffers.setdefault((size, dtype), []).extend(parts)  # the worker may give some back meanwhile

    def give_back(self, buffers: list[Any]) -> None:
        """Their values have been read."""
        for held in buffers:
            self._buffers[_size(held), held.dtype].append(held)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Makes the stream that training runs on the current one."""
        return nullcontext() if self._stream is None else self._torch.cuda.stream(self._stream)

    def is_idle(self) -> bool:
        """Whether all work of the stream that training runs on is done; not while a graph is captured."""
        return self._stream is not None and bool(self._stream.query())

    def poll(self, asks_stream: bool = True) -> int:
        """Find the entries that the device is done with; returns how many are still under way.

        Not while a graph is captured. An end mark vouches for what was copied at once in its entry and all before it,
        an idle stream for all of that.
        """
        waiting, marked = self.waiting, self.marked
        while marked and marked[0].end.query():
            passed, entry = marked.popleft(), None
            while entry is not passed:
                entry = waiting.popleft()
                self._finish(entry)
        if asks_stream and waiting and self.is_idle():
            marked.clear()
            while waiting:
                self._finish(waiting.popleft())
        return len(waiting)

    def _finish(self, entry: DueRecord) -> None:
        if entry.start is not None or entry.end is not None:
            if entry.start is not None and entry.end is not None:
                entry.device_s = entry.start.elapsed_time(entry.end) / 1e3
            self._events += [event for event in (entry.start, entry.end) if event is not None]
            entry.start = entry.end = None
        for each in entry.passes:
            if each.start is not None and each.end is not None:
                each.seconds = each.start.elapsed_time(each.end) / 1e3
            self._events += [event for event in (each.start, each.end) if event is not None]
            each.start = each.end = None
        entry.is_past = True

    def give_up(self) -> None:
        """Entries that never ended count without device time, and without what is on its way."""
        self.marked.clear()
        while self.waiting:
            entry = self.waiting.popleft()
            entry.start = entry.end = None
            for each in entry.passes:
                if each.start is not None:
                    each.start = each.end = None
                    each.seconds = math.nan
            entry.is_lost = True


def _size(tensor: Any) -> int:
    """Lengths differ from batch to batch: buffers go by powers of two."""
    return int((tensor.numel() - 1).bit_length())
