"""A torch model and a step to run go in; the FLOPs that step executed come out, per module and per pass."""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import bmm_flop, flop_registry, mm_flop

__all__ = ["FORMULAS", "NOT_PRODUCTS", "OperatorCount", "count_flops", "watch_modules"]

Formula = Callable[[tuple[Any, ...], Mapping[str, Any], Any], int]


@dataclass(frozen=True)
class OperatorCount:
    """What one step executed."""

    forward: int
    backward: int
    recompute: int  # forward work executed again while the backward pass runs (gradient checkpointing)
    rows: dict[str, tuple[int, int, int]]  # module path -> forward, backward, recompute
    excluded: dict[str, int]  # module class -> FLOPs of products that are not model work by convention
    not_counted: dict[str, int]  # operators neither counted nor known not to be products -> calls
    seconds: float

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recompute


# --- Formulas: the operators torch's registry misses, or gets wrong -----------------------------------------


def _grouped_mm(args: tuple[Any, ...], kwargs: Mapping[str, Any], _out: Any) -> int:
    """One product per group; the group sizes are the differences of `offs`, so only their end matters."""
    a, b = args[0], args[1]
    offs = args[2] if len(args) > 2 else kwargs.get("offs")
    if a.dim() == 3 and b.dim() == 3:  # (G, M, K) x (G, K, N): no ragged side
        return int(bmm_flop(a, b))
    # Rows after the last offset belong to no group and are not multiplied. On meta the offsets have no
    # values: then every row has a group, as in HF's sorted expert rows.
    ragged = a.shape[0] if a.dim() == 2 and b.dim() == 3 else a.shape[1] if a.dim() == 2 else b.shape[1]
    used = ragged if offs is None or offs.is_meta else int(offs[-1])
    if a.dim() == 2 and b.dim() == 3:  # (S, K) x (G, K, N) -> (S, N)
        return 2 * used * int(b.shape[1]) * int(b.shape[2])
    if a.dim() == 3:  # (G, M, K) x (K, S) -> (M, S)
        return 2 * used * int(a.shape[1]) * int(a.shape[2])
    return 2 * used * int(a.shape[0]) * int(b.shape[1])  # (M, S) x (S, N) -> (G, M, N), the weight gradient


def _convolution_backward(args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any) -> int:
    """Each gradient pairs the same elements as the forward pass does: 2 x weights x output positions.

    The stock formula multiplies the weight gradient by the number of groups.
    """
    grad_out, x, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    positions = prod((x if transposed else grad_out).shape[2:])
    forward = 2 * int(x.shape[0]) * positions * prod(weight.shape)
    return int(forward * (bool(wanted[0]) + bool(wanted[1])))


def _solve_triangular(args: tuple[Any, ...], _kwargs: Mapping[str, object], out: Any) -> int:
    """Substitution: row i of n costs a product with the i rows before it, for each of k right-hand sides.

    Sum of 2·i·k over i < n. Divisions by the diagonal are neither a multiply nor an add.
    """
    n = int(args[0].shape[-1])
    return (n - 1) * int(prod(out.shape))  # out has n·k elements, whether A is left or right


def _mv(args: tuple[Any, ...], _kwargs: Mapping[str, object], _out: object) -> int:
    return 2 * int(prod(args[-2].shape))  # mv(A, x) and addmv(y, A, x)


def _dot(args: tuple[Any, ...], _kwargs: Mapping[str, object], _out: object) -> int:
    return 2 * int(prod(args[0].shape))


def _fallback_grouped_mm(args: tuple[object, ...], _kwargs: Mapping[str, object], out: object) -> int:
    return _grouped_mm(args[:2], {"offs": args[2]}, out)


def _attend(args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any) -> int:
    """Fused attention on (b, h, s, d), (b, h_kv, t, d), (b, h_kv, t, e): every pair, for each query head.

    The stock formula refuses fewer key than query heads (torch 2.11).
    """
    query, key, value = args[0], args[1], args[2]
    b, h, s, d = (int(size) for size in query.shape)
    return 2 * b * h * s * int(key.shape[-2]) * (d + int(value.shape[-1]))


def _attend_backward(args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any) -> int:
    """Its backward forms the scores again, then dV, dP, dQ and dK: three products of width d, two of width e."""
    query, key, value = args[1], args[2], args[3]
    b, h, s, d = (int(size) for size in query.shape)
    return 2 * b * h * s * int(key.shape[-2]) * (3 * d + 2 * int(value.shape[-1]))


def _stock(formula: Callable[..., int]) -> Formula:
    return lambda args, kwargs, out: int(formula(*args, **kwargs, out_val=out))


