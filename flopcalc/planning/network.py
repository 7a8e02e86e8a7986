"""What joins the devices of a run: a table per interconnect in, seconds of a collective out."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping
from functools import cache, lru_cache
from math import comb, log
from typing import Any, NamedTuple

from flopcalc.base.data import find_data_dir, find_user_dir, load_toml
from flopcalc.base.errors import DeviceError, SpecError
from flopcalc.base.spelling import spell
from flopcalc.base.vocabulary import check_word
from flopcalc.hardware.devices import find_device

_MIB = 1 << 20
# Bus bandwidth is size / time times this share of (g-1)/g: an all-reduce passes everything twice.
_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
_COPIED = (
    "per_node",
    "inside_mib",
    "inside_gb_per_s",
    "gather_share",
    "floor_us",
    "across_gb_per_s",
    "hop_us",
    "host_gb_per_s",
)
_FOREIGN = 1.2  # what another maker adds to the logarithm of two speeds


class Interconnect(NamedTuple):
    """How fast the devices of a run talk, inside a node and between nodes."""

    id: str
    name: str
    devices: tuple[str, ...]  # whose default it is
    per_node: int
    inside: tuple[tuple[float, float], ...]  # (bytes, bytes per s) of an all-reduce in one node
    gather_share: float
    floor_s: float
    across: float  # bytes per s of one device's port; 0: not known
    hop_s: float
    filling: tuple[tuple[float, float], ...]  # (bytes per port, share of the port) of a collective between nodes
    source: str
    date: str
    host: float = 0.0  # bytes per s between a device and its host's memory, one way; 0: not known

    def __hash__(self) -> int:  # its name suffices: one is looked up for every collective of a plan
        return hash(self.id)


@cache
def load_interconnects() -> dict[str, Interconnect]:
    """Every known interconnect by its id; the user's own interconnects.toml is added."""
    found: dict[str, Interconnect] = {}
    entries: dict[str, dict[str, object]] = {}
    filling: tuple[tuple[float, float], ...] = ()
    for folder in (find_data_dir(), find_user_dir()):
        path = os.path.join(folder, "interconnects.toml")
        if not os.path.isfile(path):
            continue
        tables = load_toml(path)
        try:
            if "filling" in tables:
                sizes = [float(size) * _MIB for size in tables["filling"]["mib_per_port"]]
                shares = [float(share) for share in tables["filling"]["share"]]
                _check_curve(sizes, shares, "mib_per_port and share")
                filling = tuple(zip(sizes, shares, strict=True))
            for entry in tables.get("interconnect", []):
                entries[entry["id"]] = entry
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SpecError(f"{path}: an [[interconnect]] or [filling] cannot be read: {error}") from None
    for name, entry in entries.items():
        try:
            found[name] = _read(entry, entries, filling)
        except KeyError as error:
            raise SpecError(f"interconnects.toml: interconnect {name!r}: {error} is missing") from None
        except (TypeError, ValueError, AttributeError, DeviceError) as error:
            raise SpecError(f"interconnects.toml: interconnect {name!r}: {error}") from None
    return found


def _read(
    entry: dict[str, Any], entries: dict[str, dict[str, Any]], filling: tuple[tuple[float, float], ...]
) -> Interconnect:
    base = entries[entry["like"]] if "like" in entry else {}
    merged = {key: base[key] for key in _COPIED if key in base} | entry
    rates = [float(rate) * 1e9 * merged.get("inside_scale", 1) for rate in merged["inside_gb_per_s"]]
    sizes = [float(size) * _MIB for size in merged["inside_mib"]]
    _check_curve(sizes, rates, "inside_mib and inside_gb_per_s")
    for name in ("per_node", "gather_share"):
        if not merged[name] > 0:
            raise ValueError(f"{name} must be positive, not {merged[name]}")
    if not merged["across_gb_per_s"] >= 0:
        raise ValueError(f"across_gb_per_s must be positive, or 0 if not known, not {merged['across_gb_per_s']}")
    return Interconnect(
        id=merged["id"],
        name=merged["name"],
        devices=tuple(find_device(device).id for device in merged["devices"]),
        per_node=int(merged["per_node"]),
        inside=tuple(zip(sizes, rates, strict=True)),
        gather_share=float(merged["gather_share"]),
        floor_s=float(merged["floor_us"]) * 1e-6,
        across=float(merged["across_gb_per_s"]) * 1e9,
        hop_s=float(merged["hop_us"]) * 1e-6,
        filling=filling,
        source=merged["source"],
        date=merged["date"],
        host=float(merged.get("host_gb_per_s", 0.0)) * 1e9,
    )


def _check_curve(sizes: list[float], rates: list[float], names: str) -> None:
    """Sizes that grow and as many rates, all positive; else an error."""
    is_growing = all(low < high for low, high in zip([0.0, *sizes], sizes, strict=False))
    if not sizes or len(sizes) != len(rates) or not is_growing or min(rates) <= 0:
        raise ValueError(f"{names} must be as many, positive, and sizes must grow")


