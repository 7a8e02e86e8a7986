"""Rules by which image processors cut a picture into tiles: pixels and the processor's parameters to (t, h, w)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flopcalc.workload import Grid

Rule = Callable[[int, int, dict[str, Any]], Grid]
RULES: dict[str, Rule] = {}


def _anyres(width: int, height: int, values: dict[str, Any]) -> Grid:
    """LLaVA-NeXT: the rectangle of tiles that wastes least, and the whole image as one tile before it.

    h, w are the rows and columns of features that remain when the rectangle's padding is cut off, and when
    LLaVA-OneVision then shrinks them to so many tiles' worth ('anyres_max_9').
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
        most = int(str(values["vision_aspect_ratio"]).strip("anyres_max_"))
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
    return best


RULES["anyres"] = _anyres


def _square(width: int, height: int, values: dict[str, Any]) -> Grid:
    """One tile, whatever the size."""
    return (1, values["side"], values["side"])


def _canvas(width: int, height: int, values: dict[str, Any]) -> Grid:
    """InternVL, GOT-OCR2, Aya: the canvas of min to max tiles nearest in aspect, and a thumbnail if they are several."""
    side, tile = values["side"], values["size.height"]
    least, most = values["min_patches"], values["max_patches"]
    best, closest = (1, 1), math.inf
    if values.get("crop_to_patches", True) and most > 1:
        shapes = [(w, h) for w in range(1, most + 1) for h in range(1, most + 1) if least <= w * h <= most]
        for columns, rows in sorted(shapes, key=math.prod):
            distance = abs(width / height - columns / rows)
            is_large = width * height > 0.5 * tile * tile * columns * rows
            if distance < closest or (distance == closest and is_large):
                best, closest = (columns, rows), distance
    tiles = math.prod(best)
    return (tiles + 1 if tiles > 1 else 1, side, side)


RULES |= {"square": _square, "canvas": _canvas}


def _cover(width: int, height: int, values: dict[str, Any]) -> Grid:
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
