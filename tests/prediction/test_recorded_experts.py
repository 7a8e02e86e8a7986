"""Recorded operators of experts grow with the number of a token's experts, whatever a config calls it."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import bind
from flopcalc.core.model.config import load_config
from flopcalc.core.workload.workload import make_workload
from flopcalc.prediction.operators import list_operators

TEXT: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 4096,
    "head_dim": 64, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
SHARED: dict[str, Any] = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
# A preset or a config, and the key of the number of a token's experts.
TYPES: dict[str, tuple[str | dict[str, Any], str]] = {
    "qwen2_moe": ("qwen1.5-moe-a2.7b", "num_experts_per_tok"),
    "qwen3_moe": ("qwen3-30b-a3b", "num_experts_per_tok"),
    "mixtral": ("mixtral-8x7b", "num_experts_per_tok"),
    "granitemoe": ("granite-3.0-3b-a800m", "num_experts_per_tok"),
    "deepseek_v2": ("deepseek-v2-lite", "num_experts_per_tok"),
    "deepseek_v3": ("deepseek-v3", "num_experts_per_tok"),
    "glm4_moe": ("glm-4.5-air", "num_experts_per_tok"),
    "glm4_moe_lite": ("glm-4.7-flash", "num_experts_per_tok"),
    "minimax_m2": ("minimax-m2", "num_experts_per_tok"),
    "gpt_oss": ("gpt-oss-20b", "num_experts_per_tok"),
    "olmoe": ({**TEXT, "model_type": "olmoe", "num_experts": 16}, "num_experts_per_tok"),
    "ernie4_5_moe": (
        {**TEXT, "model_type": "ernie4_5_moe", "moe_num_experts": 16, "moe_intermediate_size": 256,
         "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
        "moe_k",
    ),
    "hunyuan_v1_moe": ({**TEXT, "model_type": "hunyuan_v1_moe", "num_experts": 16}, "moe_topk"),
    "granitemoeshared": (
        {**TEXT, "model_type": "granitemoeshared", "num_local_experts": 16, "shared_intermediate_size": 256},
        "num_experts_per_tok",
    ),
    "dots1": (
        {**TEXT, **SHARED, "model_type": "dots1", "n_routed_experts": 16, "moe_intermediate_size": 256},
        "num_experts_per_tok",
    ),
}  # fmt: skip


def count_rows(config: dict[str, Any]) -> int:
    """Bytes that gathers of experts' rows write in a forward pass."""
    found = list_operators(bind(config), make_workload(2, 512))
    assert found.is_recorded
    rows = [row for row in found.rows if row.module.endswith("experts") and row.kind.startswith("gather")]
    return sum(round(row.writes * row.count) for row in rows if row.direction == "forward")


@pytest.mark.parametrize("keys", [2, 8])
@pytest.mark.parametrize("kind", TYPES)
def test_rows_of_experts_grow_with_the_experts_of_a_token(kind: str, keys: int) -> None:
    """Also with as many heads of keys as heads."""
    source, name = TYPES[kind]
    config = dict(source) if isinstance(source, dict) else dict(load_config(source).config)
    if isinstance(source, dict):
        config["num_key_value_heads"] = keys
    few, many = (count_rows({**config, name: each}) for each in (2, 4))
    assert few > 0
    assert many == pytest.approx(2 * few, rel=0.02)
