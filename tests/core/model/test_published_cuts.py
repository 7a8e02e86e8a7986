"""How processors of published code cut a picture: grids worked out by hand after their code."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc.core.model.resizing import RULES
from flopcalc.errors import WorkloadError

KIMI = {"patch": 14, "merge": 2, "in_token_limit": 4096, "pad_input": False}
EAGLE = {"side": 32, "size.height": 448, "min_patches": 1, "max_patches": 12, "thumbnail": True}
PHI = {"tile": 336, "num_crops": 16}


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
    ],
)
def test_grids(rule: str, values: dict[str, Any], size: tuple[int, int], grid: tuple[int, int, int]) -> None:
    assert RULES[rule](*size, values) == grid


def test_a_picture_smaller_than_a_token_is_refused() -> None:
    with pytest.raises(WorkloadError, match="smaller than one token of 28 a side"):
        RULES["token_limit"](20, 900, KIMI)
