"""The number format of every product and weight of a model: from options, a quantization_config, a config, or live."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from flopcalc.base.errors import ConfigError, RecipeError
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.number_formats import PLAIN, find_computed, parse_compute
from flopcalc.base.vocabulary import Group
from flopcalc.core.formats.kept_float32 import list_float32
from flopcalc.core.formats.quantization import Kind, ModulePlace, Quantization, has_quantization, say_by_hand
from flopcalc.core.formats.stored import BF16, StoredFormat, load_stored, make_plain, parse_stored
from flopcalc.core.model.ops import Embed, Linear, Op, Param, Stage, Weighted
from flopcalc.core.spec.spec import HEAD_PARTS

_HALF = ("bf16", "fp16")
ASSUMED = "assumed, for nothing says it"  # a value of the JSON: programs may compare it


class OpFormats(NamedTuple):
    """Formats of one op: of its weight, of everything else it holds, of its adapter, and of their products."""

    weight: StoredFormat = BF16
    plain: str = PLAIN  # bias, norms, tables: the model's own
    compute: str = PLAIN
    gradient: str = PLAIN  # of the products of its gradients
    adapter: str = "fp32"  # PEFT's default with a half-precision model
    adapter_compute: str = PLAIN


PLAIN_NUMBERS = OpFormats()


@frozen()
class Formats(Value):
    """What a model's numbers are: its own format, what products are computed in, and what is stored otherwise."""

    # Of a live model: a weight's name -> how it is stored, where that is not the model's own format.
    live: Mapping[str, StoredFormat]
    model: str = PLAIN  # of all weights that have no format of their own
    compute: str = ""  # given for all products; a narrow one for linear layers alone
    autocast: str = ""
    weights: StoredFormat | None = None  # given for linear layers of the language model
    quantization: Quantization | None = None
    adapter: str = ""  # of LoRA's matrices; empty: no adapters
    cache: str = ""  # of keys and values; empty: as computed
    source: str = ""  # what said so
    kept: tuple[str, ...] = ()  # patterns of parameters that transformers keeps in float32
    casts: bool = False  # some products are computed in float32 whatever their weights are

    def __hash__(self) -> int:
        return hash(self._get_values()[1:])  # without `live`, a mapping

    @property
    def narrows_weights(self) -> bool:
        """Whether products run under autocast over float32 weights, of which it makes copies."""
        return self.autocast != "" and self.model == "fp32"

    @property
    def is_default(self) -> bool:
        """Whether all is bf16: then rows need no change."""
        return (
            (self.model, self.compute or PLAIN, self.autocast or PLAIN) == (PLAIN, PLAIN, PLAIN)
            and self.weights is None
            and self.quantization is None
            and self.adapter in ("", "fp32")
            and self._compute_adapter() == PLAIN
            and not self.live
            and not self.kept
            and not self.casts
        )

    def is_only(self, name: str) -> bool:
        """Whether one format is that of all products, and of all plain weights."""
        is_plain = self.weights is None and self.quantization is None and not self.live and not self.kept
        is_plain = is_plain and not self.casts
        return is_plain and self.attention == self._compute_adapter() == name and self.model == name

    @property
    def names_layers(self) -> bool:
        """Whether layers that share their ops may differ; `kept` holds a class's words, which name no layer."""
        return bool(self.live) or self.quantization is not None

    @property
    def attention(self) -> str:
        """What products of activations are computed in."""
        if self.compute and find_computed(self.compute).is_everywhere:
            return self.compute
        return self.autocast or self._rest

    @property
    def kv_cache(self) -> str:
        """The format of cached keys and values."""
        return self.cache or make_plain(self.attention).name

    @property
    def _rest(self) -> str:
        """What is computed in the model's own format; with a narrow one, never in more than 16 bits."""
        return PLAIN if self.compute and self.model not in _HALF else self.model

    def with_compute(self, compute: str) -> Formats:
        """The same with all products computed in one format; plain weights are stored in it too."""
        is_plain = self.weights is None and self.quantization is None and not self.live
        model = find_computed(compute).stored if is_plain and find_computed(compute).is_everywhere else self.model
        source = "as asked" if is_plain else self.source
        return replace(self, model=model, compute=compute, autocast="", source=source, kept=(), casts=False)

    def _compute_adapter(self) -> str:
        if self.compute and find_computed(self.compute).is_everywhere:
            return self.compute
        return self.autocast or self.adapter or self._rest

    def resolve(self, op: Op, path: str, group: Group = "language") -> OpFormats:
        """The formats of an op whose module is `path`, in the part of the model that `group` names."""
        stored = self._find_stored(op, path, group)
        compute, gradient = self._find_compute(op, stored)
        plain = "fp32" if isinstance(op, Weighted) and self._is_kept(op, path, op.bias_name) else self.model
        return OpFormats(
            stored or make_plain(self.model), plain, compute, gradient, self.adapter or "fp32", self._compute_adapter()
        )

    def _find_compute(self, op: Op, stored: StoredFormat | None) -> tuple[str, str]:
        if self.casts and op.float32:
            name = "fp32" if op.float32 == "always" else self.autocast or "fp32"
            return name, name
        if not isinstance(op, Linear):
            return self.attention, self.attention
        own = self.compute
        if own and not find_computed(own).is_everywhere and not _is_inner(op):
            own = ""  # a narrow format leaves head and router alone
        if own:
            return own, own
        if stored is None or not stored.is_quantized:
            name = self.autocast or (stored.name if stored is not None else self._rest)
            return name, name
        # Quantized: its own format, or dequantized; autocast reaches what is dequantized alone.
        model = self.autocast or self._rest
        found = stored.compute or model
        if find_computed(found).is_everywhere:
            found = self.autocast or found
        return found, model if stored.gradient == "model" else stored.gradient or found

    def _find_stored(self, op: Op, path: str, group: Group) -> StoredFormat | None:
        """How a weight is stored; None: as the rest of the model."""
        if not isinstance(op, Weighted):
            return None
        if self.live:
            name = path if isinstance(op, Param) else f"{path}.{op.param}"
            return self.live.get(op.name_first(name))
        kind = _find_kind(op)
        found = None
        if self.weights is not None:
            found = self.weights if _is_inner(op) and group == "language" else None
        elif self.quantization is not None and not op.tied:
            found = self.quantization.find(ModulePlace(_list_names(op, path), kind, group))
        if found is not None and found.is_quantized:
            n_out, n_in = find_sizes(op)
            if found.fallback and n_in % found.inputs:
                found = load_stored()[found.fallback]
            problem = found.find_problem(n_out, n_in)
            if problem:
                error = ConfigError if self.weights is None else RecipeError
                hint = f"; {say_by_hand()}" if self.weights is None else ""
                raise error(f"{found.key or found.name} {problem} of {path}{hint}")
            return found
        return make_plain("fp32") if self._is_kept(op, path, op.param) else found

    def _is_kept(self, op: Weighted, path: str, param: str) -> bool:
        """Whether transformers keeps a parameter in float32; it searches the name for each pattern."""
        if not self.kept:
            return False
        name = path if isinstance(op, Param) else f"{path}.{param}"
        return _compile("|".join(self.kept)).search(op.name_first(name)) is not None

    def name_weights(self) -> str:
        """How weights are stored, in a word or two."""
        if self.weights is not None:
            return f"{self.weights.name} and {self.model}"
        return self.model if self.quantization is None else f"{self.quantization.method} and {self.model}"

    def to_dict(self) -> dict[str, Any]:
        """What was decided, and by what."""
        return {
            "model": self.model,
            "compute": self.compute or None,
            "autocast": self.autocast or None,
            "adapters": self.adapter or None,
            "kv_cache": self.kv_cache,
            "quantization": self.quantization.method if self.quantization is not None else None,
            "source": self.source,
        }


