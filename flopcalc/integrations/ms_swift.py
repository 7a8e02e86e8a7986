"""ms-swift, HF Trainer: `from flopcalc.integrations import ms_swift; ms_swift.install()` makes `total_flos` exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flopcalc.integrations.counting import StepCounter, bind_options, replace_attributes

# transformers 5.22: trainer.py adds floating_point_ops(inputs) of each micro-batch to total_flos; ms-swift 4.6
# (swift/callbacks/perf_log.py) divides total_flos by time and peak.
_KEY = "_flopcalc_counter"


def floating_point_ops(
    trainer: Any, inputs: Mapping[str, object], *, read_device: bool = False, **options: Any
) -> float:
    """FLOPs of a training step on one micro-batch of a trainer."""
    counter = vars(trainer).get(_KEY)
    if counter is None:
        counter = StepCounter(lambda: bind_options(lambda: trainer.model, options), "HF Trainer")
        setattr(trainer, _KEY, counter)
    return float(counter.count_batch(inputs, read_device=read_device))


def install(*, read_device: bool = False, **options: object) -> Callable[[], None]:
    """Replace Trainer.floating_point_ops; options are those of flopcalc.bind, and `model=`.

    Masks on a GPU are not read, since that would wait for it: padding then counts as tokens. `read_device`
    reads them, once for each micro-batch.
    """
    from transformers import Trainer

    def ours(self: object, inputs: Mapping[str, object]) -> float:
        return floating_point_ops(self, inputs, read_device=read_device, **options)

    return replace_attributes(Trainer, floating_point_ops=ours)
