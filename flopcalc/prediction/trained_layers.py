"""What trains in each layer of a model, and where gradients pass."""

from __future__ import annotations

from typing import NamedTuple

from flopcalc.core.count.products import Row
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.ops import join
from flopcalc.core.workload.workload import Workload
from flopcalc.prediction.rows import find_trained_rank


class LayerState(NamedTuple):
    """What of a layer, or of all outside layers, trains; and what is adapted, in other phases too."""

    flows: bool  # gradients pass
    weights: frozenset[str]  # modules whose own weights train
    adapted: frozenset[tuple[str, int]]  # modules with a LoRA adapter, and its rank
    silent: frozenset[str]  # modules that no gradient reaches: they lie before the first that trains


NO_STATE = LayerState(False, frozenset(), frozenset(), frozenset())


def find_states(estimator: Estimator, load: Workload) -> dict[tuple[str, int | None], LayerState]:
    """What trains and where gradients pass, from the core's own rows in order of execution."""
    is_train = load.phase == "train"
    places = {stage.path: number for number, stage in enumerate(estimator.stages)}
    rows: list[tuple[int, int, str, int | None, Row]] = []
    for block, row, _ in estimator.rows(load, "full"):
        for layer in block.layers if block.layers is not None else (None,):
            rows.append((places.get(block.path, 0), layer or 0, block.path, layer, row))
    rows.sort(key=lambda each: each[:2])
    sets: dict[tuple[str, int | None], tuple[set[str], set[tuple[str, int]], set[str]]] = {}
    flows: dict[tuple[str, int | None], bool] = {}
    is_passing = False
    for _, _, path, layer, row in rows:
        key: tuple[str, int | None] = (path, layer) if layer is not None else ("", None)
        weights, adapted, silent = sets.setdefault(key, (set(), set(), set()))
        op = row.op
        name = (join(path, op.name) if layer is None else op.name.removeprefix("/")).replace("*", "#")
        trains = is_train and (row.trainable > 0 or (row.trains_weight and bool(op.tied or op.again)))
        if trains and op.kind in ("linear", "conv", "embed") and not row.trains_weight:
            adapted.add((name, find_trained_rank(row)))
        elif trains or (op.kind == "attend" and weights):  # a bias of its scores trains where its projections do
            weights.add(name.rpartition(".")[0] if op.kind == "param" else name)
            if layer is not None and op.name.startswith(f"/{path}."):  # by its whole path, and as within its layer
                weights.add(name.removeprefix(f"{path}.").partition(".")[2])
        elif not is_train and (rank := row.rank):
            adapted.add((name, rank))
        starts = op.kind in ("embed", "conv") and layer is None  # no gradient comes into it
        if not trains and (starts or not is_passing):
            silent.add(name)
        is_hooked = op.input_embedding and is_train and estimator.recipe.recompute != "none"
        is_passing = is_passing or trains or is_hooked
        flows[key] = flows.get(key, False) or is_passing
    empty: tuple[set[str], set[tuple[str, int]], set[str]] = (set(), set(), set())
    keys: list[tuple[str, int | None]] = list(dict.fromkeys([("", None), *sets]))
    is_any = estimator.trains(load)
    states: dict[tuple[str, int | None], LayerState] = {}
    for key in keys:
        weights, adapted, silent = sets.get(key, empty)
        is_reached = flows.get(key, False) and is_any
        states[key] = LayerState(is_reached, frozenset(weights), frozenset(adapted), frozenset(silent))
    return states
