"""GGUF headers, adapters, configs without a type, and folders that lack one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from headers import HEADER, text, write_gguf

from flopcalc import bind, estimate_flops
from flopcalc.base.errors import ConfigError, RecipeError
from flopcalc.core.model.config import load_config

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "head_dim": 16,
}  # fmt: skip


def test_a_gguf_file_is_counted_from_its_header(tmp_path: Path) -> None:
    path = tmp_path / "model.Q8_0.gguf"
    tensors = {
        "token_embd.weight": ((64, 100), 8),
        "output.weight": ((64, 100), 8),
        "blk.0.attn_q.weight": ((64, 64), 8),
    }
    write_gguf(path, HEADER, tensors)
    found = estimate_flops(str(path), seq_len=8)
    assert (found.total, found.parameters) == (lambda e: (e.total, e.parameters))(estimate_flops(LLAMA, seq_len=8))
    assert any("GGUF" in note and "Q8_0" in note for note in found.notes)
    blocks = next(each for each in found.weights if each.format == "q8_0")
    assert blocks.total_bytes * 32 == blocks.parameters * 34
    assert estimate_flops(str(tmp_path), seq_len=8).total == found.total
    write_gguf(path, HEADER, {"token_embd.weight": ((64, 100), 1)})
    assert estimate_flops(str(path), seq_len=8).parameters["total"] == found.parameters["total"] - 6400


def test_a_gguf_file_of_several_shards(tmp_path: Path) -> None:
    """The first has the sizes, the last a head of its own; without the last, the family's default holds."""
    first, last = (tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2))
    write_gguf(first, HEADER, {"token_embd.weight": ((64, 100), 8), "blk.0.attn_q.weight": ((64, 64), 8)})
    write_gguf(last, {"split.count": 2}, {"output.weight": ((64, 100), 8)})
    wanted = estimate_flops(LLAMA, seq_len=8).parameters
    for path in (first, last, tmp_path):
        assert estimate_flops(str(path), seq_len=8).parameters == wanted
    last.unlink()
    assert any("without model-00002-of-00002.gguf" in note for note in estimate_flops(str(first), seq_len=8).notes)
    first.rename(last)
    with pytest.raises(ConfigError, match="the first of 2 shards has the model's sizes, and is not beside it"):
        bind(str(last))


def test_latent_attention_in_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    sizes = {
        "embedding_length": 64, "feed_forward_length": 96, "block_count": 2, "attention.head_count": 4,
        "attention.head_count_kv": 1, "attention.kv_lora_rank": 16, "attention.key_length": 24,
        "attention.key_length_mla": 20, "attention.value_length_mla": 10, "rope.dimension_count": 8,
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "leading_dense_block_count": 1,
    }  # fmt: skip
    values = {"general.architecture": "deepseek2", **{f"deepseek2.{key}": value for key, value in sizes.items()}}
    write_gguf(path, values, {"token_embd.weight": ((64, 100), 1), "output.weight": ((64, 100), 1)})
    config = load_config(str(path)).config
    assert (config["model_type"], config["qk_nope_head_dim"], config["v_head_dim"]) == ("deepseek_v3", 12, 10)
    assert estimate_flops(str(path), seq_len=8).parameters["total"] > 2 * 6400


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GGUF", "ends too early"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "GGUF version 9 is not known"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 10**9), "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 77), "type 77"),
        # An array of empty strings would take a minute, and one of bytes a gigabyte.
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 10**7),
            "more than 4000000 values",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 0, 10**8),
            "more than 4000000 values",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "GGUF architecture None is not known"),
        (b"GGUF" + struct.pack("<IQQ", 3, 10**6, 0), "damaged: 1000000 entries"),
        (
            b"GGUF"
            + struct.pack("<IQQ", 3, 0, 2)
            + text("general.architecture")
            + struct.pack("<I", 8)
            + text("llama")
            + text("llama.block_count")
            + struct.pack("<IIQIQI", 9, 9, 1, 4, 1, 2),
            "num_hidden_layers differs from layer to layer",
        ),
    ],
)
def test_damaged_gguf(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        bind(str(path))
    assert words in str(caught.value)


def test_a_config_without_model_type_is_taken_from_its_class() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    found = estimate_flops(config, seq_len=8)
    assert found.total == estimate_flops(LLAMA, seq_len=8).total
    assert "no model_type: taken as llama, from class LlamaForCausalLM" in found.notes
    body = estimate_flops({**config, "architectures": ["LlamaForSequenceClassification"]}, seq_len=8)
    assert body.terms[0].estimator.head == "sequence:2"
    with pytest.raises(ConfigError, match="is of no known family: model_type=TYPE"):
        estimate_flops({**config, "architectures": ["WhatForCausalLM"]}, seq_len=8)
    for unnamed in ({}, {1: 2}):
        with pytest.raises(ConfigError, match='no "model_type" and no "architectures"'):
            bind(unnamed)


def test_an_adapter_names_its_base(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    (base / "config.json").write_text(json.dumps(LLAMA))
    settings = {"base_model_name_or_path": str(base), "peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    found = estimate_flops(str(adapter), seq_len=8)
    assert found.total == estimate_flops(LLAMA, seq_len=8, lora="r=4,targets=q_proj").total
    assert any("LoRA r=4 on q_proj" in note for note in found.notes)
    assert estimate_flops(str(adapter), seq_len=8, lora="r=8,targets=q_proj").total > found.total
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "target_parameters": ["experts.down_proj"]}))
    with pytest.raises(RecipeError, match=r"lora target 'experts\.down_proj' matches no module"):
        estimate_flops(str(adapter), seq_len=8)
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 4}))
    with pytest.raises(ConfigError, match="an adapter without its base"):
        bind(str(adapter))


