"""Heads of reward and late-interaction models that transformers does not hold, against modules after published code."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tiers import thin

from flopcalc.base.data import list_data_files, load_toml
from flopcalc.core.model.bound import bind_model
from flopcalc.core.model.config import load_config

Json = dict[str, Any]
SIZES: Json = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
GATES: Json = {"num_objectives": 5, "gating_hidden_dim": 12, "gating_n_hidden": 2}
CASES: list[tuple[str, str, Json]] = [  # the class, its model type, further keys
    ("LlamaForRewardModelWithGating", "llama", GATES),
    ("LlamaForRewardModelWithGating", "llama", {**GATES, "trained": "gating.*"}),
    ("LlamaForRewardModelWithGating", "llama", {}),
    ("EurusRewardModel", "mistral", {}),
    ("GPTRewardModel", "llama", {}),
    ("LlamaForScore", "llama", {"score_dim": 2, "bias": True}),
    ("LlamaForScore", "llama", {}),
    ("LlamaForSequenceClassificationWithNormal_Weights", "llama", {"num_labels": 10}),
    ("HF_ColBERT", "bert", {"dim": 6}),
    ("ColQwen3", "qwen3_vl", {"embed_dim": 6}),
    ("OpsColQwen3Model", "ops_colqwen3", {"dims": 7}),
]


def build(named: str, config: Json) -> tuple[Any, Any]:
    """The module and its forward, after the code that heads.toml names for the class."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModel

    kind = "qwen3_vl" if config["model_type"] == "ops_colqwen3" else config["model_type"]
    extra = {"max_position_embeddings": 64} if kind == "bert" else {}
    sizes = {key: config[key] for key in ("text_config", "vision_config")} if kind == "qwen3_vl" else SIZES
    body = AutoModel.from_config(AutoConfig.for_model(kind, **sizes, **extra), attn_implementation="eager")
    model, d = nn.Module(), SIZES["hidden_size"]

    if named == "LlamaForRewardModelWithGating":
        aims, width = config.get("num_objectives", 19), config.get("gating_hidden_dim", 1024)
        widths = [d, *[width] * config.get("gating_n_hidden", 3), aims]
        model.model, model.regression_layer = body, nn.Linear(d, aims, bias=False)
        model.reward_transform_matrix = nn.Parameter(torch.eye(aims), requires_grad=False)
        model.gating = nn.Module()
        model.gating.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        model.gating.logit_scale = nn.Parameter(torch.ones(1))

        def gated(ids: Any) -> Any:
            hidden = body(ids)[0]
            rewards = model.regression_layer(hidden[:, -1]) @ model.reward_transform_matrix
            gate = hidden[:, 3]
            for layer in model.gating.layers:
                gate = torch.relu(layer(gate))
            return rewards * torch.softmax(gate, -1) * model.gating.logit_scale

        return model, gated
    if named == "LlamaForSequenceClassificationWithNormal_Weights":
        labels = config["num_labels"]
        model.model, model.score, model.weights = body, nn.Linear(d, labels, bias=False), nn.Module()
        model.weights.fc = nn.Sequential(
            nn.Linear(d, d), nn.SELU(), nn.Linear(d, d), nn.SELU(), nn.Linear(d, labels // 2)
        )

        def weighed(ids: Any) -> Any:
            hidden = body(ids)[0]
            return model.score(hidden)[..., : labels // 2] * model.weights.fc(hidden)

        return model, weighed
    if kind == "qwen3_vl":
        body.custom_text_proj = nn.Linear(d, config.get("embed_dim") or config["dims"])
        return body, lambda ids: body.custom_text_proj(body(ids)[0])
    place, name, out, has_bias = {
        "EurusRewardModel": ("model", "regression_head", 1, False),
        "GPTRewardModel": ("transformer", "v_head", 1, False),
        "LlamaForScore": ("model", "score_head", config.get("score_dim", 1), config.get("bias", False)),
        "HF_ColBERT": ("bert", "linear", config.get("dim", 128), False),
    }[named]
    model.add_module(place, body)
    model.add_module(name, nn.Linear(d, out, bias=has_bias))
    return model, lambda ids: model.get_submodule(name)(body(ids)[0])


@pytest.mark.parametrize(("named", "kind", "more"), thin(CASES, len(CASES)))
def test_head_equals_the_published_code(named: str, kind: str, more: Json) -> None:
    import torch

    from flopcalc.measure.counters.flop_counter import count_flops
    from flopcalc.measure.hf.compare import compare_bound, make_executed
    from flopcalc.measure.hf.models import count_parameters

    config = {"model_type": kind, "architectures": [named], "max_position_embeddings": 64, **SIZES, **more}
    if "Col" in named and kind != "bert":
        tables = load_toml(list_data_files("aliases")["colqwen3"])["configs"][0]
        config = {"model_type": kind, **more, **tables, "architectures": [named]}
    model, forward = build(named, config)
    recipe: Json = {}
    if "trained" in more:  # the second stage of ArmoRM's training
        model.requires_grad_(requires_grad=False)
        model.gating.requires_grad_(requires_grad=True)
        recipe = {"train_only": [more["trained"]]}
    ids = torch.zeros(2, 8, dtype=torch.long)
    counted = count_flops(model, lambda: forward(ids).sum().backward())
    total, trainable = count_parameters(model)
    traced = {"rows": counted.rows, "total": total, "trainable": trainable, "not_counted": counted.not_counted}
    bound = make_executed(bind_model(load_config(config)), recipe)
    verdict = compare_bound(bound, {"batch": 2, "seq": 8}, traced)
    assert verdict.is_equal, (verdict.different, verdict.parameters, verdict.not_counted)
