"""A live model unlike its spec's release, joined to it: renamed modules, experts as modules, ties, checkpointing."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import NamedTuple

from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.base.errors import RecipeError
from flopcalc.core.model.bound import BoundModel
from flopcalc.core.model.ops import (
    Chain,
    Embed,
    Linear,
    Op,
    Stage,
    iterate,
    join,
    list_parameters,
    name_weight,
    remove_hooks,
)
from flopcalc.core.recipe.recipe import Recipe

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


Rules = tuple["Rule", ...]


class LiveParameters(NamedTuple):
    """A live model's parameters by plain name: their sizes, and of a tensor with several names the first one."""

    sizes: Mapping[str, int]
    first: Mapping[str, str]


def join_live(
    model: BoundModel, recipe: Recipe, live: LiveParameters
) -> tuple[BoundModel, Recipe, LiveParameters, Rules]:
    """The model laid out as the live one is, and what was read from the live one under the spec's names.

    A rule of former_names.toml is used where it gives more parameters a name that the spec knows, so that one list
    serves every type and every release; the caller compares all names and sizes afterwards.
    """
    stages = _split_experts(model.stages, live.sizes)
    rules = _choose_rules(live.sizes, list_parameters(stages, has_tied=True))
    for rule in rules:
        live, recipe = _rename(live, recipe, rule)
    stages = _split_experts(model.stages, live.sizes)
    _check_alike(stages, recipe)
    return model.replace(stages=tie_live(stages, live.first)), recipe, live, rules


class Rule(NamedTuple):
    """What the names of a release become under the spec's."""

    pattern: re.Pattern[str]
    name: str

    def rename(self, name: str) -> str:
        """A parameter's or a module's name, which may have a word behind it."""
        path, space, word = name.partition(" ")
        return self.pattern.sub(self.name, f"{path}.").removesuffix(".") + space + word


@cache
def load_rules() -> tuple[Rule, ...]:
    """The rules of model_specs/former_names.toml."""
    tables = load_toml(os.path.join(find_data_dir(), "former_names.toml"))
    return tuple(Rule(re.compile(pattern), name) for pattern, name in tables["renamed"])


def _choose_rules(names: Collection[str], expected: Collection[str]) -> Rules:
    """The rules that give more of these parameters a name that is expected; layers that are alike are tried once."""
    found, known = ({_NUMBER.sub("*", name) for name in each} for each in (names, expected))
    chosen = []

    def count_known(names: Collection[str]) -> int:
        return len(known & set(names)) + len({*map(_fold, known)} & {*map(_fold, names)})

    for rule in load_rules():
        renamed = {rule.rename(name) for name in found}
        if count_known(renamed) > count_known(found):
            chosen.append(rule)
            found = renamed
    return tuple(chosen)


def _fold(name: str) -> str:
    """Experts of any layout have one name."""
    before, experts, _ = name.partition(".experts.")
    return before + experts


def _rename(live: LiveParameters, recipe: Recipe, rule: Rule) -> tuple[LiveParameters, Recipe]:
    rename = rule.rename
    sizes = {rename(name): size for name, size in live.sizes.items()}
    first = {rename(name): rename(own) for name, own in live.first.items()}
    trained = None if recipe.trained is None else frozenset(map(rename, recipe.trained))
    adapters = tuple((rename(path), own) for path, own in recipe.adapters)
    return LiveParameters(sizes, first), recipe.replace(trained=trained, adapters=adapters)


# --- Experts as modules ---------------------------------------------------------------------------------------------

_EXPERT = re.compile(r"(.+)\.(\d+)\.([^.]+)\.weight")
_DOWN = ("down_proj", "w2", "output_linear")


