"""Sizes of pictures from their first bytes, as Pillow reads them; broken files are refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from flopcalc import WorkloadError, estimate_flops
from flopcalc.core.images.pictures import read_picture_size

FORMATS: list[tuple[str, str, dict[str, Any]]] = [
    ("png", "RGB", {}), ("jpeg", "RGB", {}), ("jpeg", "RGB", {"progressive": True}), ("jpeg", "CMYK", {}),
    ("jpeg", "RGB", {"comment": b"\xff\xc0 no size"}), ("gif", "P", {}), ("bmp", "RGB", {}),
    ("webp", "RGB", {}), ("webp", "RGB", {"lossless": True}), ("webp", "RGBA", {"lossless": True}),
    ("webp", "RGB", {"exif": b"Exif\0\0"}),
]  # fmt: skip


@pytest.mark.parametrize("size", [(1, 1), (640, 480), (3, 1000), (257, 4099)])
@pytest.mark.parametrize(("kind", "mode", "options"), FORMATS)
def test_sizes(tmp_path: Path, kind: str, mode: str, options: dict[str, Any], size: tuple[int, int]) -> None:
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / f"picture.{kind}"
    image.new(mode, size).save(path, **options)
    assert read_picture_size(path) == size
    assert read_picture_size(str(path)) == size


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_that_are_turned(tmp_path: Path, orientation: int, order: str) -> None:
    """A camera writes how a photo is to be turned; transformers' loader turns it."""
    image, ops = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageOps")
    directory = struct.pack(f"{order}HHHIHH", 1, 274, 3, 1, orientation, 0) + bytes(4)
    exif = b"Exif\0\0" + {"<": b"II", ">": b"MM"}[order] + struct.pack(f"{order}HI", 42, 8) + directory
    path = tmp_path / "photo.jpg"
    image.new("RGB", (64, 48)).save(path, exif=exif)
    with image.open(path) as photo:
        assert read_picture_size(path) == ops.exif_transpose(photo).size
    assert read_picture_size(path) == ((48, 64) if orientation >= 5 else (64, 48))


def test_a_bitmap_from_top_to_bottom_and_an_old_one(tmp_path: Path) -> None:
    head = b"BM" + bytes(12)
    (tmp_path / "a.bmp").write_bytes(head + struct.pack("<Iii", 40, 30, -20) + bytes(30))
    (tmp_path / "b.bmp").write_bytes(head + struct.pack("<IHH", 12, 30, 20) + bytes(30))
    assert read_picture_size(tmp_path / "a.bmp") == read_picture_size(tmp_path / "b.bmp") == (30, 20)


PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no PNG, JPEG, GIF, WebP or BMP file"),
        (b"hello", "is no PNG"),
        (PNG, "ends before its size is said"),
        (PNG + struct.pack(">II", 0, 5), "is no PNG"),
        (b"\xff\xd8", "is no PNG"),
        (b"\xff\xd8\xff\xe0", "ends before its size is said"),
        (b"\xff\xd8\xff\xc0\0\x05\x08\0", "ends before its size is said"),
        (b"\xff\xd8\xff\xda\0\x02" + bytes(99), "is no PNG"),
        (b"GIF89a\x01", "ends before its size is said"),
        (b"RIFF1234WEBPVP9 " + bytes(20), "is no PNG"),
        (b"RIFF1234WEBPVP8X", "ends before its size is said"),
        (b"BM", "ends before its size is said"),
    ],
)
def test_broken_files(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "picture"
    path.write_bytes(data)
    with pytest.raises(WorkloadError, match=words):
        read_picture_size(path)


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no.png"):
        with pytest.raises(WorkloadError, match="cannot be read"):
            read_picture_size(path)


def test_a_file_counts_as_its_size(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG + struct.pack(">II", 1024, 768))
    found = estimate_flops("qwen2-vl-2b", seq_len=1200, images=[path])
    assert found == estimate_flops("qwen2-vl-2b", seq_len=1200, images=[(1024, 768)])
