"""Kernels that serving engines measured on a device: constants of products by number format, attention, collectives."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from flopcalc.data import find_data_dir, find_user_dir
from flopcalc.errors import SpecError
from flopcalc.files import MAX_JSON_BYTES, read_json
from flopcalc.forms import FROM_0, FROM_1, POSITIVE, Each, find_fault

SCHEMA = 1
_FORM = {
    "device_id": str,
    "provenance": {"source": str, "licence": str},
    "products": Each({"shape": (*(POSITIVE,) * 8, FROM_1), "median_error": FROM_0}),
    "sustained": Each(POSITIVE),  # share of the products' rate that a whole step keeps up, by number format; attention
    "expert_start_s?": FROM_0,
    "attention_flops_per_s": Each(POSITIVE, names="[1-9][0-9]*"),
    "decode_bytes_per_s": POSITIVE,
    "collectives": Each(Each([(POSITIVE, POSITIVE)]), names="[1-9][0-9]*"),
}


@cache
def load_system(device_id: str) -> dict[str, Any] | None:
    """The measured kernels of a device, the user's own first; None where there are none."""
    for folder in (find_user_dir(), find_data_dir()):
        path = os.path.join(folder, "systems", f"{device_id}.json")
        if not os.path.isfile(path):
            continue
        data = read_json(path, MAX_JSON_BYTES, SpecError)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise SpecError(f"{path}: this version reads schema {SCHEMA}; benchmarks/make_systems.py makes such files")
        if fault := find_fault(data, _FORM):
            raise SpecError(f"{path}: {fault.lstrip('.: ')}; benchmarks/make_systems.py makes such files")
        if data["device_id"] != device_id:
            raise SpecError(f"{path}: is of {data['device_id']!r}, not of {device_id!r}")
        return data
    return None
