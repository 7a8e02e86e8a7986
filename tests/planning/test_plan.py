"""Layouts, their memory and time, the search and what it refuses; times come from a machine of round numbers."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from flopcalc.planning.clock import PARTS, Clock, Execution
from flopcalc.planning.layouts import (
    Cut,
    Layout,
    count_memory,
    find_problem,
    list_layouts,
    make_cut,
    split_layers,
)
from places import ROOT

from flopcalc.api import bind
from flopcalc.core.model.config import load_config
from flopcalc.core.workload.sums import block_pairs
from flopcalc.data import find_data_dir, load_toml
from flopcalc.errors import FlopcalcError, SpecError
from flopcalc.hardware.devices import find_device
from flopcalc.planning import clock as clock_module
from flopcalc.planning.money import count_energy, find_price
from flopcalc.planning.network import find_interconnect, time_message
from flopcalc.planning.plan import SCAN_WIDTH, Plan, choose_batch, format_tokens, parse_tokens, plan
from flopcalc.prediction.machine import Timed

GPT = {
    "model_type": "gpt2", "n_embd": 1024, "n_layer": 16, "n_head": 16, "n_inner": 4096, "vocab_size": 32000,
    "n_positions": 4096,
}  # fmt: skip


class RoundMachine:
    """100 TFLOP/s, 1 TB/s, attention at 50 TFLOP/s; nothing else costs time."""

    peak = 100e12
    is_measured = True

    def __init__(self, *_: str) -> None:
        pass

    def time_product(self, product: Any) -> Timed:
        return Timed(2.0 * product.m * product.n * product.k / 100e12, 0.1, True)

    def time_attention(self, call: Any) -> Timed:
        pairs = call.batch * call.heads * call.length * call.keys
        return Timed((2 if call.direction == "backward" else 1) * 2.0 * pairs * call.qk / 50e12, 0.1, True)

    def time_moved(self, moved: Any) -> Timed:
        return Timed((moved.reads + moved.writes) / 1e12, 0.1, True)


@pytest.fixture(autouse=True)
def _round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "Machine", RoundMachine)


def cut_model(model: Any = GPT, seq: int = 2048) -> Cut:
    estimator = bind(model)
    return make_cut(estimator, estimator(1, seq).terms[0][1])


def time_parts(layout: Layout, batch: int = 64, model: Any = GPT, **execution: bool) -> dict[str, float]:
    net = find_interconnect("hgx-h200", "h200")
    step = Clock(cut_model(model), "h200", net, batch, execution=Execution(**execution)).time(layout)
    return dict(zip(PARTS, step.parts, strict=True))


# --- a model in places --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "model", ["llama-3.1-8b", "qwen3-235b-a22b", "deepseek-v3", "gpt2", "pythia-6.9b", "gemma-2-9b", "mixtral-8x7b"]
)
def test_places_hold_the_whole_model(model: str) -> None:
    """Every product and every parameter of the core's list stands in exactly one place."""
    estimator = bind(model)
    load = estimator(1, 1024).terms[0][1]
    cut = make_cut(estimator, load)
    places = ((cut.layers, cut.layer), (1, cut.first), (1, cut.last))
    flops = sum(many * 2 * each.share * each.rows * each.n * each.k for many, place in places for each in place.linears)
    counted = sum(
        row.forward * value * block.copies
        for block, row, value in estimator.rows(load, "model")
        if row.op.kind == "linear"
    )
    assert flops == pytest.approx(counted, rel=1e-9)
    parameters = sum(many * (place.dense + place.experts) for many, place in places)
    assert parameters == pytest.approx(estimator.parameters()["total"], rel=1e-9)


def test_activations_are_those_of_korthikanti() -> None:
    """34 s·b·h bytes a layer less two dropout masks, and 5 a·s²·b of scores where attention is not fused."""
    layer = cut_model().layer
    assert layer.saved_wide + layer.saved_narrow == 32 * 2048 * 1024
    assert layer.saved_wide == 8 * 2048 * 1024
    assert layer.saved_scores == 5 * 16 * 2048**2


@pytest.mark.parametrize(
    ("model", "exits"),
    [("llama-3.1-8b", 2.0), ("pythia-6.9b", 1.0), ("qwen3-235b-a22b", 1.0), ("command-r-35b", 1.0)],
)
def test_sums_of_tensor_parallelism(model: str, exits: float) -> None:
    """Two a layer, one where attention and MLP stand side by side or the MLP is experts."""
    assert cut_model(model).layer.exits == exits


