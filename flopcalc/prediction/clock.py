"""The clock: a step's work on a machine under an execution in; its seconds, their error and what bounds them out."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flopcalc.base.data import find_data_dir, find_user_dir
from flopcalc.base.spelling import spell
from flopcalc.base.vocabulary import Execution, Phase
from flopcalc.core.workload.workload import Workload
from flopcalc.hardware.devices import find_device
from flopcalc.prediction.build_work import UNTIMED, count_calls
from flopcalc.prediction.fused_kernels import FusedExperts, find_fused_experts
from flopcalc.prediction.host_time import (
    ONCE,
    HostTime,
    count_kept,
    find_order,
    find_unit,
    name_factor,
    name_mode,
    name_phase,
)
from flopcalc.prediction.kernels.machine import MEASURED_ON, KernelTime, Machine, slow_down
from flopcalc.prediction.kernels.memory_bound import FLOAT, STREAMED
from flopcalc.prediction.timeline import Place, Segment, Span, Stack, order, run
from flopcalc.prediction.watts import Shares
from flopcalc.prediction.work import Attention, MemoryCall, ProductCall, Work

_SLOWER = 0.2  # a choice: how much longer another host takes by which a step's share of its host is found
_BEFORE_READS, _AFTER_IMAGES = 0.6, 0.4  # before the layers; what is read back there stands at 0.5
# Mask -> most keys that were timed.
LONGEST = {
    "causal": 8192,
    "dropout": 2048,
    "dropped": 1024,
    "window": 8192,
    "apart": 8208,
    "full": 4096,
    "decode": 4000,
}
_BEYOND = 2  # times the longest that was measured: a note says so
_FAR = 0.5  # of the device's time, in sizes with no measured call near them: a note says so
_HALF = 0.5  # of what a host's gain in time gains a step: beyond it, the host bounds the step
_NEAR = 0.8  # a choice: a host that takes this much of the device's time may hold it up
# Devices whose published training runs plan was held against (docs/plan-accuracy.md).
CHECKED = (
    "a100-sxm-40gb",
    "a100-sxm-80gb",
    "h100-sxm",
    "h200-sxm",
    "h800-sxm",
    "b200-sxm",
    "b300-sxm",
    "gb200",
    "gb300",
    "tpu-v4",
)
_FUSED = ("pointwise", "copy", "cast", "reduce", "norm", "cat", "fill")  # kinds that a compiler joins to others
# What a step's times rest on where it is not eager code that was measured.
_RESTS = {
    "compiled": "compiled times are based on six measured models",
    "graphs": "graphs is based on decoding with two measured models: compiled kernels without per-operator host time; "
    "no training step was measured this way",
    "fused": "fused was not measured on one GPU: products and attention use measured times, other fused kernels a "
    "formula for their bytes; docs/plan-accuracy.md compares it with published runs",
}


class StepTime(NamedTuple):
    """Seconds of a step: the likeliest, and the bounds that nine of ten measurements should lie in."""

    low: float
    mid: float
    high: float


class Piece(NamedTuple):
    """Seconds of one module's work of one kind."""

    module: str
    group: str
    kind: str  # products, attention, memory, optimizer
    seconds: float
    error: float  # seconds
    place: Place = Place(0)
    launches: float = 0.0
    is_joined: bool = False  # a compiler joins it to others
    is_streamed: bool = False  # memory alone bounds it, whatever the clock
    is_again: bool = False  # recomputed
    flops: float = 0.0
    bytes: float = 0.0  # read and written

    def slow_down(self, slower: float) -> float:
        """Seconds at a clock that slows the others down by a factor."""
        return self.seconds if self.is_streamed else self.seconds * slower


class Waiting(NamedTuple):
    """How a device waits for its host at products of experts."""

    joined: FusedExperts
    device_s: float  # that the device computes per product of experts
    calls: float  # such products

    def hide(self, seconds: float) -> float:
        """How much less the device waits if it has this many seconds more to do per product of experts."""
        return self.joined.find_wait(self.device_s) - self.joined.find_wait(self.device_s + seconds)