@cache
def _compile(text: str) -> re.Pattern[str]:
    return re.compile(text)


def count_cache_bytes(formats: Formats, numbers: int) -> int:
    """Bytes of cached numbers: with their scales where blocks of them share one."""
    name = formats.kv_cache
    if name == PLAIN:
        return 2 * numbers
    stored = load_stored().get(name)
    if stored is not None and stored.inputs > 1:
        return sum(stored.count_bytes(1, numbers))
    return -(-numbers * find_computed(name).bits // 8)


def _find_kind(op: Op) -> Kind:
    """What an op is to a quantizer."""
    if isinstance(op, Embed):
        return "embed"
    if op.kind != Linear.kind or not isinstance(op, Linear):
        return "other"
    if op.part in HEAD_PARTS:
        return "head"
    if op.is_bare:
        return "expert" if op.copies > 1 else "other"
    if op.at and op.name == f"{op.at}.out_proj":  # of torch's MultiheadAttention
        return "subclass"
    return "expert" if op.copies > 1 else "linear"


def _is_inner(op: Op) -> bool:
    """Whether a format that is given by hand holds for it: linear layers and experts, neither head nor router."""
    return _find_kind(op) in ("linear", "subclass", "expert") and op.part != "router"


def find_sizes(op: Op) -> tuple[int, int]:
    """Outputs and inputs of a weight; a table's rows and width."""
    return (op.count, op.dim) if isinstance(op, Embed) else (op.n_out, op.n_in)


def _list_names(op: Weighted, path: str) -> tuple[str, ...]:
    """A module's name as transformers 5 has it, and as checkpoints of older releases do."""
    names = [op.name_first(path)]
    if isinstance(op, Linear) and op.is_bare and op.copies > 1:  # experts, each with linears of their own before
        names += [f"{path}.0.{target}" for target in (*op.targets, op.param)]
        names += [f"{path}.{op.param}"]
    for name in tuple(names):
        if name.startswith("model.language_model."):
            rest = name.removeprefix("model.language_model.")
            names += [f"language_model.model.{rest}", f"model.{rest}", f"language_model.{rest}"]
        elif name.startswith("model."):
            names.append(name.removeprefix("model."))
    return tuple(dict.fromkeys(names))


@frozen()
class FormatOptions(Value):
    """What a user says about formats."""

    compute: str | None = None  # of products
    weights: object = None  # of linear layers' weights
    kv_cache: object = None
    autocast: object = None  # True: to bf16


@frozen()
class LiveFormats(Value):
    """Formats read from a live model: its own, weights that are stored otherwise, and its adapters'."""

    model: str
    stored: Mapping[str, StoredFormat]
    adapter: str = ""


def make_formats(
    config: Mapping[str, object],
    where: str,
    asked: FormatOptions,
    live: LiveFormats | None = None,
    *,
    lora_dtype: str | None = None,
    has_adapters: bool = False,
    casts: bool = False,
    stages: Sequence[Stage] = (),
) -> Formats:
    """The formats that options, then a live model or a quantization_config, then the config say; bf16 without any.

    `lora_dtype` is the format asked for LoRA's adapters: "" for the usual one, None without LoRA. `has_adapters`: a
    live model has adapters of its own. `casts`: the model's code computes some products in float32. `stages`: its ops.
    """
    compute = "" if asked.compute is None else parse_compute(asked.compute, "compute")
    cast = asked.autocast
    cast = "" if cast is None or cast is False else parse_compute(PLAIN if cast is True else cast, "autocast")
    if cast and cast not in _HALF:
        raise RecipeError(f"autocast is to bf16 or fp16, not {cast}")
    if cast and compute:
        raise RecipeError(f"compute {compute} and autocast {cast} both say what products are computed in: give one")
    types = None
    if asked.weights is not None:
        from flopcalc.core.formats.gguf import read_types  # imported lazily: few models need it

        types = read_types(asked.weights, str(config.get("model_type")), stages)
    weights = None if asked.weights is None or types is not None else parse_stored(asked.weights, "weights")
    quantization = types
    if asked.weights is None and live is None and has_quantization(config):
        from flopcalc.core.formats.quantizers import read_quantization  # imported lazily: few configs need it

        quantization = read_quantization(config, where)
    model, source = _find_model(config, where, compute, weights, live)
    if weights is not None and not weights.is_quantized:
        weights = None  # it is the whole model's
    elif weights is not None:
        source = source if source == "as asked" else f"weights as asked; the rest {source}"
    cache_format: str = "" if asked.kv_cache is None else parse_compute(asked.kv_cache, "kv_cache")
    if not cache_format and quantization is not None:
        cache_format = quantization.kv_cache
    adapter = ""
    if lora_dtype is not None:
        adapter = lora_dtype or ("fp32" if model in _HALF else model)
    elif has_adapters:
        adapter = live.adapter if live is not None else "fp32"
    if types is not None:
        source = "as asked" if isinstance(asked.weights, str) else "the file's tensors"
    elif quantization is not None:
        source = f"quantization_config of {quantization.method}; the rest {source}"
    stored = live.stored if live is not None and asked.weights is None else {}
    # A format that is given by hand holds for all; else from_pretrained keeps some parameters in float32.
    is_given = compute or live is not None or (asked.weights is not None and weights is None)
    kept = () if is_given or model not in _HALF else list_float32(config, model)
    kept = kept if types is None else ("",)  # GGUF stores norms, biases and routers in float32
    casts = casts and not compute and model in _HALF
    return Formats(stored, model, compute, cast, weights, quantization, adapter, cache_format, source, kept, casts)


def _find_model(
    config: Mapping[str, Any], where: str, compute: str, weights: StoredFormat | None, live: LiveFormats | None
) -> tuple[str, str]:
    """The model's own format, and what said so."""
    if weights is not None and not weights.is_quantized:
        return weights.name, "as asked"
    if live is not None:
        return live.model, "the model's parameters"
    if compute and find_computed(compute).is_everywhere:
        return find_computed(compute).stored, "as asked"
    parts = sorted((key for key in config if isinstance(config[key], Mapping)), key=lambda key: "text" not in key)
    for part in (config, *(config[key] for key in parts)):
        for key in ("dtype", "torch_dtype"):
            value = part.get(key)
            if value is not None and value != "auto":
                try:
                    return find_computed(parse_compute(value, key)).stored, f"the config's {key}"
                except RecipeError as error:
                    raise ConfigError(f"{where}: {error}") from None
    return PLAIN, ASSUMED
