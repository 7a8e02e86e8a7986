"""Where records go: what each real library reads back, and what happens when a sink fails, hangs, or is not there."""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flopcalc.monitor.settings import Settings
from flopcalc.monitor.sinks import JsonlSink, Outbox, Record, Say, Sink, make_sinks
from flopcalc.monitor.sinks.outbox import ATTEMPTS, LONG_QUEUE

Json = dict[str, Any]
NAN = math.nan
# What a monitor sends: numbers, unknown numbers, texts, a list, datasets.
STEP: Json = {
    "type": "step", "time": 1_700_000_000.5, "global_step": 3, "perf/mfu": 0.5, "perf/hfu": 0.75,
    "perf/device_mfu": NAN, "perf/model_flops": 2**64, "training/loss": 2.5, "perf/source": "estimate",
    "perf/stragglers": [1, 2], "dataset/web/loss": 1.25,
}  # fmt: skip
SENT = {"perf/mfu": 0.5, "perf/hfu": 0.75, "perf/model_flops": 2.0**64, "training/loss": 2.5, "dataset/web/loss": 1.25}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def read_lines(path: Path) -> list[Json]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def open_log(path: Path, save_every: int = 1) -> tuple[JsonlSink, list[str]]:
    said: list[str] = []
    sink = JsonlSink(path, save_every)
    sink.open(said.append)
    return sink, said


class Collect(Sink):
    """Keeps what it gets; `trouble` may raise or wait before that."""

    def __init__(self, name: str = "collect", trouble: Callable[[Record], None] | None = None) -> None:
        self.name = name
        self.trouble = trouble
        self.records: list[Record] = []
        self.calls: list[str] = []

    def open(self, say: Say) -> None:  # noqa: ARG002
        self.calls.append("open")

    def write(self, record: Record) -> None:
        if self.trouble is not None:
            self.trouble(record)
        self.records.append(record)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def quick(*given: Sink, say: Say, limit: int = 10_000) -> Outbox:
    return Outbox(given, say, limit=limit, poll_s=0.005, retry_s=1e-5)


def refuse(message: str) -> None:
    raise AssertionError(message)


# --- the log ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "written"),
    [
        (1, 1),
        (2**70, 2**70),
        (0.1, 0.1),
        (True, True),
        (None, None),
        (NAN, None),
        (math.inf, None),
        (-math.inf, None),
        ("ü\n", "ü\n"),
        (np.int64(7), 7),
        (np.float32(0.5), 0.5),
        (np.float64("nan"), None),
        ([1, NAN, ("a",)], [1, None, ["a"]]),
        ({"a": {1: NAN}}, {"a": {"1": None}}),
        (Path("x"), "x"),
    ],
)
def test_log_writes_plain_json(tmp_path: Path, value: Any, written: Any) -> None:
    sink, _ = open_log(tmp_path / "log.jsonl")
    sink.write({"value": value})
    sink.close()
    (line,) = read_lines(tmp_path / "log.jsonl")
    assert line == {"value": written}
    assert type(line["value"]) is type(written)


def test_log_is_saved_every_so_many_records_and_at_once_for_what_is_no_step(tmp_path: Path) -> None:
    path = tmp_path / "made" / "log.jsonl"
    sink, _ = open_log(path, save_every=3)
    counts = []
    for record in [
        {"type": "start"},
        {"n": 1},
        {"n": 2},
        {"n": 3},
        {"n": 4},
        {"type": "event"},
        {"n": 5},
        {"type": "end"},
    ]:
        sink.write(record)
        counts.append((len(read_lines(path)), sink.unsaved()))
    assert counts == [(1, 0), (1, 1), (1, 2), (4, 0), (4, 1), (6, 0), (6, 1), (8, 0)]
    sink.write({"n": 6})
    sink.flush()
    assert read_lines(path)[-1] == {"n": 6}
    sink.close()


def test_log_is_appended_to_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":')
    sink, said = open_log(path)
    sink.write({"n": 2})
    sink.write({"n": 3})
    sink.close()
    assert path.read_bytes() == b'{"n":1}\n{"n":\n{"n":2}\n{"n":3}\n'
    assert said == []


