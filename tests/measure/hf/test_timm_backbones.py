"""Detectors over timm's ResNets, as the published DETRs are: rows equal what HF executes. Needs timm."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc.measure.hf.examples import find_example
from flopcalc.measure.hf.verify import prepare, verify

pytest.importorskip("timm")
WORKLOAD = {"batch": 2, "images": [[1, 33, 46]], "phase": "train"}


@pytest.mark.parametrize("model_type", ["detr", "table-transformer"])
@pytest.mark.parametrize(
    "given",
    [
        {"backbone": "resnet18"},
        {"backbone": "resnet26", "dilation": True},
        {"backbone_config": {"model_type": "timm_backbone", "backbone": "resnet34", "out_indices": [1, 2, 3, 4]}},
    ],
)
def test_rows_over_timm(model_type: str, given: dict[str, Any]) -> None:
    example = find_example(model_type)
    config = {key: value for key, value in example.configs[0].items() if key != "backbone_config"}
    prepare()
    for recipe in ({}, {"freeze": ["model.backbone"]}):
        found = verify({**config, **given}, WORKLOAD, recipe, example=example)
        assert found.is_equal, found
