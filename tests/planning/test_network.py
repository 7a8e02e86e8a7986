"""Interconnects: what the table says, how long collectives take, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopcalc.base.errors import DeviceError, SpecError
from flopcalc.hardware.devices import load_devices
from flopcalc.planning.network import (
    Interconnect,
    check_reach,
    count_reached,
    find_interconnect,
    load_interconnects,
    time_collective,
    time_message,
    time_routing,
)

GB = 1e9
OWN = '[[interconnect]]\nid = "mine"\nname = "x"\ndevices = ["t4"]\nlike = "hgx-h200"\nsource = "s"\ndate = "d"\n'
# Nodes of 4 with 100 GB/s inside; one port of 10 GB/s a device, always filled.
NET = Interconnect(
    "net", "", (), 4, ((1.0, 100 * GB), (1e12, 100 * GB)), 0.5, 1e-6, 10 * GB, 0.0, ((1.0, 1.0), (1e12, 1.0)), "", ""
)


@pytest.mark.parametrize(
    ("kind", "size", "group", "stride", "seconds"),
    [
        # 2 · 3/4 of the array at 100 GB/s, in one node
        ("all_reduce", 1 * GB, 4, 1, 1.5 * 1 / 100),
        # gathers run at half the rate: 3/4 at 50 GB/s
        ("all_gather", 1 * GB, 4, 1, 0.75 / 50),
        ("reduce_scatter", 1 * GB, 4, 1, 0.75 / 50),
        # two devices that lie 2 apart are still in one node
        ("all_gather", 1 * GB, 2, 2, 0.5 / 50),
        # 8 in two nodes: four ports of 10 GB/s, slower than the 50 inside
        ("all_gather", 1 * GB, 8, 1, 0.875 / 40),
        ("all_reduce", 1 * GB, 8, 1, 2 * 0.875 / 40),
        # 8 that lie 4 apart: one port each
        ("all_gather", 1 * GB, 8, 4, 0.875 / 10),
        # half of what a device sends leaves the node, through its own port
        ("all_to_all", 1 * GB, 8, 1, 0.5 / 10 + 1e-6),
        # nothing to do, and the floor
        ("all_reduce", 1 * GB, 1, 1, 0.0),
        ("all_reduce", 0.0, 8, 1, 0.0),
        ("all_reduce", 10.0, 4, 1, 1e-6),
    ],
)
def test_collectives(kind: str, size: float, group: int, stride: int, seconds: float) -> None:
    assert time_collective(NET, kind, size, group, stride) == pytest.approx(seconds)


def test_each_further_node_adds_a_hop() -> None:
    net = NET._replace(hop_s=1e-3)
    near, far = (time_collective(net, "all_gather", 1.0, group) for group in (8, 64))
    assert far - near == pytest.approx(14e-3)


def test_messages() -> None:
    assert time_message(NET, 1 * GB, 1, 2) == pytest.approx(1 / 50 + 5e-7)
    assert time_message(NET, 1 * GB, 4, 2) == pytest.approx(1 / 9 + 5e-7)
    # A ring that leaves the node somewhere is as fast as there.
    assert time_message(NET, 1 * GB, 1, 8) == pytest.approx(1 / 9 + 5e-7)


def test_a_token_is_sent_to_a_node_once() -> None:
    # Two nodes, one expert a token: the same as a plain exchange. Many experts: at most one copy leaves, of active / 2.
    assert time_routing(NET, GB, 8, 1) == pytest.approx(time_collective(NET, "all_to_all", GB, 8))
    plain, once = time_collective(NET, "all_to_all", GB, 8), time_routing(NET, GB, 8, 8)
    assert once / plain == pytest.approx((1 - 0.5**8) / 4, rel=1e-3)
    # Inside a node once to every device: 4 of them get all of 8 copies but for (3/4)^8.
    plain, once = time_collective(NET, "all_to_all", GB, 4), time_routing(NET, GB, 4, 8)
    assert once / plain == pytest.approx(4 * (1 - 0.75**8) / 8, rel=1e-3)


@pytest.mark.parametrize(
    ("places", "active", "groups", "reached"),
    [
        (8, 1, (1, 1), 1.0),
        (1, 8, (1, 1), 1.0),
        (2, 2, (1, 1), 1.5),
        (8, 10**6, (8, 4), 4.0),  # each group at a place of its own
        (64, 10**6, (8, 4), 32.0),
        (4, 10**6, (8, 4), 4 * (1 - 15 / 70)),  # two groups at a place: none of its two with 15 of 70 choices
        (2, 10**6, (8, 4), 2 * (1 - 1 / 70)),
        (3, 10**6, (8, 4), 3.0),  # does not divide: no limit
        (8, 2, (8, 8), 15 / 8),
    ],
)
def test_places_that_a_token_reaches(places: int, active: int, groups: tuple[int, int], reached: float) -> None:
    assert count_reached(places, active, groups) == pytest.approx(reached)


def test_measured_rates_are_met() -> None:
    net = find_interconnect(None, "h200")
    size = 256 * (1 << 20)
    # busbw 442.27 GB/s of an all-reduce of 256 MiB on 8 devices
    assert time_collective(net, "all_reduce", size, 8) == pytest.approx(2 * 7 / 8 * size / 442.27e9)
    assert time_collective(net, "all_gather", size, 8) == pytest.approx(7 / 8 * size / (0.73 * 442.27e9))


@pytest.mark.parametrize(
    ("device", "name", "per_node", "busbw", "across"),
    [
        # bus bandwidth of an all-reduce of 256 MiB inside, and a device's port, in GB/s
        ("gb200", "nvl72-gb200", 72, 607.46, 50),
        ("gb200-nvl72", "nvl72-gb200", 72, 607.46, 50),
        ("gb300", "nvl72-gb300", 72, 613.11, 100),
        ("b300-sxm", "hgx-b300", 8, 656.86, 100),
        ("mi300x", "mi300x-xgmi", 8, 442.27 * 0.727, 50),
        ("mi355x", "mi350x-xgmi", 8, 442.27 * 0.869, 50),
        ("h20", "hgx-h20", 8, 442.27, 50),
        ("a800-sxm-80gb", "hgx-a800", 8, 194.07 * 0.667, 25),
        ("h100-nvl", "pcie5-x16", 8, None, 50),
        ("gh200-144gb", "gh200-quad", 4, 442.27 * 0.73, 25),
        ("gaudi2", "hls-gaudi2", 8, 442.27 * 0.534, 37.5),
        ("gaudi3", "hls-gaudi3", 8, 442.27 * 1.067, 75),
        ("tpu-v5e", "tpu-v5e-ici", 256, None, 3.125),
        ("tpu-v5p", "tpu-v5p-ici", 8960, None, 6.25),
        ("tpu-v7x", "tpu-v7x-ici", 9216, None, 6.25),
        ("trainium2", "trn2-neuronlink", 16, None, 25),
        ("l40s", "pcie4-l40s", 8, None, 50),
        ("rtx-4090", "pcie4-x16", 8, None, 25),
        ("t4", "pcie3-x16", 8, None, 0),
        ("v100-pcie-32gb", "pcie3-x16", 8, None, 0),
        ("arc-pro-b60", "pcie5-x8", 8, None, 50),
        ("trainium1", "trn1-neuronlink", 16, None, 6.25),
        ("trainium3", "trn3-neuronswitch", 144, 442.27 * 2.08, 0),
        ("ascend-910b3", "atlas-800-a2", 8, 442.27 * 0.285, 25),
        ("ascend-910c-die", "cloudmatrix-384-die", 768, 442.27 * 0.285, 24.5),
        ("ascend-910c-package", "cloudmatrix-384", 384, 442.27 * 0.57, 49),
        ("rtx-pro-6000-server", "pcie5-x16", 8, None, 50),
    ],
)
def test_usual_interconnects(device: str, name: str, per_node: int, busbw: float | None, across: float) -> None:
    net = find_interconnect(None, device)
    assert (net.id, net.per_node, net.across) == (name, per_node, across * GB)
    if busbw is not None:
        size = 256 * (1 << 20)
        seconds = time_collective(net, "all_reduce", size, per_node)
        assert seconds == pytest.approx(2 * (per_node - 1) / per_node * size / (busbw * GB))


def test_a_run_stays_inside_a_node_whose_ports_are_not_known() -> None:
    net = find_interconnect(None, "t4")
    check_reach(net, 8)
    with pytest.raises(DeviceError, match=r"pcie3-x16 joins 8 devices, and no source was read .*with across_gb_per_s"):
        check_reach(net, 9)
    check_reach(find_interconnect("hgx-h200", "t4"), 9)


def test_a_rack_of_72_is_one_node() -> None:
    net = find_interconnect(None, "gb200-nvl72")
    inside, outside = (time_collective(net, "all_gather", 1 * GB, group) for group in (72, 144))
    assert inside < outside
    assert time_collective(net, "all_gather", 1 * GB, 64) < inside


def test_devices_without_a_network_are_known() -> None:
    devices = {device.id for device in load_devices()[0]}
    assert devices - {device for net in load_interconnects().values() for device in net.devices} == {
        "mi250x-gcd",
        "mi250x-package",
        "jetson-agx-orin-64gb",
        "jetson-t5000",
        *(each for each in devices if each.startswith("apple-")),
    }


def test_every_interconnect_has_what_it_needs() -> None:
    known = load_interconnects()
    assert {"hgx-a100", "hgx-h100", "hgx-h200", "hgx-b200"} <= set(known)
    for net in known.values():
        assert net.source
        assert net.date
        assert net.per_node > 1
        assert net.across > 0 or net.id in ("pcie3-x16", "trn3-neuronswitch")
        assert list(net.inside) == sorted(net.inside)
        assert all(0 < share <= 1 for _, share in net.filling)
    defaults = [device for net in known.values() for device in net.devices]
    assert len(defaults) == len(set(defaults))


@pytest.mark.parametrize(
    ("name", "device", "words"),
    [
        ("hgx-h2000", "h200", "interconnect 'hgx-h2000' unknown. Did you mean hgx-h200"),
        (None, "apple-m2", "for Apple M2 (10-core GPU): the nearest device with one is "),
        (
            None,
            "mi250x-gcd",
            "for AMD Instinct MI250X: the nearest device with one is AMD Instinct MI300X (mi300x-xgmi)",
        ),
        (None, "h2000", "device 'h2000' unknown"),
    ],
)
def test_refused(name: str | None, device: str, words: str) -> None:
    with pytest.raises(DeviceError) as error:
        find_interconnect(name, device)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[interconnect]]\nname = "x"\n', "cannot be read"),
        ('[[interconnect]]\nid = "x"\nname = "x"\n', "'inside_gb_per_s' is missing"),
        ('[[interconnect]]\nid = "x"\nname = "x"\nlike = "nothing"\n', "'nothing' is missing"),
        (OWN + "per_node = 0\n", "interconnect 'mine': per_node must be positive, not 0"),
        (OWN + "across_gb_per_s = 'fast'\n", "interconnect 'mine': "),
        (OWN + "across_gb_per_s = -1\n", "across_gb_per_s must be positive, or 0 if not known, not -1"),
        (OWN + "inside_gb_per_s = []\n", "inside_mib and inside_gb_per_s must be as many, positive"),
        (OWN + "inside_mib = [1, 1]\ninside_gb_per_s = [2, 3]\n", "and sizes must grow"),
        (OWN + "inside_mib = [1, 2]\ninside_gb_per_s = [2, -3]\n", "must be as many, positive"),
        (OWN.replace("t4", "t5"), "interconnect 'mine': device 't5' unknown"),
        ("[filling]\nmib_per_port = [1]\nshare = [0]\n", "mib_per_port and share must be as many, positive"),
    ],
)
def test_broken_tables_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "interconnects.toml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    load_interconnects.cache_clear()
    try:
        with pytest.raises(SpecError) as error:
            load_interconnects()
        assert words in str(error.value)
    finally:
        load_interconnects.cache_clear()


def test_own_interconnect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = OWN.replace('"t4"', '"t4", "h200"') + "across_gb_per_s = 3\n"
    (tmp_path / "interconnects.toml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    load_interconnects.cache_clear()
    try:
        assert find_interconnect(None, "t4").across == 3e9
        assert find_interconnect(None, "h200-sxm").id == "mine"  # before the shipped one; named by an alias
    finally:
        load_interconnects.cache_clear()
