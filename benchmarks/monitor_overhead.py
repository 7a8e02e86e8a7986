"""What the training monitor costs: one training loop with and without it, in turn, in one process.

    python benchmarks/monitor_overhead.py --out DIR [--models 1b,0.5b] [--steps N] [--budget-s S]     on a GPU
    python benchmarks/monitor_overhead.py --out DIR --tiny                   tries the script itself, also on a CPU
    python benchmarks/monitor_overhead.py --out DIR --join FILE FILE         models of several files into one
    python benchmarks/monitor_overhead.py --show FILE                        the tables, and each goal; needs no torch

Writes DIR/monitor_overhead.json after every part; models that are in it already and are not run again stay. Exit code
1 if a goal is missed or could not be judged.

Blocks of steps of every arm follow each other in a shuffled order, round by round, and every arm is compared with
`none` of the same round. `none2` is `none` once more: its difference is the run's own noise. A monitor is charged for
everything: what its threads have not done when a block ends is done then, and added to the block.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

Row = dict[str, Any]
Results = dict[str, Any]

SCHEMA = 1
NAME = "monitor_overhead.json"
PARTS = (
    "provenance",
    "arms",
    "runs",
    "host",
    "measured",
    "agreement",
    "waiting",
    "problems",
)  # lists of rows, by model
MEASURED_PARTS = PARTS[1:-1]
FOUNDING_PERCENT = {"estimate": 0.1, "smart": 0.5, "profiler": 5.0}  # as the founding document promised
MODES = ("estimate", "smart", "hybrid")
ARMS = ("none", "none2", *MODES, "sync")
RUN_ARMS = ("none", "smart", "hybrid")
RUN_BLOCK = 125  # steps: long enough that a monitor's threads do their work inside the block
SYNC_EVERY = 3  # rounds: the plain monitor's cost is large, and known from fewer blocks
DROPPED_ROUNDS = 2
RUN_STEPS = 2000  # what an overhead is stated over
FREQUENCY = 500  # the default
HOST_LIMIT_US, SHARE_LIMIT_PERCENT, AGREEMENT_LIMIT_PERCENT = 20.0, 0.1, 1.0
SEED = 5


class Scale(NamedTuple):
    """A model, its batch, and how many steps each part takes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    rows: int
    length: int
    block: int  # steps
    host_steps: int
    measured: int  # steps under the counters
    profiled: int
    agreement_steps: int
    run_rows: int  # of a batch in the long runs


SCALES = {
    "1b": Scale(2048, 16, 32, 8, 8192, 32000, 4, 2048, 20, 40, 6, 3, 46, 2),
    "0.5b": Scale(896, 24, 14, 2, 4864, 32000, 1, 1024, 20, 60, 10, 3, 106, 1),
}
TINY = Scale(32, 2, 4, 2, 48, 101, 2, 16, 1, 2, 1, 1, 8, 2)


# --- The loop ---------------------------------------------------------------------------------------------------------


