"""Forward passes that do not train, as they are made: written down on the training thread, with their time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from flopcalc.monitor.batch import Intake, copy_value
from flopcalc.monitor.device import DeviceQueue
from flopcalc.monitor.model import WatchedModel
from flopcalc.monitor.step import SeenPass, SeenStep


class PassLog:
    """Passes since the last step ended; the next step takes them all.

    Their time is the host's, or on CUDA that between two events. A generation is one pass from its prompt to its last
    token: the time between its calls is part of it.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.passes: list[SeenPass] = []
        self.copies: list[Any] = []  # host buffers that the device writes into
        self.is_used = False  # there is something for the next step to take
        self._clock = clock
        self._open: list[SeenPass] = []  # calls under way
        self._generation: SeenPass | None = None  # the last one, which may go on

    def begin(
        self,
        model: WatchedModel,
        module: object,
        inputs: Mapping[str, object],
        is_training: bool,
        device: DeviceQueue | None,
    ) -> None:
        self.is_used = True
        context = _find_context(inputs)
        going = self._generation
        if context and going is not None and going.module is module:
            going.is_decoding = True
            self._open.append(going)
            return
        state = model.find_state()
        name = model.name_pass(is_training, state) if context is None else "rollout"
        model.find_intake(state)  # while the live model is in this state
        seen = SeenPass(name, model, state, self._clock())
        seen.module, seen.context, seen.ends = module, context or 0, model.ends
        seen.is_decoding = bool(context)
        if device is not None:
            seen.start = device.mark()
        self._open.append(seen)

    def end(self, model: WatchedModel, module: Any, inputs: Mapping[str, Any], device: DeviceQueue | None) -> None:
        seen = self._take_open(module)
        if seen is None:
            return
        if device is not None and seen.start is not None:
            seen.end = device.mark(seen.end)
        else:
            seen.seconds = max(0, self._clock() - seen.begin_ns) / 1e9
        if seen is not self._generation:
            self.passes.append(seen)
        self._generation = seen if seen.name == "rollout" else None
        if device is not None and device.is_capturing():
            return
        if seen.is_decoding:
            self._add_tokens(seen, inputs, device)
        else:
            seen.snapshot = model.take(inputs, device, self)
        if seen.name != "rollout":
            seen.module = None

    def _add_tokens(self, seen: SeenPass, inputs: Mapping[str, Any], device: DeviceQueue | None) -> None:
        tokens = inputs.get("input_ids")
        if tokens is None or len(tokens.shape) != 2:
            seen.new += 1
            return
        seen.new += int(tokens.shape[1])
        if device is not None and tokens.is_cuda:
            tokens = device.take("input_ids", tokens, self)
        else:
            tokens = copy_value(tokens)
        seen.fed.append(tokens)

    def _take_open(self, module: object) -> SeenPass | None:
        """The call of a module that ends; those that began after it and never ended raised."""
        while self._open:
            seen = self._open.pop()
            if seen.module is module:
                return seen
        return None

    def find_first(self, now_ns: int) -> int:
        """When the first pass of the next step began."""
        return next((seen.begin_ns for seen in self.passes if seen.is_in_step), now_ns)

    def add_given(
        self, name: str, intake: Intake | None, prompts: Sequence[int], completions: Sequence[int], seconds: float
    ) -> None:
        """A pass that ran elsewhere."""
        self.is_used = True
        seen = SeenPass(name, None, None, self._clock())
        seen.own_intake, seen.given, seen.seconds = intake, (prompts, completions), seconds
        self.passes.append(seen)

    def lose(self, cause: str, since_ns: int) -> None:
        """The time since then is in no step, and so are the passes in it."""
        self._generation = None
        for seen in self.passes:
            if seen.begin_ns >= since_ns:
                seen.is_in_step = False
                if cause == "eval":
                    seen.name = "eval"

    def move_to(self, step: SeenStep) -> None:
        """The step is over: what was seen belongs to it."""
        self.is_used = False
        self._open.clear()
        self._generation = None
        if self.passes:
            for seen in self.passes:
                seen.module = None
            step.passes, self.passes = self.passes, []
            step.copies += self.copies
            self.copies = []


def _find_context(inputs: Mapping[str, Any]) -> int | None:
    """Positions in the cache that a call is given; None: it is given none."""
    cache = inputs.get("past_key_values")
    if cache is None:
        return None
    mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
    if ids is None:
        ids = inputs.get("inputs_embeds")
    if ids is not None and len(getattr(mask, "shape", ())) == 2:
        return max(0, int(mask.shape[1]) - int(ids.shape[1]))  # type: ignore[union-attr]
    length: Hashable = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
    return length if isinstance(length, int) else 0
