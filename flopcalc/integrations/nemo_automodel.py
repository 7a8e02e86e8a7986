"""NeMo Automodel: `from flopcalc.integrations import nemo_automodel; nemo_automodel.install()` replaces formulas."""

from __future__ import annotations

import sys
from collections.abc import Callable

from flopcalc.integrations.counting import StepCounter, bind_options, replace_attributes

# nemo-automodel 0.7: nemo_automodel/components/utils/flops_utils.py
_NAME = "get_flops_formula_for_hf_config"
_DEFAULT_LENGTH = 2048  # theirs, of a config without max_position_embeddings


def get_flops_formula_for_hf_config(config: object, **options: object) -> Callable[..., float] | None:
    """f(config, gbs=1, seq_len=None) -> FLOPs of a training step; None, as theirs, if the model is not known."""
    bound, counter = config, _make_counter(config, options)
    if counter.estimator is None:
        return None

    def count(config: object, gbs: int = 1, seq_len: int | None = None) -> float:
        nonlocal bound, counter
        if config is not bound:
            bound, counter = config, _make_counter(config, options)
        length = getattr(config, "max_position_embeddings", _DEFAULT_LENGTH) if seq_len is None else seq_len
        return counter.count_rows(gbs, length)

    return count


def _make_counter(config: object, options: dict[str, object]) -> StepCounter:
    return StepCounter(lambda: bind_options(lambda: config, options), "NeMo Automodel")


def install(**options: object) -> Callable[[], None]:
    """Replace the formulas of this process; options are those of flopcalc.bind, and `model=`."""
    from nemo_automodel.components.utils import flops_utils

    theirs = getattr(flops_utils, _NAME)

    def ours(config: object) -> Callable[..., float] | None:
        return get_flops_formula_for_hf_config(config, **options)

    # Recipes that were imported before hold the function under their own name.
    holders = [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "nemo_automodel" and vars(module).get(_NAME) is theirs
    ]
    undos = [replace_attributes(holder, **{_NAME: ours}) for holder in holders]

    def undo() -> None:
        for each in undos:
            each()

    return undo
