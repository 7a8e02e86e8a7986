"""A model, a device and a number of them in; the layouts of a training run that fit, their time and money out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from flopcalc.core.estimate.binding import bind_config as bind
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.recipe.recipe import join_recipe
from flopcalc.core.workload.workload import Workload
from flopcalc.data import describe_install
from flopcalc.errors import DeviceError, FlopcalcError, WorkloadError, format_value
from flopcalc.hardware.devices import Device, find_device, parse_dtype
from flopcalc.planning.clock import PARTS, Clock, Step
from flopcalc.planning.layouts import (
    DEGREES,
    Cut,
    Layout,
    Occupied,
    check_fixed,
    count_memory,
    describe_missing,
    find_problem,
    list_layouts,
    make_cut,
)
from flopcalc.planning.money import Rate, count_energy, find_price
from flopcalc.planning.network import Interconnect, find_interconnect
from flopcalc.prediction.memory import find_capacity
from flopcalc.units import check_size, format_bytes, format_parameters, format_seconds, format_tokens, parse_tokens

DEFAULT_SEQ = 4096
NO_LENGTH = f"; no length was given, so {DEFAULT_SEQ} tokens were taken: --seq (seq_len) says another"
DEFAULT_BATCH_TOKENS = 1 << 22
MOST_BATCH_TOKENS = 1 << 28  # beyond it no larger batch is proposed
_HELPS = 1.1  # how much faster a doubled batch must be to be proposed
_ALIKE = ("tp", "cp", "ep", "zero", "micro_batch", "recompute")  # degrees that hardly depend on the batch
MOST_LAYOUTS = 1_000_000
MOST_GPUS = 1_000_000
KNOWN_DTYPES = ("bf16", "fp16", "fp8")
_REASONS = {
    "bubble": ("bubble",),
    "communication": (
        "tensor_parallel",
        "context_parallel",
        "expert_parallel",
        "pipeline_sends",
        "data_parallel",
    ),
    "recompute": ("recompute",),
    "compute": ("products", "attention", "memory_bound", "optimizer", "overhead"),
}
# How many times wider the interval is where layers have scans or selections of keys: as predict's, of types whose
# operators were not recorded.
SCAN_WIDTH = 2.0


class Planned(NamedTuple):
    """A layout with its time, memory and cost; days, hours and money are of the whole run at the middle time."""

    layout: Layout
    step: Step
    memory: Occupied
    mfu: float
    hfu: float
    tokens_per_s: float
    days: float
    gpu_hours: float
    kwh: float | None
    usd: float | None

    def to_dict(self) -> dict[str, Any]:
        factor = {"low": self.step.low / self.step.seconds, "mid": 1.0, "high": self.step.high / self.step.seconds}
        return {
            "layout": self.layout._asdict(),
            "step_time_s": {"low": self.step.low, "mid": self.step.seconds, "high": self.step.high},
            "mfu": self.mfu,
            "hfu": self.hfu,
            "tokens_per_s": self.tokens_per_s,
            "days": {name: self.days * times for name, times in factor.items()},
            "gpu_hours": {name: self.gpu_hours * times for name, times in factor.items()},
            "energy_kwh": self.kwh,
            "usd": None if self.usd is None else {name: self.usd * times for name, times in factor.items()},
            "breakdown": {name: part for name, part in zip(PARTS, self.step.parts, strict=True) if part},
            "memory_bytes": {name: int(size) for name, size in self.memory._asdict().items()}
            | {"total": int(self.memory.total)},
        }


class Loser(NamedTuple):
    """Why layouts lose to the best one: how many for this reason, and the nearest of them."""

    reason: str  # memory, bubble, communication, recompute, compute
    layouts: int
    nearest: Planned
    text: str


class Plan(NamedTuple):
    """What a search found: the best layouts that fit, and why the others lose."""

    model: str
    parameters: int
    device: Device
    dtype: str
    gpus: int
    interconnect: Interconnect
    tokens: int
    seq: int
    global_batch: int
    best: tuple[Planned, ...]
    losers: tuple[Loser, ...]
    layouts: int  # that divide
    fitting: int
    skipped: dict[str, int]  # rule -> layouts that break it
    price: Rate | None
    is_measured: bool  # the device's own times, not another's scaled by published figures
    notes: tuple[str, ...]
    points: tuple[tuple[float, float, Layout], ...]  # step time in s and bytes of every layout that fits

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "parameters": self.parameters,
            "device": self.device.id,
            "dtype": self.dtype,
            "gpus": self.gpus,
            "interconnect": {"id": self.interconnect.id, "source": self.interconnect.source},
            "tokens": self.tokens,
            "seq": self.seq,
            "global_batch": self.global_batch,
            "best": [planned.to_dict() for planned in self.best],
            "losers": [
                {
                    "reason": loser.reason,
                    "layouts": loser.layouts,
                    "nearest": loser.nearest.to_dict(),
                    "why": loser.text,
                }
                for loser in self.losers
            ],
            "front": [
                {"step_time_s": seconds, "memory_bytes": int(size), "layout": str(layout)}
                for seconds, size, layout in self.find_front()
            ],
            "layouts": {"divide": self.layouts, "fit": self.fitting, "skipped": self.skipped},
            "price": None if self.price is None else self.price._asdict(),
            "evidence": {
                "device": "measured" if self.is_measured else "not measured: scaled by published peaks",
                "interconnect": f"{self.interconnect.id}: {self.interconnect.source}",
                "many devices": "published runs (benchmarks/published_runs.py); none measured here",
            },
            "notes": list(self.notes),
        }

    def find_front(self) -> list[tuple[float, float, Layout]]:
        """The layouts that no other beats in both step time and memory, fastest first."""
        front: list[tuple[float, float, Layout]] = []
        for point in sorted(self.points):
            if not front or point[1] < front[-1][1]:
                front.append(point)
        return front

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw days over memory for every layout that fits, into a .png, .svg or .pdf (needs matplotlib)."""
        plot(self, path)


