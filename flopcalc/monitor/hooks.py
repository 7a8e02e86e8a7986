"""The hooks on a live model, registered as torch documents it; copies and pickles of the model carry idle ones."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from typing import Any, Protocol

from torch import is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling

from flopcalc.core.model.live import strip, unwrap
from flopcalc.monitor.batch import HostBatches
from flopcalc.monitor.device import DeviceQueue
from flopcalc.monitor.model import WatchedModel
from flopcalc.monitor.modes import FactorSource
from flopcalc.monitor.step import SeenStep
from flopcalc.monitor.values import MOST_HELD, ValueReader


class HookedMonitor(Protocol):
    """What hooks need of a TrainingMonitor."""

    _is_off: bool
    _open: SeenStep | None
    _number: int
    _device: DeviceQueue | None
    _values: ValueReader
    _watched: HostBatches
    _trained: WatchedModel

    def _begin(self) -> SeenStep: ...

    def _begin_pass(
        self, model: WatchedModel, module: Any, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None: ...

    def _end_pass(
        self, model: WatchedModel, module: Any, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None: ...

    def _ask_source(
        self, seen: SeenStep, source: FactorSource, batch: Mapping[str, Any], sizes: Hashable = None
    ) -> None: ...

    def _see_inside(self, module: object) -> None: ...

    def _fail(self, where: str, error: BaseException) -> None: ...


class Idle:
    """What a copy or a pickle carries in a hook's place: it does nothing."""

    def __call__(self, *_: object) -> None:
        return None


class _Hook:
    """Knows its monitor without keeping it alive, and the model that it is on."""

    __slots__ = ("_is_inner", "_model", "_monitor")

    def __init__(self, monitor: HookedMonitor, model: WatchedModel, is_inner: bool = False) -> None:
        self._monitor = weakref.ref(monitor)
        self._model = model
        self._is_inner = is_inner  # a wrapper around it has hooks too: calls through that one are seen there

    def __deepcopy__(self, _memo: dict[int, object]) -> Idle:
        return Idle()

    def __reduce__(self) -> tuple[Any, ...]:
        return Idle, ()


# Our code is not in the CPU's caches when a step begins, so a call costs more than what it does: each of these two
# does its work for a training pass in one function.


class BeforeForward(_Hook):
    """A forward pass begins, and with the first that trains the step. Inside a compiled graph nothing can be seen."""

    def __call__(self, module: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if is_compiling():
            return
        monitor = self._monitor()
        if monitor is None or monitor._is_off:
            return
        model = self._model
        if self._is_inner:
            if model.open_calls:
                return
        else:
            model.open_calls += 1
        try:
            if not module.training or not is_grad_enabled() or model.is_frozen:
                monitor._begin_pass(model, module, args, kwargs)
                return
            seen = monitor._open or monitor._begin()
            seen.open_passes += 1
            if not model.is_bound:
                model.bind()
            source = model.source  # None but of the first model
            if source is not None and source.measures and seen.kind is None and not seen.is_given:
                batch = model.name_inputs(args, kwargs) if args else kwargs
                sizes = (getattr(batch.get("input_ids"), "shape", None), *batch)
                calm = source.calm.get(sizes)
                if calm is not None and calm[0] <= monitor._number + 1 < calm[1]:
                    seen.kind, seen.factor = calm[2], calm[3]
                else:
                    monitor._ask_source(seen, source, batch, sizes)
        except Exception as error:
            monitor._fail("before_forward", error)


class AfterForward(_Hook):
    """It is over, and its batch belongs to the step; a pass that raised does not come here."""

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        if is_dynamo_compiling():
            return
        monitor = self._monitor()
        if monitor is None or monitor._is_off:
            return
        model = self._model
        if self._is_inner:
            if model.open_calls:
                return
        elif model.open_calls:
            model.open_calls -= 1
        if not module.training or not is_grad_enabled() or model.is_frozen:
            monitor._end_pass(model, module, args, kwargs)
            return
        seen = monitor._open
        if seen is None or not seen.open_passes:  # it did not begin as one: an export
            return
        try:
            seen.open_passes -= 1
            device, values = monitor._device, None
            if device is not None:
                if device.is_capturing():
                    return
                values = monitor._values
                values.has_pass = True
            batch: Mapping[str, Any] = model.name_inputs(args, kwargs) if args else kwargs
            if monitor._watched.latest is not None:
                batch = monitor._watched.take_alike(batch)
            if not seen.is_given:
                seen.batches.append((model, model.take(batch, values, seen)))
                if seen.is_measured and model is monitor._trained:
                    seen.live_batches.append(batch)
            if values is not None and device is not None:
                if len(values.held) >= MOST_HELD:
                    values.hand_over()
                if values.copied or device.marked:
                    values.look()
        except Exception as error:
            seen.is_whole = False
            monitor._fail("after_forward", error)


class InsideForward(_Hook):
    """Looks once, inside a training pass, what products are computed in: autocast is on there if anywhere."""

    __slots__ = ("handle",)

    def __init__(self, monitor: HookedMonitor, model: WatchedModel) -> None:
        super().__init__(monitor, model)
        self.handle: Any = None

    def __call__(self, module: object, _args: object) -> None:
        if is_compiling():
            return
        monitor = self._monitor()
        if monitor is not None and not monitor._is_off:
            if monitor._open is None or not monitor._open.open_passes:
                return  # a pass that does not train
            monitor._see_inside(module)
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


def register_hooks(monitor: HookedMonitor, model: WatchedModel, looks_inside: bool) -> list[Any]:
    """Their handles; `looks_inside`: also a hook inside the model that sees what its products are computed in."""
    live = model.live
    inner = unwrap(live)
    handles = _register(live, monitor, model, is_inner=False)
    # generate() calls the inner model, past PEFT, DDP and their like; a compiled one would compile the hooks.
    if (
        inner is not live
        and callable(getattr(inner, "generate", None))
        and not any(hasattr(each, "_orig_mod") for each in live.modules())
    ):
        handles += _register(inner, monitor, model, is_inner=True)
    layer = _find_layer(strip(live)) if looks_inside else None
    if layer is not None:
        inside = InsideForward(monitor, model)
        inside.handle = layer.register_forward_pre_hook(inside)
        handles.append(inside.handle)
    return handles


def _register(module: Any, monitor: HookedMonitor, model: WatchedModel, is_inner: bool) -> list[Any]:
    return [
        module.register_forward_pre_hook(BeforeForward(monitor, model, is_inner), with_kwargs=True),
        module.register_forward_hook(AfterForward(monitor, model, is_inner), with_kwargs=True),
    ]


def _find_layer(model: Any) -> Any:
    """A layer that computes products: the first linear one."""
    for each in model.modules():
        if "Linear" in type(each).__name__ and next(each.parameters(recurse=False), None) is not None:
            return each
    return None
