"""Products: what `count` emits, one list for FLOPs, `explain`, padding, memory, seconds and layouts to fold over."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from flopcalc.base.frozen import Value, frozen
from flopcalc.base.number_formats import PLAIN
from flopcalc.base.vocabulary import Group
from flopcalc.core.count.flops import NO_FLOPS, Flops
from flopcalc.core.formats.formats import PLAIN_NUMBERS, OpFormats, find_sizes
from flopcalc.core.formats.stored import make_plain
from flopcalc.core.model.ops import Embed, Linear, Op
from flopcalc.core.workload.sums import Sum

Role = Literal[
    "base",  # activations by a weight
    "adapter_a", "adapter_b",  # LoRA's two
    "fold", "fold_gradient", "folded_weight",  # an adapter folded into a bare parameter, and the gradients of that
    "scores", "values",  # attention in eager code
    "fused", "fused_backward",  # attention in one kernel
    "activations", "activations_gradient",  # a product that a spec describes by its FLOPs
    "clip_factors", "clip_gradients", "clip_grams", "clip_sums", "clip_modules",  # per-sample clipping
    "padding",  # executed beyond need, as measured
    "traced",  # a traced module's whole work
]  # fmt: skip


class Passes(NamedTuple):
    """How often a product runs in each pass of a training step."""

    forward: int = 1
    input_gradient: int = 0
    weight_gradient: int = 0
    recompute: int = 0
    clipping: int = 0

    @property
    def backward(self) -> int:
        return self.input_gradient + self.weight_gradient


FORWARD = Passes()


@frozen()
class Product(Value):
    """One product of a module: (rows, n_in) by (n_in, n_out), `copies` times; `flops` of a pass per unit of `rows`."""

    role: Role
    rows: Sum
    flops: int
    passes: Passes = FORWARD
    n_in: int = 0
    n_out: int = 0
    copies: int = 1  # heads, or copies of a weight that all rows meet
    format: str = PLAIN  # what it is computed in
    gradient_format: str = PLAIN  # what its gradients are computed in

    @property
    def per_unit(self) -> Flops:
        passes = self.passes
        return Flops(
            self.flops * passes.forward,
            self.flops * passes.backward,
            self.flops * passes.recompute,
            self.flops * passes.clipping,
        )

    def split_formats(self, flops: Flops) -> dict[str, Flops]:
        """FLOPs of all its passes, by the format that they are computed in."""
        if self.format == self.gradient_format or not (flops.backward or flops.clipping):
            return {self.format: flops}
        return {
            self.format: Flops(flops.forward, 0, flops.recompute),
            self.gradient_format: Flops(0, flops.backward, 0, flops.clipping),
        }

    def change(self, **passes: int) -> Product:
        """The same product with other passes."""
        return replace(self, passes=self.passes._replace(**passes))


@frozen()
class Row(Value):
    """One op of one layer: its products and its parameters."""

    op: Op
    products: tuple[Product, ...] = ()
    parameters: int = 0
    inactive: int = 0  # parameters of experts that one token does not reach
    trainable: int = 0
    trains_weight: bool = False  # its own weight gets a gradient, not its adapter's alone
    numbers: OpFormats = PLAIN_NUMBERS  # how its parameters are stored

    def find(self, role: Role) -> Product | None:
        """Its product of a role, if it has one."""
        return next((product for product in self.products if product.role == role), None)

    @property
    def has_backward(self) -> bool:
        """Whether any gradient is computed through its products."""
        return any(product.flops and product.passes.backward for product in self.products)

    @property
    def rank(self) -> int:
        """Of its adapters together, 0 without one."""
        return sum(product.n_in for product in self.products if product.role == "adapter_b")

    def list_weights(self, has_adapters: bool) -> list[Weights]:
        """Its parameters by the format that they are stored in; with adapters, what trains is in theirs."""
        numbers, adapted = self.numbers, self.trainable if has_adapters else 0
        weights = []
        rest = self.parameters - adapted
        if numbers.weight.is_quantized and rest and isinstance(self.op, (Linear, Embed)) and not self.op.tied:
            size = self.op.weight_size
            weights.append(
                Weights(numbers.weight.name, size, *numbers.weight.count_bytes(*find_sizes(self.op), self.op.copies))
            )
            rest -= size
        plain = numbers.plain if numbers.weight.is_quantized else numbers.weight.name
        for name, count in ((plain, rest), (numbers.adapter, adapted)):
            if count:
                weights.append(Weights(name, count, count * make_plain(name).bits // 8))
        return weights


class Weights(NamedTuple):
    """Parameters that are stored in one format: how many, their bytes, and those of scales and zero points."""

    format: str
    parameters: int
    bytes: int
    scale_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.bytes + self.scale_bytes

    def add(self, other: Weights, times: int = 1) -> Weights:
        """The sum with others of the same format, each repeated."""
        sums = (mine + theirs * times for mine, theirs in zip(self[1:], other[1:], strict=True))
        return Weights(self.format, *sums)


@frozen()
class Block(Value):
    """Layers of a stage that count alike, and the rows of one of them."""

    path: str
    layers: tuple[int, ...] | None  # None: not a repeated stage
    group: Group
    rows: tuple[Row, ...]

    @property
    def copies(self) -> int:
        return 1 if self.layers is None else len(self.layers)


class CountedRow(NamedTuple):
    """A row on one workload: the value of each product's sum."""

    block: Block
    row: Row
    values: tuple[int, ...]

    def by_format(self) -> dict[str, Flops]:
        """FLOPs of one layer by the format that they are computed in."""
        sums: dict[str, Flops] = {}
        for product, value in zip(self.row.products, self.values, strict=True):
            for name, flops in product.split_formats(product.per_unit * value).items():
                sums[name] = sums.get(name, NO_FLOPS) + flops
        return sums

    @property
    def flops(self) -> Flops:
        """Of one layer."""
        total = NO_FLOPS
        for product, value in zip(self.row.products, self.values, strict=True):
            total += product.per_unit * value
        return total


def sum_products(blocks: tuple[Block, ...]) -> dict[Sum, Flops]:
    """FLOPs per unit of every sum, over the whole model."""
    totals: dict[Sum, Flops] = {}
    for block in blocks:
        for row in block.rows:
            for product in row.products:
                if any(product.per_unit):
                    totals[product.rows] = totals.get(product.rows, NO_FLOPS) + product.per_unit * block.copies
    return totals


def sum_formats(blocks: tuple[Block, ...]) -> dict[str, dict[Sum, Flops]]:
    """FLOPs per unit of every sum, apart for every format; at least one format, though nothing runs."""
    totals: dict[str, dict[Sum, Flops]] = {}
    for block in blocks:
        for row in block.rows:
            for product in row.products:
                for name, flops in product.split_formats(product.per_unit * block.copies).items():
                    if any(flops):
                        sums = totals.setdefault(name, {})
                        sums[product.rows] = sums.get(product.rows, NO_FLOPS) + flops
    return totals or {PLAIN: {}}