Degree: TypeAlias = int | Sequence[int] | None


# In place of an interconnect where there is one device.
ALONE = Interconnect("none", "one device", (), 1, ((1.0, 1.0),), 1.0, 0.0, 1.0, 0.0, ((1.0, 1.0),), "no network", "")


def plan(
    model: Any,
    *,
    tokens: float | str,
    device: str,
    gpus: int,
    seq_len: int | None = None,
    global_batch: int | None = None,
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
    dtype: str = "bf16",
    recipe: Any = None,
    lora: Any = None,
    images: Iterable[tuple[int, int]] | None = None,
    top: int = 5,
    workload: Workload | None = None,
) -> Plan:
    """The best ways to spread a training run over devices: what fits, its time, its money, and why others lose.

    `model` is anything that `bind` takes, or an Estimator; `global_batch` is in sequences; a degree is a number, a list
    of numbers to try, or None for all that are worth a try. `images` are one sample's, each (width, height) in pixels;
    `workload` is one whole sample instead.
    """
    recipe = join_recipe(recipe, lora, None)
    if isinstance(model, Estimator) and recipe is not None:
        raise WorkloadError("an Estimator already has its recipe: give neither recipe nor lora beside it")
    estimator = model if isinstance(model, Estimator) else bind(model, recipe=recipe)
    found, kind = find_device(device, needs_all=True), parse_dtype(dtype)
    peak = _find_peak(found, kind)
    gpus, top = check_size(gpus, "gpus"), check_size(top, "top")
    if gpus > MOST_GPUS:
        raise WorkloadError(f"gpus must be at most {MOST_GPUS:,}, not {gpus:,}")
    net = ALONE if gpus == 1 and interconnect is None else find_interconnect(interconnect, device)
    rate = find_price(found, price)
    total_tokens = parse_tokens(tokens)
    notes: list[str] = []
    sample = _make_sample(estimator, seq_len, images, workload, notes)
    notes += estimator.notes(sample)
    is_chosen = global_batch is None
    if global_batch is None:
        global_batch = choose_batch(gpus, sample.tokens)
        size = format_parameters(global_batch * sample.tokens)
        notes.append(f"no global batch given: {global_batch} sequences, {size} tokens, taken")
    global_batch = check_size(global_batch, "global batch")
    whole = global_batch * sample.tokens
    if total_tokens < whole:
        few, many = format_tokens(total_tokens), format_tokens(whole)
        notes.append(f"{few} given, less than one step: one whole step, {many}, taken")
        total_tokens = whole
    given = dict(zip(DEGREES, (dp, tp, pp, virtual, cp, ep, zero, micro_batch, recompute), strict=True))
    fixed = {name: check_fixed(name, _listed(value)) for name, value in given.items() if value is not None}
    cut = make_cut(estimator, sample)
    clock = Clock(cut, device, net, global_batch, kind)
    if not estimator.parameters()["trainable"]:
        raise WorkloadError("nothing trains under this recipe: there is no training run to plan")
    # Model FLOPs and, for HFU, executed ones: of forward, backward, and of what is computed again.
    counts = estimator.count(sample, "model"), estimator.count(sample, "hardware")
    repeated = _count_repeated(estimator, sample)
    capacity = find_capacity(found)
    searched = _search(cut, clock, gpus, global_batch, fixed, capacity)
    width = SCAN_WIDTH if cut.layer.other_flops else 1.0

    def finish(layout: Layout, step: Step, memory: Occupied) -> Planned:
        step = step._replace(below=width * step.below, above=width * step.above)
        executed = sum(counts[1][:2]) + repeated[layout.recompute]
        speed = global_batch / step.seconds
        hours = total_tokens / (speed * sample.tokens) / 3600
        return Planned(
            layout, step, memory,
            mfu=sum(counts[0]) * speed / (gpus * peak),
            hfu=executed * speed / (gpus * peak),
            tokens_per_s=speed * sample.tokens,
            days=hours / 24,
            gpu_hours=hours * gpus,
            kwh=count_energy(found, hours * gpus),
            usd=None if rate is None else rate.usd_per_gpu_hour * hours * gpus,
        )  # fmt: skip

    if not searched.fitting:
        raise WorkloadError(_describe_misfit(estimator, found, gpus, searched.misfits, capacity, fixed))
    ranked = sorted(searched.fitting, key=lambda entry: entry[1].seconds)
    best = [finish(*entry) for entry in ranked[:top]]
    losers = _explain(best[0], ranked, searched.misfits, capacity, finish)
    is_measured = clock.machine.is_measured
    if is_chosen:

        def find_best(batch: int, narrowed: Mapping[str, Sequence[int | str]]) -> float | None:
            """Seconds of a sequence in the fastest layout that fits, with another global batch."""
            try:
                again = _search(cut, Clock(cut, device, net, batch, kind), gpus, batch, narrowed, capacity).fitting
            except WorkloadError:  # nothing divides
                return None
            return min((step.seconds for _, step, _ in again), default=None)

        notes += _advise_batch(best, global_batch, sample.tokens, fixed, find_best)
    notes += _list_notes(best[0], net, rate, found, kind if not is_measured else "")
    if cut.layer.other_flops:
        notes.append(
            "what the layers' scans or selections of keys take was never measured: they may take far longer, and the "
            "interval is wider for it"
        )
    if sample.decoder is not None:
        notes.append("encoder and decoder: a pipeline's stages are counted with the mean of both kinds of layers")
    return Plan(
        estimator.source.name, estimator.parameters()["total"], found, kind, gpus, net, total_tokens, sample.tokens,
        global_batch, tuple(best), tuple(losers), len(ranked) + len(searched.misfits), len(ranked), searched.skipped,
        rate, is_measured, tuple(notes), tuple((step.seconds, memory.total, layout) for layout, step, memory in ranked),
    )  # fmt: skip


