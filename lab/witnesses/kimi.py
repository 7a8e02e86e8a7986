"""Kimi-K3: delta attention and gated latent attention, latent experts, residuals that attend over depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.kimi_linear.modeling_kimi_linear import (
    causal_conv1d_fn,
    causal_conv1d_update,
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)

from lab.witnesses.base import Chat, Norm, attend
from lab.witnesses.text import GatedMlp, TextModel


class KimiDelta(nn.Module):
    """vllm-project/vllm: vllm/models/kimi_k3/amd/kda.py; the delta rule is transformers' for Kimi-Linear."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        keys, d = config.linear_attn_config, config.hidden_size
        heads, self.head_dim, kernel = keys["num_heads"], keys["head_dim"], keys["short_conv_kernel_size"]
        self.layer, self.kernel, wide = layer, kernel, heads * self.head_dim
        self.full = keys.get("use_full_rank_gate", False)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d, wide, bias=False) for _ in range(3))
        self.conv1d = nn.Conv1d(3 * wide, 3 * wide, kernel, groups=3 * wide, bias=False)
        self.f_a_proj = nn.Linear(d, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, wide, bias=False)
        self.dt_bias, self.A_log = nn.Parameter(torch.ones(wide)), nn.Parameter(torch.ones(heads))
        self.b_proj = nn.Linear(d, heads, bias=False)
        if self.full:
            self.g_proj = nn.Linear(d, wide, bias=False)
        else:
            self.g_a_proj = nn.Linear(d, self.head_dim, bias=False)
            self.g_b_proj = nn.Linear(self.head_dim, wide, bias=False)
        self.o_norm, self.o_proj = Norm(self.head_dim), nn.Linear(wide, d, bias=False)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        length, weight, state, convolved = x.shape[1], self.conv1d.weight.squeeze(1), None, None
        mixed = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1).transpose(1, 2)
        if cache is not None:
            convolved = cache.get_conv_state(self.layer, state_idx=0)
            state = cache.get_recurrent_state(self.layer, state_idx=0)
        one = convolved is not None and length == 1
        if one:
            mixed = causal_conv1d_update(mixed, convolved, weight, None, "silu")
        else:
            if cache is not None:
                mixed = cache.update_conv_state(mixed, self.layer, conv_kernel_size=self.kernel)
            mixed = causal_conv1d_fn(mixed, weight, None, "silu")[:, :, -length:]
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in mixed.transpose(1, 2).chunk(3, -1))
        decay = (self.f_b_proj(self.f_a_proj(x)) + self.dt_bias).unflatten(-1, (-1, self.head_dim))
        decay = -self.A_log.exp()[:, None] * nn.functional.softplus(decay)
        rule = recurrent_kimi_delta_attention if one else chunk_kimi_delta_attention
        made, state = rule(
            q,
            k,
            v,
            g=decay,
            beta=self.b_proj(x).sigmoid(),
            initial_state=state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
        )
        if cache is not None:
            cache.update_recurrent_state(state, self.layer)
        gate = self.g_proj(x) if self.full else self.g_b_proj(self.g_a_proj(x))
        out: torch.Tensor = self.o_proj(self.o_norm(made).flatten(-2) * gate.sigmoid())
        return out


