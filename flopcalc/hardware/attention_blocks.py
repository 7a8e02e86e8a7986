"""Which blocks of queries and keys an attention kernel goes through: its executed FLOPs and its seconds follow.

`find_blocks` has the rule, exact for every call of cuDNN and flash that a GPU counted. Three things use it: executed
FLOPs of lengths that fill no whole block (hardware/kernels.py), the pairs that seconds are fitted to
(prediction/kernels/attention.py), and a call's FLOPs (prediction/work.py). Of whole blocks it gives what `block_pairs`
gives for the block that a calibration table has. `block_pairs` stays for kernels and devices without a rule: one
block, whatever a table says, and no whole blocks at a ragged length.
"""

from __future__ import annotations

from typing import NamedTuple

from flopcalc.base.frozen import Value, frozen
from flopcalc.base.vocabulary import FusedKernel, PassDirection

# A fused causal kernel works in blocks of this many positions, until a calibration table says better.
BLOCK = 128
_HALF = 64
# Head dims between 64 and 128 that no table has are padded as the measured one there is.
UNMEASURED_DIMS, NEAR_DIM = (72, 88, 104, 112, 120), 80
_FLASH_DIMS = 32  # flash computes with multiples of this


@frozen()
class KernelShape(Value):
    """How a fused attention kernel executes one head dim: measured, else blocks of 128 and no padding."""

    block_forward: int = BLOCK
    block_backward: int = BLOCK
    # Executed over needed where every pair is wanted: a head dim padded to the kernel's own width.
    pad_forward: tuple[int, int] = (1, 1)
    pad_backward: tuple[int, int] = (1, 1)


def block_pairs(length: int, window: int = 0, block: int = BLOCK) -> int:
    """Pairs that a fused causal kernel executes in blocks: those needed times (S + block) / (S + 1), rounded down."""
    executed = length * (length + block)
    skipped = (length - window) * (length - window - block) if window and length - window > block else 0
    return (executed - skipped) // 2


class Blocks(NamedTuple):
    """How a kernel goes through the pairs of one head of one sequence.

    Forward a processor holds a block of queries and goes over keys; backward it holds keys and goes over queries.
    """

    held: int  # positions that a processor holds
    step: int  # positions that it goes over at once
    is_backward: bool = False

    def count_held(self, queries: int, keys: int) -> int:
        """Blocks that processors hold."""
        return -(-(keys if self.is_backward else queries) // self.held)

    def count_passed(self, queries: int, keys: int) -> int:
        """Positions that each of them goes over where nothing is masked."""
        return -(-(queries if self.is_backward else keys) // self.step) * self.step

    def count_pairs(self, queries: int, keys: int, *, is_causal: bool = False) -> int:
        """Pairs that are executed; under a causal mask, blocks that see nothing are left out."""
        blocks, passed = self.count_held(queries, keys), self.count_passed(queries, keys)
        if not is_causal:
            return blocks * self.held * passed
        triangle = self.held * blocks * (blocks - 1) // 2
        return self.held * (passed * blocks - triangle if self.is_backward else triangle + passed)


def find_blocks(kernel: FusedKernel, direction: PassDirection, dim: int) -> Blocks:
    """The blocks of a kernel at a head dim: exact for every counted call of cuDNN and flash, assumed for others."""
    is_backward = direction == "backward"
    if kernel == "flash":
        wide = dim <= _HALF  # square blocks at head dim 64; smaller ones beyond 128
        return Blocks(BLOCK if dim <= BLOCK else _HALF, BLOCK if wide else _HALF, is_backward)
    return Blocks(BLOCK, _HALF if is_backward else BLOCK, is_backward)


def count_pair_flops(direction: PassDirection, qk: int, v: int) -> int:
    """FLOPs of one head for one pair: scores and values; backward the scores again, then dV, dP, dQ and dK."""
    return 2 * (qk + v) if direction == "forward" else 2 * (3 * qk + 2 * v)


def count_call_flops(
    kernel: FusedKernel, direction: PassDirection, qk: int, v: int, queries: int, keys: int, is_causal: bool
) -> int:
    """FLOPs of one head of one sequence in the kernel's blocks; what pads its head dim comes on top."""
    pairs = find_blocks(kernel, direction, (qk + v) // 2).count_pairs(queries, keys, is_causal=is_causal)
    return pairs * count_pair_flops(direction, qk, v)


def pad_head(kernel: FusedKernel, dim: int) -> int:
    """The head dim that a kernel computes with, between 64 and 128."""
    return BLOCK if kernel == "cudnn" else -(-dim // _FLASH_DIMS) * _FLASH_DIMS
