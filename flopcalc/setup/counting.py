"""What a Setup asks to count: its model bound, its workload made, its Estimate with the notes on what was assumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from flopcalc.base.data import get_stem
from flopcalc.base.errors import DeviceError, RecipeError, WorkloadError
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_positive, format_tokens, parse_share
from flopcalc.base.vocabulary import PHASES, Convention, check_word
from flopcalc.core.estimate.binding import bind_config, read_recipe
from flopcalc.core.estimate.estimate import Estimate, Estimator
from flopcalc.core.model.config import Source, load_config
from flopcalc.core.recipe.recipe import Recipe
from flopcalc.hardware.devices import detect_device, find_detected, find_device
from flopcalc.setup.setup import ModelChoice, Setup

if TYPE_CHECKING:
    from flopcalc.core.estimate.objective import Objective
    from flopcalc.core.estimate.run import Run
    from flopcalc.core.estimate.traced import TracedEstimator, TracedModel
    from flopcalc.core.estimate.utilization import Utilization

# What a trace cannot answer; convention full is what it counts.
_UNTRACED = (
    "attention_kernel", "spec", "image", "video", "video_grid", "max_pixels", "lengths", "decoder_seq", "audio",
    "clipping", "weights", "kv_cache", "autocast", "head", "mtp", "routing", "objective",
)  # fmt: skip


Tracer: TypeAlias = "Callable[[Source, Recipe, str, bool, str], TracedModel]"


@frozen()
class SetupEstimate(Value):
    """An Estimate, and notes on what was assumed, besides the estimate's own."""

    estimate: Estimate
    notes: list[str]

    @property
    def all_notes(self) -> list[str]:
        return list(dict.fromkeys([*self.estimate.notes, *self.notes]))


def count_setup(setup: Setup, tracer: Tracer, convention: Convention | None = None) -> SetupEstimate:
    """The Estimate that a setup asks for: one step of the whole job. `tracer` runs HF's code for a trace."""
    notes = list(setup.notes)
    return count_bound(setup, bind_setup(setup, convention, notes, tracer), notes)


def count_bound(setup: Setup, estimator: Estimator, notes: list[str]) -> SetupEstimate:
    """The same of a model that is bound already; `notes` grow by what the workload assumes."""
    estimate, place = _count_micro_batch(setup, estimator, notes), setup.place
    times = _find_times(setup, estimate, place.replicas)
    if times > 1 and estimate.pipeline is not None and estimate.pipeline.phase != "train":
        raise WorkloadError(f"{spell('grad_accum')} belongs to phase train, not {estimate.pipeline.phase}")
    estimate = estimate * times if times > 1 else estimate
    if place.count > 1 and setup.command != "predict":
        notes.append(
            f"{spell('batch')} is that of one {'GPU' if place.shared == 1 else f'group of {place.shared} GPUs'}, and "
            "FLOPs are those of all GPUs; before version 0.2 it was the batch of all GPUs together"
        )
        estimate = estimate.spread(place.count, place.replicas)
    return SetupEstimate(estimate, notes)


def bind_setup(
    setup: Setup, convention: Convention | None = None, notes: list[str] | None = None, tracer: Tracer | None = None
) -> Estimator:
    """The estimator of a setup's model, recipe and formats."""
    notes = [] if notes is None else notes
    chosen = setup.model
    if chosen.trace and tracer is not None:  # no other command takes the field
        return _find_traced(setup, tracer)
    return bind_config(
        chosen.model, recipe=setup.recipe, convention=convention or setup.convention,
        attention_kernel=setup.attention_kernel, device=choose_device(setup, notes, convention), formats=setup.formats,
        spec=chosen.spec, download=chosen.download, clipping=setup.clipping, model_type=chosen.model_type,
        head=chosen.head, mtp=chosen.mtp, routing=setup.get("routing"),
    )  # fmt: skip


def choose_device(setup: Setup, notes: list[str], convention: Convention | None = None) -> str | None:
    """The device asked for; None without one, or for one that is not in the table but has a peak."""
    name = setup.place.device
    if name is None:
        return None
    if name == "auto":
        name = detect_device()
        known = find_detected(name) if name is not None else None
    else:
        try:
            known = find_device(name)
        except DeviceError:
            if setup.place.peak is None:
                raise
            known = None  # a device that is not in the table: its peak is given by hand
    if known is None or name is None:
        if setup.command in ("predict", "plan", "serving", "bind"):
            shown = "no GPU" if name is None else f"{name}, which is not in the table"
            raise DeviceError(
                f"{spell('device', 'auto')}: this machine shows {shown}; name a GPU, `flopcalc devices` lists them"
            )
        return None  # find_shares says so
    is_auto = setup.attention_kernel == "auto" and (convention or setup.convention) == "hardware"
    if known.sdpa is None and is_auto:
        notes.append(f"which kernel SDPA picks on {known.name} is not known: flash assumed")
    return name


