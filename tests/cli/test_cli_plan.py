"""`flopcalc plan`: what is printed, as text, JSON and a plot, and how bad input is answered."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from places import ROOT

from flopcalc import plan as make_plan
from flopcalc.base.errors import FlopcalcError
from flopcalc.cli import main
from flopcalc.cli.plan import plan

RUN = ["--model", "llama-3.2-1b", "--tokens", "100B", "--device", "h200", "--gpus", "16", "--seq", "2048"]
SMALL = [*RUN, "--global-batch", "64", "--pp", "1,2", "--virtual", "1", "--zero", "0,1", "--micro-batch", "1,2"]


def invoke(*arguments: str) -> Result:
    """Run the command; of an option that comes twice, the later value replaces the earlier one."""
    chosen: dict[str, list[str]] = {}
    flag = ""
    for piece in arguments:
        if piece.startswith("--"):
            flag = piece
            chosen[flag] = []
        else:
            chosen[flag].append(piece)
    pieces = [piece for flag, values in chosen.items() for piece in (flag, *values)]
    return CliRunner().invoke(plan, pieces, catch_exceptions=False)


def test_text() -> None:
    result = invoke(*SMALL, "--top", "2", "--price", "2.5")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == "llama-3.2-1b (1.24B parameters) on 16 × NVIDIA H200, hgx-h200"
    assert lines[1] == "100.00B tokens, 64 × 2,048 tokens a step, bf16, execution fused"
    assert " ".join(lines[3].split()) == "layout step from … to MFU HFU memory time GPU-h energy cost"
    assert len([line for line in lines if line.startswith(("dp", "tp", "pp"))]) == 2
    assert any(line.startswith("searched") and "layouts are valid" in line for line in lines)
    assert any(line.startswith("lost: ") for line in lines)
    assert "one-GPU times measured on NVIDIA H200" in result.output
    assert max(map(len, lines)) <= 130


@pytest.mark.heavy
def test_the_page_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = ROOT / "docs" / "planning.md"
    command, _, shown = page.read_text(encoding="utf-8").partition("$ flopcalc plan ")[2].partition("\n")
    assert shown.startswith(invoke(*command.split()).output + "```\n")


class Stream(io.StringIO):
    """Standard error that is a terminal, or none."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    stream = Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(SystemExit):
        main(["plan", *SMALL])
    shown = stream.getvalue().split("\r\033[K")
    assert shown[:2] == (["", "searching layouts: 0 of 128"] if is_terminal else [""])
    assert shown[-1] == ""


def test_json() -> None:
    found = json.loads(invoke(*SMALL, "--top", "1", "--json").output)
    assert (found["model"], found["gpus"], found["global_batch"]) == ("llama-3.2-1b", 16, 64)
    entry: dict[str, Any] = found["best"][0]
    assert entry["step_time_s"]["low"] < entry["step_time_s"]["mid"] < entry["step_time_s"]["high"]
    assert 0 < entry["mfu"] < 1
    assert entry["usd"]["mid"] == pytest.approx(entry["gpu_hours"]["mid"] * found["price"]["usd_per_gpu_hour"])
    assert {loser["reason"] for loser in found["losers"]} <= {
        "memory",
        "bubble",
        "communication",
        "recompute",
        "compute",
    }


def test_images_and_lora_are_counted() -> None:
    given = ["--model", "qwen2.5-vl-7b", "--tokens", "1B", "--device", "h200", "--gpus", "8", "--text", "512"]
    given += ["--image", "560x560", "--global-batch", "16", "--tp", "1,2", "--micro-batch", "1", "--json", "--top", "1"]
    full = json.loads(invoke(*given).output)
    lora = json.loads(invoke(*given, "--lora", "r=16,targets=q_proj+v_proj").output)
    assert full["seq"] == 512 + 400
    states = [found["best"][0]["memory_bytes"]["optimizer"] for found in (full, lora)]
    assert states[1] < states[0] / 50


@pytest.mark.heavy
def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    result = invoke(*SMALL, "--plot", str(path))
    assert f"written: {path}" in result.output
    assert path.read_text(encoding="utf-8").startswith("<?xml")
    for name, words in (
        ("plan.nope", "nope"),
        ("plan", "give a file name that ends in .png"),
        ("nowhere/plan.png", "plan.png: cannot be written: No such file"),
    ):
        with pytest.raises(FlopcalcError, match=words):
            invoke(*SMALL, "--plot", str(tmp_path / name))
    assert list(tmp_path.iterdir()) == [path]


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FlopcalcError, match=r"a plot needs matplotlib: pip install 'flopcalc\[plot\]'"):
        invoke(*SMALL, "--plot", str(tmp_path / "plan.svg"))


