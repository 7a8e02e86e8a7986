"""Which classes and pipelines of diffusers are counted, by command."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from places import ROOT

from flopcalc.base.data import load_toml
from flopcalc.cli.catalogue import models
from flopcalc.core.spec.coverage import DIFFUSERS, list_pipelines, load_coverage

COVERAGE = load_coverage(DIFFUSERS)


def test_every_pipeline_that_is_described_is_one_of_diffusers() -> None:
    named = {entry.model_type: entry for entry in COVERAGE.mappings[-1].entries}
    assert COVERAGE.mappings[-1].name == "pipelines"
    assert {name for name, entry in named.items() if entry.spec is not None} == set(list_pipelines())


def test_no_reason_for_what_is_counted() -> None:
    missing = {entry.model_type for mapping in COVERAGE.mappings for entry in mapping.entries if entry.spec is None}
    tables = load_toml(str(ROOT / "model_specs" / f"{DIFFUSERS}.toml"))
    assert set(tables["reasons"]) <= missing


def test_command() -> None:
    shown = json.loads(CliRunner().invoke(models, ["--coverage", "diffusers", "--json"]).output)
    assert shown["release"].startswith("diffusers ")
    assert [each["auto_class"] for each in shown["mappings"]] == [
        "transformers", "unets", "autoencoders", "controlnets", "pipelines",
    ]  # fmt: skip
    pipelines = {row["model_type"]: row for row in shown["mappings"][-1]["types"]}
    assert pipelines["FluxKontextPipeline"]["spec"] == "FluxKontextPipeline"
    assert pipelines["SanaWMPipeline"]["reason"] == "no spec of SanaWMTransformer3DModel"
    text = CliRunner().invoke(models, ["--coverage", "diffusers"]).output
    assert "its steps are blocks that the user puts together" in text


def test_totals_without_what_makes_no_images() -> None:
    text = CliRunner().invoke(models, ["--coverage", "diffusers"]).output
    rows = {line.split()[0]: [int(word) for word in line.split()[1:]] for line in text.splitlines()[3:8]}
    for mapping in COVERAGE.mappings:
        assert rows[mapping.auto_class] == [
            mapping.supported, len(mapping.entries), len(mapping.entries) - mapping.apart,
        ]  # fmt: skip
    left_out = {
        entry.model_type for entry in COVERAGE.mappings[0].entries if entry.reason == "makes no images or videos"
    }
    assert "StableAudioDiTModel" in left_out
    assert COVERAGE.mappings[0].apart > len(left_out)  # and blocks of other models
    assert "that make images" not in CliRunner().invoke(models, ["--coverage"]).output


def test_the_classes_are_those_of_the_installed_release() -> None:
    diffusers = pytest.importorskip("diffusers")
    if COVERAGE.release != f"diffusers {diffusers.__version__}":
        pytest.skip(f"the mappings are of {COVERAGE.release}")
    from diffusers import models as folders

    names = {name for names in folders._import_structure.values() for name in names}
    listed = {entry.model_type for mapping in COVERAGE.mappings[:-1] for entry in mapping.entries}
    assert listed <= names
