"""A copy of a live module on meta, and one counted training step of it at a batch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flopcalc.base.errors import WorkloadError
from flopcalc.base.vocabulary import Phase
from flopcalc.core.model.live import is_sharded
from flopcalc.measure.counters.flop_counter import OperatorCount, count_flops
from flopcalc.measure.trace.meta import unwrap


def rebind(made: torch.nn.Module, memo: Mapping[int, object]) -> None:
    """Let what is set on the copy's modules hold the copy; `memo` is deepcopy's: who became whom.

    A trainer wraps a forward like so: the new one is a function that holds the live model's own as a bound method.
    """
    seen: dict[int, FunctionType] = {}
    for each in made.modules():
        for name, value in list(vars(each).items()):
            if isinstance(value, (FunctionType, MethodType, partial)):
                each.__dict__[name] = _rebind(value, memo, seen)


def _rebind(value: object, memo: Mapping[int, object], seen: dict[int, FunctionType]) -> Any:
    if isinstance(value, torch.nn.Module):
        return memo.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(_rebind(value.__func__, memo, seen), _rebind(value.__self__, memo, seen))
    if isinstance(value, partial):
        given = [_rebind(each, memo, seen) for each in value.args]
        named = {name: _rebind(each, memo, seen) for name, each in value.keywords.items()}
        return partial(_rebind(value.func, memo, seen), *given, **named)
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    if id(value) not in seen:
        cells = tuple(CellType() for _ in value.__closure__)
        made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        made.__dict__.update(value.__dict__)
        seen[id(value)] = made  # before its cells: it may hold itself
        for cell, held in zip(cells, value.__closure__, strict=True):
            with suppress(ValueError):  # nothing is in it yet
                cell.cell_contents = _rebind(held.cell_contents, memo, seen)
    return seen[id(value)]


_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def copy_to_meta(module: torch.nn.Module) -> torch.nn.Module:
    """A copy that takes no memory and runs eager attention; the live module, its hooks and gradients are not touched.

    Floats are fp32 on meta, so that no autocast is needed, integers keep their values, and what checkpoints still does.
    """
    if is_sharded(module):
        raise WorkloadError("its parameters are sharded, so no rank has a whole model to copy")
    memo: dict[int, object] = {}
    for each in module.modules():
        keep_hooks(each, memo)
        for leaf in tree_leaves(list(vars(each).values())):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in memo:
                memo[id(leaf)] = _make_twin(leaf)
    made = copy.deepcopy(module, memo)
    rebind(made, memo)
    set_eager(made)
    return made


def keep_hooks(module: torch.nn.Module, memo: dict[int, object]) -> None:
    """Say for deepcopy which hooks a copy gets: HF's own; others may belong to anything, a monitor or a trainer."""
    for name in _HOOKS:
        hooks = module.__dict__.get(name)
        if hooks is not None:
            # HF's change what runs: inputs of a checkpoint that require gradients, outputs that are kept.
            memo[id(hooks)] = type(hooks)(
                (key, hook)
                for key, hook in hooks.items()
                if str(getattr(hook, "__module__", "")).startswith("transformers.")
            )


def set_eager(made: torch.nn.Module) -> None:
    """Let a copy run what a counter sees whole: eager attention, and experts without values."""
    for each in made.modules():
        config: Any = getattr(each, "config", None)
        if getattr(config, "_attn_implementation", None) is not None:
            config._attn_implementation = "eager"
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "batched_mm"  # HF's own choice wants values and bf16 on meta


def _make_twin(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        twin = torch.empty(tensor.shape, dtype=torch.float32, device="meta")
    else:
        twin = tensor.detach().cpu().clone()
    if isinstance(tensor, torch.nn.Parameter):
        twin = torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what leaves the copy: other ranks do not run this step, and the live model's gradients are not ours."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "c10d" in func.namespace:
            raise WorkloadError(f"its forward pass talks to other ranks ({func})")
        if any(_is_live(leaf) for leaf in tree_leaves((args, kwargs))):
            raise WorkloadError("its forward pass takes weights of the live model, not of the copy")
        return func(*args, **(kwargs or {}))


def _is_live(value: object) -> bool:
    """A parameter with values: of a copy's parameters integers alone have some."""
    return (
        isinstance(value, torch.nn.Parameter)
        and value.is_floating_point()
        and not (value.is_meta or isinstance(value, FakeTensor))
    )


def run_counted(
    made: torch.nn.Module, batch: Mapping[str, object], phase: Phase, without_memory: AbstractContextManager[object]
) -> OperatorCount:
    """A call of a copy, counted, with backward if it trains."""
    random = torch.random.get_rng_state()  # the live step's numbers go on as if nothing had been
    is_training = made.training
    for each in made.modules():  # a part that is kept in eval mode stays so
        each.training = each.training or (phase == "train" and not is_training)
    given = _keep_arguments(made, batch)

    def run() -> None:
        if phase == "train":
            _add_outputs(made(**given)).backward()  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                made(**given)

    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
            without_memory,
            _Alone(),  # type: ignore[no-untyped-call]
        ):
            return count_flops(made, run)
    finally:
        torch.random.set_rng_state(random)


def _add_outputs(out: object) -> torch.Tensor:
    """The loss of an output, else the sum of all of it that has a gradient."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss
    leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    sums = [leaf.sum() for leaf in leaves if leaf.requires_grad]
    if not sums:
        raise WorkloadError("nothing in the module's output has a gradient")
    return torch.stack([each.to(sums[0].device).reshape(()) for each in sums]).sum()


def _keep_arguments(module: object, batch: Mapping[str, object]) -> dict[str, Any]:
    """What the forward takes: a collator's batch may hold more than that."""
    takes = inspect.signature(unwrap(module).forward).parameters
    if any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        return dict(batch)
    return {name: value for name, value in batch.items() if name in takes}
