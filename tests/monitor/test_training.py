"""TrainingMonitor in plain loops under a clock that the test moves: every number is exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from loop import Clock, make_batches, make_model, work
from peft import LoraConfig, get_peft_model
from tiers import mark_heavy
from tiny import CONFIG, list_hooks, make_llama, make_pictures, make_qwen2_vl, make_text, pad, pad_pictures, read_log

from flopcalc import ConfigError, bind, estimate_flops
from flopcalc.monitor import TrainingMonitor
from flopcalc.monitor.keys import CONTEXT, CORE

PEAK = CONFIG["monitoring"]["peak_flops_per_s"]


def configure(**changes: Any) -> dict[str, Any]:
    return {"monitoring": {**CONFIG["monitoring"], **changes}}


def make_monitor(folder: Path, model: Any = None, **changes: Any) -> TrainingMonitor:
    return TrainingMonitor(folder, configure(**changes), model=model)


def read_steps(monitor: TrainingMonitor) -> list[dict[str, Any]]:
    monitor.close()
    return read_log(Path(monitor.output_dir) / "flopcalc.jsonl")


def count(model: Any, *batches: Mapping[str, Any]) -> int:
    return sum(estimate_flops(model, batch=batch).total for batch in batches)


def count_real(*batches: Mapping[str, Any]) -> int:
    return sum(int(batch["attention_mask"].sum()) for batch in batches)


# --- Ways to tell a step ----------------------------------------------------------------------------------------------


def by_log_step(monitor: TrainingMonitor, model: Any, steps: list[list[Any]], tick: Callable[[], None]) -> None:
    for number, batches in enumerate(steps, 1):
        work(model, *batches)
        tick()
        monitor.log_step(number, 0, 0.5, 1.0, 0.1)


def by_block(monitor: TrainingMonitor, model: Any, steps: list[list[Any]], tick: Callable[[], None]) -> None:
    for batches in steps:
        with monitor.step(batches) as step:
            work(model, *batches)
            tick()
            step.log(loss=0.5, grad_norm=1.0, learning_rate=0.1, epoch=0)


def by_block_and_log_step(
    monitor: TrainingMonitor, model: Any, steps: list[list[Any]], tick: Callable[[], None]
) -> None:
    for number, batches in enumerate(steps, 1):
        with monitor.step():
            work(model, *batches)
            tick()
        monitor.log_step(number, 0, 0.5, 1.0, 0.1)


def by_log_step_in_block(
    monitor: TrainingMonitor, model: Any, steps: list[list[Any]], tick: Callable[[], None]
) -> None:
    for number, batches in enumerate(steps, 1):
        with monitor.step(batches):
            work(model, *batches)
            tick()
            monitor.log_step(number, 0, 0.5, 1.0, 0.1)


def by_begin_and_end(monitor: TrainingMonitor, model: Any, steps: list[list[Any]], tick: Callable[[], None]) -> None:
    for batches in steps:
        monitor.begin_step()
        work(model, *batches)
        tick()
        monitor.end_step()
        monitor.report(loss=0.5, grad_norm=1.0, learning_rate=0.1, epoch=0)


def by_watched_loader(monitor: TrainingMonitor, model: Any, steps: list[list[Any]], tick: Callable[[], None]) -> None:
    loader = iter(monitor.watch([batch for batches in steps for batch in batches]))
    for number, batches in enumerate(steps, 1):
        for _ in batches:
            work(model, next(loader))
        tick()
        monitor.log_step(number, 0, 0.5, 1.0, 0.1)


@pytest.mark.parametrize(
    "tell", [by_log_step, by_block, by_block_and_log_step, by_log_step_in_block, by_begin_and_end, by_watched_loader]
)
def test_every_way_to_tell_a_step_gives_the_same_exact_numbers(tell: Any, tmp_path: Path, clock: Clock) -> None:
    model = make_model()
    rows = make_text(9)
    steps = [[pad(rows[:2])], [pad(rows[2:4]), pad(rows[4:7])], [pad(rows[7:])]]
    monitor = make_monitor(tmp_path, model)
    tell(monitor, model, steps, lambda: clock.tick(0.5))
    records = read_steps(monitor)
    assert [record["global_step"] for record in records] == [1, 2, 3]
    for record, batches in zip(records, steps, strict=True):
        flops = count(model, *batches)
        assert record["perf/model_flops"] == flops
        assert record["perf/step_time"] == 0.5
        assert record["perf/steps_per_second"] == 2.0
        assert record["perf/mfu"] == flops / (0.5 * PEAK)
        assert record["perf/mfu_percent"] == 100 * record["perf/mfu"]
        assert record["perf/tflops_per_gpu"] == pytest.approx(flops / 0.5 / 1e12, rel=1e-15)
        assert record["perf/tokens_per_second"] == 2 * count_real(*batches)
        assert record["perf/padded_tokens_per_second"] == 2 * sum(batch["input_ids"].numel() for batch in batches)
        assert record["perf/samples_per_second"] == 2 * sum(len(batch["input_ids"]) for batch in batches)
        assert record["perf/images_per_second"] == 0
        assert record["perf/data_time"] == 0
        assert record["training/loss"] == 0.5
        assert record["training/grad_norm"] == 1.0
        assert record["training/lr"] == 0.1
        assert record["training/epoch"] == 0
        assert record["perf/source"] == "estimate"
        assert record["perf/convention"] == "model"
        assert record["perf/peak_flops_per_s"] == PEAK
        assert record["perf/dtype"] == "fp32"
        assert record["perf/steps"] == 1


def test_a_report_covers_the_steps_since_the_last_one(tmp_path: Path, clock: Clock) -> None:
    model, batches = make_model(), make_batches(4)
    monitor = make_monitor(tmp_path, model)
    for number, batch in enumerate(batches, 1):
        work(model, batch)
        clock.tick(0.25 * number)
        monitor.end_step(number)
        if number in (1, 4):
            monitor.report(number)
    first, second = read_steps(monitor)
    assert (first["perf/steps"], second["perf/steps"]) == (1, 3)
    assert second["perf/step_time"] == 0.75
    assert second["perf/tokens_per_second"] == pytest.approx(count_real(*batches[1:]) / 2.25, rel=1e-15)
    assert second["perf/mfu"] == pytest.approx(count(model, *batches[1:]) / (2.25 * PEAK), rel=1e-15)


def test_ends_and_log_steps_may_alternate(tmp_path: Path, clock: Clock) -> None:
    model, batches = make_model(), make_batches(4)
    monitor = make_monitor(tmp_path, model)
    for number, batch in enumerate(batches, 1):
        work(model, batch)
        clock.tick(1)
        if number % 2:
            monitor.end_step(number)
        else:
            monitor.log_step(number, 0, 0.5, 1.0, 0.1)
    records = read_steps(monitor)
    assert [(record["global_step"], record["perf/steps"]) for record in records] == [(2, 2), (4, 2)]
    assert [record["perf/step_time"] for record in records] == [1, 1]


def test_a_block_that_nobody_reports_is_reported_without_values(tmp_path: Path, clock: Clock) -> None:
    model, batches = make_model(), make_batches(2)
    monitor = make_monitor(tmp_path, model)
    for batch in batches:
        with monitor.step(batch):
            work(model, batch)
            clock.tick(1)
    records = read_steps(monitor)
    assert [record["perf/model_flops"] for record in records] == [count(model, batch) for batch in batches]
    assert [record["training/loss"] for record in records] == [None, None]


def test_a_watched_batch_that_the_loop_splits_is_counted_once(tmp_path: Path, clock: Clock) -> None:
    model, batch = make_model(), pad(make_text(4))
    monitor = make_monitor(tmp_path, model)
    parts = []
    for whole in monitor.watch([batch]):
        parts = [{key: value[at : at + 2] for key, value in whole.items()} for at in (0, 2)]
        work(model, *parts)
        clock.tick(1)
        monitor.log_step(1, 0, 0.5, 1.0, 0.1)
    (record,) = read_steps(monitor)
    assert record["perf/model_flops"] == count(model, *parts)
    assert record["perf/samples_per_second"] == 4


def test_a_watched_loader_is_the_loader(tmp_path: Path) -> None:
    class Loader(list[int]):
        batch_size = 7

    monitor = make_monitor(tmp_path)
    watched: Any = monitor.watch(Loader([1, 2, 3]))
    assert list(watched) == [1, 2, 3]
    assert list(watched) == [1, 2, 3]
    assert len(watched) == 3
    assert watched.batch_size == 7
    with pytest.raises(AttributeError, match="nothing"):
        _ = watched.nothing
    monitor.close()


# --- Kinds of batches and models --------------------------------------------------------------------------------------


def make_padded() -> tuple[Any, list[Any]]:
    return make_llama().train(), make_batches(2)


def make_plain() -> tuple[Any, list[Any]]:
    ids = torch.arange(3, 27).reshape(2, 12)
    return make_llama().train(), [{"input_ids": ids, "labels": ids}, {"input_ids": ids[:, :5], "labels": ids[:, :5]}]


def make_packed_by_positions() -> tuple[Any, list[Any]]:
    ids = torch.arange(3, 15).reshape(1, 12)
    positions = torch.tensor([[*range(5), *range(4), *range(3)]])
    return make_llama().train(), [{"input_ids": ids, "labels": ids, "position_ids": positions}]


def make_packed_by_lengths() -> tuple[Any, list[Any]]:
    ids = torch.arange(3, 15).reshape(1, 12)
    positions = torch.tensor([[*range(5), *range(7)]])
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    batch = {
        "input_ids": ids, "labels": ids, "position_ids": positions, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds,
        "max_length_q": 7, "max_length_k": 7,
    }  # fmt: skip
    return make_llama().train(), [batch]


def make_images() -> tuple[Any, list[Any]]:
    rows = make_pictures(4)
    return make_qwen2_vl().train(), [pad_pictures(rows[:2]), pad_pictures(rows[2:])]


def make_lora() -> tuple[Any, list[Any]]:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return get_peft_model(make_llama(), config).train(), make_batches(2)


def make_frozen() -> tuple[Any, list[Any]]:
    model = make_llama().train()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model, make_batches(2)


def make_frozen_tower() -> tuple[Any, list[Any]]:
    model = make_qwen2_vl().train()
    model.model.visual.requires_grad_(False)
    return model, [pad_pictures(make_pictures(3))]


@pytest.mark.parametrize("is_given", [False, True], ids=["seen by the hook", "given"])
@pytest.mark.parametrize(
    "make",
    [
        make_padded,
        make_plain,
        make_packed_by_positions,
        make_packed_by_lengths,
        make_images,
        make_lora,
        make_frozen,
        make_frozen_tower,
    ],
)
def test_flops_and_sizes_are_those_of_the_batch(
    make: Callable[[], tuple[Any, list[Any]]], is_given: bool, tmp_path: Path, clock: Clock
) -> None:
    model, batches = make()
    monitor = make_monitor(tmp_path, model)
    for batch in batches:
        with monitor.step(batch if is_given else None):
            work(model, batch)
            clock.tick(1)
    records = read_steps(monitor)
    assert len(records) == len(batches)
    for record, batch in zip(records, batches, strict=True):
        load = estimate_flops(model, batch=batch).terms[0][1]
        assert record["perf/model_flops"] == count(model, batch)
        assert record["perf/tokens_per_second"] == load.tokens
        assert record["perf/padded_tokens_per_second"] == batch["input_ids"].numel()
        assert record["perf/samples_per_second"] == len(load.documents or batch["input_ids"])
        assert record["perf/images_per_second"] == len(batch.get("image_grid_thw", ()))


def test_samples_of_a_packed_row_are_its_documents(tmp_path: Path, clock: Clock) -> None:
    model, (batch,) = make_packed_by_positions()
    monitor = make_monitor(tmp_path, model)
    with monitor.step():
        work(model, batch)
        clock.tick(1)
    (record,) = read_steps(monitor)
    assert record["perf/samples_per_second"] == 3
    assert record["perf/tokens_per_second"] == 12


def test_recomputation_is_in_hfu_alone(tmp_path: Path, clock: Clock) -> None:
    found = []
    for is_recomputed in (False, True):
        model = make_llama().train()
        if is_recomputed:
            model.gradient_checkpointing_enable()
        monitor = make_monitor(tmp_path / str(is_recomputed), model)
        batch = make_plain()[1][0]
        with monitor.step():
            work(model, batch)
            clock.tick(1)
        (record,) = read_steps(monitor)
        found.append(record)
        expected = bind(model, convention="hardware").estimate_batch(batch).total
        assert record["perf/hardware_flops"] == expected
        assert record["perf/hfu"] == expected / PEAK
    assert found[0]["perf/model_flops"] == found[1]["perf/model_flops"]
    assert found[0]["perf/hfu"] < found[1]["perf/hfu"]


SHAPES = {"input_ids": torch.ones(2, 64, dtype=torch.long)}


@pytest.mark.parametrize(
    "given",
    [
        "llama-3.1-8b",
        make_llama().config.to_dict(),
        bind("llama-3.1-8b"),
    ],
    ids=["preset", "mapping", "estimator"],
)
def test_a_model_need_not_be_live_where_batches_are_given(given: Any, tmp_path: Path, clock: Clock) -> None:
    monitor = make_monitor(tmp_path, given)
    with monitor.step(SHAPES):
        clock.tick(1)
    (record,) = read_steps(monitor)
    estimator = bind(given) if not hasattr(given, "estimate_batch") else given
    assert record["perf/model_flops"] == estimator.estimate_batch(SHAPES).total
    assert record["perf/tokens_per_second"] == 128


def test_the_mask_alone_tells_the_lengths(tmp_path: Path, clock: Clock) -> None:
    monitor = make_monitor(tmp_path, "llama-3.1-8b")
    mask = torch.tensor([[1] * 64, [1] * 40 + [0] * 24])
    for number in (1, 2):
        clock.tick(1)
        monitor.log_step(number, 0, 0.5, 1.0, 0.1, attention_mask=mask)
    records = read_steps(monitor)
    batch = {"input_ids": mask, "attention_mask": mask}
    assert [r["perf/model_flops"] for r in records] == [count("llama-3.1-8b", batch)] * 2
    assert [r["perf/tokens_per_second"] for r in records] == [104, 104]
    assert [r["perf/padded_tokens_per_second"] for r in records] == [128, 128]


class Mixer(torch.nn.Module):
    """No model of Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 16)
        self.outer = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


