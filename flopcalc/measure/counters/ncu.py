"""A kernel's case (a matrix product or an attention call) goes in; what Nsight Compute counted in it comes out."""

from __future__ import annotations

import csv
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from flopcalc.base.frozen import Value, frozen
from flopcalc.base.vocabulary import PassDirection
from flopcalc.measure.counters.cupti import TENSOR_COUNTERS
from flopcalc.measure.counters.witnessed import WitnessCount, unavailable

DEFAULT_COUNTERS = (TENSOR_COUNTERS["bf16"],)  # of a script, which says no dtype
_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda-*/bin/ncu")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32", "fp32": "float32", "fp64": "float64"}
_BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}


class NcuUnavailable(RuntimeError):
    """Nsight Compute gave nothing; the message says why and what would help."""


@frozen()
class Case(Value):
    """What to run: `matmul` of shape (m, n, k), or `sdpa` of shape (batch, heads, length, head dim)."""

    kind: str
    shape: tuple[int, ...]
    dtype: str = "bf16"
    direction: PassDirection = "forward"  # only this direction is profiled
    causal: bool = False
    backend: str = "flash"

    def __post_init__(self) -> None:
        sizes = {"matmul": 3, "sdpa": 4}
        if self.kind not in sizes or len(self.shape) != sizes[self.kind] or min(self.shape) < 1:
            raise ValueError(f"a case is a matmul of (m, n, k) or an sdpa of (batch, heads, length, head dim): {self}")
        if self.dtype not in _DTYPES or self.direction not in ("forward", "backward") or self.backend not in _BACKENDS:
            raise ValueError(
                f"{self}: dtype one of {', '.join(_DTYPES)}; direction forward or backward; "
                f"backend one of {', '.join(_BACKENDS)}"
            )

    @property
    def counters(self) -> tuple[str, ...]:
        """The tensor counter of its dtype; fp32 is seen by TF32's, which stays 0 where TF32 is off."""
        return (TENSOR_COUNTERS["tf32" if self.dtype == "fp32" else self.dtype],)

    def to_script(self) -> str:
        """A program that runs the case twice: once to warm up, once between cudaProfilerStart and Stop."""
        shape = self.shape
        if self.kind == "matmul":
            m, n, k = shape
            inputs = f"x = leaf({m}, {k})\ny = leaf({k}, {n})"
            call = "x @ y"
        else:
            inputs = f"q, k, v = (leaf{tuple(shape)!r} for _ in range(3))"
            call = f"torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal={self.causal})"
        backward = self.direction == "backward"
        run = "out.backward(grad)" if backward else "run()"
        return "\n".join(
            [
                "import torch",
                "from torch.nn.attention import SDPBackend, sdpa_kernel",
                *(["torch.backends.cuda.matmul.allow_tf32 = True"] if self.dtype == "tf32" else []),
                "def leaf(*shape):",
                f"    return torch.randn(*shape, device='cuda', dtype=torch.{_DTYPES[self.dtype]},"
                f" requires_grad={backward})",
                inputs,
                "def run():",
                f"    with sdpa_kernel(SDPBackend.{_BACKENDS[self.backend]}):",
                f"        return {call}",
                "out = run()",
                "grad = torch.randn_like(out)",
                *(["out.backward(grad)", "out = run()"] if backward else []),
                "torch.cuda.synchronize()",
                "torch.cuda.cudart().cudaProfilerStart()",
                run,
                "torch.cuda.synchronize()",
                "torch.cuda.cudart().cudaProfilerStop()",
                "",
            ]
        )


class LaunchedKernel(NamedTuple):
    """One launched kernel and its counters."""

    name: str
    values: dict[str, float]


