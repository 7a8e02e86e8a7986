"""Values that no argument expects, and what must come of them: an answer, or a FlopcalcError in one short line."""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from flopcalc.base.errors import FlopcalcError


class Odd:
    """Refuses to be compared, hashed or shown."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __repr__(self) -> str:
        raise RuntimeError("shown")


class LikeArray:
    """Compares to itself, and is neither true, false nor a list, as some lazy arrays."""

    def __eq__(self, other: object) -> Any:
        return self

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")

    def __iter__(self) -> Any:
        raise RuntimeError("no list")


class OddPath(os.PathLike[str]):
    """Claims to be a path, and cannot be shown."""

    def __fspath__(self) -> str:
        return 5  # type: ignore[return-value]

    def __repr__(self) -> str:
        raise RuntimeError("shown")


VALUES: tuple[Any, ...] = (
    None, "", 5, 0, -1, 0.5, math.nan, math.inf, -1e308, "Model", "model ", b"4", b"", True, 10**30, 10**5000, 1j,
    np.array([1, 2]), np.array(["model"]), np.array("model"), np.float32(1), np.int64(3), np.array([["a", "b", "c"]]),
    np.array([[math.nan, 1, 1]]), np.array([[0.5, 1, 1]]), np.array([[-1, 1, 1]]), np.array([[1j, 1, 1]]),
    np.array([[None, 1, 1]]), [], [None], ["a", "b"], [[1]], [[-1, 1, 1]], {}, {1: 2}, {"a": None}, {1, 2}, (1, 2, 3),
    object(), len, int, Odd(), LikeArray(), "x" * 3000, "\0", "\ud800", "/dev/zero", "1e999", "/", "..", "*", "[", "%s",
    OddPath(), "²", "9" * 5000,
)  # fmt: skip
MOST_CHARACTERS = 1000  # of an error


def try_call(call: Callable[..., Any], **arguments: Any) -> str:
    """Empty where the call answers or refuses as it should, else what went wrong."""
    try:
        call(**arguments)
    except FlopcalcError as error:
        text = str(error)
        return "" if 0 < len(text) <= MOST_CHARACTERS else f"an error of {len(text)} characters"
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {at.name}: {error}"
    return ""
