"""Plan a training run: a model, a device and a number of them in; the best layouts, their time and money out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from flopcalc.base.errors import WorkloadError, format_value
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_items, format_parameters, format_tokens
from flopcalc.base.vocabulary import Verdict, check_word
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.estimate.inputs import make_load
from flopcalc.core.estimate.notes import describe_inferred
from flopcalc.core.formats.formats import FormatOptions
from flopcalc.core.workload.workload import Workload
from flopcalc.hardware.routing import EVEN
from flopcalc.planning.layout import DEGREES, check_fixed
from flopcalc.planning.results import Plan, PlannedLayout
from flopcalc.planning.search import search_layouts
from flopcalc.planning.seconds import OVERLAPS
from flopcalc.prediction.execution_options import USUAL, check_timed, choose_usual
from flopcalc.prediction.memory.peak import resize_batch
from flopcalc.setup.counting import bind_setup, choose_device, find_sequences
from flopcalc.setup.setup import ModelChoice, Setup
from flopcalc.setup.values import AUTO

__all__ = ["DEFAULT_SEQ", "Plan", "choose_batch", "plan_setup"]

DEFAULT_SEQ = 4096
IMAGES_ALONE = "a plan is counted in tokens, and this sample has images alone"
DEFAULT_BATCH_TOKENS = 1 << 22
_LEAST_GPU_TOKENS, _MOST_DEFAULT_TOKENS = 1 << 10, 1 << 24  # Llama 3 405B: 16M tokens on 16,384 GPUs (arXiv 2407.21783)
_LEAST_STEPS = 500
MOST_GPUS = 1_000_000
MOST_IMBALANCE = 1000
MOST_BATCH_TOKENS = 1 << 28  # beyond it no larger batch is proposed
_AS_FAST = 0.98
_HELPS = 1.1  # how much faster a doubled batch must be to be proposed
_ALIKE = ("tp", "cp", "ep", "zero", "micro_batch", "recompute")  # degrees that depend little on the batch

_NEEDED = {
    "tokens": "the tokens of the whole run, such as 2T; days and a budget then say how many they allow",
    "device": "the GPU to plan for; `flopcalc devices` lists them",
    "gpus": "the number of GPUs; on the command line, a deadline in days tries several",
}


def plan_setup(setup: Setup) -> Plan:
    """The plan of a training run, from a Setup, its bound model and one sample."""
    tokens, device, gpus = setup.get("tokens"), choose_device(setup, []), setup.place.gpus
    for name, value in (("tokens", tokens), ("device", device), ("gpus", gpus)):
        if value is None:
            raise WorkloadError(f"a plan needs {spell(name)}: {_NEEDED[name]}")
    assert tokens is not None and device is not None and gpus is not None  # noqa: PT018
    progress = setup.get("progress")
    if progress is not None and not callable(progress):
        raise WorkloadError(f"progress must be a function of two numbers, not {format_value(progress)}")
    if gpus > MOST_GPUS:
        raise WorkloadError(f"{spell('gpus')} must be at most {MOST_GPUS:,}, not {gpus:,}")
    expert_imbalance = _check_imbalance(setup.get("expert_imbalance", 1.0))
    if expert_imbalance != 1 and setup.get("routing", EVEN) != EVEN:
        raise WorkloadError(f"{spell('routing')} says how busy each rank is: leave {spell('expert_imbalance')} out")
    overlap = check_word(setup.get("overlap", "all"), tuple(OVERLAPS), "overlap", WorkloadError)
    notes: list[str] = []
    estimator, sample, global_batch = _find_sample(setup, notes)
    if not sample.tokens:
        raise WorkloadError(IMAGES_ALONE)
    notes += [note for note in estimator.notes(sample) if "convention hardware" not in note]  # a plan has none
    notes += describe_inferred(estimator)
    is_chosen, is_searched = global_batch is None, global_batch == AUTO
    if global_batch is None or is_searched:
        global_batch, why = choose_batch(gpus, sample.tokens, int(tokens))
    else:
        global_batch = find_sequences(global_batch, sample.tokens)
    assert isinstance(global_batch, int)
    if is_chosen:
        size = format_parameters(global_batch * sample.tokens)
        notes.append(f"no global batch given: {global_batch} sequences, {size} tokens, assumed: {why}")
    notes += [
        *(_describe_indivisible(gpus, global_batch) if setup.get("pp") is None else []),
        *([USUAL] if {"execution", "optimizer"} - set(setup.values) else []),
    ]
    usual, optimizer = choose_usual(gpus, estimator, "train", setup.get("hf_trainer", False))
    given = {name: setup.get(name) for name in DEGREES}
    given["recompute"] = "full" if setup.get("gradient_checkpointing") else setup.get("recompute")
    fixed = {name: check_fixed(name, _listed(value)) for name, value in given.items() if value is not None}
    total_tokens = int(tokens)

    def search(
        batch: int,
        narrowed: Mapping[str, Sequence[int | str]],
        notes: list[str],
        progress: Callable[[int, int], None] | None = None,
    ) -> Plan:
        return search_layouts(
            estimator,
            sample,
            tokens=max(total_tokens, batch * sample.tokens),
            device=device,
            gpus=gpus,
            global_batch=batch,
            fixed=narrowed,
            interconnect=setup.get("interconnect"),
            price=setup.get("price"),
            pue=setup.get("pue"),
            grid=setup.get("grid"),
            dtype=setup.formats.compute,
            execution=setup.get("execution", usual),
            optimizer=setup.get("optimizer", optimizer),
            attention_kernel=setup.attention_kernel,
            expert_imbalance=expert_imbalance,
            overlaps=OVERLAPS[overlap],
            top=setup.get("top", 5),
            notes=notes,
            progress=progress,
        )

    def find_best(batch: int, narrowed: Mapping[str, Sequence[int | str]]) -> float | None:
        """Seconds of a step in the fastest layout that fits, with another global batch."""
        try:
            return search(batch, narrowed, [], progress if is_searched else None).best[0].step.seconds
        except WorkloadError:  # nothing divides, or nothing fits
            return None

    if is_searched:
        global_batch = _search_batch(global_batch, sample.tokens, fixed, find_best, notes)
    whole = global_batch * sample.tokens
    if total_tokens < whole:
        few, many = format_tokens(total_tokens), format_tokens(whole)
        notes.append(f"{few} given, less than one step: one whole step, {many}, planned")
        total_tokens = whole
    found = _judge(search(global_batch, fixed, notes, progress), setup)
    if not is_chosen:
        return found
    return found._replace(
        notes=(*found.notes, *_advise_batch(found.best, global_batch, sample.tokens, fixed, find_best))
    )


def _judge(plan: Plan, setup: Setup) -> Plan:
    """The plan with what its best layout keeps of the limits that were given."""
    best, within = plan.best[0], dict[str, dict[str, Any]]()
    ends = [end / best.step.seconds for end in (best.step.high, best.step.seconds, best.step.low)]
    for name, needed in (("days", best.days), ("budget", best.usd)):
        limit = setup.get(name)
        if limit is None:
            continue
        if needed is None:
            raise WorkloadError(f"{spell(name)}: {plan.device.name} has no known price; give {spell('price', 'USD')}")
        verdict: Verdict = get_args(Verdict)[sum(needed * end > limit for end in ends)]
        within[name] = {"limit": limit, "verdict": verdict, "tokens": max(1, int(plan.tokens * limit / needed))}
    return plan._replace(within=within)


def _describe_indivisible(gpus: int, batch: int) -> list[str]:
    """A note if a factor of the GPUs does not divide the batch: then no layout has that many replicas."""
    lone = gpus // math.gcd(gpus, batch**30)  # without the primes that they share
    unit = gpus if gpus <= batch else lone
    near = " or ".join(
        spell("global_batch", many) for many in (batch // unit * unit, (batch // unit + 1) * unit) if many
    )
    return [
        f"{lone} does not divide {batch} sequences, so no layout has {lone} data-parallel replicas, and the pipeline "
        f"takes that factor of {gpus} GPUs; {near} lets replicas take it"
    ] if lone > 1 else []  # fmt: skip


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
        f"{spell('global_batch', 'auto')}: {chosen} sequences, {format_tokens(chosen * tokens)}, the smallest "
        "within 2 % of the "
        f"fastest up to {format_tokens(MOST_BATCH_TOKENS)}; whether training converges with it is not known here"
    )
    return chosen


def _advise_batch(
    best: Sequence[PlannedLayout],
    batch: int,
    tokens: int,
    fixed: Mapping[str, Sequence[int | str]],
    find_best: Callable[[int, Mapping[str, Sequence[int | str]]], float | None],
) -> list[str]:
    """A note if the batch that was assumed decides the plan: the smallest that no longer does.

    Tries doubled batches among layouts like the best ones: same degrees except replicas, stages and their chunks.
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
        f"{spell('global_batch', chosen)} ({format_tokens(chosen * tokens)}) would reach an MFU of "
        f"{100 * mfu:.0f} % instead "
        f"of {100 * best[0].mfu:.0f} %"
    ]


