"""The one exception family: every error says what was read, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

_ROOM = 60  # characters of a value in an error


class FlopcalcError(ValueError):
    """Base of everything flopcalc raises on purpose; the command line prints it as one line, exit code 2."""


class ConfigError(FlopcalcError):
    """A model name, path or config.json that cannot be read or bound."""


class SpecError(FlopcalcError):
    """A spec file that breaks the rules of the format."""


class WorkloadError(FlopcalcError):
    """Sizes, lengths, images or a batch that make no sense for this model."""


class RecipeError(FlopcalcError):
    """A freeze, LoRA or recomputation setting that cannot apply to this model."""


class DeviceError(FlopcalcError):
    """A device or dtype without a known peak."""


class CalibrationError(FlopcalcError):
    """A calibration table that cannot be read, written or found."""


def find_nearest(word: str, known: Iterable[str], limit: int = 3, cutoff: float = 0.5) -> list[str]:
    """The known words closest to a mistyped one, best first."""
    import difflib

    return difflib.get_close_matches(word[:100].lower(), [str(entry) for entry in known], n=limit, cutoff=cutoff)


def format_nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """' Did you mean a, b?' or an empty string."""
    near = find_nearest(word, known, cutoff=cutoff)
    return f" Did you mean {', '.join(near)}?" if near else ""


def format_value(value: object) -> str:
    """What was read, short enough for one line."""
    try:
        text = str(value) if type(value).__name__ == "Fraction" else _show(value, _ROOM)
    except Exception:  # an int of too many digits, or an object that cannot be shown
        return f"a very large {type(value).__name__}" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= _ROOM else text[: _ROOM - 3] + "…"


def _show(value: object, room: int) -> str:
    """A value's repr, shortened: lists of a YAML file may contain each other a million times."""
    kind = type(value)
    if room < 0:
        return "…"
    if isinstance(value, str) and kind is str:
        return repr(value[: room + 2])
    if not isinstance(value, (list, tuple, dict)) or kind not in (list, tuple, dict):
        return repr(value)
    opening, closing = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}")}[kind]
    text = opening
    for place, each in enumerate(value):
        text += ", " if place else ""
        text += _show(each, room - len(text))
        if isinstance(value, dict):
            text += f": {_show(value[each], room - len(text) - 2)}"
        if len(text) > room:
            return text
    return text + ("," if kind is tuple and len(value) == 1 else "") + closing
