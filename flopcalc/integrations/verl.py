"""verl: `from flopcalc.integrations import verl; verl.install()` makes its FlopsCounter count with flopcalc."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flopcalc.integrations.counting import StepCounter, bind_options, replace_attributes

# verl 0.9: verl/utils/flops_counter.py


class FlopsCounter:
    """verl's FlopsCounter with exact counts of any model that flopcalc knows."""

    def __init__(self, config: object, **options: object) -> None:
        self.config = config
        self.counter = StepCounter(lambda: bind_options(lambda: config, options), "verl")

    def estimate_flops(
        self,
        batch_seqlens: Sequence[int],
        delta_time: float,
        images_seqlens: Sequence[int] | None = None,
        **_: object,  # what other versions of verl pass
    ) -> tuple[float, float]:
        """TFLOP/s of a training step, and what verl says the device can do; `images_seqlens` are patch counts."""
        from verl.utils.flops_counter import get_device_flops

        flops = self.counter.count_documents(batch_seqlens, images_seqlens)
        return flops / delta_time / 1e12, get_device_flops()


def install(**options: Any) -> Callable[[], None]:
    """Replace the counter of every worker of this process; options are those of flopcalc.bind, and `model=`.

    Call it where the workers run: name a module that calls it in `actor_rollout_ref.model.external_lib`.
    """
    from verl.utils.flops_counter import FlopsCounter as Theirs

    def make(self: Any, config: Any) -> None:
        FlopsCounter.__init__(self, config, **options)

    return replace_attributes(Theirs, __init__=make, estimate_flops=FlopsCounter.estimate_flops)
