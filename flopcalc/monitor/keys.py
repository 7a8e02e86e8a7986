"""The log's name, and the names of a record's metrics: which are core, which detail, what other projects call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flopcalc.base.errors import ConfigError, format_nearest

LOG_NAME = "flopcalc.jsonl"
SCHEMA = 1  # of the JSONL log, in its start lines
# In every record, NaN where not known.
CORE = (
    "global_step", "perf/mfu", "perf/mfu_percent", "perf/step_time", "perf/steps_per_second", "perf/tokens_per_second",
    "perf/samples_per_second", "training/loss", "training/lr", "training/grad_norm", "training/epoch",
)  # fmt: skip
# In every record too: what the numbers rest on.
CONTEXT = (
    "perf/source",
    "perf/convention",
    "perf/peak_flops_per_s",
    "perf/device",
    "perf/dtype",
    "perf/scope",
    "perf/steps",
    "perf/mfu_step",
    "perf/mfu_of_bf16_peak",
)
# In every record of a job of several ranks: this rank's own.
RANK = ("perf/rank_mfu", "perf/rank_step_time")
# Every `detail_every` steps; goodput/lost_<cause>_s joins them, with causes that only the run knows.
DETAIL = (
    "perf/hfu", "perf/device_mfu", "perf/device_step_time", "perf/tflops_per_gpu", "perf/padded_tokens_per_second",
    "perf/images_per_second", "perf/model_flops", "perf/hardware_flops", "perf/factor", "perf/data_time",
    "perf/tensor_active", "perf/sm_active", "perf/dram_active", "perf/power_w", "perf/energy_wh",
    "perf/slowest_rank_step_time", "perf/stragglers", "goodput/share",
)  # fmt: skip
LOST_PREFIX, LOST_SUFFIX = "goodput/lost_", "_s"
# Of a step that is more than training; each with flops, hardware_flops, seconds and mfu.
PASS_PREFIX = "perf/passes/"
PASSES = ("train", "reference", "rollout", "score", "eval")
DATASET_PREFIX = "dataset/"

# Ours -> theirs, only where meaning and unit are the same; every other key keeps its own name. Left out on purpose:
# FLOP/s in other units, tokens per device (torchtitan's throughput(tps), Lightning's device/items_per_sec), batches
# of which several make one optimizer step (Lightning's batches_per_sec), learning rates that carry an optimizer's name
# (Composer).
STYLES: dict[str, dict[str, str]] = {
    "flopcalc": {},
    # composer: callbacks/speed_monitor.py, callbacks/optimizer_monitor.py, trainer/trainer.py
    "composer": {
        "perf/mfu": "throughput/device/mfu",
        "perf/steps_per_second": "throughput/batches_per_sec",
        "perf/tokens_per_second": "throughput/tokens_per_sec",
        "perf/samples_per_second": "throughput/samples_per_sec",
        "training/loss": "loss/train/total",
        "training/grad_norm": "l2_norm/grad/global",
    },
    # lightning 2.6: pytorch/callbacks/throughput_monitor.py puts the stage before the names of
    # fabric/utilities/throughput.py; `epoch` comes from its logger connector
    "lightning": {
        "perf/mfu": "train/device/mfu",
        "perf/tokens_per_second": "train/items_per_sec",
        "perf/samples_per_second": "train/samples_per_sec",
        "training/epoch": "epoch",
    },
    # torchtitan at 00fbaaf: components/metrics.py; lr is among the extra metrics of train.py
    "torchtitan": {
        "perf/mfu_percent": "mfu(%)",
        "perf/tflops_per_gpu": "tflops",
        "perf/step_time": "time_metrics/end_to_end(s)",
        "perf/data_time": "time_metrics/data_loading(s)",
        "training/loss": "loss_metrics/global_avg_loss",
        "training/grad_norm": "grad_norm",
        "training/lr": "lr",
    },
    # transformers 5: trainer.py and trainer_utils.py:speed_metrics, as integrations/integration_utils.py sends them on
    "hf": {
        "global_step": "train/global_step",
        "perf/steps_per_second": "train_steps_per_second",
        "perf/tokens_per_second": "train_tokens_per_second",
        "perf/samples_per_second": "train_samples_per_second",
        "training/loss": "train/loss",
        "training/lr": "train/learning_rate",
        "training/grad_norm": "train/grad_norm",
        "training/epoch": "train/epoch",
    },
}


def rename(record: Mapping[str, object], style: str) -> dict[str, Any]:
    """The record under another project's names, in the same order; for services, never for the JSONL log."""
    if style not in STYLES:
        raise ConfigError(f"no key style {style!r}.{format_nearest(style, STYLES)} Known: {', '.join(STYLES)}")
    names = STYLES[style]
    return {names.get(key, key): value for key, value in record.items()}
