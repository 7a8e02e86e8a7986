"""GGUF's weights: llama.cpp's mixes by name, and the tensors that a file lists."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from headers import HEADER, write_gguf

from flopcalc import estimate_flops
from flopcalc.base.errors import RecipeError

# Bits a weight of Llama 3.1 8B, from llama.cpp's tools/quantize/README.md at b21e4de.
BITS = {
    "q3_k_s": 3.6429, "q3_k_m": 3.9960, "q3_k_l": 4.2979, "q4_k_s": 4.6672, "q4_k_m": 4.8944, "q5_k_s": 5.5704,
    "q5_k_m": 5.7036, "q2_k.gguf": 3.1593, "q6_k.gguf": 6.5633, "q8_0.gguf": 8.5008,
}  # fmt: skip


def count_bytes(model: str, weights: str | None = None) -> int:
    found = estimate_flops(model, seq_len=8, phase="forward", weights=weights)
    return sum(held.total_bytes for held in found.weights)


@pytest.mark.parametrize("mix", BITS)
def test_a_mix_takes_the_bits_that_llama_cpp_reports(mix: str) -> None:
    assert round(8 * count_bytes("llama-3.1-8b", mix) / 8_030_261_248, 4) == BITS[mix]


SHARES = [
    # A table that is the head too is stored as a head; rows of 896 are no multiple of 256.
    ("qwen2.5-0.5b", "q4_k_m", {"q5_0": 251_854_848, "q8_0": 137_510_912, "q6_k": 52_297_728, "q4_k": 52_297_728}),
    # 80 layers whose heads share keys: values that are not Q6_K are Q5_K.
    ("llama-3.1-70b", "q4_k_m", {"q5_k": 40 * 1024 * 8192}),
    # Eight experts: keys and values in Q8_0, outputs of attention in Q5_K.
    ("mixtral-8x7b", "q4_k_m", {"q8_0": 32 * 2 * 1024 * 4096, "q5_k": 32 * 4096 * 4096}),
    ("mixtral-8x7b", "q5_k_m", {"q8_0": 32 * 2 * 1024 * 4096}),
    # A gate of one output is a vector, and routers stay in float32.
    ("qwen1.5-moe-a2.7b", "q5_k_s", {"fp32": 24 * (2048 * (60 + 1) + 2 * 2048 + 3 * 2048) + 2048}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "mix", "expected"), SHARES, ids=[f"{model} {mix}" for model, mix, _ in SHARES])
def test_what_a_mix_stores_in_which_format(model: str, mix: str, expected: dict[str, int]) -> None:
    found = {held.format: held.parameters for held in estimate_flops(model, seq_len=8, weights=mix).weights}
    assert {name: found[name] for name in expected} == expected


def test_a_mix_of_other_models_is_refused() -> None:
    with pytest.raises(
        RecipeError, match=r"weights q4_k_m: which tensors of 'mamba' llama.cpp stores how is not known"
    ):
        estimate_flops("mamba-130m", seq_len=8, weights="q4_k_m")


TYPES = {0: (1, 4), 12: (256, 144), 14: (256, 210)}  # a type's block: how many numbers, and bytes


def test_a_file_is_counted_tensor_by_tensor(tmp_path: Path) -> None:
    """Q6_K in the second layer's values and in the head, Q4_K elsewhere, vectors in float32: as its tensors take."""
    header = {**HEADER, "llama.embedding_length": 256, "llama.feed_forward_length": 512}
    header |= {"llama.attention.key_length": 64}
    sizes = {
        "attn_q": (256, 256), "attn_k": (256, 128), "attn_v": (256, 128), "attn_output": (256, 256),
        "ffn_gate": (256, 512), "ffn_up": (256, 512), "ffn_down": (512, 256), "attn_norm": (256,), "ffn_norm": (256,),
    }  # fmt: skip
    tensors = {
        f"blk.{layer}.{name}.weight": (shape, 0 if len(shape) == 1 else 14 if name == "attn_v" and layer else 12)
        for layer in range(2)
        for name, shape in sizes.items()
    }
    tensors |= {
        "token_embd.weight": ((256, 100), 12),
        "output.weight": ((256, 100), 14),
        "output_norm.weight": ((256,), 0),
    }
    path = tmp_path / "model.gguf"
    write_gguf(path, header, tensors)
    expected = sum(math.prod(shape) // TYPES[kind][0] * TYPES[kind][1] for shape, kind in tensors.values())
    assert count_bytes(str(path)) == expected
    note = next(note for note in estimate_flops(str(path), seq_len=8).notes if "GGUF" in note)
    assert "weights are Q4_K, Q6_K, every tensor counted in its own; " in note
    tensors["blk.0.other.weight"] = ((256, 256), 14)
    write_gguf(path, header, tensors)
    assert any("counted as Q4_K: other in Q6_K;" in note for note in estimate_flops(str(path), seq_len=8).notes)
