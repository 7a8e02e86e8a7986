"""Every witness on tiny models against the closed-hole counter and the recorded truth; and each way to be absent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, load_tiny
from tiers import mark_heavy
from torch.nn import functional as F

from flopcalc import make_workload
from flopcalc.base.errors import DeviceError, FlopcalcError, WorkloadError
from flopcalc.core.model.config import Source
from flopcalc.core.recipe.recipe import make_recipe
from flopcalc.measure.counters import cupti, formulas, fvcore_counter, gpm, ncu, torch_profiler, witness
from flopcalc.measure.counters.flop_counter import count_flops
from flopcalc.measure.hf.models import apply_recipe, build_model, make_batch
from lab.truth import Case, Entry


def find_case(entry: Entry, phase: str, **recipe: Any) -> Case:
    """The first plain batch of a phase under a recipe, with images where the model takes them."""
    plain = {"batch", "seq", "phase", "images"}
    cases = [
        case
        for case in entry.all_cases
        if case.workload["phase"] == phase and set(case.workload) <= plain and case.recipe == recipe
    ]
    return max(cases, key=lambda case: "images" in case.workload)


def build(name: str, phase: str, attention: str = "eager", **recipe: Any) -> tuple[Any, dict[str, Any], Case]:
    entry = load_tiny(name)
    case = find_case(entry, phase, **recipe)
    model = apply_recipe(build_model(entry.config, attention), recipe)
    return model, make_batch(model.config, case.workload), case


# --- The closed-hole counter ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", mark_heavy(FAMILIES, ["llama", "mixtral", "qwen2_vl"]))
@pytest.mark.parametrize("phase", ["train", "forward"])
def test_flop_counter_equals_truth(family: str, phase: str) -> None:
    model, batch, case = build(family, phase)
    counted = witness.count(model, batch, phase)
    assert counted.total == sum(case.flops)
    assert counted.by == {path: sum(row) for path, row in case.rows.items()}
    assert counted.not_counted == {}
    assert counted.best == counted.total
    assert counted.seconds > 0


def test_modes_and_gradients_are_put_back() -> None:
    model, batch, _ = build("llama", "train")
    model.eval()
    model.model.layers[1].train()
    before = [module.training for module in model.modules()]
    kept = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = kept
    for count in (witness.count, fvcore_counter.count, torch_profiler.count):
        for phase in ("train", "forward"):
            count(model, batch, phase)
            assert [module.training for module in model.modules()] == before
            assert model.lm_head.weight.grad is kept
            assert model.model.embed_tokens.weight.grad is None
    assert torch.equal(kept, torch.ones_like(kept))


def test_modes_are_put_back_when_the_step_fails() -> None:
    model, batch, _ = build("llama", "train")
    model.eval()
    with pytest.raises(RuntimeError, match="broken"), witness.ready_step(model, batch, "train"):
        raise RuntimeError("broken")
    assert not model.training


def test_unknown_phase() -> None:
    model, batch, _ = build("llama", "train")
    with pytest.raises(WorkloadError, match="train or forward"):
        witness.count(model, batch, "decode")


# --- fvcore ---------------------------------------------------------------------------------------------------

# What fvcore does not count, per family; what is not listed here it must count to the FLOP.
UNSUPPORTED = dict.fromkeys(("mixtral", "qwen3_moe", "deepseek_v3"), "aten::_grouped_mm")


@pytest.mark.parametrize("family", mark_heavy(FAMILIES, ["llama", "mixtral", "qwen2_vl"]))
def test_fvcore_equals_truth(family: str) -> None:
    model, batch, case = build(family, "forward")
    counted = fvcore_counter.count(model, batch, "forward")
    missing = 0
    if family in UNSUPPORTED:
        assert UNSUPPORTED[family] in counted.not_counted
        missing = sum(sum(row) for path, row in case.rows.items() if path.endswith(".experts"))
        assert missing
    if family == "llava":  # the tower's last layer feeds nothing: the tracer drops it, and the count says so
        last = "model.vision_tower.encoder.layers.3"
        assert counted.reason is not None
        assert last in counted.reason
        missing = sum(sum(row) for path, row in case.rows.items() if path.startswith(f"{last}."))
        assert missing
    else:
        assert counted.reason is None
    assert counted.total == case.flops[0] - missing
    assert sum(counted.by.values()) == counted.total


def test_fvcore_is_forward_only_and_lists_sdpa() -> None:
    model, batch, case = build("llama", "train", "sdpa")
    counted = fvcore_counter.count(model, batch, "train")
    assert counted.reason == "forward only"
    assert counted.not_counted["aten::scaled_dot_product_attention"] == 3
    attention = sum(row[0] for path, row in case.rows.items() if path.endswith(".self_attn"))
    assert counted.total == case.flops[0] - attention


class RotaryEmbedding(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return x @ torch.ones(x.shape[-1], 1)


class Tiny(torch.nn.Module):  # type: ignore[misc]
    """Takes and gives what a HF model does, with a rotary embedding written as a product."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.rotary = RotaryEmbedding()
        self.head = torch.nn.Linear(4, 7)

    def forward(self, input_ids: Any, labels: Any = None, use_cache: bool = False, return_dict: bool = True) -> Any:
        assert not use_cache
        x = self.embed(input_ids)
        with torch.no_grad():
            turn = self.rotary(x)
        logits = self.head(x + turn)
        if not return_dict:
            return (logits,)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def test_a_rotary_product_is_excluded_everywhere() -> None:
    batch = {"input_ids": torch.arange(6).view(2, 3)}
    head = 2 * 6 * 4 * 7
    assert witness.count(Tiny(), batch, "forward").total == head
    assert fvcore_counter.count(Tiny(), batch, "forward").total == head
    profiled = torch_profiler.count(Tiny(), batch, "forward")
    assert profiled.corrected == head
    assert profiled.total is not None
    assert profiled.total > head
    assert torch_profiler.count(Tiny(), batch, "train").corrected == 3 * head


