"""The adapters against the real packages from PyPI, unpacked: their counters have the ratios that the page shows."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

FRAMEWORKS = (
    "verl",
    "veomni",
    "torchtitan",
    "nemo_automodel",
    "megatron_bridge",
    "composer",
    "llamafactory",
    "ms_swift",
)
OWN_CONFIGS = ("torchtitan", "megatron_bridge")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("frameworks")


def test_the_page_shows_a_ratio_for_every_framework(script: Any) -> None:
    text = script.PAGE.read_text(encoding="utf-8")
    tables = text.partition(script.BEGIN)[2].partition(script.END)[0]
    assert set(script.PACKAGES) == set(FRAMEWORKS) == set(script.RUNNERS)
    for name in FRAMEWORKS:
        assert name in tables, name
    for preset in script.PRESETS:
        assert re.search(rf"^\| {re.escape(preset)} \|( \d+\.\d+ \|| none \|)+$", tables, re.MULTILINE), preset


@pytest.mark.heavy
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ratios_are_those_of_the_page(framework: str, script: Any, tmp_path: Path) -> None:
    try:
        rows = script.measure(framework, tmp_path)
    except SystemExit as error:
        if "cannot be downloaded" in str(error):
            pytest.skip(f"PyPI cannot be reached: {error}")
        raise
    text = script.PAGE.read_text(encoding="utf-8")
    for row in rows:
        cell = "none" if row.ratio is None else f"{row.ratio:.3f}"
        name = f"{framework}: {row.model}" if framework in OWN_CONFIGS else row.model
        assert re.search(rf"^\| {re.escape(name)} \|.*\b{re.escape(cell)} \|", text, re.MULTILINE), (name, cell)
        if framework == "torchtitan":  # theirs is our full, but for the weights of norms
            assert row.theirs / row.full == pytest.approx(1.0, abs=3e-4)
