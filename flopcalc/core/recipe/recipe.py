"""Recipe: what trains (freeze, train only, LoRA), what is recomputed, how samples are clipped; asked per parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flopcalc.base.errors import RecipeError, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.number_formats import find_computed, parse_compute
from flopcalc.base.patterns import find_matches
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_items, check_size, parse_size
from flopcalc.base.vocabulary import CLIPPING, RECOMPUTE, Clipping, Recompute, check_word

_LORA_KEYS = ("r", "targets", "save", "dtype", "exclude")
REGEX = "re:"  # before a target that is a regular expression for whole names, as PEFT takes a single text
PARAMETER = "param:"  # before a target that names a bare parameter, which is in PEFT's target_parameters


@frozen()
class Lora(Value):
    """PEFT's LoRA: rank, targets by name suffix, modules to save.

    'all-linear' is every linear layer but the head; a target that begins with 're:' is a regular expression, one that
    begins with 'param:' is in PEFT's target_parameters. What `exclude` matches gets no adapter: patterns as in freeze.
    """

    r: int
    targets: tuple[str, ...]
    save: tuple[str, ...] = ()
    dtype: str = ""  # of its matrices; empty: PEFT's default, float32 with a half-precision model
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "targets", _patterns(self.targets, "lora targets"))
        if not self.targets:
            raise RecipeError("lora needs targets, as in r=16,targets=q_proj+v_proj or r=16,targets=all-linear")
        for target in self.targets:
            if target.startswith(REGEX):
                find_matches(target.removeprefix(REGEX), (), "lora target", RecipeError)
        put(self, "r", check_size(self.r, "lora r"))
        put(self, "save", _patterns(self.save, "lora save"))
        put(self, "exclude", _patterns(self.exclude, "lora exclude"))
        if not isinstance(self.dtype, str) or self.dtype:
            put(self, "dtype", parse_compute(self.dtype, "lora dtype"))
            if not find_computed(self.dtype).is_everywhere or self.dtype == "tf32":
                raise RecipeError(f"lora dtype {self.dtype}: adapters are fp32, bf16 or fp16")


@frozen()
class Adapter(Value):
    """A LoRA adapter of a live module; one that is not active is held, and never runs."""

    rank: int
    a: bool = True  # whether its first matrix trains
    b: bool = True
    is_active: bool = True


@frozen()
class Recipe(Value):
    """What trains, what is recomputed, and how samples are clipped. By default everything trains.

    `lora` may also be 'r=16,targets=q_proj+v_proj', or a mapping with the same keys. A single pattern needs no list.
    """

    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()
    lora: Lora | None = None
    recompute: Recompute = "none"
    # Read from a live model instead: names of the parameters that train, and LoRA's adapters per module.
    trained: frozenset[str] | None = None
    adapters: tuple[tuple[str, tuple[Adapter, ...]], ...] = ()
    clipping: Clipping = "none"

    def __post_init__(self) -> None:
        put = object.__setattr__
        check_word(self.recompute, RECOMPUTE, spell("recompute"), RecipeError)
        put(self, "lora", _make_lora(self.lora))
        put(self, "train_only", _patterns(self.train_only, "train_only"))
        if self.lora is not None and self.train_only:
            raise RecipeError(
                f"{spell('train_only')} contradicts {spell('lora')}, which trains its adapters alone: name modules to "
                f"train as well in its save=, or freeze some adapters with {spell('freeze')}"
            )
        check_clipping(self.clipping, self.recompute)
        put(self, "freeze", _patterns(self.freeze, "freeze"))

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
            if self.lora.dtype:  # a trace is kept under this, and its own default has none
                shown["lora"]["dtype"] = self.lora.dtype
            if self.lora.exclude:
                shown["lora"]["exclude"] = list(self.lora.exclude)
        if self.trained is not None:
            shown["read_from_model"] = {"trained": len(self.trained), "adapted_modules": len(self.adapters)}
        return shown


def make_recipe(
    *,
    freeze: str | Iterable[str] = (),
    train_only: str | Iterable[str] = (),
    lora: Lora | Mapping[str, object] | str | None = None,
    recompute: Recompute = "none",
    clipping: Clipping = "none",
) -> Recipe:
    """A checked Recipe from plain arguments: `make_recipe(freeze="vision", lora="r=16,targets=all-linear")`."""
    return Recipe(freeze, train_only, lora, recompute, clipping=clipping)  # type: ignore[arg-type]  # it converts them


def check_clipping(clipping: Clipping, recompute: Recompute) -> None:
    """Opacus works in module hooks, which checkpointing runs twice or not at all: what goes wrong there is refused."""
    check_word(clipping, CLIPPING, "clipping", RecipeError)
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
    patterns = tuple(check_items(value, what, RecipeError, "a pattern or several"))
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
        return value
    if not isinstance(value, Mapping):
        raise RecipeError(f"lora must be r=16,targets=q_proj+v_proj or a mapping, not {format_value(value)}")
    unknown = [key for key in value if key not in _LORA_KEYS]
    if unknown:
        raise RecipeError(f"lora: unknown key {format_value(unknown[0])}; known: {', '.join(_LORA_KEYS)}")
    return Lora(**{"r": 8, "targets": (), **value, "dtype": value.get("dtype") or ""})


def parse_lora(text: str) -> dict[str, Any]:
    """'r=16,targets=q_proj+v_proj,save=lm_head' -> a mapping; a regular expression goes to the end of the text."""
    found: dict[str, object] = {}
    text, is_regex, pattern = text.partition(f"targets={REGEX}")
    if is_regex:
        found["targets"] = (REGEX + pattern,)
    for piece in text.removesuffix(",").split(",") if text else ():
        key, equals, value = piece.partition("=")
        key = key.strip()
        if not equals or key not in _LORA_KEYS:
            raise RecipeError(
                f"lora: {format_value(piece)} is not r=…, targets=…, save=…, exclude=… or dtype=…, "
                "as in r=16,targets=q_proj+v_proj"
            )
        if key in found:
            raise RecipeError(f"lora: {key} given twice")
        if key == "r":
            found[key] = parse_size(value.strip(), "lora r")
        elif key == "dtype":
            found[key] = value.strip()
        else:
            found[key] = tuple(entry.strip() for entry in value.split("+"))
    return found
