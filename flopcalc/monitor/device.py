"""The CUDA device as a monitor touches it: marks on its stream and small copies from it. Nothing here waits for it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from flopcalc.monitor.step import Entry

_MOST_FREE = 256  # buffers of one size that are kept


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

    def mark(self) -> Any:
        """An event recorded now on the current stream; None while a graph is captured."""
        if self.is_capturing():
            return None
        event = self._events.pop() if self._events else self._torch.cuda.Event(enable_timing=True)
        self._stream = self._torch.cuda.current_stream()
        event.record(self._stream)
        return event

    def fetch(self, tensor: Any) -> Any:
        """A host tensor that will hold these values once the device has come so far; not while a graph is captured."""
        bits = tensor.numel().bit_length()  # lengths differ from batch to batch: buffers go by powers of two
        free = self._buffers.get((bits, tensor.dtype))
        if free:
            held = free.pop()
        else:
            with self._torch.inference_mode(False):  # it is written into again, maybe outside of that
                held = self._torch.empty(1 << bits, dtype=tensor.dtype, pin_memory=True)
        if held.shape != tensor.shape:
            held.resize_(tensor.shape)
        return held.copy_(tensor.detach() if tensor.requires_grad else tensor, non_blocking=True)

    def give_back(self, buffers: list[Any]) -> None:
        """Their values have been read."""
        for held in buffers:
            free = self._buffers.setdefault((held.numel().bit_length(), held.dtype), [])
            if len(free) < _MOST_FREE:
                free.append(held)

    def poll(self) -> int:
        """Find the entries that the device is done with; returns how many are still under way."""
        if self.is_capturing():
            return len(self.waiting)
        done = 0
        for count, entry in enumerate(self.waiting, 1):
            if entry.end is not None:
                if not entry.end.query():
                    break
                done = count
        if done < len(self.waiting) and self._stream is not None and self._stream.query():
            done = len(self.waiting)  # it has nothing left to do
        for _ in range(done):
            self._finish(self.waiting.popleft())
        return len(self.waiting)

    def _finish(self, entry: Entry) -> None:
        if entry.start is not None and entry.end is not None:
            entry.device_s = entry.start.elapsed_time(entry.end) / 1e3
        self._events += [event for event in (entry.start, entry.end) if event is not None]
        entry.start = entry.end = None
        entry.is_ready = True

    def give_up(self) -> None:
        """Entries that never ended count without device time, and without what is on its way."""
        while self.waiting:
            entry = self.waiting.popleft()
            entry.start = entry.end = None
            entry.is_lost = entry.is_ready = True