def _split_experts(stages: tuple[Stage, ...], sizes: Mapping[str, int]) -> tuple[Stage, ...]:
    """Stages whose fused experts are a module each in the live model are counted so: LoRA adapts those modules."""
    parts: dict[str, dict[str, None]] = {}  # module of the experts -> names of each one's linear layers
    for name in sizes:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            parts.setdefault(match[1], {})[match[3]] = None
    if not parts:
        return stages

    def split(stage: Stage) -> Stage:
        layers = []
        for layer, chain in enumerate(stage.layers, stage.first):
            path = f"{stage.path}.{layer}" if stage.repeated else stage.path
            layers.append(_split_chain(chain, path, parts, sizes))
        return stage.replace(layers=tuple(layers))

    return tuple(map(split, stages))


def _split_chain(chain: Chain, path: str, parts: Mapping[str, Collection[str]], sizes: Mapping[str, int]) -> Chain:
    made: list[Op | tuple[Chain, ...]] = []
    for item in chain:
        if not isinstance(item, Op):
            made.append(tuple(_split_chain(branch, path, parts, sizes) for branch in item))
            continue
        module = join(path, item.name)
        own = parts.get(module, ())
        if not isinstance(item, Linear) or item.copies < 2 or not own or name_weight(item, module) in sizes:
            made.append(item)
            continue
        is_down = item.param in _DOWN
        names = [name for name in own if (name in _DOWN) == is_down]
        ops = [
            item.replace(name=f"{item.name}.*.{name}", param="weight", n_out=item.n_out // len(names), targets=(),
                         is_bare=False, at="")
            for name in names
        ]  # fmt: skip
        made.append(tuple((op,) for op in ops) if len(ops) > 1 else ops[0])
    return tuple(made)


def _check_alike(stages: tuple[Stage, ...], recipe: Recipe) -> None:
    """One expert speaks for all."""
    adapters = dict(recipe.adapters)
    for stage in stages:
        for layer, chain in enumerate(stage.layers, stage.first):
            for op in iterate(chain):
                if not isinstance(op, Linear) or ".experts.*." not in op.name:
                    continue
                path = join(f"{stage.path}.{layer}" if stage.repeated else stage.path, op.name)
                names = [path.replace("*", copy) for copy in op.copy_names]
                trained = {f"{name}.weight" in (recipe.trained or ()) for name in names}
                if len(trained) > 1 or len({adapters.get(name, ()) for name in names}) > 1:
                    raise RecipeError(f"{path} trains in some experts only, or with other adapters: train all, or none")


# --- Tied tensors ---------------------------------------------------------------------------------------------------


def tie_live(stages: tuple[Stage, ...], first: Mapping[str, str]) -> tuple[Stage, ...]:
    """What is one tensor in the live model is one here: other releases have other defaults for tied heads."""
    owners: dict[str, str] = {}  # first name -> the op's parameter that has it

    def tie(stage: Stage) -> Stage:
        def change(op: Op) -> Op:
            if stage.repeated or not isinstance(op, (Linear, Embed)) or op.copies > 1 or op.again:
                return op
            own = name_weight(op, join(stage.path, op.name))
            if own not in first:
                return op
            owner = owners.setdefault(first[own], own)
            return op.replace(tied=None if owner == own else owner)

        return stage.map_ops(change)

    return tuple(map(tie, stages))


# --- Gradient checkpointing -----------------------------------------------------------------------------------------


def drop_hooks(model: BoundModel) -> BoundModel:
    """The model where checkpointing does not make the embedding's output require a gradient."""
    return model.replace(stages=tuple(map(remove_hooks, model.stages)))


def follow_wrappers(model: BoundModel, wrapped: Collection[str]) -> BoundModel:
    """The model recomputing the layers that torch's checkpoint_wrapper holds, and without the hooks that HF adds."""
    left = set(wrapped)
    stages = []
    for stage in model.stages:
        numbers = range(stage.first, stage.first + len(stage.layers))
        layers = {f"{stage.path}.{number}" for number in numbers} if stage.repeated else {stage.path}
        is_wrapped = layers <= left
        left -= layers if is_wrapped else set()
        stages.append(remove_hooks(stage).replace(checkpoint=is_wrapped))
    if left:
        raise RecipeError(
            f"checkpoint_wrapper holds {min(left)}, and not a whole stack of layers: what is recomputed is not known"
        )
    return model.replace(stages=tuple(stages))
