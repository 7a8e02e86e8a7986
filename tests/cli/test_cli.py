"""The command line: its JSON contract, its tables, and one line with exit code 2 for everything that is wrong."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flopcalc
from flopcalc.base.data import find_commit, list_data_files
from flopcalc.cli import main
from flopcalc.hardware.devices import load_devices

Capture = pytest.CaptureFixture[str]
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
}  # fmt: skip
TINY = ("estimate", "--model", "sweep-tiny")


def run(capsys: Capture, *arguments: str) -> str:
    """stdout of a run that must succeed, silently on stderr."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert (end.value.code, err) == (0, "")
    return out


def run_json(capsys: Capture, *arguments: str) -> Any:
    return json.loads(run(capsys, *arguments, "--json"))


def fail(capsys: Capture, *arguments: str) -> str:
    """The one line of a run that must fail."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert out == ""
    assert err.startswith("flopcalc: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert len(err) < 1500
    return err


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


# --- bad input --------------------------------------------------------------------------------------------------------
BAD: list[tuple[list[str], str]] = [
    ([], "which model? Give its name first, as in flopcalc estimate llama-3.1-8b"),
    (["--model", "lama-3.1-8b", "--seq", "5"], "Did you mean llama-3.1-8b"),
    (["--model", "", "--seq", "5"], "empty"),
    (["--model", "no/such/path", "--seq", "5"], "no such file or folder"),
    (["--model", "gpt2"], "Give --seq N, --text N or --lengths"),
    *((["--model", "gpt2", "--seq", text], "--seq") for text in ("0", "-1", "1.5", "1e3", "2q", "1.3k", "")),
    *((["--model", "gpt2", "--seq", text], "--seq") for text in ("x", "9" * 30)),
    *((["--model", "gpt2", "--text", text], "--text") for text in ("0", "", "x")),
    *((["--model", "gpt2", "--seq", "5", "--batch", text], "--batch") for text in ("0", "-2", "", "a")),
    *((["--model", "gpt2", "--seq", "5", "--grad-accum", text], "--grad-accum") for text in ("0", "", "1.5")),
    *((["--model", "gpt2", "--lengths", text], "--lengths") for text in ("", ",", "5,", "5,0", "5;6", "a")),
    *((["--model", "gpt2", "--seq", "5", "--logits", text], "--logits") for text in ("0", "-1", "", "first")),
    *((["--model", "gpt2", "--seq", "5", "--depth", text], "--depth") for text in ("0", "-1", "", "x")),
    *((["--model", "gpt2", "--seq", "5", "--peak", "1", "--num-devices", t], "--gpus") for t in ("0", "", "x")),
    *((["--model", "gpt2", "--phase", "decode", "--context", text], "--context") for text in ("-1", "", "x", "1.5")),
    (["--model", "gpt2", "--seq", "1025"], "beyond the 1024 positions"),
    (["--model", "gpt2", "--phase", "decode", "--context", "1024"], "beyond the 1024 positions"),
    # images
    (["--model", "gpt2", "--seq", "5", "--image", "10x10"], "is a text model: it takes no images"),
    (["--model", "gpt2", "--seq", "5", "--video-grid", "1,2,2"], "is a text model: it takes no videos"),
    (["--model", "llava-1.5-7b", "--seq", "999", "--video-grid", "1,24,24"], "takes no videos"),
    (["--model", "llava-1.5-7b", "--seq", "999", "--video-grid", "2,24,24"], "takes no videos"),
    (["--model", "llava-1.5-7b", "--seq", "999", "--image-grid", "1,12,12"], "1,24,24"),
    (["--model", "llama-3.2-11b-vision", "--seq", "100", "--image-grid", "1,2,3"], "give 1,40,40"),
    (["--model", "llama-3.2-11b-vision", "--seq", "100", "--image-grid", "9,40,40"], "takes at most 4"),
    (["--model", "llama-4-scout", "--seq", "99999", "--image-grid", "99,1,1"], "T counts an image's tiles, H and W"),
    (["--model", "llava-v1.6-mistral-7b", "--seq", "999", "--image-grid", "1,2,3"], "0 tiles cannot hold 2 by 3"),
    (["--model", "llava-v1.6-mistral-7b", "--seq", "9999", "--image-grid", "4,50,30"], "3 tiles cannot hold 50 by 30"),
    (["--model", "modernbert-base", "--phase", "decode"], "is an encoder: it does not decode"),
    (["--model", "modernbert-base", "--seq", "5", "--phase", "prefill"], "is an encoder: it does not decode"),
    (["--model", "qwen2-vl", "--seq", "99", "--image-grid", "1,3,4"], "--image-grid 1,3,4: height and width must be"),
    (["--model", "qwen2-vl", "--seq", "99", "--image-grid", "1,4"], "must hold 3 numbers"),
    (["--model", "qwen2-vl", "--seq", "99", "--image-grid", "0,4,4"], "at least 1"),
    (["--model", "qwen2-vl", "--seq", "99", "--image", "640"], "'640' is neither WIDTHxHEIGHT nor a file"),
    (["--model", "qwen2-vl", "--seq", "99", "--image", "no.png"], "neither WIDTHxHEIGHT nor a file"),
    (["--model", "qwen2-vl", "--seq", "99", "--max-pixels", "9"], "--max-pixels needs --image or --video"),
    (["--model", "llava-1.5-7b", "--seq", "999", "--image", "9x9", "--max-pixels", "9"], "has no such limit"),
    (
        ["--model", "vit-base", "--image", "9x9", "--max-pixels", "9"],
        "; --image-grid 1,H,W takes another size in patches",
    ),
    (["--model", "llava-1.5-7b", "--seq", "999", "--video", "9s@1fps"], "--video: llava-1.5-7b takes no videos"),
    (["--model", "qwen2-vl", "--seq", "999", "--video", "9s"], "'9s' is no video; write 30s@2fps"),
    (["--model", "gpt2", "--seq", "9", "--video", "9s@1fps"], "is a text model: it takes no videos"),
    (["--model", "qwen2-vl", "--seq", "99", "--image", "0x480"], "at least 1"),
    (["--model", "qwen2-vl", "--seq", "99", "--image", "axb"], "--image"),
    (["--model", "qwen2-vl", "--seq", "99", "--image", "3000x10"], "more than 200 times"),
    (["--model", "qwen2-vl", "--seq", "99", "--image", "1024x768"], "999 tokens, more than --seq 99"),
    (["--model", "qwen2-vl", "--lengths", "9,9", "--image-grid", "1,20,20"], "100 visual tokens do not fit in 18"),
    (["--model", "qwen2-vl", "--seq", "99", "--image-grid", "1,4,4", "--batch", "1000000000"], "1000000000 images"),
    # contradictions
    (["--model", "gpt2", "--seq", "5", "--text", "5"], "--seq and --text contradict each other"),
    (["--model", "gpt2", "--seq", "5", "--lengths", "5"], "--seq and --lengths contradict"),
    (["--model", "gpt2", "--text", "5", "--lengths", "5"], "--text and --lengths contradict"),
    (
        ["--model", "gpt2", "--seq", "10", "--objective", "orpo"],
        "orpo is dpo without a reference: give dpo,reference=no",
    ),
    (
        ["--model", "gpt2", "--seq", "10", "--objective", "ppo"],
        "ppo has passes that are not counted; none counts plain",
    ),
    (["--model", "gpt2", "--seq", "1000", "--global-batch", "16M"], "are 16.78B tokens a step; a number of tokens is"),
    (["--model", "gpt2", "--seq", "5", "--context", "5"], "context belongs to phase decode, not train"),
    (["--model", "gpt2", "--seq", "5", "--context", "0", "--phase", "prefill"], "context belongs to phase decode"),
    (["--model", "gpt2", "--lengths", "5", "--phase", "decode"], "decode takes neither"),
    (["--model", "qwen2-vl", "--phase", "decode", "--image-grid", "1,4,4"], "decode does no vision work"),
    (["--model", "gpt2", "--seq", "5", "--grad-accum", "2", "--phase", "forward"], "--grad-accum belongs to phase"),
    (["--model", "gpt2", "--seq", "5", "--json", "--format", "csv"], "--json contradicts --format csv"),
    (["--model", "gpt2", "--seq", "5", "--depth", "2", "--by", "kind"], "--depth cuts module paths"),
    (["--model", "gpt2", "--seq", "5", "--depth", "2", "--by", "component", "--format", "csv"], "--depth cuts"),
    (
        ["--model", "gpt2", "--seq", "5", "--lora", "r=2,targets=c_attn", "--train-only", "lm_head"],
        "contradicts --lora",
    ),
    # recipes
    (["--model", "gpt2", "--seq", "5", "--freeze", "vision"], "--freeze 'vision' matches no module"),
    (["--model", "gpt2", "--seq", "5", "--freeze", "transformer.h.12"], "matches no module"),
    (["--model", "gpt2", "--seq", "5", "--freeze", ""], "is not a pattern"),
    (["--model", "gpt2", "--seq", "5", "--train-only", "x"], "--train-only 'x' matches no module"),
    (["--model", "gpt2", "--seq", "5", "--lora", "r=2,targets=q_proj"], "lora target 'q_proj' matches no module"),
    (["--model", "gpt2", "--seq", "5", "--lora", "r=2"], "lora needs targets"),
    (["--model", "gpt2", "--seq", "5", "--lora", "16"], "as in r=16,targets=q_proj+v_proj"),
    (["--model", "gpt2", "--seq", "5", "--lora", ""], "as in r=16,targets=q_proj+v_proj"),
    # devices and time
    (["--model", "gpt2", "--seq", "5", "--device", "h200-sxn"], "Did you mean h200-sxm"),
    (["--model", "gpt2", "--seq", "5", "--device", "gaudi"], "say which of gaudi2, gaudi3"),
    (["--model", "gpt2", "--seq", "5", "--device", ""], "unknown"),
    (["--model", "gpt2", "--seq", "5", "--step-time", "1"], "name a --device, or give --peak"),
    *((["--model", "gpt2", "--seq", "5", "--peak", text], "--peak") for text in ("0", "-1", "nan", "inf", "x", "")),
    *((["--model", "gpt2", "--seq", "5", "--peak", "1", "--step-time", t], "--step-time") for t in ("0", "-1", "")),
    (["--model", "gpt2", "--seq", "5", "--dtype", "fp17"], "dtype 'fp17' unknown"),
    (["gpt2", "--seq", "5", "--gpus", "6", "--tp", "4"], "6 GPUs are no multiple of tp · pp · cp = 4"),
    (["gpt2", "--seq", "5", "--gpus", "2", "--batch", "2", "--global-batch", "6"], "6 sequences is no multiple of 4"),
    (["gpt2", "--seq", "5", "--tp", "1,2"], "--tp takes one number here; plan tries several"),
    (["gpt2", "--seq", "5", "--global-batch", "auto"], "--global-batch auto belongs to plan"),
    (["gpt2", "--seq", "5", "--optimizer", "adamw"], "estimate takes no --optimizer: predict, plan do"),
    (["gpt2", "--seq", "5", "--memory"], "estimate takes no --memory: predict does"),
    (["gpt2", "--tensor-parallel-size", "2"], "no such option --tensor-parallel-size: here it is --tp"),
    (["gpt2", "--max-length", "2"], "no such option --max-length: here it is --seq"),
    (["gpt2", "--bs", "2"], "no such option --bs: here it is --batch"),
    (["gpt2", "--max-model-len", "2"], "no such option --max-model-len: here it is --context"),
    (["--model", "gpt2", "--seq", "5", "--gpus", "2", "--num-devices", "2"], "--gpus is given twice"),
    (["gpt2", "--seq", "5", "--peak", "1", "--step-time", "1", "--tokens-per-second", "1"], "are both given"),
    *((["gpt2", "--seq", "5", "--peak", "1", "--tokens-per-second", t], "--tokens-per-second") for t in ("0", "x")),
    (["gpt2", "--seq", "5", "--mfu", "40%"], "--mfu belongs to a whole run: give its --tokens too"),
    (["gpt2", "--seq", "5", "--tokens", "1B", "--mfu", "40%"], "--mfu needs a --device or a --peak"),
    (["gpt2", "--seq", "5", "--tokens", "1B", "--peak", "1T", "--mfu", "40"], "'40' is more than 100 %"),
    (["gpt2", "--seq", "5", "--tokens", "1B", "--peak", "1", "--mfu", "1%", "--step-time", "1"], "contradicts a"),
    *((["gpt2", "--seq", "5", "--tokens", text], "tokens") for text in ("", "0", "x", "5Q", "1e30")),
    (["gpt2", "--seq", "5", "--recompute", "none", "--gradient-checkpointing"], "is --recompute full: give one"),
    *(
        (["gpt2", *(2 * [flag, "5"])], f"{flag} is given twice: give it once")
        for flag in ("--seq", "--batch", "--device", "--lora", "--convention", "--depth")
    ),
    (["--model", "gpt2", "--seq", "5", "--device", "t4", "--step-time", "1"], "no known bf16 peak"),
    # words of a closed list
    (["--model", "gpt2", "--seq", "5", "--phase", "backward"], "--phase 'backward' unknown. Did you mean forward?"),
    (["--model", "gpt2", "--seq", "5", "--convention", "half"], "--convention 'half' unknown. Known: model"),
    (["--model", "gpt2", "--seq", "5", "--attention-kernel", "x"], "--attention-kernel 'x' unknown. Known: auto"),
    (["--model", "gpt2", "--seq", "5", "--recompute", "x"], "--recompute 'x' unknown; known: none"),
    (["--model", "gpt2", "--seq", "5", "--by", "x"], "'x' is not one of"),
    (["--model", "gpt2", "--seq", "5", "--format", "x"], "'x' is not one of"),
    (["--model", "gpt2", "--sequence", "5"], "No such option"),
    (["--model", "gpt2", "--seq"], "--seq"),
    (["--model", "gpt2", "--seq", "5", "extra"], "two models are given, 'extra' and --model 'gpt2'"),
    (["gpt2", "--seq", "5", "extra"], "unexpected extra argument"),
    (["--model", "gpt2", "--seq", "5", "--spec", "/no/such.toml"], "cannot be read: No such file"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_bad_input(capsys: Capture, arguments: list[str], words: str) -> None:
    assert words in fail(capsys, "estimate", *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["estmate"], "no command 'estmate'. Did you mean estimate?"),
        (["monitor", "out"], "no command 'out'. `flopcalc monitor show out` shows a file. Try flopcalc monitor --help"),
        (["mfu", "out"], "`flopcalc monitor show LOG` shows that of a run"),
        (["--modle"], "No such option"),
        (["compare"], "Missing argument"),
        (["compare", "gpt2", "gpt3", "--seq", "5"], "no preset, file or folder 'gpt3'"),
        (["compare", "gpt2@sq=5"], "Did you mean seq"),
        (["compare", "gpt2@seq"], "is not key=value"),
        (["compare", "gpt2@phase=x", "--seq", "5"], "phase 'x' unknown"),
        (["compare", "gpt2@seq=5;text=6"], "contradict each other"),
        (["mfu"], "no command 'mfu'. `flopcalc estimate MODEL --seq N --device GPU --step-time TIME` prints it"),
        (["explain", "--model", "gpt2", "--seq", "5", "--op", "q_proj"], "matches no operation"),
        (["models", "extra", "more"], "unexpected extra argument"),
        (["devices", "--jsn"], "No such option"),
    ],
)
def test_bad_commands(capsys: Capture, arguments: list[str], words: str) -> None:
    assert words in fail(capsys, *arguments)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({**LLAMA, "model_type": "lama"}, "has no spec. The nearest family is llama: --model-type llama"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "missing key 'hidden_size', which 'llama' needs"),
        *(({**LLAMA, "hidden_size": value}, "hidden_size") for value in ("4096", True, None, 1.5, [], {}, -4, 0)),
        ("{", "not valid JSON"),
        ("[1]", "holds a list, not an object"),
        ("", "not valid JSON"),
        ("[" * 10**5, "not valid JSON"),
        ({}, "model_type"),
    ],
)
def test_bad_config(capsys: Capture, tmp_path: Path, content: Any, words: str) -> None:
    path = write(tmp_path / "config.json", content)
    for model in (path, str(tmp_path)):
        line = fail(capsys, "estimate", "--model", model, "--seq", "5")
        assert words in line
        assert path in line


def test_folder_without_config(capsys: Capture, tmp_path: Path) -> None:
    assert "no config.json in this folder" in fail(capsys, "estimate", "--model", str(tmp_path), "--seq", "5")


def test_huge_config(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopcalc.core.model.config.MAX_JSON_BYTES", 10)
    path = write(tmp_path / "config.json", LLAMA)
    assert "larger than 10 bytes" in fail(capsys, "estimate", "--model", path, "--seq", "5")


def test_messages_stay_on_one_line(capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "two\nlines"
    folder.mkdir()
    assert "two lines" in fail(capsys, "estimate", "--model", str(folder), "--seq", "5")


HEAD = 'architecture = "A"\nsource = "S"\n[[stack]]\npath = "x"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("architecure = 'A'", "Did you mean architecture?"),
        (HEAD + "ops = [{ op = 'lineer', in = '1', out = '1' }]", "Did you mean linear?"),
        (HEAD + "ops = [{ op = 'linear', in = '1 +', out = '1' }]", "not an expression"),
        (HEAD + "ops = [{ op = 'linear', in = \"__import__('os').system('x')\", out = '1' }]", "unknown function"),
        ("extends = 'mine'", "leads back to it"),
        ("x = [", "not valid TOML"),
    ],
)
def test_bad_spec_file(capsys: Capture, tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path / "mine.toml", text)
    line = fail(capsys, *TINY, "--seq", "5", "--spec", path)
    assert words in line
    assert path in line


def run_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flopcalc", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["estimate", "--model", "lama", "--seq", "5"], "no preset"),
        (["estimate", "--model", "gpt2", "--seq", "0"], "at least 1"),
        (["frobnicate"], "no command"),
        (["estimate", "--model", "gpt2", "--seq", "5", "--nope"], "No such option"),
    ],
)
def test_process_fails_in_one_line(arguments: list[str], words: str) -> None:
    done = run_process(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("flopcalc: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_process_succeeds() -> None:
    done = run_process(*TINY, "--seq", "64", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["flops"]["total"] == flopcalc.estimate_flops("sweep-tiny", seq_len=64).total


@pytest.mark.heavy
def test_user_data_folder(tmp_path: Path) -> None:
    for folder in ("specs", "presets"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "specs" / "mine.toml", HEAD + "ops = [{ op = 'linear', in = 'width', out = '3' }]")
    write(tmp_path / "presets" / "my-model.toml", "source = 'me'\n[config]\nmodel_type = 'mine'\nwidth = 5\n")
    done = run_process("estimate", "--model", "my-model", "--seq", "7", "--json", FLOPCALC_DATA=str(tmp_path))
    assert done.stderr == ""
    assert json.loads(done.stdout)["flops"]["forward"] == 2 * 5 * 3 * 7
    assert "my-model" in run_process("models", FLOPCALC_DATA=str(tmp_path)).stdout


def test_broken_pipe_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:  # nobody reads it
        command = [sys.executable, "-m", "flopcalc", "devices"]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == ""


# --- the JSON contract ------------------------------------------------------------------------------------------------
TOP = {
    "schema", "version", "model", "workload", "recipe", "convention", "attention_kernel", "flops", "gpus",
    "global_batch", "routing", "totals",
    "components", "modules", "parameters", "formats", "mfu", "hfu", "run", "notes",
}  # fmt: skip
WORKLOAD = {
    "batch", "seq", "lengths", "layout", "tokens", "images", "patches", "visual_tokens", "phase", "context", "logits",
}  # fmt: skip
COMPONENTS = {
    "vision",
    "audio",
    "projector",
    "attention_projections",
    "attention_scores",
    "mlp",
    "router",
    "ssm",
    "lm_head",
    "other",
}
SHOWN: list[list[str]] = [
    ["--model", "llama-3.1-8b", "--seq", "2048"],
    ["--model", "qwen2-vl", "--seq", "4096", "--image", "1024x768", "--batch", "2"],
    ["--model", "qwen3-vl-4b", "--text", "100", "--image-grid", "1,8,8", "--video-grid", "3,4,4", "--grad-accum", "4"],
    ["--model", "deepseek-v3", "--lengths", "512,1024", "--recompute", "full"],
    ["--model", "mixtral-8x7b", "--seq", "512", "--lora", "r=4,targets=w1+w2+w3+gate", "--recompute", "full-reentrant"],
    ["--model", "llava-1.5-7b", "--seq", "700", "--image", "10x10", "--freeze", "vision", "--recompute", "full"],
    ["--model", "gpt2", "--phase", "decode", "--context", "100", "--seq", "3"],
    ["--model", "gpt2", "--phase", "prefill", "--seq", "100"],
    ["--model", "gpt2", "--phase", "forward", "--seq", "100", "--logits", "5"],
    ["--model", "gemma-2-2b", "--seq", "5000", "--step-time", "0.5", "--peak", "1e15"],
]


@pytest.mark.parametrize("convention", ["model", "full", "hardware"])
@pytest.mark.parametrize("arguments", SHOWN)
def test_json_contract(capsys: Capture, arguments: list[str], convention: str) -> None:
    shown = run_json(capsys, "estimate", *arguments, "--convention", convention)
    assert set(shown) == TOP
    assert shown["schema"] == 1
    assert shown["version"] == flopcalc.__version__
    assert set(shown["model"]) == {"name", "model_type", "spec", "source", "reference", "head", "mtp"}
    assert shown["model"]["source"] == "spec"
    assert all(isinstance(value, str) and value for name, value in shown["model"].items() if name != "mtp")
    assert type(shown["model"]["mtp"]) is int
    assert set(shown["workload"]) >= WORKLOAD
    assert set(shown["workload"]) - WORKLOAD <= {"grad_accum"}
    assert set(shown["recipe"]) == {"freeze", "train_only", "lora", "recompute", "clipping"}
    assert shown["convention"] == convention
    flops = shown["flops"]
    assert set(flops) == {"forward", "backward", "recompute", "clipping", "total"}
    assert all(type(value) is int for value in flops.values())
    assert flops["total"] == sum(value for key, value in flops.items() if key != "total")
    assert set(shown["totals"]) == {"model", "full", "hardware"}
    assert shown["totals"][convention] == flops["total"]
    assert shown["totals"]["model"] <= shown["totals"]["full"]
    is_train = shown["workload"]["phase"] == "train"
    assert (flops["backward"] > 0) == is_train
    asks_recompute = shown["recipe"]["recompute"] != "none"
    assert (flops["recompute"] > 0) == (asks_recompute and convention == "hardware")
    if asks_recompute and convention != "hardware":
        assert any("recomputation would add" in note for note in shown["notes"])
    for row in shown["components"]:
        assert set(row) == {"name", "forward", "backward"}
        assert row["name"] in COMPONENTS
    for row in shown["modules"]:
        assert set(row) == {"path", "kind", "count", "forward", "backward", "parameters"}
    for rows in (shown["components"], shown["modules"]):
        assert sum(row["forward"] for row in rows) == flops["forward"]
        assert sum(row["forward"] + row["backward"] for row in rows) == flops["total"]
    assert set(shown["parameters"]) == {"total", "active", "trainable"}
    assert sum(row["parameters"] for row in shown["modules"]) == shown["parameters"]["total"]
    for share in (shown["mfu"], shown["hfu"]):
        assert share is None or set(share) == {"value", "peak_flops_per_s", "device", "dtype", "peaks", "of_bf16_peak"}
    products = shown["formats"]["products"]
    assert sum(row["forward"] + row["backward"] for row in products) == flops["total"]
    assert sum(row["parameters"] for row in shown["formats"]["weights"]) == shown["parameters"]["total"]
    assert (shown["mfu"] is not None) == ("--step-time" in arguments)
    assert all(isinstance(note, str) for note in shown["notes"])


def test_json_of_the_readme_call(capsys: Capture) -> None:
    shown = run_json(capsys, "estimate", "--model", "qwen2-vl", "--seq", "2048")
    assert shown["model"]["name"] == "qwen2-vl-7b"
    assert shown["workload"] == {
        "batch": 1, "seq": 2048, "lengths": None, "layout": "unpadded", "grad_accum": 1, "tokens": 2048, "images": 0,
        "patches": 0, "visual_tokens": 0, "phase": "train", "context": None, "logits": "all",
    }  # fmt: skip
    assert any("no image given" in note and "--image" in note for note in shown["notes"])
    assert shown["parameters"] == dict.fromkeys(("total", "active", "trainable"), 8_291_375_616)


def test_depth_and_kinds(capsys: Capture) -> None:
    shown = run_json(capsys, *TINY, "--seq", "64", "--depth", "1", "--by", "kind")
    assert [row["path"] for row in shown["modules"]] == ["model", "lm_head"]
    kinds = shown["kinds"]
    assert {row["name"] for row in kinds} >= {"linear", "attend"}
    assert sum(row["forward"] + row["backward"] for row in kinds) == shown["flops"]["total"]


# --- workloads --------------------------------------------------------------------------------------------------------
def total(capsys: Capture, *arguments: str) -> int:
    return int(run_json(capsys, "estimate", *arguments)["flops"]["total"])


def test_text_adds_visual_tokens(capsys: Capture) -> None:
    images = ("--image-grid", "1,8,8", "--video-grid", "2,4,4")
    shown = run_json(capsys, "estimate", "--model", "qwen2-vl", "--text", "100", *images, "--batch", "3")
    assert shown["workload"]["seq"] == 100 + 16 + 8
    assert shown["workload"]["visual_tokens"] == 3 * 24
    assert shown["workload"]["patches"] == 3 * 96
    assert shown["workload"]["images"] == 6
    same = total(capsys, "--model", "qwen2-vl", "--seq", "124", *images, "--batch", "3")
    assert shown["flops"]["total"] == same


@pytest.mark.parametrize(
    ("model", "image", "visual"),
    [
        ("qwen2-vl", "1024x768", 27 * 37),
        ("qwen2-vl", "8000x6000", 110 * 147),  # scaled into the published 12,845,056 pixels
        ("qwen2-vl", "10x10", 4),
        ("llava-1.5-7b", "10x9000", 576),
        ("qwen3-vl-4b", "1024x768", 32 * 24),
    ],
)
def test_images_are_resized_as_the_preset_says(capsys: Capture, model: str, image: str, visual: int) -> None:
    shown = run_json(capsys, "estimate", "--model", model, "--text", "10", "--image", image)
    assert shown["workload"]["visual_tokens"] == visual
    assert not any("no preprocessor limits" in note for note in shown["notes"])


def test_video(capsys: Capture) -> None:
    shown = run_json(capsys, "estimate", "qwen2-vl", "--text", "10", "--video", "1280x720:30s@2fps")
    # 60 frames in pairs, each 1008x560 after the resize to at most 768 tokens: 72 x 40 patches.
    assert shown["workload"]["visual_tokens"] == 30 * 36 * 20
    assert shown["flops"]["total"] == total(capsys, "--model", "qwen2-vl", "--text", "10", "--video-grid", "30,40,72")
    assert "video 1280x720:30s@2fps: 60 frames of 1008x560 pixels" in shown["notes"]
    two = run_json(capsys, "estimate", "qwen2-vl", "--text", "10", "--video", "30s@2fps", "--video", "280x280x4")
    assert two["workload"]["images"] == 2
    assert any("no size given" in note for note in two["notes"])


def test_images_of_files_and_a_limit_of_pixels(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(8) + (1024).to_bytes(4, "big") + (768).to_bytes(4, "big"))
    arguments = ("estimate", "qwen2-vl", "--text", "10", "--image")
    shown = run_json(capsys, *arguments, str(path))
    assert shown["notes"] == [f"--image {path} = 1024x768 pixels"]
    assert {**shown, "notes": []} == run_json(capsys, *arguments, "1024x768")
    small = run_json(capsys, *arguments, str(path), "--max-pixels", str(28 * 28 * 100))
    assert small["workload"]["visual_tokens"] == 8 * 11


def test_folder_preprocessor_is_read_else_noted(capsys: Capture, tmp_path: Path) -> None:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 24, "num_heads": 4}
    write(tmp_path / "config.json", {**LLAMA, "model_type": "qwen2_vl", "vision_config": vision})
    arguments = ("estimate", "--model", str(tmp_path), "--text", "10", "--image", "1024x768")
    shown = run_json(capsys, *arguments)
    assert shown["workload"]["visual_tokens"] == 27 * 37
    assert any("no preprocessor limits" in note for note in shown["notes"])
    write(tmp_path / "preprocessor_config.json", {"min_pixels": 3136, "max_pixels": 28 * 28 * 100})
    shown = run_json(capsys, *arguments)
    assert 80 <= shown["workload"]["visual_tokens"] <= 100
    assert not any("no preprocessor limits" in note for note in shown["notes"])
    write(tmp_path / "preprocessor_config.json", {"patch_size": 16})
    assert "do not fit the model's" in fail(capsys, *arguments)


def test_lengths(capsys: Capture) -> None:
    shown = run_json(capsys, *TINY, "--lengths", "100,28")
    assert shown["workload"]["layout"] == "packed"
    assert shown["workload"]["lengths"] == [100, 28]
    assert shown["workload"]["tokens"] == 128
    parts = [total(capsys, "--model", "sweep-tiny", "--seq", seq) for seq in ("100", "28")]
    assert shown["flops"]["total"] == sum(parts)


def test_grad_accum_multiplies(capsys: Capture) -> None:
    one = run_json(capsys, *TINY, "--seq", "64", "--batch", "2")
    four = run_json(capsys, *TINY, "--seq", "64", "--batch", "2", "--grad-accum", "4")
    assert four["flops"] == {key: 4 * value for key, value in one["flops"].items()}
    assert four["workload"]["tokens"] == 4 * one["workload"]["tokens"]
    assert four["parameters"] == one["parameters"]
    assert [row["parameters"] for row in four["modules"]] == [row["parameters"] for row in one["modules"]]


def test_decode(capsys: Capture) -> None:
    arguments = ("--model", "qwen2-vl", "--phase", "decode")
    first = run_json(capsys, "estimate", *arguments, "--context", "100")
    assert first["workload"]["seq"] == 1
    assert first["workload"]["context"] == 100
    assert not any(row["name"] == "vision" for row in first["components"])
    steps = [total(capsys, *arguments, "--context", str(100 + j)) for j in range(3)]
    assert total(capsys, *arguments, "--context", "100", "--seq", "3") == sum(steps)
    # Token j attends to C + j keys: one more key is 4 · heads · head_dim FLOPs per layer.
    assert steps[1] - steps[0] == 28 * 4 * 28 * 128
    assert total(capsys, *arguments) == total(capsys, *arguments, "--context", "0")


def test_logits(capsys: Capture) -> None:
    head = {}
    for logits in ("all", "last", "5"):
        shown = run_json(capsys, *TINY, "--seq", "64", "--phase", "forward", "--logits", logits)
        head[logits] = next(row["forward"] for row in shown["components"] if row["name"] == "lm_head")
    assert head == {"all": 2 * 64 * 1000 * 64, "last": 2 * 64 * 1000, "5": 2 * 64 * 1000 * 5}
    prefill = run_json(capsys, *TINY, "--seq", "64", "--phase", "prefill")
    assert prefill["workload"]["logits"] == "last"


def test_rotary_length_is_a_note(capsys: Capture) -> None:
    shown = run_json(capsys, "estimate", "--model", "llama-2-7b", "--seq", "4097")
    assert "length 4097 is beyond max_position_embeddings = 4096" in shown["notes"]


def test_recipe_is_shown(capsys: Capture) -> None:
    shown = run_json(
        capsys, *TINY, "--seq", "9", "--lora", "r=4,targets=q_proj+v_proj", "--freeze", "model.layers.0",
        "--recompute", "full",
    )  # fmt: skip
    assert shown["recipe"] == {
        "freeze": ["model.layers.0"],
        "train_only": [],
        "recompute": "full",
        "clipping": "none",
        "lora": {"r": 4, "targets": ["q_proj", "v_proj"], "save": []},
    }


# --- time -------------------------------------------------------------------------------------------------------------
def test_mfu_and_hfu(capsys: Capture) -> None:
    shown = run_json(
        capsys, "estimate", "--model", "llama-3.1-8b", "--seq", "2048", "--recompute", "full", "--device", "h200",
        "--step-time", "0.5", "--num-devices", "2",
    )  # fmt: skip
    peak = 989.4e12
    value = shown["totals"]["model"] / (0.5 * peak * 2)
    assert shown["mfu"] == {
        "value": value,
        "peak_flops_per_s": peak,
        "device": "NVIDIA H200",
        "dtype": "bf16",
        "of_bf16_peak": value,
        "peaks": [{"format": "bf16", "flops": shown["totals"]["model"], "peak_flops_per_s": peak}],
    }
    assert shown["hfu"]["value"] == shown["totals"]["hardware"] / (0.5 * peak * 2)
    full = run_json(
        capsys, "estimate", "--model", "llama-3.1-8b", "--seq", "2048", "--convention", "full", "--peak", "1e15",
        "--step-time", "1",
    )  # fmt: skip
    assert full["mfu"]["value"] == full["totals"]["full"] / 1e15


def test_one_name_for_one_thing(capsys: Capture) -> None:
    """The model may stand first; --gpus and --num-devices, --gradient-checkpointing and --recompute full are one."""
    old = ("--model", "llama-3.2-1b", "--seq", "4096", "--device", "h200", "--num-devices", "1024", "--recompute",
           "full", "--step-time", "0.5")  # fmt: skip
    new = (
        "llama-3.2-1b",
        "--gpus",
        "1k",
        "--gradient-checkpointing",
        "--step-time",
        "500ms",
        "--seq",
        "4k",
        "--device",
        "h200",
    )
    before, after = (run_json(capsys, "estimate", *arguments) for arguments in (old, new))
    notes = after.pop("notes")
    assert after == {key: value for key, value in before.items() if key != "notes"}
    spelled = "--seq 4k = 4,096; --gpus 1k = 1,024"
    assert sorted(set(notes) - set(before["notes"])) == [spelled]
    behind = run_json(capsys, "estimate", "--seq", "4096", "llama-3.2-1b")
    assert behind == run_json(capsys, "estimate", "--model", "llama-3.2-1b", "--seq", "4096")


def test_tokens_per_second_is_a_step_time(capsys: Capture) -> None:
    arguments = (*TINY, "--seq", "500", "--batch", "2", "--grad-accum", "3", "--peak", "1T")
    rate = run_json(capsys, *arguments, "--tokens-per-second", "6k")
    assert rate["mfu"]["value"] == pytest.approx(rate["totals"]["model"] / (0.5 * 1e12))
    time = run_json(capsys, *arguments, "--step-time", "0.5")
    assert (rate["mfu"], rate["hfu"]) == (time["mfu"], time["hfu"])


RUN = (*TINY, "--seq", "100", "--batch", "4", "--tokens", "1B")


@pytest.mark.parametrize(
    ("arguments", "mfu", "is_bound"),
    [
        ((), None, False),
        (("--peak", "1T"), 1.0, True),
        (("--peak", "1T", "--mfu", "40%"), 0.4, False),
        (("--device", "h200", "--mfu", "0.5", "--gpus", "1k"), 0.5, False),
        (("--peak", "1T", "--gpus", "2", "--step-time", "500ms"), "measured", False),
        (("--peak", "1T", "--gpus", "2", "--tokens-per-second", "1600"), "measured", False),
    ],
)
def test_whole_run(capsys: Capture, arguments: tuple[str, ...], mfu: Any, is_bound: bool) -> None:
    shown = run_json(capsys, *RUN, *arguments)
    found, total = shown["run"], shown["totals"]["model"]
    steps = -(-(10**9) // (400 * shown["gpus"]))
    assert (found["tokens"], found["steps"], found["flops"]) == (10**9, steps, steps * total)
    assert found["is_lower_bound"] is is_bound
    text = run(capsys, *RUN, *arguments)
    assert f"run             1.00B tokens: {steps:,} steps, {steps * total:.3e} FLOPs\n" in text
    assert ("a lower" in text) == is_bound
    if mfu is None:
        assert (found["gpu_hours"], found["mfu"]) == (None, None)
        assert "GPU-hours" not in text
    elif mfu == "measured":
        assert found["mfu"] == shown["mfu"]["value"] == total / (0.5 * 2e12)
        assert found["gpu_hours"] == pytest.approx(steps * 0.5 * 2 / 3600)
    else:
        peak = 989.4e12 if "h200" in arguments else 1e12
        assert found["mfu"] == mfu
        assert found["gpu_hours"] == pytest.approx(steps * total / (peak * mfu) / 3600)
        assert (re.search(r"\d (s|min|h|days) on 1,024", text) is not None) == ("1k" in arguments)


def test_a_run_counts_whole_steps_under_its_convention(capsys: Capture) -> None:
    shown = run_json(capsys, *RUN[:-1], "401", "--convention", "full", "--peak", "1T")
    assert shown["run"]["steps"] == 2
    assert shown["run"]["flops"] == 2 * shown["totals"]["full"]
    assert shown["run"]["gpu_hours"] == pytest.approx(2 * shown["totals"]["full"] / 1e12 / 3600)


def test_mfu_above_one(capsys: Capture) -> None:
    shown = run_json(capsys, *TINY, "--seq", "64", "--peak", "1000", "--step-time", "1")
    assert shown["mfu"]["value"] == shown["totals"]["model"] / 1000 > 1
    assert any(note.startswith("MFU is") and "above 1" in note for note in shown["notes"])


def test_unknown_detected_device(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flopcalc.hardware.devices", "flopcalc.core.estimate.utilization", "flopcalc.setup.counting"):
        monkeypatch.setattr(f"{module}.detect_device", lambda: "NVIDIA X-9000")
    shown = run_json(capsys, *TINY, "--seq", "64", "--device", "auto", "--step-time", "1")
    assert shown["mfu"] is None
    assert shown["hfu"] is None
    notes = [note for note in shown["notes"] if "X-9000" in note]
    assert len(notes) == 1
    assert "--peak" in notes[0]
    shown = run_json(capsys, *TINY, "--seq", "64", "--device", "auto", "--step-time", "1", "--peak", "1e12")
    assert shown["mfu"]["value"] > 0


def test_least_time(capsys: Capture) -> None:
    shown = run_json(capsys, "estimate", "--model", "llama-3.1-8b", "--seq", "2048", "--device", "h200")
    assert shown["mfu"] is None
    assert any("takes at least 96.54 ms" in note for note in shown["notes"])


def test_device_chooses_the_kernel(capsys: Capture) -> None:
    arguments = ("--seq", "64", "--convention", "hardware")
    assert run_json(capsys, *TINY, *arguments)["attention_kernel"] == "flash"
    assert run_json(capsys, *TINY, *arguments, "--device", "v100s")["attention_kernel"] == "efficient"
    eager = run_json(capsys, *TINY, *arguments, "--device", "v100s", "--attention-kernel", "eager")
    assert eager["attention_kernel"] == "eager"
    assert eager["flops"]["total"] == eager["totals"]["full"]


# --- other formats and commands ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("arguments", SHOWN)
@pytest.mark.parametrize("by", ["component", "module", "kind"])
def test_table_fits_80_columns(capsys: Capture, arguments: list[str], by: str) -> None:
    text = run(capsys, "estimate", *arguments, "--by", by, "--convention", "hardware")
    assert max(len(line) for line in text.splitlines()) <= 80
    exact = run_json(capsys, "estimate", *arguments, "--convention", "hardware")["flops"]["total"]
    assert f"{exact:,} FLOPs" in text


def test_csv(capsys: Capture) -> None:
    shown = run_json(capsys, *TINY, "--seq", "64", "--depth", "2")
    rows = list(csv.DictReader(io.StringIO(run(capsys, *TINY, "--seq", "64", "--depth", "2", "--format", "csv"))))
    assert [(row["path"], int(row["forward"]), int(row["backward"])) for row in rows] == [
        (row["path"], row["forward"], row["backward"]) for row in shown["modules"]
    ]


@pytest.mark.parametrize("by", ["component", "module", "kind"])
def test_csv_carries_the_step(capsys: Capture, by: str) -> None:
    timed = (*TINY, "--seq", "64", "--peak", "1T", "--step-time", "2ms", "--convention", "hardware")
    timed = (*timed, "--recompute", "full")
    shown = run_json(capsys, *timed)
    rows = list(csv.DictReader(io.StringIO(run(capsys, *timed, "--by", by, "--format", "csv"))))
    assert sum(int(row["total"]) for row in rows) == shown["flops"]["total"]
    for row in rows:
        assert sum(int(row[key]) for key in ("forward", "backward", "recompute", "clipping")) == int(row["total"])
        assert (row["convention"], row["tokens"], row["step_total"]) == ("hardware", "64", str(shown["flops"]["total"]))
        assert (float(row["mfu"]), float(row["hfu"])) == (shown["mfu"]["value"], shown["hfu"]["value"])
    row = next(csv.DictReader(io.StringIO(run(capsys, *TINY, "--seq", "64", "--format", "csv"))))
    assert (row["mfu"], row["hfu"]) == ("", "")


def test_markdown(capsys: Capture) -> None:
    text = run(capsys, *TINY, "--seq", "64", "--format", "markdown")
    assert text.startswith("## sweep-tiny")
    assert "| mlp" in text


def test_format_json_is_json(capsys: Capture) -> None:
    assert run(capsys, *TINY, "--seq", "64", "--format", "json") == run(capsys, *TINY, "--seq", "64", "--json")


def test_compare(capsys: Capture) -> None:
    shown = run_json(capsys, "compare", "gpt2", "sweep-tiny@seq=32;batch=2", "gpt2@lengths=5,6", "--seq", "64")
    assert [entry["label"] for entry in shown] == ["gpt2", "sweep-tiny@seq=32;batch=2", "gpt2@lengths=5,6"]
    assert shown[1]["flops"]["total"] == total(capsys, "--model", "sweep-tiny", "--seq", "32", "--batch", "2")
    assert shown[2]["flops"]["total"] == total(capsys, "--model", "gpt2", "--lengths", "5,6")
    text = run(capsys, "compare", "gpt2", "gpt2@convention=full", "--seq", "64")
    assert "do not compare them" in text
    assert "attention_scores" in text
    replaced = run_json(capsys, "compare", "gpt2@text=7", "gpt2@lengths=7", "--seq", "64", "--batch", "1")
    assert replaced[0]["flops"]["total"] == replaced[1]["flops"]["total"]


def test_explain_lists_the_operations(capsys: Capture) -> None:
    words = ("explain", "llama-3.1-8b", "--seq", "5")
    *listed, hint = run(capsys, *words).splitlines()
    assert hint == f"{len(listed)} operations; --op '*lm_head' shows the formula of one"
    assert listed[0] == "model.layers.*.self_attn.q_proj"
    assert listed[-1] == "lm_head"
    assert json.loads(run(capsys, *words, "--json")) == {"operations": listed}


def test_explain_multiplies_out(capsys: Capture) -> None:
    arguments = ("--model", "qwen2.5-vl-7b", "--seq", "600", "--image-grid", "1,20,28", "--convention", "model")
    shown = run_json(capsys, "explain", *arguments, "--op", "*")
    modules = {row["path"]: row for row in run_json(capsys, "estimate", *arguments)["modules"]}
    sums: dict[str, list[int]] = {}
    for entry in shown["operations"]:
        line = next(line for line in entry["lines"] if line.strip().startswith("="))
        left, right = line.replace(",", "").split(" = ", 2)[-2:] if line.count(" = ") > 1 else line.split("=")[1:]
        factors = left.strip(" =").replace("(", "").replace(")", "").split("×")
        product = 1
        for factor in factors:
            product *= sum(int(piece) for piece in factor.split("+"))
        assert product == int(right.split()[0]) == entry["forward"]
        entry_sums = sums.setdefault(entry["path"], [0, 0])
        entry_sums[0] += entry["forward"]
        entry_sums[1] += entry["backward"]
    for path, (forward, backward) in sums.items():
        assert (modules[path]["forward"], modules[path]["backward"]) == (forward, backward)
    text = run(capsys, "explain", *arguments, "--op", "*.q_proj")
    assert "28 × 2 × 3584 × 3584 × 600" in text


def test_explain_counts_micro_batches(capsys: Capture) -> None:
    arguments = ("--model", "gpt2", "--seq", "64", "--grad-accum", "3")
    shown = run_json(capsys, "explain", *arguments, "--op", "lm_head")
    modules = run_json(capsys, "estimate", *arguments)["modules"]
    row = next(row for row in modules if row["path"] == "lm_head")
    assert shown["operations"][0]["forward"] == row["forward"]


def test_models(capsys: Capture) -> None:
    shown = run_json(capsys, "models")
    assert {entry["model_type"] for entry in shown["families"]} >= {"llama", "qwen2_vl", "deepseek_v3", "gpt2"}
    towers = {"qwen2_vl_vision", "pixtral"}  # of no use without a text model
    assert not {entry["model_type"] for entry in shown["families"]} & towers
    names = {entry["name"] for entry in shown["presets"]}
    aliases = {alias for entry in shown["presets"] for alias in entry["aliases"]}
    assert len(names) >= 40
    assert names | aliases == set(list_data_files("presets"))
    assert all(entry["source"] and entry["parameters"] > 0 for entry in shown["presets"])
    text = run(capsys, "models")
    assert "qwen2-vl-7b" in text
    assert "LlamaForCausalLM" in text
    # The classes of a type stand under it.
    families = shown["families"]
    types = {entry["model_type"] for entry in families}
    assert {"llama4", "bart", "musicgen_decoder"} <= types
    assert not any(name.endswith(("-causal", "-masked", "-speech", "-classifier")) for name in types)
    classes = {entry["architecture"] for entry in families if entry["model_type"] == "llama4"}
    assert classes == {"Llama4ForConditionalGeneration", "Llama4ForCausalLM"}
    assert text.startswith(f"{len(types)} model types in {len(families)} classes")


def test_devices(capsys: Capture) -> None:
    shown = run_json(capsys, "devices")
    assert [entry["id"] for entry in shown["devices"]] == [device.id for device in load_devices()[0]]
    assert all(entry["source"] and entry["date"] for entry in shown["devices"])
    text = run(capsys, "devices")
    assert "h200-sxm" in text
    assert "Ambiguous short names: " in text


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], ["estimate", "--help"], ["compare", "-h"], ["explain", "-h"]]
)
def test_help(capsys: Capture, arguments: list[str]) -> None:
    assert "Usage: flopcalc" in run(capsys, *arguments)


@pytest.mark.parametrize("commit", ["", "f548e57", "f548e57-dirty"])
def test_version(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, commit: str) -> None:
    monkeypatch.setenv("FLOPCALC_COMMIT", commit)
    monkeypatch.setattr("flopcalc.base.data._ROOT", str(tmp_path))  # no checkout
    shown = f" (commit {commit})" if commit else ""
    assert run(capsys, "--version") == f"flopcalc, version {flopcalc.__version__}{shown}\n"


@pytest.mark.parametrize("is_changed", [False, True])
def test_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_changed: bool) -> None:
    monkeypatch.delenv("FLOPCALC_COMMIT", raising=False)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    (tmp_path / "file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    if is_changed:
        (tmp_path / "file").write_text("2")
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr("flopcalc.base.data._ROOT", str(tmp_path))
    assert find_commit() == head + "-dirty" * is_changed
    # A package inside another project's tree is not that project.
    monkeypatch.setattr("flopcalc.base.data._ROOT", str(tmp_path / "venv"))
    assert find_commit() is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("flopcalc estimate --model qwen2-vl-", {"qwen2-vl-2b", "qwen2-vl-7b", "qwen2-vl-72b"}),
        ("flopcalc compare gpt2-", {"gpt2-medium", "gpt2-large", "gpt2-xl"}),
        ("flopcalc estimate --device h100-", {"h100-sxm", "h100-pcie", "h100-nvl"}),
        ("flopcalc est", {"estimate"}),
    ],
)
def test_shell_completion(words: str, expected: set[str]) -> None:
    done = run_process(_FLOPCALC_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1))
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == expected


def test_explain_says_how_a_head_dim_is_padded(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "explain --model qwen2-vl --text 100 --image 448x448 --convention hardware --device h200 --op *attn --json"
    )
    with pytest.raises(SystemExit):
        main(command.split())
    entry = json.loads(capsys.readouterr().out)["operations"][0]
    numbers = entry["lines"][2].split("= ")[1]
    product = 1.0
    for piece in numbers.replace(",", "").split(" × "):
        product *= sum(map(float, piece.strip("() ").split(" + "))) if "+" in piece else float(piece)
    assert product == entry["forward"]


def test_compare_shows_notes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "qwen2-vl", "llama-3.1-8b", "--seq", "64"])
    assert "qwen2-vl: no image given" in capsys.readouterr().out


@pytest.mark.parametrize("group", [[], ["monitor"], ["calibration"], ["sweep"]])
def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str], group: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(group)
    out, err = capsys.readouterr()
    assert (stopped.value.code, err) == (0, "")
    assert out.startswith(" ".join(["Usage: flopcalc", *group, "[OPTIONS] COMMAND [ARGS]..."]) + "\n")
    assert "\nCommands:\n" in out


def test_a_device_that_is_not_in_the_table_takes_a_peak_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    command = "estimate --model llama-3.2-1b --seq 64 --device newest --peak 1e15 --step-time 0.1 --json"
    with pytest.raises(SystemExit) as stopped:
        main(command.split())
    assert stopped.value.code == 0
    assert json.loads(capsys.readouterr().out)["mfu"]["device"] == "newest"


def test_compare_json_keeps_every_note(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "llama-3.2-1b", "--seq", "64", "--recompute", "full", "--convention", "hardware", "--json"])
    notes = " ".join(json.loads(capsys.readouterr().out)[0]["notes"])
    assert "includes what is recomputed" in notes
    assert "blocks of 128" in notes


@pytest.mark.parametrize("phase", ["forward", "train"])
@pytest.mark.parametrize(
    ("model", "pattern"), [("qwen3-next-80b-a3b", "*linear_attn*"), ("deepseek-v3.2", "*indexer*")]
)
def test_explain_products_of_activations(capsys: Capture, model: str, pattern: str, phase: str) -> None:
    shown = run_json(capsys, "explain", "--model", model, "--seq", "100", "--op", pattern, "--phase", phase)
    products = [entry for entry in shown["operations"] if entry["kind"] == "product"]
    assert any("FLOPs per row × rows" in line for entry in products for line in entry["lines"])
    for entry in products:
        assert entry["forward"] or (phase == "train" and entry["backward"])
        for line in entry["lines"]:
            if line.startswith("         = "):
                numbers = line.removeprefix("         = ").partition(" = ")[0].replace(",", "")
                assert eval(numbers.replace("×", "*")) == entry["forward"]


# --- number formats ---------------------------------------------------------------------------------------------------
def test_formats_of_products_and_weights(capsys: Capture) -> None:
    call = ("estimate", "llama-3.2-1b", "--seq", "64", "--phase", "prefill", "--weights", "fp8")
    shown = run_json(capsys, *call, "--kv-cache", "fp8", "--step-time", "1", "--peak", "bf16=1000T,fp8=2000T")
    assert [row["name"] for row in shown["formats"]["products"]] == ["fp8", "bf16"]
    assert [row["format"] for row in shown["formats"]["weights"]] == ["fp8", "bf16"]
    assert (shown["formats"]["kv_cache"], shown["formats"]["source"][:16]) == ("fp8", "weights as asked")
    assert [peak["peak_flops_per_s"] for peak in shown["mfu"]["peaks"]] == [2e15, 1e15]
    out = run(capsys, *call, "--by", "dtype", "--format", "csv")
    assert [line.split(",")[0] for line in out.split()] == ["dtype", "fp8", "bf16"]
    out = run(capsys, "compare", "llama-3.2-1b", "llama-3.2-1b@weights=int4", "--seq", "64")
    assert re.search(r"computed in +bf16 +bf16", out)
    assert "computed in fp8; the weight is stored in fp8" in run(capsys, "explain", *call[1:], "--op", "*q_proj")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peak", "bf16=989T,fp8", "--step-time", "1"], "'fp8', which is not FORMAT=FLOPS_PER_S"),
        (["--peak", "bf16=989T,bf16=1T", "--step-time", "1"], "gives bf16 twice"),
        (["--peak", "bf15=989T", "--step-time", "1"], "dtype 'bf15' unknown"),
        (["--weights", "int5"], "weights 'int5' unknown"),
        (["--compute", "bf16", "--autocast"], "both say what products are computed in"),
        (["--trace", "--weights", "int4"], "it takes no --weights"),
    ],
)
def test_bad_formats(capsys: Capture, arguments: list[str], words: str) -> None:
    assert words in fail(capsys, "estimate", "llama-3.2-1b", "--seq", "64", *arguments)
