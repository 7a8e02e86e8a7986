"""Published models whose towers take an image as views of one or two fixed sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    CLIPVisionModel,
    LlavaOnevisionForConditionalGeneration,
    Phi3Config,
    Phi3ForCausalLM,
    Siglip2VisionModel,
    SiglipVisionModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionModel

from lab.witnesses.base import (
    SIGLIP,
    Block,
    Chat,
    Flat,
    Names,
    Norm,
    PostBlock,
    Sees,
    SplitChat,
    VisualTable,
    attend,
    run_experts,
)
from lab.witnesses.text import GatedMlp, Step3TextForCausalLM, TextModel


# --- Step3-VL-10B -----------------------------------------------------------------------------------------------------
class StepVLForConditionalGeneration(SplitChat):
    """vllm-project/vllm: vllm/model_executor/models/step_vl.py: Step-3.7's tower, as transformers has it."""

    language_at = "model"

    def build(self, config: Any) -> None:
        tower = Step3p7VisionConfig(
            **{key: value for key, value in config.vision_config.to_dict().items() if key != "model_type"}
        )
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


# --- Molmo ------------------------------------------------------------------------------------------------------------
class MolmoTable(nn.Module):
    """The words' embeddings, and those of more tokens."""

    def __init__(self, words: int, d: int, more: int = 128) -> None:
        super().__init__()
        self.embedding, self.new_embedding = nn.Parameter(torch.ones(words, d)), nn.Parameter(torch.ones(more, d))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, torch.cat([self.embedding, self.new_embedding]))


