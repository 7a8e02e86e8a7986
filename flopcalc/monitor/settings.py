"""A YAML, TOML or JSON file, or a mapping, in; checked Settings and a list of warnings out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, Literal, get_args

from flopcalc.base.data import read_table
from flopcalc.base.errors import ConfigError, FlopcalcError, format_nearest, format_value
from flopcalc.base.files import read_path
from flopcalc.base.frozen import Value, frozen
from flopcalc.hardware.devices import parse_dtype
from flopcalc.hardware.routing import Routing, parse_routing
from flopcalc.monitor.keys import STYLES

MODES = ("smart", "profiler", "estimate", "hybrid")
SINKS = ("jsonl", "wandb", "tensorboard", "mlflow")
WANDB_MODES = ("online", "offline", "disabled", "shared")
TrainingPhase = Literal["warmup", "main", "finetune"]
PHASES: tuple[TrainingPhase, ...] = get_args(TrainingPhase)
# Steps between two measurements; main follows flops_profile_freq.
_PHASE_DEFAULTS: dict[TrainingPhase, int] = {"warmup": 1000, "finetune": 200}


class _DefaultFreq(int):
    """An int of its own type: a frequency that nobody gave."""


DEFAULT_FREQ: int = _DefaultFreq(500)


@frozen()
class Settings(Value):
    """How a monitor works; every field is checked."""

    mode: str = "smart"
    flops_profile_freq: int = DEFAULT_FREQ
    phase_frequencies: dict[TrainingPhase, int] | None = None  # only those that were given
    initial_profiling: bool = True
    calibration_enabled: bool = True
    recalibration_frequency: int | None = None  # None: flops_profile_freq, or the phase's
    hardware_counters_enabled: bool = True
    fallback_to_profiler: bool = True
    detail_every: int = 50
    save_every: int = 200
    dataset_metrics_every: int = 10
    sinks: tuple[str, ...] | None = None  # None: jsonl, and wandb while a run is active
    key_style: str = "flopcalc"
    device: str | None = None
    dtype: str | None = None
    routing: Routing | None = None  # of experts, for HFU; None: even
    # Of one device: one peak for all products, or one per number format.
    peak_flops_per_s: float | dict[str, float] | None = None
    skip_first: int = 2  # steps that no average holds
    stall_factor: float = 3.0  # a step of this many medians is a stall
    straggler_factor: float = 1.1  # a rank of this many medians is a straggler
    wandb_log_dataset_metrics: bool = True
    wandb_reduced_logging: bool = False  # core keys only
    wandb_project: str | None = None
    wandb_entity: str | None = None
    wandb_name: str | None = None
    wandb_mode: str | None = None
    tensorboard_dir: str | None = None
    mlflow_tracking_uri: str | None = None
    mlflow_experiment: str | None = None
    distributed_enabled: bool = True
    tensor_parallel: int | None = None  # None: read from the model's device mesh, as the next two
    context_parallel: int | None = None
    pipeline_parallel: int | None = None
    side_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            object.__setattr__(self, entry.name, _check(entry.name, getattr(self, entry.name), entry.name))

    def frequency(self, phase: TrainingPhase | None = None) -> int:
        """Steps between two measurements in a phase of training."""
        if phase is None:
            return self.flops_profile_freq
        if phase not in PHASES:
            raise ConfigError(f"no phase {format_value(phase)}. Known: {', '.join(PHASES)}")
        given = (self.phase_frequencies or {}).get(phase)
        return given if given is not None else _PHASE_DEFAULTS.get(phase, self.flops_profile_freq)


def check_path(value: object, what: str) -> str:
    """The path of a file or folder."""
    path = read_path(value, what, ConfigError) if isinstance(value, str | os.PathLike) else ""
    if not path:
        kind = "folder" if what.endswith("dir") else "file"
        raise ConfigError(f"{what} is the path of a {kind}, not {format_value(value)}")
    return path


def load_settings(
    config: Mapping[str, object] | str | os.PathLike[str] | Settings | None = None,
    flops_profile_freq: int = DEFAULT_FREQ,
) -> tuple[Settings, list[str]]:
    """Settings, and warnings for the user: frequencies that disagree. Raises ConfigError for what cannot be right."""
    argument = _check("flops_profile_freq", flops_profile_freq, "flops_profile_freq")
    frequencies = [] if isinstance(argument, _DefaultFreq) else [("the constructor's flops_profile_freq", argument)]
    if isinstance(config, Settings):
        if not isinstance(config.flops_profile_freq, _DefaultFreq):
            frequencies.append(("the settings' flops_profile_freq", config.flops_profile_freq))
        settings = config
    else:
        where, content = _read(config)
        known = {key: _check(_FIELDS[key], value, f"{where}: {key}") for key, value in _flatten(content, where)}
        frequencies += [(key, known.pop(key)) for key in _FREQUENCIES if key in known]
        phases = {name: known.pop(_PHASE_KEYS[name]) for name in PHASES if _PHASE_KEYS[name] in known}
        values = {_FIELDS[key]: value for key, value in known.items()}
        settings = Settings(**values, phase_frequencies=phases or None)
    if frequencies:
        settings = replace(settings, flops_profile_freq=frequencies[0][1])
    warnings = []
    if len({value for _, value in frequencies}) > 1:
        said = ", ".join(f"{name} = {value}" for name, value in frequencies)
        warnings.append(f"frequencies disagree: {said}; taking {frequencies[0][0]} = {frequencies[0][1]}")
    return settings, warnings


# Three names of one frequency, the first that is given wins.
_FREQUENCIES = (
    "monitoring.flops_profile_freq",
    "performance_monitoring.measure_flops_frequency",
    "monitor.freq.flops_profile_freq",
)
_PHASE_KEYS = {name: f"monitoring.phase_frequencies.{name}" for name in PHASES}
_FIELDS: dict[str, str] = {
    **dict.fromkeys(_FREQUENCIES, "flops_profile_freq"),
    **dict.fromkeys(_PHASE_KEYS.values(), "flops_profile_freq"),
    "monitoring.mfu_calculation_mode": "mode",
    **{
        f"monitoring.{name}": name
        for name in (
            "detail_every", "save_every", "dataset_metrics_every", "sinks", "key_style", "device", "dtype",
            "routing", "peak_flops_per_s", "skip_first", "stall_factor", "straggler_factor",
        )
    },
    **{f"smart_mode.{name}": name for name in ("initial_profiling", "calibration_enabled", "recalibration_frequency")},
    **{f"hybrid_mode.{name}": name for name in ("hardware_counters_enabled", "fallback_to_profiler")},
    **{
        f"wandb.{name}": f"wandb_{name}"
        for name in ("log_dataset_metrics", "reduced_logging", "project", "entity", "name", "mode")
    },
    "tensorboard.log_dir": "tensorboard_dir",
    "mlflow.tracking_uri": "mlflow_tracking_uri",
    "mlflow.experiment": "mlflow_experiment",
    "distributed.enabled": "distributed_enabled",
    **{f"distributed.{name}": name for name in ("tensor_parallel", "context_parallel", "pipeline_parallel")},
    "distributed.timeout_s": "side_timeout_s",
}  # fmt: skip
_SECTIONS = {key.rsplit(".", count)[0] for key in _FIELDS for count in range(1, key.count(".") + 1)}


def _flatten(content: Mapping[object, object], where: str, section: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; a key that is not known ends it. An empty section is a section left out."""
    for name, value in content.items():
        key = f"{section}{name}"
        if "." in str(name):
            raise ConfigError(f"{where}: key {key!r}: write sections as nested mappings, not with a point")
        if key in _SECTIONS:
            if isinstance(value, Mapping):
                yield from _flatten(value, where, f"{key}.")
            elif value is not None:
                raise ConfigError(f"{where}: {key} is a section of keys, not {format_value(value)}")
        elif key in _FIELDS and isinstance(name, str):
            yield key, value
        else:
            raise ConfigError(f"{where}: unknown key {key!r}.{_suggest(key)}")


