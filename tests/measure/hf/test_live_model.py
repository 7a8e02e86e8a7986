"""A live HF model as input: what trains is read from requires_grad and PEFT, and equals the recipe that made it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from families import load_tiny
from tiers import mark_heavy

from flopcalc import ConfigError, RecipeError, bind, estimate_flops
from flopcalc.core.model.live import is_sharded
from flopcalc.measure.hf.models import apply_recipe, build_model, floats_on_meta
from flopcalc.measure.trace.copies import copy_to_meta, run_counted

FAMILIES = ["llama", "gpt2", "gemma2", "mixtral", "qwen3_moe", "deepseek_v3", "qwen2_vl", "qwen3_vl", "llava"]


def load_recipes(family: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The second tiny model of a family (tied head, biases) and every recipe recorded for it, each once."""
    entry = load_tiny(family, 1)
    recipes = {json.dumps(case.recipe, sort_keys=True): case.recipe for case in entry.all_cases}
    return entry.config, list(recipes.values())


@pytest.mark.parametrize("family", mark_heavy(FAMILIES, ["llama"]))
def test_recipe_read_from_model_equals_the_one_given(family: str) -> None:
    config, recipes = load_recipes(family)
    grids = [[1, 4, 6]] if family in ("qwen2_vl", "qwen3_vl") else None
    if family == "llava":
        side = config["vision_config"]["image_size"] // config["vision_config"]["patch_size"]
        grids = [[1, side, side]]
    for recipe in recipes:
        model = apply_recipe(build_model(config), recipe)
        for convention in ("model", "hardware"):
            live = bind(model, convention=convention, attention_kernel="eager")(2, 30, image_grid_thw=grids)
            told = bind(config, recipe=recipe, convention=convention, attention_kernel="eager")(
                2, 30, image_grid_thw=grids
            )
            assert (live.forward, live.backward, live.recompute) == (told.forward, told.backward, told.recompute), (
                recipe
            )
            assert live.by_module(per_layer=True) == told.by_module(per_layer=True), recipe
            assert live.parameters == told.parameters
        assert live.parameters["total"] == sum(p.numel() for p in model.parameters())
        assert live.parameters["trainable"] == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_partly_trained_parameters() -> None:
    """Bias-only training and single layers: what no pattern word names is still read from requires_grad."""
    config, _ = load_recipes("llama")
    model = build_model(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("layers.1.self_attn.v_proj.bias"))
    live = estimate_flops(model, seq_len=16)
    told = estimate_flops(config, seq_len=16, recipe={"train_only": "*layers.1.self_attn.v_proj.bias"})
    assert live.backward == told.backward > 0
    assert live.parameters["trainable"] == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_model_that_the_spec_does_not_describe_is_refused() -> None:
    config, _ = load_recipes("llama")
    model = build_model(config)
    model.score = torch.nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=r"score\.bias"):
        estimate_flops(model, seq_len=16)
    del model.score
    bare = estimate_flops(model.model, seq_len=16)  # a body without its head
    assert bare.flops == estimate_flops({**config, "architectures": ["LlamaModel"]}, seq_len=16).flops


def test_recipe_beside_a_live_model_is_refused() -> None:
    """The model itself says what trains: a recipe that says it again could only contradict it."""
    config, _ = load_recipes("llama")
    model = apply_recipe(build_model(config), {"train_only": ["lm_head"]})
    for recipe in ({"freeze": "lm_head"}, {"train_only": "lm_head"}, {"lora": "r=2,targets=q_proj"}):
        with pytest.raises(RecipeError, match="live model"):
            estimate_flops(model, seq_len=16, recipe=recipe)


def test_recompute_asked_for_wins_over_the_models_own() -> None:
    config, _ = load_recipes("llama")
    model = apply_recipe(build_model(config), {"recompute": "full"})
    assert bind(model).recipe.recompute == "full"
    assert bind(model, recipe={"recompute": "none"}).recipe.recompute == "none"
    assert bind(model, recipe={"recompute": "full-reentrant"}).recipe.recompute == "full-reentrant"


def test_parameter_of_another_size_is_refused() -> None:
    config, _ = load_recipes("gpt2")  # untied head
    model = build_model(config)
    model.lm_head = torch.nn.Linear(config["n_embd"], config["vocab_size"] - 5, bias=False)
    with pytest.raises(ConfigError, match=r"another size.*lm_head\.weight"):
        estimate_flops(model, seq_len=16)


