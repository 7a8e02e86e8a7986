"""torchtitan: `from flopcalc.integrations import torchtitan; torchtitan.install()` replaces its FLOPs per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from flopcalc.base.errors import ConfigError
from flopcalc.integrations.counting import bind_options, replace_attributes
from flopcalc.setup.native import Decoder, Experts, Mla, make_config

# torchtitan 0.3: trainer.py calls model_config.get_nparams_and_flops(model, seq_len) once; the configs are those of
# models/common (decoder.py, attention.py, feed_forward.py, moe.py) and models/deepseek_v3/model.py.
_NAME = "get_nparams_and_flops"


def map_config(config: Any) -> dict[str, Any]:
    """The HF config with the same products as a torchtitan model config."""
    name = type(config).__qualname__.removesuffix(".Config")
    layers = getattr(config, "layers", None)
    if not layers or not hasattr(config, "vocab_size"):
        raise ConfigError(f"{name} is no decoder of torchtitan's own; give model=")
    first = layers[0].attention
    if any(getattr(layer, "attention", None) is None for layer in layers) or not hasattr(first, "n_heads"):
        raise ConfigError(f"{name} has layers without softmax attention, which are not mapped; give model=")
    sizes = [_get_width(layer.feed_forward) for layer in layers if getattr(layer, "feed_forward", None) is not None]
    if len(set(sizes)) > 1:
        raise ConfigError(f"{name} has dense MLPs of several widths, which are not mapped; give model=")
    if getattr(config, "mtp_layers", None):
        raise ConfigError(f"{name} trains layers of multi-token prediction, which are not counted; give model=")
    mla = None
    if hasattr(first, "kv_lora_rank"):
        mla = Mla(
            first.q_lora_rank or None,
            first.kv_lora_rank,
            first.qk_nope_head_dim,
            first.qk_rope_head_dim,
            first.v_head_dim,
        )
    experts = _read_experts(layers, name)
    decoder = Decoder(
        hidden=config.dim,
        layers=len(layers),
        heads=first.n_heads,
        kv_heads=getattr(first, "n_kv_heads", None) or first.n_heads,
        head_dim=getattr(first, "head_dim", None) or config.dim // first.n_heads,
        vocab=config.vocab_size,
        size=sizes[0] if sizes else (experts.size if experts else 1),
        experts=experts,
        mla=mla,
        is_tied=bool(getattr(config, "enable_weight_tying", False)),
        windows=[getattr(layer.attention, "sliding_window_size", None) for layer in layers],
    )
    return make_config(decoder, name)


def _read_experts(layers: Any, name: str) -> Experts | None:
    found = {index: layer.moe for index, layer in enumerate(layers) if getattr(layer, "moe", None) is not None}
    if not found:
        return None
    shapes = {
        (moe.num_experts, moe.router.top_k, moe.routed_experts.inner_experts.hidden_dim, _get_width(moe.shared_experts))
        for moe in found.values()
    }
    if len(shapes) > 1:
        raise ConfigError(f"{name} has experts of several shapes, which are not mapped; give model=")
    ((count, top_k, size, shared),) = shapes
    shared_experts = next(iter(found.values())).shared_experts
    return Experts(count, top_k, size, list(found), shared, hasattr(shared_experts, "gate"))


def _get_width(feed_forward: Any) -> int:
    return 0 if feed_forward is None else int(feed_forward.w1.out_features)


def get_nparams_and_flops(config: object, model: Any, seq_len: int, **options: object) -> tuple[int, float]:
    """Parameters of the model, and FLOPs per token of a training step on sequences of one document each."""
    step = bind_options(lambda: map_config(config), options)(1, seq_len)
    per_token = Fraction(step.total, seq_len)
    flops = per_token.numerator if per_token.denominator == 1 else float(per_token)
    return sum(parameter.numel() for parameter in model.parameters()), flops


def install(**options: object) -> Callable[[], None]:
    """Replace the FLOPs of every model that is imported by now; options are those of flopcalc.bind, and `model=`.

    Call it after the imports of your models. A model that cannot be mapped is an error when the trainer starts.
    """
    from torchtitan.protocols.model import BaseModel

    def ours(self: object, model: object, seq_len: int) -> tuple[int, float]:
        return get_nparams_and_flops(self, model, seq_len, **options)

    undos = [replace_attributes(each, **{_NAME: ours}) for each in _list_configs(BaseModel.Config)]
    if not undos:
        raise ConfigError("no torchtitan model is imported yet: call install() after the import of your model")

    def undo() -> None:
        for each in undos:
            each()

    return undo


def _list_configs(base: type) -> Iterator[type]:
    """The classes below `base` that have a counter of their own."""
    each: type
    for each in base.__subclasses__():
        if _NAME in vars(each):
            yield each
        yield from _list_configs(each)