def test_keys_are_cut_no_finer_than_their_heads() -> None:
    linear = cut_model("llama-3.1-8b").layer.linears[0]
    assert (linear.n, linear.kv, linear.kv_heads) == (6144, 2048, 8)
    eight, sixteen = (clock_module.cut_linear(linear, tp, 1, 1, True, 1).n for tp in (8, 16))
    assert (eight, sixteen) == (768, 4096 // 16 + 256)


@pytest.mark.parametrize(
    ("layers", "pp", "virtual", "split"),
    [
        (16, 1, 1, (16, 16, 16)),
        (16, 4, 1, (4, 4, 4)),
        (126, 16, 1, (8, 7, 7)),
        (61, 16, 1, (4, 3, 2)),
        (96, 8, 3, (12, 12, 12)),
    ],
)
def test_uneven_layers_spare_the_ends(layers: int, pp: int, virtual: int, split: tuple[int, int, int]) -> None:
    assert split_layers(cut_model()._replace(layers=layers), Layout(pp=pp, virtual=virtual)) == split


# --- memory ----------------------------------------------------------------------------------------------------------
def test_states_are_spread_by_zero() -> None:
    cut = cut_model()
    trained = 16 * cut.layer.dense + cut.first.dense + cut.last.dense
    for zero, weights, gradients, optimizer in ((0, 1, 1, 1), (1, 1, 1, 8), (2, 1, 8, 8), (3, 8, 8, 8)):
        found = count_memory(cut, Layout(dp=8, zero=zero), 64)
        gathered = 4 * cut.layer.dense if zero == 3 else 0
        assert found.weights == pytest.approx(2 * trained / weights + gathered)
        assert found.gradients == pytest.approx(4 * trained / gradients)
        assert found.optimizer == pytest.approx(12 * trained / optimizer)


def test_recomputation_keeps_inputs_alone() -> None:
    cut = cut_model()
    inputs, whole = 2 * 2048 * 1024, 32 * 2048 * 1024
    ends = cut.first.saved_wide + cut.last.saved_wide + cut.first.saved_narrow + cut.last.saved_narrow
    found = {
        repeat: count_memory(cut, Layout(recompute=repeat), 64, is_fused=False).activations
        for repeat in ("none", "selective", "half", "full")
    }
    scores = 5 * 16 * 2048**2
    assert found == {
        "none": 16 * (whole + scores) + ends,
        "selective": 16 * whole + ends,
        "half": 16 * (inputs + whole + scores) / 2 + ends,
        "full": 16 * inputs + whole + scores + ends,
    }


def test_fp8_keeps_inputs_of_products_in_half_the_bytes() -> None:
    cut = cut_model()
    plain, small = (count_memory(cut, Layout(), 64, dtype=dtype).activations for dtype in ("bf16", "fp8"))
    # A layer's products read 2 · h, h (attention) and 4 · h elements a token; the head h.
    assert plain - small == 2048 * 1024 * (16 * 7 + 1)


def test_a_pipelines_last_stage_has_its_own_copy_of_a_tied_head() -> None:
    cut = cut_model()
    assert cut.tied == (32000 * 1024, 32000 * 1024)
    assert cut_model("llama-3.1-8b").tied == (0, 0)
    # Of a layer a stage and one micro-batch the last is the fullest, for it has the logits.
    last = count_memory(cut, Layout(pp=16), 1)
    held = cut.layer.dense + cut.last.dense + 32000 * 1024
    assert (last.weights, last.gradients, last.optimizer) == (2 * held, 4 * held, 12 * held)
    alone = cut.first.dense + 16 * cut.layer.dense + cut.last.dense
    assert count_memory(cut, Layout(), 1).weights == pytest.approx(2 * alone)


def test_a_pipeline_keeps_micro_batches_in_flight() -> None:
    cut = cut_model()
    alone = count_memory(cut, Layout(tp=8), 64).activations
    plain = count_memory(cut, Layout(tp=8, pp=4), 64).activations
    chunked = count_memory(cut, Layout(tp=8, pp=4, virtual=2), 64).activations
    # A quarter of the layers, four micro-batches; with chunks 1 + (p-1)/(p·v) as many.
    assert plain == pytest.approx(alone, rel=0.02)
    assert chunked == pytest.approx(plain * 1.375, rel=0.02)


# --- time ------------------------------------------------------------------------------------------------------------
def test_one_device_does_the_products_once() -> None:
    parts = time_parts(Layout(micro_batch=1), batch=1)
    estimator = bind(GPT)
    load = estimator(1, 2048).terms[0][1]
    products = sum(
        (row.forward + row.backward) * value * block.copies
        for block, row, value in estimator.rows(load, "model")
        if row.op.kind == "linear"
    )
    assert parts["products"] == pytest.approx(products / (100e12 * clock_module.SUSTAINED))
    assert [name for name, part in parts.items() if part] == [
        "products", "attention", "memory_bound", "optimizer", "overhead",
    ]  # fmt: skip


def test_the_bubble() -> None:
    """(p-1)/v stages of one micro-batch stand idle."""
    plain, chunked = (time_parts(Layout(pp=4, virtual=virtual, dp=1)) for virtual in (1, 2))
    whole = time_parts(Layout(), batch=1)
    layers = sum(whole[name] for name in ("products", "attention", "memory_bound"))
    head = 3 * 2 * 2048 * 1024 * 32000 / 100e12
    assert plain["bubble"] == pytest.approx(3 * (layers - head) / 4, rel=0.05)
    assert chunked["bubble"] == pytest.approx(plain["bubble"] / 2)
    assert chunked["pipeline_sends"] > plain["pipeline_sends"]


def test_recomputation_costs_a_forward_pass() -> None:
    none, half, full = (time_parts(Layout(recompute=repeat)) for repeat in ("none", "half", "full"))
    assert none["recompute"] == 0
    assert full["recompute"] == 2 * half["recompute"] > 0
    selective = time_parts(Layout(recompute="selective"))
    assert selective["recompute"] == pytest.approx(none["attention"] / 3)


def test_tensor_parallelism_is_paid_in_both_directions() -> None:
    plain = time_parts(Layout(tp=8))
    again = time_parts(Layout(tp=8, recompute="full"))
    # Two sums a layer and direction; recomputation has those of one more forward pass; the two ends one each.
    assert again["tensor_parallel"] / plain["tensor_parallel"] == pytest.approx((3 * 2 * 16 + 4) / (2 * 2 * 16 + 4))
    assert time_parts(Layout(tp=8), overlaps_tensor=True)["tensor_parallel"] < plain["tensor_parallel"]


def test_a_ring_is_cut_into_calls() -> None:
    """Attention over two devices takes what half of it does, in a call for each; hidden keys cost a share of it."""
    whole, cut = (time_parts(Layout(cp=cp, dp=2 // cp)) for cp in (1, 2))
    # The round machine takes all pairs: 1/4 for one's own keys and 1/8 for half of the other's.
    assert cut["attention"] / whole["attention"] == pytest.approx(2 * (1 / 4 + 1 / 8))
    net = find_interconnect("hgx-h200", "h200")
    keys = cut_model().layer.ring / 2
    once = time_message(net, keys, 1, 2)
    assert cut["context_parallel"] == pytest.approx(3 * clock_module.CONTENTION * once * 16 * 64)
    across = time_parts(Layout(tp=8, cp=2))
    inside = time_parts(Layout(tp=4, cp=2))
    assert across["context_parallel"] > 2 * inside["context_parallel"]


def test_a_window_takes_the_blocks_that_it_sees() -> None:
    config = load_config("mistral-7b-v0.1").config
    models = [{**config, "sliding_window": window} for window in (None, 512)]
    whole, some = (time_parts(Layout(), model=model)["attention"] for model in models)
    assert some / whole == pytest.approx(block_pairs(2048, 512) / block_pairs(2048))
    whole, some = (time_parts(Layout(), model=model, is_fused=False)["attention"] for model in models)
    assert some == whole


def test_stages_of_two_nodes_hand_over_between_them() -> None:
    inside, across = (time_parts(Layout(tp=2, pp=pp))["pipeline_sends"] for pp in (4, 8))
    assert across > 3 * inside


def test_gradients_hide_behind_backward() -> None:
    open_, hidden = (time_parts(Layout(dp=64), overlaps_gradients=overlaps) for overlaps in (False, True))
    assert open_["data_parallel"] > hidden["data_parallel"] > 0
    # An all-reduce of fp32 against a reduce-scatter of fp32 and an all-gather of bf16: 8 bytes against 6.
    spread = time_parts(Layout(dp=64, zero=1), overlaps_gradients=False)
    assert spread["data_parallel"] / open_["data_parallel"] == pytest.approx(6 / 8, rel=0.1)
    # ZeRO 2 has the same reduction, hidden layer by layer, and gathers the new weights as ZeRO 1 does.
    both = time_parts(Layout(dp=64, zero=2), overlaps_gradients=False)
    assert spread["data_parallel"] / 4 < both["data_parallel"] < spread["data_parallel"]


def test_zero_3_gathers_in_every_micro_batch() -> None:
    once, twice = (time_parts(Layout(dp=16, zero=3, micro_batch=size)) for size in (4, 2))
    assert twice["data_parallel"] == pytest.approx(2 * once["data_parallel"])


def test_experts_are_exchanged() -> None:
    inside, across = (time_parts(Layout(dp=64, ep=ep), model="mixtral-8x7b") for ep in (8, 1))
    assert inside["expert_parallel"] > 0 == across["expert_parallel"]
    hidden = time_parts(Layout(dp=64, ep=8), model="mixtral-8x7b", overlaps_experts=True)
    assert hidden["expert_parallel"] < inside["expert_parallel"]


def test_eager_kernels_move_more() -> None:
    fused, eager = (time_parts(Layout(), is_compiled=is_compiled) for is_compiled in (True, False))
    assert eager["memory_bound"] == pytest.approx(clock_module.EAGER_BYTES * fused["memory_bound"])
    assert time_parts(Layout(), is_fused=False)["attention"] > fused["attention"]


def test_error_is_the_machines_and_widens() -> None:
    net = find_interconnect("hgx-h200", "h200")
    clock = Clock(cut_model(), "h200", net, 64)
    alone, many = clock.time(Layout()), clock.time(Layout(tp=8, dp=8))
    assert alone.below == alone.above == pytest.approx(0.1, rel=0.01)
    assert many.above > many.below > alone.above
    assert many.low < many.seconds < many.high


# --- rules -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        (Layout(dp=4, tp=2), None),
        (Layout(dp=4), "devices"),
        (Layout(tp=3, dp=1), "devices"),
        (Layout(pp=8, virtual=3), "layers"),
        (Layout(dp=8, ep=2), "experts"),
        (Layout(dp=8, micro_batch=3), "batch"),
        (Layout(pp=8, virtual=2, micro_batch=16), "virtual"),
        (Layout(tp=8, zero=1), "zero"),
        (Layout(cp=8, zero=1), None),
    ],
)
def test_rules(layout: Layout, rule: str | None) -> None:
    found = find_problem(layout, cut_model(), 8, 64)
    assert (found and found[0]) == rule


def test_the_search_lists_what_is_fixed() -> None:
    layouts = list(list_layouts(cut_model(), 64, 64, 8, {"tp": (2, 4), "zero": (1,), "recompute": ("none",)}))
    assert {layout.tp for layout in layouts} == {2, 4}
    assert {layout.zero for layout in layouts} == {1}
    assert {layout.recompute for layout in layouts} == {"none"}
    assert all(layout.devices == 64 for layout in layouts)
    assert len(layouts) == len(set(layouts))


# --- the plan --------------------------------------------------------------------------------------------------------
def make_plan(**changes: Any) -> Plan:
    given: dict[str, Any] = {"tokens": "1B", "device": "h200", "gpus": 64, "seq_len": 2048, "global_batch": 64}
    return plan(GPT, **given | changes)


def test_plan() -> None:
    found = make_plan(price=2.0, top=3)
    assert len(found.best) == 3
    assert [entry.step.seconds for entry in found.best] == sorted(entry.step.seconds for entry in found.best)
    best = found.best[0]
    steps = 10**9 / (64 * 2048)
    assert best.gpu_hours == pytest.approx(steps * best.step.seconds * 64 / 3600)
    assert best.usd == pytest.approx(2 * best.gpu_hours)
    assert best.kwh == pytest.approx(0.7 * best.gpu_hours)
    assert best.days == pytest.approx(best.gpu_hours / 64 / 24)
    assert best.tokens_per_s == pytest.approx(64 * 2048 / best.step.seconds)
    flops = bind(GPT)(64, 2048).total
    assert best.mfu == pytest.approx(flops / best.step.seconds / (64 * 989.4e12))
    assert found.layouts == found.fitting + sum(loser.layouts for loser in found.losers if loser.reason == "memory")
    assert sum(loser.layouts for loser in found.losers) == found.layouts - 1
    assert all(loser.nearest.step.seconds >= best.step.seconds for loser in found.losers if loser.reason != "memory")
    front = found.find_front()
    assert front[0][0] == best.step.seconds
    assert [size for _, size, _ in front] == sorted((size for _, size, _ in front), reverse=True)
    assert front[0][2] == best.layout


def test_plan_as_json() -> None:
    found = make_plan(top=1).to_dict()
    entry = found["best"][0]
    assert set(entry["step_time_s"]) == {"low", "mid", "high"}
    assert sum(entry["breakdown"].values()) == pytest.approx(entry["step_time_s"]["mid"])
    assert entry["memory_bytes"]["total"] == sum(entry["memory_bytes"].values()) - entry["memory_bytes"]["total"]
    assert found["interconnect"]["id"] == "hgx-h200"
    assert found["evidence"]["device"] == "measured"
    assert found["price"]["source"] != "given"


def test_hfu_counts_what_is_computed_again() -> None:
    plain, again = (
        make_plan(recompute=repeat, tp=1, pp=1, zero=0, micro_batch=1).best[0] for repeat in ("none", "full")
    )
    assert again.mfu < plain.mfu
    assert again.hfu * again.step.seconds > plain.hfu * plain.step.seconds
    cores = make_plan(recompute="selective", tp=1, pp=1, zero=0, micro_batch=1).best[0]
    executed = [entry.hfu * entry.step.seconds for entry in (plain, cores, again)]
    assert executed == sorted(executed)
    assert executed[1] > executed[0]


def test_defaults_are_said() -> None:
    found = plan(GPT, tokens=10**9, device="h200", gpus=24, tp=1)
    assert (found.seq, found.global_batch) == (4096, 960)
    assert any("4096 tokens taken" in note for note in found.notes)
    assert any("960 sequences" in note for note in found.notes)


@pytest.mark.parametrize(
    ("gpus", "tokens", "batch"),
    [(1, 4096, 1024), (12, 4096, 960), (64, 640, 6144), (2048, 4096, 1024), (8, 131072, 32), (8, 10**7, 1)],
)
def test_the_batch_taken_is_about_4m_tokens_and_divides_well(gpus: int, tokens: int, batch: int) -> None:
    assert choose_batch(gpus, tokens) == batch


def test_one_device_needs_no_interconnect() -> None:
    found = make_plan(device="l4", gpus=1)
    assert found.interconnect.id == "none"
    assert {entry.layout.devices for entry in found.best} == {1}
    assert not any("collectives" in note for note in found.notes)
    assert {"tensor_parallel", "data_parallel", "bubble"}.isdisjoint(found.best[0].to_dict()["breakdown"])
    with pytest.raises(FlopcalcError, match="no interconnect is known for NVIDIA L4"):
        make_plan(device="l4", gpus=2)


@pytest.mark.parametrize(("gpus", "is_noted"), [(4, False), (12, True), (16, False)])
def test_a_part_of_a_node_is_said(gpus: int, is_noted: bool) -> None:
    notes = make_plan(gpus=gpus, global_batch=96, virtual=1, zero=1, micro_batch=1).notes
    assert any("no whole number of nodes of 8" in note for note in notes) is is_noted


def test_more_devices_are_never_slower() -> None:
    steps = [make_plan(gpus=gpus, virtual=1, micro_batch=(1, 2, 4)).best[0].step.seconds for gpus in (1, 2, 4, 8, 16)]
    assert steps == sorted(steps, reverse=True)


def test_the_error_of_a_default_length_says_that_it_was_taken() -> None:
    with pytest.raises(FlopcalcError, match="no length was given, so 4096 tokens were taken"):
        plan("gpt2", tokens="1B", device="h200", gpus=8)


def test_a_faster_layout_that_does_not_fit_is_named() -> None:
    found = plan("llama-3.1-8b", tokens="1B", device="a100-sxm-80gb", gpus=8, seq_len=2048, global_batch=64)
    memory = next(loser for loser in found.losers if loser.reason == "memory")
    assert "more than" in memory.text
    assert memory.nearest.memory.total > 75 * 2**30


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "h2000"}, "device 'h2000' unknown"),
        ({"interconnect": "token-ring"}, "interconnect 'token-ring' unknown"),
        ({"dtype": "bf17"}, "dtype 'bf17' unknown"),
        ({"tokens": 0}, "tokens must be a number from 1"),
        ({"tokens": "many"}, "'many' is no number; write 2000000000 or 2T"),
        ({"dtype": "fp32"}, "a plan is for training in bf16, fp16, fp8, not fp32"),
        ({"gpus": 0}, "gpus must be at least 1"),
        ({"gpus": 10**7}, "gpus must be at most 1,000,000, not 10,000,000"),
        ({"gpus": 4096, "global_batch": 1}, "does not divide a global batch of 1 sequences; change it, --gpus or"),
        ({"global_batch": 0}, "global batch must be at least 1"),
        ({"price": 0}, "price 0 is no price of a GPU-hour: give a positive number of USD, or leave --price out"),
        ({"price": -1.5}, "price -1.5 is no price"),
        ({"price": float("nan")}, "price nan is no price"),
        ({"tp": 3}, "tp 3 does not divide 64 devices"),
        ({"tp": 32}, "tp 32 does not divide the model's 16 attention heads"),
        ({"pp": 32}, "pp 32 · 1 virtual stages are more than the model's 16 layers"),
        ({"ep": 2}, "ep 2: the model has no experts"),
        ({"dp": 5}, "dp 5 does not divide 64 devices"),
        ({"micro_batch": 3}, "3 does not divide a global batch of 64 sequences"),
        ({"zero": 4}, "zero must be 0, 1, 2 or 3, not 4"),
        ({"recompute": "some"}, "recompute 'some' unknown; known: none, selective, half, full"),
        ({"tp": []}, "tp: no value given"),
        ({"tp": 2.0}, "tp must be a whole number of at least 1, not 2.0"),
        ({"device": "a100-sxm-80gb", "dtype": "fp8"}, "has no known fp8 peak: plan with --dtype bf16 or fp16"),
        ({"tp": 8, "dp": 16}, "no layout divides"),
        ({"tp": 2, "virtual": 4, "pp": 1}, "4 virtual stages need a pipeline: pp of 2 or more, not 1"),
        ({"virtual": 2, "pp": 8, "dp": 8, "micro_batch": 8}, "need micro-batches in multiples of pp 8, not 1"),
        ({"recipe": {"freeze": ["*"]}}, "nothing trains under this recipe"),
    ],
)
def test_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FlopcalcError) as error:
        make_plan(**changes)
    assert words in str(error.value)


