"""Number formats on this machine's CPU."""

from __future__ import annotations

import warnings
from functools import cache


@cache
def settle_bf16() -> None:
    """Lets torch choose its kernels of bf16 products now, so that none of them warns later.

    On an Arm CPU without bf16 the first product of some size fails in oneDNN: torch warns and turns oneDNN off for the
    rest of the process. A test would end with that warning, or run its two halves on two kernels.
    """
    import torch

    rows, weight = (torch.ones(64, 64, dtype=torch.bfloat16) for _ in range(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.nn.functional.linear(rows, weight)
        torch.nn.functional.linear(rows, weight, weight[0])
        torch.baddbmm(rows[None], rows[None], weight[None])
    if any("mkldnn" in str(warning.message) for warning in caught):
        torch.backends.mkldnn.set_flags(False)
