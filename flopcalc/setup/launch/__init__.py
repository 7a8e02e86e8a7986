"""Launch files of training frameworks: the model, LoRA, precision, batch, length, checkpointing, GPUs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from flopcalc.base.data import load_toml, read_table
from flopcalc.base.errors import ConfigError, format_value
from flopcalc.base.files import read_path
from flopcalc.base.units import check_items, read_size
from flopcalc.core.estimate.binding import bind_config
from flopcalc.setup.fields import Command, list_fields
from flopcalc.setup.launch.script import read_script
from flopcalc.setup.launch.settings import LaunchSettings, Taken

# Asked in this order: the first whose keys are in the file reads it.
FRAMEWORKS = (
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
    "training_arguments",
)
_FOLDER = os.path.dirname(__file__)
# An option that is given takes the place of these too.
_TOGETHER = (
    {"recompute", "gradient_checkpointing"}, {"compute", "dtype", "autocast"}, {"seq", "text", "lengths"},
    {"batch", "lengths"}, {"grad_accum", "global_batch"}, {"freeze", "train_only", "lora"}, {"lora", "train_only"},
)  # fmt: skip


class Launch(NamedTuple):
    """What launch files say: options with where each was taken from, and keys that are not understood."""

    files: tuple[str, ...]
    frameworks: tuple[str, ...]
    taken: dict[str, Taken]  # option -> value and key
    not_understood: tuple[str, ...]


def read_launch(launch: Any) -> Launch:
    """Read one launch file or several; where two say the same, the first one holds."""
    form = "the path of a launch file, or several"
    paths = [launch] if isinstance(launch, (str, os.PathLike)) else check_items(launch, "launch", ConfigError, form)
    if not paths or not all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise ConfigError(f"launch must be {form}, not {format_value(launch)}")
    names = [read_path(path, "launch", ConfigError) for path in paths]
    settings = LaunchSettings()
    frameworks, unknown = [], []
    for path in names:
        values = read_script(path) if path.endswith(".sh") else None
        values = values or _flatten(read_table(path, "a launch file other than a .sh script", "launch", ConfigError))
        table = _detect(values, path)
        settings.add_file(os.path.basename(path), table)
        frameworks.append(str(table["name"]))
        keys: Mapping[str, str] = table["keys"]
        for pattern, name in table.get("objectives", {}).items():
            said = [key for key, value in values.items() if fnmatchcase(f"{key}={value}", pattern)]
            if said:
                settings.take("objective", name, said[0])
        for key, value in values.items():
            if key in keys:
                if not settings.take(keys[key], value, key):
                    unknown.append(f"{key}: {format_value(value)}")
            elif not _is_ignored(key, value, [*table["ignored"]["keys"], *table.get("objectives", {}), "command"]):
                unknown.append(key)
        for key, value in table.get("defaults", {}).items():
            if not any(keys[key] == keys.get(other) for other in values):
                settings.take_default(keys[key], value)
        unknown += settings.finish_file(table.get("flavours", {}))
    return Launch(tuple(names), tuple(frameworks), settings.finish(), tuple(unknown))


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
            f"{each['option']} {write_value(each['value'])} from {each['key']}" for each in self.report["taken"]
        )
        notes = [f"taken from {files}: {taken or 'nothing'}"]
        if self.report["overridden"]:
            notes.append(f"overridden, so not taken from the launch file: {', '.join(self.report['overridden'])}")
        if self.report["not_understood"]:
            notes.append(f"not understood in the launch file: {', '.join(self.report['not_understood'])}")
        return notes


def apply_launch(launch: object, command: Command, given: Mapping[str, Any], model: object = None) -> LaunchOptions:
    """What launch files say for a command; `given` are the fields that the user gave, which win."""
    found = read_launch(launch)
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
    for word in [word for word in taken if word != "model" and word not in fields]:
        dropped = taken.pop(word)
        if word == "objective":
            unknown.append(f"{dropped.key}: {command} takes plain training; estimate counts {dropped.value}")
    own = model if model is not None else taken["model"].value if "model" in taken else None
    if own is None:
        raise ConfigError(f"{', '.join(found.files)}: no known model in it; name the model yourself")
    if "freeze" in taken:
        parts, keys = taken.pop("freeze")
        how = {word: given.get(word) for word in ("spec", "model_type")}
        groups = {stage.group for stage in bind_config(own, download="download" in given, **how).model.stages}
        names = tuple(part for part in parts if part in groups)  # a text model has no towers
        lora = taken.get("lora")
        if names and lora is not None:
            said_by = ", ".join(dict.fromkeys(f"{lora.key}, {keys}".split(", ")))
            taken["lora"] = Taken({**lora.value, "exclude": names}, said_by)
        elif names:
            taken["freeze"] = Taken(names, keys)
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


def _detect(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The table of the framework whose file this is."""
    for name in FRAMEWORKS:
        table: dict[str, Any] = load_toml(os.path.join(_FOLDER, f"{name}.toml"))
        if any(all(key in values for key in words.split("&")) for words in table["detect"]):
            return table
    raise ConfigError(
        f"{path}: not a launch file of axolotl, LLaMA-Factory, ms-swift, torchtitan, TRL, verl, OpenRLHF, accelerate "
        "or HF's TrainingArguments: none of their keys is in it"
    )


def _is_ignored(key: str, value: object, patterns: Iterable[str]) -> bool:
    """Whether a key is known to change no FLOPs; a pattern with a value speaks of that value alone."""
    if value is None or value == {} or value == []:
        return True
    return any(fnmatchcase(f"{key}={value}" if "=" in pattern else key, pattern) for pattern in patterns)
