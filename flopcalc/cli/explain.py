"""`flopcalc explain`: the formula of an operation, with its numbers filled in."""

from __future__ import annotations

import json
import re
from fnmatch import translate
from typing import Any

import click

from flopcalc.cli.command import Command, model_argument
from flopcalc.cli.options.counting import make_estimate
from flopcalc.cli.options.workload import workload_options
from flopcalc.core.count.count import Row
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.model.ops import Op, join
from flopcalc.core.workload.sums import Feature
from flopcalc.errors import WorkloadError
from flopcalc.units import format_flops

_FEATURES = {
    "tokens": "tokens",
    "logits": "positions with logits",
    "cached": "keys and values formed",
    "patches": "patches",
    "merged": "merged patches",
    "images": "images",
    "tiles": "tiles",
    "frames": "query-key pairs within temporal patches",
    "windows": "query-key pairs within windows",
    "calls": "calls",
    "folds": "folds",
    "padding": "tile padding",
    "samples": "samples",
}
# What clipping multiplies by: rows of one kind, taken sample by sample.
_SAMPLE_FEATURES = {"each": "{}", "squares": "{}² of each sample", "products": "{}² of each sample"}


@click.command(cls=Command)
@model_argument
@click.option(
    "--op", "pattern", required=True, metavar="PATTERN", help="Glob of module paths, as *.q_proj or *self_attn*."
)
@workload_options
@click.option("--json", "as_json", is_flag=True)
def explain(model: str, pattern: str, as_json: bool, **options: Any) -> None:
    """The formula of an operation with its numbers filled in.

    Example: flopcalc explain llama-3.1-8b --seq 2048 --op '*self_attn*'
    """
    asked = make_estimate(model, options)
    found = find_rows(asked.estimate, pattern)
    if not found:
        paths = [row.path for row in asked.estimate.by_module() if row.forward or row.clipping]
        raise WorkloadError(f"--op {pattern!r} matches no operation; there are {', '.join(paths)}")
    shown = [explain_row(asked.estimate, *entry) for entry in found]
    if as_json:
        click.echo(
            json.dumps({"convention": asked.estimate.convention, "operations": shown}, indent=2, ensure_ascii=False)
        )
        return
    click.echo(f"convention {asked.estimate.convention}")
    for entry in shown:
        parameter = f".{entry['parameter']}" if entry["parameter"] not in (None, "weight") else ""
        click.echo(f"\n{entry['path']}{parameter}  ({entry['kind']} × {entry['count']})")
        for line in entry["lines"]:
            click.echo(f"  {line}")


def find_rows(estimate: Estimate, pattern: str) -> list[tuple[str, int, Row, int]]:
    """Matching rows as (path, copies, row, value of its feature); layers that count alike are one entry."""
    regex = re.compile(translate(pattern))
    estimator, load, times = estimate.terms[0]
    copies: dict[tuple[str, Row, int], int] = {}
    for block, row, value in estimator.rows(load, estimate.convention):
        path = join(f"{block.path}.*" if block.layers is not None else block.path, row.op.name)
        has_work = value and (row.forward or ((row.backward or row.clipping) and load.phase == "train"))
        if has_work and (regex.match(path) or pattern in path):
            key = (path, row, value * times)  # over all micro-batches
            copies[key] = copies.get(key, 0) + block.copies
    return [(path, many, row, value) for (path, row, value), many in copies.items()]


def explain_row(estimate: Estimate, path: str, copies: int, row: Row, value: int) -> dict[str, Any]:
    """One operation: its formula in words, then in numbers, per direction."""
    op = row.op
    is_train = estimate.terms[0][1].phase == "train"
    unit = name_feature(op.feature, estimate.convention)
    many = value * copies
    forward = row.forward * many
    backward, again, clipping = (each * many * is_train for each in (row.backward, row.recompute, row.clipping))
    lines = [f"{unit}: {value:,}"]
    if op.feature[0] == "padding":
        lines = [f"forward  = {forward:,} ({format_flops(forward)}), measured beyond need on the device"]
    elif row.forward:
        words, numbers = _formula(row)
        layers = f"{copies} × " if copies > 1 else ""
        # A fold is done once for all rows: how many experts a token reaches does not matter to it.
        times = f" × {op.times}" if op.times > 1 and op.feature[0] != "executed" else ""
        per_unit = " × times" if times else ""
        lines.append(f"forward  = layers × {words}{per_unit} × {unit.partition(' (')[0]}")
        lines.append(f"         = {layers}{numbers}{times} × {value:,} = {forward:,} ({format_flops(forward)})")
    if is_train and op.feature[0] == "padding":
        lines.append(f"backward = {backward:,} ({format_flops(backward)}), likewise")
    elif is_train and (row.forward or row.backward):
        ratio = f"{row.backward / row.forward:g} × forward = " if row.forward else _name_backward(op)
        lines.append(f"backward = {ratio}{backward:,} ({format_flops(backward)})")
    if again:
        lines.append(f"recomputed = {again:,} ({format_flops(again)})")
    if clipping and row.backward:
        lines.append(f"clipping = backward once more = {clipping:,} ({format_flops(clipping)})")
    elif clipping:
        layers = f"{copies} × " if copies > 1 else ""
        lines.append(f"clipping = layers × {_name_clipping(row)} × {unit}")
        lines.append(f"         = {layers}{row.clipping:,} × {value:,} = {clipping:,} ({format_flops(clipping)})")
    return {
        "path": path,
        "parameter": op.param if op.kind in ("linear", "conv", "embed") else None,
        "kind": op.kind,
        "count": copies,
        "feature": unit,
        "feature_value": value,
        "forward": forward,
        "backward": backward,
        "recompute": again,
        "clipping": clipping,
        "lines": lines,
    }


