"""flopcalc: exact FLOPs and MFU of language and vision-language models, from a config, without running anything."""

from flopcalc._version import __version__
from flopcalc.devices import peak_flops_per_s
from flopcalc.errors import ConfigError, DeviceError, FlopcalcError, RecipeError, SpecError, WorkloadError
from flopcalc.estimate import Estimate, Estimator, bind, estimate_flops
from flopcalc.recipe import Lora, Recipe, make_recipe
from flopcalc.utilization import (
    Utilization,
    calculate_mfu,
    get_gpu_peak_flops,
    hfu,
    mfu,
    profile_model_flops,
)
from flopcalc.workload import Workload, make_workload

__all__ = [
    "__version__",
    # counting
    "estimate_flops", "bind", "Estimate", "Estimator",
    # what is counted
    "Workload", "make_workload", "Recipe", "make_recipe", "Lora",
    # share of the hardware
    "mfu", "hfu", "Utilization", "peak_flops_per_s",
    # the founding documents' names
    "profile_model_flops", "calculate_mfu", "get_gpu_peak_flops",
    # errors
    "FlopcalcError", "ConfigError", "SpecError", "WorkloadError", "RecipeError", "DeviceError",
]  # fmt: skip