# --- torch.profiler -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "family", mark_heavy(["llama", "qwen2_vl", "mixtral", "llava", "deepseek_v3", "gpt2"], ["llama", "gpt2"])
)
def test_corrected_profiler_equals_counter(family: str, attention: str) -> None:
    for phase in ("train", "forward"):
        model, batch, case = build(family, phase, attention)
        counted = torch_profiler.count(model, batch, phase)
        assert counted.corrected == witness.count(model, batch, phase).total
        assert counted.reason is None
        assert counted.total == sum(counted.by.values())
        if attention == "eager":
            assert counted.best == sum(case.flops)
        elif family == "llama":  # others fall back to the math path: dropout, unequal head dims
            assert counted.not_counted["aten::_scaled_dot_product_flash_attention_for_cpu"] > 0


@pytest.mark.heavy
def test_profiler_ledger() -> None:
    model, batch, _ = build("qwen2_vl", "train")
    counted = torch_profiler.count(model, batch, "train")
    assert counted.not_counted == {"aten::convolution": 1, "aten::convolution_backward": 1}
    assert {"aten::mm", "aten::mul", "aten::add"} <= set(counted.by)


@pytest.mark.parametrize("recompute", ["full", "full-reentrant"])
@pytest.mark.filterwarnings("ignore:.*use_reentrant|.*requires_grad=True:UserWarning")  # torch's advice on training
def test_profiler_sees_recomputation(recompute: str) -> None:
    model, batch, case = build("llama", "train", recompute=recompute)
    assert torch_profiler.count(model, batch, "train").corrected == sum(case.flops)


def make_step_model(step: Any) -> Any:
    """A module whose loss is what `step` makes of one weight."""

    class Stepped(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, **_: Any) -> Any:
            return SimpleNamespace(loss=step(self.weight))

    return Stepped()


