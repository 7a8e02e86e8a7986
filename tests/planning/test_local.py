"""local_flops: FLOPs per GPU of a global batch, exactly, and of one pipeline stage."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from tiers import mark_heavy

from flopcalc import Estimate, FlopcalcError, WorkloadError, bind, estimate_flops, local_flops
from flopcalc.planning.local import split_evenly

MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {"batch_size": 8, "seq_len": 2048},
    "deepseek-v3": {"batch_size": 2, "seq_len": 512},
    "qwen2-vl": {"batch_size": 1, "seq_len": 1024, "image_grid_thw": [(1, 36, 52)]},
    "mixtral-8x7b": {"batch_size": 4, "seq_len": 128, "grad_accum": 3, "recompute": "full", "convention": "hardware"},
    "qwen3-next-80b-a3b": {"batch_size": 1, "seq_len": 256, "phase": "prefill"},
}


def make(name: str) -> Estimate:
    return estimate_flops(name, **MODELS[name])


def test_every_degree_divides_and_nothing_is_rounded() -> None:
    estimate = make("llama-3.1-8b")
    assert local_flops(estimate) == estimate.total
    assert local_flops(estimate, tp=2, cp=4, pp=8, dp=16) == Fraction(estimate.total, 1024)
    found = local_flops(estimate, dp=7)
    assert isinstance(found, Fraction)
    assert found * 7 == estimate.total
    assert found.denominator == 7


def test_stages_of_a_llama() -> None:
    estimate = make("llama-3.1-8b")
    head = sum(estimate.by_component()["lm_head"])
    layers = estimate.total - head
    for stage in range(4):
        expected = Fraction(layers, 4) + (head if stage == 3 else 0)
        assert local_flops(estimate, 2, pp=4, stage=stage) == expected / 2


@pytest.mark.parametrize("name", mark_heavy(MODELS, ["qwen2-vl"]))
@pytest.mark.parametrize("pp", [1, 2, 3, 8])
def test_stages_sum_to_the_whole(name: str, pp: int) -> None:
    estimate = make(name)
    stages = [local_flops(estimate, tp=2, pp=pp, dp=3, stage=stage) for stage in range(pp)]
    assert sum(stages) * 6 == estimate.total
    assert sum(stages) / pp == local_flops(estimate, tp=2, pp=pp, dp=3)


def test_towers_are_in_the_first_stage() -> None:
    text = estimate_flops("qwen2-vl", seq_len=1024)
    seen = make("qwen2-vl")
    assert local_flops(seen, pp=2, stage=1) == local_flops(text, pp=2, stage=1)
    assert local_flops(seen, pp=2, stage=0) - local_flops(text, pp=2, stage=0) == seen.total - text.total


@pytest.mark.parametrize(
    ("layers", "pp", "expected"),
    [(32, 4, [8] * 4), (61, 4, [15, 16, 15, 15]), (5, 4, [1, 2, 1, 1]), (34, 8, [4, 4, 4, 5, 5, 4, 4, 4])],
)
def test_layers_are_split_evenly(layers: int, pp: int, expected: list[int]) -> None:
    assert split_evenly(layers, pp) == expected
    assert sum(expected) == layers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 0}, "tp must be at least 1, not 0"),
        ({"cp": 1.5}, "cp must be a whole number, not 1.5"),
        ({"dp": True}, "dp must be a whole number, not True"),
        ({"pp": "4.5"}, "pp: '4.5' is not a whole number"),
        ({"pp": 4, "stage": 4}, "stage 4 is not one of pp = 4: stages are 0 to 3"),
        ({"stage": -1}, "stage must be at least 0, not -1"),
        ({"pp": 33, "stage": 0}, "llama-3.1-8b has 32 language layers: too few for pp = 33 stages"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        local_flops(make("llama-3.1-8b"), **arguments)
    assert str(caught.value) == message


def test_what_is_no_estimate() -> None:
    with pytest.raises(FlopcalcError, match="an estimate is what estimate_flops"):
        local_flops(10)  # type: ignore[arg-type]


def test_a_traced_model_has_no_stages() -> None:
    traced = bind(torch.nn.Linear(8, 8), {"input": torch.randn(2, 5, 8)})(2, 5)
    assert local_flops(traced, tp=2) == Fraction(traced.total, 2)
    with pytest.raises(WorkloadError, match="0 language layers: too few for pp = 2"):
        local_flops(traced, pp=2, stage=0)
