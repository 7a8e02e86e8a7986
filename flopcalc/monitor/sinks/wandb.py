"""Records to Weights & Biases."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from flopcalc.monitor.keys import CORE, DATASET_PREFIX, rename
from flopcalc.monitor.settings import Settings
from flopcalc.monitor.sinks.base import Record, Say, Sink, find_numbers, say_nothing


class WandbSink(Sink):
    """Numbers to the active W&B run; `init`: where there is none, to one of our own."""

    name = "wandb"
    install = "pip install wandb"

    def __init__(self, settings: Settings, output_dir: str, *, init: bool) -> None:
        self._settings = settings
        self._output_dir = output_dir
        self._init = init
        (self._axis,) = rename({"global_step": 0}, settings.key_style)
        self._own: Any = None
        self._run: Any = None
        self._known: set[str] = set()
        self._say: Say = say_nothing
        self._said_gone = False

    def open(self, say: Say) -> None:
        self._say = say
        if not self._init:
            return
        wandb: Any = importlib.import_module("wandb")
        if wandb.run is not None:
            return
        os.makedirs(self._output_dir, exist_ok=True)
        settings = self._settings
        self._own = wandb.init(
            project=settings.wandb_project,
            entity=settings.wandb_entity,
            name=settings.wandb_name,
            mode=settings.wandb_mode,
            dir=self._output_dir,
        )

    def write(self, record: Record) -> None:
        run = _active_wandb_run()
        if run is None:
            if self._init and not self._said_gone:  # else W&B was not asked for, only a run that is active anyway
                self._said_gone = True
                self._say("the W&B run was finished before the monitor was closed: it does not get the later records")
            return
        settings = self._settings
        numbers = find_numbers(record)
        if settings.wandb_reduced_logging:
            numbers = {key: value for key, value in numbers.items() if key in CORE}
        if not settings.wandb_log_dataset_metrics:
            numbers = {key: value for key, value in numbers.items() if not key.startswith(DATASET_PREFIX)}
        numbers = rename(numbers, settings.key_style)
        # No step=: W&B refuses steps that run backwards, so ours would fight the user's own. An x-axis for exactly our
        # keys, not for training/*, under which the user may log without global_step.
        axis = self._axis
        if run is not self._run:
            run.define_metric(axis)
            self._run, self._known = run, {axis}
        for key in numbers.keys() - self._known:
            if "*" not in key:  # a pattern to W&B
                run.define_metric(key, step_metric=axis)
            self._known.add(key)
        if numbers:
            run.log(numbers)

    def close(self) -> None:
        if self._own is not None and self._own is _active_wandb_run():
            self._own.finish()


def _active_wandb_run() -> Any:
    """The run that wandb.log would write to; W&B is not imported for it."""
    return getattr(sys.modules.get("wandb"), "run", None)