class Place:
    """Where it runs, and that place's clock: CUDA events, or the host's clock where there is no GPU."""

    def __init__(self, is_gpu: bool) -> None:
        import torch

        self.is_gpu = is_gpu
        self.device = "cuda" if is_gpu else "cpu"
        self._torch = torch

    def synchronize(self) -> None:
        if self.is_gpu:
            self._torch.cuda.synchronize()

    def mark(self) -> Any:
        if not self.is_gpu:
            return time.perf_counter()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Between two marks that the device has passed."""
        return float(start.elapsed_time(end) / 1e3) if self.is_gpu else end - start


class Deadline:
    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    def left_s(self) -> float:
        return self._end - time.monotonic()


class Loop:
    """A model with random weights, a few random batches, and an optimizer."""

    def __init__(self, scale: Scale, place: Place, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        torch.manual_seed(SEED)
        self.scale = scale
        self.place = place
        self.folder = folder
        config = LlamaConfig(
            hidden_size=scale.hidden, intermediate_size=scale.intermediate, num_hidden_layers=scale.layers,
            num_attention_heads=scale.heads, num_key_value_heads=scale.kv_heads, vocab_size=scale.vocabulary,
            max_position_embeddings=4096, use_cache=False, tie_word_embeddings=False,
        )  # fmt: skip
        with torch.device(place.device):
            self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
            shape = (scale.rows, scale.length)
            ids = [torch.randint(3, scale.vocabulary, shape) for _ in range(4)]
            # Ragged rows, padded at their ends.
            lengths = torch.linspace(scale.length // 2, scale.length, scale.rows).long()
            mask = (torch.arange(scale.length)[None, :] < lengths[:, None]).long()
        self.model.train()
        self.batches = [{"input_ids": each, "labels": each} for each in ids]
        self.ragged = [{**each, "attention_mask": mask} for each in self.batches]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=place.is_gpu or None)
        self.parameters = sum(each.numel() for each in self.model.parameters())
        self._turn = 0

    def train_step(self, batches: Sequence[Mapping[str, Any]] | None = None) -> Any:
        """One optimizer step; the loss stays on the device."""
        given = batches if batches is not None else self.batches
        self._turn += 1
        loss = self.model(**given[self._turn % len(given)]).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def time_steps(self, steps: int, run_one: Callable[[], Any]) -> float:
        """Seconds that so many steps take, waited for at both edges only."""
        self.place.synchronize()
        start = self.place.mark()
        for _ in range(steps):
            run_one()
        end = self.place.mark()
        self.place.synchronize()
        return self.place.elapsed_s(start, end)

    def narrow(self, rows: int) -> None:
        """From here on only so many rows of each batch."""
        for batches in (self.batches, self.ragged):
            batches[:] = [{name: value[:rows] for name, value in each.items()} for each in batches]

    def time_plain_step(self) -> float:
        return self.time_steps(self.scale.block, self.train_step) / self.scale.block


class Watching:
    """A real monitor; what it hangs on the model is there only while its own steps run."""

    def __init__(self, loop: Loop, mode: str, frequency: int = FREQUENCY, **monitoring: Any) -> None:
        from flopcalc.monitor import TrainingMonitor

        if not loop.place.is_gpu:
            monitoring.setdefault("peak_flops_per_s", 1e12)
        self._loop = loop
        self._model = loop.model
        before = {name: set(table) for name, table in self._list_tables()}
        self._threads_before = set(threading.enumerate())
        self._threads: tuple[list[threading.Thread], list[threading.Thread]] | None = None
        config = {"monitoring": {"mfu_calculation_mode": mode, "sinks": ["jsonl"], **monitoring}}
        folder = tempfile.mkdtemp(prefix=mode, dir=loop.folder)
        # The default is not given, so that what is measured is what a user gets without a word.
        given: dict[str, Any] = {} if frequency == FREQUENCY else {"flops_profile_freq": frequency}
        self.monitor = TrainingMonitor(folder, config, model=self._model, **given)
        self._hung = {
            name: {key: entry for key, entry in table.items() if key not in before[name]}
            for name, table in self._list_tables()
        }
        self.number = 0

    def log(self, loss: Any) -> None:
        self.number += 1
        self.monitor.log_step(self.number, 0.0, loss, None, 1e-5)

    def run_step(self) -> None:
        self.log(self._loop.train_step())

    def _list_tables(self) -> list[tuple[str, dict[Any, Any]]]:
        """Where something may hang: a module's own attributes, its hooks, and flags of them."""
        own = vars(self._model)
        return [("", own), *((name, each) for name, each in own.items() if "_hooks" in name and isinstance(each, dict))]

    def hide(self) -> None:
        for name, table in self._list_tables():
            for key in self._hung[name]:
                table.pop(key, None)

    def put_back(self) -> None:
        for name, table in self._list_tables():
            table.update(self._hung[name])

    def show(self) -> None:
        """It is back, and the time in between is no step's."""
        self.put_back()
        self.monitor.mark_lost("eval")

    def list_threads(self) -> tuple[list[threading.Thread], list[threading.Thread]]:
        """Its worker, and the threads of its sinks; first asked after its first step, before the next monitor's."""
        if self._threads is None:
            new = [each for each in threading.enumerate() if each not in self._threads_before]
            worker = self.monitor._worker
            sinks = [each for each in new if each is not worker and each.name.startswith("flopcalc")]
            self._threads = ([worker] if worker is not None else []), sinks
        return self._threads

    def settle(self) -> tuple[float, float]:
        """Do now what its threads would do later: seconds of digesting, and CPU seconds of the sinks."""
        _, sinks = self.list_threads()
        before = time.perf_counter()
        self.monitor.metrics()
        digesting = time.perf_counter() - before
        cpu = read_cpu_s(sinks)
        outbox = self.monitor._digester.outbox
        if outbox is not None:
            outbox.flush(5.0)
        return digesting, read_cpu_s(sinks) - cpu

    def list_failures(self) -> list[str]:
        return sorted(key for key in self.monitor._said if key.startswith(("fail", "no ", "value", "batch")))

    def close(self) -> None:
        self.monitor.close()
        self.hide()


@contextmanager
def watch(loop: Loop, mode: str, frequency: int = FREQUENCY, **monitoring: Any) -> Any:
    watching = Watching(loop, mode, frequency, **monitoring)
    try:
        yield watching
    finally:
        watching.close()


def read_cpu_s(threads: Iterable[threading.Thread]) -> float:
    """CPU time that threads have used so far."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(each.ident))
        for each in threads
        if each.ident is not None and each.is_alive()
    )


# --- The parts --------------------------------------------------------------------------------------------------------


def measure_extra(loop: Loop, mode: str, count: int) -> Row:
    """What a measured step costs beyond a plain one: groups of five steps with it in their middle, and without."""
    every, group = 10, 5
    before = statistics.median(loop.time_plain_step() for _ in range(3))
    alone = statistics.median(loop.time_steps(1, loop.train_step) for _ in range(5))
    with watch(loop, mode, every) as watching:
        first_ms = [1e3 * (loop.time_steps(1, watching.run_step) - alone) for _ in range(3)]
        loop.time_steps(4, watching.run_step)  # steps 4 to 7: the next group has step 10 in its middle
        extras, plains = [], []
        for _ in range(count):
            measured = loop.time_steps(group, watching.run_step)
            plain = loop.time_steps(group, watching.run_step)
            extras.append(measured - plain)
            plains.append(plain / group)
        source = str(watching.monitor.metrics().get("perf/source"))
        factors = watching.monitor._digester.source._factors
        failures = watching.list_failures()
    after = statistics.median(loop.time_plain_step() for _ in range(3))
    step_s = statistics.median(plains)
    return {
        "mode": mode, "source": source, "factors": [each.value for each in factors.values()], "measured_steps": count,
        "first_steps_extra_ms": first_ms,  # smart and hybrid: the monitor's start, then the counters' first start
        "extra_ms": 1e3 * statistics.mean(extras), "extra_se_ms": 1e3 * find_se(extras),
        "extra_median_ms": 1e3 * statistics.median(extras), "step_ms": 1e3 * step_s,
        "ratio": (step_s + statistics.mean(extras)) / step_s,
        # Plain steps before this mode's first start, and after its end: what it leaves behind.
        "plain_before_ms": 1e3 * before, "plain_after_ms": 1e3 * after, "failures": failures,
    }  # fmt: skip


class Around:
    """Calls a model in its place; what of a call is not the model's own forward is torch's and the monitor's."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._forward = model.forward
        model.forward = self._run

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def restore(self) -> Any:
        del self._model.forward
        return self._model


