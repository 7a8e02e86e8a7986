"""The page's questions without a browser: answers equal the command line's and the Python line's, to the last digit."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from tiers import mark_heavy

import flopcalc
from flopcalc.cli import main
from flopcalc.web.answers import EXACT, answer

Capture = pytest.CaptureFixture[str]
LLAMA = {
    "model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
}  # fmt: skip
DEFAULT = {"model": "qwen2-vl-7b", "seq": "2048"}


def ask(what: str, setup: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = json.loads(answer(json.dumps({"what": what, "setup": setup, **more})))
    assert isinstance(found, dict)
    return found


def run_line(capsys: Capture, line: str) -> Any:
    """The JSON of a command line that must succeed."""
    with pytest.raises(SystemExit) as end:
        main([*shlex.split(line)[1:], "--json"])
    out, err = capsys.readouterr()
    assert (end.value.code, err) == (0, "")
    return json.loads(out)


def fail_line(capsys: Capture, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 2
    return capsys.readouterr().err.removeprefix("flopcalc: ").rstrip("\n")


def evaluate(line: str) -> Any:
    names = {name: getattr(flopcalc, name) for name in ("estimate_flops", "predict", "plan", "translate")}
    return eval(line, {"__builtins__": {}}, names)


COUNTED: dict[str, dict[str, Any]] = {
    "default": DEFAULT,
    "sizes with suffixes": {"model": "llama-3.1-8b", "seq": "4k", "batch": "8", "grad_accum": "2"},
    "images": {"model": "qwen2-vl-7b", "text": "512", "image": ["1024x768", "640x480"], "batch": "2"},
    "images, suffixed batch": {"model": "qwen2-vl-7b", "text": "64", "image": ["448x448"], "batch": "1k"},
    "images, fewer pixels": {"model": "qwen2-vl-7b", "text": "512", "image": ["1024x768"], "max_pixels": "200704"},
    "video": {"model": "qwen2-vl-7b", "text": "64", "video": ["640x480x16"]},
    "packed": {"model": "llama-3.1-8b", "lengths": "512,1024,512"},
    "decode": {"model": "llama-3.1-8b", "phase": "decode", "context": "4096", "batch": "16"},
    "prefill with logits": {"model": "llama-3.1-8b", "phase": "prefill", "seq": "1024", "logits": "all"},
    "lora": {"model": "llama-3.1-8b", "seq": "1024", "lora": "r=16,targets=q_proj+v_proj", "recompute": "full"},
    "frozen tower": {"model": "qwen2-vl-7b", "text": "512", "image": ["640x480"], "freeze": ["vision"]},
    "clipped": {"model": "sweep-tiny", "seq": "64", "clipping": "ghost", "convention": "hardware"},
    "hardware": {"model": "llama-3.1-8b", "seq": "2048", "convention": "hardware", "device": "h200"},
    "formats": {"model": "llama-3.1-8b", "seq": "2048", "compute": "fp8", "weights": "fp8", "kv_cache": "fp8"},
    "diffusion": {"model": "flux.1-dev", "image": ["512x768"], "text": "256", "batch": "2"},
    "sampling": {"model": "flux.1-dev", "sampling_steps": "4", "guidance": "on", "parts": "denoiser,vae"},
    "more digits than a double has": {"model": "llama-3.1-405b", "seq": "8191", "batch": "511"},
}


@pytest.mark.parametrize("name", mark_heavy(COUNTED, ["default", "images", "more digits than a double has"]))
def test_flops_equal_both_lines(name: str, capsys: Capture) -> None:
    found = ask("flops", COUNTED[name])
    total = int(found["estimate"]["flops"]["total"])
    printed = run_line(capsys, found["lines"]["command"])
    assert printed["flops"]["total"] == total
    assert json.loads(ask("export", COUNTED[name])["json"]) == printed
    assert evaluate(found["lines"]["python"]) == total
    assert sum(int(row["forward"]) + int(row["backward"]) for row in found["estimate"]["modules"]) == total


def test_default_answer() -> None:
    found = ask("flops", DEFAULT)
    assert found["estimate"]["flops"]["total"] == 89_406_346_100_736
    assert found["lines"] == {
        "command": "flopcalc estimate qwen2-vl-7b --seq 2048",
        "python": "estimate_flops('qwen2-vl-7b', seq_len=2048).total",
    }


def test_large_counts_are_sent_as_text() -> None:
    found = ask("flops", {"files": FILES, "seq": "99999", "batch": "99999"})["estimate"]["flops"]
    assert isinstance(found["total"], str)
    assert int(found["total"]) > EXACT
    assert int(found["total"]) != int(float(found["total"]))  # a number of JavaScript's would have lost digits


FILES = {"config.json": json.dumps(LLAMA)}


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": "{bad"},
        {"config.json": "[]"},
        {"config.json": "{}"},
        {"config.json": json.dumps({**LLAMA, "model_type": "lama"})},
        {"config.json": json.dumps({**LLAMA, "num_attention_heads": "many"})},
        {"config.json": ""},
    ],
)
def test_bad_config_has_the_command_lines_error(
    files: dict[str, str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(files["config.json"], encoding="utf-8")
    expected = fail_line(capsys, "estimate", "config.json", "--seq", "16")
    assert ask("flops", {"files": files, "seq": "16"}) == {"error": expected}


def test_dropped_config(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(FILES["config.json"], encoding="utf-8")
    setup = {"files": FILES, "seq": "16"}
    found = ask("flops", setup)
    assert found["lines"]["command"] == "flopcalc estimate config.json --seq 16"
    assert run_line(capsys, found["lines"]["command"]) == json.loads(ask("export", setup)["json"])
    assert evaluate(found["lines"]["python"]) == found["estimate"]["flops"]["total"]


def test_model_type_says_the_family() -> None:
    strange = {"config.json": json.dumps({**LLAMA, "model_type": "unheard_of"})}
    assert "unheard_of" in ask("flops", {"files": strange, "seq": "16"})["error"]
    found = ask("flops", {"files": strange, "seq": "16", "model_type": "llama"})
    assert found["estimate"]["flops"] == ask("flops", {"files": FILES, "seq": "16"})["estimate"]["flops"]
    assert found["lines"]["command"] == "flopcalc estimate config.json --seq 16 --model-type llama"


def test_folder_with_a_processor() -> None:
    preset = flopcalc.bind("qwen2-vl-7b").source
    files = {"config.json": json.dumps(preset.config), "preprocessor_config.json": json.dumps(preset.preprocessor)}
    setup = {"text": "128", "image": ["1024x768"]}
    found = ask("flops", {**setup, "files": files, "model": "my-folder"})
    known = ask("flops", {**setup, "model": "qwen2-vl-7b"})
    assert found["estimate"]["flops"] == known["estimate"]["flops"]
    assert found["estimate"]["workload"] == known["estimate"]["workload"]
    assert found["estimate"]["model"]["name"] == "my-folder"


@pytest.mark.parametrize(
    ("question", "error"),
    [
        ({"what": "flops", "setup": {"model": "lama-3.1-8b", "seq": "8"}}, "no preset, file or folder 'lama-3.1-8b'."),
        ({"what": "flops", "setup": {"model": "../x", "seq": "8"}}, "'../x': no preset; drop its config.json"),
        ({"what": "flops", "setup": {"model": "sweep-tiny"}}, "how long are the sequences? Give --seq N"),
        ({"what": "flops", "setup": {"model": "sweep-tiny", "sequ": "8"}}, "a set-up has no 'sequ'. Did you mean seq"),
        ({"what": "flops", "setup": {"model": "sweep-tiny", "seq": 8}}, "seq is a text, not 8"),
        (
            {"what": "flops", "setup": {"model": "sweep-tiny", "seq": "8", "image": ["8"]}},
            "--image: '8' is neither WIDTH",
        ),
        ({"what": "flops", "setup": {"files": {"../config.json": "{}"}}}, "'../config.json': not the name of a JSON"),
        ({"what": "flops", "setup": {"files": []}}, "files is an object of at most 40 names and texts"),
        ({"what": "flops", "setup": {}}, "which model? Choose a preset, or give a config.json"),
        ({"what": "time", "setup": {"model": "sweep-tiny", "seq": "8"}}, "on which device? Choose one"),
        ({"what": "plan", "setup": {"model": "sweep-tiny", "device": "h200"}}, "a plan needs --tokens"),
        ({"what": "flips", "setup": {}}, "no such question: 'flips'"),
        ([], "a question is an object, not []"),
    ],
)
def test_errors_are_one_line(question: Any, error: str) -> None:
    found = json.loads(answer(json.dumps(question)))
    assert list(found) == ["error"]
    assert found["error"].startswith(error)
    assert "\n" not in found["error"]


def test_no_name_reads_a_file_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the model, nor an adapter's base, a teacher or a launch file's model; what was dropped too is read."""
    for name in ("here", "gpt2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    adapter = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
    for path in ("here", str(tmp_path / "here"), "./here", "..", "here/config.json"):
        files = {"adapter_config.json": json.dumps({**adapter, "base_model_name_or_path": path})}
        for setup, before in (
            ({"model": path}, ""),
            ({"files": files}, "adapter_config.json: its base: "),
            ({"files": {**files, "a/config.json": "{}"}}, "adapter_config.json: its base: "),
            ({"model": "gpt2", "objective": f"distill,teacher={path}"}, "teacher: "),
        ):
            assert ask("flops", {**setup, "seq": "8"}) == {
                "error": f"{before}{path!r}: no preset; drop its config.json, or ask the hub"
            }
        assert ask("launch", {}, name="a.yml", text=f"base_model: {path}\nsequence_len: 8\n") == {
            "error": f"base_model: {path!r}: no preset; drop its config.json, or ask the hub"
        }
    assert ask("flops", {"model": "gpt2", "seq": "8"})["estimate"]["parameters"]["total"] == 124_439_808
    files = {"adapter_config.json": json.dumps({**adapter, "base_model_name_or_path": "Qwen/Qwen3-0.6B"})}
    assert "error" not in ask("flops", {"files": files, "seq": "8"})
    files = {"adapter_config.json": json.dumps({**adapter, "base_model_name_or_path": "base"})}
    found = ask("flops", {"files": {**files, "base/config.json": json.dumps(LLAMA)}, "seq": "8"})
    assert found["estimate"]["parameters"]["trainable"] == 3 * 4 * (24 + 24)


AXOLOTL = """
base_model: Qwen/Qwen3-8B
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_target_linear: true
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
bf16: auto
my_own_key: 7
"""


def test_launch_file_equals_the_command_line(tmp_path: Path, capsys: Capture) -> None:
    found = ask("launch", {}, name="qlora.yml", text=AXOLOTL)
    (tmp_path / "qlora.yml").write_text(AXOLOTL, encoding="utf-8")
    printed = run_line(capsys, f"flopcalc estimate --launch {tmp_path}/qlora.yml")
    assert found["setup"]["seq"] == "4096"
    assert ask("flops", found["setup"])["estimate"]["flops"] == printed["flops"]
    assert found["notes"][0].startswith("taken from qlora.yml (axolotl): model Qwen/Qwen3-8B from base_model;")
    assert found["notes"][1] == "not taken from the launch file: my_own_key"


@pytest.mark.parametrize(
    ("name", "text"), [("x.yml", "a: [1"), ("x.yml", "no_such_framework: 1"), ("x.toml", "[["), ("x.json", "{")]
)
def test_bad_launch_file_has_the_command_lines_error(name: str, text: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    expected = fail_line(capsys, "estimate", "--launch", str(tmp_path / name))
    assert ask("launch", {}, name=name, text=text) == {"error": expected.replace(f"{tmp_path}/", "")}


def test_explain_equals_the_command_line(capsys: Capture) -> None:
    op = "model.layers.*.mlp.down_proj"
    found = ask("explain", {"model": "sweep-tiny", "seq": "64"}, op=op)
    assert found["operations"] == run_line(capsys, found["lines"]["command"])["operations"]
    assert [entry["path"] for entry in found["operations"]] == [op]


def test_conventions() -> None:
    setup = {"model": "llama-3.1-8b", "seq": "2048"}
    found = ask("conventions", setup)
    estimate = flopcalc.estimate_flops("llama-3.1-8b", seq_len=2048)
    assert found["totals"] == estimate.totals
    for convention in ("model", "full", "hardware"):
        assert sum(row[convention] for row in found["components"]) == estimate.totals[convention]
    quoted = {row["name"]: row["flops"] for row in found["quoted"]}
    assert quoted["6nd"] == estimate.under("6nd")
    assert quoted["palm"] == estimate.under("palm")


def test_translate_equals_both_lines(capsys: Capture) -> None:
    setup = {"model": "llama-3.1-8b", "seq": "4096", "mfu": "45%", "from": "6nd", "device": "h100-sxm"}
    found = ask("translate", setup)
    assert json.loads(found["json"]) == run_line(capsys, found["lines"]["command"])
    line = evaluate(found["lines"]["python"])
    assert [row.mfu for row in line.rows] == [row["mfu"] for row in found["translation"]["rows"]]


def test_time_equals_both_lines(capsys: Capture) -> None:
    found = ask("time", {"model": "llama-3.2-1b", "seq": "1024", "batch": "2", "device": "h200"})
    printed = run_line(capsys, found["lines"]["command"])
    assert json.loads(found["json"]) == printed
    assert evaluate(found["lines"]["python"]).step_time_s._asdict() == printed["step_time_s"]


def test_memory_equals_the_command_line(capsys: Capture) -> None:
    found = ask("memory", {"model": "llama-3.2-1b", "seq": "1024", "device": "h200"})
    printed = run_line(capsys, found["lines"]["command"])["memory_bytes"]
    kept = printed.pop("activations_by_recompute")
    assert found["memory"] == printed
    assert {name: row["activations"] for name, row in found["by_recompute"].items()} == kept
    here = {device["id"]: device["fits"] for device in found["devices"]}
    assert here["h200-sxm"] is True


def test_roofline_holds_every_product() -> None:
    found = ask("roofline", {"model": "llama-3.2-1b", "seq": "1024", "device": "h200"})["roofline"]
    assert found["ridge_flops_per_byte"] == pytest.approx(found["peak_flops_per_s"] / found["bytes_per_s"])
    products = sum(call["flops"] * call["calls"] for call in found["calls"] if call["kind"] == "product")
    estimate = flopcalc.estimate_flops("llama-3.2-1b", seq_len=1024)
    linear = sum(row.total for name, row in estimate.by_component().items() if name != "attention_scores")
    assert products == linear
    for call in found["calls"]:
        bound = min(found["peak_flops_per_s"], call["flops_per_byte"] * found["bytes_per_s"])
        assert call["flops"] / call["seconds"] < 1.1 * bound, call["module"]


def test_plan_equals_both_lines_and_tells_progress(capsys: Capture) -> None:
    setup = {
        "model": "llama-3.2-1b", "seq": "2048", "device": "h200", "gpus": "4", "tokens": "10B", "tp": "1,2", "pp": "1",
    }  # fmt: skip
    told: list[tuple[int, int]] = []
    question = json.dumps({"what": "plan", "setup": setup})
    found = json.loads(answer(question, lambda done, whole: told.append((done, whole))))
    assert json.loads(found["json"]) == run_line(capsys, found["lines"]["command"])
    assert str(evaluate(found["lines"]["python"]).best[0].layout) == found["plan"]["best"][0]["name"]
    assert told[0][0] == 0
    assert told[-1][0] < told[-1][1]
    assert sorted(told) == told
    front = [point["layout"] for point in found["points"] if point["is_front"]]
    assert front == [point["layout"] for point in found["plan"]["front"]]
    assert len(found["points"]) == found["plan"]["layouts"]["fit"]


def test_memory_needs_neither_a_device_nor_its_peak() -> None:
    setup = {"model": "llama-3.2-1b", "seq": "1024"}
    alone, with_v100 = (ask("memory", given)["memory"] for given in (setup, {**setup, "device": "v100-sxm2-16gb"}))
    assert alone["peak"] == with_v100["peak"]
    assert (alone["fits"], alone["capacity"], alone["largest_batch"]) == (None, None, None)
    assert with_v100["fits"] is True


def test_checkpointing_has_its_cost_beside_its_gain() -> None:
    kept = ask("memory", {"model": "llama-3.2-1b", "seq": "1024", "device": "h200-sxm"})["by_recompute"]
    for word in ("none", "full"):
        own = flopcalc.estimate_flops(
            "llama-3.2-1b", seq_len=1024, recompute=word, device="h200-sxm", convention="hardware"
        )
        assert kept[word]["flops"] == own.total
    assert kept["full"]["activations"] < kept["none"]["activations"]


def test_longest_sequence_fits_and_the_next_does_not() -> None:
    setup = {"model": "llama-3.2-1b", "seq": "1024", "device": "t4"}
    longest = ask("longest", setup)["tokens"]
    assert longest % 256 == 0
    assert [ask("memory", {**setup, "seq": str(seq)})["memory"]["fits"] for seq in (longest, longest + 256)] == [
        True,
        False,
    ]
    assert ask("longest", {"model": "llama-3.2-1b", "lengths": "8,9", "device": "t4"})["tokens"] is None


@pytest.mark.parametrize(
    ("over", "keyword", "values"),
    [
        ("seq", "seq_len", tuple(1 << power for power in range(8, 18))),
        ("batch", "batch_size", tuple(1 << power for power in range(9))),
        ("gpus", "gpus", tuple(1 << power for power in range(0, 13, 2))),
    ],
)
def test_curve_of_flops(over: str, keyword: str, values: tuple[int, ...]) -> None:
    points = ask("curve", {"model": "llama-3.2-1b", "seq": "1024"}, over=over, of="flops")["points"]
    expected = [flopcalc.estimate_flops("llama-3.2-1b", **{"seq_len": 1024, keyword: value}).total for value in values]
    assert [(point["x"], int(point["y"])) for point in points] == list(zip(values, expected, strict=True))


def test_curve_over_images() -> None:
    setup = {"model": "qwen2-vl-7b", "text": "128", "image": ["640x480"]}
    points = ask("curve", setup, over="images", of="flops")["points"]
    expected = [
        flopcalc.estimate_flops("qwen2-vl-7b", text=128, images=["640x480"] * count).total
        for count in (0, 1, 2, 4, 8, 16)
    ]
    assert [int(point["y"]) for point in points] == expected


def test_curves_of_memory_and_time_are_the_views_own() -> None:
    setup = {"model": "llama-3.2-1b", "seq": "1024", "device": "h200-sxm"}
    memory, time = (
        {p["x"]: p["y"] for p in ask("curve", setup, over="seq", of=of)["points"]} for of in ("memory", "time")
    )
    assert memory[1024] == ask("memory", setup)["memory"]["peak"]
    assert time[1024] == ask("time", setup)["prediction"]["step_time_s"]["mid"]


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"over": "moons", "of": "flops"}, "curve 'moons' unknown; known: seq, batch, images, gpus"),
        ({"over": "seq", "of": "joy"}, "figure of a curve 'joy' unknown; known: flops, time, memory"),
        ({"over": "seq", "of": "time"}, "on which device? Choose one"),
    ],
)
def test_no_such_curve(more: dict[str, str], error: str) -> None:
    assert ask("curve", {"model": "llama-3.2-1b", "seq": "8"}, **more) == {"error": error}


