"""flopcalc verify: equal where a spec is right, the row's name where it is not, HF's own words where it cannot run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flopcalc.base.data import find_data_file
from flopcalc.cli import main

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["verify", *arguments])
    shown = capsys.readouterr()
    return int(stop.value.code or 0), shown.out, shown.err


@pytest.fixture
def own_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user's own data folder: what lies there wins over the shipped files."""
    (tmp_path / "specs").mkdir()
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    return tmp_path


def change_spec(folder: Path, name: str, before: str, after: str) -> None:
    path = find_data_file("specs", name)
    assert path is not None
    text = Path(path).read_text(encoding="utf-8")
    assert before in text
    (folder / "specs" / f"{name}.toml").write_text(text.replace(before, after), encoding="utf-8")


@pytest.mark.filterwarnings("ignore")  # torch and peft advise on training, which this is not
def test_a_type_with_its_usual_cases(capsys: Capture) -> None:
    code, out, _ = run(capsys, "--model-type", "olmo2")
    *lines, end = out.splitlines()
    assert code == 0
    cases = [line for line in lines if not line.startswith(" ")]  # the rest of a long line is indented
    assert len(cases) > 10
    assert all(line.startswith("equal ") for line in cases)
    assert end == f"{len(cases)} cases: {len(cases)} equal, 0 differ, 0 not known; largest difference: none"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        ("--batch", "2", "--seq", "9"),
        ("--seq", "9", "--phase", "forward"),
        ("--seq", "2", "--phase", "decode", "--context", "5"),
        ("--seq", "9", "--lora", "r=2,targets=q_proj"),
        ("--seq", "9", "--freeze", "model.layers.0"),
        ("--seq", "9", "--recompute", "full-reentrant"),
        ("--seq", "9", "--device", "meta"),
    ],
)
def test_one_workload(capsys: Capture, options: tuple[str, ...]) -> None:
    code, out, _ = run(capsys, "--model-type", "llama", "--json", *options)
    found = json.loads(out)
    assert code == 0
    assert found["equal"] is True
    assert len(found["cases"]) == 2
    for case in found["cases"]:
        assert case["flops"]["analytic"] == case["flops"]["traced"]
        assert case["different"] == case["not_counted"] == {}


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
def test_a_preset_at_its_own_size(capsys: Capture) -> None:
    code, out, _ = run(capsys, "--config", "gpt2", "--seq", "33", "--batch", "2")
    assert (code, out.split()[0]) == (0, "equal")
    assert out.splitlines()[-1] == "1 case: 1 equal, 0 differ, 0 not known; largest difference: none"


@pytest.mark.filterwarnings("ignore")
def test_a_config_file(capsys: Capture, tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 20,
              "num_attention_heads": 2, "vocab_size": 50}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = run(capsys, "--config", str(tmp_path), "--seq", "7")
    assert (code, out.split()[0]) == (0, "equal")


@pytest.mark.filterwarnings("ignore")
def test_a_spec_that_no_longer_matches_names_the_row(capsys: Capture, own_data: Path) -> None:
    change_spec(own_data, "llama", '"mlp.up_proj", in = "d", out = "ff"', '"mlp.up_proj", in = "d", out = "ff + 1"')
    code, out, _ = run(capsys, "--model-type", "llama", "--seq", "9")
    assert code == 1
    assert "DIFFERS" in out
    assert "model.layers.0.mlp.up_proj" in out
    assert "model.layers.0.mlp.down_proj" not in out
    assert "parameters: analytic" in out
    end = " ".join(out[out.rindex("2 cases: ") :].split())
    assert end.startswith("2 cases: 0 equal, 2 differ, 0 not known; largest difference: 1,944 FLOPs, 0.16 % ")
    assert end.endswith(' of the step, in model.layers.0.mlp.up_proj of llama/b batch=1 phase="train" seq=9')
    code, out, _ = run(capsys, "--model-type", "llama", "--seq", "9", "--json")
    case = json.loads(out)["cases"][0]
    summary = json.loads(out)["summary"]
    assert (summary["cases"], summary["different"], summary["largest_difference"]["flops"]) == (2, 2, 3 * 2 * 9 * 36)
    traced = json.loads(out)["cases"][1]["flops"]["traced"]
    assert summary["largest_difference"]["share"] == 3 * 2 * 9 * 36 / sum(traced)
    assert code == 1
    assert set(case["different"]) == {f"model.layers.{i}.mlp.up_proj" for i in range(3)}
    assert case["different"]["model.layers.0.mlp.up_proj"]["traced"][0] == 2 * 9 * 24 * 41


@pytest.mark.filterwarnings("ignore")
def test_a_module_that_the_spec_lacks_is_named(capsys: Capture, own_data: Path) -> None:
    change_spec(own_data, "llama", 'name = "self_attn.o_proj"', 'name = "self_attn.out_proj"')
    code, out, _ = run(capsys, "--model-type", "llama", "--seq", "9")
    assert code == 1
    assert "self_attn.o_proj" in out
    assert "self_attn.out_proj" in out


