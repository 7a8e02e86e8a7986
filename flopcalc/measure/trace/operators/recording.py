"""Records the operators of HF's models: model_specs/operators/<model type>.json.

    python tests/truth/record_operators.py [--check] [TYPE ...]

Tiny models of every type are traced with several sizes and workloads; each tensor's elements are then written as
coefficient x sum of the workload x sizes of the model, which holds in every trace. --check compares what the files say
with a trace of sizes that no file was made from, and ends with 1 where bytes or calls are more than 15 % apart: what no
expression was found for is roughly in proportion to tokens, and weighs more in tiny models than in real ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from copy import deepcopy
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.config import load_config
from flopcalc.core.model.ops import iterate
from flopcalc.core.workload.workload import Workload, make_workload
from flopcalc.data import list_data_files
from flopcalc.errors import FlopcalcError
from flopcalc.measure.hf.examples import Example, find_example, make_estimator, make_inputs
from flopcalc.measure.hf.models import build_model, floats_on_meta
from flopcalc.measure.hf.verify import prepare
from flopcalc.measure.trace.dispatch import Event, Kept, Trace, trace_operators
from flopcalc.prediction.operators import (
    SWITCHES,
    find_language,
    list_features,
    list_operators,
    list_sizes,
    list_windows,
    read_switches,
    sign_layer,
    sign_outside,
    sign_switches,
)

Json = dict[str, Any]
FOLDER = Path(__file__).parents[2] / "model_specs" / "operators"
TYPES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "gpt2",
    "gpt_neox",
    "opt",
    "olmo2",
    "granite",
    "stablelm",
    "starcoder2",
    "cohere",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "llava",
    "llava_next",
    "paligemma",
    "smollm3",
    "glm4",
    "gemma3",
]
DEVICE = "cpu"  # tiny models run faster there than on meta
PHASES = ("train", "flow", "forward", "prefill", "decode")

# --- Configs ----------------------------------------------------------------------------------------------------------

_WIDTHS = {"hidden_size", "embed_dim", "n_embd", "d_model", "word_embed_proj_dim", "out_hidden_size", "projection_dim"}
_HEADS = {"num_attention_heads", "num_key_value_heads", "num_heads", "n_head"}
_INNER = {"intermediate_size", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner"}
_FLAGS = {
    "sliding_window",
    *SWITCHES,
    *(name for names in SWITCHES.values() for name in names),
}  # numbers that are none


def resize(config: Json, widths: int, heads: int, inner: int, words: int, keys: int = 0) -> Json:
    """The same model with other sizes: widths and heads times so much, and so on; heads of keys as heads, or `keys`."""
    out: Json = {}
    for key, value in config.items():
        if isinstance(value, dict):
            out[key] = resize(value, widths, heads, inner, words, keys)
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
        elif key == "vocab_size":
            out[key] = value + words
        elif key == "num_experts_per_tok" and keys:
            out[key] = value + 1
        elif key == "head_dim":
            out[key] = value * widths // heads
        elif key.endswith(("_lora_rank", "_head_dim")) and keys:
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
    out.pop("architectures", None)
    return out


def deepen(config: Json) -> Json:
    """At least four layers: a first, a last, and two between them; at least two heads of keys."""
    out = {key: deepen(value) if isinstance(value, dict) else value for key, value in config.items()}
    if "no_rope_layers" in out or "no_rope_layer_interval" in out:  # as real ones: the last of four does not rotate
        out.pop("no_rope_layers", None)
        out["no_rope_layer_interval"] = 4
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


def retype(config: Json, model_type: str) -> Json:
    """The same with a language model of another type."""
    return {**config, "text_config": {**config["text_config"], "model_type": model_type}}


def round_heads(example: Example, config: Json) -> Json:
    """Longer heads where the share of one that is rotated is no even number, as it is in every real model."""
    share = find_share(config)
    stages = make_estimator(example, config).stages if share != 1 else ()
    ops = [op for stage in stages if stage.group == "language" for chain in stage.layers for op in iterate(chain)]
    is_even = all(op.qk * share % 2 == 0 for op in ops if op.kind == "attend")
    return config if is_even else resize(config, share.denominator, 1, 1, 0)


def find_share(config: Mapping[str, Any]) -> Fraction:
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
    seen = set()
    presets = list_presets().get(example.model_type, [])
    flags = [(tiny, preset, True) for preset in presets for tiny in example.configs]
    flags += [(tiny, preset, True) for preset in presets for tiny in list_stand_ins(example, preset)]
    flags += [(tiny, tiny, not presets) for tiny in example.configs]
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
        seen.add(signature)
        configs = [base]
        for more, factors in enumerate(((2, 1, 3, 10), (8, 4, 5, 14, 2), (2, 2, 2, 6)), 1):
            configs.append(lengthen(resize(base, *factors), more))
        for other in example.configs:
            if other is not tiny and _inner_types(other) == _inner_types(tiny):
                with suppress(FlopcalcError):
                    configs.append(make_tiny(example, other, preset))
        alike = [config for config in configs if _is_alike(example, config, signature)]
        yield alike[:3], is_whole


def make_tiny(example: Example, tiny: Json, preset: Json) -> Json:
    """A tiny config with a published one's flags, large enough to show what real ones do."""
    return round_heads(example, widen(deepen(put_flags(tiny, preset))))


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


