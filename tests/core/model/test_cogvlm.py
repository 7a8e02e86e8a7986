"""CogVLM2 and its model of videos: their published sizes, and how many videos a sample has."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import bind
from flopcalc.base.errors import WorkloadError

SHARED: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 128256,
}
TOWER = {
    "hidden_size": 1792,
    "intermediate_size": 15360,
    "num_hidden_layers": 63,
    "num_heads": 16,
    "patch_size": 14,
    "in_channels": 3,
}
IMAGES = SHARED | {  # zai-org/cogvlm2-llama3-chat-19B; its config class has 8 key heads, its config.json no such key
    "architectures": ["CogVLMForCausalLM"],
    "vision_config": {**TOWER, "image_size": 1344, "num_positions": 9217},
}
VIDEO = SHARED | {  # zai-org/cogvlm2-video-llama3-chat; its files hold 25.0 GB
    "architectures": ["CogVLMVideoForCausalLM"],
    "num_multi_query_heads": 8,
    "vision_config": {**TOWER, "image_size": 224, "num_positions": 257},
}
FRAMES = [24, 16, 16]


def test_the_weights_are_as_large_as_the_published_files() -> None:
    assert f"{2 * bind(VIDEO).parameters()['total'] / 1e9:.1f}" == "25.0"


def test_key_heads_that_a_published_config_leaves_out() -> None:
    left_out, said = bind(IMAGES), bind(IMAGES | {"num_multi_query_heads": 8})
    assert left_out.parameters() == said.parameters()
    grids = [[1, 96, 96]]
    assert left_out(1, 2400, image_grid_thw=grids).total == said(1, 2400, image_grid_thw=grids).total
    assert f"{said.parameters()['total'] / 1e9:.1f}B" == "19.5B"


def test_a_sample_has_one_video() -> None:
    assert bind(VIDEO)(2, 1700, video_grid_thw=[FRAMES] * 2).total
    with pytest.raises(WorkloadError, match="2 videos: a sample has at most 1"):
        bind(VIDEO)(1, 3400, video_grid_thw=[FRAMES] * 2)
    with pytest.raises(WorkloadError, match="2 images and videos: a sample has at most 1"):
        bind(VIDEO)(1, 3400, video_grid_thw=[FRAMES], image_grid_thw=[[1, 16, 16]])
