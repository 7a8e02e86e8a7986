"""The search over layouts of a training run: those that fit, their time and money, and why the others lose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from flopcalc.base.errors import DeviceError, WorkloadError
from flopcalc.base.rows import FrozenRows
from flopcalc.base.spelling import spell
from flopcalc.base.units import format_bytes, format_seconds
from flopcalc.base.vocabulary import CAST_FORMATS, Execution, Kernel, LayoutRecompute, Optimizer, name_part
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.estimate.utilization import find_ideal_time
from flopcalc.core.workload.workload import Workload
from flopcalc.hardware.devices import Device, find_device, parse_dtype
from flopcalc.hardware.prices import Rate, find_price
from flopcalc.hardware.routing import EVEN
from flopcalc.planning.coverage import describe_coverage
from flopcalc.planning.layout import Layout, Outline, find_problem, list_layouts
from flopcalc.planning.network import Interconnect, check_reach, find_interconnect
from flopcalc.planning.results import Loser, Plan, PlannedLayout, Point, find_usable
from flopcalc.planning.seconds import PARTS, LayoutSeconds, Overlaps
from flopcalc.planning.step import LayoutTimer
from flopcalc.prediction.clock import CHECKED, tell_kernels
from flopcalc.prediction.execution_options import describe_formats
from flopcalc.prediction.memory.peak import Memory, resize_batch
from flopcalc.prediction.watts import Energy, Range, check_site, find_energy, find_power_model

MOST_LAYOUTS = 1_000_000
_TOLD_EVERY = 32  # layouts between two calls of `progress`
_LEAST_HELP = 0.01
KNOWN_DTYPES = ("bf16", "fp16", *CAST_FORMATS)
_REASONS = {
    "bubble": ("bubble",),
    "communication": (
        "tensor_parallel",
        "context_parallel",
        "expert_parallel",
        "pipeline_sends",
        "data_parallel",
    ),
    "recompute": ("recompute", "offload"),
    "compute": ("products", "attention", "memory_bound", "launches", "host", "optimizer", "overhead"),
}


# In place of an interconnect where there is one device.
ALONE = Interconnect("none", "one device", (), 1, ((1.0, 1.0),), 1.0, 0.0, 1.0, 0.0, ((1.0, 1.0),), "no network", "")


def search_layouts(
    estimator: Estimator,
    sample: Workload,
    *,
    tokens: int,
    device: str,
    gpus: int,
    global_batch: int,
    fixed: Mapping[str, Sequence[int | str]],
    interconnect: str | None = None,
    price: float | None = None,
    pue: float | None = None,
    grid: float | None = None,
    dtype: str | None = None,
    execution: Execution = "fused",
    optimizer: Optimizer = "adamw-master",
    attention_kernel: Kernel = "auto",
    overlaps: Overlaps = Overlaps(),  # noqa: B008
    expert_imbalance: float = 1.0,
    top: int = 5,
    notes: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """The best layouts of a bound model; `sample` is one sequence, `fixed` the values that degrees may take."""
    found = find_device(device)
    kind = estimator.formats.attention if dtype is None else parse_dtype(dtype)
    _check_dtype(found, kind)
    if dtype is not None and not (estimator.formats.compute == kind or estimator.formats.is_only(kind)):
        estimator = estimator.change(compute=kind)
    if kind in CAST_FORMATS and execution != "fused":
        raise WorkloadError(f"{kind} is planned with execution fused, not {execution}: HF's code does not train in it")
    net = ALONE if gpus == 1 and interconnect is None else find_interconnect(interconnect, device)
    check_reach(net, gpus)
    rate = find_price(found, price)
    if not estimator.parameters()["trainable"]:
        raise WorkloadError("nothing trains under this recipe: there is no training run to plan")
    runner = LayoutTimer(
        estimator, sample, device, net, global_batch, dtype=kind, execution=execution, optimizer=optimizer,
        attention_kernel=attention_kernel, overlaps=overlaps, expert_imbalance=expert_imbalance,
    )  # fmt: skip
    if expert_imbalance != 1 and runner.model.experts == 1:
        raise WorkloadError(f"{estimator.source.name} has no experts: leave out the expert imbalance")
    needed = _find_ideal(found, {name: flops.total for name, flops in estimator.count_formats(sample, "model").items()})
    capacity = find_usable(found, gpus)
    searched = _search(runner, gpus, global_batch, fixed, capacity, progress)

    power_model = find_power_model(found)

    def spend(layout: Layout, step: LayoutSeconds, run_s: float) -> Energy | None:
        power = None if power_model is None else power_model.find(runner.find_shares(layout, step))
        seconds = Range(run_s * step.low / step.seconds, run_s, run_s * step.high / step.seconds)
        check_site(power, pue, grid)
        return find_energy(power, seconds, tokens, gpus, pue, grid)

    def finish(layout: Layout, step: LayoutSeconds, _: int) -> PlannedLayout:
        memory = runner.count_memory(layout)
        speed = global_batch / step.seconds
        hours = tokens / (speed * sample.tokens) / 3600
        return PlannedLayout(
            layout,
            step,
            memory,
            mfu=needed * speed / gpus,
            hfu=_find_ideal(found, _count_executed(runner, layout)) * speed / gpus,
            tokens_per_s=speed * sample.tokens,
            days=hours / 24,
            gpu_hours=hours * gpus,
            energy=spend(layout, step, 3600 * hours),
            usd=None if rate is None else rate.usd_per_gpu_hour * hours * gpus,
        )

    if not searched.fitting:
        raise WorkloadError(_describe_misfit(runner, gpus, searched.misfits, capacity, fixed))
    ranked = sorted(searched.fitting, key=lambda entry: entry[1].seconds)
    best = [finish(*entry) for entry in ranked[:top]]
    losers = _explain(best[0], ranked, searched.misfits, capacity, runner.time, finish)
    steps = [(layout, step.seconds) for layout, step, _ in ranked]
    said = [*notes, *runner.notes, *_list_notes(best[0], runner, rate, steps)]
    said += [found.note] if found.note and found.note not in said else []
    if sample.decoder is not None:
        said.append("encoder and decoder: a pipeline's stages are counted with the mean of both kinds of layers")
    return Plan(
        estimator.source.name,
        estimator.parameters()["total"],
        found,
        kind,
        gpus,
        net,
        tokens,
        sample.tokens,
        global_batch,
        tuple(best),
        tuple(losers),
        len(ranked) + len(searched.misfits),
        len(ranked),
        searched.skipped,
        rate,
        _name_evidence(runner),
        tuple(said),
        FrozenRows(Point(step.seconds, peak, layout) for layout, step, peak in ranked),
        execution,
        optimizer,
        _find_help(best[0], losers),
        estimator.routing_name,
    )


Entry: TypeAlias = tuple[Layout, LayoutSeconds, int]  # with the peak of its memory, in bytes
Misfit: TypeAlias = tuple[Layout, int]  # not timed: few of them are asked about


class _SearchResult(NamedTuple):
    fitting: list[Entry]
    misfits: list[Misfit]
    skipped: dict[str, int]


def _find_ideal(device: Device, flops: Mapping[str, float]) -> float:
    """The least seconds of one sample's FLOPs on a device, each at the peak of its format."""
    return find_ideal_time(flops, device=device.id).seconds or 0.0


