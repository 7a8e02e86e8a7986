"""Estimator and Estimate: a model bound once, then FLOPs of any workload; the straight line through the core."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from flopcalc.core.count.count import (
    Block,
    KernelShape,
    Mode,
    Row,
    bias_parameters,
    count,
    fused_flops,
    product_flops,
    sum_coefficients,
    weight_parameters,
)
from flopcalc.core.model.config import Source, load_config
from flopcalc.core.model.ops import Chain, Op, Stage, expand, iterate, join
from flopcalc.core.model.vision import Vision, bind_vision
from flopcalc.core.recipe.live import read_recipe, read_recompute, strip, unwrap
from flopcalc.core.recipe.recipe import Recipe, check_clipping, make_recipe
from flopcalc.core.recipe.resolver import STATELESS, Resolver, check_clipped
from flopcalc.core.spec.expressions import MissingNameError
from flopcalc.core.spec.spec import PARTS, Spec, find_spec, load_spec
from flopcalc.core.spec.spec import bind as bind_spec
from flopcalc.core.workload.batch import read_batch
from flopcalc.core.workload.sums import Feature, attention_calls, evaluate_feature
from flopcalc.core.workload.workload import Grid, Workload, make_workload
from flopcalc.data import find_data_dir, list_data_files, load_toml
from flopcalc.errors import ConfigError, FlopcalcError, RecipeError, WorkloadError, format_nearest, format_value
from flopcalc.hardware.devices import find_device
from flopcalc.units import check_size, format_flops

if TYPE_CHECKING:
    from flopcalc.core.model.audio import Audio
    from flopcalc.hardware.kernels import KernelTable, TileTable

CONVENTIONS = ("model", "full", "hardware")
KERNELS = ("auto", "eager", "flash", "efficient", "cudnn")
_SUPPORTED_HINT = (
    "`flopcalc models` lists what is supported; --trace counts it from HF's own code, --spec FILE adds your own"
)


class Plan(NamedTuple):
    """Coefficients of one counting mode, ready to be multiplied."""

    blocks: tuple[Block, ...]
    terms: tuple[tuple[Feature, int, int, int], ...]  # feature, forward, backward, recompute
    clips: tuple[tuple[Feature, int], ...] = ()  # feature, clipping


class ModuleRow(NamedTuple):
    """FLOPs of a module, or of all modules whose paths differ only in the layer's number."""

    path: str
    kind: str
    copies: int
    forward: int
    backward: int
    recompute: int
    clipping: int
    parameters: int


