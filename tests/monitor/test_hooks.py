"""Running: which forward passes are noted as one more of the same, and which go the long way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from flopcalc.monitor.hooks import Running
from flopcalc.monitor.intake import Snapshot
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


def hang(module: torch.nn.Module) -> tuple[Running, Monitor]:
    running, monitor = Running(), Monitor()
    watcher: Any = monitor
    running.watch(watcher, module, ())
    module.register_forward_pre_hook(running.see, with_kwargs=True)
    module.register_forward_hook(running.done)
    return running, monitor


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
def test_what_is_noted(first: dict[str, Any], counted: tuple[str, ...], then: dict[str, Any], is_noted: bool) -> None:
    module = Echo()
    running, monitor = hang(module)
    open_lane(running, first, counted)
    module(**then)
    assert (running.calls, running.begun, running.is_unended) == ((1, 7, False) if is_noted else (0, 0, False))
    assert monitor.seen == ([] if is_noted else [((), list(then))])


def test_what_is_given_by_place_goes_the_long_way() -> None:
    module = Echo()
    running, monitor = hang(module)
    open_lane(running, {"input_ids": IDS})
    module(IDS)
    assert running.calls == 0
    assert monitor.seen == [((IDS,), [])]


def test_a_forward_pass_that_raised_is_replaced() -> None:
    module = Echo()
    running, monitor = hang(module)
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


def test_whether_it_trains_is_asked_of_the_module_that_runs() -> None:
    module = Echo()
    running, _ = hang(module)
    open_lane(running, {"input_ids": IDS})
    twin = copy.copy(module).eval()  # with the same hooks
    twin(input_ids=IDS)
    assert running.calls == 0
    module(input_ids=IDS)
    assert running.calls == 1
    shell = Shell()
    running, _ = hang(shell)
    open_lane(running, {"input_ids": IDS})
    shell.inner.eval()
    shell(input_ids=IDS)
    assert running.calls == 0
    shell.inner.train()
    shell(input_ids=IDS)
    assert running.calls == 1


def test_a_deep_copy_is_idle() -> None:
    module = Echo()
    running, monitor = hang(module)
    open_lane(running, {"input_ids": IDS})
    copy.deepcopy(module)(input_ids=IDS)
    copy.deepcopy(module)(input_ids=OTHER)
    assert (running.calls, monitor.seen) == (0, [])


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
