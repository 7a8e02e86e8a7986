"""A recipe asked per parameter: how each operation takes part in training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import translate
from typing import NamedTuple

from flopcalc.base.errors import RecipeError, format_value
from flopcalc.base.patterns import find_matches
from flopcalc.base.spelling import spell
from flopcalc.base.vocabulary import GROUPS, Clipping, Group
from flopcalc.core.model.ops import Conv, Embed, Linear, Norm, Param, Stage, Weighted, iterate, join, name_weight
from flopcalc.core.recipe.recipe import PARAMETER, REGEX, Adapter, Recipe
from flopcalc.core.spec.spec import HEAD_PARTS
from flopcalc.core.workload.sums import Logits, Tokens


class State(NamedTuple):
    """How one op takes part in training."""

    weight: bool = True
    bias: bool = True
    adapters: tuple[Adapter, ...] = ()
    saved_copy: bool = False  # PEFT keeps a frozen original of each module in modules_to_save

    @property
    def active(self) -> list[Adapter]:
        """The adapters that run."""
        return [adapter for adapter in self.adapters if adapter.is_active]


ALL_TRAIN = State()


class Resolver:
    """Answers, for an op at a path, how it trains under a recipe; remembers which patterns matched."""

    def __init__(self, recipe: Recipe, stages: tuple[Stage, ...]) -> None:
        self.recipe = recipe
        self.is_trivial = not (recipe.freeze or recipe.train_only or recipe.lora or recipe.trained is not None)
        self._only = [_Pattern(pattern) for pattern in recipe.train_only]
        self._freeze = [_Pattern(pattern) for pattern in recipe.freeze]
        self._targets: list[_Suffix] = []
        self._parameters: list[_Suffix] = []  # targets that name parameters
        self._save = [_Ending(name) for name in recipe.lora.save] if recipe.lora else []
        self._exclude = [_Pattern(pattern) for pattern in recipe.lora.exclude] if recipe.lora else []
        self._adapts_any = False
        self._adapters = dict(recipe.adapters)
        # Target names that PEFT maps to bare parameters (fused experts, routers), for modules no longer of that name.
        self._mapped = {name for stage in stages for op in _iterate_kinds(stage) for name in op.targets}
        # Where it does, it turns 'all-linear' into last names, which a convolution may share ('proj').
        self._last_names = {
            (op.name or stage.path).rpartition(".")[2]
            for stage in (stages if self._mapped else ())
            for op in _iterate_kinds(stage)
            if op.kind == Linear.kind and op.part not in HEAD_PARTS
        }
        if recipe.lora is not None:
            names = [target for target in recipe.lora.targets if target.startswith(PARAMETER)]
            self._parameters = [_Suffix(name.removeprefix(PARAMETER)) for name in names]
            modules = [target for target in recipe.lora.targets if target not in names]
            self._targets = [made for target in modules for made in self._make_targets(target, stages)]
            self._check_fused(stages)
        # Modules whose weight is one tensor: a pattern that names either sets both.
        self._aliases: dict[str, list[tuple[str, Group]]] = {}
        if not self.is_trivial:
            self._find_aliases(stages)

    def _make_targets(self, text: str, stages: tuple[Stage, ...]) -> list[_Suffix]:
        """What a target names; PEFT turns a regular expression into last names where it maps targets."""
        if not text.startswith(REGEX):
            return [_Suffix(text)]
        target = _Regex(text, stages)
        names: dict[str, None] = {}
        for _, op, path in _iterate_modules(stages if self._mapped else ()):
            tried = _name_targets(op, path) if op.is_bare else [op.name_first(path)]
            names |= {name.rpartition(".")[2]: None for name in tried if target.names(name)}
        return [_Suffix(name) for name in names] or [target]

    def _find_aliases(self, stages: tuple[Stage, ...]) -> None:
        groups = {f"{stage.path}.weight": stage.group for stage in stages}
        for stage, op, path in _iterate_modules(stages):
            if op.tied:
                own = name_weight(op, path)
                names = self._aliases.setdefault(op.tied, [(op.tied, groups.get(op.tied, stage.group))])
                names.append((own, stage.group))
                self._aliases[own] = names

    def _check_fused(self, stages: tuple[Stage, ...]) -> None:
        for fused in {op.targets for stage in stages for op in _iterate_kinds(stage) if len(op.targets) > 1}:
            present = [name for name in fused if self._names(name)]
            if present and len(present) < len(fused):
                raise RecipeError(
                    f"lora targets {', '.join(fused)} are fused into one parameter: give all of them, or none"
                )

    def _names(self, mapped: str) -> bool:
        """Whether some target names a mapped parameter; marks it as used."""
        hit = False
        for target in self._targets:
            if target.text in ("all-linear", mapped) or target.text.endswith(f".{mapped}"):
                target.is_used = hit = True
        return hit

    def resolve(self, op: Weighted, path: str, group: Group) -> State:
        """The state of the op whose module is `path`, in the part of the model that `group` names."""
        if self.is_trivial:
            return ALL_TRAIN
        if self.recipe.trained is not None:
            return self._resolve_live(op, path)
        weight_name = name_weight(op, path)
        bias_name = f"{path}.{op.bias_name}"
        if self.recipe.lora is None:
            return State(self._trains(weight_name, group), self._trains(bias_name, group) if op.bias else False)
        rank, saved = self._rank(op, path), self._saves(op, path)
        if saved and rank:
            if not any(ending.names(path) for ending in self._save):
                raise RecipeError(
                    f"lora save {', '.join(self.recipe.lora.save)} is the end of {path} too, which lora adapts: PEFT "
                    "would copy the adapter; give the whole last name of what is to be saved"
                )
            rank = 0  # PEFT adapts nothing that it saves
        spared = [pattern.matches(path, group) for pattern in self._exclude]  # a list: every one must be seen
        rank *= not any(spared)
        self._adapts_any = self._adapts_any or rank > 0
        trains = [not self._frozen(f"{path}.lora_{side}.default.weight", group) for side in "AB"]
        return State(
            weight=saved and not self._frozen(weight_name, group),
            bias=saved and op.bias and not self._frozen(bias_name, group),
            adapters=(Adapter(rank, *trains),) if rank else (),
            saved_copy=saved,
        )

    def _resolve_live(self, op: Weighted, path: str) -> State:
        assert self.recipe.trained is not None
        trained = self.recipe.trained
        path = op.name_first(path)
        weight_name = name_weight(op, path)
        names = [name for name, _ in self._aliases.get(weight_name, ())] or [weight_name]
        bias_name = f"{path}.{op.bias_name}"
        adapted = weight_name if op.targets else path
        saved = f"{weight_name} saved" in trained
        return State(
            weight=saved or any(name in trained for name in names),
            bias=not trained.isdisjoint((bias_name, f"{bias_name} saved")),
            adapters=self._adapters.get(adapted, ()),
            saved_copy=saved,
        )

    def _rank(self, op: Weighted, path: str) -> int:
        assert self.recipe.lora is not None
        rank = self.recipe.lora.r
        if op.is_bare:
            # PEFT adds the ranks of the targets that were fused into one parameter.
            hits = [self._names(name) for name in op.targets]  # a list: every target must be seen
            named = [target.matches(name_weight(op, path)) for target in self._parameters]
            return rank * len(hits) if hits and all(hits) else rank * any(named)
        if not isinstance(op, (Linear, Embed)):
            return 0
        matched = False
        is_mapped = path.rpartition(".")[2] in self._mapped
        for target in self._targets:
            if target.text == "all-linear":
                # PEFT: every linear module but the head; convolutions and embeddings are not linear.
                is_named = isinstance(op, Conv) and path.rpartition(".")[2] in self._last_names
                hit = is_named or (op.kind == Linear.kind and op.adapts)
                target.is_used = target.is_used or hit
            else:
                hit = target.matches(self._speak_for_all(target, op, path))
            matched = matched or hit
        return rank if matched and not is_mapped else 0

    def _speak_for_all(self, target: _Suffix, op: Weighted, path: str) -> str:
        """The first copy's name where a regular expression meets a module per copy."""
        if "*" not in path or not isinstance(target, _Regex):
            return path
        names = _name_copies(op, path)
        if len({target.names(name) for name in names}) > 1:
            raise RecipeError(f"lora target {format_value(target.text)} adapts some of {path} only: give all, or none")
        return names[0]

    def _saves(self, op: Weighted, path: str) -> bool:
        if op.is_bare or isinstance(op, Param):
            return False  # no module
        hits = [ending.matches(path) for ending in self._save]  # a list: every one must be seen
        return any(hits)

    def _trains(self, name: str, group: Group) -> bool:
        aliases = self._aliases.get(name) or [(name, group)]
        # No short cut: every pattern must see every name, so that one which matches nothing is found.
        chosen = not self._only
        for pattern in self._only:
            for alias, word in aliases:
                if pattern.matches(alias, word):
                    chosen = True
        return not self._frozen(name, group) and chosen

    def _frozen(self, name: str, group: Group) -> bool:
        hit = False
        for pattern in self._freeze:
            for alias, word in self._aliases.get(name) or [(name, group)]:
                if pattern.matches(alias, word):
                    hit = True
        return hit

    def check_used(self, paths: Callable[[], Iterable[str]]) -> None:
        """An error for a pattern or target that matched nothing."""
        for what, patterns in (
            ("freeze", self._freeze),
            ("train_only", self._only),
            ("lora target", self._targets + self._parameters),
            ("lora save", self._save),
            ("lora exclude", self._exclude),
        ):
            for pattern in patterns:
                if not pattern.is_used:
                    known = sorted({path.rsplit(".", 1)[-1] for path in paths()})
                    shown = ", ".join(known[:24])
                    every = "; all-linear is every linear layer" if what == "lora target" else ""
                    raise RecipeError(
                        f"{spell(what)} {format_value(pattern.text)} matches no module of this model; "
                        f"module names end in: {shown}{every}"
                    )
        if self._save:
            inner = {
                ".".join(names[:many]) for names in (path.split(".") for path in paths()) for many in range(len(names))
            }
            whole = sorted(path for path in inner if path and any(ending.matches(path) for ending in self._save))
            if whole:
                raise RecipeError(f"lora save: {whole[0]} holds other modules; name those that are to be saved")
        if self.recipe.lora is not None and not self._adapts_any:
            which = "exclude" if self._exclude else "save too, and PEFT adapts nothing that it saves"
            raise RecipeError(f"lora: every target is in {which}")