def test_a_model_that_fits_nowhere_says_what_is_missing() -> None:
    with pytest.raises(FlopcalcError) as error:
        plan("llama-3.1-405b", tokens="1T", device="a100-sxm-80gb", gpus=8, seq_len=2048, global_batch=64, zero=0)
    text = str(error.value)
    assert "fits on 8 x NVIDIA A100-SXM4-80GB in none of" in text
    assert "GiB more than" in text
    assert "leave --zero free; more devices" in text
    assert text.endswith("a device with more memory, or LoRA")
    lora = {"lora": {"r": 8, "targets": ["q_proj"]}}
    with pytest.raises(FlopcalcError, match=r"a device with more memory$"):
        plan("llama-3.1-405b", tokens="1T", device="h200", gpus=1, seq_len=2048, global_batch=8, recipe=lora)


def test_prices_are_of_known_devices_and_dated() -> None:
    for entry in load_toml(os.path.join(find_data_dir(), "prices.toml"))["price"]:
        device = find_device(entry["device"])
        assert device.id == entry["device"]
        rate = find_price(device, None)
        assert rate is not None
        assert rate.usd_per_gpu_hour > 0
        assert rate.source.startswith("20")
    assert find_price(find_device("t4"), None) is None
    assert find_price(find_device("t4"), 0.5) == (0.5, "given")


