"""Experts: which of them a machine runs in one kernel as a whole, and how long the device waits for the host there."""

from __future__ import annotations

from typing import NamedTuple

from flopcalc.prediction.kernels.machine import Machine
from flopcalc.prediction.work import ProductCall, Work


class FusedExperts(NamedTuple):
    """Experts whose two products, activation function and casts are one kernel each way (Transformer Engine's grouped
    MLP of CuTe DSL, which Megatron-Bridge trains with in mxfp8 from release 26.06 on)."""

    host_s: float  # seconds that the host takes for a product of experts, joined or not
    overlap: float  # how well host and device overlap: 1 hides nothing
    modules: frozenset[str] = frozenset()

    def makes(self, product: ProductCall) -> bool:
        """Whether the kernel itself makes what a product reads: the second one's input, the first one's gradient."""
        return product.module in self.modules and product.is_last == (product.direction == "forward")

    def find_wait(self, device_s: float) -> float:
        """Seconds that the device waits at each product of experts, if it computes for `device_s` per product."""
        return float((device_s**self.overlap + self.host_s**self.overlap) ** (1 / self.overlap)) - device_s


def find_fused_experts(work: Work, machine: Machine) -> FusedExperts:
    """What of a step's experts one kernel does on a machine, and what the host takes for them.

    A step that is replayed as a CUDA graph needs no host. Models with scans are not replayed where they route
    (Megatron-Bridge's recipes of hybrid models); models that select keys are (its deepseek_v4.py).
    """
    fitted = machine.fitted
    experts = [each for each in work.products if each.is_expert]
    if not experts or not machine.joins_experts:
        return FusedExperts(fitted.expert_host_s, fitted.host_overlap)
    host_s = 0.0 if machine.replays_experts and not work.has_scans else fitted.expert_host_s
    return FusedExperts(host_s, fitted.host_overlap, frozenset(each.module for each in experts))