def test_small_runs_and_one_device() -> None:
    lines = invoke(
        *SMALL, "--gpus", "1", "--pp", "1", "--zero", "0", "--tokens", "1M", "--top", "1"
    ).output.splitlines()
    assert lines[0] == "llama-3.2-1b (1.24B parameters) on 1 × NVIDIA H200"
    *_, time, unit, hours, energy, prefixed, cost = lines[5].split()
    assert (unit, prefixed, cost[0]) == ("s", "Wh", "$")
    assert float(time) / 3600 == pytest.approx(float(hours), rel=0.05)
    assert float(energy) > 0


@pytest.mark.parametrize(
    ("tokens", "shown", "note"),
    [
        ("1", "131.07K tokens", "1 token given, less than one step: one whole step, 131.07K tokens, planned"),
        ("1e18", "1,000,000T tokens", ""),
    ],
)
def test_the_smallest_and_the_largest_run(tokens: str, shown: str, note: str) -> None:
    output = invoke(*SMALL, "--tokens", tokens, "--top", "1").output
    lines = output.splitlines()
    assert lines[1] == f"{shown}, 64 × 2,048 tokens a step, bf16, execution fused"
    words = r"[\d,.]+ (s|years) +[\d,.]+ +[\d,.]+ [mkMG]?Wh +\$[\d,.]+[kMB]?"
    assert re.search(f" {words}$", lines[5])
    assert note in " ".join(output.split())


@pytest.mark.parametrize(
    ("model", "note"),
    [
        ("qwen2.5-vl-7b", "no image given, so the vision tower is not counted; add one with --image 1024x768"),
        ("mamba-2.8b", "what the layers' scans or selections of keys take was never measured"),
    ],
)
def test_what_is_not_counted_or_measured_is_noted(model: str, note: str) -> None:
    output = " ".join(invoke(*SMALL, "--model", model).output.split())
    assert output.count(note) == 1


@pytest.mark.heavy
def test_encoder_and_decoder() -> None:
    given = ["--model", "t5-v1.1-xl", "--tokens", "1B", "--device", "h200", "--gpus", "8", "--tp", "1", "--pp", "1,2"]
    result = invoke(*given, "--seq", "512", "--decoder-seq", "128", "--virtual", "1", "--zero", "1")
    assert "× 640 tokens a step" in result.output
    assert "the mean of both kinds of layers" in " ".join(result.output.split())


def test_limits() -> None:
    """A deadline and a budget are judged at the three points of the interval; the tokens that they allow are said."""
    keep = {"days": "2", "budget": "5k"}
    found = make_plan("llama-3.2-1b", tokens="100B", device="h200", gpus=16, seq_len=2048, global_batch=64, price=2.5,
                      pp=1, zero=1, micro_batch=2, **keep)  # fmt: skip
    best = found.best[0]
    assert best.usd is not None
    for name, needed in (("days", best.days), ("budget", best.usd)):
        ends = [needed * each / best.step.seconds for each in (best.step.low, best.step.seconds, best.step.high)]
        limit = found.within[name]["limit"]
        word = ["no", "unlikely", "likely", "yes"][sum(each <= limit for each in ends)]
        assert found.within[name] == {"limit": limit, "verdict": word, "tokens": int(100e9 * limit / needed)}
    output = invoke(*SMALL, "--days", "1h", "--budget", "1M", "--price", "2.5").output
    assert re.search(r"^in time +no; about [\d.]+B tokens would$", output, re.MULTILINE)
    assert re.search(r"^in budget +yes, even at the slow end of the interval$", output, re.MULTILINE)


def test_a_deadline_finds_the_number_of_gpus() -> None:
    given = ["--model", "llama-3.2-1b", "--tokens", "100B", "--device", "h200", "--seq", "2048", "--tp", "1"]
    rows = json.loads(invoke(*given, "--pp", "1", "--zero", "1", "--micro-batch", "2", "--days", "2", "--json").output)[
        "rows"
    ]
    assert [row["varied"]["gpus"] for row in rows] == [1 << power for power in range(len(rows))]
    assert rows[0]["error"].startswith("no layout divides")  # ZeRO of one GPU
    assert [row["within"]["days"]["verdict"] == "yes" for row in rows[1:]] == [False] * (len(rows) - 2) + [True]


