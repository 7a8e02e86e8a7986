"""Training loops like those of diffusers' own scripts, with the monitor: what they execute is counted exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loop import Clock
from tiers import mark_heavy
from tiny import CONFIG, read_log

pytest.importorskip("diffusers")

from diffusion import TINY, apply_recipe, build, count_step, make_inputs

from flopcalc.monitor import TrainingMonitor

LORA = {"lora": {"r": 2, "targets": ["to_q", "to_k", "to_v", "to_out.0"]}}
GRIDS = {"UNet2DConditionModel": (1, 4, 8), "FluxTransformer2DModel": (1, 4, 4), "WanTransformer3DModel": (3, 4, 4)}

CASES = [(name, trains) for name in GRIDS for trains in ("all", "lora")]


def call(model: torch.nn.Module, name: str, inputs: dict[str, Any]) -> torch.Tensor:
    """As the scripts call it: a UNet by position, a transformer by names."""
    if name != "UNet2DConditionModel":
        return model(**inputs, return_dict=False)[0]
    return model(inputs["sample"], inputs["timestep"], inputs["encoder_hidden_states"], return_dict=False)[0]


@pytest.mark.parametrize(("name", "trains"), mark_heavy(CASES, [("UNet2DConditionModel", "lora")]))
def test_a_training_loop_is_counted_exactly(name: str, trains: str, tmp_path: Path, clock: Clock) -> None:
    torch.manual_seed(0)
    model = build(name, TINY[name])
    apply_recipe(model, LORA if trains == "lora" else {})
    model.train()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    batches = [make_inputs(name, TINY[name], batch, text, GRIDS[name]) for batch, text in ((2, 5), (1, 7))]
    monitor = TrainingMonitor(tmp_path, CONFIG, model=model)
    for step, inputs in enumerate(batches, 1):
        out = call(model, name, inputs)
        loss = torch.nn.functional.mse_loss(out.float(), torch.randn_like(out))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick(1)
        monitor.log_step(step, 0, loss.item(), norm.item(), 1e-4)
    monitor.close()
    records = read_log(tmp_path / "flopcalc.jsonl")
    counted = [count_step(model, inputs, train=True) for inputs in batches]
    assert [record["perf/model_flops"] for record in records] == [each.forward + each.backward for each in counted]
    assert [record["perf/images_per_second"] for record in records] == [2, 1]
