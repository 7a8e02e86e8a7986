"""Closed vocabularies, each spelled once."""

from __future__ import annotations

from typing import Literal, get_args

# How a step runs: eager as Hugging Face's code; compiled by torch.compile; graphs: the compiled kernels replayed as a
# CUDA graph; fused: kernels of a training framework, which does not wait for the host.
Execution = Literal["eager", "compiled", "graphs", "fused"]
EXECUTIONS: tuple[Execution, ...] = get_args(Execution)
