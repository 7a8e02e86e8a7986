"""The modules that transformers' quantizers convert are those that the count takes as quantized."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import mark_heavy

from flopcalc import bind
from flopcalc.base.data import list_data_files, load_toml
from flopcalc.core.formats.quantization import Pattern
from flopcalc.core.model.ops import Weighted, iterate, join

pytest.importorskip("torch")
pytest.importorskip("transformers")

TYPES = ("llama", "mixtral", "gpt2", "qwen2_moe", "dbrx", "deepseek_v3", "gemma3", "jamba", "qwen2_vl")
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}


def load_config(name: str) -> dict[str, Any]:
    table = load_toml(list_data_files("examples")[name])
    given = dict(table["configs"][0])
    nulls = given.pop("null_keys", [])
    named = {"architectures": [table["architecture"]]} if "architecture" in table else {}
    return {"model_type": name, **named, **given, **dict.fromkeys(nulls)}


@pytest.mark.parametrize("name", mark_heavy(TYPES, ["llama"]))
def test_converted_modules(name: str) -> None:
    import torch
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    from flopcalc.measure.hf.models import build_model

    config = load_config(name)
    model = build_model(config)
    kept = get_keys_to_not_convert(model)
    converted = {
        path
        for path, module in model.named_modules()
        if (type(module) is torch.nn.Linear or isinstance(module, Conv1D)) and should_convert_module(path, kept)
    }
    estimator = bind({**config, "quantization_config": CONFIG})
    found: set[str] = set()
    for stage in estimator.stages:
        for layer, chain in enumerate(stage.layers, stage.first):
            start = f"{stage.path}.{layer}" if stage.repeated else stage.path
            for op in iterate(chain):
                path = join(start, op.name)
                if estimator.formats.resolve(op, path, stage.group).weight.is_quantized:
                    assert isinstance(op, Weighted)
                    found |= {path.replace("*", copy) for copy in op.copy_names}
    assert found == converted


def test_patterns_match_as_in_transformers() -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    names = ("lm_head", "model.layers.1.mlp.gate", "model.layers.11.mlp.gate_proj", "model.layers.1.self_attn.q_proj")
    texts = ("lm_head", "model.layers.1", "mlp.gate", "layers.*.mlp", "q_proj", "model.layers.*.self_attn", "gate|q")
    for text in texts:
        for name in names:
            assert Pattern(text, "hf").matches(name) != should_convert_module(name, [text]), (text, name)
