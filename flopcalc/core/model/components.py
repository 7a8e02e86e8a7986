"""A diffusers pipeline's config: the class, what it does by itself, and the configs of its parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flopcalc.base.errors import ConfigError, SpecError, format_nearest, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.units import parse_exact
from flopcalc.core.spec.expressions import MissingNameError, Number, evaluate, evaluate_truth
from flopcalc.core.spec.merge import check_keys, list_pipelines
from flopcalc.core.spec.spec import find_spec

_KEYS = {
    "source", "denoiser", "steps", "guidance", "encodes_negative", "text", "read", "width", "height", "frames",
    "given", "encoded", "defaults", "encoders", "image_encoders", "passed", "second", "binned", "passes", "strength",
    "rounded_up", "references", "sizes", "beside", "beside_once", "siblings",
    "perturbed", "vae", "multiple", "merged", "decoded", "pictures", "one_call", "passed_parts", "section", "sections",
    "leading", "beside_text", "stages", "prompts", "notes", "last", "parts", "pipeline", "sized", "enlarged", "blocks",
    "first",
}  # fmt: skip
DENOISERS = ("transformer", "unet")  # folders of a pipeline
SCHEDULER = "scheduler"
_DOTS = ("", ".", "..")
_WARM = 4  # steps of PNDM's warm-up
# Schedulers of the second order: two calls a step, but the last (diffusers 0.42.1, `order` of each class).
_TWICE = (
    "DPMSolverSDEScheduler", "FlowMatchHeunDiscreteScheduler", "HeunDiscreteScheduler", "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler", "KarrasVeScheduler",
)  # fmt: skip
_TIMES = 1000  # timesteps in training
_SHIFT = 3.0  # Wan's flow_shift: huggingface/diffusers, scripts/convert_wan_to_diffusers.py


@frozen()
class Pipeline(Value):
    """What a pipeline's class does: which parts it has, and what it takes where nothing is said."""

    name: str
    source: str
    denoiser: str  # the part that runs at every step
    steps: int
    guidance: bool  # whether a plain call runs the denoiser more than once in a step, also on an empty prompt
    encoders: tuple[tuple[str, str], ...]  # text encoder -> expression: its length
    values: PipelineNames
    tables: Mapping[str, Any]

    def count_text(self) -> int:
        """The length of the text that a plain call is padded to."""
        return self.size("text") if "text" in self.tables else 0

    def count_encoded(self, expression: str, text: int) -> int:
        return _check_whole(evaluate(expression, self.values.with_text(text)), expression)

    @property
    def second(self) -> str:
        """The part that denoises in place of the denoiser once there is little noise left; empty: none."""
        return str(self.tables.get("second", ""))

    @property
    def vae(self) -> str:
        """The part that makes pixels of latents."""
        return str(self.tables.get("vae", "vae"))

    @property
    def image_encoders(self) -> tuple[str, ...]:
        return tuple(map(str, self.tables.get("image_encoders", ())))

    @property
    def perturbed(self) -> tuple[tuple[str, ...], ...]:
        """For each further run of every step, the modules whose attention it leaves out (perturbed guidance)."""
        return tuple(tuple(evaluate(text, self.values)) for text in self.tables.get("perturbed", ()))

    @property
    def beside(self) -> tuple[str, ...]:
        """Parts that run before the denoiser at every step, on the same latents (ControlNets)."""
        return tuple(map(str, self.tables.get("beside", ())))

    def list_uncounted(self, config: Mapping[str, object]) -> list[str]:
        """Parts of a pipeline that nothing describes, in words."""
        known = {self.denoiser, self.second, self.vae, SCHEDULER, *(name for name, _ in self.encoders)}
        known |= {*self.image_encoders, *self.beside, *self.tables.get("merged", ())}
        known |= {name for stage in self.tables.get("stages", ()) for name in stage["parts"].values()}
        own, named = self.tables.get("blocks"), config.get("_blocks_class_name")
        other = "" if named in (None, own) else f", not with {named}, which its index names"
        return [
            *(
                [f"counted with {own}, the default blocks of {self.name}{other}; other blocks change the run"]
                if own
                else []
            ),
            *self.tables.get("notes", ()),
            *(
                f"{name} is not counted: there is no {part}"
                if isinstance(part, str)
                else f"{name} ({part.get('_class_name')}) is not counted"
                for name, part in config.items()
                if isinstance(part, str if name in known else Mapping)
            ),
        ]

    @property
    def strength(self) -> float | None:
        """The share of the steps that runs from a given image; None: all steps run, whatever is given."""
        found = self.tables.get("strength")
        return None if found is None else float(found)

    def count_runs(self, steps: int, strength: float | None) -> int:
        """How often the denoiser is called in so many sampling steps, as the scheduler's list of timesteps says."""
        calls, order = count_calls(self.values.find(SCHEDULER), steps)
        if strength is None:
            return calls
        left = steps * strength  # as diffusers computes it, in floats
        start = int(steps - left) if self.tables.get("rounded_up") else steps - int(left)
        return calls - max(start, 0) * order

    def describe_runs(self, steps: int, runs: int, strength: float | None) -> list[str]:
        """Why the denoiser is not called once in every step, in words."""
        scheduler = self.values.find(SCHEDULER)
        calls, _ = count_calls(scheduler, steps)
        notes = []
        if calls != steps:
            notes.append(f"{scheduler['_class_name']} runs the denoiser {calls} times in {steps} steps")
        if runs != calls:
            notes.append(f"strength {strength:g}: {runs} of {calls} runs of the denoiser are left")
        return notes

    def count_first(self, steps: int, runs: int) -> int:
        """Runs of the denoiser; the second one runs the rest, whose noise is below boundary_ratio.

        Steps are spaced as UniPCMultistepScheduler's for flow matching are (diffusers 0.42.1).
        """
        if "first" in self.tables:
            return min(int(self.tables["first"]), runs)
        boundary = self.values.find("boundary_ratio")
        if boundary is None or not isinstance(self.values.find(self.second), Mapping):
            return runs
        if isinstance(boundary, bool) or not isinstance(boundary, (int, float)) or not 0 <= boundary <= 1:
            raise ConfigError(f"{self.name}: boundary_ratio must lie between 0 and 1, not {format_value(boundary)}")
        shift = self._find_shift()
        linear = [1 - (1 - 1 / _TIMES) * step / steps for step in range(steps)]
        times = [int(_TIMES * min(shift * each / (1 + (shift - 1) * each), 1 - 1e-6)) for each in linear]
        return sum(time >= boundary * _TIMES for time in times)

    def _find_shift(self) -> float:
        scheduler = self.values.find(SCHEDULER)
        found = scheduler.get("flow_shift", scheduler.get("shift")) if isinstance(scheduler, Mapping) else None
        is_number = isinstance(found, (int, float)) and not isinstance(found, bool) and found > 0
        return float(found) if is_number and found is not None else _SHIFT

    def describe_split(self) -> str:
        """How two denoisers share the steps, in words."""
        if self.values.find("boundary_ratio") is None:
            return f"{self.second} does not run: the pipeline has no boundary_ratio"
        return (
            f"{self.second} runs the steps below boundary_ratio {self.values.find('boundary_ratio')}, as a flow_shift "
            f"of {self._find_shift():g} spaces them"
        )

    def count_given(self, frames: int, strength: float | None = None, guided: bool = False) -> list[tuple[int, int]]:
        """Frames of what the VAE encodes for the denoiser (an image, or a whole video), and how many of these."""
        share = 1 if strength is None else parse_exact(str(strength), "strength")
        values = self.values.with_text(0, frames, share, guided)
        given, encoded = (
            [_check_whole(evaluate(str(text), values), key) for text in (found if isinstance(found, list) else [found])]
            for key, found in (
                ("given", self.tables.get("given", "1")),
                ("encoded", self.tables.get("encoded", "1" if "given" in self.tables else "0")),
            )
        )
        return list(zip(given, encoded, strict=True))

    def count_sections(self, frames: int, samples: bool) -> tuple[int, int]:
        """Frames of what it makes at once, and how many of these a video needs; the whole video where it says none."""
        texts = (self.tables.get("section", frames), self.tables.get("sections", 1) if samples else 1)
        section, sections = (
            _check_whole(evaluate(str(text), self.values.with_text(0, frames)), "section") for text in texts
        )
        return section, sections

    def list_passed(self, part: str = "") -> dict[str, Any]:
        """Keys that the config of the denoiser, or of another part, gets from the pipeline: how it is called."""
        passed = self.tables.get("passed_parts", {}).get(part, {}) if part else self.tables.get("passed", {})
        try:
            return {name: evaluate(str(text), self.values) for name, text in passed.items()}
        except MissingNameError as error:
            raise ConfigError(
                f"{self.name}: missing key {error.name!r}, needed for its {part or self.denoiser}"
            ) from None

    def encodes_negative(self) -> bool:
        """Whether guidance encodes a second, empty prompt."""
        return evaluate_truth(str(self.tables.get("encodes_negative", "true")), self.values)

    def size(self, key: str, text: int = 0, frames: int = 1) -> int:
        """One of its expressions, as a whole number; 1 frame where it says none."""
        if key == "frames" and key not in self.tables:
            return 1
        try:
            return _check_whole(evaluate(str(self.tables[key]), self.values.with_text(text, frames)), key)
        except MissingNameError as error:
            raise ConfigError(f"{self.name}: missing key {error.name!r}, needed for its {key}") from None


