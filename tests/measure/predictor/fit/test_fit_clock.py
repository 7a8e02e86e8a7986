"""The device's clock: kernels scaled to the full clock, gaps, the power limit and compiled steps."""

from __future__ import annotations

from typing import Any

import pytest
from fitted import BF16, SHIPPED, model, run

from flopcalc.measure.predictor.fit.cases import ModelledCase
from flopcalc.measure.predictor.fit.clock import (
    STEADY,
    Slowdown,
    fit_compiled,
    fit_gaps_and_power,
    fit_slowdown,
    scale_to_full_clock,
)
from flopcalc.measure.predictor.runs import cut_config, make_case
from flopcalc.prediction.kernels.products import ProductShape, time_shape

CONFIG = cut_config("llama-3.2-1b", 4)
SLOWDOWNS = {"forward": Slowdown(0.34, 0.6), "backward": Slowdown(0.32, 1.2)}
BUSY = [
    ("train", batch, seq)
    for batch, seq in ((1, 384), (1, 512), (1, 640), (1, 1024), (2, 1024), (4, 1024), (8, 1024), (2, 8192), (8, 4096))
]


def _profile_products(phase: str, batch: int, seq: int) -> ModelledCase:
    """A step at the full clock: products that take what the shipped shape says, one call each, and an optimizer."""
    plain = model(make_case("llama-3.2-1b", phase, batch, seq), CONFIG)
    shape = ProductShape(*SHIPPED["products"]["shape"])
    rows: list[Any] = [["aten::view", False, "[[8,8]]", "float", 1, 0, 0.0, ""]]  # no kernel
    for each in plain.work.products:
        m, n, k = each.size[1:4]
        shapes = {"forward": [[m, k], [k, n]], "dgrad": [[m, n], [n, k]], "wgrad": [[n, m], [m, k]]}[each.direction]
        us = 1e6 * time_shape(shape, each.size, SHIPPED["products"].get("tiles", ""))
        rows.append(["aten::mm", each.direction != "forward", str(shapes), BF16, 1, 1, us, "nvjet"])
    rows.append(["aten::_fused_adamw_", False, "[]", "", 1, 1, 900.0, "multi_tensor_apply"])
    return plain._replace(case={**plain.case, "operators": rows})


def _slow_down(each: ModelledCase, rate: float) -> ModelledCase:
    rows = []
    for name, is_backward, *about, us, kernel in each.case["operators"]:
        slower = SLOWDOWNS["backward" if is_backward else "forward"].at(rate)
        rows.append([name, is_backward, *about, us * slower if "mm" in name or "adamw" in name else us, kernel])
    return each._replace(case={**each.case, "operators": rows})


@pytest.mark.parametrize(("rate", "slower"), [(0.0, 1.0), (0.32, 1.0), (0.37, 1.06), (0.52, 1.24)])
def test_a_pass_slows_down_in_proportion(rate: float, slower: float) -> None:
    assert SLOWDOWNS["backward"].at(rate) == pytest.approx(slower)


def test_kernels_come_back_to_the_full_clock() -> None:
    fast = [_profile_products(*size) for size in BUSY]
    rates, found = fit_slowdown(fast, SHIPPED)
    assert all(slowdown.at(rate) == pytest.approx(1.0, abs=1e-3) for slowdown in found.values() for rate in rates)
    clock = run(fast[0], SHIPPED)
    seconds = sum(piece.seconds for piece in clock.pieces if piece.kind != "optimizer")
    assert rates[0] * clock.machine.peak * seconds == pytest.approx(sum(piece.flops for piece in clock.pieces))
    assert min(rates) < 0.3 < 0.44 < max(rates)
    slow = [_slow_down(each, rate) for each, rate in zip(fast, rates, strict=True)]
    slow_rates, found = fit_slowdown(slow, SHIPPED)
    assert slow_rates == rates  # they come from the step, not from its profile
    for each, rate, truth in zip(slow, rates, fast, strict=True):
        scaled = scale_to_full_clock(each, rate, found)
        taken, expected = ([row[-2] for row in case.case["operators"]] for case in (scaled, truth))
        assert taken == pytest.approx(expected, rel=0.005)
        rest = [[*row[:-2], row[-1]] for row in scaled.case["operators"]]
        assert rest == [[*row[:-2], row[-1]] for row in truth.case["operators"]]
        assert scaled[1:] == truth[1:]
    first, last = (case[-1].case["operators"][-3][-2] for case in (fast, slow))
    assert last > 1.1 * first  # and that was no small change


def test_what_has_no_kernels_stays_as_it_is() -> None:
    each = model(make_case("llama-3.2-1b", "train", 8, 4096), CONFIG)
    assert scale_to_full_clock(each, 0.5, SLOWDOWNS) is each
    rates, found = fit_slowdown([each], SHIPPED)
    assert rates[0] > 0.4
    assert found == {"forward": STEADY, "backward": STEADY}
    few = [_slow_down(_profile_products(*size), 0.5) for size in BUSY[:7]]  # too few
    assert fit_slowdown(few, SHIPPED)[1] == {"forward": STEADY, "backward": STEADY}