@pytest.mark.parametrize("recipe", [{}, {"lora": {"r": 2, "targets": ["q_proj"]}}], ids=["all", "lora"])
def test_parameters_that_zero_3_took_away(recipe: dict[str, Any]) -> None:
    """Between steps DeepSpeed leaves empty tensors that keep their shape as `ds_shape`."""
    config, _ = load_recipes("llama")
    model = apply_recipe(build_model(config), recipe)
    whole = bind(model)(2, 30)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    found = bind(model)(2, 30)
    assert (found.forward, found.backward, found.parameters) == (whole.forward, whole.backward, whole.parameters)
    assert is_sharded(model)


# Targets of a second adapter, which adapters are active, whether the second is frozen -> beside one on q_proj.
SECOND = {
    "beside": (["q_proj"], ["default"], False),
    "instead": (["v_proj", "down_proj"], ["second"], False),
    "both": (["q_proj", "embed_tokens"], ["default", "second"], False),
    "frozen": (["q_proj", "up_proj"], ["default", "second"], True),
}


@pytest.mark.heavy
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", mark_heavy(SECOND, ["both"]))
def test_several_adapters_are_counted(name: str, recompute: str) -> None:
    from peft import LoraConfig, get_peft_model

    targets, active, is_frozen = SECOND[name]
    config, _ = load_recipes("llama")
    model = get_peft_model(build_model(config), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.add_adapter("second", LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM"))
    model.base_model.set_adapter(active)
    for path, parameter in model.named_parameters():
        if is_frozen and ".second" in path:
            parameter.requires_grad_(False)
    if recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    ids = torch.ones(2, 13, dtype=torch.long)
    counted = bind(model, convention="hardware", attention_kernel="eager")(2, 13)
    found = run_counted(copy_to_meta(model), {"input_ids": ids, "labels": ids}, "train", floats_on_meta())
    assert counted.total == found.total
    parameters = list(model.parameters())
    assert counted.parameters["total"] == sum(each.numel() for each in parameters)
    assert counted.parameters["trainable"] == sum(each.numel() for each in parameters if each.requires_grad)


ADAPTERS = [
    ({}, lambda model: model.merge_adapter(), "merged"),
    ({}, lambda model: model.base_model.disable_adapter_layers(), "switched off"),
    ({"use_dora": True}, lambda _: None, "DoRA"),
]


@pytest.mark.parametrize(("options", "change", "words"), ADAPTERS)
def test_adapters_that_the_count_does_not_describe(options: dict[str, Any], change: Any, words: str) -> None:
    from peft import LoraConfig, get_peft_model

    config, _ = load_recipes("llama")
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    model = get_peft_model(build_model(config), lora)
    change(model)
    with pytest.raises(RecipeError, match=words):
        estimate_flops(model, seq_len=16)


T5 = {
    "model_type": "t5", "d_model": 24, "d_kv": 10, "d_ff": 41, "num_layers": 2, "num_heads": 4, "vocab_size": 101,
    "decoder_start_token_id": 0,
}  # fmt: skip


def test_a_body_is_counted_without_its_head() -> None:
    """A T5Model lacks only the head, whose weight is the embedding's: it is counted without."""
    headless = build_model(T5, architecture="T5Model")
    whole = build_model(T5, architecture="T5ForConditionalGeneration")
    bare, full = (estimate_flops(model, seq_len=9, decoder_seq_len=5) for model in (headless, whole))
    assert bare.flops.total < full.flops.total
    assert bare.parameters["total"] == full.parameters["total"]
    headless.__class__ = type("MyNetwork", (type(headless),), {})  # a class of one's own is what it derives from
    assert estimate_flops(headless, seq_len=9, decoder_seq_len=5).flops == bare.flops


def test_subclass_and_adapted_model_are_taken() -> None:
    from peft import LoraConfig, get_peft_model

    model = build_model(T5, architecture="T5ForConditionalGeneration")
    told = estimate_flops(T5, seq_len=9, decoder_seq_len=5)
    model.__class__ = type("MyModel", (type(model),), {})
    live = estimate_flops(model, seq_len=9, decoder_seq_len=5)
    assert (live.forward, live.backward) == (told.forward, told.backward)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q"]))
    assert estimate_flops(adapted, seq_len=9, decoder_seq_len=5).forward > told.forward
