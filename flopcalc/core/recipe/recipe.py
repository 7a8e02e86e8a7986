"""Recipe: what trains (freeze, train only, LoRA), what is recomputed, how samples are clipped; asked per parameter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import translate
from typing import Any, NamedTuple

from flopcalc.core.model.ops import Op, Stage
from flopcalc.errors import RecipeError, format_value
from flopcalc.units import check_size, parse_size

RECOMPUTE = ("none", "full", "full-reentrant")
CLIPPING = ("none", "hooks", "ghost", "fast")  # DP-SGD as Opacus does it
WORDS = ("vision", "audio", "projector", "language")


class Lora(NamedTuple):
    """PEFT's LoRA: rank, targets by name suffix ('all-linear': every linear but the head), modules to save."""

    r: int
    targets: tuple[str, ...]
    save: tuple[str, ...] = ()


class Recipe(NamedTuple):
    """What trains, what is recomputed, how samples are clipped; everything trains by default."""

    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()
    lora: Lora | None = None
    recompute: str = "none"
    # Read from a live model instead: names of the parameters that train, and LoRA's rank per module.
    trained: frozenset[str] | None = None
    adapters: tuple[tuple[str, int], ...] = ()
    clipping: str = "none"

    def to_dict(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "freeze": list(self.freeze),
            "train_only": list(self.train_only),
            "lora": None,
            "recompute": self.recompute,
            "clipping": self.clipping,
        }
        if self.lora is not None:
            shown["lora"] = {"r": self.lora.r, "targets": list(self.lora.targets), "save": list(self.lora.save)}
        if self.trained is not None:
            shown["read_from_model"] = {"trained": len(self.trained), "adapted_modules": len(self.adapters)}
        return shown


def make_recipe(
    *,
    freeze: str | Iterable[str] = (),
    train_only: str | Iterable[str] = (),
    lora: Lora | Mapping[str, Any] | str | None = None,
    recompute: str = "none",
    clipping: str = "none",
) -> Recipe:
    """A checked Recipe; `lora` may be 'r=16,targets=q_proj+v_proj' or a mapping with the same keys."""
    if recompute not in RECOMPUTE:
        raise RecipeError(f"recompute {format_value(recompute)} unknown; known: {', '.join(RECOMPUTE)}")
    chosen = _make_lora(lora)
    only = _patterns(train_only, "train_only")
    if chosen is not None and only:
        raise RecipeError(
            "train-only contradicts lora, which trains its adapters alone: name modules to train beside them in "
            "lora's save=, or freeze some adapters with freeze"
        )
    check_clipping(clipping, recompute)
    return Recipe(_patterns(freeze, "freeze"), only, chosen, recompute, clipping=clipping)


def check_clipping(clipping: str, recompute: str) -> None:
    """Opacus works in module hooks, which checkpointing runs twice or not at all: what goes wrong there is refused."""
    if clipping not in CLIPPING:
        raise RecipeError(f"clipping {format_value(clipping)} unknown; known: {', '.join(CLIPPING)}")
    if clipping in ("ghost", "fast") and recompute != "none":
        raise RecipeError(
            f"clipping {clipping} is not counted with recompute {recompute}: it goes back through the graph twice, and "
            "HF's checkpointing is not made for that; leave recompute out, or take clipping hooks with full-reentrant"
        )
    if clipping == "hooks" and recompute == "full":
        raise RecipeError(
            "clipping hooks with recompute full leaves parameters without per-sample gradients, silently: "
            "take recompute full-reentrant (use_reentrant=True)"
        )


def _patterns(value: str | Iterable[str], what: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable):
        raise RecipeError(f"{what} must be a pattern or several, not {format_value(value)}")
    patterns = tuple(value)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise RecipeError(f"{what}: {format_value(pattern)} is not a pattern")
    return patterns