def _check_imbalance(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= MOST_IMBALANCE:
        raise WorkloadError(
            f"expert imbalance is the busiest rank's rows over the mean, from 1 to {MOST_IMBALANCE}, not "
            f"{format_value(value)}"
        )
    return float(value)


def _find_sample(setup: Setup, notes: list[str]) -> tuple[Estimator, Workload, Any]:
    """The bound model, one sample as it checks it, and the global batch as it was given."""
    work = setup.work
    if work.workload is not None:
        sample, global_batch = _cut_sample(work.workload, work.global_batch)
        estimator = _bind(setup)
        return estimator, estimator.estimate(sample).terms[0].load, global_batch
    has_length = work.inputs.seq is not None or work.inputs.text is not None
    estimator = _bind(setup)
    if not has_length:
        setup = setup.replace(work=work.replace(inputs=work.inputs.replace(seq=DEFAULT_SEQ)))
    try:
        load, found = make_load(estimator, setup.work.inputs)
        sample = estimator.estimate(load).terms[0].load
    except WorkloadError as error:
        if has_length:
            raise
        if estimator.vision is not None and not estimator.has_text_encoder and not estimator.has_decoder:
            raise WorkloadError(IMAGES_ALONE) from None
        raise WorkloadError(
            f"{error}; no length was given, so {DEFAULT_SEQ} tokens were assumed: {spell('seq')} changes it"
        ) from None
    notes += [*setup.notes, *found]
    if not has_length:
        notes.append(f"no length given: sequences of {DEFAULT_SEQ} tokens assumed")
    return estimator, sample, work.global_batch


def _bind(setup: Setup) -> Estimator:
    model = setup.model.model
    if isinstance(model, Estimator):
        is_given = setup.recipe is not None or setup.get("routing") is not None
        if is_given or setup.formats != FormatOptions() or setup.model != ModelChoice(model):
            raise WorkloadError(
                "an Estimator already has its recipe, formats, routing, type and head: do not give them again"
            )
        estimator: Estimator = model
    else:
        estimator = bind_setup(setup.replace(place=setup.place.replace(device=None), attention_kernel="auto"))
    if estimator.is_diffusion:
        raise WorkloadError(f"{estimator.source.name} is a diffusion model: plans are of language models")
    check_timed(estimator)
    return estimator


def _cut_sample(workload: Workload, global_batch: Any) -> tuple[Workload, Any]:
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


def choose_batch(gpus: int, tokens: int, whole: int) -> tuple[int, str]:
    """The batch of a run of `whole` tokens in sequences that divide well over the devices, and why it is so large."""
    wanted, why = DEFAULT_BATCH_TOKENS, "about 4M tokens, as most published runs have"
    if gpus * _LEAST_GPU_TOKENS > wanted:
        wanted = min(gpus * _LEAST_GPU_TOKENS, _MOST_DEFAULT_TOKENS)
        why = "as many tokens a GPU, or all in all, as in the run of Llama 3 405B"
    if whole < wanted * _LEAST_STEPS:
        wanted, why = whole // _LEAST_STEPS, f"about {_LEAST_STEPS:,} steps"
    sequences = max(1, wanted // tokens)
    unit = next(gpus // parts for parts in range(1, gpus + 1) if gpus % parts == 0 and gpus // parts <= sequences)
    share = sequences // unit
    even = 1 << min(5, max(0, share.bit_length() - 3))  # so that micro-batches of powers of two divide it
    return max(1, round(sequences / (unit * even))) * unit * even, why


def _listed(value: int | str | Iterable[int | str]) -> Sequence[int | str]:
    return (
        tuple(check_items(value, "a degree"))
        if isinstance(value, Iterable) and not isinstance(value, str)
        else (value,)
    )
