"""Seconds of matrix products: plain ones, those of experts, those of adapters."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

from flopcalc.hardware.tiles import ALIGNED, GROUP_SIDE, ProductSize, choose_tile, find_group_side, pad
from flopcalc.prediction.kernels.defaults import load_defaults

# What time_matrix chooses from, if no table says which tile a product gets: rows and columns of a tile, into how many
# parts k is split, and the least k of a part.
TILES = ((128, 256), (256, 128), (128, 192), (192, 128), (128, 160), (128, 128), (64, 256), (64, 128), (64, 64),
         (256, 64))  # fmt: skip
SPLITS = (1, 2, 4, 8, 16)
TILE_AREAS = (8192, 16384, 32768)  # from which a tile is a quarter of the largest, half of it, or as large
MIN_PART_K = 512


# Products with fewer rows are not in the tables of tiles: guesses make decoding 3 points worse (blind_decode.json).
_THIN = 32
GRADIENT_BYTES = 8  # a weight's gradient is added to a buffer of float32: read and written
# What an adapter's rank is padded to: 48 takes as long as 64 (lora-qwen2-7b in benchmarks/results/blind_steps_5.json).
NARROW_TILE = 32


class ProductShape(NamedTuple):
    """How a matrix product's time depends on its sizes: output tiles in waves over the processors."""

    rate: float  # FLOP/s of full tiles
    lead: float  # what a tile costs beyond its k, in units of k
    start: float  # seconds before the first and after the last tile
    half: float  # rate of tiles of half the largest size, over that of the largest
    quarter: float
    eighth: float
    bandwidth: float  # bytes/s where operands and result rule
    split: float  # seconds more where k is split over several tiles
    units: float  # processors

    @classmethod
    def usual(cls) -> ProductShape:
        """Where a fit starts."""
        return cls(*load_defaults().fit_start.product_shape)

    def find_share(self, area: int) -> float:
        """Rate of tiles of so many elements, over that of the largest."""
        return (self.eighth, self.quarter, self.half, 1.0)[bisect_right(TILE_AREAS, area)]


def time_shape(shape: ProductShape, size: ProductSize, tiles: str = "") -> float:
    """Seconds of one product.

    `tiles` names the table of the tiles that the device's kernels have: executed FLOPs come from the same tile. The
    older kernels of unaligned widths have no entry there; a measured factor says how much longer they take. Nor have
    those of products with few rows, as in decoding.
    """
    rows, columns, depth = size.turn()
    if not tiles or size.find_step() < ALIGNED or min(size[1:4]) < _THIN:
        return time_matrix(shape, columns, rows, depth, 1)
    tile = choose_tile(tiles, size)
    computed = _time_tiles(shape, tile.area, tile.count_tiles(rows, columns), depth, tile.parts)
    return shape.start + max(computed, 2 * (rows * depth + depth * columns + rows * columns) / shape.bandwidth)


