"""Experts: which of them a machine runs in one kernel as a whole, and how long the device waits for the host there."""

from __future__ import annotations

from typing import NamedTuple

from flopcalc.prediction.kernels.machine import EXPERT_HOST_S, Machine
from flopcalc.prediction.work import Product, Work

# How well host and device run beside each other: 1 hides nothing, and the larger, the more of the shorter one.
_BESIDE = 1.7


class FusedExperts(NamedTuple):
    """Experts whose two products, activation function and casts are one kernel each way (Transformer Engine's grouped
    MLP of CuTe DSL, which Megatron-Bridge trains with in mxfp8 from release 26.06 on)."""

    host_s: float  # seconds that the host takes for a product of experts, joined or not
    modules: frozenset[str] = frozenset()
    width: int = 0  # of the rows that experts take and give back

    def makes(self, product: Product) -> bool:
        """Whether the kernel itself makes what a product reads: the second one's input, the first one's gradient."""
        is_second = product.n == self.width
        return product.module in self.modules and is_second == (product.direction == "forward")

    def find_wait(self, device_s: float) -> float:
        """Seconds that the device waits at each product of experts, if it computes for `device_s` per product."""
        return float((device_s**_BESIDE + self.host_s**_BESIDE) ** (1 / _BESIDE)) - device_s


def find_fused_experts(work: Work, machine: Machine) -> FusedExperts:
    """What of a step's experts one kernel does on a machine, and what the host takes for them.

    A step that is replayed as a CUDA graph needs no host. Models with scans are not replayed where they route
    (Megatron-Bridge's recipes of hybrid models); models that select keys are (its deepseek_v4.py).
    """
    experts = [each for each in work.products if each.side == "expert"]
    if not experts or not machine.joins_experts:
        return FusedExperts(EXPERT_HOST_S)
    host_s = 0.0 if machine.replays_experts and not work.has_scans else EXPERT_HOST_S
    return FusedExperts(host_s, frozenset(each.module for each in experts), experts[0].k)
