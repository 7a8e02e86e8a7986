"""The frozen Setup: one question as typed values, from Python, the command line, a launch file or the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from flopcalc.base.errors import ConfigError, RecipeError, WorkloadError, format_nearest
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.spelling import find_field, spell
from flopcalc.base.units import describe_suffixes
from flopcalc.base.vocabulary import Clipping, Convention, Kernel, PipelinePhase
from flopcalc.core.estimate.inputs import SIZES, Inputs
from flopcalc.core.formats.formats import FormatOptions
from flopcalc.core.recipe.recipe import Recipe
from flopcalc.core.workload.workload import Workload, check_workload_alone
from flopcalc.setup.fields import FIELDS, Command, Field, Kind, list_fields
from flopcalc.setup.values import read_value

_RECIPE = ("freeze", "train_only", "lora", "recompute")
# What is printed with an estimate, and no part of it.
BESIDE = ("step_time", "tokens_per_second", "tokens", "mfu")
_REFUSED = {
    ("predict", "clipping"): "per-sample clipping is counted, not predicted",
    ("predict", "convention"): "it shows MFU and HFU, each under its own convention",
    ("translate", "convention"): "it shows every convention; {from} names that of the quoted number",
    ("plan", "batch"): "it searches the micro-batch; {micro_batch} fixes it, {global_batch} is the whole step's",
}


@frozen()
class ModelChoice(Value):
    """Which model, and how its config is read."""

    model: Any
    model_type: str | None = None
    spec: str | None = None
    download: bool = False
    head: str | None = None
    mtp: int | bool | None = None
    trace: bool = False


@frozen()
class Work(Value):
    """One sample and how many there are (or a whole Workload, or a real batch), and what makes a step of them."""

    inputs: Inputs
    workload: Workload | None = None
    real_batch: Mapping[str, Any] | None = None
    grad_accum: int | None = None
    global_batch: int | str | tuple[int, str] | None = None


@frozen()
class Place(Value):
    """On what: the device, how many, and what was measured there."""

    device: str | None = None
    gpus: int | None = None
    shared: int = 1  # GPUs that work on one micro-batch: tp · pp · cp
    peak: Any = None
    step_time_s: float | None = None
    tokens_per_second: float | None = None

    @property
    def count(self) -> int:
        """GPUs of the job."""
        return self.shared if self.gpus is None else self.gpus

    @property
    def replicas(self) -> int:
        """Micro-batches that run at once."""
        if self.count % self.shared:
            raise WorkloadError(f"{self.count} GPUs are no multiple of tp · pp · cp = {self.shared}")
        return self.count // self.shared


@frozen()
class Setup(Value):
    """One question: which model, what work, what trains, in which formats, on what."""

    command: Command
    model: ModelChoice
    work: Work
    recipe: Recipe | Mapping[str, Any] | None
    formats: FormatOptions
    place: Place
    convention: Convention = "model"
    attention_kernel: Kernel = "auto"
    clipping: Clipping | None = None
    values: Mapping[str, Any] = {}  # every typed value by field; never changed
    notes: tuple[str, ...] = ()  # on what was written, and what launch files said
    launch: dict[str, Any] | None = None  # what launch files said, for JSON

    def get(self, field: str, default: Any = None) -> Any:
        """The typed value of a field that was given."""
        return self.values.get(field, default)


def make_setup(
    command: Command, model: object, given: Mapping[str, Any], workload: object = None, *, of_batch: bool = False
) -> Setup:
    """A Setup from fields by name; None is not given. `of_batch`: images and audio are those of the whole batch."""
    fields = list_fields(command)
    for name in given:
        _check_taken(command, name, fields)
    given = {
        name: given[name] for name, field in fields.items() if name in given and not _is_absent(given[name], field.kind)
    }  # in the table's order, so that every door notes and refuses the same first
    notes, report = [], None
    if "launch" in given:
        from flopcalc.setup.launch import apply_launch  # only where used: other runs start without it

        applied = apply_launch(given["launch"], command, _list_said(given, workload), model)
        taken = dict(applied.options)
        model = taken.pop("model", model)
        given = {**given, **taken}
        notes, report = applied.notes, applied.report
    if model is None:
        raise ConfigError(f"which model? Give its name, path or config first, or {spell('launch')}")
    notes += _spell_out(given)
    values = {name: read_value(name, fields[name], value) for name, value in given.items() if name != "launch"}
    notes += _describe_files(values.get("image", ()))
    return Setup(
        command,
        _make_model(command, model, values),
        _make_work(values, workload, of_batch),
        _make_recipe(command, values),
        _make_formats(values),
        _make_place(command, values),
        values.get("convention", "model"),
        values.get("attention_kernel", "auto"),
        values.get("clipping"),
        values,
        tuple(notes),
        report,
    )


def _list_said(given: Mapping[str, Any], workload: object) -> dict[str, Any]:
    """What wins over a launch file; a recipe or a workload that is given whole says all of its fields."""
    said = {name: value for name, value in given.items() if name != "launch"}
    if "recipe" in given:
        said |= dict.fromkeys(_RECIPE)
    if "real_batch" in given or workload is not None:
        said |= dict.fromkeys(("batch", "seq", "lengths"))
    return said


def _is_absent(value: object, kind: Kind) -> bool:
    """Whether it is as if nothing was written; guidance=False and memory=False say something."""
    return value is None or (value is False and kind in ("flag", "mtp")) or (isinstance(value, tuple) and not value)


def _check_taken(command: Command, name: str, fields: Mapping[str, Field]) -> None:
    """A field that a command cannot use is refused by name."""
    if name in fields:
        return
    if name in FIELDS:
        raise WorkloadError(explain_refusal(command, name))
    known = [spell(each) for each in fields if command != "estimate" or each not in BESIDE]
    raise WorkloadError(
        f"{spell(name)} is no keyword of {command}.{format_nearest(spell(name), known)} Known: {', '.join(known)}"
    )


def explain_refusal(command: str, name: str) -> str:
    """Why a command does not take a field, or which commands do."""
    others = [each for each in FIELDS[name].commands if each not in ("bind", "crosscheck")]
    why = _REFUSED.get((command, name)) or f"{', '.join(others)} {'do' if others[1:] else 'does'}"
    return f"{command} takes no {spell(name)}: {why.format(**{each: spell(each) for each in FIELDS})}"


def _spell_out(given: Mapping[str, Any]) -> list[str]:
    """What every value with a suffix stands for, as one note."""
    texts: dict[str, str] = {}
    for name, value in given.items():
        if isinstance(value, str):
            texts[name] = value
        elif isinstance(value, tuple) and all(isinstance(each, str) for each in value):
            texts[name] = ",".join(value)
    described = describe_suffixes(texts)
    return ["; ".join(described)] if described else []


def _describe_files(images: Iterable[object]) -> list[str]:
    """The size of every image that is given as a file."""
    files = [each for each in images if isinstance(each, str)]
    if not files:
        return []
    from flopcalc.core.images.pictures import read_picture_size  # only where pictures are given

    return [f"{spell('image', file)} = {'x'.join(map(str, read_picture_size(file)))} pixels" for file in files]


def _pick(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of the fields that were given."""
    return {name: values[name] for name in names if name in values}


