"""A config goes in; what callbacks of all frameworks share comes out: a monitor per training, guarded events."""

from __future__ import annotations

import functools
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flopcalc.base.errors import ConfigError
from flopcalc.monitor.keys import CORE
from flopcalc.monitor.settings import Settings, check_path, load_settings

if TYPE_CHECKING:
    from flopcalc.monitor.training import TrainingMonitor

_RATES = tuple(key for key in CORE if key.startswith("perf/"))


def guarded(event: Callable[..., None]) -> Callable[..., None]:
    """The event of a callback; an error inside it becomes one warning, and training goes on."""

    @functools.wraps(event)
    def run(self: MonitorCallback, *args: object, **kwargs: object) -> None:
        try:
            event(self, *args, **kwargs)
        except Exception as error:
            self._complain(event.__name__, error)

    return run


class MonitorCallback:
    """Holds the monitor of the training that runs, or of the last one that ran."""

    monitor: TrainingMonitor | None

    def __init__(
        self,
        config: Mapping[str, object] | str | os.PathLike[str] | Settings | None = None,
        *,
        output_dir: str | os.PathLike[str] | None = None,
        log_file: str | os.PathLike[str] | None = None,
        monitor: TrainingMonitor | None = None,
        model: object = None,
    ) -> None:
        super().__init__()
        if monitor is not None and (config is not None or output_dir is not None or log_file is not None):
            raise ConfigError("a monitor has its own config, output_dir and log_file: give these, or the monitor")
        self.monitor = monitor
        self._settings, self._notes = load_settings(config)  # a bad config ends here, not in training
        self._output_dir = check_path(output_dir, "output_dir") if output_dir is not None else None
        self._log_file = check_path(log_file, "log_file") if log_file is not None else None
        self._watched = model  # in place of what the framework trains: a module, or a list of them
        self._is_own = monitor is None
        self._is_live = False
        self._is_reported = True

    def __getstate__(self) -> dict[str, Any]:
        """A copy, in this process or another, opens a monitor of its own: threads and hooks do not travel."""
        own = {"monitor": None, "_watched": None, "_is_own": True, "_is_live": False, "_is_reported": True}
        return {**self.__dict__, **own}

    def _open(
        self,
        model: Any,
        output_dir: str | os.PathLike[str],
        found: Mapping[str, Any],
        hidden_autocast: str | None = None,
    ) -> None:
        """A training begins. `found` are the framework's own settings; the config's win.

        `model` is what is watched, unless the user named it; of a list the first one trains. `hidden_autocast` is the
        format of an autocast that cannot be seen inside a compiled model, "none" where there is none.
        """
        from flopcalc.monitor.training import TrainingMonitor

        self._close()  # of a training that raised and begins anew
        model = model if self._watched is None else self._watched
        if self._is_own or self.monitor is None:
            missing = {name: value for name, value in found.items() if getattr(self._settings, name) is None}
            settings = replace(self._settings, **missing)
            self.monitor = TrainingMonitor(self._output_dir or output_dir, settings, self._log_file, model=model)
            for note in self._notes:
                self.monitor.say(note)
        else:
            self.monitor.attach(model)
        if hidden_autocast is not None:
            self.monitor._know_autocast(None if hidden_autocast == "none" else hidden_autocast)
        self._is_live = self._is_reported = True

    def _end_step(self, step: int) -> None:
        if self._is_live and self.monitor is not None:
            self.monitor.end_step(step)
            self._is_reported = False

    def _report(self, step: int, **values: Any) -> None:
        if self._is_live and self.monitor is not None:
            self.monitor.report(step, **values)
            self._is_reported = True

    def _lose(self, cause: str) -> None:
        if self._is_live and self.monitor is not None:
            self.monitor.mark_lost(cause)

    def _close(self) -> None:
        """The training is over; a monitor that the caller made stays open."""
        if self._is_live and self._is_own and self.monitor is not None:
            self.monitor.close()
        self._is_live = False

    def _complain(self, event: str, error: Exception) -> None:
        message = f"the callback failed in {event} and goes on without it: {type(error).__name__}: {error}"
        try:
            if self.monitor is not None:
                self.monitor.say(message, f"fail {event}")
            else:
                warnings.warn(f"flopcalc: {message}", RuntimeWarning, stacklevel=3)
        except Exception:  # warnings are made errors; even this one must not end a training
            print(f"flopcalc: {message}", file=sys.stderr)


def pick_rates(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The core rates that are known: finite numbers, for loggers that take nothing else."""
    return {key: float(metrics[key]) for key in _RATES if key in metrics and math.isfinite(metrics[key])}
