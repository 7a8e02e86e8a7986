"""Tiny modules after published code: each is named as its class, says what it was written after, and is a spec's."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flopcalc.core.spec.spec import find_spec
from flopcalc.data import list_data_files

HEADS = {"LlamaNemotronVLForSequenceClassification"}  # of specs whose examples have another: see test_remote_heads.py


def test_every_class_names_its_source_and_has_a_spec() -> None:
    from flopcalc.measure.hf.remote import CLASSES, find_class

    described = {spec.architecture for name in list_data_files("examples") if (spec := find_spec(name)) is not None}
    for name in CLASSES:
        found = find_class(name)
        assert found.__name__ == name
        assert re.match(r"[\w.-]+/[\w.-]+: \S+\.py", found.__doc__), name
        assert name in described | HEADS, name
    assert find_class("LlamaForCausalLM") is None


@pytest.mark.filterwarnings("ignore")  # torch advises on its own code
def test_a_published_module_is_built_and_counted() -> None:
    from flopcalc.measure.hf.examples import find_example
    from flopcalc.measure.hf.verify import verify

    example = find_example("kimi_vl")
    config = example.configs[0]
    workload = {"batch": 1, "seq": 14, "images": [[1, 4, 6]], "phase": "train"}
    verdict = verify(config, workload, example=example)
    assert verdict.is_equal
    assert 0 < verdict.traced[0] < verdict.traced[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "recipe",
    [
        {"lora": {"r": 2, "targets": ["v_proj"]}},
        {"lora": {"r": 2, "targets": ["k_proj"]}},
        {"freeze": ["model.embed_tokens", "model.layers.0"]},
        {"freeze": ["model.embed_tokens", "model.layers.*", "lm_head"]},
    ],
)
def test_a_later_pass_owes_gradients_to_the_keys_of_its_own_layer(recipe: dict[str, Any]) -> None:
    from flopcalc.measure.hf.examples import find_example
    from flopcalc.measure.hf.verify import verify

    example = find_example("iquestloopcoder")
    for config in example.configs:
        assert verify(config, {"batch": 2, "seq": 7, "phase": "train"}, recipe, example=example).is_equal