OPERATORS: dict[str, Any] = {
    "math attention": lambda w: _attend(w, torch.nn.attention.SDPBackend.MATH),
    "flash attention, grouped": lambda w: _attend(w, torch.nn.attention.SDPBackend.FLASH_ATTENTION),
    "conv1d, grouped": lambda w: F.conv1d(w * torch.ones(2, 4, 9), w * torch.ones(6, 2, 3), groups=2, padding=1),
    "conv2d": lambda w: F.conv2d(w * torch.ones(2, 4, 9, 8), torch.ones(6, 4, 3, 2), stride=2, dilation=(1, 2)),
    "conv3d": lambda w: F.conv3d(torch.ones(1, 2, 4, 4, 4), w * torch.ones(3, 2, 2, 2, 2), stride=2),
    "transposed": lambda w: F.conv_transpose2d(w * torch.ones(1, 3, 4, 4), w * torch.ones(3, 2, 2, 2), stride=2),
    "baddbmm": lambda w: torch.baddbmm(torch.ones(2, 3, 5), w * torch.ones(2, 3, 4), torch.ones(2, 4, 5)),
    "mv": lambda w: torch.mv(w * torch.ones(3, 4), torch.ones(4)),
    "dot": lambda w: torch.dot(w * torch.ones(4), torch.ones(4)),
    "grouped": lambda w: torch._grouped_mm(
        w * torch.ones(12, 8), w * torch.ones(3, 8, 16), offs=torch.tensor([3, 3, 12], dtype=torch.int32)
    ),
    "batched groups": lambda w: torch._grouped_mm(w * torch.ones(3, 4, 8), w * torch.ones(3, 8, 16)),
    "triangular": lambda w: torch.linalg.solve_triangular(torch.eye(5), w * torch.ones(5, 3), upper=True),
}


def _attend(w: Any, backend: Any) -> Any:
    q, k = w * torch.ones(2, 4, 5, 8), w * torch.ones(2, 2, 7, 8)
    with torch.nn.attention.sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, w * k, enable_gqa=True)


@pytest.mark.parametrize("name", OPERATORS)
def test_each_operator_from_its_shapes(name: str) -> None:
    model = make_step_model(lambda w: OPERATORS[name](w).square().sum())
    batch = {"input_ids": torch.zeros(1, 1, dtype=torch.long)}
    expected = count_flops(model, lambda: model(**batch).loss.backward())
    assert expected.total > 0
    counted = torch_profiler.count(model, batch, "train")
    assert counted.corrected == expected.total
    assert counted.reason is None


def test_fused_attention_on_a_gpu_from_shapes() -> None:
    """The formulas that a CPU never dispatches, on the shapes that the profiler records."""
    q, k, v = [2, 8, 16, 64], [2, 4, 32, 64], [2, 4, 32, 128]
    for kernel in ("flash", "efficient", "cudnn"):
        name = f"aten::_scaled_dot_product_{kernel}_attention"
        assert formulas.SKIPPED[name]([q, k, v], []) == 2 * 2 * 8 * 16 * 32 * (64 + 128)
        back = formulas.SKIPPED[f"{name}_backward"]([v, q, k, v], [])
        assert back == 2 * 2 * 8 * 16 * 32 * (3 * 64 + 2 * 128)


def test_what_shapes_do_not_tell_stays_in_the_ledger() -> None:
    event = SimpleNamespace(
        name="aten::_flash_attention_forward", flops=0, cpu_parent=None, cpu_children=[], input_shapes=[[9, 4, 8]],
        concrete_inputs=[], device_type=torch_profiler.DeviceType.CPU, time_range=SimpleNamespace(start=0.0), thread=1,
    )  # fmt: skip
    unread = SimpleNamespace(**{**vars(event), "name": "aten::convolution_backward"})
    kernel = SimpleNamespace(**{**vars(event), "device_type": torch_profiler.DeviceType.CUDA})
    tally = torch_profiler._Tally([event, unread, kernel])
    assert tally.corrected == 0
    assert tally.not_counted == {"aten::_flash_attention_forward": 1, "aten::convolution_backward": 1}
    assert tally.unknown == set(tally.not_counted)


# --- ncu ------------------------------------------------------------------------------------------------------