Entry: TypeAlias = tuple[Layout, Step, Occupied]


class _Searched(NamedTuple):
    fitting: list[Entry]
    misfits: list[Entry]
    skipped: dict[str, int]


def _find_peak(device: Device, dtype: str) -> float:
    """FLOP/s of a device in a dtype that a plan knows."""
    if dtype not in KNOWN_DTYPES:
        raise WorkloadError(f"a plan is for training in {', '.join(KNOWN_DTYPES)}, not {dtype}")
    if dtype not in device.peak_tflops:
        known = [name for name in KNOWN_DTYPES if name in device.peak_tflops]
        help_ = f"plan with --dtype {' or '.join(known)}, or add it" if known else "add it"
        raise DeviceError(f"{device.name} has no known {dtype} peak: {help_} to this device in your own devices.toml")
    return device.peak_tflops[dtype] * 1e12


def _count_repeated(estimator: Estimator, sample: Workload) -> dict[str, float]:
    """FLOPs of one sample that each kind of recomputation adds."""
    whole = cores = 0.0
    for block, row, value in estimator.rows(sample, "hardware"):
        if block.layers is not None and block.group == "language":
            whole += row.forward * value * block.copies
            cores += row.forward * value * block.copies if row.op.kind == "attend" else 0.0
    return {"none": 0.0, "selective": cores, "half": whole / 2, "full": whole}


