"""How unevenly random routers deal rows out: the model against rows that HF's routers dealt on an H200."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import statistics
import sys
from types import ModuleType
from typing import Any

import pytest
from places import ROOT

from flopcalc import bind
from flopcalc.core.estimate import routing
from flopcalc.core.estimate.routing import ROUTERS, Router, describe, find_both, list_deals, weigh
from flopcalc.core.workload.workload import Workload
from flopcalc.hardware import tiles
from lab.blind.rounds import load_round

RESULTS = ROOT / "benchmarks" / "results"
HARDWARE: dict[str, Any] = {"convention": "hardware", "device": "h200", "attention_kernel": "auto"}
# Steps whose FLOPs were counted: how far the count is off, in percent, with a spread of 0.4 and with the model.
COUNTED = {
    "olmoe-2048 3x1500": (-0.83, 0.15),
    "mixtral-1536 2x1300": (0.04, -0.14),
    "qwen3-moe-1024 1x900": (3.78, 0.15),
    "deepseek-v2-1280 2x1500": (-0.11, -0.45),
    "olmoe-1280 2x1450": (0.43, 0.56),
    "mixtral-2560 2x1100": (-0.32, -0.52),
    "qwen2-moe-1792 3x900": (-1.87, 0.12),
    "deepseek-v3-1536 1x1700": (0.26, 0.75),
    "qwen3-moe-1792 4x1300": (-0.67, -0.03),
    "granite-3.1-1b-a400m 3x1100": (-0.02, -0.05),
    "mixtral-3072 2x1250": (1.25, 0.83),
    "qwen1.5-moe-a2.7b 2x1450": (-3.41, -0.03),
    "deepseek-v2-lite 3x1250": (0.56, 0.36),
    "mixtral-1792 4x1150": (-0.17, -0.32),
    "granitemoe-1792 2x1700": (-1.5, -0.72),
    "qwen3-30b-a3b 2x1150": (-3.19, -0.31),
    "granite-3.0-3b-a800m 3x1150": (-0.16, -0.64),
    "mixtral-8x7b 2x1350": (-0.7, -1.19),
}
# Off by more than 1 % of the step: two layers of 8 experts, whose draw alone moves the count by 1.3 %.
BEYOND = {"mixtral-8x7b 2x1350"}


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


def list_counted() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, config and record of every counted step with experts."""
    found = []
    first = load("executed_steps")
    for case in json.loads((RESULTS / "expert_routes.json").read_text())["cases"]:
        if case["round"] == 0:
            found.append((case["name"], first.get_config(case["name"]), case))
            continue
        found.append((case["name"], load_round(case["round"]).get_counted_config(case["name"]), case))
    for number in (3, 4):
        blind = load_round(number)
        for case in json.loads((RESULTS / f"blind_executed_{number}.json").read_text())["cases"]:
            if case.get("rows_per_expert"):
                found.append((case["name"], blind.get_counted_config(case["name"]), case))
    return found