class Estimator:
    """A model bound to its spec, a recipe and a convention: call it with a workload."""

    origin = "spec"  # or "trace"

    def __init__(
        self,
        source: Source,
        recipe: Recipe | None = None,
        convention: str = "model",
        attention_kernel: str = "auto",
        specs: Mapping[str, Spec] | None = None,
        kernel_table: KernelTable | None = None,
        tile_table: TileTable | None = None,
        clipping: str | None = None,
    ) -> None:
        if convention not in CONVENTIONS:
            raise FlopcalcError(f"convention {format_value(convention)} unknown; known: {', '.join(CONVENTIONS)}")
        if attention_kernel not in KERNELS:
            raise FlopcalcError(
                f"attention kernel {format_value(attention_kernel)} unknown; known: {', '.join(KERNELS)}"
            )
        self.source = source
        self.convention = convention
        # Without a device that says better, torch's SDPA is taken to pick its flash kernel.
        self.attention_kernel = "flash" if attention_kernel == "auto" else attention_kernel
        self.kernel_table = kernel_table  # what was measured of the kernel on the device asked for
        self.tile_table = tile_table  # and of products, by their exact sizes
        self.spec = _find_spec(source, dict(specs or {}))
        dims = bind_spec(self.spec, source.config, source.where, dict(specs or {}))
        self.stages: tuple[Stage, ...] = expand(dims)
        self.vision: Vision | None = bind_vision(dims)
        self.audio: Audio | None = None
        if self.spec.audio:
            from flopcalc.core.model.audio import bind_audio  # few models hear, and start-up is counted

            self.audio = bind_audio(dims)
        self.has_decoder = any(
            "decoder" in op.feature[:2] for stage in self.stages for chain in stage.layers[:1] for op in iterate(chain)
        )
        self.has_text_encoder = any(
            op.feature[0] in ("tokens", "pairs") or op.feature[:2] == ("sum", "sequence")
            for stage in self.stages
            for chain in stage.layers[:1]
            for op in iterate(chain)
        )
        self._position_kind = self.spec.positions.get("kind", "")
        self._position_limit = _read_limit(dims)
        if source.module is not None:
            if recipe is not None and (recipe.freeze or recipe.train_only or recipe.lora):
                raise RecipeError(
                    "a live model itself says what trains (requires_grad and PEFT): change it there, or pass its config"
                )
            live, sizes, names = read_recipe(source.module, None if recipe is None else recipe.recompute)
            self._check_live(sizes, names)
            recipe = live if recipe is None else live._replace(clipping=recipe.clipping)
        recipe = recipe if recipe is not None else make_recipe()
        if clipping is not None and recipe.clipping not in ("none", clipping):
            raise RecipeError(f"clipping {format_value(clipping)} contradicts the recipe's, {recipe.clipping}")
        if clipping is not None:
            recipe = recipe._replace(clipping=clipping)
        self.recipe = recipe
        # Two estimators of one identity count alike: the model under one recipe, however often it was bound.
        self.identity = (source.name, self.stages, recipe, convention, self.attention_kernel)
        self._clips = recipe.clipping != "none"
        self._is_functorch = self._clips and _find_clipping(self.spec.name) == "functorch"
        self._resolver = Resolver(recipe, self.stages)
        self._plans: dict[Mode, Plan] = {}
        self._chosen: dict[tuple[bool, bool, str], tuple[Plan, str]] = {}
        if not self._resolver.is_trivial:
            self._plan(True, True, convention)
            if recipe.trained is None:
                self._resolver.check_used(self._paths)
        if self._clips:
            self._check_clipping()

    def __call__(
        self,
        batch_size: int = 1,
        seq_len: int | None = None,
        *,
        image_grid_thw: Any = None,
        video_grid_thw: Any = None,
        lengths: Iterable[int] | None = None,
        batch: Mapping[str, Any] | None = None,
        phase: str = "train",
        context: int | None = None,
        logits: int | str | None = None,
        decoder_seq_len: int | None = None,
        clips: Iterable[int] | None = None,
        audio: Iterable[float] | None = None,
    ) -> Estimate:
        """FLOPs of one step on this workload; a batch's values on a device are not read (that would stall it).

        `audio` are the whole batch's clips in seconds; `clips` the same in frames of the model's feature extractor.
        """
        if audio is not None:
            clips = [*(clips or ()), *self.count_frames(audio)]
        if batch is not None:
            _check_alone(batch_size, seq_len, lengths, image_grid_thw, video_grid_thw, context, decoder_seq_len, clips)
            return self.estimate_batch(batch, phase=phase, logits=logits, read_device=False)
        load = make_workload(
            batch_size,
            seq_len,
            lengths=lengths,
            image_grid_thw=image_grid_thw,
            video_grid_thw=video_grid_thw,
            phase=phase,
            context=context,
            logits=logits,
            decoder_seq_len=decoder_seq_len,
            clips=clips,
        )
        if load.grids and self.vision is not None and self.vision.kind == "tiles":
            for grid in load.grids:
                self.vision.check_tiles(grid, "image_grid_thw")
        return self.estimate(load)

    def estimate_batch(
        self,
        batch: Mapping[str, Any],
        *,
        phase: str = "train",
        logits: int | str | None = None,
        read_device: bool = True,
    ) -> Estimate:
        """FLOPs of one step on a real batch, as given to the model."""
        audio = (self.audio.key, self.audio.axis) if self.audio is not None else None
        grids = None
        if self.vision is not None and isinstance(batch, Mapping):  # read_batch says what is wrong with another
            grids = self.vision.read_sizes(batch, read_device)
        load, notes = read_batch(
            batch, phase=phase, logits=logits, read_device=read_device, has_decoder=self.has_decoder, audio=audio,
            images=grids or (),
        )  # fmt: skip
        return self.estimate(load if grids is None else load.replace(grids=grids), tuple(notes))

    def count_frames(self, seconds: Iterable[float]) -> list[int]:
        """Frames of clips that are given in seconds, as the model's feature extractor makes them."""
        if self.audio is None:
            raise WorkloadError(f"{self.source.name} takes no audio")
        return [self.audio.frames_of_seconds(length) for length in seconds]

    def estimate(self, load: Workload, notes: tuple[str, ...] = ()) -> Estimate:
        """FLOPs of one step on a workload."""
        if load.phase in ("prefill", "decode"):
            self._check_decodes(load.phase)
        if load.grids or load.videos:
            load = self._check_images(load)
        if self.has_decoder or load.decoder is not None:
            self._check_decoder(load)
        if load.clips:
            self._check_audio(load)
        limit = self._position_limit
        if limit:
            for side in (load, load.decoder):
                if side is not None and side.seq + side.context > limit:
                    self._check_positions(side, limit)
        if self._clips and load.phase != "train":
            raise RecipeError(f"clipping {self.recipe.clipping} belongs to phase train, not {load.phase}")
        forward, backward, recompute, clipping = self.count(load, self.convention)
        return Estimate(((self, load, 1),), forward, backward, recompute, notes, clipping)

    def count(self, load: Workload, convention: str) -> tuple[int, int, int, int]:
        """Forward, backward, recomputed and clipping FLOPs under a convention."""
        plan, counting = self._choose(load, convention)
        forward = backward = recompute = clipping = 0
        for feature, ahead, back, again in plan.terms:
            value = evaluate_feature(feature, load, counting)
            forward += ahead * value
            backward += back * value
            recompute += again * value
        for feature, clip in plan.clips:
            clipping += clip * evaluate_feature(feature, load, counting)
        if convention == "hardware" and (self.tile_table is not None or self.kernel_table is not None):
            for block, row, value in self._padding_rows(plan, load, counting):
                forward += row.forward * value * block.copies
                backward += row.backward * value * block.copies
                recompute += row.recompute * value * block.copies
                clipping += row.clipping * value * block.copies
        if load.phase != "train":
            return forward, 0, 0, 0
        return forward, backward, recompute, clipping

    def rows(self, load: Workload, convention: str) -> list[tuple[Block, Row, int]]:
        """Every row of the model with the value of its feature under a convention."""
        plan, counting = self._choose(load, convention)
        rows = [
            (block, row, evaluate_feature(row.op.feature, load, counting))
            for block in plan.blocks
            for row in block.rows
        ]
        return rows + (self._padding_rows(plan, load, counting) if convention == "hardware" else [])

    def _padding_rows(self, plan: Plan, load: Workload, counting: str) -> list[tuple[Block, Row, int]]:
        """What products of exactly measured sizes execute beyond need, as rows of their own."""
        found: list[tuple[Block, Row, int]] = []
        if self.attention_kernel == "eager":
            return found
        if self.kernel_table is not None and load.phase != "decode" and load.layout == "unpadded":
            found += self._ragged_rows(self.kernel_table, plan, load)
        if self.tile_table is None:
            return found
        for block in plan.blocks:
            for row in block.rows:
                op = row.op
                flops = product_flops(op)
                # An adapted or fused product is several: only plain ones have one size.
                # A router may run in fp32 (DeepSeek's does), where bf16 tiles say nothing.
                if op.kind != "linear" or op.copies > 1 or row.forward != flops or op.part == "router":
                    continue
                value = evaluate_feature(op.feature, load, counting)
                excess = self.tile_table.find(value * op.times, op.n_out, op.n_in) if value else None
                if excess is None:
                    continue
                owed = ("dgrad", "wgrad") if row.backward == 2 * flops else ("wgrad" if row.owes_weight else "dgrad",)
                back = sum(excess.get(direction, 0) for direction in owed) if row.backward else 0
                ahead = excess.get("forward", 0)
                padding = Row(op._replace(feature=("padding",)), ahead, back, ahead if row.recompute else 0)
                padding = self._clip_padding(padding)
                if padding.forward or padding.backward:
                    found.append((block, padding, 1))
        return found

    def _clip_padding(self, padding: Row) -> Row:
        """The second pass back is padded as the first; what is computed per sample has no measured padding."""
        return padding._replace(clipping=padding.backward) if self.recipe.clipping in ("ghost", "fast") else padding

    def _ragged_rows(self, table: KernelTable, plan: Plan, load: Workload) -> list[tuple[Block, Row, int]]:
        """Attention over lengths that fill no whole block: what was measured of exactly that call, less the formula."""
        found: list[tuple[Block, Row, int]] = []
        shapes = dict(table.shapes)
        for block in plan.blocks:
            for row in block.rows:
                op = row.op
                if op.kind != "attend":
                    continue
                shape = shapes.get((op.qk, op.v), KernelShape())
                for (mask, length), many in attention_calls(op.feature, load, op.times).items():
                    measured = table.calls.get((op.qk, op.v, mask, length))
                    if measured is None:
                        continue
                    counted = fused_flops(op._replace(heads=1, times=1), shape, mask, length)
                    ahead, behind = (
                        (measured[way] - flops) * op.heads
                        for way, flops in zip(("forward", "backward"), counted, strict=True)
                    )
                    padding = Row(
                        op._replace(feature=("padding",)),
                        ahead if row.forward else 0,
                        behind if row.backward else 0,
                        ahead if row.recompute else 0,
                    )
                    padding = self._clip_padding(padding)
                    if padding.forward or padding.backward:
                        found.append((block, padding, many))
        return found

    def _choose(self, load: Workload, convention: str) -> tuple[Plan, str]:
        """The plan for a workload, and how its features are to be counted."""
        key = (bool(load.grids or load.videos), bool(load.clips), convention)
        found = self._chosen.get(key)
        if found is None:
            counting = convention
            if convention == "hardware":
                counting = "full" if self.attention_kernel == "eager" else self.attention_kernel
            found = self._chosen[key] = (self._plan(*key), counting)
        return found

    def parameters(self) -> dict[str, int]:
        """Parameters: all (tied once, adapters included), those one token reaches, those that train."""
        # Parameters are the same in every mode: take a plan that exists.
        plan = next(iter(self._plans.values())) if self._plans else self._plan(False, False, self.convention)
        total = inactive = trainable = 0
        for block in plan.blocks:
            for row in block.rows:
                total += row.parameters * block.copies
                inactive += row.inactive * block.copies
                trainable += row.trainable * block.copies
        return {"total": total, "active": total - inactive, "trainable": trainable}

    def count_visual_tokens(self, load: Workload) -> int:
        if self.vision is None:
            return 0
        videos = sum(self.vision.count_tokens(grid, True) for grid in load.videos)
        return sum(self.vision.count_tokens(grid) for grid in load.grids) + videos

    def count_patches(self, load: Workload) -> int:
        return sum(self.vision.count_patches(grid) for grid in load.all_grids) if self.vision else 0

    def _plan(self, has_images: bool, has_audio: bool, convention: str) -> Plan:
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
        plan = self._plans.get(mode)
        if plan is None:
            blocks = count(self.stages, self._resolver, mode)
            forward, backward, again = (
                sum_coefficients(blocks, direction) for direction in ("forward", "backward", "recompute")
            )
            names = dict.fromkeys((*forward, *backward, *again))
            terms = tuple((name, forward.get(name, 0), backward.get(name, 0), again.get(name, 0)) for name in names)
            clips = tuple(sum_coefficients(blocks, "clipping").items()) if mode.clipping != "none" else ()
            plan = self._plans[mode] = Plan(blocks, terms, clips)
        return plan

    def _check_clipping(self) -> None:
        """What Opacus cannot clip, and what no count has proven, is refused."""
        clipping, name = self.recipe.clipping, self.source.name
        check_clipping(clipping, self.recipe.recompute)
        if self.vision is not None or self.audio is not None or self.has_decoder:
            what = "an encoder and a decoder" if self.has_decoder else "a tower, whose rows are not samples"
            raise RecipeError(f"clipping {clipping}: {name} has {what}; clipping is counted for plain text models")
        check_clipped(self.stages, self._resolver, clipping)
        if not _find_clipping(self.spec.name):
            raise RecipeError(
                f"clipping {clipping}: no count of an Opacus step has proven it for model_type {self.spec.name!r}; "
                "it is for llama, qwen2, gpt_neox and what else model_specs/clipping.toml lists"
            )

    def _check_images(self, load: Workload) -> Workload:
        vision = self.vision
        if vision is None:
            what = "takes no images" if self.audio is not None else "is a text model: it takes no images"
            raise WorkloadError(f"{self.source.name} {what}")
        if load.videos and not vision.takes_videos:
            raise WorkloadError(f"{self.source.name} takes no videos")
        if vision.kind != "grid":
            grids = tuple([vision.check_grid(grid, "image grid") for grid in load.grids])
            load = _with_grids(load, grids, load.videos)
        else:
            merge = vision.merge
            for grid in load.grids + load.videos:
                if grid[1] % merge or grid[2] % merge or not grid[0]:
                    vision.check_grid(grid, "grid")
        visual, tokens = self.count_visual_tokens(load), load.tokens
        if visual > tokens:
            raise WorkloadError(
                f"{visual} visual tokens do not fit in {tokens} tokens: --seq counts them in (--text adds them instead)"
            )
        return load

    def _check_decodes(self, phase: str) -> None:
        """An encoder reads the whole text at once: it has no cache to fill or to read."""
        if self.has_decoder:
            return
        masks = {
            op.feature[:2]
            for stage in self.stages
            for chain in stage.layers
            for op in iterate(chain)
            if op.kind == "attend" and stage.stream == "language"
        }
        if self.spec.architecture.endswith("ForMaskedLM") or masks == {("pairs", "full")}:
            raise WorkloadError(
                f"{self.source.name} is an encoder: it does not decode, so there is no phase {phase}; "
                "forward is one pass over the text, train a whole step"
            )

    def _check_decoder(self, load: Workload) -> None:
        name = self.source.name
        if not self.has_decoder:
            raise WorkloadError(f"{name} is no encoder-decoder: it takes no --decoder-seq (decoder_seq_len)")
        if load.decoder is None:
            raise WorkloadError(f"{name} has a decoder: give its length too (--decoder-seq N, decoder_seq_len=N)")
        if self.has_text_encoder and not load.seq:
            raise WorkloadError(f"{name} is an encoder-decoder: give the encoder's length too (--seq N, seq_len=N)")
        if not self.has_text_encoder and load.seq:
            raise WorkloadError(f"{name} has no encoder of text: leave --seq out, its length is --decoder-seq")
        if not self.has_text_encoder and self.audio is not None and len(load.clips) != load.rows:
            raise WorkloadError(
                f"{name} takes one clip of audio per sample, not {len(load.clips)} for {load.rows}: --audio SECONDS"
            )

    def _check_audio(self, load: Workload) -> None:
        if self.audio is None:
            raise WorkloadError(f"{self.source.name} takes no audio")
        most = self.audio.most
        if most and max(load.clips) > most:
            longest, rate = max(load.clips), self.audio.rate
            raise WorkloadError(
                f"{self.source.name} takes clips of at most {float(most / rate):g} s ({most} frames), "
                f"not {float(longest / rate):g} s ({longest} frames)"
            )
        tokens = sum(map(self.audio.count_tokens, load.clips))
        if load.decoder is None and tokens > load.tokens:
            raise WorkloadError(
                f"{tokens} audio tokens do not fit in {load.tokens} tokens: --seq counts them in (--text adds them)"
            )

    def _check_positions(self, load: Workload, limit: int) -> None:
        if self._position_kind == "learned" and _longest(load) > limit:
            raise WorkloadError(
                f"length {_longest(load)} is beyond the {limit} positions that {self.source.name} learned"
            )

    def notes(self, load: Workload) -> list[str]:
        """What a reader of the numbers should know."""
        notes = []
        named = "" if self.source.module is not None else _find_architecture(self.source)
        if named and not _is_same_class(named, self.spec.architecture):
            notes.append(f"the config names {format_value(named)[1:-1]}; counted as {self.spec.architecture}")
        if self.vision is not None and not load.all_grids and load.phase != "decode":
            example = "--image 1024x768" if self.vision.kind == "grid" else "--image 336x336"
            notes.append(f"no image given, so the vision tower is not counted; add one with {example}")
        if self.audio is not None and not load.clips and load.phase != "decode":
            notes.append("no audio given, so the audio tower is not counted; add some with --audio SECONDS")
        longest = max(_longest(side) for side in (load, load.decoder) if side is not None)
        if self._position_limit and self._position_kind == "rotary" and longest > self._position_limit:
            notes.append(f"length {longest} is beyond max_position_embeddings = {self._position_limit}")
        if self.recipe.recompute != "none" and self.convention != "hardware" and load.phase == "train":
            again = self.count(load, "hardware")[2]
            notes.append(f"recomputation would add {format_flops(again)} ({again}) under convention hardware")
        if self._clips and self.convention != "hardware":
            extra = self.count(load, "hardware")[3]
            notes.append(f"clipping would add {format_flops(extra)} ({extra}) under convention hardware")
        if load.phase == "train" and not self.parameters()["trainable"]:
            notes.append("nothing trains under this recipe, so there is no backward pass")
        side = load.decoder or load
        if isinstance(side.logits, int) and side.logits > side.seq:
            notes.append(f"logits asked for {side.logits} positions, a sequence has {side.seq}: all of them counted")
        if self.spec.reentrant and self.recipe.recompute == "full-reentrant" and load.phase == "train":
            notes.append(self.spec.reentrant)
        if self.recipe.recompute != "none" and load.phase != "train":
            notes.append(f"phase {load.phase} has no backward pass, so nothing is recomputed")
        if self.convention == "hardware" and self.attention_kernel != "eager":
            notes += self._describe_kernels(load)
        return notes

    def _describe_kernels(self, load: Workload) -> list[str]:
        """What the hardware count takes from tables, and where a query lies outside them."""
        notes = []
        if load.phase != "decode" and self.kernel_table is None:
            backward = "; backward forms the scores again" if load.phase == "train" else ""
            rule = f"causal attention counted in blocks of 128, no measured table{backward}"
            notes.append(f"kernel {self.attention_kernel}: {rule}")
        elif load.phase != "decode" and self.kernel_table is not None:
            asked: dict[tuple[int, int], set[tuple[str, int]]] = {}
            for _, row, value in self.rows(load, "hardware"):
                if row.op.kind == "attend" and row.op.feature[0] != "padding" and value:
                    calls = attention_calls(row.op.feature, load, row.op.times)
                    asked.setdefault((row.op.qk, row.op.v), set()).update(calls)
            notes.append(f"kernel {self.attention_kernel}: {self.kernel_table.describe(asked)}")
        plan, counting = self._choose(load, "hardware")
        padded = [row for _, row, _ in self._padding_rows(plan, load, counting) if row.op.kind == "linear"]
        if padded and self.tile_table is not None:
            many = f"{len(padded)} product{'s' if len(padded) > 1 else ''}"
            notes.append(f"tile padding of {many} as measured on {self.tile_table.device} (tables gemm and padding)")
        return notes

    def _paths(self) -> Iterable[str]:
        return {
            join(block.path, row.op.name)
            for block in self._plan(True, True, self.convention).blocks
            for row in block.rows
        }

    def _check_live(self, sizes: dict[str, int], names: dict[str, str]) -> None:
        """The live model's parameters must be the spec's, by name and size: else its FLOPs would not be.

        The spec may know a shared tensor by any of its names, but by one alone. A model without a head whose weight is
        the embedding's has the same parameters, so its class is asked too; own and remote classes may have any name.
        """
        classes = type(unwrap(self.source.module)).__mro__
        is_known = any(_is_same_class(each.__name__, self.spec.architecture) for each in classes)
        if not is_known and any(each.__module__.startswith("transformers.models.") for each in classes):
            raise ConfigError(
                f"{classes[0].__name__} is another class than {self.spec.architecture}, which spec {self.spec.name!r} "
                "describes: give that model, or its config; bind(model, example_batch) counts any module by a trace"
            )
        expected: dict[str, int] = {}
        for stage in self.stages:
            for layer, chain in enumerate(stage.layers, stage.first):
                path = f"{stage.path}.{layer}" if stage.repeated else stage.path
                expected |= _parameter_sizes(chain, path)
        tensors = Counter(names.get(name, name) for name in expected)
        extra = sorted(name for name in sizes if names[name] not in tensors)
        missing = sorted(name for name in expected if name not in sizes or tensors[names[name]] > 1)
        resized = sorted(name for name, size in sizes.items() if expected.get(name, size) != size)
        if extra or missing or resized:
            shown = ", ".join((extra or missing or resized)[:3])
            what = "has parameters that the spec lacks" if extra else "lacks parameters of the spec"
            what = what if extra or missing else "has parameters of another size than its config says"
            raise ConfigError(
                f"{self.source.name} {what} ({shown}): spec {self.spec.name!r} describes {self.spec.architecture}"
            )


