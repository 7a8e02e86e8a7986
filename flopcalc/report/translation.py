"""A Translation in, text out: a table of at most 80 columns, CSV or Markdown."""

from __future__ import annotations

from flopcalc.base.text_table import format_grid, wrap
from flopcalc.base.units import format_difference, format_rate
from flopcalc.core.estimate.translation import TranslatedRow, Translation

HEADERS = ["convention", "GFLOP/token", "TFLOP/s per GPU", "MFU", "difference"]


def format_translation(translation: Translation, style: str = "simple") -> str:
    """The readable report: what was quoted, the rows, what each counts, notes."""
    is_markdown = style != "simple"
    lines = (
        [f"## {translation.model}", "", translation.work, ""]
        if is_markdown
        else [*wrap(f"{translation.model}: {translation.work}", "", "  ")]
    )
    lines += (
        [f"- {text}" for text in list_facts(translation)]
        if is_markdown
        else [line for text in list_facts(translation) for line in wrap(text, "", "  ")]
    )
    lines += ["", format_grid(HEADERS, [list_cells(row) for row in translation.rows], style=style), ""]
    width = max(len(row.name) for row in translation.rows) + 2
    fitting = [row for row in translation.rows if row.fits] or list(translation.rows[:1])
    for row in fitting if translation.is_fit else translation.rows:
        text = f"counts {row.counts}; leaves out {row.leaves_out}"
        lines += [f"- {row.name}: {text}"] if is_markdown else wrap(text, row.name.ljust(width), " " * width)
    for note in translation.notes:
        lines += [f"- note: {note}"] if is_markdown else wrap(note, "note".ljust(width), " " * width)
    return "\n".join(lines)


def format_translation_csv(translation: Translation) -> str:
    import csv
    import io

    out = io.StringIO()
    rows = [{key: value for key, value in row.to_dict().items() if key != "terms"} for row in translation.rows]
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def list_facts(translation: Translation) -> list[str]:
    gpus = f"{translation.gpus:,} GPU{'s' * (translation.gpus != 1)}"
    facts = [f"{translation.tokens_per_second:,.6g} tokens per second on {gpus}"]
    if translation.peak_flops_per_s is not None:
        where = f" of {translation.device}" if translation.device else ""
        facts[0] += f"; peak {format_rate(translation.peak_flops_per_s)} {translation.dtype}{where}"
    if translation.is_fit:
        fits = ", ".join(translation.fits) or "none"
        facts.append(f"conventions that fit what was printed, nearest first: {fits}")
    elif translation.quoted is not None:
        facts.append(f"quoted under {translation.quoted}")
    return facts


def list_cells(row: TranslatedRow) -> list[str]:
    share = "-" if row.mfu is None else f"{100 * row.mfu:.2f} %"
    return [
        row.name,
        f"{row.flops_per_token / 1e9:,.3f}",
        f"{row.tflops_per_gpu:,.1f}",
        share,
        format_difference(row.difference),
    ]