def list_timed() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The same of steps that were timed, with the rows of their routers alone."""
    script = load("expert_steps")
    with gzip.open(RESULTS / "expert_cases_5.17.json.gz", "rt") as file:
        cases = json.load(file)["cases"]
    return [
        (f"{case['model']} {case['batch']}x{case['seq']}", script.get_config(case["model"]), case) for case in cases
    ]


def read_size(name: str) -> tuple[int, int]:
    batch, seq = name.split()[1].split("x")
    return int(batch), int(seq)


def count(config: dict[str, Any], batch: int, seq: int, rows: list[list[int]]) -> tuple[int, int]:
    """FLOPs of a step as expected, and with the rows that each expert got."""
    estimator = bind(config, **HARDWARE)
    total = int(estimator(batch, seq).total)
    products = [each for each in estimator.rows(Workload(batch, seq), "hardware") if each.row.op.copies > 1]
    expected = sum(each.flops.total * each.block.copies for each in products)
    sizes = dict.fromkeys((each.row.op.n_out, each.row.op.n_in) for each in products)
    dealt = sum(sum(tiles.count_dealt(layer, n, k).values()) for layer in rows for n, k in sizes)
    return total, total - expected + dealt


def test_counted_steps_are_within_a_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = list_counted()
    assert {name for name, *_ in cases} == set(COUNTED)
    for name, config, case in cases:
        batch, seq = read_size(name)
        executed = case["executed_flops"]
        after = 100 * (int(bind(config, **HARDWARE)(batch, seq).total) / executed - 1)
        with monkeypatch.context() as patch:
            patch.setattr("flopcalc.core.estimate.routing.describe", lambda *_: None)
            before = 100 * (int(bind(config, **HARDWARE)(batch, seq).total) / executed - 1)
        assert (before, after) == pytest.approx(COUNTED[name], abs=0.02), name
        assert (abs(after) < 1) == (name not in BEYOND)


@pytest.mark.parametrize(("name", "config", "case"), list_timed(), ids=lambda value: str(value)[:24])
def test_steps_are_as_with_the_rows_that_were_dealt(name: str, config: dict[str, Any], case: dict[str, Any]) -> None:
    expected, dealt = count(config, *read_size(name), case["rows_per_expert"])
    assert expected == pytest.approx(dealt, rel=0.01)


def test_spreads_are_those_of_the_routers() -> None:
    """Standard deviation of rows over their mean, layer by layer: 31 steps, from 0.06 to 2.5."""
    ratios = []
    for name, config, case in (*list_counted(), *list_timed()):
        batch, seq = read_size(name)
        estimator = bind(config)
        model = describe(estimator.source.config, estimator.stages)
        assert model is not None
        deals = [deal for deal in list_deals(model, (seq,) * batch) if deal is not None]
        for deal, rows in zip(deals, case["rows_per_expert"], strict=True):
            ratios.append(deal.spread / (statistics.pstdev(rows) / statistics.fmean(rows)))
    assert len(ratios) == 169
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.05)
    assert sum(0.67 < ratio < 1.5 for ratio in ratios) > 0.85 * len(ratios)


@pytest.mark.parametrize(
    ("share", "correlation", "both"),
    [(0.5, 0.0, 0.25), (0.5, 0.5, 1 / 3), (0.5, 1.0, 0.5), (0.125, 0.0, 1 / 64), (0.125, 1.0, 0.125)],
)
def test_how_often_two_tokens_choose_an_expert(share: float, correlation: float, both: float) -> None:
    assert find_both(share, correlation) == pytest.approx(both, rel=1e-3)


@pytest.mark.parametrize(
    ("router", "config", "squares"),
    [(Router("one"), {}, 2.0), (Router("softmax"), {}, 0.5), (Router("softmax", is_normal=False), {}, 2 / 64),
     (Router("softmax", has_key=True), {"norm_topk_prob": False}, 2 / 64), (Router("sigmoid", scale=2.0), {}, 2.0),
     (Router("sigmoid"), {"routed_scaling_factor": 3}, 4.5)],
)  # fmt: skip
def test_weights_of_chosen_experts(router: Router, config: dict[str, object], squares: float) -> None:
    assert weigh(router, config, 8, 2, 0.0) == pytest.approx(squares)


@pytest.mark.parametrize(
    ("variance", "keys", "squares"),
    [(0.0, 200, 1 / 200), (1.0, 20, 0.109), (1.0, 200, 0.0131), (2.7, 20, 0.218), (2.7, 200, 0.0426),
     (6.0, 20, 0.367), (6.0, 200, 0.144), (16.0, 20, 0.565), (16.0, 200, 0.354), (60.0, 20, 0.765),
     (60.0, 200, 0.671)],
)  # fmt: skip
def test_squared_attention_weights_are_about_those_of_random_scores(variance: float, keys: int, squares: float) -> None:
    """The last column was drawn: the mean over some thousand softmaxes of normal scores."""
    assert routing._concentrate(variance, keys) == pytest.approx(squares, rel=0.3)


def test_independent_tokens_spread_as_by_chance() -> None:
    """No correlation: rows differ as a binomial's, and no expert is left out."""
    apart = ((0.0,) * 8,) * 8
    deal = routing.Deal(64, 8, apart, apart, 2, 1024)
    assert deal.spread == pytest.approx(256**-0.5)
    assert deal.count_steps(64, 2048) == pytest.approx(4.5, abs=0.05)
    assert deal.count_steps(4096, 2048) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("seq", [1, 2, 17, 129])
