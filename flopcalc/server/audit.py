"""Published rows held against physics: times that are shorter than the bytes or the products of a step allow."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from flopcalc.base.errors import FlopcalcError, WorkloadError
from flopcalc.base.files import read_csv
from flopcalc.hardware.devices import find_device
from flopcalc.server.served import ServedModel, read_model
from flopcalc.server.step import Deployment, Rates, StepModel, find_peak
from flopcalc.setup.counting import bind_setup
from flopcalc.setup.setup import make_setup

_MOST_ROWS = 3000
# A column's names in published tables.
_COLUMNS = {
    "input": ("input", "input_tokens", "input_len", "isl"),
    "output": ("output", "output_tokens", "output_len", "osl"),
    "weights": ("weights_format", "weights"),
    "kv_cache": ("kv_format", "kv_cache"),
}

_NEEDED = ("model", "device", "tp", "concurrency", "input", "output", "tpot_ms")


def check_rows(path: str) -> list[dict[str, Any]]:
    """A finding for each row of a CSV file; `faults` is empty where physics allows the row."""
    rows = read_csv(path, _MOST_ROWS, WorkloadError)
    lacking = [name for name in _NEEDED if not rows or not any(each in rows[0] for each in _COLUMNS.get(name, (name,)))]
    if lacking:
        raise WorkloadError(f"{path}: lacks {', '.join(lacking)}; a row needs {', '.join(_NEEDED)}")
    return [{"line": number, "model": row.get("model"), **_check(row)} for number, row in enumerate(rows, 2)]


@lru_cache(maxsize=64)
def _load_model(name: str, formats: tuple[tuple[str, str], ...]) -> ServedModel:
    return read_model(bind_setup(make_setup("serving", name, dict(formats)), "model"))


def _check(row: dict[str, str]) -> dict[str, Any]:
    read = {name: next((row[each] for each in names if row.get(each)), "") for name, names in _COLUMNS.items()}
    try:
        formats = {name: read[name] for name in ("weights", "kv_cache") if read[name]}
        model = _load_model(row["model"].lower(), tuple(formats.items()))
        layout = Deployment(int(row["tp"]), int(row.get("dp") or 1), int(row.get("pp") or 1), int(row.get("ep") or 1))
        device, output = find_device(row["device"]), int(read["output"])
        ttft, tpot = float(row.get("ttft_ms") or 0) / 1e3, float(row["tpot_ms"]) / 1e3
        concurrency, length = float(row["concurrency"]), int(read["input"]) + output / 2
        if min(tpot, concurrency, length) <= 0:
            raise ValueError("a value is not positive")
    except (FlopcalcError, KeyError, TypeError, ValueError) as error:
        return {"faults": [f"cannot be checked: {error}"], "least_tpot_s": None, "mfu": None}
    step = StepModel(model, layout, Rates(device, layout.gpus))
    decoding = tpot * (output - 1)
    running = max(1.0, concurrency / layout.replicas * decoding / (decoding + ttft))
    # One token reaches the fewest experts: whatever routers prefer, no fewer are read.
    moved = step.count_bytes(1.0 / layout.dp, running * length)
    least = moved / step.rates.bandwidth
    peak = find_peak(device.id, max((each.compute for each in model.weights), default=""))
    mfu = step.count_flops() * running * layout.replicas / tpot / (peak * layout.gpus)
    faults = []
    if tpot < least and row.get("spec", "none") in ("", "none"):
        faults.append(f"TPOT {1e3 * tpot:.2f} ms, but reading {moved / 1e9:.1f} GB takes {1e3 * least:.2f} ms")
    if mfu > 1:
        faults.append(f"MFU {mfu:.0%}: more than the GPU can")
    return {"faults": faults, "least_tpot_s": least, "mfu": mfu}