def _count_executed(runner: LayoutTimer, layout: Layout) -> dict[str, float]:
    """FLOPs executed for one sample of a layout's micro-batches, by number format; tiles are padded as on one GPU."""
    load, recompute = resize_batch(runner.sample, layout.micro_batch), layout.recompute

    def count(recompute: LayoutRecompute, share: float = 1.0) -> dict[str, float]:
        found = runner.estimator(recompute).count_formats(load, "hardware")
        return {name: share * flops.total / layout.micro_batch for name, flops in found.items()}

    if recompute == "half":
        none, full = count("none", 0.5), count("full", 0.5)
        return {name: none.get(name, 0.0) + full.get(name, 0.0) for name in {**none, **full}}
    if recompute in ("light", "offload"):
        found, own = count("none"), runner.estimator("none").formats.attention
        lifted = sum(each.flops for each in runner.work(1, "none").products if each.is_lifting)
        return {**found, own: found.get(own, 0.0) + lifted}
    if recompute == "selective":
        found = count("none")
        rows = runner.estimator("none").rows(load, "hardware")
        cores = [each for each in rows if each.block.layers and each.row.op.kind == "attend"]
        again = sum(each.flops.forward * each.block.copies for each in cores if each.block.group == "language")
        own = runner.estimator("none").formats.attention
        return {**found, own: found.get(own, 0.0) + again / layout.micro_batch}
    return count(recompute)