# --- Traces -----------------------------------------------------------------------------------------------------------


class Run:
    """One trace, with the values of everything that an expression may name."""

    def __init__(self, estimator: Estimator, load: Workload, trace: Trace) -> None:
        self.estimator = estimator
        self.features = list_features(estimator, load)
        self.trace = trace


def is_masked(estimator: Estimator, keys: int) -> bool:
    """Whether HF makes a mask for SDPA: a window that is no longer than the keys."""
    return bool(list_windows(estimator, keys))


def list_workloads(example: Example, phase: str, has_images: bool) -> list[Json]:
    if has_images:
        # One image a sample, then two; of two grids where the tower takes any, but all images of a run alike.
        first, last = example.images[0], example.images[-1]
        room = max(first["seq"], last["seq"])
        return [
            {**first, "batch": 2, "seq": room, "images": first["images"][:1]},
            {**first, "batch": 3, "seq": 2 * room + 4, "images": last["images"][-1:] * 2},
        ]
    if phase == "decode":
        return [{"batch": 2, "seq": 1, "context": 11}, {"batch": 3, "seq": 1, "context": 18}]
    return [{"batch": 2, "seq": 13}, {"batch": 3, "seq": 19}]


def run(example: Example, config: Json, phase: str, attention: str, workload: Json) -> Run:
    model, estimator = build(example.model_type, json.dumps(config), attention)
    model.requires_grad_(True)
    model.zero_grad(set_to_none=True)
    for module in model.modules():
        if hasattr(module, "rope_deltas"):  # positions that the run before has left behind
            module.rope_deltas = None
    return Run(estimator, make_load(workload, phase), trace(model, example, estimator, phase, workload))


@lru_cache(maxsize=8)
def build(model_type: str, text: str, attention: str) -> tuple[Any, Estimator]:
    example, config = find_example(model_type), json.loads(text)
    estimator = make_estimator(example, config)
    architecture = example.architecture or estimator.spec.architecture
    has_experts = any(op.copies > 1 for stage in estimator.stages for chain in stage.layers for op in iterate(chain))
    experts = "grouped_mm" if has_experts else None
    try:
        model = build_model(config, attention, experts, DEVICE, torch.bfloat16, architecture=architecture)
    except ValueError as error:
        if experts is None or "experts" not in str(error):
            raise
        model = build_model(config, attention, "eager", DEVICE, torch.bfloat16, architecture=architecture)
    return model, estimator


def make_load(workload: Json, phase: str) -> Workload:
    grids = [grid for _ in range(workload["batch"]) for grid in workload.get("images", [])]
    return make_workload(
        workload["batch"], workload["seq"], image_grid_thw=grids or None, context=workload.get("context"),
        phase="train" if phase == "flow" else phase,
    )  # fmt: skip


def trace(model: Any, example: Example, estimator: Estimator, phase: str, workload: Json) -> Trace:
    """Every operator of one step; 'flow' is a training step in which no weight trains but gradients pass."""
    handles = []
    with floats_on_meta() if DEVICE == "meta" else nullcontext():
        model.train(phase in ("train", "flow"))
        if phase == "flow":
            handles = let_through(model, estimator)
        inputs = make_inputs(example, model.config, workload, estimator, DEVICE)
        extra: Json = dict(example.call)
        if phase == "decode":
            context = make_inputs(example, model.config, {**workload, "seq": workload["context"]}, estimator, DEVICE)
            filled: list[Any] = []
            fill = no_grad(lambda: filled.append(model(**context, use_cache=True, **extra).past_key_values))
            trace_operators(model, fill)  # for its stand-in of grouped products
            past = filled[0]
            token = torch.full((workload["batch"], 1), 3)
            return trace_operators(model, no_grad(lambda: model(input_ids=token, past_key_values=past, use_cache=True)))
        extra["use_cache"] = phase == "prefill"  # models that do not name it hand it on
        if phase == "prefill":
            extra["logits_to_keep"] = 1
        if phase in ("forward", "prefill"):
            return trace_operators(model, no_grad(lambda: model(**inputs, **extra)))
        labels = inputs["input_ids"].clone()
        found = trace_operators(model, lambda: model(**inputs, labels=labels, **extra).loss)
    for handle in handles:
        handle.remove()
    return found


def no_grad(call: Any) -> Any:
    def forward() -> None:
        with torch.no_grad():
            call()

    return forward


