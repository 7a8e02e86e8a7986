"""What a run dispatches and keeps, by stage, kind of layer and module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from flopcalc.core.estimate.estimate import Estimator
from flopcalc.prediction.recordings import sign_layer, sign_outside
from lab.operators.configs import find_switches
from lab.operators.dispatch import Event, Kept
from lab.operators.runs import Run

Place = tuple[str, int | None, str]  # stage or "", layer, module inside it
Spot = tuple[str, str, str]  # stage, signature, "*" or first or last


def place(estimator: Estimator, path: str) -> Place:
    for stage in estimator.stages:
        if stage.repeated and path.startswith(stage.path + "."):
            layer, _, name = path[len(stage.path) + 1 :].partition(".")
            if layer.isdigit():
                return stage.path, int(layer), name
    return "", None, path


def fold(name: str) -> str:
    return ".".join("#" if part.isdigit() and "experts" in name else part for part in name.split("."))


def gather(each: Run) -> dict[Spot, tuple[Any, dict[str, list[Event]]]]:
    """Events by kind of layer and module: of one layer of a kind; the first and the last of a stage apart."""
    lists: dict[tuple[str, int | None], dict[str, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in each.trace.events:
        stage, layer, name = place(each.estimator, event.module)
        lists[stage, layer][fold(name)].append(event)
    # Nodes are listed apart from what they run: their order says nothing.
    ordered = {
        spot: {name: sorted(events, key=lambda event: event.kind == "node") for name, events in modules.items()}
        for spot, modules in lists.items()
    }
    return _put_in_place(each, ordered)


def gather_kept(each: Run) -> dict[Spot, tuple[Any, dict[Any, Kept]]]:
    """As gather: what is kept, by what made it."""
    lists: dict[tuple[str, int | None], dict[object, Kept]] = defaultdict(dict)
    for kept in each.trace.kept:
        stage, layer, _ = place(each.estimator, kept.savers[0])
        own = [place(each.estimator, saver) for saver in kept.savers]
        names = tuple(fold(name) for s, n, name in own if (s, n) == (stage, layer))
        maker = place(each.estimator, kept.made_by[0])
        key: tuple[object, ...] = (maker[0], fold(maker[2]), kept.made_by[1], maker[1] == layer)
        while key in lists[stage, layer]:
            key = (*key, 0)
        lists[stage, layer][key] = kept._replace(savers=names)
    return _put_in_place(each, lists)


def _find_spots(each: Run) -> dict[tuple[str, int | None], Spot]:
    spots: dict[tuple[str, int | None], Spot] = {}
    switches = find_switches(each.estimator)
    for stage in each.estimator.stages:
        if not stage.repeated:
            continue
        kinds: dict[str, list[int]] = defaultdict(list)
        for number, chain in enumerate(stage.layers, stage.first):
            kinds[sign_layer(stage, chain, switches)].append(number)
        last = stage.first + len(stage.layers) - 1
        for signature, numbers in kinds.items():
            for number in numbers:
                where = "first" if number == stage.first else "last" if number == last else "*"
                spots[stage.path, number] = (stage.path, signature, where)
    spots["", None] = ("", sign_outside(each.estimator.stages, switches), "*")
    return spots


def _put_in_place(each: Run, lists: Mapping[tuple[str, int | None], object]) -> dict[Spot, tuple[Any, Any]]:
    stages = {stage.path: stage for stage in each.estimator.stages}
    spots = _find_spots(each)
    found: dict[Spot, tuple[object, object]] = {}
    for (stage, layer), entry in lists.items():
        if (stage, layer) in spots:
            chain = stages[stage].layers[layer - stages[stage].first] if layer is not None else None
            found.setdefault(spots[stage, layer], (chain, entry))
    return found
