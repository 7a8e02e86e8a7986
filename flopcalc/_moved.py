"""Modules that moved: their old import paths work for one more release, with a DeprecationWarning."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

# Old module -> the modules that hold its names now.
MOVED = {
    "audio": ("core.model.audio",),
    "calibration": ("hardware.tables",),
    "config": ("core.model.config",),
    "count": (
        "core.count.count",
        "core.count.products",
        "core.count.formulas",
        "core.workload.pairs",
        "hardware.attention_blocks",
    ),
    "coverage": ("core.spec.coverage",),
    "data": ("base.data",),
    "devices": ("hardware.devices",),
    "errors": ("base.errors",),
    "estimate": ("api", "core.estimate.estimate", "core.estimate.counted"),
    "expr": ("core.spec.expressions",),
    "files": ("base.files",),
    "forms": ("base.validate",),
    "frames": ("base.rows",),
    "grids": ("base.text_table",),
    "kernels": ("hardware.kernels",),
    "measure.gpm": ("measure.counters.gpm",),
    "operators": ("prediction.operators", "prediction.recordings", "measure.operator_kinds"),
    "ops": ("core.model.ops", "core.model.expand"),
    "prediction.perfetto": ("report.perfetto",),
    "prediction.plan": ("planning.plan",),
    "recipe": ("core.recipe.recipe", "core.recipe.resolver", "core.recipe.live", "core.model.ops", "core.model.live"),
    "spec": ("core.spec.spec",),
    "traced": ("core.estimate.traced", "api"),
    "units": ("base.units",),
    "utilization": ("core.estimate.utilization", "compat"),
    "values": ("base.frozen",),
    "vision": ("core.images.vision",),
    "words": ("base.vocabulary",),
    "workload": (
        "core.workload.workload",
        "core.workload.batch",
        "core.workload.sums",
        "core.workload.pairs",
    ),
}


class _OldPaths:
    """Finds a module under its old name: a stand-in whose names are looked up where they are now."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:  # noqa: ARG002
        package, _, old = name.partition(".")
        if package != "flopcalc" or old not in MOVED:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self)  # type: ignore[arg-type]  # it has the two methods of a loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name, "An old import path.")

    def exec_module(self, module: ModuleType) -> None:
        import warnings
        from importlib import import_module

        homes = [f"flopcalc.{home}" for home in MOVED[module.__name__.partition(".")[2]]]
        warnings.warn(
            f"{module.__name__} has moved to {homes[0]}; the old path goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )

        def find(name: str) -> Any:
            for home in homes:
                found = import_module(home)
                if hasattr(found, name):
                    return getattr(found, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__dict__["__getattr__"] = find


def install_old_paths() -> None:
    """Ask the old paths after every other finder; once."""
    if not any(isinstance(finder, _OldPaths) for finder in sys.meta_path):
        sys.meta_path.append(_OldPaths())