# Forward, the gradient of every weight, and of the inner result: the input wants none.
MIXER = 2 * (8 * 16 + 16 * 4) * 2 + 2 * 16 * 4


def test_a_module_of_ones_own_is_traced_by_bind(tmp_path: Path, clock: Clock) -> None:
    module = Mixer()
    monitor = make_monitor(tmp_path, bind(module, {"x": torch.randn(2, 6, 8)}))
    for length in (6, 3):
        with monitor.step({"x": torch.randn(2, length, 8)}):
            clock.tick(1)
    records = read_steps(monitor)
    assert [record["perf/model_flops"] for record in records] == [12 * MIXER, 6 * MIXER]
    assert [record["perf/tokens_per_second"] for record in records] == [12, 6]
    assert [record["perf/convention"] for record in records] == ["full", "full"]


def test_the_profiler_counts_a_module_that_has_no_formula(tmp_path: Path, clock: Clock) -> None:
    module = Mixer()
    monitor = make_monitor(tmp_path, module, mfu_calculation_mode="profiler")

    def run() -> None:
        for number in (1, 2, 3):
            module(torch.randn(6, 8)).sum().backward()
            clock.tick(1)
            monitor.log_step(number, 0, 0.5, 1.0, 0.1)

    assert [message for message in collect(run) if "Mixer is counted by tracing its calls" not in message] == []
    records = read_steps(monitor)
    assert [record["perf/model_flops"] for record in records] == [6 * MIXER] * 3
    assert [record["perf/mfu"] for record in records[1:]] == [6 * MIXER / PEAK] * 2
    assert records[0]["perf/mfu"] is None  # under the profiler its time is not a step's
    assert {record["perf/source"] for record in records} == {"profiler at step 1"}
    assert {record["perf/factor"] for record in records} == {1.0}
    assert {record["perf/convention"] for record in records} == {"full"}


