"""Read profiled steps and single calls: the sizes and seconds of every operator, as the points that fits take."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flopcalc.base.vocabulary import FUSED_KERNELS, CallMask, FusedKernel, PassDirection, ProductDirection
from flopcalc.hardware.tiles import ProductSize
from flopcalc.measure.operator_kinds import classify
from flopcalc.measure.predictor.fit.cases import Json, ModelledCase
from flopcalc.measure.predictor.fit.choices import CHOICES
from flopcalc.prediction.kernels.memory_bound import find_size
from flopcalc.prediction.moe_versions import MASKED
from flopcalc.prediction.work import Work

_DTYPE_BYTES = {
    "c10::BFloat16": 2, "c10::Half": 2, "float": 4, "long int": 8, "int": 4, "double": 8, "bool": 1, "unsigned char": 1,
}  # fmt: skip
_HEAD_DIM = 256  # the widest that is a head's
_FLOATS = ("c10::BFloat16", "c10::Half", "float", "double")


class ProfiledOperator(NamedTuple):
    """A row of a profile: all calls of one operator with the same shapes and dtypes in one pass."""

    name: str
    is_backward: bool
    shapes: str  # JSON, a list of sizes per tensor
    dtypes: str  # separated by commas
    calls: int
    launches: int
    us: float
    kernel_name: str  # of the first launch

    @property
    def sizes(self) -> list[list[int]]:
        found: list[list[int]] = json.loads(self.shapes)
        return found

    @property
    def seconds(self) -> float:
        """Of one call."""
        return self.us / self.calls * 1e-6


class ProductPoint(NamedTuple):
    """A product of a linear layer with n outputs and k inputs over m rows."""

    direction: ProductDirection
    m: int
    n: int
    k: int
    seconds: float
    calls: int

    @property
    def size(self) -> ProductSize:
        return ProductSize(*self[:4])


class GroupedPoint(NamedTuple):
    """Products of all experts in one call, m rows in all."""

    direction: ProductDirection
    experts: int
    m: int
    n: int
    k: int
    seconds: float

    @property
    def size(self) -> ProductSize:
        return ProductSize(self.direction, self.m, self.n, self.k, self.experts)


class AttentionPoint(NamedTuple):
    kernel: FusedKernel
    direction: PassDirection
    mask: CallMask
    batch: int
    heads: int
    kv_heads: int
    qk: int
    length: int
    keys: int
    seconds: float
    calls: int


class MovedPoint(NamedTuple):
    """A memory-bound operator."""

    kind: str
    bytes: int
    seconds: float
    calls: int


class Points(NamedTuple):
    products: list[ProductPoint]
    grouped: list[GroupedPoint]
    attention: list[AttentionPoint]
    moved: list[MovedPoint]


def list_operators(case: Json) -> list[ProfiledOperator]:
    return [ProfiledOperator(*row) for row in case["operators"]]


def is_plain(case: Json) -> bool:
    """Whether a case was profiled and runs every operator once, as it is.

    Recomputation is left out: a product that ends a recomputation shows up in the profile but never runs.
    """
    return "operators" in case and not case["compiled"] and case["recompute"] == "none"


def read_points(cases: Iterable[ModelledCase]) -> Points:
    """Every operator of the plain cases."""
    points = Points([], [], [], [])
    for each in cases:
        if not is_plain(each.case):
            continue
        operators = list_operators(each.case)
        masks = _list_masks(each.work)
        rows, weights = _list_layers(operators)
        for operator in operators:
            if not operator.us or not operator.name:
                continue
            kind = classify(operator.name)
            if "grouped_mm" in operator.name:
                grouped = GroupedPoint(*read_grouped(operator.is_backward, operator.sizes), operator.seconds)
                if grouped.m >= CHOICES.min_rows_per_expert * grouped.experts:
                    points.grouped.append(grouped)
            elif kind == "product":
                if product := _read_product(operator, rows, weights):
                    points.products.append(product)
            elif kind == "attention":
                if attention := _read_attention(operator, masks):
                    points.attention.append(attention)
            elif operator.launches and (moved := read_moved(operator)):
                is_reduced_back = moved.kind == "reduce" and operator.is_backward
                points.moved.append(moved._replace(kind="reduce_backward") if is_reduced_back else moved)
    return points


def _list_masks(work: Work) -> dict[tuple[int, int, int], set[CallMask]]:
    """(Batch, heads, length) -> the masks of such attention calls in a step."""
    masks: dict[tuple[int, int, int], set[CallMask]] = {}
    for call in work.attention:
        masks.setdefault((call.batch, call.heads, call.length), set()).add(call.mask)
    return masks


def _list_layers(operators: Iterable[ProfiledOperator]) -> tuple[set[int], set[tuple[int, int]]]:
    """Row counts and (inputs, outputs) of the linear layers in a step's forward pass."""
    rows, weights = set(), set()
    for operator in operators:
        if operator.name in ("aten::mm", "aten::addmm") and not operator.is_backward:
            (m, _), (k, n) = _list_operands(operator)
            rows.add(m)
            weights.add((k, n))
    return rows, weights


