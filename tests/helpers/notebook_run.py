"""A notebook goes in, run whole in a kernel of its own; its figures and what it printed come out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 300  # for a cell
# Run after the last cell: every figure is drawn to a picture, and said by name and number of marks in it.
_PROBE = """
import io as _io, json as _json
_found = {}
for _number in plt.get_fignums():
    _figure, _file = plt.figure(_number), _io.BytesIO()
    _figure.savefig(_file, format="png")
    assert _file.getvalue()[1:4] == b"PNG"
    _found[_figure.get_label()] = sum(len(a.lines) + len(a.collections) + len(a.patches) for a in _figure.axes)
print(_json.dumps(_found))
"""


def execute(
    monkeypatch: pytest.MonkeyPatch, path: Path, folder: Path, parameters: str | None = None
) -> tuple[dict[str, int], str]:
    """Figures (name -> marks) and printed text, run in `folder`; a cell that fails raises.

    `parameters` takes the place of the cell of that tag.
    """
    import nbclient
    import nbformat

    for key, value in {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}.items():
        monkeypatch.setenv(key, value)
    notebook = nbformat.read(path, as_version=4)
    if parameters is not None:
        (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
        cell.source = parameters
    notebook.cells.append(nbformat.v4.new_code_cell(_PROBE))
    nbclient.NotebookClient(
        notebook, timeout=_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    outputs: list[Any] = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    text = "".join(output.text for output in outputs if output.output_type == "stream")  # in as many parts as it likes
    before, found = text.rstrip().rsplit("\n", 1)
    return json.loads(found), before


def check_clean(path: Path) -> None:
    """Committed without outputs, and without a machine's own folders."""
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def check_stored(path: Path, figures: int) -> None:
    """Committed with its outputs, all figures among them and no errors, and without a machine's own folders."""
    outputs = [output for cell in read(path).cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == figures
    assert any(output.output_type == "stream" for output in outputs)


def read(path: Path) -> Any:
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    text = path.read_text(encoding="utf-8")
    assert not [name for name in ("home", "root", "work", "tmp", "Users") if f"/{name}/" in text]
    return notebook


def store(path: Path) -> None:
    """Run a notebook, and keep its outputs in it."""
    import os
    import tempfile

    import nbclient
    import nbformat

    os.environ |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook, timeout=_TIMEOUT_S, resources={"metadata": {"path": folder}}, record_timing=False
        )
        client.execute()
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        store(Path(name))
