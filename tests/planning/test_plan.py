"""What a plan finds, refuses and draws; times come from a machine of round numbers."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from round_machine import GPT, use_round_machine
from tiers import thin

from flopcalc import bind, hfu, mfu, predict
from flopcalc.api import plan
from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.base.errors import FlopcalcError, SpecError, WorkloadError
from flopcalc.base.units import format_tokens, parse_tokens
from flopcalc.core.model.config import load_config
from flopcalc.hardware.devices import find_device
from flopcalc.hardware.prices import find_price
from flopcalc.planning.plan import choose_batch
from flopcalc.planning.results import Plan
from flopcalc.planning.seconds import PARTS
from flopcalc.prediction.kernels.defaults import load_defaults


@pytest.fixture(autouse=True)
def _round(monkeypatch: pytest.MonkeyPatch) -> None:
    use_round_machine(monkeypatch)


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
    assert best.energy is not None
    assert best.kwh == pytest.approx(best.energy.power.watts.mid / 1000 * best.gpu_hours)
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


@pytest.mark.parametrize(
    ("seq", "batch", "dtype", "recompute"),
    thin(
        [
            (1000, 3, "bf16", "full"),
            (1000, 3, "bf16", "none"),
            (1024, 4, "fp16", "none"),
            (333, 1, None, "full"),
            (512, 2, "fp8", "none"),
        ],
        1,
    ),
)
def test_hfu_is_that_of_an_estimate(seq: int, batch: int, dtype: str | None, recompute: str) -> None:
    """What the H200's kernels and tiles execute, for the plan of one GPU, with a bound device and without."""
    found = make_plan(
        gpus=1, seq_len=seq, global_batch=2 * batch, micro_batch=batch, recompute=recompute, dtype=dtype
    ).best[0]
    recipe = {"recompute": "full-reentrant" if recompute == "full" else recompute}
    for device in ("h200", None):
        estimate = bind(GPT, device=device, dtype=dtype, recipe=recipe)(batch, seq) * 2
        assert found.hfu == pytest.approx(float(hfu(estimate, found.step.seconds, device="h200")), rel=1e-12)
        assert found.mfu == pytest.approx(float(mfu(estimate, found.step.seconds, device="h200")), rel=1e-12)
    if dtype != "fp8":  # predict takes no such format
        predicted = predict(
            GPT, device="h200", dtype=dtype, batch_size=batch, seq_len=seq, recompute=recipe["recompute"],
            execution="fused", memory=False, advise=False,
        )  # fmt: skip
        executed = predicted.hfu * predicted.step_time_s.mid
        assert 2 * executed == pytest.approx(found.hfu * found.step.seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("gpus", "more", "expected"),
    [
        (1, {}, ("eager", "adamw")),
        (8, {}, ("fused", "adamw-master")),
        (8, {"hf_trainer": True}, ("eager", "adamw-master")),
        (8, {"lora": {"r": 8, "targets": "all-linear"}}, ("eager", "adamw")),
        (8, {"execution": "eager", "optimizer": "adamw"}, ("eager", "adamw")),
        (1, {"execution": "fused", "optimizer": "adamw-master"}, ("fused", "adamw-master")),
    ],
)
def test_both_commands_take_the_same_unless_it_is_said(gpus: int, more: dict[str, Any], expected: Any) -> None:
    found = plan(GPT, tokens="1B", device="h200", gpus=gpus, seq_len=512, global_batch=8, tp=1, pp=1, **more)
    step = predict(GPT, device="h200", gpus=gpus, seq_len=512, advise=False, **more)
    assert (found.execution, found.optimizer) == (step.execution, step.optimizer) == expected
    for notes in (found.notes, step.notes) if gpus > 1 else ():
        assert any("unless said" in note for note in notes) == (len(more) < 2)


def test_defaults_are_said() -> None:
    found = plan(GPT, tokens=10**10, device="h200", gpus=24, tp=1)
    assert (found.seq, found.global_batch) == (4096, 960)
    assert any("4096 tokens assumed" in note for note in found.notes)
    assert any("960 sequences" in note for note in found.notes)


