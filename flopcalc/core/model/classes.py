"""Which family a config is that does not say it, or says a type that is not known: by its class, then by its keys."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache

from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.core.spec.aliases import find_alias, list_aliases, load_families
from flopcalc.core.spec.spec import find_key, find_spec

_END = re.compile(r"(For[A-Z]\w*|LMHeadModel|TextModel|EncoderModel|ChatModel|PreTrainedModel|Model|WithValueHead)$")


@cache
def _list_families() -> dict[str, str]:
    """Class -> model type, of every family."""
    found = dict(load_families())
    for name, alias in list_aliases().items():
        for named in alias.architectures:
            found.setdefault(named, name)
    return found


def cut_ending(name: str) -> str:
    """The name of a class without what says its head: that of its family."""
    return _END.sub("", name)


def find_type(named: str) -> str | None:
    """The model type of a class: its own, or that of another class of the same family."""
    families = _list_families()
    if named in families:
        return families[named]
    stem = cut_ending(named)
    same = [kind for each, kind in families.items() if cut_ending(each) == stem]
    return same[0] if same and stem else None


def find_untyped(config: Mapping[str, object]) -> str | None:
    """The model type of a config that names neither type nor class, by keys that only its family has."""
    known = [(name, alias.untyped) for name, alias in list_aliases().items() if alias.untyped]
    return next((name for name, keys in known if all(config.get(key) is not None for key in keys)), None)


def suggest_type(config: Mapping[str, object]) -> str | None:
    """The nearest known family of a config whose type is foreign: by the class it names, else by the keys it has."""
    named = config.get("architectures")
    if isinstance(named, (list, tuple)) and named:
        found = find_type(str(named[0]))
        if found is not None and found != config.get("model_type"):
            return found
    known = load_toml(os.path.join(find_data_dir(), "nearest_types.toml"))
    is_plain = not any(str(key).startswith(tuple(known["more"])) for key in config)
    for family in known["family"]:
        spec = find_spec(family["type"])
        if spec is None or any(find_key(dict(config), key)[1] is None for key in family["keys"]):
            continue
        if family.get("plain") and not is_plain:
            continue
        names = [(key, *spec.renamed.get(key, ())) for key in spec.required]
        if all(any(config.get(key) is not None for key in each) for each in names):
            return str(family["type"])
    composites = known["composites"].items()
    return next((name for name, key in composites if _is_known(config.get(key), config.get("vision_config"))), None)


def _is_known(*inner: object) -> bool:
    """Whether all are configs of known types."""
    types = [each.get("model_type") if isinstance(each, Mapping) else None for each in inner]
    return all(isinstance(kind, str) and (find_spec(kind) or find_alias(kind)) for kind in types)
