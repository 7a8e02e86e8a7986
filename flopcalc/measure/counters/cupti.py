"""A step to run goes in; what the GPU's own counters saw comes out: tensor operations, DRAM bytes, cycles.

CUPTI's Range Profiler, called through ctypes on the libcupti that torch ships. One user range, one pass: a
training step is never replayed, so a set of counters that needs more than one pass is refused. Nothing stays enabled
between two samples.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_void_p
from typing import Any

# Hopper's names. One multiply or one add is one operation, so a counter's sum is FLOPs as this project counts them.
TENSOR_COUNTERS = {
    "bf16": "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "fp16": "sm__ops_path_tensor_src_fp16.sum",
    "tf32": "sm__ops_path_tensor_src_tf32_dst_fp32.sum",
    "fp8": "sm__ops_path_tensor_src_fp8.sum",
    "int8": "sm__ops_path_tensor_src_int8.sum",
    "fp64": "sm__ops_path_tensor_src_fp64.sum",
}
DRAM_COUNTER = "dram__bytes.sum"
CYCLE_COUNTER = "sm__cycles_elapsed.max"
_USER_RANGE = 2
_USER_REPLAY = 3
_RANGE_NAME = b"step"
_open: set[int] = set()  # ids of the HardwareCounters that hold the profiler; the last one gives it back
# CUDA context -> its profiler while that is enabled, and which counters can be read in it.
_enabled: dict[int, Any] = {}
_availability: dict[int, Any] = {}
_staying: set[int] = set()  # open counters that keep it enabled between samples


class CountersUnavailable(RuntimeError):
    """Hardware counters cannot be read here; the message says why and what would help."""


class Sample:
    """What one range executed; filled in when the range ends."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    @property
    def tensor_flops(self) -> dict[str, int]:
        """Tensor-core FLOPs per dtype, of the dtypes that were counted."""
        return {
            dtype: round(self.values[counter]) for dtype, counter in TENSOR_COUNTERS.items() if counter in self.values
        }

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that were counted; tensor work in any other is not in `total_flops`."""
        return tuple(self.tensor_flops)

    @property
    def total_flops(self) -> int:
        """Tensor-core FLOPs of the counted dtypes alone: see `dtypes`."""
        return sum(self.tensor_flops.values())

    @property
    def dram_bytes(self) -> int | None:
        return round(self.values[DRAM_COUNTER]) if DRAM_COUNTER in self.values else None

    @property
    def cycles(self) -> int | None:
        return round(self.values[CYCLE_COUNTER]) if CYCLE_COUNTER in self.values else None


# --- CUPTI's parameter structs (CUDA 13.0; newer libraries take the same sizes) ---------------------------------------
def _struct(name: str, *fields: tuple[str, object]) -> type[Structure]:
    return type(name, (Structure,), {"_fields_": [("structSize", c_size_t), ("pPriv", c_void_p), *fields]})


_NAMES = POINTER(c_char_p)
_BYTES = POINTER(c_uint8)
_Plain = _struct("Plain")
_Object = _struct("Object", ("object", c_void_p))
_ChipName = _struct("ChipName", ("deviceIndex", c_size_t), ("pChipName", c_char_p))
_Availability = _struct("Availability", ("ctx", c_void_p), ("size", c_size_t), ("image", _BYTES))
_HostInitialize = _struct(
    "HostInitialize", ("profilerType", c_int), ("pChipName", c_char_p), ("availability", _BYTES), ("object", c_void_p)
)
_BaseMetrics = _struct(
    "BaseMetrics", ("object", c_void_p), ("metricType", c_int), ("names", _NAMES), ("numMetrics", c_size_t)
)
_AddMetrics = _struct("AddMetrics", ("object", c_void_p), ("names", _NAMES), ("numMetrics", c_size_t))
_ImageSize = _struct("ImageSize", ("object", c_void_p), ("size", c_size_t))
_Image = _struct("Image", ("object", c_void_p), ("size", c_size_t), ("image", _BYTES))
_Passes = _struct("Passes", ("size", c_size_t), ("image", _BYTES), ("numOfPasses", c_size_t))
_Enable = _struct("Enable", ("ctx", c_void_p), ("object", c_void_p))
_CounterDataSize = _struct(
    "CounterDataSize",
    ("object", c_void_p),
    ("names", _NAMES),
    ("numMetrics", c_size_t),
    ("maxNumOfRanges", c_size_t),
    ("maxNumRangeTreeNodes", c_uint32),
    ("counterDataSize", c_size_t),
)
_SetConfig = _struct(
    "SetConfig",
    ("object", c_void_p),
    ("configSize", c_size_t),
    ("config", _BYTES),
    ("counterDataImageSize", c_size_t),
    ("counterDataImage", _BYTES),
    ("range", c_int),
    ("replayMode", c_int),
    ("maxRangesPerPass", c_size_t),
    ("numNestingLevels", c_uint16),
    ("minNestingLevel", c_uint16),
    ("passIndex", c_size_t),
    ("targetNestingLevel", c_uint16),
)
_Stop = _struct(
    "Stop",
    ("object", c_void_p),
    ("passIndex", c_size_t),
    ("targetNestingLevel", c_size_t),
    ("isAllPassSubmitted", c_uint8),
)
_PushRange = _struct("PushRange", ("object", c_void_p), ("name", c_char_p))
_Decode = _struct("Decode", ("object", c_void_p), ("dropped", c_size_t))
_Evaluate = _struct(
    "Evaluate",
    ("object", c_void_p),
    ("counterDataImage", _BYTES),
    ("counterDataImageSize", c_size_t),
    ("rangeIndex", c_size_t),
    ("names", _NAMES),
    ("numMetrics", c_size_t),
    ("values", POINTER(c_double)),
)


def _size_of(struct: type[Structure]) -> int:
    """CUPTI's own rule: up to the end of the last field, without the padding after it."""
    name = struct._fields_[-1][0]
    field = getattr(struct, name)
    return int(field.offset + field.size)


