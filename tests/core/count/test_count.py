"""Backward and recomputed work by hand: which products owe an input gradient, which a weight gradient."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import bind
from flopcalc.core.estimate.estimate import Estimate

D, FF, V, S = 8, 12, 10, 5
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": FF,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": V,
}
PROJ = 2 * D * D * S  # q, k, v and o each
SCORE = 2 * D * S * S  # queries by keys, and probabilities by values: each 2 · heads · head_dim · pairs
MLP = 2 * D * FF * S  # gate, up and down each
HEAD = 2 * D * V * S


def count(recipe: dict[str, Any], **settings: Any) -> Estimate:
    return bind(LLAMA, recipe=recipe, convention="full", **settings)(1, S)


def backward(estimate: Estimate) -> dict[str, int]:
    return {row.path: row.backward for row in estimate.by_module(per_layer=True) if row.backward}


def test_forward() -> None:
    assert count({}).forward == 2 * (4 * PROJ + 2 * SCORE + 3 * MLP) + HEAD


def test_everything_trains() -> None:
    estimate = count({})
    assert estimate.backward == 2 * estimate.forward  # the embedding before layer 0 wants a gradient too


def test_frozen_embedding_saves_three_input_gradients() -> None:
    rows = backward(count({"freeze": "model.embed_tokens"}))
    # The norm before q, k, v trains, so nothing is saved …
    assert rows["model.layers.0.self_attn.q_proj"] == 2 * PROJ
    # … until it is frozen as well.
    rows = backward(count({"freeze": ["model.embed_tokens", "model.layers.0.input_layernorm"]}))
    assert [rows[f"model.layers.0.self_attn.{name}_proj"] for name in "qkv"] == [PROJ] * 3
    assert rows["model.layers.1.self_attn.q_proj"] == 2 * PROJ
    assert rows["model.layers.0.self_attn.o_proj"] == 2 * PROJ


def test_head_only() -> None:
    assert backward(count({"train_only": "lm_head"})) == {"lm_head": HEAD}


def test_frozen_head_after_trained_layers_owes_its_input_gradient() -> None:
    assert backward(count({"freeze": "lm_head"}))["lm_head"] == HEAD


def test_first_layer_only_makes_all_after_it_owe() -> None:
    rows = backward(count({"train_only": "model.layers.0.mlp.down_proj"}))
    assert rows["model.layers.0.mlp.down_proj"] == MLP
    assert "model.layers.0.mlp.gate_proj" not in rows
    assert rows["model.layers.1.self_attn.q_proj"] == PROJ
    assert rows["model.layers.1.self_attn"] == 4 * SCORE
    assert rows["lm_head"] == HEAD


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("v_proj", SCORE),  # dV alone
        ("q_proj", 2 * SCORE),  # dP and dQ
        ("k_proj", 2 * SCORE),  # dP and dK
    ],
)
def test_one_trained_projection_in_layer_0(name: str, attention: int) -> None:
    rows = backward(count({"train_only": f"model.layers.0.self_attn.{name}"}))
    assert rows["model.layers.0.self_attn"] == attention
    assert rows[f"model.layers.0.self_attn.{name}"] == PROJ
    assert len([path for path in rows if path.startswith("model.layers.0.self_attn")]) == 3  # and o_proj
    assert rows["model.layers.1.self_attn"] == 4 * SCORE


def test_lora_products() -> None:
    rank = 3
    estimate = count({"lora": f"r={rank},targets=q_proj"})
    down = up = 2 * D * rank * S
    rows = {row.path: row for row in estimate.by_module(per_layer=True)}
    first, second = (rows[f"model.layers.{layer}.self_attn.q_proj"] for layer in (0, 1))
    assert first.forward == second.forward == PROJ + down + up
    # Layer 0: A's weight; B's weight and input. Layer 1 also: the frozen product's input and A's input.
    assert first.backward == down + 2 * up
    assert second.backward == PROJ + 2 * down + 2 * up


def test_flash_backward_forms_the_scores_again() -> None:
    eager = bind(LLAMA, convention="hardware", attention_kernel="eager")(1, S)
    flash = bind(LLAMA, convention="hardware", attention_kernel="flash")(1, S)
    pairs = S * (S + 128) // 2
    row = {row.path: row for row in flash.by_module()}["model.layers.*.self_attn"]
    assert row.forward == 2 * 2 * 2 * D * pairs
    assert row.backward == 2 * 5 * 2 * D * pairs  # 2.5 x forward
    assert {row.path: row for row in eager.by_module()}["model.layers.*.self_attn"].backward == 2 * 4 * SCORE


@pytest.mark.parametrize(
    ("recompute", "layer"),
    [
        # Non-reentrant: a layer stops once its last saved tensor, down_proj's input, exists.
        ("full", 4 * PROJ + 2 * SCORE + 2 * MLP),
        ("full-reentrant", 4 * PROJ + 2 * SCORE + 3 * MLP),
    ],
)
def test_recompute(recompute: str, layer: int) -> None:
    estimate = bind(LLAMA, recipe={"recompute": recompute}, convention="hardware", attention_kernel="eager")(1, S)
    plain = count({})
    assert estimate.recompute == 2 * layer
    assert (estimate.forward, estimate.backward) == (plain.forward, plain.backward)
    assert estimate.total == plain.total + 2 * layer
    assert count({"recompute": recompute}).recompute == 0


def test_top_k_experts_and_the_router() -> None:
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    estimate = bind(config)(1, S)
    parts = estimate.by_component()
    assert parts["router"][0] == 2 * (2 * D * 4 * S)
    assert parts["mlp"][0] == 2 * 2 * 3 * MLP
    parameters = estimate.parameters
    assert parameters["total"] - parameters["active"] == 2 * 2 * 3 * D * FF


def test_siblings_owe_one_input_gradient_each() -> None:
    # DeepSeek: shared experts and routed ones read the same tensor; with LoRA on layer 0 alone nothing before owes.
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12,
        "num_attention_heads": 2, "vocab_size": 10, "moe_intermediate_size": 4, "n_routed_experts": 4,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 0, "q_lora_rank": None,
        "kv_lora_rank": 6, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4,
    }  # fmt: skip
    estimate = bind(config, recipe={"train_only": "*.shared_experts.up_proj"}, convention="full")(1, S)
    rows = backward(estimate)
    assert rows == {
        "model.layers.0.mlp.shared_experts.up_proj": 2 * 8 * 4 * S,
        "model.layers.0.mlp.shared_experts.down_proj": 2 * 8 * 4 * S,
        "lm_head": 2 * 8 * 10 * S,
    }


@pytest.mark.parametrize(("norm", "products"), [("q_layernorm", 2), ("k_layernorm", 2), ("*_layernorm", 3)])
def test_norms_of_queries_and_keys_owe_no_gradient_of_the_values(norm: str, products: int) -> None:
    config = {
        "model_type": "persimmon",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 10,
    }
    estimate = bind(config, recipe={"train_only": f"*.self_attn.{norm}"}, convention="full")(1, S)
    assert backward(estimate)["model.layers.0.self_attn"] == products * 2 * 8 * S * S  # of the probabilities, q, k


def test_unused_tower_layers_owe_nothing() -> None:
    config = {
        "model_type": "llava", "vision_feature_layer": -2,
        "text_config": {**LLAMA, "model_type": "llama"},
        "vision_config": {
            "num_hidden_layers": 3, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2,
            "image_size": 4, "patch_size": 2,
        },
    }  # fmt: skip
    rows = {row.path: row for row in bind(config)(1, 9, image_grid_thw=[[1, 2, 2]]).by_module(per_layer=True)}
    last = rows["model.vision_tower.encoder.layers.2.mlp.fc1"]
    assert last.forward == 2 * 8 * 12 * 5  # computed, four patches and the class token …
    assert last.backward == 0  # … and never used
    assert rows["model.vision_tower.encoder.layers.1.mlp.fc1"].backward == 2 * last.forward