@pytest.mark.parametrize("how", ["file", "folder", "moved", "replaced"])
def test_log_deleted_underneath_is_begun_again(tmp_path: Path, how: str) -> None:
    path = tmp_path / "out" / "log.jsonl"
    sink, said = open_log(path)
    start = {"type": "start", "schema": 1}
    sink.write(start)
    for turn in range(2):
        sink.write({"n": turn})
        if how == "moved":
            path.rename(tmp_path / f"{turn}.jsonl")
        else:
            path.unlink()
        if how == "folder":
            path.parent.rmdir()
        if how == "replaced":
            path.write_text("")
    sink.write({"n": 2})
    sink.write({"n": 3})
    sink.close()
    assert read_lines(path) == [start, {"n": 2}, {"n": 3}]
    assert said == [f"{path} was deleted or moved while the monitor wrote to it: begun again"]


@pytest.mark.parametrize("how", ["folder", "link to a file", "link to a device", "link to itself"])
def test_a_log_replaced_by_something_else_is_given_up_at_close(tmp_path: Path, how: str) -> None:
    """Nothing is written behind a link that was put there, and close does not wait for it to change."""
    path, other = tmp_path / "log.jsonl", tmp_path / "other.jsonl"
    other.write_text("mine")
    said: list[str] = []
    box = Outbox([JsonlSink(path, save_every=1)], said.append)
    box.put({"n": 1})
    assert box.flush()
    path.unlink()
    if how == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link to a file": other, "link to a device": "/dev/full", "link to itself": path}[how])
    box.put({"n": 2})
    assert not box.close(3600.0)  # a test that waited for it would never end
    assert other.read_text() == "mine"
    assert said[0] == f"{path} was deleted or moved while the monitor wrote to it: begun again"
    assert said[-1] == "sink jsonl: 1 records were not written"


def test_log_with_a_line_torn_by_an_error_is_written_whole_into_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    sink, _ = open_log(path)
    room = Disk(monkeypatch, room=4)
    record = {"n": 1}
    with pytest.raises(OSError, match=r"No space left.*log\.jsonl"):
        sink.write(record)
    assert path.read_bytes() == b'{"n"'
    path.unlink()
    room.room = 1000
    sink.write(record)
    sink.close()
    assert read_lines(path) == [record]


class Disk:
    """A disk with room for so many bytes, by way of os.write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int, piece: int = 1 << 20) -> None:
        self.room = room
        self.calls = 0
        write = os.write

        def limited(fd: int, data: Any) -> int:
            self.calls += 1
            if self.room == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            count = write(fd, bytes(data)[: min(self.room, piece)])
            self.room -= count
            return count

        monkeypatch.setattr(os, "write", limited)


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, _ = open_log(tmp_path / "log.jsonl", save_every=5)
    Disk(monkeypatch, room=10_000, piece=3)
    records = [{"n": n, "text": "x" * n} for n in range(20)]
    for record in records:
        sink.write(record)
    sink.close()
    assert read_lines(tmp_path / "log.jsonl") == records


def test_full_disk_keeps_the_records_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    said: list[str] = []
    disk = Disk(monkeypatch, room=100)  # in the middle of a line
    outbox = quick(JsonlSink(path, 4), say=said.append)
    records = [{"n": n} for n in range(50)]
    for record in records:
        outbox.put(record)
    wait_until(lambda: disk.calls > 5 + ATTEMPTS)  # more attempts than another sink's record gets
    assert not outbox.flush(timeout_s=0.01)
    assert path.stat().st_size == 100
    disk.room = 1 << 20
    assert outbox.flush(60)
    assert outbox.close(60)
    assert read_lines(path) == records
    assert said == [
        f"sink jsonl: OSError: [Errno 28] No space left on device: '{path}'; training goes on, up to 10000 records "
        "are kept and tried again",
        "sink jsonl works again, 0 records lost",
    ]


def test_full_disk_drops_the_oldest_records_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    said: list[str] = []
    disk = Disk(monkeypatch, room=0)
    outbox = quick(JsonlSink(path, 1), say=said.append, limit=10)
    outbox.put({"n": 0})
    wait_until(lambda: bool(said))
    for n in range(1, 31):
        outbox.put({"n": n})
    disk.room = 1 << 20
    assert outbox.flush(60)
    assert not outbox.close(60)
    assert read_lines(path) == [{"n": n} for n in [0, *range(21, 31)]]
    assert said[1:] == ["sink jsonl works again, 20 records lost"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_real_full_device(tmp_path: Path) -> None:
    said: list[str] = []
    outbox = quick(*make_sinks(Settings(sinks=(), save_every=2), tmp_path, "/dev/full"), say=said.append)
    for n in range(5):
        outbox.put({"n": n})
    wait_until(lambda: bool(said))
    assert not outbox.close(timeout_s=0.2)
    assert said == [
        "sink jsonl: OSError: [Errno 28] No space left on device: '/dev/full'; training goes on, up to 10000 records "
        "are kept and tried again",
        "sink jsonl: 5 records were not written",
    ]


LIMITED = """
import json, resource, sys, time
from flopcalc.monitor.sinks import JsonlSink, Outbox

