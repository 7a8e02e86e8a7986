"""Convolutional networks of diffusers as lists of their blocks, which their specs read as keys of the config.

A block is an object: kind, path, channels `before` and `c`, kernel; half 0 encodes pixels, 1 decodes latents; up, down
and pace are the factors of size and of time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flopcalc.base.errors import ConfigError, format_value

Lookup = Callable[[str], Any]
Block = Any  # an object, as the text above says
MAX_BLOCKS = 16
MAX_LAYERS = 1000


def _read_whole(value: object, key: str, most: int = 10**6) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise ConfigError(f"{key} must be a whole number, not {format_value(value)}")
    return value


def _read_list(lookup: Lookup, key: str, most: int = 10**6) -> list[int]:
    """A key that holds a whole number for every block."""
    values = lookup(key)
    if not isinstance(values, (list, tuple)) or not 0 < len(values) <= MAX_BLOCKS:
        raise ConfigError(f"{key} must be a list of a number per block, not {format_value(values)}")
    return [_read_whole(value, key, most) for value in values]


def _spread(value: object, many: int, key: str, most: int = 10**6) -> list[int]:
    """One number for all blocks, or a list with one for each."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * many
    if len(values) != many:
        raise ConfigError(f"{key} has {len(values)} entries for {many} blocks")
    return [_read_whole(each, key, most) for each in values]


# --- Autoencoders -----------------------------------------------------------------------------------------------------
class _Network:
    """One side of an autoencoder while it is listed."""

    def __init__(self, found: list[Block], side: int, path: str) -> None:
        self.found, self.side, self.path = found, side, path
        self.up = self.down = self.pace = 1

    def add(self, kind: str, name: str, inputs: int, outputs: int, kernel: int = 1) -> None:
        path = f"{self.path}.{name}" if self.path else name
        sizes = {"half": self.side, "up": self.up, "down": self.down, "pace": self.pace}
        self.found.append({"kind": kind, "path": path, "before": inputs, "c": outputs, "kernel": kernel, **sizes})

    def sample(self, size: int, time: int) -> None:
        """What follows is smaller (encoding) or larger (decoding) by these factors."""
        if self.side:
            self.up *= size
        else:
            self.down *= size
        self.pace *= time


def list_wan_vae(lookup: Lookup) -> list[Block]:
    """Blocks of an AutoencoderKLWan; `time` are its convolutions over frames alone.

    The encoder of Wan 2.1 is one flat list. That of Wan 2.2 has blocks with shortcuts, and reads patches.
    """
    factors = _read_list(lookup, "dim_mult", 1000)
    base, latent, layers = (_read_whole(lookup(key), key) for key in ("base_dim", "z_dim", "num_res_blocks"))
    wide = _read_whole(lookup("decoder_base"), "decoder_base_dim")
    pixels, outputs = (_read_whole(lookup(key), key) for key in ("in_channels", "out_channels"))
    halves = lookup("temperal_downsample")
    if not isinstance(halves, (list, tuple)) or len(halves) != len(factors) - 1 or layers > MAX_LAYERS:
        raise ConfigError(f"temperal_downsample must say it of {len(factors) - 1} blocks, not {format_value(halves)}")
    is_residual = bool(lookup("is_residual"))
    found: list[Block] = []
    encoder = _Network(found, 0, "encoder")
    encoder.sample(_read_whole(lookup("patch"), "patch_size", 1000), 1)
    before = base
    encoder.add("conv", "conv_in", pixels, base, 27)
    number = 0
    for block, factor in enumerate(factors):
        width = base * factor
        for layer in range(layers):
            name = f"down_blocks.{block}.resnets.{layer}" if is_residual else f"down_blocks.{number}"
            encoder.add("resnet", name, before, width, 27)
            before, number = width, number + 1
        if block < len(halves):
            path = f"down_blocks.{block}.downsampler" if is_residual else f"down_blocks.{number}"
            encoder.sample(2, 1)
            encoder.add("conv", f"{path}.resample.1", width, width, 9)
            if halves[block]:
                encoder.sample(1, 2)
                encoder.add("time", f"{path}.time_conv", width, width, 3)
            number += 1
    _add_wan_middle(encoder, before)
    encoder.add("norm", "norm_out", before, before)
    encoder.add("conv", "conv_out", before, 2 * latent, 27)
    encoder.path = ""
    encoder.add("conv", "quant_conv", 2 * latent, 2 * latent)
    decoder = _Network(found, 1, "")
    decoder.add("conv", "post_quant_conv", latent, latent)
    decoder.path = "decoder"
    before = wide * factors[-1]
    decoder.add("conv", "conv_in", latent, before, 27)
    _add_wan_middle(decoder, before)
    for block, factor in enumerate(reversed(factors)):
        width = wide * factor
        for layer in range(layers + 1):
            decoder.add("resnet", f"up_blocks.{block}.resnets.{layer}", before, width, 27)
            before = width
        if block < len(halves):
            path = f"up_blocks.{block}.upsampler" + ("" if is_residual else "s.0")
            if halves[-1 - block]:
                decoder.add("time", f"{path}.time_conv", width, 2 * width, 3)
                decoder.sample(1, 2)
            decoder.sample(2, 1)
            before = width if is_residual else width // 2
            decoder.add("conv", f"{path}.resample.1", width, before, 9)
    decoder.add("norm", "norm_out", before, before)
    decoder.add("conv", "conv_out", before, outputs, 27)
    return found


