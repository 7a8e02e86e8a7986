"""Fitted numbers that no calibration measures: model_specs/predictors/defaults.json, where each has its source."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import SpecError
from flopcalc.base.files import MAX_JSON_BYTES, read_json
from flopcalc.base.validate import FromZero, find_fault

FILE = "defaults.json"
# Names that older predictor files may hold, and nothing reads.
FORMER = ("attention_share", "attention_start_s", "narrow_rate")


class DeviceDefaults(NamedTuple):
    """Numbers that a device's predictor file may set anew, under `fitted`."""

    expert_streamed: float
    expert_call_s: float
    expert_host_s: float
    experts_slower: float
    host_overlap: float
    large_product_share: Mapping[str, float]
    zero_states_slower: float
    nearby_width: float
    nearby_pull: float
    kernel_error: Mapping[str, float]
    adapter_power: float
    graph_gap_s: float
    graph_moved: float
    wake_operators: float
    generate_slower: float
    new_length_s: float
    host_follows: float
    interval: Mapping[str, float]


class WorkDefaults(NamedTuple):
    """Numbers that hold for all devices."""

    row_s: Mapping[str, tuple[float, float, float]]  # kind -> seconds of a call, of a row, of a byte
    scan_flops_per_byte: Mapping[str, float]
    mix_flops_per_byte: float
    free_share: float
    compiled_keeps: float
    filled_share: float
    trainer: Mapping[str, float]
    float_share: Mapping[str, float]
    odd_sum: float
    float_scores: float
    flash_as_cudnn: tuple[str, ...]  # starts of ids


class FitStart(NamedTuple):
    """Where fits start."""

    product_shape: tuple[float, ...]
    group_shape: tuple[float, ...]


class PlanningDefaults(NamedTuple):
    """How far a step of many devices is from the sum of its parts."""

    overhead: float
    contention: float
    contention_alone: float
    shard_uneven: float
    streamed: float
    sorted: float
    sends_shown: float
    tensor_shown: float
    network_error: float
    published_error: float
    scale_error: tuple[float, float]
    expert_error: tuple[float, float]
    scan_width: float


class Defaults(NamedTuple):
    """All of the file."""

    device: DeviceDefaults
    work: WorkDefaults
    fit_start: FitStart
    planning: PlanningDefaults


@cache
def load_defaults() -> Defaults:
    """The file that flopcalc brings with it."""
    path = os.path.join(find_data_dir(), "predictors", FILE)
    data = read_json(path, MAX_JSON_BYTES, SpecError)

    def take(section: str) -> dict[str, Any]:
        values = {name: entry["value"] for name, entry in data[section].items()}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}

    try:
        return Defaults(
            DeviceDefaults(**take("device")),
            WorkDefaults(**take("work")),
            FitStart(**take("fit_start")),
            PlanningDefaults(**take("planning")),
        )
    except (AttributeError, KeyError, TypeError):
        raise SpecError(f"{path}: is not the file of this version of flopcalc: install it again") from None


def are_fitted(given: Mapping[str, Any]) -> bool:
    """Whether a predictor file's `fitted` holds only numbers that `device` has, under its names."""
    usual = load_defaults().device._asdict()
    return all(name in FORMER or (name in usual and _is_alike(value, usual[name])) for name, value in given.items())


def _is_alike(value: object, usual: object) -> bool:
    kind = dict[str, FromZero] if isinstance(usual, Mapping) else FromZero
    is_named = not isinstance(usual, Mapping) or (isinstance(value, Mapping) and value.keys() == usual.keys())
    return is_named and not find_fault(value, kind)
