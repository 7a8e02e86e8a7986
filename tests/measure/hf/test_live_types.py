"""A live HF model of every type binds, and counts as its config does: all of it trained, and with a frozen layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tiers import LIGHT_TYPES, mark_heavy

from flopcalc import bind
from flopcalc.base.data import list_data_files
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.measure.hf.compare import make_load
from flopcalc.measure.hf.examples import Example, find_example, list_cases
from flopcalc.measure.hf.kernels import install
from flopcalc.measure.hf.models import apply_recipe, build_model

NAMES = list_data_files("examples")


def prepare(example: Example) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The first config with its class named, the first step of training, and the live model."""
    plain = example.configs[0]
    config = {**({"architectures": [example.architecture]} if example.architecture else {}), **plain}
    workload = next(load for load, _ in list_cases(example, plain) if load.get("phase") == "train")
    architecture = example.choose_class(bind(config).spec.architecture)
    install(example.kernels)
    return config, workload, build_model(plain, example.attention, architecture=architecture)


def count(estimator: Estimator, workload: Mapping[str, Any]) -> Any:
    found = estimator.estimate(make_load(workload))
    return found.by_module(per_layer=True), found.parameters


@pytest.mark.filterwarnings("ignore")  # torch and HF advise on their own code
@pytest.mark.parametrize("name", mark_heavy(NAMES, LIGHT_TYPES))
def test_live_model_counts_as_its_config(name: str) -> None:
    example = find_example(name)
    if example.needs:
        pytest.importorskip(example.needs)
    config, workload, model = prepare(example)
    told = bind(config, convention="full")
    assert count(bind(model, convention="full"), workload) == count(told, workload)

    stage = next((stage for stage in told.stages if stage.repeated), None)
    if stage is None:
        return
    layer = f"{stage.path}.{stage.first}"
    model.get_submodule(layer).requires_grad_(False)
    frozen = bind(config, recipe={"freeze": layer}, convention="full")
    live = bind(model, convention="full")
    assert count(live, workload) == count(frozen, workload)
    trainable = {id(each): each.numel() for each in model.parameters() if each.requires_grad}
    assert live.parameters()["trainable"] == sum(trainable.values())


@pytest.mark.filterwarnings("ignore")  # peft advises on training, which this is not
@pytest.mark.parametrize(
    "name",
    mark_heavy(["bart-causal", "whisper-causal", "seamless_m4t-speech", "xmod", "stablelm"], ["whisper-causal"]),
)
def test_variant_is_found_inside_what_wraps_it(name: str) -> None:
    config, workload, model = prepare(find_example(name))
    recipe = {"lora": {"r": 3, "targets": "all-linear"}}
    told = bind(config, recipe=recipe, convention="full")
    adapted = apply_recipe(model, recipe)
    for live in (adapted, torch.compile(adapted)):
        assert count(bind(live, convention="full"), workload) == count(told, workload)


@pytest.mark.filterwarnings("ignore")
def test_lora_on_bare_parameters_is_what_peft_makes() -> None:
    config, workload, model = prepare(find_example("qwen3_moe"))
    targets = ["q_proj", "param:experts.gate_up_proj", "param:mlp.experts.down_proj"]
    recipe = {"lora": {"r": 3, "targets": targets}}
    told = bind(config, recipe=recipe, convention="full")
    adapted = apply_recipe(model, recipe)
    assert count(bind(adapted, convention="full"), workload) == count(told, workload)
    trains = sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    assert trains == told.parameters()["trainable"]
