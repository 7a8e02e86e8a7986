"""CUPTI's in-process counters without a GPU: each refusal has a reason, each path frees what it took."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopcalc.measure.counters import cupti, witness

BF16 = cupti.TENSOR_COUNTERS["bf16"]
CLOSED = ["ProfilerHostDeinitialize", "ProfilerDeInitialize"]


class FakeLibrary:
    """libcupti's calls, recorded and answered as an H200 would; `fails` names the calls that are refused."""

    def __init__(self, fails: str = "", passes: int = 1, submitted: bool = True, base: tuple[str, ...] = ()) -> None:
        self.calls: list[str] = []
        self.counters: list[bytes] = []
        self._fails, self._passes, self._submitted = fails, passes, submitted
        self._base = base or tuple(
            counter.partition(".")[0]
            for counter in (*cupti.TENSOR_COUNTERS.values(), cupti.DRAM_COUNTER, cupti.CYCLE_COUNTER)
        )

    def call(self, function: str, _struct: Any, **fields: Any) -> Any:
        self.calls.append(function)
        if function in self._fails.split():
            raise cupti.CountersUnavailable(f"{function}: refused")
        if function == "cuptiProfilerHostConfigAddMetrics":
            self.counters = list(fields["names"])
        if function == "cuptiProfilerHostEvaluateToGpuValues":
            for i in range(fields["numMetrics"]):
                fields["values"][i] = 1000.0 * (i + 1)
        return SimpleNamespace(
            pChipName=b"GH100",
            size=8,
            object=5,
            numOfPasses=self._passes,
            counterDataSize=8,
            isAllPassSubmitted=int(self._submitted),
            numMetrics=len(self._base),
            names=[name.encode() for name in self._base],
        )

    def short(self) -> list[str]:
        return [name.removeprefix("cupti").removeprefix("RangeProfiler") for name in self.calls]


def install(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> FakeLibrary:
    """A CUDA device that is not there, and the fake library for it."""
    fake = FakeLibrary(**settings)
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: fake.calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "zeros", lambda *shape, **_: zeros(*shape))
    monkeypatch.setattr(cupti, "find_library", lambda: "libcupti.so")
    monkeypatch.setattr(cupti, "_Library", lambda _path: fake)
    monkeypatch.setattr(cupti, "_get_context", lambda: 1)
    for name, empty in (("_open", set()), ("_staying", set()), ("_enabled", {}), ("_availability", {})):
        monkeypatch.setattr(cupti, name, empty)
    return fake


def test_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    with cupti.HardwareCounter() as counter:
        assert counter.chip == "GH100"
        assert [name.decode() for name in fake.counters] == [BF16, cupti.DRAM_COUNTER, cupti.CYCLE_COUNTER]
        fake.calls.clear()
        with counter.measure() as sample:
            assert sample.values == {}
            assert fake.short()[-2:] == ["Start", "PushRange"]
    assert (sample.tensor_flops, sample.total_flops, sample.dtypes) == ({"bf16": 1000}, 1000, ("bf16",))
    assert (sample.dram_bytes, sample.cycles) == (2000, 3000)
    assert fake.short() == [
        "synchronize", "Enable", "GetCounterDataSize", "CounterDataImageInitialize", "SetConfig", "Start", "PushRange",
        "synchronize", "PopRange", "Stop", "DecodeData", "ProfilerHostEvaluateToGpuValues", "Disable",
        "ProfilerHostDeinitialize", "ProfilerDeInitialize",
    ]  # fmt: skip


def test_between_samples_a_counter_may_stay_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    with cupti.HardwareCounter(stays_enabled=True) as counter:
        for _ in range(2):
            with counter.measure():
                pass
        with pytest.raises(KeyError), counter.measure():  # what is half done is not kept
            raise KeyError
        assert fake.short()[-1] == "Disable"
        with counter.measure():
            pass
    assert [name for name in fake.short() if name in ("Enable", "Start", "Stop", "Disable")] == [
        "Enable", "Start", "Stop", "Start", "Stop", "Start", "Stop", "Disable", "Enable", "Start", "Stop", "Disable",
    ]  # fmt: skip


def test_a_step_that_raises_leaves_nothing_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    with pytest.raises(KeyError), cupti.HardwareCounter() as counter, counter.measure():
        raise KeyError
    assert fake.short()[-5:] == ["PopRange", "Stop", "Disable", *CLOSED]


@pytest.mark.parametrize("fails", ["PopRange", "Stop", "Disable", "PopRange Stop Disable"])
def test_a_step_s_own_error_surfaces(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, fails=" ".join(f"cuptiRangeProfiler{name}" for name in fails.split()))
    with pytest.raises(KeyError), cupti.HardwareCounter() as counter, counter.measure():
        raise KeyError
    assert fake.short()[-6:] == ["synchronize", "PopRange", "Stop", "Disable", *CLOSED]


