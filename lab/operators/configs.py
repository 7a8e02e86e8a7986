"""Tiny configs to record operators from: examples with published configs' flags, in several sizes."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from fractions import Fraction
from functools import cache
from typing import Any

from flopcalc.base.data import list_data_files
from flopcalc.base.errors import ConfigError, FlopcalcError
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.config import load_config
from flopcalc.core.model.ops import Attend, iterate
from flopcalc.core.spec.spec import find_spec
from flopcalc.measure.hf.examples import Example, make_estimator
from flopcalc.prediction.recordings import (
    SWITCHES,
    find_language,
    read_switches,
    sign_layer,
    sign_outside,
    sign_switches,
)

Json = dict[str, Any]
_WIDTHS = {"hidden_size", "embed_dim", "n_embd", "d_model", "word_embed_proj_dim", "out_hidden_size", "projection_dim"}
_HEADS = {"num_attention_heads", "num_key_value_heads", "num_heads", "n_head"}
_INNER = {"intermediate_size", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner"}
_WORDS = {"vocab_size", "vocab_size_per_layer_input"}
CHOSEN = {"num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"}  # experts of a token
_FLAGS = {
    "sliding_window",
    *SWITCHES,
    *(name for names in SWITCHES.values() for name in names),
}  # numbers that are none


def find_attention(model_type: str) -> str:
    """The attention that HF's class takes where nothing is said."""
    spec = find_spec(model_type)
    return "sdpa" if spec is None or spec.has_sdpa else "eager"


