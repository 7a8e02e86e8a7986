"""One question through every door (Python, command line, launch file, page) has one answer, and one refusal."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

import flopcalc
from flopcalc import FlopcalcError, estimate_flops, hfu, mfu, plan, predict, translate
from flopcalc.base.spelling import KEYWORDS, spell_option
from flopcalc.cli import _group, main
from flopcalc.core.estimate.inputs import Inputs
from flopcalc.core.model.config import load_config
from flopcalc.setup.fields import COMMANDS, FIELDS, GROUPS, Command, list_fields
from flopcalc.setup.setup import BESIDE, from_keywords
from flopcalc.web.answers import answer

Capture = pytest.CaptureFixture[str]
MEDIA = ("image", "video", "image_grid", "video_grid", "audio")  # of one sample; in Python, of the whole batch
# What a launch file says of a field: HF's TrainingArguments, and accelerate's number of processes.
LAUNCHED = {
    "batch": "per_device_train_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "seq": "max_length",
    "recompute": "gradient_checkpointing",
}
WRITTEN = {"1k": 1024, "128k": 131072, "full": True}  # as a launch file writes it


class Case(NamedTuple):
    """A model and its fields as texts, GPUs and sequences of a step, and one sample of it in Python."""

    model: str
    fields: dict[str, Any]
    gpus: int
    global_batch: int
    sample: dict[str, Any]


SEQ = {"seq_len": 1024}
CASES = {
    "one GPU": Case("gpt2", {"seq": "1k", "batch": "4"}, 1, 4, SEQ),
    "per GPU": Case("gpt2", {"seq": "1024", "batch": "4", "gpus": "8"}, 8, 32, SEQ),
    "accumulated": Case("gpt2", {"seq": "1k", "batch": "2", "grad_accum": "3", "gpus": "4"}, 4, 24, SEQ),
    "groups of GPUs": Case("gpt2", {"seq": "1k", "batch": "2", "gpus": "8", "tp": "2", "pp": "2"}, 8, 4, SEQ),
    "sequences": Case("gpt2", {"seq": "1k", "batch": "2", "gpus": "4", "global_batch": "32"}, 4, 32, SEQ),
    "tokens": Case("gpt2", {"seq": "1k", "batch": "4", "gpus": "8", "global_batch": "16M tokens"}, 8, 16384, SEQ),
    "tok": Case("gpt2", {"seq": "1k", "batch": "4", "gpus": "8", "global_batch": "16Mtok"}, 8, 16384, SEQ),
    "plain tokens": Case("gpt2", {"seq": "1k", "global_batch": "8192 tokens"}, 1, 8, SEQ),
    "checkpointing": Case(
        "gpt2", {"seq": "1k", "gpus": "2", "recompute": "full", "convention": "hardware"}, 2, 2,
        {**SEQ, "recompute": "full", "convention": "hardware"},
    ),
    "long": Case("llama-3.1-8b", {"seq": "128k", "gpus": "8"}, 8, 8, {"seq_len": 131072}),
    "images": Case(
        "qwen2-vl-2b",
        {"text": "512", "batch": "2", "gpus": "4", "image": ("1024x768", "640x480"), "freeze": ("vision",)}, 4, 8,
        {"text": 512, "images": [(1024, 768), (640, 480)], "recipe": {"freeze": "vision"}},
    ),
    "few pixels": Case(
        "qwen2-vl-2b", {"text": "512", "batch": "2", "image": ("4096x3072",), "max_pixels": "1M"}, 1, 2,
        {"text": 512, "images": [(4096, 3072)], "max_pixels": 1_000_000},
    ),
    "LoRA": Case(
        "llama-3.2-1b", {"seq": "256", "gpus": "2", "lora": "r=16,targets=q_proj+v_proj"}, 2, 2,
        {"seq_len": 256, "lora": {"r": 16, "targets": ["q_proj", "v_proj"]}},
    ),
    "decode": Case(
        "gpt2", {"seq": "1", "batch": "3", "phase": "decode", "context": "512", "gpus": "2"}, 2, 6,
        {"seq_len": 1, "phase": "decode", "context": 512},
    ),
}  # fmt: skip
Answer = tuple[int, int, int]


def make_keywords(fields: dict[str, Any]) -> dict[str, Any]:
    """The Python keywords of fields; a batch of two has every image twice."""
    batch = int(fields.get("batch", 1))
    return {
        KEYWORDS.get(name, name): list(value) * (batch if name in MEDIA else 1) if isinstance(value, tuple) else value
        for name, value in fields.items()
    }


def make_words(fields: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in fields.items():
        for each in value if isinstance(value, tuple) else (value,):
            words += [spell_option(name, "")] if each is True else [spell_option(name, ""), each]
    return words


def run_json(capsys: Capture, *arguments: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    return json.loads(out)


def fail(capsys: Capture, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    return err.removeprefix("flopcalc: ").rstrip("\n")


def ask_page(what: str, model: str, fields: dict[str, Any]) -> Any:
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    return json.loads(answer(json.dumps({"what": what, "setup": {"model": model, **given}})))


def read(shown: dict[str, Any]) -> Answer:
    return int(shown["flops"]["total"]), shown["gpus"], shown["global_batch"]


def write_launch(folder: Path, fields: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Launch files that say what they can of the fields, and the fields that are left."""
    said = {key: WRITTEN.get(fields[name], fields[name]) for name, key in LAUNCHED.items() if name in fields}
    said = {"output_dir": "out", "per_device_train_batch_size": 1, **said}
    (folder / "args.json").write_text(json.dumps(said), encoding="utf-8")
    files = (str(folder / "args.json"),)
    if "gpus" in fields:
        (folder / "accelerate.yaml").write_text(
            f"compute_environment: LOCAL_MACHINE\nnum_processes: {fields['gpus']}\n", encoding="utf-8"
        )
        files += (str(folder / "accelerate.yaml"),)
    return files, {name: value for name, value in fields.items() if name not in (*LAUNCHED, "gpus")}


