"""Watts of a device from how busy it is, and what steps and runs take: values, refusals, sources."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_products import make_product

from flopcalc import estimate_flops, plan, predict
from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import DeviceError, FlopcalcError, SpecError, WorkloadError
from flopcalc.base.units import format_energy, format_mass
from flopcalc.hardware.devices import find_device
from flopcalc.prediction.kernels.constants import load_predictor
from flopcalc.prediction.watts import (
    Power,
    Range,
    Shares,
    draw_power,
    find_energy,
    find_power_model,
    load_watts,
)
from flopcalc.prediction.work import Attention

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("shares", "drawn"),
    [
        (Shares(0.0, 0.0, 0.0), 0.2),
        (Shares(0.0, 0.0, 1.0), 0.3),
        (Shares(0.2, 0.0, 1.0), 0.5),  # the bend takes nothing yet
        (Shares(0.0, 0.2, 1.0), 0.4),
        (Shares(0.7, 0.0, 0.0), 0.9 / (1 + 0.9**12) ** (1 / 12)),
        (Shares(9.0, 9.0, 1.0), 1.0),
    ],
)
def test_a_device_draws_what_its_coefficients_say_up_to_its_limit(shares: Shares, drawn: float) -> None:
    assert draw_power((0.2, 0.1, 1.0, 0.5), shares) == pytest.approx(drawn, rel=1e-4)


@pytest.mark.parametrize(
    ("device", "evidence"),
    [("h200", "measured"), ("h100-sxm", "published"), ("b200", "published"), ("a100", "scaled"), ("t4", "scaled")],
)
def test_evidence_follows_what_was_measured(device: str, evidence: str) -> None:
    model = find_power_model(find_device(device))
    assert model is not None
    assert model.evidence == evidence
    assert model.limit_w == find_device(device).tdp_w
    assert list(model.factors) == load_watts()["intervals"][evidence]
    low, mid, high = model.find(Shares(0.3, 0.3)).watts
    assert low < mid <= high <= model.most * model.limit_w


def test_intervals_widen_with_less_evidence() -> None:
    widths = [high / low for low, high in load_watts()["intervals"].values()]
    assert list(load_watts()["intervals"]) == ["measured", "published", "scaled"]
    assert widths == sorted(widths)


def test_a_device_without_a_power_limit_has_no_watts() -> None:
    assert find_power_model(find_device("tpu-v4")) is None
    found = predict(TINY, seq_len=256, device="gh200-96gb")
    assert found.energy is None
    assert found.to_dict()["energy"] is None


@pytest.mark.parametrize("field", ["grid", "pue"])
def test_what_needs_watts_is_refused_without_a_power_limit(field: str) -> None:
    with pytest.raises(DeviceError, match=f"{field} needs the device's power limit, which is not known: add tdp_w"):
        predict(TINY, seq_len=256, device="gh200-96gb", **{field: 2})


def test_energy_of_a_step() -> None:
    """1 kW for 36 s on two GPUs is 20 Wh; both intervals are joined, and PUE and grid multiply."""
    power = Power(Range(900.0, 1000.0, 1100.0), "measured", "here")
    found = find_energy(power, Range(36.0, 36.0, 36.0), 4e6, 2, 1.5, 400.0)
    assert found is not None
    assert found.wh == pytest.approx((27.0, 30.0, 33.0))
    assert found.wh_per_million_tokens.mid == pytest.approx(7.5)
    assert found.co2_g == pytest.approx((10.8, 12.0, 13.2))
    assert found.to_dict() == {
        "power_w": {"low": 900.0, "mid": 1000.0, "high": 1100.0},
        "wh": pytest.approx({"low": 27.0, "mid": 30.0, "high": 33.0}),
        "wh_per_million_tokens": pytest.approx({"low": 6.75, "mid": 7.5, "high": 8.25}),
        "co2_g": pytest.approx({"low": 10.8, "mid": 12.0, "high": 13.2}),
        "pue": 1.5, "grid_g_per_kwh": 400.0, "evidence": "measured", "source": "here",
    }  # fmt: skip
    wide = find_energy(power, Range(36 * 0.7, 36.0, 36 * 1.3), 4e6, 1, None, None)
    assert wide is not None
    assert wide.wh == pytest.approx((10 * (1 - 0.1**0.5), 10.0, 10 * (1 + 0.1**0.5)))
    assert wide.co2_g is None


@pytest.mark.parametrize("pue", [0.5, 0.99, "0.2"])
def test_a_pue_below_one_is_refused(pue: float | str) -> None:
    with pytest.raises(WorkloadError, match="pue is what a site takes over what its computers take, 1 or more"):
        predict(TINY, seq_len=256, device="h200", pue=pue)


@pytest.mark.parametrize(
    ("given", "grams"), [("400g/kWh", 400), ("400 g/kwh", 400), ("0.4kg/kWh", 400), (400, 400), ("50", 50)]
)
def test_ways_to_write_a_grid(given: float | str, grams: float) -> None:
    found = predict(TINY, seq_len=256, device="h200", grid=given, pue="1.2").energy
    assert found is not None
    assert found.grid_g_per_kwh == grams
    assert found.pue == 1.2
    assert found.co2_g is not None
    assert found.co2_g.mid == pytest.approx(found.wh.mid / 1000 * grams)


@pytest.mark.parametrize("given", ["400g", "dirty", "-3", "0", "400/kWh", -1, 0])
def test_what_is_no_grid(given: float | str) -> None:
    with pytest.raises(FlopcalcError, match="grid"):
        predict(TINY, seq_len=256, device="h200", grid=given)


@pytest.mark.parametrize("field", ["grid", "pue"])
def test_commands_without_watts_refuse_a_site(field: str) -> None:
    with pytest.raises(FlopcalcError, match=f"estimate takes no {field}: predict, plan do"):
        estimate_flops("llama-3.2-1b", seq_len=16, **{field: 2})  # type: ignore[misc]


def test_energy_follows_gpus_and_pauses() -> None:
    """Each GPU draws the same; a pause lowers the watts and lengthens the time."""
    eager: dict[str, Any] = {"device": "h200", "execution": "eager", "optimizer": "adamw"}
    one, four = (predict(TINY, seq_len=256, gpus=gpus, **eager).energy for gpus in (1, 4))
    rested = predict(TINY, seq_len=256, device="h200", pause_s=0.5).energy
    assert one is not None
    assert four is not None
    assert rested is not None
    assert four.power == one.power
    assert four.wh == pytest.approx([4 * value for value in one.wh])
    assert four.wh_per_million_tokens == pytest.approx(one.wh_per_million_tokens)
    assert rested.power.watts.mid < one.power.watts.mid
    assert rested.wh.mid > one.wh.mid


def test_a_larger_batch_draws_more_and_spends_less_on_a_token() -> None:
    few, many = (predict(TINY, seq_len=512, batch_size=batch, device="h200").energy for batch in (1, 64))
    assert few is not None
    assert many is not None
    assert few.power.watts.mid < many.power.watts.mid
    assert few.wh_per_million_tokens.mid > many.wh_per_million_tokens.mid


def test_a_plan_spends_watts_and_not_the_power_limit() -> None:
    """A pipeline that waits draws less than one that does not."""
    given: dict[str, Any] = {
        "tokens": "1M", "device": "h200", "gpus": 4, "seq_len": 256, "global_batch": 8, "micro_batch": 1, "top": 1
    }  # fmt: skip
    found = {pp: plan(TINY, **given, pp=pp, tp=1, virtual=1, zero=0) for pp in (1, 4)}
    energies = {pp: each.best[0].energy for pp, each in found.items()}
    flat, deep = energies[1], energies[4]
    assert flat is not None
    assert deep is not None
    assert 126 < deep.power.watts.mid < flat.power.watts.mid < 700
    best = found[1].best[0]
    assert best.kwh == pytest.approx(flat.power.watts.mid * best.gpu_hours / 1000)
    assert best.to_dict()["energy"] == flat.to_dict()
    assert best.to_row().power_w == flat.power.watts.mid
    assert not any("full 700 W" in note for note in found[1].notes)
    assert flat.power.describe() in found[1].notes
    green = plan(TINY, **given, pp=1, tp=1, zero=0, grid="400g/kWh", pue=1.5).best[0].energy
    assert green is not None
    assert green.wh == pytest.approx([1.5 * value for value in flat.wh])
    assert green.co2_g == pytest.approx([0.4 * value for value in green.wh])


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A writer of this machine's own predictor."""
    shipped = json.loads((Path(find_data_dir()) / "predictors" / "h200-sxm.json").read_text(encoding="utf-8"))
    (tmp_path / "predictors").mkdir()
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))

    def write(**changes: Any) -> None:
        text = json.dumps({**shipped, **changes})
        (tmp_path / "predictors" / "h200-sxm.json").write_text(text, encoding="utf-8")
        load_predictor.cache_clear()

    yield write
    load_predictor.cache_clear()


