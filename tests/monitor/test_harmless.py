"""Whatever goes wrong in or around a monitor: training goes on, and comes to the same bits as without one."""

from __future__ import annotations

import copy
import errno
import gc
import io
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from loop import Clock, Outcome, conclude, make_batches, make_model, train, update, work
from places import HELPERS
from tiers import mark_heavy, thin
from tiny import CONFIG, list_hooks, read_log

import flopcalc
from flopcalc.monitor import TrainingMonitor, sinks, training
from flopcalc.monitor.settings import MODES

HERE = HELPERS
PACKAGE = os.path.dirname(flopcalc.__file__)
MONITOR = os.path.dirname(training.__file__)
SETTINGS = os.path.join(MONITOR, "settings.py")
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def alone() -> Outcome:
    """The training without a monitor."""
    return train(make_model(), make_batches())


def configure(**changes: Any) -> dict[str, Any]:
    return {"monitoring": {**CONFIG["monitoring"], **changes}}


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def said() -> Iterator[list[str]]:
    """The warnings of a block, as texts."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
        messages += [str(each.message) for each in caught]


# --- The modes, undisturbed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_leaves_losses_weights_and_random_numbers_alone(mode: str, tmp_path: Path, alone: Outcome) -> None:
    model = make_model()
    config = {**configure(mfu_calculation_mode=mode, flops_profile_freq=2)}
    with said():
        monitor = TrainingMonitor(tmp_path, config, model=model)
        found = train(model, make_batches(), monitor)
        source = monitor.metrics()["perf/source"]
        monitor.close()
    assert found == alone
    assert source.startswith(mode)
    assert conclude(model, []).random_state == alone.random_state  # closing draws none either
    assert [record["global_step"] for record in read_log(tmp_path / "flopcalc.jsonl")] == [1, 2, 3, 4]


# --- The model raises, batches that cannot be read --------------------------------------------------------------------

OUTSIDE = {"input_ids": torch.full((1, 4), 1000)}  # words that are not in the vocabulary


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_block", [True, False], ids=["with step", "by the hook"])
def test_a_model_that_raises_raises_to_the_loop_and_the_next_step_works(
    is_block: bool, mode: str, tmp_path: Path
) -> None:
    def run(monitor: TrainingMonitor | None) -> Outcome:
        model = make_model()
        if monitor is not None:
            monitor.attach(model)
        losses = []
        for number, batch in enumerate(make_batches(), 1):
            given = OUTSIDE if number == 1 else batch
            try:
                if monitor is not None and is_block:
                    with monitor.step(given):
                        losses.append(work(model, given))
                else:
                    losses.append(work(model, given))
                    if monitor is not None:
                        monitor.end_step()
            except IndexError:
                continue
            update(model)
        return conclude(model, losses)

    with said():
        monitor = TrainingMonitor(tmp_path, configure(mfu_calculation_mode=mode))
        found = run(monitor)
        monitor.report()
        metrics = monitor.metrics()
        monitor.close()
    assert not torch.autograd._profiler_enabled()
    assert found == run(None)
    assert len(found.losses) == 3
    assert metrics["global_step"] == 3
    assert metrics["perf/factor"] == 1.0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
def test_what_a_loop_raises_passes_through(error: type[BaseException], tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path, configure(), model=make_model())

    def fail(context: Any) -> None:
        with context:
            raise error

    for context in (monitor.step(), monitor.pause("eval"), monitor):
        with pytest.raises(error):
            fail(context)


class Odd:
    """A batch of nobody's kind."""


class Broken(dict[str, Any]):
    """A mapping that raises."""

    def get(self, *_: Any) -> Any:
        raise RuntimeError("not today")


