"""FlopcalcMonitor in real Lightning runs: exact FLOPs of every step, Lightning's own numbers unchanged."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from loop import Clock
from peft import LoraConfig, get_peft_model
from places import HELPERS
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

from flopcalc import ConfigError
from flopcalc.monitor import FlopcalcMonitor, Settings
from flopcalc.monitor import lightning as ours

pytestmark = [
    # Advice about workers, folders and loops that a tiny test does not need
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    # Lightning 2.6 asks torch 2.13 in an old way
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
]
RATES = [
    "perf/mfu",
    "perf/mfu_percent",
    "perf/step_time",
    "perf/steps_per_second",
    "perf/tokens_per_second",
    "perf/samples_per_second",
]


class Module(pl.LightningModule):
    def __init__(self, model: Any = None) -> None:
        super().__init__()
        self.model = model if model is not None else make_llama()
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, _index: int) -> Any:
        loss = self.model(**batch).loss
        self.seen.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, _index: int) -> None:
        self.model(**batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Manual(Module):
    """Two optimizer steps for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()


class Distilled(Module):
    """A frozen teacher stands before the model that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict({"teacher": make_llama(1).requires_grad_(False), "student": make_llama()})

    def training_step(self, batch: Any, _index: int) -> Any:
        with torch.no_grad():
            self.model["teacher"](**batch)
        loss = self.model["student"](**batch).loss
        self.seen.append(loss.detach())
        return loss


class Board(Logger):
    """Keeps what it is sent."""

    name = version = "board"

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step, metrics))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def make_loader(data: Any = None, collate: Any = pad) -> Any:
    rows = data if data is not None else make_text(30)
    return torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=collate)


def make_trainer(folder: Path, *callbacks: Any, **given: Any) -> pl.Trainer:
    args = {
        "accelerator": "cpu", "devices": 1, "max_steps": 4, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "log_every_n_steps": 1, "barebones": False,
    }  # fmt: skip
    return pl.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**args, **given})


def make_lora() -> Any:
    return get_peft_model(make_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


KINDS: dict[str, dict[str, Any]] = {
    "padded text": {},
    "accumulation": {"accumulate_grad_batches": 3, "micro": [3, 3, 3, 3]},
    "accumulation with a rest": {
        "accumulate_grad_batches": 4,
        "max_steps": -1,
        "max_epochs": 2,
        "data": make_text(12),
        "micro": [4, 2, 4, 2],
    },
    "images": {"model": make_qwen2_vl, "data": make_pictures(10), "collate": pad_pictures},
    "LoRA": {"model": make_lora},
    "bf16": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_flops_of_every_step_are_those_of_its_batches_and_training_is_unchanged(kind: str, tmp_path: Path) -> None:
    given = dict(KINDS[kind])
    make, data, collate = given.pop("model", make_llama), given.pop("data", None), given.pop("collate", pad)
    micro = given.pop("micro", [1] * 4)
    plain = Module(make())
    make_trainer(tmp_path, **given).fit(plain, make_loader(data, collate))

    module = Module(make())
    witness = Witness(module.model)
    callback = FlopcalcMonitor(CONFIG)
    make_trainer(tmp_path, callback, **given).fit(module, make_loader(data, collate))

    assert torch.equal(torch.stack(module.seen), torch.stack(plain.seen))
    theirs = plain.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in module.state_dict().items())
    steps = read_log(tmp_path / "flopcalc.jsonl")
    assert [line["global_step"] for line in steps] == list(range(1, len(micro) + 1))
    assert [line["perf/model_flops"] for line in steps] == witness.count_flops(micro)
    assert [line["training/lr"] for line in steps] == [0.05] * len(micro)
    assert len(list_hooks(module.model)) == 1  # the witness's own


def test_loss_is_the_mean_of_the_steps_micro_batches(tmp_path: Path) -> None:
    module = Module()
    make_trainer(tmp_path, FlopcalcMonitor(CONFIG), accumulate_grad_batches=2, max_steps=2).fit(module, make_loader())
    found = [line["training/loss"] for line in read_log(tmp_path / "flopcalc.jsonl")]
    seen = [float(each) for each in module.seen]
    assert found == pytest.approx([sum(seen[:2]) / 2, sum(seen[2:]) / 2], rel=1e-6)


def test_learning_rate_is_that_of_the_step(tmp_path: Path) -> None:
    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    make_trainer(tmp_path, FlopcalcMonitor(CONFIG), max_steps=3).fit(Scheduled(), make_loader())
    assert [line["training/lr"] for line in read_log(tmp_path / "flopcalc.jsonl")] == [0.05, 0.025, 0.0125]


@pytest.mark.heavy
@pytest.mark.parametrize("compiled", ["the model", "the whole module"])
def test_a_compiled_model_is_seen(compiled: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    eager = Module()
    witness = Witness(eager.model)
    make_trainer(tmp_path, max_steps=2).fit(eager, make_loader())
    if compiled == "the model":
        module: Any = Module(torch.compile(make_llama(), backend="eager"))
    else:
        module = torch.compile(Module(), backend="eager")
    make_trainer(tmp_path, FlopcalcMonitor(CONFIG), max_steps=2).fit(module, make_loader())
    torch._dynamo.reset()
    assert [line["perf/model_flops"] for line in read_log(tmp_path / "flopcalc.jsonl")] == witness.count_flops([1, 1])


def test_the_model_that_trains_is_counted(tmp_path: Path) -> None:
    module = Distilled()
    witness = Witness(module.model["student"])
    make_trainer(tmp_path, FlopcalcMonitor(CONFIG), max_steps=2).fit(module, make_loader())
    assert [line["perf/model_flops"] for line in read_log(tmp_path / "flopcalc.jsonl")] == witness.count_flops([1, 1])


def test_with_manual_optimization_a_batch_is_a_step(tmp_path: Path) -> None:
    module = Manual()
    witness = Witness(module.model)
    make_trainer(tmp_path, FlopcalcMonitor(CONFIG), max_steps=6).fit(module, make_loader())
    steps = read_log(tmp_path / "flopcalc.jsonl")
    assert [line["global_step"] for line in steps] == [2, 4, 6]
    assert [line["perf/model_flops"] for line in steps] == witness.count_flops([2, 2, 2])


EVENTS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "plain": ({"max_steps": 2}, ["attach", "begin", ("end", 1), ("report", 1), "begin", ("end", 2), ("report", 2)]),
    "accumulation": (
        {"max_steps": 2, "accumulate_grad_batches": 2},
        ["attach", "begin", ("end", 1), ("report", 1), "begin", ("end", 2), ("report", 2)],
    ),
    "a rest": (
        {"max_steps": 3, "log_every_n_steps": 2},
        ["attach", "begin", ("end", 1), "begin", ("end", 2), ("report", 2), "begin", ("end", 3), ("report", 3)],
    ),
    "no logs": (
        {"max_steps": 2, "log_every_n_steps": 0},
        ["attach", "begin", ("end", 1), "begin", ("end", 2), ("report", 2)],
    ),
    "validation between steps": (
        {"max_steps": 2, "val_check_interval": 1, "limit_val_batches": 1},
        [
            "attach", "begin", ("end", 1), ("report", 1), ("lost", "eval"), "begin", ("end", 2), ("report", 2),
            ("lost", "eval"),
        ],
    ),
    "validation in the midst of a step": (
        {"max_steps": 1, "val_check_interval": 1, "limit_val_batches": 1, "accumulate_grad_batches": 2},
        ["attach", "begin", ("pause", "eval"), ("go on", "eval"), ("end", 1), ("report", 1), ("lost", "eval")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EVENTS)
def test_events_reach_the_monitor_in_order(case: str, tmp_path: Path) -> None:
    given, calls = EVENTS[case]
    recorder = Recorder(Settings())
    trainer = make_trainer(tmp_path, FlopcalcMonitor(monitor=recorder), **given)
    trainer.fit(Module(), make_loader(), make_loader(make_text(2)) if "limit_val_batches" in given else None)
    assert recorder.calls == calls
    assert recorder.said == []


def test_time_of_validation_and_checkpoints_is_lost_and_in_no_step(tmp_path: Path, clock: Clock) -> None:
    class Slow(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            clock.tick(1)
            return super().training_step(batch, index)

        def validation_step(self, batch: Any, index: int) -> None:
            clock.tick(100)
            super().validation_step(batch, index)

        def on_save_checkpoint(self, _checkpoint: Any) -> None:
            clock.tick(10_000)

    trainer = make_trainer(
        tmp_path,
        FlopcalcMonitor(CONFIG),
        ModelCheckpoint(tmp_path, every_n_train_steps=2, save_weights_only=True),
        enable_checkpointing=True,
        val_check_interval=2,
        num_sanity_val_steps=1,
    )
    trainer.fit(Slow(), make_loader(), make_loader(make_text(2)))
    assert [line["perf/step_time"] for line in read_log(tmp_path / "flopcalc.jsonl")] == [1.0] * 4
    goodput = read_log(tmp_path / "flopcalc.jsonl", "end")[0]["goodput"]
    assert goodput["lost_eval_s"] == 2 * 100  # the check before training came before the monitor
    assert goodput["lost_checkpoint_s"] == 2 * 10_000
    assert goodput["productive_s"] == 4
    assert "save_checkpoint" not in vars(trainer)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(tmp_path: Path) -> None:
    """Nothing waits for the device, so a record may reach the loggers later, but under its own step."""
    board = Board()
    module = Module(make_qwen2_vl())
    witness = Witness(module.model)
    trainer = make_trainer(tmp_path, FlopcalcMonitor(CONFIG), accelerator="gpu", logger=board, max_steps=6)
    trainer.fit(module, make_loader(make_pictures(12), pad_pictures))
    steps = read_log(tmp_path / "flopcalc.jsonl")
    assert [line["perf/model_flops"] for line in steps] == witness.count_flops([1] * 6)
    sent = {step: line["perf/mfu"] for step, line in board.lines if "perf/mfu" in line}
    assert sent
    assert all(value == steps[step]["perf/mfu"] for step, value in sent.items())
    assert 5 in sent


def test_loggers_get_the_rates_under_lightnings_own_step(tmp_path: Path) -> None:
    class Logged(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            self.log("mine", loss)
            return loss

    board = Board()
    make_trainer(tmp_path, FlopcalcMonitor(CONFIG), logger=board, log_every_n_steps=2).fit(Logged(), make_loader())
    steps = {line["global_step"]: line for line in read_log(tmp_path / "flopcalc.jsonl")}
    sent = [(step, line) for step, line in board.lines if "perf/mfu" in line]
    assert [step for step, _ in sent] == [step for step, line in board.lines if "mine" in line] == [1, 3]
    for step, line in sent:
        assert line == {key: steps[step + 1][key] for key in RATES}


def test_records_that_the_device_is_not_done_with_reach_loggers_later(tmp_path: Path) -> None:
    """As on a GPU: at a report the newest numbers are those of an earlier one."""
    recorder = Recorder(Settings())
    numbers = iter([float("nan"), 1, 1, 3])
    recorder.metrics = lambda: {"global_step": next(numbers, 4), "perf/mfu": 0.5}
    board = Board()
    trainer = make_trainer(tmp_path, FlopcalcMonitor(monitor=recorder), logger=board)
    trainer.fit(Module(), make_loader())
    assert [step for step, line in board.lines if "perf/mfu" in line] == [0, 2, 3]


def test_the_log_lies_beside_the_loggers_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, FlopcalcMonitor(CONFIG), logger=CSVLogger(tmp_path, "csv"), max_steps=1)
    trainer.fit(Module(), make_loader())
    assert len(read_log(Path(trainer.logger.log_dir) / "flopcalc.jsonl")) == 1
    assert "perf/mfu" in (Path(trainer.logger.log_dir) / "metrics.csv").read_text()


def test_folder_and_file_may_be_given(tmp_path: Path) -> None:
    callback = FlopcalcMonitor(CONFIG, output_dir=tmp_path / "elsewhere", log_file=tmp_path / "my.jsonl")
    make_trainer(tmp_path, callback, max_steps=1).fit(Module(), make_loader())
    assert len(read_log(tmp_path / "my.jsonl")) == 1
    assert (tmp_path / "elsewhere" / "goodput.json").is_file()


@pytest.mark.parametrize(
    ("precision", "config", "is_compiled", "dtype"),
    [
        ("32-true", {}, False, "fp32"),
        ("bf16-mixed", {}, False, "bf16"),
        ("bf16-true", {}, False, "bf16"),
        ("bf16-mixed", {"dtype": "tf32"}, False, "tf32"),
        pytest.param("32-true", {}, True, "fp32", marks=pytest.mark.heavy),
        pytest.param("bf16-mixed", {}, True, "bf16", marks=pytest.mark.heavy),
        pytest.param("bf16-true", {}, True, "bf16", marks=pytest.mark.heavy),
    ],
)
def test_dtype_is_that_of_the_products_unless_the_config_says(
    precision: str, config: dict[str, Any], is_compiled: bool, dtype: str, tmp_path: Path
) -> None:
    model = torch.compile(make_llama(), backend="eager") if is_compiled else make_llama()
    monitoring = {"mfu_calculation_mode": "estimate", "peak_flops_per_s": PEAK, **config}
    callback = FlopcalcMonitor({"monitoring": monitoring})
    make_trainer(tmp_path, callback, max_steps=1, precision=precision).fit(Module(model), make_loader())
    torch._dynamo.reset()
    assert [line["perf/dtype"] for line in read_log(tmp_path / "flopcalc.jsonl")] == [dtype]
    assert callback.monitor.settings.sinks == ("jsonl",)


def test_a_checkpoint_goes_on_with_the_numbers(tmp_path: Path) -> None:
    callback = FlopcalcMonitor(CONFIG)
    first = make_trainer(tmp_path, callback, max_steps=2)
    first.fit(Module(), make_loader())
    first.save_checkpoint(tmp_path / "two.ckpt")
    make_trainer(tmp_path, FlopcalcMonitor(CONFIG), max_steps=4).fit(
        Module(), make_loader(), ckpt_path=tmp_path / "two.ckpt", weights_only=False
    )
    assert [line["global_step"] for line in read_log(tmp_path / "flopcalc.jsonl")] == [1, 2, 3, 4]


def test_fit_may_be_called_twice(tmp_path: Path) -> None:
    callback = FlopcalcMonitor(CONFIG)
    module = Module()
    trainer = make_trainer(tmp_path, callback, max_steps=2)
    trainer.fit(module, make_loader())
    first = callback.monitor
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(module, make_loader())
    assert callback.monitor is not first
    assert [line["global_step"] for line in read_log(tmp_path / "flopcalc.jsonl")] == [1, 2, 3]
    assert list_hooks(module.model) == []


class Trap(Exception):
    pass


def test_an_error_in_training_stays_what_it_is_and_ends_the_log(tmp_path: Path) -> None:
    class Failing(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            if index == 1:
                raise Trap("second step")
            return loss

    module = Failing()
    trainer = make_trainer(tmp_path, FlopcalcMonitor(CONFIG))
    with pytest.raises(Trap, match="second step"):
        trainer.fit(module, make_loader())
    assert [line["global_step"] for line in read_log(tmp_path / "flopcalc.jsonl")] == [1]
    assert len(read_log(tmp_path / "flopcalc.jsonl", "end")) == 1
    assert list_hooks(module.model) == []
    assert "save_checkpoint" not in vars(trainer)


@pytest.mark.parametrize(
    ("part", "events"), [("_open", 1), ("_end_step", 1), ("_report", 2), ("_lose", 1), ("_time_saves", 1), ("_log", 2)]
)
def test_an_error_in_the_callback_becomes_one_warning_per_event(
    part: str, events: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"val_check_interval": 1, "limit_val_batches": 1}
    plain = Module()
    make_trainer(tmp_path, **given).fit(plain, make_loader(), make_loader())

    def fail(*_: Any, **__: Any) -> None:
        raise Trap("inside")

    callback = FlopcalcMonitor(CONFIG)
    monkeypatch.setattr(FlopcalcMonitor, part, fail)
    module = Module()
    trainer = make_trainer(tmp_path, callback, **given)
    with pytest.warns(RuntimeWarning, match="the callback failed in on_.*Trap: inside") as warned:
        trainer.fit(module, make_loader(), make_loader())
    assert sum("the callback failed" in str(each.message) for each in warned) == events
    assert torch.equal(torch.stack(module.seen), torch.stack(plain.seen))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_works_by_itself(make_copy: Any, tmp_path: Path) -> None:
    callback = FlopcalcMonitor(CONFIG)
    make_trainer(tmp_path / "one", callback, max_steps=1).fit(Module(), make_loader())
    copied = make_copy(callback)
    assert copied.monitor is None
    make_trainer(tmp_path / "two", copied, max_steps=1).fit(Module(), make_loader())
    assert [line["global_step"] for line in read_log(tmp_path / "two" / "flopcalc.jsonl")] == [1]


def test_validate_and_predict_outside_of_fit_leave_nothing(tmp_path: Path) -> None:
    callback = FlopcalcMonitor(CONFIG)
    make_trainer(tmp_path, callback).validate(Module(), make_loader(make_text(2)), verbose=False)
    assert callback.monitor is None
    assert not (tmp_path / "flopcalc.jsonl").exists()


def test_a_bad_construction_raises_at_once() -> None:
    with pytest.raises(ConfigError, match="detail_evry"):
        FlopcalcMonitor({"monitoring": {"detail_evry": 1}})


def test_a_module_without_a_model_of_hugging_faces_is_hooked_itself() -> None:
    module = torch.nn.Linear(2, 2)
    assert ours._find_models(module) == [module]


PACKAGES = """
import sys, warnings
from importlib import import_module
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
first, trainers = sys.argv[3].split(",")
import_module(first)
from flopcalc.monitor import FlopcalcMonitor
assert FlopcalcMonitor.__mro__[2].__module__.startswith(first), FlopcalcMonitor.__mro__
pl = import_module(trainers)
from tiny import CONFIG, make_llama, make_text, pad
import torch

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_llama()
    def training_step(self, batch, index):
        return self.model(**batch).loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

loader = torch.utils.data.DataLoader(make_text(8), batch_size=2, collate_fn=pad)
trainer = pl.Trainer(
    accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False, default_root_dir=sys.argv[2],
    enable_checkpointing=False, callbacks=[FlopcalcMonitor(CONFIG)], log_every_n_steps=1,
)
trainer.fit(Module(), loader)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("packages", ["pytorch_lightning,pytorch_lightning", "lightning.pytorch,pytorch_lightning"])
def test_both_packages_work(packages: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PACKAGES, str(HELPERS), str(tmp_path), packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert [line["global_step"] for line in read_log(tmp_path / "flopcalc.jsonl")] == [1, 2]
