"""A module that no spec describes: each call is counted on a copy, size by size, until a trace holds for all sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from flopcalc.base.errors import FlopcalcError, WorkloadError
from flopcalc.base.vocabulary import Phase
from flopcalc.core.model.live import strip
from flopcalc.core.workload.workload import Workload
from flopcalc.monitor.batch import BatchWork, Fetcher, Intake, Snapshot
from flopcalc.monitor.instruments import Copy, ExecutedFlops, NotMeasured, sign
from flopcalc.monitor.messages import Say

_MOST_SIZES = 64  # that are counted one by one


class MeasuredModule:
    """Counts the calls of a live module on the training thread, with their own arguments; nothing of it runs."""

    def __init__(self, live: Any, name_format: Callable[[], str], say: Say) -> None:
        self.live = live
        self._name_format = name_format
        self._say = say
        self._copy = Copy(live)
        self._flops: dict[Hashable, ExecutedFlops | None] = {}  # phase and sizes of a call -> FLOPs; None: not known
        self._intake: Intake | None = None  # from a trace that holds
        self._is_tried = False

    def take(self, batch: Mapping[str, Any], fetcher: Fetcher | None, holder: Any) -> Snapshot:
        """A snapshot; a new size is counted now."""
        import torch

        phase = "train" if torch.is_grad_enabled() and self.live.training else "forward"
        key = (phase, sign(batch))
        if self._intake is not None and phase == "train":
            return self._intake.take(batch, fetcher, holder)
        if key not in self._flops:
            # In a thread of its own: a counter or a mode that the loop has on sees nothing of it.
            apart = threading.Thread(target=self._measure, args=(key, phase, batch), name="flopcalc-count")
            apart.start()
            apart.join()
        return Snapshot((("call", key),), {})

    def count_known(self) -> int:
        """How many sizes were counted."""
        return len(self._flops)

    def _measure(self, key: Hashable, phase: Phase, batch: Mapping[str, object]) -> None:
        self._flops[key] = None
        name = type(strip(self.live)).__name__
        if len(self._flops) > _MOST_SIZES:
            self._say(f"{name}: more than {_MOST_SIZES} sizes of batches: others are not counted", f"sizes of {name}")
            return
        try:
            counted = self._flops[key] = self._copy.split([batch], phase)
        except NotMeasured as error:
            self._say(f"{name} cannot be counted: {error}", f"copy of {name}")
            return
        known = [each for each in self._flops if isinstance(each, tuple) and each[0] == "train"]
        is_plain = not counted.recomputed  # a trace does not show what is recomputed
        if phase == "train" and is_plain and len(known) > 1 and not self._is_tried:
            self._is_tried = True
            self._try_trace(batch, key)

    def _try_trace(self, batch: Mapping[str, object], key: Hashable) -> None:
        """A trace that gives what was counted at this size takes over."""
        import torch

        from flopcalc.measure.trace.copies import copy_to_meta
        from flopcalc.measure.trace.polynomials import trace_module

        random = torch.random.get_rng_state()  # the live step's numbers go on as if nothing had been
        try:
            twin = copy_to_meta(strip(self.live))
            intake = Intake(trace_module(twin, batch, phases=("train",), compute=self._name_format()))
            found = self._flops[key]
            if found is not None and intake.count(intake.take(batch, None, None)).model_flops == found.needed:
                self._intake = intake
        except Exception:  # whatever the module does: then its sizes are counted one by one
            pass
        finally:
            torch.random.set_rng_state(random)


class MeasuredIntake(Intake):
    """Reads what a MeasuredModule took."""

    def __init__(self, module: MeasuredModule) -> None:
        self.module = module
        self.estimator = None  # type: ignore[assignment]

    def take(self, batch: Mapping[str, object], fetcher: Fetcher | None, holder: object) -> Snapshot:
        return self.module.take(batch, fetcher, holder)

    def classify(self, batch: Mapping[str, object]) -> Hashable:  # noqa: ARG002
        return ()

    def is_told_by(self, sizes: Hashable) -> bool:  # noqa: ARG002
        return False

    def count(self, snapshot: Snapshot, phase: Phase = "train") -> BatchWork:
        module = self.module
        name, key = snapshot.key[0]
        if name != "call":
            if module._intake is None:
                raise WorkloadError("its trace is gone")
            work = module._intake.count(snapshot, phase)
            return work._replace(hardware=work.model)
        flops = module._flops.get(key)
        if flops is None:
            raise WorkloadError(f"{type(strip(module.live)).__name__} could not be counted at this size")
        name = module._name_format()
        rows, seq = _find_sizes(key)
        needed, executed = {name: flops.needed}, {name: flops.total}
        return BatchWork(Workload(rows, seq, phase=phase), needed, executed, rows * seq, rows * seq, rows, 0)

    def count_eager(self, work: BatchWork, head: object = None) -> int:  # noqa: ARG002
        return int(work.hardware_flops or 0)

    def count_lengths(self, prompts: object, completions: object, generates: bool) -> Any:  # noqa: ARG002
        raise FlopcalcError("a module without a spec is not counted by lengths")

    def count_generated(self, prompt: BatchWork, new: int, lengths: object) -> BatchWork:  # noqa: ARG002
        raise FlopcalcError("what a module without a spec generates is not counted")


def _find_sizes(key: object) -> tuple[int, int]:
    """Batch and length of the first tensor of a call."""
    for part in key[1] if isinstance(key, tuple) else ():
        shape = part[1] if isinstance(part, tuple) and len(part) == 2 else None
        if isinstance(shape, tuple) and shape and all(isinstance(size, int) for size in shape):
            return max(1, shape[0]), max(1, shape[1]) if len(shape) > 1 else 1
        if isinstance(shape, tuple):
            found = _find_sizes((None, shape))
            if found != (1, 1):
                return found
    return 1, 1