COUNTER = ncu.DEFAULT_COUNTERS[0]
LONG = f"""==PROF== Connected to process 123 (/usr/bin/python3)
==PROF== Profiling "gemm": 0%....50%....100% - 1 pass
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value"
"0","123","python3","127.0.0.1","gemm<bf16, 128>(float)","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0",\
"Command line profiler metrics","{COUNTER}","","137,438,953,472"
"0","123","python3","127.0.0.1","gemm<bf16, 128>(float)","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0",\
"Command line profiler metrics","dram__bytes.sum","byte","100663296"
"1","123","python3","127.0.0.1","reduce","1","7","(32, 1, 1)","(1, 1, 1)","0","9.0",\
"Command line profiler metrics","{COUNTER}","","0"
"1","123","python3","127.0.0.1","reduce","1","7","(32, 1, 1)","(1, 1, 1)","0","9.0",\
"Command line profiler metrics","dram__bytes.sum","byte","n/a"
==PROF== Disconnected from process 123
"""
WIDE = f""""ID","Process ID","Kernel Name","dram__bytes.sum","{COUNTER}"
"","","","byte",""
"0","123","gemm","100,663,296","137,438,953,472"
"1","123","reduce","64","0"
"""


def make_ncu(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake ncu on PATH that runs `body` with its own arguments in sys.argv."""
    path = folder / "ncu"
    path.write_text(f"#!{sys.executable}\nimport os, subprocess, sys, time\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def hide_ncu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(ncu, "_PLACES", (str(folder / "nowhere" / "*"),))


@pytest.mark.parametrize("text", [LONG, WIDE])
def test_both_csv_layouts(text: str) -> None:
    kernels = ncu.parse_csv(text, (COUNTER, "dram__bytes.sum"))
    assert [kernel.values[COUNTER] for kernel in kernels] == [137438953472, 0]
    assert kernels[0].values["dram__bytes.sum"] == 100663296
    assert kernels[0].name.startswith("gemm")
    assert set(ncu.parse_csv(text)[0].values) == {COUNTER, "dram__bytes.sum"}
    assert ncu.parse_csv(text, (COUNTER,))[0].values == {COUNTER: 137438953472}


def test_csv_without_kernels() -> None:
    assert ncu.parse_csv("==PROF== nothing\n") == ()


def test_measure_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_ncu(tmp_path, f"print(sys.argv[1:], file=open({str(tmp_path / 'seen')!r}, 'w')); print({LONG!r})", monkeypatch)
    found = ncu.measure_kernels(ncu.Case("matmul", (4096, 4096, 4096)), (COUNTER,))
    assert found.totals == {COUNTER: 2 * 4096**3}
    assert len(found.kernels) == 2
    seen = (tmp_path / "seen").read_text()
    for part in ("'--clock-control', 'none'", "'--profile-from-start', 'off'", f"'--metrics', '{COUNTER}'", "'--csv'"):
        assert part in seen


@pytest.mark.parametrize(
    ("dtype", "counted"), [("bf16", "bf16"), ("fp16", "fp16"), ("tf32", "tf32"), ("fp32", "tf32"), ("fp64", "fp64")]
)
def test_the_counter_is_the_dtype_s(dtype: str, counted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = cupti.TENSOR_COUNTERS[counted]
    make_ncu(tmp_path, f"print({LONG!r}.replace({COUNTER!r}, sys.argv[sys.argv.index('--metrics') + 1]))", monkeypatch)
    case = ncu.Case("matmul", (4096, 4096, 4096), dtype)
    assert ncu.measure_kernels(case).totals == {counter: 2 * 4096**3}
    assert ("allow_tf32 = True" in case.to_script()) == (dtype == "tf32")
    assert ncu.measure_kernels("a script").totals == {COUNTER: 2 * 4096**3}
    found = ncu.count_product((4096, 4096, 4096), dtype)
    assert (found.total, found.reason) == (2 * 4096**3, "its largest product alone; too slow for a whole step")
    assert found.by == {"gemm<bf16, 128>(float)": 2 * 4096**3, "reduce": 0}


def test_a_product_that_ncu_may_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_ncu(tmp_path, "print('==ERROR== ERR_NVGPUCTRPERM'); sys.exit(1)", monkeypatch)
    found = ncu.count_product((1, 1, 1), "bf16")
    assert found.total is None
    assert "its largest product alone: this user may not" in str(found.reason)


def test_ncu_gets_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_ncu(tmp_path, "sys.exit(subprocess.run(sys.argv[-2:]).returncode)", monkeypatch)
    assert ncu.parse_csv(LONG)
    with pytest.raises(ncu.NcuUnavailable, match="profiled no kernel"):
        ncu.measure_kernels("print('my own script')")
    with pytest.raises(ncu.NcuUnavailable, match="code 3: it broke"):
        ncu.measure_kernels("import sys; print('it broke'); sys.exit(3)")
    with pytest.raises(ncu.NcuUnavailable, match=r"gave no fp9\.sum"):
        ncu.measure_kernels(f"print({LONG!r})", ("fp9.sum", COUNTER))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("kind", "shape"), [("matmul", (4, 5, 6)), ("sdpa", (1, 2, 8, 4))])
def test_case_scripts_run(kind: str, shape: tuple[int, ...], direction: str) -> None:
    """On the CPU, with CUDA's profiler calls replaced: the program itself is right."""
    script = ncu.Case(kind, shape, "fp32", direction, causal=True, backend="math").to_script()
    calls: list[str] = []
    cudart = SimpleNamespace(
        cudaProfilerStart=lambda: calls.append("start"), cudaProfilerStop=lambda: calls.append("stop")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "cudart", lambda: cudart)
        names: dict[str, Any] = {}
        exec(compile(script.replace("'cuda'", "'cpu'"), "case", "exec"), names)
    assert calls == ["start", "stop"]
    grown = names["x" if kind == "matmul" else "q"].grad is not None
    assert grown == (direction == "backward")


def test_wrong_cases() -> None:
    for arguments in (("conv", (1, 2, 3)), ("matmul", (1, 2)), ("sdpa", (1, 2, 0, 4)), ("matmul", (1, 2, 3), "fp7")):
        with pytest.raises(ValueError, match=r"case|dtype"):
            ncu.Case(*arguments)


def test_no_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_ncu(monkeypatch, tmp_path)
    with pytest.raises(ncu.NcuUnavailable, match="install Nsight Compute"):
        ncu.measure_kernels(ncu.Case("matmul", (1, 1, 1)))
    counted = ncu.count(None, {}, "train")
    assert counted.total is None
    assert counted.reason is not None
    assert counted.reason.startswith("too slow for a whole step; ncu not found")


def test_ncu_found_off_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_ncu(monkeypatch, tmp_path)
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "ncu").touch()
    assert ncu.find_ncu() == str(tmp_path / "nowhere" / "ncu")
    with pytest.raises(ncu.NcuUnavailable, match="does not start"):
        ncu.measure_kernels("")
    assert "chosen kernels" in str(ncu.count(None, {}, "train").reason)


