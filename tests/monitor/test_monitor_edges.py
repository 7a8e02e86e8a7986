"""What hostile loops do to a monitor: too many steps, too many names, wrong arguments, files that are none."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CONFIG, read_log

from flopcalc import bind, estimate_flops
from flopcalc.base.errors import ConfigError
from flopcalc.monitor import TrainingMonitor, digest, meter, training
from flopcalc.monitor.batch import Intake
from flopcalc.monitor.log import load_log, summarize
from flopcalc.monitor.sinks import JsonlSink, outbox

MODEL = "sweep-tiny"
BATCH = {"input_ids": [[1] * 8] * 2}


@pytest.fixture
def threads() -> set[threading.Thread]:
    """Those before the test: hung sinks of other tests may be among them."""
    return set(threading.enumerate())


def list_messages(log: Path) -> list[str]:
    return [event["message"] for event in read_log(log, "event")]


# --- close() ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["log_step", "step"])
def test_close_says_how_many_records_it_dropped(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: set[threading.Thread]
) -> None:
    monkeypatch.setattr(training, "_POLL_S", 3600.0)  # the worker never comes
    monkeypatch.setattr(training, "_COUNT_S", 0.0)
    monitor = TrainingMonitor(tmp_path, CONFIG, model=MODEL)
    for step in range(1, 51):
        if way == "step":  # two entries: the step and its record
            with monitor.step(BATCH) as seen:
                seen.log(loss=1.0)
        else:
            monitor.log_step(step, 0, 1.0, None, 1e-3, attention_mask=[[1] * 8])
    with pytest.warns(RuntimeWarning, match="50 records were dropped"):
        monitor.close()
    assert read_log(tmp_path / "flopcalc.jsonl") == []
    (end,) = read_log(tmp_path / "flopcalc.jsonl", "end")
    assert (end["steps"], end["dropped"]) == (0, 50)
    assert set(threading.enumerate()) <= threads


def test_close_digests_what_is_left_and_ends_every_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: set[threading.Thread]
) -> None:
    monkeypatch.setattr(training, "_POLL_S", 3600.0)
    monkeypatch.setattr(training, "_COUNT_S", 300.0)
    monitor = TrainingMonitor(tmp_path, CONFIG, model=MODEL)
    for step in range(1, 51):
        monitor.log_step(step, 0, 1.0, None, 1e-3, attention_mask=[[1] * 8])
    monitor.close()
    assert [record["global_step"] for record in read_log(tmp_path / "flopcalc.jsonl")] == list(range(1, 51))
    (end,) = read_log(tmp_path / "flopcalc.jsonl", "end")
    assert end["steps"] == 50
    assert "dropped" not in end
    assert set(threading.enumerate()) <= threads


def test_threads_that_take_turns_are_said_once_and_no_time_is_negative(tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path, CONFIG, model=MODEL)

    def log(step: int) -> None:
        monitor.log_step(step, 0, 1.0, None, 1e-3, attention_mask=[[1] * 8])

    for step in (1, 2):  # a loop may move to another thread
        thread = threading.Thread(target=log, args=(step,))
        thread.start()
        thread.join()
    log(3)
    thread = threading.Thread(target=log, args=(4,))
    thread.start()
    thread.join()
    with pytest.warns(RuntimeWarning, match="steps of several threads are counted as those of one loop") as said:
        log(5)
    monitor.close()
    assert len([each for each in said if "several threads" in str(each.message)]) == 1
    records = read_log(tmp_path / "flopcalc.jsonl")
    assert [record["global_step"] for record in records] == [1, 2, 3, 4, 5]
    assert all(record["perf/step_time"] is None or record["perf/step_time"] > 0 for record in records)


def test_too_many_steps_for_the_worker_are_counted_as_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_POLL_S", 3600.0)
    monkeypatch.setattr(digest, "_MOST_ENTRIES", 10)
    monitor = TrainingMonitor(tmp_path, CONFIG, model=MODEL)
    for step in range(1, 11):
        monitor.log_step(step, 0, 1.0, None, 1e-3, attention_mask=[[1] * 8])
    with pytest.warns(RuntimeWarning, match="steps come faster than they are counted: 10 wait"):
        monitor.log_step(11, 0, 1.0, None, 1e-3, attention_mask=[[1] * 8])
    for step in range(12, 31):
        monitor.log_step(step, 0, 1.0, None, 1e-3, attention_mask=[[1] * 8])
    with pytest.warns(RuntimeWarning, match="20 records were dropped"):
        monitor.close()
    assert [record["global_step"] for record in read_log(tmp_path / "flopcalc.jsonl")] == list(range(21, 31))


@pytest.mark.heavy
def test_process_with_far_too_many_steps_ends_as_it_should(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import torch
        from flopcalc import TrainingMonitor
        monitor = TrainingMonitor({str(tmp_path)!r}, {CONFIG!r}, model={MODEL!r})
        mask = torch.ones(4, 128, dtype=torch.long)
        for step in range(1, 20001):
            monitor.log_step(step, 0, 1.0, 1.0, 1e-3, attention_mask=mask)
        monitor.close()
    """)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (end,) = read_log(tmp_path / "flopcalc.jsonl", "end")
    assert end["steps"] + end.get("dropped", 0) == 20000
    assert len(read_log(tmp_path / "flopcalc.jsonl")) == end["steps"]
    assert ("records were dropped" in done.stderr) == ("dropped" in end)


