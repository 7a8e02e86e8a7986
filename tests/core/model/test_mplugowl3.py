"""mPLUG-Owl3: its releases, their sizes, and what is refused of them."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import bind
from flopcalc.base.errors import ConfigError

TOWER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}
FIRST: dict[str, Any] = {  # mPLUG-Owl3-7B-240728
    "model_type": "mplugowl3", "architectures": ["mPLUGOwl3Model"], "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151851,
    "max_position_embeddings": 32768, "sliding_window": 131072, "use_sliding_window": False,
    "tie_word_embeddings": False, "hyper_layers": [1, 9, 17, 25], "vision_config": {**TOWER, "image_size": 384},
}  # fmt: skip
SMALL = FIRST | {  # mPLUG-Owl3-1B-241014
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "sliding_window": 32768, "tie_word_embeddings": True, "hyper_layers": [6, 13, 20, 22],
}  # fmt: skip
LATER = FIRST | {  # mPLUG-Owl3-7B-241101
    "vocab_size": 151651,
    "hyper_layers": [7, 15, 23, 26],
    "vision_config": {**TOWER, "image_size": 378},
}


@pytest.mark.parametrize(("config", "gigabytes"), [(FIRST, "16.1"), (SMALL, "1.85"), (LATER, "16.1")])
def test_weights_are_as_large_as_the_published_files(config: dict[str, Any], gigabytes: str) -> None:
    digits = len(gigabytes.partition(".")[2])
    assert f"{2 * bind(config).parameters()['total'] / 1e9:.{digits}f}" == gigabytes


@pytest.mark.parametrize(("config", "learns"), [(FIRST, False), (LATER, True)])
def test_the_tower_learns_in_the_later_release_alone(config: dict[str, Any], learns: bool) -> None:
    tower = bind(config)(1, 100, image_grid_thw=[[7, 27, 27]]).by_component()["vision"]
    assert (tower.backward > 0) == learns


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"vision_config": {**TOWER, "image_size": 364}}, "384 .* or 378"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"sliding_window": 4096}, "below max_position_embeddings, is not described"),
        ({"vision_config": {**TOWER, "image_size": 384, "num_hidden_layers": 0}}, "num_hidden_layers"),
    ],
)
def test_what_is_not_described_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bind({**FIRST, **keys})
