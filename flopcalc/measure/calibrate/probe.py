"""What machine is measured, read in a process of its own."""

from __future__ import annotations

import os
import shutil

from flopcalc.base.errors import DeviceError
from flopcalc.measure.calibrate.tables import get_device
from flopcalc.measure.jobs.runner import Job, run_jobs
from flopcalc.prediction.kernels.constants import Provenance

# What must not change between the parts of a resumed run.
IDENTITY = (
    "device", "device_id", "power_limit_w", "driver", "cuda", "cudnn", "torch", "transformers", "python", "flopcalc",
    "commit",
)  # fmt: skip


def probe_machine(suite: str, work: str) -> Provenance:
    """This machine's provenance, read in a process of its own: the parent never imports torch."""
    job = Job(
        "probe", "flopcalc.measure.calibrate.provenance:start_probe", {"device": get_device(suite)}, {"machine": None}
    )  # fmt: skip
    # A folder of its own: the lock that keeps two runs apart is that of the measuring itself.
    folder = os.path.join(work, f"probe-{os.getpid()}")
    try:
        outcome = run_jobs([job], folder, fresh=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if outcome.stopped:
        raise KeyboardInterrupt
    result = outcome.results[0]
    if not result.is_ok:
        raise DeviceError(f"this machine's device cannot be used: {result.detail}")
    machine: Provenance = result.data
    return machine
