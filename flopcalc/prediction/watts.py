"""How busy a device is goes in; the watts that it draws, with an interval and where they come from, come out.

watts = idle + running x share of the time with kernels + compute x share of the peak FLOPs + memory x share of the
bandwidth, bent below the board's limit. The four coefficients are shares of that limit: of the device itself
where it was measured, else fitted to published runs on it, else those of all such devices together
(model_specs/watts.json, which benchmarks/watts.py makes).
"""

from __future__ import annotations

import os
from functools import cache
from typing import Annotated, Literal, NamedTuple, TypedDict, get_args

from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import SpecError
from flopcalc.base.files import MAX_JSON_BYTES, read_json
from flopcalc.base.validate import FromZero, Keys, Positive, find_fault
from flopcalc.hardware.devices import Device
from flopcalc.prediction.kernels.constants import WattsShares, load_predictor

Evidence = Literal["measured", "published", "scaled"]
FILE = "watts.json"
SCHEMA = 1
_BEND = 12  # how sharply the limit bends the sum: settled steps of an H200 reach 98 to 100 % of it


class Shares(NamedTuple):
    """How busy a device is: FLOPs over its peak, bytes over its bandwidth, and the share of time with kernels."""

    flops: float
    bandwidth: float
    running: float = 1.0


class Watts(NamedTuple):
    """Watts of one device: the likeliest, and the bounds that nine of ten measurements should lie in."""

    low: float
    mid: float
    high: float


class FittedDevice(TypedDict):
    """The coefficients of a device and where they come from."""

    watts: WattsShares
    evidence: Evidence
    source: str


class FittedWatts(TypedDict):
    """All of the file."""

    schema: int
    made_by: str
    devices: Annotated[dict[str, FittedDevice], Keys(("other",))]
    intervals: Annotated[
        dict[str, tuple[Positive, Positive]], Keys(get_args(Evidence))
    ]  # factors to the low and the high end
    most: FromZero  # of the limit that settled steps were seen to draw


class PowerModel(NamedTuple):
    """The coefficients for a device in shares of its limit, and how far they are to be trusted."""

    coefficients: tuple[float, float, float, float]  # idle, running, compute, memory
    limit_w: float
    evidence: Evidence
    factors: tuple[float, float]  # to the low and the high end
    most: float
    source: str

    def find(self, shares: Shares) -> Watts:
        mid = self.limit_w * draw_power(self.coefficients, shares)
        low, high = self.factors
        return Watts(mid * low, mid, max(mid, min(mid * high, self.most * self.limit_w)))


def draw_power(coefficients: tuple[float, float, float, float], shares: Shares) -> float:
    """Share of the limit that a device draws."""
    idle, running, compute, memory = coefficients
    asked = idle + running * shares.running + compute * shares.flops + memory * shares.bandwidth
    return float(asked / (1 + asked**_BEND) ** (1 / _BEND))


def find_watts(device: Device, flops: float, bandwidth: float, running: float = 1.0) -> Watts | None:
    """Watts of one device that keeps up shares of its peak and bandwidth; None where its power limit is not known.

    `running` is the share of the time in which kernels run.
    """
    model = find_power_model(device)
    return None if model is None else model.find(Shares(flops, bandwidth, running))


def find_power_model(device: Device) -> PowerModel | None:
    """The best that is known of a device's power; None without a limit."""
    fitted = load_watts()
    own = load_predictor(device.id)
    if own is not None and own.get("is_own") and "watts" in own:
        date = own["provenance"].get("date", "")
        return _make_model(own["watts"], "measured", fitted, own["watts"]["limit_w"], f"this machine, {date[:10]}")
    if device.tdp_w is None:
        return None
    entry = fitted["devices"].get(device.id, fitted["devices"]["other"])
    return _make_model(entry["watts"], entry["evidence"], fitted, device.tdp_w, entry["source"])


def _make_model(watts: WattsShares, evidence: Evidence, fitted: FittedWatts, limit_w: float, source: str) -> PowerModel:
    coefficients = (watts["idle"], watts["running"], watts["compute"], watts["memory"])
    low, high = fitted["intervals"][evidence]
    return PowerModel(coefficients, limit_w, evidence, (low, high), fitted["most"], source)


@cache
def load_watts() -> FittedWatts:
    """The coefficients that flopcalc brings with it."""
    path = os.path.join(find_data_dir(), FILE)
    data = read_json(path, MAX_JSON_BYTES, SpecError)
    if fault := find_fault(data, FittedWatts):
        raise SpecError(f"{path}: {fault.lstrip('.: ')}; it is not the file of this version: install flopcalc again")
    found: FittedWatts = data
    return found
