"""What tables and pages call the parts of a result."""

from __future__ import annotations

# Metrics in the summary of a monitor's log.
METRICS = {
    "mfu": "MFU (wall)", "device_mfu": "MFU (device)", "hfu": "HFU", "tflops_per_gpu": "TFLOP/s per GPU",
    "tokens_per_second": "tokens/s", "padded_tokens_per_second": "padded tokens/s", "samples_per_second": "samples/s",
    "images_per_second": "images/s", "step_time_s": "step time", "device_step_time_s": "device step time",
    "data_time_s": "data time", "tensor_active": "tensor cores active", "loss": "loss",
}  # fmt: skip
SHARES = ("mfu", "device_mfu", "hfu", "tensor_active")  # metrics that are shares
