"""The fit: each part finds constants that its input was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flopcalc.core.model.config import load_config
from flopcalc.errors import CalibrationError
from flopcalc.measure.predictor import fit
from flopcalc.measure.predictor.narrow import narrow
from flopcalc.measure.predictor.runs import FIT_GRIDS, cut_config, make_case
from flopcalc.prediction.clock import name_mode, name_phase
from flopcalc.prediction.machine import GroupShape, Machine, ProductShape, load_predictor, time_grouped, time_shape
from flopcalc.prediction.maker import count_calls
from flopcalc.prediction.work import Attention

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


@pytest.mark.parametrize(
    ("seconds", "risen"),
    [
        ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0)),
        ((2.0, 1.0), (1.5, 1.5)),
        ((1.0, 9.0, 2.0, 2.1, 8.0), (1.0, 2.1, 2.1, 2.1, 8.0)),  # one that lies out moves its neighbours little
        ((3.0, 2.0, 1.0), (2.0, 2.0, 2.0)),
    ],
)
def test_curves_never_fall(seconds: tuple[float, ...], risen: tuple[float, ...]) -> None:
    curve = fit.fit_curve([(4.0**i, each, 1) for i, each in enumerate(seconds, 1)])
    assert [each for _, each in curve] == pytest.approx(risen)


def test_attention_that_drops_is_a_kernel_of_its_own() -> None:
    """Few calls tell a pair's seconds; a model's own calls are found under the same name."""
    plain = [fit.AttentionPoint("cudnn", "forward", "causal", 1, 8, 8, 64, n, n, n * 1e-8, 1) for n in (64, 512, 2048)]
    dropping = [point._replace(mask="dropout", seconds=2 * point.seconds) for point in plain]
    found = fit.fit_attention([*plain, *dropping], 132)["cudnn"]
    assert set(found) == {"forward/causal/64", "forward/dropout/64"}
    (_, query, pair, row), (_, slower_query, slower_pair, slower_row) = found.values()
    assert slower_pair > 2 * pair
    assert (slower_query / slower_pair, slower_row / slower_pair) == pytest.approx((query / pair, row / pair), rel=1e-3)


@pytest.mark.parametrize(
    ("device", "dim", "length"),
    [("h200", 64, 1024), ("h200", 96, 1024), ("h200", 256, 1024), ("h200", 128, 4096), ("a100-sxm-80gb", 64, 1024)],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_dropping_takes_longer_everywhere(device: str, dim: int, length: int, direction: str) -> None:
    """At head dims and on kernels where it was not measured too."""
    machine = Machine(device)
    call = Attention("attn", "language", direction, "causal", 8, 12, 12, dim, dim, length, length)
    plain, dropping = (machine.time_attention(each).seconds for each in (call, call._replace(has_dropout=True)))
    assert 1.1 < dropping / plain < 2.5
    masked = call._replace(mask="window", window=length)
    assert machine.time_attention(masked) == machine.time_attention(masked._replace(has_dropout=True))


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
        # Two floating dtypes: a cast per element, and a result of the wider one.
        (["aten::mul", False, "[[2,32,64],[2,32,64]]", "c10::BFloat16,float", 1, 1, 2.0, "void unrolled_elementwise"],
         fit.MovedPoint("pointwise_mixed", 4096 * (2 + 4 + 4), 2e-6, 1)),
        (["aten::mul", False, "[[2,32,64],[64]]", "c10::BFloat16,float", 1, 1, 2.0, "void elementwise_kernel"],
         fit.MovedPoint("pointwise_strided_mixed", 4096 * (2 + 4) + 64 * 4, 2e-6, 1)),
        (["aten::mul", False, "[[2,32,64],[]]", "c10::BFloat16,float", 1, 1, 2.0, "void vectorized_elementwise"],
         fit.MovedPoint("pointwise", 2 * 4096 * 2, 2e-6, 1)),  # one number is no tensor
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


def test_calls_that_drop_are_read_as_such() -> None:
    row = ["aten::_cudnn_attention_forward", False, "[[2,4,32,16],[2,2,32,16],[2,2,32,16]]",
           "c10::BFloat16,c10::BFloat16,c10::BFloat16", 2, 6, 6.0, "philox"]  # fmt: skip
    case = {**make_case("llama", "train", 2, 32), "operators": [row]}
    modelled = fit.model_case(case, {**LLAMA, "attention_dropout": 0.1})
    assert [point.mask for point in fit.read_points([modelled]).attention] == ["dropout"]


def test_without_kernels_there_is_nothing_to_fit() -> None:
    case = {**make_case("llama", "train", 2, 32), "operators": [], "is_host": False}
    for records in ([], [case], [{"units": {"view": 0.4}}], [{**case, "is_host": True}]):
        with pytest.raises(CalibrationError, match="no kernels"):
            fit.fit_predictor(records, lambda _: LLAMA, {"device_id": "h200-sxm"})


# --- Whole steps, made of constants that the fit then has to find -----------------------------------------------------
SHIPPED: dict[str, Any] = load_predictor("h200-sxm") or {}
MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip


def _profile_experts(shape: GroupShape, batch: int, seq: int, **changed: Any) -> fit.Modelled:
    """A step whose experts took what `shape` says, each product in a row of its own."""
    plain = fit.model_case({**make_case("mixtral", changed.pop("phase", "train"), batch, seq), **changed}, MIXTRAL)
    rows: list[Any] = [["aten::mm", False, "[[8,8],[8,8]]", "", 1, 1, 1e6, "nvjet"]]  # no part of it
    for each in plain.work.products:
        if each.copies > 1:
            m, n, k, copies = each.m, each.n, each.k, each.copies
            shapes = {
                "forward": [[m, k], [copies, k, n], [copies]],
                "dgrad": [[m, n], [copies, n, k], [copies]],
                "wgrad": [[n, m], [m, k], [copies]],
            }
            us = 2e6 * time_grouped(shape, 132.0, each.direction, copies, m, n, k)
            is_backward = each.direction != "forward"
            rows.append(["aten::_grouped_mm", is_backward, str(shapes[each.direction]), "", 2, 4, us, "cutlass"])
    return plain._replace(case={**plain.case, "operators": rows})


EXPERT_STEPS = [(1, 48), (1, 1024), (4, 2048), (1, 4096), (8, 4096)]


@pytest.mark.parametrize(
    "shape", [GroupShape(), GroupShape(rate=600e12, turn=3e-6), GroupShape(bandwidth=2e12, lead=300.0)]
)
def test_grouped_products_find_their_constants(shape: GroupShape) -> None:
    """Or others that give the same seconds."""
    cases = [_profile_experts(shape, batch, seq) for batch, seq in EXPERT_STEPS]
    found = fit.fit_grouped(cases, (), ProductShape())
    assert list(found) == ["forward", "dgrad", "wgrad"]
    for case in cases:
        for each in case.work.products:
            if each.copies > 1:
                sizes = (132.0, each.direction, each.copies, each.m, each.n, each.k)
                told = time_grouped(GroupShape(*found[each.direction]), *sizes)
                assert told == pytest.approx(time_grouped(shape, *sizes), rel=0.1)


@pytest.mark.parametrize(
    "changed", [{"recompute": "full"}, {"compiled": True}, {"phase": "decode", "context": 64}]
)  # fmt: skip
def test_steps_that_tell_nothing_of_grouped_products(changed: dict[str, Any]) -> None:
    shape = GroupShape(bandwidth=0.8 * ProductShape().bandwidth)
    usual = {way: pytest.approx(list(shape)) for way in ("forward", "dgrad", "wgrad")}
    slow = [_profile_experts(GroupShape(rate=300e12), 2, 1024, **changed) for _ in range(9)]
    assert fit.fit_grouped(slow, (), ProductShape()) == usual
    plain = [_profile_experts(GroupShape(rate=300e12), batch, seq) for batch, seq in EXPERT_STEPS]
    assert fit.fit_grouped(plain, (), ProductShape())["wgrad"][0] == pytest.approx(300e12, rel=0.1)
    without = [
        each._replace(case={key: value for key, value in each.case.items() if key != "operators"}) for each in plain
    ]
    assert fit.fit_grouped(without, (), ProductShape()) == usual


@pytest.mark.parametrize(("faster", "wider"), [(1.0, 1.0), (0.4, 0.5), (2.0, 1.5)])
def test_experts_that_were_not_measured_are_as_fast_as_plain_products_tell(faster: float, wider: float) -> None:
    usual, plain = GroupShape(), ProductShape()
    device = plain._replace(rate=faster * plain.rate, bandwidth=wider * plain.bandwidth)
    for found in fit.fit_grouped([], [], device).values():
        rate, lead, bandwidth, *rest = found
        assert (rate, bandwidth) == pytest.approx((faster * usual.rate, wider * 0.8 * plain.bandwidth), rel=1e-4)
        assert (lead, *rest) == (usual.lead, *usual[3:])


# --- Kernels at the full clock ----------------------------------------------------------------------------------------
BF16 = "c10::BFloat16,c10::BFloat16"
SLOWING = {"forward": fit.Slowing(0.34, 0.6), "backward": fit.Slowing(0.32, 1.2)}
STEADY = {"forward": fit.Slowing(1.0, 0.0), "backward": fit.Slowing(1.0, 0.0)}
BUSY = [
    ("train", batch, seq)
    for batch, seq in ((1, 384), (1, 512), (1, 640), (1, 1024), (2, 1024), (4, 1024), (8, 1024), (2, 8192), (8, 4096))
]


def _profile_products(phase: str, batch: int, seq: int) -> fit.Modelled:
    """A step at the full clock: products that take what the shipped shape says, one call each, and an optimizer."""
    plain = fit.model_case(make_case("llama-3.2-1b", phase, batch, seq), cut_config("llama-3.2-1b", 4))
    shape = ProductShape(*SHIPPED["products"]["shape"])
    rows: list[Any] = [["aten::view", False, "[[8,8]]", "float", 1, 0, 0.0, ""]]  # no kernel
    for each in plain.work.products:
        m, n, k = each.m, each.n, each.k
        shapes = {"forward": [[m, k], [k, n]], "dgrad": [[m, n], [n, k]], "wgrad": [[n, m], [m, k]]}[each.direction]
        us = 1e6 * time_shape(shape, each.direction, m, n, k)
        rows.append(["aten::mm", each.direction != "forward", str(shapes), BF16, 1, 1, us, "nvjet"])
    rows.append(["aten::_fused_adamw_", False, "[]", "", 1, 1, 900.0, "multi_tensor_apply"])
    return plain._replace(case={**plain.case, "operators": rows})


def _slow_down(each: fit.Modelled, rate: float) -> fit.Modelled:
    rows = []
    for name, is_backward, *about, us, kernel in each.case["operators"]:
        slower = SLOWING["backward" if is_backward else "forward"].at(rate)
        rows.append([name, is_backward, *about, us * slower if "mm" in name else us, kernel])  # of memory's, none
    return each._replace(case={**each.case, "operators": rows})


@pytest.mark.parametrize(
    ("rate", "slower"), [(0.0, 1.0), (0.32, 1.0), (0.37, 1.06), (0.52, 1.24)]
)  # fmt: skip
def test_a_pass_slows_down_in_proportion(rate: float, slower: float) -> None:
    assert SLOWING["backward"].at(rate) == pytest.approx(slower)


def test_kernels_come_back_to_the_full_clock() -> None:
    fast = [_profile_products(*size) for size in BUSY]
    rates, found = fit.fit_slowing(fast, SHIPPED)
    assert all(slowing.at(rate) == pytest.approx(1.0, abs=1e-3) for slowing in found.values() for rate in rates)
    for each, rate in zip(fast, rates, strict=True):
        clock = fit._run_clock(each, SHIPPED)
        seconds = sum(piece.seconds for piece in clock.pieces if piece.kind != "optimizer")
        assert rate * clock.machine.peak * seconds == pytest.approx(clock.flops)
    assert min(rates) < 0.3 < 0.44 < max(rates)
    slow = [_slow_down(each, rate) for each, rate in zip(fast, rates, strict=True)]
    told, found = fit.fit_slowing(slow, SHIPPED)
    assert told == rates  # they come from the step, not from its profile
    for each, rate, truth in zip(slow, rates, fast, strict=True):
        again = fit.at_full_clock(each, rate, found)
        taken, expected = ([row[-2] for row in case.case["operators"]] for case in (again, truth))
        assert taken == pytest.approx(expected, rel=0.02)
        rest = [[*row[:-2], row[-1]] for row in again.case["operators"]]
        assert rest == [[*row[:-2], row[-1]] for row in truth.case["operators"]]
        assert again[1:] == truth[1:]
    first, last = (case[-1].case["operators"][-3][-2] for case in (fast, slow))
    assert last > 1.1 * first  # and that was no small change


def test_what_has_no_kernels_stays_as_it_is() -> None:
    each = fit.model_case(make_case("llama-3.2-1b", "train", 8, 4096), cut_config("llama-3.2-1b", 4))
    assert fit.at_full_clock(each, 0.5, SLOWING) is each
    rates, found = fit.fit_slowing([each], SHIPPED)
    assert rates[0] > 0.4
    assert found == STEADY
    few = [_slow_down(_profile_products(*size), 0.5) for size in BUSY[:7]]  # too few to tell
    assert fit.fit_slowing(few, SHIPPED)[1] == STEADY


# --- Images to patches ------------------------------------------------------------------------------------------------
def _profile_patches(lines: dict[str, tuple[float, float]], grid: list[int], **changed: Any) -> fit.Modelled:
    """A step whose convolutions took what `lines` says, each in two rows."""
    phase = changed.pop("phase", "train")
    case = {**make_case("qwen2-vl-2b", phase, 1, 4096, [grid]), **changed}
    plain = fit.model_case(case, cut_config("qwen2-vl-2b", 2, 2))
    rows: list[Any] = [["aten::mm", False, "[[8,8],[8,8]]", BF16, 1, 1, 1e6, "nvjet"]]  # no part of it
    for each in plain.work.products:
        if each.is_patches:
            start, per_flop = lines[each.direction]
            name = "cudnn_convolution" if each.direction == "forward" else "convolution_backward"
            us = 1e6 * (start + per_flop * each.flops)
            rows += [[f"aten::{name}", each.direction != "forward", "", "", 1, 1, part * us, ""] for part in (0.9, 0.1)]
    return plain._replace(case={**case, "operators": rows})


GRIDS = [[1, 16, 16], [1, 36, 52], [1, 60, 60], [1, 100, 120]]


@pytest.mark.parametrize(
    "lines",
    [
        {"forward": (5e-5, 4e-14), "wgrad": (6e-5, 2e-14)},
        {"forward": (1e-5, 2e-13), "wgrad": (2e-4, 0.0)},
    ],
)
def test_patches_find_their_constants(lines: dict[str, tuple[float, float]]) -> None:
    cases = [_profile_patches(lines, grid) for grid in GRIDS]
    found = fit.fit_patches(cases)
    assert {way: tuple(line) for way, line in found.items()} == {
        way: pytest.approx(line, rel=0.01, abs=1e-16) for way, line in lines.items()
    }
    prefills = [_profile_patches(lines, grid, phase="prefill") for grid in GRIDS]
    assert fit.fit_patches(prefills) == {"forward": found["forward"]}


@pytest.mark.parametrize("changed", [{"recompute": "full"}, {"compiled": True}])
def test_steps_that_tell_nothing_of_patches(changed: dict[str, Any]) -> None:
    lines = {"forward": (5e-5, 4e-14), "wgrad": (6e-5, 2e-14)}
    assert fit.fit_patches([_profile_patches(lines, grid, **changed) for grid in GRIDS]) == {}
    assert fit.fit_patches([_profiled([["aten::mm", False, "[[8,8],[8,8]]", BF16, 1, 1, 5.0, "nvjet"]])]) == {}
    timed = fit.model_case(make_case("qwen2-vl-2b", "train", 1, 4096, GRIDS[:1]), cut_config("qwen2-vl-2b", 2, 2))
    assert fit.fit_patches([timed]) == {}


# --- Gaps and clock ---------------------------------------------------------------------------------------------------
TRUTH = {**SHIPPED, "gaps": {"train": 3e-6, "forward": 1.5e-6}, "power": [0.15, 0.8]}
START = {**SHIPPED, "gaps": {"train": 2e-6, "forward": 1e-6}, "power": [0.4, 0.2]}
PACE = SHIPPED["probe_s"]["train"]


def _time_step(phase: str, batch: int, seq: int, **seen: Any) -> fit.Modelled:
    """A step that takes what TRUTH says, and what its device waits for the host."""
    case = {**make_case("llama-3.2-1b", phase, batch, seq), "spread": 0.01}
    modelled = fit.model_case(case, cut_config("llama-3.2-1b", 4))
    clock = fit._run_clock(modelled, START)
    seconds = fit._run_clock(modelled, TRUTH).device_s() + clock.step_s() - clock.device_s()
    told = {"busy_us": 1e6 * seconds} if seen.pop("profiled", False) else {}
    probe = {"probe_s": SHIPPED["probe_s"]["train" if phase == "train" else "forward"]}
    return modelled._replace(case={**case, "seconds": seconds, **probe, **told, **seen})


SIZES = [
    *(("train", batch, seq) for batch, seq in ((16, 1024), (2, 8192), (4, 4096), (16, 4096))),
    *(("prefill", batch, seq) for batch, seq in ((4, 4096), (16, 4096), (16, 1024))),
]


@pytest.mark.parametrize("profiled", [(True,), (False,), (True, False)])
def test_gaps_and_clock_come_from_profiled_steps_and_others(profiled: tuple[bool, ...]) -> None:
    """Of a step that was only timed, the clock itself tells whether the device bounds it."""
    cases = [_time_step(*size, profiled=profiled[i % len(profiled)]) for i, size in enumerate(SIZES)]
    gaps, power = fit.fit_device(cases, START)
    found = {**START, "gaps": gaps, "power": power}
    for case in cases:
        told, truth = (fit._run_clock(case, constants).device_s() for constants in (found, TRUTH))
        assert told == pytest.approx(truth, rel=0.01)
    assert fit._run_clock(cases[3], START).device_s() < 0.95 * fit._run_clock(cases[3], TRUTH).device_s()


@pytest.mark.parametrize(
    "changed",
    [
        {"busy_us": 1e3},  # the device was idle most of the time
        {"probe_s": 100 * PACE},  # not profiled, on a host that takes far longer
        {"spread": 0.2},
        {"compiled": True},
        {"recompute": "full"},
        {"phase": "decode"},
    ],
)
def test_steps_that_tell_nothing_of_gaps(changed: dict[str, Any]) -> None:
    step = _time_step("train", 16, 1024)
    assert fit.fit_device([step], START)[1] != [1.0, 0.01]
    step.case.update(changed)
    assert fit.fit_device([step], START) == ({"train": 2e-6, "forward": 1e-6}, [1.0, 0.01])
    assert fit.fit_device([_time_step("train", 1, 48)], START)[1] == [1.0, 0.01]  # the host bounds it


HOSTS = [
    {"phase": "train", "probe_s": 0.004, "ratio": 10.0},
    {"phase": "train", "probe_s": 0.008, "ratio": 12.0},
    {"phase": "train", "probe_s": 0.005, "ratio": 30.0},
    {"phase": "prefill", "probe_s": 0.002, "ratio": 3.0},
    {"phase": "decode", "probe_s": 0.004, "ratio": 5.0},
]


def test_the_usual_probe_with_a_backward_pass_and_without() -> None:
    assert fit.find_probes(HOSTS) == {"train": 0.005, "forward": 0.003}
    assert fit.find_probes([]) == {}


@pytest.mark.parametrize(("case", "seconds"), [*zip(HOSTS, (0.05, 0.06, 0.15, 0.009, 0.015), strict=True)])
def test_small_steps_at_the_usual_pace(case: dict[str, Any], seconds: float) -> None:
    """A step that was measured while the host was slow took as many probes as at any other time."""
    assert fit.time_host(case, {"train": 0.005, "forward": 0.003}) == pytest.approx(seconds)


def test_the_host_finds_what_its_steps_were_made_of() -> None:
    units = SHIPPED["host"]["units"]
    truth = {"train": [0.004, 3e-5], "forward": [0.001, 2e-5], "decode": [0.002, 1e-5]}
    cases = []
    for phase, context in (("train", 0), ("prefill", 0), ("decode", 100)):
        for layers in (2, 8, 16):
            each = fit.model_case(make_case("x", phase, 1, 64, context=context), cut_config("llama-3.2-1b", layers))
            features = fit.host_features(each.work.dispatched, count_calls(each.load), units)
            weights = truth[name_phase(phase)]
            cases.append((each, sum(weight * size for weight, size in zip(weights, features, strict=True))))
    found = fit.fit_host(cases, units)
    for name, weights in truth.items():
        assert found[name] == pytest.approx(weights, rel=0.02), name
    assert found["units"] == units


@pytest.mark.parametrize("again", [[2e-3, 1e-5], [5e-4, 3e-5]])
def test_checkpoints_find_what_steps_were_made_of(again: list[float]) -> None:
    """Layers with few operators and with many tell a checkpoint from what it runs, in steps of every size."""
    probe_s = SHIPPED["probe_s"]["train"]
    truth = {**SHIPPED, "host": {**SHIPPED["host"], "again": again}}
    small, larger = [], []
    for model, layers in (("gpt2-medium", 24), ("llama-3.2-1b", 16), ("gemma-3-1b", 13)):
        for seq, cases in ((64, small), (96, larger)):
            each = fit.model_case(make_case(model, "train", 1, seq, recompute="full"), cut_config(model, layers))
            clock = fit._run_clock(each, truth)
            cases.append((each, clock.step_s(1.0, probe_s if cases is small else 0.0)))
    # The larger ones were measured on a host at half its pace.
    paced = [
        each._replace(case={**each.case, "seconds": 2 * seconds, "probe_s": 2 * probe_s}) for each, seconds in larger
    ]
    found = fit.fit_again(small, paced, SHIPPED)  # drawn to half and half: only nearly the same
    for each, seconds in small:
        clock = fit._run_clock(each, {**SHIPPED, "host": {**SHIPPED["host"], "again": found}})
        assert clock.step_s(1.0, probe_s) == pytest.approx(seconds, rel=0.05)
    assert fit.fit_again([], [], SHIPPED) == [0.0, 0.0]


def test_steps_in_which_the_host_waits_tell_nothing_of_it() -> None:
    """Where images enter, and where experts' optimizers are large, the device's time is in the wall time."""
    images = make_case("qwen2-vl-2b", "train", 1, 1024, FIT_GRIDS["qwen2-vl-2b"])
    waiting = [
        fit.model_case(images, cut_config("qwen2-vl-2b", 2, 2)),
        fit.model_case(make_case("mixtral", "train", 1, 64), MIXTRAL),
    ]
    assert set(fit.fit_host([(each, 1.0) for each in waiting], {})) == {"units", "types", "again"}
    prefill = fit.model_case(make_case("mixtral", "prefill", 1, 64), MIXTRAL)
    assert set(fit.fit_host([(prefill, 1.0)], {})) == {"units", "types", "again", "forward"}


# --- What a model type's code takes -----------------------------------------------------------------------------------
def _make_rows(call_s: float, factor: float, depths: tuple[int, ...]) -> list[tuple[tuple[float, float], float]]:
    """Steps of so many layers, each layer a millisecond of operators."""
    return [((1.0, 0.001 * depth), call_s + factor * 0.001 * depth) for depth in depths]


@pytest.mark.parametrize(("call_s", "factor"), [(0.002, 1.0), (0.002, 1.15), (0.003, 1.0), (0.0015, 0.9), (0.004, 1.3)])
def test_two_depths_tell_a_call_from_a_layer(call_s: float, factor: float) -> None:
    rows = _make_rows(call_s, factor, (4, 12))
    told_s, told = fit.solve_type(rows, 0.002)
    for (calls, operators), value in rows:  # drawn to the usual, but far nearer to what was measured
        usual = 0.002 * calls + operators
        assert abs(told_s * calls + told * operators - value) <= 0.5 * abs(usual - value) + 1e-12
    # Against many steps the usual has no weight.
    many = fit.solve_type(rows * 10000, 0.002)
    assert many == (pytest.approx(call_s, abs=2e-6), pytest.approx(factor, rel=2e-4))


def test_the_usual_stays_the_usual() -> None:
    assert fit.solve_type(_make_rows(0.002, 1.0, (4, 12)), 0.002) == pytest.approx((0.002, 1.0), rel=1e-12)
    assert fit.solve_type(_make_rows(0.002, 1.0, (8,)), 0.002) == pytest.approx((0.002, 1.0), rel=1e-12)


@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("depths", [(8,), (4, 12)])
def test_the_usual_draws_as_much_in_long_steps_as_in_short_ones(scale: float, depths: tuple[int, ...]) -> None:
    rows = _make_rows(0.003, 1.2, depths)
    longer = [((calls, scale * operators), scale * value) for (calls, operators), value in rows]
    call_s, factor = fit.solve_type(rows, 0.002)
    assert fit.solve_type(longer, scale * 0.002) == pytest.approx((scale * call_s, factor))


@pytest.mark.parametrize("more_s", [-0.001, 0.0005, 0.002])
def test_one_depth_alone_draws_to_the_usual(more_s: float) -> None:
    """What its seconds are more or less, both constants share: neither is all of it."""
    rows = _make_rows(0.002 + more_s, 1.0, (8,))
    call_s, factor = fit.solve_type(rows, 0.002)
    assert call_s + 0.008 * factor == pytest.approx(0.01 + more_s, rel=0.01)
    assert 0 < (call_s - 0.002) / more_s < 1
    assert 0 < 0.008 * (factor - 1) / more_s < 1


@pytest.mark.parametrize("usual_s", [0.0, 0.002])
def test_a_call_takes_no_less_than_nothing(usual_s: float) -> None:
    rows = _make_rows(-0.002, 1.25, (4, 12))
    call_s, factor = fit.solve_type(rows, usual_s)
    assert call_s == 0.0
    ratios = [0.75, 13 / 12]  # what the operators alone would have to be multiplied with
    assert min(ratios) < factor < max(ratios)


TOWER = "qwen2-vl-2b"
BARE: dict[str, Any] = {**SHIPPED, "host": {**SHIPPED["host"], "types": {}}}
TYPES = {
    "llama": {"train": [0.006, 1.2], "forward": [0.0015, 0.9], "decode": [0.002, 1.1]},
    "qwen2_vl": {"train": [0.005, 1.1], "forward": [0.002, 1.05], "vision train": [0.0, 1.2],
                 "vision forward": [0.0, 0.9]},  # a tower has no seconds of a call
}  # fmt: skip


def _make_host(case: dict[str, Any], layers: int, types: dict[str, Any] = TYPES) -> tuple[fit.Modelled, float]:
    """A small step on a host for which each type takes what `types` says."""
    each = fit.model_case(case, narrow(dict(load_config(case["model"]).config), layers))
    clock = fit._run_clock(each, {**BARE, "host": {**BARE["host"], "types": types}})
    return each, clock.step_s(1.0, BARE["probe_s"]["train" if case["phase"] == "train" else "forward"])


def _make_hosts(types: dict[str, Any] = TYPES, model: str = "") -> list[tuple[fit.Modelled, float]]:
    cases = [make_case("llama-3.2-1b", phase, 1, 64) for phase in ("train", "prefill")]
    cases.append(make_case("llama-3.2-1b", "decode", 1, 2, context=128))
    for phase in ("train", "prefill"):  # images first: their turn comes when the text's is done
        cases += [make_case(TOWER, phase, 1, 128, [[1, 16, 16]]), make_case(TOWER, phase, 1, 64)]
    return [_make_host(case, layers, types) for case in cases for layers in (4, 12) if model in case["model"]]


FREE = (1e-4, 1e-4)  # pulls that hardly draw


def test_types_find_what_their_steps_were_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_PULLS", FREE)
    found = fit.fit_types(_make_hosts(), BARE)
    assert {kind: set(phases) for kind, phases in found.items()} == {kind: set(each) for kind, each in TYPES.items()}
    for kind, phases in TYPES.items():
        for phase, (call_s, factor) in phases.items():
            assert found[kind][phase] == [pytest.approx(call_s, abs=1e-4), pytest.approx(factor, rel=0.01)]
    # And steps of another depth take what they take.
    for case in (make_case("llama-3.2-1b", "train", 1, 64), make_case(TOWER, "train", 1, 128, [[1, 16, 16]])):
        assert _make_host(case, 8, found)[1] == pytest.approx(_make_host(case, 8)[1], rel=0.01)


def _find_worst(hosts: list[tuple[fit.Modelled, float]], types: dict[str, Any]) -> float:
    """The largest relative error of these steps."""
    found = []
    for each, seconds in hosts:
        clock = fit._run_clock(each, {**BARE, "host": {**BARE["host"], "types": types}})
        found.append(abs(clock.step_s(1.0, BARE["probe_s"][name_mode(each.case["phase"])]) / seconds - 1))
    return max(found)


@pytest.mark.parametrize(
    "types", [TYPES, *({"llama": {phase: [0.002, factor] for phase in TYPES["llama"]}} for factor in (0.8, 1.3))]
)
def test_what_is_drawn_to_the_usual_is_nearer_than_the_usual(types: dict[str, Any]) -> None:
    hosts = _make_hosts(types, "" if types is TYPES else "llama")
    found = fit.fit_types(hosts, BARE)
    assert _find_worst(hosts, types) == pytest.approx(0, abs=1e-12)
    assert 0 < _find_worst(hosts, found) < 0.5 * _find_worst(hosts, {})
    for kind, phases in types.items():
        for phase, (_, factor) in phases.items():
            assert abs(found[kind][phase][1] - factor) < abs(1 - factor), (kind, phase)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_a_host_that_is_slower_in_all_has_a_factor(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_PULLS", FREE)
    usual = {phase: [factor * BARE["host"][phase][0], factor] for phase in ("train", "forward", "decode")}
    found = fit.fit_types(_make_hosts({"llama": usual}, "llama"), BARE)
    for phase, (call_s, told) in found["llama"].items():
        assert told == pytest.approx(factor, rel=0.01), phase
        assert call_s == pytest.approx(usual[phase][0], abs=1e-4), phase


def test_images_come_after_the_text() -> None:
    """Without steps of text there is nothing that a tower's could be told from."""
    seen = [(each, seconds) for each, seconds in _make_hosts(model=TOWER) if each.case["grids"]]
    assert len(seen) == 4
    assert fit.fit_types(seen, BARE) == {}
    text = [(each, seconds) for each, seconds in _make_hosts(model=TOWER) if each.case["phase"] == "train"]
    assert set(fit.fit_types([*text, *seen], BARE)["qwen2_vl"]) == {"train", "vision train"}


