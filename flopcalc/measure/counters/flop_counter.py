"""A torch model and a step to run go in; the FLOPs that step executed come out, per module and per pass."""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flopcalc.measure.counters.formulas import SKIPPED, grouped_mm
from flopcalc.measure.counters.formulas import Formula as ShapeFormula
from flopcalc.measure.operator_kinds import ROTARY, classify

Formula = Callable[[tuple[Any, ...], Mapping[str, Any], Any], int]


class OperatorCount(NamedTuple):
    """What one step executed."""

    forward: int
    backward: int
    recompute: int  # forward work executed again while the backward pass runs (gradient checkpointing)
    rows: dict[str, tuple[int, int, int]]  # module path -> forward, backward, recompute
    excluded: dict[str, int]  # module class -> FLOPs of products that are not model work by convention
    not_counted: dict[str, int]  # operators neither counted nor known not to be products -> calls
    seconds: float

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recompute


# --- Formulas: the operators torch's registry misses, or gets wrong -----------------------------------------


def _grouped_mm(args: tuple[Any, ...], kwargs: Mapping[str, Any], _out: Any) -> int:
    """One product per group; the group sizes are the differences of `offs`, so only their end matters."""
    a, b = list(args[0].shape), list(args[1].shape)
    offs = args[2] if len(args) > 2 else kwargs.get("offs")
    # Rows after the last offset belong to no group and are not multiplied. On meta the offsets have no
    # values: then every row has a group, as in HF's sorted expert rows.
    if offs is not None and not offs.is_meta:
        ragged, axis = (a, 0 if len(b) == 3 else 1) if len(a) == 2 else (b, 1)
        ragged[axis] = int(offs[-1])
    return int(grouped_mm((a, b), ()))


def _from_shapes(formula: ShapeFormula) -> Formula:
    return lambda args, _kwargs, _out: int(formula([getattr(value, "shape", ()) for value in args], args))


def _stock(formula: Callable[..., int]) -> Formula:
    return lambda args, kwargs, out: int(formula(*args, **kwargs, out_val=out))


# Operator name -> formula. The names here replace torch's own entry, which multiplies the weight gradient of a
# convolution by its groups, and refuses fused attention with fewer key than query heads (torch 2.11).
FORMULAS: dict[str, Formula] = {
    **{name: _from_shapes(formula) for name, formula in SKIPPED.items()},
    "aten::_grouped_mm": _grouped_mm,
    "transformers::grouped_mm_fallback": lambda args, _kwargs, out: _grouped_mm(args[:2], {"offs": args[2]}, out),
}
_MAY_BE_PRODUCTS = ("product", "attention", "wrapper", "other")


@cache
def _formula(func: torch._ops.OpOverload) -> Formula | None:
    name = func._schema.name
    if name in FORMULAS:
        return FORMULAS[name]
    packet = func._overloadpacket
    return _stock(flop_registry[packet]) if packet in flop_registry else None


@cache
def _is_known(func: torch._ops.OpOverload) -> bool:
    """Whether this operator is known not to be a product: by torch's own tag, or by its kind."""
    return (
        torch.Tag.pointwise in func.tags
        or func.is_view
        or (func.namespace == "aten" and classify(func._schema.name) not in _MAY_BE_PRODUCTS)
        or func.namespace == "profiler"  # marks in a trace
    )


@cache
def _is_composite(func: torch._ops.OpOverload) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func._name, "CompositeImplicitAutograd"))


# --- Attribution --------------------------------------------------------------------------------------------

# PEFT wraps a module X: X.base_layer, X.lora_A.default, ... are all work of X.
_PEFT_PREFIX = re.compile(r"^base_model\.model(\.|$)")
_PEFT_PARTS = re.compile(
    r"\.(base_layer|original_module|modules_to_save\.[^.]+|lora_(A|B|embedding_A|embedding_B)(\.[^.]+)?)(?=\.|$)"
)


class _Frame(NamedTuple):
    """A module whose forward is running."""

    path: str
    excluded_as: str | None  # class name, inside a rotary embedding
    in_backward: bool  # entered while the backward pass runs: a recomputation


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator below autograd. Forward products belong to the innermost running module.

    Backward products belong to the module that made the autograd node: nodes carry a sequence number that
    only grows, so the module entries and exits, noted with the number at that moment, order them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: dict[str, list[int]] = {}
        self.excluded: Counter[str] = Counter()
        self.not_counted: Counter[str] = Counter()
        self._stack: list[_Frame] = [_Frame("", None, False)]
        self._event_sequence: list[int] = []
        self._event_frame: list[_Frame] = []
        self._note()

    def enter(self, path: str, module: torch.nn.Module) -> None:
        class_name = type(module).__name__
        excluded_as = class_name if any(word in class_name for word in ROTARY) else self._stack[-1].excluded_as
        self._stack.append(_Frame(path, excluded_as, torch._C._current_autograd_node() is not None))
        self._note()

    def leave(self) -> None:
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        self._event_sequence.append(torch._C._autograd._get_sequence_nr())
        self._event_frame.append(self._stack[-1])

    def _add(self, flops: int) -> None:
        node = torch._C._current_autograd_node()
        frame = self._stack[-1]
        if node is None:
            column = 0
        elif frame.in_backward:
            column = 2
        else:
            column = 1
            frame = self._event_frame[bisect_right(self._event_sequence, node._sequence_nr()) - 1]
        if frame.excluded_as is not None:
            self.excluded[frame.excluded_as] += flops
        else:
            self.rows.setdefault(_PEFT_PARTS.sub("", _PEFT_PREFIX.sub("", frame.path)), [0, 0, 0])[column] += flops

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a FakeTensor is asked for its device
            return func(*args, **kwargs)
        formula = _formula(func)
        if formula is None and not _is_known(func) and _is_composite(func):
            with self:  # in inference mode linear, matmul, ... arrive whole
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        out = func(*args, **kwargs)
        if formula is not None:
            self._add(formula(args, kwargs, out))
        elif not _is_known(func):
            self.not_counted[str(func)] += 1
        return out


@contextmanager
def watch_modules(
    model: torch.nn.Module, enter: Callable[[str, torch.nn.Module], None], leave: Callable[[], None]
) -> Iterator[None]:
    """Inside, every module's forward calls enter(path, module) before and leave() after."""
    handles = []
    for path, module in model.named_modules():

        def before(module: torch.nn.Module, _args: object, path: str = path) -> None:
            enter(path, module)

        def after(_module: torch.nn.Module, _args: object, _output: object) -> None:
            leave()

        handles.append(module.register_forward_pre_hook(before))
        # always_call: non-reentrant checkpointing ends a recomputation with an exception.
        handles.append(module.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def count_flops(model: torch.nn.Module, step: Callable[[], object]) -> OperatorCount:
    """Run step() — a forward pass of `model`, or forward and backward — and count its matrix products."""
    counting = _Counting()
    start = time.perf_counter()
    # One thread: sequence numbers are per thread, and a GPU's backward would recompute in another one.
    with (
        watch_modules(model, counting.enter, counting.leave),
        torch.autograd.set_multithreading_enabled(False),
        counting,
    ):
        step()
    seconds = time.perf_counter() - start
    rows = {path: (f, b, r) for path, (f, b, r) in sorted(counting.rows.items())}
    return OperatorCount(
        forward=sum(row[0] for row in rows.values()),
        backward=sum(row[1] for row in rows.values()),
        recompute=sum(row[2] for row in rows.values()),
        rows=rows,
        excluded=dict(sorted(counting.excluded.items())),
        not_counted=dict(sorted(counting.not_counted.items())),
        seconds=seconds,
    )
