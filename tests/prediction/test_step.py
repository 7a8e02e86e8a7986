"""Seconds: the pieces by hand, the whole by its sums; wrong input is refused in words."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from made_products import make_product
from tiers import mark_heavy

from flopcalc.api import bind, predict
from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import FlopcalcError
from flopcalc.core.model.config import load_config
from flopcalc.core.workload.workload import Workload, make_workload
from flopcalc.hardware.tiles import ProductSize
from flopcalc.measure.predictor.fit.host import count_checkpoints, list_host_features
from flopcalc.prediction.build_work import make_work
from flopcalc.prediction.clock import Clock
from flopcalc.prediction.host_time import find_unit, name_factor
from flopcalc.prediction.kernels.attention import attention_features, name_mask
from flopcalc.prediction.kernels.constants import load_predictor
from flopcalc.prediction.kernels.machine import Machine, slow_down
from flopcalc.prediction.kernels.memory_bound import read_curve
from flopcalc.prediction.kernels.products import ProductShape, time_matrix, time_shape
from flopcalc.prediction.step import find_largest_batch, predict_estimate
from flopcalc.prediction.work import Attention, MemoryCall, Work

# One processor that does 2 FLOP a second on full tiles, no costs beside.
PLAIN = ProductShape(2.0, 0.0, 0.0, 0.5, 0.25, 0.125, 1e9, 0.0, 1.0)


@pytest.mark.parametrize(
    ("m", "n", "k", "copies", "seconds"),
    [
        (128, 256, 10, 1, 128 * 256 * 10),  # one full tile
        (256, 256, 10, 1, 2 * 128 * 256 * 10),
        (128, 256, 10, 3, 3 * 128 * 256 * 10),
        (1, 1, 10, 1, 128 * 128 * 10 / 0.5),  # a corner of a tile takes the whole tile: the cheapest that there is
    ],
)
def test_tiles(m: int, n: int, k: int, copies: int, seconds: float) -> None:
    assert time_matrix(PLAIN, m, n, k, copies) == seconds


def test_directions_multiply_the_sizes_that_autograd_does() -> None:
    shape = PLAIN._replace(units=4.0)
    assert time_shape(shape, ProductSize("forward", 512, 256, 64)) == time_matrix(shape, 512, 256, 64, 1)
    assert time_shape(shape, ProductSize("dgrad", 512, 256, 64)) == time_matrix(shape, 512, 64, 256, 1)
    assert time_shape(shape, ProductSize("wgrad", 512, 256, 64)) == time_matrix(shape, 256, 64, 512, 1)


def test_bytes_bound_a_thin_product() -> None:
    shape = PLAIN._replace(rate=1e30, bandwidth=2.0)
    assert time_matrix(shape, 4, 8, 16, 1) == pytest.approx(4 * 16 + 16 * 8 + 4 * 8)


@pytest.mark.parametrize(
    ("direction", "mask", "dim", "length", "keys", "expected"),
    [
        ("forward", "causal", 64, 128, 128, (1.0, 6 * 128.0, 6 * 128.0 * 128, 128.0)),
        ("forward", "causal", 64, 200, 200, (1.0, 6 * 200.0, 6 * 3 * 128.0 * 128, 200.0)),  # blocks of 128
        # Six blocks on four processors: two waves of them, each over the keys in steps of 128.
        ("forward", "full", 64, 100, 100, (1.0, 8 * 128.0, 8 * 128.0 * 128, 100.0)),
        ("forward", "window", 64, 130, 260, (1.0, 12 * 128.0, 12 * 128.0 * 384, 260.0)),
        # Blocks of keys; and all queries.
        ("backward", "full", 64, 130, 260, (1.0, 20 * 128.0, 20 * 128.0 * 192, 6 * 130.0)),
        ("backward", "full", 256, 64, 64, (1.0, 8 * 128.0, 8 * 128.0 * 64, 6 * 64.0)),
        ("forward", "decode", 64, 1, 500, (1.0, 0.0, 1000.0, 500.0)),  # keys of two rows with one head each
    ],
)
def test_attention_features(
    direction: str, mask: str, dim: int, length: int, keys: int, expected: tuple[float, ...]
) -> None:
    call = Attention("", "", direction, mask, 2, 3, 1, dim, dim, length, keys)
    assert attention_features(4, call, "cudnn", dim) == expected


@pytest.mark.parametrize(
    ("mask", "keys", "name"),
    [
        ("window", 1024, "window"),
        ("window", 1900, "window-even"),
        ("window", 601, "window-odd"),
        ("apart", 4320, "apart"),
        ("apart", 1900, "window-even"),
        ("causal", 1900, "causal"),
        ("full", 577, "full"),
    ],
)
def test_names_of_masks(mask: str, keys: int, name: str) -> None:
    assert name_mask(mask, keys) == name


def test_a_mask_whose_rows_start_anywhere_has_its_own_seconds() -> None:
    constants = load_predictor("h200-sxm")
    assert constants is not None
    cudnn = dict(constants["attention"]["cudnn"])
    aligned, even = (
        Attention("", "", "forward", "window", 2, 8, 8, 128, 128, keys, keys, 512) for keys in (1024, 1020)
    )
    cudnn["forward/window-even/128"] = [2 * value for value in cudnn["forward/window/128"]]
    machine = Machine("h200-sxm", "bf16", {**constants, "attention": {"cudnn": cudnn}})
    seconds = machine.time_attention(aligned).seconds
    assert machine.time_attention(even).seconds == pytest.approx(2 * seconds, rel=0.01)
    cudnn = {name: value for name, value in cudnn.items() if "even" not in name}  # not measured: as fast as others
    machine = Machine("h200-sxm", "bf16", {**constants, "attention": {"cudnn": cudnn}})
    assert machine.time_attention(even).seconds == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("size", "seconds"), [(1, 2.0), (10, 2.0), (1000, 20.0), (100, math.sqrt(40.0)), (5000, 100.0)]
)
def test_curve(size: float, seconds: float) -> None:
    assert read_curve([(10, 2.0), (1000, 20.0)], size) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("rate", "slower"), [(0.0, 1.0), (0.2, 1.0), (0.3, 1.005), (0.4, 1.02), (0.6, 1.08), (1.0, 1.32)]
)
def test_the_clock_falls_with_the_square_of_what_is_over_its_start(rate: float, slower: float) -> None:
    assert slow_down([0.2, 0.5], rate) == pytest.approx(slower, rel=1e-12)


CALL = Attention("", "", "forward", "full", 2, 8, 4, 64, 32, 100, 100)


@pytest.mark.parametrize(
    ("changed", "flops"),
    [
        ({}, 2.0 * 2 * 8 * 128 * 128 * (64 + 32)),
        ({"length": 200, "keys": 200}, 2.0 * 2 * 8 * 256 * 256 * (64 + 32)),
        ({"length": 200, "keys": 200, "mask": "causal"}, 2.0 * 2 * 8 * 3 * 128 * 128 * (64 + 32)),
        ({"kernel": "eager"}, 2.0 * 2 * 8 * 100 * 100 * (64 + 32)),
        ({"mask": "window", "window": 10}, 2.0 * 2 * 8 * 128 * 128 * (64 + 32)),  # a mask: all pairs
        ({"mask": "decode", "length": 1}, 2.0 * 2 * 8 * 100 * (64 + 32)),
        ({"direction": "backward"}, 2.0 * 2 * 8 * 128 * 128 * (3 * 64 + 2 * 32)),
        ({"calls": 3}, 3 * 2.0 * 2 * 8 * 128 * 128 * (64 + 32)),
    ],
)
def test_flops_of_attention(changed: dict[str, Any], flops: float) -> None:
    assert CALL._replace(**changed).flops == flops


def test_host_features() -> None:
    seen = {
        "forward module": 5, "forward view": 7, "forward pointwise": 11, "backward node": 13, "backward product": 17,
        "again pointwise": 2, "again view": 3, "optimizer adamw": 19,
    }  # fmt: skip
    each = {"module": 2.0, "view": 0.4, "node": 0.3, "product": 1.5, "tensor": 0.25}  # of all others, one
    units = 2 * 5 + 0.4 * 7 + 11 + 0.3 * 13 + 1.5 * 17 + 2 + 0.4 * 3 + 0.25 * 19
    assert list_host_features(seen, 3, each) == (3.0, pytest.approx(units))


def test_checkpoints_cost_the_host_more_than_what_they_run() -> None:
    """Of every layer once, of every tensor kept in it once: whatever factor the model's type has."""
    estimator = bind("llama-3.2-1b", recipe={"recompute": "full"}, convention="hardware", device="h200")
    load = make_workload(1, 64)
    work = make_work(estimator, load)
    checkpoints, kept = count_checkpoints(work)
    assert checkpoints == 16
    # A layer: seven products of two tensors, attention's seven, two sums, 22 pointwise operators.
    assert kept == 16 * (7 * 2 + 7 + 2 + 22)
    shipped = load_predictor("h200-sxm")
    assert shipped is not None

    def time_host(again: list[float]) -> float:
        clock = Clock(Machine("h200-sxm", "bf16", {**shipped, "host": {**shipped["host"], "again": again}}))
        clock.add(work, 1, load)
        return clock.host_s()

    plain = time_host([0.0, 0.0])
    assert time_host([1e-3, 0.0]) == pytest.approx(plain + 16e-3)
    assert time_host([0.0, 1e-6]) == pytest.approx(plain + kept * 1e-6)