def check_clipped(stages: tuple[Stage, ...], resolver: Resolver, clipping: Clipping) -> None:
    """Every module that trains must be one whose clipping was proven by a count; an error names the first other."""
    trains_any = False
    for stage in stages:
        for layer, chain in enumerate(stage.layers):
            path = f"{stage.path}.{stage.first + layer}" if stage.repeated else stage.path
            for op in iterate(chain):
                if not isinstance(op, Weighted) or op.frozen or (op.detached and isinstance(op, Param)):
                    continue
                where = join(path, op.name)
                state = resolver.resolve(op, where, stage.group)
                adapts = any(adapter.a or adapter.b for adapter in state.active)
                trains = state.weight or (state.bias and op.bias) or adapts
                trains_any = trains_any or trains
                problem = _find_obstacle(op, state, stage.dead[layer], clipping) if trains else ""
                if problem:
                    raise RecipeError(f"clipping {clipping}: {where} {problem}")
    if not trains_any:
        raise RecipeError(f"clipping {clipping}: nothing trains under this recipe, so there is nothing to clip")


def _find_obstacle(op: Weighted, state: State, is_dead: bool, clipping: Clipping) -> str:
    """Why Opacus cannot clip a module that trains, or why its count is not proven; empty if neither."""
    advice = "; freeze it, or leave clipping out"
    if clipping == "ghost" and op.tied and state.weight and not state.saved_copy:
        return (
            f"is tied to {op.tied}, which ghost clipping refuses: untie them (tie_word_embeddings = false), "
            "freeze them, or take clipping hooks or fast"
        )
    if op.copies > 1 or op.times > 1:
        what = "modules: not proven by a count" if isinstance(op, Norm) else "experts, whose rows are not samples"
        return f"is a stack of {what}{advice}"
    if is_dead or op.unused or op.detached:
        return f"gets no gradient, so Opacus finds no per-sample gradient{advice}"
    if isinstance(op, Embed) and state.adapters:
        return "has LoRA's matrices as bare parameters, which Opacus gives no per-sample gradient: leave it out of lora"
    is_plain = op.kind in (Linear.kind, Embed.kind, Norm.kind) and not (op.is_bare or op.at or op.again or op.source)
    if not is_plain or (isinstance(op, Linear) and op.rows not in (Tokens(), Logits())):
        return f"is no plain linear layer, embedding or norm: not proven by a count{advice}"
    return ""


