"""Single calls: what is run, how it is found in a profile, and what a fit makes of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flopcalc.measure.calibrate.tables import Bench
from flopcalc.measure.predictor import single_calls as alone
from flopcalc.measure.predictor.fit.memory import fit_curves
from flopcalc.measure.predictor.fit.points import read_single_calls
from flopcalc.measure.predictor.fit.products import fit_adapters
from flopcalc.prediction.operator_kinds import name_shape

ATTENTION = {
    "kernel", "direction", "mask", "batch", "heads", "kv_heads", "qk", "v", "length", "keys", "seconds"
}  # fmt: skip
EXPERTS = {"direction", "copies", "m", "n", "k", "seconds"}
LAYERS = {"direction", "m", "n", "k", "seconds"}
FORMS = ("down", "up", "down", "up", "grad", "down")  # of an adapter's products, as autograd makes them
ACROSS = {"kind", "images", "patches", "width", "bytes", "seconds"}


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench("cpu")


@pytest.fixture(scope="module")
def found(bench: Bench) -> dict[str, list[dict[str, Any]]]:
    return {name: alone.measure_calls(bench, row)["calls"] for name, row in alone.list_rows("test").items()}


def test_every_mask_and_direction_runs(found: dict[str, list[dict[str, Any]]]) -> None:
    calls = found["calls/attention/16"]
    assert all(set(call) == ATTENTION for call in calls)
    assert all(call["seconds"] > 0 and call["kernel"] == "flash" for call in calls)
    # HF hands grouped keys over as they are where there is no mask, and repeats them where there is one. A CPU has no
    # kernel that drops weights.
    assert [(call["mask"], call["direction"], call["kv_heads"]) for call in calls] == [
        ("causal", "forward", 2), ("causal", "backward", 2), ("full", "forward", 2), ("full", "backward", 2),
        ("window", "forward", 4), ("window", "backward", 4), ("apart", "forward", 4), ("apart", "backward", 4),
        ("decode", "forward", 2),
    ]  # fmt: skip


def test_every_direction_of_experts_runs(found: dict[str, list[dict[str, Any]]]) -> None:
    calls = found["calls/experts"]
    assert all(set(call) == EXPERTS and call["seconds"] > 0 for call in calls)
    assert [(call["direction"], call["m"]) for call in calls] == [
        (direction, m) for m in (4, 24) for direction in ("forward", "dgrad", "wgrad")
    ]


def test_every_direction_of_layers_runs(found: dict[str, list[dict[str, Any]]]) -> None:
    calls = found["calls/products"]
    assert all(set(call) == LAYERS and call["seconds"] > 0 for call in calls)
    assert [(call["direction"], call["m"], call["n"], call["k"]) for call in calls] == [
        (direction, m, *layer)
        for layer in ((32, 16), (24, 8))
        for m in (6, 12)
        for direction in ("forward", "dgrad", "wgrad")
    ]
    assert [point[:4] for point in read_single_calls(calls).products] == [tuple(call.values())[:4] for call in calls]
    others = [*found["calls/experts"], *found["calls/attention/16"], *found["calls/across"]]
    assert not read_single_calls(others).products


def test_layers_are_told_apart_by_their_sizes() -> None:
    """A profile shows rows, inner size and columns of a product, not how its operands lie."""
    row = alone.list_rows("quick")["calls/products"]
    sizes = [
        alone._list_sizes(direction, m, n, k)
        for n, k in row["layers"]
        for m in row["rows"]
        for direction in ("forward", "dgrad", "wgrad")
    ]
    assert len(set(sizes)) == len(sizes)
    assert all(2 * max(a * b, b * c, a * c) < 5e9 for a, b, c in sizes)


def test_calls_whose_kernels_were_lost_are_left_out() -> None:
    lost = ["aten::mm", False, "[[8,4],[4,2]]", "", 3, 2, 10.0, "nvjet"]
    kept = ["aten::mm", False, "[[8,4],[4,6]]", "", 3, 6, 30.0, "nvjet"]  # two kernels each
    assert alone._read_profile([lost, kept], True) == {(8, 4, 6): (pytest.approx(1e-5), {})}


def test_tensors_that_lie_across_run(found: dict[str, list[dict[str, Any]]]) -> None:
    calls = found["calls/across"]
    assert all(set(call) == ACROSS and call["seconds"] > 0 for call in calls)
    assert [(call["kind"], call["bytes"]) for call in calls] == [
        (kind, images * moved)
        for images in (1, 2, 3)
        for kind, moved in (("copy_strided_across", 4 * 6 * 16), ("pointwise_strided_across", 6 * 6 * 16))
    ]
    assert list(fit_curves(read_single_calls(calls).moved)) == ["copy_strided_across", "pointwise_strided_across"]


def test_calls_without_one_kernel_are_left_out(found: dict[str, list[dict[str, Any]]]) -> None:
    assert found["calls/attention/24-16"] == []  # a CPU has no kernel for values of another width


def test_a_refused_call_is_left_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = bench.random

    def draw(*shape: int, **options: Any) -> Any:
        if 16 in shape:
            raise RuntimeError("out of memory")
        return drawn(*shape, **options)

    monkeypatch.setattr(bench, "random", draw)
    sizes = [[1, 2, 2, length, length] for length in (4, 16, 6)]
    row = {"is_call": True, "qk": 8, "v": 8, "sizes": {"full": sizes}}
    found = alone.measure_calls(bench, row)
    assert [call["length"] for call in found["calls"]] == [4, 4, 6, 6]
    assert found["left_out"] == ["out of memory"]


@pytest.mark.parametrize(
    ("name", "is_backward", "shapes", "key", "more"),
    [
        ("_cudnn_attention_forward", False, [[2, 8, 64, 16], [2, 4, 64, 16], [2, 4, 64, 16]],
         ("forward", 2, 8, 64, 64), {"kernel": "cudnn", "kv_heads": 4}),
        ("_cudnn_attention_backward", True, [[2, 8, 64, 16], [2, 8, 64, 16], [2, 4, 64, 16], [2, 4, 64, 16]],
         ("backward", 2, 8, 64, 64), {"kernel": "cudnn", "kv_heads": 4}),
        ("_flash_attention_forward", False, [[2, 1, 8, 16], [2, 90, 4, 16], [2, 90, 4, 16]],
         ("forward", 2, 8, 1, 90), {"kernel": "flash", "kv_heads": 4}),
        ("_efficient_attention_backward", True, [[2, 64, 8, 16], [2, 64, 8, 16], [2, 64, 8, 16], [2, 64, 8, 16]],
         ("backward", 2, 8, 64, 64), {"kernel": "efficient", "kv_heads": 8}),
        ("_grouped_mm", False, [[96, 32], [8, 32, 64], [8], [], []], ("forward", 8, 96, 64, 32), {}),
        ("_grouped_mm", True, [[96, 64], [8, 64, 32], [8], [], []], ("dgrad", 8, 96, 64, 32), {}),
        ("_grouped_mm", True, [[64, 96], [96, 32], [8], [], []], ("wgrad", 8, 96, 64, 32), {}),
        ("mm", False, [[96, 32], [32, 64]], (96, 32, 64), {}),
        ("copy_", False, [[2, 64, 32], [2, 64, 32], []], ("copy_strided_across", 2, 64, 32), {}),
        ("add", False, [[2, 64, 32], [2, 64, 32], []], ("pointwise_strided_across", 2, 64, 32), {}),
    ],
)  # fmt: skip
def test_profiles_are_read(
    name: str, is_backward: bool, shapes: list[list[int]], key: tuple[Any, ...], more: dict[str, Any]
) -> None:
    row = [f"aten::{name}", is_backward, str(shapes), "", 6, 12, 60.0, "kernel"]
    outer = [f"aten::_scaled_dot_product{name}", is_backward, "[[1,1,1,1],[1,1,1,1]]", "", 6, 0, 0.0, ""]
    other = ["aten::bmm", False, "[[2,8,8],[2,8,8]]", "", 1, 1, 5.0, "nvjet"]
    assert alone._read_profile([row, outer, other], True) == {key: (pytest.approx(1e-5), more)}


def _list_sizes() -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
    for row in alone.list_rows("quick").values():
        for mask, sizes in row.get("sizes", {}).items():
            yield from ((mask, row["qk"], row["v"], tuple(size)) for size in sizes)


def test_the_grid_fits_and_its_calls_differ() -> None:
    rows = alone.list_rows("quick")
    assert all(row["is_call"] for row in rows.values())
    sizes = list(_list_sizes())
    assert len({(mask, qk, batch, heads, *ends) for mask, qk, _, (batch, heads, _, *ends) in sizes}) == len(sizes)
    for _, qk, v, (batch, heads, kv_heads, length, keys) in sizes:
        assert heads % kv_heads == 0
        assert 2 * batch * heads * max(length, keys) * max(qk, v) < 2e9
    assert all(2 * math.prod(each) < 4e9 for each in rows["calls/experts"]["experts"])


def test_memory_is_timed_by_shape(found: dict[str, list[dict[str, Any]]]) -> None:
    """A prediction knows a call's reads and writes; it must find the kind that was timed with them."""
    calls = found["calls/memory"]
    assert {call["kind"] for call in calls} == {
        "reduce_short", "sort_top", "sort_whole", "reduce_few", "copy_strided_spread", "scatter_backward"
    }  # fmt: skip
    assert all(set(call) == {"kind", "reads", "writes", "seconds"} and call["seconds"] > 0 for call in calls)


