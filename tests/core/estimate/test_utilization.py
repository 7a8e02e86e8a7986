"""MFU and HFU: exact shares, never clamped, None with a note where no peak is known."""

from __future__ import annotations

import math
from typing import Any

import pytest

import flopcalc
from flopcalc import DeviceError, FlopcalcError, Utilization, bind, calculate_mfu, get_gpu_peak_flops, hfu, mfu
from flopcalc.compat import profile_model_flops
from flopcalc.core.estimate.utilization import FormatPeak, describe_least_time, find_peak

MODEL = "sweep-tiny"
RECIPE = {"recompute": "full"}


def test_mfu_is_flops_over_time_and_peak() -> None:
    estimate = flopcalc.estimate_flops(MODEL, batch_size=2, seq_len=128, gpus=2)
    assert estimate.total == bind(MODEL)(4, 128).total
    share = mfu(estimate, 0.5, peak=1e12)
    assert share == mfu(estimate, 0.5, peak=1e12, num_devices=2)
    assert share.value == estimate.total / (0.5 * 1e12 * 2)
    assert share == Utilization(share.value, 1e12, None, "bf16", None, (FormatPeak("bf16", estimate.total, 1e12),))
    assert float(share) == share.value
    assert share.to_dict() == {
        "value": share.value,
        "peak_flops_per_s": 1e12,
        "device": None,
        "dtype": "bf16",
        "of_bf16_peak": None,
        "peaks": [{"format": "bf16", "flops": estimate.total, "peak_flops_per_s": 1e12}],
    }


def test_mfu_is_never_of_convention_hardware() -> None:
    needed, full, executed = (
        bind(MODEL, recipe=RECIPE, convention=convention)(4, 256) for convention in ("model", "full", "hardware")
    )
    assert needed.total < full.total < executed.total
    arguments: dict[str, Any] = {"peak": 1e12}
    assert mfu(executed, 1, **arguments).value == needed.total / 1e12
    assert mfu(full, 1, **arguments).value == full.total / 1e12
    for estimate in (needed, full, executed):
        assert hfu(estimate, 1, **arguments).value == executed.total / 1e12


@pytest.mark.parametrize(
    ("convention", "kernel", "is_noted"),
    [("full", "flash", True), ("full", "eager", False), ("model", "flash", False), ("hardware", "flash", False)],
)
def test_an_mfu_above_the_hfu_is_explained(convention: str, kernel: str, is_noted: bool) -> None:
    """Causal attention over a long sequence: full counts every pair, the fused kernel about half of them."""
    estimate = bind("llama-3.2-1b", convention=convention, attention_kernel=kernel)(1, 8192)
    share, executed = mfu(estimate, 1, peak=1e15), hfu(estimate, 1, peak=1e15)
    assert (float(share) > float(executed)) == is_noted
    assert ("above the HFU" in (share.note or "")) == is_noted
    both = mfu(estimate, 1e-9, peak=1e15).note or ""
    assert "above 1" in both
    assert ("above the HFU" in both) == is_noted


@pytest.mark.parametrize("kernel", ["auto", "flash", "eager"])
def test_hfu_is_counted_for_the_device(kernel: str) -> None:
    """As where the device was named first; a kernel that was asked for stays, and so do the tables in every change."""
    plain, on = (bind("gpt2", attention_kernel=kernel, device=device) for device in (None, "h200"))
    assert hfu(plain(3, 1000), 1, device="h200") == hfu(on(3, 1000), 1, device="h200")
    assert plain(3, 1000).total_under("hardware") == hfu(plain(3, 1000), 1, peak=1).peaks[0].flops
    for again in (on.change(recompute="none"), on.change(convention="full"), on.change(compute="fp16")):
        assert again(3, 1000).total_under("hardware") == on(3, 1000).total_under("hardware")
    whole = on.change(recompute="full-reentrant")(3, 1000)
    assert whole.total_under("hardware") == hfu(whole, 1, device="h200").peaks[0].flops > on(3, 1000).total
    other = hfu(on(3, 1000), 1, device="a100-sxm-80gb")
    assert other == hfu(
        bind("gpt2", attention_kernel=kernel, device="a100-sxm-80gb")(3, 1000), 1, device="a100-sxm-80gb"
    )


def test_in_float32_sdpa_takes_no_flash() -> None:
    kernels = {dtype: bind("gpt2", device="h200", dtype=dtype).attention_kernel for dtype in ("bf16", "fp32", "tf32")}
    assert kernels == {"bf16": "cudnn", "fp32": "efficient", "tf32": "efficient"}
    assert bind("gpt2", device="h200").change(compute="fp32").attention_kernel == "efficient"