class _Pattern:
    """A glob over dotted names, or one of the words; matches a name or any of its parents."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_used = False
        self._regex = re.compile(translate(text))

    def matches(self, name: str, group: Group) -> bool:
        hit = self.text == group if self.text in GROUPS else self._matches_path(name)
        self.is_used = self.is_used or hit
        return hit

    def _matches_path(self, name: str) -> bool:
        while True:
            if self._regex.match(name):
                return True
            name, dot, _ = name.rpartition(".")
            if not dot:
                return False


class _Suffix:
    """PEFT's rule: a module's name is the target, or ends in a dot and the target."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_used = False

    def names(self, path: str) -> bool:
        """Whether the text is a whole last name, or several."""
        return path == self.text or path.endswith("." + self.text)

    def matches(self, path: str) -> bool:
        hit = self.names(path)
        self.is_used = self.is_used or hit
        return hit


class _Regex(_Suffix):
    """PEFT's rule for a single text: a regular expression for the whole name."""

    def __init__(self, text: str, stages: tuple[Stage, ...]) -> None:
        super().__init__(text)
        # All at once: a slow one is matched by a process, and one for each name would take long.
        modules = [(op, path) for _, op, path in _iterate_modules(stages)]
        self._asked = frozenset(name for each in modules for name in (*_name_copies(*each), *_name_targets(*each)))
        self._matched = self._match(tuple(sorted(self._asked)))

    def names(self, path: str) -> bool:
        return path in (self._matched if path in self._asked else self._match((path,)))

    def _match(self, names: tuple[str, ...]) -> frozenset[str]:
        return find_matches(self.text.removeprefix(REGEX), names, "lora target", RecipeError)


