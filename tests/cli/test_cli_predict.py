"""`flopcalc predict`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest

from flopcalc.api import bind
from flopcalc.base.units import format_bytes
from flopcalc.cli import main
from flopcalc.core.workload.workload import make_workload
from flopcalc.prediction.memory.peak import predict_memory
from flopcalc.prediction.roofline import describe_execution

LLAMA = ["predict", "--model", "llama-3.2-1b", "--seq", "2048", "--batch", "4", "--device", "h200"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def unwrap(text: str) -> str:
    """A sentence of several lines on one: the others are indented by two."""
    return re.sub(r"\n  (?=\S)", " ", text)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *LLAMA, "--memory", "--top", "2")
    assert code == 0
    assert "bound by the device" in out
    assert "\nfloors    compute 64.73 ms, bandwidth " in out
    assert max(map(len, out.split("\n\n")[0].splitlines())) <= 80
    for words in ("matrix products", "all others", "largest batch that fits: ", "helps most: "):
        assert words in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *LLAMA, "--json", "--memory", "--compile", "--optimizer", "none")
    shown = json.loads(out)
    assert code == 0
    assert shown["bound"] == "device"
    assert shown["breakdown"]["optimizer"] == 0
    assert shown["memory_bytes"]["largest_batch"] > 4


@pytest.mark.parametrize(
    ("recompute", "lora"), [("none", ""), ("full", ""), ("full-reentrant", ""), ("none", "q_proj"), ("full", "q_proj")]
)
def test_activations_with_and_without_recomputation(
    recompute: str, lora: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is asked for, both, as memory is predicted for each; the rest is that of what is asked for."""
    options = ["--lora", f"r=8,targets={lora}"] if lora else []
    recipe = {"lora": {"r": 8, "targets": [lora]}} if lora else {}
    load = make_workload(4, 2048)
    words = ("none", "full", recompute)
    kept = {word: predict_memory(bind("llama-3.2-1b", recipe={**recipe, "recompute": word}), load) for word in words}
    asked = [*LLAMA, *options, "--recompute", recompute, "--memory"]
    _, out, _ = run(capsys, *asked, "--json")
    shown = json.loads(out)["memory_bytes"]
    assert shown["activations_by_recompute"] == {word: kept[word].activations for word in ("none", "full")}
    assert shown["activations"] == kept[recompute].activations
    assert shown["peak"] == kept[recompute].peak
    assert kept["none"].activations > 4 * kept["full"].activations
    none, full = (format_bytes(kept[word].activations) for word in ("none", "full"))
    _, out, _ = run(capsys, *asked)
    assert f"\nactivations kept: {none} without recomputation, {full} with --recompute full\n" in unwrap(out)


@pytest.mark.parametrize(
    "arguments", [["--phase", "prefill"], ["--phase", "forward"], ["--phase", "decode"], ["--freeze", "*"]]
)
def test_without_training_nothing_is_kept(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *LLAMA, *arguments, "--memory", "--json")
    assert json.loads(out)["memory_bytes"]["activations_by_recompute"] is None
    _, out, _ = run(capsys, *LLAMA, *arguments, "--memory")
    assert "activations kept" not in out


WATTS = "watts are fitted to measured steps of this GPU (docs/energy.md); CPUs, network and cooling are not included"
HOST = "host time is for the calibrated host's CPU; --host-factor sets your CPU's slowdown"
EAGER = "memory: HF's model in eager mode; the allocator's rounding is left out"
FREED = "memory: gradients are freed before the forward pass; where several passes add them up they stay"
NO_IMAGE = "no image given, so the vision tower is not counted; add one with --image 1024x768"
QWEN = ["predict", "--model", "qwen2-vl-2b", "--seq", "2048", "--device", "h200"]


