"""`flopcalc models` and `flopcalc devices`: a name keeps what has it, a single match is shown in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flopcalc
from flopcalc.cli import main, supported
from flopcalc.cli.supported import load_catalogue

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert end.value.code == code
    assert (err if code == 0 else out) == ""
    return out if code == 0 else err


def run_json(capsys: Capture, *arguments: str) -> Any:
    return json.loads(run(capsys, *arguments, "--json"))


@pytest.mark.parametrize(
    ("name", "presets", "types"),
    [
        ("opt", {"opt-125m", "opt-1.3b", "opt-6.7b", "opt-13b"}, {"opt"}),
        ("QWEN2_VL", {"qwen2-vl-7b"}, {"qwen2_vl"}),  # an alias: exactly this one, not qwen2-vl-2b
        ("gpt2", {"gpt2"}, {"gpt2"}),  # the preset, not gpt2-xl
        ("meta-llama/llama-3.1-8b-instruct", {"llama-3.1-8b"}, {"llama"}),
        ("NousResearch/Meta-Llama-3.1-8B", {"llama-3.1-8b"}, {"llama"}),  # a copy of it
        ("bamba", set(), {"bamba"}),
    ],
)
def test_models_by_name(capsys: Capture, name: str, presets: set[str], types: set[str]) -> None:
    shown = run_json(capsys, "models", name)
    assert {entry["name"] for entry in shown["presets"]} == presets
    assert {entry["model_type"] for entry in shown["families"]} == types
    text = run(capsys, "models", name)
    assert all(each in text for each in presets | types)


def test_one_model_in_full(capsys: Capture) -> None:
    (shown,) = run_json(capsys, "models", "qwen2-vl")["presets"]
    parameters = flopcalc.bind("qwen2-vl").parameters()
    assert shown["parameters"] == parameters["total"]
    assert shown["parameters_by_kind"] == parameters
    assert shown["context"] == 32768
    assert shown["config"]["vision_config"]["depth"] == 32
    lines = run(capsys, "models", "qwen2-vl").splitlines()
    assert lines[-1].split() == ["see", "also", "qwen2-vl-2b,", "qwen2-vl-72b"]
    assert lines[0] == "qwen2-vl-7b"
    facts = dict(line.split("  ", 1) for line in lines[1:] if line[0] != " ")
    assert {name: text.strip() for name, text in facts.items()} | {
        "also called": "qwen2-vl",
        "hub id": "Qwen/Qwen2-VL-7B-Instruct",
        "model type": "qwen2_vl",
        "class": "Qwen2VLForConditionalGeneration",
        "input": "text, images",
        "parameters": "8.29B = 8,291,375,616",
        "context": "32,768 tokens",
    } == {name: text.strip() for name, text in facts.items()}
    assert {"config", "vision config", "preprocessor", "source"} <= set(facts)
    assert "37,552,282,624 active" in run(capsys, "models", "deepseek-v3")


def test_coverage_by_name(capsys: Capture) -> None:
    shown = run_json(capsys, "models", "--coverage", "qwen2_vl")
    assert {entry["model_type"] for mapping in shown["mappings"] for entry in mapping["types"]} == {"qwen2_vl"}


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("b200", ["b200-sxm"]),  # an alias: gb200 has it in its name too
        ("h100", ["h100-sxm", "h100-pcie", "h100-nvl"]),
        ("a100-80gb", ["a100-sxm-80gb", "a100-pcie-80gb"]),
        ("RTX 3090", ["rtx-3090"]),
        ("h800", ["h800-sxm"]),
    ],
)
def test_devices_by_name(capsys: Capture, name: str, ids: list[str]) -> None:
    shown = run_json(capsys, "devices", name)
    assert [entry["id"] for entry in shown["devices"]] == ids
    assert all(set(listed) & set(ids) for listed in shown["ambiguous"].values())
    text = run(capsys, "devices", name)
    assert all(each in text for each in ids)
    assert ("Dense peaks in TFLOP/s" in text) is (len(ids) > 1)


def test_one_device_in_full(capsys: Capture) -> None:
    (shown,) = run_json(capsys, "devices", "h200")["devices"]
    assert shown["price"]["usd_per_gpu_hour"] == 4.0
    assert [each["id"] for each in shown["interconnects"]] == ["hgx-h200"]
    assert "steps" in shown["tables"]
    assert shown["has_predictor"] is True
    text = run(capsys, "devices", "h200")
    for piece in (
        "bf16 989.4, ",
        "fp8 1978.9",
        "141 GB",
        "4800 GB/s",
        "700 W",
        "cudnn",
        "4 USD per GPU-hour",
        "hgx-h200",
    ):
        assert piece in text
    assert run_json(capsys, "devices", "mi355x")["devices"][0]["price"] is None
    assert "not known" in run(capsys, "devices", "mi355x")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("models", "qwem2"), "no model type or preset has 'qwem2' in its name. Did you mean qwen2"),
        (("models", "--coverage", "qwem2"), "has 'qwem2' in its name"),
        (("devices", "h300"), "device 'h300' unknown. Did you mean h20"),
        (("devices", "b400"), "Did you mean b"),
        (("devices", "a100", "h100"), "unexpected extra argument"),
    ],
)
def test_unknown_names(capsys: Capture, arguments: tuple[str, ...], words: str) -> None:
    assert words in run(capsys, *arguments, code=2)


def test_own_presets_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the shipped ones knows nothing of them, so all is computed."""
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    shipped = load_catalogue()
    mine = tmp_path / "presets" / "mine.toml"
    mine.parent.mkdir()
    mine.write_text(
        'hub_id = "me/mine"\nsource = "my own"\n[config]\nmodel_type = "gpt2"\nn_embd = 8\nn_layer = 1\nn_head = 2\n'
        "vocab_size = 10\nn_positions = 4\n"
    )
    monkeypatch.setattr(supported, "list_data_files", lambda _: {"mine": str(mine)})  # binding all takes seconds
    found = load_catalogue()
    assert found.families == shipped.families
    assert found.presets == [
        {
            "name": "mine",
            "model_type": "gpt2",
            "parameters": 8 * (10 + 4) + 12 * 8 * 8 + 13 * 8 + 2 * 8,
            "hub_id": "me/mine",
            "source": "my own",
            "spec": "gpt2",
            "aliases": [],
        }
    ]
