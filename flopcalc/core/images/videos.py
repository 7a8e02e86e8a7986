"""What a video becomes: seconds and frames per second, or frames, to grids of patches as the processor cuts them."""

from __future__ import annotations

import math
import os
import re
from functools import cache
from typing import NamedTuple

from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.base.errors import ConfigError, WorkloadError, format_value
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_size, parse_exact, parse_size
from flopcalc.core.images.resizing import RULES, smart_resize
from flopcalc.core.images.vision import Vision
from flopcalc.core.spec.spec import find_key
from flopcalc.core.workload.workload import Grid

_FORM = "30s@2fps, 1280x720:30s@2fps or 1280x720x60 (width, height, frames)"
_SAMPLED = re.compile(r"(?:(\d+)x(\d+):)?([^@:]+)@([^@:]+?)(?:fps)?", re.IGNORECASE)
_COUNTED = re.compile(r"(\d+)x(\d+)x(\d+)", re.IGNORECASE)


class Video(NamedTuple):
    """A video as a processor is given it."""

    text: str  # as it was written
    frames: int
    width: int | None = None  # None: as large as the processor makes it
    height: int | None = None
    is_sampled: bool = False  # frames follow from a rate, so the processor's limits on sampling hold


def parse_video(text: str, field: str = "video") -> Video:
    """'1280x720:30s@2fps' or '1280x720x60' -> a Video; without a size '30s@2fps'."""
    text = text.strip()
    counted = _COUNTED.fullmatch(text)
    if counted is not None:
        width, height, frames = (parse_size(piece, field) for piece in counted.groups())
        return Video(text, frames, width, height)
    sampled = _SAMPLED.fullmatch(text)
    if sampled is None:
        raise WorkloadError(f"{spell(field)}: {format_value(text)} is no video; write {_FORM}")
    across, down, seconds, rate = sampled.groups()
    frames = int(parse_exact(seconds, field) * parse_exact(rate, "frames per second"))
    check_size(frames, f"{spell(field, text)}: frames")
    if across is None:
        return Video(text, frames, is_sampled=True)
    return Video(text, frames, parse_size(across, field), parse_size(down, field), is_sampled=True)


class Processor(NamedTuple):
    """A video processor class of transformers; model_specs/video_processors.toml says what the words mean."""

    rule: str
    limits: str
    sampling: str
    groups: str
    note: str
    defaults: dict[str, int]  # name, or several joined by " or " -> value

    def read_values(self, preprocessor: dict[str, object] | None) -> dict[str, int]:
        """The parameters: those of video_preprocessor_config.json, else the class's, by the last of their names."""
        values = {}
        for keys, default in self.defaults.items():
            names = keys.split(" or ")
            given = [value for _, value in (find_key(preprocessor or {}, name) for name in names) if value is not None]
            value = given[0] if given else default
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"video_preprocessor_config.json: {names[0]} must be a positive whole number, not "
                    f"{format_value(value)}"
                )
            values[_SHORT.get(names[-1], names[-1])] = value
        return values


_SHORT = {"num_frames": "max_frames", "size.shortest_edge": "min_pixels", "size.longest_edge": "max_pixels"}


@cache
def load_processors() -> dict[str, Processor]:
    """Model type -> its video processor."""
    found: dict[str, Processor] = {}
    for entry in load_toml(os.path.join(find_data_dir(), "video_processors.toml"))["processor"]:
        rule, limits, sampling, groups, note = (
            str(entry.get(key, "")) for key in ("rule", "limits", "sampling", "groups", "note")
        )
        found |= dict.fromkeys(entry["models"], Processor(rule, limits, sampling, groups, note, entry["defaults"]))
    return found


