"""An Estimate in, text out: a table for people, JSON, CSV and Markdown for programs and documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flopcalc.base.spelling import spell
from flopcalc.base.text_table import format_grid, wrap
from flopcalc.base.units import (
    format_amount,
    format_bytes,
    format_count,
    format_duration,
    format_flops,
    format_parameters,
    format_rate,
    format_tokens,
)
from flopcalc.base.vocabulary import CONVENTIONS, By
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.estimate.run import Run
from flopcalc.core.estimate.utilization import Utilization
from flopcalc.core.formats.formats import ASSUMED
from flopcalc.report.breakdown import describe_work, make_table

NOT_COUNTED = (
    "norms, softmax, activations, rotary embeddings, table look-ups, loss and optimizer are not matrix products"
)
CONVENTION_WORDS = {
    "model": "what the model needs (unmasked pairs, top-k experts, real tokens)",
    "full": "what HF's eager code executes: every query-key pair, padding included",
    "hardware": "what the kernels execute: recomputation and blocks included",
}


# Parts of a breakdown's row that are FLOPs.
_PARTS = ("forward", "backward", "recompute", "clipping")


def format_csv(
    estimate: Estimate,
    by: By,
    depth: int | None,
    *,
    mfu: Utilization | None = None,
    hfu: Utilization | None = None,
) -> str:
    """A line for each row of a breakdown, with its total; the step's own figures are the same on every line."""
    headers, rows = estimate.breakdown(by, depth)
    parts = [headers.index(part) for part in _PARTS]
    step = {
        "convention": estimate.convention,
        "tokens": estimate.tokens,
        "step_total": estimate.total,
        "mfu": mfu.value if mfu else None,
        "hfu": hfu.value if hfu else None,
    }
    return format_lines(
        [*headers, "total", *step], ([*row, sum(row[part] for part in parts), *step.values()] for row in rows)
    )


