"""Classifiers, question answering and bare bodies against transformers' own classes, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
from heads import list_class_cases, list_classes
from tiers import mark_heavy

from flopcalc.data import list_data_files
from flopcalc.measure.hf.verify import verify

TRAIN = ({}, {"recompute": "full"}, {"lora": {"r": 3, "targets": "all-linear"}})
LIGHT = ("llama", "bert", "bart")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", mark_heavy(list_data_files("examples"), LIGHT))
def test_classes(name: str) -> None:
    found = {}
    for named, kind in list_classes(name).items():
        for config, example, workload in list_class_cases(name, named, kind):
            for recipe in TRAIN[: 1 if name in LIGHT else None]:
                verdict = verify(config, workload, recipe, example=example)
                if not verdict.is_equal:
                    found[f"{named} {recipe}"] = verdict
            forward = verify(config, {**workload, "phase": "forward"}, {}, example=replace(example))
            assert forward.is_equal, (named, forward)
    assert not found