@pytest.mark.parametrize("name", CASES)
def test_every_door(capsys: Capture, tmp_path: Path, name: str) -> None:
    model, fields, gpus, global_batch, sample = CASES[name]
    one = estimate_flops(model, **sample)
    assert (one.gpus, one.global_batch) == (1, 1)
    expected = (one.total * global_batch, gpus, global_batch)
    found = estimate_flops(model, **make_keywords(fields))
    assert (found.total, found.gpus, found.global_batch) == expected
    assert read(run_json(capsys, "estimate", model, *make_words(fields))) == expected
    assert read(ask_page("flops", model, fields)["estimate"]) == expected
    files, rest = write_launch(tmp_path, fields)
    launched = estimate_flops(model, launch=files, **make_keywords({**rest, **_keep_batch(fields)}))
    assert (launched.total, launched.gpus, launched.global_batch) == expected
    words = [word for file in files for word in ("--launch", file)]
    assert read(run_json(capsys, "estimate", model, *words, *make_words(rest))) == expected


def _keep_batch(fields: dict[str, Any]) -> dict[str, Any]:
    """Python's images are of the whole batch, which is then given beside them."""
    return {"batch": fields["batch"]} if set(MEDIA) & set(fields) and "batch" in fields else {}


# --- time, units and what several GPUs change -------------------------------------------------------------------------
TIMED = ("--device", "h200", "--step-time", "2s")


def test_a_launch_file_and_gpus_as_two_launch_files(capsys: Capture, tmp_path: Path) -> None:
    """TrainingArguments with --gpus 8, and with an accelerate file of eight processes, are one job."""
    files, _ = write_launch(tmp_path, {"batch": "4", "gpus": "8"})
    first = run_json(capsys, "estimate", "llama-3.1-8b", "--seq", "2048", *TIMED, "--launch", files[0], "--gpus", "8")
    both = ("--launch", files[0], "--launch", files[1])
    second = run_json(capsys, "estimate", "llama-3.1-8b", "--seq", "2048", *TIMED, *both)
    plain = run_json(capsys, "estimate", "llama-3.1-8b", "--seq", "2048", *TIMED, "--batch", "4", "--gpus", "8")
    assert read(first) == read(second) == read(plain)
    assert first["mfu"] == second["mfu"] == plain["mfu"]
    job = estimate_flops("llama-3.1-8b", seq_len=2048, batch_size=4, gpus=8)
    for share in (mfu, hfu):
        assert share(job, 2, device="h200").to_dict() == plain[share.__name__]
    single = estimate_flops("llama-3.1-8b", seq_len=2048, batch_size=4)
    assert plain["mfu"]["value"] == mfu(single, 2, device="h200").value  # each GPU does as one alone


