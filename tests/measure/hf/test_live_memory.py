"""Predicted memory against the tensors that are alive in a step of HF's own model, traced at real sizes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiers import thin
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flopcalc.api import bind
from flopcalc.core.workload.workload import make_workload
from flopcalc.measure.hf.models import apply_recipe, build_model, floats_on_meta, make_batch
from flopcalc.prediction.memory.peak import predict_memory


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all storages that operators made and that are still there, and the most of them at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._held: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return

        def free(_: Any) -> None:
            self.now -= self._held.pop(key)[0]

        self._held[key] = (storage.nbytes(), weakref.ref(storage, free))
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out


class Attend(torch.autograd.Function):
    """A fused kernel as autograd sees it: its output and one number per query are kept."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


@contextmanager
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SDPA as one operator, groups of heads taken as they are: what HF does on a GPU."""
    import transformers.integrations.sdpa_attention as integration
    from transformers.integrations import moe

    with monkeypatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", lambda q, k, v, **_: Attend.apply(q, k, v))
        patch.setattr(integration, "use_gqa_in_sdpa", lambda mask, *_, **__: mask is None)
        # Of experts too, as their kernels want values.
        patch.setattr(moe, "_grouped_mm", lambda rows, weight, **_: rows.new_empty(len(rows), weight.shape[-1]))
        patch.setattr(torch, "histc", lambda _, bins, **__: torch.zeros(bins, dtype=torch.int32))
        yield


def make_text(model_type: str, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": model_type, "hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 3,
        "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 80, "vocab_size": 20_000,
        "max_position_embeddings": 4096, **changes,
    }  # fmt: skip


TIED = {"tie_word_embeddings": True}
QWEN2 = make_text("qwen2", head_dim=64, **TIED)  # its heads are always as wide as the stream
CASES = {
    "llama": (make_text("llama"), 2, 512, "sdpa", {}),
    "llama tied, few tokens": (make_text("llama", **TIED), 1, 16, "sdpa", {}),
    "llama eager": (make_text("llama"), 2, 512, "eager", {}),
    "llama recomputed": (make_text("llama"), 4, 512, "sdpa", {"recompute": "full"}),
    "llama recomputed, small vocabulary": (make_text("llama", vocab_size=500), 4, 512, "sdpa", {"recompute": "full"}),
    "llama frozen below": (make_text("llama"), 2, 512, "sdpa", {"freeze": ["model.embed_tokens", "model.layers.0"]}),
    "qwen2": (QWEN2, 2, 512, "sdpa", {}),
    "qwen3": (make_text("qwen3"), 2, 512, "sdpa", {}),
    "gemma2": (make_text("gemma2", **TIED), 2, 512, "eager", {}),
    "llama with adapters": (make_text("llama"), 2, 512, "sdpa", {"lora": {"r": 8, "targets": ["q_proj", "v_proj"]}}),
}


@pytest.mark.parametrize("name", thin(CASES, 3))
def test_training_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak within 1 % of what is alive; two states per trained parameter are added to both."""
    config, batch, seq, attention, recipe = CASES[name]
    with one_kernel(monkeypatch):
        model = apply_recipe(build_model(config, attention, None, "meta", torch.bfloat16), recipe)
        model.train()
        inputs = make_batch(model.config, {"batch": batch, "seq": seq})
        labels = inputs["input_ids"].clone()
        states = sum(2 * p.nbytes for p in model.parameters() if p.requires_grad)
        with floats_on_meta():
            live = Live()
            for tensor in (*model.parameters(), *inputs.values(), labels):
                live.add(tensor)
            with live:
                model(**inputs, labels=labels, use_cache=False).loss.backward()
    found = predict_memory(bind(config, recipe=recipe or None), make_workload(batch, seq), attention=attention)
    assert found.peak - found.workspace == pytest.approx(live.most + states, rel=0.01)


def make_experts(model_type: str, width: int, chosen: int, **changes: Any) -> dict[str, Any]:
    names = {
        "intermediate_size": width, "moe_intermediate_size": width, "num_local_experts": 16, "num_experts": 16,
        "num_experts_per_tok": chosen, "sliding_window": None,
    }  # fmt: skip
    return make_text(model_type, **{**names, **changes})


LATENT = {
    "num_key_value_heads": 12, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "first_k_dense_replace": 1, "n_routed_experts": 16, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "head_dim": 32,
}  # fmt: skip
VISION = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        **make_text("qwen2_5_vl_text", head_dim=64),
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    },
    "vision_config": {
        "depth": 2, "hidden_size": 640, "intermediate_size": 1280, "num_heads": 8, "window_size": 112,
        "fullatt_block_indexes": [1], "out_hidden_size": 768,
    },
    "image_token_id": 19_997, "video_token_id": 19_998, "vision_start_token_id": 19_995, "vision_end_token_id": 19_996,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FORWARD: dict[str, tuple[dict[str, Any], list[list[int]], float]] = {
    "llama": (make_text("llama"), [], 0.02),
    "mixtral, wide experts": (make_experts("mixtral", 2560, 2), [], 0.02),
    "mixtral, narrow experts": (make_experts("mixtral", 256, 6), [], 0.02),  # weighed in float32
    "qwen3_moe, wide experts": (make_experts("qwen3_moe", 1024, 8), [], 0.02),
    "qwen3_moe, narrow experts": (make_experts("qwen3_moe", 256, 8), [], 0.02),  # weighed in bf16
    "olmoe": (make_experts("olmoe", 256, 8, head_dim=64, eos_token_id=0), [], 0.02),
    "deepseek_v3": (make_experts("deepseek_v3", 256, 8, **LATENT), [], 0.02),
    "cohere": (make_text("cohere", head_dim=64), [], 0.02),
    "cohere, wide heads": (make_text("cohere", head_dim=64, intermediate_size=768), [], 0.05),  # rotated in float32
    "gemma3 with a window": (make_text("gemma3_text", sliding_window=256, **TIED), [], 0.02),
    "qwen2_5_vl with small images": (VISION, [[1, 16, 24]], 0.02),
    "qwen2_5_vl with large images": (VISION, [[1, 36, 52]], 0.05),  # the tower is widest
}


@pytest.mark.parametrize("name", FORWARD)
def test_prefill(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is alive beside the weights, within 2 %; of a tower 5 %."""
    config, grids, error = FORWARD[name]
    experts = "grouped_mm" if "num_experts_per_tok" in config else None
    with one_kernel(monkeypatch):
        model = build_model(config, "sdpa", experts, "meta", torch.bfloat16).eval()
        made = make_batch(model.config, {"batch": 2, "seq": 1024, "images": grids}, "meta" if grids else "cpu")
        inputs = {key: each.bfloat16() if each.is_floating_point() else each for key, each in made.items()}
        with floats_on_meta():
            live = Live()
            for tensor in (*model.parameters(), *inputs.values()):
                live.add(tensor)
            with live, torch.no_grad():
                model(**inputs, use_cache=True, logits_to_keep=1)
    load = make_workload(2, 1024, phase="prefill", image_grid_thw=2 * grids or None)
    found = predict_memory(bind(config), load)
    alive = live.most - sum(parameter.nbytes for parameter in model.parameters())
    assert found.peak - found.workspace - found.weights == pytest.approx(alive, rel=error)
