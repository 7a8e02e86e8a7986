"""How busy a device is goes in; the watts that it draws, with an interval and where they come from, come out.

watts = idle + running x share of the time with kernels + compute x share of the peak FLOPs + memory x share of the
bandwidth, bent below the board's limit. The four coefficients are shares of that limit: of the device itself
where it was measured, else fitted to published runs on it, else those of all such devices together
(model_specs/watts.json, which benchmarks/watts.py makes).
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_args

from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import DeviceError, SpecError, WorkloadError
from flopcalc.base.files import MAX_JSON_BYTES, read_json
from flopcalc.base.spelling import spell
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


class Range(NamedTuple):
    """The likeliest value, and the bounds that nine of ten measurements should lie in."""

    low: float
    mid: float
    high: float

    def scale(self, times: float) -> Range:
        return Range(self.low * times, self.mid * times, self.high * times)


class Power(NamedTuple):
    """Watts of one device, and where they come from."""

    watts: Range
    evidence: Evidence
    source: str

    def describe(self) -> str:
        """What watts rest on, and what they leave out."""
        words = {
            "measured": "fitted to measured steps of this GPU",
            "published": "fitted to published serving runs on this GPU",
            "scaled": "not measured on this GPU: shares of its power limit as on others",
        }
        return f"watts are {words[self.evidence]} (docs/energy.md); CPUs, network and cooling are not included"


class Energy(NamedTuple):
    """What the GPUs of a step, or of a whole run, take: watts of one, watt-hours of all, with the site's PUE."""

    power: Power
    wh: Range
    tokens: float
    pue: float = 1.0  # what the site takes over what its computers take
    grid_g_per_kwh: float | None = None  # grams of CO2 of a kWh

    @property
    def wh_per_million_tokens(self) -> Range:
        return self.wh.scale(1e6 / self.tokens)

    @property
    def co2_g(self) -> Range | None:
        return None if self.grid_g_per_kwh is None else self.wh.scale(self.grid_g_per_kwh / 1000)

    def to_dict(self) -> dict[str, Any]:
        co2 = self.co2_g
        return {
            "power_w": self.power.watts._asdict(),
            "wh": self.wh._asdict(),
            "wh_per_million_tokens": self.wh_per_million_tokens._asdict() if self.tokens else None,
            "co2_g": None if co2 is None else co2._asdict(),
            "pue": self.pue,
            "grid_g_per_kwh": self.grid_g_per_kwh,
            "evidence": self.power.evidence,
            "source": self.power.source,
        }


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

    def find(self, shares: Shares) -> Power:
        mid = self.limit_w * draw_power(self.coefficients, shares)
        low, high = self.factors
        watts = Range(mid * low, mid, max(mid, min(mid * high, self.most * self.limit_w)))
        return Power(watts, self.evidence, self.source)


def draw_power(coefficients: tuple[float, float, float, float], shares: Shares) -> float:
    """Share of the limit that a device draws."""
    idle, running, compute, memory = coefficients
    asked = idle + running * shares.running + compute * shares.flops + memory * shares.bandwidth
    return float(asked / (1 + asked**_BEND) ** (1 / _BEND))


def check_site(power: Power | None, pue: float | None, grid: float | None) -> None:
    """Refuse what is given of a site and cannot be used."""
    for name, value in (("pue", pue), ("grid", grid)):
        if value is not None and power is None:
            raise DeviceError(
                f"{spell(name)} needs the device's power limit, which is not known: add tdp_w in your own devices.toml"
            )
    if pue is not None and pue < 1:
        raise WorkloadError(f"{spell('pue')} is what a site takes over what its computers take, 1 or more, not {pue:g}")


def find_energy(
    power: Power | None, seconds: Range, tokens: float, gpus: int, pue: float | None, grid: float | None
) -> Energy | None:
    """What `gpus` devices take in so many seconds; None where their watts are not known."""
    if power is None:
        return None
    watts, times = power.watts, gpus * (pue or 1.0) / 3600
    below = math.hypot(1 - watts.low / watts.mid, 1 - seconds.low / seconds.mid)
    above = math.hypot(watts.high / watts.mid - 1, seconds.high / seconds.mid - 1)
    wh = watts.mid * seconds.mid * times
    return Energy(power, Range(wh * max(0.0, 1 - below), wh, wh * (1 + above)), tokens, pue or 1.0, grid)


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
