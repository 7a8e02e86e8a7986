"""A live step, or the model and its batches, in; the FLOPs that one instrument saw out, or NotMeasured with the reason.

Each is opened by start() and closed by stop() or cancel(), on the training thread; none counts between two steps.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

from flopcalc.base.errors import FlopcalcError
from flopcalc.base.vocabulary import Phase
from flopcalc.core.model.live import strip
from flopcalc.monitor.batch import count_scored
from flopcalc.monitor.place import allows_tf32 as _allows_tf32

_KEPT = 256  # counts of copies that are kept
# Floats by name, where only a shape is known.
_FLOATS = ("pixel_values", "inputs_embeds", "input_features", "input_values")
_WORD = 3  # any token that is no image
_ONES = ("attention_mask", "decoder_attention_mask")
_OPTIONS = (str, int, float, bool, type(None))


class NotMeasured(Exception):
    """An instrument has no figure; the message says why. `is_final`: it will never have one here."""

    def __init__(self, reason: str, is_final: bool = False) -> None:
        super().__init__(" ".join(reason.split())[:300])
        self.is_final = is_final


class Counters:
    """The GPU's tensor counters around a live step."""

    name = "cupti"

    def __init__(self, model: object, dtype: str | None = None) -> None:
        self._model = model
        self._wanted = dtype
        self._candidates: list[str] | None = None  # dtypes whose tensor cores may be at work, likeliest first
        self._counter: Any = None
        self._range: Any = None
        self._sample: Any = None

    def is_on_gpu(self) -> bool:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return False
        device = find_torch_device(self._model)
        return device is None or device.type == "cuda"

    def start(self) -> None:
        """NotMeasured where no counter can be read."""
        from flopcalc.measure.counters import cupti

        if not self.is_on_gpu():
            raise NotMeasured("the model is not on a CUDA device", is_final=True)
        try:
            with self._on_device():
                if self._counter is None:
                    dtype = self._choose_dtype()  # fp8 training keeps some products in bf16; both fit one pass
                    names = [cupti.TENSOR_COUNTERS[each] for each in (("fp8", "bf16") if dtype == "fp8" else (dtype,))]
                    self._counter = cupti.HardwareCounter(names, stays_enabled=True)
                held = self._counter.measure()
                self._sample = held.__enter__()
                self._range = held
        except NotMeasured:
            raise
        except Exception as error:  # CountersUnavailable, or whatever a driver does
            self.close()
            raise NotMeasured(_describe(error), is_final=True) from None

    def stop(self) -> int:
        """FLOPs that ran on tensor cores since start()."""
        held, self._range = self._range, None
        sample, self._sample = self._sample, None
        try:
            with self._on_device():
                held.__exit__(None, None, None)
        except Exception as error:
            raise NotMeasured(_describe(error)) from None
        return int(sample.total_flops)

    def cancel(self) -> None:
        held, self._range, self._sample = self._range, None, None
        if held is not None:
            with suppress(Exception), self._on_device():
                error = RuntimeError("the step was given up")
                held.__exit__(RuntimeError, error, None)

    def try_next(self) -> bool:
        """Another dtype's tensor cores at the next step; False when all were tried."""
        self.close()
        del self._list_dtypes()[0]
        return bool(self._candidates)

    def _choose_dtype(self) -> str:
        dtypes = self._list_dtypes()
        if not dtypes:
            raise NotMeasured(
                "no tensor core of a known dtype is at work (fp32 without TF32 uses none); monitoring.dtype names it",
                is_final=True,
            )
        return dtypes[0]

    def _list_dtypes(self) -> list[str]:
        if self._candidates is None:
            self._candidates = list_tensor_dtypes(self._model, self._wanted)
        return self._candidates

    def _on_device(self) -> AbstractContextManager[Any]:
        torch = sys.modules["torch"]
        device = find_torch_device(self._model)
        return torch.cuda.device(device) if device is not None else nullcontext()

    def close(self) -> None:
        """Never raises; the counters can be started again after it."""
        self.cancel()
        counter, self._counter = self._counter, None
        if counter is not None:
            with suppress(Exception):
                counter.close()


