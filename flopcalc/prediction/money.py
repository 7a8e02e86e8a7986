"""GPU-hours in; energy and money out, each with the source of its rate."""

from __future__ import annotations

import os
from typing import NamedTuple

from flopcalc.data import find_data_dir, find_user_dir, load_toml
from flopcalc.devices import Device
from flopcalc.errors import FlopcalcError, SpecError, format_value


class Rate(NamedTuple):
    """A price of one GPU-hour and where it comes from."""

    usd_per_gpu_hour: float
    source: str


def find_price(device: Device, given: float | None) -> Rate | None:
    """The price asked for, else the newest known one of a device; None without one."""
    if given is not None:
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not is_number or not 0 < given < 1e6:
            raise FlopcalcError(
                f"price {format_value(given)} is no price of a GPU-hour: give a positive number of USD, "
                "or leave --price out to take a known one"
            )
        return Rate(float(given), "given")
    found: list[tuple[str, float, str]] = []
    for folder in (find_data_dir(), find_user_dir()):
        path = os.path.join(folder, "prices.toml")
        if not os.path.isfile(path):
            continue
        for entry in load_toml(path).get("price", []):
            try:
                if entry["device"] == device.id:
                    found.append((str(entry["date"]), float(entry["usd_per_gpu_hour"]), str(entry["source"])))
            except (KeyError, TypeError, ValueError) as error:
                raise SpecError(f"{path}: price {format_value(entry)}: {error} is wrong or missing") from None
    if not found:
        return None
    date, price, source = max(found)
    return Rate(price, f"{date}: {source}")


def count_energy(device: Device, gpu_hours: float) -> float | None:
    """kWh at the board's full power: a bound from above, without hosts, network and cooling; None if not known."""
    return None if device.tdp_w is None else device.tdp_w * gpu_hours / 1000