def _search(
    cut: Cut, clock: Clock, gpus: int, global_batch: int, fixed: Mapping[str, Sequence[int | str]], capacity: float
) -> _Searched:
    """Every layout of the search, timed; an error if none divides."""
    _check_division(cut, gpus, global_batch, fixed)
    fitting: list[Entry] = []
    misfits: list[Entry] = []
    skipped: dict[str, int] = {}
    problems: dict[str, str] = {}
    for number, layout in enumerate(list_layouts(cut, gpus, global_batch, clock.net.per_node, fixed)):
        if number == MOST_LAYOUTS:
            raise WorkloadError(f"more than {MOST_LAYOUTS} layouts: fix some of them, such as --tp or --micro-batch")
        problem = find_problem(layout, cut, gpus, global_batch)
        if problem is not None:
            skipped[problem[0]] = skipped.get(problem[0], 0) + 1
            problems.setdefault(*problem)
            continue
        memory = count_memory(cut, layout, global_batch, dtype=clock.dtype)
        entry = (layout, clock.time(layout), memory)
        (fitting if memory.total <= capacity else misfits).append(entry)
    if not fitting and not misfits:
        most = max(skipped, key=lambda rule: skipped[rule]) if skipped else ""
        why = problems[most] if most else f"what is fixed leaves no way to use all {gpus} devices"
        raise WorkloadError(f"no layout divides: {why}; change it, --gpus or --global-batch")
    return _Searched(fitting, misfits, skipped)


def _check_division(cut: Cut, gpus: int, global_batch: int, fixed: Mapping[str, Sequence[int | str]]) -> None:
    """What the user fixed must divide by itself, or the error names it."""
    for name in ("tp", "pp", "cp", "dp"):
        for value in map(int, fixed.get(name, ())):
            if gpus % value:
                raise WorkloadError(f"{name} {value} does not divide {gpus} devices")
    for name in ("tp", "pp", "cp", "ep"):
        for value in map(int, fixed.get(name, ())):
            degrees: dict[str, Any] = {name: value, "dp": value if name == "ep" else 1}
            layout = Layout(**degrees)
            problem = find_problem(layout, cut, layout.devices, layout.micro_batch * layout.dp)
            if problem is not None:
                raise WorkloadError(problem[1])
    for value in map(int, (*fixed.get("dp", ()), *fixed.get("micro_batch", ()))):
        if global_batch % value:
            raise WorkloadError(f"{value} does not divide a global batch of {global_batch} sequences (dp, micro-batch)")


