"""MFU of a step measured on the model itself: four modes, each with its source, and NaN with a reason elsewhere."""

from __future__ import annotations

import gc
import math
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import load_tiny
from tiers import thin

from flopcalc import FlopcalcError, estimate_flops
from flopcalc.measure.counters import cupti, torch_profiler
from flopcalc.measure.hf.models import apply_recipe, build_model
from flopcalc.measure.trace.fakes import FakeCopy
from flopcalc.monitor import precise
from flopcalc.monitor.instruments import Counters, NotMeasured, Profiler
from flopcalc.monitor.precise import MeasuredMfu, calculate_mfu_with_profiler, calculate_precise_mfu

CONFIG = load_tiny("llama").config
MODES = {
    "estimate": "estimate",
    "profiler": "profiler",
    "smart": "smart: operator counter",
    "hybrid": "hybrid: profiler",
}
T5 = {
    "model_type": "t5", "d_model": 24, "d_kv": 10, "d_ff": 41, "num_layers": 2, "num_heads": 4, "vocab_size": 101,
    "decoder_start_token_id": 0,
}  # fmt: skip


def build(recipe: dict[str, Any] | None = None, attention: str = "sdpa") -> Any:
    return apply_recipe(build_model(CONFIG, attention), recipe or {})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "recipe", thin([{"lora": {"r": 4, "targets": ["q_proj"]}, "recompute": "full"}, {"recompute": "full"}, {}], 3)
)
def test_every_mode_gives_the_exact_figure(mode: str, recipe: dict[str, Any]) -> None:
    """On a CPU nothing is padded: measured ÷ analytic is 1, so MFU is the analytic one."""
    model = build(recipe, "eager")
    flops = estimate_flops(model, batch_size=2, seq_len=24).total
    found = calculate_precise_mfu(model, 2, 24, 0.5, mode, peak=1e12, dtype="bf16")
    assert float(found) == flops / (0.5 * 1e12)
    assert (found.flops, found.source, found.convention) == (flops, MODES[mode], "model")
    assert (found.peak_flops_per_s, found.device) == (1e12, None)
    if mode == "hybrid":
        assert found.note == "no hardware counters (the model is not on a CUDA device)"
    else:
        assert found.note is None


def test_profiler_by_its_first_name() -> None:
    model = build()
    found = calculate_mfu_with_profiler(model, 2, 24, 0.5, device="H200", dtype="bf16")
    assert found == calculate_precise_mfu(model, 2, 24, 0.5, "profiler", device="H200", dtype="bf16")
    assert found.source == "profiler"
    assert found.device is not None
    assert "H200" in found.device
    assert found.flops == estimate_flops(model, batch_size=2, seq_len=24).total


@pytest.mark.heavy
def test_a_step_leaves_the_model_as_it_was() -> None:
    model = build().eval()
    model.model.layers[1].train()
    modes = [module.training for module in model.modules()]
    kept = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = kept
    before = [parameter.detach().clone() for parameter in model.parameters()]
    random = torch.get_rng_state()
    for mode in MODES:
        calculate_precise_mfu(model, 2, 24, 0.5, mode, peak=1e12)
    assert [module.training for module in model.modules()] == modes
    assert model.lm_head.weight.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert model.model.embed_tokens.weight.grad is None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert not torch.autograd._profiler_enabled()


@pytest.mark.heavy
def test_an_encoder_and_a_decoder() -> None:
    model = build_model(T5, architecture="T5ForConditionalGeneration")
    flops = estimate_flops(T5, batch_size=2, seq_len=9, decoder_seq_len=9).total
    for mode in MODES:
        assert calculate_precise_mfu(model, 2, 9, 0.5, mode, peak=1e12).flops == flops


def test_estimate_takes_a_name_or_a_config() -> None:
    flops = estimate_flops(CONFIG, batch_size=2, seq_len=24).total
    assert calculate_precise_mfu(CONFIG, 2, 24, 0.5, "estimate", peak=1e12).flops == flops
    with pytest.warns(RuntimeWarning, match="needs a live model"):
        found = calculate_precise_mfu(CONFIG, 2, 24, 0.5, "profiler", peak=1e12)
    assert math.isnan(found)


def test_smart_measures_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = FakeCopy.count

    def counting(made: Any, batch: Any, phase: str) -> Any:
        calls.append(batch["input_ids"].shape[1])
        return real(made, batch, phase)

    monkeypatch.setattr(FakeCopy, "count", counting)
    model = build()
    for seq in (24, 48, 24):
        flops = estimate_flops(model, batch_size=2, seq_len=seq).total
        assert calculate_precise_mfu(model, 2, seq, 0.5, peak=1e12).flops == flops
    assert calls == [24]
    model.model.layers[0].requires_grad_(False)  # another step than the one that was measured
    calculate_precise_mfu(model, 2, 24, 0.5, peak=1e12)
    assert calls == [24, 24]
    kept = len(precise._smart)
    del model
    gc.collect()
    assert len(precise._smart) == kept - 1


