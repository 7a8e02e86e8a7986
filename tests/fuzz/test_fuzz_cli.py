"""Drawn command lines, configs, specs, tables, launch files, headers: exit code 0 or 2, one line of error, in time."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headers import HEADER, write_gguf

from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.cli import main
from flopcalc.prediction.kernels.constants import load_predictor

SECONDS = 10.0  # of CPU, for one command; nearly all take milliseconds
SEED = "standing"
MODELS = ("gpt2", "llama-3.2-1b", "qwen2-vl-2b", "mixtral-8x7b", "deepseek-v3", "t5-v1.1-xl", "mamba2-2.7b", "nope", "")
WORDS = (
    "", "0", "1", "-1", "4k", "1e3", "1_000", "٣", "0x10", "1.5", "nan", "inf", "1e400", "999999999999", "9" * 50,
    "2,4", "1,36,52", "3x4", "0x0", "100000x100000", "a", "auto", "all", "last", "none", "*", "[", "..", "/",
    "\0", "\ud800", "é", "h200", "a100", "b200", "bf16", "fp8", "r=16,targets=q_proj", "r=0,targets=x",
    "r=4,targets=all-linear", "train", "decode", "prefill", "hardware", "full", "ghost", "1T", "500ms", "40%",
    "4000%", "--", "-", "x" * 5000, "/dev/null", "30s@2fps", "640x480x16", "vision", "language",
)  # fmt: skip
OPTIONS: dict[str, tuple[str, ...]] = {
    "estimate": (
        "--seq", "--batch", "--lengths", "--grad-accum", "--decoder-seq", "--text", "--image", "--image-grid",
        "--video", "--video-grid", "--audio", "--max-pixels", "--freeze", "--train-only", "--lora", "--recompute",
        "--clipping", "--convention", "--attention-kernel", "--device", "--phase", "--context", "--logits", "--dtype",
        "--peak", "--gpus", "--step-time", "--tokens-per-second", "--tokens", "--mfu", "--depth", "--by", "--format",
        "--spec", "--nope",
    ),
    "predict": ("--seq", "--batch", "--device", "--dtype", "--optimizer", "--execution", "--phase", "--lora"),
    "explain": ("--op", "--seq", "--batch", "--convention"),
    "compare": ("--seq", "--batch", "--phase", "--convention"),
    "devices": ("--nope",),
    "translate": ("--from", "--mfu", "--tflops", "--tokens-per-second", "--gpus", "--dtype", "--peak", "--mtp"),
    "plan": (
        "--tokens", "--device", "--gpus", "--seq", "--global-batch", "--tp", "--pp", "--cp", "--dp", "--ep", "--zero",
        "--micro-batch", "--recompute", "--expert-imbalance", "--overlap", "--interconnect", "--price", "--dtype",
        "--execution", "--optimizer", "--top", "--lora", "--freeze", "--image", "--nope",
    ),
}  # fmt: skip


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Empty where a command ends as it should, else what went wrong."""
    start = time.process_time()
    try:
        main(arguments)
        return "no exit code"
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        capsys.readouterr()
        return f"{type(error).__name__}: {str(error)[:200]}"
    spent = time.process_time() - start
    out, err = capsys.readouterr()
    if spent > SECONDS:
        return f"{spent:.1f} s of CPU"
    if code == 2 and (err.count("\n") != 1 or not err.startswith("flopcalc: ") or out):
        return f"code 2 with {err[:200]!r} and {len(out)} characters of output"
    if code not in (0, 2) or len(err) > 8000:
        return f"code {code}, {len(err)} characters of error"
    return ""


def report(wrong: list[str]) -> None:
    assert not wrong, "\n".join(wrong[:10])


# What a command cannot do without; of options that are given twice, the last counts.
NEEDED = {
    "translate": ("--mfu", "40%", "--from", "6nd", "--device", "h200"),
    # One layout: a search of many is another test's.
    "plan": ("--tokens", "1e9", "--device", "h200", "--gpus", "2", "--global-batch", "2", "--tp", "1", "--pp", "1",
             "--cp", "1", "--zero", "1", "--micro-batch", "1", "--recompute", "none"),
}  # fmt: skip


