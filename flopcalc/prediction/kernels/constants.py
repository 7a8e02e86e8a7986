"""The constants of a device, as `flopcalc calibrate --predictor` fits them: their types, their file and its reader."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, NotRequired, TypedDict

from flopcalc.base.data import find_data_dir, find_user_dir
from flopcalc.base.errors import SpecError, format_value
from flopcalc.base.files import MAX_JSON_BYTES, read_json
from flopcalc.base.validate import FromOne, FromZero, Items, Keys, Positive, Rule, find_fault
from flopcalc.base.vocabulary import HostPhase
from flopcalc.hardware.tiles import TABLES
from flopcalc.prediction.kernels.defaults import FORMER, DeviceDefaults, are_fitted, load_defaults

FOLDER = "predictors"
SCHEMA, HOST_SCHEMA = 4, 1

# What a fit may leave at 0, or make negative, may be so below: all that `calibrate --predictor` writes is read.
_Line = Annotated[list[float], Items((FromZero,) * 2)]
_Plane = Annotated[list[float], Items((FromZero,) * 3)]
_Shape = Annotated[list[float], Items((Positive,) * 8 + (FromOne,))]
_Grouped = Annotated[list[float], Items((Positive,) * 6)]
_Call = Annotated[list[float], Items((FromZero,) * 4), Rule(any, "is 0 throughout")]
_Pace = Annotated[list[float], Items((FromZero, float))]
_Point = Annotated[list[float], Items((Positive, Positive))]
_Curve = Annotated[
    list[_Point],
    Rule(
        lambda points: bool(points) and all(low[0] < high[0] for low, high in pairwise(points)),
        "is no curve of rising sizes",
    ),
]
_Modes = Keys(("train", "forward"))


class Provenance(TypedDict):
    """Where, when and with what something was measured; None where it could not be read."""

    device_id: str
    device: NotRequired[str]
    memory_bytes: NotRequired[int | None]
    power_limit_w: NotRequired[float | None]
    sm_clock_max_mhz: NotRequired[int | None]
    driver: NotRequired[str | None]
    cuda: NotRequired[str | None]
    cudnn: NotRequired[int | None]
    torch: NotRequired[str | None]
    transformers: NotRequired[str | None]
    python: NotRequired[str]
    flopcalc: NotRequired[str]
    commit: NotRequired[str | None]
    command: NotRequired[str]
    date: NotRequired[str]


class PlainProducts(TypedDict):
    """Of matrix products: the fields of a ProductShape, and what sizes nearby leave over."""

    shape: _Shape
    residuals: list[tuple[str, FromOne, FromOne, FromOne, Positive]]  # direction, m, n, k, measured over predicted
    # step of the widths -> direction -> how many times longer
    unaligned: Annotated[dict[str, dict[str, Positive]], Keys(names="[1-9][0-9]*")]
    # the table of tiles (model_specs/tiles) that shape and residuals go with; older files have none
    tiles: NotRequired[Annotated[str, Rule(lambda name: name in ("", *TABLES), "is no table of tiles")]]


class ProductConstants(PlainProducts):
    """Of all products."""

    # direction -> the fields of a GroupShape
    grouped: Annotated[dict[str, _Grouped], Keys(("forward", "dgrad", "wgrad"))]
    patches: NotRequired[dict[str, _Line]]  # direction -> seconds of a call, of a FLOP
    narrow: NotRequired[dict[str, _Line]]  # of older files, and nothing reads it
    adapters: NotRequired[dict[str, _Plane]]  # format and form -> seconds of a call, of a byte, of a FLOP


class KernelConstants(TypedDict):
    """Of single kernels."""

    products: ProductConstants
    attention: Annotated[  # kernel -> direction/mask/head dim -> four constants
        dict[str, Annotated[dict[str, _Call], Keys(names=".*/[1-9][0-9]*")]],
        Rule(lambda tables: bool(tables) and all(tables.values()), "lacks entries"),
    ]
    moved: Annotated[dict[str, _Curve], Keys(("pointwise_strided",))]  # kind -> a curve: bytes, seconds
    linear: dict[str, _Line]  # kind -> seconds of a call, of a byte
    optimizer: Annotated[dict[str, _Plane], Keys(("adamw",))]  # kind -> seconds of a step, of a tensor, of a byte


class CompiledConstants(TypedDict):
    """Of compiled steps: the share of memory-bound time that is left, and host seconds of a launch."""

    moved: FromZero
    launch_s: FromZero


class HostConstants(TypedDict):
    """Of the host: seconds of a call and of a unit by phase, of a checkpoint and of a tensor it keeps."""

    train: _Line
    forward: _Line
    decode: _Line
    again: _Line
    units: dict[str, FromZero]
    types: dict[str, dict[str, _Pace]]  # model type -> phase -> seconds of a call, factor
    untried: NotRequired[list[str]]  # those of which only narrow models were timed


class OwnHost(TypedDict):
    """How this machine's host compares with the calibrated one."""

    train: float
    forward: float
    spread: float
    date: str


class WattsShares(TypedDict):
    """What a device draws, in shares of its limit: at rest, while kernels run, at its peak, at its bandwidth."""

    idle: FromZero
    running: FromZero
    compute: FromZero
    memory: FromZero


class WattsConstants(WattsShares):
    """The same of the board that was measured."""

    limit_w: Positive


class Constants(KernelConstants):
    """All of a device."""

    schema: int
    provenance: Provenance
    gaps: Annotated[dict[str, FromZero], _Modes]
    power: _Line
    compiled: CompiledConstants
    error: Annotated[dict[str, FromZero], Keys(("device", "host", "late", "compiled"))]
    host: HostConstants
    probe_s: Annotated[dict[str, Positive], _Modes]
    # in place of some of defaults.json
    fitted: NotRequired[Annotated[dict[str, Any], Rule(are_fitted, "has a name or a value that defaults.json has not")]]
    is_own: NotRequired[bool]  # measured on this very machine
    own_host: NotRequired[OwnHost]
    watts: NotRequired[WattsConstants]  # older files, and machines without NVML, have none


