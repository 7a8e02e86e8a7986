"""The hooks on a model: which forward passes are seen, and that the model is otherwise what it was."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from loop import make_model, work
from tiny import CONFIG, PEAK, list_hooks, make_llama, make_text, pad, read_log

from flopcalc import bind, estimate_flops
from flopcalc.monitor import TrainingMonitor
from flopcalc.monitor.hooks import Idle

PRESET = "llama-3.1-8b"
IDS = torch.zeros(2, 8, dtype=torch.long)
ONE = estimate_flops(PRESET, batch={"input_ids": IDS}).total


class Echo(torch.nn.Module):
    """Stands for a model; what is counted is a preset."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        if kwargs.get("fails"):
            raise ValueError("as asked")
        return input_ids


def watch(folder: Path, module: torch.nn.Module) -> TrainingMonitor:
    monitor = TrainingMonitor(folder, CONFIG, model=bind(PRESET))
    monitor.attach(module)
    return monitor


def count_step(monitor: TrainingMonitor) -> float:
    monitor.log_step(monitor._number + 1, 0, 0.5, 1.0, 0.1)
    flops: float = monitor.metrics()["perf/model_flops"]
    return flops


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {"input_ids": IDS}), ((IDS,), {}), ((), {"input_ids": IDS, "fails": False, "mask": None})],
    ids=["by name", "by place", "with more"],
)
def test_every_training_pass_is_counted(args: Any, kwargs: Any, tmp_path: Path) -> None:
    module = Echo()
    with watch(tmp_path, module) as monitor:
        for passes in (1, 3, 1):
            for _ in range(passes):
                module(*args, **kwargs)
            assert count_step(monitor) == passes * ONE


def test_what_does_not_train_and_what_raised_is_not_counted(tmp_path: Path) -> None:
    module = Echo()

    def fail() -> None:
        with pytest.raises(ValueError, match="as asked"):
            module(IDS, fails=True)

    def evaluate() -> None:
        module.eval()
        module(IDS)
        module.train()
        with torch.no_grad():
            module(IDS)

    def train() -> None:
        module(IDS)

    with watch(tmp_path, module) as monitor:
        for calls in (
            [train],
            [fail, train],
            [train, fail],
            [fail, evaluate, train],
            [evaluate, train, evaluate, fail],
            [fail, fail, train, evaluate],
        ):
            for call in calls:
                call()
            assert count_step(monitor) == ONE


