"""What is hung on a model or around a loader: each tells a monitor what it sees, and copies of it are idle."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

from flopcalc.monitor.place import find_rank

if TYPE_CHECKING:
    from flopcalc.monitor.lane import Lane
    from flopcalc.monitor.training import TrainingMonitor

# Where torch looks first when a module is called: `Module.compile()` leaves there what runs in its place, and copies
# and pickles of a module go without it.
_PLACE = "_compiled_call_impl"
# What torch's call asks, in this order, before it does nothing but call `forward`; with "set" begins what hooks need.
_ASKED = (
    "torch", "_C", "_get_tracing_state", "_slow_forward", "forward", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks", "_forward_pre_hooks", "_global_backward_pre_hooks", "_global_backward_hooks",
    "_global_forward_hooks", "_global_forward_pre_hooks", "set",
)  # fmt: skip


class Idle:
    """What a copy or a pickle carries in a hook's place: it does nothing."""

    is_on = False

    def is_traced(self) -> bool:
        """So that `Running.see` of a copy sees nothing."""
        return True

    def __call__(self, _module: Any, _args: Any, _more: Any = None) -> None:
        return None

    see = done = __call__


class _Hung:
    """A copy of the model, or its pickle, carries an idle one."""

    __slots__ = ()

    def __deepcopy__(self, _memo: dict[int, Any]) -> Idle:
        return Idle()

    def __reduce__(self) -> tuple[Any, ...]:
        return Idle, ()


