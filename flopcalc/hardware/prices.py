"""A device in; the price of its hour out, with its source."""

from __future__ import annotations

import os
from typing import NamedTuple

from flopcalc.base.data import find_data_dir, find_user_dir, load_toml
from flopcalc.base.errors import DeviceError, FlopcalcError, SpecError, format_value
from flopcalc.base.spelling import spell
from flopcalc.hardware.devices import Device, find_device


class Rate(NamedTuple):
    """A price of one GPU-hour and where it comes from."""

    usd_per_gpu_hour: float
    source: str


def find_price(device: Device, given: float | None) -> Rate | None:
    """The price asked for, else the newest known one of a device, the user's own first; None without one."""
    if given is not None:
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not is_number or not 0 < given < 1e6:
            raise FlopcalcError(
                f"price {format_value(given)} is no price of a GPU-hour: give a positive number of USD, "
                f"or leave {spell('price')} out to take a known one"
            )
        return Rate(float(given), "given")
    for folder in (find_user_dir(), find_data_dir()):
        path = os.path.join(folder, "prices.toml")
        found = [entry for entry in _read_prices(path) if entry[0] == device.id] if os.path.isfile(path) else []
        if found:
            _, date, price, source = max(found)
            return Rate(price, f"{date}: {source}")
    return None


def _read_prices(path: str) -> list[tuple[str, str, float, str]]:
    """Device id, date, price and source of every entry of a prices.toml."""
    found = []
    entries = load_toml(path).get("price", [])
    for entry in entries if isinstance(entries, list) else [entries]:
        try:
            price = float(entry["usd_per_gpu_hour"])
            name, date, source = find_device(entry["device"]).id, str(entry["date"]), str(entry["source"])
        except DeviceError as error:
            raise SpecError(f"{path}: {error}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise SpecError(f"{path}: price {format_value(entry)}: {error} is wrong or missing") from None
        if not 0 < price < 1e6:
            raise SpecError(f"{path}: price {format_value(entry)}: usd_per_gpu_hour must be positive")
        found.append((name, date, price, source))
    return found