def test_shipped_calls_are_found_by_their_bytes() -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "results" / "single_calls.json"
    calls = [call for call in json.loads(path.read_text())["calls"] if "kind" in call]
    wide = [call for call in calls if call["kind"] != "scatter_backward" and call["reads"] > 1e6]
    assert len(wide) == 50
    for call in wide:
        plain = {"copy": "copy_strided"}.get(call["kind"].partition("_")[0], call["kind"].partition("_")[0])
        assert name_shape(plain, call["reads"], call["writes"]) == call["kind"]


def test_adapters_are_timed_by_form(found: dict[str, list[dict[str, Any]]]) -> None:
    calls = found["calls/adapters"]
    assert [call["narrow"] for call in calls[:6]] == [f"fp32 {form}" for form in FORMS]
    assert all(call["bytes"] > 0 and call["flops"] > 0 and call["seconds"] > 0 for call in calls)


def test_an_adapters_constants_come_back() -> None:
    truth = {"fp32 up": (2e-6, 3e-13, 2e-14), "fp32 grad": (8e-6, 2e-13, 1e-14)}
    calls = [
        {"narrow": name, "bytes": moved, "flops": flops, "seconds": start + per_byte * moved + per_flop * flops}
        for name, (start, per_byte, per_flop) in truth.items()
        for moved, flops in ((1e6, 1e8), (1e8, 2e9), (3e7, 4e9), (2e8, 1e9))
    ]
    assert fit_adapters([*calls, {"kind": "copy"}]) == {
        name: pytest.approx(values, rel=1e-3) for name, values in truth.items()
    }
