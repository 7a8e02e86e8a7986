"""Values that lie on a device: copied behind its own work, read when it has come so far, and never waited for."""

from __future__ import annotations

import gc
import math
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from loop import Clock
from tiny import CONFIG, read_log

from flopcalc import bind, estimate_flops
from flopcalc.monitor import TrainingMonitor, training, values
from flopcalc.monitor.device import DeviceQueue

PRESET = "llama-3.1-8b"
LAST = values._WATCHED  # the last step whose mask and loss are copied at once


class Gpu:
    """A stream whose work is done when the test says so, and the part of torch that reaches it."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.is_capturing = False
        self.is_quick = False  # what is queued is done when it is asked the second time
        self.is_taken_back = False  # the memory of losses, by a graph of a compiled model
        self.now_ms = 0.0  # the device's own clock
        self.copies = self.marks = self.questions = 0
        self.Tensor = OnDevice
        self.blocks: list[tuple[int, int]] = []  # of pinned memory
        self.side = Side()
        self._worker = ThreadPoolExecutor(1)
        self._current = threading.local()  # stream of a thread
        self.cuda = types.SimpleNamespace(
            is_current_stream_capturing=lambda: self.is_capturing,
            current_device=lambda: -1,
            current_stream=self.find_stream,
            Event=lambda enable_timing: Event(self, enable_timing),
            Stream=lambda: self.side,
            set_device=lambda _: None,
            set_stream=lambda stream: setattr(self._current, "stream", stream),
            synchronize=self.run,
            stream=lambda _: nullcontext(),
        )
        self.inference_mode = torch.inference_mode

    def find_stream(self) -> Gpu | Side:
        found: Gpu | Side = getattr(self._current, "stream", self)
        return found

    def work(self, monitor: TrainingMonitor) -> None:
        """What the monitor's worker does every now and then, on a thread of its own."""
        for part in (monitor._values.copy_handed, monitor._values.take_in):
            self._worker.submit(part).result()
        monitor._digester.digest()

    def close(self) -> None:
        self._worker.shutdown()

    def empty(self, size: tuple[int, int], dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        self.blocks.append(size)
        made = torch.full(size, 77).to(dtype).as_subclass(Pinned)  # nobody may read this
        made.gpu = self
        return made

    def _foreach_copy_(self, copies: list[Pinned], sources: list[torch.Tensor], non_blocking: bool) -> None:
        for copy, source in zip(copies, sources, strict=True):
            copy.copy_(source, non_blocking)

    def query(self) -> bool:
        assert not self.is_capturing
        self.questions += 1
        is_idle = not self.queue
        if self.is_quick:
            self.run()
        return is_idle

    def run(self, count: int | None = None) -> None:
        """The device does what is queued, or so much of it, and what does not wait for the rest on the other stream."""
        for _ in range(len(self.queue) if count is None else count):
            self.queue.pop(0)()
        side = self.side.queue
        while side and (not isinstance(side[0], Event) or side[0].at_ms is not None):
            each = side.pop(0)
            each() if not isinstance(each, Event) else None


class Side:
    """The stream of the worker: copies there read what the loop may have written meanwhile."""

    device = -1

    def __init__(self) -> None:
        self.queue: list[Callable[[], None] | Event] = []

    def wait_event(self, event: Event) -> None:
        self.queue.append(event)


class Event:
    """As torch.cuda.Event."""

    def __init__(self, gpu: Gpu, enable_timing: bool) -> None:
        assert enable_timing
        self._gpu = gpu
        self._is_recorded = False
        self.at_ms: float | None = None

    def record(self, stream: Gpu | Side) -> None:
        assert stream is self._gpu.find_stream()
        if isinstance(stream, Gpu):
            assert not stream.is_capturing
            stream.marks += 1
        self.at_ms, self._is_recorded = None, True

        def pass_by() -> None:
            self.at_ms = self._gpu.now_ms

        stream.queue.append(pass_by)

    def query(self) -> bool:
        assert not self._gpu.is_capturing
        assert self._gpu.find_stream() is self._gpu
        self._gpu.questions += 1
        has_passed = self.at_ms is not None or not self._is_recorded
        if self._gpu.is_quick:
            self._gpu.run()
        return has_passed

    def elapsed_time(self, end: Event) -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


class Pinned(torch.Tensor):
    """A host buffer that the device writes into later."""

    gpu: Gpu

    def unbind(self, dim: int = 0) -> tuple[Pinned, ...]:  # type: ignore[override]
        parts = super().unbind(dim)
        for part in parts:
            part.gpu = self.gpu
        return parts

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Pinned:  # type: ignore[override]
        assert non_blocking
        stream = self.gpu.find_stream()
        assert stream is self.gpu.side or not self.gpu.is_capturing
        if self.gpu.is_taken_back and not source.ndim:
            raise RuntimeError("accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run")
        self.gpu.copies += 1
        value = source.as_subclass(torch.Tensor)
        if stream is self.gpu:
            value = value.clone()  # later writes of the loop are queued behind it

        def arrive() -> None:
            torch.Tensor.copy_(self.as_subclass(torch.Tensor), value)

        stream.queue.append(arrive)
        return self


class OnDevice(torch.Tensor):
    """A tensor of the device: whoever reads it waits."""

    is_cuda, is_cpu = True, False

    def _wait(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("this waits for the device")

    item = tolist = cpu = numpy = to = __float__ = __int__ = __bool__ = _wait  # type: ignore[assignment]


class Echo(torch.nn.Module):
    """Stands for a model; what is counted is a preset."""

    def forward(self, **kwargs: Any) -> Any:
        return kwargs


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu()
    monkeypatch.setattr(training, "find_device", lambda: DeviceQueue(gpu))
    monkeypatch.setattr(TrainingMonitor, "_start_worker", lambda _: None)  # it works when a test says so
    yield gpu
    gpu.close()


def put(value: Any) -> torch.Tensor:
    return torch.as_tensor(value).as_subclass(OnDevice)


def make_batch(*lengths: int, seq: int = 16) -> dict[str, torch.Tensor]:
    mask = (torch.arange(seq) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": put(torch.ones_like(mask)), "attention_mask": put(mask)}


def count(*lengths: int) -> int:
    return int(estimate_flops(PRESET, lengths=list(lengths)).total)


def watch(folder: Path, **changes: Any) -> tuple[TrainingMonitor, Echo]:
    module = Echo()
    monitor = TrainingMonitor(folder, {"monitoring": {**CONFIG["monitoring"], **changes}}, model=bind(PRESET))
    monitor.attach(module)
    return monitor, module


def read_steps(folder: Path) -> list[dict[str, Any]]:
    return read_log(folder / "flopcalc.jsonl")


def test_masks_and_losses_arrive_when_the_device_has_come_so_far(tmp_path: Path, clock: Clock, gpu: Gpu) -> None:
    monitor, module = watch(tmp_path)
    for number, lengths in enumerate([(16, 5), (3, 9)], 1):
        module(**make_batch(*lengths))
        clock.tick(1)
        monitor.log_step(number, 0, put(number / 4), None, 0.1)
    assert math.isnan(monitor.metrics()["global_step"])  # asked, and not waited for
    gpu.run(4)  # the first step: its mark, its mask, its loss, and its end
    found = monitor.metrics()
    assert (found["global_step"], found["training/loss"], found["perf/model_flops"]) == (1, 0.25, count(16, 5))
    gpu.run()
    found = monitor.metrics()
    assert (found["global_step"], found["training/loss"], found["perf/model_flops"]) == (2, 0.5, count(3, 9))
    monitor.close()
    assert [record["perf/tokens_per_second"] for record in read_steps(tmp_path)] == [21, 12]


def test_an_idle_device_is_done_with_steps_that_were_not_marked(tmp_path: Path, clock: Clock, gpu: Gpu) -> None:
    monitor, module = watch(tmp_path)
    for number in range(1, 5):
        module(**make_batch(number))
        clock.tick(0.1)
        monitor.log_step(number, 0, 0.5, None, 0.1)
        gpu.run()  # as a loop that reads its loss
        assert monitor.metrics()["perf/model_flops"] == count(number)
    assert gpu.marks == 2  # around the first step; the others are within four seconds of it
    monitor.close()


def test_the_worker_copies_what_is_held_and_marks_come_every_eight_seconds(
    tmp_path: Path, clock: Clock, gpu: Gpu
) -> None:
    monitor, module = watch(tmp_path, detail_every=20)
    by_worker = []
    for number in range(1, 81):
        before = (gpu.copies, gpu.questions)
        module(**make_batch(7, seq=8 + number % 8))  # padded to another length each time
        gpu.now_ms += 30
        clock.tick(0.25)
        monitor.log_step(number, 0, put(1.0), None, 0.1)
        assert gpu.copies - before[0] == (2 if number <= LAST else 0)  # from then on masks and losses are held
        assert gpu.questions - before[1] <= 2
        if number % 4 == 0:
            gpu.run()
            before = (gpu.copies, gpu.questions)
            gpu.work(monitor)
            assert gpu.questions == before[1]
            by_worker.append(gpu.copies - before[0])
    assert by_worker == [0] * 8 + [2] + [0] * 7 + [64, 0, 0, 0]  # after steps 33 and 65, which are marked
    assert gpu.marks == 2 * 3
    assert gpu.blocks == [(64, 16), (64, 1), (64, 8)]  # masks, losses, shorter masks
    monitor.metrics()
    gpu.run()
    monitor.close()
    records = read_steps(tmp_path)
    assert [record["perf/model_flops"] for record in records if "perf/model_flops" in record] == [count(7)] * 4
    assert [record["training/loss"] for record in records] == [1.0] * 80


@pytest.mark.parametrize("comes", [True, False])
def test_between_marks_many_values_are_handed_over(tmp_path: Path, clock: Clock, gpu: Gpu, comes: bool) -> None:
    """A worker that does not come to it leaves the copies to the training thread."""
    monitor, module = watch(tmp_path)
    copied = []
    for number in range(1, 161):
        before = gpu.copies
        module(**make_batch(number % 16 + 1))
        clock.tick(0.01)
        monitor.log_step(number, 0, put(float(number)), put(0.5), 0.1)
        if gpu.copies > before and number > LAST:
            copied.append(number)
        if comes:
            gpu.run()
            gpu.work(monitor)
        assert len(monitor._values.handed) <= 4
    monitor.metrics()
    gpu.run()
    monitor.close()
    assert copied == ([] if comes else [129])
    found = [(record["training/loss"], record["perf/model_flops"]) for record in read_steps(tmp_path)]
    assert found == [(number, count(number % 16 + 1)) for number in range(1, 161)]


def test_new_memory_is_asked_for_on_the_training_thread(tmp_path: Path, clock: Clock, gpu: Gpu) -> None:
    monitor, module = watch(tmp_path)
    for number in range(1, LAST + 4):
        module(**make_batch(7, seq=16 if number <= LAST else 40))
        clock.tick(0.1 if number <= LAST else 9)  # then each is marked
        before = len(gpu.blocks)
        monitor.log_step(number, 0, 0.5, None, 0.1)
        assert len(gpu.blocks) - before == (number == LAST + 3)
        gpu.run()
        before = len(gpu.blocks)
        gpu.work(monitor)
        assert len(gpu.blocks) == before
    assert gpu.copies == LAST + 3
    monitor.metrics()
    gpu.run()
    monitor.close()
    assert [record["perf/model_flops"] for record in read_steps(tmp_path)] == [count(7)] * (LAST + 3)


@pytest.mark.parametrize("is_written", [False, True])
def test_what_is_written_before_the_worker_has_copied_it_is_left_out(
    tmp_path: Path, clock: Clock, gpu: Gpu, is_written: bool
) -> None:
    monitor, module = watch(tmp_path)
    losses = []
    for number in range(1, LAST + 3):
        module(**make_batch(1))
        clock.tick(0.1 if number <= LAST else 6)
        losses.append(put(float(number)))
        monitor.log_step(number, 0, losses[-1], None, 0.1)  # the last is marked, and handed over
    gpu.work(monitor)
    if is_written:
        losses[-1].zero_()
    gpu.run()
    said = pytest.warns(RuntimeWarning, match="was overwritten .* value.clone") if is_written else nullcontext()
    with said:
        monitor.metrics()
        losses[-2].zero_()  # it has arrived
        monitor.close()
    found = [record["training/loss"] for record in read_steps(tmp_path)]
    assert found == [*range(1, LAST + 2), None if is_written else LAST + 2]


def test_the_worker_copies_while_a_graph_is_captured_and_is_not_asked(tmp_path: Path, clock: Clock, gpu: Gpu) -> None:
    monitor, module = watch(tmp_path)
    for number in range(1, LAST + 3):
        module(**make_batch(1))
        clock.tick(0.1 if number <= LAST else 6)
        monitor.log_step(number, 0, put(float(number)), None, 0.1)
    gpu.is_capturing = True
    before = gpu.copies
    gpu.work(monitor)
    assert gpu.copies == before + 4
    monitor.metrics()
    gpu.is_capturing = False
    gpu.run()
    assert monitor.metrics()["training/loss"] == LAST + 2
    monitor.close()


def test_a_worker_that_cannot_copy_leaves_values_out(
    tmp_path: Path, clock: Clock, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_event: Event) -> None:
        raise RuntimeError("CUDA error: unknown error")

    monitor, module = watch(tmp_path)
    monkeypatch.setattr(gpu.side, "wait_event", fail)
    for number in range(1, LAST + 14):
        clock.tick(0.1 if number <= LAST else 6)
        with pytest.warns(RuntimeWarning, match="was overwritten") if number == LAST + 3 else nullcontext():
            module(**make_batch(1))
            if number == LAST + 3:
                gpu.work(monitor)
            monitor.log_step(number, 0, put(float(number)), None, 0.1)
        gpu.run()
        if number == LAST + 2:
            with pytest.raises(RuntimeError, match="unknown error"):  # which becomes a message of the monitor
                gpu.work(monitor)
    gpu.is_quick = True
    monitor.close()
    found = [record["training/loss"] for record in read_steps(tmp_path)]
    assert found == [None if number == LAST + 1 else number for number in range(1, LAST + 14)]


@pytest.mark.heavy
def test_quick_steps_are_marked_by_their_number(tmp_path: Path, clock: Clock, gpu: Gpu) -> None:
    monitor, module = watch(tmp_path)
    for number in range(1, 193):
        module(**make_batch(16))
        clock.tick(0.001)
        monitor.log_step(number, 0, 0.5, None, 0.1)
        gpu.work(monitor)
    assert gpu.marks == 2 * 192 / 64 + 1  # and where 64 masks are held
    gpu.run()
    monitor.close()


def test_device_time_is_of_the_steps_that_were_marked(tmp_path: Path, clock: Clock, gpu: Gpu) -> None:
    monitor, module = watch(tmp_path)
    for number, device_ms in enumerate([250, 999, 500], 1):
        module(**make_batch(16))
        gpu.run()
        gpu.now_ms += device_ms
        clock.tick(0.5)
        monitor.log_step(number, 0, 0.5, None, 0.1)
        gpu.run()
        clock.tick(7 if number == 2 else 0)
    monitor.close()
    found = [(each["perf/device_step_time"], each["perf/device_mfu"]) for each in read_steps(tmp_path)]
    peak = CONFIG["monitoring"]["peak_flops_per_s"]
    assert found == [(0.25, count(16) / (0.25 * peak)), (None, None), (0.5, count(16) / (0.5 * peak))]


def test_what_the_loop_overwrites_is_what_it_was(tmp_path: Path, clock: Clock, gpu: Gpu) -> None:
    monitor, module = watch(tmp_path)
    batch, loss = make_batch(16), put(0.0)
    for number in range(1, 5):
        batch["attention_mask"].copy_(torch.arange(16) < number)
        loss.fill_(number)
        module(**batch)
        clock.tick(1)
        monitor.log_step(number, 0, loss, None, 0.1)
    batch["attention_mask"].zero_()
    loss.zero_()
    gpu.run()
    monitor.close()
    found = [(record["training/loss"], record["perf/model_flops"]) for record in read_steps(tmp_path)]
    assert found == [(number, count(number)) for number in range(1, 5)]


def test_a_graph_that_is_captured_is_left_alone(tmp_path: Path, clock: Clock, gpu: Gpu) -> None:
    monitor, module = watch(tmp_path)
    for number in range(1, 4):
        module(**make_batch(16))
        if number == 2:
            gpu.is_capturing = True
            module(**make_batch(5))
            monitor.metrics()
            gpu.is_capturing = False
        clock.tick(1)
        gpu.run()
        gpu.is_capturing = number == 3
        with pytest.warns(RuntimeWarning, match="a value on cpu is not read") if number == 3 else nullcontext():
            monitor.log_step(number, 0, put(0.5), None, 0.1)
        gpu.is_capturing = False
    gpu.run()
    monitor.close()
    found = [(record["training/loss"], record["perf/model_flops"]) for record in read_steps(tmp_path)]
    assert found == [(0.5, count(16)), (0.5, count(16)), (None, count(16))]


@pytest.mark.usefixtures("gpu")
def test_a_device_that_hangs_is_given_up(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_CLOSE_S", 0.05)
    monitor, module = watch(tmp_path)
    for number in (1, 2):
        module(**make_batch(16))
        clock.tick(1)
        monitor.log_step(number, 0, put(0.5), None, 0.1)
    monitor.close()
    for record in read_steps(tmp_path):
        assert record["training/loss"] is record["perf/model_flops"] is record["perf/device_step_time"] is None
        assert record["perf/step_time"] == 1


def test_late_values_wait_for_the_next_mark(tmp_path: Path, clock: Clock, gpu: Gpu) -> None:
    monitor, module = watch(tmp_path)
    for number in (1, 2):
        module(**make_batch(16))
        clock.tick(1)
        monitor.end_step(number)
        monitor.report(number, loss=put(number / 2))
    gpu.run(4)  # the first step with its marks and its mask, and its loss
    assert math.isnan(monitor.metrics()["global_step"])  # which nothing vouches for yet
    gpu.run()
    assert monitor.metrics()["training/loss"] == 1.0
    monitor.close()
    assert [record["training/loss"] for record in read_steps(tmp_path)] == [0.5, 1.0]


def test_a_buffer_made_in_inference_mode_is_used_again_outside() -> None:
    gpu = Gpu()
    device = DeviceQueue(gpu)
    with torch.inference_mode():
        held = device.fetch(torch.ones(3))
        gpu.run()
        device.give_back([held])
    again = device.fetch(torch.full((4,), 2.0))
    gpu.run()
    assert again is held
    assert again.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("shape", "dtype", "block"),
    [
        ((), torch.float32, (64, 1)),
        ((0,), torch.int64, (64, 2)),
        ((4, 2048), torch.int64, (64, 8192)),  # 4 MiB
        ((5, 2048), torch.int64, (32, 16384)),
        ((64, 16384), torch.int64, (1, 1 << 20)),
    ],
)
def test_pinned_memory_is_allocated_in_blocks(
    shape: tuple[int, ...], dtype: torch.dtype, block: tuple[int, int]
) -> None:
    gpu = Gpu()
    device = DeviceQueue(gpu)
    copies = [device.fetch(torch.full(shape, number, dtype=dtype)) for number in range(3)]
    gpu.run()
    assert [copy.tolist() for copy in copies] == [
        torch.full(shape, number, dtype=dtype).tolist() for number in range(3)
    ]
    assert set(gpu.blocks) == {block}
    assert len(gpu.blocks) == -(-3 // block[0])
    before = len(gpu.blocks)
    device.give_back(copies)
    device.fetch(torch.zeros(shape, dtype=dtype))
    assert len(gpu.blocks) == before


@pytest.mark.parametrize("way", ["log_step", "block", "report"])
def test_losses_that_the_loop_leaves_alone_are_copied_later(tmp_path: Path, clock: Clock, gpu: Gpu, way: str) -> None:
    monitor, module = watch(tmp_path)
    copied = []
    for number in range(1, LAST + 5):
        with monitor.step() if way == "block" else nullcontext() as step:
            module(**make_batch(1))
            clock.tick(0.1)
            before = gpu.copies
            loss, norm = put(number / 4), put(number / 8)
            if step is not None:
                step.log(loss=loss, grad_norm=norm, step=number)
            elif way == "report":
                monitor.end_step(number)
                monitor.report(number, loss=loss, grad_norm=norm)
            else:
                monitor.log_step(number, 0, loss, norm, 0.1)
        copied.append(gpu.copies - before)
        gpu.run()
    assert copied == [2] * LAST + [0] * 4
    assert monitor.metrics()["global_step"] == LAST  # the others are copied only now
    gpu.run()
    assert monitor.metrics()["training/loss"] == (LAST + 4) / 4
    monitor.close()
    found = [(record["training/loss"], record["training/grad_norm"]) for record in read_steps(tmp_path)]
    assert found == [(number / 4, number / 8) for number in range(1, LAST + 5)]


def test_an_idle_device_copies_what_is_held_for_whoever_asks(
    tmp_path: Path, clock: Clock, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a Trainer logs: it has read the loss, so the device is idle, and the rates are of this very step."""
    monkeypatch.setattr(values, "_COPY_S", 60.0)  # no matter how slow the host is
    monitor, module = watch(tmp_path)
    gpu.is_quick = True
    for number in range(1, LAST + 5):
        module(**make_batch(1))
        clock.tick(0.1)
        monitor.log_step(number, 0, put(number / 4), put(number / 8), 0.1)
        gpu.run()
        found = monitor.metrics()
        assert (found["global_step"], found["training/loss"], found["training/grad_norm"]) == (
            number,
            number / 4,
            number / 8,
        )
    monitor.close()


def write_again() -> Callable[[int], torch.Tensor]:
    loss = put(0.0)
    return lambda number: loss.fill_(number)


def replay() -> Callable[[int], torch.Tensor]:
    """The replay of a CUDA graph: autograd does not count its writes."""
    memory = torch.zeros(())

    def write(number: int) -> torch.Tensor:
        memory.data.fill_(number)
        return memory.detach().as_subclass(OnDevice)

    return write


def infer() -> Callable[[int], torch.Tensor]:
    def make(number: int) -> torch.Tensor:
        with torch.inference_mode():
            return put(float(number))

    return make


@pytest.mark.parametrize("make_loop", [write_again, replay, infer])
def test_losses_that_may_change_are_copied_at_once(
    tmp_path: Path, clock: Clock, gpu: Gpu, make_loop: Callable[[], Callable[[int], torch.Tensor]]
) -> None:
    monitor, module = watch(tmp_path)
    make_loss = make_loop()
    for number in range(1, 21):
        loss = make_loss(number)
        module(**make_batch(1))
        clock.tick(0.1)
        before = gpu.copies
        monitor.log_step(number, 0, loss, None, 0.1)
        assert gpu.copies == before + 1
    monitor.metrics()  # what is held is copied
    gpu.run()
    monitor.close()
    assert [record["training/loss"] for record in read_steps(tmp_path)] == list(range(1, 21))


@pytest.mark.parametrize("is_taken_back", [False, True])
def test_a_loss_that_changes_while_it_is_held_is_left_out(
    tmp_path: Path, clock: Clock, gpu: Gpu, is_taken_back: bool
) -> None:
    monitor, module = watch(tmp_path)
    loss = put(0.0)
    for number in range(1, LAST + 7):
        loss = put(float(number)) if is_taken_back or number <= LAST + 2 else loss.fill_(number)
        module(**make_batch(1))
        clock.tick(0.1)
        is_late = number == LAST + 3
        with pytest.warns(RuntimeWarning, match="was overwritten .* value.clone") if is_late else nullcontext():
            gpu.is_taken_back = is_taken_back and is_late
            if gpu.is_taken_back:
                monitor.metrics()
                gpu.run()
                monitor.metrics()
            gpu.is_taken_back = False
            monitor.log_step(number, 0, loss, None, 0.1)
    monitor.metrics()  # what is held is copied
    gpu.run()
    monitor.close()
    found = [record["training/loss"] for record in read_steps(tmp_path)]
    lost = (LAST + 1, LAST + 2) if is_taken_back else (LAST + 2,)
    assert found == [None if number in lost else number for number in range(1, LAST + 7)]


def cycle_masks(buffers: int) -> Callable[[int], dict[str, torch.Tensor]]:
    """A loader with buffers of its own; autograd does not count its writes."""
    memory = [torch.zeros((1, 16), dtype=torch.int64) for _ in range(buffers)]

    def write(number: int) -> dict[str, torch.Tensor]:
        mask = memory[number % buffers]
        mask.data.copy_(torch.arange(16) < number % 16 + 1)
        return {"input_ids": put(torch.ones_like(mask)), "attention_mask": mask.detach().as_subclass(OnDevice)}

    return write


def test_masks_whose_memory_is_used_again_are_copied_at_once(tmp_path: Path, clock: Clock, gpu: Gpu) -> None:
    for buffers in (1, 2, 5):
        monitor, module = watch(tmp_path / str(buffers))
        write = cycle_masks(buffers)
        for number in range(1, 21):
            before = gpu.copies
            module(**write(number))
            assert gpu.copies == before + 1
            clock.tick(0.1)
            monitor.log_step(number, 0, 0.5, None, 0.1)
        gpu.run()
        monitor.close()
        found = [record["perf/model_flops"] for record in read_steps(tmp_path / str(buffers))]
        assert found == [count(number % 16 + 1) for number in range(1, 21)]


@pytest.mark.parametrize("is_counted", [False, True])
def test_a_mask_that_changes_while_it_is_held_leaves_its_step_out(
    tmp_path: Path, clock: Clock, gpu: Gpu, is_counted: bool
) -> None:
    monitor, module = watch(tmp_path)
    batch = make_batch(16)
    for number in range(1, LAST + 7):
        length = number % 16 + 1
        if number <= LAST + 2:
            batch = make_batch(length)
        else:
            mask = batch["attention_mask"] if is_counted else batch["attention_mask"].data
            mask.copy_(torch.arange(16) < length)
        with (
            pytest.warns(RuntimeWarning, match="attention_mask of a batch was") if number == LAST + 3 else nullcontext()
        ):
            module(**batch)
        clock.tick(0.1)
        monitor.log_step(number, 0, 0.5, None, 0.1)
    monitor.metrics()  # what is held is copied
    gpu.run()
    with pytest.warns(RuntimeWarning, match="attention_mask was overwritten before it was copied"):
        monitor.close()
    found = [record["perf/model_flops"] for record in read_steps(tmp_path)]
    assert found == [None if number == LAST + 2 else count(number % 16 + 1) for number in range(1, LAST + 7)]


def test_large_masks_are_never_held(tmp_path: Path, clock: Clock, gpu: Gpu) -> None:
    monitor, module = watch(tmp_path)
    for number in range(1, 12):
        module(**make_batch(5, seq=(1 << 17) + 1))
        clock.tick(0.1)
        monitor.log_step(number, 0, 0.5, None, 0.1)
        assert gpu.copies == number
    gpu.run()
    monitor.close()


def test_without_forward_passes_losses_are_copied_at_once(tmp_path: Path, clock: Clock, gpu: Gpu) -> None:
    monitor, module = watch(tmp_path)
    for number in range(1, LAST + 13):
        if number <= LAST + 2:  # then a graph is replayed, which calls no hook
            module(**make_batch(1))
        clock.tick(0.1)
        before = gpu.copies
        with pytest.warns(RuntimeWarning, match="without its batch") if number == LAST + 12 else nullcontext():
            monitor.log_step(number, 0, put(float(number)), None, 0.1)
            if number == LAST + 12:
                gpu.run()
                monitor.close()
        assert gpu.copies - before == {LAST + 1: 0, LAST + 2: 0, LAST + 3: 5}.get(number, 1)
    assert [record["training/loss"] for record in read_steps(tmp_path)] == list(range(1, LAST + 13))


def test_without_a_live_model_marks_are_asked_too(tmp_path: Path, clock: Clock, gpu: Gpu) -> None:
    monitor = TrainingMonitor(tmp_path, CONFIG, model=bind(PRESET))
    mask = make_batch(1)["attention_mask"]
    for number in range(1, 131):
        clock.tick(0.05)
        monitor.log_step(number, 0, put(float(number)), None, 0.1, attention_mask=mask)
        gpu.run()
    monitor._digester.digest()  # as the worker does
    assert monitor._digester.metrics["training/loss"] == 65
    assert monitor.metrics()["training/loss"] == 130
    monitor.close()


def test_what_is_held_is_copied_behind_a_mark(tmp_path: Path, clock: Clock, gpu: Gpu) -> None:
    monitor, module = watch(tmp_path)
    for number in range(1, LAST + 3):
        module(**make_batch(1))
        clock.tick(0.1 if number < LAST + 2 else 0)
        monitor.log_step(number, 0, put(float(number)), None, 0.1)
    gpu.run()
    clock.tick(9)
    monitor.begin_step()
    monitor.end_step(LAST + 3)  # marked, without a forward pass
    gpu.work(monitor)
    assert len(gpu.side.queue) == 1 + 4 + 1  # the mark, the masks and losses of two steps, and their end
    gpu.run(1)  # the mark at its begin
    assert len(gpu.side.queue) == 6
    gpu.run()
    assert not gpu.side.queue
    assert monitor.metrics()["training/loss"] == LAST + 2
    monitor.close()


def test_a_monitor_that_is_dropped_writes_what_the_device_is_done_with(tmp_path: Path, clock: Clock, gpu: Gpu) -> None:
    monitor, module = watch(tmp_path)
    for number in range(1, 6):
        module(**make_batch(number))
        clock.tick(0.1)
        monitor.log_step(number, 0, put(0.5), None, 0.1)
    gpu.run()
    del monitor
    gc.collect()
    assert [record["perf/model_flops"] for record in read_steps(tmp_path)] == [count(n) for n in range(1, 6)]
