"""What is supported: the mappings are those of the pinned transformers, and docs/models.md says what the data says."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner
from places import ROOT

from flopcalc.base.data import load_toml
from flopcalc.cli.catalogue import models
from flopcalc.core.spec.coverage import load_coverage

sys.path.insert(0, str(ROOT / "docs"))

import make_models as page

COVERAGE = load_coverage()


def test_page_is_fresh() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.make_page(), "run python docs/make_models.py"


def test_catalogue_is_fresh() -> None:
    """Parameters and all else that `flopcalc models` lists are what the specs and presets give."""
    assert page.CATALOGUE.read_text(encoding="utf-8") == page.format_catalogue(), "run python docs/make_models.py"


def test_mappings_are_those_of_transformers() -> None:
    version = pytest.importorskip("transformers").__version__
    if COVERAGE.release != f"transformers {version}":
        pytest.skip(f"the mappings are of {COVERAGE.release}")
    tables = load_toml(str(page.COVERAGE))["mappings"]
    assert {name: mapping["types"] for name, mapping in tables.items()} == page.read_mappings()


def test_the_release_is_the_pinned_one() -> None:
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert COVERAGE.release.replace(" ", "==") in pinned


@pytest.mark.parametrize("mapping", COVERAGE.mappings, ids=lambda mapping: mapping.name)
def test_a_type_without_a_spec_has_a_reason(mapping: page.AutoMapping) -> None:
    assert not [entry.model_type for entry in mapping.entries if entry.spec is None and not entry.reason]


def test_no_reason_for_what_has_a_spec() -> None:
    missing = {entry.model_type for mapping in COVERAGE.mappings for entry in mapping.entries if entry.spec is None}
    assert set(load_toml(str(page.COVERAGE))["reasons"]) <= missing


def test_command() -> None:
    shown = CliRunner().invoke(models, ["--coverage"])
    assert shown.exit_code == 0
    first = COVERAGE.mappings[0]
    assert f"{first.auto_class}" in shown.output
    found = json.loads(CliRunner().invoke(models, ["--coverage", "--json"]).output)
    assert [each["supported"] for each in found["mappings"]] == [mapping.supported for mapping in COVERAGE.mappings]