def test_passes_of_several_threads_are_added(tmp_path: Path) -> None:
    """DataParallel's replicas run at the same time, and share the module's hooks."""
    inside = threading.Barrier(4)

    class Slow(Echo):
        def forward(self, input_ids: Any = None, **_kwargs: Any) -> Any:
            inside.wait(60)
            return input_ids

    module = Slow()
    with watch(tmp_path, module) as monitor:
        monitor.begin_step()  # as the callback for the Trainer does
        threads = [threading.Thread(target=module, args=(IDS,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert count_step(monitor) == 4 * ONE


def test_a_model_may_give_its_arguments_any_name(tmp_path: Path) -> None:
    class Named(torch.nn.Module):
        def forward(self, x: torch.Tensor, **kwargs: int) -> int:
            return int(x.sum()) + sum(kwargs.values())

    module, x = Named(), torch.ones(2, 3)
    names = {"module": 1, "args": 2, "kwargs": 4, "monitor": 8, "seen": 16}
    with watch(tmp_path, module):
        assert module(x=x, **names) == 37


def test_whether_it_trains_is_asked_of_the_module_that_runs(tmp_path: Path) -> None:
    class Shell(torch.nn.Module):
        """Trains when what is inside does, as a compiled module."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = Echo()

        @property
        def training(self) -> bool:  # type: ignore[override]
            return self.inner.training

        @training.setter
        def training(self, _value: bool) -> None:
            return

        def forward(self, **kwargs: Any) -> Any:
            return self.inner(**kwargs)

    module = Shell()
    with watch(tmp_path, module) as monitor:
        module.inner.eval()
        module(input_ids=IDS)
        module.inner.train()
        module(input_ids=IDS)
        assert count_step(monitor) == ONE


# --- The model is what it was -----------------------------------------------------------------------------------------


def test_only_hooks_hang_on_a_watched_model_and_none_after(tmp_path: Path) -> None:
    model = make_llama().train()
    forward, state, names = model.forward, list(model.state_dict()), set(vars(model))
    theirs = [model.register_forward_pre_hook(lambda *_: None), model.register_forward_hook(lambda *_: None)]
    before = list_hooks(model)
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor:
        assert len(list_hooks(model)) == len(before) + 2
        assert set(vars(model)) == names
        assert model.forward == forward
        assert inspect.signature(model.forward) == inspect.signature(forward)
        assert list(model.state_dict()) == state
        model.forward(**pad(make_text(2)))  # only a call is seen
        assert monitor._open is None
        model(**pad(make_text(2)))
        assert monitor._open is not None
    assert list_hooks(model) == before
    for handle in theirs:
        handle.remove()


def test_copies_and_pickles_carry_idle_hooks(tmp_path: Path) -> None:
    model, batch = make_llama().train(), pad(make_text(2))
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(file, weights_only=False),
            copy.deepcopy({"x": [model]})["x"][0],
        ):
            assert [type(hook) for hook in list_hooks(twin)] == [Idle, Idle]
            twin(**batch)
            assert monitor._open is None
    assert list_hooks(model) == []


@pytest.mark.parametrize("is_first", [True, False])
def test_whoever_wraps_forward_is_called_and_left_alone(is_first: bool, tmp_path: Path) -> None:
    model, calls = make_llama().train(), []
    monitor = TrainingMonitor(tmp_path, CONFIG)
    if is_first:
        monitor.attach(model)
    inner = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    vars(model)["forward"] = forward
    monitor.attach(model)
    assert len(list_hooks(model)) == 2
    model(**pad(make_text(2)))
    assert count_step(monitor) > 0
    monitor.close()
    assert model.forward is forward
    assert list_hooks(model) == []
    model(**pad(make_text(2)))
    assert len(calls) == 2


def test_other_hooks_run_in_their_order_and_may_change_what_goes_through(tmp_path: Path) -> None:
    module, order = Echo(), []

    def double(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        order.append("pre")
        return args, {"input_ids": torch.cat([kwargs["input_ids"]] * 2)}

    def halve(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        order.append("post")
        return output[:2]

    module.register_forward_pre_hook(double, with_kwargs=True)
    with watch(tmp_path, module) as monitor:
        module.register_forward_hook(halve)
        assert module(input_ids=IDS).shape == (2, 8)
        assert order == ["pre", "post"]
        assert count_step(monitor) == 2 * ONE  # what the model was given


def test_the_dtype_is_looked_at_once(tmp_path: Path) -> None:
    model = make_model()
    config = {"monitoring": {"mfu_calculation_mode": "estimate", "device": "h200", "skip_first": 0}}
    with TrainingMonitor(tmp_path, config, model=model) as monitor:
        inside = [module for module in model.modules() if module is not model and list_hooks(module)]
        assert len(inside) == 1
        with torch.autocast("cpu", torch.bfloat16):
            work(model, pad(make_text(2)))
        assert list_hooks(inside[0]) == []
        monitor.log_step(1, 0, 0.5, 1.0, 0.1)
        assert monitor.metrics()["perf/dtype"] == "bf16"


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_traces_and_exports_are_those_of_a_bare_model(tmp_path: Path) -> None:
    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).relu()

    module, x = Line().train(), torch.ones(1, 2)

    def look() -> list[str]:
        graphs: list[Any] = [torch.export.export(module, (x,), strict=strict).graph for strict in (True, False)]
        return list(map(str, [*graphs, torch.fx.symbolic_trace(module).graph]))

    bare, bare_code = look(), torch.jit.trace(module, (x,)).code
    with TrainingMonitor(tmp_path, CONFIG, model=module) as monitor:
        assert len(list_hooks(module)) == 2
        assert look() == bare
        assert monitor._open is None  # these were no forward passes
        assert torch.jit.trace(module, (x,)).code == bare_code


def test_a_model_that_is_compiled_after_it_was_given_is_one_graph(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model: Any = make_model(0.0)
    config = {"monitoring": {"mfu_calculation_mode": "estimate", "peak_flops_per_s": PEAK}}  # the dtype is looked for
    with TrainingMonitor(tmp_path, config, model=model):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        batch = pad(make_text(2))
        assert torch.equal(compiled(**batch).loss, model(**batch).loss)


def test_two_monitors_on_one_model(tmp_path: Path) -> None:
    module = Echo()
    with watch(tmp_path / "1", module) as first, watch(tmp_path / "2", module) as second:
        assert len(list_hooks(module)) == 4
        module(IDS)
        assert count_step(first) == count_step(second) == ONE
        first.close()
        module(IDS)
        assert count_step(second) == ONE
    assert list_hooks(module) == []
    assert len(read_log(tmp_path / "1" / "flopcalc.jsonl")) == 1