def test_an_own_calibration_comes_first(own: Any) -> None:
    own(watts={"idle": 0.1, "running": 0.1, "compute": 1.0, "memory": 0.5, "limit_w": 500.0})
    model = find_power_model(find_device("h200"))
    assert model is not None
    assert model.coefficients == (0.1, 0.1, 1.0, 0.5)
    assert model.limit_w == 500
    assert model.source == "this machine, 2026-11-16"
    assert model.find(Shares(0.0, 0.0)).watts.mid == pytest.approx(100)


def test_an_older_calibration_has_the_shipped_watts(own: Any) -> None:
    own()
    model = find_power_model(find_device("h200"))
    assert model is not None
    assert model.evidence == "measured"
    assert model.source == load_watts()["devices"]["h200-sxm"]["source"]


@pytest.mark.parametrize(
    ("watts", "fault"),
    [
        ({"idle": 0.1, "running": 0.1, "compute": 1.0, "memory": 0.5}, "watts.*limit_w"),
        ({"idle": -1, "running": 0.1, "compute": 1.0, "memory": 0.5, "limit_w": 700}, "watts.idle.*0 or more"),
        ([1, 2, 3], "watts"),
    ],
)
def test_broken_watts_are_refused(own: Any, watts: object, fault: str) -> None:
    own(watts=watts)
    with pytest.raises(SpecError, match=f"{fault}.*calibrate --predictor` makes it again"):
        find_power_model(find_device("h200"))


