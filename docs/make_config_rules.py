"""What transformers' config classes refuse goes in; model_specs/config_rules.json comes out.

python docs/make_config_rules.py            write it
python docs/make_config_rules.py --check    exit 1 if it is stale
"""

from __future__ import annotations

import ast
import json
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "model_specs" / "config_rules.json"


# Keys whose word the modelling code looks up in ACT2FN, and the config classes whose code does not.
ACTIVATION_KEYS = (
    "activation", "activation_function", "classifier_activation", "decoder_hidden_act", "encoder_hidden_act",
    "feat_extract_activation", "feed_forward_proj", "ff_activation", "hidden_act", "hidden_activation",
    "hidden_mamba_act", "mamba_hidden_act", "mlp_hidden_act", "projector_hidden_act",
)  # fmt: skip
OWN_ACTIVATION = (
    "blt_patcher", "dinov2", "gpt_oss", "llama4_vision_model", "minimax_m3_vl_text", "pop2piano", "radio", "step3p5",
)  # fmt: skip
OLD_ROPE_TYPES = ("mrope", "su", "xdrope")  # which config classes read as other ones
LISTS = {
    frozenset({"int"}): "list", frozenset({"number"}): "numbers", frozenset({"int", "number"}): "numbers",
    frozenset({"text"}): "texts", frozenset({"bool"}): "bools",
}  # fmt: skip
KINDS = {int: "int", float: "number", bool: "bool", str: "text", type(None): "null", None: "null"}


def read_kinds(annotation: Any) -> frozenset[str]:
    """What a field takes, as words; what config_rules.py does not check is 'other'."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return frozenset().union(*map(read_kinds, inner))
    if origin is typing.Literal:
        return frozenset({"words"}) if all(isinstance(word, str) for word in inner) else frozenset({"other"})
    if (origin or annotation) in (list, tuple, Sequence):
        entries = frozenset().union(*(read_kinds(each) for each in inner if each is not Ellipsis))
        return frozenset({LISTS.get(entries, "any list")})
    if is_table(origin or annotation):
        return frozenset({"table"})
    return frozenset({KINDS.get(annotation, "other") if isinstance(annotation, type | None) else "other"})


def is_table(found: Any) -> bool:
    from transformers import PreTrainedConfig

    return typing.is_typeddict(found) or (isinstance(found, type) and issubclass(found, (dict, PreTrainedConfig)))


def name_kind(kinds: frozenset[str]) -> str:
    """config_rules.py's kinds, with '?' where null is taken; empty where other values are taken too."""
    values = set(kinds - {"null"})
    # HF takes no 1 where it wants 1.0; a count does not depend on it, and published configs have both.
    for wide, narrow in (("number", {"int"}), ("numbers", {"list"}), ("any list", set(LISTS.values()))):
        values -= narrow if wide in values else set()
    known = "other" not in values and (len(values) == 1 or "words" not in values)
    return "|".join(sorted(values)) + "?" * ("null" in kinds) if known and values else ""


def read_words(annotation: Any) -> list[str]:
    """The words of a Literal, alone or beside null."""
    inner = typing.get_args(annotation)
    found = (
        inner if typing.get_origin(annotation) is typing.Literal else [w for each in inner for w in read_words(each)]
    )
    return [word for word in found if word is not None]


def is_refused(make: Callable[[], Any], words: str = "") -> bool:
    """Whether a config class refuses what it is given, with these words in its reason."""
    try:
        make()
    except Exception as error:  # whatever HF raises
        return words in str(error)
    return False


def is_positive(config_class: Any, key: str) -> bool:
    """Whether a field's own checks take whole numbers from 1."""
    checks = config_class.__validators__.get(key, [])
    return any(is_refused(partial(check, 0)) for check in checks) and not any(
        is_refused(partial(check, 1)) for check in checks
    )


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
    for own_name, word in (("layer_types", "full_attention"), ("mlp_layer_types", "dense")):
        pair = pick_two(getattr(default, own_name, None) or [word])
        others = {}
        if own_name == "mlp_layer_types" and getattr(default, "layer_types", None):
            others = {"layer_types": pick_two(default.layer_types)}
        for name in {own_name: 0, config_class.attribute_map.get(own_name, own_name): 0}:

            def make(words: list[str], name: str = name, others: Any = others) -> Any:
                return config_class(**{key: 2, **others, name: words})

            wrong = (pair[:1], [*pair, pair[0]], ["no such word", pair[1]])
            if not is_refused(lambda make=make, pair=pair: make(pair)) and all(
                is_refused(lambda make=make, each=each: make(each)) for each in wrong
            ):
                found[name] = [key, count]
    return found


