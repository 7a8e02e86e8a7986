"""An estimate in; its breakdown as a table, and its work in a line of words out."""

from __future__ import annotations

from flopcalc.base.rows import Table
from flopcalc.base.units import format_flops, format_parameters, format_share
from flopcalc.base.vocabulary import By
from flopcalc.core.estimate.estimate import Estimate, describe_grids
from flopcalc.core.estimate.sampling import Sampling


def make_table(estimate: Estimate, by: By, depth: int | None) -> Table:
    """A breakdown as people read it: headers, and rows of rounded counts with their shares."""
    _, rows = estimate.breakdown(by, depth)
    total = estimate.total
    # What few steps have is a column only where there is some.
    extras = {"recompute": estimate.recompute, "clipping": estimate.clipping}
    has = [bool(value) for value in extras.values()]
    shown = []
    for row in rows:
        if by == "module":
            path, _, count, forward, backward, *more, parameters = row
            limit = 32 - 12 * sum(has)  # the front of a path gives way, the last names stay
            head: list[object] = [path if len(path) <= limit else "…" + path[1 - limit :], count]
            tail = [format_parameters(parameters) if parameters else "-"]
        else:
            (name, forward, backward, *more), tail = row, []
            head = [name]
        share = format_share(forward + backward + sum(more), total)
        cells = [_cell(value) for value, is_shown in zip(more, has, strict=True) if is_shown]
        shown.append([*head, _cell(forward), _cell(backward), *cells, share, *tail])
    names = ["module", "×"] if by == "module" else [by]
    extra_names = [name for name, value in extras.items() if value]
    headers = [*names, "forward", "backward", *extra_names, "share", *(["params"] if by == "module" else [])]
    sums = [
        "total",
        *([""] if by == "module" else []),
        _cell(estimate.forward),
        _cell(estimate.backward),
        *(_cell(value) for value in extras.values() if value),
        format_share(total, total),
        *([format_parameters(estimate.parameters["total"])] if by == "module" else []),
    ]
    return Table(headers, [*shown, sums])


def describe_work(estimate: Estimate) -> str:
    """The work in one line: phase, sizes, what trains."""
    estimator, load, times = estimate.terms[0]
    pieces: list[str] = [load.phase]
    if estimate.pipeline is not None:
        pieces = _describe_sampling(estimate.pipeline, load.rows // estimate.pipeline.joined)
        times = times if estimate.pipeline.phase == "train" else 1
    elif load.layout == "packed" and load.documents is not None:
        pieces.append(f"{len(load.documents)} documents packed into {load.rows} × {load.seq} tokens")
    elif load.decoder is not None:
        side = load.decoder
        tail = f" new tokens after {side.context} cached" if load.phase == "decode" else " tokens"
        source = f"{load.rows} × {load.seq} tokens" if load.seq else f"{len(load.clips)} clips"
        pieces.append(f"{source} encoded, {side.rows} × {side.seq}{tail} decoded")
    elif load.phase == "decode":
        pieces.append(f"{load.rows} × {load.seq} new tokens after {load.context} cached")
    elif not load.seq:
        pieces.append(describe_grids(load))
    else:
        pieces.append(f"{load.rows} × {load.seq} tokens{' (padded)' if load.layout == 'padded' else ''}")
    times //= estimate.replicas
    if times > 1:
        pieces.append(f"{times} micro-batches")
    if estimate.gpus > 1:
        accumulated = f" × {times}" if times > 1 else ""
        groups = f"{estimate.gpus} GPUs" + (
            f" in {estimate.replicas} groups" if estimate.replicas != estimate.gpus else ""
        )
        pieces.append(f"{groups} × {load.rows}{accumulated} = {estimate.global_batch:,} sequences a step")
    others = [f"{name} {format_flops(flops.total)}" for name, flops in estimate.by_pass().items()]
    if estimate.passes:
        pieces.append(f"passes {' + '.join(others)}")
    elif len(estimate.terms) > 1 and estimate.pipeline is None:
        pieces.append(f"and {len(estimate.terms) - 1} more")
    recipe = estimator.recipe
    if estimator.head != "lm":
        pieces.append(f"head {estimator.head}")
    if recipe.lora:
        without = f" without {'+'.join(recipe.lora.exclude)}" if recipe.lora.exclude else ""
        pieces.append(f"LoRA r={recipe.lora.r} on {'+'.join(recipe.lora.targets)}{without}")
    if recipe.train_only:
        pieces.append(f"only {', '.join(recipe.train_only)} trains")
    if recipe.freeze:
        pieces.append(f"{', '.join(recipe.freeze)} frozen")
    if recipe.recompute != "none":
        pieces.append(f"recompute {recipe.recompute}")
    if recipe.clipping != "none":
        pieces.append(f"clipping {recipe.clipping}")
    if estimator.routing is not None:
        pieces.append(f"routing {estimator.routing}")
    return ", ".join(pieces)


def _describe_sampling(sampling: Sampling, rows: int) -> list[str]:
    """The work of a diffusion pipeline, in words."""
    size = f"{sampling.width}x{sampling.height}" + (f"x{sampling.frames}" if sampling.frames > 1 else "")
    pieces = [sampling.phase, f"{rows} × {size}"]
    if sampling.text:
        pieces.append(f"{sampling.text} text tokens")
    if sampling.sampling_steps is not None:
        guided = "with" if sampling.guidance else "without"
        pieces.append(f"{sampling.sampling_steps} sampling steps {guided} guidance")
    return pieces


def _cell(value: int) -> str:
    return format_flops(value).removesuffix("FLOPs").strip() if value else "-"