class KernelProfile(NamedTuple):
    """All kernels between profiler start and stop."""

    kernels: tuple[LaunchedKernel, ...]
    seconds: float

    @property
    def totals(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for kernel in self.kernels:
            for counter, value in kernel.values.items():
                sums[counter] = sums.get(counter, 0.0) + value
        return sums


def find_ncu() -> str:
    """The ncu on PATH, or in the places where CUDA and Nsight Compute put it."""
    found = shutil.which("ncu")
    if found:
        return found
    for place in _PLACES:
        matches = sorted(glob.glob(place), reverse=True)
        if matches:
            return matches[0]
    raise NcuUnavailable(
        "ncu not found: install Nsight Compute (package nsight-compute, or cuda-nsight-compute of the CUDA toolkit) "
        "or put its folder on PATH"
    )


def measure_kernels(
    case: Case | str, counters: Sequence[str] | None = None, *, timeout_s: float = 180.0
) -> KernelProfile:
    """Counters of every kernel that a case (or a script with cudaProfilerStart and Stop) launches.

    Without `counters`: the tensor counter of the case's dtype, and bf16's for a script.
    """
    if counters is None:
        counters = case.counters if isinstance(case, Case) else DEFAULT_COUNTERS
    ncu = find_ncu()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="flopcalc-ncu-") as folder:
        script = os.path.join(folder, "case.py")
        with open(script, "w", encoding="utf-8") as file:
            file.write(case.to_script() if isinstance(case, Case) else case)
        command = [
            ncu, "--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all",
            "--metrics", ",".join(counters), "--csv", "--print-units", "base", sys.executable, script,
        ]  # fmt: skip
        code, out, err = _run(command, timeout_s)
    _check_output(code, out, err)
    kernels = parse_csv(out, counters)
    if not kernels:
        raise NcuUnavailable("ncu profiled no kernel: does the script launch one between cudaProfilerStart and Stop?")
    for counter in counters:
        if not any(counter in kernel.values for kernel in kernels):
            raise NcuUnavailable(f"ncu gave no {counter}: this chip may not have it (ncu --query-metrics lists them)")
    return KernelProfile(kernels, time.perf_counter() - start)


def _run(command: Sequence[str], timeout_s: float) -> tuple[int, str, str]:
    """Run in a group of its own, so that a timeout ends ncu and the program under it."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
    except OSError as error:
        raise NcuUnavailable(f"{command[0]} does not start: {error.strerror}") from None
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            raise NcuUnavailable(f"ncu did not finish in {timeout_s:g} s and was ended") from None
        except BaseException:
            _kill_group(process)
            raise
    return process.returncode, out, err


def _kill_group(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):  # it ended in the meantime
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _check_output(code: int, out: str, err: str) -> None:
    text = f"{out}\n{err}"
    if "ERR_NVGPUCTRPERM" in text:
        raise NcuUnavailable(
            "this user may not read GPU counters (ERR_NVGPUCTRPERM): they need root, or the driver option "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    if code:
        lines = [line for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("==ERROR==")] or lines[-1:] or ["no output"]
        raise NcuUnavailable(f"ncu ended with code {code}: {errors[0].removeprefix('==ERROR==').strip()}")


def parse_csv(text: str, counters: Sequence[str] = ()) -> tuple[LaunchedKernel, ...]:
    """The kernels in ncu's CSV, in either layout: one line per counter, or one column per counter."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    at = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if at is None:
        return ()
    rows = list(csv.DictReader(lines[at:]))
    kernels: dict[tuple[str, str], LaunchedKernel] = {}
    for row in rows:
        name = row.get("Kernel Name") or ""
        if not row.get("ID"):  # the wide layout's second line holds units
            continue
        # An ID is counted per process.
        kernel = kernels.setdefault((row.get("Process ID") or "", row["ID"]), LaunchedKernel(name, {}))
        if "Metric Name" in row:
            found = {row["Metric Name"]: row.get("Metric Value")}
        else:
            found = {key: value for key, value in row.items() if key in counters or (not counters and "__" in key)}
        for counter, value in found.items():
            number = _read_number(value)
            if number is not None and (not counters or counter in counters):
                kernel.values[counter] = number
    return tuple(kernels.values())


def _read_number(text: str | None) -> float | None:
    """'1,073,741,824' -> 1073741824.0; 'n/a' -> None."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def count(_model: object, _batch: Mapping[str, object], _phase: str) -> WitnessCount:
    """Nsight Compute replays every kernel: it is for chosen kernels, not for a step."""
    try:
        find_ncu()
        here = "measure_kernels() takes chosen kernels"
    except NcuUnavailable as error:
        here = str(error)
    return unavailable("ncu", f"too slow for a whole step; {here}")


def count_product(shape: tuple[int, int, int], dtype: str) -> WitnessCount:
    """One product of (m, n, k), used in place of a step."""
    case = Case("matmul", shape, dtype)
    try:
        found = measure_kernels(case)
    except NcuUnavailable as error:
        return unavailable("ncu", f"too slow for a whole step; of its largest product alone: {error}")
    (counter,) = case.counters
    by: dict[str, int] = {}
    for kernel in found.kernels:
        by[kernel.name] = by.get(kernel.name, 0) + round(kernel.values.get(counter, 0))
    return WitnessCount(
        "ncu", sum(by.values()), by, {}, found.seconds, "its largest product alone; too slow for a whole step"
    )
