"""What one of many devices holds of a step's tensors, before ZeRO and with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flopcalc.prediction.memory.tensors import Part, SplitBytes


class Shards(NamedTuple):
    """What one of many devices holds of a step; the defaults are those of a device alone."""

    zero: int = 0  # 1: ranks share the optimizer's states, 2: gradients too, 3: weights too
    ranks: int = 1  # devices that would hold the same dense weights
    expert_ranks: int = 1  # and the same experts
    tensor: int = 1  # devices that share each layer
    experts: int = 1  # devices that share a layer's experts
    sequence: int = 1  # devices that share a sequence
    is_spread: bool = True  # devices that share a layer share norms and residuals too
    layers: tuple[int, int] = (1, 1)  # the language model's layers here, of how many
    has_first: bool = True  # what comes before them
    has_last: bool = True  # and after
    in_flight: float = 1.0  # micro-batches whose activations are kept
    kinds: tuple[tuple[int, int], ...] = ()  # the same for layers of each kind; without, a share of every kind

    def divide(self, stage: int) -> tuple[int, int]:
        """Into how many parts ZeRO of this stage divides dense weights and experts."""
        return (self.ranks, self.expert_ranks) if self.zero >= stage else (1, 1)

    def take_layers(self, part: Part) -> tuple[SplitBytes, SplitBytes, SplitBytes]:
        """Weights, trained parameters and what is kept of a stage's layers that are here, before they are cut."""
        if not part.is_language:
            return part.weights, part.trained, part.kept
        if not self.kinds or not part.kinds:
            return tuple(_share(held, *self.layers) for held in (part.weights, part.trained, part.kept))  # type: ignore[return-value]
        own = [(kind, *self.kinds[kind.number]) for kind in part.kinds]
        return (
            sum_held(_share(kind.weights, here, whole) for kind, here, whole in own),
            sum_held(_share(kind.trained, here, whole) for kind, here, whole in own),
            sum_held(_share(kind.kept, here, whole) for kind, here, whole in own),
        )

    def cut_weights(self, held: SplitBytes) -> SplitBytes:
        """The share of weights that is here before ZeRO."""
        return SplitBytes(-(-held.dense // self.tensor), -(-held.other // self.experts))

    def cut_kept(self, kept: SplitBytes) -> int:
        """The share of what a stage keeps, of all micro-batches in flight."""
        wide = kept.dense / (self.tensor if self.is_spread else 1)
        return round((wide + kept.other / self.tensor) / self.sequence * self.in_flight)


def cut_parts(shards: Shards, parts: tuple[Part, ...], dtype_bytes: int) -> tuple[Part, ...]:
    """The stages that a device has, each cut; ZeRO aside."""
    found = []
    for part in parts:
        wide = part.wide_share / (shards.tensor if shards.is_spread else 1)
        share = (wide + (1 - part.wide_share) / shards.tensor) / shards.sequence
        saved = part.kept
        if shards.sequence > 1:  # a ring or all-to-all keeps its own copy of what attention puts out (TE 2.8)
            saved = SplitBytes(saved.dense, saved.other + part.outputs)
        weights, trained = shards.cut_weights(part.weights), shards.cut_weights(part.trained)
        table = part.table // shards.tensor
        if part.copied and not shards.has_first:  # of a head that is the table of embeddings, a copy
            weights = SplitBytes(weights.dense + part.copied * dtype_bytes // shards.tensor, weights.other)
            trained = SplitBytes(trained.dense + (part.copied // shards.tensor if table else 0), trained.other)
            table = 0
        elif not shards.has_last:
            table = 0
        kept, extra = SplitBytes(shards.cut_kept(saved)), round(part.extra * share)
        found.append(Part(part.layers, weights, trained, kept, extra, table, part.name))
    return tuple(found)


def _share(held: SplitBytes, here: int, whole: int) -> SplitBytes:
    return SplitBytes(-(-held.dense * here // whole), -(-held.other * here // whole))


def sum_held(held: Iterable[SplitBytes]) -> SplitBytes:
    dense = other = 0
    for each in held:
        dense, other = dense + each.dense, other + each.other
    return SplitBytes(dense, other)


def divide_held(held: SplitBytes, by: tuple[int, int], each: int = 1) -> int:
    """The share of one rank, of so many bytes each."""
    return -(-held.dense * each // by[0]) + -(-held.other * each // by[1])
