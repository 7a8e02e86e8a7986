"""The device table: every row sound, no name in two rows, variants kept apart, unknown names refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flopcalc import DeviceError, SpecError, estimate_flops, mfu, peak_flops_per_s, plan, predict
from flopcalc.base.vocabulary import KERNELS
from flopcalc.cli import main
from flopcalc.hardware.devices import (
    DTYPES,
    Device,
    detect_device,
    find_detected,
    find_device,
    load_devices,
    parse_dtype,
)

DEVICES = load_devices()[0]


def plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).lower()


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.id)
def test_row_is_sound(device: Device) -> None:
    assert device.source
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", device.date)
    assert device.peak_tflops
    assert set(device.peak_tflops) <= set(DTYPES)
    assert all(type(peak) is float and 0 < peak < 1e6 for peak in device.peak_tflops.values())
    assert device.sdpa is None or device.sdpa in KERNELS[1:]
    for value in (device.memory_gb, device.bandwidth_gb_per_s, device.tdp_w):
        assert value is None or value > 0
    assert device.id == device.id.lower()
    # A faster format is never slower than a finer one.
    peaks = device.peak_tflops
    for fast, slow in (
        ("bf16", "fp32"), ("fp16", "fp32"), ("fp8", "bf16"), ("fp4", "fp8"), ("fp16", "tf32"), ("mxfp8", "fp8"),
        ("fp6", "fp8"), ("mxfp4", "mxfp8"), ("mxfp8", "bf16"),
    ):  # fmt: skip
        if fast in peaks and slow in peaks:
            assert peaks[fast] >= peaks[slow], (fast, slow)
    # fp4 is the peak of the 4-bit formats that the device has, so it never stands alone.
    narrow = {peaks[each] for each in ("nvfp4", "mxfp4") if each in peaks}
    assert narrow == ({peaks["fp4"]} if "fp4" in peaks else set())


def test_no_name_stands_in_two_rows() -> None:
    owners: dict[str, str] = {}
    for device in DEVICES:
        for name in {plain(name) for name in (device.id, device.name, *device.aliases)}:
            assert owners.setdefault(name, device.id) == device.id, name


def test_short_names_list_devices_and_are_none_themselves() -> None:
    devices, ambiguous, defaults = load_devices()
    ids = {device.id for device in devices}
    names = {plain(name) for device in devices for name in (device.id, device.name, *device.aliases)}
    for short, variants in ambiguous.items():
        assert len(variants) > 1
        assert set(variants) <= ids
        assert plain(short) not in names
    for short, default in defaults.items():
        assert default in ambiguous.get(plain(short), ids)
        assert plain(short) not in names


@pytest.mark.parametrize(
    ("name", "device_id", "bf16"),
    [
        ("H100 SXM", "h100-sxm", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "h100-sxm", 989.4e12),
        ("h100-pcie", "h100-pcie", 756e12),
        ("NVIDIA H100 PCIe", "h100-pcie", 756e12),
        ("NVIDIA H100 NVL", "h100-nvl", 835e12),
        ("h200", "h200-sxm", 989.4e12),
        ("NVIDIA H200", "h200-sxm", 989.4e12),
        ("l40", "l40", 181.05e12),
        ("NVIDIA L40", "l40", 181.05e12),
        ("l40s", "l40s", 362.05e12),
        ("NVIDIA L40S", "l40s", 362.05e12),
        ("l4", "l4", 121e12),
        ("a40", "a40", 149.7e12),
        ("NVIDIA A40", "a40", 149.7e12),
        ("a4000", "rtx-a4000", 76.7e12),
        ("NVIDIA RTX A4000", "rtx-a4000", 76.7e12),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb", 312e12),
        ("NVIDIA B300 SXM6 AC", "b300-sxm", 2250e12),
        ("gb200", "gb200", 2500e12),
        ("gb200-nvl72", "gb200-nvl72", 2500e12),
        ("GB200 NVL72", "gb200-nvl72", 2500e12),
        ("NVIDIA GB300", "gb300", 2500e12),
        ("gb300-nvl72", "gb300", 2500e12),
        ("NVIDIA GH200 144G HBM3e", "gh200-144gb", 989.4e12),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada", 364.2e12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server", 467.8e12),
        ("NVIDIA GeForce RTX 5080", "rtx-5080", 112.6e12),
        ("GeForce RTX 5070 Ti", "rtx-5070-ti", 87.9e12),
        ("Jetson AGX Orin 64GB", "jetson-agx-orin-64gb", 42.5e12),
        ("trn3", "trainium3", 671e12),
        ("910B2", "ascend-910b2", 353.9e12),
        ("Ascend 910C die", "ascend-910c-die", 376e12),
    ],
)
def test_variants_do_not_mix(name: str, device_id: str, bf16: float) -> None:
    assert find_device(name).id == device_id
    assert peak_flops_per_s(name) == bf16


@pytest.mark.parametrize(
    ("device_id", "peaks"),
    [
        # CUTLASS's table of Blackwell's instructions: 8 and 6 bits at twice bf16, 4 bits at twice that
        ("b200-sxm", {"bf16": 1, "tf32": 1 / 2, "fp8": 2, "mxfp8": 2, "fp6": 2, "int8": 2, "nvfp4": 4, "mxfp4": 4}),
        ("gb200-nvl72", {"bf16": 1, "tf32": 1 / 2, "fp8": 2, "mxfp8": 2, "fp6": 2, "int8": 2, "nvfp4": 4, "mxfp4": 4}),
        # Blackwell Ultra: 4 bits faster, int8 cut
        ("gb300", {"bf16": 1, "tf32": 1 / 2, "fp8": 2, "mxfp8": 2, "fp6": 2, "int8": 0.066, "nvfp4": 6, "mxfp4": 6}),
        # CDNA4: 6 bits as fast as 4
        ("mi355x", {"bf16": 1, "fp8": 2, "fp6": 4, "mxfp4": 4, "int8": 2}),
        # GeForce: FP32 accumulate at half rate in 16 bits, but not in the formats of 8 bits and less
        ("rtx-5090", {"bf16": 1, "tf32": 1 / 2, "fp8": 4, "mxfp8": 4, "fp6": 4, "int8": 4, "nvfp4": 8, "mxfp4": 8}),
        ("rtx-5080", {"bf16": 1, "tf32": 1 / 2, "fp8": 4, "mxfp8": 4, "fp6": 4, "int8": 4, "nvfp4": 8, "mxfp4": 8}),
        ("rtx-5070-ti", {"bf16": 1, "tf32": 1 / 2, "fp8": 4, "mxfp8": 4, "fp6": 4, "int8": 4, "nvfp4": 8, "mxfp4": 8}),
        ("trainium3", {"bf16": 1, "tf32": 1, "mxfp8": 3.75, "mxfp4": 3.75}),
        ("ascend-910b3", {"bf16": 1, "fp16": 1, "int8": 2}),
    ],
)
def test_formats_keep_their_ratios(device_id: str, peaks: dict[str, float]) -> None:
    found = find_device(device_id).peak_tflops
    assert {dtype: found[dtype] / found["bf16"] for dtype in peaks} == pytest.approx(peaks, rel=2e-3)


@pytest.mark.parametrize(
    ("device_id", "units", "per_clock", "mhz"),
    [
        ("rtx-6000-ada", 142, 1024, 2505),
        ("rtx-pro-6000-server", 188, 1024, 2430),
        ("rtx-5080", 84, 512, 2617),
        ("rtx-5070-ti", 70, 512, 2452),
        ("jetson-agx-orin-64gb", 16, 2048, 1300),
        ("ascend-910b1", 24, 8192, 1850),
        ("ascend-910b4", 20, 8192, 1500),
        ("apple-m2-pro", 19, 256, 1398),
        ("apple-m3-ultra", 80, 256, 1398),
    ],
)
def test_peaks_follow_from_units_and_clock(device_id: str, units: int, per_clock: int, mhz: int) -> None:
    peak = peak_flops_per_s(device_id, "fp16")
    assert peak == pytest.approx(units * per_clock * mhz * 1e6, rel=3e-3)


def test_gb200_and_its_rack_are_one_gpu() -> None:
    alone, rack = find_device("gb200"), find_device("gb200-nvl72")
    assert alone.replace(id="", name="", aliases=()) == rack.replace(id="", name="", aliases=())


@pytest.mark.parametrize("name", ["H200-SXM", "h200 sxm", "  H200_sxm ", "nvidia h200", "NVIDIA-H200", "H200 Sxm"])
def test_case_spaces_and_dashes_do_not_matter(name: str) -> None:
    assert find_device(name).id == "h200-sxm"


@pytest.mark.parametrize(
    "name",
    [
        "h200x",
        "h20 0 x",
        "H100 CNX",
        "L40G",
        "A4",
        "",
        "gpu",
    ],
)
def test_unknown_devices_get_no_neighbours_number(name: str) -> None:
    with pytest.raises(DeviceError, match=r"unknown.*peak=FLOPS_PER_S"):
        find_device(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("NVIDIA H200 NVL", "no NVIDIA page read"),
        ("RTX A5000", "no page with its tensor figure"),
        ("A10G", "all in circulation"),
        ("Apple M4", "one public table has it at 1470 and at 1578 MHz"),
        ("m4-max", "public tables disagree"),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", "depends on the laptop"),
    ],
)
def test_devices_without_a_source_are_refused_by_name(name: str, why: str) -> None:
    remedy = r"add it to your own devices.toml \(docs/specs.md\); for an MFU, peak=FLOPS_PER_S is enough$"
    with pytest.raises(DeviceError, match=rf"device '{name}' has no peak here: .*{why}.*; {remedy}"):
        find_device(name)


@pytest.mark.parametrize(("device_id", "cores"), [("apple-m3", 10), ("apple-m3-pro", 18), ("apple-m3-max", 40)])
def test_apple_peaks_follow_from_cores_and_clock(device_id: str, cores: int) -> None:
    assert peak_flops_per_s(device_id, "fp16") == pytest.approx(cores * 256 * 1398e6, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("h200-sxn", ["h200-sxm", "h800-sxm", "h100-sxm"]),
        ("h300", ["h20", "h800-sxm", "h200-sxm"]),  # never mi300x or rtx-3090
        ("mi301x", ["mi350x", "mi300x", "mi355x"]),
        ("MI999", ["mi355x", "mi350x", "mi325x"]),
        ("NVIDIA GeForce RTX 4080", ["rtx-4090"]),
        ("NVIDIA B400", ["b300-sxm", "b200-sxm"]),
        ("gaudi4", ["gaudi3", "gaudi2"]),
        ("hh200-sxm", ["h200-sxm", "h800-sxm", "h100-sxm"]),
        ("abacus", []),
    ],
)
def test_suggestions_are_of_the_same_maker_and_generation(name: str, near: list[str]) -> None:
    with pytest.raises(DeviceError, match="unknown") as caught:
        find_device(name)
    text = str(caught.value)
    assert (text.partition("Did you mean ")[2].partition("?")[0].split(", ") if near else []) == near
    assert ("Did you mean" in text) == bool(near)


@pytest.mark.parametrize(
    ("name", "count"), [("rtx", 10), ("tpu", 5), ("mi250x", 2), ("Ascend 910B", 4), ("gaudi", 2), ("jetson", 2)]
)
def test_a_name_without_a_usual_variant_lists_all(name: str, count: int) -> None:
    with pytest.raises(DeviceError, match="is ambiguous: say which of") as caught:
        find_device(name)
    assert len(str(caught.value).split("say which of ")[1].split(", ")) == count


@pytest.mark.parametrize(
    ("name", "device_id", "note"),
    [
        ("h100", "h100-sxm", "h100 taken as h100-sxm; h100-pcie and h100-nvl differ"),
        (" H100 ", "h100-sxm", "H100 taken as h100-sxm; h100-pcie and h100-nvl differ"),
        (
            "A100",
            "a100-sxm-80gb",
            "A100 taken as a100-sxm-80gb; a100-sxm-40gb, a100-pcie-40gb and a100-pcie-80gb differ",
        ),
        ("a100-80gb", "a100-sxm-80gb", "a100-80gb taken as a100-sxm-80gb; a100-pcie-80gb differs"),
        ("A100 40GB", "a100-sxm-40gb", "A100 40GB taken as a100-sxm-40gb; a100-pcie-40gb differs"),
        ("gh200", "gh200-96gb", "gh200 taken as gh200-96gb; gh200-144gb differs"),
        ("h800", "h800-sxm", "h800 taken as h800-sxm"),
        ("a800", "a800-sxm-80gb", "a800 taken as a800-sxm-80gb"),
        ("mi300", "mi300x", "mi300 taken as mi300x"),
        ("MI355", "mi355x", "MI355 taken as mi355x"),
        ("4090", "rtx-4090", "4090 taken as rtx-4090"),
        ("5070 ti", "rtx-5070-ti", "5070 ti taken as rtx-5070-ti"),
        ("h200", "h200-sxm", ""),
        ("b200", "b200-sxm", ""),
        ("gb200", "gb200", ""),
        ("h100-pcie", "h100-pcie", ""),
    ],
)
def test_a_short_name_is_its_usual_variant(name: str, device_id: str, note: str) -> None:
    device = find_device(name)
    assert (device.id, device.note) == (device_id, note)
    assert device.replace(note="") == find_device(device_id)
    assert find_detected(name) == (None if note else device)


def test_a_default_is_the_same_in_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    note = "h800 taken as h800-sxm"
    asked = ["llama-3.2-1b", "--device", "h800", "--json"]
    for command, options in (
        ("estimate", ["--seq", "128"]),
        ("predict", ["--seq", "128"]),
        ("translate", ["--seq", "128", "--mfu", "40%", "--from", "6nd"]),
        ("plan", ["--tokens", "1B", "--gpus", "8"]),
    ):
        with pytest.raises(SystemExit, match=r"^0$"):
            main([command, *asked, *options])
        assert json.loads(capsys.readouterr().out)["notes"].count(note) == 1, command
    estimate = estimate_flops("llama-3.2-1b", seq_len=128, device="h800")
    assert estimate.notes.count(note) == 1
    assert mfu(estimate, 1.0, device="h800").note == note
    assert predict("llama-3.2-1b", seq_len=128, device="h800").notes.count(note) == 1
    assert plan("llama-3.2-1b", tokens="1B", device="h800", gpus=8).notes.count(note) == 1


@pytest.mark.parametrize("name", [None, 5, ["h200"], b"h200"])
def test_a_device_is_named_by_a_string(name: Any) -> None:
    with pytest.raises(DeviceError, match="named by a string"):
        find_device(name)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("bf16", "bf16"),
        ("bfloat16", "bf16"),
        ("torch.bfloat16", "bf16"),
        ("half", "fp16"),
        ("FP8", "fp8"),
        ("torch.float8_e4m3fn", "fp8"),
        ("float", "fp32"),
        ("MXFP8", "mxfp8"),
        ("mxfp6", "fp6"),
        ("nvfp4", "nvfp4"),
        ("mxfp4", "mxfp4"),
        ("fp4", "fp4"),
        ("torch.float8_e4m3fnuz", "fp8"),
        ("torch.float4_e2m1fn_x2", "fp4"),
    ],
)
def test_parse_dtype(given: str, dtype: str) -> None:
    assert parse_dtype(given) == dtype


def test_unknown_dtype_and_missing_peak() -> None:
    with pytest.raises(DeviceError, match="Did you mean bf16"):
        parse_dtype("bf61")
    with pytest.raises(DeviceError, match="has no known bf16 peak; known: fp16"):
        peak_flops_per_s("v100s", "bf16")


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    load_devices.cache_clear()
    yield tmp_path
    load_devices.cache_clear()


ROW = "[[device]]\nid = 'mine'\nname = 'My Card'\nsource = 's'\ndate = '2026-01-01'\npeak_tflops = { bf16 = 7 }\n"


def test_user_devices(user_folder: Path) -> None:
    text = ROW + "[ambiguous]\nmy = ['mine', 'l4']\n[defaults]\n'my 2' = 'mine'\nh100 = 'h100-pcie'\n"
    (user_folder / "devices.toml").write_text(text)
    assert peak_flops_per_s("my card") == 7e12
    assert find_device("h200").id == "h200-sxm"
    assert find_device("my-2").note == "my-2 taken as mine"
    assert find_device("h100").id == "h100-pcie"
    with pytest.raises(DeviceError, match="say which of mine, l4"):
        find_device("MY")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ROW.replace("id = 'mine'", ""), "'id' is missing"),
        (ROW.replace("source = 's'", ""), "'source' is missing"),
        (ROW.replace("{ bf16 = 7 }", "{ bf16 = 'x' }"), "could not convert"),
        (ROW.replace("{ bf16 = 7 }", "5"), "'int' object"),
        ("device = 5", "[[device]]"),
        ("device = [5]", "device 5"),
        ("ambiguous = 5", "[ambiguous]"),
        ("defaults = 5", "[defaults]"),
        ("x = [", "not valid TOML"),
    ],
)
def test_bad_user_devices(user_folder: Path, text: str, words: str) -> None:
    (user_folder / "devices.toml").write_text(text)
    with pytest.raises(SpecError) as caught:
        load_devices()
    assert words in str(caught.value)
    assert "devices.toml" in str(caught.value)


# --- detection --------------------------------------------------------------------------------------------------------
def test_detect_asks_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    asked: list[list[str]] = []

    def answer(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "NVIDIA H200\nNVIDIA H200\n", "")

    monkeypatch.setattr(subprocess, "run", answer)
    assert detect_device() == "NVIDIA H200"
    assert asked[0][0] == "nvidia-smi"


@pytest.mark.parametrize(
    "trouble", [FileNotFoundError("nvidia-smi"), subprocess.TimeoutExpired("nvidia-smi", 10), PermissionError("x")]
)
def test_detect_without_a_gpu(monkeypatch: pytest.MonkeyPatch, trouble: Exception) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def fail(*_: Any, **__: Any) -> Any:
        raise trouble

    monkeypatch.setattr(subprocess, "run", fail)
    assert detect_device() is None


def test_detect_with_empty_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, "\n", ""))
    assert detect_device() is None


@pytest.mark.parametrize(("available", "expected"), [(True, "NVIDIA L4"), (False, None)])
def test_detect_asks_an_imported_torch(monkeypatch: pytest.MonkeyPatch, available: bool, expected: str | None) -> None:
    cuda = types.SimpleNamespace(is_available=lambda: available, get_device_name=lambda: "NVIDIA L4")
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert detect_device() == expected


def test_a_broken_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("driver")

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=fail)))
    assert detect_device() is None
