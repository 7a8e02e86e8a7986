"""CountedEstimator: a bound model, a recipe and a convention in; exact FLOPs of any workload out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from flopcalc.base.errors import FlopcalcError, RecipeError, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.spelling import spell
from flopcalc.base.units import format_flops, format_parameters
from flopcalc.base.vocabulary import (
    CONVENTIONS,
    KERNELS,
    RECOMPUTE,
    Clipping,
    Convention,
    Counting,
    Kernel,
    Phase,
    PickedKernel,
    Recompute,
    check_word,
)
from flopcalc.core.count.count import Mode, count
from flopcalc.core.count.flops import NO_FLOPS, Flops
from flopcalc.core.count.formulas import KernelShape, fused_call_flops
from flopcalc.core.count.products import Block, CountedRow, Passes, Product, Row, Weights, sum_formats, sum_products
from flopcalc.core.estimate.checks import (
    check_clipping_recipe,
    check_live,
    check_routing,
    check_workload,
    find_clipping,
)
from flopcalc.core.estimate.estimate import Estimate, Estimator, Term
from flopcalc.core.estimate.model_counts import Identity
from flopcalc.core.estimate.notes import describe_formats, describe_kernels, describe_work
from flopcalc.core.formats.formats import FormatOptions, Formats, make_formats
from flopcalc.core.model.bound import BoundModel, bind_model
from flopcalc.core.model.heads import list_saved
from flopcalc.core.model.mtp import count_layers
from flopcalc.core.model.ops import Attend, Conv, Linear, iterate, join, remove_hooks
from flopcalc.core.recipe.recipe import Lora, Recipe, make_recipe
from flopcalc.core.recipe.resolver import Resolver
from flopcalc.core.workload.sums import Once, Pairs, Sum
from flopcalc.core.workload.workload import Workload, check_load
from flopcalc.hardware.devices import Device, find_sdpa
from flopcalc.hardware.routing import EVEN, Routing

if TYPE_CHECKING:
    from flopcalc.core.estimate.former import Rules
    from flopcalc.hardware.kernels import KernelTable, TileTable


def list_padding(
    blocks: Iterable[Block],
    load: Workload,
    counting: Counting,
    kernels: KernelTable | None,
    tiles: TileTable | None,
    clipping: Clipping,
    find_routing: Callable[[Block], Routing],
) -> list[CountedRow]:
    """Padding of a fused kernel's calls, of plain products and of experts, from a device's tables or by their model."""
    found: list[CountedRow] = []
    # The second pass back is padded as the first; what is computed per sample has no measured padding.
    twice = clipping in ("ghost", "fast")
    if kernels is not None and load.phase != "decode" and load.layout == "unpadded":
        found += _list_ragged(kernels, blocks, load, counting, twice)
    if tiles is not None:
        found += _list_tiles(tiles, blocks, load, counting, twice, find_routing)
    return found


_MEASURED = ("bf16", "fp16")


def _list_tiles(
    tiles: TileTable,
    blocks: Iterable[Block],
    load: Workload,
    counting: Counting,
    twice: bool,
    find_routing: Callable[[Block], Routing],
) -> Iterator[CountedRow]:
    for block in blocks:
        for row in block.rows:
            op = row.op
            # An adapted or fused product is several: only plain ones have one size.
            # A router may run in fp32 (DeepSeek's does), where bf16 tiles say nothing.
            # With one expert a row (Llama 4), HF multiplies all experts at once: no grouped product.
            is_grouped = op.copies > 1
            if not isinstance(op, Linear) or isinstance(op, Conv) or op.part == "router":
                continue
            if is_grouped and op.active == 1:
                continue
            base = row.products[0] if len(row.products) == 1 and row.products[0].role == "base" else None
            value = base.rows.count(load, counting) if base is not None else 0
            is_measured = base is not None and base.format in _MEASURED
            rows = value * op.times
            routing = find_routing(block) if op.active < op.copies else EVEN
            excess = tiles.expect(rows, op.n_out, op.n_in, op.copies, routing) if value and is_measured else None
            if base is None or excess is None:
                continue
            passes = base.passes
            back = excess.get("dgrad", 0) * passes.input_gradient + excess.get("wgrad", 0) * passes.weight_gradient
            forward = excess.get("forward", 0)
            if forward or back:
                yield _make_row(block, op, base, forward, back, twice, 1)


def _list_ragged(
    table: KernelTable, blocks: Iterable[Block], load: Workload, counting: Counting, twice: bool
) -> Iterator[CountedRow]:
    """Attention over lengths that fill no whole block: what was measured of exactly that call, less the formula."""
    shapes = dict(table.shapes)
    for block in blocks:
        for row in block.rows:
            op, fused = row.op, row.find("fused")
            if not isinstance(op, Attend) or fused is None:
                continue
            shape = shapes.get((op.qk, op.v), KernelShape())
            behind = row.find("fused_backward")
            has_backward = behind is not None and behind.passes.backward > 0
            for (mask, length), calls in op.rows.attention_calls(load, op.times).items():
                if mask == "causal" and counting != "flash" and isinstance(op.rows, Pairs) and op.rows.has_mask(load):
                    mask = "full"  # kernels compute all pairs if they are given a mask
                measured = table.find_call(op.qk, op.v, mask, length)
                if measured is None:
                    continue
                counted = fused_call_flops(op.replace(heads=1, times=1), shape, mask, length)
                forward = (measured["forward"] - counted[0]) * op.heads
                backward = (measured["backward"] - counted[1]) * op.heads if has_backward else 0
                if forward or backward:
                    yield _make_row(block, op, fused, forward, backward, twice, calls)


def _make_row(
    block: Block, op: Linear | Attend, padded: Product, forward: int, backward: int, twice: bool, times: int
) -> CountedRow:
    same = replace(padded, role="padding", rows=Once(), n_in=0, n_out=0, copies=1)
    products = (
        replace(same, flops=forward, passes=Passes(1, recompute=int(padded.passes.recompute > 0))),
        replace(same, flops=backward, passes=Passes(0, 1, clipping=int(twice))),
    )
    return CountedRow(block, Row(op, products), (times, times))


_TOWERS = ("vision", "audio")  # groups of stages that feed the language model


@frozen(slots=False)
class Coefficients(Value):
    """The rows of one counting mode, and their FLOPs per unit of each sum, ready to be multiplied."""

    blocks: tuple[Block, ...]
    terms: tuple[tuple[Sum, Flops], ...]

    @cached_property
    def by_format(self) -> dict[str, tuple[tuple[Sum, Flops], ...]]:
        """The same FLOPs apart, by the format that they are computed in."""
        return {name: tuple(sums.items()) for name, sums in sum_formats(self.blocks).items()}


class CountedEstimator(Estimator):
    """A model counted from its spec, under one recipe and one convention."""

    origin = "spec"

    def __init__(
        self,
        model: BoundModel,
        recipe: Recipe | None = None,
        convention: Convention = "model",
        attention_kernel: Kernel = "auto",
        device: Device | None = None,
        clipping: Clipping | None = None,
        formats: Formats | None = None,
        asked: FormatOptions = FormatOptions(),  # noqa: B008
        routing: Routing = EVEN,
    ) -> None:
        check_word(convention, CONVENTIONS, "convention")
        check_word(attention_kernel, KERNELS, "attention kernel")
        model, self.recipe, rules = _join_recipe(model, recipe, clipping)
        self.model = model
        self.source, self.spec, self.stages = model.source, model.spec, model.stages
        self.vision, self.audio = model.vision, model.audio
        self.has_decoder, self.has_text_encoder = model.has_decoder, model.has_text_encoder
        self.needs_text = model.needs_text
        self.mtp = model.mtp
        self.head, self.renamed = str(model.head), model.renamed
        self.convention = convention
        self.device = device  # what was measured on it tells what kernels and products execute
        self.asked_routing = routing
        if routing != EVEN:
            check_routing(model, routing)
        if self.is_diffusion and self.recipe.recompute == "full-reentrant":
            raise RecipeError(f"diffusers' gradient checkpointing is not reentrant: {spell('recompute', 'full')}")
        if self.spec.unrecomputed and self.recipe.recompute != "none":
            raise RecipeError(f"{spell('recompute')}: {self.spec.name} {self.spec.unrecomputed}")
        self.formats = formats if formats is not None else _find_formats(model, self.recipe, asked, rules)
        self.asked_kernel = attention_kernel
        self.attention_kernel: PickedKernel = (
            find_sdpa(device, self.formats.attention) if attention_kernel == "auto" else attention_kernel
        )
        self.kernel_table, self.tile_table = self._find_tables()
        self.identity = Identity(
            model.name, self.recipe, convention, self.attention_kernel, self.formats, device.id if device else None,
            self.stages, routing,
        )  # fmt: skip
        self._clips = self.recipe.clipping != "none"
        self._is_functorch = self._clips and find_clipping(self.spec.name) == "functorch"
        self._resolver = Resolver(self.recipe, self.stages)
        self._coefficients: dict[Mode, Coefficients] = {}
        self._chosen: dict[tuple[bool, bool, Convention], tuple[Coefficients, Counting]] = {}
        if not self._resolver.is_trivial:
            self._count_mode(True, True, convention)
            if self.recipe.trained is None:
                self._resolver.check_used(self._paths)
        if self._clips:
            check_clipping_recipe(model, self.recipe, self._resolver)

    def change(
        self,
        *,
        recompute: Recompute | None = None,
        convention: Convention | None = None,
        attention_kernel: Kernel | None = None,
        compute: str | None = None,
        device: Device | None = None,
    ) -> CountedEstimator:
        """The same model and what trains of it, under another recomputation, convention, kernel, format or device."""
        again = self.recipe.recompute
        if recompute is not None:
            again = check_word(recompute, RECOMPUTE, "recompute", RecipeError)
        return CountedEstimator(
            self.model,
            self.recipe.replace(recompute=again),
            self.convention if convention is None else convention,
            self.asked_kernel if attention_kernel is None else attention_kernel,
            self.device if device is None else device,
            formats=self.formats if compute is None else self.formats.with_compute(compute),
            routing=self.asked_routing,
        )

    def estimate_batch(
        self,
        batch: Mapping[str, object],
        *,
        phase: Phase = "train",
        logits: int | str | None = None,
        read_device: bool = True,
    ) -> Estimate:
        """FLOPs of one step on a real batch, as given to the model."""
        if self.model.latents is not None:
            return self.estimate(self.model.latents.read_batch(batch, phase))
        audio = (self.audio.key, self.audio.axis) if self.audio is not None else None
        grids = None
        if self.vision is not None and isinstance(batch, Mapping):  # read_batch says what is wrong with another
            grids = self.vision.read_sizes(batch, read_device)
        from flopcalc.core.workload.batch import read_batch  # only where there are tensors to read

        load, notes = read_batch(
            batch, phase=phase, logits=logits, read_device=read_device, audio=audio,
            has_decoder=self.has_decoder and self.model.head.kind != "sequence",
            images=grids or (), needs_text=self.needs_text,
        )  # fmt: skip
        if grids is not None:
            is_video = self.vision is not None and self.vision.frames > 0
            load = load.replace(grids=() if is_video else grids, videos=grids if is_video else load.videos)
        return self.estimate(load, tuple(notes))

    def estimate(self, load: Workload, notes: tuple[str, ...] = ()) -> Estimate:
        """FLOPs of one step on a workload."""
        load = check_workload(self.model, check_load(load))
        if self._clips and load.phase != "train":
            raise RecipeError(f"clipping {self.recipe.clipping} belongs to phase train, not {load.phase}")
        return Estimate((Term(self, load, 1),), self.count(load, self.convention), notes)

    @property
    def is_diffusion(self) -> bool:
        return self.model.is_part or self.model.latents is not None

    def count_tokens(self, load: Workload) -> int:
        """Real tokens; of a denoiser, of its text and its latents, and of another part of a pipeline none."""
        if self.model.is_part:
            return 0
        if self.model.latents is None:
            return load.tokens
        return load.tokens + sum(t * h * w for t, h, w in load.all_grids) // self.model.latents.patch

    def count_visual_tokens(self, load: Workload) -> int:
        return self.model.count_visual_tokens(load)

    def count(self, load: Workload, convention: Convention) -> Flops:
        """FLOPs of one step under a convention."""
        coefficients, counting = self._choose(load, convention)
        forward = backward = recompute = clipping = 0
        for rows, flops in coefficients.terms:
            value = rows.count(load, counting)
            forward += flops.forward * value
            backward += flops.backward * value
            recompute += flops.recompute * value
            clipping += flops.clipping * value
        total = Flops(forward, backward, recompute, clipping)
        if convention == "hardware":
            for padding in self._list_padding(coefficients, load, counting):
                total += padding.flops * padding.block.copies
        return total if load.phase == "train" else Flops(total.forward)

    def count_formats(self, load: Workload, convention: Convention) -> dict[str, Flops]:
        """The same FLOPs by the format that they are computed in."""
        coefficients, counting = self._choose(load, convention)
        if len(coefficients.by_format) == 1:
            return dict.fromkeys(coefficients.by_format, self.count(load, convention))
        found: dict[str, Flops] = {}
        for name, terms in coefficients.by_format.items():
            found[name] = sum((flops * rows.count(load, counting) for rows, flops in terms), NO_FLOPS)
        if convention == "hardware":
            for padding in self._list_padding(coefficients, load, counting):
                for name, flops in padding.by_format().items():
                    found[name] = found.get(name, NO_FLOPS) + flops * padding.block.copies
        if load.phase != "train":
            found = {name: Flops(flops.forward) for name, flops in found.items()}
        return {name: flops for name, flops in found.items() if any(flops)}

    def count_weights(self) -> list[Weights]:
        """Parameters and bytes by the format that they are stored in, the largest first."""
        has_adapters = self.recipe.lora is not None or bool(self.recipe.adapters)
        found: dict[str, Weights] = {}
        for block in self._find_counted().blocks:
            for row in block.rows:
                for held in row.list_weights(has_adapters):
                    before = found.get(held.format, Weights(held.format, 0, 0))
                    found[held.format] = before.add(held, block.copies)
        return sorted(found.values(), key=lambda held: -held.total_bytes)

    def rows(self, load: Workload, convention: Convention) -> list[CountedRow]:
        """Every row of the model with the values of its sums under a convention."""
        coefficients, counting = self._choose(load, convention)
        rows = [
            CountedRow(block, row, tuple([product.rows.count(load, counting) for product in row.products]))
            for block in coefficients.blocks
            for row in block.rows
        ]
        return rows + (self._list_padding(coefficients, load, counting) if convention == "hardware" else [])

    def parameters(self) -> dict[str, int]:
        """Parameters: all (tied once, adapters included), those one token reaches, those that train."""
        total = inactive = trainable = 0
        for block in self._find_counted().blocks:
            for row in block.rows:
                total += row.parameters * block.copies
                inactive += row.inactive * block.copies
                trainable += row.trainable * block.copies
        return {"total": total, "active": total - inactive, "trainable": trainable}

    def _find_counted(self) -> Coefficients:
        """Those of any mode: parameters are the same in all."""
        return next(iter(self._coefficients.values()), None) or self._count_mode(False, False, self.convention)

    def notes(self, load: Workload) -> list[str]:
        """What a reader of the numbers should know."""
        load = check_load(load)
        notes = [self.device.note] if self.device is not None and self.device.note else []
        notes += describe_work(self, self.model, load) + describe_formats(self, load) + self._describe_mtp(load)
        if self.convention == "hardware" and self.attention_kernel != "eager":
            coefficients, counting = self._choose(load, "hardware")
            padding = self._list_padding(coefficients, load, counting)
            notes += describe_kernels(self, load, self.kernel_table, self.tile_table, padding)
        return notes

    def _describe_mtp(self, load: Workload) -> list[str]:
        """What layers of multi-token prediction would add, where they are left out."""
        left_out = count_layers(self.source) if self.mtp == 0 and self.model.head.kind == "lm" else 0
        if not left_out or self.source.module is not None:
            return []
        layers = f"{left_out} layer{'s' if left_out > 1 else ''} of multi-token prediction"
        try:
            source = self.source.replace(mtp=True)
            model = bind_model(source, self.model.extra)
            whole = CountedEstimator(
                model, self.recipe, self.convention, self.attention_kernel, self.device, formats=self.formats,
                routing=EVEN if self.asked_routing.rows else self.asked_routing,
            )  # fmt: skip
        except FlopcalcError as error:
            return [f"{layers} left out, as HF's model has it, and not described: {error}"]
        added = whole.parameters()["total"] - self.parameters()["total"]
        total = whole.count(load, self.convention).total
        return [
            f"{layers} left out, as HF's model has it: with {spell('mtp')} {format_flops(total)} ({total:,}), and "
            f"{format_parameters(added)} more parameters"
        ]

    def count_hooks(self, load: Workload) -> dict[str, int]:
        """What each frozen tower executes only because HF's checkpointing makes its input require a gradient."""
        if self.recipe.recompute == "none" or load.phase != "train":
            return {}
        trained = dict.fromkeys(_TOWERS, 0)
        for block in self._choose(load, "hardware")[0].blocks:
            if block.group in trained:
                trained[block.group] += sum(row.trainable for row in block.rows)
        found = {}
        for group, trainable in trained.items():
            stages = tuple(remove_hooks(stage) if stage.group == group else stage for stage in self.stages)
            if trainable or stages == self.stages:
                continue
            plain = CountedEstimator(
                replace(self.model, stages=stages),
                self.recipe,
                "hardware",
                self.attention_kernel,
                self.device,
                formats=self.formats,
                routing=self.asked_routing,
            )
            extra = self.count(load, "hardware").total - plain.count(load, "hardware").total
            if extra:
                found[group] = extra
        return found

    def _find_tables(self) -> tuple[KernelTable | None, TileTable | None]:
        """What the kernel's calls and products execute on the device; they were measured in bf16, and fp16 is alike."""
        if self.device is None or self.attention_kernel == "eager" or self.formats.attention not in ("bf16", "fp16"):
            return None, None
        from flopcalc.hardware.kernels import find_kernel_table, find_tile_table  # only where a device is named

        return find_kernel_table(self.device.id, self.attention_kernel), find_tile_table(self.device.id)

    def _list_padding(self, coefficients: Coefficients, load: Workload, counting: Counting) -> list[CountedRow]:
        if self.attention_kernel == "eager":
            return []
        return list_padding(
            coefficients.blocks,
            load,
            counting,
            self.kernel_table,
            self.tile_table,
            self.recipe.clipping,
            self.find_routing,
        )

    def _choose(self, load: Workload, convention: Convention) -> tuple[Coefficients, Counting]:
        """The coefficients for a workload, and how its sums are to be counted."""
        check_word(convention, CONVENTIONS, "convention")
        check_load(load)
        key = (bool(load.grids or load.videos), bool(load.clips), convention)
        found = self._chosen.get(key)
        if found is None:
            counting: Counting
            if convention == "hardware":
                counting = "full" if self.attention_kernel == "eager" else self.attention_kernel
            else:
                counting = convention
            found = self._chosen[key] = (self._count_mode(*key), counting)
        return found

    def _count_mode(self, has_images: bool, has_audio: bool, convention: Convention) -> Coefficients:
        is_hardware = convention == "hardware"
        mode = Mode(
            has_images,
            has_audio,
            is_hardware and self.attention_kernel != "eager",
            self.recipe.recompute if is_hardware else "none",
            self.kernel_table.shapes if is_hardware and self.kernel_table is not None else (),
            is_hardware,
            self.recipe.clipping if is_hardware else "none",
            is_hardware and self._is_functorch,
        )
        found = self._coefficients.get(mode)
        if found is None:
            blocks = count(self.stages, self._resolver, mode, self.formats)
            found = self._coefficients[mode] = Coefficients(blocks, tuple(sum_products(blocks).items()))
        return found

    def _paths(self) -> Iterable[str]:
        return {
            join(block.path, row.op.name)
            for block in self._count_mode(True, True, self.convention).blocks
            for row in block.rows
        }


