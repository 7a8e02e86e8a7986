"""What a clip of audio becomes: seconds to frames as the model's feature extractor would, frames to tokens."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from flopcalc.base.errors import ConfigError, WorkloadError, format_value
from flopcalc.core.spec.expressions import MissingNameError, Names, evaluate, find_names
from flopcalc.core.spec.spec import BoundDims


class Audio(NamedTuple):
    """A model's audio input under one config."""

    rate: Fraction  # frames per second
    most: int  # frames that a clip may have; 0: any number
    tokens: str  # expression in n, a clip's frames: positions of the language model that it fills
    constants: tuple[tuple[str, int], ...]
    key: str  # the batch's tensor of audio
    axis: int | None  # and the axis of its frames; None: it is a mask, 1 at every position that holds a frame

    def count_tokens(self, frames: int) -> int:
        """Positions of the language model that one clip fills."""
        return int(evaluate(self.tokens, Names({**dict(self.constants), "n": frames})))

    def frames_of_seconds(self, seconds: float) -> int:
        """Frames of a clip, without padding."""
        return math.ceil(Fraction(str(check_seconds(seconds))) * self.rate)


def bind_audio(dims: BoundDims) -> Audio | None:
    """The audio input that a spec describes, or None."""
    table = dims.spec.audio
    if not table:
        return None

    def number(key: str, default: int) -> Fraction:
        if key not in table:
            return Fraction(default)
        try:
            value = dims.evaluate(table[key])
        except MissingNameError as error:
            raise ConfigError(f"{dims.where}: missing key {error.name!r}") from None
        if isinstance(value, bool) or not isinstance(value, (int, Fraction)) or value < 0:
            raise ConfigError(f"{dims.where}: {table[key]} must be a number, not {format_value(value)}")
        return Fraction(value)

    def size(key: str, default: int) -> int:
        value = number(key, default)
        if value.denominator != 1:
            raise ConfigError(f"{dims.where}: {table[key]} must be a whole number, not {format_value(value)}")
        return int(value)

    tokens = table.get("tokens", "0")
    # "n" is what a clip has, and no dim of the spec.
    constants = tuple((name, dims.lookup(name)) for name in sorted(find_names(tokens) - {"n"}))
    key, axis = (table["mask"], None) if "mask" in table else (table.get("input", "input_features"), size("axis", 2))
    return Audio(number("rate", 100), size("most", 0), tokens, constants, key, axis)


def check_seconds(value: object) -> float:
    """A clip's length: a positive number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 10**7:
        raise WorkloadError(f"audio must be a length in seconds, not {format_value(value)}")
    return float(value)
