"""Published models whose towers are timm's, each over images of one size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lab.witnesses.base import Block, Chat, Names


class TimmPool(nn.Module):
    """timm's pooling by attention, held but not run."""

    def __init__(self, d: int, ff: int) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.ones(1, 1, d))
        self.q, self.kv, self.proj = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.norm, self.mlp = nn.LayerNorm(d), nn.Module()
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(d, ff), nn.Linear(ff, d)


# --- DeepSeek-VL2 -----------------------------------------------------------------------------------------------------
class TimmTiles(nn.Module):
    """deepseek-ai/DeepSeek-VL2: deepseek_vl2/models/siglip_vit.py: every patch of a tile; its pooling does not run."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, patch, ff = config.width, config.patch_size, int(config.width * config.mlp_ratio)
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, d, patch, patch)
        self.pos_embed = nn.Parameter(torch.ones(1, (config.image_size // patch) ** 2, d))
        self.blocks = nn.ModuleList(Block(Names(), d, ff, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(d)
        self.attn_pool = TimmPool(d, ff)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed.proj(pixels).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block.forward(x)  # timm has a checkpointing of its own, which HF's does not reach
        out: torch.Tensor = self.norm(x)
        return out


class DeepseekVLV2ForCausalLM(Chat):
    """deepseek-ai/DeepSeek-VL2: deepseek_vl2/models/modeling_deepseek_vl_v2.py, tiles in two dimensions."""

    language_at = "language"

    def build(self, config: Any) -> None:
        project, self.projector = config.projector_config, nn.Module()
        fold, d = project.downsample_ratio, project.n_embed
        inner = d * project.mlp_ratio
        self.vision = TimmTiles(config.vision_config)
        self.projector.layers = nn.Sequential(
            nn.Linear(project.input_dim * fold**2, inner), nn.GELU(), nn.Linear(inner, d)
        )
        self.image_newline, self.view_seperator = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))

    def see(self, pixel_values: torch.Tensor, images_spatial_crop: torch.Tensor, **_: Any) -> torch.Tensor:
        x, fold = self.vision(pixel_values), self.config.projector_config.downsample_ratio
        side = round(x.shape[1] ** 0.5)
        odd = -side % fold
        x = nn.functional.pad(x.unflatten(1, (side, side)), (0, 0, 0, odd, 0, odd)).permute(0, 3, 1, 2)
        x = self.projector.layers(nn.functional.unfold(x, fold, stride=fold).transpose(1, 2))
        few = (side + odd) // fold
        made, at = [], 0
        for columns, rows in images_spatial_crop.tolist():
            whole, tiles = x[at].unflatten(0, (few, few)), x[at + 1 : at + 1 + rows * columns]
            tiles = tiles.unflatten(0, (rows, columns)).unflatten(2, (few, few)).transpose(1, 2).flatten(2, 3)
            made += [self.end_rows(whole), self.view_seperator.unsqueeze(0), self.end_rows(tiles.flatten(0, 1))]
            at += 1 + rows * columns
        return torch.cat(made)

    def end_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of features, each with a mark behind it, as one row."""
        return torch.cat([x, self.image_newline.expand(len(x), 1, -1)], 1).flatten(0, 1)


# --- OpenVLA ----------------------------------------------------------------------------------------------------------
class TimmPatches(nn.Module):
    """timm 0.9.10: timm/models/vision_transformer.py, its patches behind the last block but one; every block runs."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, patch, ff = config.embed_dim, config.patch_size, int(config.embed_dim * config.mlp_ratio)
        self.marks = config.class_token + config.reg_tokens
        self.positions_of_all = not config.no_embed_class
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, d, patch, patch)
        if config.class_token:
            self.cls_token = nn.Parameter(torch.ones(1, 1, d))
        if config.reg_tokens:
            self.reg_token = nn.Parameter(torch.ones(1, config.reg_tokens, d))
        places = (config.image_size // patch) ** 2 + self.marks * self.positions_of_all
        self.pos_embed = nn.Parameter(torch.ones(1, places, d))
        names = Names(scales=("ls1.scale_factor", "ls2.scale_factor") if config.init_values else ())
        self.blocks = nn.ModuleList(Block(names, d, ff, config.num_heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(d)
        if config.global_pool == "map":
            self.attn_pool = TimmPool(d, ff)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed.proj(pixels).flatten(2).transpose(1, 2)
        marks = [
            getattr(self, name).expand(len(x), -1, -1) for name in ("cls_token", "reg_token") if hasattr(self, name)
        ]
        if self.positions_of_all:
            x = torch.cat([*marks, x], 1) + self.pos_embed
        else:
            x = torch.cat([*marks, x + self.pos_embed], 1)
        states = []
        for block in self.blocks:
            x = block.forward(x)  # timm has a checkpointing of its own, which HF's does not reach
            states.append(x)
        return states[-2][:, self.marks :]


class OpenVLAForActionPrediction(Chat):
    """openvla/openvla: prismatic/extern/hf/modeling_prismatic.py; places for images as in vLLM's openvla.py."""

    image_token = "image_token_index"

    def build(self, config: Any) -> None:
        self.vision_backbone, self.projector = nn.Module(), nn.Module()
        self.vision_backbone.featurizer = TimmPatches(config.vision_config)
        d, width, wide = config.text_config.hidden_size, config.vision_config.embed_dim, []
        if config.use_fused_vision_backbone:
            self.vision_backbone.fused_featurizer = TimmPatches(config.fused_vision_config)
            width += config.fused_vision_config.embed_dim
            wide = [4 * width]
        widths = [width, *wide, d, d]
        for i in range(len(widths) - 1):
            self.projector.add_module(f"fc{i + 1}", nn.Linear(widths[i], widths[i + 1]))

    def see(self, pixel_values: torch.Tensor, **_: Any) -> torch.Tensor:
        towers = self.vision_backbone.children()
        x = torch.cat([tower(pixels) for tower, pixels in zip(towers, pixel_values.split(3, 1), strict=True)], 2)
        first, *others = self.projector.children()
        x = first(x)
        for other in others:
            x = other(nn.functional.gelu(x))
        return x
