"""The short keywords of the public functions: each counts as its long way, and two ways at once are refused."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import (
    FlopcalcError,
    RecipeError,
    WorkloadError,
    bind,
    estimate_flops,
    hfu,
    make_recipe,
    mfu,
    plan,
    predict,
)

LORA = "r=8,targets=q_proj+v_proj"
IMAGES = [(1024, 768), (640, 480)]
GRIDS = [[1, 54, 74], [1, 34, 46]]  # of qwen2-vl: multiples of 28 pixels, 14 a patch


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"lora": LORA}, {"recipe": {"lora": {"r": 8, "targets": ["q_proj", "v_proj"]}}}),
        (
            {"lora": {"r": 8, "targets": "q_proj"}, "recipe": {"recompute": "full"}},
            {"recipe": {"lora": {"r": 8, "targets": "q_proj"}, "recompute": "full"}},
        ),
        ({"recompute": "full", "convention": "hardware"}, {"recipe": {"recompute": "full"}, "convention": "hardware"}),
    ],
)
def test_recipes(short: dict[str, Any], long: dict[str, Any]) -> None:
    assert estimate_flops("sweep-tiny", seq_len=64, **short) == estimate_flops("sweep-tiny", seq_len=64, **long)
    assert bind("sweep-tiny", **short)(1, 64) == bind("sweep-tiny", **long)(1, 64)


def test_images_in_pixels() -> None:
    arguments: dict[str, Any] = {"seq_len": 1500, "batch_size": 2}
    found = estimate_flops("qwen2-vl-2b", **arguments, images=IMAGES)
    assert found == estimate_flops("qwen2-vl-2b", **arguments, image_grid_thw=GRIDS)
    assert bind("qwen2-vl-2b")(2, 1500, images=IMAGES) == found
    fixed = estimate_flops("llava-1.5-7b", seq_len=999, images=[(10, 10)])
    assert any("one square" in note for note in fixed.notes)


def test_micro_batches() -> None:
    one = estimate_flops("sweep-tiny", seq_len=64)
    assert estimate_flops("sweep-tiny", seq_len=64, grad_accum=8) == 8 * one
    batch = {"input_ids": [[0] * 64]}
    assert estimate_flops("sweep-tiny", batch=batch, grad_accum=8).total == 8 * one.total


@pytest.mark.parametrize("share", [mfu, hfu])
def test_shares(share: Any) -> None:
    estimate = estimate_flops("sweep-tiny", seq_len=64, batch_size=5)
    with pytest.warns(FutureWarning, match="this estimate is of 1 GPU, not 8"):
        expected = share(estimate, 0.5, peak=1e12, num_devices=8)
    with pytest.warns(FutureWarning, match="the next release refuses"):
        assert share(estimate, 0.5, peak=1e12, gpus=8) == expected
    job = estimate_flops("sweep-tiny", seq_len=64, batch_size=5, gpus=8)  # five on each
    assert (job.total, job.gpus, job.global_batch) == (8 * estimate.total, 8, 40)
    assert share(job, 0.5, peak=1e12).value == pytest.approx(8 * expected.value, rel=1e-12)
    assert share(job, tokens_per_second=8 * 640, peak=1e12, gpus=8) == share(job, 0.5, peak=1e12)
    for wrong, words in (
        ({"step_time_s": 0.5, "tokens_per_second": 1}, "both given"),
        ({}, "both missing"),
        ({"tokens_per_second": 0}, "tokens_per_second must be a positive number"),
        ({"step_time_s": 1, "gpus": 2, "num_devices": 3}, "gpus 2 contradicts num_devices 3"),
        ({"step_time_s": 1, "gpus": 0}, "gpus must be at least 1"),
    ):
        with pytest.raises(FlopcalcError, match=words):
            share(estimate, **wrong, peak=1e12)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"lora": LORA, "recipe": {"lora": LORA}}, RecipeError, "lora is given twice"),
        ({"recompute": "full", "recipe": make_recipe()}, RecipeError, "give it to make_recipe"),
        ({"grad_accum": 0}, WorkloadError, "grad_accum must be at least 1"),
        ({"grad_accum": 2, "phase": "forward"}, WorkloadError, "grad_accum belongs to phase train, not forward"),
        ({"images": [(10, 10)]}, WorkloadError, "is a text model: it takes no images"),
    ],
)
def test_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        estimate_flops("sweep-tiny", seq_len=64, **arguments)


def test_images_refused() -> None:
    for images, words in (([10], r"is not \(width, height\)"), ([(0, 5)], "image width must be at least 1")):
        with pytest.raises(WorkloadError, match=words):
            estimate_flops("qwen2-vl-2b", seq_len=64, images=images)  # type: ignore[arg-type]
    both = estimate_flops("qwen2-vl-2b", seq_len=2000, batch_size=2, images=IMAGES, image_grid_thw=GRIDS)
    assert both == estimate_flops("qwen2-vl-2b", seq_len=2000, batch_size=2, image_grid_thw=[*GRIDS, *GRIDS])
    with pytest.raises(WorkloadError, match="batch already says"):
        estimate_flops("qwen2-vl-2b", batch={"input_ids": [[0]]}, images=IMAGES)


def test_predict_and_plan_take_them_too() -> None:
    arguments: dict[str, Any] = {"device": "h200", "seq_len": 1500, "memory": False, "advise": False}
    recipe: dict[str, Any] = {"lora": LORA, "recompute": "full"}
    short = predict("qwen2-vl-2b", **arguments, images=IMAGES[:1], **recipe)
    long = predict("qwen2-vl-2b", **arguments, image_grid_thw=GRIDS[:1], recipe=recipe)
    assert short.step_time_s == long.step_time_s
    run: dict[str, Any] = {"tokens": "1B", "device": "h200", "gpus": 2, "seq_len": 1500, "global_batch": 8, "top": 1}
    one = plan("qwen2-vl-2b", **run, images=IMAGES[:1], lora=LORA)
    other = plan(bind("qwen2-vl-2b", lora=LORA), **run, images=IMAGES[:1])
    assert one.best == other.best
    with pytest.raises(WorkloadError, match="already has its recipe"):
        plan(bind("qwen2-vl-2b"), **run, lora=LORA)


@pytest.mark.parametrize("name", ["step_time_s", "tokens_per_second", "tokens", "mfu"])
def test_what_is_no_part_of_an_estimate_is_refused(name: str) -> None:
    with pytest.raises(WorkloadError, match=f"estimate_flops takes no {name}: mfu"):
        estimate_flops("gpt2", seq_len=8, **{name: 0.5 if name == "mfu" else 1e3})  # type: ignore[arg-type]


def test_false_says_something() -> None:
    """No guidance halves a step of sampling; without memory none is predicted."""
    images: dict[str, Any] = {"images": [(64, 64)], "sampling_steps": 2, "parts": "denoiser"}
    guided, plain = (estimate_flops("sd3-medium", **images, guidance=guidance).total for guidance in (None, False))
    assert guided == 2 * plain
    assert predict("gpt2", seq_len=64, device="h200", memory=False, advise=False).memory is None
