"""Names and layouts of other transformers releases are joined to the spec; what is still unlike it stays so."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flopcalc.base.errors import RecipeError
from flopcalc.core.estimate.counted import CountedEstimator
from flopcalc.core.estimate.former import LiveParameters, follow_wrappers, join_live, load_rules
from flopcalc.core.model.bound import BoundModel, bind_model
from flopcalc.core.model.config import load_config
from flopcalc.core.model.ops import list_parameters
from flopcalc.core.recipe.recipe import Adapter, Recipe
from flopcalc.core.workload.workload import make_workload

TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "mixtral": {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                  "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 8},
    "llava": {"text_config": {"model_type": "llama", **TEXT},
              "vision_config": {"model_type": "clip_vision_model", "hidden_size": 24, "intermediate_size": 40,
                                "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8, "patch_size": 4}},
    "gpt_neox": {key: value for key, value in TEXT.items() if key != "num_key_value_heads"},
}  # fmt: skip
# What an older release called it: [pattern, replacement], from here to there.
FORMER = {
    "mixtral": [(r"\.mlp\.", ".block_sparse_moe.")],
    "qwen3_moe": [],
    "llava": [
        (r"^lm_head", "language_model.lm_head"),
        (r"^model\.language_model\.", "language_model.model."),
        (r"^model\.vision_tower\.", "vision_tower.vision_model."),
        (r"^model\.", ""),
    ],
    "gpt_neox": [(r"^lm_head", "embed_out")],
}
PARTS = {"mixtral": (("w1", "w3"), "w2"), "qwen3_moe": (("gate_proj", "up_proj"), "down_proj")}


def bind(name: str) -> BoundModel:
    return bind_model(load_config({"model_type": name, **TINY[name]}))


def make_former(name: str, model: BoundModel) -> dict[str, int]:
    """The parameters as an older release has them: a module per expert, other names."""
    sizes = {}
    for path, size in list_parameters(model.stages).items():
        holder, _, param = path.rpartition(".")
        if param in ("gate_up_proj", "down_proj") and holder.endswith("experts"):
            up, down = PARTS[name]
            parts = up if param == "gate_up_proj" else (down,)
            found = {f"{holder}.{i}.{part}.weight": size // 4 // len(parts) for i in range(4) for part in parts}
        else:
            found = {path: size}
        for old, own in found.items():
            for pattern, replacement in FORMER[name]:
                old = re.sub(pattern, replacement, old)
            sizes[old] = own
    return sizes


def join(name: str, adapters: Any = ()) -> tuple[BoundModel, Recipe, dict[str, int]]:
    model = bind(name)
    sizes = make_former(name, model)
    recipe = Recipe(trained=frozenset(sizes) if not adapters else frozenset(), adapters=adapters)
    joined, recipe, live, _ = join_live(model, recipe, LiveParameters(sizes, {each: each for each in sizes}))
    return joined, recipe, dict(live.sizes)


@pytest.mark.parametrize("name", TINY)
def test_a_former_layout_has_the_same_parameters_and_flops(name: str) -> None:
    joined, recipe, sizes = join(name)
    assert list_parameters(joined.stages) == sizes
    assert recipe.trained == frozenset(sizes)
    load = make_workload(2, 30, image_grid_thw=[[1, 2, 2]] * 2 if name == "llava" else None)
    for convention in ("model", "hardware"):
        told = CountedEstimator(bind(name), Recipe(), convention).estimate(load)
        found = CountedEstimator(joined, recipe, convention).estimate(load)
        assert (found.forward, found.backward) == (told.forward, told.backward)


def test_lora_on_modules_of_experts() -> None:
    """Rows that reach an expert pass both matrices of its own adapter."""
    base = "model.layers.{}.block_sparse_moe.experts.{}.{}"
    adapters = tuple((base.format(i, e, "w1"), (Adapter(3),)) for i in range(2) for e in range(4))
    joined, recipe, _ = join("mixtral", adapters)
    load = make_workload(2, 30)
    plain = CountedEstimator(joined, Recipe(trained=frozenset())).estimate(load)
    adapted = CountedEstimator(joined, recipe).estimate(load)
    rows = 2 * 30 * 2 * 2  # tokens, experts per token, layers
    assert adapted.forward - plain.forward == 2 * rows * 3 * (32 + 48)

    with pytest.raises(RecipeError, match="some experts only"):
        join("mixtral", adapters[1:])


def test_heads_are_tied_as_they_are_live() -> None:
    model = bind("gpt_neox")
    sizes = list_parameters(model.stages)
    first = {**{name: name for name in sizes}, "lm_head.weight": "gpt_neox.embed_in.weight"}
    joined, *_ = join_live(model, Recipe(), LiveParameters(sizes, first))
    assert sizes.keys() - list_parameters(joined.stages).keys() == {"lm_head.weight"}


def test_rules_leave_what_is_known() -> None:
    """No rule is used where every name is the spec's."""
    model = bind("mixtral")
    sizes = list_parameters(model.stages)
    assert join_live(model, Recipe(), LiveParameters(sizes, {name: name for name in sizes}))[3] == ()
    assert all(rule.rename("model.layers.0.self_attn.q_proj").count("..") == 0 for rule in load_rules())


def test_checkpoint_wrappers_say_which_layers_run_again() -> None:
    model = bind("qwen3_moe")
    wrapped = follow_wrappers(model, ["model.layers.0", "model.layers.1"])
    assert [stage.checkpoint for stage in wrapped.stages if stage.repeated] == [True]
    assert not any(stage.checkpoint for stage in follow_wrappers(model, []).stages)
    with pytest.raises(RecipeError, match=r"model\.layers\.1\.mlp"):
        follow_wrappers(model, ["model.layers.1.mlp"])
