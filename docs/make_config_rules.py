"""What transformers' config classes refuse goes in; model_specs/config_rules.json comes out.

python docs/make_config_rules.py            write it
python docs/make_config_rules.py --check    exit 1 if it is stale
"""

from __future__ import annotations

import json
import sys
import types
import typing
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "model_specs" / "config_rules.json"


def read_kinds(annotation: Any) -> frozenset[str]:
    """What a field takes, as words; anything but whole numbers, lists of them and null is 'other'."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return frozenset().union(*map(read_kinds, inner))
    if annotation in (None, type(None)):
        return frozenset({"null"})
    if annotation is int:
        return frozenset({"int"})
    if origin in (list, tuple, Sequence) and [each for each in inner if each is not Ellipsis]:
        entries = frozenset().union(*(read_kinds(each) for each in inner if each is not Ellipsis))
        return frozenset({"list"}) if entries == {"int"} else frozenset({"other"})
    return frozenset({"other"})


def name_kind(kinds: frozenset[str]) -> str:
    """'int', 'list', 'int|list', each with '?' where null is taken; empty where other values are taken too."""
    if "other" in kinds or not kinds & {"int", "list"}:
        return ""
    return "|".join(kind for kind in ("int", "list") if kind in kinds) + ("?" if "null" in kinds else "")


def is_refused(make: Callable[[], Any], words: str = "") -> bool:
    """Whether a config class refuses what it is given, with these words in its reason."""
    try:
        make()
    except Exception as error:  # whatever HF raises
        return words in str(error)
    return False


def pick_two(words: list[str]) -> list[str]:
    """Words for two layers, different ones where there are: some classes want every kind of layer."""
    different = list(dict.fromkeys(words))
    return (different * 2)[:2]


def read_layers(config_class: Any, default: Any) -> dict[str, list[Any]]:
    """Lists of words per layer that must be as long as there are layers: key -> [key of the number, its default]."""
    found: dict[str, list[Any]] = {}
    count = getattr(default, "num_hidden_layers", None)
    key = config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if not isinstance(count, int) or key not in {field.name for field in fields(config_class)}:
        return found
    for name, word in (("layer_types", "full_attention"), ("mlp_layer_types", "dense")):
        pair = pick_two(getattr(default, name, None) or [word])
        given = {name: pair}
        if name == "mlp_layer_types" and getattr(default, "layer_types", None):
            given["layer_types"] = pick_two(default.layer_types)
        is_taken = not is_refused(lambda given=given: config_class(**{key: 2}, **given))
        refused = [
            is_refused(lambda given=given, name=name, words=words: config_class(**{key: 2}, **{**given, name: words}))
            for words in (pair[:1], [*pair, pair[0]], ["no such word", pair[1]])
        ]
        if is_taken and all(refused):
            found[name] = [key, count]
    return found


def read_even(config_class: Any, default: Any) -> list[str]:
    """Expressions for the head dim that rotary embeddings turn, where an odd one is refused."""
    heads = getattr(default, "num_attention_heads", None)
    tries: dict[str, dict[str, int]] = {"head_dim": {"head_dim": 7}, "qk_rope_head_dim": {"qk_rope_head_dim": 7}}
    if isinstance(heads, int) and hasattr(default, "hidden_size"):
        tries["hidden_size / num_attention_heads"] = {"hidden_size": 7 * heads, "num_attention_heads": heads}
    names = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    return [
        text
        for text, given in tries.items()
        if set(given) <= names | {"head_dim"} and is_refused(lambda given=given: config_class(**given), "even rotary")
    ]


def read_class(config_class: Any) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    base = {field.name for field in fields(PreTrainedConfig)}
    rules: dict[str, Any] = {}
    for field in fields(config_class):
        kind = name_kind(read_kinds(field.type))
        if kind and field.name not in base and "token_id" not in field.name:
            rules.setdefault(kind, []).append(field.name)
    rules = {kind: " ".join(sorted(names)) for kind, names in sorted(rules.items())}
    try:
        default = config_class()
    except Exception:  # some need an inner config: no more can be asked of them
        default = None
    # A config of any class says its own type; the one that stands where it says none follows the star.
    inner = {
        key: f"*{getattr(getattr(default, key, None), 'model_type', '')}"
        if found.__name__ == "AutoConfig"
        else found.model_type or found.__name__
        for key, found in config_class.sub_configs.items()
    }
    if inner:
        rules["inner"] = inner
    if default is None:
        return rules
    if layers := read_layers(config_class, default):
        rules["layers"] = layers
    if even := read_even(config_class, default):
        rules["even"] = even
    return rules


def read_all() -> dict[str, dict[str, Any]]:
    """model_type, or the class's name where it has none -> what its config class refuses."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    found: dict[str, dict[str, Any]] = {}
    waiting = [CONFIG_MAPPING[name] for name in sorted(CONFIG_MAPPING_NAMES)]
    for config_class in waiting:
        name = config_class.model_type or config_class.__name__
        if name in found:
            continue
        found[name] = read_class(config_class)
        waiting += [inner for inner in config_class.sub_configs.values() if inner.__name__ != "AutoConfig"]
    return dict(sorted(found.items()))


def make() -> str:
    import transformers
    from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES, ALLOWED_MLP_LAYER_TYPES

    transformers.logging.set_verbosity_error()
    words = {"layer_types": sorted(ALLOWED_ATTN_LAYER_TYPES), "mlp_layer_types": sorted(ALLOWED_MLP_LAYER_TYPES)}
    source = f"config classes of transformers {transformers.__version__}; made by docs/make_config_rules.py"
    lines = [f"{json.dumps(name)}: {json.dumps(rules)}" for name, rules in read_all().items()]
    head = f'{{\n"source": {json.dumps(source)},\n"words": {json.dumps(words)},\n"classes": {{\n'
    return head + ",\n".join(lines) + "\n}}\n"


def main() -> None:
    warnings.simplefilter("ignore")
    text = make()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if FILE.read_text(encoding="utf-8") == text else f"{FILE.name} is stale: run {Path(__file__).name}")
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