def test_permission_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_ncu(tmp_path, "print('==ERROR== ERR_NVGPUCTRPERM - The user ...'); sys.exit(1)", monkeypatch)
    with pytest.raises(ncu.NcuUnavailable, match="NVreg_RestrictProfilingToAdminUsers"):
        ncu.measure_kernels(ncu.Case("matmul", (1, 1, 1)))


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_timeout_ends_the_whole_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    child = "child = subprocess.Popen(['sleep', '900'])\n"
    child += f"with open({str(pid)!r}, 'w') as file: print(child.pid, file=file)\ntime.sleep(900)"
    make_ncu(tmp_path, child, monkeypatch)
    communicate = subprocess.Popen.communicate

    def lose_patience(process: Any, *args: Any, timeout: float | None = None) -> Any:
        """The time is over once both processes run."""
        if timeout is not None:
            wait_for(lambda: pid.exists() and pid.read_text().endswith("\n"))
        return communicate(process, *args, timeout=None if timeout is None else 0)

    monkeypatch.setattr(subprocess.Popen, "communicate", lose_patience)
    with pytest.raises(ncu.NcuUnavailable, match="did not finish in 2 s"):
        ncu.measure_kernels("", timeout_s=2)
    stat = Path(f"/proc/{pid.read_text().strip()}/stat")

    def is_gone() -> bool:  # init reaps the grandchild, in its own time
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"

    wait_for(is_gone)


# --- GPM ------------------------------------------------------------------------------------------------------


class NvmlError(Exception):
    pass


