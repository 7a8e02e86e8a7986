"""Notebooks that explain a question step by step: committed with outputs, run whole, with known numbers."""

from __future__ import annotations

from pathlib import Path

import notebook_run
import pytest

FOLDER = notebook_run.ROOT / "notebooks"
VLM = FOLDER / "vlm_mfu.ipynb"
EXPERTS = FOLDER / "moe_or_dense.ipynb"


@pytest.mark.parametrize("path", [VLM, EXPERTS], ids=lambda path: path.stem)
def test_a_guide_is_committed_with_its_outputs(path: Path) -> None:
    notebook_run.check_stored(path, 3)


@pytest.mark.heavy
def test_mfu_of_a_fine_tune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path / "data"))
    figures, text = notebook_run.execute(monkeypatch, VLM, tmp_path)
    assert list(figures) == ["components", "images", "conventions"]
    assert all(marks > 0 for marks in figures.values())
    assert "327,823,495,790,592 FLOPs, 6,044 tokens" in text  # as flopcalc estimate --text 512 --image 1024x768 counts
    assert "MFU 30.3%" in text


SMALL = """
dense, experts, planned = ["qwen3-0.6b"], ["qwen3-30b-a3b"], ["qwen3-0.6b"]
seq_len, budget_flops, device, gpus, days = 1024, 1e21, "h200", 8, 1
"""


@pytest.mark.heavy
@pytest.mark.parametrize("parameters", [None, SMALL], ids=["as it is", "small"])
def test_what_a_budget_buys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parameters: str | None) -> None:
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path / "data"))
    figures, text = notebook_run.execute(monkeypatch, EXPERTS, tmp_path, parameters)
    assert list(figures) == ["tokens", "length", "hours"]
    assert all(marks > 0 for marks in figures.values())
    if parameters is None:
        assert "qwen3-30b-a3b          30.5B     3.4B         23.1     4.33T" in text
    assert "tokens in" in text
