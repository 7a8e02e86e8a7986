"""Flops: FLOPs of one step by what they are for; exact ints that add up and multiply."""

from __future__ import annotations

from typing import NamedTuple


class Flops(NamedTuple):
    """Forward, backward, recomputed and clipping FLOPs."""

    forward: int = 0
    backward: int = 0
    recompute: int = 0
    clipping: int = 0  # of per-sample clipping, beyond what plain training needs

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recompute + self.clipping

    def __add__(self, other: Flops) -> Flops:  # type: ignore[override]  # sums, where a tuple would be joined
        return Flops(
            self.forward + other.forward,
            self.backward + other.backward,
            self.recompute + other.recompute,
            self.clipping + other.clipping,
        )

    def __mul__(self, times: int) -> Flops:  # type: ignore[override]
        return Flops(self.forward * times, self.backward * times, self.recompute * times, self.clipping * times)

    def __rmul__(self, times: int) -> Flops:  # type: ignore[override]
        return self * times


NO_FLOPS = Flops()