class TimedModel(Around):
    """Keeps how long everything took but the forward: torch's way to it and back, and the monitor on that way."""

    def __init__(self, model: Any, wait: Callable[[], None], turn: Callable[[], None]) -> None:
        super().__init__(model)
        self._wait = wait
        self._turn = turn  # called after each call, long before the next one
        self._entered = self._left = 0
        self.taken_ns = 0

    def __call__(self, **given: Any) -> Any:
        model, clock = self._model, time.perf_counter_ns
        self._wait()
        clock()  # its own first call, with cold caches, is nobody's
        before = clock()
        output = model(**given)
        after = clock()
        self.taken_ns = self._entered - before + after - self._left
        self._turn()
        return output

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        clock = time.perf_counter_ns
        clock()
        self._entered = clock()
        output = self._forward(*args, **kwargs)
        clock()
        self._left = clock()
        return output


def measure_host(loop: Loop, watching: Watching, what: str, steps: int) -> Row:
    """Host time that a step takes beyond one without a monitor, in a loop that trains and whose caches are cold.

    Steps with and without the monitor take turns. Of each the model's call outside its forward is timed, and log_step,
    or where there is none the clock alone: the difference holds all that a user pays, and not what the clock takes.
    `what`: "as it runs"; with an attention mask "mask on the device"; or "after a wait", with an empty launch queue and
    a host that had nothing to do meanwhile.
    """
    is_watched = True

    def nothing() -> None:
        return None

    def turn() -> None:
        """The next step is of the other kind."""
        nonlocal is_watched
        is_watched = not is_watched
        watching.put_back() if is_watched else watching.hide()

    wait = loop.place.synchronize if what == "after a wait" else nothing
    batches = loop.ragged if what == "mask on the device" else None
    warm = 5
    for _ in range(warm):  # memory of this kind of batch
        loop.train_step(batches)
    clock, log_step = time.perf_counter_ns, watching.monitor.log_step
    workers, sinks = watching.list_threads()
    cpu_before = (read_cpu_s(workers), read_cpu_s(sinks))
    calls: dict[bool, list[int]] = {True: [], False: []}
    logs: dict[bool, list[int]] = {True: [], False: []}
    watching.show()
    timed = loop.model = TimedModel(loop.model, wait, turn)
    try:
        for _ in range(2 * (warm + steps)):
            is_logged = is_watched
            loss = loop.train_step(batches)
            wait()
            clock()
            if is_logged:
                watching.number += 1
                number = watching.number
                before = clock()
                log_step(number, 0.0, loss, None, 1e-5)
            else:
                before = clock()
            after = clock()
            calls[is_logged].append(timed.taken_ns)
            logs[is_logged].append(after - before)
        loop.place.synchronize()
    finally:
        loop.model = timed.restore()
        watching.hide()
    digesting, _ = watching.settle()
    found = watching.monitor.metrics()
    if found["global_step"] != watching.number or not math.isfinite(found["perf/mfu"]):
        raise RuntimeError(f"the monitor did not see its steps: {found['global_step']} of {watching.number}")
    worker_s = read_cpu_s(workers) - cpu_before[0] + digesting
    sink_s = read_cpu_s(sinks) - cpu_before[1]
    call_us, plain_call_us = ([ns / 1e3 for ns in calls[each][warm:]] for each in (True, False))
    log_us, empty_us = ([ns / 1e3 for ns in logs[each][warm:]] for each in (True, False))
    sums = [a + b for a, b in zip(call_us, log_us, strict=True)]
    plain_us = statistics.median(a + b for a, b in zip(plain_call_us, empty_us, strict=True))
    return {
        "mode": watching.monitor.settings.mode, "what": what, "steps": steps,
        "host_us_median": statistics.median(sums) - plain_us,
        "host_us_mean": statistics.mean(sums) - plain_us,  # charged with what disturbed it, plain steps are not
        "call_us_median": statistics.median(call_us) - statistics.median(plain_call_us),
        "log_step_us_median": statistics.median(log_us) - statistics.median(empty_us),
        "plain_us_median": plain_us,
        "worker_cpu_us_per_step": 1e6 * worker_s / (warm + steps),
        "sink_cpu_us_per_step": 1e6 * sink_s / (warm + steps),
        "failures": watching.list_failures(),
    }  # fmt: skip


def measure_all_hosts(loop: Loop, add: Callable[[Row], None]) -> None:
    for mode in MODES:
        # Measured once at the start, and not again here.
        with watch(loop, mode, 1_000_000) as watching:
            loop.time_steps(6, watching.run_step)
            watching.hide()
            kinds = ["as it runs"]
            if mode == "estimate":
                kinds += ["mask on the device", "after a wait"]
            for what in kinds:
                add(measure_host(loop, watching, what, loop.scale.host_steps))