def _make_lora(value: Lora | Mapping[str, Any] | str | None) -> Lora | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = parse_lora(value)
    if isinstance(value, Lora):
        value = value._asdict()
    if not isinstance(value, Mapping):
        raise RecipeError(f"lora must be r=16,targets=q_proj+v_proj or a mapping, not {format_value(value)}")
    unknown = [key for key in value if key not in ("r", "targets", "save")]
    if unknown:
        raise RecipeError(f"lora: unknown key {format_value(unknown[0])}; known: r, targets, save")
    targets = _patterns(value.get("targets", ()), "lora targets")
    if not targets:
        raise RecipeError("lora needs targets, as in r=16,targets=q_proj+v_proj")
    return Lora(check_size(value.get("r", 8), "lora r"), targets, _patterns(value.get("save", ()), "lora save"))


def parse_lora(text: str) -> dict[str, Any]:
    """'r=16,targets=q_proj+v_proj,save=lm_head' -> a mapping."""
    found: dict[str, Any] = {}
    for piece in text.split(","):
        key, equals, value = piece.partition("=")
        key = key.strip()
        if not equals or key not in ("r", "targets", "save"):
            raise RecipeError(
                f"lora: {format_value(piece)} is not r=…, targets=… or save=…, as in r=16,targets=q_proj+v_proj"
            )
        if key in found:
            raise RecipeError(f"lora: {key} given twice")
        if key == "r":
            found[key] = parse_size(value.strip(), "lora r")
        else:
            found[key] = tuple(entry.strip() for entry in value.split("+"))
    return found


class State(NamedTuple):
    """How one op takes part in training."""

    weight: bool = True
    bias: bool = True
    rank: int = 0  # of its adapter, 0 without one
    adapter_a: bool = True
    adapter_b: bool = True
    saved_copy: bool = False  # PEFT keeps a frozen original beside a module in modules_to_save


ALL_TRAIN = State()
STATELESS = ("attend", "product", "pointwise", "dropout")  # kinds of op without parameters


