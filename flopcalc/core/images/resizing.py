"""Rules by which image processors resize a picture to a grid of patches; they join the tiling rules in RULES."""

from __future__ import annotations

import math
from itertools import product

from flopcalc.base.errors import ConfigError, WorkloadError, format_value
from flopcalc.core.images.tiling import RULES, Values
from flopcalc.core.workload.workload import Grid

__all__ = ["RULES"]

_MAX_ASPECT = 200
_MAX_SIDE = 512  # patches for which Kimi-VL has positions
_MERGES = {"1x": 1, "4x": 2, "16x": 4}  # MiniCPM-V: patches along a side that become one token


def smart_resize(
    height: int,
    width: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    frames: int = 1,
    counted: int | None = None,
    checks_aspect: bool = True,
) -> tuple[int, int]:
    """Qwen's rule: both sides a multiple of `factor`, the area within limits, the aspect kept as well as that allows.

    Some processors count an image as a video of `frames` frames against the limits; of a video's frames, `counted`
    are held against them, which may be one fewer or more.
    """
    counted = frames if counted is None else counted
    if checks_aspect and max(height, width) / min(height, width) > _MAX_ASPECT:
        raise WorkloadError(f"image {width}x{height}: the longer side is more than {_MAX_ASPECT} times the shorter")
    # Floats and Python's round-half-even on purpose: the processor computes it so, and ties differ otherwise.
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if counted * new_height * new_width > max_pixels:
        beta = math.sqrt(frames * height * width / max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif counted * new_height * new_width < min_pixels:
        beta = math.sqrt(min_pixels / (frames * height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def _whole(values: Values, key: str) -> int:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"preprocessor_config.json: {key} must be a positive whole number, not {format_value(value)}")
    return value


def _grid(height: int, width: int, values: Values) -> Grid:
    patch: int = values["patch"]
    return (1, height // patch, width // patch)


def _smart(width: int, height: int, values: Values) -> Grid:
    """Qwen's rule; an image counts as `frames` frames, `small` says how one smaller than a token grows first."""
    factor, small = values["patch"] * values["merge"], values.get("small", "no")
    least, most = _whole(values, "min_pixels"), _whole(values, "max_pixels")
    given = f"{width}x{height}"
    if small == "scale" and (height < factor or width < factor):
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    elif small == "stretch":
        if height < factor:
            width, height = round((width * factor) / height), factor
        if width < factor:
            height, width = round((height * factor) / width), factor
    elif small == "shorter":
        height, width = _grow_shorter(height, width, factor)
        least = min(least, most)
    is_shrunk = round(height / factor) * round(width / factor) * factor**2 > most
    if small in ("stretch", "shorter") and is_shrunk and min(height, width) / math.sqrt(height * width / most) < factor:
        # Such code lets a side shrink to nothing, and cannot resize to that.
        raise WorkloadError(f"image {given}: it is shrunk to less than one token of {factor} pixels a side")
    frames, limits = values.get("frames", 1), small != "shorter"
    return _grid(*smart_resize(height, width, factor, least, most, frames, checks_aspect=limits), values)


def _grow_shorter(height: int, width: int, factor: int) -> tuple[int, int]:
    """Ovis 2.5: the shorter side grows to a token; of a larger image, what is longer than 200 times that is cut off."""
    if height >= factor and width >= factor:
        return min(height, _MAX_ASPECT * width), min(width, _MAX_ASPECT * height)
    if height < width:
        return factor, round(factor / height * width)
    return round(factor / width * height), factor


def _longest_edge(width: int, height: int, values: Values) -> Grid:
    """Pixtral: shrunk until the longest side fits, then both sides up to whole tokens."""
    factor = values["patch"] * values["merge"]
    most = _whole(values, "size.longest_edge")
    ratio = max(height / most, width / most)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    high, wide = (((side - 1) // factor + 1) * factor for side in (height, width))
    return _grid(high, wide, values)


def _navit(width: int, height: int, values: Values) -> Grid:
    """Kimi: never enlarged; within a limit of patches in all and per side, then padded to whole tokens."""
    patch = values["patch"]
    most = _whole(values, "size.max_height") * patch
    count = max(1.0, height // patch) * max(1.0, width // patch)
    scale = min(1.0, math.sqrt(_whole(values, "max_patches") / count), most / height, most / width)
    factor = patch * values["merge"]
    sides = (min(max(1, int(side * scale)), most) for side in (height, width))
    high, wide = (math.ceil(side / factor) * factor for side in sides)
    return _grid(high, wide, values)


def _token_limit(width: int, height: int, values: Values) -> Grid:
    """Kimi-VL: shrunk to a patch limit, then both sides down to whole tokens, or padded up to them if it says so."""
    patch, merge, most = values["patch"], values["merge"], _whole(values, "in_token_limit")
    count = (width // patch) * (height // patch)
    if count > most:
        scale = math.sqrt(most / count)
        width, height = int(width * scale), int(height * scale)
    factor = patch * merge
    whole = math.ceil if values["pad_input"] else math.floor
    high, wide = (whole(side / factor) * factor for side in (height, width))
    if not high or not wide:
        raise WorkloadError(f"an image of {width}x{height} pixels is smaller than one token of {factor} a side")
    if max(high, wide) // patch >= _MAX_SIDE:
        raise WorkloadError(f"an image must have fewer than {_MAX_SIDE} patches a side, not {max(high, wide) // patch}")
    return _grid(high, wide, values)


def _nearest_aspect(width: int, height: int, values: Values) -> Grid:
    """Muse: of the grids next to the exact one, under a cap of tokens, that nearest in aspect."""
    factor, most = values["patch"] * values["merge"], _whole(values, "max_image_tokens")
    rows, columns = height / factor, width / factor
    ratio = columns / rows
    if rows * columns > most:
        rows = (most / ratio) ** 0.5
        columns = rows * ratio
    # A set as in the processor: where two are equally near, its order decides.
    around = set(product([math.floor(rows), math.ceil(rows)], [math.floor(columns), math.ceil(columns)]))
    fitting = [(a, b) for a, b in list(around) if a >= 1 and b >= 1 and a * b <= most]
    fitting = fitting or [(max(1, round(rows)), max(1, round(columns)))]
    high, wide = min(fitting, key=lambda grid: abs(grid[0] / grid[1] - height / width))
    return _grid(high * factor, wide * factor, values)


def _budget(width: int, height: int, values: Values) -> Grid:
    """GLM-5-Next: both sides up to whole tokens, within limits of tokens; too large an image shrinks till it fits."""
    factor = values["patch"] * values["merge"]
    least, most = _whole(values, "min_image_tokens"), _whole(values, "max_image_tokens")
    high, wide = math.ceil(height / factor), math.ceil(width / factor)
    if high * wide < least:
        frames = values["frames"]
        scale = math.sqrt(least * frames * factor**2 / (frames * height * width))
        high, wide = (math.ceil(max(1, math.ceil(side * scale)) / factor) for side in (height, width))
    if high * wide > most:
        low, top, (high, wide) = 1, height, (1, 1)
        while low <= top:
            middle = (low + top) // 2
            rows = math.ceil(middle / factor)
            columns = math.ceil(max(1, math.floor(width * middle / height)) / factor)
            if rows * columns <= most:
                (high, wide), low = (rows, columns), middle + 1
            else:
                top = middle - 1
    return _grid(high * factor, wide * factor, values)


def _slices(width: int, height: int, values: Values) -> list[Grid]:
    """MiniCPM-V: the whole image, and slices of about scale_resolution² if it is larger."""
    scale, most = _whole(values, "scale_resolution"), _whole(values, "max_slice_nums")
    factor = values["patch"] * _MERGES.get(values["downsample_mode"], 4)

    def fit(high: float, wide: float, enlarge: bool) -> tuple[int, int]:
        if high * wide > scale * scale or enlarge:
            aspect = wide / high
            high = int(scale / math.sqrt(aspect))
            wide = int(high * aspect)
        return _nearest(high, factor), _nearest(wide, factor)

    count = min(math.ceil(width * height / (scale * scale)), most) if values["slice_mode"] else 1
    if count <= 1:
        return [_grid(*fit(height, width, True), values)]
    best, closest = (1, 1), math.inf
    for slices in (count - 1, count, count + 1):
        for rows in range(1, slices + 1) if 1 < slices <= most else ():
            if slices % rows:
                continue
            error = abs(math.log(width / height) - math.log(slices // rows / rows))
            if error < closest or (error == closest and rows > best[0]):
                best, closest = (rows, slices // rows), error
    rows, columns = best
    high, wide = fit(_nearest(height, rows) / rows, _nearest(width, columns) / columns, True)
    return [_grid(*fit(height, width, False), values), *[_grid(high, wide, values)] * (rows * columns)]


def _nearest(length: float, step: int) -> int:
    return max(round(length / step) * step, step)


def _whole_and_crops(width: int, height: int, values: Values) -> Grid:
    """Step-3.7: one view of the whole, and square crops of larger or longer images: t is 1 and the crops.

    The published code of Step3-VL crops at `size.height` too, and computes shares of a window in floats (`in_floats`).
    """
    in_floats = values.get("in_floats", False)
    side, crop, most = values["size.height"], values["patch_size"], values["max_image_size"]
    if min(width, height) < 32 and max(width / height, height / width) > 4:
        width = height = max(width, height)
    if max(height, width) > most:
        scale = most / max(height, width)
        width, height = int(width * scale), int(height * scale)
    short, long = min(height, width), max(height, width)
    if long <= side - in_floats:
        window = short if long / short > 1.5 else 0
    else:
        window = min(short, crop) if long / short > 4 else crop
    if not window:
        return (1, 1, 1)

    def count(length: int) -> int:
        whole = length // window
        rest = length / window - whole > 0.2 if in_floats else length % window > 0.2 * window
        return whole + rest if length >= window else 1

    return (1 + count(height) * count(width), count(height), count(width))


def _cut(width: int, height: int, values: Values) -> Grid:
    """Inkling: cut into patches as it is, the last ones padded; enlarged first if the processor says so."""
    fraction = values["rescale_image_frac"]
    if fraction is not None:
        long = max(height, width)
        target = long * fraction
        if values["rescale_image_max_upscaled_long_edge"] is not None:
            target = min(target, max(values["rescale_image_max_upscaled_long_edge"], long))
        height, width = (math.floor(side * (target / long) + 0.5) for side in (height, width))
    return (1, math.ceil(height / values["patch"]), math.ceil(width / values["patch"]))


def _within(width: int, height: int, values: Values) -> Grid:
    """Fuyu: shrunk until it fits, the last patches padded."""
    most_high, most_wide = _whole(values, "size.height"), _whole(values, "size.width")
    if width > most_wide or height > most_high:
        scale = min(most_high / height, most_wide / width)
        height, width = int(height * scale), int(width * scale)
    return (1, math.ceil(height / values["patch"]), math.ceil(width / values["patch"]))


def _most_patches(width: int, height: int, values: Values) -> Grid:
    """Pix2Struct, Kosmos-2.5: scaled up or down to as many patches as are allowed, the aspect kept."""
    most, patch = _whole(values, "max_patches"), values["patch"]
    scale = math.sqrt(most * (patch / height) * (patch / width))
    rows, columns = (max(min(math.floor(scale * side / patch), most), 1) for side in (height, width))
    return (1, rows, columns)


def _resize_and_crop(width: int, height: int, values: Values) -> tuple[int, int]:
    """Classifiers and CLIP: height and width, resized to one size, or to a shortest side, then the middle cut out."""
    edge = values.get("size.shortest_edge", 0)  # without it, a shortest side means a square
    if values["do_resize"] and edge:
        short, long = min(height, width), max(height, width)
        long = int(edge * long / short)
        height, width = (edge, long) if height <= width else (long, edge)
        step = values.get("size_divisor", 1)
        height, width = (math.ceil(side / step) * step for side in (height, width))
    elif values["do_resize"]:
        height, width = values["size.height"], values["size.width"]
    if values["do_center_crop"]:
        height, width = values["crop_size.height"], values["crop_size.width"]
    return height, width


def patch_sides(values: Values) -> tuple[int, int]:
    high, wide = (values["patch"],) * 2 if isinstance(values["patch"], int) else values["patch"]
    return high, wide


def _crop(width: int, height: int, values: Values) -> Grid:
    """Patches that fit into the resized image."""
    (height, width), (high, wide) = _resize_and_crop(width, height, values), patch_sides(values)
    return (1, height // high, width // wide)


def _edges(width: int, height: int, values: Values) -> Grid:
    """Detectors: the shorter side as given, the longer one within a limit, both down to a multiple; or one size.

    Mask2Former: both sides up to a multiple of `size_divisor`.
    """
    if values["do_resize"] and values["size.height"] and values["size.width"]:
        height, width = values["size.height"], values["size.width"]
    elif values["do_resize"]:
        edge, most = _whole(values, "size.shortest_edge"), _whole(values, "size.longest_edge")
        short, long = min(height, width), max(height, width)
        exact: float = edge
        if long / short * edge > most:
            exact = most * short / long
            edge = round(exact)
        multiple = values["multiple"]
        if width < height and (
            short != edge or multiple > 1
        ):  # YOLOS rounds to one, and computes an upright image anew
            height, width = int(exact * height / width), edge
        elif short != edge:
            height, width = edge, int(exact * width / height)
        height, width = height - height % multiple, width - width % multiple
    step = values.get("size_divisor", 1)
    return _grid(math.ceil(height / step) * step, math.ceil(width / step) * step, values)


def _multiples(width: int, height: int, values: Values) -> Grid:
    """DPT: one size, or the aspect kept by the side that changes less; both sides to the nearest multiple.

    ZoeDepth pads the image first, and its multiple may be a fraction of a pixel. DPT pads last, to a `size_divisor`.
    """
    pads = "do_pad" in values and "size_divisor" not in values
    if pads and values["do_pad"]:
        height, width = (side + 2 * int(math.sqrt(side / 2) * 3) for side in (height, width))
    if values["do_resize"]:
        high, wide = values["size.height"] / height, values["size.width"] / width
        if values["keep_aspect_ratio"]:
            high = wide = wide if abs(1 - wide) < abs(1 - high) else high
        multiple = values["ensure_multiple_of"] if pads else _whole(values, "ensure_multiple_of")
        height, width = (int(round(side / multiple) * multiple) for side in (high * height, wide * width))
    if not pads and values["do_pad"]:
        divisor = _whole(values, "size_divisor")
        height, width = (math.ceil(side / divisor) * divisor for side in (height, width))
    return _grid(height, width, values)


def _limited(width: int, height: int, values: Values) -> Grid:
    """PP-OCR: limits the longer side from above, or the shorter from below; both to the nearest multiple of 32."""
    if values["do_resize"]:
        limit, kind, most = _whole(values, "limit_side_len"), values["limit_type"], values["max_side_limit"]
        if kind not in ("max", "min", "resize_long"):
            given = format_value(kind)
            raise ConfigError(f"preprocessor_config.json: limit_type must be max, min or resize_long, not {given}")
        side = min(height, width) if kind == "min" else max(height, width)
        fits = (kind == "max" and side <= limit) or (kind == "min" and side >= limit)
        ratio = 1.0 if fits else limit / side
        height, width = int(height * ratio), int(width * ratio)
        if most is not None and max(height, width) > most:
            ratio = most / max(height, width)
            height, width = int(height * ratio), int(width * ratio)
        height, width = (max(round(each / 32) * 32, 32) for each in (height, width))
    return _grid(height, width, values)


def _divisible(width: int, height: int, values: Values) -> Grid:
    """GLPN: both sides down to a multiple."""
    if values["do_resize"]:
        divisor = _whole(values, "size_divisor")
        height, width = (side // divisor * divisor for side in (height, width))
        if not height or not width:
            raise WorkloadError(f"an image must have at least {divisor} pixels a side here")
    return _grid(height, width, values)


def _cover(width: int, height: int, values: Values) -> Grid:
    """Swin: patches that cover the resized image, the last ones padded."""
    (height, width), (high, wide) = _resize_and_crop(width, height, values), patch_sides(values)
    return (1, math.ceil(height / high), math.ceil(width / wide))


def _naflex(width: int, height: int, values: Values) -> Grid:
    """SigLIP 2: scaled up or down to as many whole patches as are allowed; the scale is found as its processor does."""
    patch, most = values["patch"], _whole(values, "max_num_patches")

    def fit(scale: float) -> tuple[int, int]:
        high, wide = (max(1, math.ceil(side * scale / patch)) for side in (height, width))
        return high, wide

    low, high = 1e-5 / 10, 100.0
    while high - low >= 1e-5:
        middle = (low + high) / 2
        if math.prod(fit(middle)) <= most:
            low = middle
        else:
            high = middle
    rows, columns = fit(low)
    return (1, rows, columns)


def _naflex_within(width: int, height: int, values: Values) -> Grid:
    """Phi-4-reasoning-vision: as many patches as the image holds, within limits, by SigLIP 2's rule."""
    side = values["patch"]
    own = max((width // side) * (height // side), 1)
    most = min(max(own, values["min_num_patches"]), values["max_num_patches"])
    return _naflex(width, height, {**values, "max_num_patches": most})


RULES |= {
    "crop": _crop,
    "edges": _edges,
    "multiples": _multiples,
    "limited": _limited,
    "divisible": _divisible,
    "covered": _cover,
    "naflex": _naflex,
    "naflex_within": _naflex_within,
    "most_patches": _most_patches,
    "within": _within,
    "smart": _smart,
    "longest_edge": _longest_edge,
    "navit": _navit,
    "token_limit": _token_limit,
    "nearest_aspect": _nearest_aspect,
    "budget": _budget,
    "slices": _slices,
    "whole_and_crops": _whole_and_crops,
    "cut": _cut,
}
