"""The hooks on a live model, registered as torch documents it; copies and pickles of the model carry idle ones."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling

from flopcalc.core.model.live import strip

if TYPE_CHECKING:
    from flopcalc.monitor.training import TrainingMonitor


class Idle:
    """What a copy or a pickle carries in a hook's place: it does nothing."""

    def __call__(self, *_: Any) -> None:
        return None


class _Hook:
    """Knows its monitor without keeping it alive."""

    __slots__ = ("_monitor",)

    def __init__(self, monitor: TrainingMonitor) -> None:
        self._monitor = weakref.ref(monitor)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Idle:
        return Idle()

    def __reduce__(self) -> tuple[Any, ...]:
        return Idle, ()


# Our code is not in the CPU's caches when a step begins, so a call costs more than what it does: each of these two
# does its work in one function.


class BeforeForward(_Hook):
    """A training forward pass begins, and with the first one the step. Inside a compiled graph nothing can be seen."""

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling() or not module.training or not is_grad_enabled():
            return
        monitor = self._monitor()
        if monitor is None or monitor._is_off:
            return
        try:
            seen = monitor._open or monitor._begin()
            seen.open_passes += 1
            if seen.kind is None and not seen.is_given:
                source = monitor._trained.source
                if source is not None and source.measures:
                    kind = seen.kind = monitor._trained.classify(monitor._name_inputs(args, kwargs) if args else kwargs)
                    if source.wants(monitor._number + 1, kind, monitor._frequency):
                        monitor._start_measuring(seen, source)
        except Exception as error:
            monitor._fail("before_forward", error)


class AfterForward(_Hook):
    """It is over, and its batch belongs to the step; a pass that raised does not come here."""

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        if is_dynamo_compiling() or not module.training or not is_grad_enabled():
            return
        monitor = self._monitor()
        if monitor is None or monitor._is_off:
            return
        seen = monitor._open
        if seen is None or not seen.open_passes:  # it did not begin as one: an export
            return
        try:
            seen.open_passes -= 1
            device = monitor._device
            if device is not None and device.is_capturing():
                return
            batch: Mapping[str, Any] = monitor._name_inputs(args, kwargs) if args else kwargs
            if monitor._watched.latest is not None:
                batch = monitor._watched.take_alike(batch)
            if not seen.is_given:
                seen.batches.append(monitor._trained.take(batch, device, seen.copies))
                if seen.is_measured:
                    seen.live_batches.append(batch)
            if device is not None:
                values = monitor._values
                values.has_pass = True
                if values.held:
                    values.collect()
                if device.has_mark:
                    device.poll(asks_stream=False)
        except Exception as error:
            seen.is_whole = False
            monitor._fail("after_forward", error)


class InsideForward(_Hook):
    """Looks once, from inside the model, what its products are computed in; autocast is on there if anywhere."""

    __slots__ = ("handle",)

    def __init__(self, monitor: TrainingMonitor) -> None:
        super().__init__(monitor)
        self.handle: Any = None

    def __call__(self, module: Any, _args: Any) -> None:
        if is_compiling():
            return
        monitor = self._monitor()
        if monitor is not None:
            monitor._see_dtype(module)
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


def register_hooks(monitor: TrainingMonitor, model: Any, sees_dtype: bool) -> list[Any]:
    """Their handles; `sees_dtype`: also a hook inside the model that looks at the dtype of its products."""
    handles = [
        model.register_forward_pre_hook(BeforeForward(monitor), with_kwargs=True),
        model.register_forward_hook(AfterForward(monitor), with_kwargs=True),
    ]
    linear = next((each for each in strip(model).modules() if type(each).__name__.endswith("Linear")), None)
    if sees_dtype and linear is not None and next(linear.parameters(recurse=False), None) is not None:
        inside = InsideForward(monitor)
        inside.handle = linear.register_forward_pre_hook(inside)
        handles.append(inside.handle)
    return handles


def name_arguments(model: Any) -> tuple[str, ...]:
    """The names of the positional arguments of a model's forward."""
    try:
        found = inspect.signature(strip(model).forward).parameters.values()
    except (TypeError, ValueError):
        return ("input_ids",)
    return tuple(each.name for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))