def let_through(model: Any, estimator: Estimator) -> list[Any]:
    """Freeze every weight; what an embedding makes requires a gradient instead."""
    model.requires_grad_(False)

    def require(_module: Any, _args: Any, output: Any) -> Any:
        return output.requires_grad_(True)

    modules = dict(model.named_modules())
    handles = []
    for stage in estimator.stages:
        for op in iterate(stage.layers[0]) if not stage.repeated else ():
            path = f"{stage.path}.{op.name}" if op.name else stage.path
            if op.kind in ("embed", "conv") and path in modules:
                handles.append(modules[path].register_forward_hook(require))
    return handles


# --- Places -----------------------------------------------------------------------------------------------------------

Place = tuple[str, int | None, str]  # stage or "", layer, module inside it


def place(estimator: Estimator, path: str) -> Place:
    for stage in estimator.stages:
        if stage.repeated and path.startswith(stage.path + "."):
            layer, _, name = path[len(stage.path) + 1 :].partition(".")
            if layer.isdigit():
                return stage.path, int(layer), name
    return "", None, path


def fold(name: str) -> str:
    return ".".join("#" if part.isdigit() and "experts" in name else part for part in name.split("."))


# --- Fitting ----------------------------------------------------------------------------------------------------------

_NUMBERS = (1, 2, 3, 4, 6, 8)


@cache
def list_coefficients(part: int = 1) -> dict[Fraction, int]:
    """Coefficients with their costs; those of a share of a head come with its denominator."""
    return {
        each: (each.numerator != 1) + (each.denominator != 1) + (each.numerator > 4) + (each.denominator > 4)
        for each in {Fraction(n, d) for n in _NUMBERS for d in (1, 2, 3, 4, 8, part)}
    }


class Fitter:
    """Finds coefficient x feature x sizes for numbers that were seen in several runs."""

    def __init__(self, features: list[Mapping[str, int]], sizes: list[Mapping[str, int]], part: int = 1) -> None:
        self.coefficients = list_coefficients(part)
        names = [name for name in sizes[0] if all(name in other for other in sizes)]
        self.features: dict[tuple[int, ...], str] = {}
        for name in features[0]:
            vector = tuple(each.get(name, 0) for each in features)
            if all(vector):
                self.features.setdefault(vector, name)
        self.sizes: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in names:
            self.sizes[tuple(each[name] for each in sizes)].append(name)
        self.approximate = 0
        self._found: dict[tuple[tuple[int, ...], str], str] = {}

    def fit(self, numbers: tuple[int, ...], module: str) -> str | None:
        key = (numbers, module)
        if key not in self._found:
            self._found[key] = self._fit(numbers, module)
        return self._found[key] or None

    def _fit(self, numbers: tuple[int, ...], module: str) -> str:
        best: tuple[Any, ...] | None = None
        ones = (1,) * len(numbers)
        vectors: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = [(ones, ())]
        listed = list(self.sizes)
        vectors += [(vector, (vector,)) for vector in listed]
        for i, first in enumerate(listed):
            for second in listed[i:]:
                vectors.append((tuple(a * b for a, b in zip(first, second, strict=True)), (first, second)))
        for rank, (feature, name) in enumerate(self.features.items()):
            for vector, used in vectors:
                bottom = feature[0] * vector[0]
                if any(
                    number * bottom != numbers[0] * f * v for number, f, v in zip(numbers, feature, vector, strict=True)
                ):
                    continue
                coefficient = Fraction(numbers[0], bottom)
                cost = self.coefficients.get(coefficient)
                if cost is None:
                    continue
                names, distance = self._name(used, module)
                # A size that is the same in every run may as well be a plain number.
                fixed = sum(len(set(each)) == 1 for each in used)
                score = (len(used) + cost + fixed, len(used), distance, rank)
                if best is None or score < best[0]:
                    best = (score, coefficient, name, names)
        if best is None:
            return ""
        _, coefficient, name, names = best
        parts = [] if coefficient == 1 else [str(coefficient)]
        return "*".join([*parts, name, *names])

    def _name(self, used: Iterable[tuple[int, ...]], module: str) -> tuple[list[str], int]:
        names, distance = [], 0
        for vector in used:
            options = [(_distance(name, module), place, name) for place, name in enumerate(self.sizes[vector])]
            far, _, name = min(options)
            own, _, attribute = name.rpartition(".")
            names.append(f".{attribute}" if own and own in (module, f"/{module}") else name)
            distance += far
        return names, distance


def _distance(name: str, module: str) -> int:
    """How far a size's op lies from a module: 0 in it, more outside; whole-model names last."""
    own = name.lstrip("/").replace(":", ".").rpartition(".")[0].split(".")
    here = module.split(".")
    shared = 0
    for a, b in zip(own, here, strict=False):
        if a != b:
            break
        shared += 1
    return len(own) + len(here) - 2 * shared + (3 if name.startswith("/") and module and ":" in name else 0)


Row = tuple[str, str, Any, str, str]  # direction, kind, count, reads, writes


