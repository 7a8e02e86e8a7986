"""Tiny diffusers models, what their forward takes, and what a counter sees of one step."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopcalc.core.estimate.counted import CountedEstimator
from flopcalc.core.model.bound import bind_model
from flopcalc.core.model.config import load_config
from flopcalc.core.recipe.recipe import make_recipe
from flopcalc.core.workload.workload import Workload
from flopcalc.measure.counters.flop_counter import OperatorCount, count_flops
from lab.denoisers import build_denoiser, make_denoiser_inputs

# The blocks of DeepFloyd IF and of Kandinsky 2.
_SIMPLE = {
    "block_out_channels": [8, 16, 16], "layers_per_block": 1, "cross_attention_dim": 10, "norm_num_groups": 4,
    "down_block_types": ["ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D", "SimpleCrossAttnDownBlock2D"],
    "up_block_types": ["SimpleCrossAttnUpBlock2D", "SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"],
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn", "attention_head_dim": 4, "encoder_hid_dim": 14,
    "resnet_time_scale_shift": "scale_shift",
}  # fmt: skip
_WIDE = {"num_attention_heads": 2, "attention_head_dim": 12}
TINY: dict[str, dict[str, Any]] = {
    "FluxTransformer2DModel": {
        "in_channels": 8, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 10,
        "pooled_projection_dim": 6, "guidance_embeds": True, "axes_dims_rope": [4, 4, 4], **_WIDE,
    },
    "SD3Transformer2DModel": {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 3, "joint_attention_dim": 10,
        "caption_projection_dim": 24, "pooled_projection_dim": 6, "pos_embed_max_size": 8,
        "dual_attention_layers": [0], "qk_norm": "rms_norm", **_WIDE,
    },
    "QwenImageTransformer2DModel": {
        "in_channels": 8, "out_channels": 2, "num_layers": 2, "joint_attention_dim": 10, "axes_dims_rope": [4, 4, 4],
        **_WIDE,
    },
    "HunyuanVideoTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 1,
        "text_embed_dim": 10, "pooled_projection_dim": 6, "rope_axes_dim": [4, 4, 4], **_WIDE,
    },
    "PixArtTransformer2DModel": {
        "in_channels": 4, "out_channels": 8, "num_layers": 2, "cross_attention_dim": 24, "sample_size": 8,
        "caption_channels": 10, "use_additional_conditions": True, **_WIDE,
    },
    "DiTTransformer2DModel": {
        "in_channels": 4, "out_channels": 8, "num_layers": 2, "sample_size": 8, "num_embeds_ada_norm": 7, **_WIDE,
    },
    "WanTransformer3DModel": {
        "patch_size": [1, 2, 2], "in_channels": 4, "out_channels": 4, "text_dim": 10, "freq_dim": 16, "ffn_dim": 20,
        "num_layers": 2, **_WIDE,
    },
    "LTXVideoTransformer3DModel": {
        "in_channels": 8, "out_channels": 8, "cross_attention_dim": 24, "num_layers": 2, "caption_channels": 10,
        **_WIDE,
    },
    "CogVideoXTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, "time_embed_dim": 6, "text_embed_dim": 10, "num_layers": 2,
        "sample_width": 8, "sample_height": 8, "sample_frames": 9, "max_text_seq_length": 5,
        "use_rotary_positional_embeddings": True, "num_attention_heads": 2, "attention_head_dim": 12,
    },
    "Flux2Transformer2DModel": {
        "in_channels": 8, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 10, "mlp_ratio": 2.5,
        "timestep_guidance_channels": 14, "num_attention_heads": 2, "attention_head_dim": 16,
        "axes_dims_rope": [4, 4, 4, 4], "guidance_embeds": True,
    },
    "ChromaTransformer2DModel": {
        "in_channels": 8, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 10,
        "axes_dims_rope": [4, 4, 4], "approximator_num_channels": 8, "approximator_hidden_dim": 14,
        "approximator_layers": 2, **_WIDE,
    },
    "AuraFlowTransformer2DModel": {
        "in_channels": 4, "num_mmdit_layers": 2, "num_single_dit_layers": 2, "joint_attention_dim": 10,
        "caption_projection_dim": 24, "pos_embed_max_size": 64, **_WIDE,
    },
    "Lumina2Transformer2DModel": {
        "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 4,
        "num_kv_heads": 2, "multiple_of": 10, "axes_dim_rope": [2, 2, 2], "axes_lens": [60, 32, 32],
        "cap_feat_dim": 10,
    },
    "BriaTransformer2DModel": {
        "in_channels": 8, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 10,
        "axes_dims_rope": [4, 4, 4], **_WIDE,
    },
    "LongCatImageTransformer2DModel": {
        "in_channels": 8, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 10,
        "axes_dims_rope": [4, 4, 4], **_WIDE,
    },
    "OvisImageTransformer2DModel": {
        "in_channels": 8, "out_channels": 8, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 10,
        "axes_dims_rope": [4, 4, 4], **_WIDE,
    },
    "CogView3PlusTransformer2DModel": {
        "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16,
        "text_embed_dim": 10, "time_embed_dim": 6, "condition_dim": 4, "pos_embed_max_size": 8, "sample_size": 8,
    },
    "WanVACETransformer3DModel": {
        "patch_size": [1, 2, 2], "in_channels": 4, "out_channels": 4, "text_dim": 10, "freq_dim": 16, "ffn_dim": 20,
        "num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 6, **_WIDE,
    },
    "ConsisIDTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, "time_embed_dim": 6, "text_embed_dim": 10, "num_layers": 4,
        "sample_width": 8, "sample_height": 8, "sample_frames": 9, "max_text_seq_length": 5,
        "use_rotary_positional_embeddings": True, "is_train_face": True, "cross_attn_dim_head": 8,
        "cross_attn_num_heads": 2, "LFE_id_dim": 14, "LFE_vit_dim": 18, "LFE_depth": 4, "LFE_dim_head": 6,
        "LFE_num_heads": 3, "LFE_num_id_token": 2, "LFE_num_querie": 3, "LFE_output_dim": 16, "LFE_ff_mult": 2,
        "LFE_num_scale": 2, "num_attention_heads": 2, "attention_head_dim": 12,
    },
    "BriaFibo2Transformer2DModel": {
        "in_channels": 4, "dim": 24, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 2, "cap_feat_dim": 10,
        "injection_layer_ids": [1], "min_num_gist_tokens": 4, "max_num_gist_tokens": 8, "gist_step": 2,
        "gist_min_text_len": 2, "gist_max_text_len": 10, "axes_dims": [4, 4, 4], "axes_lens": [64, 32, 32],
    },
    "HeliosTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, "text_dim": 10, "freq_dim": 16, "ffn_dim": 20, "num_layers": 2,
        "rope_dim": [4, 4, 4], **_WIDE,
    },
    "WanAnimateTransformer3DModel": {
        "in_channels": 12, "latent_channels": 4, "out_channels": 4, "text_dim": 10, "freq_dim": 16, "ffn_dim": 20,
        "num_layers": 4, "image_dim": 7, "added_kv_proj_dim": 24, "motion_encoder_size": 16, "motion_style_dim": 14,
        "motion_encoder_channel_sizes": {"4": 6, "8": 8, "16": 4}, "motion_dim": 3, "motion_encoder_dim": 10,
        "face_encoder_hidden_dim": 12, "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2, **_WIDE,
    },
    "Ideogram4Transformer2DModel": {
        "in_channels": 8, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "intermediate_size": 20,
        "adaln_dim": 6, "llm_features_dim": 10, "mrope_section": [2, 2, 2],
    },
    "MiniMaxH3Transformer3DModel": {
        "hidden_size": 20, "num_layers": 2, "num_refiner_layers": 1, "ffn_dim": 18, "in_channels": 4,
        "audio_in_channels": 6, "text_dim": 10, "freq_dim": 16, "time_embed_hidden_dim": 14, "time_embed_dim": 8,
        "rope_freq_dim": 2, **_WIDE,
    },
    "Cosmos3OmniTransformer": {
        "head_dim": 12, "hidden_size": 20, "intermediate_size": 18, "latent_channel": 4, "num_attention_heads": 2,
        "num_hidden_layers": 2, "num_key_value_heads": 1, "patch_latent_dim": 16, "vocab_size": 30,
        "rope_axes_dim": [2, 2, 2],
    },
    "Kandinsky6Transformer3DModel": {
        "in_visual_dim": 4, "out_visual_dim": 2, "in_text_dim": 10, "in_text_dim2": 6, "time_dim": 14, "model_dim": 24,
        "ff_dim": 20, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": [4, 4, 4], "visual_cond": False,
        "in_audio_dim": 6, "out_audio_dim": 8,
    },
    "DreamLiteUNetModel": {
        "block_out_channels": [8, 16, 16], "layers_per_block": 1, "cross_attention_dim": 12, "norm_num_groups": 4,
        "attention_head_dim": 2, "encoder_hid_dim": 10, "encoder_hid_dim_type": "text_proj_rms", "ff_mult": 3,
        "addition_embed_type": "time", "addition_time_embed_dim": 2, "projection_class_embeddings_input_dim": 4,
    },
    "HunyuanVideo15Transformer3DModel": {
        "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 10,
        "text_embed_2_dim": 6, "image_embed_dim": 14, "patch_size": 2, "rope_axes_dim": [4, 4, 4], **_WIDE,
    },
    "SkyReelsV2Transformer3DModel": {
        "patch_size": [1, 2, 2], "in_channels": 4, "out_channels": 4, "text_dim": 10, "freq_dim": 16, "ffn_dim": 20,
        "num_layers": 2, **_WIDE,
    },
    "Kandinsky5Transformer3DModel": {
        "in_visual_dim": 4, "in_text_dim": 10, "in_text_dim2": 6, "time_dim": 14, "out_visual_dim": 2, "model_dim": 24,
        "ff_dim": 20, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": [4, 4, 4],
    },
    "FluxControlNetModel": {
        "in_channels": 8, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 10,
        "pooled_projection_dim": 6, "guidance_embeds": True, "axes_dims_rope": [4, 4, 4], **_WIDE,
    },
    "QwenImageControlNetModel": {
        "in_channels": 8, "out_channels": 2, "num_layers": 2, "joint_attention_dim": 10, "axes_dims_rope": [4, 4, 4],
        "extra_condition_channels": 4, **_WIDE,
    },
    "ControlNetModel": {
        "block_out_channels": [8, 16], "layers_per_block": 1, "cross_attention_dim": 10,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "attention_head_dim": 2, "norm_num_groups": 4,
        "conditioning_embedding_out_channels": [6, 10, 14, 4],
    },
    "ZImageTransformer2DModel": {
        "in_channels": 4, "dim": 24, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
        "cap_feat_dim": 10, "axes_dims": [4, 4, 4], "axes_lens": [128, 32, 32],
    },
    "CogView4Transformer2DModel": {
        "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16,
        "text_embed_dim": 10, "time_embed_dim": 6, "condition_dim": 4, "rope_axes_dim": [8, 8], "sample_size": 8,
    },
    "SanaTransformer2DModel": {
        "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_cross_attention_heads": 3, "cross_attention_dim": 24,
        "cross_attention_head_dim": 6, "caption_channels": 10, "sample_size": 8, **_WIDE,
    },
    "MochiTransformer3DModel": {
        "in_channels": 4, "num_layers": 2, "pooled_projection_dim": 18, "text_embed_dim": 16, "time_embed_dim": 14,
        **_WIDE,
    },
    "AllegroTransformer3DModel": {
        "num_layers": 2, "cross_attention_dim": 24, "caption_channels": 10, "sample_height": 8, "sample_width": 8,
        **_WIDE,
    },
    "LatteTransformer3DModel": {
        "in_channels": 4, "out_channels": 8, "num_layers": 2, "cross_attention_dim": 24, "sample_size": 8,
        "caption_channels": 10, "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "patch_size": 2,
        "attention_bias": True, "activation_fn": "gelu-approximate", "video_length": 3, **_WIDE,
    },
    "HunyuanDiT2DModel": {
        "in_channels": 4, "patch_size": 2, "sample_size": 8, "hidden_size": 24, "num_layers": 4,
        "cross_attention_dim": 10, "cross_attention_dim_t5": 16,
        "pooled_projection_dim": 14, "text_len": 5, "text_len_t5": 6, **_WIDE,
    },
    "HunyuanDiT2DControlNetModel": {
        "in_channels": 4, "patch_size": 2, "sample_size": 8, "hidden_size": 24, "transformer_num_layers": 6,
        "cross_attention_dim": 10, "cross_attention_dim_t5": 16, "pooled_projection_dim": 14, "text_len": 5,
        "text_len_t5": 6, **_WIDE,
    },
    "SD3ControlNetModel": {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 3, "joint_attention_dim": 10,
        "caption_projection_dim": 24, "pooled_projection_dim": 6, "pos_embed_max_size": 8,
        "dual_attention_layers": [0], "qk_norm": "rms_norm", **_WIDE,
    },
    "SanaControlNetModel": {
        "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_cross_attention_heads": 3, "cross_attention_dim": 24,
        "cross_attention_head_dim": 6, "caption_channels": 10, "sample_size": 8, **_WIDE,
    },
    "ChronoEditTransformer3DModel": {
        "patch_size": [1, 2, 2], "in_channels": 4, "out_channels": 4, "text_dim": 10, "freq_dim": 16, "ffn_dim": 20,
        "num_layers": 2, "image_dim": 7, "added_kv_proj_dim": 24, **_WIDE,
    },
    "ErnieImageTransformer2DModel": {
        "hidden_size": 24, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 20, "in_channels": 8,
        "out_channels": 6, "text_in_dim": 10, "rope_axes_dim": [4, 4, 4],
    },
    "Krea2Transformer2DModel": {
        "in_channels": 8, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 6, "num_key_value_heads": 2,
        "intermediate_size": 20, "timestep_embed_dim": 14, "text_hidden_dim": 16, "num_text_layers": 3,
        "text_num_attention_heads": 2, "text_num_key_value_heads": 1, "text_intermediate_size": 18,
        "num_layerwise_text_blocks": 2, "num_refiner_text_blocks": 1, "axes_dims_rope": [2, 2, 2],
    },
    "PRXTransformer2DModel": {
        "in_channels": 4, "context_in_dim": 10, "hidden_size": 24, "num_heads": 2, "depth": 2, "axes_dim": [6, 6],
    },
    "BriaFiboTransformer2DModel": {
        "in_channels": 8, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 10, "text_encoder_dim": 14,
        "axes_dims_rope": [4, 4, 4], **_WIDE,
    },
    "LuminaNextDiT2DModel": {
        "sample_size": 8, "hidden_size": 24, "num_layers": 2, "num_attention_heads": 2, "num_kv_heads": 1,
        "multiple_of": 10, "cross_attention_dim": 10,
    },
    "OmniGenTransformer2DModel": {
        "hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 20, "num_layers": 2,
        "vocab_size": 30, "pad_token_id": 1, "time_step_dim": 14, "pos_embed_max_size": 8, "patch_size": 2,
        "rope_scaling": {"short_factor": [1.0] * 6, "long_factor": [1.0] * 6},
    },
    "HunyuanImageTransformer2DModel": {
        "in_channels": 4, "out_channels": 6, "num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 1,
        "text_embed_dim": 10, "text_embed_2_dim": 14, "rope_axes_dim": [6, 6], **_WIDE,
    },
    "JoyImageEditTransformer3DModel": {
        "in_channels": 4, "hidden_size": 24, "num_attention_heads": 2, "text_dim": 10, "num_layers": 2,
        "rope_dim_list": [4, 4, 4], "patch_size": [1, 2, 2],
    },
    "JoyImageEditPlusTransformer3DModel": {
        "in_channels": 4, "hidden_size": 24, "num_attention_heads": 2, "text_dim": 10, "num_layers": 2,
        "rope_dim_list": [4, 4, 4], "patch_size": [1, 2, 2],
    },
    "GlmImageTransformer2DModel": {
        "in_channels": 4, "out_channels": 6, "num_layers": 2, "text_embed_dim": 10, "time_embed_dim": 14,
        "condition_dim": 4, "prior_vq_quantizer_codebook_size": 9, "patch_size": 2, **_WIDE,
    },
    "EasyAnimateTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, "patch_size": 2, "num_layers": 3, "mmdit_layers": 2, "time_embed_dim": 14,
        "text_embed_dim": 10, "num_attention_heads": 2, "attention_head_dim": 16,
    },
    "CosmosTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 10, "adaln_lora_dim": 6,
        "max_size": [4, 16, 16], **_WIDE,
    },
    "UNetControlNetXSModel": {
        "block_out_channels": [8, 16, 24], "cross_attention_dim": 10, "num_attention_heads": 2, "norm_num_groups": 4,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 2, 1], "ctrl_conditioning_embedding_out_channels": [6, 10, 14, 4],
        "ctrl_block_out_channels": [4, 8, 12], "ctrl_num_attention_heads": [1, 2, 3], "ctrl_max_norm_num_groups": 4,
    },
    "CosmosControlNetModel": {
        "n_controlnet_blocks": 2, "in_channels": 8, "latent_channels": 6, "model_channels": 24, "text_embed_dim": 10,
        "adaln_lora_dim": 6, "max_size": [4, 16, 16], **_WIDE,
    },
    "PriorTransformer": {
        "num_layers": 2, "embedding_dim": 10, "num_embeddings": 5, "additional_embeddings": 4, "clip_embed_dim": 10,
        **_WIDE,
    },
    "AnyFlowTransformer3DModel": {
        "patch_size": [1, 2, 2], "in_channels": 4, "out_channels": 4, "text_dim": 10, "freq_dim": 16, "ffn_dim": 20,
        "num_layers": 2, **_WIDE,
    },
    "SanaVideoTransformer3DModel": {
        "patch_size": [1, 2, 2], "in_channels": 4, "out_channels": 6, "num_layers": 2, "num_cross_attention_heads": 3,
        "cross_attention_dim": 24, "cross_attention_head_dim": 6, "caption_channels": 10, **_WIDE,
    },
    "HiDreamImageTransformer2DModel": {
        "in_channels": 4, "patch_size": 2, "num_layers": 2, "num_single_layers": 2, "caption_channels": [10, 14],
        "text_emb_dim": 6, "axes_dims_rope": [4, 4, 4], "max_resolution": [8, 8], "llama_layers": [0, 1, 2, 3], **_WIDE,
    },
    "HunyuanVideoFramepackTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 1,
        "text_embed_dim": 10, "pooled_projection_dim": 6, "rope_axes_dim": [4, 4, 4], "has_image_proj": True,
        "image_proj_dim": 14, "has_clean_x_embedder": True, "guidance_embeds": True, **_WIDE,
    },
    "Flux3Transformer2DModel": {
        "in_channels": 8, "cond_in_channels": 6, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 10,
        "timestep_channels": 14, "axes_dims_rope": [4, 4, 4], **_WIDE,
    },
    "LTX2VideoTransformer3DModel": {
        "in_channels": 8, "out_channels": 6, "cross_attention_dim": 24, "audio_in_channels": 10,
        "audio_out_channels": 4, "audio_num_attention_heads": 2, "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16, "num_layers": 2, "caption_channels": 14, **_WIDE,
    },
    "QwenImage21Transformer2DModel": {
        "in_channels": 8, "out_channels": 6, "num_layers": 2, "context_in_dim": 10, "axes_dims_rope": [4, 4, 4],
        **_WIDE,
    },
    "NucleusMoEImageTransformer2DModel": {
        "in_channels": 8, "out_channels": 2, "num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 12,
        "num_key_value_heads": 1, "joint_attention_dim": 10, "axes_dims_rope": [4, 4, 4], "mlp_ratio": 16.0,
        "dense_moe_strategy": "leave_first_block_dense", "num_experts": 4, "moe_intermediate_dim": 14,
        "capacity_factors": 2.0,
    },
    "UNet2DModel": {
        "sample_size": 16, "in_channels": 2, "out_channels": 2, "block_out_channels": [8, 16], "layers_per_block": 1,
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
        "attention_head_dim": 4, "norm_num_groups": 4,
    },
    "MotifVideoTransformer3DModel": {
        "in_channels": 5, "out_channels": 2, "num_layers": 2, "num_single_layers": 2, "text_embed_dim": 10,
        "rope_axes_dim": [4, 4, 4], **_WIDE,
    },
    "ControlNetUnionModel": {
        "block_out_channels": [8, 16], "layers_per_block": 1, "cross_attention_dim": 10, "norm_num_groups": 4,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "attention_head_dim": 2,
        "conditioning_embedding_out_channels": [6, 10, 14, 4], "addition_embed_type": "text_time",
        "addition_time_embed_dim": 2, "projection_class_embeddings_input_dim": 18, "num_control_type": 3,
        "num_trans_channel": 8, "num_trans_head": 2, "num_trans_layer": 2, "num_proj_channel": 8,
    },
    "I2VGenXLUNet": {
        "block_out_channels": [8, 16], "layers_per_block": 1, "cross_attention_dim": 10, "norm_num_groups": 4,
        "down_block_types": ["CrossAttnDownBlock3D", "DownBlock3D"],
        "up_block_types": ["UpBlock3D", "CrossAttnUpBlock3D"], "attention_head_dim": 4,
    },
    "Kandinsky3UNet": {
        "block_out_channels": [16, 16, 32, 32], "layers_per_block": 2, "cross_attention_dim": 10, "encoder_hid_dim": 14,
        "groups": 4, "attention_head_dim": 4, "time_embedding_dim": 12,
    },
    "UNetSpatioTemporalConditionModel": {
        "block_out_channels": [32, 64], "layers_per_block": 1, "cross_attention_dim": 10, "in_channels": 4,
        "down_block_types": ["CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"],
        "up_block_types": ["UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"], "num_attention_heads": [2, 4],
        "addition_time_embed_dim": 6, "projection_class_embeddings_input_dim": 18,
    },
    "UNet3DConditionModel": {
        "block_out_channels": [8, 16], "layers_per_block": 1, "cross_attention_dim": 10, "norm_num_groups": 4,
        "down_block_types": ["CrossAttnDownBlock3D", "DownBlock3D"],
        "up_block_types": ["UpBlock3D", "CrossAttnUpBlock3D"], "attention_head_dim": 4,
    },
    "UNetMotionModel": {
        "block_out_channels": [8, 16], "layers_per_block": 1, "cross_attention_dim": 10, "norm_num_groups": 4,
        "down_block_types": ["CrossAttnDownBlockMotion", "DownBlockMotion"],
        "up_block_types": ["UpBlockMotion", "CrossAttnUpBlockMotion"], "num_attention_heads": 2,
        "motion_num_attention_heads": 4, "motion_max_seq_length": 8,
    },
    "ZImageControlNetModel": {
        "in_channels": 4, "dim": 24, "n_refiner_layers": 2, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 10,
        "axes_dims": [4, 4, 4], "axes_lens": [128, 32, 32], "control_layers_places": [0, 1], "control_in_dim": 6,
    },
    "SparseControlNetModel": {
        "block_out_channels": [8, 16], "layers_per_block": 1, "cross_attention_dim": 10, "norm_num_groups": 4,
        "down_block_types": ["CrossAttnDownBlockMotion", "DownBlockMotion"], "attention_head_dim": 2,
        "motion_num_attention_heads": 4, "motion_max_seq_length": 8,
    },
    "StableCascadeUNet": {
        "in_channels": 4, "out_channels": 4, "timestep_ratio_embedding_dim": 6, "conditioning_dim": 12,
        "block_out_channels": [8, 16], "num_attention_heads": [2, 4], "down_num_layers_per_block": [1, 2],
        "up_num_layers_per_block": [2, 1], "clip_text_in_channels": 10, "clip_text_pooled_in_channels": 6,
        "clip_image_in_channels": 14, "clip_seq": 2, "switch_level": [False],
    },
    "WuerstchenPrior": {"c_in": 4, "c": 24, "c_cond": 10, "c_r": 6, "depth": 2, "nhead": 2},
    "WuerstchenDiffNeXt": {
        "c_in": 2, "c_out": 2, "c_r": 6, "c_cond": 12, "c_hidden": [8, 16], "nhead": [-1, 2], "blocks": [1, 2],
        "level_config": ["CT", "CTA"], "inject_effnet": [False, True], "effnet_embd": 4, "clip_embd": 10,
    },
    "UVit2DModel": {
        "hidden_size": 24, "cond_embed_dim": 6, "micro_cond_encode_dim": 2, "micro_cond_embed_dim": 10,
        "encoder_hidden_size": 10, "vocab_size": 31, "codebook_size": 30, "in_channels": 14, "block_out_channels": 16,
        "num_res_blocks": 2, "block_num_heads": 4, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 20,
    },
    "UNet2DConditionModel": {
        "sample_size": 8, "block_out_channels": [8, 16], "layers_per_block": 1, "cross_attention_dim": 10,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "attention_head_dim": 2, "norm_num_groups": 4,
    },
}  # fmt: skip
# What enlarges latents of videos once.
UPSAMPLERS: dict[str, dict[str, Any]] = {
    "LTXLatentUpsamplerModel": {"in_channels": 6, "mid_channels": 32, "num_blocks_per_stage": 2},
    "LTX2LatentUpsamplerModel": {"in_channels": 6, "mid_channels": 32, "num_blocks_per_stage": 1},
}
# T2I-Adapters, which pipelines run once; name -> config.
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {"in_channels": 3, "channels": [8, 16, 16, 24], "num_res_blocks": 1},
    "light": {"in_channels": 3, "channels": [8, 16, 16], "num_res_blocks": 2, "adapter_type": "light_adapter"},
    "xl": {
        "in_channels": 3,
        "channels": [8, 16, 24, 24],
        "num_res_blocks": 1,
        "adapter_type": "full_adapter_xl",
        "downscale_factor": 16,
    },
}
TINY_VAES: dict[str, dict[str, Any]] = {
    "AutoencoderKL": {
        "block_out_channels": [4, 8, 8], "latent_channels": 2, "layers_per_block": 2, "norm_num_groups": 2,
        "down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3,
    },
    "AutoencoderKLFlux2": {
        "block_out_channels": [4, 8, 8, 8], "latent_channels": 2, "layers_per_block": 1, "norm_num_groups": 2,
    },
    "AutoencoderDC": {
        "latent_channels": 4, "attention_head_dim": 4, "encoder_block_out_channels": [4, 8, 16],
        "decoder_block_out_channels": [4, 8, 16], "encoder_layers_per_block": [1, 1, 1],
        "decoder_layers_per_block": [1, 2, 1], "encoder_qkv_multiscales": [[], [], [5]],
        "decoder_qkv_multiscales": [[], [], [5, 3]],
        "encoder_block_types": ["ResBlock", "ResBlock", "EfficientViTBlock"],
        "decoder_block_types": ["ResBlock", "EfficientViTBlock", "EfficientViTBlock"],
    },
    "AutoencoderKLWan": {"base_dim": 4, "z_dim": 2, "num_res_blocks": 1},
    "AutoencoderKLQwenImage": {"base_dim": 4, "z_dim": 2, "num_res_blocks": 1},
    "AutoencoderKLQwenImage21": {
        "base_dim": 4, "decoder_base_dim": 6, "z_dim": 2, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "in_channels": 3,
        "temperal_downsample": [False, True], "out_channels": 3,
    },
    "PaellaVQModel": {"embed_dim": 16, "latent_channels": 2, "bottleneck_blocks": 2, "num_vq_embeddings": 30},
    "AutoencoderTiny": {
        "encoder_block_out_channels": [4, 4, 4], "decoder_block_out_channels": [6, 6, 6], "latent_channels": 2,
        "num_encoder_blocks": [1, 2, 1], "num_decoder_blocks": [2, 1, 3],
    },
    "VQModel": {
        "block_out_channels": [32, 64, 32], "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2,
        "down_block_types": ["DownEncoderBlock2D", "DownEncoderBlock2D", "AttnDownEncoderBlock2D"],
        "up_block_types": ["AttnUpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D"],
        "num_vq_embeddings": 30, "norm_type": "spatial",
    },
    "AutoencoderKLCogVideoX": {
        "block_out_channels": [4, 4, 8, 8], "latent_channels": 2, "layers_per_block": 1, "norm_num_groups": 2,
    },
    "AutoencoderKLHunyuanVideo": {
        "block_out_channels": [4, 4, 8, 8], "latent_channels": 2, "layers_per_block": 1, "norm_num_groups": 2,
    },
    "AutoencoderKLLTXVideo": {
        "block_out_channels": [4, 8, 8, 8], "decoder_block_out_channels": [4, 8, 8, 8], "latent_channels": 6,
        "layers_per_block": [1, 2, 1, 1, 1], "decoder_layers_per_block": [1, 2, 1, 1, 1],
    },
}  # fmt: skip
IMAGES = (
    "AsymmetricAutoencoderKL",
    "AutoencoderKL",
    "AutoencoderRAE",
    "ConsistencyDecoderVAE",
    "AutoencoderKLFlux2",
    "AutoencoderDC",
    "VQModel",
    "PaellaVQModel",
    "AutoencoderKLHunyuanImage",
    "AutoencoderKLKVAE",
    "AutoencoderKLQwenImage21",
    "AutoencoderTiny",
)  # what takes no videos
# Autoencoders whose images have sides of 16 pixels at least, or whose batch is one video.
LATER_VAES: dict[str, dict[str, Any]] = {
    "AutoencoderKLCosmos": {
        "latent_channels": 2, "encoder_block_out_channels": [4, 8, 8, 16], "decode_block_out_channels": [8, 4, 16, 8],
        "num_layers": 1, "attention_resolutions": [4], "resolution": 16,
    },
    "AutoencoderKLLTX2Video": {
        "latent_channels": 6, "block_out_channels": [8, 16, 32, 64], "decoder_block_out_channels": [16, 32, 64],
        "layers_per_block": [1, 2, 1, 1, 1], "decoder_layers_per_block": [1, 2, 1, 1],
    },
    "AutoencoderKLMochi": {
        "encoder_block_out_channels": [32, 32, 64], "decoder_block_out_channels": [64, 32, 64], "latent_channels": 2,
        "layers_per_block": [1, 2, 1, 1], "temporal_expansions": [1, 3], "spatial_expansions": [2, 2],
        "add_attention_block": [False, True, True, True],
    },
    "AutoencoderKLMagvit": {
        "latent_channels": 2, "block_out_channels": [4, 8, 8, 16], "layers_per_block": 1, "norm_num_groups": 2,
    },
    "AutoencoderKLHunyuanVideo15": {
        "latent_channels": 2, "block_out_channels": [8, 16, 16, 32], "layers_per_block": 1,
        "spatial_compression_ratio": 8, "temporal_compression_ratio": 4,
    },
    "AutoencoderKLHunyuanImageRefiner": {
        "latent_channels": 2, "block_out_channels": [8, 16, 16, 32], "layers_per_block": 1,
        "spatial_compression_ratio": 8, "temporal_compression_ratio": 4,
    },
    "AutoencoderKLTemporalDecoder": {
        "latent_channels": 4, "block_out_channels": [32, 64], "layers_per_block": 2,
        "down_block_types": ["DownEncoderBlock2D"] * 2,
    },
    "AutoencoderKLHunyuanImage": {
        "latent_channels": 4, "block_out_channels": [32, 64, 64], "layers_per_block": 1, "in_channels": 3,
        "out_channels": 3, "spatial_compression_ratio": 4, "sample_size": 32,
    },
}  # fmt: skip
# Autoencoders with sizes of their own: class, config, calls; those that cut tiles run without data.
_LEVELS = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
_MINIMAX = {
    "block_out_channels": [4, 6, 6, 8, 8], "norm_num_groups": 2, "latent_channels": 2, "layers_per_block": 1,
    "spatial_downsample_factors": [2, 2, 2, 2, 1], "temporal_downsample_factors": [1, 2, 1, 1, 1],
    "decoder_num_layers": 2, "decoder_num_attention_heads": 2, "decoder_attention_head_dim": 24,
    "latents_mean": [0, 0], "latents_std": [1, 1], "clip_length": 5,
}  # fmt: skip
_RAE = {
    "encoder_hidden_size": 128, "encoder_num_hidden_layers": 2, "decoder_hidden_size": 24, "patch_size": 4,
    "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 20,
}  # fmt: skip
_KVAE_VIDEO = {"ch": 32, "ch_mult": [1, 2, 3], "z_channels": 6, "num_res_blocks": 1}
_VIDTOK = {"ch": 8, "ch_mult": [1, 2, 2, 3], "z_channels": 6, "num_res_blocks": 1}
_ASYMMETRIC = {
    "down_block_out_channels": [32, 64, 64, 64], "up_block_out_channels": [32, 64, 96, 96], "layers_per_up_block": 2,
    **_LEVELS,
}  # fmt: skip
OTHER_VAES: dict[str, tuple[str, dict[str, Any], list[tuple[str, tuple[int, int, int, int]]]]] = {
    "KVAE": (
        "AutoencoderKLKVAE",
        {"channels": 32, "ch_mult": [1, 2, 3], "z_channels": 6, "num_enc_blocks": 1, "num_dec_blocks": 2},
        [("encode", (2, 1, 16, 24)), ("decode", (2, 1, 2, 3))],
    ),
    "KVAE, videos": (
        "AutoencoderKLKVAEVideo", _KVAE_VIDEO,
        [
            ("encode", (2, 1, 16, 24)), ("encode", (1, 9, 16, 24)), ("encode", (1, 37, 8, 12)),
            ("decode", (2, 1, 2, 3)), ("decode", (1, 5, 2, 3)), ("decode", (1, 6, 2, 3)), ("decode", (1, 12, 2, 1)),
        ],
    ),
    "KVAE, videos, twice as fast": (
        "AutoencoderKLKVAEVideo", {**_KVAE_VIDEO, "temporal_compress_times": 2},
        [("encode", (1, 9, 16, 24)), ("decode", (1, 10, 2, 3)), ("decode", (1, 11, 2, 1))],
    ),
    "Kandinsky 6, upscaling": (
        "Kandinsky6SRVAE",
        {
            "encoder_block_out_channels": [4, 8, 12, 16], "decoder_block_out_channels": [6, 8, 10, 16],
            "latent_channels": 6, "layers_per_block": 1,
        },
        [
            ("encode", (2, 1, 16, 24)), ("encode", (1, 9, 16, 24)), ("encode", (1, 37, 8, 16)),
            ("decode", (2, 1, 2, 3)), ("decode", (1, 5, 2, 3)), ("decode", (1, 6, 2, 3)), ("decode", (1, 12, 2, 3)),
        ],
    ),
    "VidTok": (
        "AutoencoderVidTok", _VIDTOK,
        [
            ("encode", (2, 1, 16, 24)), ("encode", (1, 9, 16, 24)), ("encode", (1, 8, 8, 16)),
            ("encode", (1, 6, 8, 16)), ("decode", (2, 1, 2, 3)), ("decode", (1, 5, 2, 3)),
        ],
    ),
    "VidTok, codes, both ways": (
        "AutoencoderVidTok",
        {
            **_VIDTOK, "is_causal": False, "tempo_ds": [0, 1], "tempo_us": [3, 1], "regularizer": "fsq",
            "double_z": False,
        },
        [("encode", (2, 1, 16, 24)), ("encode", (1, 20, 16, 24)), ("decode", (1, 9, 2, 3))],
    ),
    "Allegro, without data": (
        "AutoencoderKLAllegro",
        {
            "block_out_channels": [4, 6, 8, 10], "norm_num_groups": 2, "latent_channels": 2, "layers_per_block": 1,
            "sample_size": 128,
        },
        [
            ("encode", (1, 40, 144, 176)), ("encode", (1, 24, 128, 128)), ("decode", (1, 10, 19, 22)),
            ("decode", (1, 5, 19, 22)),
        ],
    ),
    "MiniMax-H3, without data": (
        "AutoencoderKLMiniMaxH3", _MINIMAX,
        [
            ("encode", (2, 1, 32, 64)), ("encode", (1, 9, 32, 48)), ("encode", (1, 2, 272, 464)),
            ("decode", (1, 7, 2, 3)), ("decode", (1, 4, 20, 34)), ("decode", (2, 12, 2, 3)),
        ],
    ),
    "MiniMax-H3, nothing dropped": (
        "AutoencoderKLMiniMaxH3", {**_MINIMAX, "token_drop": 0},
        [("encode", (1, 9, 32, 48)), ("decode", (1, 1, 2, 3)), ("decode", (1, 7, 2, 3))],
    ),
    "RAE": (
        "AutoencoderRAE", {**_RAE, "encoder_input_size": 56},
        [("encode", (2, 1, 32, 64)), ("decode", (1, 1, 4, 4)), ("decode", (2, 1, 3, 3))],
    ),
    "RAE, masked": (
        "AutoencoderRAE", {**_RAE, "encoder_type": "mae", "encoder_patch_size": 16, "encoder_input_size": 64},
        [("encode", (2, 1, 32, 64)), ("decode", (1, 1, 4, 4))],
    ),
    "of two sides": (
        "AsymmetricAutoencoderKL", _ASYMMETRIC, [("encode", (2, 1, 32, 64)), ("decode", (2, 1, 2, 3))],
    ),
    "of two sides, without a mask": (
        "AsymmetricAutoencoderKL", {**_ASYMMETRIC, "reads_mask": False}, [("decode", (2, 1, 2, 3))],
    ),
    "consistency": (
        "ConsistencyDecoderVAE",
        {
            "encoder_block_out_channels": [32, 64, 32], "encoder_layers_per_block": 1,
            "encoder_down_block_types": ["DownEncoderBlock2D"] * 3, "decoder_block_out_channels": [32, 64, 96],
            "decoder_down_block_types": ["ResnetDownsampleBlock2D"] * 3, "decoder_layers_per_block": 1,
            "decoder_up_block_types": ["ResnetUpsampleBlock2D"] * 3,
        },
        [("encode", (2, 1, 16, 24)), ("decode", (1, 1, 2, 3)), ("decode", (2, 1, 2, 1))],
    ),
}  # fmt: skip
# The same classes with other settings; name -> class and config.
MORE_VAES: dict[str, tuple[str, dict[str, Any]]] = {
    "Cosmos, without wavelets": (
        "AutoencoderKLCosmos",
        {
            "latent_channels": 2, "encoder_block_out_channels": [4, 8, 16], "decode_block_out_channels": [8, 4, 8],
            "num_layers": 1, "attention_resolutions": [], "temporal_compression_ratio": 4, "patch_type": "rearrange",
        },
    ),
    "VQ, with other norms": (
        "VQModel", {**TINY_VAES["VQModel"], "norm_type": "group", "latent_channels": 6, "vq_embed_dim": 4},
    ),
    "DC, without a first block": (
        "AutoencoderDC",
        {
            "latent_channels": 4, "attention_head_dim": 4, "encoder_block_out_channels": [4, 8, 16],
            "decoder_block_out_channels": [4, 8, 16], "encoder_layers_per_block": [0, 1, 1],
            "decoder_layers_per_block": [0, 1, 1], "encoder_qkv_multiscales": [[], [], []],
            "decoder_qkv_multiscales": [[], [], []], "decoder_block_types": "ResBlock",
            "encoder_block_types": ["ResBlock", "ResBlock", "EfficientViTBlock"],
            "upsample_block_type": "interpolate", "downsample_block_type": "Conv",
        },
    ),
    "Wan 2.2": (
        "AutoencoderKLWan",
        {
            "base_dim": 4, "decoder_base_dim": 6, "z_dim": 2, "num_res_blocks": 1, "is_residual": True,
            "in_channels": 12, "out_channels": 12, "patch_size": 2,
        },
    ),
    "LTX-Video 0.9.1": (
        "AutoencoderKLLTXVideo",
        {
            "block_out_channels": [4, 8, 8, 8], "decoder_block_out_channels": [16, 32, 64], "latent_channels": 6,
            "layers_per_block": [1, 2, 1, 1, 1], "decoder_layers_per_block": [1, 2, 1, 1],
            "decoder_spatio_temporal_scaling": [True, True, True], "timestep_conditioning": True,
            "decoder_inject_noise": [True, True, True, False], "upsample_residual": [True, True, True],
            "upsample_factor": [2, 2, 2],
        },
    ),
    "LTX-Video 0.9.5": (
        "AutoencoderKLLTXVideo",
        {
            "block_out_channels": [8, 16, 32, 64, 128], "decoder_block_out_channels": [16, 32, 64],
            "down_block_types": ["LTXVideo095DownBlock3D"] * 4, "spatio_temporal_scaling": [True] * 4,
            "downsample_type": ["spatial", "temporal", "spatiotemporal", "spatiotemporal"], "latent_channels": 6,
            "layers_per_block": [1, 2, 1, 1, 1], "decoder_layers_per_block": [1, 2, 1, 1],
            "decoder_spatio_temporal_scaling": [True, True, True], "timestep_conditioning": True,
            "decoder_inject_noise": [False] * 4, "upsample_residual": [True, True, True],
            "upsample_factor": [2, 2, 2],
        },
    ),
}  # fmt: skip
_CLIP = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 30,
    "projection_dim": 6, "max_position_embeddings": 20, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_T5 = {
    "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "vocab_size": 30,
    "feed_forward_proj": "gated-gelu",
}  # fmt: skip
TINY_TEXT: dict[str, dict[str, Any]] = {
    "CLIPTextModel": _CLIP,
    "CLIPTextModelWithProjection": _CLIP,
    "T5EncoderModel": _T5,
    "UMT5EncoderModel": _T5,
    "LlamaModel": {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 30,
    },
}
# The same classes with other settings.
MORE: dict[str, list[dict[str, Any]]] = {
    "SparseControlNetModel": [
        {
            **TINY["SparseControlNetModel"], "block_out_channels": [8, 16, 16], "layers_per_block": 2,
            "down_block_types": ["DownBlockMotion", "CrossAttnDownBlockMotion", "CrossAttnDownBlockMotion"],
            "attention_head_dim": [1, 2, 4], "concat_conditioning_mask": False, "use_linear_projection": True,
        },
    ],
    "ZImageControlNetModel": [
        {
            **TINY["ZImageControlNetModel"], "add_control_noise_refiner": "control_noise_refiner",
            "control_refiner_layers_places": [0, 1], "control_in_dim": 9,
        },
    ],
    "StableCascadeUNet": [
        {
            "in_channels": 4, "out_channels": 4, "timestep_ratio_embedding_dim": 6, "conditioning_dim": 12,
            "block_out_channels": [8, 16], "num_attention_heads": [0, 4], "down_num_layers_per_block": [2, 1],
            "up_num_layers_per_block": [1, 2], "up_blocks_repeat_mappers": [3, 2], "patch_size": 2,
            "block_types_per_layer": [
                ["SDCascadeResBlock", "SDCascadeTimestepBlock"],
                ["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"],
            ],
            "clip_text_pooled_in_channels": 6, "clip_seq": 2, "effnet_in_channels": 5, "pixel_mapper_in_channels": 3,
            "timestep_conditioning_type": ["sca"], "self_attn": [True, False],
        },
    ],
    "UVit2DModel": [
        {**TINY["UVit2DModel"], "downsample": True, "upsample": True, "use_bias": True, "block_out_channels": 24},
    ],
    "UNet2DConditionModel": [
        {
            "sample_size": 8, "block_out_channels": [8, 16, 16], "layers_per_block": 2, "cross_attention_dim": 10,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "attention_head_dim": [1, 2, 4], "transformer_layers_per_block": [1, 2, 3], "norm_num_groups": 4,
            "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 2,
            "projection_class_embeddings_input_dim": 18,
        },
        {**TINY["UNet2DConditionModel"], "num_class_embeds": 7, "time_cond_proj_dim": 6},
        {**TINY["UNet2DConditionModel"], "encoder_hid_dim": 14, "encoder_hid_dim_type": "text_proj"},
        {**_SIMPLE, "addition_embed_type": "text", "addition_embed_type_num_heads": 7, "class_embed_type": "timestep"},
        {**_SIMPLE, "addition_embed_type": "text_image", "encoder_hid_dim_type": "text_image_proj"},
        {**_SIMPLE, "addition_embed_type": "image", "encoder_hid_dim_type": "image_proj"},
        {**_SIMPLE, "addition_embed_type": "image_hint", "encoder_hid_dim_type": "image_proj", "in_channels": 8},
        {
            **TINY["UNet2DConditionModel"], "class_embed_type": "projection",
            "projection_class_embeddings_input_dim": 6,
        },
        {**TINY["UNet2DConditionModel"], "encoder_hid_dim_type": "ip_image_proj", "ip_image_dim": 14},
    ],
    "MotifVideoTransformer3DModel": [
        {
            **TINY["MotifVideoTransformer3DModel"], "num_single_layers": 4, "num_decoder_layers": 2,
            "enable_text_cross_attention_dual": True, "enable_text_cross_attention_single": True,
        },
    ],
    "Kandinsky3UNet": [{**TINY["Kandinsky3UNet"], "layers_per_block": 3, "cross_attention_dim": 8}],
    "UNetSpatioTemporalConditionModel": [
        {
            **TINY["UNetSpatioTemporalConditionModel"], "block_out_channels": [32, 64, 32], "layers_per_block": 2,
            "down_block_types": ["DownBlockSpatioTemporal"] + ["CrossAttnDownBlockSpatioTemporal"] * 2,
            "up_block_types": ["CrossAttnUpBlockSpatioTemporal"] * 2 + ["UpBlockSpatioTemporal"],
            "num_attention_heads": [1, 2, 4], "transformer_layers_per_block": [1, 2, 1],
        },
    ],
    "UNet3DConditionModel": [
        {
            **TINY["UNet3DConditionModel"], "block_out_channels": [8, 16, 16], "layers_per_block": 2,
            "down_block_types": ["DownBlock3D", "CrossAttnDownBlock3D", "CrossAttnDownBlock3D"],
            "up_block_types": ["CrossAttnUpBlock3D", "CrossAttnUpBlock3D", "UpBlock3D"], "time_cond_proj_dim": 6,
        },
    ],
    "UNetMotionModel": [
        {
            **TINY["UNetMotionModel"], "block_out_channels": [8, 16, 16], "layers_per_block": 2,
            "down_block_types": ["DownBlockMotion", "CrossAttnDownBlockMotion", "CrossAttnDownBlockMotion"],
            "up_block_types": ["CrossAttnUpBlockMotion", "CrossAttnUpBlockMotion", "UpBlockMotion"],
            "num_attention_heads": [1, 2, 4], "motion_num_attention_heads": [2, 4, 8], "use_linear_projection": True,
            "transformer_layers_per_block": [1, 2, 1], "temporal_transformer_layers_per_block": [1, 2, 1],
            "temporal_transformer_layers_per_mid_block": 2, "addition_embed_type": "text_time",
            "addition_time_embed_dim": 2, "projection_class_embeddings_input_dim": 18,
        },
        {**TINY["UNetMotionModel"], "use_motion_mid_block": False, "time_cond_proj_dim": 6},
    ],
    "WanTransformer3DModel": [
        {**TINY["WanTransformer3DModel"], "in_channels": 9, "image_dim": 7, "added_kv_proj_dim": 24},
        {**TINY["WanTransformer3DModel"], "expand_timesteps": True},
    ],
    "HunyuanVideoTransformer3DModel": [
        {**TINY["HunyuanVideoTransformer3DModel"], "image_condition_type": "token_replace", "guidance_embeds": False},
        {**TINY["HunyuanVideoTransformer3DModel"], "image_condition_type": "latent_concat", "in_channels": 9},
    ],
    "ConsisIDTransformer3DModel": [
        {**TINY["ConsisIDTransformer3DModel"], "one_face": True, "cross_attn_interval": 4},
        {**TINY["ConsisIDTransformer3DModel"], "is_train_face": False, "num_layers": 3},
    ],
    "HeliosTransformer3DModel": [
        {
            **TINY["HeliosTransformer3DModel"], "guidance_cross_attn": False, "zero_history_timestep": False,
            "is_amplify_history": True,
        },
    ],
    "WanAnimateTransformer3DModel": [
        {
            **TINY["WanAnimateTransformer3DModel"], "added_kv_proj_dim": None, "motion_encoder_channel_sizes": None,
            "motion_encoder_size": 8, "inject_face_latents_blocks": 4,
        },
    ],
    "Cosmos3OmniTransformer": [
        {
            **TINY["Cosmos3OmniTransformer"], "hidden_act": "relu2", "qk_norm_for_text": False,
            "use_und_k_norm_for_gen": True, "action_gen": True, "action_dim": 5, "sound_gen": True, "sound_dim": 7,
            "attention_bias": True,
        },
    ],
    "Kandinsky6Transformer3DModel": [
        {
            **TINY["Kandinsky6Transformer3DModel"], "visual_cond": True, "model_dim_a": 12, "time_dim_a": 10,
            "ff_dim_a": 16, "axes_dims_a": [2, 2, 2], "cross_gates": True, "fix_modulation": True,
            "visual_token_type_num_embeddings": 2,
        },
    ],
    "DreamLiteUNetModel": [
        {
            **TINY["DreamLiteUNetModel"], "use_sep_conv": False, "num_kv_heads": None, "qk_norm": None,
            "num_mid_layers": 2, "use_linear_projection": True, "transformer_layers_per_block": [1, 2, 2],
            "encoder_hid_dim_type": "text_proj", "attention_head_dim": [1, 2, 4], "layers_per_block": 2,
        },
    ],
    "SkyReelsV2Transformer3DModel": [
        {**TINY["SkyReelsV2Transformer3DModel"], "in_channels": 9, "image_dim": 7, "added_kv_proj_dim": 24},
        {**TINY["SkyReelsV2Transformer3DModel"], "inject_sample_info": True},
    ],
    "PRXTransformer2DModel": [{**TINY["PRXTransformer2DModel"], "bottleneck_size": 6, "resolution_embeds": True}],
    "BriaFiboTransformer2DModel": [{**TINY["BriaFiboTransformer2DModel"], "guidance_embeds": True}],
    "LuminaNextDiT2DModel": [{**TINY["LuminaNextDiT2DModel"], "ffn_dim_multiplier": 1.5, "qk_norm": False}],
    "HunyuanImageTransformer2DModel": [
        {
            **TINY["HunyuanImageTransformer2DModel"], "text_embed_2_dim": None, "guidance_embeds": True,
            "use_meanflow": True,
        },
    ],
    "EasyAnimateTransformer3DModel": [
        {
            **TINY["EasyAnimateTransformer3DModel"], "mmdit_layers": 3, "norm_elementwise_affine": False,
            "add_norm_text_encoder": True,
        },
    ],
    "CosmosTransformer3DModel": [
        {
            **TINY["CosmosTransformer3DModel"], "extra_pos_embed_type": None, "concat_padding_mask": False,
            "use_crossattn_projection": True, "crossattn_proj_in_channels": 18, "encoder_hidden_states_channels": 10,
        },
        {**TINY["CosmosTransformer3DModel"], "expand_timesteps": True},
    ],
    "UNetControlNetXSModel": [
        {
            **TINY["UNetControlNetXSModel"], "block_out_channels": [8, 16], "ctrl_block_out_channels": [4, 12],
            "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "ctrl_num_attention_heads": 2,
            "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "transformer_layers_per_block": 1,
            "use_linear_projection": False, "ctrl_learn_time_embedding": True, "time_embedding_mix": 0.5,
            "addition_embed_type": "text_time", "addition_time_embed_dim": 2,
            "projection_class_embeddings_input_dim": 18,
        },
    ],
    "CosmosControlNetModel": [
        {
            **TINY["CosmosControlNetModel"], "n_controlnet_blocks": 3, "text_embed_dim": 18, "expand_timesteps": True,
            "extra_pos_embed_type": "learnable", "use_crossattn_projection": True, "crossattn_proj_in_channels": 10,
            "encoder_hidden_states_channels": 18,
        },
    ],
    "SanaVideoTransformer3DModel": [{**TINY["SanaVideoTransformer3DModel"], "expand_timesteps": True}],
    "HiDreamImageTransformer2DModel": [{**TINY["HiDreamImageTransformer2DModel"], "num_routed_experts": 0}],
    "Flux3Transformer2DModel": [{**TINY["Flux3Transformer2DModel"], "flow_map": True}],
    "LTX2VideoTransformer3DModel": [
        {
            **TINY["LTX2VideoTransformer3DModel"], "gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True,
            "audio_cross_attn_mod": True,
        },
        {**TINY["LTX2VideoTransformer3DModel"], "expand_timesteps": True},
    ],
    "QwenImage21Transformer2DModel": [{**TINY["QwenImage21Transformer2DModel"], "causal_condition": False}],
    "UNet2DModel": [
        {
            **TINY["UNet2DModel"], "block_out_channels": [8, 16, 8], "attention_head_dim": None, "num_class_embeds": 7,
            "down_block_types": ["AttnDownBlock2D", "DownBlock2D", "DownBlock2D"],
            "up_block_types": ["UpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D"],
        },
        {
            **TINY["UNet2DModel"], "block_out_channels": [8, 16, 8], "resnet_time_scale_shift": "scale_shift",
            "down_block_types": ["ResnetDownsampleBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"],
            "up_block_types": ["AttnUpBlock2D", "AttnUpBlock2D", "ResnetUpsampleBlock2D"], "downsample_type": "resnet",
            "upsample_type": "resnet",
        },
    ],
    "FluxControlNetModel": [{**TINY["FluxControlNetModel"], "num_mode": 3, "num_single_layers": 0}],
    "Kandinsky5Transformer3DModel": [{**TINY["Kandinsky5Transformer3DModel"], "visual_cond": True}],
    "LTXVideoTransformer3DModel": [{**TINY["LTXVideoTransformer3DModel"], "expand_timesteps": True}],
    "CogVideoXTransformer3DModel": [
        {**TINY["CogVideoXTransformer3DModel"], "in_channels": 8, "patch_size_t": 2, "ofs_embed_dim": 6},
    ],
}  # fmt: skip


def build(name: str, config: dict[str, Any]) -> torch.nn.Module:
    """The diffusers class of a config, with random weights."""
    found: torch.nn.Module = build_denoiser({"_class_name": name, **config})
    return found


def make_inputs(name: str, config: dict[str, Any], batch: int, text: int, grid: tuple[int, int, int]) -> dict[str, Any]:
    """What the class's forward takes, for latents (t, h, w) as a Workload holds them."""
    return make_denoiser_inputs({"_class_name": name, **config}, batch, text, grid)