class StrictModel(Around):
    """Every wait for the device is an error, but in the model's own forward."""

    def __call__(self, **given: Any) -> Any:
        with refuse_waiting():
            return self._model(**given)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        torch.cuda.set_sync_debug_mode("default")
        try:
            return self._forward(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("error")


@contextmanager
def refuse_waiting() -> Any:
    import torch

    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_waiting(what: str, loop: Loop, batches: Sequence[Mapping[str, Any]] | None) -> Row:
    """Twenty steps in which nothing that the monitor does may wait for the device."""
    if not loop.place.is_gpu:
        raise RuntimeError("no CUDA device here")
    steps = 20
    with watch(loop, "estimate", detail_every=5) as watching:
        for _ in range(3):
            watching.log(loop.train_step(batches))
        loop.place.synchronize()
        strict = loop.model = StrictModel(loop.model)
        try:
            for _ in range(steps):
                loss = loop.train_step(batches)
                with refuse_waiting():
                    watching.log(loss)
        finally:
            loop.model = strict.restore()
        loop.place.synchronize()
        with refuse_waiting():
            found = watching.monitor.metrics()  # the worker's part, on this thread
        control = _raises(loss.item)
        return {
            "what": what, "steps": steps, "raised": watching.list_failures(), "control_raised": control,
            "mfu_is_known": math.isfinite(found["perf/mfu"]),
        }  # fmt: skip


def _raises(call: Callable[[], Any]) -> bool:
    """Whether the check sees a wait at all."""
    try:
        with refuse_waiting():
            call()
    except RuntimeError:
        return True
    return False


class PictureLoop(Loop):
    """A tiny vision-language model whose image_grid_thw is on the device already."""

    def __init__(self, place: Place, folder: str) -> None:
        import torch
        from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

        torch.manual_seed(SEED)
        self.scale, self.place, self.folder, self._turn = TINY, place, folder, 0
        config = Qwen2VLConfig(
            text_config={
                "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
                "num_key_value_heads": 1, "vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
                "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 4]},
            },
            vision_config={
                "depth": 2, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 3, "num_heads": 2, "patch_size": 4,
            },
            image_token_id=97, video_token_id=98, vision_start_token_id=95, vision_end_token_id=96,
        )  # fmt: skip
        self.model = Qwen2VLForConditionalGeneration(config).to(place.device, torch.bfloat16).train()
        grid = torch.tensor([[1, 4, 6]])
        ids = torch.tensor([[5, 95, *[97] * 6, 96, 7, 8, 9]])
        batch = {
            "input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids),
            "pixel_values": torch.randn(24, 3 * 2 * 4 * 4).bfloat16(), "image_grid_thw": grid,
        }  # fmt: skip
        if "mm_token_type_ids" in inspect.signature(self.model.forward).parameters:
            batch["mm_token_type_ids"] = (ids == 97).long()
        self.batches = [{name: value.to(place.device) for name, value in batch.items()}]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)


def check_agreement(loop: Loop) -> Row:
    """HFU as the default mode reports it, against what the counter saw, over the device's own time of those steps."""
    from flopcalc.measure.counters import cupti

    skipped, steps = 6, loop.scale.agreement_steps
    with watch(loop, "smart", skip_first=skipped, detail_every=steps) as watching:
        marks = []
        for _ in range(steps):  # no wait in between: both clocks start and end in the steady state
            watching.run_step()
            marks.append(loop.place.mark())
        loop.place.synchronize()
        found = watching.monitor.metrics()
        failures = watching.list_failures()
    step_s = loop.place.elapsed_s(marks[skipped - 1], marks[-1]) / (steps - skipped)
    peak = found["perf/peak_flops_per_s"]
    row = {
        "steps": steps - skipped, "reported_hfu": found["perf/hfu"], "reported_mfu": found["perf/mfu"],
        "reported_step_ms": 1e3 * steps_time(found), "step_ms": 1e3 * step_s, "peak_flops_per_s": peak,
        "analytic_hardware_flops": found["perf/hardware_flops"], "model_flops": found["perf/model_flops"],
        "factor": found["perf/factor"], "source": found["perf/source"],
        "failures": failures, "counted_flops": None, "counted_hfu": None, "ratio": None, "reason": None,
    }  # fmt: skip
    try:
        with cupti.HardwareCounter([cupti.TENSOR_COUNTERS["bf16"]]) as counter:
            counted = []
            for _ in range(3):
                with counter.measure() as sample:
                    loop.train_step()
                counted.append(sample.total_flops)
    except Exception as error:
        return row | {"reason": describe(error)}
    row["counted_flops"] = round(statistics.mean(counted))
    row["counted_hfu"] = row["counted_flops"] / (step_s * peak)
    row["ratio"] = row["reported_hfu"] / row["counted_hfu"]
    row["estimate_ratio"] = row["analytic_hardware_flops"] / row["counted_flops"]
    return row


def steps_time(found: Mapping[str, Any]) -> float:
    """The step time that belongs to a record's HFU: of the details' window, not of the last step."""
    flops = found["perf/hardware_flops"] * found["perf/factor"]
    return float(flops / (found["perf/hfu"] * found["perf/peak_flops_per_s"]))


