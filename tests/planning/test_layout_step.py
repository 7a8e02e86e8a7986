"""Seconds of a layout: one device's share as the clock says, and what many devices exchange; by round numbers."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
from round_machine import GPT, use_round_machine

from flopcalc import bind
from flopcalc.core.model.config import load_config
from flopcalc.hardware.attention_blocks import block_pairs
from flopcalc.planning import step as module
from flopcalc.planning.layout import Layout
from flopcalc.planning.network import count_reached, find_interconnect, time_collective, time_message
from flopcalc.planning.seconds import PARTS, Overlaps
from flopcalc.planning.step import LayoutTimer
from flopcalc.prediction.kernels.defaults import load_defaults

FITTED = load_defaults().planning


def set_expert_host(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Another time of the host for each product of experts."""
    known = load_defaults()
    changed = known._replace(device=known.device._replace(expert_host_s=seconds))
    for name in ("constants", "defaults"):
        monkeypatch.setattr(f"flopcalc.prediction.kernels.{name}.load_defaults", lambda: changed)


@pytest.fixture(autouse=True)
def _round(monkeypatch: pytest.MonkeyPatch) -> None:
    use_round_machine(monkeypatch)


def make_runner(model: Any = GPT, batch: int = 64, seq: int = 2048, **options: Any) -> LayoutTimer:
    estimator = bind(model)
    net = find_interconnect("hgx-h200", "h200")
    return LayoutTimer(estimator, estimator(1, seq).terms[0][1], "h200", net, batch, **options)


def time_parts(layout: Layout, batch: int = 64, model: Any = GPT, **options: Any) -> dict[str, float]:
    overlaps = Overlaps(**{name: options.pop(name) for name in list(options) if name in Overlaps._fields})
    return dict(zip(PARTS, make_runner(model, batch, overlaps=overlaps, **options).time(layout).parts, strict=True))


def test_one_device_does_the_products_once() -> None:
    parts = time_parts(Layout(micro_batch=1), batch=1)
    estimator = bind(GPT)
    load = estimator(1, 2048).terms[0][1]
    products = sum(
        counted.flops.total * counted.block.copies
        for counted in estimator.rows(load, "model")
        if counted.row.op.kind == "linear"
    )
    assert parts["products"] == pytest.approx(products / 100e12)
    # Adam reads 16 bytes a parameter and writes 14.
    assert parts["optimizer"] == pytest.approx(30 * estimator.parameters()["trainable"] / 1e12)
    assert [name for name, part in parts.items() if part] == ["products", "attention", "memory_bound", "optimizer"]


def test_the_bubble() -> None:
    """(p-1)/v stages of one micro-batch stand idle."""
    plain, chunked = (time_parts(Layout(pp=4, virtual=virtual, dp=1)) for virtual in (1, 2))
    whole = time_parts(Layout(), batch=1)
    layers = sum(whole[name] for name in ("products", "attention", "memory_bound"))
    head = 3 * 2 * 2048 * 1024 * 32000 / 100e12
    assert plain["bubble"] == pytest.approx(3 * (layers - head) / 4, rel=0.05)
    assert chunked["bubble"] == pytest.approx(plain["bubble"] / 2)
    # Interleaved stages hand over twice as often, hidden but for a share of it.
    shown = time_parts(Layout(pp=4, virtual=2, dp=1), sends=False)["pipeline_sends"]
    assert chunked["pipeline_sends"] < plain["pipeline_sends"] < shown


def test_recomputation_costs_a_forward_pass() -> None:
    none, half, full = (time_parts(Layout(recompute=repeat)) for repeat in ("none", "half", "full"))
    assert none["recompute"] == 0
    assert 0 < half["recompute"] == pytest.approx(full["recompute"] / 2)
    selective = time_parts(Layout(recompute="selective"))
    assert selective["recompute"] == pytest.approx(none["attention"] / 3)
    # Fused, both words mean the whole layer; HF's own checkpointing stops at the last tensor that it needs.
    assert time_parts(Layout(recompute="full-reentrant")) == pytest.approx(full)
    partial, whole = (
        time_parts(Layout(recompute=repeat), model="llama-3.2-1b", execution="graphs")["recompute"]
        for repeat in ("full", "full-reentrant")
    )
    assert 0 < partial < whole


