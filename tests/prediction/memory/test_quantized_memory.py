"""Memory of quantized models: weights with scales, adapters beside them, caches in their own format."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import bind, predict
from flopcalc.core.workload.workload import make_workload
from flopcalc.prediction.memory.peak import predict_memory

# Linears of Llama-3.1-8B: 32 layers of q and o, k and v, gate, up and down.
OUT_IN = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
LINEAR = 32 * sum(n_out * n_in for n_out, n_in in OUT_IN)
REST = 2 * 128256 * 4096 + 65 * 4096  # embedding, head, norms
OUTPUTS = 32 * sum(n_out for n_out, _ in OUT_IN)
WEIGHTS = 32 * 7


def find_weights(**options: Any) -> int:
    load = make_workload(1, 16, phase="prefill")
    return predict_memory(bind("llama-3.1-8b", **options), load, execution="fused").weights


@pytest.mark.parametrize(
    ("options", "bytes_"),
    [
        ({}, 2 * (LINEAR + REST)),
        ({"dtype": "fp32"}, 4 * (LINEAR + REST)),
        ({"weights": "int4"}, LINEAR // 2 + LINEAR // 128 * 5 // 2 + 2 * REST),  # AWQ: about 5.3 GiB
        ({"weights": "int4-g32"}, LINEAR // 2 + LINEAR // 32 * 5 // 2 + 2 * REST),
        ({"weights": "nf4"}, LINEAR // 2 + LINEAR // 64 * 4 + 64 * WEIGHTS + 2 * REST),
        ({"weights": "nf4-double"}, LINEAR // 2 + LINEAR // 64 + LINEAR // 64 // 256 * 4 + 68 * WEIGHTS + 2 * REST),
        ({"weights": "fp8"}, LINEAR + 4 * WEIGHTS + 2 * REST),
        ({"weights": "fp8-block"}, LINEAR + LINEAR // 128**2 * 4 + 2 * REST),
        ({"weights": "mxfp4"}, LINEAR // 2 + LINEAR // 32 + 2 * REST),
        ({"weights": "nvfp4"}, LINEAR // 2 + LINEAR // 16 + 4 * WEIGHTS + 2 * REST),
        ({"weights": "int8"}, LINEAR + 2 * OUTPUTS + 2 * REST),
        ({"weights": "mxfp8"}, LINEAR + LINEAR // 32 + 2 * REST),
    ],
)
def test_weights_from_the_definitions(options: dict[str, Any], bytes_: int) -> None:
    assert find_weights(**options) == bytes_


def test_sizes_that_people_quote() -> None:
    assert round(find_weights() / 2**30, 1) == 15.0
    assert round(find_weights(weights="int4") / 2**30, 1) == 5.3


TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = {
    **TINY,
    "model_type": "gemma3_text",
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
LATENT = {
    **TINY, "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@pytest.mark.parametrize("config", [TINY, GEMMA, LATENT], ids=["full", "window", "latent"])
@pytest.mark.parametrize(
    ("name", "bits"), [("fp8", 8), ("int4", 4 + 20 / 128), ("fp32", 32), ("nvfp4", 4.5), (None, 16)]
)
def test_cache(config: dict[str, Any], name: str | None, bits: float) -> None:
    """The cache of every kind of layer is in its format; nvfp4 has a byte per 16 numbers, int4 20 bits per 128."""
    load = make_workload(2, 1, phase="decode", context=31)
    found = predict_memory(bind(config, kv_cache=name), load).kv_cache
    plain = predict_memory(bind(config), load).kv_cache
    # A scale per tensor is there too, of 4 bytes a layer.
    assert found - plain * bits / 16 in ((0, 2 * 4) if name == "nvfp4" else (0,))


def test_latents_where_kernels_are_fused() -> None:
    """DeepSeek: 16 numbers of the latent and 8 of the rotated key per position and layer."""
    load = make_workload(2, 1, phase="decode", context=31)
    found = predict_memory(bind(LATENT, kv_cache="fp8"), load, execution="fused").kv_cache
    assert found == 2 * 2 * 32 * (16 + 8)


def test_autocast_over_float32_weights() -> None:
    total = 2 * 64_000 + 5 * 64 + 2 * (4096 * 2 + 2 * 2048 + 3 * 8192)
    found = predict_memory(bind(TINY, weights="fp32", autocast=True), make_workload(1, 8))
    assert (found.weights, found.gradients, found.optimizer) == (4 * total, 4 * total, 8 * total)


def test_adapters_beside_four_bits() -> None:
    """QLoRA: the base in nf4, adapters, their gradients and states in float32, one weight at a time in bf16."""
    estimator = bind(TINY, weights="nf4-double", lora="r=4,targets=all-linear")
    found = predict_memory(estimator, make_workload(1, 8))
    sizes = [(64, 64)] * 2 + [(32, 64)] * 2 + [(128, 64)] * 2 + [(64, 128)]
    adapters = 2 * sum(4 * (n_out + n_in) for n_out, n_in in sizes)
    base = 2 * sum(
        n_out * n_in // 2 + n_out * n_in // 64 + 4 * -(-n_out * n_in // 64 // 256) + 68 for n_out, n_in in sizes
    )
    assert found.weights == base + 2 * (2 * 64_000 + 5 * 64) + 4 * adapters
    assert (found.gradients, found.optimizer) == (4 * adapters, 8 * adapters)
    assert found.workspace == (64 << 20) + 2 * 64 * 128
    half = predict_memory(bind(TINY, lora="r=4,targets=all-linear,dtype=bf16"), make_workload(1, 8))
    assert (half.gradients, half.optimizer) == (2 * adapters, 4 * adapters)


def test_a_prediction_says_what_it_does_not_know() -> None:
    found = predict(
        "llama-3.2-1b", device="h200", seq_len=128, weights="int4", lora="r=4,targets=q_proj", optimizer="adamw-offload"
    )
    assert [
        note
        for note in found.notes
        if note.startswith("quantized weights:") and "no kernel for them was measured" in note
    ]
    assert [note for note in found.notes if "is not checked" in note]
    assert found.memory is not None
    assert found.memory.optimizer == 0
    slow, fast = (
        predict("llama-3.2-1b", device="h200", batch_size=8, seq_len=1024, lora="r=16,targets=all-linear", **options)
        for options in ({}, {"autocast": True})
    )
    assert slow.device_s > fast.device_s  # adapters in float32 run on CUDA cores
