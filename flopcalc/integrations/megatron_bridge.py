"""Megatron-Bridge: `from flopcalc.integrations import megatron_bridge; megatron_bridge.install()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flopcalc.base.errors import ConfigError, RecipeError
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.recipe.recipe import Lora
from flopcalc.integrations.counting import StepCounter, bind_options, replace_attributes
from flopcalc.integrations.native import Decoder, Experts, Mla, make_config

# megatron-bridge 0.3: megatron/bridge/training/utils/flop_utils.py, called in training/train.py once for each step;
# fields of megatron-core's TransformerConfig and MLATransformerConfig, and of models/gpt_provider.py.
_UNMAPPED = ("hybrid_override_pattern", "hybrid_layer_pattern", "mtp_num_layers", "window_size", "moe_latent_size")
# LoRA's targets in Megatron's words -> modules of the HF model.
_TARGETS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def map_config(model: Any) -> dict[str, Any]:
    """The HF config with the same products as a Megatron model provider, or another TransformerConfig."""
    name = type(model).__name__
    if getattr(model, "is_hybrid_model", False):
        raise ConfigError(f"{name} is a hybrid model, which is not mapped; give model=")
    for field in _UNMAPPED:
        if getattr(model, field, None):
            raise ConfigError(f"{name}: {field}={getattr(model, field)!r} is not mapped; give model=")
    if getattr(model, "vision_config", None) is not None:
        raise ConfigError(f"{name} has a vision tower, which is not mapped; give model=")
    heads = model.num_attention_heads
    mla = None
    if getattr(model, "multi_latent_attention", False):
        mla = Mla(model.q_lora_rank, model.kv_lora_rank, model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim)
    decoder = Decoder(
        hidden=model.hidden_size,
        layers=model.num_layers,
        heads=heads,
        kv_heads=getattr(model, "num_query_groups", None) or heads,
        head_dim=getattr(model, "kv_channels", None) or model.hidden_size // heads,
        vocab=_pad_vocabulary(model),
        size=getattr(model, "ffn_hidden_size", None) or 4 * model.hidden_size,
        is_gated=bool(getattr(model, "gated_linear_unit", False)),
        experts=_read_experts(model),
        mla=mla,
        is_tied=bool(getattr(model, "share_embeddings_and_output_weights", False)),
    )
    return make_config(decoder, name)


def _read_experts(model: Any) -> Experts | None:
    count = getattr(model, "num_moe_experts", None)
    if not count:
        return None
    frequency = getattr(model, "moe_layer_freq", 1)
    pattern = [int(i % frequency == 0) for i in range(model.num_layers)] if isinstance(frequency, int) else frequency
    if len(pattern) != model.num_layers:
        raise ConfigError(f"moe_layer_freq has {len(pattern)} entries for {model.num_layers} layers")
    return Experts(
        count,
        getattr(model, "moe_router_topk", None) or 1,
        getattr(model, "moe_ffn_hidden_size", None) or model.ffn_hidden_size,
        [index for index, is_sparse in enumerate(pattern) if is_sparse],
        getattr(model, "moe_shared_expert_intermediate_size", None) or 0,
        bool(getattr(model, "moe_shared_expert_gate", False)),
    )


def _pad_vocabulary(model: Any) -> int:
    """The head's width: Megatron pads it to a multiple of that many rows for each tensor-parallel rank."""
    multiple = getattr(model, "make_vocab_size_divisible_by", 1) * getattr(model, "tensor_model_parallel_size", 1)
    if getattr(model, "should_pad_vocab", True):
        return -(-int(model.vocab_size) // multiple) * multiple
    return int(model.vocab_size)


def _map_lora(peft: Any) -> Lora | None:
    """LoRA of a Bridge config; canonical LoRA and DoRA are refused."""
    if peft is None:
        return None
    if type(peft).__name__ != "LoRA":
        raise RecipeError(f"{type(peft).__name__} is not counted")
    unknown = [target for target in peft.target_modules if target not in _TARGETS]
    if unknown:
        raise RecipeError(f"LoRA on {unknown[0]} is not counted")
    return Lora(peft.dim, tuple(name for target in peft.target_modules for name in _TARGETS[target]))


class _Bound:
    """The counter of the config that was counted last."""

    def __init__(self, options: dict[str, object]) -> None:
        self.options = options
        self.model: Any = None
        self.counter: StepCounter | None = None

    def count(self, cfg: Any, batch_size: int = 1) -> float:
        """FLOPs of a step on `batch_size` sequences of the model's seq_length, of all GPUs together."""
        if self.counter is None or cfg.model is not self.model:
            self.model = cfg.model
            self.counter = StepCounter(lambda: self._bind(cfg), "Megatron-Bridge")
        return self.counter.count_rows(batch_size, cfg.model.seq_length)

    def _bind(self, cfg: Any) -> Estimator:
        options = dict(self.options)
        if "lora" not in options and "recipe" not in options:
            options["lora"] = _map_lora(getattr(cfg, "peft", None))
        return bind_options(lambda: map_config(cfg.model), options)


def num_floating_point_operations(cfg: object, batch_size: int = 1, **options: object) -> float:
    """Megatron-Bridge's function with exact counts; `install` keeps the bound model between calls."""
    return _Bound(options).count(cfg, batch_size)


def install(**options: object) -> Callable[[], None]:
    """Replace the formula of this process; options are those of flopcalc.bind, and `model=`."""
    from megatron.bridge.training.utils import flop_utils

    return replace_attributes(flop_utils, num_floating_point_operations=_Bound(options).count)
