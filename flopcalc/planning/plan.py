"""Plan a training run: a model, a device and a number of them in; the best layouts, their time and money out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from flopcalc.core.estimate.binding import bind_config
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.recipe.numbers import FormatOptions
from flopcalc.core.recipe.recipe import Lora, Recipe, join_recipe
from flopcalc.core.workload.workload import Workload, check_workload_alone
from flopcalc.data import apply_launch
from flopcalc.errors import ConfigError, WorkloadError, format_value
from flopcalc.planning.layout import DEGREES, check_fixed
from flopcalc.planning.results import Plan, Planned
from flopcalc.planning.search import search_layouts
from flopcalc.planning.seconds import OVERLAPS
from flopcalc.prediction.choices import check_execution, check_optimizer, check_timed, describe_key_heads
from flopcalc.prediction.memory import resize_batch
from flopcalc.units import check_items, check_size, format_parameters, format_tokens, parse_tokens
from flopcalc.words import Execution, check_keywords, check_word

__all__ = ["DEFAULT_SEQ", "NO_LENGTH", "Plan", "choose_batch", "plan", "plan_estimator"]

DEFAULT_SEQ = 4096
NO_LENGTH = f"; no length was given, so {DEFAULT_SEQ} tokens were assumed: --seq (seq_len) changes it"
IMAGES_ALONE = "a plan is counted in tokens, and this sample has images alone"
DEFAULT_BATCH_TOKENS = 1 << 22
MOST_GPUS = 1_000_000
MOST_IMBALANCE = 1000
MOST_BATCH_TOKENS = 1 << 28  # beyond it no larger batch is proposed
AUTO = "auto"
_AS_FAST = 0.98
_HELPS = 1.1  # how much faster a doubled batch must be to be proposed
_ALIKE = ("tp", "cp", "ep", "zero", "micro_batch", "recompute")  # degrees that hardly depend on the batch

Degree: TypeAlias = int | Sequence[int] | None


def plan(
    model: Any = None, workload: Workload | None = None, *, recipe: Recipe | Mapping[str, object] | None = None,
    lora: Lora | Mapping[str, object] | str | None = None,
    compute: str | None = None, weights: str | None = None, autocast: bool | str | None = None,
    spec: str | os.PathLike[str] | None = None, model_type: str | None = None, head: str | None = None,
    mtp: int | bool | None = None, launch: Any = None,
    **options: Any,
) -> Plan:  # fmt: skip
    """The best layouts of a training run on many devices: what fits, its time and cost, and why others lose.

    `model` is anything that `bind` takes, or an Estimator. `compute`, `weights` and `autocast` are number formats,
    `spec` is a file of your own, `model_type` is the family, `head` and `mtp` are parts of the model: see `bind`.
    `launch` is a launch file, as in estimate_flops. All other options are those of plan_estimator.
    """
    if launch is not None:
        said = {
            "model": model, "lora": lora, "freeze": recipe, "compute": compute, "weights": weights,
            "autocast": autocast, **options, "seq": options.get("seq_len", workload),
        }  # fmt: skip
        given = {name for name, value in said.items() if value is not None}
        applied = apply_launch(launch, "plan", given | ({"lora"} if recipe is not None else set()), model)
        taken = applied.options
        recipe = {"freeze": taken.pop("freeze")} if "freeze" in taken else recipe
        sizes = {"seq_len": taken.pop("seq")} if "seq" in taken else {}
        own = taken.pop("model", model)
        shared = {"lora": lora, "compute": compute, "weights": weights, "autocast": autocast, **options, **sizes}
        shared |= {"spec": spec, "model_type": model_type, "head": head, "mtp": mtp}
        found = plan(own, workload, recipe=recipe, **{**shared, **taken})
        return found._replace(notes=(*found.notes, *applied.notes))
    if model is None:
        raise ConfigError("which model? Give its name, path or config first, or launch=")
    recipe = join_recipe(recipe, lora, None)
    formats = FormatOptions(compute, weights, None, autocast)
    if isinstance(model, Estimator):
        if formats != FormatOptions() or any(each is not None for each in (recipe, spec, model_type, head, mtp)):
            raise WorkloadError("an Estimator already has its recipe, formats, type and head: do not give them again")
        estimator: Estimator = model
    else:
        estimator = bind_config(
            model, recipe=recipe, formats=formats, spec=spec, model_type=model_type, head=head, mtp=mtp
        )
    if compute is not None:
        options["dtype"] = compute
    check_keywords(("workload", *options), plan_estimator, "plan", WorkloadError)
    return plan_estimator(estimator, workload=workload, **options)


def plan_estimator(
    estimator: Estimator,
    *,
    tokens: float | str,
    device: str,
    gpus: int,
    seq_len: int | None = None,
    global_batch: int | str | None = None,
    dp: Degree = None,
    tp: Degree = None,
    pp: Degree = None,
    virtual: Degree = None,
    cp: Degree = None,
    ep: Degree = None,
    zero: Degree = None,
    micro_batch: Degree = None,
    recompute: str | Sequence[str] | None = None,
    interconnect: str | None = None,
    price: float | None = None,
    dtype: str | None = None,
    execution: Execution = "fused",
    optimizer: str = "adamw-master",
    attention_kernel: str = "auto",
    expert_imbalance: float = 1.0,
    overlap: str = "all",
    top: int = 5,
    images: Iterable[tuple[int, int]] | None = None,
    workload: Workload | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """The plan of a bound model's training run.

    `global_batch` is in sequences, or "auto": searched; a degree is a number, a list of numbers to try, or None for all
    that are worth a try. `execution`, `optimizer` and `attention_kernel` are those of predict. `images` are one
    sample's, each (width, height) in pixels. `expert_imbalance` is the rows of the busiest rank's experts over the
    mean. `overlap` is all, or none: no communication is hidden behind computation. `workload` is one sample instead, or
    the global batch of several like one another.
    `progress` is called with the number of layouts that were looked at, and of all.
    """
    if progress is not None and not callable(progress):
        raise WorkloadError(f"progress must be a function of two numbers, not {format_value(progress)}")
    gpus, top = check_size(gpus, "gpus"), check_size(top, "top")
    if gpus > MOST_GPUS:
        raise WorkloadError(f"gpus must be at most {MOST_GPUS:,}, not {gpus:,}")
    total_tokens = parse_tokens(tokens)
    expert_imbalance = _check_imbalance(expert_imbalance)
    overlap = check_word(overlap, tuple(OVERLAPS), "overlap", WorkloadError)
    notes: list[str] = []
    if workload is not None:
        beside = {"seq_len": seq_len, "images": images}
        workload, global_batch = _find_sample(check_workload_alone(workload, beside), global_batch)
    sample = _make_sample(estimator, seq_len, images, workload, notes)
    if not sample.tokens:
        raise WorkloadError(IMAGES_ALONE)
    notes += [note for note in estimator.notes(sample) if "convention hardware" not in note]  # a plan has none
    notes += describe_key_heads(estimator)
    is_chosen, is_searched = global_batch is None, isinstance(global_batch, str) and global_batch == AUTO
    if global_batch is None or is_searched:
        global_batch = choose_batch(gpus, sample.tokens)
    if is_chosen:
        size = format_parameters(choose_batch(gpus, sample.tokens) * sample.tokens)
        notes.append(f"no global batch given: {global_batch} sequences, {size} tokens, assumed")
    global_batch = check_size(global_batch, "global batch")
    given = dict(zip(DEGREES, (dp, tp, pp, virtual, cp, ep, zero, micro_batch, recompute), strict=True))
    fixed = {name: check_fixed(name, _listed(value)) for name, value in given.items() if value is not None}

    def search(
        batch: int, narrowed: Mapping[str, Sequence[int | str]], notes: list[str],
        progress: Callable[[int, int], None] | None = None,
    ) -> Plan:  # fmt: skip
        return search_layouts(
            estimator, sample, tokens=max(total_tokens, batch * sample.tokens), device=device, gpus=gpus,
            global_batch=batch, fixed=narrowed, interconnect=interconnect, price=price, dtype=dtype,
            execution=check_execution(execution), optimizer=check_optimizer(optimizer),
            attention_kernel=attention_kernel, expert_imbalance=expert_imbalance, overlaps=OVERLAPS[overlap], top=top,
            notes=notes,
            progress=progress,
        )  # fmt: skip

    def find_best(batch: int, narrowed: Mapping[str, Sequence[int | str]]) -> float | None:
        """Seconds of a step in the fastest layout that fits, with another global batch."""
        try:
            return search(batch, narrowed, []).best[0].step.seconds
        except WorkloadError:  # nothing divides, or nothing fits
            return None

    if is_searched:
        global_batch = _search_batch(global_batch, sample.tokens, fixed, find_best, notes)
    whole = global_batch * sample.tokens
    if total_tokens < whole:
        few, many = format_tokens(total_tokens), format_tokens(whole)
        notes.append(f"{few} given, less than one step: one whole step, {many}, planned")
        total_tokens = whole
    found = search(global_batch, fixed, notes, progress)
    if not is_chosen:
        return found
    return found._replace(
        notes=(*found.notes, *_advise_batch(found.best, global_batch, sample.tokens, fixed, find_best))
    )


def _search_batch(
    start: int,
    tokens: int,
    fixed: Mapping[str, Sequence[int | str]],
    find_best: Callable[[int, Mapping[str, Sequence[int | str]]], float | None],
    notes: list[str],
) -> int:
    """The smallest of the doubled and halved batches that is as fast as any up to the limit, to 2 %."""
    tried = [start]
    while tried[0] % 2 == 0:
        tried.insert(0, tried[0] // 2)
    while 2 * tried[-1] * tokens <= MOST_BATCH_TOKENS:
        tried.append(2 * tried[-1])
    speeds = {batch: batch / seconds for batch in tried if (seconds := find_best(batch, fixed)) is not None}
    if not speeds:
        return start  # whose search says what does not fit or divide
    best = max(speeds.values())
    chosen = min(batch for batch, speed in speeds.items() if speed >= _AS_FAST * best)
    notes.append(
        f"--global-batch auto: {chosen} sequences, {format_tokens(chosen * tokens)}, the smallest within 2 % of the "
        f"fastest up to {format_tokens(MOST_BATCH_TOKENS)}; whether training converges with it is not known here"
    )
    return chosen


def _advise_batch(
    best: Sequence[Planned],
    batch: int,
    tokens: int,
    fixed: Mapping[str, Sequence[int | str]],
    find_best: Callable[[int, Mapping[str, Sequence[int | str]]], float | None],
) -> list[str]:
    """A note where the batch that was taken for want of one decides the plan: the smallest that no longer does.

    Tries doubled batches among layouts like the best ones: same degrees but for replicas, stages and their chunks.
    """
    alike = {name: tuple(dict.fromkeys(getattr(planned.layout, name) for planned in best)) for name in _ALIKE}
    narrowed = {**alike, **fixed}
    speed, chosen = batch / best[0].step.seconds, batch
    mfu = best[0].mfu
    while 2 * chosen * tokens <= MOST_BATCH_TOKENS:
        seconds = find_best(2 * chosen, narrowed)
        if seconds is None or 2 * chosen / seconds < _HELPS * speed:
            break
        chosen *= 2
        mfu *= chosen / seconds / speed
        speed = chosen / seconds
    if chosen == batch:
        return []
    return [
        f"the batch of {format_tokens(batch * tokens)} was assumed because none was given, and it limits this plan: "
        f"--global-batch {chosen} ({format_tokens(chosen * tokens)}) would reach an MFU of {100 * mfu:.0f} % instead "
        f"of {100 * best[0].mfu:.0f} %"
    ]


def _check_imbalance(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= MOST_IMBALANCE:
        raise WorkloadError(
            f"expert imbalance is the busiest rank's rows over the mean, from 1 to {MOST_IMBALANCE}, not "
            f"{format_value(value)}"
        )
    return float(value)


def _find_sample(workload: Workload, global_batch: int | str | None) -> tuple[Workload, int | str | None]:
    """One sample of a workload, and the global batch: the workload's rows, where it has several."""
    if workload.phase != "train":
        raise WorkloadError(f"a plan is of training: workload has phase {workload.phase}")
    if workload.rows == 1:
        return workload, global_batch
    if global_batch is not None:
        raise WorkloadError(
            f"workload has {workload.rows} rows, so it is the global batch itself: leave global_batch out, or give one "
            "sample, with rows=1"
        )
    sample = resize_batch(workload, 1) if workload.layout == "unpadded" else None
    if sample is None or resize_batch(sample, workload.rows) != workload:
        raise WorkloadError("the rows of workload differ: a plan needs samples like one another, or one, with rows=1")
    return sample, workload.rows


