"""An Estimate in, text out: a table for people, JSON, CSV and Markdown for programs and documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flopcalc.core.estimate.estimate import CONVENTIONS, Estimate
from flopcalc.core.estimate.utilization import Utilization
from flopcalc.units import format_flops, format_parameters, format_rate, format_share

NOT_COUNTED = (
    "norms, softmax, activations, rotary embeddings, table look-ups, loss and optimizer are not matrix products"
)
_CONVENTION_WORDS = {
    "model": "what the model needs (unmasked pairs, top-k experts, real tokens)",
    "full": "what HF's eager code executes: every query-key pair, padding included",
    "hardware": "what the kernels execute: recomputation and blocks included",
}
Cells = Sequence[Sequence[Any]]


def breakdown(estimate: Estimate, by: str, depth: int | None = None) -> tuple[list[str], list[list[Any]]]:
    """Headers and exact rows of one breakdown; rows without work are left out, their parameters kept."""
    if by == "module":
        headers = ["path", "kind", "count", "forward", "backward", "recompute", "clipping", "parameters"]
        return headers, [list(row) for row in estimate.by_module(depth)]
    sums = estimate.by_component() if by == "component" else estimate.by_kind()
    headers = [by, "forward", "backward", "recompute", "clipping"]
    return headers, [[name, *row] for name, row in sums.items() if any(row)]


def format_csv(estimate: Estimate, by: str, depth: int | None) -> str:
    import csv
    import io

    headers, rows = breakdown(estimate, by, depth)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headers)
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def format_grid(headers: Sequence[str], rows: Cells, style: str = "simple") -> str:
    from tabulate import tabulate

    numeric = ["right" if _looks_numeric(rows, column) else "left" for column in range(len(headers))]
    return tabulate(rows, headers=headers, tablefmt=style, colalign=numeric if rows else None, disable_numparse=True)


def _looks_numeric(rows: Cells, column: int) -> bool:
    return bool(rows) and all(str(row[column])[:1].isdigit() or row[column] in ("-", "") for row in rows)


def format_estimate(
    estimate: Estimate,
    *,
    by: str = "component",
    depth: int | None = None,
    style: str = "simple",
    shares: Sequence[tuple[str, Utilization]] = (),
    notes: Sequence[str] = (),
) -> str:
    """The readable report: what was counted, the breakdown, totals under every convention, notes."""
    is_markdown = style != "simple"
    estimator = estimate.terms[0][0]
    parameters = estimate.parameters
    model_type = estimator.source.config["model_type"]
    title = f"{estimator.source.name} ({model_type}, {format_parameters(parameters['total'])} parameters)"
    lines = [f"## {title}" if is_markdown else title, ""] if is_markdown else [title]
    work = f"{_describe_work(estimate)}; convention {estimate.convention}"
    lines += [work, ""] if is_markdown else [*_wrap(work, "", "  "), ""]
    lines += [format_grid(*_shown_breakdown(estimate, by, depth), style=_style(is_markdown)), ""]
    facts: list[tuple[str, str]] = [("step", f"{format_flops(estimate.total)} = {estimate.total:,} FLOPs")]
    totals = estimate.totals
    for name in CONVENTIONS:
        if name != estimate.convention:
            detail = f" ({estimate.attention_kernel} attention)" if name == "hardware" else ""
            total = totals[name]
            facts.append((f"under {name}", f"{format_flops(total)}{detail}" if total is not None else "not known"))
    shown = ", ".join(f"{format_parameters(value)} {key}" for key, value in parameters.items())
    facts.append(("parameters", shown))
    visual = sum(each.count_visual_tokens(other) * many for each, other, many in estimate.terms)
    if visual:
        images = sum(len(other.all_grids) * many for _, other, many in estimate.terms)
        facts.append(("visual tokens", f"{visual:,} from {images} image{'s' if images > 1 else ''} or video"))
    for label, share in shares:
        if share.value is not None:
            peak = share.peak_flops_per_s or 0.0
            where = f" on {share.device}" if share.device else ""
            facts.append((label, f"{100 * share.value:.2f} % of {format_rate(peak)} {share.dtype}{where}"))
    facts += [("note", note) for note in (*estimate.notes, *notes)]
    facts.append(("not counted", NOT_COUNTED))
    facts.append(("convention", f"{estimate.convention}: {_CONVENTION_WORDS[estimate.convention]}"))
    width = max(len(label) for label, _ in facts) + 2
    for label, text in facts:
        lines += [f"- {label}: {text}"] if is_markdown else _wrap(text, label.ljust(width), " " * width)
    return "\n".join(lines)


def _style(is_markdown: bool) -> str:
    return "github" if is_markdown else "simple"


def _shown_breakdown(estimate: Estimate, by: str, depth: int | None) -> tuple[list[str], list[list[Any]]]:
    _, rows = breakdown(estimate, by, depth)
    total = estimate.total
    # What few steps have is a column only where there is some.
    extras = {"recompute": estimate.recompute, "clipping": estimate.clipping}
    has = [bool(value) for value in extras.values()]
    shown = []
    for row in rows:
        if by == "module":
            path, _, count, forward, backward, *more, parameters = row
            head: list[Any] = [_shorten(path, 32 - 12 * sum(has)), count]
            tail = [format_parameters(parameters) if parameters else "-"]
        else:
            (name, forward, backward, *more), tail = row, []
            head = [name]
        share = format_share(forward + backward + sum(more), total)
        cells = [_cell(value) for value, is_shown in zip(more, has, strict=True) if is_shown]
        shown.append([*head, _cell(forward), _cell(backward), *cells, share, *tail])
    names = ["module", "×"] if by == "module" else [by]
    extra_names = [name for name, value in extras.items() if value]
    return [*names, "forward", "backward", *extra_names, "share", *(["params"] if by == "module" else [])], [
        *shown,
        [
            "total", *([""] if by == "module" else []), _cell(estimate.forward), _cell(estimate.backward),
            *(_cell(value) for value in extras.values() if value), format_share(total, total),
            *([format_parameters(estimate.parameters["total"])] if by == "module" else []),
        ],
    ]  # fmt: skip


def _cell(value: int) -> str:
    return format_flops(value).removesuffix("FLOPs").strip() if value else "-"


def _shorten(path: str, limit: int) -> str:
    """A path of at most `limit` characters: the front gives way, the last names stay."""
    return path if len(path) <= limit else "…" + path[1 - limit :]


def _describe_work(estimate: Estimate) -> str:
    estimator, load, times = estimate.terms[0]
    pieces = [load.phase]
    if load.layout == "packed" and load.documents is not None:
        pieces.append(f"{len(load.documents)} documents packed into {load.rows} × {load.seq} tokens")
    elif load.decoder is not None:
        side = load.decoder
        tail = f" new tokens after {side.context} cached" if load.phase == "decode" else " tokens"
        source = f"{load.rows} × {load.seq} tokens" if load.seq else f"{len(load.clips)} clips"
        pieces.append(f"{source} encoded, {side.rows} × {side.seq}{tail} decoded")
    elif load.phase == "decode":
        pieces.append(f"{load.rows} × {load.seq} new tokens after {load.context} cached")
    else:
        pieces.append(f"{load.rows} × {load.seq} tokens{' (padded)' if load.layout == 'padded' else ''}")
    if times > 1:
        pieces.append(f"{times} micro-batches")
    if len(estimate.terms) > 1:
        pieces.append(f"and {len(estimate.terms) - 1} more")
    recipe = estimator.recipe
    if recipe.lora:
        pieces.append(f"LoRA r={recipe.lora.r} on {'+'.join(recipe.lora.targets)}")
    if recipe.train_only:
        pieces.append(f"only {', '.join(recipe.train_only)} trains")
    if recipe.freeze:
        pieces.append(f"{', '.join(recipe.freeze)} frozen")
    if recipe.recompute != "none":
        pieces.append(f"recompute {recipe.recompute}")
    if recipe.clipping != "none":
        pieces.append(f"clipping {recipe.clipping}")
    return ", ".join(pieces)


def _wrap(text: str, first: str, rest: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 80, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def format_html(estimate: Estimate) -> str:
    """A table for a notebook."""
    from html import escape

    headers, rows = _shown_breakdown(estimate, "component", None)
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in headers)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:right'>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    name = estimate.terms[0][0].source.name
    caption = escape(f"{name}: {_describe_work(estimate)}; convention {estimate.convention}")
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