def test_own_price(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    path.write_text('[[price]]\ndevice = "t4"\nusd_per_gpu_hour = 0.4\ndate = "2026-01"\nsource = "me"\n')
    assert find_price(find_device("t4"), None) == (0.4, "2026-01: me")
    # One's own beats a newer shipped one, and a device may be named by an alias.
    path.write_text('[[price]]\ndevice = "h200"\nusd_per_gpu_hour = 2\ndate = "2020-01"\nsource = "me"\n')
    assert find_price(find_device("h200"), None) == (2.0, "2020-01: me")
    path.write_text('[[price]]\ndevice = "t5"\nusd_per_gpu_hour = 2\ndate = "2020-01"\nsource = "me"\n')
    with pytest.raises(SpecError, match=r"prices.toml: device 't5' unknown"):
        find_price(find_device("h200"), None)
    path.write_text('[[price]]\ndevice = "t4"\nusd_per_gpu_hour = -2\ndate = "2020-01"\nsource = "me"\n')
    with pytest.raises(SpecError, match="usd_per_gpu_hour must be positive"):
        find_price(find_device("t4"), None)
    path.write_text("price = 3\n")
    with pytest.raises(SpecError, match=r"price 3: .* is wrong or missing"):
        find_price(find_device("t4"), None)
    path.write_text('[[price]]\ndevice = "t4"\nusd_per_gpu_hour = 0.4\n')
    with pytest.raises(SpecError, match="'date' is wrong or missing"):
        find_price(find_device("t4"), None)


def test_energy_needs_a_known_power() -> None:
    device = find_device("a100-sxm-80gb")
    assert count_energy(device, 1000) == 400
    assert count_energy(device._replace(tdp_w=None), 1000) is None


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(), "dp1 zero0 mb1"),
        (Layout(2, 4, 8, 3, 2, 4, 1, 2, "full"), "tp4 pp8 v3 cp2 ep4 dp2 zero1 mb2 recompute full"),
    ],
)
def test_layouts_in_words(layout: Layout, text: str) -> None:
    assert str(layout) == text


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("2T", 2 * 10**12), ("15.6T", 15_600_000_000_000), ("300b", 3 * 10**11), ("1_000", 1000), (7, 7),
        ("1e12", 10**12), (2e12, 2 * 10**12),
    ],
)  # fmt: skip
def test_tokens(text: str | float, tokens: int) -> None:
    assert parse_tokens(text) == tokens


