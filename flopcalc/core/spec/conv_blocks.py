"""Convolutional networks of transformers as lists of their blocks, which their specs read as keys of the config.

A block of an EfficientNet or MobileNetV2 is [channels in, widened, channels out, kernel, stride, offset, scale, offset
before, scale before]: a side of n pixels is (n + offset) // scale behind its depthwise convolution, and before it the
same with the other two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flopcalc.base.errors import ConfigError, format_value

Lookup = Callable[[str], Any]
MAX_BLOCKS = 1000


def _read_number(lookup: Lookup, key: str, most: float = 1e4) -> float:
    value = lookup(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        raise ConfigError(f"{key} must be a number above 0, not {format_value(value)}")
    return value


def _read_list(lookup: Lookup, key: str) -> list[int]:
    values = lookup(key)
    if not isinstance(values, (list, tuple)) or len(values) > MAX_BLOCKS:
        raise ConfigError(f"{key} must be a list of whole numbers, not {format_value(values)}")
    if not all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**6 for value in values):
        raise ConfigError(f"{key} must be a list of whole numbers, not {format_value(list(values))}")
    return list(values)


def _round_channels(channels: float, divisor: int, least: int) -> int:
    """The nearest multiple of the divisor, and not more than a tenth below."""
    rounded = max(least, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded


class _Sides:
    """How the sides of an image shrink from block to block."""

    def __init__(self, offset: int, scale: int) -> None:
        self.offset, self.scale = offset, scale

    def halve(self, added: int) -> None:
        """A side of n pixels becomes (n + added) // 2."""
        self.offset += self.scale * added
        self.scale *= 2


def list_efficientnet(lookup: Lookup) -> list[list[int]]:
    """Blocks of an EfficientNet; the last entry holds the channels of the stem, of the last layer and its sides."""
    wide, deep = _read_number(lookup, "width_coefficient"), _read_number(lookup, "depth_coefficient")
    divisor = int(_read_number(lookup, "depth_divisor"))

    def widen(channels: int) -> int:
        return _round_channels(channels * wide, divisor, divisor)

    keys = ("in_channels", "out_channels", "strides", "kernel_sizes", "expand_ratios", "num_block_repeats")
    lists = [_read_list(lookup, key) for key in keys]
    if len({len(each) for each in lists}) != 1 or not lists[0]:
        raise ConfigError(f"{', '.join(keys)} must have as many entries")
    padded = _read_list(lookup, "depthwise_padding")
    found: list[list[int]] = []
    sides = _Sides(0, 2)
    for before, after, stride, kernel, ratio, repeats in zip(*lists, strict=True):
        for number in range(math.ceil(deep * repeats)):
            if len(found) > MAX_BLOCKS:
                raise ConfigError(f"more than {MAX_BLOCKS} blocks is surely a mistake")
            taken = widen(after) if number else widen(before)
            if taken != (found[-1][2] if found else widen(32)):
                raise ConfigError("in_channels must be 32, then out_channels: a block reads what the last one gives")
            step = 1 if number else stride
            old = (sides.offset, sides.scale)
            if step == 2:
                # Padded by half a kernel on each side, or by one less on the first.
                sides.halve((2 if kernel % 2 == 0 else 1) - (len(found) not in padded))
            elif step != 1:
                raise ConfigError(f"strides must be 1 or 2, not {step}")
            found.append([taken, taken * ratio, widen(after), kernel, step, sides.offset, sides.scale, *old])
    if not found or found[-1][2] != widen(lists[1][-1]):
        raise ConfigError("num_block_repeats must leave the last stage a block: the last convolution reads its width")
    found.append([widen(32), widen(1280), found[-1][2], 1, 1, sides.offset, sides.scale, 0, 2])
    return found


_V2_CHANNELS = (16, 24, 24, 32, 32, 32, 64, 64, 64, 64, 96, 96, 96, 160, 160, 160, 320)
_V2_STRIDES = (2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1)


