"""Presets bind alike raw and through transformers' own config class, and build the model that they describe."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from flopcalc import bind
from flopcalc.config import load_preset
from flopcalc.data import list_data_files, load_toml
from flopcalc.measure.models import build_model

PRESETS = [name for name, path in list_data_files("presets").items() if "alias" not in load_toml(path)]
ALIASES = [name for name in list_data_files("presets") if name not in PRESETS]


@pytest.mark.parametrize("name", PRESETS)
def test_raw_and_through_autoconfig(name: str) -> None:
    source = load_preset(list_data_files("presets")[name])
    config = AutoConfig.for_model(**source.config)
    raw, through = bind(source), bind(config)
    assert raw.stages == through.stages
    assert raw.vision == through.vision
    assert raw(2, 777).to_dict()["modules"] == through(2, 777).to_dict()["modules"]


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_equal_the_hf_model(name: str) -> None:
    source = load_preset(list_data_files("presets")[name])
    with torch.device("meta"):
        model = build_model(source.config, device="meta")
    assert bind(source).parameters()["total"] == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ALIASES)
def test_alias_is_its_target(name: str) -> None:
    target = load_toml(list_data_files("presets")[name])["alias"]
    assert target in PRESETS
    assert bind(name)(1, 128).to_dict() == bind(target)(1, 128).to_dict()
