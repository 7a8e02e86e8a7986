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
    assert found.rate == (3 / found.step_time_s.mid, "samples")
    assert found.describe_rate().endswith(" samples/s")


@pytest.mark.parametrize(("device", "fits"), [("rtx-4090", False), ("h200", None)])
def test_weights_of_a_pipeline_that_do_not_fit_are_said(device: str, fits: bool | None) -> None:
    found = predict("flux.1-dev", device=device, images=["1024x1024"])
    assert found.fits is fits
    assert found.notes[0].startswith("does not fit: the weights alone take 31.42 GiB") is (fits is False)
