"""What kernels execute where sizes fill no tiles: rules against what the GPU's counter saw."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import statistics
from typing import Any

import pytest
from places import ROOT

from flopcalc import bind
from flopcalc.hardware.attention_blocks import block_pairs, find_blocks
from flopcalc.hardware.kernels import find_kernel_table, find_tile_table
from flopcalc.hardware.routing import Routing
from flopcalc.hardware.tables import find_table, load_table
from flopcalc.hardware.tiles import (
    GRADIENTS,
    count_experts_excess,
    count_product_excess,
    pad,
)

RESULTS = ROOT / "benchmarks" / "results"
_KERNEL = re.compile(r"nvjet_sm90_tst_(\d+)x(\d+)_64x\d+_(\d+)x(\d+)_")


@pytest.fixture(scope="module")
def choices() -> dict[str, Any]:
    with gzip.open(RESULTS / "tile_choices.json.gz", "rt") as file:
        found: dict[str, Any] = json.load(file)
    return found


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_rules_of_attention_reproduce_every_counted_call(kernel: str) -> None:
    table = find_kernel_table("h200-sxm", kernel)
    assert table is not None
    assert len(table.calls) == 10
    plain = table._replace(calls={})
    for (qk, v, mask, length), flops in table.calls.items():
        assert plain.find_call(qk, v, mask, length) == flops


@pytest.mark.parametrize(
    ("kernel", "direction", "is_causal", "dim", "length", "pairs"),
    [
        ("cudnn", "forward", True, 128, 256, 256 * 384 // 2),
        ("cudnn", "backward", True, 128, 256, 256 * 384 // 2),
        ("cudnn", "backward", False, 128, 200, 256 * 256),
        ("cudnn", "backward", False, 128, 180, 256 * 192),
        ("flash", "forward", False, 64, 180, 256 * 256),
        ("flash", "forward", False, 128, 180, 256 * 192),
        ("flash", "forward", True, 256, 256, 256 * 320 // 2),
    ],
)
def test_pairs_in_blocks(kernel: str, direction: str, is_causal: bool, dim: int, length: int, pairs: int) -> None:
    assert find_blocks(kernel, direction, dim).count_pairs(length, length, is_causal=is_causal) == pairs


def test_whole_blocks_of_the_rule_are_those_of_the_table() -> None:
    """Both kernels, both ways, every head dim that was counted."""
    for kernel in ("cudnn", "flash"):
        table = find_kernel_table("h200-sxm", kernel)
        assert table is not None
        for (qk, v), shape in table.shapes:
            for direction, block in (("forward", shape.block_forward), ("backward", shape.block_backward)):
                blocks = find_blocks(kernel, direction, (qk + v) // 2)
                assert blocks.count_pairs(1024, 1024, is_causal=True) == block_pairs(1024, 0, block)


@pytest.mark.parametrize(("kernel", "mask"), [("efficient", "full"), ("cudnn", "window")])
def test_calls_without_a_rule_are_not_padded(kernel: str, mask: str) -> None:
    table = find_kernel_table("h200-sxm", kernel)
    assert table is not None
    assert table._replace(calls={}).find_call(128, 128, mask, 200) is None


def test_a_kernel_executes_whole_clusters_of_tiles(choices: dict[str, Any]) -> None:
    """Products counted by the GPU, and the kernels that ran them: no tolerance but for a depth that was split."""
    kernels = {(m, n, k): names for m, n, k, names in choices["choices"]}
    seen = 0
    for (m, n, k, direction), executed in choices["products"]:
        at = ("forward", "dgrad", "wgrad").index(direction)
        (name,) = [each for each in kernels[m, n, k][at] if "kernel" not in each and not each.startswith("Memset")][:1]
        match = _KERNEL.match(name)
        if match is None or "splitK" in name:
            continue
        a, b, along, across = map(int, match.groups())
        rows, columns, depth = {"forward": (n, m, k), "dgrad": (k, m, n), "wgrad": (k, n, m)}[direction]
        assert executed == 2 * pad(rows, a * along) * pad(columns, b * across) * pad(depth, 64)
        seen += 1
    assert seen == 114


def count_experts(rows: list[int], n: int, k: int) -> dict[str, int]:
    """Executed FLOPs of a grouped product, by the rows of each expert."""
    excess = count_experts_excess(len(rows), sum(rows), n, k, Routing(None, (tuple(rows),)))
    return {direction: 2 * sum(rows) * n * k + flops for direction, flops in excess.items()}


def test_experts_execute_whole_tiles(choices: dict[str, Any]) -> None:
    """150 grouped products: tiles of 128 up to 128 rows an expert, of 256 beyond and for a weight's gradient."""
    assert len(choices["experts"]) == 150
    for (rows, n, k, direction), executed in choices["experts"]:
        assert executed == count_experts(rows, n, k)[direction]
    assert count_experts([100, 0, 300], 512, 300) == {
        "forward": 2 * 768 * 512 * 320,
        "dgrad": 2 * 768 * 512 * 512,
        "wgrad": 2 * 448 * 512 * 512,
    }