@pytest.mark.parametrize("mode", ["estimate", "profiler", "smart", "hybrid"])
def test_every_size_of_a_module_without_a_formula_is_counted(mode: str, tmp_path: Path, clock: Clock) -> None:
    module = Mixer()
    monitor = make_monitor(tmp_path, module, mfu_calculation_mode=mode)

    def run() -> None:
        for number, sizes in enumerate([(6, 6), (6, 6), (6,), (12,), (6, 6)], 1):
            for rows in sizes:
                module(torch.randn(rows, 8)).sum().backward()
            clock.tick(1)
            monitor.log_step(number, 0, 0.5, 1.0, 0.1)

    messages = [message for message in collect(run) if "hardware counters" not in message]
    assert len(messages) == 1
    assert "Mixer is counted by tracing its calls, under convention full" in messages[0]
    found = [record["perf/model_flops"] for record in read_steps(monitor)]
    assert found == [12 * MIXER, 12 * MIXER, 6 * MIXER, 12 * MIXER, 12 * MIXER]


@pytest.mark.parametrize(
    ("dtype", "settings", "expected"),
    [
        (torch.bfloat16, {}, ("bf16", 989.4e12)),
        pytest.param(torch.float32, {}, (None, None), marks=pytest.mark.heavy),
        pytest.param(torch.float32, {"dtype": "tf32"}, ("tf32", 494.7e12), marks=pytest.mark.heavy),
    ],
)
def test_the_dtype_of_a_compiled_model_is_its_weights_or_asked_for(
    dtype: torch.dtype, settings: dict[str, str], expected: tuple[Any, Any], tmp_path: Path, clock: Clock
) -> None:
    torch._dynamo.reset()
    model: Any = torch.compile(make_model(0.0).to(dtype), backend="eager")
    config = {"monitoring": {"mfu_calculation_mode": "estimate", "skip_first": 0, "device": "h200", **settings}}
    monitor = TrainingMonitor(tmp_path, config, model=model)

    def run() -> None:
        work(model, make_batches(1)[0])
        clock.tick(1)
        monitor.log_step(1, 0, 0.5, 1.0, 0.1)
        monitor.close()

    messages = collect(run)
    (record,) = read_steps(monitor)
    assert (record["perf/dtype"], record["perf/peak_flops_per_s"]) == expected
    assert (record["perf/mfu"] is None) is (expected[0] is None)
    assert [("name it by monitoring.dtype" in message) for message in messages] == [True] * (expected[0] is None)


