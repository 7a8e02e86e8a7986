"""Kernels that others measured: their files, and what predict and plan make of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_products import make_product
from places import ROOT

from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import SpecError
from flopcalc.hardware.devices import find_device, load_devices
from flopcalc.hardware.systems import load_system
from flopcalc.prediction.clock import tell_kernels
from flopcalc.prediction.kernels.machine import Machine

FILES = sorted(Path(find_data_dir(), "systems").glob("*.json"))
SAME_DIE = {
    "a100-sxm-40gb": "a100-sxm-80gb",
    "a800-sxm-80gb": "a100-sxm-80gb",
    "h800-sxm": "h100-sxm",
    "gb200-nvl72": "gb200",
}
MEASURED = [path for path in FILES if path.stem not in SAME_DIE]
MOST_BYTES = 150_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_of_a_known_device_and_names_its_source(path: Path) -> None:
    system = load_system(path.stem)
    assert system is not None
    device = find_device(path.stem)
    assert system["provenance"]["licence"] == "Apache-2.0"
    assert path.stat().st_size < MOST_BYTES
    for kind, entry in system["products"].items():
        peak = device.peak_tflops.get(kind)
        assert peak is None or 0.3 * peak < entry["shape"][0] / 1e12 < 1.1 * peak, kind
        assert entry["median_error"] < 0.12, kind


def test_all_ten_systems_are_there() -> None:
    assert len(MEASURED) == 10
    assert load_system("v100-sxm2-16gb") is None


@pytest.mark.parametrize(
    ("device", "kind"), [("b200", "bf16"), ("b200", "mxfp8"), ("gb300", "nvfp4"), ("h100-sxm", "fp8"), ("l40s", "bf16")]
)
def test_large_products_run_at_the_measured_rate(device: str, kind: str) -> None:
    machine = Machine(device, kind)
    assert machine.has_kernels
    timed = machine.time_product(make_product("forward", 16384, 16384, 16384, module="x"))
    rate = 2 * 16384**3 / timed.seconds
    assert rate == pytest.approx(machine.shape.rate, rel=0.2)


@pytest.mark.parametrize(("device", "base"), SAME_DIE.items())
def test_a_device_with_the_same_die_has_its_kernels(device: str, base: str) -> None:
    machine, other = Machine(device), Machine(base)
    faster = machine.bandwidth / other.bandwidth
    assert machine.has_kernels
    assert machine.shape == other.shape._replace(bandwidth=other.shape.bandwidth * faster)
    assert machine.decode_speed == pytest.approx(other.decode_speed * faster)
    assert f"kernels measured on {find_device(base).name}, which has the same die" in tell_kernels(machine)


def test_a_users_device_has_the_kernels_of_its_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machines of published_runs.py: kernels scaled by both peaks, and by both bandwidths."""
    monkeypatch.setenv("FLOPCALC_DATA", str(ROOT / "benchmarks" / "data" / "machines"))
    load_devices.cache_clear()
    load_system.cache_clear()
    machine, other = Machine("h100-grand-teton"), Machine("h100-sxm")
    slower, narrower = 912.2 / 989.4, 2400 / 3350
    assert machine.shape.rate == pytest.approx(other.shape.rate * slower)
    assert machine.shape.bandwidth == pytest.approx(other.shape.bandwidth * narrower)
    assert machine.compute == pytest.approx(other.compute * slower)
    assert machine._attention_speeds == pytest.approx(
        {dim: speed * slower for dim, speed in other._attention_speeds.items()}
    )
    monkeypatch.undo()
    load_devices.cache_clear()
    load_system.cache_clear()


def test_a_die_without_kernels_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"schema": 1, "device_id": "v100-sxm2-16gb", "same_die_as": "v100-sxm2-32gb", "source": "x"}
    (tmp_path / "systems").mkdir()
    (tmp_path / "systems" / "v100-sxm2-16gb.json").write_text(json.dumps(data), encoding="utf-8")
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    load_system.cache_clear()
    with pytest.raises(SpecError, match="'v100-sxm2-32gb' has no kernels of its own"):
        load_system("v100-sxm2-16gb")
    load_system.cache_clear()


def test_what_was_measured_here_comes_first() -> None:
    assert not Machine("h200", "bf16").has_kernels
    assert Machine("h200", "fp8").has_kernels
    assert not Machine("tpu-v4", "bf16").has_kernels


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema 1"),
        ({"device_id": "h100-sxm"}, "is of 'h100-sxm'"),
        ({"decode_bytes_per_s": -1}, "positive number"),
    ],
)
def test_a_users_file_is_checked(
    change: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.loads(MEASURED[0].read_text(encoding="utf-8")) | {"device_id": "v100-sxm2-16gb"} | change
    (tmp_path / "systems").mkdir()
    (tmp_path / "systems" / "v100-sxm2-16gb.json").write_text(json.dumps(data), encoding="utf-8")
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    load_system.cache_clear()
    with pytest.raises(SpecError, match=words):
        load_system("v100-sxm2-16gb")
    load_system.cache_clear()
