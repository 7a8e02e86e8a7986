"""Steps whose routers deal evenly: the hook that makes them so, and what was measured beside what we count."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT

from flopcalc.measure.calibrate.tables import Bench

sys.path.insert(0, str(ROOT / "benchmarks"))
import even_routers

TINY: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 5,
    "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip


def test_the_hook_deals_evenly_and_the_router_still_trains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(even_routers, "CONFIGS", {"tiny": TINY})
    monkeypatch.setattr(even_routers, "CASES", {"tiny 1x9": ("tiny", 1, 9)})
    monkeypatch.setattr("flopcalc.measure.predictor.narrow.narrow", lambda config, _: config)
    seen: list[Any] = []

    def count(self: Bench, step: Any) -> int:  # noqa: ARG001
        step()
        return 12345

    monkeypatch.setattr(Bench, "count_executed", count)
    plain = even_routers.deal_evenly
    monkeypatch.setattr(even_routers, "deal_evenly", lambda model: seen.append((model, plain(model))))
    even_routers.measure(tmp_path / "out.json", "cpu", is_tiny=True)
    kept = json.loads((tmp_path / "out.json").read_text())
    assert kept["cases"] == [{"case": "tiny 1x9", "executed_flops": 12345}]
    assert kept["failures"] == []
    ((model, routers),) = seen
    assert routers == 2
    rows: list[list[int]] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(
            lambda own, given: rows.append(torch.bincount(given[1].flatten(), minlength=own.num_experts).tolist())
        )
        assert layer.mlp.gate.weight.grad.abs().sum() > 0
    with torch.no_grad():
        model(input_ids=torch.arange(9)[None])
    assert rows == [[4, 4, 4, 3, 3]] * 2
    with pytest.raises(ValueError, match="no module with experts"):
        plain(torch.nn.Linear(2, 2))


def test_measured_steps_are_within_a_percent_but_one() -> None:
    """For new shapes the count is the one that was committed before they were measured."""
    errors = {name: error for name, _, _, error in even_routers.list_errors(even_routers.MEASURED)}
    assert set(errors) == set(even_routers.CASES)
    assert {name for name, error in errors.items() if abs(error) > 0.01} == {"mixtral-1280 1x311"}
    assert sum(abs(error) < 1e-4 for error in errors.values()) == 5


def test_predictions_of_new_shapes_are_those_of_the_code() -> None:
    said = json.loads(even_routers.PREDICTED.read_text())["executed_flops"]
    assert len(said) == len(even_routers.NEW) == 6
    assert said == {name: even_routers.count(name) for name in said}
