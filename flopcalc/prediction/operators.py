"""The operators that a HF model's step dispatches beside products and attention: their kinds, and how many bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, NamedTuple

from flopcalc.core.count.products import Row
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.ops import Attend, Chain, Op, Stage, iterate, join
from flopcalc.core.workload.sums import (
    Either,
    Expression,
    Frames,
    InDecoder,
    Logits,
    Minus,
    Pairs,
    Sum,
    Tokens,
    Windows,
)
from flopcalc.core.workload.workload import Workload
from flopcalc.data import find_data_dir
from flopcalc.errors import FlopcalcError, SpecError, format_value
from flopcalc.prediction.rows import find_trained_rank

__all__ = ["KINDS", "Operator", "Operators", "Saved", "classify", "list_operators"]

# --- Kinds of operators -----------------------------------------------------------------------------------------------

# Kind -> names without their namespace. An in-place form (mul_) is of the kind of its plain form unless it is listed.
KINDS: dict[str, tuple[str, ...]] = {
    kind: tuple(names.split())
    for kind, names in {
        # No kernel: another look at the same memory.
        "view": "view t transpose permute expand slice select unsqueeze squeeze detach alias as_strided split "
        "split_with_sizes unbind _unsafe_view _reshape_alias diagonal unfold view_as_real view_as_complex real imag "
        "set_ resize_ unsafe_split unsafe_chunk swapaxes",
        # No kernel: memory alone.
        "make": "empty empty_like empty_strided new_empty new_empty_strided",
        # Operators that only call others; the profiler shows them, a trace below autograd does not.
        "wrapper": "linear matmul to reshape contiguous type_as flatten chunk narrow dropout layer_norm rms_norm "
        "softmax log_softmax cross_entropy_loss nll_loss nll_loss_nd one_hot expand_as view_as numpy_T movedim "
        "conv1d conv2d conv3d unflatten clip square pad scaled_dot_product_attention result_type item is_nonzero "
        "concat concatenate hstack vstack",
        "fill": "zeros full ones fill_ zero_ zeros_like ones_like full_like new_zeros new_ones new_full arange "
        "linspace scalar_tensor eye fill",
        "cast": "_to_copy",
        "copy": "clone copy_ copy repeat repeat_interleave roll flip slice_backward select_backward slice_scatter "
        "select_scatter as_strided_scatter unfold_backward view_copy expand_copy _reshape_copy im2col col2im "
        "constant_pad_nd reflection_pad2d reflection_pad2d_backward pixel_shuffle pixel_unshuffle tril triu "
        "split_with_sizes_copy",
        "cat": "cat stack",
        "reduce": "mean sum any all amax amin max min var std prod norm linalg_vector_norm logsumexp argmax argmin "
        "var_mean _is_all_true _is_any_true count_nonzero",
        "norm": "native_layer_norm _fused_rms_norm native_group_norm native_batch_norm _native_batch_norm_legit",
        "norm_backward": "native_layer_norm_backward _fused_rms_norm_backward native_group_norm_backward "
        "native_batch_norm_backward",
        "softmax": "_softmax _safe_softmax _log_softmax",
        "softmax_backward": "_softmax_backward_data _log_softmax_backward_data",
        "gather": "embedding index index_select gather _unsafe_index masked_select grid_sampler_2d upsample_bilinear2d "
        "upsample_bicubic2d upsample_nearest2d upsample_linear1d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
        "avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d",
        "embedding_backward": "embedding_dense_backward",
        "scatter": "index_put _index_put_impl_ index_add scatter scatter_add scatter_reduce "
        "masked_scatter masked_scatter_backward index_copy _unsafe_index_put index_fill grid_sampler_2d_backward "
        "upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_nearest2d_backward "
        "upsample_linear1d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward "
        "avg_pool2d_backward max_pool2d_with_indices_backward _adaptive_avg_pool2d_backward",
        "sort": "topk sort cumsum cumprod cummax histc bincount searchsorted bucketize unique_consecutive _unique2 "
        "unique_dim argsort",
        "loss": "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward",
        "random": "bernoulli exponential normal rand randn randint uniform native_dropout rand_like randn_like",
        # The host waits for a value, or until one of its own has come over.
        "read": "_local_scalar_dense nonzero equal lift_fresh",
        "product": "mm addmm bmm baddbmm _grouped_mm grouped_mm_fallback convolution convolution_backward dot vdot mv "
        "addmv _scaled_mm _int_mm linalg_solve_triangular _convolution cudnn_convolution slow_conv2d_forward "
        "slow_conv3d_forward slow_conv3d",
        "attention": "attend attend_backward _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
        "_flash_attention_forward _flash_attention_backward _efficient_attention_forward _efficient_attention_backward "
        "_cudnn_attention_forward _cudnn_attention_backward",
        "pointwise": "add sub rsub mul div addcmul addcdiv neg abs sign exp exp2 expm1 log log2 log1p sqrt rsqrt "
        "reciprocal pow sin cos tan tanh sigmoid silu gelu relu relu6 leaky_relu elu softplus mish hardtanh hardswish "
        "hardsigmoid erf ceil floor round trunc frac clamp clamp_min clamp_max minimum maximum fmod remainder "
        "floor_divide eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or "
        "bitwise_not bitwise_xor where masked_fill lerp isnan isinf isfinite isin polar glu log_sigmoid_forward "
        "threshold sgn atan2 sinh cosh asin acos atan nan_to_num __and__ __or__ __xor__ bitwise_left_shift "
        "bitwise_right_shift __lshift__ __rshift__ "
        "silu_backward gelu_backward sigmoid_backward tanh_backward threshold_backward elu_backward "
        "leaky_relu_backward softplus_backward hardtanh_backward hardswish_backward mish_backward glu_backward "
        "log_sigmoid_backward hardsigmoid_backward native_dropout_backward",
    }.items()
}
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}


# What a trace tells apart beyond a name: elementwise kernels whose tensors do not lie alike in memory, and what is no
# operator at all.
RECORDED_KINDS = frozenset(KINDS) - {"wrapper"} | {
    "pointwise_mixed", "pointwise_strided", "pointwise_strided_mixed", "pointwise_strided_wide",
    "pointwise_strided_across", "copy_strided", "copy_strided_wide", "copy_strided_across", "cast_strided",
    "cat_one", "cat_strided", "cat_strided_wide", "product_grouped", "attention_masked", "module", "node",
}  # fmt: skip


def classify(name: str) -> str:
    """The kind of an operator ('aten::mul', 'aten.mul.Tensor', 'mul_' -> 'pointwise'); 'other' if it is not known."""
    short = name.rpartition("::")[2]
    short = short.split(".")[1] if short.startswith(("aten.", "transformers.", "flopcalc.")) else short.split(".")[0]
    found = _KIND_OF.get(short)
    if found is None and short.endswith("_") and not short.endswith("__"):
        found = _KIND_OF.get(short[:-1])
    return found or "other"


# --- What the files say -----------------------------------------------------------------------------------------------

# An expression is a sum of terms: letter * [coefficient *] feature [* size [* size]], in bytes.
# x: the model's dtype; f: float32; l: int64; i: int32; o: one byte; n: a bare number.
_BYTES = {"f": 4, "l": 8, "i": 4, "o": 1, "n": 1}
ATTENTION = ("sdpa", "eager")


def sign(chain: Chain) -> str:
    """What kind of layer a chain is: its ops by name, with what changes the operators behind them."""
    return " ".join(dict.fromkeys(_sign_op(op) for op in iterate(chain)))


def _sign_op(op: Op) -> str:
    flags = ("+bias" if op.bias else "") + ("+tied" if op.tied else "")
    if isinstance(op, Attend):
        flags += "+window" if isinstance(op.rows, Pairs) and op.rows.window else ""
        flags += "+panes" if isinstance(op.rows, Windows) else ""
        flags += "+grouped" if op.kv_heads < op.heads else ""
    return f"{op.kind}:{op.name}{flags}"


def sign_layer(stage: Stage, chain: Chain, switches: str = "") -> str:
    """As sign, of one of a stage's layers; the language model's with its switches."""
    return f"{sign(chain)} {switches}".rstrip() if stage.group == "language" else sign(chain)


def sign_outside(stages: Iterable[Stage], switches: str = "") -> str:
    """As sign, of everything that is not a repeated layer."""
    parts = [f"{stage.path}[{sign(stage.layers[0])}]" for stage in stages if not stage.repeated]
    return " ".join([*parts, switches]).rstrip()


# What a language model's config says that changes HF's operators though no op shows it: a key, and its other names.
SWITCHES: dict[str, tuple[str, ...]] = {
    "hidden_act": ("hidden_activation", "activation_function"),
    "attention_dropout": ("attn_pdrop",),
    "hidden_dropout": ("resid_pdrop", "residual_dropout", "dropout"),
    "embedding_dropout": ("embd_pdrop",),
    "use_parallel_residual": (),
    "partial_rotary_factor": ("rotary_pct",),
}
_OUTSIDE = ("embedding_dropout", "partial_rotary_factor")  # what is outside of layers has these alone
_DISTANCES = {"hidden_act": 4}  # of variants that differ: an activation may be seven operators or one
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", "swish": "silu"}  # one operator all the same


def find_language(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The language model's type and its config, which lies inside another where there is a tower."""
    inner = config.get("text_config")
    own = inner if isinstance(inner, Mapping) else config
    return str(own.get("model_type", config.get("model_type"))), own


