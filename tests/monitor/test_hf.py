"""FlopcalcCallback in real Trainer runs: exact FLOPs of every step, the Trainer's own numbers unchanged."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from loop import Clock
from peft import LoraConfig, get_peft_model
from places import HELPERS
from tiers import mark_heavy
from tiny import (
    CONFIG,
    PEAK,
    Recorder,
    Witness,
    list_hooks,
    make_llama,
    make_pictures,
    make_qwen2_vl,
    make_text,
    pad,
    pad_pictures,
    read_log,
)
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

from flopcalc import ConfigError, estimate_flops
from flopcalc.monitor import FlopcalcCallback, Settings, TrainingMonitor, hf

RATES = [
    "perf/mfu",
    "perf/mfu_percent",
    "perf/step_time",
    "perf/steps_per_second",
    "perf/tokens_per_second",
    "perf/samples_per_second",
]


@pytest.fixture(autouse=True)
def restore_switches() -> Iterator[None]:
    """The Trainer turns these on for the whole process."""
    yield
    torch.use_deterministic_algorithms(False)


def make_trainer(
    folder: Path,
    *callbacks: Any,
    model: Any = None,
    data: Any = None,
    collate: Any = pad,
    attention_dropout: float = 0.0,
    **given: Any,
) -> Trainer:
    args = {
        "use_cpu": True, "report_to": [], "logging_steps": 1, "max_steps": 4, "per_device_train_batch_size": 2,
        "disable_tqdm": True, "save_strategy": "no", "remove_unused_columns": False, "seed": 3, "learning_rate": 1e-2,
    }  # fmt: skip
    model = model if model is not None else make_llama()
    if attention_dropout:  # random numbers in every step
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = attention_dropout
    return Trainer(
        model,
        TrainingArguments(str(folder), **{**args, **given}),
        train_dataset=data if data is not None else make_text(30),
        eval_dataset=make_text(4),
        data_collator=collate,
        callbacks=list(callbacks),
    )


def list_losses(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def make_lora() -> Any:
    return get_peft_model(make_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


KINDS: dict[str, dict[str, Any]] = {
    "padded text": {},
    "accumulation": {"gradient_accumulation_steps": 3, "micro": [3, 3, 3, 3]},
    "accumulation with a rest": {
        "gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 2, "micro": [4, 2, 4, 2],
        "data": make_text(12),
    },
    "packing": {"collate": DataCollatorWithFlattening()},
    "packing with cu_seqlens": {"collate": DataCollatorWithFlattening(return_flash_attn_kwargs=True)},
    "images": {"model": make_qwen2_vl, "data": make_pictures(20), "collate": pad_pictures},
    "images, accumulated": {
        "model": make_qwen2_vl, "data": make_pictures(20), "collate": pad_pictures, "gradient_accumulation_steps": 2,
        "micro": [2, 2, 2, 2],
    },
    "LoRA": {"model": make_lora},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "bf16": {"bf16": True},
    "loader in processes of its own": {"dataloader_num_workers": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", mark_heavy(KINDS, ["packing", "images, accumulated"]))
def test_flops_of_every_step_are_those_of_its_batches_and_training_is_unchanged(kind: str, tmp_path: Path) -> None:
    given = dict(KINDS[kind])
    make = given.pop("model", make_llama)
    micro = given.pop("micro", [1] * 4)
    plain = make_trainer(tmp_path / "plain", model=make(), **given)
    plain.train()

    model = make()
    witness = Witness(model)
    watched = make_trainer(tmp_path / "watched", FlopcalcCallback(CONFIG), model=model, **given)
    watched.train()

    assert list_losses(watched) == list_losses(plain)
    ours, theirs = watched.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    steps = read_log(tmp_path / "watched" / "flopcalc.jsonl")
    assert [line["global_step"] for line in steps] == list(range(1, len(micro) + 1))
    assert [line["perf/model_flops"] for line in steps] == witness.count_flops(micro)
    assert [line["training/loss"] for line in steps] == list_losses(plain)
    for line in steps:
        assert line["perf/source"] == "estimate"
        assert line["perf/mfu"] == line["perf/model_flops"] / (line["perf/step_time"] * PEAK)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["accumulation", "packing", "images, accumulated", "LoRA", "bf16"])
def test_on_a_gpu(kind: str, tmp_path: Path) -> None:
    """Masks, positions and grids lie on the device when the model is given them; records are of the very step."""
    given = dict(KINDS[kind])
    model, micro = given.pop("model", make_llama)(), given.pop("micro", [1] * 4)
    witness = Witness(model)
    trainer = make_trainer(tmp_path, FlopcalcCallback(CONFIG), model=model, use_cpu=False, **given)
    trainer.train()
    steps = read_log(tmp_path / "flopcalc.jsonl")
    assert [line["perf/model_flops"] for line in steps] == witness.count_flops(micro)
    assert steps[0]["perf/device_step_time"] > 0  # the others are not marked: they are within two seconds of it
    logged = [line["perf/mfu"] for line in trainer.state.log_history if "loss" in line]
    assert logged == [line["perf/mfu"] for line in steps]


@pytest.mark.parametrize("mode", mark_heavy(["smart", "profiler", "hybrid"]))
def test_measuring_changes_nothing_either(mode: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    plain = make_trainer(tmp_path / "plain", attention_dropout=0.1)
    plain.train()
    config = {"monitoring": {**CONFIG["monitoring"], "mfu_calculation_mode": mode, "flops_profile_freq": 2}}
    watched = make_trainer(tmp_path / "watched", FlopcalcCallback(config), attention_dropout=0.1)
    watched.train()
    assert list_losses(watched) == list_losses(plain)
    steps = read_log(tmp_path / "watched" / "flopcalc.jsonl")
    assert [line["global_step"] for line in steps] == [1, 2, 3, 4]
    assert steps[-1]["perf/source"] != "none"
    assert not [str(each.message) for each in recwarn if "failed" in str(each.message)]


@pytest.mark.heavy
def test_rates_stand_in_the_trainers_logs_as_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(
        tmp_path, FlopcalcCallback(CONFIG), eval_strategy="steps", eval_steps=2, save_strategy="steps"
    )
    trainer.train()
    steps = {line["global_step"]: line for line in read_log(tmp_path / "flopcalc.jsonl")}
    history = trainer.state.log_history
    trained = [line for line in history if "loss" in line]
    assert [line["step"] for line in trained] == [1, 2, 3, 4]
    for line in trained:
        assert [key for key in line if key.startswith("perf/")] == RATES
        assert all(line[key] == steps[line["step"]][key] for key in RATES)
    for line in history:
        if "loss" not in line:
            assert not any(key.startswith("perf/") for key in line)
    assert capsys.readouterr().out.count("'perf/mfu'") == 4
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert saved["log_history"][0]["perf/mfu"] == trained[0]["perf/mfu"]


def test_without_any_word_it_works(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, FlopcalcCallback(), max_steps=8)
    with pytest.warns(RuntimeWarning, match="MFU is not known"):  # no device here has a known peak
        trainer.train()
    assert trainer.state.log_history[7]["perf/tokens_per_second"] > 0
    assert [line["global_step"] for line in read_log(tmp_path / "flopcalc.jsonl")] == list(range(1, 9))


@pytest.mark.heavy
def test_what_is_not_known_is_left_out_of_the_trainers_logs(tmp_path: Path) -> None:
    """Without a peak there is no MFU, and the Trainer's state must stay plain JSON."""
    config = {"monitoring": {**CONFIG["monitoring"], "peak_flops_per_s": None}}
    trainer = make_trainer(tmp_path, FlopcalcCallback(config), max_steps=1)
    with pytest.warns(RuntimeWarning, match="MFU is not known"):
        trainer.train()
    assert [key for key in trainer.state.log_history[0] if key.startswith("perf/")] == RATES[2:]
    assert read_log(tmp_path / "flopcalc.jsonl")[0]["perf/mfu"] is None


