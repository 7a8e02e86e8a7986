"""Sampling runs of tiny pipelines that make a video in sections, or read text twice, as in test_pipeline_runs."""

from __future__ import annotations

import pytest
from tiers import mark_heavy

pytest.importorskip("diffusers")
import torch
from diffusion import TINY
from test_pipeline_runs import EULER, PLAIN, TEXT, TWO, Case, count_both

from flopcalc import estimate_flops

_SIDES = ("", "negative_")
_SIZE = {"width": 64, "height": 96}


_EMBEDS = {f"{side}prompt_embeds": torch.randn(1, 2, TEXT, 10) for side in _SIDES}
CASES = {
    "bria fibo 2": Case(
        "BriaFibo2Pipeline", "BriaFibo2Transformer2DModel", {"in_channels": 2}, "AutoencoderKLFlux2", {}, EULER,
        scale="always", text=0, asked={"text": TEXT}, more={**_SIZE, **_EMBEDS},
    ),
    "helios": Case(
        "HeliosPipeline", "HeliosTransformer3DModel", TWO, "AutoencoderKLWan", PLAIN, EULER, frames=50, scale="always",
        size=(32, 48), steps=2,
    ),
}  # fmt: skip
RUNS = [(name, guided) for name in CASES for guided in (True, False) if CASES[name].scale or not guided]


@pytest.mark.filterwarnings("ignore")  # of third parties: sizes are tiny, and parts are missing
@pytest.mark.parametrize(("name", "guided"), mark_heavy(RUNS))
def test_a_run_is_counted_exactly(name: str, guided: bool) -> None:
    ours, theirs = count_both(CASES[name], guided)
    assert ours == theirs


def test_a_training_step_is_one_section() -> None:
    config = {
        "_class_name": "HeliosPipeline",
        "transformer": {"_class_name": "HeliosTransformer3DModel", **TINY["HeliosTransformer3DModel"]},
    }
    assert estimate_flops(config).total == estimate_flops(config, videos=[(640, 384, 33)]).total
    run = {"sampling_steps": 1, "guidance": "off"}
    two, one = (estimate_flops(config, videos=[(640, 384, frames)], **run).total for frames in (34, 5))
    assert two == 2 * one
