"""What Hopper's kernels execute where sizes fill no tiles: a model for products and experts.

Products: a kernel computes whole clusters of tiles, and depth in steps of 64; that is exact (125 products counted by
the GPU, benchmarks/results/tile_choices.json.gz). Which tile and which cluster cuBLAS takes, and whether it splits the
depth, is guessed: what would end first, by constants fitted on 17,000 layers (model_specs/tiles, made by
benchmarks/tile_choices.py). Batches of a multiple of 32, 64 or 128 rows get other kernels and have constants of their
own. What a weight's gradient pads depends on its widths and little on the rows: GRADIENTS has those that were measured.

Experts: a grouped product has two kinds of tiles, by the rows that an expert has on average; exact for 150 products.
"""

from __future__ import annotations

import math
import os
from functools import cache, lru_cache
from typing import Annotated, NamedTuple, TypedDict, get_args

from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import SpecError
from flopcalc.base.files import MAX_JSON_BYTES, read_json
from flopcalc.base.validate import FromZero, Keys, Positive, Rule, find_fault
from flopcalc.base.vocabulary import ProductDirection
from flopcalc.hardware.routing import EVEN, Routing

MODELLED = ("h100", "h200", "h800", "gh200")  # ids of devices with these kernels begin so
TABLES = ("hopper",)  # files of model_specs/tiles
DIRECTIONS: tuple[ProductDirection, ...] = get_args(ProductDirection)
ROUND_ROWS = (32, 64, 128)  # batches of a multiple of these rows, and of no larger one of them, get other kernels
_ROUND = tuple(f"{direction}-{rows}" for direction in ("forward", "dgrad") for rows in ROUND_ROWS)
SPLIT_PARTS = (2, 3, 4, 5, 6, 8, 11, 16)  # that a product's depth may be split into
_DEPTH = 64  # k comes in steps
_UNITS = 132  # processors
ALIGNED = 8  # widths that are no multiple run older kernels, with tiles and steps of their own
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
GROUP_SIDE = 256  # rows and columns of the grouped product's tiles
_FEW, _FEW_TILE = 128, 128  # up to so many rows an expert, the tiles are smaller
_Size = Annotated[int, Rule(lambda size: size >= 1, "is no size")]
_TileRow = tuple[_Size, _Size, _Size, _Size, Positive, Positive, float, FromZero, FromZero]


class TileFits(TypedDict):
    """One direction as its file has it: fields of Choices, and the tiles."""

    start: FromZero
    split: tuple[FromZero, FromZero]
    tiles: list[_TileRow]
    splits: list[_TileRow]


class Tile(NamedTuple):
    """A tile of a cluster of tiles, and what cuBLAS seems to think that a wave of them costs."""

    rows: int
    columns: int
    cluster_rows: int
    cluster_columns: int
    at_once: int  # clusters
    pace: float  # for each step of depth
    end: float
    slope: float  # how the cost bends with the depth
    smooth: float  # share of a wave that is not full and yet not paid
    loose: float  # share of the waves that is counted in tiles, not in clusters


