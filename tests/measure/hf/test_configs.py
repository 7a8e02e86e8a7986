"""Every example binds alike as it is written and as transformers' own config class fills it in."""

from __future__ import annotations

import re
from typing import Any

import pytest
from places import ROOT
from tiers import LIGHT_TYPES, mark_heavy

from flopcalc import bind
from flopcalc.base.data import list_data_files
from flopcalc.measure.hf.compare import make_load
from flopcalc.measure.hf.examples import _KEYS, find_example, list_cases

SPECS_PAGE = ROOT / "docs" / "specs.md"


def count(config: dict[str, Any], workload: dict[str, Any]) -> tuple[int, dict[str, int]]:
    estimate = bind(config, convention="full").estimate(make_load(workload))
    return estimate.total, estimate.parameters


@pytest.mark.filterwarnings("ignore")  # configs of other releases are warned about
@pytest.mark.parametrize("name", mark_heavy(list_data_files("examples"), LIGHT_TYPES))
def test_raw_and_through_auto_config(name: str) -> None:
    from flopcalc.measure.hf.models import make_config

    example = find_example(name)
    for config in example.configs:
        named = {"architectures": [example.architecture]} if example.architecture else {}
        filled = make_config(config, example.choose_class(bind({**config, **named}).spec.architecture)).to_dict()
        for workload, _ in list(list_cases(example, config))[:3]:
            assert count({**filled, **named}, workload) == count({**config, **named}, workload)


def test_keys_of_an_example_are_documented() -> None:
    words = set(re.findall(r"`\[*(\w+)\]*`", SPECS_PAGE.read_text(encoding="utf-8")))
    assert not _KEYS - words
