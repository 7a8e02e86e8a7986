"""Images that become a whole view and tiles: ours equal transformers' own processors, and live batches are read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flopcalc import bind
from flopcalc.base.errors import ConfigError, WorkloadError
from flopcalc.measure.hf.examples import find_example

SIZES = [(336, 336), (640, 480), (480, 641), (1000, 333), (97, 1013), (1999, 1501), (1500, 301), (3000, 2200), (769, 5)]


def bind_example(name: str, number: int = 0, **changes: Any) -> Any:
    config = find_example(name).configs[number]
    merged = {key: {**config.get(key, {}), **value} for key, value in changes.items()}
    return bind({**config, **merged})


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("name", "tile", "most"), [("deepseek_ocr2", 768, 6), ("unlimited_ocr", 640, 32)])
def test_whole_and_tiles(name: str, tile: int, most: int, size: tuple[int, int]) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    width, height = size
    columns, rows = get_optimal_tiled_canvas((height, width), (tile, tile), 2, most) if max(size) > tile else (0, 0)
    sam = {**find_example(name).configs[0]["vision_config"]["sam_config"], "image_size": 1024, "patch_size": 16}
    vision = bind_example(name, vision_config={"sam_config": sam}).vision
    grid, _ = vision.grid_of_pixels(width, height, None)
    assert grid == (1 + columns * rows, 64, max(rows, 1))
    # transformers 5.22: processing_deepseek_ocr2.py, processing_unlimited_ocr.py
    whole, part = 16, math.ceil(tile // 16 / 4)
    if name == "deepseek_ocr2":
        expected = whole**2 + columns * rows * part**2 + 1
    else:
        expected = whole * (whole + 1) + 1 + (rows * part * (columns * part + 1) if rows else 0)
    assert vision.count_tokens(grid) == expected
    with pytest.raises(ConfigError, match="tile_size"):
        vision.grid_of_pixels(width, height, {"tile_size": 512})


def test_without_tiles() -> None:
    whole = {"crop_to_patches": False}
    assert bind_example("deepseek_ocr2").vision.grid_of_pixels(2000, 900, whole)[0] == (1, 768 // 96, 1)
    assert bind_example("unlimited_ocr").vision.grid_of_pixels(2000, 900, whole)[0] == (1, 1024 // 80, 1)


def test_views_of_a_live_batch() -> None:
    ids = torch.full((2, 600), 5)
    pixels = torch.zeros(2, 3, 480, 480)
    tiles = torch.zeros(2, 3, 768, 768)
    estimator = bind_example("deepseek_ocr2")
    batch = {"input_ids": ids, "pixel_values": pixels, "pixel_values_local": tiles, "num_local_patches": [2, 0]}
    expected = bind_example("deepseek_ocr2").estimate_batch({"input_ids": ids})
    assert estimator.estimate_batch(batch).total > expected.total
    assert estimator.vision.read_sizes(batch, True) == ((3, 5, 1), (1, 5, 1))
    with pytest.raises(WorkloadError):
        estimator.vision.read_sizes({**batch, "pixel_values_local": torch.zeros(2, 3, 640, 640)}, True)
    batch = {"input_ids": ids, "pixel_values": pixels, "patches_grid": [[2, 3], [1, 1]]}
    assert bind_example("unlimited_ocr").vision.read_sizes(batch, True) == ((7, 6, 3), (1, 6, 1))


def test_pixels_alone_say_the_size() -> None:
    batch = {"pixel_values": torch.zeros(2, 3, 24, 28)}
    assert bind_example("vision-encoder-decoder").vision.read_sizes(batch, True) == ((1, 6, 7), (1, 6, 7))
    assert bind_example("florence2").vision.read_sizes(batch, True) == ((1, 6, 7), (1, 6, 7))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("most", [8, 3])
def test_overlapping_crops(size: tuple[int, int], most: int) -> None:
    geometry = pytest.importorskip("transformers.models.molmo2.image_processing_molmo2").compute_crop_geometry
    width, height = size
    high, wide, canvas_high, canvas_wide = geometry(height, width, most, [4, 4], 378, 14)
    estimator = bind_example("molmo2", vision_config={"image_size": [378, 378], "patch_size": 14})
    grid, _ = estimator.vision.grid_of_pixels(width, height, {"max_crops": most})
    assert grid == (1 + high * wide, canvas_high // 14, canvas_wide // 14)
    pooled = [[14, 14, math.ceil(grid[1] / 2), math.ceil(grid[2] / 2)]]
    assert estimator.vision.count_tokens(grid) == 14 * 14 + pooled[0][2] * pooled[0][3]
    assert estimator.vision.read_sizes({"image_grids": torch.tensor(pooled)}, True) == (grid,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encoder": {"model_type": "beit"}}, "only encoders"),
        ({"decoder": {"model_type": "roberta"}}, "only decoders"),
        ({"decoder": {"add_cross_attention": False}}, "no cross-attention"),
        ({"decoder": {"cross_attention_hidden_size": 24}}, "cross_attention_hidden_size"),
    ],
)
def test_other_joined_models_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bind_example("vision-encoder-decoder", **changes)
