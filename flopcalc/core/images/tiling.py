"""Rules by which image processors cut a picture into tiles: pixels and the processor's parameters to (t, h, w)."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

from flopcalc.base.errors import ConfigError, WorkloadError
from flopcalc.core.workload.workload import Grid

Values: TypeAlias = "dict[str, Any]"  # of a processor's config, and what a spec adds: numbers, words, lists
Rule: TypeAlias = "Callable[[int, int, Values], Grid | list[Grid]]"
RULES: dict[str, Rule] = {}


def _anyres(width: int, height: int, values: Values) -> Grid:
    """LLaVA-NeXT: the rectangle of tiles that wastes least, and the whole image as one tile before it.

    h, w are the rows and columns of features that remain when the rectangle's padding is cut off, and when
    LLaVA-OneVision then shrinks them to that number of tiles ('anyres_max_9').
    """
    tile, side = values["tile"], values["side"]
    if values.get("only_single") and values["images"] > 1:
        return (1, side, side)
    best = _best_resolution(width, height, values["image_grid_pinpoints"])
    rows, columns = best[0] // tile * side, best[1] // tile * side
    # The processor's own floats and roundings.
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    if "vision_aspect_ratio" in values:
        most = int(str(values["vision_aspect_ratio"]).removeprefix("anyres_max_"))
        ratio = math.sqrt(rows * columns / (most * side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
    return (1 + math.ceil(best[0] / tile) * math.ceil(best[1] / tile), rows, columns)


def _best_resolution(width: int, height: int, resolutions: list[list[int]]) -> tuple[int, int]:
    """transformers' select_best_resolution: the most pixels of the image kept, then the fewest wasted."""
    best, most, least = (0, 0), 0, math.inf
    for high, wide in resolutions:
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = wide * high - kept
        if kept > most or (kept == most and wasted < least):
            best, most, least = (high, wide), kept, wasted
    if not most:
        raise WorkloadError(f"image {width}x{height}: nothing of it is left in any of the model's resolutions")
    return best


RULES["anyres"] = _anyres