def flatten(out: Any) -> list[torch.Tensor]:
    """The tensors of what a model returns: a sample, a list of samples, the lists of a ControlNet, or its table."""
    out = [*out.values()] if isinstance(out, dict) else out
    return [out] if isinstance(out, torch.Tensor) else [tensor for each in out or () for tensor in flatten(each)]


def count_step(model: torch.nn.Module, inputs: dict[str, Any], train: bool) -> OperatorCount:
    """What a counter sees of one forward pass, or of one with its backward pass; attention is plain products."""
    model.train(train)

    plain = (
        "T2IAdapter",
        "UVit2DModel",
        "Wuerstchen",
        "ZImageControlNetModel",
        "LTXLatent",
        "LTX2Latent",
    )  # return no object
    more = {} if type(model).__name__.startswith(plain) else {"return_dict": False}

    def step() -> None:
        with torch.set_grad_enabled(train):
            out = flatten(model(**inputs, **more))
        if train:
            sum(each.float().sum() for each in out).backward()

    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return count_flops(model, step)


def find_differences(
    name: str,
    config: dict[str, Any],
    batch: int,
    text: int,
    grid: tuple[int, int, int],
    recipe: dict[str, Any],
    phase: str = "train",
) -> dict[str, Any]:
    """Rows (path -> ours, counted) and parameters that differ; empty where all are equal."""
    model = build(name, config)
    apply_recipe(model, recipe)
    counted = count_step(model, make_inputs(name, config, batch, text, grid), phase == "train")
    recomputes = recipe.get("recompute", "none") != "none"
    estimator = CountedEstimator(
        bind_model(load_config({"_class_name": name, **config})),
        make_recipe(**recipe),
        "hardware" if recomputes else "full",
        "eager",
    )
    estimate = estimator.estimate(Workload(batch, text, phase=phase, grids=(grid,) * batch))
    ours = {row.path: (row.forward, row.backward, row.recompute) for row in estimate.by_module(per_layer=True)}
    ours = {path: row for path, row in ours.items() if any(row)}
    theirs: dict[str, tuple[int, ...]] = {}
    for path, row in counted.rows.items():  # of experts together: their tokens are random
        name = re.sub(r"\.experts\.\d+\.", ".experts.*.", path)
        theirs[name] = tuple(map(sum, zip(theirs.get(name, (0, 0, 0)), row, strict=True)))
    theirs = {path: row for path, row in theirs.items() if any(row)}
    paths = ours.keys() | theirs.keys()
    found: dict[str, Any] = {
        path: (ours.get(path), theirs.get(path)) for path in paths if ours.get(path) != theirs.get(path)
    }
    total = sum(each.numel() for each in model.parameters())
    trainable = sum(each.numel() for each in model.parameters() if each.requires_grad)
    if (estimate.parameters["total"], estimate.parameters["trainable"]) != (total, trainable):
        found["parameters"] = (estimate.parameters, total, trainable)
    if counted.not_counted:
        found["operators"] = counted.not_counted
    return found


