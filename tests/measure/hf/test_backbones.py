"""Models over backbones that a config leaves out, or of other types: equal to HF's trace, or refused in words."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import bind
from flopcalc.errors import ConfigError
from flopcalc.measure.hf.examples import find_example
from flopcalc.measure.hf.verify import prepare, verify

Json = dict[str, Any]
HYBRID: Json = {
    "model_type": "dpt", "is_hybrid": True, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 48, "image_size": 64, "backbone_out_indices": [0, 1, 2, 3], "fusion_hidden_size": 12,
    "neck_hidden_sizes": [256, 512, 16, 20],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("example", "config"),
    [
        ("dpt", HYBRID),  # the BiT that DPTConfig has then
        ("dpt", {**HYBRID, "backbone_config": None}),
        ("dpt-semantic", HYBRID),
        ("dpt-body", HYBRID),
    ],
)
def test_a_model_over_its_backbone_equals_hf(example: str, config: Json) -> None:
    prepare()
    found = find_example(example)
    named = {**config, **({"architectures": [found.architecture]} if found.architecture else {})}
    verdict = verify(named, {"batch": 1, "images": [[1, 64, 64]], "phase": "train"}, example=found)
    assert verdict.is_equal, (verdict.different, verdict.parameters, verdict.not_counted)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"backbone_config": {}}, "needs a BiT of three stages"),  # BitConfig's own defaults, which are four
        ({"num_channels": 4}, "a hybrid without backbone_config has a BiT of 3 channels"),
        ({"backbone_config": {"depths": [3, 4, 9]}}, "must have global_padding same and embedding_dynamic_padding"),
        ({"backbone_config": {"depths": [3, 4, 9], "global_padding": "same"}}, "and embedding_dynamic_padding"),
    ],
)
def test_backbones_that_do_not_fit(changed: Json, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bind({**HYBRID, **changed})
