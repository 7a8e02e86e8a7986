"""The parts of monitor_overhead.py: what a monitor costs a training loop, one part after the other."""

from __future__ import annotations

import gc
import math
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from monitor_overhead_loop import Deadline, Loop, Watching, list_failures, make_config, read_cpu_s, watch
from monitor_overhead_tables import ARMS, MASK, MODES, NO_MASK, SAME_MASK, Row

DROPPED_ROUNDS = 1
SEED = 5  # of the order of arms
WATCHED_STEPS = 33  # then a monitor knows whether values on the device may be copied later
LOGGING_STEPS = 9  # of the Trainer here: odd, so that steps of both kinds are logged
DEFAULT_LOGGING_STEPS = 500  # of the Trainer


# --- Host time --------------------------------------------------------------------------------------------------------


class TimedForward:
    """Times a model's call without its forward: torch's way to it and back, and the monitor on that way."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._forward = model.forward
        self._before = self._entered = self._left = 0
        model.forward = self._run

    def begin(self) -> None:
        clock = time.perf_counter_ns
        clock()  # its own first call, with cold caches, is nobody's
        self._before = clock()

    def end(self) -> int:
        """Nanoseconds since the begin, but for the forward."""
        return self._entered - self._before + time.perf_counter_ns() - self._left

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        clock = time.perf_counter_ns
        clock()
        self._entered = clock()
        output = self._forward(*args, **kwargs)
        clock()
        self._left = clock()
        return output

    def restore(self) -> None:
        del self._model.forward


class HostTimes:
    """Of steps with and without the monitor the model's call outside its forward, and the monitor's own calls."""

    def __init__(self) -> None:
        self.is_watched = True
        self.calls: dict[bool, list[float]] = {True: [], False: []}
        self.logs: dict[bool, list[float]] = {True: [], False: []}

    def add(self, call_ns: int, log_ns: int) -> None:
        self.calls[self.is_watched].append(call_ns / 1e3)
        self.logs[self.is_watched].append(log_ns / 1e3)

    def describe(self, warm: int) -> Row:
        """Mean differences; the first steps of each kind are left out."""
        calls, logs = ({each: found[each][warm:] for each in found} for found in (self.calls, self.logs))
        sums = {each: [a + b for a, b in zip(calls[each], logs[each], strict=True)] for each in (True, False)}

        def subtract(find: Callable[[Sequence[float]], float], found: Mapping[bool, Sequence[float]]) -> float:
            return find(found[True]) - find(found[False])

        return {
            "steps": len(sums[True]),
            "host_us_mean": subtract(statistics.mean, sums),
            "host_us_se": math.hypot(find_se(sums[True]), find_se(sums[False])),
            "host_us_median": subtract(statistics.median, sums),
            "call_us_mean": subtract(statistics.mean, calls),
            "log_us_mean": subtract(statistics.mean, logs),
            "plain_us_median": statistics.median(sums[False]),
        }


def measure_plain_loop(loop: Loop, mode: str, what: str, steps: int) -> Row:
    """A loop that trains, and whose caches are cold between two steps, as a user's are."""
    warm, times = min(5, steps), HostTimes()
    batches = loop.plain if what == NO_MASK else loop.ragged
    loop.is_fresh = what != SAME_MASK
    clock = time.perf_counter_ns
    with watch(loop, mode, 1_000_000) as watching:  # measured once at the start, and not again here
        for _ in range(WATCHED_STEPS):
            watching.log(loop.train_step(batches))
        workers, sinks = watching.list_threads()
        cpu_before = (read_cpu_s(workers), read_cpu_s(sinks))
        model, log_step = loop.model, watching.monitor.log_step
        timed = TimedForward(model)
        taken_ns = 0

        def call(**given: Any) -> Any:
            nonlocal taken_ns
            timed.begin()
            output = model(**given)
            taken_ns = timed.end()
            return output

        loop.model = call
        try:
            for _ in range(2 * (warm + steps)):
                loss = loop.train_step(batches)
                clock()
                if times.is_watched:
                    watching.number += 1
                    number = watching.number
                    before = clock()
                    log_step(number, 0.0, loss, None, 1e-5)
                else:
                    before = clock()
                times.add(taken_ns, clock() - before)
                watching.hide() if times.is_watched else watching.put_back()
                times.is_watched = not times.is_watched
        finally:
            loop.model, loop.is_fresh = model, True
            timed.restore()
        loop.place.synchronize()
        watched_steps = warm + steps
        digesting, _ = watching.settle()
        check_seen(watching.monitor, watching.number)
        return {
            "loop": "plain loop",
            "mode": mode,
            "what": what,
            **times.describe(warm),
            "worker_cpu_us_per_step": 1e6 * (read_cpu_s(workers) - cpu_before[0] + digesting) / watched_steps,
            "sink_cpu_us_per_step": 1e6 * (read_cpu_s(sinks) - cpu_before[1]) / watched_steps,
            "failures": list_failures(watching.monitor),
        }


