"""notebooks/dp_sgd_cost.ipynb: committed without outputs, and run whole on the committed results, others and none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flopcalc.measure.sweep.run import save_results

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "dp_sgd_cost.ipynb"
FIGURES = ["side by side", "where the FLOPs go", "time against FLOPs", "how right the count is", "beforehand"]
_TIMEOUT_S = 60  # of a cell
_PROBE = """
import io as _io, json as _json
for _number in plt.get_fignums():
    plt.figure(_number).savefig(_io.BytesIO(), format="png")
print(_json.dumps([plt.figure(_number).get_label() for _number in plt.get_fignums()]))
"""


def execute(monkeypatch: pytest.MonkeyPatch, folder: Path, results: Path | None = None) -> tuple[list[str], str]:
    """Names of the figures, and the printed text; a cell that fails raises."""
    for key, value in {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}.items():
        monkeypatch.setenv(key, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if results is not None:
        (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
        cell.source = f"results = {str(results)!r}"
    notebook.cells.append(nbformat.v4.new_code_cell(_PROBE))
    nbclient.NotebookClient(
        notebook, timeout=_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    before, found = text.rstrip().rsplit("\n", 1)
    return json.loads(found), before


def test_the_notebook_is_committed_clean() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_on_the_committed_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures, text = execute(monkeypatch, tmp_path)
    assert figures == FIGURES
    assert text.startswith("16 configurations: ")


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
