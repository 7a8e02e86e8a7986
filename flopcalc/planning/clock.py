"""The seconds of one step of a layout: places of work, a device and an interconnect in; time by part out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import sqrt
from typing import NamedTuple

from flopcalc.core.workload.sums import block_pairs
from flopcalc.hardware.devices import find_device
from flopcalc.planning.layouts import Cut, Layout, Linear, Place, split_layers
from flopcalc.planning.network import Interconnect, time_collective, time_message, time_routing
from flopcalc.prediction.machine import Machine, Timed, load_predictor
from flopcalc.prediction.work import Attention, Moved, Product

PARTS = (
    "products", "attention", "memory_bound", "recompute", "tensor_parallel", "context_parallel", "expert_parallel",
    "pipeline_sends", "data_parallel", "bubble", "optimizer", "overhead",
)  # fmt: skip
# How far a step of many devices is from the sum of its parts; see benchmarks/published_runs.py for what they rest on.
OVERHEAD = 0.04  # share of the step: gaps between kernels, uneven devices, data, logging
CONTENTION = 0.15  # share of hidden communication that comes back as slower products
GRADIENT_WIRE_BYTES = 4  # gradients are reduced in fp32, with zero 3 in bf16
SHARD_WIRE_BYTES = 2
EAGER_BYTES = 2.5  # bytes that unfused kernels move for each byte of fused ones
CAST_BYTES = 3  # fp8: an element of an operand is read in bf16 and written in fp8
# Long steps against a device's own times, which are those at its full clock: at its power limit it lowers it. For
# devices of 600 W and more; brings the H200 to what is taken of its sisters, which were not measured.
SUSTAINED = 0.84
NETWORK_ERROR = 0.5  # relative error of communication that is not hidden
# Devices whose published runs were predicted: they are known better than others that were not measured either.
PUBLISHED = ("a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm", "h200-sxm", "h800-sxm", "b200-sxm", "tpu-v4")
PUBLISHED_ERROR = 0.15
# Below and above, of a run on several devices, none of which was measured here: most are slower than thought.
SCALE_ERROR = (0.1, 0.25)
EXPERT_ERROR = (0.25, 0.6)  # of a model of experts: uneven loads, small products


class Execution(NamedTuple):
    """What a framework does beyond the layout; the defaults are those of a current one."""

    is_fused: bool = True  # attention in one kernel
    is_compiled: bool = True  # norms, activations and residuals in fused kernels
    overlaps_gradients: bool = True  # reduced while backward runs
    overlaps_experts: bool = False  # all-to-all hidden behind another micro-batch
    overlaps_tensor: bool = False  # gathers of tensor parallelism hidden behind their products


DEFAULT_EXECUTION = Execution()


class PlaceTime(NamedTuple):
    """Seconds of one micro-batch in one place, without communication; error is in seconds too."""

    products: tuple[float, float]  # forward, backward
    attention: tuple[float, float]
    moved: tuple[float, float]
    error: float

    @property
    def forward(self) -> float:
        return self.products[0] + self.attention[0] + self.moved[0]

    @property
    def backward(self) -> float:
        return self.products[1] + self.attention[1] + self.moved[1]


class Step(NamedTuple):
    """Seconds of one step by part (see PARTS), and the relative errors to expect."""

    parts: tuple[float, ...]
    below: float  # how much faster than thought
    above: float  # how much slower

    @property
    def seconds(self) -> float:
        return sum(self.parts)

    @property
    def low(self) -> float:
        return self.seconds / (1 + self.below)

    @property
    def high(self) -> float:
        return self.seconds * (1 + self.above)


class Clock:
    """Times layouts of one model on one device and interconnect; what layouts share is timed once."""

    def __init__(
        self,
        cut: Cut,
        device: str,
        net: Interconnect,
        global_batch: int,
        dtype: str = "bf16",
        execution: Execution = DEFAULT_EXECUTION,
    ) -> None:
        self.cut = cut
        self.net = net
        self.global_batch = global_batch
        self.execution = execution
        self.dtype = dtype
        self.machine = Machine(device, dtype)
        # Attention, norms and the head stay in bf16 when the linear layers are in fp8.
        self.plain = self.machine if dtype != "fp8" else Machine(device, "bf16")
        found = find_device(device)
        self.sustained = SUSTAINED if load_predictor(found.id) and (found.tdp_w or 0) >= 600 else 1.0
        self.most_error = PUBLISHED_ERROR if found.id in PUBLISHED else 1.0
        self._place = cache(self._time_place)

    def time(self, layout: Layout) -> Step:
        """One step of a layout that divides."""
        cut = self.cut
        key = (layout.tp, layout.cp, layout.ep, layout.is_sequence_parallel, layout.micro_batch)
        layer, first, last = (self._place(name, *key) for name in ("layer", "first", "last"))
        batches = self.global_batch // (layout.dp * layout.micro_batch)
        middle, at_first, at_last = split_layers(cut, layout)
        tensor, ring, experts = self._time_exchanges(layout, layer)
        gather, scatter = self._time_shards(layout)
        again = self._count_again(layout, layer)
        repeated = 2.0 + (1.0 if layout.recompute == "full" else 0.5 if layout.recompute == "half" else 0.0)
        # Of one layer and micro-batch. A pass back has the same exchanges as one forward.
        exchanged = (repeated * tensor, 3 * ring, repeated * experts)
        shards = self._expose_shards(layout, layer, again, gather, scatter)
        whole = layer.forward + layer.backward + again + sum(exchanged) + shards
        ends = [(at_first, (first,)), (at_last, (last,)), (middle, ())] if layout.pp > 1 else [(middle, (first, last))]
        layers, places = max(ends, key=lambda end: end[0] * whole + sum(at.forward + at.backward for at in end[1]))
        send = self._time_send(layout)
        fill = (layout.pp - 1) / layout.virtual
        parts = dict.fromkeys(PARTS, 0.0)
        everything = [(layers, layer), *((1, place) for place in places)]
        for name, field in (("products", "products"), ("attention", "attention"), ("memory_bound", "moved")):
            parts[name] = batches * sum(many * sum(getattr(place, field)) for many, place in everything)
        parts["recompute"] = batches * layers * again
        parts["tensor_parallel"] = batches * (layers * exchanged[0] + tensor * len(places))
        parts["context_parallel"] = batches * layers * exchanged[1]
        parts["expert_parallel"] = batches * layers * exchanged[2]
        parts["pipeline_sends"] = (batches + fill) * send
        parts["bubble"] = fill * middle * whole
        behind = layers * (layer.backward + again)
        parts["data_parallel"] = batches * layers * shards + self._time_gradients(
            layout, layers, batches, behind, layer
        )
        parts["optimizer"] = self._time_optimizer(layout, layers)
        parts["overhead"] = OVERHEAD * sum(parts.values())
        counted = batches * sum(many * place.error for many, place in everything)
        return Step(tuple(parts.values()), *self._find_errors(layout, parts, counted))

    # --- one place ---------------------------------------------------------------------------------------------------
    def _time_place(self, name: str, tp: int, cp: int, ep: int, is_spread: bool, batch: int) -> PlaceTime:
        place: Place = getattr(self.cut, name)
        products, attention, moved = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
        error = 0.0
        for linear in place.linears:
            machine = self.plain if linear.part in ("lm_head", "router") else self.machine
            product = cut_linear(linear, tp, cp, ep, is_spread, batch)
            directions = ["forward"] + ["dgrad"] * linear.has_dgrad + ["wgrad"] * linear.has_wgrad
            for direction in directions:
                timed = machine.time_product(product._replace(direction=direction))
                products[direction != "forward"] += linear.share * timed.seconds / self.sustained
                error += linear.share * timed.seconds / self.sustained * timed.error
                if machine is not self.plain and direction != "wgrad":
                    moved[direction != "forward"] += linear.share * self._time_cast(product, direction)
        if place.other_flops:
            seconds = place.other_flops * batch / cp / tp / (0.3 * self.plain.peak)
            products[0] += seconds / 3
            products[1] += seconds * 2 / 3
            error += seconds * 0.5
        for core in place.cores:
            call = Attention(
                core.module, "language", "forward", core.mask, max(1, round(core.calls * batch)),
                max(1, core.heads // tp), max(1, core.kv_heads // tp), core.qk, core.v, core.length, core.length,
                core.window,
            )  # fmt: skip
            for index, direction in enumerate(("forward", "backward")[: 1 + core.has_backward]):
                timed = self._time_ring(call._replace(direction=direction), cp)
                attention[index] += core.share * timed.seconds
                error += core.share * timed.seconds * timed.error
        for index, direction in enumerate(("forward", "backward")):
            spread = tp if is_spread else 1
            size = (place.wide[index] / spread + place.narrow[index] / tp) * batch / cp
            size *= 1.0 if self.execution.is_compiled else EAGER_BYTES
            if size:
                timed = self.plain.time_moved(Moved("", "language", direction, "pointwise", size * 0.6, size * 0.4))
                moved[index] += timed.seconds
                error += timed.seconds * timed.error
        return PlaceTime((products[0], products[1]), (attention[0], attention[1]), (moved[0], moved[1]), error)

    def _time_cast(self, product: Product, direction: str) -> float:
        """Seconds of bringing a product's operands to fp8: inputs and weights ahead, output gradients behind."""
        own = product.m * product.n
        if direction == "forward":
            own = product.m * product.k + product.n * product.k * product.copies
        moved = Moved(product.module, product.group, direction, "pointwise", 2.0 * own, (CAST_BYTES - 2.0) * own)
        return self.plain.time_moved(moved).seconds

    def _time_ring(self, call: Attention, cp: int) -> Timed:
        """One device's part of an attention call: its queries against its own keys, then those of each other device."""
        if call.mask == "window" and self.execution.is_fused:
            # Kernels of frameworks for many devices skip the blocks that no query of a window sees.
            share = block_pairs(call.length, call.window) / block_pairs(call.length)
            timed = self._time_ring(call._replace(mask="causal", window=0), cp)
            return timed._replace(seconds=share * timed.seconds)
        if cp == 1 or call.length < 2 * cp:
            return self._time_core(call)
        own = call._replace(length=call.length // cp, keys=call.keys // cp)
        # Each device holds an early and a late piece of the sequence, so that under a causal mask all have half to do.
        other = own if call.mask == "full" else own._replace(mask="full", keys=own.keys // 2)
        first, later = self._time_core(own), self._time_core(other)
        return first._replace(seconds=first.seconds + (cp - 1) * later.seconds)

    def _time_core(self, call: Attention) -> Timed:
        if self.execution.is_fused:
            return self.plain.time_attention(call)
        # Unfused: scores and values are products over all pairs, and softmax and dropout move the scores in between.
        rows, times = call.batch * call.heads * call.length, 1 if call.direction == "forward" else 2
        scores = self.plain.time_product(
            Product(call.module, call.group, "attention_scores", "forward", rows, call.keys, call.qk)
        )
        values = self.plain.time_product(
            Product(call.module, call.group, "attention_scores", "forward", rows, call.v, call.keys)
        )
        # Forward: softmax reads and writes, dropout reads, writes and writes its mask; backward as much.
        elements = rows * call.keys
        moved = self.plain.time_moved(
            Moved(call.module, call.group, call.direction, "softmax", 4.0 * elements, 5.0 * elements)
        )
        seconds = times * (scores.seconds + values.seconds) + moved.seconds
        return Timed(seconds, max(scores.error, moved.error), False)

    # --- what is exchanged -------------------------------------------------------------------------------------------
    def _time_exchanges(self, layout: Layout, layer: PlaceTime) -> tuple[float, float, float]:
        """Seconds of one layer's exchanges in one direction: tensor, context (what shows of it) and expert parallel."""
        place, net = self.cut.layer, self.net
        samples = layout.micro_batch / layout.cp
        tensor = ring = experts = 0.0
        if layout.tp > 1:
            size = 2.0 * self.cut.tokens * self.cut.hidden * samples
            if layout.is_sequence_parallel:
                tensor = sum(time_collective(net, kind, size, layout.tp) for kind in ("all_gather", "reduce_scatter"))
            else:
                tensor = time_collective(net, "all_reduce", size, layout.tp)
            tensor *= place.exits
            if self.execution.overlaps_tensor:
                tensor *= 0.3
        if layout.cp > 1:
            size = place.ring * samples / min(layout.tp, max((core.kv_heads for core in place.cores), default=1))
            whole = (layout.cp - 1) * time_message(net, size, layout.tp, layout.cp)
            ring = whole - (1 - CONTENTION) * min(whole, layer.attention[0])
        if layout.ep > 1 and place.routed:
            size = place.routed * samples / layout.tp
            experts = 2 * time_routing(net, size, layout.ep, self.cut.active)
            if self.execution.overlaps_experts:
                hidden = min(experts, layer.forward)
                experts -= (1 - CONTENTION) * hidden
        return tensor, ring, experts

    def _time_shards(self, layout: Layout) -> tuple[float, float]:
        """Seconds to gather one layer's weights, and to reduce its gradients to their owners."""
        if layout.zero < 2:
            return 0.0, 0.0
        place, net, group = self.cut.layer, self.net, layout.dp * layout.cp
        dense, experts = place.dense / layout.tp, place.experts / layout.ep
        gather = 0.0
        if layout.zero == 3:
            gather = time_collective(net, "all_gather", 2 * dense, group, layout.tp)
            gather += time_collective(net, "all_gather", 2 * experts, layout.expert_dp, layout.ep)
        dense, experts = place.dense_trained / layout.tp, place.experts_trained / layout.ep
        size = SHARD_WIRE_BYTES if layout.zero == 3 else GRADIENT_WIRE_BYTES
        scatter = time_collective(net, "reduce_scatter", size * dense, group, layout.tp)
        scatter += time_collective(net, "reduce_scatter", size * experts, layout.expert_dp, layout.ep)
        return gather, scatter

    def _expose_shards(self, layout: Layout, layer: PlaceTime, again: float, gather: float, scatter: float) -> float:
        """What of a layer's gathers and reductions is not hidden, and what hiding costs the products."""
        if layout.zero < 2:
            return 0.0
        ahead, behind = layer.forward, layer.backward + again
        open_ahead, open_behind = max(0.0, gather - ahead), max(0.0, gather + scatter - behind)
        hidden = 2 * gather + scatter - open_ahead - open_behind
        return open_ahead + open_behind + CONTENTION * hidden

    def _time_send(self, layout: Layout) -> float:
        """Seconds of one micro-batch's hand-overs between stages, both directions."""
        if layout.pp == 1:
            return 0.0
        size = 2.0 * self.cut.tokens * self.cut.hidden * layout.micro_batch / layout.cp / layout.tp
        return 2 * layout.virtual * time_message(self.net, size, layout.tp * layout.cp * layout.dp, layout.pp)

    def _count_again(self, layout: Layout, layer: PlaceTime) -> float:
        """Seconds of one layer's recomputation."""
        share = {"none": 0.0, "selective": 0.0, "half": 0.5, "full": 1.0}[layout.recompute]
        return layer.attention[0] if layout.recompute == "selective" else share * layer.forward

    def _count_trained(self, layout: Layout, layers: int) -> tuple[float, float]:
        """Trained parameters of the fullest device, before ZeRO: dense ones and those of experts."""
        ends = (self.cut.first.dense_trained, self.cut.last.dense_trained)
        dense = layers * self.cut.layer.dense_trained + (sum(ends) if layout.pp == 1 else max(ends))
        return dense / layout.tp, layers * self.cut.layer.experts_trained / layout.ep

    def _time_gradients(self, layout: Layout, layers: int, batches: int, behind: float, layer: PlaceTime) -> float:
        """Seconds of reducing gradients and gathering weights, those of ZeRO's layers aside, that nothing hides."""
        group = layout.dp * layout.cp
        if group == 1 and layout.expert_dp == 1:
            return 0.0
        net = self.net
        dense, experts = self._count_trained(layout, layers)

        def exchange(kind: str, size: float) -> float:
            return time_collective(net, kind, size * dense, group, layout.tp) + time_collective(
                net, kind, size * experts, layout.expert_dp, layout.ep
            )

        if layout.zero == 3:
            # The table of embeddings is gathered before there is anything to hide it.
            return batches * time_collective(net, "all_gather", 2 * self.cut.first.dense / layout.tp, group, layout.tp)
        if layout.zero == 2:
            reduce, fetch = 0.0, exchange("all_gather", 2)
        elif layout.zero == 1:
            reduce, fetch = exchange("reduce_scatter", GRADIENT_WIRE_BYTES), exchange("all_gather", 2)
        else:
            reduce, fetch = exchange("all_reduce", GRADIENT_WIRE_BYTES), 0.0
        if not self.execution.overlaps_gradients:
            return reduce + fetch
        # One layer's part of each is left when there is nothing to hide it.
        alone = 1 / max(2, layers)
        shown = max(alone * reduce, reduce - (1 - alone) * behind)
        shown += max(alone * fetch, fetch - (1 - alone) * layers * layer.forward)
        return shown + CONTENTION * (reduce + fetch - shown)

    def _time_optimizer(self, layout: Layout, layers: int) -> float:
        """Adam reads gradient, master weight and moments and writes all but the gradient, and the bf16 weight."""
        dense, experts = self._count_trained(layout, layers)
        if layout.zero:
            dense, experts = dense / (layout.dp * layout.cp), experts / layout.expert_dp
        own = dense + experts
        if not own:
            return 0.0
        # In one flat buffer, as frameworks for many devices keep it: plain moved bytes.
        return self.plain.time_moved(Moved("", "", "forward", "pointwise", 16 * own, 14 * own)).seconds

    def _find_errors(self, layout: Layout, parts: Mapping[str, float], counted: float) -> tuple[float, float]:
        """The relative errors to expect, below and above: the device's, the network's, and of many devices."""
        device = counted / (parts["products"] + parts["attention"] + parts["memory_bound"])
        device = min(device, self.most_error)
        names = ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_sends", "data_parallel")
        exchanged = NETWORK_ERROR * sum(parts[name] for name in names) / sum(parts.values())
        squares = device**2 + exchanged**2
        if layout.devices == 1:
            return sqrt(squares), sqrt(squares)
        widths = SCALE_ERROR if self.cut.experts == 1 else EXPERT_ERROR
        return sqrt(squares + widths[0] ** 2), sqrt(squares + widths[1] ** 2)


def cut_linear(linear: Linear, tp: int, cp: int, ep: int, is_spread: bool, batch: int) -> Product:
    """The product of one device for a micro-batch."""
    rows, n, k, copies = linear.rows * batch / cp, linear.n, linear.k, linear.copies
    if linear.way == "column":
        kv = -(-linear.kv // min(tp, linear.kv_heads)) if linear.kv else 0
        n = -(-(linear.n - linear.kv) // tp) + kv
    elif linear.way == "row":
        k = -(-k // tp)
    elif linear.way == "expert":
        # Experts are not cut: each device of a tp group hands on its own part of the tokens.
        rows, copies = rows / tp, max(1, copies // ep)
    elif is_spread:
        rows = rows / tp
    return Product(linear.module, "language", linear.part, "forward", max(1, round(rows)), n, k, copies=copies)