def _find_formats(model: BoundModel, recipe: Recipe, asked: FormatOptions, rules: Rules) -> Formats:
    """What the numbers of a model are: as asked, as its parameters are, or as its config says."""
    source = model.source
    are_said = asked.weights is not None
    live = None
    if source.module is not None:
        from flopcalc.core.recipe.live import read_formats  # a config alone starts without it

        live = read_formats(source.module, are_said=are_said)
        if rules:
            live = live.replace(stored={_rename_all(rules, name): stored for name, stored in live.stored.items()})
    casts = any(op.float32 for stage in model.stages for chain in stage.kinds for op in iterate(chain))
    lora_dtype = recipe.lora.dtype if recipe.lora is not None else None
    return make_formats(
        source.config,
        source.where,
        asked,
        live,
        lora_dtype=lora_dtype,
        has_adapters=bool(recipe.adapters),
        casts=casts,
        stages=model.stages,
    )


def _save_head(model: BoundModel, lora: Lora) -> Lora:
    """PEFT trains a classifier as well as its adapters (task types SEQ_CLS, TOKEN_CLS and QUESTION_ANS)."""
    added = [path for stage in model.stages for path in list_saved(stage) if path not in lora.save]
    return replace(lora, save=(*lora.save, *dict.fromkeys(added)))


