"""What Hopper's kernels execute where sizes fill no tiles: a model for products, experts and attention.

Products: cuBLAS takes one of many tiles. The model takes the one that would end first: tiles come in waves over the
processors, and a tile takes as long as its area or its operands, whichever is more, and a start. Over a layer's rows
tiles come in steps of 8. Fitted on 868 products over rows that fill no tiles (benchmarks/results/blind_pieces.json).

What a weight's gradient pads depends on the layer's widths and hardly on its rows. GRADIENTS has the measured widths.
For others the tiles are those that kernels of profiled steps have in their names (predict_profiles.json.gz).
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
# Of products over a layer's rows: tiles (rows, outputs), the same cost, and that of a tile's start.
_ROW_TILES = tuple((rows, columns) for columns in (64, 128, 192, 256) for rows in range(64, 257, 8)
                   if rows * columns <= 40960)  # fmt: skip
_ROW_OPERANDS, _ROW_START = 80, 3000
# Outputs and inputs of a layer -> elements of its weight's gradient with their padding (blind_pieces.json).
GRADIENTS: dict[tuple[int, int], int] = {
    (768, 2304): 768 * 2464, (896, 896): 896 * 1024, (896, 4864): 960 * 4992, (4864, 896): 960 * 4992,
    (1280, 1280): 1280 * 1536, (1280, 5120): 1536 * 5120, (5120, 1280): 1536 * 5120, (1536, 8960): 1536 * 9024,
    (8960, 1536): 1536 * 9024, (2304, 6912): 2304 * 7040, (2560, 2560): 2560 * 3072, (4096, 14336): 4096 * 14400,
    **{(n, k): n * k for n, k in (
        (256, 1536), (1024, 1024), (1024, 4096), (1536, 1536), (1792, 1792), (1792, 5376), (2304, 2304), (2560, 10240),
        (3072, 3072), (3072, 8192), (3840, 1280), (4096, 1024), (4096, 4096), (5376, 1792), (6912, 2304), (9216, 3072),
        (10240, 2560), (14336, 4096), (16384, 3072),
    )},
}  # fmt: skip
_GROUPED = 256  # rows and columns of a pair of tiles of the grouped product
_FEW, _FEW_ROWS, _FEW_COLUMNS = 128, 64, 128  # up to so many rows an expert, the tiles are smaller
_SPREAD = 0.4  # of rows an expert, over their mean: HF's random routers (benchmarks/results/expert_cases_5.17.json.gz)
_BLOCK = 128  # of attention, in both sides
UNMEASURED_DIMS, NEAR_DIM = (72, 88, 104, 112, 120), 80  # of heads: padded as the measured one between 64 and 128 is
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


@lru_cache(maxsize=4096)
def _count_rows(rows: int, columns: int, depth: int) -> int:
    """Executed FLOPs of (rows, depth) by (depth, columns), where the rows are a layer's own."""

    def spend(tile: tuple[int, int]) -> int:
        a, b = tile
        waves = -(-(-(-rows // a) * -(-columns // b)) // _UNITS)
        return waves * (max(a * b, _ROW_OPERANDS * (a + b)) + _ROW_START)

    a, b = min(_ROW_TILES, key=spend)
    return 2 * pad(rows, a) * pad(columns, b) * pad(depth, _DEPTH)


def _count_gradient(m: int, n: int, k: int) -> int:
    """Executed FLOPs of a weight's gradient."""
    known = GRADIENTS.get((n, k))
    return 2 * known * pad(m, _DEPTH) if known else _count_matrix(n, k, m)


def count_product_excess(m: int, n: int, k: int) -> dict[str, int]:
    """FLOPs beyond need of a layer with n outputs and k inputs over m rows, for each direction.

    Sizes that fill the usual tiles are taken to be padded by nothing: on average they are, by 1 % (table gemm).
    """
    need = 2 * m * n * k
    if not (m % _BLOCK or n % _DEPTH or k % _DEPTH):
        gradient = _count_gradient(m, n, k) - need if (n, k) in GRADIENTS else 0
        return {"forward": 0, "dgrad": 0, "wgrad": gradient}
    return {
        "forward": _count_rows(m, n, k) - need,
        "dgrad": _count_rows(m, k, n) - need,
        "wgrad": _count_gradient(m, n, k) - need,
    }


def count_steps(mean: float, size: int) -> float:
    """Steps of `size` rows that an expert takes on average, where a router deals rows out as unevenly as _SPREAD."""
    if mean > 8 * size:
        return mean / size + 0.5
    spread = math.sqrt(2 * (mean + (_SPREAD * mean) ** 2))
    more = sum(math.erfc((size * i - mean) / spread) / 2 for i in range(1, 2 + int(3 * mean / size)))
    return -math.expm1(-mean) + more


def count_experts_excess(copies: int, m: int, n: int, k: int) -> dict[str, int]:
    """The same of experts in one grouped product, m rows in all, dealt out by a router.

    Rows of an expert are padded to a pair of tiles; for the weight's gradient, where they are the depth, to steps.
    """
    mean, need = m / copies, 2 * m * n * k
    side, columns = (_GROUPED, _GROUPED) if mean > _FEW else (_FEW_ROWS, _FEW_COLUMNS)
    rows = copies * count_steps(mean, side) * side
    deep = copies * count_steps(mean, _DEPTH) * _DEPTH
    forward = round(2 * rows * pad(n, columns) * pad(k, _DEPTH))
    dgrad = round(2 * rows * pad(k, columns) * pad(n, _DEPTH))
    wgrad = round(2 * deep * pad(n, _GROUPED) * pad(k, _GROUPED))
    return {name: max(0, flops - need) for name, flops in (("forward", forward), ("dgrad", dgrad), ("wgrad", wgrad))}


def pad_head(kernel: str, dim: int) -> int:
    """The head dim that a kernel computes with, between 64 and 128."""
    return _BLOCK if kernel == "cudnn" else pad(dim, 32)


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
