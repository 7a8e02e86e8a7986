"""Records to MLflow."""

from __future__ import annotations

import importlib
import os
import re
import time
from typing import Any

from flopcalc.monitor.keys import rename
from flopcalc.monitor.settings import Settings
from flopcalc.monitor.sinks.base import Record, Say, Sink, find_numbers

# MLflow's own limit for one request, mlflow/utils/validation.py: MAX_METRICS_PER_BATCH.
MLFLOW_BATCH = 1000


class MlflowSink(Sink):
    """Numbers to the active MLflow run; where there is none, to one of our own.

    By run id through a client: MLflow's `active_run` and `log_metrics` hold for one thread, and ours is another.
    """

    name = "mlflow"
    install = "pip install mlflow"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._run_id: str | None = None
        self._own = False
        self._client: Any = None
        self._metric: Any = None

    def open(self, say: Say) -> None:  # noqa: ARG002
        mlflow: Any = importlib.import_module("mlflow")
        self._metric = mlflow.entities.Metric
        # Of any thread; releases without this function have one active run for all of them.
        fluent = importlib.import_module("mlflow.tracking.fluent")
        run = getattr(fluent, "_get_latest_active_run", mlflow.active_run)()
        self._run_id = run.info.run_id if run is not None else os.environ.get("MLFLOW_RUN_ID")
        if self._run_id is not None:
            self._client = mlflow.MlflowClient()
            return
        self._client = mlflow.MlflowClient(tracking_uri=self._settings.mlflow_tracking_uri)
        self._run_id = self._client.create_run(self._find_experiment()).info.run_id
        self._own = True

    def write(self, record: Record) -> None:
        numbers = find_numbers(record)
        step = int(numbers.pop("global_step", 0))
        time_ms = int(record.get("time", time.time()) * 1000)
        metrics = [
            self._metric(_mlflow_key(key), value, time_ms, step)
            for key, value in rename(numbers, self._settings.key_style).items()
        ]
        for start in range(0, len(metrics), MLFLOW_BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MLFLOW_BATCH], synchronous=True)

    def close(self) -> None:
        if self._own:
            self._client.set_terminated(self._run_id)

    def _find_experiment(self) -> str:
        """The id of the experiment in the settings, else of MLflow's own variables, else of its default."""
        name = self._settings.mlflow_experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if name is None:
            return os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment is not None else self._client.create_experiment(name))


def _mlflow_key(key: str) -> str:
    """A name that MLflow takes: its characters, no empty or dotted part, at most 250 of them."""
    parts = re.sub(r"[^\w./ :-]+", "_", key).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))[:250] or "_"
