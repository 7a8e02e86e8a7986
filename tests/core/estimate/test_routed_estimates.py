"""Routing in estimates: executed FLOPs with the rows that routers dealt on an H200, and what is printed and refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from places import ROOT

from flopcalc import FlopcalcError, bind, estimate_flops, predict
from flopcalc.core.model.ops import list_routed
from flopcalc.hardware.routing import KEY
from lab.blind.rounds import NUMBERS, load_round

RESULTS = ROOT / "benchmarks" / "results"
HARDWARE: dict[str, Any] = {"convention": "hardware", "device": "h200"}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def list_counted() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, config and record of every counted step whose rows per expert were kept; their routers are random."""
    first = load("executed_steps")
    for case in json.loads((RESULTS / "expert_routes.json").read_text())["cases"]:
        own = first.get_config if case["round"] == 0 else load_round(case["round"]).get_counted_config
        yield case["name"], own(case["name"]), case
    for number in NUMBERS[2:]:
        blind = load_round(number)
        for case in json.loads((RESULTS / blind.name_result("executed")).read_text())["cases"]:
            if case.get(KEY):
                yield case["name"], blind.get_counted_config(case["name"]), case


def test_counted_steps_are_within_a_percent_with_their_rows() -> None:
    errors = {}
    for name, config, case in list_counted():
        batch, seq = map(int, name.split()[1].split("x"))
        counted = estimate_flops(config, batch_size=batch, seq_len=seq, routing=case[KEY], **HARDWARE).total
        errors[name] = abs(counted / case["executed_flops"] - 1)
    assert len(errors) == 46
    assert max(errors.values()) < 0.0085
    assert sum(error < 0.003 for error in errors.values()) == 38


CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "moe_intermediate_size": 128,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}  # fmt: skip
SIZES: dict[str, Any] = {"batch_size": 1, "seq_len": 400}  # 800 rows for 8 experts: even are 100 of each


def count(**given: Any) -> int:
    return estimate_flops(CONFIG, **SIZES, **HARDWARE, **given).total


def test_layers_with_experts_are_listed() -> None:
    assert list_routed(bind(CONFIG).stages) == {("model.layers", layer): 8 for layer in (1, 2, 3)}
    assert list_routed(bind("llama-3.2-1b").stages) == {}


def test_even_is_the_default_and_rows_in_proportion_are_the_same() -> None:
    assert count() == count(routing="even") == count(routing=[1] * 8) == count(routing=[[7] * 8] * 3)


def test_rows_of_each_layer_are_averaged() -> None:
    """All rows on one expert fill 7 tiles of 128 where even ones fill 8; padding of depth differs too."""
    one, even = [800, *[0] * 7], [100] * 8
    mixed, single = count(routing=[one, even, even]), count(routing=one)
    assert count() - mixed == pytest.approx((count() - single) / 3, abs=3)
    assert count(routing=[even, one, even]) == mixed
    # One tile less forward and for the input's gradient, with outputs in tiles of 128; steps of 64 rows as the depth of
    # a weight's gradient, with both widths in tiles of 256.
    tiles, depth = 2 * 2 * 128 * (256 * 256 + 256 * 128), 2 * (8 * 128 - 832) * (256 * 256 + 256 * 256)
    assert count() - single == 3 * (tiles + depth)


def test_a_file_of_rows_is_read(tmp_path: Any) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({KEY: [[800, *[0] * 7]] * 3}))
    assert count(routing=path) == count(routing=str(path)) == count(routing=[800, *[0] * 7])


def test_other_conventions_need_the_same_whatever_the_routing() -> None:
    for convention in ("model", "full"):
        given: dict[str, Any] = {**SIZES, "convention": convention}
        assert estimate_flops(CONFIG, **given, routing="spread:0.9").total == estimate_flops(CONFIG, **given).total


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        ("llama-3.2-1b", "spread:0.4", "llama-3.2-1b has no experts that a router chooses: leave routing out"),
        (CONFIG, [1] * 7, "routing has rows for 7 experts; model.layers.1 has 8"),
        (CONFIG, [[1] * 8] * 4, "routing has rows for 4 layers; config has 3 with experts"),
    ],
)
def test_what_does_not_fit_a_model_is_refused(model: Any, given: Any, said: str) -> None:
    with pytest.raises(FlopcalcError) as raised:
        estimate_flops(model, seq_len=8, routing=given)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, "even"),
        ({"routing": "spread:0.4"}, "spread:0.4"),
        ({"routing": [[1] * 8] * 3}, "rows of 8 experts in 3 layers"),
    ],
)
def test_results_say_the_routing(given: dict[str, Any], shown: str) -> None:
    estimate = estimate_flops(CONFIG, **SIZES, **given)
    assert estimate.to_dict()["routing"] == shown
    assert estimate.describe().endswith(f", routing {shown}")
    prediction = predict(CONFIG, **SIZES, device="h200", memory=False, advise=False, **given)
    assert prediction.to_dict()["routing"] == shown
    assert estimate_flops("llama-3.2-1b", seq_len=8).to_dict()["routing"] is None


def test_an_uneven_router_takes_longer() -> None:
    given: dict[str, Any] = {"device": "h200", "batch_size": 2, "seq_len": 2048, "memory": False, "advise": False}
    even, spread = (predict("qwen3-30b-a3b", **given, routing=each).device_s for each in ("even", "spread:0.4"))
    assert even < spread
    rows = [[256 + 128 * (-1) ** i for i in range(128)]]  # three and one tiles of 128 rows, not two each
    assert predict("qwen3-30b-a3b", **given, routing=rows * 48).device_s == pytest.approx(even, rel=0.1)
