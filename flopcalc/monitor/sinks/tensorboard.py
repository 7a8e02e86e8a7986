"""Records to TensorBoard."""

from __future__ import annotations

import importlib
import os
from typing import Any

from flopcalc.monitor.keys import rename
from flopcalc.monitor.settings import Settings
from flopcalc.monitor.sinks.base import Record, Say, Sink, find_numbers


class TensorboardSink(Sink):
    """Numbers to an event file, by torch's writer or tensorboardX."""

    name = "tensorboard"
    install = "pip install tensorboard"

    def __init__(self, settings: Settings, output_dir: str) -> None:
        self._folder = os.path.abspath(settings.tensorboard_dir or os.path.join(output_dir, "tensorboard"))
        self._style = settings.key_style
        self._writer: Any = None

    def open(self, say: Say) -> None:  # noqa: ARG002
        try:
            module: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            module = importlib.import_module("tensorboardX")
        self._writer = module.SummaryWriter(self._folder, flush_secs=30)

    def write(self, record: Record) -> None:
        numbers = find_numbers(record)
        step = numbers.pop("global_step", None)
        for key, value in rename(numbers, self._style).items():
            self._writer.add_scalar(key, value, step, walltime=record.get("time"))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
