"""After construction nothing raises: the one place where a monitor's errors become warnings."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

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
