"""What a spec says of another that it extends, and of modules and parameters that are shared, bare or never train."""

from __future__ import annotations

from pathlib import Path

from flopcalc.api import bind
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.recipe.recipe import make_recipe
from flopcalc.core.workload.workload import make_workload

BASE = """
architecture = "TernForMaskedLM"
source       = "a test"
[defaults]
heads = 3
[dims]
many = ["heads", "5"]
[blocks]
shared = [
  { op = "linear", name = "fc", in = "4", out = "4", bias = "true", again = "i > 0" },
  { op = "norm", name = "norm", dim = "4", again = "i > 0" },
]
[[stack]]
path = "tern.embed"
ops  = [{ op = "embed", count = "9", dim = "4" }]
[[stack]]
path   = "tern.layers"
repeat = "2"
ops    = [{ block = "shared", under = "/tern.layers.{zero}" }]
[[stack]]
path = "tern.experts"
ops  = [
  { op = "linear", param = "up", targets = "[]", in = "4", out = "many" },
  { op = "param", name = "bias", size = "7", detached = true },
]
"""
SPECS = {
    "tern": BASE.replace("[dims]\n", '[dims]\nzero = "0"\n'),
    "gull": 'extends = "tern"\narchitecture = "GullForMaskedLM"\nsource = "a test"\n[defaults]\nheads = "none"\n'
    '[rename]\n"tern.experts" = "gull.moe"\ntern = "gull"\n',
    "skua": 'extends = "gull"\narchitecture = "SkuaForMaskedLM"\nsource = "a test"\n[rename]\ngull = "skua"\n',
}


def count(folder: Path, name: str, **recipe: object) -> Estimate:
    for other, text in SPECS.items():
        (folder / f"{other}.toml").write_text(text)
    made = make_recipe(**recipe)  # type: ignore[arg-type]
    estimator = bind({"model_type": name}, spec=str(folder / f"{name}.toml"), recipe=made, convention="full")
    return estimator.estimate(make_workload(1, 10))


def test_a_module_that_runs_again_has_its_parameters_once(tmp_path: Path) -> None:
    found = count(tmp_path, "tern")
    rows = {row.path: row for row in found.by_module(per_layer=True)}
    assert rows["tern.layers.0.fc"].forward == 2 * (2 * 4 * 4) * 10
    assert found.parameters["total"] == 9 * 4 + (4 * 4 + 4 + 4) + 4 * 3 + 7


def test_a_parameter_that_never_trains_is_not_trainable(tmp_path: Path) -> None:
    parameters = count(tmp_path, "tern").parameters
    assert parameters["total"] - parameters["trainable"] == 7


def test_lora_leaves_bare_weights_alone_that_peft_maps_nothing_to(tmp_path: Path) -> None:
    assert count(tmp_path, "tern", lora="r=2,targets=all-linear").parameters["trainable"] == 2 * (4 + 4)


def test_paths_are_renamed_and_renamed_again(tmp_path: Path) -> None:
    gull = [row.path for row in count(tmp_path, "gull").by_module() if row.forward]
    skua = [row.path for row in count(tmp_path, "skua").by_module() if row.forward]
    assert gull == ["gull.layers.0.fc", "gull.moe"]
    assert skua == ["skua.layers.0.fc", "skua.moe"]


def test_none_takes_a_default_back(tmp_path: Path) -> None:
    rows = {row.path: row for row in count(tmp_path, "gull").by_module()}
    assert rows["gull.moe"].forward == 2 * 4 * 5 * 10