def test_a_lower_clock_slows_what_memory_does_not_bound() -> None:
    """How hard a step works is told over all of it, its optimizer too; streams take as long at any clock."""
    estimator = bind("llama-3.2-1b", convention="hardware", device="h200")
    load = make_workload(8, 4096)
    shipped = load_predictor("h200-sxm")
    assert shipped is not None
    clock = Clock(Machine("h200-sxm", "bf16", {**shipped, "power": [0.1, 2.0]}))
    clock.add(make_work(estimator, load), 1, load)
    kinds = {piece.kind: piece.is_streamed for piece in clock.pieces if piece.kind != "memory"}
    assert kinds == {"products": False, "attention": False, "optimizer": False}
    streamed = sum(piece.seconds for piece in clock.pieces if piece.is_streamed)
    whole = sum(piece.seconds for piece in clock.pieces)
    assert 0 < streamed < whole
    flops = sum(piece.flops for piece in clock.pieces)
    assert clock.rate() == pytest.approx(flops / whole / clock.machine.peak)
    slower = slow_down([0.1, 2.0], clock.rate())
    assert clock.slower() == slower > 1
    gaps = clock.launches * shipped["gaps"]["train"]
    assert clock.device_s() == pytest.approx(streamed + slower * (whole - streamed) + gaps)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "phi-2"])
def test_small_steps_do_not_get_shorter_with_more_tokens(model: str) -> None:
    """Gaps are those of the kernels beside the optimizer, which the host leaves standing at the end."""
    steps = [predict(model, device="h200", seq_len=seq, memory=False, advise=False) for seq in (1, 100, 256, 500)]
    for one, other in pairwise(step.step_time_s.mid for step in steps):
        assert other > 0.995 * one


@pytest.mark.parametrize(
    ("way", "kind", "unit"),
    [
        ("forward", "cat", 3.0),
        ("forward", "cat_strided_wide", 3.0),  # the next wider kind that was measured
        ("forward", "attention", 5.0),
        ("forward", "attention_masked", 6.0),
        ("backward", "attention", 7.0),  # its own where there is one
        ("again", "attention", 5.0),  # a forward pass once more
        ("backward", "cat", 3.0),
        ("backward", "never_seen", 1.0),
        ("optimizer", "adamw", 9.0),  # of each tensor, whatever the optimizer
    ],
)
def test_units_of_the_host(way: str, kind: str, unit: float) -> None:
    units = {"cat": 3.0, "attention": 5.0, "attention_masked": 6.0, "attention_backward": 7.0, "tensor": 9.0}
    assert find_unit(way, kind, units) == unit


@pytest.mark.parametrize(
    ("way", "group", "phase", "name"),
    [
        ("forward", "language", "train", "train"),
        ("backward", "language", "train", "train"),
        ("again", "language", "train", "train"),
        ("forward", "language", "prefill", "forward"),
        ("forward", "language", "forward", "forward"),
        ("forward", "language", "decode", "decode"),
        ("backward", "vision", "train", "vision train"),
        ("forward", "vision", "prefill", "vision forward"),
        ("forward", "projector", "prefill", "vision forward"),
        ("optimizer", "vision", "train", "optimizer"),
    ],
)
def test_names_of_factors(way: str, group: str, phase: str, name: str) -> None:
    assert name_factor(way, group, phase) == name


SMALL = {"batch_size": 1, "seq_len": 64}
LARGE = {"batch_size": 8, "seq_len": 2048}


def test_a_step_adds_up() -> None:
    found = predict("llama-3.2-1b", device="h200", **LARGE)
    assert found.bound == "device"
    assert found.step_time_s.low < found.step_time_s.mid < found.step_time_s.high
    assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s.mid, rel=0.02)  # but for the clock
    parts = [found.breakdown[name] for name in ("products", "attention", "memory", "optimizer")]
    assert sum(found.modules.values()) == pytest.approx(sum(parts))
    assert found.tokens_per_s == pytest.approx(8 * 2048 / found.step_time_s.mid)
    assert 0 < found.mfu < found.hfu < 1
    assert found.memory is not None
    assert found.evidence["is_measured"]
    assert found.evidence["operators_recorded"]


def test_a_stack_may_have_no_layers() -> None:
    """qwen3.5's tower has no deepstack mergers."""
    assert predict("qwen3.5-9b", device="h200", advise=False, **SMALL).step_time_s.mid > 0


def test_small_steps_wait_for_the_host() -> None:
    found = predict("llama-3.2-1b", device="h200", **SMALL)
    assert found.bound == "host"
    assert found.host_s > found.device_s
    assert found.breakdown["host"] > 0


IMAGES = {"batch_size": 1, "seq_len": 1024, "image_grid_thw": [[1, 36, 52]]}
DECODE = {"batch_size": 1, "seq_len": 3, "phase": "decode", "context": 300}
PREFILL = {**SMALL, "phase": "prefill"}


def _run(
    model: str, load: dict[str, Any], types: dict[str, Any], *, times: int = 1, optimizer: str = "none", **changed: Any
) -> Clock:
    """A step under the shipped constants, but for what model types take."""
    shipped: dict[str, Any] = load_predictor("h200-sxm") or {}
    constants = {**shipped, "host": {**shipped["host"], "types": types}, **changed}
    clock = Clock(Machine("h200-sxm", "bf16", constants))
    given = make_workload(**load)
    clock.add(make_work(bind(model), given, optimizer=optimizer), times, given)
    return clock


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("load", "phase"), [(SMALL, "train"), (PREFILL, "forward"), (DECODE, "decode")])
def test_a_type_takes_its_factor(load: dict[str, Any], phase: str, factor: float) -> None:
    """Where the host bounds a step and its calls take nothing beside, the step takes that much longer."""
    plain, slower = (_run("llama-3.2-1b", load, {"llama": {phase: [0.0, each]}}) for each in (1.0, factor))
    assert slower.host_s() == pytest.approx(factor * plain.host_s())
    assert slower.device_s() == plain.device_s()
    assert slower.step_s(10.0) == pytest.approx(factor * plain.step_s(10.0), rel=2e-3)


