"""The monitor over a long run on the CPU: memory, threads and open files stay flat, and losses bit-identical.

    python benchmarks/monitor_soak.py [--minutes 60] [--out FILE]

Trains a toy model, first a few steps alone, then with a monitor for so long. The first steps' losses must be the same.
After a tenth of the time, and at the end, it reads what the process holds. Exit code 1 if something grew: memory by
more than 20 MB, or threads or open files at all.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flopcalc.monitor import TrainingMonitor

MOST_BYTES = 20_000_000
COMPARED = 200  # steps whose losses must be the same
MOST_LOG_BYTES = 50_000_000  # then the log is moved away, as a log rotation does
CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=101,
    use_cache=False,
)


class Held(NamedTuple):
    """What a process holds."""

    memory_bytes: int
    threads: int
    files: int


def read_held() -> Held:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return Held(pages * os.sysconf("SC_PAGE_SIZE"), threading.active_count(), len(os.listdir("/proc/self/fd")))


class Loop:
    """A toy model on random batches; two of them take the same steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(CONFIG).train()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._batches = torch.Generator().manual_seed(1)

    def train_step(self) -> torch.Tensor:
        ids = torch.randint(3, 101, (2, 16), generator=self._batches)
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def soak(folder: str, minutes: float) -> dict[str, object]:
    alone = Loop()
    expected = [alone.train_step().item() for _ in range(COMPARED)]
    loop = Loop()
    log = os.path.join(folder, "flopcalc.jsonl")
    monitor = TrainingMonitor(folder, {"monitoring": {"peak_flops_per_s": 1e12}}, model=loop.model)
    losses: list[float] = []
    begun, begin, step, rotations = time.monotonic(), None, 0, 0
    while (elapsed_s := time.monotonic() - begun) < 60 * minutes:
        step += 1
        loss = loop.train_step()
        if step <= COMPARED:
            losses.append(loss.item())
        monitor.log_step(step, 0.0, loss, None, 0.1)
        if begin is None and elapsed_s > 6 * minutes and step >= COMPARED:
            begin = read_held()
        if step % 1000 == 0 and os.path.exists(log) and os.path.getsize(log) > MOST_LOG_BYTES:
            os.replace(log, f"{log}.1")
            rotations += 1
    end = read_held()
    monitor.close()
    with open(log, encoding="utf-8") as file:
        last = json.loads(file.readlines()[-1])
    begin = begin or end
    return {
        "minutes": minutes,
        "steps": step,
        "same_losses": losses == expected[: len(losses)],
        "after_a_tenth": begin._asdict(),
        "at_the_end": end._asdict(),
        "log_rotations": rotations,
        "steps_counted": last["steps"],
        "records_dropped": last.get("dropped", 0),
        "is_flat": end.memory_bytes - begin.memory_bytes <= MOST_BYTES and end[1:] == begin[1:],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", help="also write the result to this JSON file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a toy's steps are too small to share
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = soak(folder, options.minutes)
    text = json.dumps(found, indent=2)
    print(text)
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    return 0 if found["is_flat"] and found["same_losses"] and not found["records_dropped"] else 1


if __name__ == "__main__":
    sys.exit(main())
