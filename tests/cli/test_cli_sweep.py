"""`flopcalc sweep`: matrices from files and options, what is printed, exit codes; its processes need no torch here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from flopcalc.cli import main
from flopcalc.cli import sweep as module
from flopcalc.measure.jobs.journal import lock_folder
from flopcalc.measure.jobs.launchers import LAUNCHERS
from flopcalc.measure.sweep import matrix
from flopcalc.measure.sweep import run as sweep_run
from flopcalc.measure.sweep.run import Swept, run_sweep

group = module.sweep
Capture = pytest.CaptureFixture[str]
SMALL = ("--batch-sizes", "2", "--seq-lens", "8", "--model-size", "tiny", "--device", "cpu")
TWO = ("--trainers", "StandardTrainer,DPSGDTrainer")
SINGLE = ("single", "--trainer", "DPSGDTrainer", "--batch-size", "2", "--seq-len", "8", "--device", "cpu")


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "measure"))
    monkeypatch.setattr(sweep_run, "check_libraries", lambda _: None)
    monkeypatch.setattr(sweep_run, "run_sweep", partial(run_sweep, call="sweep_stand_in:start"))
    yield
    sys.modules.pop("sweep_stand_in", None)


def call(capsys: Capture, code: int, *arguments: str) -> tuple[str, str]:
    with pytest.raises(SystemExit) as end:
        main(["sweep", *arguments])
    out, err = capsys.readouterr()
    assert end.value.code == code, err
    return out, err


def test_run_and_run_again(capsys: Capture) -> None:
    out, err = call(capsys, 0, "run", *SMALL)
    assert out.startswith("4 configurations: 4 ok, 0 failed (100.0 %)\n\ntiny, 234,816 parameters; fp32 on stand-in")
    assert "DPGhostClippingTrainer         1 of 1      100 %       3.00 MiB       3.00 MiB      3.00" in out
    assert err.startswith("tiny: 234,816 parameters\n")
    assert sorted(path.name for path in Path("logs").glob("*.log")) == [
        "DPFastGradientClippingTrainer_bs2_seq8.log",
        "DPGhostClippingTrainer_bs2_seq8.log",
        "DPSGDTrainer_bs2_seq8.log",
        "StandardTrainer_bs2_seq8.log",
    ]
    before = Path("logs/journal.jsonl").read_bytes()
    assert call(capsys, 0, "run", *SMALL)[0] == out
    assert Path("logs/journal.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["matrix.json", "matrix.toml"])
def test_options_win_over_the_file(capsys: Capture, name: str) -> None:
    content = {
        "trainers": ["StandardTrainer"],
        "batch_sizes": [2],
        "seq_lens": [8],
        "models": ["tiny"],
        "steps": 5,
        "device": "cpu",
    }
    text = (
        json.dumps(content)
        if name == "matrix.json"
        else "\n".join(f"{k} = {json.dumps(v)}" for k, v in content.items())
    )
    Path(name).write_text(text)
    out, _ = call(capsys, 0, "run", name, "--seq-lens", "9,10", "--warmup", "1", "--json")
    rows = json.loads(out)["configurations"]
    assert [(row["id"], row["steps"], row["warmup"]) for row in rows] == [
        ("StandardTrainer_bs2_seq9", 5, 1),
        ("StandardTrainer_bs2_seq10", 5, 1),
    ]


def test_several_models(capsys: Capture) -> None:
    Path("mine").mkdir()
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 64}
    Path("mine/config.json").write_text(json.dumps(config))
    asked = ("--model-size", "tiny,small", "--model", "gpt2", "--model", "mine/config.json")
    out, err = call(capsys, 0, "run", *SMALL[:4], *asked, "--trainers", "StandardTrainer", "--device", "cpu")
    assert [line.split(":")[0] for line in err.splitlines()[:4]] == ["tiny", "small", "gpt2", "mine/config.json"]
    assert {path.stem for path in Path("logs").glob("*.log")} == {
        f"StandardTrainer_bs2_seq8_{name}" for name in ("tiny", "small", "gpt2", "mine")
    }
    assert re.search(r"^StandardTrainer +mine/config.json +2 +8 ", out, re.MULTILINE)


def test_a_failure_is_exit_code_1_and_can_be_tried_again(capsys: Capture) -> None:
    asked = ("run", *SMALL[:2], "--seq-lens", "8,13", *SMALL[4:], *TWO)
    out, _ = call(capsys, 1, *asked)
    assert out.startswith("4 configurations: 2 ok, 2 failed (50.0 %)")
    assert "  DPSGDTrainer_bs2_seq13: exception: KeyError: 'not there'" in out
    before = len(Path("logs/journal.jsonl").read_text().splitlines())
    call(capsys, 1, *asked)
    assert len(Path("logs/journal.jsonl").read_text().splitlines()) == before
    call(capsys, 1, *asked, "--retry", "failed")
    assert len(Path("logs/journal.jsonl").read_text().splitlines()) == before + 2


def test_a_stop_is_exit_code_130(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **options: Any) -> Swept:
        return run_sweep(*args, **options, call="sweep_stand_in:start")._replace(stopped=True)

    monkeypatch.setattr(sweep_run, "run_sweep", stop)
    _, err = call(capsys, 130, "run", *SMALL, *TWO)
    assert err.endswith("stopped: the same command goes on\n")
    _, err = call(capsys, 130, "run", *SMALL, *TWO, "--fresh")
    assert err.endswith("stopped: the same command without --fresh goes on\n")
    _, err = call(capsys, 130, "test")
    assert err.endswith("stopped\n")


def test_two_sweeps_in_one_folder(capsys: Capture) -> None:
    call(capsys, 0, "run", *SMALL, *TWO)
    before = Path("logs/results.jsonl").read_bytes()
    with lock_folder("logs"):
        _, err = call(capsys, 2, "run", *SMALL, "--fresh")
    assert "logs is in use by another run" in err
    assert Path("logs/results.jsonl").read_bytes() == before


def test_single_joins_the_others(capsys: Capture) -> None:
    call(capsys, 0, "run", *SMALL, "--trainers", "StandardTrainer")
    out, _ = call(capsys, 0, *SINGLE, "--model-size", "tiny", "--noise-multiplier", "0", "--seed", "3")
    assert out.startswith("1 configuration: 1 ok")
    out, _ = call(capsys, 0, "summarize", "--json")
    rows = json.loads(out)["configurations"]
    assert [(row["trainer"], row["noise_multiplier"], row["seed"], row["slowdown"]) for row in rows] == [
        ("StandardTrainer", 1.0, 0, 1.0),
        ("DPSGDTrainer", 0.0, 3, 2.0),
    ]


@pytest.mark.heavy
def test_test_measures_every_trainer_and_cleans_up(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out, err = call(capsys, 0, "test", "--json")
    assert (json.loads(out)["ok"], "logs: " in err) == (4, False)
    assert not list(tmp_path.iterdir())
    for _ in range(2):
        _, err = call(capsys, 0, "test", "--logs-dir", "kept")
        assert err.endswith("logs: kept\n")
        assert len(list(Path("kept").glob("*.log"))) == 4


def test_a_test_that_cannot_run_leaves_nothing(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(_: Any) -> None:
        raise matrix.SweepError("the sweep needs torch")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sweep_run, "check_libraries", refuse)
    assert call(capsys, 2, "test") == ("", "flopcalc: the sweep needs torch\n")
    assert not list(tmp_path.iterdir())


def test_a_test_forgets_no_sweep(capsys: Capture) -> None:
    call(capsys, 0, "run", *SMALL, *TWO)
    before = Path("logs/results.jsonl").read_bytes()
    _, err = call(capsys, 2, "test", "--logs-dir", "logs")
    assert "logs holds a sweep, which a test would forget: choose another --logs-dir" in err
    assert Path("logs/results.jsonl").read_bytes() == before


def test_a_table_fits_the_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown, _ = call(capsys, 0, "run", *SMALL)
    assert max(map(len, shown.splitlines())) <= 80
    assert call(capsys, 0, "summarize")[0] == shown
    assert max(map(len, call(capsys, 0, "summarize", "--markdown")[0].splitlines())) > 80  # for a page, not for here


def test_summarize(capsys: Capture) -> None:
    call(capsys, 0, "run", *SMALL, *TWO, "--logs-dir", "elsewhere", "--runs-dir", "r")
    asked = ("summarize", "--logs-dir", "elsewhere")
    text, _ = call(capsys, 0, *asked)
    assert call(capsys, 0, "summarize", "elsewhere")[0] == text
    assert text.startswith("2 configurations: 2 ok, 0 failed (100.0 %)")
    markdown, _ = call(capsys, 0, *asked, "--markdown", "--output", "results.json")
    assert "| StandardTrainer |" in markdown
    shown, _ = call(capsys, 0, *asked, "--json")
    assert Path("results.json").read_text() == shown
    assert json.loads(shown)["trainers"]["DPSGDTrainer"]["slowdown"]["mean"] == 2.0


def test_plot(capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    call(capsys, 0, "run", *SMALL, *TWO)
    call(capsys, 0, "summarize", "--plot", "cost.svg")
    assert "<svg" in Path("cost.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "batch_sizes is empty: give --batch-sizes"),
        (["run", *SMALL[:4]], "models is empty: give --model-size or --model"),
        (["run", *SMALL, "--trainers", "DPSGD"], "trainers: no trainer 'DPSGD'. Did you mean DPSGDTrainer?"),
        (["run", *SMALL[2:], "--batch-sizes", "2,x"], "--batch-sizes: 'x' is not a whole number"),
        (["run", *SMALL[:4], "--model-size", "2b"], "--model-size '2b' unknown. Did you mean 1b? Known: tiny, small"),
        (["run", *SMALL, "--model", "lama"], "no preset, file or folder 'lama'"),
        (["run", *SMALL, "--steps", "0"], "steps must be at least 1"),
        (["run", *SMALL, "--dtype", "fp8"], "dtype 'fp8' unknown"),
        (["run", *SMALL, "--launcher", "rai"], "launcher 'rai' is not one of local, ray, slurm"),
        (["run", *SMALL, "--ray-address", "auto"], "is an option of launcher ray, not of local"),
        (["run", *SMALL, "--retry", "all"], "'all' is not 'failed'"),
        (["run", *SMALL, "--retry", "failed", "--fresh"], "--fresh runs everything again, --retry failed only what"),
        (["summarize", "--json", "--markdown"], "--json and --markdown are two forms: choose one"),
        (["run", "no.json"], "no.json: cannot be read: No such file"),
        (["single", "--trainer", "DPSGDTrainer"], "Missing option '--batch-size'"),
        ([*SINGLE], "single takes one model: --model-size 1b, or --model"),
        ([*SINGLE, "--model-size", "tiny,1b"], "single takes one model"),
        (["summarize"], "no such file or folder. Give the --logs-dir"),
        (["summarize", "a", "--logs-dir", "b"], "the folder is given twice, a and --logs-dir b: give it once"),
        (["sumarize"], "no command 'sumarize'. Did you mean summarize?"),
    ],
)
def test_errors_are_one_line(capsys: Capture, arguments: list[str], message: str) -> None:
    out, err = call(capsys, 2, *arguments)
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert not Path("logs").exists()


def test_an_output_that_cannot_be_written(capsys: Capture) -> None:
    call(capsys, 0, "run", *SMALL, *TWO)
    out, err = call(capsys, 2, "summarize", "--output", "no/results.json")
    assert (out, err) == ("", "flopcalc: no/results.json: cannot be written: No such file or directory\n")


def test_help_says_what_there_is() -> None:
    """The command spells the names out, so that its help need not load them."""
    assert tuple(module._TRAINERS.split(", ")) == tuple(matrix.TRAINERS)
    assert tuple(module._SIZES.split("|")) == tuple(matrix.MODEL_SIZES)
    options = {option: param for param in group.commands["run"].params for option in param.opts}
    for option, known in (
        ("--dtype", matrix.DTYPES),
        ("--device", matrix.DEVICES),
        ("--attention", matrix.ATTENTION),
        ("--launcher", LAUNCHERS),
    ):
        assert tuple(str(options[option].metavar).split("|")) == tuple(known)


def test_the_options_and_the_file_are_both_named(capsys: Capture) -> None:
    Path("m.json").write_text(json.dumps({"batch_sizes": [2], "seq_lens": [8], "models": ["tiny"]}))
    _, err = call(capsys, 2, "run", "m.json", "--steps", "0")
    assert err == "flopcalc: m.json and the options given: steps must be at least 1, not 0\n"


def test_every_option_is_in_the_pages() -> None:
    text, options = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("sweep.md", "cli.md"))
    words = set(re.findall(r"--[a-z-]+", options))
    for name, command in group.commands.items():
        assert f"`flopcalc sweep {name}" in text
        assert {o for p in command.params for o in p.opts if o.startswith("--")} <= words, name
