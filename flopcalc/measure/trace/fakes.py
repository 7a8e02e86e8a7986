"""A copy of a live module whose floats are FakeTensors on the module's own device, and one counted call of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from flopcalc.base.errors import WorkloadError
from flopcalc.base.vocabulary import Phase
from flopcalc.measure.counters.flop_counter import OperatorCount
from flopcalc.measure.hf.models import MAKES_LIKE, MAKES_STORAGE, make_balanced, make_positions
from flopcalc.measure.trace.copies import keep_hooks, run_counted, set_eager
from flopcalc.measure.trace.kernels import without_kernels
from flopcalc.measure.trace.rebind import rebind

__all__ = ["FakeCopy"]


class FakeCopy:
    """Takes no memory and runs eager attention; the live module, its hooks and gradients are not touched.

    Floats are fp32, so that no autocast is needed. Integers keep their values on the host, for models read them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        if any(type(tensor).__name__ == "DTensor" for tensor in module.parameters()):
            raise WorkloadError("its parameters are sharded (DTensor): a rank holds no whole model to copy")
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


class _FloatsFake(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Floats are FakeTensors on one device; integers, and what is computed from them, stay real on the host."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name, dtype = func._schema.name, kwargs.get("dtype")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in MAKES_STORAGE and not tensors:
            is_float = (dtype or torch.get_default_dtype()).is_floating_point
            if name == "aten::full" and dtype is None:
                is_float = isinstance(args[1], float)
            is_float = is_float and not (name == "aten::rand" and prod(args[0]) == 1)  # a coin that is tossed
            kwargs["device"] = self._device if is_float else torch.device("cpu")
            if not is_float:
                return func(*args, **kwargs)
            with self._mode:
                return func(*args, **kwargs)
        if dtype is not None and not dtype.is_floating_point and name in MAKES_LIKE:
            like = torch.empty(args[0].shape, dtype=dtype, device="cpu")
            kwargs["device"] = torch.device("cpu")
            return func(like, *args[1:], **kwargs)
        if not any(isinstance(each, FakeTensor) for each in tensors):
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("cpu")
            return func(*args, **kwargs)
        if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            args = (args[0], make_positions(args[1]), *args[2:])
        if kwargs.get("device") is not None:
            kwargs["device"] = self._device
        with self._mode:
            out = func(*tree_map(self._move, args), **tree_map(self._move, kwargs))
        if name == "aten::topk":
            return out[0], make_balanced(out[1].shape, int(args[0].shape[args[2] if len(args) > 2 else -1]))
        return out

    def _move(self, value: object) -> Any:
        """A real tensor on the host as a FakeTensor on the floats' device; a number stays where it is."""
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or not value.dim():
            return value
        return torch.empty(value.shape, dtype=value.dtype, device=self._device)
