"""Measured cases are modelled once per model and recipe."""

from __future__ import annotations

import pytest
from fitted import DEVICE, LLAMA, SHIPPED, model

from flopcalc.measure.predictor.fit.cases import change_constants, make_machine, model_cases
from flopcalc.measure.predictor.runs import make_case


def test_a_model_is_bound_once_per_recipe_and_attention() -> None:
    cases = [
        make_case("a", "train", 1, 64),
        make_case("a", "train", 2, 32),
        make_case("a", "decode", 1, 2, context=16),
        make_case("a", "train", 1, 64, recompute="full"),
        make_case("a", "train", 1, 64, attention="eager"),
        make_case("b", "train", 1, 64),
    ]
    asked: list[str] = []
    found = model_cases(cases, lambda name: asked.append(name) or LLAMA, DEVICE)
    assert asked == ["a", "a", "a", "b"]
    assert [each.case for each in found] == cases
    for each in found:
        assert each[2:] == model(each.case, LLAMA)[2:]


def test_constants_of_products_cannot_be_changed() -> None:
    """A machine keeps their times."""
    machine = make_machine(SHIPPED)
    other = change_constants(machine, gaps={"train": 1.0, "forward": 1.0})
    assert other.constants == {**SHIPPED, "gaps": {"train": 1.0, "forward": 1.0}}
    assert machine.constants == SHIPPED
    with pytest.raises(ValueError, match="make another machine"):
        change_constants(machine, products={})