class Running(_Hung):
    """What is hung on a model and its monitor share: the forward pass under way, and what a step is compared with.

    All of it lies in one object, and its methods are hooks: training in between leaves nothing of ours in the
    caches, so that a step costs as much as it touches objects, and a call more than what it does.
    """

    __slots__ = (
        "begun", "calls", "clock", "count", "epoch_type", "fits", "is_broken", "is_compiling", "is_grad_enabled",
        "is_on", "is_traced", "kind", "lane", "loss_type", "module", "monitor", "name", "names", "norm_type", "other",
        "own", "rate_type", "rows", "shapes", "until", "until_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.is_on = False  # a forward pass that trains is under way, or raised
        self.is_broken = False  # it raised, and one that does not train began since
        self.monitor: Callable[[], TrainingMonitor | None] = _find_none
        self.names: tuple[str, ...] = ()  # of the model's positional arguments
        self.module: Any = None
        self.own: dict[str, Any] = {}  # the module's attributes
        self.is_compiling: Callable[[], bool]
        self.is_traced: Callable[[], bool]
        self.kind: Any  # of a tensor that counts
        self.is_grad_enabled: Callable[[], bool]
        # Of the lane:
        self.lane: Lane | None = None
        self.count = -1  # names that the model is given; -1: there is no lane
        self.name = self.other = ""  # of what counts, and of what is beside it
        self.shapes: frozenset[Any] = frozenset()  # the one that counts
        self.fits: Callable[[dict[str, Any]], bool] | None = None  # where these two names are not all
        self.clock: Callable[[], int]
        self.calls = 0  # of the step under way
        self.begun = 0
        self.rows: list[tuple[Any, ...]] = []
        self.until = self.until_ns = 0  # the last step, and the last moment
        self.epoch_type = self.loss_type = self.norm_type = self.rate_type = type(None)

    @property
    def is_unended(self) -> bool:
        """The last forward pass that trains did not come to its end."""
        return self.is_on or self.is_broken

    def watch(self, monitor: TrainingMonitor, module: Any, names: tuple[str, ...]) -> None:
        """From now on `see` and `done`, or a `Caller`, tell of this module."""
        import torch

        self.monitor = weakref.ref(monitor)
        self.names = names
        self.is_compiling = torch.compiler.is_compiling
        self.is_traced = torch.compiler.is_dynamo_compiling  # half of it, and half as long
        self.kind = torch.Tensor
        self.is_grad_enabled = torch.is_grad_enabled
        # A module's attributes are looked up through __getattr__, which is slow; some find this one elsewhere.
        if "training" in vars(module) and not hasattr(type(module), "training"):
            self.module, self.own = module, vars(module)

    def let_go(self) -> None:
        """Of the module; nothing of ours is on it any more."""
        self.module, self.own = None, {}

    def see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook before a forward pass: sees what the model is given."""
        if not self.is_traced():
            self.look(module, args, kwargs)

    def look(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """As `see`, outside of a compiled graph, in which there is nothing to see."""
        is_training = self.own["training"] if module is self.module else module.training
        if not is_training or not self.is_grad_enabled():
            if self.is_on:
                self.is_on, self.is_broken = False, True
            return
        if not args and len(kwargs) == self.count:
            try:
                given = kwargs[self.name]
                if (
                    type(given) is self.kind  # and no stand-in of a tensor that an export runs on
                    and given.shape in self.shapes
                    and self.other in kwargs
                    and (self.fits is None or self.fits(kwargs))
                ):
                    if not self.calls:
                        self.begun = self.clock()
                        self.calls = 1
                    elif self.is_broken:  # it is in the place of the one before, as where that raised just now
                        self.is_broken = False
                    elif not self.is_on:
                        self.calls += 1
                    self.is_on = True
                    return
            except Exception:  # whatever it is given, the long way looks at it
                pass
        monitor = self.monitor()
        if monitor is not None and not self.is_compiling():
            monitor._see(args, kwargs, self.names)

    def done(self, _module: Any, _args: Any, _output: Any) -> None:
        """The hook after a forward pass: one that raised does not come here, nor is one seen inside a graph."""
        if self.is_on:
            self.is_on = False


class Caller:
    """Stands around every call of a module in place of hooks, for which torch would go a longer way."""

    def __init__(self, running: Running, module: Any) -> None:
        self._call = _make_short_call(running) if _is_call_known(module) else _make_call(running)
        self._module = weakref.ref(module)
        # A method of the module, so that who copies a module's attributes can bind it anew, as accelerate does.
        vars(module)[_PLACE] = MethodType(self._call, module)

    @staticmethod
    def fits(module: Any) -> bool:
        """Whether this module is called as modules are, copied without what we leave on it, and free."""
        from torch import accelerator, nn

        kind: Any = type(module)
        return (
            kind.__call__ is nn.Module.__call__
            and kind.__getstate__ is nn.Module.__getstate__
            and not hasattr(kind, "__deepcopy__")
            and getattr(module, _PLACE, kind) is None
            # Several devices in one process may be DataParallel's, whose replicas share their attributes.
            and (find_rank()[1] > 1 or accelerator.device_count() <= 1)
        )

    def remove(self) -> None:
        """Unless someone else has taken the place."""
        module = self._module()
        if module is not None and getattr(vars(module).get(_PLACE), "__func__", None) is self._call:
            del vars(module)[_PLACE]


def _is_call_known(module: Any) -> bool:
    """Whether torch's call asks what we know of, and nothing more, before it calls `forward`."""
    from torch import nn

    code = getattr(nn.Module._call_impl, "__code__", None)
    return (
        code is not None
        and code.co_names[: len(_ASKED)] == _ASKED
        and type(module)._call_impl is nn.Module._call_impl
        and "_call_impl" not in vars(module)
    )


def _is_copied(module: Any, own: dict[str, Any]) -> bool:
    """Whether this is a deep copy that took along what we left, as parametrized modules are copied."""
    return "_parameters" in own and vars(module).get("_parameters") is not own["_parameters"]


def _make_call(running: Running) -> Callable[..., Any]:
    """What stands in the module's place: see, the module's own call, done."""
    is_traced, look = running.is_traced, running.look

    def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_traced() or (module is not running.module and _is_copied(module, running.own)):
            return module._call_impl(*args, **kwargs)
        look(module, args, kwargs)
        output = module._call_impl(*args, **kwargs)
        if running.is_on:  # as in `done`
            running.is_on = False
        return output

    return call


def _make_short_call(running: Running) -> Callable[..., Any]:
    """As `_make_call`; but what is noted on a module without hooks goes on to `forward` at once, as torch would do.

    To ask torch whether `torch.jit` traces costs as much as all else. While it does, sizes are tensors, whose hash is
    not that of a number: no such shape is found among `shapes`.
    """
    from torch import nn
    from torch.nn.modules.module import (  # torch writes into these, and binds no others to their names
        _global_backward_hooks,
        _global_backward_pre_hooks,
        _global_forward_hooks,
        _global_forward_pre_hooks,
    )

    is_traced, look, theirs = running.is_traced, running.look, nn.Module._call_impl

    def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_traced():
            return module._call_impl(*args, **kwargs)
        try:
            own = running.own
            is_bare = (
                module is running.module
                and not args
                and len(kwargs) == running.count
                and own["training"]
                and type(module)._call_impl is theirs  # whoever patches torch's call, on a class or here, is called
                and "_call_impl" not in own
                and not own["_backward_hooks"]
                and not own["_backward_pre_hooks"]
                and not own["_forward_hooks"]
                and not own["_forward_pre_hooks"]
                and not _global_backward_hooks
                and not _global_backward_pre_hooks
                and not _global_forward_hooks
                and not _global_forward_pre_hooks
                and type(given := kwargs[running.name]) is running.kind
                and given.shape in running.shapes
                and running.other in kwargs
                and (running.fits is None or running.fits(kwargs))
                and running.is_grad_enabled()
                and not running.is_on
                and not running.is_broken
            )
            if is_bare:
                if not running.calls:
                    running.begun = running.clock()
                running.calls += 1
        except Exception:  # whatever it is given, the long way looks at it
            is_bare = False
        if is_bare:
            running.is_on = True
            output = module.forward(**kwargs)
            running.is_on = False
            return output
        if module is not running.module and _is_copied(module, running.own):
            return module._call_impl(*args, **kwargs)
        look(module, args, kwargs)
        output = module._call_impl(*args, **kwargs)
        if running.is_on:
            running.is_on = False
        return output

    return call


def _find_none() -> None:
    return None


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