def test_tensor_parallelism_is_paid_in_both_directions() -> None:
    plain = time_parts(Layout(tp=8))
    again = time_parts(Layout(tp=8, recompute="full"))
    # Two sums a layer and direction; recomputation has those of one more forward pass; the two ends one each.
    assert again["tensor_parallel"] / plain["tensor_parallel"] == pytest.approx((3 * 2 * 16 + 4) / (2 * 2 * 16 + 4))
    assert time_parts(Layout(tp=8), tensor=False)["tensor_parallel"] > plain["tensor_parallel"]


def test_a_ring_is_cut_into_calls() -> None:
    """Attention over two devices takes what half of it does, in a call for each; hidden keys cost a share of it."""
    whole, cut = (time_parts(Layout(cp=cp, dp=2 // cp)) for cp in (1, 2))
    # The round machine takes all pairs of a causal call: 1/4 for each device's keys.
    assert cut["attention"] / whole["attention"] == pytest.approx(2 * (1 / 4 + 1 / 4))
    net = find_interconnect("hgx-h200", "h200")
    keys = 2.0 * 2048 * 2048 / 2  # bytes of half the keys and values
    once = time_message(net, keys, 1, 2)
    assert cut["context_parallel"] == pytest.approx(3 * FITTED.contention * once * 16 * 64)
    across = time_parts(Layout(tp=8, cp=2))
    inside = time_parts(Layout(tp=4, cp=2))
    assert across["context_parallel"] > 2 * inside["context_parallel"]


def test_a_window_takes_the_blocks_that_it_sees() -> None:
    config = load_config("mistral-7b-v0.1").config
    models = [{**config, "sliding_window": window} for window in (None, 512)]
    whole, some = (time_parts(Layout(), model=model)["attention"] for model in models)
    assert some / whole == pytest.approx(block_pairs(2048, 512) / block_pairs(2048))
    whole, some = (time_parts(Layout(), model=model, attention_kernel="eager")["attention"] for model in models)
    assert some == whole


def test_stages_of_two_nodes_hand_over_between_them() -> None:
    inside, across = (time_parts(Layout(tp=2, pp=pp))["pipeline_sends"] for pp in (4, 8))
    assert across > 3 * inside


def test_gradients_hide_behind_backward() -> None:
    open_, hidden = (time_parts(Layout(dp=64), gradients=overlaps) for overlaps in (False, True))
    assert open_["data_parallel"] > hidden["data_parallel"] > 0
    # An all-reduce of fp32 against a reduce-scatter of fp32 and an all-gather of bf16: 8 bytes against 6.
    spread = time_parts(Layout(dp=64, zero=1), gradients=False)
    assert spread["data_parallel"] / open_["data_parallel"] == pytest.approx(6 / 8, rel=0.1)
    # ZeRO 2 reduces as much in smaller messages, and gathers the new weights as ZeRO 1 does.
    both = time_parts(Layout(dp=64, zero=2), gradients=False)
    assert spread["data_parallel"] < both["data_parallel"] < 2 * spread["data_parallel"]
    # Gradients in the weights' dtype are half as many bytes.
    narrow = time_parts(Layout(dp=64), gradients=False, optimizer="adamw")
    assert narrow["data_parallel"] / open_["data_parallel"] == pytest.approx(1 / 2, rel=0.2)  # and hops


def test_zero_3_gathers_in_every_micro_batch() -> None:
    once, twice = (time_parts(Layout(dp=16, zero=3, micro_batch=size)) for size in (4, 2))
    assert twice["data_parallel"] == pytest.approx(2 * once["data_parallel"])


@pytest.mark.parametrize(("ep", "has_copies"), [(8, False), (4, True)])
def test_experts_that_one_device_alone_has_are_not_copied(ep: int, has_copies: bool) -> None:
    runner = make_runner("mixtral-8x7b")
    layout = Layout(dp=8, ep=ep, zero=3)
    own = runner.weights["layers"].trained
    copied = module.SHARD_COPIED * (own.dense + has_copies * own.other / ep) / runner.model.layers
    seconds = copied / (FITTED.streamed * runner.machine.bandwidth)
    spread = runner._spread(layout._replace(zero=0))
    assert runner._expose_shards(layout, spread.layer, 0.0, 0.0, FITTED.contention) == pytest.approx(seconds)


@pytest.mark.parametrize(("zero", "share"), [(0, 1), (1, 64), (3, 64)])
def test_ranks_share_the_optimizers_step(zero: int, share: int) -> None:
    whole = time_parts(Layout())["optimizer"]
    assert time_parts(Layout(dp=64, zero=zero))["optimizer"] == pytest.approx(whole / share)


def test_experts_are_exchanged() -> None:
    inside, across = (time_parts(Layout(dp=64, ep=ep), model="mixtral-8x7b") for ep in (8, 1))
    assert inside["expert_parallel"] > 0 == across["expert_parallel"]


@pytest.mark.parametrize(
    ("pp", "virtual", "recompute", "is_hidden"),
    [(2, 2, "none", True), (2, 2, "light", True), (2, 2, "full", False), (2, 1, "none", False), (1, 1, "none", False)],
)
def test_interleaved_stages_hide_the_exchange(pp: int, virtual: int, recompute: str, is_hidden: bool) -> None:
    layout = Layout(dp=64 // pp, pp=pp, virtual=virtual, ep=8, recompute=recompute)
    found, shown = (time_parts(layout, model="mixtral-8x7b", experts=hides) for hides in (True, False))
    assert (found["expert_parallel"] < shown["expert_parallel"]) == is_hidden
    assert found["expert_parallel"] <= shown["expert_parallel"]


@pytest.mark.parametrize(
    ("model", "zero", "recompute", "is_hidden"),
    [
        ("deepseek-v2-lite", 3, "full", True),
        ("deepseek-v2-lite", 3, "none", True),
        ("deepseek-v2-lite", 1, "full", False),
        ("mixtral-8x7b", 3, "full", False),  # has no shared experts
    ],
)
def test_with_zero_3_shared_experts_hide_the_exchange(
    monkeypatch: pytest.MonkeyPatch, model: str, zero: int, recompute: str, is_hidden: bool
) -> None:
    set_expert_host(monkeypatch, 1e-9)
    layout = Layout(dp=64, ep=8, zero=zero, recompute=recompute)
    found, shown = (time_parts(layout, model=model, experts=hides) for hides in (True, False))
    assert (found["expert_parallel"] < shown["expert_parallel"]) == is_hidden
    assert found["expert_parallel"] >= 0.999 * FITTED.contention * shown["expert_parallel"]


def test_a_plain_all_to_all_sends_every_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that reaches two experts of a device goes there twice, and all rows are sorted once more."""
    set_expert_host(monkeypatch, 1e-9)
    once, often = (
        time_parts(Layout(dp=64, ep=4), model="mixtral-8x7b", experts=False, once=is_once)["expert_parallel"]
        for is_once in (True, False)
    )
    size = 2 * 2048 * 2 * 4096  # bytes of two copies of every token
    sorting = 2 * 2 * 2 * size / (FITTED.sorted * 4.8e12)  # dispatch and combine, read and written, both passes
    sent = [
        2 * 2 * time_collective(find_interconnect("hgx-h200", "h200"), "all_to_all", many * size, 4)
        for many in (count_reached(4, 2) / 2, 1.0)
    ]
    assert once == pytest.approx(32 * sent[0])
    assert often == pytest.approx(32 * (sent[1] + sorting))


def test_waiting_for_the_host_hides_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(dp=64, ep=8)
    set_expert_host(monkeypatch, 1e-2)
    waiting = time_parts(layout, model="mixtral-8x7b")
    set_expert_host(monkeypatch, 1e-9)
    at_once = time_parts(layout, model="mixtral-8x7b")
    assert 0 < waiting["expert_parallel"] < at_once["expert_parallel"]
    assert waiting["products"] > at_once["products"]


@pytest.mark.parametrize(
    ("layout", "dense", "experts", "share"),
    [
        (Layout(dp=64, ep=8, zero=3), 1.0, 0.0, FITTED.contention),
        (Layout(dp=64, ep=8, zero=3), 0.0, 1.0, FITTED.contention_alone),
        (Layout(dp=64, ep=8, zero=3), 1.0, 1.0, (FITTED.contention + FITTED.contention_alone) / 2),
        (Layout(dp=64, ep=4, zero=3), 0.0, 1.0, FITTED.contention),
        (Layout(dp=64, ep=8, zero=2), 0.0, 1.0, FITTED.contention),
        (Layout(dp=64, ep=8, zero=3), 0.0, 0.0, FITTED.contention),
    ],
)
def test_a_group_of_one_per_node_slows_little(layout: Layout, dense: float, experts: float, share: float) -> None:
    assert make_runner("mixtral-8x7b")._find_contention(layout, dense, experts) == pytest.approx(share)


@pytest.mark.parametrize(("dp", "zero", "more"), [(8, 1, 0.0), (8, 3, 0.01), (64, 3, 0.01)])
def test_zero_3_waits_for_the_slowest_replica_at_every_layer(dp: int, zero: int, more: float) -> None:
    parts = time_parts(Layout(dp=dp, zero=zero))
    whole = sum(parts.values()) - parts["overhead"]
    assert parts["overhead"] / whole == pytest.approx(FITTED.overhead + more * log(dp))


def test_an_execution_moves_the_bytes_of_its_kernels() -> None:
    eager, compiled, fused = (time_parts(Layout(), execution=word) for word in ("eager", "compiled", "fused"))
    assert eager["memory_bound"] > compiled["memory_bound"] > fused["memory_bound"]
    assert eager["products"] == compiled["products"] == pytest.approx(fused["products"])
    # Softmax moves scores; its products are attention's.
    assert time_parts(Layout(), attention_kernel="eager")["memory_bound"] > fused["memory_bound"]


@pytest.mark.parametrize("layout", [Layout(dp=8), Layout(tp=2, dp=4), Layout(pp=2, dp=4), Layout(tp=2, cp=2, pp=2)])
@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_a_slow_host_is_waited_for_on_every_device(layout: Layout, execution: Any) -> None:
    """Small work: every device launches as many kernels as one alone, but for those of other stages."""
    given: dict[str, Any] = {
        "batch": 8,
        "model": "llama-3.2-1b",
        "seq": 64,
        "execution": execution,
        "optimizer": "none",
    }
    alone, spread = (time_parts(each, **given) for each in (Layout(), layout))
    assert alone["host"] > alone["products"]
    assert spread["host"] > 0
    assert sum(spread.values()) > 0.1 * sum(alone.values()) / layout.dp


def test_error_is_the_machines_and_widens() -> None:
    runner = make_runner()
    alone, many = runner.time(Layout()), runner.time(Layout(tp=8, dp=8))
    assert alone.low / alone.seconds + alone.high / alone.seconds == pytest.approx(2)  # as wide both ways
    assert many.above > many.below > alone.above > 0
    assert many.low < many.seconds < many.high


@pytest.mark.parametrize(
    ("model", "is_wider"),
    [("mamba-2.8b", True), ("deepseek-v3.2", True), ("llama-3.1-8b", False), ("mixtral-8x7b", False)],
)
def test_scans_widen(model: str, is_wider: bool) -> None:
    layout = Layout(dp=256, zero=3, recompute="full")
    found = make_runner(model, 256).time(layout)
    runner = make_runner(model, 256)
    runner.fitted = FITTED._replace(scan_width=1.0)
    plain = runner.time(layout)
    assert found.above / plain.above == pytest.approx(FITTED.scan_width if is_wider else 1.0)
    assert found.parts == plain.parts