# One job as each framework writes it, and how it says that two GPUs share a sample.
JOB = {"seq": "1k", "batch": "4", "grad_accum": "2", "recompute": "full", "compute": "bf16", "gpus": "8"}
JOBS = {
    "axolotl": (
        "base_model: gpt2\nsequence_len: 1024\nmicro_batch_size: 4\ngradient_accumulation_steps: 2\n"
        "gradient_checkpointing: true\nbf16: true\n",
        "tensor_parallel_size: 2\n",
    ),
    "LLaMA-Factory": (
        "model_name_or_path: gpt2\nfinetuning_type: full\ncutoff_len: 1024\nper_device_train_batch_size: 4\n"
        "gradient_accumulation_steps: 2\nuse_reentrant_gc: false\nbf16: true\n",
        "tensor_model_parallel_size: 2\n",
    ),
    "TRL": (
        "model_name_or_path: gpt2\nmax_length: 1024\nper_device_train_batch_size: 4\n"
        "gradient_accumulation_steps: 2\ngradient_checkpointing: true\nbf16: true\n",
        "",
    ),
}
ACCELERATE = "compute_environment: LOCAL_MACHINE\nnum_processes: 8\nmixed_precision: bf16\n"
SHARED = "parallelism_config: {parallelism_config_tp_size: 2}\n"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("framework", JOBS)
def test_a_job_through_a_launch_file_as_through_options(
    capsys: Capture, tmp_path: Path, framework: str, tp: int
) -> None:
    """Its FLOPs, MFU and HFU: with --gpus, with an accelerate file, from options, in Python and on the page."""
    text, sharing = JOBS[framework]
    own = tmp_path / "job.yaml"
    own.write_text(text + sharing * (tp > 1), encoding="utf-8")
    accelerate = tmp_path / "accelerate.yaml"
    accelerate.write_text(ACCELERATE + SHARED * (tp > 1 and not sharing), encoding="utf-8")
    layout = {"tp": str(tp)} if tp > 1 else {}
    given = {"gpus": "8", **({} if sharing else layout)}
    sequences = {name: value for name, value in JOB.items() if name != "grad_accum"} | {"global_batch": str(64 // tp)}
    doors = [
        ["gpt2", *make_words({**JOB, **layout})],
        ["gpt2", *make_words({**sequences, **layout})],
        ["--launch", str(own), *make_words(given)],
        ["--launch", str(own), "--launch", str(accelerate)],
        ["--launch", str(own), "--launch", str(accelerate), *make_words({"gpus": "8"})],
    ]
    shown = [run_json(capsys, "estimate", *words, *TIMED) for words in doors]
    for each in shown:
        assert read(each) == read(shown[0])
        assert read(each)[1:] == (8, 64 // tp)
        assert (each["mfu"], each["hfu"]) == (shown[0]["mfu"], shown[0]["hfu"])
    for keywords in (make_keywords({**JOB, **layout}) | {"model": "gpt2"}, {"launch": own, **given}):
        found = estimate_flops(**keywords)
        assert (found.total, found.gpus, found.global_batch) == read(shown[0])
        for share in (mfu, hfu):
            assert share(found, 2, device="h200").to_dict() == shown[0][share.__name__]
    asked = json.dumps({"what": "launch", "name": own.name, "text": own.read_text(encoding="utf-8"), "setup": {}})
    form = json.loads(answer(asked))["setup"] | given
    page = json.loads(answer(json.dumps({"what": "flops", "setup": {**form, "device": "h200", "step_time": "2s"}})))
    assert read(page["estimate"]) == read(shown[0])
    assert (page["estimate"]["mfu"], page["estimate"]["hfu"]) == (shown[0]["mfu"], shown[0]["hfu"])


@pytest.mark.parametrize("tp", [1, 2])
def test_groups_of_a_launch_file_are_predicted_as_gpus(capsys: Capture, tmp_path: Path, tp: int) -> None:
    """predict knows no groups: it says so, and has as many steps at once as the job."""
    own, accelerate = tmp_path / "job.yaml", tmp_path / "accelerate.yaml"
    own.write_text(JOBS["axolotl"][0] + JOBS["axolotl"][1] * (tp > 1), encoding="utf-8")
    accelerate.write_text(ACCELERATE, encoding="utf-8")
    groups = run_json(
        capsys, "predict", "gpt2", *make_words({**JOB, "gpus": str(8 // tp)}), "--device", "h200", "--hf-trainer"
    )
    for words in (["--gpus", "8"], ["--launch", str(accelerate)]):
        shown = run_json(capsys, "predict", "--launch", str(own), *words, "--device", "h200")
        assert (shown["gpus"], shown["global_batch"]) == (8 // tp, 64 // tp)
        assert shown["tokens_per_s"] == groups["tokens_per_s"]
        assert any("predict runs the whole model on each GPU" in note for note in shown["notes"]) == (tp > 1)
    if tp > 1:
        for command, more in (("predict", []), ("plan", ["--tokens", "1B"]), ("estimate", [])):
            told = fail(capsys, command, "--launch", str(own), "--gpus", "7", "--device", "h200", *more)
            assert told == "7 GPUs are no multiple of tp · pp · cp = 2"


def test_given_gpus_win_over_a_launch_file(capsys: Capture, tmp_path: Path) -> None:
    files, _ = write_launch(tmp_path, {"batch": "4", "gpus": "8"})
    words = [word for file in files for word in ("--launch", file)]
    shown = run_json(capsys, "estimate", "gpt2", "--seq", "64", *words, "--gpus", "2")
    assert (shown["gpus"], shown["global_batch"]) == (2, 8)
    assert shown["launch"]["overridden"] == ["gpus"]


def test_work_is_told(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["estimate", "gpt2", "--seq", "64", "--batch", "4", "--gpus", "8", "--grad-accum", "2"])
    assert "8 GPUs × 4 × 2 = 64 sequences a step" in " ".join(capsys.readouterr().out.split())


NEW_MEANING = (
    "is that of one GPU, and FLOPs are those of all GPUs; before version 0.2 it was the batch of all GPUs together"
)


def test_new_meaning_is_told_by_each_door(capsys: Capture) -> None:
    assert f"batch_size {NEW_MEANING}" in estimate_flops("gpt2", seq_len=64, gpus=2).notes
    assert f"--batch {NEW_MEANING}" in run_json(capsys, "estimate", "gpt2", "--seq", "64", "--gpus", "2")["notes"]
    assert not any(NEW_MEANING in note for note in estimate_flops("gpt2", seq_len=64).notes)


def test_predict_on_several_gpus(capsys: Capture) -> None:
    fields = {"seq": "1k", "batch": "4", "device": "h200"}
    said = {**fields, "execution": "fused", "optimizer": "adamw-master"}
    one = predict("gpt2", **make_keywords(said))
    job = predict("gpt2", **make_keywords({**fields, "gpus": "8"}))
    assert (one.gpus, one.global_batch, job.gpus, job.global_batch) == (1, 4, 8, 32)
    assert (job.step_time_s, job.mfu, job.memory) == (one.step_time_s, one.mfu, one.memory)
    assert job.tokens_per_s == 8 * one.tokens_per_s
    assert "each of 8 GPUs runs this step; time between GPUs is not included: `flopcalc plan` adds it" in job.notes
    shown = run_json(capsys, "predict", "gpt2", *make_words({**fields, "gpus": "8"}))
    assert (shown["gpus"], shown["global_batch"], shown["tokens_per_s"]) == (8, 32, job.tokens_per_s)
    timed = ask_page("time", "gpt2", {**fields, "gpus": "8"})
    assert timed["prediction"]["tokens_per_s"] == job.tokens_per_s


def test_plan_through_every_door(capsys: Capture) -> None:
    fields = {
        "tokens": "1B", "device": "h200", "gpus": "8", "seq": "2k", "global_batch": "1Mtok", "tp": "1", "pp": "1",
        "price": "2.50$",
    }  # fmt: skip
    found = plan("llama-3.2-1b", **make_keywords(fields))
    assert (found.gpus, found.global_batch, found.seq) == (8, 512, 2048)
    for shown in (
        run_json(capsys, "plan", "llama-3.2-1b", *make_words(fields)),
        ask_page("plan", "llama-3.2-1b", fields)["plan"],
        plan("llama-3.2-1b", **{**make_keywords(fields), "price": 2.5, "global_batch": 512}).to_dict(),
    ):
        assert shown["best"] == found.to_dict()["best"]


def test_translate_through_every_door(capsys: Capture) -> None:
    fields = {"seq": "4k", "mfu": "45%", "from": "6nd", "device": "h100-sxm"}
    found = translate("llama-3.1-8b", **make_keywords(fields)).to_dict()
    assert found == run_json(capsys, "translate", "llama-3.1-8b", *make_words(fields)) | {"notes": found["notes"]}


READ: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # command, keywords of Python, typed values
    ("estimate", {"seq_len": "128k", "batch_size": "2", "gpus": "1k"}, {"seq": 131072, "batch": 2, "gpus": 1024}),
    ("estimate", {"max_pixels": "1M", "images": "640x480"}, {"max_pixels": 1000000, "image": ((640, 480),)}),
    ("estimate", {"step_time_s": "500ms"}, {"step_time": 0.5}),
    ("estimate", {"step_time_s": "2min", "tokens": "15T"}, {"step_time": 120.0, "tokens": 15 * 10**12}),
    ("estimate", {"tokens_per_second": "12k", "peak": "989T"}, {"tokens_per_second": 12000.0, "peak": 989e12}),
    ("estimate", {"peak": "bf16=989T,fp8=1979T"}, {"peak": {"bf16": 989e12, "fp8": 1979e12}}),
    ("estimate", {"lengths": "512,1k"}, {"lengths": (512, 1024)}),
    ("estimate", {"audio": [30, "500ms"], "videos": [(640, 480, 8)]}, {"audio": (30.0, 0.5), "video": ("640x480x8",)}),
    ("estimate", {"image_grid_thw": ["1,36,52"]}, {"image_grid": ((1, 36, 52),)}),
    ("estimate", {"mtp": "config", "logits": "5"}, {"mtp": True, "logits": 5}),
    ("estimate", {"batch": 4}, {"batch": 4}),  # an option's own name
    ("estimate", {"seq": "1k", "decoder_seq": 8}, {"seq": 1024, "decoder_seq": 8}),
    ("estimate", {"seq_len": None, "download": False, "images": ()}, {}),  # not given
    ("plan", {"price": "2.50$", "tp": [1, 2], "zero": "0,3"}, {"price": 2.5, "tp": (1, 2), "zero": (0, 3)}),
    ("plan", {"price": "$2.50", "global_batch": "auto", "tp": 4}, {"price": 2.5, "global_batch": "auto", "tp": (4,)}),
    ("plan", {"global_batch": "16k"}, {"global_batch": 16384}),
    ("plan", {"recompute": "none, full"}, {"recompute": ("none", "full")}),
]


@pytest.mark.parametrize(("command", "keywords", "values"), READ, ids=[str(each[1]) for each in READ])
def test_values(command: Any, keywords: dict[str, Any], values: dict[str, Any]) -> None:
    found = from_keywords(command, "gpt2", keywords)
    assert found.values == values
    assert found.place.step_time_s == values.get("step_time")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"seq_len": "1e3"}, "seq_len: '1e3' is not a whole number; write 4096 or 4k"),
    ({"seq_len": 1.5}, "seq_len must be a whole number, not 1.5"),
    ({"seq_len": True}, "seq_len must be a whole number, not True"),
    ({"seq_len": "0"}, "seq_len must be at least 1, not 0"),
    ({"context": -1}, "context must be at least 0, not -1"),
    ({"lengths": 5}, "lengths must be a list, not 5"),
    ({"step_time_s": "5x"}, "step_time_s: '5x' is not a number; write 0.5 or 500ms"),
    ({"step_time_s": 0}, "step_time_s must be a positive number, not 0"),
    ({"peak": "bf16=1,bf16=2"}, "peak gives bf16 twice; write it as bf16=989T,fp8=1979T"),
    ({"peak": "bf16=1,x"}, "peak has 'x', which is not FORMAT=FLOPS_PER_S; write it as bf16=989T,fp8=1979T"),
    ({"peak": "x=1"}, "dtype 'x' unknown"),
    ({"images": 3}, "images must be a list, not 3"),
    ({"images": ["640x480x3"]}, "images: '640x480x3' is neither WIDTHxHEIGHT nor a file"),
    ({"videos": 5}, "videos must be a list, not 5"),
    ({"audio": ["x"]}, "audio: 'x' is not a number; write 0.5 or 500ms"),
    ({"image_grid_thw": ["1,2"]}, "image_grid_thw: '1,2' must hold 3 numbers"),
    ({"mtp": "x"}, "mtp: 'x' is not a whole number"),
    ({"mtp": -1}, "mtp must be at least 0, not -1"),
    ({"logits": "x"}, "logits (all, last or a number): 'x' is not a whole number"),
    ({"global_batch": "many"}, "global_batch is sequences, tokens as in '4M tokens', or auto, not 'many'"),
    ({"global_batch": 1.5}, "global_batch must be a whole number, not 1.5"),
    ({"global_batch": "x tokens"}, "'x' is not a number"),
    ({"tp": "1,x"}, "tp: 'x' is not a whole number"),
    ({"tp": 0}, "tp must be at least 1, not 0"),
    ({"tp": (1, 2)}, "tp takes one number here; plan tries several"),
    ({"phase": "backward"}, "phase 'backward' unknown. Did you mean forward?"),
    ({"download": "yes"}, "download must be True or False, not 'yes'"),
    ({"spec": 3}, "spec must be a path, not 3"),
    ({"model_type": 3}, "model_type must be a word, not 3"),
    ({"compute": 3}, "compute 3 unknown. Known: bf16"),
    ({"tokens": "x"}, "tokens: 'x' is not a number; write 2000000000 or 2T"),
    ({"seq": 5, "seq_len": 6}, "seq_len is given twice: give it once"),
    ({"batch": {"input_ids": [[1]]}, "seq_len": 3}, "batch already says sizes, lengths and images: leave seq_len out"),
    ({"sampling_steps": 4, "phase": "train"}, "sampling_steps belongs to phase sample, not train"),
    ({"recompute": "none", "gradient_checkpointing": True}, 'gradient_checkpointing is recompute="full": give one'),
    ({"recipe": {"freeze": "x"}, "freeze": "y"}, "freeze is given twice, by itself and in the recipe"),
    ({"sequ": 5}, "sequ is no keyword of estimate. Did you mean seq_len"),
]


@pytest.mark.parametrize(("keywords", "words"), WRONG, ids=[str(each[0]) for each in WRONG])
def test_wrong_values(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(FlopcalcError) as raised:
        from_keywords("estimate", "gpt2", keywords)
    assert words in str(raised.value)


WAN, PROMPT = "wan2.1-1.3b", {"sampling_steps": 2}
PICTURES = {**load_config("sd-1.5").config, "_class_name": "StableDiffusionImg2ImgPipeline"}
KONTEXT = {**load_config("flux.1-dev").config, "_class_name": "FluxKontextPipeline"}
# Field of a call: a model that can use it, its value as a text, and what else the call needs.
CALLS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "batch": ("gpt2", "2", {"seq_len": 64}),
    "seq": ("gpt2", "1k", {}),
    "text": ("qwen2-vl-2b", "64", {"images": "640x480"}),
    "lengths": ("gpt2", "512,1k", {}),
    "decoder_seq": ("t5-v1.1-xl", "8", {"seq_len": 16}),
    "image": ("qwen2-vl-2b", ["640x480"], {"text": 64}),
    "image_grid": ("qwen2-vl-2b", "1,36,52", {"text": 64}),
    "video": ("qwen2-vl-2b", "640x480x8", {"text": 64}),
    "video_grid": ("qwen2-vl-2b", ["2,36,52"], {"text": 64}),
    "audio": ("whisper-large-v3", "2s", {"decoder_seq_len": 8}),
    "clips": ("whisper-large-v3", [3000], {"decoder_seq_len": 8}),
    "max_pixels": ("qwen2-vl-2b", "1M", {"text": 64, "images": "4096x3072"}),
    "phase": ("gpt2", "forward", {"seq_len": 64}),
    "context": ("llama-3.2-1b", "1k", {"phase": "decode"}),
    "logits": ("gpt2", "5", {"seq_len": 64, "phase": "forward"}),
    "sampling_steps": (WAN, "3", {}),
    "guidance": (WAN, "off", PROMPT),
    "parts": (WAN, "denoiser", PROMPT),
    "strength": (PICTURES, "0.5", {"sampling_steps": 4}),
    "images_per_prompt": (WAN, "2", PROMPT),
    "references": (KONTEXT, "2", PROMPT),
}


def test_every_size_has_a_call() -> None:
    assert set(CALLS) == set(Inputs.__annotations__) - {"of_batch"}


@pytest.mark.parametrize("name", CALLS)
def test_bound_calls_take_each_spelling(name: str) -> None:
    """The keyword and the option's name, in a call of a bound model as in estimate_flops."""
    model, value, rest = CALLS[name]
    total = estimate_flops(model, **{KEYWORDS.get(name, name): value}, **rest).total
    bound = flopcalc.bind(model)
    for spelled in (name, KEYWORDS.get(name, name)):
        assert estimate_flops(model, **{spelled: value}, **rest).total == total
        assert bound(**{spelled: value}, **rest).total == total


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"gpus": 8},
            "a bound model takes no gpus. A call says the sizes of one micro-batch; bind() takes what trains",
        ),
        ({"videoz": 8}, "a bound model takes no videoz. Did you mean videos"),
        ({"seq": 4, "seq_len": 4}, "seq_len is given twice: give it once"),
        ({"batch": 4, "batch_size": 3}, "batch already says sizes, lengths and images: give it alone"),
    ],
)
def test_what_a_bound_call_refuses(given: dict[str, Any], words: str) -> None:
    with pytest.raises(FlopcalcError) as raised:
        flopcalc.bind("gpt2")(**given)
    assert str(raised.value).startswith(words)


