"""A log read back: runs, torn lines, nulls; the summary's means; sparklines and plots."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from flopcalc.base.errors import FlopcalcError
from flopcalc.monitor.log import Log, LoggedRun, load_log, plot, summarize
from flopcalc.report.monitor import sparkline

START: dict[str, Any] = {
    "type": "start", "schema": 1, "version": "0.1", "time": 1.0, "model": "tiny", "parameters": 1000, "device": "H200",
    "peak_flops_per_s": 1e12, "dtype": "bf16", "mode": "smart", "world": 2, "settings": {},
}  # fmt: skip


def step(number: int, mfu: float | None = 0.5, **more: Any) -> dict[str, Any]:
    return {"type": "step", "time": 1.0, "global_step": number, "perf/mfu": mfu, "perf/step_time": 1.0,
            "perf/steps": 1, **more}  # fmt: skip


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_runs_of_one_file(tmp_path: Path) -> None:
    event = {"type": "event", "message": "m", "global_step": 1, "time": 1.0}
    end = {"type": "end", "time": 2.0, "steps": 1}
    path = write(tmp_path / "a.jsonl", START, step(1), event, end, "\n", START, step(2))
    assert load_log(path) == Log(
        str(path), [LoggedRun(START, [step(1)], [event], end), LoggedRun(START, [step(2)], [], None)], 0
    )


@pytest.mark.parametrize(
    ("lines", "steps", "unreadable"),
    [
        ([START, step(1), '{"type":"step","glo'], [[1]], 1),  # killed while it wrote
        ([START, step(1), '{"type":"st\n', START, step(2)], [[1], [2]], 1),  # and started again
        ([step(7), step(8)], [[7, 8]], 0),  # only the tail of a log
        ([START, "[1]\n", '{"a": 1}\n', "\0\0\0\n", step(1)], [[1]], 3),
        ([START], [[]], 0),
        (['{"type":"event","message":"no GPU"}\n', START, step(1)], [[1]], 0),  # said before the model was known
        ([START, step(1), '{"type":"event","message":"x"}\n', START, step(2)], [[1], [2]], 0),
    ],
)
def test_what_a_crash_leaves_behind_is_read(
    tmp_path: Path, lines: list[Any], steps: list[list[int]], unreadable: int
) -> None:
    log = load_log(write(tmp_path / "a.jsonl", *lines))
    assert [[record["global_step"] for record in run.steps] for run in log.runs] == steps
    assert log.unreadable_lines == unreadable
    assert summarize(log)["records"] == len(steps[-1])


def test_a_folder_means_its_log(tmp_path: Path) -> None:
    write(tmp_path / "flopcalc.jsonl", START)
    assert load_log(tmp_path).path == str(tmp_path / "flopcalc.jsonl")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "not a monitor's log: it is empty"),
        (["hello\n"], "not a monitor's log: no line of it is a record"),
        ([{"loss": 1}], "not a monitor's log: no line of it is a record"),
        (
            [START | {"schema": 2, "version": "9.0"}],
            "line 1: schema 2 is not known, this flopcalc reads 1: use the version that wrote it ('9.0')",
        ),
    ],
)
def test_no_log(tmp_path: Path, lines: list[Any], message: str) -> None:
    path = write(tmp_path / "a.jsonl", *lines)
    with pytest.raises(FlopcalcError, match=f"^{re.escape(f'{path}: {message}')}$"):
        load_log(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FlopcalcError, match=r"no\.jsonl: cannot be read: No such file or directory\. Give a log, or"):
        load_log(tmp_path / "no.jsonl")
    with pytest.raises(FlopcalcError, match=r"flopcalc\.jsonl: cannot be read: No such file"):
        load_log(tmp_path)


def test_means_are_all_flops_over_all_time(tmp_path: Path) -> None:
    log = load_log(
        write(
            tmp_path / "a.jsonl",
            START,
            step(1, None),
            step(11, 0.2, **{"perf/steps": 10, "perf/step_time": 3.0}),
            step(21, 0.6, **{"perf/steps": 10, "perf/step_time": 1.0, "perf/hfu": 0.7}),
        )
    )
    found = summarize(log)
    mfu, times, hfu = (found["metrics"][name] for name in ("mfu", "step_time_s", "hfu"))
    assert mfu == {
        "mean": pytest.approx((0.2 * 30 + 0.6 * 10) / 40),
        "median": pytest.approx(0.4),
        "last": 0.6,
        "records": 2,
    }
    assert times["mean"] == pytest.approx((1 * 1 + 10 * 3 + 10 * 1) / 21)
    assert hfu == {"mean": 0.7, "median": 0.7, "last": 0.7, "records": 1}
    assert found["metrics"]["loss"] is None
    assert (found["first_step"], found["last_step"], found["records"]) == (1, 21, 3)
    assert summarize(log, last=1)["metrics"]["mfu"]["mean"] == 0.6
    json.dumps(found, allow_nan=False)


def test_a_mean_of_records_without_time_is_a_plain_one(tmp_path: Path) -> None:
    log = load_log(
        write(tmp_path / "a.jsonl", step(1, 0.2, **{"perf/step_time": None}), step(2, 0.4, **{"perf/step_time": None}))
    )
    assert summarize(log)["metrics"]["mfu"]["mean"] == pytest.approx(0.3)


def test_which_run(tmp_path: Path) -> None:
    log = load_log(write(tmp_path / "a.jsonl", START, step(1), START | {"model": "other"}, step(2)))
    assert [(summarize(log, run)["model"], summarize(log, run)["last_step"]) for run in (1, 2, None)] == [
        ("tiny", 1),
        ("other", 2),
        ("other", 2),
    ]
    for run in (0, 3):
        with pytest.raises(FlopcalcError, match=f"has no run {run}: it holds 2, and 1 is the first"):
            summarize(log, run)


def test_goodput_of_the_end_or_of_the_last_record(tmp_path: Path) -> None:
    lines = [START, step(1, **{"goodput/share": 0.5, "goodput/lost_data_s": 2.0}), step(2)]
    log = load_log(write(tmp_path / "a.jsonl", *lines))
    assert summarize(log)["goodput"] == {"share": 0.5, "elapsed_s": None, "lost_s": {"data": 2.0}}
    goodput = {"share": 0.75, "elapsed_s": 8.0, "productive_s": 6.0, "lost_start_s": 1.5, "lost_eval_s": 0.5}
    log = load_log(write(tmp_path / "a.jsonl", *lines, {"type": "end", "goodput": goodput}))
    assert summarize(log)["goodput"] == {"share": 0.75, "elapsed_s": 8.0, "lost_s": {"start": 1.5, "eval": 0.5}}
    assert summarize(load_log(write(tmp_path / "a.jsonl", START)))["goodput"] is None


def test_datasets_and_stragglers(tmp_path: Path) -> None:
    first = step(1, **{"dataset/a/b/loss": 2.0, "dataset/c/share": None, "perf/stragglers": [3]})
    log = load_log(write(tmp_path / "a.jsonl", START, first, step(2, **{"dataset/a/b/loss": 1.0})))
    found = summarize(log)
    assert found["datasets"] == {"a/b": {"loss": 1.0}}
    assert found["stragglers"] == [3]


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 10, ""),
        ([1.0], 10, "▄"),
        ([2.0, 2.0], 10, "▄▄"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 10, "▁▂▃▄▅▆▇█"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 4, "▁▃▆█"),
        ([0, None, 7, float("nan")], 10, "▁ █ "),
        ([None, None], 10, "  "),
    ],
)
def test_sparkline(values: list[float | None], width: int, expected: str) -> None:
    assert sparkline(values, width) == expected


@pytest.mark.heavy
def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    detail = {"perf/device_mfu": 0.6, "perf/hfu": 0.7, "training/loss": 2.0}
    log = load_log(write(tmp_path / "a.jsonl", START, step(1), step(2, **detail), START, step(2, None), step(3)))
    plot(log, tmp_path / "mfu.png")
    assert (tmp_path / "mfu.png").read_bytes().startswith(b"\x89PNG")
    plot(log, tmp_path / "mfu.svg")
    drawn = (tmp_path / "mfu.svg").read_text(encoding="utf-8")
    assert drawn.count("<!-- MFU (wall) -->") == 1  # two runs, one entry
    with pytest.raises(FlopcalcError, match=r"mfu\.xyz: cannot be written: Format 'xyz' is not supported"):
        plot(log, tmp_path / "mfu.xyz")
    with pytest.raises(FlopcalcError, match=r"mfu\.png: cannot be written: No such file or directory"):
        plot(log, tmp_path / "no" / "mfu.png")
    plot(load_log(write(tmp_path / "b.jsonl", START)), tmp_path / "empty.png")  # nothing to draw yet is no error


def test_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = load_log(write(tmp_path / "a.jsonl", START))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FlopcalcError, match=r"^a plot needs matplotlib: pip install 'flopcalc\[plot\]'$"):
        plot(log, tmp_path / "mfu.png")