@pytest.mark.parametrize(
    ("case", "layers"),
    [
        (make_case("llama-3.2-1b", "train", 32, 4096), 4),  # the device bounds it
        (make_case("llama-3.2-1b", "train", 1, 64, recompute="full"), 4),
    ],
)
def test_steps_that_tell_nothing_of_a_type(case: dict[str, Any], layers: int) -> None:
    each, _ = _make_host(case, layers)
    assert fit.fit_types([(each, 1.0)], BARE) == {}
    plain = _make_hosts(model="llama")
    assert fit.fit_types([*plain, (each, 1.0)], BARE) == fit.fit_types(plain, BARE)


@pytest.mark.parametrize(("batch", "seq", "is_slow"), [(1, 64, False), (32, 4096, True)])
def test_steps_that_the_device_bounds(batch: int, seq: int, is_slow: bool) -> None:
    each, _ = _make_host(make_case("llama-3.2-1b", "train", batch, seq), 4)
    clock = fit._run_clock(each, BARE)
    assert (clock.device_s() > 0.5 * clock.host_s()) is is_slow
    assert fit._is_slow(each, BARE) is is_slow


def test_a_kind_has_two_constants_whatever_its_bytes_tell() -> None:
    """Joins that take as long whatever their size: no seconds of a byte are left for them."""
    cases = []
    for batch, seq in ((1, 64), (2, 64), (4, 64), (8, 64)):
        case = make_case("llama", "train", batch, seq)
        each = fit.model_case(case, LLAMA)
        rows = [["aten::cat", False, "", "", 1, 1, 100.0, "cat"]]
        cases.append(each._replace(case={**case, "operators": rows}))
    linear, _ = fit.fit_linear(cases)
    assert "cat" in linear
    assert {len(values) for values in linear.values()} == {2}


