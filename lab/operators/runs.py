"""One traced step of a tiny model, with the values of everything that an expression may name."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch

from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.formats.formats import FormatOptions
from flopcalc.core.model.ops import iterate
from flopcalc.core.workload.workload import Workload
from flopcalc.measure.hf.compare import make_load as make_example_load
from flopcalc.measure.hf.examples import Example, find_example, make_estimator, make_inputs
from flopcalc.measure.hf.models import build_model
from flopcalc.measure.hf.verify import pick
from flopcalc.prediction.recordings import list_features, list_windows
from lab.operators.autocast import Autocast
from lab.operators.dispatch import Trace, trace_operators

Json = dict[str, Any]
PHASES = ("train", "flow", "forward", "prefill", "decode")
CACHELESS = ("train", "flow", "forward")
CAST = FormatOptions(weights="fp32", autocast=True)


class Run:
    """One trace, with the values of everything that an expression may name."""

    def __init__(self, estimator: Estimator, load: Workload, trace: Trace) -> None:
        self.estimator = estimator
        self.features = list_features(estimator, load)
        self.trace = trace


def is_masked(estimator: Estimator, keys: int) -> bool:
    """Whether HF makes a mask for SDPA: a window that is no longer than the keys."""
    return bool(list_windows(estimator, keys))


def sees_images_alone(example: Example) -> bool:
    """Whether its model reads no text, so that no workload of it has a length."""
    return any("seq" not in each for each in example.images)


def list_workloads(example: Example, phase: str, has_images: bool) -> list[Json]:
    """Two batches of two lengths; none of a decoder's phases where an encoder's result would have to be kept."""
    if has_images:
        # One image a sample, then two; of two grids where the tower takes any, but all images of a run alike.
        first, last = example.images[0], example.images[-1]
        one, two = {"batch": 2, "images": first["images"][:1]}, {"batch": 3, "images": last["images"][-1:] * 2}
        if sees_images_alone(example):
            return [one, two] if phase in CACHELESS else []
        room = max(first["seq"], last["seq"])
        return [{**first, **one, "seq": room}, {**first, **two, "seq": 2 * room + 4}]
    if example.decoder_seq or example.clips:
        return [make_workload_of(example, 2, 13, 7), make_workload_of(example, 3, 19, 11)] if phase in CACHELESS else []
    if phase == "decode":
        return [{"batch": 2, "seq": 1, "context": 11}, {"batch": 3, "seq": 1, "context": 18}]
    return [{"batch": 2, "seq": 13}, {"batch": 3, "seq": 19}]


def make_workload_of(example: Example, batch: int, seq: int, decoder_seq: int) -> Json:
    """A workload of a model with a decoder, an encoder of sound, or both; sound has a length of its own."""
    if example.clips and not example.decoder_seq:
        return {"batch": batch, "seq": seq + 20, "clips": example.clips}
    own = {"clips": example.clips} if example.clips else {"seq": seq}
    return {"batch": batch, **own, "decoder_seq": decoder_seq}


def run(example: Example, config: Json, phase: str, attention: str, workload: Json, is_cast: bool = False) -> Run:
    """A step of a model in bf16, or in float32 under autocast."""
    model, estimator = build(example.model_type, json.dumps(config), attention, is_cast)
    model.requires_grad_(True)
    model.zero_grad(set_to_none=True)
    for module in model.modules():
        if hasattr(module, "rope_deltas"):  # positions that the run before has left behind
            module.rope_deltas = None
    return Run(estimator, make_load(workload, phase), trace(model, example, estimator, phase, workload, is_cast))


@lru_cache(maxsize=8)
def build(model_type: str, text: str, attention: str, is_cast: bool) -> tuple[Any, Estimator]:
    example, config = find_example(model_type), json.loads(text)
    estimator = make_estimator(example, config, formats=CAST if is_cast else FormatOptions())
    architecture = example.choose_class(estimator.spec.architecture)
    has_experts = any(op.copies > 1 for stage in estimator.stages for chain in stage.layers for op in iterate(chain))
    experts = "grouped_mm" if has_experts else None
    dtype = torch.float32 if is_cast else torch.bfloat16
    try:
        model = build_model(config, attention, experts, "cpu", dtype, architecture=architecture)
    except ValueError as error:
        if experts is None or "experts" not in str(error):
            raise
        model = build_model(config, attention, "eager", "cpu", dtype, architecture=architecture)
    return model, estimator


def make_load(workload: Json, phase: str) -> Workload:
    return make_example_load({**workload, "phase": "train" if phase == "flow" else phase})


def trace(model: Any, example: Example, estimator: Estimator, phase: str, workload: Json, is_cast: bool) -> Trace:
    """Every operator of one step; 'flow' is a training step in which no weight trains but gradients pass."""
    handles = []
    model.train(phase in ("train", "flow"))
    if phase == "flow":
        handles = let_through(model, estimator)
    inputs = make_inputs(example, model.config, workload, estimator)
    if "input_ids" not in inputs and not is_cast:  # nothing in such a model brings its input to the weights' format
        inputs = {name: each.bfloat16() if each.is_floating_point() else each for name, each in inputs.items()}
    extra: Json = dict(example.call)
    if phase == "decode":
        context = make_inputs(example, model.config, {**workload, "seq": workload["context"]}, estimator)
        filled: list[Any] = []
        fill = no_grad(lambda: filled.append(model(**context, use_cache=True, **extra).past_key_values))
        trace_operators(model, fill)  # for its stand-in of grouped products
        past = filled[0]
        token = torch.full((workload["batch"], 1), 3)
        return trace_operators(model, no_grad(lambda: model(input_ids=token, past_key_values=past, use_cache=True)))
    if example.loss == "labels":
        extra["use_cache"] = phase == "prefill"  # models that do not name it hand it on
    if phase == "prefill":
        extra["logits_to_keep"] = 1

    def run_model() -> Any:
        with Autocast() if is_cast else nullcontext():
            return model(**inputs, **extra)

    if hasattr(sys.modules[type(model).__module__], "compile_compatible_method_lru_cache"):
        no_grad(run_model)()  # such code keeps what it made for a size: every step but the first finds it
    if phase in ("forward", "prefill"):
        return trace_operators(model, no_grad(run_model))
    if example.loss == "labels":
        extra["labels"] = inputs["decoder_input_ids" if estimator.has_decoder else "input_ids"].clone()
    found = trace_operators(model, lambda: find_loss(run_model(), example))
    for handle in handles:
        handle.remove()
    return found


def find_loss(out: Any, example: Example) -> Any:
    """The model's own loss, or a sum of what it returns."""
    if example.loss == "labels":
        return out.loss
    return sum(pick(out, name).float().sum() for name in example.loss.split())


def no_grad(call: Any) -> Any:
    def forward() -> None:
        with torch.no_grad():
            call()

    return forward


def let_through(model: Any, estimator: Estimator) -> list[Any]:
    """Freeze every weight; what an embedding makes requires a gradient instead."""
    model.requires_grad_(False)

    def require(_module: object, _args: object, output: Any) -> Any:
        return output.requires_grad_(True)

    modules = dict(model.named_modules())
    handles = []
    for stage in estimator.stages:
        for op in iterate(stage.layers[0]) if not stage.repeated else ():
            path = f"{stage.path}.{op.name}" if op.name else stage.path
            if op.kind in ("embed", "conv") and path in modules:
                handles.append(modules[path].register_forward_hook(require))
    return handles
