"""Parameters that from_pretrained keeps in float32 where a model is loaded in a 16-bit format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import ConfigError
from flopcalc.base.files import MAX_JSON_BYTES, read_json

FILE = "float32.json"  # made by docs/make_float32.py


@cache
def _load_types() -> dict[str, dict[str, list[str]]]:
    """model_type -> 'half' (both 16-bit formats) or 'fp16' -> patterns."""
    types: dict[str, dict[str, list[str]]]
    types = read_json(os.path.join(find_data_dir(), FILE), MAX_JSON_BYTES, ConfigError)["types"]
    return types


def list_float32(config: Mapping[str, Any], dtype: str) -> tuple[str, ...]:
    """Patterns of the parameters that stay in float32.

    transformers keeps `_keep_in_fp32_modules_strict` in both formats and `_keep_in_fp32_modules` in fp16. A model has
    the lists of its parts too (modeling_utils.py, post_init).
    """
    parts = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    keys = ("half", "fp16") if dtype == "fp16" else ("half",)
    types = _load_types()
    kept = [types.get(str(part.get("model_type")), {}).get(key, ()) for part in parts for key in keys]
    return tuple(dict.fromkeys(name for names in kept for name in names))


def list_unconverted(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Modules that transformers' quantizers leave out: those of `_keep_in_fp32_modules`, in any format."""
    half = list_float32(config, "bf16")
    return tuple(name for name in list_float32(config, "fp16") if name not in half)
