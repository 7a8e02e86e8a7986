"""notebooks/dp_sgd_cost.ipynb: committed with outputs, and run whole on the committed results, others and none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import notebook_run
import pytest

from flopcalc.measure.sweep.run import save_results

NOTEBOOK = notebook_run.ROOT / "notebooks" / "dp_sgd_cost.ipynb"
FIGURES = ["side by side", "where the FLOPs go", "time against FLOPs", "how right the count is", "beforehand"]


def execute(monkeypatch: pytest.MonkeyPatch, folder: Path, results: Path | None = None) -> tuple[list[str], str]:
    parameters = f"results = {str(results)!r}" if results is not None else None
    figures, text = notebook_run.execute(monkeypatch, NOTEBOOK, folder, parameters)
    return list(figures), text


def test_the_notebook_is_committed_with_its_outputs() -> None:
    notebook_run.check_stored(NOTEBOOK, len(FIGURES))


@pytest.mark.heavy
def test_on_the_committed_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures, text = execute(monkeypatch, tmp_path)
    assert figures == FIGURES
    assert text.startswith("16 configurations: ")


@pytest.mark.heavy
@pytest.mark.parametrize("is_measured", [True, False])
def test_on_a_sweep_with_gaps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_measured: bool) -> None:
    row: dict[str, Any] = {
        "id": "DPSGDTrainer_bs4_seq512", "status": "ok", "trainer": "DPSGDTrainer", "model": "tiny", "batch_size": 4,
        "seq_len": 512, "step_time_s": {"median": 0.5}, "peak_memory_bytes": 1 << 30,
        "flops": {"forward": 1, "backward": 2, "clipping": 1, "total": 4}, "measured_over_analytic": 1.01,
    }  # fmt: skip
    failed = {**{key: row[key] for key in ("id", "trainer", "model", "batch_size", "seq_len")}, "status": "failed"}
    path = tmp_path / "results.jsonl"
    save_results(str(path), [row if is_measured else failed])
    figures, text = execute(monkeypatch, tmp_path, path)
    assert "No size was measured with StandardTrainer and another trainer" in text
    if is_measured:
        assert figures == [name for name in FIGURES if name != "time against FLOPs"]
    else:
        assert figures == ["beforehand"]
        assert "No configuration was measured" in text