def test_an_error_of_the_gpu_surfaces_and_nothing_stays_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, fails="cuptiRangeProfilerPopRange cuptiRangeProfilerStop")

    def synchronize() -> None:
        if "PushRange" in fake.short():  # the step's own error, told late
            raise ZeroDivisionError

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with cupti.HardwareCounter() as counter:
        with pytest.raises(ZeroDivisionError), counter.measure():
            pass
        assert fake.short()[-3:] == ["PopRange", "Stop", "Disable"]


def test_a_refused_disable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fails="cuptiRangeProfilerDisable")
    with (
        pytest.raises(cupti.CountersUnavailable, match="Disable"),
        cupti.HardwareCounter() as counter,
        counter.measure(),
    ):
        pass


@pytest.mark.parametrize(
    "function",
    [
        "cuptiRangeProfilerGetCounterDataSize",
        "cuptiRangeProfilerCounterDataImageInitialize",
        "cuptiRangeProfilerSetConfig",
        "cuptiRangeProfilerStart",
        "cuptiRangeProfilerPushRange",
        "cuptiRangeProfilerPopRange",
        "cuptiRangeProfilerStop",
        "cuptiRangeProfilerDecodeData",
        "cuptiProfilerHostEvaluateToGpuValues",
    ],
)
def test_a_refused_call_leaves_nothing_enabled(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, fails=function)
    with pytest.raises(cupti.CountersUnavailable, match=function), cupti.HardwareCounter() as counter:  # noqa: SIM117
        with counter.measure():
            pass
    assert fake.short()[-3:] == ["Disable", *CLOSED]
    started = "Start" in fake.short() and function != "cuptiRangeProfilerStart"
    assert fake.short().count("Stop") == started
    assert fake.short().count("Disable") == 1


def test_a_refused_enable_needs_no_disable(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, fails="cuptiRangeProfilerEnable")
    with pytest.raises(cupti.CountersUnavailable), cupti.HardwareCounter() as counter, counter.measure():
        pass
    assert fake.short()[-3:] == ["Enable", *CLOSED]


def test_counters_that_did_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, submitted=False)
    with (
        pytest.raises(cupti.CountersUnavailable, match="did not fit"),
        cupti.HardwareCounter() as counter,
        counter.measure(),
    ):
        pass
    assert "Disable" in fake.short()


def test_several_passes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, passes=2)
    with pytest.raises(cupti.CountersUnavailable, match=r"need 2 passes.*fewer of them"):
        cupti.HardwareCounter([cupti.TENSOR_COUNTERS["fp16"]])
    assert fake.short()[-2:] == CLOSED
    assert "Enable" not in fake.short()


def test_unknown_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, base=("sm__cycles_elapsed",))
    with pytest.raises(cupti.CountersUnavailable, match="GH100 has no counter"):
        cupti.HardwareCounter()
    assert fake.short()[-2:] == CLOSED


def test_unknown_counter_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, base=("sm__cycles_elapsed", BF16.partition(".")[0]))
    with pytest.raises(cupti.CountersUnavailable, match=r"chip GH100 has no counter dram__bytes\.sum$"):
        cupti.HardwareCounter([BF16, cupti.DRAM_COUNTER])
    assert fake.short()[-2:] == CLOSED
    assert "ProfilerHostConfigAddMetrics" not in fake.short()
    with cupti.HardwareCounter([cupti.CYCLE_COUNTER, BF16]) as counter:
        assert counter.counters == [cupti.CYCLE_COUNTER, BF16]
    with cupti.HardwareCounter() as counter:  # without a wish, what the chip lacks beside bf16 is left out
        assert counter.counters == [BF16, cupti.CYCLE_COUNTER]


def test_the_last_counter_gives_the_profiler_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    first, second = cupti.HardwareCounter(), cupti.HardwareCounter()
    first.close()
    first.close()
    assert "ProfilerDeInitialize" not in fake.short()
    second.close()
    assert fake.short()[-2:] == CLOSED
    assert fake.short().count("ProfilerDeInitialize") == 1
    cupti.HardwareCounter().close()
    assert fake.short().count("ProfilerInitialize") == 3
    assert fake.short().count("ProfilerDeInitialize") == 2


def test_close_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, fails="cuptiProfilerHostDeinitialize cuptiProfilerDeInitialize")
    cupti.HardwareCounter().close()
    assert fake.short()[-2:] == CLOSED