def read_switches(config: Mapping[str, Any]) -> dict[str, Any]:
    """Those switches that a language model's config sets."""
    tables = [config]
    for key in ("rope_parameters", "rope_scaling"):  # for all layers, or for each of their kinds
        table = config.get(key)
        if isinstance(table, Mapping):
            tables += [table, *(inner for inner in table.values() if isinstance(inner, Mapping))]
    found = {
        key: [table[name] for name in (key, *names) for table in tables if table.get(name) is not None]
        for key, names in SWITCHES.items()
    }
    return {key: values[0] for key, values in found.items() if values}


def sign_switches(config: Mapping[str, Any], usual: Mapping[str, Mapping[str, Any]]) -> str:
    """The switches that a config sets otherwise than is usual: model type of the language -> switch -> value."""
    name, own = find_language(config)
    given, known = read_switches(own), usual.get(name, {})
    said = {key: (_say_switch(key, given.get(key, value)), _say_switch(key, value)) for key, value in known.items()}
    return " ".join(f"{key}={value}" for key, (value, other) in said.items() if value != other)


def _say_switch(key: str, value: Any) -> str:
    """A switch's value so far as it matters: any dropout is one."""
    if key.endswith("dropout") or key.startswith("use_"):
        return "on" if _is_on(value) else "off"
    if isinstance(value, str):
        return _ACTIVATIONS.get(value, value)
    return f"{value:g}" if isinstance(value, float) else format_value(value)


