"""Products as prediction has them, made by hand."""

from __future__ import annotations

from typing import Any

from flopcalc.core.model.ops import Conv, Linear
from flopcalc.core.workload.sums import Tokens
from flopcalc.hardware.tiles import ProductSize
from flopcalc.prediction.work import ProductCall, Side, TensorSplit


def make_product(
    direction: Any, m: int, n: int, k: int, *, module: str = "", group: str = "language", part: Any = "mlp",
    copies: int = 1, side: Side = "whole", calls: int = 1, format: str = "", is_patches: bool = False,
) -> ProductCall:  # fmt: skip
    """One direction of a linear layer with n outputs and k inputs, over m rows."""
    kind = Conv if is_patches else Linear
    op = kind(name=module, part=part, rows=Tokens(), n_in=k, n_out=n, copies=copies)
    size = ProductSize(direction, m, n, k, copies)
    return ProductCall(module, group, op, size, calls, split=TensorSplit(side), format=format)
