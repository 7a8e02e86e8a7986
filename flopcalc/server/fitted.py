"""Weights of a step's classes of work by engine and GPU generation, and the intervals of answers, from data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Literal, NamedTuple

from flopcalc.server.engines import split_version
from flopcalc.server.step import load_fitted

Evidence = Literal["pairing", "engine and GPU", "engine", "data sheet"]


class Weights(NamedTuple):
    """Seconds of one unit of each class, and the interval of an answer by what is known."""

    values: tuple[float, ...]
    evidence: Evidence
    intervals: dict[str, tuple[float, float]]  # quantity -> factors to the low and the high end

    def weigh(self, amounts: Sequence[float]) -> float:
        return math.fsum(map(mul, self.values, amounts))


def find_weights(
    model: str, engine: str, version: str, device_id: str, has_experts: bool = False, has_media: bool = False
) -> Weights:
    """The weights of an engine's release on a device, and how much was measured of this pairing; of media, nothing."""
    fit = load_fitted()
    starts = fit["families"].get(engine)  # releases that are fitted together: vllm, and vllm before 0.14
    family = f"{engine}<{starts}" if starts and split_version(version) < split_version(starts) else engine
    generation = next((name for name, ids in fit["generations"].items() if device_id.startswith(tuple(ids))), "")
    logs = [math.log(value) for value in fit["prior"]]
    for part in ("", family, generation):
        logs = [log + step for log, step in zip(logs, fit["effects"].get(part, [0.0] * len(logs)), strict=True)]
    evidence: Evidence = "data sheet"
    known = [] if has_media else fit["pairings"]
    if f"{model} · {device_id} · {engine}" in known:
        evidence = "pairing"
    elif any(name.endswith(f"· {device_id} · {engine}") for name in known):
        evidence = "engine and GPU"
    elif generation and any(name.endswith(f"· {engine}") for name in known):
        evidence = "engine"
    keys = {"ttft_s": "ttft_s", "tpot_s": "tpot_s" + " of experts" * has_experts}
    ends = {name: fit["intervals"][evidence][key] for name, key in keys.items()}
    intervals = {name: (float(low), float(high)) for name, (low, high) in ends.items()}
    return Weights(tuple(math.exp(log) for log in logs), evidence, intervals)