def fit_events(lists: list[list[Event]], fitter: Fitter, module: str, widest: tuple[int, ...]) -> list[Row]:
    """Rows that hold in every run."""
    names = [[(event.direction, event.name, _letters(event)) for event in events] for events in lists]
    if all(other == names[0] for other in names):
        found: Counter[tuple[str, str, str, str]] = Counter()
        for events in zip(*lists, strict=True):
            reads = fit_tensors([event.reads for event in events], fitter, module, widest)
            writes = fit_tensors([event.writes for event in events], fitter, module, widest)
            found[events[0].direction[0], events[0].kind, reads, writes] += 1
        return sorted((d, kind, count, reads, writes) for (d, kind, reads, writes), count in found.items())
    # A loop over images: as many operators as there are of them; sizes are of all calls together.
    rows: list[Row] = []
    kinds = [
        [(*name, event.kind) for event, name in zip(*pair, strict=True)] for pair in zip(lists, names, strict=True)
    ]
    for key in sorted({key for each in kinds for key in each}):
        groups = [
            [event for event, name in zip(events, each, strict=True) if name == key]
            for events, each in zip(lists, kinds, strict=True)
        ]
        for alike in split_sizes(groups):
            count = fit_count(tuple(map(len, alike)), fitter, module)
            reads, writes = (
                fit_tensors(
                    [add_up([event[side] for event in group], letters) for group in alike], fitter, module, widest
                )
                for side, letters in zip((4, 5), key[2], strict=True)
            )
            is_plain = isinstance(count, int) and not reads and not writes
            rows.append(
                (
                    key[0][0],
                    key[3],
                    count if is_plain else f"n*{count}".replace("n*n", "n"),
                    reads,
                    writes,
                )
            )
    return merge_rows(rows)


def merge_rows(rows: list[Row]) -> list[Row]:
    """Rows of one kind that move nothing, together, where their calls are plain numbers."""
    plain: Counter[tuple[str, str]] = Counter()
    rest = []
    for row in rows:
        if isinstance(row[2], int):
            plain[row[0], row[1]] += row[2]
        else:
            rest.append(row)
    return sorted([*rest, *((way, kind, count, "", "") for (way, kind), count in plain.items())], key=str)


def split_sizes(groups: list[list[Event]]) -> list[list[list[Event]]]:
    """Operators of one name by their sizes, where every run has as many different ones; else all together."""
    sizes = [list(dict.fromkeys((event.writes, event.reads) for event in group)) for group in groups]
    if len({len(each) for each in sizes}) != 1:
        return [groups]
    return [
        [
            [event for event in group if (event.writes, event.reads) == each[n]]
            for group, each in zip(groups, sizes, strict=True)
        ]
        for n in range(len(sizes[0]))
    ]


def add_up(sizes: list[Any], letters: str) -> tuple[tuple[str, int], ...]:
    """Operand by operand where all have as many, else all operands of a dtype together."""
    if all(len(each) == len(letters) for each in sizes):
        return tuple((letter, sum(each[j][1] for each in sizes)) for j, letter in enumerate(letters))
    return add_all(sizes, letters)


def add_all(sizes: list[Any], letters: str) -> tuple[tuple[str, int], ...]:
    """(dtype, elements of all its operands)."""
    return tuple(
        (each, sum(count for size in sizes for letter, count in size if letter == each))
        for each in dict.fromkeys(letters)
    )


def _letters(event: Event) -> tuple[str, str]:
    reads = "".join(letter for letter, _ in event.reads)
    return "".join(dict.fromkeys(reads)) if event.name == "cat" else reads, "".join(each for each, _ in event.writes)


def fit_count(numbers: tuple[int, ...], fitter: Fitter, module: str) -> int | str:
    if len(set(numbers)) == 1:
        return numbers[0]
    text = fitter.fit(numbers, module) if all(numbers) else None
    if text is not None:
        return f"n*{text}"
    loops = ("images", "frames", "panes")
    for vector, name in sorted(fitter.features.items(), key=lambda item: item[1] not in loops):
        rises = {(b - a, y - x) for a, b, x, y in zip(vector, vector[1:], numbers, numbers[1:], strict=False) if b != a}
        steps = {Fraction(y, b) for b, y in rises}
        if len(steps) == 1:
            step = steps.pop()
            base = numbers[0] - step * vector[0]
            if all(base + step * v == n for v, n in zip(vector, numbers, strict=True)) and base.denominator == 1:
                sign_ = f"n*{base} + " if base >= 0 else f"n*~{base} + "
                return f"{sign_}n*{step}*{name}"
    fitter.approximate += 1
    return f"n*~{sum(numbers) // len(numbers)}"