def test_units_in_python() -> None:
    """Texts with units are read in bound calls, workloads and shares as in estimate_flops."""
    text, images = flopcalc.bind("gpt2"), flopcalc.bind("qwen2-vl-2b")
    assert text(seq_len="1k", batch_size="2").total == text(2, 1024).total
    assert text(lengths="512,1k").total == text(lengths=[512, 1024]).total
    assert flopcalc.make_workload("2", "4k") == flopcalc.make_workload(2, 4096)
    few = images(text="512", images="4096x3072", max_pixels="1M")
    assert few.total == images(text=512, images=[(4096, 3072)], max_pixels=1_000_000).total
    step = text(1, 64)
    assert mfu(step, "500ms", peak="989T") == mfu(step, 0.5, peak=989e12)
    assert (
        hfu(step, tokens_per_second="12k", peak={"bf16": "989T"}).value
        == hfu(step, tokens_per_second=12_000, peak=989e12).value
    )
    assert flopcalc.local_flops(step, tp="2") * 2 == step.total
    assert from_keywords("serving", "gpt2", {"ttft": 0.5}).values == {"ttft": 0.5}


def test_notes_come_in_one_order() -> None:
    first = estimate_flops("gpt2", peak="989T", seq_len="1k")
    assert first.notes == estimate_flops("gpt2", seq_len="1k", peak="989T").notes


