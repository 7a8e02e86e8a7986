"""Notebooks: committed without outputs, and run whole on the shipped tables, on made-up ones and on none."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import notebook_run
import pytest

from flopcalc.hardware.tables import FOLDER, SHAPES, list_tables, save_table

NOTEBOOK = notebook_run.ROOT / "lab" / "calibration.ipynb"
DRAWN = ("attention", "counts", "gemm", "memory", "steps")  # tables with figures; padding is text


def execute(monkeypatch: pytest.MonkeyPatch, data: Path, device: str | None = None) -> tuple[dict[str, int], str]:
    monkeypatch.setenv("FLOPCALC_DATA", str(data))
    parameters = f"device = {device!r}" if device is not None else None
    return notebook_run.execute(monkeypatch, NOTEBOOK, data.parent, parameters)


def find_drawn(figures: dict[str, int]) -> set[str]:
    assert all(marks > 0 for marks in figures.values()), figures
    return {table for table in DRAWN if any(label.split()[0] == table for label in figures)}


def test_the_notebook_is_committed_clean() -> None:
    notebook_run.check_clean(NOTEBOOK)


@pytest.mark.heavy
def test_on_the_shipped_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = tmp_path / "data"
    monkeypatch.setenv("FLOPCALC_DATA", str(data))
    shipped = list_tables()
    tables = max(shipped.values(), key=len)
    figures, text = execute(monkeypatch, data)
    assert find_drawn(figures) == set(tables) & set(DRAWN)
    for name in SHAPES:
        assert (f"No {name} table" in text) is (name not in tables)


@pytest.mark.heavy
def test_a_device_without_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures, text = execute(monkeypatch, tmp_path / "data", "no-such-device")
    assert figures == {}
    assert "There are no tables of no-such-device" in text
    assert all(f"No {name} table of no-such-device" in text for name in SHAPES)


ABOUT = {
    "device": "Made Up",
    "device_id": "made-up",
    "date": "2026-11-15",
    "torch": "2",
    "command": "flopcalc calibrate",
}


@pytest.mark.heavy
def test_on_all_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every table at once, whatever is shipped; with gaps in it, as measuring leaves them."""
    folder = tmp_path / "data" / FOLDER / "made-up"
    for name in SHAPES:
        save_table(str(folder), name, ABOUT, make_rows(name))
    figures, text = execute(monkeypatch, tmp_path / "data", "made-up")
    assert find_drawn(figures) == set(DRAWN)
    assert "No " not in text
    assert "has no rows" not in text


@pytest.mark.heavy
def test_on_empty_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tables in which every row failed."""
    folder = tmp_path / "data" / FOLDER / "made-up"
    for name in SHAPES:
        save_table(str(folder), name, ABOUT, [], [{"row": "a", "reason": "oom", "detail": ""}])
    figures, text = execute(monkeypatch, tmp_path / "data", "made-up")
    assert figures == {}
    assert all(f"The {name} table of made-up has no rows" in text for name in SHAPES)


def make_rows(name: str) -> list[dict[str, Any]]:
    """A few rows of a table, some values missing."""
    both = ("forward", "backward")
    if name == "gemm":
        return [
            {"dtype": "bf16", "direction": direction, "m": m, "n": n, "k": 4096, "mode": mode, "seconds": 1e-3,
             "tflops": 300.0 + m / 64, "executed_flops": 2 * m * n * 4224 if m == 577 else None}
            for direction, m, n, mode in itertools.product(
                ("forward", "dgrad", "wgrad"), (512, 577, 2048), (1024, 4096), ("burst", "sustained"))
        ]  # fmt: skip
    if name == "attention":
        return [
            {"kernel": kernel, "qk_dim": dim, "v_dim": dim, "mask": mask, "length": length, "direction": direction,
             "batch": 1, "heads": 1, "seconds": 1e-3, "tflops": 200.0, "needed_flops": length * length * 2 * dim,
             "executed_flops": None if kernel == "eager" else length * (length + 128) * 2 * dim}
            for kernel, dim, mask, length, direction in itertools.product(
                ("eager", "flash"), (64, 128), ("causal", "full"), (512, 1024), both)
        ]  # fmt: skip
    if name == "memory":
        sizes = [
            {"op": op, "direction": direction, "bytes": size, "seconds": 1e-4, "gb_per_s": 1e3, "factor": 1.5}
            for op, direction, size in itertools.product(("copy", "add", "hf_rotary"), both, (1 << 20, 1 << 25))
        ]
        return [*sizes, {"op": "launch_queued", "direction": "forward", "bytes": 0, "seconds": 2e-6}]
    if name == "counts":
        return [
            {"family": family, "phase": "train", "seq": 2048, "batch": 1, "images": "", "kernel": kernel,
             "recompute": "none", "analytic_model": 90, "analytic_full": 110, "analytic_hardware": 100,
             "executed": 101, "flop_counter": 100, "profiler": 95 if kernel == "eager" else None, "ratio": 1.01}
            for family, kernel in itertools.product(("llama", "llava"), ("eager", "flash", "cudnn"))
        ]  # fmt: skip
    if name == "padding":
        return [
            {"family": "llama", "seq": 2048, "batch": 1, "images": "", "module": "lm_head", "kernel": "",
             "direction": "forward", "shape": "8x8x8", "needed_flops": 100, "executed_flops": 101, "calls": 2,
             "calls_recompute": 2}
        ]  # fmt: skip
    assert name == "steps", f"a new table: let {NOTEBOOK.name} show it, and make rows of it here"
    return [
        {"model": model, "batch": 1, "seq": 1024, "images": images, "attention": "sdpa", "recompute": recompute,
         "seconds": 0.1, "mfu": 0.4, "hfu": 0.5, "model_flops": 10**13, "hardware_flops": 10**13, "energy_j": energy}
        for model, images, recompute, energy in (("a", "", "none", 60.0), ("b", "1x36x52", "full", None))
    ]  # fmt: skip