# --- Signals ----------------------------------------------------------------------------------------------------------


def test_records_are_written_before_they_get_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies of SIGTERM, SIGHUP or SIGKILL loses no more than the last moments."""
    monkeypatch.setattr(outbox, "LONGEST_UNSAVED_S", 0.0)
    sink = JsonlSink(tmp_path / "log.jsonl", save_every=200)
    written = threading.Event()
    save = sink.flush

    def flush() -> None:
        save()
        if (tmp_path / "log.jsonl").exists():
            written.set()

    monkeypatch.setattr(sink, "flush", flush)
    box = outbox.Outbox([sink], lambda _message: None, poll_s=0.01)
    box.put({"type": "step", "global_step": 1})
    assert written.wait(60)
    assert json.loads((tmp_path / "log.jsonl").read_text())["global_step"] == 1
    box.close()


def test_handlers_of_signals_stay_as_they_were(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    with TrainingMonitor(tmp_path, CONFIG, model=MODEL) as monitor, monitor.step(BATCH):
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_close_in_the_users_own_handler_loses_nothing(number: signal.Signals, tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path, CONFIG, model=MODEL)
    before = signal.signal(number, lambda *_: monitor.close())
    try:
        for step in range(1, 21):
            monitor.log_step(step, 0, 1.0, None, 1e-3, attention_mask=[[1] * 8])
        with monitor._digester._lock:  # as if the signal came in the midst of counting
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)
    assert len(read_log(tmp_path / "flopcalc.jsonl")) == 20


# --- Many datasets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["step", "values"])
def test_many_dataset_names_are_linear(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record holds what changed since the last one, so names are written as often as they are used."""
    monkeypatch.setattr(training, "_COUNT_S", 300.0)  # a busy machine drops nothing either
    count, every = 300, 10
    with TrainingMonitor(tmp_path, CONFIG, model=MODEL) as monitor:
        for step in range(1, count + 1):
            with monitor.step(BATCH, dataset=f"name{step}" if way == "step" else None) as seen:
                if way == "values":
                    monitor.log_datasets({f"name{step}": {"loss": 1.0}})
                seen.log(loss=1.0)
    records = read_log(tmp_path / "flopcalc.jsonl")
    keys = [sum(key.startswith("dataset/") for key in record) for record in records]
    per_name = 3 if way == "step" else 1
    assert max(keys) <= per_name * meter._MOST_DATASETS
    assert max(keys[count // 2 :]) <= per_name * (every + 1)
    found = summarize(load_log(tmp_path))["datasets"]
    assert len(found) == count
    if way == "step":
        assert {values["share"] for values in found.values()} == {1 / count}


# --- Wrong arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_dir": None}, "output_dir is the path of a folder, not None"),
        ({"output_dir": 5}, "output_dir is the path of a folder, not 5"),
        ({"output_dir": b"out"}, "output_dir is the path of a folder, not b'out'"),
        ({"output_dir": ""}, "output_dir is the path of a folder, not ''"),
        ({"output_dir": "out", "log_file": 5.5}, "log_file is the path of a file, not 5.5"),
    ],
)
def test_constructor_refuses_in_our_own_words(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingMonitor(**arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _, step: step.log(foo=1), "step.log has no argument 'foo', left out"),
        (lambda _, step: step.log(los=1), "step.log has no argument 'los', left out. Did you mean loss"),
        (lambda monitor, _: monitor.step(BATCH, data="web"), "step has no argument 'data', left out"),
        (lambda monitor, _: monitor.log_step(), "failed in log_step"),
        (lambda monitor, _: monitor.log_step(1, 0, 0, 0, 0, speed=1), "failed in log_step"),
        (lambda monitor, _: monitor.end_step(1, 2, 3), "failed in end_step"),
        (lambda monitor, _: monitor.report(loss=1, foo=2), "failed in report"),
        (lambda monitor, _: monitor.log_datasets(5), "failed in log_datasets"),
        (lambda monitor, _: monitor.set_phase("night"), "no phase 'night'"),
    ],
)
def test_calls_in_the_loop_never_raise(call: Any, message: str, tmp_path: Path) -> None:
    with TrainingMonitor(tmp_path, CONFIG, model=MODEL) as monitor:
        with monitor.step(BATCH) as step, pytest.warns(RuntimeWarning, match=message):
            call(monitor, step)
        assert monitor.metrics()["perf/mfu"] > 0


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (math.nan, "holds values such as"),
        (0.5, "holds values such as"),
        (-1.0, "holds values such as"),
        (-1, "holds values such as"),
        (b"4", "attention_mask must be"),
    ],
)
def test_masks_that_are_none_are_not_counted(mask: Any, reason: str, tmp_path: Path) -> None:
    import torch

    monitor = TrainingMonitor(tmp_path, CONFIG, model=MODEL)
    found = {}
    given = mask if isinstance(mask, bytes) else torch.full((2, 8), mask)
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": given}
    with monitor.step(batch):
        pass
    with pytest.warns(RuntimeWarning, match=reason):
        found.update(monitor.metrics())
    assert math.isnan(found["perf/mfu"])
    monitor.close()
    assert any(reason in message for message in list_messages(tmp_path / "flopcalc.jsonl"))