# --- Time -------------------------------------------------------------------------------------------------------------


def test_evaluation_checkpoints_and_first_steps_are_in_no_step_time(tmp_path: Path, clock: Clock) -> None:
    model, batches = make_model(), make_batches(6)
    monitor = make_monitor(tmp_path, model, skip_first=2)
    clock.tick(7)  # loading the model
    for number, batch in enumerate(batches, 1):
        clock.tick(0.25)  # data
        work(model, batch)
        clock.tick(1)
        monitor.log_step(number, 0, 0.5, 1.0, 0.1)
        if number == 3:
            model.eval()
            model(**batch)  # no training pass
            model.train()
            clock.tick(16)
            monitor.mark_lost("eval")
        if number == 4:
            with monitor.pause("checkpoint"):
                clock.tick(32)
        if number == 5:
            clock.tick(0.25)
            with monitor.pause("a coffee"):
                clock.tick(64)
    records = read_steps(monitor)
    assert [record["perf/steps"] for record in records] == [0, 0, 1, 1, 1, 1]
    assert [record["perf/step_time"] for record in records] == [None, None, 1.25, 1.25, 1.25, 1.5]
    assert [record["perf/data_time"] for record in records] == [None, None, 0.25, 0.25, 0.25, 0.5]
    last = records[-1]
    assert last["goodput/lost_start_s"] == 7 + 2 * 1.25
    assert last["goodput/lost_data_s"] == 0.25 * 4 + 0.25
    assert last["goodput/lost_eval_s"] == 16
    assert last["goodput/lost_checkpoint_s"] == 32
    assert last["goodput/lost_other_s"] == 64
    assert last["goodput/lost_stall_s"] == 0
    assert last["goodput/share"] == 4 / (9.5 + 4 * 1.25 + 0.25 + 16 + 32 + 64)
    (end,) = read_log(tmp_path / "flopcalc.jsonl", "end")
    assert end["goodput"]["productive_s"] == 4
    assert end["steps"] == 6