def test_an_optimizer_is_everybodys() -> None:
    plain, slower = (
        _run("llama-3.2-1b", SMALL, {"llama": {"train": [0.0, each]}}, optimizer="adamw").host_s() for each in (1, 3)
    )
    alone = plain - _run("llama-3.2-1b", SMALL, {"llama": {"train": [0.0, 1]}}).host_s()
    assert alone > 0
    assert slower - alone == pytest.approx(3 * (plain - alone))


@pytest.mark.parametrize(("load", "phase"), [(SMALL, "train"), (PREFILL, "forward"), (DECODE, "decode")])
@pytest.mark.parametrize("types", [{}, {"llama": {}}, {"mistral": {"train": [9.0, 9.0], "forward": [9.0, 9.0]}}])
def test_an_unknown_type_is_usual(load: dict[str, Any], phase: str, types: dict[str, Any]) -> None:
    found = _run("llama-3.2-1b", load, types)
    call_s, _ = found.constants["host"][phase]
    usual = _run("llama-3.2-1b", load, {"llama": {phase: [call_s, 1.0]}})
    assert found.host_s() == pytest.approx(usual.host_s())
    assert found.step_s() == pytest.approx(usual.step_s())
    assert not found.is_typed
    assert usual.is_typed
    assert [clock.evidence()["host_measured"] for clock in (found, usual)] == [False, True]
    # Both are less sure.
    assert found.error("host") == pytest.approx(min(1.5 * usual.error("host"), 1.5 * 0.35))
    assert found.error("device") == pytest.approx(usual.error("device") + 0.05)


@pytest.mark.parametrize(
    ("model", "device", "is_measured"),
    [
        ("llama-3.2-1b", "h200", True),
        ("internvl3-8b", "h200", False),  # recorded, without constants of its own
        ("llama-3.2-1b", "h100-sxm", False),
    ],
)
def test_whether_the_host_was_measured_is_said(model: str, device: str, is_measured: bool) -> None:
    found = predict(model, device=device, advise=False, memory=False, **SMALL)
    assert found.bound == "host"
    assert found.evidence["operators_recorded"]
    assert found.evidence["host_measured"] is is_measured
    shipped: dict[str, Any] = load_predictor("h200-sxm") or {}
    usual = shipped["error"]["host"] + 0.4  # of another machine
    low, mid, _ = found.step_time_s
    if device == "h200":
        assert 1 - low / mid == pytest.approx(usual if is_measured else min(1.5 * usual, 1.5 * 0.35))


@pytest.mark.parametrize("load", [LARGE, PREFILL, DECODE])
@pytest.mark.parametrize("times", [1, 3])
def test_a_clock_counts_attention_too(load: dict[str, Any], times: int) -> None:
    work = make_work(bind("llama-3.2-1b"), make_workload(**load), optimizer="none")
    attention = sum(call.flops for call in work.attention)
    assert attention > 0
    found = _run("llama-3.2-1b", load, {}, times=times)
    flops = sum(piece.flops for piece in found.pieces)
    assert flops == pytest.approx(times * (attention + sum(product.flops for product in work.products)))


@pytest.mark.parametrize(
    ("model", "kind", "phase", "grid", "more_s"),
    [
        # The host has to wait for the device there anyway: a call may take long, and the step hardly longer.
        ("gemma-3-1b", "gemma3_text", "prefill", None, 0.0),
        ("mistral-7b", "mistral", "prefill", None, 0.0),
        ("paligemma-3b-224", "paligemma", "prefill", None, 0.0),
        ("llama-3.2-1b", "llama", "train", None, 0.0),
        # Where images enter the text it has waited, and the device has nothing to do.
        ("paligemma-3b-224", "paligemma", "prefill", [1, 16, 16], 0.01),
        ("gemma-3-4b", "gemma3", "train", [1, 64, 64], 0.01),
        ("qwen2-vl-2b", "qwen2_vl", "prefill", [1, 36, 52], 0.01),
    ],
)
def test_a_calls_seconds_come_before_what_is_read_back_and_after_images(
    model: str, kind: str, phase: str, grid: list[int] | None, more_s: float
) -> None:
    load = {**LARGE, "phase": phase, "image_grid_thw": [grid] * LARGE["batch_size"] if grid else None}
    plain, longer = (
        _run(model, load, {kind: {name: [call_s, 1.0] for name in ("train", "forward")}}) for call_s in (0.0, 0.01)
    )
    assert any(each.waits for each in plain.hosted)
    assert longer.host_s() - plain.host_s() == pytest.approx(0.01)
    assert plain.device_s() > 1.5 * plain.host_s()
    assert longer.step_s() - plain.step_s() == pytest.approx(more_s, abs=1e-4)


@pytest.mark.parametrize(
    ("load", "phase", "calls"),
    [
        (SMALL, "train", 1),
        (PREFILL, "forward", 1),
        (DECODE, "decode", 3),  # a call for each token
        ({**DECODE, "seq_len": 7}, "decode", 7),
    ],
)
def test_a_calls_seconds_are_added_once_a_call(load: dict[str, Any], phase: str, calls: int) -> None:
    plain, longer = (_run("llama-3.2-1b", load, {"llama": {phase: [each, 1.0]}}) for each in (0.0, 0.5))
    assert longer.host_s() - plain.host_s() == pytest.approx(0.5 * calls)
    assert longer.step_s() - plain.step_s() == pytest.approx(0.5 * calls, rel=0.01)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_accumulated_batches_repeat_what_a_forward_pass_takes(times: int) -> None:
    """The rest of a training step's call is an optimizer's, once."""

    def time_host(train_s: float, forward_s: float) -> float:
        types = {"llama": {"train": [train_s, 1.0], "forward": [forward_s, 1.0]}}
        return _run("llama-3.2-1b", SMALL, types, times=times).host_s()

    plain = time_host(0.0, 0.0)
    assert time_host(0.5, 0.2) - plain == pytest.approx(0.2 * times + 0.3)
    assert time_host(0.2, 0.5) - plain == pytest.approx(0.2 * times)  # no more than all of it


@pytest.mark.parametrize(
    ("phase", "text", "tower"), [("train", "train", "vision train"), ("prefill", "forward", "vision forward")]
)
def test_a_tower_has_a_factor_of_its_own(phase: str, text: str, tower: str) -> None:
    def time_host(text_factor: float, tower_factor: float, load: dict[str, Any] = IMAGES) -> float:
        types = {"qwen2_vl": {text: [0.0, text_factor], tower: [0.0, tower_factor]}}
        return _run("qwen2-vl-2b", {**load, "phase": phase}, types).host_s()

    whole = time_host(1, 1)
    texts, towers = time_host(2, 1) - whole, time_host(1, 2) - whole
    assert min(texts, towers) > 0.1 * whole
    assert texts + towers == pytest.approx(whole)
    assert time_host(3, 1.5) == pytest.approx(3 * texts + 1.5 * towers)
    without = {"batch_size": 1, "seq_len": 1024}  # no images: it does not count
    assert time_host(1, 9, without) == time_host(1, 1, without)


def test_decoding_joins_rows_to_a_cache() -> None:
    shipped: dict[str, Any] = load_predictor("h200-sxm") or {}
    lines = {kind: line for kind, line in shipped["linear"].items() if kind != "cat_cache"}
    load = {"batch_size": 16, "seq_len": 2, "phase": "decode", "context": 4000}
    own = _run("llama-3.2-1b", load, {}).device_s()
    without = _run("llama-3.2-1b", load, {}, linear=lines).device_s()
    alike = _run("llama-3.2-1b", load, {}, linear={**lines, "cat_cache": lines["cat"]}).device_s()
    assert own > 1.2 * without
    assert without == alike  # a predictor that did not tell the two apart