@pytest.mark.parametrize(
    ("setup", "unused", "used"),
    [
        ({"model": "llama-3.2-1b", "seq": "8"}, {"image", "audio", "routing", "guidance", "decoder_seq"}, {"seq"}),
        ({"model": "qwen2-vl-7b", "seq": "8"}, {"audio", "routing", "guidance"}, {"image", "video", "max_pixels"}),
        ({"model": "mixtral-8x7b", "seq": "8"}, {"image"}, {"routing", "ep"}),
        ({"model": "flux.1-dev"}, {"seq", "lengths", "context"}, {"guidance", "sampling_steps", "image"}),
    ],
)
def test_fields_that_a_model_cannot_use(setup: dict[str, str], unused: set[str], used: set[str]) -> None:
    found = set(ask("flops", setup)["unused"])
    assert unused <= found
    assert not used & found


def test_serving_equals_the_command_line(capsys: Capture) -> None:
    setup = {"model": "llama-3.1-8b", "device": "h100-sxm", "input_len": "1k", "output_len": "64", "concurrency": "4"}
    answer = ask("serving", setup)
    assert run_line(capsys, answer["lines"]["command"]) == json.loads(answer["json"])
    rows = ask("loads", setup)["rows"]
    assert [row["concurrency"] for row in rows] == [1, 4, 16, 64, 256]
    assert rows[1]["tpot_s"] == answer["serving"]["tpot_s"]