def require_device(setup: Setup) -> str:
    """The device of a question that needs one."""
    device = choose_device(setup, [])
    if device is None:
        raise DeviceError(f"on which device? Give {spell('device', 'NAME')}; `flopcalc devices` lists them")
    return device


def _find_traced(setup: Setup, tracer: Tracer) -> TracedEstimator:
    """The estimator of a config that is counted from HF's own code: kept from before, else traced now."""
    for name in _UNTRACED:
        if name in setup.values:
            raise WorkloadError(
                f"{spell('trace')} counts what HF's code executes: it takes no {spell(name)}; "
                "bind(module, example_batch) traces any module on tensors of your own"
            )
    if setup.get("convention", "full") != "full":
        raise WorkloadError(f"{spell('trace')} counts what HF's code executes: it takes no {spell('convention')}")
    source = load_config(
        setup.model.model,
        download=setup.model.download,
        model_type=setup.model.model_type,
        own=(get_stem(setup.model.spec),) if setup.model.spec else (),
    )
    from flopcalc.core.estimate.traced import TracedEstimator, check_layers, load_trace, make_trace_key

    check_layers(source)
    recipe = read_recipe({} if setup.recipe is None else setup.recipe)
    if source.module is not None:
        if setup.recipe is not None:
            raise RecipeError(
                "a live model itself says what trains and what is recomputed: change it there, or pass its config"
            )
        from flopcalc.core.recipe.live import read_recipe as read_live

        recipe, _, _ = read_live(source.module)
    whole, phase = setup.work.workload, setup.work.inputs.phase
    has_images = bool(setup.work.inputs.image_grid if whole is None else whole.grids)
    # A live model may change before the next call, so its trace is not kept.
    key = make_trace_key(source, recipe, phase, has_images) if source.module is None else ""
    traced = (load_trace(key) if key else None) or tracer(source, recipe, phase, has_images, key)
    return TracedEstimator(traced, source, recipe, setup.formats)


def _count_micro_batch(setup: Setup, estimator: Estimator, notes: list[str]) -> Estimate:
    work, objective = setup.work, setup.get("objective")
    if objective is not None:
        return _count_objective(setup, objective, estimator, notes)
    if work.workload is not None:
        return estimator.estimate(work.workload)
    if work.real_batch is not None:
        phase = check_word(work.inputs.phase, PHASES, "phase", WorkloadError)
        return estimator.estimate_batch(work.real_batch, phase=phase, logits=work.inputs.logits)
    estimate, found = estimator.estimate_inputs(work.inputs)
    notes += found
    return estimate


def _count_objective(setup: Setup, objective: Objective, estimator: Estimator, notes: list[str]) -> Estimate:
    """One micro-batch with all passes of its objective."""
    from flopcalc.core.estimate.objective import count_passes  # only where used

    inputs = setup.work.inputs
    if setup.work.workload is not None or setup.work.real_batch is not None:
        raise WorkloadError(f"{spell('objective')} makes its passes from sizes: give them instead of a whole batch")
    if inputs.phase != "train" or estimator.is_diffusion:
        what = "diffusion models" if estimator.is_diffusion else f"phase {inputs.phase}"
        raise WorkloadError(f"{spell('objective')} is about the training of language models, not {what}")
    if objective.completion is not None and inputs.logits is None:
        inputs = inputs.replace(logits=objective.completion)

    def bind_frozen() -> Estimator:
        model = setup.model
        if objective.teacher is not None:
            model = ModelChoice(objective.teacher, download=model.download)
        return bind_setup(setup.replace(model=model, recipe={"lora": None}), estimator.convention)

    estimate, found = estimator.estimate_inputs(inputs)
    notes += found
    return count_passes(objective, estimator, estimate.terms[0].load, bind_frozen)


