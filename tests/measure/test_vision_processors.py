"""Pixels to patches: our grids equal those of transformers' own PIL image processors."""

from __future__ import annotations

import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from flopcalc import bind
from flopcalc.config import load_preset
from flopcalc.data import list_data_files

SIZES = [
    (28, 28),
    (14, 300),
    (640, 480),
    (1024, 768),
    (1036, 1036),
    (3000, 40),
    (42, 42),
    (70, 98),
    (4096, 2160),
    (1, 150),
]
PRESETS = ["qwen2-vl-7b", "qwen2.5-vl-3b", "qwen3-vl-4b"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PRESETS)
def test_grid_equals_the_processor(name: str, size: tuple[int, int]) -> None:
    source = load_preset(list_data_files("presets")[name])
    vision = bind(source).vision
    assert vision is not None
    assert source.preprocessor is not None
    processor = Qwen2VLImageProcessorPil(**source.preprocessor)
    theirs = processor(Image.new("RGB", size), return_tensors="np")["image_grid_thw"][0].tolist()
    grid, notes = vision.grid_of_pixels(*size, source.preprocessor)
    assert list(grid) == theirs
    assert notes == []


@pytest.mark.parametrize("size", SIZES)
def test_class_defaults_are_used_with_a_note(size: tuple[int, int]) -> None:
    vision = bind("qwen2-vl-7b").vision
    assert vision is not None
    grid, notes = vision.grid_of_pixels(*size, None)
    theirs = Qwen2VLImageProcessorPil()(Image.new("RGB", size), return_tensors="np")["image_grid_thw"][0].tolist()
    assert list(grid) == theirs
    assert len(notes) == 1


@pytest.mark.parametrize("size", [(336, 336), (1024, 768), (50, 700)])
def test_clip_crops_to_one_square(size: tuple[int, int]) -> None:
    source = load_preset(list_data_files("presets")["llava-1.5-7b"])
    vision = bind(source).vision
    assert vision is not None
    assert source.preprocessor is not None
    pixels = CLIPImageProcessorPil(**source.preprocessor)(Image.new("RGB", size), return_tensors="np")["pixel_values"]
    patch = source.config["vision_config"]["patch_size"]
    assert vision.grid_of_pixels(*size, source.preprocessor)[0] == (
        1,
        pixels.shape[2] // patch,
        pixels.shape[3] // patch,
    )
