"""Loops that give odd values, fail midway, read ahead or forget to close: no record is lost, and no count is wrong."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop import Clock, make_model, update, work
from tiny import CONFIG, list_hooks, read_log

from flopcalc import estimate_flops
from flopcalc.monitor import TrainingMonitor
from flopcalc.monitor.values import find_whole

STEPS = 30
BATCH = {"input_ids": torch.arange(3, 11).reshape(2, 4), "labels": torch.arange(3, 11).reshape(2, 4)}


def make_monitor(folder: Path, model: Any = None, **changes: Any) -> TrainingMonitor:
    return TrainingMonitor(folder, {"monitoring": {**CONFIG["monitoring"], **changes}}, model=model)


def read_steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_log(folder / "flopcalc.jsonl") if line["type"] == "step"]


def in_inference(value: float) -> torch.Tensor:
    with torch.inference_mode():
        return torch.tensor(value) + 0


class Distributed:
    """A DTensor as far as it is looked at."""

    is_cuda, requires_grad = False, False

    def __init__(self, is_whole: bool) -> None:
        self.placements = [self]
        self._is_whole = is_whole

    def is_replicate(self) -> bool:
        return self._is_whole

    def to_local(self) -> torch.Tensor:
        return torch.tensor(0.5)

    def detach(self) -> Distributed:
        raise AssertionError("ranks would talk")


@pytest.mark.parametrize(
    ("make", "is_number"),
    [
        (float, True),
        (np.float32, True),
        (np.float64, True),
        (torch.tensor, True),
        (lambda value: torch.tensor(value, dtype=torch.bfloat16), True),
        (lambda value: torch.tensor([value]), True),
        (in_inference, True),
        (lambda value: torch.tensor([value, value]), False),
        (lambda _: "text", False),
        (lambda value: [value], False),
        (lambda _: None, None),
    ],
)
def test_every_step_has_its_record(make: Callable[[float], Any], is_number: bool | None, tmp_path: Path) -> None:
    model = make_model()
    monitor = make_monitor(tmp_path, model)
    for number in range(1, STEPS + 1):
        work(model, BATCH)
        if is_number is False and number == 1:
            with pytest.warns(RuntimeWarning, match="is no number, and left out"):
                monitor.log_step(number, 0, make(0.5), None, 0.1)
        else:
            monitor.log_step(number, 0, make(0.5), None, 0.1)
    metrics = monitor.metrics()
    monitor.close()
    assert math.isnan(metrics["training/grad_norm"])  # not given
    assert (metrics["training/loss"] == 0.5) is bool(is_number)
    records = read_steps(tmp_path)
    assert [record["global_step"] for record in records] == list(range(1, STEPS + 1))
    assert {record["training/loss"] for record in records} == {0.5 if is_number else None}
    assert {record["perf/model_flops"] for record in records} == {estimate_flops(model, batch=BATCH).total}


def test_one_odd_value_takes_no_other_with_it(tmp_path: Path) -> None:
    model = make_model()
    monitor = make_monitor(tmp_path, model)
    with pytest.warns(RuntimeWarning, match="is no number, and left out"):  # noqa: PT031 - whoever digests says it
        for number in range(1, STEPS + 1):
            work(model, BATCH)
            monitor.log_step(number, 0, torch.ones(2) if number == 10 else torch.tensor(float(number)), 1.0, 0.1)
        monitor.close()
    expected = [None if number == 10 else number for number in range(1, STEPS + 1)]
    assert [record["training/loss"] for record in read_steps(tmp_path)] == expected


def test_one_value_of_inference_mode_takes_no_other_with_it(tmp_path: Path) -> None:
    model = make_model()
    monitor = make_monitor(tmp_path, model)
    for number in range(1, STEPS + 1):
        work(model, BATCH)
        monitor.log_step(number, 0, in_inference(10.0) if number == 10 else torch.tensor(float(number)), 1.0, 0.1)
    monitor.close()
    assert [record["training/loss"] for record in read_steps(tmp_path)] == list(range(1, STEPS + 1))


def test_one_value_that_cannot_be_read_takes_no_other_with_it(tmp_path: Path) -> None:
    model = make_model()
    monitor = make_monitor(tmp_path, model)
    escaped: list[torch.Tensor] = []
    torch.func.vmap(lambda x: escaped.append(x * 2) or x)(torch.ones(1))  # type: ignore[func-returns-value]
    for number in range(1, STEPS + 1):
        work(model, BATCH)
        if number == 10:
            with pytest.warns(RuntimeWarning, match="failed in log_step|is no number, and left out"):
                monitor.log_step(number, 0, escaped[0], 1.0, 0.1)
        else:
            monitor.log_step(number, 0, torch.tensor(float(number)), 1.0, 0.1)
    monitor.close()
    expected = [None if number == 10 else number for number in range(1, STEPS + 1)]
    assert [record["training/loss"] for record in read_steps(tmp_path)] == expected


def test_an_array_that_is_filled_anew_is_read_when_it_is_given(tmp_path: Path) -> None:
    model = make_model()
    monitor = make_monitor(tmp_path, model)
    loss = np.zeros(())
    for number in range(1, STEPS + 1):
        work(model, BATCH)
        loss[...] = number
        monitor.log_step(number, 0, loss, 1.0, 0.1)
    monitor.close()
    assert [record["training/loss"] for record in read_steps(tmp_path)] == list(range(1, STEPS + 1))


class Marked(torch.Tensor):
    """As torchvision's images."""


