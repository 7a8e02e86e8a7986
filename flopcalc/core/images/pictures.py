"""Width and height of a picture, from the first bytes of a PNG, JPEG, GIF, WebP or BMP file."""

from __future__ import annotations

import os
from struct import error as StructError
from struct import unpack
from typing import BinaryIO

from flopcalc.base.errors import WorkloadError, format_value
from flopcalc.base.files import open_regular, read_path

_NO_SIZE = {0xC4, 0xC8, 0xCC}  # JPEG: of 0xC0 to 0xCF, those that begin no frame
# The most segments, and the most other bytes, that may come before the frame of a JPEG file.
_MOST_SEGMENTS = 10_000
_MOST_FILL = 65_536
_TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height, as loaders apply them


def read_picture_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """(width, height) in pixels, turned as its EXIF data says."""
    name = read_path(path, "an image", WorkloadError)
    try:
        with open_regular(name, WorkloadError) as file:
            size = _read_size(file)
    except OSError as error:
        raise WorkloadError(f"{name}: cannot be read: {error.strerror or error}") from None
    except (StructError, IndexError):
        raise WorkloadError(f"image {format_value(name)}: ends before its size is said") from None
    if size is None or min(size) < 1:
        raise WorkloadError(f"image {format_value(name)}: is no PNG, JPEG, GIF, WebP or BMP file with a size")
    return size


def _read_size(file: BinaryIO) -> tuple[int, int] | None:
    head = file.read(32)
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height = unpack(">II", head[16:24])
    elif head[:6] in (b"GIF87a", b"GIF89a"):
        width, height = unpack("<HH", head[6:10])
    elif head.startswith(b"BM"):
        is_old = unpack("<I", head[14:18])[0] == 12
        width, height = unpack("<HH", head[18:22]) if is_old else unpack("<ii", head[18:26])
        height = abs(height)  # negative: the rows stand from top to bottom
    elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return _read_webp(head)
    elif head.startswith(b"\xff\xd8"):
        return _read_jpeg(file)
    else:
        return None
    return width, height


def _read_webp(head: bytes) -> tuple[int, int] | None:
    kind = head[12:16]
    if kind == b"VP8X":  # two numbers of three bytes, one less than the size
        numbers = unpack("<HBHB", head[24:30])
        return 1 + numbers[0] + (numbers[1] << 16), 1 + numbers[2] + (numbers[3] << 16)
    if kind == b"VP8L":  # two numbers of 14 bits, one less than the size
        bits = unpack("<I", head[21:25])[0]
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = unpack("<HH", head[26:30])
        return width & 0x3FFF, height & 0x3FFF
    return None


def _read_jpeg(file: BinaryIO) -> tuple[int, int] | None:
    """The size that its first frame says; segments before it may hold the orientation."""
    file.seek(2)
    is_turned = False
    fill = 0
    for _ in range(_MOST_SEGMENTS):
        byte = file.read(1)
        while byte and byte != b"\xff" and fill < _MOST_FILL:
            byte, fill = file.read(1), fill + 1
        while byte == b"\xff" and fill < _MOST_FILL:
            byte, fill = file.read(1), fill + 1
        if not byte or fill >= _MOST_FILL:
            return None
        marker = byte[0]
        if marker == 0x01 or 0xD0 <= marker <= 0xD9:  # no data after these
            continue
        length = unpack(">H", file.read(2))[0]
        data = file.read(max(0, length - 2))
        if 0xC0 <= marker <= 0xCF and marker not in _NO_SIZE:
            height, width = unpack(">HH", data[1:5])
            return (height, width) if is_turned else (width, height)
        if marker == 0xE1 and data.startswith(b"Exif\0\0"):
            is_turned = _find_orientation(data[6:]) in _TURNED
    return None


def _find_orientation(tiff: bytes) -> int:
    """Tag 274 of the first directory of EXIF data; 1 where there is none."""
    try:
        order = {b"II": "<", b"MM": ">"}[tiff[:2]]
        start = unpack(f"{order}I", tiff[4:8])[0]
        for i in range(unpack(f"{order}H", tiff[start : start + 2])[0]):
            entry = tiff[start + 2 + 12 * i : start + 14 + 12 * i]
            if unpack(f"{order}H", entry[:2])[0] == 274:
                return int(unpack(f"{order}H", entry[8:10])[0])
    except (KeyError, StructError):
        return 1
    return 1
