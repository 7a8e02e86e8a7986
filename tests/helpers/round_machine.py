"""A machine of round numbers, for tests that work seconds out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc.planning import step
from flopcalc.prediction.kernels.machine import KernelTime, Machine

GPT = {
    "model_type": "gpt2", "n_embd": 1024, "n_layer": 16, "n_head": 16, "n_inner": 4096, "vocab_size": 32000,
    "n_positions": 4096,
}  # fmt: skip


class RoundMachine(Machine):
    """100 TFLOP/s, 1 TB/s, attention at 50 TFLOP/s; nothing else costs time, nor does a lower clock."""

    def __init__(self, device: str, dtype: str = "bf16", constants: Any = None) -> None:
        super().__init__(device, dtype, constants)
        self.peak, self.is_measured = 100e12, True
        error = {"device": 0.0, "host": 0.0, "late": 0.0, "compiled": 0.0}
        gaps = {"train": 0.0, "forward": 0.0}
        self.constants = {**self.constants, "gaps": gaps, "power": [1.0, 0.0], "error": error}
        self.is_own = True

    def time_product(self, product: Any) -> KernelTime:
        return KernelTime(2.0 * product.size.m * product.size.n * product.size.k / 100e12, 0.1, True)

    def time_attention(self, call: Any) -> KernelTime:
        pairs = call.batch * call.heads * call.length * call.keys
        return KernelTime((2 if call.direction == "backward" else 1) * 2.0 * pairs * call.qk / 50e12, 0.1, True)

    def time_moved(self, moved: Any) -> KernelTime:
        return KernelTime((moved.reads + moved.writes) / 1e12, 0.1, True)


def use_round_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "Machine", RoundMachine)
