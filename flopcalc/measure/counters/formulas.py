"""FLOPs of ATen's matrix operators: the shapes and values of an operator's arguments in, its count out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

Shapes = Sequence[Sequence[int]]  # of the arguments; empty where one is no tensor
Values = Sequence[Any]  # the arguments that are no tensors, in their places
Formula = Callable[[Shapes, Values], int]


def _mm(shapes: Shapes, _values: Values) -> int:
    return 2 * prod(shapes[0]) * shapes[1][-1]  # (…, m, k) x (…, k, n)


def _mv(shapes: Shapes, _values: Values) -> int:
    return 2 * prod(next(shape for shape in shapes if len(shape) == 2))


def _dot(shapes: Shapes, _values: Values) -> int:
    return 2 * prod(shapes[0])


def grouped_mm(shapes: Shapes, _values: Values) -> int:
    """One product per group; offsets are not recorded, so every row is taken to have a group, as HF's rows do."""
    a, b = shapes[0], shapes[1]
    if len(a) == 2 and len(b) == 3:  # (S, K) x (G, K, N)
        return 2 * a[0] * a[1] * b[2]
    if len(a) == 3 and len(b) == 2:  # (G, M, K) x (K, S)
        return 2 * a[1] * a[2] * b[1]
    if len(a) == 2:  # (M, S) x (S, N) -> (G, M, N), the weight gradient
        return 2 * a[0] * a[1] * b[1]
    return 2 * prod(a) * b[2]  # (G, M, K) x (G, K, N)


def _convolution(shapes: Shapes, values: Values) -> int:
    """2 x weights x output positions; the weight's second dimension is already divided by the groups."""
    x, weight = shapes[0], shapes[1]
    stride, padding, dilation = ([int(value) for value in values[at]] for at in (3, 4, 5))
    transposed = len(values) > 6 and values[6] is True
    if transposed:
        return 2 * x[0] * prod(x[2:]) * prod(weight)
    positions = 1
    for axis in range(len(x) - 2):
        # One entry may stand for all axes.
        s, p, d = (entry[axis % len(entry)] for entry in (stride, padding, dilation))
        positions *= (x[2 + axis] + 2 * p - d * (weight[2 + axis] - 1) - 1) // s + 1
    return 2 * x[0] * positions * prod(weight)


def _convolution_backward(shapes: Shapes, values: Values) -> int:
    """Each gradient pairs the same elements as the forward pass does."""
    grad_out, x, weight = shapes[0], shapes[1], shapes[2]
    positions = prod((x if values[7] else grad_out)[2:])
    wanted = values[10]
    return int(2 * x[0] * positions * prod(weight) * (bool(wanted[0]) + bool(wanted[1])))


def count_pairs(q: Sequence[int], k: Sequence[int], v: Sequence[int], times_qk: int, times_v: int) -> int:
    """q (b, h, s, d), k (b, h, t, d), v (b, h, t, e): every pair; key heads may be fewer, the work is not."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (times_qk * q[3] + times_v * v[3])


def _attend(shapes: Shapes, _values: Values) -> int:
    return count_pairs(shapes[0], shapes[1], shapes[2], 1, 1)


def attend_backward(shapes: Shapes, _values: Values) -> int:
    # Scores again, dQ and dK over d; dP and dV over e.
    return count_pairs(shapes[1], shapes[2], shapes[3], 3, 2)


def _solve_triangular(shapes: Shapes, _values: Values) -> int:
    """Substitution: row i of n costs a product with the i rows before it, for each of k right-hand sides.

    Sum of 2·i·k over i < n. Divisions by the diagonal are neither a multiply nor an add.
    """
    a, b = shapes[0], shapes[1]
    batch: Sequence[int] = torch.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2]))  # type: ignore[no-untyped-call]
    return (a[-1] - 1) * prod(batch) * prod(b[-2:])


def _add_mm(shapes: Shapes, values: Values) -> int:
    return _mm(shapes[1:], values)


_ATTENTION = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)
# Operators to which torch.profiler gives nothing.
SKIPPED: dict[str, Formula] = {
    **{f"aten::_scaled_dot_product_{kernel}": _attend for kernel in _ATTENTION},
    **{f"aten::_scaled_dot_product_{kernel}_backward": attend_backward for kernel in _ATTENTION},
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::addmm_": _add_mm,
    "aten::baddbmm_": _add_mm,
    "aten::addmv_": _mv,
    "aten::_grouped_mm": grouped_mm,
    "transformers::grouped_mm_fallback": grouped_mm,  # its backward is plain mm
    "aten::mv": _mv,
    "aten::addmv": _mv,
    "aten::dot": _dot,
    "aten::vdot": _dot,
    "aten::_int_mm": _mm,
    "aten::_scaled_mm": _mm,
    "aten::linalg_solve_triangular": _solve_triangular,
}
# Operators that it counts itself; filled in where it gave one of these nothing (an overload that it does not read).
COUNTED: dict[str, Formula] = {
    "aten::mm": _mm,
    "aten::bmm": _mm,
    "aten::addmm": _add_mm,
    "aten::baddbmm": _add_mm,
    "aten::conv2d": _convolution,
}
