"""A copy of a live module whose floats are FakeTensors on the module's own device, and one counted call of it."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from flopcalc.base.errors import WorkloadError
from flopcalc.base.vocabulary import Phase
from flopcalc.core.model.live import is_sharded
from flopcalc.measure.counters.flop_counter import OperatorCount
from flopcalc.measure.hf.models import FloatsAway
from flopcalc.measure.trace.copies import keep_hooks, rebind, run_counted, set_eager

_PRODUCT = re.compile(r"\bdot\w*\s*\(")  # tl.dot, tl.dot_scaled
_CLASSES = {"triton.runtime.jit": ("JITFunction",), "triton.runtime.autotuner": ("Autotuner", "Heuristics")}


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside, a kernel that is given a FakeTensor leaves its outputs as they are; any other kernel runs."""
    kept: list[tuple[Any, Callable[..., Any]]] = []
    for module, names in _CLASSES.items():  # what is not imported launches nothing
        kept += [(each, each.run) for name in names if (each := getattr(sys.modules.get(module), name, None))]
    try:
        for kind, run in kept:
            kind.run = _skip_fakes(run)
        yield
    finally:
        for kind, run in kept:
            kind.run = run


def _skip_fakes(run: Callable[..., object]) -> Callable[..., Any]:
    def skip(kernel: object, *args: object, **kwargs: object) -> Any:
        if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            return run(kernel, *args, **kwargs)
        if _has_products(kernel, set()):
            raise WorkloadError(f"the products of its Triton kernel {_find_function(kernel).__name__} are not known")
        return None

    return skip


def _has_products(kernel: object, seen: set[int]) -> bool:
    """Whether a kernel, or a kernel that it calls, multiplies matrices."""
    if id(kernel) in seen:
        return False
    seen.add(id(kernel))
    function = _find_function(kernel)
    source = _find_jit(kernel).src
    if _PRODUCT.search(source):
        return True
    called = (function.__globals__.get(name) for name in function.__code__.co_names)
    return any(_has_products(each, seen) for each in called if hasattr(each, "src"))


def _find_jit(kernel: Any) -> Any:
    """The function that Triton compiles, below autotuning and heuristics."""
    while not hasattr(kernel, "src"):
        kernel = kernel.fn
    return kernel


def _find_function(kernel: object) -> Any:
    return _find_jit(kernel).fn


class FakeCopy:
    """Takes no memory and runs eager attention; the live module, its hooks and gradients are not touched.

    Floats are fp32, so that no autocast is needed. Integers keep their values on the host, for models read them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        if is_sharded(module):
            raise WorkloadError("its parameters are sharded, so no rank has a whole model to copy")
        first = next(module.parameters(), None)
        self.device = torch.device("cpu") if first is None or first.is_meta else first.device
        self._mode = _OwnDevice(allow_non_fake_inputs=True)
        memo: dict[int, object] = {}
        for each in module.modules():
            keep_hooks(each, memo)
            for leaf in tree_leaves(list(vars(each).values())):
                if isinstance(leaf, torch.Tensor) and id(leaf) not in memo:
                    memo[id(leaf)] = self._make_twin(leaf)
        self.module = copy.deepcopy(module, memo)
        rebind(self.module, memo)
        set_eager(self.module)

    def _make_twin(self, tensor: torch.Tensor) -> torch.Tensor:
        twin = self.make_float(tensor.shape) if tensor.is_floating_point() else tensor.detach().cpu().clone()
        if isinstance(tensor, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
        return twin

    def make_float(self, shape: Any, requires_grad: bool = False) -> torch.Tensor:
        """A float of a shape, without values."""
        with self._mode:
            return torch.empty(tuple(shape), dtype=torch.float32, device=self.device, requires_grad=requires_grad)

    def count(self, batch: Mapping[str, object], phase: Phase = "train") -> OperatorCount:
        """One call with its own arguments: floats from make_float, integers on the host."""
        with without_kernels():
            return run_counted(self.module, batch, phase, _FloatsFake(self._mode, self.device))


class _OwnDevice(FakeTensorMode):  # type: ignore[no-untyped-call]
    """FakeTensors on a device that is there, the host among them."""

    @property
    def avoid_device_init(self) -> bool:
        """torch 2.11, built for CUDA, else crashes in a thread where no GPU is visible."""
        return False


class _FloatsFake(FloatsAway):
    """Floats are FakeTensors on one device; integers, and what is computed from them, stay real on the host."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self.device = device

    def is_away(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, FakeTensor)

    def enter(self) -> FakeTensorMode:
        return self._mode

    def move(self, value: object) -> Any:
        """As a FakeTensor; a number stays where it is."""
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or not value.dim():
            return value
        return torch.empty(value.shape, dtype=value.dtype, device=self.device)
