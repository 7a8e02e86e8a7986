"""`flopcalc explain`: the formula of an operation, with its numbers filled in."""

from __future__ import annotations

import json
import re
from fnmatch import translate
from typing import Any

import click

from flopcalc.cli.options import make_estimate, model_option, workload_options
from flopcalc.count import Block, Row
from flopcalc.errors import WorkloadError
from flopcalc.estimate import Estimate
from flopcalc.recipe import join
from flopcalc.units import format_flops
from flopcalc.workload import Feature

_FEATURES = {
    "tokens": "tokens",
    "logits": "positions with logits",
    "cached": "keys and values formed",
    "patches": "patches",
    "merged": "merged patches",
    "images": "images",
    "frames": "query-key pairs within temporal patches",
    "windows": "query-key pairs within windows",
    "calls": "calls",
    "folds": "folds",
}


@click.command()
@model_option
@click.option(
    "--op", "pattern", required=True, metavar="PATTERN", help="Glob of module paths, as *.q_proj or *self_attn*."
)
@workload_options
@click.option("--json", "as_json", is_flag=True)
def explain(model: str, pattern: str, as_json: bool, **options: Any) -> None:
    """The formula of an operation with its numbers filled in.

    Example: flopcalc explain --model llama-3.1-8b --seq 2048 --op '*self_attn*'
    """
    asked = make_estimate(model, options)
    found = find_rows(asked.estimate, pattern)
    if not found:
        paths = [row.path for row in asked.estimate.by_module() if row.forward]
        raise WorkloadError(f"--op {pattern!r} matches no operation; there are {', '.join(paths)}")
    shown = [explain_row(asked.estimate, *entry) for entry in found]
    if as_json:
        click.echo(
            json.dumps({"convention": asked.estimate.convention, "operations": shown}, indent=2, ensure_ascii=False)
        )
        return
    click.echo(f"convention {asked.estimate.convention}")
    for entry in shown:
        click.echo(f"\n{entry['path']}  ({entry['kind']} × {entry['count']})")
        for line in entry["lines"]:
            click.echo(f"  {line}")


def find_rows(estimate: Estimate, pattern: str) -> list[tuple[Block, Row, int]]:
    """Rows whose path matches, with the value of their feature."""
    regex = re.compile(translate(pattern))
    estimator, load, _ = estimate.terms[0]
    return [
        (block, row, value)
        for block, row, value in estimator.rows(load, estimate.convention)
        if (row.forward or row.backward) and (regex.match(row_path(block, row)) or pattern in row_path(block, row))
    ]


def row_path(block: Block, row: Row) -> str:
    return join(f"{block.path}.*" if block.layers is not None else block.path, row.op.name)


def explain_row(estimate: Estimate, block: Block, row: Row, value: int) -> dict[str, Any]:
    """One operation: its formula in words, then in numbers, per direction."""
    op = row.op
    load = estimate.terms[0][1]
    unit = name_feature(op.feature)
    layers = f"{block.copies} × " if block.copies > 1 else ""
    lines = [f"{unit}: {value:,}"]
    forward = row.forward * value * block.copies
    result = f"{forward:,} ({format_flops(forward)})"
    if op.kind == "attend":
        times = f" × {op.times}" if op.times > 1 else ""
        lines.append("forward  = layers × 2 × heads × (qk + v) × pairs")
        lines.append(f"         = {layers}2 × {op.heads} × ({op.qk} + {op.v}){times} × {value:,} = {result}")
    elif op.kind in ("linear", "conv"):
        times = f" × {op.times} per {unit}" if op.times > 1 else ""
        lines.append("forward  = layers × 2 × in × out × rows")
        lines.append(f"         = {layers}2 × {op.n_in} × {op.n_out}{times} × {value:,} = {result}")
        base = 2 * op.n_in * op.n_out * op.times
        if row.forward not in (base, 0):
            lines.append(f"           of which LoRA or folding: {(row.forward - base) * value * block.copies:,}")
    else:
        lines.append(f"forward  = {forward:,}")
    backward = row.backward * value * block.copies if load.phase == "train" else 0
    if load.phase == "train":
        ratio = f"{row.backward / row.forward:g} × forward" if row.forward else "adapters"
        lines.append(f"backward = {ratio} = {backward:,} ({format_flops(backward)})")
    again = row.recompute * value * block.copies if load.phase == "train" else 0
    if again:
        lines.append(f"recomputed = {again:,} ({format_flops(again)})")
    return {
        "path": row_path(block, row),
        "kind": op.kind,
        "count": block.copies,
        "feature": unit,
        "feature_value": value,
        "forward": forward,
        "backward": backward,
        "recompute": again,
        "lines": lines,
    }


def name_feature(feature: Feature) -> str:
    if feature[0] == "pairs":
        window = f", window {feature[2]}" if feature[2] else ""
        return f"query-key pairs ({feature[1]}{window})"
    return _FEATURES[str(feature[0])]