def fit_tensors(sizes: list[Any], fitter: Fitter, module: str, widest: tuple[int, ...]) -> str:
    """The tensors of one operator as an expression: one by one, or those of a dtype together where that fails."""
    letters = "".join(dict.fromkeys(letter for each in sizes for letter, _ in each))
    together = [add_all([each], letters) for each in sizes]
    if len({len(each) for each in sizes}) > 1:
        sizes = together
    terms = []
    for tensors in zip(*sizes, strict=True):
        letter, numbers = tensors[0][0], tuple(count for _, count in tensors)
        if any(numbers):
            terms.append((letter, fitter.fit(numbers, module) if all(numbers) else None, numbers))
    if any(text is None for _, text, _ in terms) and sizes != together:
        return fit_tensors(together, fitter, module, widest)
    return _approximate(terms, fitter, widest)


def _approximate(terms: list[tuple[str, str | None, tuple[int, ...]]], fitter: Fitter, widest: tuple[int, ...]) -> str:
    found = []
    for letter, text, numbers in terms:
        if text is None:
            fitter.approximate += 1
            text = f"~{sum(numbers) / sum(widest):.4f}*tokens*width"
        found.append((letter, text))
    return " + ".join(sorted(_write(letter, text, count) for (letter, text), count in Counter(found).items()))


def _write(letter: str, text: str, count: int) -> str:
    """A term that stands there so often."""
    if count == 1:
        return f"{letter}*{text}"
    first, _, rest = text.partition("*")
    if not first[0].isdigit():
        return f"{letter}*{count}*{text}"
    coefficient = Fraction(first) * count
    return f"{letter}*{rest}" if coefficient == 1 else f"{letter}*{coefficient}*{rest}"


Spot = tuple[str, str, str]  # stage, signature, "*" or first or last

# --- Recording --------------------------------------------------------------------------------------------------------


