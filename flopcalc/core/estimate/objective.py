"""A step of DPO, GRPO, reward training or distillation: the passes that it is the sum of (docs/preference.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flopcalc.base.errors import WorkloadError, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_size, format_bytes, parse_size
from flopcalc.base.vocabulary import OBJECTIVES, check_flag, check_word
from flopcalc.core.estimate.estimate import Estimate, Estimator
from flopcalc.core.workload.workload import Workload

# What may be said of each, besides its name.
KEYS: dict[str, tuple[str, ...]] = {
    "dpo": ("completion", "reference"),
    "grpo": ("completion", "reference", "score"),
    "reward": (),
    "distill": ("completion", "teacher"),
}
_FLAGS = {"yes": True, "no": False}
_OTHERS = {
    **dict.fromkeys(("orpo", "cpo", "simpo"), "is dpo without a reference: give dpo,reference=no"),
    **dict.fromkeys(("kto", "ppo"), "has passes that are not counted; none counts plain training"),
}


@frozen()
class Objective(Value):
    """What a step trains for; its passes have the names that the monitor gives them."""

    name: str
    completion: int | None = None  # tokens at the end of each sequence that grpo generates; only they need logits
    reference: bool | None = None  # whether a reference scores the same texts; default: dpo yes, grpo no
    score: bool = False  # grpo: whether the policy scores its texts once more before it trains
    teacher: Any = None  # distill: its name, path or config

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the model runs; with LoRA that is the model without its adapters."""
        return self.reference if self.reference is not None else self.name == "dpo"

    @property
    def is_paired(self) -> bool:
        """Whether a sample is two sequences, the chosen and the rejected one."""
        return self.name in ("dpo", "reward")


def read_objective(value: object) -> Objective | None:
    """'grpo,completion=512,reference=yes', or a mapping with the name under `name`; 'none' is plain training."""
    if value == "none":
        return None
    if isinstance(value, str):
        name, *pieces = value.split(",")
        said: dict[str, Any] = {"name": name.strip()}
        for piece in pieces:
            key, equals, text = piece.partition("=")
            if not equals or key.strip() in said:
                raise WorkloadError(f"{spell('objective')}: {format_value(piece)} is no KEY=VALUE, or is given twice")
            said[key.strip()] = text.strip()
    elif isinstance(value, Mapping):
        said = dict(value)
    else:
        raise WorkloadError(f"{spell('objective')} is text as in 'dpo', or a mapping, not {format_value(value)}")
    name = said.pop("name", None)
    if isinstance(name, str) and name in _OTHERS:
        raise WorkloadError(f"{spell('objective')}: {name} {_OTHERS[name]}")
    name = check_word(name, OBJECTIVES, spell("objective"), WorkloadError, suggests=True)
    for key, given in said.items():
        if key not in KEYS[name]:
            known = ", ".join(KEYS[name]) or "no settings"
            raise WorkloadError(f"{spell('objective')}: {name} has {known}, not {format_value(key)}")
        if key == "completion":
            said[key] = parse_size(given, key) if isinstance(given, str) else check_size(given, key)
        elif key != "teacher":
            said[key] = check_flag(_FLAGS.get(given, given) if isinstance(given, str) else given, key)
    if name == "distill" and said.get("teacher") is None:
        raise WorkloadError(f"{spell('objective')}: distill needs its teacher, as in distill,teacher=qwen3-32b")
    if name == "grpo" and "completion" not in said:
        raise WorkloadError(
            f"{spell('objective')}: of a sequence grpo generates the last tokens; say how many, as in "
            f"grpo,completion=512"
        )
    return Objective(**{"name": name, **said})


def count_passes(
    objective: Objective, estimator: Estimator, load: Workload, bind_frozen: Callable[[], Estimator]
) -> Estimate:
    """One micro-batch of the objective: the sum of its passes. `bind_frozen` gives the reference, or the teacher."""
    if objective.is_paired:
        load = _double(load)
    passes: dict[str, Estimate] = {}
    if objective.name == "grpo":
        prompt = _make_prompt(objective, load)
        passes["rollout"] = estimator.estimate(prompt)
        if objective.completion != 1:  # the last token is never fed
            assert objective.completion is not None
            new = Workload(load.rows, objective.completion - 1, phase="decode", context=prompt.seq)
            passes["rollout"] += estimator.estimate(new)
    scored = load.replace(phase="forward", decoder=load.decoder and load.decoder.replace(phase="forward"))
    if objective.score:
        passes["score"] = estimator.estimate(scored)
    notes = []
    if objective.has_reference or objective.name == "distill":
        frozen_model = bind_frozen()
        if scored.all_grids and frozen_model.source.config["model_type"] != estimator.source.config["model_type"]:
            raise WorkloadError("a teacher of another type cuts images otherwise: only text can be counted with it")
        passes["reference"] = frozen_model.estimate(scored)
        has_adapters = estimator.recipe.lora is not None and objective.name != "distill"
        held = format_bytes(sum(each.total_bytes for each in frozen_model.count_weights()))
        which = "the model with its adapters off" if has_adapters else f"{frozen_model.source.name}, {held} more"
        notes.append(f"pass reference: {which}; parameters and weights above are those of the model that trains")
    passes = {"train": estimator.estimate(load), **passes}
    if objective.is_paired:
        notes.append(f"{spell('batch')} is in pairs: each is two sequences")
    if len(passes) > 1:
        whole = "whole step" + ": a rollout and all updates on it" * ("rollout" in passes)
        notes.append(f"MFU and HFU count all passes over the time of the {whole}, as perf/mfu_step of the monitor")
    total: Estimate = sum(passes.values())  # type: ignore[assignment]
    return total.replace(passes=passes).add_notes(notes)


def _double(load: Workload) -> Workload:
    """Chosen and rejected sequences, with the same images."""
    return load.replace(
        rows=2 * load.rows,
        documents=load.documents and load.documents * 2,
        grids=load.grids * 2,
        videos=load.videos * 2,
        clips=load.clips * 2,
        decoder=load.decoder and _double(load.decoder),
    )


def _make_prompt(objective: Objective, load: Workload) -> Workload:
    assert objective.completion is not None
    if load.documents is not None or load.decoder is not None:
        raise WorkloadError("grpo is counted for sequences of one length, of a model without an encoder")
    if objective.completion >= load.seq:
        raise WorkloadError(
            f"{spell('objective')}: {objective.completion:,} generated tokens leave no prompt in {load.seq:,}; "
            f"{spell('seq')} is the length of both"
        )
    return load.replace(seq=load.seq - objective.completion, phase="prefill", logits="last")