def _check_dtype(device: Device, dtype: str) -> None:
    """Only a format that a plan knows and the device has a peak for."""
    if dtype not in KNOWN_DTYPES:
        raise WorkloadError(f"a plan is for training in {', '.join(KNOWN_DTYPES)}, not {dtype}")
    if dtype not in device.peak_tflops:
        known = [name for name in KNOWN_DTYPES if name in device.peak_tflops]
        help_ = f"plan with {spell('dtype')} {' or '.join(known)}, or add it" if known else "add it"
        raise DeviceError(f"{device.name} has no known {dtype} peak: {help_} to this device in your own devices.toml")


def _search(
    runner: LayoutTimer,
    gpus: int,
    global_batch: int,
    fixed: Mapping[str, Sequence[int | str]],
    capacity: float,
    progress: Callable[[int, int], None] | None,
) -> _SearchResult:
    """Every layout of the search, timed; an error if none divides."""
    model, fixed = runner.model, {"recompute": runner.list_recompute(), **fixed}
    _check_division(model, gpus, global_batch, fixed)
    fitting: list[Entry] = []
    misfits: list[Misfit] = []
    skipped: dict[str, int] = {}
    problems: dict[str, str] = {}
    whole = 0
    if progress is not None:  # a listing alone is quick, and shows how many there are
        whole = sum(1 for _ in list_layouts(model, gpus, global_batch, runner.net.per_node, fixed))
    for number, layout in enumerate(list_layouts(model, gpus, global_batch, runner.net.per_node, fixed)):
        if progress is not None and number % _TOLD_EVERY == 0:
            progress(number, whole)
        if number == MOST_LAYOUTS:
            raise WorkloadError(
                f"more than {MOST_LAYOUTS} layouts: fix some of them, such as {spell('tp')} or {spell('micro_batch')}"
            )
        problem = find_problem(layout, model, gpus, global_batch) or runner.find_unknown(layout)
        if problem is not None:
            skipped[problem[0]] = skipped.get(problem[0], 0) + 1
            problems.setdefault(*problem)
            continue
        peak = runner.find_peak(layout)
        if peak <= capacity:
            fitting.append((layout, runner.time(layout), peak))
        else:
            misfits.append((layout, peak))
    if not fitting and not misfits:
        most = max(skipped, key=lambda rule: skipped[rule]) if skipped else ""
        why = problems[most] if most else f"what is fixed leaves no way to use all {gpus} devices"
        raise WorkloadError(f"no layout divides: {why}; change it, {spell('gpus')} or {spell('global_batch')}")
    return _SearchResult(fitting, misfits, skipped)


def _check_division(model: Outline, gpus: int, global_batch: int, fixed: Mapping[str, Sequence[int | str]]) -> None:
    """What the user fixed must divide by itself, or the error names it."""
    for name in ("tp", "pp", "cp", "dp"):
        for value in map(int, fixed.get(name, ())):
            if gpus % value:
                raise WorkloadError(f"{name} {value} does not divide {gpus} devices")
    for name in ("tp", "pp", "cp", "ep"):
        for value in map(int, fixed.get(name, ())):
            degrees: dict[str, Any] = {name: value, "dp": value if name == "ep" else 1}
            layout = Layout(**degrees)
            problem = find_problem(layout, model, layout.devices, layout.micro_batch * layout.dp)
            if problem is not None:
                raise WorkloadError(problem[1])
    for value in map(int, (*fixed.get("dp", ()), *fixed.get("micro_batch", ()))):
        if global_batch % value:
            raise WorkloadError(f"{value} does not divide a global batch of {global_batch} sequences (dp, micro-batch)")


