"""Running and Caller: which forward passes are noted as one more of the same, and what is left on a model."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from tiny import CONFIG, list_hung, make_llama, make_text, pad

from flopcalc.monitor import TrainingMonitor
from flopcalc.monitor.batch import Snapshot
from flopcalc.monitor.hooks import Caller, Running, _is_call_known
from flopcalc.monitor.lane import Lane, RunEntry

IDS = torch.zeros(2, 8, dtype=torch.long)
OTHER = torch.zeros(4, 4, dtype=torch.long)  # as many
VALUES = (0, 0.5, None, 0.1)


class Monitor:
    """Keeps what goes the long way."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[Any, ...], list[str]]] = []

    def _see(self, args: tuple[Any, ...], kwargs: dict[str, Any], _names: tuple[str, ...]) -> None:
        self.seen.append((args, list(kwargs)))


class Echo(torch.nn.Module):
    def forward(self, *_args: Any, **kwargs: Any) -> None:
        if kwargs.get("fails"):
            raise ValueError


def open_lane(running: Running, kwargs: dict[str, Any], counted: tuple[str, ...] = ("input_ids",)) -> Lane:
    snapshot = Snapshot(tuple((name, kwargs[name].shape) for name in counted), (), {})
    intake: Any = None
    lane = Lane(kwargs, snapshot, intake, 5)
    lane.open(running, 64, lambda: 7, VALUES)
    return lane


WAYS = ["around", "hooks"]


def hang(module: torch.nn.Module, way: str = "hooks") -> tuple[Running, Monitor]:
    running, monitor = Running(), Monitor()
    watcher: Any = monitor
    running.watch(watcher, module, ())
    if way == "around":
        assert Caller.fits(module)
        Caller(running, module)
    else:
        module.register_forward_pre_hook(running.see, with_kwargs=True)
        module.register_forward_hook(running.done)
    return running, monitor


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("first", "counted", "then", "is_noted"),
    [
        ({"input_ids": IDS}, ("input_ids",), {"input_ids": IDS.clone()}, True),
        ({"input_ids": IDS}, ("input_ids",), {"input_ids": OTHER}, False),
        ({"input_ids": IDS}, ("input_ids",), {"inputs_embeds": IDS}, False),
        ({"input_ids": IDS}, ("input_ids",), {"input_ids": IDS, "labels": IDS}, False),
        ({"input_ids": IDS}, ("input_ids",), {"input_ids": None}, False),
        ({"input_ids": IDS, "labels": IDS}, ("input_ids",), {"labels": IDS, "input_ids": IDS}, True),
        ({"labels": IDS, "input_ids": IDS}, ("input_ids",), {"labels": IDS, "input_ids": IDS}, True),
        ({"input_ids": IDS, "labels": IDS}, ("input_ids",), {"input_ids": IDS}, False),
        ({"input_ids": IDS, "labels": IDS}, ("input_ids",), {"input_ids": IDS, "attention_mask": IDS}, False),
        ({"input_ids": IDS, "labels": IDS, "x": 1}, ("input_ids",), {"input_ids": IDS, "labels": IDS, "x": 2}, True),
        ({"input_ids": IDS, "labels": IDS, "x": 1}, ("input_ids",), {"input_ids": IDS, "labels": IDS, "y": 1}, False),
        ({"input_ids": IDS, "mask": None}, ("input_ids",), {"input_ids": IDS, "mask": None}, True),
        ({"input_ids": IDS, "mask": None}, ("input_ids",), {"input_ids": IDS, "mask": IDS}, False),
        ({"input_ids": IDS, "px": IDS}, ("input_ids", "px"), {"input_ids": IDS, "px": IDS}, True),
        ({"input_ids": IDS, "px": IDS}, ("input_ids", "px"), {"input_ids": IDS, "px": OTHER}, False),
    ],
)
def test_what_is_noted(
    first: dict[str, Any], counted: tuple[str, ...], then: dict[str, Any], is_noted: bool, way: str
) -> None:
    module = Echo()
    running, monitor = hang(module, way)
    open_lane(running, first, counted)
    module(**then)
    assert (running.calls, running.begun, running.is_unended) == ((1, 7, False) if is_noted else (0, 0, False))
    assert monitor.seen == ([] if is_noted else [((), list(then))])


