"""Find a device by name, id or alias, and its dense peak per dtype; an unknown one gets none, never a guess."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from flopcalc.base.data import find_data_dir, find_user_dir, load_toml
from flopcalc.base.errors import DeviceError, SpecError, find_nearest, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.number_formats import find_computed, parse_compute
from flopcalc.base.spelling import spell
from flopcalc.base.vocabulary import DTYPES as DTYPES
from flopcalc.base.vocabulary import Dtype, FusedKernel


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
    sdpa: FusedKernel | None  # the fused kernel that torch's SDPA picks for a plain causal call
    source: str
    date: str
    note: str = ""  # which variant a short name was taken as; empty for an exact name


class KnownDevices(NamedTuple):
    """The device table."""

    devices: tuple[Device, ...]
    ambiguous: dict[str, list[str]]  # short name -> the ids of its variants
    defaults: dict[str, str]  # short name -> the id of the variant that it is taken as


@cache
def load_devices() -> KnownDevices:
    """All devices, with those of the user's own devices.toml, and the short names that fit several."""
    devices: dict[str, Device] = {}
    ambiguous: dict[str, list[str]] = {}
    defaults: dict[str, str] = {}
    for folder in (find_data_dir(), find_user_dir()):
        path = os.path.join(folder, "devices.toml")
        if not os.path.isfile(path):
            continue
        tables = load_toml(path)
        entries = tables.get("device", [])
        names, chosen = tables.get("ambiguous", {}), tables.get("defaults", {})
        if not (isinstance(entries, list) and isinstance(names, dict) and isinstance(chosen, dict)):
            raise SpecError(f"{path}: devices are written [[device]], short names in tables [ambiguous] and [defaults]")
        for entry in entries:
            try:
                device = _read_device(entry)
            except KeyError as error:
                raise SpecError(f"{path}: device {format_value(entry.get('id'))}: {error} is missing") from None
            except (TypeError, ValueError, AttributeError) as error:
                raise SpecError(f"{path}: device {format_value(entry)}: {error}") from None
            devices[device.id] = device
        ambiguous |= {_plain(name): list(ids) for name, ids in names.items()}
        defaults |= {name: str(each) for name, each in chosen.items()}
    return KnownDevices(tuple(devices.values()), ambiguous, defaults)


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


def find_device(name: str) -> Device:
    """The device of this name, id or alias (case, spaces, dashes and underscores aside).

    A short name (h100, a100) is its default variant, and the device's note says so; without a default it is refused.
    """
    if not isinstance(name, str):
        raise DeviceError(f"a device is named by a string, not {format_value(name)}")
    exact = find_detected(name)
    if exact is not None:
        return exact
    variants = _find_variants(name)
    defaults = {_plain(short): each for short, each in load_devices().defaults.items()}
    default = find_detected(defaults.get(_plain(name)) or (variants[0].id if len(variants) == 1 else ""))
    if default is not None:
        return default.replace(note=_describe_default(name, default, variants))
    if variants:
        raise DeviceError(f"device {name!r} is ambiguous: say which of {', '.join(each.id for each in variants)}")
    remedy = f"add it to your own devices.toml (docs/specs.md); for an MFU, {spell('peak', 'FLOPS_PER_S')} is enough"
    why = _load_left_out().get(_plain(name))
    if why is not None:
        raise DeviceError(f"device {format_value(name)} has no peak here: {why}; {remedy}")
    near = _suggest(name)
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    hint = " One device is needed here." if "," in name else hint
    raise DeviceError(f"device {format_value(name)} unknown.{hint} `flopcalc devices` lists them; or {remedy}")


def find_detected(name: str) -> Device | None:
    """The device of exactly this name, id or alias, as a driver prints it; None for any other, short names too."""
    wanted = _plain(name)
    return next((device for device in load_devices().devices if wanted in _list_names(device)), None)


def _describe_default(name: str, default: Device, variants: Sequence[Device]) -> str:
    """'h100 taken as h100-sxm; h100-pcie and h100-nvl differ'."""
    *others, last = [each.id for each in variants if each.id != default.id] or [""]
    differing = f"{', '.join(others)} and {last} differ" if others else f"{last} differs"
    return f"{name.strip()} taken as {default.id}{f'; {differing}' if last else ''}"