@pytest.mark.parametrize(
    ("gpus", "tokens", "whole", "batch", "why"),
    [
        (1, 4096, 10**12, 1024, "about 4M tokens, as most published runs have"),
        (12, 4096, 10**12, 960, "about 4M tokens, as most published runs have"),
        (64, 640, 10**12, 6144, "about 4M tokens, as most published runs have"),
        (2048, 4096, 10**12, 1024, "about 4M tokens, as most published runs have"),
        (8, 131072, 10**12, 32, "about 4M tokens, as most published runs have"),
        (8, 10**7, 10**12, 1, "about 4M tokens, as most published runs have"),
        (16384, 8192, 15 * 10**12, 2048, "as many tokens a GPU, or all in all, as in the run of Llama 3 405B"),
        (65536, 8192, 15 * 10**12, 2048, "as many tokens a GPU, or all in all, as in the run of Llama 3 405B"),
        (8, 2048, 10**7, 8, "about 500 steps"),
        (8, 4096, 10**3, 1, "about 500 steps"),
    ],
)
def test_the_batch_taken_is_one_that_people_use_and_divides_well(
    gpus: int, tokens: int, whole: int, batch: int, why: str
) -> None:
    assert choose_batch(gpus, tokens, whole) == (batch, why)


def test_one_device_needs_no_interconnect() -> None:
    found = make_plan(device="l4", gpus=1)
    assert found.interconnect.id == "none"
    assert {entry.layout.devices for entry in found.best} == {1}
    assert not any("collectives" in note for note in found.notes)
    assert {"tensor_parallel", "data_parallel", "bubble"}.isdisjoint(found.best[0].to_dict()["breakdown"])
    with pytest.raises(FlopcalcError, match="no interconnect is known for AMD Instinct MI250X"):
        make_plan(device="mi250x-gcd", gpus=2)


@pytest.mark.parametrize(("gpus", "is_noted"), [(4, False), (12, True), (16, False)])
def test_a_part_of_a_node_is_said(gpus: int, is_noted: bool) -> None:
    notes = make_plan(gpus=gpus, global_batch=96, virtual=1, zero=1, micro_batch=1).notes
    assert any("do not fill whole nodes of 8" in note for note in notes) is is_noted


def test_more_devices_are_never_slower() -> None:
    steps = [make_plan(gpus=gpus, virtual=1, micro_batch=(1, 2, 4)).best[0].step.seconds for gpus in (1, 2, 4, 8, 16)]
    assert steps == sorted(steps, reverse=True)


def test_the_error_of_a_default_length_says_that_it_was_taken() -> None:
    with pytest.raises(FlopcalcError, match="no length was given, so 4096 tokens were assumed"):
        plan("gpt2", tokens="1B", device="h200", gpus=8)


