"""`calibrate --predictor`: cases of whole steps go in; the constants that `flopcalc predict` reads come out."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any

from flopcalc.calibration import find_table, load_table
from flopcalc.data import find_user_dir
from flopcalc.errors import CalibrationError, DeviceError
from flopcalc.measure.calibrate import probe_machine
from flopcalc.measure.fit import fit_predictor, save_predictor
from flopcalc.measure.provenance import has_gpu
from flopcalc.measure.runner import Progress, run_jobs
from flopcalc.measure.tables import SUITES, counts, runs

Json = dict[str, Any]
FOLDER = "predictors"


def calibrate_predictor(
    suite: str,
    out: str | None = None,
    *,
    work: str | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    command: str = "flopcalc calibrate --predictor",
    progress: Progress | None = None,
) -> str | None:
    """Measure this machine and write <out>/<device-id>.json; its path, or None where the run was stopped.

    Resumable like the tables: what was measured lies in the journal.
    """
    if suite not in SUITES:
        raise CalibrationError(f"suite {suite!r} unknown; known: quick, full")
    if suite != "test" and not has_gpu():
        raise DeviceError("calibrate needs an NVIDIA GPU and found none on this machine")
    folder = out or os.path.join(find_user_dir(), FOLDER)
    work = work or os.path.join(folder, ".run")
    machine = probe_machine(suite, work)
    jobs = runs.plan(suite)
    state = os.path.join(work, f"{machine['device_id']}-predictor-{suite}")
    identity = {key: machine.get(key) for key in ("device", "device_id", "driver", "torch", "transformers", "flopcalc")}
    outcome = run_jobs(jobs, state, identity=identity, fresh=fresh, retry_failed=retry_failed, progress=progress)
    if outcome.stopped:
        return None
    found = [result.data for result in outcome.results if result.is_ok]
    cases = [record for record in found if "rounds" not in record]
    hosts = [record for record in found if "rounds" in record]
    if not cases or not hosts:
        failed = next((result.detail for result in outcome.results if not result.is_ok), "nothing ran")
        raise CalibrationError(f"too little was measured to fit a predictor: {failed}")
    stored = {table: find_table(machine["device_id"], table) for table in ("attention", "gemm")}
    alone = {table: load_table(path).records() if path else [] for table, path in stored.items()}
    provenance = {**machine, "command": command, "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
    configs = (lambda name: counts.get_config(name, "test")) if suite == "test" else runs.get_config
    constants = fit_predictor(cases, hosts, configs, provenance, alone["attention"], alone["gemm"])
    path = os.path.join(folder, f"{machine['device_id']}.json")
    save_predictor(path, constants)
    return path
