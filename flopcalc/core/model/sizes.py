"""Sizes that a spec's expressions have under a config, and errors that name the config's keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from flopcalc.base.errors import ConfigError, SpecError, format_value
from flopcalc.core.spec.expressions import MissingNameError, evaluate, find_names
from flopcalc.core.spec.spec import BoundDims, find_key

# A size of an op: its key, the least that it may be, and the expression where a spec says none.
Size: TypeAlias = Callable[..., int]


def find_size(dims: BoundDims, text: str, what: str, minimum: int) -> int:
    """An expression's value as a whole number of at least `minimum`, else an error that names the config."""
    try:
        value = evaluate(text, dims)
    except MissingNameError as error:
        raise ConfigError(f"{dims.where}: missing key {error.name!r}, needed for {what}") from None
    except SpecError as error:
        raise ConfigError(f"{dims.where}: {what}: {error}{format_origin(dims, text)}") from None
    if isinstance(value, bool) or getattr(value, "denominator", None) != 1:
        wrong = f"must be a whole number, not {format_value(value)}"
    elif not minimum <= value <= 10**12:
        wrong = f"is {format_value(value)}, which is not a size"
    else:
        return int(value)
    raise ConfigError(f"{dims.where}: {what} = {text} {wrong}{format_origin(dims, text)}")


def format_origin(dims: BoundDims, *texts: str) -> str:
    """' (hidden_size is '4096')': the config's keys that expressions read, for an error that names them."""
    names = [name for name in _list_keys(dims, *texts) if find_key(dims.config, name)[0]]
    shown = [f"{key} is {format_value(find_key(dims.config, key)[1])}" for key in names]
    return f" ({', '.join(shown)})" if shown else ""


def is_partial(dims: BoundDims, *texts: str) -> bool:
    """Whether a number of heads or a width behind the expressions is left out, so that the config class's default
    stands: tiny configs give a few keys alone.
    """
    return any(
        dims.defaults.get(name) is not None
        and ("head" in name or "hidden" in name)
        and not any(find_key(dims.config, key)[0] for key in (name, *dims.spec.renamed.get(name, ())))
        for name in _list_keys(dims, *texts)
    )


def _list_keys(dims: BoundDims, *texts: str) -> list[str]:
    """The config's keys that expressions read, through dims too."""
    keys: dict[str, None] = {}
    seen: set[str] = set()
    waiting = list(texts)
    while waiting:
        for name in sorted(find_names(waiting.pop()) - seen):
            seen.add(name)
            entries = [entry for entry in dims.spec.dims.get(name, ()) if entry != name]
            waiting += entries
            if not entries or len(entries) < len(dims.spec.dims.get(name, ())):
                keys[name] = None
    return list(keys)
