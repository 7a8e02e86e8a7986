"""The host's constants: its pace, calls and operators, checkpoints, and what each model type's code takes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from fitted import MIXTRAL, SHIPPED, model, run

from flopcalc.core.model.config import load_config
from flopcalc.measure.predictor.fit.cases import ModelledCase, make_machine
from flopcalc.measure.predictor.fit.host import (
    HostStep,
    find_usual_probes,
    fit_checkpoints,
    fit_host,
    fit_types,
    is_device_slow,
    list_host_features,
    scale_to_usual_pace,
)
from flopcalc.measure.predictor.narrow import narrow
from flopcalc.measure.predictor.runs import FIT_GRIDS, cut_config, make_case
from flopcalc.prediction.build_work import count_calls
from flopcalc.prediction.host_time import name_mode, name_phase

SMALL_STEPS = [
    {"phase": "train", "probe_s": 0.004, "ratio": 10.0},
    {"phase": "train", "probe_s": 0.008, "ratio": 12.0},
    {"phase": "train", "probe_s": 0.005, "ratio": 30.0},
    {"phase": "prefill", "probe_s": 0.002, "ratio": 3.0},
    {"phase": "decode", "probe_s": 0.004, "ratio": 5.0},
]


def test_the_usual_probe_with_a_backward_pass_and_without() -> None:
    assert find_usual_probes(SMALL_STEPS) == {"train": 0.005, "forward": 0.003}
    assert find_usual_probes([]) == {}


@pytest.mark.parametrize(("case", "seconds"), [*zip(SMALL_STEPS, (0.05, 0.06, 0.15, 0.009, 0.015), strict=True)])
def test_small_steps_at_the_usual_pace(case: dict[str, Any], seconds: float) -> None:
    """A step that was measured while the host was slow took as many probes as at any other time."""
    assert scale_to_usual_pace(case, {"train": 0.005, "forward": 0.003}) == pytest.approx(seconds)


def test_the_host_finds_what_its_steps_were_made_of() -> None:
    units = SHIPPED["host"]["units"]
    truth = {"train": [0.004, 3e-5], "forward": [0.001, 2e-5], "decode": [0.002, 1e-5]}
    steps = []
    for phase, context in (("train", 0), ("prefill", 0), ("decode", 100)):
        for layers in (2, 8, 16):
            each = model(make_case("x", phase, 1, 64, context=context), cut_config("llama-3.2-1b", layers))
            features = list_host_features(each.work.dispatched, count_calls(each.load), units)
            weights = truth[name_phase(phase)]
            seconds = sum(weight * size for weight, size in zip(weights, features, strict=True))
            steps.append(HostStep(each, seconds))
    found = fit_host(steps, units)
    assert found == {name: pytest.approx(weights, rel=1e-4) for name, weights in truth.items()}


def test_steps_in_which_the_host_waits_say_nothing_about_it() -> None:
    """Where images enter, and where experts' optimizers are large, the device's time is in the wall time."""
    images = make_case("qwen2-vl-2b", "train", 1, 1024, FIT_GRIDS["qwen2-vl-2b"])
    waiting = [
        model(images, cut_config("qwen2-vl-2b", 2, 2)),
        model(make_case("mixtral", "train", 1, 64), MIXTRAL),
    ]
    assert set(fit_host([HostStep(each, 1.0) for each in waiting], {})) == set()
    prefill = model(make_case("mixtral", "prefill", 1, 64), MIXTRAL)
    assert set(fit_host([HostStep(prefill, 1.0)], {})) == {"forward"}


# --- Checkpoints ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("again", [[2e-3, 1e-5], [5e-4, 3e-5]])
def test_checkpoints_find_what_steps_were_made_of(again: list[float]) -> None:
    """Layers with few operators and with many separate a checkpoint from what it runs, in steps of every size."""
    probe_s = SHIPPED["probe_s"]["train"]
    truth = {**SHIPPED, "host": {**SHIPPED["host"], "again": again}}
    small, larger = [], []
    for name, layers in (("gpt2-medium", 24), ("llama-3.2-1b", 16), ("gemma-3-1b", 13)):
        config = cut_config(name, layers)
        each = model(make_case(name, "train", 1, 64, recompute="full"), config)
        small.append(HostStep(each, run(each, truth).step_s(1.0, probe_s)))
        # The larger ones were measured on a host at half its pace.
        each = model(make_case(name, "train", 1, 96, recompute="full"), config)
        seen = {"seconds": 2 * run(each, truth).step_s(), "probe_s": 2 * probe_s}
        larger.append(each._replace(case={**each.case, **seen}))
    found = fit_checkpoints(small, larger, SHIPPED)  # drawn to half and half: only nearly the same
    for each, seconds in small:
        fitted = run(each, {**SHIPPED, "host": {**SHIPPED["host"], "again": found}})
        assert fitted.step_s(1.0, probe_s) == pytest.approx(seconds, rel=0.05)


def test_without_checkpoints_they_take_nothing() -> None:
    assert fit_checkpoints([], [], SHIPPED) == [0.0, 0.0]


# --- Model types ------------------------------------------------------------------------------------------------------
TOWER = "qwen2-vl-2b"
BARE: dict[str, Any] = {**SHIPPED, "host": {**SHIPPED["host"], "types": {}}}
TYPES = {
    "llama": {"train": [0.006, 1.2], "forward": [0.0015, 0.9], "decode": [0.002, 1.1]},
    "qwen2_vl": {
        "train": [0.005, 1.1],
        "forward": [0.002, 1.05],
        "vision train": [0.0, 1.2],
        "vision forward": [0.0, 0.9],
    },  # a tower has no seconds of a call
}
FREE = (1e-4, 1e-4)  # pulls that hardly draw


@cache
def _list_cases(name: str) -> list[ModelledCase]:
    """Small steps of two depths of models that have `name` in theirs."""
    cases = [make_case("llama-3.2-1b", phase, 1, 64) for phase in ("train", "prefill")]
    cases.append(make_case("llama-3.2-1b", "decode", 1, 2, context=128))
    for phase in ("train", "prefill"):  # images first: their turn comes after the text's
        cases += [make_case(TOWER, phase, 1, 128, [[1, 16, 16]]), make_case(TOWER, phase, 1, 64)]
    return [_narrow(case, layers) for case in cases for layers in (4, 12) if name in case["model"]]


def _narrow(case: dict[str, Any], layers: int) -> ModelledCase:
    return model(case, narrow(dict(load_config(case["model"]).config), layers))


def _time_step(each: ModelledCase, types: dict[str, Any]) -> float:
    """Seconds of a small step on a host for which each type takes what `types` says."""
    clock = run(each, {**BARE, "host": {**BARE["host"], "types": types}})
    return clock.step_s(1.0, BARE["probe_s"][name_mode(each.case["phase"])])


def _make_steps(types: dict[str, Any] = TYPES, name: str = "") -> list[HostStep]:
    return [HostStep(each, _time_step(each, types)) for each in _list_cases(name)]


@pytest.mark.heavy
def test_types_find_what_their_steps_were_made_of() -> None:
    found = fit_types(_make_steps(), BARE, FREE)
    assert {kind: set(phases) for kind, phases in found.items()} == {kind: set(each) for kind, each in TYPES.items()}
    for kind, phases in TYPES.items():
        for phase, (call_s, factor) in phases.items():
            assert found[kind][phase] == [pytest.approx(call_s, abs=1e-4), pytest.approx(factor, rel=0.01)]
    # And steps of another depth take what they take.
    for case in (make_case("llama-3.2-1b", "train", 1, 64), make_case(TOWER, "train", 1, 128, [[1, 16, 16]])):
        each = _narrow(case, 8)
        assert _time_step(each, found) == pytest.approx(_time_step(each, TYPES), rel=0.01)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "types", [TYPES, *({"llama": {phase: [0.002, factor] for phase in TYPES["llama"]}} for factor in (0.8, 1.3))]
)
def test_what_is_drawn_to_the_usual_is_nearer_than_the_usual(types: dict[str, Any]) -> None:
    steps = _make_steps(types, "" if types is TYPES else "llama")

    def find_worst(fitted: dict[str, Any]) -> float:
        return max(abs(_time_step(each, fitted) / seconds - 1) for each, seconds in steps)

    found = fit_types(steps, BARE)
    assert 0 < find_worst(found) < 0.5 * find_worst({})
    for kind, phases in types.items():
        for phase, (_, factor) in phases.items():
            assert abs(found[kind][phase][1] - factor) < abs(1 - factor), (kind, phase)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_a_host_that_is_slower_in_all_has_a_factor(factor: float) -> None:
    usual = {phase: [factor * BARE["host"][phase][0], factor] for phase in ("train", "forward", "decode")}
    found = fit_types(_make_steps({"llama": usual}, "llama"), BARE, FREE)
    assert found == {
        "llama": {
            phase: [pytest.approx(call_s, abs=1e-4), pytest.approx(factor, rel=0.01)]
            for phase, (call_s, _) in usual.items()
        }
    }


def test_images_come_after_the_text() -> None:
    """Without steps of text there is nothing that a tower's could be separated from."""
    steps = _make_steps(name=TOWER)
    seen = [step for step in steps if step.modelled.case["grids"]]
    assert len(seen) == 4
    assert fit_types(seen, BARE) == {}
    text = [step for step in steps if step.modelled.case["phase"] == "train"]
    assert set(fit_types([*text, *seen], BARE)["qwen2_vl"]) == {"train", "vision train"}


@pytest.mark.parametrize(
    ("case", "is_slow"),
    [
        (make_case("llama-3.2-1b", "train", 32, 4096), True),  # the device bounds it
        (make_case("llama-3.2-1b", "train", 1, 64, recompute="full"), False),
    ],
)
def test_steps_that_say_nothing_about_a_type(case: dict[str, Any], is_slow: bool) -> None:
    each = _narrow(case, 4)
    assert is_device_slow(each, make_machine(BARE)) is is_slow
    assert fit_types([HostStep(each, 1.0)], BARE) == {}
