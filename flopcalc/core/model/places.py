"""What an op's place in its layer says of it where its spec does not: its split, its gate, what it reads.

These are the defaults that docs/specs.md promises. They read the order of ops, their kinds and parts,
never their sizes.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from flopcalc.core.model.ops import Attend, Chain, Linear, Norm, Op, Pointwise, iterate, map_ops
from flopcalc.core.spec.spec import Gate, Split

_APART = ("router", "modulation", "projector")  # parts whose products make nothing that another product sums up
_SCANNED = ("ssm", "attention_projections")  # parts whose products of activations mix tokens
_ANY = "any"  # part of what attention or a scan made
_Items = list["Op | tuple[Chain, ...]"]


class _Flow(NamedTuple):
    """What a tensor on its way through a layer has passed since the residual stream."""

    part: str = ""  # of the last product, if none has summed up what it made
    is_mixed: bool = False  # attention, a scan or an activation function came after it


def settle(chain: Chain) -> Chain:
    """The chain of a layer, whose ops say how they are split, gated and normed."""
    return _settle(chain, _Flow())[0]


def _settle(chain: Chain, flow: _Flow) -> tuple[Chain, _Flow]:
    made: _Items = []
    for item in chain:
        if not isinstance(item, Op):
            settled = [_settle(branch, flow) for branch in item]
            made.append(tuple(branch for branch, _ in settled))
            flow = next((own for _, own in settled if own.part), _Flow())
            continue
        if isinstance(item, Linear):
            is_row = flow.is_mixed and flow.part in (_ANY, item.part)
            usual: Split | None = "whole" if item.part == "router" else "row" if is_row else None
            said = item.inferred if item.split else (*item.inferred, "split")
            item = item.replace(split=item.split or usual, reads_stream=not flow.part, inferred=said)
            flow = _Flow("" if item.split == "row" or item.part in _APART else item.part)
        elif isinstance(item, Norm) and not item.over:
            before = made[-1] if made else None
            if isinstance(before, Linear) and before.split != "row" and before.copies == 1:
                item = item.replace(over=before.n_out, inferred=(*item.inferred, "over"))
        elif isinstance(item, Pointwise) and item.gate is None:
            item = item.replace(gate=_find_gate(made), inferred=(*item.inferred, "gate"))
        elif isinstance(item, Attend):
            _mark_projections(made)
        made.append(item)
        if flow.part and item.kind in ("attend", "product", "pointwise"):
            is_any = item.kind == "attend" or (item.kind == "product" and flow.part in _SCANNED)
            flow = _Flow(_ANY if is_any else flow.part, True)
    return tuple(made), flow


def _find_gate(before: _Items) -> Gate:
    """An activation function after two products that are siblings multiplies one by the other."""
    last = before[-1] if before else None
    if not isinstance(last, tuple) or len(last) != 2:
        return "plain"
    is_pair = all(len(each) == 1 and isinstance(each[0], Linear) and each[0].part != "router" for each in last)
    return "pair" if is_pair else "plain"


def _mark_projections(before: _Items) -> None:
    """The projections of an attention call, in place: its operands, and those of low rank that lead to them.

    One operand is queries, keys and values; of siblings the first is the queries.
    """
    calls = [i for i, item in enumerate(before) if isinstance(item, Attend)]
    first = calls[-1] + 1 if calls else 0
    places = [i for i in range(first, len(before)) if any(isinstance(op, Linear) for op in iterate((before[i],)))]
    for i in places:
        item = before[i]
        if i != places[-1]:
            (before[i],) = map_ops((item,), partial(_say, split="whole"))
        elif isinstance(item, Op):
            before[i] = _say(item, "fused")
        else:
            before[i] = tuple(
                _mark_branch(branch, "keys" if number else "column") for number, branch in enumerate(item)
            )


def _mark_branch(branch: Chain, word: Split) -> Chain:
    """A branch whose last products have a split; those before them are of low rank."""
    places = [i for i, item in enumerate(branch) if any(isinstance(op, Linear) for op in iterate((item,)))]
    made = list(branch)
    for i in places:
        split: Split = word if i == places[-1] else "whole"
        (made[i],) = map_ops((made[i],), partial(_say, split=split))
    return tuple(made)


def _say(op: Op, split: Split) -> Op:
    is_open = isinstance(op, Linear) and op.split is None and op.part == "attention_projections"
    return op.replace(split=split) if is_open else op