said = []
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
outbox = Outbox([JsonlSink(sys.argv[1], 4)], said.append, poll_s=0.005, retry_s=1e-5)
for n in range(50):
    outbox.put({"n": n})
while not said:
    time.sleep(0.002)
written = outbox.flush(0.05)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(json.dumps([written, outbox.close(60), len(said)]))
"""


def test_real_limit_that_tears_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    result = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, timeout=120)
    assert (result.stderr, json.loads(result.stdout)) == ("", [False, True, 2])
    assert read_lines(path) == [{"n": n} for n in range(50)]


KILLED = """
import sys, time
from flopcalc.monitor.sinks import JsonlSink, Outbox

outbox = Outbox([JsonlSink(sys.argv[1], 10)], print, poll_s=0.005)
outbox.put({"type": "start"})
for n in range(25):
    outbox.put({"n": n})
time.sleep(600)
"""


def test_killed_process_leaves_a_log_up_to_the_last_save(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)])
    try:
        wait_until(lambda: path.exists() and len(path.read_bytes().splitlines()) >= 21)
    finally:
        process.kill()
        process.wait()
    assert read_lines(path) == [{"type": "start"}, *({"n": n} for n in range(20))]


# --- the services, read back with their own libraries -----------------------------------------------------------------
@pytest.fixture
def wandb_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    import wandb

    yield tmp_path
    wandb.finish()
    wandb.teardown()


def read_wandb(folder: Path) -> tuple[list[Json], dict[str, str]]:
    """The history of the only run below a folder, and the x-axis of its metrics."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # waits for the process that writes the file
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data = path.read_bytes()
    history, axes = [], {}
    at, parts = 7, b""  # after the header: blocks of 32 KiB, of pieces with checksum, size and kind, as LevelDB's log
    while at + 7 <= len(data):
        rest = 32768 - at % 32768
        if rest < 7:
            at += rest
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last piece
            entry = wandb_internal_pb2.Record.FromString(parts)
            parts = b""
            if entry.WhichOneof("record_type") == "history":
                items = {"/".join(item.nested_key) or item.key: item.value_json for item in entry.history.item}
                history.append({key: json.loads(value) for key, value in items.items() if not key.startswith("_")})
            elif entry.WhichOneof("record_type") == "metric":
                axes[entry.metric.name] = entry.metric.step_metric
    return history, axes


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"global_step": 3, **SENT}),
        ({"wandb_reduced_logging": True}, {"global_step": 3, "perf/mfu": 0.5, "training/loss": 2.5}),
        (
            {"wandb_log_dataset_metrics": False},
            {"global_step": 3, **{key: value for key, value in SENT.items() if not key.startswith("dataset")}},
        ),
        (
            {"key_style": "hf", "wandb_reduced_logging": True},
            {"train/global_step": 3, "perf/mfu": 0.5, "train/loss": 2.5},
        ),
    ],
)
def test_wandb_run_of_our_own(wandb_home: Path, settings: Json, expected: Json) -> None:
    import wandb

    chosen = Settings(sinks=("wandb",), wandb_project="p", wandb_mode="offline", **settings)
    outbox = quick(*make_sinks(chosen, wandb_home), say=refuse)
    outbox.put({"type": "start"})
    outbox.put(STEP)
    assert outbox.close(60)
    assert wandb.run is None
    history, axes = read_wandb(wandb_home)
    assert history == [expected]
    axis = "train/global_step" if "train/global_step" in expected else "global_step"
    assert axes == {key: "" if key == axis else axis for key in expected}


