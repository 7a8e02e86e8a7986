"""How a fused attention kernel executes one head dim: the sizes of its blocks, and what it pads."""

from __future__ import annotations

from flopcalc.base.frozen import Value, frozen

# A fused causal kernel works in blocks of this many positions, until a calibration table says better.
BLOCK = 128


@frozen()
class KernelShape(Value):
    """How a fused attention kernel executes one head dim: measured, else blocks of 128 and no padding."""

    block_forward: int = BLOCK
    block_backward: int = BLOCK
    # Executed over needed where every pair is wanted: a head dim padded to the kernel's own width.
    pad_forward: tuple[int, int] = (1, 1)
    pad_backward: tuple[int, int] = (1, 1)