def test_what_is_frozen_has_no_way_back() -> None:
    """A frozen tower before the language model: neither gradients nor kept activations."""
    for freeze, flows in ((["vision"], False), ([], True)):
        estimator = bind("qwen2-vl-2b", recipe={"freeze": freeze})
        load = estimator(1, 1024, image_grid_thw=[(1, 36, 52)]).terms[0][1]
        first = make_cut(estimator, load).first
        tower = [linear for linear in first.linears if "visual.blocks" in linear.module]
        assert tower
        assert all(linear.has_wgrad is flows for linear in tower)
        assert all(core.has_backward is flows for core in first.cores)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (1, "1 token"), (2, "2 tokens"), (2 * 10**12, "2.00T tokens"), (999 * 10**12, "999.00T tokens"),
        (10**15, "1,000T tokens"), (10**18, "1,000,000T tokens"),
    ],
)  # fmt: skip
def test_tokens_in_words(tokens: int, text: str) -> None:
    assert format_tokens(tokens) == text


@pytest.mark.parametrize(
    ("tokens", "taken", "note"),
    [
        (1, 64 * 2048, "1 token given, less than one step: one whole step, 131.07K tokens, taken"),
        ("100k", 64 * 2048, "100.00K tokens given, less than one step: one whole step, 131.07K tokens, taken"),
        (64 * 2048, 64 * 2048, None),
        (10**6, 10**6, None),
    ],
)
def test_at_least_one_step_is_planned(tokens: int | str, taken: int, note: str | None) -> None:
    found = make_plan(tokens=tokens, tp=1, pp=1, zero=0, micro_batch=1)
    assert found.tokens == taken
    assert [text for text in found.notes if "less than one step" in text] == ([] if note is None else [note])
    best = found.best[0]
    assert best.days == pytest.approx(taken / (64 * 2048) * best.step.seconds / 86400)