@pytest.mark.parametrize("chosen", [None, ("wandb",)])
def test_wandb_run_of_the_user_is_used_and_left_open(wandb_home: Path, chosen: tuple[str, ...] | None) -> None:
    import wandb

    run = wandb.init(project="mine")
    outbox = quick(*make_sinks(Settings(sinks=chosen), wandb_home), say=refuse)
    outbox.put({"global_step": 1, "perf/mfu": 0.25})
    outbox.put({"global_step": 2, "perf/mfu": 0.5}, skip={"wandb"})
    outbox.put({"global_step": 3, "dataset/*/loss": 0.75})
    assert outbox.close(60)
    assert wandb.run is run
    run.log({"own": 1})
    run.finish()
    assert read_wandb(wandb_home)[0] == [
        {"global_step": 1, "perf/mfu": 0.25},
        {"global_step": 3, "dataset/*/loss": 0.75},
        {"own": 1},
    ]


def test_wandb_run_that_the_user_finished(wandb_home: Path) -> None:
    import wandb

    said: list[str] = []
    run = wandb.init(project="mine")
    outbox = quick(*make_sinks(Settings(sinks=("wandb",)), wandb_home), say=said.append)
    outbox.put({"global_step": 1})
    assert outbox.flush(60)
    run.finish()
    for step in (2, 3):
        outbox.put({"global_step": step})
    assert outbox.close(60)
    assert read_wandb(wandb_home)[0] == [{"global_step": 1}]
    assert said == ["the W&B run was finished before the monitor was closed: it does not get the later records"]


def test_wandb_that_is_off_and_wandb_that_nobody_asked_for(wandb_home: Path) -> None:
    outbox = quick(*make_sinks(Settings(sinks=("wandb",), wandb_mode="disabled"), wandb_home), say=refuse)
    outbox.put(STEP)
    assert outbox.close(60)
    outbox = quick(*make_sinks(Settings(), wandb_home / "other"), say=refuse)
    outbox.put(STEP)
    assert outbox.close(60)
    assert [path.name for path in (wandb_home / "other").iterdir()] == ["flopcalc.jsonl"]
    assert not list(wandb_home.glob("wandb/*run-*"))


@pytest.mark.parametrize(("style", "mfu"), [("flopcalc", "perf/mfu"), ("composer", "throughput/device/mfu")])
def test_tensorboard(tmp_path: Path, style: str, mfu: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = Settings(sinks=("tensorboard",), tensorboard_dir=str(tmp_path / "board"), key_style=style)
    outbox = quick(*make_sinks(settings, tmp_path), say=refuse)
    outbox.put({"type": "start"})
    outbox.put(STEP)
    outbox.put({**STEP, "global_step": 4, "perf/mfu": NAN, "perf/hfu": np.float32(0.25)})
    assert outbox.flush(60)
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert len(events.Tags()["scalars"]) == len(SENT)
    assert [(event.step, event.value, event.wall_time) for event in events.Scalars(mfu)] == [(3, 0.5, STEP["time"])]
    assert [(event.step, event.value) for event in events.Scalars("perf/hfu")] == [(3, 0.75), (4, 0.25)]
    assert outbox.close(60)


def test_tensorboard_x_serves_where_torch_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import tensorboard

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", tensorboard)
    outbox = quick(*make_sinks(Settings(sinks=("tensorboard",)), tmp_path), say=refuse)
    outbox.put(STEP)
    assert outbox.close(60)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the only store of mlflow-skinny without a server
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    uri = (tmp_path / "store").as_uri()
    before = mlflow.get_tracking_uri()
    yield uri
    mlflow.end_run()
    mlflow.set_tracking_uri(before)


def test_mlflow_run_of_our_own(tmp_path: Path, mlflow_store: str) -> None:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=mlflow_store)
    for style, mfu in (("flopcalc", "perf/mfu_percent"), ("torchtitan", "mfu_")):
        settings = Settings(
            sinks=("mlflow",), mlflow_tracking_uri=mlflow_store, mlflow_experiment="exp", key_style=style
        )
        outbox = quick(*make_sinks(settings, tmp_path), say=refuse)
        outbox.put({"type": "start"})
        outbox.put(STEP)
        outbox.put({"global_step": 4, "time": 1_700_000_001.0, "perf/mfu_percent": 25, "dataset/a//../b?/loss": 1.5})
        assert outbox.close(60)
        experiment = client.get_experiment_by_name("exp")
        assert experiment is not None
        run = client.search_runs([experiment.experiment_id])[0]
        assert run.info.status == "FINISHED"
        assert set(run.data.metrics.values()) == {*SENT.values(), 25.0, 1.5}
        history = client.get_metric_history(run.info.run_id, mfu)
        assert [(entry.step, entry.value, entry.timestamp) for entry in history] == [(4, 25.0, 1_700_000_001_000)]
        assert run.data.metrics["dataset/a/b_/loss"] == 1.5
        assert run.data.metrics["perf/model_flops"] == 2.0**64


