"""Launch files and lines of training frameworks: model, LoRA, precision, batch, length, checkpointing, GPUs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from flopcalc.base.data import load_toml, read_table
from flopcalc.base.errors import ConfigError, format_value
from flopcalc.base.files import read_path, read_text
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_items, read_size
from flopcalc.base.vocabulary import OBJECTIVES, OPTIMIZERS
from flopcalc.core.estimate.binding import bind_config
from flopcalc.core.model.config import load_config
from flopcalc.setup.fields import Command, list_fields
from flopcalc.setup.launch.script import read_script
from flopcalc.setup.launch.settings import LaunchSettings, Taken

# Asked in this order: the first whose keys are in the file reads it.
FRAMEWORKS = (
    "megatron",
    "megatron_swift",
    "llamafactory_v1",
    "axolotl",
    "ms_swift",
    "llamafactory",
    "torchtitan",
    "trl",
    "verl",
    "openrlhf",
    "accelerate",
    "deepspeed",
    "training_arguments",
)
_SCRIPT_LIMIT = 500_000
_NO_LIMIT = f",max_position_embeddings={1 << 24}"  # of configs that are made: no limit, so it says nothing
# Keys whose value may be a JSON file of DeepSpeed.
_DEEPSPEED = ("deepspeed", "deepspeed_config", "deepspeed_config_file", "deepspeed_config.deepspeed_config_file")
_FOLDER = os.path.dirname(__file__)
# An option that is given takes the place of these too.
_TOGETHER = (
    {"recompute", "gradient_checkpointing"}, {"compute", "dtype", "autocast"}, {"seq", "text", "lengths"},
    {"grad_accum", "global_batch"}, {"freeze", "train_only", "lora"}, {"lora", "train_only"},
)  # fmt: skip


class Launch(NamedTuple):
    """What launch files say: options with where each was taken from, and keys that are not understood."""

    files: tuple[str, ...]
    frameworks: tuple[str, ...]
    taken: dict[str, Taken]  # option -> value and key
    not_understood: tuple[str, ...]


class _Part(NamedTuple):
    """Settings of one framework, and its table."""

    label: str
    values: dict[str, Any]
    table: dict[str, Any]


def read_launch(launch: Any, *, is_alone: bool = False) -> Launch:
    """Read one launch file or line, or several; where two say the same, the first one holds.

    `is_alone`: files that a script names are not read.
    """
    form = "the path of a launch file, or several"
    paths = [launch] if isinstance(launch, (str, os.PathLike)) else check_items(launch, "launch", ConfigError, form)
    if not paths or not all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise ConfigError(f"launch must be {form}, not {format_value(launch)}")
    settings, unknown = LaunchSettings(), list[str]()
    parts = [
        part
        for path in paths
        for part in _read_parts(read_path(path, "launch", ConfigError), unknown, is_alone=is_alone)
    ]
    notes = _load_table("noted")["note"]
    for label, values, table in parts:
        noted = dict[str, list[str]]()
        settings.add_file(os.path.basename(label), table)
        keys: Mapping[str, str] = table["keys"]
        objectives: Mapping[str, str] = table.get("objectives", {})
        settings.take_objective(objectives, values)
        pieces = [piece for pattern in objectives for piece in pattern.split("&")]
        for key, value in values.items():
            if found := [each["says"] for each in notes if _is_noted(key, values, each)]:
                noted.setdefault(found[0], []).append(key)
            if key in keys:
                if not settings.take(keys[key], value, key) and not found:
                    unknown.append(f"{key}: {format_value(value)}")
            elif not found and not _is_ignored(key, value, [*table["ignored"]["keys"], *pieces, "command"]):
                unknown.append(key)
        unknown += [f"{', '.join(said)}: {says}" for says, said in noted.items()]
        for key, value in table.get("defaults", {}).items():
            if not any(keys[key] == keys.get(other) for other in values):
                settings.take_default(keys[key], value)
        unknown += settings.finish_file(table.get("flavours", {}))
    labels, frameworks = [part.label for part in parts], [str(part.table["name"]) for part in parts]
    return Launch(tuple(labels), tuple(frameworks), settings.finish(), tuple(unknown))


def _read_parts(path: str, unknown: list[str], *, is_alone: bool) -> list[_Part]:
    """A file's settings. Those of a script or a line are its program's and its launcher's, and of files they name."""
    is_line = any(each.isspace() for each in path.strip()) and not os.path.exists(path)
    script = read_script(
        path if is_line else read_text(path, _SCRIPT_LIMIT, ConfigError) if path.endswith(".sh") else ""
    )
    if is_line and not ("command" in script.program or "name" in script.launcher):
        raise ConfigError(
            f"{path[:200]}: neither a file nor a line that starts a training; flopcalc serving reads lines of engines"
        )
    label = " ".join(path.split()[:4]) + " …" if is_line else path
    values, parts = {}, list[_Part]()

    def read_beside(file: str) -> dict[str, Any] | None:
        beside = next(filter(os.path.isfile, (file, os.path.join(os.path.dirname(label), file))), None)
        if is_alone or beside is None:
            unknown.append(f"{file}: not read")
            return None
        return _flatten(read_table(beside, "settings of a training", "launch", ConfigError))

    is_plain = not (script.program or script.launcher or is_line)
    if is_plain:
        values = _flatten(read_table(path, "a launch file other than a .sh script", "launch", ConfigError))
    for whose, files in script.files.items():
        for file in files:
            if (held := read_beside(file)) is None:
                continue
            if whose == "program":
                values |= held
            else:
                parts.append(_Part(file, held, _detect(held, file)))
    values |= script.program
    for each in (values, *(part.values for part in parts)):
        for key in _DEEPSPEED:
            if str(each.get(key)).endswith(".json") and (held := read_beside(str(each.pop(key)))) is not None:
                parts.append(_Part(path, held, _load_table("deepspeed")))
    if is_plain:
        return [_Part(path, values, _detect(values, path)), *parts]
    launcher = {key: value for key, value in script.launcher.items() if key != "name"}
    table = _find_table(values)
    if launcher:
        name = script.launcher.get("name", "environment")
        parts.insert(0, _Part(label, launcher, {**_load_table("accelerate"), "name": name}))
    if table is not None:
        parts.insert(0, _Part(label, values, table))
    elif parts:
        unknown += [key for key in values if key != "command"]
    else:
        _detect(values, label)
    return parts


