"""The part of a model that one stage of a pipeline holds: its layers, and of embedding, norm and head what it has."""

from __future__ import annotations

from collections import Counter
from typing import Any

from flopcalc.base.errors import ConfigError
from flopcalc.core.estimate.counted import CountedEstimator
from flopcalc.core.estimate.former import tie_live
from flopcalc.core.model.live import iterate_parameters
from flopcalc.core.model.ops import Stage, list_parameters
from flopcalc.core.recipe.live import plain_name


def cut_to_stage(whole: CountedEstimator, module: Any) -> tuple[CountedEstimator, bool] | None:
    """The same recipe on what the module holds, and whether that is given text; None if it has no name of the model."""
    start = _find_start(module, whole.stages)
    if start is None:
        return None
    is_first = any(name.startswith(f"{start}{whole.stages[0].path}.") for name, _ in _list_names(module))
    layers = {  # by their names here and in the model
        f"{stage.path}.{key}.": f"{stage.path}.{number}."
        for stage in whole.stages if stage.repeated
        for key, number in _number_layers(module, start, stage, is_first).items()
    }  # fmt: skip
    first: dict[object, str] = {}
    names: dict[str, str] = {}  # of every parameter -> the first one of its tensor
    for here, tensor in _list_names(module):
        own = here.removeprefix(start)
        own = next((name + own.removeprefix(at) for at, name in layers.items() if own.startswith(at)), own)
        names[own] = first.setdefault(tensor, own)
    stages: list[Stage] = []
    for stage in whole.stages:
        if stage.reads is not None or stage.adds is not None:
            raise ConfigError(f"{whole.source.name} hands on outputs between layers: its stages are not told apart")
        if not stage.repeated:
            stages += [stage] * (list_parameters([stage], has_tied=True).keys() <= names.keys())
            continue
        for i, chain in enumerate(stage.layers):
            number = stage.first + i
            if f"{stage.path}.{number}." in layers.values():
                stages.append(stage.replace(layers=(chain,), dead=stage.dead[i : i + 1], first=number))
    stages = list(tie_live(tuple(stages), names))
    if differing := sorted(list_parameters(stages).keys() ^ set(names.values())):
        raise ConfigError(f"a stage of {whole.source.name} is not made of its whole layers ({differing[0]})")
    if not is_first:  # a gradient goes back to the stage before, whatever trains
        stages[0] = stages[0].replace(input_gradient=True)
    part = CountedEstimator(
        whole.model.replace(stages=tuple(stages)), whole.recipe, whole.convention, whole.asked_kernel, whole.device,
        formats=whole.formats, routing=whole.asked_routing,
    )  # fmt: skip
    return part, is_first


def _list_names(module: Any) -> list[tuple[str, object]]:
    """Its parameters' plain names, without adapters, and what is one object for all names of a tensor."""
    return [(plain_name(name), own) for name, _, own in iterate_parameters(module) if ".lora_" not in name]


def _find_start(module: Any, stages: tuple[Stage, ...]) -> str | None:
    """What the model's names have before them here."""
    names = [f".{name}" for name, _ in _list_names(module)]
    starts = Counter(
        name[1 : name.find(f".{stage.path}.") + 1] for stage in stages for name in names if f".{stage.path}." in name
    )
    return starts.most_common(1)[0][0] if starts else None


def _number_layers(module: Any, start: str, stage: Stage, is_first: bool) -> dict[str, int]:
    """The key of each layer that is here -> its number in the model, which HF's layers know.

    Deleting layers from a list numbers the rest anew; others keep their numbers as keys.
    """
    found: dict[str, int] = {}
    known: set[str] = set()
    path = f"{start}{stage.path}."
    for name, each in module.named_modules():
        plain = plain_name(f"{name}.")
        key = plain.removeprefix(path).partition(".")[0]
        if not plain.startswith(path) or not key.isdigit():
            continue
        number = getattr(each, "layer_idx", None)
        if isinstance(number, int):
            found[key] = number
            known.add(key)
        found.setdefault(key, int(key))
    if len(stage.kinds) > 1 and "0" in found.keys() - known and not is_first:
        raise ConfigError(
            f"{stage.path} has layers of several kinds, and a stage does not say which: keep their numbers"
        )
    return found