# --- command lines ----------------------------------------------------------------------------------------
def draw_command(rng: random.Random) -> list[str]:
    command = rng.choices(list(OPTIONS), weights=(12, 1, 2, 1, 1, 2, 1))[0]
    arguments = [command]
    if command != "devices":
        arguments.append(rng.choice(MODELS))
        arguments += ["--seq", "64"] if rng.random() < 0.7 else []
        arguments += NEEDED.get(command, ())
    for _ in range(rng.randrange(4)):
        arguments.append(rng.choice(OPTIONS[command]))
        arguments += [rng.choice(WORDS)] if rng.random() < 0.95 else []
    return arguments


def try_commands(rng: random.Random, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for _ in range(count):
        arguments = draw_command(rng)
        if problem := run(arguments, capsys):
            wrong.append(f"{arguments}: {problem}")
    report(wrong)


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    try_commands(random.Random(SEED), 150, capsys)


@pytest.mark.heavy
def test_more_commands(capsys: pytest.CaptureFixture[str], new_seed: int) -> None:
    try_commands(random.Random(new_seed), 3000, capsys)


@pytest.fixture
def new_seed() -> int:
    """Another one in every run; a test that fails shows it among its arguments."""
    return random.SystemRandom().randrange(10**9)


# --- files ----------------------------------------------------------------------------------------
VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 3, 7, 0.5, 64.5, 1e308, -1e308, 10**15, "", "x", "4096", "i", "1 / 0", "9 ** 8 ** 8", [], [1],
    [None], ["a"] * 50, {}, {"a": {}}, [[[]]], "sequence: n * n", "[[1, 2], [3]]", "chunks(10 ** 9, 1, 0, 0)", "model",
)  # fmt: skip


def spoil(value: Any, rng: random.Random) -> Any:
    """The same with one place changed, dropped or doubled."""
    spoiled = copy.deepcopy(value)
    place = spoiled
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return spoiled
        key = rng.choice(keys)
        if isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.8:
            place = place[key]
            continue
        way = rng.randrange(4)
        if way == 0:
            del place[key]
        elif way == 1 and isinstance(place, dict):
            place[rng.choice(("x", "", "i", "op", "use"))] = place.pop(key)
        else:
            place[key] = rng.choice(VALUES)
        return spoiled


def write_toml(table: dict[str, Any]) -> str:
    """Enough of TOML for what specs hold; None is left out."""
    return "\n".join(
        f"{json.dumps(str(key))} = {write_value(value)}" for key, value in table.items() if value is not None
    )


def write_value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{json.dumps(str(key))} = {write_value(each)}" for key, each in value.items() if each is not None)
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(write_value(each) for each in value if each is not None)}]"
    return json.dumps(value)


def load_shipped(folder: str, name: str) -> dict[str, Any]:
    return load_toml(f"{find_data_dir()}/{folder}/{name}.toml")


CONFIGS = ("llama-3.2-1b", "mixtral-8x7b", "qwen2-vl-2b", "deepseek-v3", "gpt2")
SPECS = {
    "llama": "llama-3.2-1b", "mixtral": "mixtral-8x7b", "qwen3_next": "qwen3-next", "gpt2": "gpt2", "t5": "t5-v1.1-xl",
    "qwen2_vl": "qwen2-vl-2b", "deepseek_v3": "deepseek-v3", "mamba": "mamba-130m", "gemma4": "gemma-4-e2b",
    "modernbert": "modernbert-base", "llama4": "llama-4-scout", "nemotron_h": "nemotron-3-nano-30b-a3b",
}  # fmt: skip


