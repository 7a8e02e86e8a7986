"""`flopcalc monitor`: what it prints, its JSON, its errors, and that it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopcalc.cli import main
from flopcalc.monitor import TrainingMonitor

Capture = pytest.CaptureFixture[str]
START: dict[str, Any] = {
    "type": "start", "schema": 1, "version": "0.1", "time": 1.0, "model": "tiny", "parameters": 1_500_000_000,
    "device": "NVIDIA H200", "peak_flops_per_s": 989.5e12, "dtype": "bf16", "mode": "smart", "world": 2, "settings": {},
}  # fmt: skip
CONTEXT = {"perf/source": "smart: cupti at step 2", "perf/convention": "model", "perf/scope": "all 2 ranks"}


def step(number: int, mfu: float | None, **more: Any) -> dict[str, Any]:
    return {"type": "step", "time": 1.0, "global_step": number, "perf/mfu": mfu, "perf/step_time": 0.25,
            "perf/steps": 1, "perf/tokens_per_second": 32768.0, **CONTEXT, **more}  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Path:
    detail = {"perf/device_mfu": 0.5, "perf/hfu": 0.6, "perf/stragglers": [1], "dataset/code/loss": 1.5}
    goodput = {"share": 0.8, "elapsed_s": 100.0, "productive_s": 80.0, "lost_data_s": 5.0, "lost_start_s": 15.0,
               "lost_eval_s": 0.0}  # fmt: skip
    lines = [
        START, step(1, 0.3), START, step(1, 0.4), step(2, 0.45, **detail), step(3, None),
        {"type": "event", "message": "no\ncounters", "global_step": 2, "time": 1.0},
        {"type": "end", "time": 2.0, "steps": 3, "goodput": goodput},
    ]  # fmt: skip
    path = tmp_path / "flopcalc.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"type":"st')
    return path


def run(capsys: Capture, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["monitor", *arguments])
    out, err = capsys.readouterr()
    assert (end.value.code, err) == (0, "")
    return out


def fail(capsys: Capture, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["monitor", *arguments])
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    return err


def test_show(capsys: Capture, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(log.parent)  # a long path would be wrapped
    assert (
        run(capsys, "show", log.name)
        == f"""{log.name}: run 2 of 2, ended

model   tiny, parameters 1.50B
device  NVIDIA H200, bf16, peak 989.5 TFLOP/s
mode    smart, source smart: cupti at step 2, convention model
ranks   2, figures of all 2 ranks
steps   1 to 3, 3 records

                   mean     median       last
------------  ---------  ---------  ---------
MFU (wall)      42.50 %    42.50 %    45.00 %
MFU (device)    50.00 %    50.00 %    50.00 %
HFU             60.00 %    60.00 %    60.00 %
tokens/s       32,768.0   32,768.0   32,768.0
step time     250.00 ms  250.00 ms  250.00 ms

MFU  ▁█   40.00 % to 45.00 %

dataset      loss
---------  ------
code          1.5

goodput 80.00 % of 100.00 s; lost: start 15.00 s, data 5.00 s
slow ranks: 1
unreadable lines left out: 1 (a process was killed while it wrote)

warnings (1)
  step 2: no counters
"""
    )


def test_show_a_folder_a_run_and_its_tail(capsys: Capture, log: Path) -> None:
    found = json.loads(run(capsys, "show", str(log.parent), "--json"))
    assert (found["run"], found["metrics"]["mfu"]["records"], found["last_step"]) == (2, 2, 3)
    found = json.loads(run(capsys, "show", str(log), "--last", "2", "--json"))
    assert (found["records"], found["metrics"]["mfu"]["mean"]) == (2, 0.45)
    assert "MFU  ▄   45.00 % to 45.00 %" in run(capsys, "show", str(log), "--last", "2")
    text = run(capsys, "show", str(log), "--run", "1")
    assert "run 1 of 2, no end yet: still running, or killed" in text
    assert "goodput not known yet" in text


def test_show_of_a_run_that_has_only_begun(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(START | {"model": None, "parameters": None, "peak_flops_per_s": None}) + "\n")
    text = run(capsys, "show", str(path))
    assert "model   not known\n" in text
    assert "peak not known" in text
    assert "steps   none, 0 records" in text
    assert "None" not in text


def test_many_warnings_are_cut(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    events = [{"type": "event", "message": f"m{index}", "global_step": None} for index in range(25)]
    path.write_text("".join(json.dumps(line) + "\n" for line in (START, *events)))
    assert run(capsys, "show", str(path)).endswith("  m19\n  … and 5 more: --json lists all\n")
    assert len(json.loads(run(capsys, "show", str(path), "--json"))["events"]) == 25


def test_plot(capsys: Capture, log: Path) -> None:
    pytest.importorskip("matplotlib")
    target = log.parent / "mfu.png"
    assert run(capsys, "plot", str(log), "-o", str(target)) == f"written: {target}\n"
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "no.jsonl"], "no.jsonl: cannot be read: No such file or directory"),
        (["show"], "Missing argument 'LOG'"),
        (["show", "LOG", "--last", "0"], "0 is not in the range x>=1"),
        (["show", "LOG", "--run", "3"], "has no run 3: it holds 2"),
        (["plot", "LOG"], "Missing option '-o'"),
        (["plot", "LOG", "-o", "mfu.xyz"], "mfu.xyz: cannot be written: Format 'xyz' is not supported"),
    ],
)
def test_errors_are_one_line(capsys: Capture, log: Path, arguments: list[str], message: str) -> None:
    assert message in fail(capsys, *(str(log) if word == "LOG" else word for word in arguments))


def test_show_needs_nothing_heavy(log: Path) -> None:
    code = (
        "import sys\n"
        "from flopcalc.cli import main\n"
        f"try: main(['monitor', 'show', {str(log)!r}])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'lightning', 'wandb', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_show_reads_what_a_monitor_writes(capsys: Capture, tmp_path: Path) -> None:
    config = {"monitoring": {"mfu_calculation_mode": "estimate", "peak_flops_per_s": 1e30}}
    monitor = TrainingMonitor(tmp_path, config, model="llama-3.1-8b")
    for number in range(1, 6):
        with monitor.step({"input_ids": [[1] * 16]}) as step:
            step.log(loss=1.0, step=number)
    monitor.close()
    shown = run(capsys, "show", str(tmp_path))
    assert "llama-3.1-8b, parameters 8.03B" in shown
    assert "estimate" in shown