def test_a_broken_file_of_watts_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "watts.json").write_text('{"schema": 1}', encoding="utf-8")
    monkeypatch.setattr("flopcalc.prediction.watts.find_data_dir", lambda: str(tmp_path))
    load_watts.cache_clear()
    try:
        with pytest.raises(SpecError, match=r"watts.json: .*install flopcalc again"):
            find_power_model(find_device("h200"))
    finally:
        load_watts.cache_clear()


def test_bytes_that_calls_move() -> None:
    assert make_product("forward", 16, 32, 8).count_bytes(2) == 2 * (16 * 8 + 16 * 32 + 32 * 8)
    assert make_product("forward", 16, 32, 8, copies=4).count_bytes(1) == 16 * 40 + 4 * 256
    assert make_product("forward", 2, 32, 8, copies=4).count_bytes(1) == 2 * 40 + 2 * 256  # two rows reach two experts
    call = Attention("a", "language", "forward", "causal", 2, 4, 2, 8, 8, 10, 20)
    assert call.count_bytes(2) == 2 * 2 * (4 * 10 + 2 * 20) * 16
    assert call._replace(direction="backward").count_bytes(2) == 2 * call.count_bytes(2)


@pytest.mark.parametrize(
    ("wh", "text"),
    [(1.2e-5, "0.012 mWh"), (0.0123, "12.3 mWh"), (0.9999, "1 Wh"), (27.5, "27.5 Wh"), (1234.5, "1.23 kWh"),
     (1.66e6, "1.66 MWh"), (3e13, "30,000 GWh")],
)  # fmt: skip
def test_energy_in_words(wh: float, text: str) -> None:
    assert format_energy(wh) == text


@pytest.mark.parametrize(
    ("grams", "text"),
    [(0.09, "90 mg"), (5, "5 g"), (1234, "1.23 kg"), (666e3, "666 kg"), (2e6, "2 t"), (3e11, "300,000 t")],
)
def test_mass_in_words(grams: float, text: str) -> None:
    assert format_mass(grams) == text
