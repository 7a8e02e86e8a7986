"""Phi-3-small: pairs of its block-sparse layers, against the mask written out token by token."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import estimate_flops

CONFIG: dict[str, Any] = {
    "model_type": "phi3small",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "ff_intermediate_size": 40,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "blocksparse_block_size": 16,
    "blocksparse_triton_kernel_block_size": 16,
    "blocksparse_num_local_blocks": 2,
    "blocksparse_vert_stride": 3,
    "dense_attention_every_n_layers": 2,
}


def count_pairs(config: dict[str, Any], queries: range) -> int:
    """Pairs that a sparse layer's mask leaves, over all heads."""
    block, local = config["blocksparse_block_size"], config["blocksparse_num_local_blocks"]
    stride, heads = config["blocksparse_vert_stride"], config["num_attention_heads"]
    step = 0 if config.get("blocksparse_homo_head_pattern") else max(1, stride // heads)
    return sum(
        query // block - key // block < local or (key // block + head * step + 1) % stride == 0
        for head in range(heads)
        for query in queries
        for key in range(query + 1)
    )


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"blocksparse_homo_head_pattern": True},
        {"blocksparse_num_local_blocks": 1, "blocksparse_vert_stride": 9},
        {"blocksparse_num_local_blocks": 4, "blocksparse_vert_stride": 1},
    ],
)
@pytest.mark.parametrize(
    ("workload", "queries"),
    [
        ({"seq_len": 150, "phase": "forward"}, range(150)),
        ({"seq_len": 16, "phase": "forward"}, range(16)),
        ({"seq_len": 5, "phase": "decode", "context": 140}, range(140, 145)),
    ],
)
def test_model_counts_unmasked_pairs(changed: dict[str, Any], workload: dict[str, Any], queries: range) -> None:
    config = {**CONFIG, **changed}
    dense = 4 * sum(query + 1 for query in queries)
    pairs = count_pairs(config, queries) + dense
    scores = estimate_flops(config, **workload).by_component()["attention_scores"].forward
    assert scores == 4 * 64 * pairs


def test_training_pads_under_full() -> None:
    """With gradients on, the published code pads to a multiple of 64 tokens; the head reads none of the padding."""
    short, whole = (
        estimate_flops(CONFIG, seq_len=seq, phase="train", convention="full").by_component() for seq in (65, 128)
    )
    assert short["attention_scores"] == whole["attention_scores"]
    assert short["mlp"] == whole["mlp"]
    assert 128 * short["lm_head"].forward == 65 * whole["lm_head"].forward