def test_short_sequences_have_a_count(seq: int) -> None:
    """A token reaches 8 of 128 experts; of few tokens, no expert gets more than a tile."""
    estimator = bind("qwen3-30b-a3b")
    model = describe(estimator.source.config, estimator.stages)
    assert model is not None
    steps = routing.count_steps(model, (0, 1), (seq,), seq, 128)
    assert 8 / 128 <= steps * 1.05 <= min(1, seq * 8 / 128) * 1.1


def test_more_sequences_are_dealt_out_more_evenly() -> None:
    estimator = bind("qwen3-30b-a3b")
    model = describe(estimator.source.config, estimator.stages)
    assert model is not None
    spreads = [list_deals(model, (1024,) * batch)[3].spread for batch in (1, 2, 4, 16)]  # type: ignore[union-attr]
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[0] == pytest.approx(2 * spreads[2], rel=0.02)
    # Documents of several lengths are as uneven as fewer sequences of one length.
    mixed = list_deals(model, (1500, 400, 148))[3]
    assert mixed is not None
    assert mixed.batch == 2


def test_routers_that_are_not_known_keep_the_plain_spread() -> None:
    assert "ernie4_5_moe" not in ROUTERS
    for name in ("llama-3.2-1b", "qwen3-vl-30b-a3b", "qwen3-next-80b-a3b"):
        estimator = bind(name)
        assert describe(estimator.source.config, estimator.stages) is None


@pytest.mark.parametrize(
    ("preset", "changes"),
    [("qwen3-30b-a3b", {"initializer_range": value}) for value in (0, 1e-200, 1e-3, 1e3, 1e200, 10**400)]
    + [("mixtral-8x7b", {"num_local_experts": many, "num_experts_per_tok": many}) for many in (1, 2, 8)]
    + [("deepseek-v3", {"routed_scaling_factor": value}) for value in (0, 1e300)]
    + [("granite-3.1-1b-a400m", {f"{name}_multiplier": 0.0}) for name in ("embedding", "attention", "residual")],
    ids=str,
)
def test_odd_configs_have_a_count(preset: str, changes: dict[str, Any]) -> None:
    config = {**bind(preset).source.config, **changes}
    executed = int(bind(config, **HARDWARE)(2, 64).total)
    assert executed >= int(bind(config, **{**HARDWARE, "convention": "full"})(2, 64).total)


def test_experts_that_are_all_chosen_get_every_token() -> None:
    config = {**bind("mixtral-8x7b").source.config, "num_experts_per_tok": 8}
    estimator = bind(config, **HARDWARE)
    expected, dealt = count(config, 2, 700, [[1400] * 8] * 32)
    assert expected == dealt == int(estimator(2, 700).total)


def test_long_batches_are_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are not listed one by one where there are many, and come to the same."""
    shares = [1 / 49] * 49
    quick = [routing._count_steps(shares, 0.1, 1e9 / 48, size) for size in (64, 128, 256)]
    assert quick == pytest.approx([0.5e9 / size + 0.5 for size in (64, 128, 256)], rel=1e-4)
    short = [routing._count_steps(shares, 0.1, 3e5 / 48, size) for size in (64, 128, 256)]
    monkeypatch.setattr(routing, "_SMOOTH", math.inf)
    assert short == pytest.approx([routing._count_steps(shares, 0.1, 3e5 / 48, size) for size in (64, 128, 256)], 1e-9)
