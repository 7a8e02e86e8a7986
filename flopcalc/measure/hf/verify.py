"""A config and a workload in; whether the analytic rows equal what HF's model executes out, row by row."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from flopcalc.base.units import is_digits
from flopcalc.core.estimate.binding import bind_config as bind
from flopcalc.core.estimate.former import drop_hooks
from flopcalc.core.model.bound import bind_model
from flopcalc.core.model.config import load_config
from flopcalc.core.recipe.live import has_input_hook
from flopcalc.measure.counters.flop_counter import OperatorCount, count_flops
from flopcalc.measure.hf.compare import Verdict, compare_bound, make_executed
from flopcalc.measure.hf.examples import Example, Json, find_example, make_inputs, takes
from flopcalc.measure.hf.kernels import install
from flopcalc.measure.hf.models import apply_recipe, build_model, count_parameters, floats_on_meta


class Trace(NamedTuple):
    """What one step of a HF model executed, and its parameters."""

    counted: OperatorCount
    total: int
    trainable: int
    has_input_hook: bool = True  # HF's checkpointing makes the embedding's output require a gradient


def prepare() -> None:
    """Quiet libraries, and one thread: tiny models gain nothing from more."""
    import transformers

    warnings.filterwarnings("ignore")  # peft and torch advise on training, which this is not
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)


def make_step(
    model: Any, example: Example, workload: Mapping[str, Any], config: Json, device: str = "cpu"
) -> Callable[[], Any]:
    """One step of the workload's phase; for decode the cache is filled here, so that it is not counted."""
    phase = workload.get("phase", "train")
    model.train(phase == "train")
    install(example.kernels)
    estimator = bind(_named(example, config))
    if phase == "decode":
        return _make_decode(model, example, workload, estimator, device)
    inputs = make_inputs(example, model.config, workload, estimator, device)
    extra: Json = dict(example.call)
    logits = workload.get("logits", "last" if phase == "prefill" else "all")
    keep = {"all": 0, "last": 1}.get(logits, logits)
    if keep:
        extra["logits_to_keep"] = keep
    if takes(model, "use_cache"):
        extra["use_cache"] = phase == "prefill"
    if phase != "train":

        def forward() -> None:
            with torch.no_grad():
                model(**inputs, **extra)

        return forward
    if example.loss == "labels":
        ids = inputs["decoder_input_ids" if estimator.has_decoder else "input_ids"]
        labels = ids.clone()
        return lambda: model(**inputs, labels=labels, **extra).loss.backward()

    def train() -> None:
        out = model(**inputs, **extra)
        total = sum(pick(out, name).float().sum() for name in example.loss.split())
        total.backward()

    return train


def pick(out: Any, name: str) -> Any:
    for part in name.split("."):
        out = out[int(part)] if is_digits(part) else out[part] if isinstance(out, dict) else getattr(out, part)
    return out


_CACHES = ("past_key_values", "cache_params", "state", "past_buckets_states")  # what outputs call them
_STATES = ("encoder_past_key_values", "padding_cache")  # and those that a streaming encoder keeps in addition