def find_vae_differences(
    name: str, config: dict[str, Any], side: str, size: tuple[int, int, int, int], device: str = "cpu"
) -> dict[str, Any]:
    """As find_differences, of one call of a VAE's encode or decode on (batch, frames, height, width) of its input."""
    model = build(name, config).eval().to(device)
    batch, t, h, w = size
    widths = ("vq_embed_dim", "latent_channels", "z_dim", "z_channels")
    channels = 3 if side == "encode" else next((config[key] for key in widths if key in config), 4)
    if name == "AutoencoderRAE" and side == "decode":
        channels = config["encoder_hidden_size"]
    flat = name in IMAGES and name != "AutoencoderKLQwenImage21"
    given = torch.randn(batch, channels, *(() if flat else (t,)), h, w, device=device)
    times = [torch.ones(batch)] if config.get("timestep_conditioning") and side == "decode" else []
    more: dict[str, Any] = {"force_not_quantize": True} if name == "VQModel" and side == "decode" else {}
    if name == "AutoencoderKLTemporalDecoder":  # frames are images
        given, more = given.transpose(1, 2).flatten(0, 1), {"num_frames": t} if side == "decode" else {}

    called = getattr(model, side)
    if name == "AutoencoderKLAllegro":
        model.enable_tiling()
    if name == "AsymmetricAutoencoderKL" and side == "decode" and config.get("reads_mask", True):
        side_of = 2 ** (len(config["up_block_out_channels"]) - 1)
        more = {"image": torch.randn(batch, 3, h * side_of, w * side_of)}
        more["mask"] = torch.ones(batch, 1, h * side_of, w * side_of)
    if name == "AutoencoderVidTok" and side == "encode":  # its forward pads the frames first
        model.decode, called = lambda latents: latents, model

    def step() -> None:
        with torch.no_grad():
            called(given, *times, **more)

    with sdpa_kernel(SDPBackend.MATH), torch.device(device):
        counted = count_flops(model, step)
    estimator = CountedEstimator(
        bind_model(load_config({"_class_name": name, **config}), is_part=True), None, "full", "eager"
    )
    grids = ((t, h, w),) * batch
    load = Workload(batch, 0, phase="forward", **{"grids" if side == "encode" else "videos": grids})
    estimate = estimator.estimate(load)
    ours = {row.path: row.forward for row in estimate.by_module(per_layer=True) if row.forward}
    theirs = {path: row[0] for path, row in counted.rows.items() if row[0]}
    found = _compare(ours, theirs, estimate.parameters["total"], model)
    return {**found, "operators": counted.not_counted} if counted.not_counted else found


