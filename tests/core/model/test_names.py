"""Hub ids and names find the preset with their sizes, and never one of another size, generation or kind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flopcalc import ConfigError, bind, estimate_flops
from flopcalc.base.data import find_data_dir, get_stem, list_data_files, load_toml
from flopcalc.cli import main
from flopcalc.core.model.config import load_config
from flopcalc.core.model.names import find_preset, load_launch_ids
from flopcalc.web.answers import answer


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))


def find(name: str) -> str | None:
    found = find_preset(name)
    return None if found is None else get_stem(found.path)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("NousResearch/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("meta-llama/Llama-3.2-11B-Vision", "llama-3.2-11b-vision"),
        ("meta-llama/Llama-4-Scout-17B-16E", "llama-4-scout"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b"),
        ("Qwen/Qwen2-VL-7B", "qwen2-vl-7b"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-VL-8B-Thinking", "qwen3-vl-8b"),
        ("QWEN/qwen3-4b-BASE", "qwen3-4b"),
        ("google/gemma-3-4b-pt", "gemma-3-4b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("allenai/OLMo-2-1124-7B-Instruct", "olmo-2-7b"),
        ("stabilityai/stablelm-2-1_6b", "stablelm-2-1.6b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama-3.1-8b"),
        ("EleutherAI/pythia-1b-deduped", "pythia-1b"),
        ("Qwen/Qwen3-Embedding-8B", "qwen3-embedding-8b"),
        ("answerdotai/ModernBERT-base", "modernbert-base"),
        ("google-bert/bert-base-uncased", "bert-base-uncased"),
        # an unknown word, another size, generation or kind
        ("someone/Llama-3.1-8B-Lexi-Uncensored", None),
        ("meta-llama/Llama-Guard-3-8B", None),
        ("meta-llama/Llama-3-4B", None),
        ("Qwen/Qwen2.5-9B", None),
        ("Qwen/Qwen2.5-7B-Instruct-1M", None),
        ("someone/Qwen3-8B-Lexi-FP8", None),
        ("Qwen/Qwen2.5-7B-Instruct-EXL2", None),
        ("unsloth/Meta-Llama-3.1-8B-unsloth-bnb-4bit", None),
        ("someone/Llama-3.1-8B-Lexi-Uncensored-AWQ", None),
        ("moonshotai/Kimi-K2-Thinking-GGUF", None),
        ("org/awq", None),
        ("Qwen/Qwen3-Reranker-8B", None),
        ("mistralai/Mixtral-8x22B-v0.1", None),
        ("moonshotai/Kimi-K2-Thinking", None),
        ("mistralai/Mistral-Small-Instruct-2409", None),  # 22B; mistral-small is the 24B's alias
        ("google/gemma-3", None),
        ("Alibaba-NLP/gte-modernbert-base", None),
        ("org/modernbert", None),
        ("org/8b", None),
        ("org/instruct", None),
    ],
)
def test_names(name: str, preset: str | None) -> None:
    assert find(name) == preset
    if preset is None:
        with pytest.raises(ConfigError):
            load_config(name)
    else:
        source = load_config(name)
        assert source.replace(note="", hub_id="") == load_config(preset).replace(hub_id="")
        assert source.hub_id == (name if "/" in name else load_config(preset).hub_id)
        assert source.note.startswith(f"{name} is counted as preset {source.name} (same ")


@pytest.mark.parametrize(
    ("name", "preset", "stored"),
    [
        ("Qwen/Qwen3-30B-A3B-FP8", "qwen3-30b-a3b", "fp8-block"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3-235b-a22b", "fp8-block"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b", "awq"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2.5-7b", "gptq"),
        ("nvidia/DeepSeek-R1-FP4", "deepseek-r1", "nvfp4"),
        ("nvidia/DeepSeek-R1-0528-FP4-v2", "deepseek-r1", "nvfp4"),
        ("amd/DeepSeek-R1-0528-MXFP4-Preview", "deepseek-r1", "mxfp4"),
        ("nvidia/Llama-3.3-70B-Instruct-FP8", "llama-3.3-70b", "fp8"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "llama-3.1-8b", "fp8"),
        ("RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16", "llama-3.1-70b", "gptq"),
        ("unsloth/DeepSeek-R1-BF16", "deepseek-r1", "bf16"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1", "fp8-block"),  # as its preset
    ],
)
def test_serving_takes_the_weights_of_a_quantized_release(name: str, preset: str, stored: str) -> None:
    source = load_config(name)
    assert (source.name, source.stored) == (preset, stored)


GIB = 2**30


@pytest.mark.parametrize(
    ("name", "preset", "gib", "words"),
    [
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b", 5.19, "AWQ in 4 bits"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2.5-7b", 5.19, "GPTQ in 4 bits"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "qwen2.5-7b", 8.25, "GPTQ in 8 bits"),
        ("TheBloke/Llama-2-13B-GPTQ", "llama-2-13b", 6.76, "GPTQ in 4 bits"),
        ("Qwen/Qwen2.5-VL-7B-Instruct-AWQ", "qwen2.5-vl-7b", 6.45, "AWQ in 4 bits"),
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "llama-3.1-8b", 5.31, "nf4"),
        ("RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8", "llama-3.1-70b", 67.67, "fp8"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama-3.1-8b", 5.33, "4 bits"),
        ("Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", "llama-3.1-8b", 4.58, "Q4_K_M"),
        ("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M", "llama-3.1-8b", 4.58, "Q4_K_M"),
        ("TheBloke/llama-2-13b-chat.Q4_K_M.gguf", "llama-2-13b", 7.33, "Q4_K_M"),
        ("Meta-Llama-3.1-8B-Instruct-Q8_0.gguf", "llama-3.1-8b", 7.95, "Q8_0"),
        ("Meta-Llama-3.1-8B-Instruct-Q4_0.gguf", "llama-3.1-8b", 4.33, "Q4_0"),
        ("someone/Meta-Llama-3.1-8B-Instruct-Q8_0-GGUF", "llama-3.1-8b", 7.95, "Q8_0"),
        ("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:IQ4_XS", "llama-3.1-8b", 4.13, "IQ4_XS"),
        ("Meta-Llama-3.1-8B-Instruct-F16.gguf", "llama-3.1-8b", 14.96, "fp16"),
        ("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "llama-3.1-8b", 14.96, "several files"),
        ("openai/gpt-oss-120b-GGUF", "gpt-oss-120b", 217.61, "several files"),
    ],
)
def test_quantized_releases(name: str, preset: str, gib: float, words: str) -> None:
    """A name of a quantized release counts its weights as such releases keep them, and the note says what was taken."""
    assert find(name) == preset
    estimate = estimate_flops(name, phase="decode", context=4096)
    assert sum(each.bytes + each.scale_bytes for each in estimate.weights) / GIB == pytest.approx(gib, abs=0.006)
    assert estimate.total == estimate_flops(preset, phase="decode", context=4096).total
    note = next(note for note in estimate.notes if note.startswith(f"{name} is counted as preset {preset} (same"))
    assert words in note


def test_a_given_format_wins_over_a_name() -> None:
    plain = estimate_flops("llama-3.1-8b", seq_len=8, weights="int8")
    assert estimate_flops("llama-3.1-8b-awq", seq_len=8, weights="int8").weights == plain.weights


def test_every_preset_is_found_by_its_own_names() -> None:
    """So no two presets are taken for one another."""
    for preset, path in list_data_files("presets").items():
        tables = load_toml(path)
        if "alias" not in tables:
            assert find(f"org/{preset}") == preset
            assert find(tables.get("hub_id", preset)) == preset


def test_rules_name_presets() -> None:
    rules = load_toml(f"{find_data_dir()}/hub_names.toml")
    presets = list_data_files("presets")
    for name, preset in rules["same"].items():
        assert preset in presets
        assert find(f"org/{name}") == preset
    assert not any(find(f"org/{name}") for name in rules["different"])


def test_the_note_is_in_the_estimate() -> None:
    estimate = estimate_flops("Qwen/Qwen2.5-0.5B-Instruct", seq_len=64)
    assert estimate.total == estimate_flops("qwen2.5-0.5b", seq_len=64).total
    assert estimate.notes[0] == "Qwen/Qwen2.5-0.5B-Instruct is counted as preset qwen2.5-0.5b (same layer sizes)"


ADAPTED = "unsloth/Llama-3.2-1B-Instruct is counted as preset llama-3.2-1b (same layer sizes)"


@pytest.mark.parametrize(
    "model", ["folder", "folder/adapter_config.json", "me/adapter"], ids=["folder", "file", "hub cache"]
)
def test_the_base_of_an_adapter_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    """In every door: the base counts as its preset, and the adapter's LoRA trains."""
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": "unsloth/Llama-3.2-1B-Instruct",
        "r": 8,
        "target_modules": ["q_proj"],
    }
    for place in ("folder", "models--me--adapter/snapshots/a"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    job = {"base_model": model, "micro_batch_size": 1, "sequence_len": 64}
    (tmp_path / "launch.json").write_text(json.dumps(job), encoding="utf-8")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    same = estimate_flops("llama-3.2-1b", seq_len=64, lora="r=8,targets=q_proj")
    assert ADAPTED in bind(model).source.note
    for found in (estimate_flops(model, seq_len=64), estimate_flops(launch="launch.json"), bind(model)(1, 64)):
        assert (found.total, found.parameters) == (same.total, same.parameters)
        assert any(ADAPTED in note for note in found.notes)
    for words in (("estimate", model), ("predict", model, "--device", "h200")):
        with pytest.raises(SystemExit):
            main([*words, "--seq", "64", "--json"])
        shown = json.loads(capsys.readouterr().out)
        assert any(ADAPTED in note for note in shown["notes"])
    given = {"model": model} if model == "me/adapter" else {"files": {"adapter_config.json": json.dumps(settings)}}
    page = json.loads(answer(json.dumps({"what": "flops", "setup": {**given, "seq": "64"}})))["estimate"]
    assert page["flops"]["total"] == same.total


def test_own_files_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that path, the hub's cache and the user's presets, in this order."""
    config = {**load_config("llama-3.2-1b").config, "num_hidden_layers": 3}
    own = tmp_path / "data" / "presets"
    own.mkdir(parents=True)
    (own / "llama-3.1-8b.toml").write_text('[config]\nmodel_type = "gpt2"\nn_layer = 2\n')
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path / "data"))
    assert load_config("meta-llama/Llama-3.1-8B").config == {"model_type": "gpt2", "n_layer": 2}
    cached = tmp_path / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "a"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text(json.dumps(config))
    assert load_config("meta-llama/Llama-3.1-8B").config["num_hidden_layers"] == 3
    folder = tmp_path / "meta-llama" / "Llama-3.1-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    monkeypatch.chdir(tmp_path)
    assert load_config("meta-llama/Llama-3.1-8B").config["num_hidden_layers"] == 5


def test_launch_ids(capsys: pytest.CaptureFixture[str]) -> None:
    found = {each.framework: each for each in load_launch_ids()}
    assert list(found)[:6] == ["axolotl", "LLaMA-Factory", "ms-swift", "TRL", "torchtitan", "hub: text-generation"]
    assert found["axolotl"].presets["NousResearch/Meta-Llama-3.1-8B"] == "llama-3.1-8b"
    assert "mosaicml/mpt-7b" in found["axolotl"].missing
    with pytest.raises(SystemExit):
        main(["models", "--coverage", "mpt-7b"])
    assert re.search(r"\nmosaicml/mpt-7b +-\n", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main(["models", "--coverage", "codellama-7b", "--json"])
    (shown,) = json.loads(capsys.readouterr().out)["launch_ids"]
    assert shown["presets"] == {"codellama/CodeLlama-7b-hf": "codellama-7b"}
