"""How processors of published code cut a picture: grids worked out by hand after their code."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from flopcalc import bind
from flopcalc.base.data import list_data_files, load_toml
from flopcalc.base.errors import WorkloadError
from flopcalc.core.images.resizing import RULES

KIMI = {"patch": 14, "merge": 2, "in_token_limit": 4096, "pad_input": False}
EAGLE = {"side": 32, "size.height": 448, "min_patches": 1, "max_patches": 12, "thumbnail": True}
PHI = {"tile": 336, "num_crops": 16}
VL2 = {"candidate_resolutions": [[384, 384], [384, 768], [768, 384]], "images": 2}  # widths and heights
KEYE = {"patch": 14, "merge": 2, "small": "stretch", "min_pixels": 3136, "max_pixels": 1003520}
OVIS = {"patch": 16, "merge": 2, "small": "shorter", "min_pixels": 448**2, "max_pixels": 1792**2}
CPM = {"patch": 14, "downsample_mode": "1x", "slice_mode": True, "scale_resolution": 448, "max_slice_nums": 9}
STEP = {"size.height": 728, "patch_size": 504, "max_image_size": 3024, "in_floats": True}
DPT = {
    "patch": 14, "do_resize": False, "size.height": 384, "size.width": 384, "keep_aspect_ratio": False,
    "ensure_multiple_of": 1, "do_pad": True, "size_divisor": 14,
}  # fmt: skip
MOON = {"crop_size": 378, "patch_size": 14, "max_crops": 12, "overlap_margin": 4}
OWL = {"tile": 384, "side": 27}
PHI4 = {"patch": 16, "min_num_patches": 256, "max_num_patches": 3600}


@pytest.mark.parametrize(
    ("rule", "values", "size", "grid"),
    [
        ("token_limit", KIMI, (1024, 768), (1, 54, 72)),  # whole tokens of 28 pixels, the rest cut off
        ("token_limit", {**KIMI, "pad_input": True}, (1024, 768), (1, 56, 74)),
        ("token_limit", KIMI, (4000, 3000), (1, 54, 74)),  # 1036 by 777 pixels after 4,096 patches are left
        ("covering_canvas", EAGLE, (3000, 2900), (13, 32, 32)),  # 4 by 3 tiles keep more of it than 3 by 3
        ("canvas", EAGLE, (3000, 2900), (10, 32, 32)),
        ("covering_canvas", EAGLE, (500, 450), (1, 32, 32)),
        ("covering_canvas", {**EAGLE, "thumbnail": False}, (600, 200), (3, 32, 32)),
        ("hd_crops", PHI, (1000, 800), (17, 4, 4)),
        ("hd_crops", PHI, (1600, 400), (17, 2, 8)),
        ("hd_crops", PHI, (400, 1600), (17, 8, 2)),
        ("whole_and_resolutions", VL2, (1000, 600), (3, 1, 2)),  # 640 by 384 pixels of it in two columns
        ("whole_and_resolutions", VL2, (600, 1000), (3, 2, 1)),
        ("whole_and_resolutions", VL2, (300, 300), (2, 1, 1)),
        ("whole_and_resolutions", {**VL2, "images": 3}, (1000, 600), (2, 1, 1)),  # three images are not cut
        ("even_crops", MOON, (1000, 800), (13, 3, 4)),  # windows of 266 pixels on 888 by 688, and margins of 112
        ("even_crops", MOON, (300, 900), (2, 1, 1)),  # 188 pixels are less than a window
        ("even_crops", MOON, (500, 2000), (7, 6, 1)),  # 8 by 2 windows, times the root of 12 / 16
        ("even_crops", MOON, (4000, 3000), (9, 2, 4)),
        ("even_crops", MOON, (1442, 379), (13, 2, 6)),  # 7 columns by its aspect, of which 2 rows leave 6
        ("even_crops", MOON, (379, 1442), (13, 6, 2)),
        ("even_crops", MOON, (1400, 600), (11, 2, 5)),
        ("anchors", OWL, (500, 500), (5, 27, 27)),  # 2 by 2 tiles, and the whole
        ("anchors", OWL, (700, 500), (7, 27, 27)),  # 2 by 3: 28/30 of the shape, and 20/28 of 2 by 2
        ("anchors", OWL, (900, 1600), (7, 27, 27)),
        ("anchors", OWL, (3000, 600), (5, 27, 27)),  # 1 by 4 is the widest
        ("naflex_within", PHI4, (1024, 768), (1, 48, 64)),  # as many patches as it has
        ("naflex_within", PHI4, (100, 100), (1, 16, 16)),  # 36 patches grow to 256
        ("multiples", DPT, (640, 480), (1, 35, 46)),  # padded to 644 by 490 pixels, as DPT over a DINOv2 is published
        ("multiples", {**DPT, "do_pad": False}, (640, 480), (1, 34, 45)),
        ("smart", KEYE, (3, 31), (1, 20, 2)),  # 28 by 289 pixels
        ("smart", OVIS, (3, 31), (1, 92, 10)),  # the shorter side to 32, and 200,704 pixels
        ("smart", OVIS, (31, 3), (1, 10, 92)),
        ("smart", OVIS, (1, 2000), (1, 4000, 2)),  # no limit of the aspect
        ("smart", OVIS, (9000, 40), (1, 2, 500)),  # 8,000 by 40 pixels of it
        ("slices", CPM, (448, 448), [(1, 32, 32)]),
        ("slices", CPM, (1000, 800), [(1, 29, 36)] * 5),  # 500 by 400 pixels, to whole patches of 14
        ("whole_and_crops", STEP, (728, 728), (5, 2, 2)),  # as large as the view of the whole
        ("whole_and_crops", STEP, (727, 727), (1, 1, 1)),
        ("whole_and_crops", STEP, (10, 22), (4, 3, 1)),  # in floats 2.2 - 2 is more than 0.2
        ("whole_and_crops", {**STEP, "in_floats": False}, (10, 22), (3, 2, 1)),
    ],
)
def test_grids(rule: str, values: dict[str, Any], size: tuple[int, int], grid: object) -> None:
    assert RULES[rule](*size, values) == grid


# Images of 1x1, 20x20, 30x2000, 4000x30 and 5000x5000 pixels, without a preprocessor_config.json.
QWEN = [(1, 4, 4), (1, 4, 4), (1, 142, 2), (1, 2, 286), (1, 70, 70)]
SLICED = [(1, 32, 32), (1, 32, 32), (1, 261, 4), (1, 3, 362), (1, 32, 32)]
CROPPED = [(1, 1, 1), (1, 1, 1), (17, 4, 4), (37, 6, 6), (37, 6, 6)]


@pytest.mark.parametrize(
    ("name", "changed", "grids"),
    [
        ("Keye", {"vision_config": {"patch_size": 14}}, QWEN),
        ("KeyeVL1_5", {"vision_config": {"patch_size": 14}}, QWEN),
        ("dots_ocr", {"vision_config": {"patch_size": 14}}, QWEN),
        ("sarashina2_vision", {"vision_config": {"patch_size": 14}}, QWEN),
        ("llavaonevision1_5", {"vision_config": {"patch_size": 14}}, QWEN),
        (
            "ovis2_5",
            {"vit_config": {"patch_size": 16, "window_size": 128}},
            [(1, 28, 28), (1, 28, 28), (1, 230, 4), (1, 4, 324), (1, 110, 110)],
        ),
        (
            "ovis1_6",
            {"vision_config": {"patch_size": 14, "image_size": 384}},
            [(1, 27, 27), (1, 27, 27), (6, 27, 27), (10, 27, 27), (10, 27, 27)],
        ),
        (
            "kimi_vl",
            {"vision_config": {"patch_size": 14}},
            [(1, 2, 2), (1, 2, 2), (1, 144, 4), (1, 4, 286), (1, 64, 64)],
        ),
        (
            "kimi_k3",
            {"vision_config": {"patch_size": 14}},
            [(1, 2, 2), (1, 2, 2), (1, 144, 4), (1, 4, 286), (1, 258, 258)],
        ),
        ("minicpmv", {"vision_config": {"patch_size": 14}}, SLICED),
        ("minicpmv2_0", {"vision_config": {"patch_size": 14}}, SLICED),
        ("minicpmo", {"vision_config": {"patch_size": 14}}, SLICED),
        ("step_robotics", {"vision_config": {"patch_size": 14, "image_size": 728}}, CROPPED),
        ("step3_vl", {"vision_config": {"patch_size": 14, "image_size": 728}}, CROPPED),
    ],
)
def test_small_long_and_large_pictures(name: str, changed: dict[str, Any], grids: list[tuple[int, int, int]]) -> None:
    config = {"model_type": name, **deepcopy(load_toml(list_data_files("examples")[name])["configs"][0])}
    for key, values in changed.items():
        config[key] |= values
    vision = bind(config).vision
    assert vision is not None
    sizes = ((1, 1), (20, 20), (30, 2000), (4000, 30), (5000, 5000))
    assert [vision.grids_of_pixels(*size, None)[0][-1] for size in sizes] == grids


@pytest.mark.parametrize(
    ("rule", "values", "size", "words"),
    [
        ("token_limit", KIMI, (8000, 30), "fewer than 512 patches a side, not 570"),
        ("smart", {**KEYE, "max_pixels": 28 * 28 * 4}, (30, 2000), "shrunk to less than one token of 28 pixels"),
        ("smart", OVIS, (1, 100_000), "shrunk to less than one token of 32 pixels"),
        ("smart", KEYE, (1, 300), "more than 200 times the shorter"),
    ],
)
def test_pictures_that_their_code_cannot_cut(
    rule: str, values: dict[str, Any], size: tuple[int, int], words: str
) -> None:
    with pytest.raises(WorkloadError, match=words):
        RULES[rule](*size, values)


def test_a_picture_smaller_than_a_token_is_refused() -> None:
    with pytest.raises(WorkloadError, match="smaller than one token of 28 a side"):
        RULES["token_limit"](20, 900, KIMI)