class PipelineNames:
    """The names in a pipeline's expressions: keys of its config, dotted into its parts, and those of the call."""

    def __init__(
        self,
        config: Mapping[str, object],
        defaults: Mapping[str, object],
        text: int = 0,
        frames: int = 1,
        strength: Number = 1,
        guided: bool = False,
    ) -> None:
        self._config, self._defaults = config, defaults
        nets = config.get("controlnet")
        several = len(nets) if isinstance(nets, list) else 1
        self._sizes = {"text": text, "frames": frames, "strength": strength, "guided": guided, "nets": several}

    def with_text(self, text: int, frames: int = 1, strength: Number = 1, guided: bool = False) -> PipelineNames:
        return PipelineNames(self._config, self._defaults, text, frames, strength, guided)

    def find(self, name: str) -> Any:
        """A key of the config itself, or its default; None without one."""
        value = self._config.get(name)
        return self._defaults.get(name) if value is None else value

    def lookup(self, name: str) -> Any:
        if name in self._sizes:
            return self._sizes[name]
        part, _, key = name.partition(".")
        inner = self._config.get(part)
        if key and isinstance(inner, Mapping):
            value = inner.get(key)
            spec = find_spec(str(inner.get("_class_name"))) if value is None else None
            value = spec.defaults.get(key) if spec is not None else value
        else:
            value = inner if inner is not None else self._defaults.get(name)
        if value is None:
            raise MissingNameError(name)
        return value


