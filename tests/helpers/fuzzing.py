"""What the standing fuzz draws, runs and judges; `scripts/fuzz --minutes N` is the long run of it.

A case is a command line with the files that it reads, so that what was found can be kept as data (tests/fuzz/corpus).
Every command must end with code 0, or 2 and one line of error, within its limits of CPU time and memory.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from headers import HEADER, write_gguf

from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.cli import main
from flopcalc.prediction.kernels.constants import load_predictor
from flopcalc.web.answers import answer

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
PROOF = ROOT / "docs" / "proof.md"
LAST_LONG_RUN = re.compile(r"(?<=\| minutes \| commit \| cases \| found \|\n\|---\|---\|---\|---\|---\|\n).*(?=\n)")
SECONDS = 10.0  # of CPU, for one command; nearly all take milliseconds
MOST_BYTES = 1 << 30  # of memory


class Case(NamedTuple):
    """A command line and the files that lie where it runs; `page` asks the browser page's door instead."""

    arguments: list[str]
    files: dict[str, bytes] = {}  # noqa: RUF012 - never changed
    words: str = ""  # what is printed, of a case whose answer is known

    def to_dict(self) -> dict[str, Any]:
        files: dict[str, Any] = {}
        for name, data in self.files.items():
            try:
                files[name] = data.decode()
            except UnicodeDecodeError:
                files[name] = {"hex": data.hex()}
        return {"arguments": self.arguments, "files": files, "words": self.words}


def read_case(path: Path) -> Case:
    found = json.loads(path.read_text())
    files = {
        name: bytes.fromhex(text["hex"]) if isinstance(text, dict) else text.encode()
        for name, text in found["files"].items()
    }
    return Case(found["arguments"], files, found["words"])


# --- Running ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lay_out(case: Case, folder: Path) -> Iterator[None]:
    """Go where the case's files lie, and nothing else."""
    before = os.getcwd()
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    folder.mkdir(exist_ok=True)
    with mock.patch.dict(os.environ, FLOPCALC_DATA=str(folder / "data"), HF_HUB_CACHE=str(folder / "hub")):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            load_predictor.cache_clear()