# --- Files ------------------------------------------------------------------------------------------------------------


def test_log_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    os.mkfifo(path)
    assert digest._read_last_step(str(path)) == 0
    assert digest._read_last_step("/dev/zero") == 0
    assert digest._read_last_step(str(tmp_path)) == 0


def test_last_step_of_a_log_with_deep_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"type": "step", "global_step": 7}\n' + "[" * 30_000 + "\n")
    assert digest._read_last_step(str(path)) == 7


@pytest.mark.parametrize(
    ("mask", "positions", "documents"),
    [
        (None, [0, 1, 2, 3, 4], [5]),
        (None, [0, 1, 2, 0, 1], [3, 2]),
        ((2, 5), [0, 1, 2, 3, 4], [5]),
        ((2, 5), [0, 1, 2, 0, 1], [5]),  # with a mask, HF keeps no documents apart
        ((2, 1, 5, 5), [0, 1, 2, 3, 4], [5]),
    ],
)
def test_positions_beside_a_mask(mask: tuple[int, ...] | None, positions: list[int], documents: list[int]) -> None:
    intake = Intake(bind("llama-3.1-8b"))
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long), "position_ids": torch.tensor([positions] * 2)}
    if mask is not None:
        batch["attention_mask"] = torch.ones(mask, dtype=torch.long)
    work = intake.count(intake.take(batch, None, None))
    assert work.model_flops == 2 * sum(estimate_flops("llama-3.1-8b", seq_len=each).total for each in documents)