class Resolver:
    """Answers, for an op at a path, how it trains under a recipe; remembers which patterns matched."""

    def __init__(self, recipe: Recipe, stages: tuple[Stage, ...]) -> None:
        self.recipe = recipe
        self.is_trivial = not (recipe.freeze or recipe.train_only or recipe.lora or recipe.trained is not None)
        self._only = [_Pattern(pattern) for pattern in recipe.train_only]
        self._freeze = [_Pattern(pattern) for pattern in recipe.freeze]
        self._targets = [_Suffix(target) for target in recipe.lora.targets] if recipe.lora else []
        self._save = [_Ending(name) for name in recipe.lora.save] if recipe.lora else []
        self._adapts_any = False
        self._ranks = dict(recipe.adapters)
        # Target names that PEFT maps to bare parameters (fused experts, routers), for modules no longer of that name.
        self._mapped = {name for stage in stages for op in _iterate_kinds(stage) for name in op.targets}
        # Where it does, it turns 'all-linear' into last names, which a convolution may share ('proj').
        self._last_names = {
            (op.name or stage.path).rpartition(".")[2]
            for stage in (stages if self._mapped else ())
            for op in _iterate_kinds(stage)
            if op.kind == "linear" and op.part != "lm_head"
        }
        if recipe.lora is not None:
            self._check_fused(stages)
        # Modules whose weight is one tensor: a pattern that names either sets both.
        self._aliases: dict[str, list[tuple[str, str]]] = {}
        if not self.is_trivial:
            self._find_aliases(stages)

    def _find_aliases(self, stages: tuple[Stage, ...]) -> None:
        groups = {f"{stage.path}.weight": stage.group for stage in stages}
        for stage in stages:
            for layer, op in (
                (layer, op) for layer, chain in enumerate(stage.layers, stage.first) for op in iterate(chain)
            ):
                if op.tied:
                    path = f"{stage.path}.{layer}" if stage.repeated else stage.path
                    own = _weight_name(op, join(path, op.name))
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

    def resolve(self, op: Op, path: str, group: str) -> State:
        """The state of the op whose module is `path`, in the part of the model that `group` names."""
        if self.is_trivial:
            return ALL_TRAIN
        if self.recipe.trained is not None:
            return self._resolve_live(op, path)
        weight_name = _weight_name(op, path)
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
        self._adapts_any = self._adapts_any or rank > 0
        return State(
            weight=saved and not self._frozen(weight_name, group),
            bias=saved and op.bias and not self._frozen(bias_name, group),
            rank=rank,
            adapter_a=not self._frozen(f"{path}.lora_A.default.weight", group),
            adapter_b=not self._frozen(f"{path}.lora_B.default.weight", group),
            saved_copy=saved,
        )

    def _resolve_live(self, op: Op, path: str) -> State:
        assert self.recipe.trained is not None
        trained = self.recipe.trained
        path = path.replace("*", str(op.numbered[0]))  # a module per copy: the first speaks for all
        weight_name = _weight_name(op, path)
        names = [name for name, _ in self._aliases.get(weight_name, [(weight_name, "")])]
        bias_name = f"{path}.{op.bias_name}"
        adapted = weight_name if op.targets else path
        saved = f"{weight_name} saved" in trained
        return State(
            weight=saved or any(name in trained for name in names),
            bias=not trained.isdisjoint((bias_name, f"{bias_name} saved")),
            rank=self._ranks.get(adapted, 0),
            adapter_a=f"{adapted}.lora_A" in trained,
            adapter_b=f"{adapted}.lora_B" in trained,
            saved_copy=saved,
        )

    def _rank(self, op: Op, path: str) -> int:
        assert self.recipe.lora is not None
        rank = self.recipe.lora.r
        if op.is_bare:
            # PEFT adds the ranks of the targets that were fused into one parameter.
            hits = [self._names(name) for name in op.targets]  # a list: every target must be seen
            return rank * len(hits) if hits and all(hits) else 0
        if op.kind not in ("linear", "conv", "embed"):
            return 0
        matched = False
        is_mapped = path.rpartition(".")[2] in self._mapped
        for target in self._targets:
            if target.text == "all-linear":
                # PEFT: every linear module but the head; convolutions and embeddings are not linear.
                is_named = op.kind == "conv" and path.rpartition(".")[2] in self._last_names
                hit = is_named or (op.kind == "linear" and op.adapts)
                target.is_used = target.is_used or hit
            else:
                hit = target.matches(path)
            matched = matched or hit
        return rank if matched and not is_mapped else 0

    def _saves(self, op: Op, path: str) -> bool:
        if op.is_bare or op.kind == "param":
            return False  # no module
        hits = [ending.matches(path) for ending in self._save]  # a list: every one must be seen
        return any(hits)

    def _trains(self, name: str, group: str) -> bool:
        aliases = self._aliases.get(name) or [(name, group)]
        # No short cut: every pattern must see every name, so that one which matches nothing is found.
        chosen = not self._only
        for pattern in self._only:
            for alias, word in aliases:
                if pattern.matches(alias, word):
                    chosen = True
        return not self._frozen(name, group) and chosen

    def _frozen(self, name: str, group: str) -> bool:
        hit = False
        for pattern in self._freeze:
            for alias, word in self._aliases.get(name) or [(name, group)]:
                if pattern.matches(alias, word):
                    hit = True
        return hit

    def check_used(self, paths: Callable[[], Iterable[str]]) -> None:
        """An error for a pattern or target that matched nothing."""
        for what, patterns in (
            ("freeze", self._freeze), ("train-only", self._only), ("lora target", self._targets),
            ("lora save", self._save),
        ):  # fmt: skip
            for pattern in patterns:
                if not pattern.is_used:
                    known = sorted({path.rsplit(".", 1)[-1] for path in paths()})
                    shown = ", ".join(known[:24])
                    raise RecipeError(
                        f"{what} {format_value(pattern.text)} matches no module of this model; "
                        f"module names end in: {shown}"
                    )
        if self._save:
            inner = {
                ".".join(names[:many]) for names in (path.split(".") for path in paths()) for many in range(len(names))
            }
            whole = sorted(path for path in inner if path and any(ending.matches(path) for ending in self._save))
            if whole:
                raise RecipeError(f"lora save: {whole[0]} holds other modules; name those that are to be saved")
        if self._targets and not self._adapts_any:
            raise RecipeError("lora: every target is in save too, and PEFT adapts nothing that it saves")


