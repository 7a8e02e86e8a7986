"""benchmarks/monitor_overhead.py: it runs on a toy, writes every part, and judges goals as it says."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from tiny import list_hooks

SCRIPT = ROOT / "benchmarks" / "monitor_overhead.py"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module(name)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load("monitor_overhead", monkeypatch)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load("monitor_overhead_parts", monkeypatch)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load("monitor_overhead_loop", monkeypatch)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load("monitor_overhead_tables", monkeypatch)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def show_without_torch(path: Path) -> str:
    code = (
        "import os, runpy, sys; sys.modules['torch'] = None; script, path = sys.argv[1:]; "
        "sys.path.insert(0, os.path.dirname(script)); "
        "sys.argv = [script, '--show', path]; runpy.run_path(script, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(SCRIPT), str(path)], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


@pytest.mark.heavy
@pytest.mark.usefixtures("on_cpu")
def test_toy_run_writes_every_part(
    script: Any, tables: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--out", str(tmp_path), "--models", "0.5b", "--steps", "2", "--tiny"]) == 0
    path = tmp_path / script.NAME
    found = json.loads(path.read_text())
    assert list(found) == ["schema", "promised_percent", *tables.PARTS, "goals"]
    assert all(row["model"] == "0.5b" for part in (*tables.PARTS, "goals") for row in found[part])
    (about,) = found["provenance"]
    assert about["command"] == "python benchmarks/monitor_overhead.py --models 0.5b --steps 2 --budget-s 840 --tiny"
    assert {"device", "torch", "commit", "date", "parameters"} <= set(about)
    assert {row["arm"]: row["steps"] for row in found["arms"]} == {"none": 2, "none2": 2, "estimate": 2, "smart": 2}
    assert [(row["loop"], row["mode"], row["what"]) for row in found["host"]] == [
        ("plain loop", "smart", "mask on the device"),
        ("plain loop", "estimate", "mask on the device"),
        ("plain loop", "estimate", "no mask"),
        ("plain loop", "smart", "the same mask in every step"),
        ("Trainer", "smart", "mask on the device"),
    ]
    assert all(row["plain_us_median"] > 0 and row["steps"] == 2 for row in found["host"])
    assert [(row["mode"], row["source"].endswith(" at step 10")) for row in found["measured"]] == [
        ("smart", True),
        ("hybrid", True),
        ("profiler", True),
    ]
    assert [row["failures"] for part in ("host", "measured", "agreement") for row in found[part]] == [[]] * 9
    (agreement,) = found["agreement"]
    assert agreement["reported_step_ms"] > 0
    assert agreement["ratio"] is None
    assert agreement["reason"] == "CountersUnavailable: no CUDA device here"
    assert [row["part"] for row in found["problems"]] == [
        "waiting, no mask",
        "waiting, mask on the device",
        "waiting, image_grid_thw on the device",
    ]
    assert [row["met"] for row in found["goals"]] == [None] * 7
    assert capsys.readouterr().out.endswith(show_without_torch(path))


def make_results(tables: Any, **changes: Any) -> dict[str, Any]:
    """A run that meets every goal, but for the changes."""
    given = {
        "host_us": 120.0, "trainer_us": 140.0, "difference_us": 40.0, "noise_us": -30.0, "extra_ms": 20.0,
        "ratio": 1.002, "raised": [], "control": True, "is_tiny": False, **changes,
    }  # fmt: skip
    results: dict[str, Any] = tables.make_results()
    differences = {"none": 0.0, "none2": given["noise_us"], "estimate": given["difference_us"], "smart": 10.0}
    rows: dict[str, list[dict[str, Any]]] = {
        "provenance": [{"is_tiny": given["is_tiny"]}],
        "arms": [
            {"arm": arm, "steps": 100, "step_us_mean": 1e5, "difference_us": value, "difference_se_us": 10.0}
            for arm, value in differences.items()
        ],
        "host": [
            {"loop": loop, "mode": mode, "what": tables.MASK, "steps": 50, "host_us_mean": given[key],
             "host_us_se": 3.0, "host_us_median": 100.0}
            for loop, key in (("plain loop", "host_us"), ("Trainer", "trainer_us"))
            for mode in tables.MODES
        ],
        "measured": [{"mode": mode, "source": "cupti", "extra_ms": given["extra_ms"]} for mode in ("smart", "hybrid")],
        "agreement": [{"ratio": given["ratio"], "reason": None}],
        "waiting": [
            {"what": str(at), "raised": given["raised"], "control_raised": given["control"], "mfu_is_known": True}
            for at in range(3)
        ],
    }  # fmt: skip
    for part, found in rows.items():
        results[part] = [{"model": "1b", **row} for row in found]
    return results


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"host_us": 150.0}, []),
        ({"host_us": 150.1}, ["host time of a step, plain loop"]),
        ({"trainer_us": 150.1}, ["host time of a step, Trainer"]),
        ({"difference_us": 50.0}, []),
        ({"difference_us": 50.1}, ["estimate: step time beyond none"]),
        ({"difference_us": -900.0}, []),
        ({"extra_ms": 180.0}, []),
        ({"extra_ms": 250.0}, ["smart: over 2,000 steps"]),
        ({"ratio": 0.98}, ["reported HFU against counted FLOPs ÷ time"]),
        ({"raised": ["fail see"]}, ["waits for the device"]),
    ],
)
def test_goals(tables: Any, changes: dict[str, Any], missed: list[str]) -> None:
    goals = tables.judge(make_results(tables, **changes))
    assert [row["goal"] for row in goals if row["met"] is False] == missed
    assert len([row for row in goals if row["met"]]) == 7 - len(missed)


@pytest.mark.parametrize(
    ("changes", "goal"),
    [
        ({"ratio": None}, "reported HFU against counted FLOPs ÷ time"),
        ({"control": False}, "waits for the device"),
        ({"host_us": None}, "host time of a step, plain loop"),
    ],
)
def test_what_was_not_measured_is_not_judged(tables: Any, changes: dict[str, Any], goal: str) -> None:
    goals = tables.judge(make_results(tables, **changes))
    assert goal in [row["goal"] for row in goals if row["met"] is None]
    assert [row["met"] for row in tables.judge(make_results(tables, is_tiny=True, **changes))] == [None] * 7


def test_a_model_is_timed_without_its_own_forward(parts: Any) -> None:
    model = torch.nn.Identity()
    timed = parts.TimedForward(model)
    timed.begin()
    assert model(5) == 5
    assert timed.end() > 0
    assert model.forward == timed._run
    timed.restore()
    assert "forward" not in vars(model)


def test_host_time_is_a_difference_of_means(parts: Any) -> None:
    times = parts.HostTimes()
    for call_us, log_us, is_watched in [(900, 900, True), (5, 0, False), (30, 20, True), (6, 2, False), (50, 40, True)]:
        times.is_watched = is_watched
        times.add(1000 * call_us, 1000 * log_us)
    times.is_watched = False
    times.add(4000, 0)
    found = times.describe(1)
    assert (found["steps"], found["host_us_mean"], found["host_us_median"]) == (2, 70 - 6, 70 - 6)
    assert (found["call_us_mean"], found["log_us_mean"]) == (40 - 5, 30 - 1)
    assert found["host_us_se"] == pytest.approx((20**2 + 2**2) ** 0.5)


def test_waits_are_refused_but_in_a_models_own_forward(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    model = torch.nn.Identity()
    model.register_forward_hook(lambda *_: modes.append("hook"))
    strict = parts.StrictCall(model)
    assert strict(input=5) == 5
    assert modes == ["error", "default", "error", "hook", "default"]
    assert strict.restore() is model


def test_what_a_monitor_hangs_on_a_model_is_hidden_and_back(loops: Any, tmp_path: Path) -> None:
    loop = loops.Loop(loops.TINY, loops.Place(False), str(tmp_path))
    with loops.watch(loop, "estimate") as watching:
        assert len(list_hooks(loop.model)) == 2
        watching.hide()
        assert list_hooks(loop.model) == []
        watching.show()
        assert len(list_hooks(loop.model)) == 2
    assert list_hooks(loop.model) == []


def test_share_is_host_time_and_four_measured_steps(tables: Any) -> None:
    results = make_results(tables)
    assert tables.find_share_percent(results, "1b", "estimate") == pytest.approx(100 * 120 / 1e5)
    assert tables.find_share_percent(results, "1b", "smart") == pytest.approx(100 * (120 * 2000 + 4 * 20e3) / 2e8)


def test_difference_is_taken_round_by_round(parts: Any) -> None:
    times = {"none": {0: 9.0, 1: 9.0, 2: 1.0, 3: 2.0}, "smart": {0: 1.0, 1: 1.0, 2: 1.5, 3: 2.25}}
    bare = {"none": times["none"], "smart": {0: 1.0, 1: 1.0, 2: 1.25, 3: 2.0}}
    row = parts.describe_arm("smart", 25, 2, times, bare)
    assert (row["blocks"], row["steps"], row["step_us_mean"]) == (2, 50, 1_875_000.0)
    assert (row["difference_us"], row["difference_percent"]) == (375_000.0, 25.0)
    assert row["difference_se_us"] == pytest.approx(125_000.0, rel=1e-12)
    assert row["difference_without_threads_us"] == 125_000.0


def test_files_are_joined_by_model(script: Any, tables: Any, tmp_path: Path) -> None:
    paths = []
    for at, (model, value) in enumerate((("1b", 1.0), ("0.5b", 2.0), ("1b", 3.0))):
        results = tables.make_results()
        results["problems"] = [{"model": model, "part": "host time", "reason": str(value)}]
        results["provenance"] = [
            {"model": model, "is_tiny": True, "parameters": 1, "rows": 1, "length": 1, "device": "x", "torch": "2",
             "date": "2026-01-01"}
        ]  # fmt: skip
        paths.append(str(tmp_path / f"{at}.json"))
        tables.write_results(results, paths[-1])
    assert script.main(["--out", str(tmp_path), "--join", *paths]) == 0
    found = json.loads((tmp_path / script.NAME).read_text())
    assert [(row["model"], row["reason"]) for row in found["problems"]] == [("0.5b", "2.0"), ("1b", "3.0")]


def test_the_page_shows_the_committed_results(script: Any, tmp_path: Path) -> None:
    committed = (ROOT / "docs/monitor-cost.md").read_text()
    page = tmp_path / "monitor.md"
    page.write_text(committed)
    script.main(["--show", str(ROOT / "benchmarks/results" / script.NAME), "--page", str(page)])
    assert page.read_text() == committed


@pytest.mark.parametrize("text", ["no comments", "<!-- Begin of the measured figures. -->\n"])
def test_a_page_without_its_comments_is_left_alone(tables: Any, text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(SystemExit, match="needs the lines"):
        tables.write_page(str(page), "| a |")
    assert page.read_text() == text


def test_history_holds_what_was_not_measured_again(tables: Any) -> None:
    first = {"commit": "a"}  # every part
    second = {"commit": "b", "parts": ["host", "arms"], "before": first}
    third = {"commit": "c", "parts": ["host"], "before": second}
    assert tables.trim_history(None, ["host"]) is None
    assert tables.trim_history(third, ["host"]) == {**second, "before": {**first, "before": None}}
    assert tables.trim_history(third, ["host", "arms"]) == {**first, "before": None}
    assert tables.trim_history(third, tables.MEASURED_PARTS) is None
