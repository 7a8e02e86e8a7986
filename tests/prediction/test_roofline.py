"""Floors of a step: bytes counted by hand, and the seconds that a device's published limits make of them."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import bind, estimate_flops, predict
from flopcalc.base.vocabulary import OPTIMIZERS, Execution, Optimizer
from flopcalc.hardware.devices import Device, find_device
from flopcalc.prediction.build_work import count_step_bytes
from flopcalc.prediction.roofline import Floors, describe_execution, find_floors, format_intensity

D, FF, HEADS, KV, HD, VOCAB, LAYERS = 64, 96, 4, 2, 16, 128, 3
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": D, "intermediate_size": FF, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HD, "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}  # fmt: skip
LAYER = D * HEADS * HD * 2 + 2 * D * KV * HD + 3 * D * FF  # weights of products in one layer
WEIGHTS = LAYERS * LAYER + D * VOCAB
ALL = WEIGHTS + VOCAB * D + (2 * LAYERS + 1) * D  # and the table of words, and norms
H200 = find_device("h200")


def find(config: Any, recipe: dict[str, Any] | None = None, optimizer: Optimizer = "adamw", **sizes: Any) -> Floors:
    return find_floors(bind(config, recipe=recipe)(**sizes), H200, "bf16", 2, optimizer)


CACHE = LAYERS * 2 * KV * HD  # keys and values that one position leaves
EXPERTS = {
    "model_type": "mixtral",
    **{key: value for key, value in LLAMA.items() if key != "model_type"},
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
SPARSE = LAYERS * (LAYER - 3 * D * FF + 8 * D + 2 * 3 * D * FF) + D * VOCAB  # two experts of eight, and the router


@pytest.mark.parametrize(
    ("config", "arguments", "numbers"),
    [
        (LLAMA, {"seq_len": 8, "phase": "prefill"}, WEIGHTS),
        (LLAMA, {"seq_len": 8, "batch_size": 5, "phase": "forward"}, WEIGHTS),
        ({**LLAMA, "tie_word_embeddings": True}, {"seq_len": 8, "phase": "prefill"}, WEIGHTS),
        # Decoding: one token after 9 others reads 10 positions of every sample's cache.
        (LLAMA, {"phase": "decode", "context": 9, "batch_size": 4}, WEIGHTS + 4 * 10 * CACHE),
        (LLAMA, {"phase": "decode", "context": 9, "seq_len": 3}, 3 * WEIGHTS + (10 + 11 + 12) * CACHE),
        (EXPERTS, {"phase": "decode"}, SPARSE + CACHE),
        # Training: weights in both passes; only the first product's inputs (layer 0's norm trains) need no less.
        (LLAMA, {"seq_len": 8}, 2 * WEIGHTS + 8 * ALL),
    ],
)
def test_bytes(config: Any, arguments: dict[str, Any], numbers: int) -> None:
    assert find(config, **arguments).bytes == 2 * numbers


# Bytes per bf16 parameter: weight and gradient are read, the weight is written, and so are states.
STEP_BYTES = {
    "adamw": 8 + 6, "adamw-foreach": 8 + 6, "adamw-master": 16 + 14, "adamw-32bit": 12 + 10, "adamw-8bit": 6 + 4,
    "adamw-fp8": 6 + 4, "adamw-offload": 0, "lion": 6 + 4, "sgd": 4 + 2, "sgd-momentum": 6 + 4, "none": 0,
}  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_moves_its_states(optimizer: Optimizer) -> None:
    moved = STEP_BYTES[optimizer]
    assert find(LLAMA, optimizer=optimizer, seq_len=8).bytes == 4 * WEIGHTS + (2 + moved) * ALL
    assert sum(count_step_bytes(optimizer, 2)) == moved


def test_frozen_weights() -> None:
    # The head alone trains: no gradient goes further back, so every weight is read once.
    found = find(LLAMA, {"train_only": "lm_head"}, seq_len=8)
    assert found.bytes == 2 * (WEIGHTS + 8 * D * VOCAB)


def test_micro_batches_read_the_weights_again() -> None:
    one = bind(LLAMA)(1, 8)
    two = find_floors(2 * one, H200, "bf16", 2, "adamw")
    assert two.bytes == 2 * (4 * WEIGHTS + 8 * ALL)
    assert two.flops == 2 * one.total


def test_seconds() -> None:
    found = find("llama-3.1-8b", phase="decode", context=4096)
    assert found.flops == estimate_flops("llama-3.1-8b", phase="decode", context=4096).total
    assert found.compute_s == found.flops / 989.4e12
    assert found.bandwidth_s == found.bytes / 4.8e12
    assert found.tokens_per_s == pytest.approx(1 / found.bandwidth_s)
    shown = found.to_dict()
    assert shown["bound"] == "bandwidth"
    assert shown["flops_per_byte"] == found.flops / found.bytes
    assert shown["ridge_flops_per_byte"] == pytest.approx(989.4e12 / 4.8e12)
    assert find("llama-3.1-8b", seq_len=4096).to_dict()["bound"] == "compute"


def test_a_device_without_a_bandwidth() -> None:
    device: Device = H200.replace(bandwidth_gb_per_s=None)
    found = find_floors(bind(LLAMA)(1, 8), device, "bf16", 2, "adamw")
    assert found.bandwidth_s is None
    assert found.to_dict()["bound"] is None
    assert "bandwidth is not known" in str(found)
    assert found.tokens_per_s == pytest.approx(8 / found.compute_s)


def test_a_prediction_carries_its_floors() -> None:
    found = predict("llama-3.2-1b", device="h200", seq_len=512, batch_size=2)
    assert found.floors is not None
    assert found.to_dict()["floors"] == found.floors.to_dict()
    assert found.step_time_s.low > max(found.floors.compute_s, found.floors.bandwidth_s or 0)
    assert found.floors.compute_s / found.step_time_s.mid == pytest.approx(found.mfu)
    assert describe_execution("eager", "train") in found.notes


@pytest.mark.parametrize(
    ("execution", "phase", "words"),
    [
        ("eager", "train", "this times HF's eager code, one kernel per operator; fused kernels can"),
        ("eager", "decode", "a serving engine with fused kernels and CUDA graphs can"),
        ("compiled", "prefill", "this times HF's code under torch.compile; a serving engine"),
    ],
)
def test_what_runs_is_said(execution: Execution, phase: str, words: str) -> None:
    assert words in describe_execution(execution, phase)


@pytest.mark.parametrize(("value", "text"), [(0.5, "0.5"), (206.14, "206.1"), (999.6, "999.6"), (12_890.4, "12,890")])
def test_an_intensity_is_a_plain_number(value: float, text: str) -> None:
    assert format_intensity(value) == text
