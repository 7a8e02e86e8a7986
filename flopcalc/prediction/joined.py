"""Experts that one kernel runs as a whole: which of them a machine joins, and what their kernels wait for."""

from __future__ import annotations

from typing import NamedTuple

from flopcalc.prediction.machine import EXPERT_START_S, Machine
from flopcalc.prediction.work import Product, Work


class Joined(NamedTuple):
    """Experts whose two products, activation function and casts are one kernel each way (Transformer Engine's grouped
    MLP of CuTe DSL, which Megatron-Bridge trains with in mxfp8 from release 26.06 on)."""

    start_s: float  # seconds of a product of experts, joined or not, beside itself
    modules: frozenset[str] = frozenset()
    width: int = 0  # of the rows that experts take and give back

    def makes(self, product: Product) -> bool:
        """Whether the kernel itself makes what a product reads: the second one's input, the first one's gradient."""
        is_second = product.n == self.width
        return product.module in self.modules and is_second == (product.direction == "forward")


def find_joined(work: Work, machine: Machine) -> Joined:
    """What of a step's experts one kernel does on a machine, and what their kernels wait for.

    Models with scans are not replayed as CUDA graphs where they route (Megatron-Bridge's recipes of hybrid models).
    """
    experts = [each for each in work.products if each.side == "expert"]
    start_s = machine.expert_start_s if work.is_recorded else EXPERT_START_S
    if not experts or machine.joined_start_s is None:
        return Joined(start_s)
    if work.is_recorded:
        start_s = machine.joined_start_s
    return Joined(start_s, frozenset(each.module for each in experts), experts[0].k)
