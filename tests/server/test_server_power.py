"""How busy a server's GPUs are, worked out by hand, and the watts that follow."""

from __future__ import annotations

import pytest

from flopcalc.hardware.devices import find_device
from flopcalc.prediction.watts import Shares, find_power_model, load_watts
from flopcalc.server.power import MeanStep, count_shares, find_server_watts
from flopcalc.server.served import CachedLayers, ServedModel, ServedWeight
from flopcalc.server.step import Deployment

H100 = find_device("h100-sxm")
PEAK, BANDWIDTH = H100.peak_tflops["bf16"] * 1e12, H100.bandwidth_gb_per_s * 1e9  # type: ignore[operator]
DENSE = ServedWeight("mlp", "column", 8, 4, 3, 2.0, "bf16", "")
HEAD = ServedWeight("lm_head", "column", 100, 4, 1, 2.0, "bf16", "")
EXPERTS = ServedWeight("mlp", "expert", 8, 4, 3, 2.0, "bf16", "", experts=4, active=2)
KEYS = CachedLayers("full", 3, 8, 2, 16, 16, 64)


def make_model(
    weights: tuple[ServedWeight, ...] = (), cached: tuple[CachedLayers, ...] = (), head: ServedWeight | None = None
) -> ServedModel:
    return ServedModel("tiny", 3, 4, weights, head, cached, 0.0, 0.0, 2.0, 0, 1, 0, 0.0, 0)


@pytest.mark.parametrize(
    ("model", "layout", "step", "flops", "moved"),
    [
        (make_model((DENSE,)), Deployment(), MeanStep(1.0, 5, 10), 2 * 96 * 5, 96 * 2),
        (make_model((DENSE,)), Deployment(), MeanStep(1.0, 5, 10, 2), 2 * 96 * 7, 96 * 2),
        (make_model((DENSE,)), Deployment(tp=2), MeanStep(1.0, 5, 10), 96 * 5, 96),
        # Each of two attention ranks decodes five sequences with all weights.
        (make_model((DENSE,)), Deployment(dp=2), MeanStep(1.0, 5, 10), 2 * 96 * 5, 96 * 2),
        (make_model(head=HEAD), Deployment(), MeanStep(1.0, 5, 10, 2), 2 * 400 * 5, 400 * 2),
        (make_model((EXPERTS,)), Deployment(), MeanStep(1.0, 1, 10), 2 * 96 * 2, 96 * 2 * 2),
        (make_model((EXPERTS,)), Deployment(tp=2, ep=2), MeanStep(1.0, 2, 10), 2 * 96 * 2, 96 * 3),
        (make_model(cached=(KEYS,)), Deployment(), MeanStep(1.0, 5, 10), 2 * 150 * 8 * 32, 150 * 64 * 2),
        (make_model(cached=(KEYS._replace(kind="window", window=4),)), Deployment(), MeanStep(1.0, 5, 10),
         2 * 60 * 8 * 32, 60 * 64 * 2),
        (make_model(cached=(CachedLayers("state", 3, state_bytes=7),)), Deployment(), MeanStep(1.0, 5, 10), 0, 210),
    ],
)  # fmt: skip
def test_shares_by_hand(model: ServedModel, layout: Deployment, step: MeanStep, flops: float, moved: float) -> None:
    found = count_shares(model, layout, H100, step)
    assert found == pytest.approx((flops / PEAK, moved / BANDWIDTH, 1.0))
    assert count_shares(model, layout, H100, step._replace(seconds=2.0))[:2] == pytest.approx(
        [value / 2 for value in found[:2]]
    )


def test_watts_are_of_all_gpus() -> None:
    step, model = MeanStep(1e-11, 5, 10), make_model((DENSE,))
    layout = Deployment(tp=2, dp=2)
    power = find_power_model(H100)
    assert power is not None
    one = power.find(count_shares(model, layout, H100, step)).watts
    assert find_server_watts(model, layout, H100, step) == pytest.approx([4 * value for value in one])


def test_a_measured_gpu_has_the_interval_of_served_ones() -> None:
    device = find_device("h200")
    found = find_server_watts(make_model(), Deployment(), device, MeanStep(1.0, 1, 1))
    power = find_power_model(device)
    assert found is not None
    assert power is not None
    assert found.mid == power.find(Shares(0.0, 0.0)).watts.mid
    assert [found.low / found.mid, found.high / found.mid] == pytest.approx(load_watts()["intervals"]["published"])


def test_no_watts_without_a_power_limit() -> None:
    assert find_server_watts(make_model((DENSE,)), Deployment(), find_device("tpu-v5e"), MeanStep(1.0, 1, 1)) is None