def test_mlflow_run_of_the_user_is_used_and_left_open(tmp_path: Path, mlflow_store: str) -> None:
    import mlflow

    mlflow.set_tracking_uri(mlflow_store)
    outbox = quick(*make_sinks(Settings(sinks=("mlflow",), mlflow_experiment="other"), tmp_path), say=refuse)
    with mlflow.start_run() as run:  # after the monitor was made, before its first record
        outbox.put(STEP)
        assert outbox.close(60)
        assert mlflow.active_run() is run
        client = mlflow.MlflowClient()
        found = client.get_run(run.info.run_id)
        assert (found.info.status, found.data.metrics) == ("RUNNING", SENT)
        assert client.get_experiment_by_name("other") is None


# --- which sinks ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("chosen", "log_file", "names"),
    [
        (None, None, ["jsonl", "wandb"]),
        ((), None, []),
        ((), "own.jsonl", ["jsonl"]),
        (("wandb",), "own.jsonl", ["jsonl", "wandb"]),
        (("mlflow", "jsonl", "tensorboard"), "own.jsonl", ["mlflow", "jsonl", "tensorboard"]),
    ],
)
def test_which_sinks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chosen: tuple[str, ...] | None,
    log_file: str | None,
    names: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_sinks(Settings(sinks=chosen), "out", log_file)
    assert [sink.name for sink in made] == names
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # paths hold from where they were given
    outbox = quick(*(sink for sink in made if sink.name == "jsonl"), say=refuse)
    outbox.put({"n": 1})
    assert outbox.close(60)
    if "jsonl" in names:
        assert read_lines(tmp_path / (log_file or "out/flopcalc.jsonl")) == [{"n": 1}]


@pytest.mark.parametrize(
    ("name", "module", "install"),
    [
        ("wandb", "wandb", "pip install wandb"),
        ("tensorboard", "tensorboardX", "pip install tensorboard"),
        ("mlflow", "mlflow", "pip install mlflow"),
    ],
)
def test_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, install: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said: list[str] = []
    other = Collect()
    outbox = quick(other, *make_sinks(Settings(sinks=(name,)), tmp_path), say=said.append)
    for step in range(10):
        outbox.put({"global_step": step})
    assert outbox.flush(60)
    outbox.put({"global_step": 10})
    assert outbox.close(60)
    assert len(other.records) == 11
    (message,) = said
    assert message.startswith(f"sink {name} is left out: ")
    assert module in message
    assert message.endswith(install)


def test_importing_sinks_imports_no_library() -> None:
    code = "import sys, flopcalc.monitor.sinks; print({'torch', 'numpy', 'wandb', 'mlflow'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# --- the outbox -------------------------------------------------------------------------------------------------------
def test_every_sink_gets_every_record_in_order() -> None:
    first, second = Collect("first"), Collect("second")
    log = Collect("log")
    log.steps_only = False
    outbox = quick(first, second, log, say=refuse)
    records: list[Json] = [{"type": "start"}, *({"type": "step", "n": n} for n in range(1200)), {"type": "end"}]
    for record in records:
        outbox.put(record, skip={"second"} if record.get("n") == 7 else ())
    assert outbox.flush(60)
    assert outbox.close(60)
    assert first.records == records[1:-1]
    assert second.records == [record for record in records[1:-1] if record["n"] != 7]
    assert log.records == records
    assert first.calls == ["open", "flush", "flush", "close"]


def test_a_record_wakes_nobody_but_a_long_queue_does() -> None:
    sink = Collect()
    outbox = Outbox([sink], refuse, poll_s=3600)
    for n in range(LONG_QUEUE - 1):
        outbox.put({"n": n})
    assert sink.records == []
    outbox.put({"n": -1})
    wait_until(lambda: len(sink.records) == LONG_QUEUE)
    outbox.put({"n": -2})
    assert outbox.flush(60)
    assert len(sink.records) == LONG_QUEUE + 1
    assert outbox.close(60)