def check_seen(monitor: Any, steps: int) -> None:
    monitor.metrics()
    meter = monitor._digester.meter
    if meter.steps != steps or not math.isfinite(meter._last.model_flops):
        raise RuntimeError(f"the monitor did not see its steps: {meter.steps} of {steps}")


def measure_trainer(loop: Loop, mode: str, steps: int) -> Row:
    """The Trainer of Hugging Face with a FlopcalcCallback that is there in every second step."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from flopcalc.monitor import FlopcalcCallback
    from flopcalc.monitor.hooks import register_hooks

    warm, times = min(WATCHED_STEPS, steps), HostTimes()
    clock = time.perf_counter_ns
    inner = FlopcalcCallback(make_config(loop, mode, flops_profile_freq=1_000_000))
    taken = {"call": 0, "events": 0, "hidden": 0}
    logs_us: dict[bool, list[float]] = {True: [], False: []}

    class Timed(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            timed.begin()
            output = super().compute_loss(*args, **kwargs)
            taken["call"] = timed.end()
            return output

    class Switch(TrainerCallback):
        """Hands events on, and takes their time, in steps that are watched."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            inner.on_train_begin(*args, **kwargs)

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            taken["events"] = 0
            self._run(inner.on_step_begin, *args, **kwargs)

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self._run(inner.on_pre_optimizer_step, *args, **kwargs)

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self._run(inner.on_optimizer_step, *args, **kwargs)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self._run(inner.on_step_end, *args, **kwargs)

        def on_log(self, *args: Any, **kwargs: Any) -> None:
            before = taken["events"]
            self._run(inner.on_log, *args, **kwargs)
            logs_us[times.is_watched].append((taken["events"] - before) / 1e3)
            taken["events"] = before

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            """One step is one epoch: its log is over by now."""
            times.add(taken["call"], taken["events"])
            monitor = inner.monitor
            if times.is_watched:
                monitor._drop_hooks()
                taken["hidden"] = clock()
            else:
                monitor._marked_ns += clock() - taken["hidden"]  # as in Watching.put_back
                monitor._hooks += register_hooks(monitor, monitor._trained, looks_inside=False)
                monitor.mark_lost("eval")
            times.is_watched = not times.is_watched

        def _run(self, event: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            clock()
            before = clock()
            if times.is_watched:
                event(*args, **kwargs)
            taken["events"] += clock() - before

    class Batches(torch.utils.data.Dataset[Any]):
        """Rows on the host: the Trainer moves them, so that the mask is on the device when the model is called."""

        def __init__(self) -> None:
            self._rows = {name: value.cpu() for name, value in loop.ragged[0].items()}

        def __len__(self) -> int:
            return loop.scale.rows

        def __getitem__(self, index: int) -> Any:
            return {name: value[index] for name, value in self._rows.items()}

    folder = tempfile.mkdtemp(prefix="trainer", dir=loop.folder)
    total = 2 * (warm + steps)
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=loop.scale.rows, num_train_epochs=total,
        logging_steps=min(LOGGING_STEPS, steps + 1),
        report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-5, use_cpu=not loop.place.is_gpu,
        dataloader_pin_memory=False, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Timed(loop.model, arguments, train_dataset=Batches(), callbacks=[Switch()])
    trainer.remove_callback(_find_printer(trainer))
    timed = TimedForward(loop.model)
    try:
        trainer.train()
    finally:
        timed.restore()
    loop.place.synchronize()
    monitor = inner.monitor
    check_seen(monitor, warm + steps)
    failures = list_failures(monitor)
    monitor.close()
    row = times.describe(warm)
    log_us = statistics.mean(logs_us[True][1:] or logs_us[True]) - statistics.mean(logs_us[False])
    for key in ("host_us_mean", "log_us_mean"):
        row[key] += log_us / DEFAULT_LOGGING_STEPS
    return {"loop": "Trainer", "mode": mode, "what": MASK, **row, "trainer_log_us_mean": log_us, "failures": failures}


def _find_printer(trainer: Any) -> Any:
    """What prints the Trainer's logs: they are not of interest here."""
    from transformers.trainer_callback import PrinterCallback

    return next((each for each in trainer.callback_handler.callbacks if isinstance(each, PrinterCallback)), None)


# --- Step times -------------------------------------------------------------------------------------------------------


class Arms:
    """All arms in turn; one that raises is left out from there on, with its reason."""

    def __init__(
        self, loop: Loop, tell: Callable[[str], None], add_problem: Callable[[str, str], None], dropped: int
    ) -> None:
        self._loop = loop
        self._tell = tell
        self._add_problem = add_problem
        self._dropped = dropped  # rounds
        self._watchings: dict[str, Watching] = {}
        self._arms = list(ARMS)
        self._rounds = 0
        self._times: dict[str, dict[int, float]] = {arm: {} for arm in ARMS}
        self._bare_times: dict[str, dict[int, float]] = {arm: {} for arm in ARMS}  # without what is charged
        self._threads_s: dict[str, list[float]] = {mode: [0.0, 0.0] for mode in MODES}

    def run(self, most_steps: int, reserve_s: float, deadline: Deadline, keep: Callable[[list[Row]], None]) -> None:
        """Until every arm has its steps, or the time is over."""
        block = self._loop.scale.block
        needed = self._dropped + math.ceil(most_steps / block)
        order, longest_s = random.Random(SEED), 0.0
        try:
            for mode in MODES:
                self._try(mode, self._start)
            gc.collect()
            gc.freeze()  # a collector's pass over the libraries' own objects would hit one arm or another
            while self._rounds < needed:
                if self._rounds > self._dropped + 1 and deadline.left_s() < reserve_s + 1.1 * longest_s:
                    break
                began = time.monotonic()
                arms = list(self._arms)
                order.shuffle(arms)
                for arm in arms:
                    self._try(arm, self._run_block)
                self._rounds += 1
                longest_s = max(longest_s, time.monotonic() - began)
                if self._rounds * block % 200 < block:
                    self._tell(f"round {self._rounds} of at most {needed}, {self._rounds * block} steps an arm")
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
        loop, watching = self._loop, self._watchings.get(arm)
        block, charged = loop.scale.block, 0.0
        if watching is None:
            seconds = loop.time_steps(block, loop.train_step)
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

    def describe(self) -> list[Row]:
        rows = []
        block = self._loop.scale.block
        for arm in ARMS:
            if not any(each >= self._dropped for each in self._times[arm]):
                continue
            row = describe_arm(arm, block, self._dropped, self._times, self._bare_times)
            if arm in self._watchings:
                watching = self._watchings[arm]
                worker_s, sink_s = self._threads_s[arm]
                steps = len(self._times[arm]) * block
                row |= {
                    "worker_cpu_us_per_step": 1e6 * worker_s / steps,
                    "sink_cpu_us_per_step": 1e6 * sink_s / steps,
                    "source": str(watching.monitor.metrics()["perf/source"]),
                    "last_step": watching.number,
                    "failures": list_failures(watching.monitor),
                }
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
        "arm": arm,
        "blocks": len(kept),
        "steps": len(kept) * block,
        "step_us_median": statistics.median(own),
        "step_us_mean": statistics.mean(own),
        "step_us_sd": statistics.stdev(own) if len(own) > 1 else None,
        "difference_us": statistics.mean(differences),
        "difference_se_us": find_se(differences),
        "difference_median_us": statistics.median(differences),
        "difference_percent": 100 * statistics.mean(differences) / base,
        "difference_se_percent": 100 * find_se(differences) / base,
        "difference_without_threads_us": statistics.mean(uncharged),
    }