def cut_video(
    video: Video,
    vision: Vision,
    model_type: str,
    preprocessor: dict[str, object] | None = None,
    max_pixels: int | None = None,
) -> tuple[list[Grid], list[str]]:
    """The grids of a video, and notes on its frames, their size, and limits that were assumed."""
    if vision.frames:
        return [(vision.frames, vision.side, vision.side)], [
            f"video {video.text}: counted as one clip of the model's size"
        ]
    processor = load_processors().get(model_type)
    if processor is None:
        raise WorkloadError(
            f"{spell('video')}: how {model_type}'s processor cuts videos is not known here; give "
            f"{spell('video_grid', 'T,H,W')} instead"
        )
    values = processor.read_values(preprocessor)
    notes = [processor.note] if processor.note else []
    if not preprocessor and processor.rule != "square":
        notes.append("no video_preprocessor_config.json given: videos cut as the processor class's defaults say")
    if max_pixels is not None:
        if "max_pixels" not in values:
            raise WorkloadError(f"{spell('max_pixels')}: {model_type}'s video processor has no such limit")
        if max_pixels < values["min_pixels"]:
            raise WorkloadError(
                f"{spell('max_pixels', max_pixels)} is below the video processor's min_pixels, {values['min_pixels']}"
            )
        values["max_pixels"] = max_pixels
    frames = _sample(video, processor, values, notes)
    if processor.rule == "square":
        notes.append(f"video {video.text}: {frames} frames, each resized to one square")
        return [(frames, vision.side, vision.side)], notes
    width, height = video.width, video.height
    if width is None or height is None:
        width = height = _find_side(processor, values, frames, vision)
    high, wide = _resize(width, height, frames, processor, values, vision)
    size = "" if video.width is not None else "no size given, the largest that the processor keeps: "
    notes.append(f"video {video.text}: {size}{frames} frames of {wide}x{high} pixels")
    temporal, rows, columns = values["temporal_patch_size"], high // vision.patch, wide // vision.patch
    if processor.groups == "chunks":
        whole, rest = divmod(frames, temporal)
        return [(temporal, rows, columns)] * whole + ([(rest, rows, columns)] if rest else []), notes
    patches = -(-frames // temporal)
    return [(patches * temporal if processor.groups == "frames" else patches, rows, columns)], notes


def _sample(video: Video, processor: Processor, values: dict[str, int], notes: list[str]) -> int:
    """Frames that the processor keeps of a video that it samples by a rate; all of one that is given in frames."""
    if not video.is_sampled:
        return video.frames
    least, most = values.get("min_frames", 1), values.get("max_frames", video.frames)
    frames = min(max(video.frames, least), most)
    if frames != video.frames:
        limit = "least" if frames == least else "most"
        notes.append(f"video {video.text}: {video.frames} frames asked for, {frames} is the processor's {limit}")
    if processor.sampling == "down":
        temporal = values["temporal_patch_size"]
        frames = max(temporal, frames // temporal * temporal)
    return frames


def _find_side(processor: Processor, values: dict[str, int], frames: int, vision: Vision) -> int:
    """Pixels a side of the largest square frame that the processor keeps.

    If a video has only an image's limit, which is far above any video, the class's own limit counts.
    """
    if processor.rule == "navit":
        return math.isqrt(values["max_patches"]) * vision.patch
    if processor.rule == "nearest":
        return math.isqrt(values["max_video_frame_tokens"]) * vision.patch * vision.merge
    if processor.limits == "frame":
        return math.isqrt(min(values["max_pixels"], processor.read_values(None)["max_pixels"]))
    return max(1, math.isqrt(values["max_pixels"] // frames))


def _resize(
    width: int, height: int, frames: int, processor: Processor, values: dict[str, int], vision: Vision
) -> tuple[int, int]:
    """Height and width of a frame after the processor's resize."""
    merge = values.get("merge_size", vision.merge)
    if processor.rule != "smart":
        sizes: dict[str, object] = {"patch": vision.patch, "merge": merge, **values}
        if processor.rule == "nearest":
            sizes["max_image_tokens"] = values["max_video_frame_tokens"]
        made = RULES["nearest_aspect" if processor.rule == "nearest" else processor.rule](width, height, sizes)
        _, rows, columns = made[0] if isinstance(made, list) else made
        return rows * vision.patch, columns * vision.patch
    factor, temporal = vision.patch * merge, values["temporal_patch_size"]
    least, most = values["min_pixels"], values["max_pixels"]
    if processor.limits != "video":
        return smart_resize(height, width, factor, least, most // frames if processor.limits == "shared" else most)
    if frames < temporal:
        raise WorkloadError(f"a video needs at least {temporal} frames here, not {frames}")
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    return smart_resize(height, width, factor, least, most, frames, round(frames / temporal) * temporal)