def test_smart_where_nothing_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_made: Any, _batch: Any, _phase: str) -> None:
        raise RuntimeError("reads values")

    monkeypatch.setattr(FakeCopy, "count", refuse)
    model = build()
    found = calculate_precise_mfu(model, 2, 24, 0.5, peak=1e12)
    assert (found.flops, found.source) == (estimate_flops(model, batch_size=2, seq_len=24).total, "smart: estimate")
    assert found.note == "LlamaForCausalLM cannot be copied and counted: RuntimeError: reads values"


# --- Counters that are not there --------------------------------------------------------------------------------------


@contextmanager
def counters(monkeypatch: pytest.MonkeyPatch, *, ratio: float = 1.0, error: Exception | None = None) -> Iterator[None]:
    """The model is taken to be on a GPU whose counters see `ratio` times the analytic hardware FLOPs."""

    class Fake:
        def __init__(self, names: list[str], *, stays_enabled: bool) -> None:
            assert stays_enabled
            assert names == [cupti.TENSOR_COUNTERS["bf16"]]
            if error is not None:
                raise error

        @contextmanager
        def measure(self) -> Iterator[Any]:
            flops = estimate_flops(CONFIG, batch_size=2, seq_len=24, convention="hardware").total
            yield SimpleNamespace(total_flops=round(ratio * flops))

        def close(self) -> None:
            pass

    with monkeypatch.context() as patch:
        patch.setattr(Counters, "is_on_gpu", lambda _self: True)
        patch.setattr(Counters, "_on_device", lambda _self: nullcontext())
        patch.setattr(cupti, "HardwareCounter", Fake)
        yield


@pytest.mark.parametrize(
    ("mode", "ratio", "source", "factor"),
    [
        ("smart", 1.25, "smart: cupti", 1.0),  # what kernels pad and block is no work of the model's
        ("hybrid", 1.25, "hybrid: cupti", 1.0),
        ("hybrid", 0.0, "hybrid: profiler", 1.0),
        ("hybrid", 3.0, "hybrid: profiler", 1.0),
        ("smart", 0.0, "smart: operator counter", 1.0),
        ("smart", 3.0, "smart: estimate", 1.0),
    ],
)
def test_counters(mode: str, ratio: float, source: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    with counters(monkeypatch, ratio=ratio):
        found = calculate_precise_mfu(model, 2, 24, 0.5, mode, peak=1e12, dtype="bf16")
    assert found.source == source
    assert found.flops == pytest.approx(estimate_flops(model, batch_size=2, seq_len=24).total * factor, abs=1)
    if ratio == 1.25:
        assert found.note == "the counters saw 1.2500 times the analytic hardware FLOPs"
    if ratio == 3.0:
        assert "not believed" in str(found.note)


def test_hybrid_falls_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: Any) -> None:
        raise NotMeasured("kineto is broken")

    model = build()
    with counters(monkeypatch, error=cupti.CountersUnavailable("refused")):
        found = calculate_precise_mfu(model, 2, 24, 0.5, "hybrid", peak=1e12, dtype="bf16")
        assert (found.source, found.note) == ("hybrid: profiler", "no hardware counters (refused)")
        monkeypatch.setattr(Profiler, "start", refuse)
        found = calculate_precise_mfu(model, 2, 24, 0.5, "hybrid", peak=1e12, dtype="bf16")
    assert found.source == "hybrid: estimate"
    assert found.note == "no hardware counters (refused); no profiler (kineto is broken)"
    assert found.flops == estimate_flops(model, batch_size=2, seq_len=24).total


# --- Models without a spec --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "convention"), [("profiler", "full"), ("smart", "full"), ("hybrid", "full")])
def test_a_model_that_no_spec_describes(mode: str, convention: str) -> None:
    """What was measured stands, under the convention that it was measured in."""
    model = build({}, "eager")
    full = estimate_flops(model, batch_size=2, seq_len=24, convention="full").total
    model.extra = torch.nn.Linear(3, 2)  # unused, and in no spec
    found = calculate_precise_mfu(model, 2, 24, 0.5, mode, peak=1e12)
    assert (found.flops, found.convention) == (full, convention)
    with pytest.warns(RuntimeWarning, match=r"extra\.bias"):
        assert math.isnan(calculate_precise_mfu(model, 2, 24, 0.5, "estimate", peak=1e12))