@pytest.mark.parametrize(
    ("model", "is_wider"),
    [("mamba-2.8b", True), ("deepseek-v3.2", True), ("llama-3.1-8b", False), ("mixtral-8x7b", False)],
)
def test_scans_are_said_and_widen(model: str, is_wider: bool) -> None:
    fixed: dict[str, Any] = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": 3, "micro_batch": 1, "recompute": "full"}
    found = plan(model, tokens="1B", device="h200", gpus=256, seq_len=2048, global_batch=256, **fixed)
    assert len([note for note in found.notes if "scans or selections of keys" in note]) == is_wider
    step = Clock(cut_model(model), "h200", find_interconnect("hgx-h200", "h200"), 256).time(found.best[0].layout)
    times = SCAN_WIDTH if is_wider else 1.0
    assert found.best[0].step == (step.parts, times * step.below, times * step.above)


@pytest.mark.parametrize(
    ("model", "seq", "note"),
    [
        ("qwen2.5-vl-7b", 2048, "no image given, so the vision tower is not counted; add one with --image 1024x768"),
        ("llama-3.1-8b", 262144, "length 262144 is beyond max_position_embeddings = 131072"),
    ],
)
def test_what_an_estimate_notes_a_plan_notes(model: str, seq: int, note: str) -> None:
    found = plan(
        model, tokens="1B", device="h200", gpus=64, seq_len=seq, global_batch=64, pp=1, zero=3, recompute="full"
    )
    assert found.notes.count(note) == 1