def test_attention_executes_what_the_rules_say(choices: dict[str, Any]) -> None:
    """Calls at lengths and head dims that no table has; one of flash's is off."""
    wrong = []
    for (kernel, direction, batch, heads, length, dim, is_causal), executed in choices["attention"]:
        table = find_kernel_table("h200-sxm", kernel)
        assert table is not None
        call = table.find_call(dim, dim, "causal" if is_causal else "full", length)
        if call is None or call[direction] * batch * heads != executed:
            wrong.append((kernel, direction, length, dim))
    assert len(choices["attention"]) == 52
    assert wrong == [("flash", "forward", 158, 80)]


def test_guessed_tiles_are_right_on_average(choices: dict[str, Any]) -> None:
    """Even and odd numbers of rows and split depths apart: each within half a percent on average, splits 3 %."""
    errors: dict[tuple[str, bool, bool], list[float]] = {}
    for m, n, k, names in choices["choices"][::20]:
        if m < 200 or m * n * k < 1e9 or n % 8 or k % 8:
            continue
        guessed = count_product_excess(m, n, k)
        for direction, each in zip(guessed, names, strict=True):
            (name,) = [kernel for kernel in each if kernel.startswith("nvjet")]
            match = _KERNEL.match(name)
            assert match is not None
            a, b, along, across = map(int, match.groups())
            rows, columns, depth = {"forward": (n, m, k), "dgrad": (k, m, n), "wgrad": (k, n, m)}[direction]
            executed = 2 * pad(rows, a * along) * pad(columns, b * across) * pad(depth, 64)
            kind = (direction, m % 64 == 0, "splitK" in name)
            errors.setdefault(kind, []).append((2 * m * n * k + guessed[direction]) / executed - 1)
    for (direction, is_even, is_split), found in errors.items():
        if len(found) > 8:
            assert abs(statistics.fmean(found)) < (0.03 if is_split else 0.006), (direction, is_even, is_split)
            assert statistics.fmean(map(abs, found)) < (0.05 if is_split else 0.012), (direction, is_even, is_split)
    assert sum(len(found) for found in errors.values()) > 900


def test_guesses_hold_for_the_sizes_of_real_steps(choices: dict[str, Any]) -> None:
    """Layers that nothing was fitted on: four of five guesses are right, and the others cancel out in a step."""
    errors: dict[str, list[float]] = {}
    for m, n, k, names in choices["usual"]["usual"][::10]:
        for direction, each in zip(("forward", "dgrad", "wgrad"), names, strict=True):
            match = next((found for kernel in each if (found := _KERNEL.match(kernel))), None)
            if match is None or (n, k) in GRADIENTS:
                continue
            a, b, along, across = map(int, match.groups())
            rows, columns, depth = {"forward": (n, m, k), "dgrad": (k, m, n), "wgrad": (k, n, m)}[direction]
            executed = 2 * pad(rows, a * along) * pad(columns, b * across) * pad(depth, 64)
            guessed = 2 * m * n * k + count_product_excess(m, n, k)[direction]
            errors.setdefault(direction, []).append(guessed / executed - 1)
    for direction, found in errors.items():
        assert len(found) > 700
        assert sum(abs(error) < 1e-9 for error in found) / len(found) > 0.78, direction
        assert abs(statistics.fmean(found)) < 0.004, direction
        assert statistics.fmean(map(abs, found)) < 0.01, direction


def test_widths_that_are_no_multiple_of_8_take_older_kernels() -> None:
    need = 2 * 700 * 3420 * 1280
    assert count_product_excess(700, 3420, 1280)["forward"] == 2 * 768 * 3584 * 1280 - need


