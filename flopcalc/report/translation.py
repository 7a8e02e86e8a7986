"""A Translation in, text out: a table of at most 80 columns, CSV or Markdown."""

from __future__ import annotations

from flopcalc.base.text_table import format_grid, wrap
from flopcalc.base.units import format_rate
from flopcalc.core.estimate.translation import TranslatedRow, Translation, format_difference

_HEADERS = ["convention", "GFLOP/token", "TFLOP/s per GPU", "MFU", "difference"]


def format_translation(found: Translation, style: str = "simple") -> str:
    """The readable report: what was quoted, the rows, what each counts, notes."""
    is_markdown = style != "simple"
    lines = (
        [f"## {found.model}", "", found.work, ""] if is_markdown else [*wrap(f"{found.model}: {found.work}", "", "  ")]
    )
    lines += [f"- {text}" for text in _list_facts(found)] if is_markdown else [
        line for text in _list_facts(found) for line in wrap(text, "", "  ")
    ]  # fmt: skip
    lines += ["", format_grid(_HEADERS, [_list_cells(row) for row in found.rows], style=style), ""]
    width = max(len(row.name) for row in found.rows) + 2
    fitting = [row for row in found.rows if row.fits] or list(found.rows[:1])
    for row in fitting if found.is_fit else found.rows:
        text = f"counts {row.counts}; leaves out {row.leaves_out}"
        lines += [f"- {row.name}: {text}"] if is_markdown else wrap(text, row.name.ljust(width), " " * width)
    for note in found.notes:
        lines += [f"- note: {note}"] if is_markdown else wrap(note, "note".ljust(width), " " * width)
    return "\n".join(lines)


def format_translation_csv(found: Translation) -> str:
    import csv
    import io

    out = io.StringIO()
    rows = [{key: value for key, value in row.to_dict().items() if key != "terms"} for row in found.rows]
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def _list_facts(found: Translation) -> list[str]:
    gpus = f"{found.gpus:,} GPU{'s' * (found.gpus != 1)}"
    facts = [f"{found.tokens_per_second:,.6g} tokens per second on {gpus}"]
    if found.peak_flops_per_s is not None:
        where = f" of {found.device}" if found.device else ""
        facts[0] += f"; peak {format_rate(found.peak_flops_per_s)} {found.dtype}{where}"
    if found.is_fit:
        fits = ", ".join(found.fits) or "none"
        facts.append(f"conventions that fit what was printed, nearest first: {fits}")
    elif found.quoted is not None:
        facts.append(f"quoted under {found.quoted}")
    return facts


def _list_cells(row: TranslatedRow) -> list[str]:
    share = "-" if row.mfu is None else f"{100 * row.mfu:.2f} %"
    return [
        row.name, f"{row.flops_per_token / 1e9:,.3f}", f"{row.tflops_per_gpu:,.1f}", share, format_difference(row),
    ]  # fmt: skip