EVENTS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "plain": ({"max_steps": 2}, ["attach", ("end", 1), ("report", 1), ("end", 2), ("report", 2)]),
    "accumulation": (
        {"max_steps": 2, "gradient_accumulation_steps": 3},
        ["attach", ("end", 1), ("report", 1), ("end", 2), ("report", 2)],
    ),
    "log, evaluate, save": (
        {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 1},
        [
            "attach",
            ("end", 1),
            ("report", 1),
            ("lost", "checkpoint"),
            ("end", 2),
            ("report", 2),
            ("lost", "eval"),
            ("lost", "checkpoint"),
        ],
    ),
    "evaluation at the start": (
        {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 9, "eval_on_start": True},
        ["attach", ("lost", "eval"), ("end", 1), ("report", 1), ("lost", "eval")],
    ),
    "a rest that the Trainer does not log": (
        {"max_steps": 3, "logging_steps": 2},
        ["attach", ("end", 1), ("end", 2), ("report", 2), ("end", 3), ("report", 3)],
    ),
    "no logs at all": ({"max_steps": 2, "logging_strategy": "no"}, ["attach", ("end", 1), ("end", 2), ("report", 2)]),
}


@pytest.mark.parametrize("case", mark_heavy(EVENTS, ["plain"]))
def test_events_reach_the_monitor_in_order(case: str, tmp_path: Path) -> None:
    given, calls = EVENTS[case]
    recorder = Recorder(Settings())
    make_trainer(tmp_path, FlopcalcCallback(monitor=recorder), **given).train()
    assert recorder.calls == calls  # and it is not closed: whoever made it may go on
    assert recorder.said == []


