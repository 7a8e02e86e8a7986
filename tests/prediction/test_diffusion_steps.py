"""Measured steps of diffusion transformers: what is predicted of them now, and that it holds."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from flopcalc import predict

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = ("diffusion_steps.json", "diffusion_steps_flux.json")
ROWS = [(name, row) for name in FILES for row in json.loads((BENCHMARKS / "results" / name).read_text("utf-8"))["rows"]]


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{row['model']}-{row['step']}" for _, row in ROWS])
def test_measured_steps_lie_in_their_intervals(name: str, row: dict[str, object]) -> None:
    script = runpy.run_path(str(BENCHMARKS / "diffusion_steps.py"))
    now = script["predict_step"](row["model"], "h200-sxm", row["size"], *script["STEPS"][row["step"]])
    # benchmarks/diffusion_steps.py --predict FILE writes them anew
    assert now == pytest.approx(row["predicted"], rel=1e-6), name
    assert now["low"] <= row["seconds"] <= now["high"]


@pytest.mark.parametrize(
    ("model", "parts", "is_recorded"),
    [
        ("flux.1-dev", "denoiser", True),
        ("sd3.5-large", "denoiser", True),
        ("flux.1-dev", None, False),
        ("pixart-sigma", "denoiser", False),
    ],
)
def test_recorded_denoisers_borrow_nothing(model: str, parts: str | None, is_recorded: bool) -> None:
    found = predict(model, device="h200", images=[(1024, 1024)], sampling_steps=2, parts=parts)
    assert found.evidence["operators_recorded"] is is_recorded
    assert any("those of llama are used" in note for note in found.notes) is not is_recorded
    assert not any("has no" in note for note in found.notes)


def test_a_sampling_run_makes_images_not_tokens() -> None:
    found = predict("flux.1-dev", device="h200", images=[(512, 512)], sampling_steps=2, batch_size=3)
    assert found.tokens_per_s is None
    assert found.floors is not None
    assert found.floors.tokens_per_s is None
    assert found.rate == (3 / found.step_time_s.mid, "images")
    assert found.describe_rate().endswith(" images/s")
    # A known price makes an image's cost, and memory has a floor: 16,870,599,139 weights in bf16.
    assert found.price is not None
    assert found.usd is not None
    assert found.usd.mid == pytest.approx(found.price.usd_per_gpu_hour * found.step_time_s.mid / 3600 / 3)
    assert any(note.startswith("memory: at least 31.42 GiB for weights") for note in found.notes)


def test_a_training_step_holds_gradients_and_states_too() -> None:
    found = predict("sdxl", device="h200", optimizer="adamw-master", price="2$")
    # 3,468,837,867 weights in bf16; 2,567,463,684 that train have 4 bytes of gradient, 8 of states, 4 of a copy.
    size = (2 * 3468837867 + 16 * 2567463684) / 2**30
    assert any(note.startswith(f"memory: at least {size:.2f} GiB for weights") for note in found.notes)
    assert found.price is not None
    assert found.price.source == "given"
    videos = predict("wan2.1-1.3b", device="h200", videos=[(832, 480, 17)], sampling_steps=1)
    assert videos.rate[1] == "videos"


def test_a_price_gives_the_cost_of_a_million_tokens() -> None:
    found = predict("qwen2.5-0.5b", seq_len=1024, device="h200", price=3.6, gpus=4)
    assert found.usd is not None
    assert found.tokens_per_s is not None
    assert found.usd.mid == pytest.approx(4 * 3.6 / 3600 * 1e6 / found.tokens_per_s)
    assert predict("qwen2.5-0.5b", seq_len=1024, device="h200").price is None


@pytest.mark.parametrize(("device", "fits"), [("rtx-4090", False), ("h200", None)])
def test_weights_of_a_pipeline_that_do_not_fit_are_said(device: str, fits: bool | None) -> None:
    found = predict("flux.1-dev", device=device, images=["1024x1024"])
    assert found.fits is fits
    assert found.notes[0].startswith("does not fit: weights and states alone take 97.93 GiB") is (fits is False)