def test_a_weights_gradient_pads_its_widths() -> None:
    for rows in (2048, 700):
        padded = -(-rows // 64) * 64
        excess = 2 * padded * 1280 * 1536 - 2 * rows * 1280 * 1280
        assert count_product_excess(rows, 1280, 1280)["wgrad"] == excess


@pytest.mark.parametrize(("kernel", "pads"), [("cudnn", (16, 9)), ("flash", (4, 3))])
def test_head_dims_that_no_table_has_are_padded_as_their_neighbours(kernel: str, pads: tuple[int, int]) -> None:
    table = find_kernel_table("h200-sxm", kernel)
    assert table is not None
    shape = dict(table.shapes)[72, 72]
    assert (shape.pad_forward, shape.pad_backward) == (pads, pads)


def test_products_that_were_counted_alone_are_nearly_right() -> None:
    """Products at odd rows on an H200, which the model was fitted on: 2.3 and 5.1 % too low without it."""
    errors: dict[str, list[float]] = {}
    for name, executed in json.loads((RESULTS / "blind_pieces.json").read_text())["cases"]:
        size, direction = name.split()
        m, n, k = map(int, size.split("x"))
        counted = 2 * m * n * k + count_product_excess(m, n, k)[direction]
        errors.setdefault(direction, []).append(counted / executed - 1)
    assert {direction: len(found) for direction, found in errors.items()} == dict.fromkeys(errors, 434)
    for found in errors.values():
        assert abs(statistics.fmean(found)) < 0.004
        assert statistics.fmean(map(abs, found)) < 0.0065


def test_products_over_odd_rows_are_right_on_average() -> None:
    """The model against products of the tables whose rows fill no tiles; without one they are 4.7 % too low."""
    tiles = find_tile_table("h200-sxm")
    assert tiles is not None
    errors, before = [], []
    for (m, n, k), measured in tiles.excess.items():
        for direction, excess in measured.items():
            if m % 128:
                executed = 2 * m * n * k + excess
                errors.append((2 * m * n * k + count_product_excess(m, n, k)[direction]) / executed - 1)
                before.append(2 * m * n * k / executed - 1)
    assert len(errors) == 105
    assert statistics.fmean(before) == pytest.approx(-0.0469, abs=0.0005)
    assert abs(statistics.fmean(errors)) < 0.01
    assert statistics.fmean(map(abs, errors)) < 0.018


def test_experts_pad_what_was_counted() -> None:
    """1,024 rows an expert: 128 more on the way forward, 32 more as the depth of a weight's gradient."""
    found = count_experts_excess(8, 8192, 8192, 2048, Routing(0.4))
    need = 2 * 8192 * 8192 * 2048
    assert {name: round(flops / need, 3) for name, flops in found.items()} == {
        "forward": 0.127,
        "dgrad": 0.127,
        "wgrad": 0.031,
    }
    path = find_table("h200-sxm", "padding")
    assert path is not None
    rows = [row for row in load_table(path).records() if " over " in str(row["shape"]) and row["executed_flops"]]
    for direction, excess in (("forward", 0.125), ("wgrad", 0.031)):
        seen = [row["executed_flops"] / row["needed_flops"] - 1 for row in rows if row["direction"] == direction]
        assert statistics.fmean(seen) == pytest.approx(excess, abs=0.01)


def test_only_devices_with_these_kernels_are_modelled() -> None:
    odd = {"convention": "hardware", "device": "a100"}
    notes = bind("llama-3.2-1b", **odd)(1, 700).notes
    assert not any("tiles" in note for note in notes)
    notes = bind("llama-3.2-1b", **{**odd, "device": "h200"})(1, 700).notes
    assert any("by a model of the kernels' tiles" in note for note in notes)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("executed_steps", "docs/executed-flops.md"),
        ("even_routers", "docs/executed-flops.md"),
        ("host_steps", "lab/blind/README.md"),
    ],
)
def test_pages_have_what_was_measured(name: str, page: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.report(RESULTS / f"{name}.json") in (ROOT / page).read_text(encoding="utf-8")


def test_what_was_executed_on_the_device_is_kept() -> None:
    kept = json.loads((RESULTS / "executed_steps.json").read_text())
    assert kept["failures"] == []
    assert len(kept["cases"]) == 12
    assert all(case["executed_flops"] for case in kept["cases"])
    assert kept["provenance"]["device"] == "NVIDIA H200"
