"""The monitor in a loop of one's own on a real Accelerator: its numbers go to accelerator.log."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from accelerate.utils import compile_regions
from tiny import CONFIG, Witness, make_llama, make_pictures, make_qwen2_vl, make_text, pad, pad_pictures, read_log

from flopcalc import estimate_flops
from flopcalc.monitor import TrainingMonitor


def reset() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def reset_accelerate() -> Iterator[None]:
    """Accelerate keeps one state for the whole process."""
    reset()
    yield
    reset()


class Board(GeneralTracker):
    """Keeps what it is sent, and takes numbers only."""

    name = "board"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    @property
    def tracker(self) -> Any:
        return self.lines

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in values.values())
        self.lines.append((step or 0, values))


def train(
    folder: Path, accelerator: Accelerator, model: Any, data: Any, collate: Any, is_watched: bool = True
) -> list[float]:
    """A loop as Accelerate's guide writes it; the monitor's lines are those that speak of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(data, batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.init_trackers("a run")
    monitor = TrainingMonitor(folder, CONFIG, model=model) if is_watched else None
    losses: list[float] = []
    step = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if accelerator.sync_gradients and monitor is not None:
            step += 1
            monitor.log_step(step, epoch=0, loss=loss.detach(), grad_norm=None, learning_rate=0.05)
            values = {key: value for key, value in monitor.metrics().items() if isinstance(value, int | float)}
            accelerator.log({key: value for key, value in values.items() if math.isfinite(value)}, step=step)
    if monitor is not None:
        monitor.close()
    accelerator.end_training()
    return losses


KINDS: dict[str, dict[str, Any]] = {
    "padded text": {"micro": [1] * 6},
    "accumulation": {"gradient_accumulation_steps": 4, "micro": [4, 2]},
    "images": {"model": make_qwen2_vl, "data": make_pictures(6), "collate": pad_pictures, "micro": [1] * 3},
    "autocast": {"mixed_precision": "bf16", "micro": [1] * 6},
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_reach_the_tracker_and_training_is_unchanged(kind: str, tmp_path: Path) -> None:
    given = dict(KINDS[kind])
    make, micro = given.pop("model", make_llama), given.pop("micro")
    data, collate = given.pop("data", make_text(12)), given.pop("collate", pad)
    plain = train(tmp_path, Accelerator(cpu=True, **given), make(), data, collate, is_watched=False)

    board = Board()
    accelerator = Accelerator(cpu=True, log_with=board, **given)
    model = make()
    witness = Witness(model)
    assert train(tmp_path, accelerator, model, data, collate) == plain

    flops = witness.count_flops(micro)
    steps = read_log(tmp_path / "flopcalc.jsonl")
    assert [line["perf/model_flops"] for line in steps] == flops
    assert [step for step, _ in board.lines] == list(range(1, len(micro) + 1))
    assert [values["perf/model_flops"] for _, values in board.lines] == flops
    for (_, values), line in zip(board.lines, steps, strict=True):
        assert values["perf/mfu"] == line["perf/mfu"] > 0
        assert "training/grad_norm" not in values  # not known: left out, not 0


@pytest.mark.heavy
def test_a_model_that_accelerate_compiles_is_seen(tmp_path: Path) -> None:
    torch._dynamo.reset()
    eager = make_llama()
    witness = Witness(eager)
    train(tmp_path, Accelerator(cpu=True), eager, make_text(4), pad, is_watched=False)
    reset()
    train(tmp_path, Accelerator(cpu=True, dynamo_backend="eager"), make_llama(), make_text(4), pad)
    torch._dynamo.reset()
    assert [line["perf/model_flops"] for line in read_log(tmp_path / "flopcalc.jsonl")] == witness.count_flops([1, 1])


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own, while it compiles
def test_regions_that_accelerate_compiles_stay_compiled_though_the_model_was_given_before(tmp_path: Path) -> None:
    def run(model: Any, monitor: TrainingMonitor | None) -> tuple[list[float], int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        live = compile_regions(model, backend="eager")
        losses = []
        for number in (1, 2, 3):
            loss = live(**pad(make_text(2))).loss
            loss.backward()
            losses.append(loss.item())
            if monitor is not None:
                monitor.log_step(number, 0, losses[-1], None, 0.1)
        return losses, int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    model = make_llama().train()
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor:
        found = run(model, monitor)
    assert found == run(make_llama().train(), None)
    assert found[1] > 0
    flops = estimate_flops(make_llama(), batch=pad(make_text(2))).total
    assert [line["perf/model_flops"] for line in read_log(tmp_path / "flopcalc.jsonl")] == [flops] * 3


def test_a_block_for_each_step(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = make_llama()
    witness = Witness(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(make_text(6), batch_size=2, collate_fn=pad)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor:
        for batch in loader:
            with monitor.step(batch) as step:
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step.log(loss=loss.detach())
    assert [line["perf/model_flops"] for line in read_log(tmp_path / "flopcalc.jsonl")] == witness.count_flops([1] * 3)
