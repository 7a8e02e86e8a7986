"""Kernels that serving engines measured on a device: constants of products by number format, attention, collectives."""

from __future__ import annotations

import os
from functools import cache
from typing import Annotated, NotRequired, TypedDict

from flopcalc.base.data import find_data_dir, find_user_dir
from flopcalc.base.errors import SpecError
from flopcalc.base.files import MAX_JSON_BYTES, read_json
from flopcalc.base.validate import FromOne, FromZero, Items, Keys, Positive, find_fault
from flopcalc.hardware.devices import find_device

SCHEMA = 1
_Sizes = Keys(names="[1-9][0-9]*")


class SystemSource(TypedDict):
    """Who measured it, under which licence."""

    source: str
    licence: str


class ProductFit(TypedDict):
    """The fields of a ProductShape, and how far measured products are from it."""

    shape: Annotated[list[float], Items((*(Positive,) * 8, FromOne))]
    median_error: FromZero


class System(TypedDict):
    """The measured kernels of a device."""

    device_id: str
    provenance: SystemSource
    products: dict[str, ProductFit]  # by number format
    # Share of the products' rate that a whole step keeps up, by number format; attention
    sustained: dict[str, Positive]
    joined_experts: NotRequired[list[str]]  # formats whose experts are one kernel each way
    # Formats in which a CUDA graph replays experts too, so that nothing waits for the host
    replayed_experts: NotRequired[list[str]]
    attention_flops_per_s: Annotated[dict[str, Positive], _Sizes]  # by head dim
    decode_bytes_per_s: Positive
    # GPUs -> collective -> bytes, seconds
    collectives: Annotated[dict[str, dict[str, list[Annotated[list[float], Items((Positive, Positive))]]]], _Sizes]
    same_die_as: NotRequired[str]
    source: NotRequired[str]


class SameDie(TypedDict):
    """A device with the die of another: its kernels are the other's, with its own peak and memory's bandwidth."""

    device_id: str
    same_die_as: str
    source: str


_RATE, _BANDWIDTH = 0, 6  # their places in a product's shape


@cache
def load_system(device_id: str) -> System | None:
    """The measured kernels of a device, the user's own first; None where there are none."""
    for folder in (find_user_dir(), find_data_dir()):
        path = os.path.join(folder, "systems", f"{device_id}.json")
        if not os.path.isfile(path):
            continue
        data = read_json(path, MAX_JSON_BYTES, SpecError)
        if (data.get("schema") if isinstance(data, dict) else None) != SCHEMA:
            raise SpecError(f"{path}: this version reads schema {SCHEMA}; benchmarks/make_systems.py makes such files")
        if fault := find_fault(data, SameDie if "same_die_as" in data else System):
            raise SpecError(f"{path}: {fault.lstrip('.: ')}; benchmarks/make_systems.py makes such files")
        if data["device_id"] != device_id:
            raise SpecError(f"{path}: is of {data['device_id']!r}, not of {device_id!r}")
        if "same_die_as" in data:
            return _borrow(data["device_id"], data["same_die_as"], data["source"], path)
        found: System = data
        return found
    return None


def _borrow(device_id: str, other_id: str, source: str, path: str) -> System:
    """The kernels of the device with the same die, scaled by both peaks; where memory decides, by both bandwidths."""
    base = load_system(other_id)
    own, other = (find_device(name) for name in (device_id, other_id))
    if base is None or own.bandwidth_gb_per_s is None or other.bandwidth_gb_per_s is None:
        raise SpecError(f"{path}: {other_id!r} has no kernels of its own, or a bandwidth is not known")
    if "bf16" not in own.peak_tflops:
        raise SpecError(f"{path}: {device_id!r} has no bf16 peak to scale the kernels by")
    wider = own.bandwidth_gb_per_s / other.bandwidth_gb_per_s
    faster = own.peak_tflops["bf16"] / other.peak_tflops["bf16"]  # one clock for all formats
    products: dict[str, ProductFit] = {}
    for kind, entry in base["products"].items():
        shape = list(entry["shape"])
        shape[_RATE] *= faster
        shape[_BANDWIDTH] *= wider
        products[kind] = {**entry, "shape": shape}
    return {
        **base,
        "device_id": device_id,
        "same_die_as": other_id,
        "source": source,
        "products": products,
        "attention_flops_per_s": {dim: faster * rate for dim, rate in base["attention_flops_per_s"].items()},
        "decode_bytes_per_s": base["decode_bytes_per_s"] * wider,
        "collectives": {},
    }