def _parameter_sizes(chain: Chain, path: str) -> dict[str, int]:
    """Every parameter of a chain by its full name, with its number of elements."""
    sizes = {}
    for op in iterate(chain):
        if op.kind in STATELESS or op.again:
            continue
        module = join(path, op.name)
        if not op.tied:
            sizes[module if op.kind == "param" else f"{module}.{op.param}"] = weight_parameters(op)
        if op.bias:
            sizes[f"{module}.{op.bias_name}"] = bias_parameters(op)
        if "*" in op.name:  # a module per copy
            for name in [name for name in sizes if "*" in name]:
                size = sizes.pop(name) // op.copies
                sizes |= {name.replace("*", copy): size for copy in op.copy_names}
    return sizes


def _check_alone(batch_size: int, *others: Any) -> None:
    if batch_size != 1 or any(other is not None for other in others):
        raise WorkloadError("batch already says sizes, lengths and images: give it alone")


def _longest(load: Workload) -> int:
    longest = max(load.documents) if load.layout == "packed" and load.documents else load.seq
    return longest + load.context


def _with_grids(load: Workload, grids: tuple[Grid, ...], videos: tuple[Grid, ...]) -> Workload:
    return Workload(
        load.rows, load.seq, load.documents, load.layout, load.phase, load.context, load.logits, grids, videos,
        load.clips, load.decoder,
    )  # fmt: skip