def _explain(
    best: PlannedLayout,
    ranked: Sequence[Entry],
    misfits: Sequence[Misfit],
    capacity: float,
    time: Callable[[Layout], LayoutSeconds],
    finish: Callable[[Layout, LayoutSeconds, int], PlannedLayout],
) -> list[Loser]:
    """Why the others lose, reason by reason: the part that grew most against the best, or memory."""
    nearest_of: dict[str, Entry] = {}
    counts: Counter[str] = Counter()
    placed = {reason: [PARTS.index(name) for name in names] for reason, names in _REASONS.items()}
    for entry in ranked[1:]:
        grown = {
            reason: sum([entry[1].parts[place] - best.step.parts[place] for place in places])
            for reason, places in placed.items()
        }
        reason = max(grown, key=lambda reason: grown[reason])
        nearest_of.setdefault(reason, entry)
        counts[reason] += 1
    # The nearest of those that do not fit is the smallest that would be faster, else the fastest.
    timed: list[Entry] = []
    for layout, peak in sorted(misfits, key=lambda entry: entry[1]):
        timed.append((layout, time(layout), peak))
        if timed[-1][1].seconds < best.step.seconds:
            break
    if timed:
        nearest_of["memory"] = min(timed, key=lambda entry: entry[1].seconds)
        counts["memory"] = len(misfits)
    losers = []
    for reason, entry in nearest_of.items():
        nearest = finish(*entry)
        slower = nearest.step.seconds / best.step.seconds - 1
        if reason == "memory":
            word = f"{abs(slower):.0%} {'faster' if slower < 0 else 'slower'}" if abs(slower) >= 0.005 else "as fast"
            text = f"{describe_missing(nearest.memory, capacity)}; would be {word}"
        else:
            names = _REASONS[reason]
            parts = {name: nearest.step.parts[PARTS.index(name)] for name in names}
            most = max(parts, key=lambda name: parts[name] - best.step.parts[PARTS.index(name)])
            old, new = best.step.parts[PARTS.index(most)], parts[most]
            before = format_seconds(old) if old else "none"
            text = f"{slower:.1%} slower" if slower >= 0.0005 else "as fast"
            if new > old:
                text += f": {name_part(most)} {format_seconds(new)} of a step against {before}"
        losers.append(Loser(reason, counts[reason], nearest, text))
    return sorted(losers, key=lambda loser: -loser.layouts)


_NETWORK = ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_sends", "data_parallel")


def _find_help(best: PlannedLayout, losers: Sequence[Loser]) -> str:
    """What would shorten the best layout's step most; nothing where it is all products."""
    parts, whole = dict(zip(PARTS, best.step.parts, strict=True)), best.step.seconds
    gains = {
        f"a larger {spell('global_batch')} (fewer bubbles)": parts["bubble"] / whole,
        "a network twice as fast": sum(parts[name] for name in _NETWORK) / 2 / whole,
        "memory for all activations (no recomputation)": parts["recompute"] / whole,
    }
    for loser in losers:
        if loser.reason == "memory":
            name = f"{format_bytes(loser.nearest.memory.peak - best.memory.peak)} more memory per GPU"
            gains[name] = 1 - loser.nearest.step.seconds / whole
    most = max(gains, key=lambda name: gains[name])
    return f"{most}: a step up to {gains[most]:.0%} shorter" if gains[most] >= _LEAST_HELP else ""


