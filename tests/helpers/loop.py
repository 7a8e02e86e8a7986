"""Plain training loops for the monitor's tests, with and without one, and a clock that a test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tiny import make_text, pad

if TYPE_CHECKING:  # imported where they are used: few tests of the monitor's settings and logs need them
    import torch
    from transformers import LlamaForCausalLM


class Clock:
    """Stands for the monitor's clock; it moves when a test says so."""

    def __init__(self) -> None:
        self.now_ns = 5_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def tick(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


class Outcome(NamedTuple):
    """What a training comes to; equal bit for bit where nothing disturbed it."""

    losses: tuple[float, ...]
    weights: tuple[bytes, ...]
    random_state: bytes


def make_model(dropout: float = 0.1) -> LlamaForCausalLM:
    """A tiny model that draws random numbers in every step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=101, attention_dropout=dropout, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def make_batches(count: int = 4) -> list[dict[str, torch.Tensor]]:
    return [pad(make_text(2 + index % 2)) for index in range(count)]


def update(model: torch.nn.Module) -> None:
    """One step of gradient descent."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


def work(model: Callable[..., Any], *batches: Mapping[str, Any]) -> torch.Tensor:
    """Forward and backward of one optimizer step; its last loss."""
    import torch

    loss = torch.zeros(())
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
    return loss.detach()


def conclude(model: torch.nn.Module, losses: Iterable[Any]) -> Outcome:
    import torch

    weights = tuple(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return Outcome(tuple(map(float, losses)), weights, torch.random.get_rng_state().numpy().tobytes())


def train(model: Any, batches: Iterable[Mapping[str, Any]], monitor: Any = None) -> Outcome:
    """The plainest loop: the hook sees the batches, log_step ends each step."""
    losses = []
    for number, batch in enumerate(batches, 1):
        loss = work(model, batch)
        update(model)
        losses.append(loss)
        if monitor is not None:
            monitor.log_step(number, 0, loss, 1.0, 0.1)
    return conclude(model, losses)
