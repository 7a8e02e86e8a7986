"""What a witness counted in one step, and the step that every witness runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from flopcalc.base.errors import WorkloadError
from flopcalc.base.vocabulary import Phase

PHASES = ("train", "forward")


class WitnessCount(NamedTuple):
    """What one witness counted in one step."""

    witness: str
    total: int | None  # FLOPs; None when the witness cannot speak
    by: dict[str, int]  # per module, operator or dtype; empty if the witness does not split its count
    not_counted: dict[str, int]  # operators met and not counted -> calls
    seconds: float  # cost of counting, wall
    reason: str | None = None  # why unavailable, or what is special
    corrected: int | None = None  # the total without known flaws, where a witness has some; both figures are kept

    @property
    def best(self) -> int | None:
        """The figure to compare: the corrected one where there is one."""
        return self.total if self.corrected is None else self.corrected


def unavailable(witness: str, reason: str, seconds: float = 0.0) -> WitnessCount:
    return WitnessCount(witness, None, {}, {}, seconds, " ".join(reason.split()))


@contextmanager
def ready_step(model: Any, batch: Mapping[str, Any], phase: Phase) -> Iterator[Callable[[], None]]:
    """One step to run as often as wanted; the model's modes and gradients are put back afterwards."""
    import torch

    if phase not in PHASES:
        raise WorkloadError(f"a witness counts phase {' or '.join(PHASES)}, not {phase!r}")
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    labels = batch.get("labels", batch["input_ids"])

    def train() -> None:
        for parameter, _ in gradients:
            parameter.grad = None
        with torch.enable_grad():
            model(**inputs, labels=labels, use_cache=False).loss.backward()

    def forward() -> None:
        with torch.no_grad():
            model(**inputs, use_cache=False)

    try:
        model.train(phase == "train")
        yield train if phase == "train" else forward
    finally:
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient


def synchronize(model: Any) -> None:
    """Wait for the model's device, so that a wall time means something."""
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.is_cuda:
        import torch

        torch.cuda.synchronize(parameter.device)
