"""Passes that do not train: those that hooks see, and those that a loop hands in because they run elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flopcalc.base.errors import WorkloadError
from flopcalc.base.units import check_positive
from flopcalc.base.vocabulary import check_word
from flopcalc.monitor.batch import Intake, bind_live
from flopcalc.monitor.device import DeviceQueue
from flopcalc.monitor.keys import PASSES
from flopcalc.monitor.messages import Say, guarded
from flopcalc.monitor.model import WatchedModel
from flopcalc.monitor.pass_log import PassLog
from flopcalc.monitor.passes import read_lengths
from flopcalc.monitor.place import Seen
from flopcalc.monitor.settings import Settings


class PassCalls:
    """The part of a TrainingMonitor that is about other passes than those that train."""

    settings: Settings
    say: Say
    _device: DeviceQueue | None
    _is_started: bool
    _start_up: Callable[[], None]
    _trained: WatchedModel
    _models: list[WatchedModel]
    _passes: PassLog
    _given: dict[int, tuple[Any, Intake]]  # models of passes that ran elsewhere
    _owes: str  # a pass that runs elsewhere, and that nobody gave

    @guarded
    def add_pass(
        self,
        name: str,
        *,
        model: object = None,
        prompts: object = (),
        completions: object = (),
        seconds: float | None = None,
    ) -> None:
        """Work of this step that ran outside of watched modules, as a rollout in a serving engine.

        `prompts` and `completions` are lengths, or the tokens themselves, one of each for every sequence; `seconds` of
        the step went into it. `model` is what `flopcalc.bind` takes; without it the model that is trained.
        """
        check_word(name, PASSES[1:], "pass", WorkloadError)
        asked, made = read_lengths(prompts, "prompts"), read_lengths(completions, "completions")
        asked, made = asked or [0] * len(made), made or [0] * len(asked)
        if len(asked) != len(made):
            raise WorkloadError(f"{len(asked)} prompts and {len(made)} completions: give one for each")
        time_s = math.nan if seconds is None else check_positive(seconds, "seconds", or_zero=True)
        if seconds is None:
            self.say("add_pass without seconds: the training time of such steps, and their MFU, are not known", "pass")
        if not self._is_started:
            self._start_up()
        if self._owes == name:
            self._owes = ""
        self._passes.add_given(name, self._find_intake(model), asked, made, time_s)

    @guarded
    def expect_pass(self, name: str) -> None:
        """Steps hold work that runs elsewhere: until `add_pass` gives it, perf/mfu_step is not known."""
        self._owes = check_word(name, PASSES[1:], "pass", WorkloadError)

    def _find_intake(self, model: object) -> Intake | None:
        """How passes that ran elsewhere are counted."""
        if model is None:
            return self._trained.intake
        for each in self._models:
            if each.live is model:
                return each.intake
        if id(model) not in self._given:
            self._given[id(model)] = (model, Intake(bind_live(model, None, self.settings.dtype)))
        return self._given[id(model)][1]

    def _begin_pass(
        self, model: WatchedModel, module: Any, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """A pass that does not train begins."""
        if not self._is_started:
            self._start_up()
        inputs = model.name_inputs(args, kwargs) if args else kwargs
        self._passes.begin(model, module, inputs, module.training, self._device)

    @guarded
    def _end_pass(
        self, model: WatchedModel, module: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        inputs = model.name_inputs(args, kwargs) if args else kwargs
        self._passes.end(model, module, inputs, self._device)

    def _know_autocast(self, name: str | None) -> None:
        """What cannot be seen inside a compiled model."""
        for model in self._models:
            model.seen = model.seen or Seen(name)
