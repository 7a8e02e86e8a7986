"""A configuration's process without torch: made-up measurements, and failures at chosen lengths."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

CALL = "sweep_stand_in:start"
RAISES, LACKS_MEMORY, IS_KILLED, DIVERGES = 13, 14, 15, 16  # sequence lengths
FACTORS = {"StandardTrainer": 1, "DPSGDTrainer": 2, "DPGhostClippingTrainer": 3, "DPFastGradientClippingTrainer": 4}


def start(args: dict[str, Any]) -> Callable[[Any], Any]:
    print("building", args["trainer"], flush=True)
    return lambda _: measure(args)


def measure(args: dict[str, Any]) -> dict[str, Any]:
    calls = os.environ.get("STAND_IN_CALLS")
    if calls:
        with open(calls, "a") as file:
            file.write(f"{args['trainer']} {args['batch_size']} {args['seq_len']} {args['model']}\n")
    if args["seq_len"] == RAISES:
        raise KeyError("not there")
    if args["seq_len"] == LACKS_MEMORY:
        raise MemoryError("90 GiB")
    if args["seq_len"] == IS_KILLED:
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    factor = FACTORS[args["trainer"]]
    return {
        **{key: args[key] for key in ("trainer", "batch_size", "seq_len", "model", "steps", "warmup", "attention")},
        "dtype": "fp32",
        "device": "cpu",
        "parameters": 234816,
        "step_time_s": {"median": 0.25 * factor, "min": 0.2, "max": 2.0, "p10": 0.2 * factor, "p90": 0.5 * factor},
        "tokens_per_s": 1024.0 / factor,
        "peak_memory_bytes": (1 << 20) * factor,
        "flops": {"convention": "hardware", "total": 1000 * factor, "clipping": 1000 * (factor - 1)},
        "counted_over_analytic": 1.0,
        "measured_over_analytic": None,
        "mfu": None,
        "loss": {"first": 7.0, "last": float("nan") if args["seq_len"] == DIVERGES else 6.5},
        "environment": {"device": "stand-in", "torch": "2.0"},
        "run_dir": args["run_dir"],
        "process": os.getpid(),
    }