class KimiLatent(nn.Module):
    """vllm-project/vllm: vllm/models/kimi_k3/amd/linear.py, KimiMLAAttention: no positions, perhaps a gate."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        d, self.heads, self.layer = config.hidden_size, config.num_attention_heads, layer
        self.nope, self.values = config.qk_nope_head_dim, config.v_head_dim
        self.ranks = [config.kv_lora_rank, config.qk_rope_head_dim]
        queries = self.heads * (self.nope + config.qk_rope_head_dim)
        if not config.mla_use_nope:
            raise ValueError("the published code has no rotary embeddings")
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(d, queries, bias=False)
        else:
            self.q_a_proj, self.q_a_layernorm = nn.Linear(d, config.q_lora_rank, bias=False), Norm(config.q_lora_rank)
            self.q_b_proj = nn.Linear(config.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = nn.Linear(d, sum(self.ranks), bias=False), Norm(self.ranks[0])
        self.kv_b_proj = nn.Linear(self.ranks[0], self.heads * (self.nope + self.values), bias=False)
        if getattr(config, "mla_use_output_gate", False):
            self.g_proj = nn.Linear(d, self.heads * self.values, bias=False)
        self.o_proj = nn.Linear(self.heads * self.values, d, bias=False)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        q = self.q_proj(x) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        latent, shared = self.kv_a_proj_with_mqa(x).unsqueeze(1).split(self.ranks, -1)
        latent = self.kv_a_layernorm(latent)
        if cache is not None:
            latent, shared = cache.update(latent, shared, self.layer)
        made = self.kv_b_proj(latent.squeeze(1)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = made.split([self.nope, self.values], -1)
        k = torch.cat([k, shared.expand(-1, self.heads, -1, -1)], -1)
        out = attend(q.unflatten(-1, (self.heads, -1)).transpose(1, 2), k, v)
        if hasattr(self, "g_proj"):
            out = out * self.g_proj(x).sigmoid()
        result: torch.Tensor = self.o_proj(out)
        return result


class KimiGate(nn.Module):
    """Scores in float32; a bias that only chooses."""

    def __init__(self, d: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k, self.weight = top_k, nn.Parameter(torch.ones(experts, d))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = nn.functional.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k, -1).indices
        return scores.gather(1, chosen), chosen


class KimiExperts(nn.Module):
    """The routed experts, one behind the other."""

    def __init__(self, experts: int, d: int, ff: int) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.ones(experts, 2 * ff, d))
        self.w2_weight = nn.Parameter(torch.ones(experts, d, ff))

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows, place = torch.where(chosen == number)
            gate, up = nn.functional.linear(x[rows], self.w13_weight[number]).chunk(2, -1)
            made = nn.functional.linear(nn.functional.silu(gate) * up, self.w2_weight[number])
            out = out.index_add(0, rows, (made * weights[rows, place, None]).to(out.dtype))
        return out


class KimiMoe(nn.Module):
    """vllm-project/vllm: vllm/models/kimi_k3/amd/linear.py, KimiMoE: experts perhaps of a narrower width."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, ff = config.hidden_size, config.moe_intermediate_size
        narrow = getattr(config, "routed_expert_hidden_size", None)
        self.gate = KimiGate(d, config.num_experts, config.num_experts_per_token)
        self.experts = KimiExperts(config.num_experts, d if narrow is None else narrow, ff)
        if narrow is not None:
            self.routed_expert_down_proj = nn.Linear(d, narrow, bias=False)
            self.routed_expert_up_proj = nn.Linear(narrow, d, bias=False)
            if getattr(config, "latent_moe_use_norm", False):
                self.routed_expert_norm = Norm(narrow)
        if config.num_shared_experts:
            self.shared_experts = GatedMlp(d, ff * config.num_shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        routes = self.gate(flat)
        if hasattr(self, "routed_expert_down_proj"):
            made = self.experts(self.routed_expert_down_proj(flat), *routes)
            if hasattr(self, "routed_expert_norm"):
                made = self.routed_expert_norm(made)
            made = self.routed_expert_up_proj(made)
        else:
            made = self.experts(flat, *routes)
        if hasattr(self, "shared_experts"):
            made = made + self.shared_experts(flat)
        return made.view_as(x)


def mix(x: torch.Tensor, blocks: torch.Tensor, project: nn.Module, norm: nn.Module) -> torch.Tensor:
    """sgl-project/sglang: python/sglang/srt/layers/attn_residual.py: a softmax over what depth has left behind."""
    rows = torch.cat([blocks, x.unsqueeze(-2)], -2)
    return torch.matmul(project(norm(rows)).transpose(-1, -2).softmax(-1), rows).squeeze(-2)


class KimiLayer(GradientCheckpointingLayer):
    """vllm-project/vllm: vllm/models/kimi_k3/amd/linear.py, KimiDecoderLayer."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        d = config.hidden_size
        delta = layer + 1 in config.linear_attn_config["kda_layers"]
        self.self_attn: nn.Module = KimiDelta(config, layer) if delta else KimiLatent(config, layer)
        first, every = getattr(config, "first_k_dense_replace", 0), getattr(config, "moe_layer_freq", 1)
        if layer >= first and layer % every == 0:
            self.block_sparse_moe = KimiMoe(config)
        else:
            self.mlp = GatedMlp(d, config.intermediate_size)
        if config.hidden_act not in ("silu", "situ"):
            raise ValueError(f"hidden_act {config.hidden_act} is neither silu nor situ")
        self.input_layernorm, self.post_attention_layernorm = Norm(d), Norm(d)
        size = getattr(config, "attn_res_block_size", None)
        self.mixes, self.opens = size is not None, size is not None and layer % size == 0
        if self.mixes:
            self.self_attention_res_norm, self.mlp_res_norm = Norm(d), Norm(d)
            self.self_attention_res_proj, self.mlp_res_proj = (nn.Linear(d, 1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, blocks: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layers of this block have summed up, and the snapshots before it."""
        read = x
        if self.mixes and blocks.shape[-2]:
            read = mix(x, blocks, self.self_attention_res_proj, self.self_attention_res_norm)
        attended = self.self_attn(self.input_layernorm(read), cache)
        if self.opens:
            blocks, x = torch.cat([blocks, x.unsqueeze(-2)], -2), attended
        else:
            x = x + attended
        read = mix(x, blocks, self.mlp_res_proj, self.mlp_res_norm) if self.mixes else x
        feed = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        return x + feed(self.post_attention_layernorm(read)), blocks


class KimiBody(nn.Module):
    """vllm-project/vllm: vllm/models/kimi_k3/amd/linear.py, KimiLinearModel."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d = config.hidden_size
        self.embed_tokens, self.norm = nn.Embedding(config.vocab_size, d), Norm(d)
        self.layers = nn.ModuleList(KimiLayer(config, i) for i in range(config.num_hidden_layers))
        if getattr(config, "attn_res_block_size", None) is not None:
            self.output_attn_res_norm, self.output_attn_res_proj = Norm(d), nn.Linear(d, 1, bias=False)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        blocks = x.new_zeros(*x.shape[:2], 0, x.shape[2])
        for layer in self.layers:
            x, blocks = layer(x, blocks, cache)
        if hasattr(self, "output_attn_res_proj"):
            x = mix(x, blocks, self.output_attn_res_proj, self.output_attn_res_norm)
        out: torch.Tensor = self.norm(x)
        return out


class KimiText(TextModel):
    """vllm-project/vllm: vllm/models/kimi_k3/amd/linear.py, KimiLinearForCausalLM; its head is never tied."""

    def __init__(self, config: Any) -> None:
        super(TextModel, self).__init__(config)
        self.model = KimiBody(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def make_cache(self) -> Any:
        return DynamicCache(config=self.config)

    def run(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        out: torch.Tensor = self.model(x, cache)
        return out


class KimiVisionBlock(GradientCheckpointingLayer):
    """sgl-project/sglang: python/sglang/srt/models/kimi_k3_vl.py, MoonViTEncoderLayer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, ff, self.heads = config.vt_hidden_size, config.vt_intermediate_size, config.vt_num_attention_heads
        wide = d if config.qkv_hidden_size is None else config.qkv_hidden_size
        if wide % (4 * self.heads):
            raise ValueError(f"rotary embeddings turn two pairs of numbers, not {wide / self.heads}")
        self.norm0, self.norm1 = make_norm(config), make_norm(config)
        self.wqkv = nn.Linear(d, 3 * wide, bias=config.attn_bias)
        self.wo = nn.Linear(wide, d, bias=config.attn_bias)
        self.mlp = nn.Module()
        self.mlp.fc0, self.mlp.fc1 = (nn.Linear(*each, bias=config.linear_bias) for each in ((d, ff), (ff, d)))

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        made = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        x = x + self.wo(torch.cat([attend(*each) for each in made.split(lengths, -2)]))
        inner = nn.functional.gelu(self.mlp.fc0(self.norm1(x)))
        out: torch.Tensor = x + self.mlp.fc1(inner)
        return out


def make_norm(config: Any) -> nn.Module:
    """A norm of the tower."""
    return {"layernorm": nn.LayerNorm, "rmsnorm": Norm}[config.norm_type](config.vt_hidden_size)


class KimiVision(nn.Module):
    """sgl-project/sglang: python/sglang/srt/models/kimi_k3_vl.py, KimiK3VisionTower."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, patch = config.vt_hidden_size, config.patch_size
        self.merge = config.merge_kernel_size[0]
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, d, patch, patch, bias=config.patch_embed_proj_bias)
        self.patch_embed.pos_emb = nn.Module()
        table = torch.ones(config.init_pos_emb_height, config.init_pos_emb_width, d)
        self.patch_embed.pos_emb.weight = nn.Parameter(table)
        self.encoder = nn.Module()
        self.encoder.blocks = nn.ModuleList(KimiVisionBlock(config) for _ in range(config.vt_num_hidden_layers))
        self.encoder.final_layernorm = make_norm(config)

    def forward(self, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed.proj(pixels).flatten(1)
        x = x + self.patch_embed.pos_emb.weight.mean((0, 1))  # resized to the image: no product
        for block in self.encoder.blocks:
            x = block(x, grids.prod(1).tolist())
        return self.encoder.final_layernorm(x).unflatten(0, (-1, self.merge**2)).flatten(1)


class KimiK3ForConditionalGeneration(Chat):
    """sgl-project/sglang: python/sglang/srt/models/kimi_k3.py; named as the weights it loads."""

    image_token = "media_placeholder_token_id"

    def build(self, config: Any) -> None:
        tower = config.vision_config
        wide, d = tower.vt_hidden_size * tower.merge_kernel_size[0] ** 2, config.text_config.hidden_size
        self.vision_tower = KimiVision(tower)
        project = self.mm_projector = nn.Module()
        layers = nn.Linear(wide, wide, bias=False), nn.GELU(), nn.Linear(wide, d, bias=False)
        project.proj, project.post_norm = nn.Sequential(*layers), Norm(d)

    def make_text(self, config: Any) -> Any:
        return KimiText(config)

    def see(self, pixel_values: torch.Tensor, grid_thws: torch.Tensor, **_: Any) -> torch.Tensor:
        project = self.mm_projector
        out: torch.Tensor = project.post_norm(project.proj(self.vision_tower(pixel_values, grid_thws)))
        return out