class MolmoPooling(nn.Module):
    """vllm-project/vllm: vllm/model_executor/models/molmo.py, MultiHeadDotProductAttention; queries of their own."""

    def __init__(self, d: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv = (nn.Linear(layers * d, d) for _ in range(3))
        self.wo = nn.Linear(d, d)

    def forward(self, query: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        made = (self.wq(query), self.wk(x), self.wv(x))
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in made)
        out: torch.Tensor = self.wo(attend(q, k, v))
        return out


class MolmoVision(nn.Module):
    """vllm-project/vllm: vllm/model_executor/models/molmo.py, MolmoVisionBackbone: reads two layers, pools 2 by 2."""

    def __init__(self, config: Any, d: int, ff: int) -> None:
        super().__init__()
        width, self.side = config.image_emb_dim, config.image_default_input_size[0] // config.image_patch_size
        self.width = width
        vit = self.image_vit = nn.Module()
        vit.class_embedding = nn.Parameter(torch.ones(width))
        vit.positional_embedding = nn.Parameter(torch.ones(config.image_num_pos, width))
        vit.patch_embedding = nn.Linear(3 * config.image_patch_size**2, width, bias=False)
        vit.pre_ln = nn.LayerNorm(width)
        names = Names(
            ("attention_norm", "ffn_norm"),
            ("attention.wq", "attention.wk", "attention.wv"),
            "attention",
            "attention.wo",
            ("feed_forward.w1",),
            "feed_forward.w2",
        )
        vit.transformer = nn.Module()
        vit.transformer.resblocks = nn.ModuleList(
            Block(names, width, config.image_mlp_dim, config.image_num_heads) for _ in range(config.image_num_layers)
        )
        self.image_pooling_2d = MolmoPooling(width, config.image_num_heads, 2)
        self.image_projector = nn.Module()
        self.image_projector.w1, self.image_projector.w3 = (nn.Linear(width, ff // 2, bias=False) for _ in range(2))
        self.image_projector.w2 = nn.Linear(ff // 2, d, bias=False)
        self.pad_embed = nn.Parameter(torch.ones(2, 2 * width))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        vit = self.image_vit
        x = vit.patch_embedding(patches)
        x = torch.cat([vit.class_embedding.expand(len(x), 1, -1), x], 1) + vit.positional_embedding.mean(0)
        x, states = vit.pre_ln(x), []
        for block in vit.transformer.resblocks:
            x = block(x)
            states.append(x)
        x = torch.cat([states[-2], states[-9]], -1)[:, 1:] + self.pad_embed.sum(0)
        x = x.unflatten(1, (self.side, self.side))
        odd = self.side % 2
        x = nn.functional.pad(x, (0, 0, 0, odd, 0, odd)).unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
        x = x.transpose(2, 3).flatten(3, 4).flatten(0, 2)  # windows, four patches each
        pooled = self.image_pooling_2d(x.mean(-2, keepdim=True), x).squeeze(1)
        project = self.image_projector
        out: torch.Tensor = project.w2(nn.functional.silu(project.w1(pooled)) * project.w3(pooled))
        return out


class MolmoLayer(GradientCheckpointingLayer):
    """vllm-project/vllm: vllm/model_executor/models/molmo.py, MolmoDecoderLayer; named as the weights it loads."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        d, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.after, self.layer, self.head_dim = config.norm_after, layer, d // heads
        self.widths = [d, kv_heads * self.head_dim, kv_heads * self.head_dim]
        self.att_proj = nn.Linear(d, sum(self.widths), bias=config.qkv_bias)
        self.attn_out = nn.Linear(d, d, bias=False)
        if config.attention_layer_norm:
            self.q_norm, self.k_norm = Norm(d), Norm(self.widths[1])
        self.ff_proj = nn.Linear(d, config.intermediate_size, bias=False)
        self.ff_out = nn.Linear(config.intermediate_size // 2, d, bias=False)
        self.attn_norm, self.ff_norm = Norm(d), Norm(d)

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        q, k, v = self.att_proj(x if self.after else self.attn_norm(x)).split(self.widths, -1)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (q, k, v))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        made = self.attn_out(attend(q, k, v))
        x = x + (self.attn_norm(made) if self.after else made)
        up, gate = self.ff_proj(x if self.after else self.ff_norm(x)).chunk(2, -1)
        made = self.ff_out(nn.functional.silu(gate) * up)
        return x + (self.ff_norm(made) if self.after else made)


class MolmoForCausalLM(Sees, TextModel):
    """vllm-project/vllm: vllm/model_executor/models/molmo.py; named as the weights it loads."""

    image_token = "image_token_id"

    def __init__(self, config: Any) -> None:
        super(TextModel, self).__init__(config)
        d = config.hidden_size
        self.model = nn.Module()
        text = self.model.transformer = nn.Module()
        text.wte = MolmoTable(config.vocab_size, d)
        text.blocks = nn.ModuleList(MolmoLayer(config, i) for i in range(config.num_hidden_layers))
        text.ln_f = Norm(d)
        text.ff_out = nn.Linear(d, config.vocab_size, bias=False)
        self.model.vision_backbone = MolmoVision(config.vision_backbone, d, config.intermediate_size)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.model.transformer.wte

    def get_output_embeddings(self) -> Any:
        return self.model.transformer.ff_out

    def score(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.get_output_embeddings()(x)
        return logits

    def run(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        for layer in self.model.transformer.blocks:
            x = layer(x, cache)
        out: torch.Tensor = self.model.transformer.ln_f(x)
        return out

    def forward(self, input_ids: torch.Tensor, images: Any = None, inputs_embeds: Any = None, **inputs: Any) -> Any:
        count = int((input_ids == self.config.image_token_id).sum())
        own = {} if images is None else {"pixel_values": images, "count": count}
        return super().forward(**inputs, **self.embed(input_ids, own, inputs_embeds))

    def see(self, pixel_values: torch.Tensor, count: int) -> torch.Tensor:
        # Where crops overlap, one of them gives a place its features: the others' are left.
        return self.model.vision_backbone(pixel_values)[:count]


class MolmoeAttention(nn.Module):
    """allenai/MolmoE-1B-0924: modeling_molmoe.py, MolmoAttention, with its norm."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        d, heads = config.d_model, config.n_heads
        kv_heads = getattr(config, "n_kv_heads", None)
        if kv_heads is None and config.attention_layer_norm:
            kv_heads = heads  # set there with the norms alone
        self.after, self.layer, self.head_dim = config.norm_after, layer, d // heads
        if self.head_dim % 2:
            raise ValueError(f"rotary embeddings turn pairs of numbers, not {self.head_dim}")
        self.widths = [d, kv_heads * self.head_dim, kv_heads * self.head_dim]
        self.att_proj = nn.Linear(d, sum(self.widths), bias=config.qkv_bias)
        self.attn_out = nn.Linear(d, d, bias=False)
        if config.attention_layer_norm:
            self.q_norm, self.k_norm = Norm(d), Norm(d)
        self.attn_norm = Norm(d)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        q, k, v = self.att_proj(x if self.after else self.attn_norm(x)).split(self.widths, -1)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (q, k, v))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        made: torch.Tensor = self.attn_out(attend(q, k, v))
        return self.attn_norm(made) if self.after else made


class MolmoeExperts(nn.Module):
    """allenai/MolmoE-1B-0924: modeling_molmoe.py, MolmoeSparseMoeBlock: its norm is always before it."""

    def __init__(self, config: Any, ff: int) -> None:
        super().__init__()
        d, self.top_k = config.d_model, config.moe_top_k
        self.gate = nn.Linear(d, config.moe_num_experts, bias=False)
        self.experts = nn.ModuleList(GatedMlp(d, ff // 2) for _ in range(config.moe_num_experts))
        self.ff_norm = Norm(d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.ff_norm(x).flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top_k, -1)
        return run_experts(self.experts, flat, weights, chosen).view_as(x)


class MolmoeLayer(GradientCheckpointingLayer):
    """allenai/MolmoE-1B-0924: modeling_molmoe.py, MolmoDecoderLayer."""

    def __init__(self, config: Any, ff: int, layer: int) -> None:
        super().__init__()
        self.attn, self.mlp = MolmoeAttention(config, layer), MolmoeExperts(config, ff)

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        x = x + self.attn(x, cache)
        out: torch.Tensor = x + self.mlp(x)
        return out


class OLMoForCausalLM(MolmoForCausalLM):
    """allenai/MolmoE-1B-0924: modeling_molmoe.py, MolmoForCausalLM; config.json calls the class so."""

    def __init__(self, config: Any) -> None:
        super(TextModel, self).__init__(config)
        d, words = config.d_model, getattr(config, "embedding_size", None) or config.vocab_size
        ff = getattr(config, "mlp_hidden_size", None) or config.mlp_ratio * d
        if ff % 2 or words < config.vocab_size:
            raise ValueError(f"an MLP of {ff} halved, a table of {words} for {config.vocab_size} words")
        tower = config.vision_backbone
        if tower.image_emb_dim != tower.image_num_heads * tower.image_head_dim:
            raise ValueError(f"{tower.image_num_heads} heads of {tower.image_head_dim} in {tower.image_emb_dim}")
        self.model = nn.Module()
        text = self.model.transformer = nn.Module()
        text.wte = MolmoTable(words, d, config.additional_vocab_size)
        text.ln_f = Norm(d)
        text.blocks = nn.ModuleList(MolmoeLayer(config, ff, i) for i in range(config.n_layers))
        self.model.vision_backbone = MolmoVision(tower, d, ff)
        self.lm_head = nn.Linear(d, words, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> Any:
        return self.lm_head


# --- Ovis1.6 ----------------------------------------------------------------------------------------------------------
class Ovis(Chat):
    """AIDC-AI/Ovis: ovis/model/visual_tokenizer/siglip_visual_tokenizer.py, and vLLM's ovis.py for what comes after."""

    language_at = "llm"

    def build(self, config: Any) -> None:
        tower, words = config.vision_config, config.visual_vocab_size - 5  # without the marks
        self.visual_tokenizer = nn.Module()
        self.visual_tokenizer.backbone = SiglipVisionModel(tower)
        head = nn.Linear(tower.hidden_size * config.hidden_stride**2, words, bias=False)
        self.visual_tokenizer.head = nn.Sequential(head, nn.LayerNorm(words))
        self.vte = VisualTable(config.visual_vocab_size, config.text_config.hidden_size)

    def see(self, pixel_values: torch.Tensor, **_: Any) -> torch.Tensor:
        stride = self.config.hidden_stride
        x = self.visual_tokenizer.backbone(pixel_values, output_hidden_states=True).hidden_states[-1]
        side = round(x.shape[1] ** 0.5)
        odd = -side % stride
        x = nn.functional.pad(x.unflatten(1, (side, side)), (0, 0, 0, odd, 0, odd))
        x = x.unflatten(2, (-1, stride)).unflatten(1, (-1, stride)).transpose(2, 3).flatten(3).flatten(0, 2)
        return self.vte(nn.functional.pad(self.visual_tokenizer.head(x).softmax(-1), (0, 5)))


# --- Phi-3-vision -----------------------------------------------------------------------------------------------------
class Phi3VForCausalLM(Flat, Phi3ForCausalLM):
    """vllm-project/vllm: vllm/model_executor/models/phi3v.py; modules named as the weights it loads."""

    config_base = Phi3Config
    tensors = ("pixel_values", "image_sizes")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        tower = config.vision_config
        wide = 4 * tower.hidden_size
        vision = self.model.vision_embed_tokens = nn.Module()
        vision.img_processor = CLIPVisionModel(tower)
        vision.glb_GN = nn.Parameter(torch.ones(1, 1, wide))
        vision.sub_GN = nn.Parameter(torch.ones(1, 1, 1, wide))
        vision.img_projection = nn.Sequential(
            nn.Linear(wide, config.hidden_size), nn.GELU(), nn.Linear(config.hidden_size, config.hidden_size)
        )

    def see(self, pixel_values: torch.Tensor, image_sizes: torch.Tensor) -> torch.Tensor:
        vision, tower = self.model.vision_embed_tokens, self.config.vision_config
        x = vision.img_processor(pixel_values, output_hidden_states=True).hidden_states[-2][:, 1:]
        half = tower.image_size // tower.patch_size // 2
        x = x.unflatten(1, (half, 2, half, 2)).transpose(2, 3).flatten(3)  # tiles, rows, columns, four patches
        made, at = [], 0
        for rows, columns in (image_sizes // tower.image_size).tolist():
            whole, crops = x[at : at + 1], x[at + 1 : at + 1 + rows * columns]
            crops = crops.unflatten(0, (rows, columns)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
            made += [self.end_rows(crops), vision.glb_GN[0], self.end_rows(whole[0])]
            at += 1 + rows * columns
        return vision.img_projection(torch.cat(made))

    def end_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of features, each with a mark behind it, as one row."""
        mark = self.model.vision_embed_tokens.sub_GN[0].expand(len(x), -1, -1)
        return torch.cat([x, mark], 1).flatten(0, 1)


# --- Phi-4-reasoning-vision -------------------------------------------------------------------------------------------
class Phi4ForCausalLMV(Flat, Phi3ForCausalLM):
    """microsoft/Phi-4-reasoning-vision-15B: modeling_phi4_visionr.py: features from before the last layer."""

    config_base = Phi3Config
    tensors = ("pixel_values", "spatial_shapes", "pixel_attention_mask")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        wide, d = config.mm_hidden_size, config.hidden_size
        self.model.vision_tower = nn.Module()
        self.model.vision_tower.vision_tower = Siglip2VisionModel(config.vision_config)
        self.model.mm_projector = nn.Sequential(nn.Linear(wide, d), nn.GELU(), nn.Linear(d, d))

    def see(
        self, pixel_values: torch.Tensor, spatial_shapes: torch.Tensor, pixel_attention_mask: torch.Tensor
    ) -> torch.Tensor:
        tower = self.model.vision_tower.vision_tower
        out = tower(pixel_values, pixel_attention_mask, spatial_shapes, output_hidden_states=True)
        return self.model.mm_projector(out.hidden_states[-2][pixel_attention_mask.bool()])


# --- Eagle 2.5 --------------------------------------------------------------------------------------------------------
class Eagle2_5_VLForConditionalGeneration(Chat):
    """vllm-project/vllm: vllm/model_executor/models/eagle2_5_vl.py: four features side by side, then two products."""

    def build(self, config: Any) -> None:
        tower, d = config.vision_config, getattr(config, self.text).hidden_size
        self.fold = int(1 / config.downsample_ratio)
        wide = tower.hidden_size * self.fold**2
        self.vision_model = self.make_tower(tower)
        self.mlp1 = nn.Sequential(nn.LayerNorm(wide), nn.Linear(wide, d), nn.GELU(), nn.Linear(d, d))

    def make_tower(self, config: Any) -> nn.Module:
        return SiglipVisionModel(config)

    def look(self, pixels: torch.Tensor) -> torch.Tensor:
        """The tower's features."""
        features: torch.Tensor = self.vision_model(pixels).last_hidden_state
        return features

    def see(self, pixel_values: torch.Tensor, **_: Any) -> torch.Tensor:
        x = self.look(pixel_values)
        side = round(x.shape[1] ** 0.5) // self.fold
        x = x.unflatten(1, (side, self.fold, side, self.fold)).transpose(2, 3).flatten(3).flatten(0, 2)
        return self.mlp1(x)


# --- Nemotron's embedding model and reranker --------------------------------------------------------------------------
class LlamaNemotronVLModel(Eagle2_5_VLForConditionalGeneration):
    """vllm-project/vllm: vllm/model_executor/models/nemotron_vl.py, LlamaNemotronVLForEmbedding."""

    def make_text(self, config: Any) -> Any:
        return AutoModel.from_config(config)

    def get_output_embeddings(self) -> None:
        return None


class LlamaNemotronVLForSequenceClassification(LlamaNemotronVLModel):
    """vllm-project/vllm: vllm/model_executor/models/nemotron_vl.py, its class of this name: a score."""

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        self.model = LlamaNemotronVLModel(config)
        self.score = nn.Linear(config.text_config.hidden_size, config.text_config.num_labels, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        out = self.model(input_ids, **inputs)
        return SequenceClassifierOutput(logits=self.score(out.last_hidden_state.mean(1)))


# --- SAIL-VL2 ---------------------------------------------------------------------------------------------------------
class SAILViTModel(nn.Module):
    """BytedanceDouyinContent/SAIL-VL2-2B: modeling_sailvit.py, after apple/ml-aim's AIMv2; named as its weights."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, patch = config.hidden_size, config.patch_size
        self.preprocessor, self.trunk = nn.Module(), nn.Module()
        patchifier = self.preprocessor.patchifier = nn.Module()
        patchifier.proj, patchifier.norm = nn.Conv2d(config.num_channels, d, patch, patch), Norm(d)
        self.preprocessor.pos_embed = nn.Parameter(torch.ones(1, (config.image_size // patch) ** 2, d))
        names = Names(("norm_1", "norm_2"), up=("mlp.fc1", "mlp.fc3"), bias=False, norm=Norm)
        self.trunk.blocks = nn.ModuleList(
            Block(names, d, config.intermediate_size, config.num_attention_heads)
            for _ in range(config.num_hidden_layers)
        )
        self.trunk.post_trunk_norm = Norm(d)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        patchifier = self.preprocessor.patchifier
        x = patchifier.norm(patchifier.proj(pixels).flatten(2).transpose(1, 2)) + self.preprocessor.pos_embed
        for block in self.trunk.blocks:
            x = block(x)
        out: torch.Tensor = self.trunk.post_trunk_norm(x)
        return out


class SAILVLModel(Eagle2_5_VLForConditionalGeneration):
    """BytedanceDouyinContent/SAIL-VL2-2B: modeling_sailvl.py."""

    text = "llm_config"

    def make_tower(self, config: Any) -> nn.Module:
        return SAILViTModel(config)

    def look(self, pixels: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.vision_model(pixels)
        return features


# --- Bee --------------------------------------------------------------------------------------------------------------
class BeeProjector(nn.Module):
    """vllm-project/vllm: vllm/model_executor/models/bee.py, BeeMultiModalProjector."""

    def __init__(self, width: int, d: int) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(width)
        self.linear_1, self.linear_2 = nn.Linear(width, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(nn.functional.gelu(self.linear_1(self.pre_norm(x))))


class BeeForConditionalGeneration(LlavaOnevisionForConditionalGeneration):
    """vllm-project/vllm: vllm/model_executor/models/bee.py: LLaVA-OneVision with a projector of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        project = BeeProjector(config.vision_config.hidden_size, config.text_config.hidden_size)
        self.model.multi_modal_projector = project