def find_se(values: Sequence[float]) -> float:
    """Standard error of the mean; not a number of one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# --- Measured steps, agreement, waiting -------------------------------------------------------------------------------


def measure_extra(loop: Loop, mode: str, count: int) -> Row:
    """What a measured step costs beyond a plain one: groups of five steps with it in their middle, and without."""
    every, group = 10, 5
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
        factors = watching.monitor._trained.source._factors
        failures = list_failures(watching.monitor)
    step_s = statistics.median(plains)
    return {
        "mode": mode,
        "source": source,
        "factors": [each.value for each in factors.values()],
        "measured_steps": count,
        "first_steps_extra_ms": first_ms,  # smart and hybrid: the monitor's start, then the counters' first start
        "extra_ms": 1e3 * statistics.mean(extras),
        "extra_se_ms": 1e3 * find_se(extras),
        "extra_median_ms": 1e3 * statistics.median(extras),
        "step_ms": 1e3 * step_s,
        "ratio": (step_s + statistics.mean(extras)) / step_s,
        "failures": failures,
    }


def check_agreement(loop: Loop) -> Row:
    """HFU as the default mode reports it, against what the counter saw, over the device's own time of those steps."""
    from flopcalc.measure.counters import cupti

    skipped, steps = 6, loop.scale.agreement_steps

    def train() -> Any:
        return loop.train_step(loop.plain)

    with watch(loop, "smart", skip_first=skipped, detail_every=steps) as watching:
        marks = []
        for _ in range(steps):  # no wait in between: both clocks start and end in the steady state
            watching.log(train())
            marks.append(loop.place.mark())
        watching.monitor.metrics()  # the last loss is copied now
        loop.place.synchronize()
        found = watching.monitor.metrics()
        failures = list_failures(watching.monitor)
    step_s = loop.place.elapsed_s(marks[skipped - 1], marks[-1]) / (steps - skipped)
    peak = found["perf/peak_flops_per_s"]
    row = {
        "steps": steps - skipped, "reported_hfu": found["perf/hfu"], "reported_mfu": found["perf/mfu"],
        "reported_step_ms": 1e3 * find_step_time(found), "step_ms": 1e3 * step_s, "peak_flops_per_s": peak,
        "analytic_hardware_flops": found["perf/hardware_flops"], "model_flops": found["perf/model_flops"],
        "factor": found["perf/factor"], "source": found["perf/source"],
        "failures": failures, "counted_flops": None, "counted_hfu": None, "ratio": None, "reason": None,
    }  # fmt: skip
    try:
        with cupti.HardwareCounter([cupti.TENSOR_COUNTERS["bf16"]]) as counter:
            counted = []
            for _ in range(3):
                with counter.measure() as sample:
                    train()
                counted.append(sample.total_flops)
    except Exception as error:
        return row | {"reason": describe(error)}
    row["counted_flops"] = round(statistics.mean(counted))
    row["counted_hfu"] = row["counted_flops"] / (step_s * peak)
    row["ratio"] = row["reported_hfu"] / row["counted_hfu"]
    row["estimate_ratio"] = row["analytic_hardware_flops"] / row["counted_flops"]
    return row