class Arms:
    """All arms in turn; one that raises is left out from there on, with its reason."""

    def __init__(
        self,
        loop: Loop,
        tell: Callable[[str], None],
        add_problem: Callable[[str, str], None],
        arms: Sequence[str],
        block: int,
        dropped: int,
    ) -> None:
        self._loop = loop
        self._tell = tell
        self._add_problem = add_problem
        self._block = block
        self._dropped = dropped  # rounds
        self._watchings: dict[str, Watching] = {}
        self._all, self._arms = arms, list(arms)
        self._rounds = 0
        self._times: dict[str, dict[int, float]] = {arm: {} for arm in arms}
        self._bare_times: dict[str, dict[int, float]] = {arm: {} for arm in arms}  # without what is charged
        self._threads_s: dict[str, list[float]] = {arm: [0.0, 0.0] for arm in arms if arm in MODES}

    def run(self, most_steps: int, reserve_s: float, deadline: Deadline, keep: Callable[[list[Row]], None]) -> None:
        """Until every arm has its steps, or the time is over."""
        needed = self._dropped + math.ceil(most_steps / self._block)
        order, longest_s = random.Random(SEED), 0.0
        try:
            for mode in self._threads_s:
                self._try(mode, self._start)
            gc.collect()
            gc.freeze()  # a collector's pass over the libraries' own objects would hit one arm or another
            while self._rounds < needed:
                if self._rounds > self._dropped + 1 and deadline.left_s() < reserve_s + 1.1 * longest_s:
                    break
                began = time.monotonic()
                is_sync_due = self._rounds % SYNC_EVERY == self._dropped % SYNC_EVERY
                arms = [arm for arm in self._arms if arm != "sync" or is_sync_due]
                order.shuffle(arms)
                for arm in arms:
                    self._try(arm, self._run_block)
                self._rounds += 1
                longest_s = max(longest_s, time.monotonic() - began)
                if self._rounds * self._block % 200 < self._block:
                    self._tell(f"round {self._rounds} of at most {needed}, {self._rounds * self._block} steps an arm")
                    keep(self.describe())
            keep(self.describe())
        finally:
            gc.unfreeze()
            for watching in self._watchings.values():
                watching.close()

    def _try(self, arm: str, call: Callable[[str], None]) -> None:
        try:
            call(arm)
        except Exception as error:
            traceback.print_exc()
            self._arms.remove(arm)
            self._add_problem(arm, describe(error))
            if arm in self._watchings:
                self._watchings[arm].hide()

    def _start(self, mode: str) -> None:
        """The first steps, with the counters' start, are in no block."""
        watching = self._watchings[mode] = Watching(self._loop, mode)
        self._loop.time_steps(4, watching.run_step)
        watching.settle()
        watching.hide()

    def _run_block(self, arm: str) -> None:
        loop, block, watching = self._loop, self._block, self._watchings.get(arm)
        charged = 0.0
        if watching is None:
            seconds = loop.time_steps(block, self._run_with_waits if arm == "sync" else loop.train_step)
        else:
            workers, sinks = watching.list_threads()
            before = (read_cpu_s(workers), read_cpu_s(sinks))
            watching.show()
            seconds = loop.time_steps(block, watching.run_step)
            digesting, sinking = watching.settle()
            watching.hide()
            charged = digesting + sinking
            self._threads_s[arm][0] += read_cpu_s(workers) - before[0] + digesting
            self._threads_s[arm][1] += read_cpu_s(sinks) - before[1]
        self._times[arm][self._rounds] = (seconds + charged) / block
        self._bare_times[arm][self._rounds] = seconds / block

    def _run_with_waits(self) -> float:
        """A plain monitor: the device is waited for around every step, and FLOPs are 6 times parameters and tokens."""
        loop = self._loop
        loop.place.synchronize()
        before = time.perf_counter()
        loop.train_step()
        loop.place.synchronize()
        return 6 * loop.parameters * loop.scale.rows * loop.scale.length / (time.perf_counter() - before)

    def describe(self) -> list[Row]:
        rows = []
        for arm in self._all:
            if not any(each >= self._dropped for each in self._times[arm]):
                continue
            row = describe_arm(arm, self._block, self._dropped, self._times, self._bare_times)
            if arm in self._watchings:
                watching = self._watchings[arm]
                worker_s, sink_s = self._threads_s[arm]
                steps = len(self._times[arm]) * self._block
                row |= {
                    "worker_cpu_us_per_step": 1e6 * worker_s / steps, "sink_cpu_us_per_step": 1e6 * sink_s / steps,
                    "source": str(watching.monitor.metrics()["perf/source"]), "last_step": watching.number,
                    "failures": watching.list_failures(),
                }  # fmt: skip
            rows.append(row)
        return rows


def describe_arm(
    arm: str,
    block: int,
    dropped: int,
    times: Mapping[str, Mapping[int, float]],
    bare_times: Mapping[str, Mapping[int, float]],
) -> Row:
    """Step time of an arm, and its difference to `none`, round by round."""
    kept = [each for each in times[arm] if each >= dropped and each in times["none"]]
    own = [1e6 * times[arm][each] for each in kept]
    differences = [1e6 * (times[arm][each] - times["none"][each]) for each in kept]
    uncharged = [1e6 * (bare_times[arm][each] - times["none"][each]) for each in kept]
    base = statistics.mean(1e6 * times["none"][each] for each in kept)
    return {
        "arm": arm, "blocks": len(kept), "steps": len(kept) * block,
        "step_us_median": statistics.median(own), "step_us_mean": statistics.mean(own),
        "step_us_sd": statistics.stdev(own) if len(own) > 1 else None,
        "difference_us": statistics.mean(differences), "difference_se_us": find_se(differences),
        "difference_median_us": statistics.median(differences),
        "difference_percent": 100 * statistics.mean(differences) / base,
        "difference_se_percent": 100 * find_se(differences) / base,
        "difference_without_threads_us": statistics.mean(uncharged),
    }  # fmt: skip


