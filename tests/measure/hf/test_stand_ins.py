"""Stand-ins for GPU kernels compute what the kernels do."""

from __future__ import annotations

import pytest
import torch

from flopcalc.measure.hf.kernels import install


@pytest.mark.parametrize("mode", ["full", "sparse"])
def test_all_blocks_chosen_is_plain_attention(mode: str) -> None:
    """MRA approximates attention; with every block at high resolution nothing is left to approximate."""
    from transformers.models.mra import modeling_mra

    install({"transformers.models.mra.modeling_mra.mra_cuda_kernel": "block_sparse"})
    torch.manual_seed(1)
    inputs = [torch.randn(2, 3, 96, 40, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    query, key, value = inputs
    plain = (query @ key.transpose(-1, -2) / 40**0.5).softmax(-1) @ value
    mask = torch.ones(6, 96, dtype=torch.float64)
    ours = modeling_mra.mra2_attention(query, key, value, mask, num_blocks=9, approx_mode=mode)
    assert torch.allclose(ours, plain, atol=1e-5)
    weights = torch.randn_like(plain)
    theirs = torch.autograd.grad((plain * weights).sum(), inputs)
    for found, expected in zip(torch.autograd.grad((ours * weights).sum(), inputs), theirs, strict=True):
        assert torch.allclose(found, expected, atol=1e-4)