def _add_wan_middle(network: _Network, width: int) -> None:
    network.add("resnet", "mid_block.resnets.0", width, width, 27)
    network.add("attention", "mid_block.attentions.0", width, width)
    network.add("resnet", "mid_block.resnets.1", width, width, 27)


_LTX_STEPS = {"conv": (2, 2), "spatial": (2, 1), "temporal": (1, 2), "spatiotemporal": (2, 2)}  # size, time
_LTX_LATE = "LTXVideo095DownBlock3D"


def list_ltx_vae(lookup: Lookup) -> list[Block]:
    """Blocks of an AutoencoderKLLTXVideo, which works on patches; `padded` are convolutions over one frame more."""
    found: list[Block] = []
    _list_ltx_encoder(lookup, _Network(found, 0, "encoder"))
    _list_ltx_decoder(lookup, _Network(found, 1, "decoder"))
    return found


def _list_ltx_encoder(lookup: Lookup, encoder: _Network) -> None:
    patch = _read_whole(lookup("patch_size"), "patch_size", 1000)
    latent, pixels = (_read_whole(lookup(key), key) for key in ("latent_channels", "in_channels"))
    kinds, steps = lookup("down_block_types"), lookup("downsample_type")
    is_late = isinstance(kinds, (list, tuple)) and _LTX_LATE in kinds
    channels, layers, scales = _read_ltx_side(lookup, "", is_late)
    if is_late and (not isinstance(steps, (list, tuple)) or len(steps) < len(scales) or {*steps} - {*_LTX_STEPS}):
        raise ConfigError(f"downsample_type must say it of {len(scales)} blocks, not {format_value(steps)}")
    encoder.sample(patch, 1)
    encoder.add("conv", "conv_in.conv", pixels * patch**2, channels[0], 27)
    before = channels[0]
    for block, scale in enumerate(scales):
        width = channels[min(block + 1, len(channels) - 1)]
        path = f"down_blocks.{block}"
        for layer in range(layers[block]):
            encoder.add("resnet", f"{path}.resnets.{layer}", before, before, 27)
        if scale and is_late and steps[block] != "conv":
            size, time = _LTX_STEPS[steps[block]]
            kind = "padded" if time > 1 else "conv"
            encoder.add(kind, f"{path}.downsamplers.0.conv.conv", before, width // (size**2 * time), 27)
            encoder.sample(size, time)
        elif scale:
            encoder.sample(2, 2)
            encoder.add("conv", f"{path}.downsamplers.0.conv", before, before, 27)
        if width != before and not is_late:
            encoder.add("resnet", f"{path}.conv_out", before, width, 27)
        before = width
    for layer in range(layers[-1]):
        encoder.add("resnet", f"mid_block.resnets.{layer}", before, before, 27)
    encoder.add("conv", "conv_out.conv", before, latent + 1, 27)


def _list_ltx_decoder(lookup: Lookup, decoder: _Network) -> None:
    patch = _read_whole(lookup("patch_size"), "patch_size", 1000)
    latent, outputs = (_read_whole(lookup(key), key) for key in ("latent_channels", "out_channels"))
    channels, layers, scales = _read_ltx_side(lookup, "decoder_")
    channels, layers, scales = channels[::-1], layers[::-1], scales[::-1]
    factors = _read_list(lookup, "upsample_factor", 1000)[::-1]
    noises, is_timed = lookup("decoder_inject_noise"), bool(lookup("timestep_conditioning"))
    if not isinstance(noises, (list, tuple)) or len(noises) < len(layers) or len(factors) < len(channels):
        raise ConfigError(f"decoder_inject_noise and upsample_factor must fit {len(channels)} blocks")
    noises = noises[::-1]

    def add_resnet(path: str, inputs: int, outputs: int, noise: bool) -> None:
        decoder.add("resnet", path, inputs, outputs, 27)
        for name in ("per_channel_scale1", "per_channel_scale2") if noise else ():
            decoder.add("param", f"{path}.{name}", inputs, inputs)
        if is_timed:
            decoder.add("param", f"{path}.scale_shift_table", inputs, 4 * inputs)

    def add_time(path: str, width: int) -> None:
        for name, inputs in (("linear_1", 256), ("linear_2", width)) if is_timed else ():
            decoder.add("timed", f"{path}time_embedder.timestep_embedder.{name}", inputs, width)

    before = channels[0]
    decoder.add("conv", "conv_in.conv", latent, before, 27)
    add_time("mid_block.", 4 * before)
    for layer in range(layers[0]):
        add_resnet(f"mid_block.resnets.{layer}", before, before, bool(noises[0]))
    for block, whole in enumerate(channels):
        path, factor, noise = f"up_blocks.{block}", factors[block], bool(noises[block + 1])
        before, width = before // factor, whole // factor
        if width != before:
            add_resnet(f"{path}.conv_in", before, width, noise)
        add_time(f"{path}.", 4 * before)
        if scales[block]:
            decoder.add("conv", f"{path}.upsamplers.0.conv.conv", width * factor, 8 * width, 27)
            decoder.sample(2, 2)
        for layer in range(layers[block + 1]):
            add_resnet(f"{path}.resnets.{layer}", width, width, noise)
        before = width
    if is_timed:
        decoder.add("param", "timestep_scale_multiplier", 1, 1)
        decoder.add("param", "scale_shift_table", before, 2 * before)
    add_time("", 2 * before)
    decoder.add("conv", "conv_out.conv", before, outputs * patch**2, 27)


def _read_ltx_side(lookup: Lookup, prefix: str, is_late: bool = False) -> tuple[list[int], list[int], list[bool]]:
    channels = _read_list(lookup, f"{prefix}block_out_channels")
    layers = _read_list(lookup, f"{prefix}layers_per_block", MAX_LAYERS)
    scales = lookup(f"{prefix}spatio_temporal_scaling")
    many = len(channels) - is_late
    if not isinstance(scales, (list, tuple)) or len(scales) != many or len(layers) != many + 1:
        raise ConfigError(f"{prefix}spatio_temporal_scaling and {prefix}layers_per_block must fit {many} blocks")
    return channels, layers, [bool(each) for each in scales]


def list_dc_vae(lookup: Lookup) -> list[Block]:
    """Blocks of an AutoencoderDC; `vit`, `scale` and `mix` are its linear attention, whose kernel counts the scales."""
    found: list[Block] = []
    pixels, latent = (_read_whole(lookup(key), key) for key in ("in_channels", "latent_channels"))
    head = _read_whole(lookup("attention_head_dim"), "attention_head_dim")

    def add_side(network: _Network, side: str) -> None:
        channels = _read_list(lookup, f"{side}_block_out_channels")
        layers, kinds, scales = (
            lookup(f"{side}_{key}") for key in ("layers_per_block", "block_types", "qkv_multiscales")
        )
        many = len(channels)
        kinds = [kinds] * many if isinstance(kinds, str) else kinds
        if any(not isinstance(each, (list, tuple)) or len(each) != many for each in (layers, kinds, scales)):
            raise ConfigError(f"{side}_layers_per_block, _block_types and _qkv_multiscales must fit {many} blocks")
        layers = [_read_whole(each + 1, f"{side}_layers_per_block", MAX_LAYERS) - 1 for each in layers]
        is_up, is_plain = side == "decoder", layers[0] > 0
        folded = lookup("upsample_block_type" if is_up else "downsample_block_type").startswith("pixel")
        edge = channels[0 if is_plain else 1]

        def resample(name: str, inputs: int, outputs: int) -> None:
            if not folded:
                network.sample(2, 1)
            network.add("conv", name, inputs, outputs if not folded else outputs * 4 if is_up else outputs // 4, 9)
            if folded:
                network.sample(2, 1)

        def add_edge(name: str, inputs: int, outputs: int) -> None:
            if is_plain:
                network.add("conv", name, inputs, outputs, 9)
            else:
                resample(f"{name}.conv", inputs, outputs)

        if is_up:
            network.add("conv", "conv_in", latent, channels[-1], 9)
        else:
            add_edge("conv_in", pixels, edge)
        for block in range(many)[::-1] if is_up else range(many):
            path, width = f"{'up' if is_up else 'down'}_blocks.{block}", channels[block]
            is_sampled = block < many - 1 and layers[block] > 0
            if is_up and is_sampled:
                resample(f"{path}.0.conv", channels[block + 1], width)
            for layer in range(layers[block]):
                name = f"{path}.{layer + (is_up and is_sampled)}"
                if kinds[block] == "ResBlock":
                    network.add("light", name, width, width, 9)
                    continue
                inner = width // head * head
                sides = _spread(scales[block], len(scales[block]), f"{side}_qkv_multiscales")
                network.add("vit", name, width, inner)
                for number, kernel in enumerate(sides):
                    network.add("scale", f"{name}.attn.to_qkv_multiscale.{number}", head, 3 * inner, kernel**2)
                network.add("mix", name, width, inner, 1 + len(sides))
            if not is_up and is_sampled:
                resample(f"{path}.{layers[block]}.conv", width, channels[block + 1])
        if is_up:
            network.add("norm", "norm_out", edge, edge)
            add_edge("conv_out", edge, pixels)
        else:
            network.add("conv", "conv_out", channels[-1], latent, 9)

    for side, name in enumerate(("encoder", "decoder")):
        add_side(_Network(found, side, name), name)
    return found


NETWORKS: dict[str, Callable[[Lookup], list[Block]]] = {
    "wan_vae_blocks": list_wan_vae,
    "ltx_vae_blocks": list_ltx_vae,
    "dc_vae_blocks": list_dc_vae,
}