IDS = torch.ones(2, 3, dtype=torch.long)
FORMS: dict[str, Any] = {
    "list of tensors": [torch.ones(2, 3)],
    "pair of tensors": (torch.ones(2, 3), torch.ones(2)),
    "object": Odd(),
    "text": "text",
    "list of texts": ["text", "text"],
    "number": 7,
    "bytes": b"bytes",
    "nothing": [],
    "empty mapping": {},
    "ids are text": {"input_ids": "text"},
    "ids are ragged": {"input_ids": [[1, 2], [3]]},
    "ids are an object": {"input_ids": Odd()},
    "keys are numbers": {1: 2},
    "mapping that raises": Broken(),
    "no rows": {"input_ids": torch.ones(0, 0, dtype=torch.long)},
    "one axis": {"input_ids": torch.ones(5, dtype=torch.long)},
    "mask of NaN": {"input_ids": IDS, "attention_mask": torch.full((2, 3), math.nan)},
    "mask of another size": {"input_ids": IDS, "attention_mask": torch.ones(9, 9)},
    "grids are text": {"input_ids": IDS, "image_grid_thw": "many"},
}


@pytest.mark.parametrize("form", thin(FORMS, 3))
@pytest.mark.parametrize("has_model", [True, False], ids=["live", "preset"])
def test_a_batch_of_any_form_does_no_harm(form: str, has_model: bool, tmp_path: Path, alone: Outcome) -> None:
    model = make_model()
    losses = []
    with said() as messages:
        monitor = TrainingMonitor(
            tmp_path, configure(mfu_calculation_mode="smart"), model=model if has_model else "llama-3.1-8b"
        )
        for given in make_batches():
            with monitor.step(FORMS[form]) as step:
                losses.append(work(model, given))
                update(model)
                step.log(loss=losses[-1])
        metrics = monitor.metrics()
        monitor.close()
    assert conclude(model, losses) == alone
    assert metrics["training/loss"] == losses[-1]
    assert len(messages) == len(set(messages))
    assert not math.isnan(metrics["perf/mfu"]) or messages


# --- What a machine may lack ------------------------------------------------------------------------------------------


def test_without_a_gpu_mfu_is_not_known_and_that_is_all(tmp_path: Path, alone: Outcome) -> None:
    model = make_model()
    with said() as messages:
        monitor = TrainingMonitor(tmp_path, {"monitoring": {"skip_first": 0}}, model=model)
        found = train(model, make_batches(), monitor)
        metrics = monitor.metrics()
        monitor.close()
    assert found == alone
    assert math.isnan(metrics["perf/mfu"])
    assert metrics["perf/tokens_per_second"] > 0
    assert len([message for message in messages if "MFU is not known" in message]) == 1