def test_a_row_of_which_no_layout_fits_leaves_the_others() -> None:
    given = ["--model", "llama-3.1-8b", "--tokens", "1B", "--device", "rtx-4090,h200", "--gpus", "1"]
    result = invoke(*given, "--recompute", "full", "--zero", "0", "--optimizer", "adamw")
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines() if line.startswith(("rtx-4090 ", "h200 "))]
    assert [row[1] for row in rows] == ["none", "dp1"]
    assert "--device rtx-4090: llama-3.1-8b does not fit on 1 x" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--price", "cheap"], "--price: 'cheap' is not a number; write 2.5"),
        (["--price", "0"], "--price must be a positive number"),
        (["--days", "soon"], "--days: 'soon' is not a number; write 30 or 12h"),
        (["--device", "gb300", "--budget", "1k"], "--budget: NVIDIA GB300 has no known price; give --price USD"),
        (["--tp", "two"], "--tp: 'two' is not a whole number"),
        (["--tp", "3"], "tp 3 does not divide 16 devices"),
        (["--gpus", "-1"], "--gpus must be at least 1"),
        (["--global-batch", "Auto"], "--global-batch is sequences, tokens as in '4M tokens', or auto, not 'Auto'"),
        (["--timeline", ""], "the trace needs a file name, not ''"),
        (["--tokens", "0"], "tokens must be a number from 1"),
        (["--device", "h2000"], "lists them; or add it to your own devices.toml (docs/specs.md)"),
        (["--interconnect", "string"], "interconnect 'string' unknown"),
        (["--recompute", "all"], "recompute 'all' unknown"),
        (["--dtype", "int7"], "dtype 'int7' unknown"),
        (["--image", "100x100"], "is a text model: it takes no images"),
        (["--dtype", "fp4"], "a plan is for training in bf16, fp16, fp8, mxfp8, nvfp4, mxfp4, not fp4"),
        (["--device", "mi250x-gcd"], "no interconnect is known for AMD Instinct MI250X"),
    ],
)
def test_bad_input(arguments: list[str], words: str) -> None:
    with pytest.raises(FlopcalcError) as error:
        invoke(*RUN, *arguments)
    assert words in str(error.value)


def test_a_length_that_was_not_given() -> None:
    with pytest.raises(
        FlopcalcError, match=r"beyond the 1024 positions.*no length was given, so 4096 tokens were assumed"
    ):
        invoke("--model", "gpt2", "--tokens", "1B", "--device", "h200", "--gpus", "8")


@pytest.mark.heavy
def test_a_default_batch_that_limits_the_plan_is_noted() -> None:
    run: dict[str, Any] = {"tokens": "15T", "device": "h100-sxm", "gpus": 4096, "seq_len": 8192, "zero": 1}
    found = make_plan("llama-3.1-8b", **run)
    (note,) = (note for note in found.notes if "limits this plan" in note)
    wanted, batch = re.search(r"global_batch=(\d+)", note), found.global_batch
    assert wanted is not None
    given = make_plan("llama-3.1-8b", **run, global_batch=int(wanted[1]))
    assert given.best[0].mfu > 1.1 * found.best[0].mfu
    assert int(wanted[1]) > batch == 512
    assert not any("limits this plan" in note for note in given.notes)  # a batch that was given is meant


def test_the_default_batch_of_a_large_run_is_not_what_limits_it() -> None:
    """Llama 3.1 405B on 16,384 GPUs: Meta took 16M tokens a step; 4M would leave most of the pipeline idle."""
    run: dict[str, Any] = {"tokens": "15T", "device": "h100-sxm", "gpus": 16384, "seq_len": 8192, "zero": 1}
    found = make_plan("llama-3.1-405b", **run)
    assert (found.global_batch, round(100 * found.best[0].mfu)) == (2048, 51)
    small: dict[str, Any] = {"tokens": "1B", "device": "h200", "gpus": 8, "seq_len": 2048, "pp": 1}
    assert not any("limits this plan" in note for note in make_plan("qwen2.5-0.5b", **small).notes)
