"""What a spec's blocks can say: names below another module, work done elsewhere, shared weights, nested checkpoints."""

from __future__ import annotations

from pathlib import Path

from flopcalc.api import bind
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.recipe.recipe import make_recipe
from flopcalc.core.workload.workload import make_workload

SPEC = """
architecture = "GullForCausalLM"
source       = "a test"
[dims]
hybrids = "where(kinds, 'h')"
first   = "hybrids[0]"
kinds   = "letters(pattern)"
[blocks]
mixer = [
  { op = "linear", name = "in_proj", in = "4", out = "6" },
  { op = "conv", name = "conv", at = ".", in = "3", out = "6", bias = "true" },
  { op = "linear", name = "dt_proj", at = "core", in = "6", out = "5" },
  { op = "linear", name = "out_proj", in = "5", out = "4" },
]
[[stack]]
path = "embed"
ops  = [{ op = "embed", count = "9", dim = "4", input_embedding = true }]
[[stack]]
path       = "layers"
repeat     = "len(kinds)"
checkpoint = true
ops = [
  { op = "norm", name = "norm", dim = "4", tied = ["kinds[i] == 'h' and i != first", "layers.{first}.norm.weight"] },
  { block = "mixer", under = "mixer", when = "kinds[i] == 'm'" },
  { block = "mixer", under = "wrapped.mixer", when = "kinds[i] == 'h'", checkpoint = true },
]
"""
CONFIG = {"model_type": "gull", "pattern": "mhmh"}


def count(folder: Path, convention: str = "full", **recipe: object) -> Estimate:
    file = folder / "gull.toml"
    file.write_text(SPEC)
    made = make_recipe(**recipe)  # type: ignore[arg-type]
    estimator = bind(CONFIG, spec=str(file), recipe=made, convention=convention, attention_kernel="eager")
    return estimator.estimate(make_workload(1, 10))


def test_names_stand_below_the_block_and_work_where_it_is_done(tmp_path: Path) -> None:
    rows = {row.path: row for row in count(tmp_path).by_module(per_layer=True)}
    assert rows["layers.0.mixer.in_proj"].forward == 2 * 4 * 6 * 10
    assert rows["layers.0.mixer"].forward == 2 * 3 * 6 * 10
    assert rows["layers.0.mixer.conv"].forward == 0
    assert rows["layers.0.mixer.conv"].parameters == 3 * 6 + 6
    assert rows["layers.1.wrapped.mixer.core"].forward == 2 * 6 * 5 * 10


def test_an_adapter_on_a_weight_that_is_read_elsewhere_never_runs(tmp_path: Path) -> None:
    plain = count(tmp_path)
    adapted = count(tmp_path, lora={"r": 2, "targets": ["dt_proj"]})
    assert adapted.forward == plain.forward
    assert adapted.parameters["trainable"] == 4 * 2 * (6 + 5)
    assert adapted.parameters["total"] == plain.parameters["total"] + 4 * 2 * (6 + 5)


def test_a_layer_shares_another_ones_norm(tmp_path: Path) -> None:
    rows = {row.path: row.parameters for row in count(tmp_path).by_module(per_layer=True)}
    assert [rows[f"layers.{i}.norm"] for i in range(4)] == [4, 4, 4, 0]
    frozen = count(tmp_path, freeze="layers.3.norm").parameters
    assert frozen["total"] - frozen["trainable"] == 4  # layer 1's, which it is


def test_a_checkpoint_inside_a_checkpoint_runs_again_twice_if_reentrant(tmp_path: Path) -> None:
    for recompute, times in (("full", 1), ("full-reentrant", 2)):
        estimate = count(tmp_path, "hardware", recompute=recompute)
        rows = {row.path: row for row in estimate.by_module(per_layer=True)}
        plain, nested = rows["layers.2.mixer.in_proj"], rows["layers.3.wrapped.mixer.in_proj"]
        assert plain.recompute == plain.forward
        assert nested.recompute == times * nested.forward
