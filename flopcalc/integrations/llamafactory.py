"""LLaMA-Factory: its MFU script's `compute_model_flops` with exact counts, and `install()` for `total_flos`."""

from __future__ import annotations

from functools import lru_cache

from flopcalc.api import bind
from flopcalc.base.errors import ConfigError
from flopcalc.base.vocabulary import Phase
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.integrations.ms_swift import install  # its trainers are HF trainers

# LLaMA-Factory 0.9.5: scripts/stat_utils/cal_mfu.py
__all__ = ["compute_model_flops", "install"]


def compute_model_flops(
    model_name_or_path: str,
    total_batch_size: int,
    seq_length: int,
    include_backward: bool = True,
    include_recompute: bool = False,
    include_flashattn: bool = False,
) -> int:
    """FLOPs of a step of full fine-tuning; recomputation or a flash kernel's own work make it convention hardware.

    `include_recompute` counts checkpointed layers again, `include_flashattn` the scores that a flash kernel forms again
    in its backward pass, and its blocks.
    """
    estimator = _bind(str(model_name_or_path), bool(include_recompute), bool(include_flashattn))
    phase: Phase = "train" if include_backward else "forward"
    return estimator(total_batch_size, seq_length, phase=phase).total


@lru_cache(maxsize=16)
def _bind(model: str, is_recomputed: bool, is_flash: bool) -> Estimator:
    options = {
        "recompute": "full" if is_recomputed else "none",
        "convention": "hardware" if is_recomputed or is_flash else "model",
        "attention_kernel": "flash" if is_flash else "eager",
    }
    try:
        return bind(model, **options)  # type: ignore[arg-type]
    except ConfigError:
        if "/" not in model:
            raise
        return bind(model, download=True, **options)  # type: ignore[arg-type]  # as the script does