def test_tensors_of_a_kind_of_their_own_are_counted(tmp_path: Path) -> None:
    model = make_model()
    monitor = make_monitor(tmp_path, model)
    batch = {**BATCH, "input_ids": BATCH["input_ids"].as_subclass(Marked)}
    for number in range(1, 4):
        work(model, batch)
        monitor.log_step(number, 0, 0.5, 1.0, 0.1)
    monitor.close()
    flops = estimate_flops(model, batch=BATCH).total
    assert [record["perf/model_flops"] for record in read_steps(tmp_path)] == [flops] * 3


def test_a_tensor_that_is_filled_anew_is_read_when_it_is_given(tmp_path: Path) -> None:
    model = make_model()
    monitor = make_monitor(tmp_path, model)
    rate = torch.tensor(0.0)
    for number in range(1, STEPS + 1):
        work(model, BATCH)
        rate.fill_(number)
        monitor.log_step(number, 0, 0.5, 1.0, rate)
        rate.zero_()
    monitor.close()
    assert [record["training/lr"] for record in read_steps(tmp_path)] == list(range(1, STEPS + 1))


def test_no_graph_is_kept_alive(tmp_path: Path) -> None:
    model = make_model()
    monitor = make_monitor(tmp_path, model)
    weight = torch.ones((), requires_grad=True)
    for number in range(1, 9):
        work(model, BATCH)
        loss = weight * number
        monitor.log_step(number, weight * 0, loss if number > 4 else loss.detach(), weight * 2, weight * 3)
        watched = weakref.ref(loss)
    del loss
    assert watched() is None
    monitor.close()
    assert [record["training/loss"] for record in read_steps(tmp_path)] == list(range(1, 9))
    assert [read_steps(tmp_path)[-1][f"training/{key}"] for key in ("epoch", "grad_norm", "lr")] == [0, 2, 3]


def test_a_distributed_value_is_read_only_where_it_is_whole() -> None:
    assert float(find_whole(Distributed(True))) == 0.5
    assert find_whole(Distributed(False)) is None


def test_a_failed_pass_is_not_counted_though_an_evaluation_follows(tmp_path: Path) -> None:
    model = make_model()
    monitor = make_monitor(tmp_path, model)
    for number in range(1, 7):
        if number in (2, 5):
            with pytest.raises(ValueError, match="exactly one of"):
                model(**BATCH, inputs_embeds=torch.ones(2, 4, 3))
            model.eval()
            with torch.no_grad():
                model(**BATCH)
            model.train()
        work(model, BATCH)
        monitor.log_step(number, 0, 0.5, 1.0, 0.1)
    monitor.close()
    assert {record["perf/model_flops"] for record in read_steps(tmp_path)} == {estimate_flops(model, batch=BATCH).total}