class Totals(NamedTuple):
    """Sums over pieces: seconds of each kind at the full clock, and what the lower clock and the gaps depend on."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    optimizer: float = 0.0
    again: float = 0.0  # of all kinds
    streamed: float = 0.0  # of all these, what no clock slows down
    flops: float = 0.0
    launches: float = 0.0
    bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.memory + self.optimizer + self.again


def add_up(pieces: Iterable[Piece]) -> Totals:
    """The sums over pieces."""
    sums = dict.fromkeys(Totals._fields, 0.0)
    for piece in pieces:
        sums["again" if piece.is_again else piece.kind] += piece.seconds
        sums["streamed"] += piece.seconds if piece.is_streamed else 0.0
        sums["flops"] += piece.flops
        sums["launches"] += piece.launches
        sums["bytes"] += piece.bytes
    return Totals(**sums)


def combine(shares: Iterable[tuple[Totals, float]]) -> Totals:
    """Shares of several sums together."""
    found = [tuple(value * share for value in totals) for totals, share in shares]
    return Totals(*map(sum, zip(*found, strict=True)))


_NOTHING = Segment()
_SHOWN = 3  # micro-batches that are gone through one by one
_WAYS = ("forward", "backward", "optimizer")


class Event(NamedTuple):
    """Something that host or device do, from one second of a step to another."""

    track: str  # host, device, waits
    name: str
    start_s: float
    end_s: float


def _name_event(names: Mapping[Place, str], at: tuple[Place, int], stacks: tuple[Stack, ...]) -> str:
    """The pass and the modules; in a stack with the layer's number, from the last one in the backward pass."""
    place, number = at
    name = names.get(place, "host code")
    if number >= 0:
        layers = stacks[int(abs(place.stage))].layers
        name = name.replace("*", str(number if place.way == 0 else layers - 1 - number))
    return name if name == _WAYS[place.way] else f"{_WAYS[place.way]} {name}"