def _name_clipping(row: Row) -> str:
    names = {
        "samples": "2 × trainable parameters (factors by per-sample gradients)",
        # LoRA has two matrices, and either may be frozen.
        "each": "2 × weights that train (per-sample gradients)",
        "squares": "2 × (in + out) of each matrix that trains, out once more for a bias (rows by rows)",
        "products": "2 × matrices that train (sum of both Gram matrices' product)",
    }
    return names.get(str(row.op.feature[0]), "2 × 2 × in × out (run once more, then its gradients)")


def _name_backward(op: Op) -> str:
    names = {"attend": "in blocks of its own = ", "product": "FLOPs of its gradients × rows = "}
    return names.get(op.kind, "gradient of the folded weight = ")


def _formula(row: Row) -> tuple[str, str]:
    """The FLOPs of one row per unit of its feature and `times`: in words, and with the numbers filled in."""
    op = row.op
    if op.kind == "attend":
        base = 2 * op.heads * (op.qk + op.v) * op.times
        words, numbers = "2 × heads × (qk + v)", f"2 × {op.heads} × ({op.qk} + {op.v})"
        if row.forward == base:
            return words, numbers
        return f"{words} × padding of the head dim", f"{numbers} × {row.forward / base:g}"
    if op.kind == "embed":
        rank = row.forward // (2 * op.size * op.times)
        return "2 × r × width", f"2 × {rank} × {op.size}"
    if op.flops and op.feature[0] not in ("needed", "executed"):  # its spec says its FLOPs, as a number per row
        rest = row.forward // op.times - op.flops
        if not rest or op.kind == "product":
            return "FLOPs per row", f"{op.flops:,}"
        rank = rest // (2 * (op.n_in + op.n_out))
        words, numbers = "(FLOPs per row + 2 × r × (in + out))", f"2 × {rank} × ({op.n_in} + {op.n_out})"
        return words, f"({op.flops:,} + {numbers})"
    if op.feature[0] == "executed":
        rank = row.forward // (2 * op.copies * op.n_in * op.n_out)
        return "2 × copies × r × in × out", f"2 × {op.copies} × {rank} × {op.n_in} × {op.n_out}"
    base = 0 if op.feature[0] == "needed" else 2 * op.n_in * op.n_out * op.times
    rank = (row.forward - base) // (2 * op.times * (op.n_in + op.n_out))
    adapter = f"2 × {rank} × ({op.n_in} + {op.n_out})"
    if not base:
        return "2 × r × (in + out)", adapter
    if not rank:
        return "2 × in × out", f"2 × {op.n_in} × {op.n_out}"
    return "(2 × in × out + 2 × r × (in + out))", f"(2 × {op.n_in} × {op.n_out} + {adapter})"


def name_feature(feature: Feature, convention: str = "model") -> str:
    kind, *rest = feature
    if kind in ("needed", "executed", "decoder"):
        return name_feature(feature[1:], convention)
    if kind in _SAMPLE_FEATURES:
        return _SAMPLE_FEATURES[kind].format(name_feature(feature[1:], convention))
    if kind == "only":
        return name_feature(feature[2:], convention)
    if kind == "either":
        return name_feature(rest[0 if convention == "model" else 1], convention)
    if kind == "minus":
        return " less ".join(name_feature(part, convention) for part in rest)
    if kind == "sum":
        return f"rows (per {rest[0]}: {rest[1]})"
    if feature[0] == "pairs":
        window = f", window {feature[2]}" if feature[2] else ""
        return f"query-key pairs ({feature[1]}{window})"
    return _FEATURES[str(feature[0])]