# Classes that diffusers builds in place of an older one, by the kind of its norms.
_OLD = {"ada_norm_zero": "DiTTransformer2DModel", "ada_norm_single": "PixArtTransformer2DModel"}


def name_class(config: Mapping[str, object]) -> str:
    """The class that diffusers builds for a config."""
    name = str(config["_class_name"])
    return _OLD.get(str(config.get("norm_type")), name) if name == "Transformer2DModel" else name


def is_pipeline(config: Mapping[str, object]) -> bool:
    """Whether a config is a pipeline's, not a model's: parts of it are named by their folders."""
    return str(config.get("_class_name", "")).endswith("Pipeline")


def count_calls(scheduler: object, steps: int) -> tuple[int, int]:
    """Calls of the model in so many steps of a scheduler, and in a step of its usual kind; one without a scheduler."""
    name = scheduler.get("_class_name") if isinstance(scheduler, Mapping) else None
    if name == "PNDMScheduler":  # warms up: with Runge-Kutta's steps, or by a repeated step
        assert isinstance(scheduler, Mapping)
        if scheduler.get("skip_prk_steps"):
            return steps + (steps > 1), 1
        if steps < _WARM:
            raise ConfigError(f"PNDMScheduler without skip_prk_steps needs {_WARM} sampling steps, not {steps}")
        return steps + 9, 1
    if name == "ScoreSdeVeScheduler":  # corrects each step
        assert isinstance(scheduler, Mapping)
        return steps * (1 + int(scheduler.get("correct_steps", 1))), 1
    if name == "RePaintScheduler":  # goes ten steps back, nine times in every ten steps but the last ones
        return steps + 90 * len(range(0, steps - 10, 10)), 1
    return (2 * steps - 1, 2) if name in _TWICE else (steps, 1)