def _rename_all(rules: Rules, name: str) -> str:
    """A live model's name under its spec's."""
    for rule in rules:
        name = rule.rename(name)
    return name


def _join_recipe(
    model: BoundModel, recipe: Recipe | None, clipping: Clipping | None
) -> tuple[BoundModel, Recipe, Rules]:
    """The recipe that holds, and the model as it is live: that says itself what trains, a recipe what it cannot say."""
    rules: Rules = ()
    if model.source.module is not None and (recipe is None or recipe.trained is None):
        if recipe is not None and (recipe.freeze or recipe.train_only or recipe.lora):
            raise RecipeError(
                "a live model itself says what trains (requires_grad and PEFT): change it there, or pass its config"
            )
        from flopcalc.core.recipe.live import has_input_hook, list_wrapped, read_recipe, read_recompute

        live, sizes, names = read_recipe(model.source.module, None if recipe is None else recipe.recompute)
        model, live, rules = check_live(model, live, sizes, names)
        wrapped = list_wrapped(model.source.module)
        if wrapped:
            from flopcalc.core.estimate.former import follow_wrappers

            model = follow_wrappers(model, [_rename_all(rules, path) for path in wrapped])
        elif read_recompute(model.source.module) != "none" and not has_input_hook(model.source.module):
            from flopcalc.core.estimate.former import drop_hooks

            model = drop_hooks(model)
        recipe = live if recipe is None else live.replace(clipping=recipe.clipping)
    if recipe is not None and recipe.lora is not None and model.head.kind in ("sequence", "token"):
        recipe = recipe.replace(lora=_save_head(model, recipe.lora))
    recipe = recipe if recipe is not None else make_recipe()
    if clipping is not None and recipe.clipping not in ("none", clipping):
        raise RecipeError(f"clipping {format_value(clipping)} contradicts the recipe's, {recipe.clipping}")
    return model, recipe if clipping is None else recipe.replace(clipping=clipping), rules
