"""What a clip of audio becomes: seconds to frames as the model's feature extractor would, frames to tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

from flopcalc.errors import ConfigError, format_value
from flopcalc.expr import MissingNameError, Names, evaluate, find_names
from flopcalc.spec import BoundDims


class Audio(NamedTuple):
    """A model's audio input under one config."""

    rate: int  # frames per second
    pad: int  # every clip is padded to so many frames; 0: to none
    tokens: str  # expression in n, a clip's frames: positions of the language model that it fills
    constants: tuple[tuple[str, int], ...]

    def count_tokens(self, frames: int) -> int:
        """Positions of the language model that one clip fills."""
        return int(evaluate(self.tokens, Names({**dict(self.constants), "n": frames})))

    def frames_of_seconds(self, seconds: float) -> int:
        """Frames of a clip as the encoder sees it."""
        frames = math.ceil(seconds * self.rate)
        return -(-frames // self.pad) * self.pad if self.pad else frames


def bind_audio(dims: BoundDims) -> Audio | None:
    """The audio input that a spec describes, or None."""
    table = dims.spec.audio
    if not table:
        return None

    def size(key: str, default: int) -> int:
        if key not in table:
            return default
        try:
            value = dims.evaluate(table[key])
        except MissingNameError as error:
            raise ConfigError(f"{dims.where}: missing key {error.name!r}") from None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{dims.where}: {table[key]} must be a whole number, not {format_value(value)}")
        return value

    tokens = table.get("tokens", "0")
    constants = tuple((name, dims.lookup(name)) for name in sorted(find_names(tokens) - {"n"}))
    return Audio(size("rate", 100), size("pad", 0), tokens, constants)