def test_the_page_reads_synonyms() -> None:
    fields = {"seq": "1k", "gradient_checkpointing": True, "dtype": "fp16"}
    assert read(ask_page("flops", "gpt2", fields)["estimate"])[0] == estimate_flops("gpt2", seq_len=1024).total
    assert "needs files or code of a machine" in str(ask_page("flops", "gpt2", {"trace": True})["error"])
    job = {"seq": "1k", "device": "h200", "gpus": "8", "tokens": "1B"}
    for recompute in ({"recompute": "full"}, {"plan_recompute": "full"}, {"gradient_checkpointing": True}):
        best = ask_page("plan", "gpt2", {**job, **recompute})["plan"]["best"]
        assert {each["layout"]["recompute"] for each in best} == {"full"}


def test_no_model() -> None:
    with pytest.raises(FlopcalcError, match="which model"):
        estimate_flops(seq_len=5)


# --- refusals ---------------------------------------------------------------------------------------------------------
REFUSED = [
    (command, name)
    for command in COMMANDS
    if command not in ("bind", "crosscheck")
    for name, field in FIELDS.items()
    if field.in_doors
    and name not in list_fields(command)
    and (command, name) not in (("predict", "top"), ("serving", "launch"))  # options of their own
]
FUNCTIONS = {"estimate": estimate_flops, "predict": predict, "plan": plan, "translate": translate}


