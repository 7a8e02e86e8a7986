"""Stand-ins for GPU kernels compute what the kernels do."""

from __future__ import annotations

import pytest
import torch

from flopcalc.measure.hf.kernels import install, score_neighbours, sum_neighbours


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


@pytest.mark.parametrize("dilation", [1, 2])
def test_neighbours_of_a_small_image_are_all_pixels(dilation: int) -> None:
    """A kernel as wide as the image: plain attention, with a bias by distance; dilated, among pixels of one phase."""
    torch.manual_seed(1)
    side = 3 * dilation
    query, key, value = (torch.randn(2, side, side, 4, 5, dtype=torch.float64) for _ in range(3))  # b, w, h, heads
    bias = torch.randn(4, 5, 5, dtype=torch.float64)
    scores = score_neighbours(query, key, bias, 3, dilation)
    found = sum_neighbours(scores, value, 3, dilation)
    assert found.shape == (2, 4, side, side, 5)
    for y in range(side):
        for x in range(side):
            rows, columns = (range(phase % dilation, side, dilation) for phase in (y, x))
            pairs = [(row, column) for row in rows for column in columns]
            expected = torch.stack(
                [
                    (query[:, x, y] * key[:, column, row]).sum(-1)
                    + bias[:, (row - y) // dilation + 2, (column - x) // dilation + 2]
                    for row, column in pairs
                ],
                -1,
            )
            assert torch.allclose(scores[:, :, y, x], expected)
            sums = sum(expected[..., [n]] * value[:, column, row] for n, (row, column) in enumerate(pairs))
            assert torch.allclose(found[:, :, y, x], sums)
