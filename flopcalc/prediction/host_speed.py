"""A machine's own host: what `flopcalc calibrate --host` measured there, put into constants of another machine."""

from __future__ import annotations

import os
from typing import Any

from flopcalc.data import find_user_dir
from flopcalc.errors import SpecError
from flopcalc.files import MAX_JSON_BYTES, read_json
from flopcalc.forms import POSITIVE, find_fault

FOLDER = "predictors"
SCHEMA = 1
_EDGES = dict.fromkeys(("low_s", "mid_s", "high_s"), POSITIVE)
_FORM = {"provenance": {"device_id": str, "date": str}, "probe_s": {"train": _EDGES, "forward": _EDGES}}
# A host's speed also changes between a calibration and the step, and types of models follow the probe only roughly:
# relative half width that is added to what the rounds of one calibration show.
_DRIFT = 0.1
# Hosts of other machines follow the probe less than in proportion (to this power): of 32 host-bound steps on machines
# other than the calibrated one (benchmarks/results: blind_steps, blind_steps_2, host_steps) the median error is 5.1 %
# with it and 7.1 % in proportion. On the calibrated machine itself, whose speed changes with time, steps follow fully.
FOLLOWS = 0.75


def name_file(device_id: str) -> str:
    return f"{device_id}.host.json"


def load_host(device_id: str) -> dict[str, Any] | None:
    """What was measured of this machine's host; None where nothing was."""
    path = os.path.join(find_user_dir(), FOLDER, name_file(device_id))
    if not os.path.isfile(path):
        return None
    data = read_json(path, MAX_JSON_BYTES, SpecError)
    schema = data.get("schema") if isinstance(data, dict) else None
    fault = f"schema {schema!r}, this version reads {SCHEMA}" if schema != SCHEMA else find_fault(data, _FORM)
    if fault:
        raise SpecError(f"{path}: {fault.lstrip('.: ')}; `flopcalc calibrate --host` makes it again")
    found: dict[str, object] = data
    return found


def adapt_host(constants: dict[str, Any], host: dict[str, Any]) -> dict[str, Any]:
    """Constants whose host's times are those of another host."""
    paces: dict[str, float] = {
        mode: (host["probe_s"][mode]["mid_s"] / constants["probe_s"][mode]) ** FOLLOWS for mode in ("train", "forward")
    }

    def find_pace(name: str) -> float:
        return paces["train" if "train" in name or name == "again" else "forward"]

    own = constants["host"]
    scaled = {
        name: [value * find_pace(name) for value in own[name]] for name in ("train", "forward", "decode", "again")
    }
    types = {
        kind: {name: [seconds * find_pace(name), factor] for name, (seconds, factor) in table.items()}
        for kind, table in own["types"].items()
    }
    compiled = {**constants["compiled"], "launch_s": constants["compiled"]["launch_s"] * paces["forward"]}
    edges = host["probe_s"].values()
    spread = max((edge["high_s"] - edge["low_s"]) / 2 / edge["mid_s"] for edge in edges)
    return {
        **constants,
        "host": {**own, **scaled, "types": types},
        "compiled": compiled,
        "probe_s": {mode: host["probe_s"][mode]["mid_s"] for mode in paces},
        "own_host": {**paces, "spread": spread + _DRIFT, "date": host["provenance"]["date"]},
    }