@pytest.mark.parametrize(
    ("arguments", "notes", "of_memory"),
    [
        (LLAMA, [HOST], [EAGER, FREED]),
        ([*LLAMA, "--grad-accum", "2"], [HOST], [EAGER]),
        (QWEN, [HOST, NO_IMAGE], [EAGER, FREED]),
        (
            [*LLAMA, "--phase", "prefill", "--recompute", "full"],
            [HOST, "phase prefill has no backward pass, so nothing is recomputed"],
            [EAGER],
        ),
        (
            [*LLAMA, "--phase", "decode", "--recompute", "full", "--optimizer", "adamw-foreach"],
            [
                HOST,
                "HF's generate takes about 21.75 ms a token, and about 60.00 ms more at each length that cuDNN meets "
                "first (four models measured)",
                "this decodes 2,048 new tokens after an empty cache; for one token after 2,048 cached ones give "
                "--seq 1 and --context 2048",
                "phase decode has no backward pass, so nothing is recomputed",
                "phase decode has no optimizer's step, so --optimizer adamw-foreach changes nothing",
            ],
            [EAGER],
        ),
        ([*LLAMA, "--phase", "prefill", "--optimizer", "none"], [HOST], [EAGER]),
        (
            [*LLAMA, "--freeze", "*"],
            [HOST, "nothing trains under this recipe, so there is no backward pass"],
            [EAGER],
        ),
        (
            ["predict", "--model", "falcon-mamba-7b", "--seq", "64", "--phase", "prefill", "--device", "h200"],
            [
                "operators of falcon_mamba were not recorded: those of llama are used",  # which memory says too
                "layers of backbone.layers: what their scans or selections of keys dispatch was not recorded; they may "
                "take far longer",
                HOST,
            ],
            [EAGER],
        ),
    ],
)
def test_notes(
    arguments: list[str], notes: list[str], of_memory: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    phase = arguments[arguments.index("--phase") + 1] if "--phase" in arguments else "train"
    at = notes.index(HOST) + 1 + (phase == "decode")
    notes = [*notes[:at], describe_execution("eager", phase), WATTS, *notes[at:]]
    _, out, _ = run(capsys, *arguments, "--json")
    assert json.loads(out)["notes"] == notes
    _, out, _ = run(capsys, *arguments, "--memory")
    assert [line[6:] for line in unwrap(out).splitlines() if line.startswith("note: ")] == [*notes, *of_memory]


def test_a_slow_host_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *LLAMA, "--host-factor", "10", "--json")
    assert json.loads(out)["bound"] == "host"


def test_rows_of_nothing_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *LLAMA, "--lora", "r=8,targets=q_proj")
    shares = [line.split()[-2] for line in out.split("module,")[0].splitlines() if line.endswith(" %")]
    assert shares
    assert "0.0" not in shares
    assert not [line for line in out.splitlines() if line.startswith("optimizer") and line.endswith(" %")]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            ["--model", "t5-v1.1-xl", "--seq", "64", "--decoder-seq", "8", "--batch", "2"], marks=pytest.mark.heavy
        ),
        ["--model", "t5-v1.1-xl", "--seq", "64", "--decoder-seq", "2", "--phase", "decode"],
        ["--model", "voxtral-mini-3b", "--text", "16", "--audio", "30"],
    ],
)
def test_other_shapes_of_models(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "predict", "--device", "h200", "--json", "--memory", *arguments)
    shown = json.loads(out)
    assert code == 0
    assert shown["breakdown"]["products"] > 0
    assert shown["breakdown"]["attention"] > 0
    assert shown["memory_bytes"]["largest_batch"] > 1


def test_what_does_not_fit_is_told_first(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "predict", "--model", "llama-3.1-70b", "--seq", "512", "--device", "h200", "--memory")
    assert "largest batch that fits: none" in out
    notes = [line for line in unwrap(out).splitlines() if line.startswith("note: ")]
    assert notes[0].startswith("note: does not fit: the step needs ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict", "--model", "llama-3.2-1b", "--seq", "8"], "on which device?"),
        (
            [*LLAMA, "--convention", "full"],
            "predict takes no --convention: it shows MFU and HFU",
        ),
        ([*LLAMA, "--clipping", "hooks"], "predict takes no --clipping: per-sample clipping is counted, not predicted"),
        ([*LLAMA, "--host-factor", "0"], "--host-factor"),
        ([*LLAMA, "--host-factor", "fast"], "not a number"),
        ([*LLAMA, "--top", "x"], "--top"),
        ([*LLAMA, "--dtype", "fp8"], "not in fp8"),
        ([*LLAMA, "--dtype", "fp32", "--attention-kernel", "cudnn"], "takes bf16 and fp16"),
        ([*LLAMA[:-1], "h2000"], "add it to your own devices.toml"),
        (["predict", "--model", "llama-3.2-1b", "--device", "h200"], "how long are the sequences?"),
    ],
)
def test_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert words in err


@pytest.mark.parametrize("routing", ["even", "spread:0.4"])
def test_the_routing_of_experts_is_printed(capsys: pytest.CaptureFixture[str], routing: str) -> None:
    _, out, _ = run(capsys, "predict", "mixtral-8x7b", "--seq", "64", "--device", "h200", "--routing", routing)
    assert f"execution eager, routing {routing}\n" in out
    assert "evenly" not in out
