"""The constants of a device, as `flopcalc calibrate --predictor` fits them: their types, their file and its reader."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Literal, NotRequired, TypedDict

from flopcalc.base.data import find_data_dir, find_user_dir
from flopcalc.base.errors import SpecError, format_value
from flopcalc.base.files import MAX_JSON_BYTES, read_json
from flopcalc.base.validate import ANY, FROM_0, FROM_1, POSITIVE, Each, Rule, find_fault

Mode = Literal["train", "forward"]  # with gradients or without
HostPhase = Literal["train", "forward", "decode"]
FOLDER = "predictors"
SCHEMA, HOST_SCHEMA = 4, 1
# A host's speed also changes between a calibration and the step, and types of models follow the probe only roughly:
# relative half width that is added to what the rounds of one calibration show.
_DRIFT = 0.1
# Hosts of other machines follow the probe less than in proportion (to this power): of 32 host-bound steps on machines
# other than the calibrated one (benchmarks/results: blind_steps, blind_steps_2, host_steps) the median error is 5.1 %
# with it and 7.1 % in proportion. On the calibrated machine itself, whose speed changes with time, steps follow fully.
FOLLOWS = 0.75


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

    shape: list[float]
    unaligned: dict[str, dict[str, float]]  # step of the widths -> direction -> how many times longer
    residuals: list[tuple[str, float, float, float, float]]  # direction, m, n, k, measured over predicted


class ProductConstants(PlainProducts):
    """Of all products."""

    grouped: dict[str, list[float]]  # direction -> the fields of a GroupShape
    patches: NotRequired[dict[str, list[float]]]  # direction -> seconds of a call, of a FLOP
    narrow: NotRequired[dict[str, list[float]]]  # number format -> seconds of a call, of a byte
    adapters: NotRequired[dict[str, list[float]]]  # format and form -> seconds of a call, of a byte, of a FLOP


class KernelConstants(TypedDict):
    """Of single kernels."""

    products: ProductConstants
    attention: dict[str, dict[str, list[float]]]  # kernel -> direction/mask/head dim -> four constants
    moved: dict[str, list[list[float]]]  # kind -> a curve: bytes, seconds
    linear: dict[str, list[float]]  # kind -> seconds of a call, of a byte
    optimizer: dict[str, list[float]]  # kind -> seconds of a step, of a tensor, of a byte


class CompiledConstants(TypedDict):
    """Of compiled steps: the share of memory-bound time that is left, and host seconds of a launch."""

    moved: float
    launch_s: float


class HostConstants(TypedDict):
    """Of the host: seconds of a call and of a unit by phase, of a checkpoint and of an operator run again."""

    units: dict[str, float]
    types: dict[str, dict[str, list[float]]]  # model type -> phase -> seconds of a call, factor
    again: list[float]
    train: list[float]
    forward: list[float]
    decode: list[float]


class OwnHost(TypedDict):
    """How this machine's host compares with the calibrated one."""

    train: float
    forward: float
    spread: float
    date: str


class Constants(KernelConstants):
    """All of a device."""

    schema: int
    provenance: Provenance
    gaps: dict[str, float]
    power: list[float]
    compiled: CompiledConstants
    error: dict[str, float]
    host: HostConstants
    probe_s: dict[str, float]
    is_own: NotRequired[bool]  # measured on this very machine
    own_host: NotRequired[OwnHost]


class Edges(TypedDict):
    """Seconds of the probe: the middle of all rounds, and the rounds near both ends."""

    low_s: float
    mid_s: float
    high_s: float


class MeasuredHost(TypedDict):
    """What `flopcalc calibrate --host` measured on this machine."""

    schema: int
    provenance: Provenance
    probe_s: dict[str, Edges]


