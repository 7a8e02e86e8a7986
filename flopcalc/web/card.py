"""The picture that stands beside a link to the page: the default model's treemap as a PNG."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from flopcalc.report.html.treemap import Box, Leaf, arrange

WIDTH, HEIGHT = 1200, 630  # what the networks show
# The page's light colours, one for each part of the model.
_COLOURS = ("bcd4f6", "f8d3a8", "bfe5cb", "f3bfc6", "d8cbf2", "f3e6a1", "b8e3e6", "dcd5cb")
_GAP = 2  # white pixels around each box


def draw_card(modules: Sequence[Mapping[str, Any]]) -> bytes:
    """Boxes as large as the modules' FLOPs."""
    leaves = [Leaf(row["path"], row["kind"], int(row["forward"]) + int(row["backward"])) for row in modules]
    rows = [bytearray(b"\xff" * (3 * WIDTH)) for _ in range(HEIGHT)]
    for tile in arrange(leaves, Box(0, 0, WIDTH, HEIGHT))[1]:
        colour = bytes.fromhex(_COLOURS[tile.group % len(_COLOURS)])
        left, right = round(tile.box.x) + _GAP, round(tile.box.x + tile.box.width) - _GAP
        for row in rows[round(tile.box.y) + _GAP : max(0, round(tile.box.y + tile.box.height) - _GAP)]:
            row[3 * left : 3 * max(left, right)] = colour * max(0, right - left)
    return _write_png(rows)


def _write_png(rows: Sequence[bytearray]) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)  # 8 bits each of red, green and blue
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
