"""How processors of published code cut a picture: grids worked out by hand after their code."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc.core.model.resizing import RULES
from flopcalc.errors import WorkloadError

KIMI = {"patch": 14, "merge": 2, "in_token_limit": 4096, "pad_input": False}
EAGLE = {"side": 32, "size.height": 448, "min_patches": 1, "max_patches": 12, "thumbnail": True}
PHI = {"tile": 336, "num_crops": 16}
VL2 = {"candidate_resolutions": [[384, 384], [384, 768], [768, 384]], "images": 2}  # widths and heights
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
    ],
)
def test_grids(rule: str, values: dict[str, Any], size: tuple[int, int], grid: tuple[int, int, int]) -> None:
    assert RULES[rule](*size, values) == grid


def test_a_picture_smaller_than_a_token_is_refused() -> None:
    with pytest.raises(WorkloadError, match="smaller than one token of 28 a side"):
        RULES["token_limit"](20, 900, KIMI)
