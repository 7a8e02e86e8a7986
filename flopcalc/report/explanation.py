"""The formula of an operation with its numbers filled in: an estimate and a pattern in; lines for people out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import translate
from typing import Any, NamedTuple

from flopcalc.base.errors import WorkloadError, format_value
from flopcalc.base.spelling import spell
from flopcalc.base.text_table import wrap
from flopcalc.base.units import format_flops
from flopcalc.base.vocabulary import Convention
from flopcalc.core.count.flops import NO_FLOPS, Flops
from flopcalc.core.count.products import Product, Role, Row
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.model.ops import Attend, Embed, Linear, Multiply, join
from flopcalc.core.workload.sums import Sum


def explain_rows(estimate: Estimate, pattern: str) -> list[dict[str, Any]]:
    """Every operation that matches a pattern, explained; an error that lists them if none does."""
    entries = find_rows(estimate, pattern)
    if not entries:
        paths = ", ".join(list_operations(estimate))
        raise WorkloadError(f"{spell('op')} {format_value(pattern)} matches no operation; there are {paths}")
    return [explain_row(estimate, entry) for entry in entries]


def list_operations(estimate: Estimate) -> list[str]:
    """Paths of the modules that do work."""
    return [row.path for row in estimate.by_module() if row.forward or row.clipping]


def format_explanation(convention: Convention, shown: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `explain_rows` as text."""
    lines = [f"convention {convention}"]
    for entry in shown:
        parameter = f".{entry['parameter']}" if entry["parameter"] not in (None, "weight") else ""
        lines += ["", *wrap(f"{entry['path']}{parameter}  ({entry['kind']} × {entry['count']})", "", "  ")]
        for line in entry["lines"]:
            lines += _wrap_line(line)
    return "\n".join(lines)


def _wrap_line(line: str) -> list[str]:
    """A formula that is too long has its result on a line of its own."""
    lines = wrap(line, "  ", " " * 13)
    formula, _, result = line.rpartition(" = ")
    if len(lines) == 1 or "=" not in formula:
        return lines
    return [*wrap(formula, "  ", " " * 13), *wrap(f"= {result}", " " * 11, " " * 13)]


class ExplainedRow(NamedTuple):
    """The products of a module that run over the same sum; layers that count alike are one entry."""

    path: str
    layers: int
    row: Row
    products: tuple[Product, ...]
    value: int  # of the sum, over all micro-batches

    @property
    def flops(self) -> Flops:
        """Per unit of the sum, of one layer."""
        total = NO_FLOPS
        for product in self.products:
            total += product.per_unit
        return total

    def find(self, role: Role) -> Product | None:
        return next((product for product in self.products if product.role == role), None)


def find_rows(estimate: Estimate, pattern: str) -> list[ExplainedRow]:
    """What matches a pattern, by module and sum."""
    regex = re.compile(translate(pattern))
    estimator, load, times = estimate.terms[0]
    layers: dict[tuple[str, Row, tuple[Product, ...], int], int] = {}
    for block, row, values in estimator.rows(load, estimate.convention):
        path = join(f"{block.path}.*" if block.layers is not None else block.path, row.op.name)
        if not (regex.match(path) or pattern in path):
            continue
        sums: dict[tuple[Sum, int], list[Product]] = {}
        for product, value in zip(row.products, values, strict=True):
            flops = product.per_unit
            if value and (flops.forward or (load.phase == "train" and any(flops))):
                sums.setdefault((product.rows, value), []).append(product)
        for (_, value), products in sums.items():
            key = (path, row, tuple(products), value * times)
            layers[key] = layers.get(key, 0) + block.copies
    return [ExplainedRow(path, many, row, products, value) for (path, row, products, value), many in layers.items()]