@pytest.mark.filterwarnings("ignore")
def test_what_hf_cannot_run_is_a_case_not_the_end(capsys: Capture) -> None:
    code, out, _ = run(capsys, "--model-type", "llama", "--model-type", "gpt2", "--seq", "400", "--phase", "forward")
    assert code == 1  # gpt2's tiny example learned fewer positions than that
    assert out.count("equal ") == 2
    assert out.count("FAILED ") == 2
    end = "4 cases: 2 equal, 0 differ, 2 not known (could not be run); largest difference:\n  none\n"
    assert out.endswith(end)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say what to verify"),
        (("--all", "--model-type", "llama"), "say what to verify"),
        (("--model-type", "lama"), "no example of 'lama'"),
        (("--config", "no-such-model"), "no preset, file or folder"),
        (("--model-type", "llama", "--seq", "0"), "--seq"),
        (("--model-type", "llama", "--batch", "3"), "--batch belongs to one workload"),
        (("--model-type", "llama", "--phase", "decode"), "--phase belongs to one workload"),
        (("--model-type", "llama", "--seq", "9", "--image-grid", "3"), "--image-grid"),
    ],
)
def test_bad_input(capsys: Capture, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_without_torch(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("flopcalc.measure")]:
        monkeypatch.delitem(sys.modules, name)
    absent: Any = None
    monkeypatch.setitem(sys.modules, "torch", absent)
    code, _, err = run(capsys, "--model-type", "llama")
    assert code == 2
    assert "pip install 'flopcalc[measure]'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model-type", "t5", "--seq", "9"), "t5: has a decoder: give its length too (--decoder-seq N"),
        (("--model-type", "t5", "--seq", "9", "--decoder-seq", "3", "--phase", "decode"), "t5: its first token fills"),
        (("--model-type", "mamba", "--seq", "3", "--phase", "decode"), "mamba: its first token fills"),
        (("--model-type", "llama", "--seq", "9", "--decoder-seq", "3"), "llama: is no encoder-decoder"),
        (("--model-type", "llama", "--seq", "9", "--clip", "4"), "llama: takes no audio"),
        (("--model-type", "llama", "--seq", "9", "--image-grid", "1,2,2"), "llama: is a text model"),
        (("--model-type", "llama", "--seq", "9", "--context", "3"), "llama: --context belongs to phase decode"),
        (("--model-type", "bert", "--seq", "9", "--phase", "decode"), "bert: is an encoder: it does not decode"),
        (("--model-type", "whisper", "--decoder-seq", "4"), "whisper: takes one clip of audio per sample"),
        (("--config", "gpt2", "--seq", "9", "--clip", "4"), "gpt2: takes no audio"),
    ],
)
def test_sizes_that_do_not_fit_are_a_mistake(capsys: Capture, arguments: tuple[str, ...], message: str) -> None:
    code, out, error = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in error


@pytest.mark.filterwarnings("ignore")
def test_decode_starts_from_nothing_unless_told(capsys: Capture) -> None:
    code, out, _ = run(capsys, "--model-type", "llama", "--seq", "3", "--phase", "decode")
    assert (code, out.count("equal ")) == (0, 2)


@pytest.mark.filterwarnings("ignore")
def test_a_small_model_that_reads_values_is_built_in_memory(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "whisper", "d_model": 24, "num_mel_bins": 7, "encoder_layers": 1, "encoder_ffn_dim": 41,
              "encoder_attention_heads": 4, "decoder_layers": 1, "decoder_ffn_dim": 53, "decoder_attention_heads": 6,
              "vocab_size": 101, "max_source_positions": 150, "max_target_positions": 40, "pad_token_id": 0,
              "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("--config", str(tmp_path), "--decoder-seq", "5", "--clip", "300")

    def read_values(*given: Any, device: str, **more: Any) -> Any:
        if device == "meta":
            raise RuntimeError("Tensor.item() cannot be called on meta tensors")
        return verify(*given, device=device, **more)

    from flopcalc.measure.hf.verify import verify

    monkeypatch.setattr(sys.modules[verify.__module__], "verify", read_values)
    code, out, _ = run(capsys, *arguments)
    assert (code, out.split()[0]) == (0, "equal")
    monkeypatch.setattr("flopcalc.cli.verify._SMALL", 10)
    code, out, _ = run(capsys, *arguments)
    assert code == 1
    assert "--device cpu" in out


LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"architectures": ["LlamaForCausalLMEagle"]}, 2, "transformers has no model of eagle, only of llama,"),
        ({"draft_vocab_size": 40}, 2, "transformers has no model of eagle3, only of llama, which has other layers"),
        ({"model_type": "qwen3", "block_size": 4, "dflash_config": {}}, 2, "no model of dflash, only of qwen3"),
        (
            {"model_type": "telechat", "n_layer": 2, "n_head": 4, "ffn_hidden_size": 48},
            0,
            "telechat: llama is compared",
        ),
        ({"model_type": "Yi"}, 0, ""),  # the same model under another name
        ({}, 0, ""),
    ],
)
def test_a_model_that_transformers_lacks(
    capsys: Capture, tmp_path: Path, changed: dict[str, Any], code: int, words: str
) -> None:
    """Another model is never compared in its place."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **changed}), encoding="utf-8")
    found, out, err = run(capsys, str(path), "--seq", "9")
    assert found == code
    assert words in " ".join(err.split()) if words else not err
    assert out.startswith("equal ") if code == 0 else not out


def test_a_config_of_images_alone_needs_no_length(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 24, "intermediate_size": 34, "num_hidden_layers": 2, "num_attention_heads": 3}
    path.write_text(json.dumps({"model_type": "vit", **sizes, "image_size": 12, "patch_size": 4}))
    status, out, _ = run(capsys, str(path), "--image-grid", "1,3,3")
    assert (status, out.splitlines()[-1].startswith("1 case: 1 equal")) == (0, True)
    status, _, err = run(capsys, str(path))
    assert status == 2
    assert "takes images: give --image-grid T,H,W" in err