def _make_model(command: Command, model: object, values: Mapping[str, Any]) -> ModelChoice:
    objective = values.get("objective")
    if objective is not None and objective.name == "reward":
        values = {"head": "sequence:1", **values}
    mtp = None if command == "translate" else values.get("mtp")  # there the layers that a quoted number counts
    return ModelChoice(model, mtp=mtp, **_pick(values, ("model_type", "spec", "download", "head", "trace")))


def _make_work(values: Mapping[str, Any], workload: object, of_batch: bool) -> Work:
    sizes, steps = _pick(values, SIZES), _pick(values, ("grad_accum", "global_batch"))
    real = values.get("real_batch")
    if workload is not None:
        others = sizes if real is None else {**sizes, "real_batch": real}
        whole = check_workload_alone(workload, {spell(name): each for name, each in others.items()})
        return Work(Inputs(phase=whole.phase), whole, **steps)
    beside = [spell(name) for name in sizes if name not in ("phase", "logits")]
    if real is not None and beside:
        raise WorkloadError(f"batch already says sizes, lengths and images: leave {', '.join(beside)} out")
    return Work(Inputs(**{**sizes, "phase": _find_phase(values), "of_batch": of_batch}), None, real, **steps)


def _find_phase(values: Mapping[str, Any]) -> PipelinePhase:
    """The phase; sampling steps are asked for in phase sample alone."""
    phase = values.get("phase")
    if values.get("sampling_steps") is None:
        return phase or "train"
    if phase not in (None, "sample"):
        raise WorkloadError(f"{spell('sampling_steps')} belongs to phase sample, not {phase}")
    return "sample"


def _make_recipe(command: Command, values: Mapping[str, Any]) -> Recipe | Mapping[str, Any] | None:
    """What trains: a recipe that was given whole, or its fields; None where nothing is said."""
    given = _pick(values, _RECIPE)
    if values.get("gradient_checkpointing"):
        if "recompute" in given:
            raise RecipeError(f"{spell('gradient_checkpointing')} is {spell('recompute', 'full')}: give one of them")
        given["recompute"] = "full"
    if command == "plan":
        given.pop("recompute", None)  # one of the layout's degrees there
    recipe = values.get("recipe")
    if recipe is None:
        return given or None
    if not given:
        return recipe  # type: ignore[no-any-return]
    if not isinstance(recipe, Mapping):
        raise RecipeError(f"{' and '.join(given)} together with a Recipe: give it to make_recipe() instead")
    doubled = [name for name in given if name in recipe]
    if doubled:
        raise RecipeError(f"{doubled[0]} is given twice, by itself and in the recipe: give it once")
    return {**recipe, **given}


def _make_formats(values: Mapping[str, Any]) -> FormatOptions:
    compute = values.get("compute", values.get("dtype"))
    return FormatOptions(compute, values.get("weights"), values.get("kv_cache"), values.get("autocast"))


def _make_place(command: Command, values: Mapping[str, Any]) -> Place:
    shared = 1
    if command != "plan":
        for name in ("tp", "pp", "cp"):
            if len(values.get(name, (1,))) != 1:
                raise WorkloadError(f"{spell(name)} takes one number here; plan tries several")
        shared = math.prod(values.get(name, (1,))[0] for name in ("tp", "pp", "cp"))
    return Place(
        shared=shared,
        step_time_s=values.get("step_time"),
        **_pick(values, ("device", "gpus", "peak", "tokens_per_second")),
    )


def from_keywords(command: Command, model: object, keywords: Mapping[str, Any], workload: object = None) -> Setup:
    """The door of Python: keywords of estimate_flops and the like; an option's own name (seq) is taken too."""
    given: dict[str, Any] = {}
    for keyword, value in keywords.items():
        name = find_field(keyword, value)
        if name in given:
            raise WorkloadError(f"{spell(name)} is given twice: give it once")
        given[name] = value
    return make_setup(command, model, given, workload, of_batch=True)