def test_a_faster_layout_that_does_not_fit_is_named() -> None:
    found = plan("llama-3.1-8b", tokens="1B", device="a100-sxm-80gb", gpus=8, seq_len=2048, global_batch=64)
    memory = next(loser for loser in found.losers if loser.reason == "memory")
    assert "more than" in memory.text
    assert memory.nearest.memory.peak > 75 * 2**30


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "h2000"}, "device 'h2000' unknown"),
        ({"interconnect": "token-ring"}, "interconnect 'token-ring' unknown"),
        ({"dtype": "bf17"}, "dtype 'bf17' unknown"),
        ({"tokens": 0}, "tokens must be a number from 1"),
        ({"tokens": "many"}, "'many' is not a number; write 2000000000 or 2T"),
        ({"dtype": "fp32"}, "a plan is for training in bf16, fp16, fp8, mxfp8, nvfp4, mxfp4, not fp32"),
        ({"gpus": 0}, "gpus must be at least 1"),
        ({"gpus": 10**7}, "gpus must be at most 1,000,000, not 10,000,000"),
        ({"gpus": 4096, "global_batch": 1}, "a global batch of 1 sequences; change it, gpus or global_batch"),
        ({"global_batch": 0}, "global_batch must be at least 1, not 0"),
        ({"price": 0}, "price must be a positive number, not 0"),
        ({"price": -1.5}, "price must be a positive number, not -1.5"),
        ({"price": float("nan")}, "price must be a positive number, not nan"),
        ({"tp": 3}, "tp 3 does not divide 64 devices"),
        ({"tp": 32}, "tp 32 does not divide the model's 16 attention heads"),
        ({"pp": 32}, "pp 32 · 1 virtual stages are more than the model's 16 layers"),
        ({"ep": 2}, "ep 2: the model has no experts"),
        ({"dp": 5}, "dp 5 does not divide 64 devices"),
        ({"micro_batch": 3}, "3 does not divide a global batch of 64 sequences"),
        ({"zero": 4}, "zero must be 0, 1, 2 or 3, not 4"),
        ({"recompute": "some"}, "recompute 'some' unknown; known: none, light, selective, offload, half, full"),
        ({"recompute": "offload"}, "recompute offload needs host_gb_per_s, which interconnect hgx-h200 does not have"),
        ({"recompute": "light", "execution": "eager"}, "recompute light is planned with execution fused, not eager"),
        ({"overlap": "some"}, "overlap 'some' unknown; known: all, none"),
        ({"tp": []}, "tp: no value given"),
        ({"tp": 2.0}, "tp must be a whole number, not 2.0"),
        ({"device": "a100-sxm-80gb", "dtype": "fp8"}, "has no known fp8 peak: plan with dtype bf16 or fp16"),
        ({"tp": 8, "dp": 16}, "no layout divides"),
        ({"tp": 2, "virtual": 4, "pp": 1}, "4 virtual stages need a pipeline: pp of 2 or more, not 1"),
        ({"virtual": 2, "pp": 8, "dp": 8, "micro_batch": 8}, "need micro-batches in multiples of pp 8, not 1"),
        ({"execution": "egaer"}, "execution 'egaer' unknown. Did you mean eager"),
        ({"optimizer": "adam"}, "optimizer 'adam' unknown. Did you mean adamw"),
        ({"attention_kernel": "math"}, "attention_kernel 'math' unknown"),
        ({"dtype": "fp8", "execution": "eager"}, "fp8 is planned with execution fused, not eager"),
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
    assert "does not fit on 8 x NVIDIA A100-SXM4-80GB in any of" in text
    assert "GiB more than" in text
    assert "leave zero free; more devices" in text
    assert 'optimizer="adamw" (bf16 states, no fp32 copy of the weights: 8 bytes instead of 18)' in text
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
    assert find_price(find_device("jetson-agx-orin-64gb"), None) is None
    assert find_price(find_device("t4"), 0.5) == (0.5, "given")
    given = {"device": "rtx-5080", "gpus": 1, "tokens": "1M", "seq_len": 256, "global_batch": 1}
    found = make_plan(**given)
    assert found.best[0].usd is None
    assert "no price is known for this device: price=USD_PER_GPU_HOUR gives one" in found.notes
    assert make_plan(**given, price=1).best[0].usd is not None


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


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("2T", 2 * 10**12),
        ("15.6T", 15_600_000_000_000),
        ("300b", 3 * 10**11),
        ("1_000", 1000),
        (7, 7),
        ("1e12", 10**12),
        (2e12, 2 * 10**12),
    ],
)
def test_tokens(text: str | float, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (1, "1 token"),
        (2, "2 tokens"),
        (2 * 10**12, "2.00T tokens"),
        (999 * 10**12, "999.00T tokens"),
        (10**15, "1,000T tokens"),
        (10**18, "1,000,000T tokens"),
    ],
)
def test_tokens_in_words(tokens: int, text: str) -> None:
    assert format_tokens(tokens) == text