class LaunchOptions(NamedTuple):
    """What a command takes from launch files: its options, and a report."""

    options: dict[str, Any]
    report: dict[str, Any]  # files, frameworks, taken, overridden, not_understood

    @property
    def notes(self) -> list[str]:
        """The report in words."""
        files = ", ".join(
            f"{os.path.basename(path)} ({name})"
            for path, name in zip(self.report["files"], self.report["frameworks"], strict=True)
        )
        taken = "; ".join(
            f"{each['option']} {write_value(each['value'])} from {each['key']}".replace(_NO_LIMIT, "")
            for each in self.report["taken"]
        )
        notes = [f"taken from {files}: {taken or 'nothing'}"]
        if self.report["overridden"]:
            notes.append(f"overridden, so not taken from the launch file: {', '.join(self.report['overridden'])}")
        if self.report["not_understood"]:
            notes.append(f"not taken from the launch file: {'; '.join(self.report['not_understood'])}")
        return notes


def apply_launch(
    launch: object, command: Command, given: Mapping[str, Any], model: object = None, *, is_alone: bool = False
) -> LaunchOptions:
    """What launch files say for a command; `given` are the fields that the user gave, which win."""
    found = read_launch(launch, is_alone=is_alone)
    taken, unknown = dict(found.taken), list(found.not_understood)
    spread = math.prod(taken[word].value for word in ("tp", "cp", "pp") if word in taken)
    gpus = read_size(given.get("gpus", taken["gpus"].value if "gpus" in taken else spread), "gpus")
    if command == "plan" and "batch" in taken and "global_batch" not in taken:
        ranks = _count_groups(gpus, spread)
        many = taken["batch"].value * ranks * (taken["grad_accum"].value if "grad_accum" in taken else 1)
        keys = [taken[word].key for word in ("batch", "grad_accum") if word in taken]
        taken["global_batch"] = Taken(many, " × ".join([*keys, f"{ranks} data-parallel ranks"]))
    if command != "plan" and "recompute" in taken and taken["recompute"].value == "selective":
        unknown.append(f"{taken.pop('recompute').key}: selective, counted as none")
    if "max_pixels" in taken and not {"image", "video"} & set(given):
        unknown.append(f"{taken.pop('max_pixels').key}: no image or video was given")
    fields = list_fields(command)
    asked = taken.get("objective")
    is_counted = asked is None or asked.value.partition(",")[0] in OBJECTIVES
    if asked is not None and not is_counted and "objective" in fields and "objective" not in given:
        raise ConfigError(
            f"{', '.join(found.files)}: {asked.key} means {asked.value}, whose passes are not counted: give "
            f"{spell('objective')} {', '.join(OBJECTIVES)}, or none for plain training"
        )
    for word in [word for word in taken if word != "model" and word not in fields]:
        dropped = taken.pop(word)
        if word == "objective":
            who = f"estimate counts {dropped.value}" if is_counted else f"{dropped.value} has other passes"
            unknown.append(f"{dropped.key}: {command} takes plain training; {who}")
    stepped = taken.get("optimizer")
    if stepped is not None and stepped.value not in OPTIMIZERS:
        unknown.append(f"{taken.pop('optimizer').key}: {stepped.value}, not known here; the default one is taken")
    elif stepped is not None and command == "plan" and stepped.value in ("adamw", "adamw-foreach"):
        del taken["optimizer"]  # on many GPUs frameworks keep float32 weights and states beside: a plan's default
    own = model if model is not None else taken["model"].value if "model" in taken else None
    if own is None:
        raise ConfigError(
            f"{', '.join(dict.fromkeys(found.files))}: it does not say the whole model; name the model yourself"
            + (f" (not understood: {', '.join(unknown)})" if unknown else "")
        )
    lora = taken.get("lora")
    if lora is not None and not lora.value["targets"] and "lora" not in given:
        kind = load_config(own, download="download" in given, model_type=given.get("model_type")).config["model_type"]
        targets = _load_table("peft")["targets"].get(kind)
        if targets is None:
            raise ConfigError(
                f"{', '.join(found.files)}: LoRA without target modules ({lora.key}), and PEFT has none by default for "
                f"{kind}: give {spell('lora', 'r=16,targets=all-linear')}"
            )
        taken["lora"] = Taken({**lora.value, "targets": tuple(targets)}, f"{lora.key}, PEFT's default for {kind}")
    if "freeze" in taken:
        parts, found_in = taken.pop("freeze")
        bound = bind_config(
            own, download="download" in given, spec=given.get("spec"), model_type=given.get("model_type")
        )
        groups = {stage.group for stage in bound.stages}
        names = tuple(part for part in parts if part in groups)  # a text model has no towers
        lora = taken.get("lora")
        if names and lora is not None:
            said_by = ", ".join(dict.fromkeys(f"{lora.key}, {found_in}".split(", ")))
            taken["lora"] = Taken({**lora.value, "exclude": names}, said_by)
        elif names:
            taken["freeze"] = Taken(names, found_in)
    said = set(given) | ({"model"} if model is not None else set())
    overridden = [word for word in taken if word in said or any(word in group and said & group for group in _TOGETHER)]
    kept = {word: each for word, each in taken.items() if word not in overridden}
    if command == "predict" and spread > 1:
        kept["gpus"] = Taken(_count_groups(gpus, spread), f"{gpus} GPUs in groups of {spread}")
        degrees = ", ".join(found.taken[word].key for word in ("tp", "cp", "pp") if word in found.taken)
        unknown.append(f"{degrees}: predict runs the whole model on each GPU, plan divides it")
    report = {
        "files": list(found.files),
        "frameworks": list(found.frameworks),
        "taken": [{"option": word, "value": each.value, "key": each.key} for word, each in kept.items()],
        "overridden": overridden,
        "not_understood": unknown,
    }
    return LaunchOptions({word: each.value for word, each in kept.items()}, report)