class Recording:
    """Everything recorded of one model type, as it stands in its file."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[Row, ...], int] = {}
        self.usual: dict[str, Json] = {}  # language's model type -> its config class's switches
        self.signatures: dict[str, int] = {}
        self.parts: dict[str, Any] = {}
        self.saved: dict[str, Any] = {}
        self.kept: dict[str, int] = {}  # lists of what is kept, as JSON, each once
        self.approximate = 0
        self.total = 0

    def add(self, key: str, runs: list[Run]) -> None:
        """Rows of all modules of one phase, one attention; layers of a kind once, and apart where they differ."""
        gathered = [gather(each) for each in runs]
        for spot in self._list_new(self.parts, key, gathered):
            chosen = [(each, found[spot]) for each, found in zip(runs, gathered, strict=True) if spot in found]
            modules = dict.fromkeys(name for _, (_, lists) in chosen for name in lists)
            fitter = make_fitter([(each, chain) for each, (chain, _) in chosen])
            widest = list_widths([each for each, _ in chosen])
            blocks: dict[str, int] = {}
            for module in modules:
                rows = fit_events([lists.get(module, []) for _, (_, lists) in chosen], fitter, module, widest)
                self.total += sum(len(row[3].split(" + ")) + len(row[4].split(" + ")) for row in rows)
                blocks[module] = self.blocks.setdefault(tuple(rows), len(self.blocks))
            self.approximate += fitter.approximate
            self._put(self.parts, key, spot, blocks)

    def keep(self, key: str, train: list[Run], flow: list[Run]) -> None:
        """What autograd keeps: which modules keep it when their weights train, and which when gradients only pass."""
        pairs = [(each, gather_kept(each), gather_kept(b)) for each, b in zip(train, flow, strict=True)]
        for spot in self._list_new(self.saved, key, [found for _, found, _ in pairs]):
            chosen = [(each, a[spot], b.get(spot, (None, {}))) for each, a, b in pairs if spot in a]
            fitter = make_fitter([(each, chain) for each, (chain, _), _ in chosen])
            widest = list_widths([each for each, _, _ in chosen])
            rows: Counter[tuple[str, str, str]] = Counter()
            tables = [{made: (a.get(made), b.get(made)) for made in [*a, *b]} for _, (_, a), (_, b) in chosen]
            # A module that keeps more in one run than in another has a loop: its operators' numbers say nothing.
            counts = [Counter(made[:2] for made in table) for table in tables]
            shared = [
                made
                for made in tables[0]
                if all(made in table for table in tables) and len({each[made[:2]] for each in counts}) == 1
            ]
            for made in shared:
                found = [table.pop(made) for table in tables]
                sizes = [((each.letter, each.elements),) for a, b in found for each in [a or b] if each is not None]
                savers = [_name_savers(each) for each in found[0]]
                rows[fit_tensors(sizes, fitter, savers[0].partition(" ")[0], widest), savers[0], savers[1]] += 1
            # What a loop over images keeps: all of a kind together.
            for name in sorted({_name_kept(found) for table in tables for found in table.values()}):
                letter, first, second = name
                own = [[(a or b).elements for a, b in table.values() if _name_kept((a, b)) == name] for table in tables]
                for sums in sum_sizes(own):
                    text = fit_tensors([((letter, each),) for each in sums], fitter, first.partition(" ")[0], widest)
                    rows[text, first, second] += 1
            self.approximate += fitter.approximate
            listed = json.dumps(sorted([text, a, b, count] for (text, a, b), count in rows.items()))
            self._put(self.saved, key, spot, self.kept.setdefault(listed, len(self.kept)))

    def _list_new(self, tables: dict[str, Any], key: str, gathered: list[Any]) -> list[Spot]:
        """What no earlier set of configs has recorded; the published ones come first."""
        spots = sorted({spot for each in gathered for spot in each})
        known = tables.get(key, {})
        return [spot for spot in spots if str(self.signatures.get(spot[1])) not in known.get(spot[0], {})]

    def _put(self, tables: dict[str, Any], key: str, spot: Spot, entry: Any) -> None:
        stage, signature, where = spot
        number = self.signatures.setdefault(signature, len(self.signatures))
        table = tables.setdefault(key, {}).setdefault(stage, {}).setdefault(str(number), {})
        if "*" not in table:  # sorted: those of the middle come first, if there are any
            table["*"] = entry
        elif table["*"] != entry and where not in table:
            table[where] = entry

    def _prune(self) -> list[tuple[Row, ...]]:
        """The blocks that are used, numbered anew in every part."""
        blocks, numbers = list(self.blocks), dict[int, int]()
        for stages in self.parts.values():
            for kinds in stages.values():
                for places in kinds.values():
                    for modules in places.values():
                        for module, number in modules.items():
                            modules[module] = numbers.setdefault(number, len(numbers))
        return [blocks[number] for number in numbers]

    def to_json(self) -> str:
        """Every row once, and one per line, so that a change shows where it is."""
        import transformers

        versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
        kept = [json.loads(text) for text in self.kept]
        return pack(versions, self.usual, list(self.signatures), self._prune(), self.parts, kept, self.saved)


def pack(
    versions: Json,
    usual: Json,
    signatures: list[str],
    blocks: list[Any],
    parts: dict[str, Any],
    kept: list[Any],
    saved: Json,
) -> str:
    """The text of a file; flopcalc.prediction.operators.unpack reads it."""
    rows: dict[str, int] = {}
    kept_rows: dict[str, int] = {}
    layouts: dict[str, int] = {}
    numbered = [[rows.setdefault(json.dumps(row), len(rows)) for row in block] for block in blocks]
    kept_numbers = [[kept_rows.setdefault(json.dumps(row), len(kept_rows)) for row in block] for block in kept]
    short = {
        key: {
            path: {
                kind: {
                    where: [layouts.setdefault(json.dumps(list(modules)), len(layouts)), *modules.values()]
                    for where, modules in places.items()
                }
                for kind, places in kinds.items()
            }
            for path, kinds in stages.items()
        }
        for key, stages in sorted(parts.items())
    }
    tables = {
        "signatures": map(json.dumps, signatures), "rows": rows, "blocks": map(json.dumps, numbered),
        "layouts": layouts, "kept_rows": kept_rows, "kept": map(json.dumps, kept_numbers),
    }  # fmt: skip
    lines = [f'"versions": {json.dumps(versions)}', f'"usual": {json.dumps(usual)}']
    for name, texts in tables.items():
        inside = ",\n".join(texts)
        lines.append(f'"{name}": [\n{inside}\n]')
    for name, table in (("parts", short), ("saved", saved)):
        inside = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(table.items()))
        lines.append(f'"{name}": {{\n{inside}\n}}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def sum_sizes(lists: list[list[int]]) -> list[list[int]]:
    """Per size, where every run has as many different ones, else of all together: the sum of each run."""
    sizes = [list(dict.fromkeys(each)) for each in lists]  # in order of execution, which is every run's
    if len({len(each) for each in sizes}) != 1:
        return [[sum(each) for each in lists]]
    return [
        [sum(n for n in each if n == own[place]) for each, own in zip(lists, sizes, strict=True)]
        for place in range(len(sizes[0]))
    ]


def _name_savers(kept: Kept | None) -> str:
    return " ".join(kept.savers) if kept is not None else ""


def _name_kept(found: tuple[Any, Any]) -> tuple[str, str, str]:
    return (found[0] or found[1]).letter, _name_savers(found[0]), _name_savers(found[1])


def make_fitter(chosen: list[tuple[Run, Any]]) -> Fitter:
    return Fitter(
        [each.features for each, _ in chosen],
        [list_sizes(each.estimator.stages, chain) for each, chain in chosen],
        find_share(chosen[0][0].estimator.source.config).denominator,
    )


def list_widths(runs: list[Run]) -> tuple[int, ...]:
    return tuple(each.features["tokens"] * list_sizes(each.estimator.stages, None).get("width", 1) for each in runs)


def _find_spots(each: Run) -> dict[tuple[str, int | None], Spot]:
    spots: dict[tuple[str, int | None], Spot] = {}
    switches = find_switches(each.estimator)
    for stage in each.estimator.stages:
        if not stage.repeated:
            continue
        kinds: dict[str, list[int]] = defaultdict(list)
        for number, chain in enumerate(stage.layers, stage.first):
            kinds[sign_layer(stage, chain, switches)].append(number)
        last = stage.first + len(stage.layers) - 1
        for signature, numbers in kinds.items():
            for number in numbers:
                where = "first" if number == stage.first else "last" if number == last else "*"
                spots[stage.path, number] = (stage.path, signature, where)
    spots["", None] = ("", sign_outside(each.estimator.stages, switches), "*")
    return spots


def gather(each: Run) -> dict[Spot, tuple[Any, dict[str, list[Event]]]]:
    """Events by kind of layer and module: of one layer of a kind; the first and the last of a stage apart."""
    lists: dict[tuple[str, int | None], dict[str, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in each.trace.events:
        stage, layer, name = place(each.estimator, event.module)
        lists[stage, layer][fold(name)].append(event)
    # Nodes are listed apart from what they run: their order says nothing.
    ordered = {
        spot: {name: sorted(events, key=lambda event: event.kind == "node") for name, events in modules.items()}
        for spot, modules in lists.items()
    }
    return _put_in_place(each, ordered)


def gather_kept(each: Run) -> dict[Spot, tuple[Any, dict[Any, Kept]]]:
    """As gather: what is kept, by what made it."""
    lists: dict[tuple[str, int | None], dict[Any, Kept]] = defaultdict(dict)
    for kept in each.trace.kept:
        stage, layer, _ = place(each.estimator, kept.savers[0])
        own = [place(each.estimator, saver) for saver in kept.savers]
        names = tuple(fold(name) for s, n, name in own if (s, n) == (stage, layer))
        maker = place(each.estimator, kept.made_by[0])
        key = (maker[0], fold(maker[2]), kept.made_by[1], maker[1] == layer)
        while key in lists[stage, layer]:
            key = (*key, 0)
        lists[stage, layer][key] = kept._replace(savers=names)
    return _put_in_place(each, lists)


def _put_in_place(each: Run, lists: Mapping[tuple[str, int | None], Any]) -> dict[Spot, tuple[Any, Any]]:
    stages = {stage.path: stage for stage in each.estimator.stages}
    spots = _find_spots(each)
    found: dict[Spot, tuple[Any, Any]] = {}
    for (stage, layer), entry in lists.items():
        if (stage, layer) in spots:
            chain = stages[stage].layers[layer - stages[stage].first] if layer is not None else None
            found.setdefault(spots[stage, layer], (chain, entry))
    return found


def record(model_type: str) -> Recording:
    example = find_example(model_type)
    recording = Recording()
    for configs, is_whole in list_variants(example):
        for name in (model_type, find_language(configs[0])[0]):  # a config may leave out what its inner one is
            recording.usual[name] = find_usual(name)
        for attention in ("sdpa", "eager") if is_whole else ("sdpa",):
            for has_images in (True, False) if example.images else (False,):
                kept: dict[str, dict[str, list[Run]]] = defaultdict(dict)
                for phase in PHASES:
                    is_rare = not has_images and (attention == "eager" or "text" in example.skip)
                    if example.images and (is_rare or (has_images and phase == "decode")):
                        continue
                    # Eager attention makes a mask in any case.
                    for is_windowed in (False, True) if is_whole and attention == "sdpa" else (False,):
                        runs = run_all(example, configs, phase, attention, has_images, is_windowed)
                        if runs:
                            flags = f"{attention}{' masked' if is_windowed else ''}{' images' if has_images else ''}"
                            recording.add(f"{phase} {flags}", runs)
                            kept[flags][phase] = runs
                for flags, both in kept.items():
                    if len(both.get("train", ())) == len(both.get("flow", [None])):
                        recording.keep(flags, both["train"], both["flow"])
    return recording


_FAILURES = (ValueError, RuntimeError, TypeError, AttributeError, LookupError, FlopcalcError)


def run_all(
    example: Example, configs: list[Json], phase: str, attention: str, has_images: bool, is_windowed: bool
) -> list[Run]:
    """Runs of every config that HF can build and run, with windows shorter than the text or with none."""
    runs = []
    workloads = list_workloads(example, phase, has_images)
    for number, config in enumerate(configs):
        for workload in workloads if not number else workloads[number % 2 :][:1]:
            keys = workload["seq"] + workload.get("context", 0)
            chosen = set_window(config, 5 if is_windowed else 4096)
            try:
                masked = is_masked(make_estimator(example, chosen), keys)
                if masked != is_windowed:
                    continue
                runs.append(run(example, chosen, phase, attention, workload))
            except _FAILURES as error:
                print("   ", example.model_type, phase, attention, str(error)[:150].replace("\n", " "), file=sys.stderr)
    return runs


def set_window(config: Json, window: int) -> Json:
    out = dict(config)
    for key, value in config.items():
        if isinstance(value, dict):
            out[key] = set_window(value, window)
        elif key == "sliding_window" and isinstance(value, int) and not isinstance(value, bool):
            out[key] = window
    return out


# --- Comparing --------------------------------------------------------------------------------------------------------


Sums = dict[tuple[str, str], list[int]]  # (direction, kind) -> bytes read, bytes written, calls


LIMIT = 0.15  # of --check


def add_up_both(
    example: Example, config: Json, phase: str, attention: str, workload: Json
) -> tuple[Sums, Sums, tuple[str, ...]]:
    """What a trace shows, what is read from the file, and the reader's notes."""
    seen = run(example, config, phase, attention, workload)
    bytes_ = {"x": 2, "f": 4, "l": 8, "i": 4, "o": 1}
    traced: Sums = defaultdict(lambda: [0, 0, 0])
    for event in seen.trace.events:
        sums = traced[event.direction, event.kind]
        sums[0] += sum(bytes_[letter] * count for letter, count in event.reads)
        sums[1] += sum(bytes_[letter] * count for letter, count in event.writes)
        sums[2] += 1
    read: Sums = defaultdict(lambda: [0, 0, 0])
    found = list_operators(seen.estimator, make_load(workload, phase), attention)
    for row in found.rows:
        sums = read[row.direction, row.kind]
        sums[0] += row.reads * row.count
        sums[1] += row.writes * row.count
        sums[2] += row.count
    return traced, read, found.notes


