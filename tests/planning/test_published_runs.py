"""Published runs: every one divides and is predicted, and the errors stay where the page says they are."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from places import ROOT

from flopcalc.hardware.devices import load_devices
from flopcalc.hardware.systems import load_system
from flopcalc.planning.network import load_interconnects

SCRIPT = ROOT / "benchmarks" / "published_runs.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_runs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machines(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The devices that only these runs have."""
    caches = (load_devices, load_system, load_interconnects)
    monkeypatch.setenv("FLOPCALC_DATA", str(script.MACHINES))
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.heavy
@pytest.mark.usefixtures("machines")
def test_errors_stay(script: ModuleType) -> None:
    sources, runs = script.load_runs()
    tuned = set(sorted(sources)[::2])
    usual = {name: source.get("overlaps", {}) for name, source in sources.items()}
    rows = [script.predict_run(run, usual[run["source"]]) | {"is_tuned": run["source"] in tuned} for run in runs]
    assert len(rows) >= 90
    assert {row["source"] for row in rows} == set(sources)
    for is_tuned, most in ((True, 0.12), (False, 0.18)):
        assert script.summarize([row for row in rows if row["is_tuned"] is is_tuned])["median_error"] < most
    summary = script.summarize(rows)
    assert summary["median_error"] < 0.15
    assert summary["inside"] > 0.65
    exact = [row for row in rows if row["source"] == "korthikanti"]
    assert all(abs(row["error"]) < 0.1 for row in exact)


def test_what_is_written_keeps_a_no(script: ModuleType) -> None:
    row = {"fits": False, "share": 0.0, "error": 0.123456, "parts": {"none": 0, "one": 1}}
    assert script.round_numbers(row) == {"fits": False, "error": 0.1235, "parts": {"one": 1}}


def test_the_page_has_a_place_for_the_tables(script: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"a\n{script.BEGIN}\nold\n{script.END}\nb\n", encoding="utf-8")
    script.write_page(page, "new")
    assert page.read_text(encoding="utf-8") == f"a\n{script.BEGIN}\nnew\n{script.END}\nb\n"
    page.write_text("nothing", encoding="utf-8")
    with pytest.raises(SystemExit, match="has no"):
        script.write_page(page, "new")
