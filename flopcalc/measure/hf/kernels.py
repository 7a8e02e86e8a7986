"""Stand-ins for kernels that HF's code calls by name: the same products, written with torch operators.

Kernels from the hub need a GPU; a stand-in lets HF's own code run on a CPU, so that the counter sees the products that
the kernel would execute. Fused attention that no attn_implementation changes becomes eager, which is what is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch


class BlockSparse:
    """kernels-community/mra: products of chosen blocks. `indices` of a block: row of blocks · row's length + column."""

    @staticmethod
    def mm_to_sparse(query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Queries (b, blocks, width, size) with keys: (b, chosen, key in its block, query in its block)."""
        rows, columns = _split(indices, key.shape[1])
        return _pick(key, columns).transpose(-1, -2) @ _pick(query, rows)

    @staticmethod
    def sparse_dense_mm(sparse: torch.Tensor, indices: torch.Tensor, dense: torch.Tensor, count: int) -> torch.Tensor:
        """Chosen blocks with values (b, blocks, width, size), added up per row of blocks."""
        rows, columns = _split(indices, dense.shape[1])
        products = _pick(dense, columns) @ sparse
        out = products.new_zeros(products.shape[0], count, *products.shape[2:])
        return out.index_put((_batch(rows), rows), products, accumulate=True)

    @staticmethod
    @torch.no_grad()
    def index_max(
        values: torch.Tensor, indices: torch.Tensor, count: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest of (b, size, chosen) per row of blocks: for every position, and for every chosen block."""
        size = values.shape[1]
        rows = _split(indices, width)[0][:, None].expand_as(values)
        largest = values.new_full((values.shape[0], size, count), -1e30).scatter_reduce(2, rows, values, "amax")
        return largest.transpose(1, 2).reshape(values.shape[0], count * size), largest.gather(2, rows)


class PlainAttention:
    """torch.nn.functional, of which HF's module uses only this."""

    @staticmethod
    def scaled_dot_product_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(query, key.transpose(-1, -2)) * query.shape[-1] ** -0.5
        return torch.matmul(scores.softmax(-1), value)


def _split(indices: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (indices // width).long(), (indices % width).long()


def _batch(places: torch.Tensor) -> torch.Tensor:
    return torch.arange(places.shape[0])[:, None].expand_as(places)


def _pick(blocks: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return blocks[_batch(places), places]


def _find_neighbours(length: int, kernel: int, dilation: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per position of one side its neighbours, and how far each is from it, in dilations, from 1 - kernel on."""
    places = torch.arange(length)
    phase, index = places % dilation, places // dilation
    count = (length - phase + dilation - 1) // dilation  # positions of the same phase
    start = torch.minimum((index - kernel // 2).clamp(min=0), count - kernel)
    numbers = start[:, None] + torch.arange(kernel)
    return phase[:, None] + dilation * numbers, numbers - index[:, None] + kernel - 1


def _gather(keys: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """(b, heads, h, w, width) as (b, heads, h, w, neighbours, width)."""
    found = keys[:, :, rows[:, None, :, None], columns[None, :, None, :]]
    return found.flatten(4, 5)


def score_neighbours(
    query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor, kernel: int, dilation: int
) -> torch.Tensor:
    """natten's natten2dqkrpb. transformers 5.22 gives (b, w, h, heads, width), natten reads (b, heads, h, w, width)."""
    query, key = (each.permute(0, 3, 2, 1, 4) for each in (query, key))
    (rows, down), (columns, across) = (_find_neighbours(side, kernel, dilation) for side in query.shape[2:4])
    scores = (query[..., None, :] @ _gather(key, rows, columns).transpose(-1, -2)).squeeze(-2)
    return scores + bias[:, down[:, None, :, None], across[None, :, None, :]].flatten(3, 4)


def sum_neighbours(scores: torch.Tensor, value: torch.Tensor, kernel: int, dilation: int) -> torch.Tensor:
    """natten's natten2dav, for values as above: (b, heads, h, w, width)."""
    value = value.permute(0, 3, 2, 1, 4)
    rows, columns = (_find_neighbours(side, kernel, dilation)[0] for side in value.shape[2:4])
    return (scores[..., None, :] @ _gather(value, rows, columns)).squeeze(-2)


def _do_nothing(*args: object) -> None:
    """Asks for no library: its kernels have stand-ins."""


_STAND_INS: dict[str, Any] = {
    "block_sparse": BlockSparse,
    "plain_attention": PlainAttention,
    "neighbour_scores": score_neighbours,
    "neighbour_values": sum_neighbours,
    "nothing": _do_nothing,
}


def install(kernels: Mapping[str, str]) -> None:
    """Put stand-ins where HF's code looks for its kernels (module.name -> stand-in)."""
    for place, name in kernels.items():
        module, _, attribute = place.rpartition(".")
        setattr(import_module(module), attribute, _STAND_INS[name])
