"""A model and a batch go in; the FLOPs that torch.profiler saw come out, as it gives them and corrected.

The profiler counts mm, addmm, bmm, baddbmm, conv2d, and elementwise add and mul, which are not model FLOPs. It gives
nothing to fused attention, other convolutions, any convolution's backward, and grouped products: those follow from
the shapes that it records. And it counts a product that never ran: the one at which a recomputation stops.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from flopcalc.base.vocabulary import Phase
from flopcalc.measure.counters.formulas import COUNTED, SKIPPED, attend_backward, count_pairs
from flopcalc.measure.counters.witnessed import WitnessCount, ready_step, synchronize
from flopcalc.measure.operator_kinds import ROTARY

_EXCLUDED = "flopcalc: rotary embedding"
_STOPPED = "flopcalc: recomputation stopped"
_OPTIMIZER = "Optimizer.step#"  # torch's own mark; an optimizer's products (Muon's) are no work of the model

# Matrix work that shapes alone do not tell (ragged batches, packed weights): stays in the ledger.
_UNKNOWN = (
    "aten::_flash_attention_forward", "aten::_flash_attention_backward", "aten::_efficient_attention_forward",
    "aten::_efficient_attention_backward", "aten::_cudnn_attention_forward", "aten::_cudnn_attention_backward",
    "aten::_scaled_grouped_mm", "aten::_weight_int4pack_mm", "aten::_weight_int8pack_mm", "aten::_addmm_activation",
    "aten::mkldnn_linear", "aten::addbmm", "aten::addr", "aten::cdist", "aten::addbmm_", "aten::addr_",
    "aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward", "aten::_cudnn_rnn", "aten::_cudnn_rnn_backward",
)  # fmt: skip
# Other packages' attention, and inductor's own products and attention, likewise.
_FOREIGN = re.compile(r"flash_?attn|xformers|flex_attention|triton_tem", re.IGNORECASE)


# --- Counting ------------------------------------------------------------------------------------------------


@contextmanager
def _marked(model: torch.nn.Module) -> Iterator[None]:
    """Leave marks among the events: what rotary modules do, and where a recomputation stops.

    A rotary embedding may be written as a product and is none by convention. Non-reentrant checkpointing stops with an
    exception while the next operator saves its inputs, so before that operator runs.
    """
    handles: list[Any] = []
    open_ranges: list[Any] = []
    seen: list[BaseException | None] = [None]

    def enter(_module: torch.nn.Module, _args: object) -> None:
        open_ranges.append(record_function(_EXCLUDED))
        open_ranges[-1].__enter__()

    def leave(_module: torch.nn.Module, _args: Any, _output: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    def note_stop(_module: torch.nn.Module, _args: object, _output: object) -> None:
        error = sys.exc_info()[1]
        # It passes through every module around; the innermost comes first.
        if type(error).__name__ == "_StopRecomputationError" and error is not seen[0]:
            seen[0] = error
            with record_function(_STOPPED):
                pass

    for module in model.modules():
        # always_call: also when the module is left by an exception.
        if any(word in type(module).__name__ for word in ROTARY):
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        handles.append(module.register_forward_hook(note_stop, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def count(model: Any, batch: Mapping[str, Any], phase: Phase) -> WitnessCount:
    """One step under torch.profiler; `corrected` drops elementwise work and adds what it is known to skip."""
    activities = [ProfilerActivity.CPU]  # FLOPs hang on CPU events: CUDA alone would give none
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    start = time.perf_counter()
    with ready_step(model, batch, phase) as step, _marked(model):
        with profile(activities=activities, with_flops=True, record_shapes=True, acc_events=True) as profiler:
            step()
            synchronize(model)
        tally = _Tally(profiler.events() or ())
    reason = None
    if tally.unknown:
        reason = f"not corrected, shapes do not tell: {', '.join(sorted(tally.unknown))}"
    return WitnessCount(
        "profiler",
        sum(tally.by.values()),
        dict(sorted(tally.by.items())),
        dict(sorted(tally.not_counted.items())),
        time.perf_counter() - start,
        reason,
        tally.corrected,
    )


class LiveProfiler:
    """A step that runs anyway, profiled from start() to stop(); outside of the two the model has no hooks of ours.

    Without CUDA activities: FLOPs hang on CPU events, so that nothing waits for the device.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._profiler: Any = None
        self._open: ExitStack | None = None

    def start(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(_marked(self._model))
            self._profiler = stack.enter_context(
                profile(activities=[ProfilerActivity.CPU], with_flops=True, record_shapes=True, acc_events=True)
            )
            self._open = stack.pop_all()

    def stop(self) -> tuple[int, tuple[str, ...]]:
        """FLOPs as eager code would run them, and the operators whose shapes do not show theirs."""
        if self._open is None:
            raise RuntimeError("no step is being profiled: call start() first")
        stack, self._open = self._open, None
        profiler, self._profiler = self._profiler, None
        stack.close()
        tally = _Tally(profiler.events() or ())
        return tally.corrected - tally.formed_again, tuple(sorted(tally.unknown))

    def cancel(self) -> None:
        """Leave the profiler, keep nothing; never raises."""
        if self._open is not None:
            stack, self._open, self._profiler = self._open, None, None
            with suppress(Exception):
                stack.close()


class _Tally:
    """Sums over events: the profiler's figures, and the corrected one from the outermost products only."""

    def __init__(self, events: Iterable[Any]) -> None:
        self.by: Counter[str] = Counter()
        self.not_counted: Counter[str] = Counter()
        self.unknown: set[str] = set()
        self.corrected = 0
        self.formed_again = 0  # scores that a fused attention's backward forms once more, where eager kept them
        on_host = [event for event in events if event.device_type == DeviceType.CPU]
        stopped = _find_stopped(on_host)
        for event in on_host:
            self._add(event, id(event) in stopped)

    def _add(self, event: Any, is_stopped: bool) -> None:
        name, flops = event.name, int(event.flops or 0)
        if flops:
            self.by[name] += flops
        formula = SKIPPED.get(name) or COUNTED.get(name)
        if is_stopped or (formula is None and name not in _UNKNOWN and not _FOREIGN.search(name)):
            return
        # A product inside another one (mm inside a grouped product's fallback) is the same work.
        if any(parent.name in SKIPPED or parent.name in COUNTED for parent in _ancestors(event)):
            return
        if any(parent.name == _EXCLUDED or parent.name.startswith(_OPTIMIZER) for parent in _ancestors(event)):
            return
        if formula is None:
            self.not_counted[name] += 1
            self.unknown.add(name)
            return
        if flops:
            self.corrected += flops
            return
        try:
            found = formula(event.input_shapes, event.concrete_inputs)
        except (LookupError, TypeError, ValueError):  # an argument was not recorded
            self.not_counted[name] += 1
            self.unknown.add(name)
            return
        if found and not _has_flops(event):  # a fallback's inner products are in the profiler's total
            self.not_counted[name] += 1
        self.corrected += found
        if formula is attend_backward:
            q, k, v = event.input_shapes[1:4]
            self.formed_again += count_pairs(q, k, v, 1, 0)


def _find_stopped(events: Sequence[Any]) -> set[int]:
    """Products that were entered and never ran: the last thing that began in its thread before a stop's mark."""
    found: set[int] = set()
    last: dict[int, Any] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.name != _STOPPED:
            last[event.thread] = event
        elif event.thread in last:
            began = last[event.thread]
            # What saves an output (fused attention) has run by then; products save inputs alone.
            chain = [began, *_ancestors(began)]
            found |= {id(e) for e in chain if (e.name in COUNTED or e.name in SKIPPED) and "attention" not in e.name}
    return found


def _has_flops(event: Any) -> bool:
    return any((child.flops and child.name in COUNTED) or _has_flops(child) for child in event.cpu_children)


def _ancestors(event: Any) -> Iterator[Any]:
    parent = event.cpu_parent
    while parent is not None:
        yield parent
        parent = parent.cpu_parent