def find_se(values: Sequence[float]) -> float:
    """Standard error of the mean; not a number of one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# --- Goals and tables, without torch ----------------------------------------------------------------------------------


def judge(results: Results) -> list[Row]:
    """Each goal of each model: its value, its limit, and whether it is met; None where it cannot be judged."""
    goals = []
    for about in results["provenance"]:
        model = about["model"]
        arms = {row["arm"]: row for row in _rows_of(results, "arms", model)}
        runs = {row["arm"]: row for row in _rows_of(results, "runs", model)}
        base_us = runs.get("none", {}).get("step_us_mean", math.nan)
        host = {(row["mode"], row["what"]): row for row in _rows_of(results, "host", model)}
        measured = {row["mode"]: row for row in _rows_of(results, "measured", model)}

        def add(goal: str, value: float | None, limit: float | None, unit: str, note: str, about: Row = about) -> None:
            is_met = None if value is None or limit is None or about["is_tiny"] else value <= limit
            goals.append({
                "model": about["model"], "goal": goal, "value": value, "limit": limit, "unit": unit,
                "met": is_met, "note": note,
            })  # fmt: skip

        own = host.get(("estimate", "as it runs"), {})
        others = {what: host.get(("estimate", what), {}) for what in ("after a wait", "mask on the device")}
        # Earlier results told the monitor's own code alone: they have no call.
        taken, call = own.get("host_us_median"), own.get("call_us_median")
        add(
            "estimate: host time of a step", None if call is None else taken, HOST_LIMIT_US, "us",
            "median of what the host takes beyond a step without a monitor, loss on the device: the model's call "
            f"{format_number(call)} more, log_step {format_number(own.get('log_step_us_median'))}; "
            f"mean {format_number(own.get('host_us_mean'))}; "
            + "; ".join(f"{what} {format_number(row.get('host_us_median'))}" for what, row in others.items()),
        )  # fmt: skip
        noise, estimate = arms.get("none2", {}), arms.get("estimate", {})
        limit = None
        if noise.get("difference_se_us") is not None:
            limit = abs(noise["difference_us"]) + 2 * noise["difference_se_us"]
        add(
            "estimate: step time beyond none", estimate.get("difference_us"), limit, "us",
            "limit: the run's own noise, the difference of none2 and two of its standard errors; "
            f"standard error here {format_number(estimate.get('difference_se_us'))}",
        )  # fmt: skip
        for mode in ("smart", "hybrid"):
            direct = runs.get(mode) or arms.get(mode, {})
            share = find_share_percent(results, model, mode)
            add(
                f"{mode}: over {RUN_STEPS:,} steps", share, SHARE_LIMIT_PERCENT, "%",
                f"from host time and {RUN_STEPS // FREQUENCY} measured steps ({measured.get(mode, {}).get('source')}); "
                f"paired difference {format_number(direct.get('difference_percent'))} ± "
                f"{format_number(direct.get('difference_se_percent'))} % over {direct.get('steps')} steps",
            )  # fmt: skip
            if mode in runs:
                value, error = direct["difference_percent"], direct["difference_se_percent"]
                # Twice the error above the limit: the run says nothing, unless it is further beyond it than that.
                is_told = error is not None and (
                    2 * error <= SHARE_LIMIT_PERCENT or value - 2 * error > SHARE_LIMIT_PERCENT
                )
                add(
                    f"{mode}: run of {direct['steps']:,} steps beyond none", value,
                    SHARE_LIMIT_PERCENT if is_told else None, "%",
                    f"{direct['rows']} × {direct['length']} tokens a step; standard error {format_number(error)} %"
                    + ("" if is_told else f", too much to judge {SHARE_LIMIT_PERCENT} % by")
                    + "; what its threads had not done is charged; without that "
                    f"{format_number(100 * direct['difference_without_threads_us'] / base_us)} %",
                )  # fmt: skip
        found = next(iter(_rows_of(results, "agreement", model)), {})
        ratio = found.get("ratio")
        note = str(found.get("reason"))
        if ratio is not None:
            alone = format_number(found.get("estimate_ratio"), 5)
            note = f"ratio {format_number(ratio, 5)} in mode smart; the analytic count alone {alone}"
        add(
            "reported HFU against counted FLOPs ÷ time", None if ratio is None else 100 * abs(ratio - 1),
            AGREEMENT_LIMIT_PERCENT, "%", note,
        )  # fmt: skip
        checks = _rows_of(results, "waiting", model)
        is_known = len(checks) == 3 and all(row["control_raised"] and row["mfu_is_known"] for row in checks)
        add(
            "waits for the device", float(sum(len(row["raised"]) for row in checks)) if is_known else None, 0.0, "",
            "; ".join(f"{row['what']}: {', '.join(row['raised']) or 'none'}" for row in checks),
        )  # fmt: skip
    return goals


def find_share_percent(results: Results, model: str, mode: str) -> float | None:
    """Overhead over the run's steps: host time of every step, and what its measured ones cost beyond that."""
    arms = {row["arm"]: row for row in _rows_of(results, "arms", model)}
    host = {(row["mode"], row["what"]): row for row in _rows_of(results, "host", model)}
    measured = {row["mode"]: row for row in _rows_of(results, "measured", model)}
    step_us = arms.get("none", {}).get("step_us_mean")
    if mode == "profiler":
        host_us = host.get(("estimate", "as it runs"), {}).get("host_us_mean")
    else:
        host_us = host.get((mode, "as it runs"), {}).get("host_us_mean")
    if step_us is None or host_us is None:
        return None
    if mode == "estimate":
        return 100 * host_us / step_us
    extra_ms = measured.get(mode, {}).get("extra_ms")
    if extra_ms is None:
        return None
    return 100 * (host_us * RUN_STEPS + 1e3 * extra_ms * RUN_STEPS / FREQUENCY) / (RUN_STEPS * step_us)


def _rows_of(results: Results, part: str, model: str) -> list[Row]:
    return [row for row in results[part] if row["model"] == model]