@pytest.mark.parametrize(
    ("tokens", "taken", "note"),
    [
        (1, 64 * 2048, "1 token given, less than one step: one whole step, 131.07K tokens, planned"),
        ("100k", 64 * 2048, "100.00K tokens given, less than one step: one whole step, 131.07K tokens, planned"),
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
    ("model", "is_said"),
    [("mamba-2.8b", True), ("deepseek-v3.2", True), ("llama-3.1-8b", False), ("mixtral-8x7b", False)],
)
def test_scans_are_said(model: str, is_said: bool) -> None:
    fixed: dict[str, Any] = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": 3, "micro_batch": 1, "recompute": "full"}
    found = plan(model, tokens="1B", device="h200", gpus=256, seq_len=2048, global_batch=256, **fixed)
    assert len([note for note in found.notes if "scans or selections of keys" in note]) == is_said


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({}, "assumed: fused kernels, no waiting for the CPU, gradients reduced while backward runs"),
        ({"execution": "eager"}, "assumed: HF's eager code with its host time"),
        ({"execution": "graphs"}, "assumed: HF's code under torch.compile, replayed as CUDA graphs"),
        (
            {"optimizer": "adamw-master"},
            "adamw-master, 18 bytes per trained parameter (weight 2, gradient 4, states 12), before ZeRO",
        ),
        (
            {"lora": "r=8,targets=all-linear", "weights": "nf4", "execution": "fused", "optimizer": "adamw"},
            "nf4 and bf16 weights; adamw, 16 bytes per trained parameter (weight 4, gradient 4, states 8), before ZeRO",
        ),
        (
            {"optimizer": "adamw"},
            "memory per GPU: bf16 weights; adamw, 8 bytes per trained parameter (weight 2, gradient 2, states 4)",
        ),
    ],
)
def test_what_is_assumed_is_said(options: dict[str, Any], note: str) -> None:
    found = make_plan(tp=1, pp=1, zero=1, micro_batch=1, recompute="none", **options)
    assert len([text for text in found.notes if note in text]) == 1
    shown = found.to_dict()
    assert shown["execution"] == options.get("execution", "fused")
    assert shown["optimizer"] == options.get("optimizer", "adamw-master")