def find_library() -> str:
    """The libcupti of the torch in use, or the system's."""
    torch = sys.modules.get("torch")
    folders = []
    if torch is not None and torch.__file__ is not None:
        site = os.path.dirname(os.path.dirname(torch.__file__))
        folders += [os.path.join(site, "nvidia", part, "lib") for part in ("cu13", "cuda_cupti", "cu12")]
        folders.append(os.path.join(site, "torch", "lib"))
    folders += ["/usr/local/cuda/extras/CUPTI/lib64", "/usr/local/cuda/lib64"]
    for folder in folders:
        found = sorted(glob.glob(os.path.join(folder, "libcupti.so*")), reverse=True)
        if found:
            return found[0]
    raise CountersUnavailable("no libcupti found: it comes with a CUDA build of torch")


class _Library:
    """libcupti with errors as exceptions."""

    def __init__(self, path: str) -> None:
        try:
            self._lib = ctypes.CDLL(path)
        except OSError as error:
            raise CountersUnavailable(f"{path} cannot be loaded: {error}") from None
        if not hasattr(self._lib, "cuptiRangeProfilerEnable"):
            raise CountersUnavailable(f"{path} has no Range Profiler: CUDA 12.6 or newer is needed")

    def call(self, function: str, struct: type[Structure], **fields: object) -> Any:
        params = struct(**fields)
        params.structSize = _size_of(struct)
        code = getattr(self._lib, function)(ctypes.byref(params))
        if code:
            raise CountersUnavailable(f"{function}: {self._describe(code)}")
        return params

    def _describe(self, code: int) -> str:
        text = c_char_p()
        self._lib.cuptiGetResultString(code, ctypes.byref(text))
        name = text.value.decode() if text.value else str(code)
        if "INSUFFICIENT_PRIVILEGES" in name:
            name += " (counters need root, or the driver option NVreg_RestrictProfilingToAdminUsers=0)"
        return name