def check_clipped(stages: tuple[Stage, ...], resolver: Resolver, clipping: str) -> None:
    """Every module that trains must be one whose clipping was proven by a count; an error names the first other."""
    trains_any = False
    for stage in stages:
        for layer, chain in enumerate(stage.layers):
            path = f"{stage.path}.{stage.first + layer}" if stage.repeated else stage.path
            for op in iterate(chain):
                if op.kind in STATELESS or op.frozen or (op.detached and op.kind == "param"):
                    continue
                where = join(path, op.name)
                state = resolver.resolve(op, where, stage.group)
                adapts = state.rank > 0 and (state.adapter_a or state.adapter_b)
                trains = state.weight or (state.bias and op.bias) or adapts
                trains_any = trains_any or trains
                problem = _find_obstacle(op, state, stage.dead[layer], clipping) if trains else ""
                if problem:
                    raise RecipeError(f"clipping {clipping}: {where} {problem}")
    if not trains_any:
        raise RecipeError(f"clipping {clipping}: nothing trains under this recipe, so there is nothing to clip")


def _find_obstacle(op: Op, state: State, is_dead: bool, clipping: str) -> str:
    """Why Opacus cannot clip a module that trains, or why its count is not proven; empty if neither."""
    advice = "; freeze it, or leave clipping out"
    if clipping == "ghost" and op.tied and state.weight and not state.saved_copy:
        return (
            f"is tied to {op.tied}, which ghost clipping refuses: untie them (tie_word_embeddings = false), "
            "freeze them, or take clipping hooks or fast"
        )
    if op.copies > 1 or op.times > 1:
        what = "modules: not proven by a count" if op.kind == "norm" else "experts, whose rows are not samples"
        return f"is a stack of {what}{advice}"
    if is_dead or op.unused or op.detached:
        return f"gets no gradient, so Opacus finds no per-sample gradient{advice}"
    if op.kind == "embed" and state.rank:
        return "has LoRA's matrices as bare parameters, which Opacus gives no per-sample gradient: leave it out of lora"
    is_plain = op.kind in ("linear", "embed", "norm") and not (op.is_bare or op.at or op.again or op.source)
    if not is_plain or (op.kind == "linear" and op.feature not in (("tokens",), ("logits",))):
        return f"is no plain linear layer, embedding or norm: not proven by a count{advice}"
    return ""


class _Pattern:
    """A glob over dotted names, or one of the words; matches a name or any of its parents."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_used = False
        self._regex = re.compile(translate(text))

    def matches(self, name: str, group: str) -> bool:
        hit = self.text == group if self.text in WORDS else self._matches_path(name)
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


class _Ending(_Suffix):
    """PEFT's rule for modules to save: a module's name ends in the text, be there a dot before it or not."""

    def matches(self, path: str) -> bool:
        hit = path.endswith(self.text)
        self.is_used = self.is_used or hit
        return hit


def iterate(chain: Any) -> Iterable[Op]:
    """Every op of a chain in order of execution."""
    for item in chain:
        if isinstance(item, Op):
            yield item
        else:
            yield from iterate(item)


def _iterate_kinds(stage: Stage) -> Iterable[Op]:
    """Every op of a stage, layers that are alike taken once."""
    for chain in dict.fromkeys(stage.layers):
        yield from iterate(chain)


def _weight_name(op: Op, path: str) -> str:
    return path if op.kind == "param" else f"{path}.{op.param}"


def join(path: str, name: str) -> str:
    if name.startswith("/"):
        return name[1:]
    return f"{path}.{name}" if name else path


_WRAPPERS = ("_orig_mod.", "module.", "_module.", "base_model.model.")


def strip(model: Any) -> Any:
    """The model inside torch.compile, DDP, Opacus and their like; PEFT's wrapper stays, for its adapters are read."""
    inside = getattr(model, "_modules", {})
    inner = next((inside[name] for name in ("_orig_mod", "module", "_module") if inside.get(name) is not None), None)
    return model if inner is None else strip(inner)


