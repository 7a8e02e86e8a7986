"""What KindsRunner makes besides training on labels: denoisers, tokens, losses of preferences, layers of few bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
Step = Callable[[], Any]
_GROUP = 128  # inputs that share a scale in int4
_TILES = 8  # of torch's packing of int4


# --- denoisers --------------------------------------------------------------------------------------------------------
def make_denoiser(torch: Any, config: Json, work: Json, asked: Json, device: str) -> tuple[Any, Step]:
    """A denoiser of diffusers in bf16, and its forward pass, with the backward pass of a mean square if it trains."""
    from lab.denoisers import build_denoiser, make_denoiser_inputs

    trains = work.get("phase", "train") == "train"
    model = build_denoiser(config, torch.bfloat16, device)
    if "lora" in asked:
        from peft import LoraConfig, inject_adapter_in_model

        model.requires_grad_(False)
        lora = asked["lora"]
        settings = LoraConfig(r=lora["r"], lora_alpha=lora["r"], target_modules=lora["targets"])
        inject_adapter_in_model(settings, model)
    if asked.get("recompute") == "full":
        model.enable_gradient_checkpointing()
    model.train(trains)
    inputs = make_denoiser_inputs(config, work["batch"], work["text"], tuple(work["grid"]), torch.bfloat16, device)

    def forward() -> None:
        with torch.no_grad():
            model(**inputs, return_dict=False)

    def train() -> None:
        found = model(**inputs, return_dict=False)[0]
        (found.float() - 1.0).square().mean().backward()

    return model, train if trains else forward


def shrink_denoiser(config: Json) -> Json:
    """The same class and keys, hardly any work: to try a step on a CPU."""
    small: Json = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "layers_per_block": 1}
    small |= {"cross_attention_dim": 32, "transformer_layers_per_block": 1, "joint_attention_dim": 32}
    if "caption_projection_dim" in config:
        small["caption_projection_dim"] = 2 * config["attention_head_dim"]
    if "block_out_channels" in config:
        small |= {"block_out_channels": [32] * len(config["block_out_channels"]), "attention_head_dim": 4}
    return {**config, **{name: value for name, value in small.items() if name in config}}


# --- tokens -----------------------------------------------------------------------------------------------------------
def make_decode(torch: Any, model: Any, inputs: Json, work: Json, has_decoder: bool) -> Step:
    """Tokens one by one behind a cache, which is cropped after each step; an encoder has run before."""
    batch, new = work["batch"], work["decoder_seq" if has_decoder else "seq"]
    token = torch.full((batch, 1), 5, device=model.device)
    fixed: Json = {}
    with torch.no_grad():
        if has_decoder:
            read = {name: each for name, each in inputs.items() if not name.startswith("decoder_")}
            fixed["encoder_outputs"] = model.get_encoder()(**read)
            begun = {"decoder_input_ids": torch.full((batch, work["context"]), 5, device=model.device)}
        else:
            begun = {"input_ids": inputs["input_ids"], "logits_to_keep": 1}
        cache = model(**begun, **fixed, use_cache=True).past_key_values
    name = "decoder_input_ids" if has_decoder else "input_ids"

    def decode() -> None:
        with torch.no_grad():
            for _ in range(new):
                model(**{name: token}, **fixed, past_key_values=cache, use_cache=True)
        cache.crop(-new)

    return decode


# --- preferences ------------------------------------------------------------------------------------------------------
def find_logs(torch: Any, logits: Any, ids: Any) -> Any:
    """Log probabilities of the tokens, row by row as TRL's selective_log_softmax has them for bf16."""
    rows = zip(logits, ids, strict=True)
    found = [torch.nn.functional.log_softmax(row, dim=-1).gather(-1, own[:, None])[:, 0] for row, own in rows]
    return torch.stack(found)