def _whole_and_resolutions(width: int, height: int, values: Values) -> Grid:
    """DeepSeek-VL2: the whole as one tile, and tiles of the best resolution, one if there are over two images.

    t is 1 and the tiles, h, w their rows and columns. The first resolution's width is a tile's side.
    """
    resolutions = values["candidate_resolutions"]
    tile = resolutions[0][0]
    if values["images"] > 2:
        return (2, 1, 1)
    # Resolutions are (width, height); the rule is the same as transformers' select_best_resolution.
    wide, high = _best_resolution(height, width, resolutions)
    return (1 + wide // tile * (high // tile), high // tile, wide // tile)


RULES["whole_and_resolutions"] = _whole_and_resolutions


def _exact(_width: int, _height: int, values: Values) -> Grid:
    """One size, not always a square, whatever the image's."""
    patch = values["patch"]
    return (1, math.ceil(values["size.height"] / patch), math.ceil(values["size.width"] / patch))


def _canvas(width: int, height: int, values: Values) -> Grid:
    """InternVL, GOT-OCR2, Aya: the canvas of min to max tiles nearest in aspect, and a thumbnail if it has several."""
    side, tile = values["side"], values["size.height"]
    most = values["max_patches"] if values.get("crop_to_patches", True) else 1
    tiles = _count_tiles(width, height, values["min_patches"], most, tile) if most > 1 else 1
    return (tiles + 1 if tiles > 1 and values.get("thumbnail", True) else tiles, side, side)


def _covering_canvas(width: int, height: int, values: Values) -> Grid:
    """Eagle 2.5: the canvas nearest in aspect, times the share of the image's area that it holds, up to 60 %."""
    side, tile, aspect = values["side"], values["size.height"], width / height
    best, most = 1, -math.inf
    for columns, rows in _list_canvases(values["min_patches"], values["max_patches"]):
        own = columns / rows
        fit = min(columns * rows * tile * tile / (width * height), 0.6) * min(own / aspect, aspect / own)
        if fit > most:
            best, most = columns * rows, fit
    return (best + 1 if best > 1 and values["thumbnail"] else best, side, side)


def _list_canvases(least: int, most: int) -> list[tuple[int, int]]:
    """Columns and rows, the fewest tiles first."""
    shapes = [(w, h) for w in range(1, most + 1) for h in range(1, most // w + 1) if least <= w * h]
    return sorted(shapes, key=math.prod)


def _count_tiles(width: int, height: int, least: int, most: int, tile: int) -> int:
    return math.prod(_nearest_canvas(width, height, least, most, tile))


def _nearest_canvas(width: int, height: int, least: int, most: int, tile: int) -> tuple[int, int]:
    """Columns and rows of the canvas nearest in aspect; of equals the largest that the image fills by half."""
    best, closest = (1, 1), math.inf
    for columns, rows in _list_canvases(least, most):
        distance = abs(width / height - columns / rows)
        is_large = width * height > 0.5 * tile * tile * columns * rows
        if distance < closest or (distance == closest and is_large):
            best, closest = (columns, rows), distance
    return best


def _whole_and_canvas(width: int, height: int, values: Values) -> Grid:
    """DeepSeek-OCR 2, Unlimited-OCR: the whole image as a square, and tiles of a canvas if it is larger than one.

    t is 1 and the tiles, h the patches per side of the whole, w the rows of tiles (1 without). The tiles' side is a
    constant of the spec, because the grid cannot hold it.
    """
    tile, patch = values["tile_size"], values["patch"]
    if tile != values["tile"]:
        raise ConfigError(f"preprocessor_config.json: tile_size {tile}: only tiles of {values['tile']} are described")
    is_cut = values["crop_to_patches"]
    whole = values["size.height"] if is_cut or not values["tile_if_whole"] else tile
    if not is_cut or max(width, height) <= tile:
        return (1, whole // patch, 1)
    columns, rows = _nearest_canvas(width, height, values["min_patches"], values["max_patches"], tile)
    return (1 + columns * rows, whole // patch, rows)


RULES |= {
    "square": lambda _width, _height, values: (1, values["side"], values["side"]),  # one tile, whatever the size
    "exact": _exact,
    "canvas": _canvas,
    "covering_canvas": _covering_canvas,
    "whole_and_canvas": _whole_and_canvas,
}


def _whole_and_crops_padded(width: int, height: int, values: Values) -> Grid:
    """Phi-4-multimodal: the whole image, and as many tiles as its pixels fill, their padding masked.

    h, w are the patches of the canvas of tiles that the image itself fills.
    """
    tile, patch, most = values["size.height"], values["patch_size"], values["dynamic_hd"]
    columns, rows = math.ceil(width / tile), math.ceil(height / tile)
    if columns * rows > most:
        columns, rows = _nearest_canvas(width, height, 1, most, tile)
    # The processor's own floats and roundings.
    across, down = columns * tile / width, rows * tile / height
    free = (0, rows * tile - int(height * across)) if across < down else (columns * tile - int(width * down), 0)
    side = tile // patch
    return (1 + columns * rows, rows * side - free[1] // patch, columns * side - free[0] // patch)


RULES["whole_and_crops_padded"] = _whole_and_crops_padded


def _cover(width: int, height: int, values: Values) -> Grid:
    """Cohere2: the canvas that enlarges the image least, or shrinks it least if it fits in none; and a thumbnail."""
    side, tile, most = values["side"], values["size.height"], values["max_patches"]
    best = (1, 1)
    if values["crop_to_patches"]:
        shapes = [(w, h) for w in range(1, most + 1) for h in range(1, most + 1) if w * h <= most]
        shapes.sort(key=math.prod)
        scales = [min(w * tile / width, h * tile / height) for w, h in shapes]
        fitting = [scale for scale in scales if scale >= 1]
        best = shapes[scales.index(min(fitting) if fitting else max(scales))]
    tiles = math.prod(best)
    return (tiles + 1 if tiles > 1 else 1, side, side)


RULES["cover"] = _cover


def _split(width: int, height: int, values: Values) -> Grid:
    """Idefics3, SmolVLM: the longer side to a set length, both up to whole tiles, and the whole image after them."""
    side, tile = values["side"], values["max_image_size.longest_edge"]
    if not values["do_image_splitting"]:
        return (1, side, side)
    height, width = _to_longest(height, width, values["size.longest_edge"])
    aspect = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        rows = math.ceil(int(columns * tile / aspect) / tile)
    else:
        rows = math.ceil(height / tile)
        columns = math.ceil(int(rows * tile * aspect) / tile)
    return (rows * columns + 1 if rows * columns > 1 else 1, side, side)


def _to_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """Idefics3's first resize: the longer side exact, the other even, neither above 4096."""
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        height += height % 2
    else:
        height, width = longest, int(longest * aspect)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    if max(height, width) > _LONGEST:
        aspect = width / height
        if width >= height:
            width, height = _LONGEST, int(_LONGEST / aspect)
        else:
            height, width = _LONGEST, int(_LONGEST * aspect)
    return max(height, 1), max(width, 1)


_LONGEST = 4096
RULES["split"] = _split


def _quarters(width: int, height: int, values: Values) -> list[Grid]:
    """Idefics2: the image, its sides within limits; with splitting its four quarters too, as images of their own."""
    sizes = [(height, width)]
    if values["do_image_splitting"]:
        high, wide = height // 2, width // 2
        sizes = [(high, wide), (high, width - wide), (height - high, wide), (height - high, width - wide), *sizes]
    least, most, patch = values["size.shortest_edge"], values["size.longest_edge"], values["patch"]
    grids = []
    for high, wide in sizes:
        aspect = wide / high
        if wide >= high and wide > most:
            wide, high = most, int(most / aspect)
        elif high > wide and high > most:
            high, wide = most, int(most * aspect)
        grids.append((1, max(high, least) // patch, max(wide, least) // patch))
    return grids


RULES["quarters"] = _quarters


def _tiles_or_whole(width: int, height: int, values: Values) -> list[Grid]:
    """LFM2-VL: an image within limits of tokens whole, a larger one as tiles of a canvas and the whole after them."""
    patch, tile = values["encoder_patch_size"], values["tile_size"]
    step = patch * values["downsample_factor"]
    least, most = values["min_image_tokens"] * step**2, values["max_image_tokens"] * step**2
    rounded = [round(side / step) * step for side in (height, width)]
    is_large = max(patch, rounded[0]) * max(patch, rounded[1]) > most * values["max_pixels_tolerance"]
    high, wide = (max(step, side) for side in rounded)
    if high * wide > most:
        beta = math.sqrt(height * width / most)
        high, wide = (max(step, math.floor(side / beta / step) * step) for side in (height, width))
    elif high * wide < least:
        beta = math.sqrt(least / (height * width))
        high, wide = (math.ceil(side * beta / step) * step for side in (height, width))
    whole = (1, high // patch, wide // patch)
    if not is_large or not values["do_image_splitting"] or values["min_tiles"] == values["max_tiles"] == 1:
        return [whole]
    tiles = _count_tiles(width, height, values["min_tiles"], values["max_tiles"], tile)
    return [(1, tile // patch, tile // patch)] * tiles + ([whole] if values["use_thumbnail"] and tiles > 1 else [])


RULES["tiles_or_whole"] = _tiles_or_whole


def _padded_square(width: int, height: int, values: Values) -> list[Grid]:
    """Aria: the longer side to a set length, the rest of the square masked; if split, squares of the best canvas."""
    most, least, patch = values["max_image_size"], values["min_image_size"], values["patch"]
    sizes = [(height, width)]
    if values["split_image"]:
        rows, columns = _best_resolution(width, height, values["split_resolutions"])
        sizes = [
            (min(most, rows - top), min(most, columns - left))
            for top in range(0, rows, most)
            for left in range(0, columns, most)
        ]
    grids = []
    for high, wide in sizes:
        scale = most / max(high, wide)
        new = (max(int(high * scale), least), most) if wide >= high else (most, max(int(wide * scale), least))
        grids.append((1, math.ceil(new[0] / patch), math.ceil(new[1] / patch)))
    return grids


RULES["padded_square"] = _padded_square


def _covering(width: int, height: int, values: Values) -> Grid:
    """Ovis2: the fewest tiles that keep more than 90 % of the image's area, and a thumbnail if they are several."""
    side, tile, most = values["side"], values["size.height"], values["max_patches"]
    if not values["use_covering_area_grid"] or not values["crop_to_patches"] or most <= 1:
        return _canvas(width, height, values)
    shapes = [(a, b) for a in range(1, most + 1) for b in range(1, most + 1) if a * b <= most]
    area = width * height
    shares = {shape: _covered(width, height, shape, tile) / area for shape in sorted(shapes, key=math.prod)}
    enough = [shape for shape, share in shares.items() if share > 0.9]
    if enough:
        best = min(enough, key=lambda shape: (math.prod(shape), -shares[shape]))
    else:
        best = min(shares, key=lambda shape: (-shares[shape], math.prod(shape)))
    tiles = math.prod(best)
    return (tiles + 1 if tiles > 1 else 1, side, side)


def _covered(width: int, height: int, shape: tuple[int, int], tile: int) -> float:
    """Area of an image's parts, rows by columns, after each has shrunk to a tile; the last ones take the rest."""
    rows, columns = shape
    high, wide = height // rows, width // columns
    area = 0.0
    for row in range(rows):
        for column in range(columns):
            w = wide if column < columns - 1 else width - column * wide
            h = high if row < rows - 1 else height - row * high
            longer, shorter = max(w, h), min(w, h)
            area += tile * (shorter / longer * tile) if longer > tile else longer * shorter
    return area


RULES["covering"] = _covering


def _best_fit(width: int, height: int, values: Values) -> Grid:
    """Llama 4: the canvas that enlarges least (or shrinks least), the smallest of equals; and the whole if several."""
    side, tile, most = values["side"], values["size.height"], values["max_patches"]
    shapes = [(a, count // a) for count in range(1, most + 1) for a in range(1, count + 1) if count % a == 0]
    # The processor compares single-precision quotients.
    scales = {shape: min(_single(shape[1] * tile / width), _single(shape[0] * tile / height)) for shape in shapes}
    growing = [scale for scale in scales.values() if scale >= 1]
    if growing:
        chosen = max(growing) if values["resize_to_max_canvas"] else min(growing)
    else:
        chosen = max(scales.values())
    tiles = min(math.prod(shape) for shape, scale in scales.items() if scale == chosen)
    return (tiles + 1 if tiles > 1 else 1, side, side)


def _single(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


RULES["best_fit"] = _best_fit


# Rows and columns that mPLUG-Owl3 may cut a picture into, in its order.
_ANCHORS = ((2, 2), (1, 3), (1, 4), (3, 1), (4, 1), (2, 3), (3, 2))


def _anchors(width: int, height: int, values: Values) -> Grid:
    """mPLUG-Owl3: the anchor whose shape is nearest, then whose size is; and the whole as one tile more."""
    tile, side = values["tile"], values["side"]

    def rank(rows: int, columns: int) -> float:
        wide, high = columns * tile, rows * tile
        alike = int(_single(_single(height / width) * wide))  # the anchor's width in the picture's shape
        shape, size = _overlap(wide, high, wide, alike), _overlap(wide, high, width, height)
        return _single(_single(shape * 100) + size)

    rows, columns = max(_ANCHORS, key=lambda anchor: rank(*anchor))
    return (rows * columns + 1, side, side)


def _overlap(wide: int, high: int, width: int, height: int) -> float:
    """Of two boxes with one corner in common: the area of both by that of either, in single precision."""
    both = min(wide, width) * min(high, height)
    either = wide * high + width * height - both
    return _single(_single(both) / _single(_single(either) + _single(1e-5)))


RULES["anchors"] = _anchors


def _overlapping(width: int, height: int, values: Values) -> Grid:
    """Molmo 2: the whole, and crops that overlap by margins: t is 1 and the crops, h, w the patches they cover."""
    side, margin, most = values["side"], sum(values["overlap_margins"]), values["max_crops"]
    patch, step = values["patch_size"], side - margin
    shapes = [(a, b) for a in range(1, most + 1) for b in range(1, most + 1) if a * b <= most]
    shapes.sort(key=lambda shape: (math.prod(shape), shape[0]))
    # The processor divides in single precision.
    sizes = [length - margin * patch for length in (height, width)]
    scales = [
        min(_single(a * step * patch / size) if size else math.inf for a, size in zip(shape, sizes, strict=True))
        for shape in shapes
    ]
    growing = [scale for scale in scales if scale >= 1]
    rows, columns = shapes[scales.index(min(growing) if growing else max(scales))]
    return (1 + rows * columns, rows * step + margin, columns * step + margin)


RULES["overlapping"] = _overlapping


def _even_crops(width: int, height: int, values: Values) -> Grid:
    """Moondream 3: the whole, and crops that overlap: t is 1 and the crops, h, w their rows and columns.

    As many crops as the image needs and the limit lets, spread by its aspect; a narrow image is one crop.
    """
    patch, margin, most = values["patch_size"], values["overlap_margin"], values["max_crops"]
    window = (values["crop_size"] // patch - 2 * margin) * patch
    high, wide = height - 2 * margin * patch, width - 2 * margin * patch
    if high <= window or wide <= window:
        return (2, 1, 1)
    least = (math.ceil(high / window), math.ceil(wide / window))
    # The processor's own floats and roundings.
    if math.prod(least) > most:
        ratio = math.sqrt(most / math.prod(least))
        rows, columns = (max(1, math.floor(count * ratio)) for count in least)
        return (1 + rows * columns, rows, columns)
    rows = max(math.floor(math.sqrt(most * high / wide)), least[0])
    columns = max(math.floor(math.sqrt(most * wide / high)), least[1])
    if rows * columns > most:
        if columns > rows:
            columns = most // rows
        else:
            rows = most // columns
    return (1 + rows * columns, rows, columns)


RULES["even_crops"] = _even_crops


def _hd_crops(width: int, height: int, values: Values) -> Grid:
    """Phi-3-vision: the whole, and as many square crops as fit: t is 1 and the crops, h, w their rows and columns."""
    most, longer, shorter = values["num_crops"], max(width, height), min(width, height)
    ratio, scale = longer / shorter, 1
    while scale * math.ceil(scale / ratio) <= most:
        scale += 1
    across, tile = scale - 1, values["tile"]
    along = max(1, math.ceil(int(across * tile / ratio) / tile))
    rows, columns = (along, across) if width >= height else (across, along)
    return (1 + rows * columns, rows, columns)


RULES["hd_crops"] = _hd_crops


def _aspect_ratios(width: int, height: int, values: Values) -> Grid:
    """Llama 3.2: the canvas that enlarges least (or shrinks least), the smallest of equals; no small whole image."""
    side, tile, most = values["side"], values["size.height"], values["max_image_tiles"]
    shapes = [(a, b) for a in range(1, most + 1) for b in range(1, most + 1) if a * b <= most]
    scales = {shape: min(shape[0] * tile / height, shape[1] * tile / width) for shape in shapes}
    growing = [scale for scale in scales.values() if scale >= 1]
    chosen = min(growing) if growing else max(scales.values())
    return (min(math.prod(shape) for shape, scale in scales.items() if scale == chosen), side, side)


RULES["aspect_ratios"] = _aspect_ratios


def _thumb_and_tiles(width: int, height: int, values: Values) -> Grid:
    """Perception LM: the canvas that holds the image and lets it grow most, else the nearest aspect; and the whole."""
    side, tile, most = values["side"], values["tile_size"], values["max_num_tiles"]
    if values["vision_input_type"] != "thumb+tile":
        return (1, side, side)
    ratios: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for columns in range(1, count + 1):
            if count % columns == 0:
                ratios.setdefault(columns * columns / count, []).append((columns, count // columns))
    return (1 + math.prod(_fit_canvas(width, height, tile, ratios) if most > 1 else (1, 1)), side, side)


def _fit_canvas(width: int, height: int, tile: int, ratios: dict[float, list[tuple[int, int]]]) -> tuple[int, int]:
    aspect = width / height
    best: tuple[int, int] | None = None
    reached: float = 0
    for columns, rows in [shape for shapes in ratios.values() for shape in shapes]:
        if columns * tile < width or rows * tile < height:
            continue
        scale = min(columns * tile / width, rows * tile / height)
        # The side that the processor compares: the height of a wide image, the width of a tall one.
        if aspect > 1:
            grown: float = math.floor(scale * width / aspect)
        elif aspect < 1:
            grown = math.floor(scale * height * aspect)
        else:
            grown = scale * height
        if best is None or grown >= reached:
            best, reached = (columns, rows), grown
    if best is not None:
        return best
    if aspect >= 1:
        nearest = min((ratio for ratio in ratios if ratio <= aspect), key=lambda ratio: abs(ratio - aspect))
        return max(ratios[nearest], key=lambda shape: shape[0])
    nearest = min((ratio for ratio in ratios if ratio > aspect), key=lambda ratio: abs(1 / ratio - 1 / aspect))
    return max(ratios[nearest], key=lambda shape: shape[1])


RULES["thumb_and_tiles"] = _thumb_and_tiles