class FakeNvml:
    """NVML as nvidia-ml-py has it, with one Hopper GPU that is half busy."""

    NVMLError = NvmlError
    NVML_SUCCESS = 0
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 2, 5, 10

    def __init__(self, fails: str = "", supported: bool = True, missing: int = 0) -> None:
        self.calls: list[str] = []
        self._fails, self._supported, self._missing = fails, supported, missing

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name == self._fails:
                raise NvmlError(f"{name} failed")
            if name == "nvmlGpmQueryDeviceSupport":
                return SimpleNamespace(isSupportedDevice=int(self._supported))
            if name == "nvmlGpmMetricsGet":
                for metric in arguments[0].metrics[: arguments[0].numMetrics]:
                    metric.nvmlReturn = int(metric.metricId == self._missing)
                    metric.value = {2: 90.0, 5: 50.0, 10: 25.0}[metric.metricId]
            return f"{name} {arguments}"

        return call

    @staticmethod
    def c_nvmlGpmMetricsGet_t() -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, value=0.0, nvmlReturn=9) for _ in range(5)])


def use_nvml(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> FakeNvml:
    fake = FakeNvml(**settings)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_gauge(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use_nvml(monkeypatch)
    monkeypatch.setattr(gpm, "MIN_WINDOW_S", 0.0)
    with gpm.Gauge() as gauge, gauge.measure() as activity:
        assert activity.tensor is None
    assert (activity.tensor, activity.sm, activity.dram, activity.reason) == (0.5, 0.9, 0.25, None)
    assert activity.seconds > 0
    assert fake.calls.count("nvmlGpmSampleAlloc") == fake.calls.count("nvmlGpmSampleFree") == 2
    assert fake.calls[-1] == "nvmlShutdown"


def test_gauge_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use_nvml(monkeypatch)
    gpm.Gauge(uuid="GPU-1").close()
    assert "nvmlDeviceGetHandleByUUID" in fake.calls


def test_short_window_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    use_nvml(monkeypatch)
    with gpm.Gauge() as gauge, gauge.measure() as activity:
        pass
    assert activity.tensor is None
    assert "unreliable" in str(activity.reason)


def test_gauge_frees_its_samples_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use_nvml(monkeypatch)
    with pytest.raises(KeyError), gpm.Gauge() as gauge, gauge.measure():
        raise KeyError
    assert fake.calls.count("nvmlGpmSampleAlloc") == fake.calls.count("nvmlGpmSampleFree") == 1
    assert fake.calls[-1] == "nvmlShutdown"


@pytest.mark.parametrize("call", ["nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"])
def test_a_failed_reading_is_a_reason(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use_nvml(monkeypatch, fails=call)
    monkeypatch.setattr(gpm, "MIN_WINDOW_S", 0.0)
    with gpm.Gauge() as gauge, gauge.measure() as activity:
        pass
    assert activity.tensor is None
    assert f"{call} failed" in str(activity.reason)
    got = fake.calls.count("nvmlGpmSampleAlloc") if call != "nvmlGpmSampleAlloc" else 0
    assert fake.calls.count("nvmlGpmSampleFree") == got


def test_one_figure_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    use_nvml(monkeypatch, missing=FakeNvml.NVML_GPM_METRIC_DRAM_BW_UTIL)
    monkeypatch.setattr(gpm, "MIN_WINDOW_S", 0.0)
    with gpm.Gauge() as gauge, gauge.measure() as activity:
        pass
    assert (activity.tensor, activity.dram) == (0.5, None)
    assert "dram" in str(activity.reason)


@pytest.mark.parametrize(
    ("settings", "match", "started"),
    [
        ({"fails": "nvmlInit"}, "no NVIDIA driver", False),
        ({"fails": "nvmlDeviceGetHandleByIndex"}, "cannot be read", True),
        ({"supported": False}, "Hopper or newer", True),
    ],
)
def test_gauge_unavailable(
    settings: dict[str, Any], match: str, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = use_nvml(monkeypatch, **settings)
    with pytest.raises(gpm.GaugeUnavailable, match=match):
        gpm.Gauge()
    assert (fake.calls[-1] == "nvmlShutdown") == started


def test_no_pynvml_and_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(gpm.GaugeUnavailable, match="nvidia-ml-py"):
        gpm.Gauge()
    old = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
    )
    monkeypatch.setitem(sys.modules, "pynvml", old)
    with pytest.raises(gpm.GaugeUnavailable, match="too old"):
        gpm.Gauge()


# --- All together ---------------------------------------------------------------------------------------------


class OnGpu(torch.nn.Module):  # type: ignore[misc]
    """A model that says it is on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def parameters(self, *_: Any) -> Any:
        return iter([SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), grad=None)])

    def forward(self, **_: Any) -> None:
        self.steps += 1


def use_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    taken = [0]
    monkeypatch.setattr(time, "perf_counter", lambda: len(taken) / 64)  # a step takes 1/64 s
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: taken.append(0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="12-34"))


def test_gauge_as_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use_nvml(monkeypatch)
    use_gpu(monkeypatch)
    model = OnGpu()
    found = witness.ask("gpm", model, {"input_ids": None}, "forward")
    assert (found.witness, found.total, found.best) == ("gpm", None, None)
    assert str(found.reason).startswith("tensor cores active 50.0% of 0.31 s")
    assert str(found.reason).endswith(f"SMs 90.0%, DRAM 25.0%; {model.steps - 1} steps, a gauge and no count")
    assert found.seconds >= 0.3
    assert "nvmlDeviceGetHandleByUUID" in fake.calls
    assert fake.calls[-1] == "nvmlShutdown"


def test_gauge_as_a_row_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "_GAUGE_S", 0.01)
    use_nvml(monkeypatch)
    use_gpu(monkeypatch)
    batch = {"input_ids": None}
    assert "unreliable" in str(witness.ask("gpm", OnGpu(), batch, "forward").reason)
    use_nvml(monkeypatch, supported=False)
    assert "Hopper" in str(witness.ask("gpm", OnGpu(), batch, "forward").reason)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in str(witness.ask("gpm", OnGpu(), batch, "forward").reason)
    assert "not on the GPU" in str(witness.ask("gpm", torch.nn.Linear(1, 1), batch, "forward").reason)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert witness.ask("gpm", OnGpu(), batch, "forward").reason == "no CUDA device here"


def test_a_broken_witness_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, _ = build("llama", "forward")

    def fail(*_: Any) -> None:
        raise AssertionError("shapes differ\nand more")

    monkeypatch.setattr(torch_profiler, "count", fail)
    counted = witness.ask("profiler", model, batch, "forward")
    assert (counted.total, counted.reason) == (None, "AssertionError: shapes differ")


def test_a_missing_package_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, _ = build("llama", "forward")
    monkeypatch.setitem(sys.modules, "fvcore.nn", None)
    counted = witness.ask("fvcore", model, batch, "forward")
    assert counted.total is None
    assert "pip install 'flopcalc[measure]'" in str(counted.reason)


def check_exact(found: witness.Crosscheck) -> None:
    ratios = {row.counted.witness: row.ratio for row in found.rows}
    assert list(ratios) == list(witness.WITNESSES)
    assert ratios["flop_counter"] == ratios["fvcore"] == ratios["profiler"] == 1


RECIPES: list[dict[str, Any]] = [
    {},
    {"freeze": ["vision"]},
    {"freeze": ["language"]},
    {"train_only": ["projector"]},
    {"lora": "r=4,targets=q_proj+v_proj"},
    {"lora": "r=4,targets=all-linear", "recompute": "full"},
]


@pytest.mark.parametrize("recipe", mark_heavy(RECIPES, RECIPES[1:2]))
def test_crosscheck_of_recipes(recipe: dict[str, Any]) -> None:
    load = make_workload(2, 17, image_grid_thw=[[1, 4, 6]] * 2)
    check_exact(witness.crosscheck(load_tiny("qwen2_vl").config, load, recipe=make_recipe(**recipe), device="cpu"))


@pytest.mark.heavy
@pytest.mark.parametrize(
    "family", mark_heavy(["llama", "gpt2", "gemma3_text", "qwen2_5_vl", "qwen3_vl"], ["gemma3_text", "qwen3_vl"])
)
def test_crosscheck_with_fewer_layers(family: str) -> None:
    entry = load_tiny(family)
    workload = find_case(entry, "train").workload
    grids = workload.get("images", []) * workload["batch"]
    load = make_workload(workload["batch"], workload["seq"], image_grid_thw=grids or None, phase="forward")
    found = witness.crosscheck(entry.config, load, layers=2, device="cpu")
    assert set(found.layers.values()) == {2}
    check_exact(found)


def test_the_product_for_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    load = make_workload(2, 4)
    expected = witness._ExpectedCounts(witness.load_config(config), load, make_recipe(), "eager", None)
    assert expected.product is not None
    assert sorted(expected.product) == [8, 8, 24]
    assert expected.product[0] == 8
    hide_ncu(monkeypatch, tmp_path)
    assert witness._choose_product(expected, torch.bfloat16, "cuda") is None
    make_ncu(tmp_path, f"print({LONG!r})", monkeypatch)
    assert witness._choose_product(expected, torch.bfloat16, "cpu") is None
    assert witness._choose_product(expected, torch.float32, "cuda") is None  # without TF32: no tensor core
    assert witness._choose_product(expected, torch.float16, "cuda") == (expected.product, "fp16")

    monkeypatch.setattr(witness, "_choose_product", lambda *_: ((4096, 4096, 4096), "bf16"))
    (row,) = witness.crosscheck(config, load, device="cpu", witnesses=("ncu",)).rows
    assert (row.ratio, row.expected, row.expected_as) == (1, 2 * 4096**3, "2·m·n·k of 4096 × 4096 × 4096")
    assert row.counted.reason == "its largest product alone; too slow for a whole step"

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(ncu, "measure_kernels", fail)
    (row,) = witness.crosscheck(config, load, device="cpu", witnesses=("ncu",)).rows
    assert (row.ratio, row.counted.reason) == (None, "OSError: no space left")


def test_cut_layers() -> None:
    config = {
        "model_type": "x",
        "text_config": {"num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"], "sizes": [1, 2, 3]},
        "vision_config": {"depth": 5, "fullatt_block_indexes": [1, 4]},
    }
    source = Source("x", config, "x")
    cut = witness.cut_layers(source, 2).config
    assert cut["text_config"] == {"num_hidden_layers": 2, "layer_types": ["a", "b"], "sizes": [1, 2, 3]}
    assert cut["vision_config"] == {"depth": 2, "fullatt_block_indexes": [1]}
    assert config["vision_config"] == {"depth": 5, "fullatt_block_indexes": [1, 4]}
    assert witness.cut_layers(source, None) is source
    assert witness.cut_layers(source, 9).config == config
    with pytest.raises(WorkloadError, match="at least 1"):
        witness.cut_layers(source, 0)


def test_what_cannot_be_crosschecked(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_tiny("llama").config
    with pytest.raises(WorkloadError, match="train or forward"):
        witness.crosscheck(config, make_workload(1, 8, phase="prefill"))
    with pytest.raises(WorkloadError, match="no packing"):
        witness.crosscheck(config, make_workload(lengths=[3, 4]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no CUDA device"):
        witness.crosscheck(config, make_workload(1, 8), device="cuda")
    with pytest.raises(FlopcalcError, match="layers=N"):
        witness.crosscheck("llama-3.1-405b", make_workload(1, 8), device="cpu")


@pytest.mark.heavy
def test_the_gpu_side_needs_no_command_line_packages() -> None:
    """The machine with the GPU has no click, fvcore, peft or pynvml."""
    code = (
        "import sys\n"
        "for name in ('click', 'fvcore', 'peft', 'pynvml'): sys.modules[name] = None\n"
        "import flopcalc.measure.counters.witness\n"
        "assert 'torch' not in sys.modules\n"
        "from flopcalc.measure.counters import cupti, formulas, fvcore_counter, gpm, ncu, torch_profiler\n"
        "from flopcalc import make_workload\n"
        "config = dict(model_type='llama', num_hidden_layers=1, hidden_size=8, intermediate_size=8,\n"
        "              num_attention_heads=2, vocab_size=9)\n"
        "found = flopcalc.measure.counters.witness.crosscheck(config, make_workload(1, 4), device='cpu')\n"
        "print([row.ratio for row in found.rows], found.rows[1].counted.reason)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = "[1.0, None, 1.0, None, None, None] fvcore is not installed: pip install 'flopcalc[measure]'"
    assert done.stdout.splitlines()[-1] == expected