def make_preference(torch: Any, model: Any, objective: str, inputs: Json) -> Step:
    """Forward and backward of DPO, of GRPO without its rollout, or of a reward model.

    A reference is a frozen copy of the model, or with LoRA the model without its adapters.
    """
    name, _, said = objective.partition(",")
    kept = int(dict(each.split("=") for each in said.split(",") if each).get("completion", 0))
    ids = inputs["input_ids"]
    kept = min(kept, ids.shape[1] - 1)
    if name == "reward":

        def train_reward() -> None:
            chosen, rejected = model(**inputs, use_cache=False).logits.float().chunk(2)
            (-torch.nn.functional.logsigmoid(chosen - rejected).mean()).backward()

        return train_reward
    has_adapters = hasattr(model, "disable_adapter")
    frozen = model if has_adapters else copy.deepcopy(model).requires_grad_(False).eval()
    keep = {"logits_to_keep": kept + 1} if kept else {}
    own = ids[:, -kept:] if kept else ids[:, 1:]

    def score(scored: Any) -> Any:
        return find_logs(torch, scored(**inputs, **keep, use_cache=False).logits[:, :-1], own)

    def score_reference() -> Any:
        with torch.no_grad():
            if not has_adapters:
                return score(frozen)
            with model.disable_adapter():
                return score(model)

    def train_dpo() -> None:
        before = score_reference().sum(-1)
        chosen, rejected = (0.1 * (score(model).sum(-1) - before)).float().chunk(2)
        (-torch.nn.functional.logsigmoid(chosen - rejected).mean()).backward()

    def train_grpo() -> None:
        with torch.no_grad():
            old = score(model)
        reference, now = score_reference(), score(model)
        ratio, gap = torch.exp(now - old), reference - now
        gain = torch.min(ratio * 0.5, ratio.clamp(0.8, 1.2) * 0.5)
        (0.04 * (torch.exp(gap) - gap - 1) - gain).mean().backward()

    return train_dpo if name == "dpo" else train_grpo


# --- layers of few bits -----------------------------------------------------------------------------------------------
def narrow_linears(torch: Any, model: Any, way: str) -> None:
    """Linear layers of the blocks through `int8`, `int4` or `fp8` weights, with what torch itself has; heads stay."""
    made = {"int8": _make_int8, "int4": _make_int4, "fp8": _make_fp8}[way](torch)
    found = [
        (parent, name, layer)
        for path, parent in model.named_modules()
        for name, layer in parent.named_children()
        if type(layer) is torch.nn.Linear and "layers." in f"{path}."
    ]
    for parent, name, layer in found:
        setattr(parent, name, made(layer))


def _make_int8(torch: Any) -> Any:
    """A weight of int8 with a scale per output, brought to the input's format before the product, as torchao does."""

    class Int8(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, layer: Any) -> None:
            super().__init__()
            weight = layer.weight.data
            scale = weight.abs().amax(1).float() / 127
            self.register_buffer("weight", (weight.float() / scale[:, None]).round().to(torch.int8))
            self.register_buffer("scale", scale.to(weight.dtype))
            self.bias = layer.bias

        def forward(self, x: Any) -> Any:
            found = torch.nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale
            return found if self.bias is None else found + self.bias

    return Int8


def _make_int4(torch: Any) -> Any:
    """torch's own packed int4 with scales of 128 inputs (tinygemm); on a CPU a plain layer, to try the step."""

    class Int4(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, layer: Any) -> None:
            super().__init__()
            weight, place = layer.weight.data, layer.weight.device
            n, k = weight.shape
            numbers = torch.randint(0, 16, (n, k), dtype=torch.int32, device=place)
            pairs = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)  # two numbers a byte
            self.register_buffer("weight", torch._convert_weight_to_int4pack(pairs, _TILES))
            self.register_buffer("scales", torch.rand(k // _GROUP, n, 2, dtype=weight.dtype, device=place) / 100)
            self.bias, self.outputs = layer.bias, n

        def forward(self, x: Any) -> Any:
            found = torch._weight_int4pack_mm(x.reshape(-1, x.shape[-1]), self.weight, _GROUP, self.scales)
            found = found.view(*x.shape[:-1], self.outputs)
            return found if self.bias is None else found + self.bias

    return lambda layer: Int4(layer) if layer.weight.is_cuda else layer


def _make_fp8(torch: Any) -> Any:
    """Products in fp8 with a scale per tensor, found anew in each call: inputs, weights and gradients, as torchao's
    dynamic tensorwise recipe."""
    narrow, most = torch.float8_e4m3fn, 448.0

    def cast(each: Any) -> tuple[Any, Any]:
        scale = each.abs().max().float().clamp(min=1e-12) / most
        return (each / scale.to(each.dtype)).to(narrow), scale

    def multiply(left: Any, right: Any, one: Any, two: Any, dtype: Any) -> Any:
        return torch._scaled_mm(left, right, scale_a=one, scale_b=two, out_dtype=dtype, use_fast_accum=True)

    class Product(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            (left, one), (right, two) = cast(x), cast(weight)
            return multiply(left, right.t(), one, two, x.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight = ctx.saved_tensors
            (left, one), (right, two), (kept, three) = cast(grad.contiguous()), cast(weight), cast(x)
            to_x = multiply(left, right.t().contiguous().t(), one, two, x.dtype)
            to_weight = multiply(left.t().contiguous(), kept.t().contiguous().t(), one, three, x.dtype)
            return to_x, to_weight

    class Fp8(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.weight, self.bias = layer.weight, layer.bias

        def forward(self, x: Any) -> Any:
            found = Product.apply(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)
            return found if self.bias is None else found + self.bias

    return Fp8