class Edges(TypedDict):
    """Seconds of the probe: the middle of all rounds, and the rounds near both ends."""

    low_s: Positive
    mid_s: Positive
    high_s: Positive


class HostProvenance(TypedDict):
    """Which device's host was measured, and when."""

    device_id: str
    date: str


class MeasuredHost(TypedDict):
    """What `flopcalc calibrate --host` measured on this machine."""

    schema: int
    provenance: HostProvenance
    probe_s: Annotated[dict[str, Edges], _Modes]


# --- Files ------------------------------------------------------------------------------------------------------------
@cache
def load_predictor(device_id: str) -> Constants | None:
    """The constants that were fitted on a device, the user's own first; None where it was never measured.

    The times of another machine's host become those of this one, if it was measured.
    """
    found = load_measured(device_id)
    host = load_host(device_id) if found is not None and not found.get("is_own") else None
    return adapt_host(found, host) if found is not None and host is not None else found


def load_measured(device_id: str) -> Constants | None:
    """The same as they were fitted."""
    own = _read_predictor(find_user_dir(), device_id)
    found = own or load_shipped(device_id)
    return {**found, "is_own": own is not None} if found is not None else None


def load_shipped(device_id: str) -> Constants | None:
    """The constants that flopcalc brings with it."""
    return _read_predictor(find_data_dir(), device_id)


def _read_predictor(folder: str, device_id: str) -> Constants | None:
    path = os.path.join(folder, FOLDER, f"{device_id}.json")
    if not os.path.isfile(path):
        return None
    try:
        data = read_json(path, MAX_JSON_BYTES, SpecError)
    except SpecError as error:
        raise SpecError(f"{error}; `flopcalc calibrate --predictor` makes it again") from None
    if fault := _find_fault(data, SCHEMA, Constants):
        raise SpecError(f"{path}: {fault}; `flopcalc calibrate --predictor` makes it again")
    found: Constants = data
    measured = found["provenance"]["device_id"]
    if measured != device_id:
        raise SpecError(
            f"{path}: was measured on {format_value(measured)}, not on {device_id!r}: remove it, or run `flopcalc "
            f"calibrate --predictor` on {device_id!r}"
        )
    return found


def find_fitted(constants: Constants) -> DeviceDefaults:
    """The fitted numbers of a device: those of its own file, else the defaults."""
    own = {name: value for name, value in constants.get("fitted", {}).items() if name not in FORMER}
    return load_defaults().device._replace(**own)


def _find_fault(data: object, schema: int, kind: type) -> str:
    """What keeps a file's value from being of a schema and a type; nothing where it is."""
    other = data.get("schema") if isinstance(data, dict) else None
    return f"schema {other!r}, this version reads {schema}" if other != schema else find_fault(data, kind).lstrip(".: ")


def name_host_file(device_id: str) -> str:
    return f"{device_id}.host.json"


def load_host(device_id: str) -> MeasuredHost | None:
    """What was measured of this machine's host; None where nothing was."""
    path = os.path.join(find_user_dir(), FOLDER, name_host_file(device_id))
    if not os.path.isfile(path):
        return None
    data = read_json(path, MAX_JSON_BYTES, SpecError)
    if fault := _find_fault(data, HOST_SCHEMA, MeasuredHost):
        raise SpecError(f"{path}: {fault}; `flopcalc calibrate --host` makes it again")
    found: MeasuredHost = data
    return found


def adapt_host(constants: Constants, host: MeasuredHost) -> Constants:
    """Constants whose host's times are those of another host.

    Hosts of other machines follow the probe less than in proportion. On the calibrated machine itself, whose speed
    changes with time, steps follow fully.
    """
    probes, fitted = host["probe_s"], find_fitted(constants)
    train: float = (probes["train"]["mid_s"] / constants["probe_s"]["train"]) ** fitted.host_follows
    forward: float = (probes["forward"]["mid_s"] / constants["probe_s"]["forward"]) ** fitted.host_follows

    compiled = constants["compiled"]
    spread = max((edge["high_s"] - edge["low_s"]) / 2 / edge["mid_s"] for edge in probes.values())
    return {
        **constants,
        "host": scale_host(constants["host"], {"train": train, "forward": forward, "decode": forward}),
        "compiled": {"moved": compiled["moved"], "launch_s": compiled["launch_s"] * forward},
        "probe_s": {mode: probes[mode]["mid_s"] for mode in ("train", "forward")},
        "own_host": {
            "train": train,
            "forward": forward,
            "spread": spread + fitted.interval["host_drift"],
            "date": host["provenance"]["date"],
        },
    }


def scale_host(host: HostConstants, paces: Mapping[HostPhase, float]) -> HostConstants:
    """The same times on a slower or faster host; `paces` has its factor for each phase."""

    def scale(values: Sequence[float], phase: HostPhase) -> list[float]:
        return [float(f"{value * paces[phase]:.5g}") for value in values]

    phases: dict[str, HostPhase] = {"vision train": "train", "vision forward": "forward"}
    phases |= {"train": "train", "forward": "forward", "decode": "decode"}
    return {
        **host,
        "types": {
            kind: {name: [*scale([seconds], phases[name]), factor] for name, (seconds, factor) in table.items()}
            for kind, table in host["types"].items()
        },
        "again": scale(host["again"], "train"),
        "train": scale(host["train"], "train"),
        "forward": scale(host["forward"], "forward"),
        "decode": scale(host["decode"], "decode"),
    }
