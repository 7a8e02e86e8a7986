"""The fit of watts finds the coefficients that made its rows, and gives none where too little was measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flopcalc.measure.predictor.fit import clock
from flopcalc.measure.predictor.fit.cases import model_cases
from flopcalc.measure.predictor.fit.clock import PowerPoint, fit_points, fit_watts, read_calls
from flopcalc.measure.predictor.runs import get_config, list_metered_steps
from flopcalc.prediction.watts import Shares, draw_power

MACHINE: Any = SimpleNamespace(peak=1000e12, bandwidth=4e12, device=SimpleNamespace(tdp_w=700.0))
LIMIT: Any = {"device_id": "h200-sxm", "power_limit_w": 500.0}
# FLOPs and bytes of one call of a second, and whether kernels run.
CALLS = [(flops * 1e14, moved * 4e11, 1.0) for flops in (0, 1, 2, 3) for moved in (0, 2, 4, 6)]


def make_records(coefficients: tuple[float, float, float, float], limit_w: float) -> list[dict[str, Any]]:
    idle, *_ = coefficients
    records = [{"power": "rest", "flops": 0, "bytes": 0, "seconds": 0.05, "power_w": idle * limit_w}]
    for flops, moved, running in CALLS:
        drawn = draw_power(coefficients, Shares(flops / MACHINE.peak, moved / MACHINE.bandwidth, running))
        records.append({"power": "product", "flops": flops, "bytes": moved, "seconds": 1.0, "power_w": drawn * limit_w})
    return records


@pytest.mark.parametrize("coefficients", [(0.2, 0.1, 1.5, 0.6), (0.1, 0.3, 0.8, 1.2)])
def test_the_fit_finds_the_coefficients(coefficients: tuple[float, float, float, float]) -> None:
    found = fit_watts([], make_records(coefficients, 500.0), MACHINE, LIMIT)
    assert found is not None
    assert list(found) == ["idle", "running", "compute", "memory", "limit_w"]
    assert tuple(found.values()) == pytest.approx((*coefficients, 500.0), rel=0.01)


def test_the_boards_own_limit_counts_before_the_data_sheets() -> None:
    records = make_records((0.2, 0.1, 1.5, 0.6), 700.0)
    unknown: Any = {"device_id": "h200-sxm", "power_limit_w": None}
    found = fit_watts([], records, MACHINE, unknown)
    assert found is not None
    assert found["limit_w"] == 700
    other: Any = SimpleNamespace(peak=1e15, bandwidth=4e12, device=SimpleNamespace(tdp_w=None))
    assert fit_watts([], records, other, unknown) is None


def _without_rest(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return records[1:]


def _without_counter(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**record, "power_w": None} for record in records]


def _few(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return records[:8]


@pytest.mark.parametrize("spoil", [_without_rest, _without_counter, _few])
def test_too_little_gives_no_watts(spoil: Any) -> None:
    assert fit_watts([], spoil(make_records((0.2, 0.1, 1.5, 0.6), 500.0)), MACHINE, LIMIT) is None


def test_other_records_are_no_calls() -> None:
    rows = [{"units": {}}, {"calls": [], "left_out": []}, {"model": "llama", "energy_j": 3.0, "is_host": False}]
    assert read_calls(rows, MACHINE, 500.0) == []


def test_steps_are_read_over_the_time_that_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    class Clock:
        def find_shares(self, seconds: float) -> Shares:
            asked.append(seconds)
            return Shares(0.1, 0.2, 0.5)

    monkeypatch.setattr(clock, "run_clock", lambda *_, **__: Clock())
    base = {"model": "m", "compiled": False, "seconds": 0.5}
    cases = [{**base, "mean_s": 0.6, "energy_j": 240.0}, {**base, "energy_j": 100.0}, base]
    found = clock.read_steps([SimpleNamespace(case=case) for case in cases], MACHINE, 500.0)  # type: ignore[misc]
    shares = Shares(0.1, 0.2, 0.5)
    assert found == [PowerPoint("m", shares, pytest.approx(0.8)), PowerPoint("m", shares, pytest.approx(0.4))]
    assert asked == [0.6, 0.5]


def test_a_metered_step_has_the_work_of_its_adapters() -> None:
    rows = [row for row in list_metered_steps("quick").values() if row["model"] == "qwen2.5-0.5b"]
    (lora,) = rows
    whole = {name: value for name, value in lora.items() if name != "lora"}
    modelled = model_cases([whole, lora], get_config, "h200-sxm")
    assert [each.estimator.recipe.lora is not None for each in modelled] == [False, True]
    assert modelled[0].work != modelled[1].work
    # Records of such steps are no single calls.
    assert read_calls([{**lora, "power_w": 500.0, "energy_j": 1.0}], MACHINE, 500.0) == []


def test_rest_is_no_row_of_the_fit() -> None:
    points = read_calls(make_records((0.2, 0.1, 1.5, 0.6), 500.0), MACHINE, 500.0)
    assert fit_points(points, 0.2) == fit_points([point for point in points if point.name != "rest"], 0.2)