def try_config(rng: random.Random, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    config = spoil(load_shipped("presets", rng.choice(CONFIGS))["config"], rng)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return run(["estimate", str(path), "--seq", "64", "--json"], capsys)


def try_spec(rng: random.Random, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    name = rng.choice(list(SPECS))
    tables = spoil(load_shipped("specs", name), rng)
    path = folder / f"{name}.toml"
    path.write_text(write_toml(tables))
    return run(["estimate", SPECS[name], "--seq", "64", "--spec", str(path)], capsys)


def try_table(rng: random.Random, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with open(f"{find_data_dir()}/calibration/h200-sxm/attention.json", encoding="utf-8") as file:
        content = json.load(file)
    content["rows"] = content["rows"][:40]
    tables = folder / "calibration" / "h200-sxm"
    tables.mkdir(parents=True, exist_ok=True)
    (tables / "attention.json").write_text(json.dumps(spoil(content, rng)))
    return run(["estimate", "gpt2", "--seq", "64", "--device", "h200", "--convention", "hardware"], capsys)


def try_predictor(rng: random.Random, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with open(f"{find_data_dir()}/predictors/h200-sxm.json", encoding="utf-8") as file:
        content = json.load(file)
    (folder / "predictors").mkdir(exist_ok=True)
    (folder / "predictors" / "h200-sxm.json").write_text(json.dumps(spoil(content, rng)))
    load_predictor.cache_clear()
    return run(["predict", "sweep-tiny", "--seq", "64", "--device", "h200"], capsys)


def try_results(rng: random.Random, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    row: dict[str, Any] = {
        "id": "a", "status": "ok", "trainer": "StandardTrainer", "model": "tiny", "batch_size": 1, "seq_len": 8,
        "step_time_s": {"median": 1.0, "p10": 1.0, "p90": 1.0}, "peak_memory_bytes": 5, "flops": {"total": 5},
        "environment": {"device": "cpu"}, "notes": ["x"], "seconds": 1.0, "mfu": 0.5, "parameters": 100,
    }  # fmt: skip
    rows = [spoil(row, rng), {**row, "id": "b", "trainer": "DPSGDTrainer"}]
    (folder / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return run(["sweep", "summarize", "--logs-dir", str(folder), *rng.choice(([], ["--json"]))], capsys)


# Keys of launch files, and of what they hold: axolotl's, TRL's, LLaMA-Factory's and others'.
LAUNCHED: dict[str, dict[str, Any]] = {
    "axolotl": {
        "base_model": "gpt2", "adapter": "qlora", "load_in_4bit": True, "lora_r": 8, "lora_alpha": 16,
        "lora_target_modules": ["c_attn"], "sequence_len": 64, "micro_batch_size": 2, "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True}, "bf16": "auto", "datasets": [{"path": "x"}],
    },
    "swift": {
        "model": "gpt2", "tuner_type": "lora", "torch_dtype": "bfloat16", "max_length": 64, "lora_rank": 4,
        "micro_batch_size": 1, "global_batch_size": 4, "recompute_granularity": "full", "tensor_model_parallel_size": 1,
        "train": {"gpus": 4, "tuner_type": "full"},
    },
    "llamafactory": {
        "model_name_or_path": "gpt2", "stage": "sft", "finetuning_type": "lora", "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2, "bf16": True, "cutoff_len": 64, "peft_config": {"name": "lora"},
        "quantization_bit": 4,
    },
}  # fmt: skip


def try_launch(rng: random.Random, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = folder / "launch.yaml"  # JSON is YAML too
    path.write_text(json.dumps(spoil(LAUNCHED[rng.choice(list(LAUNCHED))], rng)))
    return run(["estimate", *rng.choice(([], ["gpt2"])), "--launch", str(path), "--seq", "64"], capsys)


def try_header(rng: random.Random, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = folder / "model.gguf"
    shapes = {"token_embd.weight": ((64, 100), 8), "blk.0.attn_q.weight": ((64, 64), 12)}
    write_gguf(path, {key: value for key, value in HEADER.items() if rng.random() < 0.97}, shapes)
    data = bytearray(path.read_bytes())
    for _ in range(rng.randrange(3)):
        data[rng.randrange(len(data))] = rng.choice((0, 1, 4, 8, 9, 127, 255))
    path.write_bytes(data[: rng.choice((len(data), len(data), rng.randrange(len(data))))])
    return run(["estimate", str(path), "--seq", "64"], capsys)


TRIALS: dict[str, tuple[Callable[..., str], int]] = {
    "config": (try_config, 40), "spec": (try_spec, 25), "table": (try_table, 10), "predictor": (try_predictor, 6),
    "results": (try_results, 20), "launch": (try_launch, 25), "header": (try_header, 40),
}  # fmt: skip


def try_files(kind: str, rng: random.Random, count: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for number in range(count):
        if problem := TRIALS[kind][0](rng, folder, capsys):
            wrong.append(f"{kind} {number}: {problem}")
    report(wrong)


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    yield tmp_path
    load_predictor.cache_clear()


@pytest.mark.parametrize("kind", TRIALS)
def test_files(kind: str, data_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try_files(kind, random.Random(f"{SEED} {kind}"), TRIALS[kind][1], data_folder, capsys)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", TRIALS)
def test_more_files(kind: str, data_folder: Path, capsys: pytest.CaptureFixture[str], new_seed: int) -> None:
    try_files(kind, random.Random(new_seed), 20 * TRIALS[kind][1], data_folder, capsys)