class Clock:
    """Adds up the times of a step's work."""

    def __init__(self, machine: Machine, execution: Execution = "eager", is_captured: bool = False) -> None:
        """`is_captured`: a graph of HF's own kernels, which no compiler has joined."""
        self.machine, self.execution = machine, execution
        self.is_joined = execution in ("compiled", "graphs") and not is_captured  # a compiler joins kernels
        self.constants, self.fitted = machine.constants, machine.fitted
        self.pieces: list[Piece] = []
        self.hosted: list[HostTime] = []
        self.times = 1
        self.stacks: tuple[Stack, ...] = ()
        self.phase: Phase = "train"
        self.is_recorded = True
        self.has_experts = False
        self.has_quantized = False  # products that read a quantized weight
        self.waiting: Waiting | None = None  # at products of experts, because of the host
        self.is_typed = True  # what the family's code costs the host was measured
        self.is_tried = True  # and whole steps of such models
        self.long_keys = (0, 0)  # of attention far longer than any measured; the longest that was
        self.found_notes: dict[str, None] = {}

    def add(self, work: Work, times: int, load: Workload) -> None:
        """A micro-batch's work, repeated."""
        is_first = not self.stacks
        self.phase, self.times, self.stacks = load.phase, max(self.times, times), work.stacks
        self._add_device(work, times)
        self._add_host(work, times, count_calls(load), is_first)
        self.is_recorded = self.is_recorded and work.is_recorded
        self.found_notes |= dict.fromkeys(work.notes)

    def _add_device(self, work: Work, times: int) -> None:
        joined = (
            find_fused_experts(work, self.machine)
            if self.execution == "fused"
            else FusedExperts(0.0, self.fitted.host_overlap)
        )
        first, routed = len(self.pieces), list[int]()
        for product in work.products:
            kept = self._find_kept(product)
            is_routed = self.execution == "fused" and product.is_expert
            if is_routed and product.module not in joined.modules:
                timed = self.machine.time_experts(product, kept)
            else:
                is_padded = self.is_joined or self.execution == "fused"  # frameworks pad the vocabulary
                run = product._replace(size=product.size.align()) if is_padded else product
                timed = self.machine.time_product(run)
                timed = timed._replace(
                    seconds=timed.seconds / kept * (self.fitted.experts_slower if is_routed else 1.0)
                )
            if is_routed:
                routed += [len(self.pieces)] if product.calls * timed.seconds else []
            flops = product.flops * times
            if self.machine.is_narrow(product):
                flops = self.fitted.adapter_power * self.machine.peak * timed.seconds * product.calls * times
            self._put(product, "products", timed, product.calls * times, is_again=product.is_again, flops=flops)
            self.has_experts = self.has_experts or product.size.copies > 1
            self.has_quantized = self.has_quantized or product.weight_bytes > 0
            if self.machine.is_cast(product) and not joined.makes(product):
                cast = self.machine.time_cast(product)
                self._put(product, "memory", cast, product.calls * times, is_again=product.is_again, is_streamed=True)
        for call in work.attention:
            timed = self.machine.time_attention(call)
            kept = self.machine.plain.sustained_attention if self.phase == "train" else 1.0
            timed = timed._replace(seconds=timed.seconds / kept)
            self._put(call, "attention", timed, call.calls * times, is_again=call.is_again, flops=call.flops * times)
            longest = LONGEST.get(call.mask, max(LONGEST.values()))
            if call.keys > _BEYOND * longest:
                self.long_keys = max(self.long_keys, (call.keys, longest))
        for moved in work.moved:
            if (moved.is_cheap or moved.is_bias) and moved.module in joined.modules:
                continue
            timed = self.machine.time_moved(moved)
            if moved.direction == "optimizer":
                if (name := moved.kind.removesuffix(FLOAT)) not in self.constants["optimizer"]:
                    self.found_notes[UNTIMED.format(name)] = None
                self._put(moved, "optimizer", timed, moved.calls)
            else:
                self._put(
                    moved,
                    "memory",
                    timed,
                    moved.calls * times,
                    is_again=moved.is_again,
                    is_joined=moved.kind.startswith(_FUSED),
                    is_streamed=moved.kind in STREAMED,
                )
        if routed:
            self._add_waits(joined, first, routed)

    def _add_waits(self, joined: FusedExperts, first: int, routed: list[int]) -> None:
        """Lengthens products of experts, the pieces `routed`, by what the device waits for its host there."""
        calls = sum(self.pieces[at].launches for at in routed)
        device_s = sum(each.seconds for each in self.pieces[first:] if each.kind != "optimizer") / calls
        self.waiting = Waiting(joined, device_s, calls)
        wait_s = joined.find_wait(device_s)
        for at in routed:
            piece = self.pieces[at]
            longer = 1 + wait_s * piece.launches / piece.seconds
            self.pieces[at] = piece._replace(seconds=piece.seconds * longer, error=piece.error * longer)

    def _find_kept(self, product: ProductCall) -> float:
        """Share of its rate that a product keeps up in a training step, where bursts of it were measured."""
        if self.phase != "train":
            return 1.0
        return self.machine.sustained if self.machine.is_cast(product) else self.machine.plain.sustained

    def _put(
        self, each: ProductCall | Attention | MemoryCall, kind: str, timed: KernelTime, calls: float, *,
        is_again: bool = False, is_joined: bool = False, is_streamed: bool = False, flops: float = 0.0,
    ) -> None:  # fmt: skip
        if calls:
            moved = each.reads + each.writes if isinstance(each, MemoryCall) else each.count_bytes(self.machine.width)
            if kind == "memory" and isinstance(each, ProductCall):  # a cast: memory bounds it
                moved = timed.seconds * self.machine.bandwidth
            place = find_order(each.module, each.group, "again" if is_again else each.direction, self.stacks)
            kept = self.fitted.graph_moved if self.execution == "graphs" else self.constants["compiled"]["moved"]
            launches = calls * (kept if self.is_joined and is_joined else 1.0)
            seconds = timed.seconds * launches
            error = seconds * timed.error
            self.pieces.append(
                Piece(
                    each.module, each.group, kind, seconds, error, place, launches, is_joined, is_streamed, is_again,
                    flops, moved * launches,
                )
            )  # fmt: skip

    def _add_host(self, work: Work, times: int, calls: int, is_first: bool) -> None:
        host, phase = self.constants["host"], name_phase(self.phase)
        per_call, per_unit = host[phase]
        per_checkpoint, per_kept = host["again"]
        types = host["types"].get(work.model_type, {})
        has_images = any(each.group == "vision" for each in work.hosted)
        seen = name_factor("forward", "vision", self.phase)
        asked = (phase, seen) if has_images else (phase,)
        self.is_typed = self.is_typed and all(name in types for name in asked)
        self.is_tried = self.is_tried and self.is_typed and work.model_type not in host.get("untried", ())
        for each in work.hosted:
            many = each.many * (times if each.way not in ONCE else 1)
            seconds = many * find_unit(each.way, each.kind, host["units"]) * per_unit
            _, factor = types.get(name_factor(each.way, each.group, self.phase), (0.0, 1.0))
            seconds *= factor
            if each.way == "again":
                seconds += many * (count_kept(each.kind) * per_kept + each.is_checkpoint * per_checkpoint)
            place = find_order(each.module, each.group, each.way, work.stacks, is_host=True)
            self.hosted.append(HostTime(place, seconds, many if each.kind == "read" else 0.0))
        # What a call takes beside its operators (masks, caches) comes before the layers; the rest is an optimizer's. It
        # comes before what is read back there, but after what is read where images enter the text.
        last = max((i for i, stack in enumerate(work.stacks) if stack.layers), default=0)
        before = last - (_AFTER_IMAGES if has_images else _BEFORE_READS)
        per_call, _ = types.get(phase, (per_call, 1.0))
        plain = min(per_call, types.get("forward", host["forward"])[0])
        self.hosted.append(HostTime(Place(0, before), calls * times * plain, 0.0))
        if is_first:
            self.hosted.append(HostTime(Place(2), calls * (per_call - plain), 0.0))

    def slower(self, totals: Totals | None = None) -> float:
        """How many times longer the power limit makes what the clock bounds."""
        # What a device that was not measured keeps up is taken from what others were seen to.
        return slow_down(self.constants["power"], self.rate(totals)) if self.machine.is_measured else 1.0

    def rate(self, totals: Totals | None = None) -> float:
        """Share of the peak that products and attention keep up over the whole step, at the full clock.

        The power limit holds on average: a step that rests in its optimizer may work harder before it.
        """
        found = totals or add_up(self.pieces)
        return found.flops / found.seconds / self.machine.peak if found.seconds else 0.0

    def find_shares(self, whole_s: float) -> Shares:
        """How busy the device is over a step of `whole_s` seconds."""
        totals = add_up(self.pieces)
        flops, moved = totals.flops / whole_s / self.machine.peak, totals.bytes / whole_s / self.machine.bandwidth
        return Shares(flops, moved, min(1.0, self.device_s() / whole_s))

    def clocked_s(self) -> float:
        """Seconds, at the full clock, of what a lower one slows down."""
        return sum(piece.seconds for piece in self.pieces if not piece.is_streamed)

    def device_s(self) -> float:
        """Seconds in which the device computes, at the clock that the power limit leaves, with the gaps between."""
        totals = add_up(self.pieces)
        return self.spend(totals, self.slower(totals))

    def spend(self, totals: Totals, slower: float) -> float:
        """Seconds of sums at a clock that slows what it bounds by a factor, with the gaps between."""
        clocked = totals.seconds - totals.streamed
        return float(totals.streamed + clocked * slower + totals.launches * self.gap_s)

    @property
    def gap_s(self) -> float:
        """Seconds between two kernels."""
        return self.fitted.graph_gap_s if self.execution == "graphs" else self.constants["gaps"][name_mode(self.phase)]

    @property
    def launches(self) -> float:
        return sum(piece.launches for piece in self.pieces)

    @property
    def launch_s(self) -> float:
        """Seconds of the host for each launch of compiled code; a graph's kernels are launched together."""
        return self.constants["compiled"]["launch_s"] if self.execution == "compiled" else 0.0

    def host_s(self) -> float:
        """Seconds in which the host dispatches a step, if it never waited."""
        if self.execution == "compiled":
            return self.launches * self.launch_s
        return sum(each.seconds for each in self.hosted) if self.execution == "eager" else 0.0

    def step_s(self, host_factor: float = 1.0, pause_s: float = 0.0) -> float:
        """Seconds of a step on a host that is slower by a factor, and that pauses after each step."""
        device_s = self.device_s()
        if self.execution != "eager" or not self.pieces:
            return max(device_s - pause_s, self.host_s() * host_factor)
        once, last, many = self._list_segments(host_factor)
        shown = min(many, _SHOWN)
        wake_s = self._wake_s(host_factor)
        total = run([*(once * shown), *last], pause_s, wake_s)
        return total + (many - shown) * run(once, 0.0, wake_s) if many > shown else total

    def _list_places(self, host_factor: float) -> dict[Place, Segment]:
        """What host and device do at each place, in one micro-batch and in the optimizer's step."""
        slower, gap_s = self.slower(), self.gap_s
        found: dict[Place, Segment] = {}
        for piece in self.pieces:
            at = found.get(piece.place, _NOTHING)
            share = 1 if piece.place.way == 2 else self.times
            found[piece.place] = at._replace(
                device_s=at.device_s + (piece.slow_down(slower) + piece.launches * gap_s) / share,
                launches=at.launches + piece.launches / share,
            )
        for each in self.hosted:
            at = found.get(each.place, _NOTHING)
            share = 1 if each.place.way == 2 else self.times
            found[each.place] = at._replace(
                host_s=at.host_s + each.seconds * host_factor / share, waits=at.waits + each.waits / share
            )
        return found

    def _list_segments(self, host_factor: float) -> tuple[list[Segment], list[Segment], int]:
        """A micro-batch's segments, the optimizer's, and how many micro-batches: all but a few of many are alike."""
        found = self._list_places(host_factor)
        once = order({place: at for place, at in found.items() if place.way < 2}, self.stacks)
        last = [at for place, at in sorted(found.items()) if place.way == 2]
        return [segment for _, _, segment in once], last, self.times

    def _wake_s(self, host_factor: float) -> float:
        return self.fitted.wake_operators * self.constants["host"][name_phase(self.phase)][1] * host_factor

    def list_events(self, host_factor: float = 1.0, pause_s: float = 0.0) -> list[Event]:
        """What host and device do in one step, and where the host waits; of many micro-batches, the first few."""
        if self.execution != "eager" or not self.pieces:
            return self._list_device_events()
        found = self._list_places(host_factor)
        once = order({place: at for place, at in found.items() if place.way < 2}, self.stacks)
        last = [(place, -1, at) for place, at in sorted(found.items()) if place.way == 2]
        steps = [*(once * min(self.times, _SHOWN)), *last]
        spans: list[Span] = []
        run([segment for _, _, segment in steps], pause_s, self._wake_s(host_factor), spans)
        names = self._name_places()
        return [
            Event(span.track, _name_event(names, steps[span.segment][:2], self.stacks), span.start_s, span.end_s)
            for span in spans
        ]

    def _list_device_events(self) -> list[Event]:
        """Of code that the host launches at once: the device's work alone, one place after another."""
        names, slower, at_s, gap_s = self._name_places(), self.slower(), 0.0, self.gap_s
        seconds: dict[Place, float] = {}
        for piece in self.pieces:
            taken = piece.slow_down(slower) + piece.launches * gap_s
            seconds[piece.place] = seconds.get(piece.place, 0.0) + taken
        events = []
        for place, taken in sorted(seconds.items()):
            events.append(Event("device", _name_event(names, (place, -1), ()), at_s, at_s + taken))
            at_s += taken
        return events

    def _name_places(self) -> dict[Place, str]:
        """The modules at each place."""
        names: dict[Place, dict[str, None]] = {}
        for piece in self.pieces:
            names.setdefault(piece.place, {})[piece.module or "loss"] = None
        return {place: " ".join(found) for place, found in names.items()}

    def interval(self, host_factor: float = 1.0, pause_s: float = 0.0) -> StepTime:
        """Seconds of a step, and the bounds that nine of ten measurements should lie in."""
        mid, bound = self.step_s(host_factor, pause_s), self.bound(host_factor, pause_s)
        error = self.error(bound, self.host_share(mid, host_factor, pause_s))
        return StepTime(mid * (1 - error), mid, mid * (1 + error) * (1 + self.late(bound, host_factor)))

    def bound(self, host_factor: float = 1.0, pause_s: float = 0.0) -> str:
        """device or host: which of the two, if it were faster, would shorten the step more."""
        mid, faster = self.step_s(host_factor, pause_s), self.step_s(host_factor / (1 + _SLOWER), pause_s)
        return "host" if mid - faster > _HALF * mid * _SLOWER / (1 + _SLOWER) else "device"

    def host_share(self, mid: float, host_factor: float = 1.0, pause_s: float = 0.0) -> float:
        """How far a step of `mid` seconds follows its host, 0 to 1: how much longer on one that takes 20 % longer."""
        if not mid:
            return 0.0
        other = self.step_s(host_factor * (1 + _SLOWER), pause_s)
        return min(1.0, max(0.0, (other / mid - 1) / _SLOWER))

    def error(self, bound: str, host_share: float = 0.0) -> float:
        """Relative half width: errors of many operators average out in part, those they share do not."""
        floor, widths = self.constants["error"], self.fitted.interval
        most = widths["scaled"] * widths["untyped" if self.is_recorded else "unrecorded"]
        if not self.machine.is_measured:
            known = "published_kernels_train" if self.phase == "train" else "published_kernels"
            return widths[known if self.machine.has_kernels else "scaled"] if self.is_recorded else most
        wide = floor[bound]
        if not self.machine.is_own:
            own = self.constants.get("own_host")
            others = {"device": widths["other_device"], "host": own["spread"] if own else widths["other_host"]}
            mixed = host_share * others["host"] + (1 - host_share) * others["device"]
            wide += max(others[bound], mixed)
        times = 1.0 if self.is_recorded else widths["borrowed"]
        if bound == "device":
            total = sum(piece.seconds for piece in self.pieces)
            wide += math.sqrt(sum(piece.error**2 for piece in self.pieces)) / total if total else 0.0
            wide += 0.0 if self.is_tried or times > 1 or self.execution != "eager" else widths["unmeasured"]
            wide += widths["experts"] if self.has_experts else 0.0
            wide += floor["compiled"] if self.execution != "eager" else 0.0
            wide = max(wide, widths["scaled"]) if self.has_quantized else wide
        elif not (self.is_typed or self.execution != "eager"):
            times = max(times, widths["untyped"])
        return min(wide * times, most)

    def late(self, bound: str, host_factor: float) -> float:
        """How much later than its likeliest time a step may come, beyond the error: a busy host only delays."""
        is_near = bound == "host" or self.host_s() * host_factor > _NEAR * self.device_s()
        return self.constants["error"]["late"] if is_near else 0.0

    def breakdown(self, mid: float) -> dict[str, float]:
        found = dict.fromkeys(("products", "attention", "memory", "optimizer"), 0.0)
        for piece in self.pieces:
            found[piece.kind] += piece.seconds
        found["launches"] = max(0.0, self.device_s() - sum(found.values()))
        found["host"] = max(0.0, mid - self.device_s())
        return found

    def modules(self) -> dict[str, float]:
        """Seconds on the device by module, its layers together, most first."""
        found: dict[str, float] = {}
        for piece in self.pieces:
            found[piece.module or "model"] = found.get(piece.module or "model", 0.0) + piece.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def evidence(self) -> dict[str, Any]:
        machine = self.machine
        provenance = machine.constants["provenance"]
        known = "published kernels" if machine.has_kernels else "data sheet"
        if machine.is_measured:
            known = "this machine measured" if machine.is_own else "this kind of GPU measured"
        return {
            "class": f"{known}, operators {'recorded' if self.is_recorded else 'borrowed'}",
            "device": machine.device.id,
            "is_measured": machine.is_measured,
            "kernels": machine.system["provenance"]["source"] if machine.system and machine.has_kernels else None,
            "is_own_machine": machine.is_measured and machine.is_own,
            "measured_on": provenance["device_id"],
            "torch": provenance.get("torch"),
            "date": provenance.get("date"),
            "commit": provenance.get("commit"),
            "predictor": {
                "origin": "own" if machine.is_own else "shipped",
                "path": _find_path(machine),
                "device": provenance["device_id"],
                "date": provenance.get("date"),
            },
            "host_factor": machine.constants.get("own_host"),
            "operators_recorded": self.is_recorded,
            "quantized_products": "data sheet" if self.has_quantized else None,
            "host_measured": machine.is_measured and self.is_typed,
            "far_share": self.far_share(),
        }

    def far_share(self) -> float:
        """Share of the device's time that is of calls unlike measured ones."""
        total = sum(piece.seconds for piece in self.pieces) or 1.0
        far = (
            0.9 * 2 * self.fitted.kernel_error["product"]
        )  # a product without measured ones nearby has twice the error
        return sum(piece.seconds for piece in self.pieces if piece.error > far * piece.seconds) / total

    def notes(self, bound: str) -> list[str]:
        notes = list(self.found_notes)
        if not self.machine.is_measured:
            notes.insert(0, _tell_unmeasured(self.machine))
        elif self.machine.dtype != "bf16":
            notes.append(f"measured in bf16; {self.machine.dtype} is assumed to behave the same")
        if self.long_keys[0]:
            notes.append(
                "attention over {:,} keys is more than was measured (at most {:,}): the interval may be too "
                "narrow".format(*self.long_keys)
            )
        # Experts have no calls nearby at any size, but a formula fitted to theirs, and a note of their own.
        if bound == "device" and self.machine.is_measured and not self.has_experts and self.far_share() > _FAR:
            notes.append(
                f"{100 * self.far_share():.0f} % of the GPU time is in kernel sizes far from any measured call: "
                "formulas estimate it"
            )
        is_eager = self.execution == "eager"
        if self.machine.is_measured and self.is_recorded and not self.is_typed and is_eager:
            notes.append(
                "host time of this model type was not measured: it is estimated from generic per-operator costs"
            )
        own = self.machine.constants.get("own_host")
        if not is_eager:
            notes.append(_RESTS[self.execution])
        elif own is not None:
            pace = own[name_mode(self.phase)]
            notes.append(
                f"host time is scaled to this machine's CPU: {pace:.2f} × the calibrated host ({own['date'][:10]})"
            )
        else:
            notes.append(f"host time is for the calibrated host's CPU; {spell('host_factor')} sets your CPU's slowdown")
        return notes