def _make_decode(
    model: Any, example: Example, workload: Mapping[str, Any], estimator: Any, device: str
) -> Callable[[], Any]:
    context, new, batch = int(workload.get("context", 0)), int(workload.get("seq", 1)), int(workload.get("batch", 1))
    visual = {key: workload[key] for key in ("images", "clips") if key in workload}
    extra = dict(example.call)
    if takes(model, "use_cache") or not estimator.has_decoder:  # else the config says so, as it does by default
        extra["use_cache"] = True
    if estimator.has_decoder:
        new = int(workload["decoder_seq"])
        load = {"batch": batch, "seq": workload.get("seq", 0), "decoder_seq": context, **visual}
    else:
        load = {"batch": batch, "seq": context, **visual}
    if not context:  # nothing to fill a cache with: the first new token starts one
        token_inputs = make_inputs(example, model.config, {**load, "seq": 1}, estimator, device)
        return lambda: _decode_from_nothing(model, token_inputs, new, extra)
    inputs = make_inputs(example, model.config, load, estimator, device)
    with torch.no_grad():
        cached = model(**inputs, **extra)
        key = next((key for key in _CACHES if getattr(cached, key, None) is not None), "")
        filled = getattr(cached, key, None)
        if filled is None:  # it returns none, but fills the one it is given
            from transformers import DynamicCache

            key, filled = "past_key_values", DynamicCache(config=model.config)
            model(**inputs, past_key_values=filled, **extra)
    name = "decoder_input_ids" if estimator.has_decoder else "input_ids"
    before = inputs[name].shape if name in inputs else (batch, context)
    token = torch.full((before[0], 1, *before[2:]), 3)  # several codes a position, where the model takes them
    single = make_inputs(example, model.config, {"batch": batch, "seq": 1}, estimator, device)
    given = {key: single if entry.get("always") == "token" else inputs for key, entry in example.inputs.items()}
    again: Json = {
        key: given[key][key] for key, entry in example.inputs.items() if entry.get("always") and key in given[key]
    }
    states = [name for name in _STATES if getattr(cached, name, None) is not None]
    if estimator.has_decoder:
        encoder = model.get_encoder()
        own = {key: inputs[key] for key in inputs if takes(encoder, key)}
        with torch.no_grad():
            again["encoder_outputs"] = encoder(**own) if own else (cached.encoder_last_hidden_state,)

    def generate() -> None:
        past, others = filled, {state: getattr(cached, state) for state in states}
        with torch.no_grad():
            for _ in range(new):
                out = model(**{name: token, key: past}, **others, **again, **extra)
                past, others = getattr(out, key, past), {state: getattr(out, state) for state in states}

    return generate


def _decode_from_nothing(model: Any, inputs: Json, new: int, extra: Json) -> None:
    past: Json = {}
    with torch.no_grad():
        for _ in range(new):
            out = model(**inputs, **past, **extra)
            past = {key: getattr(out, key) for key in _CACHES if getattr(out, key, None) is not None}


def _named(example: Example, config: Json) -> Json:
    return {**({"architectures": [example.architecture]} if example.architecture else {}), **config}


def build(config: Json, example: Example, device: str = "cpu") -> Any:
    """HF's model of a config, as its type's example has it built."""
    architecture = example.choose_class(bind(_named(example, config)).spec.architecture)
    install(example.kernels)
    return build_model(config, example.attention, None, device, architecture=architecture)


def trace(
    config: Json,
    workload: Mapping[str, Any],
    recipe: Mapping[str, Any],
    example: Example,
    device: str = "cpu",
    model: Any = None,
) -> Trace:
    """Adapt the HF model to the recipe, run one counted step; `model`: one that `build` made, which is changed."""
    if model is None:
        model = build(config, example, device)
    with floats_on_meta() if device == "meta" else nullcontext():
        model = apply_recipe(model, recipe)
        total, trainable = count_parameters(model)
        step = make_step(model, example, workload, config, device)
        return Trace(count_flops(model, step), total, trainable, has_input_hook(model))


def verify(
    config: Json,
    workload: Mapping[str, object],
    recipe: Mapping[str, object] | None = None,
    *,
    example: Example | None = None,
    device: str = "cpu",
) -> Verdict:
    """Trace HF's model of this config, and compare."""
    example = example or find_example(str(load_config(config).config["model_type"]))
    found = trace(config, workload, recipe or {}, example, device)
    traced = {
        "rows": found.counted.rows,
        "total": found.total,
        "trainable": found.trainable,
        "not_counted": found.counted.not_counted,
    }
    bound = bind_model(load_config(_named(example, config)))
    if (recipe or {}).get("recompute", "none") != "none" and not found.has_input_hook:
        bound = drop_hooks(bound)
    return compare_bound(make_executed(bound, recipe or {}), workload, traced)