@pytest.mark.parametrize("way", WAYS)
def test_what_is_given_by_place_goes_the_long_way(way: str) -> None:
    module = Echo()
    running, monitor = hang(module, way)
    open_lane(running, {"input_ids": IDS})
    module(IDS)
    assert running.calls == 0
    assert monitor.seen == [((IDS,), [])]


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_pass_that_raised_is_replaced(way: str) -> None:
    module = Echo()
    running, monitor = hang(module, way)
    given = {"input_ids": IDS, "fails": False}
    open_lane(running, given)
    module(**given)
    with pytest.raises(ValueError):  # noqa: PT011 - our own
        module(input_ids=IDS, fails=True)
    assert (running.calls, running.is_unended) == (2, True)
    module(**given)
    assert (running.calls, running.is_unended) == (2, False)
    with pytest.raises(ValueError):  # noqa: PT011 - our own
        module(input_ids=IDS, fails=True)
    module.eval()
    module(**given)  # which does not train, and does not end the one that did
    assert (running.calls, running.is_unended) == (3, True)
    module.train()
    module(**given)
    assert (running.calls, running.is_unended) == (3, False)
    with torch.no_grad():
        module(**given)
    assert running.calls == 3
    assert monitor.seen == []


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

    def forward(self, **_kwargs: Any) -> None:
        return


def bind_anew(module: torch.nn.Module) -> torch.nn.Module:
    """As accelerate's compile_regions does it: the same attributes, methods bound to the new module."""
    made = type(module).__new__(type(module))
    vars(made).update(vars(module))
    for name, value in list(vars(made).items()):
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(made)[name] = MethodType(value.__func__, made)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_whether_it_trains_is_asked_of_the_module_that_runs(way: str) -> None:
    module = Echo()
    running, _ = hang(module, way)
    open_lane(running, {"input_ids": IDS})
    twin = bind_anew(module).eval()
    twin(input_ids=IDS)
    assert running.calls == 0
    module(input_ids=IDS)
    assert running.calls == 1
    shell = Shell()
    running, _ = hang(shell, way)
    open_lane(running, {"input_ids": IDS})
    shell.inner.eval()
    shell(input_ids=IDS)
    assert running.calls == 0
    shell.inner.train()
    shell(input_ids=IDS)
    assert running.calls == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_deep_copy_is_idle(way: str) -> None:
    module = Echo()
    running, monitor = hang(module, way)
    open_lane(running, {"input_ids": IDS})
    copy.deepcopy(module)(input_ids=IDS)
    copy.deepcopy(module)(input_ids=OTHER)
    assert (running.calls, monitor.seen) == (0, [])


class Half(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


@pytest.mark.parametrize("is_known", [True, False])
def test_a_deep_copy_of_a_module_that_was_parametrized_since_is_idle(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_known:
        monkeypatch.setattr("flopcalc.monitor.hooks._is_call_known", lambda _: False)
    module = Echo()
    module.weight = torch.nn.Parameter(torch.ones(2))
    running, monitor = hang(module, "around")
    open_lane(running, {"input_ids": IDS})
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Half())
    twin = copy.deepcopy(module)
    twin(input_ids=IDS)
    twin(input_ids=OTHER)
    assert (running.calls, monitor.seen) == (0, [])
    module(input_ids=IDS)
    bind_anew(module)(input_ids=IDS)
    assert (running.calls, monitor.seen) == (2, [])


def test_rows_get_their_boundaries() -> None:
    running = Running()
    lane = open_lane(running, {"input_ids": IDS})
    assert lane.end == 5
    running.rows.append((1, 6, 9, 1, False, *VALUES))
    running.rows.append((2, 10, 12, 1, False, *VALUES))
    assert lane.end == 12
    rows = RunEntry(lane, None, 12).rows
    assert [(row.boundary_ns, row.begun_ns, row.now_ns) for row in rows] == [(5, 6, 9), (9, 10, 12)]
    assert rows[0].values == VALUES


# --- What stands around a model's call --------------------------------------------------------------------------------


class OwnCall(Echo):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class OwnState(Echo):
    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


class OwnCopy(Echo):
    def __deepcopy__(self, _memo: dict[int, Any]) -> OwnCopy:
        return OwnCopy()


def compile_in_place() -> Echo:
    module = Echo()
    module.compile(backend="eager")
    return module


def watch_twice() -> Echo:
    module = Echo()
    hang(module, "around")
    return module


@pytest.mark.parametrize(
    "make", [OwnCall, OwnState, OwnCopy, compile_in_place, watch_twice, lambda: torch.compile(Echo(), backend="eager")]
)
def test_what_gets_hooks_instead(make: Any, tmp_path: Any) -> None:
    module = make()
    assert not Caller.fits(module)
    before = list_hung(module)
    with TrainingMonitor(tmp_path, CONFIG, model=module):
        assert len(module._forward_pre_hooks) == len(module._forward_hooks) == 1
    assert list_hung(module) == before


@pytest.mark.parametrize(("devices", "world", "fits"), [(0, 1, True), (1, 1, True), (2, 1, False), (8, 8, True)])
def test_several_devices_in_one_process_may_be_dataparallels(
    devices: int, world: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    assert Caller.fits(Echo()) is fits


def test_a_watched_model_looks_as_before(tmp_path: Any) -> None:
    model = make_llama().train()
    forward, state = model.forward, list(model.state_dict())
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor:
        (around,) = list_hung(model)
        assert around.__self__ is model
        assert model.forward == forward
        assert "forward" not in vars(model)
        assert inspect.signature(model.forward) == inspect.signature(forward)
        assert list(model.state_dict()) == state
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (
            copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model)),
            torch.load(file, weights_only=False), copy.deepcopy({"x": [model]})["x"][0],
        ):  # fmt: skip
            assert list_hung(twin) == []
            twin(**pad(make_text(2)))
            assert not monitor._running.is_unended
            assert monitor._open is None
        model.forward(**pad(make_text(2)))  # as with hooks: only a call is seen
        assert monitor._open is None
        model(**pad(make_text(2)))
        assert monitor._open is not None
    assert list_hung(model) == []


