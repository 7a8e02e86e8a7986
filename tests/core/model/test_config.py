"""A model given as name, path, folder, hub id, mapping or config object; and every way that this can fail."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hostile import OddPath
from presets import MODELS, make_sizes

from flopcalc import ConfigError, FlopcalcError, bind, make_workload
from flopcalc.base.data import list_data_files
from flopcalc.core.model.config import load_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
}


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


# --- presets ----------------------------------------------------------------------------------------------------------
def test_at_least_forty_presets() -> None:
    assert len(list_data_files("presets")) >= 40


@pytest.mark.parametrize("name", MODELS)
def test_every_preset_binds_and_names_its_source(name: str) -> None:
    source = load_config(name)
    assert source.reference
    estimator = bind(source)
    estimate = estimator(1, **make_sizes(estimator, 8, 8))
    assert estimate.total > 0
    assert estimate.parameters["active"] <= estimate.parameters["total"]
    # HF itself freezes a few weights (sinusoids, codebooks): nearly all of a model trains, not always all.
    assert 0.9 * estimate.parameters["total"] < estimate.parameters["trainable"] <= estimate.parameters["total"]


# Published totals (model cards): nothing rounds here, so a wrong dim shows.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-2-7b", 6_738_415_616),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("gpt2", 124_439_808),
        ("qwen2-vl", 8_291_375_616),
        ("qwen2.5-7b", 7_615_616_512),
        ("gemma-2-2b", 2_614_341_888),
    ],
)
def test_published_parameter_counts(name: str, parameters: int) -> None:
    assert bind(name).parameters()["total"] == parameters


def test_preset_names_ignore_case_and_aliases_lead_to_a_size() -> None:
    assert load_config("Qwen2-VL").name == "qwen2-vl-7b"
    assert load_config("LLAMA-3.1-8B").config == load_config("llama-3.1-8b").config


def test_user_presets_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    (tmp_path / "presets").mkdir()
    config = "\n".join(f"{key} = {json.dumps(value)}" for key, value in LLAMA.items())
    (tmp_path / "presets" / "gpt2.toml").write_text(f"source = 'mine'\nnull_keys = ['head_dim']\n[config]\n{config}\n")
    source = load_config("gpt2")
    assert source.config == {**LLAMA, "head_dim": None}
    assert source.reference == "mine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = [", "not valid TOML"),
        ("source = 's'", "needs a [config] table"),
        ("config = 5", "needs a [config] table"),
        ("alias = 'absent'", "alias of 'absent', which is no preset"),
        ("alias = 'mine'", "needs a [config] table"),
        ("[config]\nhidden_size = 3", 'no "model_type" and no "architectures"'),
        ("null_keys = 5\n[config]\nmodel_type = 'llama'", "null_keys must be a list"),
        ("preprocessor = 5\n[config]\nmodel_type = 'llama'", "[preprocessor] must be a table"),
    ],
)
def test_bad_user_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "mine.toml").write_text(text)
    with pytest.raises(FlopcalcError) as caught:
        load_config("mine")
    assert words in str(caught.value)


# --- paths ------------------------------------------------------------------------------------------------------------
def test_file_folder_and_mapping_agree(tmp_path: Path) -> None:
    path = write(tmp_path / "config.json", LLAMA)
    expected = bind(LLAMA)(2, 7)
    for model in (path, str(path), tmp_path, str(tmp_path)):
        estimate = bind(model)(2, 7)
        assert (estimate.forward, estimate.backward) == (expected.forward, expected.backward)
    assert load_config(tmp_path).name == tmp_path.name
    assert load_config(path).preprocessor is None


def test_preprocessor_beside_the_config(tmp_path: Path) -> None:
    write(tmp_path / "config.json", LLAMA)
    write(tmp_path / "preprocessor_config.json", {"min_pixels": 1})
    assert load_config(tmp_path).preprocessor == {"min_pixels": 1}
    assert load_config(tmp_path / "config.json").preprocessor == {"min_pixels": 1}


def test_user_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "config.json", LLAMA)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config("~/config.json").config == LLAMA


def test_hub_id_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--name"
    for commit, width in (("aaa", 24), ("bbb", 48)):
        (folder / "snapshots" / commit).mkdir(parents=True)
        write(folder / "snapshots" / commit / "config.json", {**LLAMA, "hidden_size": width})
    assert load_config("org/name").config["hidden_size"] == 48
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("aaa\n")
    source = load_config("org/name")
    assert (source.name, source.config["hidden_size"]) == ("org/name", 24)
    with pytest.raises(ConfigError, match="and has no preset; download=True fetches it"):
        load_config("org/other")


def test_a_hub_id_with_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache first, the preset next; `download` asks the hub instead."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for hub_id in ("meta-llama/Llama-3.1-8B-Instruct", "META-LLAMA/llama-3.1-8b-instruct"):
        source = load_config(hub_id)
        assert source.replace(note="") == load_config("llama-3.1-8b").replace(hub_id=hub_id)
        assert source.note == f"{hub_id} is counted as preset llama-3.1-8b (same config)"
        assert bind(hub_id).estimate(make_workload(1, 8)).notes[0] == source.note
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ConfigError, match=r"pip install .*\[hub\]'; without download=True, preset llama-3.1-8b is used"
    ):
        load_config("meta-llama/Llama-3.1-8B-Instruct", download=True)
    folder = tmp_path / "models--meta-llama--Llama-3.1-8B-Instruct" / "snapshots" / "aaa"
    folder.mkdir(parents=True)
    write(folder / "config.json", LLAMA)
    assert load_config("meta-llama/Llama-3.1-8B-Instruct").config == LLAMA


def test_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub alone is asked, for config.json and what image and video processors have beside it."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    asked = []

    def download(hub_id: str, name: str) -> str:
        asked.append((hub_id, name))
        if name.startswith("video_"):
            raise OSError("404")
        write(tmp_path / name, LLAMA if name == "config.json" else {"min_pixels": 3})
        return str(tmp_path / name)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(hf_hub_download=download))
    source = load_config("org/name", download=True)
    assert (source.name, source.config, source.reference) == ("org/name", LLAMA, "downloaded from org/name")
    assert source.preprocessor == source.video_preprocessor == {"min_pixels": 3}
    names = ("config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
    assert asked == [("org/name", name) for name in names]

    def fail(hub_id: str, name: str) -> str:
        raise OSError(f"{hub_id} {name}: no such repository")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(hf_hub_download=fail))
    with pytest.raises(ConfigError, match=r"download failed: org/name config\.json: no such repository"):
        load_config("org/name", download=True)

    def have_adapter(hub_id: str, name: str) -> str:
        if name != "adapter_config.json":
            raise OSError(f"{hub_id} {name}: no such file")
        write(tmp_path / name, {"base_model_name_or_path": "gpt2", "r": 4, "target_modules": ["c_attn"]})
        return str(tmp_path / name)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(hf_hub_download=have_adapter))
    adapter = load_config("org/name", download=True)
    assert (adapter.name, adapter.config, (adapter.lora or {})["r"]) == ("org/name", load_config("gpt2").config, 4)


def test_a_modular_pipeline_is_downloaded_with_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    said = {"pretrained_model_name_or_path": "org/parts", "subfolder": "inner", "type_hint": ["diffusers", "X"]}
    held = {
        ("org/name", "modular_model_index.json"): {"_class_name": "XModularPipeline", "unet": [None, None, said]},
        ("org/parts", "inner/config.json"): {"width": 3},
    }

    def download(hub_id: str, name: str) -> str:
        path = tmp_path / f"models--{hub_id.replace('/', '--')}" / "snapshots" / "a" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if (hub_id, name) not in held:
            raise OSError("404")
        write(path, held[hub_id, name])
        return str(path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(hf_hub_download=download))
    source = load_config("org/name", download=True)
    assert source.config["unet"] == {"_class_name": "X", "width": 3}
    assert load_config("org/name").config == source.config  # from the cache


# --- objects ----------------------------------------------------------------------------------------------------------
class FakeConfig:
    def to_dict(self) -> dict[str, Any]:
        return LLAMA


def test_config_object() -> None:
    source = load_config(FakeConfig())
    assert (source.name, source.config) == ("FakeConfig", LLAMA)
    assert load_config(source) is source


@pytest.mark.parametrize("model", [None, 5, [], object(), b"llama"])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(ConfigError, match="a model is a preset's name, a path"):
        load_config(model)


class Own:
    """A torch module, as far as it is looked at."""

    def named_parameters(self) -> list[object]:
        return []


def test_a_module_of_ones_own_is_traced() -> None:
    with pytest.raises(ConfigError, match=r"Own is a module without a config: bind\(module, example_batch\)"):
        load_config(Own())


def test_what_claims_to_be_a_path() -> None:
    with pytest.raises(ConfigError, match="a model must be a path, not a OddPath"):
        load_config(OddPath())


def test_model_whose_config_has_no_to_dict() -> None:
    class Model:
        config = object()

        def named_parameters(self) -> list[Any]:
            return []

    with pytest.raises(ConfigError, match="no to_dict"):
        load_config(Model())


# --- what cannot be read ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ('{"a": 1,}', "not valid JSON"),
        ("[1, 2]", "holds a list, not an object"),
        ('"llama"', "holds a str, not an object"),
        ("null", "holds a NoneType, not an object"),
        ("[" * 100_000, "not valid JSON"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "not valid JSON"),
        ("{}", 'no "model_type" and no "architectures": model_type=TYPE says which family it is'),
        ('{"model_type": 5}', 'needs "model_type", a string; found 5'),
        ('{"model_type": ""}', 'needs "model_type"'),
        ('{"model_type": "lama"}', "model_type 'lama' has no spec. Did you mean llama"),
        ('{"model_type": "swin_backbon"}', "has no spec. Did you mean swin? `flopcalc models`"),
        ('{"model_type": "detr-bodies"}', "has no spec. Did you mean detr, "),
        ('{"model_type": "FluxTransformer3DModel"}', "has no spec. Did you mean FluxTransformer2DModel"),
        ('{"model_type": "../specs/llama"}', "has no spec"),
        ('{"model_type": "pixtral"}', "a part of other models, not one by itself"),
    ],
)
def test_bad_json(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path / "config.json", text)
    with pytest.raises(ConfigError) as caught:
        bind(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500


def test_json_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ConfigError, match=r"config.json: not UTF-8 text: invalid start byte at byte 16"):
        bind(tmp_path)


def test_huge_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "config.json", LLAMA)
    monkeypatch.setattr("flopcalc.core.model.config.MAX_JSON_BYTES", 50)
    with pytest.raises(ConfigError, match="larger than 50 bytes"):
        bind(path)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config.json in this folder"):
        bind(tmp_path)


def test_file_that_fails_while_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "config.json", LLAMA)

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        load_config(path)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("qwen2-vll", "Did you mean qwen2-vl"),
        ("stable-diffusion-1.5", "Did you mean sd-1.5, "),  # by its hub id
        ("GPT3", "Did you mean gpt-3, "),
        ("llama-3.1-4", "Did you mean llama-3.1-405b, "),
        ("Qwen/Qwen3-8B-Lexi", "has no preset; download=True fetches it. Did you mean qwen3-8b"),
        ("", "name is empty"),
        ("a\0b", "NUL"),
        ("./absent/config.json", "no such file or folder"),
        ("absent.json", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
        ("org/name", "download=True fetches it"),
        ("x" * 5000, "no preset, file or folder"),
        ("XLM-RoBERTa-base", "Models of type xlm-roberta are counted from their config.json"),
        ("t5-11b", "Did you mean t5-v1.1-xl, t5-base? Models of type t5 are counted"),
        ("facebook/hubert-large-ls960-ft", "has no preset; download=True fetches it."),
        ("qwen3-9b", "Did you mean qwen3"),
        ("\udc80", "no preset, file or folder"),
    ],
)
def test_unknown_names(model: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        load_config(model)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


# --- keys -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("key", [key for key in LLAMA if key != "model_type"])
def test_missing_key(key: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != key}
    with pytest.raises(ConfigError, match=rf"missing key '{key}', which 'llama' needs\.$"):
        bind(config)
    with pytest.raises(ConfigError, match=f"missing key '{key}'"):
        bind({**config, key: None})
    with pytest.raises(ConfigError, match=rf"Is your {key}x the {key}\?"):
        bind({**config, f"{key}x": 1})


def test_all_missing_keys_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        bind({"model_type": "llama", "hidden_size": 64, "num_layers": 2, "num_attention_heads": 2, "vocab": 100})
    assert str(caught.value) == (
        "config: missing keys 'intermediate_size', 'num_hidden_layers', 'vocab_size', which 'llama' needs. Is your "
        "vocab the vocab_size? Is your num_layers the num_hidden_layers?"
    )


MISTYPED = ["4096", True, 1.5, 24.0, [], {}, -1, "", float("nan"), 10**5000, object(), b"1"]


@pytest.mark.parametrize("key", [key for key in LLAMA if key != "model_type"])
@pytest.mark.parametrize("value", MISTYPED, ids=[type(value).__name__ for value in MISTYPED])
def test_mistyped_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        bind({**LLAMA, key: value})
    message = str(caught.value)
    assert message.startswith("config: ")
    assert len(message) < 300


@pytest.mark.parametrize("value", ["false", "no", 0.0, [], {}])
@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_mistyped_flag(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be true or false, not|is neither true nor false"):
        bind({**LLAMA, key: value})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "max_position_embeddings": "x"}, "max_position_embeddings must be a positive whole number, not 'x'"),
        ({**LLAMA, "num_attention_heads": 0}, "hidden_size must be a multiple of num_attention_heads"),
        ({**LLAMA, "model_type": "gemma2", "layer_types": ["x"]}, "layer_types holds a kind of attention"),
        ({**LLAMA, "model_type": "gemma2", "layer_types": ["full_attention"]}, "index 1 outside a list of 1"),
        (
            {**LLAMA, "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4}
            | {"num_experts_per_tok": 8},
            "8 experts a token",
        ),
        ({**LLAMA, "model_type": "gemma2", "sliding_window": {}}, "{}"),
        ({**LLAMA, "model_type": "qwen2_vl"}, "missing key 'vision_config'"),
        ({"model_type": "qwen2_vl", "vision_config": 5}, "'vision_config' must be an object, not 5"),
        ({"model_type": "qwen2_vl", "vision_config": {}, "text_config": []}, "'text_config' must be an object"),
        ({"model_type": "llava", "vision_config": {}, "text_config": {"model_type": 5}}, "model_type must be a string"),
        ({"model_type": "llava", "vision_config": {}, "text_config": {"model_type": "bertha"}}, "'bertha' has no spec"),
        ({"model_type": "qwen3_vl", "vision_config": {"depth": 2}, "text_config": {}}, "reads layer 24"),
        ({"model_type": "gpt2", "n_embd": 25, "n_layer": 1, "n_head": 4, "vocab_size": 9}, "whole number, not 25/4"),
    ],
)
def test_configs_that_contradict_themselves(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bind(config)
    assert words in str(caught.value)


def test_other_releases_names_of_a_key() -> None:
    old = {"model_type": "gpt2", "n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 9}
    new = {"model_type": "gpt2", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9}
    assert bind(old)(1, 8).total == bind(new)(1, 8).total


def test_foreign_keys_do_not_matter() -> None:
    assert bind({**LLAMA, "rope_theta": {}, 5: "x"})(1, 8).total == bind(LLAMA)(1, 8).total
    with pytest.raises(ConfigError, match="missing key"):
        bind({"model_type": "llama", 5: "x"})