@pytest.mark.parametrize(("command", "name"), REFUSED, ids=[" ".join(each) for each in REFUSED])
def test_a_field_that_a_command_cannot_use(capsys: Capture, command: str, name: str) -> None:
    """Refused by name, in each door's spelling, with the reason or the commands that do take it."""
    told = fail(capsys, command, "gpt2", spell_option(name, ""), *([] if FIELDS[name].kind == "flag" else ["1"]))
    assert told.startswith(f"{command} takes no {spell_option(name, '')}: ")
    if command in FUNCTIONS:
        with pytest.raises(FlopcalcError) as raised:
            FUNCTIONS[command]("gpt2", **{KEYWORDS.get(name, name): 1})
        keyword = KEYWORDS.get(name, name)
        assert str(raised.value).startswith(f"{command} takes no {keyword}: ")


def test_reasons(capsys: Capture) -> None:
    for command, name, reason in (
        ("estimate", "optimizer", "predict, plan do"),
        ("predict", "clipping", "per-sample clipping is counted, not predicted"),
        ("estimate", "host_factor", "predict does"),
        ("plan", "batch", "it searches the micro-batch; --micro-batch fixes it, --global-batch is the whole step's"),
        ("translate", "convention", "it shows every convention; --from names that of the quoted number"),
    ):
        assert reason in fail(capsys, command, "gpt2", spell_option(name, ""), "1")
    with pytest.raises(FlopcalcError, match="bind takes no seq_len: estimate, compare, explain, translate, predict"):
        flopcalc.bind("gpt2", seq_len=5)