@pytest.mark.parametrize("is_first", [True, False])
def test_whoever_wraps_forward_is_called_and_left_alone(is_first: bool, tmp_path: Any) -> None:
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
    assert len(list_hung(model)) == 1
    model(**pad(make_text(2)))
    monitor.log_step(1, 0, 0.5, 1.0, 0.1)
    assert monitor.metrics()["perf/model_flops"] > 0
    monitor.close()
    assert model.forward is forward
    assert list_hung(model) == []
    model(**pad(make_text(2)))
    assert len(calls) == 2


def test_who_takes_the_place_keeps_it(tmp_path: Any) -> None:
    model = make_llama().train()
    monitor = TrainingMonitor(tmp_path, CONFIG, model=model)
    model.compile(backend="eager")
    (compiled,) = list_hung(model)
    monitor.close()
    assert list_hung(model) == [compiled]


def test_a_call_after_the_end_is_only_that(tmp_path: Any) -> None:
    model = make_llama().train()
    monitor = TrainingMonitor(tmp_path, CONFIG, model=model)
    twin = bind_anew(model)
    monitor.close()
    (left,) = list_hung(twin)
    batch = pad(make_text(2))
    assert torch.equal(twin(**batch).loss, model(**batch).loss)
    del monitor
    assert torch.equal(left(**batch).loss, model(**batch).loss)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_traces_and_exports_are_those_of_a_bare_model(tmp_path: Any) -> None:
    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).relu()

    module, x = Line().train(), torch.ones(1, 2)

    def look() -> list[str]:
        graphs: list[Any] = [torch.export.export(module, (x,), strict=strict).graph for strict in (True, False)]
        graphs += [torch.fx.symbolic_trace(module).graph, torch.jit.trace(module, (x,)).code]
        return list(map(str, graphs))

    bare = look()
    with TrainingMonitor(tmp_path, CONFIG, model=module):
        assert len(list_hung(module)) == 1
        assert look() == bare


# --- Where torch's call would do nothing but call forward -------------------------------------------------------------


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul(2).relu()


def open_on(module: torch.nn.Module, x: torch.Tensor) -> tuple[Running, Monitor]:
    running, monitor = hang(module, "around")
    open_lane(running, {"x": x}, ("x",))
    return running, monitor