def _find_spec(source: Source, specs: dict[str, Spec]) -> Spec:
    model_type: str = source.config["model_type"]
    spec = specs.get(model_type) or find_spec(model_type)
    named = _find_architecture(source, spec)
    variant = spec.variants.get(named) if spec is not None else None
    if variant is not None:
        spec = specs.get(variant) or find_spec(variant)
    if spec is None:
        near = format_nearest(model_type, list_data_files("specs"))
        raise ConfigError(f"{source.where}: model_type {format_value(model_type)} has no spec.{near} {_SUPPORTED_HINT}")
    if spec.is_tower:
        raise ConfigError(f"{source.where}: {model_type!r} is a part of other models, not one by itself")
    return spec


def _find_clipping(spec_name: str) -> str:
    """How a model type's per-sample work was proven by a count, 'linear' or 'functorch'; empty if it was not."""
    tables = load_toml(os.path.join(find_data_dir(), "clipping.toml"))
    return next((how for how in ("linear", "functorch") if spec_name in tables[how]), "")


def _is_same_class(named: str, architecture: str) -> bool:
    """Whether two names mean one class: remote code and releases differ in underscores and case alone."""
    return named == architecture or named.replace("_", "").lower() == architecture.replace("_", "").lower()


def _find_architecture(source: Source, spec: Spec | None = None) -> str:
    """The HF class: a live model's own, or the one that it extends and a spec knows; else the first in the config."""
    if source.module is not None:
        names = [each.__name__ for each in type(unwrap(source.module)).__mro__]
        known = (spec.architecture, *spec.variants) if spec is not None else ()
        return next((name for name in names if name in known), names[0])
    named = source.config.get("architectures")
    return str(named[0]) if isinstance(named, (list, tuple)) and named else ""