# Operator name -> formula. The names here replace torch's own entry.
FORMULAS: dict[str, Formula] = {
    "aten::_grouped_mm": _grouped_mm,
    "transformers::grouped_mm_fallback": _fallback_grouped_mm,  # its backward is plain mm
    "aten::convolution_backward": _convolution_backward,
    **{
        f"aten::_scaled_dot_product_{kernel}{suffix}": formula
        for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
        for suffix, formula in (("", _attend), ("_backward", _attend_backward))
    },
    "aten::linalg_solve_triangular": _solve_triangular,
    "aten::mv": _mv,
    "aten::addmv": _mv,
    "aten::dot": _dot,
    "aten::vdot": _dot,
    "aten::addmm_": lambda args, _kwargs, _out: int(mm_flop(args[1], args[2])),
    "aten::baddbmm_": lambda args, _kwargs, _out: int(bmm_flop(args[1], args[2])),
    "aten::addmv_": _mv,
    "aten::_int_mm": _stock(mm_flop),
}

# --- Operators known not to be matrix products, with the reason ---------------------------------------------

_MOVES = "moves or selects elements, no arithmetic"
_MAKES = "makes a new tensor"
_LOOKS_UP = "table look-up or its gradient: adds rows, multiplies nothing"
_NORMALIZES = "normalization or softmax: elementwise work and sums, no product"
_LOSS = "loss: excluded by convention, no product"
_RANDOM = "draws random numbers"
_SCANS = "prefix sums or ordering along one axis, no product"
_READS = "reads a value or a property"

NOT_PRODUCTS: dict[str, str] = {
    f"aten::{name}": reason
    for reason, names in {
        _MOVES: "_to_copy cat copy_ copy stack constant_pad_nd index select_backward slice_backward repeat "
        "repeat_interleave roll flip gather scatter scatter_ masked_scatter masked_scatter_ "
        "masked_scatter_backward masked_select nonzero index_select tril triu _unsafe_view _reshape_copy set_ "
        "resize_ fill_ zero_ fill masked_fill masked_fill_ lift_fresh unique_consecutive _unique2 one_hot "
        "view_copy new_empty_strided detach_ unsqueeze_ _reshape_alias unfold_backward slice_scatter select_scatter "
        "expand_copy clone isin split_with_sizes_copy unsafe_split transpose_ im2col col2im tril_ triu_ as_strided_ "
        "reflection_pad2d reflection_pad2d_backward replication_pad3d replication_pad3d_backward index_copy_ "
        "index_copy unique_dim pixel_shuffle pixel_unshuffle",
        _MAKES: "arange empty empty_like empty_strided full full_like linspace new_empty new_full new_ones new_zeros "
        "ones ones_like scalar_tensor zeros zeros_like eye",
        _LOOKS_UP: "embedding embedding_dense_backward index_add index_add_ index_put index_put_ _index_put_impl_ "
        "scatter_add scatter_add_ scatter_reduce _unsafe_index_put _embedding_bag _embedding_bag_forward_only "
        "_embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward",
        _NORMALIZES: "_softmax _safe_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data "
        "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward "
        "native_group_norm native_group_norm_backward native_batch_norm native_batch_norm_backward "
        "_native_batch_norm_legit _weight_norm_interface _weight_norm_interface_backward",
        _LOSS: "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward",
        _RANDOM: "bernoulli bernoulli_ exponential_ normal_ rand randn randint uniform_ native_dropout "
        "native_dropout_backward rand_like randn_like normal",
        _SCANS: "cumsum cumprod cummax cummin sort topk histc bincount searchsorted bucketize",
        _READS: "_local_scalar_dense _is_all_true _is_any_true is_same_size equal",
        "pooling: means or maxima of neighbours, no product": "avg_pool2d avg_pool2d_backward max_pool2d_with_indices "
        "max_pool2d_with_indices_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward",
        "optimizer: excluded by convention, elementwise work on lists of tensors": "_foreach_add_ _foreach_zero_ "
        "_fused_adamw_",
        "fast Fourier transform: butterflies, no matrix product": "_fft_r2c _fft_c2c _fft_c2r",
        "elementwise; torch forgot the tag": "floor_divide softplus_backward polar log_sigmoid_forward "
        "glu glu_backward log_sigmoid_backward hardtanh_backward hardswish hardswish_ hardswish_backward hardsigmoid "
        "hardsigmoid_backward elu_backward leaky_relu_backward floor_divide_ _prelu_kernel _prelu_kernel_backward",
        "interpolation: a table of positions is read between its entries": "grid_sampler_2d grid_sampler_2d_backward "
        "upsample_linear1d upsample_linear1d_backward "
        "upsample_nearest2d upsample_nearest2d_backward _upsample_nearest_exact2d _upsample_nearest_exact2d_backward "
        "upsample_nearest3d upsample_nearest3d_backward "
        "upsample_bilinear2d upsample_bilinear2d_backward upsample_bicubic2d upsample_bicubic2d_backward "
        "_upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa "
        "_upsample_bicubic2d_aa_backward",
    }.items()
    for name in names.split()
}


@cache
def _formula(func: torch._ops.OpOverload) -> Formula | None:
    name = func._schema.name
    if name in FORMULAS:
        return FORMULAS[name]
    packet = func._overloadpacket
    return _stock(flop_registry[packet]) if packet in flop_registry else None


