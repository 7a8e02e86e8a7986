"""A sweep's summary: ratios against the standard trainer, rates, failures; as values, text and picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flopcalc.measure.sweep.summary import plot, summarize
from flopcalc.report.sweep import describe_setting, format_summary

Json = dict[str, Any]
SETTINGS = {"dtype": "bf16", "device": "cuda", "attention": "sdpa", "steps": 10, "warmup": 3}


def row(trainer: str, seconds: float, gib: int, flops: int, **more: Any) -> Json:
    return {
        "id": f"{trainer}_bs4_seq512", "status": "ok", "trainer": trainer, "model": "1b", "batch_size": 4,
        "seq_len": 512, **SETTINGS, "parameters": 1000,
        "step_time_s": {"median": seconds, "p10": seconds, "p90": 1.5 * seconds},
        "tokens_per_s": 2048 / seconds, "peak_memory_bytes": gib << 30, "flops": {"total": flops},
        "counted_over_analytic": 1.0, "measured_over_analytic": 1.02, "mfu": 0.5, "hfu": 0.625,
        "environment": {"device": "NVIDIA H200", "torch": "2.11"}, **more,
    }  # fmt: skip


def failed(trainer: str, **more: Any) -> Json:
    return {
        "id": f"{trainer}_bs8_seq512", "status": "failed", "trainer": trainer, "model": "1b", "batch_size": 8,
        "seq_len": 512, **SETTINGS, "reason": "oom", "detail": "OutOfMemoryError: 90 GiB", **more,
    }  # fmt: skip


ROWS = [
    row("StandardTrainer", 0.5, 2, 10**12),
    row("DPSGDTrainer", 1.0, 6, 13 * 10**11),
    row("StandardTrainer", 1.0, 2, 2 * 10**12, batch_size=8),
    row("DPSGDTrainer", 8.0, 12, 26 * 10**11, batch_size=8),
    failed("DPGhostClippingTrainer"),
]


def test_values() -> None:
    found = summarize(ROWS)
    assert (found["total"], found["ok"], found["failed"], found["success_rate"]) == (5, 4, 1, 0.8)
    assert found["memory"] == {"mean_bytes": (22 << 30) // 4, "peak_bytes": 12 << 30}
    assert list(found["trainers"]) == ["StandardTrainer", "DPSGDTrainer", "DPGhostClippingTrainer"]
    hooks = found["trainers"]["DPSGDTrainer"]
    assert hooks["slowdown"] == {"mean": pytest.approx(4.0), "min": 2.0, "max": 8.0}
    assert hooks["memory_over_standard"]["max"] == 6.0
    assert hooks["flops_over_standard"]["mean"] == pytest.approx(1.3)
    assert hooks["memory"] == {"mean_bytes": 9 << 30, "peak_bytes": 12 << 30}
    ghost = found["trainers"]["DPGhostClippingTrainer"]
    assert (ghost["total"], ghost["ok"], ghost["success_rate"]) == (1, 0, 0.0)
    assert ghost["slowdown"] is ghost["memory"]["peak_bytes"] is None
    assert [entry["slowdown"] for entry in found["configurations"]] == [1.0, 2.0, 1.0, 8.0, None]
    assert found["failures"] == [
        {"id": "DPGhostClippingTrainer_bs8_seq512", "reason": "oom", "detail": "OutOfMemoryError: 90 GiB"}
    ]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 2},
        {"seq_len": 2},
        {"model": "tiny"},
        {"dtype": "fp32"},
        {"attention": "eager"},
        {"device": "cpu"},
        {"steps": 3},
        {"status": "failed"},
        {"environment": {"device": "NVIDIA H100"}},
    ],
)
def test_only_like_is_compared_with_like(changes: Json) -> None:
    found = summarize([{**ROWS[0], **changes}, ROWS[1]])
    assert found["configurations"][1]["slowdown"] is None
    assert found["trainers"]["DPSGDTrainer"]["slowdown"] is None


@pytest.mark.parametrize(("device", "is_compared"), [("cpu", False), ("cuda", True)])
def test_cores_count_on_a_cpu(device: str, is_compared: bool) -> None:
    """Slots and launchers share the cores out, and a process with half of them is no slower trainer."""
    rows = [
        {**each, "device": device, "environment": {"device": "x", "threads": threads}}
        for each, threads in zip(ROWS[:2], (4, 2), strict=True)
    ]
    assert (summarize(rows)["configurations"][1]["slowdown"] is not None) is is_compared


def test_nothing_measured() -> None:
    found = summarize([])
    assert (found["total"], found["success_rate"], found["trainers"]) == (0, None, {})
    assert format_summary(found) == "0 configurations: 0 ok, 0 failed"
    only = format_summary(summarize([failed("DPSGDTrainer")]))
    assert "mean memory" not in only  # a column of which nothing is known
    assert "DPSGDTrainer_bs8_seq512: oom: OutOfMemoryError: 90 GiB" in only


def test_a_failure_of_several_lines_stays_one_entry() -> None:
    for style, mark in (("simple", "  "), ("github", "- ")):
        text = format_summary(summarize([failed("DPSGDTrainer", detail="no answer\nlast words")]), style)
        assert text.endswith(f"\n{mark}DPSGDTrainer_bs8_seq512: oom: no answer\n    last words")


def test_notes_say_whose_they_are() -> None:
    every, some = "analytic: kernel cudnn", "no TensorBoard run written"
    rows = [{**ROWS[0], "notes": [every]}, {**ROWS[1], "notes": [every, some]}, ROWS[4]]
    assert (
        "\n\nnotes\n  analytic: kernel cudnn\n  DPSGDTrainer_bs4_seq512: no TensorBoard run written\n\nfailures\n"
        in (format_summary(summarize(rows)))
    )
    assert "\n\nnotes:\n\n- analytic: kernel cudnn\n- DPSGDTrainer_" in format_summary(summarize(rows), "github")


def test_only_columns_that_are_there_are_explained() -> None:
    assert "measured ÷: the GPU's own counters" in format_summary(summarize(ROWS))
    assert "measured ÷" not in format_summary(summarize([{**ROWS[0], "measured_over_analytic": None}]))


@pytest.mark.parametrize("width", [60, 80, 120, 500])
def test_tables_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Folded, not cut: all cells are there, below each other, and each part names its rows."""
    rows = [*ROWS[:4], row("DPFastGradientClippingTrainer", 1.0, 6, 10**12)]
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = format_summary(summarize(rows))
    monkeypatch.setenv("COLUMNS", str(width))
    text = format_summary(summarize(rows))
    assert max(map(len, text.splitlines())) <= width
    assert set(whole.split()) <= set(text.split()) | {word for word in whole.split() if "--" in word}
    tables = [block.splitlines()[0].split() for block in text.split("\n\n") if "\n--" in block]
    assert all(header[0] == "trainer" for header in tables)
    assert (text.count("\n--") == whole.count("\n--") == 2) is (width == 500)