def resize(
    config: Json, widths: int, heads: int, inner: int, words: int, keys: int = 0, *, is_all: bool = False
) -> Json:
    """The same model with other sizes: widths and heads times so much, and so on; heads of keys as heads, or `keys`.

    With `is_all` also ranks, and how many experts a token has: else these would look like plain numbers.
    """
    out: Json = {}
    for key, value in config.items():
        if isinstance(value, dict):
            out[key] = resize(value, widths, heads, inner, words, keys, is_all=is_all)
        elif key == "mrope_section":
            out[key] = [entry * widths // heads for entry in value]
        elif type(value) is not int:
            out[key] = value
        elif key in _WIDTHS:
            out[key] = value * widths
        elif key == "num_key_value_heads" and keys:
            out[key] = value * keys
        elif key in _HEADS:
            out[key] = value * heads
        elif key in _INNER:
            out[key] = value * inner
        elif key in _WORDS:
            out[key] = value + words
        elif key in CHOSEN and is_all:
            out[key] = value + 1
        elif key == "head_dim":
            out[key] = value * widths // heads
        elif key.endswith(("_lora_rank", "_head_dim")) and is_all:
            out[key] = value * 2
        else:
            out[key] = value
    return out


def put_flags(tiny: Json, published: Json) -> Json:
    """A tiny config with a published one's flags: what is true or false, a word or a fraction; no sizes."""
    out = deepcopy(tiny)
    for key, value in tiny.items():
        if isinstance(value, (bool, float)) and key not in published:
            del out[key]  # the config class's own
    for key, value in published.items():
        if isinstance(value, dict) and isinstance(tiny.get(key), dict):
            out[key] = put_flags(tiny[key], value)
        elif isinstance(value, (bool, str, float)) or key in _FLAGS:
            out[key] = value
        elif value is None and isinstance(tiny.get(key), int):  # a module that is not there: q_lora_rank
            out[key] = None
    out.pop("architectures", None)
    return out


def deepen(config: Json) -> Json:
    """At least four layers: a first, a last, and two between them; at least two heads of keys."""
    out: Json = {key: deepen(value) if isinstance(value, dict) else value for key, value in config.items()}
    if "no_rope_layers" in out or "no_rope_layer_interval" in out:  # as real ones: the last of four does not rotate
        out.pop("no_rope_layers", None)
        out["no_rope_layer_interval"] = 4
    if isinstance(out.get("moe_topk"), list):  # all layers alike
        out["moe_topk"] = out["moe_topk"][0]
    is_listed = any(isinstance(value, list) and "layer" in key for key, value in out.items())
    for key in ("num_hidden_layers", "depth", "n_layer"):
        if isinstance(out.get(key), int) and not is_listed:
            out[key] = max(4, out[key])
    return out


def widen(config: Json) -> Json:
    """Two heads of keys where there is one: a dimension of one entry hides how tensors lie in memory."""
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    has_one = any(part.get("num_key_value_heads") == 1 for part in parts)
    return resize(config, 2, 2, 1, 0) if has_one else config


def ungroup(config: Json) -> Json:
    """As many heads of keys as there are heads, in the language model."""
    out = deepcopy(config)
    own = out.get("text_config", out)
    if "num_key_value_heads" in own:
        own["num_key_value_heads"] = own["num_attention_heads"]
    return out


def has_groups(config: Json) -> bool:
    """Whether heads may share keys, in the language model; not where as many heads of keys as heads are given."""
    own = config.get("text_config", config)
    keys = own.get("num_key_value_heads")
    return keys is None or bool(keys != own.get("num_attention_heads"))


def retype(config: Json, model_type: str) -> Json:
    """The same with a language model of another type."""
    return {**config, "text_config": {**config["text_config"], "model_type": model_type}}


def round_heads(example: Example, config: Json) -> Json:
    """Longer heads where the share of one that is rotated is no even number, as it is in every real model."""
    share = find_share(config)
    longer = resize(config, share.denominator, 1, 1, 0)
    try:
        stages = make_estimator(example, config).stages if share != 1 else ()
    except ConfigError:  # the spec refuses an odd number
        return longer
    ops = [op for stage in stages if stage.group == "language" for chain in stage.layers for op in iterate(chain)]
    is_even = all(op.qk * share % 2 == 0 for op in ops if isinstance(op, Attend))
    return config if is_even else longer


def set_window(config: Json, window: int) -> Json:
    out = dict(config)
    for key, value in config.items():
        if isinstance(value, dict):
            out[key] = set_window(value, window)
        elif key == "sliding_window" and isinstance(value, int) and not isinstance(value, bool):
            out[key] = window
    return out


def find_share(config: Mapping[str, object]) -> Fraction:
    """How much of a head is rotated."""
    name, own = find_language(config)
    share = {**find_usual(name), **read_switches(own)}.get("partial_rotary_factor", 1)
    return Fraction(share).limit_denominator(64)


@cache
def find_usual(model_type: str) -> Json:
    """The switches as a language model's config class sets them where a config says nothing."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return {}
    return read_switches(CONFIG_MAPPING[model_type]().get_text_config().to_dict())


def find_switches(estimator: Estimator) -> str:
    """The switches that a model's config sets otherwise than its class."""
    config = estimator.source.config
    name = find_language(config)[0]
    return sign_switches(config, {name: find_usual(name)})


def lengthen(config: Json, more: int) -> Json:
    """A longer window where it is a tiny one: else its length would look like a plain number."""
    out = {key: lengthen(value, more) if isinstance(value, dict) else value for key, value in config.items()}
    window = out.get("sliding_window")
    if isinstance(window, int) and window < 8:
        out["sliding_window"] = window + more
    return out


def _inner_types(config: Json) -> list[str]:
    return [str(value["model_type"]) for value in config.values() if isinstance(value, dict) and "model_type" in value]


@cache
def list_presets() -> dict[str, list[Json]]:
    found: dict[str, list[Json]] = defaultdict(list)
    for name in list_data_files("presets"):
        try:
            config = load_config(name).config
        except FlopcalcError:
            continue
        found[str(config["model_type"])].append(config)
    return found


def list_variants(example: Example) -> Iterator[tuple[list[Json], bool]]:
    """Sets of configs that differ in sizes alone, with each published config's flags; then with the examples' own.

    The second value says whether a set is all that there is to record: published, or nothing is.
    """
    seen, layers = set(), set[str]()
    presets = list_presets().get(example.model_type, [])
    flags = [(tiny, preset, True) for preset in presets for tiny in example.configs]
    flags += [(tiny, preset, True) for preset in presets for tiny in list_stand_ins(example, preset)]
    flags += [(tiny, tiny, not presets) for tiny in example.configs]
    if not presets:  # published ones may have as many heads of keys as heads, and their class's own dropout
        flags += [(tiny, tiny, True) for tiny in map(ungroup, example.configs)]
        flags += [(tiny, {key: tiny[key] for key in tiny if "drop" not in key}, True) for tiny in example.configs]
    for tiny, preset, is_whole in flags:
        if [t for t in _inner_types(preset) if t not in _inner_types(tiny)]:
            continue
        try:
            base = make_tiny(example, tiny, preset)
            estimator = make_estimator(example, base)
        except FlopcalcError as error:
            print("   ", example.model_type, "left out:", error, file=sys.stderr)
            continue
        signature = describe(estimator)
        if signature in seen:
            continue
        kinds = {
            sign_layer(s, chain, find_switches(estimator)) for s in estimator.stages if s.repeated for chain in s.layers
        }
        if preset is not tiny and not presets and kinds <= layers:  # with its class's own dropout all was seen
            continue
        seen.add(signature)
        layers |= kinds
        configs = [base]
        for more, factors in enumerate(((2, 1, 3, 10), (8, 4, 5, 14, 2), (2, 2, 2, 6)), 1):
            if len(factors) == 4 or has_groups(base):
                configs.append(lengthen(resize(base, *factors, is_all=more > 1), more))
        for other in example.configs:
            if other is not tiny and _inner_types(other) == _inner_types(tiny):
                with suppress(FlopcalcError):
                    configs.append(make_tiny(example, other, preset))
        alike = [config for config in configs if _is_alike(example, config, signature)]
        yield alike[:3], is_whole


def make_tiny(example: Example, tiny: Json, preset: Json) -> Json:
    """A tiny config with a published one's flags, large enough to show what real ones do."""
    config = put_flags(tiny, preset)
    if find_share(config) != find_share(tiny):
        config = fit_sections(config)
    made = round_heads(example, widen(deepen(config)))
    if example.model_type == "albert":  # its layers are one module: one call of it, not the sum of all
        made |= {"num_hidden_layers": 1, "num_hidden_groups": 1, "inner_group_num": 1}
    text = made.get("text_config", {})
    if "max_position_embeddings" in text:  # room for the longer of two workloads with images
        text["max_position_embeddings"] = max(32, text["max_position_embeddings"])
    return made


def fit_sections(config: Json) -> Json:
    """Heads so much longer that sections which filled a whole one fill the share that is rotated."""
    share = find_share(config)
    out = resize(config, share.denominator, 1, 1, 0)
    rope = out.get("text_config", out).get("rope_parameters") or {}
    if "mrope_section" not in rope:
        return config
    rope["mrope_section"] = [entry * share.numerator // share.denominator for entry in rope["mrope_section"]]
    return out


def list_stand_ins(example: Example, preset: Json) -> Iterator[Json]:
    """Tiny configs made for a published one of which no example has the kind: of language, or of heads of keys."""
    tinies = example.configs
    own = find_language(preset)[0]
    types = [each for each in _inner_types(preset) if each != own]
    if "text_config" in preset and not any(own in _inner_types(tiny) for tiny in tinies):
        near = [tiny for tiny in tinies if "text_config" in tiny and all(each in _inner_types(tiny) for each in types)]
        tinies = [retype(tiny, own) for tiny in near[:1]]
        yield from tinies
    try:
        signature = describe(make_estimator(example, preset))
    except FlopcalcError:
        return
    if "+grouped" not in signature:
        yield from map(ungroup, tinies)


def describe(estimator: Estimator) -> str:
    switches = find_switches(estimator)
    kinds = sorted(
        {f"{stage.path}: {sign_layer(stage, chain, switches)}" for stage in estimator.stages for chain in stage.layers}
    )
    return "\n".join([sign_outside(estimator.stages, switches), *kinds])


def _is_alike(example: Example, config: Json, signature: str) -> bool:
    try:
        return describe(make_estimator(example, config)) == signature
    except FlopcalcError:
        return False