# --- No figure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((2, 24, 0.0), {"peak": 1e12}, "step_time must be a positive number, not 0.0"),
        ((2, 24, -1.0), {"peak": 1e12}, "step_time"),
        ((2, 24, math.nan), {"peak": 1e12}, "step_time"),
        ((2, 24, "fast"), {"peak": 1e12}, "step_time"),
        ((0, 24, 0.5), {"peak": 1e12}, "batch_size"),
        ((2, 2.5, 0.5), {"peak": 1e12}, "seq_length"),
        ((2, 24, 0.5), {"peak": -1.0}, "peak"),
        ((2, 24, 0.5), {"device": "a toaster"}, "a toaster"),
        ((2, 24, 0.5), {"device": "H200", "dtype": "bf17"}, "bf17"),
        ((2, 24, 0.5), {}, "no GPU found on this machine"),
    ],
)
@pytest.mark.parametrize("mode", ["estimate", "smart"])
def test_nan_and_why(
    mode: str, arguments: Any, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flopcalc.core.estimate.utilization.detect_device", lambda: None)
    model = build()
    with pytest.warns(RuntimeWarning, match=words) as seen:
        found = calculate_precise_mfu(model, *arguments, mode, **options)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert math.isnan(found)
    assert words in str(found.note)
    assert found.convention == "model"


def test_without_a_peak_the_count_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopcalc.core.estimate.utilization.detect_device", lambda: None)
    model = build()
    with pytest.warns(RuntimeWarning, match="no GPU found"):
        found = calculate_mfu_with_profiler(model, 2, 24, 0.5)
    assert math.isnan(found)
    assert found.flops == estimate_flops(model, batch_size=2, seq_len=24).total
    assert found.peak_flops_per_s is None


def test_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(model, "forward", fail)
    with pytest.warns(RuntimeWarning, match="RuntimeError: out of memory"):
        found = calculate_mfu_with_profiler(model, 2, 24, 0.5, peak=1e12)
    assert math.isnan(found)
    assert found.note == "the step could not be measured: RuntimeError: out of memory"
    assert not torch.autograd._profiler_enabled()
    assert not any(module._forward_hooks for module in model.modules())


def test_profiler_under_another_profiler() -> None:
    model = build()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):  # noqa: SIM117
        with pytest.warns(RuntimeWarning, match="another torch.profiler is on"):
            assert math.isnan(calculate_mfu_with_profiler(model, 2, 24, 0.5, peak=1e12))


def test_profiler_that_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_profiler.LiveProfiler, "stop", lambda self: (self.cancel(), (5, ("flash_attn::fwd",)))[1])
    with pytest.warns(RuntimeWarning, match="flash_attn::fwd"):
        assert math.isnan(calculate_mfu_with_profiler(build(), 2, 24, 0.5, peak=1e12))


def test_a_module_that_is_no_hf_model() -> None:
    for mode in MODES:
        with pytest.warns(RuntimeWarning, match="no Hugging Face model"):
            assert math.isnan(calculate_precise_mfu(torch.nn.Linear(2, 2), 2, 24, 0.5, mode, peak=1e12))


def test_above_one_is_told_and_not_clamped() -> None:
    model = build()
    with pytest.warns(RuntimeWarning, match="above 1"):
        found = calculate_precise_mfu(model, 2, 24, 1e-9, "estimate", peak=1e12)
    assert found > 1
    assert "above 1" in str(found.note)


def test_unknown_mode() -> None:
    with pytest.raises(FlopcalcError, match=r"'smrt' unknown\. Did you mean smart\?"):
        calculate_precise_mfu(build(), 2, 24, 0.5, "smrt")
    with pytest.raises(FlopcalcError, match="None unknown"):
        calculate_precise_mfu(build(), 2, 24, 0.5, None)  # type: ignore[arg-type]


# --- The value --------------------------------------------------------------------------------------------------------


def test_measured_mfu_is_a_float_that_says_where_it_comes_from() -> None:
    made = MeasuredMfu(0.25, "profiler", "model", 1000, 4000.0, "H200", "a note")
    assert made == 0.25
    assert isinstance(made, float)
    assert repr(made) == (
        "MeasuredMfu(0.25, source='profiler', convention='model', flops=1000, peak_flops_per_s=4000.0, device='H200', "
        "note='a note')"
    )
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is MeasuredMfu
    assert repr(again) == repr(made)
    assert math.isnan(MeasuredMfu(math.nan))


def test_dtypes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype, expected in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float64, "fp64")):
            assert precise._find_dtype(torch.nn.Linear(2, 2).to(dtype)) == expected
        assert precise._find_dtype(torch.nn.Linear(2, 2)) == "fp32"
        assert precise._find_dtype(torch.nn.Module()) == "fp32"
        assert precise._find_dtype("a name") == "bf16"


def test_dtypes_with_tf32_or_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopcalc.monitor.instruments._allows_tf32", lambda: True)
    assert precise._find_dtype(torch.nn.Linear(2, 2)) == "tf32"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _kind: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _kind: torch.bfloat16)
    assert precise._find_dtype(torch.nn.Linear(2, 2)) == "bf16"
