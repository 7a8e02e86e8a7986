"""Weights of a step's classes of work by engine and GPU generation, and the intervals of answers, from data."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache
from operator import mul
from typing import Any, Literal, NamedTuple

from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import SpecError
from flopcalc.base.files import MAX_JSON_BYTES, read_json
from flopcalc.server.engines import split_version
from flopcalc.server.step import CLASSES

Evidence = Literal["pairing", "engine and GPU", "engine", "data sheet"]
SCHEMA = 1


class Weights(NamedTuple):
    """Seconds of one unit of each class, and the interval of an answer by what is known."""

    values: tuple[float, ...]
    evidence: Evidence
    intervals: dict[str, tuple[float, float]]  # quantity -> factors to the low and the high end

    def weigh(self, amounts: Sequence[float]) -> float:
        return math.fsum(map(mul, self.values, amounts))


@cache
def load_fit() -> dict[str, Any]:
    """The fitted weights; benchmarks/serving_fit.py makes the file."""
    path = os.path.join(find_data_dir(), "serving.json")
    data = read_json(path, MAX_JSON_BYTES, SpecError)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or tuple(data.get("classes", ())) != CLASSES:
        raise SpecError(f"{path}: is not of this version: benchmarks/serving_fit.py makes it")
    return data


def find_family(engine: str, version: str) -> str:
    """The releases of an engine that are fitted together: vllm, or vllm before 0.14."""
    starts = load_fit()["families"].get(engine)
    return f"{engine}<{starts}" if starts and split_version(version) < split_version(starts) else engine


def find_generation(device_id: str) -> str:
    """The generation of a GPU by its name: hopper, blackwell; others have none that is fitted."""
    generations: dict[str, list[str]] = load_fit()["generations"]
    for name, starts in generations.items():
        if device_id.startswith(tuple(starts)):
            return name
    return ""


def find_weights(model: str, engine: str, version: str, device_id: str, has_experts: bool = False) -> Weights:
    """The weights of an engine's release on a device, and how much was measured of this pairing."""
    fit = load_fit()
    family, generation = find_family(engine, version), find_generation(device_id)
    logs = [math.log(value) for value in fit["prior"]]
    for part in ("", family, generation):
        logs = [log + step for log, step in zip(logs, fit["effects"].get(part, [0.0] * len(logs)), strict=True)]
    evidence: Evidence = "data sheet"
    if f"{model} · {device_id} · {engine}" in fit["pairings"]:
        evidence = "pairing"
    elif any(name.endswith(f"· {device_id} · {engine}") for name in fit["pairings"]):
        evidence = "engine and GPU"
    elif generation and any(name.endswith(f"· {engine}") for name in fit["pairings"]):
        evidence = "engine"
    keys = {"ttft_s": "ttft_s", "tpot_s": "tpot_s" + " of experts" * has_experts}
    ends = {name: fit["intervals"][evidence][key] for name, key in keys.items()}
    intervals = {name: (float(low), float(high)) for name, (low, high) in ends.items()}
    return Weights(tuple(math.exp(log) for log in logs), evidence, intervals)