class _Ending(_Suffix):
    """PEFT's rule for modules to save: a module's name ends in the text, with or without a dot before it."""

    def matches(self, path: str) -> bool:
        hit = path.endswith(self.text)
        self.is_used = self.is_used or hit
        return hit


def _iterate_kinds(stage: Stage) -> Iterable[Weighted]:
    """Every op of a stage with parameters, layers that are alike taken once."""
    for chain in stage.kinds:
        yield from (op for op in iterate(chain) if isinstance(op, Weighted))


def _iterate_modules(stages: Iterable[Stage]) -> Iterable[tuple[Stage, Weighted, str]]:
    """Every op with parameters, in every layer, with its path."""
    for stage in stages:
        for layer, chain in enumerate(stage.layers, stage.first):
            path = f"{stage.path}.{layer}" if stage.repeated else stage.path
            yield from ((stage, op, join(path, op.name)) for op in iterate(chain) if isinstance(op, Weighted))


def _name_copies(op: Weighted, path: str) -> list[str]:
    return [path.replace("*", copy) for copy in op.copy_names] if "*" in path else [path]


def _name_targets(op: Weighted, path: str) -> list[str]:
    """Bare parameters, under the names that they had as modules."""
    path = op.name_first(path)
    holder = path.rpartition(".")[0] if isinstance(op, Param) else path
    return [f"{holder}.{name}" for name in op.targets]
