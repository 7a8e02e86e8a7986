"""Find a device by exact name, id or alias, and its dense peak per dtype; an unknown one gets none, never a guess."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from flopcalc.base.spelling import spell
from flopcalc.core.recipe.formats import find_computed, parse_compute
from flopcalc.data import find_data_dir, find_user_dir, load_toml
from flopcalc.errors import DeviceError, SpecError, find_nearest, format_value
from flopcalc.values import Value, frozen
from flopcalc.words import DTYPES as DTYPES


@frozen()
class Device(Value):
    """One variant of an accelerator."""

    id: str
    name: str
    aliases: tuple[str, ...]
    peak_tflops: dict[str, float]  # dense, per dtype
    memory_gb: float | None
    bandwidth_gb_per_s: float | None
    tdp_w: float | None
    sdpa: str | None  # the fused kernel that torch's SDPA picks for a plain causal call
    source: str
    date: str


@cache
def load_devices() -> tuple[tuple[Device, ...], dict[str, list[str]]]:
    """All devices (the user's own devices.toml added), and the short names that fit several."""
    devices: dict[str, Device] = {}
    ambiguous: dict[str, list[str]] = {}
    for folder in (find_data_dir(), find_user_dir()):
        path = os.path.join(folder, "devices.toml")
        if not os.path.isfile(path):
            continue
        tables = load_toml(path)
        entries = tables.get("device", [])
        if not isinstance(entries, list) or not isinstance(tables.get("ambiguous", {}), dict):
            raise SpecError(f"{path}: devices are written [[device]], ambiguous names in one [ambiguous] table")
        for entry in entries:
            try:
                device = _read_device(entry)
            except KeyError as error:
                raise SpecError(f"{path}: device {format_value(entry.get('id'))}: {error} is missing") from None
            except (TypeError, ValueError, AttributeError) as error:
                raise SpecError(f"{path}: device {format_value(entry)}: {error}") from None
            devices[device.id] = device
        ambiguous |= {_plain(name): list(ids) for name, ids in tables.get("ambiguous", {}).items()}
    return tuple(devices.values()), ambiguous


def _load_left_out() -> dict[str, str]:
    """Devices that are known but have no source, with and without their maker's name, and why."""
    table = load_toml(os.path.join(find_data_dir(), "devices.toml"))["left_out"]
    makers = ("", "nvidia", "nvidiageforce", "geforce", "apple", "huawei")
    return {f"{maker}{_plain(name)}": why for name, why in table.items() for maker in makers}


def _read_device(entry: dict[str, Any]) -> Device:
    return Device(
        id=entry["id"],
        name=entry["name"],
        aliases=tuple(entry.get("aliases", ())),
        peak_tflops={dtype: float(value) for dtype, value in entry["peak_tflops"].items()},
        memory_gb=entry.get("memory_gb"),
        bandwidth_gb_per_s=entry.get("bandwidth_gb_per_s"),
        tdp_w=entry.get("tdp_w"),
        sdpa=entry.get("sdpa"),
        source=entry["source"],
        date=entry["date"],
    )


def find_device(name: str, *, needs_all: bool = False) -> Device:
    """The device of exactly this name, id or alias (case, spaces, dashes and underscores aside).

    A short name of several variants (a100, h800) gives what they have in common, such as their peaks. `needs_all`: more
    than a peak is read of it, so it must be one variant, and the error of an unknown one offers no peak by hand.
    """
    if not isinstance(name, str):
        raise DeviceError(f"a device is named by a string, not {format_value(name)}")
    exact = _find_exact(name)
    if exact is not None:
        return exact
    variants = _find_variants(name)
    if variants:
        common = _find_common(name, variants)
        if needs_all or not common.peak_tflops:
            if len(variants) == 1:
                raise DeviceError(f"device {name!r} names no variant, and this needs one: give {variants[0].id}")
            raise DeviceError(f"device {name!r} is ambiguous: say which of {_list_ids(variants)}")
        return common
    remedy = (
        "your own devices.toml adds one, with its peaks, bandwidth and memory (docs/specs.md)"
        if needs_all
        else f"{spell('peak', 'FLOPS_PER_S')} gives a peak by hand"
    )
    why = _load_left_out().get(_plain(name))
    if why is not None:
        raise DeviceError(f"device {format_value(name)} has no peak here: {why}; {remedy}")
    near = _suggest(name)
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    raise DeviceError(f"device {format_value(name)} unknown.{hint} `flopcalc devices` lists them; {remedy}")


def match_devices(name: str) -> list[Device]:
    """The device of exactly this name alone, else all whose names contain it or that it is short for."""
    exact = _find_exact(name)
    if exact is not None:
        return [exact]
    wanted = _plain(name)
    variants = _find_variants(name)
    return [
        device for device in load_devices()[0] if device in variants or any(wanted in n for n in _list_names(device))
    ]


def _find_exact(name: str) -> Device | None:
    wanted = _plain(name)
    return next((device for device in load_devices()[0] if wanted in _list_names(device)), None)


def _list_names(device: Device) -> set[str]:
    return {_plain(name) for name in (device.id, device.name, *device.aliases)}


def _find_variants(name: str) -> list[Device]:
    """The devices that a short name stands for: those listed for it, else those whose ids begin with it."""
    devices, ambiguous = load_devices()
    start = re.sub(r"[\s_-]+", "-", name.strip()).lower()
    ids = ambiguous.get(_plain(name))
    if ids is None:
        return [device for device in devices if device.id.startswith(f"{start}-")]
    return [device for each in ids for device in devices if device.id == each]


def _find_common(name: str, variants: Sequence[Device]) -> Device:
    """A device with what all variants share; what differs is not known."""

    def share(values: Sequence[object]) -> Any:
        return values[0] if all(value == values[0] for value in values) else None

    peaks = {
        dtype: peak
        for dtype, peak in variants[0].peak_tflops.items()
        if all(each.peak_tflops.get(dtype) == peak for each in variants)
    }
    return Device(
        id=_plain(name), name=f"{name.strip()} ({_list_ids(variants)})", aliases=(), peak_tflops=peaks,
        memory_gb=share([each.memory_gb for each in variants]),
        bandwidth_gb_per_s=share([each.bandwidth_gb_per_s for each in variants]),
        tdp_w=share([each.tdp_w for each in variants]), sdpa=share([each.sdpa for each in variants]),
        source=variants[0].source, date=variants[0].date,
    )  # fmt: skip


def _list_ids(devices: Sequence[Device]) -> str:
    return ", ".join(device.id for device in devices)


def _suggest(name: str) -> list[str]:
    """Ids of the same maker and generation as a mistyped name, the most alike first; else any that are alike."""
    wanted = re.sub(_MAKERS, "", name[:100].lower())
    ids = [device.id for device in load_devices()[0]]
    for depth in (2, 1):
        family = _name_family(wanted)[:depth]
        same = [each for each in ids if family[0] and _name_family(each)[:depth] == family]
        if same:
            return find_nearest(wanted, same, cutoff=0.0)
    return find_nearest(wanted, ids)


_MAKERS = r"\b(nvidia|amd|instinct|tesla|geforce|google|intel|aws|habana|huawei)\b[\s_-]*"
_NUMBERED = ("rtx", "mi", "tpuv", "gaudi", "trainium")  # families whose generation is a number, not a letter


def _name_family(name: str) -> tuple[str, str]:
    """'h200-sxm' -> ('h', ''), 'rtx-4090' -> ('rtx', '4'): the letters, and the digit that tells the generation."""
    match = re.match(r"([a-z]*)(\d?)", _plain(name))
    assert match is not None  # it matches anything
    return match[1], match[2] if match[1] in _NUMBERED else ""


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).lower()