def call(case: Case) -> tuple[object, str, str]:
    """Exit code, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    code: object = "no exit code"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if case.arguments[0] == "page":
                out.write(answer(case.arguments[1]))
                code = 0
            else:
                main(case.arguments)
        except SystemExit as ended:
            code = ended.code
        except BaseException as error:
            code = f"{type(error).__name__}: {str(error)[:200]}"
    return code, out.getvalue(), err.getvalue()


def judge(case: Case, code: object, out: str, err: str) -> str:
    """Empty if a command ended as it should, else what went wrong."""
    if code == 2 and (err.count("\n") != 1 or not err.startswith("flopcalc: ") or out):
        return f"code 2 with {err[:200]!r} and {len(out)} characters of output"
    if code not in (0, 2) or len(err) > 8000:
        return f"code {code}, {len(err)} characters of error"
    if case.words not in out + err:
        return f"{case.words!r} is not in {(out + err)[-300:]!r}"
    if code == 0 and ("--json" in case.arguments or case.arguments[0] == "page"):
        try:
            json.loads(out, parse_constant=_refuse)
        except ValueError as error:
            return f"no JSON: {error}"
    return ""


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def run_here(case: Case, folder: Path) -> str:
    """In this process: quick, and one that never ends holds everything up."""
    with lay_out(case, folder):
        start = time.process_time()
        found = call(case)
        spent_s = time.process_time() - start
    return judge(case, *found) or (f"{spent_s:.1f} s of CPU" if spent_s > SECONDS else "")


def run_apart(case: Case, folder: Path) -> str:
    """In a child that is stopped where it takes too long or too much memory."""
    with lay_out(case, folder), tempfile.TemporaryFile("w+") as answers:
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS) + 2, int(SECONDS) + 5))
            resource.setrlimit(resource.RLIMIT_AS, (4 * MOST_BYTES, 4 * MOST_BYTES))
            json.dump(call(case), answers)
            answers.flush()
            os._exit(0)
        _, status, used = os.wait4(child, 0)
        answers.seek(0)
        text = answers.read()
    spent_s = used.ru_utime + used.ru_stime
    if spent_s > SECONDS or os.WIFSIGNALED(status):
        stopped = f", stopped by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else ""
        return f"{spent_s:.1f} s of CPU{stopped}"
    if used.ru_maxrss * 1024 > MOST_BYTES:
        return f"{used.ru_maxrss // 1024} MiB of memory"
    code, out, err = json.loads(text)
    return judge(case, code, out, err)


# --- Command lines ----------------------------------------------------------------------------------------------------
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
SERVED = (
    "--input-len", "--output-len", "--concurrency", "--rate", "--users", "--think", "--ttft", "--itl", "--prefix-hit",
    "--speculative", "--disaggregate", "--engine", "--engine-args", "--launch", "--max-seqs", "--max-batched-tokens",
    "--memory-fraction", "--tp", "--pp", "--dp", "--ep", "--weights", "--kv-cache", "--price", "--benchmark", "--nope",
)  # fmt: skip
LOADS = ("1,8,64", "16384", "1k..2k", "500ms@p99", "k=3,accept=0.7", "k=0,accept=2", "2p4d", "0p1d", "r.csv", "'",
         "vllm serve gpt2 --max-num-seqs 0", "vllm serve 'x", "--tensor-parallel-size x", "--max-num-seqs=4", "vllm",
         "sglang@9", "inferencex", "mxfp4")  # fmt: skip
# What a command cannot do without; of options that are given twice, the last counts.
NEEDED = {
    "translate": ("--mfu", "40%", "--from", "6nd", "--device", "h200"),
    # One layout: a search of many is another test's.
    "plan": ("--tokens", "1e9", "--device", "h200", "--gpus", "2", "--global-batch", "2", "--tp", "1", "--pp", "1",
             "--cp", "1", "--zero", "1", "--micro-batch", "1", "--recompute", "none"),
}  # fmt: skip


def draw_command(rng: random.Random) -> Case:
    command = rng.choices(list(OPTIONS), weights=(12, 1, 2, 1, 1, 2, 1))[0]
    arguments = [command]
    if command != "devices":
        arguments.append(rng.choice(MODELS))
        arguments += ["--seq", "64"] if rng.random() < 0.7 else []
        arguments += NEEDED.get(command, ())
    for _ in range(rng.randrange(4)):
        arguments.append(rng.choice(OPTIONS[command]))
        arguments += [rng.choice(WORDS)] if rng.random() < 0.95 else []
    return Case(arguments)


def draw_serving(rng: random.Random) -> Case:
    """A deployment with its load, and tables of requests or of measured rows."""
    arguments = ["serving", rng.choice(("llama-3.2-1b", "mixtral-8x7b", "gpt2")), "--device", "h100", "--json"]
    row = [rng.choice(("0.5", "128", "16", *WORDS)) for _ in range(3)]
    text = "arrival_s,input,output\n0,128,16\n" + ",".join(row).replace("\ud800", "?") + "\n"
    if rng.random() < 0.3:
        table = text if rng.random() < 0.5 else text.replace("arrival_s,input,output", "model,tp,tpot_ms")
        option = rng.choice(("--requests", "--check", "--input-len"))
        return Case([*arguments, option, "r.csv"], {"r.csv": spoil_bytes(bytearray(table.encode()), rng)})
    arguments += ["--input-len", "128", "--output-len", "16"]
    for _ in range(rng.randrange(4)):
        arguments += [rng.choice(SERVED), rng.choice((*WORDS, *LOADS))]
    return Case(arguments, {"r.csv": text.encode()})


# --- Values in files --------------------------------------------------------------------------------------------------
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


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


def draw_config(rng: random.Random) -> Case:
    config = spoil(load_shipped("presets", rng.choice(CONFIGS))["config"], rng)
    return Case(["estimate", "config.json", "--seq", "64", "--json"], {"config.json": as_json(config)})


def draw_spec(rng: random.Random) -> Case:
    name = rng.choice(list(SPECS))
    tables = spoil(load_shipped("specs", name), rng)
    arguments = ["estimate", SPECS[name], "--seq", "64", "--spec", f"{name}.toml"]
    return Case(arguments, {f"{name}.toml": write_toml(tables).encode()})


def draw_table(rng: random.Random) -> Case:
    with open(f"{find_data_dir()}/calibration/h200-sxm/attention.json", encoding="utf-8") as file:
        content = json.load(file)
    content["rows"] = content["rows"][:40]
    arguments = ["estimate", "gpt2", "--seq", "64", "--device", "h200", "--convention", "hardware"]
    return Case(arguments, {"data/calibration/h200-sxm/attention.json": as_json(spoil(content, rng))})


def draw_predictor(rng: random.Random) -> Case:
    with open(f"{find_data_dir()}/predictors/h200-sxm.json", encoding="utf-8") as file:
        content = json.load(file)
    arguments = ["predict", "sweep-tiny", "--seq", "64", "--device", "h200"]
    return Case(arguments, {"data/predictors/h200-sxm.json": as_json(spoil(content, rng))})


def draw_results(rng: random.Random) -> Case:
    row: dict[str, Any] = {
        "id": "a", "status": "ok", "trainer": "StandardTrainer", "model": "tiny", "batch_size": 1, "seq_len": 8,
        "step_time_s": {"median": 1.0, "p10": 1.0, "p90": 1.0}, "peak_memory_bytes": 5, "flops": {"total": 5},
        "environment": {"device": "cpu"}, "notes": ["x"], "seconds": 1.0, "mfu": 0.5, "parameters": 100,
    }  # fmt: skip
    rows = [spoil(row, rng), {**row, "id": "b", "trainer": "DPSGDTrainer"}]
    text = "".join(json.dumps(each) + "\n" for each in rows)
    arguments = ["sweep", "summarize", "--logs-dir", ".", *rng.choice(([], ["--json"]))]
    return Case(arguments, {"results.jsonl": text.encode()})


def draw_header(rng: random.Random) -> Case:
    shapes: dict[str, tuple[tuple[int, ...], int]] = {
        "token_embd.weight": ((64, 100), 8),
        "blk.0.attn_q.weight": ((64, 64), 12),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(path, {key: value for key, value in HEADER.items() if rng.random() < 0.97}, shapes)
        data = bytearray(path.read_bytes())
    return Case(["estimate", "model.gguf", "--seq", "64"], {"model.gguf": spoil_bytes(data, rng)})


def spoil_bytes(data: bytearray, rng: random.Random) -> bytes:
    """The same with some bytes changed, perhaps cut off."""
    for _ in range(rng.randrange(3)):
        data[rng.randrange(len(data))] = rng.choice((0, 1, 4, 8, 9, 127, 255))
    return bytes(data[: rng.choice((len(data), len(data), rng.randrange(len(data))))])


# --- Launch files -----------------------------------------------------------------------------------------------------
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
# Words that YAML 1.1 and 1.2, or a parser and its user, may read in different ways.
SCALARS = (
    "0o17", "017", "0x1F", "0b11", "12:30:45.5", "190:20:30", "1" + ":59" * 200 + ".5", "1_000", "1__", "._", ".nan",
    "-.inf", "+.INF", "1e400", "1e-5", "9" * 5000, "0x" + "f" * 5000, "2001-12-14", "2001-99-99", "yes", "No", "on",
    "~", "=", "<<", "'²'", "①", "!!int 0b", "!!int x", "!!int ''", "!!float 1:30", "!!float x", "!!bool maybe",
    "!!null x", "!!timestamp 2020-13-45", "!!binary AAA", "!!set {a}", "!!omap [a: 1]", "!!pairs [a: 1]",
    "!!python/name:os.system",
    "&a [*a]", "[*zz]", "{<<: 1}", "{<<: [1]}", "{<<: {a: 1}}", "{? [a] : 1}", "[" * 400, "{a: " * 60 + "1" + "}" * 60,
    "|", ">-", "%x", "@x", "`x", '"\\ud800"', '"\\x00"', "auto", "q_proj,v_proj", "- - - 1", "\t",
)  # fmt: skip


def draw_launch(rng: random.Random) -> Case:
    table = LAUNCHED[rng.choice(list(LAUNCHED))]
    arguments = ["estimate", *rng.choice(([], ["gpt2"])), "--launch", "launch.yaml", "--seq", "64", "--json"]
    if rng.random() < 0.4:
        return Case(arguments, {"launch.yaml": as_json(spoil(table, rng))})  # JSON is YAML too
    lines = [f"{key}: {json.dumps(value)}" for key, value in table.items()]
    for _ in range(rng.randrange(1, 4)):
        key = rng.choice([*table, "x", "lora_target_modules", "gradient_checkpointing", "mixed_precision", "adapter"])
        lines.insert(rng.randrange(len(lines) + 1), f"{key}: {rng.choice(SCALARS)}")
    return Case(arguments, {"launch.yaml": "\n".join(lines).encode()})


def draw_bomb(rng: random.Random) -> Case:
    """A few lines of YAML that name each other so often that all of it would fill any memory."""
    wide, deep = rng.randrange(2, 40), rng.randrange(2, 40)
    inner, outer = rng.choice((("*a{}", "[{}]"), ("k{1}: *a{0}", "{{{}}}"), ("*a{}", "{{<<: [{}]}}"),
                               ("<<: *a{}", "{{{}}}"), ("*a{}", "!!pairs [{}]")))  # fmt: skip
    lines = ["base_model: gpt2", "a0: &a0 {x: 1, y: [1, 2]}"]
    for level in range(1, deep):
        entries = ", ".join(inner.format(level - 1, number) for number in range(wide))
        lines.append(f"a{level}: &a{level} {outer.format(entries)}")
    lines.append(rng.choice(("", f"datasets: *a{deep - 1}", f"<<: *a{deep - 1}")))
    return Case(["estimate", "--launch", "launch.yaml", "--seq", "64"], {"launch.yaml": "\n".join(lines).encode()})


def draw_pattern(rng: random.Random) -> Case:
    """A LoRA target that is a regular expression, most of them odd, some catastrophic."""
    text = rng.choice(("c_attn", "[a-z.]", r"\w", ".", "a", r"h\.\d"))
    for _ in range(rng.randrange(9)):
        form = rng.choice(("({})+", "({}|.)*", "({})?", "{}{}", ".*{}", "(?:{})", "(?={}).*", "(?i:{})", "{}{{2,}}",
                           "({}", "{}\\", "({})" + r"\1", "{}*?", "(?<!{}).*", "[{}]", "{}{{99999}}"))  # fmt: skip
        text = form.replace("{}", text).replace("{{", "{").replace("}}", "}")[:2000]
    if rng.random() < 0.1:
        text = "(" * 5000 + text + ")" * 5000
    if rng.random() < 0.5:
        return Case(["estimate", "gpt2", "--seq", "64", "--lora", f"r=4,targets=re:{text}"])
    table = {**LAUNCHED["axolotl"], "lora_target_modules": text}
    return Case(["estimate", "--launch", "launch.yaml"], {"launch.yaml": as_json(table)})


# --- Pipelines, images, the page --------------------------------------------------------------------------------------
PIPELINES = ("flux.1-dev", "cogvideox-2b", "dit-xl-2-256", "pixart-sigma", "ltx-video")


def draw_pipeline(rng: random.Random) -> Case:
    config = load_shipped("presets", rng.choice(PIPELINES))["config"]
    parts = {name: part for name, part in config.items() if isinstance(part, dict)}
    index: dict[str, Any] = {
        name: ["diffusers", part["_class_name"]] for name, part in parts.items() if "_class_name" in part
    }
    index = {"_class_name": config["_class_name"], "_diffusers_version": "0.33", **index}
    spoiled = rng.choice(("", *parts))
    index = spoil(index, rng) if not spoiled else index
    files = {"pipe/model_index.json": as_json(index)}
    for name, part in parts.items():
        if rng.random() < 0.95:
            files[f"pipe/{name}/config.json"] = as_json(spoil(part, rng) if name == spoiled else part)
    return Case(["estimate", "pipe", "--image", "512x512", "--json"], files)


def draw_image(rng: random.Random) -> Case:
    size = [rng.choice((0, 1, 28, 640, 65535, 2**31 - 1, 2**32 - 1)) for _ in range(2)]
    small = [min(each, 65535) for each in size]
    data = rng.choice(
        (
            b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", *size) + b"\x08\x02\0\0\0",
            b"GIF89a" + struct.pack("<HH", *small) + b"\xf7\0\0",
            b"BM" + struct.pack("<IIIIII", 70, 0, 54, 40, *size) + b"\x01\0\x18\0",
            b"RIFF\x24\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(4) + struct.pack("<I", size[0])[:3] * 2,
            b"\xff\xd8\xff\xe1\0\x10Exif\0\0MM\0*\0\0\0\x08\xff\xc0\0\x11\x08" + struct.pack(">HH", *small) + bytes(12),
            b"\xff\xd8" + b"\xff\xe0\0\x02" * 20_000,
        )
    )
    arguments = ["estimate", rng.choice(("qwen2-vl-2b", "gpt2")), "--text", "8", "--image", "picture", "--json"]
    return Case(arguments, {"picture": spoil_bytes(bytearray(data), rng)})


PAGE: dict[str, Any] = {
    "model": "llama-3.2-1b", "seq": "64", "batch": "2", "lora": "r=8,targets=q_proj", "recompute": "full",
    "device": "h200", "freeze": ["model.embed_tokens"], "gpus": "8", "tokens": "1T", "mfu": "40%", "from": "6nd",
    "image": ["512x512"], "files": {"config.json": '{"model_type": "llama", "hidden_size": 64}'},
}  # fmt: skip
VIEWS = ("flops", "export", "conventions", "translate", "time", "memory", "roofline", "explain", "launch", "x", None)


def draw_page(rng: random.Random) -> Case:
    """What a link to the page may hold, or a file that is dropped onto it."""
    setup = {name: value for name, value in PAGE.items() if name == "model" or rng.random() < 0.4}
    for _ in range(rng.randrange(3)):
        if rng.random() < 0.5 and setup:
            setup = spoil(setup, rng)
        else:
            setup[rng.choice(list(PAGE))] = rng.choice((*WORDS, *VALUES))
    question: dict[str, Any] = {"what": rng.choice(VIEWS), "setup": setup, "op": rng.choice(WORDS)}
    if question["what"] == "launch":
        launch = rng.choice((draw_launch, draw_bomb, draw_pattern))(rng)
        question |= {"name": "launch.yaml", "text": launch.files.get("launch.yaml", b"").decode()}
    text = json.dumps(spoil(question, rng) if rng.random() < 0.2 else question)
    return Case(["page", "[" * 100_000 if rng.random() < 0.01 else text])


# --- Adapters, the hub's cache, and numbers in every place ------------------------------------------------------------
ADAPTER: dict[str, Any] = {
    "base_model_name_or_path": "gpt2", "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["c_attn"],
    "task_type": "CAUSAL_LM", "modules_to_save": None, "rank_pattern": {}, "layers_to_transform": None,
    "use_dora": False, "target_parameters": None, "exclude_modules": None, "bias": "none", "use_rslora": True,
}  # fmt: skip


def draw_adapter(rng: random.Random) -> Case:
    settings = spoil(spoil(ADAPTER, rng), rng)
    if rng.random() < 0.3:
        settings["base_model_name_or_path"] = rng.choice(("meta-llama/Llama-3.1-8B", "../..", "ad", ".", "\0", "a/b"))
    if rng.random() < 0.3:
        settings["target_modules"] = rng.choice(("all-linear", ".*", "(a+)+b", ["c_attn"] * 1000, "x" * 9999))
    return Case(
        [rng.choice(("estimate", "explain")), "ad", "--seq", "64"], {"ad/adapter_config.json": as_json(settings)}
    )


def draw_hub(rng: random.Random) -> Case:
    """A cache of the hub with spoiled files."""
    config = load_shipped("presets", "llama-3.2-1b")["config"]
    files = {
        "refs/main": rng.choice((b"abc", b"abc", b"abc", b"", b"../../..", b"abc\n", b"\0" * 10, b"x" * 100_000)),
        "snapshots/abc/config.json": rng.choice((as_json(spoil(config, rng)), b"", b"[]", b"{", b"\xff")),
    }
    arguments = ["estimate", "meta-llama/Llama-3.1-8B", "--seq", "64", "--json"]
    return Case(arguments, {f"hub/models--meta-llama--Llama-3.1-8B/{name}": data for name, data in files.items()})


NUMBERS = (
    "0", "-1", "1e400", "nan", "inf", "1e-400", "0.0000001", "9" * 400, "1e18", "1_000", "0x10", "١٢", "½", "1/3", "1e",
    "+5", "--5", " 5", "5k5", "5kk", "-0", "1e308", "1e-308", "0.1%", "1000%", "$", "2$", "€3", "1ms", "0ms", "1e9h",
    "5m", "1.5.2", *("8", "2", "40%", "2.50$", "400g/kWh", "500ms", "1.5", "16Mtok") * 3,
)  # fmt: skip
MEASURED = {
    "plan": ("--batch", "--tokens", "--mfu", "--price", "--grid", "--pue", "--gpus", "--memory", "--dp", "--top"),
    "translate": ("--mfu", "--tokens-per-second", "--step-time", "--gpus", "--batch"),
    "predict": ("--batch", "--price", "--grid", "--pue", "--context", "--gpus", "--seq"),
    "explain": ("--batch", "--seq", "--gpus", "--lengths"), "compare": ("--batch", "--seq", "--image"),
    "estimate": ("--device", "--batch", "--gpus", "--step-time", "--mfu", "--tokens", "--max-pixels", "--audio"),
}  # fmt: skip


def draw_number(rng: random.Random) -> Case:
    command = rng.choice(list(MEASURED))
    arguments = [command, "llama-3.2-1b", "--seq", "64", *NEEDED.get(command, ())]
    arguments += ["gpt2"] if command == "compare" else ["--device", "h200"] if command == "predict" else []
    for _ in range(1 + rng.randrange(2)):
        arguments += [rng.choice(MEASURED[command]), rng.choice(NUMBERS)]
    return Case([*arguments, *rng.choice(([], ["--json"]))])


# --- Large files ------------------------------------------------------------------------------------------------------
def draw_large(rng: random.Random) -> Case:
    """Files of up to 10 MB, for every reader."""
    count = rng.choice((1000, 30_000, 1_000_000))
    config = load_shipped("presets", "llama-3.2-1b")["config"]
    many = rng.choice((list(range(count)), ["a"] * count, {str(i): i for i in range(count)}, "x" * 9 * count))
    key = rng.choice(("layer_types", "architectures", "rope_scaling", "quantization_config", "x", "hidden_size",
                      "text_config", "id2label", "_class_name", "num_hidden_layers"))  # fmt: skip
    text = as_json({**config, key: many})[:10_000_000]
    modules = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": [f"model.layers.{i}" for i in range(count)]}
    quantized = as_json({**config, "quantization_config": modules})
    rows = b'{"id":"a","status":"ok"}\n' * min(count, 400_000)
    return rng.choice(
        (
            Case(["estimate", "config.json", "--seq", "64"], {"config.json": text}),
            Case(["estimate", "config.json", "--seq", "64"], {"config.json": quantized}),
            Case(["estimate", "--launch", "a.json"], {"a.json": text}),
            Case(["estimate", "--launch", "a.yaml"], {"a.yaml": text[: rng.choice((400_000, 10_000_000))]}),
            Case(["estimate", "--launch", "a.toml"], {"a.toml": b"a = 1\n" + b"[[b]]\nc = 1\n" * min(count, 700_000)}),
            Case(["estimate", "gpt2", "--seq", "64", "--spec", "a.toml"], {"a.toml": b"[a" + b".b" * count + b"]\n"}),
            Case(
                ["estimate", "gpt2", "--seq", "64", "--spec", "a.toml"], {"a.toml": b"x = [" + b"1," * count + b"]\n"}
            ),
            Case(
                ["monitor", "show", "a.jsonl"], {"a.jsonl": b'{"type":"step","global_step":1}\n' * min(count, 300_000)}
            ),
            Case(["sweep", "summarize", "--logs-dir", "."], {"results.jsonl": rows}),
            Case(["estimate", "gpt2", "--lengths", ",".join(["7"] * min(count, 60_000))]),
            Case(["explain", "gpt2", "--seq", "64", "--op", "*a" * min(count, 60_000)]),
            Case(["estimate", "gpt2", "--seq", "64", "--freeze", "*a" * min(count, 60_000)]),
            Case(["predict", "llama-3.2-1b", "--device", "h200", "--seq", str(rng.randrange(1, 10**9))]),
            Case(["page", json.dumps({"what": "flops", "setup": {**PAGE, "files": {"config.json": text.decode()}}})]),
        )
    )


Draw = Callable[[random.Random], Case]
# Kind -> what draws it, and how many the quick test takes.
KINDS: dict[str, tuple[Draw, int]] = {
    "command": (draw_command, 150), "config": (draw_config, 40), "spec": (draw_spec, 25), "table": (draw_table, 10),
    "predictor": (draw_predictor, 6), "results": (draw_results, 20), "launch": (draw_launch, 60),
    "header": (draw_header, 40), "bomb": (draw_bomb, 20), "pipeline": (draw_pipeline, 20), "image": (draw_image, 30),
    "page": (draw_page, 40), "serving": (draw_serving, 20), "adapter": (draw_adapter, 20), "hub": (draw_hub, 10),
    "number": (draw_number, 30), "pattern": (draw_pattern, 0), "large": (draw_large, 0),
}  # fmt: skip


# --- The long run -----------------------------------------------------------------------------------------------------
def run_long(minutes: float, kinds: Sequence[str], seed: int) -> int:
    """Draw and run cases for so long; what is found goes into the corpus. How many were found."""
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    found = 0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() - begun < 60 * minutes:
            kind = rng.choice(kinds)
            case = KINDS[kind][0](rng)
            counts[kind] += 1
            if problem := run_apart(case, Path(folder) / "case"):
                found += 1
                path = CORPUS / f"{kind}-{seed}-{counts[kind]}.json"
                path.write_text(json.dumps(case.to_dict(), indent=1) + "\n")
                print(f"{path.relative_to(ROOT)}: {problem}", flush=True)
    shown = ", ".join(f"{kind} {count:,}" for kind, count in sorted(counts.items()))
    print(f"{counts.total():,} cases in {minutes:g} minutes, seed {seed}: {found} found ({shown})")
    if set(kinds) == set(KINDS):
        row = f"| {datetime.now(UTC).date()} | {minutes:g} | `{commit.stdout.strip()}` | {counts.total():,} | {found} |"
        PROOF.write_text(LAST_LONG_RUN.sub(row, PROOF.read_text(encoding="utf-8")), encoding="utf-8")
    return found


def run_from_shell(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description="The standing fuzz for as long as you like.")
    parser.add_argument("--minutes", type=float, default=60.0, help="default 60")
    parser.add_argument("--kinds", default=",".join(KINDS), help="only these, with commas; docs/proof.md then stays")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**9), help="default: a new one")
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    for kind in kinds:
        if kind not in KINDS:
            parser.error(f"no kind {kind!r}; known: {', '.join(KINDS)}")
    return 1 if run_long(options.minutes, kinds, options.seed) else 0


if __name__ == "__main__":
    sys.exit(run_from_shell())
