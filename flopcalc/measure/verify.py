"""A config and a workload in; whether the analytic rows equal what HF's model executes out, row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from flopcalc.config import load_config
from flopcalc.estimate import bind
from flopcalc.measure.examples import Example, Json, find_example, make_inputs, takes
from flopcalc.measure.flop_counter import Counted, count_flops
from flopcalc.measure.models import apply_recipe, build_model, count_parameters, floats_on_meta
from flopcalc.workload import Workload, make_workload

__all__ = ["Verdict", "compare", "make_load", "trace", "verify"]


@dataclass(frozen=True)
class Trace:
    """What one step of a HF model executed, and its parameters."""

    counted: Counted
    total: int
    trainable: int


@dataclass(frozen=True)
class Verdict:
    """Rows that differ (path -> ours, traced), the totals, and the operators the counter did not know."""

    different: dict[str, tuple[tuple[int, int, int] | None, tuple[int, int, int] | None]]
    ours: tuple[int, int, int]
    traced: tuple[int, int, int]
    parameters: tuple[dict[str, int], dict[str, int]]
    not_counted: dict[str, int]

    @property
    def is_equal(self) -> bool:
        return not (self.different or self.not_counted or self.parameters[0] != self.parameters[1])


def make_step(
    model: Any, example: Example, workload: Mapping[str, Any], config: Json, device: str = "cpu"
) -> Callable[[], Any]:
    """One step of the workload's phase; for decode the cache is filled here, so that it is not counted."""
    phase = workload.get("phase", "train")
    model.train(phase == "train")
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
        ids = inputs.get("decoder_input_ids", inputs["input_ids"])
        labels = ids.clone()
        return lambda: model(**inputs, labels=labels, **extra).loss.backward()

    def train() -> None:
        out = model(**inputs, **extra)
        _pick(out, example.loss).float().sum().backward()

    return train


def _pick(out: Any, name: str) -> Any:
    for part in name.split("."):
        out = out[int(part)] if part.isdigit() else getattr(out, part)
    return out


def _make_decode(
    model: Any, example: Example, workload: Mapping[str, Any], estimator: Any, device: str
) -> Callable[[], Any]:
    context, new, batch = int(workload["context"]), int(workload.get("seq", 1)), int(workload.get("batch", 1))
    visual = {key: workload[key] for key in ("images", "clips") if key in workload}
    extra = dict(example.call)
    if estimator.has_decoder:
        new = int(workload["decoder_seq"])
        load = {"batch": batch, "seq": workload["seq"], "decoder_seq": context, **visual}
    else:
        load = {"batch": batch, "seq": context, **visual}
    inputs = make_inputs(example, model.config, load, estimator, device)
    with torch.no_grad():
        cached = model(**inputs, use_cache=True, **extra)
    token = torch.full((batch, 1), 3)
    name = "decoder_input_ids" if estimator.has_decoder else "input_ids"
    key = next(key for key in ("past_key_values", "cache_params", "state") if getattr(cached, key, None) is not None)
    again: Json = {}
    if estimator.has_decoder:
        encoded = cached.encoder_last_hidden_state
        again["encoder_outputs"] = (encoded,)

    def generate() -> None:
        past = getattr(cached, key)
        with torch.no_grad():
            for _ in range(new):
                out = model(**{name: token, key: past}, use_cache=True, **again, **extra)
                past = getattr(out, key)

    return generate


def _named(example: Example, config: Json) -> Json:
    return {**({"architectures": [example.architecture]} if example.architecture else {}), **config}


def trace(
    config: Json, workload: Mapping[str, Any], recipe: Mapping[str, Any], example: Example, device: str = "cpu"
) -> Trace:
    """Build the HF model, adapt it to the recipe, run one counted step."""
    estimator = bind(_named(example, config))
    architecture = example.architecture or estimator.spec.architecture
    model = build_model(config, example.attention, None, device, architecture=architecture)
    with floats_on_meta() if device == "meta" else nullcontext():
        model = apply_recipe(model, recipe)
        total, trainable = count_parameters(model)
        step = make_step(model, example, workload, config, device)
        return Trace(count_flops(model, step), total, trainable)


def make_load(workload: Mapping[str, Any]) -> Workload:
    """An example's workload as the core's own: grids and clips there are per sample, and every sample has the same."""
    phase = workload.get("phase", "train")
    if "mask" in workload:
        lengths = tuple(workload["mask"])
        return Workload(len(lengths), workload["seq"], lengths, "padded", phase, 0, workload.get("logits"))
    batch = workload.get("batch", 1)
    decoding = phase == "decode"  # then images and audio lie in the context already
    has_decoder = "decoder_seq" in workload
    return make_workload(
        batch,
        None if "lengths" in workload else workload.get("seq"),
        lengths=workload.get("lengths"),
        image_grid_thw=workload["images"] * batch if workload.get("images") and not decoding else None,
        video_grid_thw=workload["videos"] * batch if workload.get("videos") and not decoding else None,
        clips=workload["clips"] * batch if workload.get("clips") and not decoding else None,
        decoder_seq_len=workload["decoder_seq"] if has_decoder else None,
        phase=phase,
        context=workload.get("context"),
        logits=workload.get("logits"),
    )


def compare(config: Json, workload: Mapping[str, Any], recipe: Mapping[str, Any], traced: Mapping[str, Any]) -> Verdict:
    """The analytic rows against traced ones: {rows: path -> (forward, backward, recompute), total, trainable}."""
    convention = "hardware" if recipe.get("recompute", "none") != "none" else "full"
    estimator = bind(config, recipe=dict(recipe), convention=convention, attention_kernel="eager")
    estimate = estimator.estimate(make_load(workload))
    ours = {
        row.path: (row.forward, row.backward, row.recompute)
        for row in estimate.by_module(per_layer=True)
        if row.forward or row.backward or row.recompute
    }
    theirs = {path: tuple(row) for path, row in traced["rows"].items() if any(row)}
    different = {
        path: (ours.get(path), theirs.get(path))
        for path in dict.fromkeys((*theirs, *ours))
        if ours.get(path) != theirs.get(path)
    }
    parameters = estimate.parameters
    sums = [sum(row[i] for row in theirs.values()) for i in range(3)]
    return Verdict(
        different,
        (estimate.forward, estimate.backward, estimate.recompute),
        (sums[0], sums[1], sums[2]),
        (
            {key: parameters[key] for key in ("total", "trainable")},
            {"total": traced["total"], "trainable": traced["trainable"]},
        ),
        dict(traced.get("not_counted", {})),
    )


def verify(
    config: Json,
    workload: Mapping[str, Any],
    recipe: Mapping[str, Any] | None = None,
    *,
    example: Example | None = None,
    device: str = "cpu",
) -> Verdict:
    """Trace HF's model of this config, and compare."""
    example = example or find_example(str(load_config(config).config["model_type"]))
    found = trace(config, workload, recipe or {}, example, device)
    traced = {
        "rows": found.counted.rows, "total": found.total, "trainable": found.trainable,
        "not_counted": found.counted.not_counted,
    }  # fmt: skip
    return compare(_named(example, config), workload, recipe or {}, traced)