def list_mobilenet_v2(lookup: Lookup) -> list[list[int]]:
    """Blocks of a MobileNetV2; the last entry holds the channels of the stem, of the last layer and its sides."""
    wide, ratio = _read_number(lookup, "depth_multiplier"), _read_number(lookup, "expand_ratio")
    divisor, least = (int(_read_number(lookup, key)) for key in ("depth_divisible_by", "min_depth"))

    def widen(channels: int) -> int:
        return _round_channels(round(channels * wide), divisor, least)

    channels = [widen(each) for each in _V2_CHANNELS]
    limit = _read_number(lookup, "output_stride")
    sides = _Sides(1, 2)
    found: list[list[int]] = []
    for before, after, stride in zip(channels, channels[1:], _V2_STRIDES, strict=False):
        old = (sides.offset, sides.scale)
        step = 1 if sides.scale == limit else stride  # then a dilated convolution takes its place
        if step == 2:
            sides.halve(1)
        widened = _round_channels(round(before * ratio), divisor, least)
        found.append([before, widened, after, 3, step, sides.offset, sides.scale, *old])
    last = 1280 if lookup("finegrained_output") and wide < 1 else widen(1280)
    found.append([widen(32), last, channels[-1], 1, 1, sides.offset, sides.scale, 1, 2])
    return found


def _read_stages(lookup: Lookup, key: str) -> list[list[Any]]:
    """A list of a network's stages, each a list with an entry per layer."""
    stages = lookup(key)
    is_nested = isinstance(stages, (list, tuple)) and all(isinstance(stage, (list, tuple)) for stage in stages)
    if not is_nested or not 0 < sum(map(len, stages)) <= MAX_BLOCKS or not all(stages):
        raise ConfigError(f"{key} must be a list with a list for each stage, not {format_value(stages)}")
    return [list(stage) for stage in stages]


def _is_odd(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value % 2 == 1 and 0 < value < 1000


def list_textnet(lookup: Lookup) -> list[list[int]]:
    """Layers of a TextNet: [stage, number in it, channels in, out, kernel's height, width, stride, strides so far]."""
    kernels, strides = (_read_stages(lookup, key) for key in ("conv_layer_kernel_sizes", "conv_layer_strides"))
    channels = _read_list(lookup, "hidden_sizes")
    if list(map(len, kernels)) != list(map(len, strides)) or len(channels) != len(kernels) + 1:
        raise ConfigError(
            "conv_layer_strides must have as many entries as conv_layer_kernel_sizes, and hidden_sizes one more"
        )
    found: list[list[int]] = []
    scale = 1
    for stage, (sizes, steps) in enumerate(zip(kernels, strides, strict=True)):
        for number, (size, step) in enumerate(zip(sizes, steps, strict=True)):
            if not isinstance(size, (list, tuple)) or len(size) != 2 or not all(map(_is_odd, size)):
                raise ConfigError(f"conv_layer_kernel_sizes must hold pairs of odd numbers, not {format_value(size)}")
            if not isinstance(step, int) or isinstance(step, bool) or not 0 < step < 1000:
                raise ConfigError(f"conv_layer_strides must hold whole numbers above 0, not {format_value(step)}")
            scale *= step
            before = channels[stage + 1] if number else channels[stage]
            found.append([stage, number, before, channels[stage + 1], *size, step, scale])
    return found


def list_pp_lcnet(lookup: Lookup) -> list[list[int]]:
    """Layers of a PP-LCNet: [stage, number in it, channels in, out, kernel, strides so far, 1 if it is gated].

    The last entry holds the channels of the stem.
    """
    scale, divisor = _read_number(lookup, "scale"), int(_read_number(lookup, "divisor"))

    def widen(channels: int) -> int:
        return _round_channels(channels * scale, divisor, divisor)

    stem, total = int(_read_number(lookup, "stem_channels")), int(_read_number(lookup, "stem_stride"))
    found: list[list[int]] = []
    last = widen(stem)
    for stage, blocks in enumerate(_read_stages(lookup, "block_configs")):
        for number, block in enumerate(blocks):
            is_whole = isinstance(block, (list, tuple)) and len(block) == 5 and all(isinstance(x, int) for x in block)
            if not is_whole or min(block[:4]) < 1 or not _is_odd(block[0]):
                raise ConfigError(
                    "block_configs must hold lists of an odd kernel, channels in and out, stride and gate, not "
                    f"{format_value(block)}"
                )
            kernel, before, after, stride, is_gated = block
            if widen(before) != last:
                raise ConfigError(f"block_configs: a layer reads {widen(before)} channels, the one before has {last}")
            last, total = widen(after), total * stride
            found.append([stage, number, widen(before), last, kernel, total, int(bool(is_gated))])
    return [*found, [widen(stem)]]


CONVNETS: dict[str, Callable[[Lookup], Any]] = {
    "efficientnet_blocks": list_efficientnet,
    "mobilenet_v2_blocks": list_mobilenet_v2,
    "pp_lcnet_blocks": list_pp_lcnet,
    "textnet_blocks": list_textnet,
}
