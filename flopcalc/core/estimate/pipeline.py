"""PipelineEstimator: a diffusion pipeline in; FLOPs of a training step or of sampling images and videos out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

from flopcalc.base.errors import ConfigError, WorkloadError, format_value
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_items, check_size
from flopcalc.base.vocabulary import PIPELINE_PHASES, Convention, Kernel, Phase, PipelinePhase, Recompute, check_word
from flopcalc.core.count.flops import Flops
from flopcalc.core.count.products import CountedRow, Weights
from flopcalc.core.estimate.counted import CountedEstimator
from flopcalc.core.estimate.estimate import Estimate, Estimator
from flopcalc.core.estimate.inputs import Inputs, read_call
from flopcalc.core.estimate.sampling import PartRun, Sampling
from flopcalc.core.images.latents import Latents
from flopcalc.core.model.bound import BoundModel, bind_model
from flopcalc.core.model.components import Pipeline, read_pipeline
from flopcalc.core.model.config import Source
from flopcalc.core.model.ops import Op, Pointwise, Stage, Weighted, join, map_ops
from flopcalc.core.recipe.recipe import make_recipe
from flopcalc.core.spec.merge import list_pipelines
from flopcalc.core.spec.spec import find_spec
from flopcalc.core.workload.workload import Workload
from flopcalc.hardware.devices import Device

_DENOISER, _TEXT, _IMAGE, _VAE, _BESIDE, _PERTURBED = (
    "denoiser", "text_encoder", "image_encoder", "vae", "controlnet", "perturbed",
)  # fmt: skip
_COMPONENTS = {_TEXT: "text_encoder", _IMAGE: "vision", _VAE: "vae"}  # of all work in a part of this kind
FROZEN = make_recipe(freeze=["*"])


class PipelinePart(NamedTuple):
    """A frozen part of a pipeline: an encoder, the VAE, or the denoiser of the later steps."""

    name: str
    kind: str
    estimator: CountedEstimator


class SampleRequest(NamedTuple):
    """A user's description of one sample of a diffusion model."""

    batch: int = 1
    size: tuple[int, int] | None = None  # width and height in pixels
    frames: int | None = None
    text: int | None = None
    steps: int | None = None
    guidance: bool | None = None
    parts: tuple[str, ...] | None = None
    phase: PipelinePhase = "train"
    strength: float | None = None
    images_per_prompt: int = 1
    references: int | None = None