def test_the_step_after_a_block_that_raised(tmp_path: Path) -> None:
    model = make_model()
    monitor = make_monitor(tmp_path, model)
    for number in range(1, 6):
        with monitor.step() as step:
            work(model, BATCH)
            step.log(loss=0.5)
        if number == 3:
            with pytest.raises(KeyError), monitor.step():  # noqa: PT012
                model.forward = lambda **_: {}["nothing"]  # type: ignore[method-assign]
                model(**BATCH)
            del model.forward
    monitor.close()
    assert [record["perf/model_flops"] for record in read_steps(tmp_path)] == [
        estimate_flops(model, batch=BATCH).total
    ] * 5


def test_what_a_block_logs_adds_up(tmp_path: Path) -> None:
    monitor = make_monitor(tmp_path, "llama-3.1-8b", peak_flops_per_s=1e30)
    with monitor.step({"input_ids": [[1] * 8]}) as step:
        step.log(loss=0.5, step=7)
        step.log(learning_rate=0.1)
    monitor.close()
    (record,) = read_steps(tmp_path)
    assert [record[key] for key in ("global_step", "training/loss", "training/lr")] == [7, 0.5, 0.1]


def test_a_loader_that_reads_ahead_is_not_believed(tmp_path: Path) -> None:
    model = make_model()
    monitor = make_monitor(tmp_path, model)
    batches = [{**BATCH, "attention_mask": torch.tensor([[1] * 4, [1] * n + [0] * (4 - n)])} for n in (1, 2, 3, 4)]
    watched = iter(monitor.watch(batches))
    ahead = next(watched)
    with pytest.warns(RuntimeWarning, match="a second batch before the model ran on the first"):  # noqa: PT031
        for number in range(1, 5):
            batch, ahead = ahead, next(watched, {})
            work(model, batch)
            monitor.log_step(number, 0, 0.5, 1.0, 0.1)
    monitor.close()
    found = [record["perf/model_flops"] for record in read_steps(tmp_path)]
    assert found == [estimate_flops(model, batch=batch).total for batch in batches]


def test_another_models_dtype(tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"mfu_calculation_mode": "estimate", "device": "h200"}})
    seen = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(0.0).to(dtype)
        monitor.attach(model)
        for _ in range(4):
            work(model, BATCH)
            monitor.log_step(1, 0, 0.5, 1.0, 0.1)
        metrics = monitor.metrics()
        seen.append((metrics["perf/dtype"], metrics["perf/peak_flops_per_s"]))
    monitor.close()
    assert seen[0][0] == "fp32"
    assert seen[1] == ("bf16", 989.4e12)


def test_reports_and_dataset_values_keep_their_order(tmp_path: Path) -> None:
    model = make_model()
    monitor = make_monitor(tmp_path, model, dataset_metrics_every=1)
    for number in range(1, 11):
        work(model, BATCH)
        monitor.log_step(number, 0, 0.5, 1.0, 0.1)
        if number == 5:
            monitor.report(loss=77)
            monitor.log_datasets({"web": {"loss": torch.tensor(3.0)}})
    monitor.close()
    records = read_steps(tmp_path)
    assert [record["training/loss"] for record in records] == [0.5] * 5 + [77] + [0.5] * 5
    assert [record["global_step"] for record in records] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10]
    assert [record.get("dataset/web/loss") for record in records[:7]] == [None] * 6 + [3.0]


def test_a_dropped_monitor_leaves_its_records_and_nothing_on_the_model(tmp_path: Path) -> None:
    model = make_model()

    def train() -> None:
        monitor = make_monitor(tmp_path, model)
        for number in range(1, STEPS + 1):
            work(model, BATCH)
            monitor.log_step(number, 0, 0.5, 1.0, 0.1)

    train()
    gc.collect()
    assert [record["global_step"] for record in read_steps(tmp_path)] == list(range(1, STEPS + 1))
    assert list_hooks(model) == []


