"""Lists of trainers, sizes and models (arguments, JSON or TOML) in; checked configurations and their jobs out."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flopcalc.base.data import find_data_file, read_table
from flopcalc.base.errors import DeviceError, FlopcalcError, find_nearest, format_nearest, format_value
from flopcalc.base.files import read_path
from flopcalc.base.spelling import spell
from flopcalc.base.units import MAX_SIZE, check_size
from flopcalc.base.vocabulary import BASELINE as BASELINE
from flopcalc.base.vocabulary import Clipping
from flopcalc.core.model.config import Source, load_config
from flopcalc.measure.jobs.job import Job

Json = dict[str, Any]
# Trainer -> how it clips, in the words of the analytic core (clipping).
TRAINERS: dict[str, Clipping] = {
    "StandardTrainer": "none",
    "DPSGDTrainer": "hooks",
    "DPGhostClippingTrainer": "ghost",
    "DPFastGradientClippingTrainer": "fast",
}
MODEL_SIZES = {"tiny": "sweep-tiny", "small": "sweep-small", "medium": "sweep-medium", "1b": "sweep-1b"}
DTYPES = ("auto", "bf16", "fp32", "fp64")  # auto: bf16 on a GPU, fp32 on the CPU
DEVICES = ("auto", "cpu", "cuda")
ATTENTION = ("sdpa", "eager")
CHILD = "flopcalc.measure.sweep.child:start"
ROW = "run"  # a configuration's job has this one row
TIMEOUT_S = 1800.0
MAX_CONFIGURATIONS = 100_000  # each takes seconds: more would run for weeks


class SweepError(FlopcalcError):
    """A matrix, a folder of results or a setting of a sweep that cannot be used."""


class Configuration(NamedTuple):
    """One cell of the matrix: what one process trains, and how it is measured."""

    id: str  # names the log, the TensorBoard run and the row
    trainer: str
    batch_size: int
    seq_len: int
    model: str  # a size of MODEL_SIZES, a preset, or the path of a config.json
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "sdpa"
    steps: int = 10
    warmup: int = 3
    learning_rate: float = 1e-3
    max_grad_norm: float = 1.0
    noise_multiplier: float = 1.0
    seed: int = 0
    timeout_s: float = TIMEOUT_S
    model_type: str = ""  # the family that a preset or config.json is read as; empty: its own

    def to_row(self) -> Json:
        """What a row says about its configuration, even if nothing was measured."""
        row = self._asdict()
        del row["timeout_s"]
        if not self.model_type:  # rows of older journals do not have it
            del row["model_type"]
        return row

    def to_args(self) -> Json:
        """What is asked of the child's `start`; with `find_places` its arguments."""
        args = self.to_row()
        del args["id"]
        return args

    def find_places(self, runs_dir: str | None = None) -> Json:
        """Files that the child reads and writes, absolute: a launcher may start the process in another folder.

        `run_dir` is this configuration's TensorBoard run, or null.
        """
        return {
            "model": os.path.abspath(self.model) if _is_path(self.model) else self.model,
            "run_dir": None if runs_dir is None else os.path.abspath(os.path.join(runs_dir, self.id)),
        }

    def to_job(self, runs_dir: str | None = None, call: str = CHILD) -> Job:
        """The runner's job of this configuration: one process, one row."""
        # The config itself is a part of the question: an edited config.json is measured again.
        text = json.dumps(load_model(self.model, self.model_type).config, sort_keys=True, default=str)
        row = {"config": hashlib.sha256(text.encode()).hexdigest()[:16]}
        return Job(
            self.id,
            call,
            self.to_args(),
            {ROW: row},
            timeout_s=self.timeout_s,
            start_timeout_s=self.timeout_s,
            where=self.find_places(runs_dir),
        )


def find_model(model: str) -> str:
    """A size's preset; every other name (preset, path) as it is. What comes out is for `load_config` and `bind`."""
    return MODEL_SIZES.get(model, model)


def load_model(model: str, model_type: str = "") -> Source:
    """The config of a sweep's model, read as a family that is asked for; the sweep's own sizes are what they are."""
    return load_config(find_model(model), model_type=None if model in MODEL_SIZES else model_type or None)


def _is_path(model: str) -> bool:
    return model not in MODEL_SIZES and find_data_file("presets", model) is None and os.path.exists(model)


def make_matrix(
    *,
    trainers: Sequence[str] = tuple(TRAINERS),
    batch_sizes: Sequence[int] = (),
    seq_lens: Sequence[int] = (),
    models: Sequence[str] = (),
    **settings: object,
) -> tuple[Configuration, ...]:
    """Every trainer at every batch size and length of every model; settings are fields of Configuration."""
    for name in settings:
        if name not in SETTINGS:
            known = (*_LISTS, *SETTINGS)
            raise SweepError(f"no setting {name!r}.{format_nearest(name, known)} Known: {', '.join(known)}")
    checked = {name: SETTINGS[name](name, value) for name, value in settings.items()}
    lists = {"trainers": trainers, "batch_sizes": batch_sizes, "seq_lens": seq_lens, "models": models}
    given = {name: _check_list(name, values) for name, values in lists.items()}
    for model in given["models"]:
        _check_config(model, checked.get("model_type", ""))
    count = math.prod(map(len, given.values()))
    if count > MAX_CONFIGURATIONS:
        raise SweepError(f"a matrix of {count:,} configurations; {MAX_CONFIGURATIONS:,} is the most")
    labels = _label_models(given["models"])
    return tuple(
        Configuration(
            f"{trainer}_bs{batch_size}_seq{seq_len}" + (f"_{labels[model]}" if len(labels) > 1 else ""),
            trainer,
            batch_size,
            seq_len,
            model,
            **checked,
        )
        for model in given["models"]
        for seq_len in given["seq_lens"]
        for batch_size in given["batch_sizes"]
        for trainer in given["trainers"]
    )