def _explain(
    best: Planned,
    ranked: Sequence[Entry],
    misfits: Sequence[Entry],
    capacity: float,
    finish: Callable[[Layout, Step, Occupied], Planned],
) -> list[Loser]:
    """Why the others lose, reason by reason: the part that grew most against the best, or memory."""
    grouped: dict[str, list[Entry]] = {}
    for entry in ranked[1:]:
        grown = {
            reason: sum(entry[1].parts[PARTS.index(name)] - best.step.parts[PARTS.index(name)] for name in names)
            for reason, names in _REASONS.items()
        }
        grouped.setdefault(max(grown, key=lambda reason: grown[reason]), []).append(entry)
    if misfits:
        # The nearest is the smallest of those that would be faster, else the fastest.
        faster = [entry for entry in misfits if entry[1].seconds < best.step.seconds]
        first = min(faster, key=lambda entry: entry[2].total) if faster else min(misfits, key=lambda e: e[1].seconds)
        grouped["memory"] = [first, *(entry for entry in misfits if entry is not first)]
    losers = []
    for reason, entries in grouped.items():
        nearest = finish(*entries[0])
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
                text += f": {most.replace('_', ' ')} {format_seconds(new)} of a step against {before}"
        losers.append(Loser(reason, len(entries), nearest, text))
    return sorted(losers, key=lambda loser: -loser.layouts)


def _describe_misfit(
    estimator: Estimator,
    device: Device,
    gpus: int,
    misfits: Sequence[Entry],
    capacity: float,
    fixed: Mapping[str, Sequence[int | str]],
) -> str:
    layout, _, memory = min(misfits, key=lambda entry: entry[2].total)
    states = memory.weights + memory.gradients + memory.optimizer
    helps = []
    freed = [name for name in ("zero", "recompute", "micro_batch", "tp", "pp", "cp", "ep") if name in fixed]
    if freed:
        helps.append("leave " + ", ".join(f"--{name.replace('_', '-')}" for name in freed) + " free")
    if states > capacity / 2:
        helps.append("more devices, to spread weights and optimizer states further")
    else:
        helps.append("shorter sequences or more devices, to spread activations further (--cp)")
    parameters = estimator.parameters()
    is_whole = parameters["trainable"] > parameters["total"] / 2
    helps.append("a device with more memory" + (", or LoRA" if is_whole else ""))
    return (
        f"{estimator.source.name} fits on {gpus} x {device.name} in none of {len(misfits)} layouts: the smallest, "
        f"{layout}, needs {format_bytes(int(memory.total))} a device, {describe_missing(memory, capacity)}. "
        f"What would help: {'; '.join(helps)}"
    )


def _list_notes(best: Planned, net: Interconnect, rate: Rate | None, device: Device, unmeasured: str) -> list[str]:
    own = f"times of one device as measured on {device.name}"
    if unmeasured:
        own = f"{device.name} was not measured in {unmeasured}: times of one device are scaled by published peaks"
    many = best.layout.devices
    if many > 1:
        own += (
            f"; collectives from table {net.id}; what many devices add, and the width of the interval, from published "
            "runs, for none was measured here (docs/planning.md)"
        )
    notes = [
        own,
        "assumed: fused kernels, attention in one kernel, no waiting for the host, gradients reduced while backward "
        "runs, experts loaded evenly",
        "memory a device: bf16 weights, fp32 gradients and Adam (18 bytes a trained parameter before ZeRO)",
    ]
    if many > net.per_node and many % net.per_node:
        notes.append(f"{many} devices are no whole number of nodes of {net.per_node}: groups may lie across two nodes")
    if rate is None:
        notes.append("no price is known for this device: --price USD_PER_GPU_HOUR gives one")
    elif rate.source != "given":
        notes.append(f"price {rate.usd_per_gpu_hour:g} USD per GPU-hour of {rate.source}")
    if best.kwh is not None:
        notes.append(f"energy at the board's full {device.tdp_w:g} W: hosts, network and cooling come on top")
    return notes


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
        f"the batch of {format_tokens(batch * tokens)} was taken because none was given, and it limits this plan: "
        f"--global-batch {chosen} ({format_tokens(chosen * tokens)}) would reach an MFU of {100 * mfu:.0f} % instead "
        f"of {100 * best[0].mfu:.0f} %"
    ]