def find_text_differences(name: str, config: dict[str, Any], batch: int, length: int) -> dict[str, Any]:
    """As find_differences, of one forward pass of a text encoder."""
    import transformers

    configs = {"CLIP": "CLIPTextConfig", "T5": "T5Config", "UMT5": "UMT5Config", "Llama": "LlamaConfig"}
    kind = getattr(transformers, next(value for key, value in configs.items() if name.startswith(key)))
    model = getattr(transformers, name)._from_config(kind(**config), attn_implementation="eager").eval()
    ids = torch.full((batch, length), 2)

    def step() -> None:
        with torch.no_grad():
            model(ids)

    counted = count_flops(model, step)
    model_of_spec = bind_model(load_config({"_class_name": name, **config}), is_part=True)
    estimate = CountedEstimator(model_of_spec, None, "full", "eager").estimate(Workload(batch, length, phase="forward"))
    ours = {row.path: row.forward for row in estimate.by_module(per_layer=True) if row.forward}
    theirs = {path: row[0] for path, row in counted.rows.items() if row[0]}
    return _compare(ours, theirs, estimate.parameters["total"], model)


def _compare(ours: dict[str, int], theirs: dict[str, int], total: int, model: torch.nn.Module) -> dict[str, Any]:
    paths = ours.keys() | theirs.keys()
    found: dict[str, Any] = {
        path: (ours.get(path), theirs.get(path)) for path in paths if ours.get(path) != theirs.get(path)
    }
    held = sum(each.numel() for each in model.parameters())
    return found if total == held else {**found, "parameters": (total, held)}


def apply_recipe(model: Any, recipe: dict[str, Any]) -> None:
    """LoRA and gradient checkpointing as diffusers' own training scripts set them."""
    lora = recipe.get("lora")
    if lora is not None:
        from peft import LoraConfig, inject_adapter_in_model

        model.requires_grad_(False)
        settings = LoraConfig(r=lora["r"], lora_alpha=lora["r"], target_modules=lora["targets"])
        inject_adapter_in_model(settings, model)
    if recipe.get("recompute", "none") != "none":
        model.enable_gradient_checkpointing()
