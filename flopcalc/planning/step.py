"""The seconds and bytes of one step of a layout: prediction's clock for one device's share, and what is exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property, lru_cache
from math import log, sqrt

from flopcalc.base.errors import FlopcalcError
from flopcalc.base.vocabulary import (
    CAST_BYTES,
    CAST_FORMATS,
    Execution,
    Kernel,
    LayoutRecompute,
    Optimizer,
    Recompute,
)
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.ops import iterate
from flopcalc.core.workload.workload import Workload
from flopcalc.planning.cut import (
    PlaceWeights,
    Section,
    cut_work,
    list_sections,
    locate,
    make_outline,
    make_shards,
    mix_tensors,
    offload_tensors,
    repeat_work,
    sum_weights,
    take_section,
)
from flopcalc.planning.layout import Layout, find_recipe
from flopcalc.planning.network import Interconnect, time_collective, time_message, time_routing
from flopcalc.planning.seconds import PARTS, DeviceTime, Kinds, LayoutSeconds, LayoutTime, Overlaps
from flopcalc.prediction.build_work import make_work
from flopcalc.prediction.clock import CHECKED, Clock, Piece, Totals, add_up, combine
from flopcalc.prediction.execution_options import change, find_kernel, settle
from flopcalc.prediction.fused_kernels import find_fused_experts
from flopcalc.prediction.kernels.defaults import load_defaults
from flopcalc.prediction.kernels.machine import Machine
from flopcalc.prediction.memory.peak import (
    Cut,
    Memory,
    Tensors,
    count_memory,
    count_peak,
    cut_step,
    list_tensors,
    resize_batch,
)
from flopcalc.prediction.memory.tensors import SplitBytes
from flopcalc.prediction.watts import Shares
from flopcalc.prediction.work import Work

_KINDS = ("products", "attention", "memory_bound", "optimizer", "recompute")  # in the order of a clock's sums
_ENDS = ("first", "last", "optimizer")
_ALIKE = 256  # layouts of a search that differ in ZeRO alone are less apart than this
_EXCHANGES = ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_sends", "data_parallel")
# Bytes that ZeRO 3 copies for each weight of a layer and micro-batch: what was gathered out of its buffer in both
# passes (FSDP2: split_with_sizes_copy), a gradient into the buffer that is reduced, and the reduced one into the one
# that adds up.
SHARD_COPIED = 16
SHARD_WIRE_BYTES = 2  # gradients are reduced as they are, with zero 3 in bf16


class LayoutTimer:
    """Times layouts of one model on one device and interconnect; what layouts share is timed once."""

    def __init__(
        self,
        estimator: Estimator,
        sample: Workload,
        device: str,
        net: Interconnect,
        global_batch: int,
        *,
        dtype: str = "bf16",
        execution: Execution = "fused",
        optimizer: Optimizer = "adamw-master",
        attention_kernel: Kernel = "auto",
        overlaps: Overlaps = Overlaps(),  # noqa: B008
        expert_imbalance: float = 1.0,
    ) -> None:
        self.fitted = load_defaults().planning
        self.expert_imbalance = expert_imbalance  # rows of the busiest rank over the mean; 1: as routing says
        self.routing = estimator.routing
        self.net, self.global_batch, self.execution = net, global_batch, execution
        self.optimizer, self.overlaps = optimizer, overlaps
        self.machine = Machine(device, dtype)
        self.dtype = self.machine.dtype
        self.sent = CAST_BYTES.get(self.dtype, self.machine.width)  # bytes of a weight that devices gather
        self.sample = sample
        self.model = make_outline(estimator, sample)
        plain = "bf16" if self.dtype in CAST_FORMATS else self.dtype
        self.kernel = find_kernel(self.machine.device, plain, attention_kernel)
        self.is_asked = attention_kernel != "auto"
        self.notes: list[str] = []
        placed = estimator.change(device=self.machine.device, attention_kernel=self.kernel)
        self.estimator = cache(lambda recompute: self._settle(placed, recompute))
        is_scaled = self.dtype in CAST_FORMATS and not self.machine.has_kernels  # no published run was in such a format
        self.most_error = self.fitted.published_error if self.machine.device.id in CHECKED and not is_scaled else 1.0
        self.work = cache(self._make_work)
        self.tensors = cache(self._make_tensors)
        parts = self.tensors(1, "none", 1.0).parts
        self.weights: Mapping[str, PlaceWeights] = sum_weights(parts)
        self._all_trained = sum(weights.trained.total for weights in self.weights.values())
        self.trained = {kind.number: kind.trained for part in parts for kind in part.kinds}
        kinds = dict(zip(self.model.kinds, _list_named(estimator), strict=True))
        self.named = [kinds[number] for number in range(len(kinds))]  # kind -> path of its layers, names of their ops
        self.many = [self.model.kinds.count(number) for number in range(len(kinds))]
        self._find_kinds = cache(self._find_kinds_of)
        self._cut = cache(self._cut_work)
        self._shares = cache(self._time_shares)
        self._host = cache(self._time_host)
        self._batch = cache(self._sum_batch)
        self._layers = cache(self._time_layers)
        self._held = lru_cache(maxsize=_ALIKE)(self._cut_tensors)
        self._spread = lru_cache(maxsize=_ALIKE)(self._time_spread)
        self._parts = lru_cache(maxsize=_ALIKE)(self._list_parts)
        self._count_trained = cache(self._count_trained_of)

    def _settle(self, estimator: Estimator, recompute: Recompute) -> Estimator:
        changed = estimator
        if estimator.recipe.recompute != recompute:
            found = change(estimator, recompute=recompute)
            if found is None:
                raise FlopcalcError(f"{estimator.source.name} cannot be bound again with recompute {recompute}")
            changed = found
        settled, self.kernel, self.notes = settle(changed, self.kernel, self.execution, is_asked=self.is_asked)
        return settled

    def list_notes(self, layout: Layout) -> list[str]:
        """What the work of a layout rests on."""
        return list(self.work(layout.micro_batch, layout.recompute).notes)

    @cached_property
    def waits_at_experts(self) -> bool:
        """Whether products of experts wait for the host."""
        return self.execution == "fused" and find_fused_experts(self.work(1, "none"), self.machine).host_s > 0

    @cached_property
    def has_shared(self) -> bool:
        """Whether the model has shared experts."""
        return self.model.experts > 1 and any(each.is_shared for each in self.work(1, "none").products)

    def list_recompute(self) -> tuple[str, ...]:
        """Kinds of recomputation worth a try."""
        if self.execution != "fused":
            return "none", "half", "full"
        return ("none", "light", "offload", "half", "full") if self.net.host else ("none", "light", "half", "full")

    def find_unknown(self, layout: Layout) -> tuple[str, str] | None:
        """What a layout needs and is not known: a link to the host, kernels of a training framework."""
        if layout.recompute == "offload" and not self.net.host:
            return "offload", f"recompute offload needs host_gb_per_s, which interconnect {self.net.id} does not have"
        if layout.recompute in ("light", "offload") and self.execution != "fused":
            return "fused", f"recompute {layout.recompute} is planned with execution fused, not {self.execution}"
        return None

    # --- what one device does and holds -------------------------------------------------------------------------------
    def _make_work(self, micro_batch: int, recompute: LayoutRecompute) -> Work:
        load = resize_batch(self.sample, micro_batch)
        work = make_work(
            self.estimator(find_recipe(recompute)),
            load,
            optimizer=self.optimizer,
            dtype_bytes=self.machine.width,
            kernel=self.kernel,
            execution=self.execution,
        )
        return repeat_work(work, recompute)

    def _find_imbalance(self, layout: Layout) -> float:
        """Rows of the busiest device's experts over the mean; no device has more than all."""
        if self.routing is not None and self.expert_imbalance == 1:
            return min(self.routing.find_busiest(self.model.experts, layout.ep), layout.ep)
        return min(self.expert_imbalance, layout.ep)

    def _make_tensors(self, micro_batch: int, recompute: LayoutRecompute, imbalance: float) -> Tensors:
        load = resize_batch(self.sample, micro_batch)
        kernel = "auto" if recompute == "selective" else self.kernel  # which keeps no scores

        def make(word: str, *, is_light: bool = False) -> Tensors:
            return list_tensors(
                self.estimator(word),
                load,
                dtype=self.dtype,
                optimizer=self.optimizer,
                attention=kernel,
                execution=self.execution,
                is_light=is_light,
                expert_imbalance=imbalance,
            )

        if recompute == "half":
            return mix_tensors(make("none"), make("full"))
        if recompute == "light":
            return make("none", is_light=True)
        if recompute == "offload":
            return offload_tensors(self.tensors(micro_batch, "light", imbalance))
        return make(find_recipe(recompute))

    def _find_tensors(self, layout: Layout) -> Tensors:
        """What the busiest device's micro-batch holds, before it is cut."""
        return self.tensors(layout.micro_batch, layout.recompute, self._find_imbalance(layout))

    def count_memory(self, layout: Layout) -> Memory:
        """Bytes of the fullest device."""
        tensors = self._find_tensors(layout)
        batches = self._count_batches(layout)
        found = [
            count_memory(tensors, make_shards(layout, section, self.model, batches), is_adding=batches > 1)
            for section in list_sections(self.model, layout.pp, layout.virtual)
        ]
        return max(found, key=lambda memory: memory.peak)

    def find_peak(self, layout: Layout) -> int:
        """The peak of count_memory, without what it is made of."""
        tensors, is_adding = self._find_tensors(layout), self._count_batches(layout) > 1
        shards = make_shards(layout, Section(1), self.model, 1)
        held = self._held(layout._replace(zero=0))
        return max([count_peak(tensors, cut, shards, is_adding=is_adding) for cut in held])

    def _cut_tensors(self, layout: Layout) -> list[Cut]:
        """What the devices of a pipeline hold before ZeRO."""
        tensors, batches = self._find_tensors(layout), self._count_batches(layout)
        sections = list_sections(self.model, layout.pp, layout.virtual)
        return [cut_step(tensors, make_shards(layout, section, self.model, batches)) for section in sections]

    def _count_batches(self, layout: Layout) -> int:
        return self.global_batch // (layout.dp * layout.micro_batch)

    def _cut_work(self, cut: Layout) -> Work:
        return cut_work(self.work(cut.micro_batch, cut.recompute), cut, self._find_imbalance(cut))

    def _time_shares(self, cut: Layout) -> DeviceTime:
        """One micro-batch of the whole model."""
        work = self._cut(cut)
        clock = self._run_clock(cut, Section(self.model.layers), 1, 1.0)
        places: dict[tuple[str, Kinds], list[Piece]] = {(name, ()): [] for name in _ENDS}
        for piece in clock.pieces:
            place = locate(piece.module, piece.group, work.stacks)
            kinds: Kinds = ()
            if place == "layers":
                place = "again" if piece.is_again else "backward" if piece.place.way else "forward"
                kinds = self._find_kinds(piece.module)
            places.setdefault((place, kinds), []).append(piece)
        sums = {place: add_up(pieces) for place, pieces in places.items()}
        slower = clock.slower(combine((totals, 1.0) for totals in sums.values()))
        spent = {place: clock.spend(totals, slower) for place, totals in sums.items()}
        ways = ("forward", "backward", "again")
        means = [sum(at for (name, _), at in spent.items() if name == way) / self.model.layers for way in ways]
        cores = add_up(piece for piece in clock.pieces if piece.kind == "attention" and not piece.place.way)
        attention = clock.spend(cores, slower) / self.model.layers
        layers: dict[Kinds, float] = {}
        for (name, having), seconds in spent.items():
            if name in ways:
                layers[having] = layers.get(having, 0.0) + seconds
        return DeviceTime(
            clock,
            sums,
            means[0],
            means[1],
            means[2],
            attention,
            spent["first", ()],
            spent["last", ()],
            layers,
            clock.error("device"),
        )

    def _find_kinds_of(self, module: str) -> Kinds:
        """The kinds of layers that have a module; all kinds where no op is called so."""
        found = [
            kind
            for kind, (path, names) in enumerate(self.named)
            if any(f"{path}.*.{name}".startswith(module) or module.startswith(f"{path}.*.{name}.") for name in names)
        ]
        return tuple(found or range(len(self.named)))

    def _count_share(self, kinds: Kinds, section: Section) -> float:
        """The share of all layers of some kinds that a section has."""
        if not section.kinds:
            return section.layers / self.model.layers
        return sum(section.kinds[kind] for kind in kinds) / sum(self.many[kind] for kind in kinds)

    def _run_clock(self, cut: Layout, section: Section, batches: int, stepped: float) -> Clock:
        """A section's micro-batches, and the optimizer's step over a share of what trains."""
        clock = Clock(self.machine, self.execution)
        work = take_section(self._cut(cut), section, self.model.layers, stepped)
        clock.add(work, batches, resize_batch(self.sample, cut.micro_batch))
        return clock

    def _list_parts(self, cut: Layout, section: Section, batches: int, stepped: float) -> dict[str, float]:
        """Seconds of one device by part, without what is exchanged."""
        shares = self._shares(cut)
        once = self._batch(cut, section)
        totals = combine(((once, batches), (shares.sums["optimizer", ()], stepped)))
        parts = dict.fromkeys(PARTS, 0.0)
        for name, seconds in zip(_KINDS, totals, strict=False):
            parts[name] = seconds
        device_s = shares.clock.spend(totals, shares.clock.slower(totals))
        parts["launches"] = max(0.0, device_s - totals.seconds)
        if self.execution == "eager":
            step_s = self._host(cut, section, batches, stepped)
        else:
            step_s = totals.launches * shares.clock.launch_s
        parts["host"] = max(0.0, step_s - device_s)
        return parts

    def _sum_batch(self, cut: Layout, own: Section) -> Totals:
        """One micro-batch of a section's layers and ends."""
        ends = {"first": own.has_first, "last": own.has_last, "optimizer": 0.0}
        return combine(
            (sums, ends[name] if name in ends else self._count_share(kinds, own))
            for (name, kinds), sums in self._shares(cut).sums.items()
        )

    def _time_layers(self, cut: Layout, own: Section) -> float:
        """Seconds of one micro-batch of a section, without what is exchanged."""
        shares = self._shares(cut)
        layers = sum(seconds * self._count_share(kinds, own) for kinds, seconds in shares.layers.items())
        return layers + shares.first * own.has_first + shares.last * own.has_last

    def _time_host(self, cut: Layout, section: Section, batches: int, stepped: float) -> float:
        """Seconds of a device that waits for its host."""
        return self._run_clock(cut, section, batches, stepped).step_s()

    # --- a layout -----------------------------------------------------------------------------------------------------
    def time(self, layout: Layout) -> LayoutSeconds:
        """One step of a layout that divides."""
        if layout.devices == 1:
            return self._time_alone(layout.find_cut(), self._count_batches(layout))
        spread = self._spread(layout._replace(zero=3 if layout.zero == 3 and self.has_shared else 0))
        cut, layer, batches, (tensor, ring, experts), copied = spread[:5]
        shards = self._expose_shards(layout, layer, *self._time_shards(layout))
        every = tensor + ring + shards + copied
        spent = [seconds + section.layers * every + routing * experts for section, seconds, routing in spread.sections]
        slowest = max(range(len(spent)), key=spent.__getitem__)
        section, _, routing = spread.sections[slowest]
        # Without what differs between pipelines that are interleaved in other ways.
        parts = dict(self._parts(cut, section.strip(), batches, self._find_stepped(layout, section.strip())))
        ends = section.has_first + section.has_last
        parts["tensor_parallel"] = batches * (section.layers * tensor + spread.tensor * ends)
        parts["context_parallel"] = batches * section.layers * ring
        parts["expert_parallel"] = batches * routing * experts
        parts["pipeline_sends"] = spread.sends
        # The slowest stage waits while a chunk of every other stage fills and drains the pipeline.
        whole = sum([each.devices * seconds for (each, _, _), seconds in zip(spread.sections, spent, strict=True)])
        parts["bubble"] = (whole - spent[slowest]) / layout.virtual
        parts["data_parallel"] = batches * section.layers * shards + self._time_gradients(
            layout, section, batches, layer
        )
        parts["offload"] = batches * section.layers * copied
        uneven = self.fitted.shard_uneven * log(layout.dp * layout.cp) if layout.zero == 3 else 0.0
        parts["overhead"] = (self.fitted.overhead + uneven) * sum(parts.values())
        return LayoutSeconds(tuple(parts.values()), *self._find_errors(layer, parts))

    def find_shares(self, layout: Layout, step: LayoutSeconds) -> Shares:
        """How busy the mean device of a layout is."""
        cut, whole = layout.find_cut(), list_sections(self.model)[0]
        stepped = self._find_stepped(layout, whole) if layout.devices > 1 else 1.0
        sums = (
            (self._batch(cut, whole.strip()), self._count_batches(layout)),
            (self._shares(cut).sums["optimizer", ()], stepped),
        )
        totals, seconds = combine(sums), layout.pp * step.seconds
        parts = dict(zip(PARTS, step.parts, strict=True))
        running = 1 - (parts["bubble"] + parts["host"]) / step.seconds
        return Shares(
            totals.flops / seconds / self.machine.peak, totals.bytes / seconds / self.machine.bandwidth, running
        )

    def _time_spread(self, layout: Layout) -> LayoutTime:
        """What layouts that differ in ZeRO share."""
        cut, batches = layout.find_cut(), self._count_batches(layout)
        layer = self._shares(cut)
        tensor, ring, experts = self._time_exchanges(layout, layer)
        repeated = 2.0 + {"full": 1.0, "full-reentrant": 1.0, "half": 0.5}.get(layout.recompute, 0.0)
        # Of one layer and micro-batch. A pass back has the same exchanges as one forward.
        exchanged = (repeated * tensor, 3 * ring, self._expose_routing(layout, layer, repeated * experts))
        # Interleaved stages send while they compute.
        shown = self.fitted.sends_shown if layout.virtual > 1 and self.overlaps.sends else 1.0
        sends = (shown * batches + (layout.pp - 1) / layout.virtual) * self._time_send(layout)
        sections = tuple(
            (section, self._layers(cut, section.strip()), self._count_routing(section))
            for section in list_sections(self.model, layout.pp, layout.virtual)
        )
        return LayoutTime(cut, layer, batches, exchanged, self._expose_copies(layout, layer), tensor, sends, sections)

    def _expose_copies(self, layout: Layout, layer: DeviceTime) -> float:
        """Seconds of a layer and micro-batch that copies of activations to the host and back show."""
        if layout.recompute != "offload":
            return 0.0
        tensors = self.tensors(layout.micro_batch, "light", self._find_imbalance(layout))
        parts = [part for part in tensors.parts if part.is_language]
        size = sum(part.kept.total for part in parts) / layout.tp / layout.cp / self.model.layers / 2
        once = size / self.net.host if self.net.host else float("inf")
        shown = max(0.0, once - layer.forward) + max(0.0, once - layer.backward)
        return shown + self.fitted.contention * (2 * once - shown)

    def _count_routing(self, section: Section) -> int:
        """Layers of a section that hand tokens to experts."""
        return sum(section.kinds[kind] for kind in self.model.routed)

    def _time_alone(self, cut: Layout, batches: int) -> LayoutSeconds:
        """One device: the same as predict."""
        section = list_sections(self.model)[0]
        parts = self._list_parts(cut, section, batches, 1.0)
        low, mid, high = self._run_clock(cut, section, batches, 1.0).interval()
        return LayoutSeconds(tuple(parts[name] for name in PARTS), mid / low - 1, high / mid - 1)

    # --- what is exchanged --------------------------------------------------------------------------------------------
    def _time_exchanges(self, layout: Layout, layer: DeviceTime) -> tuple[float, float, float]:
        """Seconds of one layer's exchanges, one way: tensor and context (what shows of both) and expert parallel."""
        model, net = self.model, self.net
        rows = model.tokens * layout.micro_batch / layout.cp
        tensor = ring = experts = 0.0
        if layout.tp > 1:
            size = self.machine.width * rows * model.hidden
            if layout.is_sequence_parallel:
                tensor = sum(time_collective(net, kind, size, layout.tp) for kind in ("all_gather", "reduce_scatter"))
            else:
                tensor = time_collective(net, "all_reduce", size, layout.tp)
            tensor *= model.exits
            if self.overlaps.tensor:
                tensor *= self.fitted.tensor_shown
        if layout.cp > 1:
            size = self.machine.width * rows * model.keys / min(layout.tp, model.key_heads)
            whole = (layout.cp - 1) * time_message(net, size, layout.tp, layout.cp)
            ring = whole - (1 - self.fitted.contention) * min(whole, layer.attention)
            if not self.overlaps.ring:  # queries, keys and values to other heads and what attention puts out back
                width = 2 * model.heads * model.head_dim + model.keys
                size = self.machine.width * rows * width / layout.tp
                ring = time_collective(net, "all_to_all", size, layout.cp, layout.tp)
        if layout.ep > 1 and model.experts > 1:
            size = self.machine.width * self._count_routed(layout.micro_batch) / layout.cp / layout.tp
            size *= self._find_imbalance(layout)
            if self.overlaps.once:
                experts = 2 * time_routing(net, size, layout.ep, model.active, model.groups)
            else:  # every copy of a token travels, and what arrives is put in the experts' order
                experts = 2 * time_collective(net, "all_to_all", size, layout.ep)
                experts += 2 * 2 * size / (self.fitted.sorted * self.machine.bandwidth)
        return tensor, ring, experts

    def _expose_routing(self, layout: Layout, layer: DeviceTime, whole: float) -> float:
        """Seconds that a layer's exchange of tokens, of a micro-batch and all passes, adds to the step.

        Another micro-batch's passes hide it where stages are interleaved or the step is replayed as a CUDA graph, but
        not where layers are recomputed (Megatron-Core's checks of overlap_moe_expert_parallel_comm) or select keys
        (Megatron-Bridge's deepseek_v4.py). With ZeRO 3 shared experts run with it (NeMo Automodel's MoE.forward,
        torchtitan's). What the device waits for its host hides it too.
        """
        if not whole:
            return 0.0
        shown = whole
        is_replayed = not self.waits_at_experts and layer.clock.is_recorded
        is_beside = layout.virtual > 1 or (layout.pp == 1 and is_replayed)
        if self.overlaps.experts and is_beside and not layout.recompute.startswith(("full", "half")):
            shown = max(0.0, whole - layer.forward - layer.backward)
            shown += self.fitted.contention * (whole - shown)
        elif layout.zero == 3 and self.has_shared and self.overlaps.experts:
            shown -= (1 - self.fitted.contention) * min(shown, self._time_shared(layer))
        waiting = layer.clock.waiting
        if waiting is None:
            return shown
        each = waiting.calls / sum(self.many[kind] for kind in self.model.routed)
        return shown - each * waiting.hide(shown / each)

    def _time_shared(self, layer: DeviceTime) -> float:
        """Seconds of one layer's shared experts, of a micro-batch and all passes."""
        layers = sum(self.many[kind] for kind in self.model.routed)
        shared = {each.module for each in self.work(1, "none").products if each.is_shared}
        own = [piece.seconds for piece in layer.clock.pieces if piece.module in shared and piece.kind == "products"]
        return sum(own) / layers

    def _count_routed(self, micro_batch: int) -> float:
        """Numbers that one layer hands to its experts, one way."""
        products = self.work(micro_batch, "none").products
        ahead = [each for each in products if each.is_expert and each.direction == "forward"]
        layers = sum(self.many[kind] for kind in self.model.routed)
        return sum(each.size.m * each.size.n * each.calls for each in ahead if each.is_last) / layers

    def _time_shards(self, layout: Layout) -> tuple[float, float, float]:
        """Seconds to gather one layer's weights and to reduce its gradients to their owners, and the share of both that
        comes back if it is hidden."""
        if layout.zero < 2:
            return 0.0, 0.0, 0.0
        net, layers, own = self.net, self.model.layers, self.weights["layers"]

        def exchange(kind: str, size: float, held: SplitBytes) -> tuple[float, float]:
            dense, experts = size * held.dense / layers / layout.tp, size * held.other / layers / layout.ep
            return (
                time_collective(net, kind, dense, layout.dp * layout.cp, layout.tp),
                time_collective(net, kind, experts, layout.expert_dp, layout.ep),
            )

        size = SHARD_WIRE_BYTES if layout.zero == 3 else self._gradient_bytes
        dense, experts = scatter = exchange("reduce_scatter", size, own.trained)
        gather = (0.0, 0.0)
        if layout.zero == 3:
            gather = exchange("all_gather", self.sent / self.machine.width, own.held)
            dense, experts = dense + 2 * gather[0], experts + 2 * gather[1]
        return sum(gather), sum(scatter), self._find_contention(layout, dense, experts)

    def _find_contention(self, layout: Layout, dense: float, experts: float) -> float:
        """Share of hidden exchanges that comes back, over seconds of those of dense weights and of experts."""
        if layout.zero < 3 or not dense + experts:
            return self.fitted.contention
        alone, usual = self.fitted.contention_alone, self.fitted.contention
        shares = [alone if stride >= self.net.per_node else usual for stride in (layout.tp, layout.ep)]
        return (shares[0] * dense + shares[1] * experts) / (dense + experts)

    @property
    def _gradient_bytes(self) -> int:
        return self.tensors(1, "none", 1.0).gradient_bytes

    def _expose_shards(
        self, layout: Layout, layer: DeviceTime, gather: float, scatter: float, contention: float
    ) -> float:
        """What of a layer's gathers and reductions is not hidden, and what hiding costs the products."""
        if layout.zero < 2:
            return 0.0
        ahead, behind = (layer.forward, layer.backward + layer.again) if self.overlaps.gradients else (0.0, 0.0)
        open_ahead, open_behind = max(0.0, gather - ahead), max(0.0, gather + scatter - behind)
        hidden = 2 * gather + scatter - open_ahead - open_behind
        copied = 0.0
        if layout.zero == 3:
            own = self.weights["layers"].trained
            experts = own.other / layout.ep if layout.expert_dp > 1 else 0.0  # else no other device has them
            numbers = (own.dense / layout.tp + experts) / self.model.layers
            copied = SHARD_COPIED * numbers / (self.fitted.streamed * self.machine.bandwidth)
        return open_ahead + open_behind + contention * hidden + copied

    def _time_send(self, layout: Layout) -> float:
        """Seconds of one micro-batch's hand-overs between stages, both directions."""
        if layout.pp == 1:
            return 0.0
        rows = self.model.tokens * layout.micro_batch / layout.cp / layout.tp
        size = self.machine.width * rows * self.model.hidden
        return 2 * layout.virtual * time_message(self.net, size, layout.tp * layout.cp * layout.dp, layout.pp)

    def _count_trained_of(self, tp: int, ep: int, section: Section) -> tuple[float, float]:
        """Trained parameters of a section, before ZeRO: dense ones and those of experts."""
        ends = [name for name, is_here in (("first", section.has_first), ("last", section.has_last)) if is_here]
        dense, experts = float(sum(self.weights[name].trained.dense for name in ends)), 0.0
        for kind, trained in self.trained.items():
            share = self._count_share((kind,), section)
            dense, experts = dense + share * trained.dense, experts + share * trained.other
        return dense / tp, experts / ep

    def _find_stepped(self, layout: Layout, section: Section) -> float:
        """The share of all trained parameters that the optimizer of one device steps."""
        dense, experts = self._count_trained(layout.tp, layout.ep, section)
        if layout.zero:
            dense, experts = dense / (layout.dp * layout.cp), experts / layout.expert_dp
        return (dense + experts) / self._all_trained if self._all_trained else 0.0

    def _time_gradients(self, layout: Layout, section: Section, batches: int, layer: DeviceTime) -> float:
        """Seconds of reducing gradients and gathering weights, those of ZeRO's layers aside, that nothing hides."""
        group = layout.dp * layout.cp
        if group == 1 and layout.expert_dp == 1:
            return 0.0
        net, layers = self.net, section.layers
        dense, experts = self._count_trained(layout.tp, layout.ep, section.strip())

        def exchange(kind: str, size: float) -> float:
            return time_collective(net, kind, size * dense, group, layout.tp) + time_collective(
                net, kind, size * experts, layout.expert_dp, layout.ep
            )

        if layout.zero == 3:
            # The table of embeddings is gathered before there is anything to hide it.
            table = self.weights["first"].held.dense / layout.tp
            return batches * time_collective(net, "all_gather", table, group, layout.tp)
        wire, width = self._gradient_bytes, self.sent
        if layout.zero == 2:
            reduce, fetch = 0.0, exchange("all_gather", width)
        elif layout.zero == 1:
            reduce, fetch = exchange("reduce_scatter", wire), exchange("all_gather", width)
        else:
            reduce, fetch = exchange("all_reduce", wire), 0.0
        if not self.overlaps.gradients:
            return reduce + fetch
        # One layer's part of each is left when there is nothing to hide it.
        alone = 1 / max(2, layers)
        behind = layers * (layer.backward + layer.again)
        shown = max(alone * reduce, reduce - (1 - alone) * behind)
        shown += max(alone * fetch, fetch - (1 - alone) * layers * layer.forward)
        return shown + self.fitted.contention * (reduce + fetch - shown)

    def _find_errors(self, layer: DeviceTime, parts: Mapping[str, float]) -> tuple[float, float]:
        """The relative errors to expect, below and above: the device's, the network's, and of many devices."""
        device = min(layer.error, self.most_error)
        exchanged = self.fitted.network_error * sum(parts[name] for name in _EXCHANGES) / sum(parts.values())
        widths = self.fitted.scale_error if self.model.experts == 1 else self.fitted.expert_error
        times = 1.0 if layer.clock.is_recorded else self.fitted.scan_width
        below, above = (times * sqrt(device**2 + exchanged**2 + width**2) for width in widths)
        return below, above


def _list_named(estimator: Estimator) -> list[tuple[str, tuple[str, ...]]]:
    """Of every language layer its stage's path, and the names of its ops."""
    stages = [stage for stage in estimator.stages if stage.repeated and stage.group == "language"]
    names = {id(chain): tuple(op.name for op in iterate(chain)) for stage in stages for chain in stage.kinds}
    return [(stage.path, names[id(chain)]) for stage in stages for chain in stage.layers]
