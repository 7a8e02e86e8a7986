"""What an image becomes: pixels to a grid of patches as the model's processor would, a grid to visual tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flopcalc.base.errors import ConfigError, FlopcalcError, SpecError, WorkloadError, format_nearest, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_size
from flopcalc.core.spec.expressions import MissingNameError, evaluate, find_names
from flopcalc.core.spec.spec import BoundDims, find_key
from flopcalc.core.workload.workload import Grid, read_grids

# Limits of the image processor classes, used with a note where no preprocessor_config.json is given.
# transformers 5.22: models/qwen2_vl/image_processing_qwen2_vl.py
_SMART_DEFAULTS = (56 * 56, 28 * 28 * 1280)
_UNCUT = {"do_resize": False, "do_center_crop": False}


@frozen()
class Vision(Value):
    """A model's image input under one config."""

    kind: str  # 'grid': any grid of patches; 'fixed': one square per image; 'tiles': t squares per image
    merge: int  # patches per side that become one token
    patch: int
    side: int  # fixed: patches per side
    tokens: int  # fixed: tokens per image
    takes_videos: bool
    dims: BoundDims | None = None  # where `tokens` and the parameters of the pixel rule have values
    most: int = 0  # tiles: that one image may have; 0: any number
    least: int = 1  # grid: patches that a side must have
    frames: int = 0  # fixed: temporal patches of the one clip that a model of videos takes; 0: it takes images
    images: int = 0  # that one sample may have; 0: any number
    outer: BoundDims | None = None  # where `tokens` has values instead, if a tower's own spec says how images are cut

    @property
    def has_pixel_limit(self) -> bool:
        """Whether the processor has a limit of pixels."""
        table = self.dims.spec.vision if self.dims is not None else {}
        if "pixels" in table:
            return any("max_pixels" in keys.split(" or ") for keys in table["pixels"])
        return self.kind == "grid"

    def check_grid(self, grid: Grid, what: str) -> Grid:
        t, h, w = grid
        if self.kind == "fixed":
            one = (self.frames or 1, self.side, self.side)
            if grid == (0, 0, 0):
                return one
            if grid != one:
                kind = "videos" if self.frames else "images"
                raise WorkloadError(
                    f"{what} {t},{h},{w}: this model takes {kind} of one size, {one[0]},{one[1]},{one[2]}"
                )
            return grid
        if self.kind == "tiles":
            return grid if t else (1, 0, 0)  # pixel_values alone say how many tiles, not in which grid
        if t < 1 or h < 1 or w < 1:
            raise WorkloadError("pixel_values without image_grid_thw: this model needs the grid of each image")
        if min(h, w) < self.least:
            raise WorkloadError(f"{what} {t},{h},{w}: height and width must be at least {self.least} patches")
        if h % self.merge or w % self.merge:
            raise WorkloadError(f"{what} {t},{h},{w}: height and width must be multiples of {self.merge} (merge size)")
        return grid

    def check_tiles(self, grid: Grid, what: str) -> None:
        """A grid given by hand for a model that cuts images into tiles must be one that its processor can make."""
        t, h, w = grid
        table = self.dims.spec.vision if self.dims is not None else {}
        if self.kind != "tiles" or self.dims is None or "pixels" not in table:
            return
        given = f"{what} {t},{h},{w}"
        if self.most and t > self.most:
            raise WorkloadError(f"{given}: T counts an image's tiles, and this model takes at most {self.most}")
        if find_names(table.get("tokens", "0")).isdisjoint("hw"):
            if "side" in table["pixels"] and (h, w) != (self.side, self.side):
                raise WorkloadError(
                    f"{given}: T counts an image's tiles, H and W the patches of one: give {t},{self.side},{self.side}"
                )
            return
        side = int(self.dims.evaluate(str(table["pixels"].get("side", self.side))))
        if t == 1 and "only_single" in table["pixels"]:
            fits = (h, w) == (side, side)  # one of several images of a sample is not cut
        else:
            sides = [n for n in range(1, math.isqrt(t - 1) + 1) if (t - 1) % n == 0]
            shapes = [shape for n in sides for shape in ((n, (t - 1) // n), ((t - 1) // n, n))]
            fits = any(h <= rows * side and w <= columns * side for rows, columns in shapes)
        if not fits:
            raise WorkloadError(
                f"{given}: T counts the whole image and its tiles, H and W the features that the image fills on the "
                f"rectangle of tiles, {side} a side: {t - 1} tiles cannot hold {h} by {w}; "
                f"{spell('image', 'WxH')} works it out"
            )

    def count_tokens(self, grid: Grid, video: bool = False) -> int:
        """Positions of the language model that one image or video fills."""
        if self.kind == "fixed":
            return self.tokens
        dims = self.outer or self.dims
        if dims is not None and "tokens" in dims.spec.vision:
            return _count_tokens(dims, grid, video)
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def read_sizes(self, batch: Mapping[str, Any], read_device: bool) -> tuple[Grid, ...] | None:
        """Grids of a batch that says them otherwise than as image_grid_thw: [vision] sizes and grid."""
        pixels: Sequence[Any] = getattr(batch.get("pixel_values"), "shape", ())
        if self.frames and len(pixels) == 5:  # clips of one size
            return ((self.frames, self.side, self.side),) * int(pixels[0])
        places = self.dims.spec.vision.get("flattened", "") if self.dims is not None else ""
        if batch.get(places) is not None and batch.get("image_grid_thw") is None:
            _check_readable(places, batch[places], read_device)
            return tuple((1, int(image[:, 0].max()), int(image[:, 1].max())) for image in batch[places])
        key = self.dims.spec.vision.get("sizes", "") if self.dims is not None else ""
        value = batch.get(key)
        shape = getattr(batch.get("pixel_values"), "shape", ())
        if self.dims is not None and not key and "grid" in self.dims.spec.vision and len(shape) > 3:
            # Images of one size: their pixels say it.
            text = self.dims.spec.vision["grid"]
            row = [int(side) for side in shape[-2:]]
            grids = read_grids([evaluate(text, _RowNames(self.dims, row, batch))], "pixel_values")
            return grids * int(math.prod(shape[:-3]))
        if self.dims is None or value is None:
            return None
        _check_readable(key, value, read_device)
        rows = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(rows, Sequence) or isinstance(rows, str):
            raise WorkloadError(f"{key} must be a row per image, not {format_value(rows)}")
        while rows and isinstance(rows[0], list) and rows[0] and isinstance(rows[0][0], list):
            rows = [row for inner in rows for row in inner]  # per sample and image
        if "grid" not in self.dims.spec.vision:  # heights and widths in pixels, before the processor's resize
            each = -(-len(rows) // max(1, len(batch["input_ids"]))) if "input_ids" in batch else 1
            return tuple(g for h, w in rows for g in _apply_rule(self.dims, int(w), int(h), None, each)[0])
        text = self.dims.spec.vision["grid"]
        grids = read_grids([evaluate(text, _RowNames(self.dims, row, batch)) for row in rows], key) if rows else ()
        mask = batch.get(self.dims.spec.vision.get("canvas", ""))
        if mask is None:
            return grids
        _check_readable(self.dims.spec.vision["canvas"], mask, read_device)
        return tuple(self._trim(grid, tiles) for grid, tiles in zip(grids, mask, strict=True))

    def _trim(self, grid: Grid, mask: Any) -> Grid:
        """The patches of a canvas that an image fills, from a mask (tile, side, side) whose first tile is the whole."""
        t, h, w = grid
        across = w // self.side
        left, top = mask[1:t:across, :, 0], mask[1 : 1 + across, 0, :]  # its first column and first row
        return (t, int(left.sum()), int(top.sum())) if h else grid

    def count_patches(self, grid: Grid) -> int:
        return grid[0] * (self.side**2 if self.kind == "tiles" else grid[1] * grid[2])

    def grid_of_pixels(
        self, width: int, height: int, preprocessor: dict[str, object] | None, images: int = 1
    ) -> tuple[Grid, list[str]]:
        """The grid of an image of this size after the processor's resize, and notes on assumed limits.

        `images`: how many there are in its sample; some processors cut only an image that is alone.
        """
        check_size(width, "image width")
        check_size(height, "image height")
        if self.frames:
            raise WorkloadError(
                f"this model takes videos: give {spell('video', 'WxHxFRAMES')} instead of {spell('image')}"
            )
        if self.kind == "fixed":
            tokens = f", {self.tokens} tokens" if self.tokens else ""
            side = self.side * self.patch
            note = f"{width}x{height} becomes {side}x{side}{tokens}: the processor crops every image to one square"
            return (1, self.side, self.side), [note]
        if self.dims is not None and "pixels" in self.dims.spec.vision:
            grids, notes = _apply_rule(self.dims, width, height, preprocessor, images)
            return grids[0], notes
        least, most, notes = _read_limits(preprocessor)
        patch = _limit(preprocessor or {}, "patch_size", self.patch)
        merge = _limit(preprocessor or {}, "merge_size", self.merge)
        if patch != self.patch or merge != self.merge:
            raise ConfigError(
                f"preprocessor_config.json: patch_size {patch} and merge_size {merge} do not fit the model's "
                f"{self.patch} and {self.merge}"
            )
        from flopcalc.core.images.resizing import smart_resize  # imported lazily: few inputs are in pixels

        new_height, new_width = smart_resize(height, width, patch * merge, least, most)
        return (1, new_height // patch, new_width // patch), notes

    def grids_of_pixels(
        self, width: int, height: int, preprocessor: dict[str, object] | None, images: int = 1
    ) -> tuple[list[Grid], list[str]]:
        """All images that the processor makes of one; most make one."""
        if self.dims is not None and "pixels" in self.dims.spec.vision and self.kind != "fixed":
            check_size(width, "image width")
            check_size(height, "image height")
            return _apply_rule(self.dims, width, height, preprocessor, images)
        grid, notes = self.grid_of_pixels(width, height, preprocessor, images)
        return [grid], notes


def _count_tokens(dims: BoundDims, grid: Grid, video: bool = False) -> int:
    text = dims.spec.vision["tokens"]
    try:
        value = evaluate(text, _GridNames(dims, grid, video))
    except MissingNameError as error:
        raise ConfigError(f"{dims.where}: missing key {error.name!r}") from None
    if isinstance(value, bool) or getattr(value, "denominator", None) != 1 or value < 0:
        raise ConfigError(f"{dims.where}: tokens = {text} must be a whole number, not {format_value(value)}")
    return int(value)


def _check_readable(key: str, value: Any, read_device: bool) -> None:
    if getattr(getattr(value, "device", None), "type", "cpu") != "cpu" and not read_device:
        raise WorkloadError(f"{key} lies on {value.device}: reading it would stall the device; pass it from the host")


class _GridNames:
    """A spec's names, and t, h, w, video of one image before them."""

    def __init__(self, dims: BoundDims, grid: Grid, video: bool) -> None:
        self.dims = dims
        self.grid = {**dict(zip("thw", grid, strict=True)), "video": int(video)}

    def lookup(self, name: str) -> Any:
        return self.grid[name] if name in self.grid else self.dims.lookup(name)


class _RowNames:
    """A spec's names; before them a, b, row, the entries of one image's row in a batch's sizes, and its tensors."""

    def __init__(self, dims: BoundDims, row: object, batch: Mapping[str, object]) -> None:
        self.dims = dims
        self.batch = batch
        entries = row.tolist() if hasattr(row, "tolist") else row
        listed = list(entries) if isinstance(entries, Sequence) else [entries]
        self.entries: dict[str, Any] = {**dict(zip("ab", listed, strict=False)), "row": listed}

    def lookup(self, name: str) -> Any:
        if name in self.entries:
            return self.entries[name]
        shape = getattr(self.batch.get(name), "shape", ())
        return int(shape[-1]) if shape else self.dims.lookup(name)


def _apply_rule(
    dims: BoundDims, width: int, height: int, preprocessor: dict[str, object] | None, images: int
) -> tuple[list[Grid], list[str]]:
    """The named rule of [vision.pixels]; its parameters are preprocessor_config.json's, else the spec's own."""
    table = dict(dims.spec.vision["pixels"])
    name = str(table.pop("rule", ""))
    values: dict[str, object] = {"images": images}
    for keys, text in table.items():
        names = keys.split(" or ")  # what releases call it; the first that is given counts
        found_values = [value for _, value in (find_key(preprocessor or {}, key) for key in names) if value is not None]
        values[names[0]] = found_values[0] if found_values else dims.evaluate(str(text))
    note = "no preprocessor_config.json given: images cut as the processor class's defaults say"
    from flopcalc.core.images.resizing import RULES, patch_sides  # imported lazily: few inputs are in pixels

    if name not in RULES:
        raise SpecError(f"{dims.spec.file}: [vision.pixels] rule {name!r} unknown.{format_nearest(name, RULES)}")
    try:
        found = RULES[name](width, height, values)
    except FlopcalcError:
        raise
    except (TypeError, ValueError, KeyError, ZeroDivisionError):
        shown = ", ".join(f"{key} {format_value(value)}" for key, value in values.items())
        raise WorkloadError(f"image {width}x{height}: rule {name!r} cannot cut it with {shown}") from None
    notes = [] if preprocessor else [note]
    if name == "crop" and found != (whole := RULES[name](width, height, {**values, **_UNCUT})):
        (high, wide), way = patch_sides(values), spell("image_grid", ",".join(map(str, whole)))
        notes.append(f"{width}x{height} becomes {found[2] * wide}x{found[1] * high}; {way} counts it as it is")
    return found if isinstance(found, list) else [found], notes


def bind_vision(dims: BoundDims) -> Vision | None:
    """The image input that a spec describes, or None for a text model."""
    table, outer = dims.spec.vision, None
    if not table:
        return None
    tower = dims.bind_inner(table["tower"]) if "tower" in table else None
    if tower is not None and tower.spec.vision:
        table, dims, outer = tower.spec.vision, tower, dims if "tokens" in table else None

    def size(key: str, default: int) -> int:
        if key not in table:
            return default
        try:
            value = dims.evaluate(table[key])
        except MissingNameError as error:
            raise ConfigError(f"{dims.where}: missing key {error.name!r}") from None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{dims.where}: {table[key]} must be a positive whole number, not {format_value(value)}")
        return value

    side = size("side", 0)
    return Vision(
        kind=table["kind"],
        merge=size("merge", 1),
        patch=size("patch", 1),
        side=side,
        tokens=_count_tokens(outer or dims, (1, side, side)) if table["kind"] == "fixed" else 0,
        takes_videos=table.get("videos") == "true",
        dims=dims if table.keys() & {"pixels", "sizes"} or (table["kind"] != "fixed" and "tokens" in table) else None,
        most=size("most", 0),
        least=size("least", 1),
        frames=size("frames", 0),
        images=size("images", 0),
        outer=outer,
    )


def _read_limits(preprocessor: dict[str, object] | None) -> tuple[int, int, list[str]]:
    least, most = _SMART_DEFAULTS
    table = preprocessor or {}
    edges = table.get("size") if isinstance(table.get("size"), dict) else {}
    assert isinstance(edges, dict)
    found_least = table.get("min_pixels", edges.get("shortest_edge", edges.get("min_pixels")))
    found_most = table.get("max_pixels", edges.get("longest_edge", edges.get("max_pixels")))
    if found_least is None and found_most is None:
        note = f"no preprocessor limits given: images resized to {least}…{most} pixels, the processor class's defaults"
        return least, most, [note]
    found = {
        "min_pixels": least if found_least is None else found_least,
        "max_pixels": most if found_most is None else found_most,
    }
    least, most = _limit(found, "min_pixels", least), _limit(found, "max_pixels", most)
    if found_least is not None and found_most is not None and least > most:
        raise ConfigError(f"preprocessor_config.json: min_pixels {least} is more than max_pixels {most}")
    return least, most, []


def _limit(table: dict[str, object], key: str, default: int) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"preprocessor_config.json: {key} must be a positive whole number, not {format_value(value)}")
    return value