class PipelineEstimator(Estimator):
    """A pipeline's denoiser with its text encoders and its VAE, or a denoiser by itself."""

    origin = "spec"

    def __init__(
        self,
        denoiser: CountedEstimator,
        pipeline: Pipeline | None = None,
        parts: tuple[PipelinePart, ...] = (),
        uncounted: tuple[str, ...] = (),
        others: tuple[PipelineEstimator, ...] = (),
    ) -> None:
        latents = denoiser.model.latents
        assert latents is not None  # else it is no denoiser
        self.denoiser, self.pipeline, self.parts = denoiser, pipeline, parts
        self.uncounted, self.others = uncounted, others
        self._name = pipeline.denoiser if pipeline is not None else _DENOISER
        # Of the parts, where this pipeline runs in another one: their names there.
        self._names: Mapping[str, str] = pipeline.tables.get("parts", {}) if pipeline is not None else {}
        self.latents: Latents = latents
        self.source, self.spec, self.stages = denoiser.source, denoiser.spec, denoiser.stages
        self.vision, self.audio, self.has_decoder, self.has_text_encoder = None, None, False, True
        self.recipe, self.convention, self.formats = denoiser.recipe, denoiser.convention, denoiser.formats
        self.attention_kernel, self.identity = denoiser.attention_kernel, denoiser.identity
        self.head, self.mtp, self.renamed = denoiser.head, denoiser.mtp, denoiser.renamed

    def ask(self, asked: SampleRequest) -> Estimate:
        """FLOPs of a step, or of sampling, on such samples."""
        phase = check_word(asked.phase, PIPELINE_PHASES, "phase", WorkloadError)
        samples = phase == "sample"
        self._check(asked, samples)
        pipeline, latents = self.pipeline, self.latents
        width, height, frames, notes = self._find_size(asked)
        notes = (*notes, *self._describe_parts(samples, width, height))
        sizes = pipeline.tables.get("sizes") if pipeline is not None else None
        if sizes is not None and [width, height] not in sizes:
            known = ", ".join(f"{wide}x{high}" for wide, high in sizes)
            raise WorkloadError(f"{width}x{height}: {self.source.name} makes images of these sizes alone: {known}")
        multiple = pipeline.tables.get("multiple", 1) if pipeline is not None else 1
        if width % multiple or height % multiple:
            raise WorkloadError(
                f"{width}x{height}: {self.source.name} makes images whose width and height are multiples of {multiple}"
            )
        pixels, per_frame = self._find_factors()
        section, sections = frames, 1
        if pipeline is not None and (samples or asked.size is None):
            section, sections = pipeline.count_sections(frames, samples)
        grid = latents.make_grid(width, height, section, pixels, per_frame)
        text = self._find_text(asked)
        guided = samples and (
            asked.guidance if asked.guidance is not None else pipeline is not None and pipeline.guidance
        )
        steps = (asked.steps or (pipeline.steps if pipeline is not None else 1)) if samples else 1
        strength = asked.strength if asked.strength is not None or pipeline is None else pipeline.strength
        runs_of_steps = first = steps
        if samples and pipeline is not None:
            runs_of_steps = pipeline.count_runs(steps, strength)
            notes = (*notes, *pipeline.describe_runs(steps, runs_of_steps, strength))
            first = pipeline.count_first(steps, runs_of_steps)
        passes = int(pipeline.tables.get("passes", 2)) if guided and pipeline is not None else 1 + bool(guided)
        references = asked.references
        if references is None:  # given images that are read as tokens
            references = 0 if pipeline is None else int(pipeline.tables.get("references", 0))
        # Latents of what is given beside them.
        leading = pipeline.size("leading", 0, frames) if pipeline is not None and "leading" in pipeline.tables else 0
        grid = (grid[0] * (1 + references) + leading, *grid[1:])
        chosen = self._choose(asked.parts)
        batch = asked.batch * asked.images_per_prompt
        # Positions of text that the denoiser reads.
        read = pipeline.size("read", text) if pipeline is not None and "read" in pipeline.tables else text
        prompts = 1 if pipeline is None or not samples else int(pipeline.tables.get("prompts", 1))
        runs: list[PartRun] = []
        terms: list[Estimate] = []

        def add(name: str, kind: str, estimate: Estimate) -> None:
            terms.append(estimate)
            runs.append(
                PartRun(name, kind, estimate.terms[0].estimator.spec.name, estimate.terms[0].times, estimate.flops)
            )

        def make_load(many: int, phase: Phase = "forward", text: int = read) -> Workload:
            return Workload(many, text, phase=phase, grids=(grid,) * many)

        # Most pipelines' passes cost the same, whether they are one call or several.
        calls = 1 if pipeline is not None and pipeline.tables.get("one_call") else passes
        if self._name in chosen and first:
            load = make_load(batch * prompts * passes // calls, "forward" if phase == "sample" else phase)
            add(self._name, _DENOISER, self.denoiser.estimate(load) * (first * calls * sections))
        for part in self.parts:
            if part.name not in chosen:
                continue
            if part.kind == _DENOISER:
                if runs_of_steps > first:
                    load = make_load(batch * passes // calls)
                    add(part.name, _DENOISER, part.estimator.estimate(load) * ((runs_of_steps - first) * calls))
            elif part.kind == _PERTURBED:
                if samples and pipeline is not None:
                    estimate = part.estimator.estimate(make_load(batch))
                    add(f"{pipeline.denoiser}, perturbed", _DENOISER, estimate * runs_of_steps)
            elif part.kind == _BESIDE:
                # Once in a step, with the prompt alone; or once in a run, for the images of a prompt.
                once = pipeline is not None and pipeline.tables.get("beside_once")
                times = runs_of_steps * (1 if once else calls + sum(other.kind == _PERTURBED for other in self.parts))
                load = make_load(
                    asked.batch if once == "run" else batch if once else batch * passes // calls,
                    text=read if pipeline is None else int(pipeline.tables.get("beside_text", read)),
                )
                add(part.name, _BESIDE, part.estimator.estimate(load) * (1 if once == "run" else times))
            elif part.kind == _IMAGE:
                pictures = 1 if pipeline is None else int(pipeline.tables.get("pictures", 1))
                add(part.name, _IMAGE, _encode_image(part, asked.batch) * pictures)
            elif part.kind == _TEXT:
                assert pipeline is not None
                length = pipeline.count_encoded(dict(pipeline.encoders)[part.name], text)
                estimate = part.estimator.estimate(Workload(asked.batch * prompts, length, phase="forward"))
                add(part.name, _TEXT, estimate * (2 if guided and pipeline.encodes_negative() else 1))
            else:
                times = latents.count_times(section, per_frame)
                side = latents.pack * (1 if pipeline is None else int(pipeline.tables.get("enlarged", 1)))
                places = (times, grid[1] * side, grid[2] * side)
                sides: dict[str, Any] = (
                    {"videos": (places,) * batch} if samples else {"grids": ((section, height, width),) * batch}
                )
                estimate = part.estimator.estimate(Workload(batch, 0, phase="forward", **sides))
                estimate *= int(pipeline.tables.get("decoded", 1)) * sections if pipeline is not None and samples else 1
                found = pipeline.count_given(frames, strength, bool(guided)) if pipeline is not None else []
                for given, encoded in [*found, (1, references)]:
                    if encoded:  # what the VAE encodes for the denoiser, once for a prompt
                        start = ((given, height, width),) * asked.batch
                        estimate += (
                            part.estimator.estimate(Workload(asked.batch, 0, phase="forward", grids=start)) * encoded
                        )
                add(part.name, _VAE, estimate)
        for inner in self.others if samples else ():
            wanted = tuple(name for name, own in inner._names.items() if own in chosen)
            if wanted:
                is_sized = inner.pipeline is not None and inner.pipeline.tables.get("sized")
                size, said = asked.size if is_sized else None, asked.text if inner.latents.text_key else None
                estimate = inner.ask(asked._replace(size=size, text=said, steps=None, strength=None, parts=wanted))
                run = estimate.pipeline
                assert run is not None  # it is a pipeline's
                terms.append(estimate)
                runs += [part._replace(name=inner._names.get(part.name, part.name)) for part in run.parts]
                notes = (*notes, f"{inner._names[inner._name]} runs {run.sampling_steps} steps")
        if not terms:
            raise WorkloadError("no part is left to count")
        whole = terms[0]
        for other in terms[1:]:
            whole += other
        run = Sampling(
            phase, width, height, frames, text, steps if samples else None, guided if samples else None, tuple(runs),
            passes // calls if runs[0].kind == _DENOISER else 1,
        )  # fmt: skip
        return Estimate(whole.terms, whole.flops, (*notes, *whole._notes), run)

    def _check(self, asked: SampleRequest, samples: bool) -> None:
        name = self.source.name
        for field, value in (
            ("sampling_steps", asked.steps),
            ("guidance", asked.guidance),
            ("strength", asked.strength),
            ("images_per_prompt", asked.images_per_prompt > 1 or None),
        ):
            if value is not None and not samples:
                raise WorkloadError(f"{spell(field)} belongs to phase sample, not {asked.phase}")
        own = self.pipeline
        if asked.strength is not None and (own is None or own.strength is None):
            ways = [
                f"; {spell('model_type', each)} takes it"
                for each in list_pipelines()
                if own and each == own.name.replace("Pipeline", "Img2ImgPipeline")
            ]
            raise WorkloadError(f"{spell('strength')}: {name} runs all of its steps{''.join(ways)}")
        if asked.strength is not None and asked.strength > 1:
            raise WorkloadError(f"{spell('strength')} must be at most 1, not {asked.strength:g}")
        if asked.references is not None and (own is None or "references" not in own.tables):
            raise WorkloadError(f"{spell('references')}: {name} reads no given images as tokens")
        if asked.phase in ("prefill", "decode"):
            raise WorkloadError(f"{name} is a diffusion model: its phases are train, forward and sample")
        if self.pipeline is None and samples and asked.steps is None:
            raise WorkloadError(
                f"{name} is a denoiser without its pipeline: say how often it runs ({spell('sampling_steps', 'N')})"
            )

    def _find_size(self, asked: SampleRequest) -> tuple[int, int, int, tuple[str, ...]]:
        """Width, height and frames; what the pipeline takes by itself where none is said, with a note."""
        if asked.size is not None:
            return *asked.size, asked.frames or 1, ()
        if self.pipeline is None:
            what = spell("video", "WxHxFRAMES") if self.latents.takes_videos else spell("image", "WxH")
            raise WorkloadError(f"how large are the images? Give {what}")
        width, height, frames = (self.pipeline.size(key) for key in ("width", "height", "frames"))
        size = f"{width}x{height}" + (f"x{frames}" if frames > 1 else "")
        note = f"no size given: {size}, as {self.pipeline.name} takes by itself"
        return width, height, frames, () if self._names else (note,)

    def _describe_parts(self, samples: bool, width: int, height: int) -> tuple[str, ...]:
        """What should be known of the pipeline's parts, and of sizes that it changes by itself."""
        notes = list(self.uncounted)
        pipeline = self.pipeline
        if pipeline is not None and "references" in pipeline.tables:
            notes.append("given images are counted at the size of the output")
        if pipeline is None or not samples:
            return tuple(notes)
        if pipeline.second and "first" not in pipeline.tables and any(part.kind == _DENOISER for part in self.parts):
            notes.append(pipeline.describe_split())
        if pipeline.tables.get("binned") and (width, height) != (
            own := (pipeline.size("width"), pipeline.size("height"))
        ):
            notes.append(
                f"counted at {width}x{height}; unless use_resolution_binning is False, {pipeline.name} makes the image "
                f"at the nearest of its own sizes, of about {own[0]}x{own[1]} pixels, and resizes it"
            )
        return tuple(notes)

    def _find_factors(self) -> tuple[int, int]:
        """Pixels and frames of one latent, as the pipeline's VAE makes them; 0 where it has none."""
        part = next((part for part in self.parts if part.kind == _VAE), None)
        if part is None:
            return 0, 0
        latents = part.estimator.model.latents
        return (latents.pixels, latents.frames) if latents is not None else (0, 0)

    def _find_text(self, asked: SampleRequest) -> int:
        reads = bool(self.latents.text_key)
        if asked.text is not None and not reads:
            raise WorkloadError(f"{self.source.name} reads no text: leave {spell('text')} out")
        if asked.text is not None:
            return check_size(asked.text, "text")
        if not reads:
            return 0
        if self.pipeline is not None and self.pipeline.tables.get("text") == "":
            raise WorkloadError(
                f"{self.source.name}: its text encoder reads the given image too. Say with {spell('text')} how many "
                f"positions it hands on"
            )
        return self.pipeline.count_text() if self.pipeline is not None else self.latents.length

    def _list_words(self) -> dict[str, set[str]]:
        """Words that name parts, and which."""
        words: dict[str, set[str]] = {
            "denoiser": {self._name, *(part.name for part in self.parts if part.kind == _DENOISER)},
            "all": {self._name, *(part.name for part in self.parts)},
        }
        if self.pipeline is not None:
            words[self._name] = {self._name}
            for kind, names in ((_TEXT, ("text", "text_encoders")), (_VAE, ())):
                found = {part.name for part in self.parts if part.kind == kind}
                words |= dict.fromkeys(names, found)
            words |= {part.name: {part.name} for part in self.parts}
        for other in self.others:
            for word, chosen in other._list_words().items():
                words.setdefault(other._names.get(word, word), set()).update(other._names[name] for name in chosen)
        return words

    def _choose(self, asked: tuple[str, ...] | None) -> set[str]:
        """Names of the parts to count."""
        words = self._list_words()
        if asked is None:
            return words["all"]
        chosen: set[str] = set()
        for word in asked:
            if word not in words:
                known = ", ".join(words)
                raise WorkloadError(
                    f"{spell('parts')}: {self.source.name} has no part {format_value(word)}. Known: {known}"
                )
            chosen |= words[word]
        return chosen

    def __call__(self, batch_size: int | None = None, seq_len: int | None = None, **sizes: Any) -> Estimate:
        """FLOPs of a step or of sampling; sizes as estimate_flops takes them."""
        batch = sizes.get("batch")
        if not isinstance(batch, (int, str, NoneType)):
            return self.estimate_batch(batch, phase=sizes.get("phase", "train"))
        return self.estimate_inputs(read_call({"batch_size": batch_size, "seq_len": seq_len, **sizes}))[0]

    def estimate_inputs(self, inputs: Inputs) -> tuple[Estimate, list[str]]:
        return self.ask(read_inputs(self, inputs)), []

    def estimate(self, load: Workload, notes: tuple[str, ...] = ()) -> Estimate:
        """FLOPs of one step of the denoiser alone, on latents as it is given them."""
        return self.denoiser.estimate(load, notes)

    def estimate_batch(
        self,
        batch: Mapping[str, object],
        *,
        phase: Phase = "train",
        logits: int | str | None = None,
        read_device: bool = True,
    ) -> Estimate:
        """FLOPs of one step of the denoiser on what its forward is given."""
        return self.denoiser.estimate_batch(batch, phase=phase, logits=logits, read_device=read_device)

    def change(
        self,
        *,
        recompute: Recompute | None = None,
        convention: Convention | None = None,
        attention_kernel: Kernel | None = None,
        compute: str | None = None,
        device: Device | None = None,
    ) -> PipelineEstimator:
        changes: dict[str, Any] = {
            "convention": convention,
            "attention_kernel": attention_kernel,
            "compute": compute,
            "device": device,
        }
        parts = tuple(part._replace(estimator=part.estimator.change(**changes)) for part in self.parts)
        denoiser = self.denoiser.change(recompute=recompute, **changes)
        others = tuple(other.change(**changes) for other in self.others)
        return PipelineEstimator(denoiser, self.pipeline, parts, self.uncounted, others)

    def count(self, load: Workload, convention: Convention) -> Flops:
        return self.denoiser.count(load, convention)

    def count_formats(self, load: Workload, convention: Convention) -> dict[str, Flops]:
        return self.denoiser.count_formats(load, convention)

    def count_weights(self) -> list[Weights]:
        return self.denoiser.count_weights()

    def rows(self, load: Workload, convention: Convention) -> list[CountedRow]:
        return self.denoiser.rows(load, convention)

    def parameters(self) -> dict[str, int]:
        inner = (*(part.estimator for part in self.parts), *self.others)
        found = [self.denoiser.parameters(), *(each.parameters() for each in inner)]
        return {key: sum(each[key] for each in found) for key in found[0]}

    def notes(self, load: Workload) -> list[str]:
        return self.denoiser.notes(load)

    @property
    def is_diffusion(self) -> bool:
        return True

    def count_tokens(self, load: Workload) -> int:
        return self.denoiser.count_tokens(load)

    def count_visual_tokens(self, load: Workload) -> int:
        return self.denoiser.count_visual_tokens(load)


def read_inputs(estimator: PipelineEstimator, inputs: Inputs) -> SampleRequest:
    """A setup's inputs as a request to a diffusion model."""
    if len(inputs.image) + len(inputs.video) > 1 and not inputs.of_batch:
        raise WorkloadError(f"{estimator.source.name} makes one image or video per sample: give one size")
    for flag, value in (
        (spell("seq"), inputs.seq),
        (spell("lengths"), inputs.lengths),
        (spell("decoder_seq"), inputs.decoder_seq),
        (spell("image_grid"), inputs.image_grid or None),
        (spell("video_grid"), inputs.video_grid or None),
        (spell("audio"), inputs.audio or None),
        (spell("max_pixels"), inputs.max_pixels),
        (spell("context"), inputs.context),
        (spell("logits"), inputs.logits),
        (spell("clips"), inputs.clips or None),
    ):
        if value is not None:
            raise WorkloadError(
                f"{flag}: {estimator.source.name} is a diffusion model; give {spell('image')} or "
                f"{spell('video')}, {spell('text')}"
            )
    batch, steps = inputs.batch or 1, inputs.sampling_steps
    if inputs.image and inputs.video:
        raise WorkloadError("images and videos are both given: a diffusion model makes one of them")
    if inputs.video and not estimator.latents.takes_videos:
        raise WorkloadError(f"{spell('video')}: {estimator.source.name} takes no videos")
    size = _read_sizes(inputs.image, batch, 2, "images") or _read_sizes(inputs.video, batch, 3, "videos")
    return SampleRequest(
        batch,
        None if size is None else (size[0], size[1]),
        size[2] if size is not None and inputs.video else None,
        inputs.text,
        steps,
        read_guidance(inputs.guidance),
        read_parts(inputs.parts),
        "sample" if steps is not None and inputs.phase == "train" else inputs.phase,
        inputs.strength,
        inputs.images_per_prompt or 1,
        inputs.references,
    )


def read_guidance(value: bool | str | None) -> bool | None:
    """'on', 'off', a truth, or None for what the pipeline does."""
    if value is None or isinstance(value, bool):
        return value
    if value not in ("on", "off"):
        raise WorkloadError(f"guidance must be on or off, not {format_value(value)}")
    return value == "on"


def read_parts(value: Iterable[str] | str | None) -> tuple[str, ...] | None:
    """Names of parts: a list, or words with commas or plus signs between."""
    if value is None:
        return None
    words = value.replace("+", ",").split(",") if isinstance(value, str) else check_items(value, "parts")
    found = tuple(str(word).strip() for word in words)
    if not found or not all(found):
        raise WorkloadError(f"parts must name parts of the pipeline, not {format_value(value)}")
    return found


def _read_sizes(given: Sequence[Any], batch: int, many: int, what: str) -> tuple[int, ...] | None:
    """The one size of all samples: one entry, or the same for each."""
    if not given:
        return None
    sizes: list[tuple[int, ...]] = []
    for entry in given:
        numbers = entry.lower().split("x") if isinstance(entry, str) else entry
        try:
            numbers = tuple(int(number) for number in numbers)
        except (TypeError, ValueError):
            numbers = ()
        if len(numbers) != many:
            form = "(width, height)" if many == 2 else "(width, height, frames)"
            raise WorkloadError(f"{what}: {format_value(entry)} is not {form}")
        sizes.append(tuple(check_size(number, what) for number in numbers))
    if len(sizes) not in (1, batch) or len(set(sizes)) != 1:
        raise WorkloadError(f"{what}: all {batch} samples of a diffusion model have one size; give it once")
    return sizes[0]


def bind_pipeline(
    source: Source, make: Callable[[BoundModel, bool], CountedEstimator], stage: Mapping[str, Any] | None = None
) -> PipelineEstimator:
    """The estimator of a pipeline's config; `make` gives a bound model its estimator (denoiser or frozen part).

    `stage`: how another pipeline runs this one, whose parts are frozen then.
    """
    pipeline = read_pipeline(source.config, source.where, stage)
    own = stage["parts"] if stage is not None else {}
    inner = dict(source.config[pipeline.denoiser])
    inner.setdefault("model_type", inner.get("_class_name"))
    _check_class(inner["model_type"], source, pipeline.denoiser)
    inner |= pipeline.list_passed()
    if stage is None:
        denoiser = make(bind_model(source.replace(config=inner, where=f"{source.where}: {pipeline.denoiser}")), False)
    else:
        denoiser = make(_bind_part(source, own[pipeline.denoiser], _DENOISER, inner), True)
    if denoiser.model.latents is None:
        raise ConfigError(f"{source.where}: its {pipeline.denoiser} is no denoiser that flopcalc describes")
    parts = []
    for name, kind in _list_parts(pipeline):
        found = source.config.get(name)
        several = enumerate(found) if isinstance(found, list) else ()
        for part, config in [(f"{name}.nets.{number}", each) for number, each in several] or [(name, found)]:
            if isinstance(config, Mapping):
                if kind == _DENOISER:
                    config = {"model_type": config.get("_class_name"), **config, **pipeline.list_passed()}
                config = {**config, **pipeline.list_passed(name)}
                bound = _bind_part(source, own.get(name, part), kind, config)
                parts.append(PipelinePart(part, kind, make(bound, True)))
    for modules in pipeline.perturbed:
        parts.append(PipelinePart(_DENOISER, _PERTURBED, make(_perturb(denoiser.model, modules), True)))
    others = []
    for table in pipeline.tables.get("stages", ()):
        given = {name: source.config[whole] for name, whole in table["parts"].items() if source.config.get(whole)}
        others.append(bind_pipeline(source.replace(config={**given, "_class_name": table["pipeline"]}), make, table))
    uncounted = tuple(pipeline.list_uncounted(source.config))
    return PipelineEstimator(denoiser, pipeline, tuple(parts), uncounted, tuple(others))


def _perturb(model: BoundModel, modules: Sequence[str]) -> BoundModel:
    """The denoiser where these modules attend to nothing: every place keeps its own value (perturbed attention)."""
    left = [name for module in modules for name in (module, f"{module}.to_q", f"{module}.to_k")]

    def change(path: str, op: Op) -> Op:
        if any(fnmatchcase(join(path, op.name), name) for name in left):
            return Pointwise(name="", part=op.part, rows=op.rows)
        return op.replace(again=True) if isinstance(op, Weighted) else op  # its weights are the denoiser's

    def put(stage: Stage) -> Stage:
        layers = enumerate(stage.layers, stage.first)
        paths = ((f"{stage.path}.{number}" if stage.repeated else stage.path, chain) for number, chain in layers)
        return stage.replace(layers=tuple(map_ops(chain, partial(change, path)) for path, chain in paths))

    # A live denoiser itself says what trains; nothing does here.
    source = model.source.replace(module=None)
    return replace(model, source=source, stages=tuple(put(stage) for stage in model.stages))


def _list_parts(pipeline: Pipeline) -> list[tuple[str, str]]:
    """Names and kinds of a pipeline's parts other than its denoiser."""
    second = [(pipeline.second, _DENOISER)] if pipeline.second else []
    texts = [(name, _TEXT) for name, _ in pipeline.encoders]
    beside = [(name, _BESIDE) for name in pipeline.beside]
    return [*second, *beside, *texts, *((name, _IMAGE) for name in pipeline.image_encoders), (pipeline.vae, _VAE)]


def _encode_image(part: PipelinePart, batch: int) -> Estimate:
    """An image encoder on one image per sample, at the one size that it takes."""
    vision = part.estimator.model.vision
    assert vision is not None  # else it encodes no images
    return part.estimator.estimate(Workload(batch, 0, phase="forward", grids=((1, vision.side, vision.side),) * batch))


def _check_class(named: object, source: Source, part: str) -> None:
    if not isinstance(named, str):
        raise ConfigError(f"{source.where}: {part}: no class is named (model_index.json or architectures)")


def _bind_part(source: Source, name: str, kind: str, config: Mapping[str, Any]) -> BoundModel:
    """A part with its modules below its own name; all work of a frozen one is one component."""
    # A pipeline is loaded in one format, whatever its parts were saved in; a live one has its own.
    left = ("torch_dtype", "architectures", *(() if source.module is not None else ("dtype",)))
    plain = {key: value for key, value in config.items() if key not in left}
    listed = config.get("architectures")
    named = config.get("_class_name") or (listed[0] if isinstance(listed, list) and listed else None)
    _check_class(named, source, name)
    where = f"{source.where}: {name}"
    # A class with a spec of its own; else its type's spec says what the class runs (Qwen3Model, Qwen3ForCausalLM).
    is_typed = "model_type" in plain and find_spec(str(named)) is None
    typed = {"architectures": [named]} if is_typed else {"model_type": named}
    model = bind_model(Source(source.name, {**plain, **typed}, where), is_part=kind != _DENOISER)

    def move(op: Op) -> Op:
        moved = op.replace(
            part=_COMPONENTS.get(kind, op.part), name=f"/{name}.{op.name[1:]}" if op.name.startswith("/") else op.name
        )
        if isinstance(moved, Weighted) and moved.tied:
            return moved.replace(tied=f"{name}.{moved.tied}")
        return moved

    def share(op: Op) -> Op:
        return op.replace(again=True) if isinstance(op, Weighted) else op  # its weights are the denoiser's

    def put(stage: Stage) -> Stage:
        reads = None if stage.reads is None else (f"{name}.{stage.reads[0]}", stage.reads[1])
        adds = None if stage.adds is None else f"{name}.{stage.adds}"
        stage = stage.map_ops(share) if stage.path.startswith(tuple(config.get("shared_modules", ()))) else stage
        return stage.map_ops(move).replace(path=f"{name}.{stage.path}", reads=reads, adds=adds)

    return replace(model, stages=tuple(put(stage) for stage in model.stages))