HERE = Path(__file__).parent


@pytest.mark.parametrize(("style", "name"), [("simple", "sweep_summary.txt"), ("github", "sweep_summary.md")])
def test_text(style: str, name: str) -> None:
    assert format_summary(summarize(ROWS), style) + "\n" == (HERE / name).read_text(encoding="utf-8")


def test_models_and_machines_each_have_a_line() -> None:
    rows = [ROWS[0], {**ROWS[0], "model": "tiny", "parameters": None}, {**ROWS[1], "environment": None}, ROWS[4]]
    assert describe_setting(rows) == [
        "1b, 1,000 parameters; bf16 on NVIDIA H200, attention sdpa, torch 2.11",
        "tiny; bf16 on NVIDIA H200, attention sdpa, torch 2.11",
        "1b, 1,000 parameters; bf16 on cuda, attention sdpa",
    ]
    assert "tiny" in format_summary(summarize(rows)).split("\n\n")[3]


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        [],
        [ROWS[4]],
        [ROWS[0], {**ROWS[0], "model": "tiny"}],
        [{"id": "a", "status": "ok", "trainer": "t", "model": "m"}],
    ],
)
def test_plot(tmp_path: Path, rows: list[Json]) -> None:
    pytest.importorskip("matplotlib")
    plot(summarize(rows), tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


def test_a_bar_for_each_row_that_was_measured() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    from flopcalc.measure.sweep.summary import draw

    figure = figures.Figure(layout="constrained")
    draw(figure, summarize(ROWS))
    assert [len(axes.patches) for axes in figure.axes] == [4, 4, 4]
    assert [patch.get_height() for patch in figure.axes[0].patches] == [0.5, 1.0, 1.0, 8.0]


def test_plots_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from flopcalc.measure.sweep.matrix import SweepError

    with pytest.raises(SweepError, match="cannot be written: Format 'xyz' is not supported"):
        plot(summarize(ROWS), tmp_path / "cost.xyz")
    with pytest.raises(SweepError, match="cannot be written: No such file"):
        plot(summarize(ROWS), tmp_path / "no" / "cost.png")