def _name_neighbour(known: Mapping[str, Interconnect], device: str) -> str:
    """The interconnect of the device whose memory is the nearest in speed; another maker's counts as further off."""
    own = find_device(device)
    maker, speed = own.name.split()[0], own.bandwidth_gb_per_s
    others = [(find_device(other), name) for name, entry in known.items() for other in entry.devices]
    far = {
        (other.name, name): abs(log(other.bandwidth_gb_per_s / speed)) + _FOREIGN * (other.name.split()[0] != maker)
        for other, name in others
        if speed and other.bandwidth_gb_per_s
    }
    if not far:
        return ""
    nearest, name = min(far, key=lambda place: far[place])
    return f"the nearest device with one is {nearest} ({name}); "


def find_interconnect(name: str | None, device: str) -> Interconnect:
    """The interconnect of this id, or without one the usual one of a device."""
    known = load_interconnects()
    if name is None:
        wanted = find_device(device).id
        for entry in reversed(known.values()):  # the user's own come last
            if wanted in entry.devices:
                return entry
        raise DeviceError(
            f"no interconnect is known for {find_device(device).name}: {_name_neighbour(known, device)}say which of "
            f"{', '.join(known)} it has ({spell('interconnect')}), or describe yours in interconnects.toml of "
            "your data folder"
        )
    return known[check_word(name, tuple(known), "interconnect", DeviceError, suggests=True)]


def check_reach(net: Interconnect, devices: int) -> None:
    """An error where a run takes several nodes and the rate between them is not known."""
    if devices > net.per_node and not net.across:
        raise DeviceError(
            f"interconnect {net.id} joins {net.per_node} devices, and no source was read for the rate beyond: plan up "
            f"to {net.per_node}, name another ({spell('interconnect')}), or describe yours with across_gb_per_s in "
            "interconnects.toml of your data folder"
        )


@lru_cache(maxsize=1 << 16)
def time_collective(net: Interconnect, kind: str, size: float, group: int, stride: int = 1) -> float:
    """Seconds of a collective over `group` devices that are `stride` apart; `size` in bytes of the whole array.

    all_reduce, all_gather, reduce_scatter: of the array before or after it; all_to_all: of what one device sends.
    """
    if group == 1 or size <= 0:
        return 0.0
    inside = max(1, min(group, net.per_node // stride))
    share = _PASSES[kind] * (group - 1) / group
    # A measured rate of 8 devices holds for fewer: what counts is a device's own links.
    rate = _interpolate(net.inside, size) * (1.0 if kind == "all_reduce" else net.gather_share)
    if group <= inside:
        return max(net.floor_s, share * size / rate)
    nodes = -(-group // inside)
    hops = net.hop_s * nodes
    if kind == "all_to_all":
        # What stays in the node takes the fast way; the rest leaves through one's own port.
        out = (group - inside) / group * size
        port = net.across * _interpolate(net.filling, out)
        return max(net.floor_s, (inside - 1) / group * size / rate, out / port) + net.floor_s
    # Every member of the ring in a node has a port of its own.
    port = net.across * inside * _interpolate(net.filling, size / inside)
    return max(net.floor_s, share * size / min(rate, port)) + hops


def time_routing(net: Interconnect, size: float, group: int, active: int, groups: tuple[int, int] = (1, 1)) -> float:
    """Seconds of handing tokens to the experts of `group` devices; `size` in bytes of all copies that a device sends.

    A token that reaches several experts of a device is sent there once, and one that reaches several devices of a node
    is sent to the node once and copied inside (as DeepEP and HybridEP do). Experts are drawn evenly, from that many of
    the model's `groups` of them (1 of 1: from all).
    """
    nodes = -(-group // net.per_node)
    if nodes == 1:
        return time_collective(net, "all_to_all", size * count_reached(group, active, groups) / active, group)
    # Of `active` copies (1 - 1/nodes) leave the node, and of the nodes that a token reaches as many are not its own.
    return time_collective(net, "all_to_all", size * count_reached(nodes, active, groups) / active, group)


def count_reached(places: int, active: int, groups: tuple[int, int] = (1, 1)) -> float:
    """At how many of the places a token's experts are, if they are drawn evenly from some of their groups."""
    many, chosen = groups
    most = float(places)
    if chosen < many <= places:
        most = places * chosen / many
    found = most * (1 - (1 - 1 / most) ** active)
    if chosen < many and many > places and many % places == 0:  # several groups at a place
        found = min(found, places * (1 - comb(many - many // places, chosen) / comb(many, chosen)))
    return found


def time_message(net: Interconnect, size: float, stride: int, group: int) -> float:
    """Seconds in which `group` devices each hand `size` bytes to the one `stride` further on; the slowest decides."""
    if stride * group <= net.per_node:
        return net.floor_s / 2 + size / (net.inside[-1][1] * net.gather_share)
    return net.floor_s / 2 + size / (0.9 * net.across)


def _interpolate(points: tuple[tuple[float, float], ...], at: float) -> float:
    """The value at a size, straight in log-log between the points and flat beyond them."""
    sizes = [size for size, _ in points]
    place = bisect_right(sizes, at)
    if place == 0:
        return points[0][1]
    if place == len(points):
        return points[-1][1]
    (low, below), (high, above) = points[place - 1], points[place]
    weight = log(at / low) / log(high / low)
    return float(below * (above / below) ** weight)
