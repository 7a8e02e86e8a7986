"""The monitor's watts and watt-hours in a training loop on a GPU, beside NVML's own counter over the same time.

    python benchmarks/monitor_power.py [--out FILE] [--seconds 10] [--tiny]   # --tiny: a toy, on a CPU, without watts

Trains the same steps alone and with a monitor, and the first of them once more alone. Losses must be the same bit for
bit. Whenever the monitor's perf/energy_wh has moved, NVML's counter is read too; between the first and the last such
moment both must have counted the same energy, within 5 %: NVML counts in steps of up to 0.1 s. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products that repeat bit for bit
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flopcalc.core.model.config import load_config
from flopcalc.measure.calibrate.provenance import DeviceGauge, describe_machine
from flopcalc.monitor import TrainingMonitor

Json = dict[str, Any]
MODEL, BATCH, SEQ, WARM_UP, AGAIN = "llama-3.2-1b", 4, 2048, 5, 20
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 101}  # fmt: skip


class Run(NamedTuple):
    """What one training came to."""

    losses: list[float]
    seconds: float
    moments: list[Json]  # when the monitor's energy had moved


def train(device: str, *, steps: int = 0, seconds: float = 0.0, folder: str = "") -> Run:
    """So many steps, or as many as fit; with a monitor that logs into `folder`, if one is given."""
    is_tiny = device == "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(**TINY if is_tiny else load_config(MODEL).config)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    random = torch.Generator(device).manual_seed(1)
    gauge, moments, losses = DeviceGauge(), [], []
    monitor = TrainingMonitor(folder, {"monitoring": {"detail_every": 5}}, model=model) if folder else None
    batch, seq = (2, 16) if is_tiny else (BATCH, SEQ)
    first = begun = time.perf_counter()
    energy_wh = None
    while len(losses) < steps or (not steps and time.perf_counter() - begun < seconds):
        if len(losses) == WARM_UP:
            wait(device)
            begun = time.perf_counter()
        ids = torch.randint(3, 101, (batch, seq), generator=random, device=device)
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if len(losses) % 5 == 0:
            wait(device)  # as a loop that prints its loss; the monitor's values are of finished steps too
        if monitor is not None:
            monitor.log_step(len(losses), 0.0, loss, None, 1e-5)
            found = monitor.metrics()
            if (now_wh := found.get("perf/energy_wh")) != energy_wh:
                energy_wh = now_wh
                moments.append({"at_s": round(time.perf_counter() - first, 3), "nvml_j": gauge.read_energy_j(),
                                **{name: found.get(name) for name in ("perf/energy_wh", "perf/power_w")}})  # fmt: skip
    wait(device)
    taken = time.perf_counter() - begun
    if monitor is not None:
        monitor.close()
    return Run([loss.item() for loss in losses], taken, moments)


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def compare(device: str, seconds: float, folder: str) -> Json:
    alone = train(device, seconds=seconds)
    count = len(alone.losses)
    again = train(device, steps=min(count, AGAIN)).losses
    watched = train(device, steps=count, folder=folder)
    with open(os.path.join(folder, "flopcalc.jsonl"), encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    found: Json = {
        "model": "a toy" if device == "cpu" else f"{MODEL}, {BATCH}x{SEQ}, bf16, AdamW, deterministic",
        "steps": count,
        "losses_repeat_alone": again == alone.losses[: len(again)],
        "losses_same_with_monitor": alone.losses == watched.losses,
        "last_loss": watched.losses[-1],
        "seconds_alone": round(alone.seconds, 3),
        "seconds_with_monitor": round(watched.seconds, 3),
        "records_with_watts": sum("perf/power_w" in record for record in records),
        "moments": watched.moments,
    }
    if len(watched.moments) > 1:
        start, end = watched.moments[0], watched.moments[-1]
        monitor_j = 3600 * (end["perf/energy_wh"] - start["perf/energy_wh"])
        nvml_j = end["nvml_j"] - start["nvml_j"]
        lasted_s = end["at_s"] - start["at_s"]
        found |= {"monitor_j": round(monitor_j, 1), "nvml_j": round(nvml_j, 1), "ratio": round(monitor_j / nvml_j, 4),
                  "nvml_w": round(nvml_j / lasted_s, 1)}  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the result to this JSON file")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each training, default 10")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    torch.use_deterministic_algorithms(True)
    if not options.tiny:
        torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention repeats bit for bit when asked to
    with tempfile.TemporaryDirectory() as folder:
        found = compare(device, options.seconds, folder)
    command = f"python benchmarks/monitor_power.py --seconds {options.seconds:g}{' --tiny' * options.tiny}"
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    text = json.dumps({"provenance": {**describe_machine(device), "command": command, "date": date}, **found}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    is_same = found["losses_same_with_monitor"] and found["losses_repeat_alone"]
    return 0 if is_same and (options.tiny or abs(found.get("ratio", 0.0) - 1) < 0.05) else 1


if __name__ == "__main__":
    sys.exit(main())