def test_nothing_is_opened_without_a_record() -> None:
    sink = Collect()
    outbox = quick(sink, say=refuse)
    outbox.put({"type": "start"})
    assert outbox.flush(60)
    assert outbox.close(60)
    assert sink.calls == []


class Failing:
    """Raises so often, then no more; -1: for ever."""

    def __init__(self, times: int, error: BaseException) -> None:
        self.left = times
        self.error = error

    def __call__(self, _record: Record) -> None:
        if self.left:
            self.left -= 1
            raise self.error


@pytest.mark.parametrize(("times", "lost"), [(1, 0), (ATTEMPTS - 1, 0), (ATTEMPTS, 1), (3 * ATTEMPTS + 1, 3)])
@pytest.mark.parametrize("error", [ConnectionError("down"), SystemExit("down")])
def test_sink_that_fails_for_a_while(times: int, lost: int, error: BaseException) -> None:
    said: list[str] = []
    sink = Collect(trouble=Failing(times, error))
    outbox = quick(sink, say=said.append)
    records = [{"n": n} for n in range(20)]
    for record in records:
        outbox.put(record)
    assert outbox.flush(60)
    assert outbox.close(60) is (lost == 0)
    assert sink.records == records[lost:]
    assert said == [
        f"sink collect: {type(error).__name__}: down; training goes on, up to 10000 records are kept and tried again",
        f"sink collect works again, {lost} records lost",
    ]


def test_sink_that_refuses_one_record_and_later_another() -> None:
    said: list[str] = []

    def refuse_some(record: Record) -> None:
        if record["n"] in (3, 7):
            raise ValueError("bad key")

    sink = Collect(trouble=refuse_some)
    outbox = quick(sink, say=said.append)
    for n in range(5):
        outbox.put({"n": n})
    assert outbox.flush(60)
    for n in range(5, 10):
        outbox.put({"n": n})
    assert not outbox.close(60)
    assert [record["n"] for record in sink.records] == [0, 1, 2, 4, 5, 6, 8, 9]
    assert said[1:] == ["sink collect works again, 1 records lost", "sink collect: 2 records were not written"]


def test_sink_that_never_works_is_not_said_to_work_again() -> None:
    said: list[str] = []
    outbox = quick(Collect(trouble=Failing(-1, ConnectionError("down"))), say=said.append)
    for n in range(3):
        outbox.put({"n": n})
        assert outbox.flush(60)  # given up
    assert outbox.flush(60)
    assert not outbox.close(60)
    assert said[1:] == ["sink collect: 3 records were not written"]


def test_the_same_record_twice(tmp_path: Path) -> None:
    outbox = quick(JsonlSink(tmp_path / "log.jsonl", 1), say=refuse)
    record = {"n": 1}
    outbox.put(record)
    outbox.put(record)
    assert outbox.close(60)
    assert read_lines(tmp_path / "log.jsonl") == [record, record]


def test_sink_that_cannot_be_opened_at_first_or_flushed_or_closed() -> None:
    said: list[str] = []
    fail_open, fail_flush = Failing(2, OSError("no route")), Failing(2, OSError("no route"))

    class Stubborn(Collect):
        def open(self, say: Say) -> None:
            fail_open({})
            super().open(say)

        def flush(self) -> None:
            fail_flush({})
            super().flush()

        def close(self) -> None:
            raise OSError("still no route")

    sink = Stubborn()
    outbox = quick(sink, say=said.append)
    outbox.put({"n": 1})
    assert outbox.flush(60)
    assert outbox.close(60)
    assert (sink.records, sink.calls) == ([{"n": 1}], ["open", "flush", "flush"])
    assert said[1:] == [
        "sink collect works again, 0 records lost",
        "sink collect did not close: OSError: still no route",
    ]