@pytest.mark.parametrize(
    ("function", "closed"),
    [
        ("cuptiProfilerInitialize", False),
        ("cuptiDeviceGetChipName", True),
        ("cuptiProfilerGetCounterAvailability", True),
        ("cuptiProfilerHostInitialize", True),
    ],
)
def test_a_failed_start_gives_the_profiler_back(function: str, closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, fails=function)
    with pytest.raises(cupti.CountersUnavailable, match=function):
        cupti.HardwareCounter()
    assert ("ProfilerDeInitialize" in fake.short()) == closed
    assert not cupti._open


# --- The library itself -----------------------------------------------------------------------------------------


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(cupti.CountersUnavailable, match="no CUDA device"):
        cupti.HardwareCounter()


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupti.glob, "glob", lambda _: [])
    with pytest.raises(cupti.CountersUnavailable, match="no libcupti"):
        cupti.find_library()
    monkeypatch.setattr(cupti.glob, "glob", lambda pattern: [pattern.replace("*", ".12"), pattern.replace("*", ".13")])
    assert cupti.find_library().endswith("libcupti.so.13")


def test_library_that_does_not_load(tmp_path: Any) -> None:
    broken = tmp_path / "libcupti.so"
    broken.write_text("no library")
    with pytest.raises(cupti.CountersUnavailable, match="cannot be loaded"):
        cupti._Library(str(broken))


def test_library_without_the_range_profiler() -> None:
    with pytest.raises(cupti.CountersUnavailable, match=r"CUDA 12\.6"):
        cupti._Library("libc.so.6")


def test_permission_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(_code: int, out: Any) -> int:
        ctypes.cast(out, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
        return 0

    sizes = []

    def enable(params: Any) -> int:
        sizes.append(ctypes.cast(params, ctypes.POINTER(ctypes.c_size_t))[0])
        return 35

    fake = SimpleNamespace(cuptiRangeProfilerEnable=enable, cuptiGetResultString=describe)
    monkeypatch.setattr(cupti.ctypes, "CDLL", lambda _path: fake)
    library = cupti._Library("libcupti.so")
    with pytest.raises(cupti.CountersUnavailable, match="NVreg_RestrictProfilingToAdminUsers=0"):
        library.call("cuptiRangeProfilerEnable", cupti._Enable, ctx=1)
    assert sizes == [32]


def test_no_driver_and_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(path: str) -> Any:
        raise OSError(f"{path}: not found")

    monkeypatch.setattr(cupti.ctypes, "CDLL", no_driver)
    with pytest.raises(cupti.CountersUnavailable, match="no CUDA driver"):
        cupti._get_context()
    monkeypatch.setattr(cupti.ctypes, "CDLL", lambda _path: SimpleNamespace(cuCtxGetCurrent=lambda _: 0))
    with pytest.raises(cupti.CountersUnavailable, match="no CUDA context"):
        cupti._get_context()


def test_struct_sizes_leave_out_the_last_padding() -> None:
    assert cupti._size_of(cupti._Plain) == 16
    assert cupti._size_of(cupti._Stop) == 41
    assert cupti._size_of(cupti._SetConfig) == 90


# --- As a witness ---------------------------------------------------------------------------------------------


class Fake(torch.nn.Module):  # type: ignore[misc]
    """A model that says it is on a GPU."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.dtype = dtype
        self.steps = 0

    def parameters(self, *_: Any) -> Any:
        return iter([SimpleNamespace(is_cuda=True, dtype=self.dtype, device="cuda", grad=None)])

    def forward(self, **_: Any) -> Any:
        self.steps += 1
        return SimpleNamespace(loss=SimpleNamespace(backward=lambda: None))


def test_witness(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    model = Fake(torch.bfloat16)
    counted = witness.count_hardware(model, {"input_ids": None}, "train")
    assert (counted.witness, counted.total, counted.by) == ("cupti", 1000, {"bf16": 1000})
    assert counted.reason == "bf16 tensor cores only, chip GH100; DRAM 2000 bytes, 3000 cycles"
    assert model.steps == 2  # one warms up, one is counted: never replayed
    assert fake.short()[-3:] == ["Disable", *CLOSED]


def test_witness_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, passes=2)
    assert "need 2 passes" in str(witness.count_hardware(Fake(torch.float16), {"input_ids": None}, "train").reason)
    assert "no tensor core" in str(witness.count_hardware(Fake(torch.float32), {"input_ids": None}, "train").reason)
    on_cpu = torch.nn.Linear(1, 1)
    assert "not on the GPU" in str(witness.count_hardware(on_cpu, {"input_ids": None}, "train").reason)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    counted = witness.count_hardware(on_cpu, {"input_ids": None}, "train")
    assert (counted.total, counted.reason) == (None, "no CUDA device here")
