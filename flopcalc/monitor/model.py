"""The model that is trained: how its batches are counted, what MFU is a share of, and what measures it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flopcalc.errors import FlopcalcError
from flopcalc.monitor.batch import Intake, Snapshot, Work, bind_live
from flopcalc.monitor.device import Device
from flopcalc.monitor.messages import Say
from flopcalc.monitor.meter import Meter, Peak
from flopcalc.monitor.modes import Counts, Source, make_source
from flopcalc.monitor.place import find_dtype, find_known_device, find_layout, find_peak, guess_dtype
from flopcalc.monitor.settings import Settings


class TrainedModel:
    """Filled in at the first step; each part may fail by itself."""

    def __init__(self, settings: Settings, meter: Meter, say: Say) -> None:
        self.live: Any = None  # the module whose forward passes are seen
        self.given: Any = None  # what is counted, where that is not the live module
        self.intake: Intake | None = None
        self.source: Source | None = None
        self.shared = 1  # ranks that work on one batch together
        self.take: Callable[[Mapping[str, Any], Device | None, list[Any]], Snapshot | None] = _take_sizes
        self.classify: Callable[[Mapping[str, Any]], Hashable] = _classify_alike
        self.dtype = settings.dtype  # of its products
        self._settings = settings
        self._meter = meter
        self._say = say
        self._absolute: dict[Hashable, int] = {}  # sizes of a step -> FLOPs, where there is no formula

    def bind(self) -> None:
        """The analytic count of the model as it stands; once more when the dtype of its products is seen."""
        if self.dtype is not None:
            self._meter.peak = find_peak(self._settings, self.live, self.dtype, self._say)
        model = self.given if self.given is not None else self.live
        if model is None:
            self._explain("no model was given: TrainingMonitor(…, model=model), or monitor.attach(model)")
            return
        tensor, context, stages = find_layout(self._settings, self.live, self._say)
        self.shared = tensor * context
        device = find_known_device(self._settings) if self.dtype is not None else None
        try:
            estimator = bind_live(model, device, self.dtype)
        except FlopcalcError as error:
            self._explain(str(error))
            return
        self.intake = Intake(estimator, context)
        self.classify = self.intake.classify
        self.take = self.intake.take if stages == 1 else self._take_stage
        self._meter.convention = estimator.convention

    def _explain(self, reason: str) -> None:
        if self._settings.mode == "estimate" or self.live is None:
            self._say(f"FLOPs cannot be counted, so MFU is not known: {reason}", "no count")
        else:
            self._say(f"MFU is known only of steps as large as one that was measured: {reason}", "no count")

    def open_source(self, rank: int) -> None:
        """One rank measures; the sums of all are scaled by its factor."""
        settings = self._settings if rank == 0 else replace(self._settings, mode="estimate")
        if self.source is None:
            self.source = make_source(settings, self.live, self._say)

    def see_dtype(self, module: Any) -> None:
        """Asked in a forward pass of a layer of the model."""
        if self.dtype is None:
            self.dtype = find_dtype(module)
            self.bind()

    def settle_peak(self) -> None:
        """The first step is over: where nobody saw the dtype by now, it is guessed from the weights."""
        if math.isnan(self._meter.peak.flops_per_s) and self.dtype is None:
            dtype = guess_dtype(self._settings, self.live, self._say)
            if dtype is not None:
                self._meter.peak = find_peak(self._settings, self.live, dtype, self._say)

    def _take_stage(self, batch: Mapping[str, Any], device: Device | None, copies: list[Any]) -> Snapshot | None:
        """A pipeline's later stages are given activations: the first one counts for all."""
        ids = batch.get("input_ids")
        if self.intake is None or ids is None or len(getattr(ids, "shape", ())) != 2:
            return None
        return self.intake.take(batch, device, copies)

    def count_measured(self, batches: Sequence[Snapshot | None]) -> Counts | None:
        """What the measured step should have counted, in the ways that counters count."""
        if self.intake is None:
            return None
        try:
            works = count_batches(self.intake, batches)
            eager = [self.intake.count_eager(work) for work in works]
        except FlopcalcError as error:
            self._say(f"the measured batch cannot be counted: {error}", "no work")
            return None
        if not works:
            return None
        hardware = [work.hardware_flops for work in works if work.hardware_flops is not None]
        return Counts(
            model=sum(work.model_flops for work in works),
            full=sum(eager),
            hardware=sum(hardware) if len(hardware) == len(works) else None,
        )

    def keep_absolute(self, sizes: Hashable) -> None:
        """Without a formula, what was measured holds for steps of the same sizes, and for no others."""
        found = self.source.absolute(()) if self.source is not None and self.intake is None else None
        # A measurement that failed leaves the one before.
        if found is not None and sizes and (not self._absolute or found != next(reversed(self._absolute.values()))):
            self._absolute[sizes] = found

    def find_absolute(self, sizes: Hashable) -> int | None:
        return self._absolute.get(sizes)

    def forget(self) -> None:
        """Another model comes: what was measured or seen of this one says nothing of it."""
        self.close()
        self.source = self.intake = None
        self.take, self.classify = _take_sizes, _classify_alike
        self.dtype = self._settings.dtype
        self._meter.peak = Peak()
        self._absolute.clear()

    def close(self) -> None:
        if self.source is not None:
            self.source.close()


def _take_sizes(batch: Mapping[str, Any], _device: Device | None, _copies: list[Any]) -> Snapshot:
    """Of a model without a formula."""
    return Snapshot(tuple((name, each.shape) for name, each in batch.items() if hasattr(each, "shape")), {})


def _classify_alike(_batch: Mapping[str, Any]) -> Hashable:
    """Of a model without a formula."""
    return ()


def count_batches(intake: Intake, batches: Sequence[Snapshot | None]) -> list[Work]:
    return [intake.count(each) for each in batches if each is not None]