def _describe_misfit(
    runner: LayoutTimer,
    gpus: int,
    misfits: Sequence[Misfit],
    capacity: float,
    fixed: Mapping[str, Sequence[int | str]],
) -> str:
    layout = min(misfits, key=lambda entry: entry[1])[0]
    memory, estimator, device = runner.count_memory(layout), runner.estimator("none"), runner.machine.device
    there = memory.at_peak
    states = there["weights"] + there["gradients"] + there["optimizer"]
    helps = []
    freed = [name for name in ("zero", "recompute", "micro_batch", "tp", "pp", "cp", "ep") if name in fixed]
    if freed:
        helps.append("leave " + ", ".join(spell(name) for name in freed) + " free")
    if states > capacity / 2:
        helps.append("more devices, to spread weights and optimizer states further")
        if runner.optimizer == "adamw-master":
            helps.append(
                f"{spell('optimizer', 'adamw')} (bf16 states, no fp32 copy of the weights: 8 bytes instead of 18)"
            )
    else:
        helps.append(f"shorter sequences or more devices, to spread activations further ({spell('cp')})")
    parameters = estimator.parameters()
    is_whole = parameters["trainable"] > parameters["total"] / 2
    helps.append("a device with more memory" + (", or LoRA" if is_whole else ""))
    return (
        f"{estimator.source.name} does not fit on {gpus} x {device.name} in any of {len(misfits)} layouts: the "
        f"smallest, {layout}, needs {format_bytes(memory.peak)} per device, {describe_missing(memory, capacity)}. "
        f"What would help: {'; '.join(helps)}"
    )


def describe_missing(memory: Memory, capacity: float) -> str:
    """How much does not fit, and what takes the most."""
    parts = sorted(memory.at_peak.items(), key=lambda part: -part[1])
    most = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts[:2])
    return f"{format_bytes(int(memory.peak - capacity))} more than {format_bytes(int(capacity))} ({most})"


_ASSUMED = {
    "eager": "assumed: HF's eager code with its host time",
    "compiled": "assumed: HF's code under torch.compile",
    "graphs": "assumed: HF's code under torch.compile, replayed as CUDA graphs",
    "fused": "assumed: fused kernels, no waiting for the CPU",
}


def _name_evidence(runner: LayoutTimer) -> str:
    if runner.machine.is_measured:
        return "measured"
    return "kernels measured" if runner.machine.has_kernels else "not measured: scaled by published peaks"


def _list_assumed(runner: LayoutTimer) -> list[str]:
    """What a step's time assumes besides measured and published times."""
    assumed = [_ASSUMED[runner.execution]]
    has_experts = runner.model.experts > 1
    if has_experts and runner.waits_at_experts:
        assumed[0] += " but at experts"
    assumed.append("gradients reduced while backward runs" if runner.overlaps.gradients else "no communication hidden")
    if has_experts and runner.expert_imbalance == 1:
        assumed.append(f"routing {runner.routing or EVEN}")
    elif has_experts:
        busy = f"the busiest rank's experts with {runner.expert_imbalance:g} times the mean's rows"
        even = "" if runner.execution == "fused" else " (in time; memory as if loaded evenly)"
        assumed.append(f"{busy}, at most all{even}")
    return assumed


def _list_notes(
    best: PlannedLayout, runner: LayoutTimer, rate: Rate | None, steps: Sequence[tuple[Layout, float]]
) -> list[str]:
    net, device, many = runner.net, runner.machine.device, best.layout.devices
    own = f"one-GPU times measured on {device.name}"
    if runner.machine.has_kernels:
        own = tell_kernels(runner.machine)
    elif not runner.machine.is_measured:
        own = f"{device.name} was not measured in {runner.dtype}: one-GPU times are scaled by published peaks"
    if many > 1:
        own += (
            f"; collectives from table {net.id}; multi-GPU overhead and interval come from published runs"
            f"{'' if device.id in CHECKED else ' on other GPUs'}; we have not measured a cluster (docs/planning.md)"
        )
    formats = runner.estimator("none").formats
    notes = [
        own,
        ", ".join(_list_assumed(runner)),
        f"memory per GPU: {formats.name_weights()} weights; {runner.optimizer}, {best.memory.describe_parameter()}, "
        "before ZeRO",
        *runner.list_notes(best.layout),
        *describe_coverage(runner, best.layout, steps),
        *describe_formats(formats, runner.optimizer),
    ]
    if many > net.per_node and many % net.per_node:
        notes.append(f"{many} GPUs do not fill whole nodes of {net.per_node}: a group may span two nodes")
    if rate is None:
        notes.append(f"no price is known for this device: {spell('price', 'USD_PER_GPU_HOUR')} gives one")
    elif rate.source != "given":
        notes.append(f"price {rate.usd_per_gpu_hour:g} USD per GPU-hour as of {rate.source}")
    if best.energy is not None:
        notes.append(best.energy.power.describe())
    return notes
