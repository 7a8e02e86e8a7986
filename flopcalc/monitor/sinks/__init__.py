"""Records in; a JSONL file, W&B, TensorBoard and MLflow out, each by a thread that training never waits for."""

from __future__ import annotations

import os
from collections.abc import Callable

from flopcalc.monitor.keys import LOG_NAME
from flopcalc.monitor.settings import Settings
from flopcalc.monitor.sinks.base import Record, Say, Sink
from flopcalc.monitor.sinks.jsonl import JsonlSink
from flopcalc.monitor.sinks.mlflow import MlflowSink
from flopcalc.monitor.sinks.outbox import Outbox
from flopcalc.monitor.sinks.tensorboard import TensorboardSink
from flopcalc.monitor.sinks.wandb import WandbSink

__all__ = [
    "LOG_NAME",
    "JsonlSink",
    "MlflowSink",
    "Outbox",
    "Record",
    "Say",
    "Sink",
    "TensorboardSink",
    "WandbSink",
    "make_sinks",
]


def make_sinks(
    settings: Settings, output_dir: str | os.PathLike[str], log_file: str | os.PathLike[str] | None = None
) -> list[Sink]:
    """The sinks of the settings, none of them opened; a log file that was asked for by name is always among them."""
    folder = os.path.abspath(output_dir)
    names = ("jsonl", "wandb") if settings.sinks is None else settings.sinks
    if log_file is not None and "jsonl" not in names:
        names = ("jsonl", *names)
    makers: dict[str, Callable[[], Sink]] = {
        "jsonl": lambda: JsonlSink(log_file or os.path.join(folder, LOG_NAME), settings.save_every),
        "wandb": lambda: WandbSink(settings, folder, init=settings.sinks is not None),
        "tensorboard": lambda: TensorboardSink(settings, folder),
        "mlflow": lambda: MlflowSink(settings),
    }
    return [makers[name]() for name in names]
