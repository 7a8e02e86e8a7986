"""What Hopper's kernels execute where sizes fill no tiles: a model for products, experts and attention.

Products: cuBLAS takes one of many tiles. The model takes the one that would end first: tiles come in waves over the
processors, and a tile takes as long as its area or its operands, whichever is more. Tiles are those that kernels of
profiled steps have in their names (benchmarks/results/predict_profiles.json.gz). Checked against the tables gemm and
padding: 105 products over rows that fill no tiles are 0.4 % too low on average, each 2.9 % off; 4.7 % without a model.
"""

from __future__ import annotations

import math
from functools import lru_cache

MODELLED = ("h100", "h200", "h800", "gh200")  # ids of devices with these kernels begin so
_TILES = (
    (256, 128), (128, 256), (192, 192), (192, 128), (128, 192), (128, 128), (128, 160), (160, 128), (320, 128),
    (128, 320), (64, 256), (256, 64), (64, 128), (128, 64), (64, 64), (96, 128), (128, 96), (112, 128), (128, 112),
    (144, 128), (128, 144), (256, 72), (72, 256), (64, 80), (80, 64), (64, 48), (48, 64), (256, 144), (144, 256),
    (64, 16), (16, 64),
)  # fmt: skip
_DEPTH = 64  # k comes in steps
_UNITS = 132  # processors
_OPERANDS = 100  # what reading one row or column of a tile costs, in elements of its area
_GROUPED = 256  # rows and columns of a pair of tiles of the grouped product; half with few rows an expert
_FEW = 128  # rows an expert
_BLOCK = 128  # of attention, in both sides
_STEP = 64  # what queries come in on the way back


def pad(size: int, step: int) -> int:
    """The next multiple."""
    return -(-size // step) * step


@lru_cache(maxsize=4096)
def _count_matrix(rows: int, columns: int, depth: int) -> int:
    """Executed FLOPs of (rows, depth) by (depth, columns)."""
    tiles = [(-(-(-(-rows // a) * -(-columns // b)) // _UNITS) * max(a * b, _OPERANDS * (a + b)), a, b)
             for a, b in _TILES]  # fmt: skip
    _, a, b = min(tiles, key=lambda tile: tile[0])
    return 2 * pad(rows, a) * pad(columns, b) * pad(depth, _DEPTH)


def count_product_excess(m: int, n: int, k: int) -> dict[str, int]:
    """FLOPs beyond need of a layer with n outputs and k inputs over m rows, for each direction.

    Sizes that fill the usual tiles are taken to be padded by nothing: on average they are, by 1 % (table gemm).
    """
    need = 2 * m * n * k
    if not (m % _BLOCK or n % _DEPTH or k % _DEPTH):
        return dict.fromkeys(("forward", "dgrad", "wgrad"), 0)
    sides = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}
    return {direction: _count_matrix(*sizes) - need for direction, sizes in sides.items()}


def count_steps(mean: float, size: int) -> float:
    """Steps of `size` rows that an expert takes on average, its own rows being near the mean of all."""
    if mean > 8 * size:
        return mean / size + 0.5
    spread = math.sqrt(2 * (mean + (0.1 * mean) ** 2))
    more = sum(math.erfc((size * i - mean) / spread) / 2 for i in range(1, 2 + int(2 * mean / size)))
    return -math.expm1(-mean) + more


def count_experts_excess(copies: int, m: int, n: int, k: int) -> dict[str, int]:
    """The same of experts in one grouped product, m rows in all, dealt out by a router that prefers none.

    Rows of an expert are padded to a pair of tiles; for the weight's gradient, where they are the depth, to steps.
    """
    mean, need = m / copies, 2 * m * n * k
    side = _GROUPED if mean > _FEW else _GROUPED // 2
    rows = copies * count_steps(mean, side) * side
    deep = copies * count_steps(mean, _DEPTH) * _DEPTH
    forward = round(2 * rows * pad(n, side) * pad(k, _DEPTH))
    dgrad = round(2 * rows * pad(k, side) * pad(n, _DEPTH))
    wgrad = round(2 * deep * pad(n, _GROUPED) * pad(k, _GROUPED))
    return {name: max(0, flops - need) for name, flops in (("forward", forward), ("dgrad", dgrad), ("wgrad", wgrad))}


def count_attention_pairs(kernel: str, direction: str, mask: str, length: int, dim: int) -> int | None:
    """Pairs that a fused kernel executes for one head of one sequence; None where no rule is known.

    Forward a processor holds 128 queries and goes over keys; on the way back it holds 128 keys and goes over queries,
    in steps of 64. Exact for every counted call of the tables attention and padding of cuDNN and flash.
    """
    if kernel not in ("cudnn", "flash") or mask not in ("causal", "full"):
        return None
    held, blocks = pad(length, _BLOCK), -(-length // _BLOCK)
    is_wide = kernel == "flash" and dim <= _STEP  # flash's blocks are square at head dim 64
    step = _STEP if not is_wide and (direction == "backward" or kernel == "flash") else _BLOCK
    passed = pad(length, step)
    if mask == "full":
        return held * passed
    if direction == "forward":
        return sum(_BLOCK * min(passed, _BLOCK * (i + 1)) for i in range(blocks))
    return sum(_BLOCK * (passed - _BLOCK * i) for i in range(blocks))