def test_a_plan_has_no_conventions() -> None:
    """What a recipe's own recomputation would add is no note of a plan, which decides on it."""
    plain, again = (make_plan(recipe={"recompute": repeat}, tp=1, pp=1).notes for repeat in ("none", "full"))
    assert plain == again


def test_a_difference_that_rounds_to_nothing_is_none() -> None:
    """On one device of round numbers a larger micro-batch takes as long, whether it fits or not."""
    found = plan("llama-3.2-1b", tokens="1B", device="h200", gpus=1, seq_len=2048, global_batch=64, recompute="none")
    losers = {str(loser.nearest.layout): loser.text for loser in found.losers}
    assert losers["dp1 zero0 mb2"] == "as fast"
    assert losers["dp1 zero0 mb32"].endswith("; would be as fast")


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = make_plan(tp=1, pp=1)
    found.plot(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8").startswith("<?xml")
    found.plot(str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FlopcalcError, match=r"^plot '.*': give a file name that ends in .png, .svg or .pdf$"):
        found.plot(tmp_path / "plan")


@pytest.mark.parametrize(("tokens", "unit"), [("1B", "USD"), ("100T", "million USD")])
def test_money_beside_a_plot(tokens: str, unit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # letters, not their outlines
    make_plan(tokens=tokens, price=2.0, tp=1, pp=1).plot(tmp_path / "plan.svg")
    assert re.findall(r">((?:million )?USD)<", (tmp_path / "plan.svg").read_text(encoding="utf-8")) == [unit]


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = make_plan(tp=1, pp=1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FlopcalcError, match=r"^a plot needs matplotlib: pip install 'flopcalc\[plot\]'$"):
        found.plot(tmp_path / "plan.svg")
    assert list(tmp_path.iterdir()) == []


# --- the page --------------------------------------------------------------------------------------------------------
PAGE = " ".join((ROOT / "docs" / "planning.md").read_text(encoding="utf-8").split())
RUNS = json.loads((ROOT / "benchmarks" / "results" / "published_runs.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize(
    ("words", "runs", "device"),
    [
        ("**ZeRO-3 in the Megatron paper** (six runs, N to N %)", "megatron21-t2-zero-3", ""),
        ("**torchtitan on H100** (N to N %)", "torchtitan", "h100"),
        ("On A100 the error is N to N %", "torchtitan", "a100"),
        ("on H200, in fp8 alone, N and N %", "torchtitan", "h200"),
        ("**MPT on H100** (N to N %)", "mpt", "h100"),
        ("On A100 at 2,048 tokens: N to N %", "mpt.*-s2048", "a100"),
        ("**Pythia** (N, N %)", "pythia", ""),
        ("**Experts** on B200 (N, N %)", "nemo.*(DeepSeek|Qwen3)", "b200"),
        ("Qwen3 with the plain all-to-all (N %)", "qwen3-235B-h100-256-d", ""),
        ("or FSDP (N %)", "qwen3-235B-h100-256-c", ""),
        ("NeMo's Llama 3 8B of 2024 (N %)", "nemo-24.07-LLAMA3-8B", ""),
        ("Nemotron-4 15B on many devices (N to N %)", "nemotron4-15B", ""),
        ("**BLOOM** (N %)", "bloom", ""),
    ],
)
def test_the_pages_misses_are_the_runs(words: str, runs: str, device: str) -> None:
    told = re.search(re.escape(words).replace("N\\ ", r"([−+][\d.]+)\ ").replace("N,", r"([−+][\d.]+),"), PAGE)
    assert told is not None
    errors = [100 * row["error"] for row in RUNS if re.match(runs, row["id"]) and device in row["devices"]]
    # The file keeps four digits, the page one behind the point: both rounded from the same number.
    ends = sorted({min(errors), max(errors)})
    assert sorted(float(word.replace("−", "-")) for word in told.groups()) == pytest.approx(ends, abs=0.06)


def test_the_pages_counts_are_the_runs() -> None:
    memory = {row["id"]: row["memory_gib"] for row in RUNS}
    for words in (
        f"of {len(RUNS)} published runs",
        f"{sum(row['fits'] for row in RUNS)} of the {len(RUNS)} fit on paper",
        f"Llama 3 comes out at {memory['llama3-405B-8192-s8192']:.0f} GiB of 80",
        f"DeepSeek-V3 at {memory['deepseek-v3-h800-2048']:.0f} (",
        f"divided by {clock_module.SUSTAINED}",
        f"gives back {clock_module.CONTENTION:.0%}".replace("%", " %"),
        f"{clock_module.OVERHEAD:.0%} on everything".replace("%", " %"),
    ):
        assert words in PAGE
    assert len([row for row in RUNS if "zero-3" in row["id"]]) == 6