def test_few_named_parameters() -> None:
    """Sizes, media and setups come by keyword from one table each, so that no function lists them all."""
    functions = {name: getattr(flopcalc, name) for name in flopcalc.__all__}
    functions = {name: each for name, each in functions.items() if inspect.isfunction(each)}
    functions["Estimator"] = flopcalc.Estimator.__call__
    named = {
        name: [each.name for each in inspect.signature(function).parameters.values() if each.kind != each.VAR_KEYWORD]
        for name, function in functions.items()
    }
    assert {name: names for name, names in named.items() if len([each for each in names if each != "self"]) > 8} == {}
    assert len(named) > 15


def test_no_gpu_for_auto(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every door says that device auto found nothing; what needs a device refuses."""
    for module in ("setup.counting", "core.estimate.utilization"):
        monkeypatch.setattr(f"flopcalc.{module}.detect_device", lambda: None)
    assert estimate_flops("gpt2", seq_len=64, device="auto").notes == [
        "no GPU found on this machine: name one with device, or give peak"
    ]
    shown = run_json(capsys, "estimate", "gpt2", "--seq", "64", "--device", "auto")
    assert shown["notes"] == ["no GPU found on this machine: name one with --device, or give --peak"]
    needed: dict[Any, dict[str, Any]] = {
        flopcalc.bind: {},
        predict: {"seq_len": 64},
        plan: {"tokens": "1B", "gpus": 8},
        flopcalc.serving: {"input_len": 64, "output_len": 8},
    }
    for function, sizes in needed.items():
        with pytest.raises(FlopcalcError, match='device="auto": this machine shows no GPU'):
            function("gpt2", device="auto", **sizes)


def test_a_short_name_is_explained_once(capsys: Capture) -> None:
    shown = run_json(capsys, "estimate", "gpt2", "--seq", "64", "--device", "h100", "--step-time", "0.00001")
    assert [note for note in shown["notes"] if "taken as" in note] == [
        "h100 taken as h100-sxm; h100-pcie and h100-nvl differ"
    ]
    assert sum("above 1" in note for note in shown["notes"]) == 2
    served = flopcalc.serving("gpt2", device="h100", input_len=64, output_len=8)
    assert [note for note in served.notes if "taken as" in note] == [
        "h100 taken as h100-sxm; h100-pcie and h100-nvl differ"
    ]


def test_the_least_time_is_told_by_each_door(capsys: Capture) -> None:
    """What the peak allows, where no time is given; a sum of steps does not keep it."""
    step = estimate_flops("gpt2", seq_len=1024, device="h200", gpus=2)
    least = "at the bf16 peak of 2 × NVIDIA H200 (989.4 TFLOP/s each) this takes at least 0.83 ms; "
    assert f"{least}mfu(estimate, step_time_s) gives the MFU" in step.notes
    shown = run_json(capsys, "estimate", "gpt2", "--seq", "1024", "--device", "h200", "--gpus", "2")
    assert f"{least}--step-time gives the MFU" in shown["notes"]
    assert any(least in note for note in step.notes)
    assert not any(least in note for each in (step + step, 3 * step) for note in each.notes)
    assert len((step + step).notes) == len(set((step + step).notes))


def test_even_routing_says_nothing_of_a_dense_model(capsys: Capture) -> None:
    """The default is accepted by every command that takes the field; another routing needs experts."""
    for model, more in (("gpt2", ("--seq", "64")), ("sd3-medium", ())):
        plain = run_json(capsys, "estimate", model, *more)
        assert run_json(capsys, "estimate", model, *more, "--routing", "even") == plain
        assert " experts" in fail(capsys, "estimate", model, *more, "--routing", "spread:0.2")
    job = {"device": "h200", "seq_len": 64}
    run = {**job, "gpus": 8, "tokens": "1B", "tp": 1, "pp": 1}
    quoted = {**job, "mfu": "40%", "from_": "6nd"}
    for function, fields in ((predict, job), (plan, run), (translate, quoted)):
        assert function("gpt2", **fields, routing="even").to_dict() == function("gpt2", **fields).to_dict()
        with pytest.raises(FlopcalcError, match="gpt2 has no experts that a router chooses: leave routing out"):
            function("gpt2", **fields, routing="spread:0.2")


def test_steps_of_other_groups_are_not_added() -> None:
    first, second = (estimate_flops("gpt2", seq_len=64, gpus=4, tp=tp) for tp in (1, 2))
    with pytest.raises(FlopcalcError, match="cannot add a step of 4 GPUs in 2 groups to one of 4 GPUs in 4 groups"):
        first + second
    assert (first + first).total == 2 * first.total


@pytest.mark.parametrize("name", FIELDS)
def test_help_ends_in_one_stop(name: str) -> None:
    assert re.search(r"\w[)']?\.$", FIELDS[name].help)


@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "bind"])
def test_help_fits_the_command(capsys: Capture, command: Any) -> None:
    """Sections in the table's order, every option in its own, and no word of what other commands do."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    _, *parts = re.split(r"^([A-Z][a-zA-Z ]+):\n", capsys.readouterr().out.partition("\n\n")[2], flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(sections) == [title for title in GROUPS.values() if title in sections]
    for name, field in list_fields(command).items():
        own = re.search(rf"^  {spell_option(name, '')}\b", sections.get(GROUPS[field.group], ""), re.MULTILINE)
        assert own is not None or not field.in_doors
    body = "\n".join(sections.values())
    assert re.search(r"^  \W?MODEL", body, re.MULTILINE) is None
    assert not set(re.findall(r"\w+|[{}]", body)) & ({"plan", "predict", "translate", "estimate", "{", "}"} - {command})


# --- messages below the command line ----------------------------------------------------------------------------------
def list_options(command: click.Command) -> set[str]:
    """The options of a command and of those inside it."""
    context = click.Context(command)
    found = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    if isinstance(command, click.Group):
        inner = [command.get_command(context, name) for name in command.list_commands(context)]
        found = found.union(*(list_options(each) for each in inner if each is not None))
    return {option for option in found if option.startswith("--")}


OPTIONS = list_options(_group)


def find_options(code: str) -> list[str]:
    """Options in a file's texts. Comments, docstrings, commands in backticks and `--format=csv` may name them."""
    texts, rest = [], [ast.parse(code)]
    while rest:
        node = rest.pop()
        inner = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
        elif isinstance(node, ast.JoinedStr):  # whole, so that a command in backticks is one
            texts.append("".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values))
            inner = [each for each in inner if not isinstance(each, ast.Constant)]
        elif isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            inner.remove(node.body[0])
        rest += inner
    texts = [
        re.sub(r"`flopcalc [^`]*`|^flopcalc calibrate .*|ray start --head", "", text)
        for text in texts
        if not re.fullmatch(r"--\S+=\S+", text)
    ]
    words = [word for text in texts for word in re.findall(r"--[a-z][a-z-]+", text)]
    return [word for word in words if word in OPTIONS]