def _read_limit(dims: Any) -> int:
    text = dims.spec.positions.get("limit")
    if text is None:
        return 0
    try:
        value = dims.evaluate(text)
    except MissingNameError:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{dims.where}: {text} must be a positive whole number, not {format_value(value)}")
    return value


class Estimate:
    """FLOPs of one step: exact ints at once, the breakdown when asked for."""

    __slots__ = ("_notes", "backward", "clipping", "forward", "recompute", "terms")

    def __init__(
        self,
        terms: tuple[tuple[Estimator, Workload, int], ...],
        forward: int,
        backward: int,
        recompute: int,
        notes: tuple[str, ...] = (),
        clipping: int = 0,
    ) -> None:
        self.terms = terms
        self.forward = forward
        self.backward = backward
        self.recompute = recompute
        self.clipping = clipping
        self._notes = notes

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recompute + self.clipping

    @property
    def convention(self) -> str:
        return self.terms[0][0].convention

    @property
    def attention_kernel(self) -> str:
        return self.terms[0][0].attention_kernel

    @property
    def tokens(self) -> int:
        """Real tokens that the language model sees."""
        return sum(load.tokens * times for _, load, times in self.terms)

    def __add__(self, other: Estimate) -> Estimate:
        if not isinstance(other, Estimate):
            return NotImplemented
        if other.convention != self.convention:
            raise FlopcalcError(f"cannot add FLOPs of convention {other.convention} to {self.convention}")
        if self.convention == "hardware" and other.attention_kernel != self.attention_kernel:
            raise FlopcalcError(f"cannot add FLOPs of kernel {other.attention_kernel} to {self.attention_kernel}")
        return Estimate(
            _merge_terms(self.terms + other.terms),
            self.forward + other.forward,
            self.backward + other.backward,
            self.recompute + other.recompute,
            self._notes + other._notes,
            self.clipping + other.clipping,
        )

    def __radd__(self, other: object) -> Estimate:
        return self if other == 0 else NotImplemented  # sum() starts from 0

    def __mul__(self, times: int) -> Estimate:
        if type(times) is not int:
            return NotImplemented
        if times < 1:
            raise FlopcalcError(f"an estimate can be multiplied by a whole number of at least 1, not {times}")
        terms = tuple((estimator, load, many * times) for estimator, load, many in self.terms)
        return Estimate(
            terms, self.forward * times, self.backward * times, self.recompute * times, self._notes,
            self.clipping * times,
        )  # fmt: skip

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Estimate) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.forward, self.backward, self.recompute, self.clipping, self.convention))

    def total_under(self, convention: str) -> int:
        """The total FLOPs of the same work under another convention."""
        return sum(sum(estimator.count(load, convention)) * times for estimator, load, times in self.terms)

    @property
    def totals(self) -> dict[str, int | None]:
        """The total under every convention; None where it cannot be known (of a traced model, all but full)."""
        known = ("full",) if any(estimator.origin == "trace" for estimator, _, _ in self.terms) else CONVENTIONS
        return {convention: self.total_under(convention) if convention in known else None for convention in CONVENTIONS}

    def by_component(self) -> dict[str, tuple[int, int, int, int]]:
        """Component -> forward, backward, recomputed, clipping FLOPs; all components, in a fixed order."""
        return {**dict.fromkeys(PARTS, (0, 0, 0, 0)), **self._sum_by(lambda op: op.part)}

    def by_kind(self) -> dict[str, tuple[int, int, int, int]]:
        """Kind of operation (linear, conv, attend, …) -> forward, backward, recomputed, clipping FLOPs."""
        return self._sum_by(lambda op: op.kind)

    def _sum_by(self, key: Callable[[Op], str]) -> dict[str, tuple[int, int, int, int]]:
        sums: dict[str, tuple[int, int, int, int]] = {}
        for block, row, value, is_train, times, _ in self._rows():
            many = value * block.copies * times
            back = many if is_train else 0
            ahead, behind, again, clip = sums.get(key(row.op), (0, 0, 0, 0))
            sums[key(row.op)] = (
                ahead + row.forward * many, behind + row.backward * back, again + row.recompute * back,
                clip + row.clipping * back,
            )  # fmt: skip
        return sums

    def by_module(self, depth: int | None = None, *, per_layer: bool = False) -> list[ModuleRow]:
        """Rows per module path, layers folded into '*' unless per_layer, cut to `depth` names."""
        if depth is not None:
            check_size(depth, "depth")
        found: dict[str, _ModuleSum] = {}
        stages: dict[str, int] = {}
        for block, row, value, is_train, times, is_first in self._rows():
            layers: tuple[int | None, ...] = block.layers if block.layers is not None else (None,)
            groups = [(layer,) for layer in layers] if per_layer else [layers]
            for group in groups:
                prefix = block.path
                if block.layers is not None:
                    prefix += f".{group[0]}" if per_layer else ".*"
                path = join(prefix, row.op.name)
                names = path.split(".")
                cut = ".".join(names[:depth]) if depth is not None else path
                # Layers that count alike come together: their place in the model puts them back in order.
                place = (stages.setdefault(block.path, len(stages)), group[0] or 0, len(found))
                entry = found.setdefault(cut, _ModuleSum(place))
                many = value * len(group) * times
                entry.kinds.add(row.op.kind if cut == path else "module")
                entry.layers.update(group if "*" in cut.split(".") else (None,))
                entry.forward += row.forward * many
                if is_train:
                    entry.backward += row.backward * many
                    entry.recompute += row.recompute * many
                    entry.clipping += row.clipping * many
                if is_first:
                    entry.parameters += row.parameters * len(group)
        ordered = sorted(found.items(), key=lambda item: item[1].place) if per_layer else found.items()
        return [
            ModuleRow(
                path, next(iter(entry.kinds)) if len(entry.kinds) == 1 else "module", len(entry.layers),
                entry.forward, entry.backward, entry.recompute, entry.clipping, entry.parameters,
            )
            for path, entry in ordered
        ]  # fmt: skip

    def _rows(self) -> Iterable[tuple[Block, Row, int, bool, int, bool]]:
        """Every row with its feature's value, whether it trains, how often, and whether its model is met first."""
        seen: set[Any] = set()
        for estimator, load, times in self.terms:
            is_first = estimator.identity not in seen
            seen.add(estimator.identity)
            for block, row, value in estimator.rows(load, estimator.convention):
                yield block, row, value, load.phase == "train", times, is_first

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters of the model; of all models, where estimates of several were added."""
        found = [each.parameters() for each in {each.identity: each for each, _, _ in self.terms}.values()]
        keys = [key for key in ("total", "active", "trainable") if all(key in each for each in found)]
        return {key: sum(each[key] for each in found) for key in keys}  # a trace does not know the active ones

    @property
    def notes(self) -> list[str]:
        notes = list(self._notes)
        for estimator, load, _ in self.terms:
            notes += [note for note in estimator.notes(load) if note not in notes]
        return notes

    def to_dict(self, depth: int | None = None) -> dict[str, Any]:
        """The object that `flopcalc estimate --json` prints, without mfu and hfu, which need a step time."""
        from flopcalc._version import __version__

        estimator = self.terms[0][0]
        notes = self.notes
        if self.recompute:
            notes.append("the backward of components and modules includes what is recomputed in the backward pass")
        if self.clipping:
            notes.append("the backward of components and modules includes what clipping adds")
        return {
            "schema": 1,
            "version": __version__,
            "model": {
                "name": estimator.source.name,
                "model_type": estimator.source.config["model_type"],
                "spec": estimator.spec.name,
                "source": estimator.origin,
                "reference": estimator.spec.source,
            },
            "workload": _describe(self),
            "recipe": estimator.recipe.to_dict(),
            "convention": self.convention,
            "attention_kernel": self.attention_kernel,
            "flops": {
                "forward": self.forward,
                "backward": self.backward,
                "recompute": self.recompute,
                "clipping": self.clipping,
                "total": self.total,
            },
            "totals": self.totals,
            "components": [
                # What is recomputed and what clips runs in the backward pass, or right after it: counted there, so
                # that components sum to the total.
                {"name": name, "forward": forward, "backward": sum(rest)}
                for name, (forward, *rest) in self.by_component().items()
                if forward or any(rest)
            ],
            "modules": [
                {
                    "path": row.path,
                    "kind": row.kind,
                    "count": row.copies,
                    "forward": row.forward,
                    "backward": row.backward + row.recompute + row.clipping,
                    "parameters": row.parameters,
                }
                for row in self.by_module(depth)
            ],
            "parameters": self.parameters,
            "mfu": None,
            "hfu": None,
            "notes": notes,
        }

    def __repr__(self) -> str:
        estimator, load, times = self.terms[0]
        more = f" and {len(self.terms) - 1} more" if len(self.terms) > 1 else ""
        repeated = f" x {times}" if times > 1 else ""
        return (
            f"Estimate({format_flops(self.total)}: forward {format_flops(self.forward)}, backward "
            f"{format_flops(self.backward)}; {estimator.source.name}, {load.rows} x {load.seq} {load.phase}{repeated}"
            f"{more}; convention {self.convention})"
        )

    def _repr_html_(self) -> str:
        from flopcalc.report.estimate import format_html

        return format_html(self)


def _merge_terms(terms: tuple[tuple[Estimator, Workload, int], ...]) -> tuple[tuple[Estimator, Workload, int], ...]:
    """The same workload on the same model several times is one term with a count."""
    merged: dict[Any, tuple[Estimator, Workload, int]] = {}
    for estimator, load, times in terms:
        key = (estimator.identity, load)
        before = merged.get(key, (estimator, load, 0))
        merged[key] = (before[0], before[1], before[2] + times)
    return tuple(merged.values())


class _ModuleSum:
    __slots__ = ("backward", "clipping", "forward", "kinds", "layers", "parameters", "place", "recompute")

    def __init__(self, place: tuple[int, int, int]) -> None:
        self.place = place
        self.kinds: set[str] = set()
        self.layers: set[int | None] = set()
        self.forward = self.backward = self.recompute = self.clipping = self.parameters = 0


def _describe(estimate: Estimate) -> dict[str, Any]:
    """The workload in numbers: sizes of the first term, totals over all."""
    _, load, times = estimate.terms[0]
    is_mixed = len({other.layout for _, other, _ in estimate.terms}) > 1
    images = patches = visual = 0
    for each, other, many in estimate.terms:
        images += len(other.all_grids) * many
        patches += each.count_patches(other) * many
        visual += each.count_visual_tokens(other) * many
    return {
        "batch": load.rows,
        "seq": load.seq,
        "lengths": list(load.documents) if load.documents is not None else None,
        "layout": "mixed" if is_mixed else load.layout,
        "grad_accum": times,
        "tokens": estimate.tokens,
        "images": images,
        "patches": patches,
        "visual_tokens": visual,
        "phase": load.phase,
        "context": (load.decoder or load).context if load.phase == "decode" else None,
        "logits": load.logits,
        **({"decoder_seq": load.decoder.seq} if load.decoder is not None else {}),
        **({"clips": list(load.clips)} if load.clips else {}),
    }


def bind(
    model: Any,
    example_batch: Mapping[str, Any] | None = None,
    *,
    recipe: Recipe | Mapping[str, Any] | None = None,
    convention: str | None = None,
    attention_kernel: str = "auto",
    device: str | None = None,
    dtype: str = "bf16",
    spec: str | os.PathLike[str] | None = None,
    download: bool = False,
    phases: Iterable[str] = ("train", "forward"),
    dims: Mapping[str, Any] | None = None,
    clipping: str | None = None,
) -> Estimator:
    """The fast estimator of a model for a loop: a callable with estimate_flops' workload arguments.

    With `example_batch` (keyword arguments of its forward) any torch.nn.Module is traced instead of read from a spec:
    for `phases`, under convention full; `dims` says which axes are batch ('b') and length ('n') where it is not plain.

    The convention is model unless said otherwise. `device` says which kernel "auto" stands for (without one it is
    SDPA's flash kernel), and whose measured constants convention hardware uses; they were measured in bf16, so another
    `dtype` takes none. `clipping` is the recipe's, for a live model too, which cannot say it itself.
    """
    if example_batch is not None:
        if recipe is not None or spec is not None or convention not in (None, "full") or clipping is not None:
            raise FlopcalcError(
                "a module that is traced says itself what trains, under convention full: give neither recipe, spec, "
                "clipping nor another convention with example_batch"
            )
        from flopcalc.measure.trace.polynomials import trace_module  # torch: only where a module is traced

        return trace_module(model, example_batch, phases=tuple(phases), dims=dims)
    convention = "model" if convention is None else convention
    table, tiles = None, None
    if device is not None:
        found = find_device(device)
        attention_kernel = (found.sdpa or "flash") if attention_kernel == "auto" else attention_kernel
        if attention_kernel != "eager" and dtype == "bf16":
            from flopcalc.hardware.kernels import (  # read tables: only where a device is named
                find_kernel_table,
                find_tile_table,
            )

            table, tiles = find_kernel_table(found.id, attention_kernel), find_tile_table(found.id)
    specs = {}
    # DDP and Opacus hide the config of what they wrap.
    source = load_config(model if hasattr(model, "config") else strip(model), download=download)
    if spec is not None:
        added = load_spec(os.fspath(spec))
        specs[added.name] = added
    if isinstance(recipe, Mapping):
        is_said = "recompute" in recipe or source.module is None
        recipe = _read_recipe(recipe)
        recipe = recipe if is_said else recipe._replace(recompute=read_recompute(source.module))
    elif recipe is not None and not isinstance(recipe, Recipe):
        raise RecipeError(f"a recipe is a mapping or what make_recipe() gives, not {format_value(recipe)}")
    estimator = Estimator(source, recipe, convention, attention_kernel, specs, table, tiles, clipping)
    if specs and estimator.spec.name not in specs and not _uses_inner(source.config, specs):
        raise ConfigError(
            f"{spec} describes model_type {next(iter(specs))!r}, but {source.where} is {source.config['model_type']!r}"
        )
    return estimator


def _read_recipe(given: Mapping[str, Any]) -> Recipe:
    known = ("freeze", "train_only", "lora", "recompute", "clipping")
    for key in given:
        if key not in known:
            raise RecipeError(f"recipe: unknown key {format_value(key)}; known: {', '.join(known)}")
    return make_recipe(**given)


def _uses_inner(config: Mapping[str, Any], specs: Mapping[str, Spec]) -> bool:
    return any(isinstance(value, Mapping) and value.get("model_type") in specs for value in config.values())


def estimate_flops(
    model: Any,
    *,
    batch_size: int = 1,
    seq_len: int | None = None,
    image_grid_thw: Any = None,
    video_grid_thw: Any = None,
    lengths: Iterable[int] | None = None,
    batch: Mapping[str, Any] | None = None,
    phase: str = "train",
    context: int | None = None,
    logits: int | str | None = None,
    decoder_seq_len: int | None = None,
    clips: Iterable[int] | None = None,
    audio: Iterable[float] | None = None,
    recipe: Recipe | Mapping[str, Any] | None = None,
    convention: str = "model",
    attention_kernel: str = "auto",
    device: str | None = None,
    spec: str | os.PathLike[str] | None = None,
    clipping: str | None = None,
) -> Estimate:
    """FLOPs of one step, exactly: `model` is a preset's name, a path, a mapping, a HF config or a HF model."""
    estimator = bind(
        model, recipe=recipe, convention=convention, attention_kernel=attention_kernel, device=device, spec=spec,
        clipping=clipping,
    )  # fmt: skip
    if batch is not None:
        _check_alone(
            batch_size, seq_len, lengths, image_grid_thw, video_grid_thw, context, decoder_seq_len, clips, audio
        )
        return estimator.estimate_batch(batch, phase=phase, logits=logits)
    return estimator(
        batch_size, seq_len, image_grid_thw=image_grid_thw, video_grid_thw=video_grid_thw, lengths=lengths,
        phase=phase, context=context, logits=logits, decoder_seq_len=decoder_seq_len, clips=clips, audio=audio,
    )  # fmt: skip
