"""Published models whose towers take an image as views of one or two fixed sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionModel

from flopcalc.measure.hf.remote.base import SIGLIP, Chat, PostBlock, SplitChat
from flopcalc.measure.hf.remote.text import Step3TextForCausalLM


# --- Step3-VL-10B -----------------------------------------------------------------------------------------------------
class StepVLForConditionalGeneration(SplitChat):
    """vllm-project/vllm: vllm/model_executor/models/step_vl.py: Step-3.7's tower, as transformers has it."""

    language = "model"

    def build(self, config: Any) -> None:
        tower = Step3p7VisionConfig(**{key: value for key, value in config.vision_config.to_dict().items()
                                       if key != "model_type"})  # fmt: skip
        tower._attn_implementation = config._attn_implementation
        self.vision_model = Step3p7VisionModel(tower)
        wide, d = 4 * tower.hidden_size, config.text_config.hidden_size
        self.vit_large_projector = nn.Linear(wide, d, bias=config.projector_bias)

    def see(self, pixel_values: torch.Tensor, patch_pixel_values: torch.Tensor, **_: Any) -> torch.Tensor:
        views = [each for each in (pixel_values, patch_pixel_values) if len(each)]
        made = [self.vit_large_projector(self.vision_model(each).last_hidden_state) for each in views]
        return torch.cat([each.flatten(0, 1) for each in made])


# --- Step-3 -----------------------------------------------------------------------------------------------------------
class StepVision(nn.Module):
    """vllm-project/vllm: vllm/model_executor/models/step3_vl.py, Step3VisionTransformer: four class tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, patch = config.hidden_size, config.patch_size
        self.embeddings = nn.Module()
        self.embeddings.class_embedding = nn.Parameter(torch.ones(1, d))
        self.embeddings.patch_embedding = nn.Conv2d(config.num_channels, d, patch, patch)
        self.embeddings.position_embedding = nn.Embedding((config.image_size // patch) ** 2 + 1, d)
        names = SIGLIP._replace(qkv=("self_attn.qkv_proj",))
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList(
            PostBlock(names, d, config.intermediate_size, config.num_attention_heads)
            for _ in range(config.num_hidden_layers)
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.embeddings.class_embedding.expand(len(x), 4, -1), x], 1)
        x = x + self.embeddings.position_embedding.weight.mean(0)  # resized to the view: no product
        for layer in self.transformer.layers:
            x = layer(x)
        return x[:, 4:]


class Step3VLForConditionalGeneration(Chat):
    """vllm-project/vllm: vllm/model_executor/models/step3_vl.py."""

    def make_text(self, config: Any) -> Any:
        return Step3TextForCausalLM(config)

    def build(self, config: Any) -> None:
        tower = config.vision_config
        d, wide = tower.hidden_size, tower.output_hidden_size
        self.vision_model = StepVision(tower)
        self.vit_downsampler = nn.Conv2d(d, wide, 2, config.understand_projector_stride)
        self.vit_downsampler2 = nn.Conv2d(wide, 2 * wide, 3, 2, 1)
        self.vit_large_projector = nn.Linear(2 * wide, config.text_config.hidden_size, bias=config.projector_bias)

    def see(self, pixel_values: torch.Tensor, patch_pixel_values: torch.Tensor, **_: Any) -> torch.Tensor:
        made = []
        for views in (pixel_values, patch_pixel_values):
            if len(views):
                x = self.vision_model(views).transpose(1, 2)
                side = round(x.shape[-1] ** 0.5)
                x = self.vit_downsampler2(self.vit_downsampler(x.unflatten(-1, (side, side))))
                made.append(self.vit_large_projector(x.flatten(2).transpose(1, 2)).flatten(0, 1))
        return torch.cat(made)