@pytest.mark.parametrize(
    ("load", "kinds"),
    [
        (DECODE, {"cat_cache", "cat_strided"}),
        (PREFILL, {"cat", "cat_one", "cat_strided"}),
        (SMALL, {"cat", "cat_strided", "cat_strided_wide"}),
    ],
)
def test_kinds_of_joins(load: dict[str, Any], kinds: set[str]) -> None:
    work = make_work(bind("llama-3.2-1b"), make_workload(**load))
    assert {moved.kind for moved in work.moved if moved.kind.startswith("cat")} == kinds
    assert work.model_type == "llama"


@pytest.mark.parametrize(("kind", "line"), [("cat_cache", (2e-6, 5e-13)), ("cat", (1e-6, 2e-13)), ("loss", (3e-6, 0))])
@pytest.mark.parametrize("has_cache", [True, False])
def test_seconds_of_a_join(kind: str, line: tuple[float, float], has_cache: bool) -> None:
    shipped: dict[str, Any] = load_predictor("h200-sxm") or {}
    lines = {"cat": [1e-6, 2e-13], "loss": [3e-6, 0.0]} | ({"cat_cache": [2e-6, 5e-13]} if has_cache else {})
    machine = Machine("h200-sxm", "bf16", {**shipped, "linear": lines})
    start, per_byte = line if has_cache or kind != "cat_cache" else (1e-6, 2e-13)
    moved = MemoryCall("", "language", "forward", kind, 6e6, 4e6, 1, False)
    assert machine.time_moved(moved).seconds == pytest.approx(start + 1e7 * per_byte)


@pytest.mark.parametrize(
    ("model", "load"),
    [
        ("llama-3.2-1b", SMALL),
        ("llama-3.2-1b", LARGE),
        ("llama-3.2-1b", {"batch_size": 2, "seq_len": 3, "phase": "decode", "context": 300}),
        ("qwen2-vl-2b", IMAGES),  # the host waits where images enter
        ("qwen3-30b-a3b", LARGE),
    ],
)
@pytest.mark.parametrize(("pace", "bound"), [(1e-5, "device"), (1e4, "host")])
def test_either_side_alone_bounds_a_step(model: str, load: dict[str, Any], pace: float, bound: str) -> None:
    """A host that takes no time leaves the device's; one that takes very long leaves its own."""
    found = predict(model, device="h200", advise=False, memory=False, host_factor=pace, **load)
    assert found.bound == bound
    assert found.step_time_s.mid == pytest.approx(found.device_s if bound == "device" else found.host_s, rel=2e-3)


@pytest.mark.parametrize(("model", "load"), [("llama-3.2-1b", SMALL), ("llama-3.2-1b", LARGE), ("qwen2-vl-2b", IMAGES)])
def test_a_step_takes_no_less_than_either_side_and_no_more_than_both(model: str, load: dict[str, Any]) -> None:
    for pace in (0.3, 1.0, 3.0):
        found = predict(model, device="h200", advise=False, memory=False, host_factor=pace, **load)
        longer = max(found.device_s, found.host_s)
        assert 0.999 * longer <= found.step_time_s.mid < 1.01 * (found.device_s + found.host_s)


def test_a_host_that_reads_has_the_device_wait() -> None:
    """Images are counted while the device works: neither side alone is the step."""
    found = predict("qwen2-vl-2b", device="h200", advise=False, memory=False, **IMAGES)
    assert found.step_time_s.mid > 1.02 * max(found.device_s, found.host_s)


@pytest.mark.parametrize("load", [SMALL, LARGE])
def test_many_accumulated_batches_are_alike(load: dict[str, int]) -> None:
    times = {
        many: predict("llama-3.2-1b", device="h200", advise=False, memory=False, grad_accum=many, **load)
        for many in (1, 3, 4, 5, 9)
    }
    one, three, four, five, nine = (found.step_time_s.mid for found in times.values())
    # But for what is spread over all kernels, clock and gaps: an optimizer's share of them falls.
    assert five - four == pytest.approx(four - three, rel=2e-3)
    assert nine - five == pytest.approx(4 * (five - four), rel=2e-3)
    # Each takes what the first took but for the optimizer, within what the two sides overlap at the ends.
    assert 0.75 * one < four - three < one
    assert nine == pytest.approx(max(times[9].device_s, times[9].host_s), rel=0.05)


@pytest.mark.parametrize("load", [SMALL, LARGE])
def test_a_pause_is_no_part_of_the_step(load: dict[str, int]) -> None:
    def time_step(pause_s: float) -> float:
        given: dict[str, Any] = {"device": "h200", "advise": False, "memory": False, "pause_s": pause_s}
        return predict("llama-3.2-1b", **given, **load).step_time_s.mid

    plain = predict("llama-3.2-1b", device="h200", advise=False, memory=False, **load)
    mid = plain.step_time_s.mid
    assert time_step(0.0) == mid
    assert time_step(0.001) == pytest.approx(
        mid - 0.001, rel=1e-6
    )  # the device works meanwhile, and is waited for less
    long = time_step(100.0)
    assert time_step(1000.0) == pytest.approx(long)  # all is worked off by then
    assert 0.999 * plain.host_s <= long < 0.95 * mid


@pytest.mark.parametrize("pause_s", [-0.1, math.nan, math.inf, "x"])
def test_a_pause_that_is_none(pause_s: Any) -> None:
    with pytest.raises(FlopcalcError, match="pause_s"):
        predict("llama-3.2-1b", device="h200", pause_s=pause_s, **SMALL)
    with pytest.raises(FlopcalcError, match="pause_s"):
        predict_estimate(bind("llama-3.2-1b")(1, 64), device="h200", pause_s=pause_s)