def format_number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def format_rows(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(header), " | ".join("---" for _ in header), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def format_table(results: Results) -> str:
    """Markdown: every arm beside the founding document's figure, the measured steps, and the goals."""
    texts = []
    for about in results["provenance"]:
        model = about["model"]
        texts.append(
            f"**{model}**: {about['parameters']:,} parameters, {about['rows']} × {about['length']} tokens a step, "
            f"{about['device']}, torch {about['torch']}, {about['date'][:10]}"
        )
        host = {row["mode"]: row for row in _rows_of(results, "host", model) if row["what"] == "as it runs"}
        rows = []
        for row in _rows_of(results, "arms", model):
            arm = row["arm"]
            rows.append((
                arm, str(row["steps"]), format_number(row["step_us_mean"] / 1e3, 5),
                f"{format_number(row['difference_us'])} ± {format_number(row['difference_se_us'])}",
                f"{format_number(row['difference_percent'])} ± {format_number(row['difference_se_percent'])}",
                format_number(host.get(arm, {}).get("host_us_median")),
                format_number(row["worker_cpu_us_per_step"] + row["sink_cpu_us_per_step"]) if arm in MODES else "–",
                format_number(find_share_percent(results, model, arm)) if arm in MODES else "–",
                format_number(FOUNDING_PERCENT.get(arm)),
            ))  # fmt: skip
        share = find_share_percent(results, model, "profiler")
        if share is not None:
            founding = format_number(FOUNDING_PERCENT["profiler"])
            rows.append(("profiler", *["–"] * 6, format_number(share), founding))
        header = (
            "arm", "steps", "step ms", "beyond none, us", "beyond none, %", "host us a step",
            "CPU us a step of its threads", f"% over {RUN_STEPS:,} steps", "founding document, %",
        )  # fmt: skip
        texts.append(format_rows(header, rows))
        runs = _rows_of(results, "runs", model)
        if runs:
            header = ("long run", "tokens a step", "steps", "step ms", "beyond none, us", "beyond none, %")
            texts.append(format_rows(header, [
                (
                    row["arm"], f"{row['rows']} × {row['length']}", str(row["steps"]),
                    format_number(row["step_us_mean"] / 1e3, 5),
                    f"{format_number(row['difference_us'])} ± {format_number(row['difference_se_us'])}",
                    f"{format_number(row['difference_percent'])} ± {format_number(row['difference_se_percent'])}",
                )
                for row in runs
            ]))  # fmt: skip
        rows = [
            (
                row["mode"], row["source"], ", ".join(format_number(each) for each in row["first_steps_extra_ms"]),
                f"{format_number(row['extra_ms'])} ± {format_number(row['extra_se_ms'])}",
                format_number(row["ratio"], 4),
            )
            for row in _rows_of(results, "measured", model)
        ]  # fmt: skip
        header = (
            "mode",
            "measured by",
            "first three steps, ms more",
            "a measured step, ms more",
            "ratio to a plain one",
        )
        texts.append(format_rows(header, rows))
    goals = [
        (
            row["model"], row["goal"], f"{format_number(row['value'])} {row['unit']}".strip(),
            f"{format_number(row['limit'])} {row['unit']}".strip(),
            {True: "yes", False: "**no**", None: "not judged"}[row["met"]], row["note"],
        )
        for row in results["goals"]
    ]  # fmt: skip
    texts.append(format_rows(("model", "goal", "value", "limit", "met", "note"), goals))
    for row in results["problems"]:
        texts.append(f"{row['model']}, {row['part']}: {row['reason']}")
    return "\n\n".join(texts)


# --- Files ------------------------------------------------------------------------------------------------------------


def make_results() -> Results:
    parts: dict[str, list[Row]] = {part: [] for part in PARTS}
    return {"schema": SCHEMA, "founding_percent": FOUNDING_PERCENT, **parts, "goals": []}


def read_results(path: str) -> Results:
    with open(path, encoding="utf-8") as file:
        results: Results = json.load(file)
    if results.get("schema") != SCHEMA:
        raise SystemExit(f"{path} has schema {results.get('schema')!r}, this script reads {SCHEMA}: run it again")
    for part in PARTS:
        results.setdefault(part, [])
    return results


def drop_model(results: Results, model: str) -> None:
    for part in PARTS:
        results[part] = [row for row in results[part] if row["model"] != model]


def write_results(results: Results, path: str) -> None:
    """Goals judged anew; one row a line; replaced as a whole."""
    for part in PARTS:
        results[part] = [_plain(row) for row in results[part]]
    results["goals"] = [_plain(row) for row in judge(results)]
    texts = []
    for key, value in results.items():
        if isinstance(value, list):
            lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False, allow_nan=False) for row in value)
            texts.append(f' "{key}": [\n{lines}\n ]' if value else f' "{key}": []')
        else:
            texts.append(f' "{key}": {json.dumps(value)}')
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write("{\n" + ",\n".join(texts) + "\n}\n")
    os.replace(f"{path}.new", path)


