"""A copy of a live module is counted; the live one is not touched, however its forward was wrapped."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flopcalc.base.errors import WorkloadError
from flopcalc.measure.hf.models import floats_on_meta
from flopcalc.measure.trace.copies import copy_to_meta, run_counted
from flopcalc.measure.trace.fakes import FakeCopy, without_kernels
from flopcalc.monitor.instruments import sign


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def wrap_in_a_closure(model: Any) -> None:
    """As trainers do: the new forward holds the live model's own."""
    forward = model.forward

    @functools.wraps(type(model).forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.layer is not None
        return forward(*args, **kwargs)

    model.forward = types.MethodType(wrapped, model)


def wrap_twice(model: Any) -> None:
    wrap_in_a_closure(model)
    wrap_in_a_closure(model)


def wrap_in_a_partial(model: Any) -> None:
    def run(own: Any, **kwargs: Any) -> Any:
        return own.layer(kwargs["x"])

    model.forward = functools.partial(run, model)


def hold_the_layer(model: Any) -> None:
    layer = model.layer
    model.forward = lambda x: layer(x)


WRAPPERS = [wrap_in_a_closure, wrap_twice, wrap_in_a_partial, hold_the_layer]
COUNTERS: list[Callable[[torch.nn.Module, Any], Any]] = [
    lambda model, batch: FakeCopy(model).count(batch),
    lambda model, batch: run_counted(copy_to_meta(model), batch, "train", floats_on_meta()),
]


@pytest.mark.parametrize("count", COUNTERS, ids=["fake", "meta"])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_forward_runs_on_the_copy(wrap: Callable[[Any], None], count: Callable[..., Any]) -> None:
    model = Small()
    wrap(model)
    counted = count(model, {"x": torch.empty(3, 8, device="meta" if count is COUNTERS[1] else "cpu")})
    assert (counted.forward, counted.backward) == (2 * 3 * 8 * 4, 2 * 3 * 8 * 4)
    assert model.layer.weight.grad is None
    assert model(x=torch.ones(1, 8)).shape == (1, 4)


def test_weights_of_the_live_model_are_refused() -> None:
    model = Small()
    held = [model]  # in a list: it is not found
    model.forward = lambda x: held[0].layer(x)  # type: ignore[method-assign]
    for count in COUNTERS:
        with pytest.raises(WorkloadError, match="weights of the live model"):
            count(model, {"x": torch.empty(3, 8)})
    assert model.layer.weight.grad is None


class Kernel:
    """Stands for Triton's JITFunction."""

    def __init__(self, fn: Any, src: str) -> None:
        self.fn, self.src = fn, src
        self.launched = 0

    def run(self, *_args: Any, **_kwargs: Any) -> str:
        self.launched += 1
        return "launched"


PRODUCT = Kernel(lambda: None, "acc += tl.dot(a, b)")


def calls_product() -> Any:
    return PRODUCT


def test_triton_kernels_are_given_no_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("triton.runtime.jit")
    module.JITFunction = Kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", module)
    with FakeTensorMode():
        fake = torch.empty(4)
    plain, calling = Kernel(lambda: None, "tl.store(p, x)"), Kernel(calls_product, "tl.store(p, product(x))")
    with without_kernels():
        assert plain.run(fake, grid=(1,)) is None
        assert plain.run(torch.empty(4)) == "launched"
        for kernel in (PRODUCT, calling):
            with pytest.raises(WorkloadError, match="Triton kernel"):
                kernel.run(fake)
    assert plain.run(fake) == "launched"
    assert (plain.launched, calling.launched) == (2, 0)


class OnDevice:
    """Labels that say they are on a GPU."""

    is_cuda, is_cpu = True, False

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.shape = values, values.shape

    def copy(self) -> torch.Tensor:
        return self.values


def test_a_fused_head_is_signed_by_its_labels() -> None:
    few, many = torch.tensor([[5, -100, -100, 7]]), torch.tensor([[-100, 6, 7, 8]])

    def sign_with(labels: torch.Tensor, **more: Any) -> Any:
        return sign({"input_ids": torch.ones(1, 4), "labels": OnDevice(labels), **more})

    assert sign_with(few) == sign_with(many)  # a head of its own forms all logits
    assert sign_with(few, fused_lm_head=True)[0] == 1  # the first token's label is predicted by none
    assert sign_with(many, fused_lm_head=True)[0] == 3