@pytest.mark.parametrize(("load", "bound", "other"), [(LARGE, "device", 0.04), (SMALL, "host", 0.4)])
def test_ones_own_measurement_narrows_the_interval(
    load: dict[str, int], bound: str, other: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = predict("llama-3.2-1b", device="h200", advise=False, **load)
    copytree(Path(find_data_dir()) / "predictors", tmp_path / "predictors")
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    load_predictor.cache_clear()
    try:
        own = predict("llama-3.2-1b", device="h200", advise=False, **load)
    finally:
        load_predictor.cache_clear()
    assert own.bound == shipped.bound == bound
    assert own.step_time_s.mid == shipped.step_time_s.mid
    low, mid, _ = own.step_time_s
    assert (low - shipped.step_time_s.low) / mid == pytest.approx(other, abs=5e-4)  # a little of it is the host's
    assert own.step_time_s.high < shipped.step_time_s.high
    assert own.evidence["is_own_machine"]
    assert not shipped.evidence["is_own_machine"]


@pytest.mark.parametrize(
    ("options", "slower"),
    [
        ({"recipe": {"recompute": "full"}}, True),
        ({"attention_kernel": "eager"}, True),
        ({"compiled": True}, False),
        ({"optimizer": "none"}, False),
        ({"phase": "prefill"}, False),
        ({"recipe": {"train_only": ["lm_head"]}}, False),
        ({"recipe": {"lora": {"r": 8, "targets": ["q_proj", "v_proj"]}}}, False),
    ],
)
def test_options_move_the_time(options: dict[str, object], slower: bool) -> None:
    plain = predict("llama-3.2-1b", device="h200", advise=False, **LARGE).device_s
    assert (predict("llama-3.2-1b", device="h200", advise=False, **LARGE, **options).device_s > plain) is slower


def test_accumulated_batches_share_one_optimizer_step() -> None:
    once = predict("llama-3.2-1b", device="h200", advise=False, **LARGE)
    twice = predict("llama-3.2-1b", device="h200", advise=False, grad_accum=2, **LARGE)
    assert twice.breakdown["optimizer"] == once.breakdown["optimizer"]
    assert twice.breakdown["products"] == pytest.approx(2 * once.breakdown["products"])


@pytest.mark.parametrize(("device", "words"), [("h100-sxm", "kernels measured"), ("mi300x", "was not measured")])
def test_another_device_is_marked_as_not_measured(device: str, words: str) -> None:
    found = predict("llama-3.2-1b", device=device, **LARGE)
    assert not found.evidence["is_measured"]
    assert words in found.notes[0]
    width = (found.step_time_s.high - found.step_time_s.low) / found.step_time_s.mid
    assert width >= 0.6


@pytest.mark.parametrize(("dtype", "is_alike"), [("fp16", True), ("bf16", False), ("fp32", False)])
def test_what_was_measured_in_another_dtype_is_said(dtype: str, is_alike: bool) -> None:
    found = predict("llama-3.2-1b", device="h200", dtype=dtype, advise=False, **LARGE)
    assert ("measured in bf16; fp16 is assumed to behave the same" in found.notes) == is_alike


def test_decode_and_images() -> None:
    decode = predict("qwen2-vl-2b", device="h200", batch_size=2, seq_len=4, phase="decode", context=300)
    assert decode.bound == "host"
    seen = predict("qwen2-vl-2b", device="h200", batch_size=1, seq_len=1024, image_grid_thw=[[1, 36, 52]])
    text = predict("qwen2-vl-2b", device="h200", batch_size=1, seq_len=1024)
    assert seen.device_s > text.device_s
    assert any(name.startswith("model.visual") for name in seen.modules)


def test_work_has_every_product_of_the_count() -> None:
    estimator = bind("qwen3-1.7b", convention="full")
    load = make_workload(2, 512)
    work = make_work(estimator, load)
    products = sum(product.flops for product in work.products)
    rows = [each for each in estimator.rows(load, "full") if each.row.op.kind == "attend"]
    attention = sum(each.flops.total * each.block.copies for each in rows)
    assert products + attention == sum(estimator.count(load, "full"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "h900"}, "unknown"),
        ({"device": "h200", "optimizer": "adam"}, "optimizer 'adam' unknown"),
        ({"device": "h200", "recipe": {"clipping": "hooks"}}, "not predicted"),
        ({"device": "h200", "grad_accum": 0}, "at least 1"),
        ({"device": "h200", "dtype": "fp3"}, "unknown"),
        ({"device": "h200", "dtype": "fp8", "memory": False}, "predicted in bf16, fp16, tf32, fp32, not in fp8"),
        ({"device": "v100-sxm2-16gb"}, "no known bf16 peak.*it has fp16, fp32: give dtype"),
        ({"device": "h200", "attention_kernel": "math"}, "attention_kernel 'math' unknown"),
        ({"device": "h200", "attention_kernel": "flash", "dtype": "fp32"}, "flash takes bf16 and fp16, not fp32"),
        ({"device": "h200", "phase": "prefill", "grad_accum": 2}, "belongs to phase train"),
        ({"device": "h200", "freeze": "vision"}, "freeze 'vision' matches no module of this model"),
        ({"device": "h200", "convention": "full"}, "predict takes no convention: it shows MFU and HFU"),
        ({"device": "h200", "sequence_length": 8}, "sequence_length is no keyword of predict. Did you mean seq_len"),
        ({"device": "h200", "dtpye": "bf16"}, "dtpye is no keyword of predict. Did you mean dtype"),
        ({"device": "h200", "batch": {"input_ids": [[1, 2]]}}, "batch already says sizes"),
    ],
)
def test_wrong_input(options: dict[str, object], words: str) -> None:
    with pytest.raises(FlopcalcError, match=words):
        predict("llama-3.2-1b", **LARGE, **options)  # type: ignore[arg-type]


def test_kernels_take_their_own_time() -> None:
    times = {
        kernel: predict("llama-3.2-1b", device="h200", advise=False, attention_kernel=kernel, **LARGE)
        for kernel in ("auto", "cudnn", "flash", "efficient")
    }
    auto, cudnn, flash, efficient = (found.breakdown["attention"] for found in times.values())
    assert auto == cudnn < flash < efficient


def test_decoding_reads_keys_whatever_the_kernel() -> None:
    call = Attention("", "", "forward", "decode", 64, 32, 8, 64, 64, 1, 8192)
    cudnn = Machine("h200").time_attention(call).seconds
    assert Machine("h200").time_attention(call._replace(kernel="flash")).seconds == cudnn
    keys = 64 * 8 * 8192 * 2 * 64 * 2  # bytes
    assert cudnn > keys / 4.8e12


PATCHES = make_product("forward", 2048, 1152, 592, group="vision", part="vision", calls=3, is_patches=True)
LINES = {"forward": [5e-5, 4e-14], "wgrad": [6e-5, 2e-14]}


@pytest.mark.parametrize(
    ("direction", "lines", "line"),
    [
        ("forward", LINES, LINES["forward"]),
        ("wgrad", LINES, LINES["wgrad"]),
        ("dgrad", LINES, None),  # where there are none, as any product
        ("forward", {}, None),
        ("forward", None, None),  # a predictor that did not tell the two apart
    ],
)
@pytest.mark.parametrize(("dtype", "error"), [("bf16", 0.1), ("fp32", 0.3)])  # measured, scaled
def test_a_convolution_that_makes_patches(
    direction: str, lines: Any, line: list[float] | None, dtype: str, error: float
) -> None:
    shipped: dict[str, Any] = load_predictor("h200-sxm") or {}
    products = {key: value for key, value in shipped["products"].items() if key != "patches"}
    products |= {} if lines is None else {"patches": lines}
    machine = Machine("h200-sxm", dtype, {**shipped, "products": products})
    made = PATCHES._replace(size=PATCHES.size._replace(direction=direction))
    found, plain = machine.time_product(made), machine.time_product(made._replace(group="language"))
    if line is None:
        assert found == plain
    else:
        start, per_flop = line
        assert found.seconds == pytest.approx(start + per_flop * 2 * 2048 * 1152 * 592)
        assert found.error == pytest.approx(error)


@pytest.mark.parametrize(
    ("model", "grid", "module"),
    [
        ("qwen2-vl-2b", [1, 36, 52], "model.visual.patch_embed.proj"),
        ("llava-1.5-7b", [1, 24, 24], "model.vision_tower.embeddings.patch_embedding"),
    ],
)
def test_patches_are_told_from_other_products(model: str, grid: list[int], module: str) -> None:
    for phase, recompute, ways in (
        ("prefill", "none", ["forward"]),
        ("train", "none", ["forward", "wgrad"]),
        ("train", "full", ["forward", "wgrad"]),
    ):
        estimator = bind(model, recipe={"recompute": recompute})
        work = make_work(estimator, make_workload(1, 1024, phase=phase, image_grid_thw=[grid]))
        assert [each.direction for each in work.products if each.is_patches] == ways
        assert {each.module for each in work.products if each.is_patches} == {module}
    text = make_work(bind(model), make_workload(1, 1024))
    assert not any(each.is_patches for each in text.products)


def test_numbers_of_four_bytes_take_longer_to_move() -> None:
    thin = make_product("forward", 1, 8192, 8192)
    assert Machine("h200", "fp32").time_product(thin).seconds > 1.8 * Machine("h200").time_product(thin).seconds


@pytest.mark.parametrize("load", [SMALL, LARGE])
def test_another_dtype_is_marked_as_not_measured(load: dict[str, int]) -> None:
    found = predict("llama-3.2-1b", device="h200", dtype="tf32", advise=False, **load)
    assert found.notes[0] == "NVIDIA H200 in tf32 was not measured: times are scaled from bf16 by published peaks"
    assert found.step_time_s.low == pytest.approx(0.65 * found.step_time_s.mid)