def _time_tiles(shape: ProductShape, area: int, tiles: int, depth: int, parts: int) -> float:
    """Seconds of tiles in waves over the processors."""
    waves = -(-tiles * parts // round(shape.units))
    once = waves * area * 2 * (depth / parts + shape.lead) * shape.units / (shape.rate * shape.find_share(area))
    return once + (shape.split if parts > 1 else 0.0)


def time_matrix(shape: ProductShape, m: int, n: int, k: int, copies: int) -> float:
    """(m, k) by (k, n), `copies` of them at once: the best of several tiles, or the bytes."""
    best = min(
        _time_tiles(shape, rows * columns, -(-m // rows) * -(-n // columns) * copies, k, parts)
        for rows, columns in TILES
        for parts in SPLITS
        if parts == 1 or k >= MIN_PART_K * parts
    )
    moved = 2 * (m * k + k * n + m * n) * copies
    return shape.start + max(best, moved / shape.bandwidth)


class GroupShape(NamedTuple):
    """How the time of experts' products in one call depends on their sizes: the tiles of all over the processors."""

    rate: float  # FLOP/s of full tiles
    lead: float  # what a tile costs beyond its k, in units of k
    bandwidth: float  # bytes/s where operands and result rule
    small: float  # rate of the tiles that experts with few rows get, over that of the others
    turn: float  # seconds of a processor that turns to another expert
    start: float

    @classmethod
    def usual(cls) -> GroupShape:
        """Where a fit starts."""
        return cls(*load_defaults().fit_start.group_shape)

    def scale(self, compute: float, memory: float) -> GroupShape:
        """The same on a device that computes and reads faster by these factors."""
        return self._replace(rate=self.rate * compute, bandwidth=self.bandwidth * memory, turn=self.turn / compute)


def time_grouped(shape: GroupShape, units: float, size: ProductSize) -> float:
    """Products of experts in one call, as a router deals their rows out.

    torch's kernel has two tiles, always in pairs: 128 x 256; with up to 128 rows an expert, 64 x 128.
    """
    direction, m, n, k, copies, routing = size
    mean = m / copies

    def compute(columns: float, side: int, share: float, depth: float, rows: float) -> float:
        pairs = rows * -(-columns // side)
        waves = max(1.0, copies * 2 * pairs / units)
        turns = copies * min(1.0, 2 * pairs / units)  # an expert with fewer tiles than processors reaches some of them
        return waves * side * side * (depth + shape.lead) * units / (shape.rate * share) + turns * shape.turn

    if direction == "wgrad":
        moved = 2.0 * (m * n + m * k + copies * n * k)
        # Rows come in steps of 64, of which half of one is empty.
        computed = compute(k, GROUP_SIDE, 1.0, mean + 32, -(-n // GROUP_SIDE))
    else:
        columns, depth = (k, n) if direction == "dgrad" else (n, k)
        moved = 2.0 * (m * n + m * k + routing.count_busy(copies, m) * n * k)
        computed = compute(columns, GROUP_SIDE, 1.0, depth, routing.count_steps(copies, m, GROUP_SIDE) / copies)
        side = find_group_side(m // copies)
        if side != GROUP_SIDE:  # never longer than the larger tile would take
            steps = routing.count_steps(copies, m, side) / copies
            computed = min(computed, compute(columns, side, shape.small, depth, steps))
    return shape.start + max(computed, moved / shape.bandwidth)


def time_experts(shape: ProductShape, bandwidth: float, weight_bytes: float, size: ProductSize) -> tuple[float, float]:
    """Products of experts: seconds of their tiles, and of their weights' bytes.

    This is how training frameworks run them: one cuBLAS call for each on several streams, the tiles of all experts at
    the rate of plain products, then the bytes of their weights.
    """
    direction, m, n, k, copies, routing = size
    columns, rows, depth = size._replace(m=max(1, round(m / copies))).turn()
    computed = math.inf
    for high, wide in TILES:  # calls of several streams fill each other's waves
        is_deep = direction == "wgrad"  # then rows are the depth
        filled = copies * -(-rows // high) if is_deep else routing.count_steps(copies, max(copies, m), high)
        tiles = filled * -(-columns // wide)
        each = high * wide * 2 * (depth + shape.lead) / shape.find_share(high * wide)
        computed = min(computed, max(1.0, tiles / shape.units) * each * shape.units / shape.rate)
    moved = (GRADIENT_BYTES if direction == "wgrad" else weight_bytes) * copies * n * k
    return computed, moved / bandwidth


def turn_narrow(size: ProductSize) -> tuple[str, tuple[int, int, int]]:
    """The form of an adapter's product, and its rows, depth and columns: its rank is the depth, or one of the sides."""
    columns, rows, depth = size.turn()
    sizes = (rows, depth, columns)
    return ("grad", "up", "down")[sizes.index(min(sizes))], sizes


def measure_narrow(form: str, rows: int, depth: int, columns: int) -> tuple[int, int]:
    """Bytes of an adapter's product in fp32, and its FLOPs: a rank that is a side of what comes out fills a tile."""
    rank = min(rows, depth, columns)
    filled = rank if form == "up" else pad(rank, NARROW_TILE)
    return 4 * (rows * depth + depth * columns + rows * columns), 2 * rows * depth * columns // rank * filled
