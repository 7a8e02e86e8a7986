"""Pixels to grids as the processors resize, grids to visual tokens, and what a model refuses."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import ConfigError, WorkloadError, bind
from flopcalc.base.data import list_data_files, load_toml
from flopcalc.core.images.resizing import smart_resize
from flopcalc.core.images.vision import Vision

GRID = Vision("grid", merge=2, patch=14, side=0, tokens=0, takes_videos=True)
FIXED = Vision("fixed", merge=1, patch=1, side=24, tokens=576, takes_videos=False)


# Computed by hand from Qwen's rule: round each side to a multiple of 28, scale into the limits.
@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (28, 28, (56, 56)),  # below 56 * 56: up
        (56, 56, (56, 56)),
        (224, 224, (224, 224)),
        (768, 1024, (756, 1036)),
        (42, 1000, (56, 1008)),  # 1.5 rounds to even: 2
        (70, 1000, (56, 1008)),  # 2.5 rounds to even: 2
        (1, 100, (28, 560)),
        (4000, 4000, (980, 980)),  # above 28 * 28 * 1280: down
        (3000, 6000, (700, 1400)),
    ],
)
def test_smart_resize(height: int, width: int, expected: tuple[int, int]) -> None:
    result = smart_resize(height, width, 28, 56 * 56, 28 * 28 * 1280)
    assert result == expected
    assert 56 * 56 <= result[0] * result[1] <= 28 * 28 * 1280


def test_smart_resize_never_gives_an_empty_image() -> None:
    assert smart_resize(5, 900, 28, 1, 10**6) == (28, 28)  # 5 rounds to 0, so the area is below any limit
    assert smart_resize(100, 100, 28, 1, 10) == (28, 28)


def test_too_long_an_image() -> None:
    with pytest.raises(WorkloadError, match="more than 200 times"):
        smart_resize(1, 201, 28, 1, 10**6)


@pytest.mark.parametrize(
    ("preprocessor", "grid", "notes"),
    [
        (None, (1, 54, 74), 1),
        ({}, (1, 54, 74), 1),
        ({"min_pixels": 3136, "max_pixels": 12_845_056}, (1, 54, 74), 0),
        ({"max_pixels": 200_704}, (1, 26, 36), 0),
        ({"size": {"shortest_edge": 3136, "longest_edge": 200_704}}, (1, 26, 36), 0),
        ({"size": {"min_pixels": 3136, "max_pixels": 200_704}}, (1, 26, 36), 0),
        ({"min_pixels": 2_000_000}, (1, 88, 118), 0),
        ({"size": 5, "patch_size": 14, "merge_size": 2}, (1, 54, 74), 1),
    ],
)
def test_grid_of_pixels(preprocessor: dict[str, Any] | None, grid: tuple[int, int, int], notes: int) -> None:
    found, said = GRID.grid_of_pixels(1024, 768, preprocessor)
    assert found == grid
    assert len(said) == notes


@pytest.mark.parametrize(
    ("preprocessor", "words"),
    [
        ({"min_pixels": "x"}, "min_pixels must be a positive whole number"),
        ({"max_pixels": 0}, "max_pixels must be a positive whole number"),
        ({"max_pixels": True}, "max_pixels must be"),
        ({"max_pixels": [1]}, "max_pixels must be"),
        ({"patch_size": None}, "patch_size must be"),
        ({"patch_size": 16}, "do not fit the model's 14 and 2"),
        ({"merge_size": 4}, "do not fit the model's 14 and 2"),
    ],
)
def test_bad_preprocessor(preprocessor: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json") as caught:
        GRID.grid_of_pixels(1024, 768, preprocessor)
    assert words in str(caught.value)


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, -1), (1.5, 2), ("5", 5)])
def test_bad_pixels(width: Any, height: Any) -> None:
    with pytest.raises(WorkloadError, match=r"image (width|height) must be"):
        GRID.grid_of_pixels(width, height, None)


def test_grid_towers() -> None:
    assert GRID.check_grid((1, 4, 6), "grid") == (1, 4, 6)
    assert GRID.count_tokens((3, 4, 6)) == 18
    for grid in ((1, 3, 4), (1, 4, 5), (2, 1, 1)):
        with pytest.raises(WorkloadError, match=r"multiples of 2 \(merge size\)"):
            GRID.check_grid(grid, "grid")
    with pytest.raises(WorkloadError, match="needs the grid of each image"):
        GRID.check_grid((0, 0, 0), "grid")


def test_fixed_towers() -> None:
    assert FIXED.check_grid((0, 0, 0), "grid") == (1, 24, 24)
    assert FIXED.check_grid((1, 24, 24), "grid") == (1, 24, 24)
    assert FIXED.count_tokens((1, 24, 24)) == 576
    grid, notes = FIXED.grid_of_pixels(3000, 20, None)
    assert grid == (1, 24, 24)
    assert "becomes 24x24, 576 tokens: the processor crops" in notes[0]
    with pytest.raises(WorkloadError, match="images of one size, 1,24,24"):
        FIXED.check_grid((1, 22, 24), "grid")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("qwen2-vl", Vision("grid", 2, 14, 0, 0, True)),
        ("qwen2.5-vl-7b", Vision("grid", 2, 14, 0, 0, True)),
        ("qwen3-vl-4b", Vision("grid", 2, 16, 0, 0, True)),
        ("llava-1.5-7b", Vision("fixed", 1, 1, 24, 576, False)),
        ("llama-3.1-8b", None),
    ],
)
def test_bound_vision(model: str, expected: Vision | None) -> None:
    vision = bind(model).vision
    assert (vision and vision.replace(dims=None, outer=None)) == expected


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        ("sweep-tiny", {"image_grid_thw": [[1, 2, 2]]}, "is a text model: it takes no images"),
        ("sweep-tiny", {"video_grid_thw": [[1, 2, 2]]}, "is a text model: it takes no videos"),
        ("llava-1.5-7b", {"video_grid_thw": [[1, 24, 24]]}, "takes no videos"),
        ("llava-1.5-7b", {"image_grid_thw": [[1, 12, 12]]}, "images of one size, 1,24,24"),
        ("qwen2-vl", {"image_grid_thw": [[1, 3, 4]]}, "multiples of 2"),
        ("qwen2-vl", {"image_grid_thw": [[1, 100, 100]]}, "2500 visual tokens do not fit in 64 tokens"),
        ("qwen2-vl", {"image_grid_thw": [[1, 8, 8]], "video_grid_thw": [[9, 4, 6]]}, "70 visual tokens"),
    ],
)
def test_images_that_do_not_fit(model: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        bind(model)(1, 64, **arguments)
    assert words in str(caught.value)


def test_pixel_values_need_a_grid_where_sizes_vary() -> None:
    class Pixels:
        shape = (1, 3, 28, 28)

    with pytest.raises(WorkloadError, match="needs the grid of each image"):
        bind("qwen2-vl")(batch={"input_ids": [[0] * 64], "pixel_values": Pixels()})
    counted = bind("llava-1.5-7b")(batch={"input_ids": [[0] * 600], "pixel_values": Pixels()})
    assert counted == bind("llava-1.5-7b")(1, 600, image_grid_thw=[[1, 24, 24]])


@pytest.mark.parametrize("value", ["14", 0, 1.5, True, [], -2])
def test_mistyped_vision_config(value: Any) -> None:
    config = {"model_type": "qwen2_vl", "vision_config": {"patch_size": value}, "text_config": {"num_hidden_layers": 1}}
    with pytest.raises(ConfigError):
        bind(config)


# What transformers 5.22's own methods of Lfm2VlImageProcessor give; the class itself wants torchvision.
@pytest.mark.parametrize(
    ("size", "tiles", "whole"),
    [
        ((640, 480), 0, (1, 26, 36)),
        ((1024, 768), 6, (1, 26, 36)),
        ((2000, 1000), 8, (1, 22, 44)),
        ((300, 20), 0, (1, 6, 62)),
        ((512, 512), 0, (1, 32, 32)),
        ((4000, 900), 4, (1, 14, 66)),
    ],
)
def test_lfm2_vl_cuts_large_images(size: tuple[int, int], tiles: int, whole: tuple[int, int, int]) -> None:
    vision = bind({"model_type": "lfm2_vl", "vision_config": {}, "text_config": LFM2}).vision
    assert vision is not None
    assert vision.grids_of_pixels(*size, None)[0] == [(1, 32, 32)] * tiles + [whole]


LFM2 = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "layer_types": ["conv"],
}


@pytest.mark.parametrize(
    ("model_type", "batch", "grids"),
    [
        ("mistral3", {"image_sizes": [[20, 30], [30, 10]]}, ((1, 4, 6), (1, 6, 2))),
        ("minicpmv4_6", {"target_sizes": [[4, 8], [8, 8]]}, ((1, 4, 8), (1, 8, 8))),
        ("step3p7", {"num_local_patches": [2, 0]}, ((3, 1, 1), (1, 1, 1))),
        ("mistral3", {}, None),
    ],
)
def test_sizes_of_a_batch(model_type: str, batch: dict[str, Any], grids: Any) -> None:
    config = load_toml(list_data_files("examples")[model_type])["configs"][0]
    vision = bind({"model_type": model_type, **config}).vision
    assert vision is not None
    assert vision.read_sizes(batch, True) == grids