def match_devices(name: str) -> list[Device]:
    """The device of exactly this name alone, else all whose names contain it or that it is short for."""
    exact = find_detected(name)
    if exact is not None:
        return [exact]
    wanted, variants = _plain(name), _find_variants(name)
    known = load_devices().devices
    return [device for device in known if device in variants or any(wanted in each for each in _list_names(device))]


def _list_names(device: Device) -> set[str]:
    return {_plain(name) for name in (device.id, device.name, *device.aliases)}


def _find_variants(name: str) -> list[Device]:
    """The devices that a short name stands for: those listed for it, else those whose ids begin with it."""
    devices, ambiguous, _ = load_devices()
    start = re.sub(r"[\s_-]+", "-", name.strip()).lower()
    ids = ambiguous.get(_plain(name))
    if ids is None:
        return [device for device in devices if device.id.startswith(f"{start}-")]
    return [device for each in ids for device in devices if device.id == each]


def _suggest(name: str) -> list[str]:
    """Ids of the same maker and generation as a mistyped name, the most alike first; else any that are alike."""
    wanted = re.sub(_MAKERS, "", name[:100].lower())
    ids = [device.id for device in load_devices().devices]
    for depth in (2, 1):
        family = _name_family(wanted)[:depth]
        same = [each for each in ids if family[0] and _name_family(each)[:depth] == family]
        if same:
            return find_nearest(wanted, same, cutoff=0.0)
    return find_nearest(wanted, ids)


_MAKERS = r"\b(nvidia|amd|instinct|tesla|geforce|google|intel|aws|habana|huawei)\b[\s_-]*"
_NUMBERED = ("rtx", "mi", "tpuv", "gaudi", "trainium")  # families whose generation is a number, not a letter


def _name_family(name: str) -> tuple[str, str]:
    """'h200-sxm' -> ('h', ''), 'rtx-4090' -> ('rtx', '4'): the letters, and the digit of the generation."""
    match = re.match(r"([a-z]*)(\d?)", _plain(name))
    assert match is not None  # it matches anything
    return match[1], match[2] if match[1] in _NUMBERED else ""


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).lower()


def find_sdpa(device: Device | None, kind: str) -> FusedKernel:
    """The fused kernel that torch's SDPA picks for a format on a device; flash where nothing says better."""
    if device is None:
        return "flash"
    return "efficient" if kind in ("fp32", "tf32") else device.sdpa or "flash"


def parse_dtype(dtype: object) -> Dtype:
    """'bf16', 'bfloat16' or torch.bfloat16 -> 'bf16'."""
    return parse_compute(dtype, "dtype", DeviceError)


def peak_flops_per_s(device: str, dtype: object = "bf16") -> float:
    """The dense peak of a device for a dtype, in FLOP/s: `peak_flops_per_s("h100", "fp8")`. Without one, an error."""
    found, kind = find_device(device), parse_dtype(dtype)
    if kind not in found.peak_tflops:
        raise _describe_missing(found, kind)
    return found.peak_tflops[kind] * 1e12


def find_format_peak(device: str, kind: str) -> tuple[float, str]:
    """The dense peak for a format, and the format that it is of: what the device falls back to, where it lacks it."""
    found = find_device(device)
    name: str | None = kind
    while name is not None and name not in found.peak_tflops:
        name = find_computed(name).fallback
    if name is None:
        raise _describe_missing(found, kind)
    return found.peak_tflops[name] * 1e12, name


def _describe_missing(found: Device, kind: str) -> DeviceError:
    near = next((name for name in ("bf16", "fp16") if name in found.peak_tflops), next(iter(found.peak_tflops)))
    return DeviceError(
        f"{found.name} has no known {kind} peak; known: {', '.join(found.peak_tflops)}; {spell('compute', near)} "
        f"counts in {near}, {spell('peak', 'FLOPS_PER_S')} gives a peak by hand"
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
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