def compare(example: Example, config: Json, phase: str, attention: str, workload: Json) -> dict[tuple[str, str], Any]:
    """(direction, kind) -> (bytes and calls traced, the same read), where they differ."""
    traced, read, _ = add_up_both(example, config, phase, attention, workload)
    return {key: (traced[key], read[key]) for key in sorted({*traced, *read}) if traced[key] != read[key]}


def find_gaps(traced: Sums, read: Sums) -> tuple[float, float]:
    """How far all bytes and all calls that are read lie from the traced ones: read over traced, less 1."""
    moved = [sum(reads + writes for reads, writes, _ in table.values()) for table in (traced, read)]
    calls = [sum(count for _, _, count in table.values()) for table in (traced, read)]
    return moved[1] / moved[0] - 1, calls[1] / calls[0] - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", default=[])
    parser.add_argument("--check", action="store_true", help="compare the files with other sizes; write nothing")
    arguments = parser.parse_args()
    prepare()
    FOLDER.mkdir(exist_ok=True)
    wrong = 0
    for model_type in arguments.types or TYPES:
        if arguments.check:
            wrong += check(model_type)
            continue
        recording = record(model_type)
        if not recording.parts:
            print(f"{model_type:14} nothing could be recorded: is there model_specs/examples/{model_type}.toml?")
            wrong += 1
            continue
        text = recording.to_json()
        path = FOLDER / f"{model_type}.json"
        same = [other.stem for other in sorted(FOLDER.glob("*.json")) if other != path and other.read_text() == text]
        path.write_text(json.dumps({"same": same[0]}) + "\n" if same else text)
        print(f"{model_type:14} {len(text):8} bytes, {recording.approximate} of {recording.total} tensors approximate")
    sys.exit(1 if wrong else 0)


