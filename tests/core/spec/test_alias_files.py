"""Aliases: key maps from foreign configs to known families, what they refuse, and --model-type."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flopcalc import bind, estimate_flops
from flopcalc.base.data import list_data_files
from flopcalc.base.errors import ConfigError, FlopcalcError, SpecError, WorkloadError
from flopcalc.cli import main
from flopcalc.core.model.config import load_config
from flopcalc.core.spec.aliases import find_alias, list_types, load_alias, map_config
from flopcalc.core.spec.spec import load_spec

Json = dict[str, Any]
TINY: Json = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
QWEN: Json = {**TINY, "model_type": "qwen", "intermediate_size": 96, "kv_channels": 8, "seq_length": 64}

DINO, SIGLIP = "vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"
OPENVLA: Json = {
    "model_type": "openvla",
    "timm_model_ids": [DINO, SIGLIP],
    "image_sizes": [224, 224],
    "text_config": TINY,
    "use_fused_vision_backbone": True,
}


def test_every_file_is_read_and_names_a_known_family() -> None:
    for path in list_data_files("aliases").values():
        alias = load_alias(path)
        assert list_data_files("specs").keys() | list_data_files("aliases").keys() >= {alias.extends, *alias.cases}


def test_keys_are_renamed_computed_and_constant() -> None:
    config, notes = map_config({**QWEN, "architectures": ["QWenLMHeadModel"]}, "config")
    assert config["model_type"] == "qwen2"
    assert config["intermediate_size"] == 48
    assert config["num_key_value_heads"] == 4
    assert config["max_position_embeddings"] == 64
    assert config["use_sliding_window"] is False
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert notes == ["model_type qwen is counted as qwen2"]


def test_inner_configs_are_mapped_too() -> None:
    tower = {"model_type": "intern_vit_6b", "hidden_size": 32, "num_attention_heads": 4, "qkv_bias": True}
    text = {**TINY, "model_type": "internlm2", "bias": False}
    config, notes = map_config({"model_type": "internvl_chat", "llm_config": text, "vision_config": tower}, "config")
    assert config["text_config"]["model_type"] == "llama"
    assert config["vision_config"]["model_type"] == "internvl_vision"
    assert config["vision_config"]["attention_bias"] is True
    assert config["vision_config"]["intermediate_size"] == 12800
    assert notes == ["model_type internvl_chat is counted as internvl"]


def test_rotary_positions_tell_jina_s_model_from_the_plain_one() -> None:
    config = {**TINY, "model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "max_position_embeddings": 64}
    config["type_vocab_size"] = 1
    plain, rotary = (bind({**config, "position_embedding_type": kind}) for kind in ("absolute", "rotary"))
    assert plain.parameters()["total"] - rotary.parameters()["total"] == 64 * 32
    assert rotary(1, 16).total == plain(1, 16).total


def test_a_known_config_stays_as_it_is() -> None:
    config = {**TINY, "model_type": "llama"}
    assert map_config(config, "config")[0] is config


def test_modules_have_the_names_of_the_published_code() -> None:
    estimate = estimate_flops({**TINY, "model_type": "internlm2", "bias": False}, seq_len=16, lora="r=2,targets=wqkv")
    assert estimate.parameters["trainable"] == 2 * 2 * (32 + 96)


def test_a_wrapper_is_its_inner_config() -> None:
    inner = {"model_type": "x", "hidden_size": 3}
    config, _ = map_config({"model_type": "qwen3_omni_moe", "thinker_config": inner, "dtype": "bfloat16"}, "config")
    assert config["model_type"] == "qwen3_omni_moe_thinker"
    assert (config["hidden_size"], config["dtype"]) == (3, "bfloat16")
    with pytest.raises(ConfigError, match="missing key 'thinker_config', which 'qwen3_omni_moe' needs"):
        map_config({"model_type": "qwen3_omni_moe"}, "config")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"dim": 32, "n_layers": 2, "n_heads": 4, "multiple_of": 8, "vocab_size": 9}, "llama"),
        ({"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 9}, "mistral"),
        ({"d_model": 32, "n_layer": 2, "ssm_cfg": {}, "vocab_size": 9}, "mamba"),
        ({"d_model": 32, "n_layer": 2, "ssm_cfg": {"layer": "Mamba2"}, "vocab_size": 9}, "mamba2"),
    ],
)
def test_keys_tell_a_config_without_type_and_class(config: Json, kind: str) -> None:
    source = load_config(config)
    assert source.config["model_type"] == kind
    assert f"no model_type: taken as {kind.rstrip('2')}_native, by its keys" in source.note


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"medusa_num_heads": 5}, "missing keys 'hidden_size', 'vocab_size', which 'medusa' needs"),
        ({"dim": 32, "n_layers": 2, "n_heads": 4, "multiple_of": 8, "vocab_size": -1}, "vocab_size -1 in params.json"),
        ({**TINY, "rope_theta": 1e4}, 'no .architectures.: model_type="llama" would count it as the family that its'),
        ({**TINY, "model_type": "hymba", "mamba_d_state": 16}, r"'hymba' has no spec\.(?! The nearest)"),
        ({**TINY, "model_type": "bert", "feed_forward_type": "geglu"}, "a gated MLP and ALiBi .jina-embeddings-v2"),
        ({**TINY, "model_type": "minicpm", "head_multi": True}, "heads on several layers .head_multi of a layerwise"),
        ({**TINY, "model_type": "qwen3", "dflash_config": {}}, "missing key 'block_size', beside or inside dflash"),
    ],
)
def test_what_is_missing_is_said(config: Json, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bind(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"timm_model_ids": [DINO, "vit_large_patch14_clip_336.openai"]}, "_384 are described as towers"),
        ({"timm_model_ids": [DINO, "vit_so400m_patch14_siglip_gap_224"]}, "_384 are described as towers"),
        ({"timm_model_ids": [DINO], "image_sizes": [224]}, "must have an entry for each tower"),
        ({"image_sizes": [224, 384]}, "both towers must have the same number of patches"),
        ({"use_fused_vision_backbone": None}, "missing key 'use_fused_vision_backbone'"),
        ({"image_sizes": 224}, "image_sizes must be a list of whole numbers, not 224"),
        ({"image_sizes": [224, "224"]}, r"image_sizes must be a list of whole numbers, not \[224, '224'\]"),
        ({"timm_model_ids": DINO}, f"timm_model_ids must be a list of words, not '{DINO}'"),
        ({"use_fused_vision_backbone": "yes"}, "use_fused_vision_backbone must be true or false, not 'yes'"),
        ({"text_config": 5}, "text_config must be an object, not 5"),
    ],
)
def test_towers_that_are_only_named_are_known_or_refused(changes: Json, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bind({**OPENVLA, **changes})


def test_openvla_reads_one_image() -> None:
    assert estimate_flops(OPENVLA, seq_len=280, images=[(640, 480)]).total > 0
    with pytest.raises(WorkloadError, match="2 images: a sample has at most 1"):
        estimate_flops(OPENVLA, seq_len=560, images=[(640, 480)] * 2)


def test_the_first_tower_alone_has_a_projector_of_two_layers() -> None:
    both, one = (bind({**OPENVLA, "use_fused_vision_backbone": fused}).parameters()["total"] for fused in (True, False))
    siglip = 427_680_704  # 427.68M in the tables of timm
    assert both - one == siglip + (2176 + 1) * 8704 + (8704 + 1) * 32 - (1024 + 1) * 32


DFLASH: Json = {**TINY, "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "block_size": 4}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"block_size": 1}, "block_size must be a whole number of 2 or more"),
        ({"block_size": 2.5}, "block_size must be a whole number, not 2.5"),
        ({"architectures": ["DFlash2DraftModel"], "dflash_config": {}}, "only DFlash drafts of class DFlashDraftModel"),
        ({"dflash_config": {"projector_type": "domino"}}, "dflash_config holds a key that is not described"),
        ({"dflash_config": "abc"}, "dflash_config must be an object, not 'abc'"),
        ({"dflash_config": [1]}, r"dflash_config must be an object, not \[1\]"),
        ({"dflash_config": {"block_size": "4"}}, "dflash_config.block_size must be a whole number, not '4'"),
        ({"dflash_config": {"target_layer_ids": 3}}, "target_layer_ids must be a list of whole numbers, not 3"),
        ({"dflash_config": {"target_layer_ids": [1.5]}}, r"must be a list of whole numbers, not \[1.5\]"),
        ({"dflash_config": {"causal": "no"}}, "dflash_config.causal must be true or false, not 'no'"),
        ({"dflash_config": {"mask_token_id": "x"}}, "dflash_config.mask_token_id must be a whole number, not 'x'"),
        ({"block_size": 1}, r"block_size must be a whole number of 2 or more: .* \(block is 1\)"),
        ({"layer_types": 5}, "layer_types must be a list of words, not 5"),
        ({"architectures": 5}, r"which model of qwen3 this is cannot be told \(architectures is 5\)"),
        ({"dflash_config": {"target_layer_ids": []}}, "fc in = features . target is 0"),
        ({"dflash_config": {"causal": True}}, "only DFlash drafts that see a block both ways"),
        ({"is_causal": True}, "only DFlash drafts that see a block both ways"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "only DFlash drafts without windows"),
        ({"use_sliding_window": True}, "only DFlash drafts without windows"),
        ({"add_swa_attention_sink_bias": True}, "only DFlash drafts without sinks"),
        ({"draft_vocab_size": 8}, "only DFlash drafts of the target's own vocabulary"),
    ],
)
def test_what_dflash_refuses(changed: Json, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bind({**DFLASH, **changed})


@pytest.mark.parametrize("head", ["none", "sequence", "token", "value"])
def test_a_draft_has_no_other_head(head: str) -> None:
    with pytest.raises(ConfigError, match="a draft runs the target's head"):
        estimate_flops(DFLASH, seq_len=8, head=head)


@pytest.mark.parametrize(
    "changed",
    [
        {"dflash_config": {}},
        {"dflash_config": {"block_size": 4, "mask_token_id": None, "causal": False}, "block_size": 9},
        {"dflash_config": {"target_layer_ids": [1] * TINY["num_hidden_layers"]}, "architectures": None},
        {"target_layer_ids": [1] * TINY["num_hidden_layers"]},
        {"model_type": "dflash", "architectures": None},
    ],
)
def test_dflash_configs_that_mean_the_same(changed: Json) -> None:
    plain = estimate_flops(DFLASH, seq_len=8)
    same = estimate_flops({**DFLASH, **changed}, seq_len=8)
    assert (same.total, same.parameters) == (plain.total, plain.parameters)


def test_missing_keys_are_named_in_one_line() -> None:
    with pytest.raises(ConfigError, match="missing keys 'hidden_size', 'n_layer', 'n_head', which 'RefinedWeb' needs"):
        bind({"model_type": "RefinedWeb", "vocab_size": 96})


def test_model_type_says_the_family() -> None:
    config = {**TINY, "model_type": "my_llama"}
    assert bind(config, model_type="llama").parameters() == bind({**TINY, "model_type": "llama"}).parameters()
    assert bind({key: value for key, value in config.items() if key != "model_type"}, model_type="llama")
    assert bind({**QWEN, "model_type": "other"}, model_type="qwen").parameters() == bind(QWEN).parameters()
    estimate = estimate_flops(config, model_type="qwen2", seq_len=16)
    assert estimate.parameters == bind({**TINY, "model_type": "qwen2"}).parameters()


@pytest.mark.parametrize(
    ("config", "model_type", "words"),
    [
        ({"hidden_size": 3}, "llama", "missing keys 'intermediate_size', 'num_hidden_layers', .* which 'llama' needs"),
        (TINY, "lama", "model_type 'lama': no spec or alias of that name. Did you mean llama"),
        ({**TINY, "model_type": "llama"}, "chatglm", "missing keys 'ffn_hidden_size', 'num_layers', .*'chatglm' needs"),
    ],
)
def test_model_type_checks_the_keys(config: Json, model_type: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(config, model_type=model_type)


def test_a_traced_module_takes_no_model_type() -> None:
    with pytest.raises(FlopcalcError, match="leave model_type out with example_batch"):
        bind(object(), {"x": 1}, model_type="llama")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('extends = "llama"', 'needs extends = "…", a known model type, and source'),
        ('extends = "llama"\nsource = "x"\nextend = 1', "unknown key 'extend'. Did you mean extends"),
        ('extends = "llama"\nsource = "x"\n[kinds]\na = "integer"', "'integer' is none of int, number"),
        ('extends = "llama"\nsource = "x"\n[keys]\na = "import os"', "not an expression: 'import os'"),
        ('extends = "llama"\nsource = "x"\nrequired = "a"', "required must be a list of config keys"),
        ('extends = 3\nsource = "x"', "extends must be a string"),
        ('extends = "llama"\nsource = "x"\nkeys = 3', r"\[keys\] must be a table"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=words):
        load_alias(str(path))


def test_a_users_own_spec_wins(tmp_path: Path) -> None:
    spec = tmp_path / "internlm2.toml"
    spec.write_text('extends = "llama"\nsource = "mine"\n[dims]\nff = "1"\n', encoding="utf-8")
    own = bind({**TINY, "model_type": "internlm2"}, spec=str(spec))
    assert own.spec.name == "internlm2"
    assert own.source.config["model_type"] == "internlm2"


def test_aliases_of_each_other_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "aliases"
    folder.mkdir()
    for name, like in (("one", "two"), ("two", "one")):
        (folder / f"{name}.toml").write_text(f'extends = "{like}"\nsource = "x"\n', encoding="utf-8")
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="aliases lead to one another"):
        map_config({"model_type": "one"}, "config")


def test_an_alias_may_say_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier name of `extends`, in files that users wrote."""
    (tmp_path / "aliases").mkdir()
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    for word in ("like", "extends"):
        text = f'{word} = "llama"\nsource = "x"\n[spec.blocks]\nattention = [{{ drop = "self_attn.o_proj" }}]\n'
        (tmp_path / "aliases" / f"my_{word}.toml").write_text(text, encoding="utf-8")
    counts = {
        word: estimate_flops({**TINY, "model_type": f"my_{word}"}, seq_len=16).total for word in ("like", "extends")
    }
    assert counts["like"] == counts["extends"] < estimate_flops({**TINY, "model_type": "llama"}, seq_len=16).total