# --- Files ------------------------------------------------------------------------------------------------------------
_CURVE = Rule(
    [(POSITIVE, POSITIVE)],
    lambda points: bool(points) and all(low[0] < high[0] for low, high in pairwise(points)),
    "is no curve of rising sizes",
)
_CALL = Rule((FROM_0,) * 4, any, "is 0 throughout")
_LINE = (FROM_0, FROM_0)
# The form of a predictor's file. What a fit may leave at 0, or make negative, may be so here: all that `calibrate
# --predictor` writes is read.
_FORM = {
    "provenance": {"device_id": str},
    "products": {
        "shape": (*(POSITIVE,) * 8, FROM_1),
        "residuals": [(str, FROM_1, FROM_1, FROM_1, POSITIVE)],
        "unaligned": Each(Each(POSITIVE), names="[1-9][0-9]*"),
        "grouped": dict.fromkeys(("forward", "dgrad", "wgrad"), (POSITIVE,) * 6),
        "patches?": Each(_LINE),
        "narrow?": Each(_LINE),
        "adapters?": Each((FROM_0,) * 3),
    },
    "attention": Rule(
        Each(Each(_CALL, names=".*/[1-9][0-9]*")),
        lambda tables: bool(tables) and all(tables.values()),
        "lacks entries",
    ),
    "moved": Each(_CURVE, ("pointwise_strided",)),
    "linear": Each(_LINE),
    "optimizer": Each((FROM_0,) * 3, ("adamw",)),
    "gaps": dict.fromkeys(("train", "forward"), FROM_0),
    "power": _LINE,
    "compiled": dict.fromkeys(("moved", "launch_s"), FROM_0),
    "error": dict.fromkeys(("device", "host", "late", "compiled"), FROM_0),
    "host": {
        **dict.fromkeys(("train", "forward", "decode", "again"), _LINE),
        "units": Each(FROM_0),
        "types": Each(Each((FROM_0, ANY))),
    },
    "probe_s": dict.fromkeys(("train", "forward"), POSITIVE),
}
_EDGES = dict.fromkeys(("low_s", "mid_s", "high_s"), POSITIVE)
_HOST_FORM = {"provenance": {"device_id": str, "date": str}, "probe_s": {"train": _EDGES, "forward": _EDGES}}


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
    if fault := _find_fault(data, SCHEMA, _FORM):
        raise SpecError(f"{path}: {fault}; `flopcalc calibrate --predictor` makes it again")
    found: Constants = data
    measured = found["provenance"]["device_id"]
    if measured != device_id:
        raise SpecError(
            f"{path}: was measured on {format_value(measured)}, not on {device_id!r}: remove it, or run `flopcalc "
            f"calibrate --predictor` on {device_id!r}"
        )
    return found


def _find_fault(data: object, schema: int, form: dict[str, object]) -> str:
    """What keeps a file's value from being of a schema and a form; nothing where it is."""
    other = data.get("schema") if isinstance(data, dict) else None
    return f"schema {other!r}, this version reads {schema}" if other != schema else find_fault(data, form).lstrip(".: ")


def name_host_file(device_id: str) -> str:
    return f"{device_id}.host.json"


def load_host(device_id: str) -> MeasuredHost | None:
    """What was measured of this machine's host; None where nothing was."""
    path = os.path.join(find_user_dir(), FOLDER, name_host_file(device_id))
    if not os.path.isfile(path):
        return None
    data = read_json(path, MAX_JSON_BYTES, SpecError)
    if fault := _find_fault(data, HOST_SCHEMA, _HOST_FORM):
        raise SpecError(f"{path}: {fault}; `flopcalc calibrate --host` makes it again")
    found: MeasuredHost = data
    return found


def adapt_host(constants: Constants, host: MeasuredHost) -> Constants:
    """Constants whose host's times are those of another host."""
    probes = host["probe_s"]
    train: float = (probes["train"]["mid_s"] / constants["probe_s"]["train"]) ** FOLLOWS
    forward: float = (probes["forward"]["mid_s"] / constants["probe_s"]["forward"]) ** FOLLOWS

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
            "spread": spread + _DRIFT,
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
        "units": host["units"],
        "types": {
            kind: {name: [*scale([seconds], phases[name]), factor] for name, (seconds, factor) in table.items()}
            for kind, table in host["types"].items()
        },
        "again": scale(host["again"], "train"),
        "train": scale(host["train"], "train"),
        "forward": scale(host["forward"], "forward"),
        "decode": scale(host["decode"], "decode"),
    }