def find_step_time(found: Mapping[str, Any]) -> float:
    """The step time that belongs to a record's HFU: of the details' window, not of the last step."""
    flops = found["perf/hardware_flops"] * found["perf/factor"]
    return float(flops / (found["perf/hfu"] * found["perf/peak_flops_per_s"]))


class StrictCall:
    """Calls a model; every wait for the device is an error, but in the model's own forward."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._forward = model.forward
        model.forward = self._run

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

    def restore(self) -> Any:
        del self._model.forward
        return self._model


@contextmanager
def refuse_waiting() -> Any:
    import torch

    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_waiting(what: str, loop: Loop, batches: Sequence[Mapping[str, Any]]) -> Row:
    """Twenty steps in which nothing that the monitor does may wait for the device."""
    if not loop.place.is_gpu:
        raise RuntimeError("no CUDA device here")
    steps = 20
    with watch(loop, "estimate", detail_every=5) as watching:
        for _ in range(3):
            watching.log(loop.train_step(batches))
        loop.place.synchronize()
        strict = loop.model = StrictCall(loop.model)
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
            "what": what,
            "steps": steps,
            "raised": list_failures(watching.monitor),
            "control_raised": control,
            "mfu_is_known": math.isfinite(found["perf/mfu"]),
        }


def _raises(call: Callable[[], Any]) -> bool:
    """Whether the check sees a wait at all."""
    try:
        with refuse_waiting():
            call()
    except RuntimeError:
        return True
    return False
