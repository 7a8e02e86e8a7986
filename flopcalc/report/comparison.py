"""Estimates of several models or workloads in, one table out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flopcalc.base.text_table import format_grid, wrap
from flopcalc.base.units import format_bytes, format_flops, format_parameters
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.estimate.utilization import Utilization

_MIXED = "Different conventions stand side by side: do not compare them."


class Column(NamedTuple):
    """One of the models or workloads."""

    label: str
    estimate: Estimate
    mfu: Utilization | None
    hfu: Utilization | None
    notes: list[str]  # besides the estimate's own

    def to_dict(self) -> dict[str, Any]:
        shown = {"label": self.label, **self.estimate.to_dict(1)}
        shown["notes"] += self.notes
        shown["mfu"] = self.mfu.to_dict() if self.mfu else None
        shown["hfu"] = self.hfu.to_dict() if self.hfu else None
        return shown


def format_comparison(columns: list[Column], *, is_markdown: bool) -> str:
    """A column for each model or workload, then the notes of all."""
    rows = [[name, *(read(column) for column in columns)] for name, read in _ROWS.items()]
    rows = [row for row in rows if row[0] not in _RARE or set(row[1:]) != {"-"}]
    if all(column.estimate.terms[0].estimator.formats.is_default for column in columns):  # bf16, as most models are
        rows = [row for row in rows if row[0] not in ("weights", "computed in")]
    parts = [column.estimate.by_component() for column in columns]
    for part in parts[0]:
        if any(sum(part_sums[part]) for part_sums in parts):
            rows.append([part, *(_format_some(sum(part_sums[part])) for part_sums in parts)])
    headers = ["", *(column.label for column in columns)]
    lines = [format_grid(headers, rows, "github" if is_markdown else "simple", keys=1)]
    found = [(*column.estimate.notes, *column.notes) for column in columns]
    shared = [note for note in found[0] if all(note in each for each in found[1:])] if len(columns) > 1 else []
    notes = shared + [
        f"{column.label}: {note}"
        for column, each in zip(columns, found, strict=True)
        for note in each
        if note not in shared
    ]
    notes += [_MIXED] if len({column.estimate.convention for column in columns}) > 1 else []
    if is_markdown:
        return "\n".join([*lines, "", *(f"- {note}" for note in notes)]).rstrip("\n")
    return "\n".join([*lines, *(line for note in notes for line in wrap(note, rest="  "))])


def _format_some(flops: int) -> str:
    return format_flops(flops) if flops else "-"


def _percent(share: Utilization | None) -> str:
    return "-" if share is None or share.value is None else f"{100 * share.value:.2f} %"


_ROWS: dict[str, Callable[[Column], str]] = {
    "model type": lambda each: each.estimate.terms[0][0].source.config["model_type"],
    "head": lambda each: head if (head := each.estimate.terms[0][0].head) != "lm" else "-",
    "parameters": lambda each: format_parameters(each.estimate.parameters["total"]),
    "active": lambda each: (
        format_parameters(each.estimate.parameters["active"]) if "active" in each.estimate.parameters else "not known"
    ),
    "weights": lambda each: format_bytes(sum(held.total_bytes for held in each.estimate.weights)),
    "computed in": lambda each: ", ".join(each.estimate.by_dtype()),
    "tokens": lambda each: f"{each.estimate.tokens:,}",
    "convention": lambda each: each.estimate.convention,
    "forward": lambda each: format_flops(each.estimate.forward),
    "backward": lambda each: _format_some(each.estimate.backward),
    "recompute": lambda each: _format_some(each.estimate.recompute),
    "clipping": lambda each: _format_some(each.estimate.clipping),
    "step": lambda each: format_flops(each.estimate.total),
    "per token": lambda each: _format_some(each.estimate.per_token),
    "MFU": lambda each: _percent(each.mfu),
    "HFU": lambda each: _percent(each.hfu),
}
_RARE = (
    "head",
    "weights",
    "computed in",
    "recompute",
    "clipping",
    "MFU",
    "HFU",
)  # rows where some column has them
