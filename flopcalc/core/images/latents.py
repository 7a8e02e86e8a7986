"""What a denoiser is given: latents of images or videos, as the pipeline's VAE makes them of pixels, and text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flopcalc.base.errors import ConfigError, WorkloadError, format_value
from flopcalc.base.vocabulary import PHASES, Phase, check_word
from flopcalc.core.spec.spec import BoundDims
from flopcalc.core.workload.workload import Grid, Workload


class Latents(NamedTuple):
    """A denoiser's input under one config; for a VAE, only how many pixels one latent covers."""

    key: str  # the argument of its forward that holds the latents
    axes: str  # of that tensor: b batch, c channels, t frames, h, w; n: all places in one row
    text_key: str  # the argument that holds the text's embeddings; empty: it reads none
    pixels: int  # along one side of a latent, where no VAE says it
    frames: int  # in one latent, likewise; 1: images
    pack: int  # latents along one side that become one place of the input
    length: int  # of the text, where nothing else says it
    side: int  # places along one side of what becomes one token
    deep: int  # and along its time
    expanded: int  # 1: every place has a time of its own
    square: int = 0  # 1: width and height are the same
    most: int = 0  # tokens along a side for which it has positions; 0: any number
    videos: int = 0  # 1: it takes videos though a latent holds one frame
    unread: tuple[str, ...] = ()  # arguments whose sizes count, but are not read from a batch

    @property
    def patch(self) -> int:
        """Places of the input that become one token."""
        return self.side**2 * self.deep

    @property
    def takes_videos(self) -> bool:
        return self.frames > 1 or self.videos > 0

    def make_grid(self, width: int, height: int, frames: int = 1, pixels: int = 0, per_frame: int = 0) -> Grid:
        """Places of the input (t, h, w) of an image or a video in pixels; what the VAE says wins.

        Where several frames become one token, pipelines repeat a latent until they divide.
        """
        place = (pixels or self.pixels) * self.pack
        side = place * self.side
        if width % side or height % side:
            raise WorkloadError(f"{width}x{height}: width and height must be multiples of {side}")
        if self.square and width != height:
            raise WorkloadError(f"{width}x{height}: this model takes square images alone")
        if self.most and max(width, height) > self.most * side:
            raise WorkloadError(
                f"{width}x{height}: this model has positions for at most {self.most * side} pixels a side"
            )
        times = self.count_times(frames, per_frame)
        return -(-times // self.deep) * self.deep, height // place, width // place

    def count_times(self, frames: int, per_frame: int = 0) -> int:
        """Latents along the time of a video."""
        step = per_frame or self.frames
        if (frames - 1) % step:
            raise WorkloadError(f"{frames} frames: one frame, and then a multiple of {step}")
        return (frames - 1) // step + 1

    def read_batch(self, batch: Mapping[str, object], phase: Phase) -> Workload:
        """The workload of what the denoiser's forward is given."""
        if not isinstance(batch, Mapping):
            raise WorkloadError(f"batch must be a mapping as given to the model, not {format_value(batch)}")
        check_word(phase, PHASES, "phase", WorkloadError)
        for key in self.unread:
            if batch.get(key) is not None:
                raise WorkloadError(f"the size of {key} is not read from a batch: give the sizes of images or videos")
        shape = _read_shape(batch, self.key)
        names = self.axes.split()
        if len(shape) != len(names):
            raise WorkloadError(f"{self.key} must be ({', '.join(names)}), not of shape {shape}")
        sizes = dict(zip(names, shape, strict=True))
        times = getattr(batch.get("timestep"), "shape", None)
        if times is not None and (len(times) > 1) != bool(self.expanded):
            said = "true" if len(times) > 1 else "false"
            raise WorkloadError(f"timestep has shape {tuple(times)}: the config needs expand_timesteps = {said}")
        grid = (sizes.get("t", 1), sizes.get("h", 1), sizes.get("w", sizes.get("n", 1)))
        seq = 0
        if self.text_key:
            text = _read_shape(batch, self.text_key)
            if len(text) != 3 or text[0] != sizes["b"]:
                raise WorkloadError(f"{self.text_key} must be (batch, length, width), not of shape {text}")
            seq = text[1]
        return Workload(sizes["b"], seq, phase=phase, grids=(grid,) * sizes["b"])


def _read_shape(batch: Mapping[str, object], key: str) -> tuple[int, ...]:
    shape = getattr(batch.get(key), "shape", None)
    if shape is None:
        raise WorkloadError(f"batch needs {key}, a tensor")
    return tuple(int(size) for size in shape)


def bind_latents(dims: BoundDims) -> Latents:
    """The [latents] of a spec under one config."""
    table = dims.spec.latents

    def size(key: str, default: str) -> int:
        value = dims.evaluate(table.get(key, default))
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{dims.where}: {key} of its latents must be a whole number, not {format_value(value)}")
        return value

    return Latents(
        table.get("input", ""),
        table.get("axes", ""),
        table.get("text", ""),
        size("pixels", "8"),
        size("frames", "1"),
        size("pack", "1"),
        size("length", "0"),
        size("side", "1"),
        size("deep", "1"),
        size("expanded", "0"),
        size("square", "0"),
        size("most", "0"),
        size("videos", "0"),
        tuple(table.get("unread", "").split()),
    )