@pytest.mark.parametrize(("model", "longer"), [("llama-3.2-1b", 1.0), ("olmo-2-7b", 1.020), ("qwen2.5-14b", 1.013)])
def test_zeros_of_unseen_tokens_take_longer(model: str, longer: float) -> None:
    """Rows of an untied embedding whose tokens no batch has had; a tied one's have a gradient from the head."""
    steps = [predict(model, device="h200", advise=False, memory=False, seq_len=seq) for seq in (64, 100_000)]
    few, many = (found.breakdown["optimizer"] for found in steps)
    assert few / many == pytest.approx(longer, abs=0.01)


def test_foreach_takes_longer_and_says_what_it_rests_on() -> None:
    fused = predict("llama-3.2-1b", device="h200", advise=False, **LARGE)
    found = predict("llama-3.2-1b", device="h200", advise=False, optimizer="adamw-foreach", **LARGE)
    assert found.breakdown["optimizer"] == pytest.approx(3 * fused.breakdown["optimizer"], rel=1e-3)  # but its start
    assert "the time of adamw-foreach was not measured: it is that of AdamW for as many bytes" in found.notes


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"seq_len": 8192, "batch_size": 6}, 'recomputation (recompute="full"): the step then fits'),
        ({"seq_len": 8192, "batch_size": 10000}, "a smaller batch: 5 is the largest that fits"),
        ({"seq_len": 8192, "batch_size": 1, "device": "t4", "dtype": "fp16"}, "several devices: `flopcalc plan`"),
    ],
)
def test_a_step_that_does_not_fit_says_so(options: dict[str, Any], advice: str) -> None:
    found = predict("llama-3.2-1b", **{"device": "h200", **options})
    assert found.fits is False
    assert found.to_dict()["memory_bytes"]["fits"] is False
    assert found.notes[0].startswith("does not fit: the step needs ")
    assert found.advice.startswith(advice)


def test_advice_of_a_model_with_a_spec_of_ones_own(tmp_path: Path) -> None:
    spec = tmp_path / "mine.toml"
    spec.write_text((Path(find_data_dir()) / "specs" / "llama.toml").read_text())
    config = {
        "model_type": "mine",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    }
    found = predict(config, device="h200", spec=spec, recipe={"recompute": "full"}, **SMALL)
    assert "more tokens per second" in found.advice
    assert found.notes[0] == "operators of mine were not recorded: those of llama are used"


def test_an_encoder_decoder_has_both_sides() -> None:
    sizes = {"device": "h200", "batch_size": 2, "seq_len": 512}
    found = predict("t5-v1.1-xl", decoder_seq_len=128, **sizes)
    for name in ("encoder.block.*.layer.0.SelfAttention", "decoder.block.*.layer.1.EncDecAttention"):
        assert found.modules[name] > 0
    one, four = (predict("t5-v1.1-xl", phase="decode", decoder_seq_len=n, advise=False, **sizes) for n in (1, 4))
    assert four.host_s == pytest.approx(4 * one.host_s)
    assert one.breakdown["products"] > 0
    assert not any(name.startswith("encoder.") for name in one.modules)


def test_encoder_and_decoder_attend_as_they_are_long() -> None:
    work = make_work(bind("t5-v1.1-xl"), make_workload(2, 512, decoder_seq_len=128))
    seen = {(call.mask, call.batch, call.length, call.keys) for call in work.attention}
    # The decoder's bias of positions is a mask: its calls skip nothing.
    assert seen == {("full", 2, 512, 512), ("window", 2, 128, 128), ("full", 2, 128, 512)}


@pytest.mark.parametrize(
    ("model", "load", "calls"),
    [
        ("deepseek-v3.2", make_workload(2, 512), {("full", 2, 512, 512)}),  # indexed: HF masks all pairs
        (
            "deepseek-v3.2",
            make_workload(2, 4, phase="decode", context=508),
            {("decode", 2, 1, 511)},
        ),  # 510.5 on average
        ("voxtral-mini-3b", make_workload(1, 512, clips=[3000]), {("full", 1, 1500, 1500), ("causal", 1, 512, 512)}),
    ],
)
def test_attention_told_as_a_sum(model: str, load: Workload, calls: set[tuple[str, int, int, int]]) -> None:
    work = make_work(bind(model), load)
    assert {(call.mask, call.batch, call.length, call.keys) for call in work.attention} == calls


