"""What a monitor has to say: each message once, as a warning on the thread that trains and as an event in the log."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any, Protocol, TypeVar

_MOST_PENDING = 100


class Say(Protocol):
    """Warns the user, once per `once`."""

    def __call__(self, message: str, once: str | None = None) -> None: ...


class EventLog(Protocol):
    """Takes an event for the log."""

    def put(self, record: Mapping[str, Any], /) -> None: ...


class Messages:
    """Any thread may say something. Filters of warnings belong to the thread that trains, so it alone warns."""

    def __init__(self) -> None:
        self.said: set[str] = set()
        self.pending: deque[str] = deque(maxlen=_MOST_PENDING)
        self.step = 0  # the last one that ended
        self.outbox: EventLog | None = None
        self._thread = threading.get_ident()

    def say(self, message: str, once: str | None = None) -> None:
        """One warning per `once`, which is the message itself if nothing else is given. Never raises."""
        key = once if once is not None else message
        if key in self.said:
            return
        self.said.add(key)
        self.pending.append(message)
        with suppress(Exception):
            if self.outbox is not None:
                event = {"type": "event", "message": message, "global_step": self.step, "time": time.time()}
                self.outbox.put(event)
            self.warn_pending()

    def warn_pending(self) -> None:
        if threading.get_ident() == self._thread:
            while self.pending:
                warn(self.pending.popleft())


def warn(message: str) -> None:
    """A warning, even where warnings are made errors: then it is printed instead."""
    try:
        warnings.warn(f"flopcalc: {message}", RuntimeWarning, stacklevel=2)
    except Exception:
        with suppress(Exception):
            print(f"flopcalc: {message}", file=sys.stderr)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def guarded(method: _Method) -> _Method:
    """A method of a monitor that never raises: an error inside becomes one warning, and training goes on."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_off:  # closed, a copy, or in the child of a fork
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._fail(method.__name__, error)
            return None

    return run  # type: ignore[return-value]