def read_even(config_class: Any, default: Any) -> list[str]:
    """Expressions for the head dim that rotary embeddings turn, where an odd one is refused."""
    heads = getattr(default, "num_attention_heads", None)
    tries: dict[str, dict[str, int]] = {"head_dim": {"head_dim": 7}, "qk_rope_head_dim": {"qk_rope_head_dim": 7}}
    if isinstance(heads, int) and hasattr(default, "hidden_size"):
        tries["hidden_size / num_attention_heads"] = {"hidden_size": 7 * heads, "num_attention_heads": heads}
    names = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    above = " above 4" if config_class.model_type in UNTURNED else ""
    return [
        f"{text}{above}"
        for text, given in tries.items()
        if set(given) <= names | {"head_dim"} and is_refused(lambda given=given: config_class(**given), "even rotary")
    ]


# Parts that a model may hold and never run: HF's class alone refuses their heads, and takes odd ones of up to 4.
UNTURNED = ("blt_patcher", "mimi", "mimi_decoder", "mimi_encoder")


# Parameters that modelling code makes in float32, whatever the model's format is; from_pretrained leaves them so.
MADE_IN_FLOAT32 = {"hunyuan_v1_moe": [r"\.wg\."], "olmo_hybrid": ["A_log"], "zamba": ["A_log"]}
KEPT = {"_keep_in_fp32_modules": "fp16", "_keep_in_fp32_modules_strict": "half"}