def _suggest(key: str) -> str:
    """Keys that end in the same word, or begin with it, this section's first; else keys that look alike."""
    section, _, word = key.rpartition(".")
    same = [known for known in _FIELDS if known.endswith((f".{word}", f"_{word}")) or known.startswith(f"{key}_")]
    if same:
        same.sort(key=lambda known: not known.startswith(f"{section}."))
        return f" Did you mean {', '.join(same[:3])}?"
    return format_nearest(key, [*_FIELDS, *_SECTIONS]) or f" Known sections: {', '.join(sorted(_SECTIONS))}"


def _whole(minimum: int) -> Callable[[Any], Any]:
    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigError(f"must be a whole number of at least {minimum}")
        return value

    return check


def _above(bound: float) -> Callable[[Any], Any]:
    def check(value: object) -> float:
        number = math.nan
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            with suppress(ValueError, OverflowError):
                number = float(value)  # text too: YAML 1.1 reads 989e12, without a point, as one
        if not bound < number < math.inf:
            raise ConfigError(f"must be a number above {bound:g}")
        return number

    return check


def _peaks(value: object) -> float | dict[str, float]:
    if not isinstance(value, Mapping):
        return float(_above(0)(value))
    if not value:
        raise ConfigError("must be a number, or one for each number format")
    found: dict[str, float] = {parse_dtype(name): float(_above(0)(each)) for name, each in value.items()}
    if len(found) < len(value):
        raise ConfigError("has a number format twice")
    return found