def read_pipeline(config: Mapping[str, object], where: str, changes: Mapping[str, Any] | None = None) -> Pipeline:
    """The pipeline that a config names, with keys of its description changed; a class without one is an error."""
    name = str(config["_class_name"])
    known = list_pipelines()
    if name not in known:
        raise ConfigError(
            f"{where}: pipeline {format_value(name)} is not described.{format_nearest(name, known)} Give the folder of "
            f"its denoiser, as transformer/ or unet/. `flopcalc models --coverage diffusers` lists pipelines"
        )
    path, tables = known[name][0], {**known[name][1], **(changes or {})}
    check_keys(tables, _KEYS, path)
    values = PipelineNames(config, tables.get("defaults", {}))
    try:
        denoiser, encoders = str(tables["denoiser"]), tables.get("encoders", {})
        found = Pipeline(
            name,
            str(tables["source"]),
            denoiser,
            int(tables["steps"]),
            evaluate_truth(str(tables["guidance"]).lower(), values),
            tuple((str(part), str(text)) for part, text in encoders.items() if text),
            values,
            tables,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"{path}: no pipeline: {type(error).__name__} {error}") from None
    if not isinstance(config.get(denoiser), Mapping):
        raise ConfigError(
            f"{where}: {name} needs its {denoiser}'s config ({config.get(denoiser, f'{denoiser}/config.json')})"
        )
    return found


def read_entry(part: str, entry: Sequence[Any]) -> tuple[object, str, str]:
    """What an index says of a part: its class, the repository that holds it (empty: this one), and the folder there."""
    said = entry[2] if len(entry) == 3 and isinstance(entry[2], Mapping) else {}  # of a modular pipeline
    hint, repo = said.get("type_hint"), str(said.get("pretrained_model_name_or_path") or "")
    named = hint[1] if entry[1] is None and isinstance(hint, (list, tuple)) and len(hint) == 2 else entry[1]
    return named, repo, str(said.get("subfolder") or ("" if repo else part))


def read_folder(
    index: Mapping[str, Any], folder: str, read: Any, find: Callable[[str, str], str | None]
) -> dict[str, Any]:
    """The config of a pipeline whose index was read, with those of its parts; of one without, the file that it lacks.

    A part that is not in the folder is looked for by `find`, in the repository that a modular pipeline names.
    """
    config = dict(index)
    for part, entry in index.items():
        if not isinstance(entry, (list, tuple)) or len(entry) not in (2, 3):
            continue
        del config[part]
        named, repo, inner = read_entry(part, entry)
        is_inside = all(name not in _DOTS and os.path.basename(name) == name for name in (part, inner or part))
        if not is_inside or not isinstance(named, str):  # never another folder's config
            continue
        file = "scheduler_config.json" if part == SCHEDULER else "config.json"
        inside, file = os.path.join(folder, inner or part, file), os.path.join(inner, file)
        path = inside if os.path.isfile(inside) else find(repo, file) if repo else None
        if part == SCHEDULER:
            config[part] = {"_class_name": named, **(read(path) if path else {})}
        elif path is None:
            config[part] = f"{file} of {repo}" if repo else file
        else:
            own = read(path)
            config[part] = {**own, "_class_name": name_class({**own, "_class_name": named})}
            if "MultiControlNet" in named:  # the others have folders beside it
                others = (os.path.join(folder, f"{part}_{number}", "config.json") for number in range(1, 20))
                config[part] = [own, *map(read, filter(os.path.isfile, others))]
    return config


def find_denoiser(folder: str) -> str | None:
    """The config.json of a denoiser in a folder that has no file about the whole."""
    paths = (os.path.join(folder, part, "config.json") for part in DENOISERS)
    return next((path for path in paths if os.path.isfile(path)), None)


def _check_whole(value: Any, what: str) -> int:
    if isinstance(value, bool) or getattr(value, "denominator", None) != 1 or not 0 <= value < 10**6:
        raise ConfigError(f"{what} must be a whole number, not {format_value(value)}")
    return int(value)