@pytest.mark.parametrize(
    ("row", "is_scaled"),
    [
        (["aten::mm", True, "[[8,8],[8,8]]", BF16, 1, 1, 10.0, "nvjet"], True),
        (["aten::_cudnn_attention_backward", True, "[[1,1,8,8]]", BF16, 1, 1, 10.0, "cudnn"], True),
        (["aten::mul", True, "[[8,8],[8,8]]", BF16, 1, 1, 10.0, "void elementwise"], True),
        (["aten::mul", True, "[[8,8],[8,8]]", BF16, 1, 1, 10.0, "void vectorized"], False),
        (["aten::sum", True, "[[8,8]]", BF16, 1, 1, 10.0, "void reduce"], False),
        (["aten::_fused_adamw_", True, "[]", "", 1, 1, 10.0, "multi_tensor_apply"], True),
        (["", True, "", "", 0, 1, 10.0, "void stray"], True),
    ],
)
def test_what_memory_alone_bounds_is_not_scaled(row: list[Any], is_scaled: bool) -> None:
    each = model({**make_case("llama-3.2-1b", "train", 1, 384), "operators": [row]}, CONFIG)
    ((*_, us, _),) = scale_to_full_clock(each, 0.52, SLOWDOWNS).case["operators"]
    assert us == pytest.approx(10 / 1.24 if is_scaled else 10.0)


# --- Gaps and power ---------------------------------------------------------------------------------------------------
TRUTH = {**SHIPPED, "gaps": {"train": 3e-6, "forward": 1.5e-6}, "power": [0.15, 0.9]}
START = {**SHIPPED, "gaps": {"train": 2e-6, "forward": 1e-6}, "power": [0.5, 0.1]}
PACE = SHIPPED["probe_s"]["train"]


def _time_step(phase: str, batch: int, seq: int, *, is_profiled: bool = False) -> ModelledCase:
    """A step that takes what TRUTH says, plus what its device waits for the host."""
    case = {**make_case("llama-3.2-1b", phase, batch, seq), "spread": 0.01}
    modelled = model(case, CONFIG)
    clock = run(modelled, START)
    seconds = run(modelled, TRUTH).device_s() + clock.step_s() - clock.device_s()
    case |= {"seconds": seconds, "probe_s": SHIPPED["probe_s"]["train" if phase == "train" else "forward"]}
    return modelled._replace(case={**case, "busy_us": 1e6 * seconds} if is_profiled else case)


SIZES = [
    *(("train", batch, seq) for batch, seq in ((16, 1024), (2, 8192), (4, 4096), (16, 4096))),
    *(("prefill", batch, seq) for batch, seq in ((4, 4096), (16, 4096), (16, 1024))),
]


@pytest.mark.parametrize("profiled", [(True,), (False,), (True, False)])
def test_gaps_and_power_come_from_profiled_steps_and_others(profiled: tuple[bool, ...]) -> None:
    """Without a profile, the predicted times say whether the device bounds a step. Seconds are right within 0.5 %."""
    cases = [_time_step(*size, is_profiled=profiled[i % len(profiled)]) for i, size in enumerate(SIZES)]
    gaps, power = fit_gaps_and_power(cases, START)
    fitted = {**START, "gaps": gaps, "power": power}
    for case in cases:
        found, truth = (run(case, constants).device_s() for constants in (fitted, TRUTH))
        assert found == pytest.approx(truth, rel=0.005)
    assert run(cases[3], START).device_s() < 0.95 * run(cases[3], TRUTH).device_s()


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
def test_steps_that_say_nothing_about_gaps(changed: dict[str, Any]) -> None:
    step = _time_step("train", 16, 1024)
    assert fit_gaps_and_power([step], START)[1] != [1.0, 0.01]
    step.case.update(changed)
    assert fit_gaps_and_power([step], START) == ({"train": 2e-6, "forward": 1e-6}, [1.0, 0.01])


def test_a_step_that_the_host_bounds_says_nothing_about_gaps() -> None:
    assert fit_gaps_and_power([_time_step("train", 1, 48)], START)[1] == [1.0, 0.01]


# --- Compiled steps ---------------------------------------------------------------------------------------------------
def _time_compiled(constants: dict[str, Any], seq: int, pace: float) -> ModelledCase:
    case = make_case("llama-3.2-1b", "train", 4, seq, compiled=True)
    each = model(case, CONFIG)
    clock = run(each, constants, compiled=True)
    seen = {"seconds": clock.device_s(), "queued_s": pace * clock.host_s(), "probe_s": pace * PACE}
    return each._replace(case={**case, **seen})


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_compiled_steps_find_what_they_were_made_of(share: float) -> None:
    """Also where the host was slow when they were queued, and the device at its power limit."""
    truth = {**SHIPPED, "compiled": {"moved": share, "launch_s": 4e-5}}
    cases = [_time_compiled(truth, seq, pace) for seq, pace in ((2048, 1.0), (4096, 1.5))]
    found = fit_compiled(cases, SHIPPED)
    assert found == {"moved": pytest.approx(share, rel=1e-3), "launch_s": pytest.approx(4e-5, rel=5e-3)}


@pytest.mark.parametrize(("scale", "share"), [(0.3, 0.0), (3.0, 1.0)])
def test_compiled_steps_that_no_share_explains(scale: float, share: float) -> None:
    each = _time_compiled(SHIPPED, 2048, 1.0)
    each.case["seconds"] *= scale
    assert fit_compiled([each], SHIPPED)["moved"] == share


def test_without_compiled_steps_nothing_is_fused() -> None:
    assert fit_compiled([], SHIPPED) == {"moved": 1.0, "launch_s": 0.0}