def explain_row(estimate: Estimate, entry: ExplainedRow) -> dict[str, Any]:
    """One operation: its formula in words, then in numbers, per direction."""
    op, value = entry.row.op, entry.value
    is_train = estimate.terms[0].load.phase == "train"
    rows = entry.products[0].rows
    unit = rows.describe(estimate.convention)
    one = entry.flops if is_train else Flops(entry.flops.forward)
    flops = one * (value * entry.layers)
    lines = [f"{unit}: {value:,}"]
    layers = f"{entry.layers} × " if entry.layers > 1 else ""
    is_padding = entry.find("padding") is not None
    if is_padding:
        lines = [f"forward  = {_count(flops.forward)}, measured beyond need on the device"]
    elif one.forward:
        words, numbers = _formula(entry)
        # A fold is done once for all rows: how many experts a token reaches does not matter to it.
        times = f" × {op.times}" if op.times > 1 and entry.find("fold") is None else ""
        per_unit = " × times" if times else ""
        lines.append(f"forward  = layers × {words}{per_unit} × {unit.partition(' (')[0]}")
        lines.append(f"         = {layers}{numbers}{times} × {value:,} = {_count(flops.forward)}")
    if is_train and is_padding:
        lines.append(f"backward = {_count(flops.backward)}, likewise")
    elif is_train and (one.forward or one.backward):
        ratio = f"{one.backward / one.forward:g} × forward = " if one.forward else _name_backward(entry)
        lines.append(f"backward = {ratio}{_count(flops.backward)}")
    if flops.recompute:
        lines.append(f"recomputed = {_count(flops.recompute)}")
    if flops.clipping and one.backward:
        lines.append(f"clipping = backward once more = {_count(flops.clipping)}")
    elif flops.clipping:
        lines.append(f"clipping = layers × {_CLIPPING[entry.products[0].role]} × {unit}")
        lines.append(f"         = {layers}{one.clipping:,} × {value:,} = {_count(flops.clipping)}")
    formats = dict.fromkeys(
        name for product in entry.products for name in product.split_formats(product.per_unit) if any(product.per_unit)
    )
    stored = entry.row.numbers.weight.name if isinstance(op, (Linear, Embed)) else None
    if [*formats] != ["bf16"] or stored not in ("bf16", None):
        where = f"; the weight is stored in {stored}" if stored is not None else ""
        lines.append(f"computed in {', '.join(formats)}{where}")
    return {
        "path": entry.path,
        "parameter": op.param if isinstance(op, (Linear, Embed)) else None,
        "kind": op.kind,
        "count": entry.layers,
        "feature": unit,
        "feature_value": value,
        "forward": flops.forward,
        "backward": flops.backward,
        "recompute": flops.recompute,
        "clipping": flops.clipping,
        "computed_in": [*formats],
        "stored_in": stored,
        "lines": lines,
    }


def _count(flops: int) -> str:
    return f"{flops:,} ({format_flops(flops)})"


_CLIPPING: dict[Role, str] = {
    "clip_factors": "2 × trainable parameters (factors by per-sample gradients)",
    # LoRA has two matrices, and either may be frozen.
    "clip_gradients": "2 × weights that train (per-sample gradients)",
    "clip_grams": "2 × (in + out) of each matrix that trains, out once more for a bias (rows by rows)",
    "clip_sums": "2 × matrices that train (sum of both Gram matrices' product)",
    "clip_modules": "2 × 2 × in × out (run once more, then its gradients)",
}


def _name_backward(entry: ExplainedRow) -> str:
    names = {"attend": "in blocks of its own = ", "product": "FLOPs of its gradients × rows = "}
    return names.get(entry.row.op.kind, "gradient of the folded weight = ")


def _formula(entry: ExplainedRow) -> tuple[str, str]:
    """The forward FLOPs per unit of the sum and `times`: in words, and with the numbers filled in."""
    op = entry.row.op
    if isinstance(op, Attend):
        plain = 2 * op.heads * (op.qk + op.v) * op.times
        words, numbers = "2 × heads × (qk + v)", f"2 × {op.heads} × ({op.qk} + {op.v})"
        if entry.flops.forward == plain:
            return words, numbers
        return f"{words} × padding of the head dim", f"{numbers} × {entry.flops.forward / plain:g}"
    if isinstance(op, Multiply):
        return "FLOPs per row", f"{op.flops:,}"
    rank = entry.row.rank
    if isinstance(op, Embed):
        return "2 × r × width", f"2 × {rank} × {op.dim}"
    assert isinstance(op, Linear)
    if entry.find("fold") is not None:
        return "2 × copies × r × in × out", f"2 × {op.copies} × {rank} × {op.n_in} × {op.n_out}"
    whole = ("FLOPs per row", f"{op.own_flops:,}") if op.own_flops else ("2 × in × out", f"2 × {op.n_in} × {op.n_out}")
    adapted = ("2 × r × (in + out)", f"2 × {rank} × ({op.n_in} + {op.n_out})")
    if entry.find("base") is None:
        return adapted
    if entry.find("adapter_b") is None:
        return whole
    return f"({whole[0]} + {adapted[0]})", f"({whole[1]} + {adapted[1]})"