def test_no_option_is_named_below_the_command_line() -> None:
    package = Path(flopcalc.__file__).parent
    files = [path for path in package.rglob("*.py") if path.parent.name != "cli"]
    named = {str(path.relative_to(package)): find_options(path.read_text(encoding="utf-8")) for path in files}
    assert {path: words for path, words in named.items() if words} == {}
    assert len(files) > 250
    assert len(OPTIONS) > 100


def test_a_named_option_is_found() -> None:
    code = (
        'def f(x):\n    "Takes --seq."\n    raise E(f"give {x} --seq, or --batch 2: `flopcalc plan --gpus 8` --other")'
    )
    assert find_options(code) == ["--seq", "--batch"]


@pytest.mark.parametrize("command", ["estimate", "bind", "translate", "predict", "plan", "serving"])
def test_docstrings_list_the_keywords_by_group(command: Command) -> None:
    """Each function names what it takes, in the table's groups, and shows an example."""
    text = inspect.getdoc(getattr(flopcalc, "estimate_flops" if command == "estimate" else command)) or ""
    listed = re.sub(r"\n +", " ", text.partition("Keywords (`flopcalc schema` describes each):")[2]).replace("`", "")
    found = {line.partition(": ")[0][2:]: line.partition(": ")[2].split(", ") for line in listed.split("\n") if line}
    expected: dict[str, list[str]] = {}
    for name, field in list_fields(command).items():
        if name not in BESIDE or command != "estimate":
            expected.setdefault(GROUPS[field.group], []).append(KEYWORDS.get(name, name))
    assert found == expected
    assert re.search(rf"\n    .*{'estimate_flops' if command == 'estimate' else command}\(", text)
