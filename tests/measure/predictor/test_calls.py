"""What a host takes for one call of each kind: every kind runs and is what it says; how fast is no matter here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from flopcalc.measure.calibrate.tables import Bench
from flopcalc.measure.predictor import host_calls as calls
from lab.operators.dispatch import trace_operators

KINDS = (
    "pointwise", "view", "make", "fill", "cast", "copy", "cat", "reduce", "norm", "softmax", "gather", "scatter",
    "sort", "product", "attention", "attention_masked",
)  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench("cpu")


def test_every_kind_has_its_unit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_ROUNDS", 3)
    monkeypatch.setattr(calls, "_CALLS", 2)
    found = calls.measure_units(bench)
    assert tuple(found) == (*KINDS, "cleared", "tensor")
    assert all(0 < unit < math.inf for kind, unit in found.items() if kind in KINDS)
    assert all(abs(found[kind]) < math.inf for kind in ("cleared", "tensor"))  # differences of two times


@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_of_their_kind(bench: Bench, kind: str) -> None:
    """Each call dispatches one operator of its kind, and beside it views alone."""
    import torch

    model = torch.nn.Identity()
    for call in calls.make_calls(bench)[kind]:

        def forward(call: Callable[[], Any] = call) -> None:
            call()

        seen = [event.kind for event in trace_operators(model, forward).events]
        seen = [each for each in seen if each != "view" or kind == "view"]
        assert len(seen) == 1
        assert seen[0] == kind or seen[0].startswith(f"{kind}_")


def test_a_unit_is_the_middle_ratio_to_an_addition_beside_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that slows down slows both: pairs of additions around each call, in turns."""
    pace = iter([1.0] * 3 + [5.0] * 3 + [1.0, 30.0, 1.0] + [2.0] * 3 + [1.0] * 3)
    monkeypatch.setattr(calls, "_ROUNDS", 5)
    monkeypatch.setattr(calls, "_time", lambda _, call: call() * next(pace))
    assert calls._compare(bench, lambda: 3.0, lambda: 1.5) == pytest.approx(2.0)