def _make_sample(
    estimator: Estimator,
    seq_len: int | None,
    images: Iterable[tuple[int, int]] | None,
    workload: Workload | None,
    notes: list[str],
) -> Workload:
    """One sample as the estimator checks it."""
    if estimator.is_diffusion:
        raise WorkloadError(f"{estimator.source.name} is a diffusion model: plans are of language models")
    check_timed(estimator)
    if workload is not None:
        return estimator.estimate(workload).terms[0][1]
    if seq_len is None:
        seq_len = DEFAULT_SEQ
        notes.append(f"no length given: sequences of {seq_len} tokens assumed")
        try:
            return estimator(1, seq_len, images=images).terms[0][1]
        except WorkloadError as error:
            if estimator.vision is not None and not estimator.has_text_encoder and not estimator.has_decoder:
                raise WorkloadError(IMAGES_ALONE) from None
            raise WorkloadError(f"{error}{NO_LENGTH}") from None
    return estimator(1, seq_len, images=images).terms[0][1]


def choose_batch(gpus: int, tokens: int) -> int:
    """About 4M tokens, in a number of sequences that divides well: a multiple of the devices or of a part of them."""
    wanted = max(1, DEFAULT_BATCH_TOKENS // tokens)
    unit = next(gpus // parts for parts in range(1, gpus + 1) if gpus % parts == 0 and gpus // parts <= wanted)
    share = wanted // unit
    even = 1 << min(5, max(0, share.bit_length() - 3))  # so that micro-batches of powers of two divide it
    return max(1, round(wanted / (unit * even))) * unit * even


def _listed(value: int | str | Iterable[int | str]) -> Sequence[int | str]:
    return (
        tuple(check_items(value, "a degree"))
        if isinstance(value, Iterable) and not isinstance(value, str)
        else (value,)
    )