def test_device_and_dtype() -> None:
    share = mfu(bind(MODEL)(1, 64), 1e-3, device="h200", dtype="fp8")
    assert (share.device, share.dtype, share.peak_flops_per_s) == ("NVIDIA H200", "fp8", 1978.9e12)
    assert mfu(bind(MODEL)(1, 64), 1e-3, device="h200", peak=5e12).peak_flops_per_s == 5e12


def test_above_one_is_reported_as_is() -> None:
    share = mfu(bind(MODEL)(1, 64), 1.0, peak=1000.0)
    assert share.value is not None
    assert share.value > 1
    assert share.note is not None
    assert "MFU is" in share.note
    assert "above 1" in share.note


@pytest.mark.parametrize("found", [None, "NVIDIA Unheard-of 9000"])
def test_unknown_detected_device_gives_none_and_a_note(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    monkeypatch.setattr("flopcalc.core.estimate.utilization.detect_device", lambda: found)
    share = mfu(bind(MODEL)(1, 64), 1.0, device="auto")
    assert share.value is None
    assert share.to_dict() is None
    assert math.isnan(float(share))
    assert share.note is not None
    assert " peak" in share.note
    assert found is None or found in share.note
    with pytest.raises(DeviceError, match=r"peak=FLOPS_PER_S|or give peak"):
        get_gpu_peak_flops()
    assert mfu(bind(MODEL)(1, 64), 1.0, device="auto", peak=1e12).value is not None
    with pytest.raises(FlopcalcError, match="peak must be a positive number"):
        mfu(bind(MODEL)(1, 64), 1.0, device="auto", peak=-1e12)


def test_detected_device_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopcalc.core.estimate.utilization.detect_device", lambda: "NVIDIA L4")
    assert get_gpu_peak_flops() == 121e12
    assert find_peak("auto", "bf16", None) == ("NVIDIA L4", 121e12, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step_time_s": 0}, "step_time_s must be a positive number, not 0"),
        ({"step_time_s": -1.0}, "step_time_s"),
        ({"step_time_s": math.nan}, "step_time_s"),
        ({"step_time_s": math.inf}, "step_time_s"),
        ({"step_time_s": "1x"}, "step_time_s"),
        ({"step_time_s": True}, "step_time_s"),
        ({"peak": 0}, "peak must be a positive number"),
        ({"peak": math.nan}, "peak"),
        ({"peak": "1e12x"}, "peak"),
        ({"peak": 1e-300, "step_time_s": 1e-300}, "must be between 1e-60 and 1e+60, not 1e-300"),
        ({"num_devices": 0}, "num_devices must be at least 1"),
        ({"num_devices": 1.5}, "num_devices must be a whole number"),
        ({"dtype": "fp7"}, "dtype 'fp7' unknown"),
        ({"peak": None}, "MFU needs a peak"),
        ({"peak": None, "device": "tpu"}, "is ambiguous"),
        ({"peak": None, "device": "h2000"}, "unknown"),
        ({"peak": None, "device": 5}, "named by a string"),
        ({"peak": None, "device": "t4", "dtype": "bf16"}, "no known bf16 peak"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], words: str) -> None:
    estimate = bind(MODEL)(1, 64)
    with pytest.raises(FlopcalcError) as caught:
        mfu(estimate, **{"step_time_s": 1.0, "peak": 1e12, **arguments})
    assert words in str(caught.value)


def test_first_names() -> None:
    assert calculate_mfu(10.0, 2.0, 5.0) == 1.0
    assert get_gpu_peak_flops("h200") == 989.4e12
    batch = {"input_ids": [[0] * 16]}
    assert profile_model_flops(MODEL, batch) == flopcalc.estimate_flops(MODEL, seq_len=16).total
    with pytest.raises(FlopcalcError, match="step time"):
        calculate_mfu(10.0, 0.0, 5.0)


def test_measured_mfu_comes_from_steps_of_like_size_and_kind(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flopcalc.core.estimate.utilization import describe_measured_mfu
    from flopcalc.hardware.tables import save_table

    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    estimate = flopcalc.estimate_flops("llama-3.2-1b", seq_len=2048)
    flops = estimate.total
    about = {"device": "X", "device_id": "a40", "date": "2026-11-15", "torch": "2", "command": "flopcalc calibrate"}
    rows = [
        {"model": "near", "batch": 1, "seq": 1, "images": "", "model_flops": flops * 2, "mfu": 0.25, "seconds": 1.0},
        {"model": "near too", "batch": 1, "seq": 1, "images": "", "model_flops": flops, "mfu": 0.5, "seconds": 1.0},
        {"model": "far", "batch": 1, "seq": 1, "images": "", "model_flops": flops * 9, "mfu": 0.9, "seconds": 1.0},
        {"model": "vlm", "batch": 1, "seq": 1, "images": "1x2x2", "model_flops": flops, "mfu": 0.1, "seconds": 1.0},
    ]
    rows = [{"attention": "sdpa", "recompute": "none", **row} for row in rows]
    save_table(str(tmp_path / "calibration" / "a40"), "steps", about, rows)
    said = describe_measured_mfu("a40", estimate)
    assert said is not None
    assert "2 training steps" in said
    assert "25 to 50 %" in said
    assert "measured elsewhere, not a prediction" in said
    assert describe_measured_mfu("a40", flopcalc.estimate_flops("llama-3.2-1b", seq_len=2048, phase="forward")) is None
    assert describe_measured_mfu("l4", estimate) is None
    image = flopcalc.estimate_flops("qwen2-vl-2b", seq_len=2048, image_grid_thw=[[1, 36, 52]])
    alone = str(describe_measured_mfu("a40", image))
    assert alone.startswith("1 training step of another model measured on X (2026-11-15), of ")
    assert alone.endswith(" times these FLOPs, reached an MFU of 10 %: measured elsewhere, not a prediction")
    assert " to " not in alone


# --- several number formats -------------------------------------------------------------------------------------------
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def quantize(**options: object) -> flopcalc.Estimate:
    config = {**bind("llama-3.1-8b").source.config, "quantization_config": FP8}
    return flopcalc.estimate_flops(config, seq_len=2048, phase="prefill", **options)


def test_mixed_formats_are_ideal_time_over_measured_time() -> None:
    """The example of docs/conventions.md: linear layers in fp8, attention and the head in bf16."""
    estimate = quantize()
    flops = {name: sums.total for name, sums in estimate.by_dtype("model").items()}
    assert flops == {
        "fp8": 28_587_302_322_176,
        "bf16": 1_101_099_171_840,
    }  # 2 x 32 x 256 x pairs x 32, head of one token
    ideal = flops["fp8"] / 1978.9e12 + flops["bf16"] / 989.4e12
    share = mfu(estimate, 0.05, device="h200")
    assert share.value == pytest.approx(ideal / 0.05, rel=1e-12)
    assert (round(share.value, 4), share.dtype) == (0.3112, "fp8+bf16")
    assert share.peaks == (FormatPeak("fp8", flops["fp8"], 1978.9e12), FormatPeak("bf16", flops["bf16"], 989.4e12))
    assert share.of_bf16_peak == sum(flops.values()) / (0.05 * 989.4e12)
    assert share.peak_flops_per_s == sum(flops.values()) / ideal
    with pytest.warns(FutureWarning, match="this estimate is of 1 GPU, not 2: give gpus=2 to estimate_flops instead"):
        half = mfu(estimate, 0.05, device="h200", gpus=2)
    assert half.value == pytest.approx(share.value / 2)
    assert mfu(quantize(gpus=2), 0.05, device="h200").value == pytest.approx(share.value)
    executed = hfu(estimate, 0.05, device="h200")
    assert [peak.format for peak in executed.peaks] == ["fp8", "bf16"]
    assert sum(peak.flops for peak in executed.peaks) == quantize(device="h200").total_under("hardware")


def test_one_format_for_all_and_peaks_by_hand() -> None:
    estimate = quantize()
    one = mfu(estimate, 0.05, device="h200", dtype="fp8")
    assert one.value == estimate.total / (0.05 * 1978.9e12)
    assert mfu(estimate, 0.05, peak=1e15).value == pytest.approx(estimate.total / (0.05 * 1e15))
    both = mfu(estimate, 0.05, peak={"bf16": 1e15, "fp8": 2e15})
    assert [peak.peak_flops_per_s for peak in both.peaks] == [2e15, 1e15]
    assert both.of_bf16_peak == estimate.total / (0.05 * 1e15)
    mixed = mfu(estimate, 0.05, device="h200", peak={"fp8": 2e15})  # the rest from the table
    assert [peak.peak_flops_per_s for peak in mixed.peaks] == [2e15, 989.4e12]
    with pytest.raises(DeviceError, match="peak has no fp8: give fp8=FLOPS_PER_S too"):
        mfu(quantize(compute="fp8"), 0.05, peak={"fp16": 1e15})


def test_a_format_that_the_device_lacks_counts_at_its_fallback() -> None:
    share = mfu(quantize(), 0.05, device="a100-sxm-80gb")
    assert {peak.peak_flops_per_s for peak in share.peaks} == {312e12}
    assert "has no fp8 peak: fp8 products count at its bf16 peak" in (share.note or "")
    four = flopcalc.estimate_flops(MODEL, seq_len=64, weights="nvfp4")
    peaks = {peak.format: peak.peak_flops_per_s for peak in mfu(four, 1.0, device="b200-sxm").peaks}
    assert peaks == {"nvfp4": 9000e12, "bf16": 2250e12}
    with pytest.raises(DeviceError, match="no known fp8 peak"):  # asked for by name
        mfu(quantize(), 0.05, device="a100-sxm-80gb", dtype="fp8")
    assert mfu(quantize(), 0.05, device="h100").note == "h100 taken as h100-sxm; h100-pcie and h100-nvl differ"


def test_float32_adapters_count_at_the_vector_peak() -> None:
    estimate = flopcalc.estimate_flops("llama-3.2-1b", seq_len=512, lora="r=16,targets=all-linear")
    peaks = {peak.format: peak.peak_flops_per_s for peak in mfu(estimate, 1.0, device="h200").peaks}
    assert peaks == {"bf16": 989.4e12, "fp32": 66.9 * 1e12}
    said = "fp32 products are 17 % of the least time; most papers take one peak for all"
    assert (mfu(estimate, 1.0, device="h200").note or "").startswith(said)
    fast = flopcalc.estimate_flops("llama-3.2-1b", seq_len=512, compute="tf32")
    assert mfu(fast, 1.0, device="h200").peak_flops_per_s == 494.7e12


def test_a_share_formats_as_a_number() -> None:
    share = mfu(flopcalc.estimate_flops("llama-3.1-8b", seq_len=4096), step_time_s=0.5, device="h100-sxm")
    assert f"{share:.1%}" == "39.9%"
    assert f"{share}" == str(share)


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (
            {"phase": "decode", "context": 4096, "seq_len": 1},
            ["this takes at least 0.15 ms, and to read 131.42 GiB of weights at least 42.12 ms", "do not fit on 1 ×"],
        ),
        # Each replica reads all weights: more of them make a step no shorter, and hold no larger model.
        (
            {"phase": "decode", "context": 4096, "seq_len": 1, "gpus": 8},
            ["0.15 ms, and for each GPU to read 131.42 GiB of weights at least 42.12 ms", "do not fit on 1 ×"],
        ),
        (
            {"phase": "decode", "context": 4096, "seq_len": 1, "gpus": 8, "tp": 4},
            ["0.04 ms, and for each group of 4 GPUs to read 131.42 GiB of weights at least 10.53 ms"],
        ),
        (
            {"phase": "decode", "context": 4096, "seq_len": 1, "gpus": 8, "tp": 8},
            ["0.02 ms, and to read 131.42 GiB of weights at least 5.27 ms"],
        ),
        ({"seq_len": 4096, "gpus": 8}, ["this takes at least 1.79 s; "]),
    ],
)
def test_the_least_time_is_that_of_compute_or_of_weights(setup: dict[str, Any], expected: list[str]) -> None:
    notes = describe_least_time(
        flopcalc.estimate_flops("llama-3.1-70b", **setup), device="h100-sxm", dtype=None, peak=None
    )
    for words in expected:
        assert any(words in note for note in notes), notes
    assert any("do not fit" in note for note in notes) == (len(expected) > 1)


@pytest.mark.parametrize(("batch", "gib"), [(1, "10.64 GiB"), (8, "57.37 GiB"), (64, "217.61 GiB")])
def test_a_batch_reads_the_experts_that_its_tokens_reach(batch: int, gib: str) -> None:
    """gpt-oss-120b: 4 of 128 experts for each token; 32 tokens reach all of them where routing is even."""
    estimate = flopcalc.estimate_flops("gpt-oss-120b", phase="decode", context=65536, seq_len=1, batch_size=batch)
    assert f"to read {gib} of weights" in describe_least_time(estimate, device="h100-sxm", dtype=None, peak=None)[0]