def _plain(value: Any) -> Any:
    """Six digits, and null for what is not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


# --- The run ----------------------------------------------------------------------------------------------------------


def run_model(name: str, options: argparse.Namespace, path: str, deadline: Deadline) -> None:
    """All parts of one model; a part that fails leaves its reason, and the others go on."""
    import torch

    from flopcalc.measure.calibrate.provenance import describe_machine

    place = Place(torch.cuda.is_available())
    if not place.is_gpu:
        torch.set_num_threads(1)  # a toy's steps are too small to share
    if not place.is_gpu and not options.tiny:
        raise SystemExit("no CUDA device here: this is measured on a GPU; --tiny tries the script itself")
    scale = TINY if options.tiny else SCALES[name]
    results = read_results(path) if os.path.exists(path) else make_results()
    parts = options.parts.split(",")
    before = next(iter(_rows_of(results, "provenance", name)), None)
    for part in PARTS:
        if part in parts or part == "provenance" or before is None:
            results[part] = [row for row in results[part] if row["model"] != name]
    words = ["python benchmarks/monitor_overhead.py", f"--models {name}", f"--steps {options.steps}"]
    words += [f"--parts {options.parts}"] if options.parts != ",".join(MEASURED_PARTS) else []
    words += [f"--budget-s {options.budget_s:g}", *(["--tiny"] if options.tiny else [])]

    def tell(message: str) -> None:
        print(f"{deadline.left_s():6.0f} s left  {name}: {message}", flush=True)

    def add(part: str, row: Row) -> None:
        results[part].append({"model": name, **row})

    def attempt(part: str, call: Callable[[], None], kind: str = "") -> None:
        if (kind or part) not in parts:
            return
        tell(part)
        try:
            call()
        except Exception as error:
            traceback.print_exc()
            add("problems", {"part": part, "reason": describe(error)})
        write_results(results, path)

    def add_waiting(what: str, make: Callable[[], tuple[Loop, Any]]) -> None:
        attempt(f"waiting, {what}", lambda: add("waiting", check_waiting(what, *make())), "waiting")

    def keep_rows(part: str, rows: list[Row]) -> None:
        results[part] = [row for row in results[part] if row["model"] != name]
        for row in rows:
            add(part, row)
        write_results(results, path)

    def make_arms(arms: Sequence[str], block: int, dropped: int) -> Arms:
        def add_problem(arm: str, reason: str) -> None:
            add("problems", {"part": f"arm {arm}", "reason": reason})

        return Arms(loop, tell, add_problem, arms, block, dropped)

    def run_long() -> None:
        loop.narrow(scale.run_rows)
        for _ in range(3):
            loop.train_step()
        block = 2 if options.tiny else RUN_BLOCK

        def keep(rows: list[Row]) -> None:
            keep_rows("runs", [{**row, "rows": scale.run_rows, "length": scale.length} for row in rows])

        make_arms(RUN_ARMS, block, 0).run(options.steps, 5.0, deadline, keep)

    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(scale, place, folder)
        for _ in range(3):
            loop.train_step()
        step_s = statistics.median(loop.time_plain_step() for _ in range(3))
        add("provenance", {
            **describe_machine(place.device), "command": " ".join(words),
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "parameters": loop.parameters,
            "is_tiny": options.tiny, "seed": SEED, **scale._asdict(), "parts": parts, "before": before,
        })  # fmt: skip
        tell(f"{loop.parameters:,} parameters, a plain step takes {1e3 * step_s:.1f} ms")
        # The counters' first start of this process is in the first of these.
        for mode in ("smart", "hybrid"):
            attempt(
                f"measured steps, {mode}",
                lambda mode=mode: add("measured", measure_extra(loop, mode, scale.measured)),
                "measured",
            )
        attempt("host time", lambda: measure_all_hosts(loop, lambda row: add("host", row)), "host")
        attempt("agreement", lambda: add("agreement", check_agreement(loop)))
        add_waiting("ids alone", lambda: (loop, None))
        add_waiting("mask on the device", lambda: (loop, loop.ragged))
        add_waiting("image_grid_thw on the device", lambda: (PictureLoop(place, folder), None))
        # A profiled step takes some ten to twenty plain ones and its trace is read; it comes last, for what it leaves.
        reserve_s = 5 + (25 * step_s * (scale.profiled + 3) + 60 * step_s if "measured" in parts else 0)
        attempt("arms", lambda: make_arms(ARMS, scale.block, DROPPED_ROUNDS).run(
            options.steps, reserve_s, deadline, lambda rows: keep_rows("arms", rows)
        ))  # fmt: skip
        attempt(
            "measured steps, profiler",
            lambda: add("measured", measure_extra(loop, "profiler", scale.profiled)),
            "measured",
        )
        attempt("runs", lambda: run_long(), "runs")
        tell("done")


def run_each(models: Sequence[str], options: argparse.Namespace, deadline: Deadline) -> None:
    """A process for each model: what one leaves behind in the driver is not in the next one's figures."""
    for index, name in enumerate(models):
        share = deadline.left_s() / (len(models) - index)
        command = [sys.executable, os.path.abspath(__file__), "--out", options.out, "--models", name]
        command += ["--steps", str(options.steps), "--budget-s", f"{share:.0f}", *(["--tiny"] if options.tiny else [])]
        subprocess.run(command, check=False)  # its exit code is its goals', which are judged below once more


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder of the results")
    parser.add_argument("--models", default=",".join(SCALES), help=f"of {', '.join(SCALES)}")
    parser.add_argument("--steps", type=int, default=RUN_STEPS, help="at most so many steps an arm")
    parser.add_argument("--budget-s", type=float, default=840.0, help="for all models together; arms stop in time")
    parser.add_argument(
        "--parts", default=",".join(MEASURED_PARTS), help="only these; the others stay as the file in --out has them"
    )
    parser.add_argument("--tiny", action="store_true", help="a toy model: nothing is judged")
    parser.add_argument("--join", nargs="+", metavar="FILE", help="only write these files' models into one")
    parser.add_argument("--show", metavar="FILE", help="only print the tables of a file")
    options = parser.parse_args(arguments)
    if options.show:
        results = read_results(options.show)
        print(format_table(results))
        return _exit_code(results)
    if not options.out:
        parser.error("--out DIR is needed")
    models = options.models.split(",")
    for name in models:
        if name not in SCALES:
            parser.error(f"no model {name!r}; known: {', '.join(SCALES)}")
    for part in options.parts.split(","):
        if part not in MEASURED_PARTS:
            parser.error(f"no part {part!r}; known: {', '.join(MEASURED_PARTS)}")
    os.makedirs(options.out, exist_ok=True)
    path = os.path.join(options.out, NAME)
    if options.join:
        results = make_results()
        for source in options.join:
            found = read_results(source)
            for name in [row["model"] for row in found["provenance"]]:
                drop_model(results, name)
            for part in PARTS:
                results[part] += found[part]
        write_results(results, path)
    else:
        deadline = Deadline(options.budget_s)
        if len(models) == 1:
            run_model(models[0], options, path, deadline)
        else:
            run_each(models, options, deadline)
    results = read_results(path)
    print(format_table(results))
    return _exit_code(results)


def _exit_code(results: Results) -> int:
    tiny = {row["model"] for row in results["provenance"] if row["is_tiny"]}
    return int(any(not row["met"] for row in results["goals"] if row["model"] not in tiny))


if __name__ == "__main__":
    sys.exit(main())
