"""What versions of transformers do to routed rows, and what adapters and four-bit weights add."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from places import ROOT

from flopcalc import bind, predict
from flopcalc.base.errors import WorkloadError
from flopcalc.cli.predict import predict as command
from flopcalc.core.workload.workload import make_workload
from flopcalc.prediction.build_work import make_work
from flopcalc.prediction.moe_versions import MASKED, list_masks, parse_version

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "lab" / "blind" / "README.md"
OLMOE: dict[str, Any] = {
    "model_type": "olmoe", "hidden_size": 256, "intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "forward", "backward", "copies"),
    [
        ("4.57.1", 0, 0, 0),
        ("5.5", 0, 0, 0),
        ("5.6.2", 1, 1, 1),
        ("5.8", 2, 2, 2),
        ("5.16.1", 2, 2, 2),
        ("5.17", 3, 3, 5),
        ("5.17.0", 3, 3, 5),
        ("5.18.0", 0, 0, 0),
        ("5.22.2", 0, 0, 0),
        ("6.0", 0, 0, 0),
    ],
)
def test_masks_of_versions(version: str, forward: int, backward: int, copies: int) -> None:
    rows = list_masks(version)
    counts = [sum(row[2] for row in rows if row[0] == way and row[1] == MASKED) for way in "fb"]
    assert counts == [forward, backward]
    assert sum(row[2] for row in rows if row[1] == "copy") == copies


@pytest.mark.parametrize("text", ["", "5", "five", "5.", "v5.17", 5.17])
def test_other_words_are_no_version(text: Any) -> None:
    with pytest.raises(WorkloadError, match=r"written as 5\.17"):
        parse_version(text)


@pytest.mark.parametrize(("recompute", "forwards"), [("none", 1), ("full", 2)])
def test_masked_bytes_are_those_of_routed_rows(recompute: str, forwards: int) -> None:
    estimator = bind(OLMOE, recipe={"recompute": recompute}, convention="hardware", device="h200")
    found = {version: make_work(estimator, make_workload(2, 16), transformers=version) for version in ("5.17", "5.22")}
    masked = [each for each in found["5.17"].moved if each.kind == MASKED]
    rows, wide, inner = 2 * 16 * 2, 256, 2 * 128
    passes = forwards + 1  # and the backward pass
    assert sum(each.calls * each.reads for each in masked) == 3 * passes * 2 * rows * (wide + wide + inner)
    assert not [each for each in found["5.22"].moved if each.kind == MASKED]
    assert found["5.17"].products == found["5.22"].products


def test_without_a_version_the_interval_covers_both() -> None:
    options: dict[str, Any] = {"device": "h200", "batch_size": 4, "seq_len": 512, "advise": False, "memory": False}
    usual, old, new = (
        predict(OLMOE, **options, **given) for given in ({}, {"transformers": "5.17"}, {"transformers": "5.22"})
    )
    assert usual.step_time_s.mid == old.step_time_s.mid > new.step_time_s.mid
    assert usual.step_time_s.low == min(old.step_time_s.low, new.step_time_s.low)
    assert usual.step_time_s.high == old.step_time_s.high
    assert [note for note in usual.notes if "5.18 and newer" in note]
    assert not [note for found in (old, new) for note in found.notes if "5.18 and newer" in note]
    assert [each.evidence["transformers"] for each in (usual, old, new)] == ["5.17", "5.17", "5.22"]


def test_a_dense_model_is_the_same_in_every_version() -> None:
    options: dict[str, Any] = {"device": "h200", "batch_size": 1, "seq_len": 64, "advise": False, "memory": False}
    one, other = (predict("llama-3.2-1b", **options, **given) for given in ({}, {"transformers": "5.22"}))
    assert one.step_time_s == other.step_time_s


def test_the_command_takes_a_version() -> None:
    given = ["qwen3-30b-a3b", "--seq", "64", "--device", "h200", "--json", "--transformers"]
    found = CliRunner().invoke(command, [*given, "5.22"])
    assert json.loads(found.output)["evidence"]["transformers"] == "5.22"
    refused = CliRunner().invoke(command, [*given, "new"])
    assert isinstance(refused.exception, WorkloadError)
    assert str(refused.exception) == "a version of transformers is written as 5.17 or 5.17.0, not 'new'"


def test_a_type_without_a_recording_gets_the_operators_of_experts() -> None:
    estimator = bind("glm-4.5-air", convention="hardware", device="h200")
    work = make_work(estimator, make_workload(1, 64), transformers="5.22")
    kinds = {each.kind for each in work.moved if each.module == "model.layers.*.mlp.experts"}
    assert {"gather", "scatter", "sort", "reduce"} <= kinds


@pytest.mark.parametrize(
    ("lora", "autocast", "casts"),
    [
        ({"r": 4, "targets": ["q_proj"]}, False, (2, 3)),
        ({"r": 4, "targets": ["q_proj"]}, True, (4, 4)),
        ({"r": 4, "targets": ["q_proj"], "dtype": "bf16"}, False, (0, 0)),
    ],
)
def test_casts_of_adapters(lora: dict[str, Any], autocast: bool, casts: tuple[int, int]) -> None:
    """What is cast for an adapter, in the forward and in the backward pass of a layer."""
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128}  # fmt: skip
    estimator = bind(config, lora=lora, autocast=autocast, convention="hardware", device="h200")
    work = make_work(estimator, make_workload(1, 8))
    module = "model.layers.*.self_attn.q_proj"
    found = [
        sum(
            each.calls for each in work.moved if each.module == module and each.direction == way and "cast" in each.kind
        )
        for way in ("forward", "backward")
    ]
    assert found == [2 * each for each in casts]  # two layers


def test_weights_of_four_bits_are_made_whole_before_each_product() -> None:
    lora = {"r": 8, "targets": ["q_proj"]}
    estimator = bind("llama-3.2-1b", weights="nf4", lora=lora, recompute="full", convention="hardware", device="h200")
    work = make_work(estimator, make_workload(1, 64))
    module = "model.layers.*.self_attn.k_proj"
    found = [each for each in work.moved if each.kind == "dequantize" and each.module == module]
    assert {(each.direction, each.is_again, each.calls) for each in found} == {
        ("forward", False, 16),
        ("forward", True, 16),
        ("backward", False, 16),
    }
    assert {(each.reads, each.writes) for each in found} == {(512 * 2048 / 2, 2.0 * 512 * 2048)}


@pytest.mark.parametrize(
    ("weights", "workload", "least", "most"),
    [
        ("int4-g128", {"seq_len": 1, "phase": "decode", "context": 100}, 0.26, 0.45),  # the head stays plain
        ("nf4", {"seq_len": 1, "phase": "decode", "context": 100}, 0.26, 0.45),
        ("int4-g128", {"seq_len": 4096, "phase": "prefill"}, 1.0, 1.0),  # the peak bounds it
    ],
)
def test_products_read_the_bytes_of_quantized_weights(
    weights: str, workload: dict[str, Any], least: float, most: float
) -> None:
    """No kernel for them was measured: the evidence says so, and the interval is as wide as without measurements."""
    options: Any = {"device": "h200", "execution": "graphs", "memory": False, "advise": False, **workload}
    plain, quantized = predict("llama-3.1-8b", **options), predict("llama-3.1-8b", weights=weights, **options)
    assert least <= quantized.breakdown["products"] / plain.breakdown["products"] <= most
    assert (plain.evidence["quantized_products"], quantized.evidence["quantized_products"]) == (None, "data sheet")
    low, mid, _ = quantized.step_time_s
    assert 1 - low / mid >= 0.3


def test_the_line_of_dequantizing_is_what_was_measured() -> None:
    script = load_script("formats_steps")
    measured = script.read(RESULTS / "formats_steps.json.gz")
    shipped = json.loads((ROOT / "model_specs" / "predictors" / "h200-sxm.json").read_text())
    assert shipped["linear"]["dequantize"] == script.fit_dequantize(measured)


@pytest.mark.heavy
def test_the_page_has_what_was_measured() -> None:
    page = PAGE.read_text(encoding="utf-8")
    experts = load_script("expert_steps")
    for version in ("5.17", "5.22"):
        assert experts.report(RESULTS / f"expert_cases_{version}.json.gz") in page
    formats = load_script("formats_steps")
    for file in ("formats_steps.json.gz", "formats_blind.json"):
        assert formats.report(formats.read(RESULTS / file)) in page