def test_a_stall_is_lost_time_and_still_in_the_step_time(tmp_path: Path, clock: Clock) -> None:
    model, (batch,) = make_model(), make_batches(1)
    monitor = make_monitor(tmp_path, model)
    for number in range(1, 11):
        work(model, batch)
        clock.tick(9 if number == 10 else 1)
        monitor.log_step(number, 0, 0.5, 1.0, 0.1)
    last = read_steps(monitor)[-1]
    assert last["perf/step_time"] == 9
    assert last["goodput/lost_stall_s"] == 8
    assert last["goodput/share"] == 10 / 18


def test_steps_that_an_earlier_run_had_logged_are_redone(tmp_path: Path, clock: Clock) -> None:
    model, (batch,) = make_model(), make_batches(1)

    def run(first: int, last: int) -> dict[str, Any]:
        monitor = make_monitor(tmp_path, model)
        for number in range(first, last + 1):
            work(model, batch)
            clock.tick(1)
            monitor.log_step(number, 0, 0.5, 1.0, 0.1)
        return read_steps(monitor)[-1]

    assert run(1, 5)["goodput/lost_redone_s"] == 0
    resumed = run(4, 7)  # from a checkpoint after step 3
    assert resumed["goodput/lost_redone_s"] == 2
    assert resumed["goodput/share"] == 2 / 4
    assert run(1, 2)["goodput/lost_redone_s"] == 0  # begun anew
    assert len(read_log(tmp_path / "flopcalc.jsonl", "start")) == 3


def test_the_goodput_file_stands_beside_the_log(tmp_path: Path, clock: Clock) -> None:
    import json

    monitor = make_monitor(tmp_path, make_model())
    with monitor.step(make_batches(1)[0]):
        clock.tick(3)
    clock.tick(1)
    monitor.close()
    found = json.loads((tmp_path / "goodput.json").read_text())
    assert found["schema"] == 1
    assert found["steps"] == 1
    assert found["productive_s"] == 3
    assert found["elapsed_s"] == 4
    assert found["share"] == 0.75
    assert found["lost_other_s"] == 1


def test_a_step_that_raised_is_no_step_and_its_time_is_lost(tmp_path: Path, clock: Clock) -> None:
    model, (first, second) = make_model(), make_batches(2)
    monitor = make_monitor(tmp_path, model)
    clock.tick(4)
    with pytest.raises(IndexError), monitor.step(first):
        work(model, OUTSIDE)
    with monitor.step(second):
        work(model, second)
        clock.tick(1)
    (record,) = read_steps(monitor)
    assert record["global_step"] == 1
    assert record["perf/model_flops"] == count(model, second)
    assert record["perf/step_time"] == 1
    assert record["perf/data_time"] == 0
    assert record["goodput/lost_other_s"] == 4


# Words that are not in the vocabulary: the model raises IndexError.
OUTSIDE = {"input_ids": torch.full((2, 8), 1000), "labels": torch.ones(2, 8, dtype=torch.long)}


@pytest.mark.parametrize("mode", ["estimate", "profiler", "smart"])
def test_a_forward_pass_that_raised_is_not_counted(mode: str, tmp_path: Path, clock: Clock) -> None:
    model, (good, other) = make_model(), make_batches(2)
    monitor = make_monitor(tmp_path, model, mfu_calculation_mode=mode)
    for number, batches in enumerate([[OUTSIDE, good], [good, OUTSIDE], [other]], 1):
        for batch in batches:
            if batch is OUTSIDE:
                with pytest.raises(IndexError):
                    work(model, batch)
            else:
                work(model, batch)
        clock.tick(1)
        monitor.log_step(number, 0, 0.5, 1.0, 0.1)
    records = read_steps(monitor)
    assert [record["perf/model_flops"] for record in records] == [count(model, b) for b in (good, good, other)]
    assert [record["perf/factor"] for record in records] == [1.0, 1.0, 1.0]


# --- What is sent when ------------------------------------------------------------------------------------------------


def test_details_come_every_so_many_steps(tmp_path: Path, clock: Clock) -> None:
    model, (batch,) = make_model(), make_batches(1)
    monitor = make_monitor(tmp_path, model, detail_every=3)
    for number in range(1, 8):
        work(model, batch)
        clock.tick(1)
        monitor.log_step(number, 0, 0.5, 1.0, 0.1)
    records = read_steps(monitor)
    assert [r["global_step"] for r in records if "perf/hfu" in r] == [3, 6]
    for record in records:
        assert {*CORE, *CONTEXT} <= set(record)


