"""Multi-token prediction against a module of transformers' own layers, put together as the released code does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiers import mark_heavy

from flopcalc import bind
from flopcalc.measure.counters.flop_counter import count_flops
from flopcalc.measure.hf.examples import find_example
from flopcalc.measure.hf.models import build_model

# deepseek-ai/DeepSeek-V3: README_WEIGHTS.md; vllm-project/vllm: vllm/model_executor/models/deepseek_mtp.py and beside
LAYERS = {
    "deepseek_v3": "DeepseekV3DecoderLayer",
    "glm4_moe": "Glm4MoeDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "mimo_v2_flash": "MiMoV2FlashDecoderLayer",
}


class WithPrediction(torch.nn.Module):
    """A language model and one layer that predicts the token after the next."""

    def __init__(self, model: Any, layer: Any) -> None:
        super().__init__()
        width = model.config.hidden_size
        self.model, self.layer = model, layer
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.enorm, self.hnorm, self.norm = (torch.nn.RMSNorm(width) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        inner = self.model.model
        out = inner(input_ids=ids, use_cache=False)
        joined = torch.cat([self.enorm(inner.embed_tokens(ids)), self.hnorm(out.last_hidden_state)], -1)
        positions = torch.arange(ids.shape[1])[None]
        # MiMo-V2's layer has a window, whose rotary embeddings are its own.
        kind = ["sliding_attention"] if "MiMo" in type(inner).__name__ else []
        rotary = inner.rotary_emb(joined, positions, *kind)
        hidden = self.layer(
            self.eh_proj(joined), attention_mask=None, position_ids=positions, position_embeddings=rotary
        )
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        logits = self.model.lm_head(self.norm(hidden)) + self.model.lm_head(out.last_hidden_state)
        return logits.float().sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", mark_heavy(LAYERS, ("deepseek_v3",)))
def test_one_layer(name: str) -> None:
    config = dict(find_example(name).configs[0])
    model = build_model(config, "eager")
    modeling = __import__(type(model).__module__, fromlist=[LAYERS[name]])
    last = model.config.num_hidden_layers - 1
    if name == "mimo_v2_flash":
        model.config.layer_types[last], model.config.mlp_layer_types[last] = "sliding_attention", "dense"
    layer = getattr(modeling, LAYERS[name])(model.config, last)
    whole = WithPrediction(model, layer)
    ids = torch.randint(3, 60, (2, 9))
    counted = count_flops(whole, lambda: whole(ids).backward())
    estimate = bind(config, mtp=1, convention="full", head="lm")(2, 9)
    assert (estimate.forward, estimate.backward) == (counted.forward, counted.backward)
    assert estimate.parameters["total"] == sum(each.numel() for each in whole.parameters())
