"""GGUF files of a header alone."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

HEADER = {
    "general.architecture": "llama", "llama.embedding_length": 64, "llama.feed_forward_length": 96,
    "llama.block_count": 2, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 16, "llama.context_length": 512, "tokenizer.ggml.tokens": ["a"] * 100,
}  # fmt: skip


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path: Path, values: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int]]) -> None:
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    for key, value in values.items():
        data += text(key)
        if isinstance(value, str):
            data += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            data += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        else:
            data += struct.pack("<II", 4, value)
    for name, (shape, kind) in tensors.items():
        data += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        data += struct.pack("<IQ", kind, 0)
    path.write_bytes(data)