class Choices(NamedTuple):
    """The tiles of one direction, those that split the depth, and what a product costs before its first wave."""

    tiles: tuple[Tile, ...]
    splits: tuple[Tile, ...]
    start: float
    split_start: float  # more, where the depth is split
    split_part: float  # and for each part

    def choose(self, rows: int, columns: int, steps: int) -> tuple[Tile, int]:
        """The tile that would end first, and into how many parts it splits the depth."""
        best, least = (self.tiles[0], 1), math.inf
        for parts in (1, *SPLIT_PARTS):
            deep = -(-steps // parts)
            bend = math.log(deep)
            start = self.start + (self.split_start + parts * self.split_part if parts > 1 else 0.0)
            for tile in self.tiles if parts == 1 else self.splits:
                high, wide, all_high, all_wide, at_once, pace, end, slope, smooth, loose = tile
                clusters = parts * -(-rows // all_high) * -(-columns // all_wide) / at_once
                single = parts * -(-rows // high) * -(-columns // wide) / _UNITS
                whole = math.ceil(clusters) * (1 - loose) + math.ceil(single) * loose
                part = clusters * (1 - loose) + single * loose
                turns = whole * (1 - smooth) + part * smooth
                cost = (turns * (pace * deep + end) + start) * math.exp(slope * bend)
                if cost < least or (cost == least and (tile, parts) < best):
                    best, least = (tile, parts), cost
        return best


@cache
def load_choices(kind: str) -> dict[str, Choices]:
    """Direction, with -64 for batches of a multiple of 64 rows -> the tiles that cuBLAS takes on GPUs of a kind."""
    path = os.path.join(find_data_dir(), "tiles", f"{kind}.json")
    data = read_json(path, MAX_JSON_BYTES, SpecError)
    names = (*DIRECTIONS, *_ROUND)
    fits = {name: part for name, part in data.items() if name != "provenance"} if isinstance(data, dict) else data
    if fault := find_fault(fits, Annotated[dict[str, TileFits], Keys(names)]):
        raise SpecError(f"{path}: {fault.lstrip('.: ')}; benchmarks/tile_choices.py makes such files")
    found = {}
    for name in names:
        part: TileFits = fits[name]
        tiles, splits = (
            tuple(
                Tile(a, b, a * along, b * across, _UNITS // (along * across), *rest)
                for a, b, along, across, *rest in part[which]
            )
            for which in ("tiles", "splits")
        )
        found[name] = Choices(tiles, splits, part["start"], *part["split"])
    return found


def find_tiles(device_id: str) -> str:
    """The table of the tiles that a device's kernels have; nothing where none was made."""
    return "hopper" if device_id.startswith(MODELLED) else ""


def pad(size: int, step: int) -> int:
    """The next multiple."""
    return -(-size // step) * step


def find_round(rows: int) -> int:
    """The largest of ROUND_ROWS that divides a batch's rows; 0 where none does."""
    return max((step for step in ROUND_ROWS if rows % step == 0), default=0)


class ChosenTile(NamedTuple):
    """The tile that a product gets: its executed FLOPs and its seconds both follow from it."""

    rows: int
    columns: int
    cluster_rows: int  # whole clusters of tiles are computed
    cluster_columns: int
    depth: int  # in steps of this
    parts: int = 1  # that the depth is split into

    @property
    def area(self) -> int:
        return self.rows * self.columns

    def count_tiles(self, rows: int, columns: int) -> int:
        """Tiles of a product."""
        return pad(rows, self.cluster_rows) * pad(columns, self.cluster_columns) // self.area

    def count_flops(self, rows: int, columns: int, depth: int) -> int:
        """Executed FLOPs of a product."""
        return 2 * self.count_tiles(rows, columns) * self.area * pad(depth, self.depth)


_OLD_TILE = ChosenTile(256, 128, 256, 128, 32)


class ProductSize(NamedTuple):
    """A matrix product of a linear layer with n outputs and k inputs over m rows, in one of its three directions."""

    direction: ProductDirection
    m: int
    n: int
    k: int
    copies: int = 1  # experts: one grouped call over m rows in all, with this many weights
    routing: Routing = EVEN  # how many of the rows each expert gets

    def turn(self) -> tuple[int, int, int]:
        """Rows, columns and depth of the product.

        Rows and columns are cuBLAS's, which stores columns first: outputs are the rows of a layer's forward product.
        """
        m, n, k = self.m, self.n, self.k
        return {"forward": (n, m, k), "dgrad": (k, m, n), "wgrad": (k, n, m)}[self.direction]

    def find_step(self) -> int:
        """The largest of 8, 4, 2, 1 that divides both widths: rows that do not start on 16 bytes get other kernels."""
        return math.gcd(self.n, self.k, ALIGNED)

    def align(self) -> ProductSize:
        """With widths filled up to whole steps, as torch.compile does it."""
        return self._replace(n=pad(self.n, ALIGNED), k=pad(self.k, ALIGNED))


@lru_cache(maxsize=65536)
def choose_tile(table: str, size: ProductSize) -> ChosenTile:
    """The tile that cuBLAS takes for a product."""
    if size.find_step() < ALIGNED:
        return _OLD_TILE
    rows, columns, depth = size.turn()
    step = find_round(columns) if size.direction != "wgrad" else 0
    choices = load_choices(table)[f"{size.direction}-{step}" if step else size.direction]
    tile, parts = choices.choose(rows, columns, -(-depth // _DEPTH))
    return ChosenTile(*tile[:4], _DEPTH, parts)


def count_product_excess(m: int, n: int, k: int) -> dict[ProductDirection, int]:
    """FLOPs beyond need of a layer with n outputs and k inputs over m rows, for each direction."""
    sizes = [ProductSize(direction, m, n, k) for direction in DIRECTIONS]
    executed = {size.direction: choose_tile("hopper", size).count_flops(*size.turn()) for size in sizes}
    if known := GRADIENTS.get((n, k)):
        executed["wgrad"] = 2 * known * pad(m, _DEPTH)
    return {direction: flops - 2 * m * n * k for direction, flops in executed.items()}


def find_group_side(rows: int) -> int:
    """Rows and columns of the tiles that a grouped product has, by the rows of an expert on average."""
    return GROUP_SIDE if rows > _FEW else _FEW_TILE


def _count_experts(side: int, rows: float, deep: float, n: int, k: int) -> dict[ProductDirection, int]:
    """Executed FLOPs of a grouped product: `rows` padded to tiles of a side, `deep` padded as the depth."""
    return {
        "forward": round(2 * rows * pad(n, side) * pad(k, _DEPTH)),
        "dgrad": round(2 * rows * pad(k, side) * pad(n, _DEPTH)),
        "wgrad": round(2 * deep * pad(n, GROUP_SIDE) * pad(k, GROUP_SIDE)),
    }


def count_experts_excess(copies: int, m: int, n: int, k: int, routing: Routing) -> dict[ProductDirection, int]:
    """FLOPs beyond need of experts in one grouped product, m rows in all, as a router deals them out.

    Rows of an expert are padded to a tile; for the weight's gradient, where they are the depth, to steps.
    """
    need = 2 * m * n * k
    side = find_group_side(m // copies)
    filled, deep = (routing.count_steps(copies, m, step) * step for step in (side, _DEPTH))
    return {name: max(0, flops - need) for name, flops in _count_experts(side, filled, deep, n, k).items()}