def format_lines(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """CSV."""
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headers)
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def format_estimate(
    estimate: Estimate,
    *,
    by: By = "component",
    depth: int | None = None,
    style: str = "simple",
    shares: Sequence[tuple[str, Utilization]] = (),
    run: Run | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The readable report: what was counted, the breakdown, totals under every convention, notes."""
    is_markdown = style != "simple"
    estimator = estimate.terms[0][0]
    parameters = estimate.parameters
    model_type = estimator.source.config["model_type"]
    title = f"{estimator.source.name} ({model_type}, {format_parameters(parameters['total'])} parameters)"
    lines = [f"## {title}", ""] if is_markdown else wrap(title, "", "  ")
    work = f"{describe_work(estimate)}; convention {estimate.convention}"
    lines += [work, ""] if is_markdown else [*wrap(work, "", "  "), ""]
    lines += [format_grid(*make_table(estimate, by, depth), style="github" if is_markdown else "simple", keys=1), ""]
    facts: list[tuple[str, str]] = [("step", f"{format_flops(estimate.total)} = {estimate.total:,} FLOPs")]
    totals = estimate.totals
    for name in CONVENTIONS:
        if name != estimate.convention:
            detail = f" ({estimate.attention_kernel} attention)" if name == "hardware" else ""
            total = totals[name]
            facts.append((f"under {name}", f"{format_flops(total)}{detail}" if total is not None else "not known"))
    shown = ", ".join(f"{format_parameters(value)} {key}" for key, value in parameters.items())
    facts.append(("parameters", shown))
    facts.append(("weights", _describe_weights(estimate)))
    facts += _describe_cache(estimate)
    visual = sum(estimator.count_visual_tokens(other) * times for estimator, other, times in estimate.trained.terms)
    if visual:
        loads = [(other, times) for _, other, times in estimate.trained.terms]
        many = {
            "image": sum(len(load.grids) * times for load, times in loads),
            "video": sum((len(load.all_grids) - len(load.grids)) * times for load, times in loads),
        }
        said = " and ".join(f"{count:,} {name}{'s' if count > 1 else ''}" for name, count in many.items() if count)
        facts.append(("visual tokens", f"{visual:,} from {said}"))
    for label, share in shares:
        if share.value is not None:
            peak = share.peak_flops_per_s or 0.0
            where = f" on {share.device}" if share.device else ""
            facts.append((label, f"{100 * share.value:.2f} % of {format_rate(peak)} {share.dtype}{where}"))
    facts += _describe_run(run) if run is not None else []
    facts += [("note", note) for note in (*estimate.notes, *notes)]
    facts.append(("not counted", NOT_COUNTED))
    facts.append(("convention", f"{estimate.convention}: {CONVENTION_WORDS[estimate.convention]}"))
    width = max(len(label) for label, _ in facts) + 2
    for label, text in facts:
        lines += [f"- {label}: {text}"] if is_markdown else wrap(text, label.ljust(width), " " * width)
    return "\n".join(lines)


def _describe_run(run: Run) -> list[tuple[str, str]]:
    """Lines for people, each with its label."""
    lines = [("run", f"{format_tokens(run.tokens)}: {run.steps:,} steps, {run.flops:.3e} FLOPs")]
    if run.gpu_hours is None or run.mfu is None:
        return lines
    share = f"an MFU of {100 * run.mfu:.1f} %"
    if run.is_lower_bound:
        share = f"100 % of the peak: a lower bound, {spell('mfu', '40%')} says what you expect"
    days = f" ({format_duration(run.gpu_hours / run.gpus / 24)} on {run.gpus:,})" if run.gpus > 1 else ""
    return [*lines, ("GPU-hours", f"{format_amount(run.gpu_hours)}{days} at {share}")]


def make_cells(
    estimate: Estimate, mfu: Utilization | None, hfu: Utilization | None, run: Run | None, *, is_narrow: bool
) -> dict[str, str | None]:
    """A row of a table of estimates; a narrow one leaves out forward and backward."""
    passes = {
        "forward": format_count(estimate.forward),
        "backward": format_count(estimate.backward) if estimate.backward else None,
    }
    return {
        "tokens": f"{estimate.tokens:,}",
        **({} if is_narrow else passes),
        "step": format_count(estimate.total),
        "per token": format_count(estimate.per_token) if estimate.tokens else None,
        "MFU": _percent(mfu),
        "HFU": _percent(hfu),
        "GPU-hours": None if run is None or run.gpu_hours is None else f"{run.gpu_hours:,.0f}",
    }


def _percent(share: Utilization | None) -> str | None:
    return None if share is None or share.value is None else f"{100 * share.value:.2f} %"


def _describe_weights(estimate: Estimate) -> str:
    """Bytes of the weights, by format where there are several, and what said so."""
    held = estimate.weights
    parts = [f"{format_bytes(each.bytes)} in {each.format}" for each in held]
    scales = sum(each.scale_bytes for each in held)
    if scales:
        parts.append(f"{format_bytes(scales)} of scales and zero points")
    whole = f"{format_bytes(sum(each.total_bytes for each in held))}: " if len(parts) > 1 else ""
    source = estimate.terms[0].estimator.formats.source.replace(ASSUMED, "assumed: not in the config")
    return f"{whole}{', '.join(parts)} ({source})"


def _describe_cache(estimate: Estimate) -> list[tuple[str, str]]:
    """Bytes of keys and values after a prompt or the last new token, of all sequences."""
    estimator, load, times = estimate.terms[0]
    if load.phase not in ("decode", "prefill") or estimator.origin != "spec":
        return []
    from flopcalc.prediction.roofline import count_kept  # only where there is a cache

    kept = count_kept(estimator, load) * times
    side = load.decoder or load
    tokens = f"{side.rows * times:,} × {side.longest:,} tokens"
    return [("KV cache", f"{format_bytes(kept)} in {estimator.formats.kv_cache} ({tokens})")] if kept else []