def test_folders_without_a_config(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="only a processor or tokenizer"):
        bind(str(tmp_path))


def test_a_foreign_type_gets_the_nearest_family() -> None:
    with pytest.raises(ConfigError, match='The nearest family is llama: model_type="llama" counts it so'):
        bind({**LLAMA, "model_type": "sardine", "architectures": ["SardineForCausalLM"]})
    with pytest.raises(ConfigError, match='model_type="qwen2" counts it so'):
        bind({**LLAMA, "model_type": "sardine", "architectures": ["Qwen2ForCausalLM"]})
    with pytest.raises(ConfigError, match="text_config is a llama: save that object as a config"):
        bind({"model_type": "sardine", "architectures": ["SardineModel"], "text_config": LLAMA})


TEXT = {"model_type": "qwen2", **{key: LLAMA[key] for key in LLAMA if key not in ("model_type", "architectures")}}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"text_config": TEXT, "vision_config": {"model_type": "siglip_vision_model", **TOWER}}, 'model_type="llava" '),
        ({"llm_config": TEXT, "vision_config": {"model_type": "intern_vit_6b", **TOWER}}, 'model_type="internvl_chat"'),
        ({"text_config": TEXT, "vision_config": {"model_type": "unheard"}}, "`flopcalc models` lists"),
    ],
)
def test_a_foreign_type_with_images_gets_a_family_that_takes_any_tower(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bind({"model_type": "foovl", **config})
    assert words in str(caught.value)
    assert "trace=True counts it from HF's own code if transformers has it" in str(caught.value)


def test_the_processor_s_own_file_comes_first(tmp_path: Path) -> None:
    """transformers 5.22: image_processing_base.py, get_image_processor_dict."""
    tower = {"depth": 1, "embed_dim": 32, "num_heads": 4, "hidden_size": 64, "patch_size": 14}
    config = {**TEXT, "model_type": "qwen2_vl", "vision_config": tower}
    del config["head_dim"]
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 784, "max_pixels": 784 * 100}))

    def cut() -> Any:
        vision = bind(tmp_path).vision
        assert vision is not None
        return vision.grid_of_pixels(1400, 1400, load_config(tmp_path).preprocessor)[0]

    assert cut() == (1, 20, 20)
    whole = tmp_path / "processor_config.json"
    whole.write_text(json.dumps({"processor_class": "Qwen2VLProcessor"}))
    assert cut() == (1, 20, 20)
    whole.write_text(json.dumps({"image_processor": {"min_pixels": 784, "max_pixels": 784 * 25}}))
    assert cut() == (1, 10, 10)


@pytest.mark.parametrize(
    ("task", "head"),
    [("SEQ_CLS", "sequence:2"), ("TOKEN_CLS", "token:2"), ("FEATURE_EXTRACTION", "none"), (None, "lm")],
)
def test_an_adapter_s_task_says_the_head(tmp_path: Path, task: str | None, head: str) -> None:
    for name in ("base", "adapter"):
        (tmp_path / name).mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(LLAMA))
    settings = {"base_model_name_or_path": str(tmp_path / "base"), "r": 4, "target_modules": ["q_proj"]}
    saved = ["classifier", "score"] if head[:3] in ("seq", "tok") else None  # as PEFT writes it
    settings |= {"task_type": task, "modules_to_save": saved}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    found = estimate_flops(str(tmp_path / "adapter"), seq_len=8)
    assert found.total == estimate_flops(LLAMA, seq_len=8, lora="r=4,targets=q_proj", head=head).total
    assert found.terms[0].estimator.head == head


def test_an_adapter_of_an_adapter_is_refused(tmp_path: Path) -> None:
    for name, base in (("a", "b"), ("b", "a"), ("own", "link")):
        (tmp_path / name).mkdir()
        settings = {"base_model_name_or_path": str(tmp_path / base), "r": 4, "target_modules": ["q_proj"]}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "link").symlink_to(tmp_path / "own")
    for name in ("a", "own"):
        with pytest.raises(ConfigError, match=r"its base: .*an adapter too; give base_model_name_or_path of a whole"):
            bind(str(tmp_path / name))


def test_a_pipeline_reads_no_other_folder(tmp_path: Path) -> None:
    names = ("pipe", "pipe/unet", "outside")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"from": name}))
    parts = ("unet", "../outside", str(tmp_path / "outside"), "unet/", "..", "")
    entries = {name: ["diffusers", "X"] for name in parts}
    (tmp_path / "pipe" / "model_index.json").write_text(json.dumps({"_class_name": "XPipeline", **entries}))
    config = load_config(str(tmp_path / "pipe")).config
    assert {key: value for key, value in config.items() if isinstance(value, dict)} == {
        "unet": {"from": "pipe/unet", "_class_name": "X"}
    }