def load_matrix(source: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any) -> tuple[Configuration, ...]:
    """The matrix of a JSON or TOML file, or of a mapping; what is given in addition wins."""
    if isinstance(source, Mapping):
        found, where = dict(source), ""
    else:
        path = read_path(source, "a matrix", SweepError)
        found = read_table(path, "a matrix", "launch", SweepError)
        where = f"{path}{' and the options given' if overrides else ''}: "
    try:
        return make_matrix(**{**found, **overrides})
    except FlopcalcError as error:
        raise SweepError(f"{where}{error}") from None


# --- checks -----------------------------------------------------------------------------------------------------------
def _check_list(name: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise SweepError(f"{name} must be a list, not {format_value(values)}")
    if not values:
        options = ("model_size", "model") if name == "models" else (name,)
        raise SweepError(f"{name} is empty: give {' or '.join(map(spell, options))}, or {name} in the matrix file")
    checked = tuple(_LISTS[name](name, value) for value in values)
    for value, count in Counter(checked).items():
        if count > 1:
            raise SweepError(f"{name} holds {value} twice")
    return checked


def _check_size(name: str, value: object) -> int:
    return check_size(value, name)


def _check_length(name: str, value: object) -> int:
    return check_size(value, name, 2)  # a sample of one token has no next one to learn


def _check_count(name: str, value: object) -> int:
    return check_size(value, name, 0)


def _check_trainer(name: str, value: object) -> str:
    if not isinstance(value, str) or value not in TRAINERS:
        spelled = {trainer.lower(): trainer for trainer in TRAINERS}
        near = [spelled[word] for word in find_nearest(str(value), spelled)]
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise SweepError(f"{name}: no trainer {format_value(value)}.{hint} Known: {', '.join(TRAINERS)}")
    return value


def _check_model(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise SweepError(f"{name}: a model is a size, a preset or a path, not {format_value(value)}")
    return value


def _check_config(model: str, model_type: str) -> None:
    try:
        load_model(model, model_type)
    except FlopcalcError as error:
        raise SweepError(f"{error}; sizes of the sweep: {', '.join(MODEL_SIZES)}") from None


def _check_type(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise SweepError(f"{name} must be the name of a family, not {format_value(value)}")
    return value


def _make_choice(known: Sequence[str]) -> Callable[[str, Any], str]:
    def check(name: str, value: object) -> str:
        if value not in known:
            near = format_nearest(str(value), known)
            raise SweepError(f"{name} {format_value(value)} unknown.{near} Known: {', '.join(known)}")
        return str(value)

    return check


def _make_number(is_zero_allowed: bool) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= MAX_SIZE or (value == 0 and not is_zero_allowed):  # a NaN is in no range
            bound = "of at least 0" if is_zero_allowed else "above 0"
            if is_number and value > MAX_SIZE:
                bound = f"of at most {MAX_SIZE}"
            raise SweepError(f"{name} must be a number {bound}, not {format_value(value)}")
        return float(value)

    return check


def _check_dtype(name: str, value: object) -> str:
    from flopcalc.hardware.devices import parse_dtype

    try:
        return _make_choice(DTYPES)(name, value if value == "auto" else parse_dtype(value))
    except DeviceError:
        raise SweepError(f"{name} {format_value(value)} unknown. Known: {', '.join(DTYPES)}") from None


_LISTS: dict[str, Callable[[str, Any], Any]] = {
    "trainers": _check_trainer,
    "batch_sizes": _check_size,
    "seq_lens": _check_length,
    "models": _check_model,
}
SETTINGS: dict[str, Callable[[str, Any], Any]] = {
    "dtype": _check_dtype,
    "device": _make_choice(DEVICES),
    "attention": _make_choice(ATTENTION),
    "steps": _check_size,
    "warmup": _check_count,
    "learning_rate": _make_number(False),
    "max_grad_norm": _make_number(False),
    "noise_multiplier": _make_number(True),
    "seed": _check_count,
    "timeout_s": _make_number(False),
    "model_type": _check_type,
}


def _label_models(models: Sequence[str]) -> dict[str, str]:
    """Model -> its word in ids: a size or preset as it is, of a path the folder or file that names it."""
    labels: dict[str, str] = {}
    for model in models:
        name = model
        if _is_path(model):
            folder, file = os.path.split(os.path.abspath(model))
            name = os.path.basename(folder) if file == "config.json" else os.path.splitext(file)[0]
        label = re.sub(r"[^\w.-]+", "-", name)
        for other, taken in labels.items():
            if taken == label:
                raise SweepError(f"models {other} and {model} would both be called {label}: rename a folder or a file")
        labels[model] = label
    return labels
