"""The CUDA device as a monitor touches it: marks on its stream and small copies from it. Nothing here waits for it."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Hashable, Sequence
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
        self.plain_tensor: type = torch.Tensor
        self.is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self._stream: Any = None  # that training runs on
        self._events: list[Any] = []
        self._buffers: dict[Hashable, list[Any]] = {}
        self.waiting: deque[Entry] = deque()  # for the device to pass their end, or that of a later one; oldest first
        self.marked: deque[Entry] = deque()  # those of them that have an end

    def mark(self, event: Any = None) -> Any:
        """An event, or this one once more, recorded now on the current stream; None while a graph is captured."""
        if self.is_capturing():
            return None
        if event is None:
            event = self._events.pop() if self._events else self._torch.cuda.Event(enable_timing=True)
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
        held = self._lend(tensor.shape, tensor.dtype)
        return held.copy_(tensor.detach() if tensor.requires_grad else tensor, non_blocking=True)

    def fetch_many(self, tensors: Sequence[Any]) -> list[Any]:
        """As `fetch`, in one call of torch; None where a tensor cannot be read any more. None needs a gradient."""
        found = [self._lend(tensor.shape, tensor.dtype) for tensor in tensors]
        try:
            self._torch._foreach_copy_(found, tensors, non_blocking=True)
            return found
        except RuntimeError:  # one of them
            return [self._try_copy(held, tensor) for held, tensor in zip(found, tensors, strict=True)]

    def _try_copy(self, held: Any, tensor: Any) -> Any:
        try:
            return held.copy_(tensor, non_blocking=True)
        except RuntimeError:
            self.give_back([held])
            return None

    def _lend(self, shape: Any, dtype: object) -> Any:
        """A free buffer of a shape."""
        size = (shape.numel() - 1).bit_length()  # lengths differ from batch to batch: buffers go by powers of two
        free = self._buffers.get((size, dtype))
        if not free:
            free = self._make_buffers(size, dtype)
        held = free.pop()
        if held.shape != shape:
            held.resize_(shape)
        return held

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
        waiting, marked = self.waiting, self.marked
        passed: Entry | None = None
        while marked and marked[0].end.query():
            passed = marked.popleft()
        while passed is not None and not passed.is_ready:
            self._finish(waiting.popleft())
        if asks_stream and waiting and self.is_idle():
            done = next((count for count, entry in enumerate(waiting) if entry.has_held), len(waiting))
            for _ in range(done):
                self._finish(waiting.popleft())
            while marked and marked[0].is_ready:
                marked.popleft()
        return len(waiting)

    def _finish(self, entry: Entry) -> None:
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
        entry.is_ready = True

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
            entry.is_lost = entry.is_ready = True