def test_commands_take_a_model_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**TINY, "model_type": "mine"}), encoding="utf-8")

    def run(*arguments: str) -> Any:
        with pytest.raises(SystemExit):
            main([*arguments, "--seq", "16", "--json"])
        return json.loads(capsys.readouterr().out)

    wanted = estimate_flops({**TINY, "model_type": "llama"}, seq_len=16).total
    assert run("estimate", str(path), "--as", "llama")["flops"]["total"] == wanted
    assert run("estimate", str(path), "--model-type", "llama")["flops"]["total"] == wanted
    assert run("compare", f"{path}@model_type=llama")[0]["flops"]["total"] == wanted


def test_experts_tell_yuan_apart() -> None:
    """Both of its models say model_type yuan; with experts it is Yuan2.0-M32."""
    experts = {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 20, "gated_linear_unit": True}
    config = {**TINY, "model_type": "yuan", "max_position_embeddings": 64}
    assert bind(config).source.config["model_type"] == "llama"
    assert bind({**config, "moe_config": experts}).spec.name == "yuan_m32"


@pytest.mark.parametrize(("convention", "rows"), [("model", (1, 1)), ("full", (4, 3))])
def test_yuan_filters_two_states_again(convention: str, rows: tuple[int, int]) -> None:
    """A decoded token: yuan_hf_model.py cuts the padded rows off behind each convolution."""
    made = estimate_flops({**TINY, "model_type": "yuan"}, seq_len=1, context=5, phase="decode", convention=convention)
    found = {row.path[-5:]: row.forward for row in made.by_module(per_layer=True) if ".0.self_attn.lf_gate" in row.path}
    per_row = 2 * 2 * TINY["hidden_size"] * (TINY["hidden_size"] // 2)
    assert (found["conv1"], found["conv2"]) == (rows[0] * per_row, rows[1] * per_row)


def test_types_to_suggest_are_models_by_themselves() -> None:
    """A suggestion may be written with --model-type: it is no part of a spec and no variant."""
    types = list_types()
    assert {"llama", "eagle3", "FluxTransformer2DModel", "deberta-v2"} <= set(types)
    specs = {name: load_spec(path) for name, path in list_data_files("specs").items()}
    assert not [name for name in types if find_alias(name) is None and specs[name].is_tower and not specs[name].latents]
    assert not {"swin_backbone", "detr-body", "bert-causal", "bert-vision", "T5EncoderModel"} & set(types)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("swin_backbon", "no spec or alias of that name. Did you mean swin?"),
        ("detr-bodies", "no spec or alias of that name. Did you mean detr, "),
        ("eagle33", "no spec or alias of that name. Did you mean eagle3, "),
    ],
)
def test_types_that_nothing_is_named(written: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        estimate_flops(TINY, seq_len=8, model_type=written)