def _one_of(known: Sequence[str]) -> Callable[[Any], Any]:
    def check(value: object) -> str:
        if not isinstance(value, str) or value not in known:
            raise ConfigError(f"must be one of {', '.join(known)}")
        return value

    return check


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError("must be true or false")
    return value


def _text(value: object) -> str:
    if isinstance(value, os.PathLike):
        value = read_path(value, "it", ConfigError)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError("must be a text")
    return value


def _sinks(value: object) -> tuple[str, ...]:
    words = f"must be a list of {', '.join(SINKS)}, each once"
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(words)
    names = tuple(_one_of(SINKS)(name) for name in value)
    if len(set(names)) < len(names):
        raise ConfigError(words)
    return names


def _phases(value: object) -> dict[str, int]:
    if not isinstance(value, Mapping) or not set(value) <= set(PHASES):
        raise ConfigError(f"must be a mapping of {', '.join(PHASES)}")
    return {name: _whole(1)(count) for name, count in value.items()}


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "mode": _one_of(MODES),
    "key_style": _one_of(tuple(STYLES)),
    "wandb_mode": _one_of(WANDB_MODES),
    "phase_frequencies": _phases,
    "sinks": _sinks,
    "dtype": parse_dtype,
    "routing": parse_routing,
    "skip_first": _whole(0),
    "peak_flops_per_s": _peaks,
    "side_timeout_s": _above(0),
    "stall_factor": _above(1),
    "straggler_factor": _above(1),
    **dict.fromkeys(
        (
            "flops_profile_freq", "recalibration_frequency", "detail_every", "save_every", "dataset_metrics_every",
            "tensor_parallel", "context_parallel", "pipeline_parallel",
        ),
        _whole(1),
    ),
    **dict.fromkeys(
        (
            "initial_profiling", "calibration_enabled", "hardware_counters_enabled", "fallback_to_profiler",
            "wandb_log_dataset_metrics", "wandb_reduced_logging", "distributed_enabled",
        ),
        _switch,
    ),
    **dict.fromkeys(
        (
            "device", "wandb_project", "wandb_entity", "wandb_name", "tensorboard_dir", "mlflow_tracking_uri",
            "mlflow_experiment",
        ),
        _text,
    ),
}  # fmt: skip
_OPTIONAL = {entry.name for entry in fields(Settings) if entry.default is None}


def _check(name: str, value: object, where: str) -> Any:
    if value is None:
        if name in _OPTIONAL:
            return None
        raise ConfigError(f"{where} is empty: give a value or leave the key out")
    try:
        return _CHECKS[name](value)
    except FlopcalcError as error:
        raise ConfigError(f"{where}: {error}; read {format_value(value)}") from None


def _read(config: object) -> tuple[str, Mapping[Any, Any]]:
    """The content, and the words that name where it came from."""
    if config is None:
        return "config", {}
    if isinstance(config, Mapping):
        return "config", config
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"config must be a mapping or the path of a .yaml, .json or .toml file, not {config!r:.60}")
    path = read_path(config, "config", ConfigError)
    return path, read_table(path, "a monitor's config", "monitor", ConfigError, is_unique=True)
