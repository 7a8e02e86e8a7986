"""What the seconds of an attention call depend on."""

from __future__ import annotations

from flopcalc.base.vocabulary import CallMask, PassDirection

IN_WAVES = ("full", "window", "apart")  # masks under which all blocks of attention take equally long


def attention_features(
    units: int,
    direction: PassDirection,
    mask: CallMask,
    batch: int,
    heads: int,
    kv_heads: int,
    dim: float,
    length: int,
    keys: int,
) -> tuple[float, float, float, float]:
    """What the time of an attention call is made of: the call, its queries, its pairs in blocks, its longest row.

    Decoding reads all keys once and computes next to nothing. Without a causal mask all blocks take equally long, so
    that they come in waves over the processors; under one, short blocks fill the gaps that long ones leave. On the way
    back such a call has all queries as its last part, not its longest row: their gradients are added up in memory.
    """
    each = batch * heads
    if mask == "decode":
        return 1.0, 0.0, float(batch * kv_heads * keys), float(keys)
    if mask in ("causal", "dropout"):
        blocks = -(-length // 128)
        return 1.0, float(each * length), each * 128 * 128 * blocks * (blocks + 1) / 2, float(keys)
    # Forward a processor holds queries and goes over keys, on the way back the other way round.
    held, passed = (length, keys) if direction == "forward" else (keys, length)
    tile, step = (128, 128) if direction == "forward" else (128 if dim <= 128 else 64, 64)
    rows = -(-each * -(-held // tile) // units) * units * tile
    last = keys if direction == "forward" else each * length
    return 1.0, float(rows), float(rows * step * -(-passed // step)), float(last)


def name_mask(mask: CallMask, keys: int) -> str:
    """A mask that is handed over as a tensor has other kernels where its rows do not start on 16 bytes, or on 4."""
    if mask not in ("window", "apart") or not keys % 8:
        return mask
    return "window-odd" if keys % 2 else "window-even"