def _find_times(setup: Setup, estimate: Estimate, replicas: int) -> int:
    """Micro-batches of a step on one replica, as they are given or as a global batch needs them."""
    work = setup.work
    phase = estimate.terms[0].load.phase
    for name, value in (("grad_accum", work.grad_accum), ("global_batch", work.global_batch)):
        if value not in (None, 1) and phase != "train" and estimate.pipeline is None:
            raise WorkloadError(f"{spell(name)} belongs to phase train, not {phase}")
    times = work.grad_accum or 1
    if work.global_batch is None:
        return times
    rows = sum(load.rows * many for _, load, many in estimate.trained.terms)
    objective = setup.get("objective")
    rows //= 2 if objective is not None and objective.is_paired else 1
    sequences = find_sequences(work.global_batch, estimate.tokens // rows)
    found, rest = divmod(sequences, rows * replicas)
    if rest or not found:
        raise WorkloadError(
            f"a global batch of {sequences:,} sequences is no multiple of {rows * replicas:,}: {spell('batch', rows)} "
            f"on {replicas:,} replica{'s' * (replicas > 1)}"
        )
    if work.grad_accum is not None and work.grad_accum != found:
        raise WorkloadError(
            f"{spell('grad_accum', times)} makes a global batch of {times * rows * replicas:,} sequences, not "
            f"{sequences:,}"
        )
    return found


def find_sequences(asked: int | str | tuple[int, str], length: int) -> int:
    """Whole sequences of a global batch that may be given in tokens; 4M tokens are 2²² where that divides."""
    if isinstance(asked, str):
        raise WorkloadError(f"{spell('global_batch', 'auto')} belongs to plan")
    if isinstance(asked, int):
        if asked * length > 4_000_000_000:  # of no run; a number of tokens was taken for sequences
            raise WorkloadError(
                f"{spell('global_batch')}: {asked:,} sequences of {length:,} are {format_tokens(asked * length)} "
                f"a step; a number of tokens is written as {spell('global_batch', '16Mtok')}"
            )
        return asked
    tokens, suffix = int(asked[0]), asked[1]
    power = {"k": 1, "m": 2, "b": 3, "t": 4}.get(suffix, 0)
    binary, rest = divmod(tokens << (10 * power), int(1000**power))
    if length and not rest and binary % length == 0:
        return binary // length
    sequences = round(tokens / length) if length else 0
    if not sequences:
        raise WorkloadError(
            f"{spell('global_batch')}: {format_tokens(tokens)} are less than one sequence of {length:,}"
        )
    return sequences


def find_shares(
    counted: SetupEstimate, setup: Setup, way: str = ""
) -> tuple[Utilization | None, Utilization | None, list[str]]:
    """MFU and HFU where a time is given, and more notes; without one, the least time, and the `way` to the MFU."""
    place, estimate = setup.place, counted.estimate
    where: dict[str, Any] = {"device": place.device, "dtype": None, "peak": place.peak}
    measured = _read_time(setup)
    if not measured and place.device is None and place.peak is None:
        return None, None, []
    from flopcalc.core.estimate.utilization import describe_least_time, hfu, mfu  # only with a peak or a time

    said = counted.all_notes
    if not measured:
        return None, None, [note for note in describe_least_time(estimate, way, **where) if note not in said]
    model_share, hardware_share = (share(estimate, **measured, **where) for share in (mfu, hfu))
    notes = [share.note or "" for share in (model_share, hardware_share)]
    for note in said:
        notes = [each.removesuffix(note).removesuffix("; ") for each in notes]
    return model_share, hardware_share, [note for note in dict.fromkeys(notes) if note]


def find_run(estimate: Estimate, setup: Setup) -> Run | None:
    """The whole run that a number of tokens asks for."""
    share = setup.get("mfu")
    share = parse_share(share, "mfu") if isinstance(share, str) else share and check_positive(share, "mfu")
    tokens = setup.get("tokens")
    if tokens is None:
        if share is not None:
            raise WorkloadError(
                f"{spell('mfu')} belongs to a whole run: give its {spell('tokens')} too; {spell('step_time')} gives a "
                "step's MFU"
            )
        return None
    from flopcalc.core.estimate.run import count_run  # only for a whole run

    place = setup.place
    time: dict[str, Any] = _read_time(setup)
    return count_run(estimate, tokens, mfu=share, device=place.device, peak=place.peak, **time)


def _read_time(setup: Setup) -> dict[str, Any]:
    """What was measured of a step, if anything."""
    found = {"step_time_s": setup.place.step_time_s, "tokens_per_second": setup.place.tokens_per_second}
    return {name: value for name, value in found.items() if value is not None}
