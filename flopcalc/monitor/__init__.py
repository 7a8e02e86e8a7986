"""The training monitor: true MFU in every loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flopcalc.monitor.hf import FlopcalcCallback
    from flopcalc.monitor.lightning import FlopcalcMonitor
    from flopcalc.monitor.precise import MeasuredMfu, calculate_mfu_with_profiler, calculate_precise_mfu
    from flopcalc.monitor.settings import Settings, load_settings
    from flopcalc.monitor.training import TrainingMonitor

__all__ = [
    "TrainingMonitor",
    "Settings",
    "load_settings",
    "MeasuredMfu",
    "calculate_mfu_with_profiler",
    "calculate_precise_mfu",
    "FlopcalcCallback",
    "FlopcalcMonitor",
]

# Public name -> module: only users of their callbacks need transformers and lightning.
_HOMES = {
    "training": ("TrainingMonitor",),
    "settings": ("Settings", "load_settings"),
    "precise": ("MeasuredMfu", "calculate_mfu_with_profiler", "calculate_precise_mfu"),
    "hf": ("FlopcalcCallback",),
    "lightning": ("FlopcalcMonitor",),
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"flopcalc.monitor.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'flopcalc.monitor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
