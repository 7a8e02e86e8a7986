"""Fitted numbers are data: each has its source, a predictor file may set one anew, and few are left in code."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from math import log10
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import SpecError
from flopcalc.prediction.kernels import defaults
from flopcalc.prediction.kernels.constants import load_predictor
from flopcalc.prediction.kernels.defaults import load_defaults
from flopcalc.prediction.kernels.machine import Machine

MOST_IN_CODE = 30
SHIPPED = Path(find_data_dir()) / "predictors"


def is_plain(value: float) -> bool:
    """Zero, one, a half, two, and powers of ten: units, not measurements."""
    size = abs(value)
    return size in (0.0, 0.5, 1.0, 2.0) or log10(size).is_integer()


def test_few_numbers_are_left_in_code() -> None:
    found = [
        f"{path.name}:{node.lineno} {node.value}"
        for path in sorted((ROOT / "flopcalc" / "prediction").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and not is_plain(node.value)
    ]
    assert len(found) <= MOST_IN_CODE, found


def test_every_default_has_its_source() -> None:
    data = json.loads((SHIPPED / defaults.FILE).read_text(encoding="utf-8"))
    assert data.pop("schema") == 1
    assert tuple(data) == defaults.Defaults._fields
    for name, section in data.items():
        assert tuple(section) == getattr(load_defaults(), name)._fields
        for key, entry in section.items():
            assert entry.keys() == {"value", "source"}, key
            assert len(entry["source"]) > 20, key


@pytest.fixture
def use_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a changed copy of the shipped file this machine's own."""
    (tmp_path / "predictors").mkdir()
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))

    def use(change: Callable[[Any], object]) -> Machine:
        data = json.loads((SHIPPED / "h200-sxm.json").read_text(encoding="utf-8"))
        change(data)
        (tmp_path / "predictors" / "h200-sxm.json").write_text(json.dumps(data))
        load_predictor.cache_clear()
        return Machine("h200")

    yield use
    load_predictor.cache_clear()


def test_a_file_of_an_older_version_is_read(use_file: Any) -> None:
    machine = use_file(lambda data: data["products"].pop("tiles"))
    assert machine.is_own
    assert machine.fitted == load_defaults().device
    assert machine.tiles == ""


def test_a_device_may_have_its_own(use_file: Any) -> None:
    machine = use_file(lambda data: data.update(fitted={"graph_gap_s": 1e-6}))
    assert machine.fitted == load_defaults().device._replace(graph_gap_s=1e-6)


@pytest.mark.parametrize(
    ("fitted", "words"),
    [
        ({"graph_gap": 1e-6}, "has a name or a value that defaults.json has not"),
        ({"graph_gap_s": "short"}, "has a name or a value that"),
        ({"interval": {"experts": 0.1}}, "has a name or a value that"),
        ([], "is no mapping"),
    ],
)
def test_what_is_wrong_is_said(use_file: Any, fitted: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        use_file(lambda data: data.update(fitted=fitted))


def test_an_unknown_table_of_tiles_is_refused(use_file: Any) -> None:
    with pytest.raises(SpecError, match="'volta' is no table of tiles"):
        use_file(lambda data: data["products"].update(tiles="volta"))


def test_a_broken_installation_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "predictors").mkdir()
    (tmp_path / "predictors" / defaults.FILE).write_text('{"schema": 1, "device": {}}')
    monkeypatch.setattr(defaults, "find_data_dir", lambda: str(tmp_path))
    with pytest.raises(SpecError, match="install it again"):
        load_defaults.__wrapped__()