def _list_operands(operator: ProfiledOperator) -> list[list[int]]:
    """Sizes of the two matrices of aten::mm, or of aten::addmm, which has its bias first."""
    return operator.sizes[-2:] if operator.name == "aten::mm" else operator.sizes[1:3]


def _read_product(operator: ProfiledOperator, rows: set[int], weights: set[tuple[int, int]]) -> ProductPoint | None:
    """The linear layer and direction behind a bf16 product; None if the product is no linear layer's."""
    if operator.name not in ("aten::mm", "aten::addmm") or operator.dtypes.split(",")[0] != "c10::BFloat16":
        return None
    (a, b), (_, c) = _list_operands(operator)
    if not operator.is_backward:
        return ProductPoint("forward", a, c, b, operator.seconds, operator.calls)
    if b in rows and (c, a) in weights:
        return ProductPoint("wgrad", b, a, c, operator.seconds, operator.calls)
    if a in rows and (c, b) in weights:
        return ProductPoint("dgrad", a, b, c, operator.seconds, operator.calls)
    return None


def read_grouped(is_backward: bool, sizes: Sequence[Sequence[int]]) -> tuple[ProductDirection, int, int, int, int]:
    """Direction, experts, m, n, k of a grouped product from its tensors' sizes, as autograd calls it."""
    left, right, ends = sizes[:3]
    if len(right) == 2:
        return "wgrad", ends[0], left[1], left[0], right[1]
    if is_backward:
        return "dgrad", right[0], left[0], left[1], right[2]
    return "forward", right[0], left[0], right[2], left[1]


def _read_attention(
    operator: ProfiledOperator, masks: dict[tuple[int, int, int], set[CallMask]]
) -> AttentionPoint | None:
    """An attention call with the mask that the model's op list gives it; None if the op list has no such call."""
    is_backward = "backward" in operator.name
    sizes = operator.sizes
    query, key = sizes[1:3] if is_backward else sizes[0:2]
    batch, heads, length, qk = query
    possible = masks.get((batch, heads, length), set())
    has_mask = any(len(size) == 4 and size[-2:] == [length, key[2]] and size[-1] != qk for size in sizes[3:])
    unmasked = sorted(possible - {"window"})
    mask = "window" if "window" in possible and (has_mask or not unmasked) else unmasked[0] if unmasked else None
    kernel = next((kernel for kernel in FUSED_KERNELS if kernel in operator.name), None)
    if mask is None or kernel is None:
        return None
    direction: PassDirection = "backward" if is_backward else "forward"
    return AttentionPoint(
        kernel, direction, mask, batch, heads, key[1], qk, length, key[2], operator.seconds, operator.calls
    )


def read_moved(operator: ProfiledOperator) -> MovedPoint | None:
    """Kind and bytes of a memory-bound operator; None if no tensor's size is known."""
    dtypes = operator.dtypes.split(",")
    typed = [(size, dtype) for size, dtype in zip(operator.sizes, dtypes, strict=False) if size]
    tensors = [(math.prod(size), _DTYPE_BYTES[dtype]) for size, dtype in typed if dtype in _DTYPE_BYTES]
    if not tensors:
        return None
    floats = {dtype for _, dtype in typed if dtype in _FLOATS}
    kind = classify(operator.name)
    if operator.name == "aten::copy_":
        kind = "copy" if dtypes[0] == dtypes[1] else "cast"
    if kind == "reduce" and len(typed[0][0]) == 4 and typed[0][0][-1] <= _HEAD_DIM:
        return None  # over heads: its time depends on what it leaves, which a profile does not show
    moved = _count_bytes(operator.name, kind, tensors, floats)
    kind = _name_layout(kind, operator.kernel_name, tensors, floats)
    if operator.name == "aten::masked_fill_" and kind == "pointwise_strided":
        kind = MASKED
    return MovedPoint(kind, moved, operator.seconds, operator.calls)


