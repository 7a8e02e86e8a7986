"""Megatron-Bridge: `from flopcalc.integrations import megatron_bridge; megatron_bridge.install()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flopcalc.base.errors import RecipeError
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.recipe.recipe import Lora
from flopcalc.integrations.counting import StepCounter, bind_options, replace_attributes
from flopcalc.setup.megatron import map_config

# megatron-bridge 0.3: megatron/bridge/training/utils/flop_utils.py, called in training/train.py once for each step.
# LoRA's targets in Megatron's words -> modules of the HF model.
_TARGETS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def _map_lora(peft: Any) -> Lora | None:
    """LoRA of a Bridge config; canonical LoRA and DoRA are refused."""
    if peft is None:
        return None
    if type(peft).__name__ != "LoRA":
        raise RecipeError(f"{type(peft).__name__} is not counted")
    unknown = [target for target in peft.target_modules if target not in _TARGETS]
    if unknown:
        raise RecipeError(f"LoRA on {unknown[0]} is not counted")
    return Lora(peft.dim, tuple(name for target in peft.target_modules for name in _TARGETS[target]))


class _Bound:
    """The counter of the config that was counted last."""

    def __init__(self, options: dict[str, object]) -> None:
        self.options = options
        self.model: Any = None
        self.counter: StepCounter | None = None

    def count(self, cfg: Any, batch_size: int = 1) -> float:
        """FLOPs of a step on `batch_size` sequences of the model's seq_length, of all GPUs together."""
        if self.counter is None or cfg.model is not self.model:
            self.model = cfg.model
            self.counter = StepCounter(lambda: self._bind(cfg), "Megatron-Bridge")
        return self.counter.count_rows(batch_size, cfg.model.seq_length)

    def _bind(self, cfg: Any) -> Estimator:
        options = dict(self.options)
        if "lora" not in options and "recipe" not in options:
            options["lora"] = _map_lora(getattr(cfg, "peft", None))
        return bind_options(lambda: map_config(cfg.model), options)


def num_floating_point_operations(cfg: object, batch_size: int = 1, **options: object) -> float:
    """Megatron-Bridge's function with exact counts; `install` keeps the bound model between calls."""
    return _Bound(options).count(cfg, batch_size)


def install(**options: object) -> Callable[[], None]:
    """Replace the formula of this process; options are those of flopcalc.bind, and `model=`."""
    from megatron.bridge.training.utils import flop_utils

    return replace_attributes(flop_utils, num_floating_point_operations=_Bound(options).count)