def find_sdpa(device: Device | None, kind: str) -> str:
    """The fused kernel that torch's SDPA picks for a format on a device; flash where nothing says better."""
    if device is None:
        return "flash"
    return "efficient" if kind in ("fp32", "tf32") else device.sdpa or "flash"


def parse_dtype(dtype: object) -> str:
    """'bf16', 'bfloat16' or torch.bfloat16 -> 'bf16'."""
    return parse_compute(dtype, "dtype", DeviceError)


def peak_flops_per_s(device: str, dtype: object = "bf16") -> float:
    """The dense peak of a device for a dtype, in FLOP/s; where it has none, an error."""
    found, kind = find_device(device), parse_dtype(dtype)
    if kind not in found.peak_tflops:
        raise _describe_missing(device, found, kind)
    return found.peak_tflops[kind] * 1e12


def find_format_peak(device: str, kind: str) -> tuple[float, str]:
    """The dense peak for a format, and the format that it is of: what the device falls back to, where it lacks it."""
    found = find_device(device)
    name: str | None = kind
    while name is not None and name not in found.peak_tflops:
        if any(name in each.peak_tflops for each in _find_variants(device)):
            raise _describe_missing(device, found, name)
        name = find_computed(name).fallback
    if name is None:
        raise _describe_missing(device, found, kind)
    return found.peak_tflops[name] * 1e12, name


def _describe_missing(device: str, found: Device, kind: str) -> DeviceError:
    differing = [each for each in _find_variants(device) if kind in each.peak_tflops and found.id != each.id]
    if differing:
        return DeviceError(
            f"device {device!r} is ambiguous: its variants have different {kind} peaks, so say which of "
            f"{_list_ids(differing)}"
        )
    return DeviceError(
        f"{found.name} has no known {kind} peak; known: {', '.join(found.peak_tflops)}; "
        f"{spell('peak', 'FLOPS_PER_S')} gives one by hand"
    )


def detect_device() -> str | None:
    """The name of this machine's first GPU, from nvidia-smi or an already imported torch; None without one."""
    import subprocess
    import sys

    torch = sys.modules.get("torch")
    if torch is not None:
        try:
            return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        except Exception:  # a broken driver must not break a count
            return None
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