def test_sink_that_hangs_loses_its_oldest_records_and_is_left_behind() -> None:
    said: list[str] = []
    entered, free = threading.Event(), threading.Event()

    def hang(_record: Record) -> None:
        entered.set()
        assert free.wait(60)

    stuck, other = Collect("stuck", hang), Collect("other")
    outbox = Outbox([stuck, other], said.append, limit=100, poll_s=0.005)
    outbox.put({"n": 0})
    assert entered.wait(60)
    for n in range(1, 301):
        outbox.put({"n": n})
        if n % 50 == 0:
            wait_until(lambda n=n: len(other.records) == n + 1)  # type: ignore[misc]
    assert not outbox.flush(timeout_s=0.01)
    assert not outbox.close(timeout_s=0.05)
    assert [record["n"] for record in other.records] == list(range(301))
    assert said == [
        "sink stuck does not keep up: 100 records wait for it, and the oldest are dropped",
        "sink stuck: 301 records were not written",
    ]
    free.set()  # it wakes up, too late, and its thread ends
    wait_until(lambda: "close" in stuck.calls)
    assert stuck.records == [{"n": 0}]


def test_sink_that_hung_and_goes_on() -> None:
    said: list[str] = []
    entered, free = threading.Event(), threading.Event()

    def hang(_record: Record) -> None:
        entered.set()
        assert free.wait(60)

    sink = Collect(trouble=hang)
    outbox = quick(sink, say=said.append, limit=10)
    outbox.put({"n": 0})
    assert entered.wait(60)
    for n in range(1, 31):
        outbox.put({"n": n})
    free.set()
    assert outbox.flush(60)
    outbox.close(60)
    assert [record["n"] for record in sink.records] == [0, *range(21, 31)]
    assert said[1:] == ["sink collect works again, 20 records lost"]


def test_close_that_hangs_is_left_behind() -> None:
    free = threading.Event()
    sink = Collect()
    sink.close = lambda: refuse("never freed") if not free.wait(60) else None  # type: ignore[method-assign]
    outbox = quick(sink, say=refuse)
    outbox.put({"n": 1})
    assert outbox.flush(60)
    assert not outbox.close(timeout_s=0.05)
    assert sink.records == [{"n": 1}]
    free.set()


def test_after_close_nothing_happens() -> None:
    sink = Collect()
    outbox = quick(sink, say=refuse)
    outbox.put({"n": 1})
    assert outbox.close(60)
    outbox.put({"n": 2})
    assert outbox.flush(60)
    assert outbox.close(60)
    assert sink.records == [{"n": 1}]
    assert sink.calls == ["open", "flush", "close"]


def test_say_may_raise_and_may_put() -> None:
    sink = Collect(trouble=Failing(2, ValueError("no")))
    log = Collect("log")
    log.steps_only = False

    def say(message: str) -> None:  # as a monitor does: an event for the log, then a warning, here an error
        outbox.put({"type": "event", "message": message})
        raise RuntimeWarning(message)

    outbox = quick(sink, log, say=say)
    outbox.put({"n": 1})
    assert outbox.flush(60)
    assert outbox.flush(60)
    assert outbox.close(60)
    assert sink.records == [{"n": 1}]
    assert [record.get("type") for record in log.records] == [None, "event", "event"]


def test_signal_handler_inside_put() -> None:
    sink = Collect()
    outbox = quick(sink, say=refuse)
    (queue,) = outbox._queues
    with queue._lock:  # a handler runs in the thread that it interrupts
        outbox.put({"n": 1})
        assert outbox.flush(60)
    assert sink.records == [{"n": 1}]
    assert outbox.close(60)


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    said: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", start)
    outbox = quick(Collect(), say=said.append)
    outbox.put({"n": 1})
    assert outbox.flush(60)
    assert outbox.close(60)
    assert said == ["sink collect is left out: can't start new thread"]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # Python 3.12: there are threads, as meant
def test_forked_child_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    outbox = quick(JsonlSink(path, 100), say=refuse)
    outbox.put({"n": 1})
    assert outbox.flush(60)
    outbox.put({"n": 2})
    child = os.fork()
    if child == 0:  # neither an assertion nor pytest's own ending may run here
        signal.alarm(60)
        outbox.put({"n": 3})
        os._exit(0 if outbox.flush() and outbox.close() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert outbox.close(60)
    assert read_lines(path) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda outbox: pickle.loads(pickle.dumps(outbox))])
def test_a_copy_is_inert(copied: Callable[[Outbox], Outbox]) -> None:
    sink = Collect()
    outbox = quick(sink, say=refuse)
    other = copied(outbox)
    other.put({"n": 1})
    assert other.flush()
    assert other.close()
    outbox.put({"n": 2})
    assert outbox.close(60)
    assert sink.records == [{"n": 2}]
