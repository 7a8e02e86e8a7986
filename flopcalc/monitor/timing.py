"""Marks on the device's own time line go in; seconds between them come out later: nothing here ever waits."""

from __future__ import annotations

from collections import deque
from typing import Any

_MOST = 4  # marks looked at in one call: the hot path stays short


class Marks:
    """A ring of CUDA events, used again once they were read. On a machine without CUDA there are none."""

    def __init__(self) -> None:
        self._torch: Any = None
        self._free: deque[Any] = deque()
        self._stream: Any = None
        try:
            import torch

            if torch.cuda.is_available():
                self._torch = torch
        except Exception:  # no torch, or a broken driver: then there is no device time
            self._torch = None

    @property
    def are_real(self) -> bool:
        return self._torch is not None

    def mark(self) -> Any:
        """An event recorded now on the current stream; None without CUDA, and while a graph is captured."""
        torch = self._torch
        if torch is None or torch.cuda.is_current_stream_capturing():
            return None
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._find_stream())
        return event

    def _find_stream(self) -> Any:
        """The current stream; torch's own look-up costs more than the record, so the last one is kept."""
        torch = self._torch
        current = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        if self._stream is None or self._stream.cuda_stream != current:
            self._stream = torch.cuda.current_stream()
        return self._stream

    def give_back(self, *events: Any) -> None:
        self._free.extend(event for event in events if event is not None)


class Flight:
    """Entries whose last mark has not been passed yet, oldest first; asked on the training thread alone.

    Another thread must not ask: that would break a CUDA graph that is being captured.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._entries: deque[Any] = deque()

    def add(self, entry: Any) -> None:
        if entry.end is None:
            entry.is_ready = True
        else:
            self._entries.append(entry)

    def poll(self, most: int = _MOST) -> int:
        """Note the device time of entries that are done; returns how many are still under way."""
        entries = self._entries
        while entries and most and entries[0].end.query():
            entry = entries.popleft()
            most -= 1
            if entry.start is not None:
                entry.device_s = entry.start.elapsed_time(entry.end) / 1e3
            self._marks.give_back(entry.start, entry.end)
            entry.start = entry.end = None
            entry.is_ready = True
        return len(entries)

    def give_up(self) -> None:
        """Those that never ended count without device time."""
        while self._entries:
            entry = self._entries.popleft()
            entry.start = entry.end = None
            entry.is_lost = entry.is_ready = True