def test_datasets_are_summed_and_sent_every_so_many_steps(tmp_path: Path, clock: Clock) -> None:
    model, batch = make_model(), pad(make_text(3))  # 5, 9 and 13 tokens
    monitor = make_monitor(tmp_path, model, dataset_metrics_every=2)
    for number in range(1, 6):
        with monitor.step(batch, dataset=["books", "web", "books"] if number < 3 else "web"):
            clock.tick(1)
        monitor.log_datasets({"web": {"loss": number}})
    records = read_steps(monitor)
    sent = {record["global_step"]: record for record in records if any(key.startswith("dataset/") for key in record)}
    assert list(sent) == [2, 4]
    assert {key: value for key, value in sent[2].items() if key.startswith("dataset/")} == {
        "dataset/books/samples": 4,
        "dataset/books/tokens": 36,
        "dataset/books/share": 36 / 54,
        "dataset/web/samples": 2,
        "dataset/web/tokens": 18,
        "dataset/web/share": 18 / 54,
        "dataset/web/loss": 2,
    }
    assert sent[4]["dataset/web/samples"] == 2 + 6
    assert sent[4]["dataset/web/tokens"] == 18 + 54


def test_skip_wandb_keeps_a_record_from_wandb_alone(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Run:
        def __init__(self) -> None:
            self.logged: list[Mapping[str, float]] = []

        def define_metric(self, *_: Any, **__: Any) -> None:
            pass

        def log(self, numbers: Mapping[str, float]) -> None:
            self.logged.append(numbers)

    run = Run()
    monkeypatch.setattr("flopcalc.monitor.sinks.wandb._active_wandb_run", lambda: run)
    model, (batch,) = make_model(), make_batches(1)
    monitor = make_monitor(tmp_path, model)
    for number in (1, 2, 3):
        work(model, batch)
        clock.tick(1)
        monitor.log_step(number, 0, 0.5, 1.0, 0.1, skip_wandb=number == 2)
    assert [record["global_step"] for record in read_steps(monitor)] == [1, 2, 3]
    assert [numbers["global_step"] for numbers in run.logged] == [1, 3]


def test_the_log_begins_with_what_the_run_is_and_ends_with_what_it_came_to(tmp_path: Path, clock: Clock) -> None:
    import json

    model, (batch,) = make_model(), make_batches(1)
    monitor = TrainingMonitor(tmp_path / "out", configure(), tmp_path / "elsewhere.jsonl", model=model)
    work(model, batch)
    clock.tick(1)
    monitor.log_step(1, 0, 0.5, 1.0, 0.1)
    with pytest.warns(RuntimeWarning, match="something happened"):
        monitor.say("something happened")
    monitor.close()
    lines = [json.loads(line) for line in (tmp_path / "elsewhere.jsonl").read_text().splitlines()]
    start = lines[0]
    assert start["type"] == "start"
    assert start["schema"] == 1
    assert start["model"] == "LlamaForCausalLM"
    assert start["mode"] == "estimate"
    assert start["world"] == 1
    assert start["dtype"] == "fp32"
    assert start["peak_flops_per_s"] == PEAK
    assert start["parameters"] == sum(each.numel() for each in model.parameters())
    assert start["settings"]["detail_every"] == 1
    assert {line["type"] for line in lines} == {"start", "step", "event", "end"}
    assert lines[-1]["type"] == "end"
    assert all(line["time"] > 0 for line in lines)


# --- What is not known, and what cannot be ----------------------------------------------------------------------------


def collect(call: Callable[[], object]) -> list[str]:
    """The warnings of a call, in their order."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


def without(*keys: str) -> dict[str, Any]:
    return {"monitoring": {key: value for key, value in CONFIG["monitoring"].items() if key not in keys}}


@pytest.mark.parametrize(
    ("make_given", "config", "batch", "reason", "is_rate_known"),
    [
        (make_model, without("peak_flops_per_s"), {}, "MFU is not known: ", True),
        (lambda: None, configure(), {}, "no model was given", False),
        (lambda: "no-such-model", configure(), {}, "no preset, file or folder 'no-such-model'", False),
        (make_model, configure(), {"input_ids": object()}, "cannot be counted", False),
        (make_model, configure(), [(1, 2)], "step was seen without its batch", False),
    ],
    ids=["no peak", "no model", "no such model", "batch of an object", "batch of a pair"],
)
def test_what_is_not_known_is_nan_and_said_once(
    make_given: Callable[[], Any],
    config: Any,
    batch: Any,
    reason: str,
    is_rate_known: bool,
    tmp_path: Path,
    clock: Clock,
) -> None:
    metrics: dict[str, Any] = {}

    def run() -> None:
        monitor = TrainingMonitor(tmp_path, config, model=make_given())
        for _ in range(4):
            with monitor.step(batch or make_batches(1)[0]):
                clock.tick(1)
        metrics.update(monitor.metrics())
        monitor.close()

    (message,) = collect(run)
    assert reason in message
    assert metrics["perf/step_time"] == 1
    assert math.isnan(metrics["perf/mfu"])
    assert math.isnan(metrics["perf/mfu_percent"])
    assert math.isnan(metrics["perf/tokens_per_second"]) is not is_rate_known
    record = read_log(tmp_path / "flopcalc.jsonl")[-1]
    assert record["perf/mfu"] is None


def test_a_step_of_which_a_part_is_unknown_is_unknown(tmp_path: Path, clock: Clock) -> None:
    good = make_batches(1)[0]
    monitor = make_monitor(tmp_path, "llama-3.1-8b")
    with pytest.warns(RuntimeWarning, match="batch of type tuple cannot be read"), monitor.step([good, (1, 2)]):
        clock.tick(1)
    with pytest.warns(RuntimeWarning, match="seen without its batch"):
        assert math.isnan(monitor.metrics()["perf/mfu"])
    with monitor.step([good, good]):
        clock.tick(1)
    assert monitor.metrics()["perf/model_flops"] == count("llama-3.1-8b", good, good)
    monitor.close()


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path, clock: Clock) -> None:
    model, (batch,) = make_model(), make_batches(1)
    monitor = make_monitor(tmp_path, model)
    work(model, batch)
    clock.tick(1)
    with pytest.warns(RuntimeWarning, match=r"no number, and left out: tensor"):
        monitor.log_step(1, None, torch.tensor(0.5, requires_grad=True), torch.ones(3), [0.1])
    (record,) = read_steps(monitor)
    assert record["training/loss"] == 0.5
    assert record["training/lr"] is record["training/grad_norm"] is record["training/epoch"] is None
    assert record["perf/step_time"] == 1


def test_mfu_above_one_is_said_and_not_clamped(tmp_path: Path, clock: Clock) -> None:
    model, (batch,) = make_model(), make_batches(1)
    monitor = make_monitor(tmp_path, model, peak_flops_per_s=1000.0)
    messages = []
    for number in (1, 2):
        work(model, batch)
        clock.tick(1)
        monitor.log_step(number, 0, 0.5, 1.0, 0.1)
        messages += collect(monitor.metrics)
    share = count(model, batch) / 1000
    assert monitor.metrics()["perf/mfu"] == share > 1
    assert len(messages) == 1
    assert f"MFU is {share:.3f}, above 1" in messages[0]
    monitor.close()


def test_metrics_before_the_first_step_are_not_known(tmp_path: Path) -> None:
    monitor = make_monitor(tmp_path, make_model())
    assert set(monitor.metrics()) == set(CORE)
    assert all(math.isnan(value) for value in monitor.metrics().values())
    monitor.close()


# --- Settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_phase_sets_how_often_is_measured(tmp_path: Path, clock: Clock) -> None:
    model, (batch,) = make_model(0.0), make_batches(1)
    frequencies = {"warmup": 4, "main": 2, "finetune": 1}
    monitor = make_monitor(tmp_path, model, mfu_calculation_mode="profiler", phase_frequencies=frequencies)
    for number in range(1, 15):
        if number in (1, 7, 12):
            monitor.set_phase({1: "warmup", 7: "main", 12: "finetune"}[number])
        work(model, batch)
        clock.tick(1)
        monitor.log_step(number, 0, 0.5, 1.0, 0.1)
    measured = [record["global_step"] for record in read_steps(monitor) if record["perf/steps"] == 0]
    assert measured == [1, 4, 7, 8, 10, 12, 13, 14]  # at each multiple, or past it where that was not due then


def test_an_unknown_phase_is_said_and_changes_nothing(tmp_path: Path) -> None:
    monitor = make_monitor(tmp_path)
    with pytest.warns(RuntimeWarning, match="no phase 'cooldown'"):
        monitor.set_phase("cooldown")
    monitor.close()


def test_the_constructors_frequency_wins_and_disagreement_is_said(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="frequencies disagree.* taking the constructor's flops_profile_freq = 50"):
        monitor = TrainingMonitor(tmp_path, {"monitoring": {"flops_profile_freq": 70}}, flops_profile_freq=50)
    assert monitor.settings.flops_profile_freq == 50
    monitor.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"monitoring": {"flops_profile_frq": 5}}, "flops_profile_freq"),
        ({"monitoring": {"mfu_calculation_mode": "guess"}}, "one of smart, profiler, estimate, hybrid"),
        ("no_such_file.yaml", "cannot be read"),
    ],
)
def test_only_a_bad_config_raises(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingMonitor(tmp_path, config)
    assert list(tmp_path.iterdir()) == []


def test_attaching_once_more_counts_nothing_twice(tmp_path: Path, clock: Clock) -> None:
    model, batches = make_model(), make_batches(2)
    monitor = make_monitor(tmp_path, model)
    for number, batch in enumerate(batches, 1):
        monitor.attach(model)
        work(model, batch)
        clock.tick(1)
        monitor.log_step(number, 0, 0.5, 1.0, 0.1)
    assert [r["perf/model_flops"] for r in read_steps(monitor)] == [count(model, batch) for batch in batches]


def test_another_model_may_be_attached(tmp_path: Path, clock: Clock) -> None:
    models, (batch,) = [make_model(), make_llama().train()], make_batches(1)
    monitor = make_monitor(tmp_path, mfu_calculation_mode="smart")
    for number, model in enumerate(models, 1):
        monitor.attach(model)
        work(model, batch)
        clock.tick(1)
        monitor.log_step(number, 0, 0.5, 1.0, 0.1)
    records = read_steps(monitor)
    assert [record["perf/model_flops"] for record in records] == [count(model, batch) for model in models]
    assert [record["perf/factor"] for record in records] == [1.0, 1.0]
    assert [list_hooks(model) for model in models] == [[], []]


# --- Many steps -------------------------------------------------------------------------------------------------------


def make_plain_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(3, 3 + rows * length).reshape(rows, length)
    return {"input_ids": ids, "labels": ids}


def test_many_equal_steps_are_exact_one_by_one(tmp_path: Path, clock: Clock) -> None:
    model, batch = make_model(), make_plain_batch(2, 8)
    monitor = make_monitor(tmp_path, model)
    for number in range(1, 101):
        work(model, batch)
        clock.tick(0.125 * (1 + number % 3))
        monitor.log_step(number, 0, torch.tensor(float(number)), None, 0.1)
    records = read_steps(monitor)
    assert [record["global_step"] for record in records] == list(range(1, 101))
    assert [record["training/loss"] for record in records] == list(range(1, 101))
    assert [record["perf/step_time"] for record in records] == [0.125 * (1 + n % 3) for n in range(1, 101)]
    assert {record["perf/model_flops"] for record in records} == {count(model, batch)}


@pytest.mark.parametrize("mode", mark_heavy(["estimate", "smart"], ["estimate"]))
@pytest.mark.parametrize("seed", mark_heavy(range(4), [0]))
def test_whatever_a_loop_does_every_step_has_its_time_and_its_flops(
    mode: str, seed: int, tmp_path: Path, clock: Clock
) -> None:
    """Steps of all kinds, failed passes, evaluations and pauses in any order, beside the sums made by hand."""
    random = Random(seed)
    model = make_model()
    changes = {"mfu_calculation_mode": mode, "flops_profile_freq": 20}
    monitor = make_monitor(tmp_path, model, **changes)
    plain, other, masked = make_plain_batch(2, 8), make_plain_batch(1, 6), make_batches(2)
    expected: list[tuple[int, float, float, float | None]] = []  # step, time, FLOPs, loss
    evaluated = paused = 0.0

    def train(batches: list[Any]) -> float:
        loss = work(model, *batches)
        seconds = random.choice([0.125, 0.25, 0.25, 1, 5])
        clock.tick(seconds)
        expected.append((len(expected) + 1, seconds, count(model, *batches), float(loss)))
        return float(loss)

    for action in random.choices(
        ["log_step", "block", "end and report", "fail", "evaluate", "pause", "look"], [40, 8, 8, 4, 4, 4, 8], k=120
    ):
        if action == "log_step":
            loss = train(random.choice([[plain], [plain, plain], [other], masked]))
            monitor.log_step(len(expected), 0.5, torch.tensor(loss), None, 0.1)
        elif action == "block":
            with monitor.step(dataset="web") as step:
                step.log(loss=train([plain]))
        elif action == "end and report":
            loss = train([other])
            monitor.end_step()
            monitor.report(loss=loss)
        elif action == "fail":
            with pytest.raises(IndexError):
                work(model, OUTSIDE)
        elif action == "evaluate":
            model.eval()
            model(**plain)
            model.train()
            with torch.no_grad():
                model(**other)
            clock.tick(3)
            evaluated += 3
            monitor.mark_lost("eval")
        elif action == "pause":
            with monitor.pause("checkpoint"):
                clock.tick(2)
            paused += 2
        else:
            assert (
                monitor.metrics()["global_step"] in (len(expected), *([] if expected else [math.nan])) or not expected
            )
    records = read_steps(monitor)
    measured = [record["global_step"] for record in records if record["perf/steps"] == 0]
    assert bool(measured) == (mode == "smart")
    found = [(each["global_step"], each["perf/model_flops"], each["training/loss"]) for each in records]
    assert found == [(step, flops, loss) for step, _, flops, loss in expected]
    assert [record["perf/step_time"] for record in records if record["global_step"] not in measured] == [
        seconds for step, seconds, _, _ in expected if step not in measured
    ]
    assert {record["perf/factor"] for record in records} == {1.0}
    (end,) = read_log(tmp_path / "flopcalc.jsonl", "end")
    assert (end["goodput"]["lost_eval_s"], end["goodput"]["lost_checkpoint_s"]) == (evaluated, paused)


def test_a_loss_that_is_overwritten_is_what_it_was_when_it_was_given(tmp_path: Path, clock: Clock) -> None:
    model, batch = make_model(), make_plain_batch(2, 8)
    monitor = make_monitor(tmp_path, model)
    loss = torch.zeros(())
    for number in range(1, 9):
        work(model, batch)
        clock.tick(1)
        loss.fill_(number)
        monitor.log_step(number, 0, loss, 1.0, 0.1)
        loss.zero_()
    assert [record["training/loss"] for record in read_steps(monitor)] == list(range(1, 9))