WHISPER = {
    "model_type": "whisper", "d_model": 64, "num_mel_bins": 8, "encoder_layers": 2, "encoder_ffn_dim": 128,
    "encoder_attention_heads": 4, "decoder_layers": 3, "decoder_ffn_dim": 128, "decoder_attention_heads": 4,
    "vocab_size": 101, "max_source_positions": 1500, "max_target_positions": 448, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("phase", ["train", "prefill", "decode"])
def test_an_encoder_of_audio(phase: str) -> None:
    work = make_work(bind(WHISPER), make_workload(2, phase=phase, clips=[3000, 3000], decoder_seq_len=4))
    heard = {call.module.split(".")[1]: call.keys for call in work.attention if call.module.startswith("model.encoder")}
    assert heard == ({} if phase == "decode" else {"encoder": 1500})
    assert {call.keys for call in work.attention if "encoder_attn" in call.module} == {1500}
    assert any(moved.module.startswith("model.encoder.") for moved in work.moved) is (phase != "decode")


@pytest.mark.parametrize(
    ("model", "options", "masks"),
    [
        # A prefix that all of its tokens see comes as a mask: the kernel goes through all pairs.
        ("paligemma-3b-224", {"image_grid_thw": [[1, 16, 16]]}, {"model.language_model": {"window"}}),
        ("paligemma-3b-224", {}, {"model.language_model": {"causal"}}),
        ("paligemma-3b-224", {"phase": "prefill"}, {"model.language_model": {"causal"}}),
        ("gemma-3-1b", {}, {"model.layers": {"window", "causal"}}),  # sliding layers, full layers
        ("llama-3.2-1b", {}, {"model.layers": {"causal"}}),
        ("llava-1.5-7b", {"image_grid_thw": [[1, 24, 24]]}, {"model.language_model": {"causal"}}),
        # Beside a tower, sliding layers get theirs even where no window is reached.
        ("gemma-3-4b", {"seq_len": 512, "image_grid_thw": [[1, 64, 64]]}, {"model.language_model": {"window"}}),
    ],
)
def test_masks_that_are_handed_over(model: str, options: dict[str, Any], masks: dict[str, set[str]]) -> None:
    work = make_work(bind(model), make_workload(1, **{"seq_len": 1024, **options}))
    for start, expected in masks.items():
        assert {call.mask for call in work.attention if call.module.startswith(f"{start}.")} == expected


def test_full_layers_beside_sliding_ones_stay_causal() -> None:
    work = make_work(bind("gemma-3-1b"), make_workload(1, 1024))
    seen = {(call.mask, call.window > 0) for call in work.attention}
    assert seen == {("window", True), ("causal", False)}
    short = make_work(bind("gemma-3-1b"), make_workload(1, 256))
    assert {call.mask for call in short.attention} == {"causal"}  # no window is reached


def test_an_audio_tower_without_audio_does_not_run() -> None:
    text = make_work(bind("voxtral-mini-3b"), make_workload(1, 512))
    heard = make_work(bind("voxtral-mini-3b"), make_workload(1, 512, clips=[3000]))
    assert not any(moved.module.startswith("model.audio_tower") for moved in text.moved)
    assert any(moved.module.startswith("model.audio_tower.layers.*") for moved in heard.moved)
    assert sum(heard.dispatched.values()) > sum(text.dispatched.values())


@pytest.mark.parametrize(
    ("model", "load", "lengths"),
    [
        ("phi-3-mini", {"phase": "decode", "batch_size": 16, "seq_len": 1}, (2000, 2046, 2100, 4000)),
        ("mistral-7b-v0.1", {"phase": "decode", "batch_size": 16, "seq_len": 1}, (4000, 4096, 8000)),
        ("gemma-3-1b", {"phase": "decode", "batch_size": 16, "seq_len": 1}, (500, 512, 600, 4000)),
        ("mixtral-8x7b", {"phase": "prefill"}, (480, 511, 512, 513, 520, 600)),
        ("deepseek-v3", {"phase": "prefill"}, (4000, 4096, 4100)),
    ],
)
def test_more_work_takes_no_less(model: str, load: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """Behind a window that is full, and where experts get more rows than their smaller tile has."""
    name = "context" if load["phase"] == "decode" else "seq_len"
    taken = [
        predict(model, device="h200", memory=False, advise=False, **load, **{name: length}).device_s
        for length in lengths
    ]
    assert all(later >= earlier * 0.999 for earlier, later in pairwise(taken)), taken


def test_layers_without_attention_keep_no_keys() -> None:
    load = {"phase": "decode", "batch_size": 4, "seq_len": 1}
    short, long = (
        predict("mamba-2.8b", device="h200", memory=False, advise=False, context=context, **load).device_s
        for context in (100, 30000)
    )
    assert short == long


def test_a_pause_is_part_of_shares_and_breakdown() -> None:
    load = {"batch_size": 1, "seq_len": 2048, "phase": "prefill"}
    plain, paused = (
        predict("llama-3.1-8b", device="h200", memory=False, advise=False, pause_s=pause, **load)
        for pause in (0.0, 0.1)
    )
    assert paused.mfu < plain.mfu
    assert sum(paused.breakdown.values()) == pytest.approx(paused.step_time_s.mid + 0.1)
    assert paused.tokens_per_s == pytest.approx(2048 / (paused.step_time_s.mid + 0.1))


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("", "power"),
        ("host", "types"),
        ("host", "again"),
        ("products", "grouped"),
        ("moved", "pointwise_strided"),
        ("optimizer", "adamw"),
        ("gaps", "forward"),
    ],
)
def test_a_predictor_that_lacks_a_part_is_refused(
    part: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.loads((Path(find_data_dir()) / "predictors" / "h200-sxm.json").read_text())
    del (data[part] if part else data)[key]
    (tmp_path / "predictors").mkdir()
    (tmp_path / "predictors" / "h200-sxm.json").write_text(json.dumps(data))
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    load_predictor.cache_clear()
    try:
        with pytest.raises(FlopcalcError, match=f"{key} missing; `flopcalc calibrate --predictor` makes it again"):
            predict("llama-3.2-1b", device="h200", seq_len=64)
    finally:
        load_predictor.cache_clear()


@pytest.mark.parametrize(("text", "words"), [("{", "not valid JSON"), ('{"schema": 99}', "schema 99")])
def test_a_broken_predictor_is_named(text: str, words: str, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "predictors"
    folder.mkdir()
    (folder / "h200-sxm.json").write_text(text)
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    load_predictor.cache_clear()
    try:
        with pytest.raises(FlopcalcError, match=words):
            Machine("h200")
    finally:
        load_predictor.cache_clear()


def test_to_dict_is_json() -> None:
    shown = json.loads(json.dumps(predict("llama-3.2-1b", device="h200", **SMALL).to_dict()))
    assert {"step_time_s", "bound", "mfu", "hfu", "tokens_per_s", "breakdown", "memory_bytes", "evidence", "notes"} <= {
        *shown
    }
    assert set(shown["step_time_s"]) == {"low", "mid", "high"}


@pytest.mark.parametrize("model", ["qwen2.5-vl-3b", "qwen2-vl-2b", "qwen3-vl-2b"])
def test_the_host_dispatches_every_call_of_attention(model: str) -> None:
    from flopcalc.api import bind

    load = make_workload(2, 1536, image_grid_thw=[[1, 44, 60]] * 2)
    work = make_work(bind(model), load)
    for direction in ("forward", "backward"):
        calls = sum(call.calls for call in work.attention if call.direction == direction)
        assert work.dispatched[f"{direction} attention"] == calls


class _Following(Clock):
    """A step of which a share is the host's."""

    def __init__(self, share: float, *, is_own: bool) -> None:
        shipped: dict[str, Any] = load_predictor("h200-sxm") or {}
        super().__init__(Machine("h200-sxm", "bf16", {**shipped, "is_own": is_own}))
        self.share = share

    def step_s(self, host_factor: float = 1.0, pause_s: float = 0.0) -> float:
        return 1 - self.share + self.share * host_factor - pause_s


@pytest.mark.parametrize(
    ("share", "bound", "is_own", "wider"),
    [
        (0.0, "device", False, 0.04),
        (0.25, "device", False, 0.75 * 0.04 + 0.25 * 0.4),
        (1.0, "device", False, 0.4),
        (0.5, "host", False, 0.4),  # never narrower than the side that bounds it
        (1.0, "host", False, 0.4),
        (0.5, "device", True, 0.0),
        (0.5, "host", True, 0.0),
    ],
)
def test_another_machine_widens_by_what_the_step_follows(share: float, bound: str, is_own: bool, wider: float) -> None:
    clock = _Following(share, is_own=is_own)
    assert clock.host_share(1.0) == pytest.approx(share)
    floor = clock.constants["error"][bound]
    assert clock.error(bound, clock.host_share(1.0)) == pytest.approx(floor + wider)


def test_near_balance_the_interval_holds_a_faster_host() -> None:
    given: dict[str, Any] = {"device": "h200", "seq_len": 640, "memory": False, "advise": False}
    plain, faster = (predict("llama-3.1-8b", host_factor=pace, **given) for pace in (1.0, 0.75))
    assert (plain.bound, faster.bound) == ("host", "device")
    assert plain.step_time_s.low < faster.step_time_s.mid < 0.9 * plain.step_time_s.mid


@pytest.mark.parametrize(
    ("model", "load", "starts"),
    [
        ("llama-3.1-8b", {"seq_len": 2048}, []),
        ("llama-3.2-1b", {"seq_len": 16384}, []),  # twice the longest that was measured
        ("llama-3.2-1b", {"seq_len": 16385, "phase": "prefill"}, ["attention over 16,385 keys is more"]),
        ("llama-3.2-1b", {"phase": "decode", "seq_len": 1, "context": 10**7}, ["attention over 10,000,001 keys is"]),
        ("llama-3.1-405b", {"seq_len": 8192, "batch_size": 64}, ["85 % of the GPU time is in kernel sizes far"]),
        ("mixtral-8x7b", {"seq_len": 2048, "batch_size": 4}, []),  # experts: timed by themselves at such sizes
        ("opt-13b", {"seq_len": 104, "phase": "prefill"}, []),  # the host bounds it: what the device does is aside
    ],
)
def test_sizes_beyond_measured_ones_are_said(model: str, load: dict[str, Any], starts: list[str]) -> None:
    found = predict(model, device="h200", memory=False, advise=False, **load)
    said = [note for note in found.notes if "is more than was measured" in note or "far from any" in note]
    assert len(said) == len(starts), said
    assert all(note.startswith(start) for note, start in zip(said, starts, strict=True)), said


def test_the_longest_attention_is_what_calibration_times() -> None:
    from flopcalc.measure.predictor.single_calls import list_rows
    from flopcalc.prediction.clock import LONGEST

    sizes = {mask: each for row in list_rows("full").values() for mask, each in row.get("sizes", {}).items()}
    assert {mask: max(keys for *_, keys in sizes[mask]) for mask in LONGEST} == LONGEST


def test_evidence_names_the_predictor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(find_data_dir()) / "predictors"
    provenance = json.loads((folder / "h200-sxm.json").read_text())["provenance"]
    expected = {
        "origin": "shipped",
        "path": str(folder / "h200-sxm.json"),
        "device": "h200-sxm",
        "date": provenance["date"],
    }
    for device in ("h200", "h100-sxm"):  # the second has none of its own
        assert predict("llama-3.2-1b", device=device, advise=False, **SMALL).evidence["predictor"] == expected
    copytree(folder, tmp_path / "predictors")
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    load_predictor.cache_clear()
    try:
        own = predict("llama-3.2-1b", device="h200", advise=False, **SMALL).evidence["predictor"]
    finally:
        load_predictor.cache_clear()
    assert own == {**expected, "origin": "own", "path": str(tmp_path / "predictors" / "h200-sxm.json")}


def test_the_trainer_clips_gradients_and_reads_the_loss() -> None:
    estimator = bind("gpt2-medium", convention="hardware", device="h200")
    load, parameters = make_workload(1, 512), 354_823_168
    plain, trained = (make_work(estimator, load, in_trainer=each, clips=each) for each in (False, True))
    (added,) = set(trained.moved) - set(plain.moved)
    assert (added.reads, added.writes, added.tensors) == (4 * parameters, 2 * parameters, 292)
    modules = plain.dispatched["forward module"]
    more = {"loss read": 1, "loss module": modules / 2, "cleared adamw": 292 * 10 + 900, "optimizer adamw": 292 * 3}
    assert trained.dispatched == plain.dispatched | more
    found = predict("gpt2", device="h200", seq_len=512, advise=False, memory=False, hf_trainer=True)
    assert "the time of clipping of gradients was not measured: it is that of AdamW for as many bytes" in found.notes


@pytest.mark.parametrize("load", mark_heavy([{"seq_len": 2048, "batch_size": 2}, PREFILL, DECODE], [PREFILL]))
@pytest.mark.parametrize(("model", "kind"), [("gemma-2-2b", "gemma2"), ("gpt-oss-20b", "gpt_oss")])
def test_a_type_without_sdpa_runs_eager(model: str, kind: str, load: dict[str, Any]) -> None:
    """Time, HFU and memory alike, from Python and of an estimate; a fused kernel is not advised."""
    auto, eager, fused = (
        predict(model, device="h200", attention_kernel=kernel, **load) for kernel in ("auto", "eager", "cudnn")
    )
    note = f"HF has no SDPA for {kind}: attention is eager, as plain products"
    assert [each for each in auto.notes if each != note] == list(eager.notes)
    assert note in auto.notes
    assert auto._replace(notes=()) == eager._replace(notes=())
    assert "fused attention" not in eager.advice
    assert f"HF has no SDPA for {kind}: kernel cudnn is timed together with eager's operators" in fused.notes
    assert fused.breakdown["attention"] != eager.breakdown["attention"]
    estimate = bind(model, convention="hardware", device="h200")(**load)
    assert predict_estimate(estimate, device="h200") == auto
    assert find_largest_batch(estimate, device="h200") == find_largest_batch(
        estimate, device="h200", attention_kernel="eager"
    )


def test_types_with_sdpa_say_nothing_of_it() -> None:
    for kernel in ("auto", "eager", "flash"):
        found = predict("llama-3.2-1b", device="h200", attention_kernel=kernel, **SMALL)
        assert not any("SDPA" in note for note in found.notes)


@pytest.mark.parametrize(
    ("phase", "advice"),
    [
        ("train", "several devices: `flopcalc plan` finds a layout that fits"),
        ("prefill", "several devices that share the model (`flopcalc serving` with tp=N): one does not hold it"),
        ("decode", "several devices that share the model (`flopcalc serving` with tp=N): one does not hold it"),
    ],
)
def test_plans_are_for_training_alone(phase: str, advice: str) -> None:
    context = {"context": 4096} if phase == "decode" else {}
    found = predict("llama-3.1-405b", device="h200", batch_size=2, seq_len=8, phase=phase, **context)
    assert found.advice == advice


@pytest.mark.parametrize("compiled", [True, False])
def test_what_compiled_steps_rest_on_is_said(compiled: bool) -> None:
    found = predict("llama-3.2-1b", device="h200", compiled=compiled, memory=False, advise=False, **LARGE)
    assert ("compiled times are based on six measured models" in found.notes) == compiled


def test_compiled_steps_keep_what_fused_kernels_do_and_a_tenth_more() -> None:
    found = {
        execution: predict("llama-3.2-1b", device="h200", execution=execution, optimizer="adamw", advise=False, **LARGE)
        for execution in ("eager", "compiled", "fused")
    }
    memory = {execution: each.memory for execution, each in found.items() if each.memory is not None}
    assert memory["compiled"].activations == pytest.approx(1.1 * memory["fused"].activations)
    # Logits of two bytes, and their gradient in float32; eager code holds three tensors in float32.
    assert 2 * memory["compiled"].logits == memory["eager"].logits


def test_images_of_one_sequence_are_kept_apart_by_a_mask() -> None:
    """Pixtral joins all images of a batch; HF's kernel goes through all pairs of their patches."""
    estimator = bind("mistral-small-3.1-24b", convention="hardware", device="h200")
    load = make_workload(2, 600, image_grid_thw=[(1, 20, 24), (1, 16, 30)])
    calls = [call for call in make_work(estimator, load).attention if call.group == "vision"]
    assert {(call.mask, call.batch, call.length, call.keys) for call in calls} == {("apart", 1, 960, 960)}
    fused = [call for call in make_work(estimator, load, execution="fused").attention if call.group == "vision"]
    assert {(call.mask, call.batch, call.length) for call in fused} == {("full", 2, 480)}


@pytest.mark.parametrize(("heads", "kernel", "dim"), [(32, "flash", 128), (25, "", 128), (50, "", 64)])
def test_head_dims_that_no_kernel_takes_are_padded(heads: int, kernel: str, dim: int) -> None:
    """3,200 in 32 heads of 100: SDPA copies queries, keys and values with zeros behind each head, then runs flash."""
    config = {**load_config("open-llama-3b").config, "num_attention_heads": heads, "num_key_value_heads": heads}
    load = make_workload(2, 512)
    work = make_work(bind(config, convention="hardware", device="h200"), load)
    assert {(call.kernel, call.qk, call.v) for call in work.attention} == {(kernel, dim, dim)}
    plain = make_work(bind("llama-2-7b", convention="hardware", device="h200"), load)

    def count(made: Work, direction: str, kind: str) -> float:
        found = (moved for moved in made.moved if moved.module.endswith("self_attn") and moved.direction == direction)
        return sum(moved.calls for moved in found if moved.kind == kind)

    layers = config["num_hidden_layers"]
    added = {
        ("forward", "copy_strided"): 3,
        ("forward", "fill"): 3,
        ("backward", "copy_strided"): 6,
        ("backward", "fill"): 1,
    }
    for (direction, kind), more in added.items():
        usual = count(plain, direction, kind) / 32
        assert count(work, direction, kind) == layers * (usual + (more if kernel else 0))


@pytest.mark.parametrize(
    ("weights", "rows", "kinds"),
    [
        ("int8", 64, {"dequantize_int8": 3 * 256 * 256}),
        ("int8", 1, {"dequantize_int8": 3 * 256 * 256}),
        ("nf4", 64, {"dequantize": 2.5 * 256 * 256}),
        ("nf4", 1, {}),
        ("int4-g128", 64, {}),
    ],
)
def test_weights_that_are_made_whole(weights: str, rows: int, kinds: dict[str, float]) -> None:
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
              "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512}  # fmt: skip
    work = make_work(bind(config, weights=weights), Workload(1, rows, phase="prefill"))
    found = {
        moved.kind: moved.reads + moved.writes
        for moved in work.moved
        if moved.module.endswith("q_proj") and moved.kind.startswith("dequantize")
    }
    assert found == kinds
