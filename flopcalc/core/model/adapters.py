"""PEFT's adapter_config.json: the base model that it names, and those of its LoRA settings that can be applied."""

from __future__ import annotations

from typing import Any, NamedTuple

from flopcalc.base.errors import ConfigError, format_value
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_size

# PEFT's task type -> the head of the model that the adapter was trained on; it trains together with the adapters.
_HEADS = {"SEQ_CLS": "sequence", "TOKEN_CLS": "token", "FEATURE_EXTRACTION": "none"}
_TRAINED = {"SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score")}


class AdapterConfig(NamedTuple):
    """What an adapter's config says."""

    base: str  # a preset's name, a folder or a hub id
    lora: dict[str, Any] | None  # as a recipe takes it; None where it cannot be applied
    note: str
    head: str = ""  # the head that its task type means; empty: the base's own


def read_adapter(config: dict[str, Any], where: str) -> AdapterConfig:
    """The base model and the LoRA settings of an adapter."""
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{where}: an adapter without its base: base_model_name_or_path is {format_value(base)}")
    task = str(config.get("task_type"))
    head = _HEADS.get(task, "")
    labels = f"; task_type {task}: {spell('head', f'{head}:N')} says how many labels" if task in _TRAINED else ""
    kind = str(config.get("peft_type", "LORA"))
    if kind != "LORA":
        return AdapterConfig(
            base, None, f"adapter of {base}: peft_type {kind} is not counted, the base alone is{labels}", head
        )
    rank = check_size(config.get("r"), f"{where}: r")
    targets, save = config.get("target_modules"), config.get("modules_to_save")
    if isinstance(bare := config.get("target_parameters"), list) and isinstance(targets or [], list):
        targets = [*(targets or ()), *(f"param:{name}" for name in bare)]
    is_list = isinstance(targets, list) and targets and all(isinstance(name, str) for name in targets)
    saved = [str(name) for name in save if name not in _TRAINED.get(task, ())] if isinstance(save, list) else []
    if targets == "all-linear" or is_list:
        names = ["all-linear"] if targets == "all-linear" else list(targets or ())
        lora = {"r": rank, "targets": names, **({"save": saved} if saved else {})}
        words = f"adapter of {base}: LoRA r={rank} on {', '.join(names)}{_list_others(config)}{labels}"
        return AdapterConfig(base, lora, words, head)
    what = "PEFT's own for this model" if targets is None else f"the pattern {format_value(targets)}"
    words = f"adapter of {base}: LoRA r={rank}, its targets are {what}: not applied, {spell('lora')} names them{labels}"
    return AdapterConfig(base, None, words, head)


def _list_others(config: dict[str, object]) -> str:
    """Settings that change what is computed, and are left out."""
    switches = (
        "use_dora",
        "rank_pattern",
        "layers_to_transform",
        "layers_pattern",
        "exclude_modules",
        "megatron_config",
    )
    found = [name for name in switches if config.get(name)]
    return f"; {', '.join(found)} not applied" if found else ""
