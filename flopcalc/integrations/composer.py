"""Composer: `from flopcalc.integrations import composer; composer.install(model)` gives SpeedMonitor FLOPs and MFU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flopcalc.integrations.counting import StepCounter, bind_options

# mosaicml 0.32: composer/callbacks/speed_monitor.py calls model.flops_per_batch(batch) on every rank and adds them up.


def make_flops_per_batch(composer_model: object, **options: object) -> Callable[[Mapping[str, Any]], float]:
    """f(batch) -> FLOPs of a training step on this rank's batch, of the HF model inside a ComposerModel."""
    inner = getattr(composer_model, "model", composer_model)
    counter: StepCounter | None = None

    def flops_per_batch(batch: Mapping[str, object]) -> float:
        nonlocal counter
        if counter is None:  # at the first batch: what trains is settled by then
            counter = StepCounter(lambda: bind_options(lambda: inner, options), "Composer")
        # The monitor waits for the device right after this, so reading the batch's lengths costs nothing.
        return counter.count_batch(batch, read_device=True)

    return flops_per_batch


def install(composer_model: Any, **options: Any) -> None:
    """Set `flops_per_batch` of a ComposerModel; options are those of flopcalc.bind, and `model=`."""
    composer_model.flops_per_batch = make_flops_per_batch(composer_model, **options)
