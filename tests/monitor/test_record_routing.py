"""The monitor writes rows per expert to a file that `routing` reads."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flopcalc import estimate_flops
from flopcalc.hardware.routing import KEY, Routing
from flopcalc.monitor import Settings, TrainingMonitor, load_settings

QUIET = {"monitoring": {"mfu_calculation_mode": "estimate", "sinks": []}}


def make_model() -> Any:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            num_local_experts=4,
            num_experts_per_tok=2,
            pad_token_id=0,
        )
    )


def train(model: Any, seed: int = 1) -> None:
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()


def wait_for_writer() -> None:
    for thread in threading.enumerate():
        if "_write" in thread.name:
            thread.join(30)


def test_rows_of_one_pass_are_written(tmp_path: Path) -> None:
    model, path = make_model(), tmp_path / "rows.json"
    with TrainingMonitor(tmp_path, QUIET, model=model) as monitor:
        monitor.record_routing(path)
        model.eval()
        with torch.no_grad():
            model(input_ids=torch.tensor([[5, 6]]))
        model.train()
        with monitor.step():
            train(model)
        wait_for_writer()
        kept = path.read_text()
        with monitor.step():
            train(model, seed=2)
        wait_for_writer()
    assert path.read_text() == kept  # one pass alone
    rows = json.loads(kept)[KEY]
    assert [sum(layer) for layer in rows] == [2 * 2 * 9] * 2
    assert json.loads(kept)["modules"] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    found = estimate_flops(model.config, batch_size=2, seq_len=9, routing=path)
    assert found.to_dict()["routing"] == "rows of 4 experts in 2 layers"
    assert not any(layer.mlp.experts._forward_pre_hooks for layer in model.model.layers)


def test_training_stays_the_same(tmp_path: Path) -> None:
    plain, watched = make_model(), make_model()
    train(plain)
    with TrainingMonitor(tmp_path, QUIET, model=watched) as monitor:
        monitor.record_routing(tmp_path / "rows.json")
        copied = copy.deepcopy(watched)
        train(watched)
        train(copied)
        wait_for_writer()
    for one, other, third in zip(plain.parameters(), watched.parameters(), copied.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
        assert torch.equal(one.grad, third.grad)


def test_a_model_without_experts_is_said(tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path, QUIET, model=torch.nn.Linear(2, 2))
    with pytest.warns(RuntimeWarning, match="no module `experts`"):
        monitor.record_routing(tmp_path / "rows.json")
    monitor.close()
    assert not (tmp_path / "rows.json").exists()


@pytest.mark.parametrize(
    ("given", "routing"), [("even", Routing()), ("spread:0.5", Routing(0.5)), ([1, 3], Routing(None, ((1, 3),)))]
)
def test_the_setting_is_read(given: Any, routing: Routing) -> None:
    settings, _ = load_settings({"monitoring": {"routing": given}})
    assert settings.routing == routing
    assert Settings().routing is None


def test_the_setting_reaches_the_count(tmp_path: Path) -> None:
    model = make_model()
    config = {"monitoring": {**QUIET["monitoring"], "routing": "spread:0.4"}}
    with TrainingMonitor(tmp_path, config, model=model) as monitor:
        with monitor.step():
            train(model)
        intake = monitor._trained.intake
        assert intake is not None
        assert intake.estimator.routing == Routing(0.4)