@cache
def _is_known(func: torch._ops.OpOverload) -> bool:
    """Whether this operator is known not to be a product: by torch's own tags, or by the table above."""
    tags = func.tags
    return (
        torch.Tag.pointwise in tags
        or torch.Tag.reduction in tags
        or func.is_view
        or func._schema.name in NOT_PRODUCTS
        or func.namespace == "profiler"  # marks in a trace
    )


@cache
def _is_composite(func: torch._ops.OpOverload) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func._name, "CompositeImplicitAutograd"))


# --- Attribution --------------------------------------------------------------------------------------------

# PEFT wraps a module X: X.base_layer, X.lora_A.default, ... are all work of X.
_PEFT_PREFIX = re.compile(r"^base_model\.model(\.|$)")
_PEFT_PARTS = re.compile(
    r"\.(base_layer|original_module|modules_to_save\.[^.]+|lora_(A|B|embedding_A|embedding_B)(\.[^.]+)?)(?=\.|$)"
)


def _row_path(path: str) -> str:
    return _PEFT_PARTS.sub("", _PEFT_PREFIX.sub("", path))


@dataclass(frozen=True)
class _Frame:
    """A module whose forward is running."""

    path: str
    excluded_as: str | None  # class name, inside a rotary embedding
    in_backward: bool  # entered while the backward pass runs: a recomputation


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator below autograd. Forward products belong to the innermost running module.

    Backward products belong to the module that made the autograd node: nodes carry a sequence number that
    only grows, so the module entries and exits, noted with the number at that moment, order them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: dict[str, list[int]] = {}
        self.excluded: Counter[str] = Counter()
        self.not_counted: Counter[str] = Counter()
        self._stack: list[_Frame] = [_Frame("", None, False)]
        self._event_sequence: list[int] = []
        self._event_frame: list[_Frame] = []
        self._note()

    def enter(self, path: str, module: torch.nn.Module) -> None:
        class_name = type(module).__name__
        excluded_as = class_name if "RotaryEmbedding" in class_name else self._stack[-1].excluded_as
        self._stack.append(_Frame(path, excluded_as, torch._C._current_autograd_node() is not None))
        self._note()

    def leave(self) -> None:
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        self._event_sequence.append(torch._C._autograd._get_sequence_nr())
        self._event_frame.append(self._stack[-1])

    def _add(self, flops: int) -> None:
        node = torch._C._current_autograd_node()
        frame = self._stack[-1]
        if node is None:
            column = 0
        elif frame.in_backward:
            column = 2
        else:
            column = 1
            frame = self._event_frame[bisect_right(self._event_sequence, node._sequence_nr()) - 1]
        if frame.excluded_as is not None:
            self.excluded[frame.excluded_as] += flops
        else:
            self.rows.setdefault(_row_path(frame.path), [0, 0, 0])[column] += flops

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a FakeTensor is asked for its device
            return func(*args, **kwargs)
        formula = _formula(func)
        if formula is None and not _is_known(func) and _is_composite(func):
            with self:  # in inference mode linear, matmul, ... arrive whole
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        out = func(*args, **kwargs)
        if formula is not None:
            self._add(formula(args, kwargs, out))
        elif not _is_known(func):
            self.not_counted[str(func)] += 1
        return out


@contextmanager
def watch_modules(
    model: torch.nn.Module, enter: Callable[[str, torch.nn.Module], None], leave: Callable[[], None]
) -> Iterator[None]:
    """Inside, every module's forward calls enter(path, module) before and leave() after."""
    handles = []
    for path, module in model.named_modules():

        def before(module: torch.nn.Module, _args: object, path: str = path) -> None:
            enter(path, module)

        def after(_module: torch.nn.Module, _args: object, _output: object) -> None:
            leave()

        handles.append(module.register_forward_pre_hook(before))
        # always_call: non-reentrant checkpointing ends a recomputation with an exception.
        handles.append(module.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def count_flops(model: torch.nn.Module, step: Callable[[], object]) -> OperatorCount:
    """Run step() — a forward pass of `model`, or forward and backward — and count its matrix products."""
    counting = _Counting()
    start = time.perf_counter()
    # One thread: sequence numbers are per thread, and a GPU's backward would recompute in another one.
    with (
        watch_modules(model, counting.enter, counting.leave),
        torch.autograd.set_multithreading_enabled(False),
        counting,
    ):
        step()
    seconds = time.perf_counter() - start
    rows = {path: (f, b, r) for path, (f, b, r) in sorted(counting.rows.items())}
    return OperatorCount(
        forward=sum(row[0] for row in rows.values()),
        backward=sum(row[1] for row in rows.values()),
        recompute=sum(row[2] for row in rows.values()),
        rows=rows,
        excluded=dict(sorted(counting.excluded.items())),
        not_counted=dict(sorted(counting.not_counted.items())),
        seconds=seconds,
    )