class Profiler:
    """torch.profiler around a live step."""

    name = "profiler"

    def __init__(self, model: object) -> None:
        self._model = model
        self._live: Any = None

    def start(self) -> None:
        try:
            import torch

            from flopcalc.measure.counters.torch_profiler import LiveProfiler

            # Without a live model there is nothing to mark, and the operators are seen all the same.
            live = LiveProfiler(strip(self._model) if isinstance(self._model, torch.nn.Module) else torch.nn.Module())
            live.start()
        except Exception as error:
            raise NotMeasured(_describe(error), is_final=isinstance(error, ImportError)) from None
        self._live = live

    def stop(self) -> int:
        """FLOPs as eager code would run them."""
        live, self._live = self._live, None
        try:
            flops, unknown = live.stop()
        except Exception as error:
            live.cancel()
            raise NotMeasured(_describe(error)) from None
        if unknown:
            raise NotMeasured(
                f"torch.profiler records no sizes that tell the FLOPs of {', '.join(unknown)}", is_final=True
            )
        return int(flops)

    def cancel(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.cancel()


class Copy:
    """The operator counter on a copy of FakeTensors, on the model's own device; nothing of the live model changes."""

    name = "operator counter"

    def __init__(self, model: object) -> None:
        self._model = model
        self._state: Hashable = None
        self._kept: dict[Hashable, ExecutedFlops] = {}
        self._made: Any = None  # of the state
        self._has_counted = False

    def prepare(self) -> None:
        """Copy the model as it stands: a pass may set hooks that are not to be copied. Never raises."""
        with suppress(Exception):  # why a model cannot be copied is said when it is to be counted
            self._copy(self._find_module())

    def count(self, batches: Sequence[Mapping[str, object]]) -> int:
        """FLOPs of a step on these micro-batches, as eager code runs them."""
        return self.split(batches).total

    def split(self, batches: Sequence[Mapping[str, Any]], phase: Phase = "train") -> ExecutedFlops:
        """The same, what is recomputed apart; equal shapes are counted once."""
        module = self._find_module()
        if not batches:
            raise NotMeasured("the step's batches are not known")
        try:
            made = self._copy(module)
            signatures: list[Hashable] = [(phase, sign(batch)) for batch in batches]
            missing = {key: batch for key, batch in zip(signatures, batches, strict=True) if key not in self._kept}
            for key, batch in missing.items():
                self._kept[key] = self._count_one(made, batch, phase)
                self._has_counted = True
        except NotMeasured:
            raise
        except Exception as error:  # the model's own code: whatever it raises is why it cannot be counted
            is_final = not self._has_counted  # else it was this batch
            raise NotMeasured(
                f"{type(module).__name__} cannot be copied and counted: {_describe(error)}", is_final
            ) from None
        found = [self._kept[key] for key in signatures]
        return ExecutedFlops(sum(each.needed for each in found), sum(each.recomputed for each in found))

    def _find_module(self) -> Any:
        import torch

        if not isinstance(self._model, torch.nn.Module):
            raise NotMeasured("there is no live model to copy", is_final=True)
        return strip(self._model)

    def _copy(self, module: Any) -> Any:
        from flopcalc.measure.trace.fakes import FakeCopy

        state = _describe_state(module)
        if self._made is None or state != self._state or len(self._kept) > _KEPT:
            self._kept.clear()
            self._made = FakeCopy(module)
            self._state = state
        return self._made

    def _count_one(self, made: Any, batch: Mapping[str, Any], phase: Phase) -> ExecutedFlops:
        counted = made.count(_move_batch(batch, made), phase)
        if counted.not_counted:
            raise NotMeasured(f"the counter has no formula for {', '.join(counted.not_counted)}", is_final=True)
        return ExecutedFlops(counted.forward + counted.backward, counted.recompute)


class ExecutedFlops(NamedTuple):
    """FLOPs that eager code executes in a step."""

    needed: int  # forward and backward
    recomputed: int

    @property
    def total(self) -> int:
        return self.needed + self.recomputed


def _describe_state(module: Any) -> Hashable:
    """What may change between two steps and changes what runs."""
    modes = [(each.training, getattr(each, "gradient_checkpointing", False)) for each in module.modules()]
    return tuple(modes), tuple(parameter.requires_grad for parameter in module.parameters())


def sign(batch: Mapping[Any, object]) -> Hashable:
    """What decides a batch's FLOPs when every pair counts: shapes, the sizes of images, scored labels, options."""
    parts: list[Hashable] = [count_scored(batch)]
    for name, value in batch.items():
        shape = getattr(value, "shape", None)
        if isinstance(value, Mapping):
            parts.append((name, sign(value)))
        elif isinstance(value, (list, tuple)):
            parts.append((name, sign(dict(enumerate(map(_name_entry, value))))))
        elif shape is None:
            parts.append((name, repr(value) if isinstance(value, _OPTIONS) else type(value).__name__))
        elif str(name).endswith(("_thw", "_sizes")) and hasattr(value, "tolist"):
            parts.append((name, repr(value.tolist())))
        else:
            parts.append((name, tuple(shape)))
    return tuple(parts)


def _name_entry(value: object) -> Any:
    return value if hasattr(value, "shape") or isinstance(value, (Mapping, *_OPTIONS)) else repr(value)


def _move_batch(batch: Mapping[str, object], made: Any) -> dict[str, Any]:
    """Floats on the copy's device, integers on the host; a tensor known only by its shape gets arbitrary values."""
    import torch

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            return value.detach().cpu()
        return made.make_float(value.shape, value.requires_grad)

    found: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) or not hasattr(value, "shape"):
            found[name] = torch.utils._pytree.tree_map(move, value)
        elif name.startswith(_FLOATS):
            found[name] = made.make_float(value.shape)
        elif any(other.startswith("pixel_values") for other in batch):
            raise NotMeasured(f"only the shape of {name} is known, not where its images stand")
        else:
            found[name] = torch.full(tuple(value.shape), 1 if name in _ONES else _WORD)
    return found


