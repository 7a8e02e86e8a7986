"""Published models whose towers take an image as a grid of patches of any size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.siglip.modeling_siglip import SiglipMultiheadAttentionPoolingHead

from lab.witnesses.base import (
    Block,
    Chat,
    Flat,
    Names,
    Norm,
    SiglipGrid,
    SplitChat,
    VisualTable,
    list_frames,
)


# --- Kimi-VL ----------------------------------------------------------------------------------------------------------
class MoonVit(nn.Module):
    """vllm-project/vllm: vllm/model_executor/models/moonvit.py, after moonshotai's modeling_kimi_vl.py."""

    names = Names(("norm0", "norm1"), ("wqkv",), "", "wo", ("mlp.fc0",), "mlp.fc1")

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, patch = config.hidden_size, config.patch_size
        self.merge = config.merge_kernel_size[0]
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, d, patch, patch)
        self.patch_embed.pos_emb = nn.Module()
        table = torch.ones(config.init_pos_emb_height, config.init_pos_emb_width, d)
        self.patch_embed.pos_emb.weight = nn.Parameter(table)
        self.encoder = nn.Module()
        self.encoder.blocks = nn.ModuleList(
            Block(self.names, d, config.intermediate_size, config.num_attention_heads)
            for _ in range(config.num_hidden_layers)
        )
        self.encoder.final_layernorm = nn.LayerNorm(d)

    def forward(self, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed.proj(pixels).flatten(1)
        x = x + self.patch_embed.pos_emb.weight.mean((0, 1))  # resized to the image: no product
        lengths = grids.prod(1).tolist()
        for block in self.encoder.blocks:
            x = block(x, lengths)
        return self.encoder.final_layernorm(x).unflatten(0, (-1, self.merge**2))


class KimiVLForConditionalGeneration(Chat):
    """vllm-project/vllm: vllm/model_executor/models/kimi_vl.py."""

    image_token = "media_placeholder_token_id"

    def build(self, config: Any) -> None:
        tower = config.vision_config
        wide = tower.hidden_size * tower.merge_kernel_size[0] * tower.merge_kernel_size[1]
        self.vision_tower = MoonVit(tower)
        project = self.multi_modal_projector = nn.Module()
        project.pre_norm = nn.LayerNorm(tower.hidden_size)
        project.linear_1, project.linear_2 = nn.Linear(wide, wide), nn.Linear(wide, config.text_config.hidden_size)

    def see(self, pixel_values: torch.Tensor, image_grid_hws: torch.Tensor, **_: Any) -> torch.Tensor:
        project = self.multi_modal_projector
        x = project.pre_norm(self.vision_tower(pixel_values, image_grid_hws)).flatten(1)
        return project.linear_2(nn.functional.gelu(project.linear_1(x)))


# --- dots.ocr ---------------------------------------------------------------------------------------------------------
class DotsVision(nn.Module):
    """vllm-project/vllm: vllm/model_executor/models/dots_ocr.py, DotsVisionTransformer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, merge = config.embed_dim, config.spatial_merge_size
        names = Names(up=("mlp.fc1", "mlp.fc3"), bias=config.use_bias, norm=Norm)
        self.config = config
        self.patch_embed = nn.Module()
        patchifier = self.patch_embed.patchifier = nn.Module()
        patchifier.proj = nn.Conv2d(config.num_channels, d, config.patch_size, config.patch_size)
        patchifier.norm = Norm(d)
        self.blocks = nn.ModuleList(
            Block(names, d, config.intermediate_size, config.num_attention_heads)
            for _ in range(config.num_hidden_layers)
        )
        if config.post_norm:
            self.post_trunk_norm = Norm(d)
        wide = d * merge**2
        self.merger = nn.Module()
        self.merger.ln_q = nn.LayerNorm(d)
        self.merger.mlp = nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, config.hidden_size))

    def forward(self, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        config, patchifier = self.config, self.patch_embed.patchifier
        frames = config.temporal_patch_size  # the first alone is read
        x = pixels.view(-1, config.num_channels, frames, config.patch_size, config.patch_size)[:, :, 0]
        x = patchifier.norm(patchifier.proj(x).flatten(1))
        lengths = (grids[:, 1] * grids[:, 2]).repeat_interleave(grids[:, 0]).tolist()
        for block in self.blocks:
            x = block(x, lengths)
        if config.post_norm:
            x = self.post_trunk_norm(x)
        return self.merger.mlp(self.merger.ln_q(x).unflatten(0, (-1, config.spatial_merge_size**2)).flatten(1))


class DotsOCRForCausalLM(Flat, Qwen2ForCausalLM):
    """vllm-project/vllm: vllm/model_executor/models/dots_ocr.py; modules named as the weights it loads."""

    config_base = Qwen2Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.vision_tower = DotsVision(config.vision_config)

    def see(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
        return self.vision_tower(pixel_values, image_grid_thw)


# --- Keye-VL ----------------------------------------------------------------------------------------------------------
class KeyeForConditionalGeneration(Flat, Qwen3ForCausalLM):
    """vllm-project/vllm: vllm/model_executor/models/keye.py; modules named as the weights it loads."""

    config_base = Qwen3Config
    norms_merged = False  # the projector's norm reads patches, or merged ones

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        tower = config.vision_config
        self.visual = nn.Module()
        self.visual.vision_model = SiglipGrid(tower, packed=32768)
        self.visual.vision_model.head = SiglipMultiheadAttentionPoolingHead(tower)  # published, and not run
        wide = tower.hidden_size * 4
        project = self.mlp_AR = nn.Module()
        project.pre_norm = nn.LayerNorm(wide if self.norms_merged else tower.hidden_size)
        project.linear_1, project.linear_2 = nn.Linear(wide, wide), nn.Linear(wide, config.hidden_size)

    def see(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
        tower, project = self.visual.vision_model, self.mlp_AR
        x = tower(pixel_values, [list_frames(image_grid_thw)] * len(tower.encoder.layers)).unflatten(0, (-1, 4))
        x = project.pre_norm(x.flatten(1)) if self.norms_merged else project.pre_norm(x).flatten(1)
        return project.linear_2(nn.functional.gelu(project.linear_1(x)))


class KeyeVL1_5ForConditionalGeneration(KeyeForConditionalGeneration):
    """vllm-project/vllm: vllm/model_executor/models/keye_vl1_5.py."""

    norms_merged = True


# --- LLaVA-OneVision-1.5 ----------------------------------------------------------------------------------------------
class Rice(nn.Module):
    """NVIDIA-NeMo/Automodel: nemo_automodel/components/models/llava_onevision/rice_vit.py: a class token per frame."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, patch = config.hidden_size, config.patch_size
        self.merge = config.spatial_merge_size
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(config.in_channels, d, patch, patch, bias=False)
        self.class_embedding = nn.Parameter(torch.ones(d))
        self.class_pos_emb = nn.Parameter(torch.ones(1, d // config.num_heads // 2))
        self.pre_layernorm = nn.LayerNorm(d)
        self.blocks = nn.ModuleList(
            Block(Names(), d, config.intermediate_size, config.num_heads) for _ in range(config.depth)
        )
        wide = d * self.merge**2
        self.merger = nn.Module()
        self.merger.ln_q = nn.LayerNorm(d)
        self.merger.mlp = nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, config.text_hidden_size))

    def forward(self, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        lengths = list_frames(grids)
        frames = self.patch_embed.proj(pixels).flatten(1).split(lengths)
        x = self.pre_layernorm(torch.cat([torch.cat([self.class_embedding[None], frame]) for frame in frames]))
        lengths = [length + 1 for length in lengths]
        for block in self.blocks:
            x = block(x, lengths)
        x = torch.cat([frame[1:] for frame in x.split(lengths)])
        return self.merger.mlp(self.merger.ln_q(x).unflatten(0, (-1, self.merge**2)).flatten(1))


class LLaVAOneVision1_5_ForConditionalGeneration(SplitChat):
    """NVIDIA-NeMo/Automodel: nemo_automodel/components/models/llava_onevision/model.py."""

    def build(self, config: Any) -> None:
        self.model = nn.Module()
        self.model.visual = Rice(config.vision_config)

    def see(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.model.visual(pixel_values, image_grid_thw)


# --- Ovis2.5 ----------------------------------------------------------------------------------------------------------
class Ovis2_5(Chat):
    """vllm-project/vllm: vllm/model_executor/models/ovis2_5.py, siglip2navit.py."""

    language_at, text = "llm", "llm_config"
    image_token = "image_token_id"

    def build(self, config: Any) -> None:
        tower = config.vit_config
        words = config.visual_vocab_size - 4  # without the marks
        self.visual_tokenizer = nn.Module()
        self.visual_tokenizer.vit = nn.Module()
        self.visual_tokenizer.vit.vision_model = SiglipGrid(tower)
        head = nn.Linear(tower.hidden_size * tower.hidden_stride**2, words, bias=False)
        self.visual_tokenizer.head = nn.Sequential(head, nn.LayerNorm(words))
        self.vte = VisualTable(config.visual_vocab_size, config.llm_config.hidden_size)

    def see(self, pixel_values: torch.Tensor, grid_thws: torch.Tensor, **_: Any) -> torch.Tensor:
        tower = self.config.vit_config
        full = getattr(tower, "fullatt_block_indexes", None)
        whole, windows = list_frames(grid_thws), list_windows(grid_thws, tower)
        wide = [int(i) for i in full.split("|")] if full else range(tower.num_hidden_layers)
        lengths = [whole if i in wide else windows for i in range(tower.num_hidden_layers)]
        x = self.visual_tokenizer.vit.vision_model(pixel_values, lengths, normed=False)
        x = self.visual_tokenizer.head(x.unflatten(0, (-1, tower.hidden_stride**2)).flatten(1)).softmax(-1)
        return self.vte(nn.functional.pad(x, (0, 4)))


def list_windows(grids: torch.Tensor, tower: Any) -> list[int]:
    """Patches of each window of window_size pixels, those at the edges cut off."""
    side = tower.window_size // tower.patch_size
    cut = [
        (t, [min(side, h - y) for y in range(0, h, side)], [min(side, w - x) for x in range(0, w, side)])
        for t, h, w in grids.tolist()
    ]
    return [high * wide for t, rows, columns in cut for _ in range(t) for high in rows for wide in columns]


# --- MiniCPM-V --------------------------------------------------------------------------------------------------------
class Resampler(nn.Module):
    """vllm-project/vllm: vllm/model_executor/models/minicpmv.py, Resampler2_5: torch's attention of learned queries."""

    def __init__(self, queries: int, d: int, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.ones(queries, d))
        self.kv_proj = nn.Linear(width, d, bias=False)
        self.attn = nn.MultiheadAttention(d, d // 128)
        self.ln_q, self.ln_kv, self.ln_post = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.proj = nn.Parameter(torch.ones(d, d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ln_kv(self.kv_proj(x)).unsqueeze(1)
        made = self.attn(self.ln_q(self.query).unsqueeze(1), x + 1.0, x)[0].squeeze(1)  # positions cost nothing
        return torch.matmul(self.ln_post(made), self.proj)


class TimmSiglip(nn.Module):
    """vllm-project/vllm: vllm/model_executor/models/minicpmv.py, MiniCPMV2_0: timm's SigLIP without its pooling."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, patch = config.hidden_size, config.patch_size
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(config.num_channels, d, patch, patch)
        self.pos_embed = nn.Parameter(torch.ones(1, (config.image_size // patch) ** 2, d))
        heads, ff = config.num_attention_heads, config.intermediate_size
        self.blocks = nn.ModuleList(Block(Names(), d, ff, heads) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(d)

    def forward(self, pixels: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        x = self.patch_embed.proj(pixels).flatten(1) + self.pos_embed.mean((0, 1))  # resized: no product
        for block in self.blocks:
            x = block.forward(x, lengths)  # timm has a checkpointing of its own, which HF's does not reach
        return self.norm(x)


class MiniCPMV(Chat):
    """vllm-project/vllm: vllm/model_executor/models/minicpmv.py, MiniCPMV2_0 to MiniCPMV4_5; slices are not padded."""

    language_at = "llm"

    def build(self, config: Any) -> None:
        tower, d = config.vision_config, config.text_config.hidden_size
        self.is_first = tower.model_type == "timm_siglip"
        self.vpm = TimmSiglip(tower) if self.is_first else SiglipGrid(tower)
        if config.drop_vision_last_layer:
            del (self.vpm.blocks if self.is_first else self.vpm.encoder.layers)[-1]
        self.resampler = Resampler(config.query_num, d, tower.hidden_size)
        if self.is_first:
            self.resampler.pos_embed = nn.Parameter(torch.ones(config.query_num, d), requires_grad=False)

    def see(self, pixel_values: torch.Tensor, tgt_sizes: torch.Tensor, **_: Any) -> torch.Tensor:
        lengths = tgt_sizes.prod(1).tolist()
        if self.is_first:
            x = self.vpm(pixel_values, lengths)
        else:
            x = self.vpm(pixel_values, [lengths] * len(self.vpm.encoder.layers))
        return torch.cat([self.resampler(each) for each in x.split(lengths)])


# --- Sarashina2-Vision ------------------------------------------------------------------------------------------------
class Sarashina2VisionForCausalLM(Chat):
    """sgl-project/sglang: python/sglang/srt/models/sarashina2_vision.py."""

    language_at = "llm"
    image_token = "image_token_index"

    def build(self, config: Any) -> None:
        keys = {key: value for key, value in config.vision_config.to_dict().items() if key != "model_type"}
        keys["attn_implementation"] = config._attn_implementation
        self.visual = Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(**keys))
        self.norm = nn.LayerNorm(config.text_config.hidden_size)

    def see(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.norm(self.visual(pixel_values, grid_thw=image_grid_thw).pooler_output)
