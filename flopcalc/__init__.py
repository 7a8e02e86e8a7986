"""flopcalc: exact FLOPs and MFU of language and vision-language models, from a config, without running anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flopcalc._moved import install_old_paths
from flopcalc._version import __version__
from flopcalc.base.presentation import set_presenter

if TYPE_CHECKING:
    from flopcalc.api import bind, estimate_flops, plan, predict, serving, translate
    from flopcalc.base.errors import ConfigError, DeviceError, FlopcalcError, RecipeError, SpecError, WorkloadError
    from flopcalc.base.presentation import Presenter
    from flopcalc.compat import calculate_mfu, get_gpu_peak_flops, profile_model_flops
    from flopcalc.core.estimate.estimate import Estimate, Estimator
    from flopcalc.core.estimate.translation import Translation
    from flopcalc.core.estimate.utilization import Utilization, hfu, mfu
    from flopcalc.core.recipe.recipe import Lora, Recipe, make_recipe
    from flopcalc.core.workload.workload import Workload, make_workload
    from flopcalc.hardware.devices import peak_flops_per_s
    from flopcalc.monitor.precise import calculate_mfu_with_profiler, calculate_precise_mfu
    from flopcalc.monitor.training import TrainingMonitor
    from flopcalc.planning.local import local_flops
    from flopcalc.planning.plan import Plan
    from flopcalc.prediction.step import Prediction
    from flopcalc.server.serve import ServingAnswer

__all__ = [
    "__version__",
    # counting
    "estimate_flops", "bind", "Estimate", "Estimator",
    # what is counted
    "Workload", "make_workload", "Recipe", "make_recipe", "Lora",
    # share of the hardware
    "mfu", "hfu", "Utilization", "peak_flops_per_s", "translate", "Translation",
    # seconds, bytes and money
    "predict", "Prediction", "plan", "Plan", "local_flops", "serving", "ServingAnswer",
    # in the training loop
    "TrainingMonitor",
    # older names that training code still imports
    "profile_model_flops", "calculate_mfu", "get_gpu_peak_flops",
    "calculate_mfu_with_profiler", "calculate_precise_mfu",
    # errors
    "FlopcalcError", "ConfigError", "SpecError", "WorkloadError", "RecipeError", "DeviceError",
]  # fmt: skip

# Public name -> module: loaded when first used, so that the command line starts with what it needs alone.
_HOMES = {
    "api": ("estimate_flops", "bind", "translate", "predict", "plan", "serving"),
    "compat": ("profile_model_flops", "calculate_mfu", "get_gpu_peak_flops"),
    "core.estimate.estimate": ("Estimate", "Estimator"),
    "core.workload.workload": ("Workload", "make_workload"),
    "core.recipe.recipe": ("Recipe", "make_recipe", "Lora"),
    "core.estimate.translation": ("Translation",),
    "core.estimate.utilization": ("mfu", "hfu", "Utilization"),
    "hardware.devices": ("peak_flops_per_s",),
    "prediction.step": ("Prediction",),
    "planning.plan": ("Plan",),
    "server.serve": ("ServingAnswer",),
    "planning.local": ("local_flops",),
    "monitor.training": ("TrainingMonitor",),
    "monitor.precise": ("calculate_mfu_with_profiler", "calculate_precise_mfu"),
    "base.errors": ("FlopcalcError", "ConfigError", "SpecError", "WorkloadError", "RecipeError", "DeviceError"),
}


def _load_presenter() -> Presenter:
    from flopcalc.report import notebook

    return notebook


install_old_paths()
set_presenter(_load_presenter)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for home, names in _HOMES.items():
        if name in names:
            module = import_module(f"flopcalc.{home}")
            value = getattr(module, name)
            if home == "api":
                module.list_keywords(value)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'flopcalc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