@pytest.mark.heavy
def test_measuring_every_step_is_said(tmp_path: Path) -> None:
    model = make_model()
    monitor = make_monitor(tmp_path, model, mfu_calculation_mode="profiler", flops_profile_freq=1)
    with pytest.warns(RuntimeWarning, match="64 steps in a row were measured"):  # noqa: PT031 - whoever digests says it
        for number in range(1, 70):
            work(model, BATCH)
            monitor.log_step(number, 0, 0.5, 1.0, 0.1)
        monitor.close()


def test_names_that_do_not_match_the_samples_are_in_no_dataset(tmp_path: Path) -> None:
    monitor = make_monitor(tmp_path, "llama-3.1-8b", peak_flops_per_s=1e30, dataset_metrics_every=1)
    with pytest.warns(RuntimeWarning, match="dataset names 1 sequences of a step that has 2"):  # noqa: PT031 - as above
        for names in (["a", "b"], ["a"], ["b", "b"]):
            with monitor.step({"input_ids": [[1] * 8] * 2}, dataset=names) as step:
                step.log(loss=0.5)
        monitor.close()
    last = read_steps(tmp_path)[-1]
    assert [last[f"dataset/{name}/samples"] for name in "ab"] == [1, 3]
    assert [last[f"dataset/{name}/share"] for name in "ab"] == [0.25, 0.75]


def test_a_mask_in_an_array_that_is_filled_anew(tmp_path: Path, clock: Clock) -> None:
    monitor = make_monitor(tmp_path, "llama-3.1-8b", peak_flops_per_s=1e30)
    mask = np.ones((1, 8), dtype=np.int64)
    expected = []
    for length in (2, 4, 8):
        mask[:] = np.arange(8) < length
        expected.append(estimate_flops("llama-3.1-8b", lengths=[length]).total)
        with monitor.step({"input_ids": np.ones((1, 8), dtype=np.int64), "attention_mask": mask}):
            clock.tick(1)
    monitor.close()
    assert [record["perf/model_flops"] for record in read_steps(tmp_path)] == expected


def test_a_step_that_was_begun_and_given_up(tmp_path: Path) -> None:
    monitor = make_monitor(tmp_path, "llama-3.1-8b", peak_flops_per_s=1e30)
    batch = {"input_ids": [[1] * 8]}
    monitor.begin_step(batch)  # and its loop raised
    monitor.begin_step(batch)
    monitor.end_step()
    monitor.report(loss=0.5)
    assert monitor.metrics()["perf/model_flops"] == estimate_flops("llama-3.1-8b", batch=batch).total
    monitor.close()


def test_batches_that_change_their_length(tmp_path: Path) -> None:
    model = make_model()
    monitor = make_monitor(tmp_path, model)
    expected = []
    for number, length in enumerate([4, 4, 4, 5, 4, 6, 6, 4, 4], 1):
        ids = torch.full((2, length), 5)
        loss = work(model, {"input_ids": ids, "labels": ids})
        update(model)
        expected.append(estimate_flops(model, batch_size=2, seq_len=length).total)
        monitor.log_step(number, 0, loss, 1.0, 0.1)
    monitor.close()
    assert [record["perf/model_flops"] for record in read_steps(tmp_path)] == expected


@pytest.mark.filterwarnings("ignore")  # opacus and torch advise on training, which this is not
@pytest.mark.parametrize("name", ["GradSampleModule", "GradSampleModuleFastGradientClipping"])
def test_a_model_that_opacus_wraps(name: str, tmp_path: Path) -> None:
    model = make_model()
    expected = estimate_flops(model, batch=BATCH).total
    wrapped = getattr(pytest.importorskip("opacus.grad_sample"), name)(model, strict=False)
    with make_monitor(tmp_path, wrapped) as monitor:
        for number in range(1, 4):
            monitor.log_step(number, 0, work(wrapped, BATCH), 1.0, 0.1)
            wrapped.zero_grad()
    assert [record["perf/model_flops"] for record in read_steps(tmp_path)] == [expected] * 3