def _count_groups(gpus: int, spread: int) -> int:
    if gpus % spread:
        raise ConfigError(f"{gpus} GPUs are no multiple of tp · pp · cp = {spread}")
    return gpus // spread


def write_value(value: object) -> str:
    """A value as its option takes it."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={write_value(each)}" for key, each in value.items())
    return "+".join(value) if isinstance(value, tuple) else str(value)


def _flatten(values: Mapping[Any, object], before: str = "") -> dict[str, Any]:
    """Nested settings under dotted names; a mapping's own name stays where it is empty."""
    found: dict[str, object] = {}
    for name, value in values.items():
        key = f"{before}{name}"
        if isinstance(value, Mapping) and value and key.count(".") < 8:
            found |= _flatten(value, f"{key}.")
        else:
            found[key] = value
    return found


def _load_table(name: str) -> dict[str, Any]:
    return load_toml(os.path.join(_FOLDER, f"{name}.toml"))


def _find_table(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The table of the framework whose keys these are; `command=X` asks for a value, `!` for none like it."""
    for table in map(_load_table, FRAMEWORKS):
        if any(_has_words(values, words) for words in table["detect"]):
            return table
    return None


def _has_words(values: Mapping[str, Any], words: str) -> bool:
    said = {*values, f"command={values.get('command')}"}
    asked = [(word.removeprefix("!"), word.startswith("!")) for word in words.split("&")]
    return all(any(fnmatchcase(each, word) for each in said) != is_barred for word, is_barred in asked)


def _is_noted(key: str, values: Mapping[str, Any], note: Mapping[str, Any]) -> bool:
    return _is_ignored(key, values[key], note["keys"], False) and _has_words(values, note.get("where", "*"))


def _detect(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The table of the framework whose file this is."""
    table = _find_table(values)
    if table is None:
        raise ConfigError(
            f"{path}: not a launch file of axolotl, LLaMA-Factory, ms-swift, torchtitan, TRL, verl, OpenRLHF, "
            "accelerate, DeepSpeed or HF's TrainingArguments: none of their keys is in it"
        )
    return table


def _is_ignored(key: str, value: object, patterns: Iterable[str], is_empty: bool = True) -> bool:
    """Whether a key is known to change no FLOPs; a pattern with a value speaks of that value alone."""
    if value is None or value == {} or value == []:
        return is_empty
    return any(fnmatchcase(f"{key}={value}" if "=" in pattern else key, pattern) for pattern in patterns)