def check(model_type: str) -> int:
    """Prints how far what is read lies from a trace of sizes that nothing was recorded from; cases beyond LIMIT."""
    example = find_example(model_type)
    wrong, compared = 0, 0
    for configs, is_whole in list_variants(example):
        other = set_window(resize(configs[0], 6, 2, 5, 4), 4096)
        for phase, workload in list_checks(example):
            for attention in ("sdpa", "eager") if is_whole else ("sdpa",):
                try:
                    traced, read, notes = add_up_both(example, other, phase, attention, workload)
                except _FAILURES as error:
                    print(f"{model_type:14} {phase:8} {attention:6} not run: {str(error)[:90]}")
                    continue
                compared += 1
                gaps = find_gaps(traced, read)
                shown = "equal" if traced == read else "bytes {:+.1%}, calls {:+.1%}".format(*gaps)
                if notes:  # another recording: it says nothing of this one
                    shown += f" ({notes[0]})"
                elif max(map(abs, gaps)) > LIMIT:
                    wrong += 1
                    shown += " TOO FAR"
                images = "images" if "images" in workload else ""
                print(f"{model_type:14} {phase:8} {attention:6} {images:6} {shown}")
    if not compared:
        print(f"{model_type:14} nothing was compared: is there model_specs/examples/{model_type}.toml?")
    return wrong if compared else 1


def list_checks(example: Example) -> Iterator[tuple[str, Json]]:
    if "text" not in example.skip:
        yield "train", {"batch": 3, "seq": 37}
        yield "forward", {"batch": 2, "seq": 23}
        yield "prefill", {"batch": 4, "seq": 31}
        yield "decode", {"batch": 4, "seq": 1, "context": 29}
    for images in example.images[:1]:
        yield "train", {**images, "batch": 3, "seq": images["seq"] + 5}
        yield "forward", {**images, "batch": 3, "seq": images["seq"] + 5}


if __name__ == "__main__":
    main()
