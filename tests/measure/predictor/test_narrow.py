"""Narrow models: the same code as published ones, hardly any work for a device; and the probe beside them."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import DEVICE, SHIPPED, model
from places import ROOT
from tiers import mark_heavy, thin

from flopcalc.api import bind
from flopcalc.base.data import find_data_dir, list_data_files
from flopcalc.core.model.config import load_config
from flopcalc.measure.calibrate.tables import Bench
from flopcalc.measure.hf.models import build_model, count_parameters
from flopcalc.measure.predictor import host_calls as probe
from flopcalc.measure.predictor import runs
from flopcalc.measure.predictor.fit.cases import ModelledCase, make_machine, model_cases
from flopcalc.measure.predictor.fit.host import is_device_slow
from flopcalc.measure.predictor.narrow import narrow

PRESETS = list(runs.NARROW)
LIGHT = ("llama-3.2-1b", "gpt2", "mixtral-8x7b", "qwen2-vl-2b")
MOST = 80e6  # parameters besides the vocabulary: sixteen experts are most of them


@pytest.mark.parametrize("preset", mark_heavy(PRESETS, LIGHT))
def test_it_builds_with_the_parameters_that_are_counted(preset: str) -> None:
    config = runs.get_config(f"{preset}-narrow-4")
    built = build_model(config, "sdpa", None, "meta", torch.bfloat16)
    total, _ = count_parameters(built)
    assert total == bind(config).parameters()["total"]
    tables = {built.get_input_embeddings().weight, built.get_output_embeddings().weight}
    assert total - sum(table.numel() for table in tables) < MOST


def _has_sdpa(preset: str) -> bool:
    import transformers

    (name,) = bind(preset).source.config.get("architectures") or [bind(preset).spec.architecture]
    return bool(getattr(transformers, name)._supports_sdpa)


OTHER_KINDS = {
    "albert", "bart", "beit", "bert", "camembert", "clip", "deberta-v2", "deit", "dinov2", "dinov3_vit",
    "distilbert", "electra", "esm", "m2m_100", "marian", "mbart", "modernbert", "mpnet", "mt5", "pegasus",
    "roberta", "siglip", "t5", "umt5", "vit", "whisper", "xlm-roberta",
}  # fmt: skip


def test_every_recorded_type_that_can_be_measured_is() -> None:
    """A type that is recorded anew, or gets its first preset, belongs into `runs.NARROW` or host_types.py."""
    recorded = {path.stem for path in (Path(find_data_dir()) / "operators").glob("*.json")}
    presets = {str(load_config(name).config["model_type"]): name for name in list_data_files("presets")}
    types = [load_config(preset).config["model_type"] for preset in PRESETS]
    assert len(types) == len(set(types))
    later = set(runpy.run_path(str(ROOT / "benchmarks" / "host_types.py"))["TYPES"])
    assert {*types, *later} <= recorded
    without = {kind for kind in recorded & set(presets) if not _has_sdpa(presets[kind])}
    assert without == {"gemma2", "gpt_oss", "gptj"}
    # Encoders, decoders that read an encoder, sound and images alone: benchmarks/data/host_kinds.json has most of them.
    assert (recorded & set(presets)) - {*types, *later, *without} == OTHER_KINDS & set(presets)
    denoisers = {"FluxTransformer2DModel", "SD3Transformer2DModel"}  # presets are of their pipelines
    plain = {
        "biogpt",
        "bloom",
        "codegen",
        "gemma4_text",
        "gpt_bigcode",
        "gpt_neo",
        "imagegpt-causal",
        "lfm2_moe",
        "ministral",
        "mpt",
        "openai_privacy_filter",
        "ovis2",
        "xglm",
    }
    assert recorded - set(presets) - later == plain | denoisers | (OTHER_KINDS - set(presets))


@pytest.mark.parametrize("layers", [4, 8])
@pytest.mark.parametrize("preset", PRESETS)
def test_layers_are_those_asked_for_and_a_tower_has_twice_as_many(preset: str, layers: int) -> None:
    config = runs.get_config(f"{preset}-narrow-{layers}")
    stages = [len(stage.layers) for stage in bind(config).stages if stage.repeated]
    assert stages[-1] == layers
    assert stages[:1] == [2 * layers if "vision_config" in config else layers]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_given_config_is_left_alone(preset: str) -> None:
    config = dict(load_config(preset).config)
    before = copy.deepcopy(config)
    assert narrow(config, 4) != before
    assert config == before


def _model(preset: str, config: dict[str, Any], *, is_seen: bool) -> ModelledCase:
    seq, grids = runs.NARROW[preset] if is_seen else (0, [])
    return model(runs.make_case(preset, "train", 1, seq or 64, grids), config)


@pytest.mark.parametrize("preset", mark_heavy(PRESETS, LIGHT))
def test_the_host_does_what_it_does_for_the_published_model(preset: str) -> None:
    """The same kinds of operators, from the same records, and as many with every further layer."""
    config = dict(load_config(preset).config)
    for is_seen in (False, True):
        whole = _model(preset, config, is_seen=is_seen).work
        four, eight, twelve = (
            _model(preset, runs.get_config(f"{preset}-narrow-{n}"), is_seen=is_seen).work for n in (4, 8, 12)
        )
        assert set(four.dispatched) == set(whole.dispatched)
        assert four.notes == whole.notes
        assert four.is_recorded
        for kind, many in eight.dispatched.items():
            assert twelve.dispatched[kind] - many == pytest.approx(many - four.dispatched[kind]), kind


@pytest.mark.parametrize("preset", thin(PRESETS, 4))
def test_heads_are_grouped_as_published(preset: str) -> None:
    def list_heads(config: dict[str, Any]) -> set[tuple[Any, ...]]:
        calls = _model(preset, config, is_seen=True).work.attention
        return {(each.qk, each.v, each.kv_heads == each.heads, each.kv_heads == 1) for each in calls}

    config = dict(load_config(preset).config)
    found, published = list_heads(runs.get_config(f"{preset}-narrow-4")), list_heads(config)
    assert found == published


@pytest.mark.heavy
def test_every_case_is_the_hosts() -> None:
    """What a device has to do in a narrow step, it does in half of the host's time: each tells of the host."""
    cases = list(runs.list_narrow_cases())
    # All types at one depth, then all at the other: whatever slows the host for a while, it slows one of the two.
    assert list(dict.fromkeys(case["model"] for case in cases)) == [
        f"{preset}-narrow-{layers}" for layers in (4, 12) for preset in PRESETS
    ]
    assert [runs.name_case(case) for case in cases if case["model"] == "qwen2-vl-2b-narrow-12"] == [
        f"qwen2-vl-2b-narrow-12/{name}"
        for name in ("train/1x64", "train/1x640/1x48x48", "prefill/1x64", "prefill/1x640/1x48x48", "decode/1x2/@128")
    ]
    machine = make_machine(SHIPPED)
    modelled = model_cases(cases, runs.get_config, DEVICE)
    slow = [runs.name_case(each.case) for each in modelled if is_device_slow(each, machine)]
    assert slow == []


