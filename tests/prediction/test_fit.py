"""The fit: each part finds constants that its input was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flopcalc.errors import CalibrationError
from flopcalc.measure import fit
from flopcalc.measure.tables.runs import make_case
from flopcalc.prediction.machine import ProductShape, time_shape

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip


def test_solve_finds_what_rows_were_made_of() -> None:
    made = [([1.0, x, x * x], 3.0 + 0.5 * x) for x in (1.0, 2.0, 5.0, 9.0)]
    assert fit.solve(made, 20000) == pytest.approx([3.0, 0.5, 0.0], abs=1e-3)


def test_solve_gives_nothing_negative() -> None:
    assert min(fit.solve([([1.0, 1.0], 2.0), ([1.0, 2.0], 1.0)])) >= 0


def test_search_finds_a_minimum() -> None:
    found = fit.search(lambda at: abs(at[0] - 7) + abs(at[1] - 0.02), [1.0, 1.0], 400)
    assert found == pytest.approx([7, 0.02], rel=0.01)


def test_curve_takes_the_weighted_median_of_each_half_octave() -> None:
    curve = fit.fit_curve([(1000, 1.0, 1), (1000, 2.0, 5), (1000, 9.0, 1), (4000, 3.0, 1)])
    assert curve == [(pytest.approx(1000), pytest.approx(2.0)), (pytest.approx(4000), pytest.approx(3.0))]


def test_products_find_their_constants() -> None:
    truth = ProductShape(500e12, 100.0, 5e-6, 0.9, 0.8, 0.7, 2e12, 2e-6, 132.0)
    points = [
        fit.ProductPoint(way, m, n, k, time_shape(truth, way, m, n, k), 1)
        for way in ("forward", "dgrad", "wgrad")
        for m in (512, 2048, 8192)
        for n, k in ((1024, 1024), (4096, 1024), (1024, 4096), (8192, 2048))
    ]
    slow = [fit.ProductPoint("forward", 4096, 1004, 4096, 4 * time_shape(truth, "forward", 4096, 1004, 4096), 1)]
    found = fit.fit_products(points, slow)
    shape = ProductShape(*found["shape"])
    for point in points:
        if point.seconds > 50e-6:  # the weight lies on long ones
            assert time_shape(shape, *point[:4]) == pytest.approx(point.seconds, rel=0.12)
    assert found["unaligned"]["4"]["forward"] == pytest.approx(4, rel=0.15)


def _profiled(rows: list[Any]) -> fit.Modelled:
    case: dict[str, Any] = {**make_case("llama", "train", 2, 32), "operators": rows}
    return fit.model_case(case, LLAMA)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (["aten::mm", False, "[[64,64],[64,128]]", "c10::BFloat16,c10::BFloat16", 2, 2, 8.0, "nvjet"],
         fit.ProductPoint("forward", 64, 128, 64, 4e-6, 2)),
        (["aten::mm", True, "[[128,64],[64,64]]", "c10::BFloat16,c10::BFloat16", 1, 1, 3.0, "nvjet"],
         fit.ProductPoint("wgrad", 64, 128, 64, 3e-6, 1)),
        (["aten::mm", True, "[[64,128],[128,64]]", "c10::BFloat16,c10::BFloat16", 1, 1, 3.0, "nvjet"],
         fit.ProductPoint("dgrad", 64, 128, 64, 3e-6, 1)),
        (["aten::_cudnn_attention_forward", False, "[[2,4,32,16],[2,2,32,16],[2,2,32,16]]",
          "c10::BFloat16,c10::BFloat16,c10::BFloat16", 2, 4, 6.0, "cudnn"],
         fit.AttentionPoint("cudnn", "forward", "causal", 2, 4, 2, 16, 32, 32, 3e-6, 2)),
        (["aten::mul", False, "[[2,32,64],[2,32,64]]", "float,float", 1, 1, 2.0, "void vectorized_elementwise_kernel"],
         fit.MovedPoint("pointwise", 3 * 4096 * 4, 2e-6, 1)),
        (["aten::mul", False, "[[2,32,64],[64]]", "c10::BFloat16,c10::BFloat16", 1, 1, 2.0, "void elementwise_kernel"],
         fit.MovedPoint("pointwise_strided", 2 * 4096 * 2 + 128, 2e-6, 1)),
        (["aten::copy_", False, "[[2,32,64],[2,32,64],[]]", "float,c10::BFloat16,Scalar", 1, 1, 2.0, "void unrolled"],
         fit.MovedPoint("cast_up", 4096 * 6, 2e-6, 1)),
        (["aten::sum", True, "[[2,32,64],[],[],[]]", "c10::BFloat16,ScalarList,Scalar,", 1, 1, 2.0, "void reduce"],
         fit.MovedPoint("reduce_backward", 4096 * 2, 2e-6, 1)),
    ],
)  # fmt: skip
def test_profiles_are_read(row: list[Any], expected: object) -> None:
    layer = ["aten::mm", False, "[[64,64],[64,128]]", "c10::BFloat16,c10::BFloat16", 1, 1, 0.0, ""]
    points = fit.read_points([_profiled([layer, row])])
    assert [*points.products, *points.attention, *points.moved] == [expected]


def test_without_kernels_there_is_nothing_to_fit() -> None:
    case = {**make_case("llama", "train", 2, 32), "operators": []}
    with pytest.raises(CalibrationError, match="no kernels"):
        fit.fit_predictor([case], [], lambda _: LLAMA, {"device_id": "h200-sxm"})


def test_a_predictor_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "predictors" / "x.json"
    fit.save_predictor(str(path), {"schema": 1, "moved": {"copy": [[1, 2.0]]}})
    assert json.loads(path.read_text()) == {"schema": 1, "moved": {"copy": [[1, 2.0]]}}
    assert [entry.name for entry in path.parent.iterdir()] == ["x.json"]
    monkeypatch.chdir(tmp_path)
    fit.save_predictor("y.json", {"schema": 1})
    assert json.loads((tmp_path / "y.json").read_text()) == {"schema": 1}


def test_a_predictor_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match=r"file/x\.json: cannot be written: .*; what was measured is kept"):
        fit.save_predictor(str(tmp_path / "file" / "x.json"), {"schema": 1})
    (tmp_path / "x.json").mkdir()
    with pytest.raises(CalibrationError, match="cannot be written: Is a directory"):
        fit.save_predictor(str(tmp_path / "x.json"), {"schema": 1})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "x.json"]  # nothing half written
