"""What is hung on a model or around a loader: each tells a monitor what it sees, and copies of it are idle."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flopcalc.monitor.lane import Lane
    from flopcalc.monitor.training import TrainingMonitor


# Of forward passes:
IDLE = 0  # each one that trains came to its end
TRAINS = 1  # one that trains is under way
BROKEN = 2  # it never came to its end, and one that does not train began since


class Running:
    """What hooks and monitor share: the forward pass that is under way, and the lane of steps that repeat."""

    __slots__ = ("lane", "state")

    def __init__(self) -> None:
        self.state = IDLE
        self.lane: Lane | None = None


class Idle:
    """A hook that does nothing."""

    def __call__(self, _module: Any, _args: Any, _kwargs: Any = None) -> None:
        return None


class _Hung:
    """A copy of the model, or its pickle, carries an idle one."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Idle:
        return Idle()

    def __reduce__(self) -> tuple[Any, ...]:
        return Idle, ()


class Hook(_Hung):
    """Sees what the model is given."""

    def __init__(self, monitor: TrainingMonitor, names: tuple[str, ...], running: Running) -> None:
        import torch

        self._monitor = weakref.ref(monitor)
        self._names = names
        self._running = running
        self._is_compiling = torch.compiler.is_dynamo_compiling
        self._is_grad_enabled = torch.is_grad_enabled

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_compiling():  # inside a compiled graph there is nothing to see
            return
        running = self._running
        if not module.training or not self._is_grad_enabled():
            if running.state == TRAINS:
                running.state = BROKEN
            return
        lane = running.lane
        if lane is not None and not args and tuple(kwargs) == lane.names:
            try:
                if kwargs[lane.name].shape == lane.shape and (lane.is_simple or lane.fits(kwargs)):
                    if not lane.calls:
                        lane.begun = lane.clock()
                        lane.calls = 1
                    elif running.state == IDLE:  # else the one before raised, and this is in its place
                        lane.calls += 1
                    running.state = TRAINS
                    return
            except Exception:  # whatever it is given, the long way looks at it
                pass
        monitor = self._monitor()
        if monitor is not None:
            monitor._see(args, kwargs, self._names)


class DoneHook(_Hung):
    """Sees that a forward pass came to its end: one that raised does not."""

    def __init__(self, running: Running) -> None:
        import torch

        self._running = running
        self._is_compiling = torch.compiler.is_dynamo_compiling

    def __call__(self, _module: Any, _args: Any, _output: Any) -> None:
        if self._is_compiling():
            return
        running = self._running
        if running.state == TRAINS:
            running.state = IDLE


class DtypeHook(_Hung):
    """Looks once, from inside the model, what its products are computed in; autocast is on there if anywhere."""

    def __init__(self, monitor: TrainingMonitor) -> None:
        self._monitor = weakref.ref(monitor)
        self.handle: Any = None

    def __call__(self, module: Any, _args: Any) -> None:
        import torch

        if torch.compiler.is_compiling():
            return
        monitor = self._monitor()
        if monitor is not None and monitor._dtype is None:
            monitor._see_dtype(module)
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


class StepContext:
    """`with monitor.step(batch) as step:` — one optimizer step; `step.log(loss=…)` adds values to its record."""

    def __init__(self, monitor: TrainingMonitor, batch: Any, dataset: Any) -> None:
        self._monitor = monitor
        self._batch = batch
        self._dataset = dataset

    def log(
        self,
        *,
        loss: Any = None,
        grad_norm: Any = None,
        learning_rate: Any = None,
        epoch: Any = None,
        step: int | None = None,
        skip_wandb: bool = False,
    ) -> None:
        """Values for this step's record; tensors may be on the device."""
        self._monitor._hold(step, skip_wandb, epoch, loss, grad_norm, learning_rate)

    def __enter__(self) -> StepContext:
        batch, self._batch = self._batch, None
        self._monitor._enter(batch, self._dataset)
        return self

    def __exit__(self, kind: Any, _error: Any, _trace: Any) -> None:
        self._monitor._leave(kind is not None)


class Watched:
    """A loader whose batches are seen while they are on the host."""

    def __init__(self, loader: Iterable[Any], see: Callable[[Any], None]) -> None:
        self._loader = loader
        self._see_batch = see

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._see_batch(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_loader"], name)