@pytest.mark.parametrize(("devices", "calls"), [(0, ["attach"]), (1, ["attach"]), (2, ["attach", "begin"])])
def test_only_dataparallel_needs_a_step_begun(devices: int, calls: list[str], tmp_path: Path) -> None:
    recorder = Recorder(Settings())
    callback = FlopcalcCallback(monitor=recorder)
    arguments = SimpleNamespace(n_gpu=devices, output_dir=str(tmp_path), torch_compile=False, report_to=[])
    callback.on_train_begin(arguments, None, None, model=make_llama())
    callback.on_step_begin(arguments, None, None)
    assert recorder.calls == calls
    assert [words.split()[0] for words in recorder.said] == ["DataParallel"] * (devices > 1)


def test_values_of_a_report(tmp_path: Path) -> None:
    recorder = Recorder(Settings())
    trainer = make_trainer(tmp_path, FlopcalcCallback(monitor=recorder), max_steps=1)
    trainer.train()
    line = trainer.state.log_history[0]
    assert recorder.values == {key: line[key] for key in ("epoch", "loss", "grad_norm", "learning_rate")}
    assert {key: line[key] for key in line if key.startswith("perf/")} == {"perf/mfu": 0.25}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("warmup", "resumed_at", "phases"),
    [(2, 0, ["warmup", "main"]), (0.5, 0, ["warmup", "main"]), (0, 0, ["main"]), (2, 3, ["main"])],
)
def test_phases_follow_the_warm_up(warmup: float, resumed_at: int, phases: list[str], tmp_path: Path) -> None:
    recorder = Recorder(Settings(phase_frequencies={"warmup": 7}))
    trainer = make_trainer(tmp_path, FlopcalcCallback(monitor=recorder), warmup_steps=warmup, save_steps=3)
    if resumed_at:
        first = make_trainer(tmp_path, warmup_steps=warmup, save_strategy="steps", save_steps=3)
        first.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{resumed_at}") if resumed_at else None)
    assert [call[1] for call in recorder.calls if call[0] == "phase"] == phases


def test_without_phases_in_the_config_none_is_set(tmp_path: Path) -> None:
    recorder = Recorder(Settings())
    make_trainer(tmp_path, FlopcalcCallback(monitor=recorder), warmup_steps=2).train()
    assert not [call for call in recorder.calls if call[0] == "phase"]