def _count_bytes(name: str, kind: str, tensors: Sequence[tuple[int, int]], floats: set[str]) -> int:
    """Bytes that an operator reads and writes, from (elements, bytes of one) of its tensors."""
    most, width = max(tensors)
    if len(floats) > 1:  # the result has the wider dtype
        width = max(_DTYPE_BYTES[dtype] for dtype in floats)
    given = sum(count * size for count, size in tensors)
    if name == "aten::copy_":
        return most * (tensors[0][1] + (tensors[1][1] if len(tensors) > 1 else 0))
    if kind == "reduce":
        return given
    if kind == "fill":
        return most * width
    if name.endswith("_"):  # in place
        return given + tensors[0][0] * tensors[0][1]
    return given + most * width


def _name_layout(kind: str, kernel_name: str, tensors: Sequence[tuple[int, int]], floats: set[str]) -> str:
    """The kind with the memory layout of its tensors, which the kernel's name shows."""
    if kind not in ("pointwise", "copy", "cast"):
        return kind
    is_contiguous = "vectorized" in kernel_name or "Memcpy" in kernel_name or "unrolled" in kernel_name
    if kind == "pointwise" and len(floats) > 1:
        return "pointwise_mixed" if is_contiguous else "pointwise_strided_mixed"
    if not is_contiguous:
        return f"{kind}_strided" + ("_wide" if kind != "cast" and tensors[0][1] >= 4 else "")
    if kind == "cast":
        return "cast_up" if tensors[0][1] > tensors[-1][1] else "cast_down"
    return kind


# --- Single calls -----------------------------------------------------------------------------------------------------
def read_single_calls(calls: Sequence[Json]) -> Points:
    """Calls that were timed for the predictor, and rows of the table attention."""
    return Points(
        [
            ProductPoint(
                call["direction"], call["m"], call["n"], call["k"], call["seconds"], CHOICES.single_call_weight
            )
            for call in calls
            if "m" in call and "copies" not in call
        ],
        [
            GroupedPoint(call["direction"], call["copies"], call["m"], call["n"], call["k"], call["seconds"])
            for call in calls
            if "copies" in call
        ],
        [_read_attention_call(call) for call in calls if call.get("kernel", "eager") != "eager"],
        [MovedPoint(call["kind"], _find_size(call), call["seconds"], 1) for call in calls if "kind" in call],
    )


def _find_size(call: Json) -> int:
    if "bytes" in call:
        return int(call["bytes"])
    return round(find_size(call["kind"], call["reads"], call["writes"]))


def _read_attention_call(call: Json) -> AttentionPoint:
    """The head dim is the mean of those of keys and of values."""
    qk, v = (call["qk"], call["v"]) if "qk" in call else (call["qk_dim"], call["v_dim"])
    call = {"kv_heads": call["heads"], "keys": call["length"], **call}  # the table has neither
    return AttentionPoint(
        call["kernel"],
        call["direction"],
        call["mask"],
        call["batch"],
        call["heads"],
        call["kv_heads"],
        (qk + v) // 2,
        call["length"],
        call["keys"],
        call["seconds"],
        1,
    )


def read_gemm_table(rows: Iterable[Json]) -> list[ProductPoint]:
    """Products of the table gemm, each measured alone in a short burst."""
    return [
        ProductPoint(row["direction"], row["m"], row["n"], row["k"], row["seconds"], 1)
        for row in rows
        if row["dtype"] == "bf16" and row["mode"] == "burst"
    ]


def join_points(first: Points, second: Points) -> Points:
    return Points(
        first.products + second.products,
        first.grouped + second.grouped,
        first.attention + second.attention,
        first.moved + second.moved,
    )