def _bytes(size: int) -> Any:
    return (c_uint8 * size)()


def _names(counters: Sequence[str]) -> Any:
    return (c_char_p * len(counters))(*[counter.encode() for counter in counters])


@contextmanager
def _ending(end: Callable[[], object]) -> Iterator[None]:
    """`end` runs after the body, whatever happens there; its own error is dropped while one of the body's is raised."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            end()
        raise
    end()


class HardwareCounter:
    """Reads a fixed set of counters around a step, in one pass, on torch's current CUDA device."""

    def __init__(self, counters: Sequence[str] | None = None, *, stays_enabled: bool = False) -> None:
        """`stays_enabled`: between samples it is stopped, not disabled: to enable it anew is what takes the time."""
        import torch

        if not torch.cuda.is_available():
            raise CountersUnavailable("no CUDA device here")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.zeros(1, device="cuda")  # makes the context that is profiled
        self._synchronize = torch.cuda.synchronize
        self._lib = _Library(find_library())
        self._context = _get_context()
        self._host: int | None = None
        if stays_enabled:
            _staying.add(id(self))
        self._lib.call("cuptiProfilerInitialize", _Plain)
        _open.add(id(self))
        try:
            index = torch.cuda.current_device()
            chip = self._lib.call("cuptiDeviceGetChipName", _ChipName, deviceIndex=index).pChipName
            self.chip = chip.decode()
            availability = self._read_availability()
            self._host = self._lib.call(
                "cuptiProfilerHostInitialize",
                _HostInitialize,
                pChipName=chip,
                availability=ctypes.cast(availability, _BYTES),
            ).object
            self.counters = self._choose(counters)
            self._config = self._make_config(self.counters)
        except BaseException:
            self.close()
            raise

    def _read_availability(self) -> Any:
        if self._context not in _availability:  # it cannot be asked for while a profiler is enabled
            size = self._lib.call("cuptiProfilerGetCounterAvailability", _Availability, ctx=self._context).size
            image = _bytes(size)
            self._lib.call(
                "cuptiProfilerGetCounterAvailability",
                _Availability,
                ctx=self._context,
                size=size,
                image=ctypes.cast(image, _BYTES),
            )
            _availability[self._context] = image
        return _availability[self._context]

    def list_counters(self) -> list[str]:
        """Every base counter of this chip."""
        found = self._lib.call("cuptiProfilerHostGetBaseMetrics", _BaseMetrics, object=self._host, metricType=0)
        return [found.names[i].decode() for i in range(found.numMetrics)]

    def _choose(self, asked: Sequence[str] | None) -> list[str]:
        """What was asked for, all of it; without a wish, bf16 and what else of the usual set the chip has."""
        wanted = [TENSOR_COUNTERS["bf16"], DRAM_COUNTER, CYCLE_COUNTER] if asked is None else list(asked)
        known = set(self.list_counters())
        missing = [counter for counter in wanted if counter.partition(".")[0] not in known]
        refused = missing if asked is not None else [name for name in missing if name == TENSOR_COUNTERS["bf16"]]
        if refused:
            raise CountersUnavailable(f"chip {self.chip} has no counter {', '.join(refused)}")
        return [counter for counter in wanted if counter not in missing]

    def _make_config(self, counters: Sequence[str]) -> Any:
        names = _names(counters)
        self._lib.call(
            "cuptiProfilerHostConfigAddMetrics", _AddMetrics, object=self._host, names=names, numMetrics=len(counters)
        )
        size = self._lib.call("cuptiProfilerHostGetConfigImageSize", _ImageSize, object=self._host).size
        config = _bytes(size)
        self._lib.call(
            "cuptiProfilerHostGetConfigImage", _Image, object=self._host, size=size, image=ctypes.cast(config, _BYTES)
        )
        passes = self._lib.call(
            "cuptiProfilerHostGetNumOfPasses", _Passes, size=size, image=ctypes.cast(config, _BYTES)
        ).numOfPasses
        if passes != 1:
            raise CountersUnavailable(
                f"{', '.join(counters)} need {passes} passes; a step is run once: count fewer of them at a time"
            )
        return config

    @contextmanager
    def measure(self) -> Iterator[Sample]:
        """Count what runs inside; the counters are enabled on entry and stopped on exit, whatever happens."""
        sample = Sample()
        names = _names(self.counters)
        count = len(self.counters)
        self._synchronize()
        if self._context not in _enabled:
            _enabled[self._context] = self._lib.call("cuptiRangeProfilerEnable", _Enable, ctx=self._context).object
        profiler = _enabled[self._context]
        stopped: list[Any] = []

        def pop() -> None:
            self._lib.call("cuptiRangeProfilerPopRange", _Object, object=profiler)

        def stop() -> None:
            stopped.append(self._lib.call("cuptiRangeProfilerStop", _Stop, object=profiler))

        with _ending(self._release):
            size = self._lib.call(
                "cuptiRangeProfilerGetCounterDataSize",
                _CounterDataSize,
                object=profiler,
                names=names,
                numMetrics=count,
                maxNumOfRanges=1,
                maxNumRangeTreeNodes=1,
            ).counterDataSize
            data = _bytes(size)
            image = ctypes.cast(data, _BYTES)
            self._lib.call(
                "cuptiRangeProfilerCounterDataImageInitialize", _Image, object=profiler, size=size, image=image
            )
            self._lib.call(
                "cuptiRangeProfilerSetConfig", _SetConfig, object=profiler, configSize=len(self._config),
                config=ctypes.cast(self._config, _BYTES), counterDataImageSize=size, counterDataImage=image,
                range=_USER_RANGE, replayMode=_USER_REPLAY, maxRangesPerPass=1, numNestingLevels=1, minNestingLevel=1,
                passIndex=0, targetNestingLevel=1,
            )  # fmt: skip
            self._lib.call("cuptiRangeProfilerStart", _Object, object=profiler)
            with _ending(stop):
                self._lib.call("cuptiRangeProfilerPushRange", _PushRange, object=profiler, name=_RANGE_NAME)
                with _ending(pop), _ending(self._synchronize):
                    yield sample
            if not stopped[0].isAllPassSubmitted:
                raise CountersUnavailable("the counters did not fit into one pass")
            self._lib.call("cuptiRangeProfilerDecodeData", _Decode, object=profiler)
            values = (c_double * count)()
            self._lib.call(
                "cuptiProfilerHostEvaluateToGpuValues",
                _Evaluate,
                object=self._host,
                counterDataImage=image,
                counterDataImageSize=size,
                rangeIndex=0,
                names=names,
                numMetrics=count,
                values=values,
            )
            sample.values.update(zip(self.counters, values, strict=True))

    def _release(self) -> None:
        if not _staying or sys.exc_info()[0] is not None:
            self._disable()

    def _disable(self) -> None:
        profiler = _enabled.pop(self._context, None)
        if profiler is not None:
            self._lib.call("cuptiRangeProfilerDisable", _Object, object=profiler)

    def close(self) -> None:
        """Free the host object, and the profiler with the last counter; it cannot be used after it. Never raises."""
        _staying.discard(id(self))
        if not _staying:
            with suppress(Exception):
                self._disable()
        if self._host is not None:
            host, self._host = self._host, None
            with suppress(Exception):
                self._lib.call("cuptiProfilerHostDeinitialize", _Object, object=host)
        if id(self) in _open:
            _open.remove(id(self))
            if not _open:
                with suppress(Exception):
                    self._lib.call("cuptiProfilerDeInitialize", _Plain)

    def __enter__(self) -> HardwareCounter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _get_context() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CountersUnavailable(f"no CUDA driver: {error}") from None
    context = c_void_p()
    code = driver.cuCtxGetCurrent(ctypes.byref(context))
    if code or not context.value:
        raise CountersUnavailable(f"no CUDA context on this thread (cuCtxGetCurrent gave {code})")
    return int(context.value)