def _find_path(machine: Machine) -> str:
    """The file that the constants come from."""
    folder = find_user_dir() if machine.is_own else find_data_dir()
    return os.path.join(folder, "predictors", f"{machine.constants['provenance']['device_id']}.json")


def _tell_unmeasured(machine: Machine) -> str:
    if machine.has_kernels:
        return tell_kernels(machine)
    measured = machine.constants["provenance"]["device_id"]
    if measured == machine.device.id:
        return (
            f"{machine.device.name} in {machine.dtype} was not measured: times are scaled from bf16 by published peaks"
        )
    return (
        f"{machine.device.name} was not measured: times are scaled from {measured} by published peaks; run `flopcalc "
        "calibrate --predictor` on your GPU for measured accuracy"
    )


def tell_kernels(machine: Machine) -> str:
    """What is known of a device whose kernels others measured."""
    is_checked = machine.device.id in CHECKED
    steps = "training steps checked against published runs" if is_checked else "steps not checked"
    same = machine.system.get("same_die_as") if machine.system else None
    where = f" on {find_device(same).name}, which has the same die" if same else ""
    return (
        f"{machine.device.name} in {machine.dtype}: kernels measured{where} (products, attention and collectives of "
        f"serving engines, ai-dynamo/aiconfigurator), {steps}; what moves bytes is scaled from {MEASURED_ON}"
    )
