"""Recipes: what patterns, words and LoRA targets match, what then trains, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import FlopcalcError, Lora, Recipe, RecipeError, bind, estimate_flops, make_recipe
from flopcalc.core.recipe.recipe import parse_lora

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
}  # fmt: skip
VLM: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "text_config": {**LLAMA, "model_type": "qwen2_vl_text"},
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 24, "num_heads": 4, "patch_size": 4},
}
NORM, Q, KV, OUT, MLP, EMBED = 24, 24 * 24, 2 * 24 * 12, 24 * 24, 3 * 24 * 40, 50 * 24
LAYER = 2 * NORM + Q + KV + OUT + MLP


def trainable(recipe: dict[str, Any], config: dict[str, Any] = LLAMA) -> int:
    return bind(config, recipe=recipe).parameters()["trainable"]


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({}, 3 * LAYER + 2 * EMBED + NORM),
        ({"freeze": "model.layers.0"}, 2 * LAYER + 2 * EMBED + NORM),
        ({"freeze": "model.layers.*"}, 2 * EMBED + NORM),
        ({"freeze": "model"}, EMBED),
        ({"freeze": ["model.embed_tokens", "lm_head"]}, 3 * LAYER + NORM),
        ({"freeze": "*.mlp"}, 3 * (LAYER - MLP) + 2 * EMBED + NORM),
        ({"freeze": "*.q_proj.weight"}, 3 * (LAYER - Q) + 2 * EMBED + NORM),
        ({"freeze": "*"}, 0),
        ({"freeze": "language"}, 0),
        ({"train_only": "lm_head"}, EMBED),
        ({"train_only": ["*norm*"]}, 6 * NORM + NORM),
        ({"train_only": "model.layers.[12]"}, 2 * LAYER),
        ({"train_only": "model.layers.?.self_attn"}, 3 * (Q + KV + OUT)),
        ({"train_only": "model.layers.*", "freeze": "*.mlp"}, 3 * (LAYER - MLP)),
        ({"lora": {"r": 4, "targets": ["q_proj"]}}, 3 * 4 * 48),
        ({"lora": {"r": 4, "targets": "q_proj"}}, 3 * 4 * 48),
        ({"lora": "r=4,targets=q_proj"}, 3 * 4 * 48),
        ({"lora": Lora(4, ("q_proj",))}, 3 * 4 * 48),
        ({"lora": {"targets": ["q_proj"]}}, 3 * 8 * 48),
        ({"lora": "r=2,targets=layers.1.self_attn.q_proj"}, 2 * 48),
        ({"lora": "r=2,targets=q_proj,save=lm_head"}, 3 * 2 * 48 + EMBED),
        ({"lora": "r=2,targets=q_proj,save=norm"}, 3 * 2 * 48 + 7 * NORM),  # PEFT: whatever ends in it
        ({"lora": "r=2,targets=q_proj+o_proj,save=o_proj"}, 3 * 2 * 48 + 3 * OUT),  # and adapts nothing that it saves
        ({"lora": "r=2,targets=q_proj", "freeze": "*.lora_A.*"}, 3 * 2 * 24),
        ({"lora": "r=2,targets=q_proj", "freeze": "model.layers.0"}, 2 * 2 * 48),
        ({"lora": r"r=1,targets=re:.*\.(q|o)_proj|.*\.mlp\.up_proj"}, 3 * (48 + 48 + 64)),
        ({"lora": "r=1,targets=all-linear"}, 3 * (48 + 36 + 36 + 48 + 64 + 64 + 64)),
        ({"lora": "r=3,targets=embed_tokens"}, 3 * 50 + 3 * 24),
        ({"lora": "r=2,targets=q_proj,exclude=model.layers.0+*.2.self_attn"}, 2 * 48),
    ],
)
def test_what_trains(recipe: dict[str, Any], expected: int) -> None:
    assert trainable(recipe) == expected


def test_words_split_a_vision_language_model() -> None:
    parts = {word: trainable({"train_only": word}, VLM) for word in ("vision", "projector", "language")}
    assert sum(parts.values()) == trainable({}, VLM)
    merger = 2 * 32 + (128 * 128 + 128) + (128 * 24 + 24)  # inside the tower's module, and yet the projector
    assert parts["projector"] == merger
    tied = 3 * (LAYER + 24 + 12 + 12) + 2 * EMBED + NORM  # Qwen2 has biases on q, k, v
    assert parts["language"] == tied
    assert trainable({"freeze": "vision"}, VLM) == parts["projector"] + parts["language"]
    assert trainable({"freeze": "model.visual"}, VLM) == parts["language"]


def test_lora_on_bare_parameters() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 9, "decoder_sparse_step": 1}
    config = {**LLAMA, **experts, "model_type": "qwen3_moe", "mlp_only_layers": []}
    down, up, q = 4 * (9 + 24), 4 * (24 + 18), trainable({"lora": "r=1,targets=q_proj"}, config)
    for targets, expected in (
        ("param:experts.down_proj", 3 * 3 * down),
        ("param:layers.1.mlp.experts.gate_up_proj", 3 * up),
        ("q_proj+param:experts.gate_up_proj+param:down_proj", 3 * q + 3 * 3 * (down + up)),
    ):
        assert trainable({"lora": f"r=3,targets={targets}"}, config) == expected
    for wrong in ("param:q_proj.weight", "experts.gate_up_proj"):  # a module's weight, a parameter as a module
        with pytest.raises(RecipeError, match="matches no module"):
            bind(config, recipe={"lora": f"r=3,targets={wrong}"})


def test_lora_reaches_towers() -> None:
    assert trainable({"lora": "r=1,targets=qkv"}, VLM) == 2 * (32 + 96)
    towers = trainable({"lora": "r=1,targets=all-linear,exclude=language"}, VLM)
    others = trainable({"lora": "r=1,targets=all-linear,exclude=vision+projector"}, VLM)
    assert towers + others == trainable({"lora": "r=1,targets=all-linear"}, VLM)


def test_a_tied_weight_trains_by_either_name() -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    assert trainable({}, tied) == 3 * LAYER + EMBED + NORM
    assert trainable({"train_only": "lm_head"}, tied) == EMBED
    assert trainable({"train_only": "model.embed_tokens"}, tied) == EMBED
    assert trainable({"freeze": "lm_head"}, tied) == 3 * LAYER + NORM
    # PEFT's copy of a saved tied head is a weight of its own.
    parameters = bind(tied, recipe={"lora": "r=1,targets=q_proj,save=lm_head"}).parameters()
    assert parameters["trainable"] == 3 * 48 + EMBED
    assert parameters["total"] == 3 * LAYER + EMBED + NORM + 3 * 48 + EMBED


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"freeze": "model.layer.0"}, "freeze 'model.layer.0' matches no module"),
        ({"freeze": ["*.mlp", "x"]}, "freeze 'x' matches no module"),
        ({"freeze": "vision"}, "freeze 'vision' matches no module"),
        ({"freeze": "model.layers.3"}, "freeze 'model.layers.3' matches no module"),
        ({"train_only": "proj"}, "train_only 'proj' matches no module"),
        ({"lora": "r=2,targets=query"}, "lora target 'query' matches no module"),
        ({"lora": "r=2,targets=q_proj+query"}, "lora target 'query' matches no module"),
        ({"lora": "r=2,targets=_proj"}, "lora target '_proj' matches no module"),
        ({"lora": "r=2,targets=q_proj,save=heads"}, "lora save 'heads' matches no module"),
        ({"lora": "r=2,targets=q_proj,save=mlp"}, "lora save 'mlp' matches no module"),
        ({"lora": "r=2,targets=q_proj,save=norm+s"}, "lora save: model.layers holds other modules"),
        ({"lora": "r=2,targets=q_proj,save=proj"}, "save proj is the end of model.layers.0.self_attn.q_proj too"),
        ({"lora": "r=2,targets=q_proj,save=q_proj"}, "every target is in save too"),
        ({"lora": "r=2,targets=q_proj,exclude=*.q_proj"}, "every target is in exclude"),
        ({"lora": "r=2,targets=q_proj,exclude=vision"}, "lora exclude 'vision' matches no module"),
        ({"lora": "r=2,targets=q_proj", "train_only": "lm_head"}, "train_only contradicts lora"),
        ({"lora": "r=2"}, "lora needs targets"),
        ({"lora": "r=2,targets="}, "lora targets: '' is not a pattern"),
        ({"lora": ""}, "as in r=16,targets=q_proj+v_proj"),
        ({"lora": "rank=2,targets=q_proj"}, "as in r=16,targets=q_proj+v_proj"),
        ({"lora": "r=2,r=3,targets=q_proj"}, "r given twice"),
        ({"lora": "r=two,targets=q_proj"}, "lora r: 'two' is not a whole number"),
        ({"lora": "r=0,targets=q_proj"}, "lora r must be at least 1"),
        ({"lora": "r=-1,targets=q_proj"}, "lora r must be at least 1"),
        ({"lora": "r=" + "9" * 5000 + ",targets=q_proj"}, "lora r"),
        ({"lora": {"r": 1.5, "targets": ["q_proj"]}}, "lora r must be a whole number"),
        ({"lora": {"r": 2, "targets": 5}}, "lora targets must be a pattern or several"),
        ({"lora": {"r": 2, "targets": [5]}}, "5 is not a pattern"),
        ({"lora": {"r": 2, "targets": ["q_proj"], "save": 5}}, "lora save must be"),
        ({"lora": {"r": 2, "targets": ["q_proj"], "alpha": 5}}, "unknown key 'alpha'"),
        ({"lora": 5}, "lora must be"),
        ({"freeze": 5}, "freeze must be a pattern"),
        ({"freeze": [None]}, "None is not a pattern"),
        ({"freeze": ""}, "'' is not a pattern"),
        ({"recompute": "some"}, "known: none, full, full-reentrant"),
        ({"recompute": []}, "recompute"),
        ({"frozen": "x"}, "unknown key 'frozen'; known: freeze"),
        ("lora", "a recipe is a mapping"),
        (5, "a recipe is a mapping"),
    ],
)
def test_bad_recipe(recipe: Any, words: str) -> None:
    with pytest.raises(FlopcalcError) as caught:
        bind(LLAMA, recipe=recipe)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500


def test_fused_experts_are_adapted_together_or_not_at_all() -> None:
    moe = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(RecipeError, match="w1, w3 are fused into one parameter"):
        bind(moe, recipe={"lora": "r=2,targets=w1"})
    parameters = bind(moe, recipe={"lora": "r=2,targets=w1+w3+w2"}).parameters()
    # PEFT adds the ranks of the fused pair: (24 + 80) x 4 per expert, and (40 + 24) x 2 for w2.
    assert parameters["trainable"] == 3 * 4 * ((24 + 80) * 4 + (40 + 24) * 2)


def test_parse_lora() -> None:
    expected = {"r": 16, "targets": ("q_proj", "v_proj"), "save": ("lm_head",)}
    assert parse_lora("r=16, targets=q_proj+v_proj ,save=lm_head") == expected


def test_recipe_to_dict() -> None:
    recipe = make_recipe(freeze="vision", lora="r=4,targets=q_proj", recompute="full")
    assert recipe.to_dict() == {
        "freeze": ["vision"],
        "train_only": [],
        "lora": {"r": 4, "targets": ["q_proj"], "save": []},
        "recompute": "full",
        "clipping": "none",
    }
    assert Recipe().to_dict()["lora"] is None


def test_recipe_objects_and_mappings_agree() -> None:
    mapping = {"lora": {"r": 4, "targets": ["q_proj"]}, "recompute": "full"}
    one = estimate_flops(LLAMA, seq_len=9, recipe=mapping)
    assert one == estimate_flops(LLAMA, seq_len=9, recipe=make_recipe(**mapping))
