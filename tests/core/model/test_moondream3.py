"""Moondream 3: what a prompt sees both ways, and how many images it takes."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import bind
from flopcalc.base.errors import ConfigError, WorkloadError

PREVIEW: dict[str, Any] = {"model_type": "moondream3", "architectures": ["HfMoondream"], "config": {}}
SIDE, LAYERS, WIDTH = 27, 24, 2048


@pytest.mark.parametrize(("images", "block"), [([], 0), ([[2, 1, 1]], SIDE**2 + 1), ([[13, 3, 4]], SIDE**2 + 1)])
def test_an_image_and_the_token_before_it_see_one_another(images: list[list[int]], block: int) -> None:
    seq = 1000
    full, needed = (
        bind(PREVIEW, convention=convention)(1, seq, image_grid_thw=images or None, phase="forward").total
        for convention in ("full", "model")
    )
    pairs = seq * (seq + 1) // 2 + block * (block - 1) // 2
    assert full - needed == (seq * seq - pairs) * 4 * WIDTH * LAYERS


def test_a_sample_has_one_image() -> None:
    assert bind(PREVIEW)(2, 1500, image_grid_thw=[[2, 1, 1]] * 2).total
    assert bind(PREVIEW)(lengths=[740, 760], image_grid_thw=[[2, 1, 1]] * 2).total
    with pytest.raises(WorkloadError, match="2 images: a sample has at most 1"):
        bind(PREVIEW)(1, 1500, image_grid_thw=[[2, 1, 1]] * 2)


@pytest.mark.parametrize(
    ("part", "keys", "words"),
    [
        ("text", {"n_kv_heads": 8}, "n_kv_heads must be n_heads"),
        ("text", {"n_heads": 128, "n_kv_heads": 128}, "at least 32 numbers"),
        ("vision", {"enc_n_layers": 26}, "pooled to so many rows and columns"),
        ("vision", {"overlap_margin": 14}, "leave something of a crop"),
        ("vision", {"overlap_margin": -1}, "only crops that overlap are described"),
        ("vision", {"proj_out_dim": 1024}, "proj_out_dim must be dim"),
        ("vision", {"in_channels": 1}, "no other images are described"),
    ],
)
def test_what_its_code_cannot_run_is_refused(part: str, keys: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bind({**PREVIEW, "config": {part: keys}})