@cache
def read_float32(folder: Path) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Names that classes of a model keep in float32: those of its base class, and all: 'fp16' or 'half' -> names."""
    base: dict[str, list[str]] = {}
    every: dict[str, list[str]] = {}
    for path in sorted(folder.glob("modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "_keep_in_fp32_modules" not in text:
            continue
        for node in ast.parse(text).body:
            for entry in node.body if isinstance(node, ast.ClassDef) else ():
                key = KEPT.get(getattr(entry.targets[0], "id", "")) if isinstance(entry, ast.Assign) else None
                names = ast.literal_eval(entry.value) if isinstance(entry, ast.Assign) and key else None
                if key and names:
                    for kept in (every, base) if node.name.endswith("PreTrainedModel") else (every,):
                        kept[key] = sorted({*kept.get(key, ()), *names})
    made = MADE_IN_FLOAT32.get(folder.name, [])
    for kept in (base, every):
        if made:
            kept["half"] = sorted({*kept.get("half", ()), *made})
    return base, every


def read_activations(config_class: Any, default: Any, words: list[str]) -> dict[str, str]:
    """Keys that must name an activation, and those that may be null: 'act', 'act?'."""
    fields = config_class.__dataclass_fields__
    acts = {name: fields[name].default is None for name in words if name in ACTIVATION_KEYS and name in fields}
    if hasattr(default, "dense_act_fn"):  # T5's classes make it of feed_forward_proj, and keep a given one
        acts["dense_act_fn"] = False
    if config_class.model_type in OWN_ACTIVATION:
        acts = {name: acts[name] for name in acts if name == "dense_act_fn"}
    kinds = {"act": [name for name in acts if not acts[name]], "act?": [name for name in acts if acts[name]]}
    return {kind: " ".join(names) for kind, names in kinds.items() if names}


def list_other_names(config_class: Any, key: str) -> list[str]:
    """What attribute_map calls a field too, but where the class has a field or a property of that name."""
    pairs = config_class.attribute_map.items()
    found = [name for name, own in pairs if own == key] + [own for name, own in pairs if name == key]
    return [name for name in found if name not in config_class.__dataclass_fields__ and not hasattr(config_class, name)]


def read_class(config_class: Any) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    base = {field.name for field in fields(PreTrainedConfig)}
    rules: dict[str, Any] = {}
    for field in fields(config_class):
        kind = name_kind(read_kinds(field.type)) if field.name not in config_class.sub_configs else ""
        if kind and field.name not in base and "token_id" not in field.name:
            rules.setdefault(kind, []).append(field.name)
            rules[kind] += list_other_names(config_class, field.name)
            if kind.startswith("int") and is_positive(config_class, field.name):
                rules.setdefault("positive", []).append(field.name)
        if kind == "bool?" and isinstance(field.default, bool):
            rules.setdefault("falsy", []).append(field.name)  # null is no value of its own: the code asks if it is true
    rules = {kind: " ".join(sorted(names)) for kind, names in sorted(rules.items())}
    for kind in ("words", "words?"):
        if names := rules.pop(kind, "").split():
            rules[kind] = {name: read_words(config_class.__dataclass_fields__[name].type) for name in names}
    try:
        default = config_class()
    except Exception:  # some need an inner config: no more can be asked of them
        default = None
    rules |= read_activations(config_class, default, f"{rules.get('text', '')} {rules.get('text?', '')}".split())
    # A config of any class says its own type; the one that stands where it says none follows the star.
    inner = {
        key: f"*{getattr(getattr(default, key, None), 'model_type', '')}"
        if found.__name__ == "AutoConfig"
        else found.model_type or found.__name__
        for key, found in config_class.sub_configs.items()
    }
    if inner:
        rules["inner"] = inner
    code = sys.modules[config_class.__module__].__file__
    base, every = read_float32(Path(str(code)).parent)
    # Lists of a class that joins models hold for its config; those of the base class for every config beside it.
    if kept := every if inner or config_class.model_type == Path(str(code)).parent.name else base:
        rules["float32"] = kept
    if default is None:
        return rules
    rules |= read_rope(config_class, default)
    if layers := read_layers(config_class, default):
        rules["layers"] = layers
    if even := read_even(config_class, default):
        rules["even"] = even
    return rules


def list_rope_tables(config: Any) -> list[dict[str, Any]]:
    """The table of rotary embeddings, or one for each kind of layer."""
    table = getattr(config, "rope_parameters", None) or {}
    return [each for each in table.values() if isinstance(each, dict)] or [table] if isinstance(table, dict) else []


def read_rope(config_class: Any, default: Any) -> dict[str, str]:
    """Keys that may not be null: those of the class's own table, and the base outside of it where that is read."""
    inside = sorted({key for table in list_rope_tables(default) for key in table if table[key] is not None})
    if not inside:
        return {}
    try:
        is_read = any(table.get("rope_theta", 0) is None for table in list_rope_tables(config_class(rope_theta=None)))
    except Exception:  # refused at once
        is_read = True
    nested = [key for key, table in default.rope_parameters.items() if isinstance(table, dict)]
    try:
        flat = config_class(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}).rope_parameters
    except Exception:  # refused at once
        flat = {}
    return (
        {"rope": " ".join(inside)}
        | ({"rope_outside": "rope_theta"} if is_read else {})
        | ({"rope_tables": " ".join(sorted(nested))} if nested and not set(nested) <= set(flat) else {})
    )


def read_rope_needs() -> dict[str, list[str]]:
    """What a table of rotary embeddings must hold beside its type and base, by type."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    needs: dict[str, list[str]] = {}
    for rope_type in sorted(ROPE_INIT_FUNCTIONS):
        try:
            LlamaConfig(rope_parameters={"rope_type": rope_type})
        except Exception as error:  # HF's own words name the missing keys: {'factor'}
            needs[rope_type] = sorted(re.findall(r"'(\w+)'", str(error).rpartition("{")[2]))
    return needs


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
    from transformers.activations import ACT2FN
    from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES, ALLOWED_MLP_LAYER_TYPES
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    transformers.logging.set_verbosity_error()
    attention = sorted(ALLOWED_ATTN_LAYER_TYPES)
    words = {
        "act": sorted(ACT2FN),
        "layer_types": attention,
        "layers_block_type": attention,
        "mlp_layer_types": sorted(ALLOWED_MLP_LAYER_TYPES),
        "rope_needs": read_rope_needs(),
        "rope": sorted({"axial", "default", *ROPE_INIT_FUNCTIONS, *OLD_ROPE_TYPES}),
    }
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
