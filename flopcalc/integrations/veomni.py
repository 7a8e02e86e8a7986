"""VeOmni: `from flopcalc.integrations import veomni; veomni.install()` makes its counter count with flopcalc."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flopcalc.base.errors import RecipeError
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.recipe.recipe import PARAMETER, Lora
from flopcalc.integrations.counting import StepCounter, bind_options, replace_attributes

# VeOmni 0.1: veomni/utils/count_flops.py, veomni/lora/config.py, veomni/trainer/vlm_trainer.py (freeze_vit)
_PLAIN: dict[str, Any] = {
    "exclude_modules": None,
    "bias": "none",
    "rank_pattern": {},
}  # what LoRA's other fields must be


class VeomniFlopsCounter:
    """VeOmni's counter with exact counts of any model that flopcalc knows."""

    def __init__(self, config: object, **options: object) -> None:
        self.config = config
        self.options = options
        self.counter: StepCounter | None = None
        self.trained: tuple[Any, bool] = (None, False)  # the LoRA config and the frozen tower that it counts

    def estimate_flops(
        self,
        batch_seqlens: Sequence[int],
        delta_time: float,
        lora_config: object = None,
        images_seqlens: Sequence[int] | None = None,
        freeze_vit: bool | None = None,
    ) -> tuple[float, float]:
        """TFLOP/s of a training step, and what VeOmni says the device can do; `images_seqlens` are patch counts."""
        from veomni.utils.count_flops import get_device_flops

        lora, is_frozen = self.trained
        if self.counter is None or lora_config is not lora or bool(freeze_vit) != is_frozen:
            self.trained = lora_config, bool(freeze_vit)
            self.counter = StepCounter(lambda: _bind(self.config, self.options, *self.trained), "VeOmni")
        return self.counter.count_documents(batch_seqlens, images_seqlens) / delta_time / 1e12, get_device_flops()


def _bind(config: object, options: dict[str, object], lora_config: object, is_frozen: bool) -> Estimator:
    """The estimator of what trains: LoRA's adapters alone, or all but a frozen vision tower."""
    given = dict(options)
    if lora_config is not None:
        given["lora"] = _map_lora(lora_config)
    elif is_frozen:
        # VeOmni freezes the whole visual module, and keeps the merger of the omni models in training.
        is_omni = getattr(config, "model_type", "") in ("qwen2_5_omni", "qwen3_omni_moe")
        given["recipe"] = {"freeze": ("vision",) if is_omni else ("vision", "projector")}
    return bind_options(lambda: config, given)


def _map_lora(lora_config: Any) -> Lora:
    for name, plain in _PLAIN.items():
        value = getattr(lora_config, name, plain)
        if value not in (plain, None):
            raise RecipeError(f"LoRA with {name}={value!r} is not counted")
    modules = lora_config.target_modules
    if isinstance(modules, str):
        raise RecipeError(f"LoRA with a pattern as target_modules ({modules!r}) is not counted")
    targets = (*(modules or ()), *(f"{PARAMETER}{name}" for name in lora_config.target_parameters or ()))
    return Lora(lora_config.r, targets, tuple(lora_config.modules_to_save or ()))


def install(**options: Any) -> Callable[[], None]:
    """Replace the counter of this process; options are those of flopcalc.bind, and `model=`."""
    from veomni.utils.count_flops import VeomniFlopsCounter as Theirs

    def make(self: Any, config: Any) -> None:
        VeomniFlopsCounter.__init__(self, config, **options)

    return replace_attributes(Theirs, __init__=make, estimate_flops=VeomniFlopsCounter.estimate_flops)
