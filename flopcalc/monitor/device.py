"""The CUDA device as a monitor touches it: marks on its stream and small copies from it. Nothing here waits for it."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from flopcalc.monitor.step import Entry

# Pinned memory is slow to allocate: buffers of one size are made together.
_BLOCK_BUFFERS, _BLOCK_BYTES = 64, 1 << 22


class Holder(Protocol):
    """Has host buffers that the device writes into."""

    copies: list[Any]


def find_device() -> Device | None:
    """None where this process has no work on a CUDA device."""
    torch = sys.modules.get("torch")
    return Device(torch) if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


class Device:
    """Events and pinned buffers, used again and again, and the entries that wait for them.

    It is asked on the training thread alone: another thread's question would break a CUDA graph that is being captured.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self._stream: Any = None  # that training runs on
        self._events: list[Any] = []
        self._buffers: dict[Hashable, list[Any]] = {}
        self.waiting: deque[Entry] = deque()  # for the device to pass their end, or that of a later one; oldest first
        self.has_mark = False  # one of them has an end that the device had not passed when it was asked last

    def mark(self, event: Any = None) -> Any:
        """An event, or this one once more, recorded now on the current stream; None while a graph is captured."""
        if self.is_capturing():
            return None
        if event is None:
            event = self._events.pop() if self._events else self._torch.cuda.Event(enable_timing=True)
        self._stream = self._torch.cuda.current_stream()
        event.record(self._stream)
        return event

    def take(self, _name: str, tensor: Any, holder: Holder) -> Any:
        """As `fetch`; the holder gives the buffer back."""
        found = self.fetch(tensor)
        holder.copies.append(found)
        return found

    def fetch(self, tensor: Any) -> Any:
        """A host tensor that will hold these values once the device has come so far; not while a graph is captured."""
        size = (tensor.numel() - 1).bit_length()  # lengths differ from batch to batch: buffers go by powers of two
        free = self._buffers.get((size, tensor.dtype))
        if not free:
            free = self._make_buffers(size, tensor.dtype)
        held = free.pop()
        if held.shape != tensor.shape:
            held.resize_(tensor.shape)
        return held.copy_(tensor.detach() if tensor.requires_grad else tensor, non_blocking=True)

    def _make_buffers(self, size: int, dtype: Any) -> list[Any]:
        """Parts of one block. All parts that were ever on their way at the same time are kept."""
        count = max(1, min(_BLOCK_BUFFERS, _BLOCK_BYTES // (dtype.itemsize << size)))
        with self._torch.inference_mode(False):  # they are written into again, maybe outside of that
            parts = self._torch.empty((count, 1 << size), dtype=dtype, pin_memory=True).unbind()
        free = self._buffers.setdefault((size, dtype), [])  # the worker may give some back meanwhile
        free += parts
        return free

    def give_back(self, buffers: list[Any]) -> None:
        """Their values have been read."""
        for held in buffers:
            self._buffers[(held.numel() - 1).bit_length(), held.dtype].append(held)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Makes the stream that training runs on the current one."""
        return nullcontext() if self._stream is None else self._torch.cuda.stream(self._stream)

    def is_idle(self) -> bool:
        """Whether all work of the stream that training runs on is done; not while a graph is captured."""
        return self._stream is not None and bool(self._stream.query())

    def poll(self, asks_stream: bool = True) -> int:
        """Find the entries that the device is done with; returns how many are still under way.

        Not while a graph is captured. An end mark vouches for its entry and all before it; an idle stream for all but
        those with a value that is held.
        """
        waiting = self.waiting
        done = 0
        self.has_mark = False
        for count, entry in enumerate(waiting, 1):
            if entry.end is not None:
                if not entry.end.query():
                    self.has_mark = True
                    break
                done = count
        if asks_stream and done < len(waiting) and self.is_idle():
            done = next((count for count, entry in enumerate(waiting) if entry.has_held), len(waiting))
        for _ in range(done):
            self._finish(waiting.popleft())
        return len(waiting)

    def _finish(self, entry: Entry) -> None:
        if entry.start is not None and entry.end is not None:
            entry.device_s = entry.start.elapsed_time(entry.end) / 1e3
        self._events += [event for event in (entry.start, entry.end) if event is not None]
        entry.start = entry.end = None
        for each in entry.passes:
            if each.start is not None and each.end is not None:
                each.seconds = each.start.elapsed_time(each.end) / 1e3
            self._events += [event for event in (each.start, each.end) if event is not None]
            each.start = each.end = None
        entry.is_ready = True

    def give_up(self) -> None:
        """Entries that never ended count without device time, and without what is on its way."""
        while self.waiting:
            entry = self.waiting.popleft()
            entry.start = entry.end = None
            for each in entry.passes:
                if each.start is not None:
                    each.start = each.end = None
                    each.seconds = math.nan
            entry.is_lost = entry.is_ready = True