def _is_on(value: Any) -> bool:
    try:
        return bool(float(value))
    except (TypeError, ValueError):
        return bool(value)


_ATTRIBUTES = ("n_in", "n_out", "size", "heads", "qk", "v", "copies", "active", "times")


def list_sizes(stages: tuple[Stage, ...], chain: Chain | None) -> dict[str, int]:
    """Every size that an expression may name: those of the own layer bare, those of the whole model after a slash."""
    sizes: dict[str, int] = {}
    if chain is not None:
        _add_sizes(sizes, "", chain)
    for stage in stages:
        if stage.layers:
            _add_sizes(sizes, f"/{stage.path}:" if stage.repeated else f"/{stage.path}.", stage.layers[0])
    return sizes


def _add_sizes(sizes: dict[str, int], path: str, chain: Chain) -> None:
    for op in iterate(chain):
        name = f"/{op.name[1:]}" if op.name.startswith("/") else path + op.name if op.name else path[:-1]
        name = name.replace("*", "#")
        for attribute in _ATTRIBUTES:
            value = getattr(op, attribute, 0)
            if value > 1 or (attribute in ("n_in", "n_out", "size") and value):
                sizes.setdefault(f"{name}.{attribute}", value)
        if isinstance(op, Attend):
            sizes.setdefault(f"{name}.kv", op.kv_heads)
        if op.kind == "embed":
            sizes["width"] = op.size


def list_windows(estimator: Estimator, keys: int) -> list[int]:
    """Windows of attention that are no longer than the keys: HF then hands a mask to SDPA."""
    return [
        op.rows.window
        for stage in estimator.stages
        for chain in dict.fromkeys(stage.layers)
        for op in iterate(chain)
        if isinstance(op, Attend) and isinstance(op.rows, Pairs) and 0 < op.rows.window <= keys
    ]