def unwrap(model: Any) -> Any:
    """The HF model inside those and PEFT."""
    model = strip(model)
    return unwrap(model.get_base_model()) if hasattr(model, "get_base_model") else model


def read_recipe(model: Any, recompute: str | None = None) -> tuple[Recipe, dict[str, int], dict[str, str]]:
    """The recipe of a live model from requires_grad and PEFT adapters, and its parameters' sizes by plain name.

    A tensor with several names has all of them, and the last value maps each to the first.
    """
    trained: set[str] = set()
    ranks: dict[str, int] = {}
    sizes: dict[str, int] = {}
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    fused = _find_fused(model)
    _check_adapters(model)
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        path, dot, rest = full_name.partition(".lora_")
        if dot:
            # lora_A is (r, in) for a linear, (r, in, …) for a convolution, (r, vocab) for an embedding, and
            # (experts · r, in) for a stack of experts; its module is the one before it.
            side = rest.removeprefix("embedding_")[:1]
            adapted, experts = fused.get(path, (_plain_name(path), 1))
            if side == "A":
                ranks[adapted] = int(parameter.shape[0]) // experts
            if parameter.requires_grad:
                trained.add(f"{adapted}.lora_{side}")
            continue
        name = _plain_name(full_name)
        if ".modules_to_save." in name:
            path, _, rest = name.partition(".modules_to_save.")
            if parameter.requires_grad:
                trained.add(f"{path}.{rest.partition('.')[2]} saved")
            continue
        sizes[name] = int(parameter.numel())
        names[name] = first.setdefault(id(parameter), name)
        if parameter.requires_grad:
            trained.add(name)
    if recompute is None:
        recompute = read_recompute(model)
    recipe = Recipe(recompute=recompute, trained=frozenset(trained), adapters=tuple(sorted(ranks.items())))
    return recipe, sizes, names


def _check_adapters(model: Any) -> None:
    """One plain, active LoRA adapter per module is what the count describes; anything else is refused by name."""
    for path, module in model.named_modules():
        adapters = getattr(module, "lora_A", None)
        if adapters is None or not hasattr(module, "active_adapters"):
            continue
        names = {*adapters, *getattr(module, "lora_embedding_A", ())}
        problem = None
        if len(names) > 1:
            problem = f"has {len(names)} adapters"
        elif getattr(module, "merged", False):
            problem = "has its adapter merged"
        elif getattr(module, "disable_adapters", False) or not names & set(module.active_adapters):
            problem = "has its adapter switched off"
        elif any(getattr(module, "use_dora", {}).values()) or any(getattr(module, "lora_bias", {}).values()):
            problem = "uses DoRA or a LoRA bias"
        if problem:
            raise RecipeError(f"{path} {problem}: only one active, plain LoRA adapter per module is counted")


def _find_fused(model: Any) -> dict[str, tuple[str, int]]:
    """PEFT's wrappers of bare parameters: the wrapper's own path -> the parameter it adapts, and its experts."""
    found = {}
    for path, module in model.named_modules():
        name = getattr(module, "parameter_name", None)
        if isinstance(name, str) and hasattr(module, "lora_A"):
            found[path] = (f"{_plain_name(path)}.{name}", int(getattr(module, "num_experts", 1)))
    return found


def _plain_name(name: str) -> str:
    """A parameter's or module's name without what DDP, torch.compile and PEFT wrap around it."""
    for wrapper in _WRAPPERS * 2:
        name = name.removeprefix(wrapper)
    name = name.replace("._orig_mod.", ".").replace(".original_module.", ".")
    while ".base_layer" in name:
        name = name.replace(".base_layer", "")
    return name


def read_recompute(model: Any) -> str:
    """Which gradient checkpointing a live model is set to."""
    if not getattr(model, "is_gradient_checkpointing", False):
        return "none"
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is not None:
            return "full-reentrant" if getattr(function, "keywords", {}).get("use_reentrant") else "full"
    return "full"
