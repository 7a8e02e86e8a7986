"""Classifiers, question answering and bare bodies against transformers' own classes, row by row."""

from __future__ import annotations

from traceback import extract_tb

import pytest
from heads import list_class_cases, list_classes, list_recipes
from tiers import mark_heavy

from flopcalc.base.data import list_data_files
from flopcalc.measure.hf.verify import verify

LIGHT = ("llama", "bert")


@pytest.mark.filterwarnings("ignore")  # peft and torch advise on training, which this is not
@pytest.mark.parametrize("name", mark_heavy(list_data_files("examples"), LIGHT))
def test_classes(name: str) -> None:
    found = {}
    for named, kind in list_classes(name).items():
        cases = list(list_class_cases(name, named, kind))
        for config, example, workload in cases[:1] if name in LIGHT else cases:
            forward = {**workload, "phase": "forward"}
            for load, recipe in [(forward, {}), *((workload, recipe) for recipe in list_recipes(kind, named))]:
                try:
                    verdict = verify(config, load, recipe, example=example)
                except (ValueError, AttributeError) as error:
                    if "lora" in recipe and any("peft" in frame.filename for frame in extract_tb(error.__traceback__)):
                        continue  # PEFT has no adapter for one of this type's modules
                    raise
                if not verdict.is_equal:
                    found[f"{named} {load} {recipe}"] = verdict
    assert not found