def watch_torchs_call(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Modules that are called through torch's own call."""
    through: list[Any] = []
    theirs = torch.nn.Module._call_impl
    monkeypatch.setattr(Twice, "_call_impl", lambda self, **kwargs: through.append(self) or theirs(self, **kwargs))
    return through


REGISTRATIONS: list[Any] = [
    lambda module, hook: module.register_forward_pre_hook(hook),
    lambda module, hook: module.register_forward_hook(hook),
    lambda module, hook: module.register_forward_hook(hook, always_call=True),
    lambda module, hook: module.register_full_backward_pre_hook(hook),
    lambda module, hook: module.register_full_backward_hook(hook),
    lambda _, hook: torch.nn.modules.module.register_module_forward_pre_hook(hook),
    lambda _, hook: torch.nn.modules.module.register_module_forward_hook(hook),
    lambda _, hook: torch.nn.modules.module.register_module_full_backward_pre_hook(hook),
    lambda _, hook: torch.nn.modules.module.register_module_full_backward_hook(hook),
]


@pytest.mark.parametrize("register", REGISTRATIONS)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_every_hook_that_comes_later_runs(register: Any) -> None:
    module, x, seen = Twice(), torch.ones(2, 3, requires_grad=True), []
    running, monitor = open_on(module, x)
    module(x=x).sum().backward()
    handle = register(module, lambda *_: seen.append(1))
    try:
        module(x=x).sum().backward()
    finally:
        handle.remove()
    assert len(seen) == 1
    module(x=x).sum().backward()
    assert len(seen) == 1
    assert (running.calls, running.is_unended, monitor.seen) == (3, False, [])


def test_a_bare_module_is_not_called_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Twice(), torch.ones(2, 3)
    running, _ = open_on(module, x)
    through: list[int] = []  # torch's call asks this first
    monkeypatch.setattr(torch._C, "_get_tracing_state", lambda: through.append(1))
    module(x=x)
    assert (through, running.calls) == ([], 1)
    vars(module)["forward"] = lambda x: x + 7
    assert torch.equal(module(x=x), x + 7)
    assert (through, running.calls) == ([], 2)
    handle = module.register_forward_hook(lambda *_: None)
    module(x=x)
    handle.remove()
    assert (len(through), running.calls) == (1, 3)
    module._forward_hooks = {1: lambda *_: None}  # type: ignore[assignment]
    module(x=x)
    assert (len(through), running.calls) == (2, 4)
    del module._forward_hooks  # nobody does, but it is theirs to raise
    with pytest.raises(AttributeError):
        module(x=x)


@pytest.mark.parametrize("is_own", [True, False])
def test_another_torchs_call_is_never_left_out(is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _is_call_known(Twice())  # else steps take longer, and nothing is wrong: see what torch's call asks now
    if is_own:
        through = watch_torchs_call(monkeypatch)
    else:
        through, theirs = [], torch.nn.Module._call_impl
        monkeypatch.setattr(
            torch.nn.Module, "_call_impl", lambda self, **kwargs: through.append(self) or theirs(self, **kwargs)
        )
    module, x = Twice(), torch.ones(2, 3)
    assert not _is_call_known(module)
    running, _ = open_on(module, x)
    module(x=x)
    assert (len(through), running.calls) == (1, 1)


@pytest.mark.parametrize("place", ["torch", "class", "module"])
def test_whoever_patches_torchs_call_in_a_lane_is_called(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Twice(), torch.ones(2, 3)
    running, monitor = open_on(module, x)
    module(x=x)
    through, theirs = [], torch.nn.Module._call_impl
    if place == "module":
        monkeypatch.setitem(vars(module), "_call_impl", lambda **kwargs: through.append(1) or theirs(module, **kwargs))
    else:
        monkeypatch.setattr(
            torch.nn.Module if place == "torch" else Twice,
            "_call_impl",
            lambda self, **kwargs: through.append(1) or theirs(self, **kwargs),
        )
    module(x=x)
    assert (through, running.calls, monitor.seen) == ([1], 2, [])


class Named(torch.nn.Module):
    def forward(self, x: torch.Tensor, **kwargs: int) -> int:
        return int(x.sum()) + sum(kwargs.values())


@pytest.mark.parametrize("is_known", [True, False])
def test_a_model_may_give_its_arguments_any_name(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_known:
        monkeypatch.setattr("flopcalc.monitor.hooks._is_call_known", lambda _: False)
    module, x = Named(), torch.ones(2, 3)
    names = {"module": 1, "args": 2, "kwargs": 4, "running": 8, "look": 16}
    assert module(x=x, **names) == 37
    running, monitor = hang(module, "around")
    assert module(x=x, **names) == 37
    open_lane(running, {"x": x, **names}, ("x",))
    assert module(x=x, **names) == 37
    assert (running.calls, len(monitor.seen)) == (1, 1)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # not an error, which would be taken for a reason
def test_a_trace_in_a_lane_is_that_of_a_bare_model() -> None:
    x = torch.ones(2, 3)

    def look(module: torch.nn.Module) -> str:
        traced: Any = torch.jit.trace(module, example_kwarg_inputs={"x": x}, check_trace=False)
        return str(traced.code)

    bare, module = look(Twice()), Twice()
    running, monitor = open_on(module, x)
    assert look(module) == bare
    assert (running.calls, len(monitor.seen)) == (0, 1)
    module(x=x)
    assert running.calls == 1
