"""`flopcalc calibrate --predictor`: measure this machine and write the constants that `flopcalc predict` reads."""

from __future__ import annotations

import os
from datetime import UTC, datetime

from flopcalc.base.data import find_user_dir
from flopcalc.base.errors import CalibrationError, DeviceError
from flopcalc.hardware.devices import find_device
from flopcalc.hardware.tables import find_table, load_table
from flopcalc.measure.calibrate.probe import IDENTITY, probe_machine
from flopcalc.measure.calibrate.provenance import has_gpu
from flopcalc.measure.jobs.runner import Progress, run_jobs
from flopcalc.measure.predictor import runs
from flopcalc.measure.predictor.fit.predictor import fit_predictor, save_predictor
from flopcalc.prediction.kernels.constants import FOLDER, Provenance, load_shipped
from flopcalc.prediction.kernels.machine import MEASURED_ON


def calibrate_predictor(
    out: str | None = None,
    *,
    suite: str = "quick",
    work: str | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    command: str = "flopcalc calibrate --predictor",
    progress: Progress | None = None,
) -> str | None:
    """Measure this machine and write <out>/<device-id>.json; its path, or None if the run was stopped.

    A stopped run can be resumed: the journal keeps what was measured.
    """
    if not has_gpu():
        raise DeviceError("calibrate needs an NVIDIA GPU and found none on this machine")
    folder = out or os.path.join(find_user_dir(), FOLDER)
    work = work or os.path.join(folder, ".run")
    machine = probe_machine(suite, work)
    _check_device(machine)
    jobs = runs.plan(suite)
    state = os.path.join(work, f"{machine['device_id']}-predictor-{suite}")
    identity = {key: machine.get(key) for key in IDENTITY}
    outcome = run_jobs(jobs, state, identity=identity, fresh=fresh, retry_failed=retry_failed, progress=progress)
    if outcome.stopped:
        return None
    records = [result.data for result in outcome.results if result.is_ok]
    if not any("operators" in record for record in records) or not any(record.get("is_host") for record in records):
        failed = next((result.detail for result in outcome.results if not result.is_ok), "nothing ran")
        raise CalibrationError(f"too little was measured to fit a predictor: {failed}")
    paths = {table: find_table(machine["device_id"], table) for table in ("attention", "gemm")}
    tables = {table: load_table(path).records() if path else [] for table, path in paths.items()}
    provenance: Provenance = {**machine, "command": command, "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
    known = load_shipped(MEASURED_ON)
    constants = fit_predictor(records, runs.get_config, provenance, tables["attention"], tables["gemm"], known)
    path = os.path.join(folder, f"{machine['device_id']}.json")
    save_predictor(path, constants)
    return path


def _check_device(machine: Provenance) -> None:
    """Refuse a device whose peak or bandwidth is unknown, before anything is measured."""
    try:
        device = find_device(machine["device_id"])
    except DeviceError:
        missing = "entry"
    else:
        missing = "bf16 peak" if "bf16" not in device.peak_tflops else ""
        missing = missing or ("memory bandwidth" if device.bandwidth_gb_per_s is None else "")
    if missing:
        raise DeviceError(
            f"{machine['device']} has no {missing} in the device table, and a predictor needs it: add it to "
            f"{os.path.join(find_user_dir(), 'devices.toml')}"
        )
