"""Pieces of a step in their order go in, with what each takes on host and device; seconds of the step come out.

The host queues kernels and runs ahead of the device, until it reads a value from it (most of HF's training steps do so
when they make their mask, and where images enter or leave the text): then it waits, and the device starts from nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_QUEUE = 1024  # kernels that CUDA lets the host be ahead
_ROUNDS = 3  # steps until they are alike


class Stack(NamedTuple):
    """A stage of a model: a stack of layers, or a module next to them."""

    path: str
    layers: int  # 0: no stack
    names: tuple[str, ...] = ()  # of a layer's modules, in their order
    is_language: bool = False  # layers of the language model, which a pipeline cuts


class Segment(NamedTuple):
    """Work that comes one after another."""

    host_s: float = 0.0
    device_s: float = 0.0
    launches: float = 0.0
    waits: float = 0.0  # times that the host waits for the device, before anything else


class Place(NamedTuple):
    """Where in a step: a pass, a stage in it or what is before one, and a module of a layer."""

    way: int  # 0: forward pass; 1: backward pass, numbers negative; 2: optimizer
    stage: float = 0.0
    module: float = 0.0


def find_place(module: str, group: str, stacks: Sequence[Stack]) -> tuple[float, float]:
    """Where a module is in the order of a forward pass: its stage, a half less for what is before it; in its layer.

    A module around stacks (model) comes before the first of them, around towers and language before the language.
    """
    if not module:
        return float(len(stacks)), 0.0  # the loss
    own = [i for i, stack in enumerate(stacks) if f"{module}.".startswith(f"{stack.path}.")]
    if own:
        at = max(own, key=lambda i: len(stacks[i].path))
        inner = module[len(stacks[at].path) :].removeprefix(".*").removeprefix(".")
        return float(at), _find_inner(inner, stacks[at].names)
    around = f"{module}."
    while around:
        inside = [i for i, stack in enumerate(stacks) if stack.layers and stack.path.startswith(around)]
        if inside:
            return (inside[-1] if group == "language" else inside[0]) - 0.5, 0.0
        outer = around[:-1].rpartition(".")[0]
        around = f"{outer}." if outer else ""
    return -0.5, 0.0


def _find_inner(inner: str, names: Sequence[str]) -> float:
    """The number of a layer's module; one around others comes with the first of them, the layer itself at its end."""
    if not inner:
        return float(len(names))
    if inner in names:
        return float(names.index(inner))
    for i, name in enumerate(names):
        if name.startswith(f"{inner}.") or (name and inner.startswith(f"{name}.")):
            return float(i)
    return float(len(names))


def order(found: Mapping[Place, Segment], stacks: Sequence[Stack]) -> list[tuple[Place, int, Segment]]:
    """Work by its place -> segments in their order, each layer of a stack after the other.

    Each comes with its place and the number of its layer, counted in the order of the pass; -1 without.
    """
    segments: list[tuple[Place, int, Segment]] = []
    stages: dict[tuple[int, float], list[Place]] = {}
    for place in sorted(found):
        stages.setdefault((place.way, place.stage), []).append(place)
    for (_, stage), places in stages.items():
        at = abs(stage)
        layers = stacks[int(at)].layers if at.is_integer() and at < len(stacks) else 0
        for i in range(layers):
            segments += [(place, i, each) for place in places for each in _take_layer(found[place], i, layers)]
        segments += [(place, -1, found[place]) for place in places] if not layers else []
    return segments


def _take_layer(part: Segment, i: int, layers: int) -> list[Segment]:
    """One layer's share. A layer that reads has sent its large kernels, and does its small ones when it has read."""
    host_s, device_s, launches = (value / layers for value in part[:3])
    if i >= part.waits:
        return [Segment(host_s, device_s, launches)]
    return [Segment(host_s / 2, device_s, launches), Segment(host_s / 2, waits=1.0)]


class Span(NamedTuple):
    """What the host or the device does from one moment to another, in seconds since the host began the step."""

    track: str  # host, device, waits
    segment: int  # its number; of a wait, the one that comes after it
    start_s: float
    end_s: float


def run(
    segments: Sequence[Segment], pause_s: float = 0.0, wake_s: float = 0.0, spans: list[Span] | None = None
) -> float:
    """Seconds of one of many steps after each other; with a pause of the host after each, until the host is through.

    `wake_s` goes by until a device that the host has waited for is as busy as it can be. `spans` takes what both do in
    the last of the steps.
    """
    host = device = begun = before = waiting = 0.0
    queued: deque[tuple[float, float]] = deque()  # (when the device ends it, launches)
    for _ in range(_ROUNDS):
        begun, before = host, max(host, device)
        if spans is not None:
            spans.clear()
        for i, (host_s, device_s, launches, waits) in enumerate(segments):
            arrived = host
            if waits:
                host = max(host, device)
                device = host + wake_s
            while queued and (waiting > _QUEUE or queued[0][0] <= host):
                ended, many = queued.popleft()
                waiting -= many
                host = max(host, ended)
            start, free = host, device
            host += host_s
            if launches:
                device = max(max(device, start) + device_s, host)
                queued.append((device, launches))
                waiting += launches
            if spans is not None:
                ran = (max(free, start), device) if launches else (0.0, 0.0)
                found = (("waits", arrived, start), ("host", start, host), ("device", *ran))
                spans += [Span(track, i, one - begun, other - begun) for track, one, other in found if other > one]
        host += pause_s
    return host - begun - pause_s if pause_s else max(host, device) - before