@pytest.mark.parametrize("mode", MODES)
def test_without_nvml_and_counters_another_source_stands_in(
    mode: str, tmp_path: Path, alone: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pynvml", "flopcalc.measure.counters.cupti", "flopcalc.measure.counters.gpm"):
        monkeypatch.setitem(sys.modules, name, None)
    model = make_model()
    with said():
        monitor = TrainingMonitor(tmp_path, configure(mfu_calculation_mode=mode), model=model)
        found = train(model, make_batches(), monitor)
        metrics = monitor.metrics()
        monitor.close()
    assert found == alone
    assert metrics["perf/factor"] == 1.0
    expected = {"estimate": "estimate", "profiler": "profiler", "smart": "operator counter", "hybrid": "profiler"}
    assert expected[mode] in metrics["perf/source"]


def test_counters_that_are_refused_do_no_harm(tmp_path: Path, alone: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    from flopcalc.measure.counters import cupti
    from flopcalc.monitor import instruments

    def refuse(*_: Any, **__: Any) -> None:
        raise cupti.CountersUnavailable("ERR_NVGPUCTRPERM: the driver keeps its counters to root")

    monkeypatch.setattr(cupti, "HardwareCounter", refuse)
    monkeypatch.setattr(instruments.Counters, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(instruments.Counters, "_on_device", lambda _: nullcontext())
    model = make_model()
    config = {**configure(mfu_calculation_mode="hybrid", dtype="bf16")}
    with said() as messages:
        monitor = TrainingMonitor(tmp_path, config, model=model)
        found = train(model, make_batches(), monitor)
        metrics = monitor.metrics()
        monitor.close()
    assert found == alone
    assert "profiler" in metrics["perf/source"]
    assert len([message for message in messages if "ERR_NVGPUCTRPERM" in message]) == 1


# --- Sinks, files, clocks ---------------------------------------------------------------------------------------------


class DeadSink(sinks.Sink):
    name = "dead"

    def write(self, record: Any) -> None:  # noqa: ARG002
        raise ConnectionError("nobody answers")


class SlowSink(sinks.Sink):
    name = "slow"
    held = threading.Event()

    def write(self, record: Any) -> None:  # noqa: ARG002
        self.held.wait(DEADLINE_S)


@pytest.mark.parametrize("make", [DeadSink, SlowSink])
def test_a_sink_that_is_down_or_slow_holds_nobody(
    make: type[sinks.Sink], tmp_path: Path, alone: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sinks = sinks.make_sinks
    monkeypatch.setattr("flopcalc.monitor.digest.make_sinks", lambda *args: [*make_sinks(*args), make()])
    monkeypatch.setattr(training, "_CLOSE_S", 0.2)
    SlowSink.held.clear()
    model = make_model()
    with said() as messages:
        monitor = TrainingMonitor(tmp_path, configure(), model=model)
        found = train(model, make_batches(), monitor)
        monitor.close()
        SlowSink.held.set()
    assert found == alone
    assert len(read_log(tmp_path / "flopcalc.jsonl")) == 4
    assert [message for message in messages if f"sink {make.name}" in message]


def test_a_full_disk_does_no_harm(tmp_path: Path, alone: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(training, "_CLOSE_S", 0.2)
    model = make_model()
    with said() as messages:
        monitor = TrainingMonitor(tmp_path, configure(), model=model)
        monkeypatch.setattr(os, "write", refuse)
        found = train(model, make_batches(), monitor)
        monitor.close()
        monkeypatch.undo()
    assert found == alone
    assert len([message for message in messages if "No space left on device" in message]) == 1


def test_a_log_that_is_deleted_underneath_is_begun_again(tmp_path: Path, alone: Outcome) -> None:
    model = make_model()
    log = tmp_path / "flopcalc.jsonl"
    batches = make_batches()
    losses = []
    with said() as messages:
        monitor = TrainingMonitor(tmp_path, configure(), model=model)
        for number, batch in enumerate(batches, 1):
            losses.append(work(model, batch))
            update(model)
            monitor.log_step(number, 0, losses[-1], 1.0, 0.1)
            if number == 2:
                monitor.metrics()
                wait_until(log.exists)
                log.unlink()
        found = conclude(model, losses)
        monitor.close()
    assert found == alone
    assert json.loads(log.read_text().splitlines()[0])["type"] == "start"
    assert [record["global_step"] for record in read_log(log)][-2:] == [3, 4]
    assert len([message for message in messages if "was deleted or moved" in message]) == 1


@pytest.mark.parametrize(
    "where",
    ["/proc/no/such/folder", "a file", "a name that is too long" * 100, "nul\0byte"],
    ids=["not there", "a file", "too long", "no name"],
)
def test_a_folder_that_cannot_be_written_does_no_harm(
    where: str, tmp_path: Path, alone: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_CLOSE_S", 0.2)
    (tmp_path / "a file").write_text("")
    model = make_model()
    with said() as messages:
        monitor = TrainingMonitor(tmp_path / where, configure(), model=model)
        found = train(model, make_batches(), monitor)
        metrics = monitor.metrics()
        monitor.close()
    assert found == alone
    assert metrics["perf/mfu"] > 0
    assert messages


@pytest.mark.parametrize(
    ("times", "is_known"),
    [((0, 0, 0, 0), False), ((-5, -5, -5, -5), False), ((1, -5, 0, 1), True)],
    ids=["stands still", "runs backwards", "jumps"],
)
def test_a_clock_that_fails_is_said_once_and_its_steps_are_in_no_rate(
    times: tuple[int, ...], is_known: bool, tmp_path: Path, clock: Clock, alone: Outcome
) -> None:
    model = make_model()
    losses = []
    with said() as messages:
        monitor = TrainingMonitor(tmp_path, configure(), model=model)
        for number, (batch, seconds) in enumerate(zip(make_batches(), times, strict=True), 1):
            losses.append(work(model, batch))
            update(model)
            clock.tick(seconds)
            monitor.log_step(number, 0, losses[-1], 1.0, 0.1)
        metrics = monitor.metrics()
        monitor.close()
    assert conclude(model, losses) == alone
    assert metrics["perf/step_time"] == 1 if is_known else math.isnan(metrics["perf/step_time"])
    assert math.isnan(metrics["perf/mfu"]) is not is_known
    assert len([message for message in messages if "the clock stood still or ran backwards" in message]) == 1
    goodput = json.loads((tmp_path / "goodput.json").read_text())
    assert all(value is None or value >= 0 for key, value in goodput.items() if key.startswith(("lost", "productive")))


# --- The monitor itself fails, at every call of every function --------------------------------------------------------

# Thin outer shells: what they call is guarded, and fails in its turn; they themselves have nothing to fail at.
SHELLS = {
    "guarded.<locals>.run", "TrainingMonitor.__init__", "TrainingMonitor.step", "TrainingMonitor.watch",
    "TrainingMonitor.pause", "TrainingMonitor.metrics", "TrainingMonitor.say", "TrainingMonitor.close",
    "TrainingMonitor.log_step", "TrainingMonitor._see_start", "TrainingMonitor._see_end",
    "TrainingMonitor._fail", "TrainingMonitor._is_copy", "TrainingMonitor.__enter__", "TrainingMonitor.__exit__",
    "StepContext.__init__", "StepContext.__enter__", "StepContext.__exit__", "StepContext.log",
    "BeforeForward.__call__", "AfterForward.__call__", "InsideForward.__call__", "WatchedLoader.__init__",
    "WatchedLoader.__iter__", "Messages.say", "warn",
}  # fmt: skip


def make_all_batches() -> list[dict[str, torch.Tensor]]:
    """Padded ones, then equal ones without a mask."""
    ids = torch.arange(3, 19).reshape(2, 8)
    return [*make_batches(), *[{"input_ids": ids, "labels": ids}] * 4]


class Injected(Exception):
    """Raised inside the monitor."""


def use_everything(folder: Path, mode: str, arm: Callable[[], None]) -> Outcome:
    """A training with every call of the monitor's; `arm` is called before each of them."""
    model, batches = make_model(), make_all_batches()
    losses = []
    arm()
    monitor = TrainingMonitor(folder, configure(mfu_calculation_mode=mode, flops_profile_freq=2), model=model)
    try:
        arm()
        monitor.attach(model)
        loader = monitor.watch(batches[:2])
        for number, batch in enumerate(loader, 1):
            arm()
            losses.append(work(model, batch))
            update(model)
            monitor.log_datasets({"web": {"loss": 1.0}})
            arm()
            monitor.log_step(number, 0, losses[-1], 1.0, 0.1, attention_mask=batch["attention_mask"])
            arm()
            monitor.metrics()
        arm()
        monitor.set_phase("finetune")
        with monitor.pause("eval"):
            arm()
        with monitor.step(batches[2], dataset="web") as step:
            arm()
            losses.append(work(model, batches[2]))
            update(model)
            step.log(loss=losses[-1])
            arm()
        arm()
        monitor.mark_lost("checkpoint")
        arm()
        monitor.begin_step()
        losses.append(work(model, batches[3]))
        update(model)
        arm()
        monitor.end_step()
        arm()
        monitor.report(loss=losses[-1])
        for number, batch in enumerate(batches[4:], 5):
            arm()
            losses.append(work(model, batch))
            update(model)
            arm()
            monitor.log_step(number, 0, losses[-1], None, 0.1)
        arm()
        monitor.metrics()
    finally:
        arm()
        monitor.close()
        sys.settrace(None)
    return conclude(model, losses)


def is_ours(frame: types.FrameType | None) -> bool:
    """A frame of the monitor's own code; settings are read by the constructor, which does raise for a bad config."""
    return frame is not None and frame.f_code.co_filename.startswith(MONITOR) and frame.f_code.co_filename != SETTINGS


def is_of_settings(frame: types.FrameType) -> bool:
    """Called by the settings, or by what they call to make a value."""
    callers = [frame.f_back, frame.f_back and frame.f_back.f_back]
    return any(each is not None and each.f_code.co_filename == SETTINGS for each in callers)


def name_code(code: types.CodeType) -> str:
    return f"{os.path.relpath(code.co_filename, PACKAGE)}:{code.co_qualname}"


def collect_calls(folder: Path, mode: str) -> dict[str, types.CodeType]:
    """Every function of the monitor that such a training calls, on any thread, and every one they call in flopcalc."""
    found: dict[str, types.CodeType] = {}

    def see(frame: types.FrameType, _event: str, _value: Any) -> None:
        code = frame.f_code
        if is_ours(frame) or (is_ours(frame.f_back) and code.co_filename.startswith(PACKAGE)):
            found.setdefault(name_code(code), code)

    threading.settrace(see)
    try:
        use_everything(folder, mode, lambda: sys.settrace(see))
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return found


def run_with_failure(folder: Path, mode: str, target: types.CodeType) -> tuple[Outcome, int]:
    """The same training with a function that raises in every phase of the run; how often it did."""
    count = 0

    def fail(frame: types.FrameType, event: str, _value: Any) -> None:
        nonlocal count
        if event == "call" and frame.f_code is target and not is_of_settings(frame):
            count += 1
            raise Injected(target.co_qualname)

    threading.settrace(fail)
    try:
        return use_everything(folder, mode, lambda: sys.settrace(fail)), count
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


PARTS = 12  # of all the functions of a mode


# A thread whose own first call fails ends; Python prints that, and pytest would make it an error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("mode", "part"), mark_heavy([(mode, part) for mode in MODES for part in range(PARTS)], [("estimate", 0)])
)
def test_an_exception_at_any_call_inside_the_monitor_reaches_nobody(
    mode: str, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_CLOSE_S", 0.2)
    expected = train(make_model(), make_all_batches())
    with said():
        calls = collect_calls(tmp_path / "calls", mode)
        tried = collect_calls(tmp_path / "estimate", "estimate") if mode != "estimate" else {}
    targets = {
        name: code
        for name, code in calls.items()
        if name not in tried and code.co_qualname not in SHELLS and code.co_filename != SETTINGS
    }
    assert len(targets) > 5
    wrong = {}
    for number, (name, code) in enumerate(sorted(targets.items())[part::PARTS]):
        with said():
            try:
                found, _ = run_with_failure(tmp_path / str(number), mode, code)
            except Exception as error:
                wrong[name] = f"raised {error!r}"
                continue
        if found != expected:
            wrong[name] = "other losses"
        if torch.autograd._profiler_enabled():
            wrong[name] = "a profiler was left open"
    assert wrong == {}


# --- Other processes --------------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[Any]):
    """A dataset that drags the monitored model and its monitor along, and uses both in the worker."""

    def __init__(self, model: Any, monitor: Any) -> None:
        self.model, self.monitor = model, monitor

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        batch = make_batches()[index]
        if self.monitor is not None:
            self.monitor.log_step(index, 0, 0.5, 1.0, 0.1)
            with self.monitor.step(batch):
                self.model(**batch)
            assert math.isnan(self.monitor.metrics()["perf/mfu"])
            self.monitor.close()
        return batch


@pytest.mark.parametrize("kind", mark_heavy(["fork", "spawn"], ["fork"]))
def test_loaders_in_other_processes_see_an_idle_monitor(kind: str, tmp_path: Path) -> None:
    def run(monitor: TrainingMonitor | None) -> Outcome:
        model = make_model()
        if monitor is not None:
            monitor.attach(model)
        first = make_batches()[0]
        losses = [work(model, first)]  # the monitor is at work when the loader starts
        if monitor is not None:
            monitor.log_step(1, 0, 0.5, 1.0, 0.1)
        loader: Any = torch.utils.data.DataLoader(
            Rows(model, monitor), batch_size=None, num_workers=1, multiprocessing_context=kind
        )
        for number, batch in enumerate(loader if monitor is None else monitor.watch(loader), 2):
            losses.append(work(model, batch))
            update(model)
            if monitor is not None:
                monitor.log_step(number, 0, 0.5, 1.0, 0.1)
        return conclude(model, losses)

    with warnings.catch_warnings():
        # torch and Python warn of forks beside threads, of which torch itself has some
        warnings.simplefilter("ignore")
        monitor = TrainingMonitor(tmp_path, configure())
        found = run(monitor)
        monitor.close()
        assert found == run(None)
    assert [record["global_step"] for record in read_log(tmp_path / "flopcalc.jsonl")] == [1, 2, 3, 4, 5]


def start(code: str, *flags: str) -> subprocess.Popen[str]:
    """A program of its own that trains with a monitor."""
    text = "import os, sys, torch\nfrom loop import *\nfrom flopcalc.monitor import TrainingMonitor\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.path.dirname(PACKAGE)])}
    return subprocess.Popen(
        [sys.executable, *flags, "-c", text + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.heavy
def test_a_killed_process_leaves_a_log_up_to_its_last_flush(tmp_path: Path) -> None:
    process = start(f"""
        model = make_model()
        config = {{"monitoring": {{"save_every": 1, "peak_flops_per_s": 1e18, "dtype": "fp32"}}}}
        monitor = TrainingMonitor({str(tmp_path)!r}, config, model=model)
        number = 0
        while True:
            for batch in make_batches():
                number += 1
                monitor.log_step(number, 0, work(model, batch), 1.0, 0.1)
    """)
    log = tmp_path / "flopcalc.jsonl"
    try:
        wait_until(lambda: process.poll() is not None or (log.exists() and log.read_bytes().count(b"\n") > 5))
    finally:
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    whole = log.read_bytes().rpartition(b"\n")[0]  # the last line may be torn
    lines = [json.loads(line) for line in whole.splitlines()]
    assert lines[0]["type"] == "start"
    steps = [line["global_step"] for line in lines if line["type"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 3


@pytest.mark.heavy
@pytest.mark.parametrize("is_held", [True, False], ids=["held", "dropped"])
def test_a_monitor_that_nobody_closed_writes_its_log_at_exit(is_held: bool, tmp_path: Path) -> None:
    process = start(f"""
        def run():
            model = make_model()
            monitor = TrainingMonitor({str(tmp_path)!r}, {configure()!r}, model=model)
            train(model, make_batches(), monitor)
            return monitor
        kept = run()
        if not {is_held}:
            del kept
    """)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (0, "")
    assert [record["global_step"] for record in read_log(tmp_path / "flopcalc.jsonl")] == [1, 2, 3, 4]
    assert len(read_log(tmp_path / "flopcalc.jsonl", "end")) == 1


@pytest.mark.heavy
def test_warnings_that_are_errors_stop_no_training(tmp_path: Path, alone: Outcome) -> None:
    process = start(
        f"""
        import warnings
        warnings.simplefilter("error", RuntimeWarning)
        model = make_model()
        monitor = TrainingMonitor({str(tmp_path)!r}, {{"monitoring": {{"skip_first": 0}}}}, model=model)
        found = train(model, make_batches(), monitor)
        monitor.say("a warning of ours")
        monitor.close()
        print(found.losses)
        """
    )
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    assert output.strip() == str(alone.losses)
    assert "flopcalc: a warning of ours" in errors
    assert "flopcalc: MFU is not known" in errors


@pytest.mark.heavy
def test_an_error_in_the_users_loop_ends_the_program_as_ever(tmp_path: Path) -> None:
    process = start(f"""
        model = make_model()
        monitor = TrainingMonitor({str(tmp_path)!r}, {configure(mfu_calculation_mode="profiler")!r}, model=model)
        train(model, make_batches(1), monitor)
        model(input_ids=torch.full((1, 4), 1000))
    """)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "IndexError" in errors.splitlines()[-1]
    assert len(read_log(tmp_path / "flopcalc.jsonl")) == 1


# --- torch.compile, copies, several monitors --------------------------------------------------------------------------


ORDERS = ("compiled, then given", "given, then compiled", "compiled in place", "given, then compiled in place")


@pytest.mark.parametrize(
    ("order", "backend"),
    mark_heavy(product(ORDERS, ("eager", "aot_eager"))),
)
def test_a_compiled_model_trains_as_without_a_monitor(order: str, backend: str, tmp_path: Path) -> None:
    batches = [make_batches()[0]] * 3

    def run(folder: Path | None) -> tuple[Outcome, dict[str, Any]]:
        torch._dynamo.reset()
        model: Any = make_model(0.0)
        monitor = None
        if folder is not None:
            monitor = TrainingMonitor(folder, configure())
        if monitor is not None and order.startswith("given"):
            monitor.attach(model)
        if order.endswith("in place"):
            model.compile(backend=backend, fullgraph=True)
            live = model
        else:
            live = torch.compile(model, backend=backend, fullgraph=True)
        if monitor is not None and not order.startswith("given"):
            monitor.attach(live)
        losses = []
        for number, batch in enumerate(batches, 1):
            losses.append(work(live, batch))
            update(model)
            if monitor is not None:
                monitor.log_step(number, 0, losses[-1], 1.0, 0.1)
        metrics = monitor.metrics() if monitor is not None else {}
        if monitor is not None:
            monitor.close()
        return conclude(model, losses), metrics

    with said() as messages:
        found, metrics = run(tmp_path)
    with said():
        expected, _ = run(None)
    assert found == expected
    is_seen = order == "compiled, then given"
    assert math.isnan(metrics["perf/mfu"]) is not is_seen
    assert any("compiled in place" in message for message in messages) is not is_seen


def test_copies_of_a_hooked_model_are_free_of_the_monitor(tmp_path: Path, alone: Outcome) -> None:
    model = make_model()
    monitor = TrainingMonitor(tmp_path, configure(), model=model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert len(list_hooks(model)) == 2
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        torch.manual_seed(1)
        expected = model(**make_batches()[0]).loss
        torch.manual_seed(1)
        assert twin(**make_batches()[0]).loss == expected
    monitor.close()
    for twin in (copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor)), copy.copy(monitor)):
        with twin.step(make_batches()[0]) as step:
            step.log(loss=1.0)
        twin.log_step(1, 0, 0.5, 1.0, 0.1)
        assert all(math.isnan(twin.metrics()[key]) for key in ("perf/mfu", "perf/step_time"))
        twin.close()
    torch.manual_seed(0)
    assert train(make_model(), make_batches()) == alone


def test_close_twice_and_use_after_close_do_nothing(tmp_path: Path, alone: Outcome) -> None:
    model = make_model()
    monitor = TrainingMonitor(tmp_path, configure(), model=model)
    monitor.log_step(1, 0, 0.5, 1.0, 0.1)
    with said():
        monitor.close()
    log = (tmp_path / "flopcalc.jsonl").read_bytes()
    monitor.close()
    assert list_hooks(model) == []
    with monitor.step(make_batches()[0]), monitor.pause("eval"):
        monitor.attach(model)
        monitor.begin_step()
        monitor.end_step()
        monitor.report()
        monitor.set_phase("main")
        monitor.mark_lost("eval")
        monitor.log_datasets({"web": {"loss": 1.0}})
    assert list(monitor.watch([1, 2])) == [1, 2]
    assert train(model, make_batches(), monitor) == alone
    assert list_hooks(model) == []
    assert monitor.metrics()["global_step"] == 1
    monitor.close()
    assert (tmp_path / "flopcalc.jsonl").read_bytes() == log


def test_a_dropped_monitor_lets_go_of_the_model_and_finishes_its_log(tmp_path: Path) -> None:
    before = threading.enumerate()
    model = make_model()
    monitor = TrainingMonitor(tmp_path, configure(mfu_calculation_mode="smart"), model=model)
    train(model, make_batches(), monitor)
    references = [weakref.ref(model), weakref.ref(monitor)]
    threads = [each for each in threading.enumerate() if each not in before and each.name.startswith("flopcalc")]
    assert threads
    del monitor
    wait_until(lambda: gc.collect() >= 0 and references[1]() is None)
    del model
    wait_until(lambda: gc.collect() >= 0 and references[0]() is None)
    wait_until(lambda: not any(thread.is_alive() for thread in threads))
    assert [record["global_step"] for record in read_log(tmp_path / "flopcalc.jsonl")] == [1, 2, 3, 4]
    assert len(read_log(tmp_path / "flopcalc.jsonl", "end")) == 1


def test_a_model_outlives_its_dropped_monitor(tmp_path: Path, alone: Outcome) -> None:
    model = make_model()
    reference = weakref.ref(TrainingMonitor(tmp_path, configure(), model=model))
    wait_until(lambda: gc.collect() >= 0 and reference() is None)
    assert train(model, make_batches()) == alone


def test_two_monitors_on_one_model_count_alike(tmp_path: Path, alone: Outcome) -> None:
    model = make_model()
    monitors = [TrainingMonitor(tmp_path / str(at), configure(), model=model) for at in range(2)]

    class Both:
        def log_step(self, *args: Any) -> None:
            for monitor in monitors:
                monitor.log_step(*args)

    assert train(model, make_batches(), Both()) == alone
    for monitor in monitors:
        monitor.close()
    counted = [[r["perf/model_flops"] for r in read_log(tmp_path / str(at) / "flopcalc.jsonl")] for at in range(2)]
    assert counted[0] == counted[1]
    assert None not in counted[0]


def test_evaluation_and_generation_between_steps_are_not_counted(tmp_path: Path) -> None:
    def run(monitor: TrainingMonitor | None) -> Outcome:
        model, batches = make_model(), make_batches()
        if monitor is not None:
            monitor.attach(model)
        losses = []
        for number, batch in enumerate(batches, 1):
            losses.append(work(model, batch))
            update(model)
            if monitor is not None:
                monitor.log_step(number, 0, losses[-1], 1.0, 0.1)
            model.eval()
            losses.append(model(**batch).loss.detach())
            model.train()
            with torch.no_grad():
                losses.append(model(**batch).loss)
            model.generate(input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, do_sample=True)
        return conclude(model, losses)

    monitor = TrainingMonitor(tmp_path, configure())
    found = run(monitor)
    monitor.close()
    assert found == run(None)
    expected = [flopcalc.estimate_flops(make_model(), batch=batch).total for batch in make_batches()]
    assert [record["perf/model_flops"] for record in read_log(tmp_path / "flopcalc.jsonl")] == expected


def test_training_in_a_thread_hears_the_warnings(tmp_path: Path, alone: Outcome) -> None:
    found: list[Any] = []

    def run() -> None:
        with said() as messages:
            model = make_model()
            monitor = TrainingMonitor(tmp_path, {"monitoring": {"skip_first": 0}}, model=model)
            found.append(train(model, make_batches(), monitor))
            monitor.close()
        found.append(messages)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(DEADLINE_S)
    assert found[0] == alone
    assert any("MFU is not known" in message for message in found[1])