@pytest.mark.parametrize(
    ("model", "seq", "note"),
    [
        ("qwen2.5-vl-7b", 2048, 'no image given, so the vision tower is not counted; add one with images=["1024x768"]'),
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


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = make_plan(tp=1, pp=1)
    found.plot(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8").startswith("<?xml")
    found.plot(str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FlopcalcError, match=r"^plot '.*: give a file name that ends in .png, .svg or .pdf$"):
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
PAGE = " ".join(
    word
    for name in ("planning", "plan-accuracy")
    for word in (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").split()
)
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
        f"gives back {load_defaults().planning.contention:.0%}".replace("%", " %"),
        f"{load_defaults().planning.overhead:.0%} on everything".replace("%", " %"),
    ):
        assert words in PAGE
    assert len([row for row in RUNS if "zero-3" in row["id"]]) == 6


def test_an_unbalanced_rank_is_waited_for() -> None:
    given: dict[str, Any] = {"tokens": "1B", "device": "h100-sxm", "gpus": 8, "ep": 8, "global_batch": 64, "top": 1}
    even, uneven = (plan("qwen3-30b-a3b", **given, expert_imbalance=rows) for rows in (1.0, 1.5))
    assert uneven.best[0].step.seconds > even.best[0].step.seconds
    assert any("1.5 times the mean's rows" in note for note in uneven.notes)
    assert any("no waiting for the CPU but at experts, gradients reduced" in note for note in even.notes)
    with pytest.raises(WorkloadError, match="from 1 to 1000"):
        plan("qwen3-30b-a3b", **given, expert_imbalance=0.5)
    with pytest.raises(WorkloadError, match=r"^llama-3\.1-8b has no experts: leave out the expert imbalance$"):
        plan("llama-3.1-8b", **given | {"ep": None}, expert_imbalance=2.0)


def test_no_rank_has_more_than_all_rows() -> None:
    given: dict[str, Any] = {"tokens": "1B", "device": "h100-sxm", "gpus": 8, "ep": 2, "tp": 1, "pp": 1, "zero": 3}
    even, all_, more = (
        plan("qwen3-30b-a3b", **given, micro_batch=2, global_batch=64, top=1, expert_imbalance=rows).best[0].step
        for rows in (1.0, 2.0, 1000.0)
    )
    assert more == all_
    moved = PARTS.index("memory_bound")  # rows that experts sort and activate are the busiest rank's too
    assert all_.parts[moved] > even.parts[moved]


@pytest.mark.parametrize(("execution", "grows"), [("fused", True), ("eager", False)])
def test_the_busiest_rank_keeps_its_rows(execution: Any, grows: bool) -> None:
    """Experts keep both products' inputs and what the activation function reads, of every row that they get."""
    given: dict[str, Any] = {"tokens": "1B", "device": "h200", "gpus": 8, "ep": 8, "tp": 1, "pp": 1, "zero": 3}
    given |= {"micro_batch": 1, "global_batch": 64, "seq_len": 4096, "recompute": "none", "top": 1}
    even, uneven = (plan("qwen3-30b-a3b", **given, execution=execution, expert_imbalance=rows) for rows in (1.0, 1.5))
    kept = 48 * 8 * 4096 * 2 * (2048 + 2 * 768 + 768)
    more = uneven.best[0].memory.activations - even.best[0].memory.activations
    assert more == (pytest.approx(0.5 * kept, rel=1e-3) if grows else 0)
    assert any("memory as if loaded evenly" in note for note in uneven.notes) != grows


@pytest.mark.heavy
def test_a_searched_batch_is_named() -> None:
    found = plan("llama-3.2-1b", tokens="1B", device="h100-sxm", gpus=8, tp=1, pp=1, zero=1, global_batch="auto", top=1)
    assert any(note.startswith('global_batch="auto"') and f"{found.global_batch} seq" in note for note in found.notes)
    assert any("published runs of this kind (dense, zero 0 to 2)" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["fp8", "mxfp8", "nvfp4"])
def test_narrow_formats_are_faster(kind: str) -> None:
    given: dict[str, Any] = {"tokens": "1B", "device": "gb300", "gpus": 8, "tp": 1, "pp": 1, "zero": 3, "top": 1}
    assert (
        plan("llama-3.1-8b", **given, dtype=kind).best[0].step.seconds
        < plan("llama-3.1-8b", **given).best[0].step.seconds
    )


def test_light_recomputation_lies_between_none_and_full() -> None:
    none, light, full = (
        make_plan(recompute=word, zero=1, tp=1, pp=1, micro_batch=1).best[0] for word in ("none", "light", "full")
    )
    assert none.step.seconds < light.step.seconds < full.step.seconds
    assert none.memory.activations > light.memory.activations > full.memory.activations
    assert none.hfu > none.mfu


def test_communication_that_is_not_hidden_shows() -> None:
    hidden, shown = (make_plan(overlap=word, tp=4, zero=1, pp=1, micro_batch=1).best[0] for word in ("all", "none"))
    assert shown.step.seconds > hidden.step.seconds


def test_memory_is_what_a_published_run_allocated() -> None:
    """MooreThreads/SimuMax: docs/b200/b200_release_v1.2_summary.json, llama3_70b_tp2_pp1_dp4_l12_mbc4_cef."""
    config = dict(load_config("llama-3-70b").config) | {"num_hidden_layers": 12}
    found = plan(config, tokens=1, device="b200", gpus=8, seq_len=4096, global_batch=16, tp=2, pp=1, zero=1,
                 micro_batch=1, recompute="none", cp=1).best[0]  # fmt: skip
    assert found.memory.peak / (1 << 30) == pytest.approx(60.68, rel=0.005)


@pytest.mark.parametrize(
    ("gpus", "batch", "words"),
    [
        (7, 64, "7 does not divide 64 sequences, so no layout has 7 data-parallel replicas"),
        (6, 256, "that factor of 6 GPUs; global_batch=252 or global_batch=258 lets replicas take it"),
        (7, 5, "global_batch=7 lets replicas take it"),
        (12, 64, "3 does not divide 64 sequences"),
        (8, 64, None),
        (8, 6, None),
        (6, 48, None),
    ],
)
def test_a_factor_that_the_batch_lacks_is_said(gpus: int, batch: int, words: str | None) -> None:
    notes = [note for note in make_plan(gpus=gpus, global_batch=batch, tp=1).notes if "does not divide" in note]
    assert [words in note for note in notes] == ([] if words is None else [True])