def list_features(estimator: Estimator, load: Workload) -> dict[str, int]:
    """Every sum of the workload that an expression may name; in decoding, of one call in the middle."""
    is_decode = load.phase == "decode"
    call = _find_call(load)
    rows, seq, past = load.rows, call.seq, call.context if is_decode else 0
    keys = seq + past
    features = {
        "one": 1,
        "tokens": rows * seq,
        "logits": Logits().count(call, "full"),
        "rows": rows,
        "seq": seq,
        "pairs": rows * seq * keys,
        "square": seq * keys,
        "keys": keys,
        "cached": rows * keys,
        "past": rows * past,
        "padded": rows * (seq + 1),
    }
    windows = list_windows(estimator, keys)
    if is_decode and windows:  # a full window's cache: what it keeps, and with the new row
        features |= {"held": rows * (min(windows) - 1), "filled": rows * min(windows)}
    if load.all_grids:
        grids = load.all_grids
        features |= {
            "images": len(grids),
            "patches": sum(t * h * w for t, h, w in grids),
            "visual": estimator.count_visual_tokens(load),
            "frames": sum(t for t, _, _ in grids),
            "sights": sum(t * h * w for t, h, w in grids) ** 2,
        }
    for stage in estimator.stages:
        for op in iterate(stage.layers[0]) if stage.layers else ():
            name = _name_sum(op.rows)
            if name in features or isinstance(op.rows, (Tokens, Pairs, Logits)):
                continue
            features[name] = op.rows.count(call, "full")
            if isinstance(op.rows, Windows):
                side = op.rows.side
                features["panes"] = sum(t * -(-h // side) * -(-w // side) for t, h, w in load.all_grids)
    return features


def _find_call(load: Workload) -> Workload:
    """One call of the model: in decoding the one in the middle, else the whole step."""
    return load.replace(seq=1, context=load.context + (load.seq - 1) // 2) if load.phase == "decode" else load


def _name_sum(rows: Sum) -> str:
    """A sum as the recorded expressions name it."""
    if isinstance(rows, Expression):
        return f"sum:{rows.unit}:{rows.text}".replace("*", "#").replace(" ", "").replace("+", "&")
    if isinstance(rows, Either):
        return f"either:{_name_sum(rows.needed)}:{_name_sum(rows.executed)}"
    if isinstance(rows, Minus):
        return f"minus:{_name_sum(rows.rows)}:{_name_sum(rows.less)}"
    if isinstance(rows, Frames):
        return "seen"
    return "decoder" if isinstance(rows, InDecoder) else type(rows).__name__.lower()


class Scope(NamedTuple):
    """Values of what expressions name."""

    features: Mapping[str, int]
    sizes: Mapping[str, int]
    dtype_bytes: int = 2
    module: str = ""  # whose own sizes an expression names by a dot alone
    guess: Mapping[str, int] | None = None  # sizes by their role, where another model's names stand in

    def evaluate(self, text: str) -> int:
        """The bytes (or the number) that an expression stands for."""
        total: int | Fraction = 0
        for letter, coefficient, names in _parse(text):
            value = coefficient * (self.dtype_bytes if letter == "x" else _BYTES[letter])
            for name in names:
                found = self.features.get(name)
                value *= self._size(name) if found is None else found
            total += value
        return round(total)

    def _size(self, name: str) -> int:
        for full in (self.module + name, f"/{self.module}{name}") if name[0] == "." else (name,):
            if full in self.sizes:
                return self.sizes[full]
        if self.guess is None:
            raise MissingSizeError(name)
        own, _, attribute = (self.module + name if name[0] == "." else name).rpartition(".")
        last = own.replace(":", ".").replace("/", "").rpartition(".")[2]
        return self.guess.get(f"{last}.{attribute}", self.guess.get(attribute, self.guess["width"]))


@lru_cache(maxsize=8192)
def _parse(text: str) -> tuple[tuple[str, int | Fraction, tuple[str, ...]], ...]:
    """(letter, coefficient, names) of every term."""
    terms = []
    for term in text.split(" + ") if text else ():
        letter, *names = term.split("*")
        coefficient: int | Fraction = 1
        while names and (names[0][0].isdigit() or names[0][0] in "~-"):
            number = Fraction(names.pop(0).removeprefix("~"))
            coefficient *= int(number) if number.denominator == 1 else number
        terms.append((letter, coefficient, tuple(names)))
    return tuple(terms)


def guess_sizes(stages: tuple[Stage, ...], chain: Chain | None) -> dict[str, int]:
    """Sizes of a layer, or of the language model, by the part that they play under the usual names."""
    layers = [stage.layers[0] for stage in stages if stage.repeated and stage.layers and stage.group == "language"]
    ops = list(iterate(chain)) if chain is not None else [op for layer in layers[:1] for op in iterate(layer)]
    every = [op for stage in stages if stage.layers for op in iterate(stage.layers[0])]
    width = next((op.size or op.n_in for op in ops if op.size or op.n_in), 1)
    vocab = max((op.n_out if op.part == "lm_head" else op.n_in if op.kind == "embed" else 0 for op in every), default=1)
    attend = next(
        (op for op in ops if isinstance(op, Attend)),
        Attend(name="", part="", rows=Tokens(), heads=1, kv_heads=1, qk=width, v=width),
    )
    queries = attend.heads * attend.qk
    keys = next((op.n_out for op in ops if op.name.rpartition(".")[2] in ("k_proj", "key")), queries)
    inner = max(
        (op.n_out for op in ops if op.kind == "linear" and op.part not in ("attention_projections", "lm_head")),
        default=width,
    )
    return {
        "width": width, "size": width, "n_in": width, "n_out": width, "heads": attend.heads, "qk": attend.qk,
        "v": attend.v or attend.qk, "copies": 1, "active": 1, "times": 1,
        "lm_head.n_out": vocab, "embed_tokens.n_in": vocab, "kv": max(1, keys // attend.qk),
        "q_proj.n_out": queries, "k_proj.n_out": keys, "v_proj.n_out": keys, "o_proj.n_in": queries,
        "qkv.n_out": 3 * queries, "gate_proj.n_out": inner, "up_proj.n_out": inner, "down_proj.n_in": inner,
        "fc1.n_out": inner, "fc2.n_in": inner,
    }  # fmt: skip


class MissingSizeError(FlopcalcError):
    """An expression names what this model does not have."""


# --- Reading ----------------------------------------------------------------------------------------------------------


class Operator(NamedTuple):
    """Calls of one operator in one module, or in all layers' modules of that name."""

    module: str
    group: str
    direction: str  # forward, backward
    kind: str
    reads: int  # bytes of one call
    writes: int
    count: int  # type: ignore[assignment]  # shadows tuple.count, which nobody asks
    is_again: bool = False  # forward work that checkpointing runs again


class Saved(NamedTuple):
    """Memory that autograd keeps until the backward pass; no parameters."""

    module: str
    group: str
    bytes: int
    count: int  # type: ignore[assignment]
    is_again: bool = False  # kept only while the backward pass of its layer runs, by checkpointing


class Operators(NamedTuple):
    """What one step dispatches beside products and attention, and what it keeps."""

    rows: tuple[Operator, ...]
    saved: tuple[Saved, ...]
    notes: tuple[str, ...]
    is_recorded: bool
    has_dropout: bool = False  # attention drops weights of the language model while it trains


_AGAIN = "install flopcalc again, or record it again with python -m flopcalc.measure.trace.operators"


@cache
def load_file(name: str) -> dict[str, Any] | None:
    """The recording of a model type, or None."""
    path = _find_file(name)
    if not os.path.isfile(path):
        return None
    data = _read_json(path)
    if "same" in data:
        path = _find_file(str(data["same"]))
        data = _read_json(path)
    try:
        return unpack(data)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        told = f"no {error}" if isinstance(error, KeyError) else error
        raise SpecError(f"{path}: damaged: {told}; {_AGAIN}") from None


def _find_file(name: str) -> str:
    return os.path.join(find_data_dir(), "operators", f"{name}.json")


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}; {_AGAIN}") from None
    if not isinstance(data, dict):
        raise SpecError(f"{path}: holds {format_value(data)}, not a recording; {_AGAIN}")
    return data


def unpack(data: dict[str, Any]) -> dict[str, Any]:
    """A file's tables with every number replaced by what it stands for; each row and list of modules is there once."""
    rows, kept, layouts = data["rows"], data["kept_rows"], data["layouts"]
    parts = {
        key: {
            path: {
                kind: {
                    where: dict(zip(layouts[first], blocks, strict=True)) for where, (first, *blocks) in places.items()
                }
                for kind, places in kinds.items()
            }
            for path, kinds in stages.items()
        }
        for key, stages in data["parts"].items()
    }
    return {
        "usual": {name: dict(table) for name, table in data.get("usual", {}).items()},
        "signatures": data["signatures"],
        "blocks": [[rows[number] for number in block] for block in data["blocks"]],
        "parts": parts,
        "kept": [[kept[number] for number in block] for block in data["kept"]],
        "saved": data["saved"],
    }


def list_operators(estimator: Estimator, load: Workload, attention: str = "sdpa", dtype_bytes: int = 2) -> Operators:
    """The operators of one step of HF's eager model: bytes of each, and what the host dispatches beside kernels.

    `attention` is HF's attn_implementation; `dtype_bytes` the size of the model's floating dtype.
    """
    if attention not in ATTENTION:
        raise FlopcalcError(f"attention {format_value(attention)} unknown; known: {', '.join(ATTENTION)}")
    return _Reader(estimator, load, attention, dtype_bytes).read()


class _Layer(NamedTuple):
    """What of a layer, or of all outside layers, trains; and what is adapted, in other phases too."""

    flows: bool  # gradients pass
    weights: frozenset[str]  # modules whose own weights train
    adapted: frozenset[tuple[str, int]]  # modules with a LoRA adapter, and its rank
    silent: frozenset[str]  # modules that no gradient reaches: they lie before the first that trains


# PEFT's LoRA on a linear module, as traced: direction, kind, calls, reads, writes.
_ADAPTER: list[tuple[str, str, int, str, str]] = [
    ("f", "module", 4, "", ""),
    ("f", "view", 6, "", ""),
    ("f", "product", 2, "", ""),
    ("f", "cast", 1, "x*rows*in", "f*rows*in"),
    ("f", "pointwise", 1, "f*rows*out", "f*rows*out"),
    ("f", "pointwise", 1, "x*rows*out + f*rows*out", "f*rows*out"),
    ("f", "cast", 1, "f*rows*out", "x*rows*out"),
    ("b", "node", 14, "", ""),
    ("b", "view", 14, "", ""),
    ("b", "product", 4, "", ""),
    ("b", "cast", 1, "x*rows*out", "f*rows*out"),
    ("b", "cast", 1, "f*rows*out", "x*rows*out"),
    ("b", "pointwise", 1, "f*rows*out", "f*rows*out"),
    ("b", "cast", 1, "f*rows*in", "x*rows*in"),
    ("b", "pointwise", 1, "x*rows*in + x*rows*in", "x*rows*in"),
]
_NOTHING = _Layer(False, frozenset(), frozenset(), frozenset())


class _Reader:
    """Joins a recording with a model's sizes, its recipe and a workload."""

    def __init__(self, estimator: Estimator, load: Workload, attention: str, dtype_bytes: int) -> None:
        self.estimator, self.load, self.attention, self.dtype_bytes = estimator, load, attention, dtype_bytes
        self.notes: dict[str, None] = {}
        self.is_recorded = True
        self.rows: dict[tuple[Any, ...], int] = {}
        self.saved: dict[tuple[Any, ...], int] = {}
        self.features = list_features(estimator, load)
        self.calls = load.seq if load.phase == "decode" else 1
        self.has_images = bool(load.all_grids)
        name = str(estimator.source.config["model_type"])
        data = load_file(name)
        if data is None:
            stand_in = "qwen2_vl" if estimator.vision is not None else "llama"
            data = load_file(stand_in)
            self._note(f"operators of {name} were not recorded: those of {stand_in} stand in")
            self.is_recorded = False
            if data is None:
                raise SpecError(
                    f"{_find_file(stand_in)} is missing, which stands in for {name!r}: the installation is incomplete, "
                    "install flopcalc again"
                )
        self.data: dict[str, Any] = data
        self.switches = sign_switches(estimator.source.config, data["usual"])
        self.states = self._find_states()

    def _note(self, text: str) -> None:
        self.notes[text] = None

    def read(self) -> Operators:
        for stage in self.estimator.stages:
            if stage.repeated and (self.has_images or stage.group not in ("vision", "projector")):
                self._read_stage(stage)
        self._read_part(
            "", None, sign_outside(self.estimator.stages, self.switches), "*", self.states["", None], 1, False
        )
        rows = tuple(
            Operator(module, group, direction, kind, reads, writes, count, is_again)
            for (module, group, direction, kind, reads, writes, is_again), count in self.rows.items()
        )
        saved = tuple(
            Saved(module, group, size, count, is_again) for (module, group, size, is_again), count in self.saved.items()
        )
        return Operators(rows, saved, tuple(self.notes), self.is_recorded, self._has_dropout())

    def _has_dropout(self) -> bool:
        name, own = find_language(self.estimator.source.config)
        switches = {**self.data["usual"].get(name, {}), **read_switches(own)}
        return self.load.phase == "train" and _is_on(switches.get("attention_dropout"))

    def _find_states(self) -> dict[tuple[str, int | None], _Layer]:
        """What trains and where gradients pass, from the core's own rows in order of execution."""
        is_train = self.load.phase == "train"
        places = {stage.path: number for number, stage in enumerate(self.estimator.stages)}
        rows: list[tuple[int, int, str, int | None, Row]] = []
        for block, row, _ in self.estimator.rows(self.load, "full"):
            for layer in block.layers if block.layers is not None else (None,):
                rows.append((places.get(block.path, 0), layer or 0, block.path, layer, row))
        rows.sort(key=lambda each: each[:2])
        sets: dict[tuple[str, int | None], tuple[set[str], set[tuple[str, int]], set[str]]] = {}
        flows: dict[tuple[str, int | None], bool] = {}
        is_passing = False
        for _, _, path, layer, row in rows:
            key: tuple[str, int | None] = (path, layer) if layer is not None else ("", None)
            weights, adapted, silent = sets.setdefault(key, (set(), set(), set()))
            op = row.op
            name = (join(path, op.name) if layer is None else op.name.removeprefix("/")).replace("*", "#")
            trains = is_train and (row.trainable > 0 or (row.trains_weight and bool(op.tied)))
            if trains and op.kind in ("linear", "conv", "embed") and not row.trains_weight:
                adapted.add((name, find_trained_rank(row)))
            elif trains:
                weights.add(name.rpartition(".")[0] if op.kind == "param" else name)
            elif not is_train and (rank := row.rank):
                adapted.add((name, rank))
            starts = op.kind in ("embed", "conv") and layer is None  # no gradient comes into it
            if not trains and (starts or not is_passing):
                silent.add(name)
            is_hooked = op.input_embedding and is_train and self.estimator.recipe.recompute != "none"
            is_passing = is_passing or trains or is_hooked
            flows[key] = flows.get(key, False) or is_passing
        empty: tuple[set[str], set[tuple[str, int]], set[str]] = (set(), set(), set())
        keys: list[tuple[str, int | None]] = list(dict.fromkeys([("", None), *sets]))
        is_any = is_train and self.estimator.parameters()["trainable"] > 0
        states: dict[tuple[str, int | None], _Layer] = {}
        for key in keys:
            weights, adapted, silent = sets.get(key, empty)
            is_reached = flows.get(key, False) and is_any
            states[key] = _Layer(is_reached, frozenset(weights), frozenset(adapted), frozenset(silent))
        return states

    def _read_stage(self, stage: Stage) -> None:
        last = stage.first + len(stage.layers) - 1
        alike: dict[tuple[str, str, _Layer, Chain], int] = {}
        for number, chain in enumerate(stage.layers, stage.first):
            where = "first" if number == stage.first else "last" if number == last else "*"
            state = self.states.get((stage.path, number), _NOTHING)
            key = (sign_layer(stage, chain, self.switches), where, state, chain)
            alike[key] = alike.get(key, 0) + 1
        is_again = stage.checkpoint and self.load.phase == "train" and self.estimator.recipe.recompute != "none"
        for (signature, where, state, chain), count in alike.items():
            self._read_part(stage.path, chain, signature, where, state, count, is_again)

    def _find_part(self, phase: str, table: str, path: str, signature: str, where: str) -> Any:
        """A recorded part, the nearest one where this one was not recorded."""
        flags = " images" if self.has_images else ""
        masked = " masked" if self.attention == "sdpa" and self._is_masked() else ""
        parts: dict[str, Any] = self.data[table]
        prefix = f"{phase} " if phase else ""
        asked = f"{prefix}{self.attention}{masked}{flags}"
        for key in (asked, f"{prefix}{self.attention}{flags}", f"{prefix}{self.attention}", f"{prefix}sdpa{flags}",
                    f"{prefix}eager{flags}", f"{prefix}sdpa", f"{prefix}eager"):  # fmt: skip
            stages = parts.get(key)
            if stages is None:
                continue
            if key != asked:
                self._note(f"{asked} was not recorded: {key} stands in")
            found = stages.get(path) or self._find_like(stages, path)
            if found is None:
                continue
            kinds = {self.data["signatures"][int(number)]: entry for number, entry in found.items()}
            entry = kinds.get(signature)
            if entry is None:
                apart = {other: self._tell_apart(path, signature, other) for other in kinds}
                nearest = min(kinds, key=lambda other: sum(_DISTANCES.get(key, 1) for key in apart[other]))
                entry = kinds[nearest]
                if path and apart[nearest]:
                    self._note(f"layers of {path}: this kind was not recorded; the nearest stands in")
                elif "embedding_dropout" in apart[nearest]:
                    self._note("embeddings: whether they drop was recorded otherwise; the nearest stands in")
            return entry.get(where, entry["*"])
        return {} if table == "parts" else None

    def _tell_apart(self, path: str, one: str, other: str) -> list[str]:
        """What one signature has and the other has not, so far as it matters here: switches by name, ops as ""."""
        found = []
        for sign in {*one.split()} ^ {*other.split()}:
            key, is_switch, _ = sign.partition("=")
            is_inside = key == "attention_dropout" and self.attention != "eager"  # a kernel's own
            if not is_switch:
                found.append("")
            elif is_inside or (key.endswith("dropout") and self.load.phase != "train"):
                continue
            elif (key in _OUTSIDE) if not path else key != "embedding_dropout":
                found.append(key)
        return found

    def _find_like(self, stages: dict[str, Any], path: str) -> Any:
        """The layers of another model that come nearest: vision for vision, text for text."""
        is_vision = any(stage.path == path and stage.group == "vision" for stage in self.estimator.stages)
        named = [other for other in stages if other and ("vis" in other) == is_vision]
        return stages[named[0]] if named else next((stages[other] for other in stages if other), None)

    def _is_masked(self) -> bool:
        return bool(list_windows(self.estimator, self.features["keys"]))

    def _read_part(
        self, path: str, chain: Chain | None, signature: str, where: str, state: _Layer, count: int, is_again: bool
    ) -> None:
        phase = self.load.phase
        stages = self.estimator.stages
        guess = None if self.is_recorded else guess_sizes(stages, chain)
        if guess is not None and chain is not None and any(op.kind == "product" for op in iterate(chain)):
            self._note(
                f"layers of {path}: what their scans or selections of keys dispatch was not recorded; "
                "they may take far longer"
            )
        features = self.features
        if guess is not None and chain is not None and not any(op.kind == "attend" for op in iterate(chain)):
            features = {**features, "past": 0, "pairs": features["tokens"]}  # a layer without attention keeps no keys
        scope = Scope(features, list_sizes(stages, chain), self.dtype_bytes, "", guess)
        recorded: dict[str, dict[str, int]] = {phase: self._find_part(phase, "parts", path, signature, where)}
        if phase == "train":
            recorded["flow"] = self._find_part("flow", "parts", path, signature, where)
        self._add_adapters(path, chain, state, count, is_again and state.flows)
        for module, number in recorded[phase].items():
            name = f"{path}.*.{module}".rstrip(".") if path else module
            group = self._find_group(path, module)
            scope = scope._replace(module=module)
            if not self.has_images and group in ("vision", "projector"):
                continue
            self._add_rows(number, "f", scope, name, group, count)
            if phase != "train" or not self._has_gradient(path, module, state):
                continue
            source = recorded["train" if module in state.weights else "flow"]
            if module in source:
                self._add_rows(source[module], "b", scope, name, group, count)
            if is_again and state.flows:
                self._add_rows(number, "f", scope, name, group, count, True)
        if phase == "train" and (state.flows or not path):
            self._add_saved(path, chain, signature, where, state, count, scope, is_again)

    def _has_gradient(self, path: str, module: str, state: _Layer) -> bool:
        if not state.flows or module in state.silent:
            return False
        if path or self._find_group(path, module) not in ("vision", "projector"):
            return True
        names = (*state.weights, *(name for name, _ in state.adapted))
        inside = [name for name in names if self._find_group("", name) in ("vision", "projector")]
        return bool(inside) or any(
            self.states.get((stage.path, number), _NOTHING).flows
            for stage in self.estimator.stages
            for number in range(stage.first, stage.first + len(stage.layers))
            if stage.repeated and stage.group == "vision"
        )

    def _find_group(self, path: str, module: str) -> str:
        """The group of the stage that a module belongs to, or lies next to."""
        best, found = -1, "language"
        asked = (path or module).split(".")
        for stage in self.estimator.stages:
            shared = 0
            for a, b in zip(stage.path.split("."), asked, strict=False):
                if a != b:
                    break
                shared += 1
            if shared > best or (shared == best and stage.group == "language"):
                best, found = shared, stage.group
        return found if best > 0 else "language"

    def _add_adapters(self, path: str, chain: Chain | None, state: _Layer, count: int, is_again: bool) -> None:
        """What PEFT's LoRA adds to a linear module, beside the base layer whose weight is frozen."""
        ops: dict[str, Op] = {op.name: op for op in iterate(chain)} if chain is not None else {}
        if chain is None:
            for stage in self.estimator.stages:
                if not stage.repeated:
                    ops |= {join(stage.path, op.name): op for op in iterate(stage.layers[0])}
        is_train = self.load.phase == "train"
        call = _find_call(self.load)
        for name, rank in sorted(state.adapted):
            op = ops.get(name.replace("#", "*"))
            if op is None or op.kind != "linear" or op.copies > 1:
                self._note(f"{name}: the operators of its adapter were not recorded")
                continue
            rows = op.rows.count(call, "full") * op.times
            if not rows and not is_train:
                continue
            scope = Scope({"rows": rows}, {"in": op.n_in, "out": op.n_out, "rank": rank}, self.dtype_bytes)
            module = f"{path}.*.{name}" if path else name
            group = self._find_group(path, name)
            # Adapters are float32; in a float32 model nothing is cast.
            table = [row for row in _ADAPTER if row[1] != "cast" or self.dtype_bytes != 4]
            for again in (False, True) if is_again else (False,):
                self._add_table([row for row in table if row[0] == "f"], scope, module, group, count, again)
            if not is_train:
                continue
            self._add_table([row for row in table if row[0] == "b"], scope, module, group, count, False)
            texts = ("f*rows*in", "f*rows*rank") if self.dtype_bytes != 4 else ("f*rows*rank",)
            for text in texts:
                key = (module, group, scope.evaluate(text), is_again)
                self.saved[key] = self.saved.get(key, 0) + count

    def _add_rows(
        self, number: int, direction: str, scope: Scope, module: str, group: str, count: int, is_again: bool = False
    ) -> None:
        table = [row for row in self.data["blocks"][number] if row[0] == direction]
        self._add_table(table, scope, module, group, count, is_again)

    def _add_table(
        self, table: list[Any], scope: Scope, module: str, group: str, count: int, is_again: bool
    ) -> None:  # fmt: skip
        for letter, kind, many, reads, writes in table:
            is_sum = isinstance(many, str)  # then the bytes are of all calls together
            calls = scope.evaluate(many) if is_sum else many
            if calls <= 0:  # what a loop does between two images, where there is one
                continue
            try:
                moved = [scope.evaluate(text) // (calls if is_sum else 1) for text in (reads, writes)]
            except MissingSizeError as error:
                self._note(f"{module}: this model has no {error}, so its {kind} operators count no bytes")
                moved = [0, 0]
            way = "forward" if letter == "f" else "backward"
            key = (module.replace("#", "*"), group, way, kind, moved[0], moved[1], is_again)
            self.rows[key] = self.rows.get(key, 0) + calls * count * self.calls

    def _add_saved(
        self, path: str, chain: Chain | None, signature: str, where: str, state: _Layer, count: int, scope: Scope,
        is_again: bool,
    ) -> None:  # fmt: skip
        group = self._find_group(path, "")
        number = self._find_part("", "saved", path, signature, where)
        for text, train, flow, many in self.data["kept"][number] if number is not None else ():
            savers = [name for name in (train.split(" ") if train else ()) if name in state.weights]
            savers += [
                name for name in (flow.split(" ") if flow else ()) if name not in state.silent or name in state.weights
            ]
            if self.dtype_bytes == 4:  # an adapter keeps its input itself, else a copy in float32
                adapted = {name for name, _ in state.adapted}
                savers += [name for name in (train.split(" ") if train else ()) if name in adapted]
            if not path:
                savers = [name for name in savers if self._has_gradient("", name, state)]
            if train == flow == "":  # kept by the layer's own code
                savers = [""] if state.flows else []
            if not savers:
                continue
            try:
                first = (train or flow).partition(" ")[0]
                size = scope._replace(module=first).evaluate(text)
            except MissingSizeError:
                continue
            saver = next((name for name in f"{train} {flow}".split(" ") if name in savers), savers[0])
            module = f"{path}.*.{saver}".rstrip(".") if path else saver
            key = (module.replace("#", "*"), group if path else self._find_group("", saver), size, is_again)
            self.saved[key] = self.saved.get(key, 0) + many * count
        if is_again and chain is not None:
            first = next((op for op in iterate(chain) if op.size or op.n_in), None)
            if first is not None:
                rows = first.rows.count(self.load, "full") * first.times
                key = (f"{path}.*", group, rows * (first.size or first.n_in) * self.dtype_bytes, False)
                self.saved[key] = self.saved.get(key, 0) + count