def test_tables_of_calls_alone_are_read() -> None:
    row = {"kernel": "cudnn", "direction": "forward", "mask": "causal", "batch": 2, "heads": 4, "qk_dim": 64,
           "v_dim": 64, "length": 128, "seconds": 1e-5}  # fmt: skip
    rows = [row, {**row, "kernel": "eager"}, {**row, "v_dim": 32}]
    assert fit._read_calls(rows) == [
        fit.AttentionPoint("cudnn", "forward", "causal", 2, 4, 4, dim, 128, 128, 1e-5, 1) for dim in (64, 48)
    ]
    gemm = {"direction": "dgrad", "m": 64, "n": 128, "k": 32, "seconds": 2e-6, "dtype": "bf16", "mode": "burst"}
    rows = [gemm, {**gemm, "mode": "sustained"}, {**gemm, "dtype": "fp32"}]
    assert fit._read_gemm(rows) == [fit.ProductPoint("dgrad", 64, 128, 32, 2e-6, 1)]


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


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_compiled_steps_find_what_they_were_made_of(share: float) -> None:
    """Also where the host was slow when they were queued, and the device at its power limit."""
    truth = {**SHIPPED, "compiled": {"moved": share, "launch_s": 4e-5}}
    cases = []
    for seq, pace in ((2048, 1.0), (4096, 1.5)):
        case = make_case("llama-3.2-1b", "train", 4, seq, compiled=True)
        each = fit.model_case(case, cut_config("llama-3.2-1b", 6))
        clock = fit._run_clock(each, truth, True)
        probe_s = pace * SHIPPED["probe_s"]["train"]
        seen = {"seconds": clock.device_s(), "queued_s": pace * clock.host_s(), "probe_s": probe_s}
        cases.append(each._replace(case={**case, **seen}))
    found = fit.fit_compiled(cases, SHIPPED)
    assert found["moved"] == pytest.approx(share, rel=0.01)
    assert found["launch_s"] == pytest.approx(4e-5, rel=0.01)
    assert fit.fit_compiled([], SHIPPED) == {"moved": 1.0, "launch_s": 0.0}