def _make_sample(
    estimator: Estimator,
    seq_len: int | None,
    images: Iterable[tuple[int, int]] | None,
    workload: Workload | None,
    notes: list[str],
) -> Workload:
    """One sample as the estimator checks it."""
    if workload is not None:
        if seq_len is not None or images is not None or workload.rows != 1 or workload.phase != "train":
            raise WorkloadError(
                "workload is one training sample: rows 1, phase train, and neither seq_len nor images beside it"
            )
        return estimator.estimate(workload).terms[0][1]
    if seq_len is None:
        seq_len = DEFAULT_SEQ
        notes.append(f"no length given: sequences of {seq_len} tokens taken")
        try:
            return estimator(1, seq_len, images=images).terms[0][1]
        except WorkloadError as error:
            raise WorkloadError(f"{error}{NO_LENGTH}") from None
    return estimator(1, seq_len, images=images).terms[0][1]


def choose_batch(gpus: int, tokens: int) -> int:
    """About 4M tokens, in a number of sequences that divides well: a multiple of the devices or of a part of them."""
    wanted = max(1, DEFAULT_BATCH_TOKENS // tokens)
    unit = next(gpus // parts for parts in range(1, gpus + 1) if gpus % parts == 0 and gpus // parts <= wanted)
    share = wanted // unit
    even = 1 << min(5, max(0, share.bit_length() - 3))  # so that micro-batches of powers of two divide it
    return max(1, round(wanted / (unit * even))) * unit * even


def _listed(value: Any) -> Sequence[int | str]:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def plot(found: Plan, path: str | os.PathLike[str]) -> None:
    """Draw days over memory for every layout that fits, and the front that no other beats (needs matplotlib)."""
    path = os.fspath(path)
    if not os.path.splitext(path)[1]:
        raise FlopcalcError(f"plot {format_value(path)}: give a file name that ends in .png, .svg or .pdf")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise FlopcalcError(f"a plot needs matplotlib: {describe_install('plot')}") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    gib = 1 << 30
    days = found.tokens / (found.global_batch * found.seq) / 86400
    axes.scatter([size / gib for _, size, _ in found.points], [s * days for s, _, _ in found.points], s=6, alpha=0.3,
                 label=f"{found.fitting} layouts that fit")  # fmt: skip
    front = found.find_front()
    axes.plot(
        [size / gib for _, size, _ in front], [s * days for s, _, _ in front], "o-", ms=4, color="C3", label="front"
    )
    axes.set_xlabel("memory a device (GiB)")
    axes.set_ylabel(f"days for {format_tokens(found.tokens)}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_title(f"{found.model} on {found.gpus} x {found.device.name}")
    if found.price is not None:
        rate = found.price.usd_per_gpu_hour * found.gpus * 24
        is_large = rate * days * max(found.points)[0] >= 1e6
        rate /= 1e6 if is_large else 1

        def to_money(days: Any) -> Any:
            return days * rate

        def to_days(money: Any) -> Any:
            return money / rate

        money = axes.secondary_yaxis("right", functions=(to_money, to_days))
        money.set_ylabel("million USD" if is_large else "USD")
        money.yaxis.set_major_formatter("{x:g}")
        money.yaxis.set_minor_formatter("{x:g}")
    axes.legend()
    try:
        figure.savefig(path)
    except ValueError as error:  # a kind of file that matplotlib does not know
        raise FlopcalcError(f"{path}: {error}") from None
    except OSError as error:
        raise FlopcalcError(f"{path}: cannot be written: {error.strerror or error}") from None