def find_torch_device(model: object) -> Any:
    """Where a module's parameters are; None without any."""
    parameters = getattr(model, "parameters", None)
    first = next(iter(parameters()), None) if parameters is not None else None
    return getattr(first, "device", None)


def list_tensor_dtypes(model: object, wanted: str | None = None) -> list[str]:
    """Dtypes whose tensor cores may be at work, likeliest first; fp32 weights may run under autocast."""
    import torch

    from flopcalc.measure.counters.cupti import TENSOR_COUNTERS

    tf32 = ["tf32"] if _allows_tf32() else []
    if wanted is not None:
        return [wanted] if wanted in TENSOR_COUNTERS else tf32
    sizes: Counter[torch.dtype] = Counter()
    for parameter in getattr(model, "parameters", tuple)():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    main = sizes.most_common(1)[0][0] if sizes else torch.float32
    own = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}.get(main)
    cast = None
    if torch.is_autocast_enabled("cuda"):
        cast = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(torch.get_autocast_dtype("cuda"))
    likely = [cast, own] if cast or own else ["bf16", *tf32, "fp16"]
    return list(dict.fromkeys(dtype for dtype in likely if dtype))


def is_profiled() -> bool:
    """Whether somebody's own torch.profiler is on: its trace, and our figures, would both be spoilt."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.autograd._profiler_enabled())


def _describe(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return (
        text
        if isinstance(error, FlopcalcError) or type(error).__name__ == "CountersUnavailable"
        else (f"{type(error).__name__}: {text}")
    )
