"""What a plan holds: the layouts that fit with their time and money, and the best of those that lose."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from flopcalc.base.errors import FlopcalcError
from flopcalc.base.figures import check_ending, open_figure
from flopcalc.base.files import read_path
from flopcalc.base.presentation import find_presenter
from flopcalc.base.rows import FrozenRows, Rows, shorten
from flopcalc.base.units import format_amount, format_bytes, format_duration, format_seconds, format_tokens
from flopcalc.base.vocabulary import Execution, LayoutRecompute, Optimizer
from flopcalc.hardware.devices import Device
from flopcalc.hardware.prices import Rate
from flopcalc.planning.layout import Layout
from flopcalc.planning.network import Interconnect
from flopcalc.planning.seconds import PARTS, LayoutSeconds
from flopcalc.prediction.memory.peak import Memory, find_capacity
from flopcalc.prediction.watts import Energy

# NCCL's buffers on every device of several. The allocator of the tensors does not see them.
BUFFER_BYTES = 2 << 30


def _list_bytes(memory: Memory) -> dict[str, int]:
    """What is there at the peak, whose sum is the total; `other` is workspace, buffers and inputs."""
    there = memory.at_peak
    named = ("weights", "gradients", "optimizer", "activations", "logits")
    other = sum(size for name, size in there.items() if name not in named)
    return {name: there[name] for name in named} | {"other": other, "total": memory.peak}


def find_usable(device: Device, gpus: int) -> int:
    """Bytes of a device that tensors can fill, without the buffers of a run on several."""
    return find_capacity(device) - (BUFFER_BYTES if gpus > 1 else 0)


class Point(NamedTuple):
    """A layout that fits."""

    step_time_s: float
    memory_bytes: int  # of one device
    layout: Layout


class PlannedRow(NamedTuple):
    """A layout with its time, memory and cost, as one flat row; energy and money are None where not known."""

    layout: str
    dp: int
    tp: int
    pp: int
    virtual: int
    cp: int
    ep: int
    zero: int
    micro_batch: int
    recompute: LayoutRecompute
    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    mfu: float
    hfu: float
    tokens_per_s: float
    memory_bytes: int
    days: float
    gpu_hours: float
    energy_kwh: float | None
    usd: float | None
    power_w: float | None  # of one device


class PlannedLayout(NamedTuple):
    """A layout with its time, memory and cost; days, hours and money are of the whole run at the middle time."""

    layout: Layout
    step: LayoutSeconds
    memory: Memory
    mfu: float
    hfu: float
    tokens_per_s: float
    days: float
    gpu_hours: float
    energy: Energy | None
    usd: float | None

    @property
    def kwh(self) -> float | None:
        """Of all devices, at the middle time."""
        return None if self.energy is None else self.energy.wh.mid / 1000

    def to_dict(self) -> dict[str, Any]:
        factor = {"low": self.step.low / self.step.seconds, "mid": 1.0, "high": self.step.high / self.step.seconds}
        return {
            "name": str(self.layout),
            "layout": self.layout._asdict(),
            "step_time_s": {"low": self.step.low, "mid": self.step.seconds, "high": self.step.high},
            "mfu": self.mfu,
            "hfu": self.hfu,
            "tokens_per_s": self.tokens_per_s,
            "days": {name: self.days * times for name, times in factor.items()},
            "gpu_hours": {name: self.gpu_hours * times for name, times in factor.items()},
            "energy_kwh": self.kwh,
            "energy": None if self.energy is None else self.energy.to_dict(),
            "usd": None if self.usd is None else {name: self.usd * times for name, times in factor.items()},
            "breakdown": {name: part for name, part in zip(PARTS, self.step.parts, strict=True) if part},
            "memory_bytes": _list_bytes(self.memory),
        }

    def to_row(self) -> PlannedRow:
        layout, step = self.layout, self.step
        return PlannedRow(
            str(layout), layout.dp, layout.tp, layout.pp, layout.virtual, layout.cp, layout.ep, layout.zero,
            layout.micro_batch, layout.recompute, step.seconds, step.low, step.high, self.mfu, self.hfu,
            self.tokens_per_s, self.memory.peak, self.days, self.gpu_hours, self.kwh, self.usd,
            None if self.energy is None else self.energy.power.watts.mid,
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"PlannedLayout({self.layout}: step {format_seconds(self.step.seconds)}, MFU {100 * self.mfu:.1f} %, "
            f"{format_bytes(self.memory.peak)}, {format_duration(self.days)}, "
            f"{format_amount(self.gpu_hours)} GPU-hours)"
        )


class Loser(NamedTuple):
    """Why layouts lose to the best one: how many for this reason, and the nearest of them."""

    reason: str  # memory, bubble, communication, recompute, compute
    layouts: int
    nearest: PlannedLayout
    text: str

    def __repr__(self) -> str:
        return f"Loser({self.reason}: {self.layouts:,} layouts, nearest {self.nearest.layout}: {shorten(self.text)})"


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
    best: tuple[PlannedLayout, ...]
    losers: tuple[Loser, ...]
    layouts: int  # that divide
    fitting: int
    skipped: dict[str, int]  # rule -> layouts that break it
    price: Rate | None
    evidence: str  # measured, kernels measured, or what the times of one device are scaled by
    notes: tuple[str, ...]
    points: FrozenRows[Point]  # every layout that fits
    execution: Execution = "fused"
    optimizer: Optimizer = "adamw-master"
    helps: str = ""  # what would shorten the best layout's step most, and by how much
    routing: str | None = None  # of a model with experts
    # Days and budget, if given: the limit, whether the best layout keeps it, and the tokens that it allows.
    within: Mapping[str, Mapping[str, Any]] = {}

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "parameters": self.parameters,
            "device": self.device.id,
            "dtype": self.dtype,
            "execution": self.execution,
            "optimizer": self.optimizer,
            "routing": self.routing,
            "gpus": self.gpus,
            "memory_capacity_bytes": find_usable(self.device, self.gpus),
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
                {"step_time_s": seconds, "memory_bytes": size, "layout": str(layout)}
                for seconds, size, layout in self.find_front()
            ],
            "helps_most": self.helps or None,
            "layouts": {"divide": self.layouts, "fit": self.fitting, "skipped": self.skipped},
            "price": None if self.price is None else self.price._asdict(),
            "within": self.within,
            "evidence": {
                "device": self.evidence,
                "interconnect": f"{self.interconnect.id}: {self.interconnect.source}",
                "many devices": "published runs (benchmarks/published_runs.py); none measured here",
            },
            "notes": list(self.notes),
        }

    def find_front(self) -> Rows[Point]:
        """The layouts that no other beats in both step time and memory, fastest first."""
        front: Rows[Point] = Rows()
        for point in sorted(self.points):
            if not front or point.memory_bytes < front[-1].memory_bytes:
                front.append(point)
        return front

    def rows(self) -> Rows[PlannedRow]:
        """The best layouts, one flat row each."""
        return Rows(planned.to_row() for planned in self.best)

    def to_pandas(self) -> Any:
        """The best layouts as a pandas DataFrame; `points.to_pandas()` has every layout that fits."""
        return self.rows().to_pandas()

    def __repr__(self) -> str:
        return f"Plan({self.describe()})"

    def describe(self) -> str:
        """The answer in one line."""
        best = self.best[0]
        return (
            f"{shorten(self.model)} on {self.gpus:,} × {self.device.id} in {self.dtype}: {self.fitting:,} of "
            f"{self.layouts:,} layouts fit, best {best.layout}: step {format_seconds(best.step.seconds)}, "
            f"MFU {100 * best.mfu:.1f} %, {format_duration(best.days)}"
            + "".join(f"; within {name}: {found['verdict']}" for name, found in self.within.items())
        )

    def _repr_html_(self) -> str:
        return find_presenter().show_plan(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw days, and money, over memory for every layout that fits: .png, .svg or .pdf (needs matplotlib)."""
        path = read_path(path, "plot", FlopcalcError)
        check_ending(path)
        with open_figure(path) as figure:
            axes = figure.subplots()
            gib = 1 << 30
            days = self.tokens / (self.global_batch * self.seq) / 86400
            sizes, times = [size / gib for _, size, _ in self.points], [s * days for s, _, _ in self.points]
            axes.scatter(sizes, times, s=6, alpha=0.3, label=f"{self.fitting} layouts that fit")
            front = self.find_front()
            axes.plot(
                [size / gib for _, size, _ in front],
                [s * days for s, _, _ in front],
                "o-",
                ms=4,
                color="C3",
                label="fastest for their memory",
            )
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
            for at in sorted({0, len(front) // 2, len(front) - 1}):
                seconds, size, layout = front[at]
                axes.annotate(
                    str(layout), (size / gib, seconds * days), (0, 6), textcoords="offset points", fontsize=8, bbox=box,
                    ha="right" if size / gib > 0.6 * max(sizes) else "left",
                )  # fmt: skip
            axes.set_xlabel("memory per GPU (GiB)")
            axes.set_ylabel(f"days for {format_tokens(self.tokens)}")
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
            axes.set_title(f"{self.model} on {self.gpus:,} × {self.device.name}")
            if self.price is not None:
                rate = self.price.usd_per_gpu_hour * self.gpus * 24
                is_large = rate * days * max(self.points)[0] >= 1e6
                rate /= 1e6 if is_large else 1
                scales = (lambda days: days * rate, lambda dollars: dollars / rate)
                money = axes.secondary_yaxis("right", functions=scales)
                money.set_ylabel("million USD" if is_large else "USD")
                money.yaxis.set_major_formatter("{x:g}")
                money.yaxis.set_minor_formatter("{x:g}")
            axes.legend()