class Slow(TrainerCallback):
    """A step takes a second, a batch of evaluation 100."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self.clock.tick(100)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.clock.tick(1)


def test_time_of_evaluation_and_checkpoints_is_lost_and_in_no_step(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Trainer._save_checkpoint
    monkeypatch.setattr(
        Trainer, "_save_checkpoint", lambda *args, **kwargs: (clock.tick(10_000), save(*args, **kwargs))
    )
    trainer = make_trainer(
        tmp_path, FlopcalcCallback(CONFIG), Slow(clock), eval_strategy="steps", eval_steps=2, save_strategy="steps",
        save_steps=4, eval_on_start=True, per_device_eval_batch_size=2,
    )  # fmt: skip
    trainer.train()
    assert [line["perf/step_time"] for line in read_log(tmp_path / "flopcalc.jsonl")] == [1.0] * 4
    goodput = read_log(tmp_path / "flopcalc.jsonl", "end")[0]["goodput"]
    assert goodput["lost_eval_s"] == 3 * 2 * 100
    assert goodput["lost_checkpoint_s"] == 10_000
    assert goodput["productive_s"] == 4
    assert goodput["elapsed_s"] == 10_604


@pytest.mark.heavy
def test_resume_goes_on_with_the_numbers(tmp_path: Path) -> None:
    make_trainer(tmp_path, FlopcalcCallback(CONFIG), max_steps=4, save_strategy="steps", save_steps=2).train()
    model = make_llama()
    witness = Witness(model)
    trainer = make_trainer(tmp_path, FlopcalcCallback(CONFIG), model=model, max_steps=6)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    steps = read_log(tmp_path / "flopcalc.jsonl")
    assert [line["global_step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["perf/model_flops"] for line in steps[4:]] == witness.count_flops([1, 1])
    assert len(read_log(tmp_path / "flopcalc.jsonl", "start")) == 2


@pytest.mark.heavy
def test_train_may_be_called_twice(tmp_path: Path) -> None:
    callback = FlopcalcCallback(CONFIG)
    trainer = make_trainer(tmp_path, callback, max_steps=2)
    trainer.train()
    first = callback.monitor
    trainer.train()
    assert callback.monitor is not first
    assert [line["global_step"] for line in read_log(tmp_path / "flopcalc.jsonl")] == [1, 2, 1, 2]
    assert callback.monitor.metrics()["global_step"] == 2
    assert list_hooks(trainer.model) == []  # both have let go of the model


class Trap(Exception):
    pass


@pytest.mark.heavy
def test_an_error_in_training_stays_what_it_is_and_a_new_start_works(tmp_path: Path) -> None:
    callback = FlopcalcCallback(CONFIG)
    trainer = make_trainer(tmp_path, callback, max_steps=3)
    forward = trainer.model.forward
    calls = []

    def raise_at_second(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise Trap("second step")
        return forward(*args, **kwargs)

    trainer.model.forward = raise_at_second
    with pytest.raises(Trap, match="second step"):
        trainer.train()
    trainer.train()
    assert [line["global_step"] for line in read_log(tmp_path / "flopcalc.jsonl")] == [1, 1, 2, 3]
    assert list_hooks(trainer.model) == []


@pytest.mark.parametrize(
    ("part", "events"),
    mark_heavy([("_open", 1), ("_end_step", 1), ("_report", 2), ("_lose", 1), ("_close", 2)], [("_end_step", 1)]),
)
def test_an_error_in_the_callback_becomes_one_warning_per_event(
    part: str, events: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
    plain = make_trainer(tmp_path / "plain", **given)
    plain.train()

    def fail(*_: Any, **__: Any) -> None:
        raise Trap("inside")

    callback = FlopcalcCallback(CONFIG)
    monkeypatch.setattr(FlopcalcCallback, part, fail)
    trainer = make_trainer(tmp_path / "watched", callback, **given)
    with pytest.warns(RuntimeWarning, match="the callback failed in on_.*Trap: inside") as warned:
        trainer.train()
    assert len(warned) == events
    assert list_losses(trainer) == list_losses(plain)
    if callback.monitor is not None:
        callback.monitor.close()


@pytest.mark.heavy
def test_an_error_in_the_callback_does_not_end_training_where_warnings_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "_find_sinks", lambda _args: 1 / 0)
    trainer = make_trainer(tmp_path, FlopcalcCallback(CONFIG), max_steps=1)
    trainer.train()  # pytest makes the warning an error
    assert list_losses(trainer)


@pytest.mark.heavy
@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_works_by_itself(make_copy: Any, tmp_path: Path) -> None:
    callback = FlopcalcCallback(CONFIG)
    make_trainer(tmp_path / "one", callback, max_steps=1).train()
    copied = make_copy(callback)
    assert copied.monitor is None
    make_trainer(tmp_path / "two", copied, max_steps=1).train()
    assert [line["global_step"] for line in read_log(tmp_path / "two" / "flopcalc.jsonl")] == [1]


@pytest.mark.heavy
def test_a_copy_in_the_midst_of_training_is_idle(tmp_path: Path) -> None:
    class Copying(TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            self.copied = copy.deepcopy(callback)
            self.model = copy.deepcopy(trainer.model)

    callback, copying = FlopcalcCallback(CONFIG), Copying()
    trainer = make_trainer(tmp_path, callback, copying, gradient_accumulation_steps=2, max_steps=1)
    trainer.train()
    copying.copied.on_step_begin(trainer.args, trainer.state, trainer.control)
    copying.copied.on_step_end(trainer.args, trainer.state, trainer.control)
    copying.model(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert copying.copied.monitor is None
    assert [line["global_step"] for line in read_log(tmp_path / "flopcalc.jsonl")] == [1]


@pytest.mark.heavy
def test_a_model_made_anew_for_each_training_is_followed(tmp_path: Path) -> None:
    """As in a hyperparameter search: every trial has its own model."""
    callback = FlopcalcCallback(CONFIG)
    models = []

    def make() -> Any:
        models.append(make_llama())
        return models[-1]

    trainer = Trainer(
        None,
        make_trainer(tmp_path, max_steps=1).args,
        model_init=make,
        train_dataset=make_text(4),
        data_collator=pad,
        callbacks=[callback],
    )
    trainer.train()
    trainer.train(trial={"learning_rate": 1e-3})
    assert len(models) == 3  # one at construction
    found = [line["perf/model_flops"] for line in read_log(tmp_path / "flopcalc.jsonl")]
    assert len(found) == 2
    assert found[0] == found[1]


def test_evaluate_and_predict_outside_of_training_leave_the_log_alone(tmp_path: Path) -> None:
    callback = FlopcalcCallback(CONFIG)
    trainer = make_trainer(tmp_path, callback, max_steps=1)
    trainer.evaluate()
    trainer.train()
    before = (tmp_path / "flopcalc.jsonl").read_text()
    trainer.evaluate()
    trainer.predict(make_text(2))
    assert (tmp_path / "flopcalc.jsonl").read_text() == before


@pytest.mark.heavy
def test_predictions_in_the_midst_of_training_are_no_steps(tmp_path: Path) -> None:
    class Predicting(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            trainer.predict(make_text(2))

    trainer = make_trainer(tmp_path, FlopcalcCallback(CONFIG), Predicting())
    model = trainer.model
    witness = Witness(model)
    trainer.train()
    found = [line["perf/model_flops"] for line in read_log(tmp_path / "flopcalc.jsonl")]
    assert found == witness.count_flops([1] * 4)
    assert read_log(tmp_path / "flopcalc.jsonl", "end")[0]["goodput"]["lost_eval_s"] > 0


@pytest.mark.heavy
def test_a_model_that_the_trainer_compiles_is_seen(tmp_path: Path) -> None:
    plain = make_trainer(tmp_path / "plain", **COMPILED)
    plain.train()
    model = make_llama()
    torch._dynamo.reset()
    trainer = make_trainer(tmp_path / "watched", FlopcalcCallback(CONFIG), model=model, **COMPILED)
    trainer.train()
    torch._dynamo.reset()
    assert list_losses(trainer) == list_losses(plain)
    eager = make_llama()
    witness = Witness(eager)
    make_trainer(tmp_path / "eager", model=eager).train()
    found = [line["perf/model_flops"] for line in read_log(tmp_path / "watched" / "flopcalc.jsonl")]
    assert found == witness.count_flops([1] * 4)


def test_tensorboard_follows_report_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "boards"))
    callback = FlopcalcCallback(CONFIG)
    make_trainer(tmp_path, callback, report_to=["tensorboard"], max_steps=2).train()
    assert callback.monitor.settings.sinks == ("jsonl", "tensorboard")
    boards = EventAccumulator(str(tmp_path / "boards"))
    boards.Reload()
    assert {"train/loss", "perf/mfu", "training/loss"} <= set(boards.Tags()["scalars"])
    assert [event.step for event in boards.Scalars("perf/mfu")] == [1, 2]


SINKS: dict[str, tuple[Any, Any, tuple[str, ...] | None]] = {
    "nothing": ([], None, None),
    "none at all": (None, None, None),
    "tensorboard": (["tensorboard"], None, ("jsonl", "tensorboard")),
    "a run of W&B": (["wandb"], "a run", ("jsonl", "wandb")),
    "W&B switched off": (["wandb"], None, None),
    "several, and one without a sink": (["clearml", "mlflow", "tensorboard"], None, ("jsonl", "tensorboard", "mlflow")),
}


@pytest.mark.parametrize("case", SINKS)
def test_sinks_are_where_the_trainer_reports_to(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report_to, run, sinks = SINKS[case]
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))
    assert hf._find_sinks(types.SimpleNamespace(report_to=report_to)) == sinks


COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}


@pytest.mark.parametrize(
    ("given", "config", "dtype"),
    [
        ({"bf16": True}, {}, "bf16"),
        pytest.param({}, {}, "fp32", marks=pytest.mark.heavy),
        pytest.param({"bf16": True}, {"dtype": "tf32"}, "tf32", marks=pytest.mark.heavy),
        pytest.param(COMPILED, {}, "fp32", marks=pytest.mark.heavy),
        pytest.param({**COMPILED, "bf16": True}, {}, "bf16", marks=pytest.mark.heavy),
    ],
)
def test_dtype_is_that_of_the_products_unless_the_config_says(
    given: dict[str, Any], config: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    monitoring = {"mfu_calculation_mode": "estimate", "peak_flops_per_s": PEAK, **config}
    make_trainer(tmp_path, FlopcalcCallback({"monitoring": monitoring}), max_steps=1, **given).train()
    torch._dynamo.reset()
    assert [line["perf/dtype"] for line in read_log(tmp_path / "flopcalc.jsonl")] == [dtype]


@pytest.mark.parametrize(
    ("layout", "shares"),
    [
        (None, {}),
        ({}, {"tensor_parallel": 1, "context_parallel": 1}),
        ({"dp_shard_size": 4, "cp_size": 2}, {"tensor_parallel": 1, "context_parallel": 2}),
        ({"dp_shard_size": 2, "tp_size": 4}, {"tensor_parallel": 4, "context_parallel": 1}),
        ({"sp_size": 8, "sp_backend": "deepspeed"}, {"tensor_parallel": 1, "context_parallel": 8}),
    ],
)
def test_ranks_that_share_a_sequence_are_read_from_the_arguments(layout: Any, shares: dict[str, int]) -> None:
    parallelism = ParallelismConfig(**layout) if layout is not None else None
    assert hf._find_shares(types.SimpleNamespace(parallelism_config=parallelism)) == shares


@pytest.mark.heavy
def test_the_config_names_the_sinks(tmp_path: Path) -> None:
    callback = FlopcalcCallback({"monitoring": {**CONFIG["monitoring"], "sinks": ["jsonl"]}})
    make_trainer(tmp_path, callback, report_to=["tensorboard"], max_steps=1).train()
    assert callback.monitor.settings.sinks == ("jsonl",)


def test_folder_and_file_may_be_given(tmp_path: Path) -> None:
    callback = FlopcalcCallback(CONFIG, output_dir=tmp_path / "elsewhere", log_file=tmp_path / "my.jsonl")
    make_trainer(tmp_path / "run", callback, max_steps=1).train()
    assert len(read_log(tmp_path / "my.jsonl")) == 1
    assert (tmp_path / "elsewhere" / "goodput.json").is_file()
    assert not (tmp_path / "run" / "flopcalc.jsonl").exists()


def test_a_given_monitor_is_driven_and_left_open(tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path / "mine", CONFIG)
    trainer = make_trainer(tmp_path, FlopcalcCallback(monitor=monitor), max_steps=2)
    witness = Witness(trainer.model)
    trainer.train()
    monitor.log_datasets({"web": {"loss": 1.0}})
    monitor.close()
    found = [line["perf/model_flops"] for line in read_log(tmp_path / "mine" / "flopcalc.jsonl")]
    assert found == witness.count_flops([1, 1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": {"monitoring": {"detail_evry": 1}}}, "detail_evry.*Did you mean monitoring.detail_every"),
        ({"config": "missing.yaml"}, "missing.yaml"),
        ({"config": {}, "monitor": Recorder(None)}, "give these, or the monitor"),
        ({"log_file": "a", "monitor": Recorder(None)}, "give these, or the monitor"),
    ],
)
def test_a_bad_construction_raises_at_once(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FlopcalcCallback(**given)


def test_frequencies_that_disagree_are_said_at_the_start(tmp_path: Path) -> None:
    config = {
        "monitoring": {**CONFIG["monitoring"], "flops_profile_freq": 3},
        "monitor": {"freq": {"flops_profile_freq": 4}},
    }
    trainer = make_trainer(tmp_path, FlopcalcCallback(config), max_steps=1)
    with pytest.warns(RuntimeWarning, match="frequencies disagree"):
        trainer.train()


def test_a_model_that_is_not_hugging_faces_is_counted_by_tracing(tmp_path: Path) -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = make_llama()

        def forward(self, **batch: Any) -> Any:
            return {"loss": self.inside(**batch).loss}

    model = Plain()
    witness = Witness(model)
    trainer = make_trainer(tmp_path, FlopcalcCallback(CONFIG), model=model, max_steps=2)
    with pytest.warns(RuntimeWarning, match="Plain is counted by tracing its calls, under convention full, in fp32"):
        trainer.train()
    steps = read_log(tmp_path / "flopcalc.jsonl")
    counts = [estimate_flops(model.inside, batch=batch, convention="full").total for batch in witness.batches]
    assert [line["perf/model_flops"] for line in steps] == counts
    assert {line["perf/convention"] for line in steps} == {"full"}
    for line in steps:
        assert line["perf/mfu"] == line["perf/model_flops"] / (line["perf/step_time"] * PEAK)


TWO_RANKS = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1].split(__import__('os').pathsep)
from test_hf import FlopcalcCallback, CONFIG, list_losses, make_trainer
import os, json, torch
folder = Path(sys.argv[2]) / f"rank{os.environ['RANK']}"
callback = FlopcalcCallback(CONFIG, output_dir=folder)
trainer = make_trainer(Path(sys.argv[2]) / "run", callback, max_steps=3, ddp_backend="gloo")
trainer.train()
print(json.dumps(list_losses(trainer)))
torch.distributed.destroy_process_group()
"""


@pytest.mark.heavy
def test_of_two_ranks_only_the_first_writes(tmp_path: Path) -> None:
    shared = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_port()),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", TWO_RANKS, f"{HELPERS}{os.pathsep}{Path(__file__).parent}", str(tmp_path)]
    ranks = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], answers
    steps = read_log(tmp_path / "rank0" / "flopcalc.jsonl")
    assert list(dict.fromkeys(line["global_step"] for line in steps)) == [1, 2, 3]
    assert steps[-1]["perf/scope"] == "all 2 ranks"
    assert not (tmp_path / "rank1").exists()


def find_port() -> int:
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