@pytest.fixture(scope="module")
def runner() -> runs.Runner:
    return runs.Runner("cpu", runs.get_config)


@pytest.mark.parametrize(
    ("phase", "context"), mark_heavy([("train", 0), ("prefill", 0), ("decode", 12)], [("decode", 12)])
)
def test_a_narrow_step_is_measured(runner: runs.Runner, phase: str, context: int) -> None:
    case = runs.make_case("gpt2-narrow-4", phase, 1, 2, context=context)
    record = runner.measure_host(case, 2)
    assert {key: record[key] for key in case} == case
    assert min(record[key] for key in ("seconds", "probe_s", "ratio")) > 0
    assert record["steps"] == 2
    assert set(runner.probes) >= {phase == "train"}


@pytest.mark.parametrize(("is_train", "layers"), [(True, 2), (False, 6)])
def test_the_probe(is_train: bool, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does the same each time, with a backward pass or without, and leaves nothing behind."""
    made: list[Any] = []
    seen: list[int] = []
    ran: list[bool] = []
    make = probe._make_layer

    def make_layer(given: Any) -> Any:
        made.append(make(given))
        made[-1].register_forward_hook(lambda _, __, out: ran.append(out.requires_grad))
        for parameter in made[-1].parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: seen.append(1))
        return made[-1]

    monkeypatch.setattr(probe, "_make_layer", make_layer)
    run = probe.make_probe(Bench("cpu"), is_train)
    assert len(made) == layers
    parameters = [parameter for layer in made for parameter in layer.parameters()]
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
    before = [parameter.detach().clone() for parameter in parameters]
    for _ in range(2):
        seen.clear()
        ran.clear()
        assert run() > 0
        assert ran == [is_train] * layers
        assert torch.is_grad_enabled()
        assert len(seen) == (len(parameters) if is_train else 0)
        assert all(parameter.grad is None for parameter in parameters)
    assert all(torch.equal(*pair) for pair in zip(before, parameters, strict=True))
